"""Nested states: what is in them, ways through them, and others made of them.

A leaf's identity is its path, a tuple of keys and positions; its dotted name is for people. Tensors get their names in
`core/leaves.py`. All others go through a nested state by `walk`, make another by `rebuild`, or go through two at once by `unroll`
(docs/design/039). None of these calls itself, so depth costs memory and no frames.

What an object holds is stored in dicts that other objects may hold as well (`contents`); each is counted once. A pickled
`nn.Module` is gone through as its `state_dict()` would be: parameters, then persistent buffers, then submodules.
"""

from __future__ import annotations

import copy
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, chain, repeat
from operator import is_
from typing import Any, TypeVar, cast

from holdfast.core.opaque import Opaque
from holdfast.core.tensor import Composite
from holdfast.errors import LimitExceeded

Path = tuple[str | int, ...]
R = TypeVar("R")

NAME_CHARACTERS_A_BYTE = (
    16  # Characters of names for each stored byte: a key is stored once and stands in many names.
)
FREE_CHARACTERS = 4 << 20  # Characters of names that are allowed however small the file.
KEY_CHARACTERS = 64  # Of a key that is neither text nor an integer, where it stands in a path.

MOST_LEAVES = 4_000_000  # Places in a tree that are looked at one by one; shared containers count several times.
MOST_CALLS = (
    100_000  # Levels of states that are gone through together. What is deeper contains itself.
)
TOO_OFTEN = "this state refers to the same containers too often to be gone through leaf by leaf"

LONE_TENSOR_NAME = "tensor"


def dotted(path: Sequence[str | int]) -> str:
    """The name that people use for a path.

    >>> dotted(("model", "layers", 0, "weight"))
    'model.layers.0.weight'
    """
    return ".".join(map(str, path))


def name_ends(path: Path) -> list[int]:
    """Where in the dotted name of a path each of its steps ends.

    >>> name_ends(("model", "layers", 0))
    [5, 12, 14]
    """
    return [end - 1 for end in accumulate(len(str(one)) + 1 for one in path)]


Contents = list[tuple[object, Iterator[tuple[str | int, object]]]]
"""The containers that a value is stored in, itself first, each with its children and the path elements that lead to them."""


def contents(value: object) -> Contents | None:
    """What is inside of a value; None for a leaf. Costs the same whatever is inside, and nothing is copied. Values stay referenced
    by the tree, so a container's identity is that of the object which is given with its children."""
    match value:
        case dict():
            return [(value, ((step(k), v) for k, v in value.items()))]
        case list() | tuple():
            return [(value, iter(enumerate(value)))]
        case Opaque():
            module = module_contents(value)
            if module is not None:
                return [(value, iter(())), *module]
            states: Contents = [
                (state, ((step(k), v) for k, v in state.items())) for state in value.states()
            ]
            return [(value, iter(())), *states, (value, value.non_attributes())]
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
    parameters, modules = (
        ((step(k), v) for k, v in group.items()) for group in (dicts[0], dicts[2])
    )
    return [(dicts[0], parameters), (dicts[1], kept), (dicts[2], modules)]


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


Way = tuple["Way", object] | None
"""The way to a value: the way to what holds it, and its key there. Costs the same at any depth; None is the way to the top."""

Inside = Callable[
    [Any], Iterable[tuple[object, object]] | None
]  # What is in a value, each with its key; None for a leaf.


def path_to(way: Way) -> Path:
    """The path of a way.

    >>> path_to(((None, "a"), 0))
    ('a', 0)
    """
    steps: list[str | int] = []
    while way is not None:
        way, key = way
        steps.append(step(key))
    return tuple(reversed(steps))


def name_at(way: Way) -> str:
    return dotted(path_to(way))


def children(value: object) -> Iterable[tuple[object, object]] | None:
    """What is in a dict, a list or a tuple of any class."""
    return (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list | tuple)
        else None
    )


def mapped_children(value: object) -> Iterable[tuple[object, object]] | None:
    """What is in a mapping of any class, a list or a tuple."""
    return value.items() if isinstance(value, Mapping) else children(value)


def every_child(value: object) -> Iterable[tuple[object, object]] | None:
    """What is in a container, keys and members of sets too; None for one with nothing in it."""
    if not isinstance(value, dict | list | tuple | set | frozenset) or not value:
        return None
    return zip(
        repeat(None),
        chain(value, value.values()) if isinstance(value, dict) else value,
        strict=False,
    )


def usual_children(value: object) -> Iterable[tuple[object, object]] | None:
    """What is in a container that `rebuilt` can make: a dict of any class, a plain list or tuple."""
    return children(value) if isinstance(value, dict) or type(value) in (list, tuple) else None


def values_of(container: Any) -> Collection[Any]:  # noqa: ANN401  # a container of anything
    return container.values() if isinstance(container, dict) else container


def nested(value: object) -> Iterable[tuple[object, object]] | None:
    """The containers in a container. Its content is asked for types as a whole: there may be very many tensors in it."""
    inside = children(value)
    if inside is None:
        return None
    if any(issubclass(kind, dict | list | tuple) for kind in {*map(type, values_of(value))}):
        return [(key, inner) for key, inner in inside if isinstance(inner, dict | list | tuple)]
    return ()


def walk(
    tree: object, inside: Inside = children, *, most: int | None = None, depth: int | None = None
) -> Iterator[tuple[Way, object]]:
    """A tree and everything in it, each with the way to it, in reading order. Depth costs memory, and no frames.

    A container is given and entered where it is met first. With `most` it is wherever it stands: raises `LimitExceeded` where that
    are more values, or where one contains itself; and where containers nest deeper than `depth`.

    >>> [(path_to(way), value) for way, value in walk({"a": [1, 2]})]
    [((), {'a': [1, 2]}), (('a',), [1, 2]), (('a', 0), 1), (('a', 1), 2)]
    """
    met: dict[
        int, object
    ] = {}  # Containers that are not entered again. They are kept, so that the identity of each stays its own.
    around: list[tuple[Iterator[tuple[object, object]], Way, object]] = []
    level: Iterator[tuple[object, object]] = iter([(None, tree)])
    above: Way = None
    left = -1 if most is None else most
    while True:
        for key, value in level:
            way = (above, key) if around else None
            if not left:
                raise LimitExceeded(TOO_OFTEN, expected=most)
            left -= 1
            inner = inside(value)
            if inner is None:
                yield way, value
            elif id(value) not in met:
                met[id(value)] = value
                yield way, value
                around.append((level, above, value))
                _check_depth(len(around), depth)
                level, above = iter(inner), way
                break
            elif most is not None:
                raise LimitExceeded(
                    f"{name_at(way)[:KEY_CHARACTERS]}: a {type(value).__name__} that contains itself"
                )
        else:
            if not around:
                return
            level, above, value = around.pop()
            if most is not None:
                del met[id(value)]


def with_paths(places: Iterable[tuple[Way, object]]) -> Iterator[tuple[Path, object]]:
    """What a walk gives, each with its path. Of what stands side by side, the way above is written out once."""
    above: Way = None
    before: Path = ()
    for way, value in places:
        if way is None:
            yield (), value
            continue
        if way[0] is not above:
            above, before = way[0], path_to(way[0])
        yield (*before, step(way[1])), value


def _check_depth(found: int, depth: int | None) -> None:
    if depth is not None and found > depth:
        raise LimitExceeded(
            f"the state nests deeper than Limits(depth={depth})", expected=depth, found=found
        )


Replace = Callable[[Any, Way], object]
"""What is to stand in the place of a leaf, and how it is reached; the first way, where what holds it stands in several places."""

Make = Callable[[Any, list[Any], Way], object]
"""What is to stand in the place of a container, with what was made of its children, and how it is reached."""


def rebuild(
    tree: object, replace: Replace, *, inside: Inside = usual_children, make: Make | None = None, most: int | None = None,
    depth: int | None = None,
) -> object:  # fmt: skip
    """A tree with other leaves. Depth costs memory, and no frames. What stands in several places is made once, and stands in all of
    them again. A container in which nothing changes stays the same object, unless it contains itself: then it contains what was
    made of it. With `most`, containers are made wherever they stand, and `LimitExceeded` is raised as by `walk`, also for
    `depth`."""
    done: dict[
        int, tuple[object, object]
    ] = {}  # By identity: containers, kept so that it stays theirs, and what was made of them.
    entered: dict[
        int, object
    ] = {}  # Containers that are being made: what stands for each in itself, None where nobody asked.
    around: list[tuple[Iterator[tuple[object, object]], Way, list[object], object]] = []
    level: Iterator[tuple[object, object]] = iter([(None, tree)])
    above: Way = None
    made: list[object] = []
    left = -1 if most is None else most
    while True:
        for key, value in level:
            way = (above, key) if around else None
            if not left:
                raise LimitExceeded(TOO_OFTEN, expected=most)
            left -= 1
            if id(value) in done:
                made.append(done[id(value)][1])
                continue
            inner = inside(value)
            if inner is None:
                made.append(replace(value, way))
            elif id(value) in entered and not isinstance(value, tuple):
                if most is not None:
                    raise LimitExceeded(
                        f"{name_at(way)[:KEY_CHARACTERS]}: a {type(value).__name__} that contains itself"
                    )
                if entered[id(value)] is None:
                    empty: object = (
                        refilled(value, {})
                        if isinstance(value, dict)
                        else []
                        if isinstance(value, list)
                        else value
                    )
                    entered[id(value)] = (
                        empty if make is None or empty is value else make(empty, [], way)
                    )
                made.append(entered[id(value)])
            else:
                # A tuple that contains itself does so through a dict or a list, which is not entered again.
                entered[id(value)] = None
                around.append((level, above, made, value))
                _check_depth(len(around), depth)
                level, above, made = iter(inner), way, []
                break
        else:
            if not around:
                return made[0]
            own, way = made, above
            level, above, made, value = around.pop()
            result, shell = (
                rebuilt(value, own) if make is None else make(value, own, way),
                entered.pop(id(value), None),
            )
            if isinstance(shell, dict) and isinstance(result, dict) and shell is not value:
                for name, one in result.items():
                    shell[name] = one
                result = shell
            elif isinstance(shell, list) and isinstance(result, list):
                shell[:], result = result, shell
            if most is None:
                done[id(value)] = value, result
            made.append(result)


Unrolled = Generator[
    Any, Any, R
]  # A function that would call itself: it yields the call, and is sent what that returns.


def unroll(call: Unrolled[R]) -> R:
    """What a function returns that yields its calls of itself. For walks through several states at once; depth costs no frames. An
    error ends all of them: what is around a call in the function does not see it."""
    calls: list[Unrolled[Any]] = [call]
    result: Any = None
    while calls:
        try:
            calls.append(calls[-1].send(result))
            result = None
            if len(calls) > MOST_CALLS:
                raise LimitExceeded(
                    f"the state contains itself, or nests deeper than {MOST_CALLS:,} levels",
                    expected=MOST_CALLS,
                )
        except StopIteration as done:
            calls.pop()
            result = done.value
    return cast(R, result)


def values_inside(tree: object) -> Iterator[object]:
    """A tree and every value in its dicts, lists and tuples, in reading order: containers once, leaves wherever they stand.

    >>> list(values_inside({"a": [1, 2]}))
    [{'a': [1, 2]}, [1, 2], 1, 2]
    """
    return (value for _, value in walk(tree))


def dict_leaves(tree: object) -> Iterator[tuple[str, object]]:
    """Everything in nested dicts that is no dict, with its dotted name.

    >>> [*dict_leaves({"a": {"x": 1}, "b": [2]})]
    [('a.x', 1), ('b', [2])]
    """
    places = walk(
        tree, lambda value: value.items() if isinstance(value, dict) else None, most=MOST_LEAVES
    )
    return ((name_at(way), value) for way, value in places if not isinstance(value, dict))


def leaf_paths(tree: object, *, once: bool = False) -> Iterator[tuple[Path, object]]:
    """Everything in a tree that is no container with something in it, with its path. Containers are entered wherever they stand;
    with `once`, where they are met first."""
    places = walk(tree, leaf_children, most=None if once else MOST_LEAVES)
    return with_paths((way, value) for way, value in places if not is_entered(value))


def leaf_children(value: object) -> Iterable[tuple[object, object]] | None:
    """What is in a container whose children have names of their own."""
    return children(value) if is_entered(value) else None


def is_entered(value: object) -> bool:
    """Whether a value is a container with something in it, whose children have names of their own."""
    if isinstance(value, dict):
        return bool(value) and not isinstance(value, Counter)
    return type(value) in (list, tuple) and bool(value)


def entered(values: Collection[object]) -> list[bool]:
    """Whether each value is entered, as by `is_entered`. Values of which none is a container are not asked one by one."""
    if any(issubclass(kind, dict | list | tuple) for kind in {*map(type, values)}):
        return [*map(is_entered, values)]
    return [False] * len(values)


def rebuilt(container: Any, children: Sequence[object]) -> Any:  # noqa: ANN401  # the same kind of container
    """A container with other children in the places of its own; itself, where they are the same objects."""
    return (
        container
        if all(map(is_, children, values_of(container)))
        else remade(container, children, None)
    )


def remade(container: Any, children: Sequence[object], _: Way) -> Any:  # noqa: ANN401  # as `rebuilt`
    """A new container with other children in the places of its own, whether they differ or not."""
    if isinstance(container, dict):
        return refilled(container, dict(zip(container, children, strict=True)))
    return type(container)(children)


def plainly(container: Any, children: Sequence[object], _: Way) -> Any:  # noqa: ANN401  # as `rebuilt`
    """A container with other children in the places of its own; a mapping of any class becomes a plain dict."""
    return (
        dict(zip(container, children, strict=True))
        if isinstance(container, Mapping)
        else type(container)(children)
    )


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
