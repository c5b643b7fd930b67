"""What a tensor is beyond its elements, in every format: kept, noted, or refused with `CannotHold`."""

import pickle
import warnings
from collections import Counter, OrderedDict, defaultdict
from pathlib import PurePosixPath

import numpy as np
import pytest
import torch
from torch import nn

import holdfast
from holdfast.core.opaque import Global
from holdfast.errors import CannotHold
from holdfast.torch import save_sharded
from tests.support import nested_allowed

FORMATS = {"torch": "a.pt", "native": "a", "safetensors": "a.safetensors"}


def saved(tmp_path, state, format):
    return holdfast.save(
        state, tmp_path / FORMATS[format], keep_tree=True, durable=False
    ), tmp_path / FORMATS[format]


def rows():
    return [torch.arange(3.0), torch.arange(5.0) + 10]


def narrowed():
    return torch.nested.narrow(
        torch.arange(10.0).view(2, 5),
        1,
        torch.tensor([0, 1]),
        torch.tensor([2, 3]),
        layout=torch.jagged,
    )


NESTED = {
    "strided": lambda: torch.nested.nested_tensor(rows()),
    "strided view": lambda: torch.nested.nested_tensor(
        [torch.arange(6.0).view(2, 3), torch.ones(3, 3)]
    ).transpose(1, 2),
    "jagged": lambda: torch.nested.nested_tensor(rows(), layout=torch.jagged),
    "jagged with lengths": narrowed,
}


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("kind", NESTED)
@pytest.mark.filterwarnings("ignore")
def test_nested_tensors_are_kept(tmp_path, kind, format):
    tensor = NESTED[kind]()
    done, path = saved(tmp_path, {"n": tensor}, format)
    with holdfast.open(path) as ckpt:
        made = ckpt.tree["n"].torch()
    assert (made.is_nested, made.layout, done.notes) == (True, tensor.layout, ())
    for a, b in zip(made.unbind(), tensor.unbind(), strict=True):
        assert torch.equal(a, b)
    if format == "torch":
        with nested_allowed():
            loaded = torch.load(path, weights_only=True)["n"]
        for a, b in zip(loaded.unbind(), tensor.unbind(), strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("format", FORMATS)
def test_views_keep_requires_grad(tmp_path, format):
    weight = torch.arange(6.0, requires_grad=True)
    _, path = saved(
        tmp_path,
        {"w": weight, "view": weight[1:3], "twice": weight * 2, "plain": weight.detach()[2:]},
        format,
    )
    with holdfast.open(path) as ckpt:
        assert {name: ckpt[name].traits.requires_grad for name in ckpt} == {
            "w": True,
            "view": True,
            "twice": True,
            "plain": False,
        }
    holdfast.convert(path, tmp_path / "back.pt")
    found = torch.load(tmp_path / "back.pt", weights_only=True)
    assert {name: (t.requires_grad, t.is_leaf) for name, t in found.items()} == {
        "w": (True, True), "view": (True, True), "twice": (True, True), "plain": (False, True),
    }  # fmt: skip


def test_a_torch_file_says_that_sparse_tensors_lose_their_gradient(tmp_path):
    state = {"s": torch.eye(2).to_sparse().requires_grad_()}
    assert saved(tmp_path, state, "torch")[0].notes == (
        "s: requires_grad of a sparse_coo tensor has no place in a torch file; it is lost",
    )
    assert saved(tmp_path, state, "native")[0].notes == ()


class Special(torch.Tensor):
    pass


@pytest.mark.parametrize("format", FORMATS)
def test_what_no_format_is_told_of_is_noted(tmp_path, format):
    tagged = nn.Parameter(torch.ones(2))
    tagged.tag = "x"
    hooked = torch.ones(2, requires_grad=True)
    hooked.register_hook(lambda grad: grad)
    state = {
        "tagged": tagged,
        "special": torch.ones(2).as_subclass(Special),
        "hooked": hooked,
        "buffer": nn.Buffer(torch.ones(2)),
    }
    assert saved(tmp_path, state, format)[0].notes == (
        "the attribute 'tag' is not kept of 'tagged'",
        "the class Special is not kept of 'special'",
        "hooks are not kept of 'hooked'",
    )


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("made", [nn.UninitializedParameter, nn.parameter.UninitializedBuffer])
def test_what_has_no_shape_yet_is_refused(tmp_path, made, format):
    with pytest.raises(CannotHold, match="not initialised"):
        saved(tmp_path, {"w": made()}, format)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("format", FORMATS)
def test_a_zero_tensor_is_refused_by_name(tmp_path, format):
    state = {"z": torch._efficientzerotensor((3,)), "w": torch.ones(2)}
    with pytest.raises(CannotHold, match="z: a tensor without memory of its own"):
        saved(tmp_path, state, format)
    assert not list(tmp_path.iterdir())


def test_a_tensor_inside_of_vmap_is_refused_by_name(tmp_path):
    def save_wrapped(wrapped):
        with pytest.raises(CannotHold, match="w: a tensor without memory of its own"):
            saved(tmp_path, {"w": wrapped}, "torch")
        return wrapped

    torch.vmap(save_wrapped)(torch.ones(3, 2))
    assert not list(tmp_path.iterdir())


PLAIN = [
    None, True, 1, -(2**90), 1.5, 1j, "x", b"x", bytearray(b"x"), (1,), [1], {1}, {"a": 1},
    {1: 2, (1, 2): 3, None: 4, 1.5: 5, b"x": 6},
    OrderedDict(a=1), Counter("ab"), torch.Size([1]), torch.float16, torch.device("cuda", 1), frozenset({1}), range(3), slice(1, 2),
    defaultdict(list, a=[1]), PurePosixPath("a"), np.float32(1), np.dtype("f4"), np.str_("a"), torch.strided,
    torch.per_tensor_affine,
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(PLAIN)))
def test_torch_reads_plain_values_or_a_note_names_them(tmp_path, number):
    value = PLAIN[number]
    try:
        done = holdfast.save({"w": np.ones(1), "value": value}, tmp_path / "a.pt", durable=False)
    except CannotHold:
        return
    try:
        found = torch.load(tmp_path / "a.pt", weights_only=True)["value"]
    except pickle.UnpicklingError:
        assert any("weights_only=True" in note and "(value" in note for note in done.notes)
    else:
        assert done.notes == ()
        assert (type(found), found) == (type(value), value)


@pytest.mark.parametrize(
    "name",
    [
        Global("a\nb", "c"),
        Global("a", "b\nS'x'\n"),
        Global("", "c"),
        Global("a", ""),
        Global("\ud800", "c"),
    ],
)
def test_names_that_would_be_read_as_something_else_are_refused(tmp_path, name):
    with pytest.raises(CannotHold, match="no name"):
        holdfast.save({"g": name}, tmp_path / "a.pt")


def test_safetensors_with_values_keeps_the_order_of_a_state(tmp_path):
    state = {"z": np.ones(2, np.float32), "a": np.ones(2, np.float32)}
    assert saved(tmp_path, state, "safetensors")[0].notes == ()
    done, path = saved(tmp_path, state | {"step": 1}, "safetensors")
    with holdfast.open(path) as ckpt:
        assert (list(ckpt.tree), done.notes) == (["z", "a", "step"], ())


def test_ranks_say_what_a_format_has_no_place_for(tmp_path):
    state = OrderedDict({"w": nn.Parameter(torch.ones(2))})
    assert save_sharded(tmp_path / "n", state, format="native").notes == ()
    assert save_sharded(tmp_path / "s", state, format="safetensors").notes == (
        "safetensors files of ranks do not say that 'w' is a Parameter or requires a gradient",
    )
    state._metadata = {"": {"version": 1}}
    state[5] = torch.ones(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        notes = save_sharded(tmp_path / "d", state, format="dcp").notes
    assert notes == (
        "a DCP directory does not say that 'w' is a Parameter",
        "a DCP directory has text as keys: '5' becomes text",
        "a DCP directory does not keep the attributes of an OrderedDict: '_metadata'",
    )
