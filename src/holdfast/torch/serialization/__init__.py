"""A drop-in for `torch.save` and `torch.load`, and for all that `torch.serialization` has beside them.

saving, loading       what `torch.save` and `torch.load` do, in both containers; `opening` has the argument of `load` as a source
pickling              by the caller's pickle module: all that is saved, and what `weights_only=False` loads
weights               the interpreter's table for `weights_only`: `rebuild` builds, `allowed` lists what may be built, `refusals`
                      has the errors
storages, locations   the storages of a file: found, put on their devices, filled
settings, patching    torch's switches; `install()`
"""

from torch.serialization import LoadEndianness, SourceChangeWarning, StorageType

from holdfast.torch.serialization.allowed import (
    add_safe_globals,
    clear_safe_globals,
    get_safe_globals,
    get_unsafe_globals_in_checkpoint,
    safe_globals,
)
from holdfast.torch.serialization.loading import load
from holdfast.torch.serialization.locations import (
    default_restore_location,
    location_tag,
    register_package,
    validate_cuda_device,
    validate_hpu_device,
)
from holdfast.torch.serialization.saving import save
from holdfast.torch.serialization.settings import (
    DEFAULT_PROTOCOL,
    MAGIC_NUMBER,
    PROTOCOL_VERSION,
    STORAGE_KEY_SEPARATOR,
    check_module_version_greater_or_equal,
    get_crc32_options,
    get_default_load_endianness,
    get_default_mmap_options,
    mkdtemp,
    normalize_storage_type,
    set_crc32_options,
    set_default_load_endianness,
    set_default_mmap_options,
    skip_data,
    storage_to_tensor_type,
)

__all__ = [
    "DEFAULT_PROTOCOL",
    "MAGIC_NUMBER",
    "PROTOCOL_VERSION",
    "STORAGE_KEY_SEPARATOR",
    "LoadEndianness",
    "SourceChangeWarning",
    "StorageType",
    "add_safe_globals",
    "check_module_version_greater_or_equal",
    "clear_safe_globals",
    "default_restore_location",
    "get_crc32_options",
    "get_default_load_endianness",
    "get_default_mmap_options",
    "get_safe_globals",
    "get_unsafe_globals_in_checkpoint",
    "load",
    "location_tag",
    "mkdtemp",
    "normalize_storage_type",
    "register_package",
    "safe_globals",
    "save",
    "set_crc32_options",
    "set_default_load_endianness",
    "set_default_mmap_options",
    "skip_data",
    "storage_to_tensor_type",
    "validate_cuda_device",
    "validate_hpu_device",
]
