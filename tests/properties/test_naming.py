"""The names of the tensors of a state, opened or to be saved, against a slow recursive naming, over drawn graphs.

The graphs have containers in several places and inside of themselves, objects that share the dicts of their state, modules,
composites, leaves that a save converts or refuses, odd keys, and names that several tensors would have.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, namedtuple
from collections.abc import Iterator
from enum import Enum
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.core import leaves as walked
from holdfast.core.chunk import Storage
from holdfast.core.dtype import DTYPES
from holdfast.core.leaves import (
    FREE_STEPS,
    PLAIN_VALUE_TYPES,
    find_leaves,
    find_tensor_paths,
    name_tensors,
)
from holdfast.core.limits import Limits
from holdfast.core.opaque import Global, Opaque, Size
from holdfast.core.tensor import PLAIN_TRAITS as NO_TRAITS
from holdfast.core.tensor import Composite, LazyTensor
from holdfast.core.tree import Path, join_path, list_contents, to_path_key
from holdfast.engine.source import OpenSource
from holdfast.errors import LimitExceeded, Unsupported
from holdfast.stores.memory import MemoryStore
from tests.sampling import examples

SOURCE = OpenSource(MemoryStore({"f": bytes(64)}))
MANY = 400
Pair = namedtuple("Pair", "x y")


class Text(str, Enum):  # noqa: UP042  # of these, `str` and the text itself differ
    KEY = "a"


class Foreign:
    """A leaf of another library: what a save makes of it is `made`, and None is refused."""

    def __init__(self, made: object) -> None:
        self.made = made


def tensor() -> LazyTensor:
    return LazyTensor.contiguous(
        "", DTYPES.name("uint8"), (4,), Storage("f", 0, 4, home=SOURCE.store), SOURCE
    )


def composite(parts: list[str]) -> Composite:
    return Composite("sparse_coo", (2,), {part: tensor() for part in parts}, {}, NO_TRAITS)


def convert(value: object, path: Path) -> object:
    if not isinstance(value, Foreign):
        return value
    if value.made is None:
        raise Unsupported(f"refused at {join_path(path)}")
    return value.made


KEYS = st.one_of(
    st.sampled_from(["a", "b", "a.b", "", "0", "a#2"]), st.integers(0, 2), st.booleans(), st.none(),
    st.tuples(st.integers(0, 1)), st.sampled_from([2.5, b"x", Text.KEY, frozenset()]),
)  # fmt: skip
COMPOSITES = st.lists(st.sampled_from(["a", "b", "values"]), unique=True, max_size=2).map(composite)
MADE = st.one_of(st.builds(tensor), COMPOSITES, st.none(), st.just("kept"))
LEAVES = st.one_of(
    st.builds(tensor), st.builds(tensor), COMPOSITES, st.builds(Foreign, MADE), st.integers(0, 9), st.none(), st.text(max_size=1),
    st.just(Size([2, 3])), st.just(b"bytes"),
)  # fmt: skip


def _fill(
    draw: st.DrawFn,
    made: Opaque,
    pairs: list[tuple[object, object]],
    dicts: list[dict[object, object]],
) -> None:
    """Give an object a state of its own or another's, or make it a module."""
    form = draw(
        st.sampled_from(["own", "items", "shared", "two", "module"] if dicts else ["own", "items"])
    )
    pick = st.sampled_from(dicts) if dicts else st.nothing()
    if form == "own":
        made.state = {str(key): value for key, value in pairs}
        return
    made.entries += pairs[:2]
    made.items += [value for _, value in pairs[2:3]]
    made.args = tuple(value for _, value in pairs[3:])
    if form == "shared":
        made.state = draw(pick)
    elif form == "two":
        made.state = draw(pick), draw(pick)
    elif form == "module":
        groups = {name: draw(pick) for name in ("_parameters", "_buffers", "_modules")}
        made.state = {
            "training": True,
            **groups,
            "_non_persistent_buffers_set": draw(st.sets(st.sampled_from(["a", "b"]))),
        }


@st.composite
def graphs(draw: st.DrawFn) -> object:
    """A state in which containers of all kinds stand in several places, or inside of themselves."""
    kinds = st.sampled_from([dict, dict, OrderedDict, defaultdict, Counter, list, list, Opaque])
    pool: list[object] = []
    for kind in draw(st.lists(kinds, min_size=2, max_size=7)):
        pool.append(
            defaultdict(list)
            if kind is defaultdict
            else Opaque(Global("m", "C"))
            if kind is Opaque
            else kind()
        )
    leaves = draw(st.lists(LEAVES, min_size=1, max_size=4))
    cyclic = draw(st.booleans())
    for number, container in enumerate(pool):
        known = pool if cyclic else pool[number + 1 :]
        values = st.one_of(
            st.builds(tensor),
            st.sampled_from(leaves),
            *([st.sampled_from(known)] * 2 if known else []),
        )
        rows = st.one_of(
            st.lists(values, max_size=3).map(tuple),
            st.builds(Pair, values, values),
            st.tuples(st.tuples(values), values),
        )
        some = (
            draw(st.lists(st.one_of(values, values, values, rows), min_size=1, max_size=5))
            + pool[number + 1 : number + 2]
        )
        keys = draw(st.lists(KEYS, min_size=len(some), max_size=len(some)))
        if isinstance(container, list):
            container += some
        elif isinstance(container, Opaque):
            _fill(
                draw,
                container,
                [*zip(keys, some, strict=True)],
                [one for one in known if isinstance(one, dict)],
            )
        else:
            for key, value in zip(keys, some, strict=True):
                container[key] = value
    return draw(st.sampled_from([pool[0]] * 9 + [leaves[0]]))


class Slow:
    """Every tensor with its path, by a function that calls itself: the rules, and nothing that makes them fast."""

    def __init__(self, tree: object, *, opened: bool, depth: int, spare: int) -> None:
        self.opened, self.depth, self.spare = opened, depth, spare
        self.found: list[tuple[Path, object]] = []
        self.problems: list[str] = []
        self.left_out = 0
        self.converted: dict[int, tuple[str, object]] = {}
        self.nested = False
        self.beyond = not opened and type(tree) is not dict
        self._met: dict[int, bool] = {}
        """Containers, and whether there may be tensors in them."""
        self._visit(tree, (), [])

    def _visit(self, value: object, path: Path, around: list[tuple[object, set[int]]]) -> bool:
        """Whether there may be tensors in a value."""
        if type(value) is LazyTensor:
            self.found.append((path, value))
            return True
        if type(value) in PLAIN_VALUE_TYPES:
            return False
        held = self._held(value)
        if held is None:
            return not self.opened and self._leaf(value, path)
        owners = {id(owner) for owner, _ in held}
        inside = [pair for _, pairs in held for pair in pairs]
        if any(owners & others for _, others in around):
            if not self.opened and not any(
                isinstance(one, Opaque) for one in (value, *(one for one, _ in around))
            ):
                self._problem(path, f"a {type(value).__name__} that contains itself")
                return False
            return True
        if owners & self._met.keys():
            if not self.opened and self._met.get(id(value)) is False:
                return False
            self.spare -= 1 + len(inside)
            if self.spare < 0:
                self.left_out += 1
                return True
        if len(around) >= self.depth:
            if self.opened:
                raise LimitExceeded("too deep")
            self.problems.append(
                f"{join_path(path[:4])}…: nested deeper than Limits(depth={self.depth})"
            )
            return False
        self._look_at(value, inside, bool(around))
        self._met |= dict.fromkeys(owners, True)
        found = [
            self._visit(inner, (*path, to_path_key(key)), [*around, (value, owners)])
            for key, inner in inside
        ]
        self._met[id(value)] = any(found)
        return any(found)

    def _held(self, value: object) -> list[tuple[object, list[tuple[object, object]]]] | None:
        if isinstance(value, dict):
            return [(value, [*value.items()])]
        if isinstance(value, Opaque):
            return [(owner, [*pairs]) for owner, pairs in list_contents(value) or ()]
        if isinstance(value, list | tuple) and (self.opened or type(value) in (list, tuple)):
            return [(value, [*enumerate(value)])]
        return (
            [(value, [*value.parts.items()])]
            if isinstance(value, Composite) and self.opened
            else None
        )

    def _look_at(self, value: object, inside: list[tuple[object, object]], below: bool) -> None:
        keys, types = {type(key) for key, _ in inside}, {type(inner) for _, inner in inside}
        self.nested |= below
        self.beyond |= (
            type(value) is not dict or not keys <= {str} or not PLAIN_VALUE_TYPES.isdisjoint(types)
        )

    def _leaf(self, value: object, path: Path) -> bool:
        try:
            made = convert(value, path)
        except Unsupported as error:
            if id(value) not in self.converted:
                self._problem(path, error.message)
            made = value
        self.converted.setdefault(id(value), (join_path(path), made))
        if isinstance(made, LazyTensor):
            self.found.append((path, made))
        elif isinstance(made, Composite):
            self.nested = True
            self.found += [((*path, part), one) for part, one in made.parts.items()]
        else:
            self.beyond = True
        return isinstance(made, LazyTensor) or (isinstance(made, Composite) and bool(made.parts))

    def _problem(self, path: Path, what: str) -> None:
        self.problems.append(f"{join_path(path) or 'the state'}: {what}")

    def names(self) -> Iterator[tuple[str, str]]:
        """The name of each, and what it would be if no other had it."""
        taken: set[str] = set()
        for path, _ in self.found:
            base = join_path(path) if path else "tensor"
            name = next(
                name
                for number in count(1)
                if (name := f"{base}#{number}" if number > 1 else base) not in taken
            )
            taken.add(name)
            yield name, base


BUDGETS = st.one_of(st.just(MANY), st.integers(0, 40))
DEPTHS = st.one_of(st.just(100), st.integers(1, 4))


@settings(max_examples=examples(400), deadline=None)
@given(graphs(), BUDGETS, DEPTHS)
def test_an_opened_state_is_named_path_by_path(tree: object, spare: int, depth: int) -> None:
    try:
        slow = Slow(tree, opened=True, depth=depth, spare=spare)
    except LimitExceeded:
        with pytest.raises(LimitExceeded, match=f"nests deeper than Limits\\(depth={depth}\\)"):
            name_tensors(tree, Limits(depth=depth), spare - FREE_STEPS)
        return
    named = name_tensors(tree, Limits(depth=depth), spare - FREE_STEPS)
    names = [*slow.names()]
    assert [*named.tensors] == [name for name, _ in names]
    assert [*find_tensor_paths(tree, Limits(depth=depth), spare - FREE_STEPS).items()] == [
        (name, path) for (name, _), (path, _) in zip(names, slow.found, strict=True)
    ]
    assert [one.name for one in named.tensors.values()] == [*named.tensors]
    first: dict[int, LazyTensor] = {}
    for (_, own), one in zip(slow.found, named.tensors.values(), strict=True):
        assert one.chunks is own.chunks
        assert (one is own) is (first.setdefault(id(own), one) is one)
    notes = [
        f"two tensors are called {base!r}; the one at path {path!r} is listed as {name!r}"
        for (name, base), (path, _) in zip(names, slow.found, strict=True)
        if name != base
    ]
    if slow.left_out:
        notes.append(
            f"{slow.left_out:,} further references to shared containers were not listed by name; they are in the tree"
        )
    assert named.notes == notes


@settings(max_examples=examples(400), deadline=None)
@given(graphs(), BUDGETS, DEPTHS)
def test_a_state_to_be_saved_is_named_path_by_path(tree: object, spare: int, depth: int) -> None:
    slow = Slow(tree, opened=False, depth=depth, spare=spare)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(walked, "MAX_REPEATED_STEPS", spare)
        leaves = find_leaves(tree, [LazyTensor], convert, depth)
    assert leaves.names == [name for name, _ in slow.names()]
    assert [*map(id, leaves.values)] == [id(one) for _, one in slow.found]
    assert leaves.problems == slow.problems
    assert leaves.is_single_tensor is (
        type(tree) is LazyTensor or (isinstance(tree, Foreign) and type(tree.made) is LazyTensor)
    )
    assert (leaves.is_nested, leaves.has_other_values) == (slow.nested, slow.beyond)
    assert {ident: id(made) for ident, (_, made) in leaves.conversions.items()} == {
        ident: id(made) for ident, (_, made) in slow.converted.items()
    }
    became = {
        ident: (name, made)
        for ident, (name, made) in slow.converted.items()
        if isinstance(made, LazyTensor | Composite)
    }
    assert [(name, id(value)) for name, value in leaves.converted_leaves] == [
        (name, ident) for ident, (name, _) in became.items()
    ]
