"""`save`: what `torch.save` does, byte for byte. The old file stays whole until the new one is.

1. The object is pickled by the caller's pickle module (pickling.py); its storages are collected, not copied.
2. The file is laid out around pickle and storages (formats/torch/write.py, or `lay_out_legacy`).
3. A path is written by the engine: threads, checksums, a hidden sibling, one rename. Anything with a `write` is written from front
   to back.

The legacy container, which torch wrote before 1.6 and `_use_new_zipfile_serialization=False` still writes:

    pickle: magic number        pickle: protocol 1001        pickle: what the writing machine was like (no reader looks)
    pickle: the object          pickle: the keys of its storages, sorted as text
    for each key:  │ number of elements, 8 bytes │ the storage │

No checksum and no alignment. The class of each `nn.Module` comes with its source text, so that a reader can warn that it changed.
"""

from __future__ import annotations

import inspect
import os
import pickle
import stat
import struct
import sys
import warnings
from types import ModuleType
from typing import Protocol, cast

import numpy as np
import torch
from msgspec import field
from torch.serialization import _serialization_tls as local
from torch.utils.serialization import config

from holdfast.core.runtime import gc_paused, memory_at
from holdfast.engine.saves import Data, FilePlan, Hole, Literal, Memory, SavePlan, Segment
from holdfast.engine.stream import write_stream
from holdfast.errors import NotCommitted, NotSaved, Refused, Unsupported
from holdfast.formats.torch.write import lay_out_container, storage_payloads
from holdfast.formats.zip.writer import MAX_ALIGNMENT, Payload, Records
from holdfast.stores.paths import check_binary, disambiguate_path
from holdfast.torch.cuda.memory import GpuSource
from holdfast.torch.serialization.pickling import StorageIds, check_pickle_module, pickle_object
from holdfast.torch.serialization.settings import DEFAULT_PROTOCOL, MAGIC_NUMBER, PROTOCOL_VERSION
from holdfast.torch.tensors.storages import TensorStorages
from holdfast.verbs.shared.planned import Writing, write_plan

SMALL_NBYTES = 4096
"""Storages up to this size, one or all of them, are copied into the layout, which is faster than to describe them as memory."""


class Writable(Protocol):
    """What a file-like target needs."""

    def write(self, data: bytes | memoryview, /) -> object: ...


def save(
    obj: object,
    f: str | os.PathLike[str] | Writable,
    pickle_module: ModuleType = pickle,
    pickle_protocol: int = DEFAULT_PROTOCOL,
    _use_new_zipfile_serialization: bool = True,
    _disable_byteorder_record: bool = False,
    *,
    durable: bool = True,
) -> None:
    """Save an object to a file, as `torch.save` does and in the same bytes.

    `f` is a path or anything with `write`. At a path the new file appears in one step: a save that fails or is killed leaves what
    was there. With `durable=False` it is not flushed to the disk, which torch never does. Raises `NotSaved` where nothing changed,
    `DurabilityUncertain` where the new file is in place and could not be flushed.
    """
    if pickle_module is not pickle:
        check_pickle_module(pickle_module)
    path = os.fsdecode(f) if isinstance(f, str | os.PathLike) else None
    if path is None:
        if not hasattr(f, "write"):
            raise AttributeError(
                "expected 'f' to be string, path, or a file-like object with a 'write' attribute, "
                f"and it is {'None' if f is None else 'a ' + type(f).__name__}"
            )
        if not callable(f.write):
            raise TypeError(f"Buffer of {type(f).__name__} has no callable attribute 'write'")
        check_binary(f, "wb")
    # The collector would walk through fifty thousand rows and pieces, none of which is garbage.
    with gc_paused():
        plan = plan_object(
            obj,
            path,
            pickle_module=pickle_module,
            pickle_protocol=pickle_protocol,
            legacy=not _use_new_zipfile_serialization,
            order_first=not _disable_byteorder_record,
        )
        if path is None:
            write_stream(plan.files[0], f)  # type: ignore[arg-type]  # it has a `write`, as was just asked
        elif _is_special(path):
            with open(path, "wb", buffering=0) as special:
                write_stream(plan.files[0], special)
        else:
            try:
                write_plan(
                    plan,
                    disambiguate_path(path),
                    Writing(overwrite=None, durable=durable),
                )
            except NotCommitted as error:
                raise NotSaved(*error.args, file=error.file, found=error.found) from error
        del plan


def plan_object(
    obj: object,
    path: str | None,
    *,
    pickle_module: ModuleType = pickle,
    pickle_protocol: int = DEFAULT_PROTOCOL,
    legacy: bool = False,
    order_first: bool = True,
) -> SavePlan:
    """Lay out the one file of a save; nothing is written. `path` gives the archive its name; None is a buffer."""
    skip: bool = local.skip_data
    if legacy:
        if skip:
            raise Refused(
                "Cannot use skip_data=True with _use_new_zipfile_serialization=False: that container has no room to skip"
            )
        return SavePlan(
            "torch-legacy", (FilePlan("", lay_out_legacy(obj, pickle_module, pickle_protocol)),)
        )
    name = "archive" if path is None else _archive_name(path)
    alignment, crc = config.save.storage_alignment, config.save.compute_crc32
    if not 1 <= alignment <= MAX_ALIGNMENT:
        raise Refused(
            f"a storage alignment of {alignment}: an archive can pad to 1 up to {MAX_ALIGNMENT} bytes"
        )
    ids = StorageIds()
    content = pickle_object(obj, ids, pickle_module=pickle_module, protocol=pickle_protocol)
    records = _records(ids, skip=skip)
    layout = lay_out_container(
        name, content, records, alignment=alignment, crc=crc, order_first=order_first
    )
    return SavePlan("torch-zip", (FilePlan("", layout),))


def _archive_name(path: str) -> str:
    """The folder in the archive: the file's name without its last suffix; `archive` for names beyond ASCII."""
    # To torch 2.13 a backslash ends a folder on every system, so that `C:\\x.pt` has one that is missing.
    last = max(path.rfind("/"), path.rfind("\\"))
    folder, base = path[: max(last, 0)], path[last + 1 :]
    if folder and not os.path.isdir(folder):
        raise Refused(f"Parent directory {folder} does not exist.", file=path)
    stem = base.rpartition(".")[0] if "." in base else base
    if not stem:
        raise Refused(
            f"invalid file name: {path!r} leaves no name for the folder in the archive", file=path
        )
    return stem if path.isascii() else "archive"


def _is_special(path: str) -> bool:
    """Whether a path is a device or a pipe, which can be written to and not be replaced."""
    try:
        mode = os.stat(path).st_mode
    except OSError:
        return False
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))


def _records(ids: StorageIds, *, skip: bool) -> Records:
    storages, devices = ids.storages, {storage.device for storage in ids.storages}
    nbytes = [*map(torch.UntypedStorage.nbytes, storages)]
    kinds = {device.type for device in devices}
    if not skip and kinds <= {"cpu", "cuda"} and sum(nbytes) > SMALL_NBYTES:
        on_gpu = (
            [number for number, storage in enumerate(storages) if storage.is_cuda]
            if "cuda" in kinds
            else ()
        )
        gpus = {number: ids.tensor_over(storages[number]) for number in on_gpu}
        content = TensorStorages(
            storages, np.array(nbytes, np.int64), np.array(ids.addresses, np.int64), gpus, devices
        )
        make_payload = storage_payloads(content)
        labels = [f"data/{number}" for number in range(len(storages))]
        return ((label, make_payload(number, label)) for number, label in enumerate(labels))
    # Made only where there is something on a GPU: it takes as long as a small archive.
    source = GpuSource() if "cuda" in kinds else None
    return [
        (f"data/{number}", _payload(storage, f"data/{number}", source, skip=skip))
        for number, storage in enumerate(storages)
    ]


def _payload(
    storage: torch.UntypedStorage, label: str, gpus: GpuSource | None, *, skip: bool
) -> Payload:
    kind = storage.device.type
    if skip or kind == "meta":
        return Hole(storage.nbytes()) if storage.nbytes() else b""
    if kind == "cuda" and gpus is not None and storage.nbytes() > SMALL_NBYTES:
        return Data(gpus.bytes_of(storage, label), label)
    if kind != "cpu":
        storage = storage.cpu()
    nbytes, address = storage.nbytes(), storage.data_ptr()
    if not nbytes:
        return b""
    if not address:
        raise Unsupported("a tensor without memory of its own (a fake one?) has nothing to save")
    content = memory_at(address, nbytes)
    return bytes(content) if nbytes <= SMALL_NBYTES else Memory(content, label, storage)


TYPE_SIZES = {
    "short": struct.calcsize("=h"),
    "int": struct.calcsize("=i"),
    "long": struct.calcsize("=l"),
}
"""C's standard sizes, in which a long has 4 bytes. torch writes these."""


def lay_out_legacy(obj: object, pickle_module: ModuleType, protocol: int) -> tuple[Segment, ...]:
    machine = {
        "protocol_version": PROTOCOL_VERSION,
        "little_endian": sys.byteorder == "little",
        "type_sizes": TYPE_SIZES,
    }
    ids = _LegacyIds()
    pieces = [
        pickle_module.dumps(part, protocol=protocol)
        for part in (MAGIC_NUMBER, PROTOCOL_VERSION, machine)
    ]
    pieces.append(pickle_object(obj, ids, pickle_module=pickle_module, protocol=protocol))
    # Keys are addresses, in the order of their texts.
    places = {str(identity): number for number, identity in enumerate(ids.keys)}
    pieces.append(pickle_module.dumps(sorted(places), protocol=protocol))
    segments: list[Segment] = []
    gpus = GpuSource()
    for key in sorted(places):
        storage = ids.storages[places[key]]
        pieces.append(struct.pack("<q", ids.elements[storage._cdata]))
        content = _payload(
            storage if storage.device.type != "meta" else storage.cpu(), key, gpus, skip=False
        )
        if isinstance(content, bytes):
            pieces.append(content)
            continue
        segments += (Literal(b"".join(pieces)), cast("Segment", content))
        pieces = []
    return (*segments, Literal(b"".join(pieces)))


class _LegacyIds(StorageIds):
    """The ids of the legacy container: storages by their address, and classes of modules with their source."""

    elements: dict[int, int] = field(default_factory=dict)
    """The elements of each storage, by its identity, of the dtype with which it was met first."""
    classes: set[type] = field(default_factory=set)

    def persistent_id(self, obj: object) -> object:
        if isinstance(obj, type) and issubclass(obj, torch.nn.Module):
            if obj in self.classes:
                return None
            self.classes.add(obj)
            return ("module", obj, *_source(obj))
        return super().persistent_id(obj)

    def id_of(
        self,
        storage: torch.UntypedStorage,
        dtype: torch.dtype,
        saved: type,
        location: str,
        address: int,
    ) -> tuple[object, ...]:
        name, kind, _, place, elements = super().id_of(storage, dtype, saved, location, address)
        self.elements.setdefault(storage._cdata, cast("int", elements))
        # An address is new text at every use. The sixth element described views of storages, which torch has not had since 0.4.
        return name, kind, str(storage._cdata), place, elements, None


def _source(kind: type) -> tuple[str | None, str | None]:
    try:
        lines, _ = inspect.getsourcelines(kind)
        return inspect.getsourcefile(kind), "".join(lines)
    except Exception:
        # Whatever goes wrong when Python looks for a source: there is none, and the file is good without.
        warnings.warn(
            f"Couldn't retrieve source code for container of type {kind.__name__}. "
            "It won't be checked for correctness upon loading.",
            stacklevel=2,
        )
        return None, None
