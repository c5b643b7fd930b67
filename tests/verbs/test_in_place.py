"""A verb that rewrites a checkpoint in its own place never removes what somebody else saved there meanwhile."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

import holdfast
from holdfast.engine.commit.new_file import NewFile
from holdfast.errors import NotCommitted, Replaced
from holdfast.verbs.seals.check import read_seal

VERBS: dict[str, Callable[..., object]] = {
    "edit": lambda source, **options: holdfast.edit(
        source, in_place=True, drop=["model.bias"], **options
    ),
    "tie": lambda source, **options: holdfast.tie(source, in_place=True, **options),
    "compact": lambda source, **options: holdfast.compact(source, in_place=True, **options),
}
FILES = ["a.pt", "a.safetensors"]
each_verb = pytest.mark.parametrize("verb", VERBS)


def state(step: int) -> dict[str, object]:
    weight = np.full((64, 64), step, np.float32)
    return {"model": {"weight": weight, "bias": np.full(64, step, np.float32)}}


def step_at(path: Path) -> float:
    """Return the step of the checkpoint at a path."""
    with holdfast.open(path) as checkpoint:
        return float(checkpoint["model.weight"].numpy()[0, 0])


def save_by_rename(path: Path, step: int) -> None:
    """Save a step as trainers do: beside the old one, and then moved onto it."""
    new = path.with_name(f"new-{path.name}")
    holdfast.save(state(step), new)
    os.replace(new, path)


def model_folder(path: Path, step: int) -> Path:
    """Make a Hugging Face folder of a step."""
    path.mkdir()
    holdfast.save(state(step), path / "model.safetensors")
    (path / "config.json").write_text('{"model_type": "llama", "torch_dtype": "float32"}')
    (path / "tokenizer.json").write_text("{}")
    return path


class During:
    """A progress callback that does something once, while the new checkpoint is written."""

    def __init__(self, act: Callable[[], object]) -> None:
        self.act = act
        self.was_called = False

    def __call__(self, nbytes: int) -> None:
        if not self.was_called:
            self.was_called = True
            self.act()


def act_before_the_flush(
    monkeypatch: pytest.MonkeyPatch, path: Path, act: Callable[[], object]
) -> None:
    """Call a function once, when the new file of a path is about to be flushed."""
    sync = NewFile.sync

    def act_and_sync(file: NewFile) -> None:
        if file.path == str(path):
            monkeypatch.setattr(NewFile, "sync", sync)
            act()
        sync(file)

    monkeypatch.setattr(NewFile, "sync", act_and_sync)


@each_verb
@pytest.mark.parametrize("name", [*FILES, "a"])
def test_a_step_saved_since_it_was_opened_stays(tmp_path: Path, verb: str, name: str):
    path = tmp_path / name
    holdfast.save(state(1), path)
    with holdfast.open(path) as checkpoint:
        holdfast.save(state(2), path, overwrite=True)
        # What is left of a folder that was replaced cannot be read, which may show first.
        with pytest.raises((NotCommitted, Replaced)):
            VERBS[verb](checkpoint)
    assert step_at(path) == 2
    assert os.listdir(tmp_path) == [name]


@each_verb
@pytest.mark.parametrize("name", FILES)
def test_a_step_saved_while_it_is_rewritten_stays(tmp_path: Path, verb: str, name: str):
    path = tmp_path / name
    holdfast.save(state(1), path)
    meddle = During(lambda: save_by_rename(path, 2))
    with pytest.raises(NotCommitted, match=rf"replaced or removed after it was opened \({name}\)"):
        VERBS[verb](path, progress=meddle)
    assert meddle.was_called
    assert step_at(path) == 2
    assert os.listdir(tmp_path) == [name]


@pytest.mark.parametrize("name", FILES)
def test_a_step_saved_while_the_new_file_is_flushed_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
):
    """The fsync of a large file takes long, and the rename comes after it."""
    path = tmp_path / name
    holdfast.save(state(1), path)
    act_before_the_flush(monkeypatch, path, lambda: save_by_rename(path, 2))
    with pytest.raises(NotCommitted):
        VERBS["edit"](path)
    assert step_at(path) == 2


@each_verb
@pytest.mark.parametrize("name", FILES)
def test_a_file_deleted_meanwhile_stays_deleted(tmp_path: Path, verb: str, name: str):
    path = tmp_path / name
    holdfast.save(state(1), path)
    with pytest.raises(NotCommitted):
        VERBS[verb](path, progress=During(path.unlink))
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("name", FILES)
def test_a_file_rewritten_by_another_path_is_seen(tmp_path: Path, name: str):
    """The source is opened by a link, which leads to the next step by the time of the rename."""
    for step in (1, 2):
        holdfast.save(state(step), tmp_path / f"{step}-{name}")
    link = tmp_path / name
    link.symlink_to(f"1-{name}")

    def point_to_the_next_step() -> None:
        link.unlink()
        link.symlink_to(f"2-{name}")

    with pytest.raises(NotCommitted):
        VERBS["edit"](link, progress=During(point_to_the_next_step))
    assert [step_at(tmp_path / f"{step}-{name}") for step in (1, 2)] == [1, 2]


@pytest.mark.parametrize(
    "convert_onto_itself",
    [
        lambda path, checkpoint: holdfast.convert(path, path, dtype="bf16", overwrite=True),
        lambda path, checkpoint: holdfast.save(checkpoint, path),
        lambda path, checkpoint: holdfast.save({"model": {"w": checkpoint["model.weight"]}}, path),
    ],
    ids=["convert", "save", "save of one tensor"],
)
@pytest.mark.parametrize("name", FILES)
def test_other_verbs_that_replace_what_they_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, convert_onto_itself: Callable
):
    path = tmp_path / name
    holdfast.save(state(1), path)
    with holdfast.open(path) as checkpoint:
        act_before_the_flush(monkeypatch, path, lambda: save_by_rename(path, 2))
        with pytest.raises(NotCommitted):
            convert_onto_itself(path, checkpoint)
    assert step_at(path) == 2


def test_weights_of_an_archive_saved_meanwhile_stay(tmp_path: Path):
    path = tmp_path / "m.pt2"
    model = torch.nn.Linear(4, 4)
    exported = torch.export.export(model, (torch.ones(1, 4),))
    torch.export.save(exported, path)
    newer = tmp_path / "newer.pt2"
    shutil.copy(path, newer)
    content = newer.read_bytes()
    weights = {name: tensor.detach().numpy() for name, tensor in model.state_dict().items()}
    inode = newer.stat().st_ino
    with pytest.raises(NotCommitted):
        holdfast.replace_weights(
            path, in_place=True, weights=weights, progress=During(lambda: os.replace(newer, path))
        )
    assert (path.read_bytes(), path.stat().st_ino) == (content, inode)


def test_a_checkpoint_without_tensors_is_seen_as_well(tmp_path: Path):
    path = tmp_path / "a.pt"
    holdfast.save({"step": 1, "extra": 0}, path)
    with holdfast.open(path) as checkpoint:
        holdfast.save({"step": 2, "extra": 0}, path)
        with pytest.raises(NotCommitted):
            holdfast.compact(checkpoint, in_place=True)
    assert torch.load(path, weights_only=True)["step"] == 2


def rewrite_config(path: Path) -> None:
    new = path / "config.json.new"
    new.write_text('{"model_type": "llama", "torch_dtype": "float32", "step": 2}')
    os.replace(new, path / "config.json")


def add_a_shard(path: Path) -> None:
    (path / "model-00002-of-00002.safetensors").write_bytes(b"of the next step")


def replace_the_folder(path: Path) -> None:
    new = model_folder(path.with_name(f"new-{path.name}"), step=2)
    os.rename(path, path.with_name(f"old-{path.name}"))
    os.rename(new, path)


@each_verb
@pytest.mark.parametrize(
    "change",
    [
        rewrite_config,
        lambda path: (path / "tokenizer.json").unlink(),
        lambda path: save_by_rename(path / "model.safetensors", 2),
        add_a_shard,
        replace_the_folder,
        shutil.rmtree,
    ],
    ids=["config", "deleted file", "weights", "new file", "folder", "deleted folder"],
)
def test_files_of_a_folder_that_changed_meanwhile_stay(
    tmp_path: Path, verb: str, change: Callable[[Path], object]
):
    path = model_folder(tmp_path / "a", step=1)
    expected = model_folder(tmp_path / "b", step=1)
    change(expected)

    def content_of(folder: Path) -> dict[str, bytes]:
        return {file.name: file.read_bytes() for file in folder.glob("*")}

    with pytest.raises(NotCommitted, match="changed, replaced or removed after it was opened"):
        VERBS[verb](path, progress=During(lambda: change(path)), threads=1)
    assert content_of(path) == content_of(expected)
    assert path.exists() == expected.exists()
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".")]


@pytest.mark.parametrize("moment", ["while it is written", "while it is flushed"])
def test_a_newer_seal_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str):
    """The seal beside a file is not replaced either when the file turns out to be a newer one."""
    path = tmp_path / "last.ckpt"
    holdfast.save(state(1), path)

    def save_and_seal() -> None:
        save_by_rename(path, 2)
        holdfast.seal(path, step=2)

    progress = During(save_and_seal)
    if moment == "while it is flushed":
        act_before_the_flush(monkeypatch, path, save_and_seal)
        progress = During(lambda: None)
    with pytest.raises(NotCommitted):
        VERBS["edit"](path, progress=progress)
    seal = read_seal(path)
    assert seal is not None
    assert seal.step == 2
    assert holdfast.verify(path).ok
