"""Every verb, from every format to every format: 2, 3 and 4 ranks write the files of one process, find what it finds, and refuse
what it refuses.

`make test` asks a part of the product (tests/conftest.py), and `--exhaustive` all of it.
"""

from __future__ import annotations

import filecmp
import json
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.distributed.tensor import Shard

import holdfast
from holdfast.engine.targets import plan_save
from holdfast.errors import HoldfastError, RanksFailed
from holdfast.formats import FORMATS, written_formats
from holdfast.torch import versions
from tests.conftest import GOLDEN
from tests.groups import ThreadGroup, on_ranks
from tests.rank_folders import save_ranks

SIZES = [2, 3, 4]


@pytest.fixture(autouse=True)
def small_cuts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of a few kilobytes are cut as files of gigabytes are: between any two bytes."""
    monkeypatch.setattr(plan_save, "MAX_UNCUT_NBYTES", 1 << 10)


def state() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    made = {f"layers.{i}.weight": torch.randn(24 + 8 * i, 32) for i in range(5)}
    made |= {f"layers.{i}.bias": torch.randn(6).to(torch.bfloat16) for i in range(5)}
    return made | {
        "embedding": torch.randn(120, 32),
        "half": torch.randn(16, 12).half(),
        "flags": torch.tensor([True, False]),
    }


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = torch.nn.Linear(16, 24), torch.nn.Linear(24, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(self.one(x))


def make_sources(folder: Path) -> None:
    """A checkpoint of each format that a program can write here; the others are golden files."""
    tensors = state()
    holdfast.save(tensors, folder / "native", durable=False)
    holdfast.save(tensors, folder / "sharded", durable=False, max_shard_size=9_000)
    holdfast.save(tensors, folder / "x.safetensors", durable=False)
    holdfast.save(tensors, folder / "hf", format="safetensors", max_shard_size=9_000, durable=False)
    (folder / "hf" / "config.json").write_text('{"model_type": "toy"}')
    torch.save({"model": tensors, "step": 7, "tied": tensors["embedding"]}, folder / "x.pt")
    torch.save(tensors, folder / "x.th", _use_new_zipfile_serialization=False)
    np.savez(
        folder / "x.npz",
        **{name: one.numpy() for name, one in tensors.items() if one.dtype != torch.bfloat16},
    )
    np.save(folder / "x.npy", tensors["embedding"].numpy())
    holdfast.torch.save_sharded(folder / "dcp", tensors, format="dcp", durable=False)
    placed = {
        name: (one, [Shard(0)]) for name, one in tensors.items() if one.dtype == torch.float32
    }
    save_ranks(folder / "rank-files", (2,), placed)
    if versions.PT2_ARCHIVE:
        torch.export.save(torch.export.export(Model(), (torch.randn(2, 16),)), folder / "x.pt2")
    bins = folder / "bins"
    bins.mkdir()
    files = {
        "pytorch_model-00001-of-00002.bin": [*tensors][:6],
        "pytorch_model-00002-of-00002.bin": [*tensors][6:],
    }
    for name, own in files.items():
        torch.save({one: tensors[one].clone() for one in own}, bins / name)
    places = {one: name for name, own in files.items() for one in own}
    (bins / "pytorch_model.bin.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": places})
    )
    for name in (
        "torchscript.pt",
        "tiny.gguf",
        "tar.pt",
        "dtypes.pt",
        "module_nested.pt",
        "dtypes.safetensors",
        "packed.safetensors",
        "deflated.npz",
    ):
        shutil.copy(GOLDEN / "files" / name, folder / name)


SOURCES = {
    "native": "native", "sharded": "native", "x.safetensors": "safetensors", "hf": "safetensors-dir", "x.pt": "torch-zip",
    "x.th": "torch-legacy", "x.npz": "npz", "x.npy": "npy", "dcp": "dcp", "rank-files": "rank-files", "x.pt2": "pt2",
    "torchscript.pt": "torchscript", "bins": "torch-dir", "tiny.gguf": "gguf", "tar.pt": "torch-tar", "dtypes.pt": "torch-zip",
    "module_nested.pt": "torch-zip", "dtypes.safetensors": "safetensors", "packed.safetensors": "safetensors",
    "deflated.npz": "npz",
}  # fmt: skip
"""The sources, and the format of each."""
if not versions.PT2_ARCHIVE:
    del SOURCES["x.pt2"]
ELSEWHERE = {"megatron", "gguf-dir", "deepspeed", "meta-llama", "diffusers", "onnx", "pickle"}
"""Formats of other programs, whose folders are read by the readers of these files."""


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sources")
    make_sources(folder)
    return folder


def test_every_format_is_here(sources: Path):
    assert {one.name for one in FORMATS} - {"pt2"} == {*SOURCES.values()} - {"pt2"} | ELSEWHERE
    for name, format in SOURCES.items():
        with holdfast.open(sources / name) as source:
            assert source.format == format
    made = {
        "out.pt": "torch-zip",
        "out.safetensors": "safetensors",
        "native": "native",
        "hf": "safetensors-dir",
        "dcp": "dcp",
    }
    assert {one.name for one in written_formats()} == {*made.values()}
    assert made.keys() <= {name for name, _ in TARGETS.values()}


# What is written.

Options = dict[str, object]
TARGETS: dict[str, tuple[str, Options]] = {
    "torch": ("out.pt", {}),
    "safetensors": ("out.safetensors", {"tensors_only": True}),
    "native": ("native", {}),
    "native files": ("native", {"max_shard_size": 7_000}),
    "hf": ("hf", {"format": "safetensors", "tensors_only": True, "max_shard_size": 7_000}),
    "one in a folder": ("hf", {"format": "safetensors", "tensors_only": True}),
    "dcp": ("dcp", {"format": "dcp", "tensors_only": True, "max_shard_size": 7_000}),
}
VERBS: dict[str, tuple[Callable[..., object], tuple[object, ...], Options]] = {
    "convert": (holdfast.convert, (), {}),
    "cast": (holdfast.convert, (), {"dtype": "bf16"}),
    "edit": (holdfast.edit, (), {"rename": {"layers.*": "model.layers.*"}, "drop": ["*.bias"]}),
    "prune": (holdfast.prune, (["*weight: 0.5", "*embedding*: block 4x4 0.3"],), {}),
    "prune all": (holdfast.prune, (["*weight: global 0.5", "*embedding*: global 0.5"],), {}),
}
KEPT = {"prune": ("tensors_only",), "prune all": ("tensors_only",), "edit": ("tensors_only",)}
"""Options that a verb does not take."""
ALONE: dict[tuple[str, ...], object] = {}
"""What one process made of it, or said: the same for each number of ranks."""


def compared(
    key: tuple[str, ...],
    call: Callable[[Path, ThreadGroup | None], object],
    name: str,
    size: int,
    room: Path,
    kept: Path,
) -> None:
    """Do it alone, once for all sizes, and with so many ranks; look at every file, and at every report or refusal."""
    alone = kept / "-".join(key).replace("/", "_").replace(" ", "_")
    if key not in ALONE:
        alone.mkdir()
        try:
            ALONE[key] = call(alone / name, None)
        except HoldfastError as error:
            ALONE[key] = error
    first, found = ALONE[key], on_ranks(size, lambda group: call(room / name, group))
    if isinstance(first, HoldfastError):
        for one in found:
            assert isinstance(one, RanksFailed | type(first)), (one, first)
            assert first.message in str(one).replace(str(room), str(alone))
        assert not [*room.iterdir()]
        return
    for one in found:
        assert not isinstance(one, BaseException), one
        for field in ("nbytes", "files", "tensors", "norm_lost", "notes"):
            assert getattr(one, field, None) == getattr(first, field, None)
    assert found[0].crcs == first.crcs
    assert [path.name for path in room.iterdir()] == [name]
    assert_same_files(alone / name, room / name)


def assert_same_files(one: Path, other: Path) -> None:
    if one.is_file():
        assert filecmp.cmp(one, other, shallow=False)
        return
    names = sorted(str(path.relative_to(one)) for path in one.rglob("*"))
    assert names == sorted(str(path.relative_to(other)) for path in other.rglob("*"))
    for name in names:
        assert (one / name).is_dir() or filecmp.cmp(one / name, other / name, shallow=False), name


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("alone")


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_writes_the_same(
    verb: str, source: str, target: str, size: int, sources: Path, tmp_path: Path, kept: Path
):
    function, arguments, own = VERBS[verb]
    name, options = TARGETS[target]
    given = {
        key: value for key, value in {**options, **own}.items() if key not in KEPT.get(verb, ())
    }

    def call(dst: Path, group: ThreadGroup | None) -> object:
        return function(sources / source, dst, *arguments, group=group, durable=False, **given)

    compared((verb, source, target), call, name, size, tmp_path, kept)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("source", SOURCES)
def test_copies_are_the_same(source: str, size: int, sources: Path, tmp_path: Path, kept: Path):
    def call(dst: Path, group: ThreadGroup | None) -> object:
        return holdfast.copy(sources / source, dst, group=group, durable=False)

    compared(("cp", source), call, source, size, tmp_path, kept)
    if not isinstance(ALONE["cp", source], HoldfastError):
        assert_same_files(sources / source, tmp_path / source)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("source", SOURCES)
def test_reshards_are_the_same(source: str, size: int, sources: Path, tmp_path: Path, kept: Path):
    def call(dst: Path, group: ThreadGroup | None) -> object:
        rules = ["*weight: tp=0", "*embedding: tp=1", "*: "]
        return holdfast.reshard(
            sources / source, dst, mesh="dp=2,tp=2", rules=rules, group=group, durable=False
        )

    compared(("reshard", source), call, "out", size, tmp_path, kept)


# What is found.


def told(call: Callable[[], object]) -> object:
    """What a verb says, or refuses."""
    try:
        return call()
    except HoldfastError as error:
        return error


LOOKS: dict[str, Callable[[Path, ThreadGroup | None], object]] = {
    "verify": lambda path, group: holdfast.verify(path, group=group),
    "stats": lambda path, group: holdfast.stats(path, group=group),
    "diff": lambda path, group: holdfast.diff(path, path.parent / "native", group=group),
    "exact diff": lambda path, group: holdfast.diff(path, path, exact=True, group=group),
    "scan": lambda path, group: asdict(holdfast.scan(path, group=group)),
    "report": lambda path, group: holdfast.report(path, stats=True, svd=True, group=group).document,
}


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("verb", LOOKS)
def test_every_verb_finds_the_same(verb: str, source: str, sources: Path):
    look = LOOKS[verb]
    alone = told(lambda: look(sources / source, None))
    for size in SIZES:
        for one in on_ranks(size, lambda group: look(sources / source, group)):
            if isinstance(alone, HoldfastError):
                assert isinstance(one, RanksFailed | type(alone)), one
                assert alone.message in str(one)
            else:
                assert repr(one) == repr(alone)


@pytest.mark.parametrize("path", sorted((GOLDEN / "hostile").iterdir()), ids=lambda path: path.name)
def test_hostile_files_are_the_same_for_ranks(path: Path):
    for look in (LOOKS["verify"], LOOKS["scan"], LOOKS["stats"]):
        alone = told(lambda look=look: look(path, None))
        for one in on_ranks(3, lambda group, look=look: look(path, group)):
            if isinstance(alone, HoldfastError):
                assert isinstance(one, RanksFailed | type(alone)), one
            else:
                assert repr(one) == repr(alone)
