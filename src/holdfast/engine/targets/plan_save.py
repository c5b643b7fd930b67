"""A save whose plan every rank has: each rank writes a part of its bytes.

This is the kind of save of all verbs but `save_sharded` (`engine/targets/joint_save` has the steps),
for a group of several ranks.

A part is a stretch of all bytes of the plan, so each rank reads neighbouring bytes of the source. A
file is cut where the stretch of a rank ends, and both ranks write it at their offsets. Some files
cannot be cut: an object of a bucket, or a file that a later try must find complete. Such files are
assigned to ranks as they are.
"""

from __future__ import annotations

from bisect import bisect
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import ExitStack
from hashlib import blake2b
from itertools import pairwise

import msgspec
import numpy as np

from holdfast.core.documents import message_type, read_document, write_document
from holdfast.core.group import Ranks, assign_evenly, check_same_checkpoint
from holdfast.core.value import Value, replace
from holdfast.engine.saves import Data, FilePlan, Gathered, SavePlan
from holdfast.engine.targets.joint_save import JointSave
from holdfast.engine.targets.target import DeliveredFile, SaveContext, Target
from holdfast.engine.write import BLOCK_NBYTES, FileSums, RankSums

CUT_NBYTES = 32 << 20
"""The size up to which one rank writes a file."""


class FilePart(Value, frozen=True):
    """A range of the bytes of a file, `stop` not included."""

    file_index: int
    """The position of the file in the plan."""
    start: int
    stop: int


def divide_files(
    files: Sequence[FilePlan], rank_count: int, *, can_cut: bool, kept: Collection[int] = ()
) -> list[list[FilePart]]:
    """Return what each rank writes.

    Args:
        files: The files of the plan.
        rank_count: The number of ranks.
        can_cut: Whether several ranks may write one file.
        kept: Indices of the files that the first rank writes, unless several ranks write them.
    """
    if can_cut:
        return _cut_files(files, rank_count, kept)
    return _assign_whole_files(files, rank_count, kept)


def _assign_whole_files(
    files: Sequence[FilePlan], rank_count: int, kept: Collection[int]
) -> list[list[FilePart]]:
    """Assign each file to one rank, so that all ranks write about as many bytes."""
    free_indices = [index for index in range(len(files)) if index not in kept]
    free_nbytes = np.array([files[index].nbytes for index in free_indices], np.int64)
    loads = np.zeros(rank_count, np.int64)
    loads[-1] = sum(files[index].nbytes for index in kept)

    # `assign_evenly` gives the most to its first holder. The first rank has the index to write as well, so
    # the ranks are numbered from the end.
    holders = rank_count - 1 - assign_evenly(free_nbytes, loads)
    rank_of_file = dict.fromkeys(kept, 0)
    rank_of_file.update(zip(free_indices, holders.tolist(), strict=True))

    shares: list[list[FilePart]] = [[] for _ in range(rank_count)]
    for index, file in enumerate(files):
        shares[rank_of_file[index]].append(FilePart(index, 0, file.nbytes))
    return shares


def _cut_files(
    files: Sequence[FilePlan], rank_count: int, kept: Collection[int]
) -> list[list[FilePart]]:
    """Cut the bytes of all files into one stretch for each rank."""
    total_nbytes = sum(file.nbytes for file in files)
    edges = [total_nbytes * rank // rank_count for rank in range(rank_count + 1)]

    shares: list[list[FilePart]] = [[] for _ in range(rank_count)]
    begin = 0
    for index, file in enumerate(files):
        end = begin + file.nbytes
        if file.nbytes <= CUT_NBYTES or _is_hashed(file):
            rank = min(bisect(edges, begin + file.nbytes // 2) - 1, rank_count - 1)
            shares[0 if index in kept else rank].append(FilePart(index, 0, file.nbytes))
        else:
            for rank, (low, high) in enumerate(pairwise(edges)):
                start, stop = max(begin, low), min(end, high)
                if start < stop:
                    shares[rank].append(FilePart(index, start - begin, stop - begin))
        begin = end
    return shares


def _is_hashed(file: FilePlan) -> bool:
    """Whether content hashes are recorded, for which one rank must see whole tensors."""
    for segment in file.segments:
        if isinstance(segment, Gathered) and segment.is_hashed:
            return True
        if isinstance(segment, Data) and segment.hashing:
            return True
    return False


def hash_plan(plan: SavePlan) -> bytes:
    """Hash the layout of a plan. Ranks with the same hash cut the same files at the same places."""
    head = repr((plan.format, plan.file_sizes)).encode("utf-8", "surrogatepass")
    layout_hash = blake2b(head, digest_size=16)
    for file in (*plan.files, *plan.index):
        for segment in file.segments:
            labels: Sequence[str] = ()
            if isinstance(segment, Gathered):
                labels = segment.labels
            elif isinstance(segment, Data):
                labels = (segment.label,)
            layout_hash.update(f"{type(segment).__name__} {segment.nbytes}\0".encode())
            layout_hash.update("\0".join(labels).encode("utf-8", "surrogatepass"))
    return layout_hash.digest()


class PartWork(msgspec.Struct):
    """How the files are divided. It is the same for all ranks."""

    can_cut: bool
    kept: list[int]
    block_nbytes: int


class RankReceipt(msgspec.Struct):
    """The checksums of what a rank has written, by the positions of files in the plan."""

    whole: dict[int, RankSums]
    """Files that it wrote from end to end."""
    parts: dict[int, RankSums]
    findings: bytes


WORK = message_type("division of a plan", PartWork)
RECEIPT = message_type("receipt of a part", RankReceipt)
FOUND = message_type("list of findings", list[bytes])


class Findings:
    """What a verb finds out while its tensors are written, each rank about its own part.

    This one finds nothing.
    """

    def encode(self) -> bytes:
        """Return what this rank has found."""
        return b""

    def merge(self, found: Sequence[bytes]) -> None:
        """Replace what this rank has found by what all ranks have found."""


class PlanSave(JointSave):
    """A plan on its way to its target, as one rank sees it."""

    def __init__(
        self,
        plan: SavePlan,
        ranks: Ranks,
        saving: SaveContext,
        *,
        open_target: Callable[[], Target],
        link_files: Callable[[Target], None],
        join_target: Callable[[str], Target],
        hash_source: Callable[[], bytes],
        findings: Findings,
    ) -> None:
        """Prepare the save; nothing is opened yet.

        Args:
            plan: The plan, which all ranks have.
            ranks: The ranks that write it.
            saving: How files are written.
            open_target: Opens the target. Called on the first rank.
            link_files: Takes over the files of a base. Called first of all, because the save starts
                again if the base has changed.
            join_target: Finds the target by its name. Called on the other ranks.
            hash_source: Hashes what must be the same on all ranks, besides the plan.
            findings: What the verb finds out.
        """
        self.ranks = ranks
        self._plan = plan
        self._saving = saving
        self._open = open_target
        self._link = link_files
        self._join = join_target
        self._hash_source = hash_source
        self._findings = findings
        self._work = PartWork(can_cut=False, kept=[], block_nbytes=0)
        self._written: dict[int, FileSums] = {}
        """On the first rank: what it wrote of files that it shares, by their positions."""

    def write(self) -> None:
        """Write the plan with all ranks and publish it, or raise on every rank."""
        with ExitStack() as stack:
            stack.push(self.close)
            work = self.assign_work(hash_plan(self._plan) + self._hash_source())
            self._work = read_document(WORK, work)
            # Ranks on machines with other numbers of cores would cut blocks at other places.
            self._saving = replace(self._saving, block_nbytes=self._work.block_nbytes)
            answer = self.write_and_publish(self._write_part)
            findings = read_document(FOUND, answer)
            self._findings.merge(findings)

    def divide_work(self, proposals: list[bytes]) -> list[bytes]:
        """Take over files of the base, and make the files that several ranks write."""
        check_same_checkpoint(proposals)
        target = self.target = self._open()
        self._link(target)
        rank_count = self.ranks.size
        files = self._plan.files
        kept = [index for index, file in enumerate(files) if target.needs_first_rank(file)]
        shares = divide_files(files, rank_count, can_cut=target.can_split_files, kept=kept)
        for index in _find_shared(shares):
            target.create_shared_file(files[index])
        work = PartWork(target.can_split_files, kept, self._saving.block_nbytes or BLOCK_NBYTES)
        return [write_document(WORK, work)] * rank_count

    def join_target(self, name: str) -> Target:
        return self._join(name)

    def _write_part(self, target: Target) -> bytes:
        """Write the part of this rank. The first rank keeps its checksums and sends none."""
        ranks, work = self.ranks, self._work
        shares = divide_files(self._plan.files, ranks.size, can_cut=work.can_cut, kept=work.kept)
        receipt = RankReceipt(whole={}, parts={}, findings=b"")
        for part in shares[ranks.rank]:
            index, file = part.file_index, self._plan.files[part.file_index]
            if part.stop - part.start == file.nbytes:
                crcs = target.prepare_file(file)(self._saving)
                if not ranks.is_first:
                    receipt.whole[index] = RankSums.from_crcs(file, crcs)
                continue

            written = target.write_range_of(file, (part.start, part.stop), self._saving)
            if ranks.is_first:
                self._written[index] = written
            else:
                receipt.parts[index] = RankSums.from_file_sums(file, written)

        if ranks.is_first:
            return b""
        receipt.findings = self._findings.encode()
        self._saving.before_publish()
        return write_document(RECEIPT, receipt)

    def publish(self, receipts: list[bytes]) -> list[bytes]:
        """Finish the files that several ranks wrote, and publish. Return the findings of all."""
        target, files = self.target, self._plan.files
        assert target is not None  # the first rank has opened it
        others = [read_document(RECEIPT, receipt) for receipt in receipts[1:]]
        self._finish_shared(target, others)

        delivered: list[DeliveredFile] = []
        for receipt in others:
            for index, sums in receipt.whole.items():
                self._saving.crcs.update(sums.combine_crcs(files[index]))
                delivered.append(
                    DeliveredFile(files[index].key, files[index].nbytes, is_linked=False)
                )
        target.publish(self._plan.index, self._saving, delivered)
        findings = [self._findings.encode(), *(receipt.findings for receipt in others)]
        return [write_document(FOUND, findings)] * self.ranks.size

    def _finish_shared(self, target: Target, receipts: Sequence[RankReceipt]) -> None:
        """Write what depends on the checksums of files that several ranks wrote."""
        sums_of_file: dict[int, list[RankSums]] = {index: [] for index in self._written}
        for receipt in receipts:
            for index, sums in receipt.parts.items():
                sums_of_file.setdefault(index, []).append(sums)

        for index in sorted(sums_of_file):
            file = self._plan.files[index]
            written = self._written.get(index) or FileSums()
            for sums in sums_of_file[index]:
                sums.add_to(file, written)
            target.finish_shared_file(file, written, self._saving)


def _find_shared(shares: Iterable[Sequence[FilePart]]) -> list[int]:
    """Return the positions of the files that several ranks write."""
    writer_counts = Counter(part.file_index for share in shares for part in share)
    return [index for index, count in writer_counts.items() if count > 1]
