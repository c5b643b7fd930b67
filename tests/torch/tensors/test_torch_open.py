"""`holdfast.torch.open` and `LazyTensor.torch()`: torch tensors of every format, with every storage once."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections import OrderedDict

import pytest
import torch
from torch import nn

import holdfast
from holdfast.errors import Closed, Corrupted, NoSuchTensor, Unsupported
from holdfast.torch import versions
from holdfast.torch.tensors import fill as fill_module
from holdfast.torch.tensors import from_lazy as kept
from holdfast.torch.tensors.open import TorchCheckpoint
from holdfast.torch.tensors.open import open as torch_open
from tests.support import run_in_threads, save_as

FORMATS = ["zip.pt", "legacy.pt", "file.safetensors", "native"]


def one_storage(*tensors: torch.Tensor) -> bool:
    """Whether torch sees one storage, and not just the same memory."""
    return len({t.untyped_storage()._cdata for t in tensors}) == 1


def views() -> dict[str, torch.Tensor]:
    base = torch.arange(24.0).reshape(4, 6)
    return {
        "base": base,
        "tied": base,
        "row": base[1],
        "column": base[:, 2],
        "turned": base.T,
        "block": base[1:3, 2:4],
        "alone": torch.ones(3),
        "expanded": torch.tensor([1.5]).expand(4),
        "empty": torch.zeros(0, 2),
        "number": torch.tensor(7),
    }


SHARED = ["base", "tied", "row", "column", "turned", "block"]


@pytest.fixture(params=FORMATS)
def path(request, tmp_path):
    return save_as(tmp_path / request.param, views())


@pytest.mark.parametrize("mmap", [False, True])
def test_reading_everything_keeps_storages(path, mmap):
    with torch_open(path, mmap=mmap) as checkpoint:
        found = checkpoint.read()
    assert list(found) == list(checkpoint)
    assert set(found) == set(views())
    for name, tensor in views().items():
        assert torch.equal(found[name], tensor), name
    assert one_storage(*(found[name] for name in SHARED))
    for name in SHARED:
        assert found[name].stride() == views()[name].stride(), name
        assert found[name].storage_offset() == views()[name].storage_offset(), name
    assert not one_storage(found["alone"], found["base"])
    found["base"].zero_()
    assert found["row"].eq(0).all()


@pytest.mark.parametrize("mmap", [False, True])
@pytest.mark.parametrize("order", [SHARED, SHARED[::-1]])
def test_reading_one_by_one_keeps_storages(path, mmap, order):
    with torch_open(path, mmap=mmap) as checkpoint:
        found = {name: checkpoint[name] for name in order}
        assert one_storage(*found.values())
        for name, tensor in found.items():
            assert torch.equal(tensor, views()[name]), name
        found["row"].fill_(-1)
        assert checkpoint["base"][1].eq(-1).all(), "in use, so it is the same storage"
        del found, tensor
        gc.collect()
        if not mmap:
            assert torch.equal(checkpoint["base"], views()["base"]), (
                "not in use any more, so it was read again"
            )


def test_storages_are_not_kept_alive(path):
    with torch_open(path) as checkpoint:
        storage = weakref.ref(checkpoint["base"].untyped_storage())
        gc.collect()
        assert storage() is None
        held = checkpoint["row"]
        storage = weakref.ref(held.untyped_storage())
        gc.collect()
        assert storage() is held.untyped_storage()


def test_a_tensor_that_was_read_does_not_keep_its_file_open(path):
    opened = holdfast.open(path)
    tensor, source = opened["base"].torch(), weakref.ref(opened.source)
    del opened
    gc.collect()
    assert source() is None
    assert torch.equal(tensor, views()["base"])


def test_alone_is_read_anew(path):
    with torch_open(path) as checkpoint:
        first = checkpoint["alone"]
        first.zero_()
        assert checkpoint["alone"].eq(1).all()


def test_some_names(path):
    with torch_open(path) as checkpoint:
        found = checkpoint.read(["row", "alone", "base"])
        assert list(found) == ["row", "alone", "base"]
        assert one_storage(found["row"], found["base"])
        assert list(checkpoint.read("row")) == ["row"]
        with pytest.raises(NoSuchTensor, match="did you mean 'row'"):
            checkpoint.read(["rows"])
        with pytest.raises(NoSuchTensor):
            checkpoint["rows"]
        assert "row" in checkpoint
        assert "rows" not in checkpoint
        assert len(checkpoint) == len(views())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_cast_keeps_storages(path, dtype):
    with torch_open(path) as checkpoint:
        found = checkpoint.read(dtype=dtype)
    for name, tensor in views().items():
        want = tensor.to(dtype) if tensor.is_floating_point() else tensor
        assert torch.equal(found[name], want), name
        assert found[name].dtype == want.dtype
    assert one_storage(*(found[name] for name in SHARED))
    with pytest.raises(TypeError, match="floating-point"):
        checkpoint.read(dtype=torch.int8)


def test_several_dtypes_over_one_storage(tmp_path):
    base = torch.arange(8.0)
    state = {
        "base": base,
        "tied": base,
        "bits": base.view(torch.int32)[2:4],
        "bytes": base.view(torch.uint8)[5:7],
    }
    for name in ("native", "file.safetensors"):
        with torch_open(save_as(tmp_path / name, state)) as checkpoint:
            found = checkpoint.read()
            assert one_storage(*found.values())
            for key, tensor in state.items():
                assert torch.equal(found[key], tensor)
                assert found[key].storage_offset() == tensor.storage_offset()
            cast = checkpoint.read(dtype=torch.float16)
            assert torch.equal(cast["base"], base.half())
            assert torch.equal(cast["bits"], state["bits"])
            assert one_storage(cast["base"], cast["tied"])


def test_parts_of_a_large_storage_are_not_read_whole(tmp_path):
    base = torch.zeros(1 << 20)
    state = {"a": base[1000:1010], "b": base[1005:1020], "far": base[900_000:900_004]}
    base[1005:1010] = torch.arange(5.0)
    path = save_as(tmp_path / "zip.pt", state)
    with torch_open(path) as checkpoint:
        for found in (checkpoint.read(), {name: checkpoint[name] for name in state}):
            assert one_storage(found["a"], found["b"])
            assert found["a"].untyped_storage().nbytes() < 200
            assert found["far"].untyped_storage().nbytes() < 200
            assert found["b"].tolist() == state["b"].tolist()
            assert found["a"].tolist() == state["a"].tolist()


def test_columns_of_a_large_storage_are_read_apart(tmp_path):
    base = torch.arange(4.0).repeat(1 << 18).reshape(-1, 4096)
    state = {"first": base[:, 0], "third": base[:, 2], "tied": base[:, 2]}
    with torch_open(save_as(tmp_path / "zip.pt", state)) as checkpoint:
        found = checkpoint.read()
        assert all(
            found[name].untyped_storage().nbytes() == found[name].nbytes
            for name in ("first", "third")
        )
        assert found["first"].eq(0).all()
        assert found["third"].eq(2).all()
        assert one_storage(found["third"], found["tied"])


def test_conjugates_share_as_torch_has_them(tmp_path):
    z = torch.tensor([1 + 2j, 3 - 4j])
    with torch_open(save_as(tmp_path / "zip.pt", {"z": z, "conj": z.conj()})) as checkpoint:
        found = checkpoint.read()
        assert found["conj"].tolist() == [1 - 2j, 3 + 4j]
        assert one_storage(found["z"], found["conj"])


def test_edited_copies_are_read_apart(tmp_path):
    path = save_as(tmp_path / "native", views())
    with holdfast.open(path) as checkpoint:
        at = checkpoint["row"].chunks[0].storage.start
        file = path / checkpoint["row"].chunks[0].storage.key
    value = (views()["row"] + 1).numpy().tobytes()
    content = file.read_bytes()
    file.write_bytes(content[:at] + value + content[at + len(value) :])
    with torch_open(path, verify=False) as checkpoint:
        found = checkpoint.read()
        assert torch.equal(found["row"], views()["row"] + 1)
        assert torch.equal(found["base"], views()["base"])
        assert torch.equal(checkpoint["row"], views()["row"] + 1)
    with torch_open(path) as checkpoint, pytest.raises(Corrupted):
        checkpoint.read()


def dtype_of(lazy: holdfast.LazyTensor) -> object:
    """This torch's dtype for a tensor; 4-bit floats are pairs there."""
    return versions.dtype(
        "float4_e2m1fn_x2" if lazy.dtype.name == "float4_e2m1fn" else lazy.dtype.torch
    )


def test_every_golden_file(golden):
    """What `read` gives is what each lazy tensor gives by itself, whatever its byte order, dtype or sharing."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch_open(golden) as checkpoint:
            if any(dtype_of(lazy) is None for lazy in checkpoint.lazy.values()):
                with pytest.raises(Unsupported, match="torch has no dtype for float") as caught:
                    checkpoint.read()
                assert caught.value.tensor is not None
                return
            found = checkpoint.read()
            assert list(found) == list(checkpoint)
            for name, tensor in found.items():
                if name in checkpoint.lazy and not tensor.is_meta:
                    alone = checkpoint.lazy[name].torch()
                    assert tensor.dtype == alone.dtype
                    assert tensor.shape == alone.shape
                    a, b = tensor.resolve_conj().resolve_neg().contiguous(), alone.contiguous()
                    assert a.numel() == 0 or torch.equal(
                        a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8)
                    ), name
            assert checkpoint.tree is not checkpoint


@pytest.mark.parametrize("name", ["zip.pt", "legacy.pt", "native"])
def test_the_tree(name, tmp_path):
    weight = nn.Parameter(torch.ones(2, 2))
    state = {
        "model": OrderedDict(a=weight, b=weight, c=weight.detach()[0]),
        "list": [torch.zeros(1), (torch.float16, torch.Size([1, 2]), torch.device("cpu"))],
        "grad": torch.ones(1, requires_grad=True),
        "step": 3,
    }
    state["again"] = state["model"]
    state["model"]._metadata = OrderedDict({"": {"version": 1}})
    with torch_open(save_as(tmp_path / name, state)) as checkpoint:
        tree = checkpoint.tree
        assert tree["step"] == 3
        assert type(tree["model"]) is OrderedDict
        assert one_storage(tree["model"]["a"], tree["model"]["b"])
        assert isinstance(tree["model"]["a"], nn.Parameter)
        assert one_storage(tree["model"]["a"], tree["model"]["c"])
        assert tree["grad"].requires_grad
        assert tree["list"][1] == (torch.float16, torch.Size([1, 2]), torch.device("cpu"))
        assert isinstance(tree["list"][1][1], torch.Size)
        assert torch.equal(tree["again"]["a"], weight)
        if name.endswith(".pt"):
            assert tree["model"]["a"] is tree["model"]["b"]
            assert tree["again"] is tree["model"]
            assert tree["model"]._metadata == {"": {"version": 1}}
        half = checkpoint.read_tree(dtype=torch.bfloat16)
        assert half["model"]["a"].dtype == torch.bfloat16
        plain = checkpoint["model.a"]
        assert not isinstance(plain, nn.Parameter)
        assert not plain.requires_grad


def test_composites_stand_under_their_own_name(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        state = {
            "sparse": torch.eye(3).to_sparse(),
            "q": torch.quantize_per_tensor(torch.arange(4.0), 0.5, 3, torch.qint8),
            "indices": torch.arange(3),
            "deep": {"values": torch.ones(2)},
        }
        with torch_open(save_as(tmp_path / "zip.pt", state)) as checkpoint:
            assert list(checkpoint) == ["sparse", "q", "indices", "deep.values"]
            found = checkpoint.read(dtype=torch.float64)
            assert torch.equal(found["sparse"].to_dense(), torch.eye(3, dtype=torch.float64))
            assert torch.equal(found["q"].dequantize(), torch.arange(4.0))
            assert torch.equal(checkpoint["q"].int_repr(), state["q"].int_repr())
            assert checkpoint.tree["sparse"].is_sparse


def test_a_file_of_nothing_but_a_tensor(tmp_path):
    with torch_open(save_as(tmp_path / "zip.pt", torch.ones(2))) as checkpoint:
        assert checkpoint.tree.tolist() == [1, 1]
        assert checkpoint["tensor"].tolist() == [1, 1]


def test_strides_of_a_tensor_that_stands_alone(tmp_path):
    image = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    for name in FORMATS:
        with torch_open(
            save_as(tmp_path / name, {"image": image, "gaps": torch.arange(10.0)[::2]})
        ) as checkpoint:
            found = checkpoint.read()
        assert torch.equal(found["image"], image)
        assert found["image"].stride() == image.stride(), name
        assert found["gaps"].tolist() == [0, 2, 4, 6, 8]
        assert found["gaps"].is_contiguous()


def test_scratch_is_bounded(tmp_path, monkeypatch):
    """The same elements come through blocks that are far smaller than the tensors."""
    monkeypatch.setattr(fill_module, "SCRATCH_NBYTES", 2048)
    torch.manual_seed(0)
    state = {
        "a": torch.randn(7, 11, 13),
        "b": torch.randn(3000),
        "c": torch.randn(50, 40).T,
        "d": torch.randn(5),
    }
    state["e"] = state["b"][100:2900:7]
    for name in FORMATS:
        with torch_open(save_as(tmp_path / name, state)) as checkpoint:
            found = checkpoint.read(dtype=torch.float64)
            for key, tensor in state.items():
                assert torch.equal(found[key], tensor.double()), (name, key)


def test_closed(path):
    checkpoint = torch_open(path)
    base = checkpoint["base"]
    checkpoint.close()
    assert torch.equal(base, views()["base"])
    for name in ("row", "alone"):
        with pytest.raises(Closed):
            checkpoint[name]


def test_an_open_checkpoint_is_taken_as_it_is(path):
    with holdfast.open(path) as plain:
        checkpoint = torch_open(plain)
        assert checkpoint.lazy is plain
        assert isinstance(checkpoint, TorchCheckpoint)
        assert torch.equal(checkpoint["row"], views()["row"])
        assert repr(checkpoint).startswith("<TorchCheckpoint")


def test_many_threads_get_one_storage(path):
    with torch_open(path) as checkpoint:
        found: list[torch.Tensor] = []
        run_in_threads(lambda name: found.append(checkpoint[name]), SHARED * 4)
        assert len(found) == len(SHARED) * 4
        assert one_storage(*found)


# -- LazyTensor.torch() ------------------------------------------------------------------------------------------------------------


def test_a_lazy_tensor_is_a_view_of_its_alias(path):
    with holdfast.open(path) as checkpoint:
        base, tied = checkpoint["base"].torch(), checkpoint["tied"].torch()
        assert one_storage(base, tied)
        assert base.data_ptr() == tied.data_ptr()
        if path.suffix == ".pt":
            row, turned = checkpoint["row"].torch(), checkpoint["turned"].torch()
            assert one_storage(base, row, turned)
            assert torch.equal(row, views()["row"])
            assert turned.stride() == (1, 6)
            assert row.storage_offset() == 6


def test_a_name_that_is_asked_for_again_is_read_again(path):
    with holdfast.open(path) as checkpoint:
        first = checkpoint["base"].torch()
        first.zero_()
        again = checkpoint["base"].torch()
        assert torch.equal(again, views()["base"])
        alone = checkpoint["alone"].torch()
        alone.zero_()
        assert checkpoint["alone"].torch().eq(1).all()


def test_slices_read_no_more_than_themselves(path):
    with holdfast.open(path) as checkpoint:
        part = checkpoint["base"][1:3].torch()
        assert part.untyped_storage().nbytes() == part.nbytes
        first, second = checkpoint["alone"][:2].torch(), checkpoint["alone"][1:].torch()
        assert not one_storage(first, second)


def test_nothing_is_kept_of_what_is_not_in_use(path):
    with holdfast.open(path) as checkpoint:
        source = checkpoint["base"].source
        base = checkpoint["base"].torch()
        assert len(kept._shared[source]) == 1
        view = base[1:]
        del base
        gc.collect()
        assert one_storage(view, checkpoint["tied"].torch())
        del view
        gc.collect()
        assert len(kept._shared[source]) == 0
        assert torch.equal(checkpoint["tied"].torch(), views()["base"])


def test_two_checkpoints_share_nothing(path):
    with holdfast.open(path) as a, holdfast.open(path) as b:
        assert not one_storage(a["base"].torch(), b["tied"].torch())


def test_a_closed_checkpoint_gives_no_views(path):
    checkpoint = holdfast.open(path)
    base = checkpoint["base"].torch()
    checkpoint.close()
    with pytest.raises(Closed):
        checkpoint["tied"].torch()
    assert torch.equal(base, views()["base"])
