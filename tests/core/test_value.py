"""Values behave like frozen dataclasses, and only safe ones are hidden from the garbage collector."""

from __future__ import annotations

import copy
import gc
import importlib
import pickle
import sys
import types
import typing
import weakref
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import pytest
from msgspec.structs import fields

import holdfast
from holdfast.core.box import Box
from holdfast.core.chunk import Chunk, Storage, c_strides
from holdfast.core.opaque import Device, Global
from holdfast.core.tensor import PLAIN_TRAITS, AliasView, LazyTensor, TensorFields, Traits
from holdfast.core.value import Value, replace
from holdfast.engine.source import OpenSource
from holdfast.stores.memory import MemoryStore

STORAGE = Storage("file", 8, 24, crc32=7, label="data/1", home=MemoryStore({}))
CHUNK = Chunk(Box.whole((2, 3)), STORAGE, 0, c_strides((2, 3), 32))

VALUES = [
    Box((0, 1), (2, 3)),
    AliasView(1, 8, 0, (32,)),
    Traits(conj=True, subclass=Global("a", "B")),
    PLAIN_TRAITS,
    Device("cuda", 3),
    Global("torch", "Size"),
    holdfast.Limits(depth=3),
    holdfast.Digest(holdfast.DTYPES.name("int8"), (2,), 5),
]

each_value = pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)


def field_values(value: Value) -> dict[str, object]:
    return {name: getattr(value, name) for name in value.__struct_fields__}


@each_value
@pytest.mark.parametrize(
    "make_copy",
    [
        pytest.param(lambda value: type(value)(**field_values(value)), id="constructor"),
        pytest.param(copy.copy, id="copy"),
        pytest.param(copy.deepcopy, id="deepcopy"),
        pytest.param(lambda value: pickle.loads(pickle.dumps(value)), id="pickle"),
        pytest.param(replace, id="replace"),
    ],
)
def test_a_copy_is_equal_and_has_the_same_hash_and_repr(value: Value, make_copy):
    value_copy = make_copy(value)

    assert value_copy == value
    assert hash(value_copy) == hash(value)
    assert repr(value_copy) == repr(value)


@each_value
def test_the_repr_has_all_fields(value: Value):
    field_texts = [f"{name}={content!r}" for name, content in field_values(value).items()]

    assert repr(value) == f"{type(value).__name__}({', '.join(field_texts)})"


@each_value
def test_a_value_is_not_equal_to_a_tuple_of_its_fields(value: Value):
    assert value != tuple(field_values(value).values())


@each_value
def test_fields_cannot_be_assigned(value: Value):
    with pytest.raises(AttributeError):
        setattr(value, value.__struct_fields__[0], None)


@each_value
def test_replace_rejects_a_field_that_the_class_does_not_have(value: Value):
    with pytest.raises(TypeError):
        replace(value, nothing=1)


def test_replace_checks_the_new_fields():
    with pytest.raises(ValueError, match="0 <= start <= stop"):
        replace(Box((0,), (3,)), stop=(-1,))
    with pytest.raises(ValueError, match="strides"):
        replace(CHUNK, strides=(1,))
    with pytest.raises(holdfast.errors.HoldfastError):
        replace(holdfast.Limits(), depth=-1)


def test_replace_returns_a_value_with_the_changed_fields():
    assert replace(CHUNK, offset=64) == Chunk(CHUNK.box, STORAGE, 64, CHUNK.strides)


def test_replace_accepts_dataclasses():
    @dataclass(frozen=True)
    class Point:
        x: int
        y: int

    assert replace(Point(1, 2), y=3) == Point(1, 3)


@pytest.fixture
def row() -> LazyTensor:
    """Return a row of a tensor. Its chunks are computed when they are first needed."""
    content = np.arange(8, dtype=np.float32).tobytes()
    source = OpenSource(MemoryStore({"file": content}))
    dtype = holdfast.DTYPES.name("float32")
    tensor: LazyTensor = LazyTensor("w", dtype, (2, 3), (CHUNK,), source)[1]
    return tensor


def has_computed_chunks(tensor: LazyTensor) -> bool:
    """Return whether the chunks are stored in the field, without computing them."""
    stored_chunks: object = vars(TensorFields)["chunks"].__get__(tensor)
    return stored_chunks != ()


def test_chunks_of_a_slice_are_computed_once(row: LazyTensor):
    assert not has_computed_chunks(row)

    assert row.chunks == (Chunk(Box((0,), (3,)), STORAGE, 96, (32,)),)
    assert row.chunks is row.chunks


def test_renaming_a_slice_does_not_compute_its_chunks(row: LazyTensor):
    renamed_row = row.renamed("v")

    assert not has_computed_chunks(renamed_row)
    assert renamed_row.name == "v"
    assert renamed_row.chunks == row.chunks


def test_a_slice_with_replaced_fields_is_a_plain_tensor_with_the_same_chunks(row: LazyTensor):
    negated_row = replace(row, traits=Traits(neg=True))

    assert type(negated_row) is LazyTensor
    assert negated_row.chunks == row.chunks


def test_an_unpickled_slice_is_a_plain_tensor_with_the_same_chunks(row: LazyTensor):
    """The source cannot be pickled here, so this calls what pickle would call."""
    construct, arguments = row.__reduce__()[:2]
    restored_row = construct(*arguments)

    assert type(restored_row) is LazyTensor
    assert restored_row.chunks == row.chunks


def test_a_slice_with_replaced_chunks_reads_these(row: LazyTensor):
    chunk_at_start = Chunk(Box((0,), (3,)), STORAGE, 0, (32,))

    moved_row = replace(row, chunks=(chunk_at_start,))

    assert moved_row.chunks[0].offset == 0
    assert moved_row.numpy().tolist() == [2, 3, 4]


def test_slices_are_equal_if_they_have_the_same_name_and_elements(row: LazyTensor):
    assert row == copy.copy(row)
    assert row != row.renamed("v")


def import_all_modules() -> None:
    """Import every module of the package that does not need torch or another framework."""
    package_folder = Path(holdfast.__file__).parent
    left_out = ("holdfast.torch", "holdfast.integrations", "holdfast.jax", "holdfast.__main__")
    for path in sorted(package_folder.rglob("*.py")):
        components = path.relative_to(package_folder).with_suffix("").parts
        name = ".".join(("holdfast", *components)).removesuffix(".__init__")
        if not name.startswith(left_out):
            importlib.import_module(name)


def list_structs() -> list[type[msgspec.Struct]]:
    """Return every struct that the package defines."""
    import_all_modules()
    structs: list[type[msgspec.Struct]] = []
    pending = [msgspec.Struct]
    while pending:
        subclasses = pending.pop().__subclasses__()
        pending += subclasses
        for subclass in subclasses:
            if subclass.__module__.startswith("holdfast."):
                structs.append(subclass)
    return structs


def test_a_struct_that_defines_equality_also_takes_inequality_from_object():
    """The `__ne__` of structs would not call an `__eq__` that the class defines."""
    structs_with_eq = [struct for struct in list_structs() if "__eq__" in vars(struct)]

    assert {Storage, holdfast.DType} <= set(structs_with_eq)
    for struct in structs_with_eq:
        assert vars(struct).get("__ne__", struct.__ne__) is object.__ne__, struct


ACYCLIC_TYPES = (int, str, bytes, float, bool, type(None), msgspec.Raw, msgspec.UnsetType)
"""Types whose values refer to no other objects, except that `Raw` refers to its bytes."""

CONTAINERS = (tuple, list, dict, typing.Union, types.UnionType, typing.Literal)
"""Lists and dicts are allowed if msgspec reads them from a text, because nobody adds to them."""


def is_acyclic(annotation: object) -> bool:
    """Return whether a field of this type cannot lead back to the value that has the field."""
    if typing.get_origin(annotation) in CONTAINERS:
        for argument in typing.get_args(annotation):
            is_literal = argument is ... or isinstance(argument, str)
            if not is_literal and not is_acyclic(argument):
                return False
        return True
    if annotation in ACYCLIC_TYPES:
        return True
    is_struct = isinstance(annotation, type) and issubclass(annotation, msgspec.Struct)
    return is_struct and not annotation.__struct_config__.gc


def test_values_that_the_collector_does_not_see_cannot_be_part_of_a_cycle():
    hidden_structs = [struct for struct in list_structs() if not struct.__struct_config__.gc]
    assert {Box, Global, AliasView} <= set(hidden_structs)

    unsafe_fields = []
    for struct in hidden_structs:
        for field in fields(struct):
            if not is_acyclic(field.type):
                unsafe_fields.append(f"{struct.__qualname__}.{field.name}")
    assert unsafe_fields == [], "core/value.py says what may have gc=False"


def test_a_cycle_through_a_storage_is_freed():
    """This is why `Storage` is not hidden from the collector: a store may refer to its storages."""

    class StoreWithChunk(MemoryStore):
        chunk: Chunk | None = None

    gc.collect()
    store = StoreWithChunk({})
    store.chunk = Chunk(Box((), ()), Storage("a", 0, 1, home=store), 0, ())
    freed: list[str] = []
    weakref.finalize(store, freed.append, "store")

    del store
    gc.collect()

    assert freed == ["store"]


def test_match_statements_use_the_fields_by_position():
    assert Box.__match_args__ == ("start", "stop")


def test_a_box_takes_no_more_memory_than_a_tuple_of_its_fields():
    assert sys.getsizeof(Box((), ())) <= 32
