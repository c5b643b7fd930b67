"""`WeightsTable`: the table of the closed interpreter for a `weights_only` load. It builds torch's own objects.

1. A global is found by its exact name: among the 144 that torch allows (`default_globals`), or among those that the user allowed
   (`allowed.py`). Every other name ends the load.
2. A callable has a row (`formats/torch/reducers.py`), which checks its arguments and calls the `TorchBuilder`. The real functions
   behind the 144 names are never called.
3. What the user allowed is called as it is, made by its own `__new__`, given its state by `__setstate__` or as attributes. It is
   the user's code: storages are filled before it runs, and its errors are not changed. What a file could break the interpreter
   with, of numpy and Python, has a row, too (`allowed_rows.py`).
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

import numpy as np
import torch

from holdfast.core.limits import Limits
from holdfast.core.runtime import weakly
from holdfast.errors import PickleError
from holdfast.formats.pickle.table import Args, Name, Pending, Row
from holdfast.formats.pickle.tensor_templates import Make, TensorArguments
from holdfast.formats.torch.reducers import BuildingTable
from holdfast.formats.torch.tensors import brief
from holdfast.torch.serialization.allowed import BLOCKED, default_globals, known_globals, python3_name, user_globals
from holdfast.torch.serialization.allowed_rows import allowed_row, give_array_state
from holdfast.torch.serialization.rebuild import TorchBuilder, no
from holdfast.torch.serialization.refusals import DEFAULT_PROTOCOL, REGISTERED, forbidden, label
from holdfast.torch.serialization.storages import LazyStorages, as_text
from holdfast.torch.tensors.composites import function_name

REBUILD = "torch._utils._rebuild_tensor_v2"

HARMLESS = frozenset({str, int, float, bool, bytes, type(None)})
"""Types of arguments that give no access to tensors, so that storages need not be filled."""


@cache
def _names() -> dict[int, Name]:
    """The names of what may be called, by the identity of the callable."""
    names = ((full.rpartition(".")[::2], value) for full, value in known_globals().items())
    return {id(value): name for name, value in names if name in BuildingTable.calls}


class WeightsTable(BuildingTable):
    """The table of one load."""

    def __init__(self, storages: LazyStorages, *, encoding: str = "utf-8") -> None:
        if encoding != "bytes":
            codecs.lookup(encoding)
        self._encoding = encoding
        self.storages = storages
        self.protocol = DEFAULT_PROTOCOL
        """The protocol of the stream."""
        self._user: Mapping[str, object] | None = None
        self._allowed: dict[int, object] = {}
        """What the user allowed, by identity; `_user` holds it."""
        self.unfinished: dict[int, object] = {}
        """Objects that are nothing without their state, by identity: dtypes, and objects of C++, whose memory holds anything."""
        self.blank: dict[int, object] = {}
        """Arrays that were announced and have no state yet."""
        self.depths: dict[int, tuple[int, object]] = {}
        """How deep objects nest that are freed recursively, by identity, with the object."""
        self._torchs: set[int] = set()
        """The identities among `_allowed` that torch registered by itself."""
        self._rows: dict[int, Row] = {}
        self.builder: TorchBuilder = TorchBuilder(storages, weakly(self.is_allowed))
        super().__init__()

    def begin(self, limits: Limits, nbytes: int) -> None:
        super().begin(limits, nbytes)
        self.protocol = DEFAULT_PROTOCOL
        self._user = None
        self._allowed, self._rows = {}, {}
        self.unfinished, self.blank, self.depths = {}, {}, {}

    def end(self) -> None:
        self._refuse_unfinished()

    def row(self, what: object) -> Row | None:
        """The row of a callable of `known_globals`, of a composite kind, or of what the user allowed of numpy."""
        row = self._rows.get(id(what))
        if row is None:
            name = _names().get(id(what)) or function_name(what)
            row = self.calls[name] if name is not None else allowed_row(what) if self.is_allowed(what) else None
            if row is not None:
                self._rows[id(what)] = row
        return row

    def declare(self, protocol: int) -> None:
        self.protocol = protocol
        if protocol != DEFAULT_PROTOCOL:
            warnings.warn(
                f"Detected pickle protocol {protocol} in the checkpoint, which was not the default pickle protocol used by "
                f"`torch.load` ({DEFAULT_PROTOCOL}). Holdfast reads protocols 0 to 5; torch.load(weights_only=True) may not.",
                UserWarning,
                stacklevel=2,
            )

    def raw(self, text: str) -> bytes:
        try:
            return text.encode(self._encoding)
        except UnicodeEncodeError as error:
            raise PickleError(f"a Python 2 string that is not {self._encoding}: {error.reason}") from None

    def string(self, raw: bytes) -> str | bytes:
        """A Python 2 string in the caller's `encoding`, which `bytes` turns off."""
        if self._encoding == "bytes":
            return raw
        try:
            return raw.decode(self._encoding)
        except UnicodeDecodeError as error:
            raise PickleError(f"a Python 2 string that is not {self._encoding}: {error.reason}") from None

    def find(self, module: str, name: str) -> object:
        module, name = python3_name(module, name)
        full = f"{module}.{name}"
        if module in BLOCKED:
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
        return self.storages.kind(claim, self.limits) if claim.hooks is OrderedDict else None

    def call(self, what: object, args: Args) -> object:
        self.spending.container()
        row = self._rows.get(id(what)) or self.row(what)
        if row is None:
            return self.call_allowed(what, args)
        value = row(self, args)
        if value is NotImplemented:
            raise PickleError(f"{label(what)} with arguments that no writer gives it")
        return value

    def new(self, cls: object, args: Args, kwargs: dict[str, object] | None) -> object:
        self.spending.container()
        if isinstance(cls, type):
            if self.row(cls) is not None:
                if not kwargs:
                    return self.call(cls, args)
            elif self.is_allowed(cls):
                self._fill_for(args, kwargs)
                made = self.run(cls, partial(cls.__new__, cls, *args, **(kwargs or {})))
                if any(base.__module__ == "pybind11_builtins" for base in type(made).__mro__):
                    self.unfinished[id(made)] = made
                return made
        raise PickleError(
            f"Can only create new object for nn.Parameter or classes allowlisted via `add_safe_globals` but got {label(cls)}"
        )

    def instance(self, cls: object, args: Args) -> object:
        """As Python 3 does for OBJ and INST: the class is called, or only made where there is nothing to call it with."""
        if isinstance(cls, type) and self.row(cls) is None and (args or hasattr(cls, "__getinitargs__")):
            return self.call(cls, args)
        return self.new(cls, args, None)

    def build(self, obj: object, state: object) -> object:
        if self.unfinished.pop(id(obj), None) is not None and isinstance(obj, Pending):
            obj = obj.finish(state)
            if self.is_allowed(type(obj)):
                return obj
        kind = type(obj)
        if kind is OrderedDict:
            self._set_entries(obj, state)
        elif kind is torch.nn.Parameter and isinstance(obj, torch.nn.Parameter):
            self.builder.fill_parameter(obj, state)
        elif isinstance(obj, torch.Tensor) and (kind is torch.Tensor or not self.is_allowed(kind)):
            self.builder.fill_blank(obj, state)
        elif self.is_allowed(kind):
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
        return self.storages.persistent(as_text(pid) if self._encoding == "bytes" else pid)

    def _set_entries(self, target: object, state: object) -> None:
        """Set attributes of an OrderedDict, such as `_metadata`. None may hide one that it has."""
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
            self._user = user_globals()
            self._allowed = {id(value): value for value in self._user.values()}
            self._torchs = {id(value) for name, value in self._user.items() if name in REGISTERED}
        return self._user

    def is_allowed(self, what: object) -> bool:
        self._users()
        if id(what) in self._allowed:
            return True
        if isinstance(what, MethodType | BuiltinMethodType):
            # Each access makes another method object; two are equal when owner and function are the same.
            return any(type(each) is type(what) and each == what for each in self._allowed.values())
        return False

    def call_allowed(self, what: object, args: Args) -> object:
        if not self.is_allowed(what) or not callable(what):
            raise PickleError(f"Trying to call reduce for unrecognized function {label(what)}")
        self._fill_for(args, None)
        return self.run(what, partial(what, *args))

    def run(self, what: object, ready: Callable[[], object]) -> object:
        """Run what was allowed. Errors are the user's, except those of what torch registered."""
        self._refuse_unfinished()
        try:
            value = ready()
        except Exception as error:
            if id(what) in self._torchs:
                raise no(f"to run {label(what)}", error) from error
            raise
        self.builder.check_jagged(value)
        return value

    def _refuse_unfinished(self) -> None:
        """Raise for an object without a state: only its own BUILD may use it."""
        for each in self.unfinished.values():
            if isinstance(each, Pending):
                raise PickleError(f"a {each.name} that BUILD has not finished")
            kind = type(each).__name__
            raise PickleError(f"Object created by NEWOBJ was not initialized by BUILD: a {kind}, whose memory holds anything")

    def _fill_for(self, args: Args, kwargs: dict[str, object] | None) -> None:
        """Fill the storages, unless the code that is about to run has no access to any."""
        self.spending.copy(len(args))
        if kwargs or not all(type(arg) in HARMLESS for arg in args):
            self.storages.fill()

    def _give_state(self, obj: object, state: object) -> None:
        """Give an object its state: by `__setstate__`, or as attributes from a dict, or from two dicts (the second for slots)."""
        if isinstance(obj, np.ndarray):
            give_array_state(self, obj, state)
            return
        if isinstance(obj, np.dtype):
            raise PickleError("a BUILD of a dtype that is complete")
        if isinstance(obj, partial) and isinstance(state, tuple) and state and isinstance(state[0], partial):
            raise PickleError("a partial of a partial, which Python makes one")
        method = getattr(obj, "__setstate__", None)
        if isinstance(obj, torch.Tensor) and type(obj).__setstate__ is torch.Tensor.__setstate__:
            raise PickleError("a BUILD of a tensor that is complete", found=type(obj).__name__)
        if method is not None:
            self.storages.fill()
            self.run(type(obj), partial(method, state))
            return
        attributes, slots = map(_by_name, state if isinstance(state, tuple) and len(state) == 2 else (state, None))
        self.spending.copy(len(attributes) + len(slots))
        if attributes:
            if not hasattr(obj, "__dict__"):
                raise PickleError(f"a {type(obj).__name__} has no attributes to be set")
            vars(obj).update(attributes)
        if slots:
            self.storages.fill()  # a class may do anything when one of its attributes is set
            for name, value in slots.items():
                if name.startswith("__"):
                    raise PickleError("a slot that belongs to Python", found=name[:64])
                if not hasattr(type(obj), name) and not hasattr(obj, "__dict__"):
                    raise PickleError(f"a {type(obj).__name__} has no slot of that name", found=name[:64])
                setattr(obj, name, value)


def _by_name(state: object) -> dict[str, object]:
    """Attributes and their values, from a part of an object's state."""
    if state is not None and (not isinstance(state, dict) or not all(type(name) is str for name in state)):
        raise PickleError("an object whose state is not attributes by name", found=type(state).__name__)
    return state or {}
