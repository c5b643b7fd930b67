"""`python -m benchmarks.many_cuda`: 30,000 small tensors to a GPU and back, and large ones at the speed of the bus; floors beside.

    python -m benchmarks.many_cuda                     everything, about four minutes
    python -m benchmarks.many_cuda --part many         one part of: floors, many, large, sweep, profile
    python -m benchmarks.many_cuda --quick             small and once: does everything run? With --device cpu also without a GPU
    python -m benchmarks.many_cuda --json OUT          all figures, and what the machine is

Sides run in turn, round by round, and what counts is the median. What each load gives is compared with what was saved, bit by bit,
in an unmeasured round before; so is what torch and safetensors read of each file that was saved. Processor time is that of the
whole process, threads included.

`sweep` loads large tensors with other blocks, readers and steps than the usual ones, to find out whether these are still the best,
and says what the file and the bus give without us. `profile` does the same for many small ones, saved and loaded, and says in which
functions the time goes.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import io
import json
import os
import platform
import pstats
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from itertools import repeat
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

import holdfast
import holdfast.torch as ht
from holdfast.core import crc
from holdfast.engine import saves as plan_saves
from holdfast.engine import write as engine_write
from holdfast.torch.cuda import host, pipeline
from holdfast.torch.cuda import load as gpu_load
from holdfast.torch.cuda import plan as gpu_plan
from holdfast.torch.cuda.pipeline import Mark, pump
from holdfast.torch.cuda.streams import lanes

DEVICE = "cuda"
State = dict[str, torch.Tensor]
Side = Callable[[], object]
STAGES = (
    "holdfast returns",
    "holdfast",
    "holdfast done",
    "Run.async_save returns",
    "Run.async_save done",
    "dcp.async_save",
)
PARTS = ("floors", "many", "large", "sweep", "profile")
SWEEP: tuple[dict[str, int], ...] = (
    {},
    {"block": 4},
    {"block": 16},
    {"readers": 8},
    {"readers": 10},
    {"readers": 16},
    {"spare": 2},
    {"spare": 8},
    {"block": 4, "readers": 8},
    {"together": 1},
    {"together": 8},
)
"""Megabytes of a block; readers; blocks beyond one a reader, and blocks copied together."""
FEW_SWEEPS: tuple[dict[str, int], ...] = ({}, {"spare": 2}, {"spare": 8}, {"readers": 8})
"""Of the second state."""

MANY_SAVES: tuple[dict[str, int], ...] = (
    {},
    {"gatherers": 1},
    {"gatherers": 2},
    {"gatherers": 8},
    {"gatherers": 16},
    {"rows": 1},
    {"rows": 16},
    {"rows": 16, "gatherers": 2},
    {"kept": 0},
    {"kept": 0, "gatherers": 16},
)
"""Threads that write; megabytes that are gathered at a time; bytes up to which a checksum keeps the interpreter lock."""
MANY_LOADS: tuple[dict[str, int], ...] = (
    {},
    {"readers": 1},
    {"readers": 2},
    {"readers": 8},
    {"readers": 16},
    {"block": 4},
    {"block": 8},
    {"kept": 0},
    {"kept": 0, "readers": 16},
)
"""Threads that read; megabytes of a block; as above."""
PLACES: tuple[tuple[object, str, str, int], ...] = (
    (host, "BLOCK_NBYTES", "block", 1 << 20),
    (gpu_load, "BLOCK_NBYTES", "block", 1 << 20),
    (gpu_load, "SPARE_BLOCKS", "spare", 1),
    (gpu_plan, "LEAST_NBYTES", "least", 1 << 20),
    (gpu_load, "READERS", "readers", 1),
    (gpu_load, "SHORT_READERS", "readers", 1),
    (pipeline, "MOST_BLOCKS", "together", 1),
    (engine_write, "MAX_GATHERING_THREADS", "gatherers", 1),
    (plan_saves, "BLOCK_NBYTES", "rows", 1 << 20),
    (crc, "SHORT_NBYTES", "kept", 1),
)
"""Where each of these stands, and its unit."""


@dataclass
class Row:
    """One side of one part."""

    part: str
    side: str
    nbytes: int
    wall_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)

    def shown(self) -> str:
        wall, cpu = statistics.median(self.wall_s), statistics.median(self.cpu_s)
        speed = f"{self.nbytes / wall / 1e9:7.2f} GB/s" if self.nbytes else ""
        return f"{self.part:7} {self.side:42} {wall * 1e3:9.1f} ms {cpu * 1e3:9.1f} ms cpu {speed}"


def timed(side: Side) -> tuple[float, float, object]:
    gc.collect()
    settle()
    wall, cpu = time.perf_counter(), time.process_time()
    result = side()
    settle()
    return time.perf_counter() - wall, time.process_time() - cpu, result


def settle() -> None:
    """Wait for the GPU."""
    if DEVICE == "cuda":
        torch.cuda.synchronize()


class Bench:
    """The files of a run, its sizes, and what was measured."""

    def __init__(self, folder: Path, rounds: int, *, quick: bool) -> None:
        self.folder, self.rounds, self.quick = folder, rounds, quick
        self.rows: list[Row] = []

    def path(self, name: str) -> str:
        return str(self.folder / name)

    def race(
        self, part: str, sides: Mapping[str, Side], nbytes: int, rounds: int | None = None
    ) -> None:
        rows = {name: Row(part, name, nbytes) for name in sides}
        for _ in range(rounds or self.rounds):
            for name, side in sides.items():
                wall, cpu, made = timed(side)
                del made
                rows[name].wall_s.append(wall)
                rows[name].cpu_s.append(cpu)
        for row in rows.values():
            print(row.shown(), flush=True)
        self.rows += rows.values()

    def floors(self) -> None:
        """What the bus, the device and the calls take by themselves."""
        count, width = (1000, 4096) if self.quick else (30_000, 4096)
        nbytes = count * width * 4
        locked = torch.empty(nbytes, dtype=torch.uint8, pin_memory=DEVICE == "cuda")
        device = torch.empty(nbytes, dtype=torch.uint8, device=DEVICE)
        tensors = list(torch.randn(count * width, device=DEVICE).split(width))
        bytes_of = [tensor.view(torch.uint8) for tensor in tensors]
        some = bytes_of[:1000]
        joined = torch.cat(some).view(torch.int32)
        shaped = joined.view(-1, 64, 64)
        made = torch._foreach_add(shaped.unbind(), 0)
        sides: dict[str, Side] = {
            "bus, to the host": lambda: locked.copy_(device, non_blocking=True),
            "bus, to the device": lambda: device.copy_(locked, non_blocking=True),
            f"torch.empty, {count}": lambda: [
                torch.empty(width, device=DEVICE) for _ in range(count)
            ],
            f"views as bytes, {count}": lambda: [tensor.view(torch.uint8) for tensor in tensors],
            f"cat of bytes, {count}": lambda: torch.cat(bytes_of),
            "cat of bytes, 1000": lambda: torch.cat(some),
            "flattened and joined, 1000": lambda: torch._C._nn.flatten_dense_tensors(
                list(shaped.unbind())
            ),
            "split, 1000": lambda: joined.split(width),
            "split and add 0 to each, 1000": lambda: torch._foreach_add(joined.split(width), 0),
            "unbind, 1000": lambda: shaped.unbind(),
            "unbind and add 0 to each, 1000": lambda: torch._foreach_add(shaped.unbind(), 0),
            "unbind_copy, 1000": lambda: torch.unbind_copy(shaped.view(torch.float32)),
            "views as another dtype, 1000": lambda: list(
                map(torch.Tensor.view, made, repeat(torch.float32))
            ),
            "foreach copy, 1000": lambda: torch._foreach_copy_(
                some, list(joined.view(torch.uint8).split(width * 4))
            ),
        }
        if "_foreach_clone" in dir(torch):
            sides["unbind and clone each, 1000"] = lambda: torch._foreach_clone(shaped.unbind())
        self.race("floors", sides, nbytes)

    def many(self) -> None:
        """30,000 tensors of 16 KiB."""
        state, nbytes = self.small_state()
        saves: dict[str, Side] = {
            "holdfast.torch.save": lambda: ht.save(state, self.path("h.pt"), durable=False),
            "torch.save": lambda: torch.save(state, self.path("t.pt")),
            "holdfast.save safetensors": lambda: holdfast.save(
                state, self.path("h.safetensors"), durable=False
            ),
            "save_file": lambda: save_file(state, self.path("t.safetensors")),
            "holdfast.save native": lambda: holdfast.save(
                state, self.path("h"), durable=False, overwrite=True
            ),
        }
        for side in saves.values():
            side()
        assert Path(self.path("h.pt")).stat().st_size == Path(self.path("t.pt")).stat().st_size
        same(torch.load(self.path("h.pt"), map_location=DEVICE), state)
        same(load_file(self.path("h.safetensors"), device=DEVICE), state)
        self.race("save", saves, nbytes)
        loads: dict[str, Side] = {
            "holdfast safetensors": lambda: read(self.path("t.safetensors")),
            "holdfast safetensors, checked": lambda: read(self.path("h.safetensors")),
            "load_file": lambda: load_file(self.path("t.safetensors"), device=DEVICE),
            "holdfast native, checked": lambda: read(self.path("h")),
        }
        slow: dict[str, Side] = {
            "holdfast.torch.load, checked": lambda: ht.load(self.path("t.pt"), map_location=DEVICE),
            "torch.load": lambda: torch.load(self.path("t.pt"), map_location=DEVICE),
            "torch.load(mmap=True)": lambda: torch.load(
                self.path("t.pt"), map_location=DEVICE, mmap=True
            ),
        }
        for side in (*loads.values(), *slow.values()):
            same(side(), state)
        self.race("load", loads, nbytes)
        self.race("load", slow, nbytes, min(self.rounds, 2))
        into = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
        ht.load_sharded(self.path("h"), into)
        same(into, state)
        self.race(
            "into", {"holdfast load_sharded": lambda: ht.load_sharded(self.path("h"), into)}, nbytes
        )
        sharded: dict[str, Side] = {
            "save_sharded native": lambda: ht.save_sharded(
                state, self.path("s"), durable=False, overwrite=True
            ),
            "save_sharded dcp": lambda: ht.save_sharded(
                state, self.path("d"), format="dcp", durable=False, overwrite=True
            ),
            "dcp.save": lambda: dcp.save(state, checkpoint_id=self.path("t")),
        }
        for side in sharded.values():
            side()
        same(read(self.path("s")), state)
        same(read(self.path("d")), state)
        self.race("save", sharded, nbytes, min(self.rounds, 2))
        self.stage(state, nbytes)

    def stage(self, state: State, nbytes: int) -> None:
        """Until the caller goes on, and until its stream does."""
        rows = {name: Row("stage", name, nbytes) for name in STAGES}
        ht.async_save_sharded(self.path("s"), state, overwrite=True, durable=False).wait()
        run = ht.Run(self.path("run"))
        for number in range(min(self.rounds, 3)):
            os.sync()
            settle()
            wall, cpu = time.perf_counter(), time.process_time()
            handle = ht.async_save_sharded(self.path("s"), state, overwrite=True, durable=False)
            rows["holdfast returns"].wall_s.append(time.perf_counter() - wall)
            rows["holdfast returns"].cpu_s.append(time.process_time() - cpu)
            torch.cuda.current_stream().synchronize() if DEVICE == "cuda" else None
            rows["holdfast"].wall_s.append(time.perf_counter() - wall)
            rows["holdfast"].cpu_s.append(time.process_time() - cpu)
            handle.wait()
            rows["holdfast done"].wall_s.append(time.perf_counter() - wall)
            rows["holdfast done"].cpu_s.append(time.process_time() - cpu)
            wall, cpu = time.perf_counter(), time.process_time()
            saved = run.async_save(number, state)
            rows["Run.async_save returns"].wall_s.append(time.perf_counter() - wall)
            rows["Run.async_save returns"].cpu_s.append(time.process_time() - cpu)
            saved.wait()
            rows["Run.async_save done"].wall_s.append(time.perf_counter() - wall)
            rows["Run.async_save done"].cpu_s.append(time.process_time() - cpu)
            wall, cpu = time.perf_counter(), time.process_time()
            future = dcp.async_save(state, checkpoint_id=self.path("d"))
            rows["dcp.async_save"].wall_s.append(time.perf_counter() - wall)
            rows["dcp.async_save"].cpu_s.append(time.process_time() - cpu)
            future.result()
        shutil.rmtree(self.path("run"))
        same(read(self.path("s")), state)
        for row in rows.values():
            print(row.shown(), flush=True)
        self.rows += rows.values()

    def large(self) -> None:
        """4.3 GB in 32 tensors, and the weights of a Llama in 218."""
        for label, state in self.large_states():
            self.race_large(label, state)

    def race_large(self, label: str, state: State) -> None:
        nbytes = sum(tensor.nbytes for tensor in state.values())
        save_file(state, self.path("t.safetensors"))
        holdfast.save(state, self.path("h.safetensors"), durable=False)
        loads: dict[str, Side] = {
            f"holdfast, {label}": lambda: read(self.path("t.safetensors")),
            f"holdfast checked, {label}": lambda: read(self.path("h.safetensors")),
            f"load_file, {label}": lambda: load_file(self.path("t.safetensors"), device=DEVICE),
        }
        for side in loads.values():
            same(side(), state)
        self.race("large", loads, nbytes)
        target = self.path("saved.pt")
        saves: dict[str, Side] = {
            f"holdfast.torch.save, {label}": lambda: ht.save(state, target, durable=False),
            f"torch.save, {label}": lambda: torch.save(state, target),
            f"holdfast.torch.save durable, {label}": lambda: ht.save(state, target),
        }
        self.race("large", saves, nbytes, 3)
        Path(target).unlink()
        sharded: dict[str, Side] = {
            f"save_sharded, {label}": lambda: ht.save_sharded(
                state, self.path("s"), durable=False, overwrite=True
            )
        }
        self.race("large", sharded, nbytes, 3)
        self.stage(state, nbytes)

    def small_state(self) -> tuple[State, int]:
        count = 1000 if self.quick else 30_000
        torch.manual_seed(0)
        state = {
            f"layers.{i // 50}.experts.{i % 50}.weight": torch.randn(64, 64, device=DEVICE)
            for i in range(count)
        }
        return state, sum(tensor.nbytes for tensor in state.values())

    def profile(self) -> None:
        """30,000 tensors of 16 KiB with other parameters, and the functions in which the time goes."""
        state, nbytes = self.small_state()
        holdfast.save(state, self.path("h.safetensors"), durable=False)
        holdfast.save(state, self.path("h"), durable=False, overwrite=True)
        self.write_floors(nbytes)
        for given in MANY_SAVES[:2] if self.quick else MANY_SAVES:
            name = shown(given)
            sides: dict[str, Side] = {
                f"torch.save: {name}": lambda: ht.save(state, self.path("h.pt"), durable=False),
                f"safetensors: {name}": lambda: holdfast.save(
                    state, self.path("x.safetensors"), durable=False
                ),
            }
            with parameters(given):
                self.race("save", sides, nbytes, min(self.rounds, 3))
        for given in MANY_LOADS[:2] if self.quick else MANY_LOADS:
            name = shown(given)
            sides = {
                f"safetensors: {name}": lambda: read(self.path("h.safetensors"), verify=False),
                f"safetensors, checked: {name}": lambda: read(self.path("h.safetensors")),
                f"pt, checked: {name}": lambda: ht.load(self.path("h.pt"), map_location=DEVICE),
            }
            with parameters(given):
                read(self.path("h.safetensors"))
                self.race("load", sides, nbytes, min(self.rounds, 3))
        into = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
        with parameters({"gatherers": 1}):
            functions("save", lambda: ht.save(state, self.path("h.pt"), durable=False))
        functions("load", lambda: read(self.path("h.safetensors")))
        functions("load_sharded", lambda: ht.load_sharded(self.path("h"), into))
        functions(
            "async_save_sharded",
            lambda: ht.async_save_sharded(self.path("s"), state, overwrite=True, durable=False),
        )

    def write_floors(self, nbytes: int) -> None:
        """What the file system takes for the same bytes."""
        block, path = np.ones(4 << 20, np.uint8).data, self.path("floor")

        def written(threads: int) -> None:
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
            try:
                os.posix_fallocate(file, 0, nbytes)
                shared(
                    range(0, nbytes, len(block)),
                    threads,
                    lambda start: os.pwrite(file, block, start),
                )
            finally:
                os.close(file)

        sides: dict[str, Side] = {
            f"pwrite, {n} threads": lambda n=n: written(n) for n in (1, 4, 16)
        }
        self.race("floors", sides, nbytes, min(self.rounds, 3))
        os.unlink(path)

    def sweep(self) -> None:
        """The same loads, checked and not, with other parameters."""
        for number, (label, state) in enumerate(self.large_states()):
            nbytes = sum(tensor.nbytes for tensor in state.values())
            holdfast.save(state, self.path("h.safetensors"), durable=False)
            del state
            if not number:
                self.read_floors(nbytes)
            for verify in (False, True):
                courses(
                    label, lambda verify=verify: read(self.path("h.safetensors"), verify=verify)
                )
            given = SWEEP if not number else FEW_SWEEPS
            for one in given[:2] if self.quick else given:
                self.race_with(one, label, nbytes)

    def read_floors(self, nbytes: int) -> None:
        """What the file and the bus give without us, through as many blocks as there are threads, and eight."""
        file = os.open(self.path("h.safetensors"), os.O_RDONLY)
        device = torch.empty(nbytes, dtype=torch.uint8, device=DEVICE)
        (lane,) = lanes([device.device]).values()

        def preads(
            blocks: Sequence[host.HostBlock], threads: int, size: int, *, summed: bool = False
        ) -> None:
            own = iter(blocks)
            mine: dict[int, memoryview] = {}

            def one(start: int) -> None:
                if threading.get_ident() not in mine:
                    mine[threading.get_ident()] = next(own).array.data
                memory = mine[threading.get_ident()]
                os.preadv(file, [memory[:size]], start)
                if summed:
                    crc.crc32(memory[:size])

            shared(range(0, nbytes, size), threads, one)

        def pumped(blocks: Sequence[host.HostBlock], threads: int, size: int) -> None:
            def put(full: Sequence[tuple[int, host.HostBlock]]) -> Mark:
                with lane.on():
                    targets = [device[start : start + size] for start, _ in full]
                    values = [
                        torch.from_numpy(block.array[: len(one)])
                        for (_, block), one in zip(full, targets, strict=True)
                    ]
                    torch._foreach_copy_(targets, values, non_blocking=True)
                    return lane.mark()

            def one(start: int, block: host.HostBlock) -> None:
                os.preadv(file, [block.array.data[:size]], start)

            pump(range(0, nbytes, size), blocks, threads=threads, read=one, put=put)

        sides: dict[str, Side] = {}
        kept = {size: [host.HostBlock(size << 20) for _ in range(32)] for size in (2, 4, 8, 16)}
        for threads, size in ((1, 8), (12, 8), (16, 16), (12, 4), (12, 2)):
            given = kept[size][: threads + 8], threads, size << 20
            sides[f"preadv, {threads} threads, {size} MiB"] = lambda given=given: preads(*given)
        for threads, size in ((8, 8), (12, 8), (16, 8), (8, 4), (12, 4), (12, 2), (16, 16)):
            given = kept[size][: threads + 8], threads, size << 20
            sides[f"preadv and the bus, {threads} threads, {size} MiB"] = lambda given=given: (
                pumped(*given)
            )
        summed = kept[8], 12, 8 << 20
        sides["preadv and a sum, 12 threads, 8 MiB"] = lambda: preads(*summed, summed=True)
        try:
            self.race("floors", sides, nbytes, min(self.rounds, 3))
        finally:
            os.close(file)
        for processes, size in ((16, 16 << 20), (12, 1 << 20)):
            speed = without_lock(self.path("h.safetensors"), nbytes, processes, size)
            print(
                f"floors  preadv, {processes} processes, {size >> 10} KiB: {speed:.1f} GB/s",
                flush=True,
            )

    def race_with(self, given: Mapping[str, int], label: str, nbytes: int) -> None:
        path, threads, name = self.path("h.safetensors"), given.get("readers"), shown(given)
        with parameters(given):
            read(path, threads=threads)
            sides: dict[str, Side] = {
                f"{label}: {name}": lambda: read(path, threads=threads, verify=False),
                f"{label}, checked: {name}": lambda: read(path, threads=threads),
            }
            self.race("sweep", sides, nbytes, min(self.rounds, 3))

    def large_states(self) -> Iterator[tuple[str, State]]:
        torch.manual_seed(0)
        few, layers = (2, 1) if self.quick else (32, 24)
        yield (
            f"{few} tensors",
            {f"w{i}": torch.randn(1 << 26, device=DEVICE).to(torch.bfloat16) for i in range(few)},
        )
        shapes: dict[str, tuple[int, ...]] = {
            f"{name}.weight": (2048, 2048) for name in ("q", "k", "v", "o")
        }
        shapes |= {
            "up.weight": (5632, 2048),
            "gate.weight": (5632, 2048),
            "down.weight": (2048, 5632),
        }
        shapes |= {"norm1.weight": (2048,), "norm2.weight": (2048,)}
        made: dict[str, tuple[int, ...]] = {
            "embedding.weight": (32_000, 2048),
            "head.weight": (32_000, 2048),
        }
        made |= {
            f"layers.{i}.{name}": shape for i in range(layers) for name, shape in shapes.items()
        }
        yield (
            f"a Llama of {len(made)}",
            {
                name: torch.randn(shape, dtype=torch.bfloat16, device=DEVICE)
                for name, shape in made.items()
            },
        )


@contextmanager
def parameters(given: Mapping[str, int]) -> Iterator[None]:
    """Loads and saves with these parameters instead of the usual ones."""
    before = [getattr(module, name) for module, name, _, _ in PLACES]
    host.POOL.free()
    for module, name, key, unit in PLACES:
        if key in given:
            setattr(module, name, given[key] * unit)
    try:
        yield
    finally:
        host.POOL.free()
        for (module, name, _, _), value in zip(PLACES, before, strict=True):
            setattr(module, name, value)


def shown(given: Mapping[str, int]) -> str:
    return ", ".join(f"{key} {value}" for key, value in given.items()) or "as it is"


def shared(work: Iterable[int], threads: int, one: Callable[[int], object]) -> None:
    """Do something with each, on so many threads."""
    turn, waiting = threading.Lock(), iter(work)

    def run() -> None:
        while True:
            with turn:
                item = next(waiting, None)
            if item is None:
                return
            one(item)

    crew = [threading.Thread(target=run) for _ in range(threads)]
    for thread in crew:
        thread.start()
    for thread in crew:
        thread.join()


def courses(label: str, side: Side) -> None:
    """What the threads of a load do: how long readers read, and on a processor; how long the caller starts copies, and waits."""
    spent: dict[str, float] = dict.fromkeys(
        ("all", "pump", "first", "read", "read cpu", "put", "land", "readers", "tasks", "puts"), 0.0
    )
    before = gpu_load.pump

    class Timed:
        def __init__(self, mark: Mark) -> None:
            self._mark = mark

        def query(self) -> bool:
            return self._mark.query()

        def synchronize(self) -> None:
            begin = time.perf_counter()
            self._mark.synchronize()
            spent["land"] += time.perf_counter() - begin

    def timed_pump(tasks, blocks, *, threads, read, put):
        began = time.perf_counter()
        reads: list[tuple[float, float]] = []

        def timed_read(task, block):
            wall, cpu = time.perf_counter(), time.thread_time()
            read(task, block)
            reads.append((time.perf_counter() - wall, time.thread_time() - cpu))

        def timed_put(full):
            begin = time.perf_counter()
            spent["first"] = spent["first"] or begin - began
            spent["puts"] += 1
            mark = put(full)
            spent["put"] += time.perf_counter() - begin
            return Timed(mark)

        before(tasks, blocks, threads=threads, read=timed_read, put=timed_put)
        spent["pump"] += time.perf_counter() - began
        spent["read"], spent["read cpu"] = (
            sum(wall for wall, _ in reads),
            sum(cpu for _, cpu in reads),
        )
        spent["readers"], spent["tasks"] = threads, len(reads)

    side()
    gpu_load.pump = timed_pump
    try:
        spent["all"] = timed(side)[0]
    finally:
        gpu_load.pump = before
    idle = spent["pump"] * spent["readers"] - spent["read"]
    shown = {
        name: round(value * 1e3, 1)
        for name, value in spent.items()
        if name not in ("readers", "tasks", "puts")
    }
    counts = ", ".join(f"{spent[name]:.0f} {name}" for name in ("readers", "tasks", "puts"))
    print(f"courses {label}, ms: {shown}, readers' waits {idle * 1e3:.1f}; {counts}", flush=True)


READER = """
import os, sys, time
path, number, processes, nbytes, size = sys.argv[1], *map(int, sys.argv[2:])
file, memory = os.open(path, os.O_RDONLY), bytearray(size)
share = nbytes // processes // size * size
sys.stdin.readline()
begin = time.perf_counter()
done = 0
while time.perf_counter() - begin < 0.5:
    done += os.preadv(file, [memory], number * share + done % share)
print(done / (time.perf_counter() - begin))
"""


def without_lock(path: str, nbytes: int, processes: int, size: int) -> float:
    """GB/s that processes read together, each into one piece of memory of this size: no interpreter lock is between them."""
    given = [str(processes), str(nbytes), str(size)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    crew = [
        subprocess.Popen([sys.executable, "-c", READER, path, str(n), *given], **pipes)
        for n in range(processes)
    ]
    time.sleep(0.3)
    for one in crew:
        one.stdin.write("go\n")
        one.stdin.flush()
    return sum(float(one.communicate()[0]) for one in crew) / 1e9


def functions(what: str, side: Callable[[], object]) -> None:
    """Where the caller's thread spends its time. What goes on in the background afterwards is waited for."""
    wait_for(side())
    profiler = cProfile.Profile()
    settle()
    wall = time.perf_counter()
    made = profiler.runcall(side)
    settle()
    out = io.StringIO()
    pstats.Stats(profiler, stream=out).sort_stats("tottime").print_stats(22)
    rows = [line[:150] for line in out.getvalue().splitlines() if line.strip()]
    print(
        f"{what}: {time.perf_counter() - wall:.3f} s under the profiler",
        *rows[2:],
        sep="\n",
        flush=True,
    )
    wait_for(made)


def wait_for(made: object) -> None:
    if isinstance(made, ht.SaveHandle):
        made.wait()


def read(path: str, *, threads: int | None = None, verify: bool = True) -> State:
    with ht.open(path, threads=threads, verify=verify) as checkpoint:
        return checkpoint.read(device=DEVICE)


def same(found: object, state: State) -> None:
    """Stop where a load did not give what was saved, or gave two tensors one storage."""
    assert isinstance(found, Mapping)
    assert set(found) == set(state), "names differ"
    joined = [
        torch.cat([source[name].reshape(-1).view(torch.uint8) for name in state])
        for source in (found, state)
    ]
    assert all(
        found[name].shape == tensor.shape and found[name].dtype == tensor.dtype
        for name, tensor in state.items()
    )
    assert torch.equal(*joined), "bits differ"
    assert len({tensor.untyped_storage().data_ptr() for tensor in found.values()}) == len(state), (
        "storages are shared"
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.many_cuda", description="Many small tensors on a GPU."
    )
    parser.add_argument(
        "--part", choices=PARTS, action="append", help="only this part (may be given several times)"
    )
    parser.add_argument(
        "--rounds", type=int, default=5, help="measured rounds of each side (default: 5)"
    )
    parser.add_argument("--quick", action="store_true", help="small and once")
    parser.add_argument("--json", type=Path, help="where all figures go")
    parser.add_argument(
        "--device",
        choices=("cuda", "cpu"),
        default="cuda",
        help="cpu: a rehearsal, whose figures mean nothing",
    )
    asked = parser.parse_args()
    global DEVICE
    DEVICE = asked.device
    if DEVICE == "cuda" and not torch.cuda.is_available():
        print("there is no GPU here", file=sys.stderr)
        return 2
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    folder = Path(tempfile.mkdtemp(prefix="holdfast-cuda-"))
    bench = Bench(folder, 1 if asked.quick else asked.rounds, quick=asked.quick)
    machine = {
        "gpu": torch.cuda.get_device_name() if DEVICE == "cuda" else "none",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "load": os.getloadavg(),
    }
    print(machine, flush=True)
    try:
        for part in asked.part or PARTS:
            getattr(bench, part)()
            if asked.json:
                asked.json.write_text(
                    json.dumps(
                        {"machine": machine, "rows": [asdict(row) for row in bench.rows]}, indent=1
                    )
                )
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
