"""`RunBucket`: a run's place in an object store.

There is no lock: two runs below one prefix are allowed, and of two saves of one step one is published (engine/commit/remote). What
is written down (`holdfast.run.json`, `holdfast.pins.json`) is changed on the condition that nobody else changed it meanwhile.

A deletion, in order:

    1  the steps that go are marked in the object of the pins. Whoever pins meanwhile comes first, and the step stays; or second,
       and is told that the step goes
    2  the manifest of each is deleted: from now on nobody finds it
    3  its data is deleted, as far as no other manifest names it and no save is about to (engine/commit/claims). What a process
       leaves that dies here is no step, and goes by the sweep (runs/sweep.py)
    4  the marks are taken away
"""

from __future__ import annotations

import errno
import random
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import TypeVar

import msgspec

from holdfast.core.keys import beside
from holdfast.core.value import replace
from holdfast.engine.commit.claims import release
from holdfast.engine.commit.target import refusal
from holdfast.errors import HeaderError, HoldfastError, NoSuchStep, SaveError, StoreError
from holdfast.formats.safetensors.record import MANIFEST
from holdfast.rewrite.planned import Planned, Saved
from holdfast.rewrite.references import References
from holdfast.rewrite.step_seal import Stamp
from holdfast.runs.bucket_steps import BucketSteps, attributes_of, metadata_of
from holdfast.runs.lock import Holder
from holdfast.runs.place import Choose, Sizes
from holdfast.runs.record import (
    EXPORTS,
    MOST_NBYTES,
    PINS,
    PROOFS,
    PROVED,
    RECORD,
    RECORDS,
    Pin,
    Pins,
    Proofs,
    Receipts,
    RunRecord,
    RunRules,
    decoded,
    encoded,
    receipts_of,
    record_of,
    understood_rules,
)
from holdfast.runs.steps import Step, step_name
from holdfast.stores.remote import client
from holdfast.stores.remote.failures import Taken
from holdfast.stores.remote.url import Stamps, Url

TRIES = 50
"""How often something is written down again because others did as quickly."""

MARK_S = 900.0
"""How long a mark counts of a process that has died while it deleted."""


class MarkedPins(Pins, frozen=True):
    """`holdfast.pins.json` in a bucket."""

    going: tuple[int, ...] = ()
    """Steps that are being deleted."""
    since: float = 0.0
    """Since when, in seconds since 1970."""
    write: str = ""
    """A name of this text, by which whoever wrote it knows it again."""


class WrittenRecord(RunRecord, frozen=True):
    """`holdfast.run.json` in a bucket."""

    write: str = ""


class WrittenProofs(Proofs, frozen=True):
    """`holdfast.proofs.json` in a bucket."""

    write: str = ""


class WrittenReceipts(Receipts, frozen=True):
    """`holdfast.exports.json` in a bucket."""

    write: str = ""


W = TypeVar("W", MarkedPins, WrittenRecord, WrittenProofs, WrittenReceipts)

MARKED, WRITTEN = msgspec.json.Decoder(MarkedPins), msgspec.json.Decoder(WrittenRecord)
WRITTEN_PROOFS, WRITTEN_RECEIPTS = msgspec.json.Decoder(WrittenProofs), msgspec.json.Decoder(WrittenReceipts)


class RunBucket(BucketSteps):
    """A run's prefix (`RunPlace`)."""

    def __init__(self, url: Url) -> None:
        super().__init__(url)
        self._references = References(url, self.folders_named)
        self._last: Step | None = None
        """What was saved last from here."""

    def base_for(self, step: int) -> Step | None:
        last = self._last
        if last is not None and last.step != step and self._manifest_etag(last) is not None:
            return last  # by one request, and no listing
        found = self.newest()
        return self.newest(below=step) if found is not None and found.step == step else found

    def exists(self) -> bool:
        return True

    def free(self) -> int | None:
        return None

    def sizes(self, step: Step) -> Sizes:
        sizes: Sizes = {}
        sizes.update(self._lengths.get(step.name, {step.path: step.nbytes}))
        return sizes

    def identities(self, step: Step) -> Mapping[str, str]:
        return {name: self.key(*(beside(name) or (step.name, name))) for name in step.files}

    def written(self, step: Step, names: Sequence[str]) -> Mapping[str, float]:
        keys, now = self.identities(step), time.time()
        found = {name: self._head(keys[name]) for name in names}
        return {name: now if one is None else one.changed.timestamp() for name, one in found.items()}

    def kept(self) -> RunRules | None:
        _, _, raw = self._said_in(RECORD, WRITTEN)
        return understood_rules(decoded(raw, RECORDS, RECORD)) if raw else None

    def pins(self) -> Mapping[int, Pin]:
        return _by_step(self._said_in(PINS, MARKED)[0])

    def pin(self, step: int, why: str, *, durable: bool = True) -> Pin:
        pin = Pin(step, why, time.time())

        def add(found: MarkedPins | None) -> MarkedPins:
            if step in _marks(found):
                raise NoSuchStep(f"step {step} is being deleted; ask again in a minute", file=self.path, found=step)
            if self.get(step) is None:
                raise NoSuchStep(f"there is no whole step {step} to pin; `holdfast runs` lists them", file=self.path, found=step)
            return _pinned(found, {**_by_step(found), step: pin})

        self._change(PINS, MARKED, add)
        return pin

    def unpin(self, step: int, *, durable: bool = True) -> Pin:
        gone: list[Pin] = []

        def drop(found: MarkedPins | None) -> MarkedPins:
            pins = dict(_by_step(found))
            if step not in pins:
                raise NoSuchStep(f"step {step} is not pinned", file=self.path, found=step)
            gone.append(pins.pop(step))
            return _pinned(found, pins)

        self._change(PINS, MARKED, drop)
        return gone[-1]

    def proofs(self) -> Proofs:
        _, _, raw = self._said_in(PROOFS, WRITTEN_PROOFS)
        return decoded(raw, PROVED, PROOFS) if raw else Proofs()

    def note_proofs(self, proofs: Proofs) -> None:
        made = WrittenProofs(proofs.format, proofs.version, proofs.doubted, proofs.files, secrets.token_hex(8))
        self._change(PROOFS, WRITTEN_PROOFS, lambda _: made)

    def writer(self) -> Holder | None:
        return None

    def exported(self) -> Mapping[str, Stamps]:
        found, _, _ = self._said_in(EXPORTS, WRITTEN_RECEIPTS)
        return {} if found is None else found.exports

    def note_exported(self, target: str, stamps: Stamps, *, durable: bool) -> None:
        def note(found: WrittenReceipts | None) -> WrittenReceipts:
            rest = {name: one for name, one in (found.exports if found else {}).items() if name != target}
            made = receipts_of({**rest, target: stamps})
            return WrittenReceipts(made.format, made.version, made.exports, secrets.token_hex(8))

        self._change(EXPORTS, WRITTEN_RECEIPTS, note)

    @contextmanager
    def asking(self) -> Iterator[None]:
        try:
            yield
        except StoreError as error:
            if isinstance(error, SaveError):
                raise
            raise refusal(f"the run cannot be looked at: {error.message}; nothing was published", self.path, error.errno) from None

    def begin(self, kept: RunRules, *, durable: bool) -> ExitStack:
        def write(found: WrittenRecord | None) -> WrittenRecord | None:
            with suppress(HeaderError):
                if found is not None and understood_rules(found) == kept:
                    return None
            made = record_of(kept)
            return WrittenRecord(made.format, made.version, made.keep, made.budget, secrets.token_hex(8))

        self._change(RECORD, WRITTEN, write)
        return ExitStack()  # nothing is held

    def check(self) -> None:
        """There is no lock to compare: what is published and deleted has its own conditions."""

    def locked(self) -> ExitStack:
        return ExitStack()  # nothing is held

    def replaces(self, step: int) -> bool:
        """Only what is published and not whole: what another run publishes meanwhile is not replaced."""
        return self.torn(step)

    def noted(self, metadata: Mapping[str, str] | None, says: Stamp) -> Mapping[str, str] | None:
        return {**(metadata or {}), **metadata_of(says)}

    def sealed(self, planned: Planned[Saved], says: Stamp) -> Planned[Saved]:
        plan = planned.plan
        index = {file.key for file in plan.index}
        attributes = self.attributes(says, [(key, nbytes) for key, nbytes in plan.listed if key not in index])
        return replace(planned, plan=replace(plan, attributes=attributes))

    def attributes(self, says: Stamp, files: Sequence[tuple[str, int]]) -> Mapping[str, str]:
        return attributes_of(says, files)

    def published(self, planned: Planned[Saved], says: Stamp) -> Step:
        """As it was laid out: no request can fail that would make a failure of a save that is done."""
        name = step_name(says.step)
        self._lengths[name] = {self.key(*(beside(file) or (name, file))): nbytes for file, nbytes in planned.report.files}
        files = [file for file, _ in planned.report.files if file != MANIFEST]
        nbytes = planned.report.nbytes
        self._last = Step(says.step, self.path.below(name), says.saved, says.metrics, nbytes, name, tuple(files), says.ran)
        return self._last

    def let_go(self, choose: Choose, *, durable: bool) -> tuple[list[Step], list[str]]:
        going: list[Step] = []

        def mark(found: MarkedPins | None) -> MarkedPins | None:
            going[:] = choose(_by_step(found))
            return _pinned(found, _by_step(found), mark=[one.step for one in going]) if going else None

        self._change(PINS, MARKED, mark)
        gone: list[Step] = []
        notes: list[str] = []
        for one in going:
            try:
                if self._is_as_seen(one):
                    self._unpublish(one)
                    gone.append(one)
            except StoreError as error:
                notes.append(f"step {one.step} cannot be deleted: {error.message}")
        notes += self._remove_data(gone)
        if going:
            with suppress(HoldfastError):  # marks lose their meaning by themselves
                self._change(PINS, MARKED, lambda found: _pinned(found, _by_step(found), unmark=[one.step for one in going]))
        return gone, notes

    def delete(self, steps: Sequence[Step], *, durable: bool) -> None:
        for one in reversed(steps):
            self._unpublish(one)
        self._remove_data(steps)

    def _is_as_seen(self, step: Step) -> bool:
        """Whether the manifest is the one that was decided about."""
        now = self._manifest_etag(step)
        return now is not None and now == self.etag(step)

    def _manifest_etag(self, step: Step) -> str | None:
        """The etag of the manifest that a step has now; None where somebody deleted it."""
        found = self._head(self.key(step.name, MANIFEST))
        return None if found is None else found.etag or ""

    def _head(self, key: str) -> client.RemoteObject | None:
        """What the store says of an object; None where there is none."""
        try:
            return self.bucket.head(key)
        except StoreError as error:
            if error.errno != errno.ENOENT:
                raise
            return None

    def _unpublish(self, step: Step) -> None:
        """From now on nobody finds it."""
        self.bucket.delete([self.key(step.name, MANIFEST)])

    def _remove_data(self, steps: Sequence[Step]) -> list[str]:
        """Delete the data of steps whose manifests are gone, unless other steps have it, too. What stood in the way, in words."""
        names = [(step.name, name) for step in steps for name in step.files]
        keys = dict.fromkeys(self.key(*(beside(name) or (own, name))) for own, name in names if "/" not in name or beside(name))
        try:
            left = release(self.path, list(keys), self._references.named).used
        except HoldfastError as error:
            numbers = ", ".join(str(step.step) for step in steps)
            return [f"step {numbers} is deleted, and not all of its data ({error.message}); a sweep of the run does that"]
        return [f"a save uses {len(left):,} objects of deleted steps; a sweep of the run deletes what nobody names"] if left else []

    def _said_in(self, name: str, decoder: msgspec.json.Decoder[W]) -> tuple[W | None, str | None, bytes]:
        """What stands in an object of the run, its etag, and its text."""
        try:
            got = self.bucket.whole(self.key(name), MOST_NBYTES)
        except StoreError as error:
            if error.errno != errno.ENOENT:
                raise
            return None, None, b""
        try:
            found = decoded(bytes(got.data), decoder, name)
        except HeaderError:
            if name == PINS:
                raise  # nothing may be deleted then
            found = None
        return found, got.found.etag, bytes(got.data)

    def _change(self, name: str, decoder: msgspec.json.Decoder[W], change: Callable[[W | None], W | None]) -> None:
        """Write something down, of what stands there now; again where somebody was faster. None from `change` leaves it.

        Its answer may be lost, so what is there is compared with what was put, as for a manifest.
        """
        found, etag, _ = self._said_in(name, decoder)
        for _ in range(TRIES):
            made = change(found)
            if made is None:
                return
            raw, failed = encoded(made), None
            try:
                self.bucket.put(self.key(name), raw, create=etag is None, match=etag)
                return
            except StoreError as error:
                failed = error
            before = etag
            found, etag, there = self._said_in(name, decoder)
            if there == raw:
                return
            if etag == before and not isinstance(failed, Taken):
                raise failed
            time.sleep(random.uniform(0, 0.05))
        raise refusal(f"others change {name} as quickly; try again", self.path, errno.EAGAIN)


def _by_step(found: Pins | None) -> Mapping[int, Pin]:
    return {} if found is None else {pin.step: pin for pin in found.pins}


def _marks(found: MarkedPins | None) -> set[int]:
    """Steps that are being deleted, as far as anybody knows."""
    return set() if found is None or time.time() - found.since >= MARK_S else set(found.going)


def _pinned(
    found: MarkedPins | None, pins: Mapping[int, Pin], *, mark: Iterable[int] = (), unmark: Iterable[int] = ()
) -> MarkedPins:
    """The text with these pins. Marks of others stay as long as they count."""
    ordered, marks = [pins[step] for step in sorted(pins)], _marks(found) | set(mark)
    since = 0.0 if found is None else found.since
    write = secrets.token_hex(8)
    return MarkedPins("holdfast.pins", 1, ordered, tuple(sorted(marks - set(unmark))), time.time() if mark else since, write)
