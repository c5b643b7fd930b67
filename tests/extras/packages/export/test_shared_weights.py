"""The calls about shared weights: the same answers as `torch.export.pt2_archive` 2.13, for every kind of tensor."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.export.pt2_archive import _package_weights as theirs

from holdfast.errors import Refused
from holdfast.extras.packages import torch_weights as ours

BASE = torch.arange(12.0)
SHORT = torch.arange(10, dtype=torch.bfloat16)


def fakes() -> dict[str, torch.Tensor]:
    with FakeTensorMode():
        whole = torch.empty(3, 4)
        return {
            "whole": whole,
            "turned": whole.t(),
            "row": whole[1],
            "half": torch.empty(5, dtype=torch.float16),
        }


class Marked(torch.Tensor):
    pass


TENSORS = {
    "whole": BASE,
    "shaped": BASE.view(3, 4),
    "turned": BASE.view(3, 4).t(),
    "slice": BASE[2:5],
    "empty slice": BASE[1:1],
    "head": BASE[:4],
    "tail": BASE[6:],
    "every second": BASE[::2],
    "expanded": torch.ones(1).expand(4),
    "channels last": torch.ones(1, 2, 3, 4).to(memory_format=torch.channels_last),
    "scalar": torch.tensor(3.0),
    "empty": torch.empty(0),
    "empty of rank 2": torch.empty(0, 3),
    "meta": torch.empty(3, device="meta"),
    "parameter": torch.nn.Parameter(torch.ones(2, 3)),
    "subclass": torch.ones(3).as_subclass(Marked),
    "conjugated": torch.tensor([1j]).conj(),
    "fp8": torch.ones(3, dtype=torch.float8_e4m3fn),
    "bool": torch.ones(3, dtype=torch.bool),
    **{f"fake {name}": tensor for name, tensor in fakes().items()},
}

GROUPS = {
    "tied over two models": {
        "a": {"w": BASE, "h": BASE[:4]},
        "b": {"w": BASE.view(3, 4), "q": torch.ones(2)},
    },
    "no complete member": {"a": {"h": BASE[:4], "t": BASE[6:8]}, "b": {"s": BASE[2:5]}},
    "one that is turned": {"a": {"h": BASE.view(3, 4).t()}},
    "a turned one first": {"a": {"h": BASE.view(3, 4).t(), "s": BASE[4:6]}},
    "a turned one last": {"a": {"s": BASE[4:6], "h": BASE.view(3, 4).t()}},
    "two dtypes": {"a": {"i": BASE.view(torch.int32), "f": BASE, "j": BASE.view(torch.int32)[2:]}},
    "empty ones": {
        "a": {"e": torch.empty(0), "f": torch.empty(0), "g": torch.empty(0, dtype=torch.int32)}
    },
    "meta and empty": {"a": {"m": torch.empty(3, device="meta"), "e": torch.empty(0)}},
    "parameters": {"a": {"p": torch.nn.Parameter(BASE), "v": torch.nn.Parameter(BASE)[2:4]}},
    "a view of a parameter": {"a": {"v": torch.nn.Parameter(BASE)[3:6]}},
    "an empty slice and a tail": {"a": {"c": BASE[1:1], "d": BASE[3:]}},
    "a tail and an empty slice": {"a": {"c": BASE[3:], "d": BASE[1:1]}},
    "a slice of bfloat16": {"a": {"c": SHORT[2:6]}},
    "expanded": {"a": {"c": torch.ones(1).expand(4)}},
    "fakes": {"a": fakes(), "b": {"r": BASE}},
    "fakes of parts": {"a": {"row": fakes()["row"]}},
    "nothing": {},
    "a model without weights": {"a": {}, "b": {"w": BASE}},
}


def weights(module, models):
    return {
        model: module.Weights(
            {name: (tensor, module.TensorProperties(tensor)) for name, tensor in named.items()}
        )
        for model, named in models.items()
    }


def caught(call):
    """The outcome of a call, and what it warned."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        made = call()
    return made, [(str(one.message), one.category) for one in told]


def same(mine: torch.Tensor, other: torch.Tensor) -> None:
    assert type(mine) is type(other)
    assert (mine.dtype, mine.shape, mine.stride(), mine.storage_offset()) == (
        other.dtype, other.shape, other.stride(), other.storage_offset(),
    )  # fmt: skip
    assert (mine.requires_grad, mine.is_leaf, mine.device) == (
        other.requires_grad,
        other.is_leaf,
        other.device,
    )
    if type(mine) in (torch.Tensor, torch.nn.Parameter):
        assert mine.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


@pytest.mark.parametrize("name", TENSORS)
def test_properties(name):
    mine, other = ours.TensorProperties(TENSORS[name]), theirs.TensorProperties(TENSORS[name])
    assert vars(mine) == vars(other)
    assert mine.is_complete() == other.is_complete()


@pytest.mark.parametrize(
    "make", [lambda: torch.eye(3).to_sparse(), lambda: torch.eye(3).to_mkldnn()]
)
def test_a_tensor_without_storage_is_refused_as_torch_does(make):
    with pytest.raises(NotImplementedError) as other:
        theirs.TensorProperties(make())
    with pytest.raises(NotImplementedError) as mine:
        ours.TensorProperties(make())
    assert str(mine.value) == str(other.value)


@pytest.mark.parametrize("name", GROUPS)
def test_groups_and_their_complete_members(name):
    mine, other = weights(ours, GROUPS[name]), weights(theirs, GROUPS[name])
    groups = ours.group_weights(mine)
    expected = theirs.group_weights(other)
    assert [list(group) for group in groups] == [list(group) for group in expected]
    assert [type(group) for group in groups] == [type(group) for group in expected]
    for group in groups:
        complete, told = caught(lambda group=group: ours.get_complete_tensor(group, mine))
        wanted, said = caught(lambda group=group: theirs.get_complete_tensor(group, other))
        assert told == said
        same(complete, wanted)


@pytest.mark.parametrize("name", GROUPS)
def test_the_older_form_gives_a_name(name):
    known = weights(ours, GROUPS[name])
    for group in ours.group_weights(known):
        (model, weight), told = caught(lambda group=group: ours.get_complete(group, known))
        complete = [(m, w) for m, w in group if known[m].get_weight_properties(w).is_complete()]
        assert (model, weight) == (complete or list(group))[0]
        assert len(told) == (not complete)


def test_weights_are_a_dict():
    known = weights(ours, {"m": {"w": BASE}})["m"]
    assert known.get_weight("w") is known["w"]
    assert known.get_weight("w")[0] is BASE
    assert known.get_weight_properties("w") is known["w"][1]
    with pytest.raises(KeyError):
        known.get_weight("other")
    with pytest.raises(KeyError):
        known.get_weight_properties("other")
    with pytest.raises(TypeError):
        ours.Weights()


@pytest.mark.parametrize("call", ["get_complete_tensor", "get_complete"])
def test_an_empty_group(call):
    with pytest.raises(AssertionError):
        getattr(ours, call)(ours.OrderedSet(), {})


def test_properties_decide_and_not_the_copy_beside_them():
    whole = {"m": ours.Weights({"w": (BASE[:4].clone(), ours.TensorProperties(BASE))})}
    (group,) = ours.group_weights(whole)
    assert ours.get_complete_tensor(group, whole) is whole["m"]["w"][0]


def test_copies_of_parts_are_refused_where_torch_reads_beyond_them():
    parts = {"m": ours.Weights({"w": (BASE[2:6].clone(), ours.TensorProperties(BASE[2:6]))})}
    (group,) = ours.group_weights(parts)
    with pytest.warns(UserWarning, match="No complete tensor"), pytest.raises(Refused):
        ours.get_complete_tensor(group, parts)


def test_an_empty_slice_alone_stays_itself_where_torch_fails():
    alone = weights(ours, {"m": {"w": BASE[1:1]}})
    (group,) = ours.group_weights(alone)
    with pytest.warns(UserWarning, match="No complete tensor"):
        assert ours.get_complete_tensor(group, alone) is alone["m"]["w"][0]
    with pytest.warns(UserWarning, match="No complete tensor"), pytest.raises(RuntimeError):
        theirs.get_complete_tensor(group, weights(theirs, {"m": {"w": BASE[1:1]}}))


@pytest.mark.parametrize("module", [ours, theirs])
def test_a_group_of_several_dtypes_made_by_hand(module):
    odd = weights(module, {"m": {"a": BASE[1:2], "u": BASE.view(torch.uint8)[3:10]}})
    with pytest.warns(UserWarning, match="No complete tensor"), pytest.raises(AssertionError):
        module.get_complete_tensor(ours.OrderedSet([("m", "a"), ("m", "u")]), odd)
