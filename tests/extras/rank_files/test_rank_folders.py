"""Rank files of real DTensors, put together: every placement, every verb, bit for bit."""

from __future__ import annotations

import json
import pickle

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import holdfast
import holdfast.torch
from holdfast.errors import FormatError, MetadataError, ReplicasDiffer, UnknownFormat, Unsupported
from tests.rank_folders import StridedShard, as_rank, cut, rank_file, save_ranks, sharded
from tests.support import flip_bit

pytestmark = pytest.mark.filterwarnings("ignore")


def whole(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.arange(1, torch.Size(shape).numel() + 1).reshape(shape).to(dtype)


@pytest.fixture
def actor(tmp_path):
    """What verl leaves: a model with uneven and empty shards and buffers, an optimizer, and what each rank has for itself."""
    model = {
        "embed.weight": (whole(10, 4), [Shard(0)]),
        "proj.weight": (whole(4, 10), [Shard(1)]),
        "norm.weight": (whole(3, dtype=torch.bfloat16), [Shard(0)]),
        "head.weight": (whole(8, 2), [Replicate()]),
        "scale": torch.tensor([2.5]),
        "step": torch.tensor(7),
        "none": torch.empty(0, 3),
    }
    folder = save_ranks(tmp_path / "actor", (4,), model)
    moments = {
        "exp_avg": (whole(10, 4) / 3, [Shard(0)]),
        "exp_avg_sq": (whole(10, 4) / 7, [Shard(0)]),
    }
    save_ranks(
        folder, (4,),
        lambda rank, mesh: {
            "state": {0: {"step": torch.tensor(3.0), **{k: sharded(t, mesh, p) for k, (t, p) in moments.items()}}},
            "param_groups": [{"lr": 1e-3, "params": [0]}],
        },
        what="optim",
    )  # fmt: skip
    for rank in range(4):
        torch.save(
            {"rng": torch.full((5,), rank), "lr": {"last": rank}},
            rank_file(folder, rank, 4, "extra_state"),
        )
    (folder / "fsdp_config.json").write_text("{}")
    (folder / "huggingface").mkdir()
    (folder / "huggingface" / "config.json").write_text(
        json.dumps({"model_type": "llama", "torch_dtype": "float32"})
    )
    return folder


EXPECTED = {
    "embed.weight": whole(10, 4), "proj.weight": whole(4, 10), "norm.weight": whole(3, dtype=torch.bfloat16),
    "head.weight": whole(8, 2), "scale": torch.tensor([2.5]), "step": torch.tensor(7), "none": torch.empty(0, 3),
}  # fmt: skip


def same(found: holdfast.Checkpoint, expected: dict[str, torch.Tensor]) -> None:
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        made = found[name].torch()
        assert (made.dtype, made.shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(made, tensor), name


def test_a_folder_opens_as_its_model(actor):
    with holdfast.open(actor) as ckpt:
        assert ckpt.format == "rank-files"
        assert not ckpt.foreign
        assert any("optim_world_size_4_rank_*.pt" in note for note in ckpt.notes)
        same(ckpt, EXPECTED)
        assert np.array_equal(
            ckpt["embed.weight"][5:9, 1:3].numpy(), EXPECTED["embed.weight"][5:9, 1:3].numpy()
        )


PLACEMENTS = [
    ((2,), [Shard(0)]), ((8,), [Shard(0)]), ((4,), [Shard(2)]), ((2, 4), [Replicate(), Shard(0)]), ((2, 2), [Shard(0), Shard(1)]),
    ((2, 2), [Shard(0), Shard(0)]), ((2, 2), [StridedShard(0, split_factor=2), Shard(0)]), ((2, 4), [Shard(1), Replicate()]),
    ((2, 2), [Replicate(), Replicate()]), ((3, 2), [StridedShard(1, split_factor=2), Shard(1)]),
    ((2, 2, 2), [Replicate(), StridedShard(0, split_factor=2), Shard(0)]), ((4, 1), [Shard(0), Shard(1)]),
    ((2, 2), [StridedShard(0, split_factor=3), Replicate()]),
]  # fmt: skip


@pytest.mark.parametrize(("sizes", "placements"), PLACEMENTS, ids=str)
@pytest.mark.parametrize("shape", [(12, 8, 4), (7, 5, 3), (1, 1, 1), (0, 2, 2)], ids=str)
def test_every_placement(tmp_path, sizes, placements, shape):
    tensor = whole(*shape)
    save_ranks(tmp_path / "m", sizes, {"w": (tensor, placements)})
    with holdfast.open(tmp_path / "m") as ckpt:
        same(ckpt, {"w": tensor})


@pytest.mark.parametrize(("sizes", "placements"), PLACEMENTS, ids=str)
def test_cut_is_what_torch_does(sizes, placements):
    """The folders of these tests are cut as torch itself cuts."""
    world = torch.Size(sizes).numel()
    for rank in range(world):
        with as_rank(rank, world):
            mesh = init_device_mesh("cpu", sizes)
            made = distribute_tensor(whole(7, 5, 3), mesh, placements, src_data_rank=None)
            assert torch.equal(
                made.to_local(), cut(whole(7, 5, 3), sizes, mesh.get_coordinate(), placements)
            )


def test_parts_of_a_mesh(tmp_path):
    """Each replica group has a mesh of its own: FSDP on a dimension of a larger mesh."""
    tensor = whole(6, 2)
    save_ranks(
        tmp_path / "m", (2, 3), lambda rank, mesh: {"w": sharded(tensor, mesh["dim1"], [Shard(0)])}
    )
    with holdfast.open(tmp_path / "m") as ckpt:
        same(ckpt, {"w": tensor})


def test_some_ranks_have_some_tensors(tmp_path):
    """Stages of a pipeline: a mesh says who has a tensor."""
    stages = [whole(6, 2), whole(4, 3)]

    def state(rank, mesh):
        return {f"layer{rank // 2}": sharded(stages[rank // 2], mesh["dim1"], [Shard(0)])}

    save_ranks(tmp_path / "m", (2, 2), state)
    with holdfast.open(tmp_path / "m") as ckpt:
        same(ckpt, {"layer0": stages[0], "layer1": stages[1]})


def test_parameters_and_ties(tmp_path):
    tensor = whole(6, 2)

    def state(rank, mesh):
        # torch keeps the specs of results by their meshes: the one of another rank must not be taken for this one's.
        own = init_device_mesh("cpu", (2,), mesh_dim_names=(f"of_{rank}",))
        made = torch.nn.Parameter(sharded(tensor, own, [Shard(0)]))
        return {"embed": made, "head": made}

    save_ranks(tmp_path / "m", (2,), state)
    with holdfast.open(tmp_path / "m") as ckpt:
        same(ckpt, {"embed": tensor, "head": tensor})
        assert ckpt["embed"].traits.parameter
        assert {alias.names for alias in ckpt.aliases} == {("embed", "head")}
    holdfast.convert(tmp_path / "m", tmp_path / "m.safetensors")
    with holdfast.open(tmp_path / "m.safetensors") as ckpt:
        same(ckpt, {"embed": tensor, "head": tensor})


def test_padding_is_no_part_of_a_tensor(tmp_path):
    """FSDP's local tensors are views of a padded storage, whose last bytes are whatever they are."""
    tensor = whole(5, 2)

    def state(rank, mesh):
        room = torch.full((4, 2), float(rank + 100))
        local = cut(tensor, (2,), (rank,), [Shard(0)])
        view = room[: len(local)]
        view.copy_(local)
        whole_view = torch.full((8,), float(rank))[2:5].fill_(9.0)
        return {
            "w": DTensor.from_local(
                view, mesh, [Shard(0)], run_check=False, shape=tensor.shape, stride=tensor.stride()
            ),
            "buffer": whole_view,
        }

    save_ranks(tmp_path / "m", (2,), state)
    with holdfast.open(tmp_path / "m") as ckpt:
        same(ckpt, {"w": tensor, "buffer": torch.full((3,), 9.0)})
    assert holdfast.verify(tmp_path / "m").ok


def test_an_optimizer_by_itself(actor, tmp_path):
    path = actor / "optim_world_size_4_rank_*.pt"
    with holdfast.open(path) as ckpt:
        assert list(ckpt) == ["state.0.step", "state.0.exp_avg", "state.0.exp_avg_sq"]
        again = pickle.loads(pickle.dumps(ckpt))
        assert torch.equal(again["state.0.exp_avg"].torch(), whole(10, 4) / 3)
        assert torch.equal(
            pickle.loads(pickle.dumps(ckpt["state.0.step"])).torch(), torch.tensor(3.0)
        )
    assert holdfast.verify(path).ok
    holdfast.convert(path, tmp_path / "optim.pt")
    assert holdfast.diff(path, tmp_path / "optim.pt").same
    with pytest.raises(holdfast.HoldfastError, match="no such file"):
        holdfast.open(actor / "nothing_*.pt")
    with holdfast.open(actor / "extra_state_*") as ckpt:
        assert ckpt.tree["rank_2"]["lr"] == {"last": 2}
    for file in actor.glob("model_*"):
        file.unlink()
    with holdfast.open(actor) as ckpt:
        assert list(ckpt) == ["state.0.step", "state.0.exp_avg", "state.0.exp_avg_sq"]
        assert torch.equal(ckpt["state.0.exp_avg"].torch(), whole(10, 4) / 3)
        assert ckpt.tree["param_groups"] == [{"lr": 1e-3, "params": [0]}]
    for file in actor.glob("optim_*"):
        file.unlink()
    with holdfast.open(actor) as ckpt:
        assert list(ckpt) == [f"rank_{rank}.rng" for rank in range(4)]
        assert ckpt.tree["rank_2"]["lr"] == {"last": 2}


def test_what_was_merged_is_what_the_folder_is(actor):
    holdfast.save({"w": np.ones(3)}, actor / "model.safetensors")
    with holdfast.open(actor) as ckpt:
        assert list(ckpt) == ["w"]
    with holdfast.open(actor / "model_world_size_4_rank_*.pt") as ckpt:
        same(ckpt, EXPECTED)


def test_a_folder_of_such_folders_says_so(actor):
    (actor.parent / "latest.txt").write_text("1")
    with pytest.raises(UnknownFormat, match="its folder 'actor' has one"):
        holdfast.open(actor.parent)


def test_one_rank_is_all_there_is(tmp_path):
    folder = save_ranks(tmp_path / "m", (1,), {"w": (whole(3, 2), [Shard(0)]), "b": torch.ones(1)})
    for path in (folder, rank_file(folder, 0, 1)):
        with holdfast.open(path) as ckpt:
            same(ckpt, {"w": whole(3, 2), "b": torch.ones(1)})


def test_one_file_of_several_is_a_file(actor):
    with holdfast.open(rank_file(actor, 1, 4)) as ckpt:
        assert ckpt.format == "torch-zip"


def naive(folder, world: int) -> dict[str, torch.Tensor]:
    """A merger as in the field: what all ranks have, one below the other."""
    files = [
        torch.load(rank_file(folder, rank, world), weights_only=False) for rank in range(world)
    ]
    return {
        name: torch.cat(
            [
                file[name].to_local() if isinstance(file[name], DTensor) else file[name]
                for file in files
            ]
        )
        for name in files[0]
    }


def test_a_buffer_stays_what_it_was(tmp_path):
    """A merger in use made (8,) of a buffer of (1,), in silence; and takes one of the replicas that are none."""
    weight = whole(16, 2)
    folder = save_ranks(
        tmp_path / "m", (8,), {"w": (weight, [Shard(0)]), "scale": torch.tensor([0.5])}
    )
    with as_rank(0, 8):
        merged = naive(folder, 8)
    assert torch.equal(merged["w"], weight)
    assert merged["scale"].shape == (8,)
    with holdfast.open(folder) as ckpt:
        same(ckpt, {"w": weight, "scale": torch.tensor([0.5])})

    mixed = save_ranks(
        tmp_path / "n",
        (8,),
        lambda rank, mesh: {
            "w": sharded(weight, mesh, [Shard(0)]),
            "scale": torch.tensor([0.5 + (rank == 5)]),
        },
    )
    with holdfast.open(mixed) as ckpt:
        assert any("'scale'" in note for note in ckpt.notes)
        assert torch.equal(ckpt["w"].torch(), weight)
        with pytest.raises(ReplicasDiffer, match="ranks 0 and 5") as caught:
            ckpt["scale"].numpy()
        assert caught.value.tensor == "scale"
    with pytest.raises(holdfast.HoldfastError, match="scale"):
        holdfast.convert(mixed, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    report = holdfast.verify(mixed)
    assert [problem.tensors for problem in report.problems] == [("scale",)]
    assert report.problems[0].file == str(mixed)
    holdfast.convert(mixed, tmp_path / "out", drop="scale")
    with holdfast.open(tmp_path / "out") as ckpt:
        same(ckpt, {"w": weight})


@pytest.mark.parametrize("how", ["view", "strided", "no sums", "scalar"])
def test_replicas_without_checksums_are_compared_when_read(tmp_path, how):
    """What no record says is compared byte by byte, and only where it is read."""

    def state(rank, mesh, odd=None):
        table = torch.full((400, 3), 2.0)
        if how == "scalar":
            table = torch.full((2,), 2.0)[1]
        if odd == rank:
            table.view(-1)[-1] = 3.0
        if how == "view":
            return {"t": torch.cat([torch.full((1, 3), float(rank)), table])[1:]}
        if how == "strided":
            return {"t": table.t()}
        return {"t": table}

    save = torch.save
    if how == "no sums":
        torch.serialization.set_crc32_options(False)
    try:
        save_ranks(tmp_path / "same", (3,), state)
        save_ranks(tmp_path / "odd", (3,), lambda rank, mesh: state(rank, mesh, odd=2))
    finally:
        torch.serialization.set_crc32_options(True)
    assert save is torch.save
    expected = state(0, None)["t"]
    with holdfast.open(tmp_path / "same") as ckpt:
        same(ckpt, {"t": expected})
    assert holdfast.verify(tmp_path / "same").ok
    with holdfast.open(tmp_path / "odd") as ckpt:
        if how == "view" or how == "no sums":
            assert torch.equal(ckpt["t"][:100].torch(), expected[:100])
        with pytest.raises(ReplicasDiffer, match="ranks 0 and 2"):
            ckpt["t"].numpy()
        with pytest.raises(ReplicasDiffer):
            ckpt.digest()
    assert [problem.tensors for problem in holdfast.verify(tmp_path / "odd").problems] == [("t",)]


def test_replicas_of_shards_are_compared(tmp_path):
    tensor = whole(8, 2)

    def state(rank, mesh):
        mine = sharded(tensor, mesh, [Replicate(), Shard(0)])
        if rank == 3:
            mine.to_local()[0, 0] = -1
        return {"w": mine}

    save_ranks(tmp_path / "m", (2, 2), state)
    with holdfast.open(tmp_path / "m") as ckpt:
        assert torch.equal(ckpt["w"][:4].torch(), tensor[:4])
        with pytest.raises(ReplicasDiffer, match="ranks 1 and 3"):
            ckpt["w"].numpy()


def test_a_replica_costs_no_second_read(actor):
    with holdfast.open(actor) as ckpt:
        assert [storage.key for storage in ckpt["head.weight"].storages] == [
            rank_file(actor, 0, 4).name
        ]
        assert len(ckpt["head.weight"].storages) == 1


def test_verify_finds_damage_in_every_file(actor):
    """Also in a replica that nobody reads."""
    assert holdfast.verify(actor).ok
    path = rank_file(actor, 3, 4)
    flip_bit(path, after=whole(8, 2).numpy().tobytes())
    report = holdfast.verify(actor)
    assert [damage.file for damage in report.damaged] == [str(path)]


def test_verbs(actor, tmp_path):
    hf = tmp_path / "hf"
    base = actor / "huggingface"
    holdfast.convert(actor, hf, dtype="bf16", copy_config=base)
    assert {path.name for path in hf.iterdir()} == {"model.safetensors", "config.json"}
    assert json.loads((hf / "config.json").read_text())["torch_dtype"] == "bfloat16"
    with holdfast.open(hf) as ckpt:
        same(
            ckpt,
            {
                name: t.to(torch.bfloat16) if t.is_floating_point() else t
                for name, t in EXPECTED.items()
            },
        )
    holdfast.convert(actor, tmp_path / "plain.pt")
    assert holdfast.diff(actor, tmp_path / "plain.pt").same
    with holdfast.open(actor) as a, holdfast.open(tmp_path / "plain.pt") as b:
        assert a.digest() == b.digest()
    assert {report.path for report in holdfast.scan(actor).reports} >= {
        str(rank_file(actor, rank, 4)) for rank in range(4)
    }
    assert holdfast.scan(actor).verdict() == "clean"
    assert [stats.name for stats in holdfast.stats(actor).tensors] == list(EXPECTED)
    target = {name: torch.zeros_like(t) for name, t in EXPECTED.items()}
    holdfast.torch.load_sharded(actor, target)
    assert all(torch.equal(target[name], t) for name, t in EXPECTED.items())
    assert torch.equal(
        holdfast.torch.slices(actor)["embed.weight"][2:7], EXPECTED["embed.weight"][2:7]
    )


def test_into_a_module(actor):
    module = torch.nn.ModuleDict(
        {"embed": torch.nn.Embedding(10, 4), "proj": torch.nn.Linear(10, 4, bias=False)}
    )
    holdfast.torch.load_into(module, actor, strict=False)
    assert torch.equal(module["embed"].weight, EXPECTED["embed.weight"])
    assert torch.equal(module["proj"].weight, EXPECTED["proj.weight"])


def test_what_the_ranks_say_must_fit(tmp_path):
    tensor = whole(8, 2)
    good = {"w": (tensor, [Shard(0)]), "b": torch.ones(1)}

    def folder(name: str, change) -> str:
        place = save_ranks(tmp_path / name, (2,), good)
        change(place)
        return place

    def expect(place, error, match):
        with pytest.raises(error, match=match):
            holdfast.open(place)

    expect(
        folder("missing", lambda p: rank_file(p, 1, 2).unlink()),
        FormatError,
        "1 of 2 model files are here, and with rank 1",
    )
    expect(
        folder("many", lambda p: rank_file(p, 2, 2).write_bytes(rank_file(p, 0, 2).read_bytes())),
        FormatError,
        "there is no rank 2",
    )
    expect(
        folder("two", lambda p: save_ranks(p, (4,), good)), FormatError, "files of 2 and of 4 ranks"
    )
    # A file of another run under the right name.
    other = save_ranks(tmp_path / "other", (4,), good)
    expect(
        folder(
            "renamed", lambda p: rank_file(p, 1, 2).write_bytes(rank_file(other, 1, 4).read_bytes())
        ),
        MetadataError,
        "a mesh of 4 ranks",
    )
    expect(
        folder(
            "shape",
            lambda p: save_ranks(p, (2,), {**good, "w": (whole(6, 2), [Shard(0)])}, ranks=[1]),
        ),
        MetadataError,
        "two runs",
    )
    expect(
        folder(
            "dtype",
            lambda p: save_ranks(p, (2,), {**good, "w": (tensor.half(), [Shard(0)])}, ranks=[1]),
        ),
        MetadataError,
        "two runs",
    )
    expect(
        folder(
            "place", lambda p: save_ranks(p, (2,), {**good, "w": (tensor, [Shard(1)])}, ranks=[1])
        ),
        MetadataError,
        "placed in one",
    )
    expect(
        folder("plain", lambda p: save_ranks(p, (2,), {**good, "w": tensor}, ranks=[1])),
        MetadataError,
        "a plain tensor on rank 1",
    )
    expect(
        folder("absent", lambda p: save_ranks(p, (2,), {"b": torch.ones(1)}, ranks=[1])),
        MetadataError,
        "rank 1 of these does not",
    )
    expect(
        folder("gone", lambda p: save_ranks(p, (2,), {"w": good["w"]}, ranks=[1])),
        MetadataError,
        "not on rank 1",
    )
    expect(
        folder("sizes", lambda p: save_ranks(p, (2,), {**good, "b": torch.ones(3)}, ranks=[1])),
        MetadataError,
        "no replica",
    )
    swapped = folder("swapped", lambda p: rank_file(p, 0, 2).replace(p / "x"))
    rank_file(swapped, 1, 2).replace(rank_file(swapped, 0, 2))
    (swapped / "x").replace(rank_file(swapped, 1, 2))
    expect(swapped, MetadataError, "it was renamed")


def test_a_sum_that_was_never_made_is_refused_by_its_name(tmp_path):
    folder = save_ranks(
        tmp_path / "m",
        (2,),
        lambda rank, mesh: {
            "w": DTensor.from_local(torch.ones(2, 2), mesh, [Partial()], run_check=False)
        },
    )
    with pytest.raises(Unsupported, match="Partial") as caught:
        holdfast.open(folder)
    assert caught.value.tensor == "w"


def test_values_of_ranks_that_differ_are_told(tmp_path):
    folder = save_ranks(
        tmp_path / "m",
        (2,),
        lambda rank, mesh: {"w": torch.ones(1), "note": f"rank {rank}", "same": 3},
    )
    with holdfast.open(folder) as ckpt:
        assert ckpt.tree["note"] == "rank 0"
        assert any("'note'" in note and "'same'" not in note for note in ckpt.notes)
