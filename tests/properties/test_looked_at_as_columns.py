"""`diff`, `verify` and `show` ask columns; here the same is found tensor by tensor, plainly."""

import tempfile
import zlib
from collections import OrderedDict
from pathlib import Path

import ml_dtypes
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

import holdfast
from holdfast.cli.show import document, show_table, show_tree
from holdfast.errors import HoldfastError
from holdfast.verbs.survey import survey
from tests.properties.many_states import many_states
from tests.sampling import examples
from tests.sharing import groups, ties

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
        st.lists(
            st.sampled_from(
                ["value", "gone", "new", "name", "order", "dtype", "shape", "attribute"]
            ),
            max_size=3,
        )
    ):
        arrays = [
            name for name, value in made.items() if isinstance(value, np.ndarray) and value.size
        ]
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
    files = (
        [path]
        if path.is_file()
        else [file for file in sorted(path.iterdir()) if file.suffix == ".safetensors"]
    )
    for place in places:
        file = files[place % len(files)]
        content = bytearray(file.read_bytes())
        content[-1 - place % min(3000, len(content))] ^= 1
        file.write_bytes(content)


def check_verified(path: Path) -> None:
    """The damage that is reported is that of storages whose bytes have another checksum than is recorded."""
    report = holdfast.verify(path, threads=1)
    try:
        checkpoint = holdfast.open(path)
    except HoldfastError:
        assert not report.ok
        return
    with checkpoint:
        expected: dict[tuple[str, int], tuple[str, ...]] = {}
        unchecked: list[str] = []
        for storage, names in groups(dict(checkpoint)).items():
            file = path / storage.key if path.is_dir() else path
            content = file.read_bytes()[storage.start : storage.start + storage.nbytes]
            if storage.nbytes and storage.crc32 is None:
                unchecked += names
            elif storage.nbytes and zlib.crc32(content) != storage.crc32:
                expected[str(file), storage.start] = tuple(names)
        assert {
            (one.file, one.offset): one.tensors for one in report.damaged if one.tensors
        } == expected
        assert (sorted(report.unchecked), report.tensors) == (sorted(unchecked), len(checkpoint))


def check_surveyed(path: Path) -> None:
    """What tensors share, and what they take, is as their storages say."""
    try:
        checkpoint = holdfast.open(path)
    except HoldfastError:
        return
    with checkpoint:
        found, tensors = survey(checkpoint), dict(checkpoint)
        over = groups(tensors)
        assert [(alias.names, alias.storage) for alias in found.aliases] == [
            (tuple(names), storage) for storage, names in over.items() if len(names) > 1
        ]
        assert found.nbytes == sum(storage.nbytes for storage in over)
        again = ties(tensors)
        assert {name: tie[2:] for name, tie in found.ties.items() if tie.startswith("= ")} == again
        inside = {name for names in over.values() for name in names[1:]} - again.keys()
        assert {name for name, tie in found.ties.items() if tie.startswith("in ")} == inside
        once = [tensor for name, tensor in tensors.items() if name not in again]
        dtypes = {tensor.dtype for tensor in tensors.values()}
        assert found.elements == {
            dtype: sum(one.size for one in once if one.dtype is dtype) for dtype in dtypes
        }
        assert all(
            (
                list(show_tree(checkpoint)),
                list(show_table(checkpoint, "layers.*")),
                document(checkpoint),
            )
        )


def check_compared(a: Path, b: Path, *, exact: bool) -> None:
    """What differs is what differs as arrays."""
    try:
        with holdfast.open(a) as first, holdfast.open(b) as second:
            left, right = first.read(), second.read()
    except HoldfastError:
        return
    read: list[int] = []
    found = holdfast.diff(a, b, exact=exact, find_renamed=False, threads=1, progress=read.append)
    assert found.removed == tuple(name for name in left if name not in right)
    assert found.added == tuple(name for name in right if name not in left)
    both = [name for name in left if name in right]
    outlines = {
        name: (left[name].dtype, left[name].shape) == (right[name].dtype, right[name].shape)
        for name in both
    }
    same = [
        name for name in both if outlines[name] and left[name].tobytes() == right[name].tobytes()
    ]
    assert ([change.name for change in found.changed], found.same) == (
        [name for name in both if name not in same],
        len(same),
    )
    assert bool(read) == any(left[name].size for name in both if outlines[name]) or not exact


@settings(deadline=None, max_examples=examples(40))
@given(
    st.data(),
    states(),
    st.sampled_from(KINDS),
    st.sampled_from(KINDS),
    st.booleans(),
    st.lists(st.integers(0, 1 << 20), max_size=2),
)
def test_as_tensor_by_tensor(data, state, first, second, exact, places):
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
        check_compared(folder / "a" / first, folder / "b" / second, exact=exact)
        damage(folder / "b" / second, places)
        check_verified(folder / "b" / second)
        check_surveyed(folder / "b" / second)
