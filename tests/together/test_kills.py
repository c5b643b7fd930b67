"""One rank of a command is killed at a random moment, a hundred times: the target is what it was, or whole and new; nobody hangs,
and the same command then succeeds and leaves nothing beside its target."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ranks.test_kills import QUIET
from tests.sampling import count_rounds, random_for
from tests.together.launched import DEADLINE
from tests.together.test_processes import TOLERANCE

WIDTH = 6
"""Commands side by side."""


@pytest.mark.slow("starts commands on ranks and kills them again and again")
@pytest.mark.timeout(600)
def test_a_rank_of_a_command_is_killed(tmp_path: Path):
    kills = count_rounds("kills of a rank of a command", 12, total=100)
    seed = random_for("kills of a rank of a command").randrange(1 << 20)
    words = [
        sys.executable,
        "-m",
        "tests.together.launched",
        "kills",
        str(tmp_path),
        str(kills),
        str(WIDTH),
        str(seed),
    ]
    done = subprocess.run(
        words, capture_output=True, text=True, timeout=580, env=os.environ | QUIET, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    rows = json.loads(done.stdout)
    judge(rows, seed)
    assert sum(row["died"] for row in rows) >= kills


def judge(rows: list[dict[str, object]], seed: int) -> None:
    """Look at what came of each round."""
    for row in rows:
        told = json.dumps(row, indent=1) + f"\nseed {seed}"
        statuses = {
            rank: one["status"] for rank, one in enumerate(row["ranks"]) if rank != row["victim"]
        }
        again = row["again"]
        assert not row["stuck"], told
        assert not row["beside"], told
        assert row["found"] in (row["before"], row["wanted"]), told
        if row["died"]:
            assert all(late < DEADLINE + TOLERANCE for late in row["late"].values()), told
        else:
            assert set(statuses.values()) == {0}, told
            assert row["found"] == row["wanted"], told
        if row["victim"] != 0 and statuses[0] != 0:
            assert row["found"] == row["before"], f"it said that nothing was published\n{told}"
            assert f"rank {row['victim']}" in row["ranks"][0]["err"], told
        if row["victim"] != 0 and statuses[0] == 0:
            assert row["found"] == row["wanted"], told
        assert all(not one["out"] for one in row["ranks"][1:]), told
        assert (again["statuses"], again["stuck"]) == ([0, 0, 0], []), told
        assert again["found"] == row["wanted"], told
        assert len(again["left"]) == 1, f"it cleans up\n{told}"
        if row["kind"] == "shards" and row["found"] == row["before"]:
            assert again["taken over"] == again["finished"], told
