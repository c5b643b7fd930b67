"""What a writer writes its own reader opens: any state is refused before anything is written, or opened again and the same.

The states are made up (all dtypes, views, ties, odd keys and values, containers that are shared or contain themselves), the sizes
around limits are given. Every one goes through every writer: `save` in each format, `convert` from the first that held it to each
other, `save_sharded` in each format on one rank. Equality is decided by `same`.
"""

from __future__ import annotations

import enum
import os
import shutil
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
from holdfast.errors import CannotHold, RanksFailed
from tests.formats.tree_strategies import leaves, texts, trees
from tests.parity.test_generated_states import PRINTABLE, pools, views
from tests.properties.same import assert_same

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
    """What is refused is refused with `CannotHold`, and leaves nothing behind: not at the target and not beside it."""
    before = sorted(os.listdir(folder))
    try:
        yield
    except CannotHold:
        assert sorted(os.listdir(folder)) == before
    except RanksFailed as error:
        assert isinstance(error.__cause__, CannotHold), repr(error.__cause__)
        assert sorted(os.listdir(folder)) == before


def check_state(state: object, *, cyclic: bool = False, writers: tuple[str, ...] = ("save", "convert", "sharded")) -> list[str]:
    """Put a state through every writer; the names of those that held it."""
    held: list[str] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for target, options in SAVES.items():
            with refused_or(folder):
                holdfast.save(folder / target, state, durable=False, **options)
                held.append(target)
                opened_again(folder / target, state)
        if held and "convert" in writers:
            for target, options in SAVES.items():
                again = folder / f"again-{target}"
                with refused_or(folder):
                    holdfast.convert(folder / held[0], again, durable=False, **options)
                    held.append(again.name)
                    opened_again(again, state, first=held[0])
        for format in ("native", "dcp", "safetensors") if "sharded" in writers and isinstance(state, dict) else ():
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


def opened_again(path: Path, state: object, *, first: str = "a.pt") -> None:
    with holdfast.open(path) as ckpt:
        # Of the formats, a torch file alone knows that two places have one container, and safetensors sorts what is flat.
        assert_same(state, ckpt.tree, shared=path.name == "a.pt", order=path.suffix == ".pt")


def flat_again(ckpt: holdfast.Checkpoint, state: object, *, values: bool) -> None:
    """The tensors by their names, and with DCP the values by theirs: it has text for keys, and one kind of mapping."""
    for path, leaf in flat(state, ()):
        name = ".".join(map(str, path))
        if isinstance(leaf, torch.Tensor | np.ndarray):
            if name in ckpt:
                assert_same(leaf, ckpt[name])
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
    elif isinstance(value, list) and any(isinstance(x, torch.Tensor | np.ndarray | dict | list) for x in value):
        for i, inner in enumerate(value):
            yield from flat(inner, (*path, i))
    else:
        yield path, value


foreign = st.sampled_from([Pair(1, 2), Level.LOW, Text("a"), object(), defaultdict(lambda: 3), ...])
sizes = st.integers(0, 300).map(lambda n: -(1 << n)) | st.integers(0, 300).map(lambda n: (1 << n) - 1)


@st.composite
def states(draw: st.DrawFn) -> dict:
    """A dict with tensors in it, whatever else is."""
    pool = draw(pools(PRINTABLE))
    tied = draw(views(pool))
    leaf = st.one_of(views(pool), st.just(tied), leaves(), sizes, *([foreign] if draw(st.integers(0, 9)) == 0 else []))
    made = draw(st.dictionaries(texts, trees(leaf), max_size=3))
    twist = draw(st.integers(0, 12))
    if twist == 0:
        made["shared"] = [shared := draw(trees(leaf, 1)), shared, {"again": shared}]
    elif twist == 1:
        made["cycle"] = cycle = [1]
        cycle.append({"inside": cycle})
    elif twist == 2:
        made["tied"] = (tied, OrderedDict(a=tied), torch.nn.Parameter(tied.detach()) if tied.is_floating_point() else tied)
    elif twist == 3:
        made["numpy"] = draw(st.lists(leaves(), max_size=4))
    made.setdefault("w", tied)
    return made


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(states())
def test_any_state(state):
    check_state(state)
