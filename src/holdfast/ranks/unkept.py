"""What of a state the formats of other programs have no place for, said in the notes of a sharded save."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from holdfast.core.protocols import State
from holdfast.core.tree import values_inside
from holdfast.formats.safetensors.write import is_flat

__all__ = ["unkept_notes"]

SHOWN = 3
"""Places that a note names."""


def unkept_notes(state: State, format: str) -> tuple[str, ...]:
    """Sentences about what does not come back from this format as it was."""
    notes = list(state.notes)
    if format == "safetensors":
        wanted = [name for name, tensor in state.tensors.items() if tensor.traits.requires_grad or tensor.traits.parameter]
        notes += _said(wanted, "safetensors files of ranks do not say that {} is a Parameter or requires a gradient")
        if not wanted and not is_flat(state):
            notes.append("safetensors files of ranks keep dotted names, and not the containers around them")
    if format == "dcp":
        wanted = [name for name, tensor in state.tensors.items() if tensor.traits.parameter]
        notes += _said(wanted, "a DCP directory does not say that {} is a Parameter")
        notes += _said(list(_other_keys(state.tree)), "a DCP directory has text as keys: {} becomes text")
        notes += _said(list(_attributes(state.tree)), "a DCP directory does not keep the attributes of an OrderedDict: {}")
    return tuple(notes)


def _said(names: Sequence[str], text: str) -> list[str]:
    if not names:
        return []
    more = f" and {len(names) - SHOWN:,} more" if len(names) > SHOWN else ""
    return [text.format(", ".join(map(repr, names[:SHOWN])) + more)]


def _dicts(tree: object) -> Iterable[dict[object, object]]:
    """Every dict of a tree, once."""
    return (value for value in values_inside(tree) if isinstance(value, dict))


def _other_keys(tree: object) -> Iterable[str]:
    return (str(key)[:60] for inside in _dicts(tree) for key in inside if type(key) is not str)


def _attributes(tree: object) -> Iterable[str]:
    return dict.fromkeys(name for inside in _dicts(tree) if isinstance(inside, OrderedDict) for name in vars(inside))
