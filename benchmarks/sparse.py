"""Tensors with zeros, packed in a native directory: how small they become, and how fast both ways are.

    sparse-bitmap    half of the elements of bfloat16 matrices are zero, anywhere        at most 57% of the dense bytes
    sparse-nm        2 of every 4 are                                                    at most 60%
    sparse-block     90% of the blocks of 16 × 16 are                                    at most 12%

Saving is from memory with `sparse="auto"`, which counts, chooses, packs and writes; reading gives dense arrays, checksums compared.
Rates are in dense bytes, the best of five, without waiting for the disk; beside them those of one processor's time, which other
load on the machine moves less.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.board import Case, Count, Recipe

__all__ = ["SPARSE"]

MIB = 1 << 20
COUNT, SHAPE, QUICK_SHAPE = 8, (4096, 4096), (256, 512)
ROUNDS = 5


def dense_nbytes(quick: bool) -> int:
    rows, columns = QUICK_SHAPE if quick else SHAPE
    return COUNT * rows * columns * 2


def recipe(kind: str) -> Recipe:
    """A dense safetensors file of matrices with such zeros."""

    def make(path: Path, quick: bool) -> None:
        import ml_dtypes
        import numpy as np

        import holdfast

        rng = np.random.default_rng(7)
        rows, columns = QUICK_SHAPE if quick else SHAPE
        state = {}
        for i in range(COUNT):
            bits = rng.integers(1, 1 << 15, (rows, columns), dtype=np.uint16)
            match kind:
                case "bitmap":
                    bits *= rng.integers(0, 2, bits.shape, dtype=np.uint16)
                case "nm":
                    kept = np.array(
                        [
                            [1, 1, 0, 0],
                            [1, 0, 1, 0],
                            [1, 0, 0, 1],
                            [0, 1, 1, 0],
                            [0, 1, 0, 1],
                            [0, 0, 1, 1],
                        ],
                        np.uint16,
                    )
                    bits *= kept[rng.integers(0, 6, (rows, columns // 4))].reshape(bits.shape)
                case _:
                    kept = (rng.random((rows // 16, columns // 16)) < 0.1).astype(np.uint16)
                    bits *= np.repeat(np.repeat(kept, 16, axis=0), 16, axis=1)
            state[f"layers.{i}.weight"] = bits.view(ml_dtypes.bfloat16)
        holdfast.save(state, path, format="safetensors", durable=False)

    return Recipe(f"sparse-{kind}.safetensors", lambda quick: 3 * dense_nbytes(quick), make)


def measured(path: Path) -> dict[str, int]:
    """Thousandths of the dense bytes that are stored, and megabytes a second both ways."""
    import holdfast

    with holdfast.open(path) as checkpoint:
        state = dict(checkpoint.read())
    nbytes = sum(array.nbytes for array in state.values())
    out = path.with_suffix("")

    def save() -> None:
        shutil.rmtree(out, ignore_errors=True)
        holdfast.save(state, out, format="native", sparse="auto", durable=False)

    def read() -> None:
        with holdfast.open(out) as checkpoint:
            checkpoint.read()

    quantities = {**best("pack", save, nbytes), **best("unpack", read, nbytes)}
    stored = sum(file.stat().st_size for file in out.iterdir())
    shutil.rmtree(out)
    return {"stored_permille": -(-stored * 1000 // nbytes), **quantities}


def best(name: str, job: Callable[[], None], nbytes: int) -> dict[str, int]:
    """Megabytes a second of the fastest round, and a second of one processor in the cheapest."""
    seconds = processor = float("inf")
    for _ in range(ROUNDS):
        begin, used = time.perf_counter(), time.process_time()
        job()
        seconds = min(seconds, time.perf_counter() - begin)
        processor = min(processor, time.process_time() - used)
    rates = {"megabytes_per_second": seconds, "megabytes_per_processor_second": processor}
    return {f"{name}_{unit}": int(nbytes / took / 1e6) for unit, took in rates.items()}


LEAST = {"pack_megabytes_per_second": 1000, "unpack_megabytes_per_second": 1000}

SPARSE: tuple[Case, ...] = tuple(
    Count(
        f"sparse-{kind}", title, recipe(kind), measured, most={"stored_permille": most}, least=LEAST
    )
    for kind, title, most in (
        ("bitmap", "256 MiB of bfloat16, half of it zeros anywhere", 570),
        ("nm", "256 MiB of bfloat16, 2:4", 600),
        ("block", "256 MiB of bfloat16, 90% zeros in blocks of 16 × 16", 120),
    )
)
