"""Lay out a state as a native directory: data files, the Hugging Face index, and the manifest, which comes last.

The data files are ordinary safetensors. A dtype that the format lacks is carried by one that has the same bytes, and the manifest
has the true one:

    complex128, complex32         F64, F16    with a last dimension of 2
    float4_e2m1fn_x2              F4          with the last dimension doubled
    quantised, bits, narrow ints  U8, I8, U16, I32      whatever numpy has for them
    packed, not in whole bytes    U8          the bytes, flat
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import msgspec

from holdfast.core.crc import crc32
from holdfast.core.dtype import DTYPES
from holdfast.core.limits import Limits
from holdfast.core.protocols import State
from holdfast.core.sparse.storage import SparseParts
from holdfast.core.tensor import LazyTensor
from holdfast.errors import CannotHold
from holdfast.formats.native.chunks import entries_of, stored_chunk, without_clashes
from holdfast.formats.native.schema import (
    FORMAT,
    MANIFEST,
    VERSION,
    DataFile,
    Manifest,
    OtherFile,
    StoredTensor,
    encode_manifest,
)
from holdfast.formats.recorded import PAIRS, sharing_fields
from holdfast.formats.safetensors.pieces import FileLayout, Piece, fill_shards, plan_file
from holdfast.formats.safetensors.write import index_file, is_flat, metadata_problems
from holdfast.formats.sharing import Sharing, find_sharing
from holdfast.formats.tree_json import encode_tree
from holdfast.plan.saves import FilePlan, Late, Literal, SavePlan

__all__ = ["OWN", "SHARD_NBYTES", "Pack", "carried", "lay_out_native", "other_files", "what_is_kept"]

SHARD_NBYTES = 5 << 30
"""Bytes of tensors in a data file where the caller does not say: few files, each small enough to be moved about."""

INDEX = "model.safetensors.index.json"
"""What `transformers` looks for."""

OWN: Mapping[str, object] = {"rest": MANIFEST}
"""What the record of each data file says: that it is one, so that a folder that has lost its manifest is known for what it was."""


Pack = Callable[[Mapping[str, LazyTensor]], Mapping[str, SparseParts]]
"""Finds the tensors that are stored packed, with their parts."""


def lay_out_native(state: State, *, max_shard_size: int | None = None, pack: Pack | None = None) -> SavePlan:
    """The plan of a native directory, its data files with at most `max_shard_size` bytes of tensors.

    Where tensors are stored packed there is no Hugging Face index: `transformers` could not read them.

    Raises `CannotHold` with every problem: Python objects that have no form in the manifest, names that are no Unicode.
    """
    sharing, fields, notes = what_is_kept(state)
    written = sharing.written
    packed = without_clashes(pack(written), list(written)) if pack else {}
    pieces = [
        carried(entry, part)
        for name, tensor in written.items()
        for entry, part in entries_of(name, tensor, packed.get(name)).items()
    ]
    shards = fill_shards(pieces, max_shard_size or SHARD_NBYTES)
    files = [plan_file(f"data-{i + 1:05}-of-{len(shards):05}.safetensors", shard, {}, OWN) for i, shard in enumerate(shards)]
    others = [] if packed else [index_file(INDEX, files, None)]
    manifest = _manifest(state, written, packed, files, fields, others)
    most = Limits().index_nbytes
    if manifest.nbytes > most or any(file.header_nbytes > Limits().header_nbytes for file in files):
        raise CannotHold("a native checkpoint cannot hold this state", [f"the manifest would be longer than {most:,} bytes"])
    plans = tuple(file.plan for file in files)
    return SavePlan("native", plans, tuple(notes), directory=True, index=(*others, manifest))


def other_files(plans: Sequence[FilePlan]) -> tuple[OtherFile, ...] | msgspec.UnsetType:
    """The manifest's field about files that are known before any data is: their names, lengths and checksums."""
    listed = []
    for plan in plans:
        content = b"".join(segment.data for segment in plan.segments if isinstance(segment, Literal))
        listed.append(OtherFile(plan.key, len(content), f"{crc32(content):08x}"))
    return tuple(listed) or msgspec.UNSET


def what_is_kept(state: State) -> tuple[Sharing, dict[str, object], list[str]]:
    """What is written once, what the manifest says beside the tensors, and what a person should know.

    Raises `CannotHold` with everything that has no place in a native checkpoint.
    """
    sharing = find_sharing(state.tensors)
    problems = metadata_problems(state)
    notes = sharing.notes()
    fields = sharing_fields(sharing)
    if not is_flat(state):
        encoded = encode_tree(state.tree, state.paths)
        problems += encoded.problems
        notes += encoded.notes
        fields["tree"] = encoded.value
    if problems:
        raise CannotHold("a native checkpoint cannot hold this state", list(dict.fromkeys(problems)))
    return sharing, fields, notes


def carried(name: str, tensor: LazyTensor) -> Piece:
    """A tensor as a safetensors header can name it, with the same bytes."""
    dtype, shape = tensor.dtype, tensor.shape
    if dtype.name == PAIRS and shape:
        return Piece.of(tensor, name, "F4", (*shape[:-1], 2 * shape[-1]))
    if dtype.safetensors is not None and tensor.size * dtype.bits % 8 == 0:
        return Piece.of(tensor, name, dtype.safetensors, shape)
    if dtype.packed:
        return Piece.of(tensor, name, "U8", (tensor.nbytes,))
    if dtype.kind == "complex":
        return Piece.of(tensor, name, "F64" if dtype.bits == 128 else "F16", (*shape, 2))
    plain = DTYPES.numpy(dtype.numpy)
    if plain is None or plain.safetensors is None:
        return Piece.of(tensor, name, "U8", (tensor.nbytes,))
    return Piece.of(tensor, name, plain.safetensors, shape)


def _manifest(
    state: State,
    written: Mapping[str, LazyTensor],
    packed: Mapping[str, SparseParts],
    files: list[FileLayout],
    fields: Mapping[str, object],
    others: Sequence[FilePlan],
) -> FilePlan:
    """The manifest as one late segment: its checksums come when all data has passed by, its length does not depend on them."""
    places = {entry: (number, place) for number, file in enumerate(files) for entry, place in file.places.items()}
    rest = {name: msgspec.Raw(msgspec.json.encode(value)) for name, value in fields.items()}
    listed = tuple(DataFile(file.plan.key, file.plan.nbytes) for file in files)
    beside = other_files(others)

    def make(crcs: Mapping[str, int]) -> bytes:
        tensors = {}
        for name, tensor in written.items():
            chunk = stored_chunk(name, places.__getitem__, crcs.__getitem__, parts=packed.get(name))
            tensors[name] = StoredTensor(tensor.dtype.name, tensor.shape, (chunk,))
        return encode_manifest(Manifest(FORMAT, VERSION, listed, tensors, dict(state.metadata), others=beside), rest)

    blank = make(dict.fromkeys(places, 0))
    return FilePlan(MANIFEST, (Late(len(blank), make),))
