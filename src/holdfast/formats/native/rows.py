"""A native directory of very many small tensors, as rows (`plan.rows`): the bytes of `lay_out_native`, without an object a tensor.

The manifest's text is made once, when the data is written and its checksums are known, from a piece for each kind of tensor. How
long it will be is arithmetic.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from json.encoder import encode_basestring

import msgspec
import numpy as np

from holdfast.core.arrays import Ints
from holdfast.core.crc import crc32
from holdfast.core.limits import Limits
from holdfast.core.value import Value
from holdfast.formats.native.schema import FORMAT, VERSION, DataFile, Manifest, StoredChunk, StoredTensor
from holdfast.formats.native.write import INDEX, OWN, SHARD_NBYTES, data_name, other_files
from holdfast.formats.safetensors.record import CRC_DIGITS, MANIFEST, checksum_digits
from holdfast.formats.safetensors.rows import RowFile, row_file
from holdfast.formats.strict_json import SEAL_NBYTES, as_keys, paid_nbytes, sealing
from holdfast.plan.rows import BATCH, TensorRows
from holdfast.plan.saves import FilePlan, Late, Literal, SavePlan

DIGITS = re.compile("." * CRC_DIGITS).findall
"""The digits of many checksums, those of each by themselves."""

POWERS = 10 ** np.arange(1, 19)
"""The first number of two digits, of three, and so on."""


def lay_out_native_rows(
    names: Sequence[str], rows: TensorRows, metadata: Mapping[str, str], *, fields: Mapping[str, object]
) -> SavePlan | None:
    """The plan of a directory with one data file; None where the way of objects has something to say, or would make more files.

    `fields` are those of `formats.recorded`.
    """
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
    index = _index(key, data.names, nbytes)
    rest = {name: msgspec.Raw(msgspec.json.encode(value)) for name, value in fields.items()}
    file = DataFile(key, data.plan.nbytes)
    manifest = Manifest(FORMAT, VERSION, (file,), {}, dict(metadata), others=other_files([index]))
    whole = msgspec.json.encode(msgspec.structs.replace(manifest, **rest))
    late = _manifest(names, rows, data, whole)
    if late.nbytes > Limits().index_nbytes:
        return None
    return SavePlan("native", (data.plan,), directory=True, index=(index, FilePlan(MANIFEST, (late,))))


def _index(key: str, names: Sequence[str], nbytes: int) -> FilePlan:
    """The Hugging Face index, as `json.dumps` writes it with an indent of 2."""
    quote, keys = as_keys(names)
    if not quote:
        keys = list(map(encode_basestring, names))
    where = encode_basestring(key)
    between = f"{quote}: {where},\n    {quote}"
    total = f'{{\n  "metadata": {{\n    "total_size": {nbytes}\n  }},\n  "weight_map": {{\n    {quote}'
    pieces = [total.encode()]
    for first in range(0, len(names), BATCH):
        listed = between.join(keys[first : first + BATCH])
        pieces.append((between * bool(first) + listed).encode())
    return FilePlan(INDEX, tuple(map(Literal, [*pieces, f"{quote}: {where}\n  }}\n}}\n".encode()])))


class _Text(Value, frozen=True, eq=False):
    """A manifest, made from the checksums of its tensors."""

    before: bytes
    """Up to the first tensor."""
    behind: bytes
    """From behind the last one on, without the brace at the end."""
    names: Sequence[str]
    keys: tuple[str, Sequence[str]]
    """The names `as_keys`."""
    kinds: Sequence[int]
    openings: Sequence[str]
    """By kind: what stands between the name of a tensor and the bytes where it lies."""
    starts: Ints
    stops: Ints
    nbytes: int
    """Of the whole."""

    def __call__(self, crcs: Mapping[str, int]) -> bytes:
        pieces = [self.before, *self._tensors(crcs), self.behind]
        crc, length = 0, 0
        for piece in pieces:
            crc, length = crc32(piece, crc), length + len(piece)
        return b"".join([*pieces, sealing(crc, length, self.nbytes)])

    def _tensors(self, crcs: Mapping[str, int]) -> Iterator[bytes]:
        quote, keys = self.keys
        for first in range(0, len(self.names), BATCH):
            some = slice(first, first + BATCH)
            openings = map([quote + text for text in self.openings].__getitem__, self.kinds[some])
            sums = DIGITS(checksum_digits(crcs, self.names[some]))
            each = zip(keys[some], openings, self.starts[some].tolist(), self.stops[some].tolist(), sums, strict=True)
            between, behind = BETWEEN, BEHIND
            listed = [f"{name}{opening}{start},{stop}{between}{crc}{behind}" for name, opening, start, stop, crc in each]
            made = f",{quote}".join(listed)
            yield f"{',' * bool(first)}{quote}{made}".encode()


def _manifest(names: Sequence[str], rows: TensorRows, data: RowFile, whole: bytes) -> Late:
    """The manifest; `whole` is the same without tensors."""
    stops = np.empty(len(rows), np.int64)
    stops[data.order] = data.stops
    starts = stops - rows.nbytes
    openings = [_around(kind.dtype.name, kind.shape)[0] for kind in rows.table]
    head = b'"tensors":{'
    at = whole.index(head) + len(head)
    quote, keys = as_keys(names)
    every, counts = "".join(keys), np.bincount(rows.kinds, minlength=len(openings))
    texts = [opening + BETWEEN + BEHIND for opening in openings]
    # Between two tensors is a comma, and so between the two bytes.
    length = len(whole) + len(every.encode()) + (2 * len(quote) + CRC_DIGITS + 2) * len(names) - 1
    length += int(counts @ [len(text) for text in texts]) + _digits(starts) + _digits(stops)
    containers = _containers(every) + int(counts @ [_containers(text) for text in texts])
    nbytes = max(length - 1 + SEAL_NBYTES, paid_nbytes(whole, containers))
    return Late(nbytes, _Text(whole[:at], whole[at:-1], names, (quote, keys), rows.kinds, openings, starts, stops, nbytes))


def _containers(text: str) -> int:
    return text.count("[") + text.count("{")


def _digits(numbers: Ints) -> int:
    """How many digits numbers have together."""
    return len(numbers) + int(np.searchsorted(POWERS, numbers, side="right").sum())


def _around(dtype: str, shape: tuple[int, ...]) -> tuple[str, str, str]:
    """The text of a tensor around the two bytes where it lies and its checksum. Only what stands before depends on its kind."""
    blank = "0" * CRC_DIGITS
    text = msgspec.json.encode(StoredTensor(dtype, shape, (StoredChunk(0, (0, 0), blank),))).decode()
    before, _, rest = text.rpartition('"bytes":[0,0]')
    between, _, behind = rest.rpartition(blank)
    return f':{before}"bytes":[', "]" + between, behind


_, BETWEEN, BEHIND = _around("", ())
