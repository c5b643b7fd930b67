"""`torch.save` files and bare pickles inside of records, as data.

    record   │ PK… archive/data.pkl  archive/data/0 … │      weights of a subclass, sample inputs, legacy states: a whole zip
    record   │ \\x80\\x02 … .                          │      an object of Python's own: a pickle and nothing else

Both go through the gates that a file of their own would: the strict zip reader, the closed interpreter. Tensors in them are lazy
tensors over the outer file, so nothing of their data is read here. torch reads most of these records with `weights_only=False`.
"""

from __future__ import annotations

from holdfast.core.chunk import Storage
from holdfast.core.protocols import Foreign, Source
from holdfast.errors import FormatError, LimitExceeded, MetadataError, PickleError, ZipError
from holdfast.formats.pickle.machine import interpret_whole
from holdfast.formats.torch.table import StorageId, Storages, TorchTable
from holdfast.formats.torch.zip import PickleReader, record_bytes
from holdfast.formats.zip.reader import Archive, Record, read_archive

__all__ = ["Payloads"]

PICKLE = "data.pkl"
STORAGES = "data/"


class Payloads:
    """Reads the records of one archive that hold something pickled, each once."""

    def __init__(self, source: Source, key: str) -> None:
        self._source = source
        self._key = key
        self._read: dict[str, object] = {}
        self.foreign: list[Foreign] = []
        """Globals that were not built, in all of them."""
        self.nbytes = 0
        """Bytes of all pickles."""

    def value(self, record: Record) -> object:
        """What a record holds. Two names of one record have one value."""
        if record.name not in self._read:
            if not record.stored:
                raise ZipError(f"the record {record.name!r} is compressed; torch stores it plainly", offset=record.header)
            head = self._source.bytes(self._key, record.start, min(record.start + 4, record.stop))
            made = self._saved(record) if head == b"PK\3\4" else self._bare(record)
            self._read[record.name] = made
        return self._read[record.name]

    def _saved(self, record: Record) -> object:
        """A file of `torch.save` in a record."""
        archive = read_archive(self._source, self._key, start=record.start, stop=record.stop)
        if not archive.prefix or archive.get("constants.pkl") is not None:
            raise FormatError(f"the record {record.name!r} holds a zip that torch.save did not write", offset=record.start)
        pickled = archive.get(PICKLE)
        if pickled is None:
            raise FormatError(f"the record {record.name!r} holds a zip without {PICKLE}", offset=record.start)
        byteorder = PickleReader(self._source, self._key, archive).byteorder
        content = record_bytes(self._source, self._key, pickled, self._source.limits.pickle_nbytes)
        storages = Storages(self._source, lambda asked: self._storage(asked, archive, record, byteorder))
        return self._interpret(content, TorchTable(self._source, storages.persistent), f"{record.name}: {PICKLE}")

    def _storage(self, asked: StorageId, archive: Archive, record: Record, byteorder: str) -> Storage:
        stored = archive.get(STORAGES + asked.key)
        label = f"{record.name}: {STORAGES}{asked.key}"
        if stored is None:
            raise MetadataError(f"the pickle in {record.name!r} points at {STORAGES}{asked.key[:64]}, which is not there")
        if not stored.stored:
            raise ZipError(f"the storage {label!r} is compressed", offset=stored.header)
        place = self._key, stored.start, stored.nbytes
        return Storage(*place, byteorder, stored.crc32, asked.location, label, home=self._source.store)

    def _bare(self, record: Record) -> object:
        """A pickle without storages."""
        most = self._source.limits.pickle_nbytes
        if record.nbytes > most:
            raise LimitExceeded(
                f"{record.name} is {record.nbytes:,} bytes, above Limits(pickle_nbytes={most:,})",
                expected=most, found=record.nbytes,
            )  # fmt: skip
        return self._interpret(record_bytes(self._source, self._key, record), TorchTable(self._source, _no_storage), record.name)

    def _interpret(self, content: bytes, table: TorchTable, stream: str) -> object:
        done = interpret_whole(content, table, limits=self._source.limits, stream=stream)
        self.foreign += done.foreign
        self.nbytes += len(content)
        return done.value


def _no_storage(pid: object) -> object:
    raise PickleError("a persistent id in a pickle that has no storages beside it", found=type(pid).__name__)
