"""Rules that say how tensors are sharded over the axes of a device mesh, by globs on their names.

    *.q_proj.weight: tp=0          shard dimension 0 over the axis tp
    *.o_proj.weight: tp=1, dp=0    shard two dimensions over two axes
    norm.*: replicate              do not shard

The first rule that matches a name decides. `reshard` cuts tensors by these rules, and files of
separate ranks are joined by them.

Without rules, the name of an axis decides (`default_axes`). dp and fsdp shard dimension 0 of every
tensor, as FSDP does. tp shards the matrices of a transformer as Megatron and the plans of
`transformers` do, by the names that Hugging Face gives them.
"""

from __future__ import annotations

from collections.abc import Mapping

from holdfast.core.value import Value
from holdfast.errors import BadPlacement

REPLICATE = "replicate"

DATA_AXES = frozenset({"dp", "fsdp", "dp_shard", "data", "shard"})
"""Usual names of a mesh axis for data parallelism."""

TENSOR_AXES = frozenset({"tp", "tensor", "model"})
"""Usual names of a mesh axis for tensor parallelism."""

ROW_SHARDED_MODULES = frozenset({
    "q_proj", "k_proj", "v_proj", "qkv_proj", "gate_proj", "up_proj", "gate_up_proj", "fc1", "w1",
    "w3", "wq", "wk", "wv", "embed_tokens", "tok_embeddings", "lm_head",
})  # fmt: skip
"""Modules whose outputs or vocabulary are spread over ranks by tensor parallelism. Their weights
and biases are sharded in dimension 0."""

COLUMN_SHARDED_MODULES = frozenset({"o_proj", "down_proj", "out_proj", "fc2", "w2", "wo"})
"""Modules whose inputs are spread over ranks by tensor parallelism. Their weights are sharded in
dimension 1, and every rank has the bias."""


class PlacementRule(Value, frozen=True):
    """A pattern of tensor names, and the dimension that each axis of the mesh shards."""

    pattern: str
    """A glob on the names of tensors."""
    axes: Mapping[str, int]
    """From the name of a mesh axis to a dimension of the tensor. Other axes have replicas."""


def parse_rule(text: str) -> PlacementRule:
    """Return the rule that a text describes.

    Args:
        text: A glob on the names of tensors, a colon, and the dimension that each axis of the mesh
            shards. Instead of dimensions, `replicate` means that no axis shards the tensors.

    Raises:
        BadPlacement: The text is not a rule.

    >>> parse_rule("*.weight: tp=0, dp=1")
    PlacementRule(pattern='*.weight', axes={'tp': 0, 'dp': 1})
    """
    pattern, colon, placement = text.rpartition(":")
    axes: dict[str, int] | None = {}
    if placement.strip() != REPLICATE:
        axes = _parse_axes(placement)
    if not colon or not pattern.strip() or axes is None:
        raise BadPlacement(
            f"a rule is written like '*.weight: tp=0' or 'norm.*: replicate', not {text!r}"
        )
    return PlacementRule(pattern.strip(), axes)


def _parse_axes(text: str) -> dict[str, int] | None:
    """Return the dimension for each axis in a text such as `tp=0, dp=1`.

    Returns:
        The dimensions by axis, or None if the text has another form.
    """
    axes: dict[str, int] = {}
    for assignment in text.split(","):
        axis, equals_sign, dimension = assignment.partition("=")
        axis = axis.strip()
        is_integer = dimension.strip().lstrip("-").isdecimal()
        if not equals_sign or not is_integer or axis in axes:
            return None
        axes[axis] = int(dimension)
    return axes


def default_axes(
    name: str,
    shape: tuple[int, ...],
    mesh: Mapping[str, int],
) -> dict[str, int]:
    """Return the dimension that each axis of a mesh shards if no rule matches a tensor.

    A dimension that is shorter than the number of ranks is not sharded. Tensor parallelism also
    requires that the number of ranks divides the dimension.

    Args:
        name: The name of the tensor.
        shape: The shape of the tensor.
        mesh: The number of ranks on each axis.

    >>> default_axes("layers.0.o_proj.weight", (8, 8), {"dp": 2, "tp": 4})
    {'dp': 0, 'tp': 1}
    """
    axes: dict[str, int] = {}
    shard_shape = list(shape)
    for axis, rank_count in mesh.items():
        dimension = None
        if axis in DATA_AXES:
            dimension = 0
        elif axis in TENSOR_AXES:
            dimension = _find_tensor_parallel_dimension(name, len(shape))

        if dimension is None or dimension >= len(shape):
            continue
        length = shard_shape[dimension]
        if rank_count < 2 or length < rank_count:
            continue
        if axis in TENSOR_AXES and length % rank_count:
            continue
        axes[axis] = dimension
        # The next axis may shard the same dimension again. The largest shard is rounded up.
        shard_shape[dimension] = -(-length // rank_count)
    return axes


def _find_tensor_parallel_dimension(name: str, dimension_count: int) -> int | None:
    """Return the dimension that tensor parallelism shards, or None if every rank has the tensor.

    Args:
        name: The dotted name of a parameter. Its last two components are a module and a parameter.
        dimension_count: The number of dimensions of the parameter.
    """
    components = name.split(".")
    if len(components) < 2:
        return None
    module, parameter = components[-2:]
    if module in ROW_SHARDED_MODULES and parameter in ("weight", "bias"):
        return 0
    is_matrix = parameter == "weight" and dimension_count == 2
    if module in COLUMN_SHARDED_MODULES and is_matrix:
        return 1
    return None
