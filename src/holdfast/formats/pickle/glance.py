"""Ordinary tensors at a glance: the thirty opcodes of a tensor as `torch.save` writes them, compared at once.

    h 2      ( ( h 3 h 4    X "17"    r 140 h 6 K 16 t r 141 Q K 0 K 4 K 4 \\x86 r 142 K 4 K 1 \\x86 r 143 …  t r 145 R r 146
    opener   head           key       tail

Of a hundred thousand tensors most are of a dozen kinds. In all of one kind the head is the same, and so is the tail but for the
memo numbers, which count on. So a tail is a number itself, and has to be `base + entries · step`: one comparison of long integers.

1. A kind is learned from the first of its tensors, by a regular expression (`_PATTERN`) that knows what torch writes and nothing
   else, and by the table, which is asked whether such a claim may be (`Table.kind`). Which kind follows which is remembered.
2. Nothing is decided here. The opcodes that are taken are those that the machine would have taken, counted as it counts them, and
   paid for as it pays (`Spending`). Whatever is not as expected is left to it, at the byte where it stands: so are all errors.
3. The memo gets the key, the tensor, and between them `Stub`s for what nobody ever asks for again: the persistent id, size, stride,
   hooks, arguments. If someone does, or an entry is written a second time, all of them are made, and the machine goes on alone.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from holdfast.formats.pickle.state import State

NEVER = object()
"""What no memo holds."""

MOST_KINDS = 1024
"""Kinds that are remembered. A model has some dozens; a file with more of them is left to the machine."""

REDUCES = 2
"""Containers that a tensor is paid for: its hooks, and itself."""

MARKS = 2
"""Open MARKs at one moment inside of it."""

INT = rb"(?:K.|M..|J....)"


def _put(name: str) -> bytes:
    """LONG_BINPUT, which writers take from the 256th entry on."""
    return b"r(?P<%b_put>....)" % name.encode()


def _get(name: str) -> bytes:
    return b"(?:h(?P<%b>.)|j(?P<%b_far>....))" % (name.encode(), name.encode())


def _members(name: str) -> bytes:
    named = name.encode()
    return rb"(?P<%b_mark>\(?)(?P<%b>%b{0,64})(?P<%b_end>[\x85\x86\x87t)])(?:%b)?" % (named, named, INT, named, _put(name))


@cache
def _pattern() -> re.Pattern[bytes]:
    """What stands behind the opener. Compiled when a file has the first: that takes as long as to open ten small ones."""
    return re.compile(_PATTERN, re.DOTALL)


_PATTERN = b"".join(
    [
        rb"\(\(", _get("storage"), _get("kind"), rb"X(?P<key_nbytes>.)\0\0\0(?P<key>[0-9]{1,19})", _put("key"),
        rb"(?:", _get("location"), rb"|X(?P<text_nbytes>.)\0\0\0(?P<text>[a-z0-9:]{1,32})", _put("text"), rb")",
        rb"(?P<count>", INT, rb")t", _put("id"), rb"Q(?P<offset>", INT, rb")", _members("size"), _members("stride"),
        rb"(?P<grad>[\x88\x89])", _get("hooks"), rb"\)R", _put("hooks"), rb"t", _put("args"), rb"R", _put("tensor"),
    ]
)  # fmt: skip

PUTS = [f"{name}_put" for name in ("key", "text", "id", "size", "stride", "hooks", "args", "tensor")]
"""In the order of the memo."""

LENGTHS = {0x29: 0, 0x85: 1, 0x86: 2, 0x87: 3}
"""Members of the tuple that an opcode makes."""


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

    __slots__ = ("base", "claim", "following", "head_nbytes", "heads", "make", "opcodes", "step", "stubs", "tail_nbytes")

    def __init__(self, head: bytes, tail: tuple[int, int, int], claim: TensorArguments, *, make: Make | None, opcodes: int) -> None:
        self.heads = {head + bytes((n, 0, 0, 0)): n for n in range(1, 20)}
        """What stands before the key, with the length of the key."""
        self.head_nbytes = len(head) + 4
        self.base, self.step, self.tail_nbytes = tail
        self.claim, self.make, self.opcodes = claim, make, opcodes
        self.following = self
        """The kind that came behind this one last."""
        self.stubs: tuple[Stub, ...] = ()


NOTHING = TensorArguments(None, "", 0, 0, (), (), False, None)
START = TensorTemplate(b"", (0, 0, 0), NOTHING, make=None, opcodes=0)
"""Before any kind is known. No stream begins with its head."""


class Templates(Protocol):
    """What takes many opcodes at once, where their bytes are known."""

    @property
    def made(self) -> tuple[object, ...]:
        """What was taken last, as it goes to the stack."""

    @property
    def opcodes(self) -> int:
        """How many opcodes that took."""

    def take(self, pos: int, limit: int) -> int:
        """Where that ends which begins behind the opener at `pos`; 0, and nothing done, where the machine shall read it."""

    def end(self) -> None:
        """Let go of what was learned."""


class Glance:
    """Looks at what follows the opener, and takes it where it is an ordinary tensor."""

    __slots__ = ("_expected", "_kinds", "_state", "made", "opcodes")

    def __init__(self, state: State) -> None:
        self._state = state
        self._expected = START
        self._kinds: dict[tuple[bytes, int, int], TensorTemplate] = {}
        self.made: tuple[object, ...] = ()
        """The tensor that was taken last."""
        self.opcodes = 0
        """How many it had."""

    def take(self, pos: int, limit: int) -> int:
        """Where the ordinary tensor ends that begins behind the opener at `pos`; 0, and nothing done, where there is none."""
        state, kind = self._state, self._expected
        data, memo, spending = state.data, state.memo, state.table.spending
        start = pos + kind.head_nbytes
        stop = start + kind.heads.get(data[pos:start], 0)
        end = stop + kind.tail_nbytes
        if stop == start or end > limit or int.from_bytes(data[stop:end], "little") != kind.base + len(memo) * kind.step:
            found = self._learned(pos, limit)
            if found is None:
                return 0
            if self._expected is not START:
                self._expected.following = found[0]
            kind, start, stop, end = found
        # Also where it is left to the machine: what is behind it is looked for in the same way.
        self._expected = kind.following
        key = data[start:stop]
        if (
            kind.make is None
            or not key.isdigit()
            or spending.containers < REDUCES
            or len(state.marked) + MARKS > state.limits.marks
        ):
            return 0
        text = key.decode()
        made = kind.make(text)
        if made is None:
            return 0
        spending.containers -= REDUCES
        memo.append(text)
        memo += kind.stubs
        memo.append(made)
        self.made, self.opcodes = (made,), kind.opcodes
        return end

    def end(self) -> None:
        """Let the kinds go. They know each other, and what makes their tensors knows all of those."""
        for kind in self._kinds.values():
            kind.following, kind.stubs, kind.make = START, (), None
        self._kinds.clear()

    def _learned(self, pos: int, limit: int) -> tuple[TensorTemplate, int, int, int] | None:
        """The kind of a tensor by what it looks like, where its key begins and ends, and where itself ends; None for another."""
        state, first = self._state, len(self._state.memo)
        found = _pattern().match(state.data, pos, limit)
        if found is None or found["key_nbytes"][0] != len(found["key"]):
            return None
        start, stop, end = found.start("key"), found.end("key"), found.end()
        puts = [group for group in PUTS if found[group] is not None]
        numbers = [int.from_bytes(found[group], "little") for group in puts]
        if numbers[0] != first or any(b != a + 1 for a, b in pairwise(numbers)):
            return None
        step = sum(1 << 8 * (found.start(group) - stop) for group in puts)
        base = int.from_bytes(state.data[stop:end], "little") - first * step
        head = state.data[pos : start - 4]
        known = self._kinds.get((head, base, end - stop))
        if known is None:
            if len(self._kinds) >= MOST_KINDS:
                return None
            claim = self._claim(found)
            make = None if claim is None else state.table.kind(claim)
            known = self._kinds[head, base, end - stop] = TensorTemplate(
                head, (base, step, end - stop), claim or NOTHING, make=make, opcodes=_opcodes(found, len(puts))
            )
            known.stubs = tuple(Stub(known, at) for at in range(1, len(puts) - 1))
        return known, start, stop, end

    def _claim(self, found: re.Match[bytes]) -> TensorArguments | None:
        """What a tensor says; None where that is not of the form that it should have."""
        storage, kind, hooks = (self._got(found, group) for group in ("storage", "kind", "hooks"))
        text = found["text"]
        location = self._got(found, "location") if text is None else text.decode()
        size, stride = _tuple(found, "size"), _tuple(found, "stride")
        if storage != "storage" or type(storage) is not str or type(location) is not str or size is None or stride is None:
            return None
        if text is not None and found["text_nbytes"][0] != len(text):
            return None
        (count,), (offset,) = _ints(found["count"]), _ints(found["offset"])
        return TensorArguments(kind, location, count, offset, size, stride, found["grad"] == b"\x88", hooks)

    def _got(self, found: re.Match[bytes], group: str) -> object:
        """What a GET gives; a `Stub` where nothing was made for it."""
        raw = found[group] if found[group] is not None else found[f"{group}_far"]
        index, memo = int.from_bytes(raw, "little"), self._state.memo
        return memo[index] if index < len(memo) else NEVER


def settle(state: State) -> bool:
    """Make what the memo has `Stub`s for. False where some stand for no tensor: those cannot be made out of what is known."""
    memo = state.memo
    for index, value in enumerate(memo):
        if type(value) is not Stub:
            continue
        if value.kind is START:
            return False
        if value.at == 1:
            made = _values(state, value.kind.claim, str(memo[index - 1]), located=len(value.kind.stubs))
            memo[index : index + len(made)] = made
    return True


def _values(state: State, claim: TensorArguments, key: str, *, located: int) -> list[object]:
    """What the machine would have put into the memo between the key and the tensor."""
    hooks: OrderedDict[object, object] = OrderedDict()
    identity = ("storage", claim.storage, key, claim.location, claim.elements)
    args = (state.table.persistent(identity), claim.offset, claim.size, claim.stride, claim.grad, hooks)
    made: list[object] = [identity, *(lengths for lengths in (claim.size, claim.stride) if lengths), hooks, args]
    return made if len(made) == located else [claim.location, *made]


def _opcodes(found: re.Match[bytes], puts: int) -> int:
    """How many there are behind the opener: the fixed ones, a PUT each, and those of the two tuples."""
    tuples = sum(len(found[f"{group}_mark"]) + len(_ints(found[group])) + 1 for group in ("size", "stride"))
    return 16 + puts + tuples


def _tuple(found: re.Match[bytes], group: str) -> tuple[int, ...] | None:
    """The members of a tuple, if its opcode makes it of so many; the empty one is in no memo."""
    members, mark, opcode, put = found.group(group, f"{group}_mark", f"{group}_end", f"{group}_put")
    values = _ints(members)
    empty = opcode == b")"
    if bool(mark) != (opcode == b"t") or LENGTHS.get(opcode[0], len(values)) != len(values) or empty != (put is None):
        return None
    return values


def _ints(raw: bytes) -> tuple[int, ...]:
    """The integers of some BININT1, BININT2 and BININT."""
    values, at = [], 0
    while at < len(raw):
        nbytes = {0x4B: 1, 0x4D: 2, 0x4A: 4}[raw[at]]
        values.append(int.from_bytes(raw[at + 1 : at + 1 + nbytes], "little", signed=nbytes == 4))
        at += 1 + nbytes
    return tuple(values)
