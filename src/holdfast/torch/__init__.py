"""The torch adapter. This package, and nothing else in Holdfast, imports torch."""

from __future__ import annotations

from holdfast.torch.tensors import tensor_from_composite, tensor_from_lazy, torch_dtype

__all__ = ["tensor_from_composite", "tensor_from_lazy", "torch_dtype"]
