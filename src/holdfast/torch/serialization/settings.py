"""The switches that torch's users know, and the small helpers that torch has beside them.

A switch is stored where torch stores it: in `torch.utils.serialization.config` for the process, in a thread-local of torch for one
thread. So a program may set it with torch's function or with ours, and both libraries see it:

    set_default_load_endianness   config.load.endianness       files without a byte-order mark
    set_default_mmap_options      config.load.mmap_flags       private or shared mappings
    set_crc32_options             config.save.compute_crc32    checksums in what is saved
    skip_data                     the thread-local             neither write nor read the bytes of storages
"""

from __future__ import annotations

import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType, TracebackType
from typing import cast

import torch

# torch's own class: comparisons with enum members are by identity.
from torch.serialization import LoadEndianness
from torch.serialization import _serialization_tls as local
from torch.utils.serialization import config

from holdfast.errors import HoldfastWarning, Refused
from holdfast.stores.platform import MAP_PRIVATE, MAP_SHARED

DEFAULT_PROTOCOL = 2
"""The pickle protocol of a save. torch's `weights_only` loader reads no opcode of protocol 4 and up."""

MAGIC_NUMBER = 0x1950A86A20F9469CFC6C
"""The first pickle of the legacy container."""

PROTOCOL_VERSION = 1001
"""Its second pickle, and the `protocol_version` record of the tar container."""

STORAGE_KEY_SEPARATOR = ","
"""Between the parts of a storage's key in the legacy container."""


def get_default_load_endianness() -> LoadEndianness | None:
    """The byte order of files that do not record theirs; None, as it is at first, means little."""
    return config.load.endianness


def set_default_load_endianness(endianness: LoadEndianness | None) -> None:
    """Set the byte order of files that do not record theirs."""
    if endianness is not None and not isinstance(endianness, LoadEndianness):
        raise TypeError(
            "Invalid argument type in function set_default_load_endianness: "
            f"a LoadEndianness or None is wanted, not a {type(endianness).__name__}"
        )
    config.load.endianness = endianness


def get_crc32_options() -> bool:
    """Whether a save records a checksum for each record; it does at first."""
    return config.save.compute_crc32


def set_crc32_options(compute_crc32: bool) -> None:
    """Set whether a save records a checksum for each record. Without, nobody can tell a damaged file from a whole one."""
    config.save.compute_crc32 = bool(compute_crc32)


def get_default_mmap_options() -> int | None:
    """How a load with `mmap=True` maps a file; `mmap.MAP_PRIVATE` at first."""
    return config.load.mmap_flags


class set_default_mmap_options:  # noqa: N801 (torch's name)
    """Map files `mmap.MAP_PRIVATE` or `mmap.MAP_SHARED` from now on; used with `with`, until the block ends.

    With a shared mapping, writing to a loaded tensor writes to the file.
    """

    def __init__(self, flags: int) -> None:
        if MAP_PRIVATE is None:
            raise RuntimeError(
                "this system maps files in one way only: changing the default mmap options is not supported here"
            )
        if flags not in (MAP_PRIVATE, MAP_SHARED):
            raise ValueError(
                "Invalid argument in function set_default_mmap_options, "
                f"expected mmap.MAP_PRIVATE or mmap.MAP_SHARED, but got {flags!r}"
            )
        self._before = config.load.mmap_flags
        config.load.mmap_flags = flags

    def __enter__(self) -> None:
        return None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        config.load.mmap_flags = self._before


class skip_data:  # noqa: N801 (torch's name)
    """While active in this thread, a save leaves room for the bytes of storages and a load leaves storages unfilled.

    With `materialize_fake_tensors`, a save treats fake tensors as real ones whose bytes are still missing.
    """

    def __init__(self, materialize_fake_tensors: bool = False) -> None:
        self.materialize_fake_tensors = materialize_fake_tensors
        self._before: list[tuple[bool, bool]] = []
        """The values before each open block: the same object may be entered again inside of itself."""

    def __enter__(self) -> None:
        self._before.append((local.skip_data, local.materialize_fake_tensors))
        local.skip_data = True
        local.materialize_fake_tensors = self.materialize_fake_tensors

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        local.skip_data, local.materialize_fake_tensors = self._before.pop()


@contextmanager
def mkdtemp() -> Iterator[str]:
    """A new folder that is gone, with what is in it, when the block ends."""
    with tempfile.TemporaryDirectory() as path:
        yield path


def check_module_version_greater_or_equal(
    module: ModuleType, req_version_tuple: Sequence[int | str], error_if_malformed: bool = True
) -> bool:
    """Whether a module's `__version__` is at least the one given, compared field by field in the types of those given.

    A version with fewer fields, or with fields that are no such type, is malformed: `Refused`, or, where it is not to be an
    error, a warning and the answer yes.
    """
    version = getattr(module, "__version__", None)
    fields = version.split(".") if isinstance(version, str) else []
    try:
        found = tuple(
            type(wanted)(field) for wanted, field in zip(req_version_tuple, fields, strict=False)
        )
    except ValueError:
        found = ()
    if len(found) == len(req_version_tuple):
        return found >= tuple(req_version_tuple)
    message = (
        f"'{module.__name__}' module version string is malformed '{version}' and cannot be compared"
        f" with tuple {tuple(req_version_tuple)}"
    )
    if error_if_malformed:
        raise Refused(message, expected=tuple(req_version_tuple), found=version)
    warnings.warn(
        f"{message}, but continuing assuming that requirement is met", HoldfastWarning, stacklevel=2
    )
    return True


def normalize_storage_type(storage_type: type) -> type:
    """The class of CPU storages that has the name of the one given: `torch.FloatStorage` for `torch.cuda.FloatStorage`."""
    found: type = getattr(torch, storage_type.__name__)
    return found


def storage_to_tensor_type(storage: object) -> type:
    """The old tensor class over a storage: `torch.FloatTensor` for a storage of float32 on the CPU.

    Raises AttributeError where torch has no such class: for an untyped storage, and for the dtypes that are younger than it.
    """
    kind = type(storage)
    module, name = kind.__module__, kind.__name__
    if isinstance(storage, torch.storage.TypedStorage):
        # An instance never has the class that names its dtype; that name is what a pickle calls it.
        device = storage._untyped_storage.device.type
        module = "torch" if device == "cpu" else f"torch.{device}"
        name = cast(str, storage._pickle_storage_type())
    found: type = getattr(sys.modules[module], name.replace("Storage", "Tensor"))
    return found
