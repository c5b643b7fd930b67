"""What callers give, read in one place: what is plain is taken, the rest is refused in a sentence.

Each function takes a value and the name of its parameter. Anything else is a `BadArgument` that names the parameter, what was given
and what is taken. `core/options.py` says which parameter is read by which. No numpy is imported here: `--help` needs none.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, SupportsFloat, TypeAlias

from holdfast.core.limits import Limits
from holdfast.core.quantities import describe_value, parse_count, parse_nbytes, to_float
from holdfast.errors import BadArgument, BadArgumentType

if TYPE_CHECKING:
    import numpy as np
    import torch

    from holdfast.core.dtype import DType

MOST = 65_536  # Of things that are all made: threads, bins. Nobody means a million of them.
LAST_STEP = (1 << 63) - 1  # What 64-bit readers of other languages hold.
AnyDType: TypeAlias = "str | DType | np.dtype[np.generic] | type[np.generic] | torch.dtype"

Reader = Callable[
    [object, str], object
]  # Takes a value and the name of the parameter with its `=`; gives what the verb sees.


def flag(value: object, name: str) -> bool:
    """True or False; 0 and 1 do as well. Text does not: "False" would be true."""
    numpy = sys.modules.get("numpy")
    if (
        isinstance(value, bool)
        or (type(value) is int and value in (0, 1))
        or (numpy and isinstance(value, numpy.bool_))
    ):
        return bool(value)
    raise BadArgumentType(f"{name} takes True or False, not {describe_value(value)}", found=value)


def text(value: object, name: str) -> str:
    if not isinstance(value, str):
        raise BadArgumentType(f"{name} takes text, not {describe_value(value)}", found=value)
    return value


def dtype(value: object, name: str) -> DType | str:
    """A dtype of ours, of numpy's or of torch's, or its name. An unknown name is the verb's to refuse: it knows which it takes."""
    from holdfast.core.dtype import DTYPES

    if isinstance(value, str):
        return DTYPES.parse(value) or value
    found = DTYPES.from_any(value)
    if found is None:
        message = f"{name} takes a dtype ('bfloat16', np.float16, torch.bfloat16), not {describe_value(value)}"
        raise BadArgumentType(message, found=value)
    return found


def dtypes(value: object, name: str) -> DType | str | dict[str, DType | str]:
    if not isinstance(value, Mapping):
        return dtype(value, name)
    return {key: dtype(item, f"{name}{{{key!r}: …}}") for key, item in named(value, name).items()}


def patterns(value: object, name: str) -> tuple[str, ...]:
    given = (
        (value,) if isinstance(value, str) else _items(value, name, "a pattern, or a list of them")
    )
    for item in given:
        if not isinstance(item, str):
            raise BadArgumentType(
                f"{name} takes patterns of names, which are text, not {describe_value(item)}",
                found=value,
            )
    return tuple(map(str, given))


def pairs(value: object, name: str) -> tuple[tuple[str, str], ...]:
    """Old and new: a dict, or a list of pairs; one pair, or 'OLD=NEW', as on the command line."""
    what = "{'old': 'new'}, or a list of such pairs"
    given = (
        value.items()
        if isinstance(value, Mapping)
        else (value,)
        if isinstance(value, str)
        else _items(value, name, what)
    )
    given = tuple(given)
    if len(given) == 2 and all(isinstance(item, str) and "=" not in item for item in given):
        given = (given,)
    found = []
    for item in given:
        both = item.partition("=")[::2] if isinstance(item, str) and "=" in item else item
        if (
            not isinstance(both, tuple | list)
            or len(both) != 2
            or not all(isinstance(one, str) for one in both)
        ):
            raise BadArgumentType(
                f"{name} takes {what}, and {describe_value(item)} is no pair of names", found=value
            )
        found.append((str(both[0]), str(both[1])))
    return tuple(found)


def texts(value: object, name: str) -> dict[str, str]:
    """Text under names, as file formats keep it."""
    if not isinstance(value, Mapping):
        raise BadArgumentType(
            f"{name} takes a dict of text, not {describe_value(value)}", found=value
        )
    for key, item in value.items():
        if not isinstance(key, str) or not isinstance(item, str):
            wrong = (
                f"{key!r}: {describe_value(item)}"
                if isinstance(key, str)
                else f"the key {describe_value(key)}"
            )
            advice = "write str(…) or json.dumps(…) around it, or put it into the state itself"
            raise BadArgumentType(
                f"{name} takes text under names, and {wrong} is none; {advice}", found=value
            )
    return dict(value)


def group(value: object, name: str) -> object:
    """A `Group`, or a process group of torch, of which one is made."""
    torch = sys.modules.get("torch.distributed")
    if all(hasattr(value, member) for member in ("rank", "size", "begin")) or (
        torch and isinstance(value, torch.ProcessGroup)
    ):
        return value
    raise BadArgumentType(
        f"{name} takes a process group, or what holdfast.torch.group() makes, not {describe_value(value)}",
        found=value,
    )


def map_name(value: object, name: str) -> object:
    """A `Map`, or the name of one."""
    if isinstance(value, str) or hasattr(value, "through"):
        return value
    raise BadArgumentType(
        f"{name} takes the name of a map (qwen3:hf:megatron), or a Map, not {describe_value(value)}",
        found=value,
    )


size = parse_nbytes


def count(value: object, name: str) -> int:
    return parse_count(value, name, most=MOST)


def limits(value: object, name: str) -> Limits:
    """Return `Limits` unchanged, and refuse anything else."""
    if not isinstance(value, Limits):
        raise BadArgumentType(
            f"{name} takes a holdfast.Limits, such as Limits(files=200_000), not {describe_value(value)}",
            found=value,
        )
    return value


def progress(value: object, name: str) -> Callable[[int], None] | None:
    """A function that is called with how many bytes more are done."""
    if value is None or value is False:
        return None
    if callable(value):
        # What it takes is only known when it is called.
        return value
    advice = "; with tqdm: progress=tqdm(unit='B', unit_scale=True).update" if value is True else ""
    raise BadArgumentType(
        f"{name} takes a function that is told numbers of bytes, not {describe_value(value)}{advice}",
        found=value,
    )


def rules(kind: type) -> Reader:
    """One rule, or any number of them, as text or of a kind; `{pattern: method}` is "pattern: method"."""

    def read(value: object, name: str) -> tuple[object, ...]:
        what = "rules, which are text like 'PATTERN: METHOD'"
        given: tuple[object, ...]
        if isinstance(value, str | kind):
            given = (value,)
        elif isinstance(value, Mapping):
            given = tuple(f"{key}: {item}" for key, item in value.items())
        else:
            given = _items(value, name, what)
        for item in given:
            if not isinstance(item, str | kind):
                raise BadArgumentType(
                    f"{name} takes {what}, not {describe_value(item)}", found=value
                )
        return given

    return read


def one_of(*known: str) -> Reader:
    def read(value: object, name: str) -> str:
        if not isinstance(value, str) or value not in known:
            kind = BadArgument if isinstance(value, str) else BadArgumentType
            *most, last = map(repr, known)
            raise kind(
                f"{name} takes {', '.join(most)} or {last}, not {describe_value(value)}",
                found=value,
            )
        return value

    return read


def allowed(value: object, name: str) -> object:
    """A file of patterns, or the patterns themselves."""
    return value if isinstance(value, str | os.PathLike) else patterns(value, name)


def counts(value: object, name: str) -> dict[str, int] | str:
    """Numbers under names: a dict, or text, which the verb reads."""
    return value if isinstance(value, str) else versions(value, name)


def versions(value: object, name: str) -> dict[str, int]:
    return {
        key: parse_count(item, f"{name}{{{key!r}: …}}") for key, item in named(value, name).items()
    }


def step(value: object, name: str) -> int:
    return parse_count(value, name, least=0, most=LAST_STEP)


def metrics(value: object, name: str) -> dict[str, float]:
    """Numbers under names; anything that is a number to Python is one (of numpy, a tensor without dimensions), NaN as well."""
    found: dict[str, float] = {}
    for key, item in named(value, name).items():
        metric = to_float(item) if isinstance(item, SupportsFloat) else None
        if metric is None:
            raise BadArgumentType(
                f"{name} takes numbers under names, and {key!r} is {describe_value(item)}",
                found=value,
            )
        found[key] = metric
    return found


def contents(value: object, name: str) -> dict[str, str | bytes]:
    found: dict[str, str | bytes] = {}
    for key, item in named(value, name).items():
        if not isinstance(item, str | bytes):
            raise BadArgumentType(
                f"{name} takes text or bytes under names, and {key!r} is {describe_value(item)}",
                found=value,
            )
        found[key] = item
    return found


def mapping(value: object, name: str) -> Mapping[object, object]:
    """A dict, of whose keys the verb knows which it takes."""
    if not isinstance(value, Mapping):
        raise BadArgumentType(
            f"{name} takes a dict, names and what they stand for, not {describe_value(value)}",
            found=value,
        )
    return value


def named(value: object, name: str) -> dict[str, object]:
    found: dict[str, object] = {}
    for key, item in mapping(value, name).items():
        if not isinstance(key, str):
            raise BadArgumentType(
                f"{name} takes names, which are text, not {describe_value(key)}", found=value
            )
        found[key] = item
    return found


def _items(value: object, name: str, what: str) -> tuple[object, ...]:
    if isinstance(value, Iterable) and not isinstance(
        value, bytes | bytearray | memoryview | Mapping | os.PathLike
    ):
        try:
            return tuple(value)
        except TypeError:  # a tensor without dimensions only looks like many
            pass
    raise BadArgumentType(f"{name} takes {what}, not {describe_value(value)}", found=value)
