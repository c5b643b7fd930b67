"""Where a save goes until it is published: a `Target`. Readers find nothing of it before that.

Every kind of target has the same life:

    open        the first rank makes a hidden place               (`make_target`, `with`)
    join        other ranks find it by its `join_name`            (`join_target`)
    write       each rank prepares and writes files               (`prepare_file`, `write_range_of`)
    publish     the first rank makes all of it a checkpoint       (`publish`)
    give up     what was not published is removed                 (the end of the `with` block)

A process that is alone is the first rank, and nobody joins. The kinds differ in this:

                    files and folders (`folder`)          objects in a bucket (`bucket`)
    hidden by       a hidden name beside the target       names with the id of the save
    join_name       the path of the hidden place          the id of the save
    published by    one rename                            one put with a condition
    one file by     several ranks, each at its offsets    one rank
    given up by     the first rank                        every rank for its own objects, and the
                                                          first rank for all of them

If the first rank dies before it publishes, a hidden file or folder is left to the next save, and
hidden objects to the sweep of a run.
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
    """How the files of a save are written, and what all of them share."""

    crcs: dict[str, int] = field(default_factory=dict)
    """The CRC-32 of all data that was written so far, by label. Each file adds its own."""
    threads: int | None = None
    """How many threads write. None for the default."""
    block_nbytes: int | None = None
    """How much a thread writes at a time. None for the default."""
    progress: Progress | None = None
    read_back: bool = False
    """Whether to read every file again and to compare its checksums."""
    check_opens: Callable[[Store], None] | None = None
    """Opens what was written, before it is published. Its errors stop the save. None if the save is
    not checked."""
    before_publish: Callable[[], None] = lambda: None
    """Called when everything is written. Its errors stop the save."""
    before_rename: Callable[[], None] = lambda: None
    """Called right before a rename replaces anything. Its errors stop the save. Between
    `before_publish` and this lies the fsync of the new file."""
    attributes: Mapping[str, str] | None = None
    """In a bucket: the attributes of the index object."""


WriteFile = Callable[[SaveContext], Mapping[str, int]]
"""Writes a file that was prepared, and returns the CRC-32 of each piece of data by its label. It
returns nothing if the file is written later, by `publish`."""


class DeliveredFile(NamedTuple):
    """A file that another rank has written into the target."""

    key: str
    nbytes: int
    is_linked: bool
    """Whether it was taken over from the base."""


def write_later(context: SaveContext) -> Mapping[str, int]:
    """The `WriteFile` of a file that `publish` writes."""
    return {}


class Target:
    """Where a save goes, as one rank sees it.

    A context manager: the block opens the target on the first rank, and gives up what was not
    published when it ends. A rank that joined the target calls `close` and `give_up` itself.
    """

    save_id = ""
    """The id of the save, which the names of its data files contain. Empty if a rename publishes
    the whole save."""
    can_split_files = False
    """Whether several ranks may write one file, each a range of its bytes."""

    @property
    def join_name(self) -> str:
        """The name by which other ranks find this target (`join_target`)."""
        return self.save_id

    def link_file(self, file: LinkedFile) -> bool:
        """Take over a file of the base.

        Returns:
            Whether the file is shared with the base. Otherwise it had to be copied.
        """
        return True

    def prepare_file(self, file: FilePlan) -> WriteFile:
        """Create a file, and return the function that writes it."""
        return write_later

    def needs_first_rank(self, file: FilePlan) -> bool:
        """Return whether only the first rank can write this file."""
        return False

    def create_shared_file(self, file: FilePlan) -> None:
        """On the first rank: create a file that several ranks write."""
        raise NotImplementedError

    def write_range_of(
        self, file: FilePlan, byte_range: tuple[int, int], context: SaveContext
    ) -> FileSums:
        """Write the blocks of a shared file that start in a range of its bytes."""
        raise NotImplementedError

    def finish_shared_file(self, file: FilePlan, sums: FileSums, context: SaveContext) -> None:
        """On the first rank: write what depends on checksums into a shared file.

        Args:
            file: The file.
            sums: The checksums of what all ranks wrote of it.
            context: How files are written.
        """
        raise NotImplementedError

    def stream_file(self, key: str, nbytes: int, write: Callable[[Writer], None]) -> None:
        """Write a file from front to back.

        Args:
            key: Its name.
            nbytes: About how long it will be.
            write: Writes the content.
        """
        raise NotImplementedError

    def generate_free_names(self, prefix: str, suffix: str) -> Iterator[str]:
        """Yield names that no file of the save has."""
        raise NotImplementedError

    def link_existing(self, key: str, path: str) -> None:
        """On the first rank: give an existing file a second name in the target."""
        raise NotImplementedError

    def open_unpublished(self) -> Store:
        """Return a store of everything that was written and is not published yet."""
        raise NotImplementedError

    def check_opens(self, context: SaveContext) -> None:
        """On the first rank: have a reader open what was written, if the save is checked."""
        if context.check_opens is not None:
            with closing(self.open_unpublished()) as store:
                context.check_opens(store)

    def publish(
        self,
        index: Sequence[FilePlan],
        context: SaveContext,
        delivered: Iterable[DeliveredFile] = (),
    ) -> None:
        """On the first rank: make all files a checkpoint, in one visible step.

        Args:
            index: The index files, which are written last. The last one makes it a checkpoint.
            context: How files are written, and what is checked before the visible step.
            delivered: The files that other ranks have written.

        Raises:
            NotCommitted: Readers find what was there before.
            DurabilityUncertain: The new checkpoint may be visible, but that is not certain to last.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Close what this rank has open, after all of its files are written."""

    def give_up(self) -> None:
        """Abort the save: remove what this rank may remove.

        Does nothing if the save has ended. A rank that joined the target may call this only if it
        knows that the save is not published. The first rank may call it at any time: what was, or
        may have been, published stays.
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


class DiskOptions(Value, frozen=True, kw_only=True):
    """Options of a target on a file system."""

    durable: bool
    """Whether to wait for the disk."""
    is_replaceable: Callable[[str], bool]
    """Returns whether a file of this name in a folder may be removed."""
    resume: bool = False
    """Whether to take over finished files of an interrupted save."""
    makes_parents: bool = False
    """Whether to create missing folders above a folder."""
    files: Files | None = None
    """The file system. Tests pass another one."""


class BucketOptions(Value, frozen=True, kw_only=True):
    """Options of a target in an object store."""

    load_names: Callable[[], BucketNames]
    """Returns the functions that classify object names. Called only for a bucket, because their
    module takes time to import."""
    save_id: str = ""
    """The id of the save. Data files of several ranks need one."""
    parts_at_once: int | None = None
    """How many parts of an upload are sent at once. None for the default."""
    has_other_ranks: bool = False
    """Whether other ranks will join."""


def make_target(
    path: str, plan: SavePlan, *, overwrite: bool, disk: DiskOptions, bucket: BucketOptions
) -> Target:
    """Return the target of a save to a path or a URL, for the first rank. A `with` block opens it.

    Args:
        path: The path or the URL.
        plan: What is saved. Only its kind and the names of its files matter here.
        overwrite: Whether an existing checkpoint may be replaced.
        disk: The options that count if `path` is a path.
        bucket: The options that count if `path` is a URL.

    Raises:
        NotCommitted: There may be no save to this place. The `with` block can raise it, too.
    """
    # True for a `Url`, which is a path that was parsed as the URL of an object store.
    if is_parsed_url(path):
        # Only users of a bucket pay for its imports.
        from holdfast.engine.targets.bucket import CopyTarget, ObjectTarget, PrefixTarget

        if not plan.directory:
            return ObjectTarget(path, overwrite=overwrite, parts_at_once=bucket.parts_at_once)
        if plan.is_copy:
            return CopyTarget(
                path,
                plan,
                overwrite=overwrite,
                names=bucket.load_names(),
                parts_at_once=bucket.parts_at_once,
                has_other_ranks=bucket.has_other_ranks,
            )
        # The file that is written last makes the others a checkpoint. Some formats have no separate
        # index, and the last data file takes its place.
        published_last = (*plan.files, *plan.index)[-1]
        return PrefixTarget(
            path,
            bucket.save_id,
            published_last.key,
            overwrite=overwrite,
            names=bucket.load_names(),
            parts_at_once=bucket.parts_at_once,
        )

    from holdfast.engine.targets.folder import FileTarget, FolderTarget

    if not plan.directory:
        return FileTarget(path, durable=disk.durable, overwrite=overwrite, files=disk.files)
    return FolderTarget(
        path,
        durable=disk.durable,
        overwrite=overwrite,
        is_replaceable=disk.is_replaceable,
        resumed_plan=plan if disk.resume else None,
        makes_parents=disk.makes_parents,
        files=disk.files,
    )


def join_target(
    name: str, path: str, *, durable: bool, plan: SavePlan | None = None, resume: bool = False
) -> Target:
    """Return the target that the first rank has opened, on another rank.

    Args:
        name: The `join_name` of the target on the first rank.
        path: The path or the URL of the save.
        durable: Whether to wait for the disk.
        plan: What is saved. None if the ranks make up the files of a folder on the way.
        resume: On a disk: whether finished files of an interrupted save are taken over.
    """
    is_single_file = plan is not None and not plan.directory
    if is_parsed_url(path):
        from holdfast.engine.targets.bucket import JoinedCopy, JoinedPrefix

        if is_single_file:
            # An object is a single upload by the first rank. This rank writes nothing.
            return Target()
        if plan is not None and plan.is_copy:
            return JoinedCopy.from_join_name(path, name)
        return JoinedPrefix(path, name)

    from holdfast.engine.targets.folder import JoinedFile, JoinedFolder, JoinedResumeFolder

    if is_single_file:
        return JoinedFile(name, path=path, durable=durable)
    if resume:
        return JoinedResumeFolder(name, path=path, durable=durable)
    return JoinedFolder(name, path=path, durable=durable)
