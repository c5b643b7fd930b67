"""More shards than a process may have files open: reading and saving do not depend on `ulimit -n`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import holdfast

ROOT = Path(__file__).resolve().parents[2]

SHARDS, MOST = 200, 64

CHILD = f"""
import os, resource, sys
import numpy as np
import holdfast

def limit():
    resource.setrlimit(resource.RLIMIT_NOFILE, ({MOST}, {MOST}))

def state(add=0):
    return {{f"w{{i:03d}}": np.full(100, i + add, np.float32) for i in range({SHARDS})}}

def check(path, add=0, **options):
    with holdfast.open(path, **options) as c:
        assert len(c) == {SHARDS}
        for i in list(range({SHARDS})) + list(range({SHARDS})):
            assert (c[f"w{{i:03d}}"].numpy() == i + add).all(), i
        assert sum(array.sum() for array in c.read().values()) == sum(100 * (i + add) for i in range({SHARDS}))
        left = os.open(path, os.O_RDONLY)  # there is room for the program's own files
        os.close(left)
"""


def run(program: str, *arguments: object) -> None:
    command = [sys.executable, "-c", CHILD + program, *map(str, arguments)]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("format", ["native", "safetensors"])
def test_saving_reading_and_replacing(tmp_path: Path, format: str):
    run(
        """
limit()
path, format = sys.argv[1:]
for add in (0, 1000):
    holdfast.save(state(add), path, format=format, max_shard_size=400, overwrite=True, durable=add == 0)
    assert sum(name.endswith(".safetensors") for name in os.listdir(path)) == 200
    check(path, add, mmap=add > 0)
assert holdfast.verify(path).ok
# From one to the other, with both open; and several at once.
holdfast.convert(path, path + "-2", format=format, max_shard_size=400)
assert holdfast.diff(path, path + "-2").same
many = [holdfast.open(path) for _ in range(10)]
assert all((c["w150"].numpy() == 1150).all() for c in many)
""",
        tmp_path / "x",
        format,
    )


def test_a_distributed_checkpoint(tmp_path: Path):
    run(
        """
import torch
import torch.distributed.checkpoint as dcp
path = sys.argv[1]
writer = dcp.FileSystemWriter(path, single_file_per_rank=False)
dcp.save({name: torch.from_numpy(array) for name, array in state().items()}, storage_writer=writer)
assert sum(name.endswith(".distcp") for name in os.listdir(path)) == 200
limit()
check(path)
assert holdfast.verify(path).ok
""",
        tmp_path / "x",
    )


def test_files_of_many_ranks_are_taken_over(tmp_path: Path):
    run(
        """
limit()
from holdfast.engine.commit.transactions import DirectoryTransaction
with DirectoryTransaction(sys.argv[1], durable=False) as folder:
    for i in range(200):
        with open(os.path.join(folder.hidden_path, f"x{i}"), "wb") as file:
            file.write(b"12345")
        folder.add_from_rank(f"x{i}", 5)
    folder.commit()
assert len(os.listdir(sys.argv[1])) == 200
""",
        tmp_path / "x",
    )


def test_what_is_open_already_is_let_go_where_there_is_no_room(tmp_path: Path):
    holdfast.save({f"w{i}": np.full(10, i) for i in range(40)}, tmp_path / "x", max_shard_size=80)
    run(
        """
limit()
with holdfast.open(sys.argv[1]) as c:
    others = []
    try:
        while True:
            others.append(os.open(os.devnull, os.O_RDONLY))
    except OSError:
        os.close(others.pop())
    for i in range(40):
        assert (c[f"w{i}"].numpy() == i).all(), i
""",
        tmp_path / "x",
    )


def test_no_room_at_all_is_said_in_a_sentence(tmp_path: Path):
    holdfast.save({"w": np.ones(3)}, tmp_path / "x.pt")
    run(
        """
limit()
holdfast.open(sys.argv[1]).close()  # all that is imported is imported
try:
    while True:
        os.open(os.devnull, os.O_RDONLY)
except OSError:
    pass
try:
    holdfast.open(sys.argv[1])
except holdfast.errors.StoreError as error:
    assert "ulimit -n" in str(error), error
else:
    raise AssertionError("there should be no descriptor left")
""",
        os.fspath(tmp_path / "x.pt"),
    )
