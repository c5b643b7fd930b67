"""The bytes in which a `RankState` travels to the rank that plans. Never a pickle: JSON, then columns of integers.

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
from collections.abc import Iterable, Mapping

import msgspec
import numpy as np

from holdfast.errors import HeaderError, MetadataError
from holdfast.ranks.state import Catalogue, RankState

__all__ = ["decode", "decode_all", "encode"]

MAGIC = b"hf-rank\x02"
"""What it is, and the version."""

PREFIX_NBYTES = 24
WORD = 8


class CatalogueDocument(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]


class Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    boxes: int
    values: tuple[tuple[str, str], ...]
    """Name and digest in hexadecimal."""
    aliases: tuple[tuple[str, str], ...]


CATALOGUES = msgspec.json.Decoder(CatalogueDocument)
HEADERS = msgspec.json.Decoder(Header)


def encode(state: RankState) -> bytes:
    """A rank's state as bytes; `decode` gives it back."""
    catalogue = state.catalogue.encoded()
    try:
        header = msgspec.json.encode(Header(state.count, _pairs(state.values), state.aliases))
    except UnicodeEncodeError as error:
        raise MetadataError(f"a name holds half a surrogate pair: {error.object!r}") from error
    header += b" " * (-(PREFIX_NBYTES + len(catalogue) + len(header)) % WORD)
    lengths = (len(part).to_bytes(WORD, "little") for part in (catalogue, header))
    columns = (column.astype("<i8", copy=False).tobytes() for column in (state.tensors, state.offsets, state.sizes))
    return b"".join((MAGIC, *lengths, catalogue, header, *columns))


def decode(data: bytes, known: dict[bytes, Catalogue] | None = None) -> RankState:
    """The state that the bytes tell. Raises `HeaderError` or `MetadataError`, and nothing else, for any other bytes.

    `known` holds the catalogues that were seen, by digest; a new one is added. The columns are views of `data`.
    """
    known = {} if known is None else known
    if data[:WORD] != MAGIC:
        raise HeaderError(f"the description of a rank begins with {MAGIC!r}", found=data[:WORD])
    if len(data) < PREFIX_NBYTES:
        raise HeaderError(f"the description of a rank ends after {len(data)} bytes")
    middle = PREFIX_NBYTES + int.from_bytes(data[WORD : 2 * WORD], "little")
    begin = middle + int.from_bytes(data[2 * WORD : PREFIX_NBYTES], "little")
    if begin > len(data) or begin % WORD:
        raise HeaderError(f"the header of a rank's description ends at byte {begin} of {len(data)}", offset=begin)
    catalogue = _catalogue(data[PREFIX_NBYTES:middle], known)
    header = _header(data[middle:begin])
    wanted = header.boxes * (1 + 2 * catalogue.rank) * WORD
    if header.boxes < 0 or begin + wanted != len(data):
        raise HeaderError(f"{header.boxes} boxes take {wanted} bytes, {len(data) - begin} are there", offset=begin)
    columns = np.frombuffer(data, "<i8", offset=begin).astype(np.int64, copy=False)
    tensors, offsets, sizes = np.split(columns, [header.boxes, header.boxes * (1 + catalogue.rank)])
    form = (catalogue.rank, header.boxes)
    return RankState(catalogue, tensors, offsets.reshape(form), sizes.reshape(form), _digests(header.values), header.aliases)


def decode_all(described: Iterable[bytes]) -> list[RankState]:
    """The states of all ranks, in order; those with the same tensors share one catalogue."""
    known: dict[bytes, Catalogue] = {}
    return [decode(data, known) for data in described]


def _catalogue(raw: bytes, known: dict[bytes, Catalogue]) -> Catalogue:
    digest = hashlib.blake2b(raw, digest_size=16).digest()
    if digest not in known:
        try:
            document = CATALOGUES.decode(raw)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise HeaderError(f"the catalogue of a rank: {error}", offset=PREFIX_NBYTES) from error
        catalogue = Catalogue(document.names, document.dtypes, document.shapes)
        if catalogue.digest != digest:
            raise HeaderError("the catalogue of a rank is not in the form in which it is written", offset=PREFIX_NBYTES)
        known[digest] = catalogue
    return known[digest]


def _header(raw: bytes) -> Header:
    try:
        header = HEADERS.decode(raw)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise HeaderError(f"the header of a rank: {error}") from error
    text = raw.rstrip(b" ")
    if msgspec.json.encode(header) != text or len(raw) - len(text) >= WORD:
        raise HeaderError("the header of a rank is not in the form in which it is written")
    return header


def _pairs(values: Mapping[str, bytes]) -> tuple[tuple[str, str], ...]:
    return tuple((name, digest.hex()) for name, digest in values.items())


def _digests(pairs: tuple[tuple[str, str], ...]) -> dict[str, bytes]:
    digests: dict[str, bytes] = {}
    for name, text in pairs:
        try:
            digest = bytes.fromhex(text)
        except ValueError as error:
            raise HeaderError(f"the digest of value {name!r} is no hexadecimal number", found=text) from error
        # `fromhex` skips spaces and takes capitals.
        if digest.hex() != text:
            raise HeaderError(f"the digest of value {name!r} is not in the form in which it is written", found=text)
        if name in digests:
            raise HeaderError(f"two values are called {name!r}")
        digests[name] = digest
    return digests
