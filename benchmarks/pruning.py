"""`holdfast.prune` of a checkpoint of 4 GiB, one rule at a time, each in a fresh process.

    prune-magnitude   half of each tensor goes            a histogram of each tensor, then the writing
    prune-global      one threshold over all tensors      the same over all of them
    prune-nm          2:4                                 only the writing
    prune-block       nine of ten blocks of 4 × 4         scores of all blocks, then the writing
    prune-random      half of each tensor, at random      keys once, while it is written
    prune-masks       half of each tensor, masks beside   masks are found twice

What is promised is memory: at most 500 MB above what the process had after its imports, whatever the size of the checkpoint.
Nothing waits for the disk.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.board import Bound, Case, Recipe

__all__ = ["PRUNING"]

MIB = 1 << 20
LAYERS, WIDTH, INNER, VOCABULARY = 41, 2048, 5632, 32000
"""A decoder of 2.2 thousand million parameters: 4.05 GiB of bfloat16."""

LIMITS = {"peak_nbytes": 500 * 10**6}


def shapes(quick: bool) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The tensors of the model."""
    yield "model.embed_tokens.weight", (VOCABULARY // (64 if quick else 1), WIDTH)
    for layer in range(1 if quick else LAYERS):
        at = f"model.layers.{layer}"
        yield from ((f"{at}.self_attn.{name}_proj.weight", (WIDTH, WIDTH)) for name in "qkvo")
        yield from ((f"{at}.mlp.{name}_proj.weight", (INNER, WIDTH)) for name in ("gate", "up"))
        yield f"{at}.mlp.down_proj.weight", (WIDTH, INNER)
        yield f"{at}.input_layernorm.weight", (WIDTH,)


def counts(quick: bool) -> dict[str, int]:
    """The elements of each."""
    return {name: math.prod(shape) for name, shape in shapes(quick)}


def make(path: Path, quick: bool) -> None:
    """Normal numbers, from one block of them that is entered at another place for each tensor: a few MiB at a time."""
    import ml_dtypes
    import numpy as np

    values = (
        (np.random.default_rng(7).standard_normal(4 * MIB, np.float32) * 0.02)
        .astype(ml_dtypes.bfloat16)
        .view(np.uint16)
    )
    header, reach = {}, 0
    for name, shape in shapes(quick):
        nbytes = 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [reach, reach + nbytes]}
        reach += nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for number, count in enumerate(counts(quick).values()):
            start = number * 1_000_003 % len(values)
            while count:
                part = values[start : start + count]
                file.write(part.data)
                count, start = count - len(part), 0


checkpoint = Recipe("prune.safetensors", lambda quick: 5 * sum(counts(quick).values()), make)


def pruned(rule: str, masks: str | None = None) -> Callable[[Path], object]:
    def job(path: Path) -> object:
        import holdfast

        out = path.with_name("pruned.safetensors" if masks is None else "pruned")
        try:
            return holdfast.prune(
                path,
                out,
                ["*norm*: keep", f"*: {rule}"],
                masks=masks,
                durable=False,
                read_back=False,
            )
        finally:
            shutil.rmtree(out) if out.is_dir() else out.unlink(missing_ok=True)

    return job


PRUNING: tuple[Case, ...] = tuple(
    Bound(f"prune-{name}", f"prune 4 GiB of bfloat16: {title}", checkpoint, job, LIMITS)
    for name, title, job in (
        ("magnitude", "half of each tensor", pruned("0.5")),
        ("global", "half of all, one threshold", pruned("global 0.5")),
        ("nm", "2:4", pruned("2:4")),
        ("block", "90% of the blocks of 4 × 4", pruned("block 4x4 0.9")),
        ("random", "half, at random", pruned("random 0.5")),
        ("masks", "half of each tensor, masks beside", pruned("0.5", "beside")),
    )
)
