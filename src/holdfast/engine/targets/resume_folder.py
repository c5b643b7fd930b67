"""The finished files of a conversion, which survive an interruption (`resume=True`).

    out/                            the target, which does not exist yet
    .out.<hash of the plan>.part/   the resume folder
        data-00001.safetensors          a finished file, published and synced
        data-00001.safetensors.receipt  its checksums
        .data-00002….tmp                the file that was being written when the process died

Each data file is finished in the resume folder first. When all of them are finished, they are
linked into the transaction of the target, and the resume folder is removed. The next attempt finds
the folder by its name, a hash of everything that decides the bytes: the plan, and the source files
with their sizes, times and recorded checksums. A finished file is taken over only if its bytes have
the checksums of its receipt.

The first rank holds the lock of the folder, so that no other process uses it. A crash at any moment
leaves the folder with the files that were finished before. The target does not change.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import assert_never

from holdfast.core.limits import DEFAULTS
from holdfast.core.strict_json import parse
from holdfast.engine.commit.new_file import NewFile
from holdfast.engine.commit.target import not_committed_on_error
from holdfast.engine.commit.temporaries import MAX_ATTEMPTS, LockedEntry, try_lock
from holdfast.engine.commit.transactions import (
    DirectoryTransaction,
    FileTransaction,
    replace_file,
)
from holdfast.engine.saves import (
    Data,
    FilePlan,
    Gathered,
    Hole,
    Late,
    Literal,
    Memory,
    SavePlan,
)
from holdfast.engine.write import read_file_crcs
from holdfast.errors import DurabilityUncertain, HoldfastError, NotCommitted
from holdfast.stores.files import Files, read_all, system_files
from holdfast.stores.virtual import tensor_stamp

RECEIPT_SUFFIX = ".receipt"

BUSY = (
    "another process is writing to this target with resume=True; wait until it is done, or write "
    "elsewhere"
)


def hash_save_inputs(plan: SavePlan) -> str:
    """Return a hash of everything that decides the bytes of a save.

    Tensors in files count with the stamps of their files and their recorded checksums, so their
    data is read only if the source has neither (`tensor_stamp`).
    """
    entries: list[object] = [plan.format]
    for file in plan.files:
        entries.append([file.key, file.nbytes])
        for segment in file.segments:
            if isinstance(segment, Literal):
                entries.append(_short_hash(segment.data))
            elif isinstance(segment, Memory):
                entries.append([segment.label, _short_hash(segment.content)])
            elif isinstance(segment, Data):
                entries.append([segment.label, tensor_stamp(segment.tensor)])
            elif isinstance(segment, Gathered):
                for label, tensor in zip(segment.labels, segment.tensors(), strict=True):
                    entries.append([label, tensor_stamp(tensor)])
            elif not isinstance(segment, Hole | Late):
                # The bytes of a `Hole` are zeros. Those of a `Late` segment follow from the other
                # segments and their checksums.
                assert_never(segment)
    return _short_hash(json.dumps(entries).encode())


def _short_hash(content: bytes | memoryview) -> str:
    """Return a hash of 64 bits as hexadecimal text, short enough for the name of a folder."""
    return hashlib.blake2b(content, digest_size=8).hexdigest()


def make_resume_path(target: str, plan: SavePlan) -> str:
    """Return the path of the resume folder for a save of a plan to a target.

    Another attempt of the same save finds the folder by the hash in its name.
    """
    parent, name = os.path.split(os.path.abspath(target.rstrip("/")))
    return os.path.join(parent, f".{name}.{hash_save_inputs(plan)}.part")


class ResumeFolder:
    """The open folder of finished files. The module's docstring describes it.

    Nothing here changes the target, so every failure is a `NotCommitted`.
    """

    def __init__(
        self,
        path: str,
        target: str,
        *,
        durable: bool,
        is_joined: bool = False,
        files: Files | None = None,
    ) -> None:
        """Open the folder.

        Args:
            path: The folder, from `make_resume_path`.
            target: The target of the save, for messages.
            durable: Whether finished files must survive a power cut.
            is_joined: Whether the first rank has created and locked it already. Otherwise this
                process does.
            files: The file system. Tests pass another one.
        """
        self._files: Files = files or system_files()
        self._path = path
        self._parent, self._name = os.path.split(path)
        self._target = target
        self._durable = durable
        with not_committed_on_error("opening the folder for finished files", target):
            self._parent_fd = self._files.open_directory(self._parent)
            try:
                if is_joined:
                    self._folder = LockedEntry.open_directory(
                        self._files, self._name, dir_fd=self._parent_fd
                    )
                else:
                    self._folder = self._create_and_lock()
            except BaseException:
                with suppress(OSError):
                    self._files.close(self._parent_fd)
                raise

    def _create_and_lock(self) -> LockedEntry:
        """Create the folder if it does not exist, and lock it.

        Raises:
            NotCommitted: Another process has it.
        """
        for _ in range(MAX_ATTEMPTS):
            with suppress(FileExistsError):
                self._files.mkdir(self._name, dir_fd=self._parent_fd, private=True)
            # A process that had the folder may finish now, and remove it between any two calls.
            try:
                folder = LockedEntry.open_directory(self._files, self._name, dir_fd=self._parent_fd)
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

    def finish_file(
        self, file: FilePlan, write: Callable[[NewFile], Mapping[str, int]]
    ) -> Mapping[str, int]:
        """Take over a finished file of an earlier attempt, or write it now.

        A crash before the receipt is written leaves a file that the next attempt writes again.

        Args:
            file: The file.
            write: Writes the file, and returns the CRC-32 of its data by label.

        Returns:
            The CRC-32 of the data of the file, by label.
        """
        with not_committed_on_error("looking for a finished file", self._target):
            finished_crcs = self._check_finished(file)
        if finished_crcs is not None:
            return finished_crcs

        path = os.path.join(self._path, file.key)
        try:
            with FileTransaction(path, durable=self._durable, files=self._files) as transaction:
                crcs = dict(write(transaction.file))
                transaction.commit()
            receipt = json.dumps(crcs).encode()
            replace_file(path + RECEIPT_SUFFIX, receipt, durable=self._durable, files=self._files)
        except DurabilityUncertain as error:
            # That error means that the new content is in place. It is so in this folder, but not
            # at the target.
            raise NotCommitted(
                f"a finished file could not be kept for the next try: {error.message}; "
                "nothing changed at the target",
                file=self._target,
                errno=error.errno,
            ) from error.__cause__
        return crcs

    def _check_finished(self, file: FilePlan) -> Mapping[str, int] | None:
        """Return the checksums of a finished file. None if it is missing or differs from its
        receipt."""
        dir_fd = self._folder.descriptor
        metadata = self._files.stat(file.key, dir_fd=dir_fd)
        if metadata is None or metadata.kind != "file" or metadata.nbytes != file.nbytes:
            return None

        receipt_name = file.key + RECEIPT_SUFFIX
        receipt_metadata = self._files.stat(receipt_name, dir_fd=dir_fd)
        try:
            receipt = read_all(
                self._files,
                receipt_name,
                receipt_metadata,
                dir_fd=dir_fd,
                max_nbytes=DEFAULTS.index_nbytes,
            )
            if receipt is None:
                return None
            recorded_crcs = parse(receipt, DEFAULTS)
        except HoldfastError:
            return None

        descriptor = self._files.open(file.key, dir_fd=dir_fd)
        try:
            crcs = read_file_crcs(file, descriptor)
        finally:
            self._files.close(descriptor)
        return crcs if crcs == recorded_crcs else None

    def link_into(self, transaction: DirectoryTransaction, key: str) -> None:
        """Give a finished file a second name in the transaction of the target."""
        transaction.link_finished(key, f"../{self._name}/{key}")

    def close(self) -> None:
        """Release the folder, and leave its files to the next attempt."""
        with suppress(OSError):
            self._folder.close()
        with suppress(OSError):
            self._files.close(self._parent_fd)

    def remove(self) -> None:
        """Remove the folder after the target was published. The target keeps the linked files.

        What cannot be removed stays. The target is complete without it.
        """
        with suppress(OSError):
            for name in self._files.list(self._folder.descriptor):
                with suppress(OSError):
                    self._files.unlink(name, dir_fd=self._folder.descriptor)
            self._files.rmdir(self._name, dir_fd=self._parent_fd)
