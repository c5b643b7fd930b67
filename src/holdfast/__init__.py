"""Holdfast: the checkpoint engine for model weights. Opens anything, executes nothing."""

from __future__ import annotations

from holdfast import errors
from holdfast.api.diff import Diff, diff
from holdfast.api.open import open, read
from holdfast.api.verify import VerifyReport, verify
from holdfast.core.box import Box
from holdfast.core.checkpoint import Alias, Checkpoint
from holdfast.core.chunk import Chunk, Storage
from holdfast.core.composite import Composite
from holdfast.core.digest import Digest
from holdfast.core.dtype import DTYPES, DType
from holdfast.core.limits import Limits
from holdfast.core.opaque import Global, Opaque
from holdfast.core.tensor import LazyTensor
from holdfast.errors import HoldfastError

__version__ = "0.1.0"

__all__ = [
    "DTYPES",
    "Alias",
    "Box",
    "Checkpoint",
    "Chunk",
    "Composite",
    "DType",
    "Diff",
    "Digest",
    "Global",
    "HoldfastError",
    "LazyTensor",
    "Limits",
    "Opaque",
    "Storage",
    "VerifyReport",
    "diff",
    "errors",
    "open",
    "read",
    "verify",
]
