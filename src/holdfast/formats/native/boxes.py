"""Boxes of tensors in the data files of a native directory, by columns: what one process, or a rank of a mesh or a group, writes.

The data files are ordinary safetensors. A dtype that the format lacks is carried by one that has the same bytes, and the manifest
has the true one:

    complex128, complex32         F64, F16    with a last dimension of 2; bcomplex32 as BF16
    float4_e2m1fn_x2              F4          with the last dimension doubled
    quantised, bits, narrow ints  U8, I8, U16, I32      whatever numpy has for them
    packed, not in whole bytes    U8          the bytes, flat

A file whose boxes are not whole tensors has torch's sharding metadata, so that torch's reader can join them.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Container, Mapping, Sequence

import msgspec

from holdfast.core.arrays import Ints, shape_columns
from holdfast.core.box import Box
from holdfast.core.content_hash import HEAD_NBYTES
from holdfast.core.dtype import DTYPES
from holdfast.core.limits import DEFAULTS
from holdfast.core.table import IRREGULAR, RowKind, Table
from holdfast.core.tensor import LazyTensor
from holdfast.core.value import Value
from holdfast.engine.saves import Hashing
from holdfast.errors import CannotHold
from holdfast.formats.native.chunks import hash_tails
from holdfast.formats.native.manifest import CANNOT, StoredBoxes, are_whole, as_bytes
from holdfast.formats.recorded import PAIRS
from holdfast.formats.safetensors.record import format_crcs
from holdfast.formats.safetensors.schema import MANIFEST, SHARDING_INFO
from holdfast.formats.safetensors.write import HeaderKind, PlannedFile, plan_file

HALVES = {"complex128": "F64", "complex32": "F16", "bcomplex32": "BF16"}

OWN: Mapping[str, object] = {"rest": MANIFEST}
"""The record of each data file names the manifest, so that a folder without its manifest is recognised."""


def data_name(number: int, count: int, save: str = "") -> str:
    """The name of a data file. In an object store it has the id of its save, so that no two saves write the same name.

    >>> data_name(0, 4), data_name(0, 4, "5f3a")
    ('data-00001-of-00004.safetensors', 'data-5f3a-00001-of-00004.safetensors')
    """
    return f"data-{save + '-' if save else ''}{number + 1:05}-of-{count:05}.safetensors"


class Boxes(Value, frozen=True, eq=False):
    """Boxes of tensors on their way to data files, a row each."""

    table: Table
    """The elements of each box, under the name of its tensor."""
    starts: Ints
    """Lowest corners: a row for each dimension of the tensor that has the most, a column for each box."""
    whole: Sequence[int]
    """For each box the kind of its whole tensor, as a position in `table.kinds`."""

    @classmethod
    def cut(cls, table: Table, rows: Sequence[int], starts: Ints, sizes: Ints) -> Boxes:
        """Boxes of the tensors of these rows. Missing dimensions have the start 0 and the size 1."""
        whole = [kind.shape for kind in table.kinds]
        kind, irregular = [table.kind_indices[row] for row in rows], dict[int, LazyTensor]()
        wholes, storage = [*kind], [table.storage_indices[row] for row in rows]
        kinds, known = [*table.kinds], dict[tuple[object, ...], int]()
        if table.irregular:
            irregular = {
                at: table.irregular[row] for at, row in enumerate(rows) if row in table.irregular
            }
        for at in (
            (~are_whole(starts, sizes, shape_columns(whole).take(kind, axis=1)))
            .nonzero()[0]
            .tolist()
        ):
            rank = len(whole[wholes[at]])
            box = Box.from_offsets(starts[:rank, at].tolist(), sizes[:rank, at].tolist())
            part = irregular[at] = table.lazy_tensor(rows[at])[box.slices]
            storage[at] = IRREGULAR
            key = part.dtype, part.shape, id(part.traits)
            kind[at] = known.setdefault(key, len(kinds))
            if kind[at] == len(kinds):
                kinds.append(RowKind.from_tensor(part))
        names, offsets = [table.names[row] for row in rows], table.select_offsets(rows)
        return cls(
            Table(names, kinds, kind, storage, table.storages, irregular, offsets=offsets),
            starts,
            wholes,
        )

    def has_parts(self, rows: Sequence[int]) -> bool:
        shapes, kind, whole = (
            [kind.shape for kind in self.table.kinds],
            self.table.kind_indices,
            self.whole,
        )
        return kind is not whole and [shapes[kind[row]] for row in rows] != [
            shapes[whole[row]] for row in rows
        ]

    def sharding_texts(self, rows: Sequence[int]) -> dict[str, str]:
        """Metadata for torch's distributed reader: the offset of each piece in its tensor."""
        starts, names = self.starts[:, rows].T.tolist(), self.table.names
        ranks, whole = [len(kind.shape) for kind in self.table.kinds], self.whole
        offsets = {
            names[row]: {"saved_offsets": one[: ranks[whole[row]]]}
            for row, one in zip(rows, starts, strict=True)
        }
        return {"DCP_VERSION": "1.0", SHARDING_INFO: json.dumps(offsets)}


class BoxFile(Value, frozen=True, eq=False):
    """The layout of one data file with boxes that have different names."""

    boxes: Boxes
    layout: PlannedFile
    hashing: Mapping[str, Hashing]
    """The boxes that are hashed when they are written, and how."""
    label: str
    """The prefix of the names of boxes in the labels of their data."""
    places: StoredBoxes
    """The places of the boxes, without checksums."""

    @property
    def tails_nbytes(self) -> int:
        """The length of the texts of all hashes."""
        hashing, table = self.hashing, self.boxes.table
        if not hashing:
            return 0
        long = [kind.nbytes > HEAD_NBYTES for kind in table.kinds]
        rows = self.layout.rows.tolist()
        ways = Counter([(hashing[table.names[row]], long[table.kind_indices[row]]) for row in rows])
        return sum(count * TAILS[way] for way, count in ways.items())

    def stored(self, crcs: Mapping[str, int]) -> StoredBoxes:
        """Return the places and checksums of the boxes, from the checksums of the data."""
        names, tails = self.layout.names, list[str]()
        labels = [self.label + name for name in names] if self.label else names
        if self.hashing:
            rows = self.layout.rows.tolist()
            tails = hash_tails(crcs, self.boxes.table, rows, labels, self.hashing)
        try:
            digits = format_crcs(crcs, labels)
        except KeyError:
            # Boxes without elements have no data, and before data is written nothing has a checksum.
            known = {label: crcs[label] if label in crcs else 0 for label in labels}  # noqa: SIM401  # a call each
            digits = format_crcs(known, labels)
        return msgspec.structs.replace(self.places, crcs=digits, tails=tails)


def lay_out_box_file(
    key: str,
    boxes: Boxes,
    rows: Sequence[int],
    texts: Mapping[str, str],
    *,
    hashed: bool = False,
    changed: Container[int] = (),
    fields: Mapping[str, object] = OWN,
    label: str = "",
) -> BoxFile:
    """Lay out a data file with the boxes of these rows.

    Args:
        key: The name of the file.
        boxes: All boxes.
        rows: The boxes in the file. They have different names.
        texts: The metadata of the file.
        hashed: Whether the boxes get hashes.
        changed: Rows of boxes that get the hash of their head only.
        fields: The fields of the record of the file.
        label: The prefix of the names of boxes in the labels of their data.

    Raises:
        CannotHold: The header would be longer than a reader takes.
    """
    table = boxes.table
    hashing: dict[str, Hashing] = {}
    if hashed:
        names = table.names
        hashing = {names[row]: "head" if row in changed else "hash" for row in rows}
    kinds = [carried(kind) for kind in table.kinds]
    layout = plan_file(key, table, rows, kinds, texts, fields=fields, label=label, hashing=hashing)
    most = DEFAULTS.header_nbytes
    if layout.header_nbytes > most:
        problem = f"the header of a data file would be longer than {most:,} bytes"
        raise CannotHold(CANNOT, [problem])
    places = StoredBoxes(as_bytes(layout.rows), as_bytes(layout.starts), as_bytes(layout.stops))
    return BoxFile(boxes, layout, hashing, label, places)


TAILS = {("hash", False): 42, ("hash", True): 60, ("head", False): 42, ("head", True): 18}
"""The length of the text of hash and head, by the kind of hashing and whether there are more bytes than a head has."""


def carried(kind: RowKind) -> HeaderKind:
    """The dtype code and shape of a safetensors header for tensors of a kind, with the same bytes."""
    dtype, shape = kind.dtype, kind.shape
    if dtype.name == PAIRS and shape:
        return HeaderKind("F4", (*shape[:-1], 2 * shape[-1]))
    if dtype.safetensors is not None and math.prod(shape) * dtype.bits % 8 == 0:
        return HeaderKind(dtype.safetensors, shape)
    if dtype.packed:
        return HeaderKind("U8", (kind.nbytes,))
    if dtype.kind == "complex":
        return HeaderKind(HALVES[dtype.name], (*shape, 2))
    plain = DTYPES.numpy(dtype.numpy)
    if plain is None or plain.safetensors is None:
        return HeaderKind("U8", (kind.nbytes,))
    return HeaderKind(plain.safetensors, shape)
