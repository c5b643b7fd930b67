"""Where the bytes lie: strips, boxes, and what the ranks of a mesh would read."""

from __future__ import annotations

import doctest
import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import holdfast
from holdfast.extras.reports import shards as module
from holdfast.extras.reports.shards import (
    HEADER,
    JOINED,
    TENSOR,
    UNREACHED,
    joined,
    mesh_of,
    stretches_of,
)
from tests.conftest import GOLDEN

FILES = sorted(path for path in (GOLDEN / "files").iterdir() if not path.name.startswith("."))


def test_the_examples():
    assert doctest.testmod(module).failed == 0


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_the_strips_of_a_file_are_all_of_it(path):
    found = holdfast.report(path).document["shards"]
    for file in (found or {"files": []})["files"]:
        strips = file["strips"]
        assert strips[0][0] == 0
        assert strips[-1][1] == file["nbytes"]
        assert all(a[1] == b[0] and a[0] < a[1] for a, b in itertools.pairwise(strips))


HELD = st.tuples(st.integers(0, 20_000), st.integers(1, 9000), st.integers(0, 9)).map(
    lambda t: (t[0], t[0] + t[1], t[2])
)


@given(st.lists(HELD, max_size=30), st.integers(2, 12))
def test_strips_have_no_gap(held, most):
    strips = stretches_of(held, 30_000)
    assert strips[0][0] == 0
    assert strips[-1][1] == 30_000
    assert all(a[1] == b[0] and a[0] < a[1] for a, b in itertools.pairwise(strips))
    for first, end, _ in held:
        assert all(
            kind == TENSOR for start, stop, kind, _ in strips if start < end and first < stop
        )
    fewer = list(joined(strips, most))
    assert (fewer[0][0], fewer[-1][1]) == (0, 30_000)
    assert all(a[1] == b[0] for a, b in itertools.pairwise(fewer))
    assert len(fewer) <= max(2 * most, len(strips) if len(strips) <= most else 0)


def test_many_tensors_are_few_strips(tmp_path):
    holdfast.save(
        {f"t{i}": np.zeros(1 + i % 7, np.float32) for i in range(9000)}, tmp_path / "m.safetensors"
    )
    (file,) = holdfast.report(tmp_path / "m.safetensors").document["shards"]["files"]
    assert 100 < len(file["strips"]) <= 4000
    assert JOINED in {kind for _, _, kind, _ in file["strips"]}


def test_dead_bytes_are_a_gap(tmp_path):
    torch = pytest.importorskip("torch")
    whole = torch.zeros(10_000)
    torch.save({"a": whole[:10], "b": whole[-10:]}, tmp_path / "t.pt")
    found = holdfast.report(tmp_path / "t.pt").document["shards"]
    assert found["gaps"] == 1
    assert [
        stop - start for start, stop, kind, _ in found["files"][0]["strips"] if kind == UNREACHED
    ] == [40_000 - 80]


@pytest.fixture
def sharded(tmp_path):
    state = {
        "w": np.arange(64, dtype=np.float32).reshape(8, 8),
        "v": np.arange(12, dtype=np.float16),
        "s": np.array(1, np.float32),
    }
    holdfast.save(state, tmp_path / "m.safetensors")
    holdfast.reshard(tmp_path / "m.safetensors", tmp_path / "step", mesh="dp=4", rules=["w: dp=0"])
    return tmp_path / "step"


def test_boxes_of_a_cut_tensor(sharded):
    document = holdfast.report(sharded).document
    boxes = document["shards"]["boxes"]
    assert boxes["offset"] == [[0, 0], [2, 0], [4, 0], [6, 0]]
    assert boxes["size"] == [[2, 8]] * 4
    assert boxes["file"] == [0, 1, 2, 3]
    assert len(set(boxes["tensor"])) == 1


@pytest.mark.parametrize("mesh", ["1", "2", "3", "4", "2x2", "4x3", "dp=2,tp=2", "16"])
def test_what_ranks_read(sharded, mesh):
    """The files that a rank reads are those that reading its slices opens."""
    found = holdfast.report(sharded, mesh=mesh).document["shards"]
    grid = list(mesh_of(mesh).values())
    assert len(found["mesh"]["ranks"]) == np.prod(grid)
    with holdfast.open(sharded) as checkpoint:
        for one, place in zip(
            found["mesh"]["ranks"], itertools.product(*map(range, grid)), strict=True
        ):
            nbytes, files = 0, set()
            for tensor in checkpoint.values():
                cut = tensor
                for axis, (at, size) in enumerate(zip(place, grid, strict=True)):
                    if axis < tensor.ndim:
                        step = -(-tensor.shape[axis] // size)
                        cut = cut[(slice(None),) * axis + (slice(at * step, (at + 1) * step),)]
                nbytes += cut.nbytes
                files |= {chunk.storage.key for chunk in cut.chunks if chunk.box.count}
            assert one["nbytes"] == nbytes
            assert [found["files"][number]["name"] for number in one["files"]] == sorted(files)


@pytest.mark.parametrize("mesh", ["0", "", "x", "2x", "-1", "5000", "a=0", "99999999"])
def test_meshes_that_are_none(sharded, mesh):
    with pytest.raises(holdfast.errors.BadPlacement):
        holdfast.report(sharded, mesh=mesh)


def test_what_frames_is_not_a_gap(sharded):
    for file in holdfast.report(sharded).document["shards"]["files"]:
        assert {kind for _, _, kind, _ in file["strips"]} == {TENSOR, HEADER}
