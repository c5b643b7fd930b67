"""`holdfast read`: tensors out of a checkpoint, onto the screen or into a file of numpy's."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from holdfast.cli.arrays import as_text, widens, write_npy, write_npz
from holdfast.cli.lines import Line, print_lines
from holdfast.cli.show import matcher
from holdfast.cli.slices import parse_slice
from holdfast.cli.text import escape, nbytes, plural
from holdfast.core.checkpoint import Checkpoint
from holdfast.core.tensor import LazyTensor
from holdfast.errors import BadTarget, located
from holdfast.inspect.open import open as open_checkpoint

__all__ = ["choose", "run", "show_tensors", "write_tensors"]


def run(path: Path, names: Sequence[str], *, index: str | None, output: Path | None, raw: bool) -> int:
    """The command; returns its exit code."""
    with open_checkpoint(path) as checkpoint:
        tensors = choose(checkpoint, names, index)
        if output is None:
            print_lines(show_tensors(tensors))
        else:
            print_lines(write_tensors(checkpoint, tensors, output, raw=raw), file=sys.stderr)
    return 0


def choose(checkpoint: Checkpoint, names: Sequence[str], index: str | None) -> dict[str, LazyTensor]:
    """The tensors that the names or globs mean, in the order given, each sliced by `index`.

    A name that is there is taken as it is, even where it looks like a glob. Raises `NoSuchTensor` for what matches
    nothing.
    """
    chosen: dict[str, LazyTensor] = {}
    for name in names:
        if name not in checkpoint and any(c in name for c in "*?["):
            wanted = matcher(name)
            found = [n for n in checkpoint if wanted(n)]
            if found:
                chosen.update((n, checkpoint[n]) for n in found)
                continue
        chosen[name] = checkpoint[name]
    for tensor in chosen.values():
        if tensor.traits.meta:
            tensor.empty()  # raises: there is nothing to read
    if index is None:
        return chosen
    items = parse_slice(index)
    sliced = {}
    for name, tensor in chosen.items():
        with located(tensor=name):
            sliced[name] = tensor[items]
    return sliced


def show_tensors(tensors: dict[str, LazyTensor]) -> Iterator[Line]:
    """Each tensor as numpy shows it, under a line with its name, dtype, shape and size."""
    for position, (name, tensor) in enumerate(tensors.items()):
        with located(tensor=name):
            text = as_text(tensor)
        if position:
            yield []
        yield [
            (escape(name), "title"),
            (f"  {tensor.dtype} ", "dtype"),
            (f" {list(tensor.shape)}  {nbytes(tensor.nbytes)}", "dim"),
        ]
        for line in text.splitlines():
            yield [(line, "")]


def write_tensors(checkpoint: Checkpoint, tensors: dict[str, LazyTensor], path: Path, *, raw: bool) -> Iterator[Line]:
    """Write `.npy` (one tensor) or `.npz` (any number); the lines say what was written and what was widened."""
    kind = path.suffix.lower()
    if kind not in (".npy", ".npz"):
        raise BadTarget(f"-o needs a name that ends in .npy or .npz, not {path.name!r}", file=str(path))
    if kind == ".npy" and len(tensors) != 1:
        raise BadTarget(f"an .npy file holds one array, and {len(tensors)} tensors were chosen: use .npz", file=str(path))
    if path.exists() and os.path.exists(checkpoint.path) and os.path.samefile(path, checkpoint.path):
        raise BadTarget("-o names the checkpoint itself", file=str(path))
    if kind == ".npy":
        (tensor,) = tensors.values()
        write_npy(path, tensor, raw=raw)
    else:
        write_npz(path, tensors, raw=raw)
    yield [(f"wrote {escape(str(path))}: {plural(len(tensors), 'array')}, {nbytes(path.stat().st_size)}", "dim")]
    wider = sorted({t.dtype.name for t in tensors.values() if widens(t.dtype.numpy)})
    if wider:
        how = "their bits as unsigned integers" if raw else "wider types that hold the same values (--raw keeps the bits)"
        yield [(f"note: numpy has no {', '.join(wider)}; saved as {how}", "note")]
