"""The index of a directory of safetensors files: `model.safetensors.index.json`, as `transformers` and torch write it.

    {"metadata": {"total_size": 58}, "weight_map": {"a": "model-00001-of-00002.safetensors", …}}

`metadata` may be missing, and its `total_size` is a float in some files on the hub; no reader depends on it. Holdfast
writes a record in there (`record`), as text: a checksum, and what there is to say beyond which file has which tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from holdfast.core.protocols import Source
from holdfast.errors import HeaderError, LimitExceeded, StoreError, UnsafePath, Unsupported
from holdfast.formats.safetensors.record import RECORD
from holdfast.formats.safetensors.strict_json import kind, parse, pointer, quoted

__all__ = ["INDEX_SUFFIX", "Index", "choose_index", "read_index"]

INDEX_SUFFIX = ".safetensors.index.json"
USUAL_INDEX = "model.safetensors.index.json"
WEIGHT_MAP = "weight_map"
SHOWN_FILES = 5
"""Names of missing files that an error lists."""


@dataclass(frozen=True, slots=True)
class Index:
    """What an index says."""

    weight_map: dict[str, str]
    """The file of every tensor, in the order of the index."""
    record: object
    """Holdfast's record; None where there is none."""
    texts: dict[str, object]
    """What `metadata` has beside it."""


def choose_index(keys: Sequence[str], directory: str) -> str | None:
    """The index that counts: `model.safetensors.index.json`, else the only one at the top; None where there is none.

    Raises `Unsupported` where there are several and none has the usual name (variants of one model, as diffusers
    keeps them).
    """
    found = [key for key in keys if key.endswith(INDEX_SUFFIX) and "/" not in key and not key.startswith(".")]
    if USUAL_INDEX in found:
        return USUAL_INDEX
    if len(found) > 1:
        raise Unsupported(
            f"this directory has {len(found)} indexes ({', '.join(map(quoted, found[:SHOWN_FILES]))}): several "
            "checkpoints in one place; open one safetensors file, or give one index and its files a directory",
            file=directory,
            found=tuple(found),
        )
    return found[0] if found else None


def read_index(source: Source, key: str) -> Index:
    """The file of every tensor. Every file is there, and none has a name that leads away.

    Raises `HeaderError`, `LimitExceeded`, `UnsafePath` for a name that is not plain and relative, or `StoreError` for
    files that are missing.
    """
    size = source.store.size(key)
    if size > source.limits.index_nbytes:
        raise LimitExceeded(
            f"an index of {size:,} bytes is more than Limits(index_nbytes={source.limits.index_nbytes:,})",
            file=key,
            expected=source.limits.index_nbytes,
            found=size,
        )
    document = parse(source.bytes(key, 0, size), source.limits, file=key)
    if not isinstance(document, dict):
        raise HeaderError(f"at $: expected an object, found {kind(document)}", file=key)
    if WEIGHT_MAP not in document:
        raise HeaderError(f"at $: the field {WEIGHT_MAP} is missing", file=key)
    weight_map = document[WEIGHT_MAP]
    if not isinstance(weight_map, dict):
        raise HeaderError(f"at {pointer(WEIGHT_MAP)}: expected an object, found {kind(weight_map)}", file=key)
    present = set(source.store.list())
    plain: set[str] = set()
    missing: dict[str, None] = {}
    for name, file in weight_map.items():
        if not isinstance(file, str):
            raise HeaderError(f"at {pointer(WEIGHT_MAP, name)}: expected text, found {kind(file)}", file=key, tensor=name)
        if file not in plain:
            _check_plain(file, name, key)
            plain.add(file)
            if file not in present:
                missing[file] = None
    if missing:
        shown = ", ".join(quoted(file) for file in list(missing)[:SHOWN_FILES])
        more = f" and {len(missing) - SHOWN_FILES:,} more" if len(missing) > SHOWN_FILES else ""
        raise StoreError(f"the index names files that are not there: {shown}{more}", file=key, found=tuple(missing))
    metadata = document.get("metadata")
    beside = metadata if isinstance(metadata, dict) else {}
    return Index(weight_map, beside.get(RECORD), {name: value for name, value in beside.items() if name != RECORD})


def _check_plain(file: str, name: str, key: str) -> None:
    """Raise `UnsafePath` for anything but a relative path of ordinary names."""
    if "\\" in file or "\0" in file or any(part in ("", ".", "..") for part in file.split("/")):
        raise UnsafePath(
            f"at {pointer(WEIGHT_MAP, name)}: {quoted(file)} is not the plain name of a file inside the directory",
            file=key,
            tensor=name,
            found=file,
        )
