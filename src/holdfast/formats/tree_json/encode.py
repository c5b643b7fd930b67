"""From Python state to typed JSON, or to the list of what has no form there.

    None, bool, text, finite float, int up to 2^53      as they are
    list; dict whose keys are text without a leading $  as they are
    everything else                                     {"$": its kind, …}        see docs/formats/native.md

A container in two places is written twice, with a note. A container that contains itself is a problem. The walk has the order in
which `core/leaves.py` named the tensors.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from itertools import count
from pathlib import PosixPath, PurePosixPath, PureWindowsPath, WindowsPath
from typing import cast

import msgspec
import numpy as np

from holdfast.core.dtype import DType
from holdfast.core.leaves import NO_LEAVES, PLAIN_VALUE_TYPES, Leaves
from holdfast.core.limits import DEFAULTS
from holdfast.core.opaque import Device, Global, Opaque, Size
from holdfast.core.protocols import State
from holdfast.core.strict_json import INVALID_UNICODE, is_unicode
from holdfast.core.table import Table
from holdfast.core.tensor import Composite, LazyTensor, Traits
from holdfast.core.tree import Path, join_path, to_path_key
from holdfast.core.value import Value
from holdfast.engine.table import NO_TENSORS
from holdfast.errors import LimitExceeded, PickleError
from holdfast.formats.pickle.plain import PATH_CHARACTERS, PLAIN_TYPES, DefaultDict
from holdfast.formats.pickle.table import Spending
from holdfast.formats.tree_json import scalars

TAG = "$"
"""The key that makes an object more than a dict. A dict with a key that begins with it is tagged, too."""

LEAF_DEPTH = 2
"""Levels of a value below the deepest container that `Limits.depth` allows."""

FREE_STEPS = 100_000
"""Values that may be written again because their container stands in several places."""

FREE_NBYTES = 1 << 20
"""Bytes of long leaves that may be written again because they stand in several places."""

REPEATS = 8
"""How often bytes that are stored once may be written, beyond the free ones."""

LONG_LEAF = 64
"""Characters or bytes from which on a leaf is remembered. A shorter leaf takes about as much as a reference."""

PROBLEM_CHARACTERS = 4 << 20
"""Characters of problems that are listed one by one; further problems are counted."""

FILLERS = {made: name for name, made in PLAIN_TYPES.items()} | {OrderedDict: "OrderedDict"}
"""The name of each default factory of a defaultdict."""

UNNAMED = "a tensor where tensors have no name (in a key, a set, or the attributes of another)"

FLAGS = ("requires_grad", "parameter", "buffer")


def flat_tree(names: Iterable[str]) -> object:
    entries = {name: {TAG: "tensor", "name": name} for name in names}
    return (
        {TAG: "dict", "entries": entries}
        if any(name.startswith(TAG) for name in entries)
        else entries
    )


class EncodedTree(Value, frozen=True):
    value: object
    problems: tuple[str, ...] = ()
    """`path: description` for everything without a JSON form; then the value is useless."""
    notes: tuple[str, ...] = ()


def encode_state(state: State) -> EncodedTree:
    """The tree of a state as JSON values. Its tensors have the names of the rows of its table. Raises nothing for bad state."""
    return _encoded(state.tree, state.leaves, state.tensors)


def encode_value(value: object) -> EncodedTree:
    return _encoded(value, NO_LEAVES, NO_TENSORS)


def _encoded(tree: object, leaves: Leaves, table: Table) -> EncodedTree:
    encoder = Encoder(leaves, table)
    try:
        value = encoder.node(tree, ())
    except RecursionError:
        # A caller may be so deep itself that less is left than `Limits.depth`.
        value = encoder.problem((), "nested too deeply")
    notes = []
    if encoder.unlisted:
        encoder.problems.append(f"and {encoder.unlisted:,} more of the same kinds")
    if encoder.repeated:
        notes.append(
            f"{encoder.repeated:,} containers stand in several places; each place gets its own copy"
        )
    return EncodedTree(value, tuple(encoder.problems), tuple(notes))


def is_marked(traits: Traits) -> bool:
    """Whether a tensor has traits that are recorded."""
    marks = traits.requires_grad or traits.parameter or traits.buffer or traits.meta
    return (
        marks
        or traits.subclass is not None
        or traits.state is not None
        or traits.blocks is not None
    )


def _plain_flags(traits: Traits) -> dict[str, object] | None:
    """Return the flags of a tensor as JSON has them; None if it needs more than its name and flags."""
    if traits.meta or traits.blocks is not None:
        return None
    if traits.subclass is not None or traits.state is not None:
        return None
    return {flag: True for flag in FLAGS if getattr(traits, flag)}


class Encoder:
    def __init__(self, leaves: Leaves, table: Table) -> None:
        self.found = leaves
        self.row = 0
        """The row of the next tensor: tensors are met in the order in which they were found."""
        self.flags = [_plain_flags(kind.traits) for kind in table.kinds]
        self.kind = table.kind_indices
        self.has_plain_names = is_unicode("".join(leaves.names))
        self.limits = DEFAULTS
        self.problems: list[str] = []
        self.repeated = 0
        self.unlisted = 0
        self.room = PROBLEM_CHARACTERS
        self.steps = 0
        self.leaves: set[int] = set()
        self.once_nbytes = self.again_nbytes = 0
        """Bytes of long leaves: those written for the first time, and those written again."""
        self.seen: set[int] = set()
        self.on_path: set[int] = set()
        self.spending = Spending(self.limits, 0)

    def problem(self, path: Path, what: str) -> object:
        """Record a problem, and give null, so that the walk finds all problems."""
        self.room -= sum(len(step) for step in path if isinstance(step, str)) + len(what)
        if self.room < 0:
            # A long key stands in every path below it.
            self.unlisted += 1
        else:
            self.problems.append(f"{join_path(path) or 'the state itself'}: {what}")
        return None

    def node(self, value: object, path: Path) -> object:
        self.steps += 1
        kind, given = type(value), value
        if kind not in PLAIN_VALUE_TYPES and kind not in CONTAINERS:
            value = self.found.describe(value)
            kind = type(value)
            if self.found.is_tensor(value) and not isinstance(value, LazyTensor):
                return self.next_tensor(value) or self.problem(path, UNNAMED)
        if isinstance(value, LazyTensor):
            return self.tensor(value, path, given)
        if kind in CONTAINERS or isinstance(value, Composite):
            return self.container(value, path)
        return self.leaf(value, path)

    def nodes(
        self, values: Iterable[object], keys: Iterable[object], path: Path
    ) -> Iterator[object]:
        """Yield the JSON of values one after the other. `keys` and `path` give their places."""
        tensor_types = self.found.tensor_types
        for value, key in zip(values, keys, strict=False):
            kind = type(value)
            if kind in tensor_types:
                node = self.next_tensor(value)
                if node is not None:
                    self.steps += 1
                    yield node
                    continue
            elif (
                value is None
                or kind is bool
                or (kind is int and abs(cast("int", value)) <= SAFE_INTEGER)
            ):
                self.steps += 1
                yield value
                continue
            yield self.node(value, (*path, to_path_key(key)))

    def next_tensor(self, value: object) -> dict[str, object] | None:
        """Return the node of a value if it is the next tensor, and needs only its name and flags."""
        row = self.row
        if row >= len(self.found.values) or self.found.values[row] is not value:
            return None
        flags, name = self.flags[self.kind[row]], self.found.names[row]
        if flags is None or not (self.has_plain_names or is_unicode(name)):
            return None
        self.row += 1
        return {TAG: "tensor", "name": name, **flags}

    def container(self, value: object, path: Path) -> object:
        """A value that holds others. It may not contain itself, and not be deeper than the limit."""
        if id(value) in self.on_path:
            return self.problem(path, f"a {type(value).__name__} that contains itself")
        if len(self.on_path) >= self.limits.depth + LEAF_DEPTH:
            return self.problem(path, f"nested deeper than Limits(depth={self.limits.depth})")
        if id(value) in self.seen:
            self.repeated += not isinstance(value, tuple | frozenset)
            if self.steps > FREE_STEPS + 8 * len(self.seen):
                return self.problem(
                    path,
                    "one of too many places that share their containers; written out, they have no end",
                )
        self.seen.add(id(value))
        self.on_path.add(id(value))
        try:
            return self.content(value, path)
        finally:
            self.on_path.discard(id(value))

    def content(self, value: object, path: Path) -> object:
        match value:
            case OrderedDict():
                return {
                    TAG: "ordered_dict",
                    **self.entries(value, path),
                    **self.attributes(value, path),
                }
            case Counter():
                return {TAG: "counter", **self.entries(value, path)}
            case defaultdict():
                made = value.default_factory
                name = None if made is None else FILLERS.get(made)
                if made is not None and name is None:
                    return self.problem(
                        path, "a defaultdict that is filled by something else than a plain type"
                    )
                return {TAG: "defaultdict", "filler": name, **self.entries(value, path)}
            case dict():
                entries = self.entries(value, path)
                has_tag = any(isinstance(key, str) and key.startswith(TAG) for key in value)
                if "entries" in entries and not has_tag:
                    return entries["entries"]
                return {TAG: "dict", **entries}
            case list():
                return self.items(value, path)
            case Size():
                return {TAG: "size", "lengths": self.items(value, path)}
            case tuple():
                return {TAG: "tuple", "items": self.items(value, path)}
            case set() | frozenset():
                kind = "set" if isinstance(value, set) else "frozenset"
                return {TAG: kind, "items": self.members(value, path)}
            case Composite():
                return self.composite(value, path)
        raise TypeError(f"no container: {type(value).__name__}")

    def items(self, values: Iterable[object], path: Path) -> object:
        return _shortened([*self.nodes(values, count(), path)])

    def entries(self, value: Mapping[object, object], path: Path) -> dict[str, object]:
        """The entries of a dict: as an object where all keys are text, as pairs where they are not."""
        if any(isinstance(key, str) and self.too_often(key) for key in value):
            self.problem(
                path, "one of too many places that share a long key; written out, they have no end"
            )
            return {"entries": {}}
        if {*map(type, value)} <= {str} and is_unicode("".join(cast("list[str]", value))):
            nodes = dict(zip(value, self.nodes(value.values(), value, path), strict=True))
            return {"entries": _shortened(nodes)}
        key_nodes = []
        for position, key in enumerate(value):
            # Numbers in their order need no check. All other keys are checked for what they cost a reader.
            if type(key) is int and position <= key <= position + 1:
                self.steps += 1
                key_nodes.append(cast("object", key))
            else:
                key_nodes.append(self.key(key, position, (*path, to_path_key(key))))
        return {
            "items": _shortened(
                [*zip(key_nodes, self.nodes(value.values(), value, path), strict=True)]
            )
        }

    def members(self, values: Iterable[object], path: Path) -> list[object]:
        """The members of a set, in an order that does not depend on this process."""
        made = [self.key(value, i, (*path, to_path_key(value))) for i, value in enumerate(values)]
        return made if self.problems else sorted(made, key=msgspec.json.encode)

    def key(self, key: object, size: int, path: Path) -> object:
        """A dict key or a set member that the reader can take."""
        try:
            self.spending.key(key, size)
        except (PickleError, LimitExceeded) as error:
            return self.problem(path, error.message)
        return self.node(key, (*path, "<key>"))

    def attributes(self, value: OrderedDict[object, object], path: Path) -> dict[str, object]:
        """`_metadata`, which torch's `state_dict()` sets on its OrderedDict. Other attributes are problems."""
        others = [name for name in vars(value) if name != "_metadata"]
        if others:
            self.problem(
                path, f"an OrderedDict with attributes ({', '.join(map(repr, others[:5]))})"
            )
        metadata = vars(value).get("_metadata")
        if metadata is not None and not isinstance(metadata, dict):
            self.problem(path, f"an OrderedDict whose _metadata is a {type(metadata).__name__}")
        return {} if metadata is None else {"metadata": self.node(metadata, (*path, "_metadata"))}

    def tensor(self, tensor: LazyTensor, path: Path, given: object) -> object:
        expected = self.found.values[self.row : self.row + 1]
        if not any(
            value is expected_value for value in (tensor, given) for expected_value in expected
        ):
            return self.problem(path, UNNAMED)
        name = self.found.names[self.row]
        self.row += 1
        if not is_unicode(name):
            return self.problem(path, INVALID_UNICODE)
        node: dict[str, object] = {TAG: "tensor", "name": name}
        if tensor.traits.meta:
            node |= {"dtype": tensor.dtype.name, "shape": list(tensor.shape)}
        return node | self.traits(tensor.traits, path)

    def composite(self, whole: Composite, path: Path) -> object:
        parts = {name: self.node(part, (*path, name)) for name, part in whole.parts.items()}
        attributes = {
            name: self.node(value, (*path, name)) for name, value in whole.attributes.items()
        }
        node = {
            TAG: "composite",
            "kind": whole.kind,
            "shape": list(whole.shape),
            "parts": parts,
            "attributes": attributes,
        }
        return node | self.traits(whole.traits, path)

    def traits(self, traits: Traits, path: Path) -> dict[str, object]:
        """The unusual traits. Conjugated and negated elements are written resolved."""
        node: dict[str, object] = {flag: True for flag in FLAGS if getattr(traits, flag)}
        if traits.blocks is not None:
            node["blocks"] = traits.blocks
        if traits.subclass is not None:
            node["subclass"] = self.leaf(traits.subclass, path)
        if traits.state is not None:
            node["state"] = self.node(traits.state, (*path, "<attributes>"))
        return node

    def leaf(self, value: object, path: Path) -> object:
        """A value without parts. A long value may not be written too often."""
        if isinstance(value, str | bytes | bytearray | np.ndarray | np.generic) and self.too_often(
            value
        ):
            return self.problem(
                path,
                "one of too many places that share a long value; written out, they have no end",
            )
        return self.written(value, path)

    def too_often(self, value: str | bytes | bytearray | np.ndarray | np.generic) -> bool:
        nbytes = value.nbytes if isinstance(value, np.ndarray | np.generic) else len(value)
        if nbytes <= LONG_LEAF:
            return False
        # Arrays are made anew over one buffer: its owner is what is shared.
        shared = id(
            value.base if isinstance(value, np.ndarray) and value.base is not None else value
        )
        if shared not in self.leaves:
            self.leaves.add(shared)
            self.once_nbytes += nbytes
            return False
        self.again_nbytes += nbytes
        return self.again_nbytes > FREE_NBYTES + REPEATS * self.once_nbytes

    def written(self, value: object, path: Path) -> object:
        kind = type(value)
        if value is None or kind is bool:
            return value
        if isinstance(value, np.generic | np.ndarray | np.dtype):
            return self.numpy(value, path)
        if kind not in LEAVES:
            return self.problem(path, _described(value))
        match value:
            case str():
                if is_unicode(value):
                    return value
                return {
                    TAG: "str",
                    "utf8": scalars.bytes_text(value.encode("utf-8", "surrogatepass")),
                }
            case int():
                if -scalars.SAFE_INTEGER <= value <= scalars.SAFE_INTEGER:
                    return value
                digits = scalars.integer_text(value)
                return (
                    self.problem(path, "an int of thousands of digits")
                    if digits is None
                    else {TAG: "int", "value": digits}
                )
            case float():
                text = scalars.float_text(value)
                return value if text is None else {TAG: "float", "value": text}
            case complex():
                return {
                    TAG: "complex",
                    "real": self.leaf(value.real, path),
                    "imag": self.leaf(value.imag, path),
                }
            case bytes() | bytearray():
                return {TAG: kind.__name__, "base64": scalars.bytes_text(value)}
            case range() | slice():
                fields = {name: getattr(value, name) for name in ("start", "stop", "step")}
                if any(part is not None and type(part) is not int for part in fields.values()):
                    return self.problem(path, "a slice of something else than integers")
                return {
                    TAG: kind.__name__,
                    **{name: self.leaf(part, path) for name, part in fields.items()},
                }
            case Device():
                return {
                    TAG: "device",
                    "type": self.leaf(value.type, path),
                    "index": self.leaf(value.index, path),
                }
            case DType():
                return {TAG: "dtype", "name": value.name}
            case Global():
                return {
                    TAG: "global",
                    "module": self.leaf(value.module, path),
                    "name": self.leaf(value.name, path),
                }
            case PurePosixPath() | PureWindowsPath():
                flavour, pure = (
                    ("posix", PurePosixPath)
                    if isinstance(value, PurePosixPath)
                    else ("windows", PureWindowsPath)
                )
                if len(str(value)) > PATH_CHARACTERS or pure(str(value)) != value:
                    # `//://` on Windows is another path once it has been text (Python 3.11).
                    return self.problem(
                        path,
                        f"a path of more than {PATH_CHARACTERS} characters, or not given back by its text",
                    )
                return {TAG: "path", "flavour": flavour, "path": self.written(str(value), path)}
        raise TypeError(f"no leaf: {kind.__name__}")

    def numpy(self, value: np.generic | np.ndarray | np.dtype[np.generic], path: Path) -> object:
        if isinstance(value, np.str_):
            # Not by its dtype, and not by `str`: both lose the NUL characters at its end (numpy 2.4).
            return {TAG: "numpy.str", "value": self.written("".join(value), path)}
        if isinstance(value, np.bytes_):
            return {TAG: "numpy.bytes", "base64": scalars.bytes_text(bytes(value))}
        form = scalars.dtype_form(value if isinstance(value, np.dtype) else value.dtype)
        if form is None or (isinstance(value, np.ndarray) and type(value) is not np.ndarray):
            return self.problem(path, f"{_described(value)} with a dtype that is not plain")
        if isinstance(value, np.dtype):
            return {TAG: "numpy.dtype", "dtype": form}
        if value.nbytes > scalars.ARRAY_NBYTES or (
            isinstance(value, np.ndarray) and not value.itemsize
        ):
            return self.problem(
                path,
                f"a numpy array of {value.nbytes:,} bytes, too many or too few to be kept as a value",
            )
        node = {"dtype": form, "base64": scalars.bytes_text(value.tobytes())}
        if isinstance(value, np.ndarray):
            return {TAG: "numpy.array", "shape": list(value.shape), **node}
        return {TAG: "numpy.scalar", **node}


def _shortened(node: object) -> object:
    """Return the text of a node: a million small objects take more memory."""
    return msgspec.Raw(msgspec.json.encode(node))


SAFE_INTEGER = scalars.SAFE_INTEGER
CONTAINERS = frozenset(
    {dict, OrderedDict, Counter, defaultdict, DefaultDict, list, tuple, Size, set, frozenset}
)
LEAVES = frozenset({
    str, int, float, complex, bytes, bytearray, range, slice, Device, DType, Global, PurePosixPath, PureWindowsPath,
    PosixPath, WindowsPath,
})  # fmt: skip
"""Exact types, since a subclass (an `IntEnum`, a named tuple) would come back as another type."""


def _described(value: object) -> str:
    if isinstance(value, Opaque):
        return f"an object of class {value.module}.{value.name}"
    kind = type(value)
    hint = "; save its state_dict()" if callable(getattr(kind, "state_dict", None)) else ""
    return f"an object of class {kind.__module__}.{kind.__qualname__}{hint}"
