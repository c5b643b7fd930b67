"""`holdfast read`: tensors and values out of a checkpoint, onto the screen, or tensors into a file of numpy's.

`.npy` knows only numpy's own types. An array of bfloat16 or float8 would be saved as nameless bytes (`|V2`) that nothing reads
back, so such arrays are widened to float32, which holds each of their values exactly; `raw` keeps the bits, as unsigned integers.

A file is written under a hidden name beside its target, synced, and renamed over it: an error leaves what was there before.

`--slice` takes numpy's basic index as text, read by a small parser and never evaluated.

index  =  item { "," item } [ "," ]          optionally in brackets
item   =  integer  |  [integer] ":" [integer] [ ":" [integer] ]  |  "..."  |  "None"  |  "newaxis"
"""

from __future__ import annotations

import argparse
import itertools
import os
import re
import secrets
import sys
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import EllipsisType
from typing import TYPE_CHECKING, BinaryIO

import numpy as np

from holdfast.cli import values
from holdfast.cli.text import Line, line_width, print_lines
from holdfast.core.checkpoint import Checkpoint
from holdfast.core.order import sort_naturally
from holdfast.core.patterns import make_matcher
from holdfast.core.tensor import LazyTensor
from holdfast.core.text import escape, format_nbytes, pluralize
from holdfast.errors import BadIndex, BadTarget, Unsupported, error_context
from holdfast.stores.platform import NO_FOLLOW, OPEN_FLAGS, sync
from holdfast.verbs.open import open as open_checkpoint

if TYPE_CHECKING:
    from holdfast.cli.outline import LeafNode


DESCRIPTION = """\
Print tensors and values of a checkpoint, or write tensors to a file. Reads only the bytes that you
ask for. bfloat16 and floats of 8, 6 and 4 bits become float32, which represents them exactly.
"""

EXAMPLES = """\
examples:
  holdfast read model.pt layers.0.weight

  # A slice, with the syntax of numpy.
  holdfast read model.pt layers.0.weight --slice '0:2, ::2, -1'

  # Write one tensor to .npy, or several to .npz.
  holdfast read model.pt layers.0.weight -o weight.npy
  holdfast read model.pt 'layers.0.*' -o layer0.npz

  # Values that are not tensors.
  holdfast read trainer.pt step optimizer.param_groups
"""


def add_arguments(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("path", metavar="PATH", type=values.path, help=values.PATH_HELP)
    verb.add_argument(
        "names", metavar="NAME", nargs="+", help="name of a tensor or value, or a glob"
    )
    verb.add_argument(
        "-s", "--slice", metavar="INDEX", help="slice as in numpy, such as '0:2, ::2, -1'"
    )
    verb.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        type=values.file,
        help="write to this .npy or .npz file instead of printing",
    )
    verb.add_argument(
        "--raw",
        action="store_true",
        help="with -o: write dtypes that numpy lacks as unsigned integers with the same bits",
    )


def run(options: argparse.Namespace) -> int:
    names, index, output = options.names, options.slice, options.output
    with open_checkpoint(options.path) as checkpoint:
        plain_values = find_values(checkpoint, names)
        if plain_values and (output is not None or index is not None):
            flag = "-o writes" if output is not None else "--slice is for"
            name = next(iter(plain_values))
            raise Unsupported(
                f"{name!r} is not a tensor: {flag} tensors only; omit the option to print the value"
            )
        tensors = choose(checkpoint, [name for name in names if name not in plain_values], index)
        if plain_values:
            print_lines(
                show_values([leaf for name in names for leaf in plain_values.get(name, ())])
            )
            print_lines([[]] if tensors else [])
        if output is None:
            print_lines(show_tensors(tensors))
        else:
            print_lines(
                write_tensors(checkpoint, tensors, output, raw=options.raw), file=sys.stderr
            )
    return 0


def find_values(checkpoint: Checkpoint, names: Sequence[str]) -> dict[str, list[LeafNode]]:
    """The plain values of names and globs that match no tensor: one by its name, or all that are below it."""
    from holdfast.cli.outline import leaves, outline

    wanted = {
        name: make_matcher(name)
        for name in names
        if name not in checkpoint and not any(map(make_matcher(name), checkpoint))
    }
    found: dict[str, list[LeafNode]] = {}
    for leaf in (
        leaves(outline(checkpoint, split=False)) if wanted and not checkpoint.is_flat else ()
    ):
        for name, matches in wanted.items():
            if leaf.kind != "tensor" and matches(leaf.name):
                found.setdefault(name, []).append(leaf)
    return found


def show_values(values: Sequence[LeafNode]) -> Iterator[Line]:
    from holdfast.verbs.brief import brief

    for position, leaf in enumerate(values):
        if position:
            yield []
        yield [(escape(leaf.name), "title"), (f"  {leaf.type or leaf.kind}", "dtype")]
        value = leaf.value
        if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
            text = np.array2string(
                value, threshold=THRESHOLD, max_line_width=line_width(sys.stdout) or 120
            )
        else:
            text = (
                f"the same object as {leaf.text}"
                if leaf.kind == "link"
                else brief(value, LONGEST_VALUE)
            )
        for line in text.splitlines():
            yield [(escape(line), "")]


def choose(
    checkpoint: Checkpoint, names: Sequence[str], index: str | None
) -> dict[str, LazyTensor]:
    """The tensors that the names or globs mean, in the order given, each sliced by `index`.

    A name that is there is taken as it is, even where it looks like a glob. Raises `NoSuchTensor` for what matches
    nothing.
    """
    chosen: dict[str, LazyTensor] = {}
    for name in names:
        found = [] if name in checkpoint else sort_naturally(filter(make_matcher(name), checkpoint))
        chosen.update((n, checkpoint[n]) for n in found or [name])
    for tensor in chosen.values():
        if tensor.traits.meta:
            tensor.empty()  # raises: there is nothing to read
    if index is None:
        return chosen
    items = parse_slice(index)
    sliced = {}
    for name, tensor in chosen.items():
        with error_context(tensor=name):
            sliced[name] = tensor[items]
    return sliced


def show_tensors(tensors: dict[str, LazyTensor]) -> Iterator[Line]:
    """Each tensor as numpy shows it, under a line with its name, dtype, shape and size."""
    for position, (name, tensor) in enumerate(tensors.items()):
        with error_context(tensor=name):
            text = as_text(tensor)
        if position:
            yield []
        yield [
            (escape(name), "title"),
            (f"  {tensor.dtype} ", "dtype"),
            (f" {list(tensor.shape)}  {format_nbytes(tensor.nbytes)}", "dim"),
        ]
        for line in text.splitlines():
            yield [(line, "")]


def write_tensors(
    checkpoint: Checkpoint, tensors: dict[str, LazyTensor], path: Path, *, raw: bool
) -> Iterator[Line]:
    """Write `.npy` (one tensor) or `.npz` (any number); the lines say what was written and what was widened."""
    kind = path.suffix.lower()
    if kind not in (".npy", ".npz"):
        raise BadTarget(
            f"-o needs a name that ends in .npy or .npz, not {path.name!r}", file=str(path)
        )
    if kind == ".npy" and len(tensors) != 1:
        raise BadTarget(
            f"an .npy file holds one array, and {len(tensors)} tensors were chosen: use .npz",
            file=str(path),
        )
    if (
        path.exists()
        and os.path.exists(checkpoint.path)
        and os.path.samefile(path, checkpoint.path)
    ):
        raise BadTarget("-o must not be the checkpoint itself", file=str(path))
    if kind == ".npy":
        (tensor,) = tensors.values()
        write_npy(path, tensor, raw=raw)
    else:
        write_npz(path, tensors, raw=raw)
    yield [
        (
            f"wrote {escape(str(path))}: {pluralize(len(tensors), 'array')}, {format_nbytes(path.stat().st_size)}",
            "dim",
        )
    ]
    wider = sorted({t.dtype.name for t in tensors.values() if widens(t.dtype.numpy)})
    if wider:
        how = (
            "their bits as unsigned integers"
            if raw
            else "wider types that hold the same values (--raw keeps the bits)"
        )
        yield [(f"note: numpy has no {', '.join(wider)}; saved as {how}", "note")]


EDGE, THRESHOLD = 3, 1000
"""Items at each end of a dimension that numpy shows of a large array, and elements above which an array is large."""

LONGEST_VALUE = 10_000  # characters

CORNERS = 256
"""Corners that are read to show a summary: eight long dimensions. More only ever comes from an expanded view."""


def widens(dtype: np.dtype[np.generic]) -> bool:
    """Whether numpy itself lacks this type, so that it is shown and saved as a wider one."""
    # ml_dtypes' types and our pair of halves are all of kind V, which is also what numpy would save them as.
    return dtype.kind == "V"


def plain_array(array: np.ndarray, *, raw: bool = False) -> np.ndarray:
    """The array in a type that numpy can show and save: as it is, widened exactly, or with `raw` the bits as integers."""
    if not widens(array.dtype):
        return array
    if raw:
        return array.view(np.dtype(f"u{array.dtype.itemsize}"))
    if array.dtype.names == ("real", "imag"):
        out = np.empty(array.shape, np.complex64)
        out.real, out.imag = array["real"], array["imag"]
        return out
    return array.astype(np.float32)


def as_text(tensor: LazyTensor) -> str:
    """The elements as `numpy.array2string` shows them. Of a large tensor only the corners that are shown are read."""
    small, wide = tensor.size <= THRESHOLD, line_width(sys.stdout) or 120
    array = plain_array(tensor.numpy() if small else _corners(tensor))
    return np.array2string(
        array, threshold=THRESHOLD if small else 0, edgeitems=EDGE, max_line_width=wide
    )


def _corners(tensor: LazyTensor) -> np.ndarray:
    """A small array that numpy summarises to the same text as the whole: both ends of each long dimension, a gap of one between."""
    parts = [
        [slice(0, EDGE), slice(-EDGE, None)] if n > 2 * EDGE else [slice(None)]
        for n in tensor.shape
    ]
    if 2 ** sum(len(p) == 2 for p in parts) > CORNERS:
        raise Unsupported(
            "too many long dimensions to print: select a part with --slice", tensor=tensor.name
        )
    out = np.zeros([min(n, 2 * EDGE + 1) for n in tensor.shape], tensor.dtype.numpy)
    for pick in itertools.product(*parts):
        tensor[pick].read(out=out[pick])
    return out


def write_npy(path: Path, tensor: LazyTensor, *, raw: bool = False) -> None:
    array = plain_array(tensor.numpy(), raw=raw)
    with _replacing(path) as file:
        np.lib.format.write_array(file, np.asanyarray(array), allow_pickle=False)


def write_npz(path: Path, tensors: dict[str, LazyTensor], *, raw: bool = False) -> None:
    """Save several tensors under their names as `.npz`, one at a time, so that memory holds one."""
    for name in tensors:
        _check_member(name)
    with (
        _replacing(path) as file,
        zipfile.ZipFile(file, "w", zipfile.ZIP_STORED, allowZip64=True) as archive,
    ):
        for name, tensor in tensors.items():
            array = plain_array(tensor.numpy(), raw=raw)
            with archive.open(zipfile.ZipInfo(f"{name}.npy"), "w", force_zip64=True) as member:
                np.lib.format.write_array(member, np.asanyarray(array), allow_pickle=False)


def _check_member(name: str) -> None:
    """Refuse names that would make an archive whose files land elsewhere when somebody unpacks it."""
    parts = name.replace("\\", "/").split("/")
    try:
        length = len(name.encode())
    except UnicodeEncodeError:
        length = 1 << 16
    if name.startswith(("/", "\\")) or ".." in parts or "\0" in name or length > 65_000:
        raise Unsupported(
            f"the name {name[:200]!r} cannot be a file in an .npz: write this tensor alone, as .npy"
        )


@contextmanager
def _replacing(path: Path) -> Iterator[BinaryIO]:
    """A file that takes the place of `path` when the block ends well, and disappears when it does not."""
    hidden = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    descriptor = os.open(
        hidden, os.O_WRONLY | os.O_CREAT | os.O_EXCL | NO_FOLLOW | OPEN_FLAGS, 0o666
    )
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
            file.flush()
            sync(file.fileno())
        os.replace(hidden, path)
    except BaseException:
        hidden.unlink(missing_ok=True)
        raise


Item = int | slice | EllipsisType | None

INTEGER = re.compile(r"[+-]?[0-9]{1,18}")
"""18 digits are below 2^63; no dimension is longer."""


def parse_slice(text: str) -> tuple[Item, ...]:
    """The index that a text says; raises `BadIndex` with the piece that is wrong.

    >>> parse_slice("0:2, ::2, -1")
    (slice(0, 2, None), slice(None, None, 2), -1)
    >>> parse_slice("[..., None, 3]")
    (Ellipsis, None, 3)
    """
    inside = text.strip()
    if inside.startswith("[") and inside.endswith("]"):
        inside = inside[1:-1].strip()
    if not inside:
        return ()
    pieces = [piece.strip() for piece in inside.split(",")]
    if pieces[-1] == "" and len(pieces) > 1:
        pieces.pop()
    return tuple(_item(piece, text) for piece in pieces)


def _item(piece: str, text: str) -> Item:
    if piece == "...":
        return ...
    if piece in ("None", "newaxis", "np.newaxis"):
        return None
    if ":" not in piece:
        return _integer(piece, text)
    bounds = piece.split(":")
    if len(bounds) > 3:
        raise BadIndex(
            f"cannot read the slice {text!r}: {piece!r} has more than two colons", found=piece
        )
    start, stop, step = [
        _integer(b.strip(), text) if b.strip() else None for b in (*bounds, "")[:3]
    ]
    if step == 0:
        raise BadIndex(
            f"cannot read the slice {text!r}: the step of {piece!r} is zero", found=piece
        )
    return slice(start, stop, step)


def _integer(piece: str, text: str) -> int:
    if not INTEGER.fullmatch(piece):
        problem = f"{piece!r} is not an integer, a:b:c, ... or None (as in '0:2, ::2, -1')"
        raise BadIndex(f"cannot read the slice {text!r}: {problem}", found=piece)
    return int(piece)
