"""The benchmarks run: one short case, from the command line to the table and the figures."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_one_case_is_measured_and_written(tmp_path: Path):
    figures = tmp_path / "figures.json"
    words = [
        sys.executable,
        "-m",
        "benchmarks",
        "--quick",
        "--case",
        "open-safetensors",
        "--json",
        str(figures),
    ]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "safe_open" in done.stdout
    assert json.loads(figures.read_text())["machine"]["holdfast"]
