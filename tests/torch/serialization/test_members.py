"""Models that come from a `.pt2`: packaged with their programs, which stock torch runs; and extracted as state dicts."""

from __future__ import annotations

import logging
import os
import warnings
import zipfile

import pytest
import torch
from torch import nn
from torch.export.pt2_archive._package import load_pt2

import holdfast
from holdfast import errors
from holdfast.torch import package_program
from tests.extras.packages.pt2.craft_pt2 import honest

ROWS = torch.arange(8.0).view(2, 4)


class Net(nn.Module):
    """Parameters, a tie, a buffer that is saved, one that is not, and a constant."""

    def __init__(self, width: int = 5) -> None:
        super().__init__()
        self.line, self.same = nn.Linear(4, width), nn.Linear(4, width, bias=False)
        self.same.weight = self.line.weight
        self.register_buffer("scale", torch.full((width,), 2.0))
        self.register_buffer("shift", torch.ones(width), persistent=False)
        self.mask = torch.arange(float(width))

    def forward(self, x):
        return (self.line(x) + self.same(x)) * self.scale + self.shift * self.mask


class Marked(torch.Tensor):
    pass


class Subclassed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(4).as_subclass(Marked), requires_grad=False)

    def forward(self, x):
        return x * 2 + self.w


@pytest.fixture(scope="module")
def nets():
    torch.manual_seed(0)
    return {"wide": Net(5), "narrow": Net(3)}


@pytest.fixture(scope="module")
def folder(nets, tmp_path_factory):
    """`wide.pt2` and `subclassed.pt2` by torch; `both.pt2`, two models in one archive."""
    made = tmp_path_factory.mktemp("members")
    logging.disable(logging.CRITICAL)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exported = {name: torch.export.export(net, (ROWS,)) for name, net in nets.items()}
        torch.export.save(exported["wide"], made / "wide.pt2", extra_files={"note.txt": "wide"})
        torch.export.save(
            exported["narrow"], made / "narrow.pt2", extra_files={"Note.txt": "narrow"}
        )
        torch.export.save(torch.export.export(Subclassed(), (ROWS,)), made / "subclassed.pt2")
        package_program(exported, made / "both.pt2")
    yield made
    logging.disable(logging.NOTSET)


def run(path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {
            name: program.module()(ROWS)
            for name, program in load_pt2(path).exported_programs.items()
        }


def test_programs_come_along(folder, nets, tmp_path):
    members = {"a": folder / "wide.pt2", "b": folder / "narrow.pt2", "c": folder / "subclassed.pt2"}
    holdfast.package({**members, "weights": {"w": torch.ones(3)}}, tmp_path / "p.pt2")
    outputs = run(tmp_path / "p.pt2")
    assert list(outputs) == ["a", "b", "c"]
    assert torch.equal(outputs["a"], nets["wide"](ROWS))
    assert torch.equal(outputs["b"], nets["narrow"](ROWS))
    assert torch.equal(outputs["c"], Subclassed()(ROWS))
    archive = zipfile.ZipFile(tmp_path / "p.pt2")
    assert (archive.read("p/extra/note.txt"), archive.read("p/extra/b/Note.txt")) == (
        b"wide",
        b"narrow",
    )
    for record in ("models/{}.json", "data/sample_inputs/{}.pt"):
        old = zipfile.ZipFile(folder / "wide.pt2").read("wide/" + record.format("model"))
        assert archive.read("p/" + record.format("a")) == old
    with holdfast.open(tmp_path / "p.pt2") as ckpt:
        assert ckpt["a.constants.mask"].numpy().tolist() == [0, 1, 2, 3, 4]
        assert ckpt["a.line.weight"].traits.parameter
        assert not ckpt["a.scale"].traits.parameter
    assert holdfast.verify(tmp_path / "p.pt2").ok


def test_one_program_twice_shares_its_weights(folder, nets, tmp_path):
    holdfast.package({"a": folder / "wide.pt2", "b": folder / "wide.pt2"}, tmp_path / "p.pt2")
    records = [
        name
        for name in zipfile.ZipFile(tmp_path / "p.pt2").namelist()
        if "/weights/weight_" in name
    ]
    assert len(records) == 3
    assert all(
        torch.equal(output, nets["wide"](ROWS)) for output in run(tmp_path / "p.pt2").values()
    )


class Awkward(nn.Module):
    """Weights that are called like what stands beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.constants, self.sample_inputs = nn.Parameter(torch.ones(4)), nn.Linear(4, 4)
        self.k = torch.full((4,), 3.0)

    def forward(self, x):
        return self.sample_inputs(x) * self.constants + self.k


def test_weights_that_are_called_constants(tmp_path):
    net = Awkward()
    expected = net(ROWS)
    torch.export.save(torch.export.export(net, (ROWS,)), tmp_path / "m.pt2")
    holdfast.convert(tmp_path / "m.pt2", tmp_path / "m.safetensors")
    net.load_state_dict(strict(tmp_path / "m.safetensors"), strict=True)
    holdfast.package({"a": tmp_path / "m.pt2", "b": net}, tmp_path / "p.pt2")
    assert torch.equal(run(tmp_path / "p.pt2")["a"], expected)
    assert torch.equal(net(ROWS), expected)


def test_members_that_cannot_come_along(folder, tmp_path):
    code = honest({"data/aotinductor/model/code.so": b"\x7fELF"})
    (tmp_path / "code.pt2").write_bytes(code)
    with pytest.raises(
        errors.CannotHold,
        match=r"a: 1 files in data/aotinductor/model, which belong to compiled code",
    ):
        holdfast.package({"a": tmp_path / "code.pt2"}, tmp_path / "p.pt2")
    with pytest.raises(errors.CannotHold, match="holds the models wide, narrow; extract one first"):
        holdfast.package({"a": folder / "both.pt2"}, tmp_path / "p.pt2")
    with pytest.raises(errors.CannotHold, match="a: a program, sample inputs, extra files"):
        holdfast.package({"a": folder / "wide.pt2"}, tmp_path / "p", format="native")
    assert os.listdir(tmp_path) == ["code.pt2"]


def strict(path):
    """What `load_state_dict` gets: a file of any format as a state dict."""
    with holdfast.open(path) as ckpt:
        return {name: tensor.torch() for name, tensor in ckpt.items()}


@pytest.mark.parametrize("target", ["out.safetensors", "out.pt", "out"])
@pytest.mark.parametrize(
    ("source", "model"), [("wide", None), ("wide", "model"), ("both", "wide"), ("both", "narrow")]
)
def test_a_state_dict_is_extracted(folder, nets, tmp_path, source, model, target):
    done = holdfast.convert(folder / f"{source}.pt2", tmp_path / target, model=model)
    net = Net(3 if model == "narrow" else 5)
    net.load_state_dict(strict(tmp_path / target), strict=True)
    assert torch.equal(net(ROWS), nets["narrow" if model == "narrow" else "wide"](ROWS))
    assert (
        f"left out of model {(model or 'model')!r}: constants, sample inputs, the program"
        in done.notes
    )
    if target == "out.pt":
        state = torch.load(tmp_path / target, weights_only=True)
        assert net.load_state_dict(state, strict=True).missing_keys == []
        assert state["line.weight"].data_ptr() == state["same.weight"].data_ptr()


def test_constants_and_inputs_come_when_asked(folder, tmp_path):
    done = holdfast.convert(
        folder / "both.pt2", tmp_path / "a.pt", model="wide", constants=True, sample_inputs=True
    )
    assert "left out of model 'wide': the program" in done.notes
    with holdfast.open(tmp_path / "a.pt") as ckpt:
        assert {"constants.mask", "constants.shift", "sample_inputs.0.0", "scale"} < set(ckpt)
    holdfast.convert(folder / "both.pt2", tmp_path / "all.safetensors")
    with holdfast.open(tmp_path / "all.safetensors") as ckpt:
        assert [name for name in ckpt if "scale" in name or "constants" in name] == [
            "wide.scale",
            "narrow.scale",
        ]


def test_a_model_of_a_native_package(nets, tmp_path):
    holdfast.package(
        {**nets, "more": {"w": torch.ones(2), "constants": {"c": torch.zeros(3)}}},
        tmp_path / "p",
        format="native",
    )
    with holdfast.open(tmp_path / "p") as ckpt:
        flags = {name: ckpt[f"wide.{name}"].traits.parameter for name in nets["wide"].state_dict()}
        assert flags == {
            "line.weight": True,
            "line.bias": True,
            "scale": False,
            "same.weight": True,
        }
        assert list(ckpt.tree["more"]["constants"]) == ["c"]
    holdfast.convert(tmp_path / "p", tmp_path / "wide.safetensors", model="wide")
    Net(5).load_state_dict(strict(tmp_path / "wide.safetensors"), strict=True)
    with holdfast.open(tmp_path / "wide.safetensors") as ckpt:
        assert "models" not in ckpt.metadata
    done = holdfast.convert(tmp_path / "p", tmp_path / "more.pt", model="more")
    assert done.notes == ("left out of model 'more': constants",)
    holdfast.convert(tmp_path / "p", tmp_path / "more2.pt", model="more", constants=True)
    assert list(strict(tmp_path / "more2.pt")) == ["w", "constants.c"]
    # Without a choice a native directory is converted whole.
    holdfast.convert(tmp_path / "p", tmp_path / "q")
    with holdfast.open(tmp_path / "q") as ckpt:
        assert "more.constants.c" in ckpt


def test_models_that_are_not_there(folder, tmp_path):
    with pytest.raises(errors.CannotHold, match="there is no 'other'; there are wide, narrow"):
        holdfast.convert(folder / "both.pt2", tmp_path / "a.pt", model="other")
    holdfast.save({"model": {"w": torch.ones(2)}}, tmp_path / "plain.pt")
    with pytest.raises(errors.CannotHold, match="no package"):
        holdfast.convert(tmp_path / "plain.pt", tmp_path / "a.pt", model="model")
    assert os.listdir(tmp_path) == ["plain.pt"]


def test_a_program_that_another_format_has_no_place_for_is_named(folder, tmp_path):
    tied = holdfast.tie(folder / "wide.pt2", tmp_path / "a.safetensors")
    assert "left out of model 'model': the program" in tied.notes
    done = holdfast.compact(folder / "wide.pt2", tmp_path / "b.pt")
    assert "left out of model 'model': the program" in done.notes


def test_a_directory_of_packages_is_verified(folder, tmp_path):
    for name in ("wide", "both"):
        (tmp_path / f"{name}.pt2").write_bytes((folder / f"{name}.pt2").read_bytes())
    report = holdfast.verify(tmp_path)
    assert (report.ok, len(report.files), report.skipped) == (True, 2, ())
    raw = bytearray((tmp_path / "both.pt2").read_bytes())
    with holdfast.open(tmp_path / "both.pt2") as ckpt:
        raw[ckpt["wide.scale"].storages[0].start] ^= 1
    (tmp_path / "both.pt2").write_bytes(raw)
    (damage,) = holdfast.verify(tmp_path).damaged
    assert (os.path.basename(damage.file), damage.tensors) == ("both.pt2", ("wide.scale",))


def test_the_command_extracts(folder, tmp_path):
    from holdfast.cli.main import main

    assert (
        main(
            [
                "convert",
                str(folder / "both.pt2"),
                str(tmp_path / "a.pt"),
                "--model",
                "narrow",
                "--constants",
                "-q",
            ]
        )
        == 0
    )
    assert "constants.mask" in strict(tmp_path / "a.pt")
