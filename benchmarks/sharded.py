"""Sharded saves and loads beside torch's distributed checkpoint: `python -m benchmarks.sharded [--ranks 4] [--mib 512]`.

One run, the same ranks (gloo, loopback), the same state, the same fsync policy: ours with `durable=False` beside DCP's writer with
`sync_files=False`. The state is a list of square float32 DTensors, sharded along dimension 0, and some replicated tensors. Medians
of the slowest rank's times. Resharding loads the same checkpoint along dimension 1 on another number of ranks.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def median(rounds: int, before: Callable[[], None], work: Callable[[], object]) -> float:
    times = []
    for _ in range(rounds):
        before()
        dist.barrier()
        start = time.perf_counter()
        work()
        taken = torch.tensor([time.perf_counter() - start])
        dist.all_reduce(taken, dist.ReduceOp.MAX)
        times.append(float(taken))
    return statistics.median(times)


def job(rank: int, size: int, mib: int, rounds: int, folder: str, port: int) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=size)
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor

    import holdfast.torch

    mesh = init_device_mesh("cpu", (size,))
    count = max(mib // 16, 1)

    def made(axis: int) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        state: dict[str, torch.Tensor] = {}
        for i in range(count):
            state[f"layer.{i}.weight"] = distribute_tensor(torch.randn(2048, 2040), mesh, [Shard(axis)])
            state[f"layer.{i}.bias"] = torch.randn(2048)
        return state

    def blank(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {k: torch.zeros_like(v) for k, v in state.items()}

    rows, columns = made(0), made(1)
    here = Path(folder)

    def clear(name: str) -> Callable[[], None]:
        def run() -> None:
            if rank == 0:
                shutil.rmtree(here / name, ignore_errors=True)
            dist.barrier()

        return run

    def stock_save() -> None:
        dcp.save(rows, storage_writer=dcp.FileSystemWriter(str(here / "dcp"), sync_files=False))

    results: dict[str, tuple[float, float]] = {}
    peer = median(rounds, clear("dcp"), stock_save)
    for form in ("native", "dcp"):

        def save(form: str = form) -> object:
            return holdfast.torch.save_sharded(here / f"{form}-ours", rows, format=form, durable=False)

        results[f"save ({form})"] = peer, median(rounds, clear(form + "-ours"), save)
    nothing: Callable[[], None] = lambda: None  # noqa: E731
    target, turned = blank(rows), blank(columns)
    peer = median(rounds, nothing, lambda: dcp.load(target, checkpoint_id=str(here / "dcp")))
    other = median(rounds, nothing, lambda: dcp.load(turned, checkpoint_id=str(here / "dcp")))
    for form in ("native", "dcp"):

        def load(into: dict[str, torch.Tensor], path: Path = here / f"{form}-ours") -> object:
            return holdfast.torch.load_sharded(path, into)

        results[f"load ({form})"] = peer, median(rounds, nothing, lambda load=load: load(target))
        results[f"load, other axis ({form})"] = other, median(rounds, nothing, lambda load=load: load(turned))
    loaded = holdfast.torch.load_sharded(here / "native-ours", turned)
    over = loaded.read_nbytes / loaded.needed_nbytes
    for name in rows:
        a, b = turned[name], columns[name]
        assert torch.equal(a.to_local() if isinstance(a, DTensor) else a, b.to_local() if isinstance(b, DTensor) else b), name
    waiting: list[object] = []

    def begin_stock() -> None:
        waiting.append(dcp.async_save(rows, checkpoint_id=str(here / "async-dcp")))

    def end_stock() -> None:
        for one in waiting:
            one.result()
        waiting.clear()
        clear("async-dcp")()

    def begin_ours() -> None:
        waiting.append(holdfast.torch.save_sharded(here / "async-ours", rows, durable=False, block=False))

    def end_ours() -> None:
        for one in waiting:
            one.wait()
        waiting.clear()
        clear("async-ours")()

    peer = median(rounds, end_stock, begin_stock)
    end_stock()
    results["async, until staged"] = peer, median(rounds, end_ours, begin_ours)
    end_ours()
    if rank == 0:
        print(f"{size} ranks, {mib} MiB; read {over:.3f} × what was needed")
        for name, (theirs, ours) in results.items():
            print(f"{name:28} DCP {theirs:7.3f} s   ours {ours:7.3f} s   {theirs / ours:6.2f} ×")
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--port", type=int, default=29533)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(job, (options.ranks, options.mib, options.rounds, folder, options.port), nprocs=options.ranks)


if __name__ == "__main__":
    main()
