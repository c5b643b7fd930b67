"""`verify`: every damaged byte is found and named, nothing else is, and nothing raises."""

from __future__ import annotations

import os
import shutil
import zipfile
from pathlib import Path

import numpy as np
import pytest

import holdfast
from holdfast.errors import StoreError
from holdfast.stores.local import LocalStore
from holdfast.verbs.save import save
from holdfast.verbs.verify import VerifyReport, verify


def flip(path: Path, *offsets: int) -> None:
    """Change one bit of each of these bytes."""
    data = bytearray(path.read_bytes())
    for offset in offsets:
        data[offset] ^= 0x10
    path.write_bytes(data)


def recorded_storages(path: Path) -> dict[object, list[str]]:
    """Every storage with a checksum, and all names that use it."""
    found: dict[object, list[str]] = {}
    with holdfast.open(path) as checkpoint:
        for name, tensor in checkpoint.items():
            for storage in tensor.storages:
                if storage.nbytes and storage.crc32 is not None:
                    found.setdefault(storage, []).append(name)
    return found


def test_golden_files_are_sound(golden, expected):
    report = verify(golden)
    assert report.ok
    assert report.format == expected["format"]
    with holdfast.open(golden) as checkpoint:
        known = {
            n
            for n, t in checkpoint.items()
            if any(s.crc32 is None and s.nbytes for s in t.storages)
        }
        assert set(report.unchecked) == known


def test_one_byte_in_each_storage_is_named(golden, tmp_path):
    if (
        golden.name == "deflated.npz"
    ):  # what is inflated has no place in the file; tests/formats/npy has a test of its own
        return
    storages = recorded_storages(golden)
    for number, (storage, names) in enumerate(storages.items()):
        broken = tmp_path / f"{number}.pt"
        file = broken / storage.key if golden.is_dir() else broken
        (shutil.copytree if golden.is_dir() else shutil.copy)(golden, broken)
        flip(file, storage.start + number % storage.nbytes)
        report = verify(broken, threads=1)
        assert not report.ok
        assert not report.problems
        (damage,) = report.damaged
        assert (damage.file, damage.tensors) == (str(file), tuple(names))
        assert (damage.offset, damage.nbytes, damage.expected) == (
            storage.start,
            storage.nbytes,
            storage.crc32,
        )
        assert damage.found != damage.expected
        assert damage.label == storage.label


def test_all_damages_are_reported(golden_dir, tmp_path):
    broken = tmp_path / "broken.pt"
    shutil.copy(golden_dir / "files/training.pt", broken)
    storages = recorded_storages(broken)
    flip(broken, *(s.start + s.nbytes - 1 for s in storages))
    report = verify(broken)
    assert [(d.offset, d.tensors) for d in report.damaged] == sorted(
        (s.start, tuple(n)) for s, n in storages.items()
    )


@pytest.mark.parametrize("name", ["plain.pt", "torchscript.pt", "kinds.pt"])
def test_every_record_of_a_zip_is_checked(golden_dir, tmp_path, name):
    """Also pickles, code that is compressed, and text; where they keep the file from opening, the rest is verified still."""
    source = golden_dir / "files" / name
    for number, info in enumerate(i for i in zipfile.ZipFile(source).infolist() if i.file_size):
        broken = tmp_path / f"{number}.pt"
        shutil.copy(source, broken)
        data = source.read_bytes()
        header = data[info.header_offset : info.header_offset + 30]
        start = (
            info.header_offset
            + 30
            + int.from_bytes(header[26:28], "little")
            + int.from_bytes(header[28:30], "little")
        )
        flip(broken, start + info.compress_size // 2)
        report = verify(broken)
        assert [d.label for d in report.damaged] == [info.filename.partition("/")[2]], info.filename


def test_a_damaged_pickle_does_not_hide_damaged_tensors(golden_dir, tmp_path):
    broken = tmp_path / "broken.pt"
    shutil.copy(golden_dir / "files/plain.pt", broken)
    storage = next(iter(recorded_storages(broken)))
    with zipfile.ZipFile(broken) as archive:
        record = next(i for i in archive.infolist() if i.filename.endswith("data.pkl"))
    flip(broken, record.header_offset + 200, storage.start)
    assert [d.label for d in verify(broken).damaged] == ["data.pkl", storage.label]


def test_what_does_not_open_is_a_problem(tmp_path):
    (tmp_path / "text.pt").write_text("hello, this is no checkpoint")
    (tmp_path / "empty.pt").touch()
    for name, kind in (
        ("missing.pt", "NoSuchPath"),
        ("text.pt", "UnknownFormat"),
        ("empty.pt", "UnknownFormat"),
    ):
        report = verify(tmp_path / name)
        assert (report.ok, report.format, report.damaged) == (False, "", ())
        assert [(p.file, p.kind) for p in report.problems] == [(str(tmp_path / name), kind)]


def test_truncated(golden, tmp_path):
    if golden.is_dir() or golden.name.endswith(
        ("tar.pt", ".gguf")
    ):  # these end in zeros that nobody misses
        return
    cut = tmp_path / golden.name
    cut.write_bytes(golden.read_bytes()[:-1])
    report = verify(cut)
    assert not report.ok
    assert report.problems


def test_a_directory_with_a_broken_shard(golden_dir, tmp_path):
    folder = tmp_path / "hf"
    shutil.copytree(golden_dir / "files/hf_index", folder)
    assert len(verify(folder).files) == 2
    shard = folder / "model-00002-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-3])
    report = verify(folder)
    assert [p.file for p in report.problems] == [str(shard)]
    assert report.unchecked  # of the other one
    shutil.copy(golden_dir / "files/plain.pt", folder / "pytorch_model.bin")
    storage = next(iter(recorded_storages(folder / "pytorch_model.bin")))
    flip(folder / "pytorch_model.bin", storage.start)
    report = verify(folder)
    assert [d.file for d in report.damaged] == [str(folder / "pytorch_model.bin")]
    assert [p.file for p in report.problems] == [str(shard)]
    assert str(folder / "config.json") in report.skipped


def test_a_directory_of_other_files(tmp_path, golden_dir):
    (tmp_path / "a.txt").write_text("x")
    (tmp_path / "b.txt").write_text("x")
    assert [p.kind for p in verify(tmp_path).problems] == ["UnknownFormat"]
    shutil.copy(golden_dir / "files/plain.pt", tmp_path / "step1.pt")
    shutil.copy(golden_dir / "files/single.pt", tmp_path / "step2.pt")
    report = verify(tmp_path)
    assert (report.ok, len(report.files), len(report.skipped)) == (True, 2, 2)


@pytest.mark.parametrize("form", ["torch", "safetensors", "native"])
def test_what_we_write_carries_checksums(tmp_path, form):
    rng = np.random.default_rng(3)
    tied = rng.standard_normal((1 << 20, 3)).astype(np.float32)  # three blocks
    state = {"a": tied, "b": {"tied": tied}, "c": np.arange(7)}
    path = tmp_path / {"torch": "x.pt", "safetensors": "x.safetensors", "native": "x"}[form]
    save(state, path, format="native" if form == "native" else None, durable=False)
    seen: list[int] = []
    report = verify(path, progress=seen.append)
    assert report.ok
    assert not report.unchecked
    assert report.checked_nbytes >= tied.nbytes + state["c"].nbytes
    files = sorted(p for p in path.rglob("*.safetensors")) if path.is_dir() else [path]
    assert sum(seen) == sum(p.stat().st_size for p in files)
    (storage,) = {s for s in recorded_storages(path) if s.nbytes == tied.nbytes}
    file = path / storage.key if path.is_dir() else path
    flip(file, storage.start + tied.nbytes - 5)
    (damage,) = verify(path).damaged
    assert damage.file == str(file)
    assert set(damage.tensors) == {"a", "b.tied"}
    assert damage.offset == storage.start


def test_bytes_that_cannot_be_read(tmp_path, monkeypatch):
    path = tmp_path / "x.pt"
    save({name: np.full(1 << 18, 1.5) for name in "abc"}, path, durable=False)
    bad, names = next((s, names) for s, names in recorded_storages(path).items() if names == ["b"])
    middle = bad.start + bad.nbytes // 2
    read = LocalStore.read

    def failing(self: LocalStore, key: str, start: int, out: memoryview) -> None:
        if start <= middle < start + out.nbytes:
            raise StoreError("Input/output error", file=key)
        read(self, key, start, out)

    monkeypatch.setattr(LocalStore, "read", failing)
    report = verify(path)
    assert not report.damaged
    assert [p.tensors for p in report.problems] == [tuple(names)]
    assert report.checked_nbytes > 2 * bad.nbytes


def test_bytes_and_file_objects(golden_dir):
    path = golden_dir / "files/plain.pt"
    report = verify(path.read_bytes())
    assert report.ok
    with path.open("rb") as file:
        assert (
            verify(file).checked_nbytes
            == report.checked_nbytes
            == verify(os.fspath(path)).checked_nbytes
        )


def test_the_report_is_public():
    assert holdfast.verify is verify
    assert holdfast.VerifyReport is VerifyReport
