"""Rank files become one safetensors file, beside what mergers do: `torch.load` of every rank, a concatenation, `save_file`.

    python -m benchmarks.rank_files [--mib 4096] [--ranks 8] [--rounds 3] [--folder DIR] [--durable] [--dtype bf16]

The ranks are DTensors of float32 in matrices of 64 MiB, written by torch on a process group that only pretends. Each side runs in a
process of its own, the sides in turn, so that the peak of its memory is its own: what the process had at most, less what it had
after its imports. Both read files that are in the page cache, and both wait for the disk, or neither does (`--durable`). Ours
compares the checksums of what it reads, holds replicas against each other, and reads back what it wrote; `ours, as theirs` does not
read back.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

WIDTH = 4096
"""Rows and columns of a matrix: 64 MiB."""

MEASURED = """
import json, sys, time
side, source, target, durable, dtype = sys.argv[1:]
durable, dtype = durable == "True", dtype or None
import numpy
if side == "theirs":
    import torch, torch.distributed.tensor
    from safetensors.torch import save_file
    from benchmarks.rank_files import merge
else:
    import holdfast
from benchmarks.probe import status
from benchmarks.saving import flush
from pathlib import Path
before = status("VmRSS")
begin, busy = time.perf_counter(), time.process_time()
if side == "theirs":
    merge(Path(source), Path(target), dtype)
    if durable:
        flush(Path(target))
else:
    holdfast.convert(source, target, dtype=dtype, durable=durable, overwrite=True, read_back=side == "ours", max_memory="2GiB")
taken = time.perf_counter() - begin, time.process_time() - busy
peak = status("VmHWM") - before
print(json.dumps({"seconds": taken[0], "processor": taken[1], "peak_mib": peak >> 20}))
"""


def write(folder: Path, mib: int, ranks: int) -> None:
    """The files of so many ranks, with so many MiB together."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    for rank in range(ranks):
        dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
        mesh = init_device_mesh("cpu", (ranks,))
        torch.manual_seed(rank)
        state = {
            f"layers.{i}.weight": DTensor.from_local(
                torch.randn(WIDTH // ranks, WIDTH), mesh, [Shard(0)], run_check=False
            )
            for i in range(max(mib // 64, 1))
        }
        torch.save(
            {**state, "scale": torch.ones(1)}, folder / f"model_world_size_{ranks}_rank_{rank}.pt"
        )
        dist.destroy_process_group()


def merge(folder: Path, target: Path, dtype: str | None) -> None:
    """What a merger does: all ranks in memory, every tensor whole, one file."""
    import torch
    import torch.distributed as dist
    from safetensors.torch import save_file
    from torch.distributed.tensor import DTensor
    from torch.testing._internal.distributed.fake_pg import FakeStore

    paths = sorted(
        folder.glob("model_world_size_*_rank_*.pt"),
        key=lambda path: int(path.stem.rpartition("_")[2]),
    )
    dist.init_process_group("fake", rank=0, world_size=len(paths), store=FakeStore())
    ranks = [torch.load(path, weights_only=False, map_location="cpu") for path in paths]
    whole = {}
    for name in list(ranks[0]):
        parts = [rank.pop(name) for rank in ranks]
        tensor = (
            torch.cat([part.to_local() for part in parts])
            if isinstance(parts[0], DTensor)
            else parts[0]
        )
        whole[name] = tensor.to(torch.bfloat16) if dtype == "bf16" else tensor
    save_file(whole, target)


def measure(
    side: str, source: Path, target: Path, *, durable: bool, dtype: str
) -> dict[str, float]:
    target.unlink(missing_ok=True)
    command = [sys.executable, "-c", MEASURED, side, str(source), str(target), str(durable), dtype]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mib", type=int, default=4096, help="MiB of all ranks together")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where to write (a temporary folder)")
    parser.add_argument("--durable", action="store_true", help="both sides wait for the disk")
    parser.add_argument("--dtype", default="", choices=["", "bf16"], help="cast on the way")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        source = Path(name) / "actor"
        source.mkdir()
        write(source, options.mib, options.ranks)
        found: dict[str, list[dict[str, float]]] = {"theirs": [], "ours": [], "ours, as theirs": []}
        for turn in range(options.rounds + 1):
            for side, results in found.items():
                result = measure(
                    side,
                    source,
                    Path(name) / "out.safetensors",
                    durable=options.durable,
                    dtype=options.dtype,
                )
                if turn:
                    results.append(result)
        for side, results in found.items():
            middle = {
                key: round(statistics.median(result[key] for result in results), 2)
                for key in results[0]
            }
            print(json.dumps({"side": side, **middle}), flush=True)


if __name__ == "__main__":
    main()
