"""Checkpoints in the first versions of our own formats: manifests of version 1 and 2 and records of version 1, without checksums.

They are in `earlier/` and are not made again: today's Holdfast writes later versions. This is the script that made them, with the
Holdfast of that day, and `state` is what must be found in them. `packed` was saved with the option `sparse="auto"` of that day,
which stored non-zero elements alone; it is refused.

    python -m tests.golden.earlier FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

import holdfast
from holdfast.verbs.reshard import reshard


def state() -> dict[str, object]:
    """Make a model with a tie and plain values."""
    w = np.arange(48, dtype=np.float32).reshape(6, 8)
    return {
        "model": {"w": w, "head": w, "b": np.arange(6, dtype=np.int16)},
        "step": 1000,
        "betas": (0.9, 0.95),
    }


def make(folder: Path) -> None:
    """Write all of them."""
    about = {"author": "me"}
    holdfast.save(state(), folder / "native", metadata=about, max_shard_size=100)
    reshard(folder / "native", folder / "cut", mesh={"tp": 2}, rules=["model.w: tp=0"])
    holdfast.save(state(), folder / "one.safetensors", metadata=about, keep_tree=True)
    holdfast.save(
        state(),
        folder / "split",
        format="safetensors",
        metadata=about,
        keep_tree=True,
        max_shard_size=100,
    )


if __name__ == "__main__":
    make(Path(sys.argv[1]))
