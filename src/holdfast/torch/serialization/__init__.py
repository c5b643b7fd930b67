"""A drop-in for `torch.save` and `torch.load`.

save, load            what `torch.save` and `torch.load` do, in both containers; `opening` has the argument of `load` as a source
pickling              by the caller's pickle module: all that is saved, and what `weights_only=False` loads
weights               the interpreter's table for `weights_only`: `rebuild` builds, `allowed` lists what may be built, `refusals`
                      has the errors
storages, locations   the storages of a file: found, put on their devices, filled
settings, patching    torch's switches; `install()`
"""
