"""What is in `models/<name>.json`, in a few lines: what the program takes and gives, which operators it calls, who wrote it.

The document of a large model has hundreds of thousands of nodes with a stack trace each. It is decoded into exactly the fields that
are shown; everything else is passed over without being built (msgspec: a few hundred megabytes a second). Sizes of tensors are
decoded for inputs, outputs and weights alone.

Nothing here is run, and no tensor depends on it: a document that cannot be read is a note, and one above `Limits.header_nbytes` is
not read. The one thing that is refused is a program that asks for a weight that the archive does not have.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import msgspec
from msgspec import field

from holdfast.core.strict_json import quote
from holdfast.core.value import Value
from holdfast.errors import MetadataError
from holdfast.extras.packages.pt2.schema import SCALARS

SHOWN = 6

TEXT = 120

SYMBOL = re.compile(r"Symbol\('([^']*)'[^)]*\)")
"""sympy's text of a symbol (torch 2.13)."""


class TensorValue(Value):
    """An input or output of a program."""

    name: str
    dtype: str = ""
    """Empty if it is no tensor."""
    sizes: tuple[int | str, ...] = ()
    """A text for a dynamic size: `s77`, `2*s0`."""

    def __str__(self) -> str:
        """
        >>> str(TensorValue("x", "int64", ("s77", 4))), str(TensorValue("flag"))
        ('x: int64[s77, 4]', 'flag')
        """
        shape = f": {self.dtype}[{', '.join(map(str, self.sizes))}]" if self.dtype else ""
        return self.name[:TEXT] + shape


class Program(Value):
    inputs: tuple[TensorValue, ...]
    outputs: tuple[TensorValue, ...]
    operators: Mapping[str, int]
    """Calls of each operator in the outermost graph, most frequent first: `aten.linear.default`."""
    schema: str
    opset: Mapping[str, int]
    torch_version: str
    symbols: Mapping[str, str] = field(default_factory=dict)
    """The range of each dynamic size: `2 to 100`."""
    weights: Mapping[str, TensorValue] = field(default_factory=dict)
    """The parameters and persistent buffers that it needs, by their names in the state dict."""
    constants: tuple[str, ...] = ()

    @property
    def nodes(self) -> int:
        return sum(self.operators.values())

    def texts(self) -> dict[str, str]:
        texts = {
            "torch_version": self.torch_version,
            "schema": self.schema,
            "opset": ", ".join(
                f"{name} {number}" for name, number in list(self.opset.items())[:SHOWN]
            ),
            "inputs": _listed(map(str, self.inputs), len(self.inputs)),
            "outputs": _listed(map(str, self.outputs), len(self.outputs)),
            "operators": self._operators(),
            "symbols": _listed(
                (f"{name[:TEXT]}: {limits}" for name, limits in self.symbols.items()),
                len(self.symbols),
            ),
        }
        return {key: text for key, text in texts.items() if text}

    def __str__(self) -> str:
        texts = self.texts()
        takes = texts.get("inputs", "nothing")
        gives = texts.get("outputs", "nothing")
        wrote = (
            f"exported by torch {self.torch_version}"
            if self.torch_version
            else f"schema {self.schema}"
        )
        return f"takes {takes}; gives {gives}; {self._operators() or 'no operators'}; {wrote}"

    def _operators(self) -> str:
        if not self.operators:
            return ""
        shown = _listed(
            (f"{name[:TEXT]} ×{count}" for name, count in self.operators.items()),
            len(self.operators),
        )
        return f"{self.nodes:,} calls of {len(self.operators):,} operators: {shown}"


def _listed(texts: Iterable[str], count: int) -> str:
    shown = [text for text, _ in zip(texts, range(SHOWN), strict=False)]
    return ", ".join(shown) + (f", … {count - SHOWN:,} more" if count > SHOWN else "")


class _Node(msgspec.Struct, gc=False):
    target: str = ""


class _Spec(msgspec.Struct):
    """An input or output of any kind. Which of the fields it has depends on the kind."""

    arg: msgspec.Raw = msgspec.Raw(b"{}")
    parameter_name: str = ""
    buffer_name: str = ""
    persistent: bool = True
    tensor_constant_name: str = ""
    custom_obj_name: str = ""


class _Signature(msgspec.Struct):
    input_specs: list[dict[str, _Spec]] = []
    """The kind of each input, and the input."""
    output_specs: list[dict[str, _Spec]] = []


class _Graph(msgspec.Struct):
    nodes: list[_Node] = []
    tensor_values: dict[str, msgspec.Raw] = {}


class _GraphModule(msgspec.Struct):
    graph: _Graph
    signature: _Signature


class _Version(msgspec.Struct):
    major: int = 0
    minor: int = 0


class _Range(msgspec.Struct):
    min_val: int | None = None
    max_val: int | None = None


class _Document(msgspec.Struct):
    graph_module: _GraphModule
    opset_version: dict[str, int] = {}
    range_constraints: dict[str, _Range] = {}
    schema_version: _Version | None = None
    torch_version: str = ""


class _Expression(msgspec.Struct):
    expr_str: str = ""


class _Size(msgspec.Struct):
    as_int: int | None = None
    as_expr: _Expression | None = None


class _Meta(msgspec.Struct):
    dtype: int = 0
    sizes: list[_Size] = []


DOCUMENTS = msgspec.json.Decoder(_Document)
METAS = msgspec.json.Decoder(_Meta)
NAMES = msgspec.json.Decoder(dict[str, str])


def summarise(raw: bytes) -> Program:
    """The summary of a document. Raises `ValueError` (msgspec's, mostly) for a document that torch does not write."""
    try:
        return _summary(DOCUMENTS.decode(raw))
    except RecursionError:
        raise ValueError("it nests too deeply") from None


def _summary(document: _Document) -> Program:
    graph, signature = document.graph_module.graph, document.graph_module.signature
    tensors = graph.tensor_values
    counts = Counter(node.target.removeprefix("torch.ops.") for node in graph.nodes)
    weights: dict[str, TensorValue] = {}
    constants: list[str] = []
    inputs: list[TensorValue] = []
    for kind, spec in (pair for specs in signature.input_specs for pair in specs.items()):
        match kind:
            case "user_input":
                inputs.append(_argument(spec, tensors))
            case "parameter" | "buffer" if spec.persistent:
                name = NAMES.decode(spec.arg).get("name", "")
                weights[spec.parameter_name or spec.buffer_name] = _value(name, tensors)
            case "buffer" | "tensor_constant" | "custom_obj":
                name = spec.buffer_name or spec.tensor_constant_name or spec.custom_obj_name
                constants.append(name)
    outputs = [
        _argument(specs["user_output"], tensors)
        for specs in signature.output_specs
        if "user_output" in specs
    ]
    version = document.schema_version
    return Program(
        tuple(inputs),
        tuple(outputs),
        dict(sorted(counts.items(), key=lambda item: -item[1])),
        f"{version.major}.{version.minor}" if version is not None else "",
        document.opset_version,
        document.torch_version[:TEXT],
        {
            name: " to ".join(map(_bound, (one.min_val, one.max_val)))
            for name, one in document.range_constraints.items()
        },
        weights,
        tuple(constants),
    )


def _bound(value: int | None) -> str:
    return "…" if value is None else f"{value:,}"


def _argument(spec: _Spec, tensors: Mapping[str, msgspec.Raw]) -> TensorValue:
    argument = msgspec.json.decode(spec.arg)
    match argument:
        case {"as_tensor": {"name": str(name)}}:
            return _value(name, tensors)
        case dict() if len(argument) == 1:
            ((kind, value),) = argument.items()
            return TensorValue(f"{str(kind)[:TEXT]} {json.dumps(value)[:TEXT]}")
        case _:
            return TensorValue(json.dumps(argument)[:TEXT])


def _value(name: str, tensors: Mapping[str, msgspec.Raw]) -> TensorValue:
    raw = tensors.get(name)
    if raw is None:
        return TensorValue(name)
    meta = METAS.decode(raw)
    return TensorValue(
        name, SCALARS.get(meta.dtype, "unknown dtype"), tuple(map(_size, meta.sizes))
    )


def _size(size: _Size) -> int | str:
    if size.as_int is not None:
        return size.as_int
    return SYMBOL.sub(r"\1", size.as_expr.expr_str[:TEXT]) if size.as_expr is not None else "?"


def check_weights(
    program: Program, model: str, weights: Mapping[str, object], *, constants: Mapping[str, object]
) -> list[str]:
    """Compare the weights that a program needs with the archive; sentences about differing shapes and dtypes.

    Raises `MetadataError` for a missing weight. torch refuses such a program when it is loaded, and accepts other shapes.
    """
    lacking = [
        name
        for name in (*program.weights, *program.constants)
        if name not in weights and name not in constants
    ]
    if lacking:
        more = f" (and {len(lacking) - 1:,} more)" if len(lacking) > 1 else ""
        raise MetadataError(
            f"the program of model {quote(model)} asks for the weight {quote(lacking[0])}{more}, which is not in the archive",
            tensor=lacking[0],
        )
    differing = [
        name for name, value in program.weights.items() if _differs(value, weights.get(name))
    ]
    if not differing:
        return []
    first, more = differing[0], f" (and {len(differing) - 1:,} more)" if len(differing) > 1 else ""
    return [
        f"model {quote(model)}: the program was exported with {program.weights[first]}, and the weight {quote(first)}{more} "
        "has another dtype or shape"
    ]


def _differs(value: TensorValue, weight: object) -> bool:
    dtype, shape = getattr(weight, "dtype", None), getattr(weight, "shape", None)
    if not value.dtype or dtype is None or not isinstance(shape, Sequence):
        return False
    fixed = [isinstance(size, int) for size in value.sizes]
    same = len(shape) == len(fixed) and all(
        n == size for n, size, known in zip(shape, value.sizes, fixed, strict=True) if known
    )
    return str(dtype) != value.dtype or not same
