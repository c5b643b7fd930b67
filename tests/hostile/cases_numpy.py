"""Arrays, elements and dtypes of numpy inside of torch's pickles that lie, and what else is freed or built recursively in C.

When a file is opened, much of this is kept as it is written, and is harmless. A load whose user allowed numpy builds it, and must
refuse all but `LOADED`: numpy itself believes its pickles, and reads or writes outside of its memory.
"""

from __future__ import annotations

from holdfast.errors import LimitExceeded, PickleError

from .case import Case, either, opens, refused
from .cases_resources import LAUGHS, array, chained, dtype, z
from .craft_pickle import (
    BUILD,
    EMPTY_DICT,
    EMPTY_TUPLE,
    FALSE,
    NEWOBJ,
    NEWOBJ_EX,
    NONE,
    POP,
    binbytes,
    call,
    dict_of,
    get,
    integer,
    list_of,
    named,
    put,
    text,
    tuple_of,
)

__all__ = ["CASES", "LOADED"]

CORE = "numpy._core.multiarray"
ADDRESS = binbytes(b"\x41" * 8)
"""Eight bytes that are the address of an object, for whoever takes them for one."""

ONE, TWO, MANY = tuple_of(integer(1)), tuple_of(integer(2)), tuple_of(integer(100_000))
ANNOUNCED = call("numpy", "dtype", text("S8"), FALSE, b"\x88")


def told(
    size: int,
    order: str = "|",
    *,
    subarray: bytes = NONE,
    names: bytes = NONE,
    fields: bytes = NONE,
    flags: int = 0,
) -> bytes:
    """The state of a dtype."""
    return tuple_of(
        integer(3), text(order), subarray, names, fields, integer(size), integer(1), integer(flags)
    )


def structured(size: int, *fields: tuple[str, bytes, int], flags: int = 0) -> bytes:
    """A dtype of named fields: name, dtype, offset."""
    names = tuple_of(*(text(name) for name, _, _ in fields))
    inside = dict_of(
        *(text(name) + tuple_of(kind, integer(offset)) for name, kind, offset in fields)
    )
    return dtype(f"V{size}", told(size, names=names, fields=inside, flags=flags))


def repeated(size: int, inner: bytes, *shape: int) -> bytes:
    """A dtype that is a small array of another."""
    return dtype(f"V{size}", told(size, subarray=tuple_of(inner, tuple_of(*map(integer, shape)))))


def scalar(kind: bytes, data: bytes) -> bytes:
    return call(CORE, "scalar", kind, data)


def buffer(kind: bytes, data: bytes, shape: bytes = ONE) -> bytes:
    return call("numpy._core.numeric", "_frombuffer", data, kind, shape, text("C"))


def fresh(module: str = "numpy", name: str = "ndarray") -> bytes:
    """An array that was announced."""
    return call(CORE, "_reconstruct", named(module, name), tuple_of(integer(0)), binbytes(b"b"))


def filled(made: bytes, shape: bytes, kind: bytes, data: bytes) -> bytes:
    return made + tuple_of(integer(1), shape, kind, FALSE, data) + BUILD


def deep(*step: bytes, seed: bytes = NONE, depth: int = 5_000) -> bytes:
    """`step` around itself, as memo entry 0."""
    return chained(put(0) + POP + b"".join(step), depth, seed)


OBJECT = dtype("O8", told(-1, flags=63))
HALF = structured(8, ("a", OBJECT, 0), flags=27)
PAIR = structured(12, ("a", dtype("f4", told(-1, "<")), 0), ("b", OBJECT, 4), flags=27)
F8 = dtype("f8", told(-1, ">"))
WRONG = binbytes(b"\xff" * 4)
U1 = dtype("U1", told(4, "<"))
SLICE = call("builtins", "slice", get(0), NONE, NONE)


def nested(levels: int, *, twice: bool) -> bytes:
    """A dtype of no bytes whose fields have fields; twice as many of them at each level, or one."""
    made = structured(0, ("a", dtype("V0", told(0)), 0))
    for _ in range(levels):
        pair = (("a", get(0), 0), ("b", get(0), 0)) if twice else (("a", get(0), 0),)
        made += put(0) + POP + structured(0, *pair)
    return made


LOADED = {
    "numpy-item-of-less-than-nothing", "numpy-item-of-a-gigabyte", "numpy-field-that-is-an-object", "numpy-array-of-objects",
    "numpy-array-in-itself", "numpy-flags-that-hide-objects",
}  # fmt: skip
"""What is honest, or told apart from a lie by the call alone."""

CASES: list[Case] = [
    # Dtypes.
    opens("numpy-item-of-less-than-nothing", z(scalar(dtype("S800", told(-1)), binbytes(b"a" * 800)))),
    refused("numpy-item-of-less-than-nothing-and-few-bytes", z(scalar(dtype("S800", told(-1)), binbytes(b"a")))),
    opens("numpy-item-of-a-gigabyte", z(scalar(dtype("S1", told(1 << 30)), binbytes(b"a")))),
    refused("numpy-item-of-a-gigabyte-by-its-name", z(scalar(dtype("S999999999", told(1)), binbytes(b"a")))),
    refused("numpy-field-beyond-the-end", z(structured(8, ("a", dtype("f8"), 8)))),
    refused("numpy-field-half-beyond-the-end", z(structured(8, ("a", dtype("f8"), 4)))),
    refused("numpy-field-before-the-beginning", z(structured(8, ("a", dtype("f8"), -8)))),
    opens("numpy-field-of-fields-beyond-the-end", z(structured(8, ("a", structured(8, ("b", dtype("f8"), 0)), 4)))),
    opens("numpy-field-that-is-an-object", z(filled(fresh(), TWO, PAIR, list_of(*[tuple_of(integer(1), NONE)] * 2)))),
    opens("numpy-objects-on-top-of-numbers", z(structured(8, ("a", OBJECT, 0), ("b", dtype("u8"), 0)))),
    opens("numpy-subarray-longer-than-its-item", z(scalar(repeated(8, dtype("f8"), 1000), ADDRESS))),
    opens("numpy-subarray-of-negative-length", z(repeated(8, dtype("f8"), -1))),
    opens("numpy-subarray-as-an-element", z(scalar(repeated(8, dtype("u1"), 8), ADDRESS))),
    opens("numpy-subarray-of-many-objects", z(filled(fresh(), ONE, repeated(800_000_000, OBJECT, 100_000_000), list_of(NONE)))),
    refused("numpy-nested-laughs", lambda _: z(nested(60, twice=True)), LimitExceeded),
    refused("numpy-nested-deep", lambda _: z(nested(3000, twice=False)), LimitExceeded),
    opens("numpy-dtype-that-ends-half-made", z(ANNOUNCED)),
    opens("numpy-dtype-half-made-in-other-hands", z(call("own", "Thing", ANNOUNCED + put(0)) + POP + get(0) + told(8) + BUILD)),
    refused("numpy-dtype-made-twice", z(dtype("S8", told(8)) + told(1 << 30) + BUILD), PickleError),
    opens(
        "numpy-dtype-that-grows-under-an-array",
        z(ANNOUNCED, put(0), POP, filled(fresh(), ONE, get(0), ADDRESS), put(1), POP, get(0), told(1 << 30), BUILD, POP, get(1)),
    ),
    opens("numpy-element-of-a-dtype-half-made", z(scalar(ANNOUNCED, ADDRESS))),
    opens("numpy-buffer-of-a-dtype-half-made", z(buffer(ANNOUNCED, ADDRESS), protocol=4)),
    opens(
        "numpy-dtype-by-keywords",
        z(named("numpy", "dtype"), EMPTY_TUPLE, dict_of(text("dtype"), text("S8")), NEWOBJ_EX, told(-1), BUILD),
    ),
    # Bytes for objects.
    opens("numpy-objects-from-bytes", z(filled(fresh(), ONE, OBJECT, ADDRESS))),
    opens("numpy-object-fields-from-bytes", z(filled(fresh(), ONE, HALF, ADDRESS))),
    opens("numpy-flags-that-hide-objects", z(structured(8, ("a", OBJECT, 0)))),
    opens("numpy-flags-that-hide-objects-and-bytes", z(filled(fresh(), ONE, structured(8, ("a", OBJECT, 0)), ADDRESS))),
    opens("numpy-element-with-objects-from-bytes", z(scalar(HALF, ADDRESS))),
    opens("numpy-element-with-objects-from-numbers", z(scalar(HALF, filled(fresh(), EMPTY_TUPLE, dtype("u8"), ADDRESS)))),
    opens("numpy-buffer-of-objects", z(buffer(OBJECT, ADDRESS), protocol=4)),
    opens("numpy-class-over-bytes", z(call("numpy", "ndarray", ONE, OBJECT, ADDRESS))),
    opens("numpy-class-made-new", z(named("numpy", "ndarray"), tuple_of(ONE, text("O"), ADDRESS), NEWOBJ)),
    opens(
        "numpy-class-by-keywords",
        z(named("numpy", "ndarray"), tuple_of(ONE), dict_of(text("dtype"), text("O"), text("buffer"), ADDRESS), NEWOBJ_EX),
    ),
    opens("numpy-class-of-records", z(named("numpy", "recarray"), tuple_of(ONE, OBJECT, ADDRESS), NEWOBJ)),
    opens("numpy-class-that-opens-files", z(call("numpy", "memmap", text("victim"), text("u1"), text("w+"), integer(0), ONE))),
    # Arrays.
    opens("numpy-array-of-objects", z(filled(fresh(), TWO, OBJECT, list_of(NONE, text("x"))))),
    opens("numpy-array-in-itself", z(fresh(), put(0), tuple_of(integer(1), ONE, OBJECT, FALSE, list_of(get(0))), BUILD)),
    opens("numpy-fewer-objects-than-elements", z(filled(fresh(), MANY, OBJECT, list_of(NONE)))),
    opens("numpy-fewer-objects-in-a-subclass", z(filled(fresh("numpy", "matrix"), MANY, OBJECT, list_of(NONE)))),
    opens("numpy-objects-for-numbers", z(filled(fresh(), ONE, dtype("f8", told(-1, "<")), list_of(NONE)))),
    refused("numpy-fewer-bytes-than-elements", z(filled(fresh(), MANY, dtype("u1"), ADDRESS))),
    opens("numpy-fewer-bytes-in-a-subclass", z(filled(fresh("numpy", "recarray"), MANY, dtype("u1"), ADDRESS))),
    refused("numpy-array-made-twice", z(filled(array(ONE, binbytes(b"a")), ONE, OBJECT, list_of(NONE)))),
    opens("numpy-array-of-another-class", z(fresh("builtins", "dict"))),
    opens("numpy-array-of-no-dtype", z(filled(fresh(), ONE, text("f8"), ADDRESS))),
    refused("numpy-array-without-an-order", z(fresh(), tuple_of(integer(1), ONE, dtype("u1"), NONE, ADDRESS), BUILD)),
    opens("numpy-elements-of-nothing", z(filled(fresh(), tuple_of(integer(1 << 40)), dtype("V0", told(0)), binbytes(b"")))),
    refused("numpy-text-beyond-unicode", z(filled(fresh(), ONE, U1, WRONG))),
    refused("numpy-text-beyond-unicode-in-a-field", z(filled(fresh(), ONE, structured(4, ("a", U1, 0)), WRONG))),
    opens(
        "numpy-text-beyond-unicode-in-fields-of-fields",
        z(filled(fresh(), ONE, structured(4, ("b", structured(4, ("a", U1, 0)), 0)), WRONG)),
    ),
    opens("numpy-laughs-for-a-number", z(filled(fresh(), ONE, PAIR, list_of(tuple_of(LAUGHS, NONE))))),
    opens("numpy-element-with-fewer-parts", z(filled(fresh(), ONE, PAIR, list_of(EMPTY_TUPLE)))),
    opens(
        "numpy-objects-many-times",
        lambda _: z(
            list_of(
                list_of(*[NONE] * 10_000) + put(0), OBJECT + put(1), tuple_of(integer(10_000)) + put(2),
                *[fresh() + tuple_of(integer(1), get(2), get(1), FALSE, get(0)) + BUILD] * 3000,
            )
        ),
    ),
    opens(
        "numpy-bytes-turned-many-times",
        lambda _: z(
            list_of(
                binbytes(bytes(800_000)) + put(0), F8 + put(1), tuple_of(integer(100_000)) + put(2),
                *[fresh() + tuple_of(integer(1), get(2), get(1), FALSE, get(0)) + BUILD] * 3000,
            )
        ),
    ),
    # What is freed recursively.
    either("numpy-arrays-in-arrays", lambda _: z(OBJECT, put(1), POP, deep(filled(fresh(), ONE, get(1), list_of(get(0)))))),
    either(
        "numpy-arrays-in-arrays-from-outside",
        lambda _: z(
            OBJECT, put(0), POP, fresh(), put(1), POP,
            b"".join(
                fresh() + put(i + 1) + POP + filled(get(i), ONE, get(0), list_of(get(i + 1))) + POP for i in range(1, 5_000)
            ),
            get(1),
        ),
    ),
    either(
        "numpy-elements-in-elements",
        lambda _: z(HALF, put(1), POP, deep(scalar(get(1), filled(fresh(), EMPTY_TUPLE, get(1), list_of(tuple_of(get(0))))))),
    ),
    either("slices-in-slices", lambda _: z(deep(SLICE))),
    either(
        "slices-in-arrays-in-slices",
        lambda _: z(OBJECT, put(1), POP, deep(filled(fresh(), ONE, get(1), list_of(SLICE)))),
    ),
    either(
        "partials-of-partials",
        lambda _: z(
            deep(
                call("functools", "partial", named("own", "Thing")), tuple_of(get(0), EMPTY_TUPLE, EMPTY_DICT, NONE), BUILD,
                seed=named("own", "Thing"),
            )
        ),
    ),
    either(
        "partials-of-partials-with-attributes",
        lambda _: z(
            deep(
                call("functools", "partial", get(0)),
                tuple_of(named("own", "Thing"), EMPTY_TUPLE, EMPTY_DICT, dict_of(text("x"), NONE)), BUILD,
                seed=named("own", "Thing"),
            )
        ),
    ),
    either(
        "defaultdicts-in-defaultdicts", lambda _: z(deep(call("collections", "defaultdict", NONE, dict_of(integer(0), get(0))))),
    ),
]  # fmt: skip
