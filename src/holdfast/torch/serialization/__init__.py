"""A drop-in for `torch.save` and `torch.load`, in both containers.

save, legacy_save            what `torch.save` does; `pickling` sets the storages apart
load, legacy_load            what `torch.load` does; `opening` turns what it is given into a source
weights                      the interpreter's table for `weights_only`: `rebuild`, `composite_tensors` build, `allowed`,
                             `known_globals` and `names` say what may be built, `refusals` what is said otherwise
unpickling                   `weights_only=False`
storages, locations, devices the storages of a file: found, put on their devices, filled
settings, patching           torch's switches; `install()`
"""
