"""Outcomes as a table for a terminal, as markdown for docs/benchmarks.md, and as JSON."""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import platform
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

import holdfast
from benchmarks.board import Outcome, Times, processor_ratio
from benchmarks.floors import Floor, as_line

__all__ = ["as_markdown", "as_text", "machine", "write_json"]

HEADINGS = ("case", "ours", "peer", "ratio", "target", "", "peak memory, ours / peer", "beside")


def machine() -> dict[str, str | int]:
    """What a reader needs to judge the figures, and nothing that says whose machine it is."""
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "date": datetime.date.today().isoformat(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(pages / (1 << 30)),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "holdfast": holdfast.__version__,
        **{name: version(name) for name in ("numpy", "torch", "safetensors")},
    }


def rows(outcomes: Sequence[Outcome]) -> list[tuple[str, ...]]:
    return [_row(outcome) for outcome in outcomes]


def as_text(outcomes: Sequence[Outcome]) -> str:
    """Columns of plain text; rich is not needed and pipes stay readable."""
    table = [HEADINGS, *rows(outcomes)]
    widths = [max(len(row[i]) for row in table) for i in range(len(HEADINGS))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in table
    ]
    return "\n".join([lines[0], "-" * max(map(len, lines)), *lines[1:]])


def as_markdown(outcomes: Sequence[Outcome], floors: Sequence[Floor]) -> str:
    """The table of docs/benchmarks.md, with the machine above it, and what it takes for itself."""
    facts = machine()
    about = ", ".join(
        (
            f"{facts['date']}: {facts['cores']} cores",
            f"{facts['memory_gib']} GiB of memory",
            str(facts["system"]),
            f"Python {facts['python']}",
            *(f"{name} {facts[name]}" for name in ("numpy", "torch", "safetensors")),
        )
    )
    headings = [h or "met" for h in HEADINGS]
    lines = [" | ".join(cells) for cells in (headings, ["---"] * len(headings), *rows(outcomes))]
    return "\n".join([about, "", as_line(list(floors)), "", *(f"| {line} |" for line in lines)])


def write_json(
    outcomes: Sequence[Outcome], path: Path, *, rounds: int, quick: bool, floors: Sequence[Floor]
) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    cases = [dataclasses.asdict(outcome) | {"medians": _medians(outcome)} for outcome in outcomes]
    document = {
        "machine": machine(),
        "rounds": rounds,
        "quick": quick,
        "floors": [*map(dataclasses.asdict, floors)],
        "cases": cases,
    }
    path.write_text(json.dumps(document, indent=1) + "\n")


def _medians(outcome: Outcome) -> dict[str, float]:
    return {side: times.median for side, times in outcome.times.items()}


def _row(outcome: Outcome) -> tuple[str, ...]:
    if outcome.skipped:
        return (outcome.title, "", "", "", "", "skipped", "", outcome.skipped)
    ours, *others = outcome.times.values() or (None,)
    peer = f"{_time(others[0])} {outcome.peer.split(' / ')[0]}" if others else ""
    met = {None: "", True: "met", False: "MISSED"}[outcome.met]
    target = f"≥ {outcome.target:g}×" if outcome.target is not None else ""
    if "seconds" in outcome.limits:
        target = f"≤ {outcome.limits['seconds']:g} s"
    peaks = [_size(q["peak_nbytes"]) for q in outcome.quantities.values() if "peak_nbytes" in q]
    ratio = f"{outcome.ratio:.2f}×" if outcome.ratio is not None else ""
    return (
        outcome.title,
        _time(ours) if ours else "",
        peer,
        ratio,
        target,
        met,
        " / ".join(peaks),
        _beside(outcome),
    )


def _beside(outcome: Outcome) -> str:
    """What else was measured: quantities with limits, plans, further programs."""
    said = []
    measured = outcome.quantities.get("ours", {})
    processor = processor_ratio(outcome.times)
    if processor is not None:
        said.append(f"processor time {processor:.2f}×")
    if outcome.limits.get("read_nbytes"):
        said.append(
            f"{_size(measured['read_nbytes'])} read (≤ {_size(int(outcome.limits['read_nbytes']))})"
        )
        said.append(f"{measured['reads']:,} reads")
        said.append(f"memory ≤ {_size(int(outcome.limits['peak_nbytes']))}")
    elif "megabytes_per_second" in measured:
        said.append(f"{measured['megabytes_per_second']:,} MB/s")
    elif "wanted_nbytes" in measured:
        said.append(
            f"{measured['reads']:,} reads, {measured['read_nbytes']:,} B for {measured['wanted_nbytes']:,} wanted"
        )
    for label, times in list(outcome.times.items())[2:]:
        said.append(f"{_time(times)} {label}")
    return ", ".join(said)


def _time(times: Times) -> str:
    seconds = times.median
    shown = (
        f"{seconds:.2f} s"
        if seconds >= 1
        else f"{seconds * 1e3:.0f} ms"
        if seconds >= 0.01
        else f"{seconds * 1e3:.2f} ms"
    )
    return f"{shown} ±{times.spread:.0%}" if len(times.seconds) > 1 else shown


def _size(nbytes: int) -> str:
    return f"{nbytes / (1 << 30):.2f} GiB" if nbytes >= 1 << 30 else f"{nbytes / (1 << 20):.1f} MiB"
