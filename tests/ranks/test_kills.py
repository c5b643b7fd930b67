"""One rank of three is killed at a random moment of a save, a hundred times: the others fail in time, no checkpoint is harmed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ranks.kills import DEADLINE
from tests.sampling import count_rounds, random_for

WIDTH = 10
"""Saves side by side."""
TOLERANCE = 30.0
"""Seconds beyond the deadline until a survivor must have raised, on a busy machine."""

QUIET = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "RES_OPTIONS": "timeout:1 attempts:1",  # torch asks for the name of every address that it connects to
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}


@pytest.mark.slow("starts torch on four ranks and kills them again and again")
@pytest.mark.timeout(280)
@pytest.mark.parametrize("what", [(), ("run",)], ids=["save", "run"])
def test_a_rank_is_killed(tmp_path: Path, what: tuple[str, ...]):
    name = "kills of a rank of a run" if what else "kills of a rank that saves"
    kills = count_rounds(name, 3 if what else 25, total=100)
    width = WIDTH if kills >= WIDTH else 1
    seed = random_for(name).randrange(1 << 20)
    command = [
        sys.executable,
        "-m",
        "tests.ranks.kills",
        str(tmp_path),
        str(kills),
        str(width),
        str(seed),
        *what,
    ]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=270, env=os.environ | QUIET, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    rows = json.loads(done.stdout)
    deaths = 0
    standing: dict[str, int] = {}
    for row in rows:
        told = json.dumps(row, indent=1) + f"\nseed {seed}"
        assert not row["stuck"], told
        assert not row["beside"], told
        assert row["found"] in (row["round"], standing.get(row["slot"])), told
        raised = {
            int(rank): said["error"]
            for rank, said in row["ranks"].items()
            if said is not None and "error" in said
        }
        returned = [
            int(rank) for rank, said in row["ranks"].items() if said is not None and "value" in said
        ]
        died = row["victim"] is not None and row["ranks"][str(row["victim"])] is None
        deaths += died
        if not died:
            assert len(returned) == 3, told
        assert set(raised.values()) <= {"RankLost", "RanksFailed"}, told
        if "RanksFailed" in raised.values():
            assert row["found"] == standing[row["slot"]], (
                f"it said that nothing was published\n{told}"
            )
            assert not returned, told
        if returned:
            assert row["found"] == row["round"], told
        if returned and raised:
            assert row["victim"] == 0, (
                f"only the death of the one that tells the others can leave them with two answers\n{told}"
            )
        for said in row["ranks"].values():
            if said is not None and "error" in said:
                assert said["at"] - row["died"] < DEADLINE + TOLERANCE, told
        standing[row["slot"]] = row["found"]
    assert deaths >= kills
    last = {row["slot"]: row for row in rows}
    assert all(row["found"] == row["round"] for row in last.values()), "a save succeeds afterwards"
    assert sorted(p.name for p in (tmp_path / "slots").glob("*/*")) == ["step"] * width, (
        "and cleans up"
    )
    if what:
        hidden = [str(p) for p in (tmp_path / "slots").glob("*/step/.*")]
        assert hidden == [], "inside as well"
        assert all(
            1 <= len(list(slot.glob("step/step-*"))) <= 3 for slot in (tmp_path / "slots").iterdir()
        )
