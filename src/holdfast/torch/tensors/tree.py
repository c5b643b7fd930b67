"""The tree of a checkpoint for torch: find a value by its dotted name, and put torch's tensors in place of lazy ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from holdfast.core.dtype import DType
from holdfast.core.opaque import Device, Global, Opaque, Size
from holdfast.core.tensor import Composite, LazyTensor, Traits
from holdfast.core.tree import (
    LinkedPath,
    copy_with_children,
    get_keys_and_values,
    iterate_values,
    list_module_contents,
    rebuild,
    walk,
)
from holdfast.errors import LimitExceeded
from holdfast.torch.tensors.from_lazy import torch_dtype

DEEPEST = 100
"""The most levels of a value that is no tensor. Python's stack is finite."""

ABSENT = object()
"""Given by `find_value` where there is nothing; None is a value."""


def find_value(tree: object, name: str) -> object:
    """The value of a dotted name. Keys may have dots in them; the longest key that leads to a value is taken.

    >>> find_value({"a.b": {"c": [7]}}, "a.b.c.0")
    7
    """
    tried: set[tuple[int, int]] = set()
    around: list[tuple[object, int, int]] = []
    """The containers above, and the range of the name to try next in each, where this key leads nowhere."""
    value, start, stop = tree, 0, len(name)
    while stop > start or around:
        if stop <= start:
            value, start, stop = around.pop()
            continue
        inner, end = _child(value, name[start:stop]), stop
        stop = name.rfind(".", start, stop)
        if inner is not ABSENT and end == len(name):
            return inner
        if inner is not ABSENT and (id(inner), end) not in tried:
            tried.add((id(inner), end))
            around.append((value, start, stop))
            value, start, stop = inner, end + 1, len(name)
    return ABSENT


def dict_under(tree: object, prefix: str) -> tuple[dict[object, object], str]:
    """The innermost dict that a prefix leads into, and what is left of the prefix: the beginning of its keys.

    >>> dict_under({"model": {"module.w": 1}}, "model.module.")
    ({'module.w': 1}, 'module.')
    """
    here: dict[object, object] = tree if isinstance(tree, dict) else {}
    while True:
        for key, inner in here.items():
            if isinstance(key, str) and isinstance(inner, dict) and prefix.startswith(f"{key}."):
                here, prefix = inner, prefix[len(key) + 1 :]
                break
        else:
            return here, prefix


def _child(value: object, key: str) -> object:
    number = int(key) if key.isascii() and key.isdigit() and len(key) < 10 else None
    match value:
        case dict():
            return (
                value[key]
                if key in value
                else value.get(number, ABSENT)
                if number is not None
                else ABSENT
            )
        case list() | tuple():
            return value[number] if number is not None and number < len(value) else ABSENT
        case Opaque():
            groups = list_module_contents(value) or ()
            found = (
                group[key]
                for group, _ in groups
                if isinstance(group, dict) and group.get(key) is not None
            )
            return next(found, ABSENT)
        case _:
            return ABSENT


def lazy_tensors(tree: object) -> Iterator[LazyTensor]:
    """Every lazy tensor in a tree that `torch_tree` would replace, each object once; not the parts of composites."""
    return iter(
        {
            id(value): value for value in iterate_values(tree) if isinstance(value, LazyTensor)
        }.values()
    )


def opaque_inside(tree: object) -> bool:
    """Whether a tree has an object that was not built."""
    return any(isinstance(value, Opaque) for value in iterate_values(tree))


def unbuilt(value: object) -> str | None:
    """Why a value cannot be built; None where it can. Picklers are recursive, so levels are counted."""
    try:
        inside = (inner for _, inner in walk(value, get_keys_and_values, max_depth=DEEPEST))
        found = next((inner for inner in inside if isinstance(inner, Opaque | Global)), None)
    except LimitExceeded:
        return f"a value that is nested deeper than {DEEPEST} levels"
    return None if found is None else f"an object that Holdfast does not build ({found!r:.80})"


def torch_tree(tree: object, tensor: Callable[[LazyTensor | Composite], torch.Tensor]) -> object:
    """A copy of a tree with torch's tensors, sizes, dtypes and devices in it; `tensor` gives the tensor for one of ours.

    Parameters are parameters, and gradients are required, as before. A value in two places stays one. Objects that were not built
    stay as they are.
    """
    made: dict[int, object] = {}

    def leaf(value: object, _: LinkedPath) -> object:
        match value:
            case LazyTensor() | Composite():
                if id(value) not in made:
                    made[id(value)] = _with_traits(tensor(value), value.traits)
                return made[id(value)]
            case Size():
                return made.setdefault(id(value), torch.Size(value))
            case DType():
                return torch_dtype(value)
            case Device():
                return torch.device(str(value))
        return value

    return rebuild(tree, leaf, make_container=copy_with_children)


def _with_traits(tensor: torch.Tensor, traits: Traits) -> torch.Tensor:
    grad = traits.requires_grad and (tensor.is_floating_point() or tensor.is_complex())
    if traits.parameter:
        return torch.nn.Parameter(tensor, requires_grad=grad)
    if traits.buffer:
        return torch.nn.Buffer(tensor)
    return tensor.requires_grad_() if grad else tensor
