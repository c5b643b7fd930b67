"""Measures every test: its processor time for `tests/costs.json`, its lines for `tests/rooms.json`.

    make costs          needs Python 3.12 or later, because of sys.monitoring

As a pytest plugin (`-p measure_tests`) it records the processor time of every test with that of its
child processes, and the lines of `src` that every test file runs in the test process. Afterwards
`python tools/measure_tests.py FOLDER` reads the records and writes both files.

Processor time does not depend on what else the machine does, so a busy machine is good enough.
"""

from __future__ import annotations

import collections
import os
import pickle
import random
import sys
from collections.abc import Generator
from pathlib import Path, PurePosixPath
from types import CodeType
from typing import Any

import pytest
from tests import sampling
from tests.rooms import ROOMS_FILE, room_of

SOURCE = Path(__file__).resolve().parents[1] / "src" / "holdfast"
TESTS = Path(__file__).resolve().parents[1] / "tests"

RECORDS_VARIABLE = "HOLDFAST_TEST_RECORDS"
"""The environment variable with the folder that test processes write their records to."""

CASES_PER_FUNCTION = 2
"""How many cases of a function run. What the others cost is assumed to be the same."""

RECORDED_SECONDS = 0.5
"""Functions that take less than this in total are always run completely and not recorded."""

ROOM_SECONDS = 40.0
"""The processor time of the tests that are chosen for a room, besides those in its own folder."""

TEST_FILE_SECONDS = 0.3
"""What a test file costs besides its tests: its import, and its fixtures."""

Line = tuple[str, int]


class Recorder:
    """Records the cost of every test, and the lines that every test file runs."""

    def __init__(self) -> None:
        self.case_counts: dict[str, int] = {}
        self.seconds: dict[str, list[float]] = collections.defaultdict(list)
        self.lines: dict[str, set[Line]] = collections.defaultdict(set)
        self._current_lines: set[Line] = set()
        self._current_file = ""

    def start(self) -> None:
        monitoring = sys.monitoring
        monitoring.use_tool_id(monitoring.COVERAGE_ID, "measure_tests")
        monitoring.register_callback(
            monitoring.COVERAGE_ID, monitoring.events.LINE, self._record_line
        )
        monitoring.set_events(monitoring.COVERAGE_ID, monitoring.events.LINE)

    def _record_line(self, code: CodeType, line: int) -> object:
        name = code.co_filename
        if name.startswith(str(SOURCE)):
            self._current_lines.add((name[len(str(SOURCE)) + 1 :], line))
        # Each line is reported once for a test file.
        return sys.monitoring.DISABLE

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Keep a few random cases of every function."""
        cases_by_function: dict[str, list[pytest.Item]] = collections.defaultdict(list)
        for item in items:
            cases_by_function[item.nodeid.partition("[")[0]].append(item)

        kept: set[pytest.Item] = set()
        for function, cases in cases_by_function.items():
            self.case_counts[function] = len(cases)
            count = min(len(cases), CASES_PER_FUNCTION)
            kept |= set(random.Random(function).sample(cases, count))
        items[:] = [item for item in items if item in kept]

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        file = item.nodeid.partition("::")[0]
        if file != self._current_file:
            self._current_file = file
            self._current_lines = self.lines[file]
            sys.monitoring.restart_events()
        start = processor_seconds()
        result = yield
        self.seconds[item.nodeid.partition("[")[0]].append(processor_seconds() - start)
        return result

    def pytest_sessionfinish(self) -> None:
        if self.seconds:
            record = (self.case_counts, dict(self.seconds), dict(self.lines))
            path = Path(os.environ[RECORDS_VARIABLE], f"{os.getpid()}.pickle")
            path.write_bytes(pickle.dumps(record))


def processor_seconds() -> float:
    """Return the processor time of this process and of its children that have ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def pytest_configure(config: pytest.Config) -> None:
    recorder = Recorder()
    recorder.start()
    config.pluginmanager.register(recorder, "holdfast-recorder")


class Records:
    """What all test processes recorded."""

    def __init__(self, folder: Path) -> None:
        self.case_counts: dict[str, int] = {}
        self.lines: dict[str, set[Line]] = collections.defaultdict(set)
        seconds: dict[str, list[float]] = collections.defaultdict(list)
        for path in folder.glob("*.pickle"):
            case_counts, process_seconds, process_lines = pickle.loads(path.read_bytes())
            self.case_counts.update(case_counts)
            for function, values in process_seconds.items():
                seconds[function] += values
            for file, lines in process_lines.items():
                self.lines[file] |= lines

        self.seconds_per_case: dict[str, float] = {}
        for function, values in seconds.items():
            self.seconds_per_case[function] = sum(values) / len(values)

    def costs(self) -> dict[str, tuple[int, float]]:
        """Return (number of cases, seconds of all cases) of every expensive function."""
        costs: dict[str, tuple[int, float]] = {}
        for function, seconds in sorted(self.seconds_per_case.items()):
            case_count = self.case_counts[function]
            if seconds * case_count >= RECORDED_SECONDS:
                costs[function] = (case_count, round(seconds * case_count, 1))
        return costs

    def file_seconds(self) -> dict[str, float]:
        """Return what the sample of every test file costs in the run of a room."""
        file_seconds: dict[str, float] = collections.defaultdict(lambda: TEST_FILE_SECONDS)
        for function, seconds in self.seconds_per_case.items():
            budget = max(seconds, sampling.SECONDS_PER_FUNCTION_IN_A_ROOM)
            cost = min(seconds * self.case_counts[function], budget)
            file_seconds[function.partition("::")[0]] += cost
        return file_seconds


def choose_files(room: str, records: Records, file_seconds: dict[str, float]) -> list[str]:
    """Choose test files that run the lines of a room at little cost.

    The files of the room's own folder come first. The others follow by the classic greedy
    algorithm for weighted set cover: always the file with the most new lines per second.
    """
    room_lines: dict[str, set[Line]] = {}
    for file, lines in records.lines.items():
        room_lines[file] = {line for line in lines if room_of(line[0]) == room}

    own_files = sorted(
        file for file in room_lines if str(PurePosixPath(file).parent) == f"tests/{room}"
    )
    covered: set[Line] = set()
    for file in own_files:
        covered |= room_lines[file]

    chosen = list(own_files)
    seconds = 0.0
    candidates = {file for file in room_lines if file not in own_files}
    while candidates:
        best = max(
            candidates, key=lambda file: len(room_lines[file] - covered) / file_seconds[file]
        )
        candidates.remove(best)
        if not room_lines[best] - covered:
            break
        if seconds + file_seconds[best] > ROOM_SECONDS:
            continue
        chosen.append(best)
        covered |= room_lines[best]
        seconds += file_seconds[best]
    return chosen


def main() -> None:
    records = Records(Path(sys.argv[1]))
    rows = [f'"{name}": [{cases}, {seconds}]' for name, (cases, seconds) in records.costs().items()]
    sampling.COSTS_FILE.write_text("{\n" + ",\n".join(rows) + "\n}\n")

    file_seconds = records.file_seconds()
    rooms = sorted({room_of(path.relative_to(SOURCE).as_posix()) for path in SOURCE.rglob("*.py")})
    blocks: list[str] = []
    for room in rooms:
        files = choose_files(room, records, file_seconds)
        names = ",\n".join(f'  "{file}"' for file in files)
        blocks.append(f'"{room}": [\n{names}\n]')
    ROOMS_FILE.write_text("{\n" + ",\n".join(blocks) + "\n}\n")
    print(f"{len(rows)} expensive functions, {len(rooms)} rooms")


if __name__ == "__main__":
    main()
