"""`RegularRows`: where tensors lie whose bytes in a file are those of an array, as columns.

A tensor is dense where it is one piece of one file, without gaps, in C order, little-endian, a whole number of bytes an element.
Its elements stand for themselves: they are neither conjugated nor negated, and not on the meta device. Of such a tensor a start, a
length and a checksum say all.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from holdfast.core.arrays import AnyDType, Ints
from holdfast.core.protocols import Source
from holdfast.core.runtime import gc_paused
from holdfast.core.tensor import LazyTensor
from holdfast.core.value import Value


class RegularRows(Value, frozen=True):
    """Dense tensors among some that are wanted, as columns of one length."""

    numbers: Sequence[int]  # The number of each among those that are wanted.
    dtypes: Sequence[AnyDType]
    shapes: Sequence[tuple[int, ...]]
    keys: Sequence[str]
    files: Ints  # The file of each, as a position in `keys`.
    starts: Ints
    nbytes: Ints
    crcs: Ints  # CRC-32 of just these bytes as the file records it; `NO_CRC` where it does not.

    def __len__(self) -> int:
        return len(self.numbers)

    def some(self, wanted: Ints) -> RegularRows:
        numbers, dtypes, shapes = self.numbers, self.dtypes, self.shapes
        chosen = wanted.tolist()
        return RegularRows(
            [numbers[at] for at in chosen], [dtypes[at] for at in chosen], [shapes[at] for at in chosen], self.keys,
            self.files[wanted], self.starts[wanted], self.nbytes[wanted], self.crcs[wanted],
        )  # fmt: skip


NO_ARRAY = np.zeros(0)


def read_tensors(tensors: Sequence[LazyTensor]) -> list[np.ndarray]:
    """Read tensors into fresh arrays: in parallel, with neighbouring reads joined."""
    by_source: dict[Source, list[int]] = {}
    for number, tensor in enumerate(tensors):
        by_source.setdefault(tensor.source, []).append(number)
    arrays = [NO_ARRAY] * len(tensors)
    with gc_paused():
        for source, numbers in by_source.items():
            read_arrays = source.arrays([tensors[number] for number in numbers])
            for number, array in zip(numbers, read_arrays, strict=True):
                arrays[number] = array
    return arrays
