"""The files that one rank writes of a sharded save, in each format, and the index that is written when all of them are there.

    native        data-00001-of-00004.safetensors …       holdfast.json, and a Hugging Face index where nothing is split
    safetensors   shard-00001-model-00001-of-00001.safetensors …     no index: torch's reader looks into every file
    dcp           __0_0.distcp …                          .metadata, and its checksum in .holdfast.json

A safetensors file names a tensor once. The second box of a tensor on one rank therefore goes to a second file. A rank with much to
write and many threads spreads it over several files, written at once: the kernel has one thread at a time write to a file.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from holdfast.core.box import Box
from holdfast.core.limits import Limits
from holdfast.core.sparse.storage import SparseParts
from holdfast.core.tensor import LazyTensor
from holdfast.errors import CannotHold
from holdfast.formats.dcp.beside import BESIDE, checksum_file
from holdfast.formats.dcp.write import lay_out_items
from holdfast.formats.native.chunks import entries_of, in_file, part_names, without_clashes
from holdfast.formats.native.schema import (
    FORMAT,
    MANIFEST,
    VERSION,
    DataFile,
    Manifest,
    StoredChunk,
    StoredSparse,
    StoredTensor,
    encode_manifest,
    is_packed,
)
from holdfast.formats.native.split import sharding_texts
from holdfast.formats.native.write import OWN, Pack, carried, other_files
from holdfast.formats.safetensors.pieces import name_problem, plan_file
from holdfast.plan.saves import FilePlan, Literal

__all__ = ["FORMATS", "Contents", "RankFile", "Receipt", "StoredBox", "Written", "index_files", "is_part", "rank_files"]

FORMATS = ("native", "safetensors", "dcp")


@dataclass(frozen=True, slots=True)
class Written:
    """One box that a rank is to write."""

    name: str
    box: Box
    tensor: LazyTensor
    """The elements of the box."""
    shape: tuple[int, ...]
    """Of the whole tensor."""


@dataclass(frozen=True, slots=True)
class StoredBox:
    """Where a box lies in a file."""

    name: str
    start: tuple[int, ...]
    stop: tuple[int, ...]
    first: int
    """Its first byte in the file; of a DCP item, that of the archive."""
    last: int
    label: str | None
    """The key of its checksum in the receipt of the file, which may be an empty text; None where it has no bytes."""
    parts: SparseParts | None = None
    """What is written instead, where it is stored packed; the place is that of the values then."""
    sparse: StoredSparse | None = None
    """The same as the manifest has it, once it is written."""


@dataclass(frozen=True, slots=True)
class RankFile:
    """One file of a rank."""

    plan: FilePlan
    boxes: tuple[StoredBox, ...]
    places: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """First and last byte of every entry."""


@dataclass(frozen=True, slots=True)
class Contents:
    """What the whole checkpoint holds, known to the rank that writes the index."""

    tensors: Mapping[str, tuple[str, tuple[int, ...]]]
    """Holdfast's dtype name and shape of each."""
    aliases: Mapping[str, str]
    tree: object | None
    """The state as typed JSON, where it is more than a flat dict of tensors."""
    metadata: Mapping[str, str]
    values: frozenset[str]
    """DCP: the names of what is no tensor."""
    paths: Mapping[str, tuple[str | int, ...]]
    """DCP: every name, and the path to it in the nested state."""
    grads: frozenset[str]
    """DCP: the names of the tensors that require gradients."""


def is_part(name: str) -> bool:
    """Whether a file in a directory belongs to a checkpoint of any of these formats, so that it may be replaced."""
    return name.endswith((".safetensors", ".safetensors.index.json", ".distcp", ".metadata")) or name in (MANIFEST, BESIDE)


def rank_files(
    format: str,
    rank: int,
    size: int,
    written: Sequence[Written],
    values: Mapping[str, bytes],
    metadata: Mapping[str, str],
    *,
    files: int = 1,
    pack: Pack | None = None,
) -> list[RankFile]:
    """Lay out the files of one rank. `values` are the archives of non-tensors that a DCP rank writes, by their flat names.

    The boxes are spread over about as many `files` as are asked for. With `pack`, boxes of a native checkpoint are stored packed
    where that is smaller.
    """
    shares = _spread(written, files)
    if format == "dcp":
        return [_dcp_file(rank, i, share, {} if i else values) for i, share in enumerate(shares) if share or (values and not i)]
    rounds = [ones for share in shares for ones in _once_each(share)]
    laid_out = []
    for turn, ones in enumerate(rounds):
        if format == "native":
            again = f"-{turn + 1:05}" if turn else ""
            key = f"data-{rank + 1:05}-of-{size:05}{again}.safetensors"
        else:
            key = f"shard-{rank + 1:05}-model-{turn + 1:05}-of-{len(rounds):05}.safetensors"
        laid_out.append(_safetensors_file(key, ones, metadata, strict=format == "safetensors", pack=pack))
    return laid_out


def _spread(written: Sequence[Written], files: int) -> list[list[Written]]:
    """Boxes in so many shares of about as many bytes, in their order. There is always a first share."""
    total = sum(one.tensor.nbytes for one in written)
    shares: list[list[Written]] = [[] for _ in range(files)]
    before = 0
    for one in written:
        middle = before + one.tensor.nbytes // 2
        shares[min(middle * files // max(total, 1), files - 1)].append(one)
        before += one.tensor.nbytes
    return [share for i, share in enumerate(shares) if share or not i]


def _once_each(written: Sequence[Written]) -> list[list[Written]]:
    """Boxes in groups in which every tensor has one at the most."""
    rounds: list[list[Written]] = []
    seen: dict[str, int] = {}
    for one in written:
        turn = seen.get(one.name, 0)
        seen[one.name] = turn + 1
        if turn == len(rounds):
            rounds.append([])
        rounds[turn].append(one)
    return rounds


def _safetensors_file(
    key: str, ones: Sequence[Written], metadata: Mapping[str, str], *, strict: bool, pack: Pack | None
) -> RankFile:
    problems = [f"{one.name}: {problem}" for one in ones if (problem := name_problem(one.name))]
    if strict:
        problems += [f"{o.name}: safetensors has no dtype for {o.tensor.dtype}" for o in ones if not o.tensor.dtype.safetensors]
    if problems:
        raise CannotHold("safetensors files cannot hold this state", problems)
    texts = dict(metadata)
    if strict or any(one.box.shape != one.shape for one in ones):
        texts |= sharding_texts({one.name: one.box for one in ones})
    packed = without_clashes(pack({one.name: one.tensor for one in ones}), [one.name for one in ones]) if pack else {}
    entries = {entry: part for one in ones for entry, part in entries_of(one.name, one.tensor, packed.get(one.name)).items()}
    layout = plan_file(key, [carried(entry, part) for entry, part in entries.items()], texts, {} if strict else OWN)
    boxes = []
    for one in ones:
        parts = packed.get(one.name)
        label = one.name if parts is None else part_names(one.name)[0]
        place = layout.places[label]
        boxes.append(StoredBox(one.name, one.box.start, one.box.stop, *place, label if place[0] < place[1] else None, parts))
    return RankFile(layout.plan, tuple(boxes), layout.places)


def _dcp_file(rank: int, number: int, written: Sequence[Written], values: Mapping[str, bytes]) -> RankFile:
    archives = [(f"value {name}", (Literal(archive),)) for name, archive in values.items()]
    labelled = [(f"{number} {one.name}", one) for number, one in enumerate(written)]
    plan, items = lay_out_items(f"__{rank}_{number}.distcp", archives, [(label, one.tensor) for label, one in labelled])
    places = {item.label: (item.offset, item.offset + item.nbytes) for item in items}
    boxes = [StoredBox(name, (), (), *places[f"value {name}"], None) for name in values]
    boxes += [
        StoredBox(one.name, one.box.start, one.box.stop, *places[label], label if one.tensor.nbytes else None)
        for label, one in labelled
    ]
    return RankFile(plan, tuple(boxes))


@dataclass(frozen=True, slots=True)
class Receipt:
    """A file that a rank has written and synced."""

    key: str
    nbytes: int
    boxes: tuple[tuple[StoredBox, int], ...]
    """Each box with the CRC-32 of its bytes."""


def index_files(format: str, contents: Contents, receipts: Sequence[Receipt]) -> list[FilePlan]:
    """What is written last: it makes the files a checkpoint."""
    if format == "native":
        return _manifest(contents, receipts)
    if format == "dcp":
        metadata = _dcp_metadata(contents, receipts)
        return [FilePlan(BESIDE, (Literal(checksum_file(metadata)),)), FilePlan(".metadata", (Literal(metadata),))]
    return []


def _manifest(contents: Contents, receipts: Sequence[Receipt]) -> list[FilePlan]:
    chunks: dict[str, list[StoredChunk]] = {name: [] for name in contents.tensors}
    whole: dict[str, str] = {}
    for number, receipt in enumerate(receipts):
        for box, crc in receipt.boxes:
            _, shape = contents.tensors[box.name]
            complete = tuple(box.stop) == tuple(shape)
            complete = complete and not any(box.start)
            if complete:
                whole[box.name] = receipt.key
            start, stop = (None, None) if complete else (box.start, box.stop)
            sparse = in_file(box.sparse, number)
            chunks[box.name].append(StoredChunk(number, (box.first, box.last), f"{crc:08x}", start, stop, sparse))
    fields: dict[str, object] = {}
    if contents.aliases:
        fields["aliases"] = dict(contents.aliases)
    if contents.tree is not None:
        fields["tree"] = contents.tree
    rest = {name: msgspec.Raw(msgspec.json.encode(value)) for name, value in fields.items()}
    tensors = {
        name: StoredTensor(dtype, shape, tuple(chunks[name]))
        for name, (dtype, shape) in contents.tensors.items()
        if name not in contents.aliases
    }
    listed = tuple(DataFile(receipt.key, receipt.nbytes) for receipt in receipts)
    others = []
    if len(whole) == len(tensors) and not is_packed(tensors):
        total = sum(box.last - box.first for receipt in receipts for box, _ in receipt.boxes)
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(whole.items()))}
        others.append(FilePlan("model.safetensors.index.json", (Literal(json.dumps(index, indent=2).encode()),)))
    raw = encode_manifest(Manifest(FORMAT, VERSION, listed, tensors, dict(contents.metadata), others=other_files(others)), rest)
    if len(raw) > Limits().index_nbytes:
        raise CannotHold("a native checkpoint cannot hold this state", [f"the manifest would have {len(raw):,} bytes"])
    return [*others, FilePlan(MANIFEST, (Literal(raw),))]


def _dcp_metadata(contents: Contents, receipts: Sequence[Receipt]) -> bytes:
    """The index of a DCP directory, of torch's own classes: no other pickle is understood by torch's reader."""
    import torch
    from torch.distributed.checkpoint import metadata as m
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    from holdfast.core.dtype import DTYPES
    from holdfast.torch.tensors.from_lazy import torch_dtype

    state: dict[str, m.TensorStorageMetadata | m.BytesStorageMetadata] = {}
    storage: dict[m.MetadataIndex, _StorageInfo] = {}
    for receipt in receipts:
        for box, _ in receipt.boxes:
            info = _StorageInfo(receipt.key, box.first, box.last - box.first)
            if box.name in contents.values:
                state[box.name] = m.BytesStorageMetadata()
                storage[m.MetadataIndex(box.name)] = info
                continue
            dtype, shape = contents.tensors[box.name]
            row = DTYPES.name(dtype)
            assert row is not None  # the plan's catalogue has checked it
            known = state.get(box.name)
            if not isinstance(known, m.TensorStorageMetadata):
                properties = m.TensorProperties(dtype=torch_dtype(row), requires_grad=box.name in contents.grads)
                known = state[box.name] = m.TensorStorageMetadata(properties, torch.Size(shape), [])
            start, sizes = torch.Size(box.start), torch.Size([b - a for a, b in zip(box.start, box.stop, strict=True)])
            storage[m.MetadataIndex(box.name, start, len(known.chunks))] = info
            known.chunks.append(m.ChunkStorageMetadata(start, sizes))
    for alias, base in contents.aliases.items():
        # Tied tensors: the same items under another name. torch's reader loads each name by itself, and need not know.
        known = state[base]
        assert isinstance(known, m.TensorStorageMetadata)
        properties = m.TensorProperties(dtype=known.properties.dtype, requires_grad=alias in contents.grads)
        state[alias] = m.TensorStorageMetadata(properties, known.size, list(known.chunks))
        for number, chunk in enumerate(known.chunks):
            storage[m.MetadataIndex(alias, chunk.offsets, number)] = storage[m.MetadataIndex(base, chunk.offsets, number)]
    ordered = {name: state[name] for name in contents.paths if name in state}
    planner = dict(contents.paths)
    return pickle.dumps(m.Metadata(ordered, planner, storage, m.StorageMeta(), version="1.0.0"))
