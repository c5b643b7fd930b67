"""The index of a DCP directory is put together from the bytes of records; torch finds the objects that it would have made."""

from __future__ import annotations

import pickle

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint import metadata as m
from torch.distributed.checkpoint.filesystem import _StorageInfo

from holdfast.formats.native.manifest import StoredBoxes, as_bytes
from holdfast.formats.sharded import Contents, DcpShards, Receipt
from holdfast.ranks.plan import RankWrites
from holdfast.ranks.state import Catalogue

NAMES = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12) | st.just(
    "n" * 300
)
PLACES = st.sampled_from(
    [0, 255, 256, 65_535, 65_536, (1 << 31) - 1, 1 << 31, 1 << 32, 1 << 40, 1 << 52]
)


@st.composite
def directories(draw: st.DrawFn) -> tuple[Contents, list[tuple[RankWrites, list[Receipt]]]]:
    """Tensors of up to two dimensions, whole or cut into rows over two ranks, with values and second names."""
    names = draw(st.lists(NAMES, min_size=1, max_size=8, unique=True))
    tensors, values, seconds = (
        names[: len(names) // 2 + 1],
        names[len(names) // 2 + 1 :][:2],
        names[len(names) // 2 + 3 :],
    )
    dtypes = tuple(draw(st.sampled_from(["float32", "bfloat16", "int64"])) for _ in tensors)
    shapes = tuple(draw(st.sampled_from([(), (4,), (4, 300), (4, 70_000)])) for _ in tensors)
    bases = {name: draw(st.sampled_from(tensors)) for name in seconds}
    every = [
        (dtypes[at], shapes[at])
        for at in [*range(len(tensors)), *(tensors.index(base) for base in bases.values())]
    ]
    catalogue = Catalogue(
        (*tensors, *seconds), tuple(one[0] for one in every), tuple(one[1] for one in every)
    )
    delivered = []
    cut = {at for at, shape in enumerate(shapes) if shape and draw(st.booleans())}
    for rank in range(2):
        own = [at for at in range(len(tensors)) if at in cut or at % 2 == rank]
        starts, sizes = (
            np.zeros((catalogue.rank, len(own)), np.int64),
            catalogue.extents[:, own].copy(),
        )
        for column, at in enumerate(own):
            if at in cut:
                starts[0, column], sizes[0, column] = 2 * rank, 2
        writes = RankWrites(np.arange(len(own)), np.array(own, np.int64), starts, sizes, (), 0)
        order = draw(st.permutations(range(len(own))))
        begins = [draw(PLACES) for _ in own]
        stored = StoredBoxes(
            as_bytes(order), as_bytes(begins), as_bytes([at + draw(PLACES) for at in begins])
        )
        given_values = [(name, 3, 3 + draw(PLACES)) for name in values] if rank == 0 else []
        delivered.append((writes, [Receipt(f"__{rank}_0.distcp", 0, stored, given_values)]))
    steps = st.lists(NAMES | st.integers(0, 70_000), min_size=1, max_size=5)
    paths = {name: tuple(draw(steps)) for name in (*tensors, *values, *seconds)}
    grads = frozenset(name for name in (*tensors, *seconds) if draw(st.booleans()))
    contents = Contents(
        catalogue.names, catalogue.dtypes, catalogue.shapes, bases, frozenset(values), paths, grads
    )
    return contents, delivered


def plainly(
    contents: Contents, delivered: list[tuple[RankWrites, list[Receipt]]]
) -> tuple[dict, dict]:
    """The same, an object for each tensor and each item."""
    state: dict[str, object] = {}
    items: dict[m.MetadataIndex, _StorageInfo] = {}
    names, shapes = contents.names, contents.shapes
    for writes, (receipt,) in delivered:
        for name, first, last in receipt.values:
            state[name], items[m.MetadataIndex(name)] = (
                m.BytesStorageMetadata(),
                _StorageInfo(receipt.key, first, last - first),
            )
        columns = [
            np.frombuffer(column, "<i8").tolist()
            for column in (receipt.stored.boxes, receipt.stored.starts, receipt.stored.stops)
        ]
        for box, first, last in zip(*columns, strict=True):
            at = int(writes.tensors[box])
            rank, dtype = len(shapes[at]), getattr(torch, contents.dtypes[at])
            properties = m.TensorProperties(dtype=dtype, requires_grad=names[at] in contents.grads)
            known = state.setdefault(
                names[at], m.TensorStorageMetadata(properties, torch.Size(shapes[at]), [])
            )
            start, size = (
                torch.Size(writes.offsets[:rank, box].tolist()),
                torch.Size(writes.sizes[:rank, box].tolist()),
            )
            items[m.MetadataIndex(names[at], start, len(known.chunks))] = _StorageInfo(
                receipt.key, first, last - first
            )
            known.chunks.append(m.ChunkStorageMetadata(start, size))
    for name, base in contents.aliases.items():
        known = state[base]
        properties = m.TensorProperties(
            dtype=known.properties.dtype, requires_grad=name in contents.grads
        )
        state[name] = m.TensorStorageMetadata(properties, known.size, known.chunks)
        for number, chunk in enumerate(known.chunks):
            items[m.MetadataIndex(name, chunk.offsets, number)] = items[
                m.MetadataIndex(base, chunk.offsets, number)
            ]
    return {name: state[name] for name in contents.paths}, items


@given(directories())
def test_torch_finds_its_own_objects(
    directory: tuple[Contents, list[tuple[RankWrites, list[Receipt]]]],
):
    contents, delivered = directory
    (made,) = DcpShards().index(contents, delivered, path="some/where")[-1].segments
    found = pickle.loads(made.data)
    state, items = plainly(contents, delivered)
    assert type(found) is m.Metadata
    assert found.state_dict_metadata == state
    assert list(found.state_dict_metadata) == list(state)
    assert found.planner_data == contents.paths
    assert list(found.planner_data) == list(contents.paths)
    assert found.storage_data == items
    assert list(found.storage_data) == list(items)
    assert [one.index for one in found.storage_data] == [one.index for one in items]
    assert found.storage_meta.checkpoint_id == "some/where"
