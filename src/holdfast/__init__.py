"""Holdfast: the checkpoint engine for model weights. Opens anything, executes nothing.

Names are imported when they are first used, so that a program that only opens files does not pay for writing them.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from holdfast import errors
    from holdfast.api.compact import Compacted, compact
    from holdfast.api.convert import Conversion, convert
    from holdfast.api.diff import Diff, diff
    from holdfast.api.edit import edit
    from holdfast.api.open import open, read
    from holdfast.api.package import package
    from holdfast.api.prune import Pruned, prune
    from holdfast.api.replace_weights import replace_weights
    from holdfast.api.save import Saved, save
    from holdfast.api.scan import ScanReport, scan
    from holdfast.api.tie import Tied, tie
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

_WHERE = {
    "DTYPES": "core.dtype",
    "Alias": "core.checkpoint",
    "Box": "core.box",
    "Checkpoint": "core.checkpoint",
    "Chunk": "core.chunk",
    "Compacted": "api.compact",
    "Composite": "core.composite",
    "Conversion": "api.convert",
    "DType": "core.dtype",
    "Diff": "api.diff",
    "Digest": "core.digest",
    "Global": "core.opaque",
    "HoldfastError": "errors",
    "LazyTensor": "core.tensor",
    "Limits": "core.limits",
    "Opaque": "core.opaque",
    "Pruned": "api.prune",
    "Saved": "api.save",
    "ScanReport": "api.scan",
    "Storage": "core.chunk",
    "Tied": "api.tie",
    "VerifyReport": "api.verify",
    "compact": "api.compact",
    "convert": "api.convert",
    "diff": "api.diff",
    "edit": "api.edit",
    "open": "api.open",
    "package": "api.package",
    "prune": "api.prune",
    "read": "api.open",
    "replace_weights": "api.replace_weights",
    "save": "api.save",
    "scan": "api.scan",
    "tie": "api.tie",
    "verify": "api.verify",
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
