"""Proof 3: kill -9 at random moments, again and again; `tests/crash/kill.py` is what does it."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.crash.writers import LIBRARY, Writer
from tests.sampling import count_rounds, current_seed

KILLS = 60

ROOT = Path(__file__).resolve().parents[2]


def killed(name: str, kills: int) -> subprocess.CompletedProcess[str]:
    # What a killed process leaves does not depend on the disk; in memory, the moments are not all spent in fsync.
    with tempfile.TemporaryDirectory(
        dir="/dev/shm" if Path("/dev/shm").is_dir() else None
    ) as folder:
        seed = str(current_seed())
        command = [sys.executable, "-m", "tests.crash.kill", name, folder, str(kills), seed]
        return subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
        )


@pytest.mark.slow("kills and restarts a writing process 60 times")
@pytest.mark.parametrize("writer", LIBRARY, ids=str)
def test_killed_at_random_moments(writer: Writer):
    kills = count_rounds(f"kills of the writer {writer}", KILLS, total=300)
    done = killed(writer.name, kills)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert seen["kills"] >= kills
    # The moments are spread over the save: some fall into it, some after it.
    assert seen["left a temporary"] > kills // 20
    assert seen["saves"] + seen["new but not reported"] > kills // 20
    if writer.directory:
        assert seen["set aside"] > 0


def test_a_save_in_place_does_not_survive_this():
    done = killed("in-place", KILLS)
    assert done.returncode != 0
    assert "AssertionError" in done.stderr
