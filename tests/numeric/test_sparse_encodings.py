"""Bitmaps, N:M and blocks against packing element by element."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.sampling import examples

from holdfast.errors import MetadataError
from holdfast.numeric import pack as encoding
from holdfast.numeric.pack import (
    Pattern,
    element_type,
    encoding_of,
    group_count,
    matrix_shape,
    spread,
    where_total,
)

WIDTHS = (1, 2, 4, 8, 16)


@pytest.fixture(scope="module", autouse=True)
def small_groups():
    """Groups of a few elements, so that small tensors have several."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(encoding, "BITMAP_ELEMENTS", 16)
        patch.setattr(encoding, "PACKED_GROUPS", 8)
        patch.setattr(encoding, "BLOCKS_ELEMENTS", 24)
        patch.setattr(encoding, "GROUP_ROWS", 4)
        yield


def bits_as_bytes(bits):
    return bytes(
        sum(bit << i for i, bit in enumerate(bits[at : at + 8])) for at in range(0, len(bits), 8)
    )


def slow_bitmap(group):
    """The marks and the values of a group, where each element is its bytes."""
    return bits_as_bytes([any(element) for element in group]), [
        element for element in group if any(element)
    ]


def slow_pattern(group, n, m):
    width = 1 if m == 2 else 2 if m <= 4 else 4
    positions, values = [], []
    for at in range(0, len(group), m):
        here = [k for k in range(m) if any(group[at + k])]
        here = sorted(here + [k for k in range(m) if k not in here][: n - len(here)])
        positions += here
        values += [group[at + k] for k in here]
    return bits_as_bytes([p >> b & 1 for p in positions for b in range(width)]), values


def slow_blocks(group, columns, height, width):
    zero = bytes(len(group[0]))
    rows = [group[at : at + columns] for at in range(0, len(group), columns)]
    bits, values = [], []
    for top in range(0, len(rows), height):
        for left in range(0, columns, width):
            places = [(r, c) for r in range(top, top + height) for c in range(left, left + width)]
            block = [rows[r][c] if r < len(rows) and c < columns else zero for r, c in places]
            bits.append(any(map(any, block)))
            values += block if bits[-1] else []
    return bits_as_bytes(bits), values


def slow_pack(encoding, group, shape):
    match encoding.name:
        case "bitmap":
            return slow_bitmap(group)
        case "nm":
            return slow_pattern(group, *encoding.sizes)
    return slow_blocks(group, matrix_shape(shape)[1], *encoding.sizes)


def random_elements(data, shape, width):
    """Elements of which many are zero, some in whole blocks, and some have one bit only, be it the sign."""
    rng = np.random.default_rng(data.draw(st.integers(0, 1 << 32)))
    count = int(np.prod(shape, dtype=int))
    raw = rng.integers(0, 256, (count, width), np.uint8)
    raw[rng.random(count) < 0.2] = [0] * (width - 1) + [128]
    raw[rng.random(count) < data.draw(st.sampled_from([0, 0.3, 0.6, 0.95, 1]))] = 0
    start = int(rng.integers(0, count + 1))
    raw[start : start + int(rng.integers(0, count + 1))] = 0
    return raw


@st.composite
def encodings(draw):
    shape = tuple(draw(st.lists(st.integers(1, 9), min_size=0, max_size=3)))
    kind = draw(st.sampled_from(["bitmap", "nm", "block"]))
    if kind == "nm":
        m = draw(st.integers(2, 16))
        shape = (*shape[:2], m * draw(st.integers(1, 5)))
        return encoding_of("nm", (draw(st.integers(1, m - 1)), m), shape), shape
    if kind == "block":
        rows, columns = matrix_shape(shape)
        return encoding_of(
            "block", (draw(st.integers(1, rows)), draw(st.integers(1, columns))), shape
        ), shape
    return encoding_of("bitmap", (), shape), shape


@settings(deadline=None, max_examples=examples(300))
@given(encodings(), st.sampled_from(WIDTHS), st.data())
def test_groups_are_packed_as_slowly_and_come_back(made, width, data):
    encoding, shape = made
    raw = random_elements(data, shape, width)
    if encoding.name == "nm":
        n, m = encoding.sizes
        for group in raw.reshape(-1, m, width):
            group[[k for k in range(m) if group[k].any()][n:]] = 0
    dense = raw.reshape(-1).view(element_type(width))
    total = 0
    for i in range(group_count(encoding)):
        group = dense[i * encoding.group :][: spread(encoding, i)]
        where, values = encoding.mark(group), encoding.take(group)
        expected, kept = slow_pack(
            encoding, [bytes(element) for element in raw[i * encoding.group :][: len(group)]], shape
        )
        assert where.tobytes() == expected
        assert values.tobytes() == b"".join(kept)
        assert len(where) == encoding.where_nbytes(len(group))
        assert encoding.count_values(group) == len(values) <= encoding.most(len(group))
        assert len(values) % encoding.unit == 0
        out = np.full(len(group) * width, 255, np.uint8).view(group.dtype)
        encoding.unpack(where, values, out)
        assert out.tobytes() == group.tobytes()
        total += len(where)
    assert total == where_total(encoding)


@settings(deadline=None, max_examples=examples(300))
@given(encodings(), st.sampled_from(WIDTHS), st.binary(max_size=40), st.integers(0, 40), st.data())
def test_marks_of_any_bytes_unpack_or_are_refused(made, width, marks, count, data):
    """No bytes lead to any other error, nor to elements that are not among the values."""
    encoding, _ = made
    size = spread(encoding, data.draw(st.integers(0, group_count(encoding) - 1)))
    where = np.frombuffer(marks.ljust(80, b"\0")[: encoding.where_nbytes(size)], np.uint8)
    units = min(count, encoding.most(size)) // encoding.unit
    values = np.full(units * encoding.unit * width, 7, np.uint8).view(element_type(width))
    out = np.full(size * width, 255, np.uint8).view(element_type(width))
    try:
        encoding.unpack(where, values, out)
    except MetadataError:
        return
    assert set(out.view(np.uint8).tolist()) <= {0, 7}
    if encoding.name != "block":
        assert out.view(np.uint8).tolist().count(7) == len(values) * width


def test_tables_and_arithmetic_agree(monkeypatch):
    """2:4 goes through tables of bytes; without them the same comes out, for every pair of groups that fits."""
    encoding = encoding_of("nm", (2, 4), (8,))
    fits = [
        bits for bits in range(256) if (bits & 15).bit_count() <= 2 and (bits >> 4).bit_count() <= 2
    ]
    groups = [np.array([bits >> i & 1 for i in range(8)], "<u2") * np.uint16(3) for bits in fits]
    quick = [(encoding.mark(group), encoding.take(group)) for group in groups]
    monkeypatch.setattr(Pattern, "_by_bytes", property(lambda self: False))
    for group, (where, values) in zip(groups, quick, strict=True):
        assert encoding.mark(group).tolist() == where.tolist()
        assert encoding.take(group).tolist() == values.tolist()
    codes = range(256)
    outs = []
    for tables in (True, False):
        monkeypatch.setattr(Pattern, "_by_bytes", property(lambda self, tables=tables: tables))
        outs.append([unpacked_or_none(encoding, code) for code in codes])
    assert outs[0] == outs[1]
    assert sum(out is not None for out in outs[0]) == 36


def unpacked_or_none(encoding, code):
    out = np.zeros(8, "<u2")
    try:
        encoding.unpack(np.array([code], np.uint8), np.arange(1, 5, dtype="<u2"), out)
    except MetadataError:
        return None
    return out.tolist()


@pytest.mark.parametrize(("name", "sizes"), [("nm", (1, 3)), ("bitmap", ()), ("block", (1, 1))])
def test_marks_behind_the_last_element_are_refused(name, sizes):
    made = encoding_of(name, sizes, (3,))
    dense = np.array([0, 5, 0], "<u2")
    where, values, out = made.mark(dense).copy(), made.take(dense), np.empty(3, "<u2")
    made.unpack(where, values, out)
    where[-1] |= 0x80
    with pytest.raises(MetadataError, match="behind the last"):
        made.unpack(where, values, out)


@pytest.mark.parametrize(
    "encoding", [(2, 4), (1, 3), (2, 8), (5, 16)], ids=lambda sizes: "{}:{}".format(*sizes)
)
def test_more_than_n_of_m_are_refused(encoding):
    made = encoding_of("nm", encoding, (3, 3 * encoding[1]))
    dense = np.ones(made.count, "<u2")
    with pytest.raises(MetadataError, match="not zero"):
        made.take(dense[: made.group])


@pytest.mark.parametrize(
    ("name", "sizes", "shape"),
    [
        ("bitmap", (1,), (8,)), ("nm", (), (8,)), ("nm", (2, 4), ()), ("nm", (2, 4), (4, 6)), ("nm", (4, 4), (8,)),
        ("nm", (0, 4), (8,)), ("nm", (1, 17), (17,)), ("nm", (1, -4), (8,)), ("nm", (1, 0), (8,)), ("block", (2,), (4, 4)),
        ("block", (5, 1), (4, 4)), ("block", (1, 17), (4, 4)), ("block", (0, 1), (4, 4)), ("block", (2, 1), (4,)),
        ("block", (1, -1), (4, 4)), ("block", (2, 1), (4, 1 << 20)), ("zstd", (), (4,)), ("", (), (4,)),
    ],
)  # fmt: skip
def test_encodings_that_cannot_be(name, sizes, shape):
    with pytest.raises(MetadataError):
        encoding_of(name, sizes, shape)
