"""For tests of the table alone: the storages of a torch zip, read by `zipfile`, and one function that loads with them."""

from __future__ import annotations

import io
import pickle
import zipfile

import torch
from torch.storage import TypedStorage

from holdfast.core.limits import Limits
from holdfast.errors import HoldfastError, MetadataError
from holdfast.formats.pickle.machine import interpret_whole
from holdfast.formats.torch.storages import parse_storage_id
from holdfast.torch.serialization.refusals import refusal
from holdfast.torch.serialization.storages import storage_dtype
from holdfast.torch.serialization.weights import WeightsTable
from holdfast.torch.tensors.from_lazy import torch_dtype
from holdfast.torch.versions import is_faking

__all__ = ["ZipStorages", "load"]


class ZipStorages:
    """Storages are zero until `fill` is called, which counts how often it had something to do."""

    def __init__(self, raw: bytes) -> None:
        self.archive = zipfile.ZipFile(io.BytesIO(raw))
        (pickled,) = [name for name in self.archive.namelist() if name.endswith("/data.pkl")]
        self.pickle = self.archive.read(pickled)
        self.prefix = pickled.removesuffix("data.pkl") + "data/"
        self.made: dict[str, torch.UntypedStorage] = {}
        self.waiting: list[tuple[torch.UntypedStorage, bytes]] = []
        self.fills = 0

    @property
    def is_faking(self) -> bool:
        return is_faking()

    def persistent(self, pid: object) -> torch.storage.TypedStorage:
        name = parse_storage_id(pid, (5,), storage_dtype)
        if name.key not in self.made:
            try:
                content = self.archive.read(self.prefix + name.key)
            except KeyError:
                raise MetadataError(f"no record {name.key!r}") from None
            if len(content) != name.nbytes:
                raise MetadataError("a storage of another size than its record", found=name.nbytes)
            self.made[name.key] = torch.UntypedStorage(name.nbytes).fill_(0)
            self.waiting.append((self.made[name.key], content))
        dtype = torch_dtype(name.dtype)
        return TypedStorage(wrap_storage=self.made[name.key], dtype=dtype, _internal=True)

    def kind(self, claim: object, limits: object) -> None:
        """Every tensor is made over what `persistent` gives."""

    def fill(self) -> None:
        waiting, self.waiting = self.waiting, []
        self.fills += bool(waiting)
        for storage, content in waiting:
            if content:
                torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage).copy_(
                    torch.frombuffer(bytearray(content), dtype=torch.uint8)
                )


def load(
    raw: bytes,
    *,
    encoding: str = "utf-8",
    limits: Limits | None = None,
    storages: ZipStorages | None = None,
) -> object:
    """What a `weights_only` load makes of a torch zip, as its caller is told to do it."""
    storages = ZipStorages(raw) if storages is None else storages
    table = WeightsTable(storages, encoding=encoding)
    try:
        value = interpret_whole(storages.pickle, table, limits=limits or Limits()).value
    except (HoldfastError, pickle.UnpicklingError) as error:
        raise refusal(error, protocol=table.protocol) from error
    storages.fill()
    return value
