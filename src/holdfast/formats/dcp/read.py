"""A directory that `torch.distributed.checkpoint.save` wrote.

    .metadata          which tensors there are, which boxes they were cut into, which item of which file holds each
    __0_0.distcp       the items of rank 0, one torch zip behind the other
    __1_0.distcp       …
    .holdfast.json     the checksum of .metadata, where Holdfast wrote it (`index`)

Opening reads the metadata and the values that are no tensors. The place of a tensor in its item is found when it is read (`lazy`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import numpy as np
from msgspec import Struct, field

from holdfast.core.leaves import name_tensors
from holdfast.core.limits import Limits
from holdfast.core.opaque import Opaque
from holdfast.core.protocols import Description, Foreign, Source
from holdfast.core.tensor import PLAIN_TRAITS, Composite, LazyTensor, Traits
from holdfast.core.tree import join_path
from holdfast.core.value import replace
from holdfast.errors import MetadataError, Unsupported
from holdfast.formats.dcp.index import (
    SavedTensor,
    cut_short,
    is_index,
    read_index,
)
from holdfast.formats.dcp.inflate import is_inflated
from holdfast.formats.dcp.item import Items
from holdfast.formats.dcp.lazy import ItemStorage, ItemTable, Unread, chunk_of
from holdfast.formats.dcp.schema import Item

POSITIONS = 1024
"""Valid positions beyond the number of leaves: empty mappings have no leaf, and leave holes."""

HOLES = 16
"""The most holes of a list, plus one for every element. With more holes it stays a dict of positions."""


class Branch(dict[str | int, object]):
    """A container that is being put together, so that it is not taken for a dict that is a leaf."""


class Grown(Struct):
    """A nested state, and counts of what is unknown."""

    tree: dict[str | int, object]
    flat: list[str] = field(default_factory=list)
    holes: int = 0
    """Empty positions in lists."""
    numbered: int = 0
    """Mappings whose keys are numbers as text."""
    notes: list[str] = field(default_factory=list)


def grow(leaves: Mapping[str, object], paths: Mapping[object, object], limits: Limits) -> Grown:
    """The nested state of named leaves. `paths` comes from the planner, and may contain anything.

    torch joins the path of each leaf with dots, and stores the path: keys of mappings as text, positions in lists as integers. So
    {"opt": [{"lr": 1}]} has the name `opt.0.lr` and the path ("opt", 0, "lr"). Lost are keys that were no text (3 became "3") and
    empty mappings, which have no leaf; in a list they leave a hole, which is None as in torch.

    A leaf stands at the top under its name if its path is malformed, goes through another leaf, or does not give its name.
    """
    grown = Grown({})
    root = Branch()
    branches: list[tuple[Branch, str | int, Branch]] = []
    """Every branch below the root, behind the branch that holds it."""
    most = len(leaves) + POSITIONS
    for name, leaf in leaves.items():
        path = _path(name, paths.get(name, (name,)), limits, most=most)
        if path is None or not _put(root, path, leaf, branches):
            grown.flat.append(name)
    for name in grown.flat:
        if not _put(root, (name,), leaves[name], branches):
            raise MetadataError("two values have one name", tensor=name)

    for holder, step, branch in reversed(branches):
        holder[step] = _settle(branch, grown)
    tree = _settle(root, grown)
    grown.tree = tree if isinstance(tree, dict) else dict(enumerate(tree))
    if grown.numbered:
        grown.notes.append(
            f"{grown.numbered:,} mappings have numbers for keys, as text: torch turns integer keys into text when it saves"
        )
    if grown.holes:
        grown.notes.append(
            f"{grown.holes:,} list positions are empty: torch drops empty mappings when it saves"
        )
    if grown.flat:
        shown = ", ".join(repr(name[:80]) for name in grown.flat[:SHOWN])
        grown.notes.append(
            f"the path of {len(grown.flat):,} names cannot be followed, so they stand at the top: {shown}"
        )
    return grown


def _path(name: str, path: object, limits: Limits, *, most: int) -> tuple[str | int, ...] | None:
    if type(path) is not tuple or not 0 < len(path) <= limits.depth:
        return None
    characters = len(path) - 1
    for step in path:
        # Positions are few and near zero, so that dicts of them cannot be made to collide.
        if type(step) is str:
            characters += len(step)
        elif type(step) is not int or not 0 <= step < most:
            return None
    # Not joined where it cannot be the name: the same long text may stand in every path.
    return path if characters <= len(name) and join_path(path) == name else None


def _put(
    root: Branch,
    path: tuple[str | int, ...],
    leaf: object,
    branches: list[tuple[Branch, str | int, Branch]],
) -> bool:
    """Put a leaf at a path, and list the branches that are made for it. Returns whether the place is free."""
    branch = root
    for step in path[:-1]:
        inner = branch.get(step)
        if step not in branch:
            inner = branch[step] = Branch()
            branches.append((branch, step, inner))
        if not isinstance(inner, Branch):
            return False
        branch = inner
    if path[-1] in branch:
        return False
    branch[path[-1]] = leaf
    return True


def _settle(branch: Branch, grown: Grown) -> dict[str | int, object] | list[object]:
    """Turn a finished branch into a dict, or into a list if all its steps are positions."""
    children = dict(branch)
    positions = [step for step in children if isinstance(step, int)]
    if positions and len(positions) == len(children):
        length = max(positions) + 1
        grown.holes += length - len(positions)
        if length > 2 * len(positions) + HOLES:
            return children
        return [children.get(position) for position in range(length)]
    if children and all(isinstance(step, str) and step.isdecimal() for step in children):
        grown.numbered += 1
    return children


EAGER_ITEMS = 20_000
"""The most values that are read when a directory is opened, in about a second. torch has a dozen for each parameter."""

EAGER_NBYTES = 32 << 20
"""The most bytes of these values. With more of either, every value is `Unread`."""

SMALL_NBYTES = 64 << 10


def read_values(
    items: Items, wanted: Mapping[str, Item]
) -> tuple[dict[str, object], list[Foreign], int]:
    """Values by name, globals that were not built, and bytes of small items. All values are `Unread` if reading would take long.

    Each value is an item of its own, 1.3 KB for a number. The values of a rank lie side by side at the front of its file, and are
    read together; a large one (a tuple with tensors) by its two ends and its pickle.
    """
    small = {name: item for name, item in wanted.items() if item.length <= SMALL_NBYTES}
    nbytes = sum(item.length for item in small.values())
    if len(wanted) > EAGER_ITEMS or nbytes > EAGER_NBYTES:
        return {name: Unread(items, item, name) for name, item in wanted.items()}, [], nbytes
    values: dict[str, object] = {}
    foreign: list[Foreign] = []
    files: dict[str, list[tuple[str, Item]]] = {}
    for name, item in small.items():
        if not item.transforms:
            size = items.source.store.size(item.file)
            if item.stop > size:
                raise cut_short(item, size, name)
            files.setdefault(item.file, []).append((name, item))
    for file, members in sorted(files.items()):
        starts, stops = np.array([(item.offset, item.stop) for _, item in members], np.int64).T
        for number, content in items.read_together(file, starts, stops):
            name, item = members[number]
            values[name], found = items.value(item, name, content)
            foreign += found
    for name, item in wanted.items():
        if name not in values:
            values[name], found = items.value(item, name)
            foreign += found
    return values, foreign, nbytes


DATA_SUFFIX = ".distcp"
DATA_FILE = re.compile(r"__([0-9]+)_[0-9]+\.distcp")

SHOWN = 3


def is_dcp(source: Source) -> bool:
    """Whether there is an index, or data files without one, for which `describe` has its own error."""
    return any(
        is_index(key) or (key.endswith(DATA_SUFFIX) and "/" not in key)
        for key in source.store.list()
    )


def describe(source: Source) -> Description:
    index = read_index(source)
    compressed = any(item.transforms and is_inflated(item) for _, item in index.items)
    items = Items(source, inflate=compressed)
    value_items: dict[str, Item] = {}
    for name, entry in index.entries.items():
        if isinstance(entry, Item):
            value_items[name] = entry
        elif isinstance(entry, SavedTensor) and entry.dtype.kind == "quantized":
            if len(entry.pieces) != 1:
                raise Unsupported(
                    "a quantised tensor in several pieces", tensor=name, found=len(entry.pieces)
                )
            value_items[name] = entry.pieces[0].item
    values, foreign, nbytes = read_values(items, value_items)
    leaves: dict[str, object] = {}
    for name, entry in index.entries.items():
        if not isinstance(entry, SavedTensor):
            leaves[name] = entry if isinstance(entry, Opaque) else values[name]
        elif entry.dtype.kind == "quantized":
            leaves[name] = _quantized(values[name], entry, name)
        else:
            leaves[name] = tensor_of(entry, name, items)
    planner = index.planner if isinstance(index.planner, dict) else {}
    grown = grow(leaves, planner, source.limits)
    named = name_tensors(grown.tree, source.limits, index.nbytes + nbytes)
    notes = [*index.notes, *grown.notes, *named.notes]
    if unread := sum(isinstance(value, Unread) for value in values.values()):
        notes.append(
            f"{unread:,} values that are no tensors are left unread, and not looked into for foreign objects"
        )
    if compressed:
        notes.append("items are compressed with zstd; reading a slice decompresses the whole item")
    damage = () if index.damage is None else (index.damage,)
    notes += [error.message for error in damage]
    every = (*index.foreign, *foreign)
    return Description(
        "dcp", ItemTable(named.tensors, items), grown.tree, every, tuple(notes), index.texts, damage
    )


def tensor_of(saved: SavedTensor, name: str, items: Items) -> LazyTensor:
    chunks = tuple([chunk_of(piece, name, saved.dtype, items=items) for piece in saved.pieces])
    grad, strides = saved.properties.requires_grad, saved.properties.strides
    traits = (
        Traits(requires_grad=grad, strides=strides) if grad or strides is not None else PLAIN_TRAITS
    )
    if saved.dtype.kind == "complex":
        # torch saves a lazily conjugated tensor as it lies, and says so only in the item.
        found = {
            items.find(chunk.storage).conj
            for chunk in chunks
            if isinstance(chunk.storage, ItemStorage)
        }
        if len(found) > 1:
            raise MetadataError("pieces of one tensor of which some are conjugated", tensor=name)
        traits = replace(traits, conj=True in found)
    return LazyTensor("", saved.dtype, saved.size, chunks, items.source, traits)


def _quantized(value: object, saved: SavedTensor, name: str) -> object:
    if isinstance(value, Composite):
        whole = value.parts.get("int_repr")
        if whole is not None and whole.dtype is saved.dtype and whole.shape == saved.size:
            return value
    if isinstance(value, Unread):
        return value
    raise MetadataError(
        f"the metadata says {saved.dtype} {list(saved.size)}, and the item holds something else",
        tensor=name,
    )
