"""`WeightsTable`: what the closed interpreter builds for a `weights_only` load: torch's own objects, and only what is allowed.

1. A global is found by its exact name: among the 144 that torch allows (`default_globals`), or among those that the user allowed
   (`allowed.py`). It stands for the real class, function, dtype; every other name ends the load.
2. What is called has a row here: our own builder, which checks its arguments. The real functions behind the 144 names are never
   called. A class has one row for REDUCE and NEWOBJ.
3. What the user allowed is called as it is, made by its own `__new__`, given its state by `__setstate__` or as attributes. It is
   his code: storages are filled before it runs, and its errors are not touched.
4. Nothing else is called, filled or changed: containers are exact lists, dicts, OrderedDicts and Counters.

Rows are found by identity, never by comparing or hashing what a stream put together.
"""

from __future__ import annotations

import codecs
import warnings
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from functools import cache, partial
from types import BuiltinMethodType, MethodType

import torch
from torch.nested._internal.nested_tensor import NestedTensor

from holdfast.core.limits import Limits
from holdfast.core.runtime import weakly
from holdfast.errors import MetadataError, PickleError
from holdfast.formats.pickle.plain import PlainTable, complex_number
from holdfast.formats.pickle.table import ReducerTable, Row
from holdfast.formats.pickle.tensor_templates import Make, TensorArguments
from holdfast.formats.torch.tensors import Args, arity, brief
from holdfast.torch.serialization.allowed import default_globals, is_blocked, known_globals, python3_name
from holdfast.torch.serialization.composite_tensors import LAYOUTS, CompositeTensors
from holdfast.torch.serialization.pickling import StorageClass
from holdfast.torch.serialization.rebuild import TORCH_SAYS_NO, PlainTensors, assign, no
from holdfast.torch.serialization.refusals import DEFAULT_PROTOCOL, REGISTERED, forbidden, label, printable
from holdfast.torch.serialization.storages import LoadedStorages, not_a_storage

REBUILD = "torch._utils._rebuild_tensor_v2"

HARMLESS = frozenset({str, int, float, bool, bytes, type(None)})
"""Arguments through which no code gets at a tensor, so that it needs no filled ones."""


ROWS = {
    "collections.OrderedDict": ("table", "ordered_dict"),
    "collections.Counter": ("table", "counter"),
    "torch.nn.parameter.Parameter": ("plain", "parameter_class"),
    "torch.serialization._get_layout": ("table", "_layout"),
    "torch.Size": ("plain", "size"),
    "torch.device": ("table", "_device"),
    "_codecs.encode": ("table", "encode"),
    "builtins.bytearray": ("table", "bytearray"),
    "builtins.set": ("table", "set"),
    "builtins.complex": ("table", "_complex"),
    "torch._tensor._rebuild_from_type_v2": ("table", "_from_type"),
    "torch._utils._rebuild_parameter": ("plain", "parameter"),
    "torch._utils._rebuild_parameter_with_state": ("plain", "parameter_with_state"),
    "torch._utils._rebuild_qtensor": ("composite", "quantized"),
    "torch._utils._rebuild_tensor": ("plain", "tensor"),
    "torch._utils._rebuild_tensor_v2": ("plain", "tensor_v2"),
    "torch._utils._rebuild_tensor_v3": ("plain", "tensor_v3"),
    "torch._utils._rebuild_sparse_tensor": ("composite", "sparse"),
    "torch._utils._rebuild_meta_tensor_no_storage": ("plain", "meta"),
    "torch._utils._rebuild_nested_tensor": ("composite", "nested"),
    "torch._utils._rebuild_wrapper_subclass": ("table", "_wrapper"),
    "torch._utils._rebuild_device_tensor_from_numpy": ("plain", "device_tensor"),
    "torch._utils._rebuild_device_tensor_from_cpu_tensor": ("plain", "device_tensor"),
}
"""What may be called, and whose method does it: the table's, or that of the builders of plain or composite tensors."""


@cache
def _places() -> dict[int, tuple[str, str, type | None]]:
    """`ROWS` by the identity of what is called, with the tensor classes that are called to make an empty tensor."""
    known = known_globals()
    places: dict[int, tuple[str, str, type | None]] = {
        id(known[name]): (*place, None) for name, place in ROWS.items() if name in known
    }
    for name, kind in known.items():
        if name.endswith("Tensor") and isinstance(kind, type):
            made = ("composite", "legacy_sparse") if ".sparse." in name else ("plain", "blank")
            places.setdefault(id(kind), (*made, kind))
    return places


class WeightsTable(PlainTable):
    """The table of one load. `storages` gives the storage of each persistent id, and fills those that were given."""

    def __init__(self, storages: LoadedStorages, *, encoding: str = "utf-8") -> None:
        if encoding != "bytes":
            codecs.lookup(encoding)
        self._encoding = encoding
        self._storages = storages
        self.protocol = DEFAULT_PROTOCOL
        """What the stream said in its PROTO."""
        self._plain = PlainTensors(storages)
        self._composite = CompositeTensors(self._plain)
        self._user: Mapping[str, object] | None = None
        self._allowed: dict[int, object] = {}
        """What the user allowed, by identity; kept alive by `_user`."""
        self._empty: object = None
        """An object of a class of C++ that was made and has no state yet: its memory is not initialised."""
        self._torchs: set[int] = set()
        """What of it torch put there by itself."""
        # The rows of `PlainTable` are for inert data: its methods are wanted here, and not its table.
        ReducerTable.__init__(self)
        self._rows: dict[int, Row] = {}

    def begin(self, limits: Limits, nbytes: int) -> None:
        super().begin(limits, nbytes)
        self._plain.begin(limits, self.spending)
        self._composite.begin()
        self.protocol = DEFAULT_PROTOCOL
        self._user = None
        self._allowed = {}
        self._empty = None

    def end(self) -> None:
        self._refuse_beside_empty()

    def _row(self, what: object) -> Row | None:
        """The row of a callable of `known_globals`; bound when it is first asked for, since most files ask for three of them."""
        row = self._rows.get(id(what))
        if row is None:
            place = _places().get(id(what))
            if place is None:
                return None
            owner, name, kind = place
            row = weakly(getattr({"plain": self._plain, "composite": self._composite}.get(owner, self), name))
            row = self._rows[id(what)] = row if kind is None else partial(row, kind)
        return row

    _layout = staticmethod(lambda args: _layout(args))
    _device = staticmethod(lambda args: _device(args))
    _complex = staticmethod(complex_number)

    # What the machine asks for.

    def declare(self, protocol: int) -> None:
        self.protocol = protocol
        if protocol != DEFAULT_PROTOCOL:
            warnings.warn(
                f"Detected pickle protocol {protocol} in the checkpoint, which was not the default pickle protocol used by "
                f"`torch.load` ({DEFAULT_PROTOCOL}). Holdfast reads protocols 0 to 5; torch.load(weights_only=True) may not.",
                UserWarning,
                stacklevel=2,
            )

    def string(self, raw: bytes) -> str | bytes:
        """As the caller's `encoding` says, which `bytes` turns off."""
        if self._encoding == "bytes":
            return raw
        try:
            return raw.decode(self._encoding)
        except UnicodeDecodeError as error:
            raise PickleError(f"a Python 2 string that is not {self._encoding}: {error.reason}") from None

    def find(self, module: str, name: str) -> object:
        module, name = python3_name(module, name)
        full = f"{module}.{name}"
        if is_blocked(module):
            raise forbidden(module, name, blocked=True)
        value = default_globals().get(full)
        if value is not None:
            if full == REBUILD:
                self.opener = value
            return value
        user = self._users()
        if full not in user:
            raise forbidden(module, name, blocked=False)
        return user[full]

    def kind(self, claim: TensorArguments) -> Make | None:
        return self._storages.kind(claim, self.limits) if claim.hooks is OrderedDict else None

    def call(self, what: object, args: Args) -> object:
        self.spending.container()
        row = self._rows.get(id(what)) or self._row(what)
        if row is None:
            return self._call_allowed(what, args)
        value = row(args)
        if value is NotImplemented:
            raise PickleError(f"{label(what)} with arguments that no writer gives it")
        return value

    def new(self, cls: object, args: Args, kwargs: dict[str, object] | None) -> object:
        self.spending.container()
        if isinstance(cls, type):
            if self._row(cls) is not None and not kwargs:
                return self.call(cls, args)
            if self._is_allowed(cls):
                self._fill_for(args, kwargs)
                made = self._run(cls, partial(cls.__new__, cls, *args, **(kwargs or {})))
                if any(base.__module__ == "pybind11_builtins" for base in type(made).__mro__):
                    self._empty = made
                return made
        raise PickleError(
            f"Can only create new object for nn.Parameter or classes allowlisted via `add_safe_globals` but got {label(cls)}"
        )

    def instance(self, cls: object, args: Args) -> object:
        """As Python 3 does for OBJ and INST: the class is called, or only made where there is nothing to call it with."""
        if isinstance(cls, type) and self._row(cls) is None and (args or hasattr(cls, "__getinitargs__")):
            return self.call(cls, args)
        return self.new(cls, args, None)

    def build(self, obj: object, state: object) -> object:
        if obj is self._empty:
            self._empty = None
        kind = type(obj)
        if kind is OrderedDict:
            self._set_entries(obj, state)
        elif kind is torch.nn.Parameter and isinstance(obj, torch.nn.Parameter):
            self._plain.fill_parameter(obj, state)
        elif isinstance(obj, torch.Tensor) and (kind is torch.Tensor or not self._is_allowed(kind)):
            self._plain.fill_blank(obj, state)
        elif self._is_allowed(kind):
            self._give_state(obj, state)
        else:
            raise PickleError(
                f"Can only build Tensor, Parameter, OrderedDict or types allowlisted via `add_safe_globals`, but got {kind}"
            )
        return obj

    def append(self, obj: object, values: list[object]) -> None:
        verb = "append to" if len(values) == 1 else "extend"
        raise PickleError(f"Can only {verb} lists, but got {type(obj)}", found=type(obj).__name__)

    def set_item(self, obj: object, key: object, value: object) -> None:
        self._set_items(obj, [key, value], "SETITEM")

    def set_items(self, obj: object, flat: list[object]) -> None:
        self._set_items(obj, flat, "SETITEMS")

    def _set_items(self, obj: object, flat: list[object], opcode: str) -> None:
        if type(obj) not in (OrderedDict, Counter) or not isinstance(obj, dict):
            known = "dict, collections.OrderedDict, collections.Counter"
            raise PickleError(f"Can only {opcode} for {known}, but got {type(obj)}", found=type(obj).__name__)
        self.spending.fill(obj, flat)

    def add(self, obj: object, values: list[object]) -> None:
        raise PickleError(f"Can only add to sets, but got {type(obj)}", found=type(obj).__name__)

    def persistent(self, pid: object) -> object:
        if self._encoding == "bytes" and isinstance(pid, tuple) and len(pid) <= 6:
            # The texts in the persistent ids of Python 2 are strings like any other there.
            pid = tuple(part.decode("ascii", "replace") if isinstance(part, bytes) else part for part in pid)
        match pid:
            case (str(), StorageClass() | type(), str(), str(), int(), *rest) if len(rest) < 2:
                return self._storages.persistent(pid)
        raise PickleError(not_a_storage(pid), found=type(pid).__name__)

    def _set_entries(self, target: object, state: object) -> None:
        """What BUILD gives to an OrderedDict: attributes such as `_metadata`, none of which hides one that it has."""
        if not isinstance(state, dict):
            raise PickleError("the attributes of an OrderedDict must be a dict", found=type(state).__name__)
        self.spending.copy(len(state))
        for name in state:
            if type(name) is not str or hasattr(OrderedDict, name):
                raise PickleError("an OrderedDict with an attribute that it cannot have had", found=brief(name))
        vars(target).update(state)

    # What the user allowed.

    def _users(self) -> Mapping[str, object]:
        if self._user is None:
            from holdfast.torch.serialization.allowed import user_globals

            self._user = user_globals()
            self._allowed = {id(value): value for value in self._user.values()}
            self._torchs = {id(value) for name, value in self._user.items() if name in REGISTERED}
        return self._user

    def _is_allowed(self, what: object) -> bool:
        self._users()
        if id(what) in self._allowed:
            return True
        if isinstance(what, MethodType | BuiltinMethodType):
            # A method is another object each time that it is asked for; two are equal when owner and function are the same.
            return any(type(each) is type(what) and each == what for each in self._allowed.values())
        return False

    def _call_allowed(self, what: object, args: Args) -> object:
        if not self._is_allowed(what) or not callable(what):
            raise PickleError(f"Trying to call reduce for unrecognized function {label(what)}")
        self._fill_for(args, None)
        return self._run(what, partial(what, *args))

    def _run(self, what: object, ready: Callable[[], object]) -> object:
        """The result of what was allowed. Errors are the user's, but for what torch put on his list."""
        self._refuse_beside_empty()
        try:
            value = ready()
        except Exception as error:
            if id(what) in self._torchs:
                raise no(f"to run {label(what)}", error) from error
            raise
        if isinstance(value, NestedTensor):
            self._composite.check_jagged(value)
        return value

    def _refuse_beside_empty(self) -> None:
        """An object without a state is for its own BUILD alone: no other code may meet it, and none is given back."""
        if self._empty is not None:
            kind = type(self._empty).__name__
            raise PickleError(f"Object created by NEWOBJ was not initialized by BUILD: a {kind}, whose memory holds anything")

    def _fill_for(self, args: Args, kwargs: dict[str, object] | None) -> None:
        """Fill the storages, unless the code that is about to run cannot get at any."""
        self.spending.copy(len(args))
        if kwargs or not all(type(arg) in HARMLESS for arg in args):
            self._storages.fill()

    def _give_state(self, obj: object, state: object) -> None:
        """`__setstate__`, or attributes from a dict, or from a pair of dicts of which the second is for slots."""
        method = getattr(obj, "__setstate__", None)
        if isinstance(obj, torch.Tensor) and type(obj).__setstate__ is torch.Tensor.__setstate__:
            raise PickleError("a BUILD of a tensor that is complete", found=type(obj).__name__)
        if method is not None:
            self._storages.fill()
            self._run(type(obj), partial(method, state))
            return
        attributes, slots = map(_by_name, state if isinstance(state, tuple) and len(state) == 2 else (state, None))
        self.spending.copy(len(attributes) + len(slots))
        if attributes:
            if not hasattr(obj, "__dict__"):
                raise PickleError(f"a {type(obj).__name__} has no attributes to be set")
            vars(obj).update(attributes)
        if slots:
            self._storages.fill()  # a class may do anything when one of its attributes is set
            for name, value in slots.items():
                if name.startswith("__"):
                    raise PickleError("a slot that belongs to Python", found=name[:64])
                if not hasattr(type(obj), name) and not hasattr(obj, "__dict__"):
                    raise PickleError(f"a {type(obj).__name__} has no slot of that name", found=name[:64])
                setattr(obj, name, value)

    # Rows that need the above.

    def _wrapper(self, args: Args) -> object:
        if not args or not self._is_allowed(args[0]):
            raise PickleError(f"a wrapper of a class that is not allowed: {label(args[0] if args else None)}")
        return self._composite.wrapper(args)

    def _from_type(self, args: Args) -> object:
        """(function, type, arguments, state): a tensor with attributes, or one of a subclass."""
        function, kind, inner, state = arity(args, 4, 4, "_rebuild_from_type_v2")
        if function is torch._tensor._rebuild_from_type_v2 or not isinstance(inner, tuple):
            # Of itself, it would recurse as deep as the file wants.
            raise PickleError("_rebuild_from_type_v2 of a function and arguments that torch never writes")
        own = kind in (torch.Tensor, torch.nn.Parameter) if isinstance(kind, type) else False
        if not isinstance(kind, type) or not issubclass(kind, torch.Tensor) or not (own or self._is_allowed(kind)):
            raise PickleError(f"_rebuild_from_type_v2 for a class that is no allowed tensor: {label(kind)}")
        made = self.call(function, inner)
        if not isinstance(made, torch.Tensor):
            raise PickleError("_rebuild_from_type_v2 of something that is no tensor", found=type(made).__name__)
        if not own:
            self._storages.fill()
        if type(made) is not kind and not (own and self._plain.fake):
            try:
                made = made.as_subclass(kind)
            except TORCH_SAYS_NO as error:
                raise no(f"a tensor as {kind.__name__}", error) from error
        if type(made).__setstate__ is not torch.Tensor.__setstate__:
            made.__setstate__(state)
        else:
            assign(made, state, self.spending)
        if isinstance(made, NestedTensor):
            self._composite.check_jagged(made)
        return made


def _by_name(state: object) -> dict[str, object]:
    """A part of an object's state, which is attributes and their values; None is none."""
    if state is not None and (not isinstance(state, dict) or not all(type(name) is str for name in state)):
        raise PickleError("an object whose state is not attributes by name", found=type(state).__name__)
    return state or {}


def _layout(args: Args) -> object:
    (name,) = arity(args, 1, 1, "_get_layout")
    layout = LAYOUTS.get(name) if isinstance(name, str) else None
    if layout is None:
        raise PickleError("an unknown layout", found=brief(name))
    return layout


def _device(args: Args) -> object:
    kind = arity(args, 1, 2, "torch.device")[0]
    index = args[1] if len(args) == 2 else None
    if not isinstance(kind, str) or (index is not None and type(index) is not int):
        raise PickleError("a device is a name and a number", found=type(kind).__name__)
    try:
        return torch.device(kind) if index is None else torch.device(kind, index)
    except TORCH_SAYS_NO as error:
        raise MetadataError(f"torch knows no such device: {printable(brief(kind))}") from error
