"""Items that were compressed on their way to disk."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from tests.formats.dcp.craft_dcp import (
    FILE,
    SEVEN,
    W,
    chunk,
    index,
    info,
    metadata,
    opened,
    tensor,
    value,
)
from tests.hostile.craft_pickle import list_of, stream, text
from tests.hostile.craft_torch import storage, torch_zip
from tests.hostile.craft_torch import tensor as rebuilt

import holdfast
from holdfast import errors

ZSTD = list_of(text("stream.zstd/1"))


def packed(raw: bytes) -> bytes:
    return pytest.importorskip("zstandard").ZstdCompressor().compress(raw)


def files(*, w: bytes = W, step: bytes = SEVEN, shape=(2, 2)) -> dict[str, bytes]:
    """A tensor and a value, compressed, and a tensor that is not."""
    first, second = packed(step), packed(w)
    square = tensor([2, 2], [chunk([0, 0], [2, 2])])
    tensors = {
        "step": value(),
        "w": tensor(shape, [chunk((0,) * len(shape), shape)]),
        "plain": square,
    }
    items = [
        (index("step"), info(FILE, 0, len(first), transforms=ZSTD)),
        (index("w", (0,) * len(shape)), info(FILE, len(first), len(second), transforms=ZSTD)),
        (index("plain", [0, 0]), info(FILE, len(first) + len(second), len(W))),
    ]
    return {".metadata": metadata(tensors, items), FILE: first + second + W}


def test_read():
    with opened(files()) as ckpt:
        assert ckpt.tree["step"] == 7
        assert ckpt["w"].numpy().tolist() == [[1, 2], [3, 4]]
        assert ckpt["w"][1, 1:].numpy().tolist() == [4]
        assert {name: array.tolist() for name, array in ckpt.read().items()} == {
            "w": [[1, 2], [3, 4]],
            "plain": [[1, 2], [3, 4]],
        }
        assert ckpt["w"].digest() == ckpt["plain"].digest()
        assert any("zstd" in line for line in ckpt.notes)


def test_a_larger_item_is_read_by_blocks():
    data = np.arange(3 << 20, dtype=np.float32)
    big = torch_zip(
        stream(rebuilt(storage(count=data.size), data.shape, (1,))), {"0": data.tobytes()}
    )
    with opened(files(w=big, shape=data.shape)) as ckpt:
        assert np.array_equal(ckpt["w"].numpy(), data)


def test_verify_and_convert(tmp_path):
    folder = tmp_path / "ckpt"
    folder.mkdir()
    for key, raw in files().items():
        (folder / key).write_bytes(raw)
    report = holdfast.verify(folder)
    assert report.ok
    assert report.checked_nbytes == 32
    holdfast.convert(folder, tmp_path / "out.safetensors")
    assert holdfast.diff(folder, tmp_path / "out.safetensors").equal


def test_a_bomb_is_not_inflated():
    bomb = bytes(64 << 20)
    with opened(files(w=bomb)) as ckpt, pytest.raises(errors.LimitExceeded, match="more than"):
        ckpt["w"].numpy()
    with pytest.raises((errors.LimitExceeded, errors.FormatError)):
        opened(files(step=bytes(65 << 20)))


def test_damaged_streams():
    whole = files()
    start = len(packed(SEVEN))
    for change in (bytes(8), b"\x28\xb5\x2f\xfd\xff\xff\xff\xff"):
        raw = whole[FILE][:start] + change + whole[FILE][start + 8 :]
        with opened({**whole, FILE: raw}) as ckpt, pytest.raises(errors.HoldfastError):
            ckpt["w"].numpy()
    with opened(files(w=W[:-1])) as ckpt, pytest.raises(errors.FormatError):
        ckpt["w"].numpy()


def test_closed():
    with opened(files()) as ckpt:
        ckpt["w"].numpy()
    with pytest.raises(errors.Closed):
        ckpt["w"].numpy()


def test_without_the_package(monkeypatch):
    content = files()
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(errors.Unsupported, match=r"pip install zstandard"):
        opened(content)
