"""What the strict reader accepts, it sees as CPython's zipfile and torch see it."""

from __future__ import annotations

import io
import os
import struct
import time
import tracemalloc
import zipfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.formats.zip.craft import (
    DESCRIBED,
    UTF8,
    Item,
    block,
    build,
    central_entry,
    descriptor,
    local_header,
    make_old_cpython_item,
    tail,
)
from tests.formats.zip.sources import BytesSource, FileSource
from tests.sampling import examples
from tests.support import torch_bytes

from holdfast.core.limits import Limits
from holdfast.errors import LimitExceeded, Truncated, ZipError
from holdfast.formats.zip.layout import Archive, Records
from holdfast.formats.zip.reader import read_archive


def read(content: bytes, **where: int) -> Archive:
    return read_archive(BytesSource(content), "file", **where)


def contents(archive: zipfile.ZipFile, name: str) -> bytes:
    """What zipfile reads, whether or not the checksum is right: torch can leave it out."""
    with archive.open(name) as file:
        file._expected_crc = None
        return file.read()


def assert_like_zipfile(found: Archive, raw: bytes, *, start: int = 0) -> None:
    """The same names in the order of the file, the same sizes, checksums and bytes."""
    with zipfile.ZipFile(io.BytesIO(raw)) as theirs:
        infos = [
            i for i in sorted(theirs.infolist(), key=lambda i: i.header_offset) if not i.is_dir()
        ]
        assert list(found.records) == [i.filename for i in infos]
        for info in infos:
            record = found.records[info.filename]
            assert (record.header - start, record.method) == (
                info.header_offset,
                info.compress_type,
            )
            assert (record.nbytes, record.content_nbytes) == (info.compress_size, info.file_size)
            assert record.crc32 == (info.CRC if info.CRC or not info.file_size else None)
            if record.stored:
                assert raw[record.start - start : record.stop - start] == contents(
                    theirs, info.filename
                )


def with_alignment(nbytes: int) -> bytes:
    from torch.utils.serialization import config

    before = config.save.storage_alignment
    config.save.storage_alignment = nbytes
    try:
        return torch_bytes({"a": torch.arange(5), "b": torch.ones(3)})
    finally:
        config.save.storage_alignment = before


def without_crc() -> bytes:
    torch.serialization.set_crc32_options(False)
    try:
        return torch_bytes({"a": torch.arange(5)})
    finally:
        torch.serialization.set_crc32_options(True)


def skipped(path: Path) -> bytes:
    with torch.serialization.skip_data():
        torch.save({"a": torch.arange(5)}, path)
    return path.read_bytes()


def scripted() -> bytes:
    class Two(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x) * 2

    file = io.BytesIO()
    torch.jit.save(torch.jit.script(Two()), file)
    return file.getvalue()


def named(path: Path) -> bytes:
    torch.save({"a": torch.arange(5)}, path)
    return path.read_bytes()


TORCH = {
    "one tensor": lambda tmp: torch_bytes(torch.arange(4.0)),
    "no tensor": lambda tmp: torch_bytes({"epoch": 3}),
    "empty tensors": lambda tmp: torch_bytes(
        {"a": torch.empty(0), "b": torch.empty(0, 4), "c": torch.ones(1)}
    ),
    "300 tensors": lambda tmp: torch_bytes([torch.full((i % 7,), i) for i in range(300)]),
    "payload like a descriptor": lambda tmp: torch_bytes(
        torch.tensor(list(b"PK\7\10PK\5\6PK\1\2"), dtype=torch.uint8)
    ),
    "named file": lambda tmp: named(tmp / "my.model.pt"),
    "alignment 4096": lambda tmp: with_alignment(4096),
    "alignment 1": lambda tmp: with_alignment(1),
    "no crc": lambda tmp: without_crc(),
    "skip_data": lambda tmp: skipped(tmp / "s.pt"),
    "TorchScript": lambda tmp: scripted(),
}


@pytest.mark.parametrize("make", TORCH.values(), ids=TORCH.keys())
def test_torch_archives(make, tmp_path):
    raw = make(tmp_path)
    found = read(raw)
    assert_like_zipfile(found, raw)
    theirs = torch._C.PyTorchFileReader(io.BytesIO(raw))
    assert sorted(found.names) == sorted(theirs.get_all_records())
    for name in found.names:
        record = found.get(name)
        assert record is not None
        if record.nbytes:
            assert record.start == theirs.get_record_offset(name)
        if record.stored:
            assert raw[record.start : record.stop] == theirs.get_record(name)


def test_golden_files_open(golden_dir):
    zips = [p for p in (golden_dir / "files").glob("*.pt") if p.read_bytes()[:4] == b"PK\3\4"]
    assert len(zips) > 10
    for path in zips:
        raw = path.read_bytes()
        assert_like_zipfile(read(raw), raw)


def test_prefix_names_and_get(tmp_path):
    found = read(named(tmp_path / "my.model.pt"))
    assert found.prefix == "my.model"
    assert found.names[0] == "data.pkl"
    assert found.get("data/0") == found.records["my.model/data/0"]
    assert found.get("nothing") is None
    loose = read(build([Item("x", b"1"), Item("a/y", b"2")]))
    assert (loose.prefix, loose.names) == ("", ["x", "a/y"])
    assert loose.get("a/y").nbytes == 1


def test_missing_checksum_is_none_and_an_empty_record_has_one():
    found = read(without_crc())
    assert {r.crc32 for r in found.records.values()} == {None}
    assert read(build([Item("x/empty")])).records["x/empty"].crc32 == 0


def test_deflated_records_are_listed():
    found = read(scripted())
    code = [r for name, r in found.records.items() if "/code/" in name]
    assert code
    assert all(r.method == 8 and r.nbytes != r.content_nbytes and not r.stored for r in code)


class Stream(io.RawIOBase):
    """A file that cannot seek."""

    def __init__(self) -> None:
        self.content = bytearray()

    def writable(self) -> bool:
        return True

    def write(self, data: bytes) -> int:
        self.content += data
        return len(data)


@pytest.mark.parametrize("seekable", [True, False], ids=["seekable", "stream"])
@pytest.mark.parametrize("force_zip64", [True, False], ids=["zip64", "plain"])
@pytest.mark.parametrize("method", [0, 8], ids=["stored", "deflated"])
def test_zipfile_archives(seekable, force_zip64, method):
    file = io.BytesIO() if seekable else Stream()
    with zipfile.ZipFile(file, "w", method) as archive:
        for name, content in [("m/a", b"hello" * 9), ("m/ä", b"x"), ("m/empty", b"")]:
            with archive.open(name, "w", force_zip64=force_zip64) as record:
                record.write(content)
        archive.mkdir("m/folder")
    raw = file.getvalue() if seekable else bytes(file.content)
    found = read(raw)
    assert_like_zipfile(found, raw)
    assert found.prefix == "m"
    assert "m/folder/" not in found.records


@pytest.mark.parametrize("to_pipe", [False, True], ids=["file", "pipe"])
@pytest.mark.parametrize("method", [0, 8], ids=["stored", "deflated"])
def test_read_accepts_the_zip64_blocks_of_old_cpython(to_pipe, method):
    contents = {"m/a": b"hello" * 9, "m/b": b"x", "m/empty": b""}
    items = [
        make_old_cpython_item(name, content, method=method, to_pipe=to_pipe)
        for name, content in contents.items()
    ]
    raw = build(items, wide=False, alignment=0)
    assert_like_zipfile(read(raw), raw)


def test_read_accepts_a_pipe_of_old_cpython_with_a_record_above_4_gib(tmp_path):
    nbytes = 5 << 30
    sizes = struct.pack("<2Q", nbytes, nbytes)
    item = Item(
        "a/x",
        flags=DESCRIBED,
        local={"extra": block(1, bytes(16))},
        central={"size": 0xFFFFFFFF, "packed": 0xFFFFFFFF, "extra": block(1, sizes)},
    )
    head = local_header(item)
    behind = descriptor(item, wide=True, size=nbytes, packed=nbytes)
    directory = central_entry(item, 0)
    directory_offset = len(head) + nbytes + len(behind)
    path = tmp_path / "hole.zip"
    with open(path, "wb") as file:
        file.write(head)
        file.seek(nbytes, os.SEEK_CUR)
        file.write(behind + directory + tail(directory_offset, len(directory), 1))
    record = read_archive(FileSource(path), "file").records["a/x"]
    assert (record.start, record.nbytes) == (len(head), nbytes)
    with zipfile.ZipFile(path) as archive:
        assert archive.getinfo("a/x").file_size == nbytes


def test_empty_archive():
    file = io.BytesIO()
    zipfile.ZipFile(file, "w").close()
    found = read(file.getvalue())
    assert (len(found.records), found.prefix, found.names) == (0, "", [])


def test_checkpoint_packed_again_by_info_zip_has_times(tmp_path):
    times = block(0x5455, b"\3" + bytes(8))
    owners = block(0x7875, b"\1\4" + bytes(4) + b"\4" + bytes(4))
    item = Item(
        "a/x",
        b"1",
        flags=0,
        local={"extra": times + owners},
        central={"extra": times[:4] + bytes(9) + owners},
    )
    assert read(build([item], wide=False, alignment=0)).records["a/x"].nbytes == 1


def test_fake_end_record_in_a_payload_does_not_matter():
    inner = build([Item("evil/data.pkl", b"evil")])
    raw = build([Item("a/data.pkl", inner), Item("a/x", inner + tail(0, 0, 0))])
    assert_like_zipfile(read(raw), raw)


@given(before=st.binary(max_size=90), after=st.binary(max_size=90))
@settings(max_examples=examples(20))
def test_archive_inside_a_larger_file(before, after):
    raw = torch_bytes({"a": torch.arange(3), "b": torch.empty(0)})
    found = read(before + raw + after, start=len(before), stop=len(before) + len(raw))
    assert_like_zipfile(found, raw, start=len(before))


def test_place_outside_of_the_file():
    raw = build([Item("a/x", b"1")])
    with pytest.raises(Truncated):
        read(raw, stop=len(raw) + 1)
    with pytest.raises(ZipError):
        read(raw, start=5, stop=4)
    with pytest.raises(ZipError):
        read(raw, start=-1)


def test_records_above_4_gib_written_by_torch(tmp_path):
    path = tmp_path / "big.pt"
    # Neither written nor touched: the file is a hole and the memory is never backed by pages.
    sizes = [12, (4 << 30) + 8, 16, 0, 0xFFFFFFFF]
    with torch.serialization.skip_data():
        torch.save([torch.empty(n, dtype=torch.uint8) for n in sizes], path)
    source = FileSource(path)
    found = read_archive(source, "file")
    theirs = torch._C.PyTorchFileReader(str(path))
    for index, nbytes in enumerate(sizes):
        record = found.get(f"data/{index}")
        assert (record.nbytes, record.crc32) == (nbytes, None if nbytes else 0)
        if nbytes:
            assert record.start == theirs.get_record_offset(f"data/{index}")
    with zipfile.ZipFile(path) as archive:
        assert list(found.records) == archive.namelist()
        assert [r.header for r in found.records.values()] == [
            i.header_offset for i in archive.infolist()
        ]
    assert source.nbytes < 20_000
    assert source.calls < 10


@pytest.mark.parametrize(
    "saturated", [True, False], ids=["sizes in the header", "sizes in the descriptor"]
)
def test_record_above_4_gib_as_cpython_lays_it_out(tmp_path, saturated):
    nbytes = 5 << 30
    wide = nbytes.to_bytes(8, "little")
    flags = 0 if saturated else DESCRIBED
    item = Item(
        "a/x",
        flags=flags,
        local={
            "size": 0xFFFFFFFF,
            "packed": 0xFFFFFFFF,
            "extra": block(1, wide * 2 if saturated else bytes(16)),
        },
        central={"size": 0xFFFFFFFF, "packed": 0xFFFFFFFF, "extra": block(1, wide * 2)},
    )
    late = Item("a/y", b"12", flags=0)
    head = local_header(item)
    behind = b"" if saturated else descriptor(item, wide=True, size=nbytes, packed=nbytes)
    offset = len(head) + nbytes + len(behind)
    late_central = central_entry(
        Item("a/y", b"12", flags=0, central={"extra": block(1, offset.to_bytes(8, "little"))}),
        0xFFFFFFFF,
    )
    directory = central_entry(item, 0) + late_central
    place = offset + len(local_header(late)) + 2
    path = tmp_path / "holes.zip"
    with open(path, "wb") as file:
        file.write(head)
        file.seek(nbytes, os.SEEK_CUR)
        file.write(behind + local_header(late) + b"12" + directory + tail(place, len(directory), 2))
    found = read_archive(FileSource(path), "file")
    assert [(r.start, r.nbytes) for r in found.records.values()] == [
        (len(head), nbytes),
        (place - 2, 2),
    ]
    with zipfile.ZipFile(path) as archive:
        assert [i.file_size for i in archive.infolist()] == [nbytes, 2]
        assert archive.read("a/y") == b"12"


def test_exactly_65535_records_without_zip64():
    raw = build([Item(f"a/{i}", flags=0) for i in range(65535)], wide=False, alignment=0)
    assert len(read(raw).records) == 65535


def test_far_headers_cost_small_reads():
    items = [Item(f"a/{i}", bytes(100_000)) for i in range(50)]
    source = BytesSource(build(items))
    assert len(read_archive(source, "file").records) == 50
    assert source.nbytes < 50 * 1000
    near = BytesSource(build([Item(f"a/{i}", b"12") for i in range(1000)]))
    read_archive(near, "file")
    assert near.calls < 10


def empty_records(count: int) -> bytes:
    """As `build` would, and faster."""
    heads, entries, place = [], [], 0
    for index in range(count):
        name = f"a/{index:07}".encode()
        heads.append(b"PK\3\4" + bytes(22) + len(name).to_bytes(4, "little") + name)
        entries.append(
            b"PK\1\2"
            + bytes(24)
            + len(name).to_bytes(14, "little")
            + place.to_bytes(4, "little")
            + name
        )
        place += len(heads[-1])
    directory = b"".join(entries)
    return b"".join(heads) + directory + tail(place, len(directory), count)


def test_time_for_many_records():
    source = BytesSource(empty_records(200_000))
    began = time.process_time()
    assert len(read_archive(source, "file").records) == 200_000
    # About 0.4 s; room for a busy machine, none for anything quadratic.
    assert time.process_time() - began < 5


def test_memory_for_many_records():
    read(build([Item("a/x", b"1")]))
    source = BytesSource(empty_records(20_000))
    tracemalloc.start()
    try:
        read_archive(source, "file")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 8 * len(source.content)


def test_limits():
    raw = build([Item(f"a/{i}", b"1") for i in range(20)])
    with pytest.raises(LimitExceeded) as caught:
        read_archive(BytesSource(raw, Limits(zip_records=19)), "file")
    assert (caught.value.expected, caught.value.found) == (19, 20)
    source = BytesSource(raw, Limits(zip_directory_nbytes=100))
    with pytest.raises(LimitExceeded):
        read_archive(source, "file")
    assert source.nbytes < 100
    assert len(read_archive(BytesSource(raw, Limits(zip_records=20)), "file").records) == 20


NAMES = st.text(st.characters(codec="utf-8", exclude_characters="\0\\/:."), min_size=1, max_size=6)


@given(
    content=st.dictionaries(
        st.lists(NAMES, min_size=1, max_size=3).map("/".join), st.binary(max_size=40), max_size=8
    ),
    style=st.sampled_from(["torch", "zipfile", "stream"]),
    alignment=st.sampled_from([1, 64, 512]),
    data=st.data(),
)
@settings(max_examples=examples(80))
def test_random_record_sets(content, style, alignment, data):
    folded = [name.casefold() for name in content]
    unique = {name: body for name, body in content.items() if folded.count(name.casefold()) == 1}
    order = data.draw(st.permutations(range(len(unique))))
    flags = {"torch": None, "zipfile": UTF8, "stream": UTF8 | DESCRIBED}[style]
    items = [Item(name, body, flags=flags) for name, body in unique.items()]
    raw = build(
        items, order=order, alignment=alignment if style == "torch" else 0, wide=style == "torch"
    )
    found = read(raw)
    assert_like_zipfile(found, raw)
    assert {name: raw[r.start : r.stop] for name, r in found.records.items()} == unique


def test_names_that_are_one_text_are_the_same_records():
    raw = torch_bytes({f"t{number}": torch.full((3,), number) for number in range(20)})
    plain, folded = read(raw), read(raw)
    folded.records.fold()
    assert len(folded.records) == len(plain.records)
    assert [*folded.records.items()] == [*plain.records.items()]
    assert "gone" not in folded.records


def test_rows_in_another_order_keep_their_names():
    records = Records({"b": 1, "a": 0}, [10, 20], *([number, number] for number in range(5)))
    records.fold()
    assert (records["b"].start, records["a"].start) == (20, 10)
