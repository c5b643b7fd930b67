"""What Holdfast notes beside plain tensors, and how it is put back: other names, old storages, true dtypes, the tree.

The notes stand in a JSON document (safetensors `__metadata__`, an index, a manifest) under these fields, each optional:

    aliases   {"other name": "name of the tensor"}
    views     [{"nbytes": bytes of the storage, "names": {"name": [offset, [strides]]}}]      in bits
    dtypes    {"name": "float4_e2m1fn_x2"}        where the header can only say it in another way
    tree      the state as typed JSON; without it, the state is a dict of all tensors
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

import numpy as np
from msgspec import field

from holdfast.core.chunk import in_c_order
from holdfast.core.dtype import DTYPES, DType
from holdfast.core.protocols import Source
from holdfast.core.sharing import are_distinct, shared_rows
from holdfast.core.strict_json import kind, pointer, quoted
from holdfast.core.table import ODD, Kind, Table
from holdfast.core.tensor import AliasView, LazyTensor
from holdfast.core.value import Value, replace
from holdfast.engine.files import ViewTable
from holdfast.errors import HeaderError, MetadataError
from holdfast.formats.safetensors.schema import ADDRESSABLE
from holdfast.formats.tree_json.decode import decode_tree
from holdfast.formats.tree_json.encode import flat_tree

LARGEST_STORAGE_RATIO = 2
"""A strided tensor that is alone keeps its strides where its storage has at most this many times its bytes."""


class ViewGroup(Value, frozen=True):
    """Tensors that were views of one storage."""

    nbytes: int
    names: dict[str, tuple[int, tuple[int, ...]]]
    """Offset and strides of each, in bits of the storage."""


class Shared(Value, frozen=True, eq=False):
    """Which rows of a table are written, and what is noted beside them."""

    rows: Sequence[int]
    """Those that get bytes, in the order of the table. Those of the meta device have none."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Other names of these tensors."""
    groups: Sequence[ViewGroup] = ()

    def notes(self) -> list[str]:
        """Sentences about it for people."""
        notes = []
        if self.aliases:
            count = len(self.aliases)
            which = "1 name is a second name of a tensor" if count == 1 else f"{count:,} names are second names of tensors"
            notes.append(f"{which}; the bytes are written once")
        shared = sum(len(group.names) for group in self.groups if len(group.names) > 1)
        if shared:
            notes.append(f"{shared:,} tensors are views of shared storages; each is written as a copy, and the views are noted")
        return notes


def share(table: Table) -> Shared:
    """Compare where the rows of a table lie. Nothing is read, and nothing is taken for shared that only looks equal.

    1. Names of one and the same view (tied weights) are written once; the others are *aliases* of the first.
    2. Different views of one storage (a slice, a transpose) are written as copies, and where each lay in the storage is noted, so
       that the way back to a format with storages can share it again.
    3. A tensor that is alone in its storage and not in C order gets such a note, too: its strides are worth keeping.

    A tensor that comes out of a file with such notes (`Traits.alias`) still belongs to its storage of old.
    """
    names, count = table.names, len(table)
    noted = {number for number, kind in enumerate(table.kinds) if _has_view(kind)}
    if not noted and not table.odd and are_distinct(table.storage):
        return Shared(range(count))
    shared = shared_rows([table])
    again, first = shared.ties(), shared.first_rows(count)
    meta = {row for row, tensor in table.odd.items() if not tensor.chunks}
    rows = [row for row in range(count) if row not in again and row not in meta] if again or meta else range(count)
    ordered = sorted(again, key=first.__getitem__) if again else ()
    aliases = {names[row]: names[again[row]] for row in ordered}
    return Shared(rows, aliases, _view_groups(table, rows, first, noted))


def _has_view(kind: Kind) -> bool:
    """Whether tensors of a kind may be worth a note where they are alone; most are in C order and have none."""
    if kind.whole or len(kind.strides) < len(kind.shape):
        return kind.traits.alias is not None
    return kind.traits.alias is not None or not in_c_order(kind.shape, kind.strides, kind.dtype.bits)


def _view_groups(table: Table, rows: Sequence[int], first: Sequence[int], noted: Collection[int]) -> list[ViewGroup]:
    """The storages of which rows are views that are worth a note."""
    storage, kinds, kind, names, offsets = table.storage, table.kinds, table.kind, table.names, table.offsets
    written = np.array(rows, np.int64)
    several = np.bincount(np.array(first, np.int64)[written], minlength=len(table)) > 1 if len(rows) else ()
    some = [row for row in rows if several[first[row]] or kind[row] in noted or row in table.odd]
    groups: dict[object, list[tuple[str, Kind, int]]] = {}
    nbytes: dict[object, int] = {}
    # No function is called for a row with a storage: there may be fifty thousand views of one.
    for row in sorted(some, key=first.__getitem__):
        own = kinds[kind[row]]
        if storage[row] != ODD and own.traits.alias is None:
            place: object = storage[row]
            length, offset = own.storage_nbytes, offsets[row] if row in offsets else 0  # noqa: SIM401
        else:
            tensor = table.view(row)
            if len(tensor.chunks) > 1 or not tensor.chunks[0].storage.nbytes:
                continue
            (old,) = tensor.shared_storages
            own, place, length, offset = Kind.of(tensor), old, old.nbytes, tensor.chunks[0].offset
        if length:
            if place not in groups:
                groups[place], nbytes[place] = [], length
            groups[place] += ((names[row], own, offset),)
    made = (_group(nbytes[place], members) for place, members in groups.items())
    return [group for group in made if group is not None]


def _group(nbytes: int, members: Sequence[tuple[str, Kind, int]]) -> ViewGroup | None:
    """The views of one storage, where they are worth a note."""
    views: dict[str, tuple[int, tuple[int, ...]]] = {}
    kinds: list[Kind] = []
    of_each = {one: one.traits.alias.strides if one.traits.alias else one.strides for one in {one for _, one, _ in members}}
    ascending = {one for one, strides in of_each.items() if min(strides, default=0) >= 0}
    for name, one, offset in members:
        if one.traits.conj or one.traits.neg:
            # Conjugated elements are written as what they stand for: not the bytes of the storage any more.
            continue
        alias = one.traits.alias
        place = (offset, one.strides) if alias is None else (alias.offset, alias.strides)
        if one in ascending:
            views[name] = (0, (0,) * len(one.shape)) if alias is None and 0 in one.shape else place
            kinds += (one,)
    if len(views) == 1:
        ((_, strides),) = views.values()
        return ViewGroup(nbytes, views) if _strided(kinds[0], strides, nbytes) else None
    each = {*kinds}
    if len({one.dtype for one in each}) > 1 and any(one.byteorder != "little" for one in each):
        # Elements of several widths over the same big-endian bytes: little-endian, no storage has them all.
        return None
    return ViewGroup(nbytes, views) if views else None


def _strided(kind: Kind, strides: tuple[int, ...], nbytes: int) -> bool:
    if math.prod(kind.shape) < 2 or nbytes > LARGEST_STORAGE_RATIO * kind.nbytes:
        return False
    return not in_c_order(kind.shape, strides, kind.dtype.bits)


FIELDS = ("aliases", "views", "dtypes", "tree")

PAIRS = "float4_e2m1fn_x2"
"""torch's pair of 4-bit floats: in a safetensors header it is F4 with twice the last dimension."""


class Recorded(Value, frozen=True):
    """The notes of one document, checked for their form."""

    aliases: dict[str, str] = field(default_factory=dict)
    views: dict[str, AliasView] = field(default_factory=dict)
    pairs: frozenset[str] = frozenset()
    """Tensors of `float4_e2m1fn_x2`."""
    tree: object = None
    flat: bool = True
    """Whether there is no tree, and the state is a dict of the tensors."""

    @property
    def changes_tensors(self) -> bool:
        """Whether the tensors are not just those that are stored."""
        return bool(self.aliases or self.views or self.pairs)

    def __bool__(self) -> bool:
        return self.changes_tensors or not self.flat


def sharing_fields(shared: Shared) -> dict[str, object]:
    """The fields `aliases` and `views` of a document; only those that say something."""
    fields: dict[str, object] = {}
    if shared.aliases:
        fields["aliases"] = shared.aliases
    if shared.groups:
        fields["views"] = [{"nbytes": group.nbytes, "names": group.names} for group in shared.groups]
    return fields


def order_fields(names: Collection[str], aliases: Collection[str]) -> dict[str, object]:
    """The field `tree` for a plain dict of tensors whose aliases do not stand last; a reader puts them there by itself."""
    if not aliases or [*names] == [*[name for name in names if name not in aliases], *aliases]:
        return {}
    return {"tree": flat_tree(names)}


def parse_recorded(document: Mapping[str, object]) -> Recorded:
    """Check the form of the notes in a document. What they say about tensors is checked by `restore`."""
    aliases = _texts(document.get("aliases", {}), "aliases")
    dtypes = _texts(document.get("dtypes", {}), "dtypes")
    for name, dtype in dtypes.items():
        if dtype != PAIRS:
            raise HeaderError(f"at {pointer('dtypes', name)}: only {PAIRS} is noted here, found {kind(dtype)}")
    groups = document.get("views", [])
    if not isinstance(groups, list):
        raise HeaderError(f"at {pointer('views')}: expected a list, found {kind(groups)}")
    views: dict[str, AliasView] = {}
    for number, group in enumerate(groups):
        match group:
            case {"nbytes": int(nbytes), "names": dict(names), **rest} if not rest and _place(nbytes):
                pass
            case _:
                raise HeaderError(f"at {pointer('views', number)}: expected nbytes and names, found {kind(group)}")
        for name, view in names.items():
            at = pointer("views", number, "names", name)
            match view:
                case [int(offset), list(strides)] if _place(offset) and all(map(_place, strides)):
                    pass
                case _:
                    raise HeaderError(f"at {at}: expected an offset and strides, found {kind(view)}")
            if name in views:
                raise HeaderError(f"at {at}: a tensor that is a view of another storage already")
            views[name] = AliasView(number, nbytes, offset, tuple(strides))
    return Recorded(aliases, views, frozenset(dtypes), document.get("tree"), "tree" not in document)


def _texts(value: object, name: str) -> dict[str, str]:
    if not isinstance(value, dict):
        raise HeaderError(f"at {pointer(name)}: expected an object, found {kind(value)}")
    if {*map(type, value.values())} <= {str}:
        return value
    key, text = next((key, text) for key, text in value.items() if not isinstance(text, str))
    raise HeaderError(f"at {pointer(name, key)}: expected text, found {kind(text)}")


def _place(value: object) -> bool:
    """Whether a value can be a length, or a place counted in bits."""
    return type(value) is int and 0 <= value <= ADDRESSABLE


def with_notes(stored: Table, recorded: Recorded) -> Table:
    """The rows of a file with the notes put back: other names, old storages, true dtypes."""
    firsts = [*stored.names, *recorded.aliases.values()]
    table = stored.select([*map(stored.rows.__getitem__, firsts)], [*stored.names, *recorded.aliases])
    kinds, kind = [*table.kinds], [*table.kind]
    odd = dict(table.odd)
    noted = recorded.views.keys() | recorded.pairs
    for row, first in [(row, first) for row, first in enumerate(firsts) if first in noted]:
        view = recorded.views.get(first)
        tensor = _as_pairs(table.view(row)) if first in recorded.pairs else table.view(row)
        if view is not None:
            tensor = replace(tensor, traits=replace(tensor.traits, alias=view))
        if row in odd:
            odd[row] = tensor
        kind[row] = len(kinds)
        kinds.append(Kind.of(tensor))
    return Table(table.names, kinds, kind, table.storage, table.storages, odd, offsets=table.offsets)


def restore(stored: Table, recorded: Recorded, source: Source) -> tuple[Table, object]:
    """The tensors by name and the tree, from what is stored and what was noted.

    Raises `HeaderError` where the notes name tensors that are not there, `MetadataError` where they cannot be true.
    """
    if not recorded:
        return stored, stored
    rows = stored.rows if recorded.changes_tensors else {}
    for other, first in recorded.aliases.items():
        if first not in rows:
            raise HeaderError(f"at {pointer('aliases', other)}: there is no tensor {quoted(first)}", tensor=other)
        if other in rows:
            raise HeaderError(f"at {pointer('aliases', other)}: a tensor that has bytes of its own", tensor=other)
    for name in (*recorded.views, *recorded.pairs):
        if name not in rows:
            field = "views" if name in recorded.views else "dtypes"
            raise HeaderError(f"at {pointer(field)}: there is no tensor {quoted(name)}", tensor=name)
    for name, view in recorded.views.items():
        _check_view(_as_pairs(stored[name]) if name in recorded.pairs else stored[name], view)
    tensors = with_notes(stored, recorded) if recorded.changes_tensors else stored
    if recorded.flat:
        return tensors, tensors
    decoded = decode_tree(recorded.tree, tensors.__getitem__, source, at=("tree",))
    for name in tensors:
        if name not in decoded.tensors:
            raise HeaderError(f"at {pointer('tree')}: the tensor {quoted(name)} is missing", tensor=name)
    return ViewTable(decoded.tensors), decoded.tree


def _check_view(tensor: LazyTensor, view: AliasView) -> None:
    """Refuse a view that does not fit the tensor, or reaches beyond its storage."""
    bits = tensor.dtype.bits
    last = view.offset + (bits if tensor.size else 0)
    fits = len(view.strides) == tensor.ndim
    if fits and tensor.size:
        last += sum((n - 1) * stride for n, stride in zip(tensor.shape, view.strides, strict=True))
    whole = tensor.dtype.packed or not any(place % 8 for place in (view.offset, *view.strides))
    if not fits or not whole or last > view.nbytes * 8:
        message = (
            f"at {pointer('views', view.group, 'names', tensor.name)}: no view of {list(tensor.shape)} {tensor.dtype} "
            f"in {view.nbytes:,} bytes"
        )
        raise MetadataError(message, tensor=tensor.name, expected=view.nbytes * 8, found=last)


def _as_pairs(tensor: LazyTensor) -> LazyTensor:
    """4-bit floats as torch's pairs of them."""
    true = _named(PAIRS)
    if tensor.dtype is true:
        return tensor
    if tensor.dtype.name != "float4_e2m1fn" or not tensor.ndim or tensor.shape[-1] % 2 or len(tensor.chunks) != 1:
        raise MetadataError(f"{tensor.dtype} {list(tensor.shape)} is no {PAIRS}", tensor=tensor.name, found=tensor.shape)
    shape = (*tensor.shape[:-1], tensor.shape[-1] // 2)
    pairs = LazyTensor.contiguous(tensor.name, true, shape, tensor.chunks[0].storage, tensor.source)
    return replace(pairs, traits=tensor.traits)


def _named(name: str) -> DType:
    dtype = DTYPES.name(name)
    if dtype is None:
        raise HeaderError(f"there is no dtype {quoted(name)}")
    return dtype
