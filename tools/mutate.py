"""Breaks the source on purpose in random places, and counts which faults the tests notice.

    make mutations ARGS="--seed 1 --count 30 [--room formats/dcp] [--report build/mutations.json]"
    make mutations ARGS="--resume"                    go on after an interruption
    make mutations ARGS="--from-report before.json"   the same faults in another version

A fault flips a comparison, changes a constant by one, removes a branch, swallows an exception, or
removes an fsync. It is written to a copy of `src`, never to the working tree. The tests of the room
then run: first the sample that `make test ROOM=…` takes, and only if that notices nothing, all
cases. All cases include the sample, so whatever the sample notices, all cases notice too. A test
that fails with the fault is run again without it, so that tests that always fail do not count.

No fault is put where no test could or should notice it: in `assert` statements, in type annotations
and blocks for type checkers, in `__repr__` and `__str__`, in the arguments of an exception that is
raised and in f-strings, which are mostly messages, and in modules that need a framework which
`make test` does not install.
"""

from __future__ import annotations

import argparse
import ast
import collections
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from tests.rooms import files_of_room, room_of

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "holdfast"

FLIPPED_COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
}

SYNC_METHODS = {"sync", "fsync", "sync_directory"}
"""Methods of the file system object that make a file or a directory durable."""

TEXT_METHODS = {"__repr__", "__str__", "_repr_html_"}
"""Methods that only make text for people."""

UNREACHABLE_ERRORS = {"AssertionError", "NotImplementedError"}
"""Errors that are raised in places that correct code never reaches."""

FRAMEWORK_FOLDERS = {"integrations", "jax"}
"""Folders of modules whose tests are skipped, because `make test` does not install their framework."""

TEST_SECONDS = 120
"""A single test that takes longer than this fails: the fault makes it hang."""

CANNOT_START = "the tests cannot start"


class Fault(NamedTuple):
    """A place of the source and what is broken there. It can be found again in other versions."""

    file: str
    """The path of the module in src/holdfast."""
    line: int
    column: int
    kind: str
    code: str
    """The source text that the fault replaces."""
    first_line: str
    """The line where that text begins, without indentation."""

    @property
    def room(self) -> str:
        return room_of(self.file)


class Outcome(NamedTuple):
    """What the tests notice of one fault."""

    sample: bool
    everything: bool
    test: str
    """The first test that failed, or why there is none."""
    seconds: float


class TestRun(NamedTuple):
    """The result of one run of pytest."""

    failing_test: str
    """The id of the first test that failed, or an empty string."""
    is_finished: bool


def is_flippable(node: ast.AST) -> bool:
    return isinstance(node, ast.Compare) and type(node.ops[0]) in FLIPPED_COMPARISONS


def is_number(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and type(node.value) is int


def is_branch(node: ast.AST) -> bool:
    return isinstance(node, ast.If)


def is_raise(node: ast.AST) -> bool:
    """Check for a statement that raises a new exception in a place that can be reached."""
    if not isinstance(node, ast.Raise) or node.exc is None:
        return False
    error = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
    return ast.unparse(error) not in UNREACHABLE_ERRORS


def is_sync(node: ast.AST) -> bool:
    """Check for a statement that only calls a method that syncs."""
    if not isinstance(node, ast.Expr) or not isinstance(node.value, ast.Call):
        return False
    function = node.value.func
    return isinstance(function, ast.Attribute) and function.attr in SYNC_METHODS


KINDS: dict[str, Callable[[ast.AST], bool]] = {
    "comparison flipped": is_flippable,
    "constant off by one": is_number,
    "branch removed": is_branch,
    "exception swallowed": is_raise,
    "fsync removed": is_sync,
}


def is_left_out(node: ast.AST) -> bool:
    """Check for code in which tests should not notice a fault."""
    if isinstance(node, ast.FunctionDef):
        return node.name in TEXT_METHODS
    if isinstance(node, ast.If):
        return "TYPE_CHECKING" in ast.unparse(node.test)
    return isinstance(node, ast.Assert | ast.JoinedStr)


def walk_code(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a tree that a fault may change, in the order of the source."""
    yield node
    if isinstance(node, ast.Raise):
        return
    for field, value in ast.iter_fields(node):
        if field in ("annotation", "returns"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not is_left_out(child):
                yield from walk_code(child)


def changed_part(node: ast.AST) -> ast.AST:
    """Return the part of a node that a fault replaces: of a branch, its condition."""
    return node.test if isinstance(node, ast.If) else node


def replacement_text(node: ast.AST) -> str:
    """Return the source text that breaks a node."""
    if isinstance(node, ast.Compare):
        flipped = [FLIPPED_COMPARISONS[type(node.ops[0])](), *node.ops[1:]]
        return ast.unparse(ast.Compare(node.left, flipped, node.comparators))
    if isinstance(node, ast.Constant):
        return str(node.value + 1)
    return "False" if isinstance(node, ast.If) else "pass"


def find_faults(file: str, text: str, kind: str) -> dict[Fault, ast.AST]:
    """Return the possible faults of a kind in a module, each with its node."""
    lines = text.splitlines()
    faults: dict[Fault, ast.AST] = {}
    for node in walk_code(ast.parse(text)):
        if KINDS[kind](node):
            part = changed_part(node)
            fault = Fault(
                file=file,
                line=part.lineno,
                column=part.col_offset,
                kind=kind,
                code=ast.unparse(part),
                first_line=lines[part.lineno - 1].strip(),
            )
            faults[fault] = node
    return faults


def break_text(text: str, fault: Fault) -> str | None:
    """Return the text of a module with a fault, or None if it no longer has that place.

    The place is the nearest one with the same code on the same line of text. Everything around it
    stays as it is, so that tests that read the source notice nothing but the fault.
    """
    candidates = {
        (abs(other.line - fault.line), abs(other.column - fault.column)): node
        for other, node in find_faults(fault.file, text, fault.kind).items()
        if other[3:] == fault[3:]
    }
    if not candidates:
        return None
    node = candidates[min(candidates)]
    part = changed_part(node)
    lines = text.encode().splitlines(keepends=True)
    start = sum(map(len, lines[: part.lineno - 1])) + part.col_offset
    stop = sum(map(len, lines[: part.end_lineno - 1])) + part.end_col_offset
    content = text.encode()
    return (content[:start] + replacement_text(node).encode() + content[stop:]).decode()


def has_place(fault: Fault) -> bool:
    """Check whether this version of the source still has the place of a fault."""
    path = SOURCE / fault.file
    return path.is_file() and break_text(path.read_text("utf-8"), fault) is not None


def choose_faults(rooms: list[str], count: int, numbers: random.Random) -> list[Fault]:
    """Choose faults at random, as many of each kind, in all rooms or in these."""
    texts: dict[str, str] = {}
    for path in sorted(SOURCE.rglob("*.py")):
        name = path.relative_to(SOURCE).as_posix()
        if not FRAMEWORK_FOLDERS & {*path.parts} and (not rooms or room_of(name) in rooms):
            texts[name] = path.read_text("utf-8")

    chosen: list[Fault] = []
    for index, kind in enumerate(KINDS):
        faults = [fault for name, text in texts.items() for fault in find_faults(name, text, kind)]
        share = count // len(KINDS) + (index < count % len(KINDS))
        chosen += numbers.sample(faults, min(share, len(faults)))
    return chosen


class Mutator:
    """Puts faults into a copy of the source, and runs the tests with it."""

    def __init__(self, folder: Path, options: argparse.Namespace) -> None:
        self._folder = folder
        self._options = options
        self._source = folder / "src"
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(SOURCE, self._source / "holdfast", ignore=ignore)

    def try_fault(self, fault: Fault) -> Outcome:
        """Run the sample of the fault's room, and all its cases if the sample notices nothing."""
        start = time.perf_counter()
        sample = self._run_with_fault(fault, ["--in-a-room"], self._options.sample_limit)
        test_run = sample
        if not sample.failing_test:
            test_run = self._run_with_fault(fault, ["--exhaustive"], self._options.limit)
        reason = "" if test_run.is_finished else "(time limit)"
        return Outcome(
            sample=bool(sample.failing_test),
            everything=bool(test_run.failing_test),
            test=test_run.failing_test or reason,
            seconds=round(time.perf_counter() - start),
        )

    def _run_with_fault(self, fault: Fault, arguments: list[str], limit: float) -> TestRun:
        """Run the tests of a room until one fails that passes without the fault."""
        files = files_of_room(fault.room)
        path = self._source / "holdfast" / fault.file
        text = path.read_text("utf-8")
        broken_text = break_text(text, fault)
        assert broken_text is not None, "only faults that have their place are tried"

        jobs = ["-n", os.environ.get("JOBS", "2"), "--dist", "worksteal"]
        deselected: list[str] = []
        while True:
            path.write_text(broken_text, "utf-8")
            try:
                test_run = self._run_tests([*jobs, *arguments, *deselected, *files], limit)
            finally:
                path.write_text(text, "utf-8")
            if not test_run.failing_test:
                return test_run

            # Does it pass without the fault?
            alone = [test_run.failing_test]
            if test_run.failing_test == CANNOT_START:
                alone = ["--collect-only", *files]
            if not self._run_tests(alone, limit).failing_test:
                return test_run
            if test_run.failing_test == CANNOT_START:
                raise SystemExit("the tests cannot start without any fault either")
            deselected += ["--deselect", test_run.failing_test]

    def _run_tests(self, arguments: list[str], limit: float) -> TestRun:
        """Run pytest with the copy of the source, until the first test fails."""
        command = [sys.executable, "-m", "pytest", "-x", "-rfE", "-p", "no:cacheprovider"]
        command += ["--timeout", str(TEST_SECONDS), "--basetemp", str(self._folder / "tests")]
        command += ["--sample-seed", "1", "--hypothesis-seed", "1", *arguments]
        # Examples that fail because of a fault must not be tried again without it.
        examples = self._folder / "hypothesis"
        shutil.rmtree(examples, ignore_errors=True)
        environment = {
            **os.environ,
            "PYTHONPATH": str(self._source),
            "PYTHONDONTWRITEBYTECODE": "1",
            "HYPOTHESIS_STORAGE_DIRECTORY": str(examples),
        }
        output_path = self._folder / "output.txt"
        with output_path.open("wb") as output:
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=environment,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
            try:
                status = process.wait(limit)
            except subprocess.TimeoutExpired:
                return TestRun("", is_finished=False)
            finally:
                # Tests that were stopped may have left processes behind.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        if status == 0:
            return TestRun("", is_finished=True)
        for line in output_path.read_text("utf-8", "replace").splitlines():
            if line.startswith(("FAILED ", "ERROR ")):
                return TestRun(line.split(" ", 1)[1].split(" - ")[0], is_finished=True)
        return TestRun(CANNOT_START, is_finished=True)


def print_outcome(fault: Fault, outcome: Outcome | None) -> None:
    if outcome is None:
        print(
            f"{'not tried':9}        {fault.kind:19} {fault.file}:{fault.line}  {fault.first_line}"
        )
        return
    verdict = "sample" if outcome.sample else "all" if outcome.everything else "NOBODY"
    print(
        f"{verdict:9} {outcome.seconds:4.0f} s {fault.kind:19} {fault.file}:{fault.line}  "
        f"{fault.code.splitlines()[0]}  ({fault.room})  {outcome.test}",
        flush=True,
    )


def print_table(outcomes: dict[Fault, Outcome | None]) -> None:
    counts: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    print("\nnoticed by")
    for fault, outcome in outcomes.items():
        print_outcome(fault, outcome)
        if outcome is not None:
            counts[fault.kind].update(tried=1, all=outcome.everything, sample=outcome.sample)
    counts["total"] = sum(counts.values(), collections.Counter())
    print(f"\n{'kind':22} {'tried':>5} {'sample':>6} {'all':>5}")
    for kind, count in counts.items():
        print(f"{kind:22} {count['tried']:5} {count['sample']:6} {count['all']:5}")


def read_report(path: Path) -> dict[Fault, Outcome | None]:
    """Return the faults of a report, with the outcome of those that were tried."""
    outcomes: dict[Fault, Outcome | None] = {}
    for row in json.loads(path.read_text("utf-8")):
        outcome = row.pop("outcome")
        outcomes[Fault(**row)] = outcome and Outcome(**outcome)
    return outcomes


def write_report(path: Path, outcomes: dict[Fault, Outcome | None]) -> None:
    rows: list[dict[str, object]] = []
    for fault, outcome in outcomes.items():
        rows.append({**fault._asdict(), "outcome": outcome and outcome._asdict()})
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(rows, indent=1) + "\n", "utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=30)
    parser.add_argument("--room", action="append", help="only this room; may be repeated")
    parser.add_argument("--report", type=Path, default=ROOT / "build" / "mutations.json")
    parser.add_argument("--resume", action="store_true", help="go on with the faults of --report")
    parser.add_argument("--from-report", type=Path, help="try the faults of another report again")
    parser.add_argument("--sample-limit", type=float, default=600, help="seconds for a sample")
    parser.add_argument("--limit", type=float, default=1800, help="seconds for all cases of a room")
    options = parser.parse_args()

    outcomes: dict[Fault, Outcome | None]
    if options.resume:
        outcomes = read_report(options.report)
    elif options.from_report:
        outcomes = dict.fromkeys(read_report(options.from_report))
    else:
        numbers = random.Random(options.seed)
        outcomes = dict.fromkeys(choose_faults(options.room, options.count, numbers))

    with tempfile.TemporaryDirectory() as folder:
        mutator = Mutator(Path(folder), options)
        for fault, outcome in outcomes.items():
            if outcome is None and has_place(fault):
                outcomes[fault] = mutator.try_fault(fault)
                print_outcome(fault, outcomes[fault])
                write_report(options.report, outcomes)
    print_table(outcomes)


if __name__ == "__main__":
    main()
