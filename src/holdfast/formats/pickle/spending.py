"""What one stream may cost beyond a fixed price an opcode.

Two opcodes, five bytes, can name a value of any size that is already in the memo, so every operation whose price depends on the
size of its argument is counted here:

1. **Copies.** `set(list)`, `bytearray(bytes)`, `encode(text)` copy their argument. A writer copies each value once, so all copies
   together are at most the stream's own size; `copy` refuses what goes far beyond.
2. **Hashes.** Hashing a tuple costs its expanded size, so the values inside one key are counted before it is hashed.
3. **Collisions.** Integers, floats and tuples of them hash without a secret: a file can choose a million keys that meet in one
   slot of a dict, and filling it is then quadratic. Such keys are paid for as if each collided with all others in
   its container. Text and bytes hash with a secret, and integers that count upwards spread: those are free.
4. **Containers.** One byte makes an empty set, which takes 216 bytes: containers are counted against the size of the stream.
5. **Comparisons.** Two equal texts of a megabyte, used as keys in turn, are compared in full each time: long texts pay their length.
"""

from __future__ import annotations

import numpy as np

from holdfast.core.limits import Limits
from holdfast.core.opaque import Global
from holdfast.errors import LimitExceeded, PickleError

__all__ = ["Spending"]

PROBES = 200_000_000
"""Steps in hash tables that a stream may cause beyond the ordinary: under two seconds, or 20,000 scattered integers in one dict."""

COPY_FLOOR_NBYTES = 1 << 20
"""Copies that are allowed however small the stream."""

CONTAINER_NBYTES = 8
"""Stored bytes for each container on the average: a dict with one small entry has 7. In memory a container takes 50 to 250."""

CONTAINER_FLOOR = 1_000_000
"""Containers that are allowed however small the stream."""

LONG_TEXT = 1024
"""Characters from which on a key pays its length. The name of a tensor is shorter."""

SMALL = 1024
"""Integers this near to zero, or to the range that a counter would have filled, spread over a hash table."""

NODE_PROBES = 32
"""Looking at one value inside a key costs about as much as this many steps in a hash table."""


class Spending:
    """The allowance of one stream; every method lowers it, and refuses when it is used up."""

    __slots__ = ("containers", "copies", "key_nodes", "probes")

    def __init__(self, limits: Limits, nbytes: int) -> None:
        self.key_nodes = limits.key_nodes
        self.copies = 2 * nbytes + COPY_FLOOR_NBYTES
        self.probes = PROBES
        self.containers = nbytes // CONTAINER_NBYTES + CONTAINER_FLOOR

    def copy(self, count: int) -> None:
        """Pay for copying `count` bytes, characters or elements."""
        self.copies -= count
        if self.copies < 0:
            raise PickleError("the pickle copies the same values over and over; no writer does that")

    def container(self) -> None:
        """Pay for one new container: a dict, a list, a set, an object."""
        self.containers -= 1
        if self.containers < 0:
            raise LimitExceeded("the pickle makes more empty containers than its size gives reason for")

    def fill(self, target: dict[object, object], flat: list[object]) -> None:
        """Set the keys and values that stand in turn in `flat`, which has an even length."""
        pairs = iter(flat)
        for key, value in zip(pairs, pairs, strict=True):
            if type(key) is not str or len(key) > LONG_TEXT:
                self.key(key, len(target))
            target[key] = value

    def collect(self, target: set[object], values: list[object] | tuple[object, ...]) -> None:
        """Add the members of a set."""
        for value in values:
            self.key(value, len(target))
            target.add(value)

    def key(self, key: object, size: int) -> None:
        """Refuse a key or member that cannot be hashed, or costs too much; `size` is what its container holds already."""
        kind = type(key)
        if kind is str or kind is bytes:
            if len(key) > LONG_TEXT:  # type: ignore[arg-type]  # mypy does not narrow on `type() is`
                self._probe(len(key))  # type: ignore[arg-type]  # as above
        elif kind is int:
            if not -SMALL < key < 4 * size + SMALL:  # type: ignore[operator]  # as above
                self._probe(size)
        elif key is not None and kind is not bool and kind is not Global:
            self._count(key, size)

    def _count(self, key: object, size: int) -> None:
        """Look at every value inside a key before it is hashed; no further than `key_nodes`."""
        found = 0
        waiting: list[object] = [key]
        while waiting:
            value = waiting.pop()
            found += 1
            if isinstance(value, tuple | frozenset):
                # Checked before the members are put on the list: a tuple of a million members costs nothing.
                if found + len(waiting) + len(value) > self.key_nodes:
                    raise LimitExceeded(
                        f"a dict key or set member holds more than Limits(key_nodes={self.key_nodes}) values",
                        expected=self.key_nodes,
                    )
                waiting.extend(value)
            elif isinstance(value, str | bytes):
                if len(value) > LONG_TEXT:
                    self._probe(len(value))
            elif type(value).__hash__ is None or isinstance(value, np.void):
                raise PickleError(
                    f"a {type(value).__name__} cannot be a dict key or a set member", found=type(value).__name__
                )
        if found > 1 or type(key).__hash__ is not object.__hash__:
            self._probe(size + NODE_PROBES * found)

    def _probe(self, steps: int) -> None:
        self.probes -= steps
        if self.probes < 0:
            raise LimitExceeded(
                "the keys of the dicts in this pickle may all collide: too many large integers, floats or tuples as keys",
                expected=PROBES,
            )
