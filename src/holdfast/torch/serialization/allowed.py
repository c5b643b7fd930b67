"""What a `weights_only` load may build: the names that torch allows, the list that the user adds to, and what a file asks for.

1. The user's list is ours and not torch's. What was registered with torch's own functions counts as well (`user_globals`), but is
   neither listed nor cleared here: it belongs to those functions.
2. An item is a class or a function, known by its full name `module.qualname`, or a pair with the name to know it by. It is
   checked when it is added; torch does so at the next load.
3. Each `safe_globals` block takes away its own items when it ends and nothing else, so blocks may nest and overlap in threads. In
   torch 2.13 a block also takes away what was there before it.
4. `get_unsafe_globals_in_checkpoint` runs the closed interpreter over the pickle with a table that notes every name and builds
   nothing. What is neither in the list of names that are always allowed nor in the user's is reported.

`default_globals` are the names that torch allows in every such load (2.13: 144 of them); `python3_name` is how its loader takes the
names of a pickle, and `is_blocked` says of which modules it takes none. Protocols 0 to 2 name things as Python 2 did. torch knows
fewer of those names than `formats/pickle/table.py` does (2.13, found by trying all that Python ever renamed), and what a user has
to allow follows from it: `exceptions.KeyError` stays what it is.
"""

from __future__ import annotations

import importlib
import os
import threading
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from types import MappingProxyType, TracebackType
from typing import BinaryIO

import torch
from torch.serialization import get_safe_globals as _get_torchs  # now: `install()` puts ours in its place

from holdfast.core.dtype import DTYPES
from holdfast.core.limits import Limits
from holdfast.core.opaque import Global
from holdfast.core.runtime import renewed
from holdfast.core.value import Value
from holdfast.errors import FormatError, located
from holdfast.formats.pickle.machine import interpret_whole
from holdfast.formats.pickle.table import Name, ReducerTable
from holdfast.formats.torch.composites import QSCHEMES
from holdfast.formats.torch.tensors import TENSOR_CLASSES
from holdfast.formats.torch.zip import record_bytes
from holdfast.formats.zip.reader import read_archive
from holdfast.torch import versions
from holdfast.torch.serialization.opening import OpenedFile, opened
from holdfast.torch.serialization.pickling import StorageClass

Item = Callable[..., object] | tuple[object, str]

# The user's list.


class AllowedItem(Value, frozen=True, eq=False):
    """An item that was added once; equal to itself alone, so that it can be taken away again."""

    name: str
    """Its full name."""
    found: object
    item: Item
    """As it was given."""


_lock = renewed(threading.Lock())
_added: list[AllowedItem] = []


def _entry(item: Item) -> AllowedItem:
    if isinstance(item, tuple):
        if len(item) != 2:
            raise ValueError(f"Expected tuple of length 2, an object and its full name, but got tuple of length: {len(item)}")
        if not isinstance(item[1], str):
            raise TypeError(f"Expected second item in tuple to be str, the full name of the first, but got: {type(item[1])}")
        return AllowedItem(item[1], item[0], item)
    module, name = (getattr(item, attribute, None) for attribute in ("__module__", "__qualname__"))
    if module is None:
        # A method of a class that is written in C has none of its own: `ZoneInfo._unpickle`.
        module = getattr(getattr(item, "__self__", None), "__module__", None)
    if not isinstance(module, str) or not isinstance(name, str):
        raise AttributeError(
            f"a {type(item).__name__} has no attribute '__module__' or '__qualname__' to be known by; "
            "give it together with its full name, as (object, 'module.name')"
        )
    return AllowedItem(f"{module}.{name}", item, item)


def add_safe_globals(safe_globals: Iterable[Item]) -> None:
    """Allow a `weights_only` load to build these: to call the functions, to make and fill the classes."""
    entries = [_entry(item) for item in safe_globals]
    with _lock:
        _added.extend(entries)


def get_safe_globals() -> list[Item]:
    """What was added here, each item once, the oldest first."""
    with _lock:
        once = {(e.name, id(e.found), isinstance(e.item, tuple)): e.item for e in _added}
    return list(once.values())


def clear_safe_globals() -> None:
    """Forget what was added here. What was registered with torch's own functions is for those to clear."""
    with _lock:
        _added.clear()


class safe_globals:  # noqa: N801 (torch's name)
    """Allow these for the length of a `with` block; afterwards all is as it was before."""

    def __init__(self, safe_globals: Iterable[Item]) -> None:
        self._items = list(safe_globals)
        for item in self._items:
            _entry(item)
        self._open: list[list[AllowedItem]] = []
        """One list for each block of this object that is open."""

    def __enter__(self) -> None:
        entries = [_entry(item) for item in self._items]
        with _lock:
            self._open.append(entries)
            _added.extend(entries)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with _lock:
            entries = set(self._open.pop())
            _added[:] = [entry for entry in _added if entry not in entries]


def user_globals() -> dict[str, object]:
    """Everything that the user allowed, with our functions or with torch's, under its full name; ours wins."""
    torchs = [_entry(item) for item in _get_torchs()]
    with _lock:
        return {entry.name: entry.found for entry in (*torchs, *_added)}


# What a file asks for.


class Mentions(ReducerTable):
    """Notes what a stream names, and builds nothing: whatever it makes is one and the same placeholder."""

    ANYTHING = Global("", "")

    def __init__(self) -> None:
        super().__init__()
        self.names: dict[Name, None] = {}
        """A set that keeps the order of the first mention."""

    def find(self, module: str, name: str) -> object:
        self.names[python3_name(module, name)] = None
        return self.ANYTHING

    def call(self, what: object, args: tuple[object, ...]) -> object:
        return self.ANYTHING

    def new(self, cls: object, args: tuple[object, ...], kwargs: dict[str, object] | None) -> object:
        return self.ANYTHING

    def build(self, obj: object, state: object) -> object:
        return obj

    def append(self, obj: object, values: list[object]) -> None:
        pass

    def set_items(self, obj: object, flat: list[object]) -> None:
        pass

    def add(self, obj: object, values: list[object]) -> None:
        pass

    def persistent(self, pid: object) -> object:
        return self.ANYTHING


def get_unsafe_globals_in_checkpoint(f: str | os.PathLike[str] | BinaryIO) -> list[str]:
    """The full names that a zip checkpoint mentions and a `weights_only` load would refuse, in the order of first mention.

    Nothing is built. A name that a file would only compute while it is loaded does not show, but what it computes with does.
    A file object is read from where it stands, and stands there again afterwards. Raises `FormatError`, a ValueError, for what
    is no checkpoint or a TorchScript archive.
    """
    with opened(f) as file, located(file=file.path):
        table = Mentions()
        interpret_whole(_pickle(file), table, limits=Limits())
    allowed = _always_allowed() | user_globals().keys()
    return [full for module, name in table.names if (full := f"{module}.{name}") not in allowed or is_blocked(module)]


def _always_allowed() -> set[str]:
    """The names that need no allowing. torch is asked each time: a program, and torch's own tests, may have changed its answer."""
    return set(versions.allowed_globals(default_globals()))


def _pickle(file: OpenedFile) -> bytes:
    """The pickle of a zip checkpoint."""
    expected = "Expected input to be a checkpoint returned by torch.save"
    if file.head(4) != b"PK\3\4":
        raise FormatError(f"{expected}: it does not begin like a zip archive", found=file.head(4))
    archive = read_archive(file.source, file.key, start=file.start)
    if archive.get("constants.pkl") is not None:
        raise FormatError(f"{expected} but got a torchscript checkpoint")
    record = archive.get("data.pkl")
    if record is None or not archive.prefix:
        raise FormatError(f"{expected}: it is a zip archive without a data.pkl in its one top folder")
    return record_bytes(file.source, file.key, record)


REBUILDS = (
    "parameter", "parameter_with_state", "qtensor", "tensor", "tensor_v2", "tensor_v3", "sparse_tensor", "meta_tensor_no_storage",
    "nested_tensor", "wrapper_subclass", "device_tensor_from_numpy", "device_tensor_from_cpu_tensor",
)  # fmt: skip

SINGLE = (
    *("collections.OrderedDict", "collections.Counter", "_codecs.encode", "builtins.bytearray", "builtins.set", "builtins.complex"),
    *("torch.Size", "torch.Tensor", "torch.device", "torch.nn.parameter.Parameter", "torch.serialization._get_layout"),
    *("torch.storage.TypedStorage", "torch.storage.UntypedStorage", "torch._tensor._rebuild_from_type_v2"),
)
"""Names that are no part of a family (FORMATS 3.2). Each stands for what Python has under it."""


def _named(full: str) -> object:
    """What a name of ours stands for; never one that a file gave."""
    module, _, name = full.rpartition(".")
    return getattr(importlib.import_module(module), name)


@cache
def default_globals() -> Mapping[str, object]:
    """The names that a `weights_only` load knows without being told, each with what it stands for."""
    known, withdrawn = known_globals(), versions.withdrawn_globals()
    return MappingProxyType({name: value for name, value in known.items() if name not in withdrawn})


@cache
def known_globals() -> Mapping[str, object]:
    """The names that some version of torch allows in every such load, as far as this one has them, each with what it stands for.

    An older torch allows fewer of them. They were added because they do nothing but describe data, so they are allowed with it too.
    """
    found = {name: _named(name) for name in SINGLE}
    rebuilds = ((name, versions.rebuild(name)) for name in REBUILDS)
    found |= {f"torch._utils._rebuild_{name}": rebuild for name, rebuild in rebuilds if rebuild is not None}
    found |= {f"torch.{name}": getattr(torch, name) for name in QSCHEMES}
    for row in DTYPES.rows:
        if (dtype := versions.dtype(row.torch)) is not None:
            found[f"torch.{row.torch}"] = dtype
        if row.storage is not None:
            found[f"torch.{row.storage}"] = StorageClass(row.storage)
            if row.kind != "quantized":
                found[f"torch.cuda.{row.storage}"] = StorageClass(row.storage)
    for module in (torch, torch.cuda, torch.sparse, torch.cuda.sparse):
        found |= {f"{module.__name__}.{name}": getattr(module, name) for name in TENSOR_CLASSES if name in vars(module)}
    return MappingProxyType(found)


BLOCKED = frozenset({"nt", "os", "posix", "sys"})
"""Modules of which torch builds nothing, whoever allows it."""

MODULES = {
    "Queue": "queue",
    "StringIO": "io",
    "UserDict": "collections",
    "UserList": "collections",
    "UserString": "collections",
    "__builtin__": "builtins",
    "_abcoll": "collections.abc",
    "cStringIO": "io",
    "copy_reg": "copyreg",
    "repr": "reprlib",
    "whichdb": "dbm",
}
"""Modules that were renamed."""

NAMES = {
    ("UserDict", "IterableUserDict"): ("collections", "UserDict"),
    ("__builtin__", "basestring"): ("builtins", "str"),
    ("__builtin__", "intern"): ("sys", "intern"),
    ("__builtin__", "long"): ("builtins", "int"),
    ("__builtin__", "reduce"): ("functools", "reduce"),
    ("__builtin__", "unichr"): ("builtins", "chr"),
    ("__builtin__", "unicode"): ("builtins", "str"),
    ("__builtin__", "xrange"): ("builtins", "range"),
    ("exceptions", "StandardError"): ("builtins", "Exception"),
    ("itertools", "ifilter"): ("builtins", "filter"),
    ("itertools", "ifilterfalse"): ("itertools", "filterfalse"),
    ("itertools", "imap"): ("builtins", "map"),
    ("itertools", "izip"): ("builtins", "zip"),
    ("itertools", "izip_longest"): ("itertools", "zip_longest"),
}
"""Names that moved, or changed with their module."""


def python3_name(module: str, name: str) -> Name:
    """The module and name under which torch's loader looks for a global of a pickle, of whatever protocol.

    >>> python3_name("__builtin__", "set"), python3_name("itertools", "izip"), python3_name("exceptions", "KeyError")
    (('builtins', 'set'), ('builtins', 'zip'), ('exceptions', 'KeyError'))
    """
    return NAMES.get((module, name)) or (MODULES.get(module, module), name)


def is_blocked(module: str) -> bool:
    """Whether nothing of a module is ever built."""
    return module in BLOCKED
