"""Targets on a file system: one file, or a folder of files, hidden until a rename publishes them.

    rank 0                                        other ranks
    FileTarget    creates .out.<random>.tmp       JoinedFile      writes ranges of it
    FolderTarget  creates .out.<random>.tmp/      JoinedFolder    creates and writes files in it
    FolderTarget  with a resume folder            JoinedResumeFolder    finishes files there

All ranks must see the same file system. Each rank syncs the files that it wrote. Then the first
rank checks that all of them are there, writes the index, and renames the hidden file or folder
(`engine/commit/transactions` describes these steps and what a crash leaves). With `resume=True`
files are finished in a folder that survives a crash (`resume_folder`).
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import count
from types import TracebackType
from typing import Self

from holdfast.core.limits import DEFAULTS
from holdfast.core.protocols import Store
from holdfast.core.value import replace
from holdfast.engine.commit.new_file import NewFile, link_or_copy_file
from holdfast.engine.commit.target import not_committed_on_error
from holdfast.engine.commit.transactions import DirectoryTransaction, FileTransaction
from holdfast.engine.saves import FilePlan, LinkedFile, SavePlan
from holdfast.engine.stream import Writer
from holdfast.engine.targets.resume_folder import ResumeFolder, make_resume_path
from holdfast.engine.targets.target import DeliveredFile, SaveContext, Target, WriteFile
from holdfast.engine.write import (
    FileSums,
    check_range,
    check_source,
    check_written,
    finish_file,
    write_file,
    write_range,
)
from holdfast.errors import NotCommitted
from holdfast.stores.files import Files, make_parents, system_files
from holdfast.stores.local import DescriptorStore, LocalStore


def _write_and_check(
    file: FilePlan, new_file: NewFile, path: str, context: SaveContext
) -> Mapping[str, int]:
    """Write a whole file. Check that the source did not change, and read the file back if wanted.

    Args:
        file: What to write.
        new_file: The open, empty file.
        path: The target of the save, for messages.
        context: How it is written. The checksums of the file are added to it.

    Returns:
        The CRC-32 of each piece of data, by its label.
    """
    receipt = write_file(
        file,
        new_file,
        crcs=context.crcs,
        threads=context.threads,
        progress=context.progress,
        block_nbytes=context.block_nbytes,
    )
    context.crcs.update(receipt.crcs)
    check_source(file, context.crcs)
    if context.read_back:
        check_written(
            file,
            new_file.descriptor,
            context.crcs,
            path=path,
            blocks=receipt.blocks,
            threads=context.threads,
        )
    new_file.is_complete = True
    return receipt.crcs


def _write_and_check_range(
    file: FilePlan,
    byte_range: tuple[int, int],
    new_file: NewFile,
    path: str,
    context: SaveContext,
) -> FileSums:
    """Write the blocks that start in a range of a shared file, and read them back if wanted."""
    sums = write_range(
        file,
        new_file,
        byte_range,
        threads=context.threads,
        progress=context.progress,
        block_nbytes=context.block_nbytes,
    )
    if context.read_back:
        check_range(file, new_file.descriptor, sums, path=path, threads=context.threads)
    return sums


class FirstRankTarget(Target):
    """A file or a folder on the rank that creates and publishes it."""

    can_split_files = True
    path: str

    def _get_shared_file(self, key: str) -> NewFile:
        """Return an open file that several ranks write."""
        raise NotImplementedError

    def write_range_of(
        self, file: FilePlan, byte_range: tuple[int, int], context: SaveContext
    ) -> FileSums:
        """Write a range of a shared file, which this rank has created and has open."""
        new_file = self._get_shared_file(file.key)
        return _write_and_check_range(file, byte_range, new_file, self.path, context)

    def finish_shared_file(self, file: FilePlan, sums: FileSums, context: SaveContext) -> None:
        """Write what depends on the checksums of all ranks, such as the header."""
        new_file = self._get_shared_file(file.key)
        receipt = finish_file(file, new_file, sums, crcs=context.crcs, progress=context.progress)
        context.crcs.update(receipt.crcs)
        check_source(file, context.crcs)
        new_file.is_complete = True


class FileTarget(FileTransaction, FirstRankTarget):
    """A single file, on the rank that creates it.

    The `with` block is that of the transaction: it creates the hidden file, and removes it if it
    was not published.
    """

    @property
    def join_name(self) -> str:
        """The path of the hidden file."""
        return self.hidden_path

    def _get_shared_file(self, key: str) -> NewFile:
        """Return the hidden file, the only file of this target."""
        return self.file

    def create_shared_file(self, file: FilePlan) -> None:
        """Give the hidden file its size, so that all ranks can write at their offsets."""
        self.file.allocate(file.nbytes)

    def needs_first_rank(self, file: FilePlan) -> bool:
        """Return True: only this rank has created the hidden file and has it open."""
        return True

    def prepare_file(self, file: FilePlan) -> WriteFile:
        """Return the function that writes the hidden file."""
        return partial(_write_and_check, file, self.file, self.path)

    def open_unpublished(self) -> Store:
        """Return a store of the hidden file, which is read through its open descriptor."""
        return DescriptorStore(self.file.descriptor, name=self.path)

    def publish(
        self,
        index: Sequence[FilePlan],
        context: SaveContext,
        delivered: Iterable[DeliveredFile] = (),
    ) -> None:
        """Check the hidden file, and rename it to the target.

        A crash before the rename leaves the old file and a hidden one, which the next save removes.
        A crash after it leaves the new file.
        """
        if context.check_opens is not None:
            self.check_opens(context)
        context.before_publish()
        self.commit(context.before_rename)


class AppendingWriter:
    """Writes to a new file from front to back."""

    def __init__(self, new_file: NewFile) -> None:
        self._new_file = new_file
        self._offset = 0

    def write(self, data: bytes | memoryview, /) -> None:
        """Write bytes behind those that were written before."""
        self._new_file.write(self._offset, data)
        self._offset += memoryview(data).nbytes


class JoinedFolder(Target):
    """A folder on a rank that did not create it. It creates, writes and syncs files in it.

    The folder is usually the hidden one of the first rank, but may be any existing folder.
    """

    def __init__(self, folder: str, *, path: str, durable: bool) -> None:
        """Prepare the target. The folder is opened when it is needed.

        Args:
            folder: The path of the folder.
            path: The target of the save, for messages.
            durable: Whether to sync the files.
        """
        self._folder = folder
        self._path = path
        self._durable = durable
        self._files = system_files()
        self._open_dir_fd: int | None = None
        self._new_files: list[NewFile] = []

    @property
    def _dir_fd(self) -> int:
        """The descriptor of the folder."""
        if self._open_dir_fd is None:
            with not_committed_on_error("opening the folder", self._path):
                self._open_dir_fd = self._files.open_directory(self._folder)
        return self._open_dir_fd

    def _describe_path(self, key: str) -> str:
        """Return what error messages call a file."""
        return f"{self._path}/{key}"

    def _create(self, key: str) -> NewFile:
        """Create a file in the folder, and remember it for `close`."""
        path = self._describe_path(key)
        with not_committed_on_error("creating a file", path):
            descriptor = self._files.create(key, dir_fd=self._dir_fd)
            new_file = NewFile(self._files, descriptor, path=path, durable=self._durable)
        self._new_files.append(new_file)
        return new_file

    def write_range_of(
        self, file: FilePlan, byte_range: tuple[int, int], context: SaveContext
    ) -> FileSums:
        """Write a range of a file that the first rank has created, and sync the file."""
        path = self._describe_path(file.key)
        with not_committed_on_error("opening a file of the first rank", path):
            descriptor = self._files.open_shared(file.key, dir_fd=self._dir_fd)
            # The file exists. A `NewFile` is any open file that is written, synced and closed.
            shared_file = NewFile(self._files, descriptor, path=path, durable=self._durable)
        self._new_files.append(shared_file)
        shared_file.begin_writeback()
        sums = _write_and_check_range(file, byte_range, shared_file, self._path, context)
        shared_file.finish()
        return sums

    def prepare_file(self, file: FilePlan) -> WriteFile:
        """Create a file, and return the function that writes, syncs and closes it."""
        new_file = self._create(file.key)

        def write(context: SaveContext) -> Mapping[str, int]:
            crcs = _write_and_check(file, new_file, self._path, context)
            new_file.finish()
            return crcs

        return write

    def stream_file(self, key: str, nbytes: int, write: Callable[[Writer], None]) -> None:
        """Create a file, let `write` write it from front to back, and sync it."""
        new_file = self._create(key)
        new_file.begin_writeback()
        write(AppendingWriter(new_file))
        new_file.finish()

    def generate_free_names(self, prefix: str, suffix: str) -> Iterator[str]:
        """Yield names that no file in the folder had at the first call."""
        existing_names = set(self._files.list(self._dir_fd))
        for file_index in count():
            name = f"{prefix}{file_index}{suffix}"
            if name not in existing_names:
                yield name

    def link_file(self, file: LinkedFile) -> bool:
        """Link a file of the base into the folder, or copy it, and sync it."""
        path = self._describe_path(file.key)
        with (
            _open_base(self._files, file.folder) as base_dir_fd,
            not_committed_on_error("taking over a file of the base", path),
        ):
            new_file, is_linked = link_or_copy_file(
                self._files,
                file.key,
                file.nbytes,
                source_dir_fd=base_dir_fd,
                dir_fd=self._dir_fd,
                path=path,
                durable=self._durable,
            )
            new_file.finish()
        return is_linked

    def close(self) -> None:
        """Close the folder, and files that were not finished because of an error."""
        for new_file in self._new_files:
            new_file.close_unfinished()
        dir_fd = self._open_dir_fd
        self._open_dir_fd = None
        if dir_fd is not None:
            self._files.close(dir_fd)


class JoinedFile(JoinedFolder):
    """The hidden file of the first rank, on another rank that writes ranges of it."""

    def __init__(self, file: str, *, path: str, durable: bool) -> None:
        """Prepare the target. `file` is the path of the hidden file."""
        folder, self._file_name = os.path.split(file)
        super().__init__(folder, path=path, durable=durable)

    def _describe_path(self, key: str) -> str:
        """Return what error messages call the file: the target of the save."""
        return self._path

    def write_range_of(
        self, file: FilePlan, byte_range: tuple[int, int], context: SaveContext
    ) -> FileSums:
        """Write a range of the hidden file."""
        # In the plan, the only file has no name.
        hidden_file = replace(file, key=self._file_name)
        return super().write_range_of(hidden_file, byte_range, context)


class JoinedResumeFolder(Target):
    """The resume folder of the first rank, on another rank that finishes files in it."""

    def __init__(self, folder: str, *, path: str, durable: bool) -> None:
        """Open the folder.

        Args:
            folder: The path of the resume folder.
            path: The target of the save, for messages.
            durable: Whether to sync the files.
        """
        self._path = path
        self._resume_folder = ResumeFolder(folder, path, durable=durable, is_joined=True)

    def prepare_file(self, file: FilePlan) -> WriteFile:
        """Return the function that writes a file, unless an earlier attempt has finished it."""
        return partial(_finish_in_resume_folder, self._resume_folder, file, self._path)

    def close(self) -> None:
        """Close the folder. Its files stay for the first rank."""
        self._resume_folder.close()


def _finish_in_resume_folder(
    resume_folder: ResumeFolder, file: FilePlan, path: str, context: SaveContext
) -> Mapping[str, int]:
    """Write a file into a resume folder, unless it is finished there. Return its checksums."""

    def write(new_file: NewFile) -> Mapping[str, int]:
        return _write_and_check(file, new_file, path, context)

    crcs = resume_folder.finish_file(file, write)
    context.crcs.update(crcs)
    return crcs


class FolderTarget(FirstRankTarget):
    """A folder of files, on the rank that creates it.

    With a resumed plan, files are first finished in a resume folder. The hidden folder of the
    target is then created by `publish`, which links them into it.
    """

    def __init__(
        self,
        path: str,
        *,
        durable: bool,
        overwrite: bool,
        is_replaceable: Callable[[str], bool],
        resumed_plan: SavePlan | None,
        makes_parents: bool,
        files: Files | None,
    ) -> None:
        """Prepare the target, and open the resume folder if there is a resumed plan.

        Args:
            path: The folder.
            durable: Whether to wait for the disk.
            overwrite: Whether an existing folder may be replaced.
            is_replaceable: Returns whether a file of this name may be removed with the old folder.
            resumed_plan: What is saved, if finished files of an earlier attempt are taken over.
            makes_parents: Whether to create missing folders above it.
            files: The file system. Tests pass another one.
        """
        self.path = path
        self._durable = durable
        self._makes_parents = makes_parents
        self._files = files or system_files()
        self._shared_files: dict[str, NewFile] = {}
        """The files that several ranks write, by their keys."""
        self._resume_path = ""
        self._resume_folder: ResumeFolder | None = None
        self._resumed_keys: list[str] = []
        """The files that this rank finished in the resume folder."""
        if resumed_plan is not None:
            self._resume_path = make_resume_path(path, resumed_plan)
            self._resume_folder = ResumeFolder(
                self._resume_path, path, durable=durable, files=files
            )
        # The next attempt could not take over a file that is half of another rank.
        self.can_split_files = self._resume_folder is None
        self._is_published = False
        self._transaction = DirectoryTransaction(
            path, durable=durable, overwrite=overwrite, is_replaceable=is_replaceable, files=files
        )

    def __enter__(self) -> Self:
        """Create the hidden folder, unless files are finished in a resume folder first."""
        if self._resume_folder is not None:
            # The transaction begins when all files are finished.
            return self
        try:
            self._transaction.__enter__()
        except NotCommitted as error:
            if not self._makes_parents or error.errno != errno.ENOENT:
                raise
            with not_committed_on_error("making the folders that lead to it", self.path):
                make_parents(self.path, durable=self._durable)
            self._transaction.__enter__()
        return self

    @property
    def join_name(self) -> str:
        """The path of the folder in which all ranks write. The resume folder is used, if any."""
        return self._resume_path or self._transaction.hidden_path

    def _get_shared_file(self, key: str) -> NewFile:
        """Return a file that `create_shared_file` has created."""
        return self._shared_files[key]

    def create_shared_file(self, file: FilePlan) -> None:
        """Create a file with its size, so that several ranks can write at their offsets."""
        new_file = self._transaction.create(file.key)
        self._shared_files[file.key] = new_file
        new_file.allocate(file.nbytes)

    def link_file(self, file: LinkedFile) -> bool:
        """Link a file of the base into the hidden folder, or copy it."""
        with _open_base(self._files, file.folder) as base_dir_fd:
            return self._transaction.link_from_base(file.key, file.nbytes, base_dir_fd=base_dir_fd)

    def prepare_file(self, file: FilePlan) -> WriteFile:
        """Return the function that writes a file: to the hidden folder or to the resume folder."""
        if self._resume_folder is None:
            new_file = self._transaction.create(file.key)
            return partial(_write_and_check, file, new_file, self.path)
        self._resumed_keys.append(file.key)
        return partial(_finish_in_resume_folder, self._resume_folder, file, self.path)

    def link_existing(self, key: str, path: str) -> None:
        """Give a file, at an absolute path, a second name in the hidden folder."""
        self._transaction.link_finished(key, path)

    def open_unpublished(self) -> Store:
        """Return a store of the hidden folder."""
        return LocalStore(self._transaction.hidden_path, max_files=DEFAULTS.files)

    def publish(
        self,
        index: Sequence[FilePlan],
        context: SaveContext,
        delivered: Iterable[DeliveredFile] = (),
    ) -> None:
        """Collect all files, sync them, write the index, and rename the folder.

        A crash before the rename leaves the old folder and a hidden one, which the next save
        removes. If there is a resume folder, the next attempt finds its files again.
        """
        transaction = self._transaction
        if self._resume_folder is not None:
            transaction.__enter__()
            keys = [*self._resumed_keys, *(file.key for file in delivered)]
            for key in keys:
                self._resume_folder.link_into(transaction, key)
        else:
            for file in delivered:
                transaction.add_from_rank(file.key, file.nbytes, is_linked=file.is_linked)
        transaction.seal_data()

        for index_file in index:
            new_file = transaction.create(index_file.key)
            _write_and_check(index_file, new_file, self.path, context)
        if context.check_opens is not None:
            self.check_opens(context)
        context.before_publish()
        transaction.commit(context.before_rename)
        self._is_published = True

    def give_up(self) -> None:
        """Abort the save: remove the hidden folder if it was not published.

        Does nothing if the save has ended. The resume folder stays for the next attempt.
        """
        self.__exit__(None, None, None)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End the transaction. Remove the resume folder if the target was published."""
        resume_folder = self._resume_folder
        self._resume_folder = None
        try:
            self._transaction.__exit__(kind, error, trace)
            if resume_folder is not None and self._is_published:
                resume_folder.remove()
        finally:
            if resume_folder is not None:
                resume_folder.close()


@contextmanager
def _open_base(files: Files, folder: str) -> Iterator[int]:
    """Open the folder of a base checkpoint, and yield its descriptor."""
    with not_committed_on_error("opening the base", folder):
        try:
            dir_fd = files.open_directory(folder)
        except FileNotFoundError:
            raise OSError(errno.ESTALE, "the base was removed during the save") from None
    try:
        yield dir_fd
    finally:
        files.close(dir_fd)
