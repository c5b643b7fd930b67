"""`holdfast.torch.save` against torch's own `save`: the same bytes, the same refusals, whatever stands in the state.

The pickle is also compared with that of CPython's own pickler, with torch's persistent ids.
"""

import copyreg
import io
import pickle
import weakref
from collections import OrderedDict, defaultdict
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import holdfast.torch as ht
from holdfast.core.runtime import gc_paused
from holdfast.torch.serialization import pickling
from tests.sampling import examples

DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.int64,
    torch.bool,
    torch.uint8,
    torch.complex64,
    torch.float8_e4m3fn,
    torch.uint16,
]
SHAPES = [(), (1,), (3,), (2, 3), (0,), (2, 0, 3), (1, 1, 1, 1, 2)]
TEXTS = st.sampled_from(
    ["cpu", "storage", "weight", "0", "7", "", "é\U0001f600", "a" * 300]
) | st.text(max_size=3)
NUMBERS = st.sampled_from([0, 255, 256, 65536, -1, 1 << 31, 1 << 62, -(1 << 63)])
PLAIN = st.none() | st.booleans() | NUMBERS | st.floats() | TEXTS


def made(kind, shape, how):
    tensor = torch.zeros(shape).to(kind)
    match how:
        case "parameter":
            return torch.nn.Parameter(tensor, requires_grad=kind.is_floating_point)
        case "wants a gradient" if kind.is_floating_point:
            return tensor.requires_grad_()
        case "transposed":
            return tensor.T if tensor.dim() == 2 else tensor
        case "a view":
            return torch.zeros((4, *shape)).to(kind)[1]
    return tensor


TENSORS = st.builds(
    made,
    st.sampled_from(DTYPES),
    st.sampled_from(SHAPES),
    st.sampled_from(["plain", "plain", "parameter", "wants a gradient", "transposed", "a view"]),
)


def ordered(items, metadata):
    made = OrderedDict(items)
    if metadata is not None:
        made._metadata = metadata
    return made


@st.composite
def states(draw):
    """Trees in which tensors, texts and containers come again, behind so many tensors that the numbers of the memo are long."""
    pool = draw(st.lists(TENSORS, min_size=1, max_size=5))
    pool += [tensor.detach() for tensor in pool]
    texts = draw(st.lists(TEXTS, min_size=1, max_size=4))
    shared = draw(st.lists(st.sampled_from(pool), max_size=3))
    leaf = st.sampled_from(pool) | TENSORS | PLAIN | st.sampled_from(texts) | st.just(shared)
    keys = st.sampled_from(texts) | TEXTS | NUMBERS
    tree = st.recursive(
        leaf,
        lambda inner: (
            st.lists(inner, max_size=5)
            | st.lists(inner, max_size=5).map(tuple)
            | st.dictionaries(keys, inner, max_size=6)
            | st.builds(
                ordered,
                st.dictionaries(keys, inner, max_size=4),
                st.none() | st.dictionaries(keys, inner, max_size=2),
            )
        ),
        max_leaves=25,
    )
    many = {
        f"t.{n}": pool[n % len(pool)].detach().clone()
        for n in range(draw(st.sampled_from([0, 12, 45])))
    }
    return {**many, "rest": draw(tree), "end": [t.clone() for t in pool[:2]]}


def outcome(save, state):
    buffer = io.BytesIO()
    try:
        save(state, buffer)
    except (RuntimeError, TypeError) as error:
        return type(error).__mro__[-3]
    return buffer.getvalue()


class Plain(pickle.Pickler):
    """CPython's pickler, with torch's persistent ids for storages on the CPU."""

    def __init__(self, file):
        super().__init__(file, protocol=2)
        self.keys = {}

    def persistent_id(self, obj):
        if not isinstance(obj, torch.storage.TypedStorage | torch.UntypedStorage):
            return None
        typed = isinstance(obj, torch.storage.TypedStorage)
        storage = obj._untyped_storage if typed else obj
        key, location = (
            self.keys.setdefault(storage._cdata, str(len(self.keys))),
            self.location(storage),
        )
        if not typed:
            return "storage", torch.UntypedStorage, key, location, storage.nbytes()
        return (
            "storage",
            getattr(torch, obj._pickle_storage_type()),
            key,
            location,
            storage.nbytes() // obj.dtype.itemsize,
        )

    def location(self, storage):
        return "cpu"


def assert_as_torch(state):
    written = outcome(ht.save, state)
    assert written == outcome(torch.save, state)
    if isinstance(written, bytes):
        ours, plain = (
            pickling.pickle_object(state, pickling.StorageIds(), pickle_module=pickle, protocol=2),
            io.BytesIO(),
        )
        Plain(plain).dump(state)
        assert ours == plain.getvalue()


@settings(max_examples=examples(80), deadline=None)
@given(states())
def test_states_are_pickled_as_torch_pickles(state):
    assert_as_torch(state)


class Holder:
    """An object with whatever in it."""

    def __init__(self, held):
        self.held = held


@settings(max_examples=examples(40), deadline=None)
@given(states())
def test_states_with_objects_are_pickled_as_torch_pickles(state):
    """Objects with tensors and storages in them stand between the tensors of the state."""
    made = {}
    for number, (key, value) in enumerate(state.items()):
        made[key] = value
        if number % 7 == 3 and isinstance(value, torch.Tensor):
            made[f"{key}, held"] = Holder([value, torch.ones(2), value.untyped_storage()])
    made["last"] = Holder(state)
    assert_as_torch(made)


class Odd(torch.Tensor):
    """A class of somebody's."""


def with_attribute(tensor):
    tensor.note = "mine"
    return tensor


def with_hook(tensor):
    tensor.register_hook(lambda grad: grad)
    return tensor


def inside_itself():
    made = []
    made.append(made)
    return made


def deep():
    made = []
    for _ in range(70):
        made = [made]
    return made


ODD = {
    "an attribute": lambda: with_attribute(torch.ones(2)),
    "a hook": lambda: with_hook(torch.ones(2, requires_grad=True)),
    "conjugate": lambda: torch.ones(2, dtype=torch.complex64).conj(),
    "negative": lambda: (torch.ones(2) + 1j).conj().imag,
    "a conjugate Parameter": lambda: torch.nn.Parameter(
        torch.ones(2, dtype=torch.complex64).conj()
    ),
    "a Parameter with an attribute": lambda: with_attribute(torch.nn.Parameter(torch.ones(2))),
    "two dtypes over one memory": lambda: [
        (a := np.ones(3), torch.from_numpy(a))[1],
        torch.from_numpy(a.view(np.int64)),
    ],
    "a sparse Parameter": lambda: torch.nn.Parameter(torch.eye(3).to_sparse()),
    "a Parameter of fp8": lambda: torch.nn.Parameter(
        torch.ones(2).to(torch.float8_e4m3fn), requires_grad=False
    ),
    "meta": lambda: torch.ones(2, device="meta"),
    "sparse": lambda: torch.eye(3).to_sparse(),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "of another layout": lambda: torch.eye(3).to_sparse_csr(),
    "opaque": lambda: torch.ones(2, 2).to_mkldnn(),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
    "a subclass": lambda: torch.ones(2).as_subclass(Odd),
    "a buffer": lambda: torch.nn.Buffer(torch.ones(2)),
    "two dtypes over one storage": lambda: [(a := torch.ones(2)), a.view(torch.int32)],
    "two storages over one memory": lambda: [
        (a := np.ones(3), torch.from_numpy(a))[1],
        torch.from_numpy(a),
    ],
    "an array": lambda: np.ones(3),
    "a size": lambda: torch.Size([2]),
    "a device": lambda: torch.device("cpu"),
    "a dtype": lambda: torch.float32,
    "bytes": lambda: b"abc",
    "a set": lambda: {1, 2},
    "a defaultdict": lambda: defaultdict(list, a=[1]),
    "an integer without end": lambda: 1 << 200,
    "a key that is a tuple": lambda: {(1, 2): 3},
    "a key that is a truth": lambda: {True: 3},
    "inside itself": inside_itself,
    "deep": deep,
    "a storage": lambda: torch.ones(3).untyped_storage(),
}


@pytest.mark.filterwarnings("ignore")
@settings(max_examples=examples(40), deadline=None)
@given(
    states(),
    st.lists(
        st.tuples(
            st.integers(0, 60), st.sampled_from(["an attribute", "a hook", "conjugate", "sparse"])
        ),
        max_size=6,
    ),
)
def test_odd_tensors_among_others_are_pickled_as_torch_pickles(state, odd):
    made = [*state.values()]
    for at, kind in odd:
        made.insert(at, ODD[kind]())
    assert_as_torch(made)


def many(count=60):
    return {f"t.{n}": torch.full((n % 3,), n) for n in range(count)}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("odd", sorted(ODD))
def test_what_is_odd_among_plain_tensors(odd):
    assert_as_torch(
        many(20) | {"odd": ODD[odd](), "after": torch.ones(2), "held": Holder([torch.ones(3)])}
    )


def test_hooks_that_are_not_saved_are_warned_of():
    state = many(20) | {"hooked": with_hook(torch.ones(2, requires_grad=True))}
    with pytest.warns(UserWarning, match="hook") as theirs:
        torch.save(state, io.BytesIO())
    with pytest.warns(UserWarning, match="hook") as ours:
        ht.save(state, io.BytesIO())
    assert [str(one.message) for one in ours] == [str(one.message) for one in theirs]


@pytest.mark.parametrize("count", [1, 16, 17, 999, 1000, 1001, 2000])
def test_batches(count):
    for state in (
        many(count),
        OrderedDict(many(count)),
        list(many(count).values()),
        dict(enumerate(many(count).values())),
    ):
        assert_as_torch(state)


def test_whoever_changes_how_tensors_are_pickled_is_asked():
    state = many()
    copyreg.pickle(torch.Tensor, lambda tensor: (int, (len(tensor),)))
    try:
        assert_as_torch(state)
    finally:
        del copyreg.dispatch_table[torch.Tensor]
    with mock.patch.object(torch.Tensor, "__reduce_ex__", lambda tensor, _: (int, (len(tensor),))):
        assert outcome(ht.save, state) == outcome(torch.save, state)
    seen = []

    class Watching(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with Watching():
        torch.save(state, io.BytesIO())
    theirs, seen = seen, []
    with Watching():
        ht.save(state, io.BytesIO())
    assert {*theirs} <= {*seen}


@pytest.mark.parametrize("count", [0, 60])
def test_no_tensor_is_kept(count):
    """The collector rests: what is kept by a cycle would stay."""
    tensor = torch.ones(3)
    held = weakref.ref(tensor)
    with gc_paused():
        ht.save(
            many(count) | {"a": tensor, "b": torch.nn.Parameter(torch.ones(2)), "c": [tensor]},
            io.BytesIO(),
        )
        del tensor
        assert held() is None
