"""Verbs that write, on ranks that are threads: every file is the same for any number of ranks."""

from __future__ import annotations

import filecmp
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import holdfast
from holdfast.engine.targets import plan_save
from tests.groups import ThreadGroup, on_ranks, raise_first_error


@pytest.fixture(autouse=True)
def small_cuts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of a few hundred kilobytes are cut as files of gigabytes are."""
    monkeypatch.setattr(plan_save, "MAX_UNCUT_NBYTES", 64 << 10)


def state(seed: int = 0) -> dict[str, object]:
    rng = np.random.default_rng(seed)
    layers = {
        f"layers.{i}.weight": rng.standard_normal((64 + 8 * i, 96)).astype(np.float32)
        for i in range(12)
    }
    small = {f"small.{i}": rng.standard_normal(5).astype(np.float16) for i in range(200)}
    return {
        **layers,
        **small,
        "big": rng.standard_normal((700, 512)).astype(np.float32),
        "step": 7,
        "empty": np.zeros((0, 3)),
    }


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("source") / "model.pt"
    holdfast.save(state(), path, durable=False)
    return path


def same_files(one: Path, other: Path) -> bool:
    if one.is_file():
        return filecmp.cmp(one, other, shallow=False)
    names = sorted(path.name for path in one.iterdir())
    assert names == sorted(path.name for path in other.iterdir())
    return all(filecmp.cmp(one / name, other / name, shallow=False) for name in names)


TARGETS: dict[str, dict[str, object]] = {
    "out.pt": {},
    "out.safetensors": {},
    "native": {},
    "hf": {"format": "safetensors", "max_shard_size": 300_000},
    "out.npz": {"tensors_only": True},
    "out.gguf": {},
}

Verb = Callable[[Path, Path, "ThreadGroup | None"], object]


def compared(verb: Verb, source: Path, folder: Path, name: str, size: int) -> object:
    alone, many = folder / "alone", folder / "many"
    alone.mkdir()
    many.mkdir()
    first = verb(source, alone / name, None)
    found = raise_first_error(on_ranks(size, lambda group: verb(source, many / name, group)))
    assert same_files(alone / name, many / name)
    assert [path.name for path in many.iterdir()] == [name]
    return first, found


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("name", ["out.pt", "out.safetensors", "native", "hf"])
def test_convert(source: Path, tmp_path: Path, name: str, size: int):
    first, found = compared(
        lambda src, dst, group: holdfast.convert(
            src, dst, group=group, durable=False, **TARGETS[name]
        ),
        source,
        tmp_path,
        name,
        size,
    )
    assert [one.nbytes for one in found] == [first.nbytes] * size
    assert found[0].crcs == first.crcs
    assert all(one.done and one.notes == first.notes for one in found)
    assert holdfast.verify(tmp_path / "many" / name).ok


def test_edit_says_what_casts_lost_on_all_ranks(source: Path, tmp_path: Path):
    def edit(src: Path, dst: Path, group: ThreadGroup | None) -> holdfast.Conversion:
        options = {
            "dtype": "float8_e4m3fn",
            "drop": ["small.1*"],
            "rename": {"layers.*": "model.layers.*"},
        }
        return holdfast.edit(src, dst, group=group, durable=False, **options)

    first, found = compared(edit, source, tmp_path, "out.safetensors", 3)
    assert any("cast to" in note for note in first.notes)
    assert all(one.notes == first.notes for one in found)


def test_edit_in_place(source: Path, tmp_path: Path):
    for name in ("alone", "many"):
        holdfast.convert(source, tmp_path / name, durable=False)
    holdfast.edit(tmp_path / "alone", in_place=True, rename={"big": "large"})
    raise_first_error(
        on_ranks(
            3,
            lambda group: holdfast.edit(
                tmp_path / "many", in_place=True, rename={"big": "large"}, group=group
            ),
        )
    )
    assert same_files(tmp_path / "alone", tmp_path / "many")


@pytest.mark.parametrize("name", ["model.pt", "native", "hf"])
def test_copy(source: Path, tmp_path: Path, name: str):
    made = tmp_path / "source" / name
    made.parent.mkdir()
    holdfast.convert(source, made, durable=False, **TARGETS.get(name, {}))
    compared(
        lambda src, dst, group: holdfast.copy(src, dst, group=group, durable=False),
        made,
        tmp_path,
        name,
        3,
    )


def test_reshard(source: Path, tmp_path: Path):
    compared(
        lambda src, dst, group: holdfast.reshard(src, dst, mesh="dp=2,tp=3", rules=["*: tp=0"], group=group, durable=False)
        if group is not None
        else holdfast.reshard(src, dst, mesh="dp=2,tp=3", rules=["*: tp=0"], durable=False),
        flat(source, tmp_path), tmp_path, "out", 4,
    )  # fmt: skip


def flat(source: Path, folder: Path) -> Path:
    """The tensors that have a first dimension, alone."""
    path = folder / "flat.safetensors"
    holdfast.convert(source, path, keep=["layers.*", "big"], durable=False)
    return path


RULES = {
    "magnitude": ["layers.*: 0.5", "big: 0.3"],
    "global": ["layers.*: global 0.4", "big: global 0.4"],
    "nm": ["layers.*: 2:4", "big: 1:4"],
    "block": ["layers.*: block 4x4 0.5", "big: block 16x16 0.25"],
    "random": ["layers.*: random 0.3 seed=1"],
}


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("rules", [*RULES])
def test_prune(source: Path, tmp_path: Path, rules: str, dtype: str):
    made = tmp_path / "made.safetensors"
    holdfast.convert(source, made, dtype=dtype, durable=False)

    def prune(src: Path, dst: Path, group: ThreadGroup | None) -> holdfast.Pruned:
        return holdfast.prune(src, dst, RULES[rules], group=group, durable=False)

    first, found = compared(prune, made, tmp_path, "out", 3)
    assert all(
        (one.tensors, one.norm_lost, one.notes) == (first.tensors, first.norm_lost, first.notes)
        for one in found
    )
    looked = raise_first_error(
        on_ranks(
            2,
            lambda group: holdfast.prune(
                made, tmp_path / "dry", RULES[rules], group=group, dry_run=True
            ),
        )
    )
    assert all(
        (one.tensors, one.norm_lost, one.done) == (first.tensors, first.norm_lost, False)
        for one in looked
    )


@pytest.mark.parametrize("name", ["out.pt", "out.safetensors", "copy.pt"])
def test_a_file_that_is_too_short_to_be_cut(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
):
    """The first rank has it, who made it; as it is with most files: those up to 32 MiB."""
    monkeypatch.undo()
    verb = holdfast.copy if name == "copy.pt" else holdfast.convert
    compared(
        lambda src, dst, group: verb(src, dst, group=group, durable=False),
        source,
        tmp_path,
        name,
        3,
    )


def test_a_dry_run_writes_nothing(source: Path, tmp_path: Path):
    found = raise_first_error(
        on_ranks(
            3,
            lambda group: holdfast.convert(source, tmp_path / "out.pt", group=group, dry_run=True),
        )
    )
    assert not any(one.done for one in found)
    assert not [*tmp_path.iterdir()]


def test_progress_of_all_ranks_comes_to_the_first(source: Path, tmp_path: Path):
    heard: dict[int, list[int]] = {0: [], 1: [], 2: []}

    def job(group: ThreadGroup) -> holdfast.Conversion:
        return holdfast.convert(
            source, tmp_path / "out.safetensors", group=group, progress=heard[group.rank].append
        )

    (first, *_) = raise_first_error(on_ranks(3, job))
    assert (sum(heard[0]), heard[1], heard[2]) == (first.nbytes, [], [])
