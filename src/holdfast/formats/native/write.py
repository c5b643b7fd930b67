"""The writer of native directories: data files, the Hugging Face index, and the manifest, which comes last.

    holdfast.json                      every tensor with its boxes: file, bytes, checksum
    data-00001-of-00004.safetensors    what one process, or one rank of a mesh or a group, has written
    model.safetensors.index.json       where every tensor lies whole in one file

One process (`lay_out_native`) and a mesh (`lay_out_split`) lay out all of it at once. Of a group each rank lays out its own files
(`box_file`), and the first one the index when all of them are there. The index is laid out by one function, `lay_out_index`.

The data files are ordinary safetensors. A dtype that the format lacks is carried by one that has the same bytes, and the manifest
has the true one:

    complex128, complex32         F64, F16    with a last dimension of 2; bcomplex32 as BF16
    float4_e2m1fn_x2              F4          with the last dimension doubled
    quantised, bits, narrow ints  U8, I8, U16, I32      whatever numpy has for them
    packed, not in whole bytes    U8          the bytes, flat

A file whose boxes are not whole tensors has torch's sharding metadata, so that torch's reader can join them.

What did not change since another directory is taken over from there (`formats.native.base`), and only the rest is laid out.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence

import msgspec
from msgspec import field

from holdfast.core.box import Box
from holdfast.core.content_hash import HASH, Hashed
from holdfast.core.crc import crc32
from holdfast.core.dtype import DTYPES
from holdfast.core.limits import Limits
from holdfast.core.protocols import State
from holdfast.core.sparse.storage import SparseParts
from holdfast.core.tensor import LazyTensor
from holdfast.core.value import Value
from holdfast.errors import CannotHold
from holdfast.formats.native.base import Place, Reuse
from holdfast.formats.native.chunks import entries_of, hash_in, stored_chunk, without_clashes
from holdfast.formats.native.schema import (
    BESIDE_VERSION,
    FORMAT,
    HASHED_VERSION,
    VERSION,
    DataFile,
    Manifest,
    OtherFile,
    StoredChunk,
    StoredTensor,
    encode_manifest,
)
from holdfast.formats.recorded import PAIRS, Sharing, find_sharing, order_fields, sharing_fields
from holdfast.formats.safetensors.record import MANIFEST, SHARDING_INFO
from holdfast.formats.safetensors.write import (
    FileLayout,
    HeaderTensor,
    fill_shards,
    index_file,
    is_flat,
    metadata_problems,
    plan_file,
)
from holdfast.formats.tree_json.encode import encode_tree
from holdfast.plan.saves import FilePlan, Hashing, Late, Literal, SavePlan, known_later

SHARD_NBYTES = 5 << 30
"""Bytes of tensors in a data file where the caller does not say: few files, each small enough to be moved about."""

INDEX = "model.safetensors.index.json"
"""What `transformers` looks for."""

HALVES = {"complex128": "F64", "complex32": "F16", "bcomplex32": "BF16"}
"""What carries the two parts of a complex number."""

CANNOT = "a native checkpoint cannot hold this state"

OWN: Mapping[str, object] = {"rest": MANIFEST}
"""What the record of each data file says: that it is one, so that a folder that has lost its manifest is known for what it was."""


Pack = Callable[[Mapping[str, LazyTensor]], Mapping[str, SparseParts]]
"""Finds the tensors that are stored packed, with their parts."""


HashAll = Callable[[Mapping[str, LazyTensor]], Mapping[str, Hashed]]
"""Hashes tensors now: those that are stored packed, whose elements do not pass by when they are written."""

TakeOver = Callable[[Mapping[str, LazyTensor]], Reuse[str]]
"""From the tensors that would be written to those that are there already."""


def data_name(number: int, count: int, save: str = "") -> str:
    """What a data file is called; in an object store it carries the id of its save, so that no two saves write the same name.

    >>> data_name(0, 4), data_name(0, 4, "5f3a")
    ('data-00001-of-00004.safetensors', 'data-5f3a-00001-of-00004.safetensors')
    """
    return f"data-{save + '-' if save else ''}{number + 1:05}-of-{count:05}.safetensors"


def lay_out_native(
    state: State,
    *,
    max_shard_size: int | None = None,
    pack: Pack | None = None,
    hashes: HashAll | None = None,
    take_over: TakeOver | None = None,
    save: str = "",
) -> SavePlan:
    """The plan of a native directory, its data files with at most `max_shard_size` bytes of tensors.

    With `hashes`, every chunk has its hash in the manifest. What `take_over` finds is not written: its files are linked.

    Where tensors are stored packed there is no Hugging Face index: `transformers` could not read them.

    Raises `CannotHold` with every problem: Python objects that have no form in the manifest, names that are no Unicode.
    """
    kept = _what_is_kept(state)
    written = kept.sharing.written
    reuse = take_over(written) if take_over else NOTHING
    there = reuse.chunks
    new = {name: tensor for name, tensor in written.items() if name not in there}
    packed = without_clashes(pack(new), list(written)) if pack else {}
    known = hashes({name: new[name] for name in packed}) if hashes else {}
    hashing = {name: "head" if name in reuse.changed else "hash" for name in new if name not in packed} if hashes else {}

    def shards_of(names: Iterable[str]) -> list[list[HeaderTensor]]:
        entries = (entries_of(name, new[name], packed.get(name)) for name in names)
        pieces = [carried(entry, part) for given in entries for entry, part in given.items()]
        return fill_shards(pieces, max_shard_size or SHARD_NBYTES) if pieces else []

    # What only moved is expected to stay. It is not mixed with what changes, and has the lower numbers, which the next step keeps.
    shards = shards_of(name for name in new if name in reuse.moved) + shards_of(name for name in new if name not in reuse.moved)
    if not shards and not reuse.linked:
        shards = [[]]
    keys = [data_name(i, len(shards), save) for i in range(len(shards))] if save else reuse.names(len(shards))
    files = [plan_file(key, shard, {}, fields=OWN, hashed=hashing) for key, shard in zip(keys, shards, strict=True)]
    first = len(reuse.linked)
    places = {entry: (number, place) for number, file in enumerate(files, first) for entry, place in file.places.items()}

    # Asked for three times, a hundred thousand of them.
    nbytes = {entry: stop - start for entry, (_, (start, stop)) in places.items()} if hashes else {}

    def chunks(crcs: Mapping[str, int]) -> Iterator[tuple[str, StoredChunk]]:
        for name in written:
            if name in there:
                yield from ((name, chunk) for chunk in there[name])
                continue
            hashed = known.get(name)
            if hashed is None and hashes:
                hashed = hash_in(crcs, name, nbytes[name], head_alone=hashing[name] == "head")
            yield name, stored_chunk(name, places.__getitem__, crcs.__getitem__, parts=packed.get(name), hashed=hashed)

    return _whole_plan(state, kept, files, chunks=chunks, reuse=reuse, alone=bool(save))


def lay_out_split(state: State, parts: Sequence[Mapping[str, Box]], *, save: str = "") -> SavePlan:
    """The plan of a directory in which rank r of a mesh has the boxes `parts[r]`. All boxes of a tensor together tile it.

    Tensors that share memory are stored once, under the first of their names; boxes of the others are left out.
    """
    kept = _what_is_kept(state)
    written = kept.sharing.written
    files = []
    for rank, boxes in enumerate(parts):
        own = {name: box for name, box in boxes.items() if name in written}
        ones = [BoxToWrite.cut(name, written[name], box) for name, box in own.items()]
        files.append(box_file(data_name(rank, len(parts), save), ones, sharding_texts(ones), label=f"{rank} "))

    def chunks(crcs: Mapping[str, int]) -> Iterator[tuple[str, StoredChunk]]:
        for number, file in enumerate(files):
            yield from file.chunks(crcs, number)

    return _whole_plan(state, kept, [file.layout for file in files], chunks=chunks, alone=bool(save))


NOTHING: Reuse[str] = Reuse()


def _whole_plan(
    state: State, kept: _Kept, files: Sequence[FileLayout], *, chunks: Chunks, reuse: Reuse[str] = NOTHING, alone: bool
) -> SavePlan:
    """The plan of a directory of which this process writes everything; `alone`, without an index for others (`lay_out_index`)."""
    most = Limits().header_nbytes
    if any(file.header_nbytes > most for file in files):
        raise CannotHold(CANNOT, [f"the header of a data file would be longer than {most:,} bytes"])
    listed = [*reuse.files, *(DataFile(file.plan.key, file.plan.nbytes) for file in files)]
    tensors = {name: (tensor.dtype.name, tensor.shape) for name, tensor in kept.sharing.written.items()}
    labels = [key for file in files for key in known_later(file.plan.segments)]
    index = lay_out_index(listed, tensors, chunks, labels=labels, fields=kept.fields, metadata=state.metadata, alone=alone)
    plans, notes = tuple(file.plan for file in files), (*kept.notes, *reuse.notes)
    return SavePlan("native", plans, notes, directory=True, index=index, linked=reuse.linked)


class BoxToWrite(Value, frozen=True):
    """One box of a tensor, on its way to a data file."""

    name: str
    box: Box
    tensor: LazyTensor
    """The elements of the box."""
    shape: tuple[int, ...]
    """Of the whole tensor."""

    @classmethod
    def cut(cls, name: str, tensor: LazyTensor, box: Box) -> BoxToWrite:
        """This box of a tensor."""
        return cls(name, box, tensor if box.shape == tensor.shape else tensor[box.slices], tensor.shape)


class BoxFile(Value, frozen=True):
    """A data file with boxes of tensors, one of each at the most."""

    layout: FileLayout
    ones: tuple[BoxToWrite, ...]
    packed: Mapping[str, SparseParts]
    label: str
    """What stands before the names of its entries where their checksums are looked up."""
    hashing: Mapping[str, Hashing] = field(default_factory=dict)
    """Which boxes are hashed when they are written, and how."""
    known: Mapping[str, Hashed] = field(default_factory=dict)
    """Those of the boxes that are stored packed."""

    def chunks(self, crcs: Mapping[str, int], number: int = 0) -> Iterator[tuple[str, StoredChunk]]:
        """The chunks in it, for the manifest in which it is the file of this number; each with its box."""
        for one in self.ones:
            yield (
                one.name,
                stored_chunk(
                    one.name,
                    lambda entry: (number, self.layout.places[entry]),
                    lambda entry: crcs[self.label + entry],
                    box=one.box,
                    parts=self.packed.get(one.name),
                    hashed=self._hash(one, crcs),
                ),
            )

    def _hash(self, one: BoxToWrite, crcs: Mapping[str, int]) -> Hashed | None:
        how = self.hashing.get(one.name)
        if how is None:
            return self.known.get(one.name)
        return hash_in(crcs, self.label + one.name, one.tensor.nbytes, head_alone=how == "head")


def box_file(
    key: str,
    ones: Sequence[BoxToWrite],
    texts: Mapping[str, str],
    *,
    fields: Mapping[str, object] = OWN,
    label: str = "",
    pack: Pack | None = None,
    hashes: HashAll | None = None,
    changed: Container[Place] = (),
) -> BoxFile:
    """Lay out one data file. `texts` go into its metadata, `fields` into its record; boxes are packed where `pack` says so.

    With `hashes`, its chunks have their hashes; those that `changed`, their heads.
    """
    packed = without_clashes(pack({one.name: one.tensor for one in ones}), [one.name for one in ones]) if pack else {}
    entries = {entry: part for one in ones for entry, part in entries_of(one.name, one.tensor, packed.get(one.name)).items()}
    known = hashes({one.name: one.tensor for one in ones if one.name in packed}) if hashes else {}
    alone = {one.name for one in ones if (one.name, one.box.start, one.box.stop) in changed}
    named = [one.name for one in ones if one.name not in packed] if hashes else []
    hashing = {name: "head" if name in alone else "hash" for name in named}
    pieces = [carried(entry, part) for entry, part in entries.items()]
    layout = plan_file(key, pieces, texts, fields=fields, label=label, hashed=hashing)
    return BoxFile(layout, tuple(ones), packed, label, hashing, known)


def sharding_texts(ones: Iterable[BoxToWrite]) -> dict[str, str]:
    """What torch's distributed reader needs to know of a file: where the piece of each tensor begins."""
    offsets = {one.name: {"saved_offsets": list(one.box.start)} for one in ones}
    return {"DCP_VERSION": "1.0", SHARDING_INFO: json.dumps(offsets)}


Chunks = Callable[[Mapping[str, int]], Iterable[tuple[str, StoredChunk]]]
"""From the checksums of the data, by label, to every chunk with the name of its tensor."""


def lay_out_index(
    files: Sequence[DataFile],
    tensors: Mapping[str, tuple[str, tuple[int, ...]]],
    chunks: Chunks,
    *,
    labels: Collection[str] = (),
    fields: Mapping[str, object],
    metadata: Mapping[str, str],
    alone: bool = False,
) -> tuple[FilePlan, ...]:
    """What makes data files a native directory, in the order in which it is written: the manifest is last.

    `tensors` are dtype and shape of each. `labels` are those of the data whose checksums are not known yet: with any, the manifest
    is one late segment, whose length does not depend on them. `fields` are those of `formats.recorded`. There is an index for
    `transformers` where it could read the files: where every tensor is whole, in one file, and not packed; and not with `alone`, in
    an object store, where the index would be the one name that two saves at once both write.

    Raises `CannotHold` where the manifest would be longer than a reader takes.
    """
    rest = {name: msgspec.Raw(msgspec.json.encode(value)) for name, value in fields.items()}

    def stored(crcs: Mapping[str, int]) -> dict[str, StoredTensor]:
        # Most tensors have one chunk: no list is made for those.
        first: dict[str, StoredChunk] = {}
        more: dict[str, list[StoredChunk]] = {}
        for name, chunk in chunks(crcs):
            kept = chunk if chunk.start is None else _without_box(chunk, tensors[name][1])
            if first.setdefault(name, kept) is not kept:
                more.setdefault(name, []).append(kept)
        return {
            name: StoredTensor(dtype, shape, (first[name], *more[name]) if name in more else (first[name],))
            for name, (dtype, shape) in tensors.items()
        }

    blank = stored(dict.fromkeys(labels, 0))
    others = [] if alone else _index_for_others(files, blank)
    beside = other_files(others)

    hashed = any(chunk.hash or chunk.head for tensor in blank.values() for chunk in tensor.chunks)
    version, hash = (HASHED_VERSION, HASH) if hashed else (VERSION, msgspec.UNSET)
    version = BESIDE_VERSION if any("/" in file.name for file in files) else version

    def encoded(listed: dict[str, StoredTensor]) -> bytes:
        return encode_manifest(Manifest(FORMAT, version, tuple(files), listed, dict(metadata), others=beside, hash=hash), rest)

    raw = encoded(blank)
    most = Limits().index_nbytes
    if len(raw) > most:
        raise CannotHold(CANNOT, [f"the manifest would have {len(raw):,} bytes, more than {most:,}"])
    manifest = Late(len(raw), lambda crcs: encoded(stored(crcs)), blank=raw) if labels else Literal(raw)
    return (*others, FilePlan(MANIFEST, (manifest,)))


def _without_box(chunk: StoredChunk, shape: tuple[int, ...]) -> StoredChunk:
    """A chunk that is a whole tensor has no box."""
    if chunk.stop != shape or any(chunk.start or ()):
        return chunk
    return StoredChunk(chunk.file, chunk.bytes, chunk.crc32, None, None, chunk.sparse, chunk.hash, chunk.head)


def _index_for_others(files: Sequence[DataFile], tensors: Mapping[str, StoredTensor]) -> list[FilePlan]:
    places = []
    for name, tensor in tensors.items():
        for chunk in tensor.chunks:
            if chunk.sparse is not None or chunk.start is not None:
                return []
            places.append((chunk.file, *chunk.bytes, name))
    places.sort()
    weight_map = {name: files[number].name for number, _, _, name in places}
    return [index_file(INDEX, weight_map, sum(stop - start for _, start, stop, _ in places))]


def other_files(plans: Sequence[FilePlan]) -> tuple[OtherFile, ...] | msgspec.UnsetType:
    """The manifest's field about files that are known before any data is: their names, lengths and checksums."""
    listed = []
    for plan in plans:
        crc = 0
        for segment in plan.segments:
            crc = crc32(segment.data, crc) if isinstance(segment, Literal) else crc
        listed.append(OtherFile(plan.key, plan.nbytes, f"{crc:08x}"))
    return tuple(listed) or msgspec.UNSET


class _Kept(Value, frozen=True):
    """What a native directory keeps of a state beside its elements."""

    sharing: Sharing
    """What is written once."""
    fields: Mapping[str, object]
    """What the manifest says beside the tensors."""
    notes: Sequence[str]
    """What a person should know."""


def _what_is_kept(state: State) -> _Kept:
    """Raises `CannotHold` with everything that has no place in a native checkpoint."""
    sharing = find_sharing(state.tensors)
    problems = metadata_problems(state)
    notes = sharing.notes()
    fields = sharing_fields(sharing)
    if not is_flat(state):
        encoded = encode_tree(state.tree, state.paths)
        problems += encoded.problems
        notes += encoded.notes
        fields["tree"] = encoded.value
    else:
        fields |= order_fields(state.tensors, sharing.aliases)
    if problems:
        raise CannotHold(CANNOT, list(dict.fromkeys(problems)))
    return _Kept(sharing, fields, notes)


def carried(name: str, tensor: LazyTensor) -> HeaderTensor:
    """A tensor as a safetensors header can name it, with the same bytes."""
    dtype, shape = tensor.dtype, tensor.shape
    if dtype.name == PAIRS and shape:
        return HeaderTensor.of(tensor, name, "F4", (*shape[:-1], 2 * shape[-1]))
    if dtype.safetensors is not None and tensor.size * dtype.bits % 8 == 0:
        return HeaderTensor.of(tensor, name, dtype.safetensors, shape)
    if dtype.packed:
        return HeaderTensor.of(tensor, name, "U8", (tensor.nbytes,))
    if dtype.kind == "complex":
        return HeaderTensor.of(tensor, name, HALVES[dtype.name], (*shape, 2))
    plain = DTYPES.numpy(dtype.numpy)
    if plain is None or plain.safetensors is None:
        return HeaderTensor.of(tensor, name, "U8", (tensor.nbytes,))
    return HeaderTensor.of(tensor, name, plain.safetensors, shape)
