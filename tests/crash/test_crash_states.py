"""Proof 1: every state that a crash may leave opens as the old or as the new; and broken sequences do not pass it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from holdfast.stores.files import Files, write_all
from tests.crash.model import ROOT, Directory, File, Model, arrangements
from tests.crash.proof import TARGET, Report, examine, examine_after_death
from tests.crash.writers import (
    FOLDER,
    WRITERS,
    Writer,
    read_toy,
    read_toy_directory,
    save_toy,
    save_toy_directory,
    toy,
    toy_files,
)

pytestmark = pytest.mark.usefixtures("everything_held")

each_writer = pytest.mark.parametrize("writer", [*WRITERS, FOLDER], ids=str)
DIRECTORIES = pytest.mark.parametrize("writer", [w for w in WRITERS if w.directory], ids=str)


@each_writer
@pytest.mark.parametrize("old", [False, True], ids=["new", "replace"])
@pytest.mark.parametrize("supported", [True, False], ids=["renameat2", "plain"])
def test_every_crash_leaves_the_old_or_the_new(writer: Writer, old: bool, supported: bool):
    report = examine(writer.save, writer.read, old=old, exchange=supported, noreplace=supported)
    assert report.violations == []
    assert len(report.calls) > 5
    assert report.states > 5


@each_writer
@pytest.mark.parametrize("supported", [True, False], ids=["renameat2", "plain"])
def test_the_same_without_overwriting(writer: Writer, supported: bool):
    def save(path: str, version: int, *, files: Files) -> None:
        writer.save(path, version, files=files, overwrite=False)

    report = examine(
        save, writer.read, old=False, first=writer.save, exchange=supported, noreplace=supported
    )
    assert report.violations == []


@each_writer
@pytest.mark.parametrize("old", [False, True], ids=["new", "replace"])
@pytest.mark.parametrize("supported", [True, False], ids=["renameat2", "plain"])
def test_without_fsync_a_dead_process_leaves_the_old_or_the_new(
    writer: Writer, old: bool, supported: bool
):
    def save(path: str, version: int, *, files: Files) -> None:
        writer.save(path, version, files=files, durable=False)

    report = examine(
        save, writer.read, old=old, power_cut=False, exchange=supported, noreplace=supported
    )
    assert report.violations == []
    assert not any(call.startswith("sync") for call in report.calls)


@each_writer
@pytest.mark.parametrize("exchange", [True, False], ids=["exchange", "two-renames"])
def test_a_kill_and_then_a_power_cut_during_the_next_save(writer: Writer, exchange: bool):
    report = examine_after_death(writer.save, writer.read, exchange=exchange)
    assert report.violations == []
    assert report.states > 50


NAMELESS = pytest.mark.parametrize(
    "writer", [w for w in WRITERS if w.directory or w.name == "toy"], ids=str
)
"""Those whose bytes do not depend on the name that they are saved under."""


@NAMELESS
@pytest.mark.parametrize("old", [False, True], ids=["new", "replace"])
@pytest.mark.parametrize("exchange", [True, False], ids=["exchange", "two-renames"])
def test_a_kill_and_then_a_power_cut_during_the_save_of_another_step(
    writer: Writer, old: bool, exchange: bool
):
    """Step 2 is saved after step 1 was killed: what is left of that is cleaned, and step 1 stays the old one or the new one."""
    report = examine_after_death(
        writer.save, writer.read, exchange=exchange, old=old, name="model-2"
    )
    assert report.violations == []
    assert report.states > 20


@NAMELESS
@pytest.mark.parametrize("old", [False, True], ids=["new", "replace"])
@pytest.mark.parametrize("supported", [True, False], ids=["renameat2", "plain"])
def test_a_save_of_another_step_cleans_after_every_crash(
    writer: Writer, old: bool, supported: bool
):
    report = examine(
        writer.save, writer.read, old=old, exchange=supported, noreplace=supported, then="model-2"
    )
    assert report.violations == []


# The proof can fail.


class Without:
    """The model, less some calls: they are said to have worked and do nothing."""

    def __init__(self, model: Model, *, skip: Callable[[Model, int], bool]) -> None:
        self._model = model
        self._skip = skip

    def __getattr__(self, name: str) -> object:
        return getattr(self._model, name)

    def sync(self, descriptor: int) -> None:
        if not self._skip(self._model, descriptor):
            self._model.sync(descriptor)


def kind(model: Model, descriptor: int) -> File | Directory:
    return model.nodes[model.open_descriptors[descriptor]]


def examine_without(
    writer: Writer, skip: Callable[[Model, int], bool], *, old: bool = True, exchange: bool = True
) -> Report:
    def save(path: str, version: int, *, files: Model) -> None:
        writer.save(path, version, files=Without(files, skip=skip))

    return examine(
        save, writer.read, old=old, first=writer.save, following=False, exchange=exchange
    )


@each_writer
def test_a_save_without_any_fsync_is_caught(writer: Writer):
    def save(path: str, version: int, *, files: Files) -> None:
        writer.save(path, version, files=files, durable=False)

    assert examine(save, writer.read, old=True, first=writer.save, following=False).violations


@each_writer
@pytest.mark.parametrize("old", [False, True], ids=["new", "replace"])
def test_skipping_the_fsync_of_files_is_caught(writer: Writer, old: bool):
    report = examine_without(writer, lambda model, d: isinstance(kind(model, d), File), old=old)
    assert report.violations
    assert not any("found nothing" in line for line in report.violations)


@each_writer
@pytest.mark.parametrize("old", [False, True], ids=["new", "replace"])
@pytest.mark.parametrize("exchange", [True, False], ids=["exchange", "two-renames"])
def test_skipping_the_fsync_of_the_parent_is_caught(writer: Writer, old: bool, exchange: bool):
    report = examine_without(
        writer, lambda model, d: model.open_descriptors[d] == model.root, old=old, exchange=exchange
    )
    assert any("(return)" in line or "unlink" in line for line in report.violations)


def test_skipping_the_fsync_of_a_linked_file_is_caught():
    """The step before was saved without waiting for the disk; what is linked of it is now part of a save that waits."""
    step = next(writer for writer in WRITERS if writer.name == "step")
    assert examine_without(
        step, lambda model, d: model.open_descriptors[d] in model.of_others()
    ).violations
    assert not examine_without(step, lambda model, d: False).violations


@DIRECTORIES
def test_skipping_the_fsync_of_the_new_directory_is_caught(writer: Writer):
    def skip(model: Model, d: int) -> bool:
        return isinstance(kind(model, d), Directory) and model.open_descriptors[d] != model.root

    assert examine_without(writer, skip).violations


def without_first_sync(writer: Writer) -> Callable[..., None]:
    """Return a save that does not sync the parent before it cleans up."""

    def save(path: str, version: int, *, files: Model) -> None:
        syncs = 0

        def skip(model: Model, d: int) -> bool:
            nonlocal syncs
            syncs += model.open_descriptors[d] == model.root
            return syncs == 1

        writer.save(path, version, files=Without(files, skip=skip))

    return save


@DIRECTORIES
@pytest.mark.parametrize("exchange", [True, False], ids=["exchange", "two-renames"])
def test_cleaning_before_the_dead_save_is_durable_is_caught(writer: Writer, exchange: bool):
    assert examine_after_death(
        writer.save, writer.read, exchange=exchange, second=without_first_sync(writer)
    ).violations


@DIRECTORIES
def test_cleaning_another_step_without_syncing_the_parent_is_caught(writer: Writer):
    """The other step's temporary may be what it replaced, by an exchange that is not on disk yet."""

    assert examine_after_death(
        writer.save, writer.read, second=without_first_sync(writer), name="model-2"
    ).violations


@each_writer
@pytest.mark.parametrize("which", [0, 1, 2])
def test_every_single_fsync_is_needed(writer: Writer, which: int):
    """Skip one fsync at a time, counted from the last one back."""
    total = sum(
        call.startswith("sync")
        for call in examine(writer.save, writer.read, old=True, following=False).calls
    )
    if which >= total:
        pytest.skip("this writer has fewer")
    count = 0

    def skip(model: Model, d: int) -> bool:
        nonlocal count
        count += 1
        return count == total - which

    assert examine_without(writer, skip).violations


def in_folder(files: Files) -> int:
    return files.open_directory(ROOT)


def save_renamed_too_early(path: str, version: int, *, files: Files) -> None:
    at = in_folder(files)
    d = files.create(".model.0123456789abcdef.tmp", dir_fd=at)
    write_all(files, d, toy(version), offset=0)
    files.rename(".model.0123456789abcdef.tmp", TARGET, dir_fd=at)
    files.sync(d)
    files.sync(at)
    files.close(d)
    files.close(at)


def save_in_place(path: str, version: int, *, files: Model) -> None:
    at = in_folder(files)
    d = files.open(TARGET, dir_fd=at)
    files.allocate(d, 0)
    write_all(files, d, toy(version), offset=0)
    files.sync(d)
    files.sync(at)
    files.close(d)
    files.close(at)


def save_after_unlink(path: str, version: int, *, files: Files) -> None:
    at = in_folder(files)
    d = files.create(".model.0123456789abcdef.tmp", dir_fd=at)
    write_all(files, d, toy(version), offset=0)
    files.sync(d)
    files.unlink(TARGET, dir_fd=at)
    files.rename(".model.0123456789abcdef.tmp", TARGET, dir_fd=at)
    files.sync(at)
    files.close(d)
    files.close(at)


@pytest.mark.parametrize("save", [save_renamed_too_early, save_in_place, save_after_unlink])
def test_broken_file_sequences_are_caught(save: Callable[..., None]):
    assert examine(save, read_toy, old=True, first=save_toy, following=False).violations


def written(files: Files, at: int, version: int) -> int:
    """A finished, durable temporary directory."""
    files.mkdir(".model.0123456789abcdef.tmp", dir_fd=at)
    inner = files.open_directory(".model.0123456789abcdef.tmp", dir_fd=at)
    data, index = toy_files(version)
    for key, content in (data | index).items():
        d = files.create(key, dir_fd=inner)
        write_all(files, d, content, offset=0)
        files.sync(d)
        files.close(d)
    files.sync(inner)
    return inner


def removed(files: Files, name: str, at: int) -> None:
    inner = files.open_directory(name, dir_fd=at)
    for key in files.list(inner):
        files.unlink(key, dir_fd=inner)
    files.close(inner)
    files.rmdir(name, dir_fd=at)


def save_after_deleting(path: str, version: int, *, files: Files) -> None:
    at = in_folder(files)
    inner = written(files, at, version)
    removed(files, TARGET, at)
    files.rename(".model.0123456789abcdef.tmp", TARGET, dir_fd=at)
    files.sync(at)
    files.close(inner)
    files.close(at)


def save_emptied_before_exchange(path: str, version: int, *, files: Files) -> None:
    at = in_folder(files)
    inner = written(files, at, version)
    old = files.open_directory(TARGET, dir_fd=at)
    for key in files.list(old):
        files.unlink(key, dir_fd=old)
    files.exchange(".model.0123456789abcdef.tmp", TARGET, dir_fd=at)
    files.sync(at)
    files.rmdir(".model.0123456789abcdef.tmp", dir_fd=at)
    for d in (old, inner, at):
        files.close(d)


def save_removed_before_sync(path: str, version: int, *, files: Files) -> None:
    at = in_folder(files)
    inner = written(files, at, version)
    files.exchange(".model.0123456789abcdef.tmp", TARGET, dir_fd=at)
    removed(files, ".model.0123456789abcdef.tmp", at)
    files.sync(at)
    files.close(inner)
    files.close(at)


def save_with_a_gap(path: str, version: int, *, files: Files) -> None:
    """Two renames, the old one under a name that nobody knows to look for."""
    at = in_folder(files)
    inner = written(files, at, version)
    files.rename(TARGET, "backup", dir_fd=at)
    files.rename(".model.0123456789abcdef.tmp", TARGET, dir_fd=at)
    files.sync(at)
    removed(files, "backup", at)
    files.close(inner)
    files.close(at)


BROKEN = [
    save_after_deleting,
    save_emptied_before_exchange,
    save_removed_before_sync,
    save_with_a_gap,
]


@pytest.mark.parametrize("save", BROKEN)
def test_broken_directory_sequences_are_caught(save: Callable[..., None]):
    assert examine(
        save, read_toy_directory, old=True, first=save_toy_directory, following=False
    ).violations


def test_what_the_broken_sequences_are_made_of_is_sound():
    """The same pieces in the right order pass: it is the order that is caught."""

    def save(path: str, version: int, *, files: Files) -> None:
        at = in_folder(files)
        inner = written(files, at, version)
        files.exchange(".model.0123456789abcdef.tmp", TARGET, dir_fd=at)
        files.sync(at)
        removed(files, ".model.0123456789abcdef.tmp", at)
        files.close(inner)
        files.close(at)

    assert (
        examine(
            save, read_toy_directory, old=True, first=save_toy_directory, following=False
        ).violations
        == []
    )


def test_a_leftover_is_seen():
    def save(path: str, version: int, *, files: Files) -> None:
        save_toy(path, version, files=files)
        at = in_folder(files)
        files.close(files.create(".model.0123456789abcdef.tmp", dir_fd=at))
        files.close(at)

    report = examine(save, read_toy, old=True, first=save_toy, following=False)
    assert any("is left" in line for line in report.violations)


# The model itself.


def test_a_torn_file_has_many_faces():
    states = File(b"o" * 9000, bytearray(b"n" * 9000)).states()
    assert {
        b"o" * 9000,
        b"n" * 9000,
        b"\0" * 9000,
        b"n" * 512 + b"o" * 8488,
        b"n" * 4096 + b"\0" * 4904,
    } <= set(states)
    assert len(states) > 20
    assert File(b"same", bytearray(b"same")).states() == [b"same"]


def test_directory_changes_are_dropped_and_reordered():
    made = Directory(synced={"name": 1}, entries={"name": 1})
    made.change({"tmp": 2})
    made.change({"tmp": None, "name": 2})
    assert made.states() == [{"name": 1}, {"name": 1, "tmp": 2}, {"name": 2}, {"name": 2, "tmp": 2}]


@pytest.mark.parametrize(("count", "expected"), [(0, 1), (3, 16), (4, 65), (5, 64), (12, 39)])
def test_arrangements_are_bounded(count: int, expected: int):
    assert len(list(arrangements(count))) == expected
