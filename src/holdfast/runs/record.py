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

from holdfast.engine.commit.target import refusal
from holdfast.engine.commit.temporaries import locked
from holdfast.engine.commit.transactions import FileTransaction
from holdfast.errors import BadArgument, HeaderError, NoSuchPath, NoSuchStep
from holdfast.runs.rules import Rule, read_rules
from holdfast.runs.steps import RunFolder
from holdfast.stores.files import Files, read_all
from holdfast.stores.remote.url import Stamps

RECORD, PINS, PROOFS, EXPORTS = "holdfast.run.json", "holdfast.pins.json", "holdfast.proofs.json", "holdfast.exports.json"

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


class Receipts(msgspec.Struct, frozen=True):
    """`holdfast.exports.json`."""

    format: str
    version: int
    exports: dict[str, Stamps]
    """What was published at a target, the latest last."""


class RunRules(msgspec.Struct, frozen=True):
    """The rules of a run, and how many bytes it may have."""

    rules: tuple[Rule, ...]
    budget: int | None = None


Document = RunRecord | Pins | Proofs | Receipts
D = TypeVar("D", bound=Document)

RECORDS, PINNED = msgspec.json.Decoder(RunRecord), msgspec.json.Decoder(Pins)
PROVED, EXPORTED = msgspec.json.Decoder(Proofs), msgspec.json.Decoder(Receipts)


def _read(files: Files, name: str, decoder: msgspec.json.Decoder[D], *, at: int) -> D | None:
    there = files.stat(name, at=at)
    if there is None:
        return None
    raw = read_all(files, name, there, at=at, most=MOST_NBYTES)
    if raw is None:
        raise HeaderError("no plain file of a length that could be", file=name)
    return decoded(raw, decoder, name)


def decoded(raw: bytes, decoder: msgspec.json.Decoder[D], name: str) -> D:
    """What such a file says. Raises `HeaderError` where it cannot be understood."""
    try:
        found = decoder.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise HeaderError(f"this file is damaged: {error}; mend or remove it", file=name) from None
    if found.version != 1:
        raise HeaderError(f"version {found.version} is not one that this Holdfast reads", file=name, found=found.version)
    return found


def encoded(content: Document) -> bytes:
    """The text of such a file."""
    return msgspec.json.format(msgspec.json.encode(content), indent=1) + b"\n"


def _write(files: Files, path: str, content: Document, *, durable: bool) -> None:
    raw = encoded(content)
    with FileTransaction(path, durable=durable, overwrite=True, files=files) as single:
        single.allocate(len(raw))
        single.write(0, raw)
        single.commit()


def read_kept(files: Files, *, at: int) -> RunRules | None:
    """The rules that a run wrote down; None where it has none. Raises `HeaderError` where they cannot be understood."""
    found = _read(files, RECORD, RECORDS, at=at)
    return None if found is None else understood_rules(found)


def understood_rules(found: RunRecord) -> RunRules:
    """The rules of a record. Raises `HeaderError` where they cannot be understood."""
    try:
        return RunRules(read_rules(found.keep), found.budget)
    except BadArgument as error:
        raise HeaderError(error.message, file=RECORD) from None


def write_kept(files: Files, path: str, kept: RunRules, *, at: int, durable: bool) -> None:
    """Write the rules of a run down, where others or none stand there."""
    with suppress(HeaderError):
        if read_kept(files, at=at) == kept:
            return
    _write(files, os.path.join(path, RECORD), record_of(kept), durable=durable)


def record_of(kept: RunRules) -> RunRecord:
    """What is written down of these rules."""
    return RunRecord("holdfast.run", 1, [str(rule) for rule in kept.rules], kept.budget)


def read_pins(files: Files, *, at: int) -> Mapping[int, Pin]:
    """The pins by step. Raises `HeaderError` where they cannot be read: nothing may be deleted then."""
    found = _read(files, PINS, PINNED, at=at)
    return {} if found is None else {pin.step: pin for pin in found.pins}


def read_proofs(files: Files, *, at: int) -> Proofs:
    """What a run wrote down of what it read back. Raises `HeaderError` where it cannot be read: nothing may be linked to then."""
    return _read(files, PROOFS, PROVED, at=at) or Proofs()


def write_proofs(files: Files, path: str, proofs: Proofs) -> None:
    """Write it down. It need not survive a power cut: what is lost is found again."""
    _write(files, os.path.join(path, PROOFS), proofs, durable=False)


def read_receipts(files: Files, *, at: int) -> Mapping[str, Stamps]:
    """What the run exported, by target. Raises `HeaderError` where it cannot be read."""
    found = _read(files, EXPORTS, EXPORTED, at=at)
    return {} if found is None else found.exports


def write_receipts(files: Files, path: str, exports: Mapping[str, Stamps], *, durable: bool) -> None:
    """Write down what the run exported."""
    _write(files, os.path.join(path, EXPORTS), receipts_of(exports), durable=durable)


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
    _write(files, os.path.join(folder.path, PINS), Pins("holdfast.pins", 1, ordered), durable=durable)
