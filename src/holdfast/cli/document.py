"""`holdfast show --json`: the whole description as one JSON document. The schema is in docs/cli.md; it only ever grows.

The document is ASCII: what is not is written as `\\uXXXX`, so hostile names are exact and harmless at once. Numbers
that JSON lacks (NaN, infinities, complex) are given as text.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from holdfast.cli.outline import LeafNode, branches, leaves, outline
from holdfast.cli.text import fields_of
from holdfast.core.checkpoint import Checkpoint
from holdfast.core.chunk import Chunk
from holdfast.core.tensor import LazyTensor
from holdfast.core.text import clip
from holdfast.core.tree import FREE_CHARACTERS
from holdfast.inspect.survey import survey
from holdfast.numeric.pack import SparseStorage

LONGEST = 1024
"""Characters of a name where it only says which other one is meant."""

LISTED = 1000
"""Items of a plain list that are given in full; of a longer one, the text in short and the count."""


def document(checkpoint: Checkpoint, *, wanted: Callable[[str], bool] = lambda name: True) -> dict[str, object]:
    """The checkpoint as values that JSON has. `wanted` chooses the names of tensors and values that are listed."""
    found = survey(checkpoint)
    root = outline(checkpoint, found, split=False)
    everywhere = list(leaves(root))
    values = _Values(FREE_CHARACTERS + checkpoint.stored_nbytes)
    roles = {leaf.name: leaf.role for leaf in everywhere if leaf.role}
    return {
        "schema": 1,
        "path": checkpoint.path,
        "format": checkpoint.format,
        "nbytes": found.nbytes,
        "tensors": [
            _tensor(name, tensor, roles.get(name, ""), tie=found.ties.get(name, ""))
            for name, tensor in found.tensors.items()
            if wanted(name)
        ],
        "values": [values.entry(leaf) for leaf in everywhere if leaf.kind != "tensor" and wanted(leaf.name)],
        "objects": [
            {"name": b.name, "kind": b.kind, "class": b.text}
            for b in branches(root)
            if b.kind in ("object", "module") and wanted(b.name)
        ],
        "aliases": [{"names": list(a.names), "storage": a.storage.label} for a in found.aliases],
        "foreign": [
            {"module": f.what.module, "name": f.what.name, **fields_of(f, "uses stream offset paths")} for f in checkpoint.foreign
        ],
        "notes": list(checkpoint.notes),
        "metadata": dict(checkpoint.metadata),
    }


def _tensor(name: str, tensor: LazyTensor, role: str, *, tie: str) -> dict[str, object]:
    traits = tensor.traits
    return {
        "name": name,
        "dtype": tensor.dtype.name,
        "shape": list(tensor.shape),
        "nbytes": tensor.nbytes,
        "role": role or None,
        "requires_grad": traits.requires_grad,
        "subclass": str(traits.subclass) if traits.subclass is not None else None,
        "meta": traits.meta,
        "blocks": traits.blocks,
        "same_as": tie.removeprefix("= ") if tie.startswith("= ") else None,
        "chunks": [_chunk(chunk) for chunk in tensor.chunks],
    }


def _chunk(chunk: Chunk) -> dict[str, object]:
    storage = chunk.storage
    return {
        "start": list(chunk.box.start),
        "stop": list(chunk.box.stop),
        "bit_offset": chunk.offset,
        "bit_strides": list(chunk.strides),
        "file": storage.key,
        "storage_start": storage.start,
        "storage_nbytes": storage.nbytes,
        "storage_label": storage.label,
        "byteorder": storage.byteorder,
        "crc32": storage.crc32,
        "location": storage.location,
    } | (_sparse(storage) if isinstance(storage, SparseStorage) else {})


def _sparse(storage: SparseStorage) -> dict[str, object]:
    """How a packed chunk is stored: `file` is the name of its dense bytes, and these are the ranges in the real file."""
    parts = [{"file": p.key, **fields_of(p, "start nbytes label crc32")} for p in storage.parts]
    encoding = storage.encoding
    return {"encoding": encoding.name, "sizes": list(encoding.sizes), "stored_nbytes": storage.stored_nbytes, "parts": parts}


class _Values:
    """Entries for plain values; `room` is how many characters and items are still given in full.

    One long text may stand in a million places, so that the document would be that much longer than the file: what does not
    fit is given in short.
    """

    def __init__(self, room: int) -> None:
        self._room = room

    def entry(self, leaf: LeafNode) -> dict[str, object]:
        if leaf.kind == "link":
            return {"name": leaf.name, "type": "link", "to": clip(leaf.text, LONGEST)}
        entry: dict[str, object] = {"name": leaf.name, "type": leaf.type, "text": leaf.text}
        if isinstance(leaf.value, list | tuple):
            entry["count"] = len(leaf.value)
            if len(leaf.value) <= LISTED and self._fits(leaf.value) and all(map(_native, leaf.value)):
                entry["value"] = list(leaf.value)
        elif _native(leaf.value) and self._fits((leaf.value,)):
            entry["value"] = leaf.value
        return entry

    def _fits(self, values: Sequence[object]) -> bool:
        """Pay for writing these out, if that is still possible."""
        price = sum(len(value) if isinstance(value, str) else 1 for value in values)
        if price > self._room:
            return False
        self._room -= price
        return True


def _native(value: object) -> bool:
    """Whether JSON can say a value exactly."""
    if isinstance(value, float):
        return math.isfinite(value)
    return value is None or type(value) in (bool, int, str)
