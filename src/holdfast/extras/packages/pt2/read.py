"""A `.pt2` archive as a tree of lazy tensors: the weights and constants of every model in it. Nothing in it is run or imported.

    data/weights/weight_0 …                     raw storages, each shared by all views of it
    data/weights/<m>_weights_config.json        name → record, dtype, sizes, strides, offset
    data/constants/tensor_0 …                   the same for constants; custom_obj_N and opaque_obj_N are pickles
    data/constants/<m>_constants_config.json
    data/weights/<m>.pt, data/constants/<m>.pt  older archives: a whole torch.save in place of the above
    models/<m>.json                             the program
    data/sample_inputs/<m>.pt                   a torch.save of the inputs that it was exported with
    data/aotinductor/<m>/…                      compiled code, listed and never loaded; weights_config.json for its weights
    extra/<name>                                texts

The tree of one model is its state dict, with everything else beside the weights:

    {"emb.weight": …, "head.weight": …, "constants": {"mask": …}, "sample_inputs": ((…,), {…})}

Several models are `{"encoder": {…}, "decoder": {…}}`. Compiled weights of a model with others are under `aotinductor`. A key that a
weight has already gets `#2`. The oldest archives are a plain zip of a few records (`OLD`), with one model.
"""

from __future__ import annotations

import re

from msgspec import Struct

from holdfast.core.box import Box
from holdfast.core.chunk import Chunk, Storage
from holdfast.core.dtype import DType
from holdfast.core.leaves import name_tensors
from holdfast.core.protocols import Description, Source
from holdfast.core.strict_json import describe_json, parse, quote
from holdfast.core.tensor import LazyTensor, Traits
from holdfast.core.value import replace
from holdfast.engine.files import ViewTable
from holdfast.errors import HeaderError, LimitExceeded, MetadataError, ZipError
from holdfast.extras.packages.pt2.archive import FORMAT_RECORD, OLD_PROGRAM
from holdfast.extras.packages.pt2.program import Program, check_weights, summarise
from holdfast.extras.packages.pt2.schema import (
    OBJECT,
    OPAQUE,
    TENSOR,
    ConfigEntry,
    TensorMeta,
    about,
    parse_config,
)
from holdfast.formats.torch.tensors import beyond, checked_shape, reach, strided_view
from holdfast.formats.torch.zip import Payloads, PickleReader
from holdfast.formats.zip.layout import ZipRecord
from holdfast.formats.zip.reader import read_archive, record_bytes

VERSION_RECORD, VERSION = "archive_version", "0"
MODELS, WEIGHTS, CONSTANTS, INPUTS, COMPILED = (
    "models/", "data/weights/", "data/constants/", "data/sample_inputs/", "data/aotinductor/",
)  # fmt: skip
MODEL_RECORD = re.compile(
    r"models/(.+)\.json|data/weights/(.+?)(?:_weights_config\.json|\.pt)|data/constants/(.+?)(?:_constants_config\.json|\.pt)"
    r"|data/sample_inputs/(.+)\.pt|data/aotinductor/([^/]+)/.*",
    re.DOTALL,
)
"""The names of records that belong to one model, with its name."""

EXTRAS = ("extra/", "extra_files/")
"""Folders of extra files; the second in the oldest archives."""

LISTED = (COMPILED, *EXTRAS, "data/executorch/", "data/mtia", "xl_model_weights/")
WEIGHTS_CONFIG, CONSTANTS_CONFIG, COMPILED_CONFIG = (
    "_weights_config.json",
    "_constants_config.json",
    "weights_config.json",
)

OLD = {
    "weights": ("serialized_state_dict.pt", "serialized_state_dict.json"),
    "constants": ("serialized_constants.pt", "serialized_constants.json"),
    "sample_inputs": ("serialized_example_inputs.pt",),
}
"""The records of the oldest archives. Those called `.json` are files of `torch.save` as well; torch 2.13 reads both."""

DEFAULT_MODEL = "model"
"""torch's name for the one program of `torch.export.save`."""

OBJECTS = (OBJECT, OPAQUE)

TEXT_NBYTES, TEXTS = 4 << 10, 32
"""Extra files up to this size, and so many of them, are metadata; others are listed."""

Values = dict[str, object]


class Model(Struct):
    weights: Values = {}
    constants: Values = {}
    compiled: Values = {}
    sample_inputs: object = None
    program: Program | None = None

    def tree(self) -> Values:
        tree = dict(self.weights)
        weights = self.compiled if not tree else {}
        tree |= weights
        rest: list[tuple[str, object]] = [
            ("constants", self.constants),
            ("sample_inputs", self.sample_inputs),
        ]
        if not weights:
            rest.append(("aotinductor", self.compiled))
        for key, value in rest:
            if value is None or (isinstance(value, dict) and not value):
                continue
            taken = any(name == key or name.startswith(f"{key}.") for name in tree)
            tree[f"{key}#2" if taken else key] = value
        return tree


def describe_pt2(source: Source) -> Description:
    reader = Pt2Reader(source)
    models = reader.old() if reader.is_old else reader.models()
    trees = {name: model.tree() for name, model in models.items()}
    tree: Values = {**trees} if len(trees) != 1 else trees.popitem()[1]
    named = name_tensors(tree, source.limits, reader.nbytes)
    programs = {name: model.program for name, model in models.items() if model.program is not None}
    notes = (
        *(f"model {quote(name)} {program}" for name, program in programs.items()),
        *reader.notes,
        *named.notes,
    )
    metadata = {"models": ", ".join(models)}
    for name, program in programs.items():
        prefix = f"{name}." if len(models) > 1 else ""
        metadata |= {prefix + key: text for key, text in program.texts().items()}
    metadata |= {key: text for key, text in reader.texts.items() if key not in metadata}
    return Description(
        "pt2", ViewTable(named.tensors), tree, tuple(reader.payloads.foreign), notes, metadata
    )


def program_names(source: Source) -> list[str]:
    """The models of an archive that have programs, also unreadable ones. Reads the directory."""
    reader = Pt2Reader(source)
    if reader.is_old:
        return [DEFAULT_MODEL]
    programs = {name: reader.archive.get(f"{MODELS}{name}.json") for name in reader.names()}
    return [name for name, record in programs.items() if record is not None]


class Pt2Reader:
    """Reads the models of one archive, which is all of a source."""

    def __init__(self, source: Source) -> None:
        (key,) = source.store.list()
        self.source, self.key, self.archive = source, key, read_archive(source, key)
        self.payloads = Payloads(source, key)
        self.notes: list[str] = []
        self.texts: dict[str, str] = {}
        self._byteorder = "little"
        self._configs = 0
        self._raw: dict[str, tuple[DType, Storage, str]] = {}
        """For each raw record its dtype, its storage, and the first name for it."""
        self._empty = 0

    @property
    def nbytes(self) -> int:
        return self._configs + self.payloads.nbytes

    @property
    def is_old(self) -> bool:
        """Whether this is one of the oldest archives: a plain zip with one model."""
        return self.archive.get(OLD_PROGRAM) is not None and not self.archive.prefix

    def models(self) -> dict[str, Model]:
        self._check_header()
        models: dict[str, Model] = {}
        for name in self.names():
            models[name] = Model(
                self._part(name, WEIGHTS, WEIGHTS_CONFIG, what="weight"),
                self._part(name, CONSTANTS, CONSTANTS_CONFIG, what="constant"),
                self._compiled(name),
                self._payload(INPUTS + name + ".pt", name, "sample inputs"),
                self.program(name, MODELS + name + ".json"),
            )
            self._check_weights(name, models[name])
        if self._empty:
            self.notes.append(
                f"{self._empty:,} tensors were exported without data (fake tensors); torch loads zeros for them"
            )
        self._list_rest()
        return models

    def _check_weights(self, name: str, model: Model) -> None:
        if model.program is not None:
            self.notes += check_weights(
                model.program, name, model.weights, constants=model.constants
            )

    def names(self) -> list[str]:
        """Return the models that the names of records mention, in their order."""
        matches = filter(None, map(MODEL_RECORD.fullmatch, self.archive.names))
        return list(dict.fromkeys(match[match.lastindex or 0] for match in matches))

    def old(self) -> dict[str, Model]:
        """The one model of the oldest archives: a plain zip, with a torch.save for each part."""
        program = self.program(DEFAULT_MODEL, OLD_PROGRAM)
        saved: dict[str, object] = {}
        for part, names in OLD.items():
            record = next((name for name in names if self.archive.get(name)), names[0])
            saved[part] = self._payload(record, DEFAULT_MODEL, part.replace("_", " "))
        model = Model(
            self._names_of(saved["weights"], DEFAULT_MODEL, "weight"),
            self._names_of(saved["constants"], DEFAULT_MODEL, "constant"),
            sample_inputs=saved["sample_inputs"],
            program=program,
        )
        version = self.archive.get("version")
        if version is not None:
            self.texts["version"] = self._bytes(version).decode("ascii", "backslashreplace").strip()
        self._check_weights(DEFAULT_MODEL, model)
        self._list_rest()
        return {DEFAULT_MODEL: model}

    def program(self, model: str, name: str) -> Program | None:
        """The summary of a program, or None if there is none or it is unreadable; then a note gives the reason."""
        record = self.archive.get(name)
        if record is None:
            return None
        if record.nbytes > self.source.limits.header_nbytes:
            limit = f"Limits(header_nbytes={self.source.limits.header_nbytes:,})"
            self.notes.append(
                f"the program of model {quote(model)} is {record.nbytes:,} bytes, above {limit}: not looked at"
            )
            return None
        try:
            return summarise(self._bytes(record))
        except ValueError as error:
            self.notes.append(
                f"the program of model {quote(model)} cannot be read: {str(error)[:200]}"
            )
            return None

    def _check_header(self) -> None:
        if not self.archive.prefix:
            raise ZipError(
                "the records of a pt2 archive lie in one top folder; these do not", file=self.key
            )
        if (
            self.archive.get("data.pkl") is not None
            or self.archive.get("constants.pkl") is not None
        ):
            raise ZipError(
                "a pt2 archive with a data.pkl: torch.load and torch.export.load read different things",
                file=self.key,
            )
        header = PickleReader(self.source, self.key, self.archive)
        self._byteorder = header.byteorder
        self.texts |= header.metadata
        for name, expected in ((FORMAT_RECORD, "pt2"), (VERSION_RECORD, VERSION)):
            record = self.archive.get(name)
            found = (
                None
                if record is None
                else self._bytes(record, 64).decode("ascii", "backslashreplace")
            )
            if found != expected:
                raise HeaderError(
                    f"the record {name} says {found!r} and not {expected!r}",
                    expected=expected,
                    found=found,
                )
            self.texts[name] = found

    def _bytes(self, record: ZipRecord, most: int | None = None) -> bytes:
        limit = self.source.limits.header_nbytes
        if most is not None and record.nbytes > most:
            raise HeaderError(
                f"the record {record.name!r} is {record.nbytes:,} bytes long", found=record.nbytes
            )
        if record.nbytes > limit:
            message = (
                f"{record.name} is {record.nbytes:,} bytes, above Limits(header_nbytes={limit:,})"
            )
            raise LimitExceeded(message, expected=limit, found=record.nbytes)
        return record_bytes(self.source, self.key, record)

    def _part(self, model: str, folder: str, suffix: str, *, what: str) -> Values:
        config = self.archive.get(folder + model + suffix)
        legacy = self.archive.get(f"{folder}{model}.pt")
        if config is not None and legacy is not None:
            raise HeaderError(
                f"the {what}s of model {quote(model)} are described twice, by a config and by a torch.save"
            )
        if config is None:
            return self._names_of(
                self._payload(f"{folder}{model}.pt", model, f"{what}s"), model, what
            )
        raw = self._bytes(config)
        self._configs += len(raw)
        values: Values = {}
        entries = parse_config(raw, self.source.limits, model=model, what=what)
        for name, entry in entries.items():
            with about(model, what, name):
                values[name] = self._value(folder, model, name, entry=entry)
        return values

    def _value(self, folder: str, model: str, name: str, *, entry: ConfigEntry) -> object:
        record = self.archive.get(folder + entry.record)
        if record is None:
            raise MetadataError(
                f"there is no record {folder}{entry.record[:80]}", found=entry.record
            )
        if folder == CONSTANTS and entry.record.startswith(OBJECTS):
            return self.payloads.value(record)
        if folder == CONSTANTS and not entry.record.startswith(TENSOR):
            raise HeaderError(
                f"a constant in the record {quote(entry.record)}, which is neither a tensor's nor an object's"
            )
        if entry.use_pickle:
            return _checked(self.payloads.value(record), entry)
        if entry.meta is None:
            raise HeaderError("a raw tensor without tensor_meta")
        return self._view(record, entry.meta, f"{model}.{name}", is_param=entry.is_param)

    def _view(
        self, record: ZipRecord, meta: TensorMeta, name: str, *, is_param: bool
    ) -> LazyTensor:
        traits = Traits(requires_grad=meta.requires_grad, parameter=is_param)
        if not record.nbytes and 0 not in meta.sizes:
            # A fake tensor had no bytes to write, and all that it had is here.
            self._empty += 1
            shape = checked_shape(meta.sizes, self.source.limits)
            return LazyTensor("", meta.dtype, shape, (), self.source, replace(traits, meta=True))
        if record.name not in self._raw:
            if not record.stored:
                raise ZipError(f"the storage {record.name!r} is compressed", offset=record.header)
            if record.nbytes * 8 % meta.dtype.bits:
                message = f"the record {record.name!r} has {record.nbytes:,} bytes, which are no whole elements of {meta.dtype}"
                raise MetadataError(message, found=record.nbytes)
            label = record.name.removeprefix(f"{self.archive.prefix}/")
            storage = Storage(
                self.key,
                record.start,
                record.nbytes,
                self._byteorder,
                record.crc32,
                meta.location,
                label,
                home=self.source.store,
            )
            self._raw[record.name] = meta.dtype, storage, name
        dtype, storage, first = self._raw[record.name]
        if dtype is not meta.dtype:
            message = (
                f"the record {record.name!r} is {dtype} for {quote(first)} and {meta.dtype} here"
            )
            raise MetadataError(message, expected=dtype.name, found=meta.dtype.name)
        shape, strides, offset, last = reach(
            meta.offset, meta.sizes, meta.strides, self.source.limits
        )
        bits, room = dtype.bits, storage.nbytes * 8 // dtype.bits
        if last >= room:
            raise beyond(last, room)
        if last < 0:
            strides, offset = (0,) * len(shape), 0
        chunk = Chunk(Box.whole(shape), storage, offset * bits, tuple([s * bits for s in strides]))
        return LazyTensor("", dtype, shape, (chunk,), self.source, traits)

    def _payload(self, name: str, model: str, what: str) -> object:
        """The content of a `torch.save` in a record; None if there is no such record."""
        record = self.archive.get(name)
        if record is None or not record.nbytes:
            # torch writes no bytes for a program without sample inputs.
            return None
        with about(model, f"the {what}"):
            return self.payloads.value(record)

    def _names_of(self, value: object, model: str, what: str) -> Values:
        if value is None:
            return {}
        if not isinstance(value, dict) or not all(isinstance(name, str) for name in value):
            raise MetadataError(
                f"the {what}s of model {quote(model)} are no dict of names",
                found=type(value).__name__,
            )
        return dict(value)

    def _compiled(self, model: str) -> Values:
        """The weights of compiled code: `{name: [record, sizes, strides, offset]}` over tensors that torch.save wrote."""
        config = self.archive.get(f"{COMPILED}{model}/{COMPILED_CONFIG}")
        if config is None:
            return {}
        raw = self._bytes(config)
        self._configs += len(raw)
        with about(model, "the config of the compiled weights"):
            document = parse(raw, self.source.limits)
        if not isinstance(document, dict):
            raise HeaderError(
                f"the config of the compiled weights of model {quote(model)} is {describe_json(document)}"
            )
        values: Values = {}
        for name, row in document.items():
            with about(model, "compiled weight", name):
                values[name] = self._compiled_view(row)
        return values

    def _compiled_view(self, row: object) -> object:
        match row:
            case [str(path), list(sizes), list(strides), int(offset)] if type(offset) is int:
                record = self.archive.get(WEIGHTS + path)
            case _:
                raise HeaderError(
                    f"a record, sizes, strides and an offset were expected, not {describe_json(row)}"
                )
        if record is None:
            raise MetadataError(f"there is no record {WEIGHTS}{path[:80]}", found=path)
        saved = self.payloads.value(record)
        if not isinstance(saved, LazyTensor) or len(saved.chunks) != 1:
            raise MetadataError(
                f"the record {record.name!r} holds no plain tensor", found=type(saved).__name__
            )
        storage, dtype = saved.chunks[0].storage, saved.dtype
        whole = LazyTensor.contiguous(
            "", dtype, (storage.nbytes * 8 // dtype.bits,), storage, self.source
        )
        return strided_view(whole, dtype, (offset, sizes, strides), Traits())

    def _list_rest(self) -> None:
        """Add notes on other content: compiled code by model, extra files, folders of other programs."""
        groups: dict[str, list[ZipRecord]] = {}
        prefix = f"{self.archive.prefix}/" if self.archive.prefix else ""
        room = TEXTS
        for name in self.archive.records:
            short = name.removeprefix(prefix)
            if not short.startswith(LISTED):
                continue
            record = self.archive.records[name]
            if short.startswith(COMPILED):
                groups.setdefault(
                    COMPILED + short.removeprefix(COMPILED).partition("/")[0], []
                ).append(record)
            elif short.startswith(EXTRAS):
                if room and record.stored and record.nbytes <= TEXT_NBYTES:
                    self.texts[short] = self._bytes(record).decode("utf-8", "backslashreplace")
                    room -= 1
                else:
                    groups.setdefault("extra files", []).append(record)
            else:
                groups.setdefault("/".join(short.split("/")[:2]), []).append(record)
        for folder, records in groups.items():
            nbytes = sum(record.nbytes for record in records)
            names = ", ".join(record.name.rpartition("/")[2][:40] for record in records[:3]) + (
                ", …" if len(records) > 3 else ""
            )
            self.notes.append(
                f"{folder}: {len(records):,} files, {nbytes:,} bytes ({names}); listed, not loaded"
            )


def _checked(value: object, entry: ConfigEntry) -> object:
    if isinstance(value, LazyTensor) and entry.meta is not None:
        if value.dtype is not entry.meta.dtype or value.shape != entry.meta.sizes:
            raise MetadataError(
                f"the config says {entry.meta.dtype} {list(entry.meta.sizes)}, the pickle holds {value.dtype} {list(value.shape)}",
                expected=(entry.meta.dtype.name, entry.meta.sizes),
                found=(value.dtype.name, value.shape),
            )
        if entry.is_param != value.traits.parameter:
            return replace(value, traits=replace(value.traits, parameter=entry.is_param))
    return value
