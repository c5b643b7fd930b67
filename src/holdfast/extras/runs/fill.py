"""A checkpoint into a state that is there: arrays are filled where they are, other values are replaced.

    into        {"w": array, "step": 0}                 checkpoint   {"w": LazyTensor, "step": 900}
    afterwards  {"w": the same array, filled, "step": 900}

Everything is compared before anything is read: names that one side lacks, shapes and dtypes that differ, all of them in one
error. Then the checksums of all that is to be read are compared, and only then is it read: a step that is damaged leaves the
state as it was. (The alternative to the second reading is room for a second state.) Dicts and lists are changed in place, and
objects with `load_state_dict` are handed theirs; tuples, and a state that is no container, are given back new.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from typing import cast

import numpy as np
from msgspec import Struct

from holdfast.core.checkpoint import Checkpoint
from holdfast.core.protocols import Request, group_by_source
from holdfast.core.tensor import Composite, LazyTensor
from holdfast.core.text import list_names
from holdfast.core.tree import (
    LinkedPath,
    Unrolled,
    join_linked_path,
    make_plain_container,
    rebuild,
    unroll,
)
from holdfast.core.value import Value
from holdfast.engine.checksums import check_before_reading
from holdfast.errors import Corrupted, DoesNotFit, FormatError, HoldfastError, Unsupported
from holdfast.verbs.shared.state import Stateful, is_stateful, unwrap_module


class Fit(Struct):
    """The differences between a state and a checkpoint, and the requests for what fits."""

    requests: list[Request] = []
    missing: list[str] = []
    unexpected: list[str] = []
    mismatched: dict[str, str] = {}


class HeldState(Value):
    """An object with `load_state_dict`, and the state that it is to be given."""

    into: object
    keeps: Stateful
    own: object
    made: object


def loaded(checkpoint: Checkpoint) -> object:
    """All of a checkpoint, with arrays in the places of its tensors."""
    fit = Fit()
    tree = _new(checkpoint.tree, fit)
    with unharmed():
        _read(fit)
    return tree


@contextmanager
def unharmed() -> Iterator[None]:
    """A block in which nothing of a state is changed: errors about damage say so, and what to do."""
    try:
        yield
    except (Corrupted, FormatError) as error:
        error.message += "; the state is as it was, and resume(deep=True) passes over this step"
        raise


@contextmanager
def changing() -> Iterator[None]:
    """A block in which a state is filled: errors say that a part of it has been."""
    try:
        yield
    except HoldfastError as error:
        error.message += "; a part of the state has been filled: resume again before it is used"
        raise


def fill(into: object, checkpoint: Checkpoint, *, checked: bool = False) -> object:
    """Fill a state from a checkpoint, and give it back. `checked` where every byte of it has just been read back.

    Raises `DoesNotFit`, and `Corrupted` for a checksum that does not match, before anything was changed.
    """
    fit = Fit()
    made = unroll(_fitted(into, checkpoint.tree, None, fit))
    if fit.missing or fit.unexpected or fit.mismatched:
        parts = (
            [f"the step does not have {list_names([*map(repr, fit.missing)], 3)}"]
            if fit.missing
            else []
        )
        parts += (
            [f"only the step has {list_names([*map(repr, fit.unexpected)], 3)}"]
            if fit.unexpected
            else []
        )
        parts += [f"{name}: {why}" for name, why in list(fit.mismatched.items())[:3]]
        message = f"the state and the step do not go together: {'; '.join(parts)}"
        wrong = {"missing": fit.missing, "unexpected": fit.unexpected}
        raise DoesNotFit(message, **wrong, mismatched=fit.mismatched, file=checkpoint.path)
    if not checked:
        with unharmed():
            check_before_reading(fit.requests)
    with changing():
        _read(fit)
    return unroll(_placed(into, made))


def _read(fit: Fit) -> None:
    for source, requests in group_by_source(fit.requests).items():
        source.read(requests)


def _new(found: object, fit: Fit) -> object:
    """A value of a checkpoint in plain containers, with arrays for its tensors: one array, where a container stands twice."""

    def leaf(value: object, _: LinkedPath) -> object:
        if isinstance(value, Composite):
            raise Unsupported(
                f"a {value.kind} tensor has no array; use holdfast.torch.Run", found=value.kind
            )
        if not isinstance(value, LazyTensor):
            return value
        fit.requests.append(Request(value, value.empty()))
        return fit.requests[-1].out

    return rebuild(found, leaf, make_container=make_plain_container)


def _fitted(into: object, found: object, way: LinkedPath, fit: Fit) -> Unrolled[object]:
    """The value that replaces `into`: itself, where it is filled in place."""
    if isinstance(into, np.ndarray) and isinstance(found, LazyTensor):
        _request(into, found, way, fit)
        return into
    if is_stateful(into):
        keeps = unwrap_module(cast(Stateful, into))
        own = keeps.state_dict()
        return HeldState(into, keeps, own, (yield _fitted(own, found, way, fit)))
    if hasattr(into, "__dlpack__") and not isinstance(into, np.ndarray | np.generic):
        fit.mismatched[join_linked_path(way)] = (
            f"a {type(into).__name__} is filled by holdfast.torch.Run, not by holdfast.Run"
        )
        return into
    if isinstance(into, Mapping) and isinstance(found, Mapping):
        fit.missing += [join_linked_path((way, key)) for key in into if key not in found]
        fit.unexpected += [join_linked_path((way, key)) for key in found if key not in into]
        made: dict[object, object] = {}
        for key in [key for key in into if key in found]:
            made[key] = yield _fitted(into[key], found[key], (way, key), fit)
        return made
    if (
        isinstance(into, list | tuple)
        and isinstance(found, list | tuple)
        and type(into) in (list, tuple)
    ):
        if len(into) != len(found):
            fit.mismatched[join_linked_path(way)] = (
                f"{len(into)} items, and the step has {len(found)}"
            )
            return into
        rows: list[object] = []
        for i, (one, other) in enumerate(zip(into, found, strict=True)):
            rows.append((yield _fitted(one, other, (way, i), fit)))
        return rows
    if (
        isinstance(into, Mapping | list | tuple | np.ndarray)
        and type(into) is not type(found)
        and into is not None
    ):
        kind = "tensor" if isinstance(found, LazyTensor) else type(found).__name__
        fit.mismatched[join_linked_path(way)] = (
            f"a {type(into).__name__}, and the step has a {kind}"
        )
        return into
    return _new(found, fit)


def _request(into: np.ndarray, found: LazyTensor, way: LinkedPath, fit: Fit) -> None:
    if into.shape != found.shape:
        fit.mismatched[join_linked_path(way)] = (
            f"its shape is {list(into.shape)}, and the step has {list(found.shape)}"
        )
    elif into.dtype != found.dtype.numpy:
        fit.mismatched[join_linked_path(way)] = (
            f"its dtype is {into.dtype}, and the step has {found.dtype}"
        )
    elif not into.flags.writeable:
        fit.mismatched[join_linked_path(way)] = "it cannot be written to"
    else:
        fit.requests.append(Request(found, into))


def _placed(into: object, made: object) -> Unrolled[object]:
    if isinstance(made, HeldState):
        made.keeps.load_state_dict((yield _placed(made.own, made.made)))
        return made.into
    if isinstance(into, MutableMapping) and isinstance(made, dict):
        for key, value in made.items():
            into[key] = yield _placed(into[key], value)
        return into
    if isinstance(into, list | tuple) and isinstance(made, list) and len(into) == len(made):
        rows: list[object] = []
        for one, other in zip(into, made, strict=True):
            rows.append((yield _placed(one, other)))
        if isinstance(into, tuple):
            return tuple(rows)
        into[:] = rows
        return into
    if isinstance(into, np.generic) and isinstance(made, np.ndarray) and not made.ndim:
        return made[()]
    return made
