"""A sparsifier's life: prepare, step, squash, convert; and each thing that torch 2.13 gets wrong in it."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize, prune

import holdfast.torch
from holdfast.errors import NoSuchTensor, Refused
from holdfast.torch.sparsity import (
    BaseSparsifier,
    CubicSL,
    FakeSparsity,
    FakeStructuredSparsity,
    MagnitudeSparsifier,
    SaliencyPruner,
    WeightNormSparsifier,
)
from tests.torch.sparsity.models import level_of, linears, mask_of, mixed, quantised


class FirstRow(BaseSparsifier):
    """As users write them."""

    def __init__(self, **defaults):
        super().__init__(defaults=defaults)

    def update_mask(self, module, tensor_name, **kwargs):
        module.parametrizations[tensor_name][0].mask[0] = 0
        known = self.state[kwargs["tensor_fqn"]]
        known["count"] = known.get("count", 0) + 1


ALL = ["0.weight", "2.0.weight", "2.1.weight"]


def test_without_a_config_every_linear_below_the_model_is_taken():
    sparsifier = FirstRow(test=3)
    model = linears()
    sparsifier.prepare(model, config=None)
    assert [group["tensor_fqn"] for group in sparsifier.groups] == ALL
    assert sparsifier.config == [{"tensor_fqn": fqn} for fqn in ALL]
    assert sparsifier.groups[1] == {
        "test": 3,
        "tensor_fqn": "2.0.weight",
        "module_fqn": "2.0",
        "module": model[2][0],
        "tensor_name": "weight",
    }
    assert sparsifier.model is model


def test_branches_are_taken_in_torchs_order():
    model = nn.Sequential(
        nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)),
        nn.Linear(2, 2),
        nn.Sequential(nn.Linear(2, 2)),
    )
    sparsifier = FirstRow()
    sparsifier.prepare(model)
    assert [group["tensor_fqn"] for group in sparsifier.groups] == [
        "1.weight",
        "2.0.weight",
        "0.0.weight",
        "0.1.weight",
    ]


def test_a_config_is_merged_with_the_defaults_and_takes_other_tensors_too():
    sparsifier = FirstRow(a=1, b=2)
    model = linears()
    sparsifier.prepare(
        model,
        [
            {"tensor_fqn": "2.0.bias", "a": 5},
            {"tensor_fqn": "0.weight", "module": model[0], "module_fqn": "0"},
        ],
    )
    assert [(group["a"], group["b"]) for group in sparsifier.groups] == [(5, 2), (1, 2)]
    sparsifier.step()
    assert model[2][0].bias[0] == 0
    assert (model[0].weight[0] == 0).all()
    assert not parametrize.is_parametrized(model[2][1])


def test_masks_are_not_updated_when_that_is_off():
    sparsifier, model = FirstRow(), linears()
    sparsifier.prepare(model)
    sparsifier.enable_mask_update = False
    sparsifier.step()
    assert mask_of(model[0]).all()
    assert "count" not in sparsifier.state["0.weight"]
    sparsifier.enable_mask_update = True
    sparsifier.step()
    assert not mask_of(model[0])[0].any()
    assert sparsifier.state["0.weight"]["count"] == 1


def test_squashing_leaves_a_plain_model_and_positive_zeros():
    sparsifier, model = MagnitudeSparsifier(0.5), linears()
    weight = model[0].weight
    with torch.no_grad():
        weight[0, :2] = torch.tensor([-1e-9, -0.0])
        weight[1, 0] = 0.3
    sparsifier.prepare(model)
    sparsifier.step()
    x, masked = torch.randn(3, 8), model[0].weight.detach().clone()
    before = model(x)
    sparsifier.squash_mask(params_to_keep=("sparsity_level",))
    assert torch.equal(model(x), before)
    assert model[0].weight is weight  # an optimizer holds it
    assert torch.equal(weight, masked)
    assert not weight[weight == 0].signbit().any()
    assert type(model[0]) is nn.Linear
    assert model[0].sparse_params == {"sparsity_level": 0.5}
    assert list(model.state_dict()) == list(linears().state_dict())
    assert level_of(sparsifier.state["0.weight"]["mask"]) == 0.5  # remembered


def test_a_kept_negative_zero_stays_one():
    model = nn.Sequential(nn.Linear(4, 1, bias=False))
    model[0].weight = nn.Parameter(torch.tensor([[-0.0, -1.0, -2.0, -3.0]]))
    sparsifier = MagnitudeSparsifier(0.0)
    sparsifier.prepare(
        model, [{"tensor_fqn": "0.weight", "mask": torch.tensor([[True, False, True, True]])}]
    )
    sparsifier.squash_mask()
    assert model[0].weight.signbit().tolist() == [[True, False, True, True]]


def test_weights_that_are_not_finite_are_squashed_to_zero():
    model = nn.Sequential(nn.Linear(2, 1, bias=False))
    model[0].weight = nn.Parameter(torch.tensor([[float("nan"), 1.0]]))
    sparsifier = MagnitudeSparsifier(0.5)
    sparsifier.prepare(model, [{"tensor_fqn": "0.weight", "mask": torch.tensor([[0, 1]])}])
    sparsifier.squash_mask()
    assert model[0].weight.tolist() == [[0, 1]]


def test_settings_are_kept_for_all_or_by_layer():
    sparsifier, model = FirstRow(a=1, b=2, c=3), linears()
    sparsifier.prepare(model, [{"tensor_fqn": "0.weight"}, {"tensor_fqn": "2.0.weight"}])
    with pytest.raises(KeyError, match="has no setting 'd'"):
        sparsifier.squash_mask(params_to_keep=("d",))
    with pytest.raises(NoSuchTensor, match=r"did you mean '2\.0'"):
        sparsifier.squash_mask(params_to_keep_per_layer={"2.9": ("a",)})
    assert parametrize.is_parametrized(model[0])
    sparsifier.squash_mask(params_to_keep=("a",), params_to_keep_per_layer={"2.0": ("c",)})
    assert model[0].sparse_params == {"a": 1}
    assert model[2][0].sparse_params == {"a": 1, "c": 3}


def test_modules_with_masks_are_converted():
    class Sparse(nn.Linear):
        @classmethod
        def from_dense(cls, mod):
            return cls(mod.in_features, mod.out_features)

    sparsifier, model = FirstRow(), linears()
    sparsifier.prepare(model, [{"tensor_fqn": "2.0.weight"}])
    made = sparsifier.convert(model, mapping={nn.Linear: Sparse})
    assert type(made[2][0]) is Sparse
    assert type(made[0]) is nn.Linear
    assert parametrize.is_parametrized(model[2][0])
    assert sparsifier.convert(model, mapping={nn.Linear: Sparse}, inplace=True) is model
    assert type(model[2][0]) is Sparse
    with pytest.raises(NotImplementedError, match="mapping"):
        sparsifier.convert(model)


def test_it_says_what_it_is():
    sparsifier = FirstRow(a=1)
    assert repr(sparsifier) == "FirstRow ()"
    sparsifier.prepare(linears(), [{"tensor_fqn": "0.weight"}])
    text = repr(sparsifier)
    assert text.startswith("FirstRow (\n\tGroup 0\n\t    a: 1\n\t    module: ParametrizedLinear(")
    assert text.endswith(
        "\n\t    module_fqn: 0\n\t    tensor_fqn: 0.weight\n\t    tensor_name: weight\n)"
    )
    with pytest.raises(TypeError, match="abstract"):
        BaseSparsifier()


# What torch 2.13 gets wrong.


def test_a_prepared_model_strict_loads_its_own_state_dict(tmp_path):
    # torch: Missing key(s) in state_dict: "0.parametrizations.weight.0.mask".
    models = [linears(), linears()]
    for model, level in zip(models, (0.5, 0.25), strict=True):
        sparsifier = MagnitudeSparsifier(level)
        sparsifier.prepare(model)
        sparsifier.step()
    with torch.no_grad():
        models[0][0].parametrizations.weight.original.fill_(2.0)
    saved = models[0].state_dict()
    assert not any("mask" in name for name in saved)
    models[0].load_state_dict(saved, strict=True)
    models[1].load_state_dict(saved, strict=True)
    assert (models[1][0].parametrizations.weight.original == 2).all()
    assert level_of(mask_of(models[1][0])) == 0.25  # masks are the sparsifier's
    holdfast.torch.save(saved, tmp_path / "model.pt")
    with torch.no_grad():
        models[1][0].parametrizations.weight.original.zero_()
    holdfast.torch.load_into(models[1], tmp_path / "model.pt")
    assert (models[1][0].parametrizations.weight.original == 2).all()


def test_preparing_twice_is_refused_and_changes_nothing():
    # torch: two masks on each weight, and each group twice.
    sparsifier, model = FirstRow(), linears()
    sparsifier.prepare(model)
    with pytest.raises(Refused, match="prepared already"):
        sparsifier.prepare(model)
    for config in (None, [{"tensor_fqn": "0.weight"}]):
        for other in (WeightNormSparsifier(), MagnitudeSparsifier()):
            with pytest.raises(ValueError, match=r"'0\.weight' has a mask already"):
                other.prepare(model, config)
            assert other.groups == []
    assert len(sparsifier.groups) == 3
    assert len(model[0].parametrizations.weight) == 1


def test_a_squashed_model_can_be_prepared_again():
    sparsifier, model = MagnitudeSparsifier(0.5), linears()
    sparsifier.prepare(model)
    sparsifier.step()
    sparsifier.squash_mask()
    sparsifier.prepare(model, [{"tensor_fqn": "0.weight", "sparsity_level": 0.75}])
    sparsifier.step()
    assert level_of(model[0].weight) == 0.75
    assert list(sparsifier.state) == ["0.weight"]


def test_steps_out_of_order_are_refused():
    # torch: AttributeError about `parametrizations`, or nothing.
    sparsifier, model = WeightNormSparsifier(), linears()
    with pytest.raises(Refused, match=r"step\(\) before prepare\(\)"):
        sparsifier.step()
    with pytest.raises(ValueError, match="not prepared"):
        sparsifier.squash_mask()
    sparsifier.prepare(model)
    sparsifier.squash_mask()
    with pytest.raises(Refused, match=r"step\(\) after squash_mask\(\)"):
        sparsifier.step()
    with pytest.raises(ValueError, match="squashed before"):
        sparsifier.squash_mask()


def test_a_mask_that_somebody_took_off_is_missed():
    sparsifier, model = WeightNormSparsifier(), linears()
    sparsifier.prepare(model)
    parametrize.remove_parametrizations(model[0], "weight")
    with pytest.raises(Refused, match=r"the mask of '0\.weight' is gone"):
        sparsifier.step()


@pytest.mark.parametrize(
    ("fqn", "text"),
    [
        ("0.wieght", r"'0\.weight'"),
        ("2.2.weight", r"'2\.\d\.weight'"),
        ("net.0.weight", "did you mean"),
        (".0.weight", "did you mean"),
        ("x", "there are 5: 0.bias"),
    ],
)
def test_a_bad_name_suggests_near_ones(fqn, text):
    # torch: 'NoneType' object has no attribute 'weight'.
    with pytest.raises(NoSuchTensor, match=text) as caught:
        WeightNormSparsifier().prepare(linears(), [{"tensor_fqn": fqn}])
    assert isinstance(caught.value, KeyError)
    assert caught.value.tensor == fqn


def test_a_mask_keeps_its_dtype_and_is_the_tensor_that_it_was():
    # torch: float32 becomes bool with zeros_per_block.
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        model = linears().to(dtype)
        sparsifier = WeightNormSparsifier(1.0, (1, 4), zeros_per_block=2)
        sparsifier.prepare(model)
        mask = mask_of(model[0])
        assert mask.dtype is dtype
        sparsifier.step()
        assert mask_of(model[0]) is mask
        assert sparsifier.state["0.weight"]["mask"] is mask
        assert mask.dtype is dtype
        assert level_of(mask) == 0.5
        assert model[0].weight.dtype is dtype


def test_a_model_that_moves_takes_its_masks_along():
    sparsifier, model = MagnitudeSparsifier(0.5), linears()
    sparsifier.prepare(model)
    sparsifier.step()
    model.double()
    assert mask_of(model[0]).dtype is torch.float64
    assert sparsifier.state["0.weight"]["mask"].dtype is torch.float32
    sparsifier.step()
    assert sparsifier.state["0.weight"]["mask"] is mask_of(model[0])


def test_a_copy_has_a_copy_of_the_model():
    # torch: the copy's groups have modules, and the copy has no model.
    sparsifier, model = MagnitudeSparsifier(0.5), linears()
    sparsifier.prepare(model)
    both = copy.deepcopy({"model": model, "sparsifier": sparsifier})
    assert both["sparsifier"].model is both["model"]
    assert both["sparsifier"].groups[0]["module"] is both["model"][0]
    both["sparsifier"].step()
    assert level_of(mask_of(both["model"][0])) == 0.5
    assert both["sparsifier"].state["0.weight"]["mask"] is mask_of(both["model"][0])
    assert level_of(mask_of(model[0])) == 0
    alone = copy.deepcopy(sparsifier)
    alone.step()
    assert alone.model is not model
    assert level_of(mask_of(alone.model[0])) == 0.5
    assert level_of(mask_of(model[0])) == 0


# Bad input.


def parametrized():
    model = linears()
    nn.utils.parametrizations.orthogonal(model[0], "weight")
    return model


def tied():
    model = linears()
    model.append(nn.Linear(8, 12))
    model[3].weight = model[0].weight
    return model


def tied_by_memory():
    model = tied()
    model[3].weight = nn.Parameter(model[0].weight.data)
    return model


def old_prune():
    model = linears()
    prune.l1_unstructured(model[0], "weight", 0.5)
    return model


def integers():
    model = linears()
    model[0].register_buffer("table", torch.arange(6))
    return model


def quantised_weight():
    model = linears()
    model[0].register_buffer("table", quantised(3, 3))
    return model


class Claims(torch.Tensor):
    """As torchao's quantised weights: a subclass that says that it is floating-point."""


def subclass():
    model = linears()
    model[0].register_buffer("table", torch.randn(3, 3).as_subclass(Claims))
    return model


@pytest.mark.parametrize(
    ("make", "config", "error", "text"),
    [
        (
            linears,
            [{"tensor_fqn": "2.0"}],
            ValueError,
            r"is a module and not a tensor; did you mean '2\.0\.weight'",
        ),
        (linears, [{"tensor_fqn": ""}], ValueError, "is a module"),
        (linears, [{"tensor_fqn": "2.1.bias"}], ValueError, "is None"),
        (parametrized, [{"tensor_fqn": "0.weight"}], ValueError, "'0.weight' is parametrized"),
        (tied, [{"tensor_fqn": "0.weight"}], ValueError, r"'0\.weight' is shared with 3\.weight"),
        (tied, None, ValueError, "is shared with"),
        (tied_by_memory, [{"tensor_fqn": "3.weight"}], ValueError, r"shared with 0\.weight"),
        (
            old_prune,
            [{"tensor_fqn": "0.weight"}],
            ValueError,
            r"something computes it, such as torch\.nn\.utils\.prune",
        ),
        (integers, [{"tensor_fqn": "0.table"}], TypeError, r"'0\.table' is torch\.int64"),
        (quantised_weight, [{"tensor_fqn": "0.table"}], TypeError, r"'0\.table' is quantised"),
        (subclass, [{"tensor_fqn": "0.table"}], TypeError, r"'0\.table' is a Claims"),
        (
            lambda: linears().to(torch.float8_e4m3fn),
            [{"tensor_fqn": "0.weight"}],
            TypeError,
            "float8",
        ),
        (lambda: linears().to("meta"), [{"tensor_fqn": "0.weight"}], ValueError, "meta device"),
        (
            lambda: nn.Sequential(nn.LazyLinear(4)),
            [{"tensor_fqn": "0.weight"}],
            ValueError,
            "not initialised",
        ),
        (
            linears,
            [{"tensor_fqn": "0.weight", "mask": torch.ones(8, 12)}],
            ValueError,
            r"shape \(8, 12\), and should have \(12, 8\)",
        ),
        (
            linears,
            [{"tensor_fqn": "0.weight", "mask": torch.ones(12, 8, device="meta")}],
            ValueError,
            "on meta, and the tensor on cpu",
        ),
        (
            linears,
            [{"tensor_fqn": "0.weight", "mask": torch.full((12, 8), 2)}],
            ValueError,
            "other values than 0 and 1",
        ),
        (linears, [{"tensor_fqn": "0.weight", "mask": [1]}], TypeError, "not a tensor"),
        (
            linears,
            [{"tensor_fqn": "0.weight", "sparsity_level": 1.5}],
            ValueError,
            r"'0\.weight': .* from 0 to 1; found 1\.5",
        ),
        (
            linears,
            [{"tensor_fqn": "0.weight", "sparsity_level": math.nan}],
            ValueError,
            "from 0 to 1",
        ),
        (
            linears,
            [{"tensor_fqn": "0.weight", "sparse_block_shape": (0, 4)}],
            ValueError,
            "at least 1",
        ),
        (
            linears,
            [{"tensor_fqn": "0.weight", "zeros_per_block": 5}],
            ValueError,
            r"at most the 4 elements",
        ),
        (
            linears,
            [{"tensor_fqn": "0.weight"}, {"tensor_fqn": "0.weight"}],
            ValueError,
            "in the config twice",
        ),
        (linears, [{"tensor_fqn": "0.weight", "module_fqn": "2"}], ValueError, "do not agree"),
        (linears, [{"tensor_fqn": "0.weight", "tensor_name": "bias"}], ValueError, "do not agree"),
        (
            linears,
            [{"tensor_fqn": "0.weight", "module": nn.Linear(1, 1)}],
            ValueError,
            "do not agree",
        ),
        (linears, [{"sparsity_level": 0.5}], ValueError, "'tensor_fqn' is missing"),
        (linears, [{"tensor_fqn": 3}], TypeError, "found a int"),
        (linears, ["0.weight"], TypeError, "item 1 of a config is a dict"),
        (linears, {"tensor_fqn": "0.weight"}, TypeError, "a config is a list of dicts"),
        (lambda: nn.Linear(3, 3), None, ValueError, "nothing below the model to prune"),
    ],
)
def test_bad_input_is_named_and_the_model_untouched(make, config, error, text):
    model = make()
    if (
        isinstance(config, list)
        and len(model) > 1
        and not model[0].weight.is_meta
        and model[0].weight.dtype.itemsize > 1
    ):
        config = [{"tensor_fqn": "2.1.weight"}, *config]  # what is good comes first
    sparsifier = WeightNormSparsifier()
    with pytest.raises(error, match=text):
        sparsifier.prepare(model, config)
    assert not any(isinstance(module, FakeSparsity) for module in model.modules())
    assert sparsifier.groups == []
    assert sparsifier.model is None


def test_a_module_under_two_names_is_one_module():
    shared = nn.Linear(4, 4)
    model = nn.Sequential(shared, nn.ReLU(), shared)
    sparsifier = MagnitudeSparsifier(0.5)
    with pytest.raises(ValueError, match=r"twice, here and as '0\.weight'"):
        sparsifier.prepare(model, [{"tensor_fqn": "0.weight"}, {"tensor_fqn": "2.weight"}])
    sparsifier.prepare(model, [{"tensor_fqn": "2.weight"}])
    sparsifier.step()
    assert level_of(model[0].weight) == 0.5


def test_when_torch_refuses_half_way_the_model_is_as_before():
    class Breaks(FirstRow):
        def _put(self, group, fake):
            if group["tensor_fqn"] == "2.1.weight":
                raise RuntimeError("no")
            super()._put(group, fake)

    model = linears()
    with pytest.raises(RuntimeError, match="no"):
        Breaks().prepare(model)
    assert not parametrize.is_parametrized(model[0])
    assert type(model[0]) is nn.Linear


# All of it together.


def test_masks_hold_while_a_model_is_trained():
    torch.manual_seed(0)
    model = linears()
    sparsifier = WeightNormSparsifier(sparsity_level=0.75, sparse_block_shape=(1, 2))
    sparsifier.prepare(model)
    schedule = CubicSL(sparsifier, delta_t=1, total_t=10)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.1)
    x, y = torch.randn(32, 8), torch.randn(32, 6)
    gone = torch.zeros(12, 8, dtype=torch.bool)
    for epoch in range(15):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        if epoch == 5:
            with torch.no_grad():
                model[0].parametrizations.weight.original[3] = (
                    0.0  # zeros of the weight's own do not free others
                )
        sparsifier.step()
        schedule.step()
        now = model[0].weight == 0
        assert (now | ~gone).all()
        gone = mask_of(model[0]) == 0
    assert level_of(mask_of(model[0])) == 0.75
    sparsifier.squash_mask()
    assert (model[0].weight[gone] == 0).all()


def test_a_recurrent_module_sees_its_masks():
    # torch's parametrizations alone do not reach the list of weights that these modules keep.
    torch.manual_seed(0)
    model = nn.LSTM(4, 3, num_layers=2)
    sparsifier = MagnitudeSparsifier(0.5)
    sparsifier.prepare(model)
    assert [group["tensor_fqn"] for group in sparsifier.groups] == [
        "weight_ih_l0",
        "weight_hh_l0",
        "weight_ih_l1",
        "weight_hh_l1",
    ]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(5, 2, 4)
    for _ in range(2):
        model(x)[0].square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        sparsifier.step()
    before = model(x)[0]
    sparsifier.squash_mask()
    assert torch.equal(model(x)[0], before)
    assert all(isinstance(weight, nn.Parameter) for weight in model._flat_weights)
    assert not model._forward_pre_hooks
    plain = nn.LSTM(4, 3, num_layers=2)
    plain.load_state_dict(model.state_dict())
    assert torch.equal(plain(x)[0], before)
    assert level_of(plain.weight_hh_l1) == pytest.approx(0.5, abs=0.02)


def test_a_traced_model_has_its_masks():
    sparsifier, model = MagnitudeSparsifier(0.5), mixed()["out"]
    sparsifier.prepare(model)
    sparsifier.step()
    x = torch.randn(2, 7)
    assert torch.equal(torch.export.export(model, (x,)).module()(x), model(x))


class Halving(FakeSparsity):
    """A parametrization of a user's own: what is pruned is halved and not dropped."""

    def forward(self, x):
        return x * (0.5 + 0.5 * self.mask)


def test_a_config_names_its_own_parametrization():
    model, sparsifier = linears(), FirstRow()
    before = model[0].weight.detach().clone()
    sparsifier.prepare(
        model,
        [{"tensor_fqn": "0.weight", "parametrization": Halving}, {"tensor_fqn": "2.0.weight"}],
    )
    assert type(model[0].parametrizations.weight[0]) is Halving
    assert type(model[2][0].parametrizations.weight[0]) is FakeSparsity
    sparsifier.step()
    assert torch.equal(model[0].weight[0], before[0] / 2)
    saved = sparsifier.state_dict()
    assert all("parametrization" not in group for group in saved["groups"])
    sparsifier.load_state_dict(saved)
    assert type(model[0].parametrizations.weight[0]) is Halving


@pytest.mark.parametrize(
    "given", [nn.Identity, "FakeSparsity", None, torch.ao.pruning.FakeSparsity]
)
def test_a_parametrization_that_is_none_of_ours_is_refused(given):
    model = linears()
    with pytest.raises(
        TypeError, match=r"'0\.weight' has to be a class derived from .*\.FakeSparsity"
    ):
        FirstRow().prepare(model, [{"tensor_fqn": "0.weight", "parametrization": given}])
    assert not parametrize.is_parametrized(model[0])


def test_torchs_prepare_of_a_subclass_is_refused_and_not_ignored():
    class Own(FirstRow):
        def _prepare(self, *args, **kwargs):
            raise AssertionError

    model = linears()
    with pytest.raises(Refused, match="Own has a method _prepare"):
        Own().prepare(model)
    assert not parametrize.is_parametrized(model[0])


def test_rows_have_a_parametrization_of_their_own():
    class Rows(FakeStructuredSparsity):
        pass

    model, pruner = linears(), SaliencyPruner({"sparsity_level": 0.5})
    pruner.prepare(model, [{"tensor_fqn": "0.weight", "parametrization": Rows}])
    assert type(model[0].parametrizations.weight[0]) is Rows
    with pytest.raises(TypeError, match="FakeStructuredSparsity"):
        SaliencyPruner({"sparsity_level": 0.5}).prepare(
            linears(), [{"tensor_fqn": "0.weight", "parametrization": FakeSparsity}]
        )
