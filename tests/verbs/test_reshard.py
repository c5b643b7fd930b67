"""`reshard`: the same tensors, cut for a mesh."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import holdfast
from holdfast.cli.main import main
from holdfast.core.box import Box
from holdfast.core.placement_rules import default_axes, parse_rule
from holdfast.core.tiling import is_tiled_by
from holdfast.errors import BadPlacement
from holdfast.verbs.reshard import local_box, parse_mesh, reshard

STATE = {
    "layers.0.q": np.arange(48, dtype=np.float32).reshape(8, 6),
    "layers.0.o": np.arange(35, dtype=np.int16).reshape(5, 7),
    "norm": np.arange(7, dtype=np.float64),
    "scalar": np.array(3, np.int64),
    "none": np.empty((0, 4), np.float32),
}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    holdfast.save(STATE, tmp_path / "source.safetensors")
    return tmp_path / "source.safetensors"


def test_every_tensor_is_the_same_and_cut_as_the_rules_say(source: Path, tmp_path: Path):
    rules = ["*.q: tp=0, dp=1", "*.o: tp=1", "norm: tp=-1", "none: tp=0"]
    reshard(source, tmp_path / "out", mesh="dp=2,tp=3", rules=rules)
    with holdfast.open(tmp_path / "out") as found:
        assert sorted(found) == sorted(STATE)
        for name, value in STATE.items():
            assert np.array_equal(found[name].numpy(), value), name
        assert len(found["layers.0.q"].chunks) == 6
        assert len(found["layers.0.o"].chunks) == 3
        assert {chunk.box.shape for chunk in found["norm"].chunks} == {(3,), (1,)}
    assert len(list((tmp_path / "out").glob("data-*-of-00006.safetensors"))) == 6


def test_boxes_of_all_ranks_tile_the_tensor():
    mesh = {"a": 3, "b": 2, "c": 4}
    for axes in ({"a": 0}, {"a": 0, "b": 0}, {"a": 1, "b": 0, "c": 1}, {}):
        boxes = {
            local_box((7, 10), mesh, {"a": i, "b": j, "c": k}, axes=axes)
            for i in range(3)
            for j in range(2)
            for k in range(4)
        }
        assert is_tiled_by(Box.whole((7, 10)), [box for box in boxes if box.count]), axes


@pytest.mark.parametrize("text", ["", "dp", "dp=0", "dp=2,dp=2", "dp=x", "=2"])
def test_a_mesh_that_is_none(text: str):
    with pytest.raises(BadPlacement, match="dp=2,tp=4"):
        parse_mesh(text)


@pytest.mark.parametrize("text", ["", "*", ": tp=0", "*: tp", "*: tp=x", "*: tp=0,tp=1"])
def test_a_rule_that_is_none(text: str):
    with pytest.raises(BadPlacement, match="rule is written like"):
        parse_rule(text)


def test_all_that_is_wrong_is_said_and_nothing_is_written(source: Path, tmp_path: Path):
    with pytest.raises(BadPlacement) as caught:
        reshard(
            source, tmp_path / "out", mesh="tp=2", rules=["zz: tp=0", "norm: pp=0", "scalar: tp=0"]
        )
    for part in ("'zz' matches no tensor", "no axis 'pp'", "no dimension 0"):
        assert part in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_command_line(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    plan = tmp_path / "rules.txt"
    plan.write_text("# columns\n*.q: tp=1  # all of them\n")
    assert (
        main(
            [
                "reshard",
                str(source),
                str(tmp_path / "out"),
                "--mesh",
                "tp=2",
                "--plan",
                str(plan),
                "-q",
            ]
        )
        == 0
    )
    assert main(["show", "--ranks", str(tmp_path / "out")]) == 0
    shown = capsys.readouterr().out
    assert "│AAABBB│" in shown
    assert "A data-00001-of-00002.safetensors" in shown


MODEL = {
    "model.embed_tokens.weight": (16, 8),
    "model.layers.0.self_attn.q_proj.weight": (8, 8),
    "model.layers.0.self_attn.q_proj.bias": (8,),
    "model.layers.0.self_attn.o_proj.weight": (8, 8),
    "model.layers.0.self_attn.o_proj.bias": (8,),
    "model.layers.0.mlp.down_proj.weight": (8, 24),
    "model.norm.weight": (1,),
    "step": (),
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    arrays = {
        name: np.arange(np.prod(shape, dtype=int), dtype=np.float32).reshape(shape)
        for name, shape in MODEL.items()
    }
    holdfast.save(arrays, tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


def boxes(path: Path) -> dict[str, set[tuple[int, ...]]]:
    with holdfast.open(path) as found:
        return {
            name: {chunk.box.shape for chunk in tensor.chunks} for name, tensor in found.items()
        }


@pytest.mark.parametrize(
    ("mesh", "cut"),
    [
        (
            "dp=8",
            {
                "embed": (2, 8),
                "q": (1, 8),
                "q bias": (1,),
                "o": (1, 8),
                "o bias": (1,),
                "down": (1, 24),
            },
        ),
        (
            "fsdp=4",
            {
                "embed": (4, 8),
                "q": (2, 8),
                "q bias": (2,),
                "o": (2, 8),
                "o bias": (2,),
                "down": (2, 24),
            },
        ),
        ("tp=4", {"embed": (4, 8), "q": (2, 8), "q bias": (2,), "o": (8, 2), "down": (8, 6)}),
        (
            "dp=2,tp=4",
            {
                "embed": (2, 8),
                "q": (1, 8),
                "q bias": (1,),
                "o": (4, 2),
                "o bias": (4,),
                "down": (4, 6),
            },
        ),
    ],
)
def test_without_rules_axes_cut_by_their_names(
    mesh: str, cut: dict[str, tuple[int, ...]], model: Path, tmp_path: Path
):
    done = reshard(model, tmp_path / "out", mesh=mesh)
    names = dict(
        zip(("embed", "q", "q bias", "o", "o bias", "down", "norm", "step"), MODEL, strict=True)
    )
    assert boxes(tmp_path / "out") == {
        name: {cut.get(short, MODEL[name])} for short, name in names.items()
    }
    told = [note for note in done.notes if " split" in note]
    assert sum(int(note.split()[0]) for note in told) == len(MODEL)
    assert f"{len(MODEL) - len(cut)} tensors not split" in " ".join(told)
    with holdfast.open(tmp_path / "out") as ours, holdfast.open(model) as theirs:
        assert all(np.array_equal(ours[name].numpy(), theirs[name].numpy()) for name in MODEL)


@pytest.mark.parametrize(
    ("name", "shape", "axes"),
    [
        ("any", (9, 2), {"dp": 0}),  # as FSDP cuts it: 3, 3, 3 and nothing
        ("any", (3, 8), {}),
        ("any", (0, 8), {}),
        ("h.q_proj.weight", (12, 8), {"dp": 0, "tp": 0}),
        ("h.q_proj.weight", (20, 8), {"dp": 0}),
        ("h.o_proj.weight", (4, 9), {"dp": 0, "tp": 1}),
        ("q_proj", (12, 8), {"dp": 0}),
    ],
)
def test_what_an_axis_cuts_by_default(name: str, shape: tuple[int, ...], axes: dict[str, int]):
    assert default_axes(name, shape, {"dp": 4, "tp": 3}) == axes


@pytest.mark.parametrize("mesh", ["tp=5", "pp=4", "dp=64"])
def test_a_mesh_that_would_cut_nothing_is_refused(mesh: str, model: Path, tmp_path: Path):
    with pytest.raises(BadPlacement, match="without rules nothing is cut"):
        reshard(model, tmp_path / "out", mesh=mesh)
    assert not (tmp_path / "out").exists()
    reshard(model, tmp_path / "out", mesh=mesh, rules=["*: replicate"])


@pytest.mark.parametrize(
    ("mesh", "rules", "idle"),
    [
        ("dp=2,tp=2", (), ["tp=2"]),  # names of GPT-2 and BERT, of which no plan is known
        ("pp=4,dp=2,tp=2,cp=1", (), ["pp=4", "tp=2"]),
        ("dp=2,tp=2", ["*.c_attn.weight: tp=1"], ["dp=2"]),
        ("dp=2,tp=2", ["*.c_attn.weight: tp=1, dp=0"], []),
    ],
)
def test_an_axis_that_cuts_nothing_is_named(
    mesh: str, rules: list[str], idle: list[str], tmp_path: Path
):
    names = ("h.0.attn.c_attn.weight", "bert.encoder.layer.0.attention.self.query.weight")
    holdfast.save(
        {name: np.ones((8, 8), np.float32) for name in names}, tmp_path / "gpt2.safetensors"
    )
    done = reshard(tmp_path / "gpt2.safetensors", tmp_path / "out", mesh=mesh, rules=rules)
    told = [note for note in done.notes if note.startswith("no tensor is split over ")]
    assert [note.split(":")[0].removeprefix("no tensor is split over ") for note in told] == idle
    assert all(("add a rule" in note) is (not rules) for note in told)


def test_the_command_says_what_was_cut(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert main(["reshard", str(model), str(tmp_path / "out"), "--mesh", "dp=8"]) == 0
    said = capsys.readouterr().out
    assert "6 tensors split along dimension 0 over dp=8" in said
    assert "2 tensors not split" in said
