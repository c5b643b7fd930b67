"""`package_program`: what stock torch loads, and runs with the same outputs."""

from __future__ import annotations

import logging
import os
import warnings
import zipfile

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.export.pt2_archive._package import load_pt2

import holdfast
from holdfast import errors
from holdfast.torch import package_program

IDS = torch.tensor([1, 2, 3])
ROWS = torch.arange(6.0).view(2, 3)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb, self.mid, self.head = (
            nn.Embedding(64, 16),
            nn.Linear(16, 16),
            nn.Linear(16, 64, bias=False),
        )
        self.head.weight = self.emb.weight
        self.register_buffer("scale", torch.tensor(2.0))
        self.mask = torch.tensor([1.0, 0.0] * 8)

    def forward(self, x):
        return self.head(self.mid(self.emb(x)) * self.scale * self.mask)


class Head(nn.Module):
    def __init__(self, encoder: nn.Module, width: int) -> None:
        super().__init__()
        self.encoder, self.out = encoder, nn.Linear(512, width)

    def forward(self, x):
        return self.out(self.encoder(x))


class Marked(torch.Tensor):
    pass


class Subclassed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(3).as_subclass(Marked), requires_grad=False)

    def forward(self, x):
        return x * 2 + self.w


@pytest.fixture(scope="module", autouse=True)
def _quiet():
    logging.disable(logging.CRITICAL)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    logging.disable(logging.NOTSET)


@pytest.fixture(scope="module")
def tied():
    torch.manual_seed(0)
    return torch.export.export(Tied(), (IDS,))


@pytest.fixture(scope="module")
def heads():
    torch.manual_seed(0)
    encoder = nn.Linear(3, 512)
    return {f"head{n}": torch.export.export(Head(encoder, n), (ROWS,)) for n in (2, 5)}


def test_one_program_is_torchs_file(tied, tmp_path):
    (tmp_path / "ours").mkdir()
    torch.export.save(tied, tmp_path / "m.pt2", extra_files={"note.txt": "x"})
    package_program(tied, tmp_path / "ours" / "m.pt2", extra_files={"note.txt": "x"}, trim=False)
    assert (tmp_path / "ours" / "m.pt2").read_bytes() == (tmp_path / "m.pt2").read_bytes()


def test_stock_torch_loads_and_runs_it(tied, tmp_path):
    package_program(tied, tmp_path / "m.pt2")
    again = torch.export.load(tmp_path / "m.pt2")
    assert torch.equal(again.module()(IDS), tied.module()(IDS))
    pointers = {
        name: tensor.untyped_storage().data_ptr() for name, tensor in again.state_dict.items()
    }
    assert pointers["emb.weight"] == pointers["head.weight"]


def test_programs_share_an_encoder(heads, tmp_path):
    package_program(heads, tmp_path / "m.pt2")
    records = [
        name
        for name in zipfile.ZipFile(tmp_path / "m.pt2").namelist()
        if "/weights/weight_" in name
    ]
    assert len(records) == 6
    again = load_pt2(tmp_path / "m.pt2").exported_programs
    assert list(again) == list(heads)
    for model, exported in heads.items():
        assert torch.equal(again[model].module()(ROWS), exported.module()(ROWS))
    with holdfast.open(tmp_path / "m.pt2") as ckpt:
        shared = [alias.names for alias in ckpt.aliases]
    assert shared == [(f"head2.encoder.{n}", f"head5.encoder.{n}") for n in ("weight", "bias")]


def test_a_name_that_torchs_load_does_not_look_for_is_noted(tied, heads, tmp_path):
    package_program(tied, tmp_path / "one.pt2")
    ways = {
        "m.pt2": package_program({"a": tied}, tmp_path / "m.pt2"),
        "n.pt2": holdfast.package({"a": tmp_path / "one.pt2"}, tmp_path / "n.pt2"),
    }
    for name, saved in ways.items():
        with pytest.raises(KeyError):
            torch.export.load(tmp_path / name)
        (note,) = saved.notes
        assert note.startswith("torch.export.load loads a program named 'model', and there is none")
        found = eval(note.rpartition(" ")[2], {"torch": torch, "path": tmp_path / name})
        assert torch.equal(found.module()(IDS), tied.module()(IDS))
    assert not package_program({"model": tied, "b": heads["head2"]}, tmp_path / "two.pt2").notes
    assert torch.equal(torch.export.load(tmp_path / "two.pt2").module()(IDS), tied.module()(IDS))


def test_a_view_of_a_large_storage_costs_what_it_shows(tmp_path):
    line = nn.Linear(3, 2)
    line.weight = nn.Parameter(torch.randn(1_000_000)[5:11].view(2, 3))
    exported = torch.export.export(line, (ROWS,))
    saved = package_program(exported, tmp_path / "m.pt2")
    assert saved.nbytes < 100_000
    assert torch.equal(torch.export.load(tmp_path / "m.pt2").module()(ROWS), line(ROWS))


def test_sample_inputs_can_stay_out(tied, tmp_path):
    package_program(tied, tmp_path / "m.pt2", sample_inputs=False)
    with holdfast.open(tmp_path / "m.pt2") as ckpt:
        assert "sample_inputs" not in ckpt.tree
    assert torch.equal(torch.export.load(tmp_path / "m.pt2").module()(IDS), tied.module()(IDS))


def test_a_subclass_is_pickled_as_torch_does(tmp_path):
    exported = torch.export.export(Subclassed(), (torch.ones(3),))
    (tmp_path / "ours").mkdir()
    torch.export.save(exported, tmp_path / "m.pt2")
    package_program(exported, tmp_path / "ours" / "m.pt2")
    assert (tmp_path / "ours" / "m.pt2").read_bytes() == (tmp_path / "m.pt2").read_bytes()


def test_replaced_weights_run(tied, tmp_path):
    package_program(tied, tmp_path / "m.pt2")
    torch.manual_seed(1)
    tuned = Tied()
    holdfast.save(tuned.state_dict(), tmp_path / "tuned.safetensors")
    holdfast.replace_weights(
        tmp_path / "m.pt2", tmp_path / "tuned.pt2", weights=tmp_path / "tuned.safetensors"
    )
    again = torch.export.load(tmp_path / "tuned.pt2")
    assert torch.equal(again.module()(IDS), tuned(IDS))
    assert again.state_dict["emb.weight"].data_ptr() == again.state_dict["head.weight"].data_ptr()
    # As well from another program, and in place.
    package_program(tied, tmp_path / "other.pt2")
    holdfast.replace_weights(tmp_path / "other.pt2", weights=tmp_path / "tuned.pt2", in_place=True)
    assert torch.equal(torch.export.load(tmp_path / "other.pt2").module()(IDS), tuned(IDS))


def test_tied_and_compacted_programs_run(heads, tmp_path):
    with_copies = {m: torch.export.export(Head(nn.Linear(3, 512), 2), (ROWS,)) for m in ("a", "b")}
    state = {n: t.detach().clone() for n, t in with_copies["a"].state_dict.items()}
    package_program(with_copies, tmp_path / "m.pt2")
    holdfast.replace_weights(
        tmp_path / "m.pt2",
        weights={n: t.clone() for n, t in state.items()},
        in_place=True,
        model="b",
    )
    found = holdfast.tie(tmp_path / "m.pt2", tmp_path / "tied.pt2")
    assert found.savable_nbytes == sum(t.nbytes for t in state.values())
    holdfast.compact(tmp_path / "tied.pt2", in_place=True)
    again = load_pt2(tmp_path / "tied.pt2").exported_programs
    assert torch.equal(again["a"].module()(ROWS), with_copies["a"].module()(ROWS))
    assert torch.equal(again["b"].module()(ROWS), with_copies["a"].module()(ROWS))
    assert (tmp_path / "tied.pt2").stat().st_size < (
        tmp_path / "m.pt2"
    ).stat().st_size - found.savable_nbytes // 2


def test_a_weights_only_package_is_refused_by_torch_and_read_by_us(tied, tmp_path):
    holdfast.package({"model": dict(tied.state_dict)}, tmp_path / "w.pt2")
    with pytest.raises((KeyError, RuntimeError)):
        torch.export.load(tmp_path / "w.pt2")
    with holdfast.open(tmp_path / "w.pt2") as ckpt:
        assert np.array_equal(
            ckpt["mid.bias"].numpy(), tied.state_dict["mid.bias"].detach().numpy()
        )


def test_a_program_that_lacks_a_weight(heads, tmp_path):
    exported = torch.export.export(nn.Linear(3, 2), (ROWS,))
    del exported._state_dict["bias"]
    with pytest.raises(errors.CannotHold, match=r"b\.bias: the program asks for it"):
        package_program({"a": heads["head2"], "b": exported}, tmp_path / "m.pt2")
    assert os.listdir(tmp_path) == []


def test_a_weight_of_another_dtype(tmp_path):
    exported = torch.export.export(nn.Linear(3, 2), (ROWS,))
    exported._state_dict["bias"] = nn.Parameter(torch.ones(2, dtype=torch.float64))
    with pytest.raises(
        errors.CannotHold, match=r"model\.bias: float64 where the program was exported with float32"
    ):
        package_program(exported, tmp_path / "m.pt2")
    assert os.listdir(tmp_path) == []


def test_fake_tensors_have_nothing_to_write(tmp_path):
    with FakeTensorMode() as mode:
        fake, inputs = nn.Linear(3, 2), torch.ones(2, 3)
    with mode:
        exported = torch.export.export(fake, (inputs,))
    with pytest.raises(errors.CannotHold, match=r"model\.weight: a fake tensor") as caught:
        package_program(exported, tmp_path / "m.pt2")
    assert len(caught.value.problems) == 2
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("wrong", [{}, {"m": nn.Linear(1, 1)}])
def test_what_is_no_program(tmp_path, wrong):
    with pytest.raises(errors.CannotHold):
        package_program(wrong, tmp_path / "m.pt2")
    assert os.listdir(tmp_path) == []
