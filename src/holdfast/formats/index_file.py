"""The index of a Hugging Face folder: which of its files has which tensor.

    {"metadata": {"total_size": 58}, "weight_map": {"a": "model-00001-of-00002.safetensors", …}}

`transformers`, diffusers and torch write `model.safetensors.index.json` beside safetensors files, and beside files of `torch.save`
`pytorch_model.bin.index.json`. The rules for both: every named file exists inside of the folder, each file has the tensors that the
index maps to it, and no tensor is in two files.

Beside them lies `config.json` with the sizes of the model.

`metadata` may be missing, and its `total_size` is a float in some files on the hub; no reader depends on it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence

from holdfast.core.keys import is_plain_path
from holdfast.core.limits import Limits
from holdfast.core.protocols import Source
from holdfast.core.strict_json import describe_json, format_pointer, parse, quote
from holdfast.core.value import Value
from holdfast.errors import (
    HeaderError,
    HoldfastError,
    LimitExceeded,
    MetadataError,
    StoreError,
    UnsafePath,
    Unsupported,
)

INDEX = ".index.json"
"""The end of the name of an index, after the suffix of its files."""

USUAL = {".safetensors": "model", ".bin": "pytorch_model"}
"""The usual name of weights, by the suffix of their files."""

WEIGHT_MAP = "weight_map"

FILES = "holdfast.files"
"""The field of `metadata` with all files, if pieces of a tensor lie in several."""

TORCH_WEIGHTS = re.compile(
    r"(?:[^/.][^/]*[._-])?(?:pytorch_model|adapter_model|pytorch_lora_weights)[^/]*\.bin"
)
"""Names of files of `torch.save` in transformers, diffusers and peft: with a number, a variant (`.fp16`), a first word."""

FOREIGN = re.compile(r"[^./][^/]*\.(?:h5|msgpack|ot|onnx)")
"""Weights of TensorFlow, Flax, Rust and ONNX: other copies of a model, which no folder opens as."""

OTHERS = re.compile(rf"{TORCH_WEIGHTS.pattern}|{FOREIGN.pattern}")

SHOWN = 5


class Index(Value, frozen=True):
    weight_map: dict[str, str]
    """The file of every tensor, in the order of the index."""
    metadata: dict[str, object]

    @property
    def files(self) -> list[str]:
        more = self.metadata.get(FILES)
        return list(
            dict.fromkeys([*self.weight_map.values(), *(more if isinstance(more, list) else ())])
        )


NUMBERED = re.compile(r"-\d{5}-of-\d{5}$")


class WeightFiles(Value, frozen=True):
    files: Sequence[str]
    index: str | None = None
    listed: Index | None = None

    @property
    def stem(self) -> str:
        """The name of the weights, without number and suffix."""
        name = (self.index or self.files[0]).removesuffix(INDEX)
        return NUMBERED.sub("", os.path.splitext(name)[0])


def choose_index(keys: Sequence[str], directory: str, suffix: str = ".safetensors") -> str | None:
    """The index of a folder: that of the usual name, else the only one at the top. Raises `Unsupported` for several."""
    found = [
        key
        for key in keys
        if key.endswith(suffix + INDEX) and "/" not in key and not key.startswith(".")
    ]
    usual = USUAL[suffix] + suffix + INDEX
    if usual in found:
        return usual
    if len(found) > 1:
        message = (
            f"this directory has {len(found)} indexes ({some(found)}): several checkpoints in one place; open one {suffix[1:]} "
            "file, or give one index and its files a directory"
        )
        raise Unsupported(message, file=directory, found=tuple(found))
    return found[0] if found else None


def by_index(
    source: Source, keys: Sequence[str], suffix: str = ".safetensors"
) -> WeightFiles | None:
    """The files that the index of a folder names; None without an index. Raises as `choose_index` and `read_index` do.

    The index by which the user opened the folder counts before any other.
    """
    index = source.store.index or choose_index(keys, source.store.name, suffix)
    listed = None if index is None else read_index(source, index)
    return None if listed is None else WeightFiles(listed.files, index, listed)


def read_index(source: Source, key: str) -> Index:
    """Read and check an index. Raises `HeaderError`, `LimitExceeded`, `UnsafePath`, or `StoreError` for missing files."""
    size = source.store.size(key)
    if size > source.limits.index_nbytes:
        message = f"an index of {size:,} bytes is more than Limits(index_nbytes={source.limits.index_nbytes:,})"
        raise LimitExceeded(message, file=key, expected=source.limits.index_nbytes, found=size)
    document = parse(source.bytes(key, 0, size), source.limits, file=key)
    if not isinstance(document, dict):
        raise HeaderError(f"at $: expected an object, found {describe_json(document)}", file=key)
    if WEIGHT_MAP not in document:
        raise HeaderError(f"at $: the field {WEIGHT_MAP} is missing", file=key)
    weight_map = document[WEIGHT_MAP]
    if not isinstance(weight_map, dict):
        raise HeaderError(
            f"at {format_pointer(WEIGHT_MAP)}: expected an object, found {describe_json(weight_map)}",
            file=key,
        )
    present = set(source.store.list())
    plain: set[str] = set()
    missing: dict[str, None] = {}
    found = document.get("metadata")
    metadata = found if isinstance(found, dict) else {}
    more = metadata.get(FILES, [])
    if not isinstance(more, list):
        raise HeaderError(
            f"at {format_pointer('metadata', FILES)}: expected a list, found {describe_json(more)}",
            file=key,
        )
    for name, file in (*weight_map.items(), *((FILES, file) for file in more)):
        if not isinstance(file, str):
            raise HeaderError(
                f"at {format_pointer(WEIGHT_MAP, name)}: expected text, found {describe_json(file)}",
                file=key,
                tensor=name,
            )
        if file not in plain:
            if not is_plain_path(file):
                place = format_pointer(WEIGHT_MAP, name)
                message = f"at {place}: {quote(file)} is not the plain name of a file inside the directory"
                raise UnsafePath(message, file=key, tensor=name, found=file)
            plain.add(file)
            if file not in present:
                missing[file] = None
    if missing:
        raise StoreError(
            f"the index names files that are not there: {some(list(missing))}",
            file=key,
            found=tuple(missing),
        )
    return Index(weight_map, metadata)


def claimed_twice(name: str, files: Sequence[str]) -> MetadataError:
    """The error for a tensor in several files: the loaded one would depend on the order of the files."""
    message = f"{some(files)} all claim this tensor, and do not say that they hold pieces of it; open one of them alone"
    return MetadataError(message, file=files[-1], tensor=name, found=tuple(files))


def check_mapped(
    weight_map: Mapping[str, str], holding: Mapping[str, Collection[object]], index: str
) -> None:
    """Raise `MetadataError` where a file lacks a tensor of the index. `holding` has the tensors of each file."""
    for name, key in weight_map.items():
        if name not in holding[key]:
            message = f"at {format_pointer(WEIGHT_MAP, name)}: {quote(key)} has no such tensor"
            raise MetadataError(message, file=index, tensor=name, found=key)


def other_copies(keys: Iterable[str], used: Collection[str] = ()) -> list[str]:
    """A note on other weights at the top of a folder, which loaders ignore silently; empty without any."""
    found = [key for key in keys if key not in used and OTHERS.fullmatch(key)]
    return [f"beside them lie other weights, which are not read: {some(found)}"] if found else []


def some(names: Sequence[str]) -> str:
    shown = ", ".join(map(quote, names[:SHOWN]))
    return f"{shown} and {len(names) - SHOWN:,} more" if len(names) > SHOWN else shown


CONFIGS = ("params.json", "config.json")
"""What models say of their sizes; the later one counts more."""


def read_config(source: Source, limits: Limits) -> Mapping[str, object]:
    """The config.json beside the weights, and Meta's params.json; empty where there is none, or it is none. Models with several
    towers have one for each: the text model's counts as well."""
    store, known = source.store, dict[str, object]()
    for key in CONFIGS if store.is_folder else ():
        try:
            size = min(store.size(key), limits.header_nbytes) if store.has_key(key) else 0
            found = parse(source.bytes(key, 0, size), limits, file=key) if size else None
        except HoldfastError:
            continue
        if isinstance(found, dict):
            inner = found.get("text_config")
            known |= {**(inner if isinstance(inner, dict) else {}), **found}
    return known
