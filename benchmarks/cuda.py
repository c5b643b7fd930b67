"""`python -m benchmarks.cuda`: files to a GPU and back, beside torch, safetensors and DCP, on a machine that has one.

    python -m benchmarks.cuda                       everything, about fifteen minutes
    python -m benchmarks.cuda --part load --gb 8    one part of: load, cold, save, stage, loop
    python -m benchmarks.cuda --quick               small and once: does everything run?

Sides of a part run in turn, round by round, loads after one unmeasured round each; what counts is the median. What that first
round loaded is compared with what was saved, bit by bit. A round ends when the GPU has everything (`torch.cuda.synchronize`).
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

import holdfast
import holdfast.torch as ht
from holdfast.torch.cuda.host import POOL
from holdfast.torch.cuda.stage import ROOM

State = dict[str, torch.Tensor]
Side = Callable[[], object]
FORMATS = {
    "safetensors": ("safetensors", "runai"),
    "pt": (".pt", "torch.load"),
    "native": ("native",),
    "dcp": ("DCP", "dcp"),
}
"""Formats that are loaded, and the words by which their sides are known."""

PARTS = ("load", "cold", "save", "stage", "loop")
WIDTH, HIDDEN, WORDS = 2048, 5632, 32_000


@dataclass
class Row:
    """One side of one part."""

    part: str
    side: str
    seconds: list[float]
    nbytes: int
    ratios: dict[str, float] = field(default_factory=dict)
    """How many times faster than a peer."""

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def speed(self) -> float:
        return self.nbytes / self.median / 1e9


def weights(nbytes: int, device: str = "cuda") -> State:
    """The weights of a transformer of about this size, in bfloat16."""
    torch.manual_seed(0)
    shapes = {f"{name}.weight": (WIDTH, WIDTH) for name in ("q", "k", "v", "o")}
    shapes |= {
        "up.weight": (HIDDEN, WIDTH),
        "gate.weight": (HIDDEN, WIDTH),
        "down.weight": (WIDTH, HIDDEN),
    }
    shapes |= {"norm1.weight": (WIDTH,), "norm2.weight": (WIDTH,)}
    layer = sum(2 * torch.Size(shape).numel() for shape in shapes.values())
    made = {"embedding.weight": (WORDS, WIDTH)}
    made |= {
        f"layers.{i}.{name}": shape
        for i in range(max(1, round(nbytes / layer)))
        for name, shape in shapes.items()
    }
    return {
        name: torch.randn(shape, dtype=torch.bfloat16, device=device)
        for name, shape in made.items()
    }


def size(state: Mapping[str, torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in state.values())


def same(found: object, state: State) -> None:
    """Stop where a load did not give what was saved."""
    assert isinstance(found, Mapping)
    assert set(found) == set(state), "names differ"
    for name, tensor in state.items():
        assert found[name].device == tensor.device, name
        assert torch.equal(found[name].view(torch.int16), tensor.view(torch.int16)), name


def timed(side: Side) -> tuple[float, object]:
    gc.collect()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    result = side()
    torch.cuda.synchronize()
    return time.perf_counter() - begin, result


def race(
    part: str,
    sides: Mapping[str, Side],
    nbytes: int,
    rounds: int,
    check: Callable[[object], None] | None = None,
) -> list[Row]:
    """Time every side, in turn. Where there is a `check`, it sees the result of an unmeasured round of each."""
    rows = {name: Row(part, name, [], nbytes) for name in sides}
    for name in sides if check is not None else ():
        try:
            check(timed(sides[name])[1])
        except (
            Exception
        ) as error:  # a peer that does not run here is left out, and the table says why
            if name.startswith("holdfast"):
                raise
            print(f"  {name}: left out, {type(error).__name__}: {str(error)[:200]}", flush=True)
            del rows[name]
    for _ in range(rounds):
        for name in rows:
            rows[name].seconds.append(timed(sides[name])[0])
    for row in rows.values():
        print(
            f"  {row.part:6} {row.side:44} {row.median * 1e3:9.1f} ms {row.speed:7.2f} GB/s",
            flush=True,
        )
    return list(rows.values())


class Bench:
    """The files of a run, and its parts."""

    def __init__(self, folder: Path, nbytes: int, rounds: int, formats: Sequence[str] = ()) -> None:
        self.folder, self.rounds = folder, rounds
        self.formats = formats or tuple(FORMATS)
        self.flushed = True
        self.state = weights(nbytes)
        self.nbytes = size(self.state)
        self.rows: list[Row] = []
        self.notes: list[str] = []

    def path(self, name: str) -> str:
        return str(self.folder / name)

    def write_files(self) -> None:
        """One checkpoint of each kind, by its own library; and by Holdfast where checksums are recorded."""
        if "safetensors" in self.formats:
            save_file(self.state, self.path("peer.safetensors"))
            holdfast.save(self.state, self.path("ours.safetensors"), durable=False)
        if "pt" in self.formats:
            torch.save(self.state, self.path("peer.pt"))
        if "dcp" in self.formats:
            dcp.save(self.state, checkpoint_id=self.path("peer.dcp"))
        if "native" in self.formats:
            holdfast.save(self.state, self.path("native"), durable=False)

    def loads(self) -> dict[str, Side]:
        into = {name: torch.empty_like(tensor) for name, tensor in self.state.items()}
        again = {name: torch.empty_like(tensor) for name, tensor in self.state.items()}

        def read(name: str, *, verify: bool) -> Side:
            def run() -> object:
                with ht.open(self.path(name), verify=verify) as checkpoint:
                    return checkpoint.read(device="cuda")

            return run

        def sharded(name: str, *, verify: bool) -> Side:
            def run() -> object:
                ht.load_sharded(self.path(name), into, verify=verify)
                return into

            return run

        def peer_dcp() -> object:
            dcp.load(again, checkpoint_id=self.path("peer.dcp"))
            return again

        pt = self.path("peer.pt")
        sides: dict[str, Side] = {
            "holdfast safetensors": read("peer.safetensors", verify=False),
            "holdfast safetensors, checked": read("ours.safetensors", verify=True),
            "holdfast .pt": lambda: ht.load(pt, map_location="cuda", verify=False),
            "holdfast .pt, checked": lambda: ht.load(pt, map_location="cuda"),
            "holdfast native": read("native", verify=False),
            "holdfast native, checked": read("native", verify=True),
            "holdfast DCP": sharded("peer.dcp", verify=False),
            "holdfast DCP, checked": sharded("peer.dcp", verify=True),
            "safetensors load_file": lambda: load_file(
                self.path("peer.safetensors"), device="cuda"
            ),
            "torch.load(mmap=True)": lambda: torch.load(pt, map_location="cuda", mmap=True),
            "torch.load": lambda: torch.load(pt, map_location="cuda"),
            "dcp.load": peer_dcp,
            "fastsafetensors": lambda: fast(self.path("peer.safetensors")),
            "runai-model-streamer": lambda: runai(self.path("peer.safetensors")),
        }
        words = [word for name in self.formats for word in FORMATS[name]]
        return {name: side for name, side in sides.items() if any(word in name for word in words)}

    def load(self) -> None:
        rows = race(
            "load", self.loads(), self.nbytes, self.rounds, lambda result: same(result, self.state)
        )
        self.compare(rows)
        self.notes.append(f"page-locked memory kept after the loads: {POOL.kept_nbytes >> 20} MiB")

    def cold(self) -> None:
        """Once each, with nothing of the files in the page cache."""
        keep = (
            "holdfast safetensors",
            "holdfast .pt, checked",
            "safetensors load_file",
            "torch.load(mmap=True)",
            "torch.load",
        )
        sides = self.loads()
        rows = []
        for name in (each for each in (*keep, *reversed(keep)) if each in sides):
            forget(self.folder)
            rows.append(Row("cold", name, [timed(sides[name])[0]], self.nbytes))
            print(
                f"  cold   {name:44} {rows[-1].median * 1e3:9.1f} ms {rows[-1].speed:7.2f} GB/s",
                flush=True,
            )
        self.rows += rows

    def save(self) -> None:
        target = self.path("saved")

        def plain(write: Callable[[str], object], *, sync: bool = False) -> Side:
            def run() -> object:
                write(target)
                if sync:
                    flush(target)
                return None

            return run

        sides: dict[str, Side] = {
            "holdfast.torch.save": plain(lambda p: ht.save(self.state, p, durable=False)),
            "holdfast.save safetensors": plain(
                lambda p: holdfast.save(self.state, p, format="safetensors", durable=False)
            ),
            "holdfast save_sharded": plain(
                lambda p: ht.save_sharded(p + ".native", self.state, overwrite=True, durable=False)
            ),
            "torch.save": plain(lambda p: torch.save(self.state, p)),
            "save_file": plain(lambda p: save_file(self.state, p)),
            "holdfast.torch.save, durable": plain(lambda p: ht.save(self.state, p)),
            "torch.save + fsync": plain(lambda p: torch.save(self.state, p), sync=True),
            "holdfast save_sharded DCP, durable": plain(
                lambda p: ht.save_sharded(p + ".dcp", self.state, format="dcp", overwrite=True)
            ),
            "dcp.save": plain(lambda p: dcp.save(self.state, checkpoint_id=p + ".peer")),
        }
        if not self.flushed:
            sides = {
                name: side
                for name, side in sides.items()
                if not any(w in name for w in ("durable", "fsync", "dcp"))
            }
        self.compare(race("save", sides, self.nbytes, self.rounds))
        ht.save(self.state, target)
        same(torch.load(target, map_location="cuda"), self.state)
        if self.flushed:
            same(ht.open(target + ".dcp").read(device="cuda"), self.state)
        same(ht.open(target + ".native").read(device="cuda"), self.state)
        for name in ("saved", "saved.native", "saved.dcp", "saved.peer"):
            remove(self.path(name))

    def stage(self) -> None:
        """How long the caller stands still, and how long its GPU does."""
        locked = {
            name: torch.empty_like(tensor, device="cpu", pin_memory=True)
            for name, tensor in self.state.items()
        }

        def raw() -> None:
            for name, tensor in self.state.items():
                locked[name].copy_(tensor, non_blocking=True)

        first = time.perf_counter()
        ht.async_save_sharded(self.path("staged"), self.state, overwrite=True, durable=False).wait()
        self.notes.append(
            f"first background save, locking its memory included: {time.perf_counter() - first:.2f} s"
        )
        rows = {
            name: Row("stage", name, [], self.nbytes)
            for name in ("raw copy", "holdfast", "holdfast returns", "dcp.async_save")
        }
        for _ in range(self.rounds):
            os.sync()  # what the round before has written must not be on its way to the disk
            rows["raw copy"].seconds.append(timed(raw)[0])
            torch.cuda.synchronize()
            begin = time.perf_counter()
            handle = ht.async_save_sharded(
                self.path("staged"), self.state, overwrite=True, durable=False
            )
            rows["holdfast returns"].seconds.append(time.perf_counter() - begin)
            torch.cuda.current_stream().synchronize()  # which waits for the copies
            rows["holdfast"].seconds.append(time.perf_counter() - begin)
            handle.wait()
            torch.cuda.synchronize()
            begin = time.perf_counter()
            future = dcp.async_save(self.state, checkpoint_id=self.path("staged.peer"))
            rows["dcp.async_save"].seconds.append(time.perf_counter() - begin)
            future.result()
        for row in rows.values():
            print(
                f"  stage  {row.side:44} {row.median * 1e3:9.1f} ms {row.speed:7.2f} GB/s",
                flush=True,
            )
        locked_nbytes = ROOM.take(0, gpu=False).locked_nbytes
        self.notes.append(
            f"page-locked: {locked_nbytes >> 20} MiB for staging {self.nbytes >> 20} MiB, {POOL.kept_nbytes >> 20} MiB of blocks"
        )
        same(ht.open(self.path("staged")).read(device="cuda"), self.state)
        self.compare(list(rows.values()))
        for name in ("staged", "staged.peer"):
            remove(self.path(name))

    def loop(self) -> None:
        """A training loop that saves every 20 steps, beside one that never does."""
        from benchmarks.cuda_loop import run_loop

        steps = 40
        found: dict[str, list[float]] = {}
        for number in range(self.rounds):
            # The peer takes so much longer that two rounds of it are enough.
            for how in ("never", "holdfast", *(["dcp.async_save"] if number < 2 else [])):
                found.setdefault(how, []).append(run_loop(how, self.path("loop"), steps))
                print(
                    f"  loop   {how:44} {found[how][-1] / steps * 1e3:9.2f} ms a step", flush=True
                )
        rows = [Row("loop", how, seconds, 0) for how, seconds in found.items()]
        base = rows[0].median
        for row in rows:
            row.ratios["part of the speed without saving"] = base / row.median
            print(
                f"  loop   {row.side:44} {row.median / steps * 1e3:9.2f} ms a step, {base / row.median:.1%}",
                flush=True,
            )
        self.rows += rows

    def compare(self, rows: list[Row]) -> None:
        for row in rows:
            if row.side.startswith("holdfast"):
                row.ratios = {
                    other.side: other.median / row.median
                    for other in rows
                    if not other.side.startswith("holdfast")
                }
        self.rows += rows


def fast(path: str) -> State:
    """fastsafetensors, as its README loads one file on one GPU."""
    from fastsafetensors import SafeTensorsFileLoader, SingleGroup

    loader = SafeTensorsFileLoader(SingleGroup(), torch.device("cuda:0"), nogds=True)
    loader.add_filenames({0: [path]})
    buffers = loader.copy_files_to_device()
    found = {name: buffers.get_tensor(name).clone() for name in loader.get_keys()}
    buffers.close()
    loader.close()
    return found


def runai(path: str) -> State:
    """runai-model-streamer, as its README reads one file; tensors go to the GPU as they come."""
    from runai_model_streamer import SafetensorsStreamer

    with SafetensorsStreamer() as streamer:
        streamer.stream_file(path)
        return {name: tensor.to("cuda") for name, tensor in streamer.get_tensors()}


def flush(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def remove(path: str) -> None:
    shutil.rmtree(path) if os.path.isdir(path) else Path(path).unlink(missing_ok=True)


def forget(folder: Path) -> None:
    """Take the files of a folder out of the page cache."""
    os.sync()
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.cuda", description="Holdfast on a GPU."
    )
    parser.add_argument(
        "--part", choices=PARTS, action="append", help="only this part (may be given several times)"
    )
    parser.add_argument("--gb", type=float, default=4.0, help="10^9 bytes of weights (default: 4)")
    parser.add_argument(
        "--format",
        choices=tuple(FORMATS),
        action="append",
        help="loads: only this format (may be repeated)",
    )
    parser.add_argument(
        "--quick-save",
        action="store_true",
        help="saves: only those that are not flushed to the disk",
    )
    parser.add_argument(
        "--rounds", type=int, default=5, help="measured rounds of each side (default: 5)"
    )
    parser.add_argument("--quick", action="store_true", help="small files and one round")
    parser.add_argument("--json", type=Path, help="where all figures go")
    asked = parser.parse_args()
    if not torch.cuda.is_available():
        print("there is no GPU here", file=sys.stderr)
        return 2
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    folder = Path(tempfile.mkdtemp(prefix="holdfast-cuda-"))
    try:
        bench = Bench(
            folder,
            int((0.2 if asked.quick else asked.gb) * 1e9),
            1 if asked.quick else asked.rounds,
            asked.format or (),
        )
        bench.flushed = not asked.quick_save
        print(
            f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {os.cpu_count()} cores, {bench.nbytes / 1e9:.2f} GB",
            flush=True,
        )
        parts = asked.part or PARTS
        if {"load", "cold"} & set(parts):
            bench.write_files()
        for part in parts:
            getattr(bench, part)()
            if asked.json:
                asked.json.write_text(
                    json.dumps({"rows": [asdict(row) for row in bench.rows], "notes": bench.notes})
                )
        print("\n".join(bench.notes))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
