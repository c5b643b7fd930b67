"""The zip that `torch.save` writes since 1.6, and TorchScript archives, which share its container.

    prefix/data.pkl          the object, with a persistent id where a storage belongs
    prefix/data/0, data/1 …  raw storages
    prefix/byteorder         'little' or 'big' (torch 2.1 on)
    prefix/version           '3'
    prefix/constants.pkl     TorchScript only, with its tensors under constants/

Reading: the directory of the zip, the small text records, the pickles. Storages are only located.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from operator import is_

from msgspec import field

from holdfast.core.chunk import Storage
from holdfast.core.leaves import name_tensors
from holdfast.core.protocols import Description, Foreign, Source
from holdfast.core.runtime import copy_compactly
from holdfast.core.value import Value
from holdfast.engine.files import ViewTable
from holdfast.errors import (
    FormatError,
    HeaderError,
    MetadataError,
    PickleError,
    ZipError,
)
from holdfast.formats.pickle.machine import interpret_whole
from holdfast.formats.torch.storages import (
    ArchiveStorages,
    FoundStorages,
    RecordStorages,
    StorageId,
)
from holdfast.formats.torch.table import TorchTable
from holdfast.formats.zip.layout import Archive, ZipRecord
from holdfast.formats.zip.reader import read_archive, record_bytes

TEXT_NBYTES = 64
"""The longest of the small text records is the serialization id with 40 digits."""

VERSIONS = range(1, 11)
"""The versions that torch's reader accepts; `torch.save` writes 3."""

PICKLE, STORAGES = "data.pkl", "data/"


class SavedFile(Value, frozen=True):
    """The content of one file of `torch.save`; nothing of it was executed, and no tensor read."""

    format: str
    tree: object
    nbytes: int
    """Bytes of its pickle."""
    foreign: tuple[Foreign, ...] = ()
    notes: tuple[str, ...] = ()
    metadata: Mapping[str, str] = field(default_factory=dict)


def describe_saved(source: Source, read: Callable[[Source, str], SavedFile]) -> Description:
    """Describe the one file of a store, by the function that reads its container."""
    (key,) = source.store.list()
    saved = read(source, key)
    named = name_tensors(saved.tree, source.limits, saved.nbytes)
    table, notes = ViewTable(named.tensors), (*saved.notes, *named.notes)
    tree, tensors = saved.tree, named.tensors
    if type(tree) is dict and [*tree] == [*tensors]:
        # A plain dict of these tensors under their names, each a plain tensor: the table is the tree.
        is_same = all(map(is_, tree.values(), tensors.values()))
        all_traits = {id(tensor.traits): tensor.traits for tensor in tensors.values()}.values()
        is_plain = all(traits.subclass is None and traits.state is None for traits in all_traits)
        tree = table if is_same and is_plain else tree
    return Description(saved.format, table, tree, saved.foreign, notes, saved.metadata)


def read_torch_zip(source: Source, key: str) -> SavedFile:
    """Read a file. Its tensors lie in the store of the source, under the key of the file."""
    archive = saved_archive(source, key)
    reader = PickleReader(source, key, archive)
    tree, nbytes = reader.read(PICKLE, STORAGES)
    if archive.get("constants.pkl") is None:
        archive.records.fold()
        return SavedFile(
            "torch-zip", tree, nbytes, reader.foreign, tuple(reader.notes), reader.metadata
        )
    # The attributes of a scripted module have the names that its `state_dict()` has; its constants stand beside them.
    constants, more = reader.read("constants.pkl", "constants/")
    whole = (
        tree
        if isinstance(constants, tuple) and not constants
        else {"module": tree, "constants": constants}
    )
    code = sum(1 for name in archive.records if "/code/" in name)
    note = f"a TorchScript archive: its {code} code records are listed and never run; the tensors are read as data"
    return SavedFile(
        "torchscript",
        whole,
        nbytes + more,
        reader.foreign,
        (note, *reader.notes),
        reader.metadata,
    )


describe = partial(describe_saved, read=read_torch_zip)
"""Describe the one file of a store as a zip of torch."""


def saved_archive(source: Source, key: str) -> Archive:
    """The archive of a file that torch wrote: a checkpoint, or a TorchScript archive."""
    archive = read_archive(source, key)
    if not archive.root:
        # torch reads the folder of the first record, whatever lies beside it: what we show would not be what it loads.
        raise ZipError("the records of a checkpoint lie in one top folder; these do not", file=key)
    if archive.get(PICKLE) is None:
        raise FormatError("a zip archive without data.pkl: not a checkpoint that torch wrote")
    return archive


TEXTS = (
    "version",
    ".data/version",
    "byteorder",
    ".format_version",
    ".storage_alignment",
    ".data/serialization_id",
)
"""Records with a short text about the file."""


class PickleReader:
    """Reads the pickles of one archive, and knows where the storages are."""

    def __init__(self, source: Source, key: str, archive: Archive) -> None:
        self._source, self._key, self._archive = source, key, archive
        self._storages = RecordStorages(source, key, archive)
        self.foreign: tuple[Foreign, ...] = ()
        self.notes: list[str] = []
        self.metadata: dict[str, str] = {}
        for name in TEXTS:
            record = archive.get(name)
            if record is None:
                continue
            if record.nbytes > TEXT_NBYTES:
                raise HeaderError(
                    f"the {name} record is {record.nbytes} bytes long", found=record.nbytes
                )
            raw = record_bytes(source, key, record)
            self.metadata[name] = raw.decode("ascii", "backslashreplace")
        self.byteorder = self.metadata.get("byteorder", "little")
        if self.byteorder not in ("little", "big"):
            raise HeaderError(
                "the byteorder record says neither 'little' nor 'big'", found=self.byteorder
            )
        version = self.metadata.get(".data/version", self.metadata.get("version", "")).strip()
        if not version.isdecimal() or int(version) not in VERSIONS:
            raise HeaderError(
                "the version record is missing or not a version that torch reads", found=version
            )

    def read(self, name: str, folder: str) -> tuple[object, int]:
        """One pickle as a tree, and its length. Its storages are the records in `folder`."""
        record = self._archive.get(name)
        if record is None:
            raise FormatError(f"the archive has no {name}")
        source, storages = self._source, ArchiveStorages(self._storages, folder, self.byteorder)
        table = TorchTable(source, storages.persistent)
        # The content has no name here: it goes when it is read.
        most = source.limits.pickle_nbytes
        done = interpret_whole(
            record_bytes(source, self._key, record, most), table, limits=source.limits, stream=name
        )
        self.foreign += done.foreign
        value = done.value
        if type(value) is dict and {*map(type, value)} == {str}:
            # Names lie in memory between the tensors that were made with them. Copied now, while the tensors are there, the names
            # do not hold that memory when the tensors go. The dict stays the same object, because it may contain itself.
            names, values = copy_compactly([*value]), [*value.values()]
            value.clear()
            value.update(zip(names, values, strict=True))
        return value, record.nbytes


class Payloads:
    """Reads the records of one archive that hold something pickled, each once.

        record   │ PK… archive/data.pkl  archive/data/0 … │      weights of a subclass, sample inputs, legacy states: a whole zip
        record   │ \\x80\\x02 … .                          │      an object of Python's own: a pickle and nothing else

    Both go through the gates that a file of their own would: the strict zip reader, the closed interpreter. Tensors in them are
    lazy tensors over the outer file, so nothing of their data is read here. torch reads most of these records with
    `weights_only=False`.
    """

    def __init__(self, source: Source, key: str) -> None:
        self._source, self._key = source, key
        self._read: dict[str, object] = {}
        self.foreign: list[Foreign] = []
        self.nbytes = 0
        """Bytes of all pickles."""

    def value(self, record: ZipRecord) -> object:
        """The value in a record, read once."""
        if record.name not in self._read:
            if not record.stored:
                raise ZipError(
                    f"the record {record.name!r} is compressed; torch stores it plainly",
                    offset=record.header,
                )
            head = self._source.bytes(self._key, record.start, min(record.start + 4, record.stop))
            made = self._saved(record) if head == b"PK\3\4" else self._bare(record)
            self._read[record.name] = made
        return self._read[record.name]

    def _saved(self, record: ZipRecord) -> object:
        """A file of `torch.save` in a record."""
        archive = read_archive(self._source, self._key, start=record.start, stop=record.stop)
        if not archive.prefix or archive.get("constants.pkl") is not None:
            raise FormatError(
                f"the record {record.name!r} holds a zip that torch.save did not write",
                offset=record.start,
            )
        pickled = archive.get(PICKLE)
        if pickled is None:
            raise FormatError(
                f"the record {record.name!r} holds a zip without {PICKLE}", offset=record.start
            )
        byteorder = PickleReader(self._source, self._key, archive).byteorder
        content = record_bytes(self._source, self._key, pickled, self._source.limits.pickle_nbytes)
        storages = FoundStorages(
            self._source,
            lambda storage_id: self._storage(storage_id, archive, record, byteorder=byteorder),
        )
        return self._interpret(
            content, TorchTable(self._source, storages.persistent), f"{record.name}: {PICKLE}"
        )

    def _storage(
        self, storage_id: StorageId, archive: Archive, record: ZipRecord, *, byteorder: str
    ) -> Storage:
        stored = archive.get(STORAGES + storage_id.key)
        label = f"{record.name}: {STORAGES}{storage_id.key}"
        if stored is None:
            raise MetadataError(
                f"the pickle in {record.name!r} points at {STORAGES}{storage_id.key[:64]}, which is not there"
            )
        if not stored.stored:
            raise ZipError(f"the storage {label!r} is compressed", offset=stored.header)
        place = self._key, stored.start, stored.nbytes
        return Storage(
            *place, byteorder, stored.crc32, storage_id.location, label, home=self._source.store
        )

    def _bare(self, record: ZipRecord) -> object:
        """A pickle without storages."""
        content = record_bytes(self._source, self._key, record, self._source.limits.pickle_nbytes)
        return self._interpret(content, TorchTable(self._source, _no_storage), record.name)

    def _interpret(self, content: bytes, table: TorchTable, stream: str) -> object:
        done = interpret_whole(content, table, limits=self._source.limits, stream=stream)
        self.foreign += done.foreign
        self.nbytes += len(content)
        return done.value


def _no_storage(pid: object) -> object:
    raise PickleError(
        "a persistent id in a pickle that has no storages beside it", found=type(pid).__name__
    )
