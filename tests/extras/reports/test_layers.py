"""From names to layers, roles and experts."""

from __future__ import annotations

import doctest

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.extras.reports import document, measures, structure
from holdfast.extras.reports.structure import places


@pytest.mark.parametrize("module", [document, measures, structure])
def test_the_examples(module):
    assert doctest.testmod(module).failed == 0


@pytest.mark.parametrize(
    ("name", "layer", "role", "expert"),
    [
        (
            "model.layers.31.self_attn.q_proj.weight",
            31,
            "model.layers.*.self_attn.q_proj.weight",
            -1,
        ),
        (
            "model.layers.3.block_sparse_moe.experts.7.w1.weight",
            3,
            "model.layers.*.block_sparse_moe.experts.*.w1.weight",
            7,
        ),
        ("transformer.h.0.ln_1.bias", 0, "transformer.h.*.ln_1.bias", -1),
        ("blk.12.ffn_gate_exps.weight", 12, "blk.*.ffn_gate_exps.weight", -1),
        ("down_blocks.1.resnets.0.conv1.weight", 1, "down_blocks.*.resnets.0.conv1.weight", -1),
        ("experts.5.w", -1, "experts.*.w", 5),
        ("layer1.0.conv1.weight", 0, "layer1.*.conv1.weight", -1),
        ("lm_head.weight", -1, "lm_head.weight", -1),
        ("0", 0, "*", -1),
        ("", -1, "", -1),
        ("h.٣.w", -1, "h.٣.w", -1),
        ("h.99999999999999999999.w", -1, "h.99999999999999999999.w", -1),
    ],
)
def test_a_name(name, layer, role, expert):
    (place,) = places([name])
    assert (place.layer, place.role, place.expert) == (layer, role, expert)


PART = st.sampled_from(
    [
        "layers",
        "experts",
        "0",
        "1",
        "7",
        "12",
        "w",
        "Dense_0",
        "Dense_1",
        "Dense_2",
        "ln_1",
        "\n",
        "",
        "é3",
    ]
)


@given(st.lists(st.lists(PART, min_size=1, max_size=6).map(".".join), max_size=12))
def test_a_role_is_a_name_without_its_numbers(names):
    for name, place in zip(names, places(names), strict=True):
        numbers = [place.layer, place.expert]
        if "*" not in place.role:
            assert place.role == name
            assert numbers == [-1, -1]
            continue
        taken = [number for number in numbers if number >= 0]
        parts = place.role.split("*")
        assert len(parts) == len(taken) + 1
        orders = {
            parts[0] + "".join(f"{n}{part}" for n, part in zip(order, parts[1:], strict=True))
            for order in (taken, taken[::-1])
        }
        assert name in orders


@given(st.lists(st.lists(PART, min_size=1, max_size=6).map(".".join), max_size=12))
def test_two_tensors_of_one_place_have_one_name(names):
    names = list(dict.fromkeys(names))
    found = places(names)
    assert len(set(found)) == len(names)
