"""The zip writer against the strict reader, CPython's zipfile, and the bytes that torch writes."""

from __future__ import annotations

import io
import zipfile
import zlib
from collections.abc import Mapping

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.formats.slow_save import write_file
from tests.sampling import examples

from holdfast.core.chunk import Storage
from holdfast.core.dtype import DTYPES
from holdfast.core.protocols import Store
from holdfast.core.tensor import LazyTensor
from holdfast.engine.saves import Data, FilePlan, Late, Literal, Segment
from holdfast.engine.source import OpenSource
from holdfast.formats.zip.reader import read_archive
from holdfast.formats.zip.writer import MAX_ALIGNMENT, lay_out_zip
from holdfast.stores.memory import MemoryStore


def data(label: str, content: bytes) -> Data:
    source = OpenSource(MemoryStore({"memory": content}))
    storage = Storage("memory", 0, len(content), home=source.store)
    return Data(
        LazyTensor.contiguous(label, DTYPES.name("uint8"), (len(content),), storage, source), label
    )


def carry_out(segments: tuple[Segment, ...]) -> bytes:
    """The file of a plan, the slow and obvious way."""
    return write_file(FilePlan("", segments), {})


def read_back(archive: bytes) -> dict[str, bytes]:
    """What the strict reader finds, its checksums compared."""
    source = OpenSource(MemoryStore({"archive": archive}))
    found = {}
    for name, record in read_archive(source, "archive").records.items():
        content = archive[record.start : record.start + record.nbytes]
        assert record.crc32 in (zlib.crc32(content), None)
        found[name.removeprefix("p/")] = content
    return found


@given(
    st.lists(
        st.tuples(
            st.text("abcdé/9", min_size=1, max_size=9), st.binary(max_size=200), st.booleans()
        ),
        max_size=12,
    ),
    st.sampled_from([1, 2, 64, 100, 4096]),
)
@settings(max_examples=examples(60))
def test_every_reader_finds_what_was_laid_out(
    records: list[tuple[str, bytes, bool]], alignment: int
):
    named = [
        (f"r{i}{name.replace('/', '')}", content, lazy)
        for i, (name, content, lazy) in enumerate(records)
    ]
    segments = lay_out_zip(
        "p", [(n, data(n, c) if lazy else c) for n, c, lazy in named], alignment=alignment
    )
    archive = carry_out(segments)
    if named:
        assert read_back(archive) == {n: c for n, c, _ in named}
    with zipfile.ZipFile(io.BytesIO(archive)) as opened:
        assert opened.testzip() is None
        assert {i.filename: opened.read(i) for i in opened.infolist()} == {
            f"p/{n}": c for n, c, _ in named
        }
        for info in opened.infolist():
            name_nbytes, extra_nbytes = np.frombuffer(
                archive, "<u2", 2, info.header_offset + 26
            ).tolist()
            assert (info.header_offset + 30 + name_nbytes + extra_nbytes) % alignment == 0


def test_a_late_payload_sees_the_checksums_and_has_one_itself():
    def make(crcs: Mapping[str, int]) -> bytes:
        return b"%08x" % crcs["d"]

    archive = carry_out(lay_out_zip("p", [("d", data("d", b"data")), ("late", Late(8, make))]))
    assert read_back(archive)["late"] == b"%08x" % zlib.crc32(b"data")
    assert zipfile.ZipFile(io.BytesIO(archive)).testzip() is None


def test_a_late_payload_of_another_length_is_noticed():
    (*_, last) = lay_out_zip("p", [("late", Late(8, lambda _: b"short"))])
    with pytest.raises(ValueError, match="8 bytes"):
        last.make({})


@pytest.mark.parametrize(
    "records",
    [
        [("a", b""), ("A", b"")],
        [("late", Late(1, lambda _: b"x")), ("after", b"")],
        [("n" * 65536, b"")],
    ],
)
def test_what_no_reader_would_take_is_refused(records: list):
    with pytest.raises(ValueError):
        lay_out_zip("p", records)


@pytest.mark.parametrize("alignment", [0, -1, MAX_ALIGNMENT + 1, 65536, 1 << 20])
def test_an_alignment_that_cannot_be_read_back_is_refused(alignment: int):
    with pytest.raises(ValueError, match="alignment"):
        lay_out_zip("p", [("a", b"x")], alignment=alignment)


def test_the_largest_alignment_is_read_back():
    archive = carry_out(
        lay_out_zip("p", [("a", b"x"), ("d", data("d", b"data"))], alignment=MAX_ALIGNMENT)
    )
    assert read_back(archive) == {"a": b"x", "d": b"data"}


class Sparse(Store):
    """A store with a few bytes here and there and zeros in between, as large as it says."""

    name = "sparse"

    def __init__(self, nbytes: int, pieces: dict[int, bytes]) -> None:
        self.nbytes, self.pieces = nbytes, pieces

    def list(self) -> list[str]:
        return ["a"]

    def size(self, key: str) -> int:
        return self.nbytes

    def read(self, key: str, start: int, out: memoryview) -> None:
        out[:] = bytes(len(out))
        for at, piece in self.pieces.items():
            low, high = max(at, start), min(at + len(piece), start + len(out))
            if low < high:
                out[low - start : high - start] = piece[low - at : high - at]

    def map(self, key: str) -> None:
        return None

    def close(self) -> None:
        pass


@pytest.mark.parametrize("large", [0xFFFFFFFE, 0xFFFFFFFF, 5 << 30])
def test_zip64_is_read_back(large: int):
    source = OpenSource(MemoryStore({"memory": b""}))
    big = Data(
        LazyTensor.contiguous(
            "b",
            DTYPES.name("uint8"),
            (large,),
            Storage("memory", 0, large, home=source.store),
            source,
        ),
        "b",
    )
    plan = FilePlan(
        "",
        lay_out_zip(
            "p", [("b", big), ("far", b"known"), ("empty", b""), ("d", data("d", b"data"))]
        ),
    )
    crcs = {"b": 1, "d": zlib.crc32(b"data")}
    pieces = {}
    for offset, segment in zip(plan.offsets(), plan.segments, strict=True):
        if not isinstance(segment, Data):
            pieces[offset] = segment.data if isinstance(segment, Literal) else segment.make(crcs)
    archive = read_archive(OpenSource(Sparse(plan.nbytes, pieces)), "a")
    assert {n: (r.nbytes, r.crc32) for n, r in archive.records.items()} == {
        "p/b": (large, 1), "p/far": (5, zlib.crc32(b"known")), "p/empty": (0, 0), "p/d": (4, crcs["d"]),
    }  # fmt: skip
    ends = {o + s.nbytes for o, s in zip(plan.offsets(), plan.segments, strict=True)}
    assert archive.records["p/d"].start in ends
