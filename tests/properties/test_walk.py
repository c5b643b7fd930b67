"""The one walk and the one rebuild of nested states, against slow recursive ones, over drawn trees with sharing and cycles."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, namedtuple
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.core.tree import (
    GetChildren,
    LinkedPath,
    Path,
    expand_path,
    get_children,
    get_inner_containers,
    get_plain_children,
    iterate_values,
    rebuild,
    to_path_key,
    walk,
)
from holdfast.errors import LimitExceeded

Point = namedtuple("Point", "x y")
KEYS = st.one_of(st.sampled_from("abc"), st.integers(0, 3), st.tuples(st.integers(0, 1)), st.none())
LEAVES = st.one_of(
    st.integers(0, 9),
    st.sampled_from(["t", "u"]),
    st.none(),
    st.builds(Point, st.integers(0, 2), st.just(1)),
)
MOST = 300


@st.composite
def graphs(draw: st.DrawFn, *, cyclic: bool = True) -> object:
    """A tree of containers of all kinds, some of them in several places, or inside of themselves."""
    pool: list[object] = []
    for _ in range(draw(st.integers(1, 6))):
        kind = draw(st.sampled_from([dict, OrderedDict, defaultdict, Counter, list]))
        pool.append(defaultdict(list) if kind is defaultdict else kind())
        if kind is OrderedDict and draw(st.booleans()):
            vars(pool[-1])["_metadata"] = {"version": 1}
    for number, container in enumerate(pool):
        known = pool if cyclic else pool[number + 1 :]
        values = st.one_of(LEAVES, *([st.sampled_from(known)] if known else []))
        values = st.one_of(
            values, st.lists(values, max_size=3).map(tuple), st.tuples(st.tuples(values), values)
        )
        if isinstance(container, list):
            container += draw(st.lists(values, max_size=4))
        else:
            for key, value in draw(st.dictionaries(KEYS, values, max_size=4)).items():
                container[key] = value
    return pool[0]


def slow_walk(value: object, path: Path, seen: set[int]) -> Iterator[tuple[Path, object]]:
    inside = get_children(value)
    if inside is None:
        yield path, value
    elif id(value) not in seen:
        seen.add(id(value))
        yield path, value
        for key, inner in inside:
            yield from slow_walk(inner, (*path, to_path_key(key)), seen)


@given(graphs())
def test_every_value_once_in_reading_order(tree: object) -> None:
    expected = [(path, id(value)) for path, value in slow_walk(tree, (), set())]
    assert [(expand_path(way), id(value)) for way, value in walk(tree)] == expected
    assert [id(value) for value in iterate_values(tree)] == [number for _, number in expected]
    containers = [
        id(value) for _, value in slow_walk(tree, (), set()) if get_children(value) is not None
    ]
    assert [id(value) for _, value in walk(tree, get_inner_containers)] == containers


def slow_places(
    value: object, path: Path, above: frozenset[int], inside: GetChildren = get_children
) -> Iterator[tuple[Path, object]]:
    yield path, value
    inner = inside(value)
    if inner is not None and id(value) in above:
        raise LimitExceeded("contains itself")
    for key, one in inner or ():
        yield from slow_places(one, (*path, to_path_key(key)), above | {id(value)}, inside)


def first_of(places: Iterator[tuple[Path, object]]) -> list[object]:
    """The first places of a walk, and whether it was stopped before the last."""
    found: list[object] = []
    try:
        for path, value in places:
            if len(found) == MOST:
                raise LimitExceeded("too many")
            found.append((path, id(value)))
    except LimitExceeded:
        found.append("stopped")
    return found


@given(graphs())
def test_every_place_of_every_value(tree: object) -> None:
    found = first_of((expand_path(way), value) for way, value in walk(tree, max_values=MOST))
    expected = first_of(slow_places(tree, (), frozenset()))
    # The place at which a container stands in itself is given by the slow walk only.
    assert found == expected or (expected[-1] == "stopped" and found == [*expected[:-2], "stopped"])


def slow_rebuild(value: object, made: dict[int, object]) -> object:
    """Everything made again, with other leaves."""
    if id(value) in made:
        return made[id(value)]
    if isinstance(value, dict):
        copy: dict[object, object] = value.copy()
        copy.clear()
        if isinstance(value, OrderedDict):
            vars(copy).update(vars(value))
        made[id(value)] = copy
        for key, inner in value.items():
            copy[key] = slow_rebuild(inner, made)
        return copy
    if type(value) is list:
        rows: list[object] = []
        made[id(value)] = rows
        rows += [slow_rebuild(inner, made) for inner in value]
        return rows
    return (
        tuple([slow_rebuild(inner, made) for inner in value])
        if type(value) is tuple
        else other(value)
    )


def other(value: object) -> object:
    return f"other {value}" if value == "t" or isinstance(value, int) else value


def alike(a: object, b: object) -> bool:
    """Whether two graphs are the same, kind by kind, and share what they share in the same places."""
    pairs: dict[int, int] = {}
    compared: set[tuple[int, int]] = set()
    waiting = [(a, b)]
    while waiting:
        one, two = waiting.pop()
        if (id(one), id(two)) in compared:
            continue
        compared.add((id(one), id(two)))
        inside = get_plain_children(one)
        if inside is None:
            if type(one) is not type(two) or one != two:
                return False
            continue
        # Of tuples, there may be one more than there were, where they contain themselves.
        if not isinstance(one, tuple) and pairs.setdefault(id(one), id(two)) != id(two):
            return False
        mine, theirs = list(inside), list(get_plain_children(two) or ())
        if type(one) is not type(two) or [key for key, _ in mine] != [key for key, _ in theirs]:
            return False
        if isinstance(one, OrderedDict) and isinstance(two, OrderedDict) and vars(one) != vars(two):
            return False
        waiting += [(x, y) for (_, x), (_, y) in zip(mine, theirs, strict=True)]
    return True


@given(graphs())
def test_a_tree_with_other_leaves(tree: object) -> None:
    made, expected = rebuild(tree, lambda value, way: other(value)), slow_rebuild(tree, {})
    assert alike(expected, made)
    assert alike(made, expected)


@given(graphs(cyclic=False))
def test_what_does_not_change_is_the_same_object(tree: object) -> None:
    assert rebuild(tree, lambda value, way: value) is tree
    made = rebuild(tree, lambda value, way: other(value))
    for (_, one), (_, two) in zip(
        walk(tree, get_plain_children, max_values=10**6),
        walk(made, get_plain_children, max_values=10**6),
        strict=True,
    ):
        if get_plain_children(one) is not None:
            changed = any(
                other(leaf) is not leaf
                for _, leaf in walk(one, get_plain_children)
                if get_plain_children(leaf) is None
            )
            assert (one is two) is not changed


@given(graphs(cyclic=False))
def test_leaves_are_replaced_at_the_way_to_them(tree: object) -> None:
    found: list[tuple[Path, object]] = []

    def note(value: object, way: LinkedPath) -> object:
        found.append((expand_path(way), value))
        return value

    rebuild(tree, note, max_values=10**6)
    assert found == [
        entry
        for entry in slow_places(tree, (), frozenset(), get_plain_children)
        if get_plain_children(entry[1]) is None
    ]


def test_a_bomb_of_shared_containers_is_gone_through_once() -> None:
    level: object = ["t"]
    for _ in range(60):
        level = [level] * 10
    assert sum(1 for _ in walk(level)) == 62
    made = rebuild(level, lambda value, way: "u")
    assert [value for _, value in walk(made)][-1] == "u"
    with pytest.raises(LimitExceeded, match="too often"):
        list(walk(level, max_values=1000))
