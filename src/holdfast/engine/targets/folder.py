"""A file, and a folder of files, on a file system that all ranks see: hidden beside their name until the rename.

**Finished files of a conversion that was interrupted** are kept for the next try. With `resume=True` each data file is first
finished, flushed and published in a hidden folder beside the target, with a receipt of its checksums; then all of them are linked
into the transaction. The next try finds that folder by its name, a hash of everything that decides the bytes: the layout, and the
source files with their lengths, times and recorded checksums. A file is taken over only if its bytes have the checksums of its
receipt.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from types import TracebackType
from typing import Self

from holdfast.core.limits import DEFAULTS
from holdfast.core.protocols import Store
from holdfast.core.strict_json import parse
from holdfast.core.value import replace
from holdfast.engine.commit.new_file import NewFile, link_or_copy_file
from holdfast.engine.commit.target import not_committed_on_error
from holdfast.engine.commit.temporaries import MAX_ATTEMPTS, LockedEntry, try_lock
from holdfast.engine.commit.transactions import (
    DirectoryTransaction,
    FileTransaction,
    replace_file,
)
from holdfast.engine.saves import Data, FilePlan, Gathered, LinkedFile, Literal, SavePlan
from holdfast.engine.stream import Writer
from holdfast.engine.targets.target import DeliveredFile, SaveContext, Target, WriteFile
from holdfast.engine.write import (
    FileSums,
    check_range,
    check_source,
    check_written,
    finish_file,
    read_file_crcs,
    write_file,
    write_range,
)
from holdfast.errors import DurabilityUncertain, HoldfastError, NotCommitted
from holdfast.stores.files import Files, make_parents, read_all, system_files
from holdfast.stores.local import DescriptorStore, LocalStore
from holdfast.stores.virtual import tensor_stamp

RECEIPT = ".receipt"


def fingerprint(plan: SavePlan) -> str:
    """A hash of what decides the bytes of a save."""
    lines: list[object] = [plan.format]
    for file in plan.files:
        lines.append([file.key, file.nbytes])
        for segment in file.segments:
            if isinstance(segment, Literal):
                lines.append(hashlib.blake2b(segment.data, digest_size=8).hexdigest())
            elif isinstance(segment, Data):
                lines.append([segment.label, tensor_stamp(segment.tensor)])
            elif isinstance(segment, Gathered):
                tensors = zip(segment.labels, segment.tensors(), strict=True)
                lines += [[label, tensor_stamp(tensor)] for label, tensor in tensors]
    return hashlib.blake2b(json.dumps(lines).encode(), digest_size=8).hexdigest()


def staging_path(target: str, plan: SavePlan) -> str:
    parent, name = os.path.split(os.path.abspath(target.rstrip("/")))
    return os.path.join(parent, f".{name}.{fingerprint(plan)}.part")


BUSY = "another process is writing to this target with resume=True; wait until it is done, or write elsewhere"


class Staging:
    """The folder of finished files. The part that publishes holds its lock, so that no other save takes it.

    Nothing that happens here changes the target, so every failure is `NotCommitted`.
    """

    def __init__(
        self, folder: str, target: str, *, durable: bool, is_joined: bool = False, files: Files | None = None
    ) -> None:  # fmt: skip
        """Open the folder and make it if it is not there; `is_joined` on a part that did not make it."""
        self._files: Files = files or system_files()
        self._parent, self._name = os.path.split(folder)
        self._target = target
        self._durable = durable
        with not_committed_on_error("opening the folder for finished files", target):
            self._at = self._files.open_directory(self._parent)
            try:
                self._folder = (
                    LockedEntry.open_directory(self._files, self._name, dir_fd=self._at)
                    if is_joined
                    else self._claim()
                )
            except BaseException:
                with suppress(OSError):
                    self._files.close(self._at)
                raise

    def _claim(self) -> LockedEntry:
        """Open and lock the folder. Raises `NotCommitted` if another process has it."""
        for _ in range(MAX_ATTEMPTS):
            with suppress(FileExistsError):
                self._files.mkdir(self._name, dir_fd=self._at, private=True)
            # Whoever had it may publish and remove it now, between any two of these calls.
            try:
                folder = LockedEntry.open_directory(self._files, self._name, dir_fd=self._at)
            except FileNotFoundError:
                continue
            try:
                if not try_lock(self._files, folder.descriptor):
                    raise NotCommitted(BUSY, file=self._target, errno=errno.EBUSY)
                if folder.is_in_place():
                    return folder
            except BaseException:
                with suppress(OSError):
                    folder.close()
                raise
            folder.close()
        raise OSError(errno.EAGAIN, f"other processes removed it {MAX_ATTEMPTS} times")

    def put(
        self, file: FilePlan, write: Callable[[FilePlan, NewFile], Mapping[str, int]]
    ) -> Mapping[str, int]:
        """Return the checksums of a file: of one that an earlier try finished, or of one that `write` makes now."""
        with not_committed_on_error("looking for a finished file", self._target):
            recorded = self._finished(file)
        if recorded is not None:
            return recorded
        path = self._path(file.key)
        try:
            with FileTransaction(path, durable=self._durable, files=self._files) as single:
                crcs = dict(write(file, single.file))
                single.commit()
            receipt = json.dumps(crcs).encode()
            replace_file(path + RECEIPT, receipt, durable=self._durable, files=self._files)
        except DurabilityUncertain as error:
            # It says that a file is in place. That is the staged one, and not the target.
            raise NotCommitted(
                f"a finished file could not be kept for the next try: {error.message}; "
                "nothing changed at the target",
                file=self._target,
                errno=error.errno,
            ) from error.__cause__
        return crcs

    def adopt(self, folder: DirectoryTransaction, key: str) -> None:
        """Give a finished file a second name inside the transaction."""
        folder.link_finished(key, f"../{self._name}/{key}")

    def close(self) -> None:
        """Leave the folder for the next try."""
        with suppress(OSError):
            self._folder.close()
        with suppress(OSError):
            self._files.close(self._at)

    def remove(self) -> None:
        """Remove the folder; its files live on under the names that the transaction gave them.

        What cannot be removed stays there. The target is complete, and does not need it.
        """
        with suppress(OSError):
            for name in self._files.list(self._folder.descriptor):
                with suppress(OSError):
                    self._files.unlink(name, dir_fd=self._folder.descriptor)
            self._files.rmdir(self._name, dir_fd=self._at)

    def _path(self, key: str) -> str:
        return os.path.join(self._parent, self._name, key)

    def _finished(self, file: FilePlan) -> Mapping[str, int] | None:
        found = self._files.stat(file.key, dir_fd=self._folder.descriptor)
        if found is None or found.kind != "file" or found.nbytes != file.nbytes:
            return None
        try:
            name = file.key + RECEIPT
            entry = self._files.stat(name, dir_fd=self._folder.descriptor)
            receipt = read_all(
                self._files,
                name,
                entry,
                dir_fd=self._folder.descriptor,
                max_nbytes=DEFAULTS.index_nbytes,
            )
            recorded = None if receipt is None else parse(receipt, DEFAULTS)
        except HoldfastError:
            return None
        descriptor = self._files.open(file.key, dir_fd=self._folder.descriptor)
        try:
            crcs = read_file_crcs(file, descriptor)
        finally:
            self._files.close(descriptor)
        return crcs if crcs == recorded else None


def _fill(file: FilePlan, how: SaveContext, sink: NewFile, path: str) -> Mapping[str, int]:
    """Write a file, sure of what was read and, where that is wanted, of what was written."""
    receipt = write_file(
        file,
        sink,
        crcs=how.crcs,
        threads=how.threads,
        progress=how.progress,
        block=how.block_nbytes,
    )
    how.crcs.update(receipt.crcs)
    check_source(file, how.crcs)
    if how.read_back:
        check_written(
            file, sink.descriptor, how.crcs, path=path, blocks=receipt.blocks, threads=how.threads
        )
    sink.is_complete = True
    return receipt.crcs


def _fill_part(
    file: FilePlan, part: tuple[int, int], how: SaveContext, sink: NewFile, path: str
) -> FileSums:
    written = write_range(
        file, sink, part, threads=how.threads, progress=how.progress, block=how.block_nbytes
    )
    if how.read_back:
        check_range(file, sink.descriptor, written, path=path, threads=how.threads)
    return written


class FirstTarget(Target):
    """A file or a folder of files, on the part that makes it."""

    can_split_files = True
    path: str

    def _shared_file(self, key: str) -> NewFile:
        """Return a file that several parts write."""
        raise NotImplementedError

    def write_range_of(self, file: FilePlan, part: tuple[int, int], how: SaveContext) -> FileSums:
        return _fill_part(file, part, how, self._shared_file(file.key), self.path)

    def finish_shared_file(self, file: FilePlan, written: FileSums, how: SaveContext) -> None:
        made = self._shared_file(file.key)
        how.crcs.update(finish_file(file, made, written, crcs=how.crcs, progress=how.progress).crcs)
        check_source(file, how.crcs)
        made.is_complete = True


class FileTarget(FileTransaction, FirstTarget):
    """One file, on the part that makes it."""

    @property
    def join_name(self) -> str:
        return self.hidden_path

    def _shared_file(self, key: str) -> NewFile:
        return self.file

    def create_shared_file(self, file: FilePlan) -> None:
        self.file.allocate(file.nbytes)

    def needs_first_rank(self, file: FilePlan) -> bool:
        return True  # it is made already

    def prepare_file(self, file: FilePlan) -> WriteFile:
        return lambda how: _fill(file, how, self.file, self.path)

    def open_unpublished(self) -> Store:
        return DescriptorStore(self.file.descriptor, name=self.path)

    def publish(
        self, index: Sequence[FilePlan], how: SaveContext, others: Iterable[DeliveredFile] = ()
    ) -> None:
        if how.check_opens is not None:
            self.check_opens(how)
        how.before_publish()
        self.commit(how.before_rename)


class AtEnd:
    def __init__(self, out: NewFile) -> None:
        self._out, self._nbytes = out, 0

    def write(self, data: bytes | memoryview, /) -> None:
        self._out.write(self._nbytes, data)
        self._nbytes += memoryview(data).nbytes


class JoinedFolder(Target):
    """The hidden folder, or one that is there, on a part that did not make it."""

    def __init__(self, folder: str, *, path: str, durable: bool) -> None:
        self._name, self._path, self._durable = folder, path, durable
        self._system = system_files()
        self._open: int | None = None
        self._made: list[NewFile] = []

    @property
    def _folder(self) -> int:
        if self._open is None:
            with not_committed_on_error("opening the folder", self._path):
                self._open = self._system.open_directory(self._name)
        return self._open

    def _label(self, key: str) -> str:
        return f"{self._path}/{key}"

    def _create(self, key: str) -> NewFile:
        label = self._label(key)
        with not_committed_on_error("creating a file", label):
            made = NewFile(
                self._system,
                self._system.create(key, dir_fd=self._folder),
                path=label,
                durable=self._durable,
            )
        self._made.append(made)
        return made

    def write_range_of(self, file: FilePlan, part: tuple[int, int], how: SaveContext) -> FileSums:
        label = self._label(file.key)
        with not_committed_on_error("opening a file of the first rank", label):
            shared = NewFile(
                self._system,
                self._system.open_shared(file.key, dir_fd=self._folder),
                path=label,
                durable=self._durable,
            )
        self._made.append(shared)
        shared.begin_writeback()
        written = _fill_part(file, part, how, shared, self._path)
        shared.finish()
        return written

    def prepare_file(self, file: FilePlan) -> WriteFile:
        made = self._create(file.key)

        def fill(how: SaveContext) -> Mapping[str, int]:
            crcs = _fill(file, how, made, self._path)
            made.finish()
            return crcs

        return fill

    def stream_file(self, key: str, nbytes: int, write: Callable[[Writer], None]) -> None:
        made = self._create(key)
        made.begin_writeback()
        write(AtEnd(made))
        made.finish()

    def generate_free_names(self, prefix: str, suffix: str) -> Iterator[str]:
        known, number = set(self._system.list(self._folder)), 0
        while True:
            if (key := f"{prefix}{number}{suffix}") not in known:
                yield key
            number += 1

    def link_file(self, file: LinkedFile) -> bool:
        label, system = self._label(file.key), self._system
        with (
            _base(system, file.folder) as base,
            not_committed_on_error("taking over a file of the base", label),
        ):
            made, linked = link_or_copy_file(
                system,
                file.key,
                file.nbytes,
                source_dir_fd=base,
                dir_fd=self._folder,
                path=label,
                durable=self._durable,
            )
            made.finish()
        return linked

    def close(self) -> None:
        for made in self._made:
            made.close_unfinished()
        found, self._open = self._open, None
        if found is not None:
            self._system.close(found)


class JoinedFile(JoinedFolder):
    """The hidden file, on a part that did not make it."""

    def __init__(self, file: str, *, path: str, durable: bool) -> None:
        folder, self._file = os.path.split(file)
        super().__init__(folder, path=path, durable=durable)

    def _label(self, key: str) -> str:
        return self._path

    def write_range_of(self, file: FilePlan, part: tuple[int, int], how: SaveContext) -> FileSums:
        return super().write_range_of(replace(file, key=self._file), part, how)


class JoinedStaging(Target):
    """The folder of finished files, on a part that did not make it."""

    def __init__(self, folder: str, *, path: str, durable: bool) -> None:
        self._path = path
        self._staging = Staging(folder, path, durable=durable, is_joined=True)

    def prepare_file(self, file: FilePlan) -> WriteFile:
        return partial(_staged, self._staging, file, self._path)

    def close(self) -> None:
        self._staging.close()


def _staged(staging: Staging, file: FilePlan, path: str, how: SaveContext) -> Mapping[str, int]:
    crcs = staging.put(file, lambda file, sink: _fill(file, how, sink, path))
    how.crcs.update(crcs)
    return crcs


class FolderTarget(FirstTarget):
    """A folder of files, on the part that makes it. With `resumed`, each file is finished in a folder that outlives a crash
    (`Staging`), and then linked."""

    def __init__(
        self, path: str, *, durable: bool, overwrite: bool, is_replaceable: Callable[[str], bool], resumed: SavePlan | None,
        parents: bool, files: Files | None,
    ) -> None:  # fmt: skip
        self.path = path
        self._parents, self._durable = parents, durable
        self._system = files or system_files()
        self._shared: dict[str, NewFile] = {}
        """The files that several parts write."""
        self._staging_path = "" if resumed is None else staging_path(path, resumed)
        self._staging = (
            Staging(self._staging_path, path, durable=durable, files=files)
            if self._staging_path
            else None
        )
        self.can_split_files = self._staging is None
        self._staged: list[str] = []
        self._published = False
        self._folder = DirectoryTransaction(
            path, durable=durable, overwrite=overwrite, is_replaceable=is_replaceable, files=files
        )

    def __enter__(self) -> Self:
        if self._staging is not None:
            return self  # the folder is opened when everything is finished
        try:
            self._folder.__enter__()
        except NotCommitted as error:
            if not self._parents or error.errno != errno.ENOENT:
                raise
            with not_committed_on_error("making the folders that lead to it", self.path):
                make_parents(self.path, durable=self._durable)
            self._folder.__enter__()
        return self

    @property
    def join_name(self) -> str:
        return self._staging_path or self._folder.hidden_path

    def _shared_file(self, key: str) -> NewFile:
        return self._shared[key]

    def create_shared_file(self, file: FilePlan) -> None:
        made = self._shared[file.key] = self._folder.create(file.key)
        made.allocate(file.nbytes)

    def link_file(self, file: LinkedFile) -> bool:
        with _base(self._system, file.folder) as base:
            return self._folder.link_from_base(file.key, file.nbytes, base_dir_fd=base)

    def prepare_file(self, file: FilePlan) -> WriteFile:
        if self._staging is None:
            made = self._folder.create(file.key)
            return lambda how: _fill(file, how, made, self.path)
        self._staged.append(file.key)
        return partial(_staged, self._staging, file, self.path)

    def link_existing(self, key: str, path: str) -> None:
        self._folder.link_finished(key, path)

    def open_unpublished(self) -> Store:
        return LocalStore(self._folder.hidden_path, max_files=DEFAULTS.files)

    def publish(
        self, index: Sequence[FilePlan], how: SaveContext, others: Iterable[DeliveredFile] = ()
    ) -> None:
        folder = self._folder
        if self._staging is not None:
            folder.__enter__()
            for key in (*self._staged, *(key for key, _, _ in others)):
                self._staging.adopt(folder, key)
        else:
            for key, nbytes, linked in others:
                folder.add_from_rank(key, nbytes, is_linked=linked)
        folder.seal_data()
        for file in index:
            _fill(file, how, folder.create(file.key), self.path)
        if how.check_opens is not None:
            self.check_opens(how)
        how.before_publish()
        folder.commit(how.before_rename)
        self._published = True

    def give_up(self) -> None:
        self.__exit__(None, None, None)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        staging, self._staging = self._staging, None
        try:
            self._folder.__exit__(kind, error, trace)
            if staging is not None and self._published:
                staging.remove()
        finally:
            if staging is not None:
                staging.close()


@contextmanager
def _base(files: Files, folder: str) -> Iterator[int]:
    with not_committed_on_error("opening the base", folder):
        try:
            base = files.open_directory(folder)
        except FileNotFoundError:
            raise OSError(errno.ESTALE, "the base was removed meanwhile") from None
    try:
        yield base
    finally:
        files.close(base)
