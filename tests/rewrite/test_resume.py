"""Taking up an interrupted conversion."""

import os

import numpy as np
import pytest

import holdfast
from holdfast.engine import write
from holdfast.errors import NotCommitted


@pytest.fixture
def source(tmp_path):
    state = {f"w{i}": np.full((50, 50), i, np.float32) for i in range(6)}
    holdfast.save(state, tmp_path / "in.pt")
    return tmp_path / "in.pt"


def interrupted(monkeypatch, after: int):
    """Make the file with this number fail, counted from 1."""
    calls = []
    real = write.write_file

    def failing(plan, sink, **rest):
        calls.append(plan.key)
        if len(calls) == after:
            raise OSError(5, "the plug was pulled")
        return real(plan, sink, **rest)

    monkeypatch.setattr("holdfast.engine.targets.folder.write_file", failing)
    return calls


def hidden(folder):
    return sorted(name for name in os.listdir(folder) if name.startswith("."))


def test_finished_files_are_taken_over(source, tmp_path, monkeypatch):
    target = tmp_path / "out"
    how = {"format": "safetensors", "max_shard_size": 12_000, "resume": True}
    interrupted(monkeypatch, 5)
    with pytest.raises(NotCommitted):
        holdfast.convert(source, target, **how)
    assert not target.exists()
    (kept,) = hidden(tmp_path)
    assert len(os.listdir(tmp_path / kept)) == 8  # four files and their receipts

    written = interrupted(monkeypatch, -1)
    done = holdfast.convert(source, target, **how)
    data = [key for key in written if key.endswith(".safetensors")]
    assert len(data) == 2, "four of six files were there already"
    assert hidden(tmp_path) == []
    assert done.done
    with holdfast.open(source) as a, holdfast.open(target) as b:
        assert a.digest() == b.digest()


def test_a_damaged_file_is_written_again(source, tmp_path, monkeypatch):
    target = tmp_path / "out"
    how = {"max_shard_size": 12_000, "resume": True}
    interrupted(monkeypatch, 4)
    with pytest.raises(NotCommitted):
        holdfast.convert(source, target, **how)
    (kept,) = hidden(tmp_path)
    first = tmp_path / kept / sorted(os.listdir(tmp_path / kept))[0]
    with open(first, "r+b") as file:
        file.seek(-10, os.SEEK_END)
        file.write(b"damage")
    written = interrupted(monkeypatch, -1)
    holdfast.convert(source, target, **how)
    assert first.name in written
    assert holdfast.verify(target).ok


def test_a_changed_source_starts_anew(source, tmp_path, monkeypatch):
    target = tmp_path / "out"
    interrupted(monkeypatch, 3)
    with pytest.raises(NotCommitted):
        holdfast.convert(source, target, max_shard_size=12_000, resume=True)
    holdfast.save({f"w{i}": np.full((50, 50), i + 1, np.float32) for i in range(6)}, source)
    written = interrupted(monkeypatch, -1)
    holdfast.convert(source, target, max_shard_size=12_000, resume=True)
    assert len([key for key in written if key.endswith(".safetensors")]) == 6


@pytest.mark.parametrize("sparse", ["never", "bitmap"])
def test_a_changed_source_of_what_is_computed_starts_anew(tmp_path, monkeypatch, sparse):
    """The bytes of a cast, or of what is stored packed, lie nowhere: what counts is the file that they are made of."""
    source, target = tmp_path / "in", tmp_path / "out"
    how = {
        "max_shard_size": 6_000,
        "resume": True,
        "dtype": "float16" if sparse == "never" else None,
    }
    states = [{f"w{i}": np.eye(50, dtype=np.float32) * (i + k) for i in range(6)} for k in (1, 2)]
    holdfast.save(states[0], source, sparse=sparse)
    interrupted(monkeypatch, 3)
    with pytest.raises(NotCommitted):
        holdfast.convert(source, target, **how)
    holdfast.save(states[1], source, sparse=sparse, overwrite=True)
    interrupted(monkeypatch, -1)
    holdfast.convert(source, target, **how)
    with holdfast.open(target) as found:
        assert {name: float(tensor.numpy()[0, 0]) for name, tensor in found.items()} == {
            f"w{i}": i + 2 for i in range(6)
        }
