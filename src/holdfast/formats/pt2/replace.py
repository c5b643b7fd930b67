"""Other weights in an archive that is there: a fine-tuned state into the same program, without exporting it again.

1. The names of the new state must be those of the model's config, all of them, with their dtypes and shapes; whatever does not fit
   is listed together, and nothing is written.
2. Weight records and configs are laid out anew. Models that keep their weights keep the sharing between them; weights that shared a
   record share one afterwards only if the new ones do.
3. Every other record (programs, constants, sample inputs, compiled code, extra files) is copied as it is, streamed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from holdfast.core.protocols import Source
from holdfast.core.tensor import LazyTensor
from holdfast.errors import CannotHold, Unsupported
from holdfast.formats.pt2.copied import copied, pickled_weights
from holdfast.formats.pt2.read import VERSION_RECORD, WEIGHTS, WEIGHTS_CONFIG, Model, Pt2Reader
from holdfast.formats.pt2.schema import WEIGHT, parse_config
from holdfast.formats.pt2.write import HEADER, Pickled, lay_out_records, place_weights
from holdfast.formats.torch.write import SERIALIZATION_ID
from holdfast.formats.torch.zip import record_bytes
from holdfast.formats.zip.reader import Archive, read_archive
from holdfast.formats.zip.writer import Payload
from holdfast.plan.saves import SavePlan

__all__ = ["lay_out_replaced"]

OWN = frozenset({name for name, _ in HEADER} | {SERIALIZATION_ID, VERSION_RECORD, "version"})
"""Records that every archive has of its own."""


def lay_out_replaced(
    source: Source, states: Mapping[str, Mapping[str, LazyTensor]], *, name: str = "archive", trim: bool = True
) -> SavePlan:
    """The plan of an archive like the one that is open, with other weights for some of its models.

    Raises `CannotHold` with every name, dtype and shape that does not fit, and `Unsupported` for an archive that keeps the weights
    of such a model as one pickle.
    """
    (key,) = source.store.list()
    archive = read_archive(source, key)
    reader = Pt2Reader(source, key, archive)
    models = reader.models()
    known = ", ".join(list(models)[:8])
    problems = [f"{model!r}: there is no such model; there are {known}" for model in states if model not in models]
    weights: dict[str, Mapping[str, LazyTensor | Pickled]] = {}
    for model, found in models.items():
        if archive.get(f"{WEIGHTS}{model}{WEIGHTS_CONFIG}") is None:
            if model in states:
                raise Unsupported(f"the weights of model {model!r} are no records of their own; export it again", file=key)
            continue
        new = states.get(model)
        if new is not None:
            problems += _misfits(model, found, new)
        weights[model] = _weights(source, key, archive, model, found, new)
    if problems:
        raise CannotHold("these weights do not fit the archive", problems)
    return _lay_out(source, key, archive, weights, name=name, trim=trim)


def _misfits(model: str, found: Model, new: Mapping[str, LazyTensor]) -> list[str]:
    """Everything in which a new state differs from the one that is there, but for its elements."""
    problems = [f"{model}.{name}: missing" for name in found.weights if name not in new]
    problems += [f"{model}.{name}: the program has no such weight" for name in new if name not in found.weights]
    for name, old in found.weights.items():
        tensor = new.get(name)
        if tensor is None:
            continue
        if not isinstance(old, LazyTensor) or old.traits.subclass is not None:
            problems.append(f"{model}.{name}: it is stored as a pickled object and cannot be replaced")
        elif (tensor.dtype, tensor.shape) != (old.dtype, old.shape):
            problems.append(f"{model}.{name}: {tensor.dtype} {list(tensor.shape)} in place of {old.dtype} {list(old.shape)}")
    return problems


def _weights(
    source: Source, key: str, archive: Archive, model: str, found: Model, new: Mapping[str, LazyTensor] | None
) -> Mapping[str, LazyTensor | Pickled]:
    """The weights of a model as they are to be written, in the order of its config."""
    config = archive.get(f"{WEIGHTS}{model}{WEIGHTS_CONFIG}")
    if config is None:
        return {}
    weights: dict[str, LazyTensor | Pickled] = {}
    pickled = pickled_weights(source, key, archive, model)
    for name in parse_config(record_bytes(source, key, config), source.limits, model=model, what="weight"):
        old = found.weights[name]
        if name in pickled:
            weights[name] = pickled[name]
        elif isinstance(old, LazyTensor):
            tensor = old if new is None else new.get(name, old)
            traits = replace(old.traits, conj=tensor.traits.conj, neg=tensor.traits.neg, meta=tensor.traits.meta)
            weights[name] = replace(tensor, traits=traits)
    return weights


def _lay_out(
    source: Source,
    key: str,
    archive: Archive,
    weights: Mapping[str, Mapping[str, LazyTensor | Pickled]],
    *,
    name: str,
    trim: bool,
) -> SavePlan:
    """The records in the order of the old archive, with those of a model's weights where its first one was."""
    configs = {f"{WEIGHTS}{model}{WEIGHTS_CONFIG}": model for model in weights}
    owners = _owners(source, key, archive, configs)
    kept = frozenset(short for short in archive.names if short not in owners and short not in configs)
    placed = place_weights(weights, f"{WEIGHTS}{WEIGHT}", trim=trim, taken=kept)
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


def _owners(source: Source, key: str, archive: Archive, configs: Mapping[str, str]) -> dict[str, str]:
    """The weight records that are written anew, each with the first model that names it."""
    owners: dict[str, str] = {}
    for short, model in configs.items():
        record = archive.get(short)
        if record is not None:
            entries = parse_config(record_bytes(source, key, record), source.limits, model=model, what="weight")
            for entry in entries.values():
                owners.setdefault(WEIGHTS + entry.record, model)
    return owners
