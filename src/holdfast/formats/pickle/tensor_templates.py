"""Ordinary tensors by their bytes: the thirty opcodes of each as `torch.save` writes them, many tensors at once.

    h 2      ( ( h 3 h 4 X "17"  r 140 h 6 K 16 t r 141 Q K 0 K 4 K 4 \\x86 r 142 K 4 K 1 \\x86 r 143 …  t r 145 R r 146
    opener   head        key     tail
    X "layers.0.weight" r 147    h 2      ( ( …
    the key of the next tensor   opener

Of a hundred thousand tensors most are of a dozen kinds. In all of one kind the head is the same, and so is the tail but for the
memo numbers, which count on. So a tail is a number itself, and has to be `base + entries · step`: one comparison of long integers.

1. A kind is learned from a tensor behind the first few, by an expression (`_pattern`) that knows what torch writes and nothing
   else, and by the table, which is asked whether such arguments may be (`ReducerTable.kind`). Which kind follows which is noted.
2. Tensors that follow each other, with a key between them, are one run. The table makes all of them together, and they are taken up
   to the first that is not as expected. That one is left to the machine, at the byte where it stands: so are all errors.
3. The opcodes that are taken are those that the machine would have taken, counted as it counts them, and paid for as it pays.
4. The memo gets the key, the tensor, and between them `Stub`s for what nobody ever asks for again: the persistent id, size, stride,
   hooks, arguments. If someone does, or an entry is written a second time, all of them are made, and the machine goes on alone.
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
"""What no memo holds."""

MOST_KINDS = 1024
"""Kinds that are remembered. A model has some dozens; a file with more of them is left to the machine."""

MOST_TENSORS = 1024
"""In one run."""

MACHINE_TENSORS = 2
"""Those that the machine reads, behind the first, before a kind is learned. To learn a kind takes as long as to read some tensors,
and an object of a kilobyte has few."""

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


@cache
def _pattern() -> re.Pattern[bytes]:
    """A tensor behind its opener. Compiled when a file has the first: that takes as long as to open ten small ones."""
    parts = [
        rb"\(\((%b)(%b)X(.)\0\0\0([0-9]{1,19})" % (GET, GET), PUT, rb"(%b)(%b)t" % (GET, INT), PUT, rb"Q(%b)" % INT,
        LENGTHS, LENGTHS, rb"([\x88\x89])(%b)\)R" % GET, PUT, rb"t", PUT, rb"R", PUT,
    ]  # fmt: skip
    return re.compile(b"".join(parts), re.DOTALL)


VALUES = (1, 2, 7, 8, 11, 12, 15, 18, 19)
"""Groups of `_pattern` that say something: class and kind of the storage, location, elements, offset, size, stride, grad, hooks."""

KEY_NBYTES, KEY = 3, 4

PUTS = (5, 6, 9, 10, 13, 14, 16, 17, 20, 21, 22, 23, 24, 25)
"""Groups that are memo numbers, in their order: of four bytes or of one."""


class TensorArguments(NamedTuple):
    """What a tensor says of itself, apart from its key. Only its form is checked."""

    storage: object
    """The class of its storage: whatever the table gave for that global."""
    location: str
    elements: int
    """Of the storage."""
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    grad: bool
    hooks: object
    """What is called for its hooks."""


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
        "arguments",
        "base",
        "entries",
        "following",
        "head_nbytes",
        "heads",
        "make",
        "opcodes",
        "step",
        "stubs",
        "tail_nbytes",
    )

    def __init__(self, head: bytes, tail: tuple[int, int, int], arguments: TensorArguments, *, make: object, opcodes: int) -> None:
        self.heads = {head + bytes((n, 0, 0, 0)): n for n in range(1, 20)}
        """What stands before the key, with the length of the key."""
        self.head_nbytes = len(head) + 4
        self.base, self.step, self.tail_nbytes = tail
        """What stands behind the key, as a number, is `base` and the entries of the memo so far times `step`."""
        self.arguments, self.make, self.opcodes = arguments, make, opcodes
        """`make` is the table's: what makes them; None where they are left to the machine."""
        # The persistent id, hooks and arguments; a tuple without members has no entry.
        self.stubs = tuple([Stub(self, at) for at in range(1, 4 + bool(arguments.size) + bool(arguments.stride))])
        self.entries = 2 + len(self.stubs)
        """In the memo."""
        self.following = self
        """The kind that came behind this one last."""


NOTHING = TensorArguments(None, "", 0, 0, (), (), False, None)
START = TensorTemplate(b"", (0, 0, 0), NOTHING, make=None, opcodes=0)
"""Before any kind is known, and for stubs that stand for no tensor. No stream begins with its head."""


class Templates(Protocol):
    """What takes many opcodes at once, where their bytes are known."""

    @property
    def made(self) -> Sequence[object]:
        """What was taken last, as it goes to the stack."""

    @property
    def opcodes(self) -> int:
        """How many opcodes that took."""

    def take(self, pos: int, limit: int) -> int:
        """Where that ends which begins behind the opener at `pos`; 0, and nothing done, where the machine shall read it."""

    def end(self) -> None:
        """Let go of what was learned."""


class TensorTemplates:
    """Looks at what follows the opener, and takes as many ordinary tensors as there are."""

    __slots__ = ("_expected", "_kinds", "_left", "_most", "_state", "_texts", "made", "opcodes")

    def __init__(self, state: State) -> None:
        self._state = state
        self._left = MACHINE_TENSORS
        """Tensors that are yet left to the machine."""
        self._most = MOST_TENSORS
        """Tensors that are looked for next."""
        self._expected = START
        self._kinds: dict[tuple[bytes, int, int], TensorTemplate] = {}
        self._texts: dict[bytes, tuple[str]] = {}
        """Texts of the memo, by the GET that gives them."""
        self.made: Sequence[object] = ()
        """The tensors that were taken last, with the keys between them."""
        self.opcodes = 0
        """How many they had."""

    def take(self, pos: int, limit: int) -> int:
        """Where the ordinary tensors end that begin behind the opener at `pos`; 0, and nothing done, where there is none."""
        if self._left:
            self._left -= 1
            return 0
        state, kind = self._state, self._expected
        if len(state.marked) + MARKS > state.limits.marks:
            return 0
        data, entries, number = state.data, len(state.memo), int.from_bytes
        most = min(self._most, state.table.spending.containers // REDUCES)
        index = data[pos - 1]
        opener_nbytes = 2 if data[pos - 2] == 0x68 and index < entries and state.memo[index] is state.opener else 5
        opener = data[pos - opener_nbytes : pos]
        kinds: list[TensorTemplate] = []
        keys: list[bytes] = []
        ends: list[int] = []
        between: list[tuple[str, ...]] = []
        """The key behind each tensor."""
        written: list[tuple[str, ...]] = []
        """The same where it is written there: others are the memo's."""
        # Few functions are called for a tensor: this is done for each of a million.
        while most:
            most -= 1
            start = pos + kind.head_nbytes
            head = data[pos:start]
            stop = start + (kind.heads[head] if head in kind.heads else 0)  # noqa: SIM401  # no call
            end = stop + kind.tail_nbytes
            if stop == start or end > limit or number(data[stop:end], "little") != kind.base + entries * kind.step:
                found = self._learned(pos, limit, entries)
                if found is None:
                    break
                if kind is not START:
                    kind.following = found[0]
                kind, start, stop, end = found
            # Also where it is left to the machine: what is behind it is looked for in the same way.
            self._expected = kind.following
            if kind.make is None:
                break
            kinds += (kind,)
            keys += (data[start:stop],)
            ends += (end,)
            entries += kind.entries
            kind = kind.following
            # The key of the next tensor, and its opener.
            op = data[end] if end < limit else 0
            pos, name = end, NO_KEY
            if op == 0x58 and data[end + 2 : end + 5] == b"\0\0\0":
                pos = end + 5 + data[end + 1]
                raw, put = data[end + 5 : pos], pos
                pos += 5 if pos < limit and data[pos] == 0x72 else 2
                if pos > limit or number(data[put + 1 : pos], "little") != entries or data[put] not in PUT_OPCODES:
                    break
                try:
                    name = (raw.decode(),)
                except UnicodeDecodeError:
                    break
                entries += 1
            elif op in GET_NBYTES:
                raw = data[end : end + GET_NBYTES[op]]
                if raw != opener:
                    if raw not in self._texts and not self._is_text(raw):
                        break
                    pos, name = end + GET_NBYTES[op], self._texts[raw]
            stop = pos + opener_nbytes
            if stop > limit or data[pos:stop] != opener:
                break
            between += (name,)
            written += (name if op == 0x58 else NO_KEY,)
            pos = stop
        taken = self._take(kinds, keys, between, written=written) if kinds else 0
        if taken < len(ends):
            # What is behind it is looked at again: all together no more than a few times.
            self._most = 2 * max(taken, 1)
        elif taken == self._most:
            self._most = min(2 * taken, MOST_TENSORS)
        return ends[taken - 1] if taken else 0

    def end(self) -> None:
        """Let the kinds go. They know each other, and what makes their tensors knows all of those."""
        for kind in self._kinds.values():
            kind.following, kind.stubs, kind.make = START, (), None
        self._kinds.clear()

    def _take(
        self,
        kinds: list[TensorTemplate],
        raw_keys: list[bytes],
        between: list[tuple[str, ...]],
        *,
        written: list[tuple[str, ...]],
    ) -> int:
        """Take the tensors of a run, up to the first that is left to the machine; how many they are."""
        state = self._state
        if not b"".join(raw_keys).isdigit():
            del raw_keys[[key.isdigit() for key in raw_keys].index(False) :]
        keys = [*map(bytes.decode, raw_keys)]
        made = state.table.tensors([kind.make for kind in kinds[: len(keys)]], keys) if keys else ()
        taken = len(made)
        if not taken:
            return 0
        between[taken - 1 :] = written[taken - 1 :] = [NO_KEY]
        state.table.spending.containers -= REDUCES * taken
        memo: list[object] = []
        out: list[object] = []
        opcodes = -1
        for kind, key, tensor, name, text in zip(kinds, keys, made, between, written, strict=False):
            memo += (key, *kind.stubs, tensor, *text)
            out += (tensor, *name)
            opcodes += kind.opcodes
        state.memo += memo
        self.made, self.opcodes = out, opcodes + len(out) + sum(map(len, written))
        return taken

    def _learned(self, pos: int, limit: int, first: int) -> tuple[TensorTemplate, int, int, int] | None:
        """The kind of a tensor by what it looks like, where its key begins and ends, and where itself ends; None for another."""
        data = self._state.data
        found = _pattern().match(data, pos, limit)
        if found is None or found[KEY_NBYTES][0] != len(found[KEY]):
            return None
        start, stop, end = found.start(KEY), found.end(KEY), found.end()
        puts = [group for group in PUTS if found[group] is not None]
        if [int.from_bytes(found[group], "little") for group in puts] != [*range(first, first + len(puts))]:
            return None
        step = sum(1 << 8 * (found.start(group) - stop) for group in puts)
        base = int.from_bytes(data[stop:end], "little") - first * step
        like = data[pos : start - 4], base, end - stop
        if like not in self._kinds:
            if len(self._kinds) >= MOST_KINDS:
                return None
            self._kinds[like] = self._kind(found, like[0], (base, step, end - stop))
        return self._kinds[like], start, stop, end

    def _kind(self, found: re.Match[bytes], head: bytes, tail: tuple[int, int, int]) -> TensorTemplate:
        """The kind of tensors like this one."""
        storage, kind, location, elements, offset, size_of, stride_of, grad, hooks = found.group(*VALUES)
        size, stride = _tuple(size_of), _tuple(stride_of)
        named, place = self._got(storage), self._got(location)
        if type(named) is not str or named != "storage" or type(place) is not str or size is None or stride is None:
            return TensorTemplate(head, tail, NOTHING, make=None, opcodes=0)
        (count,), (begin,) = _ints(elements), _ints(offset)
        given = TensorArguments(self._got(kind), place, count, begin, size, stride, grad == b"\x88", self._got(hooks))
        tuples = [raw.startswith(b"(") + len(one) + 1 + bool(one) for raw, one in ((size_of, size), (stride_of, stride))]
        return TensorTemplate(head, tail, given, make=self._state.table.kind(given), opcodes=FIXED_OPCODES + sum(tuples))

    def _got(self, raw: bytes) -> object:
        """What a GET gives; a `Stub` where nothing was made for it."""
        index, memo = int.from_bytes(raw[1:], "little"), self._state.memo
        return memo[index] if index < len(memo) else NEVER

    def _is_text(self, raw: bytes) -> bool:
        """Whether a GET gives a text, which is then known."""
        value = self._got(raw)
        if len(raw) != GET_NBYTES[raw[0]] or type(value) is not str:
            return False
        self._texts[raw] = (value,)
        return True


NO_KEY: tuple[str, ...] = ()
"""Behind the last tensor of a run, and between the members of a list."""

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
    """What the machine would have put into the memo between the key and the tensor."""
    hooks: OrderedDict[object, object] = OrderedDict()
    identity = ("storage", given.storage, key, given.location, given.elements)
    args = (state.table.persistent(identity), given.offset, given.size, given.stride, given.grad, hooks)
    return [identity, *(lengths for lengths in (given.size, given.stride) if lengths), hooks, args]


def _tuple(raw: bytes) -> tuple[int, ...] | None:
    """The members of a tuple, if its opcode makes it of so many."""
    mark = raw.startswith(b"(")
    values = _ints(raw[mark:-1])
    return values if mark == raw.endswith(b"t") and MEMBERS.get(raw[-1], len(values)) == len(values) else None


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
