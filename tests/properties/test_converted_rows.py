"""Conversions against what was saved: the same values, the bytes of a save, and for damage an error that says where it is."""

import json
import tempfile
from collections import OrderedDict
from pathlib import Path

import ml_dtypes
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

import holdfast
from holdfast.errors import HoldfastError
from tests.properties.many_states import many_states
from tests.sampling import examples

DTYPES = [
    np.float32,
    np.float16,
    ml_dtypes.bfloat16,
    np.int64,
    np.uint8,
    np.bool_,
    ml_dtypes.float8_e4m3fn,
    np.complex64,
]
ODD = ("empty", "tied", "large", "nested", "value", "view", "name")
SOURCES, TARGETS = ("a.safetensors", "a.pt", "a"), ("b.safetensors", "b.pt", "b")


@st.composite
def states(draw):
    state = draw(many_states(DTYPES, ODD, large=30_000))
    return OrderedDict(state) if draw(st.booleans()) else state


def content(path: Path) -> dict[str, bytes]:
    return {
        file.name: file.read_bytes()
        for file in ([path] if path.is_file() else sorted(path.iterdir()))
    }


def flat(value: object, name: str = "") -> dict[str, np.ndarray]:
    """The arrays of a state by their dotted names."""
    if isinstance(value, np.ndarray):
        return {name: value}
    items = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    return {
        inner: array
        for key, item in items
        for inner, array in flat(item, f"{name}.{key}" if name else str(key)).items()
    }


def read(path: Path) -> dict[str, np.ndarray]:
    """All values, one after the other."""
    with holdfast.open(path) as checkpoint:
        return {name: checkpoint[name].numpy() for name in checkpoint}


def assert_holds(path: Path, state: dict[str, object]) -> None:
    """Whether a checkpoint has the values of a state, and no others."""
    expected, found = flat(state), read(path)
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape), name
        assert found[name].tobytes() == array.tobytes(), name


def as_read(state: dict[str, object], source: Path) -> dict[str, object]:
    """The state as a format has it: safetensors has an order of its own, and only a pickle has one object under two names."""
    state = type(state)(state)
    if "tied" in state and source.suffix != ".pt":
        state["tied"] = state["tied"][...]
    if source.suffix != ".safetensors" or isinstance(state, OrderedDict):
        return state
    with holdfast.open(source) as checkpoint:
        return {name: state[name] for name in checkpoint}


def compare(state: dict[str, object], source: Path, target: Path) -> None:
    """A conversion against the state, and against a save of it."""
    saved = target.parent / "saved" / target.name
    saved.parent.mkdir()
    metadata = {"format": "pt"} if source.suffix == ".safetensors" and not target.suffix else {}
    # As `convert` does, whatever the format holds by itself.
    holdfast.save(as_read(state, source), saved, durable=False, metadata=metadata, keep_tree=True)
    done = holdfast.convert(source, target, durable=False)
    assert (done.done, done.tensors) == (
        True,
        sum(array.nbytes > 0 for array in flat(state).values()) - ("tied" in state),
    )
    assert_holds(target, state)
    assert content(target) == content(saved)


def tensor_at(path: Path, place: int) -> tuple[str, int] | None:
    """The tensor of a safetensors file that has this byte, and where its bytes begin; None for a byte of none."""
    raw = path.read_bytes()
    begin = 8 + int.from_bytes(raw[:8], "little")
    for name, entry in json.loads(raw[8:begin]).items():
        if (
            name != "__metadata__"
            and begin + entry["data_offsets"][0] <= place < begin + entry["data_offsets"][1]
        ):
            return name, begin + entry["data_offsets"][0]
    return None


def damaged_state(source: Path, target: Path, state: dict[str, object], damaged: int) -> None:
    """One bit is another: the error names tensor, file and offset; or the bit means nothing, and the values are those."""
    path = (
        source
        if source.is_file()
        else next(file for file in source.iterdir() if file.suffix == ".safetensors")
    )
    raw = bytearray(path.read_bytes())
    place = len(raw) - 1 - damaged % min(600, len(raw))
    hit = tensor_at(path, place) if path.suffix == ".safetensors" else None
    raw[place] ^= 1
    path.write_bytes(raw)
    error = None
    try:
        holdfast.convert(source, target, durable=False, tensors_only=True)
    except HoldfastError as caught:
        error = caught
    if error is None:
        assert hit is None, "a damaged tensor was converted"
        # A safetensors file has no checksum of its header: a tensor of another name is what it says.
        in_header = source.suffix == ".safetensors"
        assert_holds(target, read(source) if in_header else state)
        return
    assert not target.exists()
    assert error.file is not None
    assert error.offset is not None
    assert Path(error.file).name == path.name
    if hit is not None:
        arrays = flat(state)
        assert np.shares_memory(arrays[error.tensor], arrays[hit[0]])
        assert error.offset == hit[1]


@settings(deadline=None, max_examples=examples(40))
@given(
    states(),
    st.sampled_from(SOURCES),
    st.sampled_from(TARGETS),
    st.none() | st.integers(0, 1 << 20),
)
def test_as_saved(state, source, target, damaged):
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        try:
            holdfast.save(state, folder / source, durable=False)
        except HoldfastError:
            return  # not every format holds every state
        if damaged is None:
            compare(state, folder / source, folder / target)
        else:
            damaged_state(folder / source, folder / target, state, damaged)
