"""What the machine itself takes: `python -m benchmarks.floors [--mib 512]`. Beside these the figures of a table are to be read.

Nothing of Holdfast is in them: numpy copies, the system reads and writes, and memory is touched for the first time. Minima of some
rounds, because a floor is what nothing gets below; GB/s by the clock, and seconds of the processors a GB beside it.

    memcpy              one array to another, both backed
    first touch         fresh memory, a byte of each page, in small pages and in large ones
    preadv              a file in the page cache, into backed memory and into fresh memory
    pwrite              a fresh file, its blocks reserved; and with the fsync at the end
    rows of 2 KB        every fourth 2 KB of a file, one pread each: the columns of a matrix that was cut along the other axis
"""

from __future__ import annotations

import argparse
import mmap
import os
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

__all__ = ["Floor", "as_line", "measure"]

PAGE, BLOCK, ROW = 4096, 4 << 20, 2048


@dataclass(frozen=True)
class Floor:
    """One thing that the machine does, at its best."""

    name: str
    gigabytes_per_second: float
    processor_seconds_per_gigabyte: float

    def shown(self) -> str:
        return f"{self.name} {self.gigabytes_per_second:.1f}"


def measure(nbytes: int = 512 << 20, *, rounds: int = 3, folder: str | None = None) -> list[Floor]:
    """All floors, for so many bytes each."""
    with tempfile.TemporaryDirectory(dir=folder, prefix="holdfast-floors-") as made:
        path = Path(made) / "file"
        one, other = np.ones(nbytes, np.uint8), np.full(nbytes, 2, np.uint8)
        written = Path(made) / "written"
        path.write_bytes(one.data)
        works: dict[str, tuple[Callable[[], None], int]] = {
            "memcpy": (lambda: np.copyto(other, one), nbytes),
            "memcpy by 2": (
                lambda: halves(lambda a, b: np.copyto(other[a:b], one[a:b]), nbytes),
                nbytes,
            ),
            "first touch": (lambda: touch(nbytes, large=False), nbytes),
            "first touch, large pages": (lambda: touch(nbytes, large=True), nbytes),
            "preadv by 2": (lambda: read(path, other), nbytes),
            "preadv by 2 into fresh memory": (lambda: read(path, fresh(nbytes)), nbytes),
            "pwrite by 2": (lambda: write(written, one, sync=False), nbytes),
            "pwrite by 2, fsync": (lambda: write(written, one, sync=True), nbytes),
            "rows of 2 KB": (lambda: rows(path, other), nbytes // 4),
        }
        found = []
        for name, (work, moved) in works.items():
            taken = [timed(work, written) for _ in range(rounds)]
            wall, processor = min(w for w, _ in taken), min(p for _, p in taken)
            found.append(Floor(name, moved / wall / 1e9, processor / moved * 1e9))
        return found


def as_line(floors: list[Floor]) -> str:
    """For people: GB/s of each."""
    return "floors, GB/s: " + ", ".join(floor.shown() for floor in floors)


def timed(work: Callable[[], None], written: Path) -> tuple[float, float]:
    written.unlink(missing_ok=True)  # what is freed is freed before
    wall, processor = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - wall, time.process_time() - processor


def halves(work: Callable[[int, int], None], nbytes: int) -> None:
    """Two threads, a half each."""
    middle = nbytes // 2 // BLOCK * BLOCK
    beside = threading.Thread(target=work, args=(0, middle))
    beside.start()
    work(middle, nbytes)
    beside.join()


def fresh(nbytes: int) -> np.ndarray:
    """Memory that nobody has touched, in small pages as the C library gives them."""
    area = mmap.mmap(-1, nbytes)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        area.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(area, np.uint8)


def touch(nbytes: int, *, large: bool) -> None:
    area = mmap.mmap(-1, nbytes)
    advice = "MADV_HUGEPAGE" if large else "MADV_NOHUGEPAGE"
    if hasattr(mmap, advice):
        area.madvise(getattr(mmap, advice))
    np.frombuffer(area, np.uint8)[::PAGE] = 1


def read(path: Path, out: np.ndarray) -> None:
    descriptor = os.open(path, os.O_RDONLY)

    def part(start: int, stop: int) -> None:
        for at in range(start, stop, BLOCK):
            os.preadv(descriptor, [out[at : min(at + BLOCK, stop)]], at)

    halves(part, len(out))
    os.close(descriptor)


def write(path: Path, data: np.ndarray, *, sync: bool) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    os.posix_fallocate(descriptor, 0, len(data))

    def part(start: int, stop: int) -> None:
        for at in range(start, stop, BLOCK):
            os.pwrite(descriptor, data[at : min(at + BLOCK, stop)], at)

    halves(part, len(data))
    if sync:
        os.fsync(descriptor)
    os.close(descriptor)


def rows(path: Path, out: np.ndarray) -> None:
    descriptor, pread = os.open(path, os.O_RDONLY), os.pread
    for at in range(0, len(out), 4 * ROW):
        pread(descriptor, ROW, at)
    os.close(descriptor)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.floors", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument(
        "--mib", type=int, default=512, help="memory and file of each (default: 512)"
    )
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args()
    print(f"load {os.getloadavg()[0]:.1f}")
    for floor in measure(asked.mib << 20, rounds=asked.rounds):
        print(
            f"{floor.name:32} {floor.gigabytes_per_second:7.2f} GB/s {floor.processor_seconds_per_gigabyte:7.3f} processor s a GB"
        )


if __name__ == "__main__":
    main()
