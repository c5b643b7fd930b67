"""The manifest of a native directory: its schema, its text, and the way back. docs/formats/native.md has every field and version.

    {"format": "holdfast", "version": 4,
     "files": [{"name": "data-00001-of-00001.safetensors", "nbytes": 472}],
     "tensors": {"w": {"dtype": "float32", "shape": [2, 3], "chunks": [{"file": 0, "bytes": [448, 472], "crc32": "5bb0e7a9"}]}},
     "metadata": {"step": "1000"}, "aliases": {…}, "views": […], "tree": …,
     "others": [{"name": "model.safetensors.index.json", "nbytes": 168, "crc32": "9f3a01d2"}],
     "hash": "xxh3-128/1MiB", "self": "1c291ca3"}

A chunk of a split tensor has its box as well, `"start": [0, 0], "stop": [1, 3]`. Of a tensor in very many chunks these stand in
columns (`StoredColumns`), and `chunks` is empty. Versions 1 and 2 have neither `others` nor `self`. A manifest of version 3 or
later without `self` is damaged.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from holdfast.core.documents import (
    SELF,
    DocumentType,
    decode_canonical,
    read_document,
    write_document,
)
from holdfast.core.limits import Limits
from holdfast.core.strict_json import json_limits, parse_values
from holdfast.core.value import Value
from holdfast.errors import Unsupported
from holdfast.formats.recorded import Recorded, parse_recorded
from holdfast.formats.safetensors.schema import MANIFEST

FORMAT = "holdfast"
VERSION = 3
"""Written where there are no hashes."""
SEALED_VERSION = 3
HASHED_VERSION = 4
"""The first version with hashes. Written where chunks have hashes."""
BESIDE_VERSION = 5
"""The first version with files in a folder beside this one. Written where there is such a file."""

COLUMNS_VERSION = 6
"""The first version with chunks as columns. Written where there are some."""


class StoredChunk(
    msgspec.Struct, gc=False, frozen=True, forbid_unknown_fields=True, omit_defaults=True
):
    """One piece of one tensor. `gc=False`: it can hold no cycle, and there may be a million of them."""

    file: int
    bytes: tuple[int, int]
    """First byte in that file, and the byte after the last."""
    crc32: str
    start: tuple[int, ...] | None = None
    """The lowest corner of its box; None for the whole tensor."""
    stop: tuple[int, ...] | None = None
    sparse: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    """Set in checkpoints of earlier versions, which could store the non-zero elements alone. They are refused."""
    hash: str | None = None
    """Hash of the elements in hexadecimal digits, by the algorithm that the manifest names."""
    head: str | None = None
    """CRC-32 of the first of these bytes, where the algorithm has heads."""


Runs = tuple[int, ...]
"""A column of integers as numbers that rise evenly: first, step and count of each stretch, one stretch behind the other."""


class StoredColumns(msgspec.Struct, gc=False, frozen=True, forbid_unknown_fields=True):
    """The chunks of a tensor in very many, as columns: eight bytes a chunk where ranks have cut it evenly."""

    file: Runs
    bytes: Runs
    """The first byte of each. It has as many as its box takes."""
    crc32: str
    """Eight digits for each."""
    start: tuple[Runs, ...]
    """The lowest corners, a column for each dimension."""
    stop: tuple[Runs, ...]


class StoredTensor(
    msgspec.Struct, gc=False, frozen=True, forbid_unknown_fields=True, omit_defaults=True
):
    dtype: str
    """Holdfast's name of the dtype, also where the safetensors file has another one."""
    shape: tuple[int, ...]
    chunks: tuple[StoredChunk, ...]
    """Empty where they stand in columns."""
    columns: StoredColumns | None = None


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
    sealed: str | msgspec.UnsetType = msgspec.field(default=msgspec.UNSET, name=SELF)


RECORDED = ("aliases", "views", "tree")

VERSIONS = (1, 2, SEALED_VERSION, HASHED_VERSION, BESIDE_VERSION, COLUMNS_VERSION)
SINCE = {"others": SEALED_VERSION, SELF: SEALED_VERSION, "hash": HASHED_VERSION}

DOCUMENT = DocumentType(
    name="manifest",
    file=MANIFEST,
    decoder=msgspec.json.Decoder(Manifest),
    format=FORMAT,
    versions=VERSIONS,
    field_versions=SINCE,
    largest_field="tensors",
)


class Parsed(Value, frozen=True):
    """A manifest whose form is checked. Its numbers are not checked."""

    files: tuple[DataFile, ...]
    tensors: dict[str, StoredTensor]
    metadata: dict[str, str]
    recorded: Recorded
    version: int
    others: tuple[OtherFile, ...] = ()
    hash: str | None = None


def made_whole(raw: bytes, names: Mapping[str, str]) -> bytes:
    """The text of a manifest with new `names` of files. Raises `Unsupported` for a manifest that Holdfast did not write."""
    manifest = decode_canonical(DOCUMENT, raw)
    if manifest is None:
        raise Unsupported(
            "the manifest was not written by Holdfast, and names files of other folders; convert it instead"
        )
    files = tuple(DataFile(names.get(file.name, file.name), file.nbytes) for file in manifest.files)
    version = COLUMNS_VERSION if manifest.version == COLUMNS_VERSION else HASHED_VERSION
    whole = msgspec.structs.replace(manifest, version=version, files=files, sealed=msgspec.UNSET)
    return write_document(DOCUMENT, whole)


def parse_manifest(raw: bytes, limits: Limits) -> Parsed:
    """The content of a manifest, with a checked form. Raises what `read_document` raises."""
    deep = json_limits(limits)
    found = read_document(DOCUMENT, raw, deep)
    fields = {name: getattr(found, name) for name in RECORDED}
    parts = {name: bytes(text) for name, text in fields.items() if text is not msgspec.UNSET}
    given = parse_values(parts, deep, nbytes=len(raw))
    others = () if isinstance(found.others, msgspec.UnsetType) else found.others
    hash = None if isinstance(found.hash, msgspec.UnsetType) else found.hash
    return Parsed(
        found.files,
        found.tensors,
        found.metadata,
        parse_recorded(given),
        found.version,
        others,
        hash,
    )
