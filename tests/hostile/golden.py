"""Golden files as bytes, what was found in them, and how much of that a damaged copy still has."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import holdfast
from holdfast import errors
from holdfast.core.chunk import Chunk
from holdfast.core.tensor import Composite
from holdfast.engine.source import OpenSource
from holdfast.formats.detect import detect
from holdfast.stores.memory import MemoryStore

from .harness import nodes, survey

__all__ = ["FILES", "FOLDERS", "Found", "header_positions", "look", "opened", "parts_of"]

ROOT = Path(__file__).resolve().parent.parent / "golden" / "files"

FILES: dict[str, bytes] = {p.name: p.read_bytes() for p in sorted(ROOT.iterdir()) if p.is_file()}
"""Golden checkpoints of one file."""

FOLDERS: dict[str, dict[str, bytes]] = {
    p.name: {str(f.relative_to(p)): f.read_bytes() for f in sorted(p.rglob("*")) if f.is_file()}
    for p in sorted(ROOT.iterdir())
    if p.is_dir()
}
"""Golden checkpoints that are directories: their files by name."""


RUN = 8
"""A byte with this many equal ones on both sides is padding (`ZZZ…`, NULs of a tar): one in so many stands for the others."""


def opened(content: bytes | dict[str, bytes]) -> holdfast.Checkpoint:
    """Open bytes, or a directory that is in memory."""
    if isinstance(content, bytes):
        return holdfast.open(content)
    source = OpenSource(MemoryStore(content))
    return holdfast.Checkpoint(source, detect(source).describe(source))


@dataclass(frozen=True)
class Found:
    """What a checkpoint holds, in a form that can be compared: where the tensors lie, and what is around them."""

    format: str
    tensors: dict[str, object]
    """By name: dtype, shape and every chunk with its storage. The same chunks of the same bytes are the same elements."""
    foreign: list[str]
    tree: list[str]


def _found(ckpt: holdfast.Checkpoint) -> Found:
    tensors = {
        name: (t.dtype.name, t.shape, [_place(chunk) for chunk in t.chunks])
        for name, t in ckpt.items()
    }
    return Found(
        ckpt.format,
        tensors,
        [str(f.what) for f in ckpt.foreign],
        [_shown(v) for v in nodes(ckpt.tree)],
    )


def _place(chunk: Chunk) -> tuple[object, ...]:
    """Where a chunk lies, whoever opened the file: a storage is never equal to one of another opening."""
    s = chunk.storage
    return (
        chunk.box,
        chunk.offset,
        chunk.strides,
        s.key,
        s.start,
        s.nbytes,
        s.byteorder,
        s.crc32,
        s.location,
        s.label,
    )


def _shown(value: object) -> str:
    """A node without what is inside of it, which `nodes` visits by itself."""
    match value:
        case dict() | list() | tuple() | set() | frozenset():
            return f"{type(value).__name__} of {len(value)}"
        case holdfast.LazyTensor():
            return (
                f"{value.dtype} {value.shape} {value.traits.requires_grad} {value.traits.parameter}"
            )
        case holdfast.Opaque():
            return f"{value.module}.{value.name}"
        case Composite():
            return f"{value.kind} {value.shape}"
        case _:
            return f"{type(value).__name__} {value}"


def look(content: bytes | dict[str, bytes], known: Found | None = None) -> Found | None:
    """What is found in damaged bytes; None where they are refused. Anything but a Holdfast error comes out.

    Everything is read, unless it is what is known already.
    """
    try:
        with opened(content) as ckpt:
            found = _found(ckpt)
            if found != known:
                survey(ckpt)
            return found
    except errors.HoldfastError as error:
        str(error)
        return None


def parts_of(ckpt: holdfast.Checkpoint) -> Iterator[tuple[str, int, int]]:
    """File, first byte and the byte after the last one of every storage."""
    for tensor in [
        *ckpt.values(),
        *(v for v in nodes(ckpt.tree) if isinstance(v, holdfast.LazyTensor)),
    ]:
        for storage in tensor.storages:
            yield storage.key, storage.start, storage.start + storage.nbytes


def header_positions(content: bytes | dict[str, bytes]) -> Iterator[tuple[str, int]]:
    """Every byte, as file and position, that is no element of a tensor; of long padding, each eighth byte."""
    files = {"bytes": content} if isinstance(content, bytes) else content
    payload: dict[str, set[int]] = {key: set() for key in files}
    with opened(content) as ckpt:
        for key, start, stop in parts_of(ckpt):
            if key in payload:  # what is inflated has no place in the file
                payload[key].update(range(start, stop))
    for key, raw in files.items():
        for i in range(len(raw)):
            inside_a_run = raw[max(i - RUN, 0) : i + RUN + 1].count(raw[i]) == 2 * RUN + 1
            if i not in payload[key] and (i % RUN == 0 or not inside_a_run):
                yield key, i
