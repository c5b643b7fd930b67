"""What a run's directory says of itself beside its steps: its rules, and the pins.

    holdfast.run.json     the rules as texts, and the budget: so that the command line can say why a step is kept
    holdfast.pins.json    steps that nobody deletes, and why
    holdfast.proofs.json  steps that are no base because something did not read back, and when shared files were read back last
    holdfast.exports.json what the run exported, so that it replaces nothing else (`export.py`)

They are small JSON files, replaced atomically. `pin` writes the second, from any process; the run writes the others. `turn` is the
lock (on the directory itself) under which pins are changed and steps lose their names, so that no step goes that was pinned
before. A file of pins that cannot be read is an error, not a run without pins.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import TypeVar

import msgspec

from holdfast.core.documents import DocumentKind, read_document, write_document
from holdfast.engine.commit.target import refusal
from holdfast.engine.commit.temporaries import locked
from holdfast.engine.commit.transactions import replace_file
from holdfast.errors import BadArgument, HeaderError, LimitExceeded, NoSuchPath, NoSuchStep, Unsupported
from holdfast.runs.rules import Rule, read_rules
from holdfast.runs.steps import RunFolder
from holdfast.stores.files import Files, read_all
from holdfast.stores.remote.url import Stamps

MOST_RECEIPTS = 20_000
"""Of exports that are remembered; older ones are never replaced again."""

MOST_NBYTES = 16 << 20
"""Of such a file: a hundred thousand pins."""

PATIENCE_S, PAUSE_S = 30.0, 0.02
"""How long another process's turn is waited for, and between looks. A turn is a few renames."""


class RunRecord(msgspec.Struct, frozen=True):
    """`holdfast.run.json`."""

    format: str
    version: int
    keep: list[str]
    budget: int | None = None
    write: str | msgspec.UnsetType = msgspec.UNSET
    """In a bucket: a name of this text, by which whoever wrote it knows it again. So in the others."""


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


class Proofs(msgspec.Struct, frozen=True):
    """`holdfast.proofs.json`."""

    format: str = "holdfast.proofs"
    version: int = 1
    doubted: list[Doubt] = []
    files: dict[str, float] = {}
    """When each shared file was written, or read back last, in seconds since 1970."""
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


D = TypeVar("D", RunRecord, Pins, Proofs, Receipts)


def _kind(format: str, name: str, type: type[D]) -> DocumentKind[D]:
    decoder = msgspec.json.Decoder(type)
    return DocumentKind(name=name, file=f"{format}.json", decoder=decoder, format=format, versions=(1,), most=MOST_NBYTES, indent=1)


RECORD, PINS = _kind("holdfast.run", "record of a run", RunRecord), _kind("holdfast.pins", "list of pins", Pins)
PROOFS, EXPORTS = _kind("holdfast.proofs", "list of proofs", Proofs), _kind("holdfast.exports", "list of exports", Receipts)


def read_said(files: Files, kind: DocumentKind[D], *, at: int) -> D | None:
    """What such a file says; None where there is none. Raises `HeaderError` where it cannot be read."""
    there = files.stat(kind.file, at=at)
    if there is None:
        return None
    raw = read_all(files, kind.file, there, at=at, most=MOST_NBYTES)
    if raw is None:
        raise HeaderError("no plain file of a length that could be", file=kind.file)
    return decoded(raw, kind)


def decoded(raw: bytes, kind: DocumentKind[D]) -> D:
    """What such a file says. Raises `HeaderError` where it cannot be understood."""
    try:
        return read_document(kind, raw)
    except Unsupported as error:
        raise HeaderError(error.message, file=kind.file, found=error.found) from None
    except (HeaderError, LimitExceeded) as error:
        raise HeaderError(f"this file is damaged: {error.message}; mend or remove it", file=kind.file) from None


def write_said(files: Files, folder: str, kind: DocumentKind[D], content: D, *, durable: bool) -> None:
    """Write it down, in the place of what stands there."""
    replace_file(os.path.join(folder, kind.file), write_document(kind, content), durable=durable, files=files)


def read_kept(files: Files, *, at: int) -> RunRules | None:
    """The rules that a run wrote down; None where it has none. Raises `HeaderError` where they cannot be understood."""
    found = read_said(files, RECORD, at=at)
    return None if found is None else parse_rules(found)


def parse_rules(found: RunRecord) -> RunRules:
    """The rules of a record. Raises `HeaderError` where they cannot be understood."""
    try:
        return RunRules(read_rules(found.keep), found.budget)
    except BadArgument as error:
        raise HeaderError(error.message, file=RECORD.file) from None


def write_kept(files: Files, path: str, kept: RunRules, *, at: int, durable: bool) -> None:
    """Write the rules of a run down, where others or none stand there."""
    with suppress(HeaderError):
        if read_kept(files, at=at) == kept:
            return
    write_said(files, path, RECORD, record_of(kept), durable=durable)


def record_of(kept: RunRules) -> RunRecord:
    """What is written down of these rules."""
    return RunRecord("holdfast.run", 1, [str(rule) for rule in kept.rules], kept.budget)


def read_pins(files: Files, *, at: int) -> Mapping[int, Pin]:
    """The pins by step. Raises `HeaderError` where they cannot be read: nothing may be deleted then."""
    found = read_said(files, PINS, at=at)
    return {} if found is None else {pin.step: pin for pin in found.pins}


def receipts_of(exports: Mapping[str, Stamps]) -> Receipts:
    """What is written down of these exports."""
    return Receipts("holdfast.exports", 1, dict(list(exports.items())[-MOST_RECEIPTS:]))


@contextmanager
def turn(folder: RunFolder) -> Iterator[tuple[Files, int]]:
    """The directory, open, while no other process changes pins or takes names from steps."""
    with folder.opened() as (files, at):
        deadline = time.monotonic() + PATIENCE_S
        while not locked(files, at):
            if time.monotonic() > deadline:
                raise refusal("another process has been deleting steps or changing pins for long; try again", folder.path)
            time.sleep(PAUSE_S)
        folder.check(at)
        yield files, at


def pin_step(folder: RunFolder, step: int, why: str, *, durable: bool = True) -> Pin:
    """Keep a step, whatever the rules say. Raises `NoSuchStep` where there is no whole one of this number."""
    pin = Pin(step, why, time.time())
    try:
        with turn(folder) as (files, at):
            if folder.get(step) is None:
                raise NoSuchStep(f"there is no whole step {step} to pin; `holdfast runs` lists them", file=folder.path, found=step)
            _put(files, folder, [*(one for one in read_pins(files, at=at).values() if one.step != step), pin], durable=durable)
    except FileNotFoundError:
        raise NoSuchPath("there is no such directory", file=folder.path) from None
    return pin


def unpin_step(folder: RunFolder, step: int, *, durable: bool = True) -> Pin:
    """Leave a step to the rules again. Raises `NoSuchStep` where it is not pinned."""
    try:
        with turn(folder) as (files, at):
            pins = dict(read_pins(files, at=at))
            if step not in pins:
                raise NoSuchStep(f"step {step} is not pinned", file=folder.path, found=step)
            gone = pins.pop(step)
            _put(files, folder, list(pins.values()), durable=durable)
    except FileNotFoundError:
        raise NoSuchPath("there is no such directory", file=folder.path) from None
    return gone


def _put(files: Files, folder: RunFolder, pins: Sequence[Pin], *, durable: bool) -> None:
    ordered = sorted(pins, key=lambda pin: pin.step)
    write_said(files, folder.path, PINS, Pins("holdfast.pins", 1, ordered), durable=durable)
