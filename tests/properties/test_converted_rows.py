"""Conversions by rows against those by objects: the same bytes, the same reports, the same errors."""

import tempfile
from collections import OrderedDict
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import holdfast
from holdfast.errors import HoldfastError
from holdfast.plan.saves import Gathered
from holdfast.rewrite import convert as module
from holdfast.rewrite.planned import Planned
from tests.properties.many_states import many_states

DTYPES = [np.float32, np.float16, ml_dtypes.bfloat16, np.int64, np.uint8, np.bool_, ml_dtypes.float8_e4m3fn, np.complex64]
ODD = ("empty", "tied", "large", "nested", "value", "view", "name")
SOURCES, TARGETS = ("a.safetensors", "a.pt", "a"), ("b.safetensors", "b.pt", "b")


@st.composite
def states(draw):
    state = draw(many_states(DTYPES, ODD, large=30_000))
    return OrderedDict(state) if draw(st.booleans()) else state


def content(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in ([path] if path.is_file() else sorted(path.iterdir()))}


def outcome(source: Path, target: Path) -> tuple[object, ...]:
    try:
        done = holdfast.convert(source, target, durable=False)
    except HoldfastError as error:
        return type(error), str(error), error.tensor, error.expected, error.found
    return replace(done, path="", free_nbytes=0), dict(done.crcs), content(target)


def compare(folder: Path, source: str, target: str) -> None:
    by_rows = outcome(folder / source, folder / "rows" / target)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_lay_out_rows", lambda *given, **more: None)
        assert by_rows == outcome(folder / source, folder / "objects" / target)


@settings(deadline=None, max_examples=40)
@given(states(), st.sampled_from(SOURCES), st.sampled_from(TARGETS), st.none() | st.integers(0, 1 << 20))
def test_as_by_objects(state, source, target, damaged):
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for side in ("rows", "objects"):
            (folder / side).mkdir()
        try:
            holdfast.save(state, folder / source, durable=False)
        except HoldfastError:
            return  # not every format holds every state
        if damaged is not None:
            path = folder / source
            path = path if path.is_file() else next(file for file in path.iterdir() if file.suffix == ".safetensors")
            content = bytearray(path.read_bytes())
            content[-1 - damaged % min(600, len(content))] ^= 1
            path.write_bytes(content)
        compare(folder, source, target)


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("target", TARGETS)
def test_many_tensors_go_by_rows(source, target, tmp_path, monkeypatch):
    state = {f"layers.{i}": np.full((2, 3), i, np.float32) for i in range(100)}
    holdfast.save(state, tmp_path / source)
    seen: list[bool] = []
    run = Planned.run

    def look(self: Planned, *given: object) -> object:
        seen.append(any(isinstance(segment, Gathered) for file in self.plan.files for segment in file.segments))
        return run(self, *given)

    monkeypatch.setattr(Planned, "run", look)
    holdfast.convert(tmp_path / source, tmp_path / target)
    holdfast.convert(tmp_path / source, tmp_path / target, limits=holdfast.Limits(pickle_nbytes="1GiB"), overwrite=True)
    assert seen == [True, True]
