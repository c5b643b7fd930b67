"""`tools/programs` puts Holdfast into programs that know nothing of it, and into the processes that they start."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROGRAM = """
import subprocess, sys, torch
torch.save({"w": torch.ones(2)}, "x.pt")
subprocess.run([sys.executable, "-c", "import torch; torch.load('x.pt')"], check=True)
"""


def test_a_program_and_its_children_go_through_holdfast_and_are_counted(tmp_path):
    calls = tmp_path / "calls"
    paths = os.pathsep.join(map(str, (ROOT / "tools" / "programs" / "inside", ROOT / "src")))
    environment = {**os.environ, "PYTHONPATH": paths, "PROGRAMS_CALLS": str(calls)}
    subprocess.run([sys.executable, "-c", PROGRAM], cwd=tmp_path, env=environment, check=True)
    assert calls.read_bytes() == b"sl"
