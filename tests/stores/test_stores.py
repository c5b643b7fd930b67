"""Every store keeps the promises of a store, and those that are its own. Those that compute are in `test_virtual.py`."""

from __future__ import annotations

import io
import os
from contextlib import closing

import pytest

from holdfast.core.keys import check_key
from holdfast.errors import LimitExceeded, Replaced, StoreError, Truncated, UnsafePath
from holdfast.stores.local import DescriptorStore, LocalStore
from holdfast.stores.memory import FileObjectStore, MemoryStore
from tests.stores.conformance import StoreConformance


class TestMemoryStore(StoreConformance):
    @pytest.fixture
    def fill(self):
        return MemoryStore


class TestLocalDirectory(StoreConformance):
    @pytest.fixture
    def fill(self, tmp_path):
        def make(content):
            for key, data in content.items():
                (tmp_path / key).parent.mkdir(exist_ok=True)
                (tmp_path / key).write_bytes(data)
            return LocalStore(tmp_path)

        return make


class TestLocalFile(StoreConformance):
    keys = ("one.bin",)

    @pytest.fixture
    def fill(self, tmp_path):
        def make(content):
            (tmp_path / "one.bin").write_bytes(content["one.bin"])
            return LocalStore(tmp_path / "one.bin")

        return make


class TestDescriptor(StoreConformance):
    keys = (DescriptorStore.KEY,)

    @pytest.fixture
    def fill(self, tmp_path):
        def make(content):
            (tmp_path / "one.bin").write_bytes(content[DescriptorStore.KEY])
            with open(tmp_path / "one.bin", "rb") as file:
                return DescriptorStore(file.fileno())

        return make


class TestFileObject(StoreConformance):
    keys = (FileObjectStore.KEY,)

    @pytest.fixture
    def fill(self):
        return lambda content: FileObjectStore(io.BytesIO(content[FileObjectStore.KEY]))


class Stuttering(io.RawIOBase):
    """A file that gives a few bytes at a time, as a raw one may."""

    def __init__(self, data: bytes) -> None:
        self._inner = io.BytesIO(data)

    def read(self, size: int = -1) -> bytes:
        return self._inner.read(min(size, 7) if size >= 0 else 7)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        return self._inner.seek(offset, whence)

    def tell(self) -> int:
        return self._inner.tell()


class TestStutteringFileObject(StoreConformance):
    keys = (FileObjectStore.KEY,)

    @pytest.fixture
    def fill(self):
        return lambda content: FileObjectStore(Stuttering(content[FileObjectStore.KEY]))


def test_a_file_object_stays_where_it_was_and_belongs_to_its_owner():
    file = io.BytesIO(b"0123456789")
    file.seek(3)
    store = FileObjectStore(file)
    out = bytearray(2)
    store.read("file", 5, memoryview(out))
    assert (bytes(out), file.tell()) == (b"56", 3)
    store.close()
    assert not file.closed


def test_a_file_object_that_shrank_is_truncated_and_stays_where_it_was():
    file = io.BytesIO(b"0123456789")
    file.seek(3)
    store = FileObjectStore(file)
    file.truncate(6)
    with pytest.raises(Truncated):
        store.read("file", 4, memoryview(bytearray(4)))
    assert file.tell() == 3


def test_a_closed_or_unseekable_file_object_is_refused():
    file = io.BytesIO(b"x")
    file.close()
    with pytest.raises(StoreError):
        FileObjectStore(file)
    reader, writer = os.pipe()
    os.close(writer)
    with open(reader, "rb") as pipe, pytest.raises(StoreError):
        FileObjectStore(pipe)


@pytest.mark.parametrize(
    "key", ["", ".", "..", "../x", "a/../b", "/etc/passwd", "a//b", "a/", "a\\b", "a\0b", "./a"]
)
def test_keys_that_lead_out_are_refused(key, tmp_path):
    with pytest.raises(UnsafePath):
        check_key(key)
    with pytest.raises(UnsafePath):
        LocalStore(tmp_path).size(key)


def test_links_may_lead_inside_and_not_outside(tmp_path):
    (tmp_path / "secret").write_bytes(b"secret")
    inside = tmp_path / "ckpt"
    inside.mkdir()
    (inside / "data").write_bytes(b"data")
    (inside / "same").symlink_to("data")
    (inside / "out").symlink_to(tmp_path / "secret")
    store = LocalStore(inside)
    assert store.size("same") == 4
    with pytest.raises(UnsafePath, match="leads out"):
        store.size("out")


def test_the_hugging_face_cache_links_to_its_blobs(tmp_path):
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs" / "abc").write_bytes(b"data")
    revision = tmp_path / "snapshots" / "123"
    revision.mkdir(parents=True)
    (revision / "model.safetensors").symlink_to("../../blobs/abc")
    (tmp_path / "other").write_bytes(b"no")
    (revision / "other").symlink_to("../../other")
    store = LocalStore(revision)
    assert store.size("model.safetensors") == 4
    with pytest.raises(UnsafePath):
        store.size("other")


def test_only_plain_files_are_opened(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UnsafePath):
        LocalStore(tmp_path / "pipe").size("pipe")
    assert list(LocalStore(tmp_path).list()) == []


def test_hidden_folders_and_deep_ones_are_not_listed(tmp_path):
    for place in (".git/x", "a/x", "a/b/x"):
        (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / place).write_bytes(b"")
    assert list(LocalStore(tmp_path).list()) == ["a/x"]


def test_a_folder_of_too_many_files_is_refused(tmp_path):
    for i in range(11):
        (tmp_path / str(i)).touch()
    with pytest.raises(LimitExceeded, match="files"):
        LocalStore(tmp_path, max_files=10).list()


def test_a_file_that_shrank_is_truncated_with_its_place(tmp_path):
    path = tmp_path / "x"
    path.write_bytes(bytes(1000))
    store = LocalStore(path)
    assert store.size("x") == 1000
    os.truncate(path, 400)
    with pytest.raises(Truncated) as caught:
        store.read("x", 300, memoryview(bytearray(200)))
    assert (caught.value.file, caught.value.offset) == (str(path), 400)


def test_a_replaced_file_is_still_the_one_that_was_opened(tmp_path):
    path = tmp_path / "x"
    path.write_bytes(b"old")
    store = LocalStore(path)
    assert store.size("x") == 3
    (tmp_path / "y").write_bytes(b"newer")
    os.replace(tmp_path / "y", path)
    out = bytearray(3)
    store.read("x", 0, memoryview(out))
    assert bytes(out) == b"old"


def test_what_a_file_says_of_itself(tmp_path):
    path = tmp_path / "x"
    path.write_bytes(b"old")
    (tmp_path / "same").symlink_to("x")
    with closing(LocalStore(path)) as store, closing(LocalStore(tmp_path / "same")) as same:
        before = store.stamp("x")
        assert (before[0], same.stamp("same")) == (3, before)
        assert store.identity() == store.identity("x") == same.identity("same")
        path.write_bytes(b"newer")
        assert store.find_changed() == ["x"]
        assert store.stamp("x") == before
    with closing(LocalStore(path)) as store, closing(LocalStore(tmp_path)) as folder:
        assert store.stamp("x") != before
        assert folder.identity("x") == store.identity("x") != folder.identity()


def test_the_place_of_memory_is_its_address():
    memory = bytearray(100)
    one, other = (
        MemoryStore({"a": memory}),
        MemoryStore({"b": memory, "part": memoryview(memory)[10:]}),
    )
    assert one.identity("a") == other.identity("b") != other.identity("part")
    assert one.identity() != other.identity()
    assert MemoryStore({"a": bytes(100)}).identity("a") != MemoryStore(
        {"a": bytearray(100)}
    ).identity("a")


def test_a_directory_of_more_files_than_stay_open(tmp_path, monkeypatch):
    monkeypatch.setattr("holdfast.stores.local.MAX_KEPT_FILES", 3)
    for i in range(8):
        (tmp_path / f"{i}").write_bytes(bytes([i]) * 10)
    before = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else None
    with closing(LocalStore(tmp_path)) as store:
        for _ in range(2):
            for i in range(8):
                out = bytearray(4)
                store.read(f"{i}", 2, memoryview(out))
                assert out == bytes([i]) * 4
        assert bytes(store.map("7")) == b"\x07" * 10
        if before is not None:
            assert (
                len(os.listdir("/proc/self/fd")) <= before + 5
            )  # the folder, three kept, one mapped
        assert store.find_changed() == []
        (tmp_path / "7").write_bytes(b"another file")
        (tmp_path / "6").unlink()
        assert store.find_changed() == ["6", "7"]
        with pytest.raises(Replaced, match="changed or replaced"):
            store.read("7", 0, memoryview(bytearray(1)))
        with pytest.raises(Replaced, match="is gone"):
            store.read("6", 0, memoryview(bytearray(1)))
