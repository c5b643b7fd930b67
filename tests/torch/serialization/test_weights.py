"""`WeightsTable` beside `torch.load(weights_only=True)`: the same objects from the same bytes, and no storage filled too early."""

from __future__ import annotations

import io
import math
import pickle
import struct
import warnings
from collections import Counter, OrderedDict

import numpy as np
import pytest
import torch
import torch._weights_only_unpickler as torchs
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.storage import TypedStorage

from holdfast.core.limits import Limits
from holdfast.formats.pickle.machine import interpret_whole
from holdfast.formats.torch.storages import parse_storage_id
from holdfast.torch import versions
from holdfast.torch.serialization.allowed import default_globals
from holdfast.torch.serialization.pickling import StorageClass
from holdfast.torch.serialization.storages import storage_dtype
from holdfast.torch.serialization.weights import WeightsTable
from holdfast.torch.tensors.from_lazy import torch_dtype
from tests.hostile.craft_pickle import (
    BUILD,
    EMPTY_TUPLE,
    FALSE,
    NEWOBJ,
    NONE,
    REDUCE,
    TRUE,
    call,
    integer,
    named,
    stream,
    text,
    tuple_of,
)
from tests.hostile.craft_torch import storage, tensor, torch_zip, weight
from tests.support import dtypes, nested_allowed, torch_bytes
from tests.torch.serialization.zip_storages import ZipStorages, load

DTYPES = [value for value in default_globals().values() if isinstance(value, torch.dtype)]
QUANTIZED = (torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4)
NARROW = dtypes(*(f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8)))
"""torch reads them and does not write them."""
SAVED = [d for d in DTYPES if d not in (*QUANTIZED, *NARROW)]


def torch_load(raw: bytes, **arguments: object) -> object:
    return torch.load(io.BytesIO(raw), weights_only=True, **arguments)


def assert_same(ours: object, theirs: object) -> None:
    """The same types, numbers, views, attributes, and the same sharing of storages and objects."""
    names: dict[tuple[str, int], object] = {}
    alive: list[object] = []
    """An identity stays what it is as long as its object is there."""

    def shared(kind: str, one: int, other: int) -> None:
        assert names.setdefault((kind, one), other) == other
        assert names.setdefault((kind + "'", other), one) == one

    def walk(a: object, b: object) -> None:
        alive.append((a, b))
        assert type(a) is type(b)
        if isinstance(a, torch.Tensor):
            shared("object", id(a), id(b))
            same_tensor(a, b)
            walk(vars(a), vars(b))
        elif isinstance(a, torch.storage.TypedStorage):
            assert a.dtype == b.dtype
            assert a._untyped_storage.tolist() == b._untyped_storage.tolist()
            shared("storage", a._untyped_storage._cdata, b._untyped_storage._cdata)
        elif isinstance(a, dict):
            shared("object", id(a), id(b))
            assert list(a) == list(b)
            for key in a:
                walk(a[key], b[key])
            walk(getattr(a, "__dict__", None), getattr(b, "__dict__", None))
        elif isinstance(a, list | tuple):
            assert len(a) == len(b)
            for one, other in zip(a, b, strict=True):
                walk(one, other)
        elif isinstance(a, float):
            assert struct.pack("d", a) == struct.pack("d", b)
        elif isinstance(a, np.ndarray):
            assert a.dtype == b.dtype
            assert np.array_equal(a, b)
        else:
            assert a == b

    def same_tensor(a: torch.Tensor, b: torch.Tensor) -> None:
        assert (a.dtype, a.layout, a.device, a.requires_grad, a.is_leaf) == (
            b.dtype,
            b.layout,
            b.device,
            b.requires_grad,
            b.is_leaf,
        )
        if a.is_nested:
            return walk(list(a.unbind()), list(b.unbind()))
        assert a.shape == b.shape
        if a.layout is torch.sparse_coo:
            assert a.is_coalesced() == b.is_coalesced()
            walk((a._indices(), a._values()), (b._indices(), b._values()))
        elif a.layout in (torch.sparse_csr, torch.sparse_bsr):
            walk(
                (a.crow_indices(), a.col_indices(), a.values()),
                (b.crow_indices(), b.col_indices(), b.values()),
            )
        elif a.layout in (torch.sparse_csc, torch.sparse_bsc):
            walk(
                (a.ccol_indices(), a.row_indices(), a.values()),
                (b.ccol_indices(), b.row_indices(), b.values()),
            )
        else:
            assert (a.stride(), a.storage_offset()) == (b.stride(), b.storage_offset())
            assert (a.is_conj(), a.is_neg(), a._is_view()) == (
                b.is_conj(),
                b.is_neg(),
                b._is_view(),
            )
            if not a.is_meta:
                assert a.untyped_storage().tolist() == b.untyped_storage().tolist()
                shared("storage", a.untyped_storage()._cdata, b.untyped_storage()._cdata)
            if a.is_quantized:
                assert a.qscheme() == b.qscheme()
                assert torch.equal(a.dequantize(), b.dequantize())
        return None

    walk(ours, theirs)


def parity(value: object, **arguments: object) -> object:
    raw = torch_bytes(value, **arguments)
    ours = load(raw)
    assert_same(ours, torch_load(raw))
    return ours


def element_bytes(dtype: torch.dtype, count: int = 6) -> torch.Tensor:
    width = dtype.itemsize * count
    raw = (
        torch.arange(width, dtype=torch.uint8)
        if dtype is not torch.bool
        else torch.tensor([0, 1] * 3, dtype=torch.uint8)
    )
    return torch.empty(0, dtype=dtype).set_(raw.untyped_storage(), 0, (2, 3), (3, 1))


# The names.


def test_the_names_are_torchs():
    ours, theirs = default_globals(), torchs._get_allowed_globals()
    assert set(ours) == set(theirs)
    assert len(ours) == 144 or versions.HERE != (2, 13)
    for name, value in ((name, ours[name]) for name in theirs):
        if isinstance(value, StorageClass):
            assert value.dtype == theirs[name].dtype
        else:
            assert value is theirs[name]


def test_every_name_loads_as_what_it_stands_for():
    for full, value in default_globals().items():
        module, _, name = full.rpartition(".")
        assert load(torch_zip(stream(named(module, name)))) is value


# Plain tensors.


@pytest.mark.parametrize("dtype", SAVED, ids=str)
def test_dtypes(dtype):
    made = element_bytes(dtype)
    parity({"a": made, "row": made[1], "turned": made.t(), "empty": made[:, :0]})


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_dtypes_that_torch_reads_and_does_not_write(dtype):
    name = str(dtype).removeprefix("torch.")
    more = FALSE + call("collections", "OrderedDict") + named("torch", name)
    untyped = storage(kind=named("torch.storage", "UntypedStorage"), count=16)
    raw = torch_zip(stream(tensor(untyped, (16,), (1,), more=more, function="_rebuild_tensor_v3")))
    assert_same(load(raw), torch_load(raw))


def test_views_share():
    base = torch.arange(24.0).reshape(2, 3, 4)
    value = OrderedDict(
        base=base, slice=base[1, 1:], step=base[..., ::2], turned=base.permute(2, 0, 1), again=base
    )
    value["expanded"] = base[:1, :1].expand(5, 3, 4)
    value["scalar"] = base[1, 2, 3]
    ours = parity(value)
    assert ours["again"] is ours["base"]
    ours["base"][1, 1, 0] = -1
    assert ours["slice"][0, 0] == -1


@pytest.mark.parametrize("grad", [False, True])
def test_requires_grad_and_parameters(grad):
    t = torch.randn(3, requires_grad=grad)
    parity(
        {"t": t, "p": torch.nn.Parameter(torch.randn(2, 2), requires_grad=grad), "nonleaf": (t * 2)}
    )


def test_attributes():
    t, p = torch.ones(2), torch.nn.Parameter(torch.ones(2))
    t.foo, p.bar, p.tag = "foo", [1, t], {"x": torch.zeros(1)}
    parity([t, p, torch.nn.Buffer(torch.ones(3), persistent=False)])


def test_conj_and_neg():
    t = torch.randn(3, dtype=torch.cfloat)
    parity([t, t.conj(), torch._neg_view(t), torch._neg_view(t.conj()), t.clone().conj().imag])


def test_a_state_dict_keeps_its_metadata():
    ours = parity(torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3)).state_dict())
    assert ours._metadata["1"] == {"version": 2}


def test_an_optimizer():
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    parity(
        {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "epoch": 3,
            "loss": math.nan,
        }
    )


def test_storages():
    t = torch.arange(4.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        parity({"t": t, "s": t.storage(), "u": torch.arange(3).untyped_storage()})


# Values that are no tensors.

PLAIN = {
    "numbers": [
        0,
        1,
        -1,
        255,
        256,
        65535,
        65536,
        2**31,
        -(2**31),
        2**63,
        -(2**63),
        2**100,
        1.5,
        -0.0,
        math.inf,
        True,
        None,
    ],
    "text": ["", "é", "\ud800", "x" * 300, "a\nb"],
    "bytes": [b"abc", bytes(range(256)), bytearray(b"x"), bytearray()],
    "containers": [
        (),
        (1,),
        (1, 2),
        (1, 2, 3),
        (1, 2, 3, 4),
        [],
        [1],
        {},
        {1: 2},
        set(),
        {1, "a", (1, 2)},
        OrderedDict(a=1),
    ],
    "counter": Counter("abca"),
    "complex": 1 - 2j,
    "torch": [
        torch.Size([1, 2]),
        torch.device("cuda", 1),
        torch.device("cpu"),
        torch.float32,
        torch.sparse_csr,
        torch.strided,
    ],
    "qschemes": [torch.per_tensor_affine, torch.per_channel_affine_float_qparams],
}


@pytest.mark.parametrize("name", PLAIN)
def test_plain_values(name):
    parity(PLAIN[name])


def test_a_cycle():
    value: list[object] = [1]
    value.append(value)
    ours = load(torch_bytes(value))
    assert ours[1] is ours


def test_attributes_of_an_ordered_dict():
    value = OrderedDict(a=1)
    value.note, value._metadata = "kept", {"version": 1}
    parity(value)


# Tensors made of tensors.

DENSE = torch.tensor([[0, 1.0, 0, 2], [0, 0, 3, 0], [4, 0, 0, 0], [0, 5, 6, 0]])
COMPOSITES = {
    "coo": DENSE.to_sparse(),
    "coo not coalesced": torch.sparse_coo_tensor(
        torch.tensor([[0, 0], [1, 1]]), torch.ones(2), (2, 2)
    ),
    "coo hybrid": torch.randn(3, 2, 2).to_sparse(1),
    "coo empty": torch.zeros(3, 3).to_sparse(),
    "csr": DENSE.to_sparse_csr(),
    "csc": DENSE.to_sparse_csc(),
    "bsr": DENSE.to_sparse_bsr((2, 2)),
    "bsc": DENSE.to_sparse_bsc((2, 2)),
    "csr batch": torch.stack([DENSE, DENSE]).to_sparse_csr(),
    "quint8": torch.quantize_per_tensor(torch.randn(2, 3), 0.1, 3, torch.quint8),
    "qint32": torch.quantize_per_tensor(torch.randn(2, 3), 0.1, 0, torch.qint32),
    "per channel": torch.quantize_per_channel(
        torch.randn(2, 3),
        torch.tensor([0.1, 0.2], dtype=torch.float64),
        torch.tensor([0, 1]),
        0,
        torch.qint8,
    ),
    "per channel, last": torch.quantize_per_channel(
        torch.randn(2, 3),
        torch.ones(3, dtype=torch.float64),
        torch.tensor([0, 1, 2]),
        1,
        torch.quint8,
    ),
    "nested": torch.nested.nested_tensor([torch.randn(2, 3), torch.randn(1, 3)]),
    "nested of empty": torch.nested.nested_tensor([torch.randn(0), torch.randn(2)]),
    "meta": torch.empty(3, 4, device="meta").t(),
    "meta grad": torch.empty(3, device="meta", requires_grad=True),
}


@pytest.mark.parametrize("name", COMPOSITES)
def test_composites(name):
    with nested_allowed():
        parity(COMPOSITES[name])


@pytest.mark.parametrize("dtype", [torch.quint4x2, torch.quint2x4], ids=str)
def test_packed_types(dtype):
    value = torch.quantize_per_channel(
        torch.randn(3, 5), torch.tensor([0.1, 0.2, 0.3]), torch.tensor([0.0, 1.0, 2.0]), 0, dtype
    )
    raw = torch_bytes(value)
    ours, theirs = load(raw), torch_load(raw)
    assert ours.qscheme() == theirs.qscheme()
    assert torch.equal(ours.dequantize(), theirs.dequantize())
    assert ours.untyped_storage().nbytes() == value.untyped_storage().nbytes()


def test_a_slice_of_a_quantised_tensor():
    parity(torch.quantize_per_tensor(torch.randn(4, 3), 0.1, 3, torch.quint8)[1:, ::2])


def test_a_sparse_parameter_and_attributes():
    p = torch.nn.Parameter(DENSE.to_sparse())
    t = DENSE.to_sparse_csr()
    t.note = "kept"
    parity([p, t])


def test_old_sparse_files_have_no_flag():
    t = DENSE.to_sparse()

    class Old:
        def __reduce__(self):
            return torch._utils._rebuild_sparse_tensor, (
                t.layout,
                (t._indices(), t._values(), t.size()),
            )

    parity(Old())


# Old ways to write tensors.


class Reduced:
    def __init__(self, *reduced: object) -> None:
        self.reduced = reduced

    def __reduce__(self):
        return self.reduced


@pytest.mark.parametrize("name", ["Tensor", "FloatTensor", "DoubleTensor", "BoolTensor"])
def test_a_class_made_empty_and_built(name):
    kind = getattr(torch, name)
    t = (
        torch.arange(30)
        .to(kind.dtype if name != "Tensor" else torch.float32)
        .as_strided([2, 3], [9, 3], 2)
    )
    state = (t._typed_storage(), t.storage_offset(), tuple(t.size()), t.stride())
    raw = torch_bytes(
        [value := Reduced(kind, (), state), value, Reduced(torch._utils._rebuild_tensor, state)]
    )
    ours = load(raw)
    assert_same(ours, torch_load(raw))
    assert ours[0] is ours[1]


def test_a_tensor_class_made_empty_stays_empty():
    for how in (REDUCE, NEWOBJ):
        raw = torch_zip(stream(named("torch", "HalfTensor") + EMPTY_TUPLE + how))
        assert_same(load(raw), torch_load(raw))


@pytest.mark.parametrize(
    "state",
    [tuple_of(weight(), NONE, NONE, TRUE, FALSE), tuple_of(weight(), NONE, NONE, FALSE, FALSE)],
    ids=["grad", "no grad"],
)
def test_old_parameters(state):
    raw = torch_zip(
        stream(named("torch.nn.parameter", "Parameter") + EMPTY_TUPLE + NEWOBJ + state + BUILD)
    )
    assert_same(load(raw), torch_load(raw))
    raw = torch_zip(
        stream(
            named("torch.nn.parameter", "Parameter")
            + tuple_of(weight(), FALSE)
            + NEWOBJ
            + tuple_of(TRUE, FALSE, NONE)
            + BUILD
        )
    )
    assert_same(load(raw), torch_load(raw))


def test_old_sparse_classes():
    t = DENSE.to_sparse()
    ours = load(
        torch_bytes(Reduced(torch.sparse.FloatTensor, (t._indices(), t._values(), t.size())))
    )
    assert torch.equal(ours.to_dense(), DENSE)


@pytest.mark.parametrize("how", [REDUCE, NEWOBJ])
@pytest.mark.parametrize(
    ("module", "name", "args"),
    [
        ("torch", "Size", tuple_of(tuple_of(integer(3)))),
        ("collections", "OrderedDict", EMPTY_TUPLE),
        ("__builtin__", "set", EMPTY_TUPLE),
        ("torch", "device", tuple_of(text("cpu"))),
    ],
)
def test_classes_called_or_made(module, name, args, how):
    raw = torch_zip(stream(named(module, name) + args + how))
    assert_same(load(raw), torch_load(raw))


# Protocols and encodings.


@pytest.mark.parametrize("protocol", [0, 1, 3, 4, 5])
def test_other_protocols(protocol):
    value = {"b": b"\xff\x00", "s": {1, 2}, "n": [1, 2.5, None, "é", 2**70]}
    if protocol:  # a persistent id is text in protocol 0, which torch writes and nobody reads
        value |= {"w": torch.arange(4.0), "p": torch.nn.Parameter(torch.ones(2))}
    raw = torch_bytes(value, pickle_protocol=protocol)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        ours = load(raw)
    assert_same(ours, torch.load(io.BytesIO(raw), weights_only=False))
    said = [str(w.message) for w in seen if "Detected pickle protocol" in str(w.message)]
    # Protocols 0 and 1 have no PROTO.
    assert len(said) == (protocol > 2)
    assert all(
        f"protocol {protocol} in the checkpoint, which was not the default pickle protocol used by `torch.load` (2)"
        in s
        for s in said
    )


def test_python2_strings():
    raw = torch_zip(b"\x80\x02]q\x00(U\x03abcT\x03\x00\x00\x00\xc3\xa9zS'x'\ne.")
    assert load(raw) == ["abc", "éz", "x"]
    assert load(raw, encoding="latin1") == ["abc", "Ã©z", "x"]
    assert load(raw, encoding="bytes") == [b"abc", b"\xc3\xa9z", b"x"]
    with pytest.raises(pickle.UnpicklingError, match="not ascii"):
        load(raw, encoding="ascii")
    with pytest.raises(LookupError):
        load(raw, encoding="no such encoding")


def test_python2_storages():
    """With encoding='bytes' the texts of the persistent ids are bytes as well."""
    pid = b"(U\x07storage" + named("torch", "FloatStorage") + b"U\x010U\x03cpu" + integer(4) + b"tQ"
    raw = torch_zip(stream(tensor(pid)))
    for encoding in ("utf-8", "bytes", "latin1"):
        assert load(raw, encoding=encoding).tolist() == [[1, 2], [3, 4]]


# Storages that are not filled yet.


@pytest.mark.parametrize(
    "name", ["plain", "parameter", "attributes", "per tensor", "bare", "buffer"]
)
def test_what_needs_no_elements_does_not_wait_for_them(name):
    t = torch.arange(4.0)
    t2 = torch.arange(4.0)
    t2.note = t
    value = {
        "plain": [t, t[1:], t.conj()],
        "parameter": torch.nn.Parameter(t),
        "attributes": t2,
        "per tensor": torch.quantize_per_tensor(t, 0.5, 0, torch.qint8),
        "bare": t._typed_storage(),
        "buffer": torch.nn.Buffer(t),
    }[name]
    storages = ZipStorages(torch_bytes(value))
    interpret_whole(storages.pickle, WeightsTable(storages), limits=Limits())
    assert storages.fills == 0
    assert storages.waiting


@pytest.mark.parametrize("name", ["coo", "csr", "per channel", "nested"])
def test_what_needs_elements_waits_for_them(name):
    storages = ZipStorages(torch_bytes([torch.ones(3), COMPOSITES[name]]))
    with nested_allowed():
        interpret_whole(storages.pickle, WeightsTable(storages), limits=Limits())
    assert storages.fills >= 1
    assert not storages.waiting


# Where tensors go.


class MetaStorages(ZipStorages):
    """As `map_location='meta'`, or under a FakeTensorMode with the locations given."""

    fake: str | None = None

    def persistent(self, pid):
        name = parse_storage_id(pid, (5,), storage_dtype)
        storage = torch.UntypedStorage(name.nbytes, device="meta")
        if self.fake:
            storage._fake_device = torch.device(self.fake)
        return TypedStorage(wrap_storage=storage, dtype=torch_dtype(name.dtype), _internal=True)


@pytest.mark.parametrize("name", ["coo", "csr", "meta"])
def test_on_meta(name):
    raw = torch_bytes([torch.ones(3), torch.nn.Parameter(torch.ones(2)), COMPOSITES[name]])
    ours = load(raw, storages=MetaStorages(raw))
    if name != "meta" and versions.SPARSE_CHECKED:
        assert all(tensor.is_meta for tensor in ours)
        pytest.skip(versions.SPARSE_CHECKED.reason)
    theirs = torch_load(raw, map_location="meta")
    for a, b in zip(ours, theirs, strict=True):
        assert (type(a), a.device, a.shape, a.layout, a.dtype) == (
            type(b),
            b.device,
            b.shape,
            b.layout,
            b.dtype,
        )


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_fake_tensors(device):
    base = torch.arange(6.0).reshape(2, 3)
    state = {
        "a": base,
        "b": base.t(),
        "p": torch.nn.Parameter(base),
        "h": torch.ones(2, dtype=torch.uint16),
    }
    raw = torch_bytes(state | ({} if versions.SPARSE_CHECKED else {"s": base.to_sparse()}))
    storages = MetaStorages(raw)
    storages.fake = device
    with FakeTensorMode():
        ours = load(raw, storages=storages)
        theirs = torch_load(raw, map_location=device)
    for name in theirs:
        a, b = ours[name], theirs[name]
        assert type(a) is type(b) is FakeTensor
        assert (a.device, a.shape, a.dtype, a.layout, a.requires_grad) == (
            b.device,
            b.shape,
            b.dtype,
            b.layout,
            b.requires_grad,
        )
        assert isinstance(a, torch.nn.Parameter) == isinstance(b, torch.nn.Parameter)
    assert ours["a"].stride() == (3, 1)
    assert ours["b"].stride() == (1, 3)


def test_inference_mode():
    raw = torch_bytes(torch.ones(3))
    with torch.inference_mode():
        assert load(raw).is_inference() == torch_load(raw).is_inference()
    assert load(raw).is_inference() == torch_load(raw).is_inference()


def test_a_default_device_does_not_matter():
    raw = torch_bytes([torch.ones(3), DENSE.to_sparse(), DENSE.to_sparse_csr()])
    with torch.device("meta"):
        ours = load(raw)
    assert [t.device.type for t in ours] == ["cpu"] * 3


def test_device_tensors():
    value = Reduced(
        torch._utils._rebuild_device_tensor_from_cpu_tensor,
        (torch.ones(2), torch.float64, "cpu", True),
    )
    parity(value)
    torch.serialization._serialization_tls.map_location = {"cpu": "meta"}
    try:
        assert load(torch_bytes(value)).is_meta
    finally:
        torch.serialization._serialization_tls.map_location = None
