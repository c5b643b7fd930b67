"""What a benchmark is, and how it is measured fairly.

A case is one of four kinds:

    Race    ours and a peer do the same job; the outcome is the ratio of their times, with a target
    Bound   ours alone; measured quantities (bytes read, memory) that must not pass their limits
    Count   ours alone; quantities that it counts itself, with limits or without
    Start   programs that are started from nothing (`python -c "import …"`); wall time, with a peer or alone

1. The case's files are made, and read once so that the page cache holds them for both sides.
2. Each side runs once, unmeasured.
3. Rounds alternate, ours, peer, ours, peer, …, in one process; each begins after a garbage collection, with the previous
   result dropped. What counts is the median; the spread (half the distance of the quartiles, as a part of the median) is
   printed beside it, and the ratio of processor times, which other load on the machine hardly moves.
4. Peak memory is measured apart, since a process only has one peak: each side in a fresh process, above what it had after
   its imports (`probe.py`). Quantities of a Bound come from such a process too.

Both sides have the same cores and their libraries' own defaults for threads.
"""

from __future__ import annotations

import contextlib
import gc
import json
import mmap
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

__all__ = [
    "Bound",
    "Case",
    "Count",
    "Files",
    "Outcome",
    "Race",
    "Skipped",
    "Start",
    "Times",
    "processor_ratio",
    "run_case",
]

SPARE_NBYTES = 1 << 30
"""Disk that must stay free for others."""

OUR_MODULES = ("numpy", "holdfast.verbs.open", "holdfast.verbs.convert")
"""What a process of ours imports before it is measured, unless the case says otherwise."""

PROBE_SECONDS = 600
"""A side that takes longer is broken."""


@dataclass(frozen=True, slots=True)
class Files:
    """Files that cases share: made when first needed, removed with their folder."""

    folder: Path
    quick: bool
    """Small ones, to see that everything runs."""
    made: dict[str, Path] = field(default_factory=dict)

    def get(self, recipe: Recipe) -> Path:
        """The file of a recipe, made and in the page cache; raises `Skipped` when the disk has no room."""
        if recipe.name not in self.made:
            need = recipe.nbytes(self.quick) + SPARE_NBYTES
            free = shutil.disk_usage(self.folder).free
            if free < need:
                raise Skipped(
                    f"{recipe.name} needs {need >> 20:,} MiB of disk and {free >> 20:,} MiB are free"
                )
            path = self.folder / recipe.name
            recipe.make(path, self.quick)
            self.made[recipe.name] = path
        path = self.made[recipe.name]
        if not recipe.sparse:
            warm(path)
        return path

    def remove(self) -> None:
        for path in self.made.values():
            with contextlib.suppress(FileNotFoundError):
                path.unlink()


@dataclass(frozen=True, slots=True)
class Recipe:
    """How to make one file."""

    name: str
    nbytes: Callable[[bool], int]
    """Disk that it takes, quick or not."""
    make: Callable[[Path, bool], None]
    sparse: bool = False
    """It is one big hole: nothing to warm, and reading all of it would only fill the page cache with zeros."""


@dataclass(frozen=True, slots=True)
class Race:
    """The same job done twice. `ours` and `peer` get the file's path and return what they made, which is then dropped."""

    name: str
    title: str
    peer_title: str
    file: Recipe
    ours: Callable[[Path], object]
    peer: Callable[[Path], object]
    target: float | None
    """The least ratio of the peer's time to ours, or None for a figure without a promise."""
    peer_modules: tuple[str, ...] = ("torch", "safetensors.torch")
    """What the peer's process imports before its memory is measured."""
    our_modules: tuple[str, ...] = OUR_MODULES
    """The same for ours."""
    memory: bool = True
    backed_nbytes: int = 0
    """Memory that is touched and given back before every round of either side, so that both take theirs from pages that
    the machine really has. In a virtual machine that hands free memory back to its host, the first touch of a page costs up
    to ten times as much, and which side gets such pages is chance. 0 leaves memory as it is."""


@dataclass(frozen=True, slots=True)
class Bound:
    """A job whose cost is limited. `ours` runs in a fresh process; see `probe.py` for the quantities."""

    name: str
    title: str
    file: Recipe
    ours: Callable[[Path], object]
    limits: Mapping[str, int]
    """The most that may be measured, by quantity."""


@dataclass(frozen=True, slots=True)
class Count:
    """Quantities of a job, for the record; something is promised of those that have a limit."""

    name: str
    title: str
    file: Recipe
    ours: Callable[[Path], Mapping[str, int]]
    most: Mapping[str, int] = field(default_factory=dict)
    least: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Start:
    """Programs that are started from nothing; the time of each by its label, ours first."""

    name: str
    title: str
    commands: Mapping[str, Sequence[str]]
    """`{file}` in an argument stands for the case's file."""
    limit: float | None = None
    """The most seconds for the first one."""
    file: Recipe | None = None


Case = Race | Bound | Count | Start


class Skipped(Exception):  # an answer, not an error
    """A case that this machine cannot run, and why."""


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of one side, round by round."""

    seconds: tuple[float, ...]
    cpu: tuple[float, ...] = ()
    """Processor time of the same rounds, all threads and the kernel's work for them included; empty for other programs."""

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def spread(self) -> float:
        """Half the distance of the quartiles, as a part of the median."""
        if len(self.seconds) < 2:
            return 0.0
        low, _, high = statistics.quantiles(self.seconds, n=4, method="inclusive")
        return (high - low) / 2 / self.median


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one case gave, ready for a table and for JSON."""

    case: str
    title: str
    peer: str = ""
    times: Mapping[str, Times] = field(default_factory=dict)
    quantities: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """Measured in a fresh process, by side."""
    ratio: float | None = None
    target: float | None = None
    limits: Mapping[str, float] = field(default_factory=dict)
    met: bool | None = None
    """None where nothing is promised."""
    skipped: str = ""


def run_case(case: Case, files: Files, rounds: int) -> Outcome:
    """Measure one case; a `Skipped` becomes an outcome that says why."""
    try:
        match case:
            case Race():
                return _race(case, files, rounds)
            case Bound():
                return _bound(case, files)
            case Count():
                counted = case.ours(files.get(case.file))
                small = all(counted[quantity] <= most for quantity, most in case.most.items())
                large = all(counted[quantity] >= least for quantity, least in case.least.items())
                met = small and large if case.most or case.least else None
                return Outcome(case.name, case.title, quantities={"ours": counted}, met=met)
            case Start():
                return _start(case, files, rounds)
    except Skipped as why:
        return Outcome(case.name, case.title, skipped=str(why))


def _race(case: Race, files: Files, rounds: int) -> Outcome:
    path = files.get(case.file)
    sides = {"ours": case.ours, "peer": case.peer}
    times = interleaved(
        {side: (lambda job=job: job(path)) for side, job in sides.items()},
        rounds,
        case.backed_nbytes,
    )
    ratio = times["peer"].median / times["ours"].median
    quantities = {side: probe(case.name, side, path) for side in sides} if case.memory else {}
    met = None if case.target is None else ratio >= case.target
    return Outcome(
        case.name, case.title, case.peer_title, times, quantities, ratio, case.target, {}, met
    )


def _bound(case: Bound, files: Files) -> Outcome:
    measured = probe(case.name, "ours", files.get(case.file))
    met = all(measured[quantity] <= most for quantity, most in case.limits.items())
    return Outcome(
        case.name,
        case.title,
        times={"ours": Times((measured.pop("nanoseconds") / 1e9,))},
        quantities={"ours": measured},
        limits=dict(case.limits),
        met=met,
    )


def _start(case: Start, files: Files, rounds: int) -> Outcome:
    path = files.get(case.file) if case.file else None

    def job(command: Sequence[str]) -> Callable[[], object]:
        words = [
            word.replace("{file}", str(path)).replace("{python}", sys.executable)
            for word in command
        ]
        return lambda: subprocess.run(
            words, check=True, stdout=subprocess.DEVNULL, env=_installed(files.folder)
        )

    # A start takes a tenth of a second: more rounds cost little and settle the median.
    times = interleaved(
        {label: job(command) for label, command in case.commands.items()}, rounds * 3
    )
    ours, *others = times.values()
    ratio = others[0].median / ours.median if others else None
    met = None if case.limit is None else ours.median <= case.limit
    limits = {} if case.limit is None else {"seconds": case.limit}
    return Outcome(
        case.name, case.title, " / ".join(list(times)[1:]), times, {}, ratio, None, limits, met
    )


def _installed(folder: Path) -> dict[str, str]:
    """An environment in which programs have their bytecode, as installed ones do: the round that is not measured writes it."""
    left = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return {**left, "PYTHONPYCACHEPREFIX": str(folder / "bytecode")}


def processor_ratio(times: Mapping[str, Times]) -> float | None:
    """The peer's processor time over ours: hardly moved by what else the machine does, blind to what runs in parallel."""
    if not all(t.cpu for t in times.values()) or set(times) != {"ours", "peer"}:
        return None
    return statistics.median(times["peer"].cpu) / max(statistics.median(times["ours"].cpu), 1e-9)


def interleaved(
    jobs: Mapping[str, Callable[[], object]], rounds: int, backed_nbytes: int = 0
) -> dict[str, Times]:
    """Run jobs in turn, once unmeasured and then `rounds` times."""
    seconds: dict[str, list[float]] = {label: [] for label in jobs}
    cpu: dict[str, list[float]] = {label: [] for label in jobs}
    for turn in range(rounds + 1):
        for label, job in jobs.items():
            gc.collect()
            back(backed_nbytes)
            busy, begin = time.process_time(), time.perf_counter()
            made = job()
            took, worked = time.perf_counter() - begin, time.process_time() - busy
            # A program that was started is another process: its processor time is not ours.
            apart = isinstance(made, subprocess.CompletedProcess)
            del made
            if turn:
                seconds[label].append(took)
                cpu[label] += [] if apart else [worked]
    return {label: Times(tuple(seconds[label]), tuple(cpu[label])) for label in jobs}


def back(nbytes: int) -> None:
    """Touch fresh memory and give it back; the kernel hands out first what came back last."""
    if not nbytes:
        return
    with mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as area:
        # Large pages, as one side may ask for them; the other splits them.
        area.madvise(mmap.MADV_HUGEPAGE)
        for place in range(0, nbytes, mmap.PAGESIZE):
            area[place] = 1


def probe(case: str, side: str, path: Path) -> dict[str, int]:
    """Quantities of one side of a case, measured in a fresh process."""
    words = [sys.executable, "-m", "benchmarks.probe", case, side, str(path)]
    root = Path(__file__).resolve().parent.parent
    done = subprocess.run(
        words,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        cwd=root,
        timeout=PROBE_SECONDS,
        env=dict(os.environ),
    )
    measured = json.loads(done.stdout.splitlines()[-1])
    return {str(name): int(value) for name, value in measured.items()}


def warm(path: Path) -> None:
    """Bring a file into the page cache."""
    with path.open("rb", buffering=0) as file:
        block = bytearray(8 << 20)
        while file.readinto(block):
            pass
