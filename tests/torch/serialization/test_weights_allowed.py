"""What the user allows in a `weights_only` load: called, made and given its state as pickle would, with tensors that are filled."""

from __future__ import annotations

import datetime
import io
import os
import pickle
import struct
import zoneinfo
from collections import defaultdict, namedtuple

import numpy as np
import pytest
import torch

from holdfast.errors import HoldfastError, PickleError, Refused
from holdfast.torch import versions
from holdfast.torch.serialization.allowed import safe_globals
from tests.hostile.craft_pickle import (
    APPEND,
    BUILD,
    EMPTY_TUPLE,
    NEWOBJ,
    NONE,
    REDUCE,
    SETITEM,
    call,
    dict_of,
    inst,
    integer,
    list_of,
    named,
    stream,
    text,
    tuple_of,
)
from tests.hostile.craft_torch import torch_zip, weight
from tests.processes import run_code
from tests.support import needs, torch_bytes
from tests.torch.serialization.zip_storages import ZipStorages, load

HERE = __name__

Point = namedtuple("Point", ["x", "y"])


class Plain:
    def __init__(self, number: int) -> None:
        self.number = number


class Slots:
    __slots__ = ("left", "right")


class SomeSlots(Slots):
    pass


class Stated:
    def __setstate__(self, state):
        self.seen = state


class Weighted:
    """Looks at its tensor when it gets its state."""

    def __init__(self, weight):
        self.weight = weight

    def __setstate__(self, state):
        self.total = float(state["weight"].sum())


class ListLike(list):
    pass


class DictLike(dict):
    pass


class Called:
    """What Python 2 would have called an old-style class."""

    def __init__(self, *args):
        self.args = args


def total(*tensors):
    return float(sum(t.sum() for t in tensors))


def failing(kind):
    raise {
        "KeyError": KeyError,
        "IndexError": IndexError,
        "struct": struct.error,
        "Value": ValueError,
    }[kind]("from the user")


class Tagged(torch.Tensor):
    """A subclass with attributes and a slot of its own."""


class Setting(torch.Tensor):
    def __setstate__(self, state):
        self.seen = state
        self.first = float(self.reshape(-1)[0])


class Pair(torch.Tensor):
    """A wrapper around two tensors."""

    @staticmethod
    def __new__(cls, a, b):
        return torch.Tensor._make_wrapper_subclass(
            cls,
            a.shape,
            strides=a.stride(),
            storage_offset=a.storage_offset(),
            dtype=a.dtype,
            device=a.device,
            requires_grad=a.requires_grad,
        )

    def __init__(self, a, b):
        self.a, self.b = a, b

    def __tensor_flatten__(self):
        return ["a", "b"], None

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return cls(args[0].a.detach(), args[0].b.detach())
        raise NotImplementedError(func)


ALL = [
    Point,
    Plain,
    Slots,
    SomeSlots,
    Stated,
    Weighted,
    ListLike,
    DictLike,
    Called,
    total,
    failing,
    Tagged,
    Setting,
    Pair,
    getattr,
    defaultdict,
]


@pytest.fixture(params=["ours", "torch's"])
def allow(request):
    return safe_globals if request.param == "ours" else torch.serialization.safe_globals


def zipped(*parts: bytes) -> bytes:
    return torch_zip(stream(*parts))


# Objects.


def test_nothing_of_it_without_permission():
    for value in (
        Point(1, 2),
        Plain(1),
        Weighted(torch.ones(2)),
        torch.ones(2).as_subclass(Tagged),
        Pair(torch.ones(2), torch.zeros(2)),
    ):
        with pytest.raises(
            pickle.UnpicklingError,
            match=f"GLOBAL {HERE}.{type(value).__name__} was not an allowed global",
        ):
            load(torch_bytes(value))


@pytest.mark.parametrize("value", [Point(1, [2]), Plain(3)], ids=["namedtuple", "dict"])
def test_classes(value, allow):
    with allow([type(value)]):
        ours = load(torch_bytes(value))
    assert type(ours) is type(value)
    assert getattr(ours, "__dict__", ours) == getattr(value, "__dict__", value)


def test_slots(allow):
    value = SomeSlots()
    value.left, value.right, value.more = 1, [2], "x"
    with allow([SomeSlots]):
        ours = load(torch_bytes(value))
    assert (ours.left, ours.right, ours.more) == (1, [2], "x")


def test_setstate(allow):
    with allow([Stated]):
        assert load(zipped(call(HERE, "Stated"), tuple_of(integer(1), integer(2)), BUILD)).seen == (
            1,
            2,
        )


def test_no_state(allow):
    with allow([Plain]):
        assert vars(load(zipped(named(HERE, "Plain"), EMPTY_TUPLE, NEWOBJ, NONE, BUILD))) == {}


def test_under_another_name(allow):
    with allow([(total, "long.gone.function"), (Plain, "long.gone.Plain")]):
        assert load(zipped(call("long.gone", "function", weight()))) == 10
        assert type(load(zipped(named("long.gone", "Plain"), EMPTY_TUPLE, NEWOBJ))) is Plain
        with pytest.raises(pickle.UnpicklingError):
            load(zipped(call(HERE, "total")))


def test_the_names_that_torch_has_stay_its_own(allow):
    with allow([(failing, "collections.OrderedDict")]):
        assert load(zipped(call("collections", "OrderedDict"))) == {}


@pytest.mark.parametrize("module", ["os", "posix", "nt", "sys"])
def test_blocked_whoever_allows_it(module, allow):
    with (
        allow([(total, f"{module}.harmless"), os.execv]),
        pytest.raises(
            pickle.UnpicklingError,
            match=f"unsupported GLOBAL {module}.harmless whose module {module} is blocked",
        ),
    ):
        load(zipped(call(module, "harmless")))


def test_python2_classes(allow):
    """INST and OBJ call the class, as Python 3 does, unless there is nothing to call it with."""
    with allow([Called]):
        assert load(zipped(b"(", integer(1), text("x"), inst(HERE, "Called"))).args == (1, "x")
        assert load(zipped(b"(", named(HERE, "Called"), integer(1), b"o")).args == (1,)
        assert not hasattr(load(zipped(b"(", inst(HERE, "Called"))), "args")


# Methods.

NOON = datetime.datetime(2025, 1, 1, 12, 0, tzinfo=zoneinfo.ZoneInfo(key="UTC"))


def test_a_method_is_allowed_by_itself(allow):
    with (
        allow([datetime.datetime, getattr, zoneinfo.ZoneInfo]),
        pytest.raises(
            pickle.UnpicklingError, match=r"unrecognized function .*_unpickle.*zoneinfo\.ZoneInfo"
        ),
    ):
        load(torch_bytes(NOON))
    with allow(
        [
            datetime.datetime,
            getattr,
            zoneinfo.ZoneInfo,
            (zoneinfo.ZoneInfo._unpickle, "zoneinfo.ZoneInfo._unpickle"),
        ]
    ):
        assert load(torch_bytes(NOON)) == NOON


def test_what_a_call_gave_is_not_callable_for_that(allow):
    """torch 2.13 calls it when _rebuild_from_type_v2 is asked to."""
    with allow([getattr, Called]):
        made = call("__builtin__", "getattr", named(HERE, "Called"), text("mro"))
        for attack in (
            made + EMPTY_TUPLE + REDUCE,
            call(
                "torch._tensor",
                "_rebuild_from_type_v2",
                made,
                named("torch", "Tensor"),
                EMPTY_TUPLE,
                NONE,
            ),
        ):
            with pytest.raises(pickle.UnpicklingError, match="unrecognized function"):
                load(zipped(attack))


# Code that looks at tensors.


def test_code_sees_filled_tensors(allow):
    raw = torch_bytes([torch.ones(3), Weighted(torch.arange(4.0))])
    with allow([Weighted, total]):
        assert load(raw)[1].total == 6
        storages = ZipStorages(zipped(call(HERE, "total", weight())))
        assert load(b"", storages=storages) == 10
    assert storages.fills == 1


def test_code_without_tensors_waits_for_none(allow):
    raw = torch_bytes([torch.ones(3), Point(1, "x"), Plain(3), datetime.timedelta(1)])
    storages = ZipStorages(raw)
    with allow([Point, Plain, datetime.timedelta]):
        load(raw, storages=storages)
    assert storages.fills == 1, "only at the end"


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("KeyError", KeyError),
        ("IndexError", IndexError),
        ("struct", struct.error),
        ("Value", ValueError),
    ],
)
def test_its_errors_are_its_own(name, kind, allow):
    with allow([failing]), pytest.raises(kind, match="from the user") as caught:
        load(zipped(call(HERE, "failing", text(name))))
    assert type(caught.value) is kind


# Containers and states that torch refuses too.


@pytest.mark.parametrize(
    ("attack", "said"),
    [
        (
            call(HERE, "ListLike") + integer(1) + APPEND,
            "Can only append to lists, but got .*ListLike",
        ),
        (
            call(HERE, "DictLike") + integer(1) + integer(1) + SETITEM,
            "Can only SETITEM for dict, .*Counter, but got .*DictLike",
        ),
        (
            call("collections", "defaultdict") + integer(1) + integer(1) + SETITEM,
            "but got .*defaultdict",
        ),
        (
            named(HERE, "Plain") + dict_of(text("x"), integer(1)) + BUILD,
            "Can only build .* but got .*type",
        ),
        (
            named(HERE, "total") + EMPTY_TUPLE + NEWOBJ,
            "Can only create new object .* but got .*total",
        ),
        (call(HERE, "Called") + EMPTY_TUPLE + REDUCE, "unrecognized function a Called"),
        (call(HERE, "Called") + integer(1) + BUILD, "not attributes by name"),
        (call(HERE, "Called") + dict_of(integer(1), integer(1)) + BUILD, "not attributes by name"),
        (call(HERE, "Slots") + dict_of(text("left"), integer(1)) + BUILD, "has no attributes"),
        (
            call(HERE, "Slots") + tuple_of(NONE, dict_of(text("up"), integer(1))) + BUILD,
            "has no slot",
        ),
        (
            call(HERE, "SomeSlots")
            + tuple_of(NONE, dict_of(text("__class__"), named(HERE, "Plain")))
            + BUILD,
            "belongs to Python",
        ),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_refused_as_in_torch(attack, said, allow):
    with allow(ALL), pytest.raises(PickleError, match=said):
        load(zipped(attack))


def test_numpy(allow):
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    scalar = np.float64(2.5)
    names = [
        np._core.multiarray._reconstruct,
        np._core.multiarray.scalar,
        np.ndarray,
        np.dtype,
        np.dtypes.Float32DType,
        np.dtypes.Float64DType,
    ]
    with allow(names):
        ours = load(torch_bytes([array, scalar]))
    assert np.array_equal(ours[0], array)
    assert ours[1] == scalar


# Subclasses of tensors.


def test_a_subclass_with_attributes(allow):
    value = torch.arange(4.0).as_subclass(Tagged)
    value.note = "kept"
    raw = torch_bytes([value, torch.nn.Parameter(value)])
    with allow([Tagged]):
        ours, theirs = load(raw), torch.load(io.BytesIO(raw), weights_only=False)
    for a, b in zip(ours, theirs, strict=True):
        assert type(a) is type(b)
        assert torch.equal(a, b)
        assert vars(a) == vars(b)
        assert isinstance(a, torch.nn.Parameter) == isinstance(b, torch.nn.Parameter)


def test_a_subclass_that_sets_its_state(allow):
    value = torch.arange(3.0, 5.0).as_subclass(Setting)
    with allow([Setting]):
        ours = load(torch_bytes(value))
    assert ours.first == 3
    assert ours.seen is None


def test_a_wrapper(allow):
    value = Pair(torch.arange(3.0), torch.ones(3))
    with allow([Pair]):
        ours = load(torch_bytes([value, torch.nn.Parameter(Pair(torch.zeros(2), torch.ones(2)))]))
    assert type(ours[0]) is Pair
    assert ours[0].a.tolist() == [0, 1, 2]
    assert ours[0].b.tolist() == [1, 1, 1]
    assert isinstance(ours[1], torch.nn.Parameter)


@pytest.mark.parametrize(
    "where", ["meta", torch.device("meta"), {"cpu": "meta"}], ids=["name", "device", "dict"]
)
def test_a_wrapper_goes_where_its_parts_go(where, allow):
    local = torch.serialization._serialization_tls
    local.map_location = where
    try:
        with allow([Pair]):
            assert load(torch_bytes(Pair(torch.ones(2), torch.ones(2)))).is_meta
    finally:
        local.map_location = None


def test_a_wrapper_and_a_function_for_locations(allow):
    local = torch.serialization._serialization_tls
    local.map_location = lambda storage, location: storage
    try:
        with allow([Pair]), pytest.raises(Refused, match="Callable map_location not supported"):
            load(torch_bytes(Pair(torch.ones(2), torch.ones(2))))
    finally:
        local.map_location = None


@pytest.mark.parametrize(
    "name",
    [
        "data",
        "requires_grad",
        "grad",
        "__class__",
        "__dict__",
        "shape",
        "_backward_hooks",
        "_cdata",
    ],
)
@pytest.mark.parametrize(
    "kind", [named("torch", "Tensor"), named(HERE, "Tagged")], ids=["Tensor", "Tagged"]
)
def test_a_tensors_own_things_are_no_attributes(name, kind, allow):
    function = named("torch._utils", "_rebuild_tensor_v2")
    args = weight().removeprefix(function).removesuffix(REDUCE)
    attack = call(
        "torch._tensor",
        "_rebuild_from_type_v2",
        function,
        kind,
        args,
        dict_of(text(name), weight()),
    )
    with allow([Tagged]), pytest.raises(PickleError, match="an attribute that it cannot have had"):
        load(zipped(attack))


def test_build_does_not_reach_into_a_subclass(allow):
    value = torch_bytes(torch.ones(2).as_subclass(Tagged))
    raw = torch_zip(
        ZipStorages(value).pickle[:-1]
        + tuple_of(list_of(), integer(0), EMPTY_TUPLE, EMPTY_TUPLE)
        + BUILD
        + b".",
        {"0": b"\0" * 8},
    )
    with allow([Tagged]), pytest.raises(PickleError, match="a tensor that is complete"):
        load(raw)


NJT = "torch.nested._internal.nested_tensor"


@pytest.mark.parametrize(
    "attack",
    [
        call(NJT, "_rebuild_njt"),
        call(NJT, "_rebuild_njt", integer(1)),
        call(NJT, "_rebuild_njt", dict_of(text("values"), weight(), text("offsets"), weight())),
        call(NJT, "NestedTensor", weight(), weight()),
        named(NJT, "NestedTensor") + tuple_of(weight(), weight()) + NEWOBJ,
        named(NJT, "NestedTensor") + EMPTY_TUPLE + NEWOBJ,
        call("torch.distributed._mesh_layout", "_MeshLayout"),
    ],
    ids=["nothing", "number", "dict", "class", "new", "new of nothing", "mesh"],
)
def test_what_torch_allows_by_itself_raises_our_errors(attack):
    with pytest.raises(HoldfastError):
        load(zipped(attack))


JAGGED = """
import io, pickle, sys, torch, torch._dynamo
from tests.support import nested_allowed, torch_bytes
from tests.torch.serialization.zip_storages import load
nested_allowed().__enter__()
value = torch.nested.nested_tensor([torch.ones(2, 3), torch.zeros(1, 3)], layout=torch.jagged)
ours = load(torch_bytes(value))
assert type(ours) is type(value) and [t.tolist() for t in ours.unbind()] == [t.tolist() for t in value.unbind()]
value._offsets[-1] = 4
try:
    load(torch_bytes(value))
except (RuntimeError, pickle.UnpicklingError) as error:
    assert "reaches past its values" in str(error), error
else:
    sys.exit("a jagged tensor that lies was loaded")
"""


def test_jagged_tensors():
    """In a process of its own: importing torch._dynamo changes what is allowed, for good."""
    done = run_code(JAGGED)
    assert done.returncode == 0, done.stderr


PLACEMENT = """
import sys, torch, torch.distributed.tensor
from torch.distributed.tensor import Replicate, Shard
from holdfast.errors import PickleError
from tests.hostile.craft_pickle import BUILD, EMPTY_TUPLE, NEWOBJ, dict_of, integer, list_of, named, stream, text, tuple_of, REDUCE
from tests.hostile.craft_torch import torch_zip
from tests.support import torch_bytes
from tests.torch.serialization.zip_storages import load
where = "torch.distributed.tensor.placement_types"
made = named(where, "Shard") + EMPTY_TUPLE + NEWOBJ
assert load(torch_bytes([Shard(1), Replicate()])) == [Shard(1), Replicate()]
built = made + dict_of(text("dim"), integer(1)) + BUILD
for attack in (made, tuple_of(made, built), named(where, "Shard") + tuple_of(made) + REDUCE):
    try:
        load(torch_zip(stream(attack)))
    except PickleError as error:
        assert "Object created by NEWOBJ was not initialized by BUILD" in str(error), error
    else:
        sys.exit(f"an object whose memory holds anything was given back: {attack}")
"""


@needs(versions.PLACEMENTS_IN_C)
def test_objects_of_cplusplus_have_a_state_when_they_are_given_back():
    """torch 2.15 refuses them too. In a process of its own, since torch.distributed.tensor allows its classes for good."""
    done = run_code(PLACEMENT)
    assert done.returncode == 0, done.stderr
