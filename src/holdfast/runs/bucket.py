"""`RunBucket`: a run's place in an object store.

There is no lock: two runs below one prefix are allowed, and of two saves of one step one is published (engine/targets). What is
written down (`holdfast.run.json`, `holdfast.pins.json`) is changed on the condition that nobody else changed it meanwhile.

A deletion, in order:

    1  the steps that go are marked in the object of the pins. Whoever pins meanwhile comes first, and the step stays; or second,
       and is told that the step goes
    2  the manifest of each is deleted: from now on nobody finds it
    3  its data is deleted, as far as no other manifest names it and no save is about to (engine/targets/bucket_claims). What a
       process leaves that dies here is no step, and goes by the sweep (runs/sweep.py)
    4  the marks are taken away
"""

from __future__ import annotations

import errno
import random
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress

import msgspec

from holdfast.core.documents import DocumentKind, write_document
from holdfast.core.keys import sibling_key
from holdfast.core.value import replace
from holdfast.engine.commit.target import refusal
from holdfast.engine.targets.bucket_claims import release
from holdfast.errors import HeaderError, HoldfastError, NoSuchStep, SaveError, StoreError
from holdfast.formats.safetensors.record import MANIFEST
from holdfast.runs.bucket_steps import BucketSteps, attributes_of, metadata_of
from holdfast.runs.lock import Holder
from holdfast.runs.place import Choose, Sizes
from holdfast.runs.record import (
    EXPORTS,
    MOST_NBYTES,
    PINS,
    PROOFS,
    RECORD,
    D,
    Pin,
    Pins,
    Proofs,
    Receipts,
    RunRecord,
    RunRules,
    decoded,
    parse_rules,
    receipts_of,
    record_of,
)
from holdfast.runs.steps import Step, step_name
from holdfast.saving.planned import Planned, Saved
from holdfast.saving.references import References
from holdfast.seals.document import Stamp
from holdfast.stores.remote.failures import Taken, if_there
from holdfast.stores.remote.url import Stamps, Url

TRIES = 50
"""How often something is written down again because others did as quickly."""

MARK_S = 900.0
"""How long a mark counts of a process that has died while it deleted."""


Change = Callable[[D | None], D | None]
"""From what is written down to what is to stand there; None leaves it."""


class RunBucket(BucketSteps):
    """A run's prefix (`RunPlace`)."""

    def __init__(self, url: Url) -> None:
        super().__init__(url)
        self._references = References(url, self.folders_named)
        self._last: Step | None = None
        """What was saved last from here."""

    def before_saving(self, step: int, *, base: bool) -> tuple[Step | None, Step | None]:
        own, last = self.get(step), self._last
        if not base or (last is not None and last.step != step and self._manifest_etag(last) is not None):
            return own, last if base else None  # by one request, and no listing
        found = self.newest()
        return own, self.newest(below=step) if found is not None and found.step == step else found

    def exists(self) -> bool:
        return True

    def free(self) -> int | None:
        return None

    def sizes(self, step: Step) -> Sizes:
        sizes: Sizes = {}
        sizes.update(self._lengths.get(step.name, {step.path: step.nbytes}))
        return sizes

    def identities(self, step: Step) -> Mapping[str, str]:
        return {name: self.key(*(sibling_key(name) or (step.name, name))) for name in step.files}

    def written(self, step: Step, names: Sequence[str]) -> Mapping[str, float]:
        keys, now = self.identities(step), time.time()
        found = {name: if_there(self.bucket.head, keys[name]) for name in names}
        return {name: now if one is None else one.changed.timestamp() for name, one in found.items()}

    def kept(self) -> RunRules | None:
        _, _, raw = self._said_in(RECORD)
        return parse_rules(decoded(raw, RECORD)) if raw else None

    def pins(self) -> Mapping[int, Pin]:
        return _by_step(self._said_in(PINS)[0])

    def pin(self, step: int, why: str, *, durable: bool = True) -> Pin:
        pin = Pin(step, why, time.time())

        def add(found: Pins | None) -> Pins:
            if step in _marks(found):
                raise NoSuchStep(f"step {step} is being deleted; ask again in a minute", file=self.path, found=step)
            if self.get(step) is None:
                raise NoSuchStep(f"there is no whole step {step} to pin; `holdfast runs` lists them", file=self.path, found=step)
            return _pinned(found, {**_by_step(found), step: pin})

        self._change(PINS, add)
        return pin

    def unpin(self, step: int, *, durable: bool = True) -> Pin:
        gone: list[Pin] = []

        def drop(found: Pins | None) -> Pins:
            pins = dict(_by_step(found))
            if step not in pins:
                raise NoSuchStep(f"step {step} is not pinned", file=self.path, found=step)
            gone.append(pins.pop(step))
            return _pinned(found, pins)

        self._change(PINS, drop)
        return gone[-1]

    def proofs(self) -> Proofs:
        _, _, raw = self._said_in(PROOFS)
        return decoded(raw, PROOFS) if raw else Proofs()

    def note_proofs(self, proofs: Proofs) -> None:
        self._change(PROOFS, lambda _: proofs)

    def writer(self) -> Holder | None:
        return None

    def exported(self) -> Mapping[str, Stamps]:
        found, _, _ = self._said_in(EXPORTS)
        return {} if found is None else found.exports

    def note_exported(self, target: str, stamps: Stamps, *, durable: bool) -> None:
        def note(found: Receipts | None) -> Receipts:
            rest = {name: one for name, one in (found.exports if found else {}).items() if name != target}
            return receipts_of({**rest, target: stamps})

        self._change(EXPORTS, note)

    @contextmanager
    def asking(self) -> Iterator[None]:
        try:
            yield
        except StoreError as error:
            if isinstance(error, SaveError):
                raise
            raise refusal(f"the run cannot be looked at: {error.message}; nothing was published", self.path, error.errno) from None

    def begin(self, kept: RunRules, *, durable: bool) -> ExitStack:
        def write(found: RunRecord | None) -> RunRecord | None:
            with suppress(HeaderError):
                if found is not None and parse_rules(found) == kept:
                    return None
            return record_of(kept)

        self._change(RECORD, write)
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
        self._lengths[name] = {self.key(*(sibling_key(file) or (name, file))): nbytes for file, nbytes in planned.report.files}
        files = [file for file, _ in planned.report.files if file != MANIFEST]
        nbytes = planned.report.nbytes
        self._last = Step(says.step, self.path.below(name), says.saved, says.metrics, nbytes, name, tuple(files), says.ran)
        return self._last

    def let_go(self, choose: Choose, *, durable: bool) -> tuple[list[Step], list[str]]:
        going: list[Step] = []

        def mark(found: Pins | None) -> Pins | None:
            going[:] = choose(_by_step(found))
            return _pinned(found, _by_step(found), mark=[one.step for one in going]) if going else None

        self._change(PINS, mark)
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
                self._change(PINS, lambda found: _pinned(found, _by_step(found), unmark=[one.step for one in going]))
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
        found = if_there(self.bucket.head, self.key(step.name, MANIFEST))
        return None if found is None else found.etag or ""

    def _unpublish(self, step: Step) -> None:
        """From now on nobody finds it."""
        self.bucket.delete([self.key(step.name, MANIFEST)])

    def _remove_data(self, steps: Sequence[Step]) -> list[str]:
        """Delete the data of steps whose manifests are gone, unless other steps have it, too. What stood in the way, in words."""
        names = [(step.name, name) for step in steps for name in step.files]
        keys = dict.fromkeys(
            self.key(*(sibling_key(name) or (own, name))) for own, name in names if "/" not in name or sibling_key(name)
        )
        try:
            left = release(self.path, list(keys), self._references.named).used
        except HoldfastError as error:
            numbers = ", ".join(str(step.step) for step in steps)
            return [f"step {numbers} is deleted, and not all of its data ({error.message}); a sweep of the run does that"]
        return [f"a save uses {len(left):,} objects of deleted steps; a sweep of the run deletes what nobody names"] if left else []

    def _said_in(self, kind: DocumentKind[D]) -> tuple[D | None, str | None, bytes]:
        """What stands in an object of the run, its etag, and its text."""
        got = if_there(self.bucket.whole, self.key(kind.file), MOST_NBYTES)
        if got is None:
            return None, None, b""
        try:
            found = decoded(bytes(got.data), kind)
        except HeaderError:
            if kind.file == PINS.file:
                raise  # nothing may be deleted then
            found = None
        return found, got.found.etag, bytes(got.data)

    def _change(self, kind: DocumentKind[D], change: Change[D]) -> None:
        """Write something down, of what stands there now; again where somebody was faster.

        Its answer may be lost, so what is there is compared with what was put, as for a manifest: each text has a name of its own.
        """
        found, etag, _ = self._said_in(kind)
        for _ in range(TRIES):
            made = change(found)
            if made is None:
                return
            raw, failed = write_document(kind, msgspec.structs.replace(made, write=secrets.token_hex(8))), None
            try:
                self.bucket.put(self.key(kind.file), raw, create=etag is None, match=etag)
                return
            except StoreError as error:
                failed = error
            before = etag
            found, etag, there = self._said_in(kind)
            if there == raw:
                return
            if etag == before and not isinstance(failed, Taken):
                raise failed
            time.sleep(random.uniform(0, 0.05))
        raise refusal(f"others change {kind.file} as quickly; try again", self.path, errno.EAGAIN)


def _by_step(found: Pins | None) -> Mapping[int, Pin]:
    return {} if found is None else {pin.step: pin for pin in found.pins}


def _since(found: Pins | None) -> float:
    return 0.0 if found is None or isinstance(found.since, msgspec.UnsetType) else found.since


def _marks(found: Pins | None) -> set[int]:
    """Steps that are being deleted, as far as anybody knows."""
    going = () if found is None or isinstance(found.going, msgspec.UnsetType) else found.going
    return set() if time.time() - _since(found) >= MARK_S else set(going)


def _pinned(found: Pins | None, pins: Mapping[int, Pin], *, mark: Iterable[int] = (), unmark: Iterable[int] = ()) -> Pins:
    """The text with these pins. Marks of others stay as long as they count."""
    ordered, marks = [pins[step] for step in sorted(pins)], _marks(found) | set(mark)
    since = time.time() if mark else _since(found)
    return Pins(PINS.format, 1, ordered, tuple(sorted(marks - set(unmark))), since)
