"""Other names, original storages, true dtypes and the tree of plain tensors: how they are recorded and restored.

They stand in a JSON document (safetensors `__metadata__`, an index, a manifest) under these fields, each optional:

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

from holdfast.core.chunk import is_c_ordered
from holdfast.core.dtype import DTYPES
from holdfast.core.protocols import Source
from holdfast.core.sharing import are_distinct, find_shared_rows
from holdfast.core.strict_json import describe_json, format_pointer, quote
from holdfast.core.table import IRREGULAR, RowKind, Table
from holdfast.core.tensor import PLAIN_TRAITS, AliasView, LazyTensor
from holdfast.core.value import Value, replace
from holdfast.engine.files import ViewTable
from holdfast.errors import HeaderError, MetadataError
from holdfast.formats.safetensors.schema import ADDRESSABLE
from holdfast.formats.tree_json.decode import decode_tree
from holdfast.formats.tree_json.encode import flat_tree

LARGEST_STORAGE_RATIO = 2
"""The strides of a lone tensor are recorded if its storage has at most this many times its bytes."""


ViewGroup = tuple[int, dict[str, tuple[int, tuple[int, ...]]]]
"""Tensors that were views of one storage: its bytes; offset and strides of each name, in bits."""


class Shared(Value, frozen=True, eq=False):
    """The rows of a table that are written, and what is recorded about the others."""

    rows: Sequence[int]
    """The rows with bytes, in the order of the table. Rows of the meta device have none."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    groups: Sequence[ViewGroup] = ()

    def notes(self) -> list[str]:
        notes = []
        if self.aliases:
            count = len(self.aliases)
            tied = "1 tensor is" if count == 1 else f"{count:,} tensors are"
            notes.append(f"{tied} tied to another one; the data is written once")
        shared = sum(len(names) for _, names in self.groups if len(names) > 1)
        if shared:
            notes.append(
                f"{shared:,} tensors are views of shared storages; each is written as a copy, and Holdfast restores the views"
            )
        return notes


def share(table: Table) -> Shared:
    """Compare the storages of the rows of a table. Nothing is read; equal elements in different storages are not shared.

    1. Names of the same view (tied weights) are written once; the others are *aliases* of the first.
    2. Different views of one storage (a slice, a transpose) are written as copies. Their places in the storage are recorded, so
       that a format with storages can share it again.
    3. A tensor that is alone in its storage and not in C order is recorded, too, for its strides.

    A tensor of a file with such records (`Traits.alias`) still belongs to its original storage.
    """
    names, count = table.names, len(table.names)
    viewed = {
        number
        for number, kind in enumerate(table.kinds)
        if not (kind.is_whole and kind.traits is PLAIN_TRAITS) and _has_view(kind)
    }
    if not viewed and not table.irregular and are_distinct(table.storage_indices):
        return Shared(range(count))
    shared = find_shared_rows([table])
    again, first = shared.ties(), shared.first_rows(count)
    meta = {row for row, tensor in table.irregular.items() if not tensor.chunks}
    rows = (
        [row for row in range(count) if row not in again and row not in meta]
        if again or meta
        else range(count)
    )
    ordered = sorted(again, key=first.__getitem__) if again else ()
    aliases = {names[row]: names[again[row]] for row in ordered}
    return Shared(rows, aliases, _view_groups(table, rows, first, viewed))


def _has_view(kind: RowKind) -> bool:
    if kind.is_whole or len(kind.strides) < len(kind.shape):
        return kind.traits.alias is not None
    return kind.traits.alias is not None or not is_c_ordered(
        kind.shape, kind.strides, kind.dtype.bits
    )


def _view_groups(
    table: Table, rows: Sequence[int], first: Sequence[int], viewed: Collection[int]
) -> list[ViewGroup]:
    storage, kinds, kind, names, offsets = (
        table.storage_indices,
        table.kinds,
        table.kind_indices,
        table.names,
        table.offsets,
    )
    written = np.array(rows, np.int64)
    several = (
        np.bincount(np.array(first, np.int64)[written], minlength=len(table)) > 1
        if len(rows)
        else ()
    )
    some = [
        row for row in rows if several[first[row]] or kind[row] in viewed or row in table.irregular
    ]
    groups: dict[object, list[tuple[str, RowKind, int]]] = {}
    nbytes: dict[object, int] = {}
    # No function is called for a row with a storage: there may be fifty thousand views of one.
    for row in sorted(some, key=first.__getitem__):
        own = kinds[kind[row]]
        if storage[row] != IRREGULAR and own.traits.alias is None:
            place: object = storage[row]
            length, offset = own.storage_nbytes, offsets[row] if row in offsets else 0  # noqa: SIM401
        else:
            tensor = table.lazy_tensor(row)
            if len(tensor.chunks) > 1 or not tensor.chunks[0].storage.nbytes:
                continue
            (old,) = tensor.shared_storages
            own, place, length, offset = (
                RowKind.from_tensor(tensor),
                old,
                old.nbytes,
                tensor.chunks[0].offset,
            )
        if length:
            if place not in groups:
                groups[place], nbytes[place] = [], length
            groups[place] += ((names[row], own, offset),)
    made = (_group(nbytes[place], members) for place, members in groups.items())
    return [group for group in made if group is not None]


def _group(nbytes: int, members: Sequence[tuple[str, RowKind, int]]) -> ViewGroup | None:
    views: dict[str, tuple[int, tuple[int, ...]]] = {}
    kinds: list[RowKind] = []
    of_each = {
        one: one.traits.alias.strides if one.traits.alias else one.strides
        for one in {one for _, one, _ in members}
    }
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
        kind = kinds[0]
        large = math.prod(kind.shape) < 2 or nbytes > LARGEST_STORAGE_RATIO * kind.nbytes
        return (
            None if large or is_c_ordered(kind.shape, strides, kind.dtype.bits) else (nbytes, views)
        )
    each = {*kinds}
    if len({one.dtype for one in each}) > 1 and any(one.byteorder != "little" for one in each):
        # Elements of several widths over the same big-endian bytes: little-endian, no storage has them all.
        return None
    return (nbytes, views) if views else None


PAIRS = "float4_e2m1fn_x2"
"""torch's pair of 4-bit floats: in a safetensors header it is F4 with twice the last dimension."""
PAIRS_DTYPE = next(row for row in DTYPES.rows if row.name == PAIRS)


class Recorded(Value, frozen=True):
    """The recorded fields of one document, with a checked form."""

    aliases: dict[str, str] = field(default_factory=dict)
    views: dict[str, AliasView] = field(default_factory=dict)
    pairs: frozenset[str] = frozenset()
    tree: object = None
    flat: bool = True
    """Whether there is no tree: the state is a dict of the tensors."""

    @property
    def changes_tensors(self) -> bool:
        return bool(self.aliases or self.views or self.pairs)

    def __bool__(self) -> bool:
        return self.changes_tensors or not self.flat


def sharing_fields(shared: Shared) -> dict[str, object]:
    """The fields `aliases` and `views` of a document, without empty ones."""
    fields: dict[str, object] = {}
    if shared.aliases:
        fields["aliases"] = shared.aliases
    if shared.groups:
        fields["views"] = [{"nbytes": nbytes, "names": names} for nbytes, names in shared.groups]
    return fields


def order_fields(names: Collection[str], aliases: Collection[str]) -> dict[str, object]:
    """The field `tree` for a plain dict of tensors whose aliases do not stand last. Without it, a reader puts aliases last."""
    if not aliases or [*names] == [*[name for name in names if name not in aliases], *aliases]:
        return {}
    return {"tree": flat_tree(names)}


def parse_recorded(document: Mapping[str, object]) -> Recorded:
    """Check the form of the recorded fields. `restore` compares them with the tensors."""
    aliases = _texts(document.get("aliases", {}), "aliases")
    dtypes = _texts(document.get("dtypes", {}), "dtypes")
    for name, dtype in dtypes.items():
        if dtype != PAIRS:
            raise HeaderError(
                f"at {format_pointer('dtypes', name)}: only {PAIRS} is noted here, found {describe_json(dtype)}"
            )
    groups = document.get("views", [])
    if not isinstance(groups, list):
        raise HeaderError(
            f"at {format_pointer('views')}: expected a list, found {describe_json(groups)}"
        )
    views: dict[str, AliasView] = {}
    for number, group in enumerate(groups):
        match group:
            case {"nbytes": int(nbytes), "names": dict(names), **rest} if not rest and _place(
                nbytes
            ):
                pass
            case _:
                raise HeaderError(
                    f"at {format_pointer('views', number)}: expected nbytes and names, found {describe_json(group)}"
                )
        for name, view in names.items():
            at = format_pointer("views", number, "names", name)
            match view:
                case [int(offset), list(strides)] if _place(offset) and all(map(_place, strides)):
                    pass
                case _:
                    raise HeaderError(
                        f"at {at}: expected an offset and strides, found {describe_json(view)}"
                    )
            if name in views:
                raise HeaderError(f"at {at}: a tensor that is a view of another storage already")
            views[name] = AliasView(number, nbytes, offset, tuple(strides))
    return Recorded(aliases, views, frozenset(dtypes), document.get("tree"), "tree" not in document)


def _texts(value: object, name: str) -> dict[str, str]:
    if not isinstance(value, dict):
        raise HeaderError(
            f"at {format_pointer(name)}: expected an object, found {describe_json(value)}"
        )
    if {*map(type, value.values())} <= {str}:
        return value
    key, text = next((key, text) for key, text in value.items() if not isinstance(text, str))
    raise HeaderError(f"at {format_pointer(name, key)}: expected text, found {describe_json(text)}")


def _place(value: object) -> bool:
    return type(value) is int and 0 <= value <= ADDRESSABLE


def with_recorded(stored: Table, recorded: Recorded) -> Table:
    """The rows of a file with their other names, original storages and true dtypes."""
    firsts = [*stored.names, *recorded.aliases.values()]
    table = stored.select(
        [*map(stored.row_indices.__getitem__, firsts)], [*stored.names, *recorded.aliases]
    )
    kinds, kind = [*table.kinds], [*table.kind_indices]
    irregular = dict(table.irregular)
    changed = recorded.views.keys() | recorded.pairs
    for row, first in [(row, first) for row, first in enumerate(firsts) if first in changed]:
        view = recorded.views.get(first)
        tensor = (
            _as_pairs(table.lazy_tensor(row)) if first in recorded.pairs else table.lazy_tensor(row)
        )
        if view is not None:
            tensor = replace(tensor, traits=replace(tensor.traits, alias=view))
        if row in irregular:
            irregular[row] = tensor
        kind[row] = len(kinds)
        kinds.append(RowKind.from_tensor(tensor))
    return Table(
        table.names,
        kinds,
        kind,
        table.storage_indices,
        table.storages,
        irregular,
        offsets=table.offsets,
    )


def restore(stored: Table, recorded: Recorded, source: Source) -> tuple[Table, object]:
    """The tensors by name and the tree. Raises `HeaderError` for missing tensors, `MetadataError` for impossible values."""
    if not recorded:
        return stored, stored
    rows = stored.row_indices if recorded.changes_tensors else {}
    for other, first in recorded.aliases.items():
        if first not in rows:
            raise HeaderError(
                f"at {format_pointer('aliases', other)}: there is no tensor {quote(first)}",
                tensor=other,
            )
        if other in rows:
            raise HeaderError(
                f"at {format_pointer('aliases', other)}: a tensor that has bytes of its own",
                tensor=other,
            )
    for name in (*recorded.views, *recorded.pairs):
        if name not in rows:
            field = "views" if name in recorded.views else "dtypes"
            raise HeaderError(
                f"at {format_pointer(field)}: there is no tensor {quote(name)}", tensor=name
            )
    for name, view in recorded.views.items():
        _check_view(_as_pairs(stored[name]) if name in recorded.pairs else stored[name], view)
    tensors = with_recorded(stored, recorded) if recorded.changes_tensors else stored
    if recorded.flat:
        return tensors, tensors
    tree, found = decode_tree(recorded.tree, tensors.__getitem__, source, at=("tree",))
    for name in tensors:
        if name not in found:
            raise HeaderError(
                f"at {format_pointer('tree')}: the tensor {quote(name)} is missing", tensor=name
            )
    return ViewTable(found), tree


def _check_view(tensor: LazyTensor, view: AliasView) -> None:
    bits = tensor.dtype.bits
    last = view.offset + (bits if tensor.size else 0)
    fits = len(view.strides) == tensor.ndim
    if fits and tensor.size:
        last += sum((n - 1) * stride for n, stride in zip(tensor.shape, view.strides, strict=True))
    whole = tensor.dtype.packed or not any(place % 8 for place in (view.offset, *view.strides))
    if not fits or not whole or last > view.nbytes * 8:
        message = (
            f"at {format_pointer('views', view.group, 'names', tensor.name)}: no view of {list(tensor.shape)} {tensor.dtype} "
            f"in {view.nbytes:,} bytes"
        )
        raise MetadataError(message, tensor=tensor.name, expected=view.nbytes * 8, found=last)


def _as_pairs(tensor: LazyTensor) -> LazyTensor:
    if tensor.dtype is PAIRS_DTYPE:
        return tensor
    if (
        tensor.dtype.name != "float4_e2m1fn"
        or not tensor.ndim
        or tensor.shape[-1] % 2
        or len(tensor.chunks) != 1
    ):
        raise MetadataError(
            f"{tensor.dtype} {list(tensor.shape)} is no {PAIRS}",
            tensor=tensor.name,
            found=tensor.shape,
        )
    shape = (*tensor.shape[:-1], tensor.shape[-1] // 2)
    pairs = LazyTensor.contiguous(
        tensor.name, PAIRS_DTYPE, shape, tensor.chunks[0].storage, tensor.source
    )
    return replace(pairs, traits=tensor.traits)
