"""The differences between the versions of torch that Holdfast works with: 2.8 to 2.15.

Nothing else in Holdfast compares versions of torch. A difference is a `Change`. It is true where this torch has it:

    if versions.STRIDES: ...
    @pytest.mark.skipif(not versions.PT2_ARCHIVE, reason=versions.PT2_ARCHIVE.reason)

Functions here give under one name what versions have at different places, or lack. With an older torch, `import holdfast.torch`
raises `Unsupported`; with a newer one it warns.
"""

from __future__ import annotations

import importlib
import re
import warnings
from collections.abc import Callable, Iterable, Mapping

import torch

from holdfast.core.value import Value
from holdfast.errors import HoldfastWarning, Unsupported

Version = tuple[int, int]

OLDEST: Version = (2, 8)
NEWEST: Version = (2, 15)


def parsed(text: str) -> Version:
    """The first two numbers of a version: `2.15.0+cu132` is (2, 15)."""
    found = re.match(r"(\d+)\.(\d+)", text)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def check_version(text: str) -> None:
    """Raise `Unsupported` for a torch that is too old, and warn of one that is newer than the range."""
    version = parsed(text)
    supported = f"holdfast.torch works with torch {_text(OLDEST)} to {_text(NEWEST)}, and this is torch {text}"
    if version < OLDEST:
        raise Unsupported(
            f"{supported}: install a newer torch, or use `holdfast` alone, which needs none",
            found=text,
        )
    if version > NEWEST:
        warnings.warn(
            f"{supported}: it was not tried with it, and there may be a newer Holdfast",
            HoldfastWarning,
            stacklevel=2,
        )


def _text(version: Version) -> str:
    return f"{version[0]}.{version[1]}"


HERE = parsed(torch.__version__)

check_version(torch.__version__)


class Change(Value, frozen=True):
    """Something that torch has, or does, since one version. True if this torch does."""

    since: Version
    what: str
    """A sentence about torch, in the present tense."""

    def __bool__(self) -> bool:
        return self.since <= HERE

    @property
    def reason(self) -> str:
        return f"torch {_text(HERE)}: since {_text(self.since)}, {self.what}"

    def require(self, wanted: str) -> None:
        """Raise `Unsupported` where this torch is too old for what is wanted."""
        if not self:
            raise Unsupported(
                f"{wanted} needs torch {_text(self.since)} or later, and this is torch {torch.__version__}",
                found=torch.__version__,
            )


# Names that torch has.

PT2_ARCHIVE = Change((2, 9), "torch.export writes and reads archives with one record per storage")
SHARED_WEIGHTS = Change(
    (2, 11), "torch.export.pt2_archive puts the weights together that cover a storage in parts"
)
PROGRAM_ALONE = Change(
    (2, 12), "torch.export serialises a program without its weights, and knows every dtype of them"
)
CUSTOM_OBJECTS = Change((2, 13), "torch.export.save writes constants of registered classes")
CUSTOM_OBJECTS_RENAMED = Change(
    (2, 14), "what torch called opaque values are called objects of custom classes"
)
FAKE_KINDS = Change(
    (2, 14), "torch asks is_fake_tensor whether a tensor is fake, and no longer its class"
)
HUGGING_FACE = Change(
    (2, 9),
    "torch.distributed.checkpoint writes folders of safetensors in pieces, and ranks may save alone",
)
CHECKPOINTABLE_TENSOR = Change(
    (2, 14), "a tensor with global_shape and three fields more is a shard to dcp.save and dcp.load"
)

FLOAT4_COPIED = Change(
    (2, 11), "torch copies tensors of float4_e2m1fn_x2; it was seen not to in 2.8"
)
BCOMPLEX = Change((2, 14), "torch has bcomplex32")
VERSIONED = Change((2, 9), "the description of a sharded checkpoint has a version")

# What torch does.

META_SHARES = Change((2, 15), "tensors of one storage share it after a load to the meta device")
NESTED_ASKED_FOR = Change(
    (2, 15), "weights_only=True loads nested tensors where they were allowed by name only"
)
SPARSE_CHECKED = Change(
    (2, 15),
    "torch.load checks the indices of sparse tensors, which meta and fake tensors do not have",
)
SETITEM_REFUSED = Change(
    (2, 10), "weights_only=True says in a sentence that an item was set in what is no dict"
)
PLACEMENTS_IN_C = Change((2, 10), "placements of DTensors are objects of C++")
WORDS = Change((2, 11), "torch.load says in the words of today what is wrong with a file")
WHOLE_TAGS = Change(
    (2, 11),
    "the tag of a device is matched as a whole, may be a device in a dict, and is known for mtia",
)
NUMBERED_FAKES = Change((2, 13), "a fake tensor that is loaded to cuda is on cuda:0")
ANY_CASE = Change((2, 13), "the variables TORCH_FORCE_… are read in small and capital letters")
SATURATES = Change((2, 13), "a number beyond the largest of float8_e4m3fn becomes that and not NaN")
SAFETENSORS = Change((2, 13), "torch.load reads files whose name ends in .safetensors")
STRIDES = Change((2, 15), "the description of a sharded checkpoint has the strides of tensors")

CHANGES = {name: value for name, value in globals().copy().items() if isinstance(value, Change)}


def dtype(name: str | None) -> torch.dtype | None:
    """torch's dtype of that name; None where this torch has none."""
    found = getattr(torch, name, None) if name else None
    return found if isinstance(found, torch.dtype) else None


def allowed_globals(known: Iterable[str]) -> frozenset[str]:
    """The names among `known` that `torch.load(weights_only=True)` of this torch allows by default."""
    # Private to torch, and in every version of the range. A newer one without it is believed to allow what 2.15 does.
    torchs: Callable[[], Mapping[str, object]] | None = getattr(
        torch._weights_only_unpickler, "_get_allowed_globals", None
    )
    return frozenset(known) if torchs is None else frozenset(known) & torchs().keys()


def withdrawn_globals() -> frozenset[str]:
    """Names that `torch.load(weights_only=True)` of earlier versions allowed by default, and this one does not."""
    return frozenset({"torch._utils._rebuild_nested_tensor"} if NESTED_ASKED_FOR else ())


def rebuild(name: str) -> Callable[..., object] | None:
    """The function of torch that rebuilds a kind of tensor from a file; None where this torch has none."""
    found: Callable[..., object] | None = getattr(torch._utils, f"_rebuild_{name}", None)
    return found


has_names: Callable[[torch.Tensor], bool] | None = getattr(torch.Tensor, "has_names", None)
"""Whether the dimensions of a tensor have names, which torch does not save; None where this torch has no such tensors."""


def serialize_program(
    program: object, opset_version: dict[str, int] | None, protocol: int
) -> tuple[bytes, bytes]:
    """An exported program and its example inputs, without its weights where torch can leave them out."""
    from torch._export.serde.serialize import serialize

    more = {"serialize_state_dict": False, "serialize_constants": False} if PROGRAM_ALONE else {}
    made = serialize(program, opset_version, protocol, **more)  # type: ignore[arg-type]
    return made.exported_program, made.example_inputs


def is_custom_object(value: object) -> bool:
    """Whether `torch.export` pickles a constant as an object of a kind that was registered with torch."""
    if not CUSTOM_OBJECTS:
        return False
    module = importlib.import_module("torch._library.opaque_object")
    return bool(
        (module.is_custom_class_obj if CUSTOM_OBJECTS_RENAMED else module.is_opaque_value)(value)
    )


def is_fake(tensor: object) -> bool:
    """Whether a tensor is fake, of either of torch's two kinds."""
    module = importlib.import_module("torch._subclasses.fake_tensor")
    return (
        bool(module.is_fake_tensor(tensor)) if FAKE_KINDS else isinstance(tensor, module.FakeTensor)
    )


def is_faking() -> bool:
    # torch's own function takes as long as reading a small file. Without these two it never finds a mode.
    if (
        not FAKE_KINDS
        and torch._guards.TracingContext.try_get() is None
        and not torch._C._len_torch_dispatch_stack()
    ):
        return False
    return torch._guards.detect_fake_mode(None) is not None


def ordered_set() -> type:
    """The class of sets in which `torch.export` holds weights that share a storage; before it did, any class of sets."""
    found: type = (
        importlib.import_module("torch.utils._ordered_set").OrderedSet if PT2_ARCHIVE else set
    )
    return found


def strides_of(properties: object) -> tuple[int, ...] | None:
    """The strides in torch's description of a tensor of a sharded checkpoint; None where it has no such field."""
    found: tuple[int, ...] | None = getattr(properties, "strides", None)
    return found


def set_strides(properties: object, strides: tuple[int, ...] | None) -> None:
    if STRIDES:
        setattr(properties, "strides", strides)  # noqa: B010 (mypy knows the fields of one torch)
