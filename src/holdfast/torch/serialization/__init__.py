"""A drop-in for `torch.save` and `torch.load`, in both containers.

save                  what `torch.save` does
load, legacy_load     what `torch.load` does; `opening` turns what it is given into a source
pickling              by the caller's pickle module: all that is saved, and what `weights_only=False` loads
weights               the interpreter's table for `weights_only`: `rebuild` builds, `allowed` says what may be built, `refusals`
                      what is said otherwise
storages, locations   the storages of a file: found, put on their devices, filled
settings, patching    torch's switches; `install()`
"""
