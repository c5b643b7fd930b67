"""All tests with the oldest torch, the newest and some between, one after the other, and a table of what came of it.

    make matrix                                  all rows
    make matrix ARGS="2.9.0 2.8.0:1.26.4"        these: a torch, and a numpy where it is not the newest that goes with it
    make matrix ARGS="--keep 2.9.0"              the folder of each torch (6 GB) stays, for the next time

Run by hand: a torch for Linux brings gigabytes of CUDA with it, and the tests take an hour of one processor. What a version skips
because of what its torch has not, or does otherwise, says the sentence that `holdfast.torch.versions` has for it.
"""

from __future__ import annotations

import argparse
import collections
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from xml.etree import ElementTree

ROWS = ["2.8.0:1.26.4", "2.8.0", "2.11.0", "2.13.0", "2.13.0:1.26.4", "2.15.0"]
PINNED = "2.13.0"
ROOT = Path(__file__).resolve().parent.parent


def run(row: str, report: Path, more: list[str]) -> int:
    """Run the tests of a row, and say how they ended."""
    torch, _, numpy = row.partition(":")
    wanted = " ".join(["-p", "no:cacheprovider", f"--junitxml={report}", *more])
    return subprocess.call(
        ["make", "-s", "test", f"TORCH={torch}", f"NUMPY={numpy}", f"ARGS={wanted}"], cwd=ROOT
    )


def folder(row: str) -> Path:
    """Where the Makefile installs a row."""
    torch, _, numpy = row.partition(":")
    return ROOT / (
        ".venv" + (f"-{torch}" if torch != PINNED else "") + (f"-numpy-{numpy}" if numpy else "")
    )


def numpy_of(row: str) -> str:
    """The numpy that was installed."""
    code = "import numpy; print(numpy.__version__)"
    return subprocess.run(
        [folder(row) / "bin" / "python", "-c", code], capture_output=True, text=True, check=True
    ).stdout.strip()


def counted(report: Path) -> tuple[dict[str, int], list[str], collections.Counter[str]]:
    """How many tests passed, failed and were skipped; which failed; and how often each difference between versions was a reason."""
    counts: dict[str, int] = collections.Counter()
    failed: list[str] = []
    reasons: collections.Counter[str] = collections.Counter()
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        kinds = {child.tag: child for child in case}
        if kinds.keys() & {"failure", "error"}:
            counts["failed"] += 1
            failed.append(f"{case.get('classname')}.{case.get('name')}")
        elif "skipped" in kinds:
            said = kinds["skipped"].get("message") or ""
            counts["skipped"] += 1
            if said.startswith("torch ") and ": since " in said:
                reasons[said.partition(": ")[2]] += 1
        else:
            counts["passed"] += 1
    return counts, failed, reasons


def main() -> int:
    parser = argparse.ArgumentParser(description="All tests with several versions of torch.")
    parser.add_argument("rows", nargs="*", default=ROWS, metavar="TORCH[:NUMPY]")
    parser.add_argument("--keep", action="store_true", help="keep the folder of each torch")
    asked, more = parser.parse_known_args()
    table = [
        "| torch | numpy | passed | skipped | of these by version | failed |",
        "| --- | --- | ---: | ---: | ---: | ---: |",
    ]
    below: list[str] = []
    worst = 0
    with tempfile.TemporaryDirectory() as place:
        for row in asked.rows:
            report = Path(place) / f"{row.replace(':', '-')}.xml"
            ended = run(row, report, more)
            worst = max(worst, ended)
            torch = row.partition(":")[0]
            if not report.exists():
                table.append(f"| {torch} | | | | | not run (make ended with {ended}) |")
                continue
            counts, failed, reasons = counted(report)
            numbers = [counts["passed"], counts["skipped"], sum(reasons.values()), counts["failed"]]
            table.append(
                f"| {torch} | {numpy_of(row)} | " + " | ".join(f"{n:,}" for n in numbers) + " |"
            )
            below += [f"{torch} failed: {name}" for name in failed]
            below += [
                f"{torch} skipped {count}: {reason}" for reason, count in sorted(reasons.items())
            ]
            if not asked.keep and folder(row).name != ".venv":
                shutil.rmtree(folder(row))
    print("\n".join(["", *table, "", *below]))
    return worst


if __name__ == "__main__":
    sys.exit(main())
