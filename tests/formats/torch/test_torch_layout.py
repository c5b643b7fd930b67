"""Laying out torch files: torch reads them bit for bit, and where tensors fill their storages the file is torch's own."""

from __future__ import annotations

import io
import math
import zipfile
from collections import Counter, OrderedDict, defaultdict
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.formats.slow_save import state_of, write_file
from tests.sampling import examples
from tests.support import nested_allowed

import holdfast
from holdfast.core.box import Box
from holdfast.core.chunk import Chunk, Storage, c_strides
from holdfast.core.dtype import DTYPES
from holdfast.core.opaque import Global, Opaque, Size
from holdfast.core.tensor import LazyTensor, Traits
from holdfast.core.value import replace
from holdfast.engine.saves import SavePlan
from holdfast.engine.source import OpenSource
from holdfast.engine.table import make_value_state
from holdfast.errors import CannotHold
from holdfast.formats.torch.write import (
    archive_name,
    fold,
    fold_names,
    lay_out_torch_zip,
    mistaken_crc,
)
from holdfast.stores.memory import MemoryStore
from holdfast.torch import versions

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.filterwarnings("ignore")


def carry_out(plan: SavePlan) -> bytes:
    """The file of a plan, the slow and obvious way."""
    (file,) = plan.files
    return write_file(file, {})


def laid_out(tree: object, **options: object) -> bytes:
    return carry_out(lay_out_torch_zip(state_of(tree), **options))


def saved(value: object, path: Path) -> bytes:
    torch.save(value, path)
    return path.read_bytes()


def again(path: Path, *, mmap: bool = False, **options: object) -> bytes:
    """A torch file, opened and laid out once more."""
    with holdfast.open(path, mmap=mmap) as opened:
        return laid_out(opened.tree, name=archive_name(str(path)), **options)


def load(raw: bytes, **options: object) -> object:
    return torch.load(io.BytesIO(raw), weights_only=True, **options)


def module() -> torch.nn.Module:
    return torch.nn.Sequential(
        torch.nn.Linear(4, 5), torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 4)
    )


def trainer() -> object:
    net = module()
    optimizer = torch.optim.Adam(net.parameters())
    net(torch.randn(3, 4)).sum().backward()
    optimizer.step()
    plain = {"epoch": 3, "rates": [0.1, None, True], "pair": (1, "a")}
    return {"model": net.state_dict(), "optimizer": optimizer.state_dict(), **plain}


def tied() -> object:
    weight = torch.randn(3, 4)
    return {
        "a": weight,
        "b": weight,
        "transposed": weight.t(),
        "detached": weight.detach(),
        "row": weight[1],
    }


def attributed() -> object:
    parameter = torch.nn.Parameter(torch.zeros(2))
    parameter.note = "kept"
    return [
        parameter,
        parameter,
        torch.nn.Buffer(torch.zeros(2)),
        torch.nn.Buffer(torch.zeros(2), persistent=False),
    ]


def two_state_dicts() -> object:
    first = module().state_dict()
    return {"model": first, "ema": module().state_dict(), "again": first}


IDENTICAL = {
    "300 tensors": lambda: {f"layer{i}.weight": torch.randn(3) for i in range(300)},
    "300 of several kinds": lambda: [
        torch.zeros(i % 4, 2, dtype=dtype, requires_grad=grad)
        for i in range(100)
        for dtype, grad in ((torch.float32, False), (torch.float64, True), (torch.uint16, False))
    ],
    "300 views of each other": lambda: (lambda t: [t[i % 7 : 7].T for i in range(300)])(torch.randn(7, 7)),
    "list of 1001": lambda: [torch.randn(1) for _ in range(1001)],
    "dict of 1000": lambda: {i: torch.zeros(1) for i in range(1000)},
    "trainer": trainer,
    "two state dicts": two_state_dicts,
    "tied": tied,
    "parameters": lambda: [torch.nn.Parameter(torch.randn(2)), torch.nn.Parameter(torch.arange(2), requires_grad=False)],
    "attributes": attributed,
    "empty": lambda: [torch.zeros(0), torch.zeros(3, 0), torch.zeros(0, 3), torch.zeros(2, 0, 3, 2), torch.zeros(())],
    "expanded": lambda: [torch.randn(1).expand(5), torch.randn(3, 1).expand(3, 4)],
    "five dimensions": lambda: torch.zeros(2, 1, 3, 1, 2),
    "conj": lambda: [torch.randn(3, dtype=torch.complex64).conj(), torch.randn(3, dtype=torch.complex64).conj()],
    "neg": lambda: torch._neg_view(torch.randn(3, dtype=torch.complex64).conj()),
    "coo": lambda: torch.eye(3).to_sparse(),
    "quantised": lambda: [
        torch.quantize_per_tensor(torch.randn(3), 0.1, 1, torch.qint8),
        torch.quantize_per_channel(torch.randn(3, 2), torch.ones(3), torch.zeros(3), 0, torch.quint8),
        torch.quantize_per_channel(torch.randn(3, 5), torch.ones(3), torch.zeros(3), 0, torch.quint4x2),
    ],
    "nested": lambda: torch.nested.nested_tensor([torch.zeros(2), torch.ones(3)]),
    "meta": lambda: [torch.zeros(2, 3, device="meta"), torch.nn.Parameter(torch.zeros(2, device="meta"))],
    "bytes and fp8 over one storage": lambda: (lambda u: [u, u.view(torch.float8_e5m2)])(torch.zeros(8, dtype=torch.uint8)),
    "torch values": lambda: [torch.Size([1, 2]), torch.Size([]), torch.device("cpu"), torch.device("cuda", 1), torch.float32,
                             torch.strided, torch.strided],
    "plain values": lambda: [{1, 2}, b"abc", 1j, 2**70, "é", Counter("aab"), bytearray(b"x"), OrderedDict(key=1)],
    "refused by weights_only": lambda: [range(3), slice(1), frozenset([1]), defaultdict(list), np.float32(1), np.arange(3)],
}  # fmt: skip

WHOLE = {
    "slice": lambda: torch.randn(10)[2:5],
    "columns": lambda: torch.randn(4, 4)[:, ::2],
    "imaginary parts": lambda: torch.randn(3, dtype=torch.complex64).conj().imag,
    "compressed": lambda: [
        torch.eye(3).to_sparse_csr(),
        torch.eye(3).to_sparse_csc(),
        torch.eye(4).to_sparse_bsr((2, 2)),
    ],
}
"""Views of parts of storages: torch writes the whole storage."""


@pytest.mark.parametrize("name", IDENTICAL)
def test_the_file_is_the_one_that_torch_writes(name: str, tmp_path: Path):
    path = tmp_path / "model.v1.pt"
    assert saved(IDENTICAL[name](), path) == again(path)


@pytest.mark.parametrize("name", WHOLE)
def test_untrimmed_a_view_is_written_as_torch_writes_it(name: str, tmp_path: Path):
    path = tmp_path / "view.pt"
    expected = saved(WHOLE[name](), path)
    assert again(path, trim=False) == expected
    trimmed = again(path)
    assert len(trimmed) <= len(expected)
    assert trimmed != expected


TORCH_DTYPES = sorted(
    row.torch
    for row in DTYPES.rows
    if versions.dtype(row.torch)
    and row.kind != "quantized"
    and row.name not in {f"{sign}int{n}" for sign in ("", "u") for n in range(1, 8)}
)


@pytest.mark.parametrize("name", TORCH_DTYPES)
def test_every_dtype(name: str, tmp_path: Path):
    dtype = getattr(torch, name)
    raw = torch.randint(0, 2 if name == "bool" else 256, (64,), dtype=torch.uint8)
    tensor = raw.view(dtype)
    expected = saved({"x": tensor, "view": tensor[: len(tensor) // 2]}, tmp_path / "x.pt")
    assert again(tmp_path / "x.pt") == expected


@pytest.mark.parametrize(
    "name",
    [
        f"{sign}int{width}"
        for sign in ("", "u")
        for width in range(1, 8)
        if versions.dtype(f"{sign}int{width}")
    ],
)
def test_narrow_integers_that_torch_itself_cannot_save(name: str):
    content = bytes(range(6))
    tensor = memory_tensor(content, name, (2, 3))
    found = load(laid_out({"x": tensor}))["x"]
    assert found.dtype is getattr(torch, name)
    assert bytes(found.untyped_storage()) == content


@pytest.mark.parametrize("alignment", [1, 512, 4096, 32768])
def test_other_alignments(alignment: int, tmp_path: Path):
    from torch.utils.serialization import config

    with config.patch({"save.storage_alignment": alignment}):
        expected = saved({"a": torch.ones(3), "b": torch.zeros(0)}, tmp_path / "a.pt")
    assert again(tmp_path / "a.pt", alignment=alignment) == expected


def test_without_checksums(tmp_path: Path):
    torch.serialization.set_crc32_options(False)
    try:
        expected = saved({"a": torch.ones(3)}, tmp_path / "a.pt")
    finally:
        torch.serialization.set_crc32_options(True)
    assert again(tmp_path / "a.pt", crc=False) == expected


def test_a_payload_that_begins_like_a_data_descriptor(tmp_path: Path):
    tensor = torch.frombuffer(bytearray(b"PK\7\x08abcdefgh"), dtype=torch.uint8)
    expected = saved(tensor, tmp_path / "a.pt")
    assert again(tmp_path / "a.pt", mmap=True) == expected
    # Unmapped its first bytes are not looked at, and only the id, which nobody compares, is another.
    other = again(tmp_path / "a.pt")
    assert sum(x != y for x, y in zip(other, expected, strict=True)) < 60
    assert mistaken_crc(b"PK\7\x08abcdefgh") == int.from_bytes(b"abcd", "little")


@pytest.mark.parametrize("count", [0, 1, 6, 7, 8, 9, 22, 23, 24, 53, 300, 1200, 5090])
def test_the_serialization_id_at_every_growth_of_the_set(count: int):
    buffer = io.BytesIO()
    torch.save([torch.tensor([i]) for i in range(count)], buffer)
    with zipfile.ZipFile(buffer) as archive:
        *records, last = archive.infolist()
        names = [r.filename.removeprefix("archive/") for r in records]
        crcs = [r.CRC for r in records if r.file_size]
        assert b"%020d%020d" % (fold_names(tuple(names)), fold(crcs)) == archive.read(last)


# Any state: the same bytes as torch, and back the same.

TENSORS = st.builds(
    lambda shape, dtype, seed: torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(
        dtype
    ),
    st.lists(st.integers(0, 3), max_size=3),
    st.sampled_from(
        [
            torch.float32,
            torch.bfloat16,
            torch.int64,
            torch.float8_e4m3fn,
            torch.uint16,
        ]
    ),
    st.integers(0, 5),
)
ATOMS = (
    st.none() | st.booleans() | st.integers(-(2**100), 2**100) | st.floats() | st.text(max_size=8)
)
STATES = st.recursive(
    ATOMS | TENSORS,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text(max_size=8) | st.integers(), inner, max_size=4)
        | st.dictionaries(st.text(max_size=8), inner, max_size=4, dict_class=OrderedDict)
    ),
    max_leaves=12,
)


@given(STATES)
@settings(max_examples=examples(80))
def test_any_state_has_the_bytes_of_torch(tmp_path_factory: pytest.TempPathFactory, state: object):
    path = tmp_path_factory.mktemp("state") / "s.pt"
    assert saved(state, path) == again(path)


# Tensors that no torch file holds.


def memory_tensor(
    content: bytes, dtype: str, shape: tuple[int, ...], *, byteorder: str = "little"
) -> LazyTensor:
    source = OpenSource(MemoryStore({"memory": content}))
    return LazyTensor.contiguous(
        "",
        DTYPES.name(dtype),
        shape,
        Storage("memory", 0, len(content), byteorder, home=source.store),
        source,
    )


def test_a_view_of_a_large_buffer_costs_what_it_shows_and_stays_shared():
    whole = memory_tensor(np.arange(10_000, dtype="<f4").tobytes(), "float32", (100, 100))
    raw = laid_out({"a": whole[10:12], "b": whole[11, 5:], "c": whole[10:12, ::2].T})
    assert len(raw) < 3000
    found = load(raw)
    assert found["a"].tolist() == whole[10:12].numpy().tolist()
    assert found["b"].tolist() == whole[11, 5:].numpy().tolist()
    assert found["c"].tolist() == whole[10:12, ::2].T.numpy().tolist()
    assert len({t.untyped_storage().data_ptr() for t in found.values()}) == 1


def test_reversed_axes_are_written_in_order():
    tensor = memory_tensor(np.arange(12, dtype="<i8").tobytes(), "int64", (3, 4))
    found = load(laid_out([tensor[::-1], tensor[::-1], tensor[:, ::-2]]))
    assert found[0].tolist() == tensor.numpy()[::-1].tolist()
    assert found[0].data_ptr() == found[1].data_ptr()
    (note,) = lay_out_torch_zip(state_of({"a": tensor, "b": tensor[::-1]})).notes
    assert "'a'" in note
    assert "'b'" in note
    assert found[2].tolist() == tensor.numpy()[:, ::-2].tolist()


def test_several_chunks_are_joined():
    content = np.arange(12, dtype="<f4")
    source = OpenSource(MemoryStore({"0": content[:6].tobytes(), "1": content[6:].tobytes()}))
    chunks = tuple(
        Chunk(Box((i, 0), (i + 1, 6)), Storage(str(i), 0, 24, home=None), 0, c_strides((1, 6), 32))
        for i in range(2)
    )
    tensor = LazyTensor("", DTYPES.name("float32"), (2, 6), chunks, source)
    found = load(laid_out({"a": tensor, "b": tensor.renamed("other")}))
    assert found["a"].tolist() == content.reshape(2, 6).tolist()
    assert found["a"].data_ptr() == found["b"].data_ptr()


@pytest.mark.parametrize("name", ["float32", "int16", "complex64", "complex32", "uint64", "uint8"])
def test_big_endian_sources_are_written_little(name: str):
    dtype = DTYPES.name(name)
    content = np.arange(4 * dtype.bits // 8, dtype=np.uint8).tobytes()
    swapped = np.frombuffer(content, f"V{dtype.swap_nbytes}").tolist()
    found = load(laid_out(memory_tensor(content, name, (4,), byteorder="big")[1:]))
    assert bytes(found.untyped_storage()) == b"".join(x[::-1] for x in swapped)[dtype.bits // 8 :]


def test_two_dtypes_over_one_storage_are_written_apart_and_said_so():
    floats = memory_tensor(np.arange(4, dtype="<f4").tobytes(), "float32", (4,))
    (chunk,) = floats.chunks
    ints = LazyTensor(
        "",
        DTYPES.name("int32"),
        (2,),
        (Chunk(Box((0,), (2,)), chunk.storage, 0, (32,)),),
        floats.source,
    )
    plan = lay_out_torch_zip(state_of({"f": floats, "i": ints}))
    (note,) = plan.notes
    assert "'f'" in note
    assert "'i'" in note
    found = load(carry_out(plan))
    assert found["i"].tolist() == found["f"].view(torch.int32)[:2].tolist()
    # Where they have no byte in common nothing is lost.
    behind = LazyTensor(
        "",
        DTYPES.name("int32"),
        (2,),
        (Chunk(Box((0,), (2,)), chunk.storage, 64, (32,)),),
        floats.source,
    )
    assert lay_out_torch_zip(state_of({"f": floats[:2], "i": behind})).notes == ()


def test_odd_offsets_and_steps_of_fractions():
    content = bytes(range(40))
    whole = memory_tensor(content, "uint8", (40,))
    (chunk,) = whole.chunks
    odd = LazyTensor(
        "",
        DTYPES.name("int16"),
        (3,),
        (Chunk(Box((0,), (3,)), chunk.storage, 24, (16,)),),
        whole.source,
    )
    fraction = LazyTensor(
        "",
        DTYPES.name("int16"),
        (3,),
        (Chunk(Box((0,), (3,)), chunk.storage, 0, (24,)),),
        whole.source,
    )
    mixed = LazyTensor(
        "",
        DTYPES.name("uint32"),
        (2,),
        (Chunk(Box((0,), (2,)), chunk.storage, 64, (32,)),),
        whole.source,
    )
    found = load(laid_out([whole[5:7], odd, fraction, mixed]))
    assert found[0].tolist() == [5, 6]
    assert found[1].tolist() == np.frombuffer(content, "<i2", 3, 3).tolist()
    assert found[2].tolist() == [int.from_bytes(content[i : i + 2], "little") for i in (0, 3, 6)]
    assert found[3].tolist() == np.frombuffer(content, "<u4", 2, 8).tolist()
    assert found[0].untyped_storage().data_ptr() == found[3].untyped_storage().data_ptr()


def test_four_bit_floats_become_pairs():
    content = bytes(range(16))
    tensor = memory_tensor(content, "float4_e2m1fn", (4, 8))
    found = load(laid_out([tensor, tensor[1:3, 2:6]]))
    assert found[0].dtype is torch.float4_e2m1fn_x2
    assert found[0].shape == (4, 4)
    assert bytes(found[0].untyped_storage()) == content
    assert found[1].shape == (2, 2)
    assert found[1].storage_offset() == 5
    with pytest.raises(CannotHold, match="pairs"):
        laid_out(tensor[:, 1:7:2])


def test_a_subclass_is_kept_and_noted():
    subclass = Traits(subclass=Global("my.package", "Fancy"), state={"scale": 2})
    tensor = memory_tensor(bytes(8), "float32", (2,))
    plan = lay_out_torch_zip(
        state_of({"t": LazyTensor("", tensor.dtype, (2,), tensor.chunks, tensor.source, subclass)})
    )
    (note,) = plan.notes
    assert "my.package.Fancy (t)" in note
    with pytest.raises(Exception, match=r"my\.package"):
        load(carry_out(plan))


def test_a_jagged_tensor_comes_back(tmp_path: Path):
    jagged = torch.nested.nested_tensor([torch.zeros(2, 3), torch.ones(3, 3)], layout=torch.jagged)
    saved(jagged, tmp_path / "j.pt")
    with nested_allowed():
        found = load(again(tmp_path / "j.pt"))
    assert [t.tolist() for t in found.unbind()] == [t.tolist() for t in jagged.unbind()]
    assert (found._min_seqlen, found._max_seqlen) == (2, 3)


def test_what_weights_only_refuses_is_noted_and_what_it_loads_is_not():
    plan = lay_out_torch_zip(state_of({"a": [range(3)], "b": np.arange(2), "c": {1, 2}}))
    (note,) = plan.notes
    assert "builtins.range (a.0)" in note
    assert "numpy.ndarray (b)" in note
    assert "set" not in note
    state = state_of(
        [
            b"",
            b"x",
            {1},
            1j,
            Counter("a"),
            OrderedDict(a=1),
            DTYPES.name("float32"),
            Size((1,)),
            bytearray(b""),
        ]
    )
    plan = lay_out_torch_zip(state)
    assert plan.notes == ()
    assert load(carry_out(plan))[0] == b""


def test_metadata_that_has_no_place_is_noted():
    (note,) = lay_out_torch_zip(replace(make_value_state({}), metadata={"author": "me"})).notes
    assert "author" in note


def test_all_problems_are_listed_with_their_paths():
    tensor = memory_tensor(bytes(24), "float6_e2m3fn", (4, 8))
    quantised = memory_tensor(bytes(4), "qint8", (4,))
    with pytest.raises(CannotHold) as caught:
        laid_out(
            {
                "a": [tensor],
                "b": {"q": quantised},
                "c": Opaque(Global("os", "system")),
                "d": math.floor,
                "fine": 1,
            }
        )
    assert [p.split(":")[0] for p in caught.value.problems] == ["a.0", "b.q", "c", "d"]


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("a/b/model.v1.pt", "model.v1"),
        ("noext", "noext"),
        ("modèle.pt", "archive"),
        ("..", "archive"),
        (".pt", ".pt"),
        ("a\\b.pt", "archive"),
    ],
)
def test_the_name_of_the_archive(path: str, name: str):
    assert archive_name(path) == name
