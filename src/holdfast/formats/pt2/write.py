"""Lay out a `.pt2` archive: the weights of several models, each storage once, in the order and the bytes of torch's own writer.

For each model: its weight records that no model before has, its config, its constants and their config, its program and its sample
inputs, where there are any. Then what belongs to all:

    data/weights/weight_0 …      data/weights/<m>_weights_config.json
    data/constants/tensor_0 …    data/constants/<m>_constants_config.json
    models/<m>.json              data/sample_inputs/<m>.pt
    extra/…   archive_format   archive_version   .data/version   byteorder   .data/serialization_id

1. Tensors over one storage and of one dtype are one record, whichever models they belong to; each is a view of it. torch's writer
   shares within a model only, and its reader does not mind: a config may name a record that another model's names, too.
2. A record holds what its views reach. With `trim=False` it is the whole storage, as torch writes it.
3. What a config has no way to say is written in another way, or refused with all the rest: conjugated elements are resolved, sparse
   and quantised tensors are no raw records, the meta device has no bytes.

A package without a program is for us: `torch.export.load` says that there is no model in it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence

from msgspec import Struct, field

from holdfast.core.chunk import c_strides
from holdfast.core.dtype import DType
from holdfast.core.tensor import LazyTensor
from holdfast.core.tree import dict_leaves
from holdfast.core.value import Value
from holdfast.engine.saves import Data, FilePlan, Late, SavePlan
from holdfast.errors import CannotHold
from holdfast.formats.pt2.schema import SCALARS, STRIDED, TENSOR, WEIGHT
from holdfast.formats.torch.pickled import StorageRecord, StorageRecords
from holdfast.formats.torch.write import NBYTES, SERIALIZATION_ID, Identity
from holdfast.formats.zip.writer import Payload, lay_out_zip

MODEL = "model"
"""What torch calls a program that is given without a name, and the one that `torch.export.load` looks for."""

NUMBERS = {name: number for number, name in SCALARS.items()}

HEADER: tuple[tuple[str, bytes], ...] = (
    ("archive_format", b"pt2"), ("archive_version", b"0"), (".data/version", b"6\n"), ("byteorder", b"little"),
)  # fmt: skip
"""The last records. Tensors are written little-endian, on any machine."""


class Pickled(Value, frozen=True):
    """A weight or constant that is no raw record: a tensor subclass in a `torch.save`, a torchbind object, one of Python's."""

    content: bytes | Data
    prefix: str
    """`weight_`, `tensor_`, `custom_obj_` or `opaque_obj_`."""
    meta: Mapping[str, object] | None = None
    """Its `tensor_meta`, where it is a tensor."""
    is_param: bool = False


class ModelWeights(Value, frozen=True):
    weights: Mapping[str, LazyTensor | Pickled]
    constants: Mapping[str, LazyTensor | Pickled] = field(default_factory=dict)
    program: bytes | Data | None = None
    """The text of `models/<m>.json`."""
    sample_inputs: bytes | Data | None = None
    """A file of `torch.save`."""


def models_of(models_tree: object) -> dict[str, ModelWeights]:
    """The models of a tree `{name: state dict}`; tensors may be nested. Raises `CannotHold` with all that is no lazy tensor."""
    problems: list[str] = []
    models: dict[str, ModelWeights] = {}
    if not isinstance(models_tree, dict) or not models_tree:
        raise CannotHold("a package holds models by their names", ["the state is no dict of models"])
    for model, tree in models_tree.items():
        weights: dict[str, LazyTensor | Pickled] = {}
        if not isinstance(model, str) or not isinstance(tree, dict):
            problems.append(f"{str(model)[:80]}: a {type(tree).__name__}, and no state dict under a name")
            continue
        for name, value in dict_leaves(tree):
            if not isinstance(value, LazyTensor):
                problems.append(f"{model}.{name}: a {type(value).__name__}, which a package of weights has no place for")
            elif name in weights:
                problems.append(f"{model}.{name}: two tensors of this name")
            else:
                weights[name] = value
        models[model] = ModelWeights(weights)
    if problems:
        raise CannotHold("a package of weights cannot hold some of this state", problems)
    return models


def lay_out_pt2(
    models: Mapping[str, ModelWeights],
    *,
    name: str = "archive",
    extra: Mapping[str, bytes | Data] | None = None,
    trim: bool = True,
) -> SavePlan:
    """The plan of one file, format `pt2`. `name` is the folder in the archive (`archive_name` of the path).

    Raises `CannotHold` with every tensor that has no place in such a file, by model and name.
    """
    problems = [f"{model!r} is no name for a model" for model in models if not _plain(model)]
    first = {model.casefold(): model for model in reversed(list(models))}
    twice = [(model, first[model.casefold()]) for model in models if first[model.casefold()] != model]
    problems += [f"{model!r} and {other!r} are one name for readers of zip archives, which ignore case" for model, other in twice]
    weights = place_weights({model: part.weights for model, part in models.items()}, f"data/weights/{WEIGHT}", trim=trim)
    constants = place_weights({model: part.constants for model, part in models.items()}, f"data/constants/{TENSOR}", trim=trim)
    problems += [*weights.problems, *constants.problems]
    if problems:
        raise CannotHold("a pt2 archive cannot hold some of this state", problems)
    records: list[tuple[str, Payload]] = []
    for model, part in models.items():
        records += weights.records[model]
        records.append((f"data/weights/{model}_weights_config.json", weights.configs[model]))
        records += constants.records[model]
        records.append((f"data/constants/{model}_constants_config.json", constants.configs[model]))
        if part.program is not None:
            records.append(_named(f"models/{model}.json", part.program))
        if part.sample_inputs is not None:
            records.append(_named(f"data/sample_inputs/{model}.pt", part.sample_inputs))
    records += [_named(f"extra/{key}", content) for key, content in (extra or {}).items()]
    return lay_out_records(name, records, (*weights.notes, *constants.notes, *_unlooked_for(models)))


def _unlooked_for(models: Mapping[str, ModelWeights]) -> Iterator[str]:
    """That `torch.export.load` fails on programs of these names (torch 2.13: `KeyError: 'model'`), and what loads them."""
    programs = [model for model, part in models.items() if part.program is not None]
    if programs and MODEL not in programs:
        # Their names stay as they are, since `load_pt2` gives the programs back by them.
        way = f"torch.export.pt2_archive._package.load_pt2(path).exported_programs[{programs[0]!r}]"
        yield f"torch.export.load loads a program named {MODEL!r}, and there is none; these are loaded by {way}"


def _named(record: str, content: bytes | Data) -> tuple[str, Payload]:
    """A record with its content, whose label is the record's own name."""
    return record, content if isinstance(content, bytes) else Data(content.tensor, record)


def lay_out_records(name: str, records: Sequence[tuple[str, Payload]], notes: Sequence[str] = ()) -> SavePlan:
    """The archive around records, with those at its end that say what it is."""
    every = [*records, *HEADER]
    identity = Late(NBYTES, Identity(every, crc=True))
    segments = lay_out_zip(name, [*every, (SERIALIZATION_ID, identity)])
    return SavePlan("pt2", (FilePlan("", segments),), tuple(notes))


def _plain(model: str) -> bool:
    return bool(model) and model not in (".", "..") and not any(c in "/\\:\0" for c in model)


class PlacedRecords(Struct):
    """The records of some folder, and the configs that name them."""

    records: dict[str, list[tuple[str, Payload]]] = field(default_factory=dict)
    """For each model, those that none before it has."""
    configs: dict[str, bytes] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def place_weights(
    models: Mapping[str, Mapping[str, LazyTensor | Pickled]], stem: str, *, trim: bool = True, taken: frozenset[str] = frozenset()
) -> PlacedRecords:
    """Give every storage a record `<stem>N` that is not taken, and every name a line in its model's config."""
    return _Placing(stem, trim, taken).run(models)


class _View(Struct):
    """A tensor in its record."""

    record: StorageRecord
    start: int
    strides: tuple[int, ...]


class _Placing:
    def __init__(self, stem: str, trim: bool, taken: frozenset[str]) -> None:
        self._folder, _, self._prefix = stem.rpartition("/")
        self._trim = trim
        self._taken = taken
        self._kinds: dict[DType, StorageRecords] = {}
        """torch has a record for each dtype over a storage; the records of one dtype share what they can."""
        self._next: dict[str, int] = {}
        self._names: dict[int, str] = {}
        self.placed = PlacedRecords()

    def run(self, models: Mapping[str, Mapping[str, LazyTensor | Pickled]]) -> PlacedRecords:
        views: dict[tuple[str, str], _View | LazyTensor | Pickled] = {}
        order: dict[str, dict[str, list[str]]] = {}
        pickles: dict[str, str] = {}
        first: dict[str, list[tuple[str, _View | LazyTensor | Pickled]]] = {}
        for model, tensors in models.items():
            order[model], first[model] = {}, []
            # torch writes what it pickles before what it does not.
            for name, value in sorted(tensors.items(), key=lambda item: isinstance(item[1], LazyTensor)):
                view = self._place(model, name, value)
                views[model, name] = view
                record = self._record(value, view)
                if record not in pickles:
                    pickles[record] = model
                    first[model].append((record, view))
                order[model].setdefault(record, []).append(name)
        for kind in self._kinds.values():
            kind.close()
        for model in models:
            self.placed.records[model] = [(record, self._payload(record, view)) for record, view in first[model]]
            rows = {name: self._row(record, models[model][name], views[model, name])
                    for record, names in order[model].items() for name in names}  # fmt: skip
            self.placed.configs[model] = json.dumps({"config": rows}).encode()
        return self.placed

    def _place(self, model: str, name: str, value: LazyTensor | Pickled) -> _View | LazyTensor | Pickled:
        """Where a tensor goes: into a record of its storage, or one of its own; pickles and what is refused are given back."""
        if isinstance(value, Pickled):
            return value
        problem = _problem(value)
        if problem is not None:
            self.placed.problems.append(f"{model}.{name}: {problem}")
            return value
        if value.traits.conj or value.traits.neg:
            self.placed.notes.append(f"{model}.{name} is written as what it stands for: a config has no flag for conjugation")
            return value
        kind = self._kinds.setdefault(value.dtype, StorageRecords(trim=self._trim))
        return _View(*kind.place(value, (model, name), len(kind.records)))

    def _record(self, value: LazyTensor | Pickled, view: _View | LazyTensor | Pickled) -> str:
        """The name of a record, the next free one where it is new."""
        key = id(view.record if isinstance(view, _View) else value)
        if key not in self._names:
            prefix = value.prefix if isinstance(value, Pickled) else self._prefix
            number = self._next.get(prefix, 0)
            while f"{self._folder}/{prefix}{number}" in self._taken:
                number += 1
            self._next[prefix] = number + 1
            self._names[key] = f"{self._folder}/{prefix}{number}"
        return self._names[key]

    def _payload(self, record: str, view: _View | LazyTensor | Pickled) -> Payload:
        match view:
            case Pickled(content=bytes() as content):
                return content
            case Pickled(content=Data() as content):
                return Data(content.tensor, record)
            case _View():
                return Data(view.record.tensor(), record)
            case LazyTensor():
                return Data(view, record)
        raise TypeError(f"no payload is made of a {type(view).__name__}")

    def _row(self, record: str, value: LazyTensor | Pickled, view: _View | LazyTensor | Pickled) -> dict[str, object]:
        path = record.rpartition("/")[2]
        if isinstance(value, Pickled):
            return {"path_name": path, "is_param": value.is_param, "use_pickle": True, "tensor_meta": value.meta}
        offset, strides = 0, c_strides(value.shape, 1)
        if isinstance(view, _View):
            # An empty tensor begins nowhere, and may come before what its record holds.
            offset, strides = max(view.start - view.record.base, 0) // value.dtype.bits, view.strides
        meta = _meta(value, strides, offset)
        return {"path_name": path, "is_param": value.traits.parameter, "use_pickle": False, "tensor_meta": meta}


def _meta(tensor: LazyTensor, strides: Sequence[int], offset: int) -> dict[str, object]:
    location = (tensor.chunks[0].storage.location if tensor.chunks else "") or "cpu"
    kind, _, index = location.partition(":")
    return {
        "dtype": NUMBERS.get(tensor.dtype.name, 0),
        "sizes": [{"as_int": size} for size in tensor.shape],
        "requires_grad": tensor.traits.requires_grad,
        "device": {"type": kind, "index": int(index) if index.isdecimal() else None},
        "strides": [{"as_int": stride} for stride in strides],
        "storage_offset": {"as_int": offset},
        "layout": STRIDED,
    }


def _problem(tensor: LazyTensor) -> str | None:
    """Why a tensor cannot be a raw record."""
    if tensor.dtype.name not in NUMBERS:
        return f"torch has no number for {tensor.dtype} in such a file"
    if tensor.traits.meta or not tensor.chunks:
        return "on the meta device it has no data, and torch would load zeros"
    if tensor.traits.subclass is not None:
        return f"a tensor of the class {tensor.traits.subclass}, which is more than its elements"
    return None
