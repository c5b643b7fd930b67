"""Many records as rows against the writer that lays out one after the other: the same archive, byte for byte."""

import io
from unittest import mock

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from holdfast.core.crc import crc32
from holdfast.engine.stream import write_stream
from holdfast.engine.write import write_file
from holdfast.formats.torch.write import lay_out_container
from holdfast.formats.zip import numbered, writer
from holdfast.formats.zip.numbered import Numbered
from holdfast.plan import rows as plan_rows
from holdfast.plan.saves import FilePlan, Gathered, Memory

SMALL, BLOCK = 64, 400
SIGNED = b"PK\x07\x08"


class Sink:
    def __init__(self):
        self.content = bytearray()

    def allocate(self, nbytes):
        self.content = bytearray(nbytes)

    def write(self, offset, data):
        self.content[offset : offset + len(data)] = data


def as_rows(payloads):
    def alone(number, label):
        return Memory(memoryview(payloads[number]), label) if payloads[number] else b""

    return Numbered("data", np.array([len(p) for p in payloads], np.int64), lambda some: [payloads[n] for n in some], alone)


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
        st.binary(max_size=SMALL), st.binary(min_size=SMALL + 1, max_size=3 * SMALL), st.just(SIGNED + b"abcdefgh"), st.just(b"")
    ),
    min_size=1,
    max_size=130,
)


@settings(max_examples=60, deadline=None)
@given(PAYLOADS, st.sampled_from(["a", "model.v2", "x" * 70]), st.sampled_from([1, 64, 100, 4096]), st.booleans(), st.booleans())
@example([b"ab"] * 11, "a", 64, True, True)
@example([SIGNED + b"abcd"] * 3, "a", 64, True, True)
@example([SIGNED + b"abcd" * 30] * 3, "a", 64, False, True)
def test_rows_are_laid_out_as_records_are(payloads, prefix, alignment, crc, order_first):
    options = {"alignment": alignment, "crc": crc, "order_first": order_first}
    with (
        mock.patch.object(plan_rows, "SMALL_NBYTES", SMALL),
        mock.patch.object(plan_rows, "BLOCK_NBYTES", BLOCK),
    ):
        rows = lay_out_container(prefix, b"a pickle", [as_rows(payloads)], **options)
        made = written(rows)
    records = [(f"data/{n}", payload) for n, payload in enumerate(payloads)]
    assert made == written(lay_out_container(prefix, b"a pickle", records, **options))
    assert any(isinstance(segment, Gathered) for segment in rows) == any(len(p) <= SMALL for p in payloads)


def test_checksums_are_told_by_name():
    sink, payloads = Sink(), [b"a", b"", b"c" * 70_000, SIGNED + b"abcd"]
    receipt = write_file(FilePlan("", lay_out_container("a", b"p", [as_rows(payloads)])), sink)
    assert {label: crc for label, crc in receipt.crcs.items() if "\udc00" not in label} == {
        f"data/{n}": crc32(payload) for n, payload in enumerate(payloads) if payload
    }


def test_what_passes_four_gigabytes_is_laid_out_one_by_one():
    rows = as_rows([b"ab"] * 20)
    few = writer.lay_out_zip("a", [rows])
    with mock.patch.object(numbered, "MAX32", 1000):
        many = writer.lay_out_zip("a", [rows])
    assert len(many) > len(few)
    assert written(many) == written(few)


@pytest.mark.parametrize("name", ["data/3", "DATA/x"])
def test_no_other_record_stands_among_them(name):
    with pytest.raises(ValueError, match="two records of one name"):
        writer.lay_out_zip("a", [as_rows([b"ab"]), (name, b"x")])


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.binary(max_size=90), max_size=6), st.sampled_from(["a", "é" * 20]), st.sampled_from([1, 64, 4096]), st.booleans()
)
def test_a_short_archive_of_which_all_is_known_is_the_same_at_once(payloads, prefix, alignment, crc):
    records = [(f"r/{number}", payload) for number, payload in enumerate(payloads)]
    (at_once,) = writer.lay_out_zip(prefix, records, alignment=alignment, crc=crc)
    with mock.patch.object(writer, "SHORT_NBYTES", 0):
        assert writer.lay_out_zip(prefix, records, alignment=alignment, crc=crc) == (at_once,)
