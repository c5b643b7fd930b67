"""What a run's directory says of itself beside its steps: its rules, and the pins.

    holdfast.run.json     the rules as texts, and the budget: so that the command line can say why a step is kept
    holdfast.pins.json    steps that nobody deletes, and why

Both are small JSON files, replaced atomically. The first is written by the run, the second by `pin`, from any process: `turn` is
the lock (on the directory itself) under which pins are changed and steps lose their names, so that no step goes that was pinned
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
from holdfast.errors import BadArgument, HeaderError, NoSuchStep, StoreError
from holdfast.runs.rules import Rule, read_rules
from holdfast.runs.steps import RunFolder
from holdfast.stores.files import Files, read_all

__all__ = [
    "MOST_NBYTES",
    "PINS",
    "RECORD",
    "Kept",
    "Pin",
    "Pins",
    "Record",
    "decoded",
    "encoded",
    "pin_step",
    "read_kept",
    "read_pins",
    "record_of",
    "turn",
    "understood_rules",
    "unpin_step",
    "write_kept",
]

RECORD, PINS = "holdfast.run.json", "holdfast.pins.json"

MOST_NBYTES = 16 << 20
"""Of such a file: a hundred thousand pins."""

PATIENCE_S, PAUSE_S = 30.0, 0.02
"""How long another process's turn is waited for, and between looks. A turn is a few renames."""


class Record(msgspec.Struct, frozen=True):
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


class Kept(msgspec.Struct, frozen=True):
    """The rules of a run, and how many bytes it may have."""

    rules: tuple[Rule, ...]
    budget: int | None = None


D = TypeVar("D", bound=Record | Pins)


def _read(files: Files, name: str, kind: type[D], *, at: int) -> D | None:
    if files.stat(name, at=at) is None:
        return None
    raw = read_all(files, name, at=at, most=MOST_NBYTES)
    if raw is None:
        raise HeaderError("no plain file of a length that could be", file=name)
    return decoded(raw, kind, name)


def decoded(raw: bytes, kind: type[D], name: str) -> D:
    """What such a file says. Raises `HeaderError` where it cannot be understood."""
    try:
        found = msgspec.json.decode(raw, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise HeaderError(f"this file is damaged: {error}; mend or remove it", file=name) from None
    if found.version != 1:
        raise HeaderError(f"version {found.version} is not one that this Holdfast reads", file=name, found=found.version)
    return found


def encoded(content: Record | Pins) -> bytes:
    """The text of such a file."""
    return msgspec.json.format(msgspec.json.encode(content), indent=1) + b"\n"


def _write(files: Files, path: str, content: Record | Pins, *, durable: bool) -> None:
    raw = encoded(content)
    with FileTransaction(path, durable=durable, overwrite=True, files=files) as single:
        single.allocate(len(raw))
        single.write(0, raw)
        single.commit()


def read_kept(files: Files, *, at: int) -> Kept | None:
    """The rules that a run wrote down; None where it has none. Raises `HeaderError` where they cannot be understood."""
    found = _read(files, RECORD, Record, at=at)
    return None if found is None else understood_rules(found)


def understood_rules(found: Record) -> Kept:
    """The rules of a record. Raises `HeaderError` where they cannot be understood."""
    try:
        return Kept(read_rules(found.keep), found.budget)
    except BadArgument as error:
        raise HeaderError(error.message, file=RECORD) from None


def write_kept(files: Files, path: str, kept: Kept, *, at: int, durable: bool) -> None:
    """Write the rules of a run down, where others or none stand there."""
    with suppress(HeaderError):
        if read_kept(files, at=at) == kept:
            return
    _write(files, os.path.join(path, RECORD), record_of(kept), durable=durable)


def record_of(kept: Kept) -> Record:
    """What is written down of these rules."""
    return Record("holdfast.run", 1, [str(rule) for rule in kept.rules], kept.budget)


def read_pins(files: Files, *, at: int) -> Mapping[int, Pin]:
    """The pins by step. Raises `HeaderError` where they cannot be read: nothing may be deleted then."""
    found = _read(files, PINS, Pins, at=at)
    return {} if found is None else {pin.step: pin for pin in found.pins}


@contextmanager
def turn(folder: RunFolder) -> Iterator[tuple[Files, int]]:
    """The directory, open, while no other process changes pins or takes names from steps."""
    with folder.opened() as (files, at):
        deadline = time.monotonic() + PATIENCE_S
        while not locked(files, at):
            if time.monotonic() > deadline:
                raise refusal("another process has been deleting steps or changing pins for long; try again", folder.path)
            time.sleep(PAUSE_S)
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
        raise StoreError("there is no such directory", file=folder.path) from None
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
        raise StoreError("there is no such directory", file=folder.path) from None
    return gone


def _put(files: Files, folder: RunFolder, pins: Sequence[Pin], *, durable: bool) -> None:
    ordered = sorted(pins, key=lambda pin: pin.step)
    _write(files, os.path.join(folder.path, PINS), Pins("holdfast.pins", 1, ordered), durable=durable)
