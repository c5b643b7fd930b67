"""Holdfast: the checkpoint engine for model weights. Opens anything, executes nothing.

Names are imported when they are first used, so that a program that only opens files does not pay for writing them.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from holdfast import errors
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
    from holdfast.inspect.diff import Diff, diff
    from holdfast.inspect.open import open, read
    from holdfast.inspect.scan import ScanReport, scan
    from holdfast.inspect.verify import VerifyReport, verify
    from holdfast.pruning.prune import Pruned, prune
    from holdfast.rewrite.compact import Compacted, compact
    from holdfast.rewrite.convert import Conversion, convert
    from holdfast.rewrite.edit import edit
    from holdfast.rewrite.package import package
    from holdfast.rewrite.replace_weights import replace_weights
    from holdfast.rewrite.save import Saved, save
    from holdfast.rewrite.tie import Tied, tie

__version__ = "0.1.0"

_WHERE = {
    "DTYPES": "core.dtype",
    "Alias": "core.checkpoint",
    "Box": "core.box",
    "Checkpoint": "core.checkpoint",
    "Chunk": "core.chunk",
    "Compacted": "rewrite.compact",
    "Composite": "core.composite",
    "Conversion": "rewrite.convert",
    "DType": "core.dtype",
    "Diff": "inspect.diff",
    "Digest": "core.digest",
    "Global": "core.opaque",
    "HoldfastError": "errors",
    "LazyTensor": "core.tensor",
    "Limits": "core.limits",
    "Opaque": "core.opaque",
    "Pruned": "pruning.prune",
    "Saved": "rewrite.save",
    "ScanReport": "inspect.scan",
    "Storage": "core.chunk",
    "Tied": "rewrite.tie",
    "VerifyReport": "inspect.verify",
    "compact": "rewrite.compact",
    "convert": "rewrite.convert",
    "diff": "inspect.diff",
    "edit": "rewrite.edit",
    "open": "inspect.open",
    "package": "rewrite.package",
    "prune": "pruning.prune",
    "read": "inspect.open",
    "replace_weights": "rewrite.replace_weights",
    "save": "rewrite.save",
    "scan": "inspect.scan",
    "tie": "rewrite.tie",
    "verify": "inspect.verify",
}
"""The module of each public name."""

__all__ = [
    "DTYPES",
    "Alias",
    "Box",
    "Checkpoint",
    "Chunk",
    "Compacted",
    "Composite",
    "Conversion",
    "DType",
    "Diff",
    "Digest",
    "Global",
    "HoldfastError",
    "LazyTensor",
    "Limits",
    "Opaque",
    "Pruned",
    "Saved",
    "ScanReport",
    "Storage",
    "Tied",
    "VerifyReport",
    "compact",
    "convert",
    "diff",
    "edit",
    "errors",
    "open",
    "package",
    "prune",
    "read",
    "replace_weights",
    "save",
    "scan",
    "tie",
    "verify",
]


def __getattr__(name: str) -> object:
    if name == "errors":
        return import_module("holdfast.errors")
    if name not in _WHERE:
        raise AttributeError(f"module 'holdfast' has no attribute {name!r}")
    value = getattr(import_module(f"holdfast.{_WHERE[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
