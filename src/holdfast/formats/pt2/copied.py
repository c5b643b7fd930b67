"""Records of an archive that go into another as they are: programs, sample inputs, pickled weights and objects, extra files.

Nothing of them is read here, and nothing is understood: a copied program is the same bytes under the name of its model. What cannot
be copied is said by `Beside.problems`: compiled code names the weight records of its own archive, and those get other names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from holdfast.core.chunk import Storage
from holdfast.core.dtype import DTYPES
from holdfast.core.protocols import Source
from holdfast.core.tensor import LazyTensor
from holdfast.errors import Unsupported
from holdfast.formats.pt2.archive import OLD_PROGRAM
from holdfast.formats.pt2.read import (
    CONSTANTS,
    CONSTANTS_CONFIG,
    EXTRAS,
    INPUTS,
    LISTED,
    MODELS,
    OBJECTS,
    OLD,
    WEIGHTS,
    WEIGHTS_CONFIG,
)
from holdfast.formats.pt2.schema import TENSOR, WEIGHT, parse_config
from holdfast.formats.pt2.write import Pickled
from holdfast.formats.safetensors.strict_json import parse
from holdfast.formats.torch.zip import record_bytes
from holdfast.formats.zip.reader import Archive, Record, read_archive
from holdfast.plan.saves import Data

__all__ = ["Beside", "copied", "pickled_weights", "read_beside"]

BYTES = DTYPES.name("uint8")


@dataclass(frozen=True, slots=True)
class Beside:
    """What a model has in its archive besides raw tensors, ready to be copied."""

    weights: Mapping[str, Pickled]
    constants: Mapping[str, Pickled]
    program: Data | None
    sample_inputs: Data | None
    extra: Mapping[str, Data | bytes]
    """Extra files of the archive, by their names."""
    problems: tuple[str, ...]
    """What is in the archive and cannot be copied."""


def read_beside(source: Source, model: str) -> Beside:
    """What a model of an archive that is open has besides raw tensors. Reads the directory and the configs."""
    (key,) = source.store.list()
    archive = read_archive(source, key)
    program = archive.get(f"{MODELS}{model}.json") or (None if archive.prefix else archive.get(OLD_PROGRAM))
    inputs = archive.get(f"{INPUTS}{model}.pt") or (None if archive.prefix else archive.get(OLD["sample_inputs"][0]))
    extra: dict[str, Data | bytes] = {}
    others: dict[str, int] = {}
    for short in archive.names:
        record = archive.get(short)
        if record is None or not short.startswith(LISTED):
            continue
        if short.startswith(EXTRAS):
            extra[short.partition("/")[2]] = copied(source, key, record) if record.nbytes else b""
        else:
            folder = "/".join(short.split("/")[:-1])
            others[folder] = others.get(folder, 0) + 1
    return Beside(
        pickled_weights(source, key, archive, model),
        _pickled(source, key, archive, model, CONSTANTS),
        None if program is None or not program.nbytes else copied(source, key, program),
        None if inputs is None or not inputs.nbytes else copied(source, key, inputs),
        extra,
        tuple(f"{count:,} files in {folder}, which belong to compiled code" for folder, count in others.items()),
    )


def pickled_weights(source: Source, key: str, archive: Archive, model: str) -> dict[str, Pickled]:
    """The weights of a model that are no raw records."""
    return _pickled(source, key, archive, model, WEIGHTS)


def _pickled(source: Source, key: str, archive: Archive, model: str, folder: str) -> dict[str, Pickled]:
    suffix, what = (WEIGHTS_CONFIG, "weight") if folder == WEIGHTS else (CONSTANTS_CONFIG, "constant")
    config = archive.get(folder + model + suffix)
    if config is None:
        return {}
    raw = record_bytes(source, key, config)
    entries = parse_config(raw, source.limits, model=model, what=what)
    pickled: dict[str, Pickled] = {}
    rows: dict[str, Mapping[str, object]] | None = None
    for name, entry in entries.items():
        record = archive.get(folder + entry.record)
        kept = _prefix(folder, entry.record)
        if record is None or not (entry.use_pickle or kept in OBJECTS):
            continue
        if rows is None:
            rows = _rows(parse(raw, source.limits))
        pickled[name] = Pickled(copied(source, key, record), kept, rows.get(name), entry.is_param)
    return pickled


def _prefix(folder: str, record: str) -> str:
    """How the names of records of this kind begin."""
    if folder == WEIGHTS:
        return WEIGHT
    return next((prefix for prefix in OBJECTS if record.startswith(prefix)), TENSOR)


def _rows(document: object) -> dict[str, Mapping[str, object]]:
    """What a config says of its tensors, as it says it."""
    config = document.get("config") if isinstance(document, dict) else None
    return {name: row["tensor_meta"] for name, row in config.items() if row.get("tensor_meta")} if isinstance(config, dict) else {}


def copied(source: Source, key: str, record: Record) -> Data:
    """The bytes of a record, as they are. torch stores every record plainly."""
    if BYTES is None or not record.stored:
        raise Unsupported(f"the record {record.name!r} is compressed, and cannot be copied as it is", file=key)
    storage = Storage(key, record.start, record.nbytes, "little", record.crc32, label=record.name, home=source.store)
    return Data(LazyTensor.contiguous(record.name, BYTES, (record.nbytes,), storage, source), record.name)
