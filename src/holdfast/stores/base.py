"""`BaseStore`: what a store says of itself that has nothing to say. Every store begins with this, and says what it knows."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np
import numpy.typing as npt

from holdfast.core.protocols import Stamp, Store

__all__ = ["BaseStore", "Ints"]

Ints = npt.NDArray[np.int64]


class BaseStore:
    """Not in memory, with no wish for a size of reads, and with content of which nobody knows whether it changes."""

    @property
    def resident(self) -> bool:
        return False

    @property
    def block_nbytes(self) -> int | None:
        return None

    @property
    def gone(self) -> bool:
        return False

    def map(self, key: str) -> memoryview | None:
        return None

    def gather(self, key: str, starts: Ints, nbytes: Ints, places: Ints) -> int:
        return 0

    def stamp(self, key: str) -> Stamp:
        return ()

    def changed(self) -> Sequence[str]:
        return ()

    def place(self, key: str = "") -> Hashable:
        return "store", id(self), key

    def below(self, key: str) -> Store | None:
        return None

    def cost(self, key: str, nbytes: int) -> int:
        return nbytes
