"""In place means in place: what was sealed is sealed again, with the step, the time and the metrics that it had."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import holdfast
from holdfast.engine.commit.transactions import FileTransaction
from holdfast.errors import CannotHold, DurabilityUncertain, NotCommitted
from holdfast.verbs.seals import renew as renewal
from holdfast.verbs.seals.check import read_seal
from holdfast.verbs.seals.document import SEAL, Seal, SealedFile, encode_seal, seal_name

METRICS = {"loss": 0.5}


def cut(path: str) -> None:
    holdfast.edit(path, in_place=True, drop=["optim.*"])


def convert_onto_itself(path: str) -> None:
    holdfast.convert(
        path, path, drop=["optim.*"], overwrite=True, format="native" if "run/" in path else None
    )


VERBS: dict[str, Callable[[str], object]] = {
    "edit": cut,
    "tie": lambda path: holdfast.tie(path, in_place=True),
    "compact": lambda path: holdfast.compact(path, in_place=True),
    "convert": convert_onto_itself,
}
each_verb = pytest.mark.parametrize("verb", VERBS)


def state(number: int) -> dict[str, object]:
    weights = np.full((40, 50), number, np.float32)
    return {
        "model": {"w": weights, "tied": weights.copy()},
        "optim": {"m": np.ones(9_000, np.float32)},
    }


def flat(number: int) -> dict[str, object]:
    return {"model.w": np.full((40, 50), number, np.float32), "optim.m": np.ones(9_000, np.float32)}


def folder_of(path: Path) -> Path:
    """What transformers leaves, sealed."""
    path.mkdir(parents=True)
    holdfast.save(flat(1), path / "model.safetensors")
    (path / "config.json").write_text('{"torch_dtype": "float32"}')
    (path / "optimizer.bin").write_bytes(b"another program's")
    holdfast.seal(path, step=5, metrics=METRICS)
    (path / "notes.txt").write_text("came later")
    return path


def file_of(path: Path) -> Path:
    """A single file, sealed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    holdfast.save(state(1), path)
    holdfast.seal(path, step=5, metrics=METRICS)
    return path


@each_verb
def test_best_keeps_a_step_that_was_rewritten(tmp_path: Path, verb: str):
    with holdfast.Run(tmp_path / "run", keep=["latest:1", "best:loss:1"]) as run:
        run.save(1, state(1), metrics={"loss": 1.0})
        run.save(2, state(2), metrics={"loss": 2.0})
        before = run[1]
    VERBS[verb](f"{before.path}")
    with holdfast.Run(tmp_path / "run", keep=["latest:1", "best:loss:1"]) as run:
        now = run[1]
        assert (now.step, now.saved, now.metrics) == (1, before.saved, {"loss": 1.0})
        assert run.latest(deep=True) is not None
        run.save(3, state(3), metrics={"loss": 3.0})
        run.save(4, state(4), metrics={"loss": 4.0})
        assert 1 in [step.step for step in run], "the best step was deleted"
    found = holdfast.verify(before.path)
    assert found.ok
    assert found.seal is not None
    assert found.seal.metrics == {"loss": 1.0}


@each_verb
@pytest.mark.parametrize("name", ["last.ckpt", "model.safetensors"])
def test_a_sealed_file_stays_a_step(tmp_path: Path, verb: str, name: str):
    path = file_of(tmp_path / "out" / name)
    old = read_seal(path)
    assert old is not None
    VERBS[verb](str(path))
    now = read_seal(path)
    assert now is not None
    assert (now.step, now.saved, now.metrics) == (old.step, old.saved, old.metrics)
    assert [one.before for one in now.files] == [None]
    assert now.files[0].nbytes == path.stat().st_size
    assert holdfast.verify(path).ok
    assert [(step.step, step.metrics) for step in holdfast.Run(tmp_path / "out")] == [(5, METRICS)]
    assert sorted(os.listdir(tmp_path / "out")) == [name, seal_name(name)]


@each_verb
def test_a_sealed_folder_stays_a_step(tmp_path: Path, verb: str):
    path = folder_of(tmp_path / "out" / "checkpoint-5")
    old = read_seal(path)
    assert old is not None
    VERBS[verb](str(path))
    now = read_seal(path)
    assert now is not None
    assert (now.step, now.saved, now.metrics) == (old.step, old.saved, old.metrics)
    assert [one.name for one in now.files] == ["config.json", "model.safetensors", "optimizer.bin"]
    assert all(one.digest is not None for one in now.files)
    assert holdfast.verify(path).ok
    assert [(step.step, step.metrics) for step in holdfast.Run(tmp_path / "out")] == [(5, METRICS)]
    (path / "model.safetensors").write_bytes((path / "model.safetensors").read_bytes()[:-1] + b"\1")
    assert not holdfast.verify(path).ok, "nothing vouches for the weights"


def test_a_cast_changes_the_config_and_what_the_seal_says_of_it(tmp_path: Path):
    path = folder_of(tmp_path / "checkpoint-5")
    holdfast.edit(path, in_place=True, dtype="bf16")
    assert "bfloat16" in (path / "config.json").read_text()
    assert holdfast.verify(path).ok


def test_sha256_stays_sha256(tmp_path: Path):
    path = folder_of(tmp_path / "checkpoint-5")
    holdfast.seal(path, overwrite=True, digest="sha256")
    cut(str(path))
    seal = read_seal(path)
    assert seal is not None
    assert {str(one.digest).partition(":")[0] for one in seal.files} == {"sha256"}
    assert holdfast.verify(path).ok


@pytest.mark.extras
def test_replaced_weights_of_an_archive(tmp_path: Path):
    path = tmp_path / "m.pt2"
    torch = pytest.importorskip("torch")
    from holdfast.torch import versions

    if not versions.PT2_ARCHIVE:
        pytest.skip(versions.PT2_ARCHIVE.reason)
    model = torch.nn.Linear(4, 4)
    torch.export.save(torch.export.export(model, (torch.ones(1, 4),)), path)
    holdfast.seal(path, step=5, metrics=METRICS)
    weights = {name: np.ones(value.shape, np.float32) for name, value in model.state_dict().items()}
    holdfast.save(weights, tmp_path / "w.safetensors")
    holdfast.replace_weights(path, weights=tmp_path / "w.safetensors", in_place=True)
    assert holdfast.verify(path).ok
    seal = read_seal(path)
    assert seal is not None
    assert seal.metrics == METRICS


def test_a_file_of_a_sealed_folder(tmp_path: Path):
    path = folder_of(tmp_path / "out" / "checkpoint-5")
    cut(str(path / "model.safetensors"))
    assert holdfast.verify(path).ok
    assert [(step.step, step.metrics) for step in holdfast.Run(tmp_path / "out")] == [(5, METRICS)]


def test_a_folder_in_a_sealed_one(tmp_path: Path):
    inner = folder_of(tmp_path / "pipe" / "unet")
    os.unlink(inner / SEAL)
    holdfast.seal(tmp_path / "pipe", step=3)
    holdfast.edit(inner, in_place=True, dtype="bf16")
    assert holdfast.verify(tmp_path / "pipe").ok
    with pytest.raises(CannotHold, match=r"model.safetensors' would go"):
        holdfast.edit(inner, in_place=True, rename={"model.w": "w"}, max_shard_size=20_000)
    assert holdfast.verify(tmp_path / "pipe").ok


def test_a_seal_that_another_seal_lists(tmp_path: Path):
    """Sealed: a file, the folder that it is in, and the folder that that is in; each seal is right again."""
    inner = folder_of(tmp_path / "pipe" / "unet")
    holdfast.seal(inner / "model.safetensors", step=4)
    holdfast.seal(inner, step=5, overwrite=True)
    holdfast.seal(tmp_path / "pipe", step=6)
    for edited in (inner / "model.safetensors", inner):
        holdfast.edit(edited, in_place=True, set_metadata={"edited": edited.name})
        for path, step in ((inner, 5), (tmp_path / "pipe", 6)):
            found = holdfast.verify(path)
            assert found.ok, found.problems
            assert found.seal is not None
            assert found.seal.step == step
            assert {"pipe": "unet/", "unet": ""}[path.name] + "model.safetensors.seal.json" in [
                one.name for one in found.seal.files
            ]


def test_by_a_link(tmp_path: Path):
    path = file_of(tmp_path / "out" / "last.ckpt")
    (tmp_path / "link.ckpt").symlink_to(path)
    cut(str(tmp_path / "link.ckpt"))
    assert (tmp_path / "link.ckpt").is_symlink()
    assert holdfast.verify(path).ok
    assert not (tmp_path / "link.ckpt.seal.json").exists()


@pytest.mark.parametrize("single", [True, False], ids=["file", "folder"])
def test_what_is_damaged_is_not_sealed_anew(tmp_path: Path, single: bool):
    path = (
        file_of(tmp_path / "last.safetensors") if single else folder_of(tmp_path / "checkpoint-5")
    )
    weights = path if single else path / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-1] + b"\1")
    with pytest.raises(NotCommitted, match="not as it was sealed"):
        cut(str(path))
    assert weights.read_bytes() == content[:-1] + b"\1"
    assert not holdfast.verify(path).ok


def test_damage_beside_the_weights_stays_visible(tmp_path: Path):
    path = folder_of(tmp_path / "checkpoint-5")
    (path / "optimizer.bin").write_bytes(b"another program'S")
    cut(str(path))
    found = holdfast.verify(path)
    assert [os.path.basename(str(problem.file)) for problem in found.problems] == ["optimizer.bin"]


def test_what_is_missing_stays_missing(tmp_path: Path):
    path = folder_of(tmp_path / "out" / "checkpoint-5")
    os.unlink(path / "optimizer.bin")
    cut(str(path))
    assert not holdfast.verify(path).ok
    assert list(holdfast.Run(tmp_path / "out")) == []


def test_a_seal_that_says_both_fits_the_old_and_the_new(tmp_path: Path):
    path = file_of(tmp_path / "out" / "last.ckpt")
    shutil.copy(path, tmp_path / "old.ckpt")
    old = read_seal(path)
    assert old is not None
    cut(str(path))
    new = read_seal(path)
    assert new is not None
    both = SealedFile("last.ckpt", new.files[0].nbytes, new.files[0].digest, before=old.files[0])
    text = encode_seal(Seal(5, new.saved, METRICS, (both,)))
    (tmp_path / "out" / "last.ckpt.seal.json").write_bytes(text)
    for content in ((tmp_path / "old.ckpt").read_bytes(), path.read_bytes()):
        path.write_bytes(content)
        assert holdfast.verify(path).ok
        (step,) = holdfast.Run(tmp_path / "out")
        assert (step.metrics, step.nbytes) == (METRICS, len(content))
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        assert not holdfast.verify(path).ok
        path.write_bytes(content)
        holdfast.compact(path, in_place=True)
        assert holdfast.verify(path).ok
        seal = read_seal(path)
        assert seal is not None
        assert [one.before for one in seal.files] == [None]
        (tmp_path / "out" / "last.ckpt.seal.json").write_bytes(text)


def test_a_seal_that_cannot_be_renewed_to_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The file is in place; its seal says both, and the error says so."""
    path, real, calls = file_of(tmp_path / "last.ckpt"), renewal.replace_file, []

    def failing(*args: object, **options: object) -> None:
        calls.append(args)
        if len(calls) == 2:
            raise NotCommitted("the disk is full")
        real(*args, **options)  # type: ignore[arg-type]  # as it was called

    monkeypatch.setattr(renewal, "replace_file", failing)
    with pytest.raises(DurabilityUncertain, match="in place"):
        cut(str(path))
    assert holdfast.verify(path).ok
    seal = read_seal(path)
    assert seal is not None
    assert seal.files[0].before is not None


def test_where_nothing_is_published_the_seal_is_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path, commit = file_of(tmp_path / "last.ckpt"), FileTransaction.commit
    before = (path.read_bytes(), (tmp_path / "last.ckpt.seal.json").read_bytes())

    def refuse(self: FileTransaction, *before_rename: Callable[[], None]) -> None:
        if self.path == str(path):
            raise NotCommitted("no", file=self.path)
        commit(self, *before_rename)

    monkeypatch.setattr(FileTransaction, "commit", refuse)
    with pytest.raises(NotCommitted):
        cut(str(path))
    assert (path.read_bytes(), (tmp_path / "last.ckpt.seal.json").read_bytes()) == before


@each_verb
def test_the_time_that_a_run_had_run_is_kept(tmp_path: Path, verb: str):
    """`Within` counts by it."""
    path = tmp_path / "m.ckpt"
    holdfast.save(flat(1), path, format="torch")
    holdfast.seal(path, step=5, metrics=METRICS, ran=77)
    VERBS[verb](str(path))
    seal = read_seal(path)
    assert seal is not None
    assert (seal.step, dict(seal.metrics), seal.ran) == (5, METRICS, 77.0)


def test_a_second_seal_says_what_the_first_said(tmp_path: Path):
    path = tmp_path / "m.ckpt"
    holdfast.save(flat(1), path, format="torch")
    holdfast.seal(path, step=5, metrics=METRICS, ran=77)
    first = read_seal(path)
    holdfast.seal(path, overwrite=True)
    assert read_seal(path) == first
    holdfast.seal(path, overwrite=True, step=6)
    second = read_seal(path)
    assert first is not None
    assert second is not None
    assert (second.step, second.ran) == (6, None)
    assert second.saved > first.saved
