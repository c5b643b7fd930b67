"""The bytes that CPython's C unpickler takes from a file whose opcodes do not stay inside their frames.

At a FRAME, the unpickler reads the whole frame into a buffer. When the rest of the buffer is too short
for an argument, it reads the argument from the file, behind the frame, and drops the rest of the buffer
(CPython gh-154848). `pickle.loads` has all bytes in one buffer and drops nothing, and the unpickler
written in Python refuses such a stream. So one file can be harmless to one of them and an attack on
another.

A file with `peek` differs again: frames that its own buffer holds whole are read as by `pickle.loads`.
"""

from __future__ import annotations

from holdfast.formats.pickle.payloads import COUNTED, FIXED, FRAME, LINES, STOP

COPIED = frozenset(b"BC\x8e\x96")
"""BINBYTES, SHORT_BINBYTES, BINBYTES8 and BYTEARRAY8, whose argument drops nothing."""


def read_like_c_unpickler(data: bytes) -> tuple[bytes, int]:
    """Return the bytes of the first pickle that the C unpickler uses, and the file position behind it."""
    reading = _FileReading(data)
    while reading.position < len(data):
        opcode = data[reading.position]
        reading.take(1)
        if opcode == STOP:
            break
        if opcode == FRAME:
            reading.enter_frame()
        elif opcode in COPIED:
            reading.copy(reading.take_number(COUNTED[opcode]))
        elif opcode in COUNTED:
            reading.take(reading.take_number(COUNTED[opcode]))
        else:
            reading.take(FIXED.get(opcode, 0))
            for _ in range(LINES.get(opcode, 0)):
                reading.take_line()
    return reading.used_bytes(), min(reading.buffer_stop, len(data))


class _FileReading:
    """The position in the file, and the end of the bytes that the unpickler has in its buffer."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.position = 0
        self.buffer_stop = 0
        self._piece_start = 0
        self._pieces: list[bytes] = []

    def take(self, nbytes: int) -> None:
        """Use some bytes that must be in the buffer together."""
        if self.position + nbytes > self.buffer_stop:
            self._drop_buffer()
            self.buffer_stop = self.position + nbytes
        self.position += nbytes

    def take_number(self, nbytes: int) -> int:
        """Use some bytes and return them as an unsigned integer."""
        self.take(nbytes)
        return int.from_bytes(self.data[self.position - nbytes : self.position], "little")

    def take_line(self) -> None:
        """Use the bytes up to a newline."""
        newline = self.data.find(b"\n", self.position, self.buffer_stop)
        if newline < 0:
            self._drop_buffer()
            newline = self.data.find(b"\n", self.position)
            newline = len(self.data) if newline < 0 else newline
            self.buffer_stop = newline + 1
        self.position = newline + 1

    def copy(self, nbytes: int) -> None:
        """Use some bytes of which the first may be in the buffer and the others in the file."""
        self.position += nbytes
        self.buffer_stop = max(self.buffer_stop, self.position)

    def enter_frame(self) -> None:
        """Fill the buffer with a frame, unless the buffer already holds all of it."""
        nbytes = self.take_number(8)
        self.take(nbytes)
        self.position -= nbytes

    def used_bytes(self) -> bytes:
        """Return all bytes that were used so far."""
        return b"".join([*self._pieces, self.data[self._piece_start : self.position]])

    def _drop_buffer(self) -> None:
        if self.position < self.buffer_stop:
            self._pieces.append(self.data[self._piece_start : self.position])
            self.position = self._piece_start = self.buffer_stop
