"""`python -m benchmarks.small_states [--rounds 300] [--only save]`: processor time of small states, in µs, beside the peers.

What is measured is the work that does not depend on the number of tensors: detection, arguments, plans, the commit. Each line is
the minimum and the median of many rounds, ours and the peer's in turns, in one process; nothing is flushed to disk.
"""

from __future__ import annotations

import argparse
import io
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

Job = Callable[[], object]

COUNTS = (3, 200)


def jobs(folder: Path, count: int) -> Iterator[tuple[str, Job, Job | None]]:
    """Each job by its name: ours, and the peer's."""
    import numpy as np
    import safetensors.numpy
    import torch

    import holdfast
    import holdfast.torch

    arrays = {f"layer.{at}.weight": np.full((8, 8), at, np.float32) for at in range(count)}
    tensors = {name: torch.from_numpy(array.copy()) for name, array in arrays.items()}
    safe, zipped, ours = (str(folder / name) for name in ("a.safetensors", "a.pt", "ours"))
    safetensors.numpy.save_file(arrays, safe)
    torch.save(tensors, zipped)

    def one_tensor() -> None:
        with holdfast.open(safe) as opened:
            opened["layer.1.weight"].numpy()

    def one_tensor_peer() -> None:
        with safetensors.safe_open(safe, "np") as opened:
            opened.get_tensor("layer.1.weight")

    def read(path: str) -> None:
        with holdfast.open(path) as opened:
            opened.read()

    def sharded() -> None:
        shutil.rmtree(ours, ignore_errors=True)
        holdfast.torch.save_sharded(tensors, ours, durable=False)

    def made_of(path: str) -> None:
        holdfast.save(tensors, path, durable=False)

    yield (
        "to_bytes safetensors",
        lambda: holdfast.to_bytes(arrays, "safetensors"),
        lambda: safetensors.numpy.save(arrays),
    )
    yield (
        "save safetensors",
        lambda: holdfast.save(arrays, f"{ours}.safetensors", durable=False),
        lambda: safetensors.numpy.save_file(arrays, f"{ours}.peer"),
    )
    yield "save .pt", lambda: made_of(f"{ours}.pt"), lambda: torch.save(tensors, f"{ours}.peer.pt")
    yield "torch.save .pt", lambda: holdfast.torch.save(tensors, f"{ours}.pt"), None
    yield (
        "torch.save BytesIO",
        lambda: holdfast.torch.save(tensors, io.BytesIO()),
        lambda: torch.save(tensors, io.BytesIO()),
    )
    yield "read safetensors", lambda: read(safe), lambda: safetensors.numpy.load_file(safe)
    yield "read .pt", lambda: read(zipped), lambda: torch.load(zipped)
    yield "one tensor", one_tensor, one_tensor_peer
    yield "save_sharded", sharded, None
    run = holdfast.torch.Run(folder / f"run{count}", keep="latest:2", durable=False)
    steps = iter(range(1 << 40))
    yield "Run.save", lambda: run.save(next(steps), tensors), None


def measured(job: Job, peer: Job | None, rounds: int) -> list[list[float]]:
    """Processor time of each round in µs: ours, the peer's."""
    both = [one for one in (job, peer) if one is not None]
    took: list[list[float]] = [[] for _ in both]
    for _ in range(rounds):
        for one, column in zip(both, took, strict=True):
            begin = time.process_time_ns()
            one()
            column.append((time.process_time_ns() - begin) / 1e3)
    return took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition(":")[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--only", default="")
    parser.add_argument("--count", type=int, action="append")
    asked = parser.parse_args()
    root = "/dev/shm" if os.path.isdir("/dev/shm") else None
    for count in asked.count or COUNTS:
        with tempfile.TemporaryDirectory(dir=root) as folder:
            for name, job, peer in jobs(Path(folder), count):
                if asked.only not in name:
                    continue
                rounds = (
                    max(20, asked.rounds * 3 // max(count, 12))
                    if "sharded" in name or "Run" in name
                    else asked.rounds
                )
                measured(job, peer, 5)
                took = measured(job, peer, rounds)
                words = [f"{min(column):8.0f} {statistics.median(column):8.0f}" for column in took]
                print(f"{count:6} {name:24}{'   peer'.join(words)}", flush=True)


if __name__ == "__main__":
    main()
