"""Other weights in an archive that is there: a fine-tuned state into the same program, without exporting it again.

1. The new state must have the names, dtypes and shapes of the model's config. All differences are listed in one error.
2. Weight records and configs are written again. Unchanged models keep the sharing between them; replaced weights share a record if
   the new tensors do.
3. Every other record (programs, constants, sample inputs, compiled code, extra files) is copied.
"""

from __future__ import annotations

from collections.abc import Mapping

from holdfast.core.chunk import Storage
from holdfast.core.dtype import DTYPES
from holdfast.core.protocols import Source
from holdfast.core.strict_json import parse
from holdfast.core.tensor import LazyTensor
from holdfast.core.value import Value, replace
from holdfast.engine.saves import Data, SavePlan
from holdfast.errors import CannotHold, Unsupported
from holdfast.extras.packages.pt2.archive import OLD_PROGRAM
from holdfast.extras.packages.pt2.read import (
    CONSTANTS,
    CONSTANTS_CONFIG,
    EXTRAS,
    INPUTS,
    LISTED,
    MODELS,
    OBJECTS,
    OLD,
    VERSION_RECORD,
    WEIGHTS,
    WEIGHTS_CONFIG,
    Model,
    Pt2Reader,
)
from holdfast.extras.packages.pt2.schema import TENSOR, WEIGHT, parse_config
from holdfast.extras.packages.pt2.write import HEADER, Pickled, PlacedRecords, lay_out_records
from holdfast.formats.torch.write import SERIALIZATION_ID
from holdfast.formats.torch.zip import record_bytes
from holdfast.formats.zip.layout import Archive, ZipRecord
from holdfast.formats.zip.reader import read_archive
from holdfast.formats.zip.writer import Payload

BYTES = DTYPES.name("uint8")


class SideRecords(Value, frozen=True):
    """The records of a model besides raw tensors, which are copied byte by byte.

    `problems` lists records that cannot be copied: compiled code names the weight records of its own archive, and those get other
    names.
    """

    weights: Mapping[str, Pickled]
    constants: Mapping[str, Pickled]
    program: Data | None
    sample_inputs: Data | None
    extra: Mapping[str, Data | bytes]
    problems: tuple[str, ...]


def read_side_records(source: Source, model: str) -> SideRecords:
    """The side records of a model of an open archive. Reads the directory and the configs."""
    (key,) = source.store.list()
    archive = read_archive(source, key)
    program = archive.get(f"{MODELS}{model}.json") or (
        None if archive.prefix else archive.get(OLD_PROGRAM)
    )
    inputs = archive.get(f"{INPUTS}{model}.pt") or (
        None if archive.prefix else archive.get(OLD["sample_inputs"][0])
    )
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
    return SideRecords(
        _pickled(source, key, archive, model=model, folder=WEIGHTS),
        _pickled(source, key, archive, model=model, folder=CONSTANTS),
        None if program is None or not program.nbytes else copied(source, key, program),
        None if inputs is None or not inputs.nbytes else copied(source, key, inputs),
        extra,
        tuple(
            f"{count:,} files in {folder}, which belong to compiled code"
            for folder, count in others.items()
        ),
    )


def _pickled(
    source: Source, key: str, archive: Archive, *, model: str, folder: str
) -> dict[str, Pickled]:
    suffix, what = (
        (WEIGHTS_CONFIG, "weight") if folder == WEIGHTS else (CONSTANTS_CONFIG, "constant")
    )
    config = archive.get(folder + model + suffix)
    if config is None:
        return {}
    raw = record_bytes(source, key, config)
    entries = parse_config(raw, source.limits, model=model, what=what)
    pickled: dict[str, Pickled] = {}
    document: object = None
    for name, entry in entries.items():
        record = archive.get(folder + entry.record)
        objects = () if folder == WEIGHTS else OBJECTS
        prefix = next(
            (one for one in objects if entry.record.startswith(one)),
            WEIGHT if folder == WEIGHTS else TENSOR,
        )
        if record is None or not (entry.use_pickle or prefix in OBJECTS):
            continue
        document = parse(raw, source.limits) if document is None else document
        rows = document["config"] if isinstance(document, dict) else {}
        pickled[name] = Pickled(
            copied(source, key, record),
            prefix,
            rows[name].get("tensor_meta") or None,
            entry.is_param,
        )
    return pickled


def copied(source: Source, key: str, record: ZipRecord) -> Data:
    """The bytes of a record. torch compresses no record."""
    if BYTES is None or not record.stored:
        raise Unsupported(
            f"the record {record.name!r} is compressed, and cannot be copied as it is", file=key
        )
    storage = Storage(
        key,
        record.start,
        record.nbytes,
        "little",
        record.crc32,
        label=record.name,
        home=source.store,
    )
    return Data(
        LazyTensor.contiguous(record.name, BYTES, (record.nbytes,), storage, source), record.name
    )


OWN = frozenset({name for name, _ in HEADER} | {SERIALIZATION_ID, VERSION_RECORD, "version"})


def lay_out_replaced(
    source: Source, states: Mapping[str, Mapping[str, LazyTensor]], *, name: str = "archive"
) -> SavePlan:
    """The plan of an archive like the open one, with other weights. Raises `CannotHold` with all misfits, or `Unsupported`."""
    (key,) = source.store.list()
    archive = read_archive(source, key)
    reader = Pt2Reader(source, key, archive)
    models = reader.models()
    known = ", ".join(list(models)[:8])
    problems = [
        f"{model!r}: there is no such model; there are {known}"
        for model in states
        if model not in models
    ]
    weights: dict[str, Mapping[str, LazyTensor | Pickled]] = {}
    for model, found in models.items():
        if archive.get(f"{WEIGHTS}{model}{WEIGHTS_CONFIG}") is None:
            if model in states:
                raise Unsupported(
                    f"the weights of model {model!r} are no records of their own; export it again",
                    file=key,
                )
            continue
        new = states.get(model)
        if new is not None:
            problems += _misfits(model, found, new)
        weights[model] = _weights(source, key, archive, model=model, found=found, new=new)
    if problems:
        raise CannotHold("these weights do not fit the archive", problems)
    return _lay_out(source, key, archive, weights=weights, name=name)


def _misfits(model: str, found: Model, new: Mapping[str, LazyTensor]) -> list[str]:
    problems = [f"{model}.{name}: missing" for name in found.weights if name not in new]
    problems += [
        f"{model}.{name}: the program has no such weight"
        for name in new
        if name not in found.weights
    ]
    for name, old in found.weights.items():
        tensor = new.get(name)
        if tensor is None:
            continue
        if not isinstance(old, LazyTensor) or old.traits.subclass is not None:
            problems.append(
                f"{model}.{name}: it is stored as a pickled object and cannot be replaced"
            )
        elif (tensor.dtype, tensor.shape) != (old.dtype, old.shape):
            problems.append(
                f"{model}.{name}: {tensor.dtype} {list(tensor.shape)} in place of {old.dtype} {list(old.shape)}"
            )
    return problems


def _weights(
    source: Source,
    key: str,
    archive: Archive,
    *,
    model: str,
    found: Model,
    new: Mapping[str, LazyTensor] | None,
) -> Mapping[str, LazyTensor | Pickled]:
    config = archive.get(f"{WEIGHTS}{model}{WEIGHTS_CONFIG}")
    if config is None:
        return {}
    weights: dict[str, LazyTensor | Pickled] = {}
    pickled = _pickled(source, key, archive, model=model, folder=WEIGHTS)
    for name in parse_config(
        record_bytes(source, key, config), source.limits, model=model, what="weight"
    ):
        old = found.weights[name]
        if name in pickled:
            weights[name] = pickled[name]
        elif isinstance(old, LazyTensor):
            tensor = old if new is None else new.get(name, old)
            traits = replace(
                old.traits, conj=tensor.traits.conj, neg=tensor.traits.neg, meta=tensor.traits.meta
            )
            weights[name] = replace(tensor, traits=traits)
    return weights


def _lay_out(
    source: Source,
    key: str,
    archive: Archive,
    *,
    weights: Mapping[str, Mapping[str, LazyTensor | Pickled]],
    name: str,
) -> SavePlan:
    configs = {f"{WEIGHTS}{model}{WEIGHTS_CONFIG}": model for model in weights}
    owners = _owners(source, key, archive, configs=configs)
    kept = frozenset(
        short for short in archive.names if short not in owners and short not in configs
    )
    placed = PlacedRecords(weights, f"{WEIGHTS}{WEIGHT}", taken=kept)
    if placed.problems:
        raise CannotHold("a pt2 archive cannot hold some of this state", placed.problems)
    records: list[tuple[str, Payload]] = []
    waiting = dict.fromkeys(weights)
    for short in archive.names:
        model = configs.get(short) or owners.get(short)
        record = archive.get(short)
        if model is None and short not in OWN and record is not None:
            records.append((short, copied(source, key, record) if record.nbytes else b""))
        elif model in waiting:
            del waiting[model]
            records += placed.records[model]
            records.append((f"{WEIGHTS}{model}{WEIGHTS_CONFIG}", placed.configs[model]))
    return lay_out_records(name, records, placed.notes)


def _owners(
    source: Source, key: str, archive: Archive, *, configs: Mapping[str, str]
) -> dict[str, str]:
    owners: dict[str, str] = {}
    for short, model in configs.items():
        record = archive.get(short)
        if record is not None:
            entries = parse_config(
                record_bytes(source, key, record), source.limits, model=model, what="weight"
            )
            for entry in entries.values():
                owners.setdefault(WEIGHTS + entry.record, model)
    return owners
