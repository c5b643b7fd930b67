"""The alias graph: what is shared by identity, what only holds the same, and that a checksum is never taken for proof."""

from __future__ import annotations

import zlib

import numpy as np
import pytest

import holdfast
from holdfast.core.limits import Limits
from holdfast.core.value import replace
from holdfast.errors import Unsupported
from holdfast.extras.packages.tie import alias_graph


def rng(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def names(graph) -> list[list[str]]:
    return [[f"{member.model}:{member.name}" for member in group.members] for group in graph.groups]


def test_memory_is_compared_by_address_across_states():
    emb = rng(5, 4)
    base = {"emb": emb, "head": emb, "other": emb.copy()}
    graph = alias_graph({"base": base, "tuned": {"model": {"emb": emb.T}, "rows": emb[1:3]}})
    assert names(graph) == [["base:emb", "base:head", "tuned:model.emb", "tuned:rows"]]
    (group,) = graph.groups
    assert group.models == ("base", "tuned")
    assert [member.offset for member in group.members] == [0, 0, 0, 4]
    assert [member.strides for member in group.members] == [(4, 1), (4, 1), (1, 4), (4, 1)]
    assert (group.nbytes, group.saved_nbytes, group.same) == (80, 80 + 80 + 32, False)
    assert (graph.tensors, graph.storages, graph.nbytes) == (5, 2, 160)
    assert graph.of("tuned", "rows") is group
    assert graph.of("base", "other") is None


def test_records_of_a_file_are_the_same_however_often_it_is_opened(tmp_path):
    emb = rng(5, 4)
    holdfast.save({"emb": emb, "head": emb, "rows": emb[1:3], "alone": rng(3)}, tmp_path / "m.pt")
    (tmp_path / "again.pt").symlink_to(tmp_path / "m.pt")
    with holdfast.open(tmp_path / "m.pt") as one, holdfast.open(tmp_path / "again.pt") as two:
        graph = alias_graph({"a": one, "b": two})
    assert names(graph) == [
        ["a:emb", "a:head", "a:rows", "b:emb", "b:head", "b:rows"],
        ["a:alone", "b:alone"],
    ]
    assert graph.storages == 2


def test_a_file_that_noted_what_was_shared(tmp_path):
    emb = rng(5, 4)
    holdfast.save(
        {"emb": emb, "head": emb, "rows": emb[1:3], "alone": rng(3)}, tmp_path / "m.safetensors"
    )
    with holdfast.open(tmp_path / "m.safetensors") as ckpt:
        by_storage, by_content = alias_graph({"m": ckpt}), alias_graph({"m": ckpt}, by="content")
    (group,) = by_storage.groups
    assert {member.name: member.offset for member in group.members} == {
        "emb": 0,
        "head": 0,
        "rows": 4,
    }
    assert names(by_content) == [["m:emb", "m:head"]]


def test_a_lost_tie_is_found_by_content(tmp_path):
    emb, bias = rng(50, 40), rng(7)
    holdfast.save({"emb": emb, "head": emb.copy(), "bias": bias}, tmp_path / "base.pt")
    holdfast.save({"emb": emb, "bias": rng(7, seed=1)}, tmp_path / "tuned.safetensors")
    with (
        holdfast.open(tmp_path / "base.pt") as base,
        holdfast.open(tmp_path / "tuned.safetensors") as tuned,
    ):
        assert alias_graph({"base": base, "tuned": tuned}).groups == ()
        graph = alias_graph(
            {"base": base, "tuned": tuned, "live": {"turned": np.asfortranarray(emb)}}, by="content"
        )
    assert names(graph) == [["base:emb", "base:head", "tuned:emb", "live:turned"]]
    (group,) = graph.groups
    assert (group.storages, group.savable_nbytes, graph.savable_nbytes) == (
        4,
        3 * emb.nbytes,
        3 * emb.nbytes,
    )
    text = str(graph)
    assert "base:emb = base:head = tuned:emb = live:turned" in text
    assert f"{3 * emb.nbytes:,} bytes could be saved" in text


def test_a_storage_is_freed_only_when_nothing_else_needs_it():
    whole = rng(10)
    graph = alias_graph(
        {"a": {"part": whole[2:5].copy()}, "b": {"part": whole[2:5], "rest": whole[5:]}},
        by="content",
    )
    assert names(graph) == [["a:part", "b:part"]]
    assert graph.savable_nbytes == 0


def test_dtype_and_shape_belong_to_the_content():
    data = np.arange(12, dtype=np.int32)
    state = {
        "a": data,
        "b": data.copy().reshape(3, 4),
        "c": data.copy().view(np.uint32),
        "d": data.astype(np.int64),
    }
    assert alias_graph({"m": state}, by="content").groups == ()


def test_nan_and_minus_zero_are_compared_as_bytes():
    one, other = np.array([np.nan, 0.0], np.float32), np.array([np.nan, -0.0], np.float32)
    assert names(alias_graph({"m": {"a": one, "b": one.copy(), "c": other}}, by="content")) == [
        ["m:a", "m:b"]
    ]


def collision() -> tuple[np.ndarray, np.ndarray]:
    """Two arrays of one CRC-32 and different bytes."""
    first = np.arange(16, dtype=np.uint8)
    second = first.copy()
    second[0] ^= 1
    # CRC-32 is linear: four free bytes at the end reach any checksum.
    base = zlib.crc32(second[:12].tobytes() + bytes(4))
    rows = {}
    for bit in range(32):
        tail = (1 << bit).to_bytes(4, "little")
        rows[bit] = zlib.crc32(second[:12].tobytes() + tail) ^ base
    wanted, tail = zlib.crc32(first.tobytes()) ^ base, 0
    basis: list[tuple[int, int]] = []
    for bit, row in rows.items():
        used = 1 << bit
        for value, bits in basis:
            if row ^ value < row:
                row, used = row ^ value, used ^ bits
        if row:
            basis.append((row, used))
            basis.sort(reverse=True)
    for value, bits in basis:
        if wanted ^ value < wanted:
            wanted, tail = wanted ^ value, tail ^ bits
    second[12:] = np.frombuffer(tail.to_bytes(4, "little"), np.uint8)
    assert zlib.crc32(first.tobytes()) == zlib.crc32(second.tobytes())
    return first, second


def test_equal_checksums_are_no_proof(tmp_path):
    first, second = collision()
    holdfast.save(
        {"a": first, "b": second, "c": first.copy(), "d": second.copy()}, tmp_path / "m.pt"
    )
    with holdfast.open(tmp_path / "m.pt") as ckpt:
        assert len({str(digest) for digest in ckpt.digests().values()}) == 1
        graph = alias_graph({"m": ckpt}, by="content")
    assert names(graph) == [["m:a", "m:c"], ["m:b", "m:d"]]


def test_a_file_that_lies_about_its_checksums_costs_no_more_than_its_bytes(tmp_path):
    count = 200
    arrays = {f"t{i}": np.full(64, i % 50, np.uint8) for i in range(count)}
    holdfast.save(arrays, tmp_path / "m.safetensors")
    with holdfast.open(tmp_path / "m.safetensors") as ckpt:
        # As if the file said the same of all of them.
        lied = {
            name: holdfast.LazyTensor.contiguous(
                name, t.dtype, t.shape, replace(t.chunks[0].storage, crc32=7), t.source
            )
            for name, t in ckpt.items()
        }
        read = 0

        def progress(nbytes: int) -> None:
            nonlocal read
            read += nbytes

        graph = alias_graph({"m": lied}, by="content", progress=progress)
    assert [len(group.members) for group in graph.groups] == [4] * 50
    assert read <= 4 * count * 64


def test_what_has_no_data_shares_nothing():
    empty = np.empty((0, 3), np.float32)
    graph = alias_graph(
        {"m": {"a": empty, "b": empty, "c": empty.copy(), "text": "x"}}, by="content"
    )
    assert graph.groups == ()
    assert graph.tensors == 3


def test_an_expanded_view_is_left_out_with_a_note(tmp_path):
    torch = pytest.importorskip("torch")
    torch.save({"a": torch.ones(1).expand(2 << 20), "b": torch.ones(3)}, tmp_path / "m.pt")
    with holdfast.open(tmp_path / "m.pt", limits=Limits(expansion_floor_nbytes=1)) as ckpt:
        graph = alias_graph({"m": ckpt}, by="content")
    assert graph.groups == ()
    assert "m:a: not compared" in graph.notes[0]


def test_tensors_of_torch():
    torch = pytest.importorskip("torch")
    model = torch.nn.ModuleDict(
        {"emb": torch.nn.Embedding(5, 4), "head": torch.nn.Linear(4, 5, bias=False)}
    )
    model["head"].weight = model["emb"].weight
    graph = alias_graph({"a": model.state_dict(), "b": {"w": model["emb"].weight.t()}})
    assert names(graph) == [["a:emb.weight", "a:head.weight", "b:w"]]
    # Bytes are compared wherever they lie: the transpose is another shape.
    assert names(
        alias_graph(
            {"a": model.state_dict(), "b": {"w": model["emb"].weight.detach().clone()}},
            by="content",
        )
    ) == [["a:emb.weight", "a:head.weight", "b:w"]]


def test_names_are_made_safe():
    data = rng(3)
    text = str(alias_graph({"m\x1b[2J": {"a\u202e": data, "b": data}}))
    assert "\x1b" not in text
    assert "\u202e" not in text


def test_nothing_and_nonsense():
    assert alias_graph({}).groups == ()
    assert "0 models" in str(alias_graph({}))
    with pytest.raises(Unsupported):
        alias_graph({}, by="name")
