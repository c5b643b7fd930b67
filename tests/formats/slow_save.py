"""Carry out save plans in the slowest way that can be right, and open what comes out; states made of arrays in memory.

The engine has its own tests. These are for layouts: what a plan says is what the bytes are.
"""

from __future__ import annotations

import zlib
from collections import OrderedDict, defaultdict
from collections.abc import Mapping

import numpy as np

from holdfast.core.box import Box
from holdfast.core.checkpoint import Checkpoint
from holdfast.core.chunk import Chunk, Storage
from holdfast.core.dtype import DTYPES, DType
from holdfast.core.limits import Limits
from holdfast.core.protocols import State
from holdfast.core.tensor import Composite, LazyTensor, Traits
from holdfast.engine.saves import Data, FilePlan, Gathered, Late, Literal, SavePlan
from holdfast.engine.source import OpenSource
from holdfast.formats.detect import detect
from holdfast.stores.memory import MemoryStore
from holdfast.verbs.shared.state import tabulate_tree


def raw_bytes(tensor: LazyTensor) -> bytes:
    """The elements in C order, little-endian, packed."""
    array = np.ascontiguousarray(tensor.numpy())
    if not tensor.dtype.packed:
        return array.tobytes()
    bits = np.unpackbits(array.view(np.uint8).reshape(-1, 1), axis=1, bitorder="little")[
        :, : tensor.dtype.bits
    ]
    return np.packbits(bits.reshape(-1), bitorder="little").tobytes()


def write_file(file: FilePlan, crcs: dict[str, int]) -> bytes:
    """Return the content of a file, and add the checksums of its tensors to those of others."""
    parts: list[bytes | Late] = []
    for segment in file.segments:
        match segment:
            case Literal():
                parts.append(segment.data)
            case Data():
                data = raw_bytes(segment.tensor)
                assert segment.label not in crcs
                crcs[segment.label] = zlib.crc32(data)
                parts.append(data)
            case Gathered():
                data, sums = segment.make()
                assert crcs.keys().isdisjoint(sums)
                crcs |= sums
                parts.append(data)
            case Late():
                parts.append(segment)
    contents = [part.make(crcs) if isinstance(part, Late) else part for part in parts]
    assert [len(content) for content in contents] == [segment.nbytes for segment in file.segments]
    return b"".join(contents)


def execute(plan: SavePlan) -> dict[str, bytes]:
    """Every file of a plan. The files of the index see the checksums of all others."""
    crcs: dict[str, int] = {}
    contents = {file.key: write_file(file, crcs) for file in (*plan.files, *plan.index)}
    assert len({*crcs}) == len(plan.tensors())
    return contents


def reopen(files: Mapping[str, bytes], limits: Limits | None = None) -> Checkpoint:
    """Open files in memory, whatever they are."""
    source = OpenSource(
        MemoryStore({key or "file": content for key, content in files.items()}), limits=limits
    )
    return Checkpoint(source, detect(source).describe(source))


class Memory:
    """A place for tensors. Each array has a storage of its own; `view` makes another tensor over one."""

    def __init__(self) -> None:
        self.content: dict[str, bytes] = {}
        self.source = OpenSource(MemoryStore({}))

    def storage(self, content: bytes) -> Storage:
        key = f"s{len(self.content)}"
        self.content[key] = content
        self.source.store = MemoryStore(self.content)
        return Storage(key, 0, len(content), home=self)

    def raw(
        self, dtype: DType | str, shape: tuple[int, ...], content: bytes | None = None
    ) -> LazyTensor:
        dtype = DTYPES.name(dtype) if isinstance(dtype, str) else dtype
        nbytes = dtype.nbytes(int(np.prod(shape, dtype=object)))
        storage = self.storage(content or bytes(i * 37 % 251 for i in range(nbytes)))
        return LazyTensor.contiguous("", dtype, shape, storage, self.source)

    def array(self, array: np.ndarray, **traits: object) -> LazyTensor:
        tensor = self.raw(DTYPES.numpy(array.dtype), array.shape, array.tobytes())
        return LazyTensor(
            "", tensor.dtype, tensor.shape, tensor.chunks, self.source, Traits(**traits)
        )

    def view(
        self,
        of: LazyTensor,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        offset: int = 0,
        **traits: object,
    ) -> LazyTensor:
        """Strides and offset in elements of the storage of another tensor."""
        bits = of.dtype.bits
        chunk = Chunk(
            Box.whole(shape), of.chunks[0].storage, offset * bits, tuple(s * bits for s in strides)
        )
        return LazyTensor("", of.dtype, shape, (chunk,), self.source, Traits(**traits))


def state_of(tree: object, metadata: Mapping[str, str] | None = None) -> State:
    return tabulate_tree(tree, metadata=metadata)


def state_of_checkpoint(ckpt: Checkpoint) -> State:
    return state_of(ckpt.tree, ckpt.metadata)


def assert_same(a: object, b: object, path: str = "$") -> None:
    """Two trees are equal: types, order, bits. A `defaultdict` may be of our own subclass."""
    if isinstance(a, LazyTensor):
        assert isinstance(b, LazyTensor), path
        assert (a.dtype, a.shape) == (b.dtype, b.shape), path
        for flag in ("requires_grad", "parameter", "buffer", "meta", "subclass"):
            assert getattr(a.traits, flag) == getattr(b.traits, flag), (path, flag)
        assert_same(a.traits.state, b.traits.state, path + ".state")
        if not a.traits.meta:
            assert raw_bytes(a) == raw_bytes(b), path
        return
    if isinstance(a, defaultdict):
        assert isinstance(b, defaultdict), path
        assert a.default_factory is b.default_factory, path
    else:
        assert type(a) is type(b), (path, type(a), type(b))
    match a:
        case dict():
            assert len(a) == len(b), path
            for (k, v), (other, w) in zip(a.items(), b.items(), strict=True):
                assert_same(k, other, f"{path}<key>")
                assert_same(v, w, f"{path}.{k}")
            if isinstance(a, OrderedDict):
                assert_same(vars(a).get("_metadata"), vars(b).get("_metadata"), f"{path}._metadata")
        case list() | tuple():
            assert len(a) == len(b), path
            for i, (v, w) in enumerate(zip(a, b, strict=True)):
                assert_same(v, w, f"{path}[{i}]")
        case set() | frozenset():
            assert a == b, path
            assert sorted(type(x).__name__ for x in a) == sorted(type(x).__name__ for x in b), path
        case float() if not isinstance(a, np.generic):
            assert np.float64(a).tobytes() == np.float64(b).tobytes(), path
        case complex() if not isinstance(a, np.generic):
            assert np.complex128(a).tobytes() == np.complex128(b).tobytes(), path
        case np.str_() | np.bytes_():
            assert (len(a), [*a]) == (len(b), [*b]), path
        case np.ndarray() | np.generic():
            assert a.dtype == b.dtype, path
            assert a.shape == b.shape, path
            assert a.tobytes() == b.tobytes(), path
        case Composite():
            assert (a.kind, a.shape, a.traits) == (b.kind, b.shape, b.traits), path
            assert_same(dict(a.parts), dict(b.parts), path)
            assert_same(dict(a.attributes), dict(b.attributes), path)
        case _:
            assert a == b, path
