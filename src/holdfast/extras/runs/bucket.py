"""`RunBucket`: a run's place in an object store.

There is no lock: two runs below one prefix are allowed, and of two saves of one step one is published (engine/targets). What is
written down (`holdfast.run.json`, `holdfast.pins.json`) is changed on the condition that nobody else changed it meanwhile.

Which prefixes are steps, under which number, and whether each is whole:

    s3://bucket/llama/
        step-00001000/holdfast.json                                   published: the manifest is there
        step-00001000/data-5f3a…-00001-of-00001.safetensors           its data, under names that no other save has
        step-00001500/holdfast.json                                   names data of step 1000, which did not change since then
        step-00002000/data-77e0…-00001-of-00001.safetensors           no manifest: a save that goes on, or a dead one; nothing

1. There is no seal: its name would be one that two saves at once both write. Step, time and metrics stand in the metadata of the
   manifest (`holdfast.step`), and once more as an attribute of its object, with a digest of the names and lengths of the data. So
   one HEAD and a listing tell whether a step is whole. Where the attribute is missing (another program copied it) the manifest is
   read.
2. `newest` lists names, and looks from the highest number down: a listing and a HEAD a step. `steps` is one listing of everything;
   what a manifest says is asked once and known by its etag from then on.
3. A listing and a HEAD are two moments. Before a step is called torn, both are asked for again.
4. What the store does not answer is an error, never a step that is passed over: an older one would be resumed from.

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
import hashlib
import json
import random
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import cache, partial
from typing import Annotated

import msgspec

from holdfast.core.documents import FAILURES, DocumentType, write_document
from holdfast.core.keys import DATA_KEY, parse_sibling_key
from holdfast.core.limits import Limits
from holdfast.core.value import Value, replace
from holdfast.engine.targets.bucket_claims import release_objects
from holdfast.engine.threads import run_all
from holdfast.errors import (
    HeaderError,
    HoldfastError,
    LimitExceeded,
    NotCommitted,
    SaveError,
    StoreError,
)
from holdfast.extras.runs.place import Change, Choose, RunPlace, Sizes
from holdfast.extras.runs.record import (
    MOST_NBYTES,
    NO_PINS,
    PINS,
    D,
    Pins,
    RunRecord,
    decode_document,
)
from holdfast.extras.runs.steps import (
    FoundStep,
    Step,
    claim,
    first_step,
    found_steps,
    stamped,
    step_name,
    step_number,
)
from holdfast.formats.safetensors.schema import MANIFEST
from holdfast.stores.remote import client
from holdfast.stores.remote.client import Bucket, get_bucket
from holdfast.stores.remote.failures import ConditionFailed, find_existing
from holdfast.stores.remote.url import Stamps, Url
from holdfast.verbs.seals.document import LARGEST, Stamp
from holdfast.verbs.shared.planned import Planned, Saved
from holdfast.verbs.shared.references import References, listed, named_by

TRIES = 50
"""How often a document is written again because others were faster."""

METADATA = "holdfast.step"
"""Where step, time and metrics stand in the metadata of a manifest."""

ATTRIBUTE = "holdfaststep"
"""Where they stand in the attributes of its object. Azure takes letters and digits alone."""

ATTRIBUTE_NBYTES = 1600
"""The longest text of it: S3 takes 2 KiB of attributes in all."""

MOST_OBJECTS = 5_000_000
"""The most objects of a step."""

AT_ONCE = 24
"""Steps that are asked about at once."""

LOOKS = 4
"""How often a step is looked at while somebody replaces it."""

LIMITS = Limits()


class ManifestInfo(Value):
    """The content of a published manifest, as far as it was asked for."""

    etag: str | None
    nbytes: int
    """The length of the manifest itself."""
    stamp: Stamp | None
    save: str = ""
    digest: str = ""
    """A digest of the names and lengths of the data, where the attribute has it."""
    shared: tuple[str, ...] | None = None
    """Names of data in the folders of other steps, where the attribute has them."""
    files: tuple[tuple[str, int], ...] | None = None
    """Names and lengths, where the manifest was read."""
    wrong: str = ""
    """Why it cannot be understood."""


def stamp_text(stamp: Stamp, more: Mapping[str, object]) -> str:
    """A stamp as text of visible ASCII without spaces, which every header takes; numbers exactly."""
    metrics = {name: repr(float(value)) for name, value in stamp.metrics.items()}
    ran = {} if stamp.ran is None else {"ran": stamp.ran}
    text = json.dumps(
        {"step": stamp.step, "saved": stamp.saved, **ran, "metrics": metrics, **more},
        separators=(",", ":"),
    )
    return text.replace(" ", "\\u0020").replace("\x7f", "\\u007f")


def digest_of(sizes: Mapping[str, int]) -> str:
    text = "".join(f"{name} {sizes[name]}\n" for name in sorted(sizes))
    return hashlib.sha256(text.encode()).hexdigest()[:32]


class StoredStamp(msgspec.Struct):
    """The text of a stamp. An attribute also describes the data of the step."""

    step: Annotated[int, msgspec.Meta(ge=0, le=LARGEST)]
    saved: float
    metrics: dict[str, str]
    ran: Annotated[float, msgspec.Meta(ge=0)] | None = None
    save: str = ""
    files: str = ""
    beside: list[str] = []


STAMPS = msgspec.json.Decoder(StoredStamp)


def read_stamp(text: str | None) -> tuple[Stamp, StoredStamp] | None:
    """Return the stamp in a text, and all of the text; None if it is not a text of ours."""
    try:
        stored = STAMPS.decode(text or "")
        metrics = {name: float(value) for name, value in stored.metrics.items()}
    except FAILURES:
        return None
    return Stamp(stored.step, stored.saved, metrics, stored.ran), stored


class RunBucket(RunPlace):
    """A run below a prefix of a bucket."""

    def __init__(self, url: Url) -> None:
        self.path: Url = url
        self._manifests: dict[str, ManifestInfo] = {}
        """What manifests say, by key, as long as they have the same etag."""
        self._lengths: dict[str, Mapping[str, int]] = {}
        """The keys and lengths of the objects of each step that was found whole, by its name."""
        self._references = References(url, self.folders_named)

    # Looking.

    @property
    def bucket(self) -> Bucket:
        return get_bucket(self.path)

    def key(self, *names: str) -> str:
        return "/".join((*([self.path.key] if self.path.key else []), *names))

    def newest(self, *, below: int | None = None) -> Step | None:
        claims, found = self._named(below), None
        for _ in range(LOOKS):
            numbers = sorted(claims, reverse=True)
            steps = (self._at(number, claims[number]) for number in numbers)
            found = next(filter(None, steps), None)
            passed = [number for number in numbers if found is None or number > found.step]
            if not passed:
                break
            # A step goes when a newer one is there: one that was passed over may have gone since the names were listed.
            claims = self._named(below)
            if sorted(claims, reverse=True)[: len(passed)] == passed:
                break
        return found

    def get(self, step: int) -> Step | None:
        # Somebody may have written its number in another way.
        return self._at(step, [step_name(step)]) or self._at(step, self._named().get(step, ()))

    def survey(self) -> list[FoundStep]:
        rows, gone = list[FoundStep](), -1
        for _ in range(LOOKS):
            rows, gone = self._survey()
            # As in `newest`.
            if gone <= max((row.whole.step for row in rows if row.whole is not None), default=-1):
                break
        return rows

    def _survey(self) -> tuple[list[FoundStep], int]:
        """One look, and the highest number whose manifest was deleted meanwhile."""
        tree = listed(self.path)
        published = [name for name, below in tree.items() if name and MANIFEST in below]
        claims = self._claims(published)
        places = [(name, number) for number, names in claims.items() for name in names]
        seen: dict[str, Step | str | None] = {}

        def look(name: str, number: int) -> None:
            found = self._examine(name, number, lambda folder: tree.get(folder, {}))
            seen[name] = found if isinstance(found, Step) else self._look(name, number)

        run_all((partial(look, *place) for place in places), AT_ONCE)
        keys = {self.key(name, MANIFEST) for name in published}
        self._manifests = {key: info for key, info in self._manifests.items() if key in keys}
        rows = found_steps(claims, lambda name, number: seen[name])
        gone = max((number for name, number in places if seen[name] is None), default=-1)
        return rows, gone

    def sizes(self, step: Step) -> Sizes:
        sizes = Sizes()
        sizes.update(self._lengths.get(step.name, {step.path: step.nbytes}))
        return sizes

    def read_record(self, kind: DocumentType[D]) -> D | None:
        got = find_existing(self.bucket.get_object, self.key(kind.file), MOST_NBYTES)
        return None if got is None else decode_document(bytes(got.data), kind)

    def exported(self) -> Mapping[str, Stamps]:
        try:
            return super().exported()
        except HeaderError:
            return {}  # what was exported is not known again, and not replaced

    @contextmanager
    def asking(self) -> Iterator[None]:
        try:
            yield
        except StoreError as error:
            if isinstance(error, SaveError):
                raise
            message = f"the run cannot be looked at: {error.message}; nothing was published"
            raise NotCommitted(message, file=self.path, errno=error.errno) from None

    def begin(self, record: RunRecord, *, durable: bool) -> ExitStack:
        self.write_rules(record, durable=durable)
        return ExitStack()  # nothing is held

    def check(self) -> None:
        """Nothing: there is no lock to compare. What is published and deleted has its own conditions."""

    def replaces(self, step: int) -> bool:
        # Only what is published and not whole: what another run publishes meanwhile is not replaced.
        return isinstance(self._look(step_name(step), step), str)

    def with_stamp(
        self, metadata: Mapping[str, str] | None, stamp: Stamp
    ) -> Mapping[str, str] | None:
        return {**(metadata or {}), METADATA: stamp_text(stamp, {})}

    def sealed(self, planned: Planned[Saved], stamp: Stamp) -> Planned[Saved]:
        plan = planned.plan
        index = {file.key for file in plan.index}
        data = [(key, nbytes) for key, nbytes in plan.file_sizes if key not in index]
        return replace(planned, plan=replace(plan, attributes=self.attributes(stamp, data)))

    def attributes(self, stamp: Stamp, files: Sequence[tuple[str, int]]) -> Mapping[str, str]:
        """The attributes of the manifest of a step with this data; none where that is more than stores take."""
        sizes = dict(files)
        shared = sorted(name for name in sizes if parse_sibling_key(name))
        matches = [DATA_KEY.fullmatch(name) for name in sizes.keys() - set(shared)]
        saves = {match and match[1] for match in matches}
        if None in saves or len(saves) > 1:
            return {}
        more = {
            "save": next(iter(saves), ""),
            "files": digest_of(sizes),
            "nbytes": sum(sizes.values()),
            "beside": shared,
        }
        text = stamp_text(stamp, more)
        return {ATTRIBUTE: text} if len(text) <= ATTRIBUTE_NBYTES else {}

    def published(self, planned: Planned[Saved], stamp: Stamp) -> Step:
        name, report = step_name(stamp.step), planned.report
        self._lengths[name] = {
            self.key(*(parse_sibling_key(file) or (name, file))): nbytes
            for file, nbytes in report.files
        }
        files = tuple([file for file, _ in report.files if file != MANIFEST])
        return stamped(stamp, stamp.step, self.path.below(name), report.nbytes, name, files)

    def let_go(self, choose: Choose, *, durable: bool) -> tuple[list[Step], list[str]]:
        going: list[Step] = []

        def mark(found: Pins | None) -> Pins | None:
            pins = found or NO_PINS
            going[:] = choose(pins.by_step())
            marks = pins.marked().union(step.step for step in going)
            changed = msgspec.structs.replace(pins, going=tuple(sorted(marks)), since=time.time())
            return changed if going else None

        def unmark(found: Pins | None) -> Pins:
            pins = found or NO_PINS
            marks = pins.marked().difference(step.step for step in going)
            return msgspec.structs.replace(pins, going=tuple(sorted(marks)))

        self.change_record(PINS, mark, durable=durable)
        gone: list[Step] = []
        notes: list[str] = []
        for one in going:
            try:
                key = self.key(one.name, MANIFEST)
                now, seen = find_existing(self.bucket.head, key), self._manifests.get(key)
                # Only the manifest that was decided about.
                if now is not None and seen is not None and (now.etag or "") == seen.etag:
                    self._unpublish(one)
                    gone.append(one)
            except StoreError as error:
                notes.append(f"step {one.step} cannot be deleted: {error.message}")
        notes += self._remove_data(gone)
        if going:
            with suppress(HoldfastError):  # marks lose their meaning by themselves
                self.change_record(PINS, unmark, durable=durable)
        return gone, notes

    def delete(self, steps: Sequence[Step], *, durable: bool) -> None:
        for one in reversed(steps):
            self._unpublish(one)
        self._remove_data(steps)

    def _unpublish(self, step: Step) -> None:
        self.bucket.delete([self.key(step.name, MANIFEST)])

    def _remove_data(self, steps: Sequence[Step]) -> list[str]:
        """Delete the data of steps whose manifests are gone, unless other steps have it, too. What stood in the way, in words."""
        keys = dict.fromkeys(
            self.key(*(parse_sibling_key(name) or (step.name, name)))
            for step in steps
            for name in step.files
            if "/" not in name or parse_sibling_key(name)
        )
        try:
            left = release_objects(self.path, list(keys), self._references.named).in_use
        except HoldfastError as error:
            numbers = ", ".join(str(step.step) for step in steps)
            return [
                f"step {numbers} is deleted, and not all of its data ({error.message}); a sweep of the run does that"
            ]
        if not left:
            return []
        return [
            f"a save uses {len(left):,} objects of deleted steps; a sweep of the run deletes what nobody names"
        ]

    def _fetch(self, kind: DocumentType[D]) -> tuple[D | None, str | None, bytes]:
        """A document of the run, its etag, and its text; None for one that is damaged, but for pins."""
        got = find_existing(self.bucket.get_object, self.key(kind.file), MOST_NBYTES)
        if got is None:
            return None, None, b""
        try:
            found = decode_document(bytes(got.data), kind)
        except HeaderError:
            if kind.file == PINS.file:
                raise  # nothing may be deleted then
            found = None
        return found, got.metadata.etag, bytes(got.data)

    def change_record(self, kind: DocumentType[D], change: Change[D], *, durable: bool) -> None:
        """As `RunPlace.change_record`; again where somebody was faster.

        Its answer may be lost, so what is there is compared with what was put, as for a manifest: each text has a name of its own.
        """
        found, etag, _ = self._fetch(kind)
        for _ in range(TRIES):
            made = change(found)
            if made is None:
                return
            raw, failed = (
                write_document(kind, msgspec.structs.replace(made, write=secrets.token_hex(8))),
                None,
            )
            try:
                self.bucket.put(self.key(kind.file), raw, create=etag is None, if_match=etag)
                return
            except StoreError as error:
                failed = error
            before = etag
            found, etag, there = self._fetch(kind)
            if there == raw:
                return
            if etag == before and not isinstance(failed, ConditionFailed):
                raise failed
            time.sleep(random.uniform(0, 0.05))
        raise NotCommitted(
            f"others change {kind.file} as quickly; try again", file=self.path, errno=errno.EAGAIN
        )

    # Manifests.

    def folders_named(self, folder: str, etag: str | None) -> set[str] | None:
        """The folders beside its own in which the manifest of a step names data; None where it has to be read for that."""
        info = self._manifests.get(self.key(folder, MANIFEST)) if folder else None
        if info is None or info.etag != etag or info.wrong:
            return None
        names = info.shared if info.files is None else [name for name, _ in info.files]
        return (
            None
            if names is None
            else {found[0] for name in names if (found := parse_sibling_key(name))}
        )

    def _named(self, below: int | None = None) -> dict[int, list[str]]:
        claims = self._claims(
            name.rstrip("/").rpartition("/")[2]
            for name in self.bucket.list_folder(self.key() + "/")[0]
        )
        return {
            number: names for number, names in claims.items() if below is None or number < below
        }

    def _claims(self, names: Iterable[str]) -> dict[int, list[str]]:
        """Names by the number that they say, the one that counts first."""
        claims: dict[int, list[str]] = {}
        for name in sorted(names):
            number = step_number(name)
            if number is not None:
                claim(claims, number, name)
        return claims

    def _at(self, number: int, names: Iterable[str]) -> Step | None:
        return first_step(self._look(name, number) for name in names)

    def _look(self, name: str, number: int) -> Step | str | None:
        """A step by its own listing: whole, or what is wrong with it, or None where nothing was published."""
        found: Step | str | None = None
        for _ in range(LOOKS):
            folders = cache(self._objects)
            objects, found = folders(name), self._examine(name, number, folders)
            now = self._manifests.get(self.key(name, MANIFEST))
            if found is None and MANIFEST in objects:
                continue  # it went between the listing and the question
            if not isinstance(found, str) or (
                now is not None and now.etag == objects[MANIFEST].etag
            ):
                break
        return found

    def _objects(self, folder: str) -> Mapping[str, client.RemoteObject]:
        start = self.key(folder) + "/"
        return {
            one.key.removeprefix(start): one
            for one in self.bucket.list_objects(start, MOST_OBJECTS)
        }

    def _examine(
        self, name: str, number: int, folders: Callable[[str], Mapping[str, client.RemoteObject]]
    ) -> Step | str | None:
        """The step of this name, by the objects in the folders of the run; what is wrong with it; None where none is published."""
        objects = folders(name)
        manifest = objects.get(MANIFEST)
        if manifest is None:
            return None
        info = self._info(name, manifest.etag)
        if info is None or info.wrong:
            return None if info is None else info.wrong
        if info.stamp is not None and info.stamp.step != number:
            return f"it was renamed: it says that it is step {info.stamp.step}"
        files = info.files
        if files is None:
            own = {
                key: one.nbytes
                for key, one in objects.items()
                if (found := DATA_KEY.fullmatch(key)) and found[1] == info.save
            }
            places = {file: parse_sibling_key(file) for file in info.shared or ()}
            there = {file: folders(at[0]).get(at[1]) for file, at in places.items() if at}
            own |= {file: one.nbytes for file, one in there.items() if one}
            if digest_of(own) == info.digest:
                files = tuple(own.items())
            else:
                info = self._read(name)  # it names what is missing
                if info is None or info.files is None:
                    return None if info is None else info.wrong
                files = info.files
        lengths = {self.key(name, MANIFEST): info.nbytes}
        for file, nbytes in files:
            at = parse_sibling_key(file) or (name, file)
            one = folders(at[0]).get(at[1])
            if one is None:
                return f"{file}: missing"
            if one.nbytes != nbytes:
                return f"{file}: {one.nbytes:,} of {nbytes:,} bytes"
            lengths[one.key] = nbytes
        self._lengths[name] = lengths
        stamp = info.stamp or Stamp(number, manifest.modified_at.timestamp(), {})
        names = tuple([file for file, _ in files])
        return stamped(stamp, number, self.path.below(name), sum(lengths.values()), name, names)

    def _info(self, name: str, etag: str | None) -> ManifestInfo | None:
        """The content of a manifest, from its attribute where it has one; None where it is gone."""
        key = self.key(name, MANIFEST)
        known = self._manifests.get(key)
        if known is not None and etag is not None and known.etag == etag:
            return known
        got = find_existing(self.bucket.head_with_attributes, key)
        if got is None:
            return None
        found = read_stamp(got.attributes.get(ATTRIBUTE))
        if found is None or not all(map(parse_sibling_key, found[1].beside)):
            return self._read(name)
        stamp, stored = found
        info = ManifestInfo(
            got.metadata.etag,
            got.metadata.nbytes,
            stamp,
            stored.save,
            stored.files,
            tuple(stored.beside),
        )
        self._manifests[key] = info
        return info

    def _read(self, name: str) -> ManifestInfo | None:
        key = self.key(name, MANIFEST)
        try:
            got = find_existing(self.bucket.get_object, key, LIMITS.index_nbytes)
        except LimitExceeded as error:
            return ManifestInfo(None, 0, None, wrong=error.message)
        if got is None:
            return None
        etag, nbytes = got.metadata.etag, got.data.nbytes
        try:
            files, metadata = named_by(bytes(got.data))
        except HoldfastError as error:
            info = ManifestInfo(etag, nbytes, None, wrong=error.message)
        else:
            found = read_stamp(metadata.get(METADATA))
            info = ManifestInfo(etag, nbytes, None if found is None else found[0], files=files)
        self._manifests[key] = info
        return info
