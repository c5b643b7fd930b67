"""What a sparsifier saves, and where that can be loaded: each way in which torch 2.13 loses masks, and the files of both."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections import defaultdict

import pytest
import torch
import torch.ao.pruning as theirs
from torch import nn
from torch.nn.utils import parametrize

import holdfast.torch
from holdfast.errors import DoesNotFit, Refused
from holdfast.torch.sparsity import (
    MagnitudeSparsifier,
    NearlyDiagonalSparsifier,
    RandomSparsifier,
    SaliencyPruner,
    WeightNormSparsifier,
    pack_mask,
    unpack_mask,
)
from tests.torch.sparsity.models import level_of, linears, mask_of
from tests.torch.sparsity.test_sparsifier import FirstRow


def prepared(level: float = 0.5) -> tuple[WeightNormSparsifier, nn.Sequential]:
    """A sparsifier that has made a step, and its model."""
    sparsifier, model = WeightNormSparsifier(level, (1, 2)), linears()
    sparsifier.prepare(model)
    sparsifier.step()
    return sparsifier, model


def same_masks(a: nn.Sequential, b: nn.Sequential) -> bool:
    return all(
        torch.equal(mask_of(x), mask_of(y))
        for x, y in ((a[0], b[0]), (a[2][0], b[2][0]), (a[2][1], b[2][1]))
    )


def all_plain(value: object) -> bool:
    if type(value) is dict:
        return all(type(key) is str and all_plain(item) for key, item in value.items())
    if type(value) in (list, tuple):
        return all(map(all_plain, value))
    return type(value) in (torch.Tensor, int, float, str, bool, type(None))


def test_the_saved_state():
    sparsifier, _ = prepared()
    saved = sparsifier.state_dict()
    assert saved["groups"][0] == {
        "sparsity_level": 0.5,
        "sparse_block_shape": (1, 2),
        "zeros_per_block": 2,
        "tensor_fqn": "0.weight",
    }
    assert list(saved["state"]) == [group["tensor_fqn"] for group in saved["groups"]]
    assert all_plain(saved)


def test_masks_are_saved_as_bits():
    sparsifier, model = prepared()
    mask = sparsifier.state_dict()["state"]["0.weight"]["mask"]
    assert mask["shape"] == (12, 8)
    assert mask["bits"].dtype is torch.uint8
    assert mask["bits"].numel() == 12
    assert torch.equal(unpack_mask(mask), mask_of(model[0]) == 1)


@pytest.mark.parametrize("shape", [(), (1,), (3, 5), (2, 0), (4, 2, 3, 3)])
@pytest.mark.parametrize("dtype", [torch.bool, torch.float32, torch.bfloat16, torch.int64])
def test_bits_and_back(shape, dtype):
    mask = torch.randint(0, 2, shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    assert torch.equal(unpack_mask(pack_mask(mask)), mask != 0)


def test_the_bit_of_an_element():
    mask = torch.zeros(3, 4, dtype=torch.bool)
    mask[2, 1] = True  # element 9
    assert pack_mask(mask)["bits"].tolist() == [0, 0b10]


def test_a_mask_with_values_in_between_stays_a_tensor():
    mask = torch.tensor([0.0, 0.5])
    stored = pack_mask(mask)
    assert stored is not mask
    assert torch.equal(stored, mask)
    assert torch.equal(unpack_mask(stored), mask)


@pytest.mark.parametrize(
    ("stored", "text"),
    [
        (None, "NoneType"),
        ({"bits": torch.zeros(1, dtype=torch.uint8)}, "bits and shape"),
        (
            {"bits": torch.zeros(1, dtype=torch.uint8), "shape": (3, 3)},
            "2 bytes of bits; found torch.uint8",
        ),
        ({"bits": torch.zeros(2), "shape": (3, 3)}, "found torch.float32"),
        ({"bits": b"xx", "shape": (3, 3)}, "found bytes"),
        ({"bits": torch.zeros(2, dtype=torch.uint8), "shape": (3, -3)}, "whole numbers"),
        ({"bits": torch.zeros(2, dtype=torch.uint8), "shape": 9}, "whole numbers"),
    ],
)
def test_bits_that_cannot_be(stored, text):
    with pytest.raises(ValueError, match=text):
        unpack_mask(stored)


def test_the_saved_state_is_a_copy():
    # torch: the live object, which the next step changes.
    sparsifier, model = prepared()
    sparsifier.state["0.weight"]["mine"] = torch.zeros(2)
    saved = sparsifier.state_dict(packed=False)
    kept = copy.deepcopy(saved)
    for group in sparsifier.groups:
        group["sparsity_level"] = 0.9
    sparsifier.state["0.weight"]["mine"] += 1
    sparsifier.step()
    assert saved["groups"] == kept["groups"]
    assert saved["state"]["0.weight"]["mine"].tolist() == [0, 0]
    assert torch.equal(saved["state"]["0.weight"]["mask"], kept["state"]["0.weight"]["mask"])
    saved["state"]["0.weight"]["mask"].zero_()
    assert mask_of(model[0]).any()


def test_loading_leaves_the_callers_dict_alone_and_masks_can_be_saved_again():
    # torch: pops the masks from it, and its next state_dict() has none.
    first, model = prepared()
    saved = first.state_dict()
    kept = copy.deepcopy(saved)
    second, other = WeightNormSparsifier(0.9), linears()
    second.prepare(other)
    second.load_state_dict(saved)
    assert str(saved) == str(kept)
    assert same_masks(model, other)
    assert second.state == first.state
    assert str(second.state_dict()) == str(saved)
    third = WeightNormSparsifier()
    third.load_state_dict(second.state_dict(), model=linears())
    assert third.state == first.state
    third.state["0.weight"]["mask"] = torch.zeros(12, 8)
    assert third.state != first.state
    second.step()
    assert second.state_dict()["groups"] == saved["groups"]


def test_loading_into_a_model_that_is_not_prepared_prepares_it():
    # torch: 'NoneType' object has no attribute …, and 'Linear' object has no attribute 'parametrizations'.
    first, model = prepared()
    second, other = WeightNormSparsifier(0.9), linears()
    second.load_state_dict(first.state_dict(), model=other)
    assert same_masks(model, other)
    assert second.model is other
    second.step()
    assert level_of(mask_of(other[0])) == 0.5
    second.squash_mask()
    assert level_of(other[0].weight) == 0.5


def test_loading_before_there_is_a_model_waits_for_it():
    first, model = prepared()
    second, other = WeightNormSparsifier(0.9), linears()
    second.load_state_dict(first.state_dict())
    with pytest.raises(Refused, match="before prepare"):
        second.step()
    assert str(second.state_dict()) == str(first.state_dict())
    with pytest.raises(ValueError, match=r"different tensors: 2\.0\.weight, 2\.1\.weight"):
        second.prepare(other, [{"tensor_fqn": "0.weight"}])
    second.prepare(other)
    assert same_masks(model, other)
    assert second.groups[0]["sparsity_level"] == 0.5


def test_a_config_after_loading_changes_settings_and_keeps_masks():
    first, model = prepared()
    second, other = WeightNormSparsifier(), linears()
    second.load_state_dict(first.state_dict())
    second.prepare(
        other,
        [
            {"tensor_fqn": fqn, "sparsity_level": 0.75}
            for fqn in ("0.weight", "2.0.weight", "2.1.weight")
        ],
    )
    assert same_masks(model, other)
    assert second.groups[0]["sparse_block_shape"] == (1, 2)
    second.step()
    assert level_of(mask_of(other[0])) == 0.75


def test_a_loaded_sparsifier_lets_go_of_other_tensors():
    first, model = FirstRow(test=3), linears()
    first.prepare(model, [{"tensor_fqn": "0.weight"}])
    first.step()
    second, other = FirstRow(), linears()
    dense = other[2][0].weight.detach().clone()
    second.prepare(other)
    second.step()
    second.load_state_dict(first.state_dict())
    assert [group["tensor_fqn"] for group in second.groups] == ["0.weight"]
    assert second.groups[0]["test"] == 3
    assert not parametrize.is_parametrized(other[2][0])
    assert torch.equal(other[2][0].weight, dense)
    assert second.state == first.state


@pytest.mark.parametrize("save", [holdfast.torch.save, torch.save])
@pytest.mark.parametrize("load", [holdfast.torch.load, torch.load])
def test_a_weights_only_load_takes_it(tmp_path, save, load):
    # torch: refused for its defaultdict.
    first, model = prepared()
    first.state["0.weight"]["more"] = defaultdict(list, a=[1, 2])
    save(first.state_dict(), tmp_path / "sparsifier.pt")
    saved = load(tmp_path / "sparsifier.pt", weights_only=True)
    second, other = WeightNormSparsifier(), linears()
    second.load_state_dict(saved, model=other)
    assert same_masks(model, other)
    assert second.state["0.weight"]["more"] == {"a": [1, 2]}


@pytest.mark.parametrize(
    "make",
    [
        lambda: WeightNormSparsifier(0.5, (2, 2), norm=1),
        lambda: WeightNormSparsifier(norm=torch.square),
        lambda: NearlyDiagonalSparsifier(3),
        lambda: MagnitudeSparsifier(0.3, scope="global"),
        lambda: RandomSparsifier(0.3, seed=3),
        lambda: SaliencyPruner({"sparsity_level": 0.5}),
    ],
)
def test_it_can_be_pickled_after_prepare(make):
    # torch: Serialization of parametrized modules is only supported through state_dict().
    sparsifier, model = make(), linears()
    assert repr(pickle.loads(pickle.dumps(sparsifier))) == repr(sparsifier)
    sparsifier.prepare(model)
    sparsifier.step()
    there = pickle.loads(pickle.dumps(sparsifier))
    assert there.model is None
    assert there.defaults == sparsifier.defaults
    assert str(there.state_dict()) == str(sparsifier.state_dict())
    other = linears()
    there.prepare(other)
    assert same_masks(model, other)
    for each in (sparsifier, there):
        each.step()
    assert same_masks(model, other)
    there.squash_mask()
    gone = pickle.loads(pickle.dumps(there))
    with pytest.raises(Refused, match="after squash_mask"):
        gone.step()
    assert gone.state_dict()["state"].keys() == sparsifier.state_dict()["state"].keys()


def test_masks_of_torchs_sparsifiers_are_taken():
    torchs, model = theirs.WeightNormSparsifier(0.5, (1, 4), zeros_per_block=2), linears()
    torchs.prepare(model, [{"tensor_fqn": "0.weight"}])
    torchs.step()
    mask = model[0].parametrizations.weight[0].mask
    assert mask.dtype is torch.bool
    ours, other = WeightNormSparsifier(), linears()
    ours.load_state_dict(torchs.state_dict(), model=other)
    assert mask_of(other[0]).dtype is torch.float32
    assert torch.equal(mask_of(other[0]) == 1, mask)
    assert ours.groups[0]["zeros_per_block"] == 2


def test_torchs_sparsifiers_take_ours_when_it_is_not_packed():
    ours, model = prepared()
    torchs, other = theirs.WeightNormSparsifier(), linears()
    torchs.prepare(other, None)
    torchs.load_state_dict(ours.state_dict(packed=False))
    assert torch.equal(other[0].parametrizations.weight[0].mask, mask_of(model[0]))
    assert torchs.groups[0]["sparse_block_shape"] == (1, 2)


def test_masks_that_torch_lost_are_missed():
    torchs = theirs.WeightNormSparsifier()
    torchs.prepare(linears(), None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torchs.load_state_dict(torchs.state_dict())
    lost = torchs.state_dict()
    ours, model = WeightNormSparsifier(), linears()
    with pytest.raises(
        ValueError, match=r"no mask for 0\.weight, 2\.0\.weight, 2\.1\.weight: torch"
    ):
        ours.load_state_dict(lost, model=model)
    assert ours.model is None
    ours.load_state_dict(lost, strict=False, model=model)
    assert mask_of(model[0]).all()


def test_a_mask_with_values_in_between_survives():
    first, model = FirstRow(), linears()
    first.prepare(model, [{"tensor_fqn": "0.weight"}])
    mask_of(model[0]).fill_(0.25)
    second, other = FirstRow(), linears()
    second.load_state_dict(first.state_dict(), model=other)
    assert (mask_of(other[0]) == 0.25).all()


def test_a_state_that_does_not_fit_changes_nothing():
    first, _ = prepared()
    saved = first.state_dict()
    second, other = (
        WeightNormSparsifier(0.25),
        nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Sequential(nn.Linear(12, 5))),
    )
    second.prepare(other)
    second.step()
    before = str(second.state_dict())
    with pytest.raises(
        DoesNotFit, match=r"no tensor '2\.1\.weight'; did you mean '2\.0\.weight'"
    ) as caught:
        second.load_state_dict(saved)
    assert caught.value.unexpected == ("2.1.weight",)
    assert list(caught.value.mismatched) == ["2.0.weight"]
    assert "(4, 12), and should have (5, 12)" in str(caught.value)
    assert isinstance(caught.value, RuntimeError)
    assert str(second.state_dict()) == before
    with pytest.raises(DoesNotFit, match=r"\(4, 12\)"):
        second.load_state_dict(saved, strict=False)
    del saved["state"]["2.0.weight"], saved["groups"][1]
    second.load_state_dict(saved, strict=False)
    assert list(second.state) == ["0.weight"]
    assert level_of(mask_of(other[0])) == 0.5
    with pytest.raises(Refused, match="another model"):
        second.load_state_dict(saved, model=linears())


@pytest.mark.parametrize(
    ("saved", "text"),
    [
        ({"a": 1}, r"'state' and 'groups'; found a dict of \['a'\]"),
        ([], "found a list"),
        ({"state": {"x": 1}, "groups": []}, "dict of dicts"),
        ({"state": {}, "groups": [{}]}, "'tensor_fqn'"),
        ({"state": {"x": {"mask": torch.ones(2)}}, "groups": []}, "masks without settings: x"),
        ({"state": {"x": {"mask": 3}}, "groups": [{"tensor_fqn": "x"}]}, "found a int"),
    ],
)
def test_what_is_no_state(saved, text):
    with pytest.raises(ValueError, match=text):
        WeightNormSparsifier().load_state_dict(saved)


def test_a_bad_level_in_a_state_is_refused_before_anything_changes():
    first, _ = prepared()
    saved = first.state_dict()
    saved["groups"][0]["sparsity_level"] = 2
    model = linears()
    with pytest.raises(ValueError, match="from 0 to 1"):
        WeightNormSparsifier().load_state_dict(saved, model=model)
    assert not parametrize.is_parametrized(model[0])
