"""The documents beside the steps of a run.

    holdfast.run.json      the rules, as texts, and the budget, so that the command line can explain them
    holdfast.pins.json     steps that nobody deletes, and why
    holdfast.doubts.json   steps that may not be a base, because something did not read back
    holdfast.exports.json  what the run exported, so that it replaces nothing else (`export.py`)

They are small JSON files that are replaced atomically. Any process may write the pins, and the run
writes the other documents. A file of pins that cannot be read is an error, not a run without pins.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from holdfast.core.documents import DocumentType, read_document
from holdfast.errors import BadArgument, HeaderError, LimitExceeded, Unsupported
from holdfast.extras.runs.rules import Rule, read_rules
from holdfast.stores.remote.url import Stamps

MOST_RECEIPTS = 20_000
"""The number of exports that are remembered. Older exports are never replaced again."""

MOST_NBYTES = 16 << 20
"""The size of the longest document: a hundred thousand pins."""

MARK_S = 900.0
"""How long the marks of a process count that died while it deleted steps."""


class RunRecord(msgspec.Struct, frozen=True, kw_only=True):
    """`holdfast.run.json`."""

    format: str = "holdfast.run"
    version: int = 1
    keep: list[str]
    budget: int | None = None
    write: str | UnsetType = UNSET
    """In a bucket: a random name of this text, by which its writer recognizes it."""

    @property
    def rules(self) -> tuple[Rule, ...]:
        """The rules. Raises `HeaderError` if they cannot be understood."""
        try:
            return read_rules(self.keep)
        except BadArgument as error:
            raise HeaderError(error.message, file=RECORD.file) from None


class Pin(msgspec.Struct, frozen=True):
    """A step that is not deleted."""

    step: int
    why: str = ""
    since: float = 0.0


class Pins(msgspec.Struct, frozen=True, kw_only=True):
    """`holdfast.pins.json`."""

    format: str = "holdfast.pins"
    version: int = 1
    pins: list[Pin]
    going: tuple[int, ...] | UnsetType = UNSET
    """In a bucket: marks on steps that are being deleted."""
    since: float | UnsetType = UNSET
    """When the marks were made, in seconds since 1970."""
    write: str | UnsetType = UNSET

    def by_step(self) -> dict[int, Pin]:
        """Return the pins by the numbers of their steps."""
        return {pin.step: pin for pin in self.pins}

    def with_pins(self, pins: Mapping[int, Pin]) -> Pins:
        """Return the document with other pins. Marks stay as they are."""
        return msgspec.structs.replace(self, pins=[pins[step] for step in sorted(pins)])

    def marked(self) -> set[int]:
        """Return the steps that are being deleted. In a directory no step is ever marked."""
        if self.going is UNSET or self.since is UNSET or time.time() - self.since >= MARK_S:
            return set()
        return set(self.going)


NO_PINS = Pins(pins=[])


class Doubt(msgspec.Struct, frozen=True):
    """A step that no save takes as its base."""

    step: int
    saved: float
    why: str = ""


class Doubts(msgspec.Struct, frozen=True, kw_only=True):
    """`holdfast.doubts.json`."""

    format: str = "holdfast.doubts"
    version: int = 1
    doubted: list[Doubt] = []
    write: str | UnsetType = UNSET


class Receipts(msgspec.Struct, frozen=True, kw_only=True):
    """`holdfast.exports.json`."""

    format: str = "holdfast.exports"
    version: int = 1
    exports: dict[str, Stamps]
    """What was published at each target, the latest last."""
    write: str | UnsetType = UNSET


D = TypeVar("D", RunRecord, Pins, Doubts, Receipts)


def _kind(format: str, name: str, type: type[D]) -> DocumentType[D]:
    return DocumentType(
        name=name,
        file=f"{format}.json",
        decoder=msgspec.json.Decoder(type),
        format=format,
        versions=(1,),
        max_nbytes=MOST_NBYTES,
        indent=1,
    )


RECORD = _kind("holdfast.run", "record of a run", RunRecord)
PINS = _kind("holdfast.pins", "list of pins", Pins)
DOUBTS = _kind("holdfast.doubts", "list of doubts", Doubts)
EXPORTS = _kind("holdfast.exports", "list of exports", Receipts)


def decode_document(raw: bytes, kind: DocumentType[D]) -> D:
    """Return the document in a text. Raises `HeaderError` if the text cannot be understood."""
    try:
        return read_document(kind, raw)
    except Unsupported as error:
        raise HeaderError(error.message, file=kind.file, found=error.found) from None
    except (HeaderError, LimitExceeded) as error:
        message = f"this file is damaged: {error.message}; mend or remove it"
        raise HeaderError(message, file=kind.file) from None
