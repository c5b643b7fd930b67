"""What is in a checkpoint, as the library that wrote it sees it. Holdfast takes no part in this.

The names are those that Holdfast promises: the path through dicts, sequences and attributes joined by dots, and
for an `nn.Module` the names of its `state_dict()`.
"""

from __future__ import annotations

import argparse
import collections
import enum
import hashlib
from collections.abc import Iterator

import numpy as np
import torch
from torch import nn

from holdfast.torch import versions

__all__ = ["elements", "expectation", "short"]


def short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def elements(tensor: torch.Tensor) -> bytes:
    """The elements in C order, little-endian."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    if plain.numel() == 0:
        return b""
    if not plain.is_contiguous():
        plain = plain.contiguous()
    start = plain.storage_offset() * plain.dtype.itemsize
    return bytes(plain.untyped_storage())[start : start + plain.numel() * plain.dtype.itemsize]


def facts(tensor: torch.Tensor) -> dict[str, object]:
    """One line of `tensors` in an expectation."""
    line: dict[str, object] = {"dtype": short(tensor.dtype), "shape": list(tensor.shape)}
    line["sha256"] = None if tensor.is_meta else hashlib.sha256(elements(tensor)).hexdigest()
    return line


def parts(tensor: torch.Tensor) -> tuple[str, dict[str, torch.Tensor], dict[str, object]]:
    """Kind, plain tensors and attributes of a tensor that is stored as several; kind is empty for a plain one."""
    layout = tensor.layout
    if tensor.is_nested:
        if layout == torch.jagged:
            return "jagged", {"values": tensor.values(), "offsets": tensor.offsets()}, {}
        inner = {
            "buffer": tensor.values(),
            "sizes": tensor._nested_tensor_size(),
            "strides": tensor._nested_tensor_strides(),
            "offsets": tensor._nested_tensor_storage_offsets(),
        }
        return "nested", inner, {}
    if layout == torch.sparse_coo:
        inner = {"indices": tensor._indices(), "values": tensor._values()}
        return "sparse_coo", inner, {"coalesced": tensor.is_coalesced()}
    if layout in (torch.sparse_csr, torch.sparse_bsr):
        names = {"crow_indices": tensor.crow_indices(), "col_indices": tensor.col_indices()}
        return str(layout).removeprefix("torch."), {**names, "values": tensor.values()}, {}
    if layout in (torch.sparse_csc, torch.sparse_bsc):
        names = {"ccol_indices": tensor.ccol_indices(), "row_indices": tensor.row_indices()}
        return str(layout).removeprefix("torch."), {**names, "values": tensor.values()}, {}
    if tensor.is_quantized:
        # The bytes as they are stored: int_repr() of the packed types has another shape than the tensor.
        stored = torch.tensor([], dtype=torch.uint8).set_(tensor.untyped_storage())
        attributes: dict[str, object] = {
            "qscheme": str(tensor.qscheme()).removeprefix("torch."),
            "dtype": short(tensor.dtype),
        }
        if str(tensor.qscheme()).startswith("torch.per_tensor"):
            attributes |= {"scale": tensor.q_scale(), "zero_point": tensor.q_zero_point()}
            return "quantized", {"stored": stored}, attributes
        attributes["axis"] = tensor.q_per_channel_axis()
        inner = {
            "stored": stored,
            "scales": tensor.q_per_channel_scales(),
            "zero_points": tensor.q_per_channel_zero_points(),
        }
        return "quantized", inner, attributes
    return "", {}, {}


def is_record(value: object) -> bool:
    """Whether this is an object of `trainer.py` whose attributes are part of the state."""
    return type(value).__module__ == "trainer" and not isinstance(value, torch.Tensor | enum.Enum)


def walk(value: object, path: tuple[str, ...] = ()) -> Iterator[tuple[str, object]]:
    """Every leaf under its dotted name."""
    if isinstance(value, nn.Module | torch.jit.ScriptModule):
        yield from walk(dict(value.state_dict(keep_vars=True)), path)
    elif isinstance(value, dict) and not isinstance(value, collections.Counter):
        for key, inner in value.items():
            yield from walk(inner, (*path, str(key)))
    elif isinstance(value, list | tuple) and not isinstance(value, torch.Size):
        for i, inner in enumerate(value):
            yield from walk(inner, (*path, str(i)))
    elif isinstance(value, argparse.Namespace) or is_record(value):
        slots = getattr(type(value), "__slots__", None)
        yield from walk({k: getattr(value, k) for k in slots} if slots else vars(value), path)
    else:
        yield ".".join(path) if path else "tensor", value


def groups(places: list[tuple[int, int, str]]) -> list[list[str]]:
    """Names whose storages share memory. By address: a storage may be a view of another (the tar of torch 0.1)."""
    found: list[list[str]] = []
    end = 0
    for start, stop, name in sorted(places):
        if start < end:
            found[-1].append(name)
        else:
            found.append([name])
        end = max(end, stop)
    return sorted(sorted(names) for names in found if len(names) > 1)


def expectation(tree: object, form: str) -> dict[str, object]:
    """What `expected/*.json` says about a loaded state."""
    tensors: dict[str, dict[str, object]] = {}
    composites: dict[str, object] = {}
    arrays: dict[str, object] = {}
    values: dict[str, object] = {}
    places: list[tuple[int, int, str]] = []
    for name, leaf in walk(tree):
        if isinstance(leaf, torch.Tensor):
            kind, inner, attributes = parts(leaf)
            if kind:
                shape = None if leaf.is_nested else list(leaf.shape)
                found_parts = {part: facts(tensor) for part, tensor in inner.items()}
                composites[name] = {
                    "kind": kind,
                    "shape": shape,
                    **attributes,
                    "parts": found_parts,
                }
                continue
            tensors[name] = facts(leaf)
            if leaf.dtype == versions.dtype("float4_e2m1fn_x2") and form.startswith("safetensors"):
                # The file says F4 and counts single elements; only torch counts them in pairs.
                shape = [*leaf.shape[:-1], leaf.shape[-1] * 2]
                tensors[name] |= {"dtype": "float4_e2m1fn", "shape": shape, "packed": True}
            if not leaf.is_meta and leaf.untyped_storage().nbytes():
                storage = leaf.untyped_storage()
                places.append((storage.data_ptr(), storage.data_ptr() + storage.nbytes(), name))
        elif isinstance(leaf, np.ndarray):
            little = np.ascontiguousarray(leaf.astype(leaf.dtype.newbyteorder("<")))
            arrays[name] = {
                "dtype": str(leaf.dtype),
                "shape": list(leaf.shape),
                "sha256": hashlib.sha256(little.tobytes()).hexdigest(),
            }
        elif (type(leaf) in (int, float, str, bool) or leaf is None) and ".rng." not in f".{name}":
            values[name] = leaf
    found: dict[str, object] = {"format": form, "tensors": tensors}
    found["aliases"] = groups(places)
    found |= {
        k: v for k, v in (("composites", composites), ("arrays", arrays), ("values", values)) if v
    }
    return found
