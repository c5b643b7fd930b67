"""What torch loaded against what Holdfast opened: names in order, bits of every tensor, types of every value, aliases.

Nothing here asks Holdfast how it names or flattens: the rules are written out a second time, over torch's own objects.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import PurePath

import numpy as np
import torch
from torch import nn

import holdfast
from holdfast.core.dtype import DTYPES, DType
from holdfast.core.opaque import Device, Size
from holdfast.core.tensor import Composite, LazyTensor
from tests.golden.expect import groups, parts, short

__all__ = [
    "assert_composite",
    "assert_same_file",
    "assert_same_tree",
    "assert_tensor",
    "elements",
    "named_tensors",
]


def elements(tensor: torch.Tensor) -> bytes:
    """The elements in C order, little-endian."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    if plain.numel() == 0:
        return b""
    plain = plain if plain.is_contiguous() else plain.contiguous()
    stored = torch.empty(0, dtype=torch.uint8).set_(plain.untyped_storage())
    start = plain.storage_offset() * plain.dtype.itemsize
    return stored[start : start + plain.numel() * plain.dtype.itemsize].numpy().tobytes()


def pieces_of(tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """The plain tensors that one torch tensor is stored as; under no name where it is stored as itself."""
    kind, inner, _ = parts(tensor)
    if kind == "quantized":
        return {"int_repr": tensor, **{k: v for k, v in inner.items() if k != "stored"}}
    return inner if kind else {"": tensor}


def named_tensors(value: object, path: tuple[str, ...] = ()) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of a loaded state under the name that Holdfast promises, in the order of the file."""
    if isinstance(value, torch.Tensor):
        for part, tensor in pieces_of(value).items():
            yield ".".join((*path, part) if part else path) or "tensor", tensor
    elif isinstance(value, nn.Module):
        yield from named_tensors(dict(value.state_dict(keep_vars=True)), path)
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from named_tensors(inner, (*path, str(key)))
    elif isinstance(value, list | tuple):
        for i, inner in enumerate(value):
            yield from named_tensors(inner, (*path, str(i)))


def assert_tensor(lazy: LazyTensor, tensor: torch.Tensor) -> None:
    """The same dtype, shape and bits, through numpy and through torch."""
    assert lazy.dtype.name == short(tensor.dtype), lazy
    assert lazy.shape == tuple(tensor.shape), lazy
    assert lazy.traits.meta == tensor.is_meta
    if tensor.is_meta:
        made = lazy.torch()
        assert made.is_meta
        assert (made.dtype, made.shape) == (tensor.dtype, tensor.shape)
        return
    array = lazy.numpy()
    assert array.shape == lazy.shape
    assert array.dtype == lazy.dtype.numpy
    if tensor.is_quantized:
        assert np.array_equal(array, integers(tensor)), lazy
        return
    wanted = elements(tensor)
    assert array.tobytes() == wanted, lazy
    made = lazy.torch()
    assert (made.dtype, made.shape) == (tensor.dtype, tensor.shape)
    assert elements(made) == wanted, lazy


def integers(tensor: torch.Tensor) -> np.ndarray:
    """The integers of a quantised tensor, one a byte where torch packs several, in the tensor's shape."""
    bits = DTYPES.name(short(tensor.dtype)).bits
    if bits >= 8:
        return tensor.int_repr().numpy()
    stored = np.frombuffer(bytes(tensor.untyped_storage()), np.uint8)
    each = np.stack(
        [(stored >> shift) & ((1 << bits) - 1) for shift in range(0, 8, bits)], axis=1
    ).reshape(-1)
    return each[: tensor.numel()].reshape(tuple(tensor.shape))


def assert_composite(whole: Composite, tensor: torch.Tensor) -> None:
    """`Composite.torch()` gives the tensor that torch loads: layout, attributes and the bits of every part."""
    kind, inner, attributes = parts(tensor)
    made = whole.torch()
    assert (made.layout, made.dtype, made.is_nested) == (
        tensor.layout,
        tensor.dtype,
        tensor.is_nested,
    )
    if not tensor.is_nested:
        assert made.shape == tensor.shape == whole.shape
    made_kind, made_inner, made_attributes = parts(made)
    assert (whole.kind, made_kind) == (kind, kind)
    assert made_attributes == attributes
    assert list(made_inner) == list(inner)
    for name, part in inner.items():
        if name == "stored":
            assert np.array_equal(integers(made), integers(tensor))
            continue
        assert made_inner[name].dtype == part.dtype, name
        assert elements(made_inner[name]) == elements(part), name


def assert_same_file(data: bytes, loaded: object, **options: object) -> None:
    """Names, order, bits and aliases of a whole file are those of what torch loads from it."""
    with holdfast.open(data, **options) as ckpt:
        expected = dict(named_tensors(loaded))
        assert list(ckpt) == list(expected)
        for name, tensor in expected.items():
            assert_tensor(ckpt[name], tensor)
        assert alias_groups(ckpt) == shared(expected)
        every = ckpt.read(*(name for name, tensor in expected.items() if not tensor.is_meta))
        for name, array in every.items():
            assert array.tobytes() == ckpt[name].numpy().tobytes()


def alias_groups(ckpt: holdfast.Checkpoint) -> list[list[str]]:
    return sorted(sorted(alias.names) for alias in ckpt.aliases)


def shared(tensors: dict[str, torch.Tensor]) -> list[list[str]]:
    """Names whose storages share memory, by address."""
    places = []
    for name, tensor in tensors.items():
        if not tensor.is_meta and tensor.untyped_storage().nbytes():
            start = tensor.untyped_storage().data_ptr()
            places.append((start, start + tensor.untyped_storage().nbytes(), name))
    return groups(places)


def assert_same_tree(ours: object, theirs: object) -> None:
    """The same nested state: types of containers, order of keys, values, and a lazy tensor for every tensor."""
    match theirs:
        case torch.Tensor():
            assert_leaf(ours, theirs)
        case torch.Size():
            assert type(ours) is Size
            assert ours == tuple(theirs)
        case torch.dtype():
            assert isinstance(ours, DType)
            assert ours.name == short(theirs)
        case torch.device():
            assert ours == Device(theirs.type, theirs.index)
        case dict():
            kind = type(theirs)
            assert isinstance(ours, kind) if kind is defaultdict else type(ours) is kind, (
                ours,
                theirs,
            )
            assert [(type(k), k) for k in ours] == [(type(k), k) for k in theirs]
            if kind is not Counter:
                for key, value in theirs.items():
                    assert_same_tree(ours[key], value)
            else:
                assert ours == theirs
        case list() | tuple():
            assert type(ours) is type(theirs)
            assert len(ours) == len(theirs)
            for mine, other in zip(ours, theirs, strict=True):
                assert_same_tree(mine, other)
        case np.ndarray() | np.generic():
            assert type(ours) is type(theirs)
            assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
            assert ours.tobytes() == theirs.tobytes()
        case PurePath():
            assert isinstance(ours, PurePath)
            assert str(ours) == str(theirs)
        case float() | complex():
            assert type(ours) is type(theirs)
            assert ours == theirs or (math.isnan(abs(theirs)) and repr(ours) == repr(theirs))
        case _:
            assert type(ours) is type(theirs), (ours, theirs)
            assert ours == theirs


def assert_leaf(ours: object, tensor: torch.Tensor) -> None:
    if parts(tensor)[0]:
        assert isinstance(ours, Composite), ours
        assert_composite(ours, tensor)
        return
    assert isinstance(ours, LazyTensor), ours
    assert_tensor(ours, tensor)
    assert ours.traits.requires_grad == tensor.requires_grad
    assert ours.traits.parameter == isinstance(tensor, nn.Parameter)
