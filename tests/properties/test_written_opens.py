"""What a writer writes its own reader opens: with `read_back` any state is refused before it is published, or opened again and the
same.

The states are made up (all dtypes, views, ties, odd keys and values, containers that are shared or contain themselves), the sizes
around limits are given. Every one goes through every writer: `save` in each format, `convert` from the first that held it to each
other, `save_sharded` in each format on one rank. Equality is decided by `same`.
"""

from __future__ import annotations

import enum
import os
import tempfile
from collections import OrderedDict, defaultdict, namedtuple
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import holdfast
import holdfast.torch as ht
from holdfast.errors import CannotHold, NotCommitted
from tests.formats.tree_strategies import leaves, texts, trees
from tests.parity.test_generated_states import PRINTABLE, pools, views
from tests.properties.same import assert_same
from tests.sampling import examples

SAVES = {
    "a.pt": {},
    "b.safetensors": {"keep_tree": True},
    "c-sharded": {"format": "safetensors", "keep_tree": True, "max_shard_size": 64},
    "d-native": {},
}
"""A file or folder for each format, and what `save` is told."""

Pair = namedtuple("Pair", "left right")


class Level(enum.IntEnum):
    LOW = 1


class Text(str):
    pass


@contextmanager
def refused_or(folder: Path) -> Iterator[None]:
    """What is refused leaves nothing behind: not at the target and not beside it."""
    before = sorted(os.listdir(folder))
    try:
        yield
    except (CannotHold, NotCommitted):
        assert sorted(os.listdir(folder)) == before


def check_state(state: object, *, ranks: bool = True) -> list[str]:
    """Put a state through every writer; the names of those that held it."""
    held: list[str] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for target, options in SAVES.items():
            with refused_or(folder):
                holdfast.save(state, folder / target, durable=False, read_back=True, **options)
                held.append(target)
                opened_again(folder / target, state)
        if held:
            for target, options in SAVES.items():
                again = folder / f"again-{target}"
                with refused_or(folder):
                    holdfast.convert(folder / held[0], again, durable=False, **options)
                    held.append(again.name)
                    opened_again(again, state)
        # A single rank opens nothing before it publishes, so it is not given what a reader refuses.
        for format in ("native", "dcp", "safetensors") if ranks and "d-native" in held else ():
            target = folder / f"ranks-{format}"
            with refused_or(folder):
                ht.save_sharded(target, state, format=format, durable=False)
                held.append(target.name)
                if format == "native":
                    opened_again(target, state)
                else:
                    with holdfast.open(target) as ckpt:
                        flat_again(ckpt, state, values=format == "dcp")
    return held


def opened_again(path: Path, state: object) -> None:
    with holdfast.open(path) as ckpt:
        # Of the formats, a torch file alone knows that two places have one container, and safetensors sorts what is flat.
        assert_same(state, ckpt.tree, shared=path.name == "a.pt", order=path.suffix == ".pt")


def flat_again(ckpt: holdfast.Checkpoint, state: object, *, values: bool) -> None:
    """The tensors by their names, and with DCP the values by theirs: it has text for keys, and one kind of mapping."""
    for path, leaf in flat(state, ()):
        name = ".".join(map(str, path))
        if isinstance(leaf, torch.Tensor | np.ndarray):
            if name in ckpt:
                assert_same(leaf, ckpt[name], classes=False)
        elif values and not has_foreign(leaf):
            found = ckpt.tree
            for step in path:
                found = found[step]
            assert_same(leaf, found)


def has_foreign(value: object) -> bool:
    """Whether there is an object in it that a value of a DCP checkpoint keeps as torch would pickle it."""
    if isinstance(value, Pair | Level | Text | type(...)) or type(value) is object:
        return True
    inside = [*value.keys(), *value.values()] if isinstance(value, dict) else value
    return isinstance(inside, list | tuple | set | frozenset) and any(map(has_foreign, inside))


def flat(value: object, path: tuple[object, ...]) -> Iterator[tuple[tuple[object, ...], object]]:
    if isinstance(value, dict) and (value or not path):
        for key, inner in value.items():
            yield from flat(inner, (*path, str(key)))
    elif isinstance(value, list) and any(
        isinstance(x, torch.Tensor | np.ndarray | dict | list) for x in value
    ):
        for i, inner in enumerate(value):
            yield from flat(inner, (*path, i))
    else:
        yield path, value


def nested_set(depth: int) -> object:
    made: object = 1
    for _ in range(depth):
        made = frozenset([made])
    return {made}


foreign = st.sampled_from([Pair(1, 2), Level.LOW, Text("a"), object(), defaultdict(lambda: 3), ...])
sizes = st.integers(0, 300).map(lambda n: -(1 << n)) | st.integers(0, 300).map(
    lambda n: (1 << n) - 1
)
rare = st.sampled_from([
    torch.eye(3).to_sparse(), torch.eye(4).to_sparse_csr(), torch.ones(2, dtype=torch.complex64).conj(),
    torch.zeros(2, device="meta"), torch.ones(3, dtype=torch.complex64).conj().imag, torch.ones(1).expand(4),
    torch.nn.Parameter(torch.ones(2)), torch.zeros(0, 7),
])  # fmt: skip
"""Tensors that are more than elements in a storage."""


@st.composite
def states(draw: st.DrawFn) -> dict:
    """A dict with tensors in it, whatever else is."""
    pool = draw(pools(PRINTABLE))
    tied = draw(views(pool))
    leaf = st.one_of(
        views(pool),
        st.just(tied),
        leaves(),
        sizes,
        *([foreign, rare] if draw(st.integers(0, 5)) == 0 else []),
    )
    made = draw(st.dictionaries(texts, trees(leaf), max_size=3))
    match draw(st.integers(0, 12)):
        case 0:
            made["shared"] = [shared := draw(trees(leaf, 1)), shared, {"again": shared}]
        case 1:
            made["cycle"] = cycle = [1]
            cycle.append({"inside": cycle})
        case 2:
            made["tied"] = (
                tied,
                OrderedDict(a=tied),
                torch.nn.Parameter(tied.detach()) if tied.is_floating_point() else tied,
            )
        case 3:
            made["numpy"] = draw(st.lists(leaves(), max_size=4))
        case 4:
            made["rare"] = [draw(rare), {"again": draw(rare)}]
    made.setdefault("w", tied)
    return made


@settings(max_examples=examples(30), deadline=None, suppress_health_check=list(HealthCheck))
@given(states())
def test_any_state(state):
    check_state(state)


def nested(depth: int, wrap: Callable[[object], object]) -> object:
    made: object = torch.ones(2)
    for _ in range(depth):
        made = wrap(made)
    return made


W = torch.arange(6.0).reshape(2, 3)
PAIRS = [[0, 1] for _ in range(5000)]
AROUND = {
    "pairs": {"pairs": PAIRS},
    "empty lists": {"lists": [[] for _ in range(8_000)]},
    "empty sets and tuples": {"sets": [(), set(), frozenset(), {}, OrderedDict()] * 1500},
    "many views": {f"v{i}": W[i % 2, i % 3 :] for i in range(700)},
    "tied": {f"v{i}": W for i in range(700)},
    **{
        f"integer of {n} bits": {"i": (1 << n) - 1, "j": -(1 << n)}
        for n in (53, 63, 64, 127, 128, 129, 136, 2039, 2040, 4000)
    },
    "integer of 4301 digits": {"i": 10**4300},
    **{
        f"key of {n}": {"k": {tuple(range(n)): 1}, "s": {frozenset(range(n))}}
        for n in (62, 63, 64, 65, 70)
    },
    "key of 9 by 9": {"k": {tuple(tuple(range(9)) for _ in range(9)): 1}},
    **{f"{n} float keys": {"k": {i + 0.5: i for i in range(n)}} for n in (100, 39_000, 60_000)},
    "scattered integers": {"k": {i * 7919 + (1 << 40) for i in range(20_000)}},
    "integers that collide": {"k": {i * ((1 << 61) - 1): 0 for i in range(12_000)}},
    "integers backwards": {
        "k": dict.fromkeys(reversed(range(20000)), 0),
        "s": set(range(20_000, 0, -1)),
    },
    "long texts as keys": {"k": {"x" * 5000 + str(i): i for i in range(200)}},
    **{f"lists, {n} deep": {"d": nested(n, lambda x: [x])} for n in (60, 61, 62, 63, 64, 65)},
    **{
        f"dicts, {n} deep": {"d": nested(n, lambda x: {"a": x, "b": 1})}
        for n in (30, 60, 62, 63, 64)
    },
    **{f"tuples, {n} deep": {"d": nested(n, lambda x: (x, 1, 2, 3))} for n in (30, 60, 62, 63, 64)},
    **{
        f"ordered dicts, {n} deep": {"d": nested(n, lambda x: OrderedDict(a=x, b=1))}
        for n in (30, 61, 62, 63)
    },
    **{f"sets, {n} deep": {"d": nested_set(n)} for n in (20, 31, 32, 60, 63)},
    "rank 64": {"t": torch.zeros([1] * 64)},
    "rank 65": {"t": torch.zeros([1] * 65)},
    "rank 65, meta": {"t": torch.zeros([1] * 65, device="meta")},
    "batches": {
        "a": list(range(1000)),
        "b": dict.fromkeys(range(1001)),
        "c": OrderedDict.fromkeys(map(str, range(2000))),
    },
    "names": {
        name: W + i
        for i, name in enumerate(
            ["", ".", "..", "/", "a/b", "\0", "\n", "data.pkl", "x" * 70_000, "A", "a"]
        )
    },
    "the name of the metadata": {"__metadata__": W},
    "names that meet": {"a.b": W, "a": {"b": W + 1}, 1: W + 2, "1": W + 3},
    "keys that look alike": {
        "k": {None: 1, "None": 2, True: 3, 2: 4, 2.5: 5, "2": 6, b"2": 7, (): 8}
    },
    "a long text": {"t": "ü" * 300_000, "b": bytes(300_000)},
    "no tensor": {"a": 1},
    "nothing": {},
    "a large empty tensor": {"t": torch.empty(0, 1 << 40), "u": torch.empty(1 << 31, 0)},
    "expanded": {"t": torch.ones(1).expand(1 << 6, 1 << 10)},
}
"""Sizes on either side of everything that a reader counts."""


DEAR = (
    "empty sets and tuples",
    "39000 float keys",
    "60000 float keys",
    "integers that collide",
    "integers backwards",
    "batches",
)
"""A DCP directory has an archive for each of their values, which is slow and nothing new."""


@pytest.mark.parametrize("name", AROUND)
def test_around_limits(name):
    check_state({"w": W, **AROUND[name]} if name != "nothing" else {}, ranks=name not in DEAR)


def test_a_pickle_of_more_than_its_limit_is_refused(tmp_path):
    state = {"w": W, "t": "x" * (holdfast.Limits().pickle_nbytes + 1)}
    with pytest.raises(CannotHold, match="pickle_nbytes"):
        holdfast.save(state, tmp_path / "a.pt")
    with pytest.raises(CannotHold, match="pickle_nbytes"):
        ht.save_sharded(tmp_path / "a", state, format="dcp")
    assert os.listdir(tmp_path) == []
