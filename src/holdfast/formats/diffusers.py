"""The folder of a diffusers pipeline: several models, each in a folder of its own.

    model_index.json                                  {"_class_name": "FluxPipeline", "vae": ["diffusers", "AutoencoderKL"], …}
    transformer/diffusion_pytorch_model-00001-of-00003.safetensors  …index.json  config.json
    vae/diffusion_pytorch_model.safetensors           config.json
    text_encoder/model.safetensors                    config.json
    tokenizer/…   scheduler/…                         no weights

It opens as one checkpoint, whose tensors have the name of their component before their own: `vae.encoder.conv_in.weight`. Each
component is read as its folder would be by itself. Where its weights lie in several variants (`….fp16.safetensors`), those of the
usual name count, as for diffusers. Weights at the top of the folder are another copy of the whole, in one file.
"""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.core.chunk import Storage
from holdfast.core.protocols import Description, Foreign, ReadProfile, Source, Stamp, Store
from holdfast.core.strict_json import describe_json, parse
from holdfast.core.tensor import LazyTensor
from holdfast.core.value import replace
from holdfast.engine.files import ViewTable
from holdfast.errors import Corrupted, HeaderError, HoldfastError, LimitExceeded
from holdfast.formats import Format
from holdfast.formats.detect import detect
from holdfast.formats.index_file import INDEX, TORCH_WEIGHTS, some

MODEL_INDEX = "model_index.json"

SAFETENSORS, BIN = ".safetensors", ".bin"

STEMS = {
    SAFETENSORS: ("diffusion_pytorch_model", "model"),
    BIN: ("diffusion_pytorch_model", "pytorch_model"),
}
"""How diffusers and transformers call the weights of a component, by their suffix."""


def is_diffusers(source: Source) -> bool:
    """Whether there is the index of a pipeline, and a folder with weights beside it."""
    keys = source.store.list()
    return MODEL_INDEX in keys and not source.store.index and any(map(_is_weights, keys))


def describe(source: Source) -> Description:
    """Read the index of the pipeline, and describe every component that has weights."""
    index = _read_model_index(source)
    keys = source.store.list()
    folders = {key.partition("/")[0] for key in keys if "/" in key}
    names = [name for name, value in index.items() if _is_component(name, value)]

    tensors: dict[str, LazyTensor] = {}
    notes: list[str] = []
    changed: list[Corrupted] = []
    foreign: list[Foreign] = []
    archives: list[str] = []
    for name in names:
        component = ComponentStore(source.store, name)
        if not any(_is_weights(f"{name}/{key}") for key in component.list()):
            continue
        try:
            found = _describe_component(source.with_store(component))
        except HoldfastError as error:
            if error.file is None or not error.file.startswith(source.store.name):
                error.file = "/".join(filter(None, (name, error.file)))
            raise
        for tensor in found.tensors.values():
            full_name = f"{name}.{tensor.name}"
            tensors[full_name] = _move(tensor, full_name, source, folder=name)
        notes += [f"{name}: {note}" for note in found.notes]
        for change in found.changed:
            change.file = f"{name}/{change.file}"
            changed.append(change)
        foreign += [replace(item, stream=f"{name}: {item.stream}") for item in found.foreign]
        archives += [f"{name}/{key}" for key in found.archives]

    if missing := [name for name in names if name not in folders]:
        notes.append(f"{MODEL_INDEX!r} names components that are not here: {some(missing)}")
    if copies := [key for key in keys if "/" not in key and _has_weights_suffix(key)]:
        notes.append(f"beside the components lie other weights, which are not read: {some(copies)}")
    metadata = {key: value for key, value in index.items() if isinstance(value, str)}
    table = ViewTable(tensors)
    return Description(
        "diffusers",
        table,
        table,
        tuple(foreign),
        tuple(notes),
        metadata,
        tuple(changed),
        archives=tuple(archives),
    )


def _read_model_index(source: Source) -> dict[str, object]:
    size = source.store.size(MODEL_INDEX)
    most = source.limits.index_nbytes
    if size > most:
        raise LimitExceeded(
            f"an index of {size:,} bytes is more than Limits(index_nbytes={most:,})",
            file=MODEL_INDEX,
            expected=most,
            found=size,
        )
    document = parse(source.bytes(MODEL_INDEX, 0, size), source.limits, file=MODEL_INDEX)
    if not isinstance(document, dict):
        raise HeaderError(
            f"at $: expected an object, found {describe_json(document)}", file=MODEL_INDEX
        )
    return document


def _is_component(name: str, value: object) -> bool:
    """Whether an entry of the index is `"vae": ["diffusers", "AutoencoderKL"]`; an absent component has two nulls."""
    if name.startswith("_") or not isinstance(value, list) or len(value) != 2:
        return False
    return all(isinstance(part, str) for part in value)


def _has_weights_suffix(name: str) -> bool:
    return name.endswith(SAFETENSORS) or TORCH_WEIGHTS.fullmatch(name) is not None


def _is_weights(key: str) -> bool:
    """Whether a key is that of weights in a folder."""
    _, slash, name = key.partition("/")
    return bool(slash) and _has_weights_suffix(name)


def _describe_component(source: Source) -> Description:
    format: Format = detect(source)
    found = format.describe(source)
    is_archive = format.torch and not format.folder
    return replace(found, archives=tuple(source.store.list())) if is_archive else found


def _move(tensor: LazyTensor, name: str, source: Source, *, folder: str) -> LazyTensor:
    """Return a tensor of a component as one of the whole folder."""

    def moved(storage: Storage) -> Storage:
        return replace(storage, key=f"{folder}/{storage.key}", home=source.store)

    chunks = tuple(chunk.with_storage(moved(chunk.storage)) for chunk in tensor.chunks)
    return LazyTensor(name, tensor.dtype, tensor.shape, chunks, source, tensor.traits)


class ComponentStore(Store):
    """The files of one folder of a store, under their own names, without variants of the weights."""

    def __init__(self, store: Store, folder: str) -> None:
        self.name = f"{store.name}/{folder}"
        self._store, self._prefix = store, f"{folder}/"
        prefix_length = len(self._prefix)
        keys = [key[prefix_length:] for key in store.list() if key.startswith(self._prefix)]
        self._keys = without_variants(keys)

    @property
    def read_profile(self) -> ReadProfile:  # type: ignore[override]  # that of the store
        return self._store.read_profile

    @property
    def is_gone(self) -> bool:
        return self._store.is_gone

    @property
    def is_folder(self) -> bool:
        return True

    def list(self) -> Sequence[str]:
        return list(self._keys)

    def size(self, key: str) -> int:
        return self._store.size(self._prefix + key)

    def read(self, key: str, start: int, out: memoryview) -> None:
        self._store.read(self._prefix + key, start, out)

    def peek(self, key: str, start: int, out: memoryview) -> None:
        self._store.peek(self._prefix + key, start, out)

    def stamp(self, key: str) -> Stamp:
        return self._store.stamp(self._prefix + key)


def without_variants(keys: Sequence[str]) -> list[str]:
    """Return the files of a component without the weights that are another variant of those with the usual name.

    >>> without_variants(["config.json", "model.fp16.safetensors", "model.safetensors"])
    ['config.json', 'model.safetensors']
    """
    variants: set[str] = set()
    for suffix, stems in STEMS.items():
        usual = next((stem + suffix for stem in stems if stem + suffix in keys), None)
        has_index = any(stem + suffix + INDEX in keys for stem in stems)
        if usual is not None and not has_index:
            variants |= {key for key in keys if key.endswith(suffix) and key != usual}
    return [key for key in keys if key not in variants]
