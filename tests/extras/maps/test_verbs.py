"""Every verb that takes a map, on small models: what is written is what the map shows, and the way back is the source."""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

import holdfast
import holdfast.torch
from holdfast.cli.main import main
from holdfast.errors import BadArgument, DoesNotFit, NoSuchTensor
from holdfast.extras.maps.find import Map
from holdfast.formats import format_of
from tests.extras.maps.small import DEEPSEEK, LLAMA, MOE, QWEN, counted, model, write
from tests.processes import fork_server
from tests.support import ALONE, flip_bit

DCP = pytest.param(
    "dcp", marks=pytest.mark.skipif(not format_of("dcp").written_by, reason="dcp is read alone")
)
THERE, BACK = "qwen3:hf->megatron", "qwen3:megatron->hf"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("verbs") / "hf", *model())


def values(checkpoint: holdfast.Checkpoint) -> dict[str, list[object]]:
    return {name: checkpoint[name].numpy().tolist() for name in sorted(checkpoint)}


def with_config(folder: Path, source: Path) -> Path:
    if folder.is_dir() and not (folder / "config.json").exists():
        shutil.copy(source / "config.json", folder)
    return folder


@pytest.mark.parametrize("name", ["out.safetensors", "out.pt", "native", DCP, "hf"])
def test_convert_there_and_back(source: Path, tmp_path: Path, name: str):
    formats = {"dcp": "dcp", "native": "native", "hf": "safetensors"}
    options = {"format": formats[name]} if name in formats else {}
    there = tmp_path / name
    holdfast.convert(source, there, map=THERE, durable=False, **options)
    seen = holdfast.open(source, map=THERE)
    assert values(holdfast.open(there)) == values(seen)
    back = BACK + ("" if there.is_dir() else "?dim=10&group=2&query=3")
    with_config(there, source)
    holdfast.convert(there, tmp_path / "back.safetensors", map=back, durable=False)
    assert values(holdfast.open(tmp_path / "back.safetensors")) == values(holdfast.open(source))
    assert holdfast.diff(there, source, map=back, tensors_only=True).equal
    assert holdfast.diff(source, there, map=THERE, exact=True, tensors_only=True).equal


@pytest.mark.parametrize("format", [DCP])
def test_convert_takes_the_format_of_the_layout(source: Path, tmp_path: Path, format: str):
    holdfast.convert(source, tmp_path / "step-0", map=THERE, durable=False)
    assert holdfast.open(tmp_path / "step-0").format == format
    state = {"decoder.layers.mlp.linear_fc1.weight": torch.zeros(3, 44, 24, dtype=torch.int32)}
    dcp.load(state, checkpoint_id=tmp_path / "step-0", **ALONE)
    seen = holdfast.open(source, map=THERE)
    assert (
        state["decoder.layers.mlp.linear_fc1.weight"].tolist()
        == seen["decoder.layers.mlp.linear_fc1.weight"].numpy().tolist()
    )
    holdfast.convert(
        with_config(tmp_path / "step-0", source), tmp_path / "hf", map="auto", durable=False
    )
    assert "safetensors" in holdfast.open(tmp_path / "hf").format
    assert values(holdfast.open(tmp_path / "hf")) == values(holdfast.open(source))
    holdfast.convert(source, tmp_path / "layers", map="qwen3:hf->megatron-layers", durable=False)
    assert holdfast.open(tmp_path / "layers").format == format


@pytest.mark.parametrize("name", [QWEN, MOE, LLAMA, DEEPSEEK])
def test_every_layout_of_every_family_leads_back(tmp_path: Path, name: str):
    tensors, config = model(name)
    source = holdfast.open(write(tmp_path, tensors, config))
    expected = {key: array.tolist() for key, array in sorted(tensors.items())}
    family = Map.named(f"{name.partition('-')[0]}:hf->titan").family
    for one in family.layouts:
        for other in family.layouts:
            way = (
                Map(family, "hf", one)
                .compose(Map(family, one, other))
                .compose(Map(family, other, "hf"))
            )
            assert values(way.through(source)) == expected, (one, other)


def test_convert_with_other_changes(tmp_path: Path):
    tensors, config = model()
    source = write(
        tmp_path / "floats", {name: array.astype("f4") for name, array in tensors.items()}, config
    )
    holdfast.convert(
        source, tmp_path / "a.safetensors", map=THERE, durable=False, keep=["decoder.layers.mlp.*"], rename=[("decoder.*", "*")],
        dtype="float64",
    )  # fmt: skip
    with holdfast.open(tmp_path / "a.safetensors") as found:
        assert sorted(found) == [
            f"layers.mlp.{one}"
            for one in ("linear_fc1.layer_norm_weight", "linear_fc1.weight", "linear_fc2.weight")
        ]
        assert {one.dtype.name for one in found.values()} == {"float64"}
        fused = holdfast.open(source, map=THERE)["decoder.layers.mlp.linear_fc2.weight"].numpy()
        assert (found["layers.mlp.linear_fc2.weight"].numpy() == fused).all()


def test_the_command_converts_and_compares(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    there = tmp_path / "a.safetensors"
    assert main(["convert", str(source), str(there), "--map", THERE, "--no-durable", "-q"]) == 0
    assert main(["diff", str(source), str(there), "--map", THERE, "-q"]) == 0
    assert main(["diff", str(source), str(there), "-q"]) == 1
    assert main(["verify", str(source), "--map", THERE, "-q"]) == 0
    assert main(["verify", str(there), "--map", THERE, "-q"]) == 2
    assert (
        main(["report", str(source), "--map", THERE, "-o", str(tmp_path / "page.html"), "--json"])
        == 0
    )
    assert "linear_fc1" in capsys.readouterr().out
    assert (
        main(
            [
                "reshard",
                str(source),
                str(tmp_path / "two"),
                "--map",
                THERE,
                "--mesh",
                "tp=2",
                "--rule",
                "*.weight: tp=0",
                "-q",
            ]
        )
        == 0
    )
    capsys.readouterr()
    assert main(["convert", str(source), str(tmp_path / "b"), "--map", "qwen3:hf->nowhere"]) == 2
    assert "has no layout 'nowhere'" in capsys.readouterr().err
    assert not (tmp_path / "b").exists()


def test_what_does_not_fit_leaves_nothing(source: Path, tmp_path: Path):
    for verb in (
        holdfast.convert,
        lambda *places, **options: holdfast.reshard(*places, mesh="tp=2", **options),
    ):
        with pytest.raises(DoesNotFit):
            verb(source, tmp_path / "out", map="qwen3:titan->hf")
    assert [*tmp_path.iterdir()] == []
    for odd in (1, b"x", ["qwen3:hf->titan"], {}):
        with pytest.raises(BadArgument):
            holdfast.convert(source, tmp_path / "out", map=odd)


def test_verify(source: Path, tmp_path: Path):
    assert holdfast.verify(source, map=THERE).ok
    with pytest.raises(DoesNotFit):
        holdfast.verify(source, map=BACK)
    shutil.copytree(source, tmp_path / "a")
    flip_bit(tmp_path / "a" / "model.safetensors", -1)
    assert not holdfast.verify(tmp_path / "a", map=THERE).ok


def test_report_and_reshard(source: Path, tmp_path: Path):
    seen = holdfast.open(source, map=THERE)
    page = json.dumps(holdfast.report(source, map=THERE, stats=True).document)
    assert "linear_qkv" in page
    assert "q_proj" not in page
    holdfast.reshard(
        source, tmp_path / "four", mesh="tp=4", rules=["*.weight: tp=0"], map=THERE, durable=False
    )
    assert values(holdfast.open(tmp_path / "four")) == values(seen)
    # What was cut in boxes, by another map back to where it came from.
    with_config(tmp_path / "four", source)
    assert values(holdfast.open(tmp_path / "four", map=BACK)) == values(holdfast.open(source))


@pytest.mark.parametrize("layout", ["megatron", "titan", "hf"])
def test_load_into_finds_the_way(source: Path, layout: str):
    seen = holdfast.open(source, map=f"qwen3:hf->{layout}")
    state = {name: torch.zeros(tensor.shape, dtype=torch.int32) for name, tensor in seen.items()}
    holdfast.torch.load_into(state, source, map="auto")
    assert {name: tensor.tolist() for name, tensor in sorted(state.items())} == values(seen)
    named = {name: torch.zeros(tensor.shape, dtype=torch.int32) for name, tensor in seen.items()}
    holdfast.torch.load_into(named, source, map=f"qwen3:hf->{layout}")
    assert all(torch.equal(named[name], state[name]) for name in state)


def test_load_into_refuses_before_it_changes(source: Path):
    state = {
        "decoder.final_layernorm.weight": torch.zeros(24, dtype=torch.int32),
        "x": torch.zeros(2),
    }
    with pytest.raises(holdfast.HoldfastError):
        holdfast.torch.load_into(state, source, map=THERE)
    assert not state["decoder.final_layernorm.weight"].any()


def first_of(checkpoint: holdfast.Checkpoint, name: str) -> list[object]:
    return checkpoint[name][0, 1].numpy().tolist()


def test_a_mapped_checkpoint_goes_to_another_process(source: Path):
    name = "decoder.layers.self_attention.linear_qkv.weight"
    with holdfast.open(
        source, map=Map.named(THERE).compose(Map.named("qwen3:megatron->megatron"))
    ) as seen:
        again = pickle.loads(pickle.dumps(seen))
        assert values(again) == values(seen)
        tensor = pickle.loads(pickle.dumps(seen[name]))
        assert tensor[0, 1].numpy().tolist() == first_of(seen, name)
        with fork_server().Pool(1) as pool:
            assert pool.apply(first_of, (seen, name)) == first_of(seen, name)


def test_mapped_files(source: Path):
    with (
        holdfast.open(source, map=THERE, mmap=True) as mapped,
        holdfast.open(source, map=THERE) as read,
    ):
        assert values(mapped) == values(read)
        assert mapped["embedding.word_embeddings.weight"].numpy().base is not None


def test_a_slice_reads_its_rows_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Rows of 32 KiB, which are far enough apart not to be read through."""
    heads, groups, dim, hidden, layers = 8, 4, 4, 8192, 3
    config = {
        "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": groups, "head_dim": dim,
        "hidden_size": hidden, "intermediate_size": 8, "vocab_size": 4, "tie_word_embeddings": True,
    }  # fmt: skip
    shapes = {"model.embed_tokens.weight": (4, hidden), "model.norm.weight": (hidden,)}
    for layer in range(layers):
        at = f"model.layers.{layer}"
        shapes |= {f"{at}.self_attn.{one}_norm.weight": (dim,) for one in "qk"}
        shapes |= {f"{at}.{one}_layernorm.weight": (hidden,) for one in ("input", "post_attention")}
        shapes |= {
            f"{at}.self_attn.q_proj.weight": (heads * dim, hidden),
            f"{at}.self_attn.o_proj.weight": (hidden, heads * dim),
        }
        shapes |= {f"{at}.self_attn.{one}_proj.weight": (groups * dim, hidden) for one in "kv"}
        shapes |= {f"{at}.mlp.{one}_proj.weight": (8, hidden) for one in ("gate", "up")} | {
            f"{at}.mlp.down_proj.weight": (hidden, 8)
        }
    rng = np.random.default_rng(0)
    folder = write(
        tmp_path,
        {name: rng.integers(0, 9, shape).astype("<i4") for name, shape in shapes.items()},
        config,
    )
    row = hidden * 4
    with counted(monkeypatch) as found:
        seen = holdfast.open(folder, map=THERE)
        assert sum(found) == 0
        fused = seen["decoder.layers.self_attention.linear_qkv.weight"]
        for index, rows in (
            ((1, 0), 1), ((1, slice(0, dim)), dim), ((2, slice(0, 4 * dim)), 4 * dim), ((slice(None), 5), layers),
            ((0, slice(2 * dim, 3 * dim)), dim), ((1, slice(4 * dim, 4 * dim)), 0), ((1, slice(None, None, 8)), 8), ((-1, -1), 1),
            ((0, slice(7, 2, -2)), 3),
        ):  # fmt: skip
            found.clear()
            fused[index].numpy()
            assert sum(found) == rows * row, index
        found.clear()
        fused.numpy()
        assert sum(found) == layers * (heads + 2 * groups) * dim * row


STATES = """
[sizes]
side = "2"
[layouts.hf]
states = "{state}/{name}"
[layouts.one]
states = "optimizer.state.{state}.{name}"
[[array]]
id = "fc1"
hf = ["layers.{layer}.gate : (side[0] ffn) hidden", "layers.{layer}.up : (side[1] ffn) hidden"]
one = "fc1 : layer hidden (side ffn)"
"""


def test_states_of_an_optimizer_go_as_the_weights_do(tmp_path: Path):
    (tmp_path / "my.toml").write_text(STATES)
    rng = np.random.default_rng(1)
    weights = {
        f"layers.{layer}.{one}": rng.standard_normal((3, 4)).astype("f4")
        for layer in range(2)
        for one in ("gate", "up")
    }
    state = weights | {f"exp_avg_sq/{name}": array**2 for name, array in weights.items()}
    source = write(tmp_path / "m", state)
    seen = holdfast.open(source, map=f"{tmp_path}/my.toml:hf->one")
    assert sorted(seen) == ["fc1", "optimizer.state.exp_avg_sq.fc1"]
    np.testing.assert_array_equal(
        seen["fc1"].numpy() ** 2, seen["optimizer.state.exp_avg_sq.fc1"].numpy()
    )
    holdfast.convert(source, tmp_path / "native", map=f"{tmp_path}/my.toml:hf->one", durable=False)
    back = holdfast.open(tmp_path / "native", map=f"{tmp_path}/my.toml:one->hf")
    assert {name: back[name].numpy().tolist() for name in sorted(back)} == {
        name: state[name].tolist() for name in sorted(state)
    }
    del state["exp_avg_sq/layers.1.up"]
    with pytest.raises(DoesNotFit) as caught:
        holdfast.open(write(tmp_path / "n", state), map=f"{tmp_path}/my.toml:hf->one")
    assert caught.value.missing == ("exp_avg_sq/layers.1.up",)


@pytest.mark.parametrize("name", ["native", "out.pt"])
def test_ties_stay_ties(tmp_path: Path, name: str):
    tensors, config = model("qwen3-mqa-tied")
    source = write(tmp_path / "hf", tensors, config)
    both = {"tok_embeddings.weight", "lm_head.weight"}
    seen = holdfast.open(source, map="qwen3:hf->titan")
    np.testing.assert_array_equal(
        seen["lm_head.weight"].numpy(), tensors["model.embed_tokens.weight"]
    )
    assert [set(one.names) for one in seen.aliases] == [both]
    options = {"format": "native"} if name == "native" else {}
    holdfast.convert(source, tmp_path / name, map="qwen3:hf->titan", durable=False, **options)
    written = holdfast.open(tmp_path / name)
    assert [set(one.names) for one in written.aliases] == [both]
    if name == "native":
        back = holdfast.open(with_config(tmp_path / name, source), map="qwen3:titan->hf")
        assert values(back) == {key: array.tolist() for key, array in sorted(tensors.items())}


def test_the_command_lists(capsys: pytest.CaptureFixture[str]):
    assert main(["maps"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "qwen3        Qwen3, dense  hf, titan, megatron, megatron-layers" in lines[-3]
    assert lines[-1] == "a map converts between two layouts of a family: qwen3:hf:megatron"
    assert main(["maps", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {"deepseek_v3", "llama", "qwen3", "qwen3_moe"} <= {
        one["family"] for one in found["families"]
    }
    assert main(["maps", "check"]) == 2
    assert "pass a map and a checkpoint" in capsys.readouterr().err


def test_the_command_proves(
    source: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    name = "decoder.layers.mlp.linear_fc1.weight"
    with counted(monkeypatch) as found:
        assert main(["maps", "check", THERE, str(source)]) == 0
        shown = capsys.readouterr().out.splitlines()
        assert main(["maps", "check", THERE, str(source), "--explain", name]) == 0
        explained = capsys.readouterr().out.splitlines()
        assert main(["maps", "check", "auto->megatron", str(source), "--json"]) == 0
        document = json.loads(capsys.readouterr().out)
        assert main(["maps", "check", "auto->hf", str(source)]) == 0
        assert "already has this layout" in capsys.readouterr().out
    assert sum(found) == 0
    assert (
        shown[0] == "qwen3:hf:megatron  fits: 11 tensors of 36, checked without reading tensor data"
    )
    row = next(line for line in shown if line.startswith(name))
    assert row.split("  ", 1)[1].strip() == (
        "[3, 44, 24]  from model.layers.{layer}.mlp.gate_proj.weight, model.layers.{layer}.mlp.up_proj.weight"
    )
    assert explained[0] == f"{name}  [3, 44, 24]  layer (side ffn) hidden"
    assert (
        explained[1] == "  from model.layers.0.mlp.gate_proj.weight  [22, 24]  (side[0] ffn) hidden"
    )
    assert explained[-1] == "  with layer 3, side 2, ffn 22, hidden 24"
    fused = next(one for one in document["tensors"] if one["name"] == name)
    assert fused["shape"] == [3, 44, 24]
    assert fused["from"] == sorted(
        f"model.layers.{i}.mlp.{one}_proj.weight" for i in range(3) for one in ("gate", "up")
    )
    assert (document["map"], document["left_out"], document["sizes"]["group"]) == (
        "qwen3:hf:megatron",
        [],
        2,
    )


def test_the_command_names_what_is_wrong(source: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["maps", "check", "qwen3:hf->megatron?vocab=38", str(source)]) == 2
    said = capsys.readouterr().err
    assert "lm_head.weight" in said
    assert "model.embed_tokens.weight" in said
    assert main(["maps", "check", THERE, str(source), "--explain", "nothing"]) == 2
    assert "has no tensor 'nothing'" in capsys.readouterr().err
    with holdfast.open(source, map=THERE) as seen, pytest.raises((NoSuchTensor, KeyError)):
        seen["model.norm.weight"]
