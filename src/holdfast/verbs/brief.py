"""Any value out of a checkpoint, in a few characters and at a bounded cost.

The values may be large, cyclic, nested without end, or text that a terminal would act on. `brief` looks at a few
items of a few levels, builds strings with `repr` (which writes out what is not printable), and never calls a method
of a type that it does not know.
"""

from __future__ import annotations

import datetime
import itertools
import pathlib
from collections.abc import Iterable

import numpy as np

from holdfast.core.dtype import DType
from holdfast.core.opaque import Device, Global, Opaque
from holdfast.core.tensor import Composite, LazyTensor

ITEMS, LEVELS = 6, 3
"""Items of one container that are shown, and containers inside containers that are entered."""

SCALARS = (
    *(
        bool,
        int,
        float,
        complex,
        str,
        bytes,
        bytearray,
        type(None),
        np.generic,
        np.dtype,
        DType,
        Device,
        Global,
    ),
    *(datetime.date, datetime.time, datetime.timedelta, datetime.tzinfo, pathlib.PurePath, range),
)


def scalar(value: object) -> bool:
    """Whether a value is a leaf that is shown in place: a number, text, a date, a path, a dtype, a class."""
    return isinstance(value, SCALARS)


def printable(text: str, limit: int = 120) -> str:
    """A name as it stands when it is printable, written out where it is not; cut at `limit`."""
    head = text[:limit]
    shown = head if head.isprintable() else repr(head)[1:-1]
    return shown + ("…" if len(text) > limit else "")


def root_global(opaque: Opaque) -> Global | None:
    """The global at the bottom of `what`: in `getattr(os, "system")("ls")` that is `getattr`. A loop, as chains may be long."""
    what = opaque.what
    seen = 0
    while isinstance(what, Opaque):
        what = what.what
        seen += 1
        if seen > 10_000:
            return None
    return what if isinstance(what, Global) else None


def brief(value: object, limit: int = 60) -> str:
    """The value in about `limit` characters, on one line, safe for a terminal.

    >>> brief({"lr": 0.1, "name": "a\\x1b[31mb", "betas": (0.9, 0.999)})
    "{'lr': 0.1, 'name': 'a\\\\x1b[31mb', 'betas': (0.9, 0.999)}"
    """
    text = _text(value, limit, LEVELS)
    return text if len(text) <= limit + 20 else f"{text[:limit]}…"


def _text(value: object, limit: int, levels: int) -> str:
    match value:
        case np.generic():
            # Before float and complex: np.float64 is one, and its repr says so at length.
            return printable(str(value), limit)
        case None | bool() | float() | complex():
            return repr(value)
        case int():
            # CPython refuses to write very large integers in decimal; the interpreter's limit is 16 bytes.
            return (
                repr(value)
                if value.bit_length() <= 256
                else f"<int of {value.bit_length():,} bits>"
            )
        case str():
            return (
                repr(value)
                if len(value) <= limit
                else f"{value[:limit]!r}… ({len(value):,} characters)"
            )
        case bytes() | bytearray():
            head = bytes(value[:limit])
            return repr(head) if len(value) <= limit else f"{head!r}… ({len(value):,} bytes)"
        case np.ndarray():
            return f"<array {value.dtype} {list(value.shape)}>"
        case range():
            return repr(value)
        case datetime.date() | datetime.time() | datetime.timedelta():
            return str(value)
        case pathlib.PurePath():
            return f"Path({str(value)[:limit]!r})"
        case DType():
            return value.name
        case np.dtype():
            return f"dtype({printable(str(value), limit)!r})"
        case slice():
            parts = (value.start, value.stop, value.step)
            return (
                f"slice({', '.join(_text(v, limit, levels - 1) for v in parts)})"
                if levels > 0
                else "…"
            )
        case Device():
            return f"device({str(value)[:limit]!r})"
        case Global():
            return printable(f"{value.module[:limit]}.{value.name[:limit]}", 2 * limit)
        case LazyTensor():
            return f"<tensor {value.dtype.name} {list(value.shape)}>"
        case Composite():
            return f"<{printable(value.kind)} tensor {list(value.shape)}>"
        case Opaque() | dict() | list() | tuple() | set() | frozenset():
            return _container(value, limit, levels - 1) if levels > 0 else "…"
        case _:
            return f"<{type(value).__name__}>"


def _container(value: object, limit: int, levels: int) -> str:
    match value:
        case Opaque():
            return _call(value, limit, levels)
        case dict():
            pairs = (
                f"{_text(k, limit, levels)}: {_text(v, limit, levels)}" for k, v in value.items()
            )
            return f"{{{_join(pairs, len(value), limit)}}}"
        case list():
            return f"[{_join((_text(v, limit, levels) for v in value), len(value), limit)}]"
        case tuple():
            inside = _join((_text(v, limit, levels) for v in value), len(value), limit)
            return f"({inside},)" if len(value) == 1 else f"({inside})"
        case set() | frozenset():
            inside = _join((_text(v, limit, levels) for v in value), len(value), limit)
            return f"{{{inside}}}" if value else "set()"
        case _:
            return f"<{type(value).__name__}>"


def _call(opaque: Opaque, limit: int, levels: int) -> str:
    """The call that an object stands for, with its arguments: `os.system('echo hi')`."""
    if isinstance(opaque.what, Opaque):
        name = _container(opaque.what, limit, levels - 1) if levels > 0 else "…"
    else:
        name = _text(opaque.what, limit, 1)
    arguments = [_text(a, limit, levels) for a in opaque.args[:ITEMS]]
    for key, argument in itertools.islice((opaque.kwargs or {}).items(), ITEMS):
        arguments.append(f"{printable(str(key))}={_text(argument, limit, levels)}")
    total = len(opaque.args) + len(opaque.kwargs or {})
    return f"{name}({_join(iter(arguments), total, limit)})"


def _join(parts: Iterable[str], total: int, limit: int) -> str:
    shown: list[str] = []
    room = limit
    for part in itertools.islice(parts, ITEMS):
        if shown and room < len(part):
            break
        shown.append(part)
        room -= len(part) + 2
    return ", ".join(shown) + (f", … {total:,} items" if total > len(shown) else "")
