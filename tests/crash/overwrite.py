"""Save two states in turn to one path, until killed: what the readers of `test_readers.py` read from.

    python -m tests.crash.overwrite <kind> <path>

The states differ in every value, in their shapes and so in the lengths of their files.
"""

from __future__ import annotations

import sys
from itertools import count

import numpy as np

KINDS = (
    "native",
    "native-in-two-steps",
    "split-safetensors",
    "dcp",
    "torch",
    "safetensors",
)

FORMATS = {
    "native": "native",
    "native-in-two-steps": "native",
    "split-safetensors": "safetensors-dir",
    "dcp": "dcp",
    "torch": "torch-zip",
    "safetensors": "safetensors",
}


def name_of(kind: str) -> str:
    return {"torch": "x.pt", "safetensors": "x.safetensors"}.get(kind, "x")


def rows(which: int) -> int:
    return 40 + 24 * which


def state(kind: str, which: int) -> dict[str, object]:
    """Make one of the two states: `which` is 0 or 1, and so is every number in it."""
    tensors: dict[str, object] = {
        f"w{i}": np.full((rows(which), 16 + i), which, np.float32) for i in range(4)
    }
    return tensors | {"step": which, "words": [f"text {which}"] * (1 + which)}


def save(kind: str, path: str, which: int) -> None:
    import holdfast

    made = state(kind, which)
    if kind == "dcp":
        import torch

        from holdfast.torch import save_sharded

        tensors = {
            name: torch.from_numpy(value)
            for name, value in made.items()
            if isinstance(value, np.ndarray)
        }
        save_sharded(path, made | tensors, format="dcp", overwrite=True, durable=False)
    elif kind == "split-safetensors":
        holdfast.save(
            made,
            path,
            format="safetensors",
            max_shard_size=4096,
            keep_tree=True,
            overwrite=True,
            durable=False,
        )
    elif kind == "safetensors":
        holdfast.save(made, path, keep_tree=True, overwrite=True, durable=False)
    else:
        holdfast.save(made, path, overwrite=True, durable=False)


def main(kind: str, path: str) -> None:
    if kind == "native-in-two-steps":
        from holdfast.stores.files import Files

        # As on NFS and overlayfs.
        Files.exchange = lambda self, first, second, *, dir_fd: False  # type: ignore[method-assign]
    for number in count():
        save(kind, path, number % 2)
        if number == 1:
            print("ready", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
