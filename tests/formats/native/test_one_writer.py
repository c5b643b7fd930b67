"""One process, a mesh and ranks write the same native directory: their manifests say the same of the same state."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import holdfast
from holdfast.verbs.reshard import reshard

STATE = {
    "a": np.arange(48, dtype=np.float32).reshape(8, 6),
    "é": np.arange(7, dtype=np.int16),
    "scalar": np.array(3, np.int64),
    "none": np.empty((0, 4), np.float32),
}
INDEX = "model.safetensors.index.json"


def written(folder: Path, who: str, rules: tuple[str, ...] = ("*: replicate",)) -> Path:
    match who:
        case "process":
            holdfast.save(STATE, folder / who, format="native")
        case "mesh":
            holdfast.save(STATE, folder / "source", format="native")
            reshard(folder / "source", folder / who, mesh="tp=2", rules=rules)
        case "ranks":
            pytest.importorskip("torch")
            from holdfast.torch import save_sharded

            save_sharded(folder / who, STATE)
    return folder / who


def said(folder: Path) -> dict[str, object]:
    """What a manifest says, but for the lengths of headers: where the chunks lie counted from the first one in each file."""
    document = json.loads((folder / "holdfast.json").read_text())
    begins: dict[int, int] = {}
    for tensor in document["tensors"].values():
        for chunk in tensor["chunks"]:
            begins[chunk["file"]] = min(
                chunk["bytes"][0], begins.get(chunk["file"], chunk["bytes"][0])
            )
    for tensor in document["tensors"].values():
        for chunk in tensor["chunks"]:
            chunk["bytes"] = [at - begins[chunk["file"]] for at in chunk["bytes"]]
    return {name: document[name] for name in ("format", "version", "metadata")} | {
        "tensors": dict(document["tensors"])
    }


@pytest.mark.parametrize("who", ["mesh", "ranks"])
def test_the_manifest_is_that_of_one_process(tmp_path: Path, who: str):
    alone, other = written(tmp_path, "process"), written(tmp_path, who)
    assert said(other) == said(alone)
    maps = [json.loads((folder / INDEX).read_text()) for folder in (alone, other)]
    assert (
        maps[0]["metadata"]
        == maps[1]["metadata"]
        == {"total_size": sum(array.nbytes for array in STATE.values())}
    )
    assert maps[0]["weight_map"].keys() == maps[1]["weight_map"].keys() == STATE.keys()
    assert holdfast.verify(other).ok


def test_nobody_else_is_told_of_tensors_that_are_cut(tmp_path: Path):
    folder = written(tmp_path, "mesh", ("a: tp=0",))
    assert not (folder / INDEX).exists()
    with holdfast.open(folder) as found:
        assert len(found["a"].chunks) == 2
        assert np.array_equal(found["a"].numpy(), STATE["a"])
