"""Walks through nested states, and makes others of them.

A leaf is identified by its path, a tuple of keys and positions. Its dotted name is for people.
`core/leaves.py` gives tensors their names. All other code walks through a state with `walk`, makes
another one with `rebuild`, or walks through two at once with `unroll` (docs/design/039). None of
these recurses, so a deep state costs memory and no stack frames.

The attributes of an object are stored in dicts, and several objects may share one (`list_contents`).
A pickled `nn.Module` is walked as its `state_dict()` would be: parameters, then persistent buffers,
then submodules.
"""

from __future__ import annotations

import copy
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, chain, repeat
from operator import is_
from typing import Any, NamedTuple, TypeVar, cast

from holdfast.core.opaque import Opaque
from holdfast.core.tensor import Composite
from holdfast.errors import LimitExceeded

Path = tuple[str | int, ...]
"""The keys and positions that lead from the root of a tree to a value."""

R = TypeVar("R")

NAME_CHARACTERS_A_BYTE = 16
"""How many characters names may have for each stored byte. A key is stored once, and is a part of
many names."""

FREE_CHARACTERS = 4 << 20
"""How many characters names may have in every state, however small."""

MAX_KEY_CHARACTERS = 64
"""The length of a path key that was made of a key which is neither text nor an integer."""

MAX_LEAVES = 4_000_000
"""How many values are visited one by one. Those of a shared container count at every place."""

MAX_CALLS = 100_000
"""How deep states may be that are walked together. A deeper one contains itself."""

TOO_OFTEN = "this state refers to the same containers too often to be gone through leaf by leaf"

LONE_TENSOR_NAME = "tensor"
"""The name of a tensor that was saved without a container around it."""


def join_path(path: Sequence[str | int]) -> str:
    """Return the dotted name of a path.

    >>> join_path(("model", "layers", 0, "weight"))
    'model.layers.0.weight'
    """
    return ".".join(map(str, path))


def find_name_ends(path: Path) -> list[int]:
    """Return where in the dotted name of a path each of its keys ends.

    >>> find_name_ends(("model", "layers", 0))
    [5, 12, 14]
    """
    return [end - 1 for end in accumulate(len(str(key)) + 1 for key in path)]


ContainerContents = list[tuple[object, Iterator[tuple[str | int, object]]]]
"""The containers that a value is stored in, itself first. Each has its children with their keys in a
path."""


def list_contents(value: object) -> ContainerContents | None:
    """Return the containers that a value is stored in, with their children, or None for a leaf.

    A dict or a list is stored in itself alone. An object is stored in itself and in the dicts of its
    attributes, which other objects may share. The containers stay referenced by the tree, so they
    can be compared by identity. This takes the same time for containers of any length.
    """
    match value:
        case dict():
            return [(value, _with_path_keys(value.items()))]
        case list() | tuple():
            return [(value, iter(enumerate(value)))]
        case Opaque():
            # The children of an object are listed with the dicts that have them. The object itself
            # comes first, without children, because it must be recognized when it occurs again.
            module_contents = list_module_contents(value)
            if module_contents is not None:
                return [(value, iter(())), *module_contents]
            states = [(state, _with_path_keys(state.items())) for state in value.state_dicts()]
            other_contents = _with_path_keys(value.iterate_other_contents())
            return [(value, iter(())), *states, (value, other_contents)]
        case Composite():
            return [(value, iter(value.children()))]
        case _:
            return None


def _with_path_keys(
    items: Iterable[tuple[object, object]],
) -> Iterator[tuple[str | int, object]]:
    """Yield values with keys for a path instead of their own keys."""
    return ((to_path_key(key), value) for key, value in items)


def list_module_contents(opaque: Opaque) -> ContainerContents | None:
    """Return the dicts that `state_dict()` of a pickled `nn.Module` would walk through.

    Returns:
        The dicts of parameters, buffers and submodules. None if the object is not a module.
    """
    parameters = opaque.attribute("_parameters")
    buffers = opaque.attribute("_buffers")
    modules = opaque.attribute("_modules")
    # Every module has these three attributes. The class may be any subclass of `nn.Module`.
    if not all(isinstance(group, dict) for group in (parameters, buffers, modules)):
        return None

    skipped_names = opaque.attribute("_non_persistent_buffers_set")
    # Old versions of torch did not have this attribute, and a hostile file may have any value.
    if not isinstance(skipped_names, set | frozenset):
        skipped_names = frozenset[object]()

    # `state_dict()` leaves out a buffer that is not persistent. None is never a tensor, so a walk
    # for tensors leaves it out as well. A generator, so that nothing is copied.
    persistent_buffers = (
        (key, None if key in skipped_names else value) for key, value in buffers.items()
    )
    return [
        (parameters, _with_path_keys(parameters.items())),
        (buffers, _with_path_keys(persistent_buffers)),
        (modules, _with_path_keys(modules.items())),
    ]


def to_path_key(key: object) -> str | int:
    """Return the path key for a key of a dict.

    Text and integers stay as they are. Other keys become a text of limited length.
    """
    # A boolean is an integer for Python. In a path it is the text "True".
    if isinstance(key, str | int) and not isinstance(key, bool):
        return key
    if isinstance(key, float | bool | complex | bytes) or key is None:
        return repr(_shorten(key))[:MAX_KEY_CHARACTERS]
    # Only tuples of simple values are shown. All other keys, which may be objects, are called by
    # their type.
    if isinstance(key, tuple):
        # Many keys may be the same long tuple or contain the same long text. So both are shortened
        # before they are checked and copied: a key takes the same time, whatever it contains.
        items = key[:MAX_KEY_CHARACTERS]
        if all(isinstance(item, str | int | float | None) for item in items):
            return repr(tuple(map(_shorten, items)))[:MAX_KEY_CHARACTERS]
    return f"<{type(key).__name__}>"


def _shorten(value: object) -> object:
    """Return the start of a text or of bytes. All other values stay as they are."""
    if isinstance(value, str | bytes):
        return value[:MAX_KEY_CHARACTERS]
    return value


LinkedPath = tuple["LinkedPath", object] | None
"""A path as a linked list: the path of the container, and the key in it. The root has None.

A path of any length is made in the same time, and siblings share the path of their container.
"""

GetChildren = Callable[[Any], Iterable[tuple[object, object]] | None]
"""Returns the children of a container with their keys, or None for a leaf."""


def expand_path(linked_path: LinkedPath) -> Path:
    """Return a linked path as a tuple of keys.

    >>> expand_path(((None, "a"), 0))
    ('a', 0)
    """
    keys: list[str | int] = []
    while linked_path is not None:
        linked_path, key = linked_path
        keys.append(to_path_key(key))
    return tuple(reversed(keys))


def join_linked_path(linked_path: LinkedPath) -> str:
    """Return the dotted name of a linked path."""
    return join_path(expand_path(linked_path))


def get_children(value: object) -> Iterable[tuple[object, object]] | None:
    """Return the children of a dict, a list or a tuple of any class; None for other values."""
    if isinstance(value, dict):
        return value.items()
    if isinstance(value, list | tuple):
        return enumerate(value)
    return None


def get_mapping_children(value: object) -> Iterable[tuple[object, object]] | None:
    """Return the children of a mapping, a list or a tuple of any class; None for other values."""
    if isinstance(value, Mapping):
        return value.items()
    return get_children(value)


def get_keys_and_values(value: object) -> Iterable[tuple[object, object]] | None:
    """Return all keys and values of a dict, or the members of a list, a tuple or a set.

    This is for walks that must see the keys of dicts as well. Each result is a pair of None and a
    key or value, because keys have no path. An empty container counts as a leaf.
    """
    if not isinstance(value, dict | list | tuple | set | frozenset) or not value:
        return None
    members: Iterable[object] = value
    if isinstance(value, dict):
        members = chain(value, value.values())
    return zip(repeat(None), members, strict=False)


def get_plain_children(value: object) -> Iterable[tuple[object, object]] | None:
    """Return the children of a container that `replace_children` can make.

    These are dicts of any class, and plain lists and tuples. The result is None for other values.
    """
    if isinstance(value, dict) or type(value) in (list, tuple):
        return get_children(value)
    return None


def get_values(container: Any) -> Collection[Any]:  # noqa: ANN401  # a container of anything
    """Return the values of a dict, or a list or tuple itself."""
    return container.values() if isinstance(container, dict) else container


def get_inner_containers(value: object) -> Iterable[tuple[object, object]] | None:
    """Return the children of a container that are containers themselves; None for a leaf."""
    children = get_children(value)
    if children is None:
        return None
    # The types are checked first, because a container may have very many tensors.
    if not _have_container(get_values(value)):
        return ()
    return [(key, child) for key, child in children if isinstance(child, dict | list | tuple)]


def _have_container(values: Collection[object]) -> bool:
    """Return whether one of these values is a dict, a list or a tuple."""
    return any(issubclass(kind, dict | list | tuple) for kind in {*map(type, values)})


class _Level(NamedTuple):
    """A container that is walked."""

    container: Any
    path: LinkedPath
    children: Iterator[tuple[object, object]]
    """The children that were not visited yet."""
    results: list[object]
    """What `rebuild` made of the other children."""


def walk(
    tree: object,
    get_children: GetChildren = get_children,
    *,
    max_values: int | None = None,
    max_depth: int | None = None,
) -> Iterator[tuple[LinkedPath, object]]:
    """Yield a tree and everything in it, each with its path, in reading order.

    By default a container that occurs several times is yielded once. With `max_values` it is
    yielded, and its content too, wherever it occurs.

    Args:
        tree: The value to start with.
        get_children: Returns what is in a container, or None for a leaf.
        max_values: How many values may be yielded.
        max_depth: How many containers may be nested in each other.

    Raises:
        LimitExceeded: There are more values or levels, or `max_values` is given and a container
            contains itself.

    Examples:
        >>> [(expand_path(path), value) for path, value in walk({"a": [1, 2]})]
        [((), {'a': [1, 2]}), (('a',), [1, 2]), (('a', 0), 1), (('a', 1), 2)]
    """
    # By identity, the containers that are not entered again: all that were entered, or those of the
    # current path if `max_values` is given. They are kept here, so that no other object gets the
    # identity of one of them.
    entered_containers: dict[int, object] = {}
    # A stack instead of recursion: the containers around the current one. The first level has the
    # tree as its only child.
    outer_levels: list[_Level] = []
    level = _Level(None, None, iter([(None, tree)]), [])
    value_count = 0
    while True:
        for key, value in level.children:
            # Without outer levels, the value is the tree itself, whose path is None.
            path = (level.path, key) if outer_levels else None
            if value_count == max_values:
                raise LimitExceeded(TOO_OFTEN, expected=max_values)
            value_count += 1

            children = get_children(value)
            if children is not None and id(value) in entered_containers:
                # With `max_values`, only the containers of the path are in the dict. So this one
                # contains itself. Otherwise it may just occur again, and is skipped.
                if max_values is not None:
                    raise _build_cycle_error(path, value)
                continue
            yield path, value
            if children is not None:
                entered_containers[id(value)] = value
                outer_levels.append(level)
                _check_depth(len(outer_levels), max_depth)
                level = _Level(value, path, iter(children), [])
                # The iterator of the outer level goes on behind this child later.
                break
        else:
            # The current container has no children left.
            if not outer_levels:
                return
            if max_values is not None:
                del entered_containers[id(level.container)]
            level = outer_levels.pop()


def _build_cycle_error(path: LinkedPath, container: object) -> LimitExceeded:
    name = join_linked_path(path)[:MAX_KEY_CHARACTERS]
    return LimitExceeded(f"{name}: a {type(container).__name__} that contains itself")


def _check_depth(depth: int, max_depth: int | None) -> None:
    if max_depth is not None and depth > max_depth:
        raise LimitExceeded(
            f"the state nests deeper than Limits(depth={max_depth})",
            expected=max_depth,
            found=depth,
        )


def expand_paths(places: Iterable[tuple[LinkedPath, object]]) -> Iterator[tuple[Path, object]]:
    """Yield the values of a walk with their paths as tuples.

    Args:
        places: The values of a walk with their linked paths.
    """
    last_container_link: LinkedPath = None
    container_path: Path = ()
    for linked_path, value in places:
        # The root.
        if linked_path is None:
            yield (), value
            continue
        container_link, key = linked_path
        # Siblings follow each other and share the linked path of their container, which is expanded
        # once for all of them.
        if container_link is not last_container_link:
            last_container_link = container_link
            container_path = expand_path(container_link)
        yield (*container_path, to_path_key(key)), value


ReplaceLeaf = Callable[[Any, LinkedPath], object]
"""Receives a leaf and its path, and returns what replaces it. A leaf in a container that occurs
several times is replaced once, and has the first of its paths."""

MakeContainer = Callable[[Any, list[Any], LinkedPath], object]
"""Receives a container, its new children and its path, and returns the new container."""


def replace_children(
    container: Any,  # noqa: ANN401  # any container
    children: Sequence[object],
    _path: LinkedPath = None,
) -> Any:  # noqa: ANN401  # the same type of container
    """Return a container with new children. It is the same object if no child has changed.

    A function for `rebuild`, which passes the path as well.
    """
    if all(map(is_, children, get_values(container))):
        return container
    return copy_with_children(container, children, None)


def rebuild(
    tree: object,
    replace: ReplaceLeaf,
    *,
    get_children: GetChildren = get_plain_children,
    make_container: MakeContainer = replace_children,
    max_values: int | None = None,
    max_depth: int | None = None,
) -> object:
    """Return a tree with other leaves.

    A container that occurs several times is rebuilt once, and the result occurs at the same places.
    A container that contains itself is replaced by one that contains itself. With `max_values`,
    containers are rebuilt wherever they occur. This does not recurse, so a tree may nest deeply.

    Args:
        tree: The value to start with.
        replace: Returns what replaces a leaf.
        get_children: Returns what is in a container, or None for a leaf.
        make_container: Makes a container with new children. By default a container without a
            change stays the same object.
        max_values: How many values may be visited.
        max_depth: How many containers may be nested in each other.

    Raises:
        LimitExceeded: There are more values or levels, or `max_values` is given and a container
            contains itself.
    """
    # By identity, each container that is finished, with its result. The containers are kept here,
    # so that no other object gets the identity of one of them.
    finished: dict[int, tuple[object, object]] = {}
    # By identity, each container that is not finished. A container that contains itself also has a
    # shell: an empty container that stands for it inside of itself, and is filled at the end. All
    # others have None.
    shells: dict[int, object] = {}
    # A stack instead of recursion: the containers around the current one. The first level has the
    # tree as its only child.
    outer_levels: list[_Level] = []
    level = _Level(None, None, iter([(None, tree)]), [])
    value_count = 0
    while True:
        for key, value in level.children:
            # Without outer levels, the value is the tree itself, whose path is None.
            path = (level.path, key) if outer_levels else None
            if value_count == max_values:
                raise LimitExceeded(TOO_OFTEN, expected=max_values)
            value_count += 1

            if id(value) in finished:
                _, finished_result = finished[id(value)]
                level.results.append(finished_result)
                continue
            children = get_children(value)
            if children is None:
                level.results.append(replace(value, path))
            elif id(value) in shells and not isinstance(value, tuple):
                # The container is inside of itself.
                if max_values is not None:
                    raise _build_cycle_error(path, value)
                if shells[id(value)] is None:
                    shells[id(value)] = _make_shell(value, path, make_container)
                level.results.append(shells[id(value)])
            else:
                # A tuple cannot be filled later, so it has no shell and is entered a second time.
                # That ends, because a tuple can contain itself only through a dict or a list, which
                # is not entered a second time.
                shells[id(value)] = None
                outer_levels.append(level)
                _check_depth(len(outer_levels), max_depth)
                level = _Level(value, path, iter(children), [])
                break
        else:
            # The current container has no children left. In the first level the only result is the
            # rebuilt tree.
            if not outer_levels:
                return level.results[0]
            container = level.container
            new_container = make_container(container, level.results, level.path)
            # A tuple that was entered twice has no entry any more when it ends the second time.
            shell = shells.pop(id(container), None)
            result = _fill_shell(shell, new_container, container)
            if max_values is None:
                finished[id(container)] = container, result
            level = outer_levels.pop()
            level.results.append(result)


def _make_shell(container: object, path: LinkedPath, make_container: MakeContainer) -> object:
    """Make an empty container that stands for an unfinished one where that contains itself.

    Args:
        container: The container that is being rebuilt.
        path: The place where it contains itself.
        make_container: Makes a container, as in `rebuild`.

    Returns:
        The shell. A container that is neither a dict nor a list has none, and stays as it is.
    """
    if isinstance(container, dict):
        return make_container(copy_dict_with_items(container, {}), [], path)
    if isinstance(container, list):
        return make_container([], [], path)
    return container


def _fill_shell(shell: object, result: object, container: object) -> object:
    """Move the content of a finished container into its shell, if it has one.

    Args:
        shell: What stands for the container inside itself, or None if it does not contain itself.
        result: The finished container.
        container: The container that was rebuilt, with its old children.

    Returns:
        The shell with the content, or the result if there is no shell to fill.
    """
    # If `make_container` returned the container itself as a shell, its content must not change.
    if isinstance(shell, dict) and isinstance(result, dict) and shell is not container:
        # `Counter.update` would add to the counts instead of replacing them.
        for key, value in result.items():
            shell[key] = value
        return shell
    if isinstance(shell, list) and isinstance(result, list):
        shell[:] = result
        return shell
    return result


Unrolled = Generator[Any, Any, R]
"""A function that would call itself. It yields the call instead, and receives the result."""


def unroll(call: Unrolled[R]) -> R:
    """Run a recursive function without recursion, and return its result.

    The function is a generator. Where it would call itself, it yields the call, and the `yield`
    returns the result of that call: `length = yield count_leaves(child)`. So a deep state needs no
    stack frames. An error ends all calls: the function cannot catch an error of a call that it
    yielded.

    Args:
        call: The outermost call of the generator function.

    Raises:
        LimitExceeded: More than `MAX_CALLS` calls are nested.
    """
    # A stack of calls. Each waits for the result of the call behind it.
    calls: list[Unrolled[Any]] = [call]
    result: Any = None
    while calls:
        try:
            inner_call = calls[-1].send(result)
        except StopIteration as stop:
            # The last call has returned. Its result is sent to the call that yielded it.
            calls.pop()
            result = stop.value
            continue
        # A new generator can only receive None.
        calls.append(inner_call)
        result = None
        if len(calls) > MAX_CALLS:
            raise LimitExceeded(
                f"the state contains itself, or nests deeper than {MAX_CALLS:,} levels",
                expected=MAX_CALLS,
            )
    return cast(R, result)


def iterate_values(tree: object) -> Iterator[object]:
    """Yield a tree and all values in its dicts, lists and tuples, in reading order.

    A container that occurs several times is yielded once. Leaves are yielded wherever they occur.

    >>> list(iterate_values({"a": [1, 2]}))
    [{'a': [1, 2]}, [1, 2], 1, 2]
    """
    return (value for _, value in walk(tree))


def iterate_dict_leaves(tree: object) -> Iterator[tuple[str, object]]:
    """Yield all values in nested dicts that are not dicts, with their dotted names.

    >>> list(iterate_dict_leaves({"a": {"x": 1}, "b": [2]}))
    [('a.x', 1), ('b', [2])]
    """

    def get_dict_children(value: object) -> Iterable[tuple[object, object]] | None:
        if isinstance(value, dict):
            return value.items()
        return None

    # With a limit, the content of a dict is yielded at every place where it occurs.
    for path, value in walk(tree, get_dict_children, max_values=MAX_LEAVES):
        if not isinstance(value, dict):
            yield join_linked_path(path), value


def iterate_leaves(tree: object, *, once: bool = False) -> Iterator[tuple[Path, object]]:
    """Yield all leaves of a tree and its empty containers, with their paths.

    Args:
        tree: The tree.
        once: Whether to enter a container that occurs several times only at its first place.
    """
    # Without a limit, `walk` enters each container once.
    max_values = None if once else MAX_LEAVES
    places = walk(tree, get_leaf_children, max_values=max_values)
    return expand_paths((path, value) for path, value in places if not has_named_children(value))


def get_leaf_children(value: object) -> Iterable[tuple[object, object]] | None:
    """Return the children of a container whose children have names; None for other values."""
    return get_children(value) if has_named_children(value) else None


def has_named_children(value: object) -> bool:
    """Return whether a value is a container with children that have names of their own.

    These are dicts, plain lists and plain tuples that are not empty. A `Counter` is a leaf.
    """
    if isinstance(value, dict):
        return bool(value) and not isinstance(value, Counter)
    return type(value) in (list, tuple) and bool(value)


def have_named_children(values: Collection[object]) -> list[bool]:
    """Return `has_named_children` for each of these values.

    This is fast for very many values without a container among them.
    """
    if not _have_container(values):
        return [False] * len(values)
    return [*map(has_named_children, values)]


def copy_with_children(container: Any, children: Sequence[object], _path: LinkedPath) -> Any:  # noqa: ANN401  # any container
    """Return a new container with new children, even if no child has changed."""
    if isinstance(container, dict):
        return copy_dict_with_items(container, dict(zip(container, children, strict=True)))
    return type(container)(children)


def make_plain_container(container: Any, children: Sequence[object], _path: LinkedPath) -> Any:  # noqa: ANN401  # any container
    """Return a container with new children. A mapping of any class becomes a plain dict."""
    if isinstance(container, Mapping):
        return dict(zip(container, children, strict=True))
    return type(container)(children)


def copy_dict_with_items(
    original: dict[object, object], items: Mapping[object, object]
) -> dict[object, object]:
    """Return a dict of the same class with other items.

    It keeps what else the dict has: the default factory of a `defaultdict`, or the attributes of an
    `OrderedDict`, where torch keeps the versions of a `state_dict()`.

    Args:
        original: The dict, which does not change.
        items: The items of the new dict, in their order.
    """
    # The two usual classes need no copy of the old items.
    if type(original) is dict:
        return dict(items)
    if type(original) is OrderedDict:
        ordered = OrderedDict(items)
        vars(ordered).update(vars(original))
        return ordered
    # A subclass may need arguments to be made, so it is copied.
    copied = copy.copy(original)
    # With equal keys in the same order, the new values just replace the old ones.
    if list(copied) != list(items):
        copied.clear()
    # `Counter.update` would add to the counts instead of replacing them.
    for key, value in items.items():
        copied[key] = value
    return copied
