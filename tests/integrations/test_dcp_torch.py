"""What torch promises for its own storage, asked of ours: planners, extensions, arguments, and torch's other entrances."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    _EmptyStateDictLoadPlanner,
)
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

import holdfast
from holdfast.errors import BadPath, NotCommitted, Unsupported
from holdfast.integrations.dcp import Reader, Writer
from holdfast.torch import versions
from tests.support import flip_bit

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is"),
    pytest.mark.filterwarnings("ignore:Detected an existing checkpoint"),
]

WRITERS = {"stock writes": FileSystemWriter, "ours writes": Writer}
READERS = {"stock reads": FileSystemReader, "ours reads": Reader}
both = pytest.mark.parametrize("writer", WRITERS.values(), ids=WRITERS)
either = pytest.mark.parametrize("reader", READERS.values(), ids=READERS)


def save(state: dict[str, object], writer: object, **more: object) -> None:
    dcp.save(state, storage_writer=writer, **more)


def load(state: dict[str, object], reader: object, **more: object) -> dict[str, object]:
    dcp.load(state, storage_reader=reader, **more)
    return state


def causes(error: BaseException) -> list[BaseException]:
    return [error, *(one[0] for one in getattr(error, "failures", {}).values())]


# Values.


@both
@either
def test_a_buffer_is_a_value(writer: type, reader: type, tmp_path: Path):
    buffer = io.BytesIO(b"losses")
    buffer.seek(3)
    save(
        {"state": {"buffer": buffer, "blob": b"\0\xff", "in": [1, (buffer,)]}},
        writer(tmp_path / "step"),
    )
    found = load({"state": {"buffer": None, "blob": None, "in": None}}, reader(tmp_path / "step"))[
        "state"
    ]
    assert (found["buffer"].getvalue(), found["buffer"].tell(), found["blob"]) == (
        b"losses",
        3,
        b"\0\xff",
    )
    assert found["in"][1][0].getvalue() == b"losses"


@both
@either
def test_nothing_is_a_state(writer: type, reader: type, tmp_path: Path):
    save({}, writer(tmp_path))
    assert load({}, reader(tmp_path)) == {}


@both
@either
def test_a_state_that_was_not_flattened(writer: type, reader: type, tmp_path: Path):
    """Nested mappings are values then, with the tensors in them."""
    state = {
        "model": {"w": torch.arange(6.0).reshape(2, 3), "shape": torch.Size([2, 3])},
        "top": torch.ones(2),
    }
    save(state, writer(tmp_path / "step"), planner=DefaultSavePlanner(flatten_state_dict=False))
    blank = {"model": {}, "top": torch.zeros(2)}
    planner = DefaultLoadPlanner(
        flatten_state_dict=False, flatten_sharded_tensors=False
    )  # either works on a copy of the state
    found = load(blank, reader(tmp_path / "step"), planner=planner)
    assert torch.equal(found["model"]["w"], state["model"]["w"])
    assert type(found["model"]["shape"]) is torch.Size
    assert found["top"].tolist() == [1, 1]


@either
def test_names_are_those_that_were_saved(reader: type, tmp_path: Path):
    """Planners name things as they like; torch before 2.4 gave lists other names."""

    class Renames(DefaultSavePlanner):
        def set_up_planner(
            self, state_dict: dict[str, object], *args: object, **kwargs: object
        ) -> None:
            super().set_up_planner(
                {f"odd..{key}": value for key, value in state_dict.items()}, *args, **kwargs
            )

    save({"w": torch.arange(3.0), "n": 5}, Writer(tmp_path / "step"), planner=Renames())
    found = reader(tmp_path / "step").read_metadata().state_dict_metadata
    assert {name: type(entry) for name, entry in found.items()} == {
        "odd..w": TensorStorageMetadata,
        "odd..n": BytesStorageMetadata,
    }

    class Restores(DefaultLoadPlanner):
        def set_up_planner(
            self, state_dict: dict[str, object], *args: object, **kwargs: object
        ) -> None:
            super().set_up_planner(
                {f"odd..{key}": value for key, value in state_dict.items()}, *args, **kwargs
            )

    target = torch.zeros(3)
    dcp.load({"w": target}, storage_reader=reader(tmp_path / "step"), planner=Restores())
    assert target.tolist() == [0, 1, 2]


# Planners.


class Halves(DefaultSavePlanner):
    """Saves tensors in half precision."""

    says_so = True

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        for item in plan.items if self.says_so else ():
            if item.tensor_data is not None:
                item.tensor_data.properties.dtype = torch.float16
        return plan

    def resolve_data(self, write_item: WriteItem) -> object:
        data = super().resolve_data(write_item)
        return data if write_item.type == WriteItemType.BYTE_IO else data.half()


class SilentlyHalves(Halves):
    says_so = False


@both
@either
@pytest.mark.parametrize("planner", [Halves, SilentlyHalves])
def test_a_planner_that_casts(
    planner: type[DefaultSavePlanner], writer: type, reader: type, tmp_path: Path
):
    save({"w": torch.arange(5.0), "n": 1}, writer(tmp_path / "step"), planner=planner())
    assert load({"w": torch.zeros(5), "n": 0}, reader(tmp_path / "step")) == {
        "w": pytest.approx(torch.arange(5.0)),
        "n": 1,
    }
    assert os.path.getsize(tmp_path / "step" / "__0_0.distcp") < 4096


class OneBuffer(DefaultLoadPlanner):
    """Hands out the same memory for every tensor, and takes what is in it when it is told that it is there."""

    def set_up_planner(self, *args: object, **kwargs: object) -> None:
        super().set_up_planner(*args, **kwargs)
        self.buffer, self.told = torch.empty(64), []

    def resolve_tensor(self, read_item: object) -> torch.Tensor:
        like = super().resolve_tensor(read_item)
        return self.buffer[: like.numel()].view(like.shape)

    def commit_tensor(self, read_item: object, tensor: torch.Tensor) -> None:
        super().resolve_tensor(read_item).copy_(tensor)
        self.told.append(read_item.dest_index.fqn)


@either
def test_a_planner_that_hands_out_one_buffer(reader: type, tmp_path: Path):
    state = {name: torch.full((4, 2), float(number)) for number, name in enumerate("abc")}
    save(state, Writer(tmp_path / "step"))
    planner = OneBuffer()
    found = load(
        {name: torch.zeros(4, 2) for name in state}, reader(tmp_path / "step"), planner=planner
    )
    assert all(torch.equal(found[name], state[name]) for name in state)
    assert sorted(planner.told) == ["a", "b", "c"]


@either
def test_what_is_missing_may_stay(reader: type, tmp_path: Path):
    save({"w": torch.ones(2)}, Writer(tmp_path / "step"))
    state = {"w": torch.zeros(2), "new": torch.full((3,), 7.0), "count": 4}
    load(state, reader(tmp_path / "step"), planner=DefaultLoadPlanner(allow_partial_load=True))
    assert (state["w"].tolist(), state["new"].tolist(), state["count"]) == ([1, 1], [7, 7, 7], 4)


# Extensions.


class Flip:
    """Writes every byte with its bits turned, and reads them back."""

    @staticmethod
    def registry_name() -> str:
        return "stream.flip"

    @staticmethod
    def from_descriptor(version: str) -> Flip:
        assert version == "2"
        return Flip()

    def get_descriptor(self) -> str:
        return "stream.flip/2"

    def transform_to(self, output: IO[bytes]) -> IO[bytes]:
        class Flipped(io.RawIOBase):
            def writable(self) -> bool:
                return True

            def write(self, data: bytes) -> int:
                return output.write(bytes(byte ^ 0xFF for byte in memoryview(data).cast("B")))

            def close(self) -> None:
                output.close()

        return Flipped()

    def transform_from(self, input: IO[bytes]) -> IO[bytes]:
        return io.BytesIO(bytes(byte ^ 0xFF for byte in input.read()))


def registry() -> object:
    from torch.distributed.checkpoint._extension import ExtensionRegistry, StreamTransformExtension

    StreamTransformExtension.register(Flip)
    made = ExtensionRegistry()
    made.register(Flip)
    return made


@pytest.fixture
def zstd() -> object:
    pytest.importorskip("zstandard")
    from torch.distributed.checkpoint._extension import ZStandard

    return ZStandard()


STATE = {"w": torch.arange(1000.0) % 7, "empty": torch.empty(0, 2), "blob": b"SomeBlob", "n": 5}


def blank() -> dict[str, object]:
    return {"w": torch.zeros(1000), "empty": torch.empty(0, 2), "blob": b"", "n": 0}


def same(found: dict[str, object]) -> bool:
    return torch.equal(found["w"], STATE["w"]) and (found["blob"], found["n"]) == (b"SomeBlob", 5)


@both
@either
@pytest.mark.parametrize("single", [True, False], ids=["one file", "a file for each"])
def test_items_that_are_compressed(
    single: bool, writer: type, reader: type, zstd: object, tmp_path: Path
):
    save(STATE, writer(tmp_path / "step", _extensions=[zstd], single_file_per_rank=single))
    assert sum(file.stat().st_size for file in (tmp_path / "step").glob("*.distcp")) < 4000
    assert same(load(blank(), reader(tmp_path / "step")))
    assert torch.equal(holdfast.open(tmp_path / "step")["w"].torch(), STATE["w"])


@both
@either
def test_extensions_of_ones_own(writer: type, reader: type, zstd: object, tmp_path: Path):
    extensions = registry()
    chains = [[Flip()], [Flip(), zstd], [zstd, Flip()]]
    for number, chain in enumerate(
        chains if writer is Writer else chains[:1]
    ):  # torch's own cannot be read with more than one
        save(STATE, writer(tmp_path / f"{number}", _extensions=chain))
        assert same(load(blank(), reader(tmp_path / f"{number}", _extension_registry=extensions)))


def test_an_extension_that_nobody_gave(tmp_path: Path):
    save(STATE, Writer(tmp_path / "step", _extensions=[Flip()]))
    with pytest.raises(CheckpointException, match=r"stream\.flip/2.*_extension_registry") as caught:
        load(blank(), Reader(tmp_path / "step"))
    assert any(isinstance(error, Unsupported) for error in causes(caught.value))


# The folder.


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"thread_count": 3},
        {"threads": 2},
        {"single_file_per_rank": False},
        {"sync_files": False},
        {"per_thread_copy_ahead": 10_000_000},
        {"overwrite": False},
    ],
    ids=str,
)
@either
def test_arguments_of_the_stock_writer(options: dict[str, object], reader: type, tmp_path: Path):
    (tmp_path / "step").mkdir()  # torch's writer is often given a folder that is there
    save(STATE, Writer(tmp_path / "step", **options))
    files = [name for name in os.listdir(tmp_path / "step") if name.endswith(".distcp")]
    assert len(files) == (1 if options.get("single_file_per_rank", True) else 4)
    assert same(load(blank(), reader(tmp_path / "step")))


def test_a_checkpoint_is_replaced_unless_that_is_refused(tmp_path: Path):
    save({"w": torch.ones(4)}, Writer(tmp_path / "step"))
    save({"v": torch.zeros(4)}, Writer(tmp_path / "step", single_file_per_rank=False))
    assert list(holdfast.open(tmp_path / "step")) == ["v"]
    with pytest.raises(CheckpointException, match="Checkpoint already exists") as caught:
        save({"w": torch.ones(4)}, Writer(tmp_path / "step", overwrite=False))
    assert any(isinstance(error, NotCommitted) for error in causes(caught.value))
    assert os.listdir(tmp_path) == ["step"]
    assert list(holdfast.open(tmp_path / "step")) == ["v"]


def test_what_is_no_part_of_a_checkpoint_goes_along(tmp_path: Path):
    step = tmp_path / "step"
    step.mkdir()
    (step / "config.json").write_text("{}")
    (step / "holdfast.seal.json").write_text("{}")  # it was of the step before
    with open(step / "log.txt", "w") as log:
        for number in (1, 2):
            save({"n": number}, Writer(step))
            log.write(f"saved {number}\n")
            log.flush()
    assert sorted(os.listdir(step)) == [
        ".holdfast.json",
        ".metadata",
        "__0_0.distcp",
        "config.json",
        "log.txt",
    ]
    assert (step / "log.txt").read_text() == "saved 1\nsaved 2\n"
    assert load({"n": 0}, Reader(step))["n"] == 2
    (step / "logs").mkdir()
    with pytest.raises(CheckpointException, match="logs"):
        save({"n": 3}, Writer(step))
    assert load({"n": 0}, Reader(step))["n"] == 2
    assert os.listdir(tmp_path) == ["step"]


def test_torch_over_ours_and_ours_over_torch(tmp_path: Path):
    for number, kind in enumerate((Writer, FileSystemWriter, Writer)):
        save({"n": number, "w": torch.full((3,), float(number))}, kind(tmp_path / "step"))
        for reader in (Reader, FileSystemReader):
            assert load({"n": 9, "w": torch.zeros(3)}, reader(tmp_path / "step"))["n"] == number
        assert holdfast.open(tmp_path / "step")["w"].numpy().tolist() == [number] * 3


def test_the_index_has_a_checksum(tmp_path: Path):
    save({"w": torch.ones(4)}, Writer(tmp_path / "step"))
    index = tmp_path / "step" / ".metadata"
    flip_bit(index, after=b"w")
    with pytest.raises(holdfast.errors.Corrupted):
        Reader(tmp_path / "step").read_metadata()


# Other entrances.


def test_a_path_that_comes_later(tmp_path: Path):
    writer, reader = Writer(), Reader()
    for number in (1, 2):
        dcp.save({"n": number}, storage_writer=writer, checkpoint_id=tmp_path / f"{number}")
        state = {"n": 0}
        dcp.load(state, storage_reader=reader, checkpoint_id=str(tmp_path / f"{number}"))
        assert state["n"] == number
        assert (writer.checkpoint_id, reader.checkpoint_id) == (str(tmp_path / f"{number}"),) * 2
    for lost in (lambda: Reader().read_metadata(), lambda: Writer().storage_meta()):
        with pytest.raises(BadPath, match="checkpoint_id"):
            lost()
    assert Reader.validate_checkpoint_id("s3://bucket/step")
    assert not Reader.validate_checkpoint_id("hf://models/step")
    assert Writer.validate_checkpoint_id(tmp_path)


@either
def test_ids_of_save_and_load(reader: type, tmp_path: Path):
    writer = Writer(tmp_path / "step")
    save({"a": torch.zeros(4, 4)}, writer)
    opened = reader(tmp_path / "step")
    note = opened.read_metadata().storage_meta
    assert (str(note.checkpoint_id), note.save_id, note.load_id) == (
        str(tmp_path / "step"),
        writer.save_id,
        opened.load_id,
    )
    before = writer.save_id
    writer.reset()
    assert writer.save_id != before


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_the_names_before_save_and_load(tmp_path: Path):
    dcp.save_state_dict({"w": torch.ones(2)}, Writer(tmp_path / "step"), no_dist=True)
    state = {"w": torch.zeros(2)}
    dcp.load_state_dict(state, Reader(tmp_path / "step"), no_dist=True)
    assert state["w"].tolist() == [1, 1]


@both
@either
def test_a_state_by_keys(writer: type, reader: type, tmp_path: Path):
    state = {
        "model": {"a": torch.ones(2), "b": [torch.zeros(1), {"c": 3}]},
        "optimizer": {"state": {0: {"m": torch.ones(3)}}},
    }
    save(state, writer(tmp_path / "step"))
    found = _load_state_dict_from_keys("model", storage_reader=reader(tmp_path / "step"))
    assert list(found) == ["model"]
    assert found["model"]["b"][1] == {"c": 3}
    found = _load_state_dict_from_keys(
        {"optimizer.state"}, storage_reader=reader(tmp_path / "step")
    )
    assert found["optimizer"]["state"]["0"]["m"].tolist() == [1, 1, 1]


def test_torchs_converters(tmp_path: Path):
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    save({"m": {"w": torch.ones(2), "n": 3}}, Writer(tmp_path / "step"))
    dcp_to_torch_save(tmp_path / "step", tmp_path / "m.pt")
    state: dict[str, object] = {}
    _load_state_dict(
        state,
        storage_reader=Reader(tmp_path / "m.pt"),
        planner=_EmptyStateDictLoadPlanner(),
        no_dist=True,
    )
    assert (state["m"]["w"].tolist(), state["m"]["n"]) == ([1, 1], 3)


# In the background.


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


def test_one_copy_of_the_state_for_many_saves(
    alone: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(
        torch.Tensor, "pin_memory", lambda tensor: tensor
    )  # there is no device to pin it for
    writer = Writer(cache_staged_state_dict=True)
    w = torch.zeros(3)
    for step in (1, 2):
        w.fill_(step)
        future = dcp.async_save({"w": w}, storage_writer=writer, checkpoint_id=tmp_path / f"{step}")
        w.fill_(9)
        future.result()
        assert load({"w": torch.zeros(3)}, Reader(tmp_path / f"{step}"))["w"].tolist() == [step] * 3


@pytest.mark.skipif(not versions.HUGGING_FACE, reason=versions.HUGGING_FACE.reason)
def test_in_a_process_of_its_own(alone: None, tmp_path: Path):
    from torch.distributed.checkpoint import _async_process_executor as executor
    from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

    try:
        for step in (1, 2):
            state = {"w": torch.full((3,), float(step)), "n": step}
            future = dcp.async_save(
                state,
                storage_writer=Writer(tmp_path / "step", cache_staged_state_dict=False),
                async_checkpointer_type=AsyncCheckpointerType.PROCESS,
            )
            state["w"].fill_(9)
            assert set(future.result().state_dict_metadata) == {"w", "n"}
            assert (
                load({"w": torch.zeros(3), "n": 0}, Reader(tmp_path / "step"))["w"].tolist()
                == [step] * 3
            )
        future = dcp.async_save(
            {"n": 3},
            storage_writer=Writer(tmp_path / "step", overwrite=False),
            async_checkpointer_type=AsyncCheckpointerType.PROCESS,
        )
        with pytest.raises(CheckpointException, match="Checkpoint already exists"):
            future.result()
    finally:
        executor._CHECKPOINT_PROCESS = None
    assert os.listdir(tmp_path) == ["step"]


@both
def test_what_a_planner_noted_for_itself(writer: type, tmp_path: Path):
    class Notes(DefaultSavePlanner):
        def create_global_plan(self, all_plans: list[SavePlan]) -> object:
            plans, metadata = super().create_global_plan(all_plans)
            metadata.planner_data = {
                **metadata.planner_data,
                "note": {"size": torch.Size([2]), "odd": self.odd},
            }
            return plans, metadata

    for odd, kept in (
        ([1, None], {"w": ("w",), "note": {"size": torch.Size([2]), "odd": [1, None]}}),
        (Flip(), {"w": ("w",)}),
    ):
        Notes.odd = odd
        save({"w": torch.ones(2)}, writer(tmp_path / "step"), planner=Notes())
        assert Reader(tmp_path / "step").read_metadata().planner_data == kept


ODD: dict[str, object] = {
    "conjugated": torch.arange(3).to(torch.complex64).mul(1 + 2j).conj(),
    "turned": torch.arange(6.0).reshape(2, 3).t(),
    "repeated": torch.ones(1, 3).expand(4, 3),
    "every second": torch.arange(100.0)[10:20:2],
    "channels last": torch.arange(96.0).reshape(2, 3, 4, 4).to(memory_format=torch.channels_last),
    "parameter": torch.nn.Parameter(torch.ones(2)),
    "scalar": torch.tensor(3),
    "dtype": torch.bfloat16,
    "device": torch.device("cpu"),
    "set": {1, 2},
    "complex": 1j,
    "long": 1 << 80,
}


@both
@either
def test_odd_tensors_and_values(writer: type, reader: type, tmp_path: Path):
    save(dict(ODD), writer(tmp_path / "step"))
    tensors = {
        name: torch.zeros(value.shape, dtype=value.dtype)
        for name, value in ODD.items()
        if isinstance(value, torch.Tensor)
    }
    found = load({**dict.fromkeys(ODD), **tensors}, reader(tmp_path / "step"))
    for name, value in ODD.items():
        assert (
            torch.equal(found[name], value)
            if isinstance(value, torch.Tensor)
            else found[name] == value
        ), name
