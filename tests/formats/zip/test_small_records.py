"""Small records that are read together against records whose bytes are known: the same archive, byte for byte."""

import io
import struct
import zipfile
from unittest import mock

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.sampling import examples

from holdfast.core.crc import crc32
from holdfast.engine import saves as plan_saves
from holdfast.engine.saves import FilePlan, Gathered, Memory
from holdfast.engine.stream import write_stream
from holdfast.engine.write import write_file
from holdfast.formats.torch.write import lay_out_container, storage_payloads
from holdfast.formats.zip import writer

SMALL, BLOCK = 64, 400
SIGNED = b"PK\x07\x08"


class Sink:
    def __init__(self):
        self.content = bytearray()

    def allocate(self, nbytes):
        self.content = bytearray(nbytes)

    def write(self, offset, data):
        self.content[offset : offset + len(data)] = data


class Payloads:
    def __init__(self, payloads):
        self.payloads = payloads
        self.nbytes = np.array([len(payload) for payload in payloads], np.int64)

    def read(self, numbers):
        return [self.payloads[number] for number in numbers]

    def segment(self, number, label):
        return Memory(memoryview(self.payloads[number]), label) if self.payloads[number] else b""


def small_records(payloads, alone=()):
    """Records of a table's storages; those in `alone` are segments of their own."""
    storages = Payloads(payloads)
    make_payload = storage_payloads(storages)
    return [
        (
            f"data/{number}",
            storages.segment(number, f"data/{number}")
            if number in alone
            else make_payload(number, f"data/{number}"),
        )
        for number in range(len(payloads))
    ]


def written(segments):
    """The file, by both of those that write one, and what they say of its records."""
    plan, stream, sink = FilePlan("", segments), io.BytesIO(), Sink()
    receipt = write_file(plan, sink, threads=2)
    streamed = write_stream(plan, stream)
    assert stream.getvalue() == bytes(sink.content)
    assert len(sink.content) == plan.nbytes
    assert streamed == receipt.crcs
    return stream.getvalue()


PAYLOADS = st.lists(
    st.one_of(
        st.binary(max_size=SMALL),
        st.binary(min_size=SMALL + 1, max_size=3 * SMALL),
        st.just(SIGNED + b"abcdefgh"),
        st.just(b""),
    ),
    min_size=1,
    max_size=130,
)


@settings(max_examples=examples(60), deadline=None)
@given(
    PAYLOADS,
    st.sampled_from(["a", "model.v2", "x" * 70]),
    st.sampled_from([1, 64, 100, 4096]),
    st.booleans(),
    st.booleans(),
)
@example([b"ab"] * 11, "a", 64, True, True)
@example([SIGNED + b"abcd"] * 3, "a", 64, True, True)
@example([SIGNED + b"abcd" * 30] * 3, "a", 64, False, True)
def test_small_records_are_laid_out_as_known_ones_are(
    payloads, prefix, alignment, crc, order_first
):
    options = {"alignment": alignment, "crc": crc, "order_first": order_first}
    with (
        mock.patch.object(plan_saves, "SMALL_NBYTES", SMALL),
        mock.patch.object(plan_saves, "BLOCK_NBYTES", BLOCK),
    ):
        rows = lay_out_container(prefix, b"a pickle", small_records(payloads), **options)
        made = written(rows)
    records = [(f"data/{n}", payload) for n, payload in enumerate(payloads)]
    assert made == written(lay_out_container(prefix, b"a pickle", records, **options))
    assert any(isinstance(segment, Gathered) for segment in rows) == any(
        0 < len(p) <= SMALL for p in payloads
    )


def test_checksums_are_told_by_name():
    sink, payloads = Sink(), [b"a", b"", b"c" * 70_000, SIGNED + b"abcd"]
    receipt = write_file(FilePlan("", lay_out_container("a", b"p", small_records(payloads))), sink)
    assert {label: crc for label, crc in receipt.crcs.items() if "\udc00" not in label} == {
        f"data/{n}": crc32(payload) for n, payload in enumerate(payloads) if payload
    }


@settings(max_examples=examples(40), deadline=None)
@given(
    PAYLOADS,
    st.integers(0, 4000),
    st.sampled_from([1, 64, 100]),
    st.booleans(),
    st.sets(st.integers(0, 20)),
)
@example([b"ab"] * 20, 1000, 64, True, set())
@example([b"ab"] * 20, 0, 64, True, {3})
def test_what_passes_four_gigabytes_is_laid_out_as_records_are(
    payloads, most, alignment, crc, apart
):
    """With a smaller number for 4 GiB: from there on, headers have zip64 blocks, and descriptors 64-bit sizes."""
    rows = small_records(payloads, apart)
    records = [(f"data/{n}", payload) for n, payload in enumerate(payloads)]
    small = max(most, max(map(len, payloads)) + 1)
    with (
        mock.patch.object(writer, "MAX32", small),
        mock.patch.object(plan_saves, "BLOCK_NBYTES", BLOCK),
    ):
        many = written(
            writer.lay_out_zip("a", [("first", b"p"), *rows], alignment=alignment, crc=crc)
        )
        assert many == written(
            writer.lay_out_zip("a", [("first", b"p"), *records], alignment=alignment, crc=crc)
        )


@pytest.mark.parametrize("name", ["data/0", "DATA/0"])
def test_no_other_record_stands_among_them(name):
    with pytest.raises(ValueError, match="two records of one name"):
        writer.lay_out_zip("a", [*small_records([b"ab"]), (name, b"x")])


@settings(max_examples=examples(40), deadline=None)
@given(
    st.lists(st.binary(max_size=90), max_size=6),
    st.sampled_from(["a", "é" * 20]),
    st.sampled_from([1, 64, 4096]),
    st.booleans(),
)
def test_an_archive_of_which_all_is_known_is_one_literal(payloads, prefix, alignment, crc):
    records = [(f"r/{number}", payload) for number, payload in enumerate(payloads)]
    (at_once,) = writer.lay_out_zip(prefix, records, alignment=alignment, crc=crc)
    with zipfile.ZipFile(io.BytesIO(at_once.data)) as archive:
        assert archive.namelist() == [f"{prefix}/{name}" for name, _ in records]
        for (_, payload), info in zip(records, archive.infolist(), strict=True):
            assert (crc32(payload) if crc and payload else 0) == info.CRC
            start = (
                info.header_offset
                + 30
                + sum(struct.unpack_from("<2H", at_once.data, info.header_offset + 26))
            )
            assert start % alignment == 0
            assert at_once.data[start : start + len(payload)] == payload
            assert not crc or archive.read(info) == payload
