"""A native directory of very many small tensors, as rows (`plan.rows`): the bytes of `lay_out_native`, without an object a tensor.

The manifest's text is made once, with blank checksums, from a piece for each kind of tensor; when the data is written, its
checksums are filled in together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from json.encoder import encode_basestring

import msgspec
import numpy as np

from holdfast.core.arrays import Ints
from holdfast.core.limits import Limits
from holdfast.core.value import Value
from holdfast.formats.native.schema import FORMAT, MANIFEST, VERSION, DataFile, Manifest, StoredChunk, StoredTensor
from holdfast.formats.native.write import INDEX, OWN, SHARD_NBYTES, data_name, other_files
from holdfast.formats.safetensors.rows import RowFile, row_file
from holdfast.formats.strict_json import SEAL_NBYTES, pay_for_containers, seal
from holdfast.plan.rows import TensorRows
from holdfast.plan.saves import FilePlan, Late, Literal, SavePlan

__all__ = ["lay_out_native_rows"]

BLANK = "0" * 8
"""A checksum that is not known yet."""


def lay_out_native_rows(names: Sequence[str], rows: TensorRows, metadata: Mapping[str, str]) -> SavePlan | None:
    """The plan of a directory with one data file; None where the way of objects has something to say, or would make more files."""
    key = data_name(0, 1)
    nbytes = int(rows.nbytes.sum())
    if nbytes > SHARD_NBYTES or not rows.nbytes.all():
        return None
    try:
        "".join([*metadata, *metadata.values()]).encode("utf-8")
    except UnicodeEncodeError:
        return None
    data = row_file(key, names, rows, metadata={}, fields=OWN)
    if data is None:
        return None
    index = _index(key, [names[row] for row in data.order], nbytes)
    manifest = _manifest(names, rows, data, metadata=metadata, others=[index])
    if manifest.nbytes > Limits().index_nbytes:
        return None
    return SavePlan("native", (data.plan,), directory=True, index=(index, FilePlan(MANIFEST, (manifest,))))


def _index(key: str, names: Sequence[str], nbytes: int) -> FilePlan:
    """The Hugging Face index, as `json.dumps` writes it with an indent of 2."""
    between = f": {encode_basestring(key)},\n    "
    listed = between.join(map(encode_basestring, names))
    total = f'{{\n  "metadata": {{\n    "total_size": {nbytes}\n  }},\n  "weight_map": {{\n    '
    return FilePlan(INDEX, (Literal(f"{total}{listed}: {encode_basestring(key)}\n  }}\n}}\n".encode()),))


class _Blank(Value, frozen=True, eq=False):
    """A manifest without its checksums."""

    raw: bytes
    places: Ints
    """Where the digits of each tensor stand."""
    names: Sequence[str]
    paid: int
    """How long it has to be at the least (`pay_for_containers`)."""

    def filled(self, crcs: Mapping[str, int]) -> bytes:
        """The manifest with these checksums and its own."""
        raw = np.frombuffer(bytearray(self.raw), np.uint8)
        digits = np.array([crcs[name] for name in self.names], ">u4").tobytes().hex().encode()
        raw[self.places[:, None] + np.arange(len(BLANK))] = np.frombuffer(digits, np.uint8).reshape(-1, len(BLANK))
        return seal(raw.tobytes(), self.paid)


def _manifest(
    names: Sequence[str], rows: TensorRows, data: RowFile, *, metadata: Mapping[str, str], others: Sequence[FilePlan]
) -> Late:
    stops = np.empty(len(rows), np.int64)
    stops[data.order] = data.stops
    starts = stops - rows.nbytes
    pieces = [_around(kind.dtype.name, kind.shape) for kind in rows.table]
    before, behind = [before for before, _ in pieces], [behind for _, behind in pieces]
    quoted = _quoted(names)
    kinds = rows.kinds
    texts = [
        f"{name}:{before[kind]}{start},{stop}{behind[kind]}"
        for name, kind, start, stop in zip(quoted, kinds, starts.tolist(), stops.tolist(), strict=True)
    ]
    joined = ",".join(texts)
    plain, listed = joined.isascii(), joined.encode()
    file = DataFile(data.plan.key, data.plan.nbytes)
    whole = msgspec.json.encode(Manifest(FORMAT, VERSION, (file,), {}, dict(metadata), others=other_files(others)))
    opening = b'"tensors":{'
    at = whole.index(opening) + len(opening)
    raw = whole[:at] + listed + whole[at:]
    # The digits stand as far from the end of a tensor's text as in every other of its kind; behind each but the last is a comma.
    ends = np.cumsum([len(text) if plain else len(text.encode()) for text in texts])
    back = np.array([len(text) - text.index(BLANK) for text in behind], np.int64)[np.array(kinds, np.int64)]
    places = at + ends + np.arange(len(texts)) - back
    blank = _Blank(raw, places, names, len(pay_for_containers(raw)))
    return Late(max(len(raw) - 1 + SEAL_NBYTES, blank.paid), blank.filled)


def _quoted(names: Sequence[str]) -> list[str]:
    """Names as JSON has them."""
    every = "".join(names)
    if every.isascii() and every.isprintable() and '"' not in every and "\\" not in every:
        return [f'"{name}"' for name in names]
    return [msgspec.json.encode(name).decode() for name in names]


def _around(dtype: str, shape: tuple[int, ...]) -> tuple[str, str]:
    """The text of a tensor of a kind, before and behind the two bytes where it lies."""
    text = msgspec.json.encode(StoredTensor(dtype, shape, (StoredChunk(0, (0, 0), BLANK),))).decode()
    before, _, behind = text.rpartition('"bytes":[0,0]')
    return before + '"bytes":[', "]" + behind
