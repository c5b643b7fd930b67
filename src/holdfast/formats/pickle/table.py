"""`ReducerTable`: what a pickle's globals, calls and BUILDs become. The machine does the stack work, and asks for the rest.

The table decides by exact `(module, name)` pairs and never imports:

1. A global with a row in `values` is that value (`torch.float32`). Any other global is a `Global`, which is two strings.
2. Calling a `Global` with a row in `calls` runs our own function of that row, with this table and the arguments that the stream
   built. NEWOBJ, OBJ and INST look in `news`. A row may return `NotImplemented`: then the call becomes an `Opaque`.
3. Every other call becomes an `Opaque`. BUILD sets its state, APPENDS its items, SETITEMS its entries.
4. What was not built is listed by `foreign`, with how it was used and where it was first mentioned.

Subclass it to build other things out of the same streams. A table serves one stream at a time; `begin` is called before each.

**`Spending`** is the budget of one stream beyond a fixed price an opcode.

Two opcodes, five bytes, can name a value of any size that is already in the memo, so every operation whose price depends on the
size of its argument is counted here:

1. **Copies.** `set(list)`, `bytearray(bytes)`, `encode(text)`, a numpy scalar copy their argument. A writer copies each value
   once, so all copies together are at most the stream's own size; `copy` refuses what goes far beyond.
2. **Hashes.** Hashing a tuple costs its expanded size, so the values inside one key are counted before it is hashed.
3. **Collisions.** Integers, floats and tuples of them hash without a secret: a file can choose a million keys that meet in one
   slot of a dict, and filling it is then quadratic. Such keys are paid for as if each met all others in its container. Text
   and bytes hash with a secret, objects by their place in memory, and integers that count upwards spread: those are free.
4. **Comparisons.** Two equal texts of a megabyte, used as keys in turn, are compared in full each time: long ones pay their length.
5. **Containers.** One byte makes an empty set, which takes 216 bytes: containers are counted against the size of the stream.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, ClassVar, Final

import numpy as np
from msgspec import Struct

from holdfast.core.limits import DEFAULTS, Limits
from holdfast.core.opaque import Global, Opaque
from holdfast.core.protocols import Foreign
from holdfast.errors import LimitExceeded, PickleError
from holdfast.formats.pickle.text import python2_string

if TYPE_CHECKING:
    from holdfast.formats.pickle.rare import State

MODULES = {
    "__builtin__": "builtins", "exceptions": "builtins", "copy_reg": "copyreg", "Queue": "queue", "SocketServer": "socketserver",
    "ConfigParser": "configparser", "repr": "reprlib", "Tkinter": "tkinter", "cPickle": "pickle", "_pickle": "pickle",
    "commands": "subprocess", "thread": "_thread", "dummy_thread": "_dummy_thread", "UserList": "collections",
    "UserDict": "collections", "UserString": "collections", "StringIO": "io", "cStringIO": "io", "urllib2": "urllib.request",
    "httplib": "http.client", "xmlrpclib": "xmlrpc.client", "_abcoll": "collections.abc",
}  # fmt: skip

BUILTIN_NAMES = {
    "xrange": "range", "unicode": "str", "basestring": "str", "long": "int", "unichr": "chr", "raw_input": "input",
}  # fmt: skip

NAMES = {
    **{("__builtin__", old): ("builtins", new) for old, new in BUILTIN_NAMES.items()},
    ("__builtin__", "reduce"): ("functools", "reduce"),
    ("__builtin__", "intern"): ("sys", "intern"),
    ("__builtin__", "reload"): ("importlib", "reload"),
    ("exceptions", "StandardError"): ("builtins", "Exception"),
    **{("itertools", f"i{name}"): ("builtins", name) for name in ("zip", "map", "filter")},
    ("itertools", "izip_longest"): ("itertools", "zip_longest"),
    ("UserDict", "IterableUserDict"): ("collections", "UserDict"),
    ("socket", "_socketobject"): ("socket", "SocketType"),
}


def modern(module: str, name: str) -> tuple[str, str]:
    """The Python 3 name of a global, whatever the protocol.

    >>> modern("__builtin__", "xrange"), modern("copy_reg", "_reconstructor"), modern("torch", "Size")
    (('builtins', 'range'), ('copyreg', '_reconstructor'), ('torch', 'Size'))

    Protocols 0 to 2 are written with Python 2 names by every Python, so `set` comes as `__builtin__.set`. The names are text here:
    the table makes look-ups and reports agree, and imports nothing.
    """
    return NAMES.get((module, name)) or (MODULES.get(module, module), name)


Name = tuple[str, str]
Args = tuple[object, ...]
Row = Callable[[Any, Args], object]
"""What a call becomes, given the table and the arguments. The row knows the class of the table."""

COMPUTED: Final = 8
"""How often what is called may itself be the result of a call: `getattr(getattr(a, 'b'), 'c')()` is 3."""

METADATA = "_metadata"
"""The one attribute that a pickle sets on an OrderedDict: the versions in torch's `state_dict()`."""

ATTRIBUTES = "_attributes"
"""The attribute for the state of an OrderedDict that holds anything else. Names from the file never become attributes."""


class Pending(Opaque):
    """An object that its call only announces; BUILD brings what it is made of. Never built, it stays an `Opaque`."""

    __slots__ = ()

    def finish(self, state: object) -> object:
        """The finished object, or `self` where it stays as it is. Raises `PickleError` for a state that is wrong."""
        self.state = state
        return self


PROBES = 800_000_000
"""Steps in hash tables that a stream may cause: two seconds. Room for 40,000 scattered integers as keys of one dict."""

HASH_MODULUS = sys.hash_info.modulus
"""Integers below it have hashes of their own; of those above, any number can share one."""

EQUAL_HASH = 16
"""A step past a key with the same hash compares the two keys, and costs this many steps past another one."""

SPREAD = 16
"""How much less integers cost that fill a range, in any order."""

COPY_FLOOR_NBYTES = 1 << 20
"""Copies that are allowed however small the stream."""

CONTAINER_NBYTES = 8
"""Stored bytes for each container on the average: a dict with one small entry has 7. In memory a container takes 50 to 250."""

CONTAINER_FLOOR = 1_000_000
"""Containers that are allowed however small the stream."""

LONG_TEXT = 1024
"""Characters from which on a key pays its length. The name of a tensor is shorter."""

SMALL = 1024
"""Integers this near to zero, or to the range that a counter would have filled, spread over a hash table."""

SECRET = (str, bytes, bool, Global, PurePath)
"""Types that hash with a secret of this process (or have two values)."""

UNHASHABLE = (np.void, slice)
"""Types without a hash on some versions. A slice has one from Python 3.12 on, which hashes whatever is
inside of the slice, uncounted; refused everywhere, a file opens alike on every Python."""

NODE_PROBES = 256
"""Looking at one value inside a key costs about as much as this many steps in a hash table."""


class Spending:
    """The allowance of one stream; every method lowers it, and refuses when it is used up."""

    __slots__ = ("containers", "copies", "key_nodes", "probes")

    def __init__(self, limits: Limits, nbytes: int) -> None:
        self.key_nodes = limits.key_nodes
        self.copies = 2 * nbytes + COPY_FLOOR_NBYTES
        self.probes = PROBES
        self.containers = nbytes // CONTAINER_NBYTES + CONTAINER_FLOOR

    def copy(self, count: int) -> None:
        """Pay for copying `count` bytes, characters or elements."""
        self.copies -= count
        if self.copies < 0:
            raise PickleError(
                "the pickle copies the same values over and over; no writer does that"
            )

    def container(self) -> None:
        """Pay for one new container: a dict, a list, a set, an object."""
        self.containers -= 1
        if self.containers < 0:
            raise LimitExceeded("the pickle makes more containers than its size gives reason for")

    def fill(self, target: dict[object, object], flat: list[object]) -> None:
        """Set the keys and values that stand in turn in `flat`, which has an even length."""
        for key, value in zip(flat[::2], flat[1::2], strict=True):
            # Most keys are short texts, which are free.
            if type(key) is not str or len(key) > LONG_TEXT:
                self.key(key, len(target))
            target[key] = value

    def collect(self, target: set[object], values: list[object] | tuple[object, ...]) -> None:
        """Add the members of a set."""
        for value in values:
            self.key(value, len(target))
            target.add(value)

    def key(self, key: object, size: int) -> None:
        """Refuse a key or member that cannot be hashed, or costs too much; `size` is what its container holds so far."""
        kind = type(key)
        if kind is str or kind is bytes:
            if len(key) > LONG_TEXT:  # type: ignore[arg-type]  # mypy does not narrow on `type() is`
                self._probe(len(key))  # type: ignore[arg-type]  # as above
        elif kind is int:
            if key != size and key != size + 1:
                dense = -SMALL < key < 4 * size + SMALL  # type: ignore[operator]  # as above
                self._probe(size // SPREAD if dense else size * _price(key))
        elif key is not None and kind is not bool and kind is not Global:
            self._count(key, size)

    def _count(self, key: object, size: int) -> None:
        """Look at every value inside a key before it is hashed; no further than `key_nodes`."""
        found = price = 0
        waiting: list[object] = [key]
        while waiting:
            value = waiting.pop()
            found += 1
            if isinstance(value, tuple | frozenset):
                # Checked before the members are put on the list: a tuple of a million members costs nothing.
                if found + len(waiting) + len(value) > self.key_nodes:
                    message = f"a dict key or set member holds more than Limits(key_nodes={self.key_nodes}) values"
                    raise LimitExceeded(message, expected=self.key_nodes)
                waiting.extend(value)
            elif type(value).__hash__ is None or isinstance(value, UNHASHABLE):
                name = type(value).__name__
                raise PickleError(f"a {name} cannot be a dict key or a set member", found=name)
            else:
                price += _price(value)
                if isinstance(value, str | bytes) and len(value) > LONG_TEXT:
                    self._probe(len(value))
        # Several numbers in one key give a file more than one way to the same hash.
        self._probe(size * price if found == 1 else NODE_PROBES * found + size * price * price)

    def _probe(self, steps: int) -> None:
        self.probes -= steps
        if self.probes < 0:
            message = "the keys of the dicts in this pickle may all collide: too many large integers, floats or tuples as keys"
            raise LimitExceeded(message, expected=PROBES)


def _price(value: object) -> int:
    """How many steps a key may cost for each key that is in its container: none where its hash is not for a file to choose."""
    if isinstance(value, SECRET) or value is None or type(value).__hash__ is object.__hash__:
        return 0
    if isinstance(value, float) or (
        isinstance(value, int) and -HASH_MODULUS < value < HASH_MODULUS
    ):
        return 1
    return EQUAL_HASH


class Mention(Struct):
    """A global of one stream: where it came first, and what was done with it and not built."""

    what: Global
    offset: int
    uses: set[str]


class ReducerTable:
    """The table that builds inert data: what has no row becomes an `Opaque`."""

    tolerant = False
    """Whether the machine goes on where CPython does, and calls `note`, instead of refusing."""

    framed = True
    """Whether opcodes must stay inside their frames. A scan reads a stream that breaks this rule again, without it."""

    misframed = ""
    """How the stream breaks that rule, if it does."""

    values: ClassVar[Mapping[Name, object]] = {}
    calls: ClassVar[Mapping[Name, Row]] = {}
    news: ClassVar[Mapping[Name, Row]] = {}

    def __init__(self) -> None:
        self.offset = 0
        """Byte of the current opcode; the machine sets it before it calls."""
        self.reached = 0
        """Byte of the opcode that needed more bytes than there are, where one did."""
        self.begin(DEFAULTS, 0)

    def begin(self, limits: Limits, nbytes: int) -> None:
        """Get ready for a stream of at most `nbytes`."""
        self.limits = limits
        self.spending = Spending(limits, nbytes)
        self.mentions: dict[Name, Mention] = {}
        """The globals of the stream that have no value of their own."""

    def end(self) -> None:
        """Look at what the stream has left undone, when it has ended."""

    def foreign(self, stream: str) -> tuple[Foreign, ...]:
        """The globals of this stream that were not built, in the order of their first mention."""
        return tuple(
            Foreign(m.what, tuple(sorted({"mention", *m.uses})), m.offset, stream)
            for m in self.mentions.values()
            if m.uses
        )

    # Called by the machine.

    def declare(self, protocol: int) -> None:
        """PROTO: the protocol that the stream claims, before the machine has checked it."""

    def note(self, oddity: str) -> None:
        """Record something that no writer does. Only a tolerant table is called."""

    def string(self, raw: bytes) -> str | bytes:
        """The value of a Python 2 `str` (STRING, BINSTRING, SHORT_BINSTRING)."""
        return python2_string(raw)

    def byte_string(self, state: State, nbytes: int, make: Callable[[bytes], object]) -> object:
        """The next bytes of the stream as a value: bytes, a bytearray, or what `string` makes of them."""
        return make(state.take(nbytes))

    def raw(self, text: str) -> bytes:
        """The bytes of a Python 2 `str` of which `string` made text."""
        return text.encode("utf-8", "surrogatepass")

    def find(self, module: str, name: str) -> object:
        """The value of a global (GLOBAL, STACK_GLOBAL, INST)."""
        place = modern(module, name)
        if place in self.values:
            return self.values[place]
        mention = self.mentions.get(place)
        if mention is None:
            known = place in self.calls or place in self.news
            mention = self.mentions[place] = Mention(
                Global(*place), self.offset, set() if known else {"mention"}
            )
        return mention.what

    def call(self, what: object, args: tuple[object, ...]) -> object:
        """REDUCE."""
        self.spending.container()
        if type(what) is Global:
            row = self.calls.get((what.module, what.name))
            if row is not None:
                value = row(self, args)
                if value is not NotImplemented:
                    return value
        self.used(what, "call")
        return Opaque(what, args)

    def instance(self, cls: object, args: tuple[object, ...]) -> object:
        """OBJ and INST, by which protocols 0 and 1 make an object of a Python 2 class."""
        return self.new(cls, args, None)

    def new(
        self, cls: object, args: tuple[object, ...], kwargs: dict[str, object] | None
    ) -> object:
        """NEWOBJ and NEWOBJ_EX."""
        self.spending.container()
        if type(cls) is Global and not kwargs:
            row = self.news.get((cls.module, cls.name))
            if row is not None:
                value = row(self, args)
                if value is not NotImplemented:
                    return value
        self.used(cls, "new")
        return Opaque(cls, args, kwargs or None)

    def build(self, obj: object, state: object) -> object:
        """BUILD: the object with its state; another object where the state finished or replaced it."""
        if isinstance(obj, Opaque):
            if obj.state is not None:
                raise PickleError("a BUILD of an object that has its state already")
            if isinstance(obj, Pending):
                return obj.finish(state)
            self.used(obj.what, "build")
            obj.state = state
            return obj
        if isinstance(obj, Global):
            # Attributes for a class or a module itself: stored as data, beside the name.
            self.used(obj, "build")
            return Opaque(obj, state=state)
        if type(obj) is OrderedDict and isinstance(state, dict):
            keep_attributes(obj, state)
            return obj
        raise PickleError(
            f"a BUILD of a {type(obj).__name__}, which has no state", found=type(obj).__name__
        )

    def behind(self, data: bytes, start: int, stop: int) -> int:
        """How many bytes behind a BUILD are no opcodes: only joblib writes any."""
        return 0

    def append(self, obj: object, values: list[object]) -> None:
        """APPEND and APPENDS on what is no list."""
        if not isinstance(obj, Opaque):
            raise PickleError(f"an APPEND to a {type(obj).__name__}", found=type(obj).__name__)
        obj.items.extend(values)

    def set_item(self, obj: object, key: object, value: object) -> None:
        """SETITEM on what is no plain dict."""
        self.set_items(obj, [key, value])

    def set_items(self, obj: object, flat: list[object]) -> None:
        """SETITEMS on what is no plain dict; keys and values stand in turn in `flat`."""
        if isinstance(obj, Opaque):
            # Kept as pairs: the keys are not hashed.
            obj.entries.extend(zip(flat[::2], flat[1::2], strict=True))
        elif isinstance(obj, dict):
            self.spending.fill(obj, flat)
        else:
            raise PickleError(f"a SETITEM on a {type(obj).__name__}", found=type(obj).__name__)

    def add(self, obj: object, values: list[object]) -> None:
        """ADDITEMS on what is no plain set."""
        if not isinstance(obj, Opaque):
            raise PickleError(f"ADDITEMS on a {type(obj).__name__}", found=type(obj).__name__)
        obj.items.extend(values)

    def persistent(self, pid: object) -> object:
        """PERSID and BINPERSID: the object that lies outside of the stream under `pid`."""
        raise PickleError("a persistent id in a pickle that has nothing outside of itself")

    # For rows and subclasses.

    def used(self, what: object, use: str) -> None:
        """Record a use that was not built. Refuses what could not be called in any pickle."""
        if type(what) is Global:
            place = (what.module, what.name)
            self.mentions.setdefault(place, Mention(what, self.offset, set())).uses.add(use)
            return
        depth = 0
        while isinstance(what, Opaque) and depth < COMPUTED:
            what, depth = what.what, depth + 1
        if isinstance(what, Opaque):
            raise PickleError(f"what is called was computed by more than {COMPUTED} calls")
        if not isinstance(what, Global):
            raise PickleError(
                f"a {type(what).__name__} where a class or a function belongs",
                found=type(what).__name__,
            )


def keep_attributes(target: OrderedDict[object, object], state: dict[object, object]) -> None:
    """Store what BUILD gives to an OrderedDict: `_metadata` as torch reads it, and the whole state where there is more."""
    metadata = state.get(METADATA)
    inside = vars(target)
    if isinstance(metadata, dict):
        inside[METADATA] = metadata
    if len(state) > 1 or not isinstance(metadata, dict):
        inside[ATTRIBUTES] = state
