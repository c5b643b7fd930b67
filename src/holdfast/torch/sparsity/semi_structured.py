"""2:4 tensors in the packed form of `torch.sparse.to_sparse_semi_structured`, and back.

torch's form is for GPUs: kernels decide the order of what is in it, and it is not meant for files. A checkpoint has the dense
tensor.
"""

from __future__ import annotations

import warnings

import torch
from torch.sparse import SparseSemiStructuredTensor, to_sparse_semi_structured

from holdfast.core.tensor import LazyTensor
from holdfast.errors import Unsupported
from holdfast.torch.tensors.from_lazy import view_dtype


def is_two_of_four(tensor: torch.Tensor) -> bool:
    """Whether at most two of every four elements along the last axis are not zero.

    >>> is_two_of_four(torch.tensor([[1.0, 0.0, 2.0, 0.0]])), is_two_of_four(torch.ones(2, 4))
    (True, False)
    """
    if not tensor.dim() or tensor.shape[-1] % 4:
        return False
    kept = (tensor.detach() != 0).reshape(-1, 4).sum(dim=1, dtype=torch.uint8)
    return bool((kept <= 2).all())


def to_semi_structured(
    tensor: torch.Tensor | LazyTensor, *, device: torch.device | str | int = "cuda"
) -> SparseSemiStructuredTensor:
    """A 2:4 matrix, dense or lazy, in torch's packed form on a GPU; what is on one already stays there.

    Raises `Unsupported` where there is no CUDA device, where the tensor is not 2:4, and for dtypes and shapes that torch's kernels
    do not take. Minus zero counts as zero, as for torch.
    """
    if not torch.cuda.is_available():
        raise Unsupported(
            "torch's packed form of 2:4 tensors is for CUDA devices, and torch finds none; keep the tensor dense"
        )
    name = tensor.name if isinstance(tensor, LazyTensor) else None
    dense = tensor.torch() if isinstance(tensor, LazyTensor) else tensor.detach()
    dense = (dense if dense.is_cuda else dense.to(device)).contiguous()
    if not is_two_of_four(dense):
        message = f"{list(dense.shape)} is not 2:4 along its last axis; prune it first, with nm_mask or holdfast prune"
        raise Unsupported(message, tensor=name)
    try:
        with warnings.catch_warnings():
            # torch warns once that its own interface is a prototype.
            warnings.simplefilter("ignore", UserWarning)
            packed = to_sparse_semi_structured(dense)
            stored = packed.values()
    except (RuntimeError, NotImplementedError) as error:
        raise Unsupported(
            f"torch cannot pack {dense.dtype} {list(dense.shape)} as 2:4: {error}", tensor=name
        ) from error
    if not torch.equal(_sorted_bits(dense), _sorted_bits(stored)):
        # For float32 its kernels keep one of two.
        raise Unsupported(
            f"torch drops elements of this {dense.dtype} tensor, although it is 2:4; keep it dense",
            tensor=name,
        )
    return packed


def from_semi_structured(packed: SparseSemiStructuredTensor) -> torch.Tensor:
    """The dense tensor that torch packed, on the same device.

    torch multiplies by the identity where its kernels have no other way back. That changes what is not finite and rounds where the
    kernel does, so what comes back is compared with the values that are stored. Raises `Unsupported` where it is not the same.
    """
    if not isinstance(packed, SparseSemiStructuredTensor):
        raise TypeError(f"a SparseSemiStructuredTensor was expected, not a {type(packed).__name__}")
    try:
        dense = packed.detach().to_dense()
        stored = packed.detach().values()
    except (RuntimeError, NotImplementedError, AssertionError) as error:
        raise Unsupported(
            f"torch cannot make {type(packed).__name__} {list(packed.shape)} dense: {error}"
        ) from error
    if not torch.equal(_sorted_bits(dense), _sorted_bits(stored)):
        raise Unsupported(
            f"torch does not give the values of this {packed.dtype} tensor back as they are stored (NaN, infinities, or a kernel "
            "that rounds); keep the dense tensor that it was made from"
        )
    return dense


def _sorted_bits(values: torch.Tensor) -> torch.Tensor:
    """The bit patterns of everything that is not zero, in order."""
    flat = values.reshape(-1)
    kept = (
        flat[flat != 0]
        if flat.dtype.itemsize > 1 or not flat.dtype.is_floating_point
        else flat[flat.float() != 0]
    )
    return kept.view(view_dtype(flat.element_size())).sort().values
