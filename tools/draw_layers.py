"""Draw which layer of the package imports which, from the code. CONTRIBUTING.md shows the drawing.

    python tools/draw_layers.py              print it
    python tools/draw_layers.py --write      put it into CONTRIBUTING.md

Of the layers that a layer imports, directly or through others, only the uppermost are drawn.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))

from tests.imports import MODULES, dotted, imports_of, layer  # noqa: E402

PAGE = REPOSITORY / "CONTRIBUTING.md"

GROUPS = {
    "on top": ("jax", "integrations"),
    "extras": ("extras",),
    "adapter": ("torch",),
    "kernel": (),
}
"""The parts of the drawing, from above, with their folders. The kernel is what is left."""

DRAWING = re.compile(r"(?<=<!-- tools/draw_layers.py -->\n\n)(?:    .*\n)+")
"""The place of the drawing in CONTRIBUTING.md."""


def find_arrows() -> dict[str, set[str]]:
    """Return the layers that each layer imports. Imports for type checkers do not count."""
    arrows: dict[str, set[str]] = {}
    for path in MODULES:
        name = layer(dotted(path))
        imported = {layer(target) for target, _ in imports_of(path) if is_ours(target)}
        arrows.setdefault(name, set()).update(imported - {name})
    return arrows


def is_ours(module: str) -> bool:
    return module.split(".")[0] == "holdfast"


def find_all_below(name: str, arrows: dict[str, set[str]]) -> set[str]:
    """Return every layer that a layer reaches."""
    below: set[str] = set()
    waiting = [name]
    while waiting:
        for lower in arrows[waiting.pop()] - below:
            below.add(lower)
            waiting.append(lower)
    return below


def find_uppermost(name: str, arrows: dict[str, set[str]]) -> list[str]:
    """Return the layers that a layer imports, without those that they reach in turn."""
    reached: set[str] = set()
    for lower in arrows[name]:
        reached |= find_all_below(lower, arrows)
    return sorted(arrows[name] - reached)


def group_of(name: str) -> str:
    folder = name.split("/")[0]
    return next((group for group, folders in GROUPS.items() if folder in folders), "kernel")


def draw() -> str:
    """Return the drawing: a line for each layer, the uppermost first."""
    arrows = find_arrows()
    heights = {name: len(find_all_below(name, arrows)) for name in arrows}
    width = max(map(len, arrows)) + 2
    lines = []
    for group in GROUPS:
        names = [name for name in arrows if group_of(name) == group]
        lines.append(f"    ── {group} ".ljust(72, "─"))
        for name in sorted(names, key=lambda name: (-heights[name], name)):
            below = [label(lower) for lower in find_uppermost(name, arrows)]
            arrow = f"→ {', '.join(below)}" if below else ""
            lines.append(f"    {label(name):{width}} {arrow}".rstrip())
    return "\n".join(lines) + "\n"


def label(name: str) -> str:
    """Return the name of a layer for people. `holdfast/__init__.py` has an empty one."""
    return name or "holdfast"


def main() -> None:
    if "--write" in sys.argv[1:]:
        text = PAGE.read_text("utf-8")
        PAGE.write_text(DRAWING.sub(lambda _: draw(), text), "utf-8")
    else:
        sys.stdout.write(draw())


if __name__ == "__main__":
    main()
