"""The tree of a checkpoint for torch: find a value by its dotted name, and put torch's tensors in place of lazy ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from holdfast.core.dtype import DType
from holdfast.core.opaque import Device, Global, Opaque, Size
from holdfast.core.tensor import Composite, LazyTensor, Traits
from holdfast.core.tree import levels, module_contents, refilled, values_inside
from holdfast.torch import versions
from holdfast.torch.tensors.from_lazy import torch_dtype

DEEPEST = 100
"""Levels of a value that is no tensor. Python's stack is finite."""

ABSENT = object()
"""What `find_value` gives where there is nothing; None is a value."""


def find_value(tree: object, name: str) -> object:
    """What stands under a dotted name. Keys may have dots in them; the longest key that leads somewhere is taken.

    >>> find_value({"a.b": {"c": [7]}}, "a.b.c.0")
    7
    """
    return _descend(tree, 0, name=name, tried=set())


def _descend(value: object, start: int, *, name: str, tried: set[tuple[int, int]]) -> object:
    if start > len(name):
        return value
    if (id(value), start) in tried:
        return ABSENT
    tried.add((id(value), start))
    stop = len(name)
    while stop > start:
        inner = _child(value, name[start:stop])
        found = _descend(inner, stop + 1, name=name, tried=tried) if inner is not ABSENT else ABSENT
        if found is not ABSENT:
            return found
        stop = name.rfind(".", start, stop)
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
            return value[key] if key in value else value.get(number, ABSENT) if number is not None else ABSENT
        case list() | tuple():
            return value[number] if number is not None and number < len(value) else ABSENT
        case Opaque():
            groups = module_contents(value) or ()
            found = (group[key] for group, _ in groups if isinstance(group, dict) and group.get(key) is not None)
            return next(found, ABSENT)
        case _:
            return ABSENT


def lazy_tensors(tree: object) -> Iterator[LazyTensor]:
    """Every lazy tensor in a tree that `torch_tree` would replace, each object once; parts of composites are no part of it."""
    return iter({id(value): value for value in values_inside(tree) if isinstance(value, LazyTensor)}.values())


def opaque_inside(tree: object) -> bool:
    """Whether there is anything in a tree that was not built."""
    return any(isinstance(value, Opaque) for value in values_inside(tree))


def unbuilt(value: object) -> str | None:
    """Why a value cannot be had as it was; None where it can. `torch_tree` and picklers are recursive."""
    for inner, depth in levels(value):
        if depth > DEEPEST:
            return f"a value that is nested deeper than {DEEPEST} levels"
        if isinstance(inner, Opaque | Global):
            return f"an object that Holdfast does not build ({inner!r:.80})"
    return None


def torch_tree(tree: object, tensor: Callable[[LazyTensor | Composite], torch.Tensor]) -> object:
    """The same tree with torch's tensors, sizes, dtypes and devices in it; `tensor` gives what stands for one of ours.

    What was an `nn.Parameter` or required gradients does so again. What stands in two places still does. Objects that were not
    built stay as they are.
    """
    return _Torch(tensor).walk(tree)


class _Torch:
    """One walk of `torch_tree`."""

    def __init__(self, tensor: Callable[[LazyTensor | Composite], torch.Tensor]) -> None:
        self._tensor = tensor
        self._made: dict[int, object] = {}

    def walk(self, value: object) -> object:
        if isinstance(value, DType):
            return torch_dtype(value)
        if isinstance(value, Device):
            return torch.device(str(value))
        if not isinstance(value, LazyTensor | Composite | dict | list | tuple):
            return value
        if id(value) not in self._made:
            self._made[id(value)] = self._inside(value)
        return self._made[id(value)]

    def _inside(self, value: object) -> object:
        walk, made = self.walk, self._made
        match value:
            case LazyTensor() | Composite():
                return _with_traits(self._tensor(value), value.traits)
            case Size():
                return torch.Size(value)
            case dict():
                # Known before it is filled: a dict may contain itself.
                copy = made[id(value)] = refilled(value, {})
                for key, inner in value.items():
                    copy[key] = walk(inner)
                return copy
            case list() if type(value) is list:
                items: list[object] = []
                made[id(value)] = items
                items += [walk(inner) for inner in value]
                return items
            case tuple() if type(value) is tuple:
                return tuple([walk(inner) for inner in value])
        return value


def _with_traits(tensor: torch.Tensor, traits: Traits) -> torch.Tensor:
    grad = traits.requires_grad and (tensor.is_floating_point() or tensor.is_complex())
    if traits.parameter:
        return torch.nn.Parameter(tensor, requires_grad=grad)
    if traits.buffer and versions.BUFFER:
        return torch.nn.Buffer(tensor)
    return tensor.requires_grad_() if grad else tensor
