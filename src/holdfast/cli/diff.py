"""`holdfast diff`: what `holdfast.diff` found, as a table and as JSON."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack

from holdfast.cli import values
from holdfast.cli.progress import bar
from holdfast.cli.text import Line, fields_of, print_json, print_lines, shell_text, width
from holdfast.core.group import joined_ranks
from holdfast.core.order import sort_naturally
from holdfast.core.tensor import LazyTensor
from holdfast.core.text import clip, escape, format_count, pluralize
from holdfast.engine.threads import count_reading_threads
from holdfast.numeric.compare import ContentDifference
from holdfast.numeric.dequantize import BLOCK_TYPES, number_shape
from holdfast.verbs.brief import brief
from holdfast.verbs.compare_values import Absent, ContainerKind, ValueChange
from holdfast.verbs.diff import Comparison, Diff, TensorChange
from holdfast.verbs.open import open_on_all_ranks
from holdfast.verbs.side import chosen_sides

DESCRIPTION = """\
Compare two checkpoints of any format. Lists the tensors and other values that were added, removed,
renamed or changed. Tensors with new NaN or Inf come first, then the largest changes.
Tensors with equal checksums in both files are not read, except with --exact.
"""

EXAMPLES = """\
exit codes, as for diff(1):
  0  the same
  1  different
  2  an error

examples:
  holdfast diff old.pt new.pt

  # Check a conversion, byte by byte.
  holdfast diff model.pt model.safetensors --exact

  # Compare checkpoints whose names differ by a prefix.
  holdfast diff trainer.ckpt model.safetensors --tensors-only \\
      --rename 'state_dict.*=*'

  # Show the ten largest changes of a fine-tuned model.
  holdfast diff base/ tuned/ --top 10
"""

SHOWN, NAME_WIDTH = 50, 60
"""Lines of one kind that are shown unless `--all` is given, and columns up to which names are aligned."""

Tensors = Mapping[str, LazyTensor]


def add_arguments(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("a", metavar="A", type=values.path, help=values.PATH_HELP)
    verb.add_argument("b", metavar="B", type=values.path, help="checkpoint to compare with A")
    verb.add_argument("-f", "--filter", metavar="GLOB", help="compare only names that match")
    verb.add_argument(
        "--rename",
        metavar="OLD=NEW",
        action="append",
        default=[],
        type=values.pair,
        help="rename tensors of A before the comparison: 'model.*=*'; repeatable",
    )
    verb.add_argument(
        "--map",
        metavar="MAP",
        help="convert A to another layout before the comparison, such as qwen3:hf:megatron",
    )
    verb.add_argument(
        "--tensors-only", action="store_true", help="ignore values that are not tensors"
    )
    verb.add_argument(
        "-e",
        "--exact",
        action="store_true",
        help="compare all bytes, even if the checksums are equal",
    )
    order = "order of changed tensors: largest change first (default), by name, or as in the file"
    verb.add_argument("--sort", choices=("change", "name", "file"), help=order)
    verb.add_argument(
        "--top", metavar="N", type=values.positive, help="show only the first N changed tensors"
    )
    verb.add_argument(
        "-a", "--all", action="store_true", help="show all differences (default: 50 of each kind)"
    )
    verb.add_argument("-q", "--quiet", action="store_true", help=values.QUIET_HELP)
    verb.add_argument("--json", action="store_true", help=values.JSON_HELP)


def run(options: argparse.Namespace) -> int:
    """The exit code is that of diff(1): 0 the same, 1 different (2, trouble, is an exception)."""
    with joined_ranks(options.group, "compare") as ranks, ExitStack() as stack:
        both = ((options.a, options.map), (options.b, None))
        checkpoints = open_on_all_ranks(ranks, stack, both)
        a, b = chosen_sides(
            checkpoints,
            rename=options.rename,
            filter=options.filter,
            tensors_only=options.tensors_only,
        )
        threads = count_reading_threads(None, None, ranks.count_local_ranks())
        comparison = Comparison(a, b, exact=options.exact, threads=threads, ranks=ranks)
        with (
            bar("Comparing", comparison.nbytes, quiet=options.quiet or options.json) as progress,
            ranks.joint_progress(progress) as counted,
        ):
            found = comparison.run(counted)
        if options.json:
            print_json(
                diff_document(
                    found,
                    sort=options.sort or ("file" if options.top is None else "change"),
                    top=options.top,
                )
            )
        else:
            lines = diff_lines(
                found,
                a.tensors,
                b.tensors,
                everything=options.all,
                sort=options.sort or "change",
                top=options.top,
            )
            print_lines(lines)
    return 0 if found.equal else 1


def diff_lines(
    found: Diff,
    a: Tensors,
    b: Tensors,
    *,
    everything: bool = False,
    sort: str = "change",
    top: int | None = None,
) -> Iterator[Line]:
    """The difference for people: a line for each thing that differs, NaN and Inf that appeared first, and one of totals."""
    if not found.equal:
        yield [("--- ", "foreign"), (escape(clip(found.a, 400)), "title")]
        yield [("+++ ", "clean"), (escape(clip(found.b, 400)), "title")]
    sick = found.nonfinite
    ranked = [change for change in found.ranked(sort) if not change.appeared][:top]
    sections: list[Sequence[tuple[str, str, str, list[str]]]] = [
        [("!", "error", change.name, _changed(change)) for change in sick[:top]],
        [("-", "foreign", name, _described(a[name])) for name in sort_naturally(found.removed)],
        [("+", "clean", name, _described(b[name])) for name in sort_naturally(found.added)],
        [
            (">", "group", r.a, ["→", escape(clip(r.b))])
            for r in sort_naturally(found.renamed, lambda one: one.a)
        ],
        [("~", "value", change.name, _changed(change)) for change in ranked],
        [_value(change) for change in found.values],
    ]
    shown = [section if everything else section[:SHOWN] for section in sections]
    names = [width(escape(clip(name))) for section in shown for _, _, name, _ in section]
    room = min(max(names, default=0), NAME_WIDTH)
    for section, part in zip(sections, shown, strict=True):
        rows = [cells for *_, cells in part]
        most = max(map(len, rows), default=0)
        columns = [
            max((width(row[i]) for row in rows if i < len(row)), default=0) for i in range(most)
        ]
        for mark, style, name, cells in part:
            text = escape(clip(name))
            gap = " " * max(room - width(text), 0)
            padded = [
                cell + " " * (w - width(cell)) for cell, w in zip(cells, columns, strict=False)
            ]
            yield [(f"{mark} {text}", style), (f"{gap}  {'  '.join(padded)}", "")]
        if len(part) < len(section):
            yield [(f"  … {len(section) - len(part):,} more: use --all or --json", "dim")]
    if top is not None and len(sick[:top]) + len(ranked) < len(found.changed):
        yield [
            (f"  … {len(found.changed) - len(sick[:top]) - len(ranked):,} more that changed", "dim")
        ]
    for note in found.notes:
        yield [(f"note: {shell_text(note, 2000)}", "note")]
    yield [(totals(found), "title")]


def totals(found: Diff) -> str:
    parts = [found.nonfinite_summary] if found.nonfinite else []
    kinds = {
        "removed": found.removed,
        "added": found.added,
        "renamed": found.renamed,
        "changed": found.changed,
    }
    parts += [f"{len(things):,} {word}" for word, things in kinds.items() if things]
    if found.values:
        parts.append(
            f"{pluralize(len(found.values), 'value')} differ{'s' if len(found.values) == 1 else ''}"
        )
    unread = f" ({found.same_by_checksum:,} by checksum)" if found.same_by_checksum else ""
    parts.append(f"{pluralize(found.same, 'tensor')} the same{unread}")
    return " · ".join(parts)


def _described(tensor: LazyTensor) -> list[str]:
    blocks = tensor.traits.blocks
    shape = number_shape(tensor.shape, blocks)
    return [tensor.traits.dtype_label(tensor.dtype), str(list(shape))]


def _changed(change: TensorChange) -> list[str]:
    dtype = change.dtypes[0] if change.dtypes[0] == change.dtypes[1] else " → ".join(change.dtypes)
    shapes = [str(list(shape)) for shape in change.shapes]
    shape = shapes[0] if shapes[0] == shapes[1] else " → ".join(shapes)
    if change.content is None:
        if shapes[0] != shapes[1]:
            return [dtype, shape]
        is_in_blocks = any(name in BLOCK_TYPES for name in change.dtypes)
        reason = (
            "blocks that cannot be decoded" if is_in_blocks else "one of them has no data (meta)"
        )
        return [dtype, shape, reason]
    return [dtype, shape, *_statistics(change.content, change.first_appeared)]


def _statistics(content: ContentDifference, first: tuple[int, ...] | None) -> list[str]:
    """The cells of a changed tensor; `first` is the index of the first element that became NaN or infinite."""
    if not content.changed:
        return ["every value is the same"]
    cells = [
        "relative -" if content.relative is None else f"relative {number(content.relative)}",
        "cosine -" if content.cosine is None else f"cosine {content.cosine:.6f}",
        "max abs -" if content.max_abs is None else f"max abs {number(content.max_abs)}",
        f"{format_count(content.changed)} of {format_count(content.total)}",
    ]
    became = (content.nan_appeared, "became NaN"), (content.inf_appeared, "became Inf")
    odd = [
        f"{format_count(many)} {what}"
        for many, what in (
            *became,
            (content.nan_disappeared, "were NaN"),
            (content.inf_disappeared, "were Inf"),
        )
        if many
    ]
    if content.appeared:
        place = f" (first at {list(first)})" if first else ""
        return [", ".join(odd) + place, *cells]
    stays = content.nans - content.nan_disappeared
    return [*cells, *odd, *([f"{format_count(stays)} NaN in both"] if stays else [])]


def number(value: float) -> str:
    """A statistic in a few digits; integers in all of theirs.

    >>> number(0.000123456), number(18446744073709551615), number(float("inf"))
    ('0.0001235', '18446744073709551615', 'inf')
    """
    return str(value) if isinstance(value, int) else f"{value:.4g}"


def _value(change: ValueChange) -> tuple[str, str, str, list[str]]:
    name = change.name or "(the whole)"
    if isinstance(change.a, Absent):
        return "+", "clean", name, [_text(change.b)]
    if isinstance(change.b, Absent):
        return "-", "foreign", name, [_text(change.a)]
    return "~", "value", name, [_text(change.a), "→", _text(change.b)]


def _text(value: object) -> str:
    return escape(str(value) if isinstance(value, ContainerKind) else brief(value))


def diff_document(found: Diff, *, sort: str = "file", top: int | None = None) -> dict[str, object]:
    """The difference as values that JSON has; numbers that it lacks as text; by default in the order of the files."""
    return {
        "schema": 1,
        **fields_of(found, "a b equal same same_by_checksum"),
        "nonfinite": [change.name for change in found.nonfinite],
        **fields_of(found, "removed added"),
        "renamed": [{"a": r.a, "b": r.b} for r in found.renamed],
        "changed": [
            fields_of(change, "name dtypes first_nan first_infinity")
            | {
                "shapes": [list(shape) for shape in change.shapes],
                "content": change.content and _content(change.content),
            }
            for change in found.ranked(sort)[:top]
        ],
        "values": [
            {"path": list(change.path)}
            | {
                side: None if isinstance(value, Absent) else _text(value)
                for side, value in (("a", change.a), ("b", change.b))
            }
            for change in found.values
        ],
        "notes": list(found.notes),
    }


def _content(content: ContentDifference) -> dict[str, object]:
    counted = "changed total cosine nans nan_appeared inf_appeared relative"
    return fields_of(content, counted) | {
        "nan_went": content.nan_disappeared,
        "inf_went": content.inf_disappeared,
        "max_abs": _native(content.max_abs),
        "max_rel": _native(content.max_rel),
    }


def _native(value: float | None) -> float | str | None:
    return value if value is None or isinstance(value, int) or math.isfinite(value) else str(value)
