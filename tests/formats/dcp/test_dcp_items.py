"""Items are asked when they are read, once each, in few reads; and what is compared instead of parsed is refused all the same."""

from __future__ import annotations

import struct
import zlib

import numpy as np
import pytest
from tests.formats.dcp.craft_dcp import (
    FILE,
    SEVEN,
    W,
    chunk,
    folder,
    index,
    opened,
    properties,
    tensor,
    value,
)
from tests.formats.zip.craft import Item, build
from tests.hostile.craft_pickle import (
    FALSE,
    TRUE,
    call,
    dict_of,
    doubled,
    stream,
    text,
    tuple_of,
)
from tests.hostile.craft_torch import records, storage, torch_zip
from tests.hostile.craft_torch import tensor as rebuilt
from tests.support import run_in_threads

import holdfast
from holdfast import errors
from holdfast.core.protocols import ReadProfile
from holdfast.core.tensor import LazyTensor
from holdfast.engine.source import OpenSource
from holdfast.formats.dcp import read as values_module
from holdfast.formats.dcp.item import Items, Window
from holdfast.formats.dcp.lazy import Unread
from holdfast.formats.dcp.read import describe as describe_dcp
from holdfast.stores.memory import MemoryStore

SQUARE = {"w": tensor([2, 2], [chunk([0, 0], [2, 2])])}


class CountingStore(MemoryStore):
    read_profile = ReadProfile()  # so that every byte is asked for

    def __init__(self, content):
        super().__init__(content)
        self.reads: list[tuple[str, int, int]] = []

    def read(self, key, start, out):
        self.reads.append((key, start, out.nbytes))
        super().read(key, start, out)


def item(
    rows: int, columns: int, data: bytes, *, kind: str = "FloatStorage", **more: bytes
) -> bytes:
    """An item with a C-ordered tensor."""
    count = rows * columns
    return torch_zip(
        stream(rebuilt(storage(count=count, kind=kind), (rows, columns), (columns, 1))),
        {"0": data},
        **more,
    )


def numbers(count: int, start: int = 0) -> bytes:
    return np.arange(start, start + count, dtype=np.float32).tobytes()


def many(count: int, rows: int = 64, columns: int = 32):
    """A directory of tensors of one shape, and what is in them."""
    data = {f"t{i}": numbers(rows * columns, i) for i in range(count)}
    tensors = {name: tensor([rows, columns], [chunk([0, 0], [rows, columns])]) for name in data}
    return folder(
        tensors, [(index(name, [0, 0]), item(rows, columns, raw)) for name, raw in data.items()]
    ), data


def test_opening_reads_the_metadata_and_nothing_else():
    store = CountingStore(many(50)[0])
    source = OpenSource(store)
    described = describe_dcp(source)
    assert {key for key, _, _ in store.reads} == {".metadata"}
    assert len(described.tensors) == 50
    for tensor_ in described.tensors.values():
        str((tensor_.shape, tensor_.nbytes, tensor_.storages, repr(tensor_)))
    assert {key for key, _, _ in store.reads} == {".metadata"}, "listing asks no item"


def test_a_slice_reads_the_ends_of_its_item_and_its_own_bytes():
    files, data = many(4)
    store = CountingStore(files)
    tensors = describe_dcp(OpenSource(store)).tensors
    tensors["t0"].numpy()
    store.reads.clear()
    row = tensors["t2"][5].numpy()
    assert row.tobytes() == data["t2"][5 * 128 : 6 * 128]
    assert len(store.reads) == 3, "head, tail, elements"
    assert sum(nbytes for _, _, nbytes in store.reads) < 128 + 4096
    store.reads.clear()
    tensors["t2"][6].numpy()
    assert [nbytes for _, _, nbytes in store.reads] == [128], "the item is known now"


def test_threads_read_items_for_the_first_time_together():
    files, data = many(40)
    ckpt = opened(files)
    wrong: list[str] = []

    def read(_):
        for name, raw in data.items():
            if ckpt[name].numpy().tobytes() != raw:
                wrong.append(name)

    run_in_threads(read, range(8))
    assert wrong == []


def flipped(raw: bytes, at: int, mask: int = 1) -> bytes:
    return raw[:at] + bytes([raw[at] ^ mask]) + raw[at + 1 :]


def asked(reader: Items, raw: bytes, sizes=(2, 2)) -> object:
    """What a reader makes of an item: the place, or the class of its refusal."""
    source = OpenSource(MemoryStore({"x": raw}))
    w = describe_dcp(OpenSource(MemoryStore(many(1, 2, 2)[0]))).tensors["t0"]
    try:
        return reader.find_elements(Window(source, "x", (0, len(raw))), w.dtype, sizes)
    except errors.HoldfastError as error:
        return type(error)


@pytest.mark.parametrize("mask", [0x01, 0xFF])
def test_what_is_compared_is_accepted_and_refused_as_what_is_parsed(mask):
    """Every byte of an item is flipped: a reader that knows its kind says the same as one that has never seen any."""
    wise = Items(OpenSource(MemoryStore({})))
    assert asked(wise, W) == asked(wise, W)
    assert wise._frames, "the kind is remembered"
    places = [i for i in range(len(W)) if not i % 8 or W[max(i - 8, 0) : i + 9].count(W[i]) < 17]
    for at in places:
        damaged = flipped(W, at, mask)
        fresh = asked(Items(OpenSource(MemoryStore({}))), damaged)
        assert asked(wise, damaged) == fresh, at
        wise._frames = {kind: frames[:1] for kind, frames in wise._frames.items()}


def test_a_known_kind_brings_its_own_checksum():
    files, _ = many(2)
    raw = files[FILE]
    second = len(raw) // 2
    at = raw.index(numbers(8, 1)[:16], second)
    with opened({**files, FILE: flipped(raw, at)}) as ckpt:
        ckpt["t0"].numpy()
        with pytest.raises(errors.Corrupted) as caught:
            ckpt["t1"].numpy()
        assert (caught.value.file, caught.value.tensor, caught.value.offset) == (FILE, "t1", at)
        ckpt["t1"][3:].numpy()
    with opened({**files, FILE: flipped(raw, at)}, verify=False) as ckpt:
        assert ckpt["t1"].numpy().shape == (64, 32)


def test_a_large_tensor_is_checked_by_blocks():
    count = 3 << 20
    raw = bytes(4 * count)
    files = folder(
        {"w": tensor([3, 1 << 20], [chunk([0, 0], [3, 1 << 20])])},
        [(index("w", [0, 0]), item(3, 1 << 20, raw))],
    )
    with opened(files) as ckpt:
        assert not ckpt["w"].numpy().any()
    at = files[FILE].index(bytes(64)) + (9 << 20)
    with opened({**files, FILE: flipped(files[FILE], at)}) as ckpt, pytest.raises(errors.Corrupted):
        ckpt["w"].numpy()


def test_items_without_checksums():
    zero = {"central": {"crc": 0}, "descriptor": b"PK\7\x08" + struct.pack("<3I", 0, 16, 16)}
    plain = records(stream(rebuilt(storage())))
    raw = build(
        [Item(r.name, r.content, **(zero if r.name.endswith("data/0") else {})) for r in plain]
    )
    tensors = {name: tensor([2, 2], [chunk([0, 0], [2, 2])]) for name in ("a", "b")}
    with opened(folder(tensors, [(index("a", [0, 0]), raw), (index("b", [0, 0]), raw)])) as ckpt:
        assert [ckpt[name].chunks[0].storage.crc32 for name in "ab"] == [None, None]
        assert ckpt["b"].numpy().tolist() == [[1, 2], [3, 4]]


def test_strides_are_those_of_the_item():
    turned = torch_zip(stream(rebuilt(storage(count=6), (3, 2), (1, 3))), {"0": numbers(6)})
    with opened(
        folder({"w": tensor([3, 2], [chunk([0, 0], [3, 2])])}, [(index("w", [0, 0]), turned)])
    ) as ckpt:
        assert ckpt["w"].numpy().tolist() == [[0, 3], [1, 4], [2, 5]]
        assert ckpt["w"][1:, ::-1].numpy().tolist() == [[4, 1], [5, 2]]
        assert ckpt["w"].digest().crc32 == zlib.crc32(
            np.array([[0, 3], [1, 4], [2, 5]], np.float32).tobytes()
        )


def test_a_view_of_a_larger_storage():
    part = torch_zip(
        stream(rebuilt(storage(count=10), (2, 2), (2, 1), offset=3)), {"0": numbers(10)}
    )
    tensors = {name: tensor([2, 2], [chunk([0, 0], [2, 2])]) for name in ("a", "b")}
    with opened(folder(tensors, [(index("a", [0, 0]), part), (index("b", [0, 0]), part)])) as ckpt:
        for name in ckpt:
            assert ckpt[name].numpy().tolist() == [[3, 4], [5, 6]]
            assert ckpt[name].chunks[0].storage.crc32 is None, (
                "the checksum is of more than the tensor"
            )


def test_big_endian_items():
    raw = np.arange(4, dtype=">f4").tobytes()
    with opened(folder(SQUARE, [(index("w", [0, 0]), item(2, 2, raw, byteorder=b"big"))])) as ckpt:
        assert ckpt["w"].numpy().tolist() == [[0, 1], [2, 3]]
        assert ckpt["w"][1].numpy().tolist() == [2, 3]


def flagged(flag: str) -> bytes:
    more = FALSE + call("collections", "OrderedDict") + dict_of(text(flag), TRUE)
    return rebuilt(storage(count=4, kind="ComplexFloatStorage"), (2, 2), (2, 1), more=more)


def test_conjugated_and_negated():
    data = (np.arange(4) + 1j).astype(np.complex64).tobytes()
    tensors = {"w": tensor([2, 2], [chunk([0, 0], [2, 2])], properties("complex64"))}
    with opened(
        folder(tensors, [(index("w", [0, 0]), torch_zip(stream(flagged("conj")), {"0": data}))])
    ) as ckpt:
        assert ckpt["w"].numpy().tolist() == [[-1j, 1 - 1j], [2 - 1j, 3 - 1j]]
    with pytest.raises(errors.Unsupported, match="negated"):
        opened(
            folder(tensors, [(index("w", [0, 0]), torch_zip(stream(flagged("neg")), {"0": data}))])
        )


def test_pieces_of_a_column_sharded_tensor():
    left, right = (
        np.arange(6, dtype=np.float32).reshape(3, 2),
        np.arange(3, dtype=np.float32).reshape(3, 1),
    )
    whole = np.concatenate([left, right], axis=1)
    tensors = {"w": tensor([3, 3], [chunk([0, 0], [3, 2]), chunk([0, 2], [3, 1])])}
    contents = [
        (index("w", [0, 2], 1), item(3, 1, right.tobytes())),
        (index("w", [0, 0], 0), item(3, 2, left.tobytes())),
    ]
    with opened(folder(tensors, contents)) as ckpt:
        assert np.array_equal(ckpt["w"].numpy(), whole)
        assert np.array_equal(ckpt["w"][1, 1:].numpy(), whole[1, 1:])
        assert ckpt["w"].digest().crc32 == zlib.crc32(whole.tobytes())


def test_empty_pieces_ask_no_item():
    tensors = {
        "w": tensor([2, 2], [chunk([0, 0], [2, 2]), chunk([2, 0], [0, 2])]),
        "e": tensor([0, 3], [chunk([0, 0], [0, 3])]),
    }
    contents = [
        (index("w", [0, 0]), W),
        (index("w", [2, 0]), b"nothing to read here"),
        (index("e", [0, 0]), b"nor here"),
    ]
    with opened(folder(tensors, contents)) as ckpt:
        assert ckpt["w"].numpy().tolist() == [[1, 2], [3, 4]]
        assert ckpt["e"].numpy().shape == (0, 3)


def test_a_value_with_tensors_in_it():
    both = torch_zip(stream(tuple_of(rebuilt(storage()), text("x"))))
    with opened(folder({"pair": value()}, [(index("pair"), both)])) as ckpt:
        assert list(ckpt) == ["pair.0"]
        assert ckpt["pair.0"].numpy().tolist() == [[1, 2], [3, 4]]
        assert ckpt.tree["pair"][1] == "x"
        assert isinstance(ckpt.tree["pair"][0], LazyTensor)


def test_a_foreign_value_is_kept_and_listed():
    content = torch_zip(stream(call("os", "system", text("true"))), {})
    with opened(folder({"x": value()}, [(index("x"), content)])) as ckpt:
        assert [(str(f.what), f.stream) for f in ckpt.foreign] == [("os.system", f"'x' in {FILE}")]
        assert ckpt.tree["x"].args == ("true",)


def test_a_damaged_value_is_named():
    at = SEVEN.index(b"K\x07.")
    with pytest.raises(errors.Corrupted) as caught:
        opened(
            folder(
                {"a": value(), "x": value()},
                [(index("a"), SEVEN), (index("x"), flipped(SEVEN, at, 0x0F))],
            )
        )
    assert (caught.value.file, caught.value.tensor) == (FILE, "x")


def test_too_many_values_stay_where_they_are(monkeypatch):
    monkeypatch.setattr(values_module, "EAGER_ITEMS", 3)
    hostile = torch_zip(stream(call("os", "system", text("true"))), {})
    names = ["a", "b", "c", "d"]
    files = folder(
        dict.fromkeys(names, value()), [(index(n), hostile if n == "d" else SEVEN) for n in names]
    )
    with opened(files) as ckpt:
        stub = ckpt.tree["a"]
        assert isinstance(stub, Unread)
        assert repr(stub) == f"<Unread 'a': {len(SEVEN):,} bytes at byte 0 of '{FILE}'>"
        assert stub.read() == 7
        assert any("4 values" in line for line in ckpt.notes)
        assert [str(f.what) for f in ckpt.tree["d"].foreign()] == ["os.system"]


def test_a_value_that_expands_is_read_later_like_any_other(monkeypatch):
    monkeypatch.setattr(values_module, "EAGER_ITEMS", 1)
    bomb = torch_zip(stream(doubled(60, b")")), {})
    with opened(
        folder({"a": value(), "b": value()}, [(index("a"), SEVEN), (index("b"), bomb)])
    ) as ckpt:
        assert ckpt.tree["a"].read() == 7
        expanded = ckpt.tree["b"].read()
        assert expanded[0] is expanded[1]


def test_a_scan_asks_every_item(tmp_path):
    files, _ = many(3, 2, 2)
    hostile = torch_zip(stream(call("os", "system", text("true")), b"0", rebuilt(storage())))
    evil = folder({"w": tensor([2, 2], [chunk([0, 0], [2, 2])])}, [(index("w", [0, 0]), hostile)])
    for name, content in (("good", files), ("evil", evil)):
        (tmp_path / name).mkdir()
        for key, raw in content.items():
            (tmp_path / name / key).write_bytes(raw)
    report = holdfast.scan(tmp_path)
    assert [
        (file.path.rsplit("/", 1)[1], file.format, file.verdict()) for file in report.reports
    ] == [
        ("evil", "dcp", "dangerous"),
        ("good", "dcp", "clean"),
    ]
    assert [finding.what for finding in report.reports[0].findings] == ["os.system"]


def test_verify_names_every_damage(tmp_path):
    files, _ = many(4)
    raw = files[FILE]
    quarter = len(raw) // 4
    for at in (raw.index(numbers(8, 1), quarter), 2 * quarter + 70):
        raw = flipped(raw, at)
    for key, content in {**files, FILE: raw}.items():
        (tmp_path / key).write_bytes(content)
    report = holdfast.verify(tmp_path)
    assert not report.ok
    assert sorted(name for damage in report.damaged for name in damage.tensors) == ["t1", "t2"]
    assert report.checked_nbytes == 3 * 8192
    assert len(report.files) == 1


def test_the_global_of_a_parameter_is_no_reason_to_refuse():
    wrapped = call(
        "torch._utils",
        "_rebuild_parameter",
        rebuilt(storage()),
        TRUE,
        call("collections", "OrderedDict"),
    )
    with opened(folder(SQUARE, [(index("w", [0, 0]), torch_zip(stream(wrapped)))])) as ckpt:
        assert ckpt["w"].numpy().tolist() == [[1, 2], [3, 4]]
