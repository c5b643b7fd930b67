"""Megatron's folders: a model cut by hand, as its ranks would save it, and put together by rules."""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch

import holdfast
import holdfast.torch
from holdfast.cli.main import main
from holdfast.errors import (
    BadArgument,
    BadPlacement,
    FormatError,
    HoldfastError,
    MetadataError,
    ReplicasDiffer,
    Truncated,
    Unsupported,
)
from tests.extras.rank_files.megatron_folders import NEW, OLD, Model, write


def check(path: Path, expected: Model) -> None:
    with holdfast.open(path) as found:
        assert found.format == "megatron"
        assert set(found.model_names()) == set(expected)
        for name, tensor in expected.items():
            assert torch.equal(found[name].torch(), tensor), name


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("names", [NEW, OLD], ids=["new names", "old names"])
@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (4, 1), (1, 2), (2, 2), (2, 4)])
def test_every_tensor_is_put_together(
    tmp_path: Path, tp: int, pp: int, names: Mapping[str, str], gated: bool
) -> None:
    expected = write(tmp_path, tp=tp, pp=pp, names=names, gated=gated)
    check(tmp_path, expected)
    check(tmp_path / "iter_0000007", expected)


def test_nested_names_and_parts_of_stages(tmp_path: Path) -> None:
    check(tmp_path / "a", write(tmp_path / "a", nested=True))
    check(tmp_path / "b", write(tmp_path / "b", pp=2, virtual=2))
    check(tmp_path / "c", write(tmp_path / "c", pp=2, cuts=lambda _: [1, 3]))


def test_what_is_beside_the_model(tmp_path: Path) -> None:
    expected = write(tmp_path)
    with holdfast.open(tmp_path) as found:
        assert found.non_model_keys == ("megatron",)
        assert (
            found["megatron.ranks.mp_rank_01.optimizer.optimizer.state.0.exp_avg"].tolist()
            == [1.0] * 3
        )
        assert any(str(one.what) == "argparse.Namespace" for one in found.foreign)
        assert dict(found.metadata) == {
            "tensor_parallel": "2",
            "pipeline_parallel": "1",
            "step": "iter_0000007",
        }
        name = "decoder.layers.2.mlp.linear_fc1.weight"
        assert torch.equal(found[name][6:10, 1:].torch(), expected[name][6:10, 1:])
    holdfast.convert(tmp_path, tmp_path / "m.safetensors")
    with holdfast.open(tmp_path / "m.safetensors") as found:
        assert set(found) == set(expected)
    report = holdfast.verify(tmp_path)
    assert report.ok
    assert not report.unchecked


def change(
    folder: Path, rank: str, edit: Callable[[dict[str, dict[str, torch.Tensor]]], object]
) -> None:
    file = folder / "iter_0000007" / rank / "model_optim_rng.pt"
    saved = torch.load(file, weights_only=False)
    edit(saved)
    torch.save(saved, file)


def test_a_replica_that_differs_is_refused_by_its_name(tmp_path: Path) -> None:
    write(tmp_path)
    name = "decoder.layers.1.input_layernorm.weight"
    change(tmp_path, "mp_rank_01", lambda saved: saved["model"][name].add_(1))
    with (
        holdfast.open(tmp_path) as found,
        pytest.raises(ReplicasDiffer, match=r"layers.1.input_layernorm"),
    ):
        found[name].numpy()


def test_rules_of_the_caller(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path)
    for rank in range(2):
        own = torch.arange(6.0).reshape(3, 2) + 10 * rank
        change(
            tmp_path,
            f"mp_rank_{rank:02d}",
            lambda saved, own=own: saved["model"].__setitem__("adapter.weight", own),
        )
    with holdfast.open(tmp_path) as found, pytest.raises(ReplicasDiffer, match=r"adapter\.weight"):
        found["adapter.weight"].numpy()
    with holdfast.open(tmp_path, rules="adapter.*: tp=1") as found:
        assert found["adapter.weight"].tolist() == [[0, 1, 10, 11], [2, 3, 12, 13], [4, 5, 14, 15]]
    with holdfast.open(tmp_path, rules=["adapter.*: tp=-2"]) as found:
        assert found["adapter.weight"].shape == (6, 2)
    with pytest.raises(BadPlacement, match="no dimension 2"):
        holdfast.open(tmp_path, rules=["adapter.*: tp=2"])
    with pytest.raises(BadPlacement, match="matches no tensor"):
        holdfast.open(tmp_path, rules=["adaptor.*: tp=1"])
    with pytest.raises(BadPlacement, match="'tp' alone"):
        holdfast.open(tmp_path, rules=["adapter.*: dp=1"])
    assert (
        main(
            [
                "convert",
                str(tmp_path),
                str(tmp_path / "a.safetensors"),
                "--rule",
                "adapter.*: tp=1",
                "--keep",
                "adapter.*",
            ]
        )
        == 0
    )
    with holdfast.open(tmp_path / "a.safetensors") as found:
        assert found["adapter.weight"].shape == (3, 4)
    with pytest.raises(BadArgument, match="Megatron"):
        holdfast.open(tmp_path / "a.safetensors", rules="adapter.*: tp=1")


def test_without_arguments_nobody_knows_whether_a_layer_is_gated(tmp_path: Path) -> None:
    expected = write(tmp_path, args=False, gated=False)
    with pytest.raises(Unsupported, match="gated"):
        holdfast.open(tmp_path)
    with holdfast.open(tmp_path, rules=["*.linear_fc1.*: tp=0"]) as found:
        name = "decoder.layers.0.mlp.linear_fc1.weight"
        assert torch.equal(found[name].torch(), expected[name])


def test_before_version_1_queries_keys_and_values_lie_apart(tmp_path: Path) -> None:
    expected = write(tmp_path, names=OLD)
    name = "decoder.layers.0.self_attention.query_key_value.weight"
    for rank in range(2):

        def older(saved: dict[str, dict[str, torch.Tensor]], rank: int = rank) -> None:
            saved["checkpoint_version"] = 0  # type: ignore[assignment]
            thirds = [part.chunk(2)[rank] for part in expected[name].chunk(3)]
            saved["model"][name] = torch.cat(thirds)

        change(tmp_path, f"mp_rank_{rank:02d}", older)
    with holdfast.open(tmp_path) as found:
        assert torch.equal(found[name].torch(), expected[name])


def test_missing_ranks_and_other_runs(tmp_path: Path) -> None:
    write(tmp_path, tp=2, pp=2)
    step = tmp_path / "iter_0000007"
    shutil.rmtree(step / "mp_rank_00_001")
    with pytest.raises(FormatError, match="mp_rank_00_001 is missing"):
        holdfast.open(tmp_path)
    shutil.rmtree(step / "mp_rank_01_001")
    with pytest.raises(FormatError, match="arguments of the run say 2"):
        holdfast.open(tmp_path)
    write(tmp_path / "other")
    shutil.copytree(tmp_path / "other" / "iter_0000007" / "mp_rank_01", step / "mp_rank_01")
    with pytest.raises(FormatError, match="two runs"):
        holdfast.open(tmp_path)


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (lambda saved: saved.__setitem__("iteration", 9), "two saves"),
        (lambda saved: saved["model"].pop("output_layer.weight"), "two runs"),
        (
            lambda saved: saved["model"].__setitem__("output_layer.weight", torch.ones(6, 5)),
            "another",
        ),
        (
            lambda saved: saved["model"].__setitem__(
                "output_layer.weight", torch.ones(6, 4).half()
            ),
            "another",
        ),
        (
            lambda saved: saved["model"].__setitem__(
                "decoder.final_layernorm.weight", torch.ones(5)
            ),
            "no replica",
        ),
        (lambda saved: saved.__setitem__("model", [1]), "two runs"),
    ],
)
def test_a_file_of_another_run(
    tmp_path: Path, edit: Callable[[dict[str, dict[str, torch.Tensor]]], object], said: str
) -> None:
    write(tmp_path)
    change(tmp_path, "mp_rank_01", edit)
    with pytest.raises(FormatError, match=said):
        holdfast.open(tmp_path)


def test_layers_that_do_not_count_up(tmp_path: Path) -> None:
    write(tmp_path, tp=1, pp=2)
    change(
        tmp_path,
        "mp_rank_00_001",
        lambda saved: saved["model"].__setitem__("decoder.layers.9.x", torch.ones(1)),
    )
    with pytest.raises(MetadataError, match="count up"):
        holdfast.open(tmp_path)
    write(tmp_path / "b", tp=1, pp=2)
    change(
        tmp_path / "b",
        "mp_rank_00_001",
        lambda saved: saved["model"].__setitem__("decoder.layers.2.x", torch.ones(1)),
    )
    with pytest.raises(FormatError, match=r"5 layers.*say 4"):
        holdfast.open(tmp_path / "b")


def test_experts_are_refused(tmp_path: Path) -> None:
    write(tmp_path, pp=2)
    step = tmp_path / "iter_0000007"
    shutil.copytree(step / "mp_rank_00_000", step / "mp_rank_00_000_001")
    with pytest.raises(Unsupported, match="experts"):
        holdfast.open(tmp_path)
    write(tmp_path / "b")
    change(
        tmp_path / "b",
        "mp_rank_00",
        lambda saved: setattr(saved["args"], "expert_model_parallel_size", 2),
    )
    with pytest.raises(Unsupported, match="experts"):
        holdfast.open(tmp_path / "b")


def test_a_truncated_file(tmp_path: Path) -> None:
    write(tmp_path)
    file = tmp_path / "iter_0000007" / "mp_rank_01" / "model_optim_rng.pt"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(Truncated) as caught:
        holdfast.open(tmp_path)
    assert "mp_rank_01" in str(caught.value.file)


@pytest.mark.parametrize(
    "content",
    [
        [1, 2],
        {"w": torch.ones(2)},
        {"model": 5},
        {"model": {}},
        {"model": {"a": {5: torch.ones(1)}}},
    ],
    ids=str,
)
def test_files_that_only_have_the_names(tmp_path: Path, content: object) -> None:
    for rank in range(2):
        (tmp_path / f"mp_rank_{rank:02d}").mkdir()
        torch.save(content, tmp_path / f"mp_rank_{rank:02d}" / "model_optim_rng.pt")
    with pytest.raises(FormatError, match="not a file of Megatron"):
        holdfast.open(tmp_path)


def test_a_model_that_contains_itself(tmp_path: Path) -> None:
    write(tmp_path, tp=1)

    def loop(saved: dict[str, dict[str, object]]) -> None:
        saved["model"]["again"] = saved["model"]

    change(tmp_path, "mp_rank_00", loop)
    with pytest.raises(HoldfastError):
        holdfast.open(tmp_path)


def test_a_pointer_to_a_release(tmp_path: Path) -> None:
    expected = write(tmp_path)
    (tmp_path / "iter_0000007").rename(tmp_path / "release")
    with pytest.raises(FormatError, match="iter_0000007"):
        holdfast.open(tmp_path)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("release\n")
    check(tmp_path, expected)


def test_long_names_that_nest_are_refused(tmp_path: Path) -> None:
    long = "x" * 200_000
    tree: dict[str, object] = {str(n): torch.ones(1) for n in range(2000)}
    for _ in range(40):
        tree = {long: tree}
    (tmp_path / "mp_rank_00").mkdir()
    torch.save(
        {"model": tree, "args": argparse.Namespace()},
        tmp_path / "mp_rank_00" / "model_optim_rng.pt",
    )
    with pytest.raises(HoldfastError):
        holdfast.open(tmp_path)
