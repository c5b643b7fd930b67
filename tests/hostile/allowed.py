"""What hostile files name and a user may have allowed: with it, a load goes on where it would end at the first name.

`ALLOWED` is for `safe_globals`. What is of numpy and of Python's own is the real thing; `own.*`, and names by which files run code,
are classes of ours that do nothing.
"""

from __future__ import annotations

import collections
import copyreg
import functools
import pathlib

import ml_dtypes
import numpy as np
import torch

__all__ = ["ALLOWED", "NUMPY"]


class Thing:
    """The class that files name `own.Thing`: it takes whatever a pickle does with an object, and can be called."""

    __module__, __qualname__ = "own", "Thing"

    def __init__(self, *args: object, **more: object) -> None: ...

    def __call__(self) -> None: ...


class Stated:
    """A class that takes any state."""

    __module__, __qualname__ = "own", "Stated"

    def __setstate__(self, state: object) -> None: ...


class List(list):
    __module__, __qualname__ = "own", "List"


class Dict(dict):
    __module__, __qualname__ = "own", "Dict"


class Tensor(torch.Tensor):
    __module__, __qualname__ = "own", "Tensor"


DTYPES = [getattr(np.dtypes, name) for name in np.dtypes.__all__]
FUNCTIONS = {
    "multiarray._reconstruct": np.zeros(1).__reduce__()[0],
    "multiarray.scalar": np.float32(0).__reduce__()[0],
    "numeric._frombuffer": np.zeros(1).__reduce_ex__(5)[0],
}

NUMPY = [
    np.dtype, np.ndarray, (np.recarray, "numpy.recarray"), np.record, np.matrix, np.memmap, *DTYPES,
    *((what, f"numpy.{core}.{name}") for core in ("core", "_core") for name, what in FUNCTIONS.items()),
    ml_dtypes.bfloat16, type(np.dtype(ml_dtypes.bfloat16)), bytes,
]  # fmt: skip
"""What numpy's pickles name."""

ALLOWED = [
    Thing, Stated, List, Dict, Tensor, *NUMPY,
    list, dict, frozenset, slice, functools.partial, collections.defaultdict, pathlib.PosixPath,
    copyreg._reconstructor, copyreg.__newobj__,
    (Thing, "builtins.getattr"), (Thing, "torch.jit._pickle.build_intlist"),
    (Thing, "torch.storage._load_from_bytes"), (Thing, "torch.fx.graph_module.reduce_graph_module"),
]  # fmt: skip
