"""Files beyond 4 GiB (zip64) and a conversion's memory, with sources that are holes."""

from __future__ import annotations

import subprocess
import sys
import zipfile

import pytest
import safetensors
import torch

import holdfast
from tests.faults.holes import write_holes

GIB = 1 << 30
SHAPES = {"first": (5 * GIB // 4,), "empty": (0,), "second": (3, GIB), "point": (), "last": (7, 11)}
"""A storage of 5 GiB, one of 12 GiB, and some that lie behind them: about 17 GiB."""


@pytest.fixture(scope="module")
def holes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("holes")
    for name in ("big.pt", "big.safetensors"):
        assert write_holes(folder / name, SHAPES) > 17 * GIB
    return folder


def test_a_zip_with_sizes_and_offsets_beyond_32_bits(holes):
    """The layout that the writer makes is read by our strict reader, by CPython's zipfile, and by torch."""
    with holdfast.open(holes / "big.pt") as ckpt:
        assert {name: t.shape for name, t in ckpt.items()} == SHAPES
        assert ckpt["last"].numpy().sum() == 0
        assert ckpt["second"][2, -1].numpy() == 0
    with zipfile.ZipFile(holes / "big.pt") as archive:
        sizes = {info.filename.partition("/")[2]: info for info in archive.infolist()}
        assert sizes["data/0"].file_size == 5 * GIB
        assert max(info.header_offset for info in sizes.values()) > 17 * GIB
        assert archive.read("big/version") == b"3\n"
        assert archive.read(sizes["data/4"].filename) == b"\0" * 308
    loaded = torch.load(holes / "big.pt", mmap=True, weights_only=True)
    assert {name: tuple(t.shape) for name, t in loaded.items()} == SHAPES
    assert loaded["second"][2, -1] == 0


def test_a_large_safetensors_file(holes):
    with holdfast.open(holes / "big.safetensors") as ckpt:
        assert {name: t.shape for name, t in ckpt.items()} == SHAPES
        assert ckpt["last"].numpy().shape == (7, 11)
    with safetensors.safe_open(holes / "big.safetensors", "np") as opened:
        assert opened.get_slice("second").get_shape() == [3, GIB]


@pytest.mark.parametrize("target", ["out.pt", "out.safetensors", "out"])
@pytest.mark.parametrize("source", ["big.pt", "big.safetensors"])
def test_the_plan_of_a_large_conversion(source, target, holes, tmp_path):
    told = holdfast.convert(holes / source, tmp_path / target, dry_run=True, max_memory="200MiB")
    assert told.read_nbytes == sum(4 * int(torch.Size(shape).numel()) for shape in SHAPES.values())
    assert told.read_nbytes < told.nbytes < told.read_nbytes + 100_000
    assert told.peak_nbytes <= 200 << 20


def test_a_small_part_of_a_large_file(holes, tmp_path):
    for source in ("big.pt", "big.safetensors"):
        holdfast.convert(
            holes / source, tmp_path / "out.pt", keep=["last", "point"], overwrite=True
        )
        loaded = torch.load(tmp_path / "out.pt", weights_only=True)
        assert {name: tuple(t.shape) for name, t in loaded.items()} == {
            "point": (),
            "last": (7, 11),
        }


MEASURE = """
import resource, sys
import numpy, holdfast
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
holdfast.convert(sys.argv[1], sys.argv[2], durable=False, dtype=sys.argv[3] or None)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.parametrize(("target", "dtype"), [("out.safetensors", ""), ("out.pt", "bf16")])
def test_memory_stays_small(target, dtype, tmp_path):
    write_holes(tmp_path / "big.pt", {f"w{i}": (1 << 23, 4) for i in range(8)})
    arguments = [str(tmp_path / "big.pt"), str(tmp_path / target), dtype]
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, *arguments], capture_output=True, text=True, check=True
    )
    assert int(done.stdout) < 300 * 1024  # kilobytes
