"""Every writer gives its plan to the reader first: where that says no, nothing has been touched."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch

import holdfast
import holdfast.torch as ht
from holdfast.core.limits import Limits
from holdfast.core.protocols import Description
from holdfast.core.strict_json import parse_parts
from holdfast.core.value import replace
from holdfast.engine.arrays import Resident
from holdfast.engine.files import tabulate
from holdfast.engine.planned_store import PlannedStore
from holdfast.engine.saves import Data, FilePlan, Late, Literal
from holdfast.errors import CannotHold, HeaderError
from holdfast.formats import Format
from holdfast.verbs.reshard import reshard
from holdfast.verbs.shared import formats

STATE = {"w": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.ones(3, np.float32)}
TENSORS = {name: torch.from_numpy(array) for name, array in STATE.items()}

WRITERS = {
    "save .pt": lambda src, dst: holdfast.save(STATE, dst / "x.pt"),
    "save safetensors": lambda src, dst: holdfast.save(STATE, dst / "x.safetensors"),
    "save safetensors in shards": lambda src, dst: holdfast.save(
        STATE, dst / "x", format="safetensors", max_shard_size=8
    ),
    "save native": lambda src, dst: holdfast.save(STATE, dst / "x"),
    "convert": lambda src, dst: holdfast.convert(src, dst / "x"),
    "edit": lambda src, dst: holdfast.edit(src, dst / "x.pt", rename=[("w", "v")]),
    "prune": lambda src, dst: holdfast.prune(src, dst / "x", ["w: 0.5"]),
    "package": lambda src, dst: holdfast.package({"model": STATE}, dst / "x.pt2"),
    "tie": lambda src, dst: holdfast.tie(src, dst / "x.pt"),
    "compact": lambda src, dst: holdfast.compact(src, dst / "x.pt"),
    "reshard": lambda src, dst: reshard(src, dst / "x", mesh={"dp": 2}),
    "ranks, native": lambda src, dst: ht.save_sharded(dst / "x", TENSORS),
    "ranks, dcp": lambda src, dst: ht.save_sharded(dst / "x", TENSORS, format="dcp"),
    "ranks, safetensors": lambda src, dst: ht.save_sharded(
        dst / "x", TENSORS, format="safetensors"
    ),
}


@pytest.fixture
def src(tmp_path: Path) -> Path:
    holdfast.save(STATE, tmp_path / "src.safetensors")
    return tmp_path / "src.safetensors"


@pytest.fixture
def dst(tmp_path: Path) -> Path:
    (tmp_path / "out").mkdir()
    return tmp_path / "out"


def patch_readers(monkeypatch: pytest.MonkeyPatch, found) -> None:
    """Every reader gives `found` of what it describes, where that is a plan. What was opened before is opened again."""
    monkeypatch.setattr(formats, "OPENED", set())
    before = Format.describe

    def describe(self, source) -> Description:
        described = before(self, source)
        return found(described) if isinstance(source.store, PlannedStore) else described

    monkeypatch.setattr(Format, "describe", describe)


class Everything(set[object]):
    """As if all kinds of tensors had been opened before."""

    def __contains__(self, key: object) -> bool:
        return True


@pytest.mark.parametrize("format", ["native", "dcp", "safetensors"])
def test_texts_of_the_caller_are_opened_whatever_was_opened_before(format, dst, monkeypatch):
    def no(_: Description) -> Description:
        raise HeaderError("for some reason")

    patch_readers(monkeypatch, no)
    monkeypatch.setattr(formats, "OPENED", Everything())
    with pytest.raises(CannotHold):
        ht.save_sharded(dst / "ranks", TENSORS, format=format, metadata={"a": "b"})
    if format != "dcp":
        with pytest.raises(CannotHold):
            holdfast.save(STATE, dst / "one", format=format, metadata={"a": "b"})
    assert os.listdir(dst) == []


@pytest.mark.parametrize("writer", WRITERS)
def test_a_writer_whose_reader_says_no_touches_nothing(writer, src, dst, monkeypatch):
    def no(_: Description) -> Description:
        raise HeaderError("for some reason")

    patch_readers(monkeypatch, no)
    with pytest.raises(CannotHold, match="for some reason"):
        WRITERS[writer](src, dst)
    assert os.listdir(dst) == []


@pytest.mark.parametrize("writer", [name for name in WRITERS if name != "package"])
@pytest.mark.parametrize("change", ["missing", "another", "dtype", "shape"])
def test_what_the_reader_finds_is_what_was_to_be_saved(writer, change, src, dst, monkeypatch):
    def other(described: Description) -> Description:
        tensors = {name: described.tensors[name] for name in described.tensors}
        name, tensor = next(iter(tensors.items()))
        match change:
            case "missing":
                del tensors[name]
            case "another":
                tensors["another"] = tensor
            case "dtype":
                tensors[name] = replace(tensor, dtype=holdfast.DTYPES.name("int32"))
            case "shape":
                tensors[name] = tensor[:1]
        return replace(described, tensors=tabulate([*tensors], [*tensors.values()]))

    patch_readers(monkeypatch, other)
    with pytest.raises(CannotHold, match=r"would not be there|would be there|would be read as"):
        WRITERS[writer](src, dst)
    assert os.listdir(dst) == []


@pytest.mark.parametrize("writer", WRITERS)
def test_a_rehearsal_reads_no_tensor(writer, src, dst, monkeypatch):
    """Data is read once, when it is written: until the plan was described, nobody has asked for any."""
    read: list[object] = []
    monkeypatch.setattr(
        "holdfast.engine.planned_store.small_bytes", lambda segment: read.append(segment) or b""
    )
    WRITERS[writer](src, dst)
    assert read == []


def test_lists_of_a_manifest_are_paid_for_by_the_whole_of_it(tmp_path):
    state = {"w": np.ones(2), "pairs": [[0, 1] for _ in range(5000)]}
    holdfast.save(state, tmp_path / "d")
    holdfast.convert(tmp_path / "d", tmp_path / "e")
    ht.save_sharded(tmp_path / "f", {**state, "w": torch.ones(2)})
    for name in "def":
        with holdfast.open(tmp_path / name) as ckpt:
            assert ckpt.tree["pairs"] == state["pairs"]
        assert holdfast.verify(tmp_path / name).ok


def test_more_lists_than_a_document_pays_for_are_refused():
    part = b"[" + b",".join([b"[]"] * 3000) + b"]"
    assert len(parse_parts({"tree": part}, Limits(), nbytes=10 * 2001 + 1)["tree"]) == 3000
    with pytest.raises(HeaderError):
        parse_parts({"tree": part}, Limits(), nbytes=10 * 2001 - 1)
    with pytest.raises(HeaderError):
        parse_parts({"tree": part, "views": part}, Limits(), nbytes=10 * 3001 + 1)


@pytest.mark.parametrize("format", ["native", "dcp", "safetensors"])
def test_ranks_refuse_as_one_does(format, dst):
    with pytest.raises(CannotHold, match="rank=64") as refused:
        ht.save_sharded(dst / "x", {"w": torch.zeros([1] * 65)}, format=format)
    assert type(refused.value) is CannotHold
    assert len(refused.value.problems) == 1
    assert os.listdir(dst) == []


def test_a_tensor_without_a_name_has_its_checksum(dst):
    ht.save_sharded(dst / "x", {"": torch.ones(3)})
    with holdfast.open(dst / "x") as ckpt:
        assert ckpt[""].numpy().tolist() == [1, 1, 1]


def test_opened_values_go_into_a_dcp_directory_as_torch_has_them(dst):
    state = {"w": torch.ones(1), "rest": (torch.Size([2]), torch.float16, torch.device("cpu"))}
    holdfast.save(state, dst / "a.pt")
    with holdfast.open(dst / "a.pt") as ckpt:
        ht.save_sharded(dst / "x", {"w": torch.ones(1), "rest": ckpt.tree["rest"]}, format="dcp")
    with holdfast.open(dst / "x") as again:
        assert again.foreign == ()


def test_the_drop_in_writes_what_torch_writes(dst):
    ht.save({"i": 1 << 200, "k": {tuple(range(70)): 1}}, dst / "a.pt")
    assert torch.load(dst / "a.pt", weights_only=False)["i"] == 1 << 200


@pytest.mark.parametrize(
    "value", [np.str_(""), np.bytes_(b""), np.str_("ab"), np.bytes_(b"ab")], ids=repr
)
def test_text_of_numpy_comes_back_from_a_torch_file(value, dst):
    holdfast.save({"t": value}, dst / "a.pt")
    with holdfast.open(dst / "a.pt") as ckpt:
        assert (type(ckpt.tree["t"]), ckpt.tree["t"]) == (type(value), value)


def test_text_of_numpy_that_numpy_cuts_is_refused(dst):
    with pytest.raises(CannotHold, match="NUL"):
        holdfast.save({"t": np.str_("a\0")}, dst / "a.pt")


def test_more_files_than_are_opened_are_refused(dst, monkeypatch):
    monkeypatch.setattr("holdfast.verbs.shared.formats.DEFAULTS", Limits(files=2))
    with pytest.raises(CannotHold, match="files=2"):
        holdfast.save(STATE, dst / "x", max_shard_size=8)
    assert os.listdir(dst) == []


def test_a_planned_file_reads_as_it_will_be():
    tensor = Resident().array(np.arange(4, dtype=np.uint8))
    segments = (
        Literal(b"head"),
        Data(tensor, "w"),
        Late(4, lambda crcs: b"%04d" % crcs["w"]),
        Literal(b"tail"),
    )
    store = PlannedStore([FilePlan("f", segments)], name="x")

    def read(start: int, stop: int) -> bytes:
        out = bytearray(stop - start)
        store.read("f", start, memoryview(out))
        return bytes(out)

    assert store.size("f") == 16
    assert read(0, 16) == b"head\0\0\0\0" + b"0000tail"
    assert read(2, 10) == b"ad\0\0\0\0" + b"00"
    assert read(4, 8) == bytes([0, 1, 2, 3])
    assert read(5, 7) == bytes([1, 2])
    with pytest.raises(holdfast.errors.Truncated):
        read(10, 17)
