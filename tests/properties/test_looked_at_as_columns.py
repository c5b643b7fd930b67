"""`diff`, `verify` and `show` of many tensors by columns against the way of objects: the same reports, the same errors."""

import tempfile
import tracemalloc
from collections import OrderedDict
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import holdfast
from holdfast.cli.document import document
from holdfast.cli.show import show_table, show_tree
from holdfast.core.tensor import LazyTensor
from holdfast.core.value import replace
from holdfast.errors import HoldfastError
from holdfast.inspect import diff, side, storage_rows
from holdfast.inspect.verify import VerifyReport
from holdfast.plan.files import FileStorages
from tests.properties.many_states import many_states

DTYPES = [np.float32, np.float16, ml_dtypes.bfloat16, np.int64, np.uint8, np.bool_]
KINDS = ("x.safetensors", "x.pt", "x", "shards")
ODD = ("empty", "tied", "large", "nested", "value", "view", "ordered", "bare")


def states():
    return many_states(DTYPES, ODD, large=1_200_000, below=2)


@st.composite
def changed(draw, state):
    """The state with some changes."""
    made = type(state)(state)
    vars(made).update(vars(state)) if isinstance(state, OrderedDict) else None
    for change in draw(
        st.lists(st.sampled_from(["value", "gone", "new", "name", "order", "dtype", "shape", "attribute"]), max_size=3)
    ):
        arrays = [name for name, value in made.items() if isinstance(value, np.ndarray) and value.size]
        name = draw(st.sampled_from(arrays))
        array = made[name].copy()
        match change:
            case "value":
                array.reshape(-1).view(np.uint8)[-1] ^= 1
                made[name] = array
            case "gone":
                del made[name]
            case "new":
                made["new"] = np.arange(7)
            case "name":
                made["other"] = made.pop(name)
            case "order":
                made[name] = made.pop(name)
            case "dtype":
                made[name] = array.astype(np.float64)
            case "shape":
                made[name] = array.reshape(-1)
            case "attribute" if isinstance(made, OrderedDict):
                made._metadata = {"": {"version": 2}}
        if not made:
            return state
    return made


def save(state: object, path: Path) -> None:
    options = {"format": "safetensors", "max_shard_size": 1000} if path.name == "shards" else {}
    holdfast.save(state, path, durable=False, **options)


def damage(path: Path, places: list[int]) -> None:
    files = [path] if path.is_file() else [file for file in sorted(path.iterdir()) if file.suffix == ".safetensors"]
    for place in places:
        file = files[place % len(files)]
        content = bytearray(file.read_bytes())
        content[-1 - place % min(3000, len(content))] ^= 1
        file.write_bytes(content)


def outcome(verb, *given, **options):
    told: list[int] = []
    try:
        found = verb(*given, **options, progress=told.append)
    except HoldfastError as error:
        return type(error), str(error), error.tensor, error.expected, error.found
    return replace(found, seal=None) if isinstance(found, VerifyReport) else found, sum(told)


def shown(path: Path, *, progress: object) -> tuple[object, ...]:
    """What `holdfast show` has to say, in three ways."""
    with holdfast.open(path) as checkpoint:
        return list(show_tree(checkpoint)), list(show_table(checkpoint, "layers.*")), document(checkpoint)


def by_objects(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(storage_rows, "FEW", 1 << 60)
    patch.setattr(diff, "find_alike", lambda a, b, names: None)
    of = side.Side.of.__func__
    patch.setattr(side.Side, "of", classmethod(lambda cls, checkpoint: replace(of(cls, checkpoint).made(), flat=False)))


def compare(verb, *given, **options) -> None:
    by_columns = outcome(verb, *given, **options)
    with pytest.MonkeyPatch.context() as patch:
        by_objects(patch)
        assert by_columns == outcome(verb, *given, **options)


@settings(deadline=None, max_examples=40)
@given(
    st.data(),
    states(),
    st.sampled_from(KINDS),
    st.sampled_from(KINDS),
    st.booleans(),
    st.lists(st.integers(0, 1 << 20), max_size=2),
)
def test_as_by_objects(data, state, first, second, exact, places):
    other = data.draw(changed(state))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for part in ("a", "b"):
            (folder / part).mkdir()
        try:
            save(state, folder / "a" / first)
            save(other, folder / "b" / second)
        except HoldfastError:
            return  # not every format holds every state
        damage(folder / "b" / second, places)
        compare(holdfast.verify, folder / "b" / second, threads=1)
        compare(shown, folder / "b" / second)
        compare(holdfast.diff, folder / "a" / first, folder / "b" / second, exact=exact, threads=1)


@pytest.mark.parametrize("kind", KINDS)
def test_no_tensor_is_made_of_what_is_the_same(kind, tmp_path, monkeypatch):
    state = {f"layers.{i}": np.full((2, 3), i, np.float32) for i in range(100)}
    save(state, tmp_path / kind)
    (tmp_path / "other").mkdir()
    save(state | {"layers.7": np.zeros((2, 3), np.float32)}, tmp_path / "other" / kind)
    made: list[str] = []
    contiguous, storage = LazyTensor.contiguous.__func__, FileStorages.storage

    def noted(name: str, tensor: object) -> object:
        made.append(name)
        return tensor

    monkeypatch.setattr(LazyTensor, "contiguous", classmethod(lambda cls, name, *rest: noted(name, contiguous(cls, name, *rest))))
    monkeypatch.setattr(FileStorages, "storage", lambda self, n, kind: noted(self.names[n], storage(self, n, kind)))
    assert holdfast.verify(tmp_path / kind).ok
    found = holdfast.diff(tmp_path / kind, tmp_path / "other" / kind, exact=True)
    assert ([change.name for change in found.changed], found.same) == (["layers.7"], 99)
    # Of each kind one is made, to tell how a header has it; of the first of a pickle, storages are tensors without a name.
    assert set(made) <= {"layers.7", "layers.0", ""}


def peak(job) -> int:
    """The most memory that Python has at a time."""
    tracemalloc.start()
    try:
        job()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_looking_takes_little_more_memory_than_opening(tmp_path):
    """Tensors that were made would take as much again as all that is kept of them."""
    count = 1500
    state = {f"layers.{i // 10}.experts.{i % 10}.w": np.full((16,), i, np.float32) for i in range(count)}
    path = tmp_path / "x.pt"
    save(state, path)

    def opened() -> None:
        with holdfast.open(path) as checkpoint:
            assert len(list(checkpoint)) == count

    def show() -> None:
        with holdfast.open(path) as checkpoint:
            assert list(show_tree(checkpoint))

    for job in (opened, show, lambda: holdfast.verify(path), lambda: holdfast.diff(path, path)):
        job()  # what is imported, and made once, is no part of it
    one = peak(opened)
    # The bytes themselves are in memory when they are summed: of so few, all at once.
    assert peak(lambda: holdfast.verify(path)) < 1.5 * one + path.stat().st_size
    assert peak(show) < 1.7 * one
    assert peak(lambda: holdfast.diff(path, path)) < 2.3 * one
