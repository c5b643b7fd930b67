"""`split_payloads`: the opcodes of a long pickle without the large byte strings between them.

    file       … BINBYTES8 n │ 40 MB of elements │ MEMOIZE TUPLE BUILD …     a pickled array
    opcodes    … BINBYTES8 n │ MEMOIZE TUPLE BUILD …

A pickled array has its elements in the stream, so the stream may be larger than memory. Its opcodes are short: they are what
`Limits(pickle_nbytes=…)` is about, and all that is read.

The split follows the lengths of opcodes and understands nothing else. It needs no trust: the interpreter runs the opcodes, and
asks `Payloads` for the bytes of each one that is long. A payload that it does not meet at that very place, with that very
length, is an error (`Payloads.check_all_met`). So no byte is left out that the interpreter would have taken for an opcode.

Writers commit a frame before a large byte string, so inside of a frame nothing is left out.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable

from holdfast.core.limits import Limits
from holdfast.core.opaque import Global, Opaque
from holdfast.core.value import Value
from holdfast.errors import LimitExceeded, PickleError

PAYLOAD_NBYTES = 64 << 10
"""The shortest byte string that is left out. CPython's pickler puts strings from this length on outside of frames."""

WINDOW_NBYTES = 64 << 10
"""Bytes that are read at a time."""

LINES = {**dict.fromkeys(b"ILFSVgpP", 1), **dict.fromkeys(b"ci", 2)}
"""Opcodes whose argument is text up to a newline, and the number of such lines."""

FIXED = {
    **dict.fromkeys(b"012NQRbd}el()t]suao\x81\x85\x86\x87\x88\x89", 0),
    **dict.fromkeys(b"\x8f\x90\x91\x92\x93\x94\x97\x98", 0),
    **dict.fromkeys(b"Khq\x80\x82", 1),
    **dict.fromkeys(b"M\x83", 2),
    **dict.fromkeys(b"Jjr\x84", 4),
    **dict.fromkeys(b"G\x95", 8),
}
"""Opcodes whose argument has a fixed length in bytes."""

COUNTED = {
    **dict.fromkeys(b"UC\x8a\x8c", 1),
    **dict.fromkeys(b"TXB\x8b", 4),
    **dict.fromkeys(b"\x8d\x8e\x96", 8),
}
"""Opcodes whose argument begins with its own length, and the bytes that this length takes."""

BYTE_STRINGS = frozenset(b"TB\x8e\x96")
"""BINSTRING of Python 2, BINBYTES, BINBYTES8, BYTEARRAY8: the opcodes that arrays have their elements in."""

FRAME, STOP = 0x95, 0x2E

Read = Callable[[int, int], bytes]
"""Returns the bytes of the file from a start to a stop; fewer where the file ends."""


class StoredBytes(Opaque):
    """A byte string that stayed in the file, as a value of the pickle. Whoever knows what it holds reads it there."""

    __slots__ = ("nbytes", "start")

    def __init__(self, start: int, nbytes: int) -> None:
        super().__init__(Global("builtins", "bytes"), (f"{nbytes:,} bytes, which are not read",))
        self.start, self.nbytes = start, nbytes


class Payload(Value, frozen=True):
    """A byte string that was left out."""

    position: int
    """Where it would stand among the opcodes."""
    start: int
    """Where it begins in the file."""
    nbytes: int


class Payloads:
    """The opcodes of a pickle, and the byte strings that were left out of them."""

    def __init__(self, opcodes: bytes, payloads: list[Payload]) -> None:
        self.opcodes = opcodes
        self._payloads = payloads
        self._positions = [payload.position for payload in payloads]
        self._next = 0

    def begin(self) -> None:
        """Get ready for an interpreter that reads the opcodes from their start."""
        self._next = 0

    def meet(self, position: int, nbytes: int) -> StoredBytes | None:
        """Return the payload of an opcode at a position; None if it was not left out."""
        if self._next == len(self._payloads):
            return None
        payload = self._payloads[self._next]
        if payload.position != position:
            return None
        if payload.nbytes != nbytes:
            raise PickleError("the lengths of byte strings in this pickle do not agree")
        self._next += 1
        return StoredBytes(payload.start, nbytes)

    def check_all_met(self) -> None:
        """Raise `PickleError` if the interpreter ran past a place where bytes were left out."""
        if self._next != len(self._payloads):
            raise PickleError("the lengths of byte strings in this pickle do not agree")

    def file_offset(self, position: int) -> int:
        """Return the byte of the file that stands at a position of the opcodes."""
        count = bisect_right(self._positions, position)
        if not count:
            return position
        last = self._payloads[count - 1]
        return last.start + last.nbytes + position - last.position


def split_payloads(read: Read, nbytes: int, limits: Limits) -> Payloads:
    """Read the opcodes of the pickle that begins a file of `nbytes`.

    The opcodes end behind STOP, or somewhere behind the first byte that is no opcode, which the interpreter refuses.
    Raises `LimitExceeded` if the opcodes are longer than the limit.
    """
    walk = _Walk(read, nbytes, limits)
    while walk.step():
        pass
    return Payloads(bytes(walk.opcodes), walk.payloads)


class _Walk:
    """Steps over the opcodes of a file, and collects them."""

    def __init__(self, read: Read, nbytes: int, limits: Limits) -> None:
        self._read, self._nbytes = read, nbytes
        self._most = limits.pickle_nbytes
        self.opcodes = bytearray()
        self.payloads: list[Payload] = []
        self._at = 0
        """The next opcode: its place in `opcodes`, which may not have it yet."""
        self._left_out = 0
        """Bytes that were left out so far."""
        self._frame_end = 0

    def step(self) -> bool:
        """Step over one opcode; False at the end, and where no opcode is."""
        if not self._has(self._at + 1):
            return False
        opcode = self.opcodes[self._at]
        argument = self._at + 1
        if opcode == STOP:
            return False
        if opcode in LINES:
            for _ in range(LINES[opcode]):
                newline = self._find_newline(argument)
                if newline < 0:
                    return False
                argument = newline + 1
            self._at = argument
            return True

        if opcode in FIXED:
            self._at = argument + FIXED[opcode]
            if opcode == FRAME and self._has(self._at):
                self._frame_end = self._at + self._number(argument, 8)
            return True
        width = COUNTED.get(opcode)
        if width is None or not self._has(argument + width):
            return False
        start, length = argument + width, self._number(argument, width)
        if start + self._left_out + length > self._nbytes:
            return False
        is_left_out = length >= PAYLOAD_NBYTES and start >= self._frame_end
        if opcode in BYTE_STRINGS and is_left_out:
            self._leave_out(start, length)
            self._at = start
        else:
            self._at = start + length
        return True

    def _number(self, position: int, width: int) -> int:
        return int.from_bytes(self.opcodes[position : position + width], "little")

    def _leave_out(self, position: int, nbytes: int) -> None:
        # What was read behind the length belongs to the payload, or is read again behind it.
        del self.opcodes[position:]
        self.payloads.append(Payload(position, position + self._left_out, nbytes))
        self._left_out += nbytes

    def _find_newline(self, position: int) -> int:
        searched = position
        while True:
            newline = self.opcodes.find(b"\n", searched)
            if newline >= 0:
                return newline
            searched = len(self.opcodes)
            if not self._has(searched + 1):
                return -1

    def _has(self, stop: int) -> bool:
        """Whether the file has opcodes up to `stop`, which are read if they were not yet."""
        if stop <= len(self.opcodes):
            return True
        if stop + self._left_out > self._nbytes:
            return False
        if stop > self._most:
            raise LimitExceeded(
                f"a pickle of more than {self._most:,} bytes without its arrays, above "
                f"Limits(pickle_nbytes={self._most:,})",
                expected=self._most,
            )
        start = len(self.opcodes) + self._left_out
        end = max(stop + self._left_out, start + WINDOW_NBYTES)
        self.opcodes += self._read(start, min(end, self._nbytes))
        return True
