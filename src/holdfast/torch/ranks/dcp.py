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
import uuid
from collections.abc import Mapping
from typing import Any, cast

import msgspec
import torch
from msgspec import Struct, field
from torch.distributed.checkpoint import metadata as m
from torch.distributed.checkpoint.filesystem import _StorageInfo

from holdfast.core import value as values
from holdfast.core.dtype import DTYPES
from holdfast.core.leaves import PLAIN, Leaves
from holdfast.core.limits import Limits
from holdfast.core.protocols import State
from holdfast.core.table import Table
from holdfast.core.tensor import Composite, LazyTensor
from holdfast.core.tree import Path, dotted, levels, values_inside
from holdfast.engine.stream import write_stream
from holdfast.formats.native.boxes import as_column
from holdfast.formats.pickle.writer import ENDS_IN_NUL, ends_in_nul
from holdfast.formats.torch.write import lay_out_torch_zip
from holdfast.formats.tree_json.encode import encode_tree
from holdfast.formats.tree_json.scalars import NO_UNICODE, is_unicode
from holdfast.ranks.files import Contents, Delivered
from holdfast.rewrite.state import describe_state
from holdfast.torch import versions
from holdfast.torch.serialization.pickling import StorageIds, pickle_object
from holdfast.torch.serialization.save import plan_object
from holdfast.torch.tensors.from_lazy import torch_dtype

REMEDY = "give its class state_dict() and load_state_dict(), or put the tensors into the state under names of their own"
"""What to do about an object with tensors in it."""


NUMPY_TAG = b'"numpy.'
"""What the JSON of an element of numpy has in it."""


class Value(values.Value, frozen=True):
    """A leaf that is no tensor."""

    raw: object
    """The caller's own object."""
    described: object
    """The same without torch's classes."""

    def digest(self) -> bytes:
        """A hash that is the same on every rank that has an equal value. Raises ValueError for one that cannot be pickled."""
        encoded = encode_tree(self.described, {})
        # A pickle of equal values may differ: it tells whether two equal strings in them are one object.
        content = self._pickled() if encoded.problems else msgspec.json.encode(encoded.value)
        if NUMPY_TAG in content and any(ends_in_nul(value) for value, _ in levels(self.described)):
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
        """What torch.save would write for it; later changes of the object do not reach it."""
        out = io.BytesIO()
        plan = lay_out_torch_zip(State(self.described, {}, {})) if _is_opened(self.raw) else plan_object(self.raw, None)
        write_stream(plan.files[0], out)
        return out.getvalue()


class FlatState(Struct):
    """A state by flat names."""

    values: dict[str, Value] = field(default_factory=dict)
    paths: dict[str, Path] = field(default_factory=dict)
    """The path of every leaf, tensors as well."""
    pickled: set[str] = field(default_factory=set)
    """Arrays in tuples: they are pickled with the tuple, as torch does it, and are no tensors there."""
    problems: list[str] = field(default_factory=list)
    """What has no form there."""

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
    _Flattening(flat, state.leaves).walk(state.tree, raw, ())
    for name in [name for name in state.tensors if name not in flat.paths]:
        path = state.paths.get(name, tuple(name.split(".")))
        above = (flat.values.get(dotted(path[:i])) for i in range(len(path)))
        holder = next(filter(None, above), None)
        if holder is not None and not any(isinstance(inner, torch.Tensor | LazyTensor) for inner in values_inside(holder.raw)):
            flat.pickled.add(name)
        else:
            flat.problems.append(f"{name}: a tensor inside of a tuple; make it a list")
    return flat


def common_problems(state: State, table: Table, flat: FlatState) -> list[str]:
    """What no rank could say to the others, or no format could hold."""
    problems = [f"metadata {key!r}: no Unicode text" for key, text in state.metadata.items() if not is_unicode(key + text)]
    most = Limits().rank
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
    """One walk through a described state and what it describes, together."""

    def __init__(self, flat: FlatState, leaves: Leaves | None) -> None:
        self._flat, self._leaves = flat, leaves

    def walk(self, value: object, raw: object, path: Path) -> None:
        if isinstance(value, Mapping) and isinstance(raw, Mapping) and (value or not path):
            if not self._all_tensors(value, path):
                for (key, inner), own in zip(value.items(), raw.values(), strict=True):
                    self.walk(inner, own, (*path, str(key)))
            return
        if isinstance(value, list) and isinstance(raw, list) and self._is_entered(value):
            for i, (inner, own) in enumerate(zip(value, raw, strict=True)):
                self.walk(inner, own, (*path, i))
            return
        flat, made = self._flat, self._described(value)
        name = ".".join(map(str, path))
        if name in flat.paths:
            flat.problems.append(f"{name}: the name of two things")
        flat.paths[name] = path
        if isinstance(made, Composite):
            flat.problems.append(f"{name}: a {made.kind} tensor")
            flat.paths |= {f"{name}.{part}": (*path, part) for part in made.parts}
        elif not isinstance(made, LazyTensor) and not (self._leaves is not None and self._leaves.is_tensor(value)):
            flat.values[name] = Value(raw, made)

    def _all_tensors(self, value: Mapping[object, object], path: Path) -> bool:
        """Take a mapping of plain tensors as a whole; False where it is another one, and nothing is done."""
        leaves, flat = self._leaves, self._flat
        if leaves is None or leaves.odd or not value or not leaves.kinds.issuperset(map(type, value.values())):
            return False
        before = "".join([f"{key}." for key in path])
        names = {f"{before}{key}": (*path, str(key)) for key in value}
        if len(names) < len(value) or not flat.paths.keys().isdisjoint(names):
            return False
        flat.paths |= names
        return True

    def _described(self, value: object) -> object:
        """A leaf without torch's classes."""
        if self._leaves is None or type(value) in PLAIN:
            return value
        if isinstance(value, Mapping | list | tuple):
            return value if PLAIN.issuperset(map(type, value)) and not isinstance(value, Mapping) else describe_state(value).tree
        return self._leaves.described(value)

    def _is_entered(self, value: object) -> bool:
        """Whether there is a tensor or a mapping in a list."""
        if isinstance(value, list):
            return any(map(self._is_entered, value))
        made = value if self._leaves is None else self._leaves.described(value)
        return isinstance(made, LazyTensor | Composite | Mapping) or (self._leaves is not None and self._leaves.is_tensor(value))


def _is_opened(value: object) -> bool:
    """Whether values of an open checkpoint are in it, which stand for torch's own and are written as those."""
    waiting, seen = [value], set()
    while waiting:
        one = waiting.pop()
        if type(one).__module__.split(".")[0] == "holdfast":
            return True
        if isinstance(one, list | tuple | set | frozenset | dict) and id(one) not in seen:
            seen.add(id(one))
            waiting += one
            waiting += one.values() if isinstance(one, dict) else ()
    return False


def dcp_index(contents: Contents, delivered: Delivered, *, path: str) -> bytes:
    """The `.metadata` of a directory with these files, which is saved under a path."""
    state: dict[str, m.TensorStorageMetadata | m.BytesStorageMetadata] = {}
    storage: dict[m.MetadataIndex, _StorageInfo] = {}
    catalogue = contents.catalogue
    names, shapes, grads = catalogue.names, catalogue.shapes, contents.grads
    rows = {row.name: row for row in DTYPES.rows}
    dtypes = {name: torch_dtype(rows[name]) for name in dict.fromkeys(catalogue.dtypes)}
    for writes, receipts in delivered:
        tensors, offsets, sizes = (columns.T.tolist() for columns in (writes.tensors, writes.offsets, writes.sizes))
        for receipt in receipts:
            key = receipt.key
            for name, first, last in receipt.values:
                state[name] = m.BytesStorageMetadata()
                storage[m.MetadataIndex(name)] = _StorageInfo(key, first, last - first)
            columns = (as_column(c).tolist() for c in (receipt.stored.boxes, receipt.stored.starts, receipt.stored.stops))
            for box, first, last in zip(*columns, strict=True):
                tensor = tensors[box]
                name, rank = names[tensor], len(shapes[tensor])
                known = state.get(name)
                if not isinstance(known, m.TensorStorageMetadata):
                    properties = m.TensorProperties(dtype=dtypes[catalogue.dtypes[tensor]], requires_grad=name in grads)
                    known = state[name] = m.TensorStorageMetadata(properties, torch.Size(shapes[tensor]), [])
                start, lengths = torch.Size(offsets[box][:rank]), torch.Size(sizes[box][:rank])
                storage[m.MetadataIndex(name, start, len(known.chunks))] = _StorageInfo(key, first, last - first)
                known.chunks.append(m.ChunkStorageMetadata(start, lengths))
    for alias, base in contents.aliases.items():
        # Tied tensors: the same items under another name. torch's reader loads each name by itself, and need not know.
        known = state[base]
        assert isinstance(known, m.TensorStorageMetadata)
        properties = m.TensorProperties(dtype=known.properties.dtype, requires_grad=alias in grads)
        state[alias] = m.TensorStorageMetadata(properties, known.size, list(known.chunks))
        for number, item in enumerate(known.chunks):
            storage[m.MetadataIndex(alias, item.offsets, number)] = storage[m.MetadataIndex(base, item.offsets, number)]
    ordered = {name: state[name] for name in contents.paths if name in state}
    planner = dict(contents.paths)
    metadata = m.Metadata(ordered, planner, storage, m.StorageMeta(checkpoint_id=str(path), save_id=str(uuid.uuid4())))
    if versions.VERSIONED:
        metadata.version = "1.0.0"
    return pickled_index(metadata)


def pickled_index(metadata: m.Metadata) -> bytes:
    """An index as every torch understands it."""
    if not versions.STRIDES:
        return pickle.dumps(metadata)
    out = io.BytesIO()
    _Pickler(out).dump(metadata)
    return out.getvalue()


class _Pickler(pickle.Pickler):
    """Leaves out the strides that torch 2.15 adds to what it says of a tensor: versions before it refuse them, none needs them."""

    def reducer_override(self, obj: object) -> Any:  # noqa: ANN401 (the pickler's own)
        if type(obj) is not m.TensorProperties:
            return NotImplemented
        made, args, state, *_ = cast(tuple[Any, ...], obj.__reduce_ex__(pickle.DEFAULT_PROTOCOL))
        return made, args, state[:5]
