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
from collections.abc import Mapping, Sequence
from typing import Any, cast

import msgspec
import torch
from msgspec import Struct, field
from torch.distributed.checkpoint import metadata as m
from torch.distributed.checkpoint.filesystem import _StorageInfo

from holdfast.core import value as values
from holdfast.core.dtype import DTYPES
from holdfast.core.limits import Limits
from holdfast.core.protocols import State
from holdfast.core.tensor import Composite, LazyTensor
from holdfast.core.tree import Path, dotted, values_inside
from holdfast.engine.stream import write_stream
from holdfast.formats.torch.write import lay_out_torch_zip
from holdfast.formats.tree_json.encode import encode_tree
from holdfast.formats.tree_json.scalars import NO_UNICODE, is_unicode
from holdfast.ranks.files import Contents, Receipt
from holdfast.torch import versions
from holdfast.torch.serialization.pickling import StorageIds, pickle_object
from holdfast.torch.serialization.save import plan_object
from holdfast.torch.tensors.from_lazy import torch_dtype

REMEDY = "give its class state_dict() and load_state_dict(), or put the tensors into the state under names of their own"
"""What to do about an object with tensors in it."""


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
    _walk(state.tree, raw, path=(), flat=flat)
    for name, path in state.paths.items():
        if name in flat.paths:
            continue
        above = (flat.values.get(dotted(path[:i])) for i in range(len(path)))
        holder = next(filter(None, above), None)
        if holder is not None and not any(isinstance(inner, torch.Tensor | LazyTensor) for inner in values_inside(holder.raw)):
            flat.pickled.add(name)
        else:
            flat.problems.append(f"{name}: a tensor inside of a tuple; make it a list")
    return flat


def common_problems(state: State, flat: FlatState) -> list[str]:
    """What no rank could say to the others, or no format could hold."""
    problems = [f"metadata {key!r}: no Unicode text" for key, text in state.metadata.items() if not is_unicode(key + text)]
    most = Limits().rank
    for name, tensor in state.tensors.items():
        if tensor.traits.meta:
            problems.append(f"{name}: it is on the meta device, without data")
        if tensor.ndim > most:
            problems.append(f"{name}: {tensor.ndim} dimensions are more than Limits(rank={most})")
    names = dict.fromkeys([*state.tensors, *flat.paths])
    return problems + [f"{name}: {NO_UNICODE}" for name in names if not is_unicode(name)]


def _walk(value: object, raw: object, *, path: Path, flat: FlatState) -> None:
    if isinstance(value, Mapping) and isinstance(raw, Mapping) and (value or not path):
        for (key, inner), own in zip(value.items(), raw.values(), strict=True):
            _walk(inner, own, path=(*path, str(key)), flat=flat)
        return
    if isinstance(value, list) and isinstance(raw, list) and _worth(value):
        for i, (inner, own) in enumerate(zip(value, raw, strict=True)):
            _walk(inner, own, path=(*path, i), flat=flat)
        return
    name = ".".join(map(str, path))
    if name in flat.paths:
        flat.problems.append(f"{name}: the name of two things")
    flat.paths[name] = path
    if isinstance(value, Composite):
        flat.problems.append(f"{name}: a {value.kind} tensor")
        flat.paths |= {f"{name}.{part}": (*path, part) for part in value.parts}
    elif not isinstance(value, LazyTensor):
        flat.values[name] = Value(raw, value)


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


def _worth(value: object) -> bool:
    """Whether there is a tensor or a mapping in a list."""
    return isinstance(value, LazyTensor | Composite | Mapping) or (isinstance(value, list) and any(map(_worth, value)))


def dcp_index(contents: Contents, receipts: Sequence[Receipt], *, path: str) -> bytes:
    """The `.metadata` of a directory with these files, which is saved under a path."""
    state: dict[str, m.TensorStorageMetadata | m.BytesStorageMetadata] = {}
    storage: dict[m.MetadataIndex, _StorageInfo] = {}
    for receipt in receipts:
        for name, chunk in receipt.chunks:
            first, last = chunk.bytes
            info = _StorageInfo(receipt.key, first, last - first)
            if name in contents.values:
                state[name] = m.BytesStorageMetadata()
                storage[m.MetadataIndex(name)] = info
                continue
            dtype, shape = contents.tensors[name]
            row = DTYPES.name(dtype)
            assert row is not None  # the plan's catalogue has checked it
            assert chunk.start is not None  # receipts have the box of every chunk
            assert chunk.stop is not None
            known = state.get(name)
            if not isinstance(known, m.TensorStorageMetadata):
                properties = m.TensorProperties(dtype=torch_dtype(row), requires_grad=name in contents.grads)
                known = state[name] = m.TensorStorageMetadata(properties, torch.Size(shape), [])
            start, sizes = torch.Size(chunk.start), torch.Size([b - a for a, b in zip(chunk.start, chunk.stop, strict=True)])
            storage[m.MetadataIndex(name, start, len(known.chunks))] = info
            known.chunks.append(m.ChunkStorageMetadata(start, sizes))
    for alias, base in contents.aliases.items():
        # Tied tensors: the same items under another name. torch's reader loads each name by itself, and need not know.
        known = state[base]
        assert isinstance(known, m.TensorStorageMetadata)
        properties = m.TensorProperties(dtype=known.properties.dtype, requires_grad=alias in contents.grads)
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
    out = io.BytesIO()
    _Pickler(out).dump(metadata)
    return out.getvalue()


class _Pickler(pickle.Pickler):
    """Leaves out the strides that torch 2.15 adds to what it says of a tensor: versions before it refuse them, none needs them."""

    def reducer_override(self, obj: object) -> Any:  # noqa: ANN401 (the pickler's own)
        if not versions.STRIDES or type(obj) is not m.TensorProperties:
            return NotImplemented
        made, args, state, *_ = cast(tuple[Any, ...], obj.__reduce_ex__(pickle.DEFAULT_PROTOCOL))
        return made, args, state[:5]
