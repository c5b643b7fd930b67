"""Commands on ranks that are processes: one report, one exit status, those of the first rank. And ranks that are stopped, slow, or
without room; and torchrun itself."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import holdfast
from holdfast.stores.files import is_temporary
from tests.conftest import GOLDEN
from tests.ranks.test_kills import QUIET
from tests.together.launched import DEADLINE
from tests.together.test_matrix import assert_same_files

pytestmark = pytest.mark.timeout(300)

TOLERANCE = 30.0
"""Seconds beyond the deadline until all must have ended: generous, and still far from `PATIENCE`."""


def ran(jobs: list[dict[str, object]]) -> list[dict[str, object]]:
    """What came of commands, one after the other."""
    words = [sys.executable, "-m", "tests.together.launched", "jobs"]
    done = subprocess.run(
        words,
        input=json.dumps(jobs),
        capture_output=True,
        text=True,
        env=os.environ | QUIET,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("commands")
    rng = np.random.default_rng(0)
    state = {f"layers.{i}.weight": rng.standard_normal((64, 96), np.float32) for i in range(12)}
    holdfast.save(state, path / "a.pt", durable=False)
    holdfast.save(
        state | {"layers.3.weight": state["layers.3.weight"] * 2},
        path / "b.safetensors",
        durable=False,
    )
    holdfast.save(state, path / "hf", format="safetensors", max_shard_size="60KB", durable=False)
    raw = bytearray((path / "a.pt").read_bytes())
    raw[len(raw) // 2] ^= 1
    (path / "damaged.pt").write_bytes(raw)
    shutil.copy(sorted((GOLDEN / "hostile").glob("*.pt"))[0], path / "hostile.pt")
    return path


COMMANDS: dict[str, tuple[int, list[str]]] = {
    "convert": (0, ["convert", "a.pt", "{out}/out.safetensors", "--dtype", "bf16", "--json"]),
    "edit": (0, ["edit", "hf", "{out}/out", "--rename", "layers.*=model.*", "--json"]),
    "cp": (0, ["cp", "hf", "{out}/out", "--json"]),
    "reshard": (0, ["reshard", "hf", "{out}/out", "--mesh", "tp=2", "--rule", "*: tp=0", "--json"]),
    "prune": (0, ["prune", "a.pt", "{out}/out", "--rule", "*: 2:4", "--json"]),
    "verify": (0, ["verify", "a.pt", "--json"]),
    "verify, damaged": (1, ["verify", "damaged.pt", "--json"]),
    "diff": (1, ["diff", "a.pt", "b.safetensors", "--json"]),
    "diff, the same": (0, ["diff", "a.pt", "hf", "--tensors-only"]),
    "stats": (0, ["stats", "a.pt", "--json"]),
    "scan": (0, ["scan", "a.pt", "hf", "--json"]),
    "scan, hostile": (1, ["scan", "a.pt", "hostile.pt", "--json"]),
    "report": (0, ["report", "a.pt", "-o", "{out}/page.html"]),
    "no such file": (2, ["convert", "nowhere.pt", "{out}/out"]),
    "wrong usage": (2, ["convert", "a.pt"]),
}
"""Each with its exit status."""


def without_times(text: str) -> str:
    """What was printed, without how long it took, how much room there was, and the memory of a process: ranks have fewer
    threads each."""
    if not text.startswith("{"):
        return text
    return json.dumps(
        {
            key: value
            for key, value in json.loads(text).items()
            if key not in ("seconds", "free_nbytes", "peak_nbytes")
        }
    )


@pytest.fixture(scope="module")
def commands(folder: Path) -> dict[str, tuple[dict[str, object], dict[str, object]]]:
    """What came of every command on one process and on three."""
    jobs = []
    for name, (_, words) in COMMANDS.items():
        for size in (1, 3):
            out = folder / "outs" / name / str(size)
            out.mkdir(parents=True)
            own = [
                word.format(out=out)
                if "{out}" in word
                else str(folder / word)
                if (folder / word).exists()
                else word
                for word in words
            ]
            jobs.append(
                {
                    "argv": own,
                    "size": size,
                    "room": str(folder / "room"),
                    "agent": len(jobs) % 4 == 1,
                }
            )
    rows = ran(jobs)
    return {name: (rows[2 * at], rows[2 * at + 1]) for at, name in enumerate(COMMANDS)}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_says_what_one_process_says(
    name: str, folder: Path, commands: dict[str, tuple[dict[str, object], ...]]
):
    alone, many = commands[name]
    first, *others = many["ranks"]
    status = COMMANDS[name][0]
    assert alone["ranks"][0]["status"] == status, alone
    assert first["status"] == status, many
    usage = name == "wrong usage"
    for other in others:
        assert (other["status"], other["out"], other["err"]) == (
            (2, "", first["err"]) if usage else (0, "", "")
        ), many
    outs = folder / "outs" / name
    here, there = str(outs / "3"), str(outs / "1")
    assert without_times(first["out"].replace(here, there)) == without_times(
        alone["ranks"][0]["out"]
    )
    if status < 2:
        assert first["err"] == alone["ranks"][0]["err"]
    assert_same_files(outs / "1", outs / "3")


CONVERT = ["convert", "{src}/hf", "{out}/out", "--overwrite", "--max-shard-size", "60KB"]


@pytest.fixture(scope="module")
def misfortunes(folder: Path) -> list[tuple[Path, dict[str, object]]]:
    """Conversions on three ranks, in which something happens to one of them; each to a place where an older one is."""
    jobs: list[dict[str, object]] = []
    cases = [(what, victim) for what in ("STOP", "full", "slow") for victim in range(3)]
    for number, (what, victim) in enumerate([(None, None), *cases]):
        out = folder / f"misfortune-{number}"
        out.mkdir()
        shutil.copy(folder / "b.safetensors", out / "old.safetensors")
        holdfast.convert(folder / "b.safetensors", out / "out", durable=False)
        argv = [word.format(src=folder, out=out) for word in CONVERT]
        job = {"argv": argv, "size": 3, "room": str(folder / "room"), "agent": number % 2 == 1}
        jobs.append(job | ({} if what is None else {"what": what, "victim": victim, "share": 0.6}))
    return [(Path(row["argv"][2]), row) for row in ran(jobs)]


@pytest.mark.parametrize(
    "number", range(9), ids=[f"{w}-{v}" for w in ("stopped", "full", "slow") for v in range(3)]
)
def test_something_happens_to_a_rank(
    number: int, misfortunes: list[tuple[Path, dict[str, object]]], folder: Path
):
    path, row = misfortunes[number + 1]
    what, victim = row["what"], row["victim"]
    first, told = row["ranks"][0], json.dumps(row, indent=1)
    assert not row["stuck"], told
    if what == "slow":
        assert {rank["status"] for rank in row["ranks"]} == {0}, (
            f"a rank that is slow is not lost\n{told}"
        )
        assert min(rank["seconds"] for rank in row["ranks"]) > 2 * DEADLINE, told
        assert holdfast.diff(path, folder / "hf", tensors_only=True).equal
        return
    assert holdfast.diff(path, folder / "b.safetensors", tensors_only=True).equal, (
        "what was there is there"
    )
    if what == "full":
        assert [rank["status"] for rank in row["ranks"]] == [2, 0, 0], told
        assert f"rank {victim}: " in first["err"], told
        assert "the disk is full" in first["err"], told
        assert sorted(p.name for p in path.parent.iterdir()) == ["old.safetensors", "out"], (
            "and nothing is left of it"
        )
        return
    assert row["happened"], told
    assert all(late < DEADLINE + TOLERANCE for late in row["late"].values()), told
    if victim:
        assert first["status"] == 2, told
        assert f"no sign of life from rank {victim} for" in first["err"], told
        assert all(not rank["err"] for rank in row["ranks"][1:]), told
        assert sorted(p.name for p in path.parent.iterdir()) == ["old.safetensors", "out"], (
            "and nothing is left of it"
        )
    else:
        for rank in row["ranks"][1:]:
            assert rank["status"] == 2, told
            assert "rank 0" in rank["err"], told


# torchrun itself.

TORCHRUN = [
    sys.executable,
    "-m",
    "torch.distributed.run",
    "--standalone",
    "--nproc-per-node",
    "2",
    "-m",
    "holdfast",
]


def launched(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*TORCHRUN, *words],
        capture_output=True,
        text=True,
        timeout=200,
        env=os.environ | QUIET,
        check=False,
    )


@pytest.mark.slow("runs torchrun twice, each with processes that import torch")
def test_torchrun_has_the_status_of_the_first_rank(folder: Path, tmp_path: Path):
    done = launched("diff", str(folder / "a.pt"), str(folder / "b.safetensors"), "--json")
    assert done.returncode == 1, done.stderr[-3000:]
    alone = subprocess.run(
        [sys.executable, "-m", "holdfast", "diff", str(folder / "a.pt"), str(folder / "b.safetensors"), "--json"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert without_times(done.stdout) == without_times(alone.stdout)
    assert alone.returncode == 1
    done = launched("convert", str(folder / "a.pt"), str(tmp_path / "out.safetensors"), "--json")
    assert done.returncode == 0, done.stderr[-3000:]
    assert str(tmp_path / "out.safetensors") in json.loads(done.stdout).values()


@pytest.mark.slow("runs torchrun three times, on a checkpoint of 512 MB")
@pytest.mark.parametrize("how", ["killed", "interrupted"])
def test_torchrun_of_which_a_rank_is_ended(folder: Path, tmp_path: Path, how: str):
    """A rank is killed, or Ctrl-C comes to all: torchrun ends the others, nothing is published, and the next command cleans up."""
    big = tmp_path / "big.safetensors"
    holdfast.save(
        {f"w{i}": np.ones((1024, 8192), np.float32) for i in range(16)}, big, durable=False
    )
    out = tmp_path / "there" / "out"
    out.parent.mkdir()
    words = [*TORCHRUN, "prune", str(big), str(out), "--rule", "*: 0.5"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(words, env=os.environ | QUIET, start_new_session=True, **pipes)
    try:
        until = time.monotonic() + 120
        while not any(is_temporary(path.name) for path in out.parent.iterdir()):
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < until
            time.sleep(0.01)
        if how == "killed":
            below = subprocess.run(
                ["pgrep", "-P", str(process.pid)], capture_output=True, text=True, check=True
            ).stdout.split()
            os.kill(max(map(int, below)), signal.SIGKILL)
        else:
            os.killpg(process.pid, signal.SIGINT)
        said, wrong = process.communicate(timeout=90)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    assert process.returncode, wrong
    assert not said
    assert not out.exists()
    if how == "killed":
        assert "Signal 9 (SIGKILL)" in wrong, wrong
    assert launched(*words[len(TORCHRUN) :], "--quiet").returncode == 0
    assert [path.name for path in out.parent.iterdir()] == ["out"]
