"""The protocol by which the ranks of a group write one checkpoint.

Every save of several ranks takes these four steps. Between two steps each rank sends a document to
the first rank, or the first rank sends a document to each (`Ranks.agree`):

    1. propose    every rank   describes what it is about to write                    ──► proposal
    2. assign     first rank   compares the proposals, opens a hidden target,
                               and decides what each rank writes                      ──► task
    3. write      every rank   joins the target, writes and flushes its files,
                               and computes checksums on the way                      ──► receipt
    4. publish    first rank   compares the receipts with what it assigned, writes
                               what depends on checksums, and the index, opens all
                               that several ranks have written, and renames           ──► answer

There are two kinds of saves. In `torch/ranks/saving` each rank has a state of its own
(`save_sharded`). In `engine/targets/plan_save` all ranks have the same plan (`convert`, `cp` and
the other verbs with `group=`). They differ in the content of the documents:

    document   torch/ranks/saving                       engine/targets/plan_save
    proposal   names, dtypes, shapes and boxes          a hash of the plan
    task       the hidden target; the boxes to write    the hidden target; how files are cut
    receipt    files and the places of boxes in them    checksums
    answer     empty                                    the findings of all ranks

The first rank keeps its own proposal, task and receipt, and sends itself nothing. So a process that
is alone makes no documents: the steps are function calls, and no target is joined.

An error on one rank takes the place of its document. Then no rank goes on, and all of them raise
the same `RanksFailed`. A rank that dies or is silent for too long is a `RankLost` on all others.
What a failure or a crash leaves behind depends on the step:

    1, 2   Nothing, or an empty hidden target.
    3      The hidden target with some files. If the first rank lives, it removes the target, with
           the files of ranks that died. In an object store every rank that lives removes its own
           objects too. If the first rank died, a folder is left to the next save, which removes
           hidden folders that nobody has locked; objects are left to the sweep of a run.
    4      Before the rename, or the conditional put, the same as in step 3. After it the checkpoint
           is complete. A rank that has sent its receipt and loses the first rank cannot know which
           of the two it is, so it removes nothing.

At every step, whoever opens the path finds the old checkpoint or the new one.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType

import msgspec

from holdfast.core.documents import message_type, read_document, write_document
from holdfast.core.group import Ranks
from holdfast.engine.targets.target import Target
from holdfast.errors import RankLost, RanksFailed


class Task(msgspec.Struct):
    """The first rank's answer to a proposal."""

    target_name: str
    """The name by which the other ranks join the target (`Target.join_name`)."""
    work: bytes
    """What the rank writes, as a document of the kind of save."""


TASK = message_type("task of a rank", Task)


class JointSave:
    """One rank's side of a checkpoint that the ranks of a group write together.

    Each kind of save implements the first three methods. Call `assign_work` and then
    `write_and_publish` on every rank. Push `close` on an `ExitStack`.
    """

    ranks: Ranks
    target: Target | None = None
    """The target. None on the ranks that join it."""
    _target_name = ""

    def divide_work(self, proposals: list[bytes]) -> list[bytes]:
        """On the first rank: compare the proposals of all ranks, and open `target`.

        Returns:
            For each rank, what it writes, as a document of the kind of save.
        """
        raise NotImplementedError

    def join_target(self, name: str) -> Target:
        """On the other ranks: find the target that the first rank has opened."""
        raise NotImplementedError

    def publish(self, receipts: list[bytes]) -> list[bytes]:
        """On the first rank: publish what all ranks wrote, and return the answer for each."""
        raise NotImplementedError

    def assign_work(self, proposal: bytes | Exception) -> bytes:
        """Take steps 1 and 2: send the proposal of this rank, and return what this rank writes.

        A crash in these steps leaves nothing, or an empty hidden target.

        Args:
            proposal: The proposal, or the error because of which this rank has none.
        """
        answer = self.ranks.agree(proposal, self._assign)
        if self.ranks.size == 1:
            return answer

        task = read_document(TASK, answer)
        self._target_name = task.target_name
        return task.work

    def _assign(self, proposals: list[bytes]) -> list[bytes]:
        """On the first rank: answer each proposal with the target and what the rank writes."""
        work_of_ranks = self.divide_work(proposals)
        if self.target is None or self.ranks.size == 1:
            return work_of_ranks
        name = self.target.join_name
        return [write_document(TASK, Task(name, work)) for work in work_of_ranks]

    def write_and_publish(self, write: Callable[[Target], bytes]) -> bytes:
        """Take steps 3 and 4: write the files of this rank, and let the first rank publish.

        A crash before the first rank publishes leaves the old checkpoint and a hidden target, a
        crash after it the new checkpoint.

        Args:
            write: Writes the files of this rank to the target, and returns the receipt.

        Returns:
            The first rank's answer to the receipt.

        Raises:
            RanksFailed: Nothing was published.
            RankLost: A rank died. If it was the first rank, the save may be published.
        """
        joined: Target | None = None
        receipt: bytes | Exception
        try:
            if self.target is not None:
                receipt = write(self.target)
            else:
                joined = self.join_target(self._target_name)
                try:
                    receipt = write(joined)
                finally:
                    joined.close()
        except Exception as error:
            receipt = error

        try:
            return self.ranks.agree(receipt, self.publish)
        except (RanksFailed, RankLost) as error:
            # Without this rank's receipt nothing is published. With it, a first rank that is lost
            # may have published, or may do so yet.
            is_unpublished = isinstance(error, RanksFailed) or isinstance(receipt, Exception)
            if joined is not None and is_unpublished:
                joined.give_up()
            raise

    def close(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Give up what was not published. This is the exit function of a `with` block."""
        if self.target is not None:
            self.target.__exit__(kind, error, trace)
