"""Tensors that claim what their bytes cannot be."""

from __future__ import annotations

import struct

from holdfast.errors import FormatError, LimitExceeded, MetadataError, PickleError

from .case import Case, either, foreign, opens, refused
from .craft_pickle import (
    EMPTY_LIST,
    EMPTY_TUPLE,
    FALSE,
    MARK,
    NONE,
    POP,
    REDUCE,
    TRUE,
    TUPLE,
    TUPLE2,
    binbytes,
    call,
    dict_of,
    get,
    integer,
    named,
    number,
    put,
    real,
    stream,
    text,
    tuple_of,
)
from .craft_torch import DATA, storage, tensor, torch_zip

__all__ = ["CASES"]

HUGE = 1 << 62
HOOKS = FALSE + call("collections", "OrderedDict")


def z(*parts: bytes, data: bytes = DATA, **more: bytes) -> bytes:
    return torch_zip(stream(*parts), {"0": data, "1": bytes(64)}, **more)


def lying(name: str, size: object = (2, 2), stride: object = (2, 1), **more: object) -> Case:
    """A tensor over the storage of four floats whose geometry is a lie."""
    made = z(tensor(storage(), size, stride, **more))  # type: ignore[arg-type]
    return refused(f"tensor-{name}", made, MetadataError, LimitExceeded)


def mixed(size: tuple[bytes, ...]) -> bytes:
    return tuple_of(*size)


def q(
    scheme: str, *rest: bytes, source: bytes | None = None, size: tuple[int, ...] = (4,)
) -> bytes:
    """A quantised tensor."""
    more = tuple_of(named("torch", scheme), *rest) + HOOKS
    return tensor(
        source or storage(kind="QInt8Storage", key="1", count=64),
        size,
        (1,) * len(size),
        function="_rebuild_qtensor",
        more=more,
    )


def sparse(layout: str, *parts: bytes) -> bytes:
    tag = call("torch.serialization", "_get_layout", text(f"torch.{layout}"))
    return (
        named("torch._utils", "_rebuild_sparse_tensor") + tuple_of(tag, tuple_of(*parts)) + REDUCE
    )


def longs(*shape: int) -> bytes:
    strides = [1]
    for n in reversed(shape[1:]):
        strides.append(strides[-1] * n)
    return tensor(
        storage(key="1", kind="LongStorage", count=8),
        shape,
        tuple(reversed(strides))[: len(shape)] or (),
    )


def size_of(*numbers: int) -> bytes:
    return call("torch", "Size", tuple_of(*map(integer, numbers)))


V3 = named("torch", "float64")

GEOMETRY = [
    lying("size-negative", (-1, 2)),
    lying("size-too-large", (3, 2)),
    lying("size-2^31", (1 << 31, 1 << 31)),
    lying("size-2^61", (1 << 61, 2)),
    lying("size-2^62", (HUGE,), (1,)),
    lying("size-2^127", mixed((number((1 << 127) - 1, 16), integer(1)))),
    lying("size-product-overflows-64-bits", (1 << 32, 1 << 32, 1 << 32), (0, 0, 0)),
    lying("size-bool", mixed((TRUE, TRUE))),
    lying("size-float", mixed((real(2.0), real(2.0)))),
    lying("size-none", mixed((NONE, NONE))),
    lying("size-text", text("22")),
    lying("size-nested", mixed((tuple_of(integer(2)), integer(2)))),
    lying("size-is-none", NONE),
    lying("stride-negative", (2, 2), (-2, 1)),
    lying("stride-too-large", (2, 2), (4, 1)),
    lying("stride-2^61", (2, 2), (1 << 61, 1)),
    lying("stride-2^126", (2, 2), mixed((number(1 << 126, 16), integer(1)))),
    lying("stride-bool", (2, 2), mixed((TRUE, TRUE))),
    lying("stride-rank-mismatch", (2, 2), (1,)),
    lying("stride-missing", (2, 2), ()),
    lying("stride-more-than-sizes", (), (1,)),
    lying("offset-negative", offset=-1),
    lying("offset-past-the-end", offset=1),
    lying("offset-2^62", offset=HUGE),
    lying("offset-2^61", offset=1 << 61),
    lying("offset-bool", offset=TRUE),
    lying("offset-float", offset=real(0.0)),
    lying("offset-none", offset=NONE),
    lying("rank-65", (1,) * 65, (1,) * 65),
    lying("rank-10000", (1,) * 10_000, (1,) * 10_000),
    lying("rank-10000-of-zero", (0,) * 10_000, (0,) * 10_000),
    lying("offset-beyond-a-scalar", (), (), offset=4),
    lying("overlap-reaches-past-the-end", (4, 4), (1, 1)),
]

READABLE = [
    opens(
        "tensor-rank-64",
        z(tensor(storage(), (1,) * 64, (1,) * 64)),
        lambda c: c["tensor"].numpy().size == 1,
    ),
    opens(
        "tensor-rank-64-big-endian",
        z(tensor(storage(), (1,) * 64, (1,) * 64), byteorder=b"big"),
        lambda c: c["tensor"].numpy().size == 1,
    ),
    opens(
        "tensor-rank-63-transposed",
        z(tensor(storage(), (2, 2, *(1,) * 61), (1, 2, *(1,) * 61))),
        lambda c: c["tensor"].numpy().size == 4,
    ),
    opens(
        "tensor-stride-of-a-single-element",
        z(tensor(storage(), (1, 2, 2), (1 << 61, 1, 2))),
        lambda c: c["tensor"].numpy().size == 4,
    ),
    opens(
        "tensor-stride-of-a-single-element-big-endian",
        z(tensor(storage(), (1, 4), (1 << 61, 1)), byteorder=b"big"),
        lambda c: c["tensor"].numpy().size == 4,
    ),
    opens(
        "tensor-stride-of-a-single-packed-element",
        z(tensor(storage(key="1", count=64, kind="QUInt4x2Storage"), (1, 4), (1 << 61, 1))),
        lambda c: c["tensor"].numpy().size == 4,
    ),
    opens(
        "tensor-overlapping-windows",
        z(tensor(storage(), (3, 2), (1, 1))),
        lambda c: c["tensor"].numpy().tolist()[2] == [3, 4],
    ),
    opens(
        "tensor-expanded-a-little",
        z(tensor(storage(), (1000, 4), (0, 1))),
        lambda c: c["tensor"].numpy().shape == (1000, 4),
    ),
    opens(
        "tensor-expanded-to-2^40",
        z(tensor(storage(), (1 << 40,), (0,))),
        lambda c: c["tensor"][:10].numpy().tolist() == [1] * 10,
    ),
    opens("tensor-expanded-to-2^61", z(tensor(storage(), (1 << 61,), (0,)))),
    opens("tensor-expanded-in-two-ways", z(tensor(storage(), (1 << 30, 1 << 30), (0, 0)))),
    opens(
        "tensor-expanded-slice-of-a-slice",
        z(tensor(storage(), (1 << 29, 1 << 29, 4), (0, 0, 1))),
        lambda c: c["tensor"][5, 1 << 28].numpy().tolist() == [1, 2, 3, 4],
    ),
    opens("tensor-overlapping-expansion", z(tensor(storage(), (2, 3_000_000), (1, 0)))),
    opens(
        "tensor-zero-size-and-anything",
        z(tensor(storage(), (0, 5), (99, 99), offset=99)),
        lambda c: c["tensor"].numpy().shape == (0, 5),
    ),
    opens(
        "tensor-conj-of-floats",
        z(tensor(storage(), more=HOOKS + dict_of(text("conj"), TRUE))),
        lambda c: c["tensor"].numpy()[0, 0] == 1,
    ),
    Case(
        "tensor-zero-times-2^61",
        lambda _: z(tensor(storage(), (0, 1 << 61), (1, 1))),
        (MetadataError, LimitExceeded),
    ),
    Case(
        "tensor-zero-times-2^61-meta",
        lambda _: z(
            call(
                "torch._utils",
                "_rebuild_meta_tensor_no_storage",
                named("torch", "float32"),
                tuple_of(integer(0), integer(1 << 61), integer(1 << 61)),
                tuple_of(integer(1), integer(1), integer(1)),
                FALSE,
            )
        ),
        (MetadataError, LimitExceeded),
    ),
    either(
        "tensor-neg-of-bools",
        lambda _: z(
            tensor(
                storage(key="1", count=64, kind="BoolStorage"),
                (4,),
                (1,),
                more=HOOKS + dict_of(text("neg"), TRUE),
            )
        ),
    ),
    either(
        "tensor-neg-of-bytes",
        lambda _: z(
            tensor(
                storage(key="1", count=64, kind="ByteStorage"),
                (4,),
                (1,),
                more=HOOKS + dict_of(text("neg"), TRUE),
            )
        ),
    ),
    either(
        "tensor-neg-of-packed",
        lambda _: z(
            tensor(
                storage(key="1", count=64, kind="QUInt4x2Storage"),
                (4,),
                (1,),
                more=HOOKS + dict_of(text("neg"), TRUE),
            )
        ),
    ),
    either(
        "tensor-neg-of-complex32",
        lambda _: z(
            tensor(
                storage(key="1", count=64, kind=named("torch.storage", "UntypedStorage")),
                (4,),
                (1,),
                function="_rebuild_tensor_v3",
                more=HOOKS + named("torch", "complex32") + dict_of(text("neg"), TRUE),
            )
        ),
    ),
    either(
        "tensor-conj-of-complex32",
        lambda _: z(
            tensor(
                storage(key="1", count=64, kind=named("torch.storage", "UntypedStorage")),
                (4,),
                (1,),
                function="_rebuild_tensor_v3",
                more=HOOKS + named("torch", "complex32") + dict_of(text("conj"), TRUE),
            )
        ),
    ),
    either(
        "tensor-neg-of-fp8",
        lambda _: z(
            tensor(
                storage(key="1", count=64, kind=named("torch.storage", "UntypedStorage")),
                (4,),
                (1,),
                function="_rebuild_tensor_v3",
                more=HOOKS + named("torch", "float8_e8m0fnu") + dict_of(text("neg"), TRUE),
            )
        ),
    ),
    either(
        "tensor-conj-of-fp8",
        lambda _: z(
            tensor(
                storage(key="1", count=64, kind=named("torch.storage", "UntypedStorage")),
                (4,),
                (1,),
                function="_rebuild_tensor_v3",
                more=HOOKS + named("torch", "float8_e4m3fn") + dict_of(text("conj"), TRUE),
            )
        ),
    ),
    opens("tensor-nan-payloads", z(tensor(storage()), data=b"\xff" * 16)),
]

STORAGES = [
    refused("storage-count-too-large", z(tensor(storage(count=5))), MetadataError),
    refused("storage-count-too-small", z(tensor(storage(count=3))), MetadataError),
    refused("storage-count-2^61", z(tensor(storage(count=1 << 61))), MetadataError),
    refused("storage-count-2^62", z(tensor(storage(count=HUGE))), MetadataError),
    refused("storage-count-negative", z(tensor(storage(count=-4))), MetadataError),
    refused("storage-count-bool", z(tensor(storage(count=TRUE))), MetadataError),
    refused("storage-count-float", z(tensor(storage(count=real(4.0)))), MetadataError),
    refused("storage-count-text", z(tensor(storage(count=text("4")))), MetadataError),
    refused("storage-item-size-mismatch", z(tensor(storage(kind="DoubleStorage"))), MetadataError),
    refused("storage-missing-record", z(tensor(storage(key="9"))), MetadataError),
    refused("storage-key-empty", z(tensor(storage(key=""))), MetadataError),
    refused("storage-key-climbs", z(tensor(storage(key="../data.pkl", count=4))), MetadataError),
    refused("storage-key-absolute", z(tensor(storage(key="/etc/passwd"))), MetadataError),
    refused("storage-key-with-nul", z(tensor(storage(key="0\0"))), MetadataError),
    refused(
        "storage-key-in-other-case",
        torch_zip(stream(tensor(storage(key="A"))), {"a": DATA}),
        MetadataError,
    ),
    refused("storage-key-surrogate", z(tensor(storage(key="\ud800"))), MetadataError),
    refused(
        "storage-two-dtypes",
        z(tensor(storage()), tensor(storage(kind="IntStorage")), TUPLE2),
        MetadataError,
    ),
    refused(
        "storage-two-counts",
        z(
            tensor(storage(key="1", count=64, kind="ByteStorage"), (4,), (1,)),
            tensor(storage(key="1", count=16, kind="ByteStorage"), (4,), (1,)),
            TUPLE2,
        ),
        MetadataError,
    ),
    refused(
        "storage-two-dtypes-of-one-size",
        z(storage(key="1", count=16), storage(key="1", count=16, kind="IntStorage"), TUPLE2),
        MetadataError,
    ),
    refused(
        "storage-class-from-cuda-unknown",
        z(tensor(storage(kind=named("torch.cuda", "EvilStorage")))),
        PickleError,
    ),
    refused(
        "storage-class-wrong-module",
        z(tensor(storage(kind=named("evil", "FloatStorage")))),
        PickleError,
    ),
    opens("storage-location-anything", z(tensor(storage(location="\x1b[2J\0/etc/passwd")))),
    opens(
        "storage-of-nothing", torch_zip(stream(tensor(storage(count=0), (0,), (1,))), {"0": b""})
    ),
    opens("storage-bare", z(storage()), lambda c: c["tensor"].numpy().tolist() == [1, 2, 3, 4]),
    refused("storage-mutated-by-append", z(storage(), MARK, NONE, b"e"), PickleError),
]

REBUILDS = [
    refused("rebuild-no-arguments", z(call("torch._utils", "_rebuild_tensor_v2")), PickleError),
    refused(
        "rebuild-too-many-arguments",
        z(named("torch._utils", "_rebuild_tensor_v2"), tuple_of(storage(), *[NONE] * 40), REDUCE),
        PickleError,
    ),
    refused("rebuild-flags-are-a-list", z(tensor(storage(), more=HOOKS + EMPTY_LIST)), PickleError),
    opens(
        "rebuild-over-a-foreign-storage",
        z(tensor(call("os", "system", text("true")))),
        foreign("os.system"),
    ),
    either("rebuild-over-a-tensor", z(tensor(tensor(storage(), (4,), (1,)), (2, 2)))),
    Case(
        "rebuild-over-a-view",
        lambda _: z(tensor(tensor(storage(), (2,), (2,)), (2, 2), (1, 1))),
        (MetadataError, PickleError),
    ),
    Case(
        "rebuild-over-an-expanded-tensor",
        lambda _: z(tensor(tensor(storage(), (1 << 40,), (0,)), (1 << 40,), (1,))),
        (MetadataError, PickleError),
    ),
    Case(
        "rebuild-over-a-matrix",
        lambda _: z(tensor(tensor(storage(), (2, 2), (1, 2)), (4,), (1,))),
        (MetadataError, PickleError),
    ),
    Case(
        "rebuild-over-a-meta-tensor",
        lambda _: z(
            tensor(
                call(
                    "torch._utils",
                    "_rebuild_meta_tensor_no_storage",
                    named("torch", "float32"),
                    tuple_of(integer(4)),
                    tuple_of(integer(1)),
                    FALSE,
                )
            )
        ),
        (MetadataError, PickleError),
    ),
    refused(
        "rebuild-v3-dtype-is-text",
        z(tensor(storage(), function="_rebuild_tensor_v3", more=HOOKS + text("float32"))),
        PickleError,
    ),
    refused(
        "rebuild-v3-dtype-is-foreign",
        z(tensor(storage(), function="_rebuild_tensor_v3", more=HOOKS + named("torch", "float9"))),
        PickleError,
    ),
    refused(
        "rebuild-v3-wider-dtype-past-end",
        z(tensor(storage(), function="_rebuild_tensor_v3", more=HOOKS + V3)),
        MetadataError,
    ),
    opens(
        "rebuild-v3-wider-dtype-inside",
        z(tensor(storage(), (2,), (1,), function="_rebuild_tensor_v3", more=HOOKS + V3)),
    ),
    refused(
        "rebuild-meta-negative",
        z(
            call(
                "torch._utils",
                "_rebuild_meta_tensor_no_storage",
                V3,
                tuple_of(integer(-1)),
                tuple_of(integer(1)),
                FALSE,
            )
        ),
        MetadataError,
    ),
    Case(
        "rebuild-meta-rank-10000",
        lambda _: z(
            call(
                "torch._utils",
                "_rebuild_meta_tensor_no_storage",
                V3,
                tuple_of(*[integer(1 << 61)] * 10_000),
                tuple_of(*[integer(1)] * 10_000),
                FALSE,
            )
        ),
        (MetadataError, LimitExceeded),
    ),
    Case("rebuild-size-of-10000", lambda _: z(size_of(*[1 << 61] * 10_000)), ()),
    refused("rebuild-size-negative", z(size_of(-1)), MetadataError),
    opens(
        "rebuild-parameter-of-a-parameter",
        z(
            call(
                "torch._utils",
                "_rebuild_parameter",
                call("torch._utils", "_rebuild_parameter", tensor(storage()), TRUE, NONE),
                TRUE,
                NONE,
            )
        ),
    ),
    opens(
        "rebuild-parameter-of-text",
        z(call("torch._utils", "_rebuild_parameter", text("x"), TRUE, NONE)),
    ),
    refused(
        "rebuild-from-type-no-tuple",
        z(
            call(
                "torch._tensor",
                "_rebuild_from_type_v2",
                named("a", "b"),
                named("a", "C"),
                NONE,
                NONE,
            )
        ),
        PickleError,
    ),
    Case(
        "rebuild-from-type-function-is-an-array",
        lambda _: z(
            call(
                "torch._tensor",
                "_rebuild_from_type_v2",
                call(
                    "numpy._core.numeric",
                    "_frombuffer",
                    binbytes(b"\1\2"),
                    call("numpy", "dtype", text("u1"))
                    + tuple_of(
                        integer(3),
                        text("|"),
                        NONE,
                        NONE,
                        NONE,
                        integer(-1),
                        integer(-1),
                        integer(0),
                    )
                    + b"b",
                    tuple_of(integer(2)),
                    text("C"),
                ),
                named("a", "C"),
                EMPTY_TUPLE,
                NONE,
            )
        ),
        (PickleError,),
    ),
    Case(
        "rebuild-from-type-of-itself",
        lambda _: z(
            named("torch._tensor", "_rebuild_from_type_v2"),
            put(0),
            POP,
            call(
                "torch._tensor",
                "_rebuild_from_type_v2",
                get(0),
                named("torch", "Tensor"),
                tuple_of(get(0), get(0), EMPTY_TUPLE, NONE),
                NONE,
            ),
        ),
        (PickleError,),
    ),
    refused(
        "legacy-tensor-built-from-a-lie",
        z(
            named("torch", "FloatTensor"),
            EMPTY_TUPLE,
            b"\x81",
            MARK,
            storage(),
            integer(0),
            tuple_of(integer(99)),
            tuple_of(integer(1)),
            TUPLE,
            b"b",
        ),
        MetadataError,
    ),
    opens(
        "legacy-tensor-built-from-anything",
        z(
            named("torch", "FloatTensor"),
            EMPTY_TUPLE,
            b"\x81",
            dict_of(text("x"), call("os", "system", text("true"))),
            b"b",
        ),
        foreign("os.system"),
    ),
]

COMPOSITES = [
    refused(
        "sparse-unknown-layout",
        z(call("torch.serialization", "_get_layout", text("torch.evil"))),
        PickleError,
    ),
    refused(
        "sparse-layout-is-a-dtype",
        z(call("torch._utils", "_rebuild_sparse_tensor", V3, tuple_of(NONE))),
        PickleError,
    ),
    refused("sparse-parts-missing", z(sparse("sparse_coo", longs(1, 2))), PickleError),
    refused(
        "sparse-parts-are-text",
        z(sparse("sparse_coo", text("a"), text("b"), size_of(2))),
        PickleError,
    ),
    refused(
        "sparse-indices-of-other-count",
        z(sparse("sparse_coo", longs(1, 2), longs(3), size_of(9))),
        MetadataError,
    ),
    refused(
        "sparse-more-index-rows-than-dimensions",
        z(sparse("sparse_coo", longs(3, 2), longs(2), size_of(9))),
        MetadataError,
    ),
    refused(
        "sparse-values-of-other-shape",
        z(sparse("sparse_coo", longs(1, 2), longs(2, 3), size_of(9, 4))),
        MetadataError,
    ),
    refused(
        "sparse-size-negative",
        z(sparse("sparse_coo", longs(1, 2), longs(2), tuple_of(integer(-9)))),
        MetadataError,
    ),
    refused(
        "sparse-csr-of-rank-1",
        z(sparse("sparse_csr", longs(3), longs(2), longs(2), size_of(9))),
        MetadataError,
    ),
    refused(
        "sparse-csr-counts-differ",
        z(sparse("sparse_csr", longs(3), longs(3), longs(2), size_of(2, 2))),
        MetadataError,
    ),
    opens(
        "sparse-csr-scalar-values",
        z(sparse("sparse_csr", longs(3), longs(2), longs(2), size_of(2, 2))),
    ),
    opens(
        "sparse-indices-out-of-range",
        torch_zip(
            stream(sparse("sparse_coo", longs(1, 2), longs(2), size_of(1))),
            {"1": struct.pack("<8q", *[10**12] * 8)},
        ),
    ),
    Case(
        "sparse-size-of-rank-10000",
        lambda _: z(sparse("sparse_coo", longs(1, 2), longs(2), tuple_of(*[integer(1)] * 10_000))),
        (MetadataError, LimitExceeded),
    ),
    refused("quantised-unknown-scheme", z(q("evil_affine", real(1.0), integer(0))), PickleError),
    refused(
        "quantised-no-quantiser",
        z(tensor(storage(), function="_rebuild_qtensor", more=EMPTY_TUPLE + HOOKS)),
        PickleError,
    ),
    refused(
        "quantised-scale-is-text", z(q("per_tensor_affine", text("1"), integer(0))), PickleError
    ),
    refused(
        "quantised-zero-point-is-float",
        z(q("per_tensor_affine", real(1.0), real(0.0))),
        PickleError,
    ),
    refused(
        "quantised-axis-out-of-range",
        z(q("per_channel_affine", longs(4), longs(4), integer(3))),
        MetadataError,
    ),
    refused(
        "quantised-axis-negative",
        z(q("per_channel_affine", longs(4), longs(4), integer(-1))),
        MetadataError,
    ),
    refused(
        "quantised-scales-too-short",
        z(q("per_channel_affine", longs(3), longs(4), integer(0))),
        MetadataError,
    ),
    refused(
        "quantised-elements-past-the-end",
        z(q("per_tensor_affine", real(1.0), integer(0), size=(65,))),
        MetadataError,
    ),
    opens("quantised-scale-is-nan", z(q("per_tensor_affine", real(float("nan")), integer(0)))),
    refused(
        "nested-parts-are-text",
        z(call("torch._utils", "_rebuild_nested_tensor", *[text("x")] * 4)),
        PickleError,
    ),
    refused(
        "nested-sizes-and-strides-differ",
        z(
            call(
                "torch._utils",
                "_rebuild_nested_tensor",
                longs(8),
                longs(2, 2),
                longs(1, 2),
                longs(2),
            )
        ),
        PickleError,
    ),
    refused(
        "nested-buffer-is-a-matrix",
        z(
            call(
                "torch._utils",
                "_rebuild_nested_tensor",
                longs(2, 2),
                longs(2, 2),
                longs(2, 2),
                longs(2),
            )
        ),
        PickleError,
    ),
    refused(
        "device-index-is-text", z(call("torch", "device", text("cuda"), text("0"))), PickleError
    ),
    refused("device-is-a-number", z(call("torch", "device", integer(0))), PickleError),
]

SCRIPTS = [
    refused("byteorder-record-lies", z(tensor(storage()), byteorder=b"middle"), FormatError),
    refused("byteorder-record-empty", z(tensor(storage()), byteorder=b""), FormatError),
    refused(
        "byteorder-record-of-a-megabyte",
        z(tensor(storage()), byteorder=b"little" + bytes(1 << 20)),
        FormatError,
    ),
    refused(
        "byteorder-record-with-newline", z(tensor(storage()), byteorder=b"little\n"), FormatError
    ),
    refused("version-record-0", z(tensor(storage()), version=b"0"), FormatError),
    refused("version-record-11", z(tensor(storage()), version=b"11"), FormatError),
    refused("version-record-negative", z(tensor(storage()), version=b"-3"), FormatError),
    refused("version-record-empty", z(tensor(storage()), version=b""), FormatError),
    refused("version-record-not-ascii", z(tensor(storage()), version="٣".encode()), FormatError),
    refused("version-record-of-60-digits", z(tensor(storage()), version=b"3" * 60), FormatError),
]

CASES = [*GEOMETRY, *READABLE, *STORAGES, *REBUILDS, *COMPOSITES, *SCRIPTS]
