"""The budget of one stream beyond a fixed price an opcode.

Two opcodes, five bytes, can name a value of any size that is already in the memo, so every operation whose price depends on the
size of its argument is counted here:

1. **Copies.** `set(list)`, `bytearray(bytes)`, `encode(text)`, a numpy scalar copy their argument. A writer copies each value
   once, so all copies together are at most the stream's own size; `copy` refuses what goes far beyond.
2. **Hashes.** Hashing a tuple costs its expanded size, so the values inside one key are counted before it is hashed.
3. **Collisions.** Integers, floats and tuples of them hash without a secret: a file can choose a million keys that meet in one
   slot of a dict, and filling it is then quadratic. Such keys are paid for as if each met all others in its container. Text
   and bytes hash with a secret, objects by their place in memory, and integers that count upwards spread: those are free.
4. **Comparisons.** Two equal texts of a megabyte, used as keys in turn, are compared in full each time: long ones pay their length.
5. **Containers.** One byte makes an empty set, which takes 216 bytes: containers are counted against the size of the stream.
"""

from __future__ import annotations

import sys
from pathlib import PurePath

import numpy as np

from holdfast.core.limits import Limits
from holdfast.core.opaque import Global
from holdfast.errors import LimitExceeded, PickleError

PROBES = 800_000_000
"""Steps in hash tables that a stream may cause: two seconds. Room for 40,000 scattered integers as keys of one dict."""

HASH_MODULUS = sys.hash_info.modulus
"""Integers below it have hashes of their own; of those above, any number can share one."""

EQUAL_HASH = 16
"""A step past a key with the same hash compares the two keys, and costs this many steps past another one."""

SPREAD = 16
"""How much less integers cost that fill a range, in any order."""

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

SECRET = (str, bytes, bool, Global, PurePath)
"""Types that hash with a secret of this process (or have two values)."""

UNHASHABLE = (np.void, slice)
"""Types without a hash on some versions. A slice has one from Python 3.12 on, which hashes whatever is
inside of the slice, uncounted; refused everywhere, a file opens alike on every Python."""

NODE_PROBES = 256
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
            raise PickleError(
                "the pickle copies the same values over and over; no writer does that"
            )

    def container(self) -> None:
        """Pay for one new container: a dict, a list, a set, an object."""
        self.containers -= 1
        if self.containers < 0:
            raise LimitExceeded("the pickle makes more containers than its size gives reason for")

    def fill(self, target: dict[object, object], flat: list[object]) -> None:
        """Set the keys and values that stand in turn in `flat`, which has an even length."""
        for key, value in zip(flat[::2], flat[1::2], strict=True):
            # Most keys are short texts, which are free.
            if type(key) is not str or len(key) > LONG_TEXT:
                self.key(key, len(target))
            target[key] = value

    def collect(self, target: set[object], values: list[object] | tuple[object, ...]) -> None:
        """Add the members of a set."""
        for value in values:
            self.key(value, len(target))
            target.add(value)

    def key(self, key: object, size: int) -> None:
        """Refuse a key or member that cannot be hashed, or costs too much; `size` is what its container holds so far."""
        kind = type(key)
        if kind is str or kind is bytes:
            if len(key) > LONG_TEXT:  # type: ignore[arg-type]  # mypy does not narrow on `type() is`
                self._probe(len(key))  # type: ignore[arg-type]  # as above
        elif kind is int:
            if key != size and key != size + 1:
                dense = -SMALL < key < 4 * size + SMALL  # type: ignore[operator]  # as above
                self._probe(size // SPREAD if dense else size * _price(key))
        elif key is not None and kind is not bool and kind is not Global:
            self._count(key, size)

    def _count(self, key: object, size: int) -> None:
        """Look at every value inside a key before it is hashed; no further than `key_nodes`."""
        found = price = 0
        waiting: list[object] = [key]
        while waiting:
            value = waiting.pop()
            found += 1
            if isinstance(value, tuple | frozenset):
                # Checked before the members are put on the list: a tuple of a million members costs nothing.
                if found + len(waiting) + len(value) > self.key_nodes:
                    message = f"a dict key or set member holds more than Limits(key_nodes={self.key_nodes}) values"
                    raise LimitExceeded(message, expected=self.key_nodes)
                waiting.extend(value)
            elif type(value).__hash__ is None or isinstance(value, UNHASHABLE):
                name = type(value).__name__
                raise PickleError(f"a {name} cannot be a dict key or a set member", found=name)
            else:
                price += _price(value)
                if isinstance(value, str | bytes) and len(value) > LONG_TEXT:
                    self._probe(len(value))
        # Several numbers in one key give a file more than one way to the same hash.
        self._probe(size * price if found == 1 else NODE_PROBES * found + size * price * price)

    def _probe(self, steps: int) -> None:
        self.probes -= steps
        if self.probes < 0:
            message = "the keys of the dicts in this pickle may all collide: too many large integers, floats or tuples as keys"
            raise LimitExceeded(message, expected=PROBES)


def _price(value: object) -> int:
    """How many steps a key may cost for each key that is in its container: none where its hash is not for a file to choose."""
    if isinstance(value, SECRET) or value is None or type(value).__hash__ is object.__hash__:
        return 0
    if isinstance(value, float) or (
        isinstance(value, int) and -HASH_MODULUS < value < HASH_MODULUS
    ):
        return 1
    return EQUAL_HASH
