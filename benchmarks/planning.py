"""`python -m benchmarks.planning`: how long one process takes to plan a sharded save, beside torch's own planner.

Ours runs at `--ranks` × `--tensors`; torch's, which is a Python loop over objects, at no more boxes than `--boxes`, and ours on
those same states again, so that the ratio compares equal work. What is measured on torch's side is what its coordinator does for a
save with `DefaultSavePlanner`: `dedup_save_plans`, `create_default_global_save_plan`, `_validate_global_plan`. The plans that it is
fed, and the states that we are fed, are made before the clock starts. Both run in one thread, so the figures are seconds of
processor time, which other work on the machine disturbs less; each side runs once, after a small plan that loads its code.

    sharded      every tensor cut along its first dimension over all ranks (FSDP)
    hybrid       two replicas of half as many shards each (HSDP)
    mesh         cut along two dimensions, ranks as a grid of 8 columns (FSDP × tensor parallel)
    replicated   every rank has everything (DDP)
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import resource
import time
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

from benchmarks.report import machine
from holdfast.ranks.plan import plan_ranks
from holdfast.ranks.state import Catalogue, RankState, decode, encode

LAYOUTS = ("sharded", "hybrid", "mesh", "replicated")
COLUMNS = 8
"""Ranks along the second dimension of the mesh: one node of eight accelerators."""


def catalogue_of(tensors: int, rows: int) -> Catalogue:
    """Tensors of several sizes, in a cycle like the layers of a model."""
    cycle = ((4, 64), (1, 256), (2, 32), (1, 0), (8, 128))
    shapes = [
        (rows * a, b * COLUMNS) if b else (rows * a,)
        for a, b in (cycle[i % len(cycle)] for i in range(tensors))
    ]
    names = tuple(
        f"model.layers.{i // len(cycle)}.block.{i % len(cycle)}.weight" for i in range(tensors)
    )
    return Catalogue(names, ("bfloat16",) * tensors, tuple(shapes))


def states_of(layout: str, ranks: int, tensors: int) -> list[RankState]:
    catalogue = catalogue_of(tensors, ranks)
    every = np.arange(tensors, dtype=np.int64)
    extents = catalogue.extents
    states = []
    for rank in range(ranks):
        offsets, sizes = np.zeros_like(extents), extents.copy()
        parts = {"sharded": ranks, "hybrid": ranks // 2, "mesh": ranks // COLUMNS, "replicated": 1}[
            layout
        ]
        part = rank // COLUMNS if layout == "mesh" else rank % parts
        sizes[0] = extents[0] // parts
        offsets[0] = sizes[0] * part
        if layout == "mesh":
            wide = extents[1] > 1
            sizes[1] = np.where(wide, extents[1] // COLUMNS, 1)
            offsets[1] = np.where(wide, sizes[1] * (rank % COLUMNS), 0)
        states.append(RankState(catalogue, every, offsets, sizes))
    return states


def dcp_plans(states: list[RankState]) -> list[object]:
    """The same as torch's save plans, one for each rank."""
    import torch
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        MetadataIndex,
        TensorProperties,
    )
    from torch.distributed.checkpoint.planner import (
        SavePlan,
        TensorWriteData,
        WriteItem,
        WriteItemType,
    )

    properties = TensorProperties(dtype=torch.bfloat16)
    plans = []
    for state in states:
        items = []
        for t, offsets, sizes in zip(
            state.tensors.tolist(), state.offsets.T.tolist(), state.sizes.T.tolist(), strict=True
        ):
            name, shape = state.catalogue.names[t], state.catalogue.shapes[t]
            dims = len(shape)
            at, size = torch.Size(offsets[:dims]), torch.Size(sizes[:dims])
            data = TensorWriteData(
                chunk=ChunkStorageMetadata(at, size), properties=properties, size=torch.Size(shape)
            )
            items.append(
                WriteItem(index=MetadataIndex(name, at), type=WriteItemType.SHARD, tensor_data=data)
            )
        plans.append(SavePlan(items))
    return plans


def dcp_plan(plans: list[object]) -> None:
    from torch.distributed.checkpoint._dedup_save_plans import dedup_save_plans
    from torch.distributed.checkpoint.default_planner import (
        _validate_global_plan,
        create_default_global_save_plan,
    )

    kept, metadata = create_default_global_save_plan(dedup_save_plans(plans))
    wrong = _validate_global_plan(kept, metadata)
    assert not wrong, wrong[0]


def seconds(job: Callable[[], object]) -> tuple[float, float]:
    """Processor time and wall time."""
    gc.collect()
    wall, processor = time.perf_counter(), time.process_time()
    job()
    return time.process_time() - processor, time.perf_counter() - wall


def measure_ours(layout: str, ranks: int, tensors: int) -> dict[str, float]:
    _planned(states_of(layout, 2 * COLUMNS, 2))
    states = states_of(layout, ranks, tensors)
    before = _peak()
    took, wall = seconds(lambda: _planned(states))
    return {
        "boxes": float(ranks * tensors),
        "seconds": took,
        "wall": wall,
        "peak": _peak(),
        "input": before,
    }


def _planned(states: list[RankState]) -> None:
    plan = plan_ranks(states)
    assert not plan.problems, plan.problems[0]


def measure_pair(layout: str, ranks: int, tensors: int) -> dict[str, float]:
    small = states_of(layout, 2 * COLUMNS, 2)
    _planned(small)
    dcp_plan(dcp_plans(small))
    states = states_of(layout, ranks, tensors)
    plans = dcp_plans(states)
    (ours, wall), (theirs, _) = seconds(lambda: _planned(states)), seconds(partial(dcp_plan, plans))
    return {"boxes": float(ranks * tensors), "ours": ours, "wall": wall, "dcp": theirs}


def measure_wire(ranks: int, tensors: int) -> dict[str, float]:
    states = states_of("sharded", ranks, tensors)
    described = [encode(state) for state in states]

    def decode_all() -> list[RankState]:
        known: dict[bytes, Catalogue] = {}
        return [decode(message, known) for message in described]

    return {
        "nbytes": float(len(described[0])),
        "encode": seconds(lambda: [encode(state) for state in states])[0] / ranks,
        "decode": seconds(decode_all)[0] / ranks,
    }


def _peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 << 20)


def alone(job: Callable[..., dict[str, float]], *arguments: object) -> dict[str, float]:
    """In a process of its own, so that the peak of memory is that of this job."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(job, arguments)


def rows(layouts: list[str], ranks: int, tensors: int, boxes: int) -> Iterator[tuple[str, ...]]:
    fewer = max(2 * COLUMNS, min(ranks, boxes // tensors) // COLUMNS * COLUMNS)
    for layout in layouts:
        large = alone(measure_ours, layout, ranks, tensors)
        yield (
            f"{layout}, {ranks:,} × {tensors:,}",
            f"{large['boxes'] / 1e6:.2f} M",
            f"{large['seconds']:.2f} s",
            f"{large['wall']:.2f} s",
            f"{large['seconds'] / large['boxes'] * 1e9:,.0f} ns",
            "",
            "",
            "",
            f"{large['peak']:.2f} GiB ({large['input']:.2f} before)",
        )
        if boxes:
            pair = alone(measure_pair, layout, fewer, tensors)
            yield (
                f"{layout}, {fewer:,} × {tensors:,}",
                f"{pair['boxes'] / 1e6:.2f} M",
                f"{pair['ours']:.2f} s",
                f"{pair['wall']:.2f} s",
                f"{pair['ours'] / pair['boxes'] * 1e9:,.0f} ns",
                f"{pair['dcp']:.2f} s",
                f"{pair['dcp'] / pair['boxes'] * 1e9:,.0f} ns",
                f"{pair['dcp'] / pair['ours']:.0f}×",
                "",
            )


def main() -> None:
    text = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.planning", description=__doc__, formatter_class=text
    )
    parser.add_argument(
        "--ranks",
        type=int,
        default=1024,
        help="ranks of our own runs, a multiple of 16 (default: 1024)",
    )
    parser.add_argument(
        "--tensors", type=int, default=5000, help="tensors of every run (default: 5000)"
    )
    parser.add_argument(
        "--boxes",
        type=int,
        default=160_000,
        help="the most boxes for torch's planner; 0 leaves it out",
    )
    parser.add_argument(
        "--layout", choices=LAYOUTS, action="append", help="only this one; may be given again"
    )
    asked = parser.parse_args()
    if asked.ranks < 2 * COLUMNS or asked.ranks % (2 * COLUMNS):
        parser.error(f"--ranks must be a multiple of {2 * COLUMNS}")
    headings = (
        "plan",
        "boxes",
        "ours",
        "(wall)",
        "a box",
        "torch",
        "a box",
        "ratio",
        "peak memory",
    )
    table = [
        headings,
        *rows(asked.layout or list(LAYOUTS), asked.ranks, asked.tensors, asked.boxes),
    ]
    widths = [max(len(row[i]) for row in table) for i in range(len(headings))]
    print(", ".join(f"{name} {value}" for name, value in machine().items()))
    for row in table:
        print(
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        )
    wire = alone(measure_wire, min(asked.ranks, 256), asked.tensors)
    print(
        f"a description of {asked.tensors:,} tensors: {wire['nbytes']:,.0f} bytes, {wire['encode'] * 1e3:.2f} ms to encode,"
        f" {wire['decode'] * 1e3:.2f} ms to decode"
    )


if __name__ == "__main__":
    main()
