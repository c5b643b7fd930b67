"""With `read_back`, and always for several ranks, the reader opens what was written before it is published."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import obstore
import pytest
import torch

import holdfast
import holdfast.torch as ht
from holdfast.core.limits import Limits
from holdfast.core.protocols import Description
from holdfast.core.strict_json import parse_values
from holdfast.core.value import replace
from holdfast.engine import stream, write
from holdfast.engine.files import tabulate
from holdfast.errors import (
    CannotHold,
    DurabilityUncertain,
    HeaderError,
    NotCommitted,
    RanksFailed,
)
from holdfast.formats import Format
from holdfast.verbs.reshard import reshard
from tests.groups import on_ranks

STATE = {"w": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.ones(3, np.float32)}
OLD_STATE = {name: array + 1 for name, array in STATE.items()}
TENSORS = {name: torch.from_numpy(array) for name, array in STATE.items()}

WRITERS = {
    "save .pt": lambda src, dst: holdfast.save(STATE, dst / "x.pt", read_back=True),
    "save safetensors": lambda src, dst: holdfast.save(
        STATE, dst / "x.safetensors", read_back=True
    ),
    "save safetensors in shards": lambda src, dst: holdfast.save(
        STATE, dst / "x", format="safetensors", max_shard_size=8, read_back=True
    ),
    "save native": lambda src, dst: holdfast.save(STATE, dst / "x", read_back=True),
    "convert": lambda src, dst: holdfast.convert(src, dst / "x"),
    "edit": lambda src, dst: holdfast.edit(src, dst / "x.pt", rename=[("w", "v")]),
    "prune": lambda src, dst: holdfast.prune(src, dst / "x", ["w: 0.5"]),
    "package": lambda src, dst: holdfast.package({"model": STATE}, dst / "x.pt2", read_back=True),
    "tie": lambda src, dst: holdfast.tie(src, dst / "x.pt"),
    "compact": lambda src, dst: holdfast.compact(src, dst / "x.pt"),
    "reshard": lambda src, dst: reshard(src, dst / "x", mesh={"dp": 2}),
}


@pytest.fixture
def src(tmp_path: Path) -> Path:
    holdfast.save(STATE, tmp_path / "src.safetensors")
    return tmp_path / "src.safetensors"


@pytest.fixture
def dst(tmp_path: Path) -> Path:
    (tmp_path / "out").mkdir()
    return tmp_path / "out"


def patch_readers(
    monkeypatch: pytest.MonkeyPatch, src: Path, change: Callable[[Description], Description]
) -> None:
    """Have every reader return a changed description of everything but the source."""
    describe = Format.describe

    def describe_changed(self: Format, source) -> Description:
        description = describe(self, source)
        return description if source.store.name == str(src) else change(description)

    monkeypatch.setattr(Format, "describe", describe_changed)


def break_writers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have every writer write another first byte to each file, with the checksum that fits it."""
    assemble_file = write.assemble_file

    def broken_content(plan, crcs):
        content, receipt = assemble_file(plan, crcs)
        broken = bytes([content[0] ^ 1]) + content[1:]
        block = write.WrittenBlock(0, len(broken), write.crc32(broken))
        return broken, write.Receipt(receipt.nbytes, receipt.crcs, [block])

    monkeypatch.setattr(write, "assemble_file", broken_content)
    monkeypatch.setattr(stream, "assemble_file", broken_content)


def assert_is_old(path: object, **options: object) -> None:
    with holdfast.open(path, **options) as checkpoint:
        for name, array in OLD_STATE.items():
            np.testing.assert_array_equal(checkpoint[name].numpy(), array)


@pytest.mark.parametrize("writer", WRITERS)
def test_what_the_reader_refuses_is_not_published(writer, src, dst, monkeypatch):
    def refuse(_: Description) -> Description:
        raise HeaderError("for some reason")

    patch_readers(monkeypatch, src, refuse)
    with pytest.raises(NotCommitted, match="for some reason"):
        WRITERS[writer](src, dst)
    assert os.listdir(dst) == []


@pytest.mark.parametrize("writer", [name for name in WRITERS if name != "package"])
@pytest.mark.parametrize("change", ["missing", "another", "dtype", "shape"])
def test_what_the_reader_describes_is_what_was_to_be_saved(writer, change, src, dst, monkeypatch):
    def change_tensors(description: Description) -> Description:
        tensors = {name: description.tensors[name] for name in description.tensors}
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
        return replace(description, tensors=tabulate([*tensors], [*tensors.values()]))

    patch_readers(monkeypatch, src, change_tensors)
    with pytest.raises(NotCommitted, match=r"would not be there|would be there|would be read as"):
        WRITERS[writer](src, dst)
    assert os.listdir(dst) == []


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("x.pt", {}),
        ("x.safetensors", {}),
        ("x", {}),
        ("y", {"format": "safetensors", "max_shard_size": 8}),
    ],
)
def test_a_broken_writer_leaves_the_old_checkpoint(name, options, dst, monkeypatch):
    holdfast.save(OLD_STATE, dst / name, **options)
    break_writers(monkeypatch)
    with pytest.raises(NotCommitted, match="cannot be opened again"):
        holdfast.save(STATE, dst / name, overwrite=True, read_back=True, **options)
    monkeypatch.undo()
    assert os.listdir(dst) == [name]
    assert_is_old(dst / name)


@pytest.mark.parametrize("name", ["x", "x.pt", "x.safetensors"])
def test_a_broken_writer_leaves_the_old_objects(name, monkeypatch):
    store = obstore.store.MemoryStore()
    holdfast.save(OLD_STATE, name, store=store)
    break_writers(monkeypatch)
    with pytest.raises(NotCommitted, match="cannot be opened again"):
        holdfast.save(STATE, name, store=store, overwrite=True, read_back=True)
    monkeypatch.undo()
    assert_is_old(name, store=store)


def test_a_long_object_of_a_broken_writer_is_reported(monkeypatch):
    """It is an upload in parts, which can be read only when it has replaced the old object."""
    store = obstore.store.MemoryStore()
    monkeypatch.setattr("holdfast.engine.targets.bucket_commit.ObjectSave.MAX_PUT_NBYTES", 16)
    break_writers(monkeypatch)
    with pytest.raises(DurabilityUncertain, match="does not open"):
        holdfast.save(STATE, "x.pt", store=store, read_back=True)


@pytest.mark.parametrize("name", ["x.pt", "x.safetensors", "x"])
def test_several_ranks_always_open_what_they_wrote(name, src, dst, monkeypatch):
    holdfast.save(OLD_STATE, dst / name)
    break_writers(monkeypatch)
    errors = on_ranks(
        2,
        lambda group: holdfast.convert(
            src, dst / name, overwrite=True, read_back=False, group=group
        ),
    )
    monkeypatch.undo()
    for error in errors:
        assert isinstance(error, RanksFailed)
        assert "cannot be opened again" in error.message
    assert os.listdir(dst) == [name]
    assert_is_old(dst / name)


def test_a_single_process_opens_nothing_by_default(src, dst, monkeypatch):
    def refuse(_: Description) -> Description:
        raise HeaderError("for some reason")

    patch_readers(monkeypatch, src, refuse)
    holdfast.save(STATE, dst / "x.pt")
    ht.save_sharded(dst / "x", TENSORS)
    assert sorted(os.listdir(dst)) == ["x", "x.pt"]


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
    assert len(parse_values({"tree": part}, Limits(), nbytes=10 * 2001 + 1)["tree"]) == 3000
    with pytest.raises(HeaderError):
        parse_values({"tree": part}, Limits(), nbytes=10 * 2001 - 1)
    with pytest.raises(HeaderError):
        parse_values({"tree": part, "views": part}, Limits(), nbytes=10 * 3001 + 1)


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
