"""Verbs on several processes of one machine beside one: `python -m benchmarks.together [--ranks 2 4] [--mib 1024] [--kib 16]`.

One process is given all of its threads; of several, each has what it takes by default, as with torchrun. The same files in the page
cache, `durable=False`. Each group of processes is started once and waits at its input, which costs nothing. Jobs go to them in
turns, so that whatever else the machine does meets all of them. Medians of the time from the word to the last answer, and the
processor time of all processes. What each group writes is compared byte for byte, and what it finds, with that of one process.

`--commands` measures whole commands as well, from the shell to the exit status: `python -m holdfast` beside torchrun. In these the
import of torch is counted, once a process.

`cp to a bucket` needs obstore and a server on this machine (tests/remote/servers.py); without them it is left out. Nothing else but
numpy and torch is needed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, is_dataclass
from pathlib import Path

import numpy as np

LAYERS = 32
"""Of seven matrices each, as models have them. The embedding is four times as large as the largest of these."""

WRITES = ("convert", "cast", "prune", "prune 2:4", "cp")
LOOKS = ("verify", "stats", "diff")
BUCKET = "cp to a bucket"
BASE = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS")


def state(mib: int, kib: int, seed: int) -> dict[str, np.ndarray]:
    """A model of about so many MiB of float32; of tensors of so many KiB each, where that is given."""
    if kib:
        elements = np.random.default_rng(seed).standard_normal(
            (mib * 1024 // kib, kib * 16, 16), np.float32
        )
        return {f"layers.{number}.weight": one for number, one in enumerate(elements)}
    # Of a layer: four of n × n, three of n × 3n; the embedding has 12 n².
    n = int((mib * (1 << 20) / 4 / (LAYERS * 13 + 12)) ** 0.5) // 8 * 8
    rng = np.random.default_rng(seed)

    def matrix(rows: int) -> np.ndarray:
        return rng.standard_normal((rows, n), np.float32)

    made = {"embedding.weight": matrix(12 * n)}
    for layer in range(LAYERS):
        made |= {f"layers.{layer}.{name}.weight": matrix(n) for name in ("q", "k", "v", "o")}
        made |= {f"layers.{layer}.{name}.weight": matrix(3 * n) for name in ("gate", "up", "down")}
    return made


def job(name: str, folder: Path, out: str, group: object) -> object:
    """Do something with all processes of a group, or alone; what it found."""
    import holdfast

    a, b = folder / "a.safetensors", folder / "b.safetensors"
    options = {"group": group, "overwrite": True, "durable": False}
    if name == "convert":
        return holdfast.convert(a, out, max_shard_size="100MB", format="safetensors", **options)
    if name == "cast":
        return holdfast.convert(
            a, out, max_shard_size="100MB", format="safetensors", dtype="bf16", **options
        )
    if name == "prune":
        return holdfast.prune(a, out, ["*.weight: 0.5"], **options)
    if name == "prune 2:4":
        return holdfast.prune(a, out, ["*.weight: 2:4"], **options)
    if name == "verify":
        return holdfast.verify(a, group=group)
    if name == "stats":
        return holdfast.stats(a, group=group)
    if name == "diff":
        return holdfast.diff(a, b, group=group)
    return holdfast.copy(folder / "hf", out, **options)


def found_by(name: str, result: object) -> str:
    """A hash of what was found, without where it was written."""
    if name in LOOKS:
        said = {"rows": [asdict(row) for row in result]} if name == "stats" else asdict(result)
    else:
        assert is_dataclass(result)
        said = {
            key: value
            for key, value in asdict(result).items()
            if key in ("nbytes", "files", "tensors", "norm_lost", "notes")
        }
    return hashlib.blake2b(repr(said).encode(), digest_size=8).hexdigest()


def serve(folder: Path) -> None:
    """One process of a group: a job a line, and an answer to each."""
    import holdfast

    group = None
    if "RANK" in os.environ:
        import holdfast.torch

        group = holdfast.torch.group()
        group.begin("begin").close()
    say = os.fdopen(os.dup(1), "w")
    say.write("ready\n")
    say.flush()
    for line in sys.stdin:
        name, out = json.loads(line)
        used = time.process_time()
        began = time.perf_counter()
        result = job(name, folder, out, group)
        wall = time.perf_counter() - began
        say.write(
            json.dumps(
                {"wall": wall, "cpu": time.process_time() - used, "found": found_by(name, result)}
            )
            + "\n"
        )
        say.flush()
    _ = holdfast


class Processes:
    """A group of processes that wait for jobs. One is a process as anybody would start it: without ranks, and without torch."""

    def __init__(self, size: int, folder: Path) -> None:
        self.size = size
        command = [sys.executable, "-m", "benchmarks.together", "--serve", str(folder)]
        plain = {name: value for name, value in os.environ.items() if name not in BASE}
        port = str(free_port())
        self._all = []
        for rank in range(size):
            # As torchrun does.
            own = {
                "RANK": str(rank),
                "WORLD_SIZE": str(size),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
                "OMP_NUM_THREADS": "1",
            }
            environment = plain if size == 1 else plain | own
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
            self._all.append(
                subprocess.Popen(command, env=environment, text=True, bufsize=1, **pipes)
            )
        for one in self._all:
            assert one.stdout.readline() == "ready\n"

    def run(self, name: str, out: str) -> dict[str, object]:
        began = time.perf_counter()
        for one in self._all:
            one.stdin.write(json.dumps([name, out]) + "\n")
        said = [json.loads(one.stdout.readline()) for one in self._all]
        wall = time.perf_counter() - began
        assert len({one["found"] for one in said}) == 1, (
            f"the ranks have found different things: {name}"
        )
        cpus = [one["cpu"] for one in said]
        return {"wall": wall, "cpu": sum(cpus), "most": max(cpus), "found": said[0]["found"]}

    def close(self) -> None:
        for one in self._all:
            one.stdin.close()
            one.wait()


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def digests(path: Path) -> dict[str, str]:
    """The digest of each file."""
    found = {}
    for file in [path] if path.is_file() else sorted(path.iterdir()):
        with open(file, "rb") as content:
            found[file.name if path.is_dir() else ""] = hashlib.file_digest(
                content, "blake2b"
            ).hexdigest()
    return found


def commands(name: str, folder: Path, out: str, size: int) -> list[str]:
    """The same as a command of the shell."""
    a, b, hf = str(folder / "a.safetensors"), str(folder / "b.safetensors"), str(folder / "hf")
    writes = ["--overwrite", "--no-durable"]
    shards = ["--format", "safetensors", "--max-shard-size", "100MB", *writes]
    words = {
        "convert": ["convert", a, out, *shards],
        "cast": ["convert", a, out, "--dtype", "bf16", *shards],
        "prune": ["prune", a, out, "--rule", "*.weight: 0.5", *writes],
        "prune 2:4": ["prune", a, out, "--rule", "*.weight: 2:4", *writes],
        "verify": ["verify", a],
        "stats": ["stats", a],
        "diff": ["diff", a, b],
        "cp": ["cp", hf, out, *writes],
        BUCKET: ["cp", hf, out, "--overwrite"],
    }[name]
    launched = (
        []
        if size == 1
        else ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size)]
    )
    return [sys.executable, *launched, "-m", "holdfast", *words]


def measured(
    names: list[str], groups: dict[int, Processes], folder: Path, rounds: int, *, whole: bool
) -> Iterator[dict[str, object]]:
    """A row for each job: the median times of each group."""
    for name in names:
        times: dict[int, list[dict[str, object]]] = {size: [] for size in groups}
        full: dict[int, list[float]] = {size: [] for size in groups}
        sums: dict[int, object] = {}

        def place(size: int, name: str = name) -> str:
            return f"s3://bucket/together/{size}" if name == BUCKET else str(folder / f"out-{size}")

        for number in range(rounds + 1):
            order = [*groups]
            for size in order if number % 2 else reversed(order):
                found = groups[size].run(name, place(size))
                # The first round finds new memory and new files, and is not counted.
                times[size] += [found] if number else []
                if not number and name in WRITES:
                    sums[size] = digests(folder / f"out-{size}")
                if whole and number:
                    began = time.perf_counter()
                    done = subprocess.run(
                        commands(name, folder, place(size), size),
                        capture_output=True,
                        text=True,
                        check=False,
                    )
                    full[size].append(time.perf_counter() - began)
                    assert done.returncode == (1 if name == "diff" else 0), done.stderr[-2000:]
        assert len({str(one) for one in sums.values()}) <= 1, f"{name}: the files differ"
        assert len({one["found"] for runs in times.values() for one in runs}) == 1, (
            f"{name}: what was found differs"
        )
        for size in groups:
            shutil.rmtree(folder / f"out-{size}", ignore_errors=True)
        row: dict[str, object] = {"job": name, "files compared": bool(sums)}
        for size, runs in times.items():
            row[str(size)] = {
                key: statistics.median(one[key] for one in runs) for key in ("wall", "cpu", "most")
            }  # type: ignore[type-var]
            if whole:
                row[str(size)]["command"] = statistics.median(full[size])  # type: ignore[index]
        yield row


def said(row: dict[str, object], sizes: list[int]) -> str:
    cores, one = os.cpu_count() or 1, row["1"]
    text = f"| {row['job']} | {one['wall']:.2f} | {one['cpu'] / one['wall'] / cores:.0%} |"  # type: ignore[index]
    for size in sizes[1:]:
        many = row[str(size)]
        text += f" {many['wall']:.2f} | {one['wall'] / many['wall']:.2f} × | {many['cpu'] / one['cpu']:.2f} |"  # type: ignore[index]
        if "command" in many:  # type: ignore[operator]
            text += f" {one['command']:.1f} → {many['command']:.1f} s |"  # type: ignore[index]
    return text


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.together", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    parser.add_argument(
        "--ranks", type=int, nargs="+", default=[2, 4], help="processes beside one (default: 2 4)"
    )
    parser.add_argument("--mib", type=int, default=1024, help="of float32 (default: 1024)")
    parser.add_argument(
        "--kib", type=int, default=0, help="of each tensor (default: matrices of a model)"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--job", choices=[*WRITES, *LOOKS, BUCKET], action="append", help="of these only"
    )
    parser.add_argument("--commands", action="store_true", help="measure whole commands as well")
    parser.add_argument(
        "--folder", help="where the files are made (default: that of temporary files)"
    )
    parser.add_argument("--json", type=Path, help="a file for the figures")
    asked = parser.parse_args()
    if asked.serve:
        serve(asked.serve)
        return 0
    import holdfast

    names = asked.job or [*WRITES, *LOOKS, BUCKET]
    sizes = [1, *(size for size in asked.ranks if size > 1)]
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=asked.folder)))
        if BUCKET in names and not bucket(stack):
            names.remove(BUCKET)
            print(f"{BUCKET}: left out, because obstore or a server is not installed")
        made = state(asked.mib, asked.kib, 0)
        holdfast.save(made, folder / "a.safetensors", durable=False)
        holdfast.save(
            {k: v * np.float32(1.01) for k, v in made.items()},
            folder / "b.safetensors",
            durable=False,
        )
        holdfast.convert(
            folder / "a.safetensors",
            folder / "hf",
            format="safetensors",
            max_shard_size="100MB",
            durable=False,
        )
        groups = {size: Processes(size, folder) for size in sizes}
        for one in groups.values():
            stack.callback(one.close)
        machine = {
            "python": platform.python_version(),
            "cores": os.cpu_count(),
            "load": os.getloadavg()[0],
            "mib": asked.mib,
        }
        print(
            f"{machine}, medians of {asked.rounds} rounds; the files are the same, and what was found\n"
        )
        more = "".join(
            f" {size}: s | times | processor |" + (" command |" if asked.commands else "")
            for size in sizes[1:]
        )
        print(
            f"| job | 1: s | of all cores |{more}\n| --- | --- | --- |"
            + " --- |" * more.count("|"),
            flush=True,
        )
        rows = []
        for row in measured(names, groups, folder, asked.rounds, whole=asked.commands):
            rows.append(row)
            print(said(row, sizes), flush=True)
            if asked.json:
                asked.json.write_text(
                    json.dumps({"machine": machine, "ranks": sizes, "rows": rows}, indent=1)
                )
    return 0


def bucket(stack: ExitStack) -> bool:
    """Start a server for the processes, where there is one."""
    try:
        import obstore  # noqa: F401
        from tests.remote.servers import environment, program, weed
    except ImportError:
        return False
    if program("weed") is None:
        return False
    port = stack.enter_context(weed(Path(stack.enter_context(tempfile.TemporaryDirectory()))))
    os.environ.update(environment(port))
    return True


if __name__ == "__main__":
    raise SystemExit(main())
