"""The files that the cases read, written by the peers themselves."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.board import Recipe

__all__ = [
    "GIANT_SHAPE",
    "WIDE_SHAPE",
    "four_pt",
    "giant_pt",
    "giant_safetensors",
    "half_many_pt",
    "large_pt",
    "large_safetensors",
    "many_pt",
    "many_safetensors",
    "small_pt",
    "training_pt",
    "wide_safetensors",
]

MIB, GIB = 1 << 20, 1 << 30

GIANT_SHAPE = (65536, 16384)
"""4 GiB of float32; a row takes 64 KiB."""

WIDE_SHAPE = (262144, 1024)
"""1 GiB of float32; a row takes 4 KiB."""


def names(count: int) -> list[str]:
    return [f"model.layers.{i // 8}.block.{i % 8}.weight" for i in range(count)]


def many_state(quick: bool):
    import torch

    return {
        name: torch.full((4, 4), float(i))
        for i, name in enumerate(names(2_000 if quick else 100_000))
    }


def large_state(quick: bool):
    import torch

    rows = 64 if quick else 2730
    return {
        f"layers.{i}.weight": torch.arange(i, i + rows * 4096, dtype=torch.float32).view(rows, 4096)
        for i in range(24)
    }


def half_many_state(quick: bool):
    import torch

    return {
        name: torch.full((4, 4), float(i))
        for i, name in enumerate(names(1_000 if quick else 50_000))
    }


def training_state(quick: bool):
    """A model and its optimizer, as training saves them: four small tensors for each parameter, three of them nested."""
    import torch

    every = names(300 if quick else 17_000)
    moments = {
        i: {
            "step": torch.tensor(1.0),
            "exp_avg": torch.full((4, 4), float(i)),
            "exp_avg_sq": torch.full((4, 4), float(i)),
        }
        for i in range(len(every))
    }
    model = {name: torch.full((4, 4), float(i)) for i, name in enumerate(every)}
    return {
        "model": model,
        "optimizer": {"state": moments, "param_groups": [{"lr": 1e-3, "params": list(moments)}]},
        "step": 1,
    }


def four_state(quick: bool):
    import torch

    rows = 64 if quick else 10920
    return {
        f"layers.{i}.weight": torch.arange(i, i + rows * 4096, dtype=torch.float32).view(rows, 4096)
        for i in range(24)
    }


def save_pt(state):
    def make(path: Path, quick: bool) -> None:
        import torch

        torch.save(state(quick), path)

    return make


def save_safetensors(state):
    def make(path: Path, quick: bool) -> None:
        from safetensors.torch import save_file

        save_file(state(quick), path)

    return make


def small_state(_: bool):
    import torch

    return {"a.weight": torch.zeros(8, 8), "a.bias": torch.zeros(8), "step": 7}


def make_giant_pt(path: Path, quick: bool) -> None:
    """torch leaves a hole where the data would be."""
    import torch

    with torch.serialization.skip_data():
        torch.save({"w": torch.empty(giant_shape(quick))}, path)


def make_giant_safetensors(path: Path, quick: bool) -> None:
    write_safetensors(path, giant_shape(quick))


def make_wide(path: Path, quick: bool) -> None:
    """Not a hole: pages of a hole are not in the page cache until someone reads them."""
    import numpy as np

    shape = wide_shape(quick)
    write_safetensors(path, shape)
    with path.open("r+b") as file:
        file.seek(0, 2)
        file.seek(-4 * shape[0] * shape[1], 2)
        block = np.arange(MIB, dtype=np.float32)
        for _ in range(shape[0] * shape[1] // MIB):
            file.write(block)


def giant_shape(quick: bool) -> tuple[int, int]:
    return GIANT_SHAPE if not quick else (GIANT_SHAPE[0], 1024)


def wide_shape(quick: bool) -> tuple[int, int]:
    return (8192, WIDE_SHAPE[1]) if quick else WIDE_SHAPE


def write_safetensors(path: Path, shape: tuple[int, int]) -> None:
    """A header, and a hole for the data."""
    nbytes = 4 * shape[0] * shape[1]
    header = json.dumps(
        {"w": {"dtype": "F32", "shape": shape, "data_offsets": [0, nbytes]}}
    ).encode()
    header += b" " * (-len(header) % 8)
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + nbytes)


def sized(full: int, quick: int):
    return lambda is_quick: quick if is_quick else full


many_pt = Recipe("many.pt", sized(40 * MIB, 4 * MIB), save_pt(many_state))
many_safetensors = Recipe(
    "many.safetensors", sized(20 * MIB, 4 * MIB), save_safetensors(many_state)
)
training_pt = Recipe("training.pt", sized(30 * MIB, 4 * MIB), save_pt(training_state))
half_many_pt = Recipe("half-many.pt", sized(20 * MIB, 4 * MIB), save_pt(half_many_state))
four_pt = Recipe("four.pt", sized(4 * GIB, 32 * MIB), save_pt(four_state))
large_pt = Recipe("large.pt", sized(GIB, 32 * MIB), save_pt(large_state))
large_safetensors = Recipe("large.safetensors", sized(GIB, 32 * MIB), save_safetensors(large_state))
wide_safetensors = Recipe("wide.safetensors", sized(GIB, 32 * MIB), make_wide)
giant_pt = Recipe("giant.pt", sized(MIB, MIB), make_giant_pt, sparse=True)
giant_safetensors = Recipe(
    "giant.safetensors", sized(MIB, MIB), make_giant_safetensors, sparse=True
)
small_pt = Recipe("small.pt", sized(MIB, MIB), save_pt(small_state))
