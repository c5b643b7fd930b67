"""Stores of files, of memory and of file objects. Computed stores are in `test_virtual.py`."""

from __future__ import annotations

import io
import os
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

import pytest

from holdfast.core.keys import check_key
from holdfast.core.limits import Limits
from holdfast.errors import (
    LimitExceeded,
    NoSuchPath,
    Replaced,
    StoreError,
    Truncated,
    UnsafePath,
)
from holdfast.stores.local import DescriptorStore, LocalStore
from holdfast.stores.memory import FileObjectStore, MemoryStore
from holdfast.stores.place import MAX_OPEN_ATTEMPTS, LocalPlace
from tests.stores.conformance import StoreConformance, read_range


def write_files(folder: Path, content: Mapping[str, bytes]) -> None:
    for key, data in content.items():
        path = folder / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


class TestMemoryStore(StoreConformance):
    @pytest.fixture
    def make_store(self):
        return MemoryStore


class TestLocalDirectory(StoreConformance):
    @pytest.fixture
    def make_store(self, tmp_path):
        def make(content):
            write_files(tmp_path, content)
            return LocalStore(tmp_path)

        return make


class TestLocalFile(StoreConformance):
    keys = ("file.bin",)

    @pytest.fixture
    def make_store(self, tmp_path):
        def make(content):
            write_files(tmp_path, content)
            return LocalStore(tmp_path / "file.bin")

        return make


class TestDescriptor(StoreConformance):
    keys = (DescriptorStore.KEY,)

    @pytest.fixture
    def make_store(self, tmp_path):
        def make(content):
            path = tmp_path / "file.bin"
            path.write_bytes(content[DescriptorStore.KEY])
            with open(path, "rb") as file:
                return DescriptorStore(file.fileno())

        return make


class TestFileObject(StoreConformance):
    keys = (FileObjectStore.KEY,)

    @pytest.fixture
    def make_store(self):
        return lambda content: FileObjectStore(io.BytesIO(content[FileObjectStore.KEY]))


class ShortReadFile(io.RawIOBase):
    """A file object that returns at most seven bytes at a time, as a raw file may."""

    MAX_NBYTES = 7

    def __init__(self, data: bytes) -> None:
        self._file = io.BytesIO(data)

    def read(self, size: int = -1) -> bytes:
        if size < 0:
            size = self.MAX_NBYTES
        return self._file.read(min(size, self.MAX_NBYTES))

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()


class TestFileObjectWithShortReads(StoreConformance):
    keys = (FileObjectStore.KEY,)

    @pytest.fixture
    def make_store(self):
        return lambda content: FileObjectStore(ShortReadFile(content[FileObjectStore.KEY]))


class FixedCountFile(io.BytesIO):
    """A file object whose `readinto` reads nothing and returns a count that a test chooses."""

    def __init__(self, count: int | None) -> None:
        super().__init__(bytes(10))
        self._count = count

    def readinto(self, buffer: object) -> int | None:
        return self._count


class NonBlockingFile(ShortReadFile):
    """A file object that has no bytes yet."""

    def read(self, size: int = -1) -> bytes | None:
        return None if size else b""


@pytest.mark.parametrize("file", [FixedCountFile(None), NonBlockingFile(bytes(10))])
def test_a_non_blocking_file_object_is_not_reported_as_truncated(file: io.IOBase):
    with pytest.raises(StoreError, match="non-blocking mode") as caught:
        read_range(FileObjectStore(file), "file", 0, 10)
    assert not isinstance(caught.value, Truncated)


@pytest.mark.parametrize("count", [-1, 11])
def test_a_file_object_that_returns_an_impossible_count_is_refused(count: int):
    with pytest.raises(StoreError, match=f"returned {count} bytes for a read of 10"):
        read_range(FileObjectStore(FixedCountFile(count)), "file", 0, 10)


def test_reading_does_not_move_or_close_a_file_object():
    file = io.BytesIO(b"0123456789")
    file.seek(3)
    store = FileObjectStore(file)

    assert read_range(store, "file", 5, 7) == b"56"
    assert file.tell() == 3
    store.close()
    assert not file.closed


def test_a_failed_read_does_not_move_a_file_object():
    file = io.BytesIO(b"0123456789")
    file.seek(3)
    store = FileObjectStore(file)
    file.truncate(6)

    with pytest.raises(Truncated):
        read_range(store, "file", 4, 8)
    assert file.tell() == 3


def test_a_closed_file_object_is_refused():
    file = io.BytesIO(b"x")
    file.close()
    with pytest.raises(StoreError):
        FileObjectStore(file)


def test_a_file_object_that_cannot_seek_is_refused():
    read_end, write_end = os.pipe()
    os.close(write_end)
    with open(read_end, "rb") as pipe, pytest.raises(StoreError):
        FileObjectStore(pipe)


@pytest.mark.parametrize(
    "key", ["", ".", "..", "../x", "a/../b", "/etc/passwd", "a//b", "a/", "a\\b", "a\0b", "./a"]
)
def test_a_key_that_leads_out_of_the_store_is_refused(key, tmp_path):
    with pytest.raises(UnsafePath):
        check_key(key)
    with pytest.raises(UnsafePath):
        LocalStore(tmp_path).size(key)


def test_a_link_may_lead_to_a_file_in_the_folder(tmp_path):
    (tmp_path / "data").write_bytes(b"data")
    (tmp_path / "link").symlink_to("data")
    assert LocalStore(tmp_path).size("link") == 4


def test_a_link_out_of_the_folder_is_refused(tmp_path):
    (tmp_path / "secret").write_bytes(b"secret")
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (folder / "link").symlink_to(tmp_path / "secret")
    with pytest.raises(UnsafePath, match="leads out"):
        LocalStore(folder).size("link")


@pytest.fixture
def snapshot(tmp_path: Path) -> Path:
    """A folder like a snapshot in the cache of Hugging Face, with a link to a blob."""
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs" / "abc").write_bytes(b"data")
    snapshot = tmp_path / "snapshots" / "123"
    snapshot.mkdir(parents=True)
    (snapshot / "model.safetensors").symlink_to("../../blobs/abc")
    return snapshot


def test_a_link_of_a_snapshot_may_lead_to_its_blobs(snapshot):
    assert LocalStore(snapshot).size("model.safetensors") == 4


def test_a_link_of_a_snapshot_to_another_place_is_refused(snapshot):
    outside = snapshot.parent.parent / "outside"
    outside.write_bytes(b"outside")
    (snapshot / "link").symlink_to("../../outside")
    with pytest.raises(UnsafePath):
        LocalStore(snapshot).size("link")


def test_a_pipe_is_neither_opened_nor_listed(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UnsafePath):
        LocalStore(tmp_path / "pipe").size("pipe")
    assert list(LocalStore(tmp_path).list()) == []


def test_hidden_and_nested_folders_are_not_listed(tmp_path):
    write_files(tmp_path, {".git/x": b"", "a/x": b"", "a/b/x": b""})
    assert list(LocalStore(tmp_path).list()) == ["a/x"]


def test_a_folder_with_too_many_files_is_refused(tmp_path):
    write_files(tmp_path, {str(i): b"" for i in range(11)})
    with pytest.raises(LimitExceeded, match="files"):
        LocalStore(tmp_path, max_files=10).list()


def test_reading_a_file_that_shrank_raises_truncated_with_its_path(tmp_path):
    path = tmp_path / "x"
    path.write_bytes(bytes(1000))
    store = LocalStore(path)
    assert store.size("x") == 1000
    os.truncate(path, 400)

    with pytest.raises(Truncated) as caught:
        read_range(store, "x", 300, 500)
    assert caught.value.file == str(path)
    assert caught.value.offset == 400


def test_a_store_reads_the_file_that_it_opened_after_a_replacement(tmp_path):
    path = tmp_path / "x"
    path.write_bytes(b"old")
    store = LocalStore(path)
    assert store.size("x") == 3
    (tmp_path / "y").write_bytes(b"newer")
    os.replace(tmp_path / "y", path)

    assert read_range(store, "x", 0, 3) == b"old"


def test_a_stamp_changes_with_the_content_of_a_file(tmp_path):
    path = tmp_path / "x"
    path.write_bytes(b"old")
    with closing(LocalStore(path)) as store:
        old_stamp = store.stamp("x")
        assert old_stamp[0] == len(b"old")
        path.write_bytes(b"newer")
        assert store.find_changed() == ["x"]
        # A store returns the stamp of the content that it opened.
        assert store.stamp("x") == old_stamp
    with closing(LocalStore(path)) as store:
        assert store.stamp("x") != old_stamp


def test_two_paths_to_a_file_have_one_identity_and_one_stamp(tmp_path):
    path = tmp_path / "x"
    path.write_bytes(b"data")
    link = tmp_path / "link"
    link.symlink_to("x")
    with closing(LocalStore(path)) as store, closing(LocalStore(link)) as link_store:
        assert store.identity() == store.identity("x") == link_store.identity("link")
        assert store.stamp("x") == link_store.stamp("link")


def test_a_folder_has_another_identity_than_its_files(tmp_path):
    path = tmp_path / "x"
    path.write_bytes(b"data")
    with closing(LocalStore(path)) as store, closing(LocalStore(tmp_path)) as folder:
        assert folder.identity("x") == store.identity("x")
        assert folder.identity() != folder.identity("x")


def test_files_over_the_same_memory_have_one_identity():
    memory = bytearray(100)
    store = MemoryStore({"a": memory})
    other_store = MemoryStore({"b": memory, "end": memoryview(memory)[10:]})
    assert store.identity("a") == other_store.identity("b")
    assert store.identity("a") != other_store.identity("end")
    assert store.identity() != other_store.identity()


def test_files_over_equal_memory_have_two_identities():
    store = MemoryStore({"a": bytes(100)})
    other_store = MemoryStore({"a": bytearray(100)})
    assert store.identity("a") != other_store.identity("a")


@pytest.fixture
def eight_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with more files than a store keeps open."""
    monkeypatch.setattr("holdfast.stores.local.MAX_KEPT_FILES", 3)
    write_files(tmp_path, {str(i): bytes([i]) * 10 for i in range(8)})
    return tmp_path


def test_a_folder_with_more_files_than_stay_open_can_be_read(eight_files):
    with closing(LocalStore(eight_files)) as store:
        for _ in range(2):
            for i in range(8):
                assert read_range(store, str(i), 2, 6) == bytes([i]) * 4
        assert bytes(store.map("7")) == b"\x07" * 10
        assert store.find_changed() == []


@pytest.mark.skipif(
    not os.path.isdir("/proc/self/fd"), reason="the system does not list open files"
)
def test_a_store_keeps_few_files_open(eight_files):
    open_count = len(os.listdir("/proc/self/fd"))
    with closing(LocalStore(eight_files)) as store:
        for i in range(8):
            read_range(store, str(i), 2, 6)
        store.map("7")
        # The folder, three files that stay open, and one that is mapped.
        assert len(os.listdir("/proc/self/fd")) <= open_count + 5


def test_a_file_that_is_opened_again_must_be_the_same(eight_files):
    with closing(LocalStore(eight_files)) as store:
        for i in range(8):
            read_range(store, str(i), 2, 6)
        (eight_files / "7").write_bytes(b"another file")
        (eight_files / "6").unlink()

        assert store.find_changed() == ["6", "7"]
        with pytest.raises(Replaced, match="changed or replaced"):
            read_range(store, "7", 0, 1)
        with pytest.raises(Replaced, match="is gone"):
            read_range(store, "6", 0, 1)


def test_a_folder_that_an_interrupted_save_has_set_aside_is_opened(tmp_path):
    write_files(tmp_path / "old", {"x": b"data"})
    place = LocalPlace(str(tmp_path / "run"))
    with closing(place.open_store(Limits(), lambda path: str(tmp_path / "old"))) as store:
        assert read_range(store, "x", 0, 4) == b"data"


def test_a_place_that_comes_back_during_the_search_is_opened(tmp_path):
    def finish_save(path: str) -> None:
        write_files(tmp_path / "run", {"x": b"data"})

    with closing(LocalPlace(str(tmp_path / "run")).open_store(Limits(), finish_save)) as store:
        assert store.list() == ["x"]


def test_the_search_for_a_missing_place_ends(tmp_path):
    searched_paths = []

    def find_deleted_folder(path: str) -> str:
        searched_paths.append(path)
        return str(tmp_path / "deleted")

    with pytest.raises(NoSuchPath):
        LocalPlace(str(tmp_path / "run")).open_store(Limits(), find_deleted_folder)
    assert len(searched_paths) == MAX_OPEN_ATTEMPTS
