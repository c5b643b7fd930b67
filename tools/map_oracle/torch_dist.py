"""A folder as Megatron's `torch_dist` writes it, made by torch alone: for tests that have no Megatron.

    .metadata, __0_0.distcp   a DCP folder; stacked layers and experts are cut into one chunk for each, gate and up into one each
    common.pt                 what is not tensors, pickled; empty here
    metadata.json             which writer it was
    NAME._extra_state/shard_0_3   bytes beside the tensors, one for each layer; an expert has shard_0.1_3.4

Megatron itself loads what this writes: the oracle's way from "megatron" to "hf" begins with such a folder.
"""

import itertools
import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

WRITER = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}


def chunk_shape(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of one piece: a layer, an expert, gate or up."""
    piece = list(shape)
    axis = 0
    if name.startswith("decoder.layers.") and not name.split(".")[2].isdigit():
        piece[axis], axis = 1, axis + 1
    if ".mlp.experts.experts." in name:
        piece[axis], axis = 1, axis + 1
    if name.endswith(".linear_fc1.weight"):
        piece[axis] //= 2
    return tuple(piece)


def _boxes(name: str, shape: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    piece = chunk_shape(name, shape)
    for offsets in itertools.product(
        *(range(0, whole, part) for whole, part in zip(shape, piece, strict=True))
    ):
        yield offsets, piece


class _Pieces(dcp.DefaultSavePlanner):
    """A plan with one item for each piece instead of one for each tensor."""

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        items: list[WriteItem] = []
        for item in plan.items:
            if item.type != WriteItemType.TENSOR:
                items.append(item)
                continue
            whole = item.tensor_data
            for i, (offsets, sizes) in enumerate(_boxes(item.index.fqn, tuple(whole.size))):
                data = TensorWriteData(
                    ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)),
                    TensorProperties(dtype=whole.properties.dtype),
                    whole.size,
                )
                index = dcp.metadata.MetadataIndex(item.index.fqn, torch.Size(offsets), i)
                items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
        self.plan = SavePlan(items, planner_data=plan.planner_data)
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> object:
        if write_item.type != WriteItemType.SHARD:
            return super().resolve_data(write_item)
        chunk = write_item.tensor_data.chunk
        box = tuple(slice(o, o + n) for o, n in zip(chunk.offsets, chunk.sizes, strict=True))
        return self.state_dict[write_item.index.fqn][box].contiguous()


def write(state: Mapping[str, torch.Tensor], folder: Path) -> None:
    """Write whole tensors, by Megatron's names, in Megatron's pieces."""
    dcp.save(dict(state), checkpoint_id=folder, planner=_Pieces(), no_dist=True)
    torch.save({}, folder / "common.pt")
    (folder / "metadata.json").write_text(json.dumps(WRITER))
