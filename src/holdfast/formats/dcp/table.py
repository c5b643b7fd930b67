"""The globals of a `.metadata` pickle, as constructors of `records`.

The names moved twice: before November 2022 the package was `torch.distributed._shard.checkpoint`, and until January 2024 (torch
2.2) the properties of a tensor were those of a `ShardedTensor`. Exact names; everything else stays an `Opaque` that nothing calls.
"""

from __future__ import annotations

from collections.abc import Callable

from holdfast.core.dtype import DTYPES
from holdfast.core.values import Size
from holdfast.errors import MetadataError, PickleError
from holdfast.formats.dcp.records import (
    MEMORY_FORMATS,
    RANK,
    Item,
    Metadata,
    Place,
    Properties,
    Record,
    StorageNote,
    StoredBox,
    StoredBytes,
    StoredTensor,
)
from holdfast.formats.pickle.plain import PlainTable
from holdfast.formats.pickle.table import Name, Row
from holdfast.formats.torch.geometry import MAX_ELEMENTS, brief
from holdfast.formats.torch.table import CALLS

__all__ = ["MetadataTable"]

PACKAGES = ("torch.distributed.checkpoint", "torch.distributed._shard.checkpoint")
LAYOUT = ("torch.serialization", "_get_layout")
SHARDED_TENSOR = "torch.distributed._shard.sharded_tensor.metadata"

KINDS: tuple[type[Record], ...] = (Metadata, Place, StorageNote, StoredTensor, StoredBox, StoredBytes, Properties)
"""Those that live in the module `metadata` of the package, under their titles."""


class MetadataTable(PlainTable):
    """Plain Python, and what a distributed checkpoint's index is made of."""

    def __init__(self) -> None:
        super().__init__(
            values={("torch", row.torch): row for row in DTYPES.rows if row.torch},
            calls={("torch", "Size"): size, LAYOUT: CALLS[LAYOUT], **MEMORY},
            news=NEWS,
        )

    def build(self, obj: object, state: object) -> object:
        if not isinstance(obj, Record):
            return super().build(obj, state)
        if obj.filled:
            raise PickleError(f"a BUILD of a {obj.title} that has its state already")
        obj.fill(state)
        obj.filled = True
        return obj


def empty(kind: type[Record]) -> Row:
    """The row that makes a record without arguments, and keeps a call with arguments as it is."""
    return lambda args: NotImplemented if args else kind()


def size(args: tuple[object, ...]) -> object:
    """A `torch.Size`. There are three to a chunk, so what writers write is looked at here, and the rest where all sizes are."""
    if len(args) == 1 and isinstance(args[0], tuple | list):
        lengths = args[0]
        if len(lengths) > RANK:
            raise MetadataError(f"a size of {len(lengths):,} dimensions", expected=RANK, found=len(lengths))
        for n in lengths:
            if type(n) is not int or not 0 <= n < MAX_ELEMENTS:
                break
        else:
            return Size(lengths)
    return CALLS["torch", "Size"](args)


def memory_format(args: tuple[object, ...]) -> object:
    """A number of the enum, as the name that it stands for."""
    match args:
        case (int(number),) if type(number) is int and 0 <= number < len(MEMORY_FORMATS):
            return MEMORY_FORMATS[number]
    raise PickleError("a memory format that torch does not number", found=brief(args))


def _news() -> dict[Name, Row]:
    rows: dict[Name, Row] = {}
    for package in PACKAGES:
        rows |= {(f"{package}.metadata", kind.title): empty(kind) for kind in KINDS}
        rows[f"{package}.filesystem", Item.title] = empty(Item)
    rows[SHARDED_TENSOR, Properties.title] = empty(Properties)
    return rows


NEWS = _news()

MEMORY: dict[Name, Callable[[tuple[object, ...]], object]] = {
    **{(f"{package}.metadata", "_MEM_FORMAT_ENCODING"): memory_format for package in PACKAGES},
    (SHARDED_TENSOR, "MEM_FORMAT_ENCODING"): memory_format,
}
