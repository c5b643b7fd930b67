"""Shared fixtures, the Hypothesis profile, and the choice between a sample and every case.

`make test` runs a sample of the cases of expensive tests (see `tests/sampling.py`). `make test-all`
passes `--exhaustive`, which runs all of them.
"""

from __future__ import annotations

import gc
import importlib.util
import json
import os
import signal
from collections.abc import Callable, Generator, Iterable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, core, settings

from holdfast.torch import versions
from tests import sampling

# A shell that starts a command in the background has it ignore Ctrl-C, and every process below inherits that. Tests send the signal
# to their children and look what these do about it: here it is what it is in the foreground.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

GOLDEN = Path(__file__).resolve().parent / "golden"

# No deadline: how long a test takes depends on what else the machine does; pytest-timeout limits each test.
settings.register_profile(
    "holdfast", deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("holdfast")


FILES = {
    "tests/parity/test_pt2_archives.py": versions.PT2_ARCHIVE,
    "tests/extras/packages/export/test_packaging.py": versions.PT2_ARCHIVE,
    "tests/extras/packages/export/test_shared_weights.py": versions.SHARED_WEIGHTS,
    "tests/torch/serialization/test_members.py": versions.PT2_ARCHIVE,
}
"""Files of tests that cannot even be imported without something that torch has since a version."""


HAS_EXTRAS = importlib.util.find_spec("holdfast.extras") is not None
"""Whether this is the whole source, and not the copy of `make test-kernel`."""

NEED_EXTRAS = {
    "tests/core/test_arguments.py",
    "tests/core/test_documents.py",
    "tests/numeric/test_statistics.py",
    "tests/stores/test_paths.py",
    "tests/verbs/test_folder.py",
    "tests/verbs/test_surface.py",
}
"""Files in the kernel's folders that test what all verbs have in common, those of extras included."""


def find_skip_reason(file: str) -> str | None:
    """Return why a file of tests cannot be imported here."""
    if file in FILES and not FILES[file]:
        return FILES[file].reason
    if file in NEED_EXTRAS and not HAS_EXTRAS:
        return "needs holdfast.extras"
    return None


class SkippedModule(pytest.Module):
    """A file that is skipped as a whole."""

    def collect(self) -> Iterable[pytest.Item]:
        file = self.path.relative_to(self.config.rootpath).as_posix()
        raise pytest.skip.Exception(str(find_skip_reason(file)), allow_module_level=True)


def pytest_pycollect_makemodule(
    module_path: Path, parent: pytest.Collector
) -> pytest.Module | None:
    rootpath = parent.config.rootpath
    if not module_path.is_relative_to(rootpath):
        return None
    if find_skip_reason(module_path.relative_to(rootpath).as_posix()) is None:
        return None
    return SkippedModule.from_parent(parent, path=module_path)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """In a copy without extras, skip each test that uses a public name of an extra."""
    report = yield
    if HAS_EXTRAS or call.excinfo is None:
        return report
    if call.excinfo.traceback[-1].name == "_find_in_extras":
        report.outcome = "skipped"
        report.longrepr = (str(item.path), 0, f"needs holdfast.extras: {call.excinfo.value}")
    return report


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("holdfast")
    group.addoption("--exhaustive", action="store_true", help="run every case of every test")
    group.addoption(
        "--sample-seed", type=int, help="choose the cases by this seed (default: the date)"
    )
    group.addoption(
        "--in-a-room", action="store_true", help="choose fewer cases, for the tests of one room"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Pass the seed on to test processes and to programs that tests start."""
    if config.getoption("--exhaustive"):
        os.environ[sampling.EXHAUSTIVE_VARIABLE] = "1"
    seed = config.getoption("--sample-seed")
    os.environ.setdefault(sampling.SEED_VARIABLE, str(seed or sampling.seed_of_today()))
    core.global_force_seed = sampling.current_seed()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Sample the cases of expensive test functions. A test that is named on the command line always runs."""
    if not HAS_EXTRAS:
        for item in items:
            if item.get_closest_marker("extras"):
                item.add_marker(pytest.mark.skip(reason="needs holdfast.extras"))
    is_measured = config.pluginmanager.has_plugin("measure_tests")  # it chooses cases itself
    if is_measured or any("::" in argument for argument in config.args):
        return

    cases_by_function: dict[str, list[pytest.Item]] = {}
    for item in items:
        cases_by_function.setdefault(item.nodeid.partition("[")[0], []).append(item)

    budget = sampling.ROOM if config.getoption("--in-a-room") else sampling.EVERYTHING
    costs = sampling.read_costs()
    long_costs = {
        function: costs[function]
        for function in cases_by_function
        if function in costs and costs[function].is_long
    }
    turns = sampling.choose_functions_in_turn(
        long_costs, budget.long_cases, sampling.random_for("turns")
    )

    deselected: list[pytest.Item] = []
    for function, cases in cases_by_function.items():
        count = sampling.count_affordable_cases(
            costs.get(function), len(cases), budget.per_function
        )
        if function in long_costs:
            count = 1
        if count < len(cases) or function in long_costs:
            sampling.SAMPLE_SIZES[function] = sampling.SampleSize(count, len(cases))
        if function in long_costs and function not in turns:
            deselected += cases
            continue
        if count == len(cases):
            continue
        parameters = [item.callspec.indices for item in cases]
        chosen = set(sampling.choose_cases(parameters, count, sampling.random_for(function)))
        deselected += [item for index, item in enumerate(cases) if index not in chosen]

    if config.getoption("--exhaustive"):
        return
    config.hook.pytest_deselected(items=deselected)
    left_out = set(deselected)
    items[:] = [item for item in items if item not in left_out]


def pytest_collection_finish() -> None:
    """Leave what was imported out of garbage collections, which tests ask for again and again."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Hand the sizes of the samples to the process that prints the summary."""
    if hasattr(session.config, "workeroutput"):
        sizes = {name: tuple(size) for name, size in sampling.SAMPLE_SIZES.items()}
        session.config.workeroutput["sample_sizes"] = sizes


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    """Collect the sizes of the samples of a test process of pytest-xdist."""
    sample_sizes = getattr(node, "workeroutput", {}).get("sample_sizes", {})
    for name, (sampled, total) in sample_sizes.items():
        sampling.SAMPLE_SIZES[name] = sampling.SampleSize(sampled, total)


@pytest.fixture(scope="session")
def golden_dir() -> Path:
    """The folder `tests/golden`, with `files`, `expected` and `hostile`."""
    return GOLDEN


@pytest.fixture(params=sorted(p.name for p in (GOLDEN / "files").iterdir()))
def golden(request: pytest.FixtureRequest) -> Path:
    """Each golden file in turn."""
    return GOLDEN / "files" / request.param


@pytest.fixture
def expected(golden: Path) -> dict[str, object]:
    """What torch or safetensors found in the golden file; tests/golden/README.md has the keys."""
    return json.loads((GOLDEN / "expected" / f"{golden.name}.json").read_text())


@pytest.fixture(params=sorted(p.name for p in (GOLDEN / "hostile").glob("*.pt")))
def hostile(request: pytest.FixtureRequest) -> Path:
    """Each hostile file in turn."""
    return GOLDEN / "hostile" / request.param


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Report skipped pages, the size of the sample, and how to repeat what failed."""
    statistics = terminalreporter.stats
    without_browser = [
        report for report in statistics.get("skipped", []) if "make browser" in str(report.longrepr)
    ]
    if without_browser:
        terminalreporter.write_line(
            f"NO BROWSER: {len(without_browser)} tests of pages were skipped; run `make browser`",
            red=True,
        )

    seed = sampling.current_seed()
    sizes = {
        name: size for name, size in sampling.SAMPLE_SIZES.items() if size.sampled < size.total
    }
    left_out = sum(size.total - size.sampled for size in sizes.values())
    if config.getoption("--exhaustive"):
        terminalreporter.section("what `make test` samples")
        for name, size in sorted(sizes.items()):
            terminalreporter.write_line(f"{size.sampled:6} of {size.total:6}  {name}")
    elif left_out:
        terminalreporter.write_line(
            f"SAMPLE: seed {seed} left out {left_out} cases; `make test-all` runs every case"
        )
    for report in [*statistics.get("failed", []), *statistics.get("error", [])]:
        terminalreporter.write_line(f"repeat with: make test SEED={seed} ARGS='{report.nodeid}'")


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Run the command line in this process: exit code, standard output, standard error."""
    from holdfast.cli.main import main

    def run(*arguments: object) -> tuple[int, str, str]:
        code = main([str(a) for a in arguments])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run
