"""Values: made, compared, shown, copied and pickled as a frozen dataclass was; and what may stay out of the collector's sight."""

from __future__ import annotations

import copy
import gc
import importlib
import pickle
import sys
import types
import typing
import weakref
from pathlib import Path

import msgspec
import numpy as np
import pytest
from msgspec.structs import FieldInfo, fields

import holdfast
from holdfast.core.box import Box
from holdfast.core.chunk import Chunk, Storage, c_strides
from holdfast.core.opaque import Device, Global
from holdfast.core.tensor import PLAIN_TRAITS, AliasView, LazyTensor, TensorFields, Traits
from holdfast.core.value import Value, replace
from holdfast.engine.source import OpenSource
from holdfast.stores.memory import MemoryStore

HOME = MemoryStore({})
STORAGE = Storage("file", 8, 24, crc32=7, label="data/1", home=HOME)
CHUNK = Chunk(Box.whole((2, 3)), STORAGE, 0, c_strides((2, 3), 32))
VALUES = [
    Box((0, 1), (2, 3)), AliasView(1, 8, 0, (32,)), Traits(conj=True, subclass=Global("a", "B")), PLAIN_TRAITS,
    Device("cuda", 3), Global("torch", "Size"), holdfast.Limits(depth=3),
    holdfast.Digest(holdfast.DTYPES.name("int8"), (2,), 5),
]  # fmt: skip


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_values_are_equal_by_their_fields_and_never_change(value: Value):
    names = value.__struct_fields__
    again = type(value)(**{name: getattr(value, name) for name in names})
    for same in (
        again,
        copy.copy(value),
        copy.deepcopy(value),
        pickle.loads(pickle.dumps(value)),
        replace(value),
    ):
        assert (same, hash(same), repr(same)) == (value, hash(value), repr(value))
    assert (
        repr(value)
        == f"{type(value).__name__}({', '.join(f'{name}={getattr(value, name)!r}' for name in names)})"
    )
    assert value != tuple(getattr(value, name) for name in names)
    with pytest.raises(AttributeError):
        setattr(value, names[0], None)
    with pytest.raises(TypeError):
        replace(value, nothing=1)


def test_what_is_replaced_is_checked():
    with pytest.raises(ValueError, match="0 <= start <= stop"):
        replace(Box((0,), (3,)), stop=(-1,))
    with pytest.raises(ValueError, match="strides"):
        replace(CHUNK, strides=(1,))
    assert replace(CHUNK, offset=64) == Chunk(CHUNK.box, STORAGE, 64, CHUNK.strides)
    with pytest.raises(holdfast.errors.HoldfastError):
        replace(holdfast.Limits(), depth=-1)


def test_a_tensor_without_chunks_makes_them_once_and_a_plain_tensor_of_itself():
    source = OpenSource(MemoryStore({"file": np.arange(8, dtype=np.float32).tobytes()}))
    tensor = LazyTensor("w", holdfast.DTYPES.name("float32"), (2, 3), (CHUNK,), source)
    part = tensor[1]
    stored_chunks = vars(TensorFields)["chunks"]
    assert stored_chunks.__get__(part) == ()
    assert part.chunks is part.chunks
    assert part.chunks == (Chunk(Box((0,), (3,)), STORAGE, 96, (32,)),)
    assert stored_chunks.__get__(tensor[1].renamed("v")) == ()
    assert (part.renamed("v").name, part.renamed("v").chunks) == ("v", part.chunks)
    for made in (
        replace(part, traits=Traits(neg=True)),
        part.__reduce__()[0](*part.__reduce__()[1]),
    ):
        assert type(made) is LazyTensor
        assert made.chunks == part.chunks
    moved = replace(part, chunks=(Chunk(Box((0,), (3,)), STORAGE, 0, (32,)),))
    assert (moved.chunks[0].offset, moved.numpy().tolist()) == (0, [2, 3, 4])
    assert (part == copy.copy(part), part == part.renamed("w")) == (True, False)


def test_what_says_what_is_equal_says_what_is_not():
    said = [kind for kind in structs() if "__eq__" in vars(kind)]
    assert {Storage, holdfast.DType} <= set(said)
    assert [
        kind for kind in said if vars(kind).get("__ne__", kind.__ne__) is not object.__ne__
    ] == []


# Raw text of msgspec refers to the bytes that it was read from, and to nothing else.
SAFE = (int, str, bytes, float, bool, type(None), msgspec.Raw, msgspec.UnsetType)


def leads_nowhere(kind: object) -> bool:
    """Whether what a field holds can refer to nothing that refers back."""
    if typing.get_origin(kind) in (
        tuple,
        list,
        dict,
        typing.Union,
        types.UnionType,
        typing.Literal,
    ):
        # What msgspec read from a text may have lists: nobody puts anything into them.
        return all(
            inner is ... or isinstance(inner, str) or leads_nowhere(inner)
            for inner in typing.get_args(kind)
        )
    return kind in SAFE or (
        isinstance(kind, type)
        and issubclass(kind, msgspec.Struct)
        and not kind.__struct_config__.gc
    )


def structs() -> list[type[msgspec.Struct]]:
    """Every struct of the package that can be imported without torch."""
    root = Path(holdfast.__file__).parent
    for path in sorted(root.rglob("*.py")):
        name = ".".join(("holdfast", *path.relative_to(root).with_suffix("").parts)).removesuffix(
            ".__init__"
        )
        if not name.startswith(
            ("holdfast.torch", "holdfast.integrations", "holdfast.jax", "holdfast.__main__")
        ):
            importlib.import_module(name)
    found: list[type[msgspec.Struct]] = []
    left = [msgspec.Struct]
    while left:
        kinds = left.pop().__subclasses__()
        left += kinds
        found += [kind for kind in kinds if kind.__module__.startswith("holdfast.")]
    return found


def test_what_the_collector_does_not_see_is_part_of_no_cycle():
    unseen = [kind for kind in structs() if not kind.__struct_config__.gc]
    assert {Box, Global, AliasView} <= set(unseen)

    def kinds(kind: type[msgspec.Struct]) -> tuple[FieldInfo, ...]:
        return fields(kind)

    wrong = [
        f"{kind.__qualname__}.{one.name}"
        for kind in unseen
        for one in kinds(kind)
        if not leads_nowhere(one.type)
    ]
    assert wrong == [], "core/value.py says what may have gc=False"


def test_a_cycle_through_a_storage_is_found():
    """Why `Storage` is not among them: a store may know its storages."""

    class Knowing(MemoryStore):
        known: object = None

    gc.collect()
    store = Knowing({})
    store.known = Chunk(Box((), ()), Storage("a", 0, 1, home=store), 0, ())
    gone: list[int] = []
    weakref.finalize(store, gone.append, 1)
    del store
    gc.collect()
    assert gone == [1]


def test_python_knows_the_fields():
    assert Box.__match_args__ == ("start", "stop")
    assert sys.getsizeof(Box((), ())) <= 32
