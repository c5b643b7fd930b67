"""Measures every test: its processor time for `tests/costs.json`, its lines for `tests/rooms.json`.

    make costs          needs Python 3.12 or later, because of sys.monitoring

As a pytest plugin (`-p measure_tests`) it records the processor time of every test with that of its
child processes, and the lines of `src` that every test file runs in the test process. Afterwards
`python tools/measure_tests.py FOLDER` reads the records and writes both files.

Processor time does not depend on what else the machine does, so a busy machine is good enough.
"""

from __future__ import annotations

import collections
import heapq
import os
import pickle
import random
import sys
import time
from collections.abc import Generator
from pathlib import Path
from types import CodeType
from typing import Any

import pytest
from tests import sampling
from tests.rooms import ROOMS_FILE, own_files_of_room, room_of

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
        clock_start = time.perf_counter()
        processor_start = processor_seconds()
        result = yield
        # A child process that ends late is counted to a test that did not start it. No test keeps
        # more than two cores busy for long.
        clock_seconds = time.perf_counter() - clock_start
        seconds = min(processor_seconds() - processor_start, 2 * clock_seconds)
        self.seconds[item.nodeid.partition("[")[0]].append(seconds)
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
            budget = max(seconds, sampling.ROOM.per_function)
            cost = min(seconds * self.case_counts[function], budget)
            file_seconds[function.partition("::")[0]] += cost
        return file_seconds


def group_lines_by_room(records: Records) -> dict[str, dict[str, set[Line]]]:
    """Return the lines of every room that each test file runs."""
    room_lines: dict[str, dict[str, set[Line]]] = collections.defaultdict(dict)
    for test_file, lines in records.lines.items():
        for line in lines:
            room_lines[room_of(line[0])].setdefault(test_file, set()).add(line)
    return room_lines


def choose_files(
    room: str, lines_by_file: dict[str, set[Line]], file_seconds: dict[str, float]
) -> list[str]:
    """Choose test files that run the lines of a room at little cost, besides its own test files.

    This is the greedy algorithm for weighted set cover: always the file with the most new lines
    per second. A file can only lose new lines while others are chosen, so only the best file of
    the heap is counted again.
    """
    own_files = own_files_of_room(room)
    covered: set[Line] = set()
    for file in own_files:
        covered |= lines_by_file.get(file, set())

    chosen: list[str] = []
    seconds = 0.0
    heap: list[tuple[float, str]] = []
    for file, lines in lines_by_file.items():
        if file not in own_files:
            heap.append((-len(lines - covered) / file_seconds[file], file))
    heapq.heapify(heap)
    while heap:
        _, file = heapq.heappop(heap)
        new_lines = lines_by_file[file] - covered
        value = len(new_lines) / file_seconds[file]
        if heap and value < -heap[0][0]:
            heapq.heappush(heap, (-value, file))
            continue
        if not new_lines:
            break
        if seconds + file_seconds[file] <= ROOM_SECONDS:
            chosen.append(file)
            covered |= new_lines
            seconds += file_seconds[file]
    return chosen


def main() -> None:
    records = Records(Path(sys.argv[1]))
    rows = [f'"{name}": [{cases}, {seconds}]' for name, (cases, seconds) in records.costs().items()]
    sampling.COSTS_FILE.write_text("{\n" + ",\n".join(rows) + "\n}\n")

    file_seconds = records.file_seconds()
    rooms = sorted({room_of(path.relative_to(SOURCE).as_posix()) for path in SOURCE.rglob("*.py")})
    room_lines = group_lines_by_room(records)
    blocks: list[str] = []
    for room in rooms:
        files = choose_files(room, room_lines[room], file_seconds)
        names = ",\n".join(f'  "{file}"' for file in files)
        blocks.append(f'"{room}": [\n{names}\n]')
    ROOMS_FILE.write_text("{\n" + ",\n".join(blocks) + "\n}\n")
    print(f"{len(rows)} expensive functions, {len(rooms)} rooms")


if __name__ == "__main__":
    main()
