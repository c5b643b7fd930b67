"""Objects that speak DCP's protocol are asked as torch asks them, and a DCP directory says where it was saved."""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from holdfast.torch import load_sharded, save_sharded
from tests.support import ALONE


class Halves(torch.Tensor):
    """A tensor whose two halves are shards. It knows under which name it is kept, and wants to hear it."""

    @staticmethod
    def __new__(cls, name: str, values: torch.Tensor) -> Halves:
        made = torch.Tensor._make_wrapper_subclass(cls, values.shape, dtype=values.dtype)
        made.kept_as, made.values, made.asked = name, values, []
        return made

    @classmethod
    def __torch_dispatch__(
        cls, function: object, kinds: object, args: tuple = (), kwargs: dict | None = None
    ) -> object:
        raise NotImplementedError(f"{function} on halves")

    def _chunks(self) -> list[ChunkStorageMetadata]:
        half = len(self.values) // 2
        return [ChunkStorageMetadata(torch.Size([at]), torch.Size([half])) for at in (0, half)]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return self._chunks()

    def __create_write_items__(self, name: str, value: object) -> list[WriteItem]:
        from torch.distributed.checkpoint.metadata import TensorProperties

        properties = TensorProperties(dtype=self.values.dtype)
        return [
            WriteItem(
                MetadataIndex(name, chunk.offsets, number),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, properties, self.values.shape),
            )
            for number, chunk in enumerate(self._chunks())
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        self.asked.append(index.fqn)
        if index.fqn != self.kept_as:
            raise ValueError(f"this is {self.kept_as}, and not {index.fqn!r}")
        at = index.offset[0]
        return self.values[at : at + len(self.values) // 2]


def state(values: torch.Tensor) -> dict[str, object]:
    return {"model": {"layers": [Halves("model.layers.0", values)]}, "step": 3}


@pytest.mark.parametrize("format", ["native", "dcp"])
def test_shards_are_asked_for_by_the_name_of_their_tensor(format: str, tmp_path: Path):
    kept = state(torch.arange(8.0))
    save_sharded(kept, tmp_path / "step", format=format)
    assert set(kept["model"]["layers"][0].asked) == {"model.layers.0"}
    target = state(torch.zeros(8))
    load_sharded(tmp_path / "step", target)
    assert target["model"]["layers"][0].values.tolist() == list(range(8))


def test_a_dcp_directory_says_where_it_was_saved(tmp_path: Path):
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    save_sharded({"w": torch.ones(2)}, ours, format="dcp")
    dcp.save({"w": torch.ones(2)}, checkpoint_id=theirs, **ALONE)
    for folder in (ours, theirs):
        found = dcp.FileSystemReader(folder).read_metadata().storage_meta
        assert str(found.checkpoint_id) == str(folder)


def test_every_save_of_a_dcp_directory_has_an_id_of_its_own(tmp_path: Path):
    found = set()
    for name in ("a", "b"):
        save_sharded({"w": torch.ones(2)}, tmp_path / name, format="dcp")
        found.add(
            uuid.UUID(dcp.FileSystemReader(tmp_path / name).read_metadata().storage_meta.save_id)
        )
    assert len(found) == 2
