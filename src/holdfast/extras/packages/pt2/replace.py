"""Other weights in an archive that is there: a fine-tuned state into the same program, without exporting it again.

1. The new state must have the names, dtypes and shapes of the model's config. All differences are listed in one error.
2. Weight records and configs are written again. Unchanged models keep the sharing between them; replaced weights share a record if
   the new tensors do.
3. Every other record (programs, constants, sample inputs, compiled code, extra files) is copied.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from holdfast.core.checkpoint import Checkpoint
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
from holdfast.extras.packages.pt2.schema import TENSOR, WEIGHT, ConfigEntry, parse_config
from holdfast.extras.packages.pt2.write import (
    HEADER,
    Pickled,
    PlacedRecords,
    lay_out_pt2,
    lay_out_records,
    models_of,
)
from holdfast.formats import format_of
from holdfast.formats.torch.write import SERIALIZATION_ID, archive_name
from holdfast.formats.zip.layout import ZipRecord
from holdfast.formats.zip.reader import record_bytes
from holdfast.formats.zip.writer import Payload
from holdfast.verbs.shared.models import weights_of

BYTES = DTYPES.name("uint8")


class SideRecords(Value):
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
    """Return the side records of a model of an open archive. Reads the directory and the configs."""
    reader = Pt2Reader(source)
    archive = reader.archive
    program = archive.get(f"{MODELS}{model}.json")
    inputs = archive.get(f"{INPUTS}{model}.pt")
    if not archive.prefix:
        program = program or archive.get(OLD_PROGRAM)
        inputs = inputs or archive.get(OLD["sample_inputs"][0])
    extra: dict[str, Data | bytes] = {}
    others: Counter[str] = Counter()
    for short in archive.names:
        record = archive.get(short)
        if record is None or not short.startswith(LISTED):
            continue
        if short.startswith(EXTRAS):
            extra[short.partition("/")[2]] = copy_record(reader, record) if record.nbytes else b""
        else:
            others[short.rpartition("/")[0]] += 1
    return SideRecords(
        _read_pickled(reader, model, WEIGHTS),
        _read_pickled(reader, model, CONSTANTS),
        None if program is None or not program.nbytes else copy_record(reader, program),
        None if inputs is None or not inputs.nbytes else copy_record(reader, inputs),
        extra,
        tuple(
            f"{count:,} files in {folder}, which belong to compiled code"
            for folder, count in others.items()
        ),
    )


def _read_config(
    reader: Pt2Reader, model: str, folder: str
) -> tuple[bytes, dict[str, ConfigEntry]]:
    """Return the config of the weights or constants of a model and its entries; both empty if there is none."""
    is_weights = folder == WEIGHTS
    record = reader.archive.get(
        folder + model + (WEIGHTS_CONFIG if is_weights else CONSTANTS_CONFIG)
    )
    if record is None:
        return b"", {}
    raw = record_bytes(reader.source, reader.key, record)
    what = "weight" if is_weights else "constant"
    return raw, parse_config(raw, reader.source.limits, model=model, what=what)


def _read_pickled(reader: Pt2Reader, model: str, folder: str) -> dict[str, Pickled]:
    """Return the weights or constants of a model that are pickles in records of their own."""
    raw, entries = _read_config(reader, model, folder)
    pickled: dict[str, Pickled] = {}
    document: object = None
    for name, entry in entries.items():
        record = reader.archive.get(folder + entry.record)
        prefix = WEIGHT
        if folder == CONSTANTS:
            prefix = next((one for one in OBJECTS if entry.record.startswith(one)), TENSOR)
        if record is None or not (entry.use_pickle or prefix in OBJECTS):
            continue
        document = parse(raw, reader.source.limits) if document is None else document
        rows = document["config"] if isinstance(document, dict) else {}
        meta = rows[name].get("tensor_meta") or None
        pickled[name] = Pickled(copy_record(reader, record), prefix, meta, entry.is_param)
    return pickled


def copy_record(reader: Pt2Reader, record: ZipRecord) -> Data:
    """Return the bytes of a record as data to write. torch compresses no record."""
    if BYTES is None or not record.stored:
        raise Unsupported(
            f"the record {record.name!r} is compressed, and cannot be copied as it is",
            file=reader.key,
        )
    source = reader.source
    storage = Storage(
        reader.key,
        record.start,
        record.nbytes,
        "little",
        record.crc32,
        label=record.name,
        home=source.store,
    )
    row = LazyTensor.contiguous(record.name, BYTES, (record.nbytes,), storage, source)
    return Data(row, record.name)


OWN = frozenset({name for name, _ in HEADER} | {SERIALIZATION_ID, VERSION_RECORD, "version"})


def lay_out_replaced(
    source: Source, states: Mapping[str, Mapping[str, LazyTensor]], *, name: str = "archive"
) -> SavePlan:
    """The plan of an archive like the open one, with other weights. Raises `CannotHold` with all misfits, or `Unsupported`."""
    reader = Pt2Reader(source)
    models = reader.models()
    known = ", ".join(list(models)[:8])
    problems = [
        f"{model!r}: there is no such model; there are {known}"
        for model in states
        if model not in models
    ]
    weights: dict[str, Mapping[str, LazyTensor | Pickled]] = {}
    # The model whose config is first to name each record of a weight.
    owners: dict[str, str] = {}
    for model, found in models.items():
        raw, entries = _read_config(reader, model, WEIGHTS)
        new = states.get(model)
        if not raw:
            if new is not None:
                raise Unsupported(
                    f"the weights of model {model!r} are no records of their own; export it again",
                    file=reader.key,
                )
            continue
        if new is not None:
            problems += _misfits(model, found, new)
        weights[model] = _replace_weights(_read_pickled(reader, model, WEIGHTS), found, new or {})
        for entry in entries.values():
            owners.setdefault(WEIGHTS + entry.record, model)
    if problems:
        raise CannotHold("these weights do not fit the archive", problems)

    configs = {f"{WEIGHTS}{model}{WEIGHTS_CONFIG}": model for model in weights}
    kept = frozenset(reader.archive.names) - owners.keys() - configs.keys()
    placed = PlacedRecords(weights, f"{WEIGHTS}{WEIGHT}", taken=kept)
    if placed.problems:
        raise CannotHold("a pt2 archive cannot hold some of this state", placed.problems)
    records: list[tuple[str, Payload]] = []
    waiting = dict.fromkeys(weights)
    for short in reader.archive.names:
        owner = configs.get(short) or owners.get(short)
        record = reader.archive.get(short)
        if owner is None and short not in OWN and record is not None:
            records.append((short, copy_record(reader, record) if record.nbytes else b""))
        elif owner in waiting:
            del waiting[owner]
            records += placed.records[owner]
            records.append((f"{WEIGHTS}{owner}{WEIGHTS_CONFIG}", placed.configs[owner]))
    return lay_out_records(name, records, placed.notes)


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


def _replace_weights(
    pickled: Mapping[str, Pickled], found: Model, new: Mapping[str, LazyTensor]
) -> dict[str, LazyTensor | Pickled]:
    """Return the weights of a model as they are written: pickles as they are, tensors replaced by new ones of their names."""
    weights: dict[str, LazyTensor | Pickled] = {}
    for name, old in found.weights.items():
        if name in pickled:
            weights[name] = pickled[name]
        elif isinstance(old, LazyTensor):
            tensor = new.get(name, old)
            traits = replace(
                old.traits, conj=tensor.traits.conj, neg=tensor.traits.neg, meta=tensor.traits.meta
            )
            weights[name] = replace(tensor, traits=traits)
    return weights


def lay_out_rewritten(source: Checkpoint, tree: object, target: str) -> SavePlan:
    """Lay out the weights of a checkpoint as a `.pt2`. The programs of a `.pt2` are copied."""
    name = archive_name(target)
    if not format_of(source.format).programs:
        return lay_out_pt2(models_of({"model": tree}), name=name)
    models = weights_of(source, tree)
    if not any(models.values()):
        raise Unsupported("this package has no weights", file=source.path)
    plain = {
        model: weights
        for model, weights in models.items()
        if all(tensor.traits.subclass is None for tensor in weights.values())
    }
    notes = [
        f"model {model!r} has weights that are pickled objects, and keeps them all"
        for model in models
        if model not in plain
    ]
    plan = lay_out_replaced(source.source, plain, name=name)
    return replace(plan, notes=(*notes, *plan.notes))
