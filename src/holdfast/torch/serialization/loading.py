"""`load`: what `torch.load` does, on the closed interpreter, with checksums compared and reads in parallel.

1. The first bytes say what the file is: a zip (a TorchScript one is refused or left to `torch.jit`), a safetensors file (by
   its name), the tar of torch 0.1, or the stream that torch wrote before 1.6: five pickles, and raw storages behind them.
2. The pickle is read: by the closed interpreter with a table of torch's objects (`weights_only=True`), or by the caller's pickle
   module, which runs what the file says.
3. Storages are filled at the end, all at once (storages.py); before code of the file's choice runs, where it may look at them.

In a stream, the bytes of storages come after the object that uses them. The closed interpreter always reads it first, to find which
storages there are, and where (formats/torch/legacy.py). They are compared with the file before anything is allocated.
"""

from __future__ import annotations

import difflib
import inspect
import os
import pickle
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from types import ModuleType
from typing import cast

import torch
from torch.serialization import LoadEndianness, SourceChangeWarning
from torch.serialization import _serialization_tls as local
from torch.utils.serialization import config

from holdfast.core.chunk import Storage, StorageRange
from holdfast.core.limits import Limits
from holdfast.core.opaque import AnyValue
from holdfast.core.runtime import gc_paused
from holdfast.core.tensor import NO_CRC
from holdfast.core.text import escape
from holdfast.core.value import replace
from holdfast.errors import (
    Corrupted,
    HoldfastError,
    MetadataError,
    Refused,
    Replaced,
    Truncated,
    ZipError,
)
from holdfast.formats.detect import begins_like_tar
from holdfast.formats.pickle.machine import interpret_whole
from holdfast.formats.torch.legacy import (
    OBJECT,
    CutShort,
    NotTorch,
    read_stream,
    read_tar,
)
from holdfast.formats.torch.zip import PICKLE, describe
from holdfast.formats.zip.layout import END, STORED, Archive, ZipRecord
from holdfast.formats.zip.reader import read_archive, record_bytes
from holdfast.stores.platform import MAP_SHARED
from holdfast.torch.serialization.opening import KEY, OpenedFile, opened
from holdfast.torch.serialization.pickling import check_pickle_module, unpickle
from holdfast.torch.serialization.refusals import refusal
from holdfast.torch.serialization.storages import LazyStorages, as_text, untyped_dtypes
from holdfast.torch.serialization.weights import WeightsTable

MapLocation = (
    Callable[[torch.UntypedStorage, str], torch.UntypedStorage | None]
    | torch.device
    | str
    | dict[str, str]
    | None
)

FORCE, FORCE_NOT = "TORCH_FORCE_WEIGHTS_ONLY_LOAD", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"
YES = ("1", "y", "yes", "true")

SCRIPT = (
    "Cannot use ``weights_only=True`` with TorchScript archives passed to ``torch.load``. A TorchScript archive is a program: if "
    "you trust it, pass weights_only=False or call torch.jit.load; its weights alone are read by holdfast.open"
)
MMAP_ZIP = (
    "mmap can only be used with files saved with `torch.save(_use_new_zipfile_serialization=True)`, which is the default: please "
    "save the checkpoint again in order to use mmap."
)
LIKELY = (
    "there is a high likelihood that your checkpoint file is corrupted: get it or save it again"
)
HEAD_NBYTES = 512
"""First bytes of a file by which it is recognised."""

LIMITS = Limits()
MAX_VERSION = 10
"""The newest version of archives, in torch up to 2.15."""


def load(
    f: object,
    map_location: MapLocation = None,
    pickle_module: ModuleType | None = None,
    *,
    weights_only: bool | None = None,
    mmap: bool | None = None,
    verify: bool = True,
    max_host_memory: int | None = None,
    **pickle_load_args: object,
) -> AnyValue:
    """Load what `torch.save` wrote, as `torch.load` does.

    With `weights_only` (the default) nothing in the file is run and no content of it makes this hang, crash or allocate more
    than the file's size. Checksums that the file records are compared while it is read; `verify=False` leaves that out, and a
    mapped file (`mmap=True`) is not summed. If a program truncates a mapped file in place, the next look at what is gone ends
    the process (SIGBUS), as in torch; a save that replaces the file by a rename does no harm. Storages that go to a GPU are
    read through at most `max_host_memory` bytes of page-locked memory (1 GiB unless said otherwise), which is kept for the
    next call.
    """
    weights_only, pickle_module = _mode(weights_only, pickle_module)
    if pickle_module is not pickle:
        check_pickle_module(pickle_module)
    if mmap is None:
        mmap = config.load.mmap
    arguments = {"encoding": "utf-8", **pickle_load_args}
    if weights_only and set(arguments) != {"encoding"}:
        unknown = next(name for name in arguments if name != "encoding")
        raise TypeError(
            f"load() got an unexpected keyword argument {unknown!r}: there is no unpickler that would take it"
        )
    with opened(f, verify=verify) as file, _shown_map_location(map_location), gc_paused():
        head = file.source.bytes(KEY, file.start, file.start + min(HEAD_NBYTES, file.nbytes))
        if head.startswith(b"PK\x03\x04"):
            if mmap and file.path is None:
                raise ValueError("f must be a file path in order to use the mmap argument")
            try:
                with file.source.store.reading():
                    return _load_zip(
                        file,
                        map_location,
                        pickle_module=pickle_module,
                        arguments=arguments,
                        weights_only=weights_only,
                        mmap=mmap,
                        max_host_memory=max_host_memory,
                    )
            except Corrupted as error:
                raise _name_tensor(error, file) from None
        if file.path is not None and file.path.endswith(".safetensors"):
            return _load_safetensors(
                file.path, map_location, mmap=mmap, verify=verify, max_host_memory=max_host_memory
            )
        if mmap:
            raise Refused(MMAP_ZIP, file=file.path)
        if begins_like_tar(head):  # only torch 0.1 wrote one
            if weights_only:
                raise Refused(
                    "Cannot use ``weights_only=True`` with files saved in the legacy .tar format. If you trust the file, pass "
                    "weights_only=False; its tensors alone are read by holdfast.open"
                )
            return _load_tar(file, map_location, pickle_module=pickle_module, arguments=arguments)
        return _load_stream(
            file,
            map_location,
            pickle_module=pickle_module,
            arguments=arguments,
            weights_only=weights_only,
        )


def _mode(weights_only: bool | None, pickle_module: ModuleType | None) -> tuple[bool, ModuleType]:
    forced, forced_not = (os.environ.get(name, "0").lower() in YES for name in (FORCE, FORCE_NOT))
    if forced and forced_not:
        raise Refused(f"Only one of `{FORCE}` or `{FORCE_NOT}` should be set, but both were set.")
    if weights_only is None:
        weights_only = pickle_module is None
        if forced_not:
            warnings.warn(
                f"Environment variable {FORCE_NOT} detected, since the `weights_only` argument was not explicitly passed to "
                "`torch.load`, forcing weights_only=False.",
                UserWarning,
                stacklevel=3,
            )
            weights_only = False
    if forced:
        weights_only = True
    if weights_only and pickle_module is not None:
        raise Refused("Can not safely load weights when explicit pickle_module is specified")
    return weights_only, pickle if pickle_module is None else pickle_module


@contextmanager
def _shown_map_location(map_location: MapLocation) -> Iterator[None]:
    """A block in which torch's wrapper subclasses see the `map_location` of this load, where they look for it."""
    before = local.map_location
    local.map_location = map_location  # type: ignore[assignment]  # torch's own annotation has another storage class
    try:
        yield
    finally:
        local.map_location = before


def _load_safetensors(
    path: str, map_location: MapLocation, *, mmap: bool, verify: bool, max_host_memory: int | None
) -> object:
    from holdfast.torch.tensors.open import open as open_torch

    if map_location is not None and not isinstance(map_location, str | torch.device):
        raise Refused(
            "a safetensors file knows no locations: map_location must be a device or its name",
            file=path,
        )
    with open_torch(path, mmap=mmap, verify=verify) as checkpoint:
        return checkpoint.read(device=map_location, max_host_memory=max_host_memory)


def _load_zip(
    file: OpenedFile,
    map_location: MapLocation,
    *,
    pickle_module: ModuleType,
    arguments: Mapping[str, object],
    weights_only: bool,
    mmap: bool,
    max_host_memory: int | None,
) -> object:
    archive = _read_archive(file)
    if archive.get("constants.pkl") is not None:
        warnings.warn(
            "'torch.load' received a zip file that looks like a TorchScript archive dispatching to 'torch.jit.load' (call "
            "'torch.jit.load' directly to silence this warning)",
            UserWarning,
            stacklevel=3,
        )
        if weights_only:
            raise Refused(SCRIPT)
        file.file.seek(file.start)
        return torch.jit.load(file.file, map_location=map_location)
    _check_version(file, archive)
    content = _read_record(
        file, archive, PICKLE, most=LIMITS.pickle_nbytes if weights_only else None
    )
    if content is None:
        reason = (
            f"failed locating file {PICKLE}: file not found; torch.save did not write this archive"
        )
        raise broken_archive(reason, file=file.path)
    find, everything = archive_storages(archive)
    swap = _is_swapped(file, archive)
    storages = LazyStorages(
        file.source,
        find,
        everything,
        map_location=map_location,
        weights_only=weights_only,
        ahead=not weights_only,
        swap=swap,
        untyped=untyped_dtypes(content) if swap else None,
        mapped=_map_file(file) if mmap else None,
        verify=file.verify,
        max_host_memory=max_host_memory,
    )
    if not weights_only:
        result = unpickle(
            pickle_module,
            content,
            lambda pid: storages.persistent(as_text(pid)),
            arguments=arguments,
        )
        storages.fill()
        torch._utils._validate_loaded_sparse_tensors()
        return result
    table = WeightsTable(storages, encoding=str(arguments["encoding"]))
    try:
        result = interpret_whole(content, table, limits=LIMITS).value
    except BrokenArchive:
        raise  # the pickle is not the reason
    except (HoldfastError, pickle.UnpicklingError) as error:
        raise refusal(error, protocol=table.protocol) from None
    storages.fill()
    return result


def _name_tensor(error: Corrupted, file: OpenedFile) -> Corrupted:
    """Add the name of a tensor over a damaged storage: storages are loaded before tensors have names."""
    with suppress(HoldfastError):
        for name, tensor in describe(file.source).tensors.items():
            if any(storage.start == error.offset for storage in tensor.storages):
                error.tensor = name
                break
    return error


class BrokenArchive(ZipError, Refused):
    """A `ZipError` that is a RuntimeError as well, which is what torch raises for a broken archive."""


def broken_archive(
    message: str, *, file: str | None = None, offset: int | None = None
) -> BrokenArchive:
    """An error with the words that programs look for: whose reader failed, and that the file is likely corrupted."""
    return BrokenArchive(
        f"PytorchStreamReader {message} (an internal miniz error in torch); {LIKELY}",
        file=file,
        offset=offset,
    )


def compressed(record: ZipRecord) -> BrokenArchive:
    return broken_archive(
        f"the record {record.name!r} is compressed; torch stores it plainly", offset=record.header
    )


def archive_storages(
    archive: Archive,
) -> tuple[Callable[[str], StorageRange], Callable[[], Mapping[str, StorageRange]]]:
    """Two functions that find the records `data/N` of a zip: one by its key, and all of them."""
    records, prefix = archive.records, f"{archive.root}data/"
    starts, nbytes, crcs, methods, *_ = records.columns
    rows = records.rows

    def find(key: str) -> StorageRange:
        row = rows.get(prefix + key)
        if row is None:
            raise broken_archive(
                f"failed locating file data/{key}: file not found; the pickle points at it, and it is not in the archive"
            )
        if methods[row] != STORED:
            raise compressed(records[prefix + key])
        crc = crcs[row]
        recorded_crc = None if crc == NO_CRC else crc
        return StorageRange(KEY, starts[row], nbytes[row], crc32=recorded_crc, label=f"data/{key}")

    def find_all() -> dict[str, StorageRange]:
        names = [name for name in records if name.startswith(prefix)]
        keys = [name.removeprefix(prefix) for name in names]
        return {key: find(key) for key in keys}

    return find, find_all


def _read_archive(file: OpenedFile) -> Archive:
    """Read the directory of an archive. One that cannot be read is a RuntimeError, as in torch."""
    try:
        return read_archive(file.source, KEY, start=file.start)
    except (ZipError, Truncated) as error:
        reason = error.message.removeprefix("zip archive: ")
        # torch's words for each, which programs look for.
        if not isinstance(error, Truncated):
            words = "invalid header or archive is corrupted"
        else:
            words = (
                "not a ZIP archive"
                if file.nbytes < END.size
                else "failed finding central directory"
            )
        raise broken_archive(
            f"failed reading zip archive: {words}: {reason}", file=file.path, offset=error.offset
        ) from error


def _read_record(
    file: OpenedFile, archive: Archive, name: str, *, most: int | None
) -> bytes | None:
    record = archive.get(name)
    if record is None:
        return None
    if record.method != STORED:
        raise compressed(record)
    return record_bytes(
        file.source, KEY, record if file.verify else replace(record, crc32=None), most
    )


def _check_version(file: OpenedFile, archive: Archive) -> None:
    """Refuse an archive of a later version: its records may mean something else."""
    text = _read_record(file, archive, "version", most=64)
    if text is None:
        return
    text = text.strip()
    if not text.isdigit():
        raise Refused(
            f"Couldn't parse the version {escape(text.decode('latin-1'))[:16]}: the archive is damaged",
            file=file.path,
        )
    if int(text) > MAX_VERSION:
        raise Refused(
            f"Attempted to read a PyTorch file with version {int(text)}, but the maximum supported version for reading is "
            f"{MAX_VERSION}: a later torch wrote it",
            file=file.path,
        )


def _is_swapped(file: OpenedFile, archive: Archive) -> bool:
    native = sys.byteorder
    recorded = _read_record(file, archive, "byteorder", most=16)
    if recorded is not None:
        order = recorded.decode("ascii", "replace")
        if order not in ("little", "big"):
            raise MetadataError(
                f"Unknown endianness type: {escape(order[:16])}, in the byteorder record",
                found=order[:16],
            )
        return order != native
    match config.load.endianness:
        case None | LoadEndianness.LITTLE:
            return native != "little"
        case LoadEndianness.BIG:
            return native != "big"
        case _:
            return False


def _map_file(file: OpenedFile) -> torch.UntypedStorage:
    """Map the whole file as one storage. torch maps by path, so the path must still be the file whose records were read."""
    shared = MAP_SHARED is not None and config.load.mmap_flags == MAP_SHARED
    path = str(file.path)
    # Before, since a shared mapping makes a shorter file longer; and after, since only that tells what was mapped.
    _check_in_place(file, path)
    storage = cast(torch.UntypedStorage, torch.UntypedStorage.from_file(path, shared, file.nbytes))
    _check_in_place(file, path)
    return storage


def _check_in_place(file: OpenedFile, path: str) -> None:
    try:
        there = os.path.samestat(os.stat(path), os.fstat(file.file.fileno()))
    except FileNotFoundError:
        there = False
    if not there:
        raise Replaced("the file was replaced while it was loaded; load it again", file=path)


# What torch wrote before 1.6.


def _load_stream(
    file: OpenedFile,
    map_location: MapLocation,
    *,
    pickle_module: ModuleType,
    arguments: Mapping[str, object],
    weights_only: bool,
) -> object:
    """Load a stream. The caller's file object stands behind the last storage afterwards."""
    if not file.nbytes:
        raise Truncated(
            "Ran out of input: there is nothing to load here (was the buffer rewound?)",
            file=file.path,
        )
    table: WeightsTable | None = None
    with file.source.store.reading():
        try:
            stream = read_stream(file.source, KEY, file.start)
            storages = _storages(
                file,
                stream.places,
                map_location,
                lengths=(6,),
                weights_only=weights_only,
                ahead=not weights_only,
            )
            if weights_only:
                table = WeightsTable(storages, encoding=str(arguments["encoding"]))
                result = stream.window.stream(stream.begin, table, OBJECT)[0].value
        except (NotTorch, CutShort):
            raise
        except (HoldfastError, pickle.UnpicklingError) as error:
            raise (
                refusal(error, protocol=2 if table is None else table.protocol)
                if weights_only
                else error
            ) from None
        if table is None:

            def persistent(pid: object) -> object:
                if (
                    isinstance(pid, tuple)
                    and len(pid) == 4
                    and pid[0] == "module"
                    and isinstance(pid[1], type)
                ):
                    _compare_source(*pid[1:])
                    return pid[1]
                return storages.persistent(as_text(pid))

            content = stream.window.data[stream.begin : stream.stop]
            result = unpickle(pickle_module, content, persistent, arguments=arguments)
        storages.fill()
    if table is None:
        torch._utils._validate_loaded_sparse_tensors()
    if file.path is None:
        file.file.seek(stream.end)
    return result


def _storages(
    file: OpenedFile,
    places: Mapping[str, Storage],
    map_location: MapLocation,
    *,
    lengths: tuple[int, ...],
    weights_only: bool = False,
    ahead: bool = False,
) -> LazyStorages:
    return LazyStorages(
        file.source,
        places.__getitem__,
        lambda: places,
        map_location=map_location,
        weights_only=weights_only,
        lengths=lengths,
        swap=sys.byteorder != "little",
        ahead=ahead,
    )


def _compare_source(kind: type, path: object, text: object) -> None:
    """Warn where the class's source is not what it was when the file was written."""
    if not isinstance(text, str) or not isinstance(path, str):
        return
    try:
        lines, _ = inspect.getsourcelines(kind)
        found = "".join(lines)
    except Exception:
        # As in a save: whatever keeps Python from finding the source, the object is good without it.
        warnings.warn(
            f"Couldn't retrieve source code for container of type {kind.__name__}.",
            SourceChangeWarning,
            stacklevel=2,
        )
        return
    if found == text:
        return
    changed = sum(
        line[:1] in "+-"
        for line in difflib.unified_diff(text.splitlines(), found.splitlines(), lineterm="", n=0)
    )
    warnings.warn(
        f"source code of class '{torch.typename(kind)}' has changed: {changed} lines differ from those of {path} when the model "
        "was saved. If it does not behave as it did, look at the difference, or save state_dict() instead of the model.",
        SourceChangeWarning,
        stacklevel=2,
    )


def _load_tar(
    file: OpenedFile,
    map_location: MapLocation,
    *,
    pickle_module: ModuleType,
    arguments: Mapping[str, object],
) -> object:
    """Load a tar of torch 0.1. All storages are read before its pickle may run anything."""
    source, key = file.source, KEY
    places: dict[str, Storage] = {}
    with source.store.reading():
        storages = _storages(file, places, map_location, lengths=(5,))
        table = WeightsTable(storages)
        table.begin(source.limits, file.nbytes)
        known, (start, stop) = read_tar(
            source, key, places, storages=storages, builder=table.builder, begin=file.start
        )
        storages.fill()
        content = source.bytes(key, start, stop)

    def persistent(pid: object) -> object:
        if isinstance(pid, tuple):
            _compare_source(*pid)
            return pid[0]
        return known[int(str(pid))]

    return unpickle(pickle_module, content, persistent, arguments=arguments)
