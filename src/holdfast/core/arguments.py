"""Checks the arguments that callers pass to the functions of Holdfast.

A check is a function of a value and the name of its parameter, such as "threads=". It returns the
value that the function receives, or raises `BadArgument` with a message that names the parameter,
the value and what the parameter takes. `core/options.py` assigns a check to each parameter.

The help of the command line imports this module, so it must not import numpy or torch.
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

MAX_COUNT = 65_536
"""The largest number of things that are all created, such as threads or bins."""

MAX_STEP = (1 << 63) - 1
"""The largest step number. Programs in other languages read it into a signed 64-bit integer."""

AnyDType: TypeAlias = "str | DType | np.dtype[np.generic] | type[np.generic] | torch.dtype"

ArgumentCheck = Callable[[object, str], object]
"""Takes a value and the name of its parameter with a "=". Returns the value that is used."""


def make_type_error(value: object, parameter: str, expected: str) -> BadArgumentType:
    """Return the error for an argument of a wrong type: "threads= takes a number, not 'x'".

    Args:
        value: The argument.
        parameter: The name of its parameter with a "=", such as "threads=".
        expected: What the parameter takes.
    """
    return BadArgumentType(
        f"{parameter} takes {expected}, not {describe_value(value)}", found=value
    )


def check_flag(value: object, parameter: str) -> bool:
    """Check that a value is True or False, and return it as a `bool`.

    The integers 0 and 1 are accepted. Text is not: the text "False" would be true.
    """
    numpy = sys.modules.get("numpy")
    is_numpy_bool = numpy is not None and isinstance(value, numpy.bool_)
    is_zero_or_one = type(value) is int and value in (0, 1)
    if isinstance(value, bool) or is_zero_or_one or is_numpy_bool:
        return bool(value)
    raise make_type_error(value, parameter, "True or False")


def check_text(value: object, parameter: str) -> str:
    """Check that a value is a `str`, and return it."""
    if not isinstance(value, str):
        raise make_type_error(value, parameter, "text")
    return value


def check_dtype(value: object, parameter: str) -> DType | str:
    """Return the dtype that a value stands for.

    The value may be a dtype of Holdfast, numpy or torch, or the name of one. An unknown name is
    returned as it is, because some functions accept further names. They refuse it themselves.
    """
    from holdfast.core.dtype import DTYPES

    if isinstance(value, str):
        return DTYPES.parse(value) or value
    dtype = DTYPES.from_any(value)
    if dtype is None:
        raise make_type_error(value, parameter, "a dtype ('bfloat16', np.float16, torch.bfloat16)")
    return dtype


def check_dtypes(value: object, parameter: str) -> DType | str | dict[str, DType | str]:
    """Return a dtype, or the dtypes of a dict whose keys are patterns of names."""
    if not isinstance(value, Mapping):
        return check_dtype(value, parameter)
    dtypes: dict[str, DType | str] = {}
    for pattern, dtype in check_named_values(value, parameter).items():
        dtypes[pattern] = check_dtype(dtype, f"{parameter}{{{pattern!r}: …}}")
    return dtypes


def check_patterns(value: object, parameter: str) -> tuple[str, ...]:
    """Return patterns of names as a tuple. A single pattern is accepted without a list."""
    if isinstance(value, str):
        return (str(value),)
    patterns: list[str] = []
    for pattern in list_items(value, parameter, "a pattern, or a list of them"):
        if not isinstance(pattern, str):
            raise make_type_error(pattern, parameter, "patterns of names, which are text")
        patterns.append(str(pattern))
    return tuple(patterns)


def check_renames(value: object, parameter: str) -> tuple[tuple[str, str], ...]:
    """Return renames as pairs of an old and a new name.

    A dict, a list of pairs and a single pair are accepted. A pair may also be written as the text
    'OLD=NEW', as on the command line.
    """
    expected = "{'old': 'new'}, or a list of such pairs"
    items: tuple[object, ...]
    if isinstance(value, Mapping):
        items = tuple(value.items())
    elif isinstance(value, str):
        items = (value,)
    else:
        items = list_items(value, parameter, expected)

    # Two plain names are one pair, and not a list of two pairs.
    if len(items) == 2 and all(isinstance(item, str) and "=" not in item for item in items):
        items = (items,)

    renames: list[tuple[str, str]] = []
    for item in items:
        pair = item.split("=", 1) if isinstance(item, str) else item
        match pair:
            case [str(old), str(new)]:
                renames.append((str(old), str(new)))
            case _:
                message = f"{parameter} takes {expected}, and {describe_value(item)} is not a pair of names"
                raise BadArgumentType(message, found=value)
    return tuple(renames)


def check_texts(value: object, parameter: str) -> dict[str, str]:
    """Check that a value is a dict of text, as the metadata of a file is, and return a copy."""
    if not isinstance(value, Mapping):
        raise make_type_error(value, parameter, "a dict of text")
    for key, item in value.items():
        if isinstance(key, str) and isinstance(item, str):
            continue
        entry = f"the key {describe_value(key)}"
        if isinstance(key, str):
            entry = f"{key!r}: {describe_value(item)}"
        raise BadArgumentType(
            f"{parameter} takes a dict of text, and {entry} is not text; convert it with str(…) or "
            "json.dumps(…), or put it into the state itself",
            found=value,
        )
    return dict(value)


def check_group(value: object, parameter: str) -> object:
    """Check that a value is a `Group`, or a process group of torch, and return it."""
    is_group = all(hasattr(value, member) for member in ("rank", "size", "begin"))
    torch_distributed = sys.modules.get("torch.distributed")
    if is_group or (torch_distributed and isinstance(value, torch_distributed.ProcessGroup)):
        return value
    raise make_type_error(
        value, parameter, "a process group, or the result of holdfast.torch.group()"
    )


def check_map(value: object, parameter: str) -> object:
    """Check that a value is a layout map (`Map`) or the name of one, and return it."""
    if isinstance(value, str) or hasattr(value, "through"):
        return value
    raise make_type_error(value, parameter, "the name of a map (qwen3:hf:megatron), or a Map")


check_size = parse_nbytes


def check_count(value: object, parameter: str) -> int:
    """Return a whole number from 1 on, such as a number of threads."""
    return parse_count(value, parameter, maximum=MAX_COUNT)


def check_bin_count(value: object, parameter: str) -> int:
    """Return the number of bins of a histogram. 0 stands for no histogram."""
    return parse_count(value, parameter, minimum=0, maximum=MAX_COUNT)


def check_limits(value: object, parameter: str) -> Limits:
    """Check that a value is a `Limits`, and return it."""
    if not isinstance(value, Limits):
        raise make_type_error(value, parameter, "a holdfast.Limits, such as Limits(files=200_000)")
    return value


def check_progress(value: object, parameter: str) -> Callable[[int], None] | None:
    """Check that a value is a progress callback, and return it. False stands for none."""
    if value is None or value is False:
        return None
    if callable(value):
        # Its parameters are only known when it is called.
        return value
    message = f"{parameter} takes a function of a number of bytes, not {describe_value(value)}"
    if value is True:
        # Other libraries show a progress bar for `progress=True`.
        message += "; with tqdm: progress=tqdm(unit='B', unit_scale=True).update"
    raise BadArgumentType(message, found=value)


def make_rules_check(rule_type: type) -> ArgumentCheck:
    """Return a check for rules, such as those of `prune`.

    The check accepts one rule or a list of them, each an object of `rule_type` or text. In a dict,
    `{pattern: method}` stands for the text "pattern: method".
    """
    expected = "rules, which are text like 'PATTERN: METHOD'"

    def check_rules(value: object, parameter: str) -> tuple[object, ...]:
        """Return one rule or several rules as a tuple."""
        if isinstance(value, Mapping):
            return tuple(f"{pattern}: {method}" for pattern, method in value.items())
        if isinstance(value, str | rule_type):
            return (value,)
        rules = list_items(value, parameter, expected)
        for rule in rules:
            if not isinstance(rule, str | rule_type):
                raise make_type_error(rule, parameter, expected)
        return rules

    return check_rules


def make_choice_check(*choices: str) -> ArgumentCheck:
    """Return a check for one of a few words."""
    *first_words, last_word = map(repr, choices)
    expected = f"{', '.join(first_words)} or {last_word}"

    def check_choice(value: object, parameter: str) -> str:
        if not isinstance(value, str):
            raise make_type_error(value, parameter, expected)
        if value not in choices:
            raise BadArgument(
                f"{parameter} takes {expected}, not {describe_value(value)}", found=value
            )
        return value

    return check_choice


def check_allowed(value: object, parameter: str) -> object:
    """Return accepted findings of a scan: the path of a file of patterns, or the patterns."""
    if isinstance(value, str | os.PathLike):
        return value
    return check_patterns(value, parameter)


def check_mesh(value: object, parameter: str) -> dict[str, int] | str:
    """Return the sizes of a mesh by axis. Text like "dp=2,tp=4" is parsed later, by `reshard`."""
    if isinstance(value, str):
        return value
    return check_counts(value, parameter)


def check_counts(value: object, parameter: str) -> dict[str, int]:
    """Return a dict of whole numbers from 1 on."""
    counts: dict[str, int] = {}
    for key, item in check_named_values(value, parameter).items():
        counts[key] = parse_count(item, f"{parameter}{{{key!r}: …}}")
    return counts


def check_step(value: object, parameter: str) -> int:
    """Return the number of a training step."""
    return parse_count(value, parameter, minimum=0, maximum=MAX_STEP)


def check_metrics(value: object, parameter: str) -> dict[str, float]:
    """Return metrics by name as floats.

    A value may be any object that converts to a float, such as a number of numpy or a tensor
    without dimensions. NaN is accepted.
    """
    metrics: dict[str, float] = {}
    for key, item in check_named_values(value, parameter).items():
        metric = None
        # Text converts to a float as well, but it does not support `__float__`.
        if isinstance(item, SupportsFloat):
            metric = to_float(item)
        if metric is None:
            message = f"{parameter} takes a dict of numbers, and {key!r} is {describe_value(item)}"
            raise BadArgumentType(message, found=value)
        metrics[key] = metric
    return metrics


def check_extra_files(value: object, parameter: str) -> dict[str, str | bytes]:
    """Return the contents of files by name, each as text or bytes."""
    contents: dict[str, str | bytes] = {}
    for key, item in check_named_values(value, parameter).items():
        if not isinstance(item, str | bytes):
            message = (
                f"{parameter} takes a dict of text or bytes, and {key!r} is {describe_value(item)}"
            )
            raise BadArgumentType(message, found=value)
        contents[key] = item
    return contents


def check_mapping(value: object, parameter: str) -> Mapping[object, object]:
    """Check that a value is a dict, and return it."""
    if not isinstance(value, Mapping):
        raise make_type_error(value, parameter, "a dict with values by name")
    return value


def check_named_values(value: object, parameter: str) -> dict[str, object]:
    """Check that a value is a dict whose keys are text, and return a copy."""
    named_values: dict[str, object] = {}
    for key, item in check_mapping(value, parameter).items():
        if not isinstance(key, str):
            raise make_type_error(key, parameter, "a dict whose keys are text")
        named_values[key] = item
    return named_values


def list_items(value: object, parameter: str, expected: str) -> tuple[object, ...]:
    """Return the items of a list or another collection. `expected` describes it in messages."""
    is_single_value = isinstance(value, bytes | bytearray | memoryview | Mapping | os.PathLike)
    if isinstance(value, Iterable) and not is_single_value:
        try:
            return tuple(value)
        except TypeError:
            # A tensor without dimensions claims to be iterable, and cannot be iterated.
            pass
    raise make_type_error(value, parameter, expected)
