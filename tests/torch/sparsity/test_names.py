"""The functions around modules and their names, and the parametrizations that hold masks."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

from holdfast.torch.sparsity import (
    FakeSparsity,
    FakeStructuredSparsity,
    fqn_to_module,
    get_arg_info_from_tensor_fqn,
    module_contains_param,
    module_to_fqn,
    swap_module,
)
from tests.torch.sparsity.models import linears


class Sparse(nn.Linear):
    @classmethod
    def from_dense(cls, mod):
        made = cls(mod.in_features, mod.out_features, bias=mod.bias is not None)
        made.weight = nn.Parameter(mod.weight.detach().clone())
        return made


def test_a_module_has_a_name_and_a_name_a_module():
    model = linears()
    for name, module in model.named_modules():
        assert module_to_fqn(model, module) == name
        assert fqn_to_module(model, name) is module
    assert module_to_fqn(model, nn.Linear(2, 2)) is None


def test_a_prefix_is_put_before_the_name_and_not_before_the_model():
    model = linears()
    assert module_to_fqn(model, model[2][0], "net.") == "net.2.0"
    assert module_to_fqn(model, model, "net.") == ""


@pytest.mark.parametrize(
    "name", ["foo.bar", ".0", "0.", "2..0", "0.in_features", "0.weight.nope", "0.forward"]
)
def test_what_is_not_there_is_none(name):
    assert fqn_to_module(linears(), name) is None


def test_names_reach_tensors_and_no_model_has_no_names():
    model = linears()
    assert fqn_to_module(model, "2.1.weight") is model[2][1].weight
    assert fqn_to_module(None, "2") is None


def test_a_tensor_name_is_taken_apart():
    model = linears()
    assert get_arg_info_from_tensor_fqn(model, "2.0.weight") == {
        "module_fqn": "2.0",
        "module": model[2][0],
        "tensor_name": "weight",
        "tensor_fqn": "2.0.weight",
    }
    assert get_arg_info_from_tensor_fqn(model[0], "weight")["module"] is model[0]
    assert get_arg_info_from_tensor_fqn(model, "a.b.c") == {
        "module_fqn": "a.b",
        "module": None,
        "tensor_name": "c",
        "tensor_fqn": "a.b.c",
    }
    assert (
        get_arg_info_from_tensor_fqn(model, "0.weight.data")["module"] is None
    )  # a tensor is no module


def test_a_parametrization_is_found_on_any_tensor():
    module = nn.Linear(3, 2)
    assert not module_contains_param(module, FakeSparsity)
    parametrize.register_parametrization(module, "bias", FakeSparsity(torch.ones(2)))
    assert module_contains_param(module, FakeSparsity)
    assert not module_contains_param(module, FakeStructuredSparsity)


def test_a_swapped_module_keeps_hooks_and_a_parametrized_one_is_known_by_its_old_class():
    module = nn.Linear(3, 2)
    seen = []
    module.register_forward_pre_hook(lambda *_: seen.append("before"))
    module.register_forward_hook(lambda *_: seen.append("after"))
    parametrize.register_parametrization(
        module, "weight", FakeSparsity(torch.tensor([[1.0, 0, 1], [0, 0, 1]]))
    )
    made = swap_module(module, {nn.Linear: Sparse})
    assert type(made) is Sparse
    assert torch.equal(made.weight, module.weight)
    made(torch.ones(1, 3))
    assert seen == ["before", "after"]
    assert swap_module(module, {}) is module
    assert swap_module(made, {nn.Linear: Sparse}) is made


def test_a_module_on_two_devices_is_not_swapped():
    module = nn.Linear(3, 2)
    module.bias = nn.Parameter(torch.zeros(2, device="meta"))
    with pytest.raises(ValueError, match="cpu, meta"):
        swap_module(module, {nn.Linear: Sparse})


def test_a_mask_multiplies_and_lets_gradients_through_where_it_keeps():
    weight = torch.arange(1.0, 7.0).view(2, 3).requires_grad_()
    mask = torch.tensor([[1.0, 0, 1], [0, 1, 0]])
    FakeSparsity(mask)(weight).sum().backward()
    assert torch.equal(FakeSparsity(mask)(weight), weight * mask)
    assert torch.equal(weight.grad, mask)


def test_a_mask_of_another_shape_is_refused_before_it_is_on_a_module():
    module = nn.Linear(3, 4)
    with pytest.raises(ValueError, match=r"\(3, 3\).*\(4, 3\)"):
        parametrize.register_parametrization(module, "weight", FakeSparsity(torch.ones(3, 3)))
    assert not parametrize.is_parametrized(module)
    with pytest.raises(ValueError, match="mask length 2 must match axis 0"):
        FakeStructuredSparsity(torch.ones(2, dtype=torch.bool))(torch.ones(3, 3))
    with pytest.raises(ValueError, match="one dimension"):
        FakeStructuredSparsity(torch.ones(2, 2))


@pytest.mark.parametrize("dim", [0, 1])
def test_a_structured_mask_takes_rows_or_channels(dim):
    weight = torch.ones(3, 3, 2, 2)
    kept = FakeStructuredSparsity(torch.tensor([True, False, True]), dim)(weight)
    assert kept.select(dim, 1).eq(0).all()
    assert kept.sum() == 24


def test_a_masks_state_is_empty_and_asks_for_nothing():
    fake = FakeSparsity(torch.ones(2, 2))
    assert fake.state_dict() == {}
    assert not fake.load_state_dict({}, strict=True).missing_keys
    assert "mask" in dict(fake.named_buffers())
