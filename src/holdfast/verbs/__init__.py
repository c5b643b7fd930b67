"""What users do with checkpoints: open, save, convert, edit, copy, reshard, verify, diff, scan and stats.

Each verb is a module with helpers beside it. `shared/` has what several verbs need, `scanning/` the
readers of `scan`, `seals/` the documents that record that a folder is complete.
"""
