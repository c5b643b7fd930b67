"""`RowPickle`: the `data.pkl` of a state with very many tensors, which are rows and not objects.

    state ── leaves ──▶ its tensors ── ask ──▶ TensorRows ── RowPickle ──▶ data.pkl
                                                          └─ Numbered ──▶ data/0, data/1 …

Tensors of a kind (`plan.rows`) have the same opcodes, but for the key of their storage and the numbers that the memo counts.

1. The first tensors of a kind are written opcode by opcode. Once the memo's numbers are four bytes wide, what was written is kept
   as the template of its kind, with a note where the numbers stand (`_Template`).
2. From then on a tensor is its key between two pieces of bytes. The numbers are filled in together: of the items of a large dict
   when they are written, of others by `finish`.

Containers and plain values are written by `PickleWriter`. So the bytes are those of `TorchPickle`, and those of CPython's pickler
with torch's persistent ids. *Common* is what both write alike, and `leaves` knows it: the exact types of containers and values,
keys that are text or numbers. For all other states there are the other writers; they say what is wrong with them, too.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
from itertools import accumulate, repeat

import numpy as np
from msgspec import Struct, field

from holdfast.core.arrays import Ints
from holdfast.core.limits import Limits
from holdfast.formats.pickle.table import ATTRIBUTES
from holdfast.formats.pickle.writer import LONG_GET, LONG_PUT, TEXT, TUPLES, get, integer
from holdfast.formats.torch.writer import STORAGE, UTILS, TorchPickle
from holdfast.plan.rows import BATCH, RowKind, TensorRows

PLAIN = frozenset({type(None), bool, int, float, str})
KEYS = frozenset({str, int})
CONTAINERS = frozenset({dict, OrderedDict, list, tuple})

SHORT = 255
"""The last number of the memo that takes one byte."""

MANY = 16
"""Items of a dict that are worth to be looked at together."""

KEY_TEXTS = [TEXT(b"X", length) for length in range(20)]
"""How a text of so many bytes begins."""

ONE_DIGIT = 10
"""CPython has a text of one character once, so the key of such a storage may be the same object as a text of the state."""


def leaves(tree: object, kinds: Collection[type], depth: int, *, beside: bool = True) -> list[object] | None:
    """The values of these types in a state, in the order in which a pickle meets them, each once; None where it is not common.

    A container that stands in two places is written once; so it is walked once. With `beside=False` it is not common to have such
    values in the attributes of a container.
    """
    walk = _Walk(kinds, depth, beside=beside)
    return list(walk.found.values()) if walk.through(tree, 1) else None


class _Walk:
    """One walk for `leaves`. An object, because a function that calls itself is a cycle, and would keep the tensors."""

    def __init__(self, kinds: Collection[type], depth: int, *, beside: bool) -> None:
        self._kinds = frozenset(kinds)
        self._beside = beside
        self._depth = depth
        self._walked: set[int] = set()
        self.found: dict[int, object] = {}

    def through(self, value: object, depth: int) -> bool:
        """Whether all is common from here on."""
        kind = type(value)
        if kind in PLAIN:
            return True
        if kind in self._kinds:
            self.found[id(value)] = value
            return True
        if kind not in CONTAINERS or depth > self._depth:
            return False
        if id(value) in self._walked:
            return True
        self._walked.add(id(value))
        inside: Iterable[object]
        if isinstance(value, dict):
            if not KEYS.issuperset(map(type, value)):
                return False
            inside = value.values()
        else:
            inside = value  # type: ignore[assignment]  # a list or a tuple
        types = set(map(type, inside))
        if types.issubset(self._kinds):
            self.found.update(zip(map(id, inside), inside, strict=True))
        elif not types.issubset(PLAIN):
            for item in inside:
                if not self.through(item, depth + 1):
                    return False
        if kind is OrderedDict and (state := vars(value)):
            # What a module says of its versions.
            inner = self if self._beside else _Walk((), self._depth, beside=False)
            return ATTRIBUTES not in state and inner.through(state, depth + 1)
        return True


class _Template(Struct, eq=False):
    """The opcodes of tensors of a kind, and those that were written by them."""

    before: bytes
    """Up to the key of the storage."""
    behind: bytes
    """From there on."""
    holes: Ints
    """Where in `behind` the numbers of the memo stand; they follow each other."""
    count: int
    """How many."""
    pieces: list[int] = field(default_factory=list)
    """Of each tensor, which of the writer's pieces is the one with the numbers."""
    numbers: list[int] = field(default_factory=list)
    """Of each tensor, the first of them."""


def _fill_in(content: bytearray, made: Sequence[_Template], at: Ints, numbers: Ints) -> None:
    """Fill in the memo's numbers of tensors whose `behind` begins there, from the first number of each on."""
    counts = np.array([template.count for template in made], np.int64)
    holes = np.repeat(at, counts) + np.concatenate([template.holes for template in made])
    within = np.arange(len(holes)) - np.repeat(np.cumsum(counts) - counts, counts)
    filled = (np.repeat(numbers, counts) + within).astype("<u4").view(np.uint8).reshape(-1, 4)
    np.frombuffer(content, np.uint8)[holes[:, None] + np.arange(4)] = filled


class RowPickle(TorchPickle):
    """The pickle of a state whose tensors are rows. `types` are those of the tensors.

    torch makes the location of a storage on a device anew at each use, and `anew` writes it so.
    """

    def __init__(self, tensors: TensorRows, types: Iterable[type], limits: Limits | None = None, *, anew: bool = False) -> None:
        super().__init__(limits)
        self._anew = anew
        self._tensors = tensors
        self._keys = array("q")
        self._types = frozenset(types)
        self.rows |= dict.fromkeys(self._types, RowPickle._row)
        self._new: list[_Template | None] = [None] * len(tensors.table)
        """By kind, for tensors whose storage is new."""
        self._known: list[_Template | None] = [None] * len(tensors.table)
        """The same where it is not."""
        self._puts: list[int] | None = None
        """Which pieces remember something, while a template is made."""
        self._come = 0
        """Tensors so far: they come in the order of the rows."""
        self._numbers = np.zeros(len(tensors), np.int64)
        """The memo's number of each; 0 for one that has not come."""
        self._places: dict[int, int] | None = None
        """The row of each, by identity; made when one comes again."""

    def finish(self) -> bytes:
        self.out.append(b".")
        made = [template for template in (*self._new, *self._known) if template is not None and template.pieces]
        if not made:
            return b"".join(self.out)
        ends = np.cumsum(np.fromiter(map(len, self.out), np.int64, len(self.out)))
        content = bytearray().join(self.out)
        self.out.clear()
        for template in made:
            for first in range(0, len(template.pieces), BATCH):
                some = slice(first, first + BATCH)
                at = ends[np.array(template.pieces[some], np.int64) - 1]
                _fill_in(content, [template] * len(at), at, np.array(template.numbers[some], np.int64))
        return bytes(content)

    def put(self) -> int:
        if self._puts is not None:
            self._puts.append(len(self.out))
        return super().put()

    def _fill(self, items: list[tuple[object, object]], opcode: bytes) -> None:
        """As for all values; texts before tensors are written here, without a call for each."""
        if opcode != b"u" or self.count <= SHORT:
            super()._fill(items, opcode)
            return
        if len(items) >= MANY and self._fill_many(*zip(*items, strict=True)):
            return
        out, memo, types, write = self.out, self.memo, self._types, self.write
        out.append(b"(")
        path = self.path
        path.append(None)
        for key, item in items:
            if type(key) is str and (number := memo.get(id(key))) is not None:
                out.append(LONG_GET(b"j", number) if number > SHORT else get(number))
            elif type(key) is str and len(key) < SHORT:
                number = memo[id(key)] = self.count
                self.count = number + 1
                raw = key.encode("utf-8", "surrogatepass")
                out.append(TEXT(b"X", len(raw)) + raw + LONG_PUT(b"r", number))
            else:
                write(key)
            if type(item) in types:
                self._row(item)
            else:
                path[-1] = key
                write(item)
        path.pop()
        out.append(opcode)

    def _fill_many(self, keys: tuple[object, ...], values: tuple[object, ...]) -> bool:
        """Texts and tensors of which none has come before, each with a storage of its own: all at once. False for others."""
        if {*map(type, keys)} != {str} or not self._types.issuperset(map(type, values)):
            return False
        texts, memo, count, first = [*map(id, keys)], self.memo, len(keys), self._come
        stop = first + count
        asked = self._tensors
        if not memo.keys().isdisjoint(texts) or asked.identities[first:stop].tolist() != [*map(id, values)]:
            return False
        begin, end = asked.records[first], asked.records[stop - 1] + 1
        # New storages are numbered as they are met.
        if end - begin != count or not ONE_DIGIT <= begin == len(self._keys) or self._numbers[first:stop].any():
            return False
        templates = [self._new[kind] for kind in asked.kinds[first:stop]]
        made = [template for template in templates if template is not None]
        if len(made) < count:
            return False
        numbers = [*accumulate([template.count + 1 for template in made], initial=self.count)]
        raws = [str(key).encode("utf-8", "surrogatepass") for key in keys]
        record_keys = [b"%d" % record for record in range(begin, end)]
        pieces: list[bytes] = [b""] * (7 * count)
        pieces[0::7] = map(TEXT, repeat(b"X"), map(len, raws))
        pieces[1::7] = raws
        pieces[2::7] = map(LONG_PUT, repeat(b"r"), numbers[:-1])
        pieces[3::7] = [template.before for template in made]
        pieces[4::7] = [KEY_TEXTS[len(key)] for key in record_keys]
        pieces[5::7] = record_keys
        pieces[6::7] = [template.behind for template in made]
        content = bytearray().join(pieces)
        puts = np.array(numbers, np.int64)
        ends = np.cumsum(np.fromiter(map(len, pieces), np.int64, len(pieces)))[5::7]
        _fill_in(content, made, ends, puts[:-1] + 1)
        self.out += (b"(", bytes(content), b"u")
        memo.update(zip(texts, numbers, strict=False))
        self._numbers[first:stop] = puts[1:] - 1
        self._keys.extend([number + 1 for number in numbers[:-1]])
        self.count, self._come = numbers[-1], stop
        return True

    def _row(self, value: object) -> None:
        """A tensor."""
        identity, row = id(value), self._come
        if row < len(self._tensors) and self._tensors.identities.item(row) == identity:
            self._come = row + 1
        else:
            if self._places is None:
                self._places = {one: row for row, one in enumerate(self._tensors.identities.tolist())}
            row = self._places[identity]
        if known := self._numbers.item(row):
            self.out.append(get(known))
            return
        number = self.count
        kind, record = self._tensors.kinds[row], self._tensors.records[row]
        new = record == len(self._keys)
        made = (self._new if new else self._known)[kind]
        if made is None or record < ONE_DIGIT:
            self._write_row(self._tensors.table[kind], record)
            if number > SHORT and made is None:
                (self._new if new else self._known)[kind] = self._template(self._tensors.table[kind], new=new)
        else:
            if new:
                self._keys.append(number)
                key = b"%d" % record
                self.out += (made.before, KEY_TEXTS[len(key)], key)
            else:
                self.out += (made.before, get(self._keys[record]))
            made.pieces.append(len(self.out))
            made.numbers.append(number)
            self.out.append(made.behind)
            self.count = number + made.count
        self._numbers[row] = self.count - 1

    def _template(self, kind: RowKind, *, new: bool) -> _Template:
        """What was just written, once more and without the key: all that it refers to is known now."""
        out, count = self.out, self.count
        self.out, self._puts = [], []
        try:
            self._begin(kind)
            cut = len(self.out)
            if new:
                self.put()
            self._end(kind)
            before, behind = b"".join(self.out[:cut]), b"".join(self.out[cut:])
            lengths = np.cumsum([0, *map(len, self.out[cut:])])
            # Behind the opcode.
            holes = lengths[np.array(self._puts, np.int64) - cut] + 1
            return _Template(before, behind, holes, len(holes))
        finally:
            self.out, self.count, self._puts = out, count, None

    def _write_row(self, kind: RowKind, record: int) -> None:
        self._begin(kind)
        if record == len(self._keys):
            key = str(record)
            self.keep(key)
            self._str(key)
            self._keys.append(self.memo[id(key)])
        else:
            self.out.append(get(self._keys[record]))
        self._end(kind)

    def _begin(self, kind: RowKind) -> None:
        """Up to the key of the storage."""
        untyped = kind.dtype.storage is None
        if kind.parameter:
            self.name(UTILS, "_rebuild_parameter")
        self.name(UTILS, "_rebuild_tensor_v3" if untyped else "_rebuild_tensor_v2")
        self.out.append(b"((")
        self._shared(STORAGE)
        if kind.dtype.storage is None:
            self.name("torch.storage", "UntypedStorage")
        else:
            self.name("torch", kind.dtype.storage)

    def _end(self, kind: RowKind) -> None:
        """From the location of the storage on."""
        if self._anew and kind.location != "cpu":
            raw = kind.location.encode("utf-8")
            self.out.append(TEXT(b"X", len(raw)) + raw)
            self.put()
        else:
            self._shared(kind.location)
        self.out += (integer(kind.count), b"t")
        self.put()
        self.out += (b"Q", integer(kind.offset))
        self._ints(kind.shape)
        self._ints(kind.strides)
        self._bool(kind.requires_grad and not kind.parameter)
        self.hooks()
        if kind.dtype.storage is None:
            self._torch_dtype(kind.dtype)
        self.end_call(b"t")
        if kind.parameter:
            self._bool(kind.requires_grad)
            self.hooks()
            self.end_call(TUPLES[3])
