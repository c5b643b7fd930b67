"""Objects of an object store: one, or several below a prefix, of which the last makes the others a checkpoint.

Objects are written from front to back (engine/stream), in parts of which several are under way. Nothing is written to the disk of
this machine, and memory stays at a few parts an object.

**Several parts.** Every part uploads its own objects, whose names carry the id of the save. So nobody finds them, and another save
to the same place writes other names. The first part puts the index, with a condition.

**Who removes what.** A part removes its objects where it fails before its receipt is out, and where the first one has said that
nothing was published. It does not where the first one is lost: that one may have published. The first part removes all objects that
carry the id, also those of parts that died. The rest is left to the sweep of the run.
"""

from __future__ import annotations

import errno
import io
import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from types import TracebackType

from holdfast.core.keys import parse_sibling_key
from holdfast.core.protocols import Store
from holdfast.core.value import Value
from holdfast.engine.commit.temporaries import make_temporary_name
from holdfast.engine.saves import FilePlan, LinkedFile, SavePlan
from holdfast.engine.stream import REMOTE_BLOCK_NBYTES, CountingWriter, Writer, write_stream
from holdfast.engine.targets.bucket_claims import commit_with_claim, release_objects
from holdfast.engine.targets.bucket_commit import NOBODY, ObjectSave, PrefixSave, make_save_id
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

MOST = 1 << 20  # Objects below a prefix that are looked through for those of a save.


class ReplacedObjects(Value, frozen=True):
    """The objects of a checkpoint that another takes the place of."""

    names: Sequence[str] = ()
    """Its index first."""
    named: Callable[[Collection[str]], Collection[str]] | None = None
    """Which of these keys checkpoints beside it name; None where none can: those that have hashes may be a base."""

    def remove(self, save: PrefixSave, keep: Collection[str] = ()) -> None:
        """Delete what nobody needs now. What cannot be deleted is left to the sweep of the run."""
        save.remove(
            [name for name in self.names[:1] if name not in keep]
        )  # another index, without which nobody finds the rest
        rest = [name for name in self.names[1:] if name not in keep]
        if self.named is None:
            save.remove(rest)
            return
        with suppress(HoldfastError):
            parent, own = save.url.parent, save.url.key.rpartition("/")[2]
            release_objects(
                parent,
                [
                    parent.below("/".join(parse_sibling_key(name) or (own, name))).key
                    for name in rest
                ],
                self.named,
            )


class BucketNames(Value, frozen=True):
    """What names of objects mean to the formats."""

    is_checkpoint: Callable[[str], bool] | None = None
    """Whether an object makes a checkpoint of a prefix, beside the index itself."""
    is_written_late: Callable[[str], bool] = lambda name: False
    """Whether others have this name for something: it is put when all else is there, and nothing is known against it."""
    is_weights: Callable[[str], bool] = lambda name: False
    """Whether it is what others look for where there is no index."""
    find_replaced: Callable[[Url, Collection[str]], ReplacedObjects] = lambda url, there: (
        ReplacedObjects()
    )
    """The objects of the checkpoint at a URL, of the names that are there."""
    find_other_indexes: Callable[[Url, Collection[str]], Sequence[str]] = lambda url, there: ()
    """Other indexes, of the names that are there, which go when this one is put. Raises where they may not, or cannot, go."""
    stale_names: Sequence[str] = ()
    """What would speak of another index; it goes before the index is put."""


def _pass(file: FilePlan, how: SaveContext, target: Writer) -> dict[str, int]:
    """Write the content of an object, sure of what was read."""
    crcs = write_stream(
        file,
        CountingWriter(target, how.progress) if how.progress else target,
        known_crcs=how.crcs,
        max_requests=how.threads,
        block_nbytes=how.block_nbytes or REMOTE_BLOCK_NBYTES,
    )
    how.crcs.update(crcs)
    check_source(file, how.crcs)
    return crcs


def _text(file: FilePlan, how: SaveContext) -> bytes:
    text = io.BytesIO()
    _pass(file, how, text)
    return text.getvalue()


def _put(file: FilePlan, how: SaveContext, save: PrefixSave, name: str) -> dict[str, int]:
    """Put an object under a name; its own checksums."""
    found: dict[str, int] = {}
    save.write(name, file.nbytes, lambda target: found.update(_pass(file, how, target)))
    if how.read_back:
        _check_uploaded(file, save.url.below(name), how.crcs)
    return found


class ObjectTarget(Target):
    def __init__(self, url: Url, *, overwrite: bool, parts: int | None) -> None:
        self._save = ObjectSave(url, overwrite=overwrite, parts=parts)
        self._files: list[FilePlan] = []
        self._linked: list[LinkedFile] = []
        self._content: bytes | None = None
        self._save.begin()

    def link_file(self, file: LinkedFile) -> bool:
        self._linked.append(file)
        return True

    def prepare_file(self, file: FilePlan) -> WriteFile:
        self._files.append(file)
        return write_later

    def needs_first_rank(self, file: FilePlan) -> bool:
        return True  # an object is one upload

    def publish(
        self, index: Sequence[FilePlan], how: SaveContext, others: Iterable[DeliveredFile] = ()
    ) -> None:
        for one in self._linked:
            how.before_publish()
            self._save.copy(Url(one.folder).key)
        for file in self._files:
            self._save.write(
                file.nbytes,
                partial(_pass, file, how),
                how.before_publish,
                check_content=None
                if how.check_opens is None
                else partial(self._check_content, how),
                check_object=partial(self._check_object, file, how),
            )

    def _check_content(self, how: SaveContext, content: bytes) -> None:
        """Have a short object opened before it is put."""
        self._content = content
        self.check_opens(how)

    def _check_object(self, file: FilePlan, how: SaveContext) -> None:
        """Check an object that is published: its data, and a long one as a whole."""
        if how.read_back:
            _check_uploaded(file, self._save.url, how.crcs)
        if self._content is None:
            self.check_opens(how)

    def open_unpublished(self) -> Store:
        url = self._save.url
        if self._content is None:
            return RemoteStore(url)
        return MemoryStore({url.key.rpartition("/")[2]: self._content}, name=url)


class JoinedPrefix(Target):
    """The objects of a save below a prefix, on a part that uploads some of them."""

    def __init__(
        self,
        url: Url,
        save: str,
        index: str = "",
        *,
        overwrite: bool = False,
        parts: int | None = None,
    ) -> None:
        self.url, self.save_id = url, save
        self._save = PrefixSave(url, index, overwrite=overwrite, parts=parts)

    def link_file(self, file: LinkedFile) -> bool:
        return True  # the manifest names it where it is

    def prepare_file(self, file: FilePlan) -> WriteFile:
        return lambda how: _put(file, how, self._save, file.key)

    def stream_file(self, key: str, nbytes: int, write: Callable[[Writer], None]) -> None:
        self._save.write(key, nbytes, write)

    def generate_free_names(self, prefix: str, suffix: str) -> Iterator[str]:
        own, number = make_save_id(), 0
        while True:
            yield f"{prefix}{number}-{self.save_id}-{own}{suffix}"
            number += 1

    def give_up(self) -> None:
        self._save.give_up()


class PrefixTarget(JoinedPrefix):
    """Objects below a prefix, on the part that publishes them."""

    def __init__(
        self,
        url: Url,
        save: str,
        index: str,
        *,
        overwrite: bool,
        names: BucketNames,
        parts: int | None,
    ) -> None:
        super().__init__(url, save, index, overwrite=overwrite, parts=parts)
        self._names, self._over = names, False
        self._delivered: dict[
            str, tuple[int, bool]
        ] = {}  # Length of each object, and whether it is one of the base.
        self._late: list[FilePlan] = []
        self._index: FilePlan | None = None
        self._content: bytes | None = None
        self._save.begin(names.is_checkpoint)
        there = self._save.there
        self._others = names.find_other_indexes(url, there)
        self._replaced = (
            names.find_replaced(url, there) if overwrite and there else ReplacedObjects()
        )

    def link_file(self, file: LinkedFile) -> bool:
        self._delivered[file.key] = file.nbytes, True
        return True

    def needs_first_rank(self, file: FilePlan) -> bool:
        return file.key == self._save.index or self._names.is_written_late(file.key)

    def prepare_file(self, file: FilePlan) -> WriteFile:
        if file.key == self._save.index:
            self._index = file
            return write_later
        self._delivered[file.key] = file.nbytes, False
        if self._names.is_written_late(file.key):
            self._late.append(file)
            return write_later
        return super().prepare_file(file)

    def publish(
        self, index: Sequence[FilePlan], how: SaveContext, others: Iterable[DeliveredFile] = ()
    ) -> None:
        """Put the index. What it replaced goes afterwards."""
        for file in index:
            self.prepare_file(file)(how)
        final = self._index
        assert final is not None  # the target was opened for a plan that has it
        self._delivered.update({key: (nbytes, linked) for key, nbytes, linked in others})
        self._content = _text(final, how)
        self.check_opens(how)
        how.before_publish()
        for file in self._late:
            _put(file, how, self._save, file.key)
        text = self._content
        self._save.remove([name for name in self._names.stale_names if name in self._save.there])
        used = [
            (*self._home(key), nbytes)
            for key, (nbytes, linked) in self._delivered.items()
            if linked
        ]
        commit_with_claim(self._save, used, lambda: self._save.commit(text, how.attributes))
        self._over = True
        self._save.remove(self._others)
        self._replaced.remove(self._save, keep={file.key for file in (*self._late, final)})

    def _home(self, key: str) -> tuple[str, str]:
        return parse_sibling_key(key) or (self.url.key.rpartition("/")[2], key)

    def open_unpublished(self) -> Store:
        store, bucket, parent = Virtual(self.url), get_bucket(self.url), self.url.parent
        for key, (nbytes, _) in self._delivered.items():
            folder, name = self._home(key)
            at = parent.below(f"{folder}/{name}" if folder else name).key
            store.put(VirtualFile(nbytes, partial(_read, bucket, at)), key)
        content = memoryview(self._content or b"")

        def read(start: int, out: memoryview) -> None:
            out[:] = content[start : start + out.nbytes]

        store.put(VirtualFile(content.nbytes, read), self._save.index)
        return store

    def give_up(self) -> None:
        """Remove all objects of the save, also of parts that are no more, unless it was published or may have been."""
        if self._over or not self._save.revocable:
            return
        self._over = True
        super().give_up()
        if self.save_id:
            below = f"{self.url.key}/" if self.url.key else ""
            with suppress(HoldfastError):
                bucket = get_bucket(self.url)
                found = [one.key for one in bucket.list_objects(below, MOST)]
                bucket.delete(
                    [
                        key
                        for key in found
                        if key.startswith(below) and self.save_id in key[len(below) :]
                    ]
                )


class JoinedCopy(Target):
    """Objects below a prefix whose names are those of a source that is copied, on a part that uploads some of them."""

    def __init__(self, url: Url, name: str, save: PrefixSave | None = None) -> None:
        self._save = save or PrefixSave(url, "", overwrite=False)
        self._hidden: dict[str, str] = json.loads(name)

    @property
    def join_name(self) -> str:
        return json.dumps(self._hidden)

    def prepare_file(self, file: FilePlan) -> WriteFile:
        return lambda how: _put(file, how, self._save, self._hidden.get(file.key, file.key))

    def give_up(self) -> None:
        self._save.give_up()


class CopyTarget(JoinedCopy):
    """Objects of a copy, on the part that publishes them. Two copies would write the same names, so one claims the place first.
    What has names in common with a checkpoint that it replaces would be a mixture of both for a while: then the old one goes
    first. But not before everything is in the bucket, under hidden names, from which the store copies it: what fails on the way
    here leaves the old one as it was. Weights that no index names are found as soon as they are there. So they are put last;
    or, where several parts upload them, under hidden names as well."""

    def __init__(
        self,
        url: Url,
        plan: SavePlan,
        *,
        overwrite: bool,
        names: BucketNames,
        parts: int | None,
        several: bool,
    ) -> None:
        save = PrefixSave(
            url, plan.index[0].key if plan.index else "", overwrite=overwrite, parts=parts
        )
        save.begin(names.is_checkpoint)
        there = save.there
        found = (
            []
            if plan.index
            else [
                file for file in plan.files if names.is_weights(file.key) and file.key not in there
            ]
        )
        aside = [*(file for file in plan.files if file.key in there), *(found if several else ())]
        hidden = {file.key: _hidden(file.key) for file in aside if file.nbytes <= MAX_COPY_NBYTES}
        super().__init__(url, json.dumps(hidden), save)
        self._files: list[FilePlan] = []
        self._linked: list[LinkedFile] = []
        self._over = [file for file in plan.files if file.key in there and file.key not in hidden]
        self._last = [file for file in found if file.key not in hidden]
        self._replaced = (
            names.find_replaced(url, there) if overwrite and there else ReplacedObjects()
        )
        self._claim = ExitStack()
        self._claim.enter_context(save.claimed())
        save.expect([hidden.get(file.key, file.key) for file in plan.files])

    def needs_first_rank(self, file: FilePlan) -> bool:
        return any(file.key == one.key for one in (*self._over, *self._last))

    def link_file(self, file: LinkedFile) -> bool:
        self._linked.append(file)
        return True

    def prepare_file(self, file: FilePlan) -> WriteFile:
        self._files.append(file)
        return write_later if self.needs_first_rank(file) else super().prepare_file(file)

    def publish(
        self, index: Sequence[FilePlan], how: SaveContext, others: Iterable[DeliveredFile] = ()
    ) -> None:
        save, old = self._save, self._replaced.names
        mine = {
            *(one.key for one in self._linked),
            *(file.key for file in (*self._files, *index)),
            *(key for key, _, _ in others),
        }
        for file in self._last:
            _put(file, how, save, file.key)
        how.before_publish()
        if mine.intersection(old[1:] if index else old):
            save.withdraw_index(old[0])
        for file in self._over:
            _put(file, how, save, file.key)
        for one in self._linked:
            save.copy(one.key, f"{Url(one.folder).key}/{one.key}")
        for name, hidden in self._hidden.items():
            save.copy(name, save.url.below(hidden).key)
        # And those of copies that were cut off: this one has the place alone.
        cut_off = (name for name in save.there if is_temporary(name) and NOBODY not in name)
        save.dismiss([*self._hidden.values(), *cut_off])
        if self._over:
            how.before_publish()
        for file in index:
            save.commit(_text(file, how))
        save.revocable = False
        self._replaced.remove(save, keep=mine)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        super().__exit__(kind, error, trace)
        self._claim.__exit__(kind, error, trace)


def _check_uploaded(file: FilePlan, url: Url, crcs: Mapping[str, int]) -> None:
    store = RemoteStore(url)
    (key,) = store.list()
    for label, found in read_stored_crcs(file, store, key).items():
        if found != crcs[label]:
            message = "what was written does not read back the same; nothing was published"
            raise NotCommitted(
                message, file=store.name, tensor=label, expected=crcs[label], found=found
            )


def _hidden(name: str) -> str:
    folder, slash, last = name.rpartition("/")
    return f"{folder}{slash}{make_temporary_name(last)}"


def _read(bucket: Bucket, key: str, start: int, out: memoryview) -> None:
    try:
        got = bucket.get_range(key, start, start + out.nbytes)
    except StoreError as error:
        if error.errno == errno.ENOENT:
            raise StoreError(
                "an object that a rank has uploaded is not there", file=bucket.url(key)
            ) from None
        raise
    out[:] = got.data
