"""The fields of protobuf messages, read with strict bounds and without loading what they hold.

    message    tag value  tag value  …        a tag is  number << 3 | wire type
    VARINT     an integer of up to ten bytes, seven bits in each, the lowest first
    FIXED64    eight bytes             FIXED32    four bytes
    BYTES      a length as a varint, and so many bytes: text, a message, packed numbers

A reader of protobuf takes whatever comes: of a field that is there twice the last one counts, or both are
merged, and a field of another wire type is unknown. Here a field ends inside of its message, and whoever reads
a message says which fields may be repeated.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from holdfast.core.protocols import Source
from holdfast.errors import HeaderError, LimitExceeded, Truncated

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
"""Wire types. Groups (3 and 4) are older than ONNX."""

FIXED_NBYTES = {FIXED64: 8, FIXED32: 4}

VARINT_NBYTES = 10
"""The longest varint: 64 bits, seven in each byte."""

MOST_NUMBER = (1 << 29) - 1
"""The highest field number that protobuf allows."""

NEAR_NBYTES, WINDOW_NBYTES = 1 << 12, 1 << 16
"""Bytes that are read behind a jump, and where one field follows the other."""


class Field(NamedTuple):
    number: int
    wire_type: int
    start: int
    """The first byte of its content in the file."""
    stop: int
    value: int = 0
    """The integer of a VARINT."""

    @property
    def nbytes(self) -> int:
        return self.stop - self.start


class WireReader:
    """Reads fields of one file. What it has looked at counts against `Limits.header_nbytes`; what it jumps over does not."""

    def __init__(self, source: Source, key: str) -> None:
        self.source, self.key = source, key
        self.nbytes = source.store.size(key)
        self.number = 0
        """The number of the field that was met last, also if it could not be read."""
        self._left = source.limits.header_nbytes
        self._window, self._window_start = b"", 0

    def fields(self, start: int, stop: int) -> Iterator[Field]:
        """Yield the fields of the message between two bytes. Raises `HeaderError`, or `Truncated` at the end of the file."""
        at = start
        while at < stop:
            tag_start = at
            tag, at = self.varint(at, stop)
            number, wire_type = tag >> 3, tag & 7
            self.number = number
            if not 1 <= number <= MOST_NUMBER:
                raise HeaderError(
                    f"a field has the number {number:,}, and numbers are 1 to {MOST_NUMBER:,}",
                    file=self.key,
                    offset=tag_start,
                )
            if wire_type == VARINT:
                value_start = at
                value, at = self.varint(at, stop)
                yield Field(number, wire_type, value_start, at, value)
                continue
            if wire_type == BYTES:
                nbytes, at = self.varint(at, stop)
            elif wire_type in FIXED_NBYTES:
                nbytes = FIXED_NBYTES[wire_type]
            else:
                raise HeaderError(
                    f"field {number} has the wire type {wire_type}, which ONNX does not use",
                    file=self.key,
                    offset=tag_start,
                )
            if nbytes > stop - at:
                raise self._beyond(f"field {number} of {nbytes:,} bytes", tag_start, stop)
            self._spend(at - tag_start)
            yield Field(number, wire_type, at, at + nbytes)
            at += nbytes

    def varint(self, at: int, stop: int) -> tuple[int, int]:
        """Return the varint at a byte, and the byte behind it."""
        raw = self._look(at, min(at + VARINT_NBYTES, stop))
        value = 0
        for count, byte in enumerate(raw):
            value |= (byte & 0x7F) << 7 * count
            if byte < 0x80:
                if value >= 1 << 64:
                    break
                self._spend(count + 1)
                return value, at + count + 1
        if len(raw) < VARINT_NBYTES:
            raise self._beyond("an integer", at, stop)
        raise HeaderError("an integer of more than 64 bits", file=self.key, offset=at)

    def content(self, field: Field) -> bytes:
        """Return the content of a field that is short: text, or a few numbers."""
        self._spend(field.nbytes)
        return self.source.bytes(self.key, field.start, field.stop)

    def text(self, field: Field, what: str) -> str:
        """Return the text of a field, which is UTF-8 without a NUL."""
        if field.wire_type != BYTES:
            raise self.wrong_type(field, what)
        try:
            text = self.content(field).decode("utf-8")
        except UnicodeDecodeError:
            text = "\0"
        if "\0" in text:
            raise HeaderError(
                f"{what} must be UTF-8 text without NUL characters",
                file=self.key,
                offset=field.start,
            )
        return text

    def wrong_type(self, field: Field, what: str) -> HeaderError:
        return HeaderError(
            f"{what} has the wire type {field.wire_type}, which it never has in a file of ONNX",
            file=self.key,
            offset=field.start,
        )

    def _look(self, start: int, stop: int) -> bytes:
        """Return a few bytes, and read more behind them: the next field is near."""
        end = self._window_start + len(self._window)
        if not self._window_start <= start or stop > end:
            is_next = self._window_start <= start <= end
            reach = start + (WINDOW_NBYTES if is_next else NEAR_NBYTES)
            self._window = self.source.bytes(self.key, start, min(max(stop, reach), self.nbytes))
            self._window_start = start
        return self._window[start - self._window_start : stop - self._window_start]

    def _spend(self, nbytes: int) -> None:
        self._left -= nbytes
        if self._left < 0:
            most = self.source.limits.header_nbytes
            raise LimitExceeded(
                f"more than {most:,} bytes without tensors, above Limits(header_nbytes={most:,})",
                file=self.key,
                expected=most,
            )

    def _beyond(self, what: str, offset: int, stop: int) -> HeaderError | Truncated:
        """The error for what reaches beyond the end of its message, or of the file."""
        if stop == self.nbytes:
            return Truncated(
                f"the file ends inside of {what}", file=self.key, offset=offset, found=self.nbytes
            )
        return HeaderError(
            f"{what} reaches beyond its message, which ends at byte {stop:,}",
            file=self.key,
            offset=offset,
        )
