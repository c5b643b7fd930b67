"""`shards`: where the bytes lie: files as strips, tensors that are cut as boxes, and what the ranks of a mesh would read. Pure.

A file is a row of strips without a gap between them:

    │ header │ tensor 0 │ tensor 1 │ dead │ tensor 2 │ several small ones │ directory │

1. What tensors reach are strips of theirs. What lies before the first of them, behind the last, or in a short stretch between is
   how the format frames them. A long stretch between is a gap: bytes that no tensor reaches.
2. A page shows a few thousand strips. Where a file has more, neighbours that are narrower than a pixel are joined.
3. A rank of a mesh wants its box of each tensor. Tensors that are cut alike are asked once, so that a mesh of a thousand ranks over
   ten thousand tensors is arithmetic on a few dozen boxes.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from holdfast.core.box import Box
from holdfast.core.chunk import Chunk, Storage
from holdfast.core.sharing import ByteRange, group_overlapping_ranges
from holdfast.errors import BadPlacement
from holdfast.extras.reports.document import Document
from holdfast.extras.reports.structure import Structure, file_of
from holdfast.verbs.reshard import local_box, parse_mesh

TENSOR, HEADER, UNREACHED, JOINED = range(4)
"""The kinds of strips: of one tensor; of the format; reached by no tensor; of several small tensors."""

STRIPS, FEWEST = 4000, 40
"""Strips of one file; in all files there are five times as many, or `FEWEST` of each."""

FRAMING_NBYTES = 4096
"""A stretch between two storages that is no gap: headers of records and what aligns them."""

BOXES, RANKS = 20_000, 4096
"""Boxes of tensors that are cut, and ranks of a mesh, at the most."""

Stretch = tuple[int, int, int, int]
"""First byte, the byte behind the last, the kind, and the number of the tensor (-1 for none)."""


def shards(found: Structure, mesh: Mapping[str, int] | str | None = None) -> Document | None:
    """The map of a checkpoint's files; None where its bytes lie in none."""
    store = found.checkpoint.source.store
    known = set(store.list())
    files = [file for file in found.files if file in known]
    if not files:
        if mesh is None:
            return None
        return {"files": [], "boxes": _boxes(found, []), "replicas": 0, "gaps": 0, "mesh": None}
    spans = _spans(found, known)
    most = max(FEWEST, min(STRIPS, 5 * STRIPS // len(files)))
    drawn = {file: stretches_of(spans.get(file, []), store.size(file)) for file in files}
    return {
        "files": [
            {
                "name": file,
                "nbytes": store.size(file),
                "strips": list(map(list, joined(drawn[file], most))),
            }
            for file in files
        ],
        "boxes": _boxes(found, files),
        # Copies of boxes beyond the first, where the source keeps them apart and compares them.
        "replicas": sum(
            max(one.copies - 1, 0) for tensor in found.tensors.values() for one in tensor.storages
        ),
        "gaps": sum(kind == UNREACHED for strips in drawn.values() for _, _, kind, _ in strips),
        "mesh": None if mesh is None else _mesh(found, files, mesh_of(mesh)),
    }


def _spans(found: Structure, known: set[str]) -> dict[str, list[ByteRange[int]]]:
    """The ranges of tensors in each file, with the numbers of the tensors."""
    spans: dict[str, list[ByteRange[int]]] = {}
    for number, tensor in enumerate(found.tensors.values()):
        if tensor.traits.meta:
            continue
        for chunk in tensor.chunks:
            storage = chunk.storage
            ranges = storage.ranges
            if type(chunk) is Chunk and type(storage) is Storage:
                # An ordinary chunk has its own part of the storage, as its strides say.
                low, high = chunk.byte_range(tensor.dtype)
                ranges = ((storage.key, storage.start + low, storage.start + high),)
            for key, start, stop in ranges:
                if stop > start and key in known:
                    spans.setdefault(key, []).append((start, stop, number))
    return spans


def stretches_of(held: Sequence[ByteRange[int]], nbytes: int) -> list[Stretch]:
    """A file of so many bytes as strips, from its first byte to its last. What several tensors share is the first one's.

    >>> stretches_of([(100, 200, 0), (200, 300, 1), (90_000, 90_100, 2)], 90_200)
    [(0, 100, 1, -1), (100, 200, 0, 0), (200, 300, 0, 1), (300, 90000, 2, -1), (90000, 90100, 0, 2), (90100, 90200, 1, -1)]
    """
    made: list[Stretch] = []
    at = 0
    for group in group_overlapping_ranges(held):
        if group.start >= nbytes:
            break
        if group.start > at:
            gap = bool(made) and group.start - at > FRAMING_NBYTES
            made.append((at, group.start, UNREACHED if gap else HEADER, -1))
        at = min(group.stop, nbytes)
        made.append((group.start, at, TENSOR, group.members[0]))
    if at < nbytes:
        made.append((at, nbytes, HEADER if made or not held else UNREACHED, -1))
    return made


def joined(strips: Sequence[Stretch], most: int) -> Iterator[Stretch]:
    """At most so many strips: those narrower than a share of the file are joined with such neighbours.

    >>> list(joined([(0, 10, 1, -1), (10, 11, 0, 0), (11, 12, 0, 1), (12, 40, 0, 2)], 3))
    [(0, 12, 3, -1), (12, 40, 0, 2)]
    """
    if len(strips) <= most:
        yield from strips
        return
    narrow = 2 * (strips[-1][1] - strips[0][0]) / most
    for small, group in itertools.groupby(strips, lambda strip: strip[1] - strip[0] < narrow):
        members = list(group)
        if small and len(members) > 1:
            # What is only framing between tensors goes with them.
            yield from _runs(members, narrow)
        else:
            yield from members


def _runs(members: Sequence[Stretch], wide: float) -> Iterator[Stretch]:
    first = 0
    for at, strip in enumerate(members):
        if strip[1] - members[first][0] >= wide or at == len(members) - 1:
            yield (members[first][0], strip[1], JOINED, -1)
            first = at + 1


def _boxes(found: Structure, files: Sequence[str]) -> Document:
    numbers = {file: number for number, file in enumerate(files)}
    rows: list[tuple[int, int, Box]] = []
    for number, tensor in enumerate(found.tensors.values()):
        if len(tensor.chunks) < 2:
            continue
        for chunk in tensor.chunks:
            if len(rows) < BOXES:
                rows.append((number, _file(chunk, numbers), chunk.box))
    return {
        "tensor": [tensor for tensor, _, _ in rows],
        "file": [file for _, file, _ in rows],
        "offset": [list(box.start) for _, _, box in rows],
        "size": [list(box.shape) for _, _, box in rows],
    }


def _file(chunk: Chunk, numbers: Mapping[str, int]) -> int:
    """The number of the file that a chunk lies in; -1 where it is none of these."""
    ranges = chunk.storage.ranges
    return numbers.get(file_of(ranges[0][0], numbers), -1) if ranges else -1


def mesh_of(mesh: Mapping[str, int] | str) -> dict[str, int]:
    """A mesh: "4", "2x2", or as `reshard` takes it, "dp=2,tp=4".

    >>> mesh_of("2x4"), mesh_of("tp=8")
    ({'0': 2, '1': 4}, {'tp': 8})
    """
    if isinstance(mesh, str):
        sizes = re.fullmatch(
            r"\s*[0-9]{1,6}(\s*[x×]\s*[0-9]{1,6})*\s*",
            mesh,
            re.ASCII if "×" not in mesh else re.NOFLAG,
        )
        found = (
            {str(axis): int(size) for axis, size in enumerate(re.findall("[0-9]+", mesh))}
            if sizes
            else parse_mesh(mesh)
        )
    else:
        found = dict(mesh)
    ranks = math.prod(found.values())
    if not found or not 1 <= ranks <= RANKS:
        raise BadPlacement(
            f"a mesh of 1 to {RANKS:,} ranks is looked at, written like '4', '2x2' or 'dp=2,tp=4'; not {mesh!r}"
        )
    return found


def _mesh(found: Structure, files: Sequence[str], mesh: Mapping[str, int]) -> Document:
    """The files that each rank would read, and how many bytes, where the first axis cuts the first dimension, and so on."""
    numbers = {file: number for number, file in enumerate(files)}
    # Tensors that are cut alike are asked once.
    alike: Counter[tuple[tuple[int, ...], int, tuple[tuple[Box, int], ...]]] = Counter()
    for tensor in found.tensors.values():
        if not tensor.traits.meta:
            cut = tuple((chunk.box, _file(chunk, numbers)) for chunk in tensor.chunks)
            alike[tensor.shape, tensor.dtype.bits, cut] += 1
    ranks: list[Document] = []
    for rank, place in enumerate(itertools.product(*(range(size) for size in mesh.values()))):
        at = dict(zip(mesh, place, strict=True))
        bits: Counter[int] = Counter()
        for (shape, width, cut), times in alike.items():
            axes = {
                axis: dimension for dimension, axis in enumerate(mesh) if dimension < len(shape)
            }
            own = local_box(shape, mesh, at, axes=axes)
            for box, file in cut:
                part = own.intersect(box)
                if part is not None:
                    bits[file] += part.count * width * times
        ranks.append(
            {
                "rank": rank,
                "files": sorted(file for file in bits if file >= 0),
                "nbytes": sum(bits.values()) // 8,
            }
        )
    grid = f"in a grid of {' × '.join(map(str, mesh.values()))}, each along an axis of its own"
    layout = "along axis 0" if len(mesh) == 1 else grid
    return {"text": f"{len(ranks):,} ranks {layout}", "ranks": ranks}
