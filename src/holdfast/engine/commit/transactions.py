"""The commit: before it nothing at the target has changed, after it everything is there.

One file, `FileTransaction`:

    1  open the parent directory                        4  write
    2  repair and clean what dead processes left        5  fsync the file
    3  create and lock `.name.<random>.tmp`             6  rename: the one visible step
                                                        7  fsync the parent directory

A directory, `DirectoryTransaction`, does the same with a hidden sibling directory:

    4a  write the data files, fsync each, fsync the directory (`seal_data`)
    4b  write the index files, which therefore never name data that is not on disk
    5   fsync each, fsync the directory
    6   rename to a name that does not exist, or exchange with the directory that is to be replaced
    7   fsync the parent directory
    8   only now remove what was replaced (`freed_in_background`)

What goes wrong before step 6 raises `NotCommitted`: the temporary is gone, the target as it was. What goes wrong after it raises
`DurabilityUncertain`. A failed fsync is never tried again, because the kernel may have dropped the pages and would then report
success. Leaving the `with` block without `commit()`, or with any exception, gives everything up. `docs/design/004` has the reasons.

With `durable=False` the fsyncs of steps 4, 5 and 7 are left out: what a killed process leaves is still the old or the new, what a
power cut leaves is not promised.
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
from holdfast.engine.commit.new_file import NO_LINKS, NewFile, linked_or_copied
from holdfast.engine.commit.target import (
    TargetName,
    explain_failure,
    explain_uncertainty,
    not_committed_on_error,
    open_target,
    refuse_existing,
)
from holdfast.engine.commit.temporaries import (
    LockedEntry,
    claim,
    empty,
    find_set_aside,
    freed_in_background,
    make_temporary_name,
    plain_names,
    remove_abandoned,
    try_lock,
)
from holdfast.errors import HoldfastError, NotCommitted, SaveError
from holdfast.stores.files import FileEntry, Files, is_temporary, system_files
from holdfast.stores.paths import AnyPath, local_path

BROWSED = frozenset(
    {".DS_Store", "Thumbs.db"}
)  # File managers of macOS and Windows make these; they go with the folder.
OPEN_FILES = (
    16  # Complete files that stay open: the kernel writes them out while the next ones are made.
)


class _Transaction:
    """What both kinds share: a target, a temporary beside it, and the way in and out."""

    directory: ClassVar[bool]

    def __init__(
        self,
        path: AnyPath,
        *,
        durable: bool = True,
        overwrite: bool = True,
        files: Files | None = None,
    ) -> None:
        self.path = local_path(path)
        self.durable = durable
        self.overwrite = overwrite
        self._files: Files = files or system_files()
        self._target: TargetName | None = None
        self._temporary: LockedEntry | None = None
        self._published = False

    def __enter__(self) -> Self:
        target = self._target = open_target(
            self._files, self.path, replaces=self.overwrite and not self.directory
        )
        try:
            with not_committed_on_error(
                f"creating a temporary {'folder' if self.directory else 'file'} beside the target",
                self.path,
            ):
                refuse_existing(
                    target.existing, self.path, directory=self.directory, overwrite=self.overwrite
                )
                if self.directory and target.existing is not None:
                    self._check_replaced(target, target.existing)
                files, name, at, longest = target.files, target.name, target.at, target.longest
                if target.neighbours is not None:
                    remove_abandoned(
                        files,
                        name,
                        at=at,
                        there=target.neighbours,
                        directories=self.directory,
                        longest=longest,
                    )
                private = target.existing is not None
                self._temporary = claim(
                    files, name, at=at, directory=self.directory, private=private, longest=longest
                )
        except BaseException:
            self._leave()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._leave()
        if (
            isinstance(error, OSError)
            and not isinstance(error, HoldfastError)
            and not self._published
        ):
            raise explain_failure(error, "saving", self.path) from error

    def _working(self) -> tuple[TargetName, LockedEntry]:
        if self._target is None or self._temporary is None:
            raise SaveError("a transaction is used inside its `with` block", file=self.path)
        if self._published:
            raise SaveError("this save is committed already", file=self.path)
        return self._target, self._temporary

    @property
    def hidden_path(self) -> str:
        """Where the new file or folder is until the commit, for other processes that write into it."""
        target, temporary = self._working()
        parent = os.path.dirname(target.files.resolve(self.path.rstrip("/") or "/"))
        return os.path.join(parent, temporary.name)

    def _check_replaced(self, target: TargetName, existing: FileEntry) -> None:
        """Refuse a directory that may not be replaced."""
        raise NotImplementedError

    def _leave(self) -> None:
        """Close everything, and give up what was not committed."""
        raise NotImplementedError


class FileTransaction(_Transaction):
    """One file, written beside its target and moved there by `commit`. A path that is a link means the file behind it, as it does
    for `torch.save`; that file is replaced and the link stays. The new file has the permission bits of the one that it replaces.
    Further hard links to the old file keep the old content."""

    directory = False
    file: NewFile
    """The new file, inside of the block."""

    def __enter__(self) -> Self:
        if self.path.endswith("/"):
            raise NotCommitted(
                "a file was to be saved and the path ends like a folder's",
                file=self.path,
                errno=errno.EISDIR,
            )
        try:
            super().__enter__()
            target, temporary = self._working()
            self.file = NewFile(
                target.files, temporary.descriptor, path=self.path, durable=self.durable
            )
        except BaseException:
            self._leave()
            raise
        return self

    def commit(self, before_rename: Callable[[], None] = lambda: None) -> None:
        """Make what was written the content of the target; the module's docstring says what a failure means.

        `before_rename` is called right before an existing file is replaced. Its errors keep that file.
        """
        target, temporary = self._working()
        file = self.file
        if file.failed:
            raise NotCommitted(
                "a write to this file failed before; nothing changed at the target",
                file=self.path,
                errno=errno.EIO,
            )
        target.keep_access(file.descriptor, target.existing, found=temporary.found)
        if self.durable:
            file.sync()
        try:
            self._publish(target, temporary, before_rename)
        except OSError as error:
            # NFS may lose the answer to a rename that it has done: look, before saying that nothing changed.
            if isinstance(error, HoldfastError):
                raise
            if not target.holds(temporary):
                raise explain_failure(
                    error, "giving the finished file its name", self.path
                ) from error
            self._published = True
            raise explain_uncertainty(
                "the new file is in place, but the rename reported a failure", self.path, error
            ) from error
        self._published = True
        try:
            if self.durable:
                target.files.sync(target.at)
            else:
                # NFS reports late failures of writing when a file is closed; after a successful fsync there are none.
                file.finish(durable=False)
        except OSError as error:
            cause = error.__cause__ if isinstance(error.__cause__, OSError) else error
            raise explain_uncertainty(
                "the new file is in place, but may not survive a power cut", self.path, cause
            ) from cause

    def _publish(
        self, target: TargetName, temporary: LockedEntry, before_rename: Callable[[], None]
    ) -> None:
        files = target.files
        if self.overwrite:
            entries = {} if target.existing is None else {target.name: target.existing}
            with freed_in_background(files, entries, at=target.at):
                before_rename()
                files.rename(temporary.name, target.name, dir_fd=target.at)
        elif not files.rename_new(temporary.name, target.name, dir_fd=target.at):
            try:
                # A second name, which is refused where there is one already. The first goes when the transaction ends.
                files.link(temporary.name, target.name, dir_fd=target.at)
            except OSError as error:
                if error.errno not in NO_LINKS:
                    raise
                message = "this file system cannot promise to replace nothing; pass overwrite=True if that is meant"
                raise NotCommitted(message, file=self.path, errno=error.errno) from error

    def _leave(self) -> None:
        target, temporary = self._target, self._temporary
        self._target = self._temporary = None
        if target is None:
            return
        if temporary is not None:
            if not (self._published and self.overwrite):
                with suppress(OSError):
                    target.files.unlink(temporary.name, dir_fd=target.at)
            # Nobody writes to a descriptor that is closed, and may be that of another file.
            file: NewFile | None = vars(self).pop("file", None)
            if file is None:  # interrupted before it was made
                with suppress(OSError):
                    temporary.close()
            elif file.is_open:
                file.give_up()
        target.close()


def replace_file(
    path: AnyPath,
    content: bytes,
    *,
    durable: bool,
    overwrite: bool = True,
    files: Files | None = None,
) -> None:
    """Make this the content of a small file, wholly or not at all."""
    with FileTransaction(path, durable=durable, overwrite=overwrite, files=files) as single:
        single.file.allocate(len(content))
        single.file.write(0, content)
        single.commit()


def read_file(path: str, *, most_nbytes: int, files: Files) -> bytes | None:
    """Read a small file, at most so many bytes of it. None if there is no plain file."""
    folder, name = os.path.split(path)
    with not_committed_on_error("reading a file", path), ExitStack() as opened:
        at = files.open_directory(folder)
        opened.callback(files.close, at)
        entry = files.stat(name, dir_fd=at)
        if entry is None or entry.kind != "file":
            return None
        descriptor = files.open(name, dir_fd=at)
        opened.callback(files.close, descriptor)
        return files.pread(descriptor, min(entry.nbytes, most_nbytes), 0)


class DirectoryTransaction(_Transaction):
    """A directory of plain files, written beside its target and moved there by `commit`. With `overwrite=True` an existing
    directory is replaced as a whole, if all that is in it are plain files whose names pass `replaceable`: the caller's word that a
    name belongs to a checkpoint. If one does not pass, nothing is written. Without `replaceable` only an empty directory is
    replaced."""

    directory = True

    def __init__(
        self, path: AnyPath, *, durable: bool = True, overwrite: bool = False,
        replaceable: Callable[[str], bool] | None = None, files: Files | None = None,
    ) -> None:  # fmt: skip
        super().__init__(path, durable=durable, overwrite=overwrite, files=files)
        self._replaceable = replaceable or (lambda name: False)
        self._created: dict[str, NewFile | None] = {}
        self._open: deque[NewFile] = deque()
        self._failed = False
        self._synced = False
        self._old: LockedEntry | None = None
        self._old_names: list[str] = []
        self._replaced: dict[str, FileEntry] = {}
        self._common: FileEntry | None = None

    def create(self, key: str) -> NewFile:
        """A new file of the directory. Those made after `seal_data` are index files, which may speak of all before them."""
        target, temporary, label = self._begun(key)
        with not_committed_on_error("creating a file", label):
            made = NewFile(
                target.files,
                target.files.create(key, dir_fd=temporary.descriptor),
                path=label,
                durable=self.durable,
            )
        return self._keep(key, made)

    def adopt(self, key: str, source: str) -> None:
        """Give a finished file, at a path relative to the new folder, a second name in it: `key`."""
        target, temporary, label = self._begun(key)
        with not_committed_on_error("taking over a finished file", label):
            target.files.link(source, key, dir_fd=temporary.descriptor)
            taken = NewFile(
                target.files, target.files.open(key, dir_fd=temporary.descriptor), path=label
            )
        self._keep(key, taken).complete = True

    def link(self, key: str, nbytes: int, *, folder: int) -> bool:
        """Give a finished file of another directory (open) a second name here. False where it had to be copied (`linked`)."""
        target, temporary, label = self._begun(key)
        with not_committed_on_error("taking over a file of the base", label):
            inside = temporary.descriptor
            taken, same = linked_or_copied(
                target.files, key, nbytes, source_at=folder, at=inside, label=label
            )
        # Synced like all others: whoever wrote it may not have waited. Its permissions are not ours to change, unless it is a copy.
        (self._record(key, taken) if same else self._keep(key, taken)).complete = True
        return same

    def join(self, key: str, nbytes: int, *, linked: bool = False) -> None:
        """Take in a file that another process wrote into the new folder, or `linked`, and has synced; it must have this length."""
        target, temporary, label = self._begun(key)
        with not_committed_on_error("taking in a file of another process", label):
            found = target.files.stat(key, dir_fd=temporary.descriptor)
            if found is None or found.kind != "file" or found.nbytes != nbytes:
                what = (
                    "is not there"
                    if found is None
                    else f"is a {found.kind} of {found.nbytes:,} bytes"
                )
                raise NotCommitted(
                    f"a file of another rank should have {nbytes:,} bytes and {what}",
                    file=label,
                    errno=errno.EIO,
                )
            taken = NewFile(
                target.files, target.files.open(key, dir_fd=temporary.descriptor), path=label
            )
        (self._record(key, taken) if linked else self._keep(key, taken)).complete = True

    def _keep(self, key: str, file: NewFile) -> NewFile:
        """Record a file that was made, and give it the permissions of what it replaces."""
        self._record(key, file)
        self._working()[0].keep_access(file.descriptor, self._like(key))
        return file

    def _record(self, key: str, file: NewFile) -> NewFile:
        """Record a file, and finish the oldest where more than `OPEN_FILES` are open that nobody writes to any more."""
        self._created[key] = file
        self._open.append(file)
        while len(self._open) > OPEN_FILES and self._open[0].complete:
            self._open.popleft().finish(durable=self.durable)
        return file

    def _begun(self, key: str) -> tuple[TargetName, LockedEntry, str]:
        """The target, the temporary folder, and what errors call a new file of this name. Refuses what is no plain, new name."""
        target, temporary = self._working()
        label = f"{self.path.rstrip('/')}/{key}"
        if (
            not key
            or "/" in key
            or "\\" in key
            or "\0" in key
            or key in (".", "..")
            or is_temporary(key)
        ):
            raise NotCommitted(
                f"{key!r} is no plain name for a file of a checkpoint",
                file=label,
                errno=errno.EINVAL,
            )
        if key in self._created:
            raise NotCommitted(f"{key!r} is written twice", file=label, errno=errno.EEXIST)
        self._created[key] = None
        self._synced = False
        return target, temporary, label

    def seal_data(self) -> None:
        """Come back when all files so far, and their names, are on disk; with `durable=False`, when they are closed."""
        target, temporary = self._working()
        for key, file in self._created.items():
            if file is None or file.failed or self._failed:
                raise NotCommitted(
                    f"writing {key!r} failed before; nothing changed at the target",
                    file=self.path,
                    errno=errno.EIO,
                )
            file.finish(durable=self.durable)
        if self.durable and not self._synced:
            self._failed = (
                True  # unless the next line is passed; what failed once is not tried again
            )
            with not_committed_on_error("writing the folder to the disk (fsync)", self.path):
                target.files.sync(temporary.descriptor)
            self._failed = False
        self._synced = True

    def commit(self, before_rename: Callable[[], None] = lambda: None) -> None:
        """Make the directory the target; the module's docstring says what a failure means.

        `before_rename` is called right before the directory gets its name. Its errors keep what is there.
        """
        target, temporary = self._working()
        target.keep_access(temporary.descriptor, target.existing)
        self._synced = self._synced and target.existing is None
        self.seal_data()
        try:
            with not_committed_on_error("giving the finished folder its name", self.path):
                self._publish(target, temporary, before_rename)
        except OSError as error:
            if not target.holds(temporary):
                raise
            self._published = True
            cause = error.__cause__ if isinstance(error.__cause__, OSError) else error
            raise explain_uncertainty(
                "the new folder is in place, but the rename reported a failure", self.path, cause
            ) from cause
        self._published = True
        try:
            if self.durable:
                target.files.sync(target.at)
        except OSError as error:
            kept = self._set_old_aside(target)
            self._let_go()
            raise explain_uncertainty(
                f"the new folder is in place, but may not survive a power cut{kept}",
                self.path,
                error,
            ) from error
        self._remove_old(target)

    def _check_replaced(self, target: TargetName, existing: FileEntry) -> None:
        descriptor = target.files.open_directory(target.name, dir_fd=target.at)
        try:
            names = self._names_to_replace(target.files, descriptor)
            there = ((name, target.files.stat(name, dir_fd=descriptor)) for name in names)
            self._replaced = {name: inner for name, inner in there if inner is not None}
            self._common = _in_common(list(self._replaced.values()), existing.owner)
        finally:
            target.files.close(descriptor)

    def _like(self, key: str) -> FileEntry | None:
        """What says who may read a file: the one of this name in the old directory; where there is none, all that are there. A file
        under a new name may be read by those alone who may read all of the old ones."""
        return self._replaced.get(key, self._common)

    def _names_to_replace(self, files: Files, descriptor: int) -> list[str]:
        names = plain_names(files, descriptor)
        foreign = [
            repr(name)
            for name in names or ()
            if not self._replaceable(name) and name not in BROWSED
        ]
        if names is None:
            found = ((name, files.stat(name, dir_fd=descriptor)) for name in files.list(descriptor))
            foreign = [
                f"the {entry.kind} {name!r}"
                for name, entry in found
                if entry is not None and entry.kind != "file"
            ]
        if names is None or foreign:
            what = ", ".join(foreign[:5])
            message = f"the folder to be replaced holds what is no part of a checkpoint and would be lost ({what})"
            raise NotCommitted(
                f"{message}; move it away or save elsewhere", file=self.path, errno=errno.ENOTEMPTY
            )
        return names

    def _publish(
        self, target: TargetName, temporary: LockedEntry, before_rename: Callable[[], None]
    ) -> None:
        files, at = target.files, target.at
        if files.stat(target.name, dir_fd=at) is None:
            before_rename()
            # Where the first is not supported: plain rename(2) replaces nothing but an empty directory.
            if not files.rename_new(temporary.name, target.name, dir_fd=at):
                files.rename(temporary.name, target.name, dir_fd=at)
            return
        if not self.overwrite:
            raise FileExistsError(errno.EEXIST, "File exists")
        old = self._old = LockedEntry.open_directory(files, target.name, at=at)
        # Held to the end: no cleaner takes the old directory for a dead process's, no other save replaces it meanwhile.
        if not try_lock(files, old.descriptor) or not old.is_in_place():
            raise NotCommitted(
                "another save is replacing this folder; save again",
                file=self.path,
                errno=errno.EBUSY,
            )
        self._old_names = self._names_to_replace(files, old.descriptor)
        before_rename()
        # Where the old one will be is noted before each step, so that an interrupt right after it finds everything.
        old.name = temporary.name
        if files.exchange(temporary.name, target.name, dir_fd=at):
            return
        if find_set_aside(files, target.name, at=at, there=files.list(at), longest=target.longest):
            raise NotCommitted(
                "an older copy of this folder is set aside and cannot be removed; remove it",
                file=self.path,
                errno=errno.EEXIST,
            )
        if self.durable:
            # Else a power cut might bring back an `.old` that was removed before, and two of them tell nobody which one it is.
            files.sync(at)
        old.name = make_temporary_name(target.name, suffix="old", longest=target.longest)
        files.rename(target.name, old.name, dir_fd=at)
        files.rename(temporary.name, target.name, dir_fd=at)

    def _remove_old(self, target: TargetName) -> None:
        """Remove what was replaced, if it is where the commit put it. What cannot be removed waits for the next save's cleaning."""
        if self._old is not None:
            with suppress(OSError):
                if self._old.is_in_place():
                    empty(target.files, self._old, self._old_names, sizes=self._replaced)
        self._let_go()

    def _set_old_aside(self, target: TargetName) -> str:
        """Keep what was replaced where no save but the next one to this name removes it, and say where that is. A later fsync may
        report a success that this one did not have, so a save to another name must not trust its own."""
        old = self._old
        if old is None:
            return ""
        with suppress(OSError):
            if old.name.endswith(".tmp") and old.is_in_place():
                aside = make_temporary_name(target.name, suffix="old", longest=target.longest)
                target.files.rename(old.name, aside, dir_fd=target.at)
                old.name = aside
        return f" (what it replaced is kept as {old.name})"

    def _let_go(self) -> None:
        if self._old is not None:
            with suppress(OSError):
                self._old.close()
        self._old = None

    def _leave(self) -> None:
        """Close everything and give up what was not committed; what is on disk decides, not how far the code believes to be."""
        target, temporary = self._target, self._temporary
        self._target = self._temporary = None
        for file in self._created.values():
            if file is not None:
                file.give_up()
        if target is not None and temporary is not None:
            with suppress(OSError):
                self._settle(target, temporary)
            with suppress(OSError):
                temporary.close()
        self._let_go()
        if target is not None:
            target.close()

    def _settle(self, target: TargetName, temporary: LockedEntry) -> None:
        files, at, old = target.files, target.at, self._old
        if temporary.is_in_place():
            if old is not None and files.stat(target.name, dir_fd=at) is None and old.is_in_place():
                files.rename(old.name, target.name, dir_fd=at)
            names = plain_names(files, temporary.descriptor)
            if names is not None:
                empty(files, temporary, names)
        elif old is not None and target.holds(temporary):
            # Interrupted after the visible step.
            if self.durable:
                files.sync(at)
            self._remove_old(target)


def _in_common(files: list[FileEntry], owner: tuple[int, int]) -> FileEntry | None:
    """What may be done with all of these files, and whose they are: the owner's that is given, if not all are one's."""
    if not files:
        return None
    mode = reduce(and_, (found.mode for found in files))
    owners = {found.owner for found in files}
    return replace(files[0], mode=mode | 0o400, owner=owners.pop() if len(owners) == 1 else owner)
