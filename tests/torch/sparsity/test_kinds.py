"""The kinds of sparsifiers: weight norm and nearly diagonal beside torch's, and those that are ours alone."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.ao.pruning as theirs
from torch import nn
from torch.ao.pruning._experimental import pruner as their_pruners

from holdfast.errors import Unsupported
from holdfast.torch.sparsity import (
    BaseStructuredSparsifier,
    LambdaSL,
    MagnitudeSparsifier,
    NearlyDiagonalSparsifier,
    RandomSparsifier,
    SaliencyPruner,
    WeightNormSparsifier,
    block_mask,
    global_masks,
    magnitude_mask,
)
from tests.torch.sparsity.models import level_of, linears, mask_of, mixed


def single(rows: int, columns: int) -> nn.Sequential:
    torch.manual_seed(rows * 100 + columns)
    return nn.Sequential(nn.Linear(columns, rows, bias=False))


def both(rows: int, columns: int, *args, **settings) -> tuple[torch.Tensor, torch.Tensor]:
    """Masks after two steps of ours and of torch's, with the weight changed in between."""
    found = []
    for kind in (WeightNormSparsifier, theirs.WeightNormSparsifier):
        model = single(rows, columns)
        sparsifier = kind(*args, **settings)
        sparsifier.prepare(model, [{"tensor_fqn": "0.weight"}])
        sparsifier.step()
        with torch.no_grad():
            model[0].parametrizations.weight.original *= torch.linspace(0.5, 2, columns)
        sparsifier.step()
        found.append(model[0].parametrizations.weight[0].mask.float())
    return found[0], found[1]


@pytest.mark.parametrize("block", [(1, 1), (1, 4), (3, 2)])
@pytest.mark.parametrize(("rows", "columns"), [(8, 12), (7, 10)])
def test_whole_blocks_are_those_of_torch(rows, columns, block):
    for level, norm in [(0.0, None), (0.1, 1), (0.5, None), (0.5, torch.abs), (0.9, 2), (1.0, 1)]:
        ours, torchs = both(rows, columns, level, block, norm=norm)
        assert torch.equal(ours, torchs), (level, norm)


@pytest.mark.parametrize(
    ("block", "zeros"), [((1, 4), 2), ((1, 4), 1), ((2, 2), 3), ((4, 1), 2), ((1, 4), 0)]
)
def test_zeros_in_blocks_are_those_of_torch(block, zeros):
    ours, torchs = both(8, 12, 1.0, block, zeros_per_block=zeros)
    assert torch.equal(ours, torchs)


def test_zeros_in_blocks_that_do_not_divide_the_weight():
    # torch: RuntimeError, or a mask of another shape.
    model = single(5, 6)
    sparsifier = WeightNormSparsifier(1.0, (1, 4), zeros_per_block=2)
    sparsifier.prepare(model)
    sparsifier.step()
    mask = mask_of(model[0])
    assert mask.shape == (5, 6)
    assert (mask[:, :4].sum(1) == 2).all()
    assert mask[:, 4:].all()  # two of the last two


@pytest.mark.parametrize("name", ["conv", "embed", "out"])
def test_weights_of_other_modules_are_seen_as_matrices(name):
    # torch: ValueError or IndexError for convolutions.
    model = mixed()
    sparsifier = WeightNormSparsifier(0.5, (1, 3))
    sparsifier.prepare(model, [{"tensor_fqn": f"{name}.weight"}])
    sparsifier.step()
    weight = model[name].parametrizations.weight.original
    expected = block_mask(weight.detach().reshape(weight.shape[0], -1), (1, 3), 0.5).view(
        weight.shape
    )
    assert torch.equal(mask_of(model[name]) == 1, expected)


def test_every_combination_of_level_block_and_zeros_reaches_its_level():
    for level, block, zeros in itertools.product(
        (0.0, 0.5, 1.0), ((1, 1), (1, 4), (2, 2), (4, 1)), range(5)
    ):
        if zeros > block[0] * block[1]:
            continue
        model = nn.Sequential(nn.Linear(12, 12, bias=False))
        nn.init.ones_(model[0].weight)
        sparsifier = WeightNormSparsifier()
        sparsifier.prepare(
            model,
            [
                {
                    "tensor_fqn": "0.weight",
                    "sparsity_level": level,
                    "sparse_block_shape": block,
                    "zeros_per_block": zeros,
                }
            ],
        )
        sparsifier.step()
        sparsifier.squash_mask()
        assert level_of(model[0].weight) == level * zeros / block[0] / block[1]


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"sparsity_level": 90}, ValueError),
        ({"sparsity_level": -1.0}, ValueError),
        ({"sparse_block_shape": (0, 1)}, ValueError),
        ({"sparse_block_shape": 4}, ValueError),
        ({"zeros_per_block": 5}, ValueError),
        ({"zeros_per_block": -1}, ValueError),
        ({"norm": 3}, NotImplementedError),
        ({"norm": "x"}, NotImplementedError),
    ],
)
def test_settings_that_cannot_be(settings, error):
    with pytest.raises(error):
        WeightNormSparsifier(**settings)


def test_a_level_that_a_schedule_drives_out_of_range_is_refused_at_the_step():
    model = linears()
    sparsifier = WeightNormSparsifier()
    sparsifier.prepare(model)
    LambdaSL(sparsifier, lambda epoch: 10)
    assert sparsifier.groups[0]["sparsity_level"] == 5
    with pytest.raises(ValueError, match="from 0 to 1; found 5"):
        sparsifier.step()
    assert mask_of(model[0]).all()


def test_the_norm_as_a_function():
    assert WeightNormSparsifier().norm_fn(torch.tensor(-3.0)) == 9
    assert WeightNormSparsifier(norm=1).norm_fn(torch.tensor(-3.0)) == 3
    assert WeightNormSparsifier(norm=torch.exp).norm_fn is torch.exp


@pytest.mark.parametrize(("rows", "columns"), [(8, 8), (5, 9), (9, 4)])
def test_nearly_diagonal_as_torch(rows, columns):
    for nearliness in range(-1, 12):
        found = []
        for kind in (NearlyDiagonalSparsifier, theirs.NearlyDiagonalSparsifier):
            model = single(rows, columns)
            sparsifier = kind(nearliness)
            sparsifier.prepare(model, None)
            try:
                sparsifier.step()
                found.append(model[0].parametrizations.weight[0].mask.tolist())
            except ValueError:
                found.append("ValueError")
        assert found[0] == found[1], nearliness


def test_magnitude_takes_every_weight_of_every_module():
    model = mixed()
    sparsifier = MagnitudeSparsifier(0.8)
    sparsifier.prepare(model)
    names = ["conv", "embed", "out"]
    assert [group["tensor_fqn"] for group in sparsifier.groups] == [
        f"{name}.weight" for name in names
    ]
    sparsifier.step()
    for name in names:
        original = model[name].parametrizations.weight.original
        assert torch.equal(mask_of(model[name]) == 1, magnitude_mask(original, 0.8))
    model = nn.MultiheadAttention(4, 2)
    sparsifier = MagnitudeSparsifier()
    sparsifier.prepare(model)
    assert [group["tensor_fqn"] for group in sparsifier.groups] == [
        "in_proj_weight",
        "out_proj.weight",
    ]
    sparsifier = MagnitudeSparsifier()
    sparsifier.make_config_from_model(mixed(), {nn.Embedding})
    assert sparsifier.config == [{"tensor_fqn": "embed.weight"}]


def test_a_global_threshold_is_over_all_tensors():
    model = mixed()
    with torch.no_grad():
        model["out"].weight *= 100
    sparsifier = MagnitudeSparsifier(0.5, scope="global")
    sparsifier.prepare(model)
    sparsifier.step()
    names = ["conv", "embed", "out"]
    expected = global_masks([model[name].parametrizations.weight.original for name in names], 0.5)
    assert all(
        torch.equal(mask_of(model[name]) == 1, mask)
        for name, mask in zip(names, expected, strict=True)
    )
    assert level_of(mask_of(model["out"])) < 0.1
    assert level_of(torch.cat([mask_of(model[name]).flatten() for name in names])) == pytest.approx(
        0.5, abs=0.01
    )


def test_a_global_threshold_has_one_level():
    sparsifier = MagnitudeSparsifier(0.5, scope="global")
    sparsifier.prepare(
        mixed(),
        [{"tensor_fqn": "out.weight"}, {"tensor_fqn": "embed.weight", "sparsity_level": 0.9}],
    )
    with pytest.raises(
        ValueError, match=r"one sparsity level.*0\.5 for 'out\.weight', 0\.9 for 'embed\.weight'"
    ):
        sparsifier.step()
    with pytest.raises(ValueError, match="'tensor' or 'global'"):
        MagnitudeSparsifier(scope="layer")
    with pytest.raises(ValueError, match="from 0 to 1"):
        MagnitudeSparsifier(-0.1)


def test_what_is_pruned_stays_until_the_level_falls():
    model = single(1, 4)
    model[0].weight = nn.Parameter(torch.tensor([[1.0, 2.0, 3.0, 4.0]]))
    sparsifier = MagnitudeSparsifier(0.5)
    sparsifier.prepare(model)
    sparsifier.step()
    with torch.no_grad():
        model[0].parametrizations.weight.original.copy_(torch.tensor([[10.0, 20.0, 0.0, 0.0]]))
    sparsifier.step()
    assert mask_of(model[0]).tolist() == [[0, 0, 1, 1]]
    sparsifier.groups[0]["sparsity_level"] = 0.25
    sparsifier.step()
    assert mask_of(model[0]).tolist() == [[0, 1, 1, 1]]


def test_chance_depends_on_the_seed_and_the_name_alone():
    def masks(sparsifier, config=None):
        model = linears()
        sparsifier.prepare(model, config)
        sparsifier.step()
        return model

    a, b = (
        masks(RandomSparsifier(0.5, seed=1)),
        masks(RandomSparsifier(0.5, seed=1), [{"tensor_fqn": "2.0.weight"}]),
    )
    assert torch.equal(mask_of(a[2][0]), mask_of(b[2][0]))
    assert level_of(mask_of(a[0])) == 0.5
    assert not torch.equal(mask_of(a[0]), mask_of(masks(RandomSparsifier(0.5, seed=2))[0]))
    one, two = (RandomSparsifier(0.5, generator=torch.Generator().manual_seed(9)) for _ in range(2))
    assert one.defaults == two.defaults
    with pytest.raises(ValueError, match="not both"):
        RandomSparsifier(seed=1, generator=torch.Generator())


def test_a_rising_level_adds_to_chance():
    model = linears()
    sparsifier = RandomSparsifier(0.25, seed=1)
    sparsifier.prepare(model)
    sparsifier.step()
    before = mask_of(model[0]) == 0
    for group in sparsifier.groups:
        group["sparsity_level"] = 0.75
    sparsifier.step()
    assert (mask_of(model[0]) == 0)[before].all()
    assert level_of(mask_of(model[0])) == 0.75


# Rows and channels.


@pytest.mark.parametrize("level", [0.0, 0.3, 0.5, 0.7, 0.99, 1.0])
def test_rows_go_as_in_torch_and_their_bias_with_them(level):
    outputs, masks = [], []
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))
    for kind in (SaliencyPruner, their_pruners.SaliencyPruner):
        model = linears()
        pruner = kind({"sparsity_level": level})
        pruner.prepare(model, None)
        pruner.step()
        masks.append(
            [
                model[0].parametrizations.weight[0].mask.tolist(),
                model[2][0].parametrizations.weight[0].mask.tolist(),
            ]
        )
        outputs.append(model(x))
    assert masks[0] == masks[1]
    torch.testing.assert_close(outputs[0], outputs[1])


def test_squashed_rows_are_zero_and_the_bias_is_a_bias():
    # torch: the bias is lost as `_bias`, and no longer added by a model that is loaded from the state dict.
    model = linears()
    names = list(model.state_dict())
    pruner = SaliencyPruner({"sparsity_level": 0.5})
    pruner.prepare(model)
    assert "0.parametrizations.bias.original" in model.state_dict()
    model.load_state_dict(model.state_dict(), strict=True)
    pruner.step()
    x = torch.randn(3, 8)
    before = model(x)
    model.double().float()  # one mask for both, wherever the model goes
    gone = ~mask_of(model[0])
    assert mask_of(model[0]).dtype is torch.bool
    pruner.squash_mask()
    assert list(model.state_dict()) == names
    assert gone.sum() == 6
    assert (model[0].weight[gone] == 0).all()
    assert (model[0].bias[gone] == 0).all()
    assert torch.equal(model(x), before)


def test_a_bias_may_be_left_alone_and_columns_have_none():
    model = nn.Sequential(nn.Linear(4, 6), nn.Conv2d(2, 4, 3))
    pruner = SaliencyPruner({"sparsity_level": 0.5})
    pruner.prepare(
        model,
        [{"tensor_fqn": "0.weight", "prune_bias": False}, {"tensor_fqn": "1.weight", "dim": 1}],
    )
    pruner.step()
    assert (model[0].bias != 0).all()
    assert mask_of(model[1]).shape == (2,)
    assert ((model[1].weight == 0).flatten(2).all(2).all(0) == ~mask_of(model[1])).all()
    pruner.squash_mask()
    assert level_of(model[1].weight) == 0.5


def test_users_write_structured_sparsifiers_too():
    class Second(BaseStructuredSparsifier):
        def update_mask(self, module, tensor_name, **kwargs):
            getattr(module.parametrizations, tensor_name)[0].mask[1] = False

    model = linears()
    pruner = Second()
    pruner.prepare(model)
    pruner.step()
    assert (model[0].weight[1] == 0).all()
    assert model[0].bias[1] == 0
    assert pruner.state_dict()["state"]["0.weight"]["mask"]["shape"] == (12,)
    other, copied = Second(), linears()
    other.load_state_dict(pruner.state_dict(), model=copied)
    assert mask_of(copied[0]).dtype is torch.bool
    assert copied[0].bias[1] == 0


def test_what_structured_sparsifiers_refuse():
    with pytest.raises(Unsupported, match="patterns"):
        SaliencyPruner({}, patterns={})
    pruner = SaliencyPruner({})
    for config, text in (
        ({}, "no sparsity_level"),
        ({"sparsity_level": 2}, "from 0 to 1"),
        ({"sparsity_level": 0.5, "dim": 2}, "no axis 2"),
        (
            {"sparsity_level": 0.5, "mask": torch.ones(8, dtype=torch.bool)},
            r"\(8,\), and should have \(12,\)",
        ),
    ):
        with pytest.raises(ValueError, match=text):
            pruner.prepare(linears(), [{"tensor_fqn": "0.weight", **config}])
    with pytest.raises(Unsupported, match="not rewritten"):
        pruner.prune()
