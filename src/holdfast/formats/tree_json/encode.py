"""From Python state to typed JSON, or to the list of what has no form there.

    None, bool, text, finite float, int up to 2^53      as they are
    list; dict whose keys are text without a leading $  as they are
    everything else                                     {"$": its kind, …}        see docs/formats/native.md

A container in two places is written twice, with a note. A container that contains itself is a problem. The walk has the order in
which `core/leaves.py` named the tensors.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain, count, islice, repeat
from operator import is_
from pathlib import PosixPath, PurePosixPath, PureWindowsPath, WindowsPath
from typing import cast

import msgspec
import numpy as np

from holdfast.core.dtype import DType
from holdfast.core.leaves import NO_LEAVES, PLAIN, Leaves
from holdfast.core.limits import DEFAULTS
from holdfast.core.opaque import Device, Global, Opaque, Size
from holdfast.core.protocols import State
from holdfast.core.strict_json import NO_UNICODE, as_keys, is_unicode
from holdfast.core.table import Table
from holdfast.core.tensor import Composite, LazyTensor, Traits
from holdfast.core.tree import Path, dotted, step
from holdfast.core.value import Value
from holdfast.engine.table import NO_TENSORS
from holdfast.errors import LimitExceeded, PickleError
from holdfast.formats.pickle.plain import PATH_CHARACTERS, PLAIN_TYPES, DefaultDict
from holdfast.formats.pickle.spending import Spending
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

TENSOR = msgspec.json.encode({TAG: "tensor", "name": ""}).decode().removesuffix('""}')


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
    return _encoded(state.tree, LeafTexts(state.leaves, state.tensors))


def encode_value(value: object) -> EncodedTree:
    return _encoded(value, NO_TEXTS)


def _encoded(tree: object, texts: LeafTexts) -> EncodedTree:
    encoder = Encoder(texts)
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


class LeafTexts:
    """The texts of the tensors of a state, in the order in which they were found."""

    def __init__(self, leaves: Leaves, table: Table) -> None:
        self.leaves = leaves
        names, traits = leaves.names, [_traits_text(kind.traits) for kind in table.kinds]
        quote, keys = as_keys(names) if is_unicode("".join(names)) else ("", [*map(_quoted, names)])
        around = [(f"{TENSOR}{quote}", f"{quote}{trait}") if trait else None for trait in traits]
        each = zip(keys, [around[kind] for kind in table.kind], strict=True)
        self.texts = [
            f"{text[0]}{name}{text[1]}" if text and (quote or name) else "" for name, text in each
        ]
        """The text of each tensor; empty where it needs more than a name and flags."""
        self.met = 0

    def count_next(self, values: Collection[object]) -> int:
        """The number of values, from the first on, that are the next tensors and have texts."""
        first = self.met
        same = [*map(is_, values, self.leaves.values[first : first + len(values)]), False].index(
            False
        )
        return [*self.texts[first : first + same], ""].index("")

    def next_name(self, tensor: LazyTensor, given: object) -> str | None:
        """The name of a tensor, which `given` stands for in the state; None if it is not the next tensor."""
        row = self.met
        if row >= len(self.leaves.values) or not any(
            one is self.leaves.values[row] for one in (tensor, given)
        ):
            return None
        self.met += 1
        return self.leaves.names[row]


def _quoted(text: str) -> str:
    return msgspec.json.encode(text).decode() if is_unicode(text) else ""


def encoded(node: object) -> str:
    return msgspec.json.encode(node).decode()


def is_marked(traits: Traits) -> bool:
    """Whether a tensor has traits that are recorded."""
    marks = traits.requires_grad or traits.parameter or traits.buffer or traits.meta
    return (
        marks
        or traits.subclass is not None
        or traits.state is not None
        or traits.blocks is not None
    )


def _traits_text(traits: Traits) -> str:
    if (
        traits.meta
        or traits.subclass is not None
        or traits.state is not None
        or traits.blocks is not None
    ):
        return ""
    said = msgspec.json.encode({flag: True for flag in FLAGS if getattr(traits, flag)}).decode()
    return said.replace("{", ",") if len(said) > len("{}") else "}"


class Encoder:
    def __init__(self, texts: LeafTexts) -> None:
        self.texts = texts
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
        self.known: dict[type, dict[object, str]] = {
            float: {},
            str: {},
            bool: {True: "true", False: "false"},
            NONE: {None: "null"},
        }
        self.forms: dict[tuple[object, ...], Sequence[str] | None] = {}
        """By the keys of a dict: the text before each value; None where they are not written as an object."""
        self.spending = Spending(self.limits, 0)

    def problem(self, path: Path, what: str) -> object:
        """Record a problem, and give null, so that the walk finds all problems."""
        self.room -= sum(len(step) for step in path if isinstance(step, str)) + len(what)
        if self.room < 0:
            # A long key stands in every path below it.
            self.unlisted += 1
        else:
            self.problems.append(f"{dotted(path) or 'the state itself'}: {what}")
        return None

    def node(self, value: object, path: Path) -> object:
        self.steps += 1
        kind, given = type(value), value
        if kind not in PLAIN and kind not in CONTAINERS:
            leaves = self.texts.leaves
            value = leaves.described(value)
            kind = type(value)
            if leaves.is_tensor(value) and not isinstance(value, LazyTensor):
                row = self.texts.met
                if (
                    row < len(leaves.values)
                    and leaves.values[row] is value
                    and self.texts.texts[row]
                ):
                    self.texts.met += 1
                    return msgspec.Raw(self.texts.texts[row].encode())
                return self.problem(path, UNNAMED)
        if isinstance(value, LazyTensor):
            return self.tensor(value, path, given)
        if kind in CONTAINERS or isinstance(value, Composite):
            return self.container(value, path)
        return self.leaf(value, path)

    def listed(
        self,
        values: Collection[object],
        openings: Iterable[str],
        keys: Iterable[object],
        path: Path,
    ) -> str:
        """The JSON of values one after the other, each behind its opening. `keys` and `path` give their places.

        No function is called for a tensor or a plain value, and few for a plain dict, list or tuple. All others are nodes.
        """
        seen, on_path, forms, known, texts = (
            self.seen,
            self.on_path,
            self.forms,
            self.known,
            self.texts,
        )
        rows, written, tensors = texts.leaves.values, texts.texts, texts.leaves.kinds
        first, behind = texts.met, iter(openings)
        row, stop = first + texts.count_next(values), len(rows)
        self.steps += row - first
        out = [
            *chain.from_iterable(zip(islice(behind, row - first), written[first:row], strict=True))
        ]
        pending: list[tuple[Iterator[tuple[str, object, object]], str, int, object]] = []
        """The open containers: the rest of the values around each, its end, its id, its key."""
        room = self.limits.depth + LEAF_DEPTH - len(on_path)
        left = islice(values, row - first, None), islice(keys, row - first, None)
        inside: Iterator[tuple[str, object, object]] = zip(behind, *left, strict=False)
        while True:
            for opening, value, key in inside:
                kind = type(value)
                if kind in tensors:
                    if row < stop and rows[row] is value and written[row]:
                        out += (opening, written[row])
                        row += 1
                        self.steps += 1
                        continue
                elif kind is int:
                    if -SAFE_INTEGER <= value <= SAFE_INTEGER:  # type: ignore[operator]
                        out += (f"{opening}{value}",)
                        self.steps += 1
                        continue
                elif kind in known:
                    text = known[kind][value] if value in known[kind] else self.plain_text(value)
                    if text:
                        out += (opening, text)
                        self.steps += 1
                        continue
                elif kind in PLAIN_CONTAINERS and room > 0 and (ident := id(value)) not in seen:
                    begin, end = PLAIN_CONTAINERS[kind]
                    content: Collection[object] = value  # type: ignore[assignment]
                    starts: Iterable[str] | None = chain(FIRST, repeat(","))
                    inner: Iterable[object] = count()
                    if kind is dict:
                        inner = form = (*content,)
                        starts = None
                        if {*map(type, content)} <= TEXT:
                            starts = forms[form] if form in forms else self.add_form(form)
                        content = content.values()  # type: ignore[attr-defined]
                    if starts is not None:
                        seen |= {ident}
                        on_path |= {ident}
                        room -= 1
                        self.steps += 1
                        out += (opening, begin)
                        pending += ((inside, end, ident, key),)
                        inside = zip(starts, content, inner, strict=False)
                        break
                texts.met = row
                node = self.node(value, (*path, *[step(one[3]) for one in pending], step(key)))
                out += (opening, encoded(node))
                row = texts.met
            else:
                if not pending:
                    break
                inside, end, ident, _ = pending[-1]
                del pending[-1]
                out += (end,)
                on_path -= {ident}
                room += 1
        texts.met = row
        return "".join(out)

    def plain_text(self, value: object) -> str:
        """The JSON of a short plain value; empty if JSON has no such value."""
        if isinstance(value, float):
            text = msgspec.json.encode(value).decode() if scalars.float_text(value) is None else ""
            keep = bool(text and value)
        else:
            text = _quoted(value) if isinstance(value, str) and len(value) <= LONG_LEAF else ""
            keep = bool(text)
        if keep and len(self.known[type(value)]) < MOST_KNOWN:
            self.known[type(value)][value] = text
        return text

    def add_form(self, form: tuple[object, ...]) -> Sequence[str] | None:
        keys = cast("tuple[str, ...]", form)
        found: Sequence[str] | None = None
        if (
            max(map(len, keys), default=0) <= LONG_LEAF
            and f",{TAG}" not in (every := ",".join(("", *keys)))
            and is_unicode(every)
        ):
            found = _openings(keys)
        self.forms[form] = found
        return found

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
                plain = "entries" in entries and f",{TAG}" not in ",".join(
                    ("", *cast("dict[str, object]", value))
                )
                if plain or (
                    "entries" in entries and not any(str(key).startswith(TAG) for key in value)
                ):
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

    def items(self, values: Collection[object], path: Path) -> object:
        return msgspec.Raw(
            f"[{self.listed(values, chain(FIRST, repeat(',')), count(), path)}]".encode()
        )

    def entries(self, value: Mapping[object, object], path: Path) -> dict[str, object]:
        """The entries of a dict: as an object where all keys are text, as pairs where they are not."""
        texts = are_texts(value)
        # Most dicts have short keys, which are not asked one by one.
        short = texts and max(map(len, cast("Mapping[str, object]", value)), default=0) <= LONG_LEAF
        some = texts or any(issubclass(kind, str) for kind in {*map(type, value)})
        if (
            some
            and not short
            and any(isinstance(key, str) and self.too_often(key) for key in value)
        ):
            self.problem(
                path, "one of too many places that share a long key; written out, they have no end"
            )
            return {"entries": {}}
        if texts and self.are_counts(value.values()):
            return {"entries": msgspec.Raw(msgspec.json.encode(value))}
        if texts:
            openings = _openings(cast("Collection[str]", value))
            return {
                "entries": msgspec.Raw(
                    f"{{{self.listed(value.values(), openings, value, path)}}}".encode()
                )
            }
        # Numbers in their order need no look; all other keys are asked what they cost a reader.
        plain = [type(key) is int and at <= key <= at + 1 for at, key in enumerate(value)]
        self.steps += sum(plain)
        each = enumerate(zip(value, plain, strict=True))
        pairs = [
            f"],[{key}," if as_is else f"],[{encoded(self.key(key, at, (*path, step(key))))},"
            for at, (key, as_is) in each
        ]
        return {
            "items": msgspec.Raw(
                f"[{self.listed(value.values(), pairs, value, path)[2:]}]]".encode()
            )
        }

    def are_counts(self, values: Collection[object]) -> bool:
        """Whether values are dicts of small integers that stand nowhere else: these are JSON as they are.

        The versions of modules in torch's `state_dict()` are such dicts, one for each module.
        """
        if {*map(type, values)} != {dict} or len(self.on_path) >= self.limits.depth + LEAF_DEPTH:
            return False
        dicts, places = cast("Collection[dict[object, object]]", values), {*map(id, values)}
        numbers, names = (
            [*chain.from_iterable(map(dict.values, dicts))],
            [*chain.from_iterable(dicts)],
        )
        if len(places) < len(dicts) or not places.isdisjoint(self.seen):
            return False
        # Numbers that are equal may be of several types, and so may keys.
        if {*map(type, numbers)} != {int} or not are_texts(names):
            return False
        found, keys = cast("set[int]", {*numbers}), {*names}
        long = any(len(str(key)) > LONG_LEAF or str(key).startswith(TAG) for key in keys)
        if long or not -SAFE_INTEGER <= min(found) <= max(found) <= SAFE_INTEGER:
            return False
        self.seen |= places
        self.steps += len(dicts) + len(numbers)
        return True

    def members(self, values: Iterable[object], path: Path) -> list[object]:
        """The members of a set, in an order that does not depend on this process."""
        made = [self.key(value, i, (*path, step(value))) for i, value in enumerate(values)]
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
        name = self.texts.next_name(tensor, given)
        if name is None:
            return self.problem(path, UNNAMED)
        if not is_unicode(name):
            return self.problem(path, NO_UNICODE)
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


def are_texts(values: Collection[object]) -> bool:
    return {*map(type, values)} <= {str} and is_unicode("".join(cast("Collection[str]", values)))


def _openings(keys: Collection[str]) -> list[str]:
    quote, texts = as_keys([*keys])
    made = [f",{quote}{text}{quote}:" for text in texts]
    return [made[0][1:], *made[1:]] if made else []


PLAIN_CONTAINERS: dict[type, tuple[str, str]] = {
    dict: ("{", "}"),
    list: ("[", "]"),
    tuple: (f'{{"{TAG}":"tuple","items":[', "]}"),
}

NONE = type(None)
TEXT = frozenset({str})
FIRST = ("",)
SAFE_INTEGER = scalars.SAFE_INTEGER
MOST_KNOWN = 10_000

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


NO_TEXTS = LeafTexts(NO_LEAVES, NO_TENSORS)
