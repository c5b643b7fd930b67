"""numpy in a pickle: scalars, dtypes and arrays as numpy itself writes them (since numpy 2, under `numpy._core`).

scalar    numpy._core.multiarray.scalar(dtype, bytes)
dtype     numpy.dtype('f4', False, True)  BUILD (3, '<', None, None, None, -1, -1, 0)
array     numpy._core.multiarray._reconstruct(ndarray, (0,), b'b')  BUILD (1, shape, dtype, fortran, bytes)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from holdfast.core.opaque import Global

if TYPE_CHECKING:
    from holdfast.formats.pickle.writer import PickleWriter

__all__ = ["write_array", "write_dtype", "write_scalar"]

NDARRAY = Global("numpy", "ndarray")


def write_scalar(writer: PickleWriter, value: np.generic) -> None:
    if value.dtype.hasobject:
        writer.refuse("a numpy scalar with Python objects in it")
    elif isinstance(value, np.str_ | np.bytes_) and value[-1:] in ("\0", b"\0"):
        writer.refuse("text or bytes of numpy that end in NUL, which numpy cuts off when it reads them")
    else:
        # An empty text has no bytes in numpy's own pickle, and four of them in `tobytes` (numpy 2.4).
        content = value.tobytes() if value.dtype.itemsize else b""
        writer.call(value, "numpy._core.multiarray.scalar", (value.dtype, content))


def write_dtype(writer: PickleWriter, dtype: np.dtype[np.generic]) -> None:
    if writer.known_dtype(dtype):
        return
    # numpy's own description of it: numbers, texts, other dtypes, and the class of an element that numpy itself lacks.
    described = dtype.__reduce__()
    args, state = described[1], described[2]
    if dtype.hasobject or not isinstance(args, tuple) or not isinstance(state, tuple):
        writer.refuse(f"the numpy dtype {dtype!r:.80}")
        return
    named = tuple(Global(a.__module__, a.__name__) if isinstance(a, type) else a for a in args)
    writer.keep((named, state))
    writer.name("numpy", "dtype")
    writer.fresh_tuple(named)
    writer.out.append(b"R")
    writer.remember_dtype(dtype)
    writer.fresh_tuple(state)
    writer.out.append(b"b")


def write_array(writer: PickleWriter, array: np.ndarray) -> None:
    if writer.known(array):
        return
    if array.dtype.hasobject:
        writer.refuse("a numpy array of Python objects")
        return
    if not array.dtype.itemsize:
        writer.refuse(f"a numpy array of {array.dtype}, whose elements have no bytes")
        return
    # The tuple is made anew for each array, as numpy does: a constant would be taken for one that is shared.
    length = 0
    writer.call(array, "numpy._core.multiarray._reconstruct", (NDARRAY, (length,), b"b"))
    fortran = array.flags.fnc
    state = (1, array.shape, array.dtype, fortran, array.tobytes("F" if fortran else "C"))
    writer.keep(state)
    writer.fresh_tuple(state)
    writer.out.append(b"b")
