"""Archives of `torch.export`: what torch loads from them, read without torch; and what is laid out here, loaded and run by torch.

The programs are exported once for all tests, which is what takes the time.
"""

from __future__ import annotations

import io
import logging
import subprocess
import sys
import warnings
import zipfile

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.export.pt2_archive._package import load_pt2, package_pt2
from torch.export.pt2_archive._package_weights import TensorProperties, Weights

import holdfast
from holdfast import errors
from holdfast.core.limits import Limits
from holdfast.core.opaque import Opaque
from holdfast.engine.source import OpenSource
from holdfast.extras.packages.pt2.read import Pt2Reader
from holdfast.extras.packages.pt2.replace import lay_out_replaced
from holdfast.extras.packages.pt2.write import ModelWeights, lay_out_pt2, models_of
from holdfast.stores.local import LocalStore
from holdfast.torch import package_program, versions
from holdfast.verbs.shared.planned import write_plan
from holdfast.verbs.shared.state import make_lazy_tree, tabulate_state
from tests.parity.compare import assert_leaf, elements, shared


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb, self.mid, self.head = (
            nn.Embedding(5, 4),
            nn.Linear(4, 4),
            nn.Linear(4, 5, bias=False),
        )
        self.head.weight = self.emb.weight

    def forward(self, x):
        return self.head(self.mid(self.emb(x)))


class Buffers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("pos", torch.arange(6.0))
        self.register_buffer("gap", torch.arange(4.0))
        self.register_buffer("view", self.pos[2:5])
        self.register_buffer("lost", torch.arange(3.0), persistent=False)
        self.register_buffer("empty", torch.empty(0))
        self.register_buffer("scalar", torch.tensor(7))
        self.register_buffer("part", torch.arange(100.0)[10:13])

    def forward(self, x):
        return x + self.pos[0] + self.view[1] + self.lost[2] + self.gap[0]


class Constants(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale, self.mask = torch.tensor([1.0, 2.0]), torch.tensor([True, False])
        self.line = nn.Linear(2, 2)

    def forward(self, x):
        return (
            self.line(x) * self.scale + torch.where(self.mask, 1.0, 0.0) + torch.tensor([3.0, 4.0])
        )


class Strided(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.turned = nn.Parameter(torch.arange(12.0).view(3, 4).t())
        self.register_buffer("expanded", torch.ones(1).expand(4))
        self.register_buffer("second", torch.arange(8.0)[::2])
        self.register_buffer(
            "last", torch.arange(24.0).view(1, 2, 3, 4).to(memory_format=torch.channels_last)
        )

    def forward(self, x):
        return x @ self.turned + self.expanded[0] + self.second[1] + self.last.sum()


class Narrow(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.arange(6.0).to(dtype), requires_grad=dtype == torch.bfloat16)

    def forward(self, x):
        return x + self.w.to(torch.float32)


class Kinds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        young = (torch.uint32, torch.uint64, torch.float8_e8m0fnu) if versions.PROGRAM_ALONE else ()
        for dtype in (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.bool, torch.float16,
                      torch.float64, torch.complex64, torch.complex128, torch.float8_e5m2, torch.float8_e4m3fnuz,
                      torch.float8_e5m2fnuz, *young):  # fmt: skip
            self.register_buffer(str(dtype).replace("torch.", ""), torch.ones(3).to(dtype))

    def forward(self, x):
        return x + self.float64


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(3, 3)

    def forward(self, x):
        return torch.cond(x.sum() > 0, lambda v: self.line(v), lambda v: v * 2, (x,))


class Shared(nn.Module):
    """A head over an encoder that several models have."""

    def __init__(self, encoder: nn.Module, width: int) -> None:
        super().__init__()
        self.encoder, self.out = encoder, nn.Linear(4, width)

    def forward(self, x):
        return self.out(self.encoder(x))


class Marked(torch.Tensor):
    pass


class Pickled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("before", torch.ones(2))
        self.w = nn.Parameter(torch.ones(3).as_subclass(Marked), requires_grad=False)

    def forward(self, x):
        return x * 2 + self.w


X = {
    "tied": (Tied, (torch.tensor([1, 2, 3]),)),
    "buffers": (Buffers, (torch.ones(2),)),
    "constants": (Constants, (torch.ones(2),)),
    "strided": (Strided, (torch.ones(4),)),
    "bfloat16": (lambda: Narrow(torch.bfloat16), (torch.ones(6),)),
    "fp8": (lambda: Narrow(torch.float8_e4m3fn), (torch.ones(6),)),
    "kinds": (Kinds, (torch.ones(3),)),
    "branches": (Branches, (torch.ones(3),)),
    "nothing": (nn.ReLU, (torch.ones(3),)),
    "dynamic": (lambda: nn.Linear(3, 2), (torch.ones(4, 3),)),
}


@pytest.fixture(scope="module", autouse=True)
def _quiet():
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Every program, exported and saved by torch."""
    made = tmp_path_factory.mktemp("pt2")
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, (module, inputs) in X.items():
            shapes = (
                {"input": {0: torch.export.Dim("batch", min=2, max=64)}}
                if name == "dynamic"
                else None
            )
            exported = torch.export.export(module(), inputs, dynamic_shapes=shapes)
            torch.export.save(
                exported, made / f"{name}.pt2", extra_files={"note.txt": f"about {name}"}
            )
        encoder = nn.Linear(3, 4)
        several = {
            f"head{n}": torch.export.export(Shared(encoder, n), (torch.ones(2, 3),)) for n in (2, 5)
        }
        package_pt2(made / "several.pt2", exported_programs=several)
        torch.export.save(torch.export.export(Pickled(), (torch.ones(3),)), made / "pickled.pt2")
        with FakeTensorMode() as mode:
            fake, inputs = nn.Linear(3, 2), torch.ones(2, 3)
        with mode:
            torch.export.save(torch.export.export(fake, (inputs,)), made / "fake.pt2")
    return made


def loaded(path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.export.load(path)


def assert_same(ckpt, prefix, exported):
    """The weights and constants of a program are those that torch loads: names, order, bits, kinds, sharing."""
    weights, constants = (
        dict(exported.state_dict),
        {k: v for k, v in exported.constants.items() if isinstance(v, torch.Tensor)},
    )
    beside = (f"{prefix}constants.", f"{prefix}sample_inputs.", f"{prefix}aotinductor.")
    ours = [name for name in ckpt if name.startswith(prefix) and not name.startswith(beside)]
    assert [name.removeprefix(prefix) for name in ours] == list(weights)
    for name, tensor in weights.items():
        assert_leaf(ckpt[prefix + name], tensor)
        assert_placed(ckpt[prefix + name], tensor)
    # Constants that are a program's own are sorted differently by torch when it loads them.
    found = {
        name.removeprefix(f"{prefix}constants."): ckpt[name]
        for name in ckpt
        if name.startswith(f"{prefix}constants.")
    }
    assert set(found) == set(constants)
    for name, tensor in constants.items():
        assert elements(tensor) == found[name].numpy().tobytes()
    assert groups_of(ckpt, prefix, weights) == shared(weights)


def assert_placed(ours, tensor):
    """The same view: strides and offset in the record."""
    if tensor.numel() and ours.chunks:
        (chunk,) = ours.chunks
        assert tuple(stride // ours.dtype.bits for stride in chunk.strides) == tensor.stride()
        assert chunk.offset // ours.dtype.bits == tensor.storage_offset()


def groups_of(ckpt, prefix, weights):
    wanted = [
        [n.removeprefix(prefix) for n in alias.names if n.removeprefix(prefix) in weights]
        for alias in ckpt.aliases
    ]
    return sorted(sorted(names) for names in wanted if len(names) > 1)


@pytest.mark.parametrize("name", X)
def test_a_program_reads_as_torch_loads_it(folder, name):
    with holdfast.open(folder / f"{name}.pt2") as ckpt:
        assert ckpt.format == "pt2"
        assert_same(ckpt, "", loaded(folder / f"{name}.pt2"))
        assert ckpt.metadata["torch_version"] == torch.__version__
        assert ckpt.metadata["extra/note.txt"] == f"about {name}"
        args, kwargs = ckpt.tree["sample_inputs"]
        assert [elements(x) for x in X[name][1]] == [x.numpy().tobytes() for x in args]
        assert kwargs == {}
        report = holdfast.verify(folder / f"{name}.pt2")
        assert report.ok
        assert not report.unchecked


def test_several_models_in_one_archive(folder):
    contents = load_pt2(folder / "several.pt2")
    with holdfast.open(folder / "several.pt2") as ckpt:
        assert list(ckpt.tree) == ["head2", "head5"]
        for model, exported in contents.exported_programs.items():
            assert_same(ckpt, f"{model}.", exported)


def test_a_subclass_is_a_tensor_with_a_name_beside(folder):
    with holdfast.open(folder / "pickled.pt2") as ckpt:
        assert ckpt["w"].numpy().tolist() == [1, 1, 1]
        assert ckpt["w"].traits.parameter
        assert str(ckpt["w"].traits.subclass).endswith("Marked")
        assert list(ckpt)[:2] == ["w", "before"]


def test_fake_tensors_have_no_data(folder):
    with holdfast.open(folder / "fake.pt2") as ckpt:
        assert ckpt["weight"].traits.meta
        assert ckpt["weight"].shape == (2, 3)
        assert isinstance(ckpt.tree["sample_inputs"][0][0], Opaque)
        with pytest.raises(errors.Unsupported):
            ckpt["weight"].numpy()


def test_the_summary_of_a_program(folder):
    source = OpenSource(LocalStore(folder / "dynamic.pt2"))
    ((_, model),) = Pt2Reader(source).models().items()
    program = model.program
    assert program is not None
    assert [str(value) for value in program.inputs] == ["input: float32[s77, 3]"] or program.inputs[
        0
    ].sizes[1] == 3
    assert isinstance(program.inputs[0].sizes[0], str)
    assert program.inputs[0].sizes[0].isidentifier()
    assert program.operators == {"aten.linear.default": 1}
    assert list(program.symbols.values()) == ["2 to 64"]
    assert set(program.weights) == {"weight", "bias"}
    assert program.weights["weight"].sizes == (2, 3)
    assert program.schema.startswith("8.")
    assert program.opset == {"aten": 10}
    with holdfast.open(folder / "dynamic.pt2") as ckpt:
        assert any("takes" in note and "aten.linear.default" in note for note in ckpt.notes)


def test_nothing_is_imported(folder):
    code = f"""
import sys, holdfast
for name in ("tied", "kinds", "pickled", "several"):
    with holdfast.open(rf"{folder}/" + name + ".pt2") as ckpt:
        ckpt.read()
print("torch" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.stdout.strip(), done.stderr) == ("False", "")


def rewritten(path, target, change):
    """An archive with some of its records changed, by torch's own writer; (name, content) pairs may be added."""
    old = zipfile.ZipFile(path)
    writer = torch._C.PyTorchFileWriter(str(target))
    for full in old.namelist():
        name = full.partition("/")[2]
        if name in (".data/version", "byteorder", ".data/serialization_id"):
            continue
        content = change(name, old.read(full))
        if content is not None:
            writer.write_record(name, content, len(content))
    for name, content in change("", b""):
        writer.write_record(name, content, len(content))
    writer.write_end_of_file()


def saved(value):
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


@pytest.mark.parametrize("name", ["tied", "buffers", "constants"])
def test_the_legacy_layout(folder, tmp_path, name):
    exported = loaded(folder / f"{name}.pt2")

    def change(record, content):
        if not record:
            parts = {"weights": exported.state_dict, "constants": exported.constants}
            return [(f"data/{part}/model.pt", saved(dict(state))) for part, state in parts.items()]
        return None if record.startswith(("data/weights/", "data/constants/")) else content

    rewritten(folder / f"{name}.pt2", tmp_path / "legacy.pt2", change)
    with holdfast.open(tmp_path / "legacy.pt2") as ckpt:
        assert_same(ckpt, "", loaded(tmp_path / "legacy.pt2"))


@pytest.mark.parametrize("suffix", ["pt", "json"])
def test_the_oldest_layout(folder, tmp_path, suffix):
    exported = loaded(folder / "tied.pt2")
    with (
        zipfile.ZipFile(folder / "tied.pt2") as new,
        zipfile.ZipFile(tmp_path / "old.pt2", "w") as old,
    ):
        old.writestr("serialized_exported_program.json", new.read("tied/models/model.json"))
        old.writestr(f"serialized_state_dict.{suffix}", saved(dict(exported.state_dict)))
        old.writestr(f"serialized_constants.{suffix}", saved(dict(exported.constants)))
        old.writestr("serialized_example_inputs.pt", saved(exported.example_inputs))
        old.writestr("version", "8.20")
        old.writestr("extra_files/note.txt", "hello")
    with holdfast.open(tmp_path / "old.pt2") as ckpt:
        assert_same(ckpt, "", loaded(tmp_path / "old.pt2"))
        assert ckpt.metadata["version"] == "8.20"
        assert ckpt.metadata["extra_files/note.txt"] == "hello"


def test_compiled_packages_are_listed_and_their_weights_read(tmp_path):
    base = torch.arange(12.0)
    (tmp_path / "code.so").write_bytes(b"\x7fELF")

    def weights(**tensors):
        return Weights(
            {name: (tensor, TensorProperties(tensor)) for name, tensor in tensors.items()}
        )

    one, two = weights(w=base.view(3, 4), v=base[2:5]), weights(w=base.view(4, 3))
    package_pt2(
        tmp_path / "code.pt2",
        aoti_files={"m": [str(tmp_path / "code.so"), one], "n": [str(tmp_path / "code.so"), two]},
    )
    with holdfast.open(tmp_path / "code.pt2") as ckpt:
        assert list(ckpt) == ["m.w", "m.v", "n.w"]
        assert ckpt["m.v"].numpy().tolist() == [2, 3, 4]
        assert ckpt["n.w"].shape == (4, 3)
        assert [alias.names for alias in ckpt.aliases] == [("m.w", "m.v", "n.w")]
        assert any("data/aotinductor/m" in note and "code.so" in note for note in ckpt.notes)


# What is written here.


def parts_of(path, exported, model="model", **changed):
    """A model of an archive as a part of another, with other weights."""
    archive = zipfile.ZipFile(path)
    prefix = archive.namelist()[0].partition("/")[0]
    state = make_lazy_tree(
        tabulate_state(
            {"w": dict(changed.get("weights", exported.state_dict)), "c": dict(exported.constants)}
        )
    )
    return ModelWeights(
        state["w"], state["c"], archive.read(f"{prefix}/models/{model}.json"),
        archive.read(f"{prefix}/data/sample_inputs/{model}.pt"),
    )  # fmt: skip


@pytest.mark.parametrize("name", X)
def test_the_bytes_are_those_of_torch(folder, tmp_path, name):
    # Saved again from what torch loads, which is what both sides are given.
    exported = loaded(folder / f"{name}.pt2")
    torch.export.save(exported, tmp_path / "theirs.pt2", extra_files={"note.txt": "x"})
    part = parts_of(tmp_path / "theirs.pt2", exported)
    plan = lay_out_pt2({"model": part}, name="theirs", extra={"note.txt": b"x"}, trim=False)
    write_plan(plan, str(tmp_path / "ours.pt2"))
    assert (tmp_path / "ours.pt2").read_bytes() == (tmp_path / "theirs.pt2").read_bytes()


@pytest.mark.parametrize("name", X)
def test_what_is_packaged_here_runs_there(folder, tmp_path, name):
    exported = loaded(folder / f"{name}.pt2")
    package_program(exported, tmp_path / "m.pt2")
    again = loaded(tmp_path / "m.pt2")
    assert torch.equal(again.module()(*X[name][1]), exported.module()(*X[name][1]))
    if name == "dynamic":
        longer = torch.randn(9, 3)
        assert torch.equal(again.module()(longer), exported.module()(longer))
    for weight, tensor in exported.state_dict.items():
        assert elements(again.state_dict[weight]) == elements(tensor)
    assert shared(dict(again.state_dict)) == shared(dict(exported.state_dict))


def test_ten_archives_become_one(folder, tmp_path):
    holdfast.package({name: folder / f"{name}.pt2" for name in X}, tmp_path / "all.pt2")
    programs = load_pt2(tmp_path / "all.pt2").exported_programs
    assert list(programs) == list(X)
    for name, program in programs.items():
        assert torch.equal(
            program.module()(*X[name][1]), loaded(folder / f"{name}.pt2").module()(*X[name][1])
        )


def test_models_share_what_they_have_in_common(folder, tmp_path):
    contents = load_pt2(folder / "several.pt2")
    programs = contents.exported_programs
    encoder = {n: t for n, t in programs["head2"].state_dict.items() if n.startswith("encoder")}
    state = make_lazy_tree(
        tabulate_state(
            {model: {**exported.state_dict, **encoder} for model, exported in programs.items()}
        )
    )
    models = {
        model: ModelWeights(state[model], {}, *_program(folder / "several.pt2", model))
        for model in programs
    }
    write_plan(lay_out_pt2(models, name="shared"), str(tmp_path / "shared.pt2"))
    names = zipfile.ZipFile(tmp_path / "shared.pt2").namelist()
    assert sum("weight_" in name and "config" not in name for name in names) == 6
    again = load_pt2(tmp_path / "shared.pt2").exported_programs
    x = torch.randn(2, 3)
    for model, exported in again.items():
        inner = {n: encoder.get(n, t) for n, t in programs[model].state_dict.items()}
        assert all(torch.equal(exported.state_dict[n], t) for n, t in inner.items())
        assert exported.module()(x).shape == programs[model].module()(x).shape
    with holdfast.open(tmp_path / "shared.pt2") as ckpt:
        assert (
            len(
                [
                    alias
                    for alias in ckpt.aliases
                    if {n.partition(".")[0] for n in alias.names} == {"head2", "head5"}
                ]
            )
            == 2
        )


def _program(path, model):
    archive = zipfile.ZipFile(path)
    prefix = archive.namelist()[0].partition("/")[0]
    return archive.read(f"{prefix}/models/{model}.json"), archive.read(
        f"{prefix}/data/sample_inputs/{model}.pt"
    )


def test_a_package_of_weights_alone(tmp_path):
    base = torch.randn(256, 64)
    states = {"base": {"emb": base, "head": base}} | {
        f"adapter{i}": {"emb": base, "lora": torch.randn(4, 64)} for i in range(3)
    }
    described = make_lazy_tree(tabulate_state(states))
    plan = lay_out_pt2(models_of(described), name="package")
    write_plan(plan, str(tmp_path / "package.pt2"))
    alone = base.nbytes + 3 * 4 * 64 * 4
    assert (tmp_path / "package.pt2").stat().st_size < 1.2 * alone
    with holdfast.open(tmp_path / "package.pt2") as ckpt:
        assert list(ckpt.tree) == list(states)
        for model, state in states.items():
            for name, tensor in state.items():
                assert ckpt[f"{model}.{name}"].numpy().tobytes() == elements(tensor)
        assert [len(alias.names) for alias in ckpt.aliases] == [5]
    assert load_pt2(tmp_path / "package.pt2").exported_programs == {}
    with pytest.raises((KeyError, RuntimeError)):
        torch.export.load(tmp_path / "package.pt2")


def test_a_view_costs_what_it_shows(tmp_path):
    large = torch.arange(100_000.0)
    state = make_lazy_tree(
        tabulate_state(
            {"m": {"rows": large[50_000:50_010], "turned": large[50_000:50_006].view(2, 3).t()}}
        )
    )
    plan = lay_out_pt2(models_of(state))
    assert plan.nbytes < 5000
    write_plan(plan, str(tmp_path / "m.pt2"))
    with holdfast.open(tmp_path / "m.pt2") as ckpt:
        assert ckpt["rows"].numpy().tolist() == list(range(50_000, 50_010))
        assert ckpt["turned"].numpy().tolist() == large[50_000:50_006].view(2, 3).t().tolist()
        assert len(ckpt.aliases) == 1


def test_what_a_package_cannot_hold_is_listed_together():
    state = make_lazy_tree(
        tabulate_state(
            {"m": {"ok": torch.ones(1), "step": 3, "s": torch.eye(3).to_sparse()}, "n": 5}
        )
    )
    with pytest.raises(errors.CannotHold) as caught:
        models_of(state)
    assert len(caught.value.problems) == 3
    bits = torch.ones(2, dtype=torch.uint8).view(torch.bits8)
    state = make_lazy_tree(
        tabulate_state({"m": {"meta": torch.empty(2, device="meta")}, "a/b": {"bits": bits}})
    )
    with pytest.raises(errors.CannotHold) as caught:
        lay_out_pt2(models_of(state))
    assert len(caught.value.problems) == 3


def test_conjugated_weights_are_resolved(tmp_path):
    w = torch.tensor([1 + 2j, 3 - 4j])
    plan = lay_out_pt2(models_of(make_lazy_tree(tabulate_state({"m": {"w": w, "c": w.conj()}}))))
    assert any("m.c" in note for note in plan.notes)
    write_plan(plan, str(tmp_path / "m.pt2"))
    with holdfast.open(tmp_path / "m.pt2") as ckpt:
        assert ckpt["c"].numpy().tolist() == [1 - 2j, 3 + 4j]


def replaced(path, target, states):
    source = OpenSource(LocalStore(path), limits=Limits())
    described = make_lazy_tree(tabulate_state(states))
    plan = lay_out_replaced(source, {model: described[model] for model in states}, name="new")
    write_plan(plan, str(target))


@pytest.mark.parametrize("name", ["tied", "buffers", "constants", "strided", "fp8", "dynamic"])
def test_weights_are_replaced_in_a_program(folder, tmp_path, name):
    exported = loaded(folder / f"{name}.pt2")
    tuned = {n: (t.detach().float() + 1).to(t.dtype) for n, t in exported.state_dict.items()}
    replaced(folder / f"{name}.pt2", tmp_path / "new.pt2", {"model": tuned})
    again = loaded(tmp_path / "new.pt2")
    assert list(again.state_dict) == list(exported.state_dict)
    for n, t in again.state_dict.items():
        assert elements(t) == elements(tuned[n])
        assert type(t) is type(exported.state_dict[n])
        assert t.requires_grad == exported.state_dict[n].requires_grad
    module = exported.module()
    module.load_state_dict(tuned, assign=True)
    assert torch.equal(again.module()(*X[name][1]), module(*X[name][1]))
    old, new = zipfile.ZipFile(folder / f"{name}.pt2"), zipfile.ZipFile(tmp_path / "new.pt2")
    for full in old.namelist():
        if not full.partition("/")[2].startswith(("data/weights/", ".data/")):
            assert new.read(f"new/{full.partition('/')[2]}") == old.read(full)


def test_one_of_several_models_gets_other_weights(folder, tmp_path):
    programs = load_pt2(folder / "several.pt2").exported_programs
    tuned = {n: torch.full_like(t, 2.0).detach() for n, t in programs["head5"].state_dict.items()}
    replaced(folder / "several.pt2", tmp_path / "new.pt2", {"head5": tuned})
    again = load_pt2(tmp_path / "new.pt2").exported_programs
    assert all(torch.equal(t, tuned[n]) for n, t in again["head5"].state_dict.items())
    assert all(
        torch.equal(t, programs["head2"].state_dict[n])
        for n, t in again["head2"].state_dict.items()
    )


def test_weights_that_do_not_fit_are_listed_together(folder, tmp_path):
    exported = loaded(folder / "tied.pt2")
    wrong = {
        **{n: t.detach() for n, t in exported.state_dict.items()},
        "more": torch.ones(1),
        "mid.bias": torch.ones(5),
    }
    wrong["mid.weight"] = wrong["mid.weight"].half()
    del wrong["head.weight"]
    with pytest.raises(errors.CannotHold) as caught:
        replaced(folder / "tied.pt2", tmp_path / "new.pt2", {"model": wrong})
    assert sorted(problem.partition(":")[0] for problem in caught.value.problems) == [
        "model.head.weight", "model.mid.bias", "model.mid.weight", "model.more",
    ]  # fmt: skip
    with pytest.raises(errors.CannotHold, match="no such model"):
        replaced(folder / "tied.pt2", tmp_path / "new.pt2", {"other": wrong})
    with pytest.raises(errors.CannotHold, match="pickled"):
        replaced(
            folder / "pickled.pt2",
            tmp_path / "new.pt2",
            {"model": {"w": torch.ones(3), "before": torch.ones(2)}},
        )
    assert not (tmp_path / "new.pt2").exists()
