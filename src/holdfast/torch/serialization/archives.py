"""The storages of a zip: the records `data/N`, found by their keys, and what is said of an archive that is broken."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from holdfast.errors import Refused, ZipError
from holdfast.formats.zip.layout import Archive, ZipRecord
from holdfast.torch.serialization.storages import StorageBytes, StorageName

LIKELY = "there is a high likelihood that your checkpoint file is corrupted: get it or save it again"


class BrokenArchive(ZipError, Refused):
    """A `ZipError` that is a RuntimeError as well, which is what torch raises for a broken archive."""


def broken_archive(message: str, *, file: str | None = None, offset: int | None = None) -> BrokenArchive:
    """The error for an archive, with what programs look for: whose reader failed, and that the file is likely corrupted."""
    return BrokenArchive(f"PytorchStreamReader {message} (an internal miniz error in torch); {LIKELY}", file=file, offset=offset)


def check_stored(record: ZipRecord) -> None:
    """Refuse a compressed record."""
    if not record.stored:
        raise broken_archive(f"the record {record.name!r} is compressed; torch stores it plainly", offset=record.header)


def archive_storages(archive: Archive) -> tuple[Callable[[StorageName], StorageBytes], Callable[[], Mapping[str, StorageBytes]]]:
    """How the records `data/N` of a zip are found: one by its key, and all of them."""

    def found(record: ZipRecord, key: str) -> StorageBytes:
        check_stored(record)
        return StorageBytes(record.start, record.nbytes, record.crc32, f"data/{key}")

    def find(name: StorageName) -> StorageBytes:
        record = archive.get(f"data/{name.key}")
        if record is None:
            raise broken_archive(
                f"failed locating file data/{name.key}: file not found; the pickle points at it, and it is not in the archive"
            )
        return found(record, name.key)

    def everything() -> dict[str, StorageBytes]:
        prefix = f"{archive.prefix}/data/" if archive.prefix else "data/"
        names = [name for name in archive.records if name.startswith(prefix)]
        return {name[len(prefix) :]: found(archive.records[name], name[len(prefix) :]) for name in names}

    return find, everything
