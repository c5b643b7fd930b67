"""Digests: equal for equal content however it is stored, and free where the file records them."""

from __future__ import annotations

import itertools
import zlib

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import holdfast
from holdfast.core.box import Box
from holdfast.core.chunk import Chunk, Storage, c_strides
from holdfast.core.crc import crc32
from holdfast.core.digest import Digest, combine_digests
from holdfast.core.dtype import DTYPES
from holdfast.core.tensor import LazyTensor, Traits
from holdfast.engine.blocks import pack_elements
from holdfast.engine.checksums import RangeSums
from holdfast.engine.coalesce import Ranges
from holdfast.engine.digest import compute_crcs, find_recorded_crc
from holdfast.engine.source import OpenSource
from holdfast.errors import LimitExceeded
from holdfast.stores.memory import MemoryStore
from tests.sampling import examples


class CountingStore(MemoryStore):
    """Counts the bytes that are read."""

    read_nbytes = 0

    def read(self, key, start, out):
        self.read_nbytes += out.nbytes
        super().read(key, start, out)

    def map(self, key):
        """What is only looked at would not be counted."""
        return


def plain_crc(tensor: LazyTensor) -> int:
    """The slow, obvious way: read everything, sum the bytes."""
    array = tensor.read()
    return zlib.crc32(
        pack_elements(array, tensor.dtype)
        if tensor.dtype.packed
        else np.ascontiguousarray(array).tobytes()
    )


def test_golden_digests_are_those_of_the_elements(golden):
    with holdfast.open(golden, verify=False) as checkpoint:
        for name, digest in checkpoint.digests().items():
            tensor = checkpoint[name]
            assert digest == tensor.digest()
            assert digest.crc32 == (None if tensor.traits.meta else plain_crc(tensor)), name


def test_big_endian_and_little_endian_are_equal(golden_dir):
    with (
        holdfast.open(golden_dir / "files/big_endian.pt") as big,
        holdfast.open(golden_dir / "files/dtypes.pt") as little,
    ):
        known = little.digests()
        assert {n: known[n] for n in big} == big.digests()


def test_formats_are_equal(golden_dir):
    # The same two shards, once with an index and once without.
    with (
        holdfast.open(golden_dir / "files/hf_index") as a,
        holdfast.open(golden_dir / "files/hf_plain") as b,
    ):
        assert a.digest() == b.digest()
        assert len(a.digest()) == 32


@pytest.mark.parametrize("name", ["dtypes.pt", "single.pt", "protocol4.pt"])
def test_recorded_checksums_are_not_read_for(golden_dir, name, monkeypatch):
    from holdfast.stores.local import LocalStore

    with holdfast.open(golden_dir / "files" / name) as checkpoint:
        wholes = [t for t in checkpoint.values() if find_recorded_crc(t) is not None]
        assert wholes

        def read(self, key, start, out):
            pytest.fail("tensor bytes were read")

        monkeypatch.setattr(LocalStore, "read", read)
        assert [t.digest().crc32 for t in wholes] == [find_recorded_crc(t) for t in wholes]
        if len(wholes) == len(checkpoint):
            checkpoint.digest()


DTYPE_NAMES = [
    "uint8",
    "int16",
    "bfloat16",
    "float32",
    "int64",
    "complex64",
    "complex128",
    "float8_e5m2",
    "bool",
]


def swapped(array: np.ndarray, unit: int) -> bytes:
    raw = np.frombuffer(array.tobytes(), np.uint8)
    return raw.reshape(-1, unit)[:, ::-1].tobytes()


@st.composite
def stored_tensors(draw):
    """An array, and the same array cut into boxes that are each stored in an order, a byte order and a place of its own."""
    dtype = DTYPES.name(draw(st.sampled_from(DTYPE_NAMES)))
    shape = tuple(draw(st.lists(st.integers(0, 5), max_size=3)))
    nbytes = dtype.nbytes(int(np.prod(shape)))
    raw = np.frombuffer(draw(st.binary(min_size=nbytes, max_size=nbytes)), np.uint8)
    array = (raw & 1 if dtype.name == "bool" else raw).copy().view(dtype.numpy).reshape(shape)
    cuts = [sorted({0, n, *draw(st.lists(st.integers(0, n), max_size=2))}) for n in shape]
    boxes = [
        Box(*(tuple(p) for p in zip(*edges, strict=True))) if edges else Box((), ())
        for edges in itertools.product(*(list(itertools.pairwise(c)) for c in cuts))
    ]
    content, chunks = bytearray(b"start"), []
    for box in draw(st.permutations(boxes)):
        piece = array[box.slices]
        order = draw(st.permutations(range(len(shape))))
        turned = np.array(np.transpose(piece, order), order="C")
        byteorder = draw(st.sampled_from(["little", "big"]))
        data = turned.tobytes() if byteorder == "little" else swapped(turned, dtype.swap_nbytes)
        margin = draw(st.integers(0, 2))
        record = draw(st.booleans())
        stride_of = dict(zip(order, c_strides(turned.shape, dtype.bits), strict=True))
        strides = tuple(stride_of[d] for d in range(len(shape)))
        whole = b"x" * margin + data
        storage = Storage(
            "data",
            len(content),
            len(whole),
            byteorder,
            zlib.crc32(whole) if record else None,
            home=None,
        )
        content += whole + b"gap"
        chunks.append(Chunk(box, storage, margin * 8, strides))
    return array, dtype, tuple(chunks), bytes(content)


@settings(max_examples=examples(150))
@given(stored_tensors())
def test_any_storage_of_an_array_gives_its_digest(stored):
    array, dtype, chunks, content = stored
    source = OpenSource(MemoryStore({"data": content}))
    tensor = LazyTensor("t", dtype, array.shape, chunks, source)
    crc = zlib.crc32(array.tobytes())
    assert tensor.digest() == Digest(dtype, array.shape, crc)
    assert compute_crcs([tensor, tensor], use_recorded=False) == [crc, crc]


def sharded(axis: int) -> tuple[CountingStore, LazyTensor, np.ndarray]:
    array = np.arange(24, dtype=np.float32).reshape(4, 6)
    content, chunks = b"", []
    for box in Box.whole((4, 6)).split(axis, 2):
        data = array[box.slices].tobytes()
        storage = Storage("data", len(content), len(data), crc32=zlib.crc32(data), home=None)
        chunks.append(Chunk(box, storage, 0, c_strides(box.shape, 32)))
        content += data
    store = CountingStore({"data": content})
    return (
        store,
        LazyTensor("t", DTYPES.name("float32"), (4, 6), tuple(reversed(chunks)), OpenSource(store)),
        array,
    )


def test_shards_of_rows_combine_and_shards_of_columns_are_read():
    for axis, nbytes in ((0, 0), (1, 96)):
        store, tensor, array = sharded(axis)
        assert tensor.digest().crc32 == zlib.crc32(array.tobytes())
        assert store.read_nbytes == nbytes


def test_a_missing_or_doubled_piece_is_not_combined():
    _, tensor, _ = sharded(0)
    for chunks in (tensor.chunks[:1] * 2, (*tensor.chunks, tensor.chunks[0])):
        assert (
            find_recorded_crc(LazyTensor("t", tensor.dtype, tensor.shape, chunks, tensor.source))
            is None
        )


def test_pairs_of_four_bit_floats_are_four_bit_floats():
    content = bytes(range(16))
    source = OpenSource(MemoryStore({"data": content}))
    storage = Storage("data", 0, 16, home=None)
    pairs = LazyTensor.contiguous("t", DTYPES.name("float4_e2m1fn_x2"), (2, 8), storage, source)
    singles = LazyTensor.contiguous("t", DTYPES.name("float4_e2m1fn"), (2, 16), storage, source)
    assert (
        pairs.digest()
        == singles.digest()
        == Digest(DTYPES.name("float4_e2m1fn"), (2, 16), crc32(content))
    )
    # Read in reverse, the elements must be packed again.
    values = np.array(singles[::-1].read(), ml_dtypes.float4_e2m1fn)
    assert singles[::-1].digest().crc32 == zlib.crc32(pack_elements(values, singles.dtype))


def test_text_meta_and_empty():
    float32 = DTYPES.name("float32")
    assert str(Digest(float32, (4096, 4096), 0x1A2B3C4D)) == "float32[4096,4096]:1a2b3c4d"
    source = OpenSource(MemoryStore({}))
    meta = LazyTensor("m", float32, (2, 3), (), source, Traits(meta=True)).digest()
    assert (meta.crc32, str(meta)) == (None, "float32[2,3]:meta")
    assert str(LazyTensor("e", float32, (0, 3), (), source).digest()) == "float32[0,3]:00000000"


def test_the_digest_of_many_depends_on_names_and_not_on_order():
    float32 = DTYPES.name("float32")
    a, b = Digest(float32, (1,), 1), Digest(float32, (1,), 2)
    assert combine_digests({"x": a, "y": b}) == combine_digests({"y": b, "x": a})
    different = [
        {"x": a},
        {"y": a},
        {"x": b},
        {"x": a, "y": b},
        {"x": b, "y": a},
        {"x\ny": a},
        {"\ud800": a},
        {'x"': a},
        {},
    ]
    assert len({combine_digests(d) for d in different}) == len(different)


def test_expanded_views_are_refused_before_they_cost():
    storage = Storage("data", 0, 4, home=None)
    chunk = Chunk(Box.whole((1 << 20, 1 << 20)), storage, 0, (0, 0))
    tensor = LazyTensor(
        "t",
        DTYPES.name("float32"),
        (1 << 20, 1 << 20),
        (chunk,),
        OpenSource(MemoryStore({"data": b"abcd"})),
    )
    with pytest.raises(LimitExceeded):
        tensor.digest()


@given(
    st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 60), st.integers(0, 30)), max_size=8),
    st.integers(1, 20),
)
def test_every_byte_of_every_range_is_in_one_piece(places, block):
    content = {"a": bytes(range(100)), "b": bytes(range(100, 200))}
    sums = RangeSums(MemoryStore(content), Ranges.from_tuples(places), block_nbytes=block)

    bytes_by_range = [[] for _ in places]
    for reads in sums.join_reads():
        for read_index, (start, stop) in enumerate(zip(reads.starts, reads.stops, strict=True)):
            pieces = list(reads.select_pieces(read_index).rows())
            assert start == min(piece_start for _, piece_start, _ in pieces)
            assert stop == max(piece_stop for _, _, piece_stop in pieces)
            assert stop - start <= block
            assert {places[range_index][0] for range_index, _, _ in pieces} == {reads.key}
            for range_index, piece_start, piece_stop in pieces:
                bytes_by_range[range_index] += range(piece_start, piece_stop)
    expected_bytes = [list(range(start, start + nbytes)) for _, start, nbytes in places]
    assert [sorted(offsets) for offsets in bytes_by_range] == expected_bytes

    for task in sums.tasks():
        task()
    assert [sums.outcome(range_index) for range_index in range(len(places))] == [
        zlib.crc32(content[key][start : start + nbytes]) for key, start, nbytes in places
    ]
