"""Directories that torch's distributed checkpoint wrote, by one rank and by several, are read bit for bit."""

from __future__ import annotations

import io
import pickle
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.multiprocessing import start_processes

import holdfast
from holdfast.core.tensor import Composite
from holdfast.torch import versions
from tests.parity.compare import elements
from tests.processes import fork_server
from tests.support import dtypes, needs

from .dcp_ranks import WHOLE, save_all

pytestmark = pytest.mark.filterwarnings("ignore")


def state() -> dict[str, object]:
    """One of everything that a training state has and torch can save and load again."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
    adam = torch.optim.Adam(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    adam.step()
    base = torch.arange(100.0)
    return {
        "model": model.state_dict(),
        "optimizer": adam.state_dict(),
        "step": 7,
        "nested": {"list": [torch.ones(2), 5, {"a": torch.zeros(1)}], "tuple": (torch.arange(3), "x"), "empty": []},
        "dtypes": {
            str(dtype).removeprefix("torch."): (torch.arange(16, dtype=torch.uint8) * 11).view(dtype)
            for dtype in dtypes(
                "bfloat16", "float16", "float64", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "float4_e2m1fn_x2", "int8",
                "int16", "int64", "uint16", "uint32", "uint64", "complex64", "complex128",
                but=() if versions.FLOAT4_COPIED else ("float4_e2m1fn_x2",),
            )
        },
        "bool": torch.tensor([True, False]),
        "scalar": torch.tensor(3.5),
        "none": torch.empty(0, 3),
        "turned": torch.arange(12.0).reshape(3, 4).t(),
        "channels_last": torch.arange(24.0).reshape(1, 2, 3, 4).to(memory_format=torch.channels_last),
        "slice": base[3:10],
        "every_second": base[::2],
        "expanded": torch.ones(1).expand(3),
        "conjugated": torch.tensor([1 + 2j, 3 - 1j]).conj(),
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "others": [None, True, 1.5, "text", b"bytes", {1, 2}, range(3), 1 + 2j],
    }  # fmt: skip


WAYS = {
    "usual": lambda path: FileSystemWriter(path),
    "threads": lambda path: FileSystemWriter(path, thread_count=2),
    "items": lambda path: FileSystemWriter(path, single_file_per_rank=False),
    "overwritten": lambda path: FileSystemWriter(path, overwrite=True),
}


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> tuple[Path, dict[str, object]]:
    """One state, saved by one process in each way, and what torch loads from it."""
    folder = tmp_path_factory.mktemp("one")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, writer in WAYS.items():
            dcp.save(state(), storage_writer=writer(folder / name))
        dcp_to_torch_save(folder / "usual", folder / "loaded.pt")
        return folder, torch.load(folder / "loaded.pt", weights_only=False)


def leaves(
    tree: object, path: tuple[str | int, ...] = ()
) -> Iterator[tuple[tuple[str | int, ...], object]]:
    inside = (
        tree.items()
        if isinstance(tree, dict)
        else enumerate(tree)
        if isinstance(tree, list | tuple)
        else None
    )
    if inside is None or not tree:
        yield path, tree
        return
    for key, value in inside:
        yield from leaves(value, (*path, key))


@pytest.mark.parametrize("way", WAYS)
def test_one_rank(written, way):
    folder, loaded = written
    wanted = dict(leaves(loaded))
    with holdfast.open(folder / way) as ckpt:
        assert ckpt.format == "dcp"
        found = dict(leaves(ckpt.tree))
        assert found.keys() == wanted.keys()
        arrays = ckpt.read()
        for path, value in wanted.items():
            if isinstance(value, torch.Tensor):
                lazy = found[path]
                assert (f"torch.{lazy.dtype.torch}", lazy.shape) == (
                    str(value.dtype),
                    tuple(value.shape),
                ), path
                assert lazy.name == ".".join(map(str, path))
                assert arrays[lazy.name].tobytes() == elements(value), path
            else:
                assert (type(found[path]), found[path]) == (type(value), value), path
        assert ckpt.foreign == ()
        assert ckpt["parameter"].traits.requires_grad


def test_slices_of_what_is_strided(written):
    folder, loaded = written
    by_name = {".".join(map(str, path)): value for path, value in leaves(loaded)}
    with holdfast.open(folder / "usual") as ckpt:
        for name, index in {
            "turned": np.s_[1:3, ::-1], "channels_last": np.s_[0, :, 1:, 2], "conjugated": np.s_[1:], "every_second": np.s_[40:],
            "dtypes.bfloat16": np.s_[::3], "scalar": np.s_[...], "none": np.s_[:, 1], "model.0.weight": np.s_[2],
        }.items():  # fmt: skip
            value = by_name[name]
            raw = torch.from_numpy(np.frombuffer(elements(value), np.uint8).copy())
            plain = raw.view(value.dtype).reshape(value.shape) if value.numel() else value
            array = (
                plain.view(torch.int16).numpy() if value.dtype == torch.bfloat16 else plain.numpy()
            )
            assert (
                ckpt[name][index].numpy().tobytes() == np.ascontiguousarray(array[index]).tobytes()
            ), name


def test_the_same_as_a_pt_file_and_through_every_format(written, tmp_path):
    folder, loaded = written
    torch.save(loaded, tmp_path / "model.pt")
    compared = holdfast.diff(folder / "usual", tmp_path / "model.pt")
    assert compared.equal
    assert compared.same_by_checksum > 0.8 * compared.same, "most need not be read"
    assert holdfast.diff(folder / "usual", tmp_path / "model.pt", exact=True).equal
    for target in ("out.pt", "out"):
        holdfast.convert(folder / "items", tmp_path / target)
        assert holdfast.diff(folder / "usual", tmp_path / target, exact=True).equal
    again = torch.load(tmp_path / "out.pt", weights_only=False)
    for path, value in leaves(loaded):
        if isinstance(value, torch.Tensor):
            assert elements(dict(leaves(again))[path]) == elements(value), path


def test_verify(written):
    folder, _ = written
    for way in WAYS:
        report = holdfast.verify(folder / way)
        assert report.ok, report
        assert not report.unchecked
        assert len(report.files) == len(list((folder / way).glob("*.distcp")))


@pytest.mark.parametrize("protocol", range(6))
def test_every_protocol(written, tmp_path, protocol):
    folder, _ = written
    raw = pickle.loads((folder / "usual" / ".metadata").read_bytes())
    (tmp_path / ".metadata").write_bytes(pickle.dumps(raw, protocol))
    (tmp_path / "__0_0.distcp").symlink_to("data")
    (tmp_path / "data").write_bytes((folder / "usual" / "__0_0.distcp").read_bytes())
    with holdfast.open(tmp_path) as ckpt, holdfast.open(folder / "usual") as usual:
        assert ckpt.foreign == ()
        assert ckpt.digest() == usual.digest()


def test_the_vocabulary_is_torchs_own(written):
    from holdfast.formats.dcp.index import read_metadata
    from tests.formats.dcp.vocabulary import to_metadata

    folder, _ = written
    theirs = pickle.loads((folder / "usual" / ".metadata").read_bytes())
    with holdfast.open(folder / "usual") as ckpt:
        ours = to_metadata(read_metadata(ckpt["scalar"].source)[0])
    assert ours.planner_data == theirs.planner_data
    assert ours.version == (theirs.version if versions.VERSIONED else None)
    assert ours.storage_meta.save_id == theirs.storage_meta.save_id
    assert list(ours.state_dict_metadata) == list(theirs.state_dict_metadata)
    for name, stored in theirs.state_dict_metadata.items():
        mine = ours.state_dict_metadata[name]
        assert type(mine).__name__ == type(stored).__name__
        if hasattr(stored, "chunks"):
            assert mine.size == stored.size
            assert [(c.offsets, c.sizes) for c in mine.chunks] == [
                (c.offsets, c.sizes) for c in stored.chunks
            ]
            assert f"torch.{mine.properties.dtype.torch}" == str(stored.properties.dtype)
            assert mine.properties.requires_grad == stored.properties.requires_grad
    places = {
        (k.fqn, k.offset, k.index): (v.relative_path, v.offset, v.length)
        for k, v in theirs.storage_data.items()
    }
    assert {
        (k.fqn, k.offset, k.index): (v.relative_path, v.offset, v.length)
        for k, v in ours.storage_data.items()
    } == places


def test_quantised(tmp_path):
    whole = torch.quantize_per_tensor(torch.arange(4.0), 0.5, 3, torch.quint8)
    rows = torch.quantize_per_channel(
        torch.ones(2, 2), torch.tensor([0.1, 0.2]), torch.tensor([0, 1]), 0, torch.qint8
    )
    dcp.save({"whole": whole, "rows": rows}, checkpoint_id=tmp_path / "q")
    with holdfast.open(tmp_path / "q") as ckpt:
        assert isinstance(ckpt.tree["whole"], Composite)
        assert ckpt.tree["whole"].attributes["scale"] == 0.5
        assert ckpt["whole.int_repr"].numpy().tolist() == whole.int_repr().tolist()
        assert torch.equal(ckpt.tree["rows"].torch().dequantize(), rows.dequantize())


def test_names_that_hold_dots_and_lists_of_mappings(tmp_path):
    saved = {
        "a.b": torch.ones(1),
        "a": {"c": [{"x": torch.zeros(2)}, {"x": torch.ones(2)}], "d.e": 1},
        3: {4: torch.ones(1)},
    }
    dcp.save(saved, checkpoint_id=tmp_path / "n")
    with holdfast.open(tmp_path / "n") as ckpt:
        assert sorted(ckpt) == ["3.4", "a.b", "a.c.0.x", "a.c.1.x"]
        assert list(ckpt.tree) == ["a.b", "a", "3"]
        assert ckpt.tree["a"]["d.e"] == 1
        assert [ckpt.tree["a"]["c"][i]["x"].numpy().tolist() for i in (0, 1)] == [[0, 0], [1, 1]]


def test_what_a_cached_plan_writes_under_the_wrong_dtype_is_refused(written, tmp_path):
    """torch 2.13 compares cached plans without dtypes: float64 data under metadata that says float32 (a defect that loads)."""
    folder, _ = written
    raw = pickle.loads((folder / "usual" / ".metadata").read_bytes())
    raw.state_dict_metadata["slice"].properties.dtype = torch.int32
    (tmp_path / ".metadata").write_bytes(pickle.dumps(raw))
    (tmp_path / "__0_0.distcp").write_bytes((folder / "usual" / "__0_0.distcp").read_bytes())
    with (
        holdfast.open(tmp_path) as ckpt,
        pytest.raises(holdfast.errors.MetadataError, match="int32") as caught,
    ):
        ckpt["slice"].numpy()
    assert caught.value.tensor == "slice"


@pytest.fixture(scope="module", params=[2, 3])
def ranks(request, tmp_path_factory) -> Path:
    """What so many ranks saved together."""
    folder = tmp_path_factory.mktemp(f"ranks{request.param}")
    fork_server()
    start_processes(
        save_all,
        (request.param, str(folder)),
        nprocs=request.param,
        start_method="forkserver",
    )
    return folder


def check_whole(ckpt: holdfast.Checkpoint, names: list[str]) -> None:
    arrays = ckpt.read(*names)
    for name in names:
        whole = WHOLE[name]
        assert ckpt[name].shape == tuple(whole.shape), name
        assert arrays[name].tobytes() == elements(whole), name
        raw = np.frombuffer(elements(whole), np.uint8).reshape(*whole.shape, whole.dtype.itemsize)
        for index in (np.s_[..., 1:3], np.s_[..., ::-2], np.s_[:1, ...]):
            wanted = np.ascontiguousarray(raw[(*index, slice(None))])
            assert ckpt[name][index].numpy().tobytes() == wanted.tobytes()
    crc = {name: holdfast.open(_saved({name: WHOLE[name]}))[name].digest() for name in names}
    assert {name: ckpt[name].digest() for name in names} == crc, (
        "whatever the shards, the digest is that of the whole"
    )


def _saved(value: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


@pytest.mark.parametrize(
    "way", ["usual", "threads", "items", pytest.param("alone", marks=needs(versions.HUGGING_FACE))]
)
def test_several_ranks(ranks, way):
    count = int(ranks.name.removeprefix("ranks")[0])
    with holdfast.open(ranks / way) as ckpt:
        assert sorted(ckpt) == sorted(WHOLE)
        check_whole(ckpt, list(WHOLE))
        assert ckpt.tree["step"] == 3
        assert [ckpt.tree[f"rank{i}"] for i in range(count)] == list(range(count))
        assert len(ckpt["row"].chunks) == len(ckpt["col"].chunks) == count
        # Ranks that saved alone wrote metadata of their own, which a note says.
        assert bool(ckpt.notes) == (way == "alone")
    assert holdfast.verify(ranks / way).ok


def test_several_ranks_converted(ranks, tmp_path):
    torch.save({name: WHOLE[name] for name in WHOLE}, tmp_path / "model.pt")
    compared = holdfast.diff(ranks / "usual", tmp_path / "model.pt")
    assert not compared.changed
    assert not compared.added
    assert not compared.removed
    holdfast.convert(ranks / "usual", tmp_path / "out.pt")
    loaded = torch.load(tmp_path / "out.pt")
    for name, whole in WHOLE.items():
        assert torch.equal(loaded[name], whole)


@needs(versions.HUGGING_FACE)
@pytest.mark.parametrize("way", ["hf", "hf_whole"])
def test_several_ranks_as_safetensors(ranks, way):
    with holdfast.open(ranks / way) as ckpt:
        check_whole(ckpt, [name for name in WHOLE if way == "hf" or name != "plain"])


@needs(versions.HUGGING_FACE)
def test_pieces_that_wait_to_be_consolidated(ranks, tmp_path):
    (tmp_path / "sharded").symlink_to(ranks / "hf", target_is_directory=True)
    with pytest.raises(holdfast.errors.HoldfastError):
        holdfast.open(tmp_path).read()  # a link that leads out is not followed
    (tmp_path / "copy" / "sharded").mkdir(parents=True)
    for file in (ranks / "hf").iterdir():
        (tmp_path / "copy" / "sharded" / file.name).write_bytes(file.read_bytes())
    with holdfast.open(tmp_path / "copy") as ckpt:
        check_whole(ckpt, list(WHOLE))


@needs(versions.HUGGING_FACE)
@pytest.mark.parametrize("way", ["narrow", "hf_narrow"])
def test_narrow_types_in_pieces(ranks, way):
    count = int(ranks.name.removeprefix("ranks")[0])
    parts = [(np.arange(4, dtype=np.uint8) + 4 * rank).reshape(2, 2) for rank in range(count)]
    axes = {"f4_row": 0, "f4_col": 1, "e8m0": 1, "e4m3": 0}
    with holdfast.open(ranks / way) as ckpt:
        for name, axis in axes.items():
            whole = np.concatenate(parts, axis)
            array = ckpt[name].numpy()
            if name.startswith("f4") and way == "hf_narrow":
                nibbles = array.view(np.uint8).reshape(*whole.shape, 2)
                array = nibbles[..., 0] | nibbles[..., 1] << 4
            assert array.view(np.uint8).tolist() == whole.tolist(), name


@needs(versions.HUGGING_FACE)
@pytest.mark.parametrize("way", ["whole", "distributed", "indexed", "consolidated"])
def test_one_rank_as_safetensors(tmp_path, way):
    saved = {
        name: whole for name, whole in WHOLE.items() if way != "consolidated" or name != "plain"
    }
    more = {
        "whole": {},
        "distributed": {"save_distributed": True},
        "indexed": {"fqn_to_index_mapping": {name: 1 + i % 2 for i, name in enumerate(saved)}},
        "consolidated": {"save_distributed": True, "enable_consolidation": True},
    }[way]
    dcp.save(saved, storage_writer=dcp.HuggingFaceStorageWriter(path=str(tmp_path / way), **more))
    with holdfast.open(tmp_path / way) as ckpt:
        assert sorted(ckpt) == sorted(saved)
        check_whole(ckpt, list(saved))
