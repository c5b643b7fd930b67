"""A directory that `torch.distributed.checkpoint.save` wrote.

    .metadata          which tensors there are, which boxes they were cut into, which item of which file holds each
    __0_0.distcp       the items of rank 0, one torch zip behind the other
    __1_0.distcp       …
    .holdfast.json     the checksum of .metadata, where Holdfast wrote it (`beside`)

Opening reads the metadata and the values that are no tensors. Where in its item a tensor's bytes are is found when it is read
(`lazy`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace

from holdfast.core.composite import Composite
from holdfast.core.opaque import Opaque
from holdfast.core.protocols import Description, Source
from holdfast.core.tensor import LazyTensor, Traits
from holdfast.core.tree import name_tensors
from holdfast.errors import MetadataError, Unsupported
from holdfast.formats.dcp.beside import compare_metadata
from holdfast.formats.dcp.index import Index, SavedTensor, is_index, read_index
from holdfast.formats.dcp.inflate import is_inflated
from holdfast.formats.dcp.lazy import Items, ItemStorage, Unread, chunk_of
from holdfast.formats.dcp.records import Item
from holdfast.formats.dcp.tree import Grown, grow
from holdfast.formats.dcp.values import read_values

__all__ = ["DATA_SUFFIX", "DcpDirectory"]

DATA_SUFFIX = ".distcp"
DATA_FILE = re.compile(r"__([0-9]+)_[0-9]+\.distcp")

SHOWN = 3


class DcpDirectory:
    """The format of `torch.distributed.checkpoint`."""

    name = "dcp"

    def matches(self, source: Source) -> bool:
        """Whether there is an index, or data files without one, which is an error worth its own words."""
        return any(is_index(key) or (key.endswith(DATA_SUFFIX) and "/" not in key) for key in source.store.list())

    def describe(self, source: Source) -> Description:
        """Read the index and the values that are no tensors, and check everything."""
        changed = compare_metadata(source)
        index = read_index(source)
        compressed = any(map(is_inflated, _items(index)))
        items = Items(source, inflate=compressed)
        values = read_values(items, _values(index))
        leaves: dict[str, object] = {}
        for name, entry in index.entries.items():
            if not isinstance(entry, SavedTensor):
                leaves[name] = entry if isinstance(entry, Opaque) else values.values[name]
            elif entry.dtype.kind == "quantized":
                leaves[name] = _quantized(values.values[name], entry, name)
            else:
                leaves[name] = _tensor(entry, name, items)
        planner = index.planner if isinstance(index.planner, dict) else {}
        grown = grow(leaves, planner, source.limits)
        named = name_tensors(grown.tree, source.limits, index.nbytes + values.nbytes)
        notes = [_summary(index), *index.notes, *_tree_notes(grown), *named.notes]
        if values.unread:
            notes.append(f"{values.unread:,} values that are no tensors are left unread, and not looked into for foreign objects")
        if compressed:
            notes.append("items are compressed with zstd, so reading any part of one inflates all of it")
        if changed is not None:
            notes.append(changed.message)
        foreign = (*index.foreign, *values.foreign)
        damage = () if changed is None else (changed,)
        return Description(self.name, named.tensors, grown.tree, foreign, tuple(notes), index.texts, damage)


def _items(index: Index) -> Iterable[Item]:
    for entry in index.entries.values():
        if isinstance(entry, SavedTensor):
            yield from (piece.item for piece in entry.pieces)
        elif isinstance(entry, Item):
            yield entry


def _values(index: Index) -> dict[str, Item]:
    """What is read when a directory is opened: values that are no tensors, and quantised tensors, whose scales are such values."""
    wanted: dict[str, Item] = {}
    for name, entry in index.entries.items():
        if isinstance(entry, Item):
            wanted[name] = entry
        elif isinstance(entry, SavedTensor) and entry.dtype.kind == "quantized":
            if len(entry.pieces) != 1:
                raise Unsupported("a quantised tensor in several pieces", tensor=name, found=len(entry.pieces))
            wanted[name] = entry.pieces[0].item
    return wanted


def _tensor(saved: SavedTensor, name: str, items: Items) -> LazyTensor:
    """A tensor over items that are asked when it is read."""
    chunks = tuple([chunk_of(piece, name, saved.dtype, items) for piece in saved.pieces])
    traits = Traits(requires_grad=saved.properties.requires_grad)
    if saved.dtype.kind == "complex":
        # torch saves a lazily conjugated tensor as it lies, and says so only in the item.
        found = {items.find(chunk.storage).conj for chunk in chunks if isinstance(chunk.storage, ItemStorage)}
        if len(found) > 1:
            raise MetadataError("pieces of one tensor of which some are conjugated", tensor=name)
        traits = replace(traits, conj=True in found)
    return LazyTensor("", saved.dtype, saved.size, chunks, items.source, traits)


def _quantized(value: object, saved: SavedTensor, name: str) -> object:
    """A quantised tensor out of its item, if that is what the metadata says."""
    if isinstance(value, Composite):
        whole = value.parts.get("int_repr")
        if whole is not None and whole.dtype is saved.dtype and whole.shape == saved.size:
            return value
    if isinstance(value, Unread):
        return value
    raise MetadataError(f"the metadata says {saved.dtype} {list(saved.size)}, and the item holds something else", tensor=name)


def _summary(index: Index) -> str:
    """Who wrote this, in one sentence."""
    ranks = {match[1] for file in index.files if (match := DATA_FILE.fullmatch(file))}
    writers = f"{len(ranks):,} rank{'s' if len(ranks) != 1 else ''} wrote " if ranks else ""
    version = f", metadata version {index.texts['version'][:32]}" if "version" in index.texts else ""
    save = f", save_id {index.texts['save_id'][:64]}" if "save_id" in index.texts else ""
    return f"{writers}{len(index.files):,} data file{'s' if len(index.files) != 1 else ''}{version}{save}"


def _tree_notes(grown: Grown) -> Iterable[str]:
    if grown.numbered:
        yield f"{grown.numbered:,} mappings have numbers for keys, as text: torch turns integer keys into text when it saves"
    if grown.holes:
        yield f"{grown.holes:,} list positions are empty: torch drops empty mappings when it saves"
    if grown.flat:
        shown = ", ".join(repr(name[:80]) for name in grown.flat[:SHOWN])
        yield f"the path of {len(grown.flat):,} names cannot be followed, so they stand at the top: {shown}"
