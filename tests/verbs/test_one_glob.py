"""One glob: whatever takes names means the same ones by it."""

import json

import numpy as np
import pytest

import holdfast
from holdfast.cli.main import main
from holdfast.errors import BadArgument
from holdfast.ranks.per_rank import mark

LAYERS = 21
NAMES = [
    f"layers.{n}.{what}" for n in range(LAYERS) for what in ("q.weight", "k.weight", "norm")
] + ["head", "odd[0]{x}"]

GLOBS = {
    "layers.{8..11}.*": [n for n in NAMES if n.split(".")[1:2] in (["8"], ["9"], ["10"], ["11"])],
    "*.{q,k}.weight": [n for n in NAMES if n.endswith(("q.weight", "k.weight"))],
    "layers.1?.norm": [f"layers.{n}.norm" for n in range(10, 20)],
    "layers.[0-2].**": [n for n in NAMES if n.split(".")[1:2] in (["0"], ["1"], ["2"])],
    "layers.1": ["layers.1.q.weight", "layers.1.k.weight", "layers.1.norm"],
    "odd[0]{x}": ["odd[0]{x}"],
    "{head,layers.20.norm}": ["layers.20.norm", "head"],
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("globs") / "model.safetensors"
    holdfast.save(
        {name: np.arange(1, 9, dtype=np.float32).reshape(2, 4) for name in NAMES},
        path,
        durable=False,
    )
    return path


def _shown(capsys, *words):
    assert main([str(word) for word in words]) == 0
    return json.loads(capsys.readouterr().out)


def _opened(path):
    with holdfast.open(path) as checkpoint:
        return set(checkpoint)


@pytest.mark.parametrize("pattern", GLOBS)
def test_looking(pattern, model, capsys):
    meant = sorted(GLOBS[pattern])
    for words in (("show", "--json"), ("stats", "--json"), ("show", "--sparsity", "--json")):
        found = _shown(capsys, *words, model, "--filter", pattern)
        assert sorted(tensor["name"] for tensor in found["tensors"]) == meant, words
    assert sorted(row.name for row in holdfast.stats(model, pattern)) == meant
    assert sorted(row.name for row in holdfast.sparsity(model, pattern)) == meant
    assert holdfast.report(model, filter=pattern).document["tensors"]["count"] == len(meant)
    assert holdfast.diff(model, model, filter=pattern).same == len(meant)


@pytest.mark.parametrize("pattern", GLOBS)
def test_writing(pattern, model, tmp_path):
    meant = set(GLOBS[pattern])
    holdfast.convert(model, tmp_path / "kept.safetensors", keep=pattern, durable=False)
    holdfast.convert(model, tmp_path / "rest.safetensors", drop=pattern, durable=False)
    assert _opened(tmp_path / "kept.safetensors") == meant
    assert _opened(tmp_path / "rest.safetensors") == set(NAMES) - meant
    holdfast.convert(
        model, tmp_path / "half.safetensors", dtype={pattern: "f16", "*": "keep"}, durable=False
    )
    with holdfast.open(tmp_path / "half.safetensors") as half:
        assert {name for name in half if half[name].dtype.name == "float16"} == meant
    done = holdfast.prune(
        model, tmp_path / "pruned.safetensors", [f"{pattern}: 0.5"], durable=False
    )
    assert {row.name for row in done.tensors} == meant
    cut = holdfast.reshard(
        model, tmp_path / "cut", mesh="tp=2", rules=[f"{pattern}: tp=0"], durable=False
    )
    with holdfast.open(cut.path) as sharded:
        assert {name for name in sharded if len(sharded[name].chunks) == 2} == meant


@pytest.mark.parametrize("pattern", GLOBS)
def test_what_a_rank_keeps(pattern):
    state, used = mark(dict.fromkeys(NAMES, 1), [pattern], "rank-0-of-1")
    assert {name for name, value in state.items() if value != 1} == set(GLOBS[pattern])
    assert used == [pattern]


def test_a_rename_takes_the_stars_of_any_glob(model, tmp_path):
    holdfast.convert(
        model, tmp_path / "new.safetensors", rename={"layers.{10..20}.*": "high.*", "layers.[0-9].*": "low.*"}, drop=["*.weight"],
        keep=["layers.{9,10}.norm"], durable=False,
    )  # fmt: skip
    assert _opened(tmp_path / "new.safetensors") == {"low.norm", "high.norm"}


@pytest.mark.parametrize("words", [("show", "-f"), ("stats", "-f"), ("diff", "MODEL", "-f")])
def test_numbers_written_as_a_set_are_refused(words, model, capsys):
    verb, *more = [str(model) if word == "MODEL" else word for word in words]
    assert main([verb, str(model), *more, "layers.[0-19].*"]) == 2
    assert "{0..19}" in capsys.readouterr().err
    with pytest.raises(BadArgument, match=r"\{0\.\.19\}"):
        holdfast.stats(model, "layers.[0-19].*")
