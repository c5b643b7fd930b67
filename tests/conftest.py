"""What every test may use: the golden files, and one Hypothesis profile."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

GOLDEN = Path(__file__).resolve().parent / "golden"

# No deadline: how long a test takes depends on what else the machine does; pytest-timeout limits each test.
settings.register_profile("holdfast", deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("holdfast")


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
