"""Looking at a run of many steps: `python -m benchmarks.many_steps [FOLDER] [COUNT…]`.

Small steps with a seal each, as a `Run` saves them; their data files are links to one. For every number of steps: how long
`latest()` takes, listing the folder alone, all steps with their metrics (for the first time, and when they were looked at before),
and `holdfast runs --json`. Processor time, the least of five; the folder is in the cache.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

import holdfast
from holdfast.cli.main import main as command
from holdfast.core.value import replace
from holdfast.extras.runs.directory import RunDirectory
from holdfast.extras.runs.steps import step_name
from holdfast.verbs.seals.document import SEAL, encode_seal, parse_seal

COUNTS = (100, 1_000, 10_000)


def make(root: Path, numbers: range) -> None:
    """Steps like the first one, which is saved if it is not there."""
    first = root / step_name(0)
    if not first.exists():
        with holdfast.Run(root, durable=False) as run:
            run.save(0, {"w": np.ones(100), "b": np.zeros(10)}, metrics={"loss": 1.0})
    seal = parse_seal((first / SEAL).read_bytes(), holdfast.Limits())
    for number in numbers:
        folder = root / step_name(number)
        folder.mkdir()
        for file in seal.files:
            os.link(first / file.name, folder / file.name)
        (folder / SEAL).write_bytes(encode_seal(replace(seal, step=number)))
        os.utime(folder / SEAL, (1e9, 1e9))


def least(call: Callable[[], object], times: int = 5) -> float:
    """Milliseconds of processor time."""
    found = []
    for _ in range(times):
        begin = time.process_time()
        call()
        found.append(time.process_time() - begin)
    return 1000 * min(found)


def printed(root: Path) -> None:
    with contextlib.redirect_stdout(io.StringIO()):
        command(["runs", str(root), "--json"])


def main(folder: str | None, counts: tuple[int, ...]) -> None:
    print(
        f"{'steps':>7}  {'latest()':>9}  {'listing':>8}  {'all':>8}  {'again':>8}  {'runs --json':>11}   ms"
    )
    with tempfile.TemporaryDirectory(dir=folder) as place:
        root, made = Path(place), 1
        for count in counts:
            make(root, range(made, count))
            made = count
            known = RunDirectory(str(root))
            known.steps()
            row = [
                least(lambda: RunDirectory(str(root)).newest()),
                least(lambda: sorted(os.listdir(root))),
                least(lambda: RunDirectory(str(root)).steps(), 3),
                least(known.steps, 3),
                least(lambda: printed(root), 1),
            ]
            print(
                f"{count:>7,}  {row[0]:>9.2f}  {row[1]:>8.2f}  {row[2]:>8.1f}  {row[3]:>8.1f}  {row[4]:>11.1f}"
            )


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else None, tuple(map(int, sys.argv[2:])) or COUNTS)
