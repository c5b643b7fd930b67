"""The state of the interpreter: the stream and the position in it, the stack, the marks, the memo.

A MARK puts the stack aside and starts an empty one, so that an opcode that takes too much finds an empty list and nothing
beneath it. The memo is a list, because writers number its entries 0, 1, 2, …; entries out of that order go to a dict.
"""

from __future__ import annotations

from typing import NoReturn

from holdfast.core.limits import Limits
from holdfast.errors import FormatError, LimitExceeded, PickleError, Truncated
from holdfast.formats.pickle.table import Pending, ReducerTable

NAME_NBYTES = 1024
"""The longest module or name of a global. Names are compared and hashed at every mention, so they are short."""


class State:
    """One interpretation. The loop holds `pos` and `stack` in local variables and writes them back for rare opcodes."""

    __slots__ = (
        "at", "count", "counted", "data", "end", "frame_stop", "framed", "limit", "limits", "marked",
        "memo", "pos", "sparse", "stack", "start", "stream", "table", "watched",
    )  # fmt: skip

    def __init__(
        self, data: bytes, table: ReducerTable, limits: Limits, *, stream: str, start: int, end: int
    ) -> None:
        self.data, self.table, self.limits, self.stream, self.start, self.end = (
            data,
            table,
            limits,
            stream,
            start,
            end,
        )
        """The last position for the end of the stream: the end of the data, or of what the limit allows."""
        self.limit = end
        """The end of the frame at work, or `end` between frames."""
        self.framed = False
        self.frame_stop = start
        """The end of the current frame as its header claims it, which may lie beyond `end`."""
        self.pos = start
        self.at = start
        """The position of the current opcode."""
        self.count = 0
        """Opcodes so far."""
        self.stack: list[object] = []
        self.marked: list[list[object]] = []
        self.memo: list[object] = []
        self.sparse: dict[int, object] = {}
        self.counted = 0
        """Entries of `memo` that were looked for in `sparse`."""
        self.watched: dict[int, tuple[Pending, list[int]]] = {}
        """Unfinished objects, by identity, with the memo entries that hold them."""

    def fail(self, message: str) -> PickleError:
        return PickleError(f"{self.stream}: {message}", offset=self.at)

    def misframe(self, message: str) -> PickleError:
        """Return the error for a frame that unpicklers read differently, and record it in the table."""
        self.table.misframed = message
        return self.fail(message)

    def odd(self, message: str) -> None:
        """Refuse what no writer does and CPython accepts; a tolerant table records it instead."""
        if not self.table.tolerant:
            raise self.fail(message)
        self.table.note(message)

    def entries(self) -> int:
        """How many memo entries there are, which is the number that MEMOIZE gives."""
        while self.counted < len(self.memo):
            # Written out of order once, and in order since.
            self.sparse.pop(self.counted, None)
            self.counted += 1
        return len(self.memo) + len(self.sparse)

    def short(self) -> FormatError | LimitExceeded:
        """The error for an opcode that needs bytes beyond `limit`."""
        self.table.reached = self.at
        if self.framed and self.limit == self.frame_stop:
            return self.misframe("an opcode reaches beyond the end of its frame")
        if self.end < len(self.data):
            most = self.end - self.start
            message = f"{self.stream}: the pickle is longer than the {most:,} bytes allowed (Limits.pickle_nbytes)"
            return LimitExceeded(message, offset=self.at, expected=most)
        return Truncated(f"{self.stream} ends before its pickle does", offset=self.end)

    def underflow(self) -> NoReturn:
        raise self.fail("an opcode takes a value or a MARK that is not there")

    def pop(self) -> object:
        if not self.stack:
            self.underflow()
        return self.stack.pop()

    def top(self) -> object:
        if not self.stack:
            self.underflow()
        return self.stack[-1]

    def pop_mark(self) -> list[object]:
        """Everything above the last MARK, which goes away."""
        if not self.marked:
            self.underflow()
        above, self.stack = self.stack, self.marked.pop()
        return above

    def take(self, nbytes: int) -> bytes:
        """The next bytes of the stream; compared with what is there before anything is allocated."""
        stop = self.pos + nbytes
        if stop > self.limit:
            raise self.short()
        raw = self.data[self.pos : stop]
        self.pos = stop
        return raw

    def number(self, nbytes: int) -> int:
        """An unsigned integer, lowest byte first."""
        return int.from_bytes(self.take(nbytes), "little")

    def line(self, most: int | None = None) -> bytes:
        """The bytes up to the next newline, which is skipped; at most `most` of them."""
        reach = self.limit if most is None else min(self.limit, self.pos + most + 1)
        stop = self.data.find(b"\n", self.pos, reach)
        if stop < 0:
            if reach == self.limit:
                raise self.short()
            raise self.fail(f"a text of more than {most} bytes where a name or a number belongs")
        raw = self.data[self.pos : stop]
        self.pos = stop + 1
        return raw

    def put(self, index: int) -> None:
        """Remember the top of the stack under `index`."""
        value = self.top()
        if index < len(self.memo):
            self.memo[index] = value
        elif index == len(self.memo):
            self.memo.append(value)
        else:
            if index > self.count + 1:
                self.odd(
                    f"memo entry {index} after {self.count} opcodes: no writer numbers like that"
                )
            self.sparse[index] = value
        if self.watched:
            self.watch(value, index)

    def get(self, index: int) -> object:
        """The value that was remembered under `index`."""
        if 0 <= index < len(self.memo):
            return self.memo[index]
        if index not in self.sparse:
            raise self.fail(f"memo entry {index} was never written")
        return self.sparse[index]

    def watch(self, value: object, index: int) -> None:
        """Record that a memo entry holds `value`, if that is an object that is not finished yet."""
        found = self.watched.get(id(value))
        if found is not None:
            found[1].append(index)

    def announce(self, value: object) -> None:
        """Record an object that only BUILD will finish."""
        if isinstance(value, Pending):
            self.watched[id(value)] = (value, [])

    def replace(self, old: object, new: object) -> None:
        """Put a finished object where the unfinished one was remembered."""
        found = self.watched.pop(id(old), None)
        for index in found[1] if found is not None else ():
            memo: list[object] | dict[int, object] = (
                self.memo if index < len(self.memo) else self.sparse
            )
            if memo[index] is old:
                memo[index] = new
