"""Lay out the container that torch wrote before 1.6, which `_use_new_zipfile_serialization=False` still asks for.

    pickle: magic number        pickle: protocol 1001        pickle: what the writing machine was like (no reader looks)
    pickle: the object          pickle: the keys of its storages, sorted as text
    for each key:  │ number of elements, 8 bytes │ the storage │

No checksum and no alignment. The class of each `nn.Module` comes with its source text, so that a reader can say that it changed.
"""

from __future__ import annotations

import inspect
import struct
import sys
import warnings
from types import ModuleType

import torch

from holdfast.plan.saves import Data, Literal, Memory, Segment
from holdfast.torch.cuda.memory import GpuSource
from holdfast.torch.serialization.pickling import StorageIds, pickle_object
from holdfast.torch.serialization.settings import MAGIC_NUMBER, PROTOCOL_VERSION
from holdfast.torch.tensors.memory import storage_memory

__all__ = ["lay_out_legacy"]

TYPE_SIZES = {"short": struct.calcsize("=h"), "int": struct.calcsize("=i"), "long": struct.calcsize("=l")}
"""In C's standard sizes, which say 4 for a long wherever this runs. Kept because the bytes are to be torch's."""


def lay_out_legacy(obj: object, pickle_module: ModuleType, protocol: int) -> tuple[Segment, ...]:
    """The segments of the file."""
    machine = {"protocol_version": PROTOCOL_VERSION, "little_endian": sys.byteorder == "little", "type_sizes": TYPE_SIZES}
    ids = _LegacyIds()
    head = [pickle_module.dumps(part, protocol=protocol) for part in (MAGIC_NUMBER, PROTOCOL_VERSION, machine)]
    head.append(pickle_object(obj, ids, pickle_module, protocol))
    keys = sorted(ids.storages)
    head.append(pickle_module.dumps(keys, protocol=protocol))
    segments: list[Segment] = [Literal(b"".join(head))]
    gpus = GpuSource()
    for key in keys:
        storage = ids.storages[key]
        if storage.device.type == "cuda" and storage.nbytes():
            segments.append(Literal(struct.pack("<q", storage.nbytes() // ids.dtypes[key].itemsize)))
            segments.append(Data(gpus.bytes_of(storage, key), key))
            continue
        if storage.device.type != "cpu":
            storage = storage.cpu()
        memory = storage_memory(storage)
        segments.append(Literal(struct.pack("<q", memory.nbytes // ids.dtypes[key].itemsize)))
        if memory.nbytes:
            segments.append(Memory(memory, key, storage))
    return tuple(segments)


class _LegacyIds(StorageIds):
    """Storages by their address, and the classes of modules with their source."""

    def __init__(self) -> None:
        super().__init__(by_address=True)
        self._classes: set[type] = set()

    def persistent_id(self, obj: object) -> object:
        if isinstance(obj, type) and issubclass(obj, torch.nn.Module):
            if obj in self._classes:
                return None
            self._classes.add(obj)
            return ("module", obj, *_source(obj))
        found = super().persistent_id(obj)
        # The sixth element described views of storages, which torch has not had since 0.4.
        return None if found is None else (*found, None)  # type: ignore[misc]  # a tuple, as the method above makes it


def _source(kind: type) -> tuple[str | None, str | None]:
    """The file and the text of a class."""
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
