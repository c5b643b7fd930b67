"""The text of a manifest, whoever has written the data files: one process, a mesh, the ranks of a group.

What a part has written is columns: which boxes, where each lies in a file (`StoredBoxes`). `lay_out_index` sorts all of them by
tensor and makes the text by kind, a batch of tensors at a time. Its length is known before the checksums are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from itertools import accumulate, chain, pairwise
from operator import add, mul

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
from holdfast.formats.native.chunks import sparse_in
from holdfast.formats.native.schema import (
    BESIDE_VERSION,
    FORMAT,
    HASHED_VERSION,
    VERSION,
    DataFile,
    Manifest,
    OtherFile,
    StoredChunk,
    StoredSparse,
    StoredTensor,
)
from holdfast.formats.safetensors.record import CRC_DIGITS, MANIFEST
from holdfast.formats.safetensors.write import plain_index

INDEX = "model.safetensors.index.json"
"""What `transformers` looks for."""

CANNOT = "a native checkpoint cannot hold this state"
NO_BOXES = np.zeros(0, np.int64)

PIECE = 1 << 10
"""Tensors of which the text is made at a time: what is made of each on the way takes four times the text."""


class StoredBoxes(msgspec.Struct):
    """Where boxes lie in a data file, as a rank says it: columns of 64-bit integers, little-endian."""

    boxes: bytes
    """Which they are: positions among the boxes of the rank."""
    starts: bytes
    """The first byte of each."""
    stops: bytes
    crcs: str = ""
    """Eight digits each."""
    tails: list[str] = field(default_factory=list)
    """What the manifest says behind the checksum of each, as text: its hash, its head; nothing where there are none."""
    packed: dict[int, StoredSparse] = field(default_factory=dict)
    """How some of them are packed, by their positions here; the numbers of files are counted from that of this one."""

    @classmethod
    def of(cls, boxes: Sequence[int], chunks: Sequence[StoredChunk]) -> StoredBoxes:
        """The same of chunks that are all in one file, but for parts of packed ones."""
        spans = np.array([chunk.bytes for chunk in chunks], np.int64).reshape(-1, 2).T
        hashed = [chunk for chunk in chunks if chunk.hash or chunk.head]
        tails = [
            ("" if chunk.hash is None else f',"hash":"{chunk.hash}"') + ("" if chunk.head is None else f',"head":"{chunk.head}"')
            for chunk in (chunks if hashed else ())
        ]
        packed = {
            at: sparse_in(chunk.sparse, partial(add, -chunk.file)) for at, chunk in enumerate(chunks) if chunk.sparse is not None
        }
        digits = "".join([chunk.crc32 for chunk in chunks])
        return cls(as_bytes(boxes), as_bytes(spans[0]), as_bytes(spans[1]), digits, tails, packed)


def as_bytes(column: Sequence[int] | Ints) -> bytes:
    """A column of integers, as it travels."""
    return np.asarray(column, "<i8").tobytes()


def as_column(raw: bytes) -> Ints:
    """The column again."""
    return np.frombuffer(raw, "<i8").astype(np.int64, copy=False)


class Outlines(Value, frozen=True, eq=False):
    """The tensors of a manifest."""

    names: Sequence[str]
    kinds: Sequence[tuple[str, tuple[int, ...]]]
    """Dtypes, by Holdfast's names, and shapes."""
    kind: Sequence[int] | Ints
    """Of each tensor, a position in `kinds`."""


class FileBoxes(Value, frozen=True, eq=False):
    """The boxes of one data file, and what they are boxes of."""

    stored: StoredBoxes
    """Of what is written later its places alone count."""
    tensors: Ints
    """Of each box of the rank: its tensor, as a position among the outlines."""
    starts: Ints
    """Of each box of the rank: its lowest corner, a row for each dimension of the tensor that has the most."""
    sizes: Ints
    tails_nbytes: int
    """How long the texts of its hashes are, together."""


Stored = Callable[[Mapping[str, int]], Sequence[StoredBoxes]]
"""From the checksums of all data, by label, to the boxes in each file."""


def are_whole(starts: Ints, sizes: Ints, extents: Ints) -> Bools:
    """Whether boxes are all of their tensors, whose extents may have fewer dimensions or more."""
    rank = min(len(starts), len(extents))
    whole: Bools = ~np.logical_or.reduce((starts[:rank] != 0) | (sizes[:rank] != extents[:rank]))
    return whole


def lay_out_index(
    files: Sequence[DataFile],
    outlines: Outlines,
    parts: Sequence[FileBoxes],
    *,
    later: Stored | None = None,
    fields: Mapping[str, object],
    metadata: Mapping[str, str],
    alone: bool = False,
) -> tuple[FilePlan, ...]:
    """What makes data files a native directory, in the order in which it is written: the manifest is last.

    It lists the tensors that have boxes. With `later`, checksums and hashes are not known yet: the manifest is one late segment,
    whose length does not depend on them. `fields` are those of `formats.recorded`. There is an index for `transformers` where it
    could read the files: where every tensor is whole, in one file, and not packed; and not with `alone`, in an object store, where
    the index would be the one name that two saves at once both write.

    Raises `CannotHold` where the manifest would be longer than a reader takes.
    """
    chunks = _Chunks(parts, outlines)
    others = [] if alone or not chunks.whole else [plain_index(INDEX, [file.name for file in files], *chunks.weights())]
    version, hash = (HASHED_VERSION, HASH) if any(part.tails_nbytes for part in parts) else (VERSION, msgspec.UNSET)
    version = BESIDE_VERSION if any("/" in file.name for file in files) else version
    rest = {name: msgspec.Raw(msgspec.json.encode(value)) for name, value in fields.items()}
    manifest = Manifest(FORMAT, version, tuple(files), {}, dict(metadata), others=_other_files(others), hash=hash)
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
        return put_together(sealed_pieces(chain((before,), chunks.pieces(stored), (behind,)), nbytes), nbytes)

    return (*others, FilePlan(MANIFEST, (Literal(make({})) if later is None else Late(nbytes, make),)))


def _other_files(plans: Sequence[FilePlan]) -> tuple[OtherFile, ...] | msgspec.UnsetType:
    """The manifest's field about files that are known before any data is: their names, lengths and checksums."""
    listed = []
    for plan in plans:
        crc = 0
        for segment in plan.segments:
            crc = crc32(segment.data, crc) if isinstance(segment, Literal) else crc
        listed.append(OtherFile(plan.key, plan.nbytes, f"{crc:08x}"))
    return tuple(listed) or msgspec.UNSET


class _Chunks:
    """All boxes of a manifest, sorted by tensor; those of one tensor in the order of their files."""

    def __init__(self, parts: Sequence[FileBoxes], outlines: Outlines) -> None:
        self._parts = parts
        kind_of, extents = np.asarray(outlines.kind, np.int64), shape_columns([shape for _, shape in outlines.kinds])
        numbers = [as_column(part.stored.boxes) for part in parts]
        counts = [*map(len, numbers)]
        self._edges = [*accumulate(counts, initial=0)]
        boxed: dict[int, str] = {}
        owned = [NO_BOXES]
        for part, own, first in zip(parts, numbers, self._edges, strict=False):
            owned.append(part.tensors[own])
            corners, sizes, kinds = part.starts[:, own], part.sizes[:, own], kind_of[owned[-1]]
            for at in (~are_whole(corners, sizes, extents[:, kinds])).nonzero()[0].tolist():
                rank = len(outlines.kinds[kinds[at]][1])
                start = corners[:rank, at]
                boxed[first + at] = f',"start":{_listed(start)},"stop":{_listed(start + sizes[:rank, at])}'
        tensors = np.concatenate(owned)
        order = self._order = tensors.argsort(kind="stable")
        owners = tensors[order]
        self._files = np.arange(len(parts)).repeat(counts)[order]
        self._starts = np.concatenate([NO_BOXES, *[as_column(part.stored.starts) for part in parts]])[order]
        self._stops = np.concatenate([NO_BOXES, *[as_column(part.stored.stops) for part in parts]])[order]
        begins = np.ones(len(owners), np.bool_)
        begins[1:] = owners[1:] != owners[:-1]
        self._heads = begins.nonzero()[0]
        of_each = owners[self._heads]
        every = len(of_each) == len(outlines.names)
        self._names = outlines.names if every else [outlines.names[tensor] for tensor in of_each.tolist()]
        self._quoted = as_keys(self._names)
        self._kinds, self._kind = outlines.kinds, kind_of[of_each]
        self._boxed = self._placed(boxed)

    @property
    def whole(self) -> bool:
        """Whether every tensor lies whole in one file, as it is in memory."""
        return not self._boxed and not any(part.stored.packed for part in self._parts)

    def weights(self) -> tuple[list[str], list[int], int]:
        """The names of all tensors in the order in which they lie in files, the number of the file of each, and all bytes."""
        names = self._names
        order = np.lexsort((self._stops, self._starts, self._files)).tolist()
        if (self._starts == self._stops).any():
            order.sort(key=lambda at: (self._files[at], self._starts[at], self._stops[at], names[at]))
        return [names[at] for at in order], self._files[order].tolist(), int((self._stops - self._starts).sum())

    def measure(self) -> tuple[int, int]:
        """How long the text will be, and how many lists and objects it will have; whatever the checksums are."""
        quote, keys = self._quoted
        every = "".join(keys)
        around = [f"{quote}{quote}{_opening(*kind)}{ENDING}" for kind in self._kinds]
        counts = np.bincount(self._kind, minlength=len(around)).tolist()
        chunks, more = len(self._order), len(self._order) - len(keys)
        texts = [*self._boxed.values(), *self._packed_texts([part.stored for part in self._parts]).values()]
        length = len(every.encode()) + sum(map(mul, counts, map(len, around))) + max(len(keys) - 1, 0)
        length += chunks * len(CHUNK) + more * len(NEXT) + sum(map(len, texts)) + sum(part.tails_nbytes for part in self._parts)
        length += sum(_digits(column) for column in (self._files, self._starts, self._stops))
        brackets = sum(map(mul, counts, map(_brackets, around))) + _brackets(every) + chunks + more
        return length, brackets + sum(map(_brackets, texts))

    def pieces(self, stored: Sequence[StoredBoxes]) -> Iterator[bytes]:
        """The text, from the first name to the end of the last tensor."""
        quote, keys = self._quoted
        openings = [f"{quote}{_opening(*kind)}" for kind in self._kinds]
        seps, openings = [*[f"{ENDING},{quote}"] * len(openings), ""], [*openings, NEXT]
        sums = np.frombuffer("".join([one.crcs for one in stored]).encode(), f"S{CRC_DIGITS}")
        hashed = any(one.tails for one in stored)
        counts = [last - first for first, last in pairwise(self._edges)]
        tails = [tail for one, count in zip(stored, counts, strict=True) for tail in one.tails or [""] * count] if hashed else []
        beyond = {**self._boxed}
        for at, text in self._packed_texts(stored).items():
            beyond[at] = beyond.get(at, "") + text
        places = sorted(beyond)
        for first in range(0, len(keys), PIECE):
            own = keys[first : first + PIECE]
            edges = [*self._heads[first : first + PIECE + 1].tolist(), len(self._order)][: PIECE + 1]
            low, high = edges[0], edges[-1]
            order = self._order[low:high]
            kind, named = self._kind[first : first + PIECE], own
            if high - low > len(own):
                # A chunk that is not the first of its tensor stands behind no name.
                kind, named = np.full(high - low, len(self._kinds)), [""] * (high - low)
                kind[self._heads[first : first + PIECE] - low] = self._kind[first : first + PIECE]
                for head, key in zip(edges, own, strict=False):
                    named[head - low] = key
            behind = [tails[at] for at in order.tolist()] if hashed else [""] * (high - low)
            for at in places[int(np.searchsorted(places, low)) : int(np.searchsorted(places, high))] if places else ():
                behind[at - low] = beyond[at] + behind[at - low]
            columns = (column[low:high].tolist() for column in (self._files, self._starts, self._stops))
            each = zip(named, kind.tolist(), *columns, sums[order].astype(str).tolist(), behind, strict=True)
            text = "".join([
                f'{seps[kind]}{key}{openings[kind]}{file},"bytes":[{start},{stop}],"crc32":"{crc}"{tail}'
                for key, kind, file, start, stop, crc, tail in each
            ])  # fmt: skip
            yield f"{text[len(ENDING) + (not first) :]}{ENDING}".encode()

    def _packed_texts(self, stored: Sequence[StoredBoxes]) -> dict[int, str]:
        """What is said of chunks that are packed, by their places."""
        found: dict[int, str] = {}
        for number, (one, first) in enumerate(zip(stored, self._edges, strict=False)):
            for at, sparse in one.packed.items():
                moved = sparse_in(sparse, partial(add, number))
                found[first + at] = f',"sparse":{msgspec.json.encode(moved).decode()}'
        return self._placed(found)

    def _placed(self, texts: dict[int, str]) -> dict[int, str]:
        """Texts of boxes, which were counted file by file, by their places."""
        if not texts:
            return {}
        place = np.empty(len(self._order), np.int64)
        place[self._order] = np.arange(len(self._order))
        return dict(zip(place[[*texts]].tolist(), texts.values(), strict=True))


def _listed(numbers: Ints) -> str:
    return f"[{','.join(map(str, numbers.tolist()))}]"


def _brackets(text: str) -> int:
    return text.count("[") + text.count("{")


CHUNK = ',"bytes":[,],"crc32":"%s"' % ("0" * CRC_DIGITS)
"""The text of a chunk behind the number of its file, without its two places."""

NEXT, ENDING = '},{"file":', "}]}"
"""What stands between two chunks of a tensor, and behind the last one."""

POWERS = 10 ** np.arange(1, 19)
"""The first number of two digits, of three, and so on."""


def _digits(numbers: Ints) -> int:
    """How many digits numbers have together."""
    return len(numbers) + int(POWERS.searchsorted(numbers, side="right").sum())


@lru_cache(1024)
def _opening(dtype: str, shape: tuple[int, ...]) -> str:
    """The text of a tensor behind its name, up to the number of its file."""
    text = msgspec.json.encode(StoredTensor(dtype, shape, (StoredChunk(0, (0, 0), ""),))).decode()
    return ":" + text[: text.rindex('"file":') + len('"file":')]
