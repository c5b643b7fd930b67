"""Values beside the tensors of a DCP directory that ranks write: a value is a `torch.save` of the caller's own object.

`formats/dcp/flatten` says what is a value, `formats/dcp/write_index` makes the index.
"""

from __future__ import annotations

import hashlib
import io
import pickle
from typing import Any, cast

import msgspec
from torch.distributed.checkpoint import metadata as m

from holdfast.core.tree import get_keys_and_values, walk
from holdfast.engine.stream import write_stream
from holdfast.engine.table import make_value_state
from holdfast.formats.dcp.flatten import FlatState, FlatValue
from holdfast.formats.pickle.writer import ENDS_IN_NUL, ends_in_nul
from holdfast.formats.torch.write import lay_out_torch_zip
from holdfast.formats.tree_json.encode import encode_value
from holdfast.torch import versions
from holdfast.torch.serialization.pickling import StorageIds, pickle_object
from holdfast.torch.serialization.saving import plan_object

REMEDY = "give its class state_dict() and load_state_dict(), or put the tensors into the state under names of their own"
"""Advice about an object with tensors in it."""

NUMPY_TAG = b'"numpy.'
"""In the JSON of every element of numpy."""


def digest(value: FlatValue) -> bytes:
    """A hash that is the same on every rank that has an equal value. Raises ValueError for one that cannot be pickled."""
    encoded = encode_value(value.described)
    # A pickle of equal values may differ: it tells whether two equal strings in them are one object.
    content = _pickled(value.raw) if encoded.problems else msgspec.json.encode(encoded.value)
    if NUMPY_TAG in content and any(
        ends_in_nul(one) for _, one in walk(value.described, get_keys_and_values)
    ):
        raise ValueError(ENDS_IN_NUL)
    return hashlib.blake2b(content, digest_size=16).digest()


def _pickled(raw: object) -> bytes:
    ids = StorageIds()
    kind = type(raw).__name__
    try:
        content = pickle_object(raw, ids, pickle_module=pickle, protocol=pickle.DEFAULT_PROTOCOL)
    except Exception as error:  # whatever the object's own methods raise
        raise ValueError(
            f"a {kind} that cannot be pickled ({type(error).__name__}: {error})"
        ) from error
    if ids.storages:
        raise ValueError(
            f"a {kind} with tensors in it, which would be out of reach in a pickle; {REMEDY}"
        )
    return content


def archive(value: FlatValue) -> bytes:
    """The bytes of `torch.save` for it; later changes of the object do not reach them."""
    # Values of an open checkpoint stand for torch's own, and are written as those.
    opened = any(
        type(one).__module__.split(".")[0] == "holdfast"
        for _, one in walk(value.raw, get_keys_and_values)
    )
    plan = (
        lay_out_torch_zip(make_value_state(value.described))
        if opened
        else plan_object(value.raw, None)
    )
    out = io.BytesIO()
    write_stream(plan.files[0], out)
    return out.getvalue()


def digests(flat: FlatState) -> dict[str, bytes]:
    """A hash of every value; what must not be pickled becomes a problem."""
    found = {}
    for name, value in flat.values.items():
        try:
            found[name] = digest(value)
        except ValueError as error:
            flat.problems.append(f"{name}: {error}")
    return found


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
