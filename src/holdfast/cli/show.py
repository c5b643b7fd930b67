"""`holdfast show`: what is in a checkpoint, on a screen.

    model.pt  torch-zip · 4 tensors · 131.1K parameters · 512.1 KiB · f32 100%
    ├─ embed.weight             f32   [256, 256]     256.0 KiB
    ├─ layers.[0-1].norm        f32   2 × [8]             64 B
    └─ head.weight              f32   [256, 256]     256.0 KiB   = embed.weight

Columns hold for the lines that are shown. An outline of more than `LINES` lines is shown as deep as fits; one that
does not fit at any depth is cut, and the last line says how much is missing and how to see it.

`--json` prints the whole description as one JSON document. The schema is in docs/cli.md; it only ever grows. The document is ASCII,
so hostile names are exact and harmless at once. Numbers that JSON lacks (NaN, infinities, complex) are given as text. `--ranks`
draws which file holds which part of each tensor; tensors that are cut in the same way are drawn once. `--sparsity` reads every
tensor and says where its zeros are.
"""

from __future__ import annotations

import argparse
import itertools
import math
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from holdfast.cli import values
from holdfast.cli.outline import (
    Branch,
    LeafNode,
    Node,
    arrange,
    branches,
    fold,
    leaves,
    outline,
    total,
)
from holdfast.cli.seal import seal_lines
from holdfast.cli.text import (
    LINES,
    Line,
    fields_of,
    guides,
    line_width,
    padded,
    print_json,
    print_lines,
    shell_text,
    width,
)
from holdfast.core.checkpoint import Checkpoint
from holdfast.core.chunk import Chunk
from holdfast.core.dtype import DTYPES, DType
from holdfast.core.order import natural_sort_key, sort_naturally
from holdfast.core.patterns import make_matcher
from holdfast.core.tensor import LazyTensor
from holdfast.core.text import clip, escape, format_count, format_nbytes, format_percent, pluralize
from holdfast.core.tree import FREE_CHARACTERS
from holdfast.core.value import Value
from holdfast.errors import UnknownFormat
from holdfast.formats.index_file import some
from holdfast.numeric.dequantize import number_shape
from holdfast.stores.place import place_at
from holdfast.verbs.open import open as open_checkpoint
from holdfast.verbs.survey import Survey, survey
from holdfast.verbs.trainers import find_step_folders

if TYPE_CHECKING:
    from holdfast.verbs.sparsity import TensorSparsity

DESCRIPTION = """\
List the tensors of a checkpoint with their dtypes, shapes and sizes. Also lists tied weights, plain
values, and objects of classes that Holdfast does not load. Reads no tensor data, except with
--sparsity.
Layers of the same structure appear once, as layers.[0-31].
"""

EXAMPLES = """\
examples:
  holdfast show model.pt

  # Only the attention weights.
  holdfast show model.pt --filter '*.attn.*'

  # The settings of the optimizer.
  holdfast show trainer.pt --filter optimizer.param_groups

  # The first two levels of the tree.
  holdfast show model.safetensors --depth 2

  # All names, for a script.
  holdfast show model.pt --json | jq -r '.tensors[].name'
"""

WIDEST_NAME = 70
"""Columns of the widest name that the columns beside it make room for; longer ones push theirs to the right."""

PIECES = ("├─ ", "└─ ", "│  ", "   ")


class OutlineRow(Value, frozen=True):
    lead: str
    name: Line
    dtype: str = ""
    shape: str = ""
    size: str = ""
    remark: Line | None = None


def add_arguments(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("path", metavar="PATH", type=values.path, help=values.PATH_HELP)
    verb.add_argument(
        "-f", "--filter", metavar="GLOB", help="list only names that match, as a flat table"
    )
    verb.add_argument(
        "-d",
        "--depth",
        metavar="N",
        type=values.positive,
        help="number of levels to show (default: as many as fit in 200 lines)",
    )
    verb.add_argument(
        "-a",
        "--all",
        action="store_true",
        help="show every tensor and value, without folding equal layers",
    )
    verb.add_argument(
        "--ranks", action="store_true", help="show which file contains which part of each tensor"
    )
    verb.add_argument(
        "--sparsity", action="store_true", help="show the zeros of each tensor; reads all tensors"
    )
    verb.add_argument("--json", action="store_true", help=values.JSON_HELP)


def run(options: argparse.Namespace) -> int:
    path, pattern = options.path, options.filter
    if options.ranks:
        with open_checkpoint(path) as checkpoint:
            print_lines(rank_lines(checkpoint, pattern))
        return 0
    if options.sparsity:
        return _run_sparsity(options)
    try:
        opened = open_checkpoint(path)
    except UnknownFormat:
        # A folder of another trainer's may be no checkpoint as a whole, and be sealed as one.
        lines = [] if options.json or not path.is_dir() else list(seal_lines(path))
        if not lines:
            raise
        print_lines(
            [
                [(escape(str(path)), "title"), ("  holdfast opens its files one by one", "dim")],
                *lines,
            ]
        )
        return 0
    with opened as checkpoint:
        if options.json:
            print_json(
                document(checkpoint, wanted=make_matcher("*" if pattern is None else pattern))
            )
        elif pattern is not None:
            print_lines(show_table(checkpoint, pattern, everything=options.all))
        else:
            print_lines(
                show_tree(checkpoint, depth=options.depth, everything=options.all, pieces=guides())
            )
            print_lines(seal_lines(path))
            print_lines(step_lines(checkpoint))
    return 0


def step_lines(checkpoint: Checkpoint) -> Iterator[Line]:
    """A line for the steps of a run that lie in the folder of a checkpoint, as trainers leave them beside the last weights."""
    store = checkpoint.source.store
    # Listing a folder of this machine is cheap, listing a bucket takes requests.
    is_local = store.is_folder and place_at(checkpoint.path).on_disk
    steps = find_step_folders(store.list()) if is_local else []
    if steps:
        yield [
            (f"steps     {_plain_text(some(steps), 200)}", "note"),
            (f"  `holdfast runs {escape(shlex.quote(checkpoint.path))}` lists them", "dim"),
        ]


def short_dtype(dtype: DType) -> str:
    """The short name of a dtype: that of safetensors where there is one."""
    return dtype.safetensors.lower() if dtype.safetensors else dtype.name


def show_tree(
    checkpoint: Checkpoint,
    *,
    depth: int | None = None,
    everything: bool = False,
    pieces: tuple[str, str, str, str] = PIECES,
) -> Iterator[Line]:
    """The lines of the whole view: header, tree, notes."""
    found = survey(checkpoint)
    root = outline(checkpoint, found)
    arrange(root)
    if not everything:
        fold(root)
    total(root)
    yield _header(checkpoint, found, root)
    levels = _levels(root)
    wanted = sum(levels[:depth])
    if depth is None and not everything:
        depth = max((d for d in range(1, len(levels) + 1) if sum(levels[:d]) <= LINES), default=1)
    rows = list(
        itertools.islice(
            _rows(root, "", depth or len(levels), pieces=pieces), None if everything else LINES
        )
    )
    yield from _aligned(rows)
    if len(rows) < wanted:
        yield [(f"… {wanted - len(rows):,} more lines: use --depth, --filter or --all", "dim")]
    yield from _sharing(checkpoint, found)
    yield from _footer(checkpoint)


def show_table(checkpoint: Checkpoint, pattern: str, *, everything: bool = False) -> Iterator[Line]:
    """The lines of `--filter`: tensors, then plain values, whose dotted names match."""
    wanted = make_matcher(pattern)
    found = survey(checkpoint)
    tensors = {name: found.tensors[name] for name in sort_naturally(filter(wanted, found.tensors))}
    rows = [
        _tensor_row("", LeafNode(name, name, "tensor", tensor=tensor, tie=found.ties.get(name, "")))
        for name, tensor in tensors.items()
    ]
    everywhere = leaves(outline(checkpoint, found, split=False))
    values = sort_naturally(
        (leaf for leaf in everywhere if leaf.kind != "tensor" and wanted(leaf.name)),
        lambda leaf: leaf.name,
    )
    rows += [OutlineRow("", [*_named(leaf.name), *_value(leaf)]) for leaf in values]
    size = format_nbytes(sum(tensor.nbytes for tensor in tensors.values()))
    yield [
        (escape(checkpoint.path), "title"),
        (
            f"  {pluralize(len(tensors), 'tensor')} of {len(checkpoint):,} match {escape(pattern)} · {size}",
            "dim",
        ),
    ]
    shown = rows if everything else rows[:LINES]
    yield from _aligned(shown)
    if len(shown) < len(rows):
        yield [(f"… {len(rows) - len(shown):,} more: use a narrower --filter or --all", "dim")]


def _header(checkpoint: Checkpoint, found: Survey, root: Branch) -> Line:
    elements = sum(found.elements.values())
    # Optimizer moments are not parameters. The word is safe only where there are nothing but tensors, or one module.
    pure = root.kind == "module" or all(leaf.kind == "tensor" for leaf in leaves(root))
    parts = [checkpoint.format, pluralize(len(checkpoint), "tensor")]
    if elements:
        parts.append(f"{format_count(elements)} {'parameters' if pure else 'elements'}")
    parts.append(format_nbytes(found.nbytes))
    common = sorted(found.elements.items(), key=lambda item: -item[1])
    for name, dtype_elements in common[:4]:
        if dtype_elements:
            dtype = DTYPES.name(name)
            label = name if dtype is None else short_dtype(dtype)
            parts.append(f"{label} {format_percent(dtype_elements, elements)}")
    line: Line = [(escape(checkpoint.path), "title"), (f"  {' · '.join(parts)}", "dim")]
    if root.kind in ("object", "module"):
        line.append((f"  {_plain_text(root.text)}", "foreign"))
    return line


def _sharing(checkpoint: Checkpoint, found: Survey) -> Iterator[Line]:
    """Lines that say which models of a package share how many bytes."""
    models = (
        list(checkpoint.tree)
        if not checkpoint.is_flat and isinstance(checkpoint.tree, dict)
        else []
    )
    if len(models) < 2 or ", ".join(map(str, models)) != checkpoint.metadata.get("models"):
        return
    groups: dict[tuple[str, ...], list[int]] = {}
    # Of `a` and `a.b` the longer one is meant.
    known = sorted(map(str, models), key=len, reverse=True)
    for alias in found.aliases:
        paths = [
            next((model for model in known if name.startswith(f"{model}.")), "")
            for name in alias.names
        ]
        together = tuple(dict.fromkeys(path for path in paths if path))
        if len(together) > 1:
            groups.setdefault(together, []).append(alias.storage.nbytes)
    for together, sizes in sorted(groups.items(), key=lambda item: -sum(item[1]))[:10]:
        names = " + ".join(_plain_text(model, 40) for model in together[:8]) + (
            ", …" if len(together) > 8 else ""
        )
        saved = format_nbytes(sum(sizes) * (len(together) - 1))
        yield [
            (f"shared    {names}", "tie"),
            (
                f"  {format_nbytes(sum(sizes))} in {pluralize(len(sizes), 'storage')}, which saves {saved}",
                "dim",
            ),
        ]
    if len(groups) > 10:
        yield [(f"shared    … {len(groups) - 10:,} more sets of models", "dim")]


def _footer(checkpoint: Checkpoint) -> Iterator[Line]:
    if checkpoint.metadata:
        # torch's records about itself that begin with a dot tell a person nothing; --json has them.
        visible = [(k, v.strip()) for k, v in checkpoint.metadata.items() if not k.startswith(".")]
        pairs = [f"{_plain_text(k, 40)}={_plain_text(v, 40)}" for k, v in visible[:8]]
        more = len(visible) - len(pairs)
        yield [(f"metadata  {', '.join(pairs)}{f', … {more} more' if more else ''}", "dim")]
    if checkpoint.foreign:
        names = list(dict.fromkeys(_plain_text(str(f.what), 80) for f in checkpoint.foreign))
        shown = ", ".join(names[:5]) + (f", … {len(names) - 5:,} more" if len(names) > 5 else "")
        yield [
            (f"foreign   {shown}", "foreign"),
            (
                f"  ({pluralize(len(names), 'global')} not imported, shown as data; see holdfast scan)",
                "dim",
            ),
        ]
    for note in checkpoint.notes[:10]:
        yield [(f"note      {shell_text(note, 400)}", "note")]
    if len(checkpoint.notes) > 10:
        yield [(f"note      … {len(checkpoint.notes) - 10:,} more notes: see --json", "note")]


def _rows(
    branch: Branch, lead: str, depth: int, *, pieces: tuple[str, str, str, str]
) -> Iterator[OutlineRow]:
    tee, corner, bar, gap = pieces
    for position, child in enumerate(branch.children):
        last = position == len(branch.children) - 1
        here = lead + (corner if last else tee)
        if isinstance(child, Branch):
            yield _branch_row(here, child)
            if depth > 1:
                yield from _rows(child, lead + (gap if last else bar), depth - 1, pieces=pieces)
        elif child.tensor is not None:
            yield _tensor_row(here, child)
        else:
            yield OutlineRow(here, [*_named(child.label), *_value(child)])


def _tensor_row(lead: str, leaf: LeafNode) -> OutlineRow:
    if leaf.tensor is None:
        raise ValueError("a row of a tensor needs one")
    blocks = leaf.tensor.traits.blocks
    shape = str(list(number_shape(leaf.tensor.shape, blocks)))
    remark: Line = [(_plain_text(leaf.tie), "tie")] if leaf.tie else []
    if leaf.tensor.traits.meta:
        remark.append(("no data (meta device)", "note"))
    if leaf.tensor.traits.subclass is not None:
        remark.append((_plain_text(str(leaf.tensor.traits.subclass), 80), "foreign"))
    if leaf.role:
        remark.append((leaf.role, "dim"))
    return OutlineRow(
        lead,
        _named(leaf.label),
        short_dtype(leaf.tensor.dtype) if blocks is None else blocks,
        shape if leaf.times == 1 else f"{leaf.times:,} × {shape}",
        # What is tied is stored once, and counted there: so the sizes on the screen add up.
        ""
        if leaf.tie.startswith("=") or leaf.tensor.traits.meta
        else format_nbytes(leaf.tensor.nbytes * leaf.times),
        remark,
    )


def _branch_row(lead: str, branch: Branch) -> OutlineRow:
    name: Line = [(_plain_text(branch.label), "group")]
    if branch.kind in ("object", "module"):
        name.append((f"  {_plain_text(branch.text, 80)}", "foreign"))
    elif branch.kind not in ("group", "dict", "list", "tuple"):
        shape = branch.text if branch.times == 1 else f"{branch.times:,} × {branch.text}"
        size = format_nbytes(branch.nbytes * branch.times)
        return OutlineRow(
            lead, name, branch.kind, shape, size, [(_plain_text(branch.remark), "dim")]
        )
    inside = (
        pluralize(branch.tensors, "tensor")
        if branch.tensors
        else pluralize(sum(child.times for child in branch.children), "item")
    )
    if branch.times > 1:
        inside = f"{branch.times:,} × {inside}"
    return OutlineRow(
        lead,
        name,
        "",
        inside,
        format_nbytes(branch.nbytes * branch.times) if branch.tensors else "",
    )


def _named(label: str) -> Line:
    return [(_plain_text(label) or "''", "name")]


def _value(leaf: LeafNode) -> Line:
    if leaf.kind == "link":
        return [(f" = {_plain_text(leaf.text)}", "tie"), (" (the same object)", "dim")]
    return [
        (" = ", "dim"),
        (_plain_text(leaf.text), "foreign" if leaf.kind == "object" else "value"),
    ]


def _plain_text(text: str, limit: int = 200) -> str:
    """Text out of a file, cut before it is escaped, so that a name of a million characters costs nothing."""
    return escape(clip(text, limit))


def _aligned(rows: list[OutlineRow]) -> Iterator[Line]:
    columns = line_width(sys.stdout) or 0
    lefts = [width(row.lead) + sum(width(text) for text, _ in row.name) for row in rows]
    tensors = [(left, row) for left, row in zip(lefts, rows, strict=True) if row.shape]
    dtype_width = max((len(row.dtype) for _, row in tensors), default=0)
    shape_width = max((min(len(row.shape), 40) for _, row in tensors), default=0)
    size_width = max((len(row.size) for _, row in tensors), default=0)
    # In a narrow terminal, names of more than half of it push their columns to the next line, rather than those of all others.
    widest = min(
        WIDEST_NAME,
        max(columns - dtype_width - shape_width - size_width - 6, columns // 2)
        if columns
        else WIDEST_NAME,
    )
    left_width = max((left for left, _ in tensors if left <= widest), default=0)
    for left, row in zip(lefts, rows, strict=True):
        line: Line = [(row.lead, "dim"), *row.name]
        if row.shape:
            line += [
                (" " * max(left_width - left, 0) + "  ", ""),
                (row.dtype.ljust(dtype_width), "dtype"),
                ("  " + row.shape.ljust(shape_width), "shape" if row.dtype else "dim"),
                ("  " + row.size.rjust(size_width), "size"),
            ]
            for text, style in row.remark or ():
                line.append((f"  {text}", style))
        yield line


def _levels(root: Branch) -> list[int]:
    counts: list[int] = []
    level: list[Node] = list(root.children)
    while level:
        counts.append(len(level))
        level = [child for node in level if isinstance(node, Branch) for child in node.children]
    return counts


LONGEST, LISTED = 1024, 1000
"""Characters of the name that a link points at, and items of a plain list that are given in full."""


def document(
    checkpoint: Checkpoint, *, wanted: Callable[[str], bool] = lambda name: True
) -> dict[str, object]:
    """The checkpoint as values that JSON has. `wanted` chooses the names of tensors and values that are listed."""
    found = survey(checkpoint)
    root = outline(checkpoint, found, split=False)
    everywhere = list(leaves(root))
    values = _Values(FREE_CHARACTERS + checkpoint.stored_nbytes)
    roles = {leaf.name: leaf.role for leaf in everywhere if leaf.role}
    return {
        "schema": 1,
        "path": checkpoint.path,
        "format": checkpoint.format,
        "nbytes": found.nbytes,
        "tensors": [
            _tensor_fields(name, tensor, roles.get(name, ""), tie=found.ties.get(name, ""))
            for name, tensor in found.tensors.items()
            if wanted(name)
        ],
        "values": [
            values.entry(leaf) for leaf in everywhere if leaf.kind != "tensor" and wanted(leaf.name)
        ],
        "objects": [
            {"name": b.name, "kind": b.kind, "class": b.text}
            for b in branches(root)
            if b.kind in ("object", "module") and wanted(b.name)
        ],
        "aliases": [{"names": list(a.names), "storage": a.storage.label} for a in found.aliases],
        "foreign": [
            {
                "module": f.what.module,
                "name": f.what.name,
                **fields_of(f, "uses stream offset paths"),
            }
            for f in checkpoint.foreign
        ],
        "notes": list(checkpoint.notes),
        "metadata": dict(checkpoint.metadata),
    }


def _tensor_fields(name: str, tensor: LazyTensor, role: str, *, tie: str) -> dict[str, object]:
    traits = tensor.traits
    return {
        "name": name,
        "dtype": tensor.dtype.name,
        "shape": list(tensor.shape),
        "nbytes": tensor.nbytes,
        "role": role or None,
        "requires_grad": traits.requires_grad,
        "subclass": str(traits.subclass) if traits.subclass is not None else None,
        "meta": traits.meta,
        "blocks": traits.blocks,
        "same_as": tie.removeprefix("= ") if tie.startswith("= ") else None,
        "chunks": [_chunk(chunk) for chunk in tensor.chunks],
    }


def _chunk(chunk: Chunk) -> dict[str, object]:
    storage = chunk.storage
    return {
        "start": list(chunk.box.start),
        "stop": list(chunk.box.stop),
        "bit_offset": chunk.offset,
        "bit_strides": list(chunk.strides),
        "file": storage.key,
        "storage_start": storage.start,
        "storage_nbytes": storage.nbytes,
        "storage_label": storage.label,
        "byteorder": storage.byteorder,
        "crc32": storage.crc32,
        "location": storage.location,
    }


class _Values:
    """Entries for plain values. One long text may stand in a million places: what `room` does not hold is given in short."""

    def __init__(self, room: int) -> None:
        self._room = room

    def entry(self, leaf: LeafNode) -> dict[str, object]:
        if leaf.kind == "link":
            return {"name": leaf.name, "type": "link", "to": clip(leaf.text, LONGEST)}
        entry: dict[str, object] = {"name": leaf.name, "type": leaf.type, "text": leaf.text}
        if isinstance(leaf.value, list | tuple):
            entry["count"] = len(leaf.value)
            if (
                len(leaf.value) <= LISTED
                and self._fits(leaf.value)
                and all(map(_is_exact, leaf.value))
            ):
                entry["value"] = list(leaf.value)
        elif _is_exact(leaf.value) and self._fits((leaf.value,)):
            entry["value"] = leaf.value
        return entry

    def _fits(self, values: Sequence[object]) -> bool:
        price = sum(len(value) if isinstance(value, str) else 1 for value in values)
        if price > self._room:
            return False
        self._room -= price
        return True


def _is_exact(value: object) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    return value is None or type(value) in (bool, int, str)


LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789"
WIDTH, HEIGHT = 32, 8

PICTURES = 24


def rank_lines(checkpoint: Checkpoint, pattern: str | None) -> Iterator[Line]:
    wanted = make_matcher("*" if pattern is None else pattern)
    held: dict[str, int] = {}
    drawn: dict[object, list[str]] = {}
    sample: dict[object, LazyTensor] = {}
    for name in sort_naturally(filter(wanted, checkpoint)):
        tensor = checkpoint[name]
        for chunk in tensor.chunks:
            key = _file(chunk.storage.key)
            held[key] = held.get(key, 0) + tensor.dtype.nbytes(chunk.box.count)
        cut = (
            tensor.shape,
            tensor.dtype.name,
            tuple((c.box.start, c.box.stop, _file(c.storage.key)) for c in tensor.chunks),
        )
        drawn.setdefault(cut, []).append(name)
        sample.setdefault(cut, tensor)
    letters = {
        key: LETTERS[i % len(LETTERS)] for i, key in enumerate(sorted(held, key=natural_sort_key))
    }
    yield [(escape(clip(checkpoint.path, 200)), "title"), (f"  {checkpoint.format}", "dim")]
    for number, (picture_of, names) in enumerate(drawn.items()):
        if number == PICTURES:
            yield [
                (f"… and {pluralize(len(drawn) - PICTURES, 'other picture')} (use --filter)", "dim")
            ]
            break
        tensor = sample[picture_of]
        more = f"  and {len(names) - 1} more with the same split" if len(names) > 1 else ""
        yield [
            (escape(clip(names[0], 70)), "name"),
            (f"  {short_dtype(tensor.dtype)} {list(tensor.shape)}", "dim"),
            (more, "dim"),
        ]
        for row in picture(tensor, letters):
            yield [("    ", ""), (row, "")]
    for key, letter in letters.items():
        yield [
            (f"{letter} ", "title"),
            (escape(clip(key, 100)), ""),
            (f"  {format_nbytes(held[key])}", "size"),
        ]


def _file(key: str) -> str:
    return key.partition("@")[0]  # the items of a DCP file have keys of their own


def picture(tensor: LazyTensor, letters: dict[str, str]) -> list[str]:
    """The tensor as a rectangle of letters: its two dimensions that are cut, or its first two."""
    if not tensor.chunks or not tensor.size:
        return ["(no elements)"]
    cuts = [d for d in range(tensor.ndim) if len({c.box.start[d] for c in tensor.chunks}) > 1]
    axes = sorted((cuts + [d for d in range(tensor.ndim) if d not in cuts])[:2])
    down, across = (None, axes[0] if axes else None) if len(axes) < 2 else (axes[0], axes[1])
    rows, columns = _steps(tensor, down, HEIGHT), _steps(tensor, across, WIDTH)
    inside = []
    for y in rows:
        line = ""
        for x in columns:
            place = [0] * tensor.ndim
            for axis, at in ((down, y), (across, x)):
                if axis is not None:
                    place[axis] = at
            line += _letter(tensor, place, letters)
        inside.append(f"│{line}│")
    bar = "─" * len(columns)
    return [f"┌{bar}┐", *inside, f"└{bar}┘"]


def _steps(tensor: LazyTensor, axis: int | None, most: int) -> Sequence[int]:
    if axis is None:
        return [0]
    length = tensor.shape[axis]
    pieces = len({c.box.start[axis] for c in tensor.chunks})
    count = min(most, length, max(4 * pieces, 2))
    return [(2 * i + 1) * length // (2 * count) for i in range(count)]


def _letter(tensor: LazyTensor, place: Sequence[int], letters: dict[str, str]) -> str:
    for chunk in tensor.chunks:
        if all(a <= p < b for a, p, b in zip(chunk.box.start, place, chunk.box.stop, strict=True)):
            return letters[_file(chunk.storage.key)]
    return "·"


SPARSITY = "name dtype shape size zeros pattern block dead_rows dead_columns"
"""Fields of a tensor in the document of `--sparsity --json`."""


def _run_sparsity(options: argparse.Namespace) -> int:
    from holdfast.cli.progress import bar
    from holdfast.engine.computed import decode_quantized
    from holdfast.verbs.open import open as open_checkpoint
    from holdfast.verbs.sparsity import find_zeros
    from holdfast.verbs.stats import chosen

    with open_checkpoint(options.path, threads=1) as checkpoint:
        tensors = chosen(checkpoint, options.filter)
        total = sum(tensor.nbytes for tensor in decode_quantized(tensors))
        with bar("Reading", total, quiet=options.json) as progress:
            found = find_zeros(tensors, progress=progress)
        if options.json:
            print_json(
                {
                    "schema": 1,
                    "path": checkpoint.path,
                    "tensors": [fields_of(row, SPARSITY) for row in found],
                }
            )
        else:
            print_lines(sparsity_lines(checkpoint.path, found, None if options.all else LINES))
    return 0


def sparsity_lines(
    path: str, found: tuple[TensorSparsity, ...], most: int | None
) -> Iterator[Line]:
    size, zeros = sum(row.size for row in found), sum(row.zeros for row in found)
    share = f"{100 * zeros / size:.2f}% of {size:,} elements are zero" if size else "no elements"
    yield [
        (escape(clip(path, 200)), "title"),
        (f"  {pluralize(len(found), 'tensor')} · {share}", "dim"),
    ]
    shown = sort_naturally(found, lambda row: row.name)[:most]
    shapes = max((len(str(list(row.shape))) for row in shown), default=0)
    for name, row in zip(padded([row.name for row in shown]), shown, strict=True):
        line: Line = [
            (name, "name"),
            (f"  {row.dtype:<8}", "dtype"),
            (f"  {list(row.shape)!s:<{shapes}}", "shape"),
            (f"  {100 * row.zeros / row.size if row.size else 0:6.2f}%", "size"),
        ]
        if row.pattern:
            line.append((f"  {row.pattern[0]}:{row.pattern[1]}", "value"))
        if row.block:
            line.append((f"  blocks of {row.block[0]}x{row.block[1]}", "value"))
        if row.dead_rows:
            line.append((f"  {pluralize(row.dead_rows, 'dead row')}", "note"))
        if row.dead_columns:
            line.append((f"  {pluralize(row.dead_columns, 'dead column')}", "note"))
        yield line
    if len(shown) < len(found):
        yield [(f"… {len(found) - len(shown):,} more: use --filter or --all", "dim")]
