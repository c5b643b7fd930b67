"""`load_into`: modules and states filled from every format, in place or anew, without a second copy."""

from __future__ import annotations

import shlex
import subprocess
import sys
import warnings
from collections import OrderedDict
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import nn

import holdfast
from holdfast.core.value import replace
from holdfast.errors import Corrupted, DoesNotFit, HoldfastError
from holdfast.torch import LocalShardsWrapper, load_sharded
from holdfast.torch.modules.load_into import Loaded, load_into
from holdfast.torch.tensors import fill as fill_module
from holdfast.torch.tensors.open import open as torch_open
from tests.support import flip_bit, save_as

FORMATS = ["zip.pt", "legacy.pt", "file.safetensors", "native"]


class Net(nn.Module):
    """A tied head, a batch norm, a buffer that is not saved, a parameter that wants no gradient."""

    def __init__(self, width: int = 8, tie: bool = True):
        super().__init__()
        self.embed = nn.Embedding(10, width)
        self.body = nn.Sequential(
            nn.Linear(width, width), nn.BatchNorm1d(width), nn.LSTM(width, width)
        )
        self.head = nn.Linear(width, 10, bias=False)
        if tie:
            self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.tensor(2.5), requires_grad=False)
        self.register_buffer("steps", torch.tensor([1, 2, 3]))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)


def seeded(seed: int, **kwargs) -> Net:
    torch.manual_seed(seed)
    net = Net(**kwargs)
    with torch.no_grad():
        net.scale += seed
        net.steps += seed
        net.body[1].running_mean += seed
    return net


def same(a: nn.Module, b: nn.Module) -> bool:
    x, y = a.state_dict(), b.state_dict()
    return x.keys() == y.keys() and all(
        torch.equal(x[k], y[k]) and x[k].dtype == y[k].dtype for k in x
    )


@pytest.fixture(params=FORMATS)
def saved(request, tmp_path):
    """A file of `seeded(1)` in each format."""
    return save_as(tmp_path / request.param, seeded(1).state_dict())


# -- modules ---------------------------------------------------------------------------------------------------------------------


def test_in_place(saved):
    net = seeded(2)
    before = {name: (id(p), p.data_ptr()) for name, p in net.named_parameters()}
    report = load_into(net, saved)
    assert same(net, seeded(1))
    assert {name: (id(p), p.data_ptr()) for name, p in net.named_parameters()} == before
    assert isinstance(report, Loaded)
    assert set(report.names) == set(net.state_dict())
    assert report.missing == report.unexpected == report.mismatched == report.notes == ()
    assert report.nbytes == sum(
        t.nbytes for t in dict.fromkeys(net.state_dict(keep_vars=True).values())
    )
    assert str(report).startswith(f"{len(report.names)} tensors, {report.nbytes:,} bytes, from ")


def test_a_meta_module_becomes_real(saved):
    with torch.device("meta"):
        net = Net()
    net.scratch = torch.zeros(2)
    load_into(net, saved)
    assert same(net, seeded(1))
    assert net.head.weight is net.embed.weight
    assert isinstance(net.head.weight, nn.Parameter)
    assert net.embed.weight.requires_grad
    assert not net.scale.requires_grad
    assert "steps" in net._buffers
    # The recurrent module knows its new weights, and everything runs.
    net.eval()
    out = net.head(net.body[2](net.body[0](net.embed(torch.tensor([[1, 2]]))))[0])
    out.sum().backward()
    assert net.embed.weight.grad is not None


def test_assign_takes_the_dtype_of_the_file(saved):
    net = seeded(2).to(torch.float64)
    old = net.embed.weight
    report = load_into(net, saved, assign=True)
    assert same(net, seeded(1))
    assert net.embed.weight is not old
    assert net.head.weight is net.embed.weight
    assert report.mismatched == ()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_a_cast_on_the_way(saved, dtype):
    net = seeded(2).to(dtype)
    report = load_into(net, saved)
    assert same(net, seeded(1).to(dtype))
    assert set(report.mismatched) == {
        name for name, t in net.state_dict().items() if t.is_floating_point()
    }
    with torch.device("meta"):
        meta = Net()
    load_into(meta, saved, dtype=dtype)
    assert same(meta, seeded(1).to(dtype))
    assert meta.head.weight is meta.embed.weight
    replaced = seeded(2)
    load_into(replaced, saved, dtype=dtype, assign=True)
    assert same(replaced, seeded(1).to(dtype))


def test_attributes_of_parameters_stay(saved):
    with torch.device("meta"):
        net = Net()
    net.embed.weight.sharded = "by rows"
    load_into(net, saved)
    assert net.embed.weight.sharded == "by rows"


def test_an_open_checkpoint(saved):
    net = seeded(2)
    with holdfast.open(saved) as checkpoint:
        load_into(net, checkpoint)
        assert checkpoint["scale"].numpy() == 3.5  # still open
    assert same(net, seeded(1))
    with torch_open(saved) as checkpoint:
        load_into(net, checkpoint)


def test_a_mapped_checkpoint_is_assigned_without_a_copy(tmp_path):
    path = save_as(tmp_path / "zip.pt", seeded(1).state_dict())
    with torch.device("meta"):
        net = Net()
    with holdfast.open(path, mmap=True) as checkpoint:
        load_into(net, checkpoint, assign=True)
        mapped = checkpoint["embed.weight"].torch()
        assert net.embed.weight.data_ptr() == mapped.data_ptr()
    assert same(net, seeded(1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_under_another_default_device(saved, dtype):
    net = seeded(2).to(dtype)
    with torch.device("meta"):
        load_into(net, saved)
        fresh = Net()
        load_into(fresh, saved, dtype=dtype)
        with holdfast.open(saved) as checkpoint:
            lazy = [checkpoint["embed.weight"].torch(), checkpoint["head.weight"].torch()]
    assert same(net, seeded(1).to(dtype))
    assert same(fresh, seeded(1).to(dtype))
    assert torch.equal(lazy[0], lazy[1])


def test_torch_is_told_that_memory_changed(tmp_path):
    path = save_as(tmp_path / "zip.pt", {"weight": torch.ones(2, 2)})
    layer = nn.Linear(2, 2, bias=False)
    out = (layer(torch.ones(1, 2, requires_grad=True))).sum()
    load_into(layer, path)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward()


def test_progress_counts_every_byte(saved):
    told = []
    report = load_into(seeded(2), saved, progress=told.append)
    assert sum(told) == report.nbytes
    told = []
    report = load_into(seeded(2).to(torch.float64), saved, progress=told.append)
    assert sum(told) == report.nbytes


# -- what does not fit -----------------------------------------------------------------------------------------------------------


def test_everything_that_is_wrong_in_one_error(saved, tmp_path):
    state = dict(seeded(1).state_dict())
    state["body.0.wieght"] = state.pop("body.0.weight")
    state["body.0.bias"] = torch.zeros(3)
    state["extra"] = torch.zeros(1)
    state["steps"] = torch.zeros(3)
    del state["scale"]
    path = save_as(tmp_path / f"wrong-{saved.name}", state)
    net = seeded(2)
    with pytest.raises(DoesNotFit) as caught:
        load_into(net, path)
    error = caught.value
    assert error.missing == ("scale", "body.0.weight")
    assert set(error.unexpected) == {"body.0.wieght", "extra"}
    assert error.mismatched == {
        "body.0.bias": "[8] here, [3] in the checkpoint",
        "steps": "int64 here, float32 in the checkpoint",
    }
    text = str(error)
    assert "2 missing, 2 unexpected, 2 mismatched" in text
    assert "missing 'body.0.weight'; did you mean 'body.0.wieght'" in text
    assert "unexpected 'extra'" in text
    assert isinstance(error, RuntimeError)
    assert isinstance(error, HoldfastError)
    assert same(net, seeded(2)), "nothing may have changed"


def test_not_strict_reports_and_still_refuses_other_shapes(saved, tmp_path):
    state = dict(seeded(1).state_dict())
    del state["scale"]
    state["extra"] = torch.zeros(1)
    path = save_as(tmp_path / f"other-{saved.name}", state)
    net = seeded(2)
    report = load_into(net, path, strict=False)
    assert report.missing == ("scale",)
    assert report.unexpected == ("extra",)
    assert "1 missing: scale" in str(report)
    assert net.scale == seeded(2).scale
    assert torch.equal(net.embed.weight, seeded(1).embed.weight)
    with pytest.raises(DoesNotFit) as caught:
        load_into(seeded(2, width=4), path, strict=False)
    assert "embed.weight" in caught.value.mismatched
    assert "unexpected" not in str(caught.value).split("mismatched", 2)[2]


class Rotary(nn.Module):
    """Has tensors that are in no state dict."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inv_freq", torch.ones(2), persistent=False)
        self.register_buffer("scale", torch.ones(1))
        self.cache = torch.ones(3)


def test_buffers_that_are_in_no_checkpoint_are_named(tmp_path):
    path = tmp_path / "m.safetensors"
    whole = nn.Sequential(nn.Linear(2, 2), Rotary())
    holdfast.save(whole.state_dict(), path)
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2, 2), Rotary())
    report = load_into(model, path)
    assert report.missing == ()
    assert report.meta == ("1.inv_freq", "1.cache")
    assert "2 tensors are still on the meta device" in str(report)
    assert "1.inv_freq, 1.cache" in str(report)
    assert load_into(whole, path).meta == ()
    holdfast.save({"a": torch.ones(2)}, path)
    state = {"a": torch.empty(2, device="meta"), "b": torch.empty(2, device="meta")}
    assert load_into(state, path, strict=False).meta == ("b",)


def test_kinds_do_not_become_each_other(tmp_path):
    path = save_as(tmp_path / "zip.pt", {"weight": torch.arange(4, dtype=torch.int8).reshape(2, 2)})
    layer = nn.Linear(2, 2, bias=False)
    before = layer.weight.detach().clone()
    with pytest.raises(DoesNotFit, match=r"pass dtype=torch\.float32"):
        load_into(layer, path)
    with pytest.raises(DoesNotFit):
        load_into(layer, path, assign=True)
    assert torch.equal(layer.weight, before)
    load_into(layer, path, dtype=torch.float32)
    assert layer.weight.tolist() == [[0, 1], [2, 3]]
    with pytest.raises(
        DoesNotFit, match=r"filled in place and is float32; for bfloat16 pass assign=True"
    ):
        load_into(layer, path, dtype=torch.bfloat16)
    with pytest.raises(TypeError, match="floating-point"):
        load_into(layer, path, dtype=torch.int8)
    numbers = {"weight": torch.zeros(2, 2, dtype=torch.int64)}
    load_into(numbers, path)
    assert numbers["weight"].tolist() == [[0, 1], [2, 3]]


def test_a_device_is_not_changed_in_place(tmp_path):
    path = save_as(tmp_path / "zip.pt", {"weight": torch.ones(2, 2)})
    with pytest.raises(DoesNotFit, match="filled in place, on cpu; for meta pass assign=True"):
        load_into(nn.Linear(2, 2, bias=False), path, device="meta")


def test_a_damaged_file(tmp_path):
    path = save_as(tmp_path / "zip.pt", {"weight": torch.arange(1024.0).reshape(32, 32)})
    flip_bit(path, after=torch.tensor([500.0, 501.0]).numpy().tobytes())
    for dtype in (torch.float32, torch.float64):
        with pytest.raises(Corrupted) as caught:
            load_into({"weight": torch.zeros(32, 32, dtype=dtype)}, path)
        assert "in place may have been written" in caught.value.__notes__[0]
    with torch.device("meta"):
        layer = nn.Linear(32, 32, bias=False)
    with pytest.raises(Corrupted):
        load_into(layer, path)
    assert layer.weight.is_meta
    load_into(layer, path, verify=False)
    assert layer.weight[15, 21] == 501


def test_damage_is_found_in_a_tensor_larger_than_the_scratch(tmp_path, monkeypatch):
    monkeypatch.setattr(fill_module, "SCRATCH_NBYTES", 4096)
    path = save_as(tmp_path / "native", {"weight": torch.arange(4096.0).reshape(64, 64)})
    target = {"weight": torch.zeros(64, 64, dtype=torch.float64)}
    load_into(target, path)
    assert torch.equal(target["weight"], torch.arange(4096.0, dtype=torch.float64).reshape(64, 64))
    file = next(path.glob("*.safetensors"))
    flip_bit(file, -1000)
    with pytest.raises(Corrupted):
        load_into(target, path)


# -- names -----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["zip.pt", "legacy.pt", "native"])
def test_a_state_inside_a_larger_one(name, tmp_path):
    state = {"model": seeded(1).state_dict(), "optimizer": {"m": torch.zeros(3)}, "epoch": 7}
    path = save_as(tmp_path / name, state)
    net = seeded(2)
    with pytest.raises(DoesNotFit, match=r"pass prefix='model\.'"):
        load_into(net, path)
    assert same(net, seeded(2))
    report = load_into(net, path, prefix="model.")
    assert same(net, seeded(1))
    assert report.unexpected == ()


def test_a_wrapped_module_on_either_side(tmp_path):
    plain = save_as(tmp_path / "zip.pt", seeded(1).state_dict())
    wrapped = save_as(
        tmp_path / "native", {f"module.{k}": v for k, v in seeded(1).state_dict().items()}
    )
    net = seeded(2)
    with pytest.raises(DoesNotFit, match=r"pass prefix='module\.'"):
        load_into(net, wrapped)
    load_into(net, wrapped, prefix="module.")
    assert same(net, seeded(1))
    with pytest.raises(DoesNotFit, match="load into what is called 'module'"):
        load_into(nn.ModuleDict({"module": seeded(2)}), plain)


# -- tied weights ----------------------------------------------------------------------------------------------------------------


def test_one_name_is_enough_for_a_tied_weight(tmp_path):
    state = {k: v.contiguous() for k, v in seeded(1).state_dict().items() if k != "head.weight"}
    safetensors.torch.save_file(state, tmp_path / "hub.safetensors")
    for device in ("cpu", "meta"):
        net = seeded(2).to(device)
        net.head.weight = net.embed.weight
        report = load_into(net, tmp_path / "hub.safetensors")
        assert same(net, seeded(1))
        assert net.head.weight is net.embed.weight
        assert "head.weight" in report.names
        assert any("tied to 'embed.weight'" in note for note in report.notes)


def test_a_tied_weight_with_two_contents(tmp_path):
    state = dict(seeded(1).state_dict())
    state["head.weight"] = state["head.weight"] + 1
    path = save_as(tmp_path / "zip.pt", state)
    net = seeded(2)
    with pytest.raises(DoesNotFit) as caught:
        load_into(net, path)
    assert list(caught.value.mismatched) == ["embed.weight"]
    assert same(net, seeded(2))
    report = load_into(net, path, strict=False)
    assert torch.equal(net.embed.weight, state["head.weight"]), (
        "the last one wins, as with load_state_dict"
    )
    assert "those were taken" in report.notes[0]


def test_two_equal_copies_of_a_tied_weight(tmp_path):
    state = {k: v.clone() for k, v in seeded(1).state_dict().items()}
    net = seeded(2)
    load_into(net, save_as(tmp_path / "file.safetensors", state))
    assert same(net, seeded(1))


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_names_over_one_storage_share_it_again(saved, dtype):
    net = Net(tie=False).to("meta")
    load_into(net, saved, dtype=dtype)
    assert net.head.weight is not net.embed.weight
    assert net.head.weight.data_ptr() == net.embed.weight.data_ptr()
    assert net.head.weight.dtype == (dtype or torch.float32)


# -- targets of every kind ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FORMATS)
def test_strided_targets(name, tmp_path):
    torch.manual_seed(0)
    state = {
        "t": torch.randn(5, 7),
        "conv": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "part": torch.randn(4, 4),
        "wide": torch.randn(3, 4),
        "row": torch.randn(6),
        "scalar": torch.tensor(3.0),
        "none": torch.zeros(0, 3),
    }
    path = save_as(tmp_path / name, state)
    base = torch.zeros(8, 8)
    target = {
        "t": torch.zeros(7, 5).T,
        "conv": torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "part": base[::2, 1:5],
        "wide": torch.zeros(3, 4, dtype=torch.float64).T.contiguous().T,
        "row": torch.zeros(6, 3)[:, 1],
        "scalar": torch.zeros(()),
        "none": torch.ones(0, 3),
    }
    load_into(target, path)
    for key, value in state.items():
        assert torch.equal(target[key], value.to(target[key].dtype)), key
    assert base[1::2].eq(0).all()
    assert base[:, 0].eq(0).all()


DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint16,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.complex64,
    torch.complex128,
]


@pytest.mark.parametrize("assign", [False, True])
def test_every_dtype(assign, tmp_path):
    bits = torch.arange(64, dtype=torch.uint8)
    state = {str(d): (bits % 2).bool() if d is torch.bool else bits.clone().view(d) for d in DTYPES}
    path = save_as(tmp_path / "zip.pt", state)
    target = {key: torch.zeros_like(value) for key, value in state.items()}
    load_into(target, path, assign=assign)
    for key, value in state.items():
        assert torch.equal(target[key].view(torch.uint8), value.view(torch.uint8)), key


def test_complex_halves_and_conjugates(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        half = torch.view_as_complex(torch.arange(8, dtype=torch.float16).reshape(4, 2))
        state = {
            "half": half,
            "conj": torch.tensor([1 + 2j, 3 - 4j]).conj(),
            "neg": torch.tensor([1 + 2j]).conj().imag,
        }
        path = save_as(tmp_path / "zip.pt", state)
        target = {
            "half": torch.zeros_like(half),
            "conj": torch.zeros(2, dtype=torch.complex128),
            "neg": torch.zeros(1),
        }
        load_into(target, path)
        assert torch.view_as_real(target["half"]).flatten().tolist() == list(range(8))
    assert target["conj"].tolist() == [1 - 2j, 3 + 4j]
    assert target["neg"].tolist() == [-2]
    conjugated = {"conj": torch.zeros(2, dtype=torch.complex64).conj()}
    load_into(conjugated, path, strict=False)
    assert conjugated["conj"].tolist() == [1 - 2j, 3 + 4j]


def test_nested_mappings(saved, tmp_path):
    state = {
        "a": {"b": [torch.ones(2), {"c": torch.arange(3.0)}]},
        "state": {0: {"m": torch.full((2,), 5.0)}},
    }
    path = (
        save_as(tmp_path / f"nested-{saved.name}", state)
        if saved.suffix != ".safetensors"
        else None
    )
    if path is None:
        flat = {
            "a.b.0": torch.ones(2),
            "a.b.1.c": torch.arange(3.0),
            "state.0.m": torch.full((2,), 5.0),
        }
        path = save_as(tmp_path / "n.safetensors", flat)
    target = {
        "a": {"b": [torch.zeros(2), {"c": torch.zeros(3, device="meta")}]},
        "state": {0: {"m": torch.zeros(2)}},
        "lr": 0.1,
    }
    report = load_into(target, path)
    assert report.names == ("a.b.0", "a.b.1.c", "state.0.m")
    assert target["a"]["b"][0].tolist() == [1, 1]
    assert target["a"]["b"][1]["c"].tolist() == [0, 1, 2]
    assert target["state"][0]["m"].tolist() == [5, 5]
    assert target["lr"] == 0.1
    with pytest.raises(DoesNotFit, match="a tuple cannot be changed"):
        load_into(
            {
                "a": {"b": (torch.zeros(2), {"c": torch.zeros(3)})},
                "state": {0: {"m": torch.zeros(2)}},
            },
            path,
            assign=True,
        )
    with pytest.raises(DoesNotFit, match="two tensors of the target have this name"):
        load_into({"a": {"b": torch.zeros(2)}, "a.b": torch.zeros(2)}, path, strict=False)


def test_expanded_targets_are_refused(tmp_path):
    path = save_as(tmp_path / "zip.pt", {"a": torch.ones(3, 4), "b": torch.ones(2, 2)})
    fine = torch.zeros(2, 2)
    for bad in (torch.zeros(4).expand(3, 4), torch.zeros(6).as_strided((3, 4), (1, 1))):
        with pytest.raises(DoesNotFit) as caught:
            load_into({"a": bad, "b": fine}, path)
        assert "share memory" in caught.value.mismatched["a"]
    assert fine.eq(0).all()


def test_targets_that_overlap_are_filled_in_order(tmp_path):
    path = save_as(
        tmp_path / "zip.pt",
        {"a": torch.ones(100), "b": torch.full((50,), 2.0), "c": torch.full((20,), 3.0)},
    )
    memory = torch.zeros(100)
    load_into({"a": memory, "b": memory[20:70], "c": memory[60:80]}, path)
    assert memory.tolist() == [1.0] * 20 + [2.0] * 40 + [3.0] * 20 + [1.0] * 20
    load_into({"c": memory[60:80], "b": memory[20:70], "a": memory}, path)
    assert memory.tolist() == [1.0] * 100


def test_wrapper_subclasses_are_refused(tmp_path):
    from torch.testing._internal.two_tensor import TwoTensor

    path = save_as(tmp_path / "zip.pt", {"weight": torch.ones(2, 2)})
    with pytest.raises(DoesNotFit, match="it is a TwoTensor"):
        load_into({"weight": TwoTensor(torch.zeros(2, 2), torch.zeros(2, 2))}, path)


def test_subclasses_of_plain_memory(tmp_path):
    class Tagged(torch.Tensor):
        pass

    class Special(nn.Parameter):
        pass

    path = save_as(tmp_path / "zip.pt", {"weight": torch.ones(2, 2)})
    state = {"weight": torch.zeros(2, 2).as_subclass(Tagged)}
    load_into(state, path)
    assert torch.Tensor(state["weight"]).eq(1).all()
    layer = nn.Linear(2, 2, bias=False, device="meta")
    layer.weight = Special(layer.weight)
    load_into(layer, path)
    assert type(layer.weight) is Special
    assert layer.weight.eq(1).all()


@pytest.mark.parametrize("name", ["zip.pt", "legacy.pt", "native"])
def test_sparse_and_quantised(name, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        state = {
            "coo": torch.eye(3).to_sparse(),
            "csr": torch.eye(3).to_sparse_csr(),
            "q": torch.quantize_per_tensor(torch.arange(4.0), 0.5, 3, torch.qint8),
            "plain": torch.ones(2),
        }
        path = (
            save_as(tmp_path / "zip.pt", state)
            if name == "native"
            else save_as(tmp_path / name, state)
        )
        if name == "native":
            holdfast.convert(path, tmp_path / name)
            path = tmp_path / name
        target = {
            "coo": torch.zeros(3, 3).to_sparse(),
            "csr": (2 * torch.eye(3)).to_sparse_csr(),
            "q": torch.quantize_per_tensor(torch.zeros(4), 1.0, 0, torch.qint8),
            "plain": torch.zeros(2),
        }
        for assign in (False, True):
            report = load_into(target, path, assign=assign)
            assert set(report.names) == set(state)
            assert torch.equal(target["coo"].to_dense(), torch.eye(3))
            assert torch.equal(target["csr"].to_dense(), torch.eye(3))
            assert target["q"].dequantize().tolist() == [0, 1, 2, 3]
            assert target["q"].q_scale() == 0.5
        bad = {
            "coo": torch.zeros(3, 3),
            "csr": torch.zeros(3, 3).to_sparse_csr(),
            "q": torch.zeros(4),
            "plain": target["q"],
        }
        with pytest.raises(DoesNotFit) as caught:
            load_into(bad, path)
    assert set(caught.value.mismatched) == {"coo", "csr", "q", "plain"}


@pytest.mark.parametrize("scratch", [64 << 20, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_tensor_in_several_chunks(scratch, dtype, tmp_path, monkeypatch):
    monkeypatch.setattr(fill_module, "SCRATCH_NBYTES", scratch)
    whole = torch.arange(60.0).reshape(10, 6)
    path = save_as(
        tmp_path / "zip.pt",
        {"a": whole[:4].clone(), "b": whole[4:, :2].clone(), "c": whole[4:, 2:].T.contiguous()},
    )
    with holdfast.open(path) as checkpoint:
        places = {"a": ((0, 0), (4, 6)), "b": ((4, 0), (10, 2)), "c": ((4, 2), (10, 6))}
        lazies = {"a": checkpoint["a"], "b": checkpoint["b"], "c": checkpoint["c"].T}
        pieces = [(holdfast.Box(*places[name]), lazy.chunks[0]) for name, lazy in lazies.items()]
        chunks = tuple(
            holdfast.Chunk(box, chunk.storage, chunk.offset, chunk.strides) for box, chunk in pieces
        )
        split = replace(checkpoint["a"], shape=(10, 6), chunks=chunks)
        wide = torch.zeros(10, 12, dtype=dtype)
        for target in (
            torch.zeros(10, 6, dtype=dtype),
            torch.zeros(6, 10, dtype=dtype).T,
            wide[:, ::2],
        ):
            fill_module.fill([fill_module.Fill(split, target)])
            assert torch.equal(target, whole.to(dtype))


# -- modules with ways of their own ------------------------------------------------------------------------------------------------


def test_an_old_batch_norm_is_brought_up_to_date(tmp_path):
    norm = nn.BatchNorm1d(3)
    state = norm.state_dict()
    del state["num_batches_tracked"]
    state._metadata[""]["version"] = 1
    target = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    nested = OrderedDict((f"1.{k}", v + 1) for k, v in state.items())
    nested |= {f"0.{k}": v for k, v in target[0].state_dict().items()}
    nested._metadata = OrderedDict({"": {"version": 1}, "1": {"version": 1}})
    report = load_into(target, save_as(tmp_path / "zip.pt", nested))
    assert target[1].running_mean.tolist() == [1, 1, 1]
    assert target[1].num_batches_tracked == 0
    assert report.missing == ()
    assert any("1 has its own way of loading" in note for note in report.notes)


def test_a_batch_norm_without_versions(tmp_path):
    state = {
        k: v + 1 for k, v in nn.BatchNorm1d(3).state_dict().items() if k != "num_batches_tracked"
    }
    norm = nn.BatchNorm1d(3)
    load_into(norm, save_as(tmp_path / "file.safetensors", state))
    assert norm.running_mean.tolist() == [1, 1, 1]
    del state["bias"]
    path = save_as(tmp_path / "less.safetensors", state)
    with pytest.raises(DoesNotFit, match="nothing was changed") as caught:
        load_into(nn.BatchNorm1d(3), path)
    assert caught.value.missing == ("bias", "num_batches_tracked")


class Renaming(nn.Module):
    """Takes an old name for its weight."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))
        self.register_load_state_dict_pre_hook(self._rename)

    @staticmethod
    def _rename(module, state, prefix, *args):
        if prefix + "old" in state:
            state[prefix + "weight"] = state.pop(prefix + "old")


class Doubling(nn.Linear):
    def _load_from_state_dict(self, state, prefix, *args):
        state[prefix + "weight"] = state[prefix + "weight"] * 2
        super()._load_from_state_dict(state, prefix, *args)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_hooks_and_overrides_run(name, device, tmp_path):
    path = save_as(
        tmp_path / name,
        {"a.old": torch.ones(2), "b.weight": torch.ones(2, 2), "c.weight": torch.ones(2, 2)},
    )
    net = nn.ModuleDict(
        {"a": Renaming(), "b": Doubling(2, 2, bias=False), "c": nn.Linear(2, 2, bias=False)}
    ).to(device)
    report = load_into(net, path)
    assert net["a"].weight.tolist() == [1, 1]
    assert net["b"].weight.tolist() == [[2, 2], [2, 2]]
    assert net["c"].weight.tolist() == [[1, 1], [1, 1]]
    assert all(isinstance(p, nn.Parameter) and p.requires_grad for p in net.parameters())
    assert set(report.names) == {"a.weight", "b.weight", "c.weight"}
    assert len(report.notes) == 2


def test_what_a_submodule_finds_missing_is_reported(tmp_path):
    path = save_as(tmp_path / "zip.pt", {"a.older": torch.ones(2), "c.weight": torch.ones(2, 2)})
    net = nn.ModuleDict({"a": Renaming(), "c": nn.Linear(2, 2, bias=False)})
    with pytest.raises(
        DoesNotFit, match="only submodules that load themselves were changed"
    ) as caught:
        load_into(net, path)
    assert caught.value.missing == ("a.weight",)
    assert caught.value.unexpected == ("a.older",)
    assert not net["c"].weight.eq(1).all()
    report = load_into(net, path, strict=False)
    assert report.missing == ("a.weight",)
    assert report.unexpected == ("a.older",)
    wrong = save_as(tmp_path / "wrong.pt", {"a.old": torch.ones(3), "c.weight": torch.ones(2, 2)})
    with pytest.raises(DoesNotFit, match="does not take its part"):
        load_into(net, wrong)


def test_a_weight_tied_to_one_that_loads_itself(tmp_path):
    path = save_as(tmp_path / "zip.pt", {"b.weight": torch.ones(2, 2)})
    for device in ("cpu", "meta"):
        net = nn.ModuleDict({"b": Doubling(2, 2, bias=False), "c": nn.Linear(2, 2, bias=False)}).to(
            device
        )
        net["c"].weight = net["b"].weight
        load_into(net, path)
        assert net["c"].weight is net["b"].weight
        assert net["c"].weight.eq(2).all()


def test_parametrizations(tmp_path):
    def make(seed):
        torch.manual_seed(seed)
        kinds = nn.utils.parametrizations
        return nn.Sequential(kinds.weight_norm(nn.Linear(3, 3)), kinds.orthogonal(nn.Linear(3, 3)))

    path = save_as(tmp_path / "zip.pt", make(1).state_dict())
    net = make(2)
    load_into(net, path)
    assert same(net, make(1))
    assert torch.equal(net[0].weight, make(1)[0].weight)


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))
        self.extra = None

    def get_extra_state(self):
        return self.extra

    def set_extra_state(self, state):
        self.extra = state


@pytest.mark.parametrize("name", ["zip.pt", "legacy.pt", "native"])
def test_extra_state(name, tmp_path):
    source = nn.ModuleDict({"a": Counting(), "b": Counting()})
    source["a"].extra = {"steps": 7, "scale": torch.tensor([2.0])}
    source["b"].extra = torch.tensor([5])
    path = save_as(tmp_path / name, {"model": source.state_dict()})
    net = nn.ModuleDict({"a": Counting(), "b": Counting()})
    report = load_into(net, path, prefix="model.")
    assert net["a"].extra["steps"] == 7
    assert net["a"].extra["scale"].tolist() == [2]
    assert net["b"].extra.tolist() == [5]
    assert report.unexpected == ()
    with pytest.raises(DoesNotFit) as caught:
        load_into(
            net,
            save_as(
                tmp_path / f"less-{name}", {"a.weight": torch.ones(2), "b.weight": torch.ones(2)}
            ),
        )
    assert caught.value.missing == ("a._extra_state", "b._extra_state")


def test_extra_state_that_is_an_object_is_refused(tmp_path):
    torch.save(
        {
            "weight": torch.ones(2),
            "_extra_state": warnings.WarningMessage("m", UserWarning, "f", 1),
        },
        tmp_path / "a.pt",
    )
    with pytest.raises(DoesNotFit, match="classes that Holdfast does not build"):
        load_into(Counting(), tmp_path / "a.pt")


def test_hooks_after_loading_are_told(tmp_path):
    path = save_as(tmp_path / "zip.pt", {"weight": torch.ones(2, 2)})
    layer = nn.Linear(2, 2)
    told = []
    layer.register_load_state_dict_post_hook(
        lambda module, keys: told.append((module, keys.missing_keys, keys.unexpected_keys))
    )
    load_into(layer, path, strict=False)
    assert told == [(layer, ["bias"], [])]
    assert layer.weight.eq(1).all()


def test_lazy_modules(tmp_path):
    path = save_as(tmp_path / "zip.pt", {"weight": torch.ones(2, 3), "bias": torch.zeros(2)})
    layer = nn.LazyLinear(2)
    load_into(layer, path)
    assert layer.weight.tolist() == [[1, 1, 1], [1, 1, 1]]


def test_scripted_and_compiled_modules(tmp_path):
    path = save_as(tmp_path / "zip.pt", {"weight": torch.ones(2, 2), "bias": torch.zeros(2)})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scripted = torch.jit.script(nn.Linear(2, 2))
    load_into(scripted, path)
    assert scripted(torch.ones(1, 2)).tolist() == [[2, 2]]
    compiled = torch.compile(nn.Linear(2, 2))
    load_into(compiled, path)
    assert compiled._orig_mod(torch.ones(1, 2)).tolist() == [[2, 2]]


def test_a_scalar_of_one_element(tmp_path):
    net = Net()
    state = dict(seeded(1).state_dict())
    state["scale"] = state["scale"].reshape(1)
    load_into(net, save_as(tmp_path / "zip.pt", state))
    assert net.scale == seeded(1).scale
    assert net.scale.shape == ()


# -- memory ----------------------------------------------------------------------------------------------------------------------

MEASURE = """
import resource, sys, torch
from holdfast.torch.modules.load_into import load_into
path, how = sys.argv[1:]
dtype = torch.bfloat16 if how in ("cast", "meta-cast") else torch.float32
device = "meta" if how.startswith("meta") else "cpu"
shape = (1024, 8192)
# Ones: memory of zeros is not there before someone writes to it.
target = {
    f"w{i}": torch.ones(shape[::-1]).T if how == "strided" else torch.ones(shape, dtype=dtype, device=device) for i in range(8)
}
def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
before = peak()
if how == "torch":
    for name, value in torch.load(path).items():
        target[name].copy_(value)
else:
    load_into(target, path, threads=2, **({"dtype": dtype} if how == "meta-cast" else {}))
assert all(float(target[f"w{i}"][3, 5]) == i for i in range(8))
print(peak() - before)
"""


def measure(path, how) -> float:
    """MiB beyond what there was before, in a process of its own."""
    # Through a shell, which forks: a process that is started directly begins with the peak of the one that started it.
    command = f"{shlex.quote(sys.executable)} -c {shlex.quote(MEASURE)} {shlex.quote(str(path))} {how}; exit $?"
    run = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return int(run.stdout) / 2**20


@pytest.mark.slow("measures the memory of six processes that load 256 MB")
@pytest.mark.parametrize("name", ["zip.pt", "native"])
def test_no_second_copy(name, tmp_path):
    """256 MiB of weights: the target, and what is needed beyond it."""
    path = save_as(tmp_path / name, {f"w{i}": torch.full((1024, 8192), float(i)) for i in range(8)})
    engine = 2 * 8 + 16
    assert measure(path, "plain") < engine
    assert measure(path, "strided") < 64 + engine
    assert measure(path, "cast") < 64 + engine
    assert measure(path, "meta") < 256 + engine
    assert measure(path, "meta-cast") < 128 + 64 + engine
    if name == "zip.pt":
        assert measure(path, "torch") > 200, "the measure sees a second copy"


def test_a_sharded_target_is_told_who_fills_it(tmp_path: Path):
    holdfast.save({"w": torch.ones(2, 2)}, tmp_path / "w.safetensors")
    sharded = LocalShardsWrapper([torch.zeros(2, 2)], [(0, 0)])
    with pytest.raises(
        DoesNotFit,
        match=r"'w': it is a LocalShardsWrapper, of which each rank has a part: load_sharded\(",
    ):
        load_into({"w": sharded}, tmp_path / "w.safetensors")
    load_sharded(tmp_path / "w.safetensors", {"w": sharded})
    assert sharded.local_shards()[0].tolist() == [[1, 1], [1, 1]]


def test_a_path_may_come_first(tmp_path: Path):
    holdfast.save({"weight": torch.ones(2, 2), "bias": torch.ones(2)}, tmp_path / "w.pt")
    model = nn.Linear(2, 2)
    assert load_into(tmp_path / "w.pt", model).names == ("weight", "bias")
    assert model.bias.tolist() == [1, 1]
    with pytest.raises(
        TypeError, match=r"load_into fills an nn.Module or a mapping of tensors, not a PosixPath"
    ):
        load_into(tmp_path / "w.pt", tmp_path / "w.pt")
