"""Rules that say how tensors are cut over the axes of a mesh, by globs on their names.

    *.q_proj.weight: tp=0          dimension 0 over tp
    *.o_proj.weight: tp=1, dp=0    two dimensions over two axes
    norm.*: replicate              not at all

Of several rules the first that matches a name decides. `reshard` cuts by them, and files of ranks are put together by them.

Without rules, an axis cuts by its name (`default_axes`): dp and fsdp cut dimension 0 of everything, as FSDP does; tp cuts the
matrices of a transformer as Megatron and the plans of `transformers` do, by the names that Hugging Face gives them.
"""

from __future__ import annotations

from collections.abc import Mapping

from holdfast.core.value import Value
from holdfast.errors import BadPlacement

REPLICATE = "replicate"


DATA_AXES = frozenset({"dp", "fsdp", "dp_shard", "data", "shard"})
TENSOR_AXES = frozenset({"tp", "tensor", "model"})  # What meshes call the axes whose cut is known.

BY_ROWS = frozenset({
    "q_proj", "k_proj", "v_proj", "qkv_proj", "gate_proj", "up_proj", "gate_up_proj", "fc1", "w1", "w3", "wq", "wk", "wv",
    "embed_tokens", "tok_embeddings", "lm_head",
})  # fmt: skip
"""Modules whose outputs (or vocabulary) tp spreads: their weights and biases are cut along dimension 0."""

BY_COLUMNS = frozenset({"o_proj", "down_proj", "out_proj", "fc2", "w2", "wo"})
"""Modules whose inputs tp spreads: their weights are cut along dimension 1, and every rank has the bias."""


class PlacementRule(Value, frozen=True):
    """Names, and which dimension each axis of the mesh shards."""

    pattern: str
    axes: Mapping[str, int]
    """From the name of a mesh axis to the dimension of the tensor; axes that are not here replicate."""


def parse_rule(text: str) -> PlacementRule:
    """A rule from text.

    >>> parse_rule("*.weight: tp=0, dp=1")
    PlacementRule(pattern='*.weight', axes={'tp': 0, 'dp': 1})
    """
    pattern, colon, placed = text.rpartition(":")
    axes: dict[str, int] = {}
    if colon and placed.strip() != REPLICATE:
        for part in placed.split(","):
            name, equals, dimension = part.partition("=")
            if not equals or not dimension.strip().lstrip("-").isdecimal() or name.strip() in axes:
                colon = ""
                break
            axes[name.strip()] = int(dimension)
    if not colon or not pattern.strip():
        raise BadPlacement(
            f"a rule is written like '*.weight: tp=0' or 'norm.*: replicate', not {text!r}"
        )
    return PlacementRule(pattern.strip(), axes)


def default_axes(name: str, shape: tuple[int, ...], mesh: Mapping[str, int]) -> dict[str, int]:
    """How a tensor is cut where no rule says it. What has fewer rows than ranks is not cut, nor by tp what it would not divide.

    >>> default_axes("layers.0.o_proj.weight", (8, 8), {"dp": 2, "tp": 4})
    {'dp': 0, 'tp': 1}
    """
    axes: dict[str, int] = {}
    left = list(shape)
    for axis, size in mesh.items():
        dimension = (
            0
            if axis in DATA_AXES
            else _by_tensor(name, len(shape))
            if axis in TENSOR_AXES
            else None
        )
        if dimension is None or dimension >= len(shape) or size < 2 or left[dimension] < size:
            continue
        if axis in TENSOR_AXES and left[dimension] % size:
            continue
        axes[axis] = dimension
        left[dimension] = -(-left[dimension] // size)
    return axes


def _by_tensor(name: str, rank: int) -> int | None:
    """The dimension of a tensor that tp cuts, by the name of its module; None where every rank has it whole."""
    *_, module, kind = ("", *name.split("."))[-2:]
    if module in BY_ROWS and kind in ("weight", "bias"):
        return 0
    return 1 if module in BY_COLUMNS and kind == "weight" and rank == 2 else None
