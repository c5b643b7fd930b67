"""Every map that is shipped, against what the frameworks' own converters did with numbered elements (tests/maps/oracles)."""

from __future__ import annotations

import json
from hashlib import blake2b
from pathlib import Path

import numpy as np
import pytest

import holdfast
from holdfast.errors import DoesNotFit
from holdfast.maps.find import Map, families
from holdfast.maps.mapped import mapped

FOLDER = Path(__file__).parent / "oracles"
PADDED = ("embedding.word_embeddings", "output_layer")
RECORDED = sorted(path.stem for path in FOLDER.glob("*.json"))


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
    family = families().get(recorded["family"])
    if family is None or not {recorded["from"], recorded["to"]} <= family.layouts.keys():
        pytest.skip("recorded, and not shipped")
    source = numbered([row[:2] for row in recorded["source"]])
    checkpoint = holdfast.open(holdfast.to_bytes(source, format="safetensors"))
    chosen = Map(family, recorded["from"], recorded["to"])
    target = {row[0]: row[1:] for row in recorded["target"]}
    if "padded" in recorded["variant"]:
        # Rows that stand for no word: a map makes none, and drops none.
        if recorded["from"] == "megatron":
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
