"""Hostile pickles in a `weights_only` load: refused with an error that says so, or loaded as what they are; never anything else."""

from __future__ import annotations

import contextlib
import pickle
import random
import time
import warnings

import pytest
import torch

import holdfast
from holdfast.core.limits import Limits
from holdfast.core.tensor import Composite, LazyTensor
from holdfast.core.tree import iterate_values
from holdfast.errors import HoldfastError, LimitExceeded, MetadataError, PickleError
from holdfast.torch.serialization.allowed import default_globals
from tests.hostile.craft_pickle import (
    APPENDS,
    BUILD,
    EMPTY_DICT,
    EMPTY_LIST,
    EMPTY_TUPLE,
    FALSE,
    MARK,
    NEWOBJ,
    NONE,
    POP,
    REDUCE,
    SETITEM,
    TRUE,
    TUPLE,
    call,
    dict_of,
    get,
    integer,
    list_of,
    named,
    number,
    put,
    real,
    stream,
    text,
    tuple_of,
)
from tests.hostile.craft_torch import storage, tensor, torch_zip, weight
from tests.support import torch_bytes
from tests.torch.serialization.zip_storages import ZipStorages, load

HOOKS = FALSE + call("collections", "OrderedDict")
V3 = {"function": "_rebuild_tensor_v3"}


def ints(*values: int) -> bytes:
    return tuple_of(*map(integer, values))


def refused(
    *parts: bytes, storages: dict[str, bytes] | None = None, limits: Limits | None = None
) -> HoldfastError:
    raw = torch_zip(stream(*parts), storages)
    with pytest.raises(HoldfastError) as caught:
        load(raw, limits=limits)
    assert isinstance(caught.value, pickle.UnpicklingError)
    described(raw, limits)
    return caught.value


def described(raw: bytes, limits: Limits | None = None) -> None:
    """The same case for the builder of lazy tensors: refused as well, or described; what is described is read, or refused then."""
    with contextlib.suppress(HoldfastError), holdfast.open(raw, limits=limits) as ckpt:
        for value in (*ckpt.values(), *iterate_values(ckpt.tree)):
            if isinstance(value, LazyTensor | Composite):
                with contextlib.suppress(HoldfastError):
                    value.torch()


# Honest pickles with a few bytes changed.


def damaged(pickled: bytes, dice: random.Random) -> bytes:
    made = bytearray(pickled)
    for _ in range(dice.choice([1, 1, 2, 3])):
        at, other = dice.randrange(len(made)), dice.randrange(len(made))
        match dice.randrange(4):
            case 0:
                made[at] = dice.randrange(256)
            case 1:
                made[at] ^= 1 << dice.randrange(8)
            case 2:
                del made[at : at + dice.randrange(1, 8)]
            case _:
                made[at:at] = made[other : other + dice.randrange(1, 20)]
        made = made or bytearray(b".")
    return bytes(made)


@pytest.mark.parametrize("seed", range(4))
def test_damaged_pickles(seed):
    dice = random.Random(seed)
    dense, tagged = torch.tensor([[0, 1.0, 0, 2], [0, 0, 3, 0]]), torch.arange(6.0)
    tagged.note = "x"
    scales, zeros = torch.tensor([0.1, 0.2], dtype=torch.float64), torch.tensor([0, 1])
    values = [
        dense.to_sparse(),
        dense.to_sparse_csr(),
        dense.to_sparse_bsr((1, 2)),
        tagged,
        torch.nn.Parameter(tagged),
        torch.quantize_per_tensor(dense, 0.1, 0, torch.quint8),
        torch.quantize_per_channel(dense, scales, zeros, 0, torch.qint8),
        torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(1, 3)]),
        torch.ones(2, dtype=torch.uint16),
        torch.tensor([1j]).conj(),
        torch.empty(2, device="meta"),
        torch.nn.Linear(2, 2).state_dict(),
        {"a": [1, 2.5, None, b"xy", {1, 2}, 1j, bytearray(b"q")]},
    ]
    files = [
        torch_bytes(value, pickle_protocol=protocol) for value in values for protocol in (2, 4)
    ]
    refusals = 0
    for _ in range(500):
        storages = ZipStorages(dice.choice(files))
        storages.pickle = damaged(storages.pickle, dice)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                load(b"", storages=storages)
            except (HoldfastError, pickle.UnpicklingError):
                refusals += 1
    assert refusals > 400


# Claims about plain tensors.


@pytest.mark.parametrize(
    ("size", "stride", "offset"),
    [
        ((5,), (1,), 0),
        ((4,), (1,), 1),
        ((2, 2), (4, 1), 0),
        ((2,), (2**61,), 0),
        ((-1,), (1,), 0),
        ((2,), (-1,), 1),
        ((1,), (1,), -1),
        ((2, 2), (1,), 0),
        ((2**40, 2**40), (0, 0), 0),
        ((2**63,), (0,), 0),
        ((2**62, 0), (1, 1), 0),
        ((1,) * 65, (1,) * 65, 0),
        ((1,), (1,), 2**63),
        ((0,), (1,), 2**63),
    ],
    ids=str,
)
@pytest.mark.parametrize("how", ["v2", "v3", "v1", "build"])
def test_geometry(size, stride, offset, how):
    match how:
        case "v2":
            attack = tensor(storage(), size, stride, offset=offset)
        case "v3":
            untyped = storage(kind=named("torch.storage", "UntypedStorage"), count=16)
            attack = tensor(
                untyped, size, stride, offset=offset, more=HOOKS + named("torch", "int32"), **V3
            )
        case "v1":
            attack = tensor(
                storage(), size, stride, offset=offset, more=b"", function="_rebuild_tensor"
            )
        case _:
            built = tuple_of(storage(), integer(offset), ints(*size), ints(*stride))
            attack = named("torch", "FloatTensor") + EMPTY_TUPLE + NEWOBJ + built + BUILD
    assert isinstance(refused(attack), MetadataError | LimitExceeded)


@pytest.mark.parametrize(
    "attack",
    [
        tensor(storage(), tuple_of(TRUE, integer(2)), ints(2, 1)),
        tensor(storage(), ints(2, 2), tuple_of(TRUE, TRUE)),
        tensor(storage(), offset=FALSE),
        tensor(storage(), tuple_of(real(2.0)), ints(1)),
        tensor(storage(), text("22"), ints(2, 1)),
        tensor(storage(), weight(), ints(2, 1)),
        tensor(storage(), NONE, NONE),
        tensor(weight()),
        tensor(text("0")),
        tensor(named("torch", "FloatStorage")),
        tensor(storage(), more=integer(0) + NONE),
        tensor(storage(), more=text("") + NONE),
        tensor(storage(), more=b""),
        tensor(storage(), more=HOOKS + NONE + NONE + NONE),
        tensor(storage(), more=HOOKS + list_of()),
        tensor(storage(), more=HOOKS + dict_of(text("conj"), TRUE)),
        tensor(storage(kind="IntStorage"), more=HOOKS + dict_of(text("neg"), TRUE)),
        tensor(storage(kind="IntStorage"), more=TRUE + NONE),
        tensor(storage(kind="QInt8Storage", count=16)),
        tensor(storage(), more=HOOKS + text("float32"), **V3),
        tensor(storage(), more=HOOKS + named("torch", "qint8"), **V3),
        tensor(storage(), (4,), (1,), more=HOOKS + named("torch", "complex128"), **V3),
        tensor(storage(kind=named("torch.storage", "TypedStorage"))),
        tensor(storage(kind=named("torch", "Tensor"))),
        tensor(storage(count=5)),
        tensor(storage(key="7")),
        tensor(storage(tag=weight())),
        tensor(storage(key=weight())),
        tensor(storage(kind=weight())),
        tensor(storage(kind=list_of())),
        tensor(storage(location=weight())),
        tensor(storage(count=TRUE)),
        tensor(storage()) + tuple_of(storage(), integer(0), ints(4), ints(1)) + BUILD,
        tensor(storage()) + dict_of(text("data"), weight()) + BUILD,
    ],
)
def test_arguments_of_other_kinds(attack):
    refused(attack)


@pytest.mark.parametrize(
    ("size", "stride"),
    [((10**9,), (0,)), ((2**31, 2**30), (0, 0)), ((1, 4), (2**54, 1)), ((0, 3), (1, 1)), ((), ())],
)
def test_views_that_only_look_odd(size, stride):
    """They allocate nothing and reach nothing; torch has written such."""
    made = load(torch_zip(stream(tensor(storage(), size, stride))))
    assert tuple(made.shape) == size
    assert made.untyped_storage().nbytes() == 16


def test_a_storage_is_never_enlarged():
    """torch's `set_` would, with whatever was in memory."""
    assert "element 4 of a storage that holds 4" in str(refused(tensor(storage(), (5,), (1,))))


# Constructors that allocate.


@pytest.mark.parametrize("how", [REDUCE, NEWOBJ], ids=["reduce", "newobj"])
@pytest.mark.parametrize("arg", [integer(2**31), integer(3), TRUE], ids=["much", "little", "true"])
def test_no_class_takes_a_size(arg, how):
    for full, value in default_globals().items():
        if isinstance(value, type):
            module, _, name = full.rpartition(".")
            refused(named(module, name) + tuple_of(arg) + how)


@pytest.mark.parametrize(
    "args",
    [
        (),
        (NONE,),
        (integer(7),),
        (text("x"),),
        (weight(),),
        (storage(),),
        (NONE,) * 4,
        (integer(1),) * 7,
        (weight(),) * 2,
    ],
    ids=["none", "None", "number", "text", "tensor", "storage", "four", "seven", "two"],
)
@pytest.mark.parametrize("how", [REDUCE, NEWOBJ], ids=["reduce", "newobj"])
def test_every_name_called_with_nonsense(args, how):
    for full in default_globals():
        module, _, name = full.rpartition(".")
        with contextlib.suppress(HoldfastError):
            load(torch_zip(stream(named(module, name) + tuple_of(*args) + how)))


@pytest.mark.parametrize(
    "attack",
    [
        call("_codecs", "encode", text("x"), text("rot13")),
        call("_codecs", "encode", text("x"), text("zlib")),
        call("_codecs", "encode", text("€"), text("latin1")),
        call("builtins", "complex", text("1e9")),
        call("torch", "device", text("nowhere")),
        call("torch", "device", text("cuda"), number(10**30, 13)),
        call("torch", "device", integer(0)),
        call("torch", "Size", list_of(integer(-1))),
        call("torch", "Size", list_of(TRUE)),
        call("torch.serialization", "_get_layout", text("torch.float32")),
        call("torch.serialization", "_get_layout", list_of()),
        call("collections", "OrderedDict") + dict_of(text("items"), integer(1)) + BUILD,
        call("collections", "OrderedDict") + dict_of(text("__class__"), integer(1)) + BUILD,
        call("collections", "OrderedDict") + dict_of(integer(1), integer(1)) + BUILD,
        call("collections", "OrderedDict") + integer(1) + BUILD,
        call("collections", "Counter") + dict_of(text("a"), integer(1)) + BUILD,
        call("collections", "OrderedDict") + list_of() + integer(1) + SETITEM,
        weight() + integer(0) + integer(1) + SETITEM,
        named("collections", "OrderedDict") + text("a") + integer(1) + SETITEM,
        call("builtins", "set") + MARK + integer(1) + APPENDS,
    ],
)
def test_plain_values(attack):
    refused(attack)


# Tensors made of tensors.

LONGS = b"".join(v.to_bytes(8, "little", signed=True) for v in (0, 1, 2, 3, 4, 100, -1, 2**62))
LONG = {"key": "1", "kind": "LongStorage", "count": 8}


def longs(size: tuple[int, ...], stride: tuple[int, ...], offset: int = 0) -> bytes:
    """Elements 0, 1, 2, 3, 4, 100, -1, 2**62."""
    return tensor(storage(**LONG), size, stride, offset=offset)


def floats(*size: int) -> bytes:
    return tensor(storage(), size, tuple(1 for _ in size))


def layout(name: str) -> bytes:
    return call("torch.serialization", "_get_layout", text(f"torch.{name}"))


def sparse(kind: str, *data: bytes) -> bytes:
    return call("torch._utils", "_rebuild_sparse_tensor", layout(kind), tuple_of(*data))


def size(*lengths: int) -> bytes:
    return call("torch", "Size", ints(*lengths))


STORAGES = {"0": bytes(16), "1": LONGS, "2": bytes(64)}

SPARSE = {
    "index past the size": sparse("sparse_coo", longs((1, 2), (8, 1), 4), floats(2), size(100)),
    "index negative": sparse("sparse_coo", longs((1, 2), (8, 1), 5), floats(2), size(101)),
    "index huge": sparse("sparse_coo", longs((1, 1), (8, 1), 7), floats(1), size(100)),
    "not coalesced": sparse("sparse_coo", longs((1, 2), (8, 0), 1), floats(2), size(4), TRUE),
    "other count": sparse("sparse_coo", longs((1, 2), (8, 1)), floats(3), size(4)),
    "other rank": sparse("sparse_coo", longs((2, 2), (4, 1)), floats(2), size(4)),
    "values of a shape": sparse("sparse_coo", longs((1, 2), (8, 1)), floats(2, 2), size(4)),
    "float indices": sparse("sparse_coo", floats(1, 2), floats(2), size(4)),
    "no size": sparse("sparse_coo", longs((1, 2), (8, 1)), floats(2)),
    "negative size": sparse("sparse_coo", longs((1, 2), (8, 1)), floats(2), ints(-4)),
    "huge size": sparse("sparse_coo", longs((2, 2), (4, 1)), floats(2), ints(2**40, 2**40)),
    "flag is a number": sparse("sparse_coo", longs((1, 2), (8, 1)), floats(2), size(4), integer(1)),
    "repeated index": sparse("sparse_coo", longs((1, 10**9), (0, 0)), floats(2), size(4)),
    "sparse values": sparse(
        "sparse_coo",
        longs((1, 2), (8, 1)),
        sparse("sparse_coo", longs((1, 2), (8, 1)), floats(2), size(4)),
        size(4),
    ),
    "strided": sparse("strided", longs((1, 2), (8, 1)), floats(2), size(4)),
    "csr start": sparse(
        "sparse_csr", longs((3,), (1,), 1), longs((3,), (1,)), floats(3), size(2, 4)
    ),
    "csr end": sparse("sparse_csr", longs((3,), (1,)), longs((3,), (1,)), floats(3), size(2, 4)),
    "csr column": sparse(
        "sparse_csr", longs((3,), (1,)), longs((2,), (1,), 4), floats(2), size(2, 8)
    ),
    "csr count": sparse("sparse_csr", longs((3,), (1,)), longs((2,), (1,)), floats(3), size(2, 4)),
    "csr not tensors": sparse("sparse_csr", NONE, NONE, NONE, size(2, 4)),
    "bsr of one dimension": sparse(
        "sparse_bsr", longs((3,), (1,)), longs((2,), (1,)), floats(2), size(2, 4)
    ),
    "old class": call(
        "torch.sparse", "FloatTensor", longs((1, 2), (8, 1), 4), floats(2), size(100)
    ),
    "old class of another dtype": call(
        "torch.sparse", "HalfTensor", longs((1, 2), (8, 1)), floats(2), size(4)
    ),
}


@pytest.mark.parametrize("name", SPARSE)
def test_sparse(name):
    refused(SPARSE[name], storages=STORAGES)


def test_sparse_errors_are_torchs_runtime_errors():
    for name, said in [
        ("index past the size", "size is inconsistent with indices"),
        ("csr start", r"`crow_indices[..., 0] == 0` is not satisfied."),
    ]:
        error = refused(SPARSE[name], storages=STORAGES)
        assert isinstance(error, RuntimeError)
        assert said in str(error)


def test_looking_at_one_tensor_over_and_over_is_bounded(monkeypatch):
    monkeypatch.setattr("holdfast.torch.serialization.rebuild.INSPECTED_NBYTES", 1000)
    one = sparse("sparse_coo", longs((1, 2), (8, 1)), floats(2), size(4))
    load(torch_zip(stream(list_of(*[one] * 30)), STORAGES))
    assert isinstance(refused(list_of(*[one] * 50), storages=STORAGES), LimitExceeded)


def quantized(
    *quantizer: bytes,
    source: bytes | None = None,
    shape: tuple[int, ...] = (4,),
    stride: tuple[int, ...] = (1,),
) -> bytes:
    source = source or storage(kind="QInt8Storage", key="2", count=64)
    return tensor(
        source, shape, stride, function="_rebuild_qtensor", more=tuple_of(*quantizer) + HOOKS
    )


AFFINE, CHANNEL = named("torch", "per_tensor_affine"), named("torch", "per_channel_affine")
DOUBLES = tensor(storage(kind="DoubleStorage", key="2", count=8), (4,), (1,))

QUANTIZED = {
    "no quantiser": quantized(),
    "no scheme": quantized(text("per_tensor_affine"), real(0.1), integer(0)),
    "symmetric": quantized(named("torch", "per_tensor_symmetric"), real(0.1), integer(0)),
    "scale is text": quantized(AFFINE, text("0.1"), integer(0)),
    "zero is a bool": quantized(AFFINE, real(0.1), TRUE),
    "zero is huge": quantized(AFFINE, real(0.1), integer(2**70)),
    "too few": quantized(AFFINE, real(0.1)),
    "reaches beyond": quantized(AFFINE, real(0.1), integer(0), shape=(65,)),
    "floats": quantized(AFFINE, real(0.1), integer(0), source=storage()),
    "packed beyond": quantized(
        AFFINE,
        real(0.1),
        integer(0),
        source=storage(kind="QUInt4x2Storage", key="2", count=64),
        shape=(129,),
    ),
    "packed rows": quantized(
        AFFINE,
        real(0.1),
        integer(0),
        source=storage(kind="QUInt4x2Storage", key="2", count=64),
        shape=(128, 1),
        stride=(1, 1),
    ),
    "axis": quantized(CHANNEL, DOUBLES, longs((4,), (1,)), integer(1)),
    "axis is a bool": quantized(CHANNEL, DOUBLES, longs((4,), (1,)), FALSE),
    "scales of another length": quantized(CHANNEL, DOUBLES, longs((3,), (1,)), integer(0)),
    "scales that are no tensors": quantized(
        CHANNEL, list_of(real(0.1)), list_of(integer(0)), integer(0)
    ),
    "a scale repeated": quantized(
        CHANNEL,
        tensor(storage(), (10**9,), (0,)),
        longs((10**9,), (0,)),
        integer(0),
        shape=(10**9,),
        stride=(0,),
    ),
}


@pytest.mark.parametrize("name", QUANTIZED)
def test_quantized(name):
    refused(QUANTIZED[name], storages={**STORAGES, "1": LONGS, "2": bytes(64)})


def test_quantized_over_many_allocates_nothing():
    """A per-channel tensor of 10**12 elements over one: the size is a claim, and no memory."""
    attack = quantized(
        CHANNEL, DOUBLES, longs((4,), (1,)), integer(0), shape=(4, 10**6, 10**6), stride=(1, 0, 0)
    )
    made = load(torch_zip(stream(attack), {**STORAGES, "2": bytes(64)}))
    assert made.numel() == 4 * 10**12


def nested_of(*parts: bytes) -> bytes:
    return call("torch._utils", "_rebuild_nested_tensor", *parts)


NESTED = {
    "offset past the buffer": nested_of(
        floats(4), longs((1, 1), (1, 1), 1), longs((1, 1), (1, 1), 1), longs((1,), (1,), 5)
    ),
    "offset negative": nested_of(
        floats(4), longs((1, 1), (1, 1), 1), longs((1, 1), (1, 1), 1), longs((1,), (1,), 6)
    ),
    "size past the buffer": nested_of(
        floats(4), longs((1, 1), (1, 1), 5), longs((1, 1), (1, 1), 1), longs((1,), (1,))
    ),
    "stride huge": nested_of(
        floats(4), longs((1, 1), (1, 1), 2), longs((1, 1), (1, 1), 7), longs((1,), (1,))
    ),
    "size negative": nested_of(
        floats(4), longs((1, 1), (1, 1), 6), longs((1, 1), (1, 1), 1), longs((1,), (1,))
    ),
    "other counts": nested_of(
        floats(4), longs((2, 1), (1, 1)), longs((1, 1), (1, 1)), longs((1,), (1,))
    ),
    "flat": nested_of(floats(4), longs((1,), (1,)), longs((1,), (1,)), longs((1,), (1,))),
    "float sizes": nested_of(floats(4), floats(1, 1), floats(1, 1), longs((1,), (1,))),
    "no tensors": nested_of(NONE, NONE, NONE, NONE),
    "rows repeated": nested_of(
        floats(4), longs((10**9, 1), (0, 0), 1), longs((10**9, 1), (0, 0), 1), longs((10**9,), (0,))
    ),
}


@pytest.mark.parametrize("name", NESTED)
def test_nested(name):
    refused(NESTED[name], storages=STORAGES)


@pytest.mark.parametrize("name", [*NESTED][:5])
def test_nested_from_lazy_parts(name):
    """torch trusts them, and would give back a tensor over memory behind the buffer."""
    with (
        holdfast.open(torch_zip(stream(NESTED[name]), STORAGES)) as ckpt,
        pytest.raises(MetadataError),
    ):
        ckpt.tree.torch()


WRAPPER = [
    named("torch", "float32"),
    ints(2, 2),
    ints(2, 1),
    integer(0),
    layout("strided"),
    call("torch", "device", text("cpu")),
    FALSE,
]
META = "_rebuild_meta_tensor_no_storage"
PARAMETER = named("torch.nn.parameter", "Parameter")

OTHERS = {
    "wrapper of Tensor": call(
        "torch._utils", "_rebuild_wrapper_subclass", named("torch", "Tensor"), *WRAPPER
    ),
    "wrapper of a set": call(
        "torch._utils", "_rebuild_wrapper_subclass", named("builtins", "set"), *WRAPPER
    ),
    "wrapper of nothing": call("torch._utils", "_rebuild_wrapper_subclass", NONE, *WRAPPER),
    "type of itself": call(
        "torch._tensor",
        "_rebuild_from_type_v2",
        named("torch._tensor", "_rebuild_from_type_v2"),
        named("torch", "Tensor"),
        EMPTY_TUPLE,
        NONE,
    ),
    "type of a container": call(
        "torch._tensor",
        "_rebuild_from_type_v2",
        named("collections", "OrderedDict"),
        named("torch", "Tensor"),
        EMPTY_TUPLE,
        NONE,
    ),
    "type that is no tensor": call(
        "torch._tensor",
        "_rebuild_from_type_v2",
        named("collections", "OrderedDict"),
        named("collections", "OrderedDict"),
        EMPTY_TUPLE,
        NONE,
    ),
    "type of a tensor class": call(
        "torch._tensor",
        "_rebuild_from_type_v2",
        named("torch", "FloatTensor"),
        named("torch", "FloatTensor"),
        EMPTY_TUPLE,
        NONE,
    ),
    "type with a list": call(
        "torch._tensor",
        "_rebuild_from_type_v2",
        named("torch", "FloatTensor"),
        named("torch", "Tensor"),
        EMPTY_LIST,
        NONE,
    ),
    "type with state of three": call(
        "torch._tensor",
        "_rebuild_from_type_v2",
        named("torch", "FloatTensor"),
        named("torch", "Tensor"),
        EMPTY_TUPLE,
        ints(1, 2, 3),
    ),
    "type with state by numbers": call(
        "torch._tensor",
        "_rebuild_from_type_v2",
        named("torch", "FloatTensor"),
        named("torch", "Tensor"),
        EMPTY_TUPLE,
        dict_of(integer(1), NONE),
    ),
    "meta huge": call(
        "torch._utils", META, named("torch", "float32"), ints(2**40, 2**40), ints(1, 1), FALSE
    ),
    "meta negative": call(
        "torch._utils", META, named("torch", "float32"), ints(-1), ints(1), FALSE
    ),
    "meta without dtype": call("torch._utils", META, text("float32"), ints(1), ints(1), FALSE),
    "meta gradient of integers": call(
        "torch._utils", META, named("torch", "int32"), ints(1), ints(1), TRUE
    ),
    "parameter of text": call("torch._utils", "_rebuild_parameter", text("x"), FALSE, NONE),
    "parameter of integers": call(
        "torch._utils", "_rebuild_parameter", tensor(storage(kind="IntStorage")), TRUE, NONE
    ),
    "parameter without a flag": call(
        "torch._utils", "_rebuild_parameter", weight(), integer(1), NONE
    ),
    "parameter with state": call(
        "torch._utils",
        "_rebuild_parameter_with_state",
        weight(),
        TRUE,
        NONE,
        dict_of(text("data"), weight()),
    ),
    "parameter built from a storage": PARAMETER
    + EMPTY_TUPLE
    + NEWOBJ
    + tuple_of(storage(), integer(0), ints(2, 2), ints(2, 1))
    + BUILD,
    "parameter built from attributes": PARAMETER + EMPTY_TUPLE + NEWOBJ + EMPTY_DICT + BUILD,
    "device tensor of text": call(
        "torch._utils",
        "_rebuild_device_tensor_from_numpy",
        text("x"),
        named("torch", "float32"),
        text("cpu"),
        FALSE,
    ),
    "blank built as another dtype": named("torch", "DoubleTensor")
    + EMPTY_TUPLE
    + NEWOBJ
    + tuple_of(storage(), integer(0), ints(4), ints(1))
    + BUILD,
    "blank built twice": named("torch", "FloatTensor")
    + EMPTY_TUPLE
    + NEWOBJ
    + (tuple_of(storage(), integer(0), ints(4), ints(1)) + BUILD) * 2,
}


@pytest.mark.parametrize("name", OTHERS)
def test_others(name):
    assert isinstance(refused(OTHERS[name]), PickleError)


def test_a_device_that_is_not_there():
    """Not the file's fault: a Holdfast error and a RuntimeError, as in torch."""
    attack = call(
        "torch._utils",
        "_rebuild_device_tensor_from_cpu_tensor",
        weight(),
        named("torch", "float32"),
        text("cuda:0"),
        FALSE,
    )
    if not torch.cuda.is_available():
        with pytest.raises(HoldfastError, match="cuda") as caught:
            load(torch_zip(stream(attack)))
        assert isinstance(caught.value, RuntimeError)


# Cost.


def test_a_tensor_cannot_be_copied_for_little():
    """Ten thousand tensors over one storage are ten thousand views."""
    one = tensor(storage())
    begin = time.process_time()
    made = load(torch_zip(stream(EMPTY_LIST, MARK, one, put(0), *[get(0)] * 10_000, APPENDS)))
    assert all(t is made[0] for t in made)
    assert time.process_time() - begin < 1


@pytest.mark.parametrize(
    "again",
    [
        call("collections", "OrderedDict") + get(0) + BUILD,
        call("torch._utils", "_rebuild_parameter_with_state", weight(), FALSE, NONE, get(0)),
        call("torch", "Size", get(1)),
        call("builtins", "set", get(1)),
    ],
    ids=["build", "attributes", "size", "set"],
)
def test_copying_one_value_over_and_over(again):
    """A few bytes would copy what took a megabyte to write, each time."""
    names = dict_of(*[part for i in range(50_000) for part in (text(f"n{i}"), NONE)])
    large = [names, put(0), list_of(integer(1) * 50_000), put(1)]
    begin = time.process_time()
    assert "over and over" in str(refused(*large, list_of(*[again] * 3000)))
    assert time.process_time() - begin < 15, "150 million copies take minutes"


def test_hashing_tensors_is_by_identity():
    made = load(torch_zip(stream(dict_of(weight(), integer(1), weight(), integer(2)))))
    assert len(made) == 2


def test_a_deep_chain_of_attributes():
    """Fifty thousand tensors, each an attribute of the next: freed without overflowing the stack."""
    function, kind = named("torch._utils", "_rebuild_tensor_v2"), named("torch", "Tensor")
    args = weight().removeprefix(function).removesuffix(REDUCE)
    head = [
        named("torch._tensor", "_rebuild_from_type_v2"),
        put(0),
        function,
        put(1),
        kind,
        put(2),
        args,
        put(3),
        NONE,
        put(4),
    ]
    link = [
        get(0),
        MARK,
        get(1),
        get(2),
        get(3),
        EMPTY_DICT,
        text("x"),
        get(4),
        SETITEM,
        TUPLE,
        REDUCE,
        put(4),
        POP,
    ]
    made = load(torch_zip(stream(*head, POP * 5, b"".join(link) * 50_000, get(4))))
    depth = 0
    while made is not None:
        made, depth = made.x, depth + 1
    assert depth == 50_000
