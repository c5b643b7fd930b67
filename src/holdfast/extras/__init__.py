"""Products on top of the kernel: runs, reports, pruning, packages, layout maps and files of ranks.

An extra uses the modules of the kernel and the torch adapter, and no other extra. The kernel works
without this folder; it reaches an extra only by name, through `holdfast.core.registry`.
"""
