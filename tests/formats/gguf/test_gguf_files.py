"""GGUF files made by hand: tensors, values, blocks, files that were split."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import pytest
from tests.formats.gguf.craft_gguf import array, gguf, info, text, texts, value

import holdfast
from holdfast import errors
from holdfast.core.limits import Limits
from holdfast.formats.gguf.metadata import Metadata
from holdfast.stores.memory import MemoryStore

TINY = Path(__file__).resolve().parents[2] / "golden" / "files" / "tiny.gguf"
U32 = 4


def number(name: str, n: int, kind: int = U32) -> bytes:
    return value(name, kind, struct.pack({4: "<I", 2: "<H", 5: "<i"}[kind], n))


def test_tensors_and_values():
    w, b = np.arange(6, dtype=np.float32).reshape(2, 3), np.arange(4, dtype=np.int16)
    values = [
        value("general.architecture", 8, text("tiny")), number("tiny.count", 3), value("tiny.rate", 6, struct.pack("<f", 0.1)),
        value("tiny.tied", 7, b"\1"), value("tokens", 9, texts("<s>", 'a "quote"', "☃")),
        value("grid", 9, array(9, 2, array(5, 2, struct.pack("<2i", -1, 2)) + array(5, 1, struct.pack("<i", 3)))),
    ]  # fmt: skip
    raw = gguf(
        [info("w", [3, 2]), info("b", [4], 25, 32)], w.tobytes() + bytes(8) + b.tobytes(), values
    )
    with holdfast.open(raw) as ckpt:
        assert ckpt.format == "gguf"
        assert ckpt["w"].numpy().tolist() == w.tolist()
        assert ckpt["w"][1, ::2].numpy().tolist() == [3, 5]
        assert ckpt["b"].numpy().tolist() == [0, 1, 2, 3]
        assert dict(ckpt.metadata) == {
            "general.architecture": "tiny", "tiny.count": "3", "tiny.rate": "0.1", "tiny.tied": "true",
            "tokens": '["<s>", "a \\"quote\\"", "☃"]', "grid": "[[-1, 2], [3]]",
        }  # fmt: skip
        assert json.loads(ckpt.metadata["tokens"]) == ["<s>", 'a "quote"', "☃"]
        assert ckpt.notes == ()


def test_big_endian():
    data = np.arange(8, dtype=">f4")
    with holdfast.open(
        gguf(
            [info("w", [8], order=">")],
            data.tobytes(),
            [value("n", 4, struct.pack(">I", 7), order=">")],
            order=">",
        )
    ) as ckpt:
        assert ckpt["w"].numpy().tolist() == list(range(8))
        assert ckpt.metadata["n"] == "7"
    blocks = holdfast.open(gguf([info("w", [32], 8, order=">")], bytes(34), order=">"))
    with pytest.raises(errors.Unsupported, match="big-endian"):
        holdfast.dequantize(blocks["w"])


def test_a_header_is_read_in_pieces_and_nothing_else(monkeypatch):
    words = value("words", 9, array(8, 30_000, text("word") * 30_000))
    raw = gguf([info("w", [1 << 20])], bytes(4 << 20), [words])
    seen = []
    read = MemoryStore.read
    monkeypatch.setattr(
        MemoryStore,
        "read",
        lambda self, key, start, out: (seen.append(out.nbytes), read(self, key, start, out))[1],
    )
    with holdfast.open(raw) as ckpt:
        assert len(json.loads(ckpt.metadata["words"])) == 30_000
    assert sum(seen) < 5 * len(words)
    with pytest.raises(errors.LimitExceeded, match="header_nbytes"):
        holdfast.open(raw, limits=Limits(header_nbytes=100_000))


def test_alignment_of_its_own():
    values = [number("general.alignment", 64)]
    raw = gguf(
        [info("a", [1]), info("b", [1], offset=64)],
        bytes(64) + struct.pack("<f", 7),
        values,
        alignment=64,
    )
    with holdfast.open(raw) as ckpt:
        assert ckpt["b"].numpy().tolist() == [7]


def test_blocks_are_bytes_that_say_what_they_are():
    with holdfast.open(TINY) as ckpt:
        stored = ckpt["blk.1.Q4_K"]
        assert (stored.dtype, stored.shape, stored.traits.blocks) == ("uint8", (1, 288), "Q4_K")
        decoded = holdfast.dequantize(stored)
        assert (decoded.dtype, decoded.shape, decoded.traits.blocks) == ("float32", (1, 512), None)
        whole = decoded.numpy()
        for index in ((0,), (slice(None), slice(5, 300)), (0, -1), (..., slice(None, None, -7))):
            assert decoded[index].numpy().tobytes() == whole[index].tobytes()
        assert holdfast.dequantize(ckpt["norm.weight"]).shape == (7,)
        assert "15 tensors are quantized" in ckpt.notes[0]
        assert "convert with dequantize=True" in ckpt.notes[0]
        with pytest.raises(errors.Unsupported, match="IQ2_XXS"):
            holdfast.dequantize(ckpt["blk.1.IQ2_XXS"])
        assert stored[0].traits.blocks is None
        assert stored.T.traits.blocks is None
    with pytest.raises(errors.BadArgumentType):
        holdfast.dequantize(whole)


def test_decoding_reads_the_blocks_that_are_asked_for():
    count = 4096
    raw = gguf([info("w", [256, count], 12)], bytes(144 * count))
    with holdfast.open(raw) as ckpt:
        decoded = holdfast.dequantize(ckpt["w"])
        before = ckpt.source.read_nbytes
        decoded[10:12].numpy()
        assert ckpt.source.read_nbytes - before == 2 * 144


@pytest.mark.parametrize("target", ["m.safetensors", "native"])
def test_blocks_stay_blocks_where_they_are_not_decoded(target, tmp_path):
    holdfast.convert(TINY, tmp_path / target)
    with holdfast.open(tmp_path / target) as made, holdfast.open(TINY) as ckpt:
        assert made["blk.1.Q6_K"].traits.blocks == "Q6_K"
        assert (
            holdfast.dequantize(made["blk.1.Q6_K"]).digest()
            == holdfast.dequantize(ckpt["blk.1.Q6_K"]).digest()
        )
        assert dict(made.metadata) | dict(ckpt.metadata) == dict(made.metadata)
    assert not holdfast.diff(TINY, tmp_path / target).changed


@pytest.mark.parametrize("target", ["m.safetensors", "m.pt", "native"])
def test_convert_decodes_when_asked(target, tmp_path):
    done = holdfast.convert(TINY, tmp_path / target, dequantize=True, drop="*IQ2_XXS")
    assert done.done
    with holdfast.open(tmp_path / target) as made, holdfast.open(TINY) as ckpt:
        for name, tensor in made.items():
            assert tensor.digest() == holdfast.dequantize(ckpt[name]).digest(), name
        assert made["blk.1.Q4_0"].shape == (1, 64)


def test_convert_decodes_and_then_casts(tmp_path):
    holdfast.convert(TINY, tmp_path / "m.safetensors", dequantize=True, dtype="bf16", keep="*Q8_0")
    with holdfast.open(tmp_path / "m.safetensors") as made, holdfast.open(TINY) as ckpt:
        wanted = (
            holdfast.dequantize(ckpt["blk.1.Q8_0"]).numpy().astype(made["blk.1.Q8_0"].dtype.numpy)
        )
        assert made["blk.1.Q8_0"].numpy().tobytes() == wanted.tobytes()


def test_what_cannot_be_decoded_is_listed(tmp_path):
    with pytest.raises(errors.CannotHold, match="IQ2_XXS"):
        holdfast.convert(TINY, tmp_path / "m.safetensors", dequantize=True)
    assert not (tmp_path / "m.safetensors").exists()


def test_a_record_that_lies_about_blocks_is_refused(tmp_path):
    holdfast.convert(TINY, tmp_path / "m.safetensors", keep="*Q4_0", read_back=False)
    raw = (tmp_path / "m.safetensors").read_bytes()
    assert raw.count(b"Q4_0") > 1
    # The record's own checksum notices the change; of a tree without one, the type is checked.
    damaged = raw.replace(b'\\"blocks\\":\\"Q4_0\\"', b'\\"blocks\\":\\"Q9_9\\"')
    assert damaged != raw
    assert not holdfast.verify(damaged).ok


def split(
    number_: int, count: int, names: str, *, total: int | None = None, said: int | None = None
) -> bytes:
    values = [
        number("split.no", number_, 2),
        number("split.count", count if said is None else said, 2),
    ]
    values += [] if total is None else [number("split.tensors.count", total, 5)]
    return gguf(
        [info(name, [8], offset=32 * i) for i, name in enumerate(names)],
        bytes(range(32)) * len(names),
        values,
    )


def test_split_files_open_as_one(tmp_path):
    (tmp_path / "m-00001-of-00002.gguf").write_bytes(split(0, 2, "ab", total=3))
    assert "open the folder" in holdfast.open(tmp_path / "m-00001-of-00002.gguf").notes[0]
    (tmp_path / "m-00002-of-00002.gguf").write_bytes(split(1, 2, "c"))
    (tmp_path / "README.md").write_text("a model")
    with holdfast.open(tmp_path) as ckpt:
        assert (ckpt.format, list(ckpt)) == ("gguf-dir", ["a", "b", "c"])
        assert ckpt["c"].numpy().tobytes() == bytes(range(32))
    assert holdfast.verify(tmp_path).ok
    holdfast.convert(tmp_path, tmp_path / "m.safetensors")
    assert sorted(holdfast.open(tmp_path / "m.safetensors")) == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("files", "said"),
    [
        (
            {"m-00001-of-00003.gguf": split(0, 3, "a"), "m-00002-of-00003.gguf": split(1, 3, "b")},
            "files are missing",
        ),
        (
            {"m-00001-of-00003.gguf": split(0, 3, "a"), "m-00003-of-00003.gguf": split(2, 3, "b")},
            "00002-of-00003",
        ),
        (
            {"m-00001-of-00002.gguf": split(0, 2, "a"), "n-00002-of-00002.gguf": split(1, 2, "b")},
            "several models",
        ),
        (
            {"m-00001-of-00002.gguf": split(1, 2, "a"), "m-00002-of-00002.gguf": split(0, 2, "b")},
            "the file name says",
        ),
        (
            {
                "m-00001-of-00002.gguf": split(0, 2, "a"),
                "m-00002-of-00002.gguf": split(1, 2, "b", said=3),
            },
            "the file name says",
        ),
        (
            {"m-00001-of-00002.gguf": split(0, 2, "a"), "m-00002-of-00002.gguf": split(1, 2, "a")},
            "is also in",
        ),
        (
            {
                "m-00001-of-00002.gguf": split(0, 2, "a", total=9),
                "m-00002-of-00002.gguf": split(1, 2, "b"),
            },
            "states 9 tensors",
        ),
        (
            {
                "m-00001-of-00002.gguf": split(0, 3, "a"),
                "m-00002-of-00002.gguf": split(1, 3, "b"),
                "m-00005-of-00002.gguf": split(2, 3, "c"),
            },
            "has 3 files",
        ),
        (
            {"m-00001-of-99999.gguf": split(0, 2, "a"), "m-00002-of-99999.gguf": split(1, 2, "b")},
            "files are missing",
        ),
    ],
)
def test_split_files_that_do_not_go_together(files, said, tmp_path):
    for name, raw in files.items():
        (tmp_path / name).write_bytes(raw)
    with pytest.raises(errors.HoldfastError, match=said):
        holdfast.open(tmp_path)


def test_scan_tells_of_templates(tmp_path):
    (tmp_path / "m.gguf").write_bytes(
        gguf([], b"", [value("tokenizer.chat_template", 8, text("{{ x }}"))])
    )
    (tmp_path / "n.gguf").write_bytes(gguf())
    told, plain = (holdfast.scan(tmp_path / name).reports[0] for name in ("m.gguf", "n.gguf"))
    assert (told.verdict(), told.findings[0].what) == ("unknown", "tokenizer.chat_template")
    assert (plain.verdict(), plain.format) == ("clean", "gguf")


def test_the_metadata_shows_itself():
    with holdfast.open(TINY) as ckpt:
        assert (
            repr(ckpt.metadata)
            == "<GGUF metadata, length 8: general.architecture, general.name, tiny.block_count, tiny.rope.freq_base, …>"
        )
    hostile = Metadata(b"", {"x" * 10_000: (0, 0)}, "<")
    assert repr(hostile) == f"<GGUF metadata, length 1: {'x' * 64}>"
    assert repr(Metadata(b"", {}, "<")) == "<GGUF metadata, length 0: >"
