"""`holdfast.seal`: folders of other trainers, what is found out about them, what is refused, and what `verify` then finds."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import holdfast
from holdfast.core.limits import Limits
from holdfast.errors import BadArgument, BadPath, LimitExceeded, NotCommitted
from holdfast.verbs.seals import make as sealing
from holdfast.verbs.seals.check import check_sizes, compared, read_seal
from holdfast.verbs.seals.document import SEAL, parse_seal
from tests.support import flip_bit

torch = pytest.importorskip("torch")

LOG = [
    {"loss": 3.0, "step": 400},
    {"eval_loss": 2.5, "eval_runtime": 9.0, "step": 400},
    {"eval_loss": float("nan"), "eval_accuracy": 0.5, "eval_samples_per_second": 9.0, "step": 500},
    {"eval_other_loss": 1, "step": 500},
    {"loss": 2.0, "step": 500},
]


def trainer(folder: Path, *, name: str = "checkpoint-500", step: object = 500) -> Path:
    """What transformers' Trainer writes."""
    path = folder / name
    path.mkdir()
    holdfast.save({"w": np.arange(300, dtype=np.float32)}, path / "model.safetensors")
    torch.save({"state": {0: torch.zeros(100)}}, path / "optimizer.pt")
    torch.save({"python": 1}, path / "rng_state.pth")
    torch.save({"lr": 0.1}, path / "training_args.bin")
    (path / "trainer_state.json").write_text(json.dumps({"global_step": step, "log_history": LOG}))
    return path


def lightning(path: Path, *, step: int = 70) -> Path:
    monitor = {
        "monitor": "val_loss",
        "current_score": torch.tensor(1.25),
        "best_model_score": torch.tensor(0.5),
    }
    torch.save(
        {
            "pytorch-lightning_version": "2.6.6",
            "global_step": step,
            "state_dict": {"w": torch.ones(3)},
            "callbacks": {"M": monitor},
        },
        path,
    )
    return path


def test_a_folder_of_the_trainer(tmp_path: Path):
    path = trainer(tmp_path)
    done = holdfast.seal(path)
    assert (done.step, done.format, done.done, done.notes) == (500, "transformers", True, ())
    assert done.metrics["eval_accuracy"] == 0.5
    assert set(done.metrics) == {"eval_loss", "eval_accuracy", "eval_other_loss"}
    assert np.isnan(done.metrics["eval_loss"])
    seal = read_seal(path)
    assert seal is not None
    assert {file.name: file.nbytes for file in seal.files} == {
        f.name: f.stat().st_size for f in path.iterdir() if f.name != SEAL
    }
    assert all(file.digest and file.digest.startswith("xxh3-128:") for file in seal.files)
    assert not list(check_sizes(path, seal))
    assert done.files == tuple((file.name, file.nbytes) for file in seal.files)
    assert sorted(inner.name for inner in path.iterdir() if inner.name.startswith(".")) == []


def test_the_digests_are_those_that_everybody_computes(tmp_path: Path):
    import hashlib

    import xxhash

    (tmp_path / "a").write_bytes(b"x" * 3_000_000)
    holdfast.seal(tmp_path, digest="sha256")
    seal = read_seal(tmp_path)
    assert seal is not None
    assert seal.files[0].digest == "sha256:" + hashlib.sha256(b"x" * 3_000_000).hexdigest()
    holdfast.seal(tmp_path, overwrite=True)
    seal = read_seal(tmp_path)
    assert seal is not None
    assert seal.files[0].digest == "xxh3-128:" + xxhash.xxh3_128(b"x" * 3_000_000).hexdigest()


def test_a_file_of_lightning_has_its_seal_beside_it(tmp_path: Path):
    path = lightning(tmp_path / "epoch=3-step=60.ckpt")
    done = holdfast.seal(path)
    assert (done.step, done.format, dict(done.metrics)) == (70, "lightning", {"val_loss": 1.25})
    assert "; the name contains" in done.notes[0]
    assert done.seal == f"{path}.seal.json"
    assert holdfast.verify(path).ok
    assert holdfast.verify(tmp_path).ok
    flip_bit(path, -60)
    for place in (path, tmp_path):
        report = holdfast.verify(place)
        assert not report.ok
        assert any("changed after it was sealed" in problem.message for problem in report.problems)


@pytest.mark.parametrize(
    ("name", "files", "step", "writer"),
    [
        ("global_step77", {"mp_rank_00_model_states.pt": {"a": 1}}, 77, "deepspeed"),
        (
            "out",
            {"latest": b"global_step78\n", "global_step78/mp_rank_00_model_states.pt": {"a": 1}},
            78,
            "deepspeed",
        ),
        (
            "checkpoint_3",
            {"random_states_0.pkl": {"a": 1}, "optimizer.bin": {"a": 1}},
            3,
            "accelerate",
        ),
        ("step_90", {"random_states_0.pkl": {"a": 1}}, 90, "accelerate"),
        ("step-1000", {"weights.pt": {"a": 1}}, 1000, ""),
        ("epoch_3", {"weights.pt": {"a": 1}}, None, ""),
        ("final", {"weights.pt": {"a": 1}}, None, ""),
    ],
)
def test_the_step_of_other_trainers(
    tmp_path: Path, name: str, files: dict[str, object], step: int | None, writer: str
):
    for inner, content in files.items():
        (tmp_path / name / inner).parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, bytes):
            (tmp_path / name / inner).write_bytes(content)
        else:
            torch.save(content, tmp_path / name / inner)
    done = holdfast.seal(tmp_path / name)
    assert (done.step, done.format) == (step, writer)
    assert any("no step is known" in note for note in done.notes) == (step is None)
    found = compared(tmp_path / name)
    assert found is not None
    assert not found.wrong
    assert holdfast.seal(tmp_path / name, step=5, overwrite=True).step == 5


def test_the_step_inside_of_a_distributed_or_native_checkpoint(tmp_path: Path):
    dcp = pytest.importorskip("torch.distributed.checkpoint")
    from tests.support import ALONE

    state = {"train_state": {"step": torch.tensor(31)}, "w": torch.ones(3)}
    dcp.save(state, checkpoint_id=tmp_path / "dcp", **ALONE)
    holdfast.save(state, tmp_path / "native")
    for name, writer in (("dcp", "dcp"), ("native", "holdfast")):
        done = holdfast.seal(tmp_path / name)
        assert (done.step, done.format) == (31, writer)
        assert holdfast.verify(tmp_path / name).ok


def test_what_is_given_counts(tmp_path: Path):
    path = trainer(tmp_path)
    done = holdfast.seal(path, step=7, metrics={"val_loss": np.float32(0.5), "t": torch.tensor(2)})
    assert (done.step, dict(done.metrics)) == (7, {"val_loss": 0.5, "t": 2.0})
    for wrong in (
        {"step": -1},
        {"step": 10**30},
        {"step": "x"},
        {"metrics": {"a": "b"}},
        {"metrics": {1: 2}},
        {"digest": "md5"},
    ):
        with pytest.raises(BadArgument):
            holdfast.seal(path, overwrite=True, **wrong)


def test_a_dry_run_writes_nothing(tmp_path: Path):
    path = trainer(tmp_path)
    done = holdfast.seal(path, dry_run=True)
    assert not done.done
    assert done.step == 500
    assert "step 500" in done.explain()
    assert not (path / SEAL).exists()


def test_a_seal_is_replaced_only_when_asked(tmp_path: Path):
    path = trainer(tmp_path)
    holdfast.seal(path)
    before = (path / SEAL).read_bytes()
    with pytest.raises(NotCommitted, match="overwrite"):
        holdfast.seal(path, step=1)
    assert (path / SEAL).read_bytes() == before
    holdfast.seal(path, step=1, overwrite=True)
    assert parse_seal((path / SEAL).read_bytes(), Limits()).step == 1


def test_temporaries_locks_and_hidden_folders_are_no_part_of_it(tmp_path: Path):
    path = trainer(tmp_path)
    for name in (".model.pt.0123456789abcdef.tmp", "a.lock", ".nfs000123", ".DS_Store"):
        (path / name).write_text("x")
    (path / ".cache").mkdir()
    (path / ".cache" / "x").write_text("x")
    (path / "sub").mkdir()
    (path / "sub" / ".hidden").write_text("part of it")
    seal = {file for file, _ in holdfast.seal(path).files}
    assert "sub/.hidden" in seal
    assert seal == {
        "model.safetensors",
        "optimizer.pt",
        "rng_state.pth",
        "training_args.bin",
        "trainer_state.json",
        "sub/.hidden",
    }
    assert holdfast.verify(path).notes == ()


TORN: dict[str, Callable[[Path], object]] = {
    "truncated": lambda path: os.truncate(path / "optimizer.pt", 500),
    "empty": lambda path: os.truncate(path / "optimizer.pt", 0),
    "zeros": lambda path: (path / "optimizer.pt").write_bytes(bytes(9000)),
    "truncated weights": lambda path: os.truncate(path / "model.safetensors", 600),
    "the last file is missing": lambda path: (path / "trainer_state.json").unlink(),
    "half a state": lambda path: os.truncate(path / "trainer_state.json", 50),
    "no state at all": lambda path: os.truncate(path / "trainer_state.json", 0),
    "an index without its files": lambda path: (
        (path / "model.safetensors").unlink(),
        (path / "model.safetensors.index.json").write_text(
            '{"weight_map": {"w": "model-00001-of-00002.safetensors"}}'
        ),
    ),
    "the marker of the trainer": lambda path: (path / "checkpoint-is-incomplete.txt").write_text(
        "in progress"
    ),
    "distributed, without its index": lambda path: (path / "__0_0.distcp").write_bytes(b"x"),
    "deepspeed's latest leads nowhere": lambda path: (path / "latest").write_text("global_step7"),
}


@pytest.mark.parametrize("how", TORN)
def test_what_is_torn_is_not_sealed(tmp_path: Path, how: str):
    path = trainer(tmp_path)
    TORN[how](path)
    with pytest.raises(NotCommitted, match="torn"):
        holdfast.seal(path)
    assert not (path / SEAL).exists()


@pytest.mark.parametrize("step", [True, -1, 1.5, 10**30, "5", None, [], float("inf")], ids=str)
def test_a_step_that_is_none_is_not_believed(tmp_path: Path, step: object):
    with pytest.raises(NotCommitted, match=r"global_step|digits"):
        holdfast.seal(trainer(tmp_path, step=step))


@pytest.mark.parametrize(
    "text",
    ["[" * 100_000, "[1]", '{"global_step": ' + "1" * 5_000 + "}", "\udc80", ""],
    ids=range(5),
)
def test_a_state_that_is_none_is_not_believed(tmp_path: Path, text: str):
    path = trainer(tmp_path)
    (path / "trainer_state.json").write_text(text, errors="surrogatepass")
    with pytest.raises(NotCommitted, match=r"trainer_state\.json"):
        holdfast.seal(path)


def test_what_has_no_content_of_its_own_is_refused(tmp_path: Path):
    path = trainer(tmp_path)
    (path / "link").symlink_to(path / "optimizer.pt")
    with pytest.raises(NotCommitted, match="link"):
        holdfast.seal(path)
    (path / "link").unlink()
    os.mkfifo(path / "pipe")
    with pytest.raises(NotCommitted, match="plain file"):
        holdfast.seal(path)
    (path / "pipe").unlink()
    (path / "back\\slash").write_text("x")
    with pytest.raises(NotCommitted, match="backslash"):
        holdfast.seal(path)
    (path / "back\\slash").unlink()
    (path / os.fsdecode(b"\xff")).write_text("x")
    with pytest.raises(NotCommitted, match="UTF-8"):
        holdfast.seal(path)
    (path / os.fsdecode(b"\xff")).unlink()
    (path / SEAL).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(NotCommitted, match="link"):
        holdfast.seal(path, overwrite=True)
    assert not (tmp_path / "elsewhere").exists()
    lightning(tmp_path / "a.ckpt")
    with pytest.raises(NotCommitted, match="a seal itself"):
        holdfast.seal(holdfast.seal(tmp_path / "a.ckpt").seal)
    (tmp_path / "empty").mkdir()
    with pytest.raises(NotCommitted, match="no file"):
        holdfast.seal(tmp_path / "empty")
    with pytest.raises(NotCommitted):
        holdfast.seal(tmp_path / "nothing")


def test_what_is_not_on_this_machine_has_no_seal():
    from holdfast.verbs.seals.check import is_sealed

    for url in ("s3://bucket/step-1", Path("gs://bucket/step-1")):
        assert read_seal(url) is None
        assert not is_sealed(url)
        with pytest.raises(BadPath, match="URL"):
            holdfast.seal(url)


def test_limits_are_kept(tmp_path: Path):
    path = trainer(tmp_path)
    with pytest.raises(LimitExceeded):
        holdfast.seal(path, limits=holdfast.Limits(files=3))


@pytest.mark.parametrize("change", ["grows", "is rewritten", "is replaced", "comes", "goes"])
def test_what_changes_meanwhile_is_not_sealed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
):
    path = trainer(tmp_path)
    real, once = sealing._take, threading.Lock()

    def take(files: object, root: int, name: str, *rest: object, **more: object) -> None:
        real(files, root, name, *rest, **more)  # type: ignore[arg-type]  # as it is called
        if once.acquire(blocking=False):
            at = path / "optimizer.pt"
            if change == "grows":
                with at.open("ab") as file:
                    file.write(b"more")
            elif change == "is rewritten":
                content = at.read_bytes()
                at.write_bytes(content[::-1])
                os.utime(at, (1, 1))
            elif change == "is replaced":
                (path / "new").write_bytes(at.read_bytes())
                (path / "new").replace(at)
            elif change == "comes":
                (path / "late.pt").write_bytes(b"x")
            else:
                (path / "rng_state.pth").unlink()

    monkeypatch.setattr(sealing, "_take", take)
    with pytest.raises(NotCommitted):
        holdfast.seal(path, threads=1)
    assert not (path / SEAL).exists()


DAMAGE: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "missing": (lambda path: (path / "rng_state.pth").unlink(), "rng_state.pth", "missing"),
    "truncated": (
        lambda path: os.truncate(path / "optimizer.pt", 900),
        "optimizer.pt",
        "truncated",
    ),
    "longer": (
        lambda path: os.truncate(path / "trainer_state.json", 5_000),
        "trainer_state.json",
        "longer",
    ),
    "changed": (
        lambda path: (path / "trainer_state.json").write_text(
            (path / "trainer_state.json").read_text().replace("500", "501")
        ),
        "trainer_state.json",
        "changed",
    ),
    "a folder in its place": (
        lambda path: ((path / "rng_state.pth").unlink(), (path / "rng_state.pth").mkdir()),
        "rng_state.pth",
        "missing",
    ),
    "the seal itself": (
        lambda path: (path / SEAL).write_bytes((path / SEAL).read_bytes().replace(b"500", b"501")),
        SEAL,
        "checksum",
    ),
}


@pytest.mark.parametrize("how", DAMAGE)
def test_verify_names_what_is_not_as_it_was_sealed(tmp_path: Path, how: str):
    path = trainer(tmp_path)
    holdfast.seal(path)
    assert holdfast.verify(path).ok
    act, name, said = DAMAGE[how]
    act(path)
    report = holdfast.verify(path)
    assert not report.ok
    told = [(p.file, p.message) for p in report.problems] + [
        (d.file, d.message) for d in report.damaged
    ]
    assert any(file == str(path / name) and said in message for file, message in told), told
    assert all(problem.damaged for problem in report.problems)


def test_verify_counts_what_the_seal_vouches_for(tmp_path: Path):
    path = trainer(tmp_path)
    holdfast.seal(path)
    report = holdfast.verify(path)
    assert report.seal is not None
    assert report.seal.step == 500
    assert report.unchecked == ()  # safetensors records no checksums, and the seal does
    assert report.skipped == ()
    assert report.checked_nbytes == report.seal.nbytes
    (path / "eval.json").write_text("{}")
    report = holdfast.verify(path)
    assert report.ok
    assert report.notes == ("eval.json is not part of the seal",)


def test_a_sealed_folder_of_anything_verifies(tmp_path: Path):
    (tmp_path / "notes.txt").write_text("x" * 100)
    (tmp_path / "deep" / "er").mkdir(parents=True)
    (tmp_path / "deep" / "er" / "data.npy").write_bytes(b"y" * 100)
    assert not holdfast.verify(tmp_path).ok
    holdfast.seal(tmp_path)
    assert holdfast.verify(tmp_path).ok
    (tmp_path / "deep" / "er" / "data.npy").write_bytes(b"z" * 100)
    assert not holdfast.verify(tmp_path).ok


def test_a_folder_of_sealed_folders_verifies_each(tmp_path: Path):
    for step in (400, 500):
        holdfast.seal(trainer(tmp_path, name=f"checkpoint-{step}", step=step))
    assert holdfast.verify(tmp_path).ok
    assert holdfast.verify(tmp_path).seal is None
    state = tmp_path / "checkpoint-400" / "trainer_state.json"
    state.write_text(state.read_text().replace("400", "401"))
    (problem,) = holdfast.verify(tmp_path).problems
    assert problem.file == str(state)
    assert "changed" in problem.message


def test_progress_counts_every_byte_once(tmp_path: Path):
    path = trainer(tmp_path)
    seen: list[int] = []
    done = holdfast.seal(path, progress=seen.append)
    assert sum(seen) == done.nbytes


def test_a_seal_does_not_go_along_with_what_is_made_of_its_folder(tmp_path: Path):
    path = tmp_path / "model"
    path.mkdir()
    holdfast.save({"w": np.ones(3, np.float32)}, path / "model.safetensors")
    (path / "config.json").write_text("{}")
    lightning(path / "last.ckpt")
    holdfast.seal(path / "last.ckpt")
    holdfast.seal(path)
    holdfast.convert(path, tmp_path / "half", dtype="float16")
    assert sorted(os.listdir(tmp_path / "half")) == ["config.json", "model.safetensors"]


def test_a_sealed_folder_is_replaced_with_its_seal(tmp_path: Path):
    holdfast.save({"w": np.ones(3)}, tmp_path / "step-1")
    holdfast.seal(tmp_path / "step-1")
    holdfast.save({"w": np.zeros(3)}, tmp_path / "step-1", overwrite=True)
    assert read_seal(tmp_path / "step-1") is None
    assert holdfast.verify(tmp_path / "step-1").ok


def test_a_second_seal_repeats_the_first_unless_a_step_is_passed(tmp_path: Path):
    path = tmp_path / "m.pt"
    holdfast.save({"w": np.arange(6.0)}, path)
    holdfast.seal(path, step=5, metrics={"loss": 0.5}, ran=77)
    first_seal = read_seal(path)
    assert first_seal is not None

    holdfast.seal(path, overwrite=True)
    assert read_seal(path) == first_seal

    holdfast.seal(path, overwrite=True, step=6)
    second_seal = read_seal(path)
    assert second_seal is not None
    assert (second_seal.step, second_seal.ran) == (6, None)
    assert second_seal.saved > first_seal.saved


@pytest.mark.parametrize("durable", [True, False])
def test_a_seal_that_is_removed_stays_removed_after_a_power_cut(
    tmp_path: Path, monkeypatch, durable
):
    path = tmp_path / "m.pt"
    holdfast.save({"w": np.arange(6.0)}, path)
    holdfast.seal(path)
    synced_inodes = []
    fsync = os.fsync

    def record_fsync(descriptor: int) -> None:
        synced_inodes.append(os.fstat(descriptor).st_ino)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", record_fsync)
    assert sealing.unseal(path, durable=durable)
    assert read_seal(path) is None
    assert synced_inodes == [tmp_path.stat().st_ino] * durable
