"""DeepSpeed's folders, of each stage: every weight and moment under its name, whatever the ranks; and all that can be wrong."""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import holdfast
import holdfast.torch
from holdfast.errors import (
    FormatError,
    HoldfastError,
    MetadataError,
    ReplicasDiffer,
    Truncated,
    Unsupported,
)
from tests.extras.rank_files.zero_folders import Zero
from tests.sampling import examples
from tests.support import flip_bit


def numbers(*shape: int, first: int = 0) -> torch.Tensor:
    return (
        torch.arange(first, first + torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)
        / 7
    )


def model(stage: int = 2, world: int = 2, **more: object) -> Zero:
    """A small model with everything in it."""
    return Zero(
        stage, world,
        [
            {"emb.weight": numbers(11, 5), "a.weight": numbers(7, 5, first=100)},
            {"a.bias": numbers(7, first=300), "s": numbers(1, first=5)},
        ],
        buffers={"table": torch.arange(13) / 3, "count": torch.tensor(7)},
        frozen={"still.weight": numbers(3, 5).to(torch.bfloat16), "still.bias": torch.ones(3, dtype=torch.bfloat16)},
        shared={"head.weight": "emb.weight"},
        **more,  # type: ignore[arg-type]
    )  # fmt: skip


def check(zero: Zero, path: Path) -> None:
    """What opens is what was written, bit for bit."""
    with holdfast.open(path) as found:
        assert found.format == "deepspeed"
        frozen = {name: tensor.to(zero.half) for name, tensor in zero.frozen.items()}
        weights = {
            **zero.weights,
            **frozen,
            **zero.buffers,
            **{name: zero.weights[of] for name, of in zero.shared.items()},
        }
        assert set(found.model_names()) == set(weights)
        for name, tensor in weights.items():
            assert torch.equal(found[name].torch(), tensor), name
            assert found[name].torch().dtype is tensor.dtype, name
        for number, moment in enumerate(zero.moments):
            expected = {
                name: tensor for group in zero.moment(number) for name, tensor in group.items()
            }
            for name, tensor in expected.items():
                assert torch.equal(found[f"deepspeed.optimizer.{moment}.{name}"].torch(), tensor), (
                    moment,
                    name,
                )
        if zero.stage != 3:
            for name, tensor in zero.weights.items():
                assert torch.equal(found[f"deepspeed.module.{name}"].torch(), tensor.to(zero.half))


@pytest.mark.parametrize("world", [1, 2, 3, 5])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_every_tensor_is_put_together(tmp_path: Path, stage: int, world: int) -> None:
    zero = model(stage, world)
    step = zero.write(tmp_path)
    check(zero, tmp_path)
    check(zero, step)


@pytest.mark.parametrize(
    "zero",
    [
        model(1, 2, old=True),
        model(3, 2, old=True),
        model(2, 3, lean=True),
        model(2, 2, gaps=3),
        model(3, 2, sub_groups=True),
        model(2, 2, half=torch.float16),
        model(3, 3, moments=()),
    ],
    ids=["old", "old stage 3", "lean", "gaps", "sub-groups", "fp16", "no moments"],
)
def test_other_versions_and_settings(tmp_path: Path, zero: Zero) -> None:
    zero.write(tmp_path)
    check(zero, tmp_path)


@st.composite
def folders(draw: st.DrawFn) -> Zero:
    shapes = st.lists(st.integers(1, 5), max_size=3).map(tuple)
    groups, at = [], 0
    for number, count in enumerate(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))):
        group = {}
        for item in range(count):
            shape = draw(shapes)
            group[f"{number}.{item}"] = numbers(*shape, first=at)
            at += 1000
        groups.append(group)
    stage = draw(st.sampled_from([1, 2, 3]))
    gaps = draw(st.integers(0, 3)) if stage != 3 else 0
    return Zero(
        stage, draw(st.integers(1, 4)), groups, moments=("exp_avg",), gaps=gaps, lean=stage != 3 and draw(st.booleans()),
        old=not gaps and draw(st.booleans()), sub_groups=draw(st.booleans()),
    )  # fmt: skip


@settings(
    max_examples=examples(30),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(folders())
def test_any_shapes_and_ranks(tmp_path: Path, zero: Zero) -> None:
    shutil.rmtree(tmp_path / "run", ignore_errors=True)
    zero.write(tmp_path / "run")
    check(zero, tmp_path / "run")


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_universal_checkpoints(tmp_path: Path, stage: int) -> None:
    zero = model(stage, 2)
    step = zero.write_universal(tmp_path / "run" / "step_universal")
    check(zero, step)
    with pytest.raises(Unsupported, match="'step_universal' itself"):
        holdfast.open(tmp_path / "run")
    assert not holdfast.verify(step).unchecked
    torch.save({"param": torch.ones(9)}, step / "zero" / "a.weight" / "fp32.pt")
    if stage == 3:
        with pytest.raises(MetadataError, match="9 elements"):
            holdfast.open(step)
    torch.save({"other": torch.ones(9)}, step / "zero" / "a.weight" / "fp32.pt")
    with pytest.raises(MetadataError, match="no tensor"):
        holdfast.open(step)


def test_a_slice_reads_its_part(tmp_path: Path) -> None:
    zero = model(3, 3)
    zero.write(tmp_path)
    with holdfast.open(tmp_path) as found:
        assert torch.equal(
            found["emb.weight"][3:9:2, 1:4].torch(), zero.weights["emb.weight"][3:9:2, 1:4]
        )
        assert found.aliases[0].names == ("emb.weight", "head.weight")


def test_a_conversion_takes_the_model(tmp_path: Path) -> None:
    zero = model(3, 2)
    zero.write(tmp_path / "run")
    done = holdfast.convert(tmp_path / "run", tmp_path / "m.safetensors", dtype="bf16")
    assert any("'deepspeed'" in note for note in done.notes)
    with holdfast.open(tmp_path / "m.safetensors") as found:
        assert "head.weight" in found
        assert not any(name.startswith("deepspeed") for name in found)
        assert torch.equal(found["a.weight"].torch(), zero.weights["a.weight"].bfloat16())
    holdfast.convert(tmp_path / "run", tmp_path / "o.pt", keep="deepspeed.optimizer.exp_avg.*")
    with holdfast.open(tmp_path / "o.pt") as found:
        assert set(found) == {f"deepspeed.optimizer.exp_avg.{name}" for name in zero.weights}


def test_a_state_and_slices_ask_for_the_model_alone(tmp_path: Path) -> None:
    zero = model(2, 2)
    zero.write(tmp_path)
    state = {
        name: torch.zeros_like(tensor)
        for name, tensor in {**zero.weights, **zero.buffers, **zero.frozen}.items()
    }
    state["head.weight"] = state["emb.weight"]
    assert not holdfast.torch.load_into(state, tmp_path).unexpected
    assert torch.equal(state["emb.weight"], zero.weights["emb.weight"])
    with holdfast.torch.slices(tmp_path) as found:
        assert set(found) == set(state)
        assert torch.equal(found["a.bias"][2:5], zero.weights["a.bias"][2:5])
    with holdfast.torch.slices(tmp_path, prefix="deepspeed.module.") as found:
        assert found["a.bias"].dtype is torch.bfloat16


def test_a_state_of_a_rank_is_filled(tmp_path: Path) -> None:
    zero = model(3, 3)
    zero.write(tmp_path, "pytorch_model")
    state = {
        "a.weight": torch.zeros(7, 5),
        "deepspeed.optimizer.exp_avg.a.weight": torch.zeros(7, 5),
    }
    holdfast.torch.load_sharded(tmp_path, state, strict=False)
    assert torch.equal(state["a.weight"], zero.weights["a.weight"])
    assert torch.equal(state["deepspeed.optimizer.exp_avg.a.weight"], zero.moment(0)[0]["a.weight"])


def test_every_record_is_verified(tmp_path: Path) -> None:
    step = model(3, 2).write(tmp_path)
    report = holdfast.verify(tmp_path)
    assert report.ok
    assert not report.unchecked
    file = step / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
    with holdfast.open(file) as found:
        chunk = found["optimizer_state_dict.fp32_flat_groups.0"].chunks[0]
    flip_bit(file, chunk.storage.start + 4)
    (damage,) = holdfast.verify(tmp_path).damaged
    assert damage.file.endswith(file.name)
    assert set(damage.tensors) == {"emb.weight", "a.weight", "head.weight"}


def test_a_run_without_a_pointer(tmp_path: Path) -> None:
    zero = model()
    zero.write(tmp_path)
    (tmp_path / "latest").unlink()
    check(zero, tmp_path)
    zero.write(tmp_path, "global_step4")
    (tmp_path / "latest").unlink()
    with pytest.raises(FormatError, match=r"2 steps.*'latest'"):
        holdfast.open(tmp_path)
    (tmp_path / "latest").write_text("global_step9\n")
    with pytest.raises(FormatError, match="global_step9"):
        holdfast.open(tmp_path)
    (tmp_path / "latest").write_text("x" * 10_000)
    with pytest.raises(FormatError, match="10,000 bytes"):
        holdfast.open(tmp_path)


def test_without_optimizer_files_the_model_is_what_was_stored(tmp_path: Path) -> None:
    step = model(2, 2).write(tmp_path)
    for file in step.glob("*optim_states.pt"):
        file.unlink()
    with holdfast.open(tmp_path) as found:
        assert found["emb.weight"].dtype.name == "bfloat16"
        assert any("no optimizer files" in note for note in found.notes)


def optim(rank: int) -> str:
    return f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"


def rewrite(file: Path, change: Callable[[dict[str, object]], object]) -> None:
    saved = torch.load(file, weights_only=False)
    change(saved)
    torch.save(saved, file)


def test_a_missing_rank_is_named(tmp_path: Path) -> None:
    step = model(2, 3).write(tmp_path)
    (step / optim(1)).unlink()
    with pytest.raises(FormatError, match=r"rank 1 .*missing"):
        holdfast.open(tmp_path)
    step = model(3, 3).write(tmp_path / "three")
    (step / "zero_pp_rank_2_mp_rank_00_model_states.pt").unlink()
    with pytest.raises(FormatError, match=r"model files.*rank 2 .*missing"):
        holdfast.open(step)
    for file in step.glob("*optim*"):
        file.unlink()
    with pytest.raises(FormatError, match="optimizer files are missing"):
        holdfast.open(step)


def test_a_rank_too_many(tmp_path: Path) -> None:
    step = model(2, 2).write(tmp_path)
    shutil.copy(step / optim(1), step / optim(2))
    with pytest.raises(FormatError, match="no rank 2"):
        holdfast.open(tmp_path)


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (model(3, 2), "stage 3"),
        (model(2, 3), "with 3 ranks|2 of 3"),
        (model(2, 2, step=4), "two saves"),
        (Zero(2, 2, [{"w": numbers(9)}]), "two runs"),
        (Zero(2, 2, [{"emb.weight": numbers(40)}, {"b": numbers(3)}]), "not of one save"),
    ],
    ids=["stage", "world", "step", "groups", "lengths"],
)
@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_of_two_runs(tmp_path: Path, other: Zero, said: str, rank: int) -> None:
    step = model(2, 2).write(tmp_path / "one")
    shutil.copy(other.write(tmp_path / "other") / optim(rank), step / optim(rank))
    with pytest.raises(FormatError):
        holdfast.open(step)
    if rank:
        with pytest.raises(FormatError, match=said):
            holdfast.open(step)


def test_model_files_of_two_steps(tmp_path: Path) -> None:
    step = model(3, 2).write(tmp_path / "one")
    name = "zero_pp_rank_1_mp_rank_00_model_states.pt"
    shutil.copy(model(3, 2, step=9).write(tmp_path / "other") / name, step / name)
    with pytest.raises(FormatError, match="global_steps differs"):
        holdfast.open(step)


def test_a_file_of_each_kind_for_one_rank(tmp_path: Path) -> None:
    step = model(2, 2).write(tmp_path)
    shutil.copy(step / optim(1), step / optim(1).removeprefix("bf16_"))
    with pytest.raises(FormatError, match="two files of one kind"):
        holdfast.open(step)


def test_a_buffer_that_differs_is_refused_by_its_name(tmp_path: Path) -> None:
    step = model(3, 2).write(tmp_path)
    rewrite(
        step / "zero_pp_rank_1_mp_rank_00_model_states.pt",
        lambda saved: saved["module"]["table"].add_(1),
    )
    with holdfast.open(step) as found:
        assert any("'table'" in note for note in found.notes)
        with pytest.raises(ReplicasDiffer, match="table"):
            found["table"].numpy()
        assert found["count"].item() == 7


def test_a_truncated_file(tmp_path: Path) -> None:
    step = model(2, 2).write(tmp_path)
    content = (step / optim(1)).read_bytes()
    (step / optim(1)).write_bytes(content[: len(content) // 2])
    with pytest.raises(Truncated) as caught:
        holdfast.open(tmp_path)
    assert str(caught.value.file).endswith(optim(1))


@pytest.mark.parametrize(
    "name",
    [
        "layer_01-model_00-model_states.pt",
        "layer_0_expert_3_mp_rank_00_model_states.pt",
        "mp_rank_01_model_states.pt",
        "expp_rank_0_mp_rank_00_optim_states.pt",
    ],
)
def test_what_is_not_put_together_is_refused(tmp_path: Path, name: str) -> None:
    step = model(2, 2).write(tmp_path)
    shutil.copy(step / "mp_rank_00_model_states.pt", step / name)
    with pytest.raises(Unsupported):
        holdfast.open(tmp_path)


def test_files_that_only_have_the_names(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "mp_rank_00_model_states.pt")
    (tmp_path / "more.txt").write_text("")
    with pytest.raises(FormatError, match="no dict `module`"):
        holdfast.open(tmp_path)
    (tmp_path / "mp_rank_00_model_states.pt").write_bytes(b"no zip at all")
    with pytest.raises(FormatError, match="no checkpoint in this folder"):
        holdfast.open(tmp_path)


class Touch:
    """What a hostile file would run."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self._path,)


def _lie(key: str, value: object) -> Callable[[dict[str, object]], object]:
    return lambda saved: saved["optimizer_state_dict"].__setitem__(key, value)  # type: ignore[attr-defined]


LIES: dict[str, Callable[[dict[str, object]], object]] = {
    "stage": _lie("zero_stage", 7),
    "stage is text": _lie("zero_stage", "2"),
    "count": _lie("partition_count", [2, 10**12]),
    "negative count": _lie("partition_count", -2),
    "huge count": _lie("partition_count", 10**12),
    "no count": _lie("partition_count", None),
    "no groups": _lie("single_partition_of_fp32_groups", None),
    "an empty list": _lie("single_partition_of_fp32_groups", []),
    "groups of text": _lie("single_partition_of_fp32_groups", ["w", "b"]),
    "two dimensions": _lie("single_partition_of_fp32_groups", [torch.zeros(8, 6), torch.zeros(4)]),
    "expanded": _lie(
        "single_partition_of_fp32_groups", [torch.zeros(1).expand(46), torch.zeros(4)]
    ),
    "other dtypes": _lie(
        "single_partition_of_fp32_groups", [torch.zeros(46, dtype=torch.float16), torch.zeros(4)]
    ),
    "paddings": _lie("param_alignment_paddings", [[0, -5], [0, 0]]),
    "paddings for others": _lie("param_alignment_paddings", [[0], [0]]),
    "many gaps": _lie("param_alignment_paddings", [[10**12, 0], [0, 0]]),
}


@pytest.mark.parametrize("lie", LIES)
def test_an_optimizer_file_that_lies(tmp_path: Path, lie: str) -> None:
    step = model(2, 2).write(tmp_path)
    rewrite(step / optim(0), LIES[lie])
    with pytest.raises((FormatError, Unsupported)):
        holdfast.open(tmp_path)


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize(
    "shapes",
    [
        None, [], [{}], "text", [{"w": (10**12,)}, {}], [{"w": (-1, -90)}, {}], [{"w": (10**6, 10**6, 10**9)}, {}],
        [{"w": "text"}, {}], [{"w": (True,)}, {}], [{5: (1,)}, {}],
        [{"w": (90,)}, {"w": (8,)}], [{"w": (1,) * 70}, {}], [{"w": (1,)}, {"b": (1,)}],
    ],
    ids=str,
)  # fmt: skip
def test_shapes_that_lie(tmp_path: Path, stage: int, shapes: object) -> None:
    step = model(stage, 2).write(tmp_path)
    for file in step.glob("*model_states.pt"):
        rewrite(file, lambda saved: saved.__setitem__("param_shapes", shapes))
    with pytest.raises(HoldfastError):
        holdfast.open(tmp_path)


def test_shapes_in_another_order_are_told_from_what_the_ranks_say(tmp_path: Path) -> None:
    step = model(2, 2).write(tmp_path)

    def turn(saved: dict[str, object]) -> None:
        first, second = saved["param_shapes"]  # type: ignore[misc]
        saved["param_shapes"] = [dict(reversed(first.items())), second]

    rewrite(step / "mp_rank_00_model_states.pt", turn)
    with pytest.raises(MetadataError, match="other elements"):
        holdfast.open(tmp_path)


def test_nothing_is_executed(tmp_path: Path) -> None:
    zero = model(2, 2)
    step = zero.write(tmp_path)
    for file in step.glob("*.pt"):
        rewrite(file, lambda saved: saved.__setitem__("client", Touch(tmp_path / "ran")))
    check(zero, tmp_path)
    assert not (tmp_path / "ran").exists()
    pickle.loads(pickle.dumps(Touch(tmp_path / "ran")))
    assert (tmp_path / "ran").exists()


def test_a_state_that_contains_itself(tmp_path: Path) -> None:
    step = model(2, 2).write(tmp_path)
    loop: list[object] = [1]
    loop.append(loop)
    wide: list[object] = []
    for _ in range(20):
        wide = [wide, wide]
    rewrite(step / "mp_rank_00_model_states.pt", lambda saved: saved.update(loop=loop, wide=wide))
    check(model(2, 2), tmp_path)
