"""The text of a manifest, for the data files of one process, of a mesh, or of the ranks of a group.

Every part says in columns which boxes it has written and where each lies in a file (`StoredBoxes`). `lay_out_index` sorts all boxes
by tensor and makes the text by kind, a batch of tensors at a time. The length of the text does not depend on the checksums.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate, chain, pairwise
from operator import mul

import msgspec
import numpy as np
from msgspec import field

from holdfast.core.arrays import Bools, Ints, shape_columns
from holdfast.core.content_hash import HASH
from holdfast.core.crc import crc32
from holdfast.core.documents import SEAL_NBYTES, sealed_pieces
from holdfast.core.limits import DEFAULTS
from holdfast.core.strict_json import as_keys, paid_nbytes
from holdfast.core.value import Value
from holdfast.engine.saves import FilePlan, Late, Literal, put_together
from holdfast.errors import CannotHold
from holdfast.formats.native.chunks import hash_text, runs_of
from holdfast.formats.native.schema import (
    BESIDE_VERSION,
    COLUMNS_VERSION,
    FORMAT,
    HASHED_VERSION,
    VERSION,
    DataFile,
    Manifest,
    OtherFile,
    StoredChunk,
    StoredColumns,
    StoredTensor,
)
from holdfast.formats.safetensors.record import CRC_DIGITS
from holdfast.formats.safetensors.schema import MANIFEST
from holdfast.formats.safetensors.write import index_text

INDEX = "model.safetensors.index.json"

CANNOT = "a native checkpoint cannot hold this state"
NO_BOXES = np.zeros(0, np.int64)

PIECE = 1 << 10
"""Tensors in one batch of text: temporary objects take four times the memory of the text."""

MANY_CHUNKS = 64
"""Chunks of a tensor that stand in columns. Fewer are text that older versions read, too."""


class StoredBoxes(msgspec.Struct):
    """The places of boxes in a data file, as a rank sends them: columns of 64-bit integers, little-endian."""

    boxes: bytes
    """Positions among the boxes of the rank."""
    starts: bytes
    stops: bytes
    crcs: str = ""
    tails: list[str] = field(default_factory=list)
    """The text behind the checksum of each box, with its hash and head; empty where there are none."""

    @classmethod
    def of(cls, boxes: Sequence[int], chunks: Sequence[StoredChunk]) -> StoredBoxes:
        """The columns of chunks that are all in one file."""
        spans = np.array([chunk.bytes for chunk in chunks], np.int64).reshape(-1, 2).T
        hashed = any(chunk.hash or chunk.head for chunk in chunks)
        tails = [hash_text(chunk.hash, chunk.head) for chunk in chunks] if hashed else []
        digits = "".join([chunk.crc32 for chunk in chunks])
        return cls(as_bytes(boxes), as_bytes(spans[0]), as_bytes(spans[1]), digits, tails)


def as_bytes(column: Sequence[int] | Ints) -> bytes:
    return np.asarray(column, "<i8").tobytes()


def as_column(raw: bytes) -> Ints:
    return np.frombuffer(raw, "<i8").astype(np.int64, copy=False)


Outlines = tuple[Sequence[str], Sequence[tuple[str, tuple[int, ...]]], Sequence[int] | Ints]
"""The tensors of a manifest: names; dtype names and shapes, each pair once; for each tensor a position among the pairs."""


class FileBoxes(Value, frozen=True, eq=False):
    stored: StoredBoxes
    """For a file that is not written yet, only the places count."""
    tensors: Ints
    """For each box of the rank the position of its tensor in the outlines."""
    starts: Ints
    """For each box of the rank its lowest corner: a row for each dimension of the tensor with the most dimensions."""
    sizes: Ints
    tails_nbytes: int


def are_whole(starts: Ints, sizes: Ints, extents: Ints) -> Bools:
    """Whether each box is all of its tensor. `extents` may have fewer or more dimensions."""
    rank = min(len(starts), len(extents))
    whole: Bools = ~np.logical_or.reduce((starts[:rank] != 0) | (sizes[:rank] != extents[:rank]))
    return whole


def lay_out_index(
    files: Sequence[DataFile],
    outlines: Outlines,
    parts: Sequence[FileBoxes],
    *,
    later: Callable[[Mapping[str, int]], Sequence[StoredBoxes]] | None = None,
    fields: Mapping[str, object],
    metadata: Mapping[str, str],
    alone: bool = False,
) -> tuple[FilePlan, ...]:
    """The files that make data files a native directory, in the order of writing: the manifest is last.

    The manifest lists the tensors that have boxes. `later` maps the checksums of all data, by label, to the boxes of each file:
    with it the manifest is one late segment, whose length does not depend on checksums. `fields` are those of `formats.recorded`.

    There is an index for `transformers` where every tensor is whole and in one file. With `alone`, in an object store, there is
    none: two saves at the same time would both write its name.

    Raises `CannotHold` for a manifest that is longer than a reader takes.
    """
    chunks = _Chunks(parts, outlines)
    others = (
        [] if alone or not chunks.whole else [chunks.weight_index([file.name for file in files])]
    )
    version, hash = (
        (HASHED_VERSION, HASH)
        if any(part.tails_nbytes for part in parts)
        else (VERSION, msgspec.UNSET)
    )
    version = BESIDE_VERSION if any("/" in file.name for file in files) else version
    version = COLUMNS_VERSION if chunks.columns else version
    # An index has literal text alone.
    texts = [
        (plan, b"".join([part.data for part in plan.segments if isinstance(part, Literal)]))
        for plan in others
    ]
    listed = tuple([OtherFile(plan.key, plan.nbytes, f"{crc32(text):08x}") for plan, text in texts])
    rest = {name: msgspec.Raw(msgspec.json.encode(value)) for name, value in fields.items()}
    manifest = Manifest(
        FORMAT, version, tuple(files), {}, dict(metadata), others=listed or msgspec.UNSET, hash=hash
    )
    raw = msgspec.json.encode(msgspec.structs.replace(manifest, **rest))
    at = raw.index(b'"tensors":{') + len(b'"tensors":{')
    before, behind = raw[:at], raw[at:-1]
    length, containers = chunks.measure()
    nbytes = max(len(before) + length + len(behind) + SEAL_NBYTES, paid_nbytes(raw, containers))
    most = DEFAULTS.index_nbytes
    if nbytes > most:
        raise CannotHold(CANNOT, [f"the manifest would have {nbytes:,} bytes, more than {most:,}"])

    def make(crcs: Mapping[str, int]) -> bytes:
        stored = [part.stored for part in parts] if later is None else later(crcs)
        return put_together(
            sealed_pieces(chain((before,), chunks.pieces(stored), (behind,)), nbytes), nbytes
        )

    return (
        *others,
        FilePlan(MANIFEST, (Literal(make({})) if later is None else Late(nbytes, make),)),
    )


class _Chunks:
    """All boxes of a manifest, sorted by tensor; those of one tensor in the order of their files."""

    def __init__(self, parts: Sequence[FileBoxes], outlines: Outlines) -> None:
        self._parts = parts
        names, self._kinds, kind = outlines
        kind_of, extents = (
            np.asarray(kind, np.int64),
            shape_columns([shape for _, shape in self._kinds]),
        )
        numbers = [as_column(part.stored.boxes) for part in parts]
        counts = [*map(len, numbers)]
        self._edges = [*accumulate(counts, initial=0)]
        boxed: dict[int, str] = {}
        tensors = np.concatenate(
            [NO_BOXES, *[part.tensors[own] for part, own in zip(parts, numbers, strict=True)]]
        )
        # Chunks with hashes have no columns.
        plain = not any(part.tails_nbytes for part in parts)
        many = (np.bincount(tensors, minlength=len(names)) >= MANY_CHUNKS) & plain
        for part, own, first in zip(parts, numbers, self._edges, strict=False):
            owners = part.tensors[own]
            corners, sizes, kinds = part.starts[:, own], part.sizes[:, own], kind_of[owners]
            for at in (
                (~(are_whole(corners, sizes, extents[:, kinds]) | many[owners]))
                .nonzero()[0]
                .tolist()
            ):
                rank = len(self._kinds[kinds[at]][1])
                box = {
                    "start": corners[:rank, at].tolist(),
                    "stop": (corners + sizes)[:rank, at].tolist(),
                }
                boxed[first + at] = "," + msgspec.json.encode(box).decode()[1:-1]
        order = self._order = tensors.argsort(kind="stable")
        owners = tensors[order]
        self._files = np.arange(len(parts)).repeat(counts)[order]
        self._starts = np.concatenate(
            [NO_BOXES, *[as_column(part.stored.starts) for part in parts]]
        )[order]
        self._stops = np.concatenate([NO_BOXES, *[as_column(part.stored.stops) for part in parts]])[
            order
        ]
        begins = np.ones(len(owners), np.bool_)
        begins[1:] = owners[1:] != owners[:-1]
        self._heads = begins.nonzero()[0]
        of_each = owners[self._heads]
        self._names = (
            names if len(of_each) == len(names) else [names[tensor] for tensor in of_each.tolist()]
        )
        self._quoted, self._kind = as_keys(self._names), kind_of[of_each]
        self._boxed = self._placed(boxed) if boxed else boxed
        self.columns = (
            dict(self._in_columns(numbers, many[of_each].nonzero()[0].tolist()))
            if many.any()
            else {}
        )

    def _in_columns(
        self, numbers: Sequence[Ints], places: Sequence[int]
    ) -> Iterator[tuple[int, tuple[bytes, bytes]]]:
        """The text of tensors in columns, by their places: what stands before and behind their checksums."""
        rank = max(len(part.starts) for part in self._parts)
        starts, stops = np.zeros((2, rank, len(self._order)), np.int64)
        for part, own, first in zip(self._parts, numbers, self._edges, strict=False):
            here = slice(first, first + len(own))
            starts[: len(part.starts), here] = part.starts[:, own]
            stops[: len(part.starts), here] = part.starts[:, own] + part.sizes[:, own]
        for at in places:
            dtype, shape = self._kinds[self._kind[at]]
            here = self._span(at)
            rows = self._order[here]
            corners = [
                [runs_of(column[d, rows]) for d in range(len(shape))] for column in (starts, stops)
            ]
            made = StoredColumns(
                runs_of(self._files[here]), runs_of(self._starts[here]), "", *map(tuple, corners)
            )
            text = msgspec.json.encode({self._names[at]: StoredTensor(dtype, shape, (), made)})[
                1:-1
            ]
            before, mark, behind = text.rpartition(b'"crc32":"')
            yield at, (before + mark, behind)

    @property
    def whole(self) -> bool:
        """Whether every tensor lies whole in one file."""
        return not self.columns and not self._boxed

    def weight_index(self, files: Sequence[str]) -> FilePlan:
        """The Hugging Face index: all tensors in the order in which they lie in files."""
        names = self._names
        order = np.lexsort((self._stops, self._starts, self._files)).tolist()
        if (self._starts == self._stops).any():
            order.sort(
                key=lambda at: (self._files[at], self._starts[at], self._stops[at], names[at])
            )
        total = {"total_size": int((self._stops - self._starts).sum())}
        return FilePlan(
            INDEX,
            index_text(total, files, [names[at] for at in order], self._files[order].tolist()),
        )

    def measure(self) -> tuple[int, int]:
        """The length of the text, and the number of lists and objects in it. Neither depends on checksums."""
        quote, keys = self._quoted
        listed, here = np.ones(len(keys), np.bool_), np.ones(len(self._order), np.bool_)
        length, brackets = max(len(keys) - 1, 0), 0
        for at, (before, behind) in self.columns.items():
            span = self._span(at)
            listed[at], here[span] = False, False
            length += len(before) + len(behind) + CRC_DIGITS * (span.stop - span.start)
            brackets += _brackets((before + behind).decode())
        keys = keys if not self.columns else [keys[at] for at in listed.nonzero()[0].tolist()]
        every = "".join(keys)
        around = [f"{quote}{quote}{_opening(*kind)}{ENDING}" for kind in self._kinds]
        counts = np.bincount(self._kind[listed], minlength=len(around)).tolist()
        chunks = int(here.sum())
        more = chunks - len(keys)
        texts = [*self._boxed.values()]
        length += len(every.encode()) + sum(map(mul, counts, map(len, around)))
        length += (
            chunks * len(CHUNK)
            + more * len(NEXT)
            + sum(map(len, texts))
            + sum(part.tails_nbytes for part in self._parts)
        )
        for numbers in (self._files[here], self._starts[here], self._stops[here]):
            length += len(numbers) + int(POWERS.searchsorted(numbers, side="right").sum())
        brackets += sum(map(mul, counts, map(_brackets, around))) + _brackets(every) + chunks + more
        return length, brackets + sum(map(_brackets, texts))

    def pieces(self, stored: Sequence[StoredBoxes]) -> Iterator[bytes]:
        quote, keys = self._quoted
        openings = [f"{quote}{_opening(*kind)}" for kind in self._kinds]
        seps, openings = [*[f"{ENDING},{quote}"] * len(openings), ""], [*openings, NEXT]
        sums = np.frombuffer("".join([one.crcs for one in stored]).encode(), f"S{CRC_DIGITS}")
        hashed = any(one.tails for one in stored)
        counts = [last - first for first, last in pairwise(self._edges)]
        tails = (
            [
                tail
                for one, count in zip(stored, counts, strict=True)
                for tail in one.tails or [""] * count
            ]
            if hashed
            else []
        )
        places = sorted(self._boxed)
        for first, last in self._batches():
            if first in self.columns:
                before, rest = self.columns[first]
                yield b"%b%b%b%b" % (
                    b"," if first else b"",
                    before,
                    sums[self._order[self._span(first)]].tobytes(),
                    rest,
                )
                continue
            own = keys[first:last]
            edges = [*self._heads[first : last + 1].tolist(), len(self._order)][: last - first + 1]
            low, high = edges[0], edges[-1]
            order = self._order[low:high]
            kind, named = self._kind[first:last], own
            if high - low > len(own):
                # A chunk that is not the first of its tensor stands behind no name.
                kind, named = np.full(high - low, len(self._kinds)), [""] * (high - low)
                kind[self._heads[first:last] - low] = self._kind[first:last]
                for head, key in zip(edges, own, strict=False):
                    named[head - low] = key
            behind = [tails[at] for at in order.tolist()] if hashed else [""] * (high - low)
            for at in (
                places[int(np.searchsorted(places, low)) : int(np.searchsorted(places, high))]
                if places
                else ()
            ):
                behind[at - low] = self._boxed[at] + behind[at - low]
            columns = (
                column[low:high].tolist() for column in (self._files, self._starts, self._stops)
            )
            each = zip(
                named,
                kind.tolist(),
                *columns,
                sums[order].astype(str).tolist(),
                behind,
                strict=True,
            )
            text = "".join([
                f'{seps[kind]}{key}{openings[kind]}{file},"bytes":[{start},{stop}],"crc32":"{crc}"{tail}'
                for key, kind, file, start, stop, crc, tail in each
            ])  # fmt: skip
            yield f"{text[len(ENDING) + (not first) :]}{ENDING}".encode()

    def _span(self, at: int) -> slice:
        """The chunks of a tensor."""
        return slice(
            int(self._heads[at]),
            int(self._heads[at + 1]) if at + 1 < len(self._heads) else len(self._order),
        )

    def _batches(self) -> Iterator[tuple[int, int]]:
        """Tensors whose text is made together: each that is in columns by itself."""
        count = len(self._heads)
        edges = {*range(0, count, PIECE), *self.columns, *(at + 1 for at in self.columns), count}
        return pairwise(sorted(edges))

    def _placed(self, texts: dict[int, str]) -> dict[int, str]:
        place = np.empty(len(self._order), np.int64)
        place[self._order] = np.arange(len(self._order))
        return dict(zip(place[[*texts]].tolist(), texts.values(), strict=True))


def _brackets(text: str) -> int:
    return text.count("[") + text.count("{")


CHUNK = ',"bytes":[,],"crc32":"%s"' % ("0" * CRC_DIGITS)
"""The text of a chunk behind the number of its file, without its two places."""

NEXT, ENDING = '},{"file":', "}]}"
"""What stands between two chunks of a tensor, and behind the last one."""

POWERS = 10 ** np.arange(1, 19)
"""The first number of two digits, of three, and so on."""


@lru_cache(1024)
def _opening(dtype: str, shape: tuple[int, ...]) -> str:
    text = msgspec.json.encode(StoredTensor(dtype, shape, (StoredChunk(0, (0, 0), ""),))).decode()
    return ":" + text[: text.rindex('"file":') + len('"file":')]
