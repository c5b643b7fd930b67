"""NaN and infinities in the tensors of a checkpoint: how many, and where the first of each is, in one line of text."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Protocol

from holdfast.core.order import sort_naturally
from holdfast.core.text import clip, escape, pluralize

Index = tuple[int, ...]


class NonfiniteCounts(Protocol):
    """What is known of a tensor: how many NaN and infinities it has, and the index of the first of each."""

    @property
    def name(self) -> str: ...
    @property
    def nans(self) -> int: ...
    @property
    def infinities(self) -> int: ...
    @property
    def first_nan(self) -> Index | None: ...
    @property
    def first_infinity(self) -> Index | None: ...


def element_index(position: int | None, shape: Sequence[int]) -> Index | None:
    """Return the index of the element at a position in C order.

    >>> element_index(17 * 512 + 204, (1024, 512))
    (17, 204)
    """
    if position is None:
        return None
    index: list[int] = []
    for axis in range(len(shape)):
        stride = math.prod(shape[axis + 1 :])
        index.append(position // stride % shape[axis])
    return tuple(index)


def describe_nonfinite(tensors: Iterable[NonfiniteCounts], share_text: str = "") -> str:
    """Say in how many tensors NaN and infinities are, and where the first of each is.

    Tensors are counted in the order in which they are listed, layer 2 before layer 10. `share_text`
    says what was read, if that is not everything.
    """
    ordered = sort_naturally(tensors, lambda tensor: tensor.name)
    parts: list[str] = []

    with_nan = [tensor for tensor in ordered if tensor.nans]
    if with_nan:
        first = described_place(with_nan[0].name, with_nan[0].first_nan)
        parts.append(f"NaN in {pluralize(len(with_nan), 'tensor')}, first {first}")

    with_infinity = [tensor for tensor in ordered if tensor.infinities]
    if with_infinity:
        first = described_place(with_infinity[0].name, with_infinity[0].first_infinity)
        parts.append(f"Inf in {pluralize(len(with_infinity), 'tensor')}, first {first}")

    text = "; ".join(parts) or f"no NaN or Inf in {pluralize(len(ordered), 'tensor')}"
    return f"{text} ({share_text})" if share_text else text


def described_place(name: str, index: Index | None) -> str:
    """Name a tensor and, unless it is a scalar, the element in it.

    >>> described_place("layers.79.mlp.weight", (17, 204))
    '`layers.79.mlp.weight` at [17, 204]'
    """
    place = f" at {list(index)}" if index else ""
    return f"`{escape(clip(name))}`{place}"
