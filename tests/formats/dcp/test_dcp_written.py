"""One process writes a DCP directory without torch, by the path of every other format; torch loads it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

import holdfast
from holdfast.cli.main import main
from holdfast.errors import CannotHold
from holdfast.torch import save_sharded

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed")

W = torch.arange(12.0).reshape(3, 4)

Save = Callable[..., object]


def tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {
        "w": W, "tied": W, "turned": W.t(), "bf16": torch.randn(7).bfloat16(), "f8": torch.randn(9).to(torch.float8_e4m3fn),
        "scalar": torch.tensor(-3), "empty": torch.zeros(0, 4), "bool": torch.tensor([True, False]),
        "complex": torch.randn(3, dtype=torch.complex64), "u16": torch.tensor([1, 65535], dtype=torch.uint16),
        "deep": torch.randn(2, 1, 3, 1, 2), "large": torch.randn(300, 100),
    }  # fmt: skip


def nested() -> dict[str, object]:
    values = {
        "step": 3,
        "rate": 0.5,
        "name": "é",
        "on": True,
        "none": None,
        "pair": (1, "a"),
        "list": [1, 2],
        "empty": {},
    }
    more = {
        "list": [torch.ones(2), {"x": torch.zeros(1)}],
        "groups": [{"lr": 0.1, "betas": (0.9, 0.95), "params": [0, 1]}],
    }
    return {"model": tensors(), "values": values, "optim": more, "huge": 1 << 80}


def blank(value: object) -> object:
    """The same containers, with other leaves."""
    if isinstance(value, torch.Tensor):
        return torch.full_like(value, 1)
    if isinstance(value, dict):
        return {
            key: blank(one) for key, one in value.items() if one != {}
        }  # torch does not ask for empty ones
    return (
        [blank(one) for one in value]
        if isinstance(value, list) and any(isinstance(one, dict) for one in value)
        else "nothing"
    )


def same(found: object, wanted: object) -> None:
    if isinstance(wanted, torch.Tensor):
        assert isinstance(found, torch.Tensor)
        assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
        assert (
            found.contiguous().view(torch.uint8).equal(wanted.contiguous().view(torch.uint8))
            if wanted.ndim
            else found == wanted
        )
    elif isinstance(wanted, dict):
        for key, one in wanted.items():
            if not isinstance(one, dict) or one:
                same(found[key], one)
    elif isinstance(wanted, list) and any(isinstance(one, dict) for one in wanted):
        for one, other in zip(found, wanted, strict=True):
            same(one, other)
    else:
        assert (type(found), found) == (type(wanted), wanted)


def loaded(path: Path, like: dict[str, object]) -> dict[str, object]:
    state = blank(like)
    dcp.load(state, checkpoint_id=path)
    return state


def digests(path: Path) -> dict[str, tuple[object, ...]]:
    with holdfast.open(path) as found:
        return {
            name: (found[name].dtype.name, found[name].shape, found[name].numpy().tobytes())
            for name in found
        }


@pytest.fixture
def source(tmp_path: Path) -> Path:
    torch.save(nested(), tmp_path / "a.pt")
    return tmp_path / "a.pt"


@pytest.mark.parametrize("between", ["a.pt", "native", "a.safetensors"])
def test_torch_loads_what_was_converted(source: Path, tmp_path: Path, between: str):
    if between != source.name:
        holdfast.convert(source, tmp_path / between)
    done = holdfast.convert(tmp_path / between, tmp_path / "b", format="dcp", read_back=True)
    assert (done.format, [name for name, _ in done.files]) == (
        "dcp",
        ["__0_0.distcp", ".holdfast.json", ".metadata"],
    )
    assert digests(tmp_path / "b") == digests(source)
    assert holdfast.verify(tmp_path / "b").ok
    assert holdfast.diff(source, tmp_path / "b").equal
    same(loaded(tmp_path / "b", nested()), nested())
    holdfast.convert(tmp_path / "b", tmp_path / "c.pt")
    same(torch.load(tmp_path / "c.pt"), nested())


def test_ties_are_stored_once_and_gradients_are_wanted(tmp_path: Path):
    torch.save({"a": W, "b": W, "c": torch.ones(2, requires_grad=True)}, tmp_path / "a.pt")
    holdfast.convert(tmp_path / "a.pt", tmp_path / "b", format="dcp")
    listed = dcp.FileSystemReader(tmp_path / "b").read_metadata()
    places = {one.fqn: info for one, info in listed.storage_data.items()}
    assert places["a"] == places["b"]
    assert [listed.state_dict_metadata[name].properties.requires_grad for name in "abc"] == [
        False,
        False,
        True,
    ]
    with holdfast.open(tmp_path / "b") as found:
        assert found["c"].traits.requires_grad


def test_it_says_what_ranks_would_say(tmp_path: Path):
    holdfast.torch.save_sharded(tmp_path / "ranks", nested(), format="dcp")
    holdfast.save(nested(), tmp_path / "one", format="dcp")
    ours, theirs = (
        dcp.FileSystemReader(tmp_path / name).read_metadata() for name in ("one", "ranks")
    )
    assert ours.state_dict_metadata == theirs.state_dict_metadata
    assert list(ours.state_dict_metadata) == list(theirs.state_dict_metadata)
    assert ours.planner_data == theirs.planner_data
    assert ours.storage_data.keys() == theirs.storage_data.keys()
    assert ours.version == theirs.version
    data = [(tmp_path / name / "__0_0.distcp").read_bytes() for name in ("one", "ranks")]
    for index, info in ours.storage_data.items():
        if index.offset is not None:
            other = theirs.storage_data[index]
            assert data[0][info.offset :][: info.length] == data[1][other.offset :][: other.length]


def test_files_are_cut(tmp_path: Path):
    state = {f"w{number}": torch.full((1000,), float(number)) for number in range(10)}
    done = holdfast.save({**state, "step": 7}, tmp_path / "a", format="dcp", max_shard_size=12_000)
    assert [name for name, _ in done.files if name.endswith(".distcp")] == [
        f"__0_{number}.distcp" for number in range(4)
    ]
    same(loaded(tmp_path / "a", {**state, "step": 7}), {**state, "step": 7})


def test_the_same_bytes_each_time(tmp_path: Path):
    found = []
    for name in ("a", "other"):
        holdfast.save(nested(), tmp_path / name, format="dcp")
        found.append({one.name: one.read_bytes() for one in (tmp_path / name).iterdir()})
    assert found[0] == found[1]


def test_what_it_cannot_hold_is_told_at_once(tmp_path: Path):
    state = {
        "a": object(),
        "pair": (W,),
        "sparse": W.to_sparse(),
        "b": [1, {"c": lambda: 1}],
        "w": W,
    }
    with pytest.raises(CannotHold) as caught:
        holdfast.save(state, tmp_path / "a", format="dcp")
    told = "\n".join(caught.value.problems)
    assert all(
        text in told
        for text in (
            "a: a builtins.object",
            "pair.0: a tensor inside of a tuple",
            "sparse: a ",
            "b.1.c: a ",
        )
    )
    assert not (tmp_path / "a").exists()
    holdfast.save(
        {"p": np.random.default_rng(0).integers(9, size=4), "s": ("MT", np.arange(5))},
        tmp_path / "a",
        format="dcp",
    )
    with holdfast.open(tmp_path / "a") as found:
        assert list(found) == ["p"]
        assert found.tree["s"][1].tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    "state",
    [[W, W], (np.ones(2), 3), 5, "text", None, {1}, np.float32(3), [], [{"a": W}]],
    ids=["list", "tuple", "int", "text", "None", "set", "scalar", "empty list", "list of dicts"],
)
@pytest.mark.parametrize("save", [holdfast.save, save_sharded])
def test_a_state_that_is_no_dict_is_refused(state: object, save: Save, tmp_path: Path):
    with pytest.raises(CannotHold, match=r"the state: it is of type .*, and torch loads only a"):
        save(state, tmp_path / "a", format="dcp")
    assert not (tmp_path / "a").exists()


def test_convert_refuses_a_file_with_a_list(tmp_path: Path):
    torch.save([W, W], tmp_path / "a.pt")
    with pytest.raises(CannotHold, match="the state: it is of type list"):
        holdfast.convert(tmp_path / "a.pt", tmp_path / "b", format="dcp")
    holdfast.convert(tmp_path / "a.pt", tmp_path / "b", format="dcp", tensors_only=True)
    same(loaded(tmp_path / "b", {"0": W, "1": W}), {"0": W, "1": W})


@pytest.mark.filterwarnings("ignore:Sparse|The PyTorch API of nested|torch.quantize_per")
@pytest.mark.parametrize("save", [holdfast.save, save_sharded])
@pytest.mark.parametrize("kind", ["sparse_coo", "sparse_csr", "nested", "quantized"])
def test_a_lone_tensor_of_several_parts_is_refused(kind: str, save: Save, tmp_path: Path):
    make_tensor = {
        "sparse_coo": W.to_sparse,
        "sparse_csr": W.to_sparse_csr,
        "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        "quantized": lambda: torch.quantize_per_tensor(W, 0.1, 0, torch.qint8),
    }
    with pytest.raises(CannotHold, match=f"tensor: a {kind} tensor$"):
        save(make_tensor[kind](), tmp_path / "a", format="dcp")


@pytest.mark.parametrize(
    ("state", "problem"),
    [
        ({"a": (W,), "": 5}, "a.0: a tensor inside of a tuple"),
        ({"a": (W,), "": {"b": 1}}, "a.0: a tensor inside of a tuple"),
        ({"a": (W,), "a.0": 3}, "a.0: the name of two things"),
        ({"a": {"b": (W,)}, "a.b.0": 4}, "a.b.0: the name of two things"),
        ({"a.b": (W,), "a": (3,)}, "a.b.0: a tensor inside of a tuple"),
        ({"a.b": (W,), "a": 5}, "a.b.0: a tensor inside of a tuple"),
        ({"a": {1: {"x": W}, "1": {"y": W}}}, "a: two keys are one text"),
        ({("k" * 100,): W}, "k'.*: a tensor under a key that is neither text nor a number"),
    ],
)
def test_a_tensor_that_no_name_leads_to_is_refused(
    state: dict[object, object], problem: str, tmp_path: Path
):
    torch.save(state, tmp_path / "a.pt")
    with pytest.raises(CannotHold, match=problem):
        holdfast.convert(tmp_path / "a.pt", tmp_path / "b", format="dcp")
    with pytest.raises(CannotHold, match=problem):
        holdfast.save(state, tmp_path / "c", format="dcp")
    with pytest.raises(CannotHold, match=problem):
        save_sharded(state, tmp_path / "d", format="dcp")


@pytest.mark.parametrize("save", [holdfast.save, save_sharded])
@pytest.mark.parametrize(
    "state", [{"a": (np.ones(2),), "a.0": np.zeros(3)}, {"a.0": np.zeros(3), "a": (np.ones(2),)}]
)
def test_an_array_in_a_tuple_never_takes_the_name_of_another(
    state: dict[str, object], save: Save, tmp_path: Path
):
    with pytest.raises(CannotHold, match=r"a\.0: the name of two things"):
        save(state, tmp_path / "a", format="dcp")


def test_verify_of_a_directory_without_data_files(tmp_path: Path):
    holdfast.save({}, tmp_path / "ours", format="dcp")
    dcp.save({}, checkpoint_id=tmp_path / "theirs", no_dist=True)
    for empty_file in (tmp_path / "theirs").glob("*.distcp"):
        empty_file.unlink()
    for name in ("ours", "theirs"):
        assert not [*(tmp_path / name).glob("*.distcp")]
        report = holdfast.verify(tmp_path / name)
        assert report.ok
        assert report.verdict == "readable"
        assert not report.files


def test_a_dtype_that_torch_does_not_have(tmp_path: Path):
    header = b'{"w":{"dtype":"F4","shape":[4],"data_offsets":[0,2]}}'.ljust(56)
    (tmp_path / "a.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(2))
    with pytest.raises(CannotHold, match="w: torch has no dtype for float4_e2m1fn"):
        holdfast.convert(tmp_path / "a.safetensors", tmp_path / "b", format="dcp")


def test_tensors_alone(source: Path, tmp_path: Path):
    holdfast.convert(source, tmp_path / "b", format="dcp", tensors_only=True)
    listed = dcp.FileSystemReader(tmp_path / "b").read_metadata()
    assert {type(one).__name__ for one in listed.state_dict_metadata.values()} == {
        "TensorStorageMetadata"
    }
    assert digests(tmp_path / "b") == digests(source)


def test_the_command_and_a_dry_run(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert main(["convert", str(source), str(tmp_path / "b"), "--format", "dcp", "--dry-run"]) == 0
    assert "in 3 files" in capsys.readouterr().out
    assert not (tmp_path / "b").exists()
    assert main(["convert", str(source), str(tmp_path / "b"), "--format", "dcp", "--quiet"]) == 0
    assert digests(tmp_path / "b") == digests(source)


def test_in_place_and_over_another(source: Path, tmp_path: Path):
    holdfast.save({"x": W}, tmp_path / "b", format="dcp", max_shard_size=1)
    holdfast.convert(source, tmp_path / "b", format="dcp", overwrite=True)
    holdfast.edit(tmp_path / "b", in_place=True, keep=["model.*"], rename=["model.*=*"])
    same(loaded(tmp_path / "b", tensors()), tensors())
    holdfast.save({"x": W}, tmp_path / "b", overwrite=True)
    assert {one.suffix for one in (tmp_path / "b").iterdir()} == {".safetensors", ".json"}


def test_a_bucket(source: Path):
    url = "memory://dcp-written/step-1"
    holdfast.convert(source, url, format="dcp")
    first = digests(url)
    done = holdfast.convert(source, url, format="dcp", overwrite=True, max_shard_size=20_000)
    names = [name for name, _ in done.files]
    assert names[-1] == ".metadata"
    assert ".holdfast.json" not in names
    assert all(name.startswith("__0_") for name in names[:-1])
    assert digests(url) == first == digests(source)
    holdfast.copy(url, f"{url}-copy")
    assert [name for name, _ in holdfast.verify(f"{url}-copy").files] == names[
        :-1
    ]  # nothing of the first is left


def test_without_torch_within_a_budget(tmp_path: Path):
    size = 200 << 20
    holdfast.save(
        {f"w{n}": np.zeros(size // 8 // 4, np.float32) for n in range(8)},
        tmp_path / "a.safetensors",
        durable=False,
    )
    code = """
import resource, sys
import holdfast
holdfast.convert(sys.argv[1], sys.argv[2], format=sys.argv[3], max_memory="72MiB", threads=1, durable=False)
assert "torch" not in sys.modules
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""
    peaks = {}
    for format in ("native", "dcp"):
        command = [
            sys.executable,
            "-c",
            code,
            str(tmp_path / "a.safetensors"),
            str(tmp_path / format),
            format,
        ]
        peaks[format] = int(
            subprocess.run(command, capture_output=True, text=True, check=True).stdout
        )
    assert peaks["dcp"] < peaks["native"] + 16_000  # kilobytes; the file has 200,000
