"""`Archive` and `Record`: what the strict reader found."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from holdfast.formats.zip.layout import Ints

__all__ = ["Archive", "Record", "Records"]


@dataclass(frozen=True, slots=True)
class Record:
    """One record of a zip archive: a name, and the place of its bytes in the file."""

    name: str
    """The whole name, with the top folder."""
    start: int
    """First byte of the payload, counted from the start of the file (not of the archive)."""
    nbytes: int
    """Bytes of the payload in the file."""
    crc32: int | None
    """CRC-32 of the content, or None where the writer left it out.

    torch writes 0 with `set_crc32_options(False)` and for `skip_data`. So 0 means "not recorded" unless the record
    is empty; one honest payload in four billion has this CRC and goes unverified."""
    method: int
    """0 stored, 8 deflated."""
    header: int
    """Where the record's local header is in the file."""
    content_nbytes: int
    """Bytes of content, as the directory claims: equal to `nbytes` for a stored record."""

    @property
    def stop(self) -> int:
        """The byte after the payload."""
        return self.start + self.nbytes

    @property
    def stored(self) -> bool:
        """Whether the payload is the content."""
        return self.method == 0


class Records(Mapping[str, Record]):
    """The records of an archive under their names, in the order of the file.

    A record is made when it is asked for: a million of them as columns take a quarter of the memory.
    """

    __slots__ = ("_columns", "_rows")

    def __init__(
        self,
        rows: Mapping[str, int],
        *,
        starts: Ints,
        packed: Ints,
        crcs: Ints,
        methods: Ints,
        headers: Ints,
        sizes: Ints,
    ) -> None:
        self._rows = rows
        self._columns = (starts, packed, crcs, methods, headers, sizes)

    def __getitem__(self, name: str) -> Record:
        row = self._rows[name]
        start, nbytes, crc, method, header, size = [column.item(row) for column in self._columns]
        return Record(name, start, nbytes, crc if crc or not size else None, method, header, size)

    def __contains__(self, name: object) -> bool:
        return name in self._rows

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    def __repr__(self) -> str:
        return f"<{len(self)} zip records>"


@dataclass(frozen=True, slots=True)
class Archive:
    """A zip archive in which every reader sees the same records."""

    records: Mapping[str, Record]
    """Every record but folders, under its whole name, in the order of the file."""
    prefix: str
    """The one top folder that all records share, without a slash; empty where they do not share one."""

    @property
    def names(self) -> list[str]:
        """The names without the prefix, in the order of the file."""
        cut = len(self.prefix) + 1 if self.prefix else 0
        return [name[cut:] for name in self.records]

    def get(self, name: str) -> Record | None:
        """The record of a name without the prefix, or None. Case matters here; no two names differ in case alone."""
        return self.records.get(f"{self.prefix}/{name}" if self.prefix else name)
