"""From typed JSON back to Python state."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from holdfast.core.limits import Limits
from holdfast.core.protocols import Source
from holdfast.core.tensor import LazyTensor
from holdfast.errors import LimitExceeded
from holdfast.formats.tree_json.decoder import At, Decoder
from holdfast.formats.tree_json.tags import READERS

__all__ = ["DecodedTree", "decode_tree", "json_limits"]


@dataclass(frozen=True, slots=True)
class DecodedTree:
    """The outcome."""

    tree: object
    tensors: dict[str, LazyTensor]
    """The tensors in it by name, in its order; each name once."""


def json_limits(limits: Limits) -> Limits:
    """The limits for the JSON text of a tree of `limits.depth` levels: a level takes up to three brackets."""
    return replace(limits, depth=4 * limits.depth + 16)


def decode_tree(
    value: object, tensor: Callable[[str], LazyTensor], source: Source, *, at: tuple[str | int, ...] = ()
) -> DecodedTree:
    """The tree that a JSON value stands for.

    `tensor` gives the tensor of a name, or raises `KeyError`. `at` is the place of the value in its document. Raises
    `HeaderError`, `MetadataError` for composites that cannot be, or `LimitExceeded`.
    """
    place: At = None
    for part in at:
        place = (place, part)
    decoder = Decoder(READERS, tensor, source)
    try:
        return DecodedTree(decoder.node(value, place, 0), decoder.tensors)
    except RecursionError:
        raise LimitExceeded("the tree nests too deeply to be decoded") from None
