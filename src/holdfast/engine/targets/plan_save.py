"""A save whose plan every rank has: each rank writes a share of its bytes.

This is how groups of ranks run all verbs but `save_sharded`. `engine/targets/joint_save` has the
steps of the protocol, and what a crash at each of them leaves.

    files of the plan    │ file 0       │ file 1    │ file 2                  │
    ranks                │ rank 0          │ rank 1           │ rank 2         │
                                        cut here ┘     cut here ┘

The bytes of all files, one behind the other, are cut into equal shares. So each rank reads
neighboring bytes of the source. A long file is cut where a share ends, and both ranks write it at
their offsets. A file that cannot be cut, such as an object of a bucket, goes to one rank.
"""

from __future__ import annotations

from bisect import bisect
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
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

MAX_UNCUT_NBYTES = 32 << 20
"""The size up to which a file is not cut, but written by one rank."""


class FileRange(Value, frozen=True):
    """A range of the bytes of a file, `stop` not included."""

    file_index: int
    """The position of the file in the plan."""
    start: int
    stop: int


def divide_files(
    files: Sequence[FilePlan],
    rank_count: int,
    *,
    can_cut: bool,
    first_rank_files: Collection[int] = (),
) -> list[list[FileRange]]:
    """Decide what each rank writes. All ranks that call this get the same result.

    If files can be cut, each rank gets an equal share of all bytes. A long file is cut where the
    share of a rank ends, and a short one goes to the rank in whose share its middle lies.

    Args:
        files: The files of the plan.
        rank_count: The number of ranks.
        can_cut: Whether several ranks may write one file.
        first_rank_files: The indices of files that only the first rank can write, unless they are
            cut.

    Returns:
        For each rank the ranges that it writes.
    """
    shares: list[list[FileRange]] = [[] for _ in range(rank_count)]
    if not can_cut:
        ranks = _assign_whole_files(files, rank_count, first_rank_files)
        for file_index, (file, rank) in enumerate(zip(files, ranks, strict=True)):
            shares[rank].append(FileRange(file_index, 0, file.nbytes))
        return shares

    # Offsets count the bytes of all files, one behind the other.
    total_nbytes = sum(file.nbytes for file in files)
    share_edges = [total_nbytes * rank // rank_count for rank in range(rank_count + 1)]
    file_start = 0
    for file_index, file in enumerate(files):
        file_stop = file_start + file.nbytes
        if file.nbytes <= MAX_UNCUT_NBYTES or _is_hashed(file):
            rank = 0
            if file_index not in first_rank_files:
                # The middle of an empty file at the end lies behind the last share.
                middle = file_start + file.nbytes // 2
                rank = min(bisect(share_edges, middle) - 1, rank_count - 1)
            shares[rank].append(FileRange(file_index, 0, file.nbytes))
        else:
            for rank, (share_start, share_stop) in enumerate(pairwise(share_edges)):
                start = max(file_start, share_start) - file_start
                stop = min(file_stop, share_stop) - file_start
                if start < stop:
                    shares[rank].append(FileRange(file_index, start, stop))
        file_start = file_stop
    return shares


def _assign_whole_files(
    files: Sequence[FilePlan], rank_count: int, first_rank_files: Collection[int]
) -> list[int]:
    """Return the rank that writes each file, so that all ranks write about as many bytes."""
    file_nbytes = np.array([file.nbytes for file in files], np.int64)
    ranks = np.zeros(len(files), np.int64)
    is_free = np.ones(len(files), np.bool_)
    is_free[list(first_rank_files)] = False

    # `assign_evenly` gives the most to its first holder. The first rank has to write the index as
    # well, so the holders are the ranks in reverse order.
    holder_loads = np.zeros(rank_count, np.int64)
    holder_loads[-1] = file_nbytes[~is_free].sum()
    ranks[is_free] = rank_count - 1 - assign_evenly(file_nbytes[is_free], holder_loads)
    return ranks.tolist()


def _is_hashed(file: FilePlan) -> bool:
    """Return whether content hashes are recorded. For these, one rank must see whole tensors."""
    for segment in file.segments:
        if isinstance(segment, Gathered) and segment.is_hashed:
            return True
        if isinstance(segment, Data) and segment.hashing:
            return True
    return False


def hash_plan(plan: SavePlan) -> bytes:
    """Return a hash of what a plan writes where. Ranks with the same hash cut files alike."""
    head = repr((plan.format, plan.file_sizes)).encode("utf-8", "surrogatepass")
    plan_hash = blake2b(head, digest_size=16)
    for file in (*plan.files, *plan.index):
        for segment in file.segments:
            labels: Sequence[str] = ()
            if isinstance(segment, Gathered):
                labels = segment.labels
            elif isinstance(segment, Data):
                labels = (segment.label,)
            plan_hash.update(f"{type(segment).__name__} {segment.nbytes}\0".encode())
            plan_hash.update("\0".join(labels).encode("utf-8", "surrogatepass"))
    return plan_hash.digest()


class Division(msgspec.Struct):
    """How the files are divided among the ranks. The first rank decides it and sends it to all."""

    can_cut: bool
    first_rank_files: list[int]
    block_nbytes: int
    """The size of blocks. The ranks must agree on it, whatever their numbers of cores."""


class RankReceipt(msgspec.Struct):
    """The checksums of what a rank has written, by the indices of files in the plan."""

    whole_files: dict[int, RankSums]
    """Files that it wrote completely."""
    ranges: dict[int, RankSums]
    """Files of which it wrote a range."""
    findings: bytes


DIVISION = message_type("division of a plan", Division)
RECEIPT = message_type("receipt of a rank", RankReceipt)
FINDINGS = message_type("list of findings", list[bytes])


class Findings:
    """What a verb finds out while its tensors are written, each rank about its own share.

    A subclass is for a verb that reports something, such as values that a cast has lost. This class
    finds nothing.
    """

    def encode(self) -> bytes:
        """Return what this rank has found."""
        return b""

    def merge(self, found: Sequence[bytes]) -> None:
        """Replace what this rank has found by what all ranks have found.

        Args:
            found: What `encode` returned on each rank.
        """


class PlanSave(JointSave):
    """The save of a plan, as one rank sees it."""

    def __init__(
        self,
        plan: SavePlan,
        ranks: Ranks,
        context: SaveContext,
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
            context: How files are written.
            open_target: Called on the first rank. Creates and opens the target.
            link_files: Called on the first rank. Links unchanged files from the base checkpoint
                into the target. This comes before anything is written, because the caller starts
                the save again if the base has changed.
            join_target: Called on the other ranks with the name of the target. Finds the target.
            hash_source: Hashes the identity of the source files. If the hash differs between ranks,
                the save fails, because their shares would belong to different checkpoints.
            findings: Collects what this rank finds out about its tensors, such as values that a
                cast loses. At the end it receives what all ranks have found.
        """
        self.ranks = ranks
        self._plan = plan
        self._context = context
        self._open_target = open_target
        self._link_files = link_files
        self._join_target = join_target
        self._hash_source = hash_source
        self._findings = findings
        # A placeholder. `write` replaces it by the division of the first rank.
        self._division = Division(can_cut=False, first_rank_files=[], block_nbytes=0)
        self._first_rank_sums: dict[int, FileSums] = {}
        """On the first rank: the checksums of its ranges, by the indices of the files."""

    def write(self) -> None:
        """Write the plan with all ranks and publish it, or raise an error on every rank."""
        with ExitStack() as stack:
            stack.push(self.close)
            work = self.assign_work(hash_plan(self._plan) + self._hash_source())
            self._division = read_document(DIVISION, work)
            self._context = replace(self._context, block_nbytes=self._division.block_nbytes)
            answer = self.write_and_publish(self._write_share)
            all_findings = read_document(FINDINGS, answer)
            self._findings.merge(all_findings)

    def divide_work(self, proposals: list[bytes]) -> list[bytes]:
        """Open the target, link the files of a base, and create the files that several ranks write.

        Returns:
            The same division for every rank.
        """
        check_same_checkpoint(proposals)
        self.target = self._open_target()
        self._link_files(self.target)
        files = self._plan.files
        first_rank_files: list[int] = []
        for file_index, file in enumerate(files):
            if self.target.needs_first_rank(file):
                first_rank_files.append(file_index)

        rank_count = self.ranks.size
        can_cut = self.target.can_split_files
        shares = divide_files(files, rank_count, can_cut=can_cut, first_rank_files=first_rank_files)
        writer_counts = Counter(file_range.file_index for share in shares for file_range in share)
        for file_index, writer_count in writer_counts.items():
            if writer_count > 1:
                self.target.create_shared_file(files[file_index])

        block_nbytes = self._context.block_nbytes or BLOCK_NBYTES
        division = Division(can_cut, first_rank_files, block_nbytes)
        return [write_document(DIVISION, division)] * rank_count

    def join_target(self, name: str) -> Target:
        """On the other ranks: find the target that the first rank has opened."""
        return self._join_target(name)

    def _write_share(self, target: Target) -> bytes:
        """Write the share of this rank, and return its receipt.

        The first rank keeps its checksums in memory: those of whole files in the context, to which
        every write adds them, and those of ranges in `_first_rank_sums`. Its receipt is empty.
        """
        shares = divide_files(
            self._plan.files,
            self.ranks.size,
            can_cut=self._division.can_cut,
            first_rank_files=self._division.first_rank_files,
        )
        file_ranges = shares[self.ranks.rank]
        if self.ranks.is_first:
            for file_range in file_ranges:
                sums = self._write_file_range(target, file_range)
                if isinstance(sums, FileSums):
                    self._first_rank_sums[file_range.file_index] = sums
            return b""

        receipt = RankReceipt(whole_files={}, ranges={}, findings=b"")
        for file_range in file_ranges:
            file_index = file_range.file_index
            file = self._plan.files[file_index]
            sums = self._write_file_range(target, file_range)
            if isinstance(sums, FileSums):
                receipt.ranges[file_index] = RankSums.from_file_sums(file, sums)
            else:
                receipt.whole_files[file_index] = RankSums.from_crcs(file, sums)
        receipt.findings = self._findings.encode()
        # This checks that the source did not change. The first rank can publish as soon as it has
        # this receipt, so this rank checks before it sends it. The first rank checks in `publish`.
        self._context.before_publish()
        return write_document(RECEIPT, receipt)

    def _write_file_range(
        self, target: Target, file_range: FileRange
    ) -> FileSums | Mapping[str, int]:
        """Write a file, or a range of it.

        Returns:
            The CRC-32 of data by label if the range is the whole file, otherwise the checksums of
            the range, which have to be combined with those of other ranks.
        """
        file = self._plan.files[file_range.file_index]
        if file_range.stop - file_range.start == file.nbytes:
            write_file = target.prepare_file(file)
            return write_file(self._context)
        byte_range = (file_range.start, file_range.stop)
        return target.write_range_of(file, byte_range, self._context)

    def publish(self, receipts: list[bytes]) -> list[bytes]:
        """On the first rank: finish the files that several ranks wrote, and publish everything.

        Args:
            receipts: The receipts of all ranks. That of the first rank is empty, since it keeps its
                checksums.

        Returns:
            The findings of all ranks, for every rank.
        """
        assert self.target is not None  # the first rank has opened it
        other_receipts = [read_document(RECEIPT, receipt) for receipt in receipts[1:]]
        self._finish_shared_files(self.target, other_receipts)

        delivered: list[DeliveredFile] = []
        for receipt in other_receipts:
            for file_index, rank_sums in receipt.whole_files.items():
                file = self._plan.files[file_index]
                self._context.crcs.update(rank_sums.combine_crcs(file))
                delivered.append(DeliveredFile(file.key, file.nbytes, is_linked=False))
        self.target.publish(self._plan.index, self._context, delivered)

        findings = [self._findings.encode(), *(receipt.findings for receipt in other_receipts)]
        return [write_document(FINDINGS, findings)] * self.ranks.size

    def _finish_shared_files(self, target: Target, receipts: Sequence[RankReceipt]) -> None:
        """Write what depends on the checksums of files that several ranks wrote."""
        file_sums = dict(self._first_rank_sums)
        for receipt in receipts:
            for file_index, rank_sums in receipt.ranges.items():
                sums = file_sums.setdefault(file_index, FileSums())
                rank_sums.add_to(self._plan.files[file_index], sums)
        for file_index in sorted(file_sums):
            target.finish_shared_file(
                self._plan.files[file_index], file_sums[file_index], self._context
            )
