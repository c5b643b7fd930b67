"""Targets in an object store: one object, or objects below a prefix.

    ObjectTarget    one object. Its put, or the end of its upload, publishes it.
    PrefixTarget    a folder. Data objects have names with the id of the save, and the index, which
                    is put last with a condition, makes them a checkpoint.
    CopyTarget      a copy of a folder. Its names are those of the source, so other copies would
                    write the same ones. It holds the prefix by a claim.
    JoinedPrefix,   the same two on ranks that upload some of the objects
    JoinedCopy

Objects are written from front to back (`engine/stream`), as uploads of which several parts are sent
at once. Nothing goes to the disk of this machine, and an object takes the memory of a few parts.

**Several ranks.** Each rank uploads its own objects. Nobody finds them, since their names contain
the id of the save, or are hidden. Then the first rank puts the index.

**Who deletes what.** A rank deletes its objects if it fails before it has sent its receipt, or if
the first rank says that nothing was published. It does not if the first rank is lost: that one may
have published. The first rank deletes all objects with the id of the save, including those of ranks
that died. Everything else is left to the sweep of the run.

`bucket_commit` has the steps of the commit and what a crash leaves. `bucket_claims` protects
objects that several checkpoints share.
"""

from __future__ import annotations

import errno
import io
import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from itertools import count
from types import TracebackType
from typing import NamedTuple, Self

from holdfast.core.keys import parse_sibling_key
from holdfast.core.protocols import Store
from holdfast.core.value import Value
from holdfast.engine.commit.temporaries import make_temporary_name
from holdfast.engine.saves import FilePlan, LinkedFile, SavePlan
from holdfast.engine.stream import REMOTE_BLOCK_NBYTES, CountingWriter, Writer, write_stream
from holdfast.engine.targets.bucket_claims import (
    SharedObject,
    commit_with_claim,
    release_objects,
)
from holdfast.engine.targets.bucket_commit import (
    NO_SAVE_ID,
    ObjectSave,
    PrefixSave,
    make_save_id,
)
from holdfast.engine.targets.target import (
    DeliveredFile,
    SaveContext,
    Target,
    WriteFile,
    write_later,
)
from holdfast.engine.write import check_source, read_stored_crcs
from holdfast.errors import HoldfastError, NotCommitted, StoreError
from holdfast.stores.files import is_temporary
from holdfast.stores.memory import MemoryStore
from holdfast.stores.remote.client import Bucket, get_bucket
from holdfast.stores.remote.store import RemoteStore
from holdfast.stores.remote.url import MAX_COPY_NBYTES, Url
from holdfast.stores.virtual import Virtual, VirtualFile

MAX_SEARCHED_OBJECTS = 1 << 20
"""How many objects below a prefix are searched for those of a save that is given up."""


class ReplacedObjects(Value, frozen=True):
    """The objects of a checkpoint that another one replaces."""

    names: Sequence[str] = ()
    """Their names, with the index first."""
    find_named: Callable[[Collection[str]], Collection[str]] | None = None
    """Returns which of some keys the checkpoints beside this one name. None if they cannot name
    any: only checkpoints with content hashes share objects."""

    def remove(self, save: PrefixSave, keep: Collection[str] = ()) -> None:
        """Delete the objects that nobody needs after a save was published.

        What cannot be deleted is left to the sweep of the run.

        Args:
            save: The save.
            keep: Names that the new checkpoint has as well.
        """
        removable_names = [name for name in self.names if name not in keep]
        # Without the old index, nobody finds the other objects.
        old_index = self.names[:1]
        save.remove_replaced([name for name in removable_names if name in old_index])

        data_names = [name for name in removable_names if name not in old_index]
        if self.find_named is None:
            save.remove_replaced(data_names)
            return
        parent = save.url.parent
        keys = [_make_sibling_url(save.url, name).key for name in data_names]
        with suppress(HoldfastError):
            release_objects(parent, keys, self.find_named)


class BucketNames(Value, frozen=True):
    """The functions that classify object names. The engine knows no format, so callers pass them."""

    is_checkpoint: Callable[[str], bool] | None = None
    """Returns whether an object makes a checkpoint of a prefix, besides the index of the save."""
    is_written_late: Callable[[str], bool] = lambda name: False
    """Returns whether other programs read an object of this name. It is put when all data is there
    and all checks have passed."""
    is_weights: Callable[[str], bool] = lambda name: False
    """Returns whether readers look for an object of this name if there is no index."""
    find_replaced: Callable[[Url, Collection[str]], ReplacedObjects] = lambda url, names: (
        ReplacedObjects()
    )
    """Returns the objects of the checkpoint at a URL. Its second argument is the names there."""
    find_other_indexes: Callable[[Url, Collection[str]], Sequence[str]] = lambda url, names: ()
    """Returns the indexes of other formats that are deleted when the new index is put. Raises
    `NotCommitted` if they must stay."""
    stale_names: Sequence[str] = ()
    """Objects that describe an old index. They are deleted before the new one is put."""


def _make_sibling_url(url: Url, name: str) -> Url:
    """Return the URL of a file of the checkpoint at `url`, which may be in a sibling's folder."""
    folder, file_name = _split_sibling(url, name)
    return url.parent.below(f"{folder}/{file_name}" if folder else file_name)


def _split_sibling(url: Url, name: str) -> tuple[str, str]:
    """Return the folder beside or of a checkpoint, and the name in it, of one of its files."""
    return parse_sibling_key(name) or (url.key.rpartition("/")[2], name)


def _write_content(file: FilePlan, context: SaveContext, writer: Writer) -> dict[str, int]:
    """Write a file from front to back, and check that its source did not change.

    Returns:
        The CRC-32 of its data by label.
    """
    if context.progress:
        writer = CountingWriter(writer, context.progress)
    crcs = write_stream(
        file,
        writer,
        known_crcs=context.crcs,
        max_requests=context.threads,
        block_nbytes=context.block_nbytes or REMOTE_BLOCK_NBYTES,
    )
    context.crcs.update(crcs)
    check_source(file, context.crcs)
    return crcs


def _make_content(file: FilePlan, context: SaveContext) -> bytes:
    """Return the content of a small file."""
    buffer = io.BytesIO()
    _write_content(file, context, buffer)
    return buffer.getvalue()


def _put_object(
    file: FilePlan, save: PrefixSave, name: str, context: SaveContext
) -> Mapping[str, int]:
    """Upload a file as an object below the prefix, and read it back if wanted.

    Returns:
        The CRC-32 of its data by label.
    """
    crcs: dict[str, int] = {}

    def write(writer: Writer) -> None:
        crcs.update(_write_content(file, context, writer))

    save.write_object(name, file.nbytes, write)
    if context.read_back:
        _check_uploaded(file, save.url.below(name), context.crcs)
    return crcs


def _check_uploaded(file: FilePlan, url: Url, crcs: Mapping[str, int]) -> None:
    """Read an object back, and raise `NotCommitted` if a checksum differs."""
    store = RemoteStore(url)
    (key,) = store.list()
    for label, found_crc in read_stored_crcs(file, store, key).items():
        if found_crc != crcs[label]:
            message = "what was written does not read back the same; nothing was published"
            raise NotCommitted(
                message, file=store.name, tensor=label, expected=crcs[label], found=found_crc
            )


class ObjectTarget(Target):
    """A single object. The first rank writes all of it, when it is published."""

    def __init__(self, url: Url, *, overwrite: bool, parts_at_once: int | None) -> None:
        """Check what is at the URL. Raises `NotCommitted` if it may not be replaced."""
        self._save = ObjectSave(url, overwrite=overwrite, parts_at_once=parts_at_once)
        self._files: list[FilePlan] = []
        self._linked_files: list[LinkedFile] = []
        self._short_content: bytes | None = None
        """The content, if it is short enough to be checked before it is put."""
        self._save.check_existing()

    def link_file(self, file: LinkedFile) -> bool:
        """Note an object of a base. `publish` lets the store copy it."""
        self._linked_files.append(file)
        return True

    def prepare_file(self, file: FilePlan) -> WriteFile:
        """Note the file. `publish` uploads it, since the object is visible at once."""
        self._files.append(file)
        return write_later

    def needs_first_rank(self, file: FilePlan) -> bool:
        """Return True: an object is a single upload, which several ranks cannot share."""
        return True

    def publish(
        self,
        index: Sequence[FilePlan],
        context: SaveContext,
        delivered: Iterable[DeliveredFile] = (),
    ) -> None:
        """Copy or upload the object. The end of the copy or the upload publishes it.

        A crash before that leaves what was there, a crash after it the new object.
        """
        for linked_file in self._linked_files:
            context.before_publish()
            self._save.copy_object(Url(linked_file.folder).key)
        for file in self._files:
            check_content = None
            if context.check_opens is not None:
                check_content = partial(self._check_content, context)
            self._save.write(
                file.nbytes,
                partial(_write_content, file, context),
                context.before_publish,
                check_content=check_content,
                check_object=partial(self._check_object, file, context),
            )

    def _check_content(self, context: SaveContext, content: bytes) -> None:
        """Have a reader open a short object before it is put."""
        self._short_content = content
        self.check_opens(context)

    def _check_object(self, file: FilePlan, context: SaveContext) -> None:
        """Check the published object: its data, and whether a long one opens."""
        if context.read_back:
            _check_uploaded(file, self._save.url, context.crcs)
        if self._short_content is None:
            self.check_opens(context)

    def open_unpublished(self) -> Store:
        """Return a store of the content in memory, or of the published object if it is long."""
        url = self._save.url
        if self._short_content is None:
            return RemoteStore(url)
        return MemoryStore({url.key.rpartition("/")[2]: self._short_content}, name=url)


class JoinedPrefix(Target):
    """Objects below a prefix, on a rank that uploads some of them."""

    def __init__(
        self,
        url: Url,
        save_id: str,
        index: str = "",
        *,
        overwrite: bool = False,
        parts_at_once: int | None = None,
    ) -> None:
        """Prepare the target. Only the first rank needs the arguments after the id.

        Args:
            url: The prefix.
            save_id: The id of the save.
            index: The name of the index.
            overwrite: Whether an existing checkpoint may be replaced.
            parts_at_once: How many parts of an upload are sent at once.
        """
        self.url = url
        self.save_id = save_id
        self._save = PrefixSave(url, index, overwrite=overwrite, parts_at_once=parts_at_once)

    def link_file(self, file: LinkedFile) -> bool:
        """Do nothing: the manifest names the object where it is, in the folder of the base."""
        return True

    def prepare_file(self, file: FilePlan) -> WriteFile:
        """Return the function that uploads the file under its own name."""
        return partial(_put_object, file, self._save, file.key)

    def stream_file(self, key: str, nbytes: int, write: Callable[[Writer], None]) -> None:
        """Upload an object whose content `write` produces from front to back."""
        self._save.write_object(key, nbytes, write)

    def generate_free_names(self, prefix: str, suffix: str) -> Iterator[str]:
        """Yield names with the id of the save, which no other save or rank uses."""
        # All ranks share the id of the save, so each adds a random id of its own.
        rank_id = make_save_id()
        for file_index in count():
            yield f"{prefix}{file_index}-{self.save_id}-{rank_id}{suffix}"

    def give_up(self) -> None:
        """Abort: delete the objects that this rank has uploaded. Errors are ignored."""
        self._save.give_up()


class PrefixTarget(JoinedPrefix):
    """Objects below a prefix, on the rank that publishes them."""

    def __init__(
        self,
        url: Url,
        save_id: str,
        index: str,
        *,
        overwrite: bool,
        names: BucketNames,
        parts_at_once: int | None,
    ) -> None:
        """Check what is at the prefix. Raises `NotCommitted` if it may not be replaced.

        Args:
            url: The prefix.
            save_id: The id of the save.
            index: The name of the index, whose put publishes the save.
            overwrite: Whether an existing checkpoint may be replaced.
            names: The functions that classify object names.
            parts_at_once: How many parts of an upload are sent at once.
        """
        super().__init__(url, save_id, index, overwrite=overwrite, parts_at_once=parts_at_once)
        self._names = names
        self._has_ended = False
        """Whether the save was published or given up."""
        self._data_files: dict[str, DeliveredFile] = {}
        """All files but the index, by their keys."""
        self._late_files: list[FilePlan] = []
        self._index: FilePlan | None = None
        self._index_content = b""
        self._save.check_existing(names.is_checkpoint)
        existing_names = self._save.existing_names
        self._other_indexes = names.find_other_indexes(url, existing_names)
        self._replaced = ReplacedObjects()
        if overwrite and existing_names:
            self._replaced = names.find_replaced(url, existing_names)

    def link_file(self, file: LinkedFile) -> bool:
        """Note an object of the base, which the manifest names where it is."""
        self._data_files[file.key] = DeliveredFile(file.key, file.nbytes, is_linked=True)
        return True

    def needs_first_rank(self, file: FilePlan) -> bool:
        """Return whether a file is the index, or one that is put right before it."""
        return file.key == self._save.index or self._names.is_written_late(file.key)

    def prepare_file(self, file: FilePlan) -> WriteFile:
        """Return the function that uploads a file. Files that readers find wait for `publish`."""
        if file.key == self._save.index:
            self._index = file
            return write_later
        self._data_files[file.key] = DeliveredFile(file.key, file.nbytes, is_linked=False)
        if self._names.is_written_late(file.key):
            self._late_files.append(file)
            return write_later
        return super().prepare_file(file)

    def publish(
        self,
        index: Sequence[FilePlan],
        context: SaveContext,
        delivered: Iterable[DeliveredFile] = (),
    ) -> None:
        """Put what readers know by name, and then the index. Delete what it replaced.

        A crash before the put of the index leaves the old checkpoint, and objects that the sweep of
        the run deletes. A crash after it leaves the new one, and perhaps old objects.
        """
        save = self._save
        for file in index:
            self.prepare_file(file)(context)
        assert self._index is not None  # the target was opened for a plan that has one
        self._data_files.update({file.key: file for file in delivered})
        self._index_content = _make_content(self._index, context)
        self.check_opens(context)
        context.before_publish()

        # From here on, readers may find objects of this save by their names.
        for file in self._late_files:
            _put_object(file, save, file.key, context)
        stale_names = save.existing_names.intersection(self._names.stale_names)
        save.remove_replaced(sorted(stale_names))
        shared_objects: list[SharedObject] = []
        for data_file in self._data_files.values():
            if data_file.is_linked:
                folder, name = _split_sibling(self.url, data_file.key)
                shared_objects.append(SharedObject(folder, name, data_file.nbytes))
        commit_with_claim(
            save,
            shared_objects,
            lambda: save.commit(self._index_content, context.attributes),
        )

        # The save is published. Whatever fails now leaves old objects to the sweep of the run.
        self._has_ended = True
        save.remove_replaced(self._other_indexes)
        own_keys = {file.key for file in (*self._late_files, self._index)}
        self._replaced.remove(save, keep=own_keys)

    def open_unpublished(self) -> Store:
        """Return a store of the uploaded objects, and of the index, which is in memory so far."""
        store = Virtual(self.url)
        bucket = get_bucket(self.url)
        for data_file in self._data_files.values():
            object_key = _make_sibling_url(self.url, data_file.key).key
            read = partial(_read_uploaded, bucket, object_key)
            store.put(VirtualFile(data_file.nbytes, read), data_file.key)

        content = memoryview(self._index_content)

        def read_index(start: int, out: memoryview) -> None:
            out[:] = content[start : start + out.nbytes]

        store.put(VirtualFile(content.nbytes, read_index), self._save.index)
        return store

    def give_up(self) -> None:
        """Abort the save: delete all of its objects, including those of ranks that died.

        Does nothing if the save has ended, or if it may have been published. Errors are ignored:
        objects that stay are left to the sweep of the run.
        """
        if self._has_ended or not self._save.is_known_unpublished:
            return
        self._has_ended = True
        super().give_up()
        if not self.save_id:
            # No name shows what ranks that died have uploaded.
            return
        prefix = f"{self.url.key}/" if self.url.key else ""
        with suppress(HoldfastError):
            bucket = get_bucket(self.url)
            entries = bucket.list_objects(prefix, MAX_SEARCHED_OBJECTS)
            # The prefix itself may contain the id, so only the name below it counts.
            names = [entry.key.removeprefix(prefix) for entry in entries]
            bucket.delete([f"{prefix}{name}" for name in names if self.save_id in name])


class JoinedCopy(Target):
    """A copy of a checkpoint below a prefix, on a rank that uploads some of the objects."""

    def __init__(self, save: PrefixSave) -> None:
        """Prepare the target of a save below a prefix. No request is sent yet."""
        self._save = save
        self._hidden_names: dict[str, str] = {}
        """The names under which some files are uploaded first, by their own names."""

    @classmethod
    def from_join_name(cls, url: Url, join_name: str) -> JoinedCopy:
        """Return the target that the first rank has opened.

        Args:
            url: The prefix.
            join_name: The `join_name` of the target on the first rank.
        """
        # This rank only uploads. The first rank knows the index and what may be replaced.
        target = cls(PrefixSave(url, "", overwrite=False))
        target._hidden_names = json.loads(join_name)
        return target

    @property
    def join_name(self) -> str:
        """The hidden names as JSON. They are random, so the other ranks need those of the first."""
        return json.dumps(self._hidden_names)

    def prepare_file(self, file: FilePlan) -> WriteFile:
        """Return the function that uploads a file, under its hidden name if it has one."""
        name = self._hidden_names.get(file.key, file.key)
        return partial(_put_object, file, self._save, name)

    def give_up(self) -> None:
        """Abort: delete the objects that this rank has uploaded. Errors are ignored."""
        self._save.give_up()


class UploadOrder(NamedTuple):
    """How the files of a copy get their names. All others are uploaded under their own names."""

    hidden_names: dict[str, str]
    """Files that are uploaded under a hidden name first, with that name."""
    overwriting_files: list[FilePlan]
    """Files that replace an object, and are too long for a hidden name."""
    last_files: list[FilePlan]
    """New files that readers would find before the copy is complete."""


def _plan_uploads(
    plan: SavePlan,
    existing_names: Collection[str],
    is_weights: Callable[[str], bool],
    *,
    has_other_ranks: bool,
) -> UploadOrder:
    """Decide for each file of a copy when it gets its name.

    Args:
        plan: The copy.
        existing_names: The names at the prefix.
        is_weights: Returns whether readers look for an object of this name if there is no index.
        has_other_ranks: Whether other ranks upload some of the objects. They cannot upload last.
    """
    # Readers of the old checkpoint still need the objects of these names.
    replacing_files = [file for file in plan.files if file.key in existing_names]
    visible_files: list[FilePlan] = []
    if not plan.index:
        for file in plan.files:
            if is_weights(file.key) and file.key not in existing_names:
                visible_files.append(file)

    hidden_names = _choose_hidden_names(replacing_files)
    if has_other_ranks:
        hidden_names |= _choose_hidden_names(visible_files)
    return UploadOrder(
        hidden_names,
        overwriting_files=[file for file in replacing_files if file.key not in hidden_names],
        last_files=[file for file in visible_files if file.key not in hidden_names],
    )


class CopyTarget(JoinedCopy):
    """A copy of a checkpoint below a prefix, on the rank that publishes it.

    Two copies would write the same names, so one of them claims the prefix. If the copy replaces a
    checkpoint with the same names, there is a mixture of both for a while. So the old index is
    withdrawn first, but not before all data is in the bucket: objects whose names exist are
    uploaded under hidden names, and the store copies them at the end. A failure before that leaves
    the old checkpoint as it was.

    Readers find weights without an index as soon as they are there. So these are put last, or, if
    several ranks upload them, under hidden names as well.
    """

    def __init__(
        self,
        url: Url,
        plan: SavePlan,
        *,
        overwrite: bool,
        names: BucketNames,
        parts_at_once: int | None,
        has_other_ranks: bool,
    ) -> None:
        """Prepare the target. The `with` block sends the first request.

        Args:
            url: The prefix.
            plan: The copy.
            overwrite: Whether an existing checkpoint may be replaced.
            names: The functions that classify object names.
            parts_at_once: How many parts of an upload are sent at once.
            has_other_ranks: Whether other ranks upload some of the objects.
        """
        index_name = plan.index[0].key if plan.index else ""
        super().__init__(
            PrefixSave(url, index_name, overwrite=overwrite, parts_at_once=parts_at_once)
        )
        self._plan = plan
        self._overwrite = overwrite
        self._names = names
        self._has_other_ranks = has_other_ranks
        self._files: list[FilePlan] = []
        self._linked_files: list[LinkedFile] = []
        self._overwriting_files: list[FilePlan] = []
        self._last_files: list[FilePlan] = []
        self._replaced = ReplacedObjects()
        self._claim_stack = ExitStack()

    def __enter__(self) -> Self:
        """Claim the prefix, and check what is there.

        Raises:
            NotCommitted: What is there may not be replaced, or another copy holds the prefix.
        """
        save = self._save
        if not self._overwrite:
            # A copy that is refused writes nothing, not even a claim.
            save.check_existing(self._names.is_checkpoint)
        with ExitStack() as stack:
            stack.enter_context(save.exclusive_place())
            # Another copy may have ended since the first check. Only what is listed while this copy
            # has the claim cannot change any more.
            save.check_existing(self._names.is_checkpoint)
            existing_names = save.existing_names
            order = _plan_uploads(
                self._plan,
                existing_names,
                self._names.is_weights,
                has_other_ranks=self._has_other_ranks,
            )
            self._hidden_names = order.hidden_names
            self._overwriting_files = order.overwriting_files
            self._last_files = order.last_files
            if self._overwrite and existing_names:
                self._replaced = self._names.find_replaced(save.url, existing_names)
            # Other ranks upload some of these. If they die, this rank deletes their objects.
            save.add_new_names(
                [self._hidden_names.get(file.key, file.key) for file in self._plan.files]
            )
            # Any error above has released the claim. From here on, `__exit__` does.
            self._claim_stack = stack.pop_all()
        return self

    def needs_first_rank(self, file: FilePlan) -> bool:
        """Return whether a file is put by `publish`, because readers find it under its name."""
        late_files = (*self._overwriting_files, *self._last_files)
        return any(file.key == late_file.key for late_file in late_files)

    def link_file(self, file: LinkedFile) -> bool:
        """Note an object of the source in the same bucket. `publish` lets the store copy it."""
        self._linked_files.append(file)
        return True

    def prepare_file(self, file: FilePlan) -> WriteFile:
        """Return the function that uploads a file now, or does nothing if `publish` puts it."""
        self._files.append(file)
        if self.needs_first_rank(file):
            return write_later
        return super().prepare_file(file)

    def publish(
        self,
        index: Sequence[FilePlan],
        context: SaveContext,
        delivered: Iterable[DeliveredFile] = (),
    ) -> None:
        """Withdraw the old index, give all objects their names, and put the new index.

        A crash before the old index is withdrawn leaves the old checkpoint. A crash after it leaves
        no checkpoint until the copy is repeated, since its names are a mixture. The claim stays in
        both cases.
        """
        save = self._save
        for file in self._last_files:
            _put_object(file, save, file.key, context)
        context.before_publish()

        own_names = {file.key for file in (*self._files, *index)}
        own_names.update(file.key for file in self._linked_files)
        own_names.update(file.key for file in delivered)
        old_names = self._replaced.names
        # A new index replaces an old one of the same name by itself.
        mixed_names = old_names[1:] if index else old_names
        if own_names.intersection(mixed_names):
            save.withdraw_index(old_names[0])

        for file in self._overwriting_files:
            _put_object(file, save, file.key, context)
        for linked_file in self._linked_files:
            save.copy_object(linked_file.key, f"{Url(linked_file.folder).key}/{linked_file.key}")
        for name, hidden_name in self._hidden_names.items():
            save.copy_object(name, save.url.below(hidden_name).key)
        # Hidden names of copies that were cut off go as well: this copy has the place alone.
        abandoned_names: list[str] = []
        for name in save.existing_names:
            if is_temporary(name) and NO_SAVE_ID not in name:
                abandoned_names.append(name)
        save.remove_hidden([*self._hidden_names.values(), *abandoned_names])

        if self._overwriting_files:
            # These uploads took long, and the source may have changed.
            context.before_publish()
        for file in index:
            save.commit(_make_content(file, context))
        save.is_known_unpublished = False
        self._replaced.remove(save, keep=own_names)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Give up what was not published, and then release the claim."""
        super().__exit__(kind, error, trace)
        self._claim_stack.__exit__(kind, error, trace)


def _choose_hidden_names(files: Iterable[FilePlan]) -> dict[str, str]:
    """Return hidden names for files that the store can copy to their own names later."""
    hidden_names: dict[str, str] = {}
    for file in files:
        # One request copies at most this much, so longer files get no hidden name.
        if file.nbytes <= MAX_COPY_NBYTES:
            folder, slash, name = file.key.rpartition("/")
            hidden_names[file.key] = f"{folder}{slash}{make_temporary_name(name)}"
    return hidden_names


def _read_uploaded(bucket: Bucket, key: str, start: int, out: memoryview) -> None:
    """Read bytes of an object that a rank has uploaded."""
    try:
        content = bucket.get_range(key, start, start + out.nbytes)
    except StoreError as error:
        if error.errno == errno.ENOENT:
            message = "an object that a rank has uploaded is not there"
            raise StoreError(message, file=bucket.url(key)) from None
        raise
    out[:] = content.data
