"""Saving rows by columns against saving each as a lazy tensor of its own, the oracle: the same bytes, notes and refusals.

Each format has one writer, which takes a table. With every row odd, every tensor is described, compared with
all others and written by itself.
"""

import shutil
from collections import OrderedDict
from pathlib import Path
from unittest import mock

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import holdfast
from holdfast.core.limits import Limits
from holdfast.core.value import replace
from holdfast.engine.saves import SMALL_NBYTES
from holdfast.errors import HoldfastError
from holdfast.verbs import save
from holdfast.verbs.shared.state import (
    make_lazy_tree,
    replace_rows,
    replace_table,
    tabulate_state,
    tabulate_tree,
)
from tests.sampling import examples

FEW = 64

ARRAYS = [
    np.bool_,
    np.uint8,
    np.int16,
    ">i4",
    np.float32,
    np.float64,
    np.complex64,
    ml_dtypes.bfloat16,
    ml_dtypes.float8_e5m2,
]
TENSORS = [
    torch.bool,
    torch.uint8,
    torch.int64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.complex64,
]
NAMES = st.text(st.characters(codec="utf-8"), max_size=4)


def array_of(random, kind, shape):
    raw = np.frombuffer(
        random.bytes(int(np.prod(shape, dtype=int)) * kind.itemsize), np.uint8
    ).copy()
    made = np.empty(shape, kind)
    made[...] = (raw & 1 if kind == np.bool_ else raw).view(kind).reshape(shape)
    return made


@st.composite
def ordinary(draw):
    """More small arrays and tensors than are saved one by one, in any order of names, dtypes and shapes."""
    random = np.random.default_rng(draw(st.integers(0, 1 << 32)))
    seed = dict.fromkeys(draw(st.lists(NAMES, max_size=12)))
    names = [
        *seed,
        *(
            f"t.{n}"
            for n in draw(st.permutations(range(FEW - len(seed) + draw(st.integers(0, 3)))))
        ),
    ]
    kinds = draw(
        st.lists(st.sampled_from([*map(np.dtype, ARRAYS), *TENSORS]), min_size=1, max_size=5)
    )
    shapes = draw(st.lists(st.lists(st.integers(0, 3), max_size=3), min_size=1, max_size=7))
    state = {}
    for number, name in enumerate(names):
        kind, shape = kinds[number % len(kinds)], shapes[number % len(shapes)]
        if isinstance(kind, torch.dtype):
            state[name] = torch.from_numpy(array_of(random, np.dtype("f4"), shape)).to(kind).clone()
        else:
            state[name] = array_of(random, kind, shape)
    return state


PLAIN = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=3)
    | st.sampled_from([1 << 53, -(1 << 60), "\ud800", "v" * 70])
)
PARTS = st.text(st.characters(codec="utf-8"), max_size=3) | st.sampled_from(
    ["$", "$a", "a.b", "k" * 70]
)


@st.composite
def trees(draw):
    """The same in containers of all kinds, with values between them, names that meet, and tensors in two places."""
    waiting = list(draw(ordinary()).items())
    if draw(st.booleans()):
        waiting = [
            (name, torch.nn.Parameter(torch.tensor([1.5, n]), requires_grad=n % 2 > 0))
            for n, (name, _) in enumerate(waiting)
        ]

    def filled(depth, some):
        kind = draw(st.sampled_from([dict, dict, OrderedDict, OrderedDict, list, tuple]))
        cut = draw(st.integers(0, len(some))) if depth and draw(st.booleans()) else len(some)
        children = [(name, value) for name, value in some[:cut]]
        children += [(draw(PARTS), draw(PLAIN)) for _ in range(draw(st.sampled_from([0, 0, 0, 2])))]
        if cut < len(some):
            children.append((draw(PARTS), filled(depth - 1, some[cut:])))
        if draw(st.integers(0, 9)) == 0:
            children.append(("again", some[0][1]))
        if kind in (list, tuple):
            return kind([value for _, value in children])
        made = kind(
            {
                n if draw(st.integers(0, 30)) == 0 else key: value
                for n, (key, value) in enumerate(children)
            }
        )
        if kind is OrderedDict and draw(st.booleans()):
            made._metadata = OrderedDict(
                (key, {"version": draw(st.integers(0, 2))})
                for key in draw(st.lists(PARTS, max_size=3))
            )
            made._metadata.update(draw(st.dictionaries(PARTS, PLAIN, max_size=1)))
        return made

    return filled(3, waiting)


class Other(torch.Tensor):
    """A class of somebody's."""


def with_attribute(tensor):
    tensor.note = "mine"
    return tensor


ODD = {
    "tied": lambda state: state | {"one": (a := np.ones(3)), "other": a},
    "tied in turns": lambda state: (
        state | {"one": (a := np.ones(3)), "other": (b := np.ones(3)), "two": b, "three": a}
    ),
    "tied tensor": lambda state: state | {"one": (a := torch.ones(3)), "other": a.detach()},
    "view": lambda state: state | {"one": (a := np.ones(6)), "other": a[:3]},
    "part of a storage": lambda state: state | {"one": torch.ones(6)[2:]},
    "views of one buffer": lambda state: (
        state | dict(zip("ab", torch.ones(6).split(3), strict=True))
    ),
    "column order": lambda state: state | {"one": np.ones((2, 3), order="F")},
    "transposed": lambda state: state | {"one": torch.arange(6.0).reshape(2, 3).T},
    "expanded": lambda state: state | {"one": torch.ones(1).expand(9)},
    "a parameter": lambda state: state | {"one": torch.nn.Parameter(torch.ones(2))},
    "wants a gradient": lambda state: state | {"one": torch.ones(2, requires_grad=True)},
    "a subclass": lambda state: state | {"one": torch.ones(2).as_subclass(Other)},
    "an attribute": lambda state: state | {"one": with_attribute(torch.ones(2))},
    "conjugate": lambda state: state | {"one": torch.ones(2, dtype=torch.complex64).conj()},
    "negative": lambda state: state | {"one": (torch.ones(2) + 1j).conj().imag},
    "meta": lambda state: state | {"one": torch.ones(2, device="meta")},
    "sparse": lambda state: state | {"one": torch.eye(3).to_sparse()},
    "no such dtype": lambda state: state | {"one": np.ones(2, np.complex128)},
    "no dtype at all": lambda state: state | {"one": np.array(["a"])},
    "objects": lambda state: state | {"one": np.array([None])},
    "a number": lambda state: state | {"one": 1.5},
    "a scalar": lambda state: state | {"one": np.float32(1)},
    "a lazy tensor": lambda state: (
        state | {"one": holdfast.open(holdfast.to_bytes({"w": np.ones(3)}, "safetensors"))["w"]}
    ),
    "nested": lambda state: state | {"one": {"w": np.ones(2)}},
    "a key that is no text": lambda state: state | {7: np.ones(2)},
    "half a pair": lambda state: state | {"\ud800": np.ones(2)},
    "the name of the metadata": lambda state: state | {"__metadata__": np.ones(2)},
    "long": lambda state: state | {"one": np.ones(SMALL_NBYTES + 1, np.uint8)},
    "an array of a class": lambda state: state | {"one": np.ma.masked_array([1, 2])},
    "a mapped array": lambda state: state | {"one": np.frombuffer(b"abcdefgh", np.uint8)},
}


def outcome(state, path, **options):
    path.unlink(missing_ok=True) if path.is_file() else shutil.rmtree(path, ignore_errors=True)
    try:
        saved = holdfast.save(state, path, durable=False, **options)
    except HoldfastError as error:
        assert not path.exists()
        return type(error), str(error)
    files = sorted(path.iterdir()) if path.is_dir() else [path] if path.exists() else []
    return (
        [file.read_bytes() for file in files],
        saved.notes,
        saved.nbytes,
        saved.files,
        saved.format,
        saved.done,
        saved.crcs,
    )


PATHS = {"torch-zip": "a.pt", "safetensors": "a.safetensors", "native": "a"}
FORMATS = sorted(PATHS)


def by_lazy_tensors(state, **options):
    """The same state with a lazy tensor in the place of each, and no row that is read together with others."""
    made = tabulate_state(state, **options)
    lazy = tabulate_tree(make_lazy_tree(made), metadata=made.metadata)
    odd = {row: lazy.tensors.lazy_tensor(row) for row in range(len(lazy.tensors))}
    return replace(replace_table(lazy, replace_rows(lazy.tensors, odd)), notes=made.notes)


def assert_same(state, path, **options):
    with (
        mock.patch.object(save, "tabulate_state", by_lazy_tensors),
    ):
        slow = outcome(state, path, **options)
    assert outcome(state, path, **options) == slow
    return slow


def is_taken(state):
    """Whether all tensors are written by columns."""
    try:
        found = tabulate_state(state)
    except HoldfastError:
        return False
    return not found.tensors.irregular


@settings(max_examples=examples(60), deadline=None)
@given(
    ordinary(),
    st.sampled_from(FORMATS),
    st.just({}) | st.dictionaries(NAMES, NAMES, max_size=2),
    st.booleans(),
    st.none() | st.sampled_from(sorted(ODD)),
)
def test_rows_write_what_objects_write(tmp_path_factory, state, format, metadata, keep_tree, odd):
    path = Path(tmp_path_factory.mktemp("rows")) / PATHS[format]
    assert_same(
        state if odd is None else ODD[odd](state), path, metadata=metadata, keep_tree=keep_tree
    )


@settings(max_examples=examples(60), deadline=None)
@given(trees(), st.sampled_from(FORMATS), st.sampled_from([True, True, False]))
def test_rows_write_the_tree_that_objects_write(tmp_path_factory, state, format, keep_tree):
    path = Path(tmp_path_factory.mktemp("rows")) / PATHS[format]
    assert_same(state, path, keep_tree=keep_tree)


def plain(count=FEW):
    return {
        f"t.{n}": np.full(n % 5 + 1, n, "f4") if n % 2 else torch.full((2, n % 3 + 1), n)
        for n in range(count)
    }


LEFT = {"meta", "no dtype at all", "objects"}
"""What is no row of a storage, or is refused."""


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("odd", sorted(ODD))
def test_what_is_not_ordinary_is_taken_as_rows(tmp_path, odd, format):
    state = ODD[odd](plain())
    assert is_taken(state) == (odd not in LEFT)
    assert_same(state, tmp_path / PATHS[format])


def nested():
    model = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(FEW)))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    shared = [torch.ones(3)]
    own = {
        "parameters": dict(model.named_parameters()),
        "lists": [shared, shared, (1, 0.5, None, "text")],
    }
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "epoch": 3,
        "own": own,
    }


@pytest.mark.parametrize("format", FORMATS)
def test_a_model_and_its_optimizer(tmp_path, format):
    state = nested()
    # What stands in two places has a name for each.
    assert is_taken(state)
    assert_same(state, tmp_path / PATHS[format], keep_tree=True)
    state["own"]["lists"].pop()
    del state["own"]["lists"][0]
    assert is_taken(state)
    assert_same(state, tmp_path / PATHS[format], keep_tree=True)


@pytest.mark.parametrize("format", FORMATS)
def test_the_state_dict_of_a_module_is_taken_as_rows(tmp_path, format):
    """An OrderedDict with versions, and two weights that are one."""
    module = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(FEW)))
    module[1].weight = module[3].weight
    state = module.state_dict()
    assert tabulate_state(state).leaves is not None
    found = tabulate_state(state).tensors
    assert not found.irregular
    assert len({*found.storage_indices}) == len(found) - 1
    slow = assert_same(state, tmp_path / PATHS[format])
    assert ("1 tensor is tied to another one; the data is written once" in slow[1]) == (
        format != "torch-zip"
    )
    with holdfast.open(tmp_path / PATHS[format]) as ckpt:
        assert ckpt.tree._metadata == state._metadata


def test_names_that_are_longer_than_the_pickle_are_looked_at(tmp_path):
    key = "k" * 500
    state = {
        key: {key: {str(n): {key: {str(m): np.ones(1) for m in range(4)}} for n in range(FEW)}}
    }
    assert_same(state, tmp_path / "a.pt")


@pytest.mark.parametrize(
    "options",
    [
        {"limits": Limits(depth=0)}, {"max_shard_size": "1KB"}, {"format": "torch"}, {"dry_run": True}, {"read_back": True},
        {"max_memory": "64MB"}, {"metadata": {"a": "\ud800"}}, {"overwrite": False}, {"format": "nothing"}, {"hashes": True},
        {"sparse": "auto"},
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("format", FORMATS)
def test_options(tmp_path, options, format):
    assert_same(plain(), tmp_path / PATHS[format], **options)


@pytest.mark.parametrize("format", FORMATS)
def test_all_bytes_are_told(tmp_path, format):
    told = []
    saved = holdfast.save(plain(), tmp_path / PATHS[format], progress=told.append)
    assert sum(told) == saved.nbytes
