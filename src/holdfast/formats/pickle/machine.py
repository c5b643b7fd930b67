"""The loop: one pass over the opcodes of a pickle, protocols 0 to 5, that builds inert data and calls nothing.

1. Every opcode of CPython's pickle either does stack work here, or asks the `ReducerTable` what a global, a call, a BUILD or a
   persistent id becomes, or is refused. There is no import, no `eval`, no attribute access by a name from the file, no recursion.
2. A length that the stream claims is compared with the bytes that are there before anything is allocated. The end to compare with
   is the frame's inside a frame: an opcode never crosses it, frames never nest, and STOP is the last opcode of the last frame.
3. PROTO may be missing, and stands nowhere but at the start. STOP leaves exactly one value and no MARK.
4. Cost is linear in the stream: the stack and the memo hold references, marks are counted, a memo index is at most the number of
   opcodes so far + 1, integers are short, and whatever costs more than its bytes goes through `Spending`.
5. A table that is `tolerant` (a scan's) goes on where CPython does and others are refused: the oddity is recorded, not raised.
6. An object that only BUILD finishes is replaced where it stands and where it is remembered; a reference to it inside of its
   own state stays an `Opaque`.

Nesting is not limited here, because nothing here follows it: a walk over the value counts it (`Limits.depth`).

Speed: a checkpoint of 100,000 tensors is 3.2 million opcodes, and takes 1.0 to 1.4 seconds. The opcodes that make it up are two
chains of comparisons, the most frequent first, on local variables; all others are functions in `rare`. One chain for all of them
took 6% longer for the index of DCP. The byte of each opcode stands as a number, since CPython compares a local with a constant
faster than with anything that has a name. The cyclic garbage collector is paused: new containers by the hundred thousand make it
walk all of them again and again (a tenth to a third of the time), and none is garbage.
"""

from __future__ import annotations

import struct

from holdfast.core.limits import Limits
from holdfast.core.protocols import Foreign
from holdfast.core.runtime import gc_paused
from holdfast.core.value import Value
from holdfast.errors import HoldfastError, LimitExceeded, PickleError
from holdfast.formats.pickle.rare import RARE, REFUSED, TOLERANT, State
from holdfast.formats.pickle.table import Pending, ReducerTable
from holdfast.formats.pickle.text import utf8

UINT16, UINT32, INT32, FLOAT64 = (
    struct.Struct(code).unpack_from for code in ("<H", "<I", "<i", ">d")
)

PROTOCOL = 5
"""The highest protocol there is."""


class Interpreted(Value, frozen=True):
    """The content of one pickle."""

    value: object
    """The object: plain data, what the table built, and `Opaque` for the rest. It may be deep, shared and cyclic."""
    stop: int
    """The position behind STOP, in the data that was given."""
    foreign: tuple[Foreign, ...]
    """The globals that were not built."""
    opcodes: int


def interpret(
    data: bytes,
    table: ReducerTable,
    *,
    limits: Limits,
    stream: str = "data.pkl",
    start: int = 0,
    max_nbytes: int | None = None,
) -> Interpreted:
    """Interpret the pickle that begins at `start`; what lies behind its STOP is the caller's.

    `max_nbytes` replaces `limits.pickle_nbytes`. Offsets in errors are positions in `data`. Raises `PickleError`, `Truncated` or
    `LimitExceeded`.
    """
    end = min(len(data), start + (limits.pickle_nbytes if max_nbytes is None else max_nbytes))
    state = State(data, table, limits, stream=stream, start=start, end=end)
    table.begin(limits, end - start)
    try:
        with gc_paused():
            value = _run(state)
            table.end()
    except HoldfastError as error:
        if error.offset is None:
            error.offset = state.at
        raise
    foreign = table.foreign(stream) if table.mentions else ()
    return Interpreted(value, state.pos, foreign, state.count)


def interpret_whole(
    data: bytes,
    table: ReducerTable,
    *,
    limits: Limits,
    stream: str = "data.pkl",
    max_nbytes: int | None = None,
) -> Interpreted:
    """Interpret a pickle that is all of `data`; bytes behind its STOP are refused."""
    most = limits.pickle_nbytes if max_nbytes is None else max_nbytes
    if len(data) > most:
        message = f"{stream}: a pickle of {len(data):,} bytes, and {most:,} are allowed (Limits.pickle_nbytes)"
        raise LimitExceeded(message, expected=most, found=len(data))
    found = interpret(data, table, limits=limits, stream=stream, max_nbytes=most)
    if found.stop != len(data):
        raise PickleError(
            f"{stream}: {len(data) - found.stop:,} bytes behind the end of the pickle",
            offset=found.stop,
        )
    return found


def _run(state: State) -> object:
    """The value of the stream; `state.pos` is behind its STOP."""
    data, limit, marks = state.data, state.limit, state.limits.marks
    if state.table.tolerant:
        marks = len(data)  # a MARK is one byte, so no more than that can be open
    table, memo, marked, watched = state.table, state.memo, state.marked, state.watched
    spending = table.spending
    call, new, build = table.call, table.new, table.build
    persistent, fill = table.persistent, spending.fill
    uint16, uint32, int32, float64 = UINT16, UINT32, INT32, FLOAT64
    pos = _protocol(state)
    stack: list[object] = state.stack
    count = int(pos > state.start)
    try:
        while True:
            while pos < limit:
                op = data[pos]
                pos += 1
                count += 1
                # Whatever is refused below is refused before `pos` moves on, so that the opcode is at `pos - 1`.
                if op >= 0x80:
                    if op == 0x94:  # MEMOIZE
                        if state.sparse:
                            state.at, state.count, state.stack = pos - 1, count, stack
                            state.odd("MEMOIZE after a memo entry out of order")
                            state.put(state.entries())
                        else:
                            memo.append(stack[-1])
                            if watched:
                                state.watch(stack[-1], len(memo) - 1)
                    elif op == 0x85:  # TUPLE1
                        state.at = pos - 1
                        spending.container()
                        stack[-1] = (stack[-1],)
                    elif op == 0x81:  # NEWOBJ
                        args = stack.pop()
                        table.offset = state.at = pos - 1
                        if type(args) is not tuple:
                            state.odd("arguments that are no tuple")
                            args = (args,)
                        stack[-1] = value = new(stack[-1], args, None)
                        if isinstance(value, Pending):
                            state.announce(value)
                    elif op == 0x89:  # NEWFALSE
                        stack.append(False)
                    elif op == 0x8C:  # SHORT_BINUNICODE
                        stop = pos + 1 + data[pos]
                        if stop > limit:
                            state.at = pos - 1
                            raise state.short()
                        try:
                            stack.append(data[pos + 1 : stop].decode())
                        except UnicodeDecodeError:
                            state.at = pos - 1
                            stack.append(utf8(data[pos + 1 : stop]))
                        pos = stop
                    elif op == 0x86:  # TUPLE2
                        value = stack.pop()
                        stack[-1] = (stack[-1], value)
                    elif op == 0x88:  # NEWTRUE
                        stack.append(True)
                    elif op == 0x95 and table.framed:  # FRAME
                        state.at, state.pos = pos - 1, pos
                        pos, limit = _frame(state)
                    else:
                        pos, stack = _run_rare(state, op, pos, count=count, stack=stack)
                else:
                    if op == 0x68:  # BINGET
                        index = data[pos]
                        pos += 1
                        if index < len(memo):
                            stack.append(memo[index])
                        else:
                            state.at = pos - 2
                            stack.append(state.get(index))
                    elif op == 0x72:  # LONG_BINPUT
                        (index,) = uint32(data, pos)
                        if index == len(memo):
                            memo.append(stack[-1])
                            if watched:
                                state.watch(stack[-1], index)
                        else:
                            state.at, state.count, state.stack = pos - 1, count, stack
                            state.put(index)
                        pos += 4
                    elif op == 0x6A:  # LONG_BINGET
                        (index,) = uint32(data, pos)
                        pos += 4
                        if index < len(memo):
                            stack.append(memo[index])
                        else:
                            state.at = pos - 5
                            stack.append(state.get(index))
                    elif op == 0x4B:  # BININT1
                        stack.append(data[pos])
                        pos += 1
                    elif op == 0x28:  # MARK
                        if len(marked) >= marks:
                            message = f"{state.stream}: more than Limits(marks={marks}) open MARKs"
                            raise LimitExceeded(message, offset=pos - 1, expected=marks)
                        marked.append(stack)
                        stack = []
                    elif op == 0x74:  # TUPLE
                        made = tuple(stack)
                        stack = marked.pop()
                        stack.append(made)
                    elif op == 0x52:  # REDUCE
                        args = stack.pop()
                        what = stack[-1]
                        table.offset = state.at = pos - 1
                        if type(args) is not tuple:
                            state.odd("arguments that are no tuple")
                            args = (args,)
                        stack[-1] = value = call(what, args)
                        if isinstance(value, Pending):
                            state.announce(value)
                    elif op == 0x29:  # EMPTY_TUPLE
                        stack.append(())
                    elif op == 0x58:  # BINUNICODE
                        stop = pos + 4 + uint32(data, pos)[0]
                        if stop > limit:
                            state.at = pos - 1
                            raise state.short()
                        try:
                            stack.append(data[pos + 4 : stop].decode())
                        except UnicodeDecodeError:
                            state.at = pos - 1
                            stack.append(utf8(data[pos + 4 : stop]))
                        pos = stop
                    elif op == 0x62:  # BUILD
                        contents = stack.pop()
                        target = stack[-1]
                        table.offset = state.at = pos - 1
                        value = build(target, contents)
                        if value is not target:
                            stack[-1] = value
                            state.replace(target, value)
                        # joblib writes the elements of an array behind its BUILD.
                        array_nbytes = table.behind(data, pos, state.end)
                        if array_nbytes and state.framed and pos != limit:
                            raise state.misframe("the elements of an array inside of a frame")
                        pos += array_nbytes
                    elif op == 0x75:  # SETITEMS
                        above, stack = stack, marked.pop()
                        target = stack[-1]
                        table.offset = state.at = pos - 1
                        if len(above) % 2:
                            state.odd("SETITEMS with a key that has no value")
                            above.append(None)
                        if type(target) is dict:
                            fill(target, above)
                        else:
                            table.set_items(target, above)
                    elif op == 0x7D:  # EMPTY_DICT
                        state.at = pos - 1
                        spending.container()
                        stack.append({})
                    elif op == 0x51:  # BINPERSID
                        table.offset = state.at = pos - 1
                        stack[-1] = persistent(stack[-1])
                    elif op == 0x4D:  # BININT2
                        stack.append(uint16(data, pos)[0])
                        pos += 2
                    elif op == 0x4E:  # NONE
                        stack.append(None)
                    elif op == 0x71:  # BINPUT
                        index = data[pos]
                        if index == len(memo):
                            memo.append(stack[-1])
                            if watched:
                                state.watch(stack[-1], index)
                        else:
                            state.at, state.count, state.stack = pos - 1, count, stack
                            state.put(index)
                        pos += 1
                    elif op == 0x4A:  # BININT
                        stack.append(int32(data, pos)[0])
                        pos += 4
                    elif op == 0x47:  # BINFLOAT
                        if pos + 8 > limit:
                            state.at = pos - 1
                            raise state.short()
                        stack.append(float64(data, pos)[0])
                        pos += 8
                    elif op == 0x65:  # APPENDS
                        above, stack = stack, marked.pop()
                        target = stack[-1]
                        if type(target) is list:
                            target += above
                        else:
                            table.offset = state.at = pos - 1
                            table.append(target, above)
                    elif op == 0x2E:  # STOP
                        state.at, state.pos, state.count = pos - 1, pos, count
                        if marked or len(stack) != 1:
                            state.odd("STOP with more or less than one value on the stack")
                        if state.framed and pos != state.frame_stop:
                            raise state.misframe("STOP before the end of its frame")
                        return stack[-1] if stack else None
                    else:
                        pos, stack = _run_rare(state, op, pos, count=count, stack=stack)
            state.at = limit
            if pos > limit or not state.framed:
                raise state.short()
            limit = state.limit = state.end
            state.framed = False
    except (struct.error, IndexError) as error:
        if error.__traceback__ is not None and error.__traceback__.tb_next is not None:
            # Not from a stack or the data here, but from a table: what the caller allowed to run, or a mistake of ours.
            raise
        state.at = pos - 1
        if isinstance(error, struct.error) or pos >= limit:
            raise state.short() from None
        state.underflow()


def _run_rare(
    state: State, op: int, pos: int, *, count: int, stack: list[object]
) -> tuple[int, list[object]]:
    """Run an opcode that the loop does not have, and return the position behind it and the stack."""
    state.table.offset = state.at = pos - 1
    state.pos, state.count, state.stack = pos, count, stack
    rare = (TOLERANT if state.table.tolerant else RARE).get(op)
    if rare is None:
        raise state.fail(
            f"Unsupported operand {op}: opcode 0x{op:02x} is {REFUSED.get(op, 'not one of pickle')}"
        )
    rare(state)
    return state.pos, state.stack


def _protocol(state: State) -> int:
    """The position of the first opcode behind PROTO."""
    start, data = state.start, state.data
    if start < state.end and data[start] != 0x80:
        return start
    if start + 2 > state.end:
        raise state.short()
    state.table.declare(data[start + 1])
    if data[start + 1] > PROTOCOL:
        raise state.fail(f"a pickle of protocol {data[start + 1]}, and the highest is {PROTOCOL}")
    return start + 2


def _frame(state: State) -> tuple[int, int]:
    """Enter a frame: the position of its first opcode, and its end."""
    if state.framed:
        raise state.misframe("a frame inside of a frame")
    if state.pos + 8 > state.end:
        raise state.short()
    start = state.pos + 8
    stop = start + int.from_bytes(state.data[state.pos : start], "little")
    # A scan reads only the start of a long file at first, and Python's unpickler accepts a frame that
    # reaches beyond the end of the file.
    if stop > state.end and not state.table.tolerant:
        raise state.short()
    if stop == start:
        raise state.misframe("an empty frame")
    state.framed = True
    state.frame_stop = stop
    state.limit = min(stop, state.end)
    return start, state.limit
