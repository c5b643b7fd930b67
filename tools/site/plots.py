"""What `python -m benchmarks` measured, as a drawing: how many times as fast as the peer, on a scale of doublings.

    <!-- plot: slices: slices-*: Slices -->

The file is docs/measured/slices.json, as the benchmarks write it; then globs of cases, in the order of the drawing, and a title.
The target of a case is marked. The drawing is SVG inside of the page: colours come from the theme, text is text, and a table below
it has the same figures, with memory.
"""

from __future__ import annotations

import fnmatch
import html
import json
import math
from pathlib import Path

__all__ = ["drawn"]

LEFT, WIDE, ROW, TOP = 380, 900, 26, 34
"""Pixels: of the names, of the whole, of a row, and above the first."""


def drawn(folder: Path, what: str) -> str:
    """The drawing and the table of a mark."""
    name, globs, title = (part.strip() for part in what.split(":", 2))
    figures = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
    cases = figures["cases"]
    chosen = {
        case["case"]: case
        for glob in globs.split()
        for case in cases
        if fnmatch.fnmatchcase(case["case"], glob)
    }
    rows = [case for case in chosen.values() if case["ratio"]]
    if not rows:
        raise ValueError(f"{name}.json has no race that matches {globs}")
    machine = figures["machine"]
    known = [
        f"{key} {machine[key]}"
        for key in ("python", "numpy", "torch", "safetensors")
        if key in machine
    ]
    about = ", ".join(
        [
            machine["date"],
            f"{machine['cores']} cores",
            f"{machine['memory_gib']} GiB",
            machine["system"],
            *known,
        ]
    )
    return f"{_svg(title, rows)}\n\n{_table(rows)}\n\n{html.escape(about)}; medians of {figures['rounds']} rounds."


def _svg(title: str, rows: list[dict[str, object]]) -> str:
    ratios = [float(row["ratio"]) for row in rows] + [
        float(row["target"]) for row in rows if row.get("target")
    ]
    low = min(-1, math.floor(math.log2(min(ratios, default=1))))
    high = max(1, math.ceil(math.log2(max(ratios, default=1))))
    unit = (WIDE - LEFT - 60) / (high - low)
    tall = TOP + ROW * len(rows) + 8

    def x(ratio: float) -> float:
        return round(LEFT + (math.log2(ratio) - low) * unit, 1)

    said = "; ".join(f"{row['title']}: {float(row['ratio']):.2g} times" for row in rows)
    parts = [
        f'<svg class="plot" viewBox="0 0 {WIDE} {tall}" role="img" aria-label="{html.escape(f"{title}. {said}", quote=True)}">',
        f'<text class="plot-title" x="0" y="14">{html.escape(title)}</text>',
    ]
    for power in range(low, high + 1):
        at = x(2.0**power)
        label = f"{2**power}×" if power >= 0 else f"1/{2**-power}"
        parts.append(
            f'<line class="{"plot-one" if not power else "plot-grid"}" x1="{at}" x2="{at}" y1="{TOP - 8}" y2="{tall - 4}"/>'
        )
        parts.append(f'<text class="plot-tick" x="{at}" y="{TOP - 12}">{label}</text>')
    for number, row in enumerate(rows):
        y, ratio = TOP + number * ROW, float(row["ratio"])
        begin, end = sorted((x(1), x(ratio)))
        kind = "plot-bar" if ratio >= 1 else "plot-bar plot-behind"
        parts.append(
            f'<text class="plot-name" x="{LEFT - 10}" y="{y + 16}">{html.escape(str(row["title"]))}</text>'
        )
        parts.append(
            f'<rect class="{kind}" x="{begin}" y="{y + 4}" width="{max(round(end - begin, 1), 1)}" height="{ROW - 8}" rx="2"/>'
        )
        if row.get("target"):
            at = x(float(row["target"]))
            parts.append(
                f'<line class="plot-target" x1="{at}" x2="{at}" y1="{y + 1}" y2="{y + ROW - 1}"/>'
            )
        parts.append(
            f'<text class="plot-value" x="{max(end, x(1)) + 6}" y="{y + 16}">{ratio:.2g}×</text>'
        )
    return "\n".join([*parts, "</svg>"])


def _table(rows: list[dict[str, object]]) -> str:
    lines = [
        "| case | ours | peer | ratio | target | peak memory, ours / peer |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        ours, peer = (_time(row["medians"][side]) for side in ("ours", "peer"))
        target = f"≥ {row['target']:g}×" if row["target"] else ""
        peaks = [
            side["peak_nbytes"] / (1 << 20)
            for side in row["quantities"].values()
            if "peak_nbytes" in side
        ]
        memory = " / ".join(f"{peak:,.0f} MiB" for peak in peaks)
        lines.append(
            f"| {row['title']} | {ours} | {peer} {row['peer']} | {row['ratio']:.2f}× | {target} | {memory} |"
        )
    return "\n".join(lines)


def _time(seconds: float) -> str:
    return (
        f"{seconds:.2f} s"
        if seconds >= 1
        else f"{seconds * 1e3:.0f} ms"
        if seconds >= 0.01
        else f"{seconds * 1e3:.2f} ms"
    )
