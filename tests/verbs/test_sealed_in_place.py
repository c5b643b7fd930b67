"""What a seal lists is not rewritten in its own place: the seal would no longer fit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import obstore
import pytest

import holdfast
from holdfast.errors import NotCommitted
from holdfast.verbs.seals.check import seal_path
from holdfast.verbs.seals.document import SEAL

STATE = {"model.w": np.ones((4, 5), np.float32), "optim.m": np.ones(9, np.float32)}

VERBS: dict[str, Callable[[Path], object]] = {
    "edit": lambda path: holdfast.edit(path, in_place=True, drop=["optim.*"]),
    "tie": lambda path: holdfast.tie(path, in_place=True),
    "compact": lambda path: holdfast.compact(path, in_place=True),
    "convert": lambda path: holdfast.convert(
        path, path, drop=["optim.*"], overwrite=True, format="native" if path.is_dir() else None
    ),
}


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def assert_refused(path: Path, sealed: Path, rewrite: Callable[[Path], object]) -> None:
    before = contents(sealed.parent)
    with pytest.raises(NotCommitted) as refused:
        rewrite(path)
    assert repr(seal_path(sealed)) in refused.value.message
    assert f"`holdfast seal {sealed}`" in refused.value.message
    assert contents(sealed.parent) == before


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("name", ["checkpoint-5", "last.ckpt", "model.safetensors"])
def test_a_sealed_checkpoint_is_not_rewritten(tmp_path: Path, verb: str, name: str):
    path = tmp_path / "out" / name
    path.parent.mkdir()
    holdfast.save(STATE, path)
    holdfast.seal(path, step=5)
    assert_refused(path, path, VERBS[verb])


@pytest.mark.parametrize("verb", VERBS)
def test_a_step_of_a_run_is_not_rewritten(tmp_path: Path, verb: str):
    with holdfast.Run(tmp_path / "run") as run:
        run.save(1, STATE)
        path = Path(run[1].path)
    assert_refused(path, path, VERBS[verb])


def test_a_file_in_a_sealed_folder_is_not_rewritten(tmp_path: Path):
    inner = tmp_path / "pipe" / "unet"
    inner.mkdir(parents=True)
    holdfast.save(STATE, inner / "model.safetensors")
    holdfast.seal(tmp_path / "pipe", step=3)
    assert_refused(inner / "model.safetensors", tmp_path / "pipe", VERBS["edit"])
    assert_refused(inner, tmp_path / "pipe", VERBS["edit"])


def test_a_folder_with_a_sealed_file_is_not_rewritten(tmp_path: Path):
    folder = tmp_path / "model"
    folder.mkdir()
    holdfast.save(STATE, folder / "model.safetensors")
    holdfast.seal(folder / "model.safetensors", step=3)
    assert_refused(folder, folder / "model.safetensors", VERBS["edit"])


def test_a_link_to_a_sealed_file_is_not_rewritten(tmp_path: Path):
    path = tmp_path / "last.ckpt"
    holdfast.save(STATE, path)
    holdfast.seal(path, step=5)
    (tmp_path / "link.ckpt").symlink_to(path)
    assert_refused(tmp_path / "link.ckpt", path, VERBS["edit"])


def test_objects_with_a_seal_are_not_rewritten():
    store = obstore.store.MemoryStore()
    holdfast.save(STATE, "step-1", store=store)
    store.put(f"step-1/{SEAL}", b"{}")
    with (
        holdfast.open("step-1", store=store) as checkpoint,
        pytest.raises(NotCommitted, match=rf"step-1/{SEAL}.*remove the seal"),
    ):
        holdfast.edit(checkpoint, in_place=True, drop=["optim.*"])


def test_files_that_a_seal_around_does_not_list_are_rewritten(tmp_path: Path):
    (tmp_path / "step").mkdir()
    (tmp_path / "step" / "optimizer.bin").write_bytes(b"state")
    holdfast.seal(tmp_path / "step", step=3)
    holdfast.save(STATE, tmp_path / "step" / "model.pt")
    holdfast.edit(tmp_path / "step" / "model.pt", in_place=True, drop=["optim.*"])
    assert holdfast.verify(tmp_path / "step" / "model.pt").ok


def test_a_dry_run_and_another_target_are_allowed(tmp_path: Path):
    path = tmp_path / "last.safetensors"
    holdfast.save(STATE, path)
    holdfast.seal(path, step=5)
    assert not holdfast.edit(path, drop=["optim.*"], dry_run=True).done
    holdfast.edit(path, tmp_path / "new.safetensors", drop=["optim.*"])
    assert holdfast.verify(path).ok


def test_it_is_rewritten_and_sealed_again_as_the_message_says(tmp_path: Path):
    path = tmp_path / "last.safetensors"
    holdfast.save(STATE, path)
    holdfast.seal(path, step=5)
    Path(seal_path(path)).unlink()
    holdfast.edit(path, in_place=True, drop=["optim.*"])
    holdfast.seal(path, step=5)
    assert holdfast.verify(path).ok
