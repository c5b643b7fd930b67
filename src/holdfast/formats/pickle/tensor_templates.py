"""Ordinary tensors by their bytes: the thirty opcodes of each as `torch.save` writes them, many tensors at once.

    h 2      ( ( h 3 h 4 X "17"  r 140 h 6 K 16 t r 141 Q K 0 K 4 K 4 \\x86 r 142 K 4 K 1 \\x86 r 143 …  t r 145 R r 146
    opener   head        key     tail
    X "layers.0.weight" r 147    h 2      ( ( …
    the key of the next tensor   opener

Of a hundred thousand tensors most are of a dozen kinds. In all of one kind the head is the same, and so is the tail but for the
memo numbers, which count on. So a tail is a number itself, and has to be `base + entries · step`: one comparison of long integers.

1. A kind is learned from a tensor behind the first few, by an expression (`_pattern`) that knows what torch writes and nothing
   else, and by the table, which checks the arguments (`ReducerTable.kind`). Which kind follows which is recorded.
2. Tensors that follow each other are one run, with what is pushed between and behind them: texts, which are keys, and what the
   memo has, which are keys and tied tensors. The table makes all tensors together, and they are taken up to the first that is not
   as expected. That one is left to the machine, at the byte where it stands: so are all errors.
3. The opcodes that are taken are those that the machine would have taken, counted as it counts them, and paid for as it pays.
4. The memo gets the key, the tensor, and between them `Stub`s for what is hardly ever used again: the persistent id, size, stride,
   hooks, arguments. If a stream uses one, or writes an entry a second time, all of them are made, and the machine goes on alone.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from holdfast.formats.pickle.state import State

NEVER = object()
"""A value that is in no memo."""

MOST_KINDS = 1024
"""Kinds that are remembered. A model has some dozens; a file with more of them is left to the machine."""

MOST_TENSORS = 1024
"""Tensors in one run."""

MACHINE_TENSORS = 2
"""Tensors that the machine reads, behind the first, before a kind is learned. To learn a kind takes as long as to read some
tensors, and an object of a kilobyte has few."""

REDUCES = 2
"""Containers that a tensor is paid for: its hooks, and itself."""

MARKS = 2
"""Open MARKs at one moment inside of it."""

FIXED_OPCODES = 21
"""Opcodes of a tensor behind the opener, without its size and its stride."""

INT = rb"(?:K.|M..|J....)"
GET = rb"(?:h.|j....)"
PUT = rb"(?:r(....)|q(.))"
LENGTHS = rb"(\)|\(?%b{1,64}[\x85\x86\x87t])(?:(?<=\))|(?<!\))%b)" % (INT, PUT)
"""A tuple of integers, and its PUT. The empty one has none."""

LOCATION = rb"X(.)\0\0\0([a-z0-9:]{1,32}?)%b" % PUT
"""The device of the storage: torch writes `cuda:0` anew for each tensor, and `cpu` once."""


@cache
def _pattern() -> re.Pattern[bytes]:
    """A tensor behind its opener. Compiled when a file has the first: that takes as long as to open ten small ones."""
    parts = [
        rb"\(\((%b)(%b)X(.)\0\0\0([0-9]{1,19})" % (GET, GET), PUT, rb"(?:(%b)|%b)(%b)t" % (GET, LOCATION, INT), PUT,
        rb"Q(%b)" % INT, LENGTHS, LENGTHS, rb"([\x88\x89])(%b)\)R" % GET, PUT, rb"t", PUT, rb"R", PUT,
    ]  # fmt: skip
    return re.compile(b"".join(parts), re.DOTALL)


VALUES = (1, 2, 7, 12, 15, 16, 19, 22, 23)
"""Groups of `_pattern` that say something: class and kind of the storage, location, elements, offset, size, stride, grad, hooks."""

KEY_NBYTES, KEY = 3, 4

LOCATION_NBYTES, LOCATION_TEXT = 8, 9
"""Groups of a location that is written there."""

PUTS = (5, 6, 10, 11, 13, 14, 17, 18, 20, 21, 24, 25, 26, 27, 28, 29)
"""Groups that are memo numbers, in their order: of four bytes or of one."""


class TensorArguments(NamedTuple):
    """The arguments of a tensor, apart from its key. Only their form is checked."""

    storage: object
    """The class of its storage: whatever the table gave for that global."""
    location: str
    elements: int
    """The number of elements of the storage."""
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    grad: bool
    hooks: object
    """The global that is called for its hooks."""
    own_location: bool = False
    """Whether the location is written for each of them, and has a place in the memo."""

    @property
    def values(self) -> int:
        """Entries of the memo between the key and the tensor: persistent id, hooks and arguments; an empty tuple has none."""
        return 3 + self.own_location + bool(self.size) + bool(self.stride)


Make = Callable[[str], object]
"""From the key of its storage to a tensor of one kind; None where it is better left to the machine."""


class Stub:
    """Stands in the memo for a value that was not made. One for each place in a kind."""

    __slots__ = ("at", "kind")

    def __init__(self, kind: TensorTemplate, at: int) -> None:
        self.kind, self.at = kind, at


class TensorTemplate:
    """Tensors that differ in their keys and memo numbers alone."""

    __slots__ = (
        "arguments", "base", "blank", "entries", "following", "head_nbytes", "heads", "make", "opcodes", "step", "stubs",
        "tail_nbytes",
    )  # fmt: skip

    def __init__(
        self,
        head: bytes,
        tail: tuple[int, int, int],
        arguments: TensorArguments,
        *,
        make: object,
        opcodes: int,
    ) -> None:
        self.heads = {head + bytes((n, 0, 0, 0)): n for n in range(1, 20)}
        """The bytes before the key, with the length of the key."""
        self.head_nbytes = len(head) + 4
        self.base, self.step, self.tail_nbytes = tail
        """The bytes behind the key, as a number, are `base` and the entries of the memo so far times `step`."""
        self.arguments, self.make, self.opcodes = arguments, make, opcodes
        """`make` is the table's: what makes them; None where they are left to the machine."""
        self.stubs = tuple([Stub(self, at) for at in range(1, 1 + arguments.values)])
        self.blank = (None, *self.stubs, None)
        """The entries of the memo, without the key and the tensor."""
        self.entries = 2 + len(self.stubs)
        self.following = self
        """The kind that came behind this one last."""


NOTHING = TensorArguments(None, "", 0, 0, (), (), False, None)
START = TensorTemplate(b"", (0, 0, 0), NOTHING, make=None, opcodes=0)
"""Before any kind is known, and for stubs that stand for no tensor. No stream begins with its head."""


class Templates(Protocol):
    """Takes many opcodes at once, where their bytes are known."""

    @property
    def made(self) -> Sequence[object]:
        """The values that were taken last, as they go to the stack."""

    @property
    def opcodes(self) -> int:
        """The number of their opcodes."""

    @property
    def repeated(self) -> object:
        """The class of values for which `take` is called where the memo gives one again."""

    def take(self, pos: int, limit: int, value: object = None) -> int:
        """Take what begins behind the opener at `pos`, or behind a `value` that the memo gave again; give where it ends.

        0, and nothing done, where it is left to the machine.
        """

    def end(self) -> None:
        """Forget what was learned."""


class TensorRun:
    """Tensors that follow each other, and what is pushed between and behind them."""

    __slots__ = ("again", "end", "keys", "kinds", "memo", "out", "places", "raw_keys")

    def __init__(self, out: list[object], end: int) -> None:
        self.kinds: list[TensorTemplate] = []
        self.raw_keys: list[bytes] = []
        self.keys: Sequence[str] = ()
        """The keys of their storages, in the stream and as texts."""
        self.places: list[tuple[int, int, int]] = []
        """For each tensor: how many values of the run are before it on the stack and in the memo, and where its opener begins."""
        self.out, self.memo, self.end = out, list[object](), end
        """The values for the stack and for the memo, None in the place of tensors and keys; and where the run ends."""
        self.again: list[tuple[int, int]] = []
        """Values of this run that the memo gives again: the place of each in `out` and in `memo`."""

    def cut(self, count: int) -> None:
        """Leave out what begins with the opener of a tensor."""
        height, entries, self.end = self.places[count]
        del self.out[height:], self.memo[entries:]
        self.again = [one for one in self.again if one[0] < height]

    def fill(self, tensors: Sequence[object]) -> int:
        """Put tensors and keys in their places; how many opcodes the run has behind its first."""
        out, memo = self.out, self.memo
        opcodes = len(out) + len(memo) - 1
        for kind, key, tensor, (height, place, _) in zip(
            self.kinds, self.keys, tensors, self.places, strict=False
        ):
            memo[place] = key
            out[height] = memo[place + kind.entries - 1] = tensor
            opcodes += kind.opcodes - kind.entries
        for height, place in self.again:
            out[height] = memo[place]
        return opcodes


class TensorTemplates:
    """Looks at what follows the opener, and takes as many ordinary tensors as there are."""

    __slots__ = (
        "_arguments_of",
        "_expected",
        "_kinds",
        "_left",
        "_most",
        "_opener",
        "_state",
        "made",
        "opcodes",
        "repeated",
    )

    def __init__(self, state: State) -> None:
        self._state = state
        self._left = MACHINE_TENSORS
        """Tensors that are yet left to the machine."""
        self._most = MOST_TENSORS
        """Tensors that are looked for next."""
        self._expected = START
        self._kinds: dict[tuple[bytes, int, int], TensorTemplate] = {}
        self._arguments_of: dict[tuple[bytes | None, ...], tuple[TensorArguments, object, int]] = {}
        """Arguments of tensors, what makes these, and the number of their opcodes, by the bytes of the arguments."""
        self._opener = b""
        """The GET of the opener."""
        self.made: Sequence[object] = ()
        """The tensors that were taken last, with what is pushed between and behind them."""
        self.opcodes = 0
        self.repeated: object = NEVER
        """The class of tensors that were taken: where the memo gives one again, `take` looks at what is behind it."""

    def take(self, pos: int, limit: int, value: object = None) -> int:
        """Take the ordinary tensors behind the opener at `pos`, with what is pushed between and behind them; give where they end.

        With a tensor as `value`, which the memo gave again, take what begins behind it. 0, and nothing done, where there is none.
        """
        if self._left:
            self._left -= 1
            return 0
        state, again = self._state, value is not None
        if len(state.marked) + MARKS > state.limits.marks or state.settled:
            return 0
        if not again:
            data, index = state.data, state.data[pos - 1]
            short = (
                data[pos - 2] == 0x68
                and index < len(state.memo)
                and state.memo[index] is state.opener
            )
            self._opener = data[pos - (2 if short else 5) : pos]
        run = TensorRun([value] if again else [], pos)
        self._scan(run, 0 if again else pos, limit)
        made = self._made(run) if run.kinds else ()
        taken = len(made)
        if taken < len(run.kinds):
            # What is behind it is looked at again: all together no more than a few times.
            self._most = 2 * max(taken, 1)
            run.cut(taken)
        elif taken == self._most:
            self._most = min(2 * taken, MOST_TENSORS)
        if not made and len(run.out) < 2:
            return 0
        state.table.spending.containers -= REDUCES * taken
        self.made, self.opcodes = run.out, run.fill(made)
        state.memo += run.memo
        if made:
            self.repeated = type(made[0])
        return run.end

    def _scan(self, run: TensorRun, pos: int, limit: int) -> None:
        """Find the tensors of a run. The first begins at `pos`, behind its opener; 0 where something is pushed before it."""
        state, opener, kind, number = self._state, self._opener, self._expected, int.from_bytes
        data, known = state.data, state.memo
        first = entries = len(known)
        kinds, keys, places, out, memo, end = (
            run.kinds,
            run.raw_keys,
            run.places,
            run.out,
            run.memo,
            run.end,
        )
        height = 0 if pos else 1
        left = min(self._most, state.table.spending.containers // REDUCES)
        # Few functions are called for a tensor: this is done for each of a million.
        while True:
            if pos:
                if not left:
                    break
                left -= 1
                start = pos + kind.head_nbytes
                head = data[pos:start]
                stop = start + (kind.heads[head] if head in kind.heads else 0)  # noqa: SIM401  # no call
                close = stop + kind.tail_nbytes
                if (
                    stop == start
                    or close > limit
                    or number(data[stop:close], "little") != kind.base + entries * kind.step
                ):
                    found = self._learned(pos, limit, entries)
                    if found is None:
                        break
                    if kind is not START:
                        kind.following = found[0]
                    kind, start, stop, close = found
                # Also where it is left to the machine: what is behind it is looked for in the same way.
                self._expected = kind.following
                if kind.make is None:
                    break
                kinds += (kind,)
                keys += (data[start:stop],)
                places += ((height, entries - first, end),)
                memo += kind.blank
                out += MISSING
                height, entries, end = height + 1, entries + kind.entries, close
                kind = kind.following
            # Up to the next opener: texts, and what the memo has.
            pos = 0
            while end < limit:
                op = data[end]
                if op == 0x58 and data[end + 2 : end + 5] == b"\0\0\0":
                    put = end + 5 + data[end + 1]
                    stop = put + (5 if put < limit and data[put] == 0x72 else 2)
                    if stop > limit or data[put] not in PUT_OPCODES:
                        break
                    index = data[put + 1]
                    if stop - put == 5:
                        index |= data[put + 2] << 8 | data[put + 3] << 16 | data[put + 4] << 24
                    if index != entries:
                        break
                    try:
                        text = (data[end + 5 : put].decode(),)
                    except UnicodeDecodeError:
                        break
                    out += text
                    memo += text
                    height, entries, end = height + 1, entries + 1, stop
                elif op in GET_NBYTES:
                    stop = end + GET_NBYTES[op]
                    raw = data[end:stop]
                    if stop > limit or raw == opener:
                        pos = stop if stop <= limit else 0
                        break
                    index = raw[1]
                    if op == 0x6A:
                        index |= raw[2] << 8 | raw[3] << 16 | raw[4] << 24
                    value = (
                        known[index]
                        if index < first
                        else memo[index - first]
                        if index < entries
                        else UNKNOWN
                    )
                    if type(value) is Stub:
                        break
                    if value is None and index >= first:
                        run.again += ((height, index - first),)
                    out += (value,)
                    height, end = height + 1, stop
                else:
                    break
            if not pos:
                break
        run.end = end

    def end(self) -> None:
        """Let the kinds go. They know each other, and what makes their tensors knows all of those."""
        for kind in self._kinds.values():
            kind.following, kind.stubs, kind.blank, kind.make = START, (), (), None
        self._kinds.clear()
        self._arguments_of.clear()

    def _made(self, run: TensorRun) -> Sequence[object]:
        """The tensors of a run, up to the first that is left to the machine."""
        raw = run.raw_keys
        if not b"".join(raw).isdigit():
            del raw[[key.isdigit() for key in raw].index(False) :]
        keys = run.keys = [*map(bytes.decode, raw)]
        return (
            self._state.table.tensors([kind.make for kind in run.kinds[: len(keys)]], keys)
            if keys
            else ()
        )

    def _learned(
        self, pos: int, limit: int, first: int
    ) -> tuple[TensorTemplate, int, int, int] | None:
        """The kind of a tensor by what it looks like, where its key begins and ends, and where itself ends; None for another."""
        data = self._state.data
        found = _pattern().match(data, pos, limit)
        if found is None or found[KEY_NBYTES][0] != len(found[KEY]):
            return None
        if found[LOCATION_TEXT] is not None and found[LOCATION_NBYTES][0] != len(
            found[LOCATION_TEXT]
        ):
            return None
        start, stop, end = found.start(KEY), found.end(KEY), found.end()
        puts = [found.regs[group] for group in PUTS if found.regs[group][0] >= 0]
        if [int.from_bytes(data[begin:behind], "little") for begin, behind in puts] != [
            *range(first, first + len(puts))
        ]:
            return None
        step = sum([1 << 8 * (begin - stop) for begin, _ in puts])
        base = int.from_bytes(data[stop:end], "little") - first * step
        like = data[pos : start - 4], base, end - stop
        if like not in self._kinds:
            if len(self._kinds) >= MOST_KINDS:
                return None
            self._kinds[like] = self._kind(found, like[0], (base, step, end - stop))
        return self._kinds[like], start, stop, end

    def _kind(
        self, found: re.Match[bytes], head: bytes, tail: tuple[int, int, int]
    ) -> TensorTemplate:
        """The kind of tensors like this one. Where only memo numbers became longer, what they say is known."""
        values = found.group(*VALUES, LOCATION_TEXT)
        if values not in self._arguments_of:
            self._arguments_of[values] = self._arguments(*values)
        given, make, opcodes = self._arguments_of[values]
        return TensorTemplate(head, tail, given, make=make, opcodes=opcodes)

    def _arguments(
        self, storage: bytes, kind: bytes, location: bytes, elements: bytes, offset: bytes, size_of: bytes, stride_of: bytes,
        grad: bytes, hooks: bytes, own: bytes | None,
    ) -> tuple[TensorArguments, object, int]:  # fmt: skip
        """The arguments of tensors of a kind, what makes them, and how many opcodes each has."""
        size, stride = _tuple(size_of), _tuple(stride_of)
        named, place = self._got(storage), self._got(location) if own is None else own.decode()
        if (
            type(named) is not str
            or named != "storage"
            or type(place) is not str
            or size is None
            or stride is None
        ):
            return NOTHING, None, 0
        (count,), (begin,) = _ints(elements), _ints(offset)
        of = self._got(kind), place, count, begin, size, stride, grad == b"\x88", self._got(hooks)
        given = TensorArguments(*of, own_location=own is not None)
        tuples = [
            raw.startswith(b"(") + len(one) + 1 + bool(one)
            for raw, one in ((size_of, size), (stride_of, stride))
        ]
        return given, self._state.table.kind(given), FIXED_OPCODES + (own is not None) + sum(tuples)

    def _got(self, raw: bytes) -> object:
        """The value that a GET gives; a `Stub` where none was made."""
        index, memo = int.from_bytes(raw[1:], "little"), self._state.memo
        return memo[index] if index < len(memo) else NEVER


UNKNOWN = Stub(START, 0)
"""Stands for an entry that the list of the memo does not have: `State.get` looks further."""

MISSING = (None,)

GET_NBYTES = {0x68: 2, 0x6A: 5}
PUT_OPCODES = b"rq"
INT_NBYTES = {0x4B: 1, 0x4D: 2, 0x4A: 4}


def settle(state: State) -> bool:
    """Make what the memo has `Stub`s for. False where some stand for no tensor: those cannot be made out of what is known."""
    memo = state.memo
    for index, value in enumerate(memo):
        if type(value) is not Stub:
            continue
        if value.kind is START:
            return False
        if value.at == 1:
            made = _values(state, value.kind.arguments, str(memo[index - 1]))
            memo[index : index + len(made)] = made
    return True


def _values(state: State, given: TensorArguments, key: str) -> list[object]:
    """The values that the machine would have put into the memo between the key and the tensor."""
    hooks: OrderedDict[object, object] = OrderedDict()
    identity = ("storage", given.storage, key, given.location, given.elements)
    args = (
        state.table.persistent(identity),
        given.offset,
        given.size,
        given.stride,
        given.grad,
        hooks,
    )
    own = [given.location] if given.own_location else []
    return [
        *own,
        identity,
        *(lengths for lengths in (given.size, given.stride) if lengths),
        hooks,
        args,
    ]


def _tuple(raw: bytes) -> tuple[int, ...] | None:
    """The members of a tuple, if its opcode makes it of so many."""
    mark = raw.startswith(b"(")
    values = _ints(raw[mark:-1])
    return (
        values
        if mark == raw.endswith(b"t") and MEMBERS.get(raw[-1], len(values)) == len(values)
        else None
    )


MEMBERS = {0x29: 0, 0x85: 1, 0x86: 2, 0x87: 3}
"""Members of the tuple that an opcode makes."""


def _ints(raw: bytes) -> tuple[int, ...]:
    """The integers of some BININT1, BININT2 and BININT."""
    values, at = [], 0
    while at < len(raw):
        nbytes = INT_NBYTES[raw[at]]
        values.append(int.from_bytes(raw[at + 1 : at + 1 + nbytes], "little", signed=nbytes == 4))
        at += 1 + nbytes
    return tuple(values)
