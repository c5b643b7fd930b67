"""torch's own `dcp.save` and `dcp.load` over our storage: the same state, whoever wrote it and whoever reads."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter

import holdfast
from holdfast.errors import NotCommitted, StoreError, Unsupported
from holdfast.integrations.dcp import Reader, Writer
from tests.parity.test_installed import state, zeroed
from tests.support import ALONE
from tests.torch.serialization.test_weights import assert_same

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def save(value: object, writer: object) -> None:
    dcp.save(value, storage_writer=writer, **ALONE)


def loaded(reader: object, like: object) -> object:
    target = zeroed(like)
    dcp.load(target, storage_reader=reader, **ALONE)
    return target


WRITERS: dict[str, Callable[[Path], None]] = {
    "stock": lambda path: save(state(), FileSystemWriter(path)),
    "ours": lambda path: save(state(), Writer(path)),
    "save_sharded, dcp": lambda path: holdfast.torch.save_sharded(state(), path, format="dcp"),
}
OTHERS: dict[str, Callable[[Path], None]] = {
    "native": lambda path: holdfast.save(state(), path, format="native"),
    "torch.save": lambda path: torch.save(state(), path),
}


@pytest.mark.parametrize("reader", [FileSystemReader, Reader], ids=["stock reads", "ours reads"])
@pytest.mark.parametrize("writer", WRITERS)
def test_either_reads_what_either_wrote(
    writer: str, reader: Callable[[Path], object], tmp_path: Path
):
    WRITERS[writer](tmp_path / "step")
    assert_same(loaded(reader(tmp_path / "step"), state()), state())


@pytest.mark.parametrize("writer", OTHERS)
def test_the_reader_takes_any_format(writer: str, tmp_path: Path):
    OTHERS[writer](tmp_path / "step")
    assert_same(loaded(Reader(tmp_path / "step"), state()), state())


def test_tensors_of_safetensors(tmp_path: Path):
    holdfast.save({"a.w": np.arange(6.0).reshape(2, 3)}, tmp_path / "m.safetensors")
    target = {"a": {"w": torch.zeros(2, 3, dtype=torch.float64)}}
    dcp.load(target, storage_reader=Reader(tmp_path / "m.safetensors"), **ALONE)
    assert target["a"]["w"].tolist() == [[0, 1, 2], [3, 4, 5]]


def test_a_part_of_the_state_and_other_dtypes(tmp_path: Path):
    save({"a": torch.arange(4.0), "b": torch.ones(3), "n": 5}, Writer(tmp_path / "step"))
    target = {"b": torch.zeros(3, dtype=torch.float16)}
    dcp.load(target, storage_reader=Reader(tmp_path / "step"), **ALONE)
    assert target["b"].tolist() == [1, 1, 1]
    with pytest.raises(CheckpointException, match="Missing key"):
        dcp.load({"c": torch.zeros(1)}, storage_reader=Reader(tmp_path / "step"), **ALONE)


class Counter:
    def __init__(self, count: int) -> None:
        self.count = count

    def state_dict(self) -> dict[str, object]:
        return {"count": self.count}

    def load_state_dict(self, found: dict[str, object]) -> None:
        self.count = found["count"]


def test_objects_with_a_state(tmp_path: Path):
    model = nn.Linear(3, 2)
    save({"model": model, "counter": Counter(7)}, Writer(tmp_path / "step"))
    other, counter = nn.Linear(3, 2), Counter(0)
    dcp.load(
        {"model": other, "counter": counter}, storage_reader=Reader(tmp_path / "step"), **ALONE
    )
    assert torch.equal(other.weight, model.weight)
    assert counter.count == 7


def test_in_the_background(tmp_path: Path):
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    try:
        dcp.async_save(state(), storage_writer=Writer(tmp_path / "step")).result()
    finally:
        torch.distributed.destroy_process_group()
    assert_same(loaded(Reader(tmp_path / "step"), state()), state())


# What the stock storage does not promise.


class Marks:
    """Leaves a mark where it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (self.path,)


def test_an_index_that_runs_code_is_not_run(tmp_path: Path):
    save({"w": torch.ones(2)}, FileSystemWriter(tmp_path / "step"))
    index = tmp_path / "step" / ".metadata"
    found = pickle.loads(index.read_bytes())
    found.planner_data = {**found.planner_data, "evil": Marks(str(tmp_path / "pwned"))}
    index.write_bytes(pickle.dumps(found))
    target = {"w": torch.zeros(2)}
    dcp.load(target, storage_reader=Reader(tmp_path / "step"), **ALONE)
    assert target["w"].tolist() == [1, 1]
    assert not (tmp_path / "pwned").exists()
    dcp.load(target, storage_reader=FileSystemReader(tmp_path / "step"), **ALONE)
    assert (tmp_path / "pwned").exists()  # stock torch runs it


def test_a_value_that_runs_code_is_refused_by_its_name(tmp_path: Path):
    save(
        {"w": torch.ones(2), "deep": {"evil": Marks(str(tmp_path / "pwned"))}},
        FileSystemWriter(tmp_path / "step"),
    )
    target = {"w": torch.zeros(2), "deep": {"evil": 0}}
    with pytest.raises(CheckpointException, match=r"deep\.evil") as caught:
        dcp.load(target, storage_reader=Reader(tmp_path / "step"), **ALONE)
    assert any(isinstance(error, Unsupported) for error in _causes(caught.value))
    assert not (tmp_path / "pwned").exists()
    dcp.load({"w": torch.zeros(2)}, storage_reader=Reader(tmp_path / "step"), **ALONE)


def _causes(error: BaseException) -> list[BaseException]:
    inside = getattr(error, "failures", {})
    return [error, *(one[0] for one in inside.values())]


def test_damage_is_found(tmp_path: Path):
    save({"w": torch.arange(1000.0)}, Writer(tmp_path / "step"))
    file = tmp_path / "step" / "__0_0.distcp"
    content = bytearray(file.read_bytes())
    at = bytes(content).find(np.float32(500).tobytes())
    content[at] ^= 1
    file.write_bytes(content)
    with pytest.raises(CheckpointException, match="checksum"):
        dcp.load({"w": torch.zeros(1000)}, storage_reader=Reader(tmp_path / "step"), **ALONE)


def test_the_old_step_stays_until_the_new_one_is_whole(tmp_path: Path):
    save({"w": torch.ones(4)}, Writer(tmp_path / "step"))
    with pytest.raises(CheckpointException, match="exists") as caught:
        save({"w": torch.zeros(4)}, Writer(tmp_path / "step", overwrite=False))
    assert any(isinstance(error, NotCommitted) for error in _causes(caught.value))

    class Failing(Writer):
        def finish(self, **given: object) -> None:
            raise RuntimeError("the coordinator fails")

    writer = Failing(tmp_path / "step")
    with pytest.raises(CheckpointException, match="the coordinator fails"):
        save({"w": torch.zeros(4)}, writer)
    writer.close()
    assert os.listdir(tmp_path) == ["step"]
    assert holdfast.open(tmp_path / "step")["w"].numpy().tolist() == [1, 1, 1, 1]
    save({"w": torch.zeros(4)}, Writer(tmp_path / "step"))
    assert holdfast.open(tmp_path / "step")["w"].numpy().tolist() == [0, 0, 0, 0]


def test_what_is_no_checkpoint_is_said_in_our_words(tmp_path: Path):
    with pytest.raises(StoreError, match=r"no such file .*nowhere"):
        Reader(tmp_path / "nowhere").read_metadata()
    with pytest.raises(CheckpointException):  # some versions of torch say the reason, others do not
        dcp.load({"w": torch.zeros(1)}, storage_reader=Reader(tmp_path / "nowhere"), **ALONE)
