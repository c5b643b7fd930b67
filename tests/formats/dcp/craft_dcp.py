"""Distributed checkpoints by hand: every object of a `.metadata` pickle as its opcodes, and items around any pickle.

    folder({"w": tensor([2, 2], [chunk([0, 0], [2, 2])])}, [(index("w", [0, 0]), W)])       honest
    folder(…, [(index("w", [9, 9]), W)])                                                    a lie

Values may be given as pickle bytes that push something else. Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tests.hostile.craft_pickle import (
    BUILD,
    EMPTY_TUPLE,
    FALSE,
    NEWOBJ,
    NONE,
    call,
    dict_of,
    integer,
    list_of,
    named,
    stream,
    text,
    tuple_of,
)
from tests.hostile.craft_torch import torch_zip, weight

import holdfast
from holdfast.engine.source import OpenSource
from holdfast.formats.detect import detect
from holdfast.stores.memory import MemoryStore

METADATA = "torch.distributed.checkpoint.metadata"
FILESYSTEM = "torch.distributed.checkpoint.filesystem"
SHARDED = "torch.distributed._shard.sharded_tensor.metadata"
FILE = "__0_0.distcp"

W = torch_zip(stream(weight()))
"""The item of the 2 × 2 float32 tensor [[1, 2], [3, 4]]."""

SEVEN = torch_zip(stream(integer(7)), {})
"""The item of the value 7."""

Files = dict[str, bytes]


def record(module: str, name: str, state: bytes | None = None) -> bytes:
    """NEWOBJ and BUILD."""
    return named(module, name) + EMPTY_TUPLE + NEWOBJ + (b"" if state is None else state + BUILD)


def fields(**values: bytes | None) -> bytes:
    """A dict of attributes; None leaves one out."""
    return dict_of(
        *(
            part
            for name, value in values.items()
            if value is not None
            for part in (text(name), value)
        )
    )


def size(numbers: Sequence[int] | bytes) -> bytes:
    return (
        numbers
        if isinstance(numbers, bytes)
        else call("torch", "Size", tuple_of(*map(integer, numbers)))
    )


def chunk(
    offsets: Sequence[int] | bytes, sizes: Sequence[int] | bytes, *, module: str = METADATA
) -> bytes:
    return record(module, "ChunkStorageMetadata", fields(offsets=size(offsets), sizes=size(sizes)))


def properties(
    dtype: str = "float32",
    *,
    module: str = METADATA,
    encoding: str = "_MEM_FORMAT_ENCODING",
    grad: bytes = FALSE,
    more: bytes = b"",
) -> bytes:
    layout = call("torch.serialization", "_get_layout", text("torch.strided"))
    state = tuple_of(
        named("torch", dtype), layout, grad, call(module, encoding, integer(0)), FALSE, more
    )
    return record(module, "TensorProperties", state)


def tensor(
    shape: Sequence[int] | bytes,
    chunks: Sequence[bytes] | bytes,
    props: bytes | None = None,
    *,
    module: str = METADATA,
) -> bytes:
    listed = chunks if isinstance(chunks, bytes) else list_of(*chunks)
    state = fields(
        properties=properties() if props is None else props, size=size(shape), chunks=listed
    )
    return record(module, "TensorStorageMetadata", state)


def value(module: str = METADATA) -> bytes:
    return record(module, "BytesStorageMetadata")


def index(
    name: str,
    offset: Sequence[int] | bytes | None = None,
    hint: int | None = 0,
    *,
    module: str = METADATA,
) -> bytes:
    place = None if offset is None else size(offset)
    return record(
        module,
        "MetadataIndex",
        fields(fqn=text(name), index=NONE if hint is None else integer(hint), offset=place),
    )


def info(
    file: str | bytes = FILE,
    offset: int | bytes = 0,
    length: int | bytes = 0,
    *,
    transforms: bytes | None = None,
    module: str = FILESYSTEM,
) -> bytes:
    return record(
        module,
        "_StorageInfo",
        fields(
            relative_path=text(file) if isinstance(file, str) else file,
            offset=integer(offset) if isinstance(offset, int) else offset,
            length=integer(length) if isinstance(length, int) else length,
            transform_descriptors=transforms,
        ),
    )


def note(
    path: bytes = call("pathlib", "PosixPath", text("ckpt")), save_id: bytes = text("id-1")
) -> bytes:
    state = fields(checkpoint_id=path, save_id=save_id, load_id=NONE, modules=list_of())
    return record(METADATA, "StorageMeta", state)


def paths(**named_paths: Sequence[str | int]) -> bytes:
    """`planner_data`; `__` in a keyword stands for a dot."""
    pairs = []
    for name, path in named_paths.items():
        steps = [text(step) if isinstance(step, str) else integer(step) for step in path]
        pairs += [text(name.replace("__", ".")), tuple_of(*steps)]
    return dict_of(*pairs)


def metadata(
    tensors: Mapping[str, bytes] | bytes,
    items: Sequence[tuple[bytes, bytes]] | bytes | None,
    *,
    planner: bytes | None = NONE,
    meta: bytes | None = None,
    version: bytes | None = text("1.0.0"),
    more: Mapping[str, bytes] | None = None,
    module: str = METADATA,
    protocol: int = 2,
) -> bytes:
    """A `.metadata`; None leaves a field out."""
    entries = (
        tensors
        if isinstance(tensors, bytes)
        else dict_of(*(p for k, v in tensors.items() for p in (text(k), v)))
    )
    places = (
        items
        if items is None or isinstance(items, bytes)
        else dict_of(*(p for pair in items for p in pair))
    )
    state = fields(
        state_dict_metadata=entries, planner_data=planner, storage_data=places, storage_meta=note() if meta is None else meta,
        version=version, **(more or {}),
    )  # fmt: skip
    return stream(record(module, "Metadata", state), protocol=protocol)


def folder(
    tensors: Mapping[str, bytes],
    contents: Sequence[tuple[bytes, bytes]],
    *,
    file: str = FILE,
    **more: object,
) -> Files:
    """A directory whose data file holds these items, each under its index, end to end."""
    at, items, raw = 0, [], b""
    for place, content in contents:
        items.append((place, info(file, at, len(content))))
        at += len(content)
        raw += content
    return {".metadata": metadata(tensors, items, **more), file: raw}


def honest() -> Files:
    """One tensor and one value."""
    tensors = {"w": tensor([2, 2], [chunk([0, 0], [2, 2])]), "step": value()}
    return folder(
        tensors,
        [(index("step", None, None), SEVEN), (index("w", [0, 0]), W)],
        planner=paths(w=["w"], step=["step"]),
    )


def opened(files: Files, **more: object) -> holdfast.Checkpoint:
    """Open a directory that is in memory."""
    source = OpenSource(MemoryStore(files, name="<folder>"), **more)
    return holdfast.Checkpoint(source, detect(source).describe(source))
