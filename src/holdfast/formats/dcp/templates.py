"""Records of a `.metadata` pickle by their bytes: the hundred opcodes of a tensor and of its item, compared at once.

    h 9    ) \\x81 \\x94 } \\x94 ( … u b                        a tensor
    j …    ) \\x81 \\x94 } \\x94 ( h 7 name h 8 K 0 … u b       an item: which box of which tensor
    j …    ) \\x81 \\x94 } \\x94 ( … offset … length u b        and where it lies

torch pickles with protocol 4, which writes no memo numbers where an entry is made. So all tensors of one dtype, shape and cut have
the same bytes, and all items of one file and box but for name, offset and length. A checkpoint has a few dozen kinds of both.

1. The first tensor of a kind is made by the machine, and remembered with its bytes, if these are opcodes that torch writes there,
   in torch's order: then they touch nothing that was on the stack before, and name nothing but entries of the memo, which stay.
2. A tensor of the same bytes is the same to whoever reads the index: one `StoredTensor` stands for all of a kind.
3. Of an item the keys are compared with the memo once for each kind. It gets an `ItemIndex` and an `Item` of its own.
4. The memo gets `Stub`s for what is inside of a record. Nobody asks for those. If someone does, the stream is read once more, one
   opcode after the other.

Opcodes, containers and marks are counted as the machine counts them. Whatever is of another form is left to it, and so are errors.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING
from weakref import ref

from holdfast.core.limits import Limits
from holdfast.core.opaque import Global
from holdfast.core.value import Value
from holdfast.formats.dcp.schema import NEWS, Item, ItemIndex, MetadataTable, StoredTensor, size_of
from holdfast.formats.pickle.tensor_templates import NEVER, START, Stub

if TYPE_CHECKING:
    from holdfast.formats.pickle.state import State

MOST_KINDS = 1024
"""The most kinds of tensors, and of items, that are remembered. The machine reads further kinds."""

MARKS = 5

STUB = Stub(START, 0)

NUMBER = rb"(?:K.|M..|J....)"
GET = rb"(?:h.|j....)"
LENGTHS = rb"(?:\)|(?:%b\x85|%b{2}\x86|%b{3}\x87|\(%b{4,64}t)\x94)" % (
    NUMBER,
    NUMBER,
    NUMBER,
    NUMBER,
)
SIZE = rb"%b%b\x85\x94R\x94" % (GET, LENGTHS)
MADE = rb"\)\x81\x94"
CHUNK = rb"%b%b}\x94\(%b%b%b%bub" % (GET, MADE, GET, SIZE, GET, SIZE)
PROPERTIES = rb"%b%b\(%b%b[\x88\x89]%b[\x88\x89](?:N|%b)?t\x94b" % (
    GET,
    MADE,
    GET,
    GET,
    GET,
    LENGTHS,
)
TENSOR = re.compile(
    rb"%b}\x94\(%b%b%b%b%b\]\x94(?:%ba|\((?:%b){2,4096}e)ub"
    % (MADE, GET, PROPERTIES, GET, SIZE, GET, CHUNK, CHUNK),
    re.DOTALL,
)
"""The opcodes behind the class of a tensor."""

HEAD = re.compile(rb"%b}\x94\((?P<fqn>%b)" % (MADE, GET), re.DOTALL)
"""The opcodes behind the class of an item's index, up to the name."""

MIDDLE = re.compile(
    rb"(?P<index>%b)(?P<number>N|%b)(?P<corner>%b)(?:N|(?P<size>%b)(?P<lengths>%b)\x85\x94R\x94)ub"
    % (GET, NUMBER, GET, GET, LENGTHS)
    + rb"(?P<cls>%b)%b}\x94\((?P<path>%b)(?P<file>%b)(?P<offset>%b)" % (GET, MADE, GET, GET, GET),
    re.DOTALL,
)
"""The opcodes from the name to the offset."""

LAST = re.compile(GET, re.DOTALL)

ITEM_END = b"ub"

KEYS = (
    ("fqn", "fqn"),
    ("index", "index"),
    ("corner", "offset"),
    ("path", "relative_path"),
    ("offset", "offset"),
)

WIDEST = 8
"""Bytes of the longest integer."""

OPENERS = (StoredTensor.title, ItemIndex.title)


class TensorRecord(Value, frozen=True, eq=False):
    raw: bytes
    made: tuple[StoredTensor]
    stubs: tuple[Stub, ...]
    containers: int
    opcodes: int


class ItemRecord(Value, frozen=True, eq=False):
    """Items that differ in name, offset and length only."""

    head: bytes
    middle: bytes
    last: bytes
    index: int | None
    corner: tuple[int, ...] | None
    file: str
    stubs: tuple[Stub, ...]
    """Stubs behind the name, which may have a memo entry of its own."""
    containers: int
    opcodes: int


class IndexTable(MetadataTable):
    """The table of a `.metadata` pickle, with templates for its tensors and items."""

    def begin(self, limits: Limits, nbytes: int) -> None:
        super().begin(limits, nbytes)
        self._templates: ref[RecordTemplates] | None = None
        """The templates of the current machine. They refer to its state, and that to this table."""

    def templates(self, state: State) -> RecordTemplates:
        made = RecordTemplates(state)
        self._templates = ref(made)
        return made

    def find(self, module: str, name: str) -> object:
        found = super().find(module, name)
        if (
            type(found) is Global
            and found.name in OPENERS
            and (found.module, found.name) in self.news
        ):
            self.opener = found
        return found

    def build(self, obj: object, state: object) -> object:
        made = super().build(obj, state)
        if (
            type(made) is StoredTensor
            and self._templates is not None
            and (templates := self._templates()) is not None
        ):
            templates.built(made, self.offset)
        return made


class RecordTemplates:
    """Takes known opcodes behind the class of a tensor or of an item's index."""

    repeated = NEVER
    __slots__ = (
        "__weakref__",
        "_item",
        "_items",
        "_lengths",
        "_started",
        "_state",
        "_tensor",
        "_tensors",
        "made",
        "opcodes",
    )

    def __init__(self, state: State) -> None:
        self._state = state
        self._tensors: dict[bytes, TensorRecord] = {}
        self._lengths: dict[int, None] = {}
        """Lengths of the records of tensors: as many as ranks and widths of numbers."""
        self._tensor: TensorRecord | None = None
        """The last record, which usually comes next."""
        self._items: dict[tuple[bytes, bytes], ItemRecord] = {}
        self._item: ItemRecord | None = None
        self._started: tuple[int, int, int, int] | None = None
        """For the tensor that the machine reads: its start, the end of the frame, memo entries, containers left."""
        self.made: tuple[object, ...] = ()
        self.opcodes = 0

    def take(self, pos: int, limit: int, value: object = None) -> int:
        """The end of the record behind its class at `pos`; 0, with nothing changed, if the machine must read it."""
        state = self._state
        limits = state.limits
        if (
            state.sparse
            or state.watched
            or len(state.marked) + MARKS > limits.marks
            or limits.integer_nbytes < WIDEST
        ):
            return 0
        opener = state.table.opener
        items = type(opener) is Global and opener.name == ItemIndex.title
        return self._take_item(pos, limit) if items else self._take_tensor(pos, limit)

    def end(self) -> None:
        self._tensors.clear()
        self._items.clear()
        self._tensor = self._item = None

    # Tensors.

    def _take_tensor(self, pos: int, limit: int) -> int:
        state, data = self._state, self._state.data
        record = self._tensor
        if record is None or not data.startswith(record.raw, pos):
            known = (self._tensors.get(data[pos : pos + length]) for length in self._lengths)
            record = next((one for one in known if one is not None), None)
        spending = state.table.spending
        if (
            record is None
            or pos + len(record.raw) > limit
            or spending.containers < record.containers
        ):
            self._started = (pos, limit, len(state.memo), spending.containers)
            return 0
        self._tensor, self._started = record, None
        spending.containers -= record.containers
        state.memo += record.stubs
        self.made, self.opcodes = record.made, record.opcodes
        return pos + len(record.raw)

    def built(self, made: StoredTensor, at: int) -> None:
        if self._started is None:
            return
        state = self._state
        pos, limit, entries, containers = self._started
        self._started = None
        stop = at + 1
        raw = state.data[pos:stop]
        if stop > limit or len(self._tensors) >= MOST_KINDS or TENSOR.fullmatch(raw) is None:
            return
        stubs = (STUB,) * (len(state.memo) - entries)
        record = TensorRecord(
            raw,
            (made,),
            stubs,
            containers - state.table.spending.containers,
            len(OPCODE.findall(raw)),
        )
        self._tensors[raw] = self._tensor = record
        self._lengths[len(raw)] = None

    # Items.

    def _take_item(self, pos: int, limit: int) -> int:
        state, data, memo = self._state, self._state.data, self._state.memo
        record = self._item
        if record is None or not data.startswith(record.head, pos):
            found = HEAD.match(data, pos, limit)
            if found is None:
                return 0
            record, head = None, found[0]
        else:
            head = record.head
        at = pos + len(head)
        name, stop = self._name(at, limit)
        if name is None:
            return 0
        if record is None or not data.startswith(record.middle, stop):
            record = self._learned(head, stop, limit)
            if record is None:
                return 0
        self._item = record
        offset, at = _integer(data, stop + len(record.middle), limit)
        if not data.startswith(record.last, at):
            return 0
        length, at = _integer(data, at + len(record.last), limit)
        end = at + len(ITEM_END)
        spending = state.table.spending
        if offset < 0 or length < 0 or end > limit or not data.startswith(ITEM_END, at):
            return 0
        if spending.containers < record.containers:
            return 0
        spending.containers -= record.containers
        memo += record.stubs[:2]
        written = data[pos + len(head)] == 0x8C
        if written:
            memo.append(name)
        memo += record.stubs[2:]
        self.made = (
            ItemIndex(True, name, record.index, record.corner),
            Item(True, record.file, offset, length),
        )
        self.opcodes = record.opcodes + written
        return end

    def _name(self, at: int, limit: int) -> tuple[str | None, int]:
        """A text at this byte, written or from the memo, and its end; None for anything else."""
        data, memo = self._state.data, self._state.memo
        if at + 5 > limit:
            return None, at
        op = data[at]
        if op == 0x8C:
            stop = at + 2 + data[at + 1]
            if stop >= limit or data[stop] != 0x94:
                return None, at
            try:
                return data[at + 2 : stop].decode(), stop + 1
            except UnicodeDecodeError:
                return None, at
        if op == 0x6A:
            index, stop = int.from_bytes(data[at + 1 : at + 5], "little"), at + 5
        elif op == 0x68:
            index, stop = data[at + 1], at + 2
        else:
            return None, at
        value = memo[index] if index < len(memo) else None
        return (value if type(value) is str else None), stop

    def _learned(self, head: bytes, at: int, limit: int) -> ItemRecord | None:
        """The kind of an item whose name ends at this byte; None where torch would write other opcodes."""
        state = self._state
        found = MIDDLE.match(state.data, at, limit)
        if found is None:
            return None
        known = self._items.get((head, found[0]))
        if known is not None:
            return known
        _, at = _integer(state.data, found.end(), limit)
        last = LAST.match(state.data, at, limit)
        if last is None or len(self._items) >= MOST_KINDS or self._got(last[0]) != "length":
            return None
        first = HEAD.fullmatch(head)
        groups = {"fqn": first["fqn"] if first is not None else b"", **found.groupdict()}
        if any(self._got(groups[group]) != text for group, text in KEYS):
            return None
        cls = self._got(found["cls"])
        if type(cls) is not Global or cls.name != Item.title or (cls.module, cls.name) not in NEWS:
            return None
        number, file = found["number"], self._got(found["file"])
        lengths = None if found["lengths"] is None else _integers(found["lengths"])
        if type(file) is not str or (
            lengths is not None
            and (self._got(found["size"]) != SIZES or min(lengths, default=0) < 0)
        ):
            return None
        corner = None if lengths is None else size_of((lengths,))
        index = None if number == b"N" else _integer(number, 0, len(number))[0]
        if index is not None and index < 0:
            return None
        # An object and a dict each, a tuple of a tuple of lengths, and its size. torch makes one tuple of up to three lengths
        # by one opcode, which the machine counts where there is one.
        containers = 4 + (0 if lengths is None else 2 + (len(lengths) == 1))
        entries = 4 + (0 if lengths is None else 2 + (len(lengths) > 0))
        counted = len(
            OPCODE.findall(head + b"h\0" + found[0] + b"K\0" + last[0] + b"K\0" + ITEM_END)
        )
        made = ItemRecord(
            head, found[0], last[0], index, corner, file, (STUB,) * entries, containers, counted
        )
        self._items[head, found[0]] = made
        return made

    def _got(self, raw: bytes) -> object:
        index, memo = int.from_bytes(raw[1:], "little"), self._state.memo
        return memo[index] if index < len(memo) else NEVER


SIZES = Global("torch", "Size")


OPCODE = re.compile(rb"[hK].|[jJ]....|M..|.", re.DOTALL)


def _integer(data: bytes, at: int, limit: int) -> tuple[int, int]:
    """The integer at this byte, and its end; -1 if there is none or it is negative."""
    op = data[at] if at < limit else 0
    if op == 0x4A:
        return int.from_bytes(data[at + 1 : at + 5], "little", signed=True), at + 5
    if op == 0x4D:
        return int.from_bytes(data[at + 1 : at + 3], "little"), at + 3
    if op == 0x4B:
        return int.from_bytes(data[at + 1 : at + 2], "little"), at + 2
    if op == 0x8A and at + 1 < limit and 5 <= data[at + 1] <= WIDEST:
        stop = at + 2 + data[at + 1]
        return int.from_bytes(data[at + 2 : stop], "little", signed=True), stop
    return -1, at


def _integers(raw: bytes) -> tuple[int, ...]:
    found, at = [], int(raw[:1] == b"(")
    while at < len(raw) and raw[at] in b"KMJ":
        value, at = _integer(raw, at, len(raw))
        found.append(value)
    return tuple(found)
