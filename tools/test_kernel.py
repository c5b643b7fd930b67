"""Run the kernel's tests on a copy of the source without `extras/`.

    python tools/test_kernel.py [arguments of pytest]

The kernel must work without extras. Tests that need one have the mark `extras`, and are skipped.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COPY = ROOT / "build" / "kernel"

FOLDERS = ("core", "stores", "engine", "numeric", "formats", "verbs", "cli")
"""The folders of tests that belong to the kernel."""


def copy_kernel() -> None:
    """Copy the source without extras, and without what is built on them."""
    shutil.rmtree(COPY, ignore_errors=True)
    ignored = shutil.ignore_patterns("extras", "integrations", "jax.py", "__pycache__")
    shutil.copytree(ROOT / "src" / "holdfast", COPY / "holdfast", ignore=ignored)


def main() -> int:
    copy_kernel()
    folders = [f"tests/{folder}" for folder in FOLDERS]
    command = [sys.executable, "-m", "pytest", *folders, *sys.argv[1:]]
    # The copy precedes the folder of the editable installation.
    environment = {**os.environ, "PYTHONPATH": str(COPY)}
    return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
