"""The index of a Hugging Face folder: which of its files has which tensor.

    {"metadata": {"total_size": 58}, "weight_map": {"a": "model-00001-of-00002.safetensors", …}}

`transformers`, diffusers and torch write `model.safetensors.index.json` beside safetensors files, and beside files of `torch.save`
`pytorch_model.bin.index.json`. Both are read here, by one set of rules: every file that is named is there, none has a name that
leads away, each has the tensors that the index sends to it, and no tensor is in two of them.

`metadata` may be missing, and its `total_size` is a float in some files on the hub; no reader depends on it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence

from holdfast.core.protocols import Source
from holdfast.core.strict_json import kind, parse, pointer, quoted
from holdfast.core.value import Value
from holdfast.errors import HeaderError, LimitExceeded, MetadataError, StoreError, UnsafePath, Unsupported

INDEX = ".index.json"
"""What the name of an index ends with, behind the suffix of the files that it names."""

USUAL = {".safetensors": "model", ".bin": "pytorch_model"}
"""What the weights of a model are called, by the suffix of their files."""

WEIGHT_MAP = "weight_map"

FILES = "holdfast.files"
"""In `metadata`: every file that counts, where pieces of tensors lie in several."""

TORCH_WEIGHTS = re.compile(r"(?:[^/.][^/]*[._-])?(?:pytorch_model|adapter_model|pytorch_lora_weights)[^/]*\.bin")
"""What transformers, diffusers and peft call files of `torch.save`: with a number, a variant (`.fp16`), a word before it."""

FOREIGN = re.compile(r"[^./][^/]*\.(?:h5|msgpack|ot|onnx)")
"""Files in which weights lie that nobody reads here: of TensorFlow, Flax, Rust and ONNX."""

OTHERS = re.compile(rf"{TORCH_WEIGHTS.pattern}|{FOREIGN.pattern}")

SHOWN = 5
"""Names that a message lists before it says how many more there are."""


class Index(Value, frozen=True):
    """What an index says."""

    weight_map: dict[str, str]
    """The file of every tensor, in the order of the index."""
    metadata: dict[str, object]

    @property
    def files(self) -> list[str]:
        """Every file that counts, once."""
        more = self.metadata.get(FILES)
        return list(dict.fromkeys([*self.weight_map.values(), *(more if isinstance(more, list) else ())]))


NUMBERED = re.compile(r"-\d{5}-of-\d{5}$")
"""How the name of a shard ends, before its suffix."""


class WeightFiles(Value, frozen=True):
    """The files of a folder that count."""

    files: Sequence[str]
    index: str | None = None
    listed: Index | None = None
    """What the index says, where there is one."""

    @property
    def stem(self) -> str:
        """What the weights are called, without number and suffix."""
        name = (self.index or self.files[0]).removesuffix(INDEX)
        return NUMBERED.sub("", os.path.splitext(name)[0])


def choose_index(keys: Sequence[str], directory: str, suffix: str = ".safetensors") -> str | None:
    """The index that counts: that of the usual name, else the only one at the top; None where there is none.

    Raises `Unsupported` where there are several and none has the usual name (variants of one model, as diffusers
    keeps them).
    """
    found = [key for key in keys if key.endswith(suffix + INDEX) and "/" not in key and not key.startswith(".")]
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


def by_index(source: Source, keys: Sequence[str], suffix: str = ".safetensors") -> WeightFiles | None:
    """The files that the index of a folder names; None where it has none. Raises as `choose_index` and `read_index` do."""
    index = choose_index(keys, source.store.name, suffix)
    listed = None if index is None else read_index(source, index)
    return None if listed is None else WeightFiles(listed.files, index, listed)


def read_index(source: Source, key: str) -> Index:
    """The file of every tensor. Every file is there, and none has a name that leads away.

    Raises `HeaderError`, `LimitExceeded`, `UnsafePath` for a name that is not plain and relative, or `StoreError` for
    files that are missing.
    """
    size = source.store.size(key)
    if size > source.limits.index_nbytes:
        message = f"an index of {size:,} bytes is more than Limits(index_nbytes={source.limits.index_nbytes:,})"
        raise LimitExceeded(message, file=key, expected=source.limits.index_nbytes, found=size)
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
    said = document.get("metadata")
    metadata = said if isinstance(said, dict) else {}
    more = metadata.get(FILES, [])
    if not isinstance(more, list):
        raise HeaderError(f"at {pointer('metadata', FILES)}: expected a list, found {kind(more)}", file=key)
    for name, file in (*weight_map.items(), *((FILES, file) for file in more)):
        if not isinstance(file, str):
            raise HeaderError(f"at {pointer(WEIGHT_MAP, name)}: expected text, found {kind(file)}", file=key, tensor=name)
        if file not in plain:
            _check_plain(file, name, key)
            plain.add(file)
            if file not in present:
                missing[file] = None
    if missing:
        raise StoreError(f"the index names files that are not there: {some(list(missing))}", file=key, found=tuple(missing))
    return Index(weight_map, metadata)


def _check_plain(file: str, name: str, key: str) -> None:
    """Raise `UnsafePath` for anything but a relative path of ordinary names."""
    if "\\" in file or "\0" in file or any(part in ("", ".", "..") for part in file.split("/")):
        message = f"at {pointer(WEIGHT_MAP, name)}: {quoted(file)} is not the plain name of a file inside the directory"
        raise UnsafePath(message, file=key, tensor=name, found=file)


def claimed_twice(name: str, files: Sequence[str]) -> MetadataError:
    """The refusal of a tensor that several files have: which one is loaded would depend on the order of the files."""
    message = f"{some(files)} all claim this tensor, and do not say that they hold pieces of it; open one of them alone"
    return MetadataError(message, file=files[-1], tensor=name, found=tuple(files))


def check_mapped(weight_map: Mapping[str, str], holding: Mapping[str, Collection[object]], index: str) -> None:
    """Raise `MetadataError` where a file lacks a tensor that the index sends to it. `holding` says what each file has."""
    for name, key in weight_map.items():
        if name not in holding[key]:
            message = f"at {pointer(WEIGHT_MAP, name)}: {quoted(key)} has no such tensor"
            raise MetadataError(message, file=index, tensor=name, found=key)


def other_copies(keys: Iterable[str], used: Collection[str] = ()) -> list[str]:
    """A note on files at the top of a folder that hold weights, too, as loaders pass over them in silence; nothing without any."""
    found = [key for key in keys if key not in used and OTHERS.fullmatch(key)]
    return [f"beside them lie other weights, which are not read: {some(found)}"] if found else []


def some(names: Sequence[str]) -> str:
    """The first few of a list of names from a file, in words."""
    shown = ", ".join(map(quoted, names[:SHOWN]))
    return f"{shown} and {len(names) - SHOWN:,} more" if len(names) > SHOWN else shown
