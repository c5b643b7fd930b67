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
    from holdfast import testing as testing
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
    from holdfast.extras.maps.find import Map
    from holdfast.extras.packages.package import package, replace_weights
    from holdfast.extras.packages.tie import AliasGraph, Tied, alias_graph, tie
    from holdfast.extras.pruning.prune import Pruned, prune
    from holdfast.extras.reports.report import Report, report
    from holdfast.extras.runs.export import Export
    from holdfast.extras.runs.rules import Best, Every, Latest, Within
    from holdfast.extras.runs.run import Run
    from holdfast.extras.runs.steps import Step
    from holdfast.verbs.compact import Compacted, compact
    from holdfast.verbs.convert import Conversion, convert, edit
    from holdfast.verbs.copy import Copied, copy
    from holdfast.verbs.diff import Diff, diff
    from holdfast.verbs.open import open, read
    from holdfast.verbs.reshard import reshard
    from holdfast.verbs.save import save, to_bytes
    from holdfast.verbs.scan import ScanReport, scan
    from holdfast.verbs.seal import Sealed, seal
    from holdfast.verbs.shared.planned import Saved
    from holdfast.verbs.sparsity import SparsityReport, TensorSparsity, sparsity
    from holdfast.verbs.stats import StatsReport, TensorStats, stats
    from holdfast.verbs.verify import VerifyReport, verify

__version__ = VERSION

_MODULES = ("errors", "jax", "metadata", "testing", "torch")
"""Public modules. `jax`, `testing` and `torch` are not in `__all__`, which a star import loads."""

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
    "engine.computed": "dequantize",
    "errors": "BadArgument BadArgumentType BadPath CannotHold Closed Corrupted DoesNotFit DurabilityUncertain FormatError "
    "HoldfastError HoldfastWarning LimitExceeded NoSuchTensor NotCommitted RankLost RanksFailed RanksFoundNothing RanksRefused "
    "Refused Replaced SaveError StoreError Unsupported",
    "verbs.diff": "Diff diff",
    "verbs.open": "open read",
    "verbs.scan": "ScanReport scan",
    "verbs.sparsity": "SparsityReport TensorSparsity sparsity",
    "verbs.stats": "StatsReport TensorStats stats",
    "verbs.verify": "VerifyReport verify",
    "verbs.compact": "Compacted compact",
    "verbs.convert": "Conversion convert edit",
    "verbs.copy": "Copied copy",
    "verbs.reshard": "reshard",
    "verbs.save": "save to_bytes",
    "verbs.seal": "Sealed seal",
    "verbs.shared.planned": "Saved",
}
"""The public names of each module of the kernel. Those of extras stand in `holdfast.extras.NAMES`."""

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
    module = f"holdfast.{_WHERE[name]}" if name in _WHERE else _find_in_extras(name)
    value = getattr(import_module(module), name)
    if isinstance(value, FunctionType):
        # What a person reads is where they have it from. Not of a class: by its module Python finds its source and its annotations.
        value.__module__ = "holdfast"
    globals()[name] = value
    return value


def _find_in_extras(name: str) -> str:
    """Return the module of an extra's public name."""
    from holdfast.core.registry import extras_table  # so that `import holdfast` stays light

    try:
        return str(extras_table("NAMES")[name])
    except KeyError:
        raise AttributeError(f"module 'holdfast' has no attribute {name!r}") from None


def __dir__() -> list[str]:
    return sorted({*__all__, *_MODULES})
