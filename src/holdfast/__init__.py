"""Holdfast: the checkpoint engine for model weights. Opens anything, executes nothing.

Names are imported when they are first used, so that a program that only opens files does not pay for writing them. The adapters are
among them: `holdfast.torch` imports torch when it is first asked for, `holdfast.jax` imports JAX, and neither does before.
"""

from __future__ import annotations

from importlib import import_module
from types import FunctionType
from typing import TYPE_CHECKING

from holdfast.core.version import VERSION

if TYPE_CHECKING:
    from holdfast import errors, metadata
    from holdfast import jax as jax
    from holdfast import torch as torch
    from holdfast.core.box import Box
    from holdfast.core.checkpoint import Alias, Checkpoint
    from holdfast.core.chunk import Chunk, Storage
    from holdfast.core.digest import Digest
    from holdfast.core.dtype import DTYPES, DType
    from holdfast.core.limits import Limits
    from holdfast.core.opaque import Global, Opaque
    from holdfast.core.tensor import Composite, LazyTensor
    from holdfast.engine.computed import dequantize
    from holdfast.errors import HoldfastError
    from holdfast.inspect.diff import Diff, diff
    from holdfast.inspect.open import open, read
    from holdfast.inspect.scan import ScanReport, scan
    from holdfast.inspect.sparsity import SparsityReport, TensorSparsity, sparsity
    from holdfast.inspect.stats import StatsReport, TensorStats, stats
    from holdfast.inspect.verify import VerifyReport, verify
    from holdfast.pruning.prune import Pruned, prune
    from holdfast.reports.report import Report, report
    from holdfast.rewrite.compact import Compacted, compact
    from holdfast.rewrite.convert import Conversion, convert, edit
    from holdfast.rewrite.copy import Copied, copy
    from holdfast.rewrite.package import package, replace_weights
    from holdfast.rewrite.reshard import reshard
    from holdfast.rewrite.save import save, to_bytes
    from holdfast.rewrite.seal import Sealed, seal
    from holdfast.rewrite.tie import AliasGraph, Tied, alias_graph, tie
    from holdfast.runs.export import Export
    from holdfast.runs.rules import Best, Every, Latest, Within
    from holdfast.runs.run import Run
    from holdfast.runs.steps import Step
    from holdfast.saving.planned import Saved

__version__ = VERSION

_MODULES = ("errors", "jax", "metadata", "torch")
"""Public modules. `jax` and `torch` are not in `__all__`, so that a star import needs neither."""

_WHERE = {
    "DTYPES": "core.dtype",
    "Alias": "core.checkpoint",
    "AliasGraph": "rewrite.tie",
    "Best": "runs.rules",
    "Box": "core.box",
    "Checkpoint": "core.checkpoint",
    "Chunk": "core.chunk",
    "Compacted": "rewrite.compact",
    "Composite": "core.tensor",
    "Conversion": "rewrite.convert",
    "Copied": "rewrite.copy",
    "DType": "core.dtype",
    "Diff": "inspect.diff",
    "Digest": "core.digest",
    "Every": "runs.rules",
    "Export": "runs.export",
    "Global": "core.opaque",
    "HoldfastError": "errors",
    "Latest": "runs.rules",
    "LazyTensor": "core.tensor",
    "Limits": "core.limits",
    "Opaque": "core.opaque",
    "Pruned": "pruning.prune",
    "Report": "reports.report",
    "Run": "runs.run",
    "Saved": "saving.planned",
    "ScanReport": "inspect.scan",
    "Sealed": "rewrite.seal",
    "SparsityReport": "inspect.sparsity",
    "StatsReport": "inspect.stats",
    "Step": "runs.steps",
    "Storage": "core.chunk",
    "TensorSparsity": "inspect.sparsity",
    "TensorStats": "inspect.stats",
    "Tied": "rewrite.tie",
    "VerifyReport": "inspect.verify",
    "Within": "runs.rules",
    "alias_graph": "rewrite.tie",
    "compact": "rewrite.compact",
    "convert": "rewrite.convert",
    "copy": "rewrite.copy",
    "dequantize": "engine.computed",
    "diff": "inspect.diff",
    "edit": "rewrite.convert",
    "open": "inspect.open",
    "package": "rewrite.package",
    "prune": "pruning.prune",
    "read": "inspect.open",
    "replace_weights": "rewrite.package",
    "report": "reports.report",
    "reshard": "rewrite.reshard",
    "save": "rewrite.save",
    "scan": "inspect.scan",
    "seal": "rewrite.seal",
    "sparsity": "inspect.sparsity",
    "stats": "inspect.stats",
    "tie": "rewrite.tie",
    "to_bytes": "rewrite.save",
    "verify": "inspect.verify",
}
"""The module of each public name."""

__all__ = [
    "DTYPES",
    "Alias",
    "AliasGraph",
    "Best",
    "Box",
    "Checkpoint",
    "Chunk",
    "Compacted",
    "Composite",
    "Conversion",
    "Copied",
    "DType",
    "Diff",
    "Digest",
    "Every",
    "Export",
    "Global",
    "HoldfastError",
    "Latest",
    "LazyTensor",
    "Limits",
    "Opaque",
    "Pruned",
    "Report",
    "Run",
    "Saved",
    "ScanReport",
    "Sealed",
    "SparsityReport",
    "StatsReport",
    "Step",
    "Storage",
    "TensorSparsity",
    "TensorStats",
    "Tied",
    "VerifyReport",
    "Within",
    "alias_graph",
    "compact",
    "convert",
    "copy",
    "dequantize",
    "diff",
    "edit",
    "errors",
    "metadata",
    "open",
    "package",
    "prune",
    "read",
    "replace_weights",
    "report",
    "reshard",
    "save",
    "scan",
    "seal",
    "sparsity",
    "stats",
    "tie",
    "to_bytes",
    "verify",
]


def __getattr__(name: str) -> object:
    if name in _MODULES:
        try:
            return import_module(f"holdfast.{name}")
        except ModuleNotFoundError as missing:
            # An AttributeError, so that `hasattr` and whatever lists the names of a module work without the framework as well.
            raise AttributeError(str(missing)) from missing
    if name not in _WHERE:
        raise AttributeError(f"module 'holdfast' has no attribute {name!r}")
    value = getattr(import_module(f"holdfast.{_WHERE[name]}"), name)
    if isinstance(value, FunctionType):
        # What a person reads is where they have it from. Not of a class: by its module Python finds its source and its annotations.
        value.__module__ = "holdfast"
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*__all__, *_MODULES})
