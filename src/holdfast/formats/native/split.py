"""Lay out a native directory whose tensors are cut into boxes, one data file for each of several ranks.

holdfast.json                      every tensor with its boxes: file, bytes, checksum
data-00001-of-00004.safetensors    the boxes of rank 0, with torch's sharding metadata, so that torch's reader can join them
data-00002-of-00004.safetensors    …
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import msgspec

from holdfast.core.box import Box
from holdfast.core.protocols import State
from holdfast.formats.native.chunks import stored_chunk
from holdfast.formats.native.schema import (
    FORMAT,
    MANIFEST,
    VERSION,
    DataFile,
    Manifest,
    StoredChunk,
    StoredTensor,
    encode_manifest,
)
from holdfast.formats.native.write import OWN, carried, what_is_kept
from holdfast.formats.safetensors.pieces import FileLayout, plan_file
from holdfast.plan.saves import FilePlan, Late, SavePlan

__all__ = ["SHARDING_INFO", "lay_out_split", "sharding_texts"]

SHARDING_INFO = "DCP_SHARDING_INFO"
"""Where torch's reader of safetensors looks for the place of a piece in its tensor."""


def sharding_texts(boxes: Mapping[str, Box]) -> dict[str, str]:
    """What torch's distributed reader needs to know of a file: where the piece of each tensor begins."""
    offsets = {name: {"saved_offsets": list(box.start)} for name, box in boxes.items()}
    return {"DCP_VERSION": "1.0", SHARDING_INFO: json.dumps(offsets)}


def lay_out_split(state: State, parts: Sequence[Mapping[str, Box]]) -> SavePlan:
    """The plan of a directory in which rank r has the boxes `parts[r]`. All boxes of a tensor together tile it.

    Tensors that share memory are stored once, under the first of their names; boxes of the others are left out.
    """
    sharing, fields, notes = what_is_kept(state)
    written = sharing.written
    files = []
    for rank, boxes in enumerate(parts):
        own = {name: box for name, box in boxes.items() if name in written}
        pieces = [carried(name, written[name][box.slices] if box.rank else written[name]) for name, box in own.items()]
        key = f"data-{rank + 1:05}-of-{len(parts):05}.safetensors"
        files.append(plan_file(key, pieces, sharding_texts(own), OWN, label=f"{rank} "))
    manifest = _manifest(state, {n: (t.dtype.name, t.shape) for n, t in written.items()}, parts, files, fields)
    return SavePlan("native", tuple(file.plan for file in files), tuple(notes), directory=True, index=(manifest,))


def _manifest(
    state: State,
    written: Mapping[str, tuple[str, tuple[int, ...]]],
    parts: Sequence[Mapping[str, Box]],
    files: Sequence[FileLayout],
    fields: Mapping[str, object],
) -> FilePlan:
    rest = {name: msgspec.Raw(msgspec.json.encode(value)) for name, value in fields.items()}
    listed = tuple(DataFile(file.plan.key, file.plan.nbytes) for file in files)

    def make(crcs: Mapping[str, int]) -> bytes:
        chunks: dict[str, list[StoredChunk]] = {name: [] for name in written}
        for rank, (boxes, file) in enumerate(zip(parts, files, strict=True)):
            for name, box in boxes.items():
                if name in written:
                    split = None if box.shape == written[name][1] else box
                    chunks[name].append(_chunk(name, rank, file, crcs, split))
        tensors = {name: StoredTensor(dtype, shape, tuple(chunks[name])) for name, (dtype, shape) in written.items()}
        return encode_manifest(Manifest(FORMAT, VERSION, listed, tensors, dict(state.metadata)), rest)

    blank = make({f"{rank} {name}": 0 for rank, boxes in enumerate(parts) for name in boxes})
    return FilePlan(MANIFEST, (Late(len(blank), make),))


def _chunk(name: str, rank: int, file: FileLayout, crcs: Mapping[str, int], box: Box | None) -> StoredChunk:
    def place(entry: str) -> tuple[int, tuple[int, int]]:
        return rank, file.places[entry]

    def crc(entry: str) -> int:
        return crcs[f"{rank} {entry}"]

    return stored_chunk(name, place, crc, box=box)
