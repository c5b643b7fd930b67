"""Whether what was opened is what was saved: by type and value, written without any code of Holdfast's that compares.

A tensor is the same by dtype, shape and bits; a float by its bits (any NaN is a NaN); a container by its type, its members and
their order; keys by type as well, so that 1, 1.0 and True are three. Tensors that are one in memory are one in the file.
"""

from __future__ import annotations

import struct
from collections import Counter, OrderedDict, defaultdict
from pathlib import PurePath

import numpy as np
import torch

from holdfast.core.dtype import DType
from holdfast.core.opaque import Device, Size
from holdfast.core.tensor import Composite, LazyTensor
from holdfast.formats.pickle.plain import DefaultDict
from tests.golden.expect import short
from tests.parity.compare import elements


def assert_same(
    saved: object, opened: object, *, order: bool = True, shared: bool = True, classes: bool = True
) -> None:
    """Fail with the place of the first difference. `shared`: lists and dicts that are one stay one; `classes`: so do Parameters."""
    Comparison(order=order, shared=shared, classes=classes).run(saved, opened)


class Comparison:
    def __init__(self, *, order: bool, shared: bool, classes: bool) -> None:
        self.order, self.shared, self.classes = order, shared, classes
        self.met: dict[int, object] = {}
        """What a container that was met before was opened as."""
        self.tensors: list[tuple[str, torch.Tensor, LazyTensor]] = []
        self.kept: list[object] = []

    def run(self, saved: object, opened: object) -> None:
        self.value(saved, opened, "$")
        self.ties()

    def value(self, a: object, b: object, at: str) -> None:
        if isinstance(a, torch.Tensor):
            self.tensor(a, b, at)
        elif isinstance(a, np.ndarray):
            self.array(a, b, at)
        elif isinstance(a, dict | list | tuple | set | frozenset):
            self.container(a, b, at)
        else:
            assert_leaf(a, b, at)

    def container(self, a: object, b: object, at: str) -> None:
        if isinstance(a, torch.Size):
            assert type(b) is Size, at
            assert tuple(a) == tuple(b), at
            return
        if isinstance(a, dict | list) and id(a) in self.met and self.shared:
            assert self.met[id(a)] is b, f"{at}: one container has become two"
            return
        self.met[id(a)] = b
        self.kept.append(a)
        kinds = {defaultdict: DefaultDict}
        assert type(b) is kinds.get(type(a), type(a)), (
            f"{at}: a {type(a).__name__} has become a {type(b).__name__}"
        )
        assert len(a) == len(b), f"{at}: {len(a)} have become {len(b)}"
        if isinstance(a, dict):
            self.mapping(a, b, at)
        elif isinstance(a, list | tuple):
            for i, (x, y) in enumerate(zip(a, b, strict=True)):
                self.value(x, y, f"{at}[{i}]")
        else:
            left = list(b)
            for x in a:
                left.remove(matching(x, left, at))

    def mapping(self, a: dict, b: dict, at: str) -> None:
        if isinstance(a, defaultdict):
            assert a.default_factory is b.default_factory, at
        if isinstance(a, OrderedDict):
            assert vars(a).get("_metadata") == vars(b).get("_metadata"), at
        if self.order and not isinstance(a, Counter):
            for x, y in zip(a, b, strict=True):
                assert alike(x, y), f"{at}: the key {x!r} has become {y!r}"
                self.value(a[x], b[y], f"{at}[{x!r}]")
            return
        left = list(b)
        for x in a:
            y = matching(x, left, at)
            left.remove(y)
            self.value(a[x], b[y], f"{at}[{x!r}]")

    def array(self, a: np.ndarray, b: object, at: str) -> None:
        if isinstance(b, LazyTensor):
            b = b.numpy()
        assert type(b) is np.ndarray, f"{at}: {type(b)}"
        assert a.shape == b.shape, at
        if a.dtype.kind in "biufc":
            # A tensor has no byte order; an array that is kept as a value has.
            assert a.dtype.newbyteorder("=") == b.dtype.newbyteorder("="), at
            assert (
                a.astype(a.dtype.newbyteorder("=")).tobytes()
                == b.astype(b.dtype.newbyteorder("=")).tobytes()
            ), at
        else:
            assert a.dtype == b.dtype, at
            assert a.tobytes() == b.tobytes(), at

    def tensor(self, a: torch.Tensor, b: object, at: str) -> None:
        if a.layout is not torch.strided or a.is_quantized:
            assert isinstance(b, Composite), f"{at}: a tensor has become {type(b)}"
            again = b.torch()
            assert (again.layout, again.dtype, again.shape) == (a.layout, a.dtype, a.shape), at
            dense = torch.Tensor.int_repr if a.is_quantized else torch.Tensor.to_dense
            assert torch.equal(dense(again), dense(a)), at
            return
        if a.is_meta:
            assert b.traits.meta, at
            return
        assert isinstance(b, LazyTensor), f"{at}: a tensor has become {type(b)}"
        assert (short(a.dtype), tuple(a.shape)) == (b.dtype.name, b.shape), at
        assert not self.classes or b.traits.parameter == isinstance(a, torch.nn.Parameter), at
        assert elements(a) == b.numpy().tobytes(), f"{at}: other bits"
        self.tensors.append((at, a, b))

    def ties(self) -> None:
        first: dict[object, tuple[str, LazyTensor]] = {}
        for at, a, b in self.tensors:
            if not a.numel():
                continue
            place = (a.dtype, a.data_ptr(), a.shape, a.stride(), a.is_conj(), a.is_neg())
            where, other = first.setdefault(place, (at, b))
            assert other.chunks == b.chunks, f"{at} and {where} were one tensor"


def assert_leaf(a: object, b: object, at: str) -> None:
    assert alike(a, b), f"{at}: {a!r} ({type(a).__name__}) has become {b!r} ({type(b).__name__})"


def alike(a: object, b: object) -> bool:
    """Whether two values without mutable parts are the same, by type."""
    if isinstance(a, torch.Size):
        return type(b) is Size and tuple(a) == tuple(b)
    if isinstance(a, torch.dtype):
        return isinstance(b, DType) and b.name == short(a)
    if isinstance(a, torch.device):
        return isinstance(b, Device) and (b.type, b.index) == (a.type, a.index)
    if isinstance(a, PurePath):
        return isinstance(b, PurePath) and str(a) == str(b) and a.parts == b.parts
    if type(a) is not type(b):
        return False
    if isinstance(a, float) and not isinstance(a, np.generic):
        return (a != a and b != b) or struct.pack("d", a) == struct.pack("d", b)
    if type(a) is complex:
        return alike(a.real, b.real) and alike(a.imag, b.imag)
    if isinstance(a, np.str_ | np.bytes_):
        return a == b and len(a) == len(b)
    if isinstance(a, np.generic):
        return a.dtype == b.dtype and a.tobytes() == b.tobytes()
    if isinstance(a, tuple):
        return len(a) == len(b) and all(map(alike, a, b))
    if isinstance(a, frozenset | set):
        return len(a) == len(b) and all(any(alike(x, y) for y in b) for x in a)
    if isinstance(a, slice):
        return all(alike(getattr(a, n), getattr(b, n)) for n in ("start", "stop", "step"))
    return a == b


def matching(a: object, among: list, at: str) -> object:
    for b in among:
        if alike(a, b):
            return b
    raise AssertionError(f"{at}: {a!r} is not among {among!r}")
