"""Where runs are in these tests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.fixture(params=["directory", "bucket"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Name a folder of a run that is not there yet, on the disk and in memory."""
    if request.param == "directory":
        return os.fspath(tmp_path / "run")
    return f"memory://{tmp_path.name}/run"
