"""From Python state to typed JSON, or to the list of what has no form there.

    None, bool, text, finite float, int up to 2^53      as they are
    list; dict whose keys are text without a leading $  as they are
    everything else                                     {"$": its kind, …}        see docs/formats/native.md

A container that stands in two places is written twice, which a note says; one that contains itself is a problem. The walk goes
through a tree in the order in which `core.tree.name_tensors` gave the tensors their names.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Collection, Iterable, Mapping
from itertools import chain
from operator import is_
from pathlib import PosixPath, PurePosixPath, PureWindowsPath, WindowsPath
from typing import cast

import msgspec
import numpy as np

from holdfast.core.dtype import DType
from holdfast.core.leaves import PLAIN, Leaves
from holdfast.core.limits import DEFAULTS
from holdfast.core.opaque import Device, Global, Opaque, Size
from holdfast.core.protocols import State
from holdfast.core.table import Table
from holdfast.core.tensor import Composite, LazyTensor, Traits
from holdfast.core.tree import Path, dotted, step
from holdfast.core.value import Value
from holdfast.errors import LimitExceeded, PickleError
from holdfast.formats.pickle.plain import PATH_CHARACTERS, PLAIN_TYPES, DefaultDict
from holdfast.formats.pickle.spending import Spending
from holdfast.formats.strict_json import as_keys
from holdfast.formats.tree_json import scalars

TAG = "$"
"""The key that makes an object more than a dict. Dicts with a key that begins like this are written as tagged, too."""

LEAF_DEPTH = 2
"""Levels that a tensor or another value may take below the deepest container that `Limits.depth` allows."""

FREE_STEPS = 100_000
"""Values that may be written again because the container around them stands in several places."""

FREE_NBYTES = 1 << 20
"""Bytes of long leaves that may be written again, because one text or buffer stands in several places."""

REPEATS = 8
"""How many times what is stored once may be written in all, beyond what is free."""

LONG_LEAF = 64
"""Characters or bytes from which on a leaf is remembered. Shorter ones take about as much as a reference to them."""

PROBLEM_CHARACTERS = 4 << 20
"""Characters of problems that are listed one by one; the rest is counted."""

FILLERS = {made: name for name, made in PLAIN_TYPES.items()} | {OrderedDict: "OrderedDict"}
"""What fills a defaultdict, and its name."""


UNNAMED = "a tensor where tensors have no name (in a key, a set, or the attributes of another)"

FLAGS = ("requires_grad", "parameter", "buffer")
"""Traits that are yes or no."""

TENSOR = msgspec.json.encode({TAG: "tensor", "name": ""}).decode().removesuffix('""}')
"""A tensor in the tree, up to its name."""


def flat_tree(names: Iterable[str]) -> object:
    """The tree of a plain dict of tensors under their own names."""
    entries = {name: {TAG: "tensor", "name": name} for name in names}
    return {TAG: "dict", "entries": entries} if any(name.startswith(TAG) for name in entries) else entries


class EncodedTree(Value, frozen=True):
    """The outcome: JSON values, and what is to be said about them."""

    value: object
    problems: tuple[str, ...] = ()
    """`path: what it is`, for everything that has no form; the value is of no use then."""
    notes: tuple[str, ...] = ()


def encode_tree(tree: object, paths: Mapping[str, Path]) -> EncodedTree:
    """The tree as JSON values; `paths` says where each tensor's name is, as in `State.paths`. Raises nothing for bad state."""
    return _encoded(Encoder(paths), tree)


def encode_state(state: State, table: Table) -> EncodedTree:
    """The tree of a state, whose tensors have the names of the rows of its table, as JSON values."""
    return _encoded(Encoder(state.paths, None if state.leaves is None else LeafTexts(state.leaves, table)), state.tree)


def _encoded(encoder: Encoder, tree: object) -> EncodedTree:
    try:
        value = encoder.node(tree, ())
    except RecursionError:
        # A caller may be so deep itself that less is left than `Limits.depth`.
        value = encoder.problem((), "nested too deeply")
    notes = []
    if encoder.unlisted:
        encoder.problems.append(f"and {encoder.unlisted:,} more of the same kinds")
    if encoder.repeated:
        notes.append(f"{encoder.repeated:,} containers stand in several places; each place gets its own copy")
    return EncodedTree(value, tuple(encoder.problems), tuple(notes))


class LeafTexts:
    """The texts of the tensors of a state whose containers are the caller's own, in the order in which they were found."""

    def __init__(self, leaves: Leaves, table: Table) -> None:
        self.leaves = leaves
        self._kind, self._odd = table.kind, table.odd
        self._traits = [_traits_text(kind.traits) for kind in table.kinds]
        self._met = 0

    def next_name(self, tensor: LazyTensor, given: object) -> str | None:
        """The name of a tensor, which `given` stands for in the state; None where it is not the next one."""
        row = self._met
        if row >= len(self.leaves.values) or not any(one is self.leaves.values[row] for one in (tensor, given)):
            return None
        self._met += 1
        return self.leaves.names[row]

    def is_alone(self, value: object) -> bool:
        """Whether a tensor takes more than its name and a few marks."""
        found = self.leaves.odd.get(id(value))
        return id(value) in self.leaves.converted or (found is not None and not _traits_text(found.traits))

    def next_texts(self, values: Collection[object]) -> list[str] | None:
        """The texts of tensors; None where these are not the next ones, or one of them is more than a few marks."""
        first, stop = self._met, self._met + len(values)
        if stop > len(self.leaves.values) or not all(map(is_, values, self.leaves.values[first:stop])):
            return None
        names = self.leaves.names[first:stop]
        traits = list(map(self._traits.__getitem__, self._kind[first:stop]))
        if "" in traits or not scalars.is_unicode("".join(names)):
            return None
        self._met = stop
        quote, keys = as_keys(names)
        return [f"{TENSOR}{quote}{name}{quote}{trait}" for name, trait in zip(keys, traits, strict=True)]


def is_marked(traits: Traits) -> bool:
    """Whether a tensor has traits that are recorded."""
    marks = traits.requires_grad or traits.parameter or traits.buffer or traits.meta
    return marks or traits.subclass is not None or traits.state is not None or traits.blocks is not None


def _traits_text(traits: Traits) -> str:
    """What `Encoder.traits` says of a tensor, behind its name and up to the end; nothing where that takes more than marks."""
    if traits.meta or traits.subclass is not None or traits.state is not None or traits.blocks is not None:
        return ""
    said = msgspec.json.encode({flag: True for flag in FLAGS if getattr(traits, flag)}).decode()
    return said.replace("{", ",") if len(said) > len("{}") else "}"


class Encoder:
    """One walk."""

    def __init__(self, paths: Mapping[str, Path], texts: LeafTexts | None = None) -> None:
        self.texts = texts
        self.limits = DEFAULTS
        self.names: dict[Path, list[str]] = {}
        for name in reversed(list(paths)):
            self.names.setdefault(paths[name], []).append(name)
        self.problems: list[str] = []
        self.repeated = 0
        self.unlisted = 0
        """Problems that are too many to be listed."""
        self.room = PROBLEM_CHARACTERS
        self.steps = 0
        self.leaves: set[int] = set()
        self.once_nbytes = self.again_nbytes = 0
        """Bytes of long leaves, each counted once; and those of leaves that were written before."""
        self.seen: set[int] = set()
        self.on_path: set[int] = set()
        self.spending = Spending(self.limits, 0)

    def problem(self, path: Path, what: str) -> object:
        """Note what has no form, and give null in its place, so that the walk goes on and finds all of them."""
        self.room -= sum(len(step) for step in path if isinstance(step, str)) + len(what)
        if self.room < 0:
            # A long key stands in every path below it.
            self.unlisted += 1
        else:
            self.problems.append(f"{dotted(path) or 'the state itself'}: {what}")
        return None

    def node(self, value: object, path: Path) -> object:
        """One value and everything in it."""
        self.steps += 1
        kind, given = type(value), value
        if self.texts is not None and kind not in PLAIN and kind not in CONTAINERS:
            leaves = self.texts.leaves
            made = self.texts.next_texts([value]) if leaves.is_tensor(value) else None
            if made:
                return msgspec.Raw(made[0].encode())
            value = leaves.described(value)
            kind = type(value)
            if leaves.is_tensor(value) and not isinstance(value, LazyTensor):
                return self.problem(path, UNNAMED)
        if isinstance(value, LazyTensor):
            return self.tensor(value, path, given)
        if kind in CONTAINERS or isinstance(value, Composite):
            return self.container(value, path)
        return self.leaf(value, path)

    def container(self, value: object, path: Path) -> object:
        """A value that holds others: entered at most once on its own path, and not below the limit."""
        if id(value) in self.on_path:
            return self.problem(path, f"a {type(value).__name__} that contains itself")
        if len(self.on_path) >= self.limits.depth + LEAF_DEPTH:
            return self.problem(path, f"nested deeper than Limits(depth={self.limits.depth})")
        if id(value) in self.seen:
            self.repeated += not isinstance(value, tuple | frozenset)
            if self.steps > FREE_STEPS + 8 * len(self.seen):
                return self.problem(path, "one of too many places that share their containers; written out, they have no end")
        self.seen.add(id(value))
        self.on_path.add(id(value))
        try:
            return self.content(value, path)
        finally:
            self.on_path.discard(id(value))

    def content(self, value: object, path: Path) -> object:
        match value:
            case OrderedDict():
                return {TAG: "ordered_dict", **self.entries(value, path), **self.attributes(value, path)}
            case Counter():
                return {TAG: "counter", **self.entries(value, path)}
            case defaultdict():
                made = value.default_factory
                name = None if made is None else FILLERS.get(made)
                if made is not None and name is None:
                    return self.problem(path, "a defaultdict that is filled by something else than a plain type")
                return {TAG: "defaultdict", "filler": name, **self.entries(value, path)}
            case dict():
                entries = self.entries(value, path)
                if "entries" in entries and not any(isinstance(key, str) and key.startswith(TAG) for key in value):
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

    def items(self, values: Collection[object], path: Path) -> list[object]:
        if values and are_integers(values):
            self.steps += len(values)
            return list(values)
        return [self.node(value, (*path, i)) for i, value in enumerate(values)]

    def entries(self, value: Mapping[object, object], path: Path) -> dict[str, object]:
        """The entries of a dict: as an object where all keys are text, as pairs where they are not."""
        texts = are_texts(value)
        # Most dicts have short keys, which are not asked one by one.
        short = texts and max(map(len, cast("Mapping[str, object]", value)), default=0) <= LONG_LEAF
        if not short and any(isinstance(key, str) and self.too_often(key) for key in value):
            self.problem(path, "one of too many places that share a long key; written out, they have no end")
            return {"entries": {}}
        if texts:
            return {"entries": self.named(cast("Mapping[str, object]", value), path)}
        pairs = []
        for i, (key, inside) in enumerate(value.items()):
            place = (*path, step(key))
            pairs.append([self.key(key, i, place), self.node(inside, place)])
        return {"items": pairs}

    def named(self, value: Mapping[str, object], path: Path) -> object:
        """The entries of a dict whose keys are texts, as an object."""
        if self.texts is not None and value and self.texts.leaves.kinds.issuperset(map(type, value.values())):
            made = self.tensor_texts(value, path)
            quote, keys = as_keys([*value])
            listed = ",".join([f"{quote}{key}{quote}:{text}" for key, text in zip(keys, made, strict=True)])
            return msgspec.Raw(f"{{{listed}}}".encode())
        return {**value} if self.plain(value.values()) else {key: self.node(inside, (*path, key)) for key, inside in value.items()}

    def tensor_texts(self, value: Mapping[str, object], path: Path) -> list[str]:
        """The texts of tensors: of those that follow each other together, of any that is more than a few marks by itself."""
        assert self.texts is not None
        keys, values, texts = [*value], [*value.values()], list[str]()
        alone = [at for at, one in enumerate(values) if self.texts.is_alone(one)]
        first = 0
        for at in [*alone, len(values)]:
            run = values[first:at]
            made = self.texts.next_texts(run)
            if made is None:
                made = [
                    msgspec.json.encode(self.node(one, (*path, key))).decode() for key, one in zip(keys[first:at], run, strict=True)
                ]
            else:
                self.steps += len(made)
            texts += made
            if at < len(values):
                texts.append(msgspec.json.encode(self.node(values[at], (*path, keys[at]))).decode())
            first = at + 1
        return texts

    def plain(self, values: Collection[object]) -> bool:
        """Whether values are dicts of small integers that stand nowhere else: they are counted, and are JSON as they are.

        What torch's `state_dict()` says of the versions of modules is such, and has as many of them as the state has tensors.
        """
        if not values or {*map(type, values)} != {dict}:
            return False
        dicts, places = cast("Collection[dict[object, object]]", values), {*map(id, values)}
        numbers = [*chain.from_iterable([inner.values() for inner in dicts])]
        keys = dict.fromkeys(chain.from_iterable(dicts))
        if len(places) < len(values) or not places.isdisjoint(self.seen) or not are_integers(numbers) or not are_texts(keys):
            return False
        if any(len(str(key)) > LONG_LEAF or str(key).startswith(TAG) for key in keys):
            return False
        if len(self.on_path) >= self.limits.depth:
            return False
        self.seen |= places
        self.steps += len(values) + len(numbers)
        return True

    def members(self, values: Iterable[object], path: Path) -> list[object]:
        """The members of a set, in an order that does not depend on this process."""
        made = [self.key(value, i, (*path, step(value))) for i, value in enumerate(values)]
        return made if self.problems else sorted(made, key=msgspec.json.encode)

    def key(self, key: object, size: int, path: Path) -> object:
        """A dict key or a set member, if the reader will be able to take it."""
        try:
            self.spending.key(key, size)
        except (PickleError, LimitExceeded) as error:
            return self.problem(path, error.message)
        return self.node(key, (*path, "<key>"))

    def attributes(self, value: OrderedDict[object, object], path: Path) -> dict[str, object]:
        """`_metadata`, which torch's `state_dict()` sets on its OrderedDict; other attributes have no form."""
        others = [name for name in vars(value) if name != "_metadata"]
        if others:
            self.problem(path, f"an OrderedDict with attributes ({', '.join(map(repr, others[:5]))})")
        metadata = vars(value).get("_metadata")
        if metadata is not None and not isinstance(metadata, dict):
            self.problem(path, f"an OrderedDict whose _metadata is a {type(metadata).__name__}")
        return {} if metadata is None else {"metadata": self.node(metadata, (*path, "_metadata"))}

    def tensor(self, tensor: LazyTensor, path: Path, given: object) -> object:
        """A tensor; `given` is what stands for it in the state."""
        names = self.names.get(path)
        name = (names.pop() if names else None) if self.texts is None else self.texts.next_name(tensor, given)
        if name is None:
            return self.problem(path, UNNAMED)
        if not scalars.is_unicode(name):
            return self.problem(path, scalars.NO_UNICODE)
        node: dict[str, object] = {TAG: "tensor", "name": name}
        if tensor.traits.meta:
            node |= {"dtype": tensor.dtype.name, "shape": list(tensor.shape)}
        return node | self.traits(tensor.traits, path)

    def composite(self, whole: Composite, path: Path) -> object:
        parts = {name: self.node(part, (*path, name)) for name, part in whole.parts.items()}
        attributes = {name: self.node(value, (*path, name)) for name, value in whole.attributes.items()}
        node = {TAG: "composite", "kind": whole.kind, "shape": list(whole.shape), "parts": parts, "attributes": attributes}
        return node | self.traits(whole.traits, path)

    def traits(self, traits: Traits, path: Path) -> dict[str, object]:
        """What is not as it usually is. Conjugated and negated elements are written as what they stand for."""
        node: dict[str, object] = {flag: True for flag in FLAGS if getattr(traits, flag)}
        if traits.blocks is not None:
            node["blocks"] = traits.blocks
        if traits.subclass is not None:
            node["subclass"] = self.leaf(traits.subclass, path)
        if traits.state is not None:
            node["state"] = self.node(traits.state, (*path, "<attributes>"))
        return node

    def leaf(self, value: object, path: Path) -> object:
        """A value without parts; a long one is paid for before it is written again."""
        if isinstance(value, str | bytes | bytearray | np.ndarray | np.generic) and self.too_often(value):
            return self.problem(path, "one of too many places that share a long value; written out, they have no end")
        return self.written(value, path)

    def too_often(self, value: str | bytes | bytearray | np.ndarray | np.generic) -> bool:
        """Whether a leaf stands in so many places that writing it out again is not worth it."""
        nbytes = value.nbytes if isinstance(value, np.ndarray | np.generic) else len(value)
        if nbytes <= LONG_LEAF:
            return False
        # Arrays are made anew over one buffer: its owner is what is shared.
        shared = id(value.base if isinstance(value, np.ndarray) and value.base is not None else value)
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
                if scalars.is_unicode(value):
                    return value
                return {TAG: "str", "utf8": scalars.bytes_text(value.encode("utf-8", "surrogatepass"))}
            case int():
                if -scalars.SAFE_INTEGER <= value <= scalars.SAFE_INTEGER:
                    return value
                digits = scalars.integer_text(value)
                return self.problem(path, "an int of thousands of digits") if digits is None else {TAG: "int", "value": digits}
            case float():
                text = scalars.float_text(value)
                return value if text is None else {TAG: "float", "value": text}
            case complex():
                return {TAG: "complex", "real": self.leaf(value.real, path), "imag": self.leaf(value.imag, path)}
            case bytes() | bytearray():
                return {TAG: kind.__name__, "base64": scalars.bytes_text(value)}
            case range() | slice():
                fields = {name: getattr(value, name) for name in ("start", "stop", "step")}
                if any(part is not None and type(part) is not int for part in fields.values()):
                    return self.problem(path, "a slice of something else than integers")
                return {TAG: kind.__name__, **{name: self.leaf(part, path) for name, part in fields.items()}}
            case Device():
                return {TAG: "device", "type": self.leaf(value.type, path), "index": self.leaf(value.index, path)}
            case DType():
                return {TAG: "dtype", "name": value.name}
            case Global():
                return {TAG: "global", "module": self.leaf(value.module, path), "name": self.leaf(value.name, path)}
            case PurePosixPath() | PureWindowsPath():
                flavour, pure = ("posix", PurePosixPath) if isinstance(value, PurePosixPath) else ("windows", PureWindowsPath)
                if len(str(value)) > PATH_CHARACTERS or pure(str(value)) != value:
                    # `//://` on Windows is another path once it has been text (Python 3.11).
                    return self.problem(path, f"a path of more than {PATH_CHARACTERS} characters, or not given back by its text")
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
        if value.nbytes > scalars.ARRAY_NBYTES or (isinstance(value, np.ndarray) and not value.itemsize):
            return self.problem(path, f"a numpy array of {value.nbytes:,} bytes, too many or too few to be kept as a value")
        node = {"dtype": form, "base64": scalars.bytes_text(value.tobytes())}
        if isinstance(value, np.ndarray):
            return {TAG: "numpy.array", "shape": list(value.shape), **node}
        return {TAG: "numpy.scalar", **node}


def are_texts(values: Collection[object]) -> bool:
    """Whether all are texts that are Unicode."""
    return {*map(type, values)} <= {str} and scalars.is_unicode("".join(cast("Collection[str]", values)))


def are_integers(values: Collection[object]) -> bool:
    """Whether all are integers that JSON has."""
    if not {*map(type, values)} <= {int}:
        return False
    numbers = cast("Collection[int]", values)
    return not numbers or (min(numbers) >= -scalars.SAFE_INTEGER and max(numbers) <= scalars.SAFE_INTEGER)


CONTAINERS = frozenset({dict, OrderedDict, Counter, defaultdict, DefaultDict, list, tuple, Size, set, frozenset})
LEAVES = frozenset({
    str, int, float, complex, bytes, bytearray, range, slice, Device, DType, Global, PurePosixPath, PureWindowsPath,
    PosixPath, WindowsPath,
})  # fmt: skip
"""Exact types. A subclass (an `IntEnum`, a named tuple) would come back as something else; only paths lose their disk."""


def _described(value: object) -> str:
    """What a value is, for a list of problems."""
    if isinstance(value, Opaque):
        return f"an object of class {value.module}.{value.name}"
    kind = type(value)
    hint = "; save its state_dict()" if callable(getattr(kind, "state_dict", None)) else ""
    return f"an object of class {kind.__module__}.{kind.__qualname__}{hint}"
