"""The errors of a `weights_only` load, in the three forms that torch's users know.

    the file names something that is not allowed   what would allow it, and the other way, for a source that is trusted
    ... that only needs an import                  what to import
    anything else in the pickle                    what it was, and where to report it

All begin with "Weights only load failed.", and the fragments that programs look for (the call that would allow a name, the request
for an issue) are torch's. For a file that contradicts itself no option is named: none would help.

A pickle of another protocol than 2 always gets the third form, as it does in torch, whose loader reads no other.
"""

from __future__ import annotations

from _pickle import UnpicklingError
from types import BuiltinMethodType, FunctionType, MethodType

from holdfast.core.text import escape
from holdfast.errors import (
    FormatError,
    HoldfastError,
    LimitExceeded,
    MetadataError,
    PickleError,
    Truncated,
)
from holdfast.torch import versions

DEFAULT_PROTOCOL = 2

ISSUE = (
    "Please file an issue with the following so that we can make `weights_only=True` compatible with your use case: "
    "WeightsUnpickler error: "
)
UNSAFE = (
    "Loading it with `weights_only` set to `False` would probably work, and can run any code that the file holds. Do it only if "
    "you trust the source of the file."
)
LOOK = "holdfast.open reads the tensors of such a file, and `holdfast scan` shows what it would run; both run nothing."

JAGGED = frozenset(
    {
        "torch.nested._internal.nested_tensor.NestedTensor",
        "torch.nested._internal.nested_tensor._rebuild_njt",
        "torch._dynamo.decorators._DimRange",
    }
)
"""Names that torch allows once the modules that make jagged tensors are imported."""

DTENSOR = frozenset(
    {
        "torch.distributed.device_mesh.DeviceMesh",
        "torch.distributed.tensor.DTensor",
        "torch.distributed.tensor._dtensor_spec.DTensorSpec",
        "torch.distributed.tensor._dtensor_spec.ShardOrderEntry",
        "torch.distributed.tensor._dtensor_spec.TensorMeta",
        "torch.distributed.tensor.placement_types.Partial",
        "torch.distributed.tensor.placement_types.Replicate",
        "torch.distributed.tensor.placement_types.Shard",
        "torch.distributed.tensor.placement_types._StridedShard",
    }
)
"""Names that torch allows once the modules of distributed tensors are imported. torch 2.13 forgets ShardOrderEntry and
_StridedShard in its message.
"""


REGISTERED = (
    JAGGED
    | DTENSOR
    | {"torch.distributed._mesh_layout._FlatLayout", "torch.distributed._mesh_layout._MeshLayout"}
)
"""Names that torch 2.13 allows by itself. An error in them is torch's, and not the user's."""


class Forbidden(PickleError):
    """A global that this load may not use."""

    def __init__(self, message: str, advice: str) -> None:
        super().__init__(message)
        self.advice = advice


class Refusal(PickleError):
    """A pickle that a load refuses. It prints as the class that torch raises, whose name programs look for."""

    def __reduce__(self) -> tuple[object, ...]:
        return (
            _refused,
            (self.message,),
            vars(self),
        )  # by its name, pickle would find the other class


def _refused(message: str) -> Refusal:
    return Refusal(message)


Refusal.__module__, Refusal.__name__, Refusal.__qualname__ = (
    "_pickle",
    "UnpicklingError",
    "UnpicklingError",
)


class BadWeights(MetadataError, PickleError, RuntimeError):
    """Metadata that cannot be true. A RuntimeError as well, which torch raises where a tensor does not fit its storage."""


class WeightsEnd(Truncated, PickleError):
    """The stream ends before its pickle does."""


class WeightsLimit(LimitExceeded, UnpicklingError):
    """The stream costs more than `Limits` allows."""


def label(what: object) -> str:
    """The name of a callable for a message, at a cost that does not depend on it."""
    if isinstance(what, type | FunctionType):
        return escape(f"{what.__module__}.{what.__qualname__}")
    if isinstance(what, MethodType | BuiltinMethodType):
        owner = what.__self__
        kind = owner if isinstance(owner, type) else type(owner)
        return escape(f"{what.__name__}, a method of {kind.__module__}.{kind.__qualname__}")
    return f"a {type(what).__name__}"


def forbidden(module: str, name: str, *, blocked: bool) -> Forbidden:
    """The error for a global that is not allowed, or whose module never is."""
    full = f"{module}.{name}"
    shown = escape(full.removeprefix("builtins."))
    if blocked:
        reason = (
            f"Trying to load unsupported GLOBAL {shown} whose module {escape(module)} is blocked."
        )
        return Forbidden(reason, f"{reason}\nIt stays blocked whatever is allowed. {UNSAFE} {LOOK}")
    if full in JAGGED and not versions.NESTED_ASKED_FOR:
        reason = "``torch.nested`` and ``torch._dynamo`` must be imported to load nested jagged tensors (NJTs)"
        return Forbidden(reason, f"{reason}\n{UNSAFE}")
    if full in DTENSOR:
        reason = "``torch.distributed.tensor`` must be imported to load DTensors"
        return Forbidden(reason, f"{reason}\n{UNSAFE}")
    reason = (
        f"Unsupported global: GLOBAL {shown} was not an allowed global by default. "
        f"Please use `torch.serialization.add_safe_globals([{shown}])` or the `torch.serialization.safe_globals([{shown}])` "
        "context manager to allowlist this global if you trust this class/function."
    )
    return Forbidden(
        reason,
        "It names something that is neither a part of weights nor on your list of safe globals. "
        "There are two ways to load it, both only if you trust the source:\n"
        "    (1) allow what it names, and keep `weights_only=True`, as the error below says;\n"
        "    (2) pass `weights_only=False`, which can run any code that the file holds.\n"
        f"WeightsUnpickler error: {reason}\n{LOOK}",
    )


def refusal(error: Exception, *, protocol: int) -> Exception:
    """The error to raise in the place of `error`, which ended a `weights_only` load of a pickle of this protocol.

    An error of the stream becomes one that is an UnpicklingError and still what it was (`MetadataError`, `LimitExceeded`, …). All
    others (the file cannot be read, a device is missing, code of the user failed) are given back unchanged.
    """
    if not isinstance(error, FormatError | LimitExceeded | UnpicklingError):
        return error
    reason = error.message if isinstance(error, HoldfastError) else str(error)
    text = f"{ISSUE}{reason}\n{UNSAFE} {LOOK}"
    if protocol == DEFAULT_PROTOCOL and isinstance(error, Forbidden):
        text = error.advice
    elif protocol == DEFAULT_PROTOCOL and isinstance(
        error, MetadataError | LimitExceeded | Truncated
    ):
        text = reason
    text = f"Weights only load failed. {text}"
    made: HoldfastError
    match error:
        case MetadataError():
            made = BadWeights(text)
        case LimitExceeded():
            made = WeightsLimit(text)
        case Truncated():
            made = WeightsEnd(text)
        case _:
            made = Refusal(text)
    if isinstance(error, HoldfastError):
        made.file, made.tensor, made.offset = error.file, error.tensor, error.offset
        made.expected, made.found = error.expected, error.found
    return made
