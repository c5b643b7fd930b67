"""What the verbs do with a gibibyte: statistics, a comparison of changed tensors, casts.

    bulk-stats-*     `stats` with histograms                          the file once, or twice where elements are wider than 16 bits
    bulk-diff-*      `diff` of two files in which every element changed   both files
    bulk-cast-*      `convert` to another dtype, read back            the file, and what is written twice

Rates are of the bytes of the source (both for `diff`), by the clock and of one processor's time: beside other load the second
says more. Two cores give about twice the second where nothing else runs. Memory is that of the first round, above what was there
before. Nothing waits for the disk.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path

from benchmarks.board import Case, Count, Recipe
from benchmarks.probe import measure

__all__ = ["BULK"]

TENSORS, WIDTH = 8, 4096
NBYTES, QUICK_NBYTES = 1 << 30, 1 << 22

LEAST = {"megabytes_per_second": 1000}


def recipe(dtype: str) -> Recipe:
    """A file of normal numbers, and beside it one in which all of them are a little larger."""

    def make(path: Path, quick: bool) -> None:
        import ml_dtypes
        import numpy as np

        import holdfast

        kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
        rows = (QUICK_NBYTES if quick else NBYTES) // TENSORS // WIDTH // kind.itemsize
        rng = np.random.default_rng(7)
        state = {
            f"layers.{i}.weight": rng.standard_normal((rows, WIDTH), np.float32) * 0.02
            for i in range(TENSORS)
        }
        for other, factor in ((path, 1.0), (changed(path), 1.01)):
            holdfast.save(
                {name: (array * np.float32(factor)).astype(kind) for name, array in state.items()},
                other,
                durable=False,
            )

    return Recipe(
        f"bulk-{dtype}.safetensors", lambda quick: 4 * (QUICK_NBYTES if quick else NBYTES), make
    )


def changed(path: Path) -> Path:
    return path.with_name(f"{path.stem}-changed.safetensors")


def counted(job: Callable[[Path], object], files: int = 1) -> Callable[[Path], Mapping[str, int]]:
    """Rates and memory of a job, which runs twice: the first time for memory and for the page cache."""

    def run(path: Path) -> Mapping[str, int]:
        peak = measure(job, path)["peak_nbytes"]
        used = time.process_time()
        measured = measure(job, path)
        used = time.process_time() - used
        nbytes = files * path.stat().st_size
        return {
            "megabytes_per_second": int(nbytes / measured["nanoseconds"] * 1000),
            "megabytes_per_processor_second": int(nbytes / used / 1e6),
            "peak_nbytes": peak,
        }

    return run


def stats(path: Path) -> object:
    import holdfast

    return holdfast.stats(path)


def diff(path: Path) -> object:
    import holdfast

    return holdfast.diff(path, changed(path))


def cast(dtype: str) -> Callable[[Path], object]:
    def job(path: Path) -> object:
        import holdfast

        out = path.with_name("bulk-cast.safetensors")
        try:
            return holdfast.convert(path, out, dtype=dtype, durable=False)
        finally:
            out.unlink(missing_ok=True)

    return job


FILES = {dtype: recipe(dtype) for dtype in ("float32", "bfloat16", "float16")}


def case(name: str, title: str, dtype: str, job: Callable[[Path], Mapping[str, int]]) -> Case:
    return Count(f"bulk-{name}", title, FILES[dtype], job, least=LEAST)


CASTS = (
    ("float32", "bfloat16"),
    ("float32", "float16"),
    ("bfloat16", "float32"),
    ("float16", "float32"),
    ("bfloat16", "float8_e4m3fn"),
)

BULK: tuple[Case, ...] = (
    *(
        case(f"stats-{dtype}", f"stats of 1 GiB of {dtype}", dtype, counted(stats))
        for dtype in FILES
    ),
    *(
        case(
            f"diff-{dtype}", f"diff of 1 GiB of {dtype}, all of it changed", dtype, counted(diff, 2)
        )
        for dtype in FILES
    ),
    *(case(f"cast-{a}-{b}", f"convert 1 GiB of {a} to {b}", a, counted(cast(b))) for a, b in CASTS),
)
