"""Names come back in the order that they were saved in, from every format that can hold it; where one cannot, a note says so."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path

import pytest
import torch

import holdfast
from holdfast.torch import save_sharded

W = torch.arange(6.0).view(2, 3)


def ones(n: int) -> torch.Tensor:
    return torch.ones(n)


STATES: dict[str, dict[str, object]] = {
    "plain": {"z": ones(1), "a": ones(2), "m": ones(3)},
    "tied": {"embed": W, "head": W, "norm": ones(3)},
    "tied twice": {"z": ones(1), "a": W, "b": (x := ones(2)), "d": x, "c": W, "norm": ones(3)},
    "tied at the end": {"norm": ones(3), "embed": W, "head": W},
    "nested": {"z": {"b": ones(2), "a": ones(1)}, "step": 3, "a": [ones(1)]},
    "nested, tied": {"model": {"embed": W, "head": W, "norm": ones(3)}, "step": 3},
    "ordered": OrderedDict(z=W, a=ones(2), h=W, b=ones(1)),
    "views": {"whole": W, "row": W[0], "norm": ones(3)},
    "by numbers": {f"layers.{i}.w": ones(1) for i in (0, 1, 2, 10, 11)},
    "many": {f"{i % 7}.{i}": W if i in (3, 5) else ones(1) for i in range(64)},
}
WAYS = (
    "native",
    "x.safetensors",
    "x.pt",
    "folder",
    "sharded native",
    "sharded dcp",
    "sharded safetensors",
)
NOTE = "names are in the order of the file (by dtype, then by name), not in that of the state"


def save(state: object, path: Path, way: str) -> tuple[Path, tuple[str, ...]]:
    if way.startswith("sharded "):
        return path, save_sharded(
            state, path, format=way.removeprefix("sharded "), durable=False
        ).notes
    if way == "folder":
        return path, holdfast.save(
            state, path, format="safetensors", max_shard_size="1GB", durable=False
        ).notes
    path = path.with_suffix(Path(way).suffix)
    return path, holdfast.save(state, path, durable=False).notes


def leaves(value: object, at: str = "") -> list[str]:
    """The names of the tensors in a state, in its order."""
    items = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    if isinstance(value, torch.Tensor | holdfast.LazyTensor):
        return [at]
    return [name for key, inside in items for name in leaves(inside, f"{at}.{key}".lstrip("."))]


def check_order(path: Path, state: object, notes: tuple[str, ...]) -> None:
    with holdfast.open(path) as ckpt:
        kept = list(ckpt.keys()) == leaves(ckpt.tree) == leaves(state)
        assert sorted(ckpt.keys()) == sorted(leaves(state))
    assert kept != (NOTE in notes), notes


def is_for_safetensors(state: dict[str, object]) -> bool:
    return all(isinstance(value, torch.Tensor) for value in state.values())


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", STATES)
def test_the_order_of_names(kind: str, way: str, tmp_path: Path):
    state = STATES[kind]
    plain = way == "folder" or "safetensors" in way
    if plain and not is_for_safetensors(state):
        pytest.skip("safetensors hold tensors alone")
    path, notes = save(state, tmp_path / "first", way)
    check_order(path, state, notes)
    assert plain or NOTE not in notes
    with holdfast.open(path) as ckpt:
        before = dict.fromkeys(ckpt)
    targets = ["native", "x.pt", *(["x.safetensors"] if is_for_safetensors(state) else [])]
    for to in targets:
        target = tmp_path / f"to-{to}"
        done = holdfast.convert(path, target, durable=False)
        with holdfast.open(target) as ckpt:
            assert (list(ckpt) == list(before) == leaves(ckpt.tree)) != (NOTE in done.notes), (
                to,
                done.notes,
            )
        assert NOTE not in done.notes or to == "x.safetensors"
