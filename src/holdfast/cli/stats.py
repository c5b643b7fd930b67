"""`holdfast stats`: least, largest, mean, deviation, norm and a histogram of each tensor.

layers.0.weight  bfloat16 [4096, 4096]  min -0.21  max 0.2  mean 1.2e-05  std 0.031  norm 127  zeros 12
                 ▁▁▁▂▃▅▇█▇▅▃▂▁▁▁
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from holdfast.cli import values
from holdfast.cli.text import LINES, Line, fields_of, guides, padded, print_json, print_lines, width
from holdfast.core.order import in_order
from holdfast.core.text import clip, escape, plural

if TYPE_CHECKING:
    from holdfast.inspect.stats import TensorStats

DESCRIPTION = """\
Say what the numbers of each tensor look like. Every tensor is read, in parallel and in bounded memory. NaN and infinities are
counted and left out of everything else; the histogram goes from the least to the largest, its bars by their counts."""

EXAMPLES = """\
examples:
  holdfast stats model.safetensors
  holdfast stats model.pt -f '*.attn.*' --bins 64
  holdfast stats model.pt --json | jq '.tensors[] | select(.nans > 0).name'
"""

BARS = " ▁▂▃▄▅▆▇█"
PLAIN_BARS = " .:-=+*#@"


def add_arguments(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("path", metavar="PATH", type=values.path, help="a checkpoint of any format")
    verb.add_argument("-f", "--filter", metavar="GLOB", help="only names that match")
    verb.add_argument(
        "--bins", metavar="N", type=_bins, default=32, help="bars of the histogram (32); 0 for none"
    )
    verb.add_argument("--threads", metavar="N", type=values.positive, help="how many threads")
    verb.add_argument("-a", "--all", action="store_true", help="every tensor")
    verb.add_argument("-q", "--quiet", action="store_true", help=values.QUIET_HELP)
    verb.add_argument(
        "--json",
        action="store_true",
        help="print one JSON document (its schema is in docs/pruning.md)",
    )


def _bins(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) > 4096:
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 0 to 4096")
    return int(text)


def run(options: argparse.Namespace) -> int:
    from holdfast.cli.progress import bar
    from holdfast.core.group import acting
    from holdfast.engine.budget import reading_threads
    from holdfast.inspect.open import compare_opened
    from holdfast.inspect.open import open as open_checkpoint
    from holdfast.inspect.stats import chosen, measure, reading_nbytes

    with (
        acting(options.group, "measure tensors") as ranks,
        open_checkpoint(options.path, threads=1) as checkpoint,
    ):
        compare_opened(ranks, checkpoint)
        tensors = chosen(checkpoint, options.filter)
        total = reading_nbytes(tensors, bins=options.bins)
        workers = reading_threads(None, options.threads, ranks.neighbours())
        with (
            bar("Reading", total, quiet=options.quiet or options.json) as progress,
            ranks.counting(progress) as counted,
        ):
            found = measure(
                tensors, bins=options.bins, threads=workers, progress=counted, ranks=ranks
            )
        if options.json:
            names = "name dtype shape size mean std norm nans infinities zeros histogram minimum maximum"
            rows = [fields_of(row, names) for row in found]
            rows = [row | {"min": row.pop("minimum"), "max": row.pop("maximum")} for row in rows]
            print_json({"schema": 1, "path": checkpoint.path, "tensors": rows})
        else:
            print_lines(
                lines(
                    checkpoint.path,
                    found,
                    None if options.all else LINES,
                    bars=BARS if guides()[0].startswith("├") else PLAIN_BARS,
                )
            )
    return 0


def lines(
    path: str, found: Sequence[TensorStats], most: int | None, *, bars: str
) -> Iterator[Line]:
    yield [(escape(clip(path, 200)), "title"), (f"  {plural(len(found), 'tensor')}", "dim")]
    shown = in_order(found, lambda row: row.name)[:most]
    for name, row in zip(padded([row.name for row in shown]), shown, strict=True):
        line: Line = [(name, "name"), (f"  {row.dtype} {list(row.shape)}", "dim")]
        for label, value in (
            ("min", row.minimum),
            ("max", row.maximum),
            ("mean", row.mean),
            ("std", row.std),
            ("norm", row.norm),
        ):
            line += [(f"  {label} ", "dim"), ("-" if value is None else f"{value:.4g}", "")]
        for label, number in (("zeros", row.zeros), ("NaN", row.nans), ("inf", row.infinities)):
            if number:
                line.append((f"  {label} {number:,}", "dim" if label == "zeros" else "error"))
        yield line
        if row.histogram:
            yield [(" " * (width(name) + 2), ""), (draw(row.histogram, bars), "size")]
    if len(shown) < len(found):
        yield [(f"… {len(found) - len(shown):,} more: use --filter or --all", "dim")]


def draw(counts: Sequence[int], bars: str = BARS) -> str:
    """A bar for each count; what is not zero is never drawn as nothing.

    >>> draw([0, 1, 50, 100])
    ' ▁▄█'
    """
    top = max(counts, default=0)
    return "".join(bars[0] if not n else bars[max(1, n * (len(bars) - 1) // top)] for n in counts)
