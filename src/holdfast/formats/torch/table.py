"""`TorchTable`: torch's pickles as inert data. Its `LazyBuilder` makes lazy tensors, composites and small records of our own.

Exact `(module, name)` pairs have a reducer (reducers.py); everything else stays `Opaque`. A storage is a 1-D `LazyTensor`
(storages.py), and a tensor is a strided view of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from msgspec import Struct

from holdfast.core.dtype import DType
from holdfast.core.opaque import Device, Global, Opaque, Size
from holdfast.core.protocols import Source
from holdfast.core.tensor import PLAIN_TRAITS, Composite, LazyTensor, Traits
from holdfast.core.value import replace
from holdfast.errors import PickleError
from holdfast.formats.pickle.table import Args, Name, Pending
from holdfast.formats.torch.composites import KINDS, Apart
from holdfast.formats.torch.reducers import BuildingTable, Claim
from holdfast.formats.torch.tensors import strided_view, view_traits

OWN_CLASSES = (Global("torch", "Tensor"), Global("torch._tensor", "Tensor"))


class LazyBuilder(Struct, eq=False):
    """Makes lazy tensors and small records. What torch never writes is a record, where an honest file may have it."""

    storage_class: ClassVar = LazyTensor
    tensor_class: ClassVar = LazyTensor
    fewest: ClassVar = 4

    source: Source

    def unbuilt(self, what: Name, args: Args, why: str) -> object:
        return Opaque(Global(*what), args)

    def dtype(self, value: object) -> DType:
        if not isinstance(value, DType):
            raise PickleError("a dtype was expected", found=type(value).__name__)
        return value

    def named(self, value: object) -> str | None:
        return value.name if isinstance(value, Global) and value.module == "torch" else None

    def layout(self, name: str) -> Global:
        return Global("torch", name)

    def device(self, kind: str, index: int | None) -> Device:
        return Device(kind, index)

    def size(self, lengths: tuple[int, ...]) -> Size:
        return Size(lengths)

    def view(
        self,
        storage: object,
        dtype: object,
        claim: Claim,
        *,
        grad: bool = False,
        conj: bool = False,
        neg: bool = False,
    ) -> LazyTensor:
        # The reducers have seen that it is a storage, and where there is a dtype, that it is one.
        of: DType | None = dtype  # type: ignore[assignment]
        traits = view_traits(grad, conj, neg)
        return strided_view(storage, of, claim, traits)  # type: ignore[arg-type]

    def elements(self, storage: object, claim: Claim) -> LazyTensor:
        return self.view(storage, None, claim)

    def parameter(self, data: object, grad: bool, state: object) -> object:
        if not isinstance(data, LazyTensor | Composite):
            return NotImplemented
        return replace(
            data, traits=replace(data.traits, parameter=True, requires_grad=grad, state=state)
        )

    def blank(self, name: str) -> Pending:
        modules = {"Parameter": "torch.nn.parameter", "Variable": "torch.autograd.variable"}
        return Blank(Global(modules.get(name, "torch"), name))

    def meta(
        self, dtype: object, shape: tuple[int, ...], strides: tuple[int, ...], *, grad: bool
    ) -> LazyTensor:
        return LazyTensor(
            "", self.dtype(dtype), shape, (), self.source, Traits(requires_grad=grad, meta=True)
        )

    def elsewhere(self, data: object, dtype: object, device: object, *, grad: bool) -> object:
        return (
            replace(data, traits=replace(data.traits, requires_grad=grad))
            if isinstance(data, LazyTensor)
            else data
        )

    def composite(self, kind: str, whole: Apart, *, grad: bool = False) -> Composite:
        KINDS[kind].check(whole)
        return Composite(kind, *whole, Traits(requires_grad=grad))

    def wrapper(
        self, args: Args, shape: tuple[int, ...], strides: tuple[int, ...], *, offset: int
    ) -> Opaque:
        self.check_class(args[0], args[0])
        return Opaque(args[0], args)

    def check_class(self, function: object, kind: object) -> None:
        if not isinstance(function, Global) or not isinstance(kind, Global):
            raise PickleError(
                "_rebuild_from_type_v2 needs a function and a class", found=type(function).__name__
            )

    def as_class(self, made: object, kind: object, state: object) -> object:
        if type(made) is Opaque and made.what == kind and made.state is None:
            made.state = state
            return made
        if not isinstance(made, LazyTensor) or not isinstance(kind, Global):
            return made if isinstance(made, Composite) else Opaque(kind, (made,), state=state)
        attributes = state[0] if isinstance(state, tuple) and len(state) == 2 else state
        by_name = attributes if isinstance(attributes, dict) else {}
        parameter, buffer = (
            made.traits.parameter or by_name.get("_is_param") is True,
            by_name.get("_is_buffer") is True,
        )
        subclass = None if kind in OWN_CLASSES else kind
        return replace(
            made,
            traits=replace(
                made.traits, subclass=subclass, state=state, buffer=buffer, parameter=parameter
            ),
        )


class Blank(Pending):
    """A tensor, Variable or Parameter made empty and filled by BUILD, as torch 0.1 did."""

    def finish(self, state: object) -> object:
        match state:
            case (LazyTensor() as storage, offset, size, stride) if self.name.endswith("Tensor"):
                return strided_view(storage, None, (offset, size, stride), PLAIN_TRAITS)
            # The tensor, its creator, hooks, requires_grad, volatile.
            case (LazyTensor() as data, _, _, bool(grad), bool()) if not self.name.endswith(
                "Tensor"
            ):
                return replace(
                    data,
                    traits=replace(
                        data.traits, parameter=self.name == "Parameter", requires_grad=grad
                    ),
                )
        self.state = state
        return self


class TorchTable(BuildingTable):
    """Plain Python and numpy values, plus torch's. `persistent` is given by the container."""

    def __init__(self, source: Source, persistent: Callable[[object], object]) -> None:
        self.builder = LazyBuilder(source)
        super().__init__()
        self.persistent = persistent  # type: ignore[assignment]  # the method of another object

    def build(self, obj: object, state: object) -> object:
        """As in any table; a tensor also gets its `requires_grad`, which torch 0.2 and 0.3 wrote by BUILD."""
        if not isinstance(obj, LazyTensor):
            return super().build(obj, state)
        match state:
            case (bool(grad), _, _):
                return replace(obj, traits=replace(obj.traits, requires_grad=grad))
        raise PickleError(
            "a BUILD of a tensor with other state than torch's", found=type(state).__name__
        )
