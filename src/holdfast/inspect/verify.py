"""`verify`: is every byte of a checkpoint the one that was written? Everything that is not is reported, not the first.

1. The checkpoint is opened, which checks its structure. A zip whose pickle is damaged still has its records.
2. Every byte of its files is read once, in parallel. Ranges with a recorded checksum (the storages of tensors, each once however
   many names it has; the other records of a zip) are summed; the bytes between them are read so that I/O errors show.
3. Headers, indexes and manifests that Holdfast wrote carry checksums as well; what another program changed in them is reported.
4. What is sealed (`holdfast.seal.json`) is compared with its seal before: every file by its name, its length and its digest. That
   is a second reading: a seal is about whole files, and what they record of themselves tells which tensor it is.

In a directory, other checkpoint files that are no part of the checkpoint (a `pytorch_model.bin` beside safetensors) are verified
too, each by itself; and where the directory as a whole does not open, all of them are.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from msgspec import Struct, field

from holdfast.core.arguments import understood
from holdfast.core.checkpoint import Checkpoint
from holdfast.core.chunk import Storage
from holdfast.core.limits import Limits
from holdfast.core.notebook import Shown
from holdfast.core.protocols import Store
from holdfast.core.quantities import Size
from holdfast.core.runtime import resting_collector
from holdfast.core.sparse.storage import SparseStorage
from holdfast.core.tensor import LazyTensor
from holdfast.engine.budget import reading_threads
from holdfast.engine.checksums import Progress, Span, Sweep
from holdfast.engine.source import OpenSource
from holdfast.engine.transfer import run_reads
from holdfast.errors import BadPath, Corrupted, FormatError, HoldfastError, Replaced, UnknownFormat, detached, located
from holdfast.formats.detect import detect
from holdfast.formats.native.read import check_files
from holdfast.formats.native.schema import MANIFEST
from holdfast.formats.seal import SEAL, SUFFIX, Seal
from holdfast.formats.torch.zip import begins_like_zip
from holdfast.formats.zip.reader import inflated_crc, read_archive
from holdfast.inspect.open import TRIES, Openable, store_of
from holdfast.inspect.sealed import compared, seal_path
from holdfast.stores.paths import place_of
from holdfast.stores.remote.url import Url, is_url, join

__all__ = ["Damage", "Problem", "VerifyReport", "verify"]

SUFFIXES = (".bin", ".ckpt", ".gguf", ".npy", ".npz", ".pt", ".pt2", ".pth", ".pth.tar", ".safetensors", ".th")
"""Files in a directory that are checkpoints by their names."""


@dataclass(frozen=True, slots=True)
class Damage:
    """Bytes that do not have the checksum that was recorded for them."""

    file: str
    tensors: tuple[str, ...]
    """Every name that uses the storage; none for other records of a zip."""
    label: str
    """What the file calls it: `data/17`, `data.pkl`."""
    offset: int
    """First byte in the file, of `nbytes` that the checksum covers. Which of them changed, it cannot say."""
    nbytes: int
    expected: int
    found: int | None
    """None where compressed bytes do not inflate any more."""
    message: str = ""
    """What it means and what to do, where it is no tensor's bytes: a manifest, a header."""


@dataclass(frozen=True, slots=True)
class Problem:
    """Something that kept a file, or a part of it, from being verified."""

    file: str
    message: str
    kind: str
    """The class of the error: `Truncated`, `StoreError`, …"""
    tensors: tuple[str, ...] = ()
    """Names that could not be read, where it is not the whole file."""
    damaged: bool = False
    """Whether the content is at fault, and not that nobody could look at it."""


@dataclass(frozen=True, slots=True)
class VerifyReport(Shown):
    """What `verify` found."""

    path: str
    format: str
    """As `Checkpoint.format`; empty where nothing opened."""
    nbytes: int = 0
    """Bytes of all files."""
    files: tuple[tuple[str, int], ...] = ()
    """Each file that was read and its length."""
    notes: tuple[str, ...] = ()
    """What is odd in them."""
    damaged: tuple[Damage, ...] = ()
    problems: tuple[Problem, ...] = ()
    checked_nbytes: int = 0
    """Bytes that were compared with a recorded checksum."""
    unchecked: tuple[str, ...] = ()
    """Tensors without a recorded checksum: they were read, and nothing can be said of their content."""
    unchecked_nbytes: int = 0
    skipped: tuple[str, ...] = ()
    """Files in the directory that are no checkpoints."""
    seal: Seal | None = None
    """What the seal says, where there is one."""

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong, as far as anyone can tell: see `unchecked` for how far that is."""
        return not self.damaged and not self.problems


@understood
def verify(
    src: Openable | Checkpoint,
    *,
    max_memory: Size | None = None,
    limits: Limits | None = None,
    threads: int | None = None,
    progress: Progress | None = None,
) -> VerifyReport:
    """Verify a whole checkpoint of any format; nothing about its files raises, everything is in the report.

    Of an open checkpoint, its own files are verified, and it stays open.
    `progress` is called with the number of bytes that were read since its last call, from any thread.
    """
    workers = reading_threads(max_memory, threads)
    check = Verification(limits or Limits(), workers, progress)
    if isinstance(src, Checkpoint):
        check.opened(src)
        return check.report(src.path)
    if not isinstance(src, str | os.PathLike):
        check.one(src)
        return check.report(f"<{type(src).__name__}>")
    try:
        path = place_of(src)
    except BadPath as error:
        check.refuse(str(src), error)
        return check.report(str(src))
    for _ in range(TRIES):
        check = Verification(limits or Limits(), workers, progress)
        if not isinstance(path, Url):
            check.sealed(path, whole=True)
        if isinstance(path, Url) or os.path.isdir(path):
            check.directory(path)
        else:
            check.one(path)
        if not check.replaced:
            break
    return check.report(path)


class Range(Struct):
    """A span with what is known about it."""

    span: Span
    label: str
    crc32: int | None
    store: Store
    tensors: list[str] = field(default_factory=list)
    content_nbytes: int | None = None
    """Length after inflating, for a compressed record."""


class Verification:
    """Collects what is found in one or several checkpoints."""

    def __init__(self, limits: Limits, threads: int, progress: Progress | None) -> None:
        self._limits, self._threads, self._progress = limits, threads, progress
        self._formats: list[str] = []
        self._damaged: list[Damage] = []
        self._problems: list[Problem] = []
        self._checked = self._unchecked_nbytes = 0
        self._files: list[tuple[str, int]] = []
        self._notes: list[str] = []
        self._unchecked: dict[str, None] = {}
        self._skipped: list[str] = []
        self._seal: Seal | None = None
        self._vouched: dict[str, int] = {}
        """Files that are as a seal says, digest and all, and their lengths."""
        self._broken: set[str] = set()
        """Files that are not."""
        self.replaced = False
        """Whether another checkpoint took the place of the folder before all of it was read."""

    def report(self, path: str) -> VerifyReport:
        order = sorted(self._damaged, key=lambda d: (d.file, d.offset))
        return VerifyReport(
            path,
            self._formats[0] if self._formats else "",
            sum(nbytes for _, nbytes in self._files),
            tuple(self._files),
            tuple(self._notes),
            tuple(order),
            tuple(self._problems),
            max(self._checked, sum(self._vouched.values())),
            tuple(self._unchecked),
            self._unchecked_nbytes,
            tuple(self._skipped),
            self._seal,
        )

    def sealed(self, path: str, *, whole: bool = False) -> None:
        """Compare a folder, or a file, with its seal, if it has one. `whole` where it is all that is verified."""
        try:
            found = compared(path, self._limits, threads=self._threads, progress=self._progress)
        except HoldfastError as error:
            self.refuse(seal_path(path), error, ours=True)
            return
        if found is None:
            return
        self._seal = found.seal if whole else self._seal
        for file, one in found.wrong.items():
            self._problems.append(Problem(file, one.message, "Corrupted" if one.damaged else "StoreError", damaged=one.damaged))
        self._broken |= {file for file, one in found.wrong.items() if one.damaged}
        self._vouched |= found.vouched
        inside = "" if whole else f"{os.path.basename(path)}/"
        self._notes += [f"{inside}{name} was not sealed with the others" for name in found.extra]

    def directory(self, path: str) -> None:
        """A directory as one checkpoint, and then what is in it besides."""
        failed: HoldfastError | None = None
        done: set[str] = set()
        store = None
        try:
            store = store_of(path, self._limits)
            keys = store.list() if store.folder else ()
            try:
                done = self._checkpoint(store, path)
            except HoldfastError as error:
                failed = detached(error)
        except HoldfastError as error:
            self.refuse(path, error)
            return
        finally:
            if store is not None:
                self.replaced = store.gone
                store.close()
        if self.replaced:
            self.refuse(path, failed or Replaced("the folder was replaced while it was read; verify it again", file=path))
            return
        found_before = len(self._formats)
        for key in keys:
            if key.endswith(f"/{SEAL}") and not isinstance(path, Url) and os.path.join(path, key) not in self._vouched:
                self.sealed(os.path.dirname(os.path.join(path, key)))
        for key in keys:
            if key in done or key == SEAL or key.endswith(SUFFIX) or key.rsplit("/", 1)[-1].startswith("."):
                continue
            file = join(path, key)
            if key + SUFFIX in keys and not isinstance(path, Url):
                self.sealed(file)
            if key.lower().endswith(SUFFIXES):
                self.one(file, optional=True, ours=MANIFEST in keys)
            elif file not in self._vouched:
                self._skipped.append(file)
        named = any(problem.file != path for problem in self._problems) and not isinstance(failed, Corrupted)
        told = len(self._formats) > found_before or self._vouched
        if failed is not None and not named and not (isinstance(failed, UnknownFormat) and told):
            self.refuse(path, failed, ours=MANIFEST in keys)

    def one(self, path: Openable, *, optional: bool = False, ours: bool = False) -> None:
        """One file. With `optional`, one that is no checkpoint at all is passed over; `ours` as for `refuse`."""
        label = path if isinstance(path, str) else f"<{type(path).__name__}>"
        try:
            store = store_of(path, self._limits)
            try:
                self._checkpoint(store, label)
            finally:
                self.replaced |= store.gone
                store.close()
        except UnknownFormat as error:
            if label in self._vouched:
                return
            if not optional:
                self.refuse(label, error)
            else:
                self._skipped.append(label)
        except HoldfastError as error:
            self.refuse(label, error, ours=ours)

    def opened(self, checkpoint: Checkpoint) -> None:
        """The files of a checkpoint that is open."""
        try:
            self._checkpoint(checkpoint.source.store, checkpoint.path)
        except HoldfastError as error:
            self.refuse(checkpoint.path, error)

    def refuse(self, file: str, error: HoldfastError, *, ours: bool = False) -> None:
        """Enter an error of a file; what breaks a rule in `ours` is damage, since no other program writes such files."""
        place = file if error.file in (None, file) else _label(file, error.file)
        if isinstance(error, Corrupted) and isinstance(error.expected, int) and isinstance(error.found, int):
            self._damaged.append(Damage(place, (), "", error.offset or 0, 0, error.expected, error.found, error.message))
        else:
            damaged = isinstance(error, Corrupted) or ((ours or place in self._broken) and isinstance(error, FormatError))
            self._problems.append(Problem(place, error.message, type(error).__name__, damaged=damaged))

    def _checkpoint(self, store: Store, path: str) -> set[str]:
        """Verify what one store holds; gives the keys of its files back. Raises where it does not open."""
        with store.reading():
            return self._content(OpenSource(store, limits=self._limits, threads=self._threads), path)

    def _content(self, source: OpenSource, path: str) -> set[str]:
        zipped = begins_like_zip(source)
        tensors: Mapping[str, LazyTensor] = {}
        kind = "torch-zip"
        archives: tuple[str, ...] = ()
        with located(file=path), resting_collector():
            try:
                found = detect(source)
                kind = found.name
                description = found.describe(source)
                kind, tensors = description.format, dict(description.tensors)
                archives = description.archives
                self._notes += description.notes
                for change in description.changed:
                    self.refuse(path, change)
            except FormatError as error:
                if not zipped:
                    raise
                read_archive(source, source.store.list()[0], fold_case=kind != NPZ)  # raises where the archive itself is at fault
                self.refuse(path, error)
            except Corrupted:
                if not zipped:
                    raise
                # The record that is damaged is found again among all of them.
            if kind == "native":
                try:
                    self._notes += check_files(source)
                except HoldfastError as error:
                    self.refuse(path, error, ours=True)
        ranges = self._tensor_ranges(tensors, path)
        keys = sorted({at.span.key for at in ranges.values() if at.store is source.store}) or list(source.store.list())[:1]
        if kind == "dcp":
            # Values that are no tensors may have a file to themselves, and items that do not open are in some file, too.
            keys = [key for key in source.store.list() if key.endswith(".distcp")]
        if archives:
            keys = list(archives)
        for key in archives or keys[:zipped]:
            _add_records(ranges, source, key, arrays=kind == NPZ)
        if archives:
            _fold_into_records(ranges)
        self._sweep(source, ranges, keys, path=path)
        self._formats.append(kind)
        self._files += [(os.path.basename(path) if _label(path, key) == path else key, source.store.size(key)) for key in keys]
        return set(keys)

    def _tensor_ranges(self, tensors: Mapping[str, LazyTensor], path: str) -> dict[object, Range]:
        """The storages of all tensors, each once, with every name that uses it. One that cannot be found is a problem."""
        ranges: dict[object, Range] = {}
        for name, tensor in tensors.items():
            for storage in _with_parts(tensor):
                if storage.nbytes:
                    try:
                        place: Place = (storage.key, storage.start, storage.nbytes)
                    except HoldfastError as error:
                        self._lost(path, error, name)
                        continue
                    at = ranges.get(place)
                    if at is None:
                        span = Span(*place, summed=storage.crc32 is not None)
                        at = ranges[place] = Range(span, storage.label, storage.crc32, _store_of(storage, tensor))
                    at.tensors.append(name)
        return ranges

    def _lost(self, path: str, error: HoldfastError, name: str) -> None:
        """Note a tensor whose bytes cannot be found, because what says where they are is damaged."""
        file = _label(path, error.file) if error.file else path
        if isinstance(error, Corrupted) and isinstance(error.expected, int) and isinstance(error.found, int):
            self._damaged.append(Damage(file, (name,), "", error.offset or 0, 0, error.expected, error.found))
        else:
            self._problems.append(Problem(file, error.message, type(error).__name__, (name,)))

    def _sweep(self, source: OpenSource, ranges: Mapping[object, Range], keys: list[str], *, path: str) -> None:
        known = [at for at in ranges.values() if at.content_nbytes is None and at.store is source.store]
        packed = [at for at in ranges.values() if at.content_nbytes is not None]
        between = list(_gaps([at.span for at in known], {key: source.store.size(key) for key in keys}))
        sweep = Sweep(source.store, [*(at.span for at in known), *between])
        work = sweep.tasks(self._progress)
        # What is computed from the files (inflated items) is read through what computes it.
        others = [at for at in ranges.values() if at.store is not source.store]
        inflated = Sweep(others[0].store, [at.span for at in others]) if others else None
        work += inflated.tasks(self._progress) if inflated is not None else []
        if work:
            run_reads(work, self._threads, stores=[source.store, *(at.store for at in others)])
        for number, at in enumerate(known):
            self._settle(at, sweep.outcome(number), path)
        damaged = {name for damage in self._damaged for name in damage.tensors}
        for number, at in enumerate(others):
            # What is unpacked from damaged parts says nothing new.
            if damaged.isdisjoint(at.tensors):
                self._settle(at, inflated.outcome(number) if inflated is not None else None, path, file=path)
        for number, span in enumerate(between, len(known)):
            missed = sweep.outcome(number)
            if isinstance(missed, HoldfastError):
                self._problems.append(Problem(_label(path, span.key), missed.message, type(missed).__name__))
        for at in packed:
            outcome: int | HoldfastError | None
            try:
                outcome = inflated_crc(source, at.span.key, (at.span.start, at.span.stop), content_nbytes=at.content_nbytes or 0)
            except HoldfastError as error:
                outcome = detached(error)
            self._settle(at, outcome, path)

    def _settle(self, at: Range, outcome: int | HoldfastError | None, path: str, *, file: str = "") -> None:
        """Enter the outcome of one range into the report, under the file that it lies in, or the one that is given."""
        file, names = file or _label(path, at.span.key), tuple(at.tensors)
        if isinstance(outcome, HoldfastError):
            self._problems.append(Problem(file, outcome.message, type(outcome).__name__, names))
            return
        if at.crc32 is None and file in self._vouched:
            return
        if at.crc32 is None:
            self._unchecked.update(dict.fromkeys(names))
            self._unchecked_nbytes += at.span.nbytes if names else 0
            return
        self._checked += at.span.nbytes
        if outcome != at.crc32:
            self._damaged.append(Damage(file, names, at.label, at.span.start, at.span.nbytes, at.crc32, outcome))


Place = tuple[str, int, int]

NPZ = "npz"


def _with_parts(tensor: LazyTensor) -> Iterator[Storage]:
    """The storages of a tensor; of one that is stored packed, its parts as well."""
    for storage in tensor.storages:
        if isinstance(storage, SparseStorage):
            yield from storage.parts
        yield storage


def _store_of(storage: Storage, tensor: LazyTensor) -> Store:
    """Where the bytes of a storage are: in the files, or in what unpacks or inflates them."""
    store = tensor.source.store
    return store.below(storage.key) or store


def _add_records(ranges: dict[object, Range], source: OpenSource, key: str, *, arrays: bool) -> None:
    """The records of a zip that are no tensor's storage. Tensors of an .npz end their records, and their checksums cover them."""
    archive = read_archive(source, key, fold_case=not arrays)
    cut = len(archive.prefix) + 1 if archive.prefix and not arrays else 0
    ends = {at.span.stop for at in ranges.values() if at.crc32 is not None and at.span.key == key} if arrays else set()
    inflated = {at.label for at in ranges.values() if at.span.key != key} if arrays else set()
    for name, record in archive.records.items():
        if record.stop in ends or name in inflated:
            continue
        if record.nbytes and record.crc32 is not None and (key, record.start, record.nbytes) not in ranges:
            span = Span(key, record.start, record.nbytes)
            length = None if record.stored else record.content_nbytes
            ranges[key, record.start, record.nbytes] = Range(span, name[cut:], record.crc32, source.store, content_nbytes=length)


def _fold_into_records(ranges: dict[object, Range]) -> None:
    """Let the record that a range without a checksum lies in stand for it: tensors may be cut from a row that is one record."""
    records: dict[str, list[Range]] = {}
    for at in ranges.values():
        if at.crc32 is not None and at.content_nbytes is None:
            records.setdefault(at.span.key, []).append(at)
    starts = {}
    for key, own in records.items():
        own.sort(key=lambda at: at.span.start)
        starts[key] = [at.span.start for at in own]
    for place, at in list(ranges.items()):
        number = bisect_right(starts.get(at.span.key, ()), at.span.start) - 1
        if at.crc32 is None and number >= 0:
            record = records[at.span.key][number]
            if at.span.stop <= record.span.stop and at.store is record.store:
                record.tensors += at.tensors
                del ranges[place]
    for own in records.values():
        for at in own:
            at.tensors = list(dict.fromkeys(at.tensors))


def _gaps(spans: list[Span], sizes: Mapping[str, int]) -> Iterator[Span]:
    """What the spans leave of files of these sizes."""
    reached = dict.fromkeys(sizes, 0)
    for span in sorted(spans, key=lambda s: s.start):
        at = reached[span.key]
        if span.start > at:
            yield Span(span.key, at, span.start - at, summed=False)
        reached[span.key] = max(at, span.stop)
    for key, at in reached.items():
        if at < sizes[key]:
            yield Span(key, at, sizes[key] - at, summed=False)


def _label(path: str, key: str) -> str:
    """The file as a person would name it."""
    if isinstance(path, Url):
        return key if is_url(key) else path if path.rpartition("/")[2] == key else path.below(key)
    return os.path.join(path, key) if os.path.isdir(path) else path
