"""`holdfast maps`: the maps between layouts of weights, and the proof that one fits a checkpoint."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from holdfast.cli import values
from holdfast.cli.text import Line, padded, print_json, print_lines
from holdfast.core.text import clip, escape, pluralize

if TYPE_CHECKING:
    from collections.abc import Iterator

    from holdfast.extras.maps.bind import Bound
    from holdfast.extras.maps.mapped import MappedTensors

DESCRIPTION = """\
List the layout maps, or check that one fits a checkpoint. A map converts the names and shapes of
weights from the layout of one framework to the layout of another, such as Hugging Face to Megatron.
'check' compares all names and shapes, and lists missing, unexpected and mismatched tensors. It
reads no tensor data.
"""

EXAMPLES = """\
A map has the form family:from:to, such as qwen3:hf:megatron.

exit codes of check:
  0  the map fits
  2  the map does not fit

examples:
  # List all families and their layouts.
  holdfast maps

  # Check a map, or find the one that fits.
  holdfast maps check qwen3:hf:megatron Qwen3-8B/
  holdfast maps check auto step-1000/

  # Show the source of one tensor.
  holdfast maps check qwen3:hf:megatron Qwen3-8B/ \\
      --explain decoder.layers.mlp.linear_fc1.weight

  # Check a map of your own.
  holdfast maps check my.toml:mine:hf model.safetensors

  # Use a map.
  holdfast convert Qwen3-8B/ step-0/ --map qwen3:hf:megatron
"""


def add_arguments(verb: argparse.ArgumentParser) -> None:
    verb.add_argument(
        "action",
        choices=("list", "check"),
        nargs="?",
        default="list",
        help="list all maps (default), or check that one fits a checkpoint",
    )
    verb.add_argument(
        "map",
        metavar="MAP",
        nargs="?",
        help="family:from:to, file.toml:from:to, or auto to find the family that fits",
    )
    verb.add_argument("path", metavar="PATH", type=values.path, nargs="?", help=values.PATH_HELP)
    verb.add_argument(
        "--explain", metavar="NAME", help="show the source of one tensor of the target layout"
    )
    verb.add_argument(
        "-a", "--all", action="store_true", help="list all tensors (default: a line for each kind)"
    )
    verb.add_argument("--json", action="store_true", help=values.JSON_HELP)


def run(options: argparse.Namespace) -> int:
    from holdfast.errors import BadArgument

    if options.action == "list":
        return _list(options)
    if options.map is None or options.path is None:
        raise BadArgument("pass a map and a checkpoint: holdfast maps check qwen3:hf:megatron PATH")
    from holdfast.extras.maps.find import find_map
    from holdfast.extras.maps.mapped import MappedTensors
    from holdfast.stores.paths import describe_place
    from holdfast.verbs.open import open as open_checkpoint

    with open_checkpoint(options.path, threads=1) as checkpoint:
        found = find_map(options.map, checkpoint, is_check=True)
        if found is None:
            print_lines(
                [
                    [
                        (escape(clip(checkpoint.path, 200)), "title"),
                        (" already has this layout", ""),
                    ]
                ]
            )
            return 0
        bound = found.bind(checkpoint)
        made = MappedTensors(bound)
        if options.json:
            print_json(_document(bound, made, describe_place(options.path)))
        elif options.explain is not None:
            print_lines(_explained(bound, made, options.explain))
        else:
            print_lines(_table(bound, made, everything=options.all))
    return 0


def _list(options: argparse.Namespace) -> int:
    from holdfast.extras.maps.find import families

    if options.json:
        rows = [
            {"family": one.name, "about": one.about, "layouts": [*one.layouts]}
            for one in families().values()
        ]
        print_json({"schema": 1, "families": rows})
        return 0
    known = [*families().values()]
    for name, one in zip(padded([one.name for one in known]), known, strict=True):
        print_lines(
            [[(name, "title"), (f"  {one.about}", ""), (f"  {', '.join(one.layouts)}", "dim")]]
        )
    print_lines([[("a map converts between two layouts of a family: qwen3:hf:megatron", "dim")]])
    return 0


def _table(bound: Bound, made: MappedTensors, *, everything: bool) -> Iterator[Line]:
    """A line for each part of the target, or for each tensor, with what it is made of."""
    title = bound.what
    if bound.source is bound.target:
        title = f"{bound.what.partition(':')[0]} in the layout {bound.source.name}"
    yield [
        (escape(title), "title"),
        (
            f"  fits: {pluralize(len(bound.targets), 'tensor')} of {bound.used:,}, checked without reading tensor data",
            "clean",
        ),
    ]
    rows: dict[str, tuple[str, int]] = {}
    for target in bound.targets:
        parts, part = (
            target.found.array.parts[bound.source.name],
            target.found.array.parts[bound.target.name][target.part],
        )
        name = (
            target.name if everything else bound.target.name_of(target.found.state, part.name.text)
        )
        met = zip(parts, made.meetings(target), strict=True)
        sources = ", ".join(one.name.text for one, meeting in met if not meeting.empty)
        rows[name] = f"{[*target.shape]}  from {sources}", rows.get(name, ("", 0))[1] + 1
    for name, (text, count) in zip(padded([*rows]), rows.values(), strict=True):
        yield [(name, "name"), (f"  {text}", "dim"), (f"  × {count}" if count > 1 else "", "size")]
    for note in bound.left_out():
        yield [(escape(note), "note")]


def _explained(bound: Bound, made: MappedTensors, name: str) -> Iterator[Line]:
    from holdfast.errors import NoSuchTensor

    target = next((one for one in bound.targets if one.name == name), None)
    if target is None:
        raise NoSuchTensor(
            f"the target layout has no tensor {name!r}; 'holdfast maps check --all' lists them",
            found=name,
        )
    array = target.found.array
    yield [
        (escape(name), "title"),
        (f"  {[*target.shape]}  {array.parts[bound.target.name][target.part].pattern}", "dim"),
    ]
    rows = made.sources(target)
    shapes = [bound.table.row_kind(row).shape for row in rows]
    patterns = {
        row: array.parts[bound.source.name][part].pattern
        for (part, _), row in target.found.rows.items()
    }
    for text, row, shape in zip(
        padded([bound.table.names[row] for row in rows]), rows, shapes, strict=True
    ):
        yield [("  from ", "dim"), (text, "name"), (f"  {[*shape]}  {patterns[row]}", "dim")]
    axes = dict.fromkeys(axis for part in array.parts[bound.target.name] for axis in part.axes)
    yield [
        ("  with ", "dim"),
        (", ".join(f"{axis} {bound.sizes.known.get(axis)}" for axis in axes), ""),
    ]


def _document(bound: Bound, made: MappedTensors, path: str) -> dict[str, object]:
    names = bound.table.names
    rows = [
        {"name": one.name, "shape": one.shape, "from": [names[row] for row in made.sources(one)]}
        for one in bound.targets
    ]
    return {
        "schema": 1,
        "path": path,
        "map": bound.what,
        "sizes": bound.sizes.known,
        "tensors": rows,
        "left_out": bound.dropped,
    }
