"""Files in which n things refer to one thing of size n, in every combination that a pickle can say.

    stored once     `THINGS`: a container, a text, bytes, an array, an object, of n parts
    referred to     `USES`: n times, as an element, key, state, argument, buffer, size, … of something new

The file grows with n, since every reference takes a few bytes. What is paid for once costs n as well; what is paid for at every
reference costs n². `compose` gives a torch file for a name `thing/use`; `CASES` lists the names that make sense.

Sharing in containers that are no pickle (boxes in a manifest or in sharding notes) is at the end: `boxes`, `staircase`.
"""

from __future__ import annotations

import itertools
import json
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from tests.hostile.craft_pickle import (
    APPENDS,
    BUILD,
    EMPTY_DICT,
    EMPTY_SET,
    EMPTY_TUPLE,
    FROZENSET,
    MARK,
    NEWOBJ,
    NEWOBJ_EX,
    NONE,
    REDUCE,
    SETITEMS,
    TUPLE,
    TUPLE1,
    binbytes,
    call,
    dict_of,
    get,
    integer,
    list_of,
    named,
    put,
    short_text,
    stream,
    text,
    tuple_of,
)
from tests.hostile.craft_torch import storage, torch_zip, weight

__all__ = ["CASES", "DIRECTORIES", "compose", "make_directory"]

SHARED, DTYPE, FOREIGN, STORAGE, SIZE = 0, 1, 2, 3, 4
"""Places in the memo: what is shared, a dtype of n bytes, a class that is not known, a storage, a shape of n elements."""

OWN = named("own", "Thing")


def things() -> dict[str, tuple[Callable[[int], bytes], frozenset[str]]]:
    """What is shared: how it is pushed, and what it can stand for."""

    def plain(*tags: str) -> frozenset[str]:
        return frozenset(tags)

    return {
        "dict": (lambda n: dict_of(*(short_text(f"k{i}") + integer(i % 99) for i in range(n))), plain("dict")),
        "dict-of-numbers": (lambda n: dict_of(*(integer(i) + integer(i % 99) for i in range(n))), plain("dict")),
        "ordered": (
            lambda n: call("collections", "OrderedDict") + MARK + b"".join(short_text(f"k{i}") + NONE for i in range(n)) + SETITEMS,
            plain("dict"),
        ),
        "list": (lambda n: list_of(*(integer(i % 99) for i in range(n))), plain("list")),
        "list-of-lists": (lambda n: list_of(*(b"]" for _ in range(n))), plain("list")),
        "pairs": (lambda n: list_of(*(tuple_of(short_text(f"k{i}"), NONE) for i in range(n))), plain("list", "pairs")),
        "texts": (lambda n: list_of(*(short_text(f"k{i}") for i in range(n))), plain("list", "texts")),
        "tuple": (lambda n: MARK + b"".join(integer(i % 99) for i in range(n)) + TUPLE, plain("tuple", "hashable")),
        "ones": (lambda n: MARK + integer(1) * n + TUPLE, plain("tuple", "hashable", "size")),
        "set": (lambda n: EMPTY_SET + MARK + b"".join(short_text(f"k{i}") for i in range(n)) + b"\x90", plain("set")),
        "frozenset": (lambda n: MARK + b"".join(short_text(f"k{i}") for i in range(n)) + FROZENSET, plain("set", "hashable")),
        "bytes": (lambda n: binbytes(b"a" * (16 * n)), plain("bytes", "hashable")),
        "text": (lambda n: text("a" * (16 * n)), plain("text", "hashable")),
        "array": (lambda n: array(np.arange(4 * n, dtype=np.float32)), plain("array")),
        "text-array": (lambda n: array(np.full(n, "abcd")), plain("array")),
        "object": (lambda n: OWN + EMPTY_TUPLE + NEWOBJ + MARK + integer(1) * n + APPENDS, plain("object")),
        "object-of-dict": (
            lambda n: OWN + EMPTY_TUPLE + NEWOBJ + dict_of(*(short_text(f"k{i}") + NONE for i in range(n))) + BUILD,
            plain("object"),
        ),
        "object-of-entries": (
            lambda n: OWN + EMPTY_TUPLE + NEWOBJ + MARK + b"".join(short_text(f"k{i}") + NONE for i in range(n)) + SETITEMS,
            plain("object"),
        ),
        "module": (
            lambda n: OWN + EMPTY_TUPLE + NEWOBJ + module_state(dict_of(*(short_text(f"k{i}") + NONE for i in range(n)))) + BUILD,
            plain("object"),
        ),
        "call": (lambda n: OWN + MARK + integer(1) * n + TUPLE + REDUCE, plain("object")),
    }  # fmt: skip


def array(values: np.ndarray) -> bytes:
    """An array as numpy writes it: announced, and finished by BUILD."""
    begun = call(
        "numpy._core.multiarray",
        "_reconstruct",
        named("numpy", "ndarray"),
        tuple_of(integer(0)),
        binbytes(b"b"),
    )
    parts = (
        integer(1),
        tuple_of(integer(values.size)),
        dtype(values.dtype.str[1:]),
        b"\x89",
        binbytes(values.tobytes()),
    )
    return begun + tuple_of(*parts) + BUILD


def dtype(code: str) -> bytes:
    """A dtype of numpy, finished."""
    made = call("numpy", "dtype", text(code), b"\x89", b"\x88")
    minus = b"J\xff\xff\xff\xff"
    return (
        made + tuple_of(integer(3), text("<"), NONE, NONE, NONE, minus, minus, integer(0)) + BUILD
    )


def module_state(parameters: bytes) -> bytes:
    pairs = (
        text("_parameters"),
        parameters,
        text("_buffers"),
        EMPTY_DICT,
        text("_modules"),
        EMPTY_DICT,
    )
    return dict_of(*pairs)


def uses() -> dict[str, tuple[Callable[[bytes, int], bytes], frozenset[str]]]:
    """One more reference: pickle bytes that push something new around what is shared, and what that must be able to be."""
    own, new = get(FOREIGN), get(FOREIGN) + EMPTY_TUPLE + NEWOBJ
    weight_of = get(STORAGE)
    flags = integer(0) + tuple_of(integer(2)) + tuple_of(integer(1)) + b"\x89" + EMPTY_DICT

    def needs(*tags: str) -> frozenset[str]:
        return frozenset(tags)

    def known(module: str, name: str, *more: bytes) -> Callable[[bytes, int], bytes]:
        return lambda shared, i: call(module, name, shared, *more)

    def over_storage(function: str, *args: bytes) -> Callable[[bytes, int], bytes]:
        return lambda shared, i: call(
            "torch._utils", function, *(shared if arg == b"?" else arg for arg in args)
        )

    some = tuple_of(integer(2)), tuple_of(integer(1))
    elements = named("torch._utils", "_rebuild_tensor_v2") + tuple_of(weight_of, flags) + REDUCE
    return {
        "element": (lambda shared, i: shared, needs()),
        "in-a-list": (lambda shared, i: list_of(shared), needs()),
        "in-a-tuple": (lambda shared, i: shared + TUPLE1, needs()),
        "value": (lambda shared, i: dict_of(text(f"v{i}"), shared), needs()),
        "key": (lambda shared, i: dict_of(shared, integer(i)), needs("hashable")),
        "key-in-a-tuple": (lambda shared, i: dict_of(shared + integer(i) + b"\x86", NONE), needs("hashable")),
        "member": (lambda shared, i: EMPTY_SET + MARK + shared + b"\x90", needs("hashable")),
        "state": (lambda shared, i: new + shared + BUILD, needs()),
        "state-in-a-pair": (lambda shared, i: new + NONE + shared + b"\x86" + BUILD, needs()),
        "state-of-a-call": (lambda shared, i: call("own", "Stated") + shared + BUILD, needs()),
        "state-of-ordered": (lambda shared, i: call("collections", "OrderedDict") + shared + BUILD, needs("dict")),
        "attribute": (lambda shared, i: new + dict_of(text("a"), shared) + BUILD, needs()),
        "parameters": (lambda shared, i: new + module_state(shared) + BUILD, needs("dict")),
        "modules": (
            lambda shared, i: new
            + dict_of(text("_parameters"), EMPTY_DICT, text("_buffers"), EMPTY_DICT, text("_modules"), shared)
            + BUILD,
            needs("dict"),
        ),
        "not-persistent": (
            lambda shared, i: new
            + dict_of(
                text("_parameters"), EMPTY_DICT, text("_buffers"), EMPTY_DICT, text("_modules"), EMPTY_DICT,
                text("_non_persistent_buffers_set"), shared,
            )
            + BUILD,
            needs("set"),
        ),
        "argument": (lambda shared, i: own + shared + TUPLE1 + REDUCE, needs()),
        "arguments": (lambda shared, i: own + shared + REDUCE, needs("tuple")),
        "arguments-of-new": (lambda shared, i: own + shared + NEWOBJ, needs("tuple")),
        "keywords": (lambda shared, i: own + EMPTY_TUPLE + shared + NEWOBJ_EX, needs("dict")),
        "appended": (lambda shared, i: new + MARK + shared + APPENDS, needs()),
        "entry": (lambda shared, i: new + MARK + integer(1) + shared + SETITEMS, needs()),
        "entry-key": (lambda shared, i: new + MARK + shared + integer(1) + SETITEMS, needs()),
        "inside-of-object": (
            lambda shared, i: call("copyreg", "_reconstructor", named("own", "Dict"), named("builtins", "dict"), shared),
            needs("dict"),
        ),
        "inside-of-list": (
            lambda shared, i: call("copyreg", "_reconstructor", named("own", "List"), named("builtins", "list"), shared),
            needs("list"),
        ),
        "new-as-a-call": (lambda shared, i: call("copyreg", "__newobj__", own, shared), needs()),
        "partial": (
            lambda shared, i: call("functools", "partial", own) + tuple_of(own, shared, EMPTY_DICT, NONE) + BUILD,
            needs("tuple"),
        ),
        "ordered-of": (known("collections", "OrderedDict"), needs("pairs")),
        "counter-of": (known("collections", "Counter"), needs("dict")),
        "factory": (lambda shared, i: call("collections", "defaultdict", own + shared + TUPLE1 + REDUCE), needs()),
        "set-of": (known("builtins", "set"), needs("texts")),
        "frozenset-of": (known("builtins", "frozenset"), needs("texts")),
        "bytes-of": (known("builtins", "bytes"), needs("bytes")),
        "bytearray-of": (known("builtins", "bytearray"), needs("bytes")),
        "encoded": (known("_codecs", "encode", text("latin1")), needs("text")),
        "encoded-otherwise": (known("_codecs", "encode", text("utf-7")), needs("text")),
        "path": (known("pathlib", "PosixPath"), needs("text")),
        "scalar": (
            lambda shared, i: call("numpy._core.multiarray", "scalar", get(DTYPE), shared), needs("bytes"),
        ),
        "scalar-of-text": (
            lambda shared, i: call("numpy._core.multiarray", "scalar", get(DTYPE), shared), needs("text"),
        ),
        "buffer": (
            lambda shared, i: call("numpy._core.numeric", "_frombuffer", shared, get(DTYPE), EMPTY_TUPLE, text("C")),
            needs("bytes"),
        ),
        "array-of": (
            lambda shared, i: call(
                "numpy._core.multiarray", "_reconstruct", named("numpy", "ndarray"), tuple_of(integer(0)), binbytes(b"b")
            )
            + tuple_of(integer(1), EMPTY_TUPLE, get(DTYPE), b"\x89", shared)
            + BUILD,
            needs("bytes"),
        ),
        "array-shape": (
            lambda shared, i: call("numpy._core.numeric", "_frombuffer", binbytes(b"a"), get(DTYPE), shared, text("C")),
            needs("tuple"),
        ),
        "array-of-objects": (
            lambda shared, i: call(
                "numpy._core.multiarray", "_reconstruct", named("numpy", "ndarray"), tuple_of(integer(0)), binbytes(b"b")
            )
            + tuple_of(integer(1), get(SIZE), dtype("O8"), b"\x89", shared)
            + BUILD,
            needs("list"),
        ),
        "torch-size": (known("torch", "Size"), needs("tuple")),
        "tensor-size": (over_storage("_rebuild_tensor_v2", weight_of, integer(0), b"?", b"?", b"\x89", EMPTY_DICT), needs("size")),
        "tensor-hooks": (over_storage("_rebuild_tensor_v2", weight_of, integer(0), *some, b"\x89", b"?"), needs()),
        "tensor-flags": (
            over_storage("_rebuild_tensor_v2", weight_of, integer(0), *some, b"\x89", EMPTY_DICT, b"?"), needs("dict"),
        ),
        "parameter-state": (
            over_storage("_rebuild_parameter_with_state", elements, b"\x88", EMPTY_DICT, b"?"), needs(),
        ),
        "subclass-state": (
            lambda shared, i: call(
                "torch._tensor", "_rebuild_from_type_v2", named("torch._utils", "_rebuild_tensor_v2"), named("own", "Tensor"),
                tuple_of(weight_of, flags), shared,
            ),
            needs(),
        ),
        "subclass-arguments": (
            lambda shared, i: call("torch._tensor", "_rebuild_from_type_v2", own, own, shared, NONE), needs("tuple"),
        ),
        "sparse-size": (
            lambda shared, i: call(
                "torch._utils", "_rebuild_sparse_csr_tensor", named("torch", "sparse_csr"),
                tuple_of(elements, elements, elements, shared),
            ),
            needs("size"),
        ),
        "meta-size": (
            lambda shared, i: call(
                "torch._utils", "_rebuild_meta_tensor_no_storage", named("torch", "float32"), shared, shared, b"\x89"
            ),
            needs("size"),
        ),
        "graph-module": (
            lambda shared, i: call("torch.fx.graph_module", "reduce_graph_module", shared, text("code")), needs("dict"),
        ),
        "jit-list": (known("torch.jit._pickle", "build_intlist"), needs("list")),
        "global-called": (lambda shared, i: call("builtins", "getattr", own, shared), needs()),
        "nested-stream": (known("torch.storage", "_load_from_bytes"), needs("bytes")),
    }  # fmt: skip


THINGS, USES = things(), uses()

CASES = tuple(
    f"{thing}/{use}"
    for (thing, (_, can)), (use, (_, must)) in itertools.product(THINGS.items(), USES.items())
    if must <= can
)


def compose(case: str, n: int) -> bytes:
    """A torch file in which n things refer to one of size n."""
    thing, _, use = case.partition("/")
    push, refer = THINGS[thing][0], USES[use][0]
    code = f"S{16 * n}" if thing == "bytes" else f"U{4 * n}" if thing == "text" else "S1"
    begun = (
        push(n) + put(SHARED), dtype(code) + put(DTYPE), OWN + put(FOREIGN), storage() + put(STORAGE),
        tuple_of(integer(n)) + put(SIZE),
    )  # fmt: skip
    items = list_of(*begun, *(refer(get(SHARED), i) for i in range(n)))
    return torch_zip(stream(dict_of(text("weight"), weight(), text("items"), items), protocol=4))


# What is no pickle.


def staircase(n: int) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    """Boxes that tile a square of n × n and of which hundreds lie side by side whichever way one looks: L-shaped steps.

    Step i is the row i to the right of column i, and the column i below row i.
    """
    for i in range(n):
        yield (i, i), (i + 1, n)
        if i + 1 < n:
            yield (i + 1, i), (n, i + 1)


def native(folder: Path, n: int) -> None:
    """A manifest whose one tensor is stored in the boxes of a staircase."""
    header = json.dumps(
        {"w": {"dtype": "U8", "shape": [n * n], "data_offsets": [0, n * n]}}
    ).encode()
    header += b" " * (-len(header) % 8)
    (folder / "data-00001-of-00001.safetensors").write_bytes(
        struct.pack("<Q", len(header)) + header + bytes(n * n)
    )
    chunks, at = [], 8 + len(header)
    for start, stop in staircase(n):
        nbytes = (stop[0] - start[0]) * (stop[1] - start[1])
        chunks.append(
            {
                "file": 0,
                "bytes": [at, at + nbytes],
                "crc32": "00000000",
                "start": start,
                "stop": stop,
            }
        )
        at += nbytes
    manifest = {
        "format": "holdfast", "version": 1, "files": [{"name": "data-00001-of-00001.safetensors", "nbytes": at}],
        "tensors": {"w": {"dtype": "uint8", "shape": [n, n], "chunks": chunks}}, "metadata": {},
    }  # fmt: skip
    (folder / "holdfast.json").write_text(json.dumps(manifest, separators=(",", ":")))


DIRECTORIES: dict[str, Callable[[Path, int], None]] = {"native-staircase": native}


def make_directory(case: str, folder: Path, n: int) -> Path:
    """A directory of a case, for size n."""
    folder.mkdir()
    DIRECTORIES[case](folder, n)
    return folder
