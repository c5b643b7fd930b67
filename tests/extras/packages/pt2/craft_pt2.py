"""`.pt2` archives by hand: an honest one of two weights, and a way to change any record of it."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping

from holdfast.formats.zip.writer import lay_out_zip

__all__ = ["DATA", "archive", "config", "entry", "honest", "meta", "program", "records"]

DATA = struct.pack("<6f", *range(6))
"""The storage of `w` and of `v`, which is a part of it."""

HEADER = {"archive_format": b"pt2", "archive_version": b"0", ".data/version": b"6\n", "byteorder": b"little",
          ".data/serialization_id": b"0" * 40}  # fmt: skip


def meta(sizes=(2, 3), strides=(3, 1), offset=0, *, dtype=7, **changed) -> dict[str, object]:
    """What a config says of a tensor; numbers are wrapped as torch does, anything else is left as it is."""

    def wrapped(value):
        return {"as_int": value} if type(value) in (int, float, bool) else value

    made = {
        "dtype": dtype,
        "sizes": [wrapped(size) for size in sizes],
        "requires_grad": False,
        "device": {"type": "cpu", "index": None},
        "strides": [wrapped(stride) for stride in strides],
        "storage_offset": wrapped(offset),
        "layout": 7,
    }
    return {**made, **changed}


def entry(
    record: object = "weight_0",
    tensor_meta: object = None,
    *,
    is_param: object = False,
    use_pickle: object = False,
    **more,
):
    return {"path_name": record, "is_param": is_param, "use_pickle": use_pickle,
            "tensor_meta": meta() if tensor_meta is None else tensor_meta, **more}  # fmt: skip


def config(entries: Mapping[str, object]) -> bytes:
    return json.dumps({"config": entries}).encode()


def program(parameters=("w",), constants=()) -> bytes:
    """A program that asks for these."""
    specs = [
        {"parameter": {"arg": {"name": f"p_{name}"}, "parameter_name": name}} for name in parameters
    ]
    specs += [
        {"tensor_constant": {"arg": {"name": f"c_{name}"}, "tensor_constant_name": name}}
        for name in constants
    ]
    specs.append({"user_input": {"arg": {"as_tensor": {"name": "x"}}}})
    graph = {
        "nodes": [{"target": "torch.ops.aten.relu.default"}],
        "tensor_values": {"x": meta((3,), (1,))},
    }
    signature = {
        "input_specs": specs,
        "output_specs": [{"user_output": {"arg": {"as_tensor": {"name": "x"}}}}],
    }
    document = {
        "graph_module": {"graph": graph, "signature": signature}, "opset_version": {"aten": 10}, "range_constraints": {},
        "schema_version": {"major": 8, "minor": 20}, "torch_version": "2.13.0",
    }  # fmt: skip
    return json.dumps(document).encode()


def records(changed: Mapping[str, bytes | None] | None = None) -> dict[str, bytes]:
    """The records of an honest archive, some of them changed, left out (None) or added."""
    made = {
        "data/weights/weight_0": DATA,
        "data/weights/model_weights_config.json": config(
            {"w": entry(is_param=True), "v": entry(tensor_meta=meta((3,), (1,), 2))}
        ),
        "data/constants/tensor_0": DATA[:8],
        "data/constants/model_constants_config.json": config(
            {"c": entry("tensor_0", meta((2,), (1,)))}
        ),
        "models/model.json": program(("w", "v"), ("c",)),
        **HEADER,
    }
    every = {**made, **(changed or {})}
    return {name: content for name, content in every.items() if content is not None}


def archive(made: Mapping[str, bytes], prefix: str = "m") -> bytes:
    """A zip as torch writes it."""
    return b"".join(segment.data for segment in lay_out_zip(prefix, list(made.items())))


def honest(changed: Mapping[str, bytes | None] | None = None) -> bytes:
    return archive(records(changed))
