"""Damage that is known is not linked on, and damage in a file that many steps share is found before the last good copy goes."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import numpy as np
import pytest

import holdfast
from holdfast import Latest
from holdfast.errors import Corrupted, HoldfastWarning
from holdfast.extras.runs import proofs, retention
from holdfast.stores.remote.client import bucket_of
from holdfast.stores.remote.url import Url

FROZEN = np.random.default_rng(0).standard_normal(20_000).astype(np.float32)


def state(number: int) -> dict[str, object]:
    return {
        "frozen": FROZEN.copy(),
        "w": np.random.default_rng(number).standard_normal(3_000).astype(np.float32),
        "step": number,
    }


@pytest.fixture(params=["directory", "bucket"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return (
        os.fspath(tmp_path / "run")
        if request.param == "directory"
        else f"memory://{tmp_path.name}/run"
    )


def damage(step: holdfast.Step) -> None:
    """Change a byte of the frozen tensor, in the file that steps share."""
    with step.open() as checkpoint:
        (storage,) = checkpoint["frozen"].storages
    at = storage.start + storage.nbytes // 2
    if isinstance(step.path, Url):
        bucket, key = bucket_of(step.path), step.path.below(storage.key).key
        parts = key.split("/")
        key = (
            "/".join([*parts[: parts.index("..") - 1], *parts[parts.index("..") + 1 :]])
            if ".." in parts
            else key
        )
        content = bytearray(bucket.whole(key, 1 << 20).data)
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


def until(done: object, *, seconds: float = 20.0) -> None:
    """Wait for what a thread does."""
    end = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < end
        time.sleep(0.01)


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
    assert set(run._folder.identities(saved).values()) & set(
        run._folder.identities(run[3]).values()
    )
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


def test_steps_are_whole_until_one_has_been_read_back(place: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(
        proofs.Proving, "watch", lambda *args, **named: None
    )  # nobody reads anything back
    run = holdfast.Run(place)
    run.save(1, state(1))
    damage(run[1])
    assert run.latest(deep=True) is None
    run.save(2, state(2))
    damage(run[2])
    assert is_good(run.save(3, state(3)))
    assert run.latest(deep=True).step == 3
    shared = set(run._folder.identities(run.save(4, state(4))).values()) & set(
        run._folder.identities(run[3]).values()
    )
    assert shared
    run.rewind(2)
    assert is_good(run.save(3, state(3)))  # steps 1 and 2 are still no base
    run.close()


def test_a_record_that_cannot_be_read_makes_every_step_doubtful(tmp_path: Path):
    with holdfast.Run(tmp_path) as run:
        run.save(1, state(1))
        damage(run[1])
        run.latest(deep=True)
        run.save(2, state(2))
    record = tmp_path / "holdfast.proofs.json"
    assert json.loads(record.read_text())["doubted"][0]["step"] == 1
    record.write_text("{")
    with holdfast.Run(tmp_path) as run:
        saved = run.save(3, state(3))
        assert not set(run._folder.identities(saved).values()) & set(
            run._folder.identities(run[2]).values()
        )


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything is old, and all of it may be read after each save."""
    monkeypatch.setattr(proofs, "OLD_S", -1.0)
    monkeypatch.setattr(proofs, "SHARE", 1)
    monkeypatch.setattr(proofs, "RATE", 1 << 40)


def test_rot_in_a_shared_file_is_found_and_not_linked_on(place: str, eager: None):
    run = holdfast.Run(place)
    for number in (1, 2, 3):
        run.save(number, state(number))
    until(lambda: run.summary().read_back_nbytes >= FROZEN.nbytes)
    assert run.summary().read_back > time.time() - 60
    assert not run.summary().damaged
    run._proofs.close()
    run._proofs._stop.clear()
    damage(run[3])
    run.save(4, state(4))
    until(lambda: run.summary().damaged)
    with pytest.warns(
        HoldfastWarning, match=r"'frozen'; it is in step 1, 2, 3, 4, and no step is linked to it"
    ):
        saved = run.save(5, state(5))
    assert is_good(saved)
    assert "damaged: step 4" in str(run.summary())
    until(lambda: not run._proofs.is_doubted(saved))  # read back in the background
    assert is_good(run.save(6, state(6)))
    run.close()


def test_the_file_whose_last_proof_is_oldest_comes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    run = holdfast.Run(tmp_path)
    other = np.arange(30_000.0)
    run.save(1, {"a": FROZEN})
    run.save(2, {"a": FROZEN, "b": other})
    run.save(3, {"a": FROZEN, "b": other, "w": np.ones(10)})
    run.close()
    assert not (tmp_path / "holdfast.proofs.json").exists()
    run, now = holdfast.Run(tmp_path), time.time()
    files = [
        identity
        for name, identity in sorted(run._folder.identities(run[3]).items())
        if name.startswith("data-")
    ][:2]
    content = {
        "format": "holdfast.proofs",
        "version": 1,
        "files": {files[0]: now - 4_000, files[1]: now - 9_000},
    }
    (tmp_path / "holdfast.proofs.json").write_text(json.dumps(content))
    monkeypatch.setattr(proofs, "SHARE", 10**9)
    run.save(4, {"a": FROZEN, "b": other, "w": np.zeros(10)})
    until(
        lambda: run._proofs._thread is None or not run._proofs._thread.is_alive()
    )  # it has no share, and is the only one at work
    run._proofs._credit = 1
    run._proofs._work()
    assert run._proofs._files[files[1]] > now - 1 > run._proofs._files[files[0]]
    run.close()
    assert json.loads((tmp_path / "holdfast.proofs.json").read_text())["files"][files[1]] > now - 1


def test_no_more_than_a_share_is_read_and_closing_ends_it(
    place: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(proofs, "OLD_S", -1.0)
    monkeypatch.setattr(proofs, "BATCH_NBYTES", 1)
    run = holdfast.Run(place)
    parts = {f"f{i}": np.random.default_rng(i).standard_normal(1_000) for i in range(64)}
    for number in range(1, 6):
        saved = run.save(number, {**parts, "step": np.array(number)})
    until(lambda: run._proofs._thread is not None and not run._proofs._thread.is_alive())
    read = run.summary().read_back_nbytes
    assert 0 < read <= 5 * (saved.nbytes // proofs.SHARE) + 8_000
    monkeypatch.setattr(proofs, "RATE", 1)  # a byte a second
    run.save(6, {**parts, "step": np.array(6)})
    until(lambda: run.summary().read_back_nbytes > read)
    began = time.monotonic()
    run.close()
    assert time.monotonic() - began < 10
    assert not [one for one in threading.enumerate() if one.name == "holdfast-proof"]


def test_a_run_that_is_dropped_ends_it_and_does_not_wait(
    place: str, eager: None, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(proofs, "RATE", 1)  # a byte a second
    run = holdfast.Run(place)
    for number in (1, 2):
        run.save(number, state(number))
    proving = run._proofs
    until(lambda: proving.found().nbytes > 0)
    del run
    gc.collect()
    until(lambda: not proving._thread.is_alive())


def test_what_is_young_is_not_read(place: str):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with holdfast.Run(place) as run:
            for number in (1, 2, 3):
                run.save(number, state(number))
            until(lambda: run._proofs._thread is not None and not run._proofs._thread.is_alive())
            assert run.summary().read_back_nbytes == 0


def test_what_a_rule_reads_back_is_not_read_again(
    place: str, eager: None, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(proofs, "OLD_S", 1.0)
    with holdfast.Run(place, keep=Latest(1)) as run:
        run.save(1, state(1))
        run.pin(1)
        for number in (2, 3):
            run.save(number, state(number))
        run._proofs._thread.join()
        run._proofs._files = dict.fromkeys(run._proofs._files, 1.0)
        run.save(4, state(4))
        run._proofs._thread.join()
        assert run.summary().read_back_nbytes == 0


def test_the_end_of_the_program_does_not_wait_for_it(tmp_path: Path):
    program = """
import sys, time, numpy as np, holdfast
from holdfast.extras.runs import proofs
proofs.OLD_S, proofs.SHARE, proofs.RATE = -1.0, 1, 1 << 20
run = holdfast.Run(sys.argv[1])
for number in (1, 2):
    run.save(number, {"frozen": np.random.default_rng(0).standard_normal(16 << 20), "w": np.full(9, number)})
while not run.summary().read_back_nbytes:
    time.sleep(0.01)
print("over", flush=True)
"""
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", program, os.fspath(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "over\n", "")
    assert time.monotonic() - began < 100  # all of it would take 128 seconds


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
        assert not (path / "holdfast.proofs.json").exists()
