"""Storages of a `.pt`: one record each, which has to be what the pickle says of it."""

from __future__ import annotations

import io
import zipfile

import pytest
import torch
from tests.formats.zip.craft import Item, build

import holdfast
from holdfast.errors import HoldfastError

PICKLE, EIGHTH = "archive/data.pkl", "archive/data/7"


def saved(state: dict[str, torch.Tensor]) -> dict[str, bytes]:
    """The records of the archive that torch writes of a state."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    with zipfile.ZipFile(buffer) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def archive_of(records: dict[str, bytes], *, compressed: str = "") -> bytes:
    return build(
        [
            Item(name, content, method=8 if name == compressed else 0)
            for name, content in records.items()
        ]
    )


def test_an_append_to_a_tensor_is_refused_with_its_class():
    records = saved({f"t{number}": torch.ones(3) for number in range(60)})
    assert records[PICKLE].endswith(b"u.")
    records[PICKLE] = records[PICKLE][:-2] + b"K\x01a" + records[PICKLE][-2:]
    with pytest.raises(HoldfastError, match="an APPEND to a LazyTensor"):
        holdfast.open(archive_of(records))


def with_key(records: dict[str, bytes], key: bytes) -> dict[str, bytes]:
    """The same records with another key in the pickle for the eighth tensor."""
    prefix = b"X\x01\0\0\x00"
    return records | {PICKLE: records[PICKLE].replace(prefix + b"7", prefix + key)}


@pytest.mark.parametrize(
    ("lie", "message"),
    [
        ("the key of the record before", "is 16 × float32 in one place and 16 × int32"),
        ("the key of the first record", "is 16 × float32 in one place and 16 × int32"),
        ("no record", "which is not in the archive"),
        ("shorter", "claims 64 bytes and its record has 60"),
        ("longer", "claims 64 bytes and its record has 128"),
        ("compressed", "is compressed"),
    ],
)
def test_a_tensor_whose_record_is_not_what_its_pickle_says_is_refused(lie: str, message: str):
    """The eighth of twelve tensors of 64 bytes, whose dtypes take turns, lies about its storage."""
    dtypes = torch.float32, torch.int32
    records = saved({f"t{i}": torch.full((4, 4), float(i), dtype=dtypes[i % 2]) for i in range(12)})
    if lie == "the key of the record before":
        records = with_key(records, b"6")
    elif lie == "the key of the first record":
        records = with_key(records, b"0")
    elif lie == "no record":
        del records[EIGHTH]
    elif lie == "shorter":
        records[EIGHTH] = records[EIGHTH][:-4]
    elif lie == "longer":
        records[EIGHTH] *= 2
    else:
        # 59 bytes that do not become shorter take 64.
        records[EIGHTH] = bytes([151 * i % 256 for i in range(59)])
    with pytest.raises(HoldfastError, match=message):
        holdfast.open(archive_of(records, compressed=EIGHTH if lie == "compressed" else ""))
