"""The files of a sharded save on their way to disk: every rank writes its own, the first one publishes all of them.

every rank    its files into a hidden folder beside the target, checksums on the way, fsync      ──► receipts
first rank    compare receipts with the plan, write the index, read it once more, rename
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from holdfast.engine.commit.target import refusing
from holdfast.engine.commit.transactions import DirectoryTransaction, NewFile
from holdfast.engine.execute import run_all
from holdfast.engine.write import Progress, write_file
from holdfast.errors import NotCommitted
from holdfast.ranks.files import DcpIndex, RankFile, Receipt, index_files, is_part
from holdfast.ranks.rehearse import check_folder
from holdfast.ranks.together import Together
from holdfast.stores.files import OsFiles, make_parents

__all__ = ["Publishing", "open_folder", "publish", "write_files"]


@dataclass(frozen=True, slots=True)
class Publishing:
    """On the first rank: the folder in which a checkpoint comes together, and what it is to hold."""

    path: str
    format: str
    transaction: DirectoryTransaction
    together: Together

    def give_up(self) -> None:
        """Remove the folder, unless it was published."""
        self.transaction.__exit__(None, None, None)


def open_folder(path: str, format: str, together: Together, *, durable: bool, overwrite: bool) -> Publishing:
    """Make the hidden folder beside the target, and the folders that lead to it."""
    with refusing("making the folders that lead to it", path):
        make_parents(path, durable=durable)
    transaction = DirectoryTransaction(path, durable=durable, overwrite=overwrite, replaceable=is_part)
    transaction.__enter__()
    return Publishing(path, format, transaction, together)


def write_files(
    files: Sequence[RankFile],
    into: Publishing | str,
    *,
    path: str,
    durable: bool,
    threads: int,
    progress: Progress | None = None,
    block: int | None = None,
) -> list[Receipt]:
    """Write the files of one rank, all at once; on other ranks than the first one `into` is the name of the folder."""
    if not files:
        return []
    system = OsFiles()
    folder = system.open_directory(into) if isinstance(into, str) else -1
    receipts: dict[str, Receipt] = {}
    each = max(threads // len(files), 1)

    def create(key: str) -> NewFile:
        if isinstance(into, str):
            return NewFile(system, system.create(key, at=folder), path=f"{path}/{key}")
        return into.transaction.create(key)

    def task(file: RankFile, sink: NewFile) -> Callable[[], None]:
        def run() -> None:
            crcs = write_file(file.plan, sink, threads=each, progress=progress, block=block).crcs
            sink.finish(durable=durable)
            receipts[file.plan.key] = Receipt(file.plan.key, file.plan.nbytes, list(file.chunks(crcs)))

        return run

    sinks: list[NewFile] = []
    try:
        sinks.extend(create(file.plan.key) for file in files)
        run_all([task(file, sink) for file, sink in zip(files, sinks, strict=True)], threads)
    except BaseException:
        for sink in sinks:
            sink.give_up()
        raise
    finally:
        if folder >= 0:
            system.close(folder)
    return [receipts[file.plan.key] for file in files]


def publish(publishing: Publishing, delivered: Sequence[Sequence[Receipt]], *, dcp_index: DcpIndex) -> None:
    """Make the files of all ranks a checkpoint, by one rename. `delivered[r]` is what rank r has written."""
    folder, contents = publishing.transaction, publishing.together.contents
    for rank, (receipts, planned) in enumerate(zip(delivered, publishing.together.boxes, strict=True)):
        chunks = (chunk for receipt in receipts for chunk in receipt.chunks)
        found = sorted((name, chunk.start, chunk.stop) for name, chunk in chunks if name not in contents.values)
        if found != sorted(planned):
            raise NotCommitted(f"rank {rank} did not write what was planned for it", file=publishing.path)
        if rank:
            for receipt in receipts:
                folder.join(receipt.key, receipt.nbytes)
    everything = [receipt for receipts in delivered for receipt in receipts]
    folder.seal_data()
    for index in index_files(publishing.format, contents, everything, dcp_index=dcp_index):
        write_file(index, folder.create(index.key))
    check_folder(publishing.format, contents, folder.folder)
    folder.commit()
