"""`RankState`: what one rank has, in columns. Step 1 of a sharded save: names, dtypes, shapes, boxes, and no data.

A thousand ranks with five thousand tensors each are five million boxes that one process plans, so a box is three entries of arrays
and never an object. What does not differ between ranks is held once: the names, dtypes and shapes are a `Catalogue`, known
by its digest, and ranks that have the same tensors share one.

    catalogue   "w"  float32 (8, 4)     tensors   0   0   1     box 0 is w[0:2, 0:4], box 1 is w[6:8, 0:4],
                "b"  float32 (4,)       offsets   0   6   0     box 2 is b[0:4]
                                                  0   0   0
                                        sizes     2   2   4
                                                  4   4   1     dimensions that a tensor lacks: offset 0, size 1

Sizes may be 0: a rank whose shard is empty knows the tensor and writes none of it.

`encode` and `decode`: the bytes in which it travels to the rank that plans. Never a pickle: JSON, then columns of integers.

    byte 0         8         16        24          24 + C        24 + C + H                                      end
         ├─────────┼─────────┼─────────┼───────────┼─────────────┼───────────┼──────────────────┼────────────────┤
         │ hf-rank │ C,      │ H,      │ catalogue │ header,     │ tensors,  │ offsets, a column │ sizes, the     │
         │ version │ u64 LE  │ u64 LE  │ JSON      │ JSON␠␠␠     │ n × i64   │ a dimension       │ same           │

The catalogue stands by itself, so that one hash of its bytes tells whether it has been read before: of a thousand ranks with the
same tensors one is parsed. The spaces behind the header put the columns at a multiple of eight bytes. JSON is accepted in the
one form that `encode` writes, which leaves no room for double keys or two spellings of one name.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import msgspec
import numpy as np

from holdfast.core.arrays import Ints, shape_columns
from holdfast.core.box import Box
from holdfast.core.documents import UNLIMITED, D, DocumentType, read_document, write_document
from holdfast.core.dtype import DTYPES
from holdfast.core.table import Table
from holdfast.core.value import Value
from holdfast.errors import HeaderError, MetadataError

MAX_COUNT = 1 << 48
"""Elements of one tensor: half a petabyte of bfloat16. Sums over the tensors that are planned together then fit 64 bits."""

MAX_RANK = 64
"""Dimensions of one tensor. numpy and torch stop there as well."""

BITS = {row.name: row.bits for row in DTYPES.rows}
"""The bits of an element, by the names of dtypes."""

MAX_DIGEST_NBYTES = 64
"""No hash in use is longer."""


class CatalogueDocument(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]


CATALOGUE = DocumentType(
    name="catalogue of a rank",
    decoder=msgspec.json.Decoder(CatalogueDocument),
    max_nbytes=UNLIMITED,
    is_canonical=True,
)


@dataclass(frozen=True, eq=False)
class Catalogue:
    """The names, dtypes and shapes of tensors. Two are equal when their digests are."""

    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    """Names of rows of `DTYPES`."""
    shapes: tuple[tuple[int, ...], ...]
    """The shapes of the whole tensors, not of anybody's part."""
    positions: Mapping[str, int] = field(init=False, repr=False)
    """From a name to its place here."""
    extents: Ints = field(init=False, repr=False)
    """The shapes as columns: a row for each dimension of the tensor that has the most, filled up with ones."""
    rank: int = field(init=False, repr=False)
    """Dimensions of the tensor that has the most."""

    def __post_init__(self) -> None:
        if not len(self.names) == len(self.dtypes) == len(self.shapes):
            counts = f"{len(self.names)}, {len(self.dtypes)} and {len(self.shapes)}"
            raise MetadataError(
                f"a catalogue needs as many names as dtypes and shapes, got {counts}"
            )
        positions = dict(zip(self.names, range(len(self.names)), strict=True))
        if len(positions) < len(self.names):
            twice = next(name for i, name in enumerate(self.names) if positions[name] != i)
            raise MetadataError(f"two tensors are called {twice!r}", tensor=twice)
        for dtype in set(self.dtypes):
            if dtype not in BITS:
                name = self.names[self.dtypes.index(dtype)]
                raise MetadataError(f"there is no dtype called {dtype!r}", tensor=name, found=dtype)
        for shape in set(self.shapes):
            # Zeros count as ones: (0, 2**60) has no element, but its strides would not fit.
            count = math.prod([length or 1 for length in shape])
            if len(shape) > MAX_RANK or min(shape, default=0) < 0 or count > MAX_COUNT:
                name = self.names[self.shapes.index(shape)]
                raise MetadataError(
                    f"{shape} is no shape that a tensor can have", tensor=name, found=shape
                )
        object.__setattr__(self, "positions", positions)
        object.__setattr__(self, "extents", shape_columns(self.shapes))
        object.__setattr__(self, "rank", len(self.extents))

    @cached_property
    def encoded(self) -> bytes:
        """The catalogue as JSON. Equal catalogues have equal bytes. Raises `MetadataError` for names that are not Unicode."""
        return _encode(CATALOGUE, CatalogueDocument(self.names, self.dtypes, self.shapes))

    @cached_property
    def digest(self) -> bytes:
        return hashlib.blake2b(self.encoded, digest_size=16).digest()

    def __len__(self) -> int:
        return len(self.names)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Catalogue) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)


class RankState(Value, frozen=True, eq=False):
    """What one rank has. Validated when made, but for what only the other ranks can tell: whether its boxes fit theirs."""

    catalogue: Catalogue
    tensors: Ints
    """The tensor of each box, as a place in the catalogue. Any order, any number of boxes a tensor."""
    offsets: Ints
    """Lowest corners: a row for each of `catalogue.rank` dimensions, a column for each box."""
    sizes: Ints
    """Lengths, in the form of the offsets."""
    values: Mapping[str, bytes] = msgspec.field(default_factory=dict)
    """Everything that is not a tensor: its name, and a hash of its content, on which all ranks agree."""
    aliases: tuple[tuple[str, str], ...] = ()
    """Pairs (name, base) of tensors whose boxes on this rank are the same memory. A base is not itself an alias."""

    @classmethod
    def of_table(
        cls,
        table: Table,
        *,
        values: Mapping[str, bytes] | None = None,
        aliases: Iterable[tuple[str, str]] = (),
    ) -> RankState:
        """From the rows of a table. A row in one piece is one box, the whole tensor; an irregular row has one for each
        chunk.
        A tensor of which this rank has no part has one box without elements, or none where it has no dimensions.
        """
        dtypes, shapes = (
            [kind.dtype.name for kind in table.kinds],
            [kind.shape for kind in table.kinds],
        )
        kind = table.kind_indices
        catalogue = Catalogue(
            tuple(table.names), tuple([dtypes[k] for k in kind]), tuple([shapes[k] for k in kind])
        )
        counts = np.ones(len(table.names), np.int64)
        cut: dict[int, list[Box]] = {}
        for row, tensor in table.irregular.items():
            boxes = [chunk.box for chunk in tensor.chunks] or [
                Box((0,) * tensor.ndim, (0,) * tensor.ndim)
            ] * bool(tensor.ndim)
            if len(boxes) != 1 or boxes[0].shape != tensor.shape:
                cut[row], counts[row] = boxes, len(boxes)
        owners = np.arange(len(table.names), dtype=np.int64).repeat(counts)
        offsets, sizes = (
            np.zeros((catalogue.rank, len(owners)), np.int64),
            catalogue.extents.take(owners, axis=1),
        )
        firsts = counts.cumsum() - counts
        for row, boxes in cut.items():
            for number, box in enumerate(boxes, int(firsts[row])):
                offsets[: box.rank, number], sizes[: box.rank, number] = box.start, box.shape
        return cls(catalogue, owners, offsets, sizes, dict(values or {}), tuple(aliases))

    @property
    def count(self) -> int:
        return len(self.tensors)

    def __post_init__(self) -> None:
        if self.values or self.aliases:
            self._check_names()
        columns = self.tensors, self.offsets, self.sizes
        form = self.catalogue.rank, len(self.tensors)
        tensor_count = len(self.catalogue.names)
        if any(c.dtype != np.int64 for c in columns) or self.tensors.ndim != 1:
            raise MetadataError(
                f"boxes must be columns of int64, got {', '.join(f'{c.dtype}{c.shape}' for c in columns)}"
            )
        if self.offsets.shape != form or self.sizes.shape != form:
            raise MetadataError(
                f"{form[1]} boxes of up to {form[0]} dimensions need columns of that form",
                found=(self.offsets.shape, self.sizes.shape),
            )
        if not form[1]:
            return
        # A negative number is a very large one.
        if np.count_nonzero(self.tensors.view(np.uint64) >= tensor_count):
            raise MetadataError(
                f"a box belongs to a tensor outside of a catalogue of {tensor_count}"
            )
        if form[0] and (self.offsets.min() < 0 or self.sizes.min() < 0):
            place = int(
                np.flatnonzero((self.offsets < 0).any(axis=0) | (self.sizes < 0).any(axis=0))[0]
            )
            raise MetadataError("a box has a negative offset or size", tensor=self._name(place))
        # Beyond the rank of its tensor a box must be as if it had no more dimensions, or equal boxes would look different.
        ranks = np.fromiter(map(len, self.catalogue.shapes), np.int64, tensor_count)[self.tensors]
        for d in range(int(ranks.min()), form[0]):
            wrong = (ranks <= d) & ((self.offsets[d] != 0) | (self.sizes[d] != 1))
            if wrong.any():
                place = int(wrong.nonzero()[0][0])
                raise MetadataError(
                    f"a box has an extent in dimension {d}, which its tensor lacks",
                    tensor=self._name(place),
                )

    def _check_names(self) -> None:
        known = self.catalogue.positions
        if not self.values.keys().isdisjoint(known.keys()):
            raise MetadataError(
                f"{min(self.values.keys() & known.keys())!r} is the name of two things"
            )
        for name, digest in self.values.items():
            if len(digest) > MAX_DIGEST_NBYTES:
                raise MetadataError(
                    f"value {name!r} has a digest of {len(digest)} bytes; a hash is meant"
                )
        seen: set[str] = set()
        for name, base in self.aliases:
            if name not in known or base not in known or name == base or name in seen:
                raise MetadataError(f"{name!r} cannot be an alias of {base!r}", tensor=name)
            i, j = known[name], known[base]
            if (
                self.catalogue.dtypes[i] != self.catalogue.dtypes[j]
                or self.catalogue.shapes[i] != self.catalogue.shapes[j]
            ):
                raise MetadataError(
                    f"{name!r} and {base!r} share memory, but not dtype and shape", tensor=name
                )
            seen.add(name)
        for _, base in self.aliases:
            if base in seen:
                raise MetadataError(
                    f"{base!r} is an alias and cannot be the base of one", tensor=base
                )

    def _name(self, box: int) -> str:
        return self.catalogue.names[int(self.tensors[box])]


def _encode(kind: DocumentType[D], value: D) -> bytes:
    try:
        return write_document(kind, value)
    except HeaderError as error:
        raise MetadataError(error.message) from None


MAGIC = b"hf-rank\x02"
"""The kind of the message, and its version."""

PREFIX_NBYTES = 24
WORD = 8


class Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    boxes: int
    values: tuple[tuple[str, str], ...]
    """Name and digest in hexadecimal."""
    aliases: tuple[tuple[str, str], ...]


HEADER = DocumentType(
    name="header of a rank",
    decoder=msgspec.json.Decoder(Header),
    max_nbytes=UNLIMITED,
    is_canonical=True,
)


def encode(state: RankState) -> bytes:
    """A rank's state as bytes; `decode` gives it back."""
    catalogue = state.catalogue.encoded
    values = tuple((name, digest.hex()) for name, digest in state.values.items())
    header = _encode(HEADER, Header(state.count, values, state.aliases))
    header += b" " * (-(PREFIX_NBYTES + len(catalogue) + len(header)) % WORD)
    lengths = (len(part).to_bytes(WORD, "little") for part in (catalogue, header))
    columns = (
        column.astype("<i8", copy=False).tobytes()
        for column in (state.tensors, state.offsets, state.sizes)
    )
    return b"".join((MAGIC, *lengths, catalogue, header, *columns))


def decode(data: bytes, known: dict[bytes, Catalogue] | None = None) -> RankState:
    """The state in these bytes. Raises `HeaderError` or `MetadataError`, and nothing else, for any other bytes."""
    known = {} if known is None else known
    if data[:WORD] != MAGIC:
        raise HeaderError(f"the description of a rank begins with {MAGIC!r}", found=data[:WORD])
    if len(data) < PREFIX_NBYTES:
        raise HeaderError(f"the description of a rank ends after {len(data)} bytes")
    middle = PREFIX_NBYTES + int.from_bytes(data[WORD : 2 * WORD], "little")
    begin = middle + int.from_bytes(data[2 * WORD : PREFIX_NBYTES], "little")
    if begin > len(data) or begin % WORD:
        raise HeaderError(
            f"the header of a rank's description ends at byte {begin} of {len(data)}", offset=begin
        )
    digest = hashlib.blake2b(data[PREFIX_NBYTES:middle], digest_size=16).digest()
    if digest not in known:
        document = read_document(CATALOGUE, data[PREFIX_NBYTES:middle])
        known[digest] = Catalogue(document.names, document.dtypes, document.shapes)
    catalogue = known[digest]
    text = data[middle:begin].rstrip(b" ")
    if begin - middle - len(text) >= WORD:
        raise HeaderError("the header of a rank is not in the form in which it is written")
    header = read_document(HEADER, text)
    wanted = header.boxes * (1 + 2 * catalogue.rank) * WORD
    if header.boxes < 0 or begin + wanted != len(data):
        raise HeaderError(
            f"{header.boxes} boxes take {wanted} bytes, {len(data) - begin} are there", offset=begin
        )
    columns = np.frombuffer(data, "<i8", offset=begin).astype(np.int64, copy=False)
    tensors, offsets, sizes = np.split(columns, [header.boxes, header.boxes * (1 + catalogue.rank)])
    form = (catalogue.rank, header.boxes)
    return RankState(
        catalogue,
        tensors,
        offsets.reshape(form),
        sizes.reshape(form),
        _digests(header.values),
        header.aliases,
    )


def _digests(pairs: tuple[tuple[str, str], ...]) -> dict[str, bytes]:
    digests: dict[str, bytes] = {}
    for name, text in pairs:
        try:
            digest = bytes.fromhex(text)
        except ValueError as error:
            raise HeaderError(
                f"the digest of value {name!r} is no hexadecimal number", found=text
            ) from error
        # `fromhex` skips spaces and takes capitals.
        if digest.hex() != text:
            raise HeaderError(
                f"the digest of value {name!r} is not in the form in which it is written",
                found=text,
            )
        if name in digests:
            raise HeaderError(f"two values are called {name!r}")
        digests[name] = digest
    return digests
