"""Which folders are steps: whatever else lies around, `latest` gives one that is whole, and says nothing else is."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import holdfast
from holdfast.errors import NoSuchStep
from holdfast.extras.runs.directory import RunDirectory
from holdfast.extras.runs.record import DOUBTS, EXPORTS, PINS, RECORD
from holdfast.extras.runs.steps import DOCUMENTS
from holdfast.verbs.seals.document import SEAL, Seal, SealedFile, encode_seal
from tests.support import flip_bit


def state(number: int) -> dict[str, object]:
    return {"w": np.full((20, 30), number, np.float32), "step": number}


@pytest.fixture
def run(tmp_path: Path) -> holdfast.Run:
    """Steps 1, 2 and 3."""
    with holdfast.Run(tmp_path / "run") as made:
        for number in (1, 2, 3):
            made.save(number, state(number), metrics={"loss": 1 / number})
    return holdfast.Run(tmp_path / "run")


def numbers(run: holdfast.Run) -> list[int]:
    return [step.step for step in run]


def whys(run: holdfast.Run) -> dict[str, str]:
    return {
        found.name: found.why for found in RunDirectory(run.path).survey() if found.whole is None
    }


def folder(run: holdfast.Run, number: int) -> Path:
    return Path(run.path, f"step-{number:08d}")


def test_steps_are_found_by_number(run: holdfast.Run):
    assert numbers(run) == [1, 2, 3]
    assert (len(run), 2 in run, 4 in run, bool(run)) == (3, True, False, True)
    newest = run.latest()
    assert newest is not None
    assert newest.step == 3
    assert newest.metrics == {"loss": 1 / 3}
    with run[2].open() as checkpoint:
        assert checkpoint.tree["step"] == 2
    with pytest.raises(NoSuchStep, match="no whole step 9; the newest is 3"):
        run[9]


def test_a_run_that_is_not_there_yet(tmp_path: Path):
    run = holdfast.Run(tmp_path / "nothing")
    assert (run.latest(), run.resume(), len(run), run.best("loss"), run.pins()) == (
        None,
        None,
        0,
        None,
        {},
    )
    assert not (tmp_path / "nothing").exists()


def remove_data(step: Path) -> None:
    next(step.glob("data-*")).unlink()


def truncate_data(step: Path) -> None:
    data = next(step.glob("data-*"))
    os.truncate(data, data.stat().st_size - 1)


def lengthen_data(step: Path) -> None:
    with next(step.glob("data-*")).open("ab") as data:
        data.write(b"x")


def link_data(step: Path) -> None:
    data = next(step.glob("data-*"))
    data.rename(step.parent / "elsewhere.bin")
    data.symlink_to(step.parent / "elsewhere.bin")


def remove_manifest(step: Path) -> None:
    (step / "holdfast.json").unlink()


def tear_seal(step: Path) -> None:
    os.truncate(step / SEAL, 100)


def zero_seal(step: Path) -> None:
    (step / SEAL).write_bytes(bytes((step / SEAL).stat().st_size))


def change_seal(step: Path) -> None:
    (step / SEAL).write_bytes((step / SEAL).read_bytes().replace(b'"step":3', b'"step":9'))


def remove_both(step: Path) -> None:
    (step / SEAL).unlink()
    remove_manifest(step)


def no_seal_and_truncated(step: Path) -> None:
    (step / SEAL).unlink()
    truncate_data(step)


def replace_by_link(step: Path) -> None:
    step.rename(step.parent / "moved-elsewhere")
    (step.parent / "moved-elsewhere" / SEAL).unlink()
    step.symlink_to(step.parent / "moved-elsewhere")


def replace_by_file(step: Path) -> None:
    shutil.rmtree(step)
    step.write_bytes(b"x")


TEARS = [
    remove_data, truncate_data, lengthen_data, link_data, remove_manifest, tear_seal, zero_seal, change_seal, remove_both,
    no_seal_and_truncated, replace_by_link, replace_by_file,
]  # fmt: skip


@pytest.mark.parametrize("tear", TEARS)
def test_a_torn_step_is_passed_over(run: holdfast.Run, tear: Callable[[Path], None]):
    tear(folder(run, 3))
    newest = run.latest()
    assert newest is not None
    assert newest.step == 2
    assert numbers(run) == [1, 2]
    assert 3 not in run
    assert whys(run)["step-00000003"]
    into = state(0)
    assert run.resume(into=into)["step"] == 2


@pytest.mark.parametrize(
    "tear", [tear for tear in TEARS if tear not in (replace_by_link, replace_by_file)]
)
def test_a_torn_step_is_saved_again_and_never_deleted(
    run: holdfast.Run, tear: Callable[[Path], None]
):
    tear(folder(run, 3))
    with holdfast.Run(run.path, keep=holdfast.Latest(1)) as again:
        again.save(4, state(4))
        assert numbers(run) == [4]
        assert folder(run, 3).exists()
        if tear is not link_data:  # no plain file: a person has to look
            again.save(3, state(3))
            assert 3 in again


def test_a_file_of_another_length_inside_is_only_found_deep(run: holdfast.Run):
    data = next(folder(run, 3).glob("data-*"))
    flip_bit(data, -1)
    assert run.latest().step == 3
    assert run.latest(deep=True).step == 2
    assert run.resume(into=state(0), deep=True)["step"] == 2


def test_a_renamed_step_does_not_count_under_its_new_number(run: holdfast.Run):
    folder(run, 3).rename(folder(run, 9))
    assert run.latest().step == 2
    assert "its seal says step 3" in whys(run)["step-00000009"]


def test_a_step_under_a_name_of_its_own_counts_by_its_seal(run: holdfast.Run):
    folder(run, 3).rename(Path(run.path, "the-best-one"))
    assert run.latest().step == 3
    assert run.latest().name == "the-best-one"
    shutil.copytree(Path(run.path, "the-best-one"), folder(run, 3))
    assert run.latest().name == "step-00000003"
    assert whys(run) == {"the-best-one": "step-00000003 is step 3 already"}


def test_temporaries_and_what_is_being_deleted_are_no_steps(run: holdfast.Run):
    for name in (
        ".step-00000007.0123456789abcdef.tmp", ".deleted~step-00000008.0123456789abcdef.tmp", ".step-00000002.0123456789abcdef.old",
        ".step-00000009",
    ):  # fmt: skip
        shutil.copytree(folder(run, 3), Path(run.path, name))
    assert numbers(run) == [1, 2, 3]
    assert whys(run) == {}


def test_what_a_crash_caught_between_two_renames_is_the_step(run: holdfast.Run):
    folder(run, 3).rename(Path(run.path, ".step-00000003.0123456789abcdef.old"))
    newest = run.latest()
    assert newest.step == 3
    assert newest.path == str(folder(run, 3))
    with newest.open() as checkpoint:
        assert checkpoint.tree["step"] == 3


def test_foreign_folders_and_files(run: holdfast.Run):
    Path(run.path, "logs").mkdir()
    Path(run.path, "step-").mkdir()
    Path(run.path, "step-12x").mkdir()
    Path(run.path, "step-5").mkdir()
    Path(run.path, "step-99999999999999999999999").mkdir()
    Path(run.path, "notes.txt").write_text("step 7")
    Path(run.path, "link").symlink_to(folder(run, 3))
    assert numbers(run) == [1, 2, 3]
    assert list(whys(run)) == ["step-5"]


def test_a_native_directory_without_a_seal_counts(run: holdfast.Run):
    holdfast.save(state(7), Path(run.path, "step-7"))
    assert run.latest().step == 7
    assert run.latest().metrics == {}
    os.truncate(Path(run.path, "step-7", "holdfast.json"), 50)
    assert run.latest().step == 3


def sealed(path: Path, step: int | None, content: bytes = b"content") -> None:
    """A folder as another trainer writes it."""
    (path / "rng").mkdir(parents=True)
    (path / "optimizer.pt").write_bytes(content)
    (path / "rng" / "rank0.pth").write_bytes(content)
    files = [SealedFile(name, len(content), None) for name in ("optimizer.pt", "rng/rank0.pth")]
    (path / SEAL).write_bytes(encode_seal(Seal(step, 5.0, {"loss": 0.1}, tuple(files))))


def test_sealed_folders_of_other_trainers_are_steps(run: holdfast.Run):
    sealed(Path(run.path, "checkpoint-500"), 500)
    sealed(Path(run.path, "final"), None)
    assert run.latest().step == 500
    assert run.best("loss").step == 500
    assert whys(run) == {"final": "its seal says no step"}
    (Path(run.path, "checkpoint-500", "rng", "rank0.pth")).unlink()
    assert run.latest().step == 3
    assert whys(run)["checkpoint-500"] == "rng/rank0.pth: missing"


def test_retention_deletes_sealed_folders_with_all_that_is_in_them(run: holdfast.Run):
    sealed(Path(run.path, "checkpoint-0"), 0)
    outside = Path(run.path).parent / "outside"
    outside.mkdir()
    (outside / "file").write_text("stays")
    Path(run.path, "checkpoint-0", "rng", "link").symlink_to(outside)
    with holdfast.Run(run.path, keep="latest:2") as again:
        again.save(4, state(4))
    assert numbers(run) == [3, 4]
    assert not Path(run.path, "checkpoint-0").exists()
    assert (outside / "file").read_text() == "stays"


def test_a_single_file_with_a_seal_beside_it(run: holdfast.Run):
    Path(run.path, "epoch=4.ckpt").write_bytes(b"content")
    text = encode_seal(Seal(40, 5.0, {}, (SealedFile("epoch=4.ckpt", 7, None),)))
    Path(run.path, "epoch=4.ckpt.seal.json").write_bytes(text)
    assert run.latest().step == 40
    Path(run.path, "epoch=4.ckpt").write_bytes(b"conten")
    assert run.latest().step == 3
    Path(run.path, "epoch=4.ckpt").write_bytes(b"content")
    with holdfast.Run(run.path, keep="latest:1") as again:
        again.save(50, state(50))
        again.save(51, state(51))
    assert sorted(name for name in os.listdir(run.path) if not name.startswith("holdfast")) == [
        "step-00000051"
    ]


def test_damaged_pins_keep_everything(run: holdfast.Run):
    run.pin(1, "paper")
    pins = Path(run.path, "holdfast.pins.json")
    assert json.loads(pins.read_text())["pins"][0]["why"] == "paper"
    pins.write_text("{")
    with (
        holdfast.Run(run.path, keep="latest:1") as again,
        pytest.warns(holdfast.errors.HoldfastWarning, match="no step .* deleted"),
    ):
        again.save(4, state(4))
    assert numbers(run) == [1, 2, 3, 4]
    with (
        holdfast.Run(run.path, keep="latest:1") as again,
        pytest.raises(holdfast.errors.HeaderError, match="damaged"),
    ):
        again.prune()


def many(path: Path, numbers: range) -> None:
    """Steps without much in them."""
    for number in numbers:
        folder = path / f"step-{number:08d}"
        folder.mkdir(parents=True)
        (folder / "data").write_bytes(b"x")
        (folder / SEAL).write_bytes(
            encode_seal(Seal(number, 5.0, {}, (SealedFile("data", 1, None),)))
        )


def test_what_changes_in_a_step_is_seen_the_next_time(tmp_path: Path):
    many(tmp_path, range(5))
    for path in tmp_path.glob("*/holdfast.seal.json"):
        os.utime(path, (1e9, 1e9))
    folder = RunDirectory(str(tmp_path))
    assert len(folder.steps()) == 5
    (tmp_path / "step-00000002" / "data").write_bytes(b"xy")
    assert [step.step for step in folder.steps()] == [0, 1, 3, 4]
    (tmp_path / "step-00000003" / SEAL).write_bytes(b"x")
    assert [step.step for step in folder.steps()] == [0, 1, 4]


def test_the_documents_of_a_run_are_not_looked_into_for_steps():
    assert {kind.file for kind in (RECORD, PINS, DOUBTS, EXPORTS)} == DOCUMENTS
