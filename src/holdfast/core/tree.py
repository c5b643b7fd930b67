"""From the nested state of a checkpoint to the names of its tensors.

A leaf's identity is its path, a tuple of keys and positions; its dotted name is for people. The walk is written for hostile
trees: containers may be shared a million times, contain themselves, or nest without end.

1. Each container is visited once, in the order in which a person would read it.
2. A container that is met again is visited again (the same state dict under two keys has two sets of names), as long as a
   budget of extra steps lasts, which is proportional to what was stored; after that it is left out, and a note says so.
3. A container that contains itself is not entered again on its own path.
4. Nesting beyond `limits.depth` is refused, and so are names that take many times the bytes they were made from.
5. What an object holds is stored in dicts that other objects may hold as well: `contents` says which, and these are counted
   like any container. So an object is paid for once, whoever refers to it.

Beside it are the parts of which smaller walks are made: `values_inside` for what is looked for wherever it stands, `rebuilt` and
`refilled` for a tree that is made again with other leaves.

A pickled `nn.Module` is walked as its `state_dict()` would be: parameters, then persistent buffers, then submodules.
"""

from __future__ import annotations

import copy
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, chain
from typing import cast

from msgspec import Struct, field

from holdfast.core.limits import Limits
from holdfast.core.opaque import Opaque
from holdfast.core.tensor import Composite, LazyTensor, set_name
from holdfast.errors import LimitExceeded

Path = tuple[str | int, ...]

FREE_STEPS = 10_000
"""Extra visits of shared containers that are allowed however small the file: the same few dicts under several keys."""


NAME_CHARACTERS_A_BYTE = 16
"""Characters of names for each stored byte. A key is stored once and stands in the name of everything below it."""

FREE_CHARACTERS = 4 << 20
"""Characters of names that are allowed however small the file."""

KEY_CHARACTERS = 64
"""Of a key that is neither text nor an integer, where it stands in a path."""

MOST_LEAVES = 4_000_000
"""Places in a tree that are looked at one by one; containers that stand in several places count several times."""

TOO_OFTEN = "this state refers to the same containers too often to be gone through leaf by leaf"

LONE_TENSOR_NAME = "tensor"
"""The name of a tensor that was saved by itself, with nothing around it."""


def dotted(path: Path) -> str:
    """The name that people use for a path.

    >>> dotted(("model", "layers", 0, "weight"))
    'model.layers.0.weight'
    """
    return ".".join(map(str, path))


class Named(Struct):
    """The outcome of a walk."""

    tensors: dict[str, LazyTensor] = field(default_factory=dict)
    places: list[tuple[Path, Sequence[str | int]]] = field(default_factory=list)
    """In the order of `tensors`: the path of a container, and the keys in it; without keys, of one tensor."""
    opaques: list[tuple[Path, Opaque]] = field(default_factory=list)
    """Each `Opaque` once, where it was met first."""
    notes: list[str] = field(default_factory=list)
    doubles: dict[str, int] = field(default_factory=dict)
    """The last number behind a name that several tensors have, so that the next need not count again."""
    characters: int = 0
    """Length of all names together."""

    @property
    def paths(self) -> dict[str, Path]:
        """The path of each name."""
        paths = [one for path, keys in self.places for one in ([(*path, key) for key in keys] or [path])]
        return dict(zip(self.tensors, paths, strict=True))


Contents = list[tuple[object, Iterator[tuple[str | int, object]]]]
"""The containers that a value is stored in, itself first, each with its children and the path elements that lead to them."""


def contents(value: object) -> Contents | None:
    """What is inside of a value; None for a leaf. Costs the same whatever is inside, and nothing is copied.

    Values stay referenced by the tree, so a container's identity is that of the object which is given with its children.
    """
    match value:
        case dict():
            return [(value, ((step(k), v) for k, v in value.items()))]
        case list() | tuple():
            return [(value, iter(enumerate(value)))]
        case Opaque():
            module = module_contents(value)
            if module is not None:
                return [(value, iter(())), *module]
            states: Contents = [(state, ((step(k), v) for k, v in state.items())) for state in value.states()]
            return [(value, iter(())), *states, (value, value.beside())]
        case Composite():
            return [(value, iter(value.children()))]
        case _:
            return None


def module_contents(opaque: Opaque) -> Contents | None:
    """What `state_dict()` of a pickled `nn.Module` would descend into; None when this is no module."""
    groups = [opaque.attribute(name) for name in ("_parameters", "_buffers", "_modules")]
    dicts = [group for group in groups if isinstance(group, dict)]
    if len(dicts) != len(groups):
        return None
    skipped = opaque.attribute("_non_persistent_buffers_set")
    transient = skipped if isinstance(skipped, set | frozenset) else frozenset[object]()
    # A buffer that is left out is None in its place, as torch writes one that is not set.
    kept = ((step(k), None if k in transient else v) for k, v in dicts[1].items())
    parameters, modules = (((step(k), v) for k, v in group.items()) for group in (dicts[0], dicts[2]))
    return [(dicts[0], parameters), (dicts[1], kept), (dicts[2], modules)]


def name_tensors(tree: object, limits: Limits, stored: int) -> Named:
    """Walk a tree and give every tensor in it a dotted name. `stored` is how many bytes the tree took where it was stored."""
    named = Named()
    seen: set[int] = set()
    on_path: set[int] = set()
    spare = stored + FREE_STEPS
    room = NAME_CHARACTERS_A_BYTE * stored + FREE_CHARACTERS
    left_out = 0
    # Explicit stack: an iterator over children a level, so that depth costs memory and not interpreter frames.
    levels: list[tuple[Iterator[tuple[str | int, object]], set[int], bool]] = [(iter([("", tree)]), set(), False)]
    path: list[str | int] = []
    keys: list[str | int] = []
    """Of tensors of the container at work that have no name yet."""
    tensors: list[LazyTensor] = []
    while levels:
        children, owners, again = levels[-1]
        child = next(children, None) if spare >= 0 or not again else None
        inside: Contents | None = None
        if child is not None:
            spare -= again
            key, value = child
            if isinstance(value, LazyTensor):
                keys += (key,)
                tensors += (value,)
                continue
            inside = contents(value)
            if inside is None:
                continue
        if tensors:
            _add(named, tuple(path[1:]), keys if levels[1:] else (), tensors=tensors, room=room)
            keys, tensors = [], []
        if inside is None:
            levels.pop()
            on_path -= owners
            if path:
                path.pop()
            continue
        owners = {id(owner) for owner, _ in inside}
        if owners & on_path:
            continue
        if isinstance(value, Opaque) and id(value) not in seen:
            named.opaques.append(((*path[1:], *((key,) if levels[1:] else ())), value))
        again = not owners.isdisjoint(seen)
        seen |= owners
        if again:
            spare -= 1
            if spare < 0:
                left_out += 1
                continue
        if len(levels) > limits.depth:
            raise LimitExceeded(
                f"the state nests deeper than Limits(depth={limits.depth})", expected=limits.depth, found=len(levels)
            )
        if not again and isinstance(value, dict | list | tuple):
            own = [*value.values()] if isinstance(value, dict) else value
            if {*map(type, own)} == {LazyTensor}:
                # Nothing but tensors: they have their names at once.
                texts_only = {*map(type, value)} == {str}
                steps = range(len(own)) if own is value else [*value] if texts_only else [*map(step, value)]
                _add(named, (*path[1:], key) if path else (), steps, tensors=own, room=room)
                continue
        on_path |= owners
        path.append(key)
        levels.append((inside[0][1] if len(inside) == 1 else chain.from_iterable(part for _, part in inside), owners, again))
    if left_out:
        named.notes.append(f"{left_out:,} further references to shared containers were not listed by name; they are in the tree")
    return named


def too_long_names(room: int, characters: int) -> LimitExceeded:
    """What is raised where names take more characters than there is room for."""
    message = f"the names of the tensors take more than {room:,} characters together, {NAME_CHARACTERS_A_BYTE} times what is stored"
    return LimitExceeded(message, expected=room, found=characters)


def _add(named: Named, path: Path, keys: Sequence[str | int], *, tensors: Sequence[LazyTensor], room: int) -> None:
    """Name tensors of one container by its path and their keys; without keys, one tensor that was saved by itself."""
    before, found = f"{dotted(path)}." if path and keys else "", named.tensors
    texts = cast("Sequence[str]", keys) if {*map(type, keys)} == {str} else [*map(str, keys)]
    if not keys:
        texts = [dotted(path) if path else LONE_TENSOR_NAME]
    characters = named.characters + len(before) * len(texts) + sum(map(len, texts))
    # Before they are made: a long path may stand before each of very many keys.
    if characters > room:
        totals = accumulate([len(before) + len(text) for text in texts], initial=named.characters)
        raise too_long_names(room, next(total for total in totals if total > room))
    named.characters = characters
    # Few functions are called for a tensor: this is done for each of a million.
    for at, tensor in enumerate(tensors):
        name = before + texts[at]
        if name in found:
            name = _numbered(named, name, (*path, *keys[at : at + 1]))
        own = tensor.name
        if not own:
            # Fresh from a format and seen by nobody yet: named where it is, so that the leaf of the tree knows its name too.
            set_name(tensor, name)
        found[name] = tensor.renamed(name) if own and own != name else tensor
    named.places.append((path, keys))
    if named.characters > room:
        raise too_long_names(room, named.characters)


def _numbered(named: Named, base: str, path: Path) -> str:
    """A name with a number behind it, since another tensor has the name."""
    name, count = base, named.doubles.get(base, 1)
    while name in named.tensors:
        count += 1
        name = f"{base}#{count}"
    named.doubles[base] = count
    named.characters += len(name) - len(base)
    named.notes.append(f"two tensors are called {base!r}; the one at path {path!r} is listed as {name!r}")
    return name


def step(key: object) -> str | int:
    """A dict key as a path element: text and integers as they are, others as a text of bounded length."""
    if type(key) is str:
        return key
    if isinstance(key, str | int) and not isinstance(key, bool):
        return key
    if isinstance(key, float | bool | complex | bytes) or key is None:
        return repr(_cut(key))[:KEY_CHARACTERS]
    if isinstance(key, tuple) and all(isinstance(k, str | int | float | None) for k in key):
        # Cut before it is written out: many keys may hold one long text.
        return repr(tuple(_cut(k) for k in key[:KEY_CHARACTERS]))[:KEY_CHARACTERS]
    return f"<{type(key).__name__}>"


def _cut(value: object) -> object:
    return value[:KEY_CHARACTERS] if isinstance(value, str | bytes) else value


def values_inside(tree: object) -> Iterator[object]:
    """A tree and every value in its dicts, lists and tuples, in reading order: containers once, leaves wherever they stand.

    >>> list(values_inside({"a": [1, 2]}))
    [{'a': [1, 2]}, [1, 2], 1, 2]
    """
    seen: set[int] = set()
    waiting = [tree]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict | list | tuple):
            if id(value) in seen:
                continue
            seen.add(id(value))
            # Backwards onto the stack: the first child comes off first.
            waiting += reversed(value.values() if isinstance(value, dict) else value)
        yield value


def levels(tree: object) -> Iterator[tuple[object, int]]:
    """A value and everything in it, keys and members of sets too, with how deep it lies: as a recursive walk would come to it.

    >>> [depth for _, depth in levels([[()], {1}])]
    [0, 1, 2, 1, 2]
    """
    seen: set[int] = set()
    waiting: list[tuple[object, int]] = [(tree, 0)]
    while waiting:
        value, depth = waiting.pop()
        yield value, depth
        if isinstance(value, dict | list | tuple | set | frozenset) and id(value) not in seen:
            seen.add(id(value))
            inner = [*value, *value.values()] if isinstance(value, dict) else list(value)
            waiting += [(child, depth + 1) for child in reversed(inner)]


def leaf_paths(tree: object, *, once: bool = False) -> Iterator[tuple[Path, object]]:
    """Everything in a tree that is no container with something in it, with its path.

    Containers are entered wherever they stand; with `once`, where they are met first.
    """
    left = MOST_LEAVES
    seen: set[int] = set()
    waiting: list[tuple[Path, object]] = [((), tree)]
    while waiting:
        path, value = waiting.pop()
        if once and isinstance(value, dict | list | tuple):
            if id(value) in seen:
                continue
            seen.add(id(value))
        left -= not once
        if left < 0:
            raise LimitExceeded(TOO_OFTEN, expected=MOST_LEAVES)
        if not is_entered(value):
            yield path, value
        elif isinstance(value, dict):
            waiting += [((*path, step(key)), inner) for key, inner in reversed(value.items())]
        elif isinstance(value, list | tuple):
            waiting += [((*path, i), inner) for i, inner in reversed(list(enumerate(value)))]


def is_entered(value: object) -> bool:
    """Whether a value is a container with something in it, whose children have names of their own."""
    if isinstance(value, dict):
        return bool(value) and not isinstance(value, Counter)
    return type(value) in (list, tuple) and bool(value)


def entered(values: Sequence[object]) -> list[bool]:
    """The same of each; values of which none is a container are not asked one by one."""
    if any(issubclass(kind, dict | list | tuple) for kind in {*map(type, values)}):
        return [*map(is_entered, values)]
    return [False] * len(values)


def leaf_names(tree: object) -> list[str]:
    """The dotted names of all that `leaf_paths` gives, in its order.

    >>> leaf_names({"a": {"x": 1, "y": []}, "b": (2, 3)})
    ['a.x', 'a.y', 'b.0', 'b.1']
    """
    if not is_entered(tree):
        return [""]
    naming = _LeafNaming()
    naming.add(tree, "")
    return naming.names


class _LeafNaming:
    """One walk of `leaf_names`."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self._left = MOST_LEAVES

    def add(self, container: object, prefix: str) -> None:
        keys: Iterable[object]
        if isinstance(container, dict):
            keys, inside = container, [*container.values()]
            if {*map(type, keys)} != {str}:
                keys = map(step, container)
        else:
            inside = [*cast("list[object] | tuple[object, ...]", container)]
            keys = range(len(inside))
        self._left -= len(inside)
        if self._left < 0:
            raise LimitExceeded(TOO_OFTEN, expected=MOST_LEAVES)
        below = entered(inside)
        if True not in below:
            self.names.extend([f"{prefix}{key}" for key in keys])
            return
        for key, value, inner in zip(keys, inside, below, strict=True):
            if inner:
                self.add(value, f"{prefix}{key}.")
            else:
                self.names.append(f"{prefix}{key}")


def rebuilt(
    container: dict[object, object] | list[object] | tuple[object, ...], children: Sequence[object]
) -> dict[object, object] | list[object] | tuple[object, ...]:
    """A container with other children in the places of its own; itself, where they are the same objects."""
    own = container.values() if isinstance(container, dict) else container
    if all(a is b for a, b in zip(children, own, strict=True)):
        return container
    if isinstance(container, dict):
        return refilled(container, dict(zip(container, children, strict=True)))
    return type(container)(children)


def refilled(kind: dict[object, object], items: Mapping[object, object]) -> dict[object, object]:
    """A dict of the same class with these entries. It keeps what else the dict has: a default factory, the attributes of an
    `OrderedDict` (torch keeps the versions of a `state_dict()` there)."""
    if type(kind) is dict:
        return dict(items)
    if type(kind) is OrderedDict:
        ordered = OrderedDict(items)
        vars(ordered).update(vars(kind))
        return ordered
    made = copy.copy(kind)
    if list(made) != list(items):
        made.clear()
    # Not `update`: a `Counter` would add to what it has.
    for key, value in items.items():
        made[key] = value
    return made
