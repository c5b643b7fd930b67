"""Lay out a `.pt2` archive: the weights of several models, each storage once, in the order and the bytes of torch's own writer.

For each model: its weight records that no model before has, its config, its constants and their config, its program and its sample
inputs, where there are any. Then what belongs to all:

    data/weights/weight_0 …      data/weights/<m>_weights_config.json
    data/constants/tensor_0 …    data/constants/<m>_constants_config.json
    models/<m>.json              data/sample_inputs/<m>.pt
    extra/…   archive_format   archive_version   .data/version   byteorder   .data/serialization_id

1. Tensors over one storage and of one dtype are views of one record, also in several models. torch's writer shares within a model
   only; its reader allows configs of several models to name one record.
2. A record has the bytes that its views reach. With `trim=False` it is the whole storage, as torch writes it.
3. Conjugated elements are resolved. Tensors that a config cannot describe (sparse, quantised, on the meta device) are refused
   in one error.

A package without a program is for Holdfast: `torch.export.load` finds no model in it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from msgspec import field

from holdfast.core.chunk import c_strides
from holdfast.core.dtype import DType
from holdfast.core.tensor import LazyTensor
from holdfast.core.tree import iterate_dict_leaves
from holdfast.core.value import Value
from holdfast.engine.saves import Data, FilePlan, SavePlan
from holdfast.errors import CannotHold
from holdfast.extras.packages.pt2.schema import RECORD, SCALARS, STRIDED, TENSOR, WEIGHT
from holdfast.formats.torch.pickled import StorageRecord, StorageRecords
from holdfast.formats.torch.write import add_serialization_id
from holdfast.formats.zip.writer import Payload, lay_out_zip

MODEL = "model"
"""torch's name for a program without a name, and the one that `torch.export.load` looks for."""

NUMBERS = {name: number for number, name in SCALARS.items()}

HEADER: tuple[tuple[str, bytes], ...] = (
    ("archive_format", b"pt2"), ("archive_version", b"0"), (".data/version", b"6\n"), ("byteorder", b"little"),
)  # fmt: skip
"""The last records. Tensors are written little-endian, on any machine."""


class Pickled(Value):
    """A weight or constant that is pickled: a tensor subclass in a `torch.save`, a torchbind object, a Python object."""

    content: bytes | Data
    prefix: str
    """`weight_`, `tensor_`, `custom_obj_` or `opaque_obj_`."""
    meta: Mapping[str, object] | None = None
    is_param: bool = False


class ModelWeights(Value):
    weights: Mapping[str, LazyTensor | Pickled]
    constants: Mapping[str, LazyTensor | Pickled] = field(default_factory=dict)
    program: bytes | Data | None = None
    sample_inputs: bytes | Data | None = None


def models_of(models_tree: object) -> dict[str, ModelWeights]:
    """The models of a tree `{name: state dict}`; tensors may be nested. Raises `CannotHold` with everything but lazy tensors."""
    problems: list[str] = []
    models: dict[str, ModelWeights] = {}
    if not isinstance(models_tree, dict) or not models_tree:
        raise CannotHold(
            "a package holds models by their names", ["the state is no dict of models"]
        )
    for model, tree in models_tree.items():
        weights: dict[str, LazyTensor | Pickled] = {}
        if not isinstance(model, str) or not isinstance(tree, dict):
            problems.append(
                f"{str(model)[:80]}: a {type(tree).__name__}, and no state dict under a name"
            )
            continue
        for name, value in iterate_dict_leaves(tree):
            if not isinstance(value, LazyTensor):
                problems.append(
                    f"{model}.{name}: a {type(value).__name__}, which a package of weights has no place for"
                )
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
    problems = [
        f"{model!r} is no name for a model"
        for model in models
        if model in (".", "..") or not RECORD(model)
    ]
    first: dict[str, str] = {}
    for model in models:
        other = first.setdefault(model.casefold(), model)
        if other != model:
            problems.append(
                f"{model!r} and {other!r} are one name for readers of zip archives, which ignore case"
            )
    weights_of = {model: part.weights for model, part in models.items()}
    constants_of = {model: part.constants for model, part in models.items()}
    weights = PlacedRecords(weights_of, f"data/weights/{WEIGHT}", trim=trim)
    constants = PlacedRecords(constants_of, f"data/constants/{TENSOR}", trim=trim)
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
    notes = [*weights.notes, *constants.notes]
    programs = [model for model, part in models.items() if part.program is not None]
    if programs and MODEL not in programs:
        # torch.export.load fails (torch 2.13: `KeyError: 'model'`). The names stay, since `load_pt2` gives
        # the programs back by name.
        way = f"torch.export.pt2_archive._package.load_pt2(path).exported_programs[{programs[0]!r}]"
        notes.append(
            f"torch.export.load loads a program named {MODEL!r}, and there is none; these are loaded by {way}"
        )
    return lay_out_records(name, records, notes)


def _named(record: str, content: bytes | Data) -> tuple[str, Payload]:
    return record, content if isinstance(content, bytes) else Data(content.tensor, record)


def lay_out_records(
    name: str, records: Sequence[tuple[str, Payload]], notes: Sequence[str] = ()
) -> SavePlan:
    """The archive of these records and of those that every archive ends with."""
    every = [*records, *HEADER]
    segments = lay_out_zip(name, add_serialization_id(every, crc=True))
    return SavePlan("pt2", (FilePlan("", segments),), tuple(notes))


Placed = tuple[StorageRecord, int, tuple[int, ...]] | LazyTensor | Pickled
"""A tensor in a storage's record, with its start and strides; or a tensor or pickle with a record of its own."""


class PlacedRecords:
    """The records of a folder, and the configs that name them.

    Every storage gets a record `<stem>N` that is not taken, and every name a line in its model's config.
    """

    def __init__(
        self,
        models: Mapping[str, Mapping[str, LazyTensor | Pickled]],
        stem: str,
        *,
        trim: bool = True,
        taken: frozenset[str] = frozenset(),
    ) -> None:
        self.records: dict[str, list[tuple[str, Payload]]] = {model: [] for model in models}
        """For each model the records that no model before it has."""
        self.configs: dict[str, bytes] = {}
        self.notes: list[str] = []
        self.problems: list[str] = []
        self._folder, _, self._prefix = stem.rpartition("/")
        self._trim, self._taken = trim, taken
        self._kinds: dict[DType, StorageRecords] = {}
        """torch has a record for each dtype over a storage; the records of one dtype share storages."""
        self._next: dict[str, int] = {}
        self._names: dict[int, str] = {}
        placed: list[tuple[str, str, LazyTensor | Pickled, Placed, str]] = []
        for model, tensors in models.items():
            # torch writes what it pickles before what it does not.
            ordered = sorted(tensors.items(), key=lambda item: isinstance(item[1], LazyTensor))
            for name, value in ordered:
                view = self._place(model, name, value)
                placed.append((model, name, value, view, self._record(value, view)))
        for kind in self._kinds.values():
            kind.close()

        known: set[str] = set()
        # The rows of each config, those over one record together.
        rows: dict[str, dict[str, dict[str, object]]] = {model: {} for model in models}
        for model, name, value, view, record in placed:
            if record not in known:
                known.add(record)
                self.records[model].append((record, self._payload(record, view)))
            rows[model].setdefault(record, {})[name] = self._row(record, value, view)
        for model, by_record in rows.items():
            config = {name: row for group in by_record.values() for name, row in group.items()}
            self.configs[model] = json.dumps({"config": config}).encode()

    def _place(self, model: str, name: str, value: LazyTensor | Pickled) -> Placed:
        """The record of a tensor's storage; or the value itself, if it is a pickle, is refused, or gets a record of its own."""
        if isinstance(value, Pickled):
            return value
        problem = _problem(value)
        if problem is not None:
            self.problems.append(f"{model}.{name}: {problem}")
            return value
        if value.traits.conj or value.traits.neg:
            self.notes.append(
                f"{model}.{name} is written as what it stands for: a config has no flag for conjugation"
            )
            return value
        kind = self._kinds.setdefault(value.dtype, StorageRecords(trim=self._trim))
        return kind.place(value, (model, name), len(kind.records))

    def _record(self, value: LazyTensor | Pickled, view: Placed) -> str:
        key = id(view[0] if isinstance(view, tuple) else value)
        if key not in self._names:
            prefix = value.prefix if isinstance(value, Pickled) else self._prefix
            number = self._next.get(prefix, 0)
            while f"{self._folder}/{prefix}{number}" in self._taken:
                number += 1
            self._next[prefix] = number + 1
            self._names[key] = f"{self._folder}/{prefix}{number}"
        return self._names[key]

    def _payload(self, record: str, view: Placed) -> Payload:
        if isinstance(view, Pickled):
            return _named(record, view.content)[1]
        return Data(view if isinstance(view, LazyTensor) else view[0].tensor(), record)

    def _row(self, record: str, value: LazyTensor | Pickled, view: Placed) -> dict[str, object]:
        is_pickled = isinstance(value, Pickled)
        if isinstance(value, Pickled):
            is_param, meta = value.is_param, value.meta
        else:
            offset, strides = 0, c_strides(value.shape, 1)
            if isinstance(view, tuple):
                stored, start, strides = view
                # The start of an empty tensor may lie before its record.
                offset = max(start - stored.base, 0) // value.dtype.bits
            is_param, meta = value.traits.parameter, _meta(value, strides, offset)
        path = record.rpartition("/")[2]
        return {
            "path_name": path,
            "is_param": is_param,
            "use_pickle": is_pickled,
            "tensor_meta": meta,
        }


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
    if tensor.dtype.name not in NUMBERS:
        return f"torch has no number for {tensor.dtype} in such a file"
    if tensor.traits.meta or not tensor.chunks:
        return "on the meta device it has no data, and torch would load zeros"
    if tensor.traits.subclass is not None:
        return f"a tensor of the class {tensor.traits.subclass}, which is more than its elements"
    return None
