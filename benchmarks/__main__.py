"""`python -m benchmarks`: run the cases, print the table, write benchmarks/out/latest.json."""

from __future__ import annotations

import argparse
import shutil
import signal
import sys
import tempfile
from fnmatch import fnmatch
from pathlib import Path

from benchmarks.board import Files, Outcome, run_case
from benchmarks.cases import CASES
from benchmarks.floors import as_line, measure
from benchmarks.report import as_markdown, as_text, machine, write_json

LATEST = Path(__file__).parent / "out" / "latest.json"


def main() -> int:
    """Exit code 0 however the ratios are; 2 where no case has the wanted name."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description="Holdfast beside torch and safetensors."
    )
    parser.add_argument("--case", metavar="GLOB", default="*", help="only cases with such a name")
    parser.add_argument("--list", action="store_true", help="print the names of the cases and stop")
    parser.add_argument(
        "--rounds", type=int, default=5, help="measured rounds of each side (default: 5)"
    )
    parser.add_argument(
        "--quick", action="store_true", help="small files and one round: does everything run?"
    )
    parser.add_argument(
        "--json", type=Path, metavar="PATH", default=LATEST, help="where the figures go"
    )
    parser.add_argument(
        "--markdown", action="store_true", help="print the table for docs/benchmarks.md"
    )
    asked = parser.parse_args()
    wanted = [case for case in CASES if fnmatch(case.name, asked.case)]
    if asked.list or not wanted:
        print("\n".join(case.name for case in CASES), file=sys.stdout if asked.list else sys.stderr)
        return 0 if asked.list else 2
    rounds = 1 if asked.quick else max(asked.rounds, 1)
    outcomes: list[Outcome] = []
    # A polite kill ends the run as Ctrl-C does: gigabytes must not stay behind.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    folder = Path(tempfile.mkdtemp(prefix="holdfast-bench-"))
    files = Files(folder, asked.quick)
    floors = measure(16 << 20 if asked.quick else 512 << 20, rounds=1 if asked.quick else 3)
    try:
        for number, case in enumerate(wanted, 1):
            print(f"[{number}/{len(wanted)}] {case.name}", file=sys.stderr, flush=True)
            outcomes.append(run_case(case, files, rounds))
            # After every case: a run that is killed leaves what it has measured.
            write_json(outcomes, asked.json, rounds=rounds, quick=asked.quick, floors=floors)
    except KeyboardInterrupt:
        print("stopped; the table has the cases that were done", file=sys.stderr)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if asked.markdown:
        print(as_markdown(outcomes, floors))
    else:
        print(", ".join(f"{name} {value}" for name, value in machine().items()))
        print(as_line(floors))
        print(as_text(outcomes))
    return 0


if __name__ == "__main__":
    sys.exit(main())
