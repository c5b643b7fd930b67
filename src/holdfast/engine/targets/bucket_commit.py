"""The commit in an object store: data objects first, and one object that makes them a checkpoint.

An object store has no rename and no folders. An object is there completely or not at all, and a put
can have a condition. A save of several objects below a prefix (`PrefixSave`):

    1  put data objects. Their names contain the id of the save, so no two saves write the same name
    2  put objects whose names are fixed, such as the config of a Hugging Face folder
    3  put the index with a condition: there must be none, or exactly the one that was there before
    4  delete what was replaced

Before step 3 readers find nothing new, because a prefix without an index is not a checkpoint. After
it they find everything. A crash in steps 1 and 2 leaves objects that no index names, for the sweep
of a run to delete. A crash in step 4 leaves old objects likewise. A save that is given up deletes
the objects whose names nobody had before, and no others.

**Lost answers.** A put may succeed and its answer be lost. If it is then sent again, it fails
because the object exists. So a failed condition is never believed: the object is read back. If it
is that of this save, the save is published. If it is that of another save, this one is
`NotCommitted`. If the old object is still there, it is put again. If nothing of this can be found
out, the save is `DurabilityUncertain`, and its data stays.

**A single object** (`ObjectSave`: `.pt`, `.safetensors`) is put with a condition as well, unless it
may replace anything. A long object is uploaded in parts, and the end of an upload has no condition.
So its name is claimed before that, by a hidden object that only one save can create.

**Stores without conditions** would let the last save win without a notice. So each bucket is tested
once (`require_conditional_puts`).
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
from typing import Final, Literal

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

ALLOW_UNCONDITIONAL_VARIABLE: Final = "HOLDFAST_WITHOUT_CONDITIONS"
"""The environment variable that allows saves to stores that ignore conditions."""

MAX_TRIES = 5
"""How often an object is put while it is unknown whether it is there."""

FIRST_PAUSE_S = 0.25
"""The first pause before the next try. A store may show an object late, so the pauses grow."""

NO_SAVE_ID: Final = "0" * 16
"""In the name of a claim, where other hidden names have the id of a save."""

COPY_CLAIM: Final = f".copy.{NO_SAVE_ID}.tmp"
"""The name of the claim of a copy. Readers do not take it for a file of a checkpoint."""

SAVE_ATTRIBUTE: Final = "holdfastsave"
"""The attribute of an object with the id of its save. Azure allows no dashes in it."""

WEIGHTS_INDEX_SUFFIX: Final = ".index.json"
"""The end of the name of the index of a Hugging Face folder."""

WriteContent = Callable[[Writer], object]
"""Writes the content of an object from front to back."""

Owner = Literal["ours", "another", "nobody"]
"""Whose object is there after a put with a condition has failed: that of this save, that of another
one, or none that was put since this save began."""


def make_save_id() -> str:
    """Return a new random id for a save."""
    return secrets.token_hex(8)


def explain_store_failure(error: StoreError, url: str) -> NotCommitted:
    """Return the error for a save that a failed request stopped before it was published."""
    message = f"{error.message}; nothing was published"
    return NotCommitted(message, file=url, errno=error.errno)


def require_conditional_puts(bucket: Bucket, url: Url) -> None:
    """Raise `NotCommitted` if the store ignores the conditions of a put.

    Each bucket is tested once. The environment variable `HOLDFAST_WITHOUT_CONDITIONS` allows saves
    to such a store.
    """
    if bucket.supports_conditions is None:
        bucket.supports_conditions = _probe_conditional_puts(bucket, url)

    if not bucket.supports_conditions and not os.environ.get(ALLOW_UNCONDITIONAL_VARIABLE):
        message = (
            "the store ignores conditions (If-None-Match), so two saves at once could mix or undo "
            "each other without a notice; use another store, or set "
            f"{ALLOW_UNCONDITIONAL_VARIABLE}=1 where only one process ever saves"
        )
        raise NotCommitted(message, file=url, errno=errno.ENOTSUP)


def _probe_conditional_puts(bucket: Bucket, url: Url) -> bool:
    """Return whether a store refuses to create an object that exists already.

    The test creates a small object beside the target twice, and deletes it.

    Raises:
        NotCommitted: The object cannot be written.
    """
    probe_key = f"{url.key}.holdfast-probe-{make_save_id()}"
    try:
        # The key is random, so the object is new. If the store says that it exists, then the first
        # attempt has created it, its answer was lost, and the put was sent again.
        with suppress(ConditionFailed):
            bucket.put(probe_key, b"1", create=True)
        try:
            bucket.put(probe_key, b"2", create=True)
        except ConditionFailed:
            return True
        return False
    except StoreError as error:
        message = f"the store cannot be written to: {error.message}"
        raise NotCommitted(message, file=url, errno=error.errno) from None
    finally:
        with suppress(HoldfastError):
            bucket.delete([probe_key])


@contextmanager
def exclusive_claim(
    bucket: Bucket, key: str, url: Url, *, busy: str, takes_over: bool = False
) -> Iterator[None]:
    """Hold a small object that only one save can create, while the block runs.

    The claim stays if the process dies, or if it is unknown whether the block has published
    anything. Then other saves are refused until one of them takes it over.

    Args:
        bucket: The bucket.
        key: The key of the claim.
        url: The target of the save, for messages.
        busy: The message if another save has the claim.
        takes_over: Whether to take the claim from another save, which must be dead.

    Raises:
        NotCommitted: Another save has the claim.
    """
    claim_id = make_save_id().encode()
    _create_claim(bucket, key, claim_id, url, busy=busy, takes_over=takes_over)
    keeps_claim = False
    try:
        yield
    except DurabilityUncertain:
        keeps_claim = True
        raise
    finally:
        if not keeps_claim:
            with suppress(HoldfastError):
                if _find_claim_owner(bucket, key, claim_id) != "another":
                    bucket.delete([key])


def _create_claim(
    bucket: Bucket, key: str, claim_id: bytes, url: Url, *, busy: str, takes_over: bool
) -> None:
    """Create the object of `exclusive_claim`, or raise `NotCommitted`."""
    busy_message = f"{busy}; pass overwrite=True when none is"
    for pause in islice(iterate_pauses(FIRST_PAUSE_S), MAX_TRIES):
        try:
            bucket.put(key, claim_id, create=not takes_over)
            return
        except StoreError as error:
            failure = drop_tracebacks(error)

        owner = _find_claim_owner(bucket, key, claim_id)
        if owner == "ours":
            # The put has succeeded, and its answer was lost.
            return
        if not isinstance(failure, ConditionFailed):
            raise NotCommitted(failure.message, file=url, errno=failure.errno)
        if owner == "another":
            raise NotCommitted(busy_message, file=url, errno=failure.errno)
        # The claim of another save was deleted meanwhile, or is not visible yet.
        time.sleep(pause)
    raise NotCommitted(busy_message, file=url, errno=errno.EEXIST)


def _find_claim_owner(bucket: Bucket, key: str, claim_id: bytes) -> Owner:
    """Return whose claim an object is. If that cannot be found out, it counts as another's."""
    try:
        content = bucket.get_object(key, 1 << 10).data
    except HoldfastError as error:
        is_missing = isinstance(error, StoreError) and error.errno == errno.ENOENT
        return "nobody" if is_missing else "another"
    return "ours" if bytes(content) == claim_id else "another"


def put_and_confirm(
    put: Callable[[], object],
    find_owner: Callable[[], Owner],
    make_lost_error: Callable[[], HoldfastError],
) -> str | None:
    """Put an object, and read it back whenever the put fails: its answer may be wrong or lost.

    Args:
        put: Sends the put.
        find_owner: Reads the object and returns whose it is.
        make_lost_error: Returns the error to raise if the object is that of another save.

    Returns:
        None if the object of this save is there. If that cannot be found out, the message of the
        last failure.
    """
    failure_message = ""
    for pause in islice(iterate_pauses(FIRST_PAUSE_S), MAX_TRIES):
        try:
            put()
            return None
        except StoreError as error:
            failure_message = error.message
        try:
            owner = find_owner()
        except StoreError as error:
            if error.errno != errno.ENOENT:
                failure_message = error.message
            # The object is missing or not visible yet. The next put shows which.
            time.sleep(pause)
            continue
        if owner == "ours":
            return None
        if owner == "another":
            raise make_lost_error()
    return failure_message


def make_lost_error(url: Url) -> NotCommitted:
    """Return the error for a save that was slower than another one to the same place."""
    message = "another save to the same place was published first; this one was given up"
    return NotCommitted(message, file=url, errno=errno.EEXIST)


class PrefixSave:
    """A save of several objects below a prefix. The index, which is put last, publishes it.

    The module's docstring has the steps. Names are relative to the prefix.
    """

    def __init__(
        self, url: Url, index: str, *, overwrite: bool, parts_at_once: int | None = None
    ) -> None:
        """Prepare the save. No request is sent yet.

        Args:
            url: The prefix.
            index: The name of the index.
            overwrite: Whether an existing checkpoint may be replaced.
            parts_at_once: How many parts of an upload are sent at once.
        """
        self.url = url
        self.index = index
        self._overwrite = overwrite
        self._parts_at_once = parts_at_once
        self._bucket = get_bucket(url)
        self._new_keys: list[str] = []
        """Keys that this save writes and that nobody had before."""
        self.existing_names: frozenset[str] = frozenset()
        """The names right below the prefix when the save began."""
        self._old_etag: str | None = None
        """The ETag of the index that is to be replaced. None if there is none."""
        self.is_known_unpublished = True
        """Whether readers certainly find nothing of this save, so that its objects may be deleted:
        before the index is put, and if another save was faster."""

    def check_existing(self, is_checkpoint: Callable[[str], bool] | None = None) -> None:
        """List what is at the prefix, and raise `NotCommitted` if it may not be replaced.

        The names and the ETag of the old index are kept for the commit.

        Args:
            is_checkpoint: Returns whether an object of this name makes a checkpoint of the prefix,
                as the index does.
        """
        try:
            _, objects = self._bucket.list_folder(self._make_key(""))
            names = {listed.key.rpartition("/")[2] for listed in objects}
            if self.index in names:
                # A list may be older than the object itself.
                self._old_etag = self._bucket.head(self._make_key(self.index)).etag
        except StoreError as error:
            message = f"cannot check whether the target exists: {error.message}"
            raise NotCommitted(message, file=self.url, errno=error.errno) from None

        self.existing_names = frozenset(names)
        has_checkpoint = self._old_etag is not None
        if is_checkpoint is not None:
            has_checkpoint = has_checkpoint or any(map(is_checkpoint, names))
        if has_checkpoint and not self._overwrite:
            message = "a checkpoint exists there; pass overwrite=True to replace it"
            raise NotCommitted(message, file=self.url, errno=errno.EEXIST)
        # This may write a probe, so it comes after everything that can refuse the save.
        require_conditional_puts(self._bucket, self.url)

    def write_object(self, name: str, nbytes: int, write: WriteContent) -> None:
        """Upload an object that readers do not find without the index."""
        key = self._make_key(name)
        self.add_new_names([name])
        try:
            with self._bucket.open_upload(
                key, nbytes, attributes=None, parts_at_once=self._parts_at_once
            ) as upload:
                write(upload)
        except StoreError as error:
            raise explain_store_failure(error, self._bucket.url(key)) from None

    def add_new_names(self, names: Iterable[str]) -> None:
        """Note names that this or another rank will write.

        If the save is given up, it deletes those of them that did not exist before.
        """
        for name in names:
            if name not in self.existing_names:
                self._new_keys.append(self._make_key(name))

    def commit(self, index: bytes, attributes: Mapping[str, str] | None = None) -> None:
        """Publish the save: put the index, if the old one is still there.

        A crash before the put leaves the old checkpoint, a crash after it the new one.

        Args:
            index: The content of the index.
            attributes: The attributes of its object.

        Raises:
            NotCommitted: Another save was faster.
            DurabilityUncertain: It is unknown whether the index was put.
        """
        key = self._make_key(self.index)
        old_etag = self._old_etag
        self.is_known_unpublished = False

        def find_owner() -> Owner:
            try:
                content = self._bucket.get_object(key, max(len(index), 1) + (1 << 20))
            except LimitExceeded:
                # It is longer than the index of this save.
                return "another"
            if bytes(content.data) == index:
                return "ours"
            return "nobody" if content.metadata.etag == old_etag else "another"

        def fail_lost() -> HoldfastError:
            self.is_known_unpublished = True
            return make_lost_error(self.url)

        put = partial(
            self._bucket.put,
            key,
            index,
            create=old_etag is None,
            if_match=old_etag,
            attributes=attributes,
        )
        failure_message = put_and_confirm(put, find_owner, fail_lost)
        if failure_message is not None:
            message = (
                f"cannot determine whether the save was published ({failure_message}); its objects "
                "were not deleted. Open the checkpoint to check, or save again"
            )
            raise DurabilityUncertain(message, file=self.url)

    def copy_object(self, name: str, source_key: str) -> None:
        """Let the store copy an object of the same bucket to a name of this save."""
        self.add_new_names([name])
        try:
            self._bucket.copy(source_key, self._make_key(name))
        except StoreError as error:
            raise explain_store_failure(error, self._bucket.url(source_key)) from None

    def exclusive_place(self) -> AbstractContextManager[None]:
        """Hold the prefix while a copy writes names that another copy would write as well.

        Entering raises `NotCommitted` if another copy holds it.
        """
        busy = "another copy to this place is under way, or one was cut off"
        claim_key = self._make_key(COPY_CLAIM)
        return exclusive_claim(
            self._bucket, claim_key, self.url, busy=busy, takes_over=self._overwrite
        )

    def withdraw_index(self, index: str) -> None:
        """Withdraw the old index before files that it names are overwritten.

        From now on there is no checkpoint, until this save is published. Files of weights open
        without an index as well, and would be a mixture of old and new ones. So their index is not
        deleted. It is replaced by one that names a missing file, and every reader refuses the
        folder.

        Args:
            index: The name of the old index.
        """
        key = self._make_key(index)
        etag = None
        if index.endswith(WEIGHTS_INDEX_SUFFIX):
            weights_suffix = os.path.splitext(index.removesuffix(WEIGHTS_INDEX_SUFFIX))[1]
            weight_map = {"": f"holdfast-copy-is-not-finished{weights_suffix}"}
            try:
                etag = self._bucket.put(key, json.dumps({"weight_map": weight_map}).encode())
            except StoreError as error:
                raise explain_store_failure(error, self._bucket.url(key)) from None
        else:
            self._bucket.delete([key])
            self.existing_names -= {index}
        if index == self.index:
            # The commit must find what this call has put in its place.
            self._old_etag = etag

    def give_up(self) -> None:
        """Abort the save: delete its new objects, unless it is published or may be.

        Errors are ignored. What cannot be deleted now is left to the sweep of the run.
        """
        if not self.is_known_unpublished:
            return
        with suppress(HoldfastError):
            self._bucket.delete(self._new_keys)
        self._new_keys.clear()

    def remove_hidden(self, names: Iterable[str]) -> None:
        """Delete objects with hidden names after they were copied to their own names."""
        keys = {self._make_key(name) for name in names}
        with suppress(HoldfastError):
            self._bucket.delete(sorted(keys))
        self._new_keys = [key for key in self._new_keys if key not in keys]

    def remove_replaced(self, names: Sequence[str]) -> None:
        """Delete objects of the old checkpoint. Readers that still have it open get errors."""
        # An object that this save has written under an old name is not an old object.
        keys = {self._make_key(name) for name in names}
        with suppress(HoldfastError):
            self._bucket.delete(sorted(keys.difference(self._new_keys)))

    def _make_key(self, name: str) -> str:
        """Return the key of a name below the prefix."""
        return f"{self.url.key}/{name}" if self.url.key else name


class ObjectSave:
    """A save of a single object. Its put, or the end of its upload, publishes it."""

    MAX_PUT_NBYTES: Final = 64 << 20
    """The size up to which an object is put by one request, which may have a condition."""

    def __init__(self, url: Url, *, overwrite: bool, parts_at_once: int | None = None) -> None:
        """Prepare the save. No request is sent yet.

        Args:
            url: The object.
            overwrite: Whether an existing object may be replaced.
            parts_at_once: How many parts of an upload are sent at once.
        """
        self.url = url
        self._overwrite = overwrite
        self._parts_at_once = parts_at_once
        self._bucket = get_bucket(url)
        self._save_id = make_save_id()

    def check_existing(self) -> None:
        """Raise `NotCommitted` if the URL is a folder, or an object that may not be replaced."""
        if self._object_exists() and not self._overwrite:
            message = "the object exists; pass overwrite=True to replace it"
            raise NotCommitted(message, file=self.url, errno=errno.EEXIST)
        # This may write a probe, so it comes after everything that can refuse the save.
        if not self._overwrite:
            require_conditional_puts(self._bucket, self.url)

    def _object_exists(self) -> bool:
        """Return whether there is an object of this name. Raises `NotCommitted` for a folder."""
        try:
            # A name without a suffix could be a folder.
            if not self.url.has_suffix and any(self._bucket.list_folder(self.url.key)):
                message = "objects exist under this prefix, so it is a folder; choose another name"
                raise NotCommitted(message, file=self.url, errno=errno.EISDIR)
            self._bucket.head(self.url.key)
            return True
        except StoreError as error:
            if error.errno == errno.ENOENT:
                return False
            message = f"cannot check whether the target exists: {error.message}"
            raise NotCommitted(message, file=self.url, errno=error.errno) from None

    def copy_object(self, source_key: str) -> None:
        """Publish a copy of another object of the bucket. The store copies it."""
        try:
            with self._exclusive_name():
                self._bucket.copy(source_key, self.url.key)
        except StoreError as error:
            raise explain_store_failure(error, self.url) from None

    def write(
        self,
        nbytes: int,
        write: WriteContent,
        before_publish: Callable[[], None],
        *,
        check_content: Callable[[bytes], None] | None,
        check_object: Callable[[], None],
    ) -> None:
        """Write and publish the object.

        Without `overwrite`, a short object is put with a condition. A long one is an upload in
        parts, for which S3 has none. So the name is claimed for the moment in which either becomes
        an object. A crash before that leaves what was there, a crash after it the new object.

        Args:
            nbytes: The length of the object.
            write: Writes the content to a file.
            before_publish: Called when everything is written; its errors keep what is there.
            check_content: Checks a short object before it is put.
            check_object: Checks the published object. Its errors are `DurabilityUncertain`.
        """
        # The attribute shows whose object is there if the answer to a request is lost.
        attributes: Mapping[str, str] = {SAVE_ATTRIBUTE: self._save_id}
        # A put with a condition, and a check before the put, need the whole content in memory.
        needs_content = not self._overwrite or check_content is not None
        if nbytes > self.MAX_PUT_NBYTES or not needs_content:
            self._upload(nbytes, write, before_publish, attributes)
        else:
            buffer = io.BytesIO()
            write(buffer)
            content = buffer.getvalue()
            if check_content is not None:
                check_content(content)
            if self._overwrite:
                self._upload(
                    nbytes, lambda upload: upload.write(content), before_publish, attributes
                )
            else:
                before_publish()
                with self._exclusive_name():
                    self._create(content, attributes)
        self._check_published(check_object)

    def _check_published(self, check_object: Callable[[], None]) -> None:
        """Check the object, which is visible now. So no error may say that nothing was published.

        Raises:
            DurabilityUncertain: The check has failed.
        """
        try:
            check_object()
        except NotCommitted:
            message = (
                "the object is there, and does not read back the same as it was written, or does "
                "not open; save it again"
            )
            raise DurabilityUncertain(message, file=self.url) from None
        except HoldfastError as error:
            message = f"the object is there, and cannot be read back: {error.message}"
            raise DurabilityUncertain(message, file=self.url) from None

    def _upload(
        self,
        nbytes: int,
        write: WriteContent,
        before_publish: Callable[[], None],
        attributes: Mapping[str, str],
    ) -> None:
        """Upload the object in parts. The end of the upload publishes it."""
        with ExitStack() as claim_stack:
            try:
                with self._bucket.open_upload(
                    self.url.key,
                    nbytes,
                    attributes=attributes,
                    parts_at_once=self._parts_at_once,
                ) as upload:
                    write(upload)
                    before_publish()
                    # The claim is held beyond the end of the upload, which creates the object.
                    claim_stack.enter_context(self._exclusive_name())
            except StoreError as error:
                # Reading the source may fail as well.
                if error.file != self._bucket.url(self.url.key):
                    raise
                self._raise_unless_uploaded(error)

    @contextmanager
    def _exclusive_name(self) -> Iterator[None]:
        """Hold the name while the object is published, and check that nothing has it yet.

        With `overwrite` nothing is claimed or checked.
        """
        if self._overwrite:
            yield
            return
        folder, slash, name = self.url.key.rpartition("/")
        claim_key = f"{folder}{slash}.{name}.{NO_SAVE_ID}.tmp"
        busy = "another save to the same place is being published, or one was cut off while it was"
        with exclusive_claim(self._bucket, claim_key, self.url, busy=busy):
            self.check_existing()
            yield

    def _create(self, content: bytes, attributes: Mapping[str, str]) -> None:
        """Put the object, which must not exist yet.

        Raises:
            NotCommitted: Another program has put an object there.
            DurabilityUncertain: It cannot be determined whether the object was written.
        """

        def find_owner() -> Owner:
            existing = self._bucket.head_with_attributes(self.url.key)
            is_ours = existing.attributes.get(SAVE_ATTRIBUTE) == self._save_id
            return "ours" if is_ours else "another"

        put = partial(self._bucket.put, self.url.key, content, create=True, attributes=attributes)
        failure_message = put_and_confirm(put, find_owner, partial(make_lost_error, self.url))
        if failure_message is not None:
            raise self._make_uncertain_error(failure_message)

    def _raise_unless_uploaded(self, error: StoreError) -> None:
        """Raise the error for a failed upload, unless the upload took effect.

        If the object of this save is there, then only the answer to the last request was lost, and
        the save goes on as if the upload had succeeded.

        Args:
            error: The failure of the upload.

        Raises:
            NotCommitted: The upload has left what was there before.
            DurabilityUncertain: It cannot be determined whether the object was written.
        """
        try:
            existing = self._bucket.head_with_attributes(self.url.key)
        except StoreError as check_error:
            if check_error.errno == errno.ENOENT:
                raise explain_store_failure(error, self.url) from None
            raise self._make_uncertain_error(error.message) from None
        if existing.attributes.get(SAVE_ATTRIBUTE) != self._save_id:
            message = f"{error.message}; the existing object was not changed"
            raise NotCommitted(message, file=self.url, errno=error.errno) from None

    def _make_uncertain_error(self, failure_message: str) -> DurabilityUncertain:
        """Return the error for an object that may have been written or not."""
        message = (
            f"cannot determine whether the object was written ({failure_message}); check it before "
            "retrying"
        )
        return DurabilityUncertain(message, file=self.url)
