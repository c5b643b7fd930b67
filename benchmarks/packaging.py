"""Packaging a program with its weights, beside `torch.export.pt2_archive.package_pt2`, with the same fsync policy on both sides.

    python -m benchmarks.packaging [--mib 1024] [--rounds 3] [--folder DIR]

Both write the same exported program in turn, in one process. The best round of each counts, and the first is thrown away.
torch's file is flushed afterwards as ours is, with `--durable`; without it neither is.
"""

from __future__ import annotations

import argparse
import json
import logging
import tempfile
import time
import warnings
from pathlib import Path

from benchmarks.saving import flush


def program(mib: int):
    """A program over so many MiB of weights, in matrices of 16 MiB."""
    import torch
    from torch import nn

    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ParameterList(torch.randn(2048, 2048) for _ in range(max(mib // 16, 1)))

        def forward(self, x):
            for weight in self.layers:
                x = x @ weight
            return x

    return torch.export.export(Stack(), (torch.ones(1, 2048),))


def race(mib: int, rounds: int, folder: Path, *, durable: bool) -> dict[str, float]:
    """Seconds of both sides, and how many times faster ours is."""
    from torch.export.pt2_archive._package import package_pt2

    from holdfast.torch import package_program

    exported = program(mib)
    ours, theirs = folder / "ours.pt2", folder / "theirs.pt2"
    times: dict[str, list[float]] = {"ours": [], "theirs": []}
    for _ in range(rounds + 1):
        begin = time.perf_counter()
        package_pt2(theirs, exported_programs=exported)
        if durable:
            flush(theirs)
        times["theirs"].append(time.perf_counter() - begin)
        begin = time.perf_counter()
        package_program(ours, exported, durable=durable)
        times["ours"].append(time.perf_counter() - begin)
    best = {side: min(seconds[1:]) for side, seconds in times.items()}
    nbytes = ours.stat().st_size
    return {"mib": mib, "nbytes": nbytes, **best, "ratio": best["theirs"] / best["ours"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=1024, help="MiB of weights")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where to write (a temporary folder)")
    parser.add_argument("--durable", action="store_true", help="both sides wait for the disk")
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        print(json.dumps(race(options.mib, options.rounds, Path(folder), durable=options.durable)))


if __name__ == "__main__":
    main()
