"""What a `weights_only` load may build: the names that torch allows, and those that the user allows.

1. An item of the user is a class or a function, known by its full name `module.qualname`, or a pair with the name to know it by. It
   is checked when it is added. What was registered with torch's own functions counts as well, but is not listed or cleared here.
2. Each `safe_globals` block removes its own items when it ends and nothing else, so blocks may nest and overlap in threads. In
   torch 2.13 a block also removes what was there before it.
3. Protocols 0 to 2 name things as Python 2 did. torch's loader knows fewer of those names than `formats/pickle/table.py` does
   (2.13, found by trying all that Python ever renamed), and what a user has to allow follows from it.
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
from torch.serialization import (
    get_safe_globals as _get_torchs,
)  # now: `install()` puts ours in its place

from holdfast.core.dtype import DTYPES
from holdfast.core.limits import Limits
from holdfast.core.opaque import Global
from holdfast.core.runtime import make_fork_safe
from holdfast.core.value import Value
from holdfast.errors import FormatError, error_context
from holdfast.formats.pickle.machine import interpret_whole
from holdfast.formats.pickle.table import Name, ReducerTable
from holdfast.formats.torch.composites import QSCHEMES
from holdfast.formats.torch.tensors import TENSOR_CLASSES
from holdfast.formats.zip.reader import read_archive, record_bytes
from holdfast.torch import versions
from holdfast.torch.serialization.opening import KEY, OpenedFile, opened
from holdfast.torch.serialization.pickling import StorageClass

Item = Callable[..., object] | tuple[object, str]


class AllowedItem(Value, frozen=True, eq=False):
    """An item with its full name. Equal to itself alone, so that one that was added twice is removed once."""

    name: str
    found: object
    item: Item


_lock = make_fork_safe(threading.Lock())
_added: list[AllowedItem] = []


def _entry(item: Item) -> AllowedItem:
    if isinstance(item, tuple):
        if len(item) != 2:
            raise ValueError(
                f"Expected tuple of length 2, an object and its full name, but got tuple of length: {len(item)}"
            )
        if not isinstance(item[1], str):
            raise TypeError(
                f"Expected second item in tuple to be str, the full name of the first, but got: {type(item[1])}"
            )
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
        """The items of each block of this object that is open."""

    def __enter__(self) -> None:
        entries = [_entry(item) for item in self._items]
        with _lock:
            self._open.append(entries)
            _added.extend(entries)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with _lock:
            entries = set(self._open.pop())
            _added[:] = [entry for entry in _added if entry not in entries]


def user_globals() -> dict[str, object]:
    """Everything that the user allowed, with our functions or with torch's, under its full name; ours wins."""
    torchs = [_entry(item) for item in _get_torchs()]
    with _lock:
        return {entry.name: entry.found for entry in (*torchs, *_added)}


class MentionedNames(ReducerTable):
    """Records what a stream names, and builds nothing: whatever it makes is one placeholder."""

    ANYTHING = Global("", "")

    def __init__(self) -> None:
        super().__init__()
        self.names: dict[Name, None] = {}

    def find(self, module: str, name: str) -> object:
        self.names[python3_name(module, name)] = None
        return self.ANYTHING

    def call(self, what: object, args: tuple[object, ...]) -> object:
        return self.ANYTHING

    def new(
        self, cls: object, args: tuple[object, ...], kwargs: dict[str, object] | None
    ) -> object:
        return self.ANYTHING

    def build(self, obj: object, state: object) -> object:
        return obj

    def append(self, obj: object, values: list[object]) -> None:
        pass

    add = append

    def set_items(self, obj: object, flat: list[object]) -> None:
        pass

    def persistent(self, pid: object) -> object:
        return self.ANYTHING


def get_unsafe_globals_in_checkpoint(f: str | os.PathLike[str] | BinaryIO) -> list[str]:
    """The full names that a zip checkpoint mentions and a `weights_only` load would refuse, in the order of first mention.

    Nothing is built. A name that a file computes while it is loaded is not found, but the names that it is computed with are.
    A file object is read from its position, which is restored. Raises `FormatError`, a ValueError, for what is no checkpoint, or a
    TorchScript archive.
    """
    with opened(f) as file, error_context(file=file.path):
        table = MentionedNames()
        interpret_whole(_pickle(file), table, limits=Limits())
    # torch gives its list anew each time: a program, and torch's own tests, may have changed it.
    allowed = versions.allowed_globals(default_globals()) | user_globals().keys()
    return [
        full
        for module, name in table.names
        if (full := f"{module}.{name}") not in allowed or module in BLOCKED
    ]


def _pickle(file: OpenedFile) -> bytes:
    expected = "Expected input to be a checkpoint returned by torch.save"
    head = file.source.bytes(KEY, file.start, file.start + min(4, file.nbytes))
    if head != b"PK\3\4":
        raise FormatError(f"{expected}: it does not begin like a zip archive", found=head)
    archive = read_archive(file.source, KEY, start=file.start)
    if archive.get("constants.pkl") is not None:
        raise FormatError(f"{expected} but got a torchscript checkpoint")
    record = archive.get("data.pkl")
    if record is None or not archive.prefix:
        raise FormatError(
            f"{expected}: it is a zip archive without a data.pkl in its one top folder"
        )
    return record_bytes(file.source, KEY, record)


REBUILDS = (
    "parameter", "parameter_with_state", "qtensor", "tensor", "tensor_v2", "tensor_v3", "sparse_tensor", "meta_tensor_no_storage",
    "nested_tensor", "wrapper_subclass", "device_tensor_from_numpy", "device_tensor_from_cpu_tensor",
)  # fmt: skip

SINGLE = (
    *(
        "collections.OrderedDict",
        "collections.Counter",
        "_codecs.encode",
        "builtins.bytearray",
        "builtins.set",
        "builtins.complex",
    ),
    *(
        "torch.Size",
        "torch.Tensor",
        "torch.device",
        "torch.nn.parameter.Parameter",
        "torch.serialization._get_layout",
    ),
    *(
        "torch.storage.TypedStorage",
        "torch.storage.UntypedStorage",
        "torch._tensor._rebuild_from_type_v2",
    ),
)
"""Names that are no part of a family (FORMATS 3.2)."""


def _named(full: str) -> object:
    """The object of a name that stands in this module; never of one that a file gave."""
    module, _, name = full.rpartition(".")
    return getattr(importlib.import_module(module), name)


@cache
def default_globals() -> Mapping[str, object]:
    """The names that a `weights_only` load allows by default, each with its object."""
    known, withdrawn = known_globals(), versions.withdrawn_globals()
    return MappingProxyType({name: value for name, value in known.items() if name not in withdrawn})


@cache
def known_globals() -> Mapping[str, object]:
    """The names that some version of torch allows by default, as far as this torch has them, each with its object.

    An older torch allows fewer. They do nothing but describe data, so they are allowed with it, too.
    """
    found = {name: _named(name) for name in SINGLE}
    rebuilds = ((name, versions.rebuild(name)) for name in REBUILDS)
    found |= {
        f"torch._utils._rebuild_{name}": rebuild
        for name, rebuild in rebuilds
        if rebuild is not None
    }
    found |= {f"torch.{name}": getattr(torch, name) for name in QSCHEMES}
    for row in DTYPES.rows:
        if (dtype := versions.dtype(row.torch)) is not None:
            found[f"torch.{row.torch}"] = dtype
        if row.storage is not None:
            found[f"torch.{row.storage}"] = StorageClass(row.storage)
            if row.kind != "quantized":
                found[f"torch.cuda.{row.storage}"] = StorageClass(row.storage)
    for module in (torch, torch.cuda, torch.sparse, torch.cuda.sparse):
        found |= {
            f"{module.__name__}.{name}": getattr(module, name)
            for name in TENSOR_CLASSES
            if name in vars(module)
        }
    return MappingProxyType(found)


BLOCKED = frozenset({"nt", "os", "posix", "sys"})
"""Modules of which nothing is built, even where a user allows it."""

MODULES = {
    "Queue": "queue", "StringIO": "io", "UserDict": "collections", "UserList": "collections", "UserString": "collections",
    "__builtin__": "builtins", "_abcoll": "collections.abc", "cStringIO": "io", "copy_reg": "copyreg", "repr": "reprlib",
    "whichdb": "dbm",
}  # fmt: skip
"""Modules of Python 2 that have other names in Python 3."""

NAMES = {
    ("UserDict", "IterableUserDict"): ("collections", "UserDict"),
    ("__builtin__", "basestring"): ("builtins", "str"), ("__builtin__", "intern"): ("sys", "intern"),
    ("__builtin__", "long"): ("builtins", "int"), ("__builtin__", "reduce"): ("functools", "reduce"),
    ("__builtin__", "unichr"): ("builtins", "chr"), ("__builtin__", "unicode"): ("builtins", "str"),
    ("__builtin__", "xrange"): ("builtins", "range"), ("exceptions", "StandardError"): ("builtins", "Exception"),
    ("itertools", "ifilter"): ("builtins", "filter"), ("itertools", "ifilterfalse"): ("itertools", "filterfalse"),
    ("itertools", "imap"): ("builtins", "map"), ("itertools", "izip"): ("builtins", "zip"),
    ("itertools", "izip_longest"): ("itertools", "zip_longest"),
}  # fmt: skip
"""Names of Python 2 that are in other modules of Python 3, or have other names."""


def python3_name(module: str, name: str) -> Name:
    """The module and name under which torch's loader looks for a global of a pickle, of whatever protocol.

    >>> python3_name("__builtin__", "set"), python3_name("itertools", "izip"), python3_name("exceptions", "KeyError")
    (('builtins', 'set'), ('builtins', 'zip'), ('exceptions', 'KeyError'))
    """
    return NAMES.get((module, name)) or (MODULES.get(module, module), name)
