"""What a run's directory says of itself beside its steps: its rules, and the pins.

    holdfast.run.json     the rules as texts, and the budget: so that the command line can say why a step is kept
    holdfast.pins.json    steps that nobody deletes, and why
    holdfast.doubts.json  steps that may not be a base, because something did not read back
    holdfast.exports.json what the run exported, so that it replaces nothing else (`export.py`)

They are small JSON files, replaced atomically. `pin` writes the second, from any process; the run writes the others. A file of pins
that cannot be read is an error, not a run without pins.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TypeVar

import msgspec

from holdfast.core.documents import DocumentKind, read_document
from holdfast.errors import BadArgument, HeaderError, LimitExceeded, Unsupported
from holdfast.extras.runs.rules import Rule, read_rules
from holdfast.stores.remote.url import Stamps

MOST_RECEIPTS = 20_000
"""The most exports that are remembered; older ones are never replaced again."""

MOST_NBYTES = 16 << 20
"""The longest such file: a hundred thousand pins."""

MARK_S = 900.0
"""How long a mark counts of a process that has died while it deleted."""


class RunRecord(msgspec.Struct, frozen=True):
    """`holdfast.run.json`."""

    format: str
    version: int
    keep: list[str]
    budget: int | None = None
    write: str | msgspec.UnsetType = msgspec.UNSET
    """In a bucket: a name of this text, by which its writer knows it again. The other documents have one, too."""


class Pin(msgspec.Struct, frozen=True):
    """A step that is not deleted."""

    step: int
    why: str = ""
    since: float = 0.0


class Pins(msgspec.Struct, frozen=True):
    """`holdfast.pins.json`."""

    format: str
    version: int
    pins: list[Pin]
    going: tuple[int, ...] | msgspec.UnsetType = msgspec.UNSET
    """In a bucket: steps that are being deleted."""
    since: float | msgspec.UnsetType = msgspec.UNSET
    """Since when, in seconds since 1970."""
    write: str | msgspec.UnsetType = msgspec.UNSET


class Doubt(msgspec.Struct, frozen=True):
    """A step that no save takes as its base."""

    step: int
    saved: float
    why: str = ""


class Doubts(msgspec.Struct, frozen=True):
    """`holdfast.doubts.json`."""

    format: str = "holdfast.doubts"
    version: int = 1
    doubted: list[Doubt] = []
    write: str | msgspec.UnsetType = msgspec.UNSET


class Receipts(msgspec.Struct, frozen=True):
    """`holdfast.exports.json`."""

    format: str
    version: int
    exports: dict[str, Stamps]
    """What was published at a target, the latest last."""
    write: str | msgspec.UnsetType = msgspec.UNSET


class RunRules(msgspec.Struct, frozen=True):
    """The rules of a run, and how many bytes it may have."""

    rules: tuple[Rule, ...]
    budget: int | None = None


D = TypeVar("D", RunRecord, Pins, Doubts, Receipts)


def _kind(format: str, name: str, type: type[D]) -> DocumentKind[D]:
    decoder = msgspec.json.Decoder(type)
    return DocumentKind(
        name=name,
        file=f"{format}.json",
        decoder=decoder,
        format=format,
        versions=(1,),
        most=MOST_NBYTES,
        indent=1,
    )


RECORD, PINS = (
    _kind("holdfast.run", "record of a run", RunRecord),
    _kind("holdfast.pins", "list of pins", Pins),
)
DOUBTS, EXPORTS = (
    _kind("holdfast.doubts", "list of doubts", Doubts),
    _kind("holdfast.exports", "list of exports", Receipts),
)


def decoded(raw: bytes, kind: DocumentKind[D]) -> D:
    """The document in a text. Raises `HeaderError` where it cannot be understood."""
    try:
        return read_document(kind, raw)
    except Unsupported as error:
        raise HeaderError(error.message, file=kind.file, found=error.found) from None
    except (HeaderError, LimitExceeded) as error:
        raise HeaderError(
            f"this file is damaged: {error.message}; mend or remove it", file=kind.file
        ) from None


def parse_rules(found: RunRecord) -> RunRules:
    """The rules of a record. Raises `HeaderError` where they cannot be understood."""
    try:
        return RunRules(read_rules(found.keep), found.budget)
    except BadArgument as error:
        raise HeaderError(error.message, file=RECORD.file) from None


def record_of(kept: RunRules) -> RunRecord:
    return RunRecord("holdfast.run", 1, [str(rule) for rule in kept.rules], kept.budget)


def receipts_of(exports: Mapping[str, Stamps]) -> Receipts:
    return Receipts("holdfast.exports", 1, dict(list(exports.items())[-MOST_RECEIPTS:]))


def pins_by_step(found: Pins | None) -> Mapping[int, Pin]:
    return {} if found is None else {pin.step: pin for pin in found.pins}


def marked_since(found: Pins | None) -> float:
    return 0.0 if found is None or isinstance(found.since, msgspec.UnsetType) else found.since


def marked_steps(found: Pins | None) -> set[int]:
    """Steps that are being deleted, as far as anybody knows. In a directory none is marked."""
    going = () if found is None or isinstance(found.going, msgspec.UnsetType) else found.going
    return set() if time.time() - marked_since(found) >= MARK_S else set(going)
