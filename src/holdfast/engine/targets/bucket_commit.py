"""The commit in an object store: data under names of their own, and one object that makes them a checkpoint.

An object store has no rename and no directories. It has objects that are there wholly or not at all, and puts with a condition:

    1  data objects, whose names carry the id of this save: two savers of one step never write the same name
    2  objects that have their names from elsewhere: the config and the tokenizer of a Hugging Face folder
    3  the index, last: created if there is none, or put in place of exactly the one that was there. It is `holdfast.json`, or
       `model.safetensors.index.json`

Before 3 nobody finds anything: a prefix without an index is nothing. After it everything is there. What was replaced goes last.
A save that is given up takes away what it wrote under names that nobody had before, and nothing else.

**The lost answer.** A put may succeed and its answer be lost. It is sent again, and then something is there already: what was put
first. So an answer is never believed to be a refusal. What is there is read back and compared: if it is ours, the save is done; if
it is another's, this one is `NotCommitted`; if nothing is there, it is put again; and if nobody can say, it is
`DurabilityUncertain`, and the data stays.

**One object** (`.pt`, `.safetensors`) that may not replace anything is put with the condition, too. A long one is an upload in
parts, whose end has no condition. So its name is claimed first, by a hidden object beside it that only one can create.

**Conditions.** A store that ignores them would let the last saver win without anybody knowing. Each bucket is tried once.
"""

from __future__ import annotations

import errno
import io
import json
import os
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from functools import partial
from itertools import islice
from typing import Final

from holdfast.engine.stream import Writer
from holdfast.errors import (
    DurabilityUncertain,
    HoldfastError,
    LimitExceeded,
    NotCommitted,
    StoreError,
    drop_tracebacks,
)
from holdfast.stores.remote.client import Bucket, get_bucket
from holdfast.stores.remote.failures import ConditionFailed, iterate_pauses
from holdfast.stores.remote.url import Url

INSIST: Final = "HOLDFAST_WITHOUT_CONDITIONS"  # Set in the environment, this lets saves go to a store that ignores conditions.
TRIES = 5  # How often the index is put while nobody can say whether it is there.
LOOK_S = 0.25  # The first pause before that; each is twice the one before. A store may show late what it has.
NOBODY: Final = "0" * 16  # In the name of a claim, where other hidden names have the id of a save.

CLAIM: Final = (
    f".copy.{NOBODY}.tmp"  # Says that somebody copies to this place. No reader takes it for a file.
)
SAVE: Final = "holdfastsave"  # The attribute of an object that says which save wrote it. Azure takes the names of C#: no dashes.
WEIGHTS_INDEX: Final = ".index.json"  # How the name of the index of a Hugging Face folder ends.
Write = Callable[[Writer], object]


def make_save_id() -> str:
    return secrets.token_hex(8)


def check_conditions(bucket: Bucket, url: Url) -> None:
    """Try whether the store refuses to create what is there. Raises `NotCommitted` where it does not, unless the user insists."""
    if bucket.supports_conditions is None:
        probe = f"{url.key}.holdfast-probe-{make_save_id()}"
        try:
            with suppress(ConditionFailed):
                bucket.put(probe, b"1", create=True)
            try:
                bucket.put(probe, b"2", create=True)
                bucket.supports_conditions = False
            except ConditionFailed:
                bucket.supports_conditions = True
        except StoreError as error:
            raise NotCommitted(
                f"the store cannot be written to: {error.message}", file=url, errno=error.errno
            ) from None
        finally:
            with suppress(HoldfastError):
                bucket.delete([probe])
    if not bucket.supports_conditions and not os.environ.get(INSIST):
        danger = "so two saves at once could mix or undo each other without anybody knowing"
        advice = f"use another store, or set {INSIST}=1 where only one process ever saves"
        message = f"the store takes no notice of conditions (If-None-Match), {danger}; {advice}"
        raise NotCommitted(message, file=url, errno=errno.ENOTSUP)


@contextmanager
def claimed(
    bucket: Bucket, key: str, url: Url, *, busy: str, force: bool = False
) -> Iterator[None]:
    """Have a place alone, by a small object that only one can create. `force` takes the place of one whose saver is dead. Raises
    `NotCommitted`, with the message `busy`, where another has it. Where nobody can say how the block ended, the claim stays."""
    mine = make_save_id().encode()

    def is_mine() -> bool | None:
        """Whether the claim is; None where there is none, or none to be seen yet."""
        try:
            return bytes(bucket.get_object(key, 1 << 10).data) == mine
        except HoldfastError as error:
            return None if isinstance(error, StoreError) and error.errno == errno.ENOENT else False

    for pause in islice(iterate_pauses(LOOK_S), TRIES):
        try:
            bucket.put(key, mine, create=not force)
            break
        except StoreError as error:
            failed = drop_tracebacks(error)
        held = is_mine()
        if held:
            break
        if held is None and isinstance(failed, ConditionFailed):
            time.sleep(pause)
            continue
        message = (
            f"{busy}; pass overwrite=True when none is"
            if isinstance(failed, ConditionFailed)
            else failed.message
        )
        raise NotCommitted(message, file=url, errno=failed.errno)
    else:
        raise NotCommitted(
            f"{busy}; pass overwrite=True when none is", file=url, errno=errno.EEXIST
        )
    keep = False
    try:
        yield
    except DurabilityUncertain:
        keep = True
        raise
    finally:
        if not keep:
            with suppress(HoldfastError):
                if is_mine() is not False:
                    bucket.delete([key])


def put_surely(
    put: Callable[[], object], is_mine: Callable[[], bool | None], lost: Callable[[], HoldfastError]
) -> str | None:
    """Put an object, and look what is there where the answer is none. None when it is there, else the last error message. `is_mine`
    looks: None where what was there before is there still. Raises `lost()` where another's is."""
    failure = ""
    for pause in islice(iterate_pauses(LOOK_S), TRIES):
        try:
            put()
            return None
        except StoreError as error:
            failure = error.message
        try:
            mine = is_mine()
        except StoreError as error:
            failure = failure if error.errno == errno.ENOENT else error.message
            time.sleep(pause)  # it is not there, or not to be seen yet; the next try finds out
            continue
        if mine:
            return None
        if mine is False:
            raise lost()
    return failure


def another_first(url: Url) -> HoldfastError:
    return NotCommitted(
        "another save to the same place was published first; this one was given up",
        file=url,
        errno=errno.EEXIST,
    )


class PrefixSave:
    """A checkpoint of several objects below one prefix, published by the last of them: `index`."""

    def __init__(self, url: Url, index: str, *, overwrite: bool, parts: int | None = None) -> None:
        self.url = url
        self.index = index
        self._parts = parts  # Parts of an upload that may be under way at once.
        self._overwrite = overwrite
        self._bucket = get_bucket(url)
        self._written: list[str] = []
        self.there: frozenset[str] = (
            frozenset()
        )  # What lay right below the prefix when the save began, by its names.
        self._before: str | None = None  # The etag of the index that is to be replaced.
        self.revocable = True
        """Whether it is known that nobody finds what was written: until the index is put, and where another save was faster."""

    def begin(self, counts: Callable[[str], bool] | None = None) -> None:
        """Look at what is there. Raises `NotCommitted` where it may not be replaced: an index, or another name that `counts`."""
        check_conditions(self._bucket, self.url)
        try:
            _, found = self._bucket.list_folder(self._key(""))
            names = {one.key.rpartition("/")[2]: one for one in found}
            index = names.get(self.index)
            # What a list says of an object may be older than the object.
            self._before = None if index is None else self._bucket.head(self._key(self.index)).etag
        except StoreError as error:
            raise NotCommitted(
                f"the target cannot be looked at: {error.message}", file=self.url, errno=error.errno
            ) from None
        self.there = frozenset(names)
        if not self._overwrite and (
            self._before is not None or (counts is not None and any(map(counts, names)))
        ):
            raise NotCommitted(
                "a checkpoint exists there; pass overwrite=True to replace it",
                file=self.url,
                errno=errno.EEXIST,
            )

    def write(self, name: str, nbytes: int, write: Write) -> None:
        """Write one object, of those that nobody finds without the index."""
        key = self._key(name)
        self.expect([name])
        try:
            with self._bucket.open_upload(
                key, nbytes, attributes=None, parts_at_once=self._parts
            ) as upload:
                write(upload)
        except StoreError as error:
            raise NotCommitted(
                f"{error.message}; nothing was published",
                file=self._bucket.url(key),
                errno=error.errno,
            ) from None

    def expect(self, names: Iterable[str]) -> None:
        """Names that this save writes, here or on other parts: of those that nobody had before, none stays if it is given up."""
        self._written += [self._key(name) for name in names if name not in self.there]

    def commit(self, index: bytes, attributes: Mapping[str, str] | None = None) -> None:
        """Publish, with what the object says of itself. Raises `NotCommitted` where another save was faster, `DurabilityUncertain`
        where nobody can say."""
        key, before = self._key(self.index), self._before
        self.revocable = False

        def is_mine() -> bool | None:
            try:
                there = self._bucket.get_object(key, max(len(index), 1) + (1 << 20))
            except LimitExceeded:
                return False  # longer than ours
            return (
                True
                if bytes(there.data) == index
                else None
                if there.metadata.etag == before
                else False
            )

        put = partial(
            self._bucket.put,
            key,
            index,
            create=before is None,
            if_match=before,
            attributes=attributes,
        )
        unsure = put_surely(put, is_mine, self._lost)
        if unsure is not None:
            message = f"nobody can say whether the save was published ({unsure}); its objects were left there. Open it to see"
            raise DurabilityUncertain(f"{message}, or save again", file=self.url)

    def _lost(self) -> HoldfastError:
        self.revocable = True
        return another_first(self.url)

    def copy(self, name: str, key: str) -> None:
        """Have the store copy an object of the same bucket."""
        self.expect([name])
        try:
            self._bucket.copy(key, self._key(name))
        except StoreError as error:
            raise NotCommitted(
                f"{error.message}; nothing was published",
                file=self._bucket.url(key),
                errno=error.errno,
            ) from None

    def claimed(self) -> AbstractContextManager[None]:
        """Have the place alone, for a save whose names another would write as well. Raises `NotCommitted` where one does."""
        busy = "another copy to this place is under way, or one was cut off"
        return claimed(self._bucket, self._key(CLAIM), self.url, busy=busy, force=self._overwrite)

    def withdraw_index(self, index: str) -> None:
        """Withdraw the old index before files that it names are overwritten.

        From now on there is no checkpoint, until this one is published. Files of weights open
        without an index as well, and would be a mixture of both. Their index is not deleted but
        names a file that is not there, so that every reader refuses the folder.
        """
        key = self._key(index)
        etag = None
        if index.endswith(WEIGHTS_INDEX):
            suffix = os.path.splitext(index.removesuffix(WEIGHTS_INDEX))[1]
            weight_map = {"": f"holdfast-copy-is-not-finished{suffix}"}
            try:
                etag = self._bucket.put(key, json.dumps({"weight_map": weight_map}).encode())
            except StoreError as error:
                message = f"{error.message}; nothing was published"
                raise NotCommitted(message, file=self._bucket.url(key), errno=error.errno) from None
        else:
            self._bucket.delete([key])
            self.there -= {index}
        if index == self.index:
            self._before = etag

    def give_up(self) -> None:
        """Remove what was written, unless it is published or may be. What cannot be removed now is left to the sweep of the run."""
        if not self.revocable:
            return
        with suppress(HoldfastError):
            self._bucket.delete(self._written)
        self._written.clear()

    def dismiss(self, names: Iterable[str]) -> None:
        """Remove what was written under hidden names, when it was copied to its own."""
        keys = {self._key(name) for name in names}
        with suppress(HoldfastError):
            self._bucket.delete(sorted(keys))
        self._written = [key for key in self._written if key not in keys]

    def remove(self, names: Sequence[str]) -> None:
        """Remove objects of what was replaced; whoever reads them gets an error from now on."""
        keep = set(self._written)
        with suppress(HoldfastError):
            self._bucket.delete([key for key in map(self._key, names) if key not in keep])

    def _key(self, name: str) -> str:
        return f"{self.url.key}/{name}" if self.url.key else name


class ObjectSave:
    AT_ONCE: Final = (
        64 << 20
    )  # Up to this length the object is put by one request, which may have a condition.

    def __init__(self, url: Url, *, overwrite: bool, parts: int | None = None) -> None:
        self.url = url
        self._overwrite = overwrite
        self._parts = parts
        self._bucket = get_bucket(url)
        self._id = make_save_id()

    def begin(self) -> None:
        """Look at what is there. Raises `NotCommitted` where it may not be replaced."""
        if not self._overwrite:
            check_conditions(self._bucket, self.url)
        try:
            if not self.url.has_suffix and any(self._bucket.list_folder(self.url.key)):
                raise NotCommitted(
                    "there are objects below this name, which is a folder's; give another",
                    file=self.url,
                    errno=errno.EISDIR,
                )
            self._bucket.head(self.url.key)
        except StoreError as error:
            if error.errno != errno.ENOENT:
                raise NotCommitted(
                    f"the target cannot be looked at: {error.message}",
                    file=self.url,
                    errno=error.errno,
                ) from None
            return
        if self._overwrite:
            return
        raise NotCommitted(
            "the object exists; pass overwrite=True to replace it",
            file=self.url,
            errno=errno.EEXIST,
        )

    def copy(self, key: str) -> None:
        try:
            with self._last_look():
                self._bucket.copy(key, self.url.key)
        except StoreError as error:
            raise NotCommitted(
                f"{error.message}; nothing was published", file=self.url, errno=error.errno
            ) from None

    def write(
        self,
        nbytes: int,
        write: Write,
        before_commit: Callable[[], None],
        *,
        check_content: Callable[[bytes], None] | None,
        check_object: Callable[[], None],
    ) -> None:
        """Write and publish an object.

        Without `overwrite`, a short object is put with a condition; a long one is an upload in
        parts, for which S3 has none. So the name is claimed for the moment in which either becomes
        an object.

        Args:
            nbytes: The length of the object.
            write: Writes the content to a file.
            before_commit: Called when everything is written; its errors keep what is there.
            check_content: Checks a short object before it is put.
            check_object: Checks the published object. Its errors are `DurabilityUncertain`.
        """
        attributes: Mapping[str, str] = {SAVE: self._id}
        if nbytes <= self.AT_ONCE and not (self._overwrite and check_content is None):
            gathered = io.BytesIO()
            write(gathered)
            content = gathered.getvalue()
            if check_content is not None:
                check_content(content)
            if self._overwrite:
                self._upload(
                    nbytes, lambda upload: upload.write(content), before_commit, attributes
                )
            else:
                before_commit()
                with self._last_look():
                    self._create(content, attributes)
        else:
            self._upload(nbytes, write, before_commit, attributes)
        try:
            check_object()
        except NotCommitted:
            message = (
                "the object is there, and does not read back the same as it was written, or does "
                "not open; save it again"
            )
            raise DurabilityUncertain(message, file=self.url) from None
        except HoldfastError as error:
            raise DurabilityUncertain(
                f"the object is there, and cannot be read back: {error.message}", file=self.url
            ) from None

    def _upload(
        self,
        nbytes: int,
        write: Write,
        before_commit: Callable[[], None],
        attributes: Mapping[str, str],
    ) -> None:
        with ExitStack() as held:
            try:
                with self._bucket.open_upload(
                    self.url.key, nbytes, attributes=attributes, parts_at_once=self._parts
                ) as upload:
                    write(upload)
                    before_commit()
                    held.enter_context(self._last_look())
            except StoreError as error:
                if error.file != self._bucket.url(self.url.key):
                    raise
                self._uncertain(error)

    @contextmanager
    def _last_look(self) -> Iterator[None]:
        """Have the name alone while it is published, and nothing there. With `overwrite`, nothing is asked."""
        if self._overwrite:
            yield
            return
        folder, slash, name = self.url.key.rpartition("/")
        busy = "another save to the same place is being published, or one was cut off while it was"
        with claimed(self._bucket, f"{folder}{slash}.{name}.{NOBODY}.tmp", self.url, busy=busy):
            self.begin()
            yield

    def _create(self, content: bytes, attributes: Mapping[str, str]) -> None:
        def is_mine() -> bool:
            return self._bucket.get_range(self.url.key, 0, 1).attributes.get(SAVE) == self._id

        put = partial(self._bucket.put, self.url.key, content, create=True, attributes=attributes)
        unsure = put_surely(put, is_mine, lambda: another_first(self.url))
        if unsure is not None:
            raise DurabilityUncertain(
                f"nobody can say whether the object was written ({unsure}); look at it",
                file=self.url,
            )

    def _uncertain(self, error: StoreError) -> None:
        """An upload that failed at its end may be there all the same: look, and say so."""
        try:
            there = self._bucket.get_range(self.url.key, 0, 1)
        except StoreError as second:
            if second.errno == errno.ENOENT:
                raise NotCommitted(
                    f"{error.message}; nothing was published", file=self.url, errno=error.errno
                ) from None
            message = f"nobody can say whether the object was written ({error.message}); look at it"
            raise DurabilityUncertain(message, file=self.url) from None
        if there.attributes.get(SAVE) != self._id:
            raise NotCommitted(
                f"{error.message}; what was there is there still", file=self.url, errno=error.errno
            ) from None
