"""The globals of torch's pickles, as constructors of our own values.

Exact `(module, name)` pairs; everything else stays `Opaque`. A storage is a 1-D `LazyTensor` (storages.py), and a tensor is a
strided view of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial

from holdfast.core.dtype import DTYPES, DType
from holdfast.core.opaque import Device, Global, Opaque, Size
from holdfast.core.protocols import Source
from holdfast.core.runtime import weakly
from holdfast.core.tensor import Composite, LazyTensor, Traits
from holdfast.core.value import replace
from holdfast.errors import PickleError
from holdfast.formats.pickle.plain import PlainTable, plain_values
from holdfast.formats.pickle.table import Name, Pending
from holdfast.formats.pickle.tensor_templates import TensorArguments
from holdfast.formats.torch.storages import ArchiveStorages, RecordKind
from holdfast.formats.torch.tensors import (
    QSCHEMES,
    arity,
    brief,
    checked_ints,
    checked_shape,
    jagged,
    nested,
    quantized,
    sparse,
    strided_view,
    view_traits,
)

Args = tuple[object, ...]

FROM_TYPE = Global("torch._tensor", "_rebuild_from_type_v2")

REBUILD = Global("torch._utils", "_rebuild_tensor_v2")
HOOKS = Global("collections", "OrderedDict")

LAYOUTS = ("strided", "sparse_coo", "sparse_csr", "sparse_csc", "sparse_bsr", "sparse_bsc", "jagged", "_mkldnn")
GRAPH_MODULES = ("reduce_graph_module", "reduce_package_graph_module", "reduce_deploy_graph_module")
"""How `torch.fx` pickles a GraphModule: a call with its `__dict__`, where other modules have NEWOBJ and BUILD."""

TENSOR_CLASSES = tuple(
    f"{kind}Tensor" for kind in ("BFloat16", "Bool", "Byte", "Char", "Double", "Float", "Half", "Int", "Long", "Short")
)


@cache
def _values() -> Mapping[Name, object]:
    """Globals that are only ever mentioned: those of Python, of numpy and of torch."""
    return {**plain_values(), **VALUES}


class TorchTable(PlainTable):
    """Plain Python and numpy values, plus torch's. `persistent` is given by the container."""

    def __init__(self, source: Source, persistent: Callable[[object], object], storages: ArchiveStorages | None = None) -> None:
        """`storages` makes ordinary tensors, where it can."""
        super().__init__()
        self._storages = storages
        self.values = _values()
        self.calls.update(CALLS)
        self.calls["torch._tensor", "_rebuild_from_type_v2"] = weakly(self._from_type)
        for module in ("torch._tensor", "torch.tensor"):
            # torch 1.7 to 1.10 called it so, with the attributes as a plain dict; the module was renamed in 1.9.
            self.calls[module, "_rebuild_from_type"] = weakly(self._from_type)
        self.calls["torch._utils", "_rebuild_meta_tensor_no_storage"] = weakly(self._meta)
        for name in GRAPH_MODULES:
            self.calls["torch.fx.graph_module", name] = partial(weakly(self.graph_module), Global("torch.fx.graph_module", name))
        self.news.update(NEWS)
        self.calls["torch", "Size"] = self.news["torch", "Size"] = weakly(self._size)
        self._source = source
        self._persistent = persistent

    def find(self, module: str, name: str) -> object:
        found = super().find(module, name)
        if self._storages is not None and found == REBUILD:
            self.opener = found
        return found

    def kind(self, claim: TensorArguments) -> RecordKind | None:
        return None if self._storages is None or claim.hooks != HOOKS else self._storages.kind(claim)

    def tensors(self, makers: Sequence[object], keys: Sequence[str]) -> Sequence[object]:
        # What makes them is what `kind` gave.
        return () if self._storages is None else self._storages.tensors(makers, keys)  # type: ignore[arg-type]

    def persistent(self, pid: object) -> object:
        return self._persistent(pid)

    def build(self, obj: object, state: object) -> object:
        """As any table; and a tensor may be told whether it requires a gradient, which torch 0.2 and 0.3 did by BUILD."""
        if isinstance(obj, LazyTensor):
            return _with_state(obj, state)
        return super().build(obj, state)

    def _meta(self, args: Args) -> object:
        """(dtype, size, stride, requires_grad)"""
        dtype, size, stride, grad = arity(args, 4, 4, "_rebuild_meta_tensor_no_storage")
        shape = checked_shape(size, self._source.limits)
        checked_ints(stride, "stride", len(shape))
        return LazyTensor("", _dtype(dtype), shape, (), self._source, Traits(requires_grad=bool(grad), meta=True))

    def _size(self, args: Args) -> object:
        """(lengths); paid for, because one long tuple may be named in a million calls."""
        if len(args) == 1 and isinstance(args[0], tuple | list):
            self.spending.copy(len(args[0]))
        return _size(args)

    def graph_module(self, what: Global, args: Args) -> object:
        """(attributes, source text, …): a `torch.fx.GraphModule`, kept like any module and never compiled."""
        self._used(what, "call")
        state = args[0] if args and isinstance(args[0], dict) else None
        return Opaque(what, args if state is None else args[1:], state=state)

    def _from_type(self, args: Args) -> object:
        """(function, type, arguments, state): a tensor with attributes, or one of a subclass."""
        function, kind, inner, state = arity(args, 4, 4, "_rebuild_from_type_v2")
        if not isinstance(inner, tuple):
            raise PickleError("_rebuild_from_type_v2 needs a tuple of arguments", found=type(inner).__name__)
        if not isinstance(function, Global) or not isinstance(kind, Global):
            raise PickleError("_rebuild_from_type_v2 needs a function and a class", found=brief(function))
        if function == FROM_TYPE:
            # Our own call below would recurse as deep as the file wants.
            raise PickleError("_rebuild_from_type_v2 of itself; torch never writes that")
        if function == Global("torch._utils", "_rebuild_wrapper_subclass"):
            return Opaque(kind, inner, state=state)
        value = self.call(function, inner)
        if not isinstance(value, LazyTensor):
            return value if isinstance(value, Composite) else Opaque(kind, (value,), state=state)
        known = {("torch", "Tensor"), ("torch._tensor", "Tensor")}
        attributes = state[0] if isinstance(state, tuple) and len(state) == 2 else state
        flags = attributes if isinstance(attributes, dict) else {}
        return replace(
            value,
            traits=replace(
                value.traits,
                subclass=None if (kind.module, kind.name) in known else kind,
                state=state,
                buffer=flags.get("_is_buffer") is True,
                parameter=value.traits.parameter or flags.get("_is_param") is True,
            ),
        )


def _dtype(value: object) -> DType:
    if not isinstance(value, DType):
        raise PickleError("a dtype was expected", found=type(value).__name__)
    return value


def _flags(metadata: object) -> tuple[bool, bool]:
    if metadata is None:
        return False, False
    if not isinstance(metadata, dict):
        raise PickleError("a tensor's flags must be a dict", found=type(metadata).__name__)
    return metadata.get("conj") is True, metadata.get("neg") is True


def _tensor_v2(args: Args) -> object:
    """(storage, offset, size, stride, requires_grad, hooks[, flags]); files of torch 0.3 stop after the stride."""
    storage, offset, size, stride = arity(args, 4, 7, "_rebuild_tensor_v2")[:4]
    if not isinstance(storage, LazyTensor):
        # `pickle.dump(tensor)` without torch.save nests a whole stream in bytes; it is kept as what it is.
        return Opaque(Global("torch._utils", "_rebuild_tensor_v2"), args)
    grad = args[4] if len(args) > 4 else False
    conj, neg = _flags(args[6] if len(args) > 6 else None)
    return strided_view(storage, storage.dtype, offset, size=size, stride=stride, traits=view_traits(grad is True, conj, neg))


def _tensor_v3(args: Args) -> object:
    """(storage, offset, size, stride, requires_grad, hooks, dtype[, flags]): types that torch stores as bytes."""
    storage, offset, size, stride, grad, _, dtype = arity(args, 7, 8, "_rebuild_tensor_v3")[:7]
    if not isinstance(storage, LazyTensor):
        return Opaque(Global("torch._utils", "_rebuild_tensor_v3"), args)
    conj, neg = _flags(args[7] if len(args) > 7 else None)
    return strided_view(storage, _dtype(dtype), offset, size=size, stride=stride, traits=view_traits(grad is True, conj, neg))


def _parameter(args: Args) -> object:
    """([tensor, requires_grad, hooks, state]); without arguments the tensor comes with BUILD, as in torch 0.1."""
    if not args:
        return LegacyVariable(Global("torch.nn.parameter", "Parameter"))
    arity(args, 1, 4, "_rebuild_parameter")
    data, grad, state = args[0], args[1] if len(args) > 1 else True, args[3] if len(args) > 3 else None
    if isinstance(data, LazyTensor | Composite):
        traits = replace(data.traits, parameter=True, requires_grad=grad is True, state=state)
        return replace(data, traits=traits)
    return Opaque(Global("torch._utils", "_rebuild_parameter"), args)


def _variable(args: Args) -> object:
    """`Variable(tensor)` of torch before 0.4 is the tensor; without arguments it comes with BUILD."""
    if not args:
        return LegacyVariable(Global("torch.autograd.variable", "Variable"))
    return args[0] if isinstance(args[0], LazyTensor) else NotImplemented


def _with_state(tensor: LazyTensor, state: object) -> LazyTensor:
    """(requires_grad, volatile, hooks): what torch 0.2 and 0.3 gave to a Variable or Parameter after making it."""
    if not isinstance(state, tuple) or len(state) != 3 or not isinstance(state[0], bool):
        raise PickleError("a BUILD of a tensor with other state than torch's", found=type(state).__name__)
    return replace(tensor, traits=replace(tensor.traits, requires_grad=state[0]))


def _device_tensor(args: Args) -> object:
    """(data, dtype, device, requires_grad): a tensor of a device without storages, saved as a CPU tensor or an array."""
    data, _, _, grad = arity(args, 4, 4, "_rebuild_device_tensor")
    return replace(data, traits=replace(data.traits, requires_grad=grad is True)) if isinstance(data, LazyTensor) else data


def _size(args: Args) -> object:
    (values,) = arity(args, 1, 1, "torch.Size")
    return Size(checked_ints(values, "size"))


def _device(args: Args) -> object:
    kind = arity(args, 1, 2, "torch.device")[0]
    index = args[1] if len(args) > 1 else None
    if not isinstance(kind, str) or (index is not None and type(index) is not int):
        raise PickleError("a device is a name and a number", found=type(kind).__name__)
    return Device(kind, index if isinstance(index, int) else None)


def _layout(args: Args) -> object:
    (name,) = arity(args, 1, 1, "_get_layout")
    if not isinstance(name, str) or name.removeprefix("torch.") not in LAYOUTS:
        raise PickleError("an unknown layout", found=brief(name))
    return Global("torch", name.removeprefix("torch."))


def _first(args: Args) -> object:
    """TorchScript tags typed lists and dicts with a call that gives back its first argument."""
    if not args:
        raise PickleError("a TorchScript type tag without a value")
    return args[0]


class LegacyTensor(Pending):
    """`torch.FloatTensor` made empty and filled by BUILD with (storage, offset, size, stride)."""

    def finish(self, state: object) -> object:
        if isinstance(state, tuple) and 4 <= len(state) <= 7:
            return _tensor_v2(state)
        self.state = state
        return self


class LegacyVariable(Pending):
    """A Variable or Parameter made empty and filled by BUILD with (tensor, creator, hooks, requires_grad, volatile)."""

    def finish(self, state: object) -> object:
        match state:
            case (LazyTensor() as data, _, _, bool(grad), bool()):
                parameter = self.name == "Parameter"
                return replace(data, traits=replace(data.traits, parameter=parameter, requires_grad=grad))
        self.state = state
        return self


def _empty_tensor(name: str) -> Callable[[Args], object]:
    """A call without arguments waits for its BUILD; one with a size would allocate, and is kept as a record."""
    return lambda args: NotImplemented if args else LegacyTensor(Global("torch", name))


def _legacy_tensor(name: str) -> Callable[[Args], object]:
    def make(args: Args) -> object:
        # torch.FloatTensor(n) would allocate n elements of whatever was in memory: kept as a record instead.
        return LegacyTensor(Global("torch", name), args)

    return make


CALLS: dict[tuple[str, str], Callable[[Args], object]] = {
    ("torch._utils", "_rebuild_tensor"): _tensor_v2,
    ("torch._utils", "_rebuild_tensor_v2"): _tensor_v2,
    ("torch._utils", "_rebuild_tensor_v3"): _tensor_v3,
    ("torch._utils", "_rebuild_parameter"): _parameter,
    ("torch._utils", "_rebuild_parameter_with_state"): _parameter,
    ("torch.nn.parameter", "Parameter"): _parameter,
    ("torch.autograd.variable", "Variable"): _variable,
    **{("torch", name): _empty_tensor(name) for name in (*TENSOR_CLASSES, "Tensor")},
    ("torch._utils", "_rebuild_sparse_tensor"): sparse,
    ("torch._utils", "_rebuild_sparse_csr_tensor"): sparse,
    ("torch._utils", "_rebuild_qtensor"): quantized,
    ("torch._utils", "_rebuild_nested_tensor"): nested,
    ("torch.nested._internal.nested_tensor", "_rebuild_njt"): jagged,
    ("torch._utils", "_rebuild_device_tensor_from_cpu_tensor"): _device_tensor,
    ("torch._utils", "_rebuild_device_tensor_from_numpy"): _device_tensor,
    ("torch", "Size"): _size,
    ("torch", "device"): _device,
    ("torch.serialization", "_get_layout"): _layout,
    ("torch.jit._pickle", "build_intlist"): _first,
    ("torch.jit._pickle", "build_doublelist"): _first,
    ("torch.jit._pickle", "build_boollist"): _first,
    ("torch.jit._pickle", "build_tensorlist"): _first,
    ("torch.jit._pickle", "restore_type_tag"): _first,
}

NEWS: dict[tuple[str, str], Callable[[Args], object]] = {
    ("torch.nn.parameter", "Parameter"): _parameter,
    ("torch.autograd.variable", "Variable"): _variable,
    ("torch", "Size"): _size,
    **{("torch", name): _legacy_tensor(name) for name in (*TENSOR_CLASSES, "Tensor")},
    **{("torch.cuda", name): _legacy_tensor(name) for name in TENSOR_CLASSES},
}


def _known() -> dict[tuple[str, str], object]:
    """Globals that are values: dtypes; and classes, layouts and schemes, which stand for themselves."""
    values: dict[tuple[str, str], object] = {("torch", row.torch): row for row in DTYPES.rows if row.torch}
    names = [("torch", n) for n in (*LAYOUTS, *QSCHEMES, "Tensor", *TENSOR_CLASSES)]
    names += [("torch.cuda", n) for n in TENSOR_CLASSES]
    names += [(m, n) for m in ("torch.sparse", "torch.cuda.sparse") for n in TENSOR_CLASSES]
    names += [(m, row.storage) for m in ("torch", "torch.cuda") for row in DTYPES.rows if row.storage]
    storages = ("UntypedStorage", "_UntypedStorage", "TypedStorage")
    names += [(m, n) for m in ("torch", "torch.storage", "torch.cuda") for n in storages]
    names += [("torch.nested._internal.nested_tensor", "NestedTensor")]
    names += [("torch._tensor", "Tensor"), ("torch.nn.parameter", "Buffer"), ("torch._utils", "_rebuild_wrapper_subclass")]
    return {**values, **{(m, n): Global(m, n) for m, n in names}}


VALUES = _known()


def buildable() -> frozenset[tuple[str, str]]:
    """The globals that become values of ours. Not the graph modules, which torch makes by running their source text."""
    plain = PlainTable()
    methods = (("torch._tensor", "_rebuild_from_type_v2"), ("torch._utils", "_rebuild_meta_tensor_no_storage"))
    return frozenset({*plain.values, *plain.calls, *plain.news, *VALUES, *CALLS, *NEWS, *methods})
