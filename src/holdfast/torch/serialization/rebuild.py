"""The calls of torch's pickles that build plain tensors and parameters: their arguments checked, then two torch calls.

1. A tensor is an empty one of the storage's dtype and device, set to view the storage. Sizes, strides and offset are compared
   with the storage before (`formats/torch/tensors.py`), because `set_` enlarges one that is too small, with what was in memory.
2. Nothing here looks at an element, so storages may still be empty: they are filled together when the whole pickle is read.
3. What torch itself refuses (a gradient for integers, an unknown device) becomes a `MetadataError` that says it in torch's words.

Backward hooks are never written to a file, and never taken from one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch.storage import TypedStorage, UntypedStorage

from holdfast.core.limits import DEFAULTS, Limits
from holdfast.errors import HoldfastError, MetadataError, PickleError, Refused, Unsupported
from holdfast.formats.pickle.spending import Spending
from holdfast.formats.torch.tensors import Args, arity, beyond, brief, checked_ints, reach
from holdfast.torch.serialization.storages import QUANTIZED, LoadedStorages
from holdfast.torch.versions import is_faking, local

TORCH_SAYS_NO = (RuntimeError, ValueError, TypeError, IndexError, OverflowError, AssertionError)
"""What torch's functions raise for arguments that they do not like."""

OWN = frozenset(name for kind in torch.Tensor.__mro__ for name, what in vars(kind).items() if hasattr(type(what), "__set__"))
"""Names of a tensor that are more than an entry in its `__dict__`."""

Make = tuple[Callable[[], torch.Tensor], int]
"""What makes an empty tensor of one dtype and device, and the bytes of an element."""


class RefusedTensor(MetadataError, Refused):
    """A tensor whose description torch itself does not take; a RuntimeError as well, which is what torch raises."""


def no(what: str, error: Exception) -> HoldfastError:
    """The error for something that torch refused to build."""
    said = str(error).partition("\n")[0]
    if isinstance(error, NotImplementedError):
        return Unsupported(f"torch cannot build {what} here: {said}")
    return RefusedTensor(f"torch refuses {what}: {said}")


def flag(value: object, what: str) -> bool:
    """A bool, and nothing that only counts as one."""
    if type(value) is not bool:
        raise PickleError(f"{what} must be true or false", found=type(value).__name__)
    return value


def located_by_caller(device: object) -> torch.device | str:
    """Where a tensor goes that has no storage of its own: the caller's `map_location` decides.

    torch 2.13 looks for the device and not for its name in a dict, so that a wrapper stays behind when its parts move.
    """
    if not isinstance(device, str | torch.device):
        raise PickleError("a device was expected", found=type(device).__name__)
    wanted: object = getattr(local, "map_location", None)
    if wanted is None:
        return device
    if isinstance(wanted, dict):
        wanted = wanted.get(str(device), device)
    if isinstance(wanted, str | torch.device):
        return wanted
    raise Refused("Callable map_location not supported with _rebuild_wrapper_subclass or _rebuild_device_tensor_from_numpy")


def assign(target: torch.Tensor, state: object, spending: Spending) -> None:
    """Set attributes of a tensor from a dict, or from a pair of dicts (the second for slots), as `copyreg` makes them.

    A name under which torch keeps something of its own (`data`, `requires_grad`, `__class__`) cannot come out of a tensor's
    `__dict__`, so a file that has one was not written by torch.
    """
    parts = state if isinstance(state, tuple) and len(state) == 2 else (state,)
    for part in parts:
        if part is None:
            continue
        if not isinstance(part, dict):
            raise PickleError("the attributes of a tensor must be a dict", found=type(part).__name__)
        spending.copy(len(part))
        for name, value in part.items():
            if type(name) is not str or _is_torchs(type(target), name):
                raise PickleError("a tensor with an attribute that it cannot have had", found=brief(name))
            setattr(target, name, value)


def _is_torchs(kind: type, name: str) -> bool:
    """Whether setting an attribute would do something to the tensor itself; a subclass may have made the name its own."""
    return name in OWN and next(each for each in kind.__mro__ if name in vars(each)) in torch.Tensor.__mro__


class PlainTensors:
    """Rows for tensors that are a view of one storage, for parameters, and for tensors without any storage."""

    def __init__(self, storages: LoadedStorages) -> None:
        self.storages = storages
        self.limits = DEFAULTS
        self.spending = Spending(self.limits, 0)
        self._fake: bool | None = None
        self._makes: dict[torch.dtype, dict[torch.device, Make]] = {}
        self._blank: dict[int, torch.Tensor] = {}
        """Tensors that a call announced and BUILD has not filled yet, by identity."""

    def begin(self, limits: Limits, spending: Spending) -> None:
        """Get ready for a stream."""
        self.limits = limits
        self.spending = spending
        self._fake = None
        self._makes.clear()
        self._blank.clear()

    @property
    def fake(self) -> bool:
        """Whether a FakeTensorMode is active: tensors pretend to be on the device that their storage names."""
        if self._fake is None:
            self._fake = is_faking()
        return self._fake

    # Views of a storage.

    def view(self, untyped: UntypedStorage, dtype: torch.dtype, offset: object, size: object, stride: object) -> torch.Tensor:
        """The tensor that views a storage; offset and strides are counted in elements."""
        shape, steps, begin, last = reach(offset, size, stride, self.limits)
        try:
            make, width = self._makes[dtype][untyped.device]
        except KeyError:
            make, width = self._make(dtype, untyped)
        room = untyped.nbytes()
        if (last + 1) * width > room:
            raise beyond(last, room // width)
        try:
            return make().set_(untyped, begin, shape, steps)
        except TORCH_SAYS_NO as error:
            raise no("a tensor over its storage", error) from error

    def _make(self, dtype: torch.dtype, untyped: UntypedStorage) -> Make:
        """How an empty tensor for such a storage is made. Another tensor's `new` takes half the time of `torch.empty`."""
        if dtype in QUANTIZED:
            raise MetadataError(f"a tensor of {dtype} without a scale", found=str(dtype))
        if self.fake:
            device = getattr(untyped, "_fake_device", None) or untyped.device
            return partial(torch.empty, 0, dtype=dtype, device=device), dtype.itemsize
        model = torch.empty(0, dtype=dtype, device=untyped.device)
        made: Make = (model.new, dtype.itemsize)
        self._makes.setdefault(dtype, {})[untyped.device] = made
        return made

    def tensor(self, args: Args) -> torch.Tensor:
        """(storage, offset, size, stride): torch before 0.4"""
        storage, offset, size, stride = arity(args, 4, 4, "_rebuild_tensor")
        return self.view(storage_of(storage), dtype_of(storage), offset, size, stride)

    def tensor_v2(self, args: Args) -> torch.Tensor:
        """(storage, offset, size, stride, requires_grad, hooks[, flags])"""
        if not 6 <= len(args) <= 7:
            arity(args, 6, 7, "_rebuild_tensor_v2")
        storage = args[0]
        if type(storage) is not TypedStorage:
            raise PickleError("a tensor over something that is no storage", found=type(storage).__name__)
        made = self.view(storage._untyped_storage, storage.dtype, args[1], args[2], args[3])
        if args[4] is not False or len(args) == 7:
            self._finish(made, args[4], args[6] if len(args) == 7 else None)
        return made

    def tensor_v3(self, args: Args) -> torch.Tensor:
        """(storage, offset, size, stride, requires_grad, hooks, dtype[, flags]): types that torch stores as bytes"""
        storage, offset, size, stride, grad, _, dtype = arity(args, 7, 8, "_rebuild_tensor_v3")[:7]
        made = self.view(storage_of(storage), checked_dtype(dtype), offset, size, stride)
        self._finish(made, grad, args[7] if len(args) == 8 else None)
        return made

    def _finish(self, made: torch.Tensor, grad: object, flags: object) -> None:
        """`requires_grad`, and the bits by which a conjugate or a negative is a view."""
        if flags is not None:
            if not isinstance(flags, dict):
                raise PickleError("a tensor's flags must be a dict", found=type(flags).__name__)
            if flags.get("conj") is True:
                if not made.is_complex():
                    raise MetadataError("a conjugate of numbers that are not complex", found=str(made.dtype))
                torch._C._set_conj(made, True)
            if flags.get("neg") is True:
                if not (made.is_complex() or made.is_floating_point()):
                    raise MetadataError("a negative view of numbers that have none", found=str(made.dtype))
                torch._C._set_neg(made, True)
        if flag(grad, "requires_grad"):
            try:
                made.requires_grad = True
            except TORCH_SAYS_NO as error:
                raise no("the gradient of a tensor", error) from error

    # Tensors made empty and filled by BUILD, as torch 0.1 did.

    def blank(self, kind: type, args: Args) -> torch.Tensor:
        """`torch.FloatTensor()` and its like. With a size they would give back memory as it was found: refused."""
        if args:
            raise MetadataError("a tensor class called with a size or with data; torch writes it without", found=len(args))
        dtype = getattr(kind, "dtype", None)
        made = torch.empty(0, dtype=dtype if isinstance(dtype, torch.dtype) else torch.get_default_dtype(), device="cpu")
        self._blank[id(made)] = made
        return made

    def fill_blank(self, target: torch.Tensor, state: object) -> None:
        """(storage, offset, size, stride)"""
        if self._blank.pop(id(target), None) is None:
            raise PickleError("a BUILD of a tensor that is complete")
        if not isinstance(state, tuple) or len(state) != 4:
            raise PickleError("a BUILD of a tensor with other state than torch's", found=type(state).__name__)
        if dtype_of(state[0]) is not target.dtype:
            raise MetadataError(f"a storage of {dtype_of(state[0])} for a tensor of {target.dtype}")
        made = self.tensor(state)
        try:
            if made.device == target.device:
                target.set_(made.untyped_storage(), made.storage_offset(), made.size(), made.stride())
            else:
                target.data = made
        except TORCH_SAYS_NO as error:
            raise no("a tensor over its storage", error) from error

    # Parameters.

    def parameter(self, args: Args) -> torch.Tensor:
        """(data, requires_grad, hooks)"""
        data, grad = arity(args, 2, 3, "_rebuild_parameter")[:2]
        return self._parameter(data, grad)

    def parameter_with_state(self, args: Args) -> torch.Tensor:
        """(data, requires_grad, hooks, attributes)"""
        data, grad, _, state = arity(args, 4, 4, "_rebuild_parameter_with_state")
        made = self._parameter(data, grad)
        assign(made, state, self.spending)
        return made

    def parameter_class(self, args: Args) -> torch.Tensor:
        """`Parameter([data[, requires_grad]])`; without data it comes with BUILD."""
        arity(args, 0, 2, "Parameter")
        data = args[0] if args else torch.empty(0, device="cpu")
        return self._parameter(data, args[1] if len(args) > 1 else True)

    def _parameter(self, data: object, grad: object) -> torch.Tensor:
        if not isinstance(data, torch.Tensor):
            raise PickleError("a parameter of something that is no tensor", found=type(data).__name__)
        wanted = flag(grad, "requires_grad")
        if type(data) is not torch.Tensor and not self.fake:
            # A subclass: making it a parameter runs its code, whose errors are its own.
            self.storages.fill()
            return torch.nn.Parameter(data, wanted)
        try:
            return torch.nn.Parameter(data, wanted)
        except TORCH_SAYS_NO as error:
            raise no("a parameter", error) from error

    def fill_parameter(self, target: torch.nn.Parameter, state: object) -> None:
        """(data, creator, hooks, requires_grad, volatile) of torch 0.1, or (requires_grad, volatile, hooks) of 0.2 and 0.3"""
        data: torch.Tensor | None = None
        match state:
            case (torch.Tensor() as data, _, _, bool(grad), _) if type(data) is torch.Tensor:
                pass
            case (bool(grad), _, _):
                pass
            case _:
                raise PickleError("a BUILD of a parameter with other state than torch's", found=type(state).__name__)
        try:
            if data is not None:
                target.data = data
            target.requires_grad = grad
        except TORCH_SAYS_NO as error:
            raise no("a parameter", error) from error

    # Tensors without a storage in the file.

    def meta(self, args: Args) -> torch.Tensor:
        """(dtype, size, stride, requires_grad): a tensor of the meta device"""
        dtype, size, stride, grad = arity(args, 4, 4, "_rebuild_meta_tensor_no_storage")
        shape, steps, _, _ = reach(0, size, stride, self.limits)
        wanted = flag(grad, "requires_grad")
        try:
            return torch.empty_strided(shape, steps, dtype=checked_dtype(dtype), device="meta", requires_grad=wanted)
        except TORCH_SAYS_NO as error:
            raise no("a tensor of the meta device", error) from error

    def device_tensor(self, args: Args) -> torch.Tensor:
        """(CPU tensor or array, dtype, device, requires_grad): a tensor of a device that has no storages"""
        import numpy as np

        data, dtype, device, grad = arity(args, 4, 4, "_rebuild_device_tensor")
        wanted, where = flag(grad, "requires_grad"), located_by_caller(device)
        if not isinstance(data, np.ndarray) and not (isinstance(data, torch.Tensor) and data.layout is torch.strided):
            raise PickleError("a device tensor of something that is no plain tensor or array", found=type(data).__name__)
        self.storages.fill()
        try:
            plain = torch.from_numpy(data) if isinstance(data, np.ndarray) else data
            made = plain.to(dtype=checked_dtype(dtype), device=where)
            made.requires_grad = wanted
        except TORCH_SAYS_NO as error:
            raise Refused(f"a tensor cannot be put on the device {where}: {error}") from error
        return made

    def size(self, args: Args) -> torch.Size:
        (values,) = arity(args, 1, 1, "torch.Size")
        sizes = checked_ints(values, "size")
        self.spending.copy(len(sizes))
        return torch.Size(sizes)


def storage_of(value: object) -> UntypedStorage:
    """The bytes under a storage of the stream."""
    if not isinstance(value, TypedStorage):
        raise PickleError("a tensor over something that is no storage", found=type(value).__name__)
    return value._untyped_storage


def dtype_of(value: object) -> torch.dtype:
    """The dtype of a storage of the stream."""
    if not isinstance(value, TypedStorage):
        raise PickleError("a tensor over something that is no storage", found=type(value).__name__)
    return value.dtype


def checked_dtype(value: object) -> torch.dtype:
    if not isinstance(value, torch.dtype):
        raise PickleError("a dtype was expected", found=type(value).__name__)
    return value
