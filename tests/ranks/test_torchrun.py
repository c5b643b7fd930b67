"""The real thing: two processes that torchrun starts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import holdfast
from tests.ranks.test_kills import QUIET


@pytest.mark.slow("torchrun starts three processes that import torch")
@pytest.mark.timeout(150)
def test_torchrun(tmp_path: Path):
    script = Path(__file__).with_name("script.py")
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        str(script),
        str(tmp_path),
    ]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=140, env=os.environ | QUIET, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["dcp", "later", "native", "safetensors"]
    for path in tmp_path.iterdir():
        assert holdfast.verify(path).ok
        with holdfast.open(path) as ckpt:
            assert len(ckpt["table"].chunks) == 2
            assert np.array_equal(
                ckpt["table"].numpy(), np.arange(35.0, dtype=np.float32).reshape(7, 5)
            )
            assert np.array_equal(ckpt["plain"].numpy(), np.arange(9))
