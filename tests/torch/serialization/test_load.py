"""`holdfast.torch.load` beside `torch.load`: the same result from the same file, or an error of the same kind."""

from __future__ import annotations

import gzip
import io
import itertools
import mmap
import os
import pickle
import pickletools
import socket
import sys
import tempfile
import types
import warnings
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO

import fsspec
import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.checkpoint.utils import _ReaderView
from torch.serialization import LoadEndianness, SourceChangeWarning
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.serialization import config

import holdfast
from holdfast.engine.saves import FilePlan
from holdfast.engine.stream import write_stream
from holdfast.errors import Corrupted, HoldfastError, Refused, Truncated, Unsupported, ZipError
from holdfast.formats.torch import write as layout
from holdfast.formats.torch.write import lay_out_container
from holdfast.formats.zip.writer import lay_out_zip
from holdfast.torch import load, save, versions
from holdfast.torch.serialization import set_default_mmap_options, skip_data
from tests.support import needs, run_in_threads, torch_bytes
from tests.torch.serialization.test_weights import assert_same

FORCE, FORCE_NOT = "TORCH_FORCE_WEIGHTS_ONLY_LOAD", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"

WEIGHTS_ONLY = pytest.mark.parametrize("weights_only", [True, False], ids=["weights", "anything"])
ZIPPED = pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's notes on TorchScript, nested tensors and the like
        yield


@pytest.fixture(autouse=True)
def switches() -> Iterator[None]:
    before = config.load.endianness, config.load.mmap_flags, config.load.mmap
    torch.serialization._serialization_tls.map_location = (
        None  # a torch.load that failed leaves its own there
    )
    yield
    config.load.endianness, config.load.mmap_flags, config.load.mmap = before


def state() -> dict[str, object]:
    weight = torch.arange(12.0).view(3, 4)
    return {
        "w": weight, "turned": weight.t(), "part": weight[1:], "half": torch.ones(3, dtype=torch.bfloat16), "step": 3,
        "grad": nn.Parameter(torch.ones(2)), "scalar": torch.tensor(7), "text": "é",
    }  # fmt: skip


@pytest.fixture(params=[True, False], ids=["zip", "legacy"])
def raw(request: pytest.FixtureRequest) -> bytes:
    return torch_bytes(state(), request.param)


@pytest.fixture
def path(raw: bytes, tmp_path: Path) -> Path:
    made = tmp_path / "model.pt"
    made.write_bytes(raw)
    return made


@pytest.fixture
def zip_path(tmp_path: Path) -> Path:
    made = tmp_path / "model.pt"
    made.write_bytes(torch_bytes(state()))
    return made


def attempt(function: Callable[..., object], *args: object, **options: object) -> object:
    try:
        return function(*args, **options)
    except Exception as error:
        return error


def both(make: Callable[[], object], **options: object) -> object:
    """Load what `make` gives with torch and with us, and compare; what ours gave, or its error."""
    theirs, ours = attempt(torch.load, make(), **options), attempt(load, make(), **options)
    if isinstance(theirs, Exception):
        assert isinstance(ours, type(theirs)), repr(ours)
    else:
        assert not isinstance(ours, Exception), repr(ours)
        assert_same(ours, theirs)
    return ours


def reference(raw: bytes) -> object:
    """What torch finds in it."""
    return torch.load(io.BytesIO(raw), weights_only=False)


def container(
    content: bytes, storages: Mapping[str, bytes], order: bytes | None = b"little"
) -> bytes:
    """An archive with these records, and no serialization id."""
    records = [
        ("data.pkl", content), (".format_version", b"1"), (".storage_alignment", b"64"),
        *([("byteorder", order)] if order else []), *((f"data/{key}", data) for key, data in storages.items()), ("version", b"3\n"),
    ]  # fmt: skip
    file = io.BytesIO()
    write_stream(FilePlan("", lay_out_zip("archive", records)), file)
    return file.getvalue()


def records(raw: bytes) -> tuple[bytes, dict[str, bytes]]:
    """The pickle of an archive and its storages."""
    with zipfile.ZipFile(io.BytesIO(raw)) as archive:
        found = {name.removeprefix("archive/"): archive.read(name) for name in archive.namelist()}
    return found["data.pkl"], {
        name[5:]: data for name, data in found.items() if name.startswith("data/")
    }


# Where storages go.

LOCATIONS = {
    "none": None, "text": "cpu", "device": torch.device("cpu"), "dict": {"cpu": "cpu"}, "dict of others": {"cuda:0": "cpu"},
    "empty dict": {}, "meta": "meta", "meta device": torch.device("meta"), "dict to meta": {"cpu": "meta"},
    "function": lambda storage, tag: storage, "function that leaves it": lambda storage, tag: None,
    "function that copies": lambda storage, tag: storage.clone(), "nowhere": "nowhere", "cuda": "cuda", "cuda:9": "cuda:9",
    "dict to nowhere": {"cpu": "nowhere"}, "cpu:0": torch.device("cpu", 0), "number": 5, "function to no storage": lambda s, tag: 3,
    **({"dict to a device": {"cpu": torch.device("cpu")}, "dict to None": {"cpu": None}} if versions.WHOLE_TAGS else {}),
}  # fmt: skip


@WEIGHTS_ONLY
@pytest.mark.parametrize("name", LOCATIONS)
def test_map_location(path: Path, name: str, weights_only: bool):
    both(lambda: path, map_location=LOCATIONS[name], weights_only=weights_only)


@pytest.mark.parametrize("name", [name for name in LOCATIONS if "meta" not in name])
def test_map_location_of_a_mapped_file(zip_path: Path, name: str):
    both(lambda: zip_path, map_location=LOCATIONS[name], mmap=True)


def test_tags_of_other_devices(path: Path):
    """A file from a machine with a GPU."""
    raw = path.read_bytes()
    content = raw.replace(b"X\x03\x00\x00\x00cpu", b"X\x06\x00\x00\x00cuda:1", 1)
    if raw.startswith(b"PK"):
        pickled, storages = records(torch_bytes(state()))
        content = container(
            pickled.replace(b"X\x03\x00\x00\x00cpu", b"X\x06\x00\x00\x00cuda:1", 1), storages
        )
    seen: list[str] = []
    for location in (
        None,
        "cpu",
        {"cuda:1": "cpu"},
        {"cuda:0": "cpu"},
        lambda storage, tag: seen.append(tag) or storage,
    ):
        both(lambda: io.BytesIO(content), map_location=location)
    assert set(seen) == {"cuda:1"}


@WEIGHTS_ONLY
@pytest.mark.parametrize("mapped", [False, True])
def test_a_function_sees_each_storage_once_and_filled(
    zip_path: Path, weights_only: bool, mapped: bool
):
    def calls(function: Callable[..., object]) -> list[object]:
        seen = []

        def note(storage: torch.UntypedStorage, tag: str) -> None:
            seen.append((type(storage), storage.device.type, tag, storage.tolist()))

        function(zip_path, map_location=note, weights_only=weights_only, mmap=mapped)
        return seen

    ours = calls(load)
    assert ours == calls(torch.load)
    assert len(ours) == 4
    assert ours[0][3] == torch.arange(12.0).view(torch.uint8).tolist()


@WEIGHTS_ONLY
def test_a_function_sees_each_storage_of_a_legacy_stream_once(weights_only: bool):
    raw = torch_bytes(state(), zipped=False)
    seen: list[tuple[str, int]] = []
    for function in (torch.load, load):
        seen.clear()
        function(
            io.BytesIO(raw),
            map_location=lambda s, tag: seen.append((tag, s.nbytes())),
            weights_only=weights_only,
        )
        assert sorted(seen) == [("cpu", 6), ("cpu", 8), ("cpu", 8), ("cpu", 48)]


def test_map_location_in_bytes_and_other_mappings(path: Path):
    """torch takes bytes for a location and then fails, and asks other mappings than dicts to be callable."""
    assert_same(load(path, map_location=b"cpu"), load(path))
    assert load(path, map_location=types.MappingProxyType({"cpu": "meta"}))["w"].is_meta


@WEIGHTS_ONLY
def test_meta_keeps_sharing_and_says_where_the_bytes_are(path: Path, weights_only: bool):
    theirs = torch.load(path, map_location="meta", weights_only=weights_only)
    ours = load(path, map_location="meta", weights_only=weights_only)
    assert ours["w"].untyped_storage()._cdata == ours["turned"].untyped_storage()._cdata
    shared = theirs["w"].untyped_storage()._cdata == theirs["turned"].untyped_storage()._cdata
    assert shared == bool(versions.META_SHARES)
    offset = getattr(theirs["w"].untyped_storage(), "_checkpoint_offset", None)
    if offset is not None:
        assert ours["w"].untyped_storage()._checkpoint_offset == offset


@WEIGHTS_ONLY
@pytest.mark.parametrize(
    "location",
    [
        *(None, "cpu", "meta", pytest.param("cuda", marks=needs(versions.NUMBERED_FAKES))),
        pytest.param(
            torch.device("cuda:1"),
            marks=pytest.mark.skipif(
                torch.cuda.device_count() == 1, reason="there is one GPU here"
            ),
        ),
        *({"cpu": "cuda:0"}, {"cuda:0": "cpu"}),
    ],
)
def test_fake_tensors(zip_path: Path, weights_only: bool, location: object):
    found = []
    for function in (torch.load, load):
        with FakeTensorMode():
            made = function(zip_path, map_location=location, weights_only=weights_only)
        assert isinstance(made["w"], FakeTensor)
        tensors = {name: value for name, value in made.items() if isinstance(value, torch.Tensor)}
        found.append({
            name: (str(t.device), t.shape, t.stride(), t.storage_offset(), t.dtype, t.requires_grad,
                   t.untyped_storage()._checkpoint_offset)
            for name, t in tensors.items()
        })  # fmt: skip
    assert found[0] == found[1]
    assert (getattr(made["w"].untyped_storage(), "_fake_device", None) is None) == (
        location == "meta"
    )
    assert made["w"].untyped_storage()._cdata == made["turned"].untyped_storage()._cdata


@WEIGHTS_ONLY
def test_fake_tensors_and_a_function(zip_path: Path, weights_only: bool):
    for function in (torch.load, load):
        with (
            FakeTensorMode(),
            pytest.raises(RuntimeError, match="Callable map_location not supported"),
        ):
            function(zip_path, map_location=lambda storage, tag: storage, weights_only=weights_only)


@WEIGHTS_ONLY
@pytest.mark.parametrize("location", [None, "cuda"])
def test_fake_tensors_of_a_legacy_stream_are_where_they_were(
    weights_only: bool, location: str | None
):
    raw = torch_bytes(state(), zipped=False)
    with FakeTensorMode():
        made = load(io.BytesIO(raw), weights_only=weights_only, map_location=location)
    assert made["w"].device.type == (location or "cpu")  # torch: meta, wherever they were
    assert made["turned"].stride() == (1, 4)


def test_threads_have_their_own_map_location():
    """Wrapper subclasses find it in a thread-local of torch's."""
    raw = torch_bytes({"two": TwoTensor(torch.arange(3.0), torch.ones(3)), "w": torch.ones(2)})
    wrong: list[object] = []

    def work(location: str | None) -> None:
        for _ in range(25):
            made = load(io.BytesIO(raw), map_location=location, weights_only=False)
            kinds = {made["two"].a.device.type, made["two"].device.type, made["w"].device.type}
            if kinds != {location or "cpu"}:
                wrong.append(kinds)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        run_in_threads(work, ("meta", "cpu", None, "meta"))
    finally:
        sys.setswitchinterval(before)
    assert wrong == []
    assert torch.serialization._serialization_tls.map_location is None


def test_map_location_is_forgotten_after_an_error(tmp_path: Path):
    with pytest.raises(HoldfastError):
        load(io.BytesIO(b"PK\3\4"), map_location="meta")
    assert torch.serialization._serialization_tls.map_location is None


# Mapped files.


@WEIGHTS_ONLY
def test_mmap(zip_path: Path, weights_only: bool):
    ours = both(lambda: zip_path, mmap=True, weights_only=weights_only)
    with holdfast.open(zip_path) as checkpoint:
        first, second = (checkpoint[name].chunks[0].storage.start for name in ("w", "half"))
    assert ours["half"].data_ptr() - ours["w"].data_ptr() == second - first, (
        "storages are where they lie in the file"
    )


def test_mmap_private_and_shared(zip_path: Path):
    before = zip_path.read_bytes()
    made = load(zip_path, mmap=True)
    made["w"].fill_(7)
    assert zip_path.read_bytes() == before
    with set_default_mmap_options(mmap.MAP_SHARED):
        made = load(zip_path, mmap=True)
    made["w"].fill_(8)
    assert torch.load(zip_path)["w"].unique().tolist() == [8.0]
    with pytest.raises(Corrupted):
        load(zip_path)  # nobody updated the checksum
    assert load(zip_path, verify=False)["part"].unique().tolist() == [8.0]


def test_mmap_by_default(zip_path: Path):
    config.load.mmap = True
    both(lambda: zip_path)
    assert isinstance(both(lambda: io.BytesIO(zip_path.read_bytes())), ValueError)
    both(lambda: io.BytesIO(zip_path.read_bytes()), mmap=False)


@WEIGHTS_ONLY
def test_mmap_of_what_cannot_be_mapped(tmp_path: Path, weights_only: bool):
    legacy, empty = tmp_path / "legacy.pt", tmp_path / "empty.pt"
    legacy.write_bytes(torch_bytes(state(), zipped=False))
    empty.write_bytes(b"")
    options = {"mmap": True, "weights_only": weights_only}
    assert "mmap can only be used with files saved with `torch.save(" in str(
        both(lambda: legacy, **options)
    )
    assert isinstance(both(lambda: empty, **options), RuntimeError)
    assert "f must be a file path" in str(both(lambda: io.BytesIO(torch_bytes(1)), **options))
    assert isinstance(both(lambda: tmp_path / "absent", **options), FileNotFoundError)
    folder = both(lambda: tmp_path, **options)
    assert isinstance(folder, IsADirectoryError)
    assert "Is a directory; holdfast.torch.load_full" in str(folder)
    with legacy.open("rb") as file:
        assert isinstance(both(lambda: file, **options), RuntimeError)


# `skip_data`.


@WEIGHTS_ONLY
@pytest.mark.parametrize("mapped", [False, True])
def test_skip_data(path: Path, weights_only: bool, mapped: bool):
    if mapped and not path.read_bytes().startswith(b"PK"):
        pytest.skip("only archives are mapped")
    with set_default_mmap_options(mmap.MAP_SHARED), skip_data():
        theirs, ours = (
            function(path, weights_only=weights_only, mmap=mapped)
            for function in (torch.load, load)
        )
    assert [
        (v.shape, v.stride(), v.dtype) for v in ours.values() if isinstance(v, torch.Tensor)
    ] == [(v.shape, v.stride(), v.dtype) for v in theirs.values() if isinstance(v, torch.Tensor)]
    assert ours["w"].untyped_storage()._cdata == ours["turned"].untyped_storage()._cdata
    before = path.read_bytes()
    ours["w"].fill_(9)  # memory of its own, also where the file would have been mapped
    assert path.read_bytes() == before


def test_skip_data_reads_nothing(zip_path: Path):
    whole = zip_path.read_bytes()
    damaged = bytearray(whole)
    damaged[whole.index(torch.arange(12.0).numpy().tobytes())] ^= 1
    with skip_data():
        load(io.BytesIO(bytes(damaged)))
    with pytest.raises(Corrupted):
        load(io.BytesIO(bytes(damaged)))


# Byte order.

NUMBERS = [
    "float64",
    "float32",
    "float16",
    "bfloat16",
    "int64",
    "int32",
    "int16",
    "int8",
    "bool",
    "complex64",
    "complex128",
]
UNTYPED = ["uint16", "uint32", "uint64", "complex32"]
"""Stored as bytes; torch 2.13 does not swap them."""


def numbers(name: str) -> torch.Tensor:
    small = torch.arange(1, 7)
    return (small.to(torch.complex64) if name == "complex32" else small).to(getattr(torch, name))


def turned(storages: Mapping[str, bytes], tensor: torch.Tensor) -> dict[str, bytes]:
    """Storages as a machine with the other byte order writes them."""
    width = tensor.element_size() // (2 if tensor.is_complex() else 1)
    return {
        key: np.frombuffer(data, f"u{width}").byteswap().tobytes() for key, data in storages.items()
    }


def big_endian(tensor: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> bytes:
    """What `save` would write for `{"t": tensor}` there."""
    file = io.BytesIO()
    save({"t": tensor}, file)
    content, storages = records(file.getvalue())
    with monkeypatch.context() as patch:
        patch.setattr(layout, "sys", types.SimpleNamespace(byteorder="big"))
        payloads = [(f"data/{key}", data) for key, data in turned(storages, tensor).items()]
        segments = lay_out_container("archive", content, payloads)
    file = io.BytesIO()
    write_stream(FilePlan("", segments), file)
    return file.getvalue()


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (
        one.dtype == other.dtype
        and one.shape == other.shape
        and bytes(one.untyped_storage()) == bytes(other.untyped_storage())
    )


@WEIGHTS_ONLY
@pytest.mark.parametrize("name", [*NUMBERS, *UNTYPED])
def test_big_endian(name: str, weights_only: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    tensor = numbers(name)
    path = tmp_path / "big.pt"
    path.write_bytes(big_endian(tensor, monkeypatch))
    before = path.read_bytes()
    for options in ({}, {"mmap": True}, {"map_location": lambda storage, tag: storage}):
        assert same_bits(load(path, weights_only=weights_only, **options)["t"], tensor), options
        assert same_bits(torch.load(path, weights_only=weights_only, **options)["t"], tensor) == (
            name not in UNTYPED
        ), options
    with set_default_mmap_options(mmap.MAP_SHARED):
        assert same_bits(load(path, weights_only=weights_only, mmap=True)["t"], tensor)
    assert path.read_bytes() == before, "torch 2.13 swaps the bytes in the file"


@pytest.mark.parametrize("name", ["float32", "uint16"])
@pytest.mark.parametrize("setting", [None, *LoadEndianness])
def test_without_a_mark_the_default_decides(name: str, setting: LoadEndianness | None):
    tensor = numbers(name)
    content, storages = records(torch_bytes({"t": tensor}))
    config.load.endianness = setting
    for order in ("little", "big"):
        raw = container(content, storages if order == "little" else turned(storages, tensor), None)
        right = order == {None: "little", LoadEndianness.NATIVE: sys.byteorder}.get(
            setting, setting and setting.name.lower()
        )
        assert same_bits(load(io.BytesIO(raw))["t"], tensor) == right
        if name not in UNTYPED:
            assert same_bits(torch.load(io.BytesIO(raw))["t"], tensor) == right


@WEIGHTS_ONLY
def test_a_mark_wins_over_the_default(weights_only: bool):
    config.load.endianness = LoadEndianness.BIG
    both(lambda: io.BytesIO(torch_bytes(state())), weights_only=weights_only)


@WEIGHTS_ONLY
def test_an_unknown_byte_order(weights_only: bool):
    raw = container(*records(torch_bytes(state())), b"middle")
    assert "Unknown endianness type" in str(
        both(lambda: io.BytesIO(raw), weights_only=weights_only)
    )


@WEIGHTS_ONLY
def test_untyped_storages_with_attributes_and_as_parameters(weights_only: bool):
    tensor = numbers("uint16")
    tensor.note = "kept"
    value = {
        "t": tensor,
        "same": tensor[2:],
        "p": nn.Parameter(numbers("uint32"), requires_grad=False),
    }
    content, storages = records(torch_bytes(value))
    raw = container(
        content,
        {"0": turned(storages, tensor)["0"], "1": turned(storages, value["p"])["1"]},
        b"big",
    )
    made = load(io.BytesIO(raw), weights_only=weights_only)
    assert made["t"].tolist() == [1, 2, 3, 4, 5, 6]
    assert made["t"].note == "kept"
    assert made["same"].tolist() == [3, 4, 5, 6]
    assert made["p"].tolist() == [1, 2, 3, 4, 5, 6]


@WEIGHTS_ONLY
def test_two_widths_in_one_untyped_storage_cannot_be_swapped(weights_only: bool):
    tensor = numbers("uint16")
    raw = container(*records(torch_bytes([tensor, tensor.view(torch.uint32)])), b"big")
    with pytest.raises(Unsupported, match="several widths"):
        load(io.BytesIO(raw), weights_only=weights_only)


# What can be loaded from.


class Minimal:
    """What a file object needs, and nothing else."""

    def __init__(self, raw: bytes) -> None:
        self._file = io.BytesIO(raw)

    def read(self, count: int = -1) -> bytes:
        return self._file.read(count)

    def seek(self, offset: int, whence: int = 0) -> int:
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()


class WithLines(Minimal):
    def readline(self) -> bytes:
        return self._file.readline()


class Silent(WithLines):
    """Its `seek` says nothing, as that of `mmap.mmap` did before Python 3.13."""

    def seek(self, offset: int, whence: int = 0) -> None:
        self._file.seek(offset, whence)


class Stingy(WithLines):
    """Gives less than it is asked for."""

    def read(self, count: int = -1) -> bytes:
        return self._file.read(min(count, 7) if count > 0 else count)

    def readinto(self, out: memoryview) -> int:
        return self._file.readinto(memoryview(out)[:11])


class Bytearrays(Minimal):
    """Gives its bytes in another type; torch ends the process on them."""

    def read(self, count: int = -1) -> bytearray:
        return bytearray(self._file.read(count))


class Hidden(WithLines):
    """Reads something else than the file that it wraps."""

    def __init__(self, raw: bytes, folder: Path) -> None:
        (folder / "hidden").write_bytes(bytes(255 - b for b in raw))
        self.file = open(folder / "hidden", "rb")  # noqa: SIM115 (closed with the test's folder)
        super().__init__(raw)


class Astray(WithLines):
    """A window into a larger file, whose `seek` says where the larger one stands."""

    def __init__(self, raw: bytes) -> None:
        super().__init__(b"?" * 100 + raw)
        self._file.seek(100)

    def seek(self, offset: int, whence: int = 0) -> int:
        return self._file.seek(offset + 100 if whence == 0 else offset, whence)

    def tell(self) -> int:
        return self._file.tell() - 100


def member(raw: bytes, folder: Path) -> IO[bytes]:
    with zipfile.ZipFile(folder / "outer.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("before", b"?" * 50)
        archive.writestr("inner.pt", raw)
    return zipfile.ZipFile(folder / "outer.zip").open("inner.pt")


def dcp_view(raw: bytes, folder: Path) -> object:
    """The window that torch's own distributed checkpoints are read through."""
    return _ReaderView(opened(b"?" * 33 + raw + b"?" * 5, folder), 33, len(raw))


def in_memory_filesystem(raw: bytes, folder: Path) -> object:
    files = fsspec.filesystem("memory")
    name = f"/{folder.name}/file"
    files.pipe_file(name, raw)
    return files.open(name)


class Blocks(fsspec.spec.AbstractBufferedFile):
    """A file of a bucket, as fsspec reads one: by ranges, with a cache of blocks."""

    def __init__(self, raw: bytes) -> None:
        self._content = raw
        super().__init__(
            fsspec.filesystem("memory"), "/a/file", "rb", block_size=512, size=len(raw)
        )

    def _fetch_range(self, start: int, end: int) -> bytes:
        return self._content[start:end]


def rewound(file: io.BufferedIOBase, raw: bytes) -> io.BufferedIOBase:
    file.write(raw)
    file.seek(0)
    return file


def zipped_file(raw: bytes, folder: Path) -> gzip.GzipFile:
    (folder / "file.gz").write_bytes(gzip.compress(raw))
    return gzip.open(folder / "file.gz")


def opened(raw: bytes, folder: Path, *, at: int = 0, **options: object) -> io.BufferedIOBase:
    (folder / "file").write_bytes(b"?" * at + raw)
    file = open(folder / "file", **{"mode": "rb", **options})  # noqa: SIM115
    file.seek(at)
    return file


def mapped(raw: bytes, folder: Path) -> mmap.mmap:
    with opened(raw, folder) as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


FILES: dict[str, Callable[[bytes, Path], object]] = {
    "buffer": lambda raw, _: io.BytesIO(raw),
    "file": opened,
    "file for writing too": lambda raw, folder: opened(raw, folder, mode="r+b"),
    "unbuffered file": lambda raw, folder: opened(raw, folder, buffering=0),
    "file that is not at its start": lambda raw, folder: opened(raw, folder, at=9),
    "gzip": zipped_file,
    "TemporaryFile": lambda raw, _: rewound(tempfile.TemporaryFile(), raw),  # noqa: SIM115
    "NamedTemporaryFile": lambda raw, _: rewound(tempfile.NamedTemporaryFile(), raw),  # noqa: SIM115
    "SpooledTemporaryFile": lambda raw, _: rewound(tempfile.SpooledTemporaryFile(), raw),  # noqa: SIM115
    "SpooledTemporaryFile on disk": lambda raw, _: rewound(
        tempfile.SpooledTemporaryFile(max_size=1),  # noqa: SIM115
        raw,
    ),
    "member of a zip": member,
    "window of torch's distributed checkpoints": dcp_view,
    "fsspec, local": lambda raw, folder: fsspec.filesystem("file").open(opened(raw, folder).name),
    "fsspec, in memory": in_memory_filesystem,
    "fsspec, buffered": lambda raw, folder: Blocks(raw),
    "mmap": mapped,
    "object": lambda raw, _: WithLines(raw),
    "object whose seek is silent": lambda raw, _: Silent(raw),
    "object with a file": Hidden,
    "window whose seek leads astray": lambda raw, _: Astray(raw),
}


@WEIGHTS_ONLY
@pytest.mark.parametrize("name", FILES)
def test_file_objects(name: str, raw: bytes, weights_only: bool, tmp_path: Path):
    both(lambda: FILES[name](raw, tmp_path), weights_only=weights_only)


@WEIGHTS_ONLY
def test_read_seek_and_tell_are_enough(weights_only: bool):
    both(lambda: Minimal(torch_bytes(state())), weights_only=weights_only)
    legacy = torch_bytes(state(), zipped=False)
    if weights_only:  # torch wants `readline` as well
        assert_same(load(Minimal(legacy)), reference(legacy))


def test_a_file_that_gives_less_than_it_is_asked_for(raw: bytes):
    assert_same(load(Stingy(raw)), reference(raw))  # torch takes that for the end of the file


def test_a_file_that_gives_bytearrays(raw: bytes):
    assert_same(load(Bytearrays(raw)), reference(raw))


@WEIGHTS_ONLY
@pytest.mark.parametrize("kind", [str, Path, lambda path: types.SimpleNamespace(path=path)])
def test_paths(path: Path, weights_only: bool, kind: Callable[[Path], object]):
    class Pathlike(os.PathLike[str]):
        def __init__(self, inner: object) -> None:
            self._inner = inner

        def __fspath__(self) -> str:
            return str(self._inner.path)

    given = kind(path)
    both(
        lambda: Pathlike(given) if isinstance(given, types.SimpleNamespace) else given,
        weights_only=weights_only,
    )


@WEIGHTS_ONLY
def test_a_file_is_read_from_where_it_stands(raw: bytes, weights_only: bool):
    for function in (torch.load, load):
        file = io.BytesIO(b"before" + raw)
        file.seek(6)
        assert_same(function(file, weights_only=weights_only), reference(raw))
    assert file.tell() == (6 if raw.startswith(b"PK") else 6 + len(raw))


@WEIGHTS_ONLY
@pytest.mark.parametrize("cut", [0, 1, 40])
def test_a_buffer_is_free_again(raw: bytes, weights_only: bool, cut: int):
    file = io.BytesIO(raw[: len(raw) - cut])
    kept = attempt(load, file, weights_only=weights_only)
    assert isinstance(kept, Exception) == bool(cut)
    file.seek(0, io.SEEK_END)
    file.write(b"more")  # a BufferError where somebody still has a view
    file.truncate(0)


@WEIGHTS_ONLY
def test_what_is_no_file(weights_only: bool):
    for what in (None, 7, b"model.pt", object()):
        error = both(lambda what=what: what, weights_only=weights_only)
        assert "You can only torch.load from a file that is seekable" in str(error)


@WEIGHTS_ONLY
def test_streams_that_cannot_be_sought(weights_only: bool):
    raw = torch_bytes(state())

    def from_socket() -> io.BufferedIOBase:
        here, there = socket.socketpair()
        with here, there:
            there.sendall(raw)
            return here.makefile("rb")

    def from_pipe() -> io.BufferedIOBase:
        out, into = os.pipe()
        os.write(into, raw)
        os.close(into)
        return os.fdopen(out, "rb")

    error = both(from_socket, weights_only=weights_only)
    assert "Please pre-load the data into a buffer like io.BytesIO" in str(error)
    assert isinstance(both(from_pipe, weights_only=weights_only), OSError)


@WEIGHTS_ONLY
def test_files_that_cannot_be_loaded(tmp_path: Path, weights_only: bool):
    text, empty = tmp_path / "text", tmp_path / "empty"
    text.write_text("hello\n" * 50)
    empty.write_bytes(b"")
    options = {"weights_only": weights_only}
    for make, kind in (
        (io.BytesIO, EOFError),
        (lambda: empty, EOFError),
        (lambda: tmp_path, IsADirectoryError),
        (lambda: tmp_path / "absent", FileNotFoundError),
        (lambda: "", FileNotFoundError),
        (lambda: io.BytesIO(b"PK\3\4"), RuntimeError),
        (lambda: io.BytesIO(pickle.dumps(5, 2)), RuntimeError),
    ):
        assert isinstance(both(make, **options), kind)
    with (tmp_path / "new").open("wb") as file:
        assert isinstance(both(lambda: file, **options), io.UnsupportedOperation)
    closed = io.BytesIO(b"x")
    closed.close()
    assert isinstance(both(lambda: closed, **options), ValueError)
    with pytest.raises(pickle.UnpicklingError):  # torch lets a KeyError out under weights_only
        load(text, **options)
    with pytest.raises(TypeError, match="binary"), text.open(encoding="utf-8") as file:
        load(file, **options)
    with pytest.raises(TypeError, match="binary"):
        load(io.StringIO("text"), **options)


@WEIGHTS_ONLY
def test_cut_short(raw: bytes, weights_only: bool):
    """Of a legacy stream, torch's error depends on where; ours is an EOFError and what torch raises inside a storage."""
    for count in (len(raw) - 1, len(raw) - 30):
        error = both(lambda count=count: io.BytesIO(raw[:count]), weights_only=weights_only)
        assert isinstance(error, RuntimeError)
        assert isinstance(error, ZipError if raw.startswith(b"PK") else Truncated)
    for count in range(5, len(raw), 97):
        assert isinstance(
            attempt(load, io.BytesIO(raw[:count]), weights_only=weights_only),
            HoldfastError if weights_only or raw.startswith(b"PK") else Exception,
        )


# Containers.


@pytest.fixture
def script(tmp_path: Path) -> Path:
    class Scripted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.arange(3.0))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.w

    torch.jit.save(torch.jit.script(Scripted()), tmp_path / "script.pt")
    return tmp_path / "script.pt"


@pytest.mark.parametrize("as_path", [True, False])
def test_torchscript(script: Path, as_path: bool):
    def given() -> object:
        return script if as_path else io.BytesIO(script.read_bytes())

    for function in (torch.load, load):
        with pytest.warns(UserWarning, match="looks like a TorchScript archive"):
            made = function(given(), weights_only=False)
        assert isinstance(made, torch.jit.ScriptModule)
        assert made(torch.ones(3)).tolist() == [1.0, 2.0, 3.0]
        assert function(given(), weights_only=False, map_location="meta").w.is_meta
        for options in ({}, {"weights_only": True}):
            with (
                pytest.warns(UserWarning, match="looks like a TorchScript archive"),
                pytest.raises(
                    RuntimeError, match="Cannot use ``weights_only=True`` with TorchScript archives"
                ),
            ):
                function(given(), **options)


@WEIGHTS_ONLY
def test_several_objects_in_one_legacy_stream(weights_only: bool):
    for function in (torch.load, load):
        file = io.BytesIO()
        ends = []
        for i in range(3):
            pickle.dump(i, file)
            torch.save({"i": torch.full((i + 2,), i)}, file, _use_new_zipfile_serialization=False)
            ends.append(file.tell())
        file.seek(0)
        for i, end in enumerate(ends):
            assert pickle.load(file) == i
            assert function(file, weights_only=weights_only)["i"].tolist() == [i] * (i + 2)
            assert file.tell() == end
        assert isinstance(attempt(function, file, weights_only=weights_only), EOFError)


@WEIGHTS_ONLY
def test_an_open_legacy_file_stands_behind_the_object(tmp_path: Path, weights_only: bool):
    raw = torch_bytes(state(), zipped=False)
    (tmp_path / "two").write_bytes(raw * 2)
    with (tmp_path / "two").open("rb") as file:
        for _ in range(2):
            assert_same(load(file, weights_only=weights_only), reference(raw))
        assert file.read() == b""


def test_tar(golden_dir: Path):
    path = golden_dir / "files" / "tar.pt"
    for location in (None, "cpu", {"cpu": "cpu"}, lambda storage, tag: storage.clone()):
        both(lambda: path, weights_only=False, map_location=location)
        with path.open("rb") as ours, path.open("rb") as theirs:
            files = itertools.cycle((theirs, ours))
            both(lambda files=files: next(files), weights_only=False, map_location=location)
    expected = torch.load(path, weights_only=False)
    file = io.BytesIO(b"before" + path.read_bytes())  # torch looks for a tar in real files only
    file.seek(6)
    assert_same(load(file, weights_only=False), expected)
    for options in ({}, {"weights_only": True}):
        assert "Cannot use ``weights_only=True`` with files saved in the legacy .tar format" in str(
            both(lambda: path, **options)
        )
        with pytest.raises(Refused, match=r"legacy \.tar format"):
            load(io.BytesIO(path.read_bytes()), **options)


@pytest.mark.parametrize("name", ["tar_system.pt", "os_system.pt"])
def test_nothing_runs_under_weights_only(
    name: str, golden_dir: Path, capfd: pytest.CaptureFixture[str]
):
    with pytest.raises((RuntimeError, pickle.UnpicklingError)):
        load(golden_dir / "hostile" / name)
    assert capfd.readouterr().out == ""


@WEIGHTS_ONLY
def test_golden_files(golden: Path, weights_only: bool):
    """Every file that torch can load at all. Lengths of jagged tensors are symbols, and no two are equal."""
    theirs = attempt(torch.load, golden, weights_only=weights_only)
    if (
        isinstance(theirs, Exception | torch.jit.ScriptModule)
        or golden.is_dir()
        or golden.suffix == ".safetensors"
    ):
        pytest.skip("torch does not load it as a state")
    ours = load(golden, weights_only=weights_only)
    if "big" not in golden.name:  # its uint16 and complex32 are wrong in torch
        assert (
            list(ours) == list(theirs) if isinstance(theirs, dict) else type(ours) is type(theirs)
        )
    if weights_only and not {"big", "jagged"} & set(golden.name.replace(".", "_").split("_")):
        assert_same(ours, theirs)


@needs(versions.SAFETENSORS)
def test_safetensors(tmp_path: Path):
    path = tmp_path / "model.safetensors"
    tensors = {"a": torch.arange(4.0), "b": torch.ones(2, 3, dtype=torch.bfloat16)}
    save_file(tensors, path)
    for options in (
        {},
        {"weights_only": False},
        {"map_location": "cpu"},
        {"map_location": torch.device("cpu")},
        {"mmap": True},
    ):
        for function in (torch.load, load):
            made = function(path, **options)
            assert list(made) == ["a", "b"]
            assert all(torch.equal(made[name], tensor) for name, tensor in tensors.items())
    for location in ({"cpu": "cpu"}, lambda storage, tag: storage):
        assert isinstance(both(lambda: path, map_location=location), RuntimeError)
    assert isinstance(both(lambda: tmp_path / "absent.safetensors"), FileNotFoundError)
    path.write_bytes(torch_bytes(state()))
    assert_same(
        load(path), reference(torch_bytes(state()))
    )  # by its content; torch goes by the name and fails


# Other pickles.


def python2(stream: bytes) -> bytes:
    """The stream with its text as Python 2's `str`."""
    ops = [*pickletools.genops(stream), (None, None, len(stream))]
    made = []
    for (op, value, at), (_, _, end) in itertools.pairwise(ops):
        text = value.encode("latin-1") if op.name == "BINUNICODE" else b""
        made.append(b"U" + bytes([len(text)]) + text if op.name == "BINUNICODE" else stream[at:end])
    return b"".join(made)


def python2_legacy(raw: bytes) -> bytes:
    file = io.BytesIO(raw)
    parts = []
    for _ in range(5):
        begin = file.tell()
        for op, _, _ in pickletools.genops(file):
            if op.name == "STOP":
                break
        parts.append(raw[begin : file.tell()])
    return b"".join((*parts[:3], *map(python2, parts[3:]), raw[file.tell() :]))


@WEIGHTS_ONLY
@pytest.mark.parametrize("encoding", ["latin1", "bytes", "utf-8", "ascii"])
def test_python_2(encoding: str, weights_only: bool):
    value = {"clé": torch.arange(3.0), "note": "é"}
    content, storages = records(torch_bytes(value))
    zipped, legacy = (
        container(python2(content), storages),
        python2_legacy(torch_bytes(value, zipped=False)),
    )
    if encoding in ("utf-8", "ascii"):
        for raw in (zipped, legacy):
            for function in (torch.load, load):
                assert isinstance(
                    attempt(
                        function, io.BytesIO(raw), encoding=encoding, weights_only=weights_only
                    ),
                    ValueError,
                )
        return
    ours = both(lambda: io.BytesIO(legacy), encoding=encoding, weights_only=weights_only)
    assert list(ours) == (["clé", "note"] if encoding == "latin1" else [b"cl\xe9", b"note"])
    if encoding == "bytes":  # torch looks for a record named "b'0'"
        assert isinstance(
            attempt(torch.load, io.BytesIO(zipped), encoding=encoding, weights_only=weights_only),
            RuntimeError,
        )
        assert_same(load(io.BytesIO(zipped), encoding=encoding, weights_only=weights_only), ours)
    else:
        both(lambda: io.BytesIO(zipped), encoding=encoding, weights_only=weights_only)


def test_arguments_for_the_unpickler(path: Path):
    for options in ({"fix_imports": False}, {"errors": "strict"}, {"map_loction": "cpu"}):
        both(lambda: path, weights_only=False, **options)
        assert isinstance(both(lambda: path, weights_only=True, **options), TypeError)


def python_pickle() -> types.ModuleType:
    """A pickle module whose classes are written in Python and notice that they are used."""
    module = types.ModuleType("python_pickle")
    module.used = []

    class Unpickler(pickle._Unpickler):
        def find_class(self, module_name: str, name: str) -> object:
            module.used.append(name)
            return super().find_class(module_name, name)

    module.Pickler, module.Unpickler = pickle._Pickler, Unpickler
    module.load = lambda file, **options: Unpickler(file, **options).load()
    module.dumps, module.dump = pickle._dumps, pickle._dump
    return module


def lazy_pickle(unpickler_class: type = pickle.Unpickler) -> types.ModuleType:
    """A pickle module whose Unpickler has a `persistent_load` of its own, as mergekit's has."""
    module = types.ModuleType("lazy_pickle")

    class Unpickler(unpickler_class):
        def persistent_load(self, persistent_id: tuple[object, ...]) -> object:
            return ("not read", *persistent_id[2:])

        def find_class(self, module_name: str, name: str) -> object:
            if name == "_rebuild_tensor_v2":
                return lambda storage, *_: storage
            return super().find_class(module_name, name)

    module.Unpickler = Unpickler
    module.Pickler, module.dump, module.dumps = pickle.Pickler, pickle.dump, pickle.dumps
    module.load = pickle.load
    return module


def test_a_persistent_load_of_the_modules_own_unpickler_is_used_as_in_torch():
    # Of an archive: in a legacy stream torch insists that each storage was asked for.
    raw = torch_bytes({"w": torch.ones(2), "v": torch.zeros(3)}, True)
    loaded = both(lambda: io.BytesIO(raw), pickle_module=lazy_pickle())
    if sys.version_info < (3, 13):
        # From 3.13 on CPython prefers what torch sets on the object, with torch as with us.
        assert {name: text for name, (text, *_) in loaded.items()} == {
            "w": "not read",
            "v": "not read",
        }


def test_an_unpickler_written_in_python_reads_storages_as_in_torch():
    raw = torch_bytes(state(), True)
    both(lambda: io.BytesIO(raw), pickle_module=lazy_pickle(pickle._Unpickler))


def test_an_unpickler_that_replaces_pickles_own_is_used_while_it_does(
    monkeypatch: pytest.MonkeyPatch,
):
    raw = torch_bytes({"w": torch.ones(2)}, True)
    before = load(io.BytesIO(raw), weights_only=False)
    names: list[str] = []

    class Unpickler(pickle.Unpickler):
        def find_class(self, module_name: str, name: str) -> object:
            names.append(name)
            return super().find_class(module_name, name)

    with monkeypatch.context() as patch:
        patch.setattr(pickle, "Unpickler", Unpickler)
        load(io.BytesIO(raw), weights_only=False)
    assert "_rebuild_tensor_v2" in names

    names.clear()
    assert_same(load(io.BytesIO(raw), weights_only=False), before)
    assert not names


@ZIPPED
def test_another_pickle_module(zipped: bool):
    module = python_pickle()
    file, other = io.BytesIO(), io.BytesIO()
    save(state(), file, pickle_module=module, _use_new_zipfile_serialization=zipped)
    torch.save(state(), other, pickle_module=module, _use_new_zipfile_serialization=zipped)
    assert len(file.getvalue()) == len(other.getvalue())
    for options in ({}, {"weights_only": False}):
        both(lambda: io.BytesIO(file.getvalue()), pickle_module=module, **options)
    assert "_rebuild_tensor_v2" in module.used
    assert "Can not safely load weights when explicit pickle_module is specified" in str(
        both(lambda: io.BytesIO(file.getvalue()), pickle_module=module, weights_only=True)
    )


@ZIPPED
def test_dill(zipped: bool):
    dill = pytest.importorskip("dill")
    three = 3
    file = io.BytesIO()
    save(
        {"f": lambda x: x + three, "t": torch.arange(3.0)},
        file,
        pickle_module=dill,
        _use_new_zipfile_serialization=zipped,
    )
    for function in (torch.load, load):
        made = function(io.BytesIO(file.getvalue()), pickle_module=dill, weights_only=False)
        assert made["f"](1) == 4
        assert made["t"].tolist() == [0.0, 1.0, 2.0]
    both(lambda: io.BytesIO(torch_bytes(state(), zipped)), pickle_module=dill)


@ZIPPED
def test_cloudpickle(zipped: bool):
    cloudpickle = pytest.importorskip("cloudpickle")
    three = 3
    value = {"f": lambda x: x + three, "t": torch.arange(3.0)}
    file = io.BytesIO()
    save(value, file, pickle_module=cloudpickle, _use_new_zipfile_serialization=zipped)
    for function in (torch.load, load):
        assert function(io.BytesIO(file.getvalue()), weights_only=False)["f"](1) == 4
    # It has no Unpickler: what it writes is read by `pickle`.
    assert isinstance(
        both(lambda: io.BytesIO(file.getvalue()), pickle_module=cloudpickle), AttributeError
    )


def test_an_old_dill(path: Path):
    dill = types.ModuleType("dill")
    dill.__version__ = "0.3.0"
    assert "supports dill >= 0.3.1" in str(both(lambda: path, pickle_module=dill))


class Foreign:
    def __eq__(self, other: object) -> bool:
        return type(other) is Foreign

    __hash__ = None


SETTINGS = [
    {},
    {FORCE: "1"},
    {FORCE_NOT: "1"},
    {FORCE: "yes", FORCE_NOT: "TRUE" if versions.ANY_CASE else "true"},
    {FORCE: "0", FORCE_NOT: "y"},
    {FORCE: "maybe"},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("weights_only", [None, True, False])
@pytest.mark.parametrize("module", [None, pickle], ids=["", "pickle"])
def test_environment(
    settings: dict[str, str],
    weights_only: bool | None,
    module: types.ModuleType | None,
    monkeypatch: pytest.MonkeyPatch,
):
    for name in (FORCE, FORCE_NOT):
        monkeypatch.delenv(name, raising=False)
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    raw = torch_bytes({"foreign": Foreign(), "t": torch.ones(2)})
    both(lambda: io.BytesIO(raw), weights_only=weights_only, pickle_module=module)


def test_the_environment_is_mentioned(path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(FORCE_NOT, "1")
    for function in (torch.load, load):
        with pytest.warns(UserWarning, match=f"{FORCE_NOT} detected") as caught:
            function(path)
        assert caught[0].filename == __file__
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            function(path, weights_only=False)


@ZIPPED
def test_modules(zipped: bool):
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    model[0].weight = nn.Parameter(model[0].weight.detach())
    model.tied = model[0].weight
    raw = torch_bytes(model, zipped)
    made = load(io.BytesIO(raw), weights_only=False)
    assert_same(
        dict(made.state_dict()), dict(torch.load(io.BytesIO(raw), weights_only=False).state_dict())
    )
    assert made.tied is made[0].weight
    for function in (torch.load, load):
        with pytest.raises(pickle.UnpicklingError, match="Weights only load failed"):
            function(io.BytesIO(raw))


def test_source_that_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    source = "import torch\nclass Net(torch.nn.Module):\n    def __init__(self):\n        super().__init__()\n"
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "changing_net.py").write_text(source)
    import importlib
    import linecache

    net = importlib.import_module("changing_net")
    raw = torch_bytes(net.Net(), zipped=False)
    (tmp_path / "changing_net.py").write_text(source + "        self.more = 1\n")
    linecache.clearcache()
    importlib.reload(net)
    for function in (torch.load, load):
        with pytest.warns(
            SourceChangeWarning, match="source code of class 'changing_net.Net' has changed"
        ):
            function(io.BytesIO(raw), weights_only=False)


# Storages.


@ZIPPED
@WEIGHTS_ONLY
def test_ties(zipped: bool, weights_only: bool):
    tensor = torch.ones(3)
    raw = torch_bytes(
        {"a": tensor, "b": tensor, "c": tensor.view(3), "p": nn.Parameter(tensor)}, zipped
    )
    made = both(lambda: io.BytesIO(raw), weights_only=weights_only)
    assert made["a"] is made["b"]
    assert made["a"].data_ptr() == made["c"].data_ptr() == made["p"].data_ptr()


@ZIPPED
@WEIGHTS_ONLY
def test_empty_storages_stay_shared(zipped: bool, weights_only: bool):
    empty = torch.empty(0)
    raw = torch_bytes({"a": empty, "b": empty.view(0, 1), "c": torch.empty(0)}, zipped)
    made = load(io.BytesIO(raw), weights_only=weights_only)
    a, b, c = (made[name].untyped_storage()._cdata for name in "abc")
    assert a == b != c  # torch 2.13 gives each its own


def test_an_object_sees_filled_tensors():
    """`weights_only=False`: code of the file's choice runs while it is read."""
    Watcher.seen = []
    raw = torch_bytes([Watcher(torch.arange(3.0)), torch.arange(4.0)])
    for function in (torch.load, load):
        function(io.BytesIO(raw), weights_only=False)
    assert Watcher.seen == [[0.0, 1.0, 2.0]] * 2


class Watcher:
    seen: list[list[float]]

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def __setstate__(self, found: dict[str, torch.Tensor]) -> None:
        self.seen.append(found["tensor"].tolist())


def test_many_and_large(tmp_path: Path):
    """Beyond what is read in one go: blocks of large storages, spans of small ones, threads."""
    value = {
        "large": torch.arange(3_000_000.0),
        **{str(i): torch.full((i % 50,), i) for i in range(2000)},
    }
    torch.save(value, tmp_path / "model.pt")
    for options in (
        {},
        {"weights_only": False},
        {"mmap": True},
        {"map_location": lambda storage, tag: storage},
    ):
        made = load(tmp_path / "model.pt", **options)
        assert list(made) == list(value)
        assert all(torch.equal(made[name], tensor) for name, tensor in value.items())


# Archives that others wrote.


def repacked(
    raw: bytes, *, deflated: str = " ", extra: Mapping[str, bytes] | None = None, without: str = " "
) -> bytes:
    """The same records, written by Python's zipfile."""
    file = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(raw)) as old, zipfile.ZipFile(file, "w") as new:
        for name in old.namelist():
            if not name.endswith(without):
                new.writestr(
                    name,
                    old.read(name),
                    zipfile.ZIP_DEFLATED if name.endswith(deflated) else zipfile.ZIP_STORED,
                )
        for name, data in (extra or {}).items():
            new.writestr(name, data)
    return file.getvalue()


@WEIGHTS_ONLY
def test_repacked(weights_only: bool):
    raw = torch_bytes(state())
    both(lambda: io.BytesIO(repacked(raw)), weights_only=weights_only)
    both(
        lambda: io.BytesIO(repacked(raw, extra={"archive/notes": b"hello"})),
        weights_only=weights_only,
    )
    load(
        io.BytesIO(repacked(raw, without="/version")), weights_only=weights_only
    )  # torch must have it
    for other in (
        repacked(raw, deflated="/data.pkl"),
        repacked(raw, deflated="/data/0"),
        raw + b"tail",
    ):
        torch.load(io.BytesIO(other), weights_only=weights_only)
        with pytest.raises(RuntimeError) as caught:
            load(io.BytesIO(other), weights_only=weights_only)
        assert isinstance(caught.value, ZipError)
    for other in (
        repacked(raw, extra={"archive/DATA/0": b"x" * 48}),
        repacked(raw, extra={"other/data.pkl": b"N."}),
    ):
        with pytest.raises(ZipError):
            load(io.BytesIO(other), weights_only=weights_only)


# Checksums.


@WEIGHTS_ONLY
@pytest.mark.parametrize("elements", [12, 200_000])
def test_a_damaged_storage(tmp_path: Path, weights_only: bool, elements: int):
    tensor = torch.arange(1.0, elements + 1)
    raw = bytearray(torch_bytes({"w": tensor}))
    at = raw.index(tensor.numpy().tobytes())
    raw[at + tensor.nbytes // 2] ^= 1
    path = tmp_path / "damaged.pt"
    path.write_bytes(raw)
    assert not torch.equal(torch.load(path, weights_only=weights_only)["w"], tensor)
    for location in (None, lambda storage, tag: storage):
        with pytest.raises(Corrupted, match="data/0") as caught:
            load(path, weights_only=weights_only, map_location=location)
        assert (caught.value.file, caught.value.tensor, caught.value.offset) == (str(path), "w", at)
        made = load(path, weights_only=weights_only, verify=False, map_location=location)
        assert torch.equal(made["w"], torch.load(path, weights_only=weights_only)["w"])
    load(path, mmap=True)  # not summed
    load(path, map_location="meta")  # not read


def test_a_damaged_pickle():
    raw = torch_bytes({"name": "value"}).replace(b"value", b"valve")
    assert torch.load(io.BytesIO(raw)) == {"name": "valve"}
    with pytest.raises(Corrupted, match=r"data\.pkl"):
        load(io.BytesIO(raw))
    assert load(io.BytesIO(raw), verify=False) == {"name": "valve"}


def test_without_checksums():
    before = config.save.compute_crc32
    config.save.compute_crc32 = False
    try:
        raw = bytearray(torch_bytes(state()))
    finally:
        config.save.compute_crc32 = before
    raw[raw.index(torch.arange(12.0).numpy().tobytes()) + 7] ^= 64
    both(lambda: io.BytesIO(bytes(raw)))
