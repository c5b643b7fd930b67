"""The calls of torch's pickles: the one place that knows the arguments of each, for both builders.

    pickle                                       a reducer, by its exact name              a builder
    _rebuild_tensor_v2(storage, 3, (2,), …)  →   how many? a bool? inside of 64 bits?  →   `view`: a lazy tensor, or torch's own

1. A reducer is a row of a table (`formats/pickle/table.py`). It checks how many arguments there are and of what form, with exact
   integers, and asks the `Builder` of its table for the result.
2. `LazyBuilder` (table.py) makes lazy tensors and records, and imports nothing. `TorchBuilder` (torch/serialization/rebuild.py)
   makes torch's objects for a `weights_only` load.
3. Tensors that are made of others have their reducers with their kinds (composites.py).

Backward hooks are never written to a file, and never taken from one.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import ClassVar, Protocol

from holdfast.core.dtype import DTYPES
from holdfast.core.opaque import Global, Opaque
from holdfast.errors import PickleError
from holdfast.formats.pickle.plain import PlainTable
from holdfast.formats.pickle.table import Args, Name, Row
from holdfast.formats.torch.composites import KINDS, NESTED, QSCHEMES, UTILS, Apart, CompositeKind
from holdfast.formats.torch.tensors import TENSOR_CLASSES, arity, brief, checked_ints, flag, reach

LAYOUTS = (
    "strided",
    "sparse_coo",
    "sparse_csr",
    "sparse_csc",
    "sparse_bsr",
    "sparse_bsc",
    "jagged",
    "_mkldnn",
)
GRAPH_MODULES = ("reduce_graph_module", "reduce_package_graph_module", "reduce_deploy_graph_module")
"""How `torch.fx` pickles a GraphModule: a call with its `__dict__`, where other modules have NEWOBJ and BUILD."""

NO_STORAGE = "a tensor over something that is no storage"

Claim = tuple[object, object, object]
"""The offset, size and stride of a tensor, in elements of its storage, as a pickle says them."""


class Builder(Protocol):
    """Makes the objects of one pickle. Arguments have the form that torch writes; the builder checks what they mean."""

    @property
    def storage_class(self) -> type:
        """The class of storages: what a persistent id becomes."""

    @property
    def tensor_class(self) -> type:
        """The class of every plain tensor that it makes."""

    @property
    def fewest(self) -> int:
        """Arguments of `_rebuild_tensor_v2` that are enough: 6 for torch, 4 (up to the stride) to describe what is there."""

    def unbuilt(self, what: Name, args: Args, why: str) -> object:
        """The result of a call whose arguments are no storage or tensor."""

    def dtype(self, value: object) -> object:
        """A dtype of the stream, if it is one."""

    def named(self, value: object) -> str | None:
        """The name of a layout or of a scheme of quantisation; None for anything else."""

    def layout(self, name: str) -> object: ...
    def device(self, kind: str, index: int | None) -> object: ...
    def size(self, lengths: tuple[int, ...]) -> object: ...

    def view(
        self,
        storage: object,
        dtype: object,
        claim: Claim,
        *,
        grad: bool = False,
        conj: bool = False,
        neg: bool = False,
    ) -> object:
        """A tensor that views a storage, as elements of a dtype; None: of the storage's own. Raises where it reaches outside."""

    def elements(self, storage: object, claim: Claim) -> object:
        """The integers of a quantised tensor, which have a shape and mean nothing yet."""

    def composite(self, kind: str, whole: Apart, *, grad: bool = False) -> object:
        """A tensor that is made of plain ones (composites.py). Raises where they do not fit each other."""

    def parameter(self, data: object, grad: bool, state: object) -> object:
        """A tensor as a parameter, with the attributes that were saved with it; `NotImplemented` of anything else."""

    def blank(self, name: str) -> object:
        """A tensor or a parameter that BUILD will fill: `FloatTensor`, `Parameter`, `Variable`."""

    def meta(
        self, dtype: object, shape: tuple[int, ...], strides: tuple[int, ...], *, grad: bool
    ) -> object:
        """A tensor without data."""

    def elsewhere(self, data: object, dtype: object, device: object, *, grad: bool) -> object:
        """A tensor of a device that has no storages, which was saved as a tensor of the CPU or an array."""

    def wrapper(
        self, args: Args, shape: tuple[int, ...], strides: tuple[int, ...], *, offset: int
    ) -> object:
        """The outside of a subclass whose tensors come as its state: (class, dtype, …, layout, device, requires_grad)."""

    def check_class(self, function: object, kind: object) -> None:
        """Raise where a tensor cannot be made by a function and be of a class."""

    def as_class(self, made: object, kind: object, state: object) -> object:
        """The result of a function as an object of a class, with its attributes."""


# Plain tensors.


def flags(given: object) -> dict[str, bool]:
    """The bits by which a conjugate or a negative is a view."""
    if given is None:
        return {}
    if not isinstance(given, dict):
        raise PickleError("a tensor's flags must be a dict", found=type(given).__name__)
    return {name: True for name in ("conj", "neg") if given.get(name) is True}


def tensor(table: BuildingTable, args: Args) -> object:
    """(storage, offset, size, stride): torch before 0.4"""
    storage, offset, size, stride = arity(args, 4, 4, "_rebuild_tensor")
    if not isinstance(storage, table.builder.storage_class):
        return table.builder.unbuilt((UTILS, "_rebuild_tensor"), args, NO_STORAGE)
    return table.builder.view(storage, None, (offset, size, stride))


def tensor_v2(table: BuildingTable, args: Args) -> object:
    """(storage, offset, size, stride, requires_grad, hooks[, flags])"""
    count, builder = len(args), table.builder
    if not 6 <= count <= 7:
        arity(args, builder.fewest, 7, "_rebuild_tensor_v2")
    if not isinstance(args[0], builder.storage_class):
        # `pickle.dump(tensor)` without torch.save nests a whole stream in bytes.
        return builder.unbuilt((UTILS, "_rebuild_tensor_v2"), args, NO_STORAGE)
    claim = args[1], args[2], args[3]
    if count < 5 or (args[4] is False and count < 7):
        return builder.view(args[0], None, claim)
    return builder.view(
        args[0],
        None,
        claim,
        grad=flag(args[4], "requires_grad"),
        **flags(args[6] if count == 7 else None),
    )


def tensor_v3(table: BuildingTable, args: Args) -> object:
    """(storage, offset, size, stride, requires_grad, hooks, dtype[, flags]): types that torch stores as bytes"""
    storage, offset, size, stride, grad, _, dtype = arity(args, 7, 8, "_rebuild_tensor_v3")[:7]
    builder = table.builder
    if not isinstance(storage, builder.storage_class):
        return builder.unbuilt((UTILS, "_rebuild_tensor_v3"), args, NO_STORAGE)
    more = flags(args[7] if len(args) == 8 else None)
    return builder.view(
        storage,
        builder.dtype(dtype),
        (offset, size, stride),
        grad=flag(grad, "requires_grad"),
        **more,
    )


def meta(table: BuildingTable, args: Args) -> object:
    """(dtype, size, stride, requires_grad): a tensor of the meta device"""
    dtype, size, stride, grad = arity(args, 4, 4, "_rebuild_meta_tensor_no_storage")
    shape, strides, _, _ = reach(0, size, stride, table.limits)
    return table.builder.meta(
        table.builder.dtype(dtype), shape, strides, grad=flag(grad, "requires_grad")
    )


def elsewhere(table: BuildingTable, args: Args) -> object:
    """(CPU tensor or array, dtype, device, requires_grad): a tensor of a device that has no storages"""
    data, dtype, device, grad = arity(args, 4, 4, "_rebuild_device_tensor")
    return table.builder.elsewhere(data, dtype, device, grad=flag(grad, "requires_grad"))


def empty_tensor(name: str) -> Row:
    """`torch.FloatTensor()`, which waits for its BUILD. One with a size would give back memory as it was found."""

    def row(table: BuildingTable, args: Args) -> object:
        why = "a tensor class called with a size or with data; torch writes it without"
        return (
            table.builder.unbuilt(("torch", name), args, why) if args else table.builder.blank(name)
        )

    return row


# Parameters.


def parameter(table: BuildingTable, args: Args) -> object:
    """(data, requires_grad, hooks)"""
    arity(args, 2, 3, "_rebuild_parameter")
    return _parameter(table, args, args[1], None)


def parameter_with_state(table: BuildingTable, args: Args) -> object:
    """(data, requires_grad, hooks, attributes)"""
    arity(args, 4, 4, "_rebuild_parameter_with_state")
    return _parameter(table, args, args[1], args[3])


def parameter_class(table: BuildingTable, args: Args) -> object:
    """`Parameter([data[, requires_grad]])`; without data it comes with BUILD, as in torch 0.1."""
    arity(args, 0, 2, "Parameter")
    return (
        _parameter(table, args, args[1] if len(args) > 1 else True, None)
        if args
        else table.builder.blank("Parameter")
    )


def _parameter(table: BuildingTable, args: Args, grad: object, state: object) -> object:
    builder = table.builder
    wanted = flag(grad, "requires_grad")
    made = builder.parameter(args[0], wanted, state)
    why = "a parameter of something that is no tensor"
    return (
        builder.unbuilt((UTILS, "_rebuild_parameter"), args, why)
        if made is NotImplemented
        else made
    )


def variable(table: BuildingTable, args: Args) -> object:
    """`Variable(tensor)` of torch before 0.4 is the tensor; without arguments it comes with BUILD."""
    if not args:
        return table.builder.blank("Variable")
    return args[0] if isinstance(args[0], table.builder.tensor_class) else NotImplemented


# Subclasses.


def from_type(table: BuildingTable, args: Args) -> object:
    """(function, type, arguments, state): a tensor with attributes, or one of a subclass"""
    function, kind, inner, state = arity(args, 4, 4, "_rebuild_from_type_v2")
    if not isinstance(inner, tuple) or table.row(function) is from_type:
        # Of itself, it would recurse as deep as the file wants.
        raise PickleError(
            "_rebuild_from_type_v2 of a function and arguments that torch never writes"
        )
    table.builder.check_class(function, kind)
    return table.builder.as_class(table.call(function, inner), kind, state)


def wrapper(table: BuildingTable, args: Args) -> object:
    """(class, dtype, size, stride, offset, layout, device, requires_grad): an outside; the tensors inside come as its state"""
    _, _, size, stride, offset, *_ = arity(args, 8, 8, "_rebuild_wrapper_subclass")
    shape, strides, begin, _ = reach(offset, size, stride, table.limits)
    return table.builder.wrapper(args, shape, strides, offset=begin)


def graph_module(name: str) -> Row:
    """(attributes, source text, …): a `torch.fx.GraphModule`, described like any module and never compiled"""
    what = Global("torch.fx.graph_module", name)

    def row(table: BuildingTable, args: Args) -> object:
        table.used(what, "call")
        state = args[0] if args and isinstance(args[0], dict) else None
        return Opaque(what, args if state is None else args[1:], state=state)

    return row


# Values.


def lengths_of(args: Args) -> tuple[int, ...]:
    """The lengths in a `torch.Size`."""
    return checked_ints(arity(args, 1, 1, "torch.Size")[0], "size")


def size(table: BuildingTable, args: Args) -> object:
    """(lengths); paid for, because one long tuple may be named in a million calls."""
    if len(args) == 1 and isinstance(args[0], tuple | list):
        table.spending.copy(len(args[0]))
    return table.builder.size(lengths_of(args))


def device(table: BuildingTable, args: Args) -> object:
    kind = arity(args, 1, 2, "torch.device")[0]
    index = args[1] if len(args) == 2 else None
    if not isinstance(kind, str) or not (index is None or type(index) is int):
        raise PickleError("a device is a name and a number", found=type(kind).__name__)
    return table.builder.device(kind, index)


def layout_name(args: Args) -> str:
    """The name of a layout, without `torch.`"""
    (name,) = arity(args, 1, 1, "_get_layout")
    if not isinstance(name, str) or not name.startswith("torch.") or name[6:] not in LAYOUTS:
        raise PickleError("an unknown layout", found=brief(name))
    return name[6:]


def layout(table: BuildingTable, args: Args) -> object:
    return table.builder.layout(layout_name(args))


def first(table: BuildingTable, args: Args) -> object:
    """TorchScript tags typed lists and dicts with a call that gives back its first argument."""
    if not args:
        raise PickleError("a TorchScript type tag without a value")
    return args[0]


EMPTY_TENSORS: dict[Name, Row] = {
    ("torch", "Tensor"): empty_tensor("Tensor"),
    **{
        (module, name): empty_tensor(name)
        for module in ("torch", "torch.cuda")
        for name in TENSOR_CLASSES
    },
}

REDUCERS: dict[Name, Row] = {
    (UTILS, "_rebuild_tensor"): tensor,
    (UTILS, "_rebuild_tensor_v2"): tensor_v2,
    (UTILS, "_rebuild_tensor_v3"): tensor_v3,
    (UTILS, "_rebuild_parameter"): parameter,
    (UTILS, "_rebuild_parameter_with_state"): parameter_with_state,
    ("torch.nn.parameter", "Parameter"): parameter_class,
    ("torch.autograd.variable", "Variable"): variable,
    **EMPTY_TENSORS,
    (UTILS, "_rebuild_meta_tensor_no_storage"): meta,
    (UTILS, "_rebuild_device_tensor_from_cpu_tensor"): elsewhere,
    (UTILS, "_rebuild_device_tensor_from_numpy"): elsewhere,
    (UTILS, "_rebuild_wrapper_subclass"): wrapper,
    ("torch._tensor", "_rebuild_from_type_v2"): from_type,
    # torch 1.7 to 1.10 called it so, with the attributes as a plain dict; the module was renamed in 1.9.
    ("torch._tensor", "_rebuild_from_type"): from_type,
    ("torch.tensor", "_rebuild_from_type"): from_type,
    ("torch", "Size"): size,
    ("torch", "device"): device,
    ("torch.serialization", "_get_layout"): layout,
    **{
        ("torch.jit._pickle", f"build_{kind}list"): first
        for kind in ("int", "double", "bool", "tensor")
    },
    ("torch.jit._pickle", "restore_type_tag"): first,
    **{name: row for kind in KINDS.values() for name, row in kind.reducers.items()},
}
"""By exact names. A class has one row for REDUCE and NEWOBJ."""


def _values() -> dict[Name, object]:
    """Globals that are values: dtypes; and classes, layouts and schemes, which stand for themselves."""
    names = [("torch", n) for n in (*LAYOUTS, *QSCHEMES, "Tensor", *TENSOR_CLASSES)]
    names += [("torch.cuda", n) for n in TENSOR_CLASSES]
    names += [(m, n) for m in ("torch.sparse", "torch.cuda.sparse") for n in TENSOR_CLASSES]
    names += [
        (m, row.storage) for m in ("torch", "torch.cuda") for row in DTYPES.rows if row.storage
    ]
    storages = ("UntypedStorage", "_UntypedStorage", "TypedStorage")
    names += [(m, n) for m in ("torch", "torch.storage", "torch.cuda") for n in storages]
    names += [
        (NESTED, "NestedTensor"),
        ("torch._tensor", "Tensor"),
        ("torch.nn.parameter", "Buffer"),
    ]
    dtypes: dict[Name, object] = {("torch", row.torch): row for row in DTYPES.rows if row.torch}
    return {**dtypes, **{(m, n): Global(m, n) for m, n in names}}


VALUES = _values()
GRAPHS = {("torch.fx.graph_module", name): graph_module(name) for name in GRAPH_MODULES}
NEW = {
    ("torch.nn.parameter", "Parameter"),
    ("torch.autograd.variable", "Variable"),
    ("torch", "Size"),
    *EMPTY_TENSORS,
}


class BuildingTable(PlainTable):
    """Plain Python, numpy, and torch's calls, which ask a builder."""

    values: ClassVar[Mapping[Name, object]] = {**PlainTable.values, **VALUES}
    calls: ClassVar[MutableMapping[Name, Row]] = {**PlainTable.calls, **REDUCERS, **GRAPHS}
    news: ClassVar[Mapping[Name, Row]] = {
        **PlainTable.news,
        **{name: REDUCERS[name] for name in NEW},
    }
    builder: Builder

    def row(self, what: object) -> Row | None:
        """Our function for what a stream calls."""
        return self.calls.get((what.module, what.name)) if type(what) is Global else None


def add_kind(kind: CompositeKind) -> None:
    """Have a kind of composite tensors read, checked and written."""
    KINDS[kind.name] = kind
    BuildingTable.calls.update(kind.reducers)


def buildable() -> frozenset[Name]:
    """The globals that become values of ours. Not the graph modules, which torch makes by running their source text."""
    return frozenset(
        {*BuildingTable.values, *BuildingTable.calls, *BuildingTable.news} - GRAPHS.keys()
    )
