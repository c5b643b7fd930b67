"""Packaging a program with its weights, beside `torch.export.pt2_archive.package_pt2`, with the same fsync policy on both sides.

    python -m benchmarks.packaging [--mib 1024] [--rounds 5] [--folder DIR] [--durable]

Both write the same exported program in turn, in one process; medians of the rounds count, and the first is thrown away. torch's
file is flushed afterwards as ours is, with `--durable`; without it neither is. What a round begins with decides much on a virtual
machine, where pages that the host has taken back are dear, so there is a row for each:

    backed        memory for either file was touched and given back just before (`board.back`): both sides write to real pages
    fresh         either side's last file was removed just before; its pages are there for whoever comes next
    overwritten   the last files are there. torch cuts its own off and writes into the same pages; an atomic writer needs new ones

Each time stands with the processor time behind it, which others on the machine hardly move. The floor is `pwrite` of as many bytes,
by one thread and by two, with and without `fallocate`, into a new file.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.board import back
from benchmarks.saving import flush

BLOCK = 4 << 20
ROWS = ("backed", "fresh", "overwritten")


def program(mib: int):
    """A program over so many MiB of weights, in matrices of 16 MiB."""
    import torch
    from torch import nn

    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ParameterList(
                torch.randn(2048, 2048) for _ in range(max(mib // 16, 1))
            )

        def forward(self, x):
            for weight in self.layers:
                x = x @ weight
            return x

    return torch.export.export(Stack(), (torch.ones(1, 2048),))


def packagers(mib: int, folder: Path, *, durable: bool) -> dict[Path, Callable[[], object]]:
    """What either side does, by the file that it writes: theirs, then ours."""
    from torch.export.pt2_archive._package import package_pt2

    from holdfast.torch import package_program

    exported = program(mib)
    ours, theirs = folder / "ours.pt2", folder / "theirs.pt2"

    def peer() -> None:
        package_pt2(theirs, exported_programs=exported)
        if durable:
            flush(theirs)

    return {
        theirs: peer,
        ours: lambda: package_program(exported, ours, overwrite=True, durable=durable),
    }


def floors(mib: int, folder: Path, *, durable: bool) -> dict[Path, Callable[[], object]]:
    """`pwrite` of as many bytes as the weights have, with nothing else done."""
    content = np.random.default_rng(0).integers(0, 256, mib << 20, np.uint8).data

    def write(path: Path, threads: int, allocate: bool) -> None:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT)
        if allocate:
            os.posix_fallocate(descriptor, 0, len(content))

        def part(first: int) -> None:
            for start in range(first * BLOCK, len(content), threads * BLOCK):
                os.pwrite(descriptor, content[start : start + BLOCK], start)

        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(part, range(threads)))
        os.close(descriptor)
        if durable:
            flush(path)

    jobs: dict[Path, Callable[[], object]] = {}
    for threads in (1, 2):
        for allocate in (False, True):
            path = (
                folder
                / f"pwrite, {threads} thread{'s'[: threads - 1]}{', fallocate' if allocate else ''}"
            )
            jobs[path] = partial(write, path, threads, allocate)
    return jobs


def medians(
    jobs: dict[Path, Callable[[], object]], rounds: int, row: str, nbytes: int
) -> dict[str, tuple[float, float]]:
    """Seconds, and seconds of processor time, of each job, run in turn, by the name of its file."""
    times: dict[Path, list[tuple[float, float]]] = {path: [] for path in jobs}
    for turn in range(rounds + 1):
        for path, job in jobs.items():
            if row != "overwritten":
                path.unlink(missing_ok=True)
            if row == "backed":
                back(nbytes)
            begin, busy = time.perf_counter(), time.process_time()
            job()
            if turn:
                times[path].append((time.perf_counter() - begin, time.process_time() - busy))
    middle = {
        path: [statistics.median(part) for part in zip(*pairs, strict=True)]
        for path, pairs in times.items()
    }
    return {
        path.stem: (round(seconds, 3), round(cpu, 3)) for path, (seconds, cpu) in middle.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mib", type=int, default=1024, help="MiB of weights")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="where to write (a temporary folder)")
    parser.add_argument("--durable", action="store_true", help="both sides wait for the disk")
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    nbytes = options.mib * 5 << 18
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        jobs = packagers(options.mib, folder, durable=options.durable)
        for row in ROWS:
            seconds = medians(jobs, options.rounds, row, nbytes)
            ratio, processor = (
                round(theirs / ours, 2)
                for theirs, ours in zip(seconds["theirs"], seconds["ours"], strict=True)
            )
            print(
                json.dumps({"row": row, **seconds, "ratio": ratio, "processor_ratio": processor}),
                flush=True,
            )
        for path in jobs:
            path.unlink()
        lowest = floors(options.mib, folder, durable=options.durable)
        print(
            json.dumps(
                {"row": "floor, backed", **medians(lowest, options.rounds, "backed", nbytes)}
            )
        )


if __name__ == "__main__":
    main()
