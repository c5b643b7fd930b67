"""A nested state as torch's distributed checkpoint flattens it: every leaf under one flat name, non-tensors as archives.

    {"optim": {3: {"lr": 0.1}}, "list": [tensor, {}]}     "optim.3.lr"   ("optim", "3", "lr")     a value
                                                          "list.0"       ("list", 0)              a tensor
                                                          "list.1"       ("list", 1)              a value: an empty mapping

Mappings are entered, and their keys become text; lists are entered where a tensor or a mapping is in them; tuples never (torch
2.13, `_traverse.py`). torch drops empty mappings; here they are values. A value is a `torch.save` of the caller's own object.

`dcp_index` makes the index of a DCP directory, of torch's own classes: no other pickle is understood by torch's reader.
"""

from __future__ import annotations

import hashlib
import io
import pickle
import struct
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, cast

import msgspec
import numpy as np
import torch
from msgspec import Struct, field
from torch.distributed.checkpoint import metadata as m
from torch.distributed.checkpoint.filesystem import _StorageInfo

from holdfast.core import value as values
from holdfast.core.arrays import Ints
from holdfast.core.dtype import DTYPES
from holdfast.core.leaves import PLAIN, Leaves
from holdfast.core.limits import DEFAULTS
from holdfast.core.protocols import State
from holdfast.core.table import Table
from holdfast.core.tensor import Composite, LazyTensor
from holdfast.core.tree import Path, Unrolled, dotted, every_child, unroll, values_inside, walk
from holdfast.engine.stream import write_stream
from holdfast.engine.table import value_state
from holdfast.formats.native.manifest import as_column
from holdfast.formats.pickle.writer import ENDS_IN_NUL, ends_in_nul
from holdfast.formats.sharded import Contents, Delivered
from holdfast.formats.torch.write import lay_out_torch_zip
from holdfast.formats.tree_json.encode import encode_value
from holdfast.formats.tree_json.scalars import NO_UNICODE, is_unicode
from holdfast.saving.rows import lazy_tree
from holdfast.saving.state import tabulate_state
from holdfast.torch import versions
from holdfast.torch.serialization.pickling import StorageIds, pickle_object
from holdfast.torch.serialization.save import plan_object
from holdfast.torch.tensors.from_lazy import torch_dtype

REMEDY = "give its class state_dict() and load_state_dict(), or put the tensors into the state under names of their own"
"""Advice about an object with tensors in it."""


NUMPY_TAG = b'"numpy.'
"""In the JSON of every element of numpy."""


class Value(values.Value, frozen=True):
    """A leaf that is no tensor."""

    raw: object
    described: object
    """The object without torch's classes."""

    def digest(self) -> bytes:
        """A hash that is the same on every rank that has an equal value. Raises ValueError for one that cannot be pickled."""
        encoded = encode_value(self.described)
        # A pickle of equal values may differ: it tells whether two equal strings in them are one object.
        content = self._pickled() if encoded.problems else msgspec.json.encode(encoded.value)
        if NUMPY_TAG in content and any(ends_in_nul(one) for _, one in walk(self.described, every_child)):
            raise ValueError(ENDS_IN_NUL)
        return hashlib.blake2b(content, digest_size=16).digest()

    def _pickled(self) -> bytes:
        ids = StorageIds()
        kind = type(self.raw).__name__
        try:
            content = pickle_object(self.raw, ids, pickle_module=pickle, protocol=pickle.DEFAULT_PROTOCOL)
        except Exception as error:  # whatever the object's own methods raise
            raise ValueError(f"a {kind} that cannot be pickled ({type(error).__name__}: {error})") from error
        if ids.storages:
            raise ValueError(f"a {kind} with tensors in it, which would be out of reach in a pickle; {REMEDY}")
        return content

    def archive(self) -> bytes:
        """The bytes of `torch.save` for it; later changes of the object do not reach them."""
        out = io.BytesIO()
        # Values of an open checkpoint stand for torch's own, and are written as those.
        opened = any(type(one).__module__.split(".")[0] == "holdfast" for _, one in walk(self.raw, every_child))
        plan = lay_out_torch_zip(value_state(self.described)) if opened else plan_object(self.raw, None)
        write_stream(plan.files[0], out)
        return out.getvalue()


class FlatState(Struct):
    """A state by flat names."""

    values: dict[str, Value] = field(default_factory=dict)
    paths: dict[str, Path] = field(default_factory=dict)
    pickled: set[str] = field(default_factory=set)
    """Arrays in tuples: they are pickled with the tuple, as torch does it, and are no tensors there."""
    problems: list[str] = field(default_factory=list)
    """What DCP has no form for."""

    def digests(self) -> dict[str, bytes]:
        """A hash of every value; what must not be pickled becomes a problem."""
        found = {}
        for name, value in self.values.items():
            try:
                found[name] = value.digest()
            except ValueError as error:
                self.problems.append(f"{name}: {error}")
        return found


def flatten(state: State, raw: object) -> FlatState:
    """Flatten a described state. `raw` is what it describes."""
    flat = FlatState()
    unroll(_Flattening(flat, state.leaves).take(state.tree, raw, ()))
    for name in [name for name in state.tensors if name not in flat.paths]:
        path = tuple(name.split("."))
        above = (flat.values.get(dotted(path[:i])) for i in range(len(path)))
        holder = next(filter(None, above), None)
        if holder is not None and not any(isinstance(inner, torch.Tensor | LazyTensor) for inner in values_inside(holder.raw)):
            flat.pickled.add(name)
        else:
            flat.problems.append(f"{name}: a tensor inside of a tuple; make it a list")
    return flat


def common_problems(state: State, table: Table, flat: FlatState) -> list[str]:
    """Problems with a state that no message between ranks, or no format, could hold."""
    problems = [f"metadata {key!r}: no Unicode text" for key, text in state.metadata.items() if not is_unicode(key + text)]
    most = DEFAULTS.rank
    wrong = {k: kind for k, kind in enumerate(table.kinds) if kind.traits.meta or len(kind.shape) > most}
    for name, kind in zip(table.names, table.kind, strict=True) if wrong else ():
        if kind in wrong and wrong[kind].traits.meta:
            problems.append(f"{name}: it is on the meta device, without data")
        if kind in wrong and len(wrong[kind].shape) > most:
            problems.append(f"{name}: {len(wrong[kind].shape)} dimensions are more than Limits(rank={most})")
    if is_unicode("".join(table.names)) and is_unicode("".join(flat.paths)):
        return problems
    names = dict.fromkeys([*table.names, *flat.paths])
    return problems + [f"{name}: {NO_UNICODE}" for name in names if not is_unicode(name)]


class _Flattening:
    """One walk through a described state and the caller's own, together."""

    def __init__(self, flat: FlatState, leaves: Leaves) -> None:
        self._flat, self._leaves = flat, leaves
        self._plain = not leaves.odd and not leaves.composites()

    def take(self, value: object, raw: object, path: Path) -> Unrolled[None]:
        inside = self._pairs(value, raw, path)
        if inside is None:
            self._add(value, raw, path)
        for key, inner, own in inside or ():
            if isinstance(inner, Mapping | list):
                yield self.take(inner, own, (*path, key))
            else:
                self._add(inner, own, (*path, key))

    def _pairs(self, value: object, raw: object, path: Path) -> Iterable[tuple[str | int, object, object]] | None:
        """The children of a mapping or a list that is entered: key, described value, the caller's own; None for a leaf."""
        if isinstance(value, Mapping) and isinstance(raw, Mapping) and (value or not path):
            return () if self._all_tensors(value, path) else zip(map(str, value), value.values(), raw.values(), strict=True)
        if isinstance(value, list) and isinstance(raw, list) and self._is_entered(value):
            return zip(range(len(value)), value, raw, strict=True)
        return None

    def _add(self, value: object, raw: object, path: Path) -> None:
        flat, made = self._flat, self._described(value)
        name = ".".join(map(str, path))
        if name in flat.paths:
            flat.problems.append(f"{name}: the name of two things")
        flat.paths[name] = path
        if isinstance(made, Composite):
            flat.problems.append(f"{name}: a {made.kind} tensor")
            flat.paths |= {f"{name}.{part}": (*path, part) for part in made.parts}
        elif not isinstance(made, LazyTensor) and not self._leaves.is_tensor(value):
            flat.values[name] = Value(raw, made)

    def _all_tensors(self, value: Mapping[object, object], path: Path) -> bool:
        """Take a mapping of plain tensors as a whole; False where it is another one, and nothing is done."""
        leaves, flat = self._leaves, self._flat
        if not self._plain or not value or not leaves.kinds.issuperset(map(type, value.values())):
            return False
        before = "".join([f"{key}." for key in path])
        names = {f"{before}{key}": (*path, str(key)) for key in value}
        if len(names) < len(value) or not flat.paths.keys().isdisjoint(names):
            return False
        flat.paths |= names
        return True

    def _described(self, value: object) -> object:
        # Without types of tensors it is the tree of a checkpoint.
        if not self._leaves.kinds or type(value) in PLAIN:
            return value
        if isinstance(value, Mapping | list | tuple):
            plain = PLAIN.issuperset(map(type, value)) and not isinstance(value, Mapping)
            return value if plain else lazy_tree(tabulate_state(value))
        return self._leaves.described(value)

    def _is_entered(self, value: object) -> bool:
        leaves = self._leaves
        inside = (inner for _, inner in walk(value, lambda one: enumerate(one) if isinstance(one, list) else None))
        return any(isinstance(leaves.described(one), LazyTensor | Composite | Mapping) or leaves.is_tensor(one) for one in inside)


def pickled_index(metadata: m.Metadata) -> bytes:
    """An index as every torch understands it."""
    if not versions.STRIDES:
        return pickle.dumps(metadata)
    out = io.BytesIO()
    _Pickler(out).dump(metadata)
    return out.getvalue()


class _Pickler(pickle.Pickler):
    """Leaves out the strides that torch 2.15 adds to the properties of a tensor: older versions refuse them, none needs them."""

    def reducer_override(self, obj: object) -> Any:  # noqa: ANN401 (the pickler's own)
        if type(obj) is not m.TensorProperties:
            return NotImplemented
        made, args, state, *_ = cast(tuple[Any, ...], obj.__reduce_ex__(pickle.DEFAULT_PROTOCOL))
        return made, args, state[:5]
