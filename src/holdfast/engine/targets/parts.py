"""A plan that the ranks of a group write together: each a part, by bytes, and the first one publishes it.

    every rank    has the same plan                                             ──► a hash of it
    first rank    opens the target, links what it takes over, makes files that several ranks write     ──► the target's name
    every rank    writes its part, compares it with what its source records, reads it back             ──► checksums
    first rank    writes what depends on checksums, then the index, publishes                          ──► done, or what went wrong

One process is one part: it has the whole plan, and nothing is sent. A part is a stretch of all bytes, so that each rank reads
neighbours; a file is cut where one rank's stretch ends, and both write it at their offsets. Where a file cannot be cut (an object
of a bucket, a file that a later try is to find whole), files are dealt as they are.
"""

from __future__ import annotations

from bisect import bisect
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from hashlib import blake2b
from itertools import pairwise

import msgspec
import numpy as np

from holdfast.core.documents import message_kind, read_document, write_document
from holdfast.core.group import Ranks, check_same, deal
from holdfast.core.value import Value, replace
from holdfast.engine.saves import Data, FilePlan, Gathered, SavePlan
from holdfast.engine.targets.target import Delivered, Saving, Target
from holdfast.engine.write import BLOCK_NBYTES, PartSums, Written
from holdfast.errors import RankLost, RanksFailed

CUT_NBYTES = 32 << 20  # Files up to this length are written by one rank.


class FilePart(Value, frozen=True):
    file: int
    """The number of a file of the plan."""
    start: int
    stop: int


def deal_files(
    files: Sequence[FilePlan], ranks: int, *, splits: bool, kept: Collection[int] = ()
) -> list[list[FilePart]]:
    """What each rank writes. `splits` says whether several may write one file; of those that one rank writes, those that are `kept`
    are the first rank's."""
    if ranks == 1:
        return [[FilePart(number, 0, file.nbytes) for number, file in enumerate(files)]]
    shares: list[list[FilePart]] = [[] for _ in range(ranks)]
    if not splits:
        left = [number for number in range(len(files)) if number not in kept]
        loads = np.zeros(ranks, np.int64)
        loads[-1] = sum(files[number].nbytes for number in kept)
        # The fullest share comes first, and the first rank has the index to write.
        picks = (
            ranks - 1 - deal(np.array([files[number].nbytes for number in left], np.int64), loads)
        )
        owners = dict.fromkeys(kept, 0) | dict(zip(left, picks.tolist(), strict=True))
        for number, file in enumerate(files):
            shares[owners[number]].append(FilePart(number, 0, file.nbytes))
        return shares
    total, begin = sum(file.nbytes for file in files), 0
    edges = [total * rank // ranks for rank in range(ranks + 1)]
    for number, file in enumerate(files):
        end = begin + file.nbytes
        if file.nbytes <= CUT_NBYTES or any(
            isinstance(one, Data | Gathered) and one.hashed for one in file.segments
        ):
            middle = min(bisect(edges, begin + file.nbytes // 2) - 1, ranks - 1)
            shares[0 if number in kept else middle].append(FilePart(number, 0, file.nbytes))
        else:
            for rank, (low, high) in enumerate(pairwise(edges)):
                if max(begin, low) < min(end, high):
                    shares[rank].append(
                        FilePart(number, max(begin, low) - begin, min(end, high) - begin)
                    )
        begin = end
    return shares


def plan_mark(plan: SavePlan) -> bytes:
    """A hash of the layout of a plan. Ranks with the same mark cut the same files at the same places."""
    mark = blake2b(
        repr((plan.format, plan.listed)).encode("utf-8", "surrogatepass"), digest_size=16
    )
    for segment in (segment for file in (*plan.files, *plan.index) for segment in file.segments):
        labels = (
            segment.labels
            if isinstance(segment, Gathered)
            else (segment.label,)
            if isinstance(segment, Data)
            else ()
        )
        mark.update(f"{type(segment).__name__} {segment.nbytes}\0".encode())
        mark.update("\0".join(labels).encode("utf-8", "surrogatepass"))
    return mark.digest()


class PartTask(msgspec.Struct):
    """The first rank's answer: where the parts come together, and how files are cut and dealt."""

    target: str
    splits: bool
    kept: list[int]
    block: int


class PartReceipt(msgspec.Struct):
    """What a rank has written."""

    whole: dict[int, PartSums]
    """The files that it wrote from end to end, by their numbers in the plan."""
    parts: dict[int, PartSums]
    found: bytes


TASK, RECEIPT = (
    message_kind("task of a part", PartTask),
    message_kind("receipt of a part", PartReceipt),
)
FOUND = message_kind("list of findings", list[bytes])


class Findings:
    """What a verb finds out while its tensors are written, each rank of its own part. This one finds nothing."""

    def take(self) -> bytes:
        """What was found here."""
        return b""

    def put(self, found: Sequence[bytes]) -> None:
        """Take what all ranks have found in the place of what was found here."""


class Shared(Value, frozen=True, eq=False):
    """A plan on its way, as one rank sees it."""

    plan: SavePlan
    ranks: Ranks
    how: Saving
    begin: Callable[[], Target]
    """Opens the target, on the first rank alone."""
    link: Callable[[Target], None]
    """Takes over files of a base: first of all, so that where one has changed nothing was written in vain."""
    join: Callable[[str], Target]
    """Finds the target on the others, by its name."""
    mark: Callable[[], bytes]
    """A hash of what must be the same on all ranks, beside the plan."""
    findings: Findings

    def write(self) -> None:
        """Write the plan with all ranks and publish it."""
        ranks, opened = self.ranks, list[Target]()
        several = ranks.size > 1
        with ExitStack() as held:

            def begin(marks: list[bytes]) -> list[bytes]:
                check_same(marks)
                target = held.enter_context(self.begin())
                opened.append(target)
                self.link(target)
                return [write_document(TASK, self._begun(target)) if several else b""] * ranks.size

            answer = ranks.agree(plan_mark(self.plan) + self.mark() if several else b"", begin)
            task = read_document(TASK, answer) if several else PartTask("", False, [], 0)
            files = self.plan.files
            shares = deal_files(files, ranks.size, splits=task.splits, kept=task.kept)
            here = replace(self.how, block=task.block) if several else self.how
            joined: Target | None = None
            own: dict[int, Written] = {}
            receipt = PartReceipt({}, {}, b"")
            local: bytes | Exception
            try:
                if not opened:
                    joined = self.join(task.target)
                    held.callback(joined.close)
                self._fill(joined or opened[0], shares[ranks.rank], here, own, receipt)
                if joined is not None:
                    self.how.last()
                local = write_document(RECEIPT, receipt) if joined is not None else b""
            except Exception as error:
                local = error

            def publish(messages: list[bytes]) -> list[bytes]:
                receipts = [read_document(RECEIPT, message) for message in messages[1:]]
                return [self._publish(opened[0], own, receipts)] * ranks.size

            try:
                answer = ranks.agree(local, publish)
            except (RanksFailed, RankLost) as error:
                # Not where the first rank is lost, and has what it needs from here: it may have published, or do so yet.
                if joined is not None and (
                    isinstance(error, RanksFailed) or isinstance(local, Exception)
                ):
                    joined.give_up()
                raise
            if several:
                found = read_document(FOUND, answer)
                self.findings.put(found)

    def _begun(self, target: Target) -> PartTask:
        """On the first of several ranks: make the files that are shared."""
        files, count = self.plan.files, self.ranks.size
        kept = [
            n
            for n, file in enumerate(files)
            if target.keeps(file) or (not target.splits and self.how.seals.wanted(file.key))
        ]
        for number in _cut(deal_files(files, count, splits=target.splits, kept=kept)):
            target.share(files[number])
        # Ranks of machines with other numbers of cores would cut otherwise.
        return PartTask(target.join_name, target.splits, kept, self.how.block or BLOCK_NBYTES)

    def _fill(
        self,
        target: Target,
        share: Sequence[FilePart],
        how: Saving,
        own: dict[int, Written],
        receipt: PartReceipt,
    ) -> None:
        """Write the part of this rank: what it knows of files that it shares is for itself, on the first rank, or for the
        receipt."""
        for part in share:
            file = self.plan.files[part.file]
            if part.stop - part.start == file.nbytes:
                crcs = target.begin(file)(how)
                if not self.ranks.first:
                    receipt.whole[part.file] = PartSums.of_whole(file, crcs)
            elif self.ranks.first:
                own[part.file] = target.fill_part(file, (part.start, part.stop), how)
            else:
                receipt.parts[part.file] = PartSums.of(
                    file, target.fill_part(file, (part.start, part.stop), how)
                )
        if not self.ranks.first:
            receipt.found = self.findings.take()

    def _publish(
        self, target: Target, own: Mapping[int, Written], receipts: Sequence[PartReceipt]
    ) -> bytes:
        """On the first rank. Gives what all ranks have found."""
        files, others = self.plan.files, list[Delivered]()
        for number in sorted({*own, *(number for receipt in receipts for number in receipt.parts)}):
            written = own.get(number) or Written.none_of(files[number])
            for receipt in receipts:
                if number in receipt.parts:
                    receipt.parts[number].add_to(files[number], written)
            target.finish_shared(files[number], written, self.how)
        for receipt in receipts:
            for number, sums in receipt.whole.items():
                self.how.crcs.update(sums.whole(files[number]))
                others.append((files[number].key, files[number].nbytes, False))
        target.publish(self.plan.index, self.how, others)
        return (
            write_document(FOUND, [self.findings.take(), *(receipt.found for receipt in receipts)])
            if receipts
            else b""
        )


def _cut(shares: Iterable[Sequence[FilePart]]) -> list[int]:
    """The files that several ranks write."""
    writers = Counter(part.file for share in shares for part in share)
    return [number for number, count in writers.items() if count > 1]
