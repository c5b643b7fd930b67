"""What each tensor more takes of memory at the peak of a verb: less than two kilobytes, in most formats less than one.

Traced by `tracemalloc`, so that the figures are the same on every machine. A verb is run with some tensors and with twice as many;
what it takes by itself is in both. `benchmarks/million.py` measures a million in processes of their own. `pytest -s` prints the
figures.
"""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

import holdfast
import holdfast.torch

COUNT = 10_000
MOST = {"native": 1_000, "shards": 1_000, "pt": 1_600}
"""Bytes for each tensor more. A dict has room for two thirds of a power of two: both counts fill theirs alike.

While a pickle is read, its memo holds what every tensor was made of.
"""

LARGER = {("save", "pt"): 30_000}
"""Counts of what reads several thousand tensors at a time, on several threads: fewer do not fill them."""

LIMITS = holdfast.Limits(pickle_nbytes=1 << 30, zip_directory_nbytes=1 << 30)
FORMATS = {"native": "", "shards": ".folder", "pt": ".pt"}
Job = Callable[[], object]


def arrays(count: int, changed: int = 0) -> dict[str, np.ndarray]:
    """Arrays of 64 bytes; of every `changed` one is another."""
    rows = np.arange(16 * count, dtype=np.float32).reshape(count, 16)
    if changed:
        rows[::changed] += 1
    return {f"layers.{i // 100}.experts.{i % 100}.w": row.copy() for i, row in enumerate(rows)}


def options(format: str, count: int) -> dict[str, object]:
    """What a verb that writes is given: eight shards, of however many tensors."""
    return {"durable": False} | (
        {"format": "safetensors-dir", "max_shard_size": 8 * count} if format == "shards" else {}
    )


def saving(folder: Path, format: str, count: int, name: str = "new", changed: int = 0) -> Job:
    state = arrays(count, changed)
    path = folder / f"{name}{FORMATS[format]}"
    if format != "pt":
        return lambda: holdfast.save(state, path, **options(format, count))  # type: ignore[arg-type]
    tensors = {name: torch.from_numpy(array) for name, array in state.items()}
    return lambda: holdfast.torch.save(tensors, path)


def prepared(verb: str, folder: Path, format: str, count: int) -> Job:
    if verb == "save":
        return saving(folder, format, count)
    for name, changed in (("a", 0), ("b", 100)) if verb == "diff" else (("a", 0),):
        saving(folder, format, count, name, changed)()
    path, other = (folder / f"{name}{FORMATS[format]}" for name in "ab")
    match verb:
        case "open":
            return lambda: holdfast.open(path, limits=LIMITS).close()
        case "convert":
            target = folder / f"new{FORMATS['native' if format == 'pt' else format]}"
            return lambda: holdfast.convert(path, target, limits=LIMITS, **options(format, count))  # type: ignore[arg-type]
        case "diff":
            return lambda: holdfast.diff(path, other, limits=LIMITS)
        case _:
            return lambda: holdfast.verify(path, limits=LIMITS)


def peak(verb: str, folder: Path, format: str, count: int) -> int:
    folder.mkdir()
    job = prepared(verb, folder, format, count)
    gc.collect()
    tracemalloc.start()
    try:
        made = job()
        most = tracemalloc.get_traced_memory()[1]
        del made
    finally:
        tracemalloc.stop()
    return most


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("verb", ["save", "open", "convert", "diff", "verify"])
def test_a_tensor_takes_few_bytes_at_the_peak(verb: str, format: str, tmp_path: Path):
    peak(verb, tmp_path / "first", format, 100)  # what is imported at a first call
    least = LARGER.get((verb, format), COUNT)
    few, many = (peak(verb, tmp_path / f"{count}", format, count) for count in (least, 2 * least))
    each = (many - few) / least
    print(f"\n{verb}, {format}: {each:.0f} bytes")
    assert each <= MOST[format]
