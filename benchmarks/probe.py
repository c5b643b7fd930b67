"""One side of one case in a fresh process: `python -m benchmarks.probe CASE SIDE PATH`, quantities as JSON on stdout.

peak_nbytes   highest resident memory during the job, above what the process had after its imports
rss_nbytes    what of that is still there at its end, with the result alive
read_nbytes   bytes that system calls read (`rchar`: page cache or not; memory that is mapped does not count)
reads         system calls that read
nanoseconds   wall time, cold code and all
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import sys
import time
from pathlib import Path

__all__ = ["measure"]


def status(field: str) -> int:
    """A line of /proc/self/status that is in kB, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise LookupError(field)


def io() -> dict[str, int]:
    lines = Path("/proc/self/io").read_text().splitlines()
    return {name: int(value) for name, value in (line.split(": ") for line in lines)}


def measure(job, path: Path) -> dict[str, int]:
    """Run a job once."""
    gc.collect()
    idle = io()
    idle = {name: value - idle[name] for name, value in io().items()}  # what looking costs
    # Start the high-water mark again; where that is forbidden, it stands where the imports left it.
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    high, resident, before = status("VmHWM"), status("VmRSS"), io()
    begin = time.perf_counter_ns()
    made = job(path)
    took = time.perf_counter_ns() - begin
    after = io()
    measured = {
        "peak_nbytes": max(status("VmHWM") - min(high, resident), 0),
        "rss_nbytes": max(status("VmRSS") - resident, 0),
        "read_nbytes": max(after["rchar"] - before["rchar"] - idle["rchar"], 0),
        "reads": max(after["syscr"] - before["syscr"] - idle["syscr"], 0),
        "nanoseconds": took,
    }
    del made
    return measured


def main() -> None:
    name, side, path = sys.argv[1:]
    from benchmarks.board import OUR_MODULES
    from benchmarks.cases import CASES

    case = next(case for case in CASES if case.name == name)
    modules = (
        getattr(case, "our_modules", OUR_MODULES)
        if side == "ours"
        else getattr(case, "peer_modules", ())
    )
    for module in modules:
        importlib.import_module(module)
    print(json.dumps(measure(getattr(case, side), Path(path))))


if __name__ == "__main__":
    main()
