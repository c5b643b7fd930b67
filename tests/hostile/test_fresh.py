"""Opens anything, executes nothing: true to the letter from the first file of a process on, for every format."""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

import holdfast
from holdfast.formats.dcp.index import BESIDE, checksum_file
from tests.extras.packages.pt2.craft_pt2 import honest
from tests.extras.rank_files.megatron_folders import write as write_megatron
from tests.extras.rank_files.test_zero import model as zero_model
from tests.formats.gguf.test_gguf_files import split

from .cases_rank_files import HONEST
from .fresh import broken

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests" / "golden"


@functools.cache
def golden() -> dict[str, list[Path]]:
    """The golden files of each format."""
    found: dict[str, list[Path]] = {}
    for path in sorted((GOLDEN / "files").iterdir()):
        with holdfast.open(path) as ckpt:
            found.setdefault(ckpt.format, []).append(path)
    return found


def nothing(folder: Path) -> list[Path]:
    return []


def native(folder: Path) -> list[Path]:
    """Of today's version, sealed, and of the first ones."""
    weights = np.zeros((256, 64), np.float32)
    weights[::7, ::5] = 3.5
    holdfast.save(
        {"w": weights, "more": {"step": 7, "betas": (0.9, 0.95)}},
        folder / "new",
        hashes=True,
    )
    holdfast.seal(folder / "new")
    return [folder / "new", *(GOLDEN / "earlier" / name for name in ("native", "cut"))]


def distributed(folder: Path) -> list[Path]:
    """One of which Holdfast noted the checksum of the index."""
    shutil.copytree(GOLDEN / "files" / "dcp", folder / "noted")
    (folder / "noted" / BESIDE).write_bytes(
        checksum_file((folder / "noted" / ".metadata").read_bytes())
    )
    return [folder / "noted"]


def made(name: str, content: bytes) -> Callable[[Path], list[Path]]:
    def write(folder: Path) -> list[Path]:
        (folder / name).write_bytes(content)
        return [folder / name]

    return write


def gguf_parts(folder: Path) -> list[Path]:
    for number in (1, 2):
        (folder / f"m-{number:05}-of-00002.gguf").write_bytes(
            split(number - 1, 2, "ab"[number - 1], total=2)
        )
    return [folder]


def old_hugging_face(folder: Path) -> list[Path]:
    shutil.copy(ROOT / "tests" / "golden" / "files" / "plain.pt", folder / "pytorch_model.bin")
    (folder / "config.json").write_text("{}")
    return [folder]


def megatron(folder: Path) -> list[Path]:
    write_megatron(folder)
    return [folder]


def meta(folder: Path) -> list[Path]:
    """A model of Meta's in one file: its names are of this kind, and it lies beside its `params.json`."""
    content = {
        "tok_embeddings.weight": torch.ones(4, 2),
        "norm.weight": torch.ones(2),
        "output.weight": torch.ones(4, 2),
    }
    torch.save(content, folder / "consolidated.00.pth")
    (folder / "params.json").write_text('{"dim": 2, "n_heads": 1, "n_layers": 0}')
    return [folder]


FORMATS: dict[str, Callable[[Path], list[Path]]] = {
    # Besides the golden files of the format.
    "torch-zip": nothing,
    "torch-dir": old_hugging_face,
    "torch-legacy": nothing,
    "torch-tar": nothing,
    "torchscript": nothing,
    "pt2": made("m.pt2", honest()),
    "safetensors": nothing,
    "safetensors-dir": nothing,
    "dcp": distributed,
    "native": native,
    "npy": nothing,
    "npz": nothing,
    "gguf": nothing,
    "gguf-dir": gguf_parts,
    "rank-files": lambda folder: [HONEST(folder)],
    "deepspeed": lambda folder: [zero_model().write(folder)],
    "megatron": megatron,
    "meta-llama": meta,
}


@pytest.mark.parametrize("format", FORMATS)
def test_the_first_files_of_a_process(format: str, tmp_path: Path):
    paths = [*FORMATS[format](tmp_path), *golden().get(format, [])]
    with holdfast.open(paths[0]) as ckpt:
        assert ckpt.format == format
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "tests.hostile.fresh", *map(str, paths)]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=True
    )
    assert json.loads(done.stdout) == []


def test_every_format_is_there():
    attributes = (holdfast.Checkpoint.__doc__ or "").partition("format: ")[2]
    format_names = attributes.partition("metadata: ")[0]
    assert set(re.findall(r"`([a-z0-9-]+)`", format_names)) == set(FORMATS)


def test_the_rule_can_be_broken():
    """An import by a library's name is let through, other names are not; nor is what is compiled outside of an import."""
    assert not broken("import", ("numpy.linalg",))
    assert broken("import", ("attacker",))
    assert broken("compile", ("1", "<string>"))
    assert broken("exec", (compile("1", "<string>", "eval"),))
    assert broken("os.system", ("true",))
    assert not broken("open", ("file", "r", 0))
