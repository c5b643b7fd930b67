"""Every attack on a distributed checkpoint, through `Reader`: nothing runs, and only Holdfast's errors come out."""

from __future__ import annotations

import io
import math
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem

import holdfast
from holdfast.errors import HoldfastError
from holdfast.integrations.dcp import Reader
from holdfast.torch import load_sharded, save_sharded
from tests.hostile.case import Case
from tests.hostile.cases_dcp import CASES
from tests.hostile.harness import SECONDS_FLOOR, WATCH, deadline

LARGEST = 1 << 24
"""Elements that this test makes room for. A planner makes room for what its own state has."""


class Everything(DefaultLoadPlanner):
    """Asks for all that there is, and keeps values as bytes."""

    def plan(self, metadata: Metadata) -> LoadPlan:
        items = []
        for name, entry in metadata.state_dict_metadata.items():
            at = MetadataIndex(name)
            if not isinstance(entry, TensorStorageMetadata):
                none = torch.Size()
                items.append(ReadItem(LoadItemType.BYTE_IO, at, none, at, none, none))
                continue
            for number, chunk in enumerate(entry.chunks):
                if math.prod(chunk.sizes) <= LARGEST:
                    here, zeros = (
                        MetadataIndex(name, chunk.offsets, number),
                        torch.Size([0] * len(chunk.sizes)),
                    )
                    items.append(
                        ReadItem(LoadItemType.TENSOR, here, zeros, here, zeros, chunk.sizes)
                    )
        self.dtypes = {
            name: entry.properties.dtype
            for name, entry in metadata.state_dict_metadata.items()
            if hasattr(entry, "size")
        }
        return LoadPlan(items)

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        return torch.empty(read_item.lengths, dtype=self.dtypes[read_item.dest_index.fqn])

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        assert tensor.shape == read_item.lengths

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        assert value.getvalue()


def load_all(path: Path) -> None:
    reader, planner = Reader(path), Everything()
    try:
        plan = planner.plan(reader.read_metadata(rank=0))
        reader.read_data(plan, planner).wait()
    finally:
        reader.close()


@pytest.fixture(scope="module", autouse=True)
def _warm(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Whatever is imported on the way is imported before anybody watches; numpy's printing imports numpy.ma."""
    import numpy.ma  # noqa: F401

    honest = next(case for case in CASES if case.name == "dcp-honest")
    path = honest.make(tmp_path_factory.mktemp("warm"))
    assert isinstance(path, Path)
    load_all(path)
    path = tmp_path_factory.mktemp("warm") / "value"
    save_sharded(path, {"v": [1, (2,)]}, format="dcp", durable=False)
    load_all(path)
    load_sharded(path, {"v": None})


@pytest.mark.parametrize("case", CASES, ids=str)
def test_an_attack(case: Case, tmp_path: Path):
    path = case.make(tmp_path)
    if not isinstance(path, Path):
        pytest.skip("no directory")
    with deadline(10 * SECONDS_FLOOR), WATCH.watching():
        try:
            load_all(path)
        except HoldfastError as error:
            str(error)


@pytest.mark.parametrize(
    "case", [case for case in CASES if case.name.startswith("dcp-value")], ids=str
)
def test_the_same_through_load_sharded(case: Case, tmp_path: Path):
    path = case.make(tmp_path)
    assert isinstance(path, Path)
    with deadline(10 * SECONDS_FLOOR), WATCH.watching():
        try:
            with holdfast.open(path) as found:
                state = dict.fromkeys(map(str, found.tree))
            load_sharded(path, state)
        except HoldfastError as error:
            str(error)
