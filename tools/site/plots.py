"""Figures that were measured, as a drawing: how many times as fast as the peer, on a scale of doublings, with the target marked.

    {"title": "…", "machine": "…", "measured": "2026-11-16",
     "rows": [{"case": "…", "ratio": 3.2, "target": 3, "ours": "1.2 s", "peer": "3.8 s torch.save"}]}

The drawing is SVG inside of the page: colours come from the theme, text is text, and a table below it has the same figures.
"""

from __future__ import annotations

import html
import json
import math
from pathlib import Path

__all__ = ["drawn"]

LEFT, WIDE, ROW, TOP = 330, 860, 26, 34
"""Pixels: of the names, of the whole, of a row, and above the first."""


def drawn(path: Path) -> str:
    """The drawing and the table of a file of figures."""
    figures = json.loads(path.read_text(encoding="utf-8"))
    rows = [row for row in figures["rows"] if row.get("ratio")]
    about = f"{figures['measured']}, {figures['machine']}"
    return f"{_svg(figures['title'], rows)}\n\n{html.escape(about)}\n\n{_table(figures['rows'])}"


def _svg(title: str, rows: list[dict[str, object]]) -> str:
    ratios = [float(row["ratio"]) for row in rows] + [float(row["target"]) for row in rows if row.get("target")]
    low = min(-1, math.floor(math.log2(min(ratios, default=1))))
    high = max(1, math.ceil(math.log2(max(ratios, default=1))))
    unit = (WIDE - LEFT - 60) / (high - low)
    tall = TOP + ROW * len(rows) + 8

    def x(ratio: float) -> float:
        return round(LEFT + (math.log2(ratio) - low) * unit, 1)

    said = "; ".join(f"{row['case']}: {float(row['ratio']):.2g} times" for row in rows)
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
        parts.append(f'<text class="plot-name" x="{LEFT - 10}" y="{y + 16}">{html.escape(str(row["case"]))}</text>')
        parts.append(
            f'<rect class="{kind}" x="{begin}" y="{y + 4}" width="{max(round(end - begin, 1), 1)}" height="{ROW - 8}" rx="2"/>'
        )
        if row.get("target"):
            at = x(float(row["target"]))
            parts.append(f'<line class="plot-target" x1="{at}" x2="{at}" y1="{y + 1}" y2="{y + ROW - 1}"/>')
        parts.append(f'<text class="plot-value" x="{max(end, x(1)) + 6}" y="{y + 16}">{ratio:.2g}×</text>')
    return "\n".join([*parts, "</svg>"])


def _table(rows: list[dict[str, object]]) -> str:
    lines = ["| case | ours | peer | ratio | target |", "| --- | --- | --- | --- | --- |"]
    for row in rows:
        ratio = f"{float(row['ratio']):.2f}×" if row.get("ratio") else ""
        target = f"≥ {row['target']:g}×" if row.get("target") else ""
        lines.append(f"| {row['case']} | {row.get('ours', '')} | {row.get('peer', '')} | {ratio} | {target} |")
    return "\n".join(lines)
