"""Which rows share memory: storages and their homes; groups, ties and overlaps against slow and obvious answers."""

from __future__ import annotations

import pickle
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.sampling import examples
from tests.sharing import groups, ties

import holdfast
from holdfast.core.box import Box
from holdfast.core.chunk import Chunk, Storage
from holdfast.core.dtype import DTYPES
from holdfast.core.sharing import (
    find_overlapping_pairs,
    find_shared_rows,
    find_ties,
    group_overlapping_ranges,
    identify_view,
)
from holdfast.core.table import Table
from holdfast.core.tensor import AliasView, LazyTensor, Traits
from holdfast.core.value import replace
from holdfast.engine.computed import ComputedTensors
from holdfast.engine.files import tabulate
from holdfast.engine.source import OpenSource
from holdfast.stores.memory import MemoryStore

GOLDEN = Path(__file__).parents[1] / "golden" / "files"


class AlwaysEqual:
    """A home that says it is every other."""

    def __eq__(self, other: object) -> bool:
        return True

    def __hash__(self) -> int:
        return 0


class Made:
    """A store with one file of 64 bytes, and tensors over parts of it."""

    def __init__(self) -> None:
        self.source = OpenSource(MemoryStore({"f": bytes(64)}))

    def tensor(
        self, start: int = 0, nbytes: int = 16, traits: Traits | None = None, **storage: object
    ) -> LazyTensor:
        place = Storage("f", start, nbytes, home=self.source.store, **storage)
        made = LazyTensor.contiguous("", DTYPES.name("uint8"), (nbytes,), place, self.source)
        return made if traits is None else replace(made, traits=traits)


def table_of(tensors: dict[str, LazyTensor]) -> Table:
    return tabulate([*tensors], [*tensors.values()])


def by_storage(tensors: dict[str, LazyTensor], *, stored_aliases: bool = False) -> list[list[str]]:
    """The names over each storage, as the rows of a table tell; they are as the tensors tell."""
    table = table_of(tensors)
    shared = find_shared_rows([table], stored_aliases=stored_aliases)
    found: dict[int, list[str]] = {}
    for row, number in zip(*shared.storage_rows(), strict=True):
        found.setdefault(number, []).append(table.names[row])
    expected = groups(tensors, stored_aliases=stored_aliases)
    assert [*found.values()] == [*expected.values()]
    assert shared.total_nbytes() == sum(storage.nbytes for storage in expected)
    several = [
        (shared.find_storage(number, table.lazy_tensor(rows[0]), rows[0]), rows)
        for number, rows in shared.groups()
    ]
    told = [(storage, [table.names[row] for row in rows]) for storage, rows in several]
    assert told == [(storage, names) for storage, names in expected.items() if len(names) > 1]
    return [*found.values()]


def tied_names(tensors: dict[str, LazyTensor]) -> dict[str, str]:
    """Names with the first name of their view, as the rows of a table tell; they are as the tensors tell."""
    table = table_of(tensors)
    found = {table.names[row]: table.names[first] for row, first in find_ties(table).items()}
    assert found == ties(tensors)
    return found


def test_a_storage_is_its_range_in_its_home():
    home = AlwaysEqual()
    one = Storage("f", 0, 8, home=home)
    assert one == Storage("f", 0, 8, home=home)
    assert hash(one) == hash(Storage("f", 0, 8, location="cuda:3", label="data/7", home=home))
    assert one == Storage("f", 0, 8, location="cuda:3", label="data/7", home=home)
    others = [
        Storage("g", 0, 8, home=home),
        Storage("f", 1, 8, home=home),
        Storage("f", 0, 9, home=home),
        Storage("f", 0, 8, "big", home=home),
        Storage("f", 0, 8, crc32=7, home=home),
        Storage("f", 0, 8, home=AlwaysEqual()),
    ]
    assert all(one != other for other in others)
    assert len({one, *others}) == 7
    assert "home" not in repr(one)
    assert one.with_home(others[-1].home) == others[-1]
    assert one != "f"


def test_a_storage_is_never_without_a_home():
    with pytest.raises(TypeError, match="home"):
        Storage("f", 0, 8)


def test_stores_that_use_the_same_keys_share_nothing():
    original = Made().tensor()
    made = [
        ComputedTensors().make_computed_tensor(original, original.dtype, lambda array: array)
        for _ in range(2)
    ]
    assert made[0].chunks[0].storage.key == made[1].chunks[0].storage.key
    assert identify_view(made[0]) != identify_view(made[1])
    assert tied_names({"a": made[0], "b": made[1]}) == {}
    assert by_storage({"a": made[0], "b": made[1]}) == [["a"], ["b"]]


def test_groups_are_by_storage_and_ties_by_view():
    one, other = Made(), Made()
    whole = one.tensor()
    tensors = {
        "whole": whole,
        "elsewhere": other.tensor(),
        "again": whole.renamed("again"),
        "half": whole[8:],
        "half again": whole[8:],
        "as bytes of a sign": replace(whole, dtype=DTYPES.name("int8")),
        "negated": replace(whole, traits=Traits(neg=True)),
        "empty": one.tensor(nbytes=0),
        "also empty": one.tensor(nbytes=0),
        "no data": replace(whole, chunks=(), traits=Traits(meta=True)),
    }
    assert by_storage(tensors) == [
        ["whole", "again", "half", "half again", "as bytes of a sign", "negated"],
        ["elsewhere"],
    ]
    assert tied_names(tensors) == {"again": "whole", "half again": "half"}


def test_a_tensor_in_pieces_is_in_the_group_of_each():
    made = Made()
    rows = [made.tensor(start=start) for start in (0, 16)]
    chunks = tuple(
        Chunk(Box((16 * i,), (16 * i + 16,)), t.chunks[0].storage, 0, (8,))
        for i, t in enumerate(rows)
    )
    whole = LazyTensor("", DTYPES.name("uint8"), (32,), chunks, made.source)
    assert by_storage({"a": rows[0], "w": whole, "b": rows[1]}) == [["a", "w"], ["w", "b"]]
    assert tied_names({"a": rows[0], "w": whole, "v": whole}) == {"v": "w"}


def test_stored_aliases_count_as_what_they_were():
    made = Made()

    def copied(start: int, group: int, offset: int) -> LazyTensor:
        return made.tensor(start, traits=Traits(alias=AliasView(group, 64, offset, (8,))))

    tensors = {
        "a": copied(0, 0, 0),
        "b": copied(16, 0, 8),
        "c": copied(32, 1, 0),
        "d": made.tensor(48),
    }
    assert by_storage(tensors) == [["a"], ["b"], ["c"], ["d"]]
    assert by_storage(tensors, stored_aliases=True) == [["a", "b"], ["c"], ["d"]]
    found = groups(tensors, stored_aliases=True)
    assert [storage.nbytes for storage in found] == [64, 64, 16]
    assert [storage.label for storage in found][:2] == ["shared/0", "shared/1"]
    assert identify_view(tensors["a"], stored_alias=True) != identify_view(
        tensors["b"], stored_alias=True
    )
    assert tensors["b"].shared_chunks[0].offset == 8
    assert tensors["d"].shared_chunks is tensors["d"].chunks


@st.composite
def many_tensors(draw: st.DrawFn) -> dict[str, LazyTensor]:
    """Views of a few ranges of two stores, in one piece or in several, some of which were views before they were copied."""
    stores = [Made(), Made()]
    found: dict[str, LazyTensor] = {}
    for number in range(draw(st.integers(1, 10))):
        made = stores[draw(st.integers(0, 1))]
        one = made.tensor(
            draw(st.sampled_from([0, 16, 32])), draw(st.sampled_from([16, 16, 16, 0]))
        )
        match draw(
            st.sampled_from(["", "", "part", "dtype", "neg", "alias", "pieces", "first", "meta"])
        ):
            case "part":
                one = one[draw(st.integers(0, 2)) :: draw(st.integers(1, 3))]
            case "dtype":
                one = replace(one, dtype=DTYPES.name("int8"))
            case "neg":
                one = replace(one, traits=Traits(neg=True))
            case "alias":
                view = AliasView(draw(st.integers(0, 1)), 64, 8 * draw(st.integers(0, 2)), (8,))
                one = replace(one, traits=Traits(alias=view))
            case "pieces" if one.size:
                other = made.tensor(draw(st.sampled_from([0, 16, 32])))
                chunks = one.chunks[0], Chunk(Box((16,), (32,)), other.chunks[0].storage, 0, (8,))
                one = replace(one, shape=(32,), chunks=chunks)
            case "first":
                # Of a larger tensor only the first elements are here.
                one = replace(one, shape=(32,), chunks=one.chunks)
            case "meta":
                one = replace(one, chunks=(), traits=Traits(meta=True))
        found[f"t{number}"] = one.renamed(f"t{number}")
    return found


@settings(max_examples=examples(300), deadline=None)
@given(many_tensors(), st.booleans())
def test_rows_tell_what_tensors_tell(tensors, stored_aliases):
    by_storage(tensors, stored_aliases=stored_aliases)
    tied_names(tensors)


@settings(max_examples=examples(100), deadline=None)
@given(many_tensors(), st.integers(0, 10))
def test_several_tables_are_compared_as_one(tensors, cut):
    names = [*tensors]
    tables = [
        table_of({name: tensors[name] for name in part}) for part in (names[:cut], names[cut:])
    ]
    one, shared = find_shared_rows([table_of(tensors)]), find_shared_rows(tables)
    assert shared.rows == one.rows
    assert shared.ties() == one.ties()
    assert [rows for _, rows in shared.groups()] == [rows for _, rows in one.groups()]
    assert shared.total_nbytes() == one.total_nbytes()


def test_by_place_a_file_that_is_opened_twice_is_one(tmp_path):
    array = np.arange(8.0)
    holdfast.save({"a": array, "b": array, "c": array.copy()}, tmp_path / "m.pt")
    with holdfast.open(tmp_path / "m.pt") as one, holdfast.open(tmp_path / "m.pt") as other:
        tables = [table_of(dict(one)), table_of(dict(other))]
        assert find_shared_rows(tables).ties() == {1: 0, 4: 3}
        assert find_shared_rows(tables, by_identity=True).ties() == {1: 0, 3: 0, 4: 0, 5: 2}


spans = st.lists(
    st.tuples(st.integers(0, 30), st.integers(1, 8)).map(lambda pair: (pair[0], pair[0] + pair[1])),
    max_size=12,
)


@given(spans, st.booleans())
def test_disjoint_groups_are_what_hangs_together(pairs, touching):
    apart = [{i} for i in range(len(pairs))]
    for i, j in combinations(range(len(pairs)), 2):
        (a, b), (c, d) = pairs[i], pairs[j]
        if (a <= d and c <= b) if touching else (a < d and c < b):
            one, other = (next(group for group in apart if k in group) for k in (i, j))
            if one is not other:
                one |= other
                apart = [group for group in apart if group is not other]
    found = group_overlapping_ranges(
        [(*pair, i) for i, pair in enumerate(pairs)], touching=touching
    )
    assert sorted(map(sorted, apart)) == sorted(sorted(one.members) for one in found)
    for one in found:
        members = [pairs[i] for i in one.members]
        assert (one.start, one.stop) == (min(a for a, _ in members), max(b for _, b in members))


@given(spans)
def test_overlaps_are_found_whenever_there_are_any(pairs):
    found = list(find_overlapping_pairs((*pair, i) for i, pair in enumerate(pairs)))
    truth = {
        frozenset(p) for p in combinations(range(len(pairs)), 2) if _meet(pairs[p[0]], pairs[p[1]])
    }
    assert {frozenset(pair) for pair in found} <= truth
    # Everything that meets something before it is in a pair.
    assert {i for pair in found for i in pair} == {i for pair in truth for i in pair}


def _meet(one: tuple[int, int], other: tuple[int, int]) -> bool:
    return one[0] < other[1] and other[0] < one[1]


@pytest.mark.parametrize("suffix", [".pt", ".safetensors", ""])
def test_what_was_pickled_together_still_shares(tmp_path, suffix):
    array = np.arange(8.0)
    holdfast.save(tmp_path / f"m{suffix}", {"a": array, "b": array, "c": array.copy()})
    with holdfast.open(tmp_path / f"m{suffix}") as opened:
        sent = pickle.loads(pickle.dumps(dict(opened)))
        assert tied_names(sent) == tied_names(dict(opened)) == {"b": "a"}
        assert identify_view(sent["a"]) != identify_view(opened["a"]), (
            "another process has opened it for itself"
        )


def test_every_format_says_where_its_storages_lie():
    formats = set()
    for path in sorted(GOLDEN.rglob("*")):
        try:
            opened = holdfast.open(path)
        except holdfast.HoldfastError:
            continue  # a part of a checkpoint
        with opened:
            formats.add(opened.format)
            for tensor in opened.values():
                store = tensor.source.store
                homes = {id(storage.home) for storage in tensor.storages}
                assert homes <= {id(store), id(getattr(store, "below", store))}, (
                    f"{path}: {tensor.name}"
                )
    assert formats >= {
        "torch-zip",
        "torch-legacy",
        "torch-tar",
        "torchscript",
        "safetensors",
        "dcp",
    }
