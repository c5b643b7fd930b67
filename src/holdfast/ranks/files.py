"""The files that one rank writes of a sharded save, in each format, and the index that is written when all of them are there.

    native        data-00001-of-00004.safetensors …       holdfast.json, and a Hugging Face index where nothing is split
    safetensors   shard-00001-model-00001-of-00001.safetensors …     no index: torch's reader looks into every file;
                                                          in an object store model.safetensors.index.json, which publishes them
    dcp           __0_0.distcp …                          .metadata, and its checksum in .holdfast.json

A safetensors file names a tensor once. The second box of a tensor on one rank therefore goes to a second file. A rank with much to
write and many threads spreads it over several files, written at once: the kernel has one thread at a time write to a file.

What of a state the formats of other programs have no place for, `unkept_notes` says.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence

import msgspec
from msgspec import field

from holdfast.core.protocols import State
from holdfast.core.tree import values_inside
from holdfast.core.value import Value
from holdfast.errors import CannotHold
from holdfast.formats.dcp.index import BESIDE, checksum_file
from holdfast.formats.dcp.write import lay_out_items
from holdfast.formats.native.base import Place, Reuse
from holdfast.formats.native.chunks import in_files
from holdfast.formats.native.schema import DataFile, StoredChunk
from holdfast.formats.native.write import OWN, BoxToWrite, HashAll, Pack, box_file, data_name, lay_out_index, sharding_texts
from holdfast.formats.recorded import order_fields
from holdfast.formats.safetensors.record import MANIFEST
from holdfast.formats.safetensors.write import RANK, file_order_notes, index_file, is_flat, name_problem
from holdfast.formats.seal import SEAL
from holdfast.plan.saves import FilePlan, Literal

FORMATS = ("native", "safetensors", "dcp")

PIECES_INDEX = "model.safetensors.index.json"
"""What publishes safetensors files of ranks in an object store."""


class RankOutput(Value, frozen=True):
    """What one rank writes of a checkpoint."""

    rank: int
    size: int
    """How many ranks there are."""
    boxes: Sequence[BoxToWrite]
    metadata: Mapping[str, str]
    values: Mapping[str, bytes] = field(default_factory=dict)
    """DCP: the archives of what is no tensor, by flat names."""

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors."""
        return sum(one.tensor.nbytes for one in self.boxes)


class RankFile(Value, frozen=True):
    """One file of a rank."""

    plan: FilePlan
    chunks: Callable[[Mapping[str, int]], Iterable[tuple[str, StoredChunk]]]
    """From the checksums of its data to what lies in it, by name; each chunk with its box."""


class Receipt(msgspec.Struct):
    """A file that a rank has written and synced, or taken over from the base."""

    key: str
    nbytes: int
    chunks: list[tuple[str, StoredChunk]]
    linked: bool = False
    """Whether it is a file of the base, under a second name."""


class Contents(Value, frozen=True):
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


DcpIndex = Callable[[Contents, Sequence[Receipt]], bytes]
"""Makes the `.metadata` of a DCP directory, which is a pickle of torch's own classes."""


NOTHING: Reuse[Place] = Reuse()


def linked_receipts(reuse: Reuse[Place]) -> list[Receipt]:
    """The files that a rank takes over, and what lies in each."""
    found = [Receipt(file.key, file.nbytes, [], linked=True) for file in reuse.linked]
    for (name, _, _), (chunk,) in reuse.chunks.items():
        found[chunk.file].chunks.append((name, in_files(chunk, {chunk.file: 0})))
    return found


def is_part(name: str) -> bool:
    """Whether a file in a directory belongs to a checkpoint of any of these formats, so that it may be replaced."""
    return name.endswith((".safetensors", ".safetensors.index.json", ".distcp", ".metadata")) or name in (MANIFEST, BESIDE, SEAL)


def rank_files(
    format: str,
    part: RankOutput,
    *,
    files: int = 1,
    pack: Pack | None = None,
    hashes: HashAll | None = None,
    reuse: Reuse[Place] = NOTHING,
    save: str = "",
) -> list[RankFile]:
    """Lay out the files of one rank. Their names carry the id of the save in an object store (`save`).

    The boxes are spread over about as many `files` as are asked for. With `pack`, boxes of a native checkpoint are stored packed
    where that is smaller; with `hashes`, its chunks have hashes. What it takes over (`reuse`) is not laid out.
    """
    places = {(one.name, one.box.start, one.box.stop): one for one in part.boxes}
    changed = [one for place, one in places.items() if place not in reuse.chunks and place not in reuse.moved]
    moved = [one for place, one in places.items() if place in reuse.moved]
    # As in one process: what only moved is not mixed with what changes.
    shares = _spread(moved, files) if moved else []
    if changed or not (moved or reuse.linked):
        shares += _spread(changed, files)
    if format == "dcp":
        given = [(i, share, {} if i else part.values) for i, share in enumerate(shares)]
        mark = f"-{save}" if save else ""
        return [_dcp_file(f"__{part.rank}_{i}{mark}.distcp", share, values) for i, share, values in given if share or values]
    rounds = [ones for share in shares for ones in _once_each(share)]
    laid_out = []
    linked = bool(reuse.taken) and not save  # what carries the id of its save meets no other name
    names = reuse.names_of_rank(part.rank, part.size) if linked else iter(())
    for turn, ones in enumerate(rounds):
        if linked:
            key = next(names)
        elif format == "native":
            again = f"-{turn + 1:05}" if turn else ""
            key = data_name(part.rank, part.size, save).replace(".safetensors", f"{again}.safetensors")
        else:
            mark = f"{save}-" if save else ""
            key = f"shard-{part.rank + 1:05}-model-{mark}{turn + 1:05}-of-{len(rounds):05}.safetensors"
        laid_out.append(
            _safetensors_file(
                key, ones, part.metadata, strict=format == "safetensors", pack=pack, hashes=hashes, changed=reuse.changed
            )
        )
    return laid_out


def _spread(boxes: Sequence[BoxToWrite], files: int) -> list[list[BoxToWrite]]:
    """Boxes in so many shares of about as many bytes, in their order. There is always a first share."""
    total = sum(one.tensor.nbytes for one in boxes)
    shares: list[list[BoxToWrite]] = [[] for _ in range(files)]
    before = 0
    for one in boxes:
        middle = before + one.tensor.nbytes // 2
        shares[min(middle * files // max(total, 1), files - 1)].append(one)
        before += one.tensor.nbytes
    return [share for i, share in enumerate(shares) if share or not i]


def _once_each(boxes: Sequence[BoxToWrite]) -> list[list[BoxToWrite]]:
    """Boxes in groups in which every tensor has one at the most."""
    rounds: list[list[BoxToWrite]] = []
    seen: dict[str, int] = {}
    for one in boxes:
        turn = seen.get(one.name, 0)
        seen[one.name] = turn + 1
        if turn == len(rounds):
            rounds.append([])
        rounds[turn].append(one)
    return rounds


def _safetensors_file(
    key: str,
    ones: Sequence[BoxToWrite],
    metadata: Mapping[str, str],
    *,
    strict: bool,
    pack: Pack | None,
    hashes: HashAll | None,
    changed: Container[Place],
) -> RankFile:
    problems = [f"{one.name}: {problem}" for one in ones if (problem := name_problem(one.name))]
    if strict:
        problems += [f"{o.name}: safetensors has no dtype for {o.tensor.dtype}" for o in ones if not o.tensor.dtype.safetensors]
    if problems:
        raise CannotHold("safetensors files cannot hold this state", problems)
    texts = dict(metadata)
    if strict or any(one.box.shape != one.shape for one in ones):
        texts |= sharding_texts(ones)
    file = box_file(key, ones, texts, fields={} if strict else OWN, pack=pack, hashes=hashes, changed=changed)
    return RankFile(file.layout.plan, file.chunks)


def _dcp_file(key: str, boxes: Sequence[BoxToWrite], values: Mapping[str, bytes]) -> RankFile:
    archives = [(f"value {name}", (Literal(archive),)) for name, archive in values.items()]
    labelled = [(f"{number} {one.name}", one) for number, one in enumerate(boxes)]
    plan, items = lay_out_items(key, archives, [(label, one.tensor) for label, one in labelled])
    places = {item.label: (item.offset, item.offset + item.nbytes) for item in items}

    def chunks(crcs: Mapping[str, int]) -> Iterator[tuple[str, StoredChunk]]:
        """Where the archives lie; the checksum is that of the elements inside."""
        for name in values:
            yield name, StoredChunk(0, places[f"value {name}"], f"{0:08x}", (), ())
        for label, one in labelled:
            crc = crcs[label] if one.tensor.nbytes else 0
            yield one.name, StoredChunk(0, places[label], f"{crc:08x}", one.box.start, one.box.stop)

    return RankFile(plan, chunks)


def index_files(
    format: str, contents: Contents, receipts: Sequence[Receipt], *, dcp_index: DcpIndex, save: str = ""
) -> list[FilePlan]:
    """What is written last: it makes the files a checkpoint. In an object store (`save`) that is one file."""
    if format == "native":
        return _native_index(contents, receipts, alone=bool(save))
    if format == "dcp":
        metadata = dcp_index(contents, receipts)
        beside = [] if save else [FilePlan(BESIDE, (Literal(checksum_file(metadata)),))]
        return [*beside, FilePlan(".metadata", (Literal(metadata),))]
    return [_pieces_index(receipts)] if save else []


def _pieces_index(receipts: Sequence[Receipt]) -> FilePlan:
    """The index of safetensors files in an object store: which file has a tensor, or its first piece; and all files."""
    first: dict[str, str] = {}
    for receipt in receipts:
        for name, _ in receipt.chunks:
            first.setdefault(name, receipt.key)
    total = sum(chunk.bytes[1] - chunk.bytes[0] for receipt in receipts for _, chunk in receipt.chunks)
    return index_file(PIECES_INDEX, first, total, files=[receipt.key for receipt in receipts])


def _native_index(contents: Contents, receipts: Sequence[Receipt], *, alone: bool) -> list[FilePlan]:
    fields: dict[str, object] = {}
    if contents.aliases:
        fields["aliases"] = dict(contents.aliases)
    if contents.tree is not None:
        fields["tree"] = contents.tree
    else:
        fields |= order_fields(contents.tensors, contents.aliases)
    tensors = {name: meaning for name, meaning in contents.tensors.items() if name not in contents.aliases}
    chunks = [(name, in_files(chunk, {0: number})) for number, receipt in enumerate(receipts) for name, chunk in receipt.chunks]
    listed = [DataFile(receipt.key, receipt.nbytes) for receipt in receipts]
    return list(lay_out_index(listed, tensors, lambda _: chunks, fields=fields, metadata=contents.metadata, alone=alone))


SHOWN = 3
"""Places that a note names."""


def unkept_notes(state: State, format: str) -> tuple[str, ...]:
    """Sentences about what does not come back from this format as it was."""
    notes = list(state.notes)
    if format == "safetensors":
        wanted = [name for name, tensor in state.tensors.items() if tensor.traits.requires_grad or tensor.traits.parameter]
        notes += _said(wanted, "safetensors files of ranks do not say that {} is a Parameter or requires a gradient")
        if not wanted and not is_flat(state):
            notes.append("safetensors files of ranks keep dotted names, and not the containers around them")
        codes = {name: tensor.dtype.safetensors for name, tensor in state.tensors.items()}
        notes += file_order_notes(sorted(codes, key=lambda name: (RANK.get(codes[name] or "", 0), name)), list(codes))
    if format == "dcp":
        wanted = [name for name, tensor in state.tensors.items() if tensor.traits.parameter]
        notes += _said(wanted, "a DCP directory does not say that {} is a Parameter")
        notes += _said(list(_other_keys(state.tree)), "a DCP directory has text as keys: {} becomes text")
        notes += _said(list(_attributes(state.tree)), "a DCP directory does not keep the attributes of an OrderedDict: {}")
    return tuple(notes)


def _said(names: Sequence[str], text: str) -> list[str]:
    if not names:
        return []
    more = f" and {len(names) - SHOWN:,} more" if len(names) > SHOWN else ""
    return [text.format(", ".join(map(repr, names[:SHOWN])) + more)]


def _dicts(tree: object) -> Iterable[dict[object, object]]:
    """Every dict of a tree, once."""
    return (value for value in values_inside(tree) if isinstance(value, dict))


def _other_keys(tree: object) -> Iterable[str]:
    return (str(key)[:60] for inside in _dicts(tree) for key in inside if type(key) is not str)


def _attributes(tree: object) -> Iterable[str]:
    return dict.fromkeys(name for inside in _dicts(tree) if isinstance(inside, OrderedDict) for name in vars(inside))
