"""The files and chunks that a new native directory takes over from an older one, its *base*.

    base    data-00001  w1 w2 w3 x1 x2        new    data-00001  w1 w2 w3 ▒▒ ▒▒     the same file, a hard link
                                                     data-00002  x1 x2              what changed since

1. A tensor that has not changed stays where it is. The others go to new files. Old bytes stay in a file that is taken over (▒); the
   manifest does not name them.
2. A file of which less than half is alive is not taken over: its living tensors are written again, to a file of their own, so that
   tensors that change at one rate come together.
3. If there are more than `MANY` small files of older steps, they are written again as one.

New files have later names, so that a program that reads all files in the order of their names meets the living tensor last.

In a group each rank decides for its own boxes: it takes over files of the base in which all boxes are its own.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import repeat

import msgspec
import numpy as np
from msgspec import field

from holdfast.core.arrays import Bools, Ints
from holdfast.core.box import Box
from holdfast.core.content_hash import HASH, HEAD_NBYTES, HashAndHead
from holdfast.core.table import Table
from holdfast.core.tensor import LazyTensor
from holdfast.core.value import Value
from holdfast.engine.saves import LinkedFile
from holdfast.formats.native.schema import DataFile, Parsed, StoredChunk

MANY = 16
"""The most small files of older steps in a directory."""

SMALL = 64
"""A small file has less than 1/SMALL of all living bytes."""

NUMBER = re.compile(r"data-(\d+)-of-")
TURN = re.compile(r"_(\d+)\.safetensors")

Chunks = Mapping[int, tuple[StoredChunk, ...]]
"""By row of a table: the chunks of a base with its elements. A chunk without a box has all elements."""


class Reuse(Value, frozen=True):
    """The part of a base that a new directory takes over: rows of a table, which are tensors or boxes of tensors."""

    linked: tuple[LinkedFile, ...] = ()
    chunks: Chunks = field(default_factory=dict)
    """The rows that stay in a file of the base. `file` is a number in `linked`."""
    moved: frozenset[int] = frozenset()
    """The rows that did not change, and are written again because their file is not taken over."""
    changed: frozenset[int] = frozenset()
    """The rows whose head shows a change: they get no hash, since they will probably change again."""
    taken: frozenset[str] = frozenset()
    """Names that a new file of a rank may not have: all files of the base, since other ranks may take them over."""
    notes: tuple[str, ...] = ()

    @property
    def files(self) -> tuple[DataFile, ...]:
        return tuple(DataFile(file.key, file.nbytes) for file in self.linked)

    def by_file(self) -> list[tuple[list[int], list[StoredChunk]]]:
        """For each file that is taken over: the rows of its chunks, and the chunks."""
        rows = [row for row, own in self.chunks.items() for _ in own]
        chunks = [chunk for own in self.chunks.values() for chunk in own]
        files = np.array([chunk.file for chunk in chunks], np.int64)
        inside = [(files == number).nonzero()[0].tolist() for number in range(len(self.linked))]
        return [([rows[at] for at in own], [chunks[at] for at in own]) for own in inside]

    def names(self, count: int) -> list[str]:
        """Names for so many new files, after the names of files that are taken over."""
        number = max(
            (int(found[1]) for file in self.linked if (found := NUMBER.match(file.key))), default=0
        )
        return [
            f"data-{i + 1:05}-of-{number + count:05}.safetensors"
            for i in range(number, number + count)
        ]

    def names_of_rank(self, rank: int, size: int) -> Iterator[str]:
        """Endless names for new files of a rank: after the files that it takes over, and never a file of the base."""
        stem = f"data-{rank + 1:05}-of-{size:05}"
        turn = max(
            (int(found[1]) for file in self.linked if (found := TURN.search(file.key))), default=0
        )
        while True:
            turn += 1
            if (name := f"{stem}_{turn:05}.safetensors") not in self.taken:
                yield name


class Base(Value, frozen=True):
    """A native directory that was opened and checked."""

    folder: str
    manifest: Parsed
    data_nbytes: Sequence[int]
    """Bytes behind the header of each file, those of no tensor included."""
    names: Mapping[str, str] = field(default_factory=dict)
    """New names of files of the base, by their old names: in an object store files are named, not linked."""

    def tensors(self, table: Table, rows: Sequence[int]) -> Chunks:
        """The chunks of rows that are tensors, where the base has a tensor of the same name, dtype and shape."""
        stored, names, kind = self.manifest.tensors, table.names, table.kind_indices
        outlines = [(one.dtype.name, one.shape) for one in table.kinds]
        then = {row: stored[names[row]] for row in rows if names[row] in stored}
        return {
            row: one.chunks
            for row, one in then.items()
            if (one.dtype, one.shape) == outlines[kind[row]]
        }

    def boxes(
        self, table: Table, shapes: Sequence[tuple[int, ...]], starts: Ints
    ) -> tuple[Chunks, set[int]]:
        """The chunks of rows that are boxes of one rank, where the base has them; and the files of the base without other boxes.

        `shapes` are those of the whole tensors, `starts` the lowest corners of the boxes, a row for each dimension.
        """
        dtypes, own = [one.dtype.name for one in table.kinds], [one.shape for one in table.kinds]
        names, kind = table.names, table.kind_indices
        whole = {names[row]: row for row in range(len(names)) if own[kind[row]] == shapes[row]}
        parts = {
            (
                names[row],
                start,
                tuple([a + n for a, n in zip(start, own[kind[row]], strict=True)]),
            ): row
            for row in (
                [row for row in range(len(names)) if own[kind[row]] != shapes[row]]
                if len(whole) < len(names)
                else ()
            )
            for start in (tuple(starts[: len(shapes[row]), row].tolist()),)
        }
        found: dict[int, tuple[StoredChunk, ...]] = {}
        elsewhere: list[StoredChunk] = []
        for name, stored in self.manifest.tensors.items():
            for chunk in stored.chunks:
                if (
                    chunk.start is None
                    or chunk.stop is None
                    or (chunk.stop == stored.shape and not any(chunk.start))
                ):
                    row = (
                        whole[name]
                        if name in whole and shapes[whole[name]] == stored.shape
                        else None
                    )
                else:
                    row = parts.get((name, chunk.start, chunk.stop))
                if row is None:
                    elsewhere.append(chunk)
                elif dtypes[kind[row]] == stored.dtype and shapes[row] == stored.shape:
                    if chunk.start is not None:
                        chunk = msgspec.structs.replace(chunk, start=None, stop=None)
                    found[row] = (chunk,)
        others = {chunk.file for chunk in elsewhere if chunk.bytes[0] < chunk.bytes[1]}
        return found, {*range(len(self.manifest.files))} - others

    def short(self, table: Table, chunks: Chunks) -> dict[int, int]:
        """The hashes in the base of rows that are no longer than a head and are read together."""
        if self.manifest.hash != HASH:
            return {}
        kind, irregular = table.kind_indices, table.irregular
        brief = [one.is_whole and one.nbytes <= HEAD_NBYTES for one in table.kinds]
        found = {
            row: own[0].hash
            for row, own in chunks.items()
            if brief[kind[row]]
            and own[0].hash is not None
            and own[0].start is None
            and not own[1:]
            and row not in irregular
        }
        return dict(zip(found, map(int, found.values(), repeat(16)), strict=True))

    def reuse(self, chunks: Chunks, files: Iterable[int]) -> Reuse:
        parts = _Parts.of([*chunks.values()])
        living = self._living(parts, files)
        small = [
            number for number, nbytes in living.items() if nbytes * SMALL < sum(living.values())
        ]
        if len(small) > MANY:
            living = self._living(parts, living.keys() - set(small))
        numbers = {number: place for place, number in enumerate(sorted(living))}
        inside = parts.inside(numbers).tolist()
        stay = {row: own for (row, own), there in zip(chunks.items(), inside, strict=True) if there}
        moved = frozenset(chunks.keys() - stay.keys())
        if any(number != place for number, place in numbers.items()):
            stay = {
                row: tuple(
                    [msgspec.structs.replace(chunk, file=numbers[chunk.file]) for chunk in own]
                )
                for row, own in stay.items()
            }
        kept = [self.manifest.files[number] for number in numbers]
        return Reuse(
            tuple(
                LinkedFile(self.names.get(file.name, file.name), file.nbytes, self.folder)
                for file in kept
            ),
            stay,
            moved,
            taken=frozenset(file.name for file in self.manifest.files),
        )

    def _living(self, parts: _Parts, files: Iterable[int]) -> dict[int, int]:
        """The files that are taken over, with the living bytes of each.

        A tensor that lies partly in a file that is not taken over is written again, so that it does not count in its other files.
        """
        kept = set(files)
        while True:
            counted = parts.inside(kept)[parts.owner]
            files, nbytes = parts.file[counted], np.zeros(len(self.manifest.files), np.int64)
            np.add.at(nbytes, files, parts.nbytes[counted])
            living = {number: int(nbytes[number]) for number in sorted(kept)}
            used = np.bincount(files).nonzero()[0].tolist()
            kept = {number for number in used if 2 * living[number] >= self.data_nbytes[number]}
            if kept == living.keys():
                return living


class _Parts(Value, frozen=True, eq=False):
    """The places of the chunks of many tensors, as columns: a row for each chunk."""

    count: int
    owner: Ints
    file: Ints
    nbytes: Ints

    @classmethod
    def of(cls, tensors: Sequence[Sequence[StoredChunk]]) -> _Parts:
        rows = [
            (owner, chunk.file, chunk.bytes[1] - chunk.bytes[0])
            for owner, chunks in enumerate(tensors)
            for chunk in chunks
        ]
        return cls(len(tensors), *np.array(rows, np.int64).reshape(-1, 3).T)

    def inside(self, files: Collection[int]) -> Bools:
        chosen = np.zeros(1 + max([*files, int(self.file.max(initial=0))]), np.bool_)
        chosen[[*files]] = True
        inside = np.ones(self.count, np.bool_)
        inside[self.owner[~chosen[self.file]]] = False
        return inside


def recorded_chunks(
    chunks: Sequence[StoredChunk], algorithm: str | None
) -> list[HashAndHead] | None:
    """The hashes or heads of all chunks; None where one has neither, or the algorithm is not ours."""
    if algorithm != HASH or any(chunk.hash is None and chunk.head is None for chunk in chunks):
        return None
    numbers = [
        [None if digits is None else int(digits, 16) for digits in (chunk.hash, chunk.head)]
        for chunk in chunks
    ]
    return [HashAndHead(hash, head) for hash, head in numbers]


def elements_of(tensor: LazyTensor, chunk: StoredChunk) -> LazyTensor:
    """The elements of a tensor that lie in the box of a chunk."""
    if chunk.start is None or chunk.stop is None:
        return tensor
    box = Box(chunk.start, chunk.stop)
    return tensor if box.shape == tensor.shape else tensor[box.slices]
