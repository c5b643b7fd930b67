"""The names of a pickle's globals as torch's `weights_only` loader takes them, and the modules of which it takes none.

Protocols 0 to 2 name things as Python 2 did. torch knows fewer of those names than `formats/pickle/table.py` does (2.13, found by
trying all that Python ever renamed), and what a user has to allow follows from it: `exceptions.KeyError` stays what it is.
"""

from __future__ import annotations

from holdfast.formats.pickle.table import Name

__all__ = ["is_blocked", "python3_name"]

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
