"""`holdfast show --ranks`: which file holds which part of each tensor, as a picture.

    layers.0.weight  f32 [8, 6]        ┌────────────────┐
                                       │AAAAAAAABBBBBBBB│
                                       │AAAAAAAABBBBBBBB│
                                       │CCCCCCCCDDDDDDDD│
                                       └────────────────┘
    A data-00001-of-00004.safetensors  12.0 MiB  …

Tensors that are cut in the same way are drawn once, with how many there are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from holdfast.cli.show import short_dtype
from holdfast.cli.text import Line
from holdfast.core.checkpoint import Checkpoint
from holdfast.core.order import in_order, natural
from holdfast.core.patterns import matcher
from holdfast.core.tensor import LazyTensor
from holdfast.core.text import clip, escape, nbytes, plural

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789"
WIDTH, HEIGHT = 32, 8
"""Characters of a picture at most."""

PICTURES = 24
"""Different pictures that are drawn; the rest is counted."""


def lines(checkpoint: Checkpoint, pattern: str | None) -> Iterator[Line]:
    wanted = matcher("*" if pattern is None else pattern)
    held: dict[str, int] = {}
    drawn: dict[object, list[str]] = {}
    sample: dict[object, LazyTensor] = {}
    for name in in_order(filter(wanted, checkpoint)):
        tensor = checkpoint[name]
        for chunk in tensor.chunks:
            key = _file(chunk.storage.key)
            held[key] = held.get(key, 0) + tensor.dtype.nbytes(chunk.box.count)
        cut = (tensor.shape, tensor.dtype.name, tuple((c.box.start, c.box.stop, _file(c.storage.key)) for c in tensor.chunks))
        drawn.setdefault(cut, []).append(name)
        sample.setdefault(cut, tensor)
    letters = {key: LETTERS[i % len(LETTERS)] for i, key in enumerate(sorted(held, key=natural))}
    yield [(escape(clip(checkpoint.path, 200)), "title"), (f"  {checkpoint.format}", "dim")]
    for number, (picture_of, names) in enumerate(drawn.items()):
        if number == PICTURES:
            yield [(f"… and {plural(len(drawn) - PICTURES, 'other picture')} (use --filter)", "dim")]
            break
        tensor = sample[picture_of]
        more = f"  and {len(names) - 1} more cut alike" if len(names) > 1 else ""
        yield [
            (escape(clip(names[0], 70)), "name"),
            (f"  {short_dtype(tensor.dtype)} {list(tensor.shape)}", "dim"),
            (more, "dim"),
        ]
        for row in picture(tensor, letters):
            yield [("    ", ""), (row, "")]
    for key, letter in letters.items():
        yield [(f"{letter} ", "title"), (escape(clip(key, 100)), ""), (f"  {nbytes(held[key])}", "size")]


def _file(key: str) -> str:
    """The file behind a key; the items of a DCP file have keys of their own."""
    return key.partition("@")[0]


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
    """The coordinates along an axis that stand for a character each."""
    if axis is None:
        return [0]
    length = tensor.shape[axis]
    pieces = len({c.box.start[axis] for c in tensor.chunks})
    count = min(most, length, max(4 * pieces, 2)) if axis is not None else 1
    return [(2 * i + 1) * length // (2 * count) for i in range(count)]


def _letter(tensor: LazyTensor, place: Sequence[int], letters: dict[str, str]) -> str:
    for chunk in tensor.chunks:
        if all(a <= p < b for a, p, b in zip(chunk.box.start, place, chunk.box.stop, strict=True)):
            return letters[_file(chunk.storage.key)]
    return "·"
