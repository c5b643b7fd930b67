"""`TorchBuilder`: makes torch's own objects for the reducers of torch's pickles, in a `weights_only` load.

1. A tensor is an empty one of the storage's dtype and device, set to view the storage. Sizes, strides and offset are compared with
   the storage before (`formats/torch/tensors.py`), because `set_` enlarges one that is too small, with what was in memory.
2. No element of a plain tensor is used here, so storages are filled together when the whole pickle is read. Those of a composite
   are filled first, because its indices are checked, and how much is checked is bounded.
3. What torch refuses (a gradient for integers, an unknown device) becomes a `MetadataError` in torch's words.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol
from weakref import proxy

import torch
from torch.nested._internal.nested_tensor import NestedTensor
from torch.storage import TypedStorage, UntypedStorage

from holdfast.core.dtype import DTYPES
from holdfast.core.limits import Limits
from holdfast.core.text import escape
from holdfast.errors import (
    HoldfastError,
    LimitExceeded,
    MetadataError,
    PickleError,
    Refused,
    Unsupported,
)
from holdfast.formats.pickle.table import Args, Name, Spending
from holdfast.formats.torch.composites import KINDS as CHECKS
from holdfast.formats.torch.composites import Apart
from holdfast.formats.torch.reducers import Claim
from holdfast.formats.torch.tensors import beyond, brief, flag, reach
from holdfast.torch.serialization.locations import located_by_caller
from holdfast.torch.serialization.refusals import label
from holdfast.torch.serialization.storages import QUANTIZED, LazyStorages, row_of
from holdfast.torch.tensors.composites import KINDS, Elements, check_room, check_rows

TORCH_SAYS_NO = (RuntimeError, ValueError, TypeError, IndexError, OverflowError, AssertionError)

OWN = frozenset(
    name
    for kind in torch.Tensor.__mro__
    for name, what in vars(kind).items()
    if hasattr(type(what), "__set__")
)
"""Names of a tensor that are more than an entry in its `__dict__`."""

Make = tuple[Callable[[], torch.Tensor], int]
"""A function that makes an empty tensor of one dtype and device, and the bytes of an element."""

INSPECTED_NBYTES = 4 << 30
"""Bytes of indices that are checked in all, each tensor counted at every use: two seconds. A few layers often share masks."""


class RefusedTensor(MetadataError, Refused):
    """A tensor that torch refuses; a RuntimeError as well, which is what torch raises."""


def refused_by_torch(what: str, error: Exception) -> HoldfastError:
    reason = str(error).partition("\n")[0]
    if isinstance(error, NotImplementedError):
        return Unsupported(f"torch cannot build {what} here: {reason}")
    return RefusedTensor(f"torch refuses {what}: {reason}")


@contextmanager
def refusing(what: str) -> Iterator[None]:
    """Turn what torch raises in a block into a `HoldfastError` about the object that was to be built."""
    try:
        yield
    except TORCH_SAYS_NO as error:
        raise refused_by_torch(what, error) from error


def assign(target: torch.Tensor, state: object, spending: Spending) -> None:
    """Set attributes of a tensor from a dict, or from a pair of dicts (the second for slots), as `copyreg` makes them.

    A name that is torch's own (`data`, `requires_grad`, `__class__`) cannot come out of a tensor's `__dict__`, so torch did not
    write a file that has one.
    """
    parts = state if isinstance(state, tuple) and len(state) == 2 else (state,)
    for part in parts:
        if part is None:
            continue
        if not isinstance(part, dict):
            raise PickleError(
                "the attributes of a tensor must be a dict", found=type(part).__name__
            )
        spending.copy(len(part))
        for name, value in part.items():
            if type(name) is not str or _is_torchs(type(target), name):
                raise PickleError(
                    "a tensor with an attribute that it cannot have had", found=brief(name)
                )
            setattr(target, name, value)


def _is_torchs(kind: type, name: str) -> bool:
    """Whether setting an attribute changes the tensor itself; a subclass may have made the name its own."""
    return (
        name in OWN
        and next(each for each in kind.__mro__ if name in vars(each)) in torch.Tensor.__mro__
    )


class LoadingTable(Protocol):
    """What a `TorchBuilder` needs of the table whose calls it carries out."""

    limits: Limits
    spending: Spending

    def is_allowed(self, what: object) -> bool:
        """Return whether the user allowed a class or a function."""


class TorchBuilder:
    """Makes torch's objects over the storages of one file."""

    storage_class, tensor_class, fewest = TypedStorage, torch.Tensor, 6

    def __init__(self, storages: LazyStorages, table: LoadingTable) -> None:
        self._storages = storages
        # The table has its builder. A strong reference would be a cycle, which keeps all tensors
        # alive until the garbage collector runs.
        self._table: LoadingTable = proxy(table)
        self.fake = storages.is_faking
        """Whether a FakeTensorMode is active: tensors pretend to be on the device that their storage names."""
        self._makes: dict[torch.dtype, dict[torch.device, Make]] = {}
        self._blank: dict[int, torch.Tensor] = {}
        """Tensors that a call made and BUILD has not filled yet, by identity."""
        self._inspected = 0

    def unbuilt(self, what: Name, args: Args, why: str) -> object:
        raise PickleError(why, found=type(args[0]).__name__)

    def dtype(self, value: object) -> torch.dtype:
        if not isinstance(value, torch.dtype):
            raise PickleError("a dtype was expected", found=type(value).__name__)
        return value

    def named(self, value: object) -> str | None:
        return (
            str(value).removeprefix("torch.")
            if type(value) in (torch.layout, torch.qscheme)
            else None
        )

    def layout(self, name: str) -> torch.layout:
        made: torch.layout = getattr(torch, name)
        return made

    def device(self, kind: str, index: int | None) -> torch.device:
        try:
            return torch.device(kind) if index is None else torch.device(kind, index)
        except TORCH_SAYS_NO as error:
            raise MetadataError(f"torch knows no such device: {escape(brief(kind))}") from error

    def size(self, lengths: tuple[int, ...]) -> torch.Size:
        return torch.Size(lengths)

    def view(
        self,
        storage: object,
        dtype: object,
        claim: Claim,
        *,
        grad: bool = False,
        conj: bool = False,
        neg: bool = False,
    ) -> torch.Tensor:
        offset, size, stride = claim
        shape, steps, begin, last = reach(offset, size, stride, self._table.limits)
        of: TypedStorage = storage  # type: ignore[assignment]  # seen by the reducer, as is the dtype
        untyped, kind = of._untyped_storage, of.dtype if dtype is None else self.dtype(dtype)
        try:
            make, width = self._makes[kind][untyped.device]
        except KeyError:
            make, width = self._make(kind, untyped)
        room = untyped.nbytes()
        if (last + 1) * width > room:
            raise beyond(last, room // width)
        try:
            made = make().set_(untyped, begin, shape, steps)
            if conj or neg:
                self._turn(made, conj=conj, neg=neg)
            if grad:
                made.requires_grad = True
        except TORCH_SAYS_NO as error:
            raise refused_by_torch("a tensor over its storage", error) from error
        return made

    def _make(self, dtype: torch.dtype, untyped: UntypedStorage) -> Make:
        """How an empty tensor for such a storage is made. `new` of another tensor takes half the time of `torch.empty`."""
        if dtype in QUANTIZED:
            raise MetadataError(f"a tensor of {dtype} without a scale", found=str(dtype))
        if self.fake:
            device = getattr(untyped, "_fake_device", None) or untyped.device
            return partial(torch.empty, 0, dtype=dtype, device=device), dtype.itemsize
        model = torch.empty(0, dtype=dtype, device=untyped.device)
        made: Make = (model.new, dtype.itemsize)
        self._makes.setdefault(dtype, {})[untyped.device] = made
        return made

    def _turn(self, made: torch.Tensor, *, conj: bool, neg: bool) -> None:
        if conj:
            if not made.is_complex():
                raise MetadataError(
                    "a conjugate of numbers that are not complex", found=str(made.dtype)
                )
            torch._C._set_conj(made, True)
        if neg:
            if not (made.is_complex() or made.is_floating_point()):
                raise MetadataError(
                    "a negative view of numbers that have none", found=str(made.dtype)
                )
            torch._C._set_neg(made, True)

    def elements(self, storage: object, claim: Claim) -> Elements:
        of: TypedStorage = storage  # type: ignore[assignment]  # seen by the reducer
        dtype, untyped = row_of(of.dtype), of._untyped_storage
        if dtype is None or dtype.kind != "quantized":
            raise MetadataError(f"a quantised tensor of {of.dtype}", found=str(of.dtype))
        shape, steps, begin, last = reach(*claim, self._table.limits)
        if check_room(dtype, shape, last) > untyped.nbytes():
            raise beyond(last, untyped.nbytes() * 8 // dtype.bits)
        return Elements(untyped, dtype, shape, steps, begin)

    # Tensors made empty and filled by BUILD, as torch 0.1 did.

    def blank(self, name: str) -> torch.Tensor:
        if name == "Parameter":
            return torch.nn.Parameter(torch.empty(0, device="cpu"))
        row = DTYPES.storage(f"{name.removesuffix('Tensor')}Storage")
        dtype = (
            torch.get_default_dtype()
            if row is None or row.torch is None
            else getattr(torch, row.torch)
        )
        made = torch.empty(0, dtype=dtype, device="cpu")
        self._blank[id(made)] = made
        return made

    def fill_blank(self, target: torch.Tensor, state: object) -> None:
        """(storage, offset, size, stride)"""
        if self._blank.pop(id(target), None) is None:
            raise PickleError("a BUILD of a tensor that is complete")
        match state:
            case (TypedStorage() as storage, offset, size, stride):
                made = self.view(storage, None, (offset, size, stride))
            case _:
                raise PickleError(
                    "a BUILD of a tensor with other state than torch's", found=type(state).__name__
                )
        if storage.dtype is not target.dtype:
            raise MetadataError(f"a storage of {storage.dtype} for a tensor of {target.dtype}")
        with refusing("a tensor over its storage"):
            if made.device == target.device:
                target.set_(
                    made.untyped_storage(), made.storage_offset(), made.size(), made.stride()
                )
            else:
                target.data = made

    def parameter(self, data: object, grad: bool, state: object) -> object:
        if not isinstance(data, torch.Tensor):
            return NotImplemented
        plain = type(data) is torch.Tensor or self.fake
        if not plain:
            self._storages.fill()
        try:
            made = torch.nn.Parameter(data, grad)
        except TORCH_SAYS_NO as error:
            if plain:
                raise refused_by_torch("a parameter", error) from error
            raise  # a subclass: making it a parameter runs its code, whose errors are its own
        assign(made, state, self._table.spending)
        return made

    def fill_parameter(self, target: torch.nn.Parameter, state: object) -> None:
        """(data, creator, hooks, requires_grad, volatile) of torch 0.1, or (requires_grad, volatile, hooks) of 0.2 and 0.3"""
        data: torch.Tensor | None = None
        match state:
            case (torch.Tensor() as data, _, _, bool(grad), _) if type(data) is torch.Tensor:
                pass
            case (bool(grad), _, _):
                pass
            case _:
                raise PickleError(
                    "a BUILD of a parameter with other state than torch's",
                    found=type(state).__name__,
                )
        with refusing("a parameter"):
            if data is not None:
                target.data = data
            target.requires_grad = grad

    # Tensors without a storage in the file.

    def meta(
        self, dtype: object, shape: tuple[int, ...], strides: tuple[int, ...], *, grad: bool
    ) -> torch.Tensor:
        with refusing("a tensor of the meta device"):
            return torch.empty_strided(
                shape, strides, dtype=self.dtype(dtype), device="meta", requires_grad=grad
            )

    def elsewhere(self, data: object, dtype: object, device: object, *, grad: bool) -> torch.Tensor:
        import numpy as np

        where = located_by_caller(device)
        if not isinstance(data, np.ndarray) and not (
            isinstance(data, torch.Tensor) and data.layout is torch.strided
        ):
            raise PickleError(
                "a device tensor of something that is no plain tensor or array",
                found=type(data).__name__,
            )
        self._storages.fill()
        try:
            plain = torch.from_numpy(data) if isinstance(data, np.ndarray) else data
            made = plain.to(dtype=self.dtype(dtype), device=where)
            made.requires_grad = grad
        except TORCH_SAYS_NO as error:
            raise Refused(f"a tensor cannot be put on the device {where}: {error}") from error
        return made

    def composite(self, kind: str, whole: Apart, *, grad: bool = False) -> torch.Tensor:
        inspected = [
            self.inspected(part, name)
            for name, part in whole.parts.items()
            if type(part) is not Elements
        ]
        CHECKS[kind].check(whole)
        if inspected:
            self._storages.fill()
        with refusing(CHECKS[kind].title):
            made = KINDS[kind].put_together(whole)
            if grad:
                made.requires_grad = True
        return made

    def inspected(self, value: object, what: str) -> torch.Tensor:
        """Check that a value is a plain tensor, and that its elements may still be read."""
        if not isinstance(value, torch.Tensor) or not (type(value) is torch.Tensor or self.fake):
            raise PickleError(
                f"the {what} of a tensor must be a plain tensor", found=type(value).__name__
            )
        if value.layout is not torch.strided or value.is_nested or value.is_quantized:
            raise PickleError(
                f"the {what} of a tensor must be a plain tensor", found=str(value.layout)
            )
        limits, nbytes = self._table.limits, value.numel() * value.element_size()
        if nbytes > max(
            limits.expansion_floor_nbytes, limits.expansion * value.untyped_storage().nbytes()
        ):
            raise LimitExceeded(
                f"the {what} of a tensor repeat one number {value.numel():,} times (Limits.expansion)",
                found=nbytes,
            )
        self._inspected += nbytes
        if self._inspected > INSPECTED_NBYTES:
            raise LimitExceeded(
                "the same numbers are used as indices over and over; no writer does that",
                found=self._inspected,
            )
        return value

    def check_jagged(self, made: object) -> None:
        """Refuse a jagged tensor whose state, or the code of its class, has left it with rows outside of its values."""
        if isinstance(made, NestedTensor):
            values, offsets = (
                self.inspected(getattr(made, "_values", None), "values"),
                getattr(made, "_offsets", None),
            )
            lengths = getattr(made, "_lengths", None)
            known = None if lengths is None else self.inspected(lengths, "lengths")
            self._storages.fill()
            check_rows(
                values,
                self.inspected(offsets, "offsets"),
                known,
                axis=getattr(made, "_ragged_idx", None),
            )

    def wrapper(
        self, args: Args, shape: tuple[int, ...], strides: tuple[int, ...], *, offset: int
    ) -> torch.Tensor:
        kind, dtype, _, _, _, layout, device, grad = args
        if not self._table.is_allowed(kind):
            raise PickleError(f"a wrapper of a class that is not allowed: {label(kind)}")
        if not isinstance(kind, type) or not issubclass(kind, torch.Tensor):
            raise PickleError("a wrapper of a class that is no tensor", found=type(kind).__name__)
        if type(layout) is not torch.layout:
            raise PickleError("a wrapper without a layout", found=type(layout).__name__)
        wanted, where = flag(grad, "requires_grad"), located_by_caller(device)
        like: dict[str, Any] = {
            "layout": layout,
            "dtype": self.dtype(dtype),
            "device": torch.device(where),
        }
        with refusing(f"a wrapper of {kind.__name__}"):
            return torch.Tensor._make_wrapper_subclass(
                kind, shape, strides=strides, storage_offset=offset, requires_grad=wanted, **like
            )

    def check_class(self, function: object, kind: object) -> None:
        if (
            not isinstance(kind, type)
            or not issubclass(kind, torch.Tensor)
            or not (_is_own(kind) or self._table.is_allowed(kind))
        ):
            raise PickleError(
                f"_rebuild_from_type_v2 for a class that is no allowed tensor: {label(kind)}"
            )

    def as_class(self, made: object, kind: object, state: object) -> torch.Tensor:
        if not isinstance(made, torch.Tensor) or not isinstance(kind, type):
            raise PickleError(
                "_rebuild_from_type_v2 of something that is no tensor", found=type(made).__name__
            )
        own = _is_own(kind)
        if not own:
            self._storages.fill()
        if type(made) is not kind and not (own and self.fake):
            with refusing(f"a tensor as {kind.__name__}"):
                made = made.as_subclass(kind)
        if type(made).__setstate__ is not torch.Tensor.__setstate__:
            made.__setstate__(state)
        else:
            assign(made, state, self._table.spending)
        self.check_jagged(made)
        return made


def _is_own(kind: type) -> bool:
    return kind in (torch.Tensor, torch.nn.Parameter)
