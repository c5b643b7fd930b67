"""The manifest of a native directory: its schema, its text, and the way back.

    {"format": "holdfast", "version": 4,
     "files": [{"name": "data-00001-of-00001.safetensors", "nbytes": 472}],
     "tensors": {"w": {"dtype": "float32", "shape": [2, 3], "chunks": [{"file": 0, "bytes": [448, 472], "crc32": "5bb0e7a9"}]}},
     "metadata": {"step": "1000"},
     "aliases": {…}, "views": […], "tree": …,
     "others": [{"name": "model.safetensors.index.json", "nbytes": 168, "crc32": "9f3a01d2"}],
     "hash": "xxh3-128/1MiB",
     "self": "1c291ca3"}

A chunk of a tensor that is split has its box as well, `"start": [0, 0], "stop": [1, 3]`; without one it is the whole tensor.
`aliases`, `views` and `tree` are those of `formats.recorded` and stand there where they say something. A chunk that is stored
packed says how (`formats.native.chunks`). `others` are files beside the data that no tensor depends on. `self` is the checksum of
the manifest (`formats.strict_json.seal`), and is compared before anything else.

With `hash`, the name of an algorithm (`core.content_hash`), chunks have a hash of their elements and perhaps a head. Nobody needs
them to read; a later save compares with them what it would write (`formats.native.base`).

Versions 1 (no packed chunks) and 2 have neither `others` nor `self`, and are read as they always were. Version 3 has both, and a
manifest of version 3 without `self` is damaged. Version 4 has hashes; a manifest without them is written as version 3. Version 5
is for object stores, which have no links: a file may be named that lies in a folder beside this one,
`"../step-00001000/data-5f3a…-00001-of-00001.safetensors"` (`core.keys.beside`). It is written where one is.

There are two parsers, as for a safetensors header. msgspec reads the text that Holdfast writes; the proof that it read nothing else
is that it writes the same text again. Every other text goes through `strict_json`, which says what is wrong and where.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from typing import TypeVar

import msgspec

from holdfast.core.limits import Limits
from holdfast.core.value import Value
from holdfast.errors import Corrupted, HeaderError, Unsupported
from holdfast.formats.recorded import Recorded, parse_recorded
from holdfast.formats.strict_json import SEAL, check_seal, kind, paid_nbytes, parse, parse_parts, pointer, seal
from holdfast.formats.tree_json.decode import json_limits

FORMAT = "holdfast"
VERSION = 3
"""The one that is written where there are no hashes."""
SPARSE_VERSION = 2
"""The first in which a chunk may be stored packed."""
SEALED_VERSION = 3
"""The first that has a checksum of its own."""
HASHED_VERSION = 4
"""The first in which chunks may have hashes. Written where they have."""
BESIDE_VERSION = 5
"""The first in which files may lie in a folder beside this one. Written where one does."""


class StoredPart(msgspec.Struct, gc=False, frozen=True, forbid_unknown_fields=True):
    """One of the parts that a packed chunk has beside its values."""

    file: int
    bytes: tuple[int, int]
    crc32: str


class StoredSparse(msgspec.Struct, gc=False, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """How a chunk is packed. Its `bytes` are those of the values then, and its `crc32` that of the dense elements."""

    encoding: str
    """`bitmap`, `nm` or `block`."""
    sizes: tuple[int, ...]
    """Nothing; n and m; height and width."""
    values: str
    """CRC-32 of the values."""
    where: StoredPart
    starts: StoredPart | None = None


class StoredChunk(msgspec.Struct, gc=False, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One piece of one tensor. `gc=False`: it can hold no cycle, and there may be a million of them."""

    file: int
    """Which of the files."""
    bytes: tuple[int, int]
    """First byte in that file, and the byte after the last."""
    crc32: str
    """Of these bytes, as eight hexadecimal digits."""
    start: tuple[int, ...] | None = None
    """The lowest corner of its box; None for the whole tensor."""
    stop: tuple[int, ...] | None = None
    sparse: StoredSparse | None = None
    """How it is packed; None where the elements lie as they are."""
    hash: str | None = None
    """Of the elements as they are without packing, as hexadecimal digits; by the algorithm that the manifest names."""
    head: str | None = None
    """CRC-32 of the first of these bytes, where the algorithm has such a thing."""


class StoredTensor(msgspec.Struct, gc=False, frozen=True, forbid_unknown_fields=True):
    """What is known of one tensor."""

    dtype: str
    """Holdfast's name of it, whatever the safetensors file says."""
    shape: tuple[int, ...]
    chunks: tuple[StoredChunk, ...]


class DataFile(msgspec.Struct, gc=False, frozen=True, forbid_unknown_fields=True):
    """One safetensors file beside the manifest; in an object store, perhaps in a folder beside the manifest's."""

    name: str
    nbytes: int


class OtherFile(msgspec.Struct, gc=False, frozen=True, forbid_unknown_fields=True):
    """A file beside the data files that no tensor depends on: the Hugging Face index."""

    name: str
    nbytes: int
    crc32: str


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The whole document."""

    format: str
    version: int
    files: tuple[DataFile, ...]
    tensors: dict[str, StoredTensor]
    metadata: dict[str, str]
    aliases: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    views: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    tree: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    others: tuple[OtherFile, ...] | msgspec.UnsetType = msgspec.UNSET
    hash: str | msgspec.UnsetType = msgspec.UNSET
    sealed: str | msgspec.UnsetType = msgspec.field(default=msgspec.UNSET, name=SEAL)


Part = TypeVar("Part", DataFile, StoredTensor, OtherFile)

RECORDED = ("aliases", "views", "tree")
FIELDS = ("format", "version", "files", "tensors", "metadata")
SINCE_SEALED = ("others", SEAL)
SINCE_HASHED = ("hash",)
VERSIONS = (1, SPARSE_VERSION, SEALED_VERSION, HASHED_VERSION, BESIDE_VERSION)
DECODER = msgspec.json.Decoder(Manifest)

TOGETHER = 4096
"""Tensors whose text is made at a time."""


class Parsed(Value, frozen=True):
    """A manifest whose form has been checked. The meaning of its numbers has not."""

    files: tuple[DataFile, ...]
    tensors: dict[str, StoredTensor]
    metadata: dict[str, str]
    recorded: Recorded
    version: int
    others: tuple[OtherFile, ...] = ()
    hash: str | None = None
    """The name of the algorithm of the chunks' hashes."""


def made_whole(raw: bytes, names: Mapping[str, str]) -> bytes:
    """The text of a manifest whose files have other names (`names`, by those they have), in the folder of the manifest.

    Raises `Unsupported` for a text that Holdfast has not written.
    """
    manifest = parse_fast(raw)
    if manifest is None:
        raise Unsupported("the manifest was not written by Holdfast, and names files of other folders; convert it instead")
    files = tuple(DataFile(names.get(file.name, file.name), file.nbytes) for file in manifest.files)
    whole = msgspec.json.encode(msgspec.structs.replace(manifest, version=HASHED_VERSION, files=files, sealed=msgspec.UNSET))
    return seal(whole, paid_nbytes(whole))


def parse_manifest(raw: bytes, limits: Limits) -> Parsed:
    """Parse a manifest.

    Raises `Corrupted` where it has not its own checksum, `HeaderError`, `LimitExceeded`, or `Unsupported` for an unknown version.
    """
    sealed = check_seal(raw, "the manifest")
    parsed = _parse(raw, json_limits(limits))
    if parsed.version >= SEALED_VERSION and not sealed:
        raise Corrupted(
            f"a manifest of version {parsed.version} ends with its own checksum, and this one does not: it changed after it was "
            "written; get it again"
        )
    return parsed


def _parse(raw: bytes, deep: Limits) -> Parsed:
    fast = parse_fast(raw)
    if fast is None:
        return parse_exact(raw, deep)
    fields = {name: getattr(fast, name) for name in RECORDED}
    parts = {name: bytes(text) for name, text in fields.items() if text is not msgspec.UNSET}
    given = parse_parts(parts, deep, nbytes=len(raw))
    others = () if isinstance(fast.others, msgspec.UnsetType) else fast.others
    hash = None if isinstance(fast.hash, msgspec.UnsetType) else fast.hash
    return Parsed(fast.files, fast.tensors, fast.metadata, parse_recorded(given), fast.version, others, hash)


def parse_fast(raw: bytes) -> Manifest | None:
    """A manifest of the text that Holdfast writes; None for any other, be it valid or not."""
    try:
        manifest = DECODER.decode(raw)
        same = _is_text_of(manifest, raw.rstrip(b" "))
    except (ValueError, RecursionError, msgspec.MsgspecError):
        return None
    if not same or manifest.format != FORMAT or manifest.version not in VERSIONS:
        return None
    later = manifest.others is not msgspec.UNSET or manifest.sealed is not msgspec.UNSET
    if manifest.hash is not msgspec.UNSET and manifest.version < HASHED_VERSION:
        return None
    return None if later and manifest.version < SEALED_VERSION else manifest


def _is_text_of(manifest: Manifest, raw: bytes) -> bool:
    """Whether a text is what msgspec writes of a manifest. It is written a few thousand tensors at a time."""
    before, mark, behind = msgspec.json.encode(msgspec.structs.replace(manifest, tensors={})).partition(b'"tensors":{')
    at, items, between = len(before) + len(mark), iter(manifest.tensors.items()), b""
    same = raw.startswith(before + mark) and raw.endswith(behind)
    while same and (batch := dict(islice(items, TOGETHER))):
        text = between + msgspec.json.encode(batch)[1:-1]
        same, at, between = raw.startswith(text, at), at + len(text), b","
    return same and at + len(behind) == len(raw)


def parse_exact(raw: bytes, limits: Limits) -> Parsed:
    """Any manifest, or what is wrong with it and where."""
    document = parse(raw, limits)
    if not isinstance(document, dict):
        raise HeaderError(f"at $: expected an object, found {kind(document)}")
    if document.get("format") != FORMAT:
        raise HeaderError(f"at $.format: expected {FORMAT!r}, found {kind(document.get('format'))}")
    version = document.get("version")
    if type(version) is not int:
        raise HeaderError(f"at $.version: expected a number, found {kind(version)}")
    if version not in VERSIONS:
        known = f"this Holdfast reads versions {VERSIONS[0]} to {VERSIONS[-1]}; a newer one may read this"
        raise Unsupported(f"a manifest of version {version}; {known}", expected=VERSIONS, found=version)
    for name in FIELDS:
        if name not in document:
            raise HeaderError(f"at $: the field {name} is missing")
    allowed = [*FIELDS, *RECORDED]
    allowed += SINCE_SEALED if version >= SEALED_VERSION else ()
    allowed += SINCE_HASHED if version >= HASHED_VERSION else ()
    for name in document:
        if name not in allowed:
            raise HeaderError(f"at {pointer(name)}: a manifest has no such field")
    files = document["files"]
    if not isinstance(files, list):
        raise HeaderError(f"at $.files: expected a list, found {kind(files)}")
    others = document.get("others", [])
    if not isinstance(others, list):
        raise HeaderError(f"at $.others: expected a list, found {kind(others)}")
    hash = document.get("hash")
    if "hash" in document and not isinstance(hash, str):
        raise HeaderError(f"at $.hash: expected text, found {kind(hash)}")
    tensors, metadata = document["tensors"], document["metadata"]
    for name, value in (("tensors", tensors), ("metadata", metadata)):
        if not isinstance(value, dict):
            raise HeaderError(f"at {pointer(name)}: expected an object, found {kind(value)}")
    for name, text in metadata.items():
        if not isinstance(text, str):
            raise HeaderError(f"at {pointer('metadata', name)}: expected text, found {kind(text)}")
    return Parsed(
        tuple(_convert(file, DataFile, ("files", i)) for i, file in enumerate(files)),
        {name: _convert(tensor, StoredTensor, ("tensors", name)) for name, tensor in tensors.items()},
        metadata,
        parse_recorded({name: document[name] for name in RECORDED if name in document}),
        version,
        tuple(_convert(file, OtherFile, ("others", i)) for i, file in enumerate(others)),
        hash,
    )


def _convert(value: object, kind_of: type[Part], at: tuple[str | int, ...]) -> Part:
    """A parsed value as a part of the schema; msgspec says what is wrong inside, and we say where it begins."""
    try:
        return msgspec.convert(value, kind_of)
    except msgspec.ValidationError as error:
        reason, _, inside = str(error).partition(" - at `$")
        raise HeaderError(f"at {pointer(*at)}{inside.rstrip('`')}: {reason}") from None
