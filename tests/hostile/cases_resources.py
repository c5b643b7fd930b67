"""Pickles that would cost far more than their size: time, memory, stack."""

from __future__ import annotations

import struct

from holdfast.errors import FormatError, LimitExceeded, MetadataError, PickleError

from .case import Case, either, opens, refused
from .craft_pickle import (
    ADDITEMS,
    APPEND,
    APPENDS,
    BUILD,
    DICT,
    DUP,
    EMPTY_DICT,
    EMPTY_LIST,
    EMPTY_SET,
    EMPTY_TUPLE,
    FROZENSET,
    LIST,
    MARK,
    MEMOIZE,
    NEWOBJ,
    NONE,
    POP,
    REDUCE,
    SETITEM,
    SETITEMS,
    TUPLE,
    TUPLE1,
    TUPLE2,
    TUPLE3,
    binbytes,
    call,
    dict_of,
    doubled,
    get,
    integer,
    list_of,
    named,
    number,
    put,
    real,
    stream,
    text,
    tuple_of,
)
from .craft_torch import legacy, state, storage, tar, tensor, torch_zip, torchscript, weight

__all__ = ["BOMBS", "CASES"]

COSTLY = (LimitExceeded, PickleError, MetadataError)


def z(*parts: bytes, protocol: int = 2) -> bytes:
    """A zip around one pickle."""
    return torch_zip(stream(*parts, protocol=protocol))


LAUGHS = doubled(24, EMPTY_TUPLE)
"""2^24 leaves when written out: half a gigabyte of text from 50 bytes."""

LAUGHING_LIST = EMPTY_LIST + b"".join(put(i) + POP + list_of(get(i), get(i)) for i in range(24))


def chained(step: bytes, depth: int = 100_000, seed: bytes = NONE) -> bytes:
    """A value that is wrapped again and again by opcodes that take it from the stack."""
    return seed + step * depth


def slots(keys: list[bytes]) -> bytes:
    """A dict with these keys."""
    return EMPTY_DICT + MARK + b"".join(key + NONE for key in keys) + SETITEMS


COLLIDING = [number(i * ((1 << 61) - 1), 11) for i in range(1, 30_000)]
"""Multiples of 2^61 - 1, which CPython hashes to 0."""

DTYPE_U1 = call("numpy", "dtype", text("u1"), integer(0), integer(1))
PLAIN_STATE = tuple_of(
    integer(3), text("|"), NONE, NONE, NONE, integer(-1), integer(-1), integer(0)
)


def dtype(code: str, inside: bytes = PLAIN_STATE) -> bytes:
    """A numpy dtype with its state."""
    return call("numpy", "dtype", text(code), integer(0), integer(1)) + inside + BUILD


def array(shape: bytes, data: bytes, kind: bytes | None = None) -> bytes:
    """A numpy array with its state."""
    made = call(
        "numpy.core.multiarray",
        "_reconstruct",
        named("numpy", "ndarray"),
        tuple_of(integer(0)),
        binbytes(b"b"),
    )
    return made + tuple_of(integer(1), shape, kind or dtype("u1"), b"\x89", data) + BUILD


MILLION = 100_000
"""How often the long cases repeat: enough that anything quadratic takes hours."""

SHARED_LIST = EMPTY_LIST + put(0) + MARK + NONE * MILLION + APPENDS
LONG_KEY = "k" * 100_000

WALKS: list[Case] = [
    either("walk-list-shared-many-times", z(list_of(SHARED_LIST, get(0) * MILLION))),
    either(
        "walk-dict-shared-many-times",
        z(
            list_of(
                EMPTY_DICT
                + put(0)
                + MARK
                + b"".join(integer(i) + NONE for i in range(50_000))
                + SETITEMS,
                get(0) * MILLION,
            )
        ),
    ),
    either(
        "walk-object-shared-many-times",
        z(
            list_of(
                named("a", "B")
                + EMPTY_TUPLE
                + NEWOBJ
                + put(0)
                + slots([text(f"k{i}") for i in range(20_000)])
                + BUILD,
                get(0) * 50_000,
            )
        ),
    ),
    either(
        "walk-module-shared-many-times",
        z(
            list_of(
                named("m", "M")
                + EMPTY_TUPLE
                + NEWOBJ
                + put(0)
                + dict_of(
                    text("_parameters"),
                    slots([text(f"k{i}") for i in range(20_000)]),
                    text("_buffers"),
                    EMPTY_DICT,
                    text("_modules"),
                    EMPTY_DICT,
                )
                + BUILD,
                get(0) * 50_000,
            )
        ),
    ),
    opens("walk-binary-tree-of-shared-lists", torch_zip(state(LAUGHING_LIST))),
    opens("walk-binary-tree-of-shared-tuples", torch_zip(state(LAUGHS))),
    opens("walk-binary-tree-of-tensors", z(weight(), DUP + TUPLE2, (DUP + TUPLE2) * 20)),
    opens("walk-list-inside-itself", z(EMPTY_LIST + put(0) + get(0) + APPEND)),
    opens("walk-dict-inside-itself", z(EMPTY_DICT + put(0) + text("a") + get(0) + SETITEM)),
    opens(
        "walk-object-inside-its-own-state",
        z(named("a", "B") + EMPTY_TUPLE + NEWOBJ + put(0) + dict_of(text("self"), get(0)) + BUILD),
    ),
    opens(
        "walk-cycle-of-two-with-a-tensor",
        z(
            EMPTY_DICT
            + put(0)
            + text("a")
            + EMPTY_DICT
            + put(1)
            + MARK
            + text("up")
            + get(0)
            + text("w")
            + weight()
            + SETITEMS
            + SETITEM
        ),
        lambda ckpt: "a.w" in ckpt,
    ),
    either(
        "names-long-key-over-many-tensors",
        lambda _: z(dict_of(text(LONG_KEY), list_of(weight() + put(0), get(0) * 2000))),
    ),
    either(
        "names-long-keys-nested",
        lambda _: z(
            text(LONG_KEY),
            put(0),
            POP,
            weight(),
            put(1),
            POP,
            EMPTY_DICT
            + put(2)
            + MARK
            + get(0)
            + (EMPTY_DICT + MARK + get(0)) * 40
            + list_of(get(1) * 100)
            + SETITEMS * 41,
        ),
    ),
    either(
        "names-all-alike-opaque-keys",
        z(
            named("a", "b"),
            put(0),
            POP,
            weight(),
            put(1),
            POP,
            EMPTY_DICT + MARK + (get(0) + EMPTY_TUPLE + REDUCE + get(1)) * 30_000 + SETITEMS,
        ),
    ),
    either(
        "names-all-alike-bytes-keys",
        z(
            weight(),
            put(1),
            POP,
            EMPTY_DICT
            + MARK
            + b"".join(binbytes(b"x" * 80 + b"%05d" % i) + get(1) for i in range(15_000))
            + SETITEMS,
        ),
    ),
    opens(
        "names-dots-that-collide",
        z(
            dict_of(
                text("a"),
                dict_of(text("b"), weight() + put(0)),
                text("a.b"),
                get(0),
                text("a.b#2"),
                get(0),
            )
        ),
        lambda ckpt: len(ckpt) == 3,
    ),
    opens(
        "names-int-and-text-collide",
        z(dict_of(integer(1), weight() + put(0), text("1"), get(0))),
        lambda ckpt: len(ckpt) == 2,
    ),
    opens("names-empty-key", z(dict_of(text(""), weight()))),
    opens("names-control-characters", z(dict_of(text("\x1b[2J\u202e\0\ud800"), weight()))),
]

TENS = EMPTY_LIST + b"".join(put(i) + POP + list_of(get(i) * 10) for i in range(40))
"""10^40 lists when written out, from 547 bytes."""

MUTUAL = 60
BACK = b"".join(EMPTY_LIST + put(i) for i in range(MUTUAL)) + b"".join(
    get(i) + MARK + b"".join(get(j) for j in range(min(i + 2, MUTUAL))) + APPENDS + POP
    for i in range(MUTUAL)
)
"""Lists of which each holds the next one and all before it. From the first there is one path through them, from the last 2^58."""

EXPANDING: list[Case] = [
    opens("expands-lists-of-ten", torch_zip(state(TENS))),
    opens("expands-tuples-doubled", torch_zip(state(doubled(60, EMPTY_TUPLE)))),
    opens("expands-tensors-doubled", z(weight(), (DUP + TUPLE2) * 40)),
    opens("expands-one-text", lambda _: z(list_of(text("x" * 1_000_000) + put(0), get(0) * 100_000))),
    opens("expands-one-bytes", lambda _: z(list_of(binbytes(b"x" * 1_000_000) + put(0), get(0) * 100_000))),
    opens(
        "expands-one-key", lambda _: z(list_of(text("x" * 1000) + put(0), (MARK + get(0) + NONE + DICT) * 20_000))),
    opens(
        "expands-one-member", lambda _: z(list_of(text("x" * 1000) + put(0), (EMPTY_SET + MARK + get(0) + ADDITEMS) * 20_000)),
    ),
    opens(
        "expands-one-array",
        lambda _: z(list_of(array(tuple_of(integer(1000)), binbytes(bytes(1000))) + put(0), get(0) * 20_000)),
    ),
    opens(
        "expands-one-object", lambda _: z(list_of(named("a" * 1000, "B") + EMPTY_TUPLE + NEWOBJ + put(0), get(0) * 20_000)),
    ),
    opens("expands-state", z(named("a", "B"), EMPTY_TUPLE, NEWOBJ, dict_of(text("s"), TENS), BUILD)),
    opens("expands-state-that-is-no-dict", z(named("a", "B"), EMPTY_TUPLE, NEWOBJ, TENS, BUILD)),
    opens("expands-arguments", z(named("a", "B"), tuple_of(TENS), REDUCE)),
    opens("expands-arguments-of-what-is-called", z(named("a", "B"), tuple_of(TENS), REDUCE, EMPTY_TUPLE, REDUCE)),
    opens("expands-appended", z(named("a", "B"), EMPTY_TUPLE, NEWOBJ, TENS, APPEND)),
    opens("expands-entries", z(named("a", "B"), EMPTY_TUPLE, NEWOBJ, text("k"), TENS, SETITEM)),
    opens(
        "expands-beside-a-module",
        z(
            named("a", "B"), EMPTY_TUPLE, NEWOBJ,
            dict_of(
                text("_parameters"), EMPTY_DICT, text("_buffers"), EMPTY_DICT, text("_modules"), EMPTY_DICT, text("hooks"), TENS
            ),
            BUILD,
        ),
    ),
    opens(
        "expands-attributes-of-an-ordered-dict", z(call("collections", "OrderedDict"), dict_of(text("s"), TENS), BUILD)),
    opens(
        "expands-state-of-a-tensor", z(call("torch._utils", "_rebuild_parameter_with_state", weight(), b"\x88", EMPTY_DICT, TENS)),
    ),
    opens("expands-torchscript-constants", torchscript(stream(EMPTY_DICT), stream(TENS))),
    opens("expands-legacy", legacy(state(TENS, legacy_ids=True))),
    opens("expands-tar", tar(stream(dict_of(text("w"), TENS)))),
    opens("expands-lists-that-hold-each-other", z(list_of(BACK))),
    opens(
        "expands-many-with-one-parent",
        z(EMPTY_DICT + put(0), MARK, b"".join(text(f"k{i}") + dict_of(text("up"), get(0)) for i in range(500)), SETITEMS),
        lambda ckpt: repr(ckpt.tree).count("{...}") == 500,
    ),
]  # fmt: skip

EXPANSION: list[Case] = [
    refused("bomb-laughs-as-dict-key", z(EMPTY_DICT, LAUGHS, NONE, SETITEM), *COSTLY),
    refused("bomb-laughs-as-set-member", z(EMPTY_SET, MARK, LAUGHS, ADDITEMS), *COSTLY),
    refused("bomb-laughs-as-frozenset-member", z(MARK, LAUGHS, FROZENSET), *COSTLY),
    refused(
        "bomb-laughs-in-an-ordered-dict",
        z(call("collections", "OrderedDict", list_of(list_of(LAUGHS, NONE)))),
        *COSTLY,
    ),
    refused(
        "bomb-laughs-in-a-counter",
        z(call("collections", "Counter", dict_of(LAUGHS, NONE))),
        *COSTLY,
    ),
    refused("bomb-laughs-in-builtins-set", z(call("builtins", "set", list_of(LAUGHS))), *COSTLY),
    refused(
        "bomb-laughs-in-a-defaultdict",
        z(call("collections", "defaultdict", NONE), LAUGHS, NONE, SETITEM),
        *COSTLY,
    ),
    refused(
        "bomb-laughs-of-frozensets",
        z(
            EMPTY_SET,
            MARK,
            MARK + FROZENSET + (put(0) + POP + MARK + get(0) + get(0) + TUPLE1 + FROZENSET) * 70,
            ADDITEMS,
        ),
        *COSTLY,
    ),
    refused("bomb-laughs-as-storage-class", z(storage(kind=LAUGHS)), *COSTLY),
    refused("bomb-laughs-as-storage-key", z(storage(key=LAUGHS)), *COSTLY),
    refused("bomb-laughs-as-storage-count", z(storage(count=LAUGHS)), *COSTLY),
    refused("bomb-laughs-as-storage-tag", z(storage(tag=LAUGHS)), *COSTLY),
    refused("bomb-laughs-as-location", z(storage(location=LAUGHS)), *COSTLY),
    refused(
        "bomb-laughs-as-legacy-view",
        legacy(stream(tensor(storage(view=tuple_of(text("v"), LAUGHS, integer(1)))))),
        *COSTLY,
    ),
    refused(
        "bomb-laughs-as-legacy-protocol", legacy(stream(NONE), protocol=stream(LAUGHS)), FormatError
    ),
    refused(
        "bomb-laughing-list-as-legacy-protocol",
        legacy(stream(NONE), protocol=stream(LAUGHING_LIST)),
        FormatError,
    ),
    refused(
        "bomb-laughs-as-legacy-keys",
        legacy(state(legacy_ids=True), keys=stream(LAUGHS)),
        FormatError,
    ),
    refused(
        "bomb-laughs-in-legacy-keys",
        legacy(state(legacy_ids=True), keys=stream(list_of(LAUGHS))),
        FormatError,
    ),
    refused("bomb-laughs-as-tar-persid", tar(stream(LAUGHS, b"Q")), FormatError),
    refused("bomb-laughs-as-tar-owner", tar(tensors={"owner": LAUGHS}), FormatError),
    refused("bomb-laughs-as-tensor-size", z(tensor(storage(), size=LAUGHS)), *COSTLY),
    refused(
        "bomb-laughs-inside-tensor-size",
        z(tensor(storage(), size=tuple_of(LAUGHS, integer(2)))),
        *COSTLY,
    ),
    refused(
        "bomb-laughs-as-tensor-stride",
        z(tensor(storage(), stride=tuple_of(LAUGHS, LAUGHS))),
        *COSTLY,
    ),
    refused("bomb-laughs-as-tensor-offset", z(tensor(storage(), offset=LAUGHS)), *COSTLY),
    refused(
        "bomb-laughs-as-tensor-flags", z(tensor(storage(), more=b"\x89" + NONE + LAUGHS)), *COSTLY
    ),
    refused("bomb-laughs-as-torch-size", z(call("torch", "Size", LAUGHS)), *COSTLY),
    refused("bomb-laughs-as-device", z(call("torch", "device", LAUGHS)), *COSTLY),
    refused(
        "bomb-laughs-as-layout", z(call("torch.serialization", "_get_layout", LAUGHS)), *COSTLY
    ),
    refused(
        "bomb-laughs-as-sparse-layout",
        z(call("torch._utils", "_rebuild_sparse_tensor", LAUGHS, EMPTY_TUPLE)),
        *COSTLY,
    ),
    refused(
        "bomb-laughs-as-dtype",
        z(tensor(storage(), function="_rebuild_tensor_v3", more=b"\x89" + NONE + LAUGHS)),
        *COSTLY,
    ),
    refused(
        "bomb-laughs-as-qscheme",
        z(tensor(storage(), function="_rebuild_qtensor", more=tuple_of(LAUGHS) + b"\x89" + NONE)),
        *COSTLY,
    ),
    refused(
        "bomb-laughs-as-q-axis",
        z(
            tensor(
                storage(),
                function="_rebuild_qtensor",
                more=tuple_of(named("torch", "per_channel_affine"), weight(), weight(), LAUGHS)
                + b"\x89"
                + NONE,
            )
        ),
        *COSTLY,
    ),
    refused("bomb-laughs-as-numpy-dtype", z(call("numpy", "dtype", LAUGHS)), *COSTLY),
    refused(
        "bomb-laughs-as-numpy-state",
        z(DTYPE_U1, tuple_of(integer(3), LAUGHS, NONE, NONE, NONE), BUILD),
        *COSTLY,
    ),
    refused("bomb-laughs-as-numpy-shape", z(array(LAUGHS, binbytes(b"\1"))), *COSTLY),
    refused("bomb-laughs-as-path", z(call("pathlib", "PosixPath", LAUGHS)), *COSTLY),
    opens("bomb-laughs-as-torchscript-constants", torchscript(stream(EMPTY_DICT), stream(LAUGHS))),
    opens("bomb-laughs-as-state", z(named("a", "B"), EMPTY_TUPLE, NEWOBJ, LAUGHS, BUILD)),
    opens("bomb-laughs-as-arguments", z(named("a", "B"), LAUGHS, REDUCE)),
    opens("bomb-laughs-by-dup-of-lists", z(EMPTY_LIST, (DUP + TUPLE2 + TUPLE1) * 20)),
]

HASHES: list[Case] = [
    refused("hash-colliding-integers", lambda _: z(slots(COLLIDING)), *COSTLY),
    refused(
        "hash-colliding-integers-in-a-set",
        lambda _: z(EMPTY_SET, MARK, *COLLIDING, ADDITEMS),
        *COSTLY,
    ),
    refused(
        "hash-colliding-tuples", lambda _: z(slots([key + TUPLE1 for key in COLLIDING])), *COSTLY
    ),
    either(
        "hash-floats-of-many-sizes",
        lambda _: z(slots([real(float(i << 61)) for i in range(1, 30_000)])),
    ),
    opens("hash-a-few-colliding-integers", z(slots(COLLIDING[:2000]))),
    refused(
        "hash-long-text-over-and-over",
        lambda _: z(
            text("x" * 300_000),
            put(0),
            POP,
            EMPTY_DICT + MARK + (get(0) + TUPLE1 + NONE) * 100_000 + SETITEMS,
        ),
        *COSTLY,
    ),
    refused("hash-list-as-key", z(EMPTY_DICT, EMPTY_LIST, NONE, SETITEM), *COSTLY),
    refused("hash-dict-as-member", z(EMPTY_SET, MARK, EMPTY_DICT, ADDITEMS), *COSTLY),
    refused(
        "hash-tuple-of-list-as-key", z(EMPTY_DICT, EMPTY_LIST + TUPLE1, NONE, SETITEM), *COSTLY
    ),
    refused(
        "hash-array-as-key",
        z(EMPTY_DICT, array(tuple_of(integer(1)), binbytes(b"\1")), NONE, SETITEM),
        *COSTLY,
    ),
    refused(
        "hash-bytearray-as-key",
        z(EMPTY_DICT, b"\x96" + struct.pack("<Q", 1) + b"x", NONE, SETITEM, protocol=5),
        *COSTLY,
    ),
    refused(
        "hash-slice-as-key",
        z(EMPTY_DICT, call("builtins", "slice", NONE, NONE, NONE), NONE, SETITEM),
        *COSTLY,
    ),
    # Python 3.12 can hash a slice, and hashes all that is inside of it.
    either(
        "hash-slice-of-laughs-as-key",
        z(
            EMPTY_DICT,
            call("builtins", "slice", doubled(30, EMPTY_TUPLE), NONE, NONE),
            NONE,
            SETITEM,
        ),
    ),
    refused(
        "hash-structured-scalar-as-key",
        z(
            EMPTY_DICT,
            call(
                "numpy.core.multiarray",
                "scalar",
                dtype(
                    "V2",
                    tuple_of(
                        integer(3),
                        text("|"),
                        NONE,
                        tuple_of(text("a")),
                        dict_of(text("a"), tuple_of(dtype("u1"), integer(0))),
                        integer(2),
                        integer(1),
                        integer(0),
                    ),
                ),
                binbytes(b"ab"),
            ),
            NONE,
            SETITEM,
        ),
        *COSTLY,
    ),
    opens("hash-nan-keys", z(slots([real(float("nan"))] * 2000))),
    opens("hash-tensor-as-key", z(EMPTY_DICT, weight(), NONE, SETITEM)),
    opens(
        "hash-range-as-key",
        z(EMPTY_DICT, call("builtins", "range", integer(1 << 62)), NONE, SETITEM),
    ),
    opens("hash-device-as-key", z(EMPTY_DICT, call("torch", "device", text("cpu")), NONE, SETITEM)),
]

NESTING: list[Case] = [
    refused("nest-tuples", lambda _: z(chained(TUPLE1)), LimitExceeded),
    refused("nest-pairs", lambda _: z(NONE * 100_000, NONE, TUPLE2 * 100_000), LimitExceeded),
    refused("nest-triples", lambda _: z(NONE * 200_000, NONE, TUPLE3 * 100_000), LimitExceeded),
    refused(
        "nest-lists", lambda _: z(EMPTY_LIST * 100_000, EMPTY_LIST, APPEND * 100_000), LimitExceeded
    ),
    refused(
        "nest-dicts",
        lambda _: z((EMPTY_DICT + NONE) * 100_000, NONE, SETITEM * 100_000),
        LimitExceeded,
    ),
    refused("nest-marks-of-lists", lambda _: z(MARK * 100_000, LIST * 100_000), LimitExceeded),
    refused(
        "nest-marks-of-dicts",
        lambda _: z((MARK + NONE) * 100_000, NONE, DICT * 100_000),
        LimitExceeded,
    ),
    refused("nest-marks-of-tuples", lambda _: z(MARK * 65, TUPLE * 65), LimitExceeded),
    refused("nest-marks-unclosed", lambda _: z(MARK * 500_000), LimitExceeded),
    refused(
        "nest-objects-by-state",
        lambda _: z(
            named("a", "B"),
            put(0),
            POP,
            (get(0) + EMPTY_TUPLE + NEWOBJ) * 50_000,
            NONE,
            BUILD * 50_000,
        ),
        LimitExceeded,
    ),
    refused(
        "nest-objects-by-arguments",
        lambda _: z(
            named("a", "B"), put(0), POP, get(0) * 50_000, NONE, (TUPLE1 + REDUCE) * 50_000
        ),
        LimitExceeded,
    ),
    refused(
        "nest-ordered-dicts",
        lambda _: z(
            named("collections", "OrderedDict"),
            put(0),
            POP,
            (get(0) + EMPTY_TUPLE + REDUCE + NONE) * 50_000,
            NONE,
            SETITEM * 50_000,
        ),
        LimitExceeded,
    ),
    refused(
        "nest-default-dicts",
        lambda _: z(
            named("collections", "defaultdict"),
            put(0),
            POP,
            (get(0) + EMPTY_TUPLE + REDUCE + NONE) * 50_000,
            NONE,
            SETITEM * 50_000,
        ),
        LimitExceeded,
    ),
    refused(
        "nest-counters",
        lambda _: z(
            named("collections", "Counter"),
            put(0),
            POP,
            (get(0) + EMPTY_TUPLE + REDUCE + NONE) * 50_000,
            NONE,
            SETITEM * 50_000,
        ),
        LimitExceeded,
    ),
    refused(
        "nest-foreign-items",
        lambda _: z(
            named("a", "B"),
            put(0),
            POP,
            (get(0) + EMPTY_TUPLE + REDUCE) * 50_000,
            NONE,
            APPEND * 50_000,
        ),
        LimitExceeded,
    ),
    Case(
        "nest-slices",
        lambda _: z(
            named("builtins", "slice"),
            put(0),
            POP,
            get(0) * 50_000,
            NONE,
            (NONE + NONE + TUPLE3 + REDUCE) * 50_000,
        ),
        COSTLY,
    ),
    Case(
        "nest-frozensets",
        lambda _: z(chained(put(0) + POP + MARK + get(0) + FROZENSET, 5000, MARK + FROZENSET)),
        COSTLY,
    ),
    Case(
        "nest-subclass-rebuilds",
        lambda _: z(
            named("torch._tensor", "_rebuild_from_type_v2"),
            put(0),
            POP,
            named("torch", "Tensor"),
            put(1),
            POP,
            chained(put(2) + POP + tuple_of(get(0), get(1), get(2), NONE), 3000, tuple_of()),
            put(2),
            POP,
            get(0),
            get(2),
            REDUCE,
        ),
        (FormatError, LimitExceeded),
    ),
    Case(
        "nest-subclass-types",
        lambda _: z(
            named("torch._tensor", "_rebuild_from_type_v2"),
            put(0),
            POP,
            chained(
                put(1) + POP + get(0) + tuple_of(get(0), get(1), EMPTY_TUPLE, NONE) + REDUCE,
                3000,
                named("a", "b") + EMPTY_TUPLE + REDUCE,
            ),
        ),
        (FormatError, LimitExceeded),
    ),
    Case(
        "nest-tensor-attributes",
        lambda _: z(
            weight(),
            put(0),
            POP,
            named("torch._tensor", "_rebuild_from_type_v2"),
            put(1),
            POP,
            named("torch._utils", "_rebuild_parameter_with_state"),
            put(2),
            POP,
            chained(
                put(3) + POP + get(2) + tuple_of(get(0), b"\x89", NONE, get(3)) + REDUCE, 30_000
            ),
        ),
        (),
    ),
    Case(
        "nest-tensors-in-dtype-state",
        lambda _: z(
            chained(
                put(0)
                + POP
                + DTYPE_U1
                + tuple_of(
                    integer(3), text("|"), get(0), NONE, NONE, integer(1), integer(1), integer(0)
                )
                + BUILD,
                3000,
            )
        ),
        (LimitExceeded,),
    ),
    Case(
        "nest-arrays-of-objects",
        lambda _: z(
            chained(
                put(0)
                + POP
                + call(
                    "numpy.core.multiarray",
                    "_reconstruct",
                    named("numpy", "ndarray"),
                    EMPTY_TUPLE,
                    binbytes(b"b"),
                )
                + tuple_of(integer(1), EMPTY_TUPLE, NONE, b"\x89", list_of(get(0)))
                + BUILD,
                3000,
            )
        ),
        (LimitExceeded,),
    ),
    opens("nest-64-is-too-deep-only-beyond", z(EMPTY_LIST * 50 + EMPTY_LIST + APPEND * 50)),
]

LENGTHS: list[Case] = [
    refused("length-binunicode-2^31", z(b"X\x00\x00\x00\x80")),
    refused("length-binunicode-2^32-1", z(b"X\xff\xff\xff\xff")),
    refused("length-binunicode8-2^62", z(b"\x8d" + struct.pack("<Q", 1 << 62), protocol=4)),
    refused("length-binunicode8-2^64-1", z(b"\x8d" + b"\xff" * 8, protocol=4)),
    refused("length-binstring-negative", z(b"T\xff\xff\xff\xff")),
    refused("length-binstring-2^31-1", z(b"T\xff\xff\xff\x7f")),
    refused("length-binbytes-2^31", z(b"B\x00\x00\x00\x80", protocol=3)),
    refused("length-binbytes8-2^63", z(b"\x8e" + struct.pack("<Q", 1 << 63), protocol=4)),
    refused("length-bytearray8-2^62", z(b"\x96" + struct.pack("<Q", 1 << 62), protocol=5)),
    refused("length-long4-negative", z(b"\x8b\xff\xff\xff\xff")),
    refused("length-long4-2^31-1", z(b"\x8b\xff\xff\xff\x7f"), FormatError, LimitExceeded),
    refused("length-long1-40-bytes", z(b"\x8a\x28" + b"\x7f" * 40), LimitExceeded),
    refused("length-long1-255-bytes", z(b"\x8a\xff" + b"\x7f" * 255), LimitExceeded),
    refused(
        "length-int-of-a-million-digits",
        lambda _: z(b"I" + b"9" * 1_000_000 + b"\n"),
        PickleError,
        LimitExceeded,
    ),
    refused(
        "length-long-of-a-million-digits",
        lambda _: z(b"L" + b"9" * 1_000_000 + b"L\n"),
        PickleError,
        LimitExceeded,
    ),
    refused("length-int-of-60-digits", z(b"I" + b"9" * 60 + b"\n"), PickleError, LimitExceeded),
    refused(
        "length-float-of-a-million-digits",
        lambda _: z(b"F1." + b"0" * 1_000_000 + b"\n"),
        PickleError,
        LimitExceeded,
    ),
    refused("length-memo-index-2^32-1", z(NONE + put(0xFFFFFFFF)), PickleError),
    refused("length-memo-index-10^9", z(NONE + b"p1000000000\n"), PickleError),
    refused("length-memo-index-100-digits", z(NONE + b"p" + b"9" * 100 + b"\n"), PickleError),
    refused("length-memo-sparse", z(NONE, b"".join(put(i * 1000) for i in range(100)))),
    refused("length-memoize-after-sparse", z(NONE, put(1), MEMOIZE)),
    opens("length-memo-written-a-lot", lambda _: z(NONE, MEMOIZE * 500_000)),
    opens("length-memo-rewritten-a-lot", lambda _: z(NONE, put(0) * 200_000)),
]

ALLOCATING: list[Case] = [
    opens(
        "torchscript-constants-are-an-array",
        torchscript(stream(EMPTY_DICT), stream(array(tuple_of(integer(2)), binbytes(b"ab")))),
    ),
    refused("alloc-bytearray-of-2^30", z(call("builtins", "bytearray", integer(1 << 30)))),
    refused("alloc-bytes-of-2^30", z(call("builtins", "bytes", integer(1 << 30)))),
    opens(
        "alloc-list-of-range",
        z(call("builtins", "list", call("builtins", "range", integer(1 << 40)))),
    ),
    opens("alloc-range-of-2^100", z(call("builtins", "range", integer(1 << 100)))),
    refused(
        "alloc-set-of-range",
        z(call("builtins", "set", call("builtins", "range", integer(1 << 40)))),
    ),
    refused(
        "alloc-ordered-dict-of-range",
        z(call("collections", "OrderedDict", call("builtins", "range", integer(1 << 40)))),
    ),
    opens("alloc-torch-tensor-of-2^40", z(call("torch", "Tensor", integer(1 << 40)))),
    opens(
        "alloc-torch-float-tensor-newobj",
        z(named("torch", "FloatTensor"), tuple_of(integer(1 << 40)), NEWOBJ),
    ),
    opens("alloc-torch-storage-of-2^40", z(call("torch", "FloatStorage", integer(1 << 40)))),
    opens("alloc-torch-zeros", z(call("torch", "zeros", integer(1 << 40)))),
    opens("alloc-numpy-zeros", z(call("numpy", "zeros", integer(1 << 40)))),
    opens("alloc-numpy-ndarray-call", z(call("numpy", "ndarray", tuple_of(integer(1 << 40))))),
    refused("alloc-numpy-array-lying-shape", z(array(tuple_of(integer(1 << 40)), binbytes(b"\1")))),
    refused("alloc-numpy-array-negative-shape", z(array(tuple_of(integer(-1)), binbytes(b"\1")))),
    refused("alloc-numpy-array-bool-shape", z(array(tuple_of(b"\x88"), binbytes(b"\1")))),
    refused(
        "alloc-numpy-array-overflowing-shape",
        z(array(tuple_of(integer(1 << 62), integer(4)), binbytes(b""))),
    ),
    refused(
        "alloc-numpy-array-zero-times-huge",
        z(array(tuple_of(integer(0), integer((1 << 63) - 1), integer(1 << 62)), binbytes(b""))),
    ),
    refused(
        "alloc-numpy-array-rank-10000", z(array(tuple_of(*[integer(1)] * 10_000), binbytes(b"\1")))
    ),
    refused("alloc-numpy-array-rank-65", z(array(tuple_of(*[integer(1)] * 65), binbytes(b"\1")))),
    opens("alloc-numpy-dtype-huge-item", z(call("numpy", "dtype", text("V999999999")))),
    opens("alloc-numpy-dtype-unicode-overflow", z(call("numpy", "dtype", text("U999999999")))),
    opens(
        "alloc-numpy-dtype-object", z(call("numpy", "dtype", text("O8"), integer(0), integer(1)))
    ),
    opens(
        "alloc-numpy-dtype-expression", z(call("numpy", "dtype", text("f4,(1000000,1000000)f8")))
    ),
    opens(
        "alloc-numpy-dtype-alias-code",
        z(call("numpy", "dtype", text("a5"), integer(0), integer(1))),
    ),
    refused(
        "alloc-numpy-scalar-wrong-bytes",
        z(call("numpy.core.multiarray", "scalar", dtype("f8"), binbytes(b"1234"))),
    ),
    refused(
        "alloc-numpy-scalar-huge-item",
        z(call("numpy.core.multiarray", "scalar", dtype("V999999999"), binbytes(b"1"))),
    ),
    Case(
        "alloc-numpy-scalar-bad-unicode",
        lambda _: z(
            call(
                "numpy.core.multiarray",
                "scalar",
                dtype(
                    "U1",
                    tuple_of(
                        integer(3), text("<"), NONE, NONE, NONE, integer(4), integer(4), integer(0)
                    ),
                ),
                binbytes(b"\xff" * 4),
            )
        ),
        (PickleError,),
    ),
    refused(
        "alloc-numpy-datetime-bad-unit",
        z(
            call("numpy", "dtype", text("M8"), integer(0), integer(1))
            + tuple_of(
                integer(4),
                text("<"),
                NONE,
                NONE,
                NONE,
                integer(-1),
                integer(-1),
                integer(0),
                tuple_of(
                    EMPTY_DICT, tuple_of(binbytes(b"eval"), integer(1), integer(1), integer(1))
                ),
            )
            + BUILD
        ),
    ),
    refused(
        "alloc-numpy-field-beyond-end",
        z(
            dtype(
                "V2",
                tuple_of(
                    integer(3),
                    text("|"),
                    NONE,
                    tuple_of(text("a")),
                    dict_of(text("a"), tuple_of(dtype("u1"), integer(2))),
                    integer(2),
                    integer(1),
                    integer(0),
                ),
            )
        ),
    ),
    Case(
        "alloc-numpy-many-fields",
        lambda _: z(
            text("u1"),
            POP,
            dtype("u1"),
            put(0),
            POP,
            dtype(
                "V20000",
                tuple_of(
                    integer(3),
                    text("|"),
                    NONE,
                    tuple_of(*[text(f"f{i}") for i in range(20_000)]),
                    dict_of(*[text(f"f{i}") + tuple_of(get(0), integer(i)) for i in range(20_000)]),
                    integer(20_000),
                    integer(1),
                    integer(0),
                ),
            ),
        ),
        (),
    ),
    refused(
        "alloc-copies-of-a-long-list",
        lambda _: z(
            list_of(
                SHARED_LIST,
                named("builtins", "set") + put(1),
                (get(1) + get(0) + TUPLE1 + REDUCE) * 1000,
            )
        ),
        *COSTLY,
    ),
    refused(
        "alloc-copies-of-long-bytes",
        lambda _: z(
            list_of(
                binbytes(bytes(500_000)) + put(0),
                named("builtins", "bytearray") + put(1),
                (get(1) + get(0) + TUPLE1 + REDUCE) * 1000,
            )
        ),
        *COSTLY,
    ),
    refused(
        "alloc-copies-of-long-text",
        lambda _: z(
            list_of(
                tuple_of(text("x" * 500_000), text("latin1")) + put(0),
                named("_codecs", "encode") + put(1),
                (get(1) + get(0) + REDUCE) * 1000,
            )
        ),
        *COSTLY,
    ),
    refused("alloc-paths-of-long-text", z(call("pathlib", "PosixPath", text("a/" * 100_000)))),
    opens("alloc-empty-sets", lambda _: z(MARK, EMPTY_SET * 100_000, LIST, protocol=4)),
    opens("alloc-empty-dicts", lambda _: z(MARK, EMPTY_DICT * 100_000, LIST)),
    refused(
        "alloc-empty-sets-by-the-million",
        lambda _: z(MARK, EMPTY_SET * 1_300_000, LIST, protocol=4),
        LimitExceeded,
    ),
    opens(
        "alloc-foreign-objects",
        lambda _: z(
            named("a", "b"), put(0), MARK, (get(0) + EMPTY_TUPLE + NEWOBJ) * 50_000, LIST, TUPLE2
        ),
    ),
    opens(
        "alloc-distinct-globals",
        lambda _: z(MARK, *[named("a", str(i)) for i in range(50_000)], LIST),
    ),
    opens(
        "alloc-tensors-from-the-memo",
        lambda _: z(
            storage(),
            put(0),
            POP,
            named("torch._utils", "_rebuild_tensor_v2"),
            put(1),
            POP,
            tuple_of(get(0), integer(0), EMPTY_TUPLE, EMPTY_TUPLE),
            put(2),
            POP,
            MARK,
            (get(1) + get(2) + REDUCE) * 20_000,
            LIST,
        ),
    ),
    opens(
        "alloc-references-to-one-tensor",
        lambda _: z(weight(), put(0), MARK, get(0) * 50_000, LIST, TUPLE2),
    ),
]

NOT_CONTAINERS: list[Case] = [
    refused("target-setitem-on-a-list", z(EMPTY_LIST, integer(0), NONE, SETITEM)),
    refused("target-setitem-on-a-tuple", z(EMPTY_TUPLE, integer(0), NONE, SETITEM)),
    refused("target-setitem-on-text", z(text("x"), integer(0), NONE, SETITEM)),
    refused("target-setitem-on-a-tensor", z(weight(), integer(0), real(1.0), SETITEM)),
    refused("target-setitem-on-a-storage", z(storage(), integer(1 << 40), real(1.0), SETITEM)),
    refused(
        "target-setitem-on-an-array",
        z(array(tuple_of(integer(1)), binbytes(b"\1")), integer(0), integer(7), SETITEM),
    ),
    refused(
        "target-setitem-on-bytearray",
        z(
            call("builtins", "bytearray", call("_codecs", "encode", text("ab"), text("latin1"))),
            integer(0),
            integer(7),
            SETITEM,
        ),
    ),
    refused("target-setitem-on-a-global", z(named("os", "environ"), text("A"), text("b"), SETITEM)),
    refused("target-setitems-on-a-list", z(EMPTY_LIST, MARK, integer(0), NONE, SETITEMS)),
    refused("target-setitems-on-none", z(NONE, MARK, integer(0), NONE, SETITEMS)),
    refused("target-append-on-a-dict", z(EMPTY_DICT, NONE, APPEND)),
    refused("target-append-on-a-set", z(EMPTY_SET, NONE, APPEND, protocol=4)),
    refused("target-append-on-a-tensor", z(weight(), NONE, APPEND)),
    refused("target-append-on-a-global", z(named("sys", "path"), text("/tmp"), APPEND)),
    refused(
        "target-append-on-bytearray",
        z(b"\x96" + struct.pack("<Q", 1) + b"x", integer(7), APPEND, protocol=5),
    ),
    refused(
        "target-appends-on-an-ordered-dict",
        z(call("collections", "OrderedDict"), MARK, NONE, APPENDS),
    ),
    refused("target-additems-on-a-list", z(EMPTY_LIST, MARK, NONE, ADDITEMS, protocol=4)),
    refused("target-additems-on-a-frozenset", z(MARK, FROZENSET, MARK, NONE, ADDITEMS, protocol=4)),
    refused("target-append-without-target", z(NONE, APPEND)),
]

CASES = [*WALKS, *EXPANDING, *EXPANSION, *HASHES, *NESTING, *LENGTHS, *ALLOCATING, *NOT_CONTAINERS]

BOMBS = [*WALKS, *EXPANDING, *EXPANSION, *NESTING]
"""What is also opened in a process with little memory, whose end would show that the interpreter itself gave way."""
