"""`python -m benchmarks.gpu_load`: loads to a GPU and saves from it, each beside its peers. Under five minutes.

    python -m benchmarks.gpu_load                            all parts
    python -m benchmarks.gpu_load --part model               one of: model, save, sharded, background, large
    python -m benchmarks.gpu_load --device cpu --quick       small, once, without a GPU: does everything run?
    python -m benchmarks.gpu_load --json OUT                 write all figures, and a description of the machine

`model` loads the weights of a Qwen3 with 1.7 billion parameters (311 tensors, 4.06 GB) from safetensors and `.pt`, with
and without comparing checksums, and measures the speed of the bus. `large` has 32 tensors of 134 MB, the other parts
have 30,000 tensors of 16 KiB. Sides run in turn, and the median counts. Peers that take seconds run once. Before the
measured rounds, every loaded file is compared with the state that was saved.

The peers of safetensors files are `load_file` and, where the installed safetensors has it, `safe_open(...).prefetch`.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import holdfast
import holdfast.torch as ht

DEVICE = "cuda"
State = dict[str, torch.Tensor]
Side = Callable[[], object]
PARTS = ("model", "save", "sharded", "background", "large")


@dataclass
class Row:
    """One side of one part."""

    part: str
    side: str
    nbytes: int
    seconds: list[float] = field(default_factory=list)

    def shown(self) -> str:
        median = statistics.median(self.seconds)
        return f"{self.part:10} {self.side:40} {median * 1e3:9.1f} ms {self.nbytes / median / 1e9:7.2f} GB/s"


def timed(side: Side) -> tuple[float, object]:
    gc.collect()
    settle()
    begin = time.perf_counter()
    result = side()
    settle()
    return time.perf_counter() - begin, result


def settle() -> None:
    """Wait for the GPU."""
    if DEVICE == "cuda":
        torch.cuda.synchronize()


class Bench:
    """The files of a run, its sizes, and what was measured."""

    def __init__(self, folder: Path, rounds: int, *, quick: bool) -> None:
        self.folder, self.rounds, self.quick = folder, rounds, quick
        self.rows: list[Row] = []
        self._small: State = {}

    def path(self, name: str) -> str:
        return str(self.folder / name)

    def race(
        self, part: str, sides: Mapping[str, Side], nbytes: int, rounds: int | None = None
    ) -> dict[str, Row]:
        rows = {name: Row(part, name, nbytes) for name in sides}
        for _ in range(rounds or self.rounds):
            for name, side in sides.items():
                seconds, made = timed(side)
                rows[name].seconds.append(seconds)
                del made
        self.rows += rows.values()
        return rows

    def show(self, rows: Mapping[str, Row]) -> None:
        for row in rows.values():
            print(row.shown(), flush=True)

    def model(self) -> None:
        """A Qwen-like model to the GPU."""
        state = self.weights()
        nbytes = sum(tensor.nbytes for tensor in state.values())
        save_file(state, self.path("m.safetensors"))
        holdfast.save(state, self.path("h.safetensors"), durable=False)
        ht.save(state, self.path("m.pt"), durable=False)
        locked = torch.empty(64 << 20, dtype=torch.uint8, pin_memory=DEVICE == "cuda")
        device = torch.empty(min(nbytes, 4 << 30), dtype=torch.uint8, device=DEVICE)

        def bus() -> None:
            for start in range(0, len(device) - len(locked) + 1, len(locked)):
                device[start : start + len(locked)].copy_(locked, non_blocking=True)

        pt = self.path("m.pt")
        sides: dict[str, Side] = {
            "holdfast safetensors": lambda: read(self.path("m.safetensors"), verify=False),
            "holdfast safetensors, checked": lambda: read(self.path("h.safetensors")),
            "holdfast .pt": lambda: ht.load(pt, map_location=DEVICE, verify=False),
            "holdfast .pt, checked": lambda: ht.load(pt, map_location=DEVICE),
        }
        sides |= peer_loads(self.path("m.safetensors"))
        for side in sides.values():
            same(side(), state)
        del state
        bus()
        floor = self.race(
            "model",
            {"bus, from page-locked memory": bus},
            len(device) // len(locked) * len(locked),
            3,
        )
        rows = self.race("model", sides, nbytes, max(self.rounds, 2) * 2)
        self.show(floor | rows)

    def save(self) -> None:
        """Many small tensors to one file."""
        state, nbytes = self.small()
        sides: dict[str, Side] = {
            "holdfast.save safetensors": lambda: holdfast.save(
                state, self.path("s.safetensors"), durable=False
            ),
            "holdfast.save .pt": lambda: holdfast.save(state, self.path("s.pt"), durable=False),
            "safetensors save_file": lambda: save_file(state, self.path("p.safetensors")),
            "torch.save": lambda: torch.save(state, self.path("p.pt")),
        }
        sides["holdfast.save safetensors"]()
        self.show(self.race("save", sides, nbytes, 2))
        loads: dict[str, Side] = {
            "holdfast safetensors, checked": lambda: read(self.path("s.safetensors")),
            "holdfast.torch.load, checked": lambda: ht.load(self.path("s.pt"), map_location=DEVICE),
            "holdfast safetensors": lambda: read(self.path("p.safetensors"), verify=False),
        }
        loads |= peer_loads(self.path("p.safetensors"))
        for side in loads.values():
            same(side(), state)
        rows = self.race("load", loads, nbytes)
        self.show(rows)
        self.show(
            self.race(
                "load",
                {"torch.load": lambda: torch.load(self.path("p.pt"), map_location=DEVICE)},
                nbytes,
                1,
            )
        )

    def sharded(self) -> None:
        """Many small tensors by ranks, of which there is one."""
        state, nbytes = self.small()
        native, ours, peer = self.path("native"), self.path("ours.dcp"), self.path("peer.dcp")
        ht.save_sharded(native, state, durable=False)
        saves: dict[str, Side] = {
            "save_sharded native": lambda: ht.save_sharded(
                native, state, overwrite=True, durable=False
            ),
            "save_sharded dcp": lambda: ht.save_sharded(
                ours, state, format="dcp", overwrite=True, durable=False
            ),
        }
        self.show(self.race("sharded", saves, nbytes, 2))
        self.show(
            self.race(
                "sharded", {"dcp.save": lambda: dcp.save(state, checkpoint_id=peer)}, nbytes, 1
            )
        )
        into = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
        for path in (native, ours, peer):
            ht.load_sharded(path, into)
            same(into, state)
        loads: dict[str, Side] = {
            "load_sharded native": lambda: ht.load_sharded(native, into),
            "load_sharded of dcp.save": lambda: ht.load_sharded(peer, into),
        }
        rows = self.race("sharded", loads, nbytes, 2)
        self.show(rows)
        self.show(
            self.race(
                "sharded", {"dcp.load": lambda: dcp.load(into, checkpoint_id=peer)}, nbytes, 1
            )
        )
        for path in (native, ours, peer):
            shutil.rmtree(path)

    def background(self) -> None:
        """How long the caller stands still, and when all is written."""
        state, nbytes = self.small()
        run = ht.Run(self.path("run"), durable=False)
        steps = iter(range(1, 100))
        self.standing(
            "background", "Run.async_save", lambda: run.async_save(next(steps), state), nbytes
        )
        self.peer_in_background("background", state, nbytes)
        shutil.rmtree(self.path("run"))

    def large(self) -> None:
        """4.3 GB in 32 tensors: loads, saves, and saves in the background."""
        count = 2 if self.quick else 32
        state = {
            f"w{i}": torch.randn(1 << 20 if self.quick else 1 << 25, device=DEVICE)
            for i in range(count)
        }
        nbytes = sum(tensor.nbytes for tensor in state.values())
        path, run, steps = (
            self.path("large"),
            ht.Run(self.path("runs"), durable=False),
            iter(range(1, 100)),
        )
        ours, peers, pt = self.path("l.safetensors"), self.path("p.safetensors"), self.path("l.pt")
        holdfast.save(state, ours, durable=False)
        save_file(state, peers)
        ht.save(state, pt, durable=False)
        loads: dict[str, Side] = {
            "holdfast safetensors": lambda: read(peers, verify=False),
            "holdfast safetensors, checked": lambda: read(ours),
            "holdfast .pt": lambda: ht.load(pt, map_location=DEVICE, verify=False),
        }
        loads |= peer_loads(peers)
        for side in loads.values():
            same(side(), state)
        self.show(self.race("large", loads, nbytes))
        ht.save_sharded(path, state, durable=False)
        sides: dict[str, Side] = {
            "holdfast.save safetensors": lambda: holdfast.save(state, ours, durable=False),
            "save_sharded": lambda: ht.save_sharded(path, state, overwrite=True, durable=False),
        }
        self.show(self.race("large", sides, nbytes, 2))
        self.standing(
            "large",
            "async_save_sharded",
            lambda: ht.async_save_sharded(path, state, overwrite=True, durable=False),
            nbytes,
        )
        self.show(self.race("large", {"Run.save": lambda: run.save(next(steps), state)}, nbytes, 1))
        shutil.rmtree(self.path("runs"))
        self.peer_in_background("large", state, nbytes)

    def standing(
        self, part: str, name: str, begin: Callable[[], ht.SaveHandle], nbytes: int
    ) -> None:
        """A background save, with one before it that is not measured: it makes the room."""
        begin().wait()
        stands, done = (
            Row(part, f"{name}: caller stands still", nbytes),
            Row(part, f"{name}: done", nbytes),
        )
        for _ in range(2):
            os.sync()
            settle()
            gc.collect()
            start = time.perf_counter()
            handle = begin()
            stands.seconds.append(time.perf_counter() - start)
            handle.wait()
            done.seconds.append(time.perf_counter() - start)
        self.rows += [stands, done]
        self.show({"stands": stands, "done": done})

    def peer_in_background(self, part: str, state: State, nbytes: int) -> None:
        stands, done = (
            Row(part, "dcp.async_save: caller stands still", nbytes),
            Row(part, "dcp.async_save: done", nbytes),
        )
        settle()
        start = time.perf_counter()
        future = dcp.async_save(state, checkpoint_id=self.path("peer.async"))
        stands.seconds.append(time.perf_counter() - start)
        future.result()
        done.seconds.append(time.perf_counter() - start)
        self.rows += [stands, done]
        self.show({"stands": stands, "done": done})
        shutil.rmtree(self.path("peer.async"))

    def small(self) -> tuple[State, int]:
        if not self._small:
            torch.manual_seed(0)
            count = 1000 if self.quick else 30_000
            self._small = {
                f"layers.{i // 50}.experts.{i % 50}.weight": torch.randn(64, 64, device=DEVICE)
                for i in range(count)
            }
        return self._small, sum(tensor.nbytes for tensor in self._small.values())

    def weights(self) -> State:
        width, hidden, words, layers = (
            (64, 192, 1000, 4) if self.quick else (2048, 6144, 151_936, 28)
        )
        torch.manual_seed(0)
        shapes: dict[str, tuple[int, ...]] = {
            "model.embed_tokens.weight": (words, width),
            "lm_head.weight": (words, width),
        }
        for i in range(layers):
            block = f"model.layers.{i}."
            for name in ("q_proj", "o_proj"):
                shapes[f"{block}self_attn.{name}.weight"] = (width, width)
            for name in ("k_proj", "v_proj"):
                shapes[f"{block}self_attn.{name}.weight"] = (width // 2, width)
            for name in ("q_norm", "k_norm"):
                shapes[f"{block}self_attn.{name}.weight"] = (128,)
            shapes |= {f"{block}mlp.{name}_proj.weight": (hidden, width) for name in ("gate", "up")}
            shapes[f"{block}mlp.down_proj.weight"] = (width, hidden)
            shapes |= {
                f"{block}{name}_layernorm.weight": (width,) for name in ("input", "post_attention")
            }
        shapes["model.norm.weight"] = (width,)
        return {
            name: torch.randn(shape, dtype=torch.bfloat16, device=DEVICE)
            for name, shape in shapes.items()
        }


def read(path: str, *, verify: bool = True) -> State:
    with ht.open(path, verify=verify) as checkpoint:
        return checkpoint.read(device=DEVICE)


def peer_loads(path: str) -> dict[str, Side]:
    """Return how safetensors itself loads a file to the device."""
    loads: dict[str, Side] = {"safetensors load_file": lambda: load_file(path, device=DEVICE)}
    if DEVICE == "cuda" and hasattr(safe_open, "prefetch"):
        loads["safetensors prefetch, 8 threads"] = lambda: prefetch(path, threads=8)
        loads["safetensors prefetch, 16 threads"] = lambda: prefetch(path, threads=16)
    return loads


def prefetch(path: str, *, threads: int) -> State:
    """Load a file to the GPU with the reader threads that safetensors has since 0.9."""
    with (
        safe_open(path, framework="pt", device="cuda:0") as file,
        file.prefetch(threads=threads) as loader,
    ):
        return dict(loader)


def same(found: object, state: State) -> None:
    """Stop where a load did not give what was saved."""
    assert isinstance(found, Mapping)
    assert set(found) == set(state), "names differ"
    assert all(
        found[name].shape == tensor.shape and found[name].dtype == tensor.dtype
        for name, tensor in state.items()
    )
    for name, tensor in state.items():
        assert torch.equal(found[name].view(torch.uint8), tensor.view(torch.uint8)), name


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_load", description="Loads and saves of a GPU beside peers."
    )
    parser.add_argument(
        "--part", choices=PARTS, action="append", help="only this part (may be given several times)"
    )
    parser.add_argument(
        "--rounds", type=int, default=5, help="measured rounds of each short side (default: 5)"
    )
    parser.add_argument("--quick", action="store_true", help="small and once")
    parser.add_argument("--json", type=Path, help="where all figures go")
    parser.add_argument(
        "--device",
        choices=("cuda", "cpu"),
        default="cuda",
        help="cpu: does everything run? Its figures mean nothing",
    )
    asked = parser.parse_args()
    global DEVICE
    DEVICE = asked.device
    if DEVICE == "cuda" and not torch.cuda.is_available():
        print("there is no GPU here", file=sys.stderr)
        return 2
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    folder = Path(tempfile.mkdtemp(prefix="holdfast-gpu-"))
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
            begin = time.perf_counter()
            getattr(bench, part)()
            print(f"{part}: {time.perf_counter() - begin:.1f} s in all", flush=True)
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
