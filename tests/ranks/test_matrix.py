"""What any number of ranks saved loads on any other number, bit for bit: in three formats, cut in every way, in place."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import holdfast
from holdfast.torch.ranks.load_sharded import load_full, load_sharded
from tests.ranks.jobs import FORMATS, load
from tests.ranks.pool import WORLDS, Pool, good
from tests.ranks.states import NESTED, WHOLE
from tests.support import element_bytes

pytestmark = pytest.mark.timeout(120)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("loading", WORLDS)
@pytest.mark.parametrize("saving", WORLDS)
def test_every_world(pool: Pool, saved, saving: int, loading: int, format: str):
    good(pool.run(loading, load, str(saved(format, saving)), format != "safetensors"))


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("saving", WORLDS)
def test_one_process_has_it_all(saved, saving: int, format: str):
    state = load_full(saved(format, saving))
    for name, tensor in _tensors(state, format).items():
        assert (tensor.dtype, tensor.shape) == (WHOLE[name].dtype, WHOLE[name].shape), name
        assert element_bytes(tensor) == element_bytes(WHOLE[name]), name
    if format != "safetensors":
        group = state["optim"]["param_groups"][0]
        assert {key: group[key] for key in NESTED} == NESTED
        assert type(group["pair"]) is tuple
        assert (group["params"], state["epoch"]) == ([0, 1], 4)
        assert list(state["optim"]["state"]) == ([0, 1] if format == "native" else ["0", "1"]), (
            "DCP knows no other keys than text"
        )


def _tensors(state: object, format: str) -> dict[str, torch.Tensor]:
    if format == "safetensors":
        return dict(state)
    states = state["optim"]["state"]
    first, second = states.values()
    moved = {
        "col": first["exp_avg"],
        "uneven": second["exp_avg"],
        "plain": state["list"][0],
        "scalar": state["list"][1]["scalar"],
    }
    found = {**state["model"], **moved}
    assert found.keys() == WHOLE.keys()
    return found


READ = """
import hashlib, json, sys
import holdfast
found = {}
for path in sys.argv[1:]:
    with holdfast.open(path) as ckpt:
        found[path] = {name: hashlib.sha256(array.tobytes()).hexdigest() for name, array in ckpt.read().items()}
assert "torch" not in sys.modules
print(json.dumps(found))
"""


def test_without_torch(saved):
    paths = [saved("native", 3), saved("dcp", 4), saved("safetensors", 8)]
    done = subprocess.run(
        [sys.executable, "-c", READ, *map(str, paths)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    places = {
        "col": "optim.state.0.exp_avg",
        "uneven": "optim.state.1.exp_avg",
        "plain": "list.0",
        "scalar": "list.1.scalar",
    }
    for path, found in json.loads(done.stdout).items():
        nested = "safetensors" not in path
        names = {name: places.get(name, f"model.{name}") if nested else name for name in WHOLE}
        assert sorted(found) == sorted(names.values())
        for name, where in names.items():
            assert found[where] == hashlib.sha256(element_bytes(WHOLE[name])).hexdigest(), (
                path,
                name,
            )


@pytest.mark.parametrize("saving", [1, 8])
@pytest.mark.parametrize("format", FORMATS)
def test_verified_and_the_same_in_every_format(saved, format: str, saving: int):
    path = saved(format, saving)
    report = holdfast.verify(path)
    assert report.ok, report
    one, other = (_digests(path) for path in (path, saved("safetensors", 3)))
    assert one == other, "a digest does not depend on who wrote which part"


def _digests(path: Path) -> list[object]:
    with holdfast.open(path) as ckpt:
        return sorted(
            (tensor.shape, str(tensor.dtype), str(tensor.digest())) for tensor in ckpt.values()
        )


def test_nothing_else_is_left_behind(saved):
    for format in FORMATS:
        path = saved(format, 4)
        assert [p.name for p in path.parent.iterdir()] == [path.name]
        kinds = {p.suffix or p.name for p in path.iterdir()}
        wanted = {
            "native": {".safetensors", ".json"},
            "dcp": {".distcp", ".metadata", ".json"},
            "safetensors": {".safetensors"},
        }
        assert kinds == wanted[format]


def test_replicated_bytes_are_spread(saved):
    """Plain tensors are written once, by whoever has the least to write."""
    path = saved("native", 4)
    with holdfast.open(path) as ckpt:
        total = sum(tensor.nbytes for tensor in ckpt.values())
    sizes = sorted(p.stat().st_size for p in path.glob("*.safetensors"))
    assert len(sizes) == 4
    assert sum(sizes) < 1.1 * total + 4 * 3000, "headers, and every element once"


def test_one_process_loads_in_place_without_a_group(saved):
    wanted = {name: torch.zeros_like(WHOLE[name]) for name in WHOLE}
    report = load_sharded(saved("safetensors", 8), wanted)
    assert sorted(report.names) == sorted(WHOLE)
    assert all(element_bytes(wanted[name]) == element_bytes(WHOLE[name]) for name in WHOLE)
    assert report.needed_nbytes == sum(tensor.nbytes for tensor in WHOLE.values())
    assert report.missing == report.unexpected == ()
