"""The two transactions on the real file system: what they refuse, what they keep, what they clean, and what they leave alone."""

# ruff: noqa: PT012  (what is done inside a transaction is more than one statement)

from __future__ import annotations

import errno
import os
import stat
import threading
import time
import warnings
from contextlib import suppress
from pathlib import Path

import pytest

from holdfast.core.value import replace
from holdfast.engine.commit import new_file, temporaries
from holdfast.engine.commit.temporaries import find_recoverable, make_temporary_name
from holdfast.engine.commit.transactions import DirectoryTransaction, FileTransaction
from holdfast.errors import DurabilityUncertain, NotCommitted, SaveError, StoreError, Truncated
from holdfast.stores.files import FileEntry, Files, is_temporary
from tests.support import run_in_threads

DEAD = ".model.0123456789abcdef.tmp"
ASIDE = ".model.0123456789abcdef.old"


def put(
    path: Path | str, data: bytes = b"new", *, overwrite: bool = True, files: Files | None = None
) -> None:
    with FileTransaction(path, overwrite=overwrite, files=files) as t:
        t.file.write(0, data)
        t.commit()


def put_directory(
    path: Path | str, *, overwrite: bool = True, files: Files | None = None, **content: bytes
) -> None:
    with DirectoryTransaction(
        path, overwrite=overwrite, is_replaceable={"a", "b"}.__contains__, files=files
    ) as t:
        for key, data in content.items():
            t.create(key).write(0, data)
        t.commit()


def content(folder: Path) -> dict[str, bytes]:
    return {inner.name: inner.read_bytes() for inner in folder.iterdir()}


def names(folder: Path) -> list[str]:
    return sorted(inner.name for inner in folder.iterdir())


class Plain(Files):
    """A file system that can neither exchange nor refuse to replace."""

    def exchange(self, first: str, second: str, *, dir_fd: int) -> bool:
        return False

    def rename_new(self, source: str, target: str, *, dir_fd: int) -> bool:
        return False


# One file.


def test_a_new_file_has_the_usual_permissions(tmp_path: Path):
    put(tmp_path / "model")
    (tmp_path / "usual").write_bytes(b"")
    assert (tmp_path / "model").stat().st_mode == (tmp_path / "usual").stat().st_mode
    assert (tmp_path / "model").read_bytes() == b"new"


def test_the_permissions_of_a_replaced_file_stay(tmp_path: Path):
    path = tmp_path / "model"
    path.write_bytes(b"old")
    path.chmod(0o640)
    with FileTransaction(path) as t:
        assert stat.S_IMODE(os.fstat(t.file.descriptor).st_mode) == 0o600  # nobody reads it early
        t.file.write(0, b"new")
        t.commit()
    assert (stat.S_IMODE(path.stat().st_mode), path.read_bytes()) == (0o640, b"new")


def test_nothing_happens_without_commit(tmp_path: Path):
    path = tmp_path / "model"
    path.write_bytes(b"old")
    with FileTransaction(path) as t:
        t.file.write(0, b"new")
        assert names(tmp_path) != ["model"]
    assert content(tmp_path) == {"model": b"old"}


@pytest.mark.parametrize(
    "error", [KeyboardInterrupt, ZeroDivisionError, SystemExit, StoreError("the source is gone")]
)
def test_an_exception_gives_up_and_passes(
    tmp_path: Path, error: BaseException | type[BaseException]
):
    path = tmp_path / "model"
    path.write_bytes(b"old")
    with (
        pytest.raises(error if isinstance(error, type) else type(error)),
        FileTransaction(path) as t,
    ):
        t.file.write(0, b"new")
        raise error
    assert content(tmp_path) == {"model": b"old"}


def test_an_os_error_of_the_caller_becomes_ours(tmp_path: Path):
    with pytest.raises(NotCommitted) as caught, FileTransaction(tmp_path / "model"):
        raise OSError(errno.ESTALE, "Stale file handle")
    assert caught.value.errno == errno.ESTALE
    assert isinstance(caught.value.__cause__, OSError)
    assert names(tmp_path) == []


def test_a_write_that_failed_cannot_be_committed(tmp_path: Path):
    class Full(Files):
        def pwrite(self, descriptor: int, data: memoryview, offset: int) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

    with FileTransaction(tmp_path / "model", files=Full()) as t:
        with pytest.raises(NotCommitted, match="disk is full") as caught:
            t.file.write(0, b"new")
        assert caught.value.errno == errno.ENOSPC
        with pytest.raises(NotCommitted):
            t.commit()
    assert names(tmp_path) == []


def test_a_file_system_that_writes_nothing_does_not_hang(tmp_path: Path):
    class Lazy(Files):
        def pwrite(self, descriptor: int, data: memoryview, offset: int) -> int:
            return 0

    with pytest.raises(NotCommitted):
        put(tmp_path / "model", files=Lazy())


def test_use_after_the_end(tmp_path: Path):
    with FileTransaction(tmp_path / "model") as t:
        t.commit()
        with pytest.raises(SaveError):
            t.commit()
    with pytest.raises(AttributeError):
        t.file.write(0, b"")
    with pytest.raises(SaveError):
        FileTransaction(tmp_path / "model").commit()


def test_writes_from_several_threads(tmp_path: Path):
    blocks = [bytes([i]) * 10_000 for i in range(20)]
    with FileTransaction(tmp_path / "model") as t:
        t.file.allocate(200_000)
        run_in_threads(lambda i: t.file.write(i * 10_000, blocks[i]), range(20))
        t.commit()
    assert (tmp_path / "model").read_bytes() == b"".join(blocks)


@pytest.mark.parametrize("supported", [True, False])
def test_copying_ranges(tmp_path: Path, supported: bool):
    class NoCopy(Files):
        def copy_range(
            self, source: int, target: int, nbytes: int, *, source_offset: int, offset: int
        ) -> int:
            raise OSError(errno.EXDEV, "Invalid cross-device link")

    data = os.urandom(3_000_000)
    (tmp_path / "source").write_bytes(data)
    with (tmp_path / "source").open("rb") as source:
        with FileTransaction(tmp_path / "model", files=Files() if supported else NoCopy()) as t:
            t.file.allocate(2_000_010)
            t.file.copy(source.fileno(), 2_000_000, source_offset=7, offset=10)
            t.commit()
        assert (tmp_path / "model").read_bytes() == bytes(10) + data[7:2_000_007]
        with (
            pytest.raises(Truncated),
            FileTransaction(tmp_path / "model", files=Files() if supported else NoCopy()) as t,
        ):
            t.file.copy(source.fileno(), 10, source_offset=2_999_995, offset=0)
    assert names(tmp_path) == ["model", "source"]


# Targets.


def test_a_link_means_the_file_behind_it(tmp_path: Path):
    (tmp_path / "far").mkdir()
    (tmp_path / "far" / "real").write_bytes(b"old")
    (tmp_path / "link").symlink_to("far/real")
    put(tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert content(tmp_path / "far") == {"real": b"new"}
    (tmp_path / "dangling").symlink_to("far/other")
    put(tmp_path / "dangling")
    assert (tmp_path / "far" / "other").read_bytes() == b"new"


@pytest.mark.parametrize(
    "name",
    ["model", "folder/model", "here/model", "folder/../model", "here/../folder/model", "./model"],
)
def test_the_system_follows_the_links_to_a_folder(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """As it does for everybody who opens a file: a link to a folder and then `..` is the folder above that one."""
    (tmp_path / "far" / "folder").mkdir(parents=True)
    (tmp_path / "folder").mkdir()
    (tmp_path / "here").symlink_to("far/folder")
    monkeypatch.chdir(tmp_path)
    for path in (name, str(tmp_path / name)):
        put(path, path.encode())
        with open(path, "rb") as file:
            assert file.read() == path.encode()
    assert len(list(tmp_path.rglob("model"))) == 1


def test_the_file_system_says_how_long_a_name_may_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(Files, "longest_name", lambda self, at: 143)
    put(tmp_path / ("x" * 143))
    with pytest.raises(NotCommitted, match="too long"):
        put(tmp_path / ("x" * 144))


def test_further_names_of_a_file_keep_the_old_content(tmp_path: Path):
    (tmp_path / "model").write_bytes(b"old")
    os.link(tmp_path / "model", tmp_path / "best")
    put(tmp_path / "model")
    assert content(tmp_path) == {"model": b"new", "best": b"old"}


def make_loop(path: Path) -> None:
    path.symlink_to(path.name)


def make_read_only(path: Path) -> None:
    path.write_bytes(b"old")
    path.chmod(0o444)


REFUSED = {
    "a folder": (Path.mkdir, errno.EISDIR),
    "a pipe": (os.mkfifo, errno.EINVAL),
    "a loop": (make_loop, errno.ELOOP),
    "read-only": (make_read_only, errno.EACCES),
}


@pytest.mark.parametrize("what", REFUSED)
def test_targets_that_are_refused(tmp_path: Path, what: str):
    make, code = REFUSED[what]
    make(tmp_path / "model")
    before = (tmp_path / "model").lstat()
    with pytest.raises(NotCommitted) as caught:
        put(tmp_path / "model")
    assert caught.value.errno == code
    assert names(tmp_path) == ["model"]
    assert (tmp_path / "model").lstat().st_ino == before.st_ino


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("missing/model", errno.ENOENT),
        ("x" * 256, errno.ENAMETOOLONG),
        ("é" * 128, errno.ENAMETOOLONG),
        ("deep/" * 1000 + "model", errno.ENAMETOOLONG),
        ("file/model", errno.ENOTDIR),
        ("model/", errno.EISDIR),
        ("mo\0del", errno.EINVAL),
        ("mo\ud800del", errno.EINVAL),
        (DEAD, errno.EINVAL),
        (ASIDE, errno.EINVAL),
    ],
)
def test_paths_that_are_refused(tmp_path: Path, name: str, code: int):
    (tmp_path / "file").write_bytes(b"")
    for save in (put, put_directory):
        if save is put_directory and name == "model/":
            continue
        with pytest.raises(NotCommitted) as caught:
            save(f"{tmp_path}/{name}")
        assert caught.value.errno == code
    assert names(tmp_path) == ["file"]


@pytest.mark.parametrize("path", ["", "/", "/dev/null"])
def test_places_that_are_refused(path: str):
    with pytest.raises(NotCommitted):
        put(path)


def test_a_folder_that_may_not_be_written_to():
    class Denied(Files):
        def create(self, name: str, *, dir_fd: int, private: bool = False) -> int:
            raise PermissionError(errno.EACCES, "Permission denied")

    # Not with real permissions: the tests may run as root, whom nothing is denied.
    with pytest.raises(NotCommitted, match="permission denied") as caught:
        put("/tmp/holdfast-denied", files=Denied())
    assert caught.value.errno == errno.EACCES


@pytest.mark.parametrize(
    "name", ["x" * 255, "é" * 127, "x" * 234, "日" * 85, "\udc80" * 200, ".hidden", "a\nb"]
)
def test_names_of_every_length(tmp_path: Path, name: str):
    for data in (b"old", b"new"):
        put(tmp_path / name, data)
    assert content(tmp_path) == {name: b"new"}


def test_long_names_with_one_start_do_not_meet():
    one, two = make_temporary_name("x" * 250 + "1"), make_temporary_name("x" * 250 + "2")
    assert one[:-21] != two[:-21]
    assert len(one) == len(two) == 255
    assert is_temporary(one)


@pytest.mark.parametrize("files", [Files(), Plain()], ids=["renameat2", "link"])
def test_without_overwrite(tmp_path: Path, files: Files):
    put(tmp_path / "model", b"old", overwrite=False, files=files)
    with pytest.raises(NotCommitted) as caught:
        put(tmp_path / "model", overwrite=False, files=files)
    assert caught.value.errno == errno.EEXIST
    with (
        pytest.raises(NotCommitted) as caught,
        FileTransaction(tmp_path / "late", overwrite=False, files=files) as t,
    ):
        t.file.write(0, b"new")
        (tmp_path / "late").write_bytes(b"someone else's")
        t.commit()
    assert caught.value.errno == errno.EEXIST
    assert content(tmp_path) == {"model": b"old", "late": b"someone else's"}


def test_without_overwrite_where_the_file_system_cannot_promise(tmp_path: Path):
    class NoLinks(Plain):
        def link(
            self, source: str, target: str, *, dir_fd: int, source_dir_fd: int | None = None
        ) -> None:
            raise PermissionError(errno.EPERM, "Operation not permitted")

    with pytest.raises(NotCommitted, match="overwrite=True"):
        put(tmp_path / "model", overwrite=False, files=NoLinks())
    put(tmp_path / "model", files=NoLinks())
    assert content(tmp_path) == {"model": b"new"}


# Cleaning.


def test_what_a_dead_process_left_is_cleaned(tmp_path: Path):
    (tmp_path / DEAD).write_bytes(b"half")
    put(tmp_path / "model")
    assert names(tmp_path) == ["model"]
    (tmp_path / ".dir.0123456789abcdef.tmp").mkdir()
    (tmp_path / ".dir.0123456789abcdef.tmp" / "a").write_bytes(b"half")
    put_directory(tmp_path / "dir", a=b"1")
    assert names(tmp_path) == ["dir", "model"]


def test_what_a_live_process_holds_is_left_alone(tmp_path: Path):
    with (
        FileTransaction(tmp_path / "model") as slow,
        DirectoryTransaction(tmp_path / "dir") as slow_directory,
    ):
        slow.file.write(0, b"slow")
        slow_directory.create("a").write(0, b"slow")
        held = names(tmp_path)
        assert len(held) == 2
        put(tmp_path / "model", b"quick")
        with DirectoryTransaction(tmp_path / "dir", overwrite=True):
            pass
        assert names(tmp_path) == sorted([*held, "model"])
        slow.commit()
        slow_directory.commit()
    assert names(tmp_path) == ["dir", "model"]
    assert (tmp_path / "model").read_bytes() == b"slow"


def test_only_our_own_names_are_cleaned(tmp_path: Path):
    others = [
        ".model.tmp",
        ".model.0123456789abcdeg.tmp",
        ".model.0123456789ABCDEF.tmp",
        ".0123456789abcdef.tmp",
    ]
    others += [
        ".model.0123456789abcdef.tmp.bak",
        "model.0123456789abcdef.tmp",
        ".model.pt.0123456789abcdef.old",
    ]
    for name in others:
        (tmp_path / name).write_bytes(b"precious")
    put(tmp_path / "model")
    assert names(tmp_path) == sorted([*others, "model"])


def leave(path: Path, *, directory: bool) -> Path:
    """What a killed save left."""
    if directory:
        path.mkdir()
        (path / "a").write_bytes(b"half")
    else:
        path.write_bytes(b"half")
    return path


def test_what_another_step_left_is_cleaned(tmp_path: Path):
    leave(tmp_path / ".step-1000.0123456789abcdef.tmp", directory=True)
    leave(tmp_path / ".step-1000.pt.0123456789abcdef.tmp", directory=False)
    leave(tmp_path / ".step-1000.1123456789abcdef.old", directory=True)
    # What was set aside may be the only copy of another step.
    left = ".step-1000.1123456789abcdef.old"
    put(tmp_path / "step-2000.pt")
    assert names(tmp_path) == [left, "step-2000.pt"]
    leave(tmp_path / ".step-1000.0123456789abcdef.tmp", directory=True)
    put_directory(tmp_path / "step-2000", a=b"1")
    assert names(tmp_path) == [left, "step-2000", "step-2000.pt"]
    assert find_recoverable(tmp_path / "step-1000") == str(tmp_path / left)


def test_a_save_of_a_file_removes_no_folder_that_was_set_aside(tmp_path: Path):
    """Two of them are left for a person to decide, also when a file has the name by then."""
    left = [f".step-1000.{number}123456789abcdef.old" for number in range(2)]
    for name in left:
        leave(tmp_path / name, directory=True)
    for step in (b"1", b"2"):
        put(tmp_path / "step-1000", step)
    assert names(tmp_path) == [*left, "step-1000"]


def test_a_save_of_a_file_removes_only_folders_of_plain_files(tmp_path: Path):
    with_folder = tmp_path / ".step-1.0123456789abcdef.tmp"
    (with_folder / "folder").mkdir(parents=True)
    elsewhere = leave(tmp_path / "elsewhere", directory=True)
    (tmp_path / ".step-2.0123456789abcdef.tmp").symlink_to(elsewhere)
    put(tmp_path / "step-3.pt")
    assert names(tmp_path) == [
        with_folder.name,
        ".step-2.0123456789abcdef.tmp",
        "elsewhere",
        "step-3.pt",
    ]
    assert content(elsewhere) == {"a": b"half"}


def test_another_step_that_is_being_saved_is_left_alone(tmp_path: Path):
    put_directory(tmp_path / "old", a=b"old")
    with (
        DirectoryTransaction(tmp_path / "step-1", overwrite=True) as one,
        FileTransaction(tmp_path / "step-1.pt") as two,
    ):
        one.create("a").write(0, b"slow")
        two.file.write(0, b"slow")
        held = names(tmp_path)
        put_directory(tmp_path / "step-2", a=b"quick")
        put(tmp_path / "step-2.pt", b"quick")
        assert names(tmp_path) == sorted([*held, "step-2", "step-2.pt"])
        one.commit()
        two.commit()
    assert names(tmp_path) == ["old", "step-1", "step-1.pt", "step-2", "step-2.pt"]

    class Meanwhile(Files):
        """Saves another step in the middle of the exchange."""

        def exchange(self, first: str, second: str, *, dir_fd: int) -> bool:
            done = super().exchange(first, second, dir_fd=dir_fd)
            put_directory(tmp_path / "step-3", a=b"quick")
            assert content(tmp_path / first) == {"a": b"old"}
            return done

    put_directory(tmp_path / "old", files=Meanwhile(), a=b"new")
    assert content(tmp_path / "old") == {"a": b"new"}


class Shared(Files):
    """A file system that several machines have."""

    def is_shared(self, descriptor: int) -> bool:
        return True


@pytest.mark.parametrize("directory", [False, True])
def test_where_locks_may_not_tell_another_step_is_left_for_a_day(tmp_path: Path, directory: bool):
    """A rank on another machine may be writing it. One that nobody has touched for a day is nobody's."""

    fresh = leave(tmp_path / ".step-1.0123456789abcdef.tmp", directory=directory)
    stale = leave(tmp_path / ".step-1.1123456789abcdef.tmp", directory=directory)
    leave(tmp_path / ".step-2.1123456789abcdef.tmp", directory=directory)
    os.utime(stale, (0, stale.stat().st_mtime - 90_000))
    save = put_directory if directory else put
    save(tmp_path / "step-2", files=Shared())
    assert names(tmp_path) == [fresh.name, "step-2"]


def test_a_clock_that_is_ahead_abandons_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """What another machine writes is as old as the file system says, whatever this machine's clock does."""

    fresh = leave(tmp_path / ".step-1.0123456789abcdef.tmp", directory=True)
    monkeypatch.setattr(temporaries.time, "time", lambda: fresh.stat().st_mtime + 1e8)
    put_directory(tmp_path / "step-2", files=Shared())
    assert names(tmp_path) == [fresh.name, "step-2"]


def test_saves_of_many_names_at_once_do_not_disturb_each_other(tmp_path: Path):
    """Each cleans while the others are between making their temporary and locking it."""

    def save(number: int) -> None:
        try:
            for _ in range(20):
                put_directory(tmp_path / f"step-{number}", a=b"x")
                put(tmp_path / f"file-{number}")
        except BaseException as error:
            failed.append(error)

    failed: list[BaseException] = []
    run_in_threads(save, range(8))
    assert failed == []
    assert names(tmp_path) == sorted(
        [*(f"step-{n}" for n in range(8)), *(f"file-{n}" for n in range(8))]
    )


def test_a_directory_that_a_cleaner_takes_before_it_is_opened(tmp_path: Path):
    class Raced(Files):
        tries = 0

        def open_directory(self, path: str, *, dir_fd: int | None = None) -> int:
            if is_temporary(path):
                self.tries += 1
                if self.tries == 1:
                    os.rmdir(path, dir_fd=dir_fd)
            return super().open_directory(path, dir_fd=dir_fd)

    files = Raced()
    put_directory(tmp_path / "model", files=files, a=b"1")
    assert files.tries == 2
    assert names(tmp_path) == ["model"]


def test_what_a_failed_fsync_leaves_is_set_aside(tmp_path: Path):
    """The old folder stays: a save of another step, whose own fsync may lie about the first one's, does not remove it."""

    class Failing(Files):
        def sync(self, descriptor: int) -> None:
            if os.fstat(descriptor).st_ino == tmp_path.stat().st_ino:
                raise OSError(errno.EIO, "Input/output error")

    put_directory(tmp_path / "model", a=b"old")
    with pytest.raises(DurabilityUncertain) as caught:
        put_directory(tmp_path / "model", files=Failing(), a=b"new")
    (kept,) = (name for name in names(tmp_path) if is_temporary(name))
    assert f"kept as {kept}" in str(caught.value)
    put_directory(tmp_path / "other", a=b"1")
    assert content(tmp_path / kept) == {"a": b"old"}
    put_directory(tmp_path / "model", a=b"newer")
    assert names(tmp_path) == ["model", "other"]


def test_cleaning_follows_no_link(tmp_path: Path):
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "file").write_bytes(b"precious")
    (tmp_path / DEAD).symlink_to("precious")
    (tmp_path / ".model.1123456789abcdef.tmp").symlink_to("precious/file")
    (tmp_path / ".model.2123456789abcdef.tmp").mkdir()
    (tmp_path / ".model.2123456789abcdef.tmp" / "file").symlink_to(tmp_path / "precious" / "file")
    (tmp_path / ".model.3123456789abcdef.tmp").mkdir()
    (tmp_path / ".model.3123456789abcdef.tmp" / "inner").mkdir()
    (tmp_path / ".model.3123456789abcdef.tmp" / "plain").write_bytes(b"")
    os.mkfifo(tmp_path / ".model.4123456789abcdef.tmp")
    before = names(tmp_path)
    put_directory(tmp_path / "model", a=b"1")
    assert names(tmp_path) == sorted([*before, "model"])
    assert content(tmp_path / "precious") == {"file": b"precious"}
    assert names(tmp_path / ".model.3123456789abcdef.tmp") == ["inner", "plain"]


@pytest.mark.parametrize("directory", [False, True])
@pytest.mark.parametrize("when", ["removed", "locked"])
def test_a_cleaner_between_creating_and_locking(tmp_path: Path, directory: bool, when: str):
    """The creator starts again with another name, whether the cleaner is done or still at it."""

    class Raced(Files):
        tries = 0
        held = -1

        def lock(self, descriptor: int) -> bool:
            fresh = next(name for name in names(tmp_path) if is_temporary(name))
            self.tries += 1
            if self.tries == 1:
                if when == "locked":
                    self.held = os.open(tmp_path / fresh, os.O_RDONLY)
                    assert Files().lock(self.held)
                else:
                    (os.rmdir if directory else os.unlink)(tmp_path / fresh)
            elif when == "locked" and self.tries == 2:
                # The cleaner goes on.
                (os.rmdir if directory else os.unlink)(
                    tmp_path / min(n for n in names(tmp_path) if is_open(tmp_path / n, self.held))
                )
                os.close(self.held)
            return super().lock(descriptor)

    files = Raced()
    if directory:
        put_directory(tmp_path / "model", files=files, a=b"1")
    else:
        put(tmp_path / "model", files=files)
    assert files.tries >= 2
    assert names(tmp_path) == ["model"]


def is_open(path: Path, descriptor: int) -> bool:
    return path.stat().st_ino == os.fstat(descriptor).st_ino


def test_a_file_system_without_locks(tmp_path: Path):
    class NoLocks(Files):
        def lock(self, descriptor: int) -> bool:
            raise OSError(errno.ENOLCK, "No locks available")

    (tmp_path / DEAD).write_bytes(b"whose?")
    put(tmp_path / "model", files=NoLocks())
    assert names(tmp_path) == [DEAD, "model"]


# Directories.


def test_a_directory_is_replaced_as_a_whole(tmp_path: Path):
    for files in (Files(), Plain()):
        put_directory(tmp_path / "model", files=files, a=b"1", b=b"2")
        (tmp_path / "model").chmod(0o750)
        put_directory(tmp_path / "model", files=files, a=b"3")
        assert content(tmp_path / "model") == {"a": b"3"}
        assert stat.S_IMODE((tmp_path / "model").stat().st_mode) == 0o750
        assert names(tmp_path) == ["model"]


def modes(folder: Path) -> dict[str, int]:
    return {inner.name: stat.S_IMODE(inner.stat().st_mode) for inner in (folder, *folder.iterdir())}


@pytest.mark.parametrize("files", [Files(), Plain()], ids=["exchange", "two-renames"])
def test_who_may_read_a_replaced_directory(tmp_path: Path, files: Files):
    """The folder keeps its bits, setgid and sticky too; a file keeps those of its name, and a new name gets what all had."""
    model = tmp_path / "model"
    for folder_mode in (0o2770, 0o3750, 0o700, 0o2755):
        put_directory(model, a=b"1", b=b"2")
        (model / "a").chmod(0o600)
        (model / "b").chmod(0o640)
        model.chmod(folder_mode)
        with DirectoryTransaction(model, overwrite=True, is_replaceable=str, files=files) as t:
            (hidden,) = (tmp_path / name for name in names(tmp_path) if is_temporary(name))
            for key in ("a", "c"):
                t.create(key).write(0, b"new")
                assert modes(hidden)[key] == 0o600
            t.create("b")
            (hidden / "of another rank").write_bytes(b"new")
            t.add_from_rank("of another rank", 3)
            assert modes(hidden)[hidden.name] & 0o777 == 0o700
            t.commit()
        assert modes(model) == {
            "model": folder_mode,
            "a": 0o600,
            "b": 0o640,
            "c": 0o600,
            "of another rank": 0o600,
        }
        for name in ("c", "of another rank"):
            (model / name).unlink()


def test_a_directory_without_files_says_nothing_about_them(tmp_path: Path):
    (tmp_path / "model").mkdir(mode=0o700)
    (tmp_path / "usual").write_bytes(b"")
    put_directory(tmp_path / "model", a=b"1")
    assert modes(tmp_path / "model") == {
        "model": 0o700,
        "a": stat.S_IMODE((tmp_path / "usual").stat().st_mode),
    }


class Owners(Files):
    """A file system on which this user is nobody in particular, and what it replaces belongs to user 7 and group 8."""

    def __init__(self, *, member: bool) -> None:
        super().__init__()
        self.member = member
        self.given: list[tuple[int, int]] = []

    def chown(self, descriptor: int, user: int, group: int) -> None:
        if user != -1 or not self.member:
            raise PermissionError(errno.EPERM, "Operation not permitted")
        self.given.append((user, group))

    def stat(self, name: str, *, dir_fd: int) -> FileEntry | None:
        found = super().stat(name, dir_fd=dir_fd)
        return None if found is None else replace(found, owner=(7, 8))


@pytest.mark.parametrize("member", [True, False])
def test_the_group_is_kept_or_gets_no_more_than_everybody(tmp_path: Path, member: bool):
    put_directory(tmp_path / "dir", a=b"old")
    put(tmp_path / "file")
    for path, mode in (
        (tmp_path / "dir" / "a", 0o664),
        (tmp_path / "dir", 0o2775),
        (tmp_path / "file", 0o640),
    ):
        path.chmod(mode)
    files = Owners(member=member)
    put_directory(tmp_path / "dir", files=files, a=b"new")
    put(tmp_path / "file", files=files)
    found = {**modes(tmp_path / "dir"), "file": modes(tmp_path)["file"]}
    assert found == (
        {"a": 0o664, "dir": 0o2775, "file": 0o640}
        if member
        else {"a": 0o644, "dir": 0o755, "file": 0o600}
    )
    assert files.given == [(-1, 8)] * 3 * member


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_root_leaves_the_owner(tmp_path: Path):
    put_directory(tmp_path / "dir", a=b"old")
    put(tmp_path / "file")
    for path in (tmp_path / "dir" / "a", tmp_path / "dir", tmp_path / "file"):
        os.chown(path, 65534, 12)
    put_directory(tmp_path / "dir", a=b"new", b=b"new")
    put(tmp_path / "file")
    for path in (
        tmp_path / "dir" / "a",
        tmp_path / "dir" / "b",
        tmp_path / "dir",
        tmp_path / "file",
    ):
        assert (path.stat().st_uid, path.stat().st_gid) == (65534, 12)


def test_an_open_reader_keeps_the_old_files(tmp_path: Path):
    put_directory(tmp_path / "model", a=b"old")
    with (tmp_path / "model" / "a").open("rb") as reader:
        put_directory(tmp_path / "model", a=b"new")
        assert reader.read() == b"old"


def make_foreign(folder: Path) -> None:
    (folder / "thesis.tex").write_bytes(b"")


def make_inner(folder: Path) -> None:
    (folder / "a").mkdir()


def make_link(folder: Path) -> None:
    (folder / "a").symlink_to("/etc/passwd")


@pytest.mark.parametrize("make", [make_foreign, make_inner, make_link])
@pytest.mark.parametrize("late", [False, True])
def test_what_is_no_checkpoint_is_not_replaced(tmp_path: Path, make: object, late: bool):
    (tmp_path / "model").mkdir()
    if not late:
        make(tmp_path / "model")
    with (
        pytest.raises(NotCommitted, match="not part of a checkpoint") as caught,
        DirectoryTransaction(
            tmp_path / "model", overwrite=True, is_replaceable="ab".__contains__
        ) as t,
    ):
        assert late
        t.create("b").write(0, b"new")
        make(tmp_path / "model")
        t.commit()
    assert caught.value.errno == errno.ENOTEMPTY
    assert names(tmp_path) == ["model"]
    assert len(names(tmp_path / "model")) == 1


def test_a_refusal_names_five_foreign_entries_and_counts_the_others(tmp_path: Path):
    (tmp_path / "model" / "inner").mkdir(parents=True)
    for number in range(6):
        (tmp_path / "model" / f"notes{number}").touch()

    with pytest.raises(NotCommitted) as caught:
        put_directory(tmp_path / "model", a=b"new")

    assert "(the directory 'inner', 'notes0', 'notes1', 'notes2', 'notes3' and 2 more)" in str(
        caught.value
    )


class WithoutLinks(Files):
    """Refuses to link a file, and replaces the file of the base before it is copied."""

    def link(self, name: str, new_name: str, *, dir_fd: int, source_dir_fd: int | None = None):
        os.rename("replacement", name, src_dir_fd=source_dir_fd, dst_dir_fd=source_dir_fd)
        raise OSError(errno.EXDEV, "Invalid cross-device link")


def test_a_file_of_the_base_that_was_replaced_before_its_copy_is_refused(tmp_path: Path):
    base = tmp_path / "base"
    base.mkdir()
    (base / "a").write_bytes(b"old")
    (base / "replacement").write_bytes(b"new")
    base_dir_fd = os.open(base, os.O_RDONLY)
    try:
        with (
            pytest.raises(NotCommitted, match="the base changed") as caught,
            DirectoryTransaction(tmp_path / "model", files=WithoutLinks()) as transaction,
        ):
            transaction.link_from_base("a", 3, base_dir_fd=base_dir_fd)
    finally:
        os.close(base_dir_fd)
    assert caught.value.errno == errno.ESTALE
    assert names(tmp_path) == ["base"]


def test_an_existing_directory_stays_without_overwrite(tmp_path: Path):
    (tmp_path / "model").mkdir()
    with pytest.raises(NotCommitted) as caught, DirectoryTransaction(tmp_path / "model"):
        pass
    assert caught.value.errno == errno.EEXIST
    with pytest.raises(NotCommitted) as caught, DirectoryTransaction(tmp_path / "late") as t:
        (tmp_path / "late").mkdir()
        t.commit()
    assert caught.value.errno == errno.EEXIST
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(NotCommitted) as caught:
        put_directory(tmp_path / "file", overwrite=True)
    assert caught.value.errno == errno.ENOTDIR
    assert names(tmp_path) == ["file", "late", "model"]


@pytest.mark.parametrize(
    "key",
    ["", ".", "..", "a/b", "/a", "a\\b", "a\0", ".x.0123456789abcdef.tmp", "x" * 256, "\ud800"],
)
def test_keys_that_are_refused(tmp_path: Path, key: str):
    with pytest.raises(NotCommitted), DirectoryTransaction(tmp_path / "model") as t:
        t.create(key)
    assert names(tmp_path) == []


def test_a_key_is_written_once(tmp_path: Path):
    with pytest.raises(NotCommitted), DirectoryTransaction(tmp_path / "model") as t:
        t.create("a")
        t.create("a")
    assert names(tmp_path) == []


def test_a_directory_with_a_failed_file_cannot_be_committed(tmp_path: Path):
    class Full(Files):
        def allocate(self, descriptor: int, nbytes: int) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

    with DirectoryTransaction(tmp_path / "model", files=Full()) as t:
        with pytest.raises(NotCommitted, match="disk is full"):
            t.create("a").allocate(10)
        for step in (t.seal_data, t.commit):
            with pytest.raises(NotCommitted):
                step()
    assert names(tmp_path) == []


def test_two_saves_do_not_replace_one_directory_at_once(tmp_path: Path):
    put_directory(tmp_path / "model", a=b"old")

    class Busy(Files):
        def exchange(self, first: str, second: str, *, dir_fd: int) -> bool:
            with pytest.raises(NotCommitted) as caught:
                put_directory(tmp_path / "model", a=b"meanwhile")
            assert caught.value.errno == errno.EBUSY
            return super().exchange(first, second, dir_fd=dir_fd)

    put_directory(tmp_path / "model", files=Busy(), a=b"new")
    assert content(tmp_path / "model") == {"a": b"new"}
    assert names(tmp_path) == ["model"]


@pytest.mark.parametrize("call", ["exchange", "rename"])
@pytest.mark.parametrize("after", [False, True])
def test_an_interrupt_around_the_visible_step(tmp_path: Path, call: str, after: bool):
    """Ctrl-C right before or right after each rename: wholly old or wholly new, and nothing beside it."""
    for which in (1, 2) if call == "rename" else (1,):
        count = 0

        class Interrupted(Files):
            def _maybe(self, name: str, *args: str, dir_fd: int) -> bool:
                nonlocal count
                if call == "rename" and name == "exchange":
                    return False
                count += name == call
                if count == which and not after:  # noqa: B023
                    count += 1
                    raise KeyboardInterrupt
                result = getattr(Files, name)(self, *args, dir_fd=dir_fd)
                if count == which and after:  # noqa: B023
                    count += 1
                    raise KeyboardInterrupt
                return bool(result)

            def exchange(self, first: str, second: str, *, dir_fd: int) -> bool:
                return self._maybe("exchange", first, second, dir_fd=dir_fd)

            def rename(self, source: str, target: str, *, dir_fd: int) -> None:
                self._maybe("rename", source, target, dir_fd=dir_fd)

        put_directory(tmp_path / "model", a=b"old")
        with pytest.raises(KeyboardInterrupt):
            put_directory(tmp_path / "model", files=Interrupted(), a=b"new")
        assert names(tmp_path) == ["model"]
        new = after and (call == "exchange" or which == 2)
        assert content(tmp_path / "model") == {"a": b"new" if new else b"old"}


class InterruptedRemoval(Files):
    """Raises an interrupt when a save that is given up removes its temporary."""

    def unlink(self, name: str, *, dir_fd: int) -> None:
        raise KeyboardInterrupt


@pytest.mark.parametrize("kind", [FileTransaction, DirectoryTransaction])
def test_an_interrupted_clean_up_keeps_no_descriptor_and_no_lock(
    tmp_path: Path, kind: type[FileTransaction | DirectoryTransaction]
):
    descriptors_before = os.listdir("/proc/self/fd")
    with (
        pytest.raises(KeyboardInterrupt),
        kind(tmp_path / "model", files=InterruptedRemoval()) as t,
    ):
        if isinstance(t, DirectoryTransaction):
            t.create("a")
    assert os.listdir("/proc/self/fd") == descriptors_before

    # The next save can lock what was left, and removes it.
    assert len(names(tmp_path)) == 1
    if kind is FileTransaction:
        put(tmp_path / "model")
    else:
        put_directory(tmp_path / "model", a=b"new")
    assert names(tmp_path) == ["model"]


class LosesToCleaner(Files):
    """Cannot lock its temporary, because a cleaner has it. Closing it reports an error."""

    def __init__(self) -> None:
        super().__init__()
        self.created: int | None = None
        self.close_count = 0

    def create(self, name: str, *, dir_fd: int, private: bool = False) -> int:
        self.created = super().create(name, dir_fd=dir_fd, private=private)
        return self.created

    def lock(self, descriptor: int) -> bool:
        return descriptor != self.created and super().lock(descriptor)

    def close(self, descriptor: int) -> None:
        if descriptor != self.created:
            super().close(descriptor)
            return
        self.close_count += 1
        if self.close_count == 1:
            super().close(descriptor)
        raise OSError(errno.EIO, "Input/output error")


def test_a_temporary_that_a_cleaner_took_is_closed_once(tmp_path: Path):
    files = LosesToCleaner()
    with pytest.raises(NotCommitted):
        put(tmp_path / "model", files=files)
    assert files.close_count == 1


# Recovery.


def test_recovery(tmp_path: Path):
    path = tmp_path / "model"
    assert find_recoverable(path) is None
    (tmp_path / ASIDE).mkdir()
    (tmp_path / ASIDE / "a").write_bytes(b"old")
    assert find_recoverable(path) == str(tmp_path / ASIDE)
    assert names(tmp_path) == [ASIDE]
    with pytest.raises(NotCommitted) as caught:
        put_directory(path, overwrite=False, a=b"new")
    assert caught.value.errno == errno.EEXIST
    assert names(tmp_path) == ["model"]
    assert content(path) == {"a": b"old"}
    assert find_recoverable(path) is None


def test_recovery_then_replacing(tmp_path: Path):
    (tmp_path / ASIDE).mkdir()
    (tmp_path / ASIDE / "a").write_bytes(b"old")
    put_directory(tmp_path / "model", a=b"new")
    assert names(tmp_path) == ["model"]
    assert content(tmp_path / "model") == {"a": b"new"}


def test_what_is_set_aside_is_no_use_where_the_target_exists(tmp_path: Path):
    put_directory(tmp_path / "model", a=b"new")
    (tmp_path / ASIDE).mkdir()
    (tmp_path / ASIDE / "a").write_bytes(b"old")
    assert find_recoverable(tmp_path / "model") is None
    put_directory(tmp_path / "model", a=b"newer")
    assert names(tmp_path) == ["model"]


def test_recovery_does_not_guess(tmp_path: Path):
    (tmp_path / ASIDE).mkdir()
    (tmp_path / ".model.1123456789abcdef.old").mkdir()
    assert find_recoverable(tmp_path / "model") is None
    assert find_recoverable(tmp_path / "missing" / "model") is None
    assert find_recoverable("/") is None
    assert find_recoverable("\0") is None
    (tmp_path / ".link.0123456789abcdef.old").symlink_to("/etc")
    (tmp_path / ".file.0123456789abcdef.old").write_bytes(b"")
    assert find_recoverable(tmp_path / "link") is None
    assert find_recoverable(tmp_path / "file") is None


def test_a_live_save_between_its_renames_is_not_repaired(tmp_path: Path):
    put_directory(tmp_path / "model", a=b"old")

    class Slow(Plain):
        renames = 0

        def rename(self, source: str, target: str, *, dir_fd: int) -> None:
            self.renames += 1
            if self.renames == 2:
                assert find_recoverable(tmp_path / "model") is not None
                with DirectoryTransaction(tmp_path / "model", overwrite=True):
                    assert not (tmp_path / "model").exists()
            super().rename(source, target, dir_fd=dir_fd)

    put_directory(tmp_path / "model", files=Slow(), a=b"new")
    assert names(tmp_path) == ["model"]
    assert content(tmp_path / "model") == {"a": b"new"}


def test_no_descriptor_is_left_open(tmp_path: Path):
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        put(tmp_path / "model")
        put_directory(tmp_path / "dir", a=b"1")
        for wrong in ("missing/x", "dir", "x" * 300):
            with pytest.raises(NotCommitted):
                put(tmp_path / wrong)
        with pytest.raises(NotCommitted):
            put_directory(tmp_path / "dir", overwrite=False)
    assert len(os.listdir("/proc/self/fd")) == before


class Begun(Files):
    """Notes what the disk is told to begin with, and by whom; that it could not be told is nobody's failure."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[tuple[int, int]] = []
        self.callers: set[str] = set()

    def begin_sync(self, descriptor: int, offset: int, nbytes: int) -> None:
        self.told.append((offset, nbytes))
        self.callers.add(threading.current_thread().name)
        super().begin_sync(descriptor, offset, nbytes)
        raise OSError(errno.EIO, "input/output error")


@pytest.mark.parametrize("durable", [True, False])
def test_the_disk_is_told_to_begin_where_it_will_be_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, durable: bool
):
    """By a thread of its own, of each stretch once all of it is written; the fsync says what is wrong."""
    monkeypatch.setattr(new_file, "WRITEBACK_NBYTES", 1 << 16)
    files, data = Begun(), os.urandom(4 << 16)
    with FileTransaction(tmp_path / "model", durable=durable, files=files) as t:
        t.file.allocate(len(data) + 5)
        for start, stop in [(0, 1000), (3000, 200_000), (1000, 3000), (200_000, len(data))]:
            t.file.write(start, data[start:stop])
        t.file.write(len(data), b"small")
        if durable:
            while len(files.told) < 4:
                time.sleep(0.001)
        t.commit()
    assert (tmp_path / "model").read_bytes() == data + b"small"
    assert sorted(files.told) == ([(start << 16, 1 << 16) for start in range(4)] if durable else [])
    assert files.callers == ({"holdfast-writeback"} if durable else set())


def test_what_the_disk_was_not_told_of_is_left_to_the_fsync(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A disk that is slow to be told is not waited for stretch by stretch, and nobody touches a closed file."""
    monkeypatch.setattr(new_file, "WRITEBACK_NBYTES", 1 << 12)
    begun, go = threading.Event(), threading.Event()

    class Slow(Begun):
        def begin_sync(self, descriptor: int, offset: int, nbytes: int) -> None:
            self.told.append((offset, nbytes))
            begun.set()
            go.wait(60)
            os.fstat(descriptor)

        def sync(self, descriptor: int) -> None:
            assert not any(thread.name == "holdfast-writeback" for thread in threading.enumerate())
            super().sync(descriptor)

    files, data = Slow(), os.urandom(1 << 16)
    with FileTransaction(tmp_path / "model", files=files) as t:
        t.file.allocate(len(data))
        t.file.write(0, data)
        assert begun.wait(60)
        threading.Timer(0.05, go.set).start()
        t.commit()
    assert (tmp_path / "model").read_bytes() == data
    assert len(files.told) == 1


def test_where_no_thread_starts_the_fsync_does_it_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(new_file, "WRITEBACK_NBYTES", 1 << 12)
    monkeypatch.setattr(new_file, "start_thread", lambda run, *, name, daemon: None)
    files, data = Begun(), os.urandom(1 << 16)
    with FileTransaction(tmp_path / "model", files=files) as t:
        t.file.allocate(len(data))
        t.file.write(0, data)
        t.file.write(0, data)
        t.commit()
    assert (tmp_path / "model").read_bytes() == data
    assert files.told == []


# What is replaced.


def unnamed() -> int:
    """Files that this process has open and that have no name any more."""
    found = 0
    for number in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            found += os.readlink(f"/proc/self/fd/{number}").endswith(" (deleted)")
    return found


@pytest.mark.parametrize("directory", [False, True], ids=["file", "directory"])
def test_what_is_replaced_is_freed_behind_the_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, directory: bool
):
    monkeypatch.setattr(temporaries, "LARGE_NBYTES", 100)
    later = []
    monkeypatch.setattr(
        temporaries,
        "start_thread",
        lambda run, *, name, daemon: later.append(run) or threading.Thread(),
    )
    path, before = tmp_path / "model", (unnamed(), len(os.listdir("/proc/self/fd")))
    for data in (b"1" * 100, b"2" * 99, b"3" * 100):
        put_directory(path, a=data, b=b"small") if directory else put(path, data)
        assert unnamed() - before[0] == len(later)
    assert len(later) == 1, "what is small is freed at once, and there was nothing at first"
    assert names(tmp_path) == ["model"]
    later.pop()()
    assert (unnamed(), len(os.listdir("/proc/self/fd"))) == before
    assert not temporaries.wait_for_room()


def test_a_failed_rename_leaves_nothing_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(temporaries, "LARGE_NBYTES", 1)

    class Failing(Files):
        def rename(self, source: str, target: str, *, dir_fd: int) -> None:
            raise OSError(errno.EIO, "input/output error")

    put(tmp_path / "model", b"old")
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(NotCommitted):
        put(tmp_path / "model", files=Failing())
    temporaries.wait_for_room()
    assert len(os.listdir("/proc/self/fd")) == before
    assert (tmp_path / "model").read_bytes() == b"old"


def test_who_finds_no_room_waits_for_what_is_being_freed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(temporaries, "LARGE_NBYTES", 1)
    go, freed = threading.Event(), []

    class Tight(Files):
        """Has no room as long as something that was replaced is open."""

        def close(self, descriptor: int) -> None:
            if threading.current_thread().name == "holdfast-free":
                go.wait(60)
                freed.append(descriptor)
            super().close(descriptor)

        def allocate(self, descriptor: int, nbytes: int) -> None:
            threading.Timer(0.05, go.set).start()
            if not freed:
                raise OSError(errno.ENOSPC, "no space")
            super().allocate(descriptor, nbytes)

    files = Tight()
    put(tmp_path / "model", b"old", files=files)
    put(tmp_path / "model", b"new", files=files)
    with FileTransaction(tmp_path / "model", files=files) as t:
        t.file.allocate(5)
        t.file.write(0, b"third")
        t.commit()
    assert (tmp_path / "model").read_bytes() == b"third"
    go.set()
    temporaries.wait_for_room()


def test_a_fork_waits_for_nothing_of_its_parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(temporaries, "LARGE_NBYTES", 1)
    go = threading.Event()

    class Slow(Files):
        def close(self, descriptor: int) -> None:
            if threading.current_thread().name == "holdfast-free":
                go.wait(60)
            super().close(descriptor)

    before = unnamed()
    put(tmp_path / "model", b"old", files=Slow())
    put(tmp_path / "model", b"new", files=Slow())
    assert unnamed() > before
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # a fork of a process that has threads
        child = os.fork()
    if not child:
        os._exit(int(temporaries.wait_for_room()) + 2 * (unnamed() - before))
    assert os.waitpid(child, 0)[1] == 0
    go.set()
    assert temporaries.wait_for_room()


class Listing(Files):
    """Counts how often a folder is listed."""

    lists = 0

    def list(self, descriptor):
        self.lists += 1
        return super().list(descriptor)


def saved_beside(folder: Path, name: str, files: Files) -> None:
    with FileTransaction(folder / name, durable=False, files=files) as transaction:
        transaction.file.write(0, b"content")
        transaction.commit()


def test_a_folder_of_many_files_is_not_listed_by_every_save(tmp_path: Path):
    for number in range(640):
        (tmp_path / f"{number}.pt").touch()
    files = Listing()
    for number in range(33):
        saved_beside(tmp_path, f"new-{number}.pt", files)
    assert files.lists == 3, "one to repair and to clean, three times"
    few = Listing()
    (tmp_path / "few").mkdir()
    for number in range(8):
        saved_beside(tmp_path / "few", f"{number}.pt", few)
    assert few.lists == 8


def test_what_a_dead_process_left_among_many_files_goes_all_the_same(tmp_path: Path):
    for number in range(640):
        (tmp_path / f"{number}.pt").touch()
    files = Listing()
    left = tmp_path / ".other.pt.0123456789abcdef.tmp"
    left.touch()
    saved_beside(tmp_path, "a.pt", files)
    assert not left.exists(), "the first save of a process looks"
    left.touch()
    for _ in range(12):
        saved_beside(tmp_path, "a.pt", files)
    assert not left.exists(), "and a later one does again"
