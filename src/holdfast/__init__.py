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
    from holdfast.core.group import Group
    from holdfast.core.limits import Limits
    from holdfast.core.opaque import Global, Opaque
    from holdfast.core.tensor import Composite, LazyTensor
    from holdfast.engine.computed import dequantize
    from holdfast.errors import (
        BadArgument,
        BadArgumentType,
        BadPath,
        CannotHold,
        Closed,
        Corrupted,
        DoesNotFit,
        DurabilityUncertain,
        FormatError,
        HoldfastError,
        HoldfastWarning,
        LimitExceeded,
        NoSuchTensor,
        NotCommitted,
        RankLost,
        RanksFailed,
        RanksFoundNothing,
        RanksRefused,
        Refused,
        Replaced,
        SaveError,
        StoreError,
        Unsupported,
    )
    from holdfast.inspect.diff import Diff, diff
    from holdfast.inspect.open import open, read
    from holdfast.inspect.scan import ScanReport, scan
    from holdfast.inspect.sparsity import SparsityReport, TensorSparsity, sparsity
    from holdfast.inspect.stats import StatsReport, TensorStats, stats
    from holdfast.inspect.verify import VerifyReport, verify
    from holdfast.maps.find import Map
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

_NAMES = {
    "core.box": "Box",
    "core.checkpoint": "Alias Checkpoint",
    "core.chunk": "Chunk Storage",
    "core.digest": "Digest",
    "core.dtype": "DTYPES DType",
    "core.group": "Group",
    "core.limits": "Limits",
    "core.opaque": "Global Opaque",
    "core.tensor": "Composite LazyTensor",
    "maps.find": "Map",
    "engine.computed": "dequantize",
    "errors": "BadArgument BadArgumentType BadPath CannotHold Closed Corrupted DoesNotFit DurabilityUncertain FormatError "
    "HoldfastError HoldfastWarning LimitExceeded NoSuchTensor NotCommitted RankLost RanksFailed RanksFoundNothing RanksRefused "
    "Refused Replaced SaveError StoreError Unsupported",
    "inspect.diff": "Diff diff",
    "inspect.open": "open read",
    "inspect.scan": "ScanReport scan",
    "inspect.sparsity": "SparsityReport TensorSparsity sparsity",
    "inspect.stats": "StatsReport TensorStats stats",
    "inspect.verify": "VerifyReport verify",
    "pruning.prune": "Pruned prune",
    "reports.report": "Report report",
    "rewrite.compact": "Compacted compact",
    "rewrite.convert": "Conversion convert edit",
    "rewrite.copy": "Copied copy",
    "rewrite.package": "package replace_weights",
    "rewrite.reshard": "reshard",
    "rewrite.save": "save to_bytes",
    "rewrite.seal": "Sealed seal",
    "rewrite.tie": "AliasGraph Tied alias_graph tie",
    "runs.export": "Export",
    "runs.rules": "Best Every Latest Within",
    "runs.run": "Run",
    "runs.steps": "Step",
    "saving.planned": "Saved",
}
"""The public names of each module."""

_WHERE = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = [
    "DTYPES", "Alias", "AliasGraph", "BadArgument", "BadArgumentType", "BadPath", "Best", "Box",
    "CannotHold", "Checkpoint", "Chunk", "Closed", "Compacted", "Composite", "Conversion", "Copied",
    "Corrupted", "DType", "Diff", "Digest", "DoesNotFit", "DurabilityUncertain", "Every", "Export",
    "FormatError", "Global", "Group", "HoldfastError", "HoldfastWarning", "Latest", "LazyTensor",
    "LimitExceeded", "Limits", "Map", "NoSuchTensor", "NotCommitted", "Opaque", "Pruned",
    "RankLost", "RanksFailed", "RanksFoundNothing", "RanksRefused", "Refused", "Replaced", "Report",
    "Run", "SaveError", "Saved", "ScanReport", "Sealed", "SparsityReport", "StatsReport", "Step",
    "Storage", "StoreError", "TensorSparsity", "TensorStats", "Tied", "Unsupported", "VerifyReport",
    "Within", "alias_graph", "compact", "convert", "copy", "dequantize", "diff", "edit", "errors",
    "metadata", "open", "package", "prune", "read", "replace_weights", "report", "reshard", "save",
    "scan", "seal", "sparsity", "stats", "tie", "to_bytes", "verify",
]  # fmt: skip


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
