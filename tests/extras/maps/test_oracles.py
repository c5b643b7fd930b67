"""Every map that is shipped, against what the frameworks' own converters did with numbered elements (tests/extras/maps/oracles)."""

from __future__ import annotations

import json
from hashlib import blake2b
from pathlib import Path

import numpy as np
import pytest

import holdfast
from holdfast.errors import DoesNotFit
from holdfast.extras.maps.find import Map, families
from holdfast.extras.maps.mapped import mapped

FOLDER = Path(__file__).parent / "oracles"
PADDED = ("embedding.word_embeddings", "output_layer")
RECORDED = sorted(path.stem for path in FOLDER.glob("*.json"))

SAME_FAMILY = {"mistral": "llama"}
SAME_LAYOUT = {
    ("qwen3", "megatron-local"): "megatron"
}  # Of a dense model both kinds of modules write the same.
NOT_SHIPPED = {
    (
        "gemma3_text",
        "gguf",
    ): "the converter adds 1 to norms, and a map moves elements without a change",
    (
        "gpt_oss",
        "titan",
    ): "TorchTitan's converter loses all weights of experts, so nothing says where they belong",
}
NOT_RECORDED = {"megatron-layers"}  # By rule the same as megatron, layer by layer.


def shipped(recorded: dict[str, object]) -> tuple[str, str, str]:
    """The family and the two layouts that are to do what was recorded."""
    family = str(recorded["family"])
    start, end = (
        SAME_LAYOUT.get((family, str(one)), str(one)) for one in (recorded["from"], recorded["to"])
    )
    return SAME_FAMILY.get(family, family), start, end


def numbered(tensors: list[list[object]]) -> dict[str, np.ndarray]:
    """Arrays with a number for each element, counted through all of them."""
    made, first = {}, 0
    for name, shape in tensors:
        size = int(np.prod(shape))
        made[name] = np.arange(first, first + size).reshape(shape)
        first += size
    return made


def digest(array: np.ndarray) -> str:
    return blake2b(np.ascontiguousarray(array, "<i8").tobytes(), digest_size=16).hexdigest()[:16]


@pytest.mark.parametrize("name", RECORDED)
def test_a_map_puts_each_element_where_the_framework_puts_it(name: str):
    recorded = json.loads((FOLDER / f"{name}.json").read_text())
    name_of_family, start, end = shipped(recorded)
    family = families()[name_of_family]
    for layout in (start, end):
        if (family.name, layout) in NOT_SHIPPED:
            assert layout not in family.layouts
            pytest.skip(NOT_SHIPPED[family.name, layout])
    source = numbered([row[:2] for row in recorded["source"]])
    checkpoint = holdfast.open(holdfast.to_bytes(source, format="safetensors"))
    chosen = Map(family, start, end)
    target = {row[0]: row[1:] for row in recorded["target"]}
    if "padded" in recorded["variant"]:
        # Rows that stand for no word: a map makes none, and drops none.
        if start == "megatron":
            with pytest.raises(DoesNotFit, match="word_embeddings"):
                chosen.bind(checkpoint, recorded["config"])
            return
        target = {one: row for one, row in target.items() if not one.startswith(PADDED)}
    bound = chosen.bind(checkpoint, recorded["config"])
    found = mapped(checkpoint, bound, lambda one: one)
    if "padded" in recorded["variant"]:
        found = {one: tensor for one, tensor in found.items() if not one.startswith(PADDED)}
    assert {one: (list(found[one].shape), digest(found[one].numpy())) for one in found} == {
        one: (shape, number) for one, (shape, number) in target.items()
    }
    assert sorted(bound.dropped) == sorted(recorded["left_out"])


def test_every_layout_that_is_shipped_was_recorded():
    ours = {
        (name, layout)
        for name, family in families().items()
        for layout in family.layouts
        if layout not in NOT_RECORDED
    }
    seen = [shipped(json.loads((FOLDER / f"{name}.json").read_text())) for name in RECORDED]
    assert (
        ours == {(family, layout) for family, *ends in seen for layout in ends} - NOT_SHIPPED.keys()
    )
    assert all(family.about and family.model_types for family in families().values())
