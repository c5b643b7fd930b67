"""What every test may use: the golden files, one Hypothesis profile, and two tiers.

`make test` has ten minutes on two cores. A few tests repeat one question for every one of a thousand attacks; of those it asks a
fixed quarter (and every bomb), and `make test-all`, which passes `--exhaustive`, asks all.
"""

from __future__ import annotations

import json
import signal
import time
import zlib
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

from holdfast.torch import versions

# A shell that starts a command in the background has it ignore Ctrl-C, and every process below inherits that. Tests send the signal
# to their children and look what these do about it: here it is what it is in the foreground.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

GROUP_ENDS = versions.Change(
    (2, 8), "a group of gloo ends while its last work is freed; in 2.6 it was seen to wait for ever"
)

if not GROUP_ENDS:
    end_group = torch.distributed.destroy_process_group

    def end_idle_group(group: object = None) -> None:
        """End a group. Its thread frees the last work before that, for which it needs the interpreter lock."""
        time.sleep(0.2)
        end_group(group)

    torch.distributed.destroy_process_group = end_idle_group

GOLDEN = Path(__file__).resolve().parent / "golden"

# No deadline: how long a test takes depends on what else the machine does; pytest-timeout limits each test.
settings.register_profile(
    "holdfast", deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("holdfast")


FILES = {
    "tests/parity/test_pt2_archives.py": versions.PT2_ARCHIVE,
    "tests/torch/export/test_packaging.py": versions.PT2_ARCHIVE,
    "tests/torch/export/test_shared_weights.py": versions.SHARED_WEIGHTS,
    "tests/torch/serialization/test_members.py": versions.PT2_ARCHIVE,
    "tests/torch/ranks/test_local_shards.py": versions.EMPTY_SHARDS,
    "tests/torch/serialization/test_allowed.py": versions.UNSAFE_GLOBALS,
    "tests/torch/serialization/test_load.py": versions.WEIGHTS_ONLY,
    "tests/torch/serialization/test_weights.py": versions.WEIGHTS_ONLY,
    "tests/torch/serialization/test_weights_allowed.py": versions.WEIGHTS_ONLY,
    "tests/torch/serialization/test_weights_refusals.py": versions.WEIGHTS_ONLY,
}
"""Files of tests that cannot even be imported without something that torch has since a version."""


class Unasked(pytest.Module):
    """A file that is skipped as a whole."""

    def collect(self) -> Iterable[pytest.Item]:
        raise pytest.skip.Exception(
            FILES[self.path.relative_to(self.config.rootpath).as_posix()].reason,
            allow_module_level=True,
        )


def pytest_pycollect_makemodule(
    module_path: Path, parent: pytest.Collector
) -> pytest.Module | None:
    rootpath = parent.config.rootpath
    change = (
        FILES.get(module_path.relative_to(rootpath).as_posix())
        if module_path.is_relative_to(rootpath)
        else None
    )
    return None if change is None or change else Unasked.from_parent(parent, path=module_path)


REPEATED = {
    "test_memory": ("tests/hostile/test_attacks.py", 8),
    "test_memory_stays_small": ("tests/faults/test_large.py", 2),
    "test_weights_only": ("tests/hostile/test_torch_load.py", 8),
    "test_what_a_user_may_allow": ("tests/hostile/test_torch_load.py", 8),
    "test_hostile_pickles": ("tests/torch/serialization/test_weights_attacks.py", 8),
    "test_the_nth_call_fails": ("tests/crash/test_nth_call.py", 4),
    "test_sharing_costs_nothing": ("tests/growth/test_growth.py", 192),
    "test_a_tensor_costs_the_same_among_many": ("tests/growth/test_one_way.py", 8),
    "test_one_odd_tensor_among_many": ("tests/growth/test_one_way.py", 4),
    "test_every_header_byte_flipped": ("tests/hostile/test_damage.py", 2),
    "test_an_attack_is_a_page_or_a_refusal": ("tests/reports/test_hostile_reports.py", 12),
    "test_an_attack": ("tests/integrations/test_dcp_hostile.py", 4),
    "test_an_attack_means_the_same_by_templates": ("tests/properties/test_tensor_templates.py", 16),
    "test_each_request_meets_each_fault": ("tests/remote/test_commit.py", 2),
    "test_a_rank_is_killed": ("tests/remote/", 2),
    "test_reading_leaves_no_cycle": ("tests/faults/test_cycles.py", 4),
    "test_rewriting_leaves_no_cycle": ("tests/faults/test_cycles.py", 4),
    "test_around_limits": ("tests/properties/test_written_opens.py", 2),
    "test_every_verb_writes_the_same": ("tests/together/test_matrix.py", 16),
    "test_copies_are_the_same": ("tests/together/test_matrix.py", 2),
    "test_reshards_are_the_same": ("tests/together/test_matrix.py", 4),
    "test_every_verb_finds_the_same": ("tests/together/test_matrix.py", 3),
}
"""Tests whose every case is asked more elsewhere, and of how many one is asked: `test_attack` opens all attacks,
all writers crash in the model, and what is quadratic in one way of sharing is so in many. `make test-all` asks every case."""


LONGEST = {
    "test_every_header_byte_flipped[training.pt]",
    "test_memory[walk-list-shared-many-times]",
    "test_a_rank_that_is_killed_leaves_what_was_there",
    "test_no_second_copy[native]",
    "test_the_same_as_on_linux[darwin-old]",
}
"""Half a minute each, and their neighbours ask the same."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--exhaustive",
        action="store_true",
        help="every case of the tests that are sampled otherwise",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--exhaustive"):
        return

    def left_out(item: pytest.Item) -> bool:
        if item.name in LONGEST:
            return True
        place, one_in = REPEATED.get(getattr(item, "originalname", ""), (None, 1))
        if place is None or not item.nodeid.startswith(place) or "bomb" in item.name:
            return False
        return zlib.crc32(item.name.encode()) % one_in != 0

    config.hook.pytest_deselected(items=[item for item in items if left_out(item)])
    items[:] = [item for item in items if not left_out(item)]


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


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Without a browser the pages are not looked at: one line says so, however many tests that are."""
    skipped = [
        report
        for report in terminalreporter.stats.get("skipped", [])
        if "make browser" in str(report.longrepr)
    ]
    if skipped:
        terminalreporter.write_line(
            f"NO BROWSER: {len(skipped)} tests of pages were skipped; make browser installs one",
            red=True,
        )
