"""Open, save, convert and check PyTorch model checkpoints, without running the code inside them.

Names are imported when they are first used, so that a program that only opens files does not import
the modules that write them. `holdfast.torch` imports torch when it is first used, and `holdfast.jax`
imports JAX.
"""

from __future__ import annotations

from importlib import import_module
from types import FunctionType
from typing import TYPE_CHECKING

from holdfast.core.version import VERSION

if TYPE_CHECKING:
    from holdfast import errors
    from holdfast import jax as jax
    from holdfast import metadata as metadata
    from holdfast import testing as testing
    from holdfast import torch as torch
    from holdfast.core.box import Box as Box
    from holdfast.core.checkpoint import Alias as Alias
    from holdfast.core.checkpoint import Checkpoint
    from holdfast.core.chunk import Chunk as Chunk
    from holdfast.core.chunk import Storage as Storage
    from holdfast.core.digest import Digest as Digest
    from holdfast.core.dtype import DTYPES as DTYPES
    from holdfast.core.dtype import DType as DType
    from holdfast.core.group import Group as Group
    from holdfast.core.limits import Limits
    from holdfast.core.opaque import Global as Global
    from holdfast.core.opaque import Opaque as Opaque
    from holdfast.core.tensor import Composite as Composite
    from holdfast.core.tensor import LazyTensor
    from holdfast.engine.computed import dequantize as dequantize
    from holdfast.errors import BadArgument as BadArgument
    from holdfast.errors import BadArgumentType as BadArgumentType
    from holdfast.errors import BadPath as BadPath
    from holdfast.errors import CannotHold as CannotHold
    from holdfast.errors import Closed as Closed
    from holdfast.errors import Corrupted as Corrupted
    from holdfast.errors import DoesNotFit as DoesNotFit
    from holdfast.errors import DurabilityUncertain as DurabilityUncertain
    from holdfast.errors import FormatError, HoldfastError, HoldfastWarning, SaveError, StoreError
    from holdfast.errors import LimitExceeded as LimitExceeded
    from holdfast.errors import NoSuchTensor as NoSuchTensor
    from holdfast.errors import NotCommitted as NotCommitted
    from holdfast.errors import RankLost as RankLost
    from holdfast.errors import RanksFailed as RanksFailed
    from holdfast.errors import RanksFoundNothing as RanksFoundNothing
    from holdfast.errors import RanksRefused as RanksRefused
    from holdfast.errors import Refused as Refused
    from holdfast.errors import Replaced as Replaced
    from holdfast.errors import Unsupported as Unsupported
    from holdfast.extras.maps.find import Map
    from holdfast.extras.packages.package import package, replace_weights
    from holdfast.extras.packages.tie import AliasGraph as AliasGraph
    from holdfast.extras.packages.tie import Tied as Tied
    from holdfast.extras.packages.tie import alias_graph as alias_graph
    from holdfast.extras.packages.tie import tie
    from holdfast.extras.pruning.prune import Pruned as Pruned
    from holdfast.extras.pruning.prune import prune
    from holdfast.extras.reports.report import Report as Report
    from holdfast.extras.reports.report import report
    from holdfast.extras.runs.export import Export
    from holdfast.extras.runs.rules import Best, Every, Latest, Within
    from holdfast.extras.runs.run import Run
    from holdfast.extras.runs.steps import Step as Step
    from holdfast.verbs.compact import Compacted as Compacted
    from holdfast.verbs.compact import compact
    from holdfast.verbs.convert import Conversion as Conversion
    from holdfast.verbs.convert import convert, edit
    from holdfast.verbs.copy import Copied as Copied
    from holdfast.verbs.copy import copy
    from holdfast.verbs.diff import Diff as Diff
    from holdfast.verbs.diff import diff
    from holdfast.verbs.open import open, read
    from holdfast.verbs.reshard import reshard
    from holdfast.verbs.save import save, to_bytes
    from holdfast.verbs.scan import ScanReport as ScanReport
    from holdfast.verbs.scan import scan
    from holdfast.verbs.seal import Sealed as Sealed
    from holdfast.verbs.seal import seal
    from holdfast.verbs.shared.planned import Saved as Saved
    from holdfast.verbs.sparsity import SparsityReport as SparsityReport
    from holdfast.verbs.sparsity import TensorSparsity as TensorSparsity
    from holdfast.verbs.sparsity import sparsity
    from holdfast.verbs.stats import StatsReport as StatsReport
    from holdfast.verbs.stats import TensorStats as TensorStats
    from holdfast.verbs.stats import stats
    from holdfast.verbs.verify import VerifyReport as VerifyReport
    from holdfast.verbs.verify import verify

__version__ = VERSION

_MODULES = ("errors", "jax", "metadata", "testing", "torch")
"""Public modules. Only `errors` is in `__all__`, because `from holdfast import *` imports those."""

_NAMES_BY_MODULE = {
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
    "errors": "BadArgument BadArgumentType BadPath CannotHold Closed Corrupted DoesNotFit "
    "DurabilityUncertain FormatError HoldfastError HoldfastWarning LimitExceeded NoSuchTensor "
    "NotCommitted RankLost RanksFailed RanksFoundNothing RanksRefused Refused Replaced SaveError "
    "StoreError Unsupported",
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
"""The public names of each module of the kernel. Those of extras are in `holdfast.extras.NAMES`."""

_MODULES_BY_NAME: dict[str, str] = {}
for _module, _names in _NAMES_BY_MODULE.items():
    _MODULES_BY_NAME.update(dict.fromkeys(_names.split(), f"holdfast.{_module}"))

__all__ = [
    "Best",
    "Checkpoint",
    "Every",
    "Export",
    "FormatError",
    "HoldfastError",
    "HoldfastWarning",
    "Latest",
    "LazyTensor",
    "Limits",
    "Map",
    "Run",
    "SaveError",
    "StoreError",
    "Within",
    "compact",
    "convert",
    "copy",
    "diff",
    "edit",
    "errors",
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
"""The names that people type. Result types and rare types are attributes only: `holdfast.Saved`."""


def __getattr__(name: str) -> object:
    """Import a public name or module when it is first used."""
    if name in _MODULES:
        try:
            return import_module(f"holdfast.{name}")
        except ModuleNotFoundError as missing:
            # `hasattr` and `inspect.getmembers` expect this error if a framework is not installed.
            raise AttributeError(str(missing)) from missing

    module_name = _MODULES_BY_NAME.get(name) or _find_in_extras(name)
    value = getattr(import_module(module_name), name)
    if isinstance(value, FunctionType):
        # Users see the name by which they import a function. A class keeps its module, in which
        # Python looks for its source and its annotations.
        value.__module__ = "holdfast"
    globals()[name] = value
    return value


def _find_in_extras(name: str) -> str:
    """Return the module of an extra's public name."""
    # Imported here to keep `import holdfast` fast.
    from holdfast.core.registry import get_extras_table

    try:
        return str(get_extras_table("NAMES")[name])
    except KeyError:
        raise AttributeError(f"module 'holdfast' has no attribute {name!r}") from None


def __dir__() -> list[str]:
    return sorted({*__all__, *_MODULES})
