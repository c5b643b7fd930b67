"""Taking up an interrupted conversion."""

import errno
import io
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
import torch
import torch.distributed.checkpoint as dcp

import holdfast
from holdfast.engine import write
from holdfast.engine.targets import resume_folder
from holdfast.errors import DurabilityUncertain, NotCommitted
from holdfast.stores.files import Files, system_files
from holdfast.stores.local import LocalStore
from holdfast.verbs.shared.formats import LayoutOptions, plan_save, resolve_format
from holdfast.verbs.shared.planned import Writing, write_plan
from holdfast.verbs.shared.state import tabulate_state


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


def test_a_changed_source_of_what_is_computed_starts_anew(tmp_path, monkeypatch):
    """The bytes of a cast lie nowhere: what counts is the file that they are made of."""
    source, target = tmp_path / "in", tmp_path / "out"
    how = {"max_shard_size": 6_000, "resume": True, "dtype": "float16"}
    states = [{f"w{i}": np.eye(50, dtype=np.float32) * (i + k) for i in range(6)} for k in (1, 2)]
    holdfast.save(states[0], source)
    interrupted(monkeypatch, 3)
    with pytest.raises(NotCommitted):
        holdfast.convert(source, target, **how)
    holdfast.save(states[1], source, overwrite=True)
    interrupted(monkeypatch, -1)
    holdfast.convert(source, target, **how)
    with holdfast.open(target) as found:
        assert {name: float(tensor.numpy()[0, 0]) for name, tensor in found.items()} == {
            f"w{i}": i + 2 for i in range(6)
        }


def weights(step: int) -> dict[str, np.ndarray]:
    """Make tensors of other values for each step."""
    return {
        f"w{i}": np.tril(np.full((50, 50), 2.0 ** (6 * step + i - 18), np.float32))
        for i in range(6)
    }


SOURCES: dict[str, tuple[str, Callable[[int, Path], object]]] = {
    "torch": ("a.pt", lambda step, path: holdfast.save(weights(step), path)),
    "safetensors": ("a.safetensors", lambda step, path: holdfast.save(weights(step), path)),
    "safetensors of another program": (
        "a.safetensors",
        lambda step, path: safetensors.numpy.save_file(weights(step), path),
    ),
    "native": ("a", lambda step, path: holdfast.save(weights(step), path)),
    "npz": ("a.npz", lambda step, path: np.savez(path, **weights(step))),
    "dcp": (
        "a",
        lambda step, path: dcp.save(
            {name: torch.from_numpy(array) for name, array in weights(step).items()},
            checkpoint_id=path,
            no_dist=True,
        ),
    ),
}


def give_the_content_of(new: Path, old: Path) -> None:
    """Write the content of a file or folder into another, which keeps inode, length and times."""
    # The index of a DCP folder is that of both: it names the same items, and the path of the first.
    for file in sorted(old.glob("[!.]*")) if old.is_dir() else [old]:
        content = (new / file.name if old.is_dir() else new).read_bytes()
        before = file.stat()
        assert len(content) == before.st_size
        with open(file, "r+b") as out:
            out.write(content)
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
        after = file.stat()
        assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("options", [{}, {"dtype": "float16"}], ids=["as it is", "cast"])
@pytest.mark.parametrize("kind", SOURCES)
@pytest.mark.parametrize("has_change_times", [True, False])
def test_other_content_with_the_same_inode_length_and_time_starts_anew(
    tmp_path, monkeypatch, kind, options, has_change_times
):
    """Otherwise the target would have tensors of both sources."""
    name, save = SOURCES[kind]
    if not has_change_times:
        # Some file systems have none of their own. What is recorded has to tell then.
        if kind == "safetensors of another program":
            pytest.skip("it records no checksums")
        stamp = LocalStore.stamp
        monkeypatch.setattr(LocalStore, "stamp", lambda *args: (*stamp(*args)[:2], 0))
    old, new, target = tmp_path / name, tmp_path / "new" / name, tmp_path / "out"
    new.parent.mkdir()
    save(1, old)
    save(2, new)
    how = {"format": "safetensors", "max_shard_size": 6_000 if options else 12_000, **options}
    interrupted(monkeypatch, 4)
    with pytest.raises(NotCommitted):
        holdfast.convert(old, target, resume=True, **how)
    give_the_content_of(new, old)
    with holdfast.open(old) as checkpoint:
        expected = {name: tensor.numpy() for name, tensor in checkpoint.items()}
    interrupted(monkeypatch, -1)
    holdfast.convert(old, target, resume=True, **how)
    with holdfast.open(target) as converted:
        for name, array in expected.items():
            assert np.array_equal(converted[name].numpy(), array)


@pytest.mark.parametrize("source_of", [bytes, io.BytesIO], ids=["bytes", "file object"])
@pytest.mark.parametrize("options", [{}, {"dtype": "float16"}], ids=["as it is", "cast"])
def test_other_content_without_a_path_starts_anew(tmp_path, monkeypatch, source_of, options):
    target = tmp_path / "out"
    how = {"format": "safetensors", "max_shard_size": 6_000 if options else 12_000, **options}
    contents = [safetensors.numpy.save(weights(step)) for step in (1, 2)]
    interrupted(monkeypatch, 4)
    with pytest.raises(NotCommitted):
        holdfast.convert(source_of(contents[0]), target, resume=True, **how)
    interrupted(monkeypatch, -1)
    holdfast.convert(source_of(contents[1]), target, resume=True, **how)
    with holdfast.open(target) as converted:
        for name, array in weights(2).items():
            assert np.array_equal(converted[name].numpy(), array)


def test_finished_files_of_a_source_without_a_path_are_taken_over(tmp_path, monkeypatch):
    content = safetensors.numpy.save(weights(1))
    how = {"format": "safetensors", "max_shard_size": 12_000, "resume": True}
    interrupted(monkeypatch, 4)
    with pytest.raises(NotCommitted):
        holdfast.convert(content, tmp_path / "out", **how)
    written = interrupted(monkeypatch, -1)
    holdfast.convert(content, tmp_path / "out", **how)
    assert len([key for key in written if key.endswith(".safetensors")]) == 3
    assert hidden(tmp_path) == []


def test_a_second_conversion_at_the_same_time_is_refused(source, tmp_path):
    """It would take over the files of the first one, and lose them when the first one publishes."""
    target = tmp_path / "out"
    how = {"format": "safetensors", "max_shard_size": 12_000, "resume": True}
    refused = []

    def convert_again(nbytes: int) -> None:
        if not refused:
            with pytest.raises(NotCommitted, match="another process is writing") as caught:
                holdfast.convert(source, target, **how)
            refused.append(caught.value)

    holdfast.convert(source, target, progress=convert_again, threads=1, **how)
    assert refused[0].errno == errno.EBUSY
    assert refused[0].file == str(target)
    with holdfast.open(source) as a, holdfast.open(target) as b:
        assert a.digest() == b.digest()
    assert hidden(tmp_path) == []


def test_a_folder_that_another_conversion_removes_is_made_again(source, tmp_path, monkeypatch):
    """The other one publishes after this one has opened the folder, and before it has the lock."""
    try_lock, removed = resume_folder.try_lock, []

    def remove_and_lock(files: Files, descriptor: int) -> bool:
        if not removed:
            removed.extend(hidden(tmp_path))
            os.rmdir(tmp_path / removed[0])
        return try_lock(files, descriptor)

    monkeypatch.setattr(resume_folder, "try_lock", remove_and_lock)
    holdfast.convert(source, tmp_path / "out", max_shard_size=12_000, resume=True)
    assert removed
    assert holdfast.verify(tmp_path / "out").ok
    assert hidden(tmp_path) == []


class OneFails:
    """The calls of the file system, of which one fails."""

    def __init__(self, failing_number: int) -> None:
        self.failing_number = failing_number
        self.count = 0
        self.failed_call = ""

    def __getattr__(self, name: str) -> Callable[..., object]:
        real = getattr(system_files(), name)

        def call(*args: object, **options: object) -> object:
            self.count += 1
            if self.count != self.failing_number:
                return real(*args, **options)
            self.failed_call = name
            if name == "close":
                real(*args, **options)  # a descriptor is gone even if close reports a failure
            raise OSError(errno.EIO, "Input/output error")

        return call


def write_resumed(
    source: Path, target: Path, *, overwrite: bool, files: Files | None = None
) -> None:
    options = LayoutOptions(max_shard_size=12_000)
    format = resolve_format(str(target), "safetensors", options)
    with holdfast.open(source, threads=1) as checkpoint:
        plan = plan_save(str(target), tabulate_state(checkpoint), format, options=options)
        write_plan(plan, str(target), Writing(overwrite=overwrite, resume=True), files=files)


def step_at(target: Path) -> float | None:
    if not target.exists():
        return None
    with holdfast.open(target) as checkpoint:
        arrays = {name: tensor.numpy() for name, tensor in checkpoint.items()}
    steps = [step for step in (1, 2) if np.array_equal(arrays["w5"], weights(step)["w5"])]
    assert all(np.array_equal(arrays[name], weights(steps[0])[name]) for name in arrays)
    return steps[0]


@pytest.mark.parametrize("old", [None, 1], ids=["new", "replace"])
def test_whichever_call_fails_the_target_is_what_the_error_says(tmp_path, old):
    source = tmp_path / "in.pt"
    holdfast.save(weights(2), source)
    failed_calls = set()
    for number in range(1, 1_000):
        target = tmp_path / str(number) / "out"
        target.parent.mkdir()
        if old is not None:
            holdfast.save(weights(old), target, format="safetensors", max_shard_size=12_000)
        files = OneFails(number)
        raised: NotCommitted | DurabilityUncertain | None = None
        try:
            write_resumed(source, target, overwrite=old is not None, files=files)
        except (NotCommitted, DurabilityUncertain) as error:
            raised = error
        failed_calls.add(files.failed_call)
        where = f"call {number}, {files.failed_call}: {raised}"

        assert step_at(target) == (old if isinstance(raised, NotCommitted) else 2), where
        if raised is not None:
            assert raised.errno == errno.EIO, where
            # The next try succeeds, whatever this one left.
            write_resumed(source, target, overwrite=True)
            assert step_at(target) == 2, where
            assert hidden(target.parent) == [], where
        if not files.failed_call:
            break
    assert {"sync", "unlink", "rmdir", "rename", "link", "lock"} <= failed_calls
