"""`holdfast show --sparsity`: where the zeros of each tensor are. Every tensor is read, a few tiles at a time.

layers.0.mlp.weight  bf16  [4096, 4096]   50.00%  2:4
layers.1.mlp.weight  bf16  [4096, 4096]   90.01%  blocks of 16x16  3 dead rows
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from holdfast.cli.lines import Line, print_lines
from holdfast.cli.progress import bar
from holdfast.cli.show import LINES, matcher
from holdfast.cli.text import clip, escape, plural, width
from holdfast.inspect.open import open as open_checkpoint
from holdfast.inspect.sparsity import TensorSparsity, find_zeros

__all__ = ["run"]


def run(path: Path, *, pattern: str | None, everything: bool, as_json: bool) -> int:
    """The command; returns its exit code."""
    wanted = matcher("*" if pattern is None else pattern)
    with open_checkpoint(path, threads=1) as checkpoint:
        tensors = [checkpoint[name] for name in checkpoint if wanted(name)]
        with bar("Reading", sum(tensor.nbytes for tensor in tensors), quiet=as_json) as progress:
            found = find_zeros(tensors, progress=progress)
        if as_json:
            from holdfast.cli.document import print_json

            print_json({"schema": 1, "path": checkpoint.path, "tensors": [_document(row) for row in found]})
        else:
            print_lines(lines(checkpoint.path, found, None if everything else LINES))
    return 0


def lines(path: str, found: tuple[TensorSparsity, ...], most: int | None) -> Iterator[Line]:
    """What is printed."""
    size, zeros = sum(row.size for row in found), sum(row.zeros for row in found)
    share = f"{100 * zeros / size:.2f}% of {size:,} elements are zero" if size else "no elements"
    yield [(escape(clip(path, 200)), "title"), (f"  {plural(len(found), 'tensor')} · {share}", "dim")]
    shown = found[:most]
    names = [escape(clip(row.name, 70)) for row in shown]
    wide = max((width(name) for name in names), default=0)
    shapes = max((len(str(list(row.shape))) for row in shown), default=0)
    for name, row in zip(names, shown, strict=True):
        line: Line = [
            (name + " " * (wide - width(name)), "name"),
            (f"  {row.dtype:<8}", "dtype"),
            (f"  {list(row.shape)!s:<{shapes}}", "shape"),
            (f"  {100 * row.zeros / row.size if row.size else 0:6.2f}%", "size"),
        ]
        if row.pattern:
            line.append((f"  {row.pattern[0]}:{row.pattern[1]}", "value"))
        if row.block:
            line.append((f"  blocks of {row.block[0]}x{row.block[1]}", "value"))
        if row.dead_rows:
            line.append((f"  {plural(row.dead_rows, 'dead row')}", "note"))
        if row.dead_columns:
            line.append((f"  {plural(row.dead_columns, 'dead column')}", "note"))
        yield line
    if len(shown) < len(found):
        yield [(f"… {len(found) - len(shown):,} more: use --filter or --all", "dim")]


def _document(row: TensorSparsity) -> dict[str, object]:
    return {
        "name": row.name,
        "dtype": row.dtype,
        "shape": list(row.shape),
        "size": row.size,
        "zeros": row.zeros,
        "pattern": list(row.pattern) if row.pattern else None,
        "block": list(row.block) if row.block else None,
        "dead_rows": row.dead_rows,
        "dead_columns": row.dead_columns,
    }
