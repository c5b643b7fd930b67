"""Sharded saves and loads beside torch's distributed checkpoint: `python -m benchmarks.sharded [--ranks 4] [--mib 512]`.

One run, the same ranks (gloo, loopback), the same state, the same fsync policy: ours with `durable=False` beside DCP's writer with
`sync_files=False`. The state is a list of square float32 DTensors, sharded along dimension 0, and some replicated tensors. Medians
of the slowest rank's times, in turns. Resharding loads the same checkpoint along dimension 1, on as many ranks and on one less.

Beside what is loaded along the other axis stands its floor: the same rows of the same files by bare calls into the kernel, without
planning, checksums or anybody to ask.

`--replicas 100` is another question: ranks that want the same, on a store of 100 MB/s a rank that counts what is read of it.
"""

from __future__ import annotations

import argparse
import gc
import os
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

Step = tuple[Callable[[], None], Callable[[], object]]
"""What is done before the clock runs, and the work."""


def medians(rounds: int, *steps: Step) -> list[float]:
    """The slowest rank's time of each step, in turns, so that whatever else the machine does meets all of them."""
    times: list[list[float]] = [[] for _ in steps]
    for _ in range(rounds):
        for (before, work), taken in zip(steps, times, strict=True):
            before()
            gc.collect()  # nobody pays for what the one before left behind
            dist.barrier()
            start = time.perf_counter()
            work()
            slowest = torch.tensor([time.perf_counter() - start])
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            taken.append(float(slowest))
    return [statistics.median(taken) for taken in times]


def columns_by_hand(path: Path, rank: int, size: int) -> Callable[[], None]:
    """What reads the columns that a rank of so many has, row by row, and does nothing else: the floor of any way to load them."""
    import holdfast

    width = -(-2040 // size)
    first, last = min(rank * width, 2040), min((rank + 1) * width, 2040)
    files: dict[str, list[np.ndarray]] = {}
    with holdfast.open(path) as checkpoint:
        for tensor in checkpoint.values():
            for chunk in tensor.chunks if tensor.ndim > 1 else ():
                begin = chunk.storage.start + chunk.offset // 8 + first * 4
                files.setdefault(chunk.storage.key, []).append(
                    begin + np.arange(chunk.shape[0]) * (2040 * 4)
                )
    nbytes = (last - first) * 4
    jobs = [
        (os.open(path / key, os.O_RDONLY), np.sort(np.concatenate(starts)))
        for key, starts in files.items()
    ]
    out = np.zeros(sum(len(starts) for _, starts in jobs) * nbytes, np.uint8)

    def run() -> None:
        rows = memoryview(out)
        row_offset = 0
        for descriptor, starts in jobs:
            for start in starts.tolist():
                row = rows[row_offset : row_offset + nbytes]
                assert os.preadv(descriptor, [row], start) == nbytes
                row_offset += nbytes

    return run


def job(rank: int, size: int, mib: int, rounds: int, folder: str, port: int) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=size)
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor

    import holdfast.torch

    mesh = init_device_mesh("cpu", (size,))
    fewer = DeviceMesh("cpu", list(range(size - 1)))
    member = rank < size - 1
    count = max(mib // 16, 1)

    def made(axis: int, mesh: DeviceMesh = mesh) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        state: dict[str, torch.Tensor] = {}
        for i in range(count):
            state[f"layer.{i}.weight"] = distribute_tensor(
                torch.randn(2048, 2040), mesh, [Shard(axis)]
            )
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

    def save(form: str) -> Step:
        where = here / f"{form}-ours"
        return clear(where.name), lambda: holdfast.torch.save_sharded(
            where, rows, format=form, durable=False
        )

    def load(
        form: str,
        into: dict[str, torch.Tensor],
        group: dist.ProcessGroup | None = None,
        *,
        verify: bool = True,
    ) -> Step:
        return nothing, lambda: holdfast.torch.load_sharded(
            here / f"{form}-ours", into, group=group, verify=verify
        )

    def stock_load(into: dict[str, torch.Tensor], group: dist.ProcessGroup | None = None) -> Step:
        return nothing, lambda: dcp.load(into, checkpoint_id=str(here / "dcp"), process_group=group)

    def nothing() -> None:
        pass

    floors: dict[str, float] = {}
    results: dict[str, tuple[float, float]] = {}
    peer, native, ours = medians(rounds, (clear("dcp"), stock_save), save("native"), save("dcp"))
    results |= {"save (native)": (peer, native), "save (dcp)": (peer, ours)}
    target, turned = blank(rows), blank(columns)
    for what, into in {"load": target, "load, other axis": turned}.items():
        steps = [
            stock_load(into),
            load("native", into),
            load("native", into, verify=False),
            load("dcp", into),
        ]
        peer, native, unchecked, ours = medians(rounds, *steps)
        results |= {
            f"{what} (native)": (peer, native),
            f"{what} (native, verify=False)": (peer, unchecked),
        }
        results[f"{what} (dcp)"] = peer, ours
    floors["load, other axis"] = medians(
        rounds, (nothing, columns_by_hand(here / "native-ours", rank, size))
    )[0]
    if size > 2:
        few = blank(made(1, fewer))
        part = fewer.get_group() if member else None
        steps = [stock_load(few, part), load("native", few, part), load("dcp", few, part)]
        peer, native, ours = medians(
            rounds, *(step if member else (nothing, nothing) for step in steps)
        )
        what = f"{size} to {size - 1}, other axis"
        by_hand = columns_by_hand(here / "native-ours", rank, size - 1) if member else nothing
        floors[what] = medians(rounds, (nothing, by_hand))[0]
        results |= {f"{what} (native)": (peer, native), f"{what} (dcp)": (peer, ours)}
    loaded = holdfast.torch.load_sharded(here / "native-ours", turned)
    over = loaded.read_nbytes / loaded.needed_nbytes
    for name in rows:
        a, b = turned[name], columns[name]
        assert torch.equal(
            a.to_local() if isinstance(a, DTensor) else a,
            b.to_local() if isinstance(b, DTensor) else b,
        ), name
    # DCP's background thread runs collectives, which would meet ours on the same group, and wait for ever.
    own = dist.new_group(backend="gloo")
    waiting: list[Callable[[], object]] = []

    def begin_stock() -> None:
        waiting.append(
            dcp.async_save(rows, checkpoint_id=str(here / "async-dcp"), process_group=own).result
        )

    def begin_ours() -> None:
        waiting.append(
            holdfast.torch.async_save_sharded(here / "async-ours", rows, durable=False).wait
        )

    def end() -> None:
        for wait in waiting:
            wait()
        waiting.clear()
        clear("async-dcp")()
        clear("async-ours")()

    peer, ours = medians(rounds, (end, begin_stock), (end, begin_ours))
    results["async, until staged"] = peer, ours
    end()
    if rank == 0:
        print(f"{size} ranks, {mib} MiB; read {over:.3f} × what was needed")
        for name, (theirs, ours) in results.items():
            floor = next((taken for what, taken in floors.items() if name.startswith(what)), None)
            beside = "" if floor is None else f"   the rows alone {floor:7.3f} s"
            print(
                f"{name:38} DCP {theirs:7.3f} s   ours {ours:7.3f} s   {theirs / ours:6.2f} ×{beside}"
            )
    dist.destroy_process_group()


class Link:
    """Every rank's way to a store: each read is counted, and takes as long as a link of so many bytes a second would."""

    def __init__(self, rate: float) -> None:
        from holdfast.stores.local import LocalStore

        self.nbytes, self._rate, self._free, self._lock = 0, rate, 0.0, threading.Lock()
        read = LocalStore.read

        def slow_read(store: LocalStore, key: str, start: int, out: memoryview) -> None:
            self._take(out.nbytes)
            read(store, key, start, out)

        LocalStore.read = slow_read  # type: ignore[method-assign]

    def _take(self, nbytes: int) -> None:
        with self._lock:
            self.nbytes += nbytes
            self._free = max(self._free, time.perf_counter()) + nbytes / self._rate
            wait = self._free - time.perf_counter()
        time.sleep(max(wait, 0.0))


def replicas(
    rank: int, size: int, mib: int, rounds: int, folder: str, port: int, rate: float
) -> None:
    """Ranks that want the same: all of it (DDP), or shards of which there are two (HSDP). Each reads all, or its share."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=size)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    import holdfast.torch

    path, whole = (
        Path(folder) / "step",
        {f"layer.{i}.weight": torch.full((2048, 2048), float(i)) for i in range(max(mib // 16, 1))},
    )
    if rank == 0:
        holdfast.save(whole, path.with_suffix(".safetensors"), durable=False)
        holdfast.convert(path.with_suffix(".safetensors"), path, format="native", durable=False)
    dist.barrier()
    mesh = init_device_mesh("cpu", (2, size // 2))
    cases = {
        "DDP": whole,
        "HSDP": {k: distribute_tensor(v, mesh, [Replicate(), Shard(0)]) for k, v in whole.items()},
    }
    link = Link(rate)

    def run(state: dict[str, torch.Tensor], how: str) -> tuple[int, float]:
        """Bytes that all ranks read, and the median of the slowest rank's times."""
        link.nbytes = 0
        (taken,) = medians(
            rounds, (lambda: None, lambda: holdfast.torch.load_sharded(path, state, replicated=how))
        )
        read = torch.tensor([link.nbytes / rounds])
        dist.all_reduce(read)
        return int(read), taken

    blank = {k: torch.zeros_like(v) for k, v in whole.items()}
    alone = dist.new_group([0])
    if rank == 0:
        begun = time.perf_counter()
        holdfast.torch.load_sharded(path, blank, group=alone)
        one, seconds = link.nbytes, time.perf_counter() - begun
        print(
            f"{mib} MiB at {rate / 1e6:.0f} MB/s a rank: one process reads {one:,} bytes in {seconds:.2f} s"
        )
    for name, state in cases.items():
        target = {k: torch.zeros_like(v) for k, v in state.items()}
        (each, slow), (once, fast) = (run(target, how) for how in ("read", "broadcast"))
        for k, v in state.items():
            assert torch.equal(
                getattr(target[k], "_local_tensor", target[k]), getattr(v, "_local_tensor", v)
            ), k
        if rank == 0:
            print(
                f"{name:5} {size} ranks, each for itself {each:,} bytes ({each / one:.2f} ×) in {slow:.2f} s; "
                f"handed on {once:,} bytes ({once / one:.3f} ×) in {fast:.2f} s, {slow / fast:.2f} × as fast"
            )
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--port", type=int, default=29533)
    parser.add_argument(
        "--replicas",
        type=float,
        metavar="MB/S",
        help="ranks that want the same; the store gives each so much",
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if options.replicas:
            given = (
                options.ranks,
                options.mib,
                options.rounds,
                folder,
                options.port,
                options.replicas * 1e6,
            )
            mp.spawn(replicas, given, nprocs=options.ranks)
            return
        mp.spawn(
            job,
            (options.ranks, options.mib, options.rounds, folder, options.port),
            nprocs=options.ranks,
        )


if __name__ == "__main__":
    main()
