"""A state that nests 5,000 levels deep: every verb takes it, or says which limit it passes. None runs out of frames."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import holdfast
import holdfast.torch
from holdfast.cli.outline import outline
from holdfast.core.tree import iterate_leaves, join_path
from holdfast.errors import CannotHold, HoldfastError, LimitExceeded
from holdfast.extras.runs.fill import fill, loaded
from holdfast.torch.ranks.staging import versions
from holdfast.verbs.describe import metadata_of
from tests.hostile.craft_pickle import stream, text
from tests.hostile.craft_torch import torch_zip, weight

DEEP = 5_000
ROOMY = holdfast.Limits(depth=2 * DEEP)
WRITTEN = np.array([[1, 2], [3, 4]], np.float32)


def nested(kind: str, leaf: object) -> dict[str, object]:
    value = leaf
    for _ in range(DEEP):
        value = {"a": value} if kind == "dict" else [value] if kind == "list" else (value,)
    return {"x": value}


def innermost(state: object) -> object:
    value = state
    while isinstance(value, dict | list | tuple):
        (value,) = value.values() if isinstance(value, dict) else value
    return value


@pytest.fixture(scope="module", params=["dict", "list", "tuple"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def path(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of torch with such a state, put together from opcodes: picklers call themselves."""
    before, behind = {
        "dict": (b"}" + text("a"), b"s"),
        "list": (b"]", b"a"),
        "tuple": (b"", b"\x85"),
    }[kind]
    target = tmp_path_factory.mktemp("deep") / f"{kind}.pt"
    target.write_bytes(
        torch_zip(stream(b"}" + text("x") + before * DEEP + weight() + behind * DEEP + b"s"))
    )
    return target


def test_the_usual_limit_refuses_it(path: Path) -> None:
    with pytest.raises(LimitExceeded, match="depth=64"):
        holdfast.open(path)


def test_open_scan_diff_and_show(path: Path) -> None:
    with holdfast.open(path, limits=ROOMY) as checkpoint:
        assert [join_path(path) for path, _ in iterate_leaves(checkpoint.tree)] == [*checkpoint]
        outline(checkpoint)
        metadata_of(checkpoint, stored_nbytes=path.stat().st_size, flat=False)
    assert holdfast.diff(path, path, limits=ROOMY).equal
    holdfast.scan(path, limits=ROOMY)


def test_what_is_kept_dropped_and_renamed(path: Path, tmp_path: Path) -> None:
    holdfast.convert(path, tmp_path / "all.safetensors", tensors_only=True, limits=ROOMY)
    with pytest.raises(CannotHold):
        holdfast.convert(path, tmp_path / "kept.pt", keep=["x.*"], limits=ROOMY)
    holdfast.convert(path, tmp_path / "moved.pt", rename=[("x.*", "y.*")], limits=ROOMY)
    with holdfast.open(tmp_path / "moved.pt") as checkpoint:
        (name,) = checkpoint
        assert name.startswith("y.")
        assert [*checkpoint.tree] == [name]
    holdfast.convert(path, tmp_path / "none.pt", drop=["x.*"], limits=ROOMY)
    with holdfast.open(tmp_path / "none.pt") as checkpoint:
        assert checkpoint.tree == {}


def test_a_state_in_memory_is_refused_by_its_path(kind: str, tmp_path: Path) -> None:
    for leaf, target in ((np.zeros(2), "s.pt"), (torch.zeros(2), "s.safetensors"), (3, "s")):
        with pytest.raises(CannotHold, match="nested deeper than Limits"):
            holdfast.save(nested(kind, leaf), tmp_path / target)
    with pytest.raises(HoldfastError):
        holdfast.torch.save_sharded(tmp_path / "ranks", nested(kind, torch.zeros(2)))
    with pytest.raises(HoldfastError):
        holdfast.torch.load_sharded(_small(tmp_path), nested(kind, torch.zeros(2)))


def _small(folder: Path) -> Path:
    holdfast.save({"w": torch.zeros(2)}, folder / "small.pt")
    return folder / "small.pt"


def test_it_is_loaded_and_filled(path: Path, kind: str) -> None:
    with holdfast.open(path, limits=ROOMY) as checkpoint:
        assert np.array_equal(innermost(loaded(checkpoint)), WRITTEN)
        mine = np.zeros((2, 2), np.float32)
        assert innermost(fill(nested(kind, mine), checkpoint)) is mine
        assert np.array_equal(mine, WRITTEN)
        theirs = torch.zeros(2, 2)
        holdfast.torch.load_into(nested(kind, theirs), checkpoint)
        assert torch.equal(theirs, torch.from_numpy(WRITTEN))
    assert torch.equal(innermost(holdfast.torch.load(path)), torch.from_numpy(WRITTEN))


def test_what_contains_itself_is_told(tmp_path: Path) -> None:
    state: dict[str, object] = {"w": torch.zeros(2)}
    state["self"] = {"again": state}
    with pytest.raises(ValueError, match=r"self\.again contains itself"):
        holdfast.torch.load_into(state, _small(tmp_path))
    with pytest.raises(ValueError, match="contains itself"):
        holdfast.torch.load_sharded(_small(tmp_path), state)
    assert len(versions(state).tensors) == 1
