"""kill -9 at random moments of a run that saves and deletes without end.

After each the newest whole step is no older than the last one that was reported, and the next process goes on from there.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

import holdfast
from tests.sampling import count_rounds, random_for

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="processes are killed here")

FOREVER = """
import sys, numpy as np, holdfast
run = holdfast.Run(sys.argv[1], keep=["latest:2", "best:loss:1"], durable=False)
state = {"w": np.zeros(20_000), "frozen": np.arange(20_000.0), "step": np.zeros(1, np.int64)}
state = run.resume(into=state) or state
while True:
    step = int(state["step"][0]) + 1
    state["w"] += 1
    state["step"][0] = step
    run.save(step, state, metrics={"loss": (step * 7919) % 101})
    print(step, flush=True)
"""


def test_killed_at_random_moments():
    kills = count_rounds("kills of a run", 3, total=60)
    chance, last = random_for("kills of a run"), 0
    with tempfile.TemporaryDirectory(
        dir="/dev/shm" if Path("/dev/shm").is_dir() else None
    ) as folder:
        for _ in range(kills):
            program = subprocess.Popen(
                [sys.executable, "-c", FOREVER, folder], stdout=subprocess.PIPE, text=True
            )
            try:
                said = [program.stdout.readline()]
                time.sleep(chance.uniform(0, 0.15))
                program.send_signal(signal.SIGKILL)
                said += program.stdout.read().splitlines()
            finally:
                program.kill()
                program.wait()
                program.stdout.close()
            reported = [int(line) for line in said if line.strip()]
            assert reported, "it ended by itself"
            assert reported[0] == last + 1, "it did not go on where it was"
            run = holdfast.Run(folder)
            newest = run.latest()
            assert newest.step in (reported[-1], reported[-1] + 1)
            assert all(holdfast.verify(step.path).ok for step in run)
            with newest.open() as checkpoint:
                assert set(checkpoint["w"].numpy().tolist()) == {float(newest.step)}
            last = newest.step
        with holdfast.Run(folder, keep="latest:2") as run:
            run.save(last + 1, {"w": holdfast.read(run.latest().open().values())[0]})
            assert len(run) == 2
        assert [name for name in os.listdir(folder) if name.startswith(".")] == []
    assert last > kills
