"""Breaks the source on purpose in random places, and counts which breaks the tests notice.

    PYTHONPATH=. python tools/mutate.py --seed 1 --count 30 [--room formats/dcp] [--json table.json]

Each mutation changes one place of a copy of `src`: a comparison is flipped, a constant is off by
one, a branch is removed, an exception is swallowed, or an fsync is removed. Then the tests of the
room run, first the sample that `make test ROOM=…` takes, and if the sample notices nothing, all
cases. All cases include the sample, so that whatever the sample notices is noticed by all.
"""

from __future__ import annotations

import argparse
import ast
import collections
import json
import os
import random
import shutil
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

SAMPLE_TIMEOUT = 1800
EXHAUSTIVE_TIMEOUT = 7200
"""A test run that takes longer than these seconds counts as having noticed the mutation: it hangs.

The limits are far above what a run takes beside other work. Single tests end after 300 seconds.
"""


class Place(NamedTuple):
    """A node of a module that a mutation changes."""

    path: Path
    kind: str
    position: int
    """The index of the node among those of its kind in this module."""
    line: int


class Outcome(NamedTuple):
    """What the tests noticed of one mutation."""

    room: str
    kind: str
    place: str
    code: str
    sample: bool
    everything: bool
    noticed_by: str
    """The first test that failed, or an empty string."""
    seconds: float


def is_flippable(node: ast.AST) -> bool:
    return isinstance(node, ast.Compare) and type(node.ops[0]) in FLIPPED_COMPARISONS


def is_number(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and type(node.value) is int


def is_branch(node: ast.AST) -> bool:
    """Check for an `if` without the branches that only type checkers read."""
    return isinstance(node, ast.If) and "TYPE_CHECKING" not in ast.unparse(node.test)


def is_raise(node: ast.AST) -> bool:
    return isinstance(node, ast.Raise) and node.exc is not None


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


def mutate(node: ast.AST, kind: str) -> ast.AST:
    """Return the node that replaces a node in a mutation of this kind."""
    if kind == "comparison flipped":
        assert isinstance(node, ast.Compare)
        node.ops[0] = FLIPPED_COMPARISONS[type(node.ops[0])]()
        return node
    if kind == "constant off by one":
        assert isinstance(node, ast.Constant)
        return ast.copy_location(ast.Constant(node.value + 1), node)
    if kind == "branch removed":
        assert isinstance(node, ast.If)
        node.test = ast.copy_location(ast.Constant(False), node.test)
        return node
    return ast.copy_location(ast.Pass(), node)


def find_nodes(tree: ast.AST, kind: str) -> Iterator[ast.AST]:
    for node in ast.walk(tree):
        if KINDS[kind](node):
            yield node


def find_places(paths: list[Path], kind: str) -> list[Place]:
    places: list[Place] = []
    for path in paths:
        tree = ast.parse(path.read_text("utf-8"))
        for position, node in enumerate(find_nodes(tree, kind)):
            places.append(Place(path, kind, position, node.lineno))
    return places


class Replacement(ast.NodeTransformer):
    """Replaces one node of a tree by another."""

    def __init__(self, node: ast.AST, kind: str) -> None:
        self._node = node
        self._kind = kind

    def visit(self, node: ast.AST) -> ast.AST:
        if node is self._node:
            return mutate(node, self._kind)
        return self.generic_visit(node)


def mutated_source(place: Place) -> tuple[str, str]:
    """Return the source of the mutated module, and the code that is changed in it."""
    tree = ast.parse(place.path.read_text("utf-8"))
    node = list(find_nodes(tree, place.kind))[place.position]
    code = ast.unparse(node).splitlines()[0]
    return ast.unparse(ast.fix_missing_locations(Replacement(node, place.kind).visit(tree))), code


def choose_places(paths: list[Path], count: int, numbers: random.Random) -> list[Place]:
    """Choose places at random, as many of each kind."""
    chosen: list[Place] = []
    for index, kind in enumerate(KINDS):
        share = count // len(KINDS) + (index < count % len(KINDS))
        places = find_places(paths, kind)
        chosen += numbers.sample(places, min(share, len(places)))
    return chosen


def find_failing_test(source: Path, room: str, *, exhaustive: bool) -> str:
    """Run the tests of a room with a copy of the source, and return the first test that fails.

    Returns:
        The id of the test, "timeout" if the run hangs, or an empty string if all tests pass.
    """
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-rfE", "--timeout", "300"]
    command += ["-p", "no:cacheprovider"]
    command += ["-n", os.environ.get("JOBS", "2"), "--dist", "worksteal"]
    command += ["--exhaustive"] if exhaustive else ["--in-a-room"]
    command += files_of_room(room)
    environment = {**os.environ, "PYTHONPATH": str(source), "PYTHONDONTWRITEBYTECODE": "1"}
    timeout = EXHAUSTIVE_TIMEOUT if exhaustive else SAMPLE_TIMEOUT
    try:
        completed = subprocess.run(
            command,
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return "timeout"
    if completed.returncode == 0:
        return ""
    for line in completed.stdout.splitlines():
        if line.startswith(("FAILED ", "ERROR ")):
            return line.split(" ")[1]
    return "the tests could not be collected"


def try_mutation(place: Place, source: Path) -> Outcome:
    """Mutate one place of a copy of the source, run the tests of its room, and undo it."""
    text, code = mutated_source(place)
    name = place.path.relative_to(SOURCE).as_posix()
    target = source / "holdfast" / name
    original = target.read_text("utf-8")
    room = room_of(name)
    start = time.perf_counter()
    target.write_text(text, "utf-8")
    try:
        failing_test = find_failing_test(source, room, exhaustive=False)
        sample = bool(failing_test)
        if not sample:
            failing_test = find_failing_test(source, room, exhaustive=True)
    finally:
        target.write_text(original, "utf-8")
    return Outcome(
        room=room,
        kind=place.kind,
        place=f"{name}:{place.line}",
        code=code,
        sample=sample,
        everything=bool(failing_test),
        noticed_by=failing_test,
        seconds=time.perf_counter() - start,
    )


def print_table(outcomes: list[Outcome]) -> None:
    counts: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for outcome in outcomes:
        counts[outcome.kind].update(tried=1, all=outcome.everything, sample=outcome.sample)
    print(f"{'kind':22} {'tried':>5} {'all':>5} {'sample':>6}")
    for kind, count in counts.items():
        print(f"{kind:22} {count['tried']:5} {count['all']:5} {count['sample']:6}")
    total = sum(counts.values(), collections.Counter())
    print(f"{'total':22} {total['tried']:5} {total['all']:5} {total['sample']:6}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=30)
    parser.add_argument("--room", action="append", help="only this room; may be repeated")
    parser.add_argument("--json", type=Path, help="also write the outcomes to this file")
    arguments = parser.parse_args()

    paths = [
        path
        for path in sorted(SOURCE.rglob("*.py"))
        if not arguments.room or room_of(path.relative_to(SOURCE).as_posix()) in arguments.room
    ]
    places = choose_places(paths, arguments.count, random.Random(arguments.seed))
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "src"
        shutil.copytree(SOURCE, source / "holdfast", ignore=shutil.ignore_patterns("__pycache__"))
        for place in places:
            outcome = try_mutation(place, source)
            outcomes.append(outcome)
            verdict = "sample" if outcome.sample else "all" if outcome.everything else "NOBODY"
            print(
                f"{verdict:7} {outcome.seconds:4.0f} s  {outcome.kind:20} {outcome.place}  "
                f"{outcome.code}  {outcome.noticed_by}",
                flush=True,
            )
    print_table(outcomes)
    if arguments.json:
        arguments.json.write_text(json.dumps([outcome._asdict() for outcome in outcomes], indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
