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

MAX_LEAVES = 4_000_000  # Places in a tree that are looked at one by one; shared containers count several times.
MAX_CALLS = (
    100_000  # Levels of states that are gone through together. What is deeper contains itself.
)
TOO_OFTEN = "this state refers to the same containers too often to be gone through leaf by leaf"

LONE_TENSOR_NAME = "tensor"


def join_path(path: Sequence[str | int]) -> str:
    """The name that people use for a path.

    >>> join_path(("model", "layers", 0, "weight"))
    'model.layers.0.weight'
    """
    return ".".join(map(str, path))


def find_name_ends(path: Path) -> list[int]:
    """Where in the dotted name of a path each of its steps ends.

    >>> find_name_ends(("model", "layers", 0))
    [5, 12, 14]
    """
    return [end - 1 for end in accumulate(len(str(one)) + 1 for one in path)]


ContainerContents = list[tuple[object, Iterator[tuple[str | int, object]]]]
"""The containers that a value is stored in, itself first, each with its children and the path elements that lead to them."""


def list_contents(value: object) -> ContainerContents | None:
    """What is inside of a value; None for a leaf. Costs the same whatever is inside, and nothing is copied. Values stay referenced
    by the tree, so a container's identity is that of the object which is given with its children."""
    match value:
        case dict():
            return [(value, ((to_path_key(k), v) for k, v in value.items()))]
        case list() | tuple():
            return [(value, iter(enumerate(value)))]
        case Opaque():
            module = list_module_contents(value)
            if module is not None:
                return [(value, iter(())), *module]
            states: ContainerContents = [
                (state, ((to_path_key(k), v) for k, v in state.items()))
                for state in value.state_dicts()
            ]
            return [(value, iter(())), *states, (value, value.iterate_other_contents())]
        case Composite():
            return [(value, iter(value.children()))]
        case _:
            return None


def list_module_contents(opaque: Opaque) -> ContainerContents | None:
    """What `state_dict()` of a pickled `nn.Module` would descend into; None when this is no module."""
    groups = [opaque.attribute(name) for name in ("_parameters", "_buffers", "_modules")]
    dicts = [group for group in groups if isinstance(group, dict)]
    if len(dicts) != len(groups):
        return None
    skipped = opaque.attribute("_non_persistent_buffers_set")
    transient = skipped if isinstance(skipped, set | frozenset) else frozenset[object]()
    # A buffer that is left out is None in its place, as torch writes one that is not set.
    kept = ((to_path_key(k), None if k in transient else v) for k, v in dicts[1].items())
    parameters, modules = (
        ((to_path_key(k), v) for k, v in group.items()) for group in (dicts[0], dicts[2])
    )
    return [(dicts[0], parameters), (dicts[1], kept), (dicts[2], modules)]


def to_path_key(key: object) -> str | int:
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


LinkedPath = tuple["LinkedPath", object] | None
"""The way to a value: the way to what holds it, and its key there. Costs the same at any depth; None is the way to the top."""

GetChildren = Callable[
    [Any], Iterable[tuple[object, object]] | None
]  # What is in a value, each with its key; None for a leaf.


def expand_path(way: LinkedPath) -> Path:
    """The path of a way.

    >>> expand_path(((None, "a"), 0))
    ('a', 0)
    """
    steps: list[str | int] = []
    while way is not None:
        way, key = way
        steps.append(to_path_key(key))
    return tuple(reversed(steps))


def join_linked_path(way: LinkedPath) -> str:
    return join_path(expand_path(way))


def get_children(value: object) -> Iterable[tuple[object, object]] | None:
    """What is in a dict, a list or a tuple of any class."""
    return (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list | tuple)
        else None
    )


def get_mapping_children(value: object) -> Iterable[tuple[object, object]] | None:
    """What is in a mapping of any class, a list or a tuple."""
    return value.items() if isinstance(value, Mapping) else get_children(value)


def get_keys_and_values(value: object) -> Iterable[tuple[object, object]] | None:
    """What is in a container, keys and members of sets too; None for one with nothing in it."""
    if not isinstance(value, dict | list | tuple | set | frozenset) or not value:
        return None
    return zip(
        repeat(None),
        chain(value, value.values()) if isinstance(value, dict) else value,
        strict=False,
    )


def get_plain_children(value: object) -> Iterable[tuple[object, object]] | None:
    """What is in a container that `replace_children` can make: a dict of any class, a plain list or tuple."""
    return get_children(value) if isinstance(value, dict) or type(value) in (list, tuple) else None


def get_values(container: Any) -> Collection[Any]:  # noqa: ANN401  # a container of anything
    return container.values() if isinstance(container, dict) else container


def get_inner_containers(value: object) -> Iterable[tuple[object, object]] | None:
    """The containers in a container. Its content is asked for types as a whole: there may be very many tensors in it."""
    inside = get_children(value)
    if inside is None:
        return None
    if any(issubclass(kind, dict | list | tuple) for kind in {*map(type, get_values(value))}):
        return [(key, inner) for key, inner in inside if isinstance(inner, dict | list | tuple)]
    return ()


def walk(
    tree: object,
    get_children: GetChildren = get_children,
    *,
    max_values: int | None = None,
    max_depth: int | None = None,
) -> Iterator[tuple[LinkedPath, object]]:
    """A tree and everything in it, each with the way to it, in reading order. Depth costs memory, and no frames.

    A container is given and entered where it is met first. With `max_values` it is wherever it
    stands: raises `LimitExceeded` where that are more values, or where one contains itself; and
    where containers nest deeper than `max_depth`.

    >>> [(expand_path(way), value) for way, value in walk({"a": [1, 2]})]
    [((), {'a': [1, 2]}), (('a',), [1, 2]), (('a', 0), 1), (('a', 1), 2)]
    """
    met: dict[
        int, object
    ] = {}  # Containers that are not entered again. They are kept, so that the identity of each stays its own.
    around: list[tuple[Iterator[tuple[object, object]], LinkedPath, object]] = []
    level: Iterator[tuple[object, object]] = iter([(None, tree)])
    above: LinkedPath = None
    left = -1 if max_values is None else max_values
    while True:
        for key, value in level:
            way = (above, key) if around else None
            if not left:
                raise LimitExceeded(TOO_OFTEN, expected=max_values)
            left -= 1
            inner = get_children(value)
            if inner is None:
                yield way, value
            elif id(value) not in met:
                met[id(value)] = value
                yield way, value
                around.append((level, above, value))
                _check_depth(len(around), max_depth)
                level, above = iter(inner), way
                break
            elif max_values is not None:
                raise LimitExceeded(
                    f"{join_linked_path(way)[:KEY_CHARACTERS]}: a {type(value).__name__} that contains itself"
                )
        else:
            if not around:
                return
            level, above, value = around.pop()
            if max_values is not None:
                del met[id(value)]


def expand_paths(places: Iterable[tuple[LinkedPath, object]]) -> Iterator[tuple[Path, object]]:
    """What a walk gives, each with its path. Of what stands side by side, the way above is written out once."""
    above: LinkedPath = None
    before: Path = ()
    for way, value in places:
        if way is None:
            yield (), value
            continue
        if way[0] is not above:
            above, before = way[0], expand_path(way[0])
        yield (*before, to_path_key(way[1])), value


def _check_depth(found: int, depth: int | None) -> None:
    if depth is not None and found > depth:
        raise LimitExceeded(
            f"the state nests deeper than Limits(depth={depth})", expected=depth, found=found
        )


ReplaceLeaf = Callable[[Any, LinkedPath], object]
"""What is to stand in the place of a leaf, and how it is reached; the first way, where what holds it stands in several places."""

MakeContainer = Callable[[Any, list[Any], LinkedPath], object]
"""What is to stand in the place of a container, with what was made of its children, and how it is reached."""


def rebuild(
    tree: object,
    replace: ReplaceLeaf,
    *,
    get_children: GetChildren = get_plain_children,
    make_container: MakeContainer | None = None,
    max_values: int | None = None,
    max_depth: int | None = None,
) -> object:
    """A tree with other leaves. Depth costs memory, and no frames. What stands in several places is made once, and stands in all of
    them again. A container in which nothing changes stays the same object, unless it contains itself: then it contains what was
    made of it. With `max_values`, containers are made wherever they stand, and `LimitExceeded` is raised as by `walk`, also for
    `max_depth`."""
    done: dict[
        int, tuple[object, object]
    ] = {}  # By identity: containers, kept so that it stays theirs, and what was made of them.
    entered: dict[
        int, object
    ] = {}  # Containers that are being made: what stands for each in itself, None where nobody asked.
    around: list[tuple[Iterator[tuple[object, object]], LinkedPath, list[object], object]] = []
    level: Iterator[tuple[object, object]] = iter([(None, tree)])
    above: LinkedPath = None
    made: list[object] = []
    left = -1 if max_values is None else max_values
    while True:
        for key, value in level:
            way = (above, key) if around else None
            if not left:
                raise LimitExceeded(TOO_OFTEN, expected=max_values)
            left -= 1
            if id(value) in done:
                made.append(done[id(value)][1])
                continue
            inner = get_children(value)
            if inner is None:
                made.append(replace(value, way))
            elif id(value) in entered and not isinstance(value, tuple):
                if max_values is not None:
                    raise LimitExceeded(
                        f"{join_linked_path(way)[:KEY_CHARACTERS]}: a {type(value).__name__} that contains itself"
                    )
                if entered[id(value)] is None:
                    empty: object = (
                        copy_dict_with_items(value, {})
                        if isinstance(value, dict)
                        else []
                        if isinstance(value, list)
                        else value
                    )
                    entered[id(value)] = (
                        empty
                        if make_container is None or empty is value
                        else make_container(empty, [], way)
                    )
                made.append(entered[id(value)])
            else:
                # A tuple that contains itself does so through a dict or a list, which is not entered again.
                entered[id(value)] = None
                around.append((level, above, made, value))
                _check_depth(len(around), max_depth)
                level, above, made = iter(inner), way, []
                break
        else:
            if not around:
                return made[0]
            own, way = made, above
            level, above, made, value = around.pop()
            result, shell = (
                replace_children(value, own)
                if make_container is None
                else make_container(value, own, way),
                entered.pop(id(value), None),
            )
            if isinstance(shell, dict) and isinstance(result, dict) and shell is not value:
                for name, one in result.items():
                    shell[name] = one
                result = shell
            elif isinstance(shell, list) and isinstance(result, list):
                shell[:], result = result, shell
            if max_values is None:
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
            if len(calls) > MAX_CALLS:
                raise LimitExceeded(
                    f"the state contains itself, or nests deeper than {MAX_CALLS:,} levels",
                    expected=MAX_CALLS,
                )
        except StopIteration as done:
            calls.pop()
            result = done.value
    return cast(R, result)


def iterate_values(tree: object) -> Iterator[object]:
    """A tree and every value in its dicts, lists and tuples, in reading order: containers once, leaves wherever they stand.

    >>> list(iterate_values({"a": [1, 2]}))
    [{'a': [1, 2]}, [1, 2], 1, 2]
    """
    return (value for _, value in walk(tree))


def iterate_dict_leaves(tree: object) -> Iterator[tuple[str, object]]:
    """Everything in nested dicts that is no dict, with its dotted name.

    >>> [*iterate_dict_leaves({"a": {"x": 1}, "b": [2]})]
    [('a.x', 1), ('b', [2])]
    """
    places = walk(
        tree,
        lambda value: value.items() if isinstance(value, dict) else None,
        max_values=MAX_LEAVES,
    )
    return ((join_linked_path(way), value) for way, value in places if not isinstance(value, dict))


def iterate_leaves(tree: object, *, once: bool = False) -> Iterator[tuple[Path, object]]:
    """Everything in a tree that is no container with something in it, with its path. Containers are entered wherever they stand;
    with `once`, where they are met first."""
    places = walk(tree, get_leaf_children, max_values=None if once else MAX_LEAVES)
    return expand_paths((way, value) for way, value in places if not has_named_children(value))


def get_leaf_children(value: object) -> Iterable[tuple[object, object]] | None:
    """What is in a container whose children have names of their own."""
    return get_children(value) if has_named_children(value) else None


def has_named_children(value: object) -> bool:
    """Whether a value is a container with something in it, whose children have names of their own."""
    if isinstance(value, dict):
        return bool(value) and not isinstance(value, Counter)
    return type(value) in (list, tuple) and bool(value)


def have_named_children(values: Collection[object]) -> list[bool]:
    """Whether each value is entered, as by `has_named_children`. Values of which none is a container are not asked one by one."""
    if any(issubclass(kind, dict | list | tuple) for kind in {*map(type, values)}):
        return [*map(has_named_children, values)]
    return [False] * len(values)


def replace_children(container: Any, children: Sequence[object]) -> Any:  # noqa: ANN401  # the same kind of container
    """A container with other children in the places of its own; itself, where they are the same objects."""
    return (
        container
        if all(map(is_, children, get_values(container)))
        else copy_with_children(container, children, None)
    )


def copy_with_children(container: Any, children: Sequence[object], _: LinkedPath) -> Any:  # noqa: ANN401  # as `replace_children`
    """A new container with other children in the places of its own, whether they differ or not."""
    if isinstance(container, dict):
        return copy_dict_with_items(container, dict(zip(container, children, strict=True)))
    return type(container)(children)


def make_plain_container(container: Any, children: Sequence[object], _: LinkedPath) -> Any:  # noqa: ANN401  # as `replace_children`
    """A container with other children in the places of its own; a mapping of any class becomes a plain dict."""
    return (
        dict(zip(container, children, strict=True))
        if isinstance(container, Mapping)
        else type(container)(children)
    )


def copy_dict_with_items(
    kind: dict[object, object], items: Mapping[object, object]
) -> dict[object, object]:
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
