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
from typing import TYPE_CHECKING, NamedTuple, Self

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


class SaveContext(Value, frozen=True, kw_only=True):
    crcs: dict[str, int] = field(
        default_factory=dict
    )  # Of all data that was written before, by label. Each file adds its own.
    threads: int | None = None
    block_nbytes: int | None = None
    progress: Progress | None = None
    read_back: bool = False
    check_opens: Callable[[Store], None] | None = None
    """Opens what was written before it is published; its errors keep what was there. None if the
    save is not checked."""
    before_publish: Callable[[], None] = lambda: (
        None
    )  # Asked when everything is written: what it raises keeps what was there.
    before_rename: Callable[[], None] = lambda: None
    """Called right before a rename replaces what is there; its errors keep that as it was. `last`
    comes too early for this: the fsync of the new file lies between it and the rename."""
    attributes: Mapping[str, str] | None = None  # What the object of the index says of itself.


WriteFile = Callable[[SaveContext], Mapping[str, int]]
"""Writes a file that has its place, now or when it is published; the CRC-32 of each piece of data by its label, if now."""


class DeliveredFile(NamedTuple):
    key: str
    nbytes: int
    is_linked: bool


def write_later(how: SaveContext) -> Mapping[str, int]:
    """The `WriteFile` of a file that is written when it is published."""
    return {}


class Target:
    """Where a save goes, as one part sees it. A context manager: the block opens it, and what was not published when it ends is
    given up."""

    save_id = ""  # What the names of data files carry: the id of the save; nothing where the whole is published by a rename.
    can_split_files = False  # Whether several parts may write one file, each some of its bytes.

    @property
    def join_name(self) -> str:
        """The name by which other parts find the target (`join_target`)."""
        return self.save_id

    def link_file(self, file: LinkedFile) -> bool:
        """Take over a file of the base, now or when it is published; whether by a second name, or where it is, and not by a
        copy."""
        return True

    def prepare_file(self, file: FilePlan) -> WriteFile:
        """Give a file its place, now or when it is published."""
        return write_later

    def needs_first_rank(self, file: FilePlan) -> bool:
        """Whether the part that publishes writes this file itself, be there others or not."""
        return False

    def create_shared_file(self, file: FilePlan) -> None:
        """On the first part: make a file that several parts write."""
        raise NotImplementedError

    def write_range_of(self, file: FilePlan, part: tuple[int, int], how: SaveContext) -> FileSums:
        """Write the blocks of a shared file that begin in this range of its bytes."""
        raise NotImplementedError

    def finish_shared_file(self, file: FilePlan, written: FileSums, how: SaveContext) -> None:
        """On the first part: write what depends on checksums, when `written` has what all parts wrote."""
        raise NotImplementedError

    def stream_file(self, key: str, nbytes: int, write: Callable[[Writer], None]) -> None:
        """Make a file of about so many bytes, which `write` gives from front to back."""
        raise NotImplementedError

    def generate_free_names(self, prefix: str, suffix: str) -> Iterator[str]:
        """Names that no file of the save has."""
        raise NotImplementedError

    def link_existing(self, key: str, path: str) -> None:
        """Give a file that was there before, at this path, a second name in the target."""
        raise NotImplementedError

    def open_unpublished(self) -> Store:
        """Return a store over everything that was written and is not published yet."""
        raise NotImplementedError

    def check_opens(self, how: SaveContext) -> None:
        """On the first part: have what was written opened, if the save is checked."""
        if how.check_opens is not None:
            with closing(self.open_unpublished()) as store:
                how.check_opens(store)

    def publish(
        self, index: Sequence[FilePlan], how: SaveContext, others: Iterable[DeliveredFile] = ()
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


def make_target(
    path: str, plan: SavePlan, *, overwrite: bool, durable: bool, bucket_names: Callable[[], BucketNames],
    is_replaceable: Callable[[str], bool], save_id: str = "", upload_parts: int | None = None, resume: bool = False,
    makes_parents: bool = False, files: Files | None = None, has_other_ranks: bool = False,
) -> Target:  # fmt: skip
    """Return the target of a save to a path or a URL, for the part that publishes it. A `with` block opens it.

    Raises `NotCommitted`, here or there, if there may be none.

    Args:
        path: The path or the URL.
        plan: The plan, of which the kind counts, and the names of the files.
        overwrite: Whether what is there may be replaced.
        durable: Whether to wait for the disk.
        names: In a bucket: what the names there mean.
        is_replaceable: On a disk: whether the file of a name in a folder may be removed.
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
            return ObjectTarget(path, overwrite=overwrite, parts=upload_parts)
        if plan.is_copy:
            return CopyTarget(
                path,
                plan,
                overwrite=overwrite,
                names=bucket_names(),
                parts=upload_parts,
                several=has_other_ranks,
            )
        return PrefixTarget(
            path,
            save_id,
            (*plan.files, *plan.index)[-1].key,
            overwrite=overwrite,
            names=bucket_names(),
            parts=upload_parts,
        )
    from holdfast.engine.targets.folder import FileTarget, FolderTarget

    if not plan.directory:
        return FileTarget(path, durable=durable, overwrite=overwrite, files=files)
    resumed = plan if resume else None
    return FolderTarget(
        path,
        durable=durable,
        overwrite=overwrite,
        is_replaceable=is_replaceable,
        resumed=resumed,
        parents=makes_parents,
        files=files,
    )


def join_target(
    name: str, path: str, *, durable: bool, plan: SavePlan | None = None, resume: bool = False
) -> Target:
    """On another part: the target that the first one has opened, by its `join_name`. `plan` and `resume` are as for `make_target`.
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
