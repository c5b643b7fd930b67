"""ONNX models, by the onnx package, version 1.23.2, and bare pickles, by pickle itself.

The package is not among those of the tests: without it, the ONNX files stay as they are.
"""

from __future__ import annotations

import pickle
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
from arrays import as_torch, row
from recipe import golden, numbers

ONNX = "1.23.2"

TYPED = {
    "FLOAT": ("<f4", 1), "UINT8": ("<u1", 2), "INT8": ("<i1", 3), "UINT16": ("<u2", 4), "INT16": ("<i2", 5), "INT32": ("<i4", 6),
    "INT64": ("<i8", 7), "BOOL": ("?", 9), "FLOAT16": ("<f2", 10), "DOUBLE": ("<f8", 11), "UINT32": ("<u4", 12),
    "UINT64": ("<u8", 13),
}  # fmt: skip
"""Types of elements, each with its dtype in numpy and its number in ONNX."""


def initializers() -> list[object]:
    """Tensors of many types, whose elements are bytes, or numbers of a field of their own."""
    from onnx import helper, numpy_helper

    made = []
    for name, (dtype, data_type) in TYPED.items():
        # No bit patterns: the writer of numbers refuses NaN in some types.
        array = (np.arange(6) * 7 % 5).astype(dtype).reshape(2, 3)
        if np.dtype(dtype).kind in "if":
            array = array - np.dtype(dtype).type(2)
        made.append(numpy_helper.from_array(array, f"raw.{name}"))
        made.append(helper.make_tensor(f"typed.{name}", data_type, (2, 3), array.reshape(-1)))
    halves = numbers(3, 2).to(torch.bfloat16).view(torch.uint16).numpy().tobytes()
    made.append(helper.make_tensor("raw.BFLOAT16", 16, (3, 2), halves, raw=True))
    made.append(numpy_helper.from_array(row("<f4", 0, 3), "empty"))
    made.append(numpy_helper.from_array(np.array(7, np.float32), "scalar"))
    return made


def write_model(path: Path) -> object:
    import onnx
    from onnx import helper

    assert version("onnx") == ONNX
    value = helper.make_tensor_value_info("x", 1, [1])
    output = helper.make_tensor_value_info("y", 1, [1])
    node = helper.make_node("Identity", ["x"], ["y"])
    tensors = initializers()
    graph = helper.make_graph([node], "tiny", [value], [output], initializer=tensors)
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, producer_name="golden", ir_version=10, opset_imports=opsets)
    helper.set_model_props(model, {"author": "golden"})
    onnx.save(model, path)
    return onnx.load(path)


@golden(
    "tiny.onnx",
    "onnx",
    "every type that numpy has, as raw data and as numbers; a scalar, a tensor without elements, properties",
)
def _tiny(path: Path) -> dict[str, torch.Tensor]:
    from onnx import numpy_helper

    found = {}
    for tensor in write_model(path).graph.initializer:
        if tensor.name == "raw.BFLOAT16":
            found[tensor.name] = torch.frombuffer(
                bytearray(tensor.raw_data), dtype=torch.bfloat16
            ).reshape(3, 2)
        else:
            found[tensor.name] = as_torch(numpy_helper.to_array(tensor))
    return found


@golden(
    "arrays.pkl",
    "pickle",
    "a bare pickle of arrays under names, as detectron2's model zoo has them",
)
def _arrays(path: Path) -> dict[str, object]:
    state = {
        "weight": row("<f4", 3, 4),
        "fortran": np.asfortranarray(row("<f8", 3, 4)),
        "turned": row("<i2", 2, 3, 4).transpose(2, 0, 1),
        "big_endian": row(">i4", 5),
        "bool": row("?", 4),
        "empty": row("<f4", 0, 3),
    }
    path.write_bytes(pickle.dumps({"model": state, "__author__": "golden"}, protocol=4))
    loaded = pickle.loads(path.read_bytes())
    return {"model": {name: as_torch(array) for name, array in loaded["model"].items()}}
