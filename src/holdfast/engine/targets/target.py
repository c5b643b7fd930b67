"""`Target`: where a save goes, and nobody finds it before it is published. A part of a save is a process: one alone, or a rank.

                 a file or a folder (`folder`)                objects (`bucket`)

unpublished      under a hidden name beside the target        names that carry the id of the save, or hidden ones
others are sent  the name of the hidden folder                that id
published        by one rename                                by one put with a condition: of the index, or of the object
given up         the part that opened it removes it           each part removes its objects, the first one all of the save
one file         by several parts, each some of its bytes     by one part
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from types import TracebackType
from typing import TYPE_CHECKING, Self

from msgspec import field

from holdfast.core.protocols import Store
from holdfast.core.value import Value
from holdfast.engine.saves import FilePlan, LinkedFile, SavePlan
from holdfast.engine.stream import Writer
from holdfast.engine.write import FileSums, Progress
from holdfast.stores.files import Files
from holdfast.stores.paths import is_parsed_url

if TYPE_CHECKING:
    from holdfast.engine.targets.bucket import BucketNames


class Saving(Value, frozen=True, kw_only=True):
    crcs: dict[str, int] = field(
        default_factory=dict
    )  # Of all data that was written before, by label. Each file adds its own.
    threads: int | None = None
    block: int | None = None
    progress: Progress | None = None
    read_back: bool = False
    check_opens: Callable[[Store], None] | None = None
    """Opens what was written before it is published; its errors keep what was there. None if the
    save is not checked."""
    last: Callable[[], None] = lambda: (
        None
    )  # Asked when everything is written: what it raises keeps what was there.
    before_rename: Callable[[], None] = lambda: None
    """Called right before a rename replaces what is there; its errors keep that as it was. `last`
    comes too early for this: the fsync of the new file lies between it and the rename."""
    attributes: Mapping[str, str] | None = None  # What the object of the index says of itself.


Fill = Callable[[Saving], Mapping[str, int]]
"""Writes a file that has its place, now or when it is published; the CRC-32 of each piece of data by its label, if now."""

Delivered = tuple[
    str, int, bool
]  # A file that another part has written: key, length, and whether it is one of the base.


def nothing_yet(how: Saving) -> Mapping[str, int]:
    """The `Fill` of a file that is written when it is published."""
    return {}


class Target:
    """Where a save goes, as one part sees it. A context manager: the block opens it, and what was not published when it ends is
    given up."""

    save = ""  # What the names of data files carry: the id of the save; nothing where the whole is published by a rename.
    splits = False  # Whether several parts may write one file, each some of its bytes.

    @property
    def join_name(self) -> str:
        """The name by which other parts find the target (`join_target`)."""
        return self.save

    def link(self, file: LinkedFile) -> bool:
        """Take over a file of the base, now or when it is published; whether by a second name, or where it is, and not by a
        copy."""
        return True

    def begin(self, file: FilePlan) -> Fill:
        """Give a file its place, now or when it is published."""
        return nothing_yet

    def keeps(self, file: FilePlan) -> bool:
        """Whether the part that publishes writes this file itself, be there others or not."""
        return False

    def share(self, file: FilePlan) -> None:
        """On the first part: make a file that several parts write."""
        raise NotImplementedError

    def fill_part(self, file: FilePlan, part: tuple[int, int], how: Saving) -> FileSums:
        """Write the blocks of a shared file that begin in this range of its bytes."""
        raise NotImplementedError

    def finish_shared(self, file: FilePlan, written: FileSums, how: Saving) -> None:
        """On the first part: write what depends on checksums, when `written` has what all parts wrote."""
        raise NotImplementedError

    def stream(self, key: str, nbytes: int, write: Callable[[Writer], None]) -> None:
        """Make a file of about so many bytes, which `write` gives from front to back."""
        raise NotImplementedError

    def free_names(self, prefix: str, suffix: str) -> Iterator[str]:
        """Names that no file of the save has."""
        raise NotImplementedError

    def adopt(self, key: str, path: str) -> None:
        """Give a file that was there before, at this path, a second name in the target."""
        raise NotImplementedError

    def written(self) -> Store:
        """Return a store over everything that was written and is not published yet."""
        raise NotImplementedError

    def check_opens(self, how: Saving) -> None:
        """On the first part: have what was written opened, if the save is checked."""
        if how.check_opens is not None:
            with closing(self.written()) as store:
                how.check_opens(store)

    def publish(
        self, index: Sequence[FilePlan], how: Saving, others: Iterable[Delivered] = ()
    ) -> None:
        """Make a checkpoint of what this part has, and of what `others` delivered. The last of the index files makes it one."""
        raise NotImplementedError

    def close(self) -> None:
        """Let go of what is open on this part, when all of its files are written."""

    def give_up(self) -> None:
        """Remove what this part may remove.

        On a part that joined the target, only for a save that is known not to be published. On the
        part that opened it, at any time: what was published, or may have been, stays.
        """

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.give_up()


def target_of(
    path: str, plan: SavePlan, *, overwrite: bool, durable: bool, names: Callable[[], BucketNames],
    replaceable: Callable[[str], bool], save: str = "", parts: int | None = None, resume: bool = False,
    parents: bool = False, files: Files | None = None, several: bool = False,
) -> Target:  # fmt: skip
    """Return the target of a save to a path or a URL, for the part that publishes it. A `with` block opens it.

    Raises `NotCommitted`, here or there, if there may be none.

    Args:
        path: The path or the URL.
        plan: The plan, of which the kind counts, and the names of the files.
        overwrite: Whether what is there may be replaced.
        durable: Whether to wait for the disk.
        names: In a bucket: what the names there mean.
        replaceable: On a disk: whether the file of a name in a folder may be removed.
        save: In a bucket: the id of a save of several parts.
        parts: In a bucket: how many parts of an upload are under way at once.
        resume: Whether finished files of an earlier try are taken over.
        parents: Whether folders are made that lead to it.
        files: The file system.
        several: Whether there are more parts than this.
    """
    if is_parsed_url(path):
        from holdfast.engine.targets.bucket import (
            CopyTarget,
            ObjectTarget,
            PrefixTarget,
        )  # for those who have a bucket

        if not plan.directory:
            return ObjectTarget(path, overwrite=overwrite, parts=parts)
        if plan.is_copy:
            return CopyTarget(
                path, plan, overwrite=overwrite, names=names(), parts=parts, several=several
            )
        return PrefixTarget(
            path,
            save,
            (*plan.files, *plan.index)[-1].key,
            overwrite=overwrite,
            names=names(),
            parts=parts,
        )
    from holdfast.engine.targets.folder import FileTarget, FolderTarget

    if not plan.directory:
        return FileTarget(path, durable=durable, overwrite=overwrite, files=files)
    resumed = plan if resume else None
    return FolderTarget(
        path,
        durable=durable,
        overwrite=overwrite,
        replaceable=replaceable,
        resumed=resumed,
        parents=parents,
        files=files,
    )


def join_target(
    name: str, path: str, *, durable: bool, plan: SavePlan | None = None, resume: bool = False
) -> Target:
    """On another part: the target that the first one has opened, by its `join_name`. `plan` and `resume` are as for `target_of`.
    Without a plan it is a folder, or a prefix, whose files are made up on the way."""
    if is_parsed_url(path):
        from holdfast.engine.targets.bucket import JoinedCopy, JoinedPrefix

        if plan is not None and not plan.directory:
            return Target()  # an object is one upload, and the first part's
        return (
            JoinedCopy(path, name)
            if plan is not None and plan.is_copy
            else JoinedPrefix(path, name)
        )
    from holdfast.engine.targets.folder import JoinedFile, JoinedFolder, JoinedStaging

    if plan is not None and not plan.directory:
        return JoinedFile(name, path=path, durable=durable)
    return (JoinedStaging if resume else JoinedFolder)(name, path=path, durable=durable)
