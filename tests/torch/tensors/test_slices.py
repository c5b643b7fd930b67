"""`slices`: unread tensors of any format, with what loaders of models ask of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

import holdfast
from holdfast.errors import Corrupted
from holdfast.torch import save_sharded, slices
from holdfast.torch.tensors import slices as module
from tests.support import ALONE, flip_bit

STATE = {
    "model": {"w": torch.arange(12.0).reshape(3, 4), "b": torch.ones(3, dtype=torch.bfloat16)},
    "step": 3,
}
FORMATS: dict[str, Callable[[Path], object]] = {
    "torch": lambda path: torch.save(STATE, path),
    "native": lambda path: holdfast.save(STATE, path, format="native"),
    "dcp": lambda path: dcp.save(STATE, checkpoint_id=path, **ALONE),
    "sharded": lambda path: save_sharded(STATE, path),
}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("format", FORMATS)
def test_any_format(format: str, tmp_path: Path):
    FORMATS[format](tmp_path / "step")
    with slices(tmp_path / "step", prefix="model.") as found:
        assert sorted(found) == ["b", "w"]
        assert repr(found) == f"<Slices {str(tmp_path / 'step')!r}, 2 tensors>"
        weight = found["w"]
        assert (weight.get_shape(), weight.shape, weight.ndim, weight.numel()) == (
            [3, 4],
            torch.Size([3, 4]),
            2,
            12,
        )
        assert (weight.get_dtype(), weight.dtype, weight.is_floating_point()) == (
            "F32",
            torch.float32,
            True,
        )
        assert found["b"].get_dtype() == "BF16"
        assert torch.equal(weight[...], STATE["model"]["w"])
        assert torch.equal(weight[1:, :2], STATE["model"]["w"][1:, :2])
        with pytest.raises(KeyError):
            found["nothing"]


def test_only_what_is_asked_for_is_read(tmp_path: Path):
    holdfast.save({"w": torch.zeros(1000, 1000)}, tmp_path / "m.safetensors")
    found = slices(tmp_path / "m.safetensors")
    before = found._checkpoint.source.read_nbytes
    assert found["w"][10:12].shape == (2, 1000)
    assert found._checkpoint.source.read_nbytes - before <= 1.1 * 8000


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("mmap", [False, True], ids=["read", "mapped"])
@pytest.mark.parametrize("format", FORMATS)
def test_everything_comes_as_a_stream(format: str, mmap: bool, tmp_path: Path):
    FORMATS[format](tmp_path / "step")
    with slices(tmp_path / "step", prefix="model.", mmap=mmap) as found:
        streamed = dict(found.stream())
        assert list(streamed) == list(found)
        assert list(dict(found.stream(skip=lambda name: name == "w"))) == ["b"]
    for name, tensor in STATE["model"].items():
        assert streamed[name].dtype == tensor.dtype
        assert torch.equal(streamed[name], tensor)


def test_a_stream_reads_one_batch_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    state = {f"w{i}": torch.full((1000,), float(i)) for i in range(10)}
    holdfast.save(state, tmp_path / "m.safetensors")
    monkeypatch.setattr(module, "BATCH_NBYTES", 8000)
    with slices(tmp_path / "m.safetensors") as found:
        for number, (name, tensor) in enumerate(found.stream()):
            assert torch.equal(tensor, state[name])
            # Two tensors are a batch; this one and the next are read.
            assert found._checkpoint.source.read_nbytes <= 8000 * (number // 2 + 2)
        assert number == 9
        assert found._checkpoint.source.read_nbytes == 40_000


def test_a_stream_compares_checksums(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """In the batch that is read beside the caller as well as in the first."""
    torch.save({"a": torch.zeros(1000), "b": torch.ones(1000)}, tmp_path / "m.pt")
    flip_bit(tmp_path / "m.pt", 100, after=torch.ones(1000).numpy().tobytes())
    monkeypatch.setattr(module, "BATCH_NBYTES", 4000)
    with slices(tmp_path / "m.pt") as found:
        stream = found.stream()
        assert next(stream)[0] == "a"
        with pytest.raises(Corrupted) as caught:
            next(stream)
        assert caught.value.tensor == "b"
