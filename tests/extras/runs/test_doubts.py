"""Later steps do not share files with a step that was found damaged."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

import holdfast
from holdfast import Latest
from holdfast.errors import Corrupted, HoldfastWarning
from holdfast.extras.runs import retention
from holdfast.stores.remote.client import get_bucket
from holdfast.stores.remote.url import Url

FROZEN = np.random.default_rng(0).standard_normal(20_000).astype(np.float32)


def state(number: int) -> dict[str, object]:
    return {
        "frozen": FROZEN.copy(),
        "w": np.random.default_rng(number).standard_normal(3_000).astype(np.float32),
        "step": number,
    }


def damage(step: holdfast.Step) -> None:
    """Change a byte of the frozen tensor, in the file that steps share."""
    with step.open() as checkpoint:
        (storage,) = checkpoint["frozen"].storages
    at = storage.start + storage.nbytes // 2
    if isinstance(step.path, Url):
        bucket, key = get_bucket(step.path), step.path.below(storage.key).key
        parts = key.split("/")
        key = (
            "/".join([*parts[: parts.index("..") - 1], *parts[parts.index("..") + 1 :]])
            if ".." in parts
            else key
        )
        content = bytearray(bucket.get_object(key, 1 << 20).data)
        content[at] ^= 1
        bucket.put(key, bytes(content))
        return
    with open(os.path.join(step.path, storage.key), "r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))


def is_good(step: holdfast.Step) -> bool:
    return holdfast.verify(step.path).ok


def shares_files(run: holdfast.Run, step: holdfast.Step, other: holdfast.Step) -> bool:
    return bool(set(run._folder.sizes(step)) & set(run._folder.sizes(other)))


def damaged_by_read_back(run: holdfast.Run, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Save a step whose read-back finds damage."""
    real = retention.verify

    def rotten(path: str) -> object:
        damage(run[number])
        return real(path)

    with monkeypatch.context() as patched:
        patched.setattr(retention, "verify", rotten)
        with pytest.warns(HoldfastWarning, match=f"step {number} could not be read back"):
            run.save(number, state(number))


def test_a_step_that_does_not_read_back_is_no_base(place: str, monkeypatch: pytest.MonkeyPatch):
    run = holdfast.Run(place, keep=Latest(1))
    run.save(1, state(1))
    damaged_by_read_back(run, monkeypatch, 2)
    assert is_good(run.save(3, state(3)))
    run.pin(3)
    saved = run.save(4, state(4))  # step 3 was read back: it is a base again
    assert is_good(saved)
    assert shares_files(run, saved, run[3])
    assert run.summary().damaged[0].startswith("step 2")
    run.close()


def test_the_next_process_knows_it_too(place: str, monkeypatch: pytest.MonkeyPatch):
    with holdfast.Run(place, keep=Latest(1)) as run:
        run.save(1, state(1))
        damaged_by_read_back(run, monkeypatch, 2)
    with holdfast.Run(place, keep=Latest(9)) as run:
        assert is_good(run.save(3, state(3)))


def test_what_a_deep_look_passes_over_is_no_base(place: str):
    with holdfast.Run(place) as run:
        run.save(1, state(1))
        run.save(2, state(2))
        damage(run[2])
    run = holdfast.Run(place)
    assert run.resume(into=state(0), deep=True) is None
    assert is_good(run.save(3, state(3)))
    run.close()


def test_what_could_not_be_resumed_from_is_no_base(place: str):
    with holdfast.Run(place) as run:
        run.save(1, state(1))
        damage(run[1])
    run = holdfast.Run(place)
    with pytest.raises(Corrupted):
        run.resume(into=state(0))
    assert is_good(run.save(2, state(2)))
    run.close()


def test_the_first_step_after_damage_is_read_back_and_becomes_the_base(place: str):
    run = holdfast.Run(place)
    run.save(1, state(1))
    damage(run[1])
    assert run.latest(deep=True) is None
    saved = run.save(2, state(2))
    assert is_good(saved)
    assert not shares_files(run, saved, run[1])
    assert shares_files(run, run.save(3, state(3)), saved)
    assert run.latest(deep=True).step == 3
    run.rewind(1)
    assert is_good(run.save(2, state(2)))  # step 1 is still no base
    run.close()


def test_a_step_after_damage_that_does_not_read_back_is_no_base_either(
    place: str, monkeypatch: pytest.MonkeyPatch
):
    run = holdfast.Run(place)
    run.save(1, state(1))
    damage(run[1])
    assert run.latest(deep=True) is None
    real = retention.verify

    def rotten(path: str) -> object:
        damage(run[2])
        return real(path)

    with monkeypatch.context() as patched:
        patched.setattr(retention, "verify", rotten)
        with pytest.warns(HoldfastWarning, match="step 2 was written and does not read back"):
            run.save(2, state(2))
    assert [text.split(":")[0] for text in run.summary().damaged] == ["step 1", "step 2"]
    assert "damaged: step 2" in str(run.summary())
    assert is_good(run.save(3, state(3)))
    run.close()


def test_without_damage_no_step_is_read_back(place: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(retention, "verify", lambda path: pytest.fail("read back"))
    with holdfast.Run(place) as run:
        for number in (1, 2, 3):
            run.save(number, state(number))


def test_a_record_that_cannot_be_read_makes_every_step_doubtful(tmp_path: Path):
    with holdfast.Run(tmp_path) as run:
        run.save(1, state(1))
        damage(run[1])
        run.latest(deep=True)
        run.save(2, state(2))
    record = tmp_path / "holdfast.doubts.json"
    assert json.loads(record.read_text())["doubted"][0]["step"] == 1
    record.write_text("{")
    with holdfast.Run(tmp_path) as run:
        saved = run.save(3, state(3))
        assert not shares_files(run, saved, run[2])


def test_a_deep_look_is_written_down_when_the_run_is_closed(place: str):
    with holdfast.Run(place, keep=[Latest(9)]) as run:
        run.save(1, state(1))
        run.save(2, state(1))
        damage(run.latest())
        run.latest(deep=True)
    with holdfast.Run(place, keep=[Latest(9)]) as run:
        run.save(3, state(1))
        assert is_good(run.latest())


def test_nothing_is_written_down_for_another_run(tmp_path: Path):
    path = tmp_path / "run"
    run = holdfast.Run(path, keep=[Latest(9)])
    run.save(1, state(1))
    damage(run.latest())
    run.latest(deep=True)
    path.rename(tmp_path / "away")
    with holdfast.Run(path) as other:
        other.save(7, state(7))
        run.close()
        assert not (path / "holdfast.doubts.json").exists()
