"""Names come back in the order in which they were saved, from every format that can store an order."""

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


def save(state: object, path: Path, way: str) -> Path:
    if way.startswith("sharded "):
        save_sharded(state, path, format=way.removeprefix("sharded "), durable=False)
    elif way == "folder":
        holdfast.save(state, path, format="safetensors", max_shard_size="1GB", durable=False)
    else:
        path = path.with_suffix(Path(way).suffix)
        holdfast.save(state, path, durable=False)
    return path


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


def check_order(path: Path, state: object, *, is_kept: bool) -> None:
    with holdfast.open(path) as ckpt:
        if is_kept:
            assert list(ckpt.keys()) == leaves(ckpt.tree) == leaves(state)
        assert sorted(ckpt.keys()) == sorted(leaves(state))


def is_for_safetensors(state: dict[str, object]) -> bool:
    return all(isinstance(value, torch.Tensor) for value in state.values())


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", STATES)
def test_the_order_of_names(kind: str, way: str, tmp_path: Path):
    state = STATES[kind]
    plain = way == "folder" or "safetensors" in way
    if plain and not is_for_safetensors(state):
        pytest.skip("safetensors hold tensors alone")
    path = save(state, tmp_path / "first", way)
    check_order(path, state, is_kept=not plain)
    with holdfast.open(path) as ckpt:
        before = dict.fromkeys(ckpt)
    targets = ["native", "x.pt", *(["x.safetensors"] if is_for_safetensors(state) else [])]
    for to in targets:
        target = tmp_path / f"to-{to}"
        holdfast.convert(path, target, durable=False)
        with holdfast.open(target) as ckpt:
            if to == "x.safetensors":
                assert sorted(ckpt) == sorted(before)
            else:
                assert list(ckpt) == list(before) == leaves(ckpt.tree)
