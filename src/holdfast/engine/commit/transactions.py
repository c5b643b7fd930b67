"""Saves on a local file system that become visible in one step.

A file (`FileTransaction`):

    1  open the parent folder
    2  repair and remove what dead processes left there
    3  create and lock the temporary `.name.<random>.tmp`
    4  write it
    5  fsync it
    6  rename it to its name                            the one visible step
    7  fsync the parent folder

A folder (`DirectoryTransaction`) does the same with a hidden folder. Steps 4 to 8 are:

    4a  write the data files, fsync each of them and the folder (`seal_data`)
    4b  write the index files, which therefore never name data that is not on the disk
    5   fsync them and the folder
    6   rename the folder, or exchange it with the one to replace. If the file system cannot
        exchange two names: rename the old folder to `.name.<random>.old`, then rename the new one.
    7   fsync the parent folder
    8   only now remove what was replaced

What a crash leaves:

    in steps 1 to 5       The target as it was, and a temporary, which the next save removes.
    between two renames   No target, and the complete old folder as `.old`. Readers open that one
    in step 6             (`find_recoverable`), and the next save renames it back.
    in steps 6 and 7      After a power cut the old or the new checkpoint, both complete.
    in step 8             The new checkpoint, and remains of the old one for the next save to remove.

An error before step 6 raises `NotCommitted`: the temporary is removed and the target is as it was.
An error after step 6 raises `DurabilityUncertain`. A failed fsync is never repeated, since the
kernel may have dropped the pages, and would then report success. A `with` block that ends without
`commit`, or with any exception, gives up the save. `docs/design/004` has the reasons.

With `durable=False` the fsyncs of steps 4, 5 and 7 are left out. Then a killed process still leaves
the old or the new checkpoint, but a power cut may leave neither.
"""

from __future__ import annotations

import errno
import os
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import reduce
from operator import and_
from types import TracebackType
from typing import ClassVar, Self

from holdfast.core.value import replace
from holdfast.engine.commit.new_file import NO_LINKS_ERRNOS, NewFile, link_or_copy_file
from holdfast.engine.commit.target import (
    LocalTarget,
    check_replaceable,
    explain_failure,
    explain_uncertainty,
    not_committed_on_error,
    open_target,
)
from holdfast.engine.commit.temporaries import (
    LockedEntry,
    create_temporary,
    find_hidden_folders,
    freed_in_background,
    list_regular_files,
    make_temporary_name,
    remove_abandoned,
    remove_folder,
    try_lock,
)
from holdfast.errors import HoldfastError, NotCommitted, SaveError
from holdfast.stores.files import FileEntry, Files, is_temporary, system_files
from holdfast.stores.paths import AnyPath, local_path

FILE_MANAGER_FILES = frozenset({".DS_Store", "Thumbs.db"})
"""Files that the file managers of macOS and Windows create. They are removed with a folder."""

MAX_OPEN_FILES = 16
"""How many complete files stay open, while the kernel writes them to the disk."""


class _Transaction:
    """Base class of the two kinds of transactions. It opens the target and creates the temporary.

    A subclass publishes the temporary in `commit`, and closes everything in `_end_transaction`.
    """

    is_folder: ClassVar[bool]

    def __init__(
        self,
        path: AnyPath,
        *,
        durable: bool = True,
        overwrite: bool = True,
        files: Files | None = None,
    ) -> None:
        """Prepare a save. Nothing is touched before the `with` block begins.

        Args:
            path: The target.
            durable: Whether to wait for the disk, so that a power cut cannot undo the save.
            overwrite: Whether an existing target may be replaced.
            files: The file system. Tests pass another one.
        """
        self.path = local_path(path)
        self.durable = durable
        self.overwrite = overwrite
        self._files: Files = files or system_files()
        self._target: LocalTarget | None = None
        self._temporary: LockedEntry | None = None
        self._is_published = False
        """Whether the visible step is done, or may have been done."""

    def __enter__(self) -> Self:
        """Open the target, remove what dead saves left beside it, and create the temporary.

        Raises:
            NotCommitted: The target must not be replaced, or the temporary cannot be created.
        """
        # Only a save of a file that may replace any file can do without the list of the parent
        # folder, which takes long if the folder has very many names.
        replaces_any_file = self.overwrite and not self.is_folder
        self._target = open_target(self._files, self.path, is_listing_optional=replaces_any_file)
        target = self._target
        try:
            kind = "folder" if self.is_folder else "file"
            with not_committed_on_error(
                f"creating a temporary {kind} beside the target", self.path
            ):
                check_replaceable(
                    target.existing,
                    self.path,
                    is_folder=self.is_folder,
                    overwrite=self.overwrite,
                )
                if self.is_folder and target.existing is not None:
                    self._inspect_old_folder(target, target.existing)
                if target.neighbor_names is not None:
                    remove_abandoned(
                        target, target.neighbor_names, include_set_aside=self.is_folder
                    )
                # Until it gets the permissions of what it replaces, only this user may read it.
                self._temporary = create_temporary(
                    target, is_folder=self.is_folder, is_private=target.existing is not None
                )
        except BaseException:
            self._end_transaction()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close everything, and give up the save if it was not committed."""
        self._end_transaction()
        # After the rename, "not committed" would be wrong, so the caller's error passes unchanged.
        if isinstance(error, HoldfastError) or self._is_published:
            return
        if isinstance(error, OSError):
            raise explain_failure(error, "saving", self.path) from error

    def _require_open(self) -> tuple[LocalTarget, LockedEntry]:
        """Return the target and the temporary. Raises `SaveError` outside of the `with` block."""
        if self._target is None or self._temporary is None:
            raise SaveError("a transaction is used inside its `with` block", file=self.path)
        if self._is_published:
            raise SaveError("this save is committed already", file=self.path)
        return self._target, self._temporary

    @property
    def hidden_path(self) -> str:
        """The path of the temporary, for other processes that write into it."""
        target, temporary = self._require_open()
        parent = os.path.dirname(target.files.resolve(self.path.rstrip("/") or "/"))
        return os.path.join(parent, temporary.name)

    def _inspect_old_folder(self, target: LocalTarget, existing: FileEntry) -> None:
        """Check that an old folder may be replaced, and record the permissions of its files.

        Only transactions of folders call this and implement it.
        """
        raise NotImplementedError

    def _end_transaction(self) -> None:
        """Close the parent folder and the temporary, and remove it if it was not committed."""
        raise NotImplementedError


class FileTransaction(_Transaction):
    """One file, which is written beside its target and renamed by `commit`.

    If the path is a link, the file behind it is replaced and the link stays, as with `torch.save`.
    The new file gets the permission bits of the old one. Other hard links of the old file keep the
    old content.
    """

    is_folder = False
    file: NewFile
    """The new file. `__enter__` sets this attribute, and the end of the block deletes it."""

    def __enter__(self) -> Self:
        """Create and open the temporary file."""
        if self.path.endswith("/"):
            message = "a file was to be saved and the path ends like a folder's"
            raise NotCommitted(message, file=self.path, errno=errno.EISDIR)
        super().__enter__()
        try:
            target, temporary = self._require_open()
            # From here on, the new file owns the descriptor of the temporary and closes it.
            self.file = NewFile(
                target.files, temporary.descriptor, path=self.path, durable=self.durable
            )
        except BaseException:
            self._end_transaction()
            raise
        return self

    def commit(self, before_rename: Callable[[], None] = lambda: None) -> None:
        """Make the new file the target.

        A crash before the rename leaves the old target and a temporary, a crash after it the new
        file. The two cannot be mixed.

        Args:
            before_rename: Called right before an existing file is replaced. If it raises an error,
                that file stays.

        Raises:
            NotCommitted: The target is as it was.
            DurabilityUncertain: The new file is in place, but a power cut may undo that.
        """
        target, temporary = self._require_open()
        new_file = self.file
        if new_file.has_failed:
            message = "a write to this file failed before; nothing changed at the target"
            raise NotCommitted(message, file=self.path, errno=errno.EIO)
        target.copy_access(new_file.descriptor, target.existing, current=temporary.metadata)
        if self.durable:
            new_file.sync()

        try:
            self._publish(target, temporary, before_rename)
        except OSError as error:
            if isinstance(error, HoldfastError):
                raise
            # NFS may lose the answer to a rename that was done. Only if the target is still
            # another file it is certain that nothing has changed.
            if not target.may_have_become(temporary):
                raise explain_failure(
                    error, "giving the finished file its name", self.path
                ) from error
            self._is_published = True
            message = "the new file is in place, but the rename reported a failure"
            raise explain_uncertainty(message, self.path, error) from error
        self._is_published = True

        try:
            if self.durable:
                target.files.sync(target.dir_fd)
            else:
                # NFS reports some errors of writing only when the file is closed. After an fsync
                # there are no such errors.
                new_file.finish()
        except OSError as error:
            message = "the new file is in place, but may not survive a power cut"
            raise explain_uncertainty(message, self.path, error) from error

    def _publish(
        self, target: LocalTarget, temporary: LockedEntry, before_rename: Callable[[], None]
    ) -> None:
        """Rename the temporary to the target. Without `overwrite`, never replace anything."""
        files = target.files
        if self.overwrite:
            replaced = {} if target.existing is None else {target.name: target.existing}
            with freed_in_background(files, replaced, dir_fd=target.dir_fd):
                before_rename()
                files.rename(temporary.name, target.name, dir_fd=target.dir_fd)
            return

        if files.rename_new(temporary.name, target.name, dir_fd=target.dir_fd):
            return
        # Without that system call, a second name is created, which also fails if the target exists.
        # The first name is removed at the end of the transaction.
        try:
            files.link(temporary.name, target.name, dir_fd=target.dir_fd)
        except OSError as error:
            if error.errno not in NO_LINKS_ERRNOS:
                raise
            message = (
                "this file system cannot promise to replace nothing; pass overwrite=True if "
                "the target may be replaced"
            )
            raise NotCommitted(message, file=self.path, errno=error.errno) from error

    def _end_transaction(self) -> None:
        """Close the parent folder and the temporary, and remove it if it was not renamed.

        It may be called several times, and at any moment of the transaction. Errors of the file
        system are ignored: the next save removes a temporary that is left.
        """
        target = self._target
        temporary = self._temporary
        self._target = None
        self._temporary = None
        if target is None:
            return

        # The stack runs its callbacks in reverse order, even if an interrupt stops one of them. So
        # the process never keeps a lock of a transaction that has ended.
        with ExitStack() as closing:
            closing.callback(target.close)
            if temporary is None:
                return
            if hasattr(self, "file"):
                # The new file owns the descriptor. The attribute goes, so that nobody writes to the
                # descriptor after it is closed: its number may belong to another file then.
                closing.callback(self.file.close_unfinished)
                del self.file
            else:
                # An interrupt or an error came before the new file took over the descriptor.
                closing.callback(temporary.close)

            # Without `overwrite`, the commit may have created a second name instead of renaming.
            # Then the temporary is the first name of the new file, and is removed here.
            was_renamed = self._is_published and self.overwrite
            if not was_renamed:
                with suppress(OSError):
                    target.files.unlink(temporary.name, dir_fd=target.dir_fd)


def replace_file(
    path: AnyPath,
    content: bytes,
    *,
    durable: bool,
    overwrite: bool = True,
    files: Files | None = None,
) -> None:
    """Write a small file in one transaction: it gets either all of the content or none."""
    with FileTransaction(path, durable=durable, overwrite=overwrite, files=files) as transaction:
        transaction.file.allocate(len(content))
        transaction.file.write(0, content)
        transaction.commit()


class DirectoryTransaction(_Transaction):
    """A folder of files, which is written beside its target and renamed by `commit`.

    With `overwrite=True`, an existing folder is replaced as a whole. It may have only regular files
    that `is_replaceable` accepts, so that nothing but a checkpoint can be lost.
    """

    is_folder = True

    def __init__(
        self,
        path: AnyPath,
        *,
        durable: bool = True,
        overwrite: bool = False,
        is_replaceable: Callable[[str], bool] = lambda name: False,
        files: Files | None = None,
    ) -> None:
        """Prepare a save. Nothing is touched before the `with` block begins.

        Args:
            path: The target.
            durable: Whether to wait for the disk, so that a power cut cannot undo the save.
            overwrite: Whether an existing folder may be replaced.
            is_replaceable: Returns whether a file of this name belongs to a checkpoint and may be
                removed. If it accepts no name, only an empty folder can be replaced.
            files: The file system. Tests pass another one.
        """
        super().__init__(path, durable=durable, overwrite=overwrite, files=files)
        self._is_replaceable = is_replaceable
        self._new_files: dict[str, NewFile | None] = {}
        """The files by their keys. None while a file is being created, or if that has failed."""
        self._unfinished_files: deque[NewFile] = deque()
        self._has_failed_sync = False
        self._is_synced = False
        """Whether the entries of the new folder are on the disk."""
        self._old_folder: LockedEntry | None = None
        """The folder to be replaced, locked. Set just before the new folder is renamed into
        place."""
        self._old_metadata_by_name: dict[str, FileEntry] = {}
        """The metadata of the files in the old folder, by their names."""
        self._common_old_permissions: FileEntry | None = None
        """The permissions that all files of the old folder grant. None if it has no files."""

    def create(self, key: str) -> NewFile:
        """Create a file of the folder.

        Files that are created after `seal_data` are indexes: they may name all files before them.
        """
        target, temporary = self._require_open()
        path = self._reserve_key(key)
        with not_committed_on_error("creating a file", path):
            descriptor = target.files.create(key, dir_fd=temporary.descriptor)
            new_file = NewFile(target.files, descriptor, path=path, durable=self.durable)
        self._add_file(key, new_file)
        return new_file

    def link_finished(self, key: str, source_file: str) -> None:
        """Give a finished file a second name in the folder.

        Args:
            key: The new name.
            source_file: The path of the file, relative to the new folder.
        """
        target, temporary = self._require_open()
        path = self._reserve_key(key)
        with not_committed_on_error("taking over a finished file", path):
            target.files.link(source_file, key, dir_fd=temporary.descriptor)
            descriptor = target.files.open(key, dir_fd=temporary.descriptor)
            new_file = NewFile(target.files, descriptor, path=path, durable=self.durable)
        self._add_file(key, new_file)
        new_file.is_complete = True

    def link_from_base(self, key: str, nbytes: int, *, base_dir_fd: int) -> bool:
        """Take over a finished file of a base checkpoint, under the same name.

        Args:
            key: The name of the file.
            nbytes: The size that it must have.
            base_dir_fd: The open folder of the base.

        Returns:
            Whether the file is linked. Otherwise it had to be copied.
        """
        target, temporary = self._require_open()
        path = self._reserve_key(key)
        with not_committed_on_error("taking over a file of the base", path):
            new_file, is_linked = link_or_copy_file(
                target.files,
                key,
                nbytes,
                source_dir_fd=base_dir_fd,
                dir_fd=temporary.descriptor,
                path=path,
                durable=self.durable,
            )
        # It is synced like all other files, because its writer may not have waited for the disk.
        self._add_file(key, new_file, is_linked=is_linked)
        new_file.is_complete = True
        return is_linked

    def add_from_rank(self, key: str, nbytes: int, *, is_linked: bool = False) -> None:
        """Add a file that another rank has written into the hidden folder, synced and closed.

        Args:
            key: The name of the file.
            nbytes: The size that it must have.
            is_linked: Whether that rank has linked it from a base.

        Raises:
            NotCommitted: The file is missing or has another size.
        """
        target, temporary = self._require_open()
        path = self._reserve_key(key)
        with not_committed_on_error("taking in a file of another rank", path):
            metadata = target.files.stat(key, dir_fd=temporary.descriptor)
            if metadata is None:
                message = "a file that another rank wrote is not there"
                raise NotCommitted(message, file=path, errno=errno.EIO)
            if metadata.kind != "file" or metadata.nbytes != nbytes:
                message = (
                    f"a file of another rank should have {nbytes:,} bytes and is a "
                    f"{metadata.kind} of {metadata.nbytes:,} bytes"
                )
                raise NotCommitted(message, file=path, errno=errno.EIO)
            descriptor = target.files.open(key, dir_fd=temporary.descriptor)
            # That rank has synced the content. The permissions are copied only below, and a durable
            # file is synced once more after that.
            new_file = NewFile(target.files, descriptor, path=path, durable=self.durable)
        self._add_file(key, new_file, is_linked=is_linked)
        new_file.is_complete = True

    def _reserve_key(self, key: str) -> str:
        """Check the key of a new file and reserve it.

        Returns:
            The path that error messages name: that of the file after the commit.

        Raises:
            NotCommitted: The key cannot be the name of a file, or is used already.
        """
        path = f"{self.path.rstrip('/')}/{key}"
        # A backslash separates folders on Windows, where the checkpoint may be read later.
        has_separator = "/" in key or "\\" in key or "\0" in key
        if has_separator or key in ("", ".", "..") or is_temporary(key):
            message = f"{key!r} cannot be the name of a file of a checkpoint"
            raise NotCommitted(message, file=path, errno=errno.EINVAL)
        if key in self._new_files:
            raise NotCommitted(f"{key!r} is written twice", file=path, errno=errno.EEXIST)
        # None until the file is created. If that fails, `seal_data` refuses the incomplete folder.
        self._new_files[key] = None
        self._is_synced = False
        return path

    def _add_file(self, key: str, new_file: NewFile, *, is_linked: bool = False) -> None:
        """Record an open file of the new folder, and give it the permissions of an old file.

        A file that replaces none gets only the permissions shared by all files of the old folder,
        so it is readable only by users who could read all of them. The permissions of a linked file
        stay, because the file belongs to the base as well.
        """
        self._new_files[key] = new_file
        self._finish_oldest_files()
        self._unfinished_files.append(new_file)
        if not is_linked:
            target, _ = self._require_open()
            permission_source = self._old_metadata_by_name.get(key, self._common_old_permissions)
            target.copy_access(new_file.descriptor, permission_source)

    def _finish_oldest_files(self) -> None:
        """Sync and close the oldest files, so that few descriptors stay open.

        They are finished in the order of their creation. If the oldest one is still being written,
        they all stay open.
        """
        while len(self._unfinished_files) >= MAX_OPEN_FILES:
            if not self._unfinished_files[0].is_complete:
                break
            self._unfinished_files.popleft().finish()

    def seal_data(self) -> None:
        """Wait until all files so far, and their names, are on the disk.

        With `durable=False`, only close the files. Index files are written after this, so a crash
        never leaves an index that names data that is not there.
        """
        target, temporary = self._require_open()
        for key, new_file in self._new_files.items():
            if new_file is None or new_file.has_failed or self._has_failed_sync:
                message = f"writing {key!r} failed before; nothing changed at the target"
                raise NotCommitted(message, file=self.path, errno=errno.EIO)
            new_file.finish()

        # The fsync of a folder puts the names in it on the disk.
        if self.durable and not self._is_synced:
            # Set before the call, so that no kind of failure lets a later call try again.
            self._has_failed_sync = True
            with not_committed_on_error("writing the folder to the disk (fsync)", self.path):
                target.files.sync(temporary.descriptor)
            self._has_failed_sync = False
        self._is_synced = True

    def commit(self, before_rename: Callable[[], None] = lambda: None) -> None:
        """Make the new folder the target, and then remove the folder that it replaced.

        A crash before the visible step leaves the old folder and a temporary, a crash after it the
        new folder. On file systems that cannot exchange two names, a crash between two renames
        leaves the old folder set aside, where readers find it.

        Args:
            before_rename: Called right before the visible step. If it raises an error, the old
                folder stays.

        Raises:
            NotCommitted: The target is as it was.
            DurabilityUncertain: The new folder is in place, but a power cut may undo that.
        """
        target, temporary = self._require_open()
        target.copy_access(temporary.descriptor, target.existing)
        if target.existing is not None:
            # The permissions of the folder may have changed, which must be synced as well.
            self._is_synced = False
        self.seal_data()

        try:
            with not_committed_on_error("giving the finished folder its name", self.path):
                self._publish(target, temporary, before_rename)
        except OSError as error:
            # This is a `NotCommitted`, which is an `OSError` as well. It is wrong if the rename was
            # done: a network file system may lose the answer to it.
            if not target.may_have_become(temporary):
                raise
            self._is_published = True
            message = "the new folder is in place, but the rename reported a failure"
            raise explain_uncertainty(message, self.path, error) from error
        self._is_published = True

        try:
            if self.durable:
                # The fsync of the parent folder makes the rename itself durable.
                target.files.sync(target.dir_fd)
        except OSError as error:
            kept_folder = self._set_old_aside(target)
            self._close_old_folder()
            message = f"the new folder is in place, but may not survive a power cut{kept_folder}"
            raise explain_uncertainty(message, self.path, error) from error
        self._remove_old_folder()

    def _inspect_old_folder(self, target: LocalTarget, existing: FileEntry) -> None:
        """Check that the old folder may be replaced, and record the permissions of its files.

        Raises:
            NotCommitted: The folder has something that does not belong to a checkpoint.
        """
        dir_fd = target.files.open_directory(target.name, dir_fd=target.dir_fd)
        try:
            self._old_metadata_by_name = self._inspect_old_files(target.files, dir_fd)
        finally:
            target.files.close(dir_fd)
        entries = list(self._old_metadata_by_name.values())
        self._common_old_permissions = _intersect_permissions(entries, existing.owner)

    def _inspect_old_files(self, files: Files, dir_fd: int) -> dict[str, FileEntry]:
        """Check that a folder has only files that may be replaced, and return their metadata.

        Returns:
            The metadata by the names of the files. Files that vanish meanwhile are left out.

        Raises:
            NotCommitted: The folder has something that does not belong to a checkpoint.
        """
        metadata_by_name: dict[str, FileEntry] = {}
        foreign_entries: list[str] = []
        for name in files.list(dir_fd):
            metadata = files.stat(name, dir_fd=dir_fd)
            if metadata is None:
                continue
            metadata_by_name[name] = metadata
            if metadata.kind != "file":
                foreign_entries.append(f"the {metadata.kind} {name!r}")
            elif not self._is_replaceable(name) and name not in FILE_MANAGER_FILES:
                foreign_entries.append(repr(name))

        if foreign_entries:
            listed_entries = ", ".join(foreign_entries[:5])
            if len(foreign_entries) > 5:
                listed_entries += f" and {len(foreign_entries) - 5} more"
            message = (
                "the folder to be replaced has something that is not part of a checkpoint and "
                f"would be lost ({listed_entries}); move it away or save elsewhere"
            )
            raise NotCommitted(message, file=self.path, errno=errno.ENOTEMPTY)
        return metadata_by_name

    def _publish(
        self, target: LocalTarget, temporary: LockedEntry, before_rename: Callable[[], None]
    ) -> None:
        """Take the visible step: rename the new folder, or exchange it with the old one.

        A crash leaves either the old or the new folder at the target. If the file system cannot
        exchange two names, a crash between the two renames leaves no target, and the old folder
        with the suffix `old`.
        """
        files = target.files
        dir_fd = target.dir_fd
        # The target is looked up again, since another save may have created or removed it.
        if files.stat(target.name, dir_fd=dir_fd) is None:
            before_rename()
            # rename(2), for systems without the first call, replaces at most an empty folder.
            if not files.rename_new(temporary.name, target.name, dir_fd=dir_fd):
                files.rename(temporary.name, target.name, dir_fd=dir_fd)
            return

        if not self.overwrite:
            raise FileExistsError(errno.EEXIST, "File exists")
        old = LockedEntry.open_directory(files, target.name, dir_fd=dir_fd)
        self._old_folder = old
        # The lock is held to the end. It keeps cleaners from removing the old folder as abandoned,
        # and other saves from replacing it at the same time.
        if not try_lock(files, old.descriptor) or not old.is_in_place():
            message = "another save is replacing this folder; save again"
            raise NotCommitted(message, file=self.path, errno=errno.EBUSY)
        # Its files are listed again under the lock: these are the ones to remove after the step.
        self._old_metadata_by_name = self._inspect_old_files(files, old.descriptor)
        before_rename()

        # The next name of the old folder is noted before each step, so that the clean-up finds the
        # folder even if an interrupt comes right after the call.
        old.name = temporary.name
        if files.exchange(temporary.name, target.name, dir_fd=dir_fd):
            return

        # Two set-aside folders would make it unknown which one is the newest.
        if find_hidden_folders(target, files.list(dir_fd), suffix="old"):
            message = "an older copy of this folder is set aside and cannot be removed; remove it"
            raise NotCommitted(message, file=self.path, errno=errno.EEXIST)
        if self.durable:
            # Otherwise a power cut might bring back a set-aside folder that was removed before.
            files.sync(dir_fd)
        old.name = make_temporary_name(target.name, suffix="old", max_nbytes=target.max_name_nbytes)
        files.rename(target.name, old.name, dir_fd=dir_fd)
        files.rename(temporary.name, target.name, dir_fd=dir_fd)

    def _remove_old_folder(self) -> None:
        """Remove the folder that was replaced. If that fails, it is left to the next save."""
        if self._old_folder is not None:
            with suppress(OSError):
                if self._old_folder.is_in_place():
                    metadata = self._old_metadata_by_name
                    remove_folder(self._old_folder, list(metadata), metadata=metadata)
        self._close_old_folder()

    def _set_old_aside(self, target: LocalTarget) -> str:
        """Keep the folder that was replaced, after the fsync of the parent folder has failed.

        A power cut may now bring the old folder back. With the suffix `old`, only the next save to
        this target removes it. A save to another target must not: its fsync may report a success
        that this one did not have.

        Returns:
            The end of the error message, which names the folder. Empty if nothing was replaced.
        """
        old = self._old_folder
        if old is None:
            return ""
        # If the rename fails, the folder keeps its temporary name, and the message names that.
        with suppress(OSError):
            # After an exchange, the old folder has the name of the temporary, which any save may
            # remove. After two renames it has the suffix `old` already.
            if old.name.endswith(".tmp") and old.is_in_place():
                set_aside_name = make_temporary_name(
                    target.name, suffix="old", max_nbytes=target.max_name_nbytes
                )
                target.files.rename(old.name, set_aside_name, dir_fd=target.dir_fd)
                old.name = set_aside_name
        return f" (what it replaced is kept as {old.name})"

    def _close_old_folder(self) -> None:
        """Release the lock of the folder that was replaced."""
        if self._old_folder is not None:
            self._old_folder.close()
        self._old_folder = None

    def _end_transaction(self) -> None:
        """Close all files and folders, and undo what was not committed.

        It may be called several times, and at any moment of the transaction. Errors of the file
        system are ignored: what cannot be removed now is left to the next save.
        """
        target = self._target
        temporary = self._temporary
        self._target = None
        self._temporary = None
        # The stack runs its callbacks in reverse order, even if an interrupt stops one of them. So
        # the process never keeps a lock of a transaction that has ended.
        with ExitStack() as closing:
            if target is not None:
                closing.callback(target.close)
            closing.callback(self._close_old_folder)
            if temporary is not None:
                closing.callback(temporary.close)

            for new_file in self._new_files.values():
                if new_file is not None:
                    new_file.close_unfinished()
            if target is not None and temporary is not None:
                with suppress(OSError):
                    self._clean_up(target, temporary)

    def _clean_up(self, target: LocalTarget, temporary: LockedEntry) -> None:
        """Undo a save that was given up, or complete one that had become visible already.

        The names on the disk decide which of the two it is, and not the attributes: an interrupt may
        come between a system call and the line that records it.
        """
        files = target.files
        old = self._old_folder
        if temporary.is_in_place():
            # The new folder still has its hidden name, so the save was not published.
            target_is_missing = files.stat(target.name, dir_fd=target.dir_fd) is None
            if old is not None and target_is_missing and old.is_in_place():
                # The interrupt came between the two renames.
                files.rename(old.name, target.name, dir_fd=target.dir_fd)
            names = list_regular_files(files, temporary.descriptor)
            if names is not None:
                remove_folder(temporary, names)
        elif old is not None and target.may_have_become(temporary):
            # The interrupt came after the visible step, so the rest of the commit is done here.
            if self.durable:
                # If this fails, the old folder stays: a power cut may bring it back.
                files.sync(target.dir_fd)
            self._remove_old_folder()


def _intersect_permissions(
    entries: list[FileEntry], folder_owner: tuple[int, int]
) -> FileEntry | None:
    """Return an entry with the permissions that all of these files grant.

    Args:
        entries: The files of a folder.
        folder_owner: The user and group of the folder.

    Returns:
        An entry whose owner is that of the files, or of their folder if the files have different
        owners. The owner may always read it. None if there are no files.
    """
    if not entries:
        return None
    mode = reduce(and_, (entry.mode for entry in entries))
    owners = {entry.owner for entry in entries}
    owner = owners.pop() if len(owners) == 1 else folder_owner
    # `LocalTarget.copy_access` uses only the mode, the owner and the kind of the result. So the other
    # fields may be those of any file.
    return replace(entries[0], mode=mode | 0o400, owner=owner)
