"""`verify`: is every byte of a checkpoint the one that was written? Everything that is not is reported, not the first.

1. The checkpoint is opened, which checks its structure. A zip whose pickle is damaged still has its records.
2. Every byte of its files is read once, in parallel. Ranges with a recorded checksum (the storages of tensors, each once however
   many names it has; the other records of a zip) are summed; the bytes between them are read so that I/O errors show.
3. Headers, indexes and manifests that Holdfast wrote carry checksums as well; what another program changed in them is reported.
4. What is sealed (`holdfast.seal.json`) is compared with its seal before: every file by its name, its length and its digest. That
   is a second reading: a seal is about whole files, and what they record of themselves tells which tensor it is.
5. So are files on a disk whose digests others record: the names of blobs of the Hugging Face cache, `SHA256SUMS`, `*.sha256`.

In a directory, other checkpoint files that are no part of the checkpoint (a `pytorch_model.bin` beside safetensors) are verified
too, each by itself; and where the directory as a whole does not open, all of them are.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from holdfast.core.arrays import Bools, Ints
from holdfast.core.checkpoint import Checkpoint
from holdfast.core.group import ALONE, AnyGroup, Ranks, compare_marks, joined_ranks
from holdfast.core.limits import Limits
from holdfast.core.notebook import NotebookResult
from holdfast.core.options import validate_arguments
from holdfast.core.protocols import Description, Store
from holdfast.core.quantities import Size
from holdfast.core.registry import find_hook
from holdfast.core.runtime import gc_paused
from holdfast.core.table import Table
from holdfast.core.tensor import NO_CRC
from holdfast.engine.checksums import Progress, RangeSums
from holdfast.engine.coalesce import Ranges, find_gaps
from holdfast.engine.source import OpenSource
from holdfast.engine.stored_ranges import StorageUse, StoredRanges, find_store, find_stored_ranges
from holdfast.engine.table import NO_TENSORS
from holdfast.engine.threads import count_reading_threads, run_reads
from holdfast.errors import (
    Corrupted,
    FormatError,
    HoldfastError,
    RankLost,
    RanksFailed,
    Replaced,
    UnknownFormat,
    drop_tracebacks,
    error_context,
)
from holdfast.formats import file_suffixes, format_of
from holdfast.formats.detect import detect
from holdfast.formats.npy.members import member_key
from holdfast.formats.safetensors.schema import MANIFEST
from holdfast.formats.torch.storages import RecordStorages
from holdfast.formats.zip.reader import inflated_crc, read_archive
from holdfast.stores.local import MAX_KEPT_FILES
from holdfast.stores.paths import describe_place, place_of
from holdfast.stores.place import join, place_at
from holdfast.verbs.locate import locate_checkpoint
from holdfast.verbs.open import Openable, open_store, opened_checkpoint, retry_opening
from holdfast.verbs.seals.check import Misfit, compared, seal_path
from holdfast.verbs.seals.document import SEAL, SUFFIX, Seal
from holdfast.verbs.seals.recorded import compare_recorded

if TYPE_CHECKING:
    from holdfast.extras.maps.find import AnyMap, Map

OF_RANKS = (RanksFailed, RankLost)
"""Errors that are about no file, and end it all."""


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
class VerifyReport(NotebookResult):
    """What `verify` found."""

    path: str
    format: str
    """As `Checkpoint.format`; empty where nothing opened."""
    nbytes: int = 0
    files: tuple[tuple[str, int], ...] = ()
    notes: tuple[str, ...] = ()
    """Sentences about what is odd in the files."""
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
    """The seal of the checkpoint, where there is one."""
    tensors: int = 0
    required: bool = False
    """Whether what cannot be compared is a failure (`require=True`)."""
    own_sums: bool = False
    """Whether headers or manifests of Holdfast were compared with their own checksums: the only ones without tensors."""

    @property
    def compared(self) -> int:
        """Tensors that had something to be compared with."""
        return self.tensors - len(self.unchecked)

    @property
    def verdict(self) -> str:
        """In a word: "ok", every tensor was compared with a recorded checksum; "partial", only some were; "readable", nothing was
        recorded, and so nothing compared; "damaged"; or "unverified", not all of it could be looked at."""
        if self.damaged or self.problems:
            return "damaged" if all(problem.damaged for problem in self.problems) else "unverified"
        if not self.checked_nbytes and (self.unchecked or not self.own_sums):
            return "readable"
        return "partial" if self.unchecked else "ok"

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong, as far as anyone can tell: `verdict` says how far. With `require`, whether all is "ok"."""
        return self.verdict in (("ok",) if self.required else ("ok", "partial", "readable"))

    def _list_headline_facts(self) -> Iterator[tuple[str, str]]:
        yield from NotebookResult._list_headline_facts(self)
        yield "verdict", self.verdict


@validate_arguments
def verify(
    src: Openable | Checkpoint,
    *,
    require: bool = False,
    max_memory: Size | None = None,
    limits: Limits | None = None,
    threads: int | None = None,
    progress: Progress | None = None,
    group: AnyGroup | None = None,
    map: AnyMap | None = None,
) -> VerifyReport:
    """Verify a whole checkpoint of any format; nothing about its files raises, everything is in the report.

    A file on a disk is also compared with a seal, with `*.sha256` and `SHA256SUMS` beside it, and with the name of its blob in the
    Hugging Face cache. If nothing records a checksum of a file, it is read, and its verdict is "readable". With
    `require=True` such a report is not `ok`, nor is one where some tensors had nothing to be compared with.

    Of an open checkpoint, its own files are verified, and it stays open. Of the ranks of a `group` each reads a part of the bytes,
    and all get one report. With a `map`, first its proof: `DoesNotFit` where the checkpoint is not of its layout, as a whole.
    `progress` is called with the number of bytes that were read since its last call, from any thread.
    """
    with joined_ranks(group, "verify") as ranks, ranks.joint_progress(progress) as counted:
        workers = count_reading_threads(max_memory, threads, ranks.count_local_ranks())
        if map is not None:
            with opened_checkpoint(src, limits=limits) as checkpoint:
                found: Map | None = find_hook("find_map")(map, checkpoint, is_check=True)
                if found is not None:
                    found.through(checkpoint)  # This proves that the map fits.
        return replace(
            _verified(src, limits or Limits(), workers, progress=counted, ranks=ranks),
            required=require,
        )


def _verified(
    src: Openable | Checkpoint,
    limits: Limits,
    workers: int,
    *,
    progress: Progress | None,
    ranks: Ranks,
) -> VerifyReport:
    check = Verification(limits, workers, progress, ranks)
    if isinstance(src, Checkpoint):
        check.opened(src)
        return check.report(src.path)
    if not isinstance(src, str | os.PathLike):
        check.one(src)
        return check.report(f"<{type(src).__name__}>")
    try:
        path, index = locate_checkpoint(place_of(src), limits)
    except HoldfastError as error:
        check.refuse(describe_place(src), error)
        return check.report(describe_place(src))
    for _ in retry_opening(src):
        check = Verification(limits, workers, progress, ranks)
        place = place_at(path)
        if place.on_disk:
            check.sealed(path, whole=True)
        if place.is_folder or not place.on_disk:
            check.directory(path, index=index)
        else:
            check.recorded(path)
            check.one(path)
        if not check.replaced:
            break
    return check.report(path)


class Verification:
    """Collects what is found in one or several checkpoints."""

    def __init__(
        self, limits: Limits, threads: int, progress: Progress | None, ranks: Ranks = ALONE
    ) -> None:
        self._limits, self._threads, self._progress, self._ranks = limits, threads, progress, ranks
        self._formats: list[str] = []
        self._damaged: list[Damage] = []
        self._problems: list[Problem] = []
        self._checked = self._unchecked_nbytes = 0
        self._files: list[tuple[str, int]] = []
        self._notes: list[str] = []
        self._unchecked: dict[str, None] = {}
        self._skipped: list[str] = []
        self._seal: Seal | None = None
        self._tensors = 0
        self._own_sums = False
        self._vouched: dict[str, int] = {}
        """Files whose digests are those of a seal, and their lengths."""
        self._broken: set[str] = set()
        """Files whose digests are not."""
        self.replaced = False
        """Whether another checkpoint took the place of the folder before all of it was read."""

    def report(self, path: str) -> VerifyReport:
        order = sorted(self._damaged, key=lambda d: (d.file, d.offset))
        return VerifyReport(
            path, self._formats[0] if self._formats else "", sum(nbytes for _, nbytes in self._files), tuple(self._files),
            tuple(self._notes), tuple(order), tuple(self._problems), max(self._checked, sum(self._vouched.values())),
            tuple(self._unchecked), self._unchecked_nbytes, tuple(self._skipped), self._seal, self._tensors,
            own_sums=self._own_sums,
        )  # fmt: skip

    def sealed(self, path: str, *, whole: bool = False) -> None:
        """Compare a folder, or a file, with its seal, if it has one. `whole` where it is all that is verified."""
        try:
            found = compared(
                path,
                self._limits,
                threads=self._threads,
                progress=self._progress,
                ranks=self._ranks,
            )
        except HoldfastError as error:
            self.refuse(seal_path(path), error, ours=True)
            return
        if found is None:
            return
        self._seal = found.seal if whole else self._seal
        self._enter_digests(found.wrong, found.vouched)
        inside = "" if whole else f"{os.path.basename(path)}/"
        self._notes += [f"{inside}{name} is not part of the seal" for name in found.extra]

    def recorded(self, path: str, keys: Sequence[str] | None = None) -> None:
        """Compare the files of a folder, or one file, with digests that other programs recorded."""
        try:
            outcome = compare_recorded(
                path,
                keys,
                self._limits,
                threads=self._threads,
                progress=self._progress,
                ranks=self._ranks,
            )
        except HoldfastError as error:
            self.refuse(path, error)
            return
        except OSError:
            return  # the folder cannot be opened: opening the checkpoint says so
        self._enter_digests(outcome.wrong, outcome.vouched)

    def _enter_digests(self, wrong: Mapping[str, Misfit], vouched: Mapping[str, int]) -> None:
        for file, misfit in wrong.items():
            kind = "Corrupted" if misfit.damaged else "StoreError"
            self._problems.append(Problem(file, misfit.message, kind, damaged=misfit.damaged))
        self._broken |= {file for file, misfit in wrong.items() if misfit.damaged}
        self._vouched |= vouched
        for file in self._broken & self._vouched.keys():
            del self._vouched[file]

    def directory(self, path: str, *, index: str = "") -> None:
        """Verify a folder and the other checkpoints in it; `index` names the index it was opened by."""
        failed: HoldfastError | None = None
        done: set[str] = set()
        store = None
        try:
            store = open_store(path, self._limits)
            store.index = index
            keys = store.list() if store.is_folder else ()
            if place_at(path).on_disk:
                # A save that replaces the folder removes these files. Those that are open can still be read.
                for key in keys[:MAX_KEPT_FILES]:
                    with suppress(HoldfastError):
                        store.size(key)
                self.recorded(path, keys)
            try:
                done = self._checkpoint(store, path)
            except OF_RANKS:
                raise
            except HoldfastError as error:
                failed = drop_tracebacks(error)
        except HoldfastError as error:
            self.refuse(path, error)
            return
        finally:
            if store is not None:
                self.replaced = store.is_gone
                store.close()
        if self.replaced:
            self.refuse(
                path,
                failed
                or Replaced(
                    "the folder was replaced while it was read; verify it again", file=path
                ),
            )
            return
        found_before, on_disk = len(self._formats), place_at(path).on_disk
        for key in keys:
            if (
                key.endswith(f"/{SEAL}")
                and on_disk
                and os.path.join(path, key) not in self._vouched
            ):
                self.sealed(os.path.dirname(os.path.join(path, key)))
        for key in keys:
            if (
                key in done
                or key == SEAL
                or key.endswith(SUFFIX)
                or key.rsplit("/", 1)[-1].startswith(".")
            ):
                continue
            file = join(path, key)
            if key + SUFFIX in keys and on_disk:
                self.sealed(file)
            if key.lower().endswith(file_suffixes()):
                self.one(file, optional=True, ours=MANIFEST in keys)
            elif file not in self._vouched:
                self._skipped.append(file)
        named = any(problem.file != path for problem in self._problems) and not isinstance(
            failed, Corrupted
        )
        verified = len(self._formats) > found_before or self._vouched
        if (
            failed is not None
            and not named
            and not (isinstance(failed, UnknownFormat) and verified)
        ):
            self.refuse(path, failed, ours=MANIFEST in keys)

    def one(self, path: Openable, *, optional: bool = False, ours: bool = False) -> None:
        """Verify one file. With `optional`, one that is no checkpoint is passed over; `ours` as for `refuse`."""
        label = path if isinstance(path, str) else f"<{type(path).__name__}>"
        try:
            store = open_store(path, self._limits)
            try:
                self._checkpoint(store, label)
            finally:
                self.replaced |= store.is_gone
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
        """Verify the files of an open checkpoint."""
        try:
            self._checkpoint(checkpoint.source.store, checkpoint.path)
        except HoldfastError as error:
            self.refuse(checkpoint.path, error)

    def refuse(
        self,
        file: str,
        error: HoldfastError,
        *,
        ours: bool = False,
        tensors: tuple[str, ...] = (),
    ) -> None:
        """Enter an error of a file, or of some of its tensors.

        What breaks a rule in `ours` is damage, since no other program writes such files.
        """
        if isinstance(error, OF_RANKS):
            raise error
        place = file if error.file in (None, file) else place_at(file).file(error.file)
        expected, found = error.expected, error.found
        is_corrupted = isinstance(error, Corrupted)
        if is_corrupted and isinstance(expected, int) and isinstance(found, int):
            message = "" if tensors else error.message
            offset = error.offset or 0
            self._damaged.append(Damage(place, tensors, "", offset, 0, expected, found, message))
            return
        is_broken = (ours or place in self._broken) and isinstance(error, FormatError)
        kind, damaged = type(error).__name__, not tensors and (is_corrupted or is_broken)
        self._problems.append(Problem(place, error.message, kind, tensors, damaged))

    def _checkpoint(self, store: Store, path: str) -> set[str]:
        """Verify what one store holds; gives the keys of its files back. Raises where it does not open."""
        with store.reading():
            return self._content(
                OpenSource(store, limits=self._limits, threads=self._threads), path
            )

    def _content(self, source: OpenSource, path: str) -> set[str]:
        tensors: Table = NO_TENSORS
        format = format_of("torch-zip")
        zipped = format.matches(source)
        archives: tuple[str, ...] = ()
        check: Callable[[], Sequence[str]] | None = None
        description: Description | None = None
        with error_context(file=path), gc_paused():
            try:
                format = detect(source)
                description = format.describe(source)
                format, tensors = format_of(description.format), description.tensors
                archives = description.archives
                self._notes += description.notes
                for change in description.changed:
                    self.refuse(path, change)
                check = description.check
            except FormatError as error:
                if not zipped:
                    raise
                # Raises where the archive itself is at fault.
                read_archive(source, source.store.list()[0], fold_case=not format.arrays)
                self.refuse(path, error)
            except Corrupted:
                if not zipped:
                    raise
                # The record that is damaged is found again among all of them.
            if check is not None:
                try:
                    self._notes += check()
                except HoldfastError as error:
                    self.refuse(path, error, ours=True)
            self._tensors += len(tensors)
            self._own_sums |= check is not None
            # Records of archives are read below: by then the tree and its tensors are gone.
            table = tensors.without_lazy_tensors()
            # If what says where some row lies is damaged, each row is asked by itself, so that the errors name them.
            with suppress(HoldfastError):
                table = table.locate_rows(range(len(table)))
            tensors, description = NO_TENSORS, None
            lost: list[tuple[str, HoldfastError]] = []
            stored = find_stored_ranges(table, _pieces(table, lost))
        for name, broken in lost:
            self.refuse(path, broken, tensors=(name,))
        found = CheckpointBytes(source, table, stored)
        keys = found.keys() or list(source.store.list())[:1]
        if format.data:
            # Values that are no tensors may have a file to themselves, and items that do not open are in some file, too.
            keys = [key for key in source.store.list() if key.endswith(format.data)]
        if archives:
            keys = list(dict.fromkeys((*archives, *found.keys())))
        for key in archives or keys[:zipped]:
            found.add_records(key, arrays=format.arrays)
        if archives:
            found.fold_into_records()
        self._sweep(found, keys=keys, path=path)
        self._formats.append(format.name)
        place = place_at(path)
        self._files += [
            (os.path.basename(path) if place.file(key) == path else key, source.store.size(key))
            for key in keys
        ]
        return set(keys)

    def _sweep(self, found: CheckpointBytes, *, keys: list[str], path: str) -> None:
        store, stored = found.source.store, found.stored
        near = stored.in_store(store)
        near[[*found.packed]] = False
        if self._ranks.size > 1:
            compare_marks(self._ranks, found.mark(keys))
        (own,) = near.nonzero()
        filled = stored.ranges.select(near)
        between = find_gaps(filled, {key: store.size(key) for key in keys})
        needs_crc = np.append(stored.crcs[own] != NO_CRC, np.zeros(len(between), np.bool_))
        sweep = RangeSums(store, Ranges.concatenate([filled, between]), needs_crc=needs_crc)
        work, stores = sweep.tasks(self._progress), [store]
        # What is computed from the files (inflated items) is read through what computes it, and what lies beside
        # the file (external data of ONNX) in its folder.
        other_sweeps: list[tuple[Ints, RangeSums]] = []
        for other in dict.fromkeys(one for one in stored.stores if one is not store):
            in_other = stored.in_store(other)
            (numbers,) = in_other.nonzero()
            other_sweep = RangeSums(
                other, stored.ranges.select(in_other), needs_crc=stored.crcs[numbers] != NO_CRC
            )
            other_sweeps.append((numbers, other_sweep))
            stores.append(other)
            work += other_sweep.tasks(self._progress)
        # A task is about a block. The first rank has the fewest, where they cannot all have as many.
        count, turn = self._ranks.size, self._ranks.size - 1 - self._ranks.rank
        work = work[len(work) * turn // count : len(work) * (turn + 1) // count]
        if work:
            run_reads(work, self._threads, stores=stores)
        for one in (sweep, *[other_sweep for _, other_sweep in other_sweeps]):
            one.join(self._ranks)
        self._settle(found, own, sweep, path)
        # What is computed from damaged bytes says nothing new.
        damaged = {name for damage in self._damaged for name in damage.tensors}
        for numbers, other_sweep in other_sweeps:
            fresh = np.array(
                [damaged.isdisjoint(found.names(number)) for number in numbers.tolist()], np.bool_
            )
            self._settle(found, numbers, other_sweep, path, fresh=fresh, file=path)
        for number, missed in sorted(sweep.errors.items()):
            if number >= len(own):
                key = between.keys[between.files.item(number - len(own))]
                self._problems.append(
                    Problem(place_at(path).file(key), missed.message, type(missed).__name__)
                )
        for number, nbytes in found.packed.items():
            self._settle_packed(found, number, nbytes, path)

    def _settle(
        self,
        found: CheckpointBytes,
        numbers: Ints,
        sweep: RangeSums,
        path: str,
        *,
        fresh: Bools | None = None,
        file: str = "",
    ) -> None:
        """Enter the outcome of ranges (those of these numbers that are `fresh`) under their files, or under `file`."""
        stored = found.stored
        crcs, nbytes = stored.crcs[numbers], stored.ranges.nbytes[numbers]
        sums = sweep.crcs()[: len(numbers)]
        is_counted = np.ones(len(numbers), np.bool_) if fresh is None else fresh
        is_failed = np.zeros(len(numbers), np.bool_)
        is_failed[[number for number in sweep.errors if number < len(numbers)]] = True
        is_recorded = crcs != NO_CRC
        self._checked += int(nbytes[is_counted & is_recorded & ~is_failed].sum())
        is_wrong = is_counted & (is_failed | (is_recorded & (sums != crcs)))
        for at in np.flatnonzero(is_wrong).tolist():
            number = numbers.item(at)
            self._enter(found, number, sweep.outcome(at), file or found.file(number, path))

        keys = stored.ranges.keys
        places = [file or place_at(path).file(key) for key in keys]
        is_vouched = np.array([place in self._vouched for place in places], np.bool_)
        is_used = np.diff(stored.row_edges)[numbers] > 0
        is_unknown = is_counted & ~is_recorded & ~is_failed & is_used
        is_unknown &= ~is_vouched[stored.ranges.files[numbers]]
        self._unchecked_nbytes += int(nbytes[is_unknown].sum())
        is_unchecked = np.zeros(len(stored), np.bool_)
        is_unchecked[numbers[is_unknown]] = True
        rows = stored.rows[is_unchecked[stored.range_indices]].tolist()
        self._unchecked.update((found.table.names[row], None) for row in rows)

    def _settle_packed(
        self, found: CheckpointBytes, number: int, content_nbytes: int, path: str
    ) -> None:
        key, start, nbytes = found.stored.ranges.locate(number)
        outcome: int | HoldfastError | None
        try:
            outcome = inflated_crc(
                found.source, key, (start, start + nbytes), content_nbytes=content_nbytes
            )
        except HoldfastError as error:
            outcome = drop_tracebacks(error)
        self._checked += 0 if isinstance(outcome, HoldfastError) else nbytes
        if outcome != found.stored.crcs.item(number):
            self._enter(found, number, outcome, found.file(number, path))

    def _enter(
        self, found: CheckpointBytes, number: int, outcome: int | HoldfastError | None, file: str
    ) -> None:
        names = found.names(number)
        if isinstance(outcome, HoldfastError):
            self._problems.append(Problem(file, outcome.message, type(outcome).__name__, names))
            return
        _, start, nbytes = found.stored.ranges.locate(number)
        crc = found.stored.crcs.item(number)
        self._damaged.append(Damage(file, names, found.label(number), start, nbytes, crc, outcome))


class CheckpointBytes:
    """The bytes of one checkpoint that are read: the storages of its tensors, and other records of archives."""

    def __init__(self, source: OpenSource, table: Table, stored: StoredRanges) -> None:
        self.source, self.table, self.stored = source, table, stored
        self._labels: dict[int, str] = {}
        """Names of records that are no tensor's."""
        self.packed: dict[int, int] = {}
        """Records that are compressed, and their lengths after inflating."""

    def keys(self) -> list[str]:
        ranges = self.stored.ranges
        used = np.unique(ranges.files[self.stored.in_store(self.source.store)])
        return sorted(ranges.keys[file] for file in used.tolist())

    def mark(self, keys: Sequence[str]) -> bytes:
        """Return a hash of what is to be compared: names of tensors, ranges of files, recorded checksums.

        Ranks with other recorded checksums have opened another checkpoint, and their sums cannot be
        put into one report.
        """
        from hashlib import blake2b  # for ranks

        ranges = self.stored.ranges
        names = repr((keys, ranges.keys, self.table.names)).encode("utf-8", "surrogatepass")
        mark = blake2b(names, digest_size=16)
        for column in (ranges.files, ranges.starts, ranges.nbytes, self.stored.crcs):
            mark.update(np.asarray(column, "<i8").tobytes())
        return mark.digest()

    def file(self, number: int, path: str) -> str:
        return place_at(path).file(self.stored.ranges.locate(number)[0])

    def names(self, number: int) -> tuple[str, ...]:
        return tuple([self.table.names[row] for row in self.stored.rows_of(number)])

    def label(self, number: int) -> str:
        """The name of a range in its file: the label of the first tensor that is all of a storage there, or of the record."""
        place = self.stored.ranges.locate(number)
        for row in [] if number in self._labels else self.stored.rows_of(number):
            for storage in self.table.lazy_tensor(row).storages:
                if (storage.key, storage.start, storage.nbytes) == place:
                    return storage.label
        return self._labels.get(number, "")

    def add_records(self, key: str, *, arrays: bool) -> None:
        """Add records of a zip that are no tensor's storage.

        A tensor of an .npz ends its record, and its checksum covers that. One that is compressed is a file of its own.
        """
        store, stored = self.source.store, self.stored
        held = self.table.storages
        # An archive that was read when it was opened is not read again.
        if isinstance(held, RecordStorages) and held.files[0].key == key:
            archive = held.archive
        else:
            archive = read_archive(self.source, key, fold_case=not arrays)
        cut = len(archive.prefix) + 1 if archive.prefix and not arrays else 0
        ranges = stored.ranges
        own = stored.in_store(store)
        own &= np.array([one == key for one in ranges.keys], np.bool_)[ranges.files]
        starts, nbytes = ranges.starts[own], ranges.nbytes[own]
        ends = set((starts + nbytes)[stored.crcs[own] != NO_CRC].tolist()) if arrays else set()
        inflated = set(ranges.keys) if arrays else set()
        left = [
            record
            for record in archive.records.besides(starts, nbytes)
            if record.nbytes
            and record.crc32 is not None
            and record.stop not in ends
            and member_key(key, record) not in inflated
        ]
        self._labels |= {
            number: record.name[cut:] for number, record in enumerate(left, len(stored))
        }
        self.packed |= {
            number: record.content_nbytes
            for number, record in enumerate(left, len(stored))
            if not record.stored
        }
        crcs = [NO_CRC if record.crc32 is None else record.crc32 for record in left]
        places = [(record.start, record.nbytes) for record in left]
        self.stored = stored.with_unused_ranges(places, crcs, store=store, key=key)

    def fold_into_records(self) -> None:
        """Let the record that a range without a checksum lies in stand for it: tensors may be cut from a row that is one record."""
        hosts = (self.stored.crcs != NO_CRC) & self.stored.in_store(self.source.store)
        hosts[[*self.packed]] = False
        self.stored, left = self.stored.merge_into_hosts(hosts)
        now = np.cumsum(left) - 1
        self._labels = {now.item(number): label for number, label in self._labels.items()}
        self.packed = {now.item(number): nbytes for number, nbytes in self.packed.items()}


def _pieces(table: Table, lost: list[tuple[str, HoldfastError]]) -> Iterator[StorageUse]:
    """Yield the storages of irregular rows. Tensors whose places are damaged in the file are added to `lost`."""
    for row, tensor in table.irregular.items():
        for storage in tensor.storages:
            if not storage.nbytes:
                continue
            try:
                storage.start  # noqa: B018  # what does not know its place yet looks for it now
            except HoldfastError as error:
                lost.append((table.names[row], drop_tracebacks(error)))
            else:
                yield row, storage, find_store(tensor.source, storage.key)
