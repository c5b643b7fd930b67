"""`python -m benchmarks.million [COUNT …]`: very many tensors of 64 bytes; every verb in a fresh process, at each count.

Everything shall be linear, and a tensor shall take a kilobyte of memory. So there is a row for each verb and a column for each
count: microseconds of processor time a tensor, and bytes a tensor of the peak above what the process had after its imports (for
`save` without the state itself). Native directories: of a million tensors, a safetensors header passes the 100 MB of the format,
and a pickle the limits that hold unless they are raised.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.probe import measure

__all__ = ["main"]

COUNTS = (10_000, 100_000, 1_000_000)


def name(number: int) -> str:
    return f"layers.{number // 100}.experts.{number % 100}.w"


def made(count: int, changed: int = 0) -> dict[str, object]:
    """The state; of every `changed` tensors one is another."""
    import numpy as np

    rows = np.arange(16 * count, dtype=np.float32).reshape(count, 16)
    if changed:
        rows[::changed] += 1
    return {name(number): row.copy() for number, row in enumerate(rows)}


def save(folder: Path, count: int) -> Callable[[Path], object]:
    import holdfast

    state = made(count)
    return lambda path: holdfast.save(state, path / "new", format="native", durable=False)


def opened(folder: Path, count: int) -> Callable[[Path], object]:
    import holdfast

    def job(path: Path) -> object:
        with holdfast.open(path / "a") as checkpoint:
            return list(checkpoint)

    return job


def read(folder: Path, count: int) -> Callable[[Path], object]:
    import holdfast

    def job(path: Path) -> object:
        with holdfast.open(path / "a") as checkpoint:
            return len(checkpoint.read())

    return job


def convert(folder: Path, count: int) -> Callable[[Path], object]:
    import holdfast

    return lambda path: holdfast.convert(path / "a", path / "new", format="native", durable=False)


def diff(folder: Path, count: int) -> Callable[[Path], object]:
    import holdfast

    return lambda path: len(holdfast.diff(path / "a", path / "b").changed)


def verify(folder: Path, count: int) -> Callable[[Path], object]:
    import holdfast

    return lambda path: holdfast.verify(path / "a").ok


VERBS = {"save": save, "open": opened, "read": read, "convert": convert, "diff": diff, "verify": verify}
CHANGED = 100


def one(verb: str, folder: Path, count: int) -> None:
    """A verb in this process; what it took, as JSON."""
    import numpy as np

    import holdfast

    # What a verb imports when it is first called is no part of it.
    warm = folder / "warm"
    state = {f"{i}": np.zeros(1) for i in range(100)}
    holdfast.save(state, warm, format="native", overwrite=True)
    holdfast.diff(warm, warm)
    holdfast.verify(warm)
    holdfast.convert(warm, folder / "warmed", format="native", overwrite=True)
    job = VERBS[verb](folder, count)
    used = time.process_time()
    measured = measure(job, folder)
    used = time.process_time() - used
    print(json.dumps({"microseconds": used / count * 1e6, "nbytes": measured["peak_nbytes"] / count}))


def main(counts: list[int]) -> None:
    import holdfast

    print("| | " + " | ".join(f"{count:,}" for count in counts) + " |")
    print("| --- |" + " --- |" * len(counts), flush=True)
    rows: dict[str, list[str]] = {verb: [] for verb in VERBS}
    for count in counts:
        with tempfile.TemporaryDirectory() as place:
            folder = Path(place)
            for key, changed in (("a", 0), ("b", CHANGED)):
                holdfast.save(made(count, changed), folder / key, format="native", durable=False)
            for verb in VERBS:
                words = [sys.executable, "-m", "benchmarks.million", verb, place, str(count)]
                found = json.loads(subprocess.run(words, check=True, capture_output=True, text=True).stdout)
                rows[verb].append(f"{found['microseconds']:.1f} µs, {found['nbytes']:,.0f} B")
                shutil.rmtree(folder / "new", ignore_errors=True)
                print(f"{verb} of {count:,}: {rows[verb][-1]}", file=sys.stderr, flush=True)
    for verb, cells in rows.items():
        print(f"| {verb} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    if len(sys.argv) == 4 and sys.argv[1] in VERBS:
        one(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
    else:
        main([int(text) for text in sys.argv[1:]] or list(COUNTS))
