"""`Bucket`: every request to an object store, and the meaning of its answers.

1. A range is requested with the ETag of the object that was opened. If another object has the key
   by now, the request raises `Replaced` instead of returning a mixture.
2. Requests that can safely be sent twice are repeated after a failure that may pass: a 5xx status,
   a lost connection, a body that breaks off, or another range than the requested one. These are
   reads, lists, deletions, copies, and puts without a condition. They are repeated with growing
   pauses, at most `MAX_RETRIES` times and for three minutes. Retries that obstore makes and reports
   count as well.
3. Not repeated are a put with a condition, and the start and the end of an upload in parts. Such a
   put may succeed and its answer be lost. Sent again, it fails because the object exists. So
   callers draw no conclusion from the answer, and read what is there
   (engine/targets/bucket_commit).
4. A read that takes much longer than others of its size is sent a second time (`HedgeDelays`), and
   the first answer counts.
5. Messages have the URL of the object, what the server meant, and the number of attempts. They
   never contain the text of obstore, which may include signed URLs.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime, timedelta
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, TypeVar

from holdfast.core.runtime import at_fork, make_fork_safe
from holdfast.core.value import Value
from holdfast.errors import (
    HoldfastError,
    LimitExceeded,
    NotCommitted,
    StoreError,
    Truncated,
    Unsupported,
)
from holdfast.stores.remote.failures import (
    FIRST_PAUSE_S,
    MAX_PAUSE_S,
    MAX_RETRY_S,
    count_client_retries,
    describe_failure,
    find_existing,
    is_transient,
    iterate_pauses,
    translate_error,
)
from holdfast.stores.remote.loop import (
    is_forked,
    is_released,
    lend_memory,
    make_fork_error,
    mark_used,
    poll_until,
    track_request,
    unfinished_uploads,
    wait_for_answer,
)
from holdfast.stores.remote.url import PART_NBYTES, UPLOAD_PARTS_AT_ONCE, Url

if TYPE_CHECKING:
    from obstore import AsyncWritableFile, GetOptions, GetResult, ObjectMeta, PutMode
    from obstore.store import ClientConfig, ObjectStore, RetryConfig

T = TypeVar("T")
Buffer = bytes | memoryview

MAX_RETRIES = 8
"""How often a request is repeated, by obstore and by Holdfast together."""

OBSTORE_RETRIES = 10
"""How often obstore repeats a request if the caller did not configure it."""

LIST_PAGE_OBJECTS = 1000
"""Objects of a listing that are received at a time: as many as S3 puts on a page."""

DELETE_OBJECTS = 1000
"""The largest number of objects that S3 deletes with one request."""

MAX_UPLOAD_PARTS = 10_000
"""The largest number of parts that S3 accepts for one upload."""

ENDPOINT_VARIABLES = {
    "s3": ("AWS_ENDPOINT_URL", "AWS_ENDPOINT"),
    "az": ("AZURE_ENDPOINT", "AZURE_STORAGE_ENDPOINT"),
}
"""Environment variables with the URL of another server than that of the cloud."""

CHECKSUM_VARIABLE = "HOLDFAST_WITHOUT_CHECKSUMS"
"""An environment variable. If it is set, requests to S3 have no checksums, which some servers
refuse."""

CLIENT_VARIABLES = ("AWS_", "GOOGLE_", "AZURE_", "HOLDFAST_")
"""Prefixes of the environment variables that configure a client."""

RECORDED_ANSWERS = 16
"""Recent answers of each size whose times are remembered."""

MIN_ANSWERS = 4
"""Answers of a size after which their usual time counts as known."""

UNKNOWN_DELAY_S = 10.0
"""The delay before a second request while the usual time is not known."""

MIN_DELAY_S = 0.5
"""The shortest delay. If this machine is busy for a moment, a second request would not help."""

LATE_FACTOR = 4.0
"""An answer is late after this multiple of the usual time."""


class RemoteObject(Value, frozen=True):
    """The metadata of an object in a bucket."""

    key: str
    nbytes: int
    etag: str | None
    modified_at: datetime


class ObjectContent(Value, frozen=True):
    """Bytes of an object, with the metadata that came in the same answer."""

    data: memoryview
    """The bytes of the range that was read. Empty if only metadata was requested."""
    metadata: RemoteObject
    attributes: Mapping[str, str]
    """HTTP headers and user-defined metadata of the object."""


class HedgeDelays:
    """Decides how long to wait for an answer before the request is sent a second time.

    Of many requests, some are always slow because a server is busy or packets are lost. A request
    that takes several times as long as recent ones of its size is sent again, and the first answer
    counts ("hedged requests"). Only few requests are that slow, so this costs little.
    """

    def __init__(self) -> None:
        self._lock = make_fork_safe(threading.Lock())
        self._recent_seconds: dict[int, deque[float]] = {}

    def record_answer(self, nbytes: int, seconds: float) -> None:
        """Record how long an answer of `nbytes` bytes took."""
        with self._lock:
            size_class = _get_size_class(nbytes)
            if size_class not in self._recent_seconds:
                self._recent_seconds[size_class] = deque(maxlen=RECORDED_ANSWERS)
            self._recent_seconds[size_class].append(seconds)

    def get_delay_s(self, nbytes: int) -> float:
        """Return how long to wait for an answer of `nbytes` bytes before a second request."""
        with self._lock:
            recent_seconds = list(self._recent_seconds.get(_get_size_class(nbytes), ()))
        if len(recent_seconds) < MIN_ANSWERS:
            return UNKNOWN_DELAY_S
        return max(MIN_DELAY_S, LATE_FACTOR * median(recent_seconds))


def _get_size_class(nbytes: int) -> int:
    """Return the size class of an answer. Sizes in a class differ by a factor of less than four."""
    return nbytes.bit_length() // 2


class Upload:
    """A running upload of one object, which is written from front to back.

    obstore sends the bytes in the background. It uses the memory of the caller until it has sent
    them.
    """

    def __init__(self, bucket: Bucket, key: str, file: AsyncWritableFile) -> None:
        self._bucket = bucket
        self._key = key
        self._file: AsyncWritableFile | None = file
        self._lent_views: list[memoryview] = []
        """Memory that obstore may still use."""
        self.nbytes = 0

    def write(self, data: Buffer, /) -> int:
        """Append bytes to the object, and return how many."""
        view = memoryview(data)
        for start in range(0, view.nbytes, PART_NBYTES):
            if self._bucket.keeps_memory:
                # This store never releases memory. To check all parts again for each new part would
                # take quadratic time.
                self._lent_views.clear()
            else:
                self._lent_views = [lent for lent in self._lent_views if not is_released(lent)]
            part = view[start : start + PART_NBYTES]
            self._lent_views.append(part)
            self._bucket.run_once(partial(self._write_part, part), self._key, "uploading it")
        self.nbytes += view.nbytes
        return view.nbytes

    async def _write_part(self, part: memoryview) -> None:
        # obstore cannot stop in the middle of a write. If the caller is interrupted, the write goes
        # on, and `release` waits for it.
        await asyncio.shield(track_request(self._get_file().write(part)))

    async def finish(self, *, publish: bool) -> None:
        """Publish the object, or discard it if `publish` is False."""
        file = self._get_file()
        try:
            if publish:
                await track_request(file.close())
            else:
                await track_request(file.__aexit__(NotCommitted, None, None))
        finally:
            # obstore stops an upload only when nobody has a reference to its file.
            del file
            await self.release()

    async def release(self) -> None:
        """Stop the upload, and wait until obstore has released the memory of the caller."""
        # Without references to the file, obstore stops its upload.
        self._file = None
        await poll_until(self._has_released_memory)

    def _has_released_memory(self) -> bool:
        return self._bucket.keeps_memory or all(map(is_released, self._lent_views))

    def _get_file(self) -> AsyncWritableFile:
        if self._file is None:
            raise StoreError("the upload was stopped because the program ends")
        return self._file


class Listing:
    """A listing of all objects under a prefix, page by page. It can continue after a failure."""

    def __init__(self, client: ObjectStore, prefix: str) -> None:
        self.objects: list[RemoteObject] = []
        """The objects of the pages that were received."""
        self._client = client
        self._prefix = prefix
        self._pages: AsyncIterator[Sequence[ObjectMeta]] | None = None

    async def receive_page(self) -> bool:
        """Add the objects of the next page to `objects`. Returns False if there are no more pages.

        After a failed call, the next call continues behind the last object.
        """
        if self._pages is None:
            self._pages = self._start()
        try:
            page = await track_request(anext(self._pages))
        except StopAsyncIteration:
            return False
        except BaseException:
            # The stream of pages is broken. The next call starts another one.
            self._pages = None
            raise
        self.objects.extend(map(_parse_metadata, page))
        return True

    def _start(self) -> AsyncIterator[Sequence[ObjectMeta]]:
        """Return the pages behind the last object that was received.

        If the store does not sort its keys, the objects are dropped and the listing starts anew.
        """
        import obstore

        # A listing can only continue behind a key. In another order, objects with smaller keys may
        # be missing.
        keys = [remote_object.key for remote_object in self.objects]
        if keys != sorted(keys):
            self.objects.clear()
        last_key = self.objects[-1].key if self.objects else None
        pages = obstore.list(
            self._client,
            self._prefix.rstrip("/") or None,
            offset=last_key,
            chunk_size=LIST_PAGE_OBJECTS,
        )
        return aiter(pages)


class Bucket:
    """A bucket of an object store, and its client. Every request of Holdfast is one of its methods.

    Every method may raise `StoreError`. Its `errno` is ENOENT if there is no such object.
    """

    def __init__(self, root: str, client: ObjectStore) -> None:
        """Create a bucket.

        Args:
            root: The URL of the bucket.
            client: A store of obstore whose root is this bucket.
        """
        self.root = root
        self.client = client
        self.keeps_memory = type(client).__name__ == "MemoryStore"
        """Whether the store is in this process and keeps the memory of what is put."""
        self.supports_conditions: bool | None = None
        """Whether the store honors the conditions of a put. None until a save has tried it."""
        self.hedge_delays = HedgeDelays()
        # The caller may have passed a client without such a setting.
        retry_config = getattr(client, "retry_config", None) or {}
        self._client_retries: int = retry_config.get("max_retries", OBSTORE_RETRIES)

    def url(self, key: str) -> str:
        """Return the URL of an object."""
        return f"{self.root}/{key}"

    def get_range(
        self, key: str, start: int, stop: int, *, etag: str | None = None
    ) -> ObjectContent:
        """Return a range of bytes of an object, or fewer if the object ends before `stop`.

        Args:
            key: The key of the object.
            start: The first byte.
            stop: The byte behind the last one.
            etag: The ETag that the object must have.

        Raises:
            Truncated: The object ends before `start`.
            Replaced: The object has another ETag.
        """
        options: GetOptions = {"range": (start, stop)}
        if etag is not None:
            options["if_match"] = etag
        send = partial(self._get_hedged, key, options, nbytes=stop - start, max_nbytes=None)
        return self._run(send, key, "reading it")

    def get_object(self, key: str, max_nbytes: int) -> ObjectContent:
        """Return a whole object. Raises `LimitExceeded`, without reading it, if it is too long."""
        # The size is not known before the answer. Most objects that are read this way are small
        # documents, so an answer counts as late when one of 1 MiB would be late.
        send = partial(self._get_hedged, key, {}, nbytes=1 << 20, max_nbytes=max_nbytes)
        return self._run(send, key, "reading it")

    def head(self, key: str) -> RemoteObject:
        """Return the metadata of an object."""
        import obstore

        metadata = self._run(
            lambda: track_request(obstore.head_async(self.client, key)), key, "looking at it"
        )
        return _parse_metadata(metadata)

    def head_with_attributes(self, key: str) -> ObjectContent:
        """Return the metadata and the attributes of an object, without its content."""
        import obstore

        async def send() -> ObjectContent:
            request = obstore.get_async(self.client, key, options={"head": True})
            return _parse_answer(await track_request(request), memoryview(b""))

        return self._run(send, key, "looking at it")

    def list_objects(self, prefix: str, max_objects: int) -> list[RemoteObject]:
        """Return all objects under a prefix, sorted by key.

        Args:
            prefix: The prefix, which is empty or ends with a slash.
            max_objects: The largest number of objects.

        Raises:
            LimitExceeded: There are more objects.
        """
        listing = Listing(self.client, prefix)

        async def receive_all() -> None:
            # Each page is repeated by itself, so a long listing may survive many failures.
            while await self._repeat(listing.receive_page, prefix, "listing it", MAX_RETRIES):
                if len(listing.objects) > max_objects:
                    raise LimitExceeded(
                        f"there are more than {max_objects:,} objects under this prefix; "
                        "open a longer prefix, or raise Limits(files=…)",
                        file=self.url(prefix),
                        expected=max_objects,
                    )

        self._run(receive_all, prefix, "listing it", can_repeat=False)
        return sorted(listing.objects, key=lambda remote_object: remote_object.key)

    def list_folder(self, prefix: str) -> tuple[list[str], list[RemoteObject]]:
        """Return the prefixes and the objects directly under a prefix."""
        import obstore

        # obstore requires None for the top of a bucket.
        folder = prefix.rstrip("/") or None
        answer = self._run(
            lambda: track_request(obstore.list_with_delimiter_async(self.client, folder)),
            prefix,
            "listing it",
        )
        folder_prefixes = sorted(answer["common_prefixes"])
        objects = [_parse_metadata(metadata) for metadata in answer["objects"]]
        return folder_prefixes, objects

    def put(
        self,
        key: str,
        data: Buffer,
        *,
        create: bool = False,
        if_match: str | None = None,
        attributes: Mapping[str, str] | None = None,
    ) -> str | None:
        """Put a small object with one request, and return its ETag.

        Args:
            key: The key of the object.
            data: The content.
            create: Whether the object must not exist yet.
            if_match: The ETag of the object that is replaced.
            attributes: HTTP headers and user-defined metadata of the object.

        Raises:
            ConditionFailed: The condition did not hold, or it is not known whether it did.
        """
        import obstore

        mode: PutMode = "overwrite"
        if create:
            mode = "create"
        elif if_match is not None:
            mode = {"e_tag": if_match}

        async def send() -> str | None:
            async with lend_memory(data, is_kept=self.keeps_memory) as view:
                request = obstore.put_async(
                    self.client,
                    key,
                    view,
                    mode=mode,
                    use_multipart=False,
                    attributes=_copy_attributes(attributes),
                )
                answer = await track_request(request)
                return answer["e_tag"]

        return self._run(send, key, "writing it", can_repeat=mode == "overwrite")

    @contextmanager
    def open_upload(
        self,
        key: str,
        nbytes: int,
        *,
        attributes: Mapping[str, str] | None = None,
        parts_at_once: int | None = None,
    ) -> Iterator[Upload]:
        """Upload an object of any size. The block writes its content from front to back.

        The object exists when the block has ended. If the block fails, nothing is published.

        Args:
            key: The key of the object.
            nbytes: The size of the object.
            attributes: HTTP headers and user-defined metadata of the object.
            parts_at_once: How many parts are sent at the same time.
        """
        import obstore

        # Large objects need larger parts, because their number is limited.
        part_nbytes = PART_NBYTES
        while part_nbytes * MAX_UPLOAD_PARTS < nbytes:
            part_nbytes *= 2
        file = obstore.open_writer_async(
            self.client,
            key,
            buffer_size=part_nbytes,
            max_concurrency=parts_at_once or UPLOAD_PARTS_AT_ONCE,
            attributes=_copy_attributes(attributes),
        )
        upload = Upload(self, key, file)
        # Now only the upload has a reference to the file, so it can stop obstore by dropping it.
        del file
        # If the program ends during the block, the event loop stops the upload.
        unfinished_uploads[upload] = upload.release
        try:
            try:
                yield upload
            except BaseException:
                # The error of the block says more than a failure of the clean-up.
                with suppress(HoldfastError):
                    self.run_once(partial(upload.finish, publish=False), key, "uploading it")
                raise
            self.run_once(partial(upload.finish, publish=True), key, "uploading it")
        except OSError as error:
            raise translate_error(error, self.url(key), "uploading it") from None
        finally:
            unfinished_uploads.pop(upload, None)

    def delete(self, keys: Sequence[str]) -> None:
        """Delete objects. Missing objects are ignored."""
        import obstore

        async def send(batch: list[str]) -> None:
            await track_request(obstore.delete_async(self.client, batch))

        for start in range(0, len(keys), DELETE_OBJECTS):
            batch = list(keys[start : start + DELETE_OBJECTS])
            # S3 ignores missing objects. Other stores answer with an error, for which
            # `find_existing` returns None.
            find_existing(self._run, partial(send, batch), batch[0], "deleting it")

    def copy(self, source_key: str, target_key: str) -> None:
        """Copy an object in this bucket, without downloading it."""
        import obstore

        def send() -> Awaitable[None]:
            return track_request(obstore.copy_async(self.client, source_key, target_key))

        self._run(send, source_key, "copying it")

    async def _get_hedged(
        self, key: str, options: GetOptions, *, nbytes: int, max_nbytes: int | None
    ) -> ObjectContent:
        """Read an object, and send the same request again if the answer is late (`HedgeDelays`).

        Args:
            key: The key of the object.
            options: The range to read and the ETag to require.
            nbytes: The usual size of such an answer, which decides when it is late.
            max_nbytes: The largest size that the object may have, or None.
        """
        # Times are measured from the first request on, also if the second one is answered first: this
        # is how long the caller has waited.
        start_s = time.monotonic()
        tasks = {asyncio.ensure_future(self._get_once(key, options, max_nbytes))}
        errors: list[BaseException] = []
        try:
            done_tasks, _ = await asyncio.wait(tasks, timeout=self.hedge_delays.get_delay_s(nbytes))
            if not done_tasks:
                tasks.add(asyncio.ensure_future(self._get_once(key, options, max_nbytes)))
            # The first success counts. An error counts only if both requests fail.
            while tasks:
                done_tasks, tasks = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                for task in done_tasks:
                    error = task.exception()
                    if error is None:
                        self.hedge_delays.record_answer(nbytes, time.monotonic() - start_s)
                        return task.result()
                    errors.append(error)
            raise errors[-1]
        finally:
            for task in tasks:
                task.cancel()

    async def _get_once(
        self, key: str, options: GetOptions, max_nbytes: int | None
    ) -> ObjectContent:
        """Send one request for content, and check that the answer is what was requested."""
        import obstore

        result: GetResult = await track_request(
            obstore.get_async(self.client, key, options=options)
        )
        object_nbytes = result.meta["size"]
        if max_nbytes is not None and object_nbytes > max_nbytes:
            raise LimitExceeded(
                f"an index of {object_nbytes:,} bytes is more than "
                f"Limits(index_nbytes={max_nbytes:,})",
                file=self.url(key),
                expected=max_nbytes,
                found=object_nbytes,
            )

        start, stop = result.range
        data = memoryview(await track_request(result.bytes_async()))
        requested_range = options.get("range")
        is_other_range = isinstance(requested_range, tuple) and start != requested_range[0]
        if is_other_range or data.nbytes != stop - start:
            raise Truncated(
                f"the store returned {data.nbytes:,} bytes from {start:,} on, which is not the "
                "requested range",
                file=self.url(key),
                offset=start + data.nbytes,
            )
        return _parse_answer(result, data)

    def _run(
        self, send: Callable[[], Awaitable[T]], key: str, action: str, *, can_repeat: bool = True
    ) -> T:
        """Send a request and wait. Repeat it after a transient failure if `can_repeat` is set.

        Args:
            send: Sends the request once.
            key: The key of the object, for messages.
            action: What the request does, for messages: `reading it`.
            can_repeat: Whether the request can safely be sent twice.
        """
        if not can_repeat:
            return self.run_once(send, key, action)
        return wait_for_answer(lambda: self._repeat(send, key, action, MAX_RETRIES))

    def run_once(self, send: Callable[[], Awaitable[T]], key: str, action: str) -> T:
        """Send a request and wait, without repeating it. The arguments are those of `_run`."""
        return wait_for_answer(lambda: self._repeat(send, key, action, 0))

    async def _repeat(
        self, send: Callable[[], Awaitable[T]], key: str, action: str, max_retries: int
    ) -> T:
        """Send a request, and repeat it while it fails in a way that may pass.

        Args:
            send: Sends the request once.
            key: The key of the object, for messages.
            action: What the request does, for messages: `reading it`.
            max_retries: How often the request may be repeated, by obstore and here together.
        """
        start_s = time.monotonic()
        attempt_count = 0
        for pause_s in iterate_pauses():
            try:
                return await send()
            except Exception as error:
                may_pass = is_transient(error)
                translated_error = translate_error(error, self.url(key), action)
                attempt_count += 1 + count_client_retries(error, action, self._client_retries)
            elapsed_s = time.monotonic() - start_s
            has_time = elapsed_s + pause_s <= MAX_RETRY_S
            if not (may_pass and has_time and attempt_count <= max_retries):
                break
            await asyncio.sleep(pause_s)

        if may_pass and isinstance(translated_error, HoldfastError):
            if attempt_count > 1:
                translated_error.message += f"; asked {attempt_count} times in {elapsed_s:.1f} s"
            else:
                translated_error.message += "; asked once"
        raise translated_error from None


def _parse_metadata(metadata: ObjectMeta) -> RemoteObject:
    """Return the metadata of an object from an answer of obstore."""
    etag = metadata["e_tag"]
    # Azure has quotes around the ETag in the answer about an object, and none in a listing.
    if etag and not etag.endswith('"'):
        etag = f'"{etag}"'
    return RemoteObject(metadata["path"], metadata["size"], etag, metadata["last_modified"])


def _parse_answer(result: GetResult, data: memoryview) -> ObjectContent:
    """Return the content of an answer of obstore, whose body is `data`."""
    attributes = {str(name): value for name, value in result.attributes.items()}
    return ObjectContent(data, _parse_metadata(result.meta), attributes)


def _copy_attributes(attributes: Mapping[str, str] | None) -> dict[str, str] | None:
    """Return attributes as a dict, as obstore requires it; None if there are none."""
    return dict(attributes) if attributes else None


_lock = make_fork_safe(threading.Lock())
_buckets: dict[tuple[object, ...], Bucket] = {}
at_fork(after_in_child=_buckets.clear)


def get_bucket(url: Url) -> Bucket:
    """Return the bucket of a URL.

    All URLs of a bucket share a `Bucket`, as long as the environment does not change. Its client
    came with the URL, or is created from the environment.
    """
    if is_forked():
        raise make_fork_error(url)
    try:
        import obstore.store  # noqa: F401
    except ImportError:
        raise Unsupported(
            f"{url.scheme}:// needs the client of object stores, the package obstore: "
            "pip install obstore",
            file=str(url),
        ) from None

    # A client that the caller passed is found by its id. The bucket keeps it alive, so the id cannot
    # stand for another client. Without one, the client depends on the environment variables.
    if url.client is not None:
        cache_key: tuple[object, ...] = url.root, id(url.client)
    elif url.scheme == "memory":
        cache_key = url.root, ()
    else:
        names = sorted(name for name in os.environ if name.startswith(CLIENT_VARIABLES))
        cache_key = url.root, tuple([(name, os.environ[name]) for name in names])
    with _lock:
        if cache_key not in _buckets:
            mark_used()
            client = _create_client(url) if url.client is None else url.client
            # obstore checks the type of a client that the caller passed.
            _buckets[cache_key] = Bucket(url.root, client)  # type: ignore[arg-type]
        return _buckets[cache_key]


def _create_client(url: Url) -> ObjectStore:
    """Create a client for the bucket of a URL. Its settings are those of the environment."""
    from obstore import store as stores

    if url.scheme == "memory":
        return stores.MemoryStore()
    # A server that sends nothing for a minute has stalled. Uploads of large parts over slow lines
    # may take minutes.
    options: ClientConfig = {
        "timeout": timedelta(minutes=10),
        "connect_timeout": timedelta(seconds=10),
        "read_timeout": timedelta(seconds=60),
    }
    # Whoever sets the URL of a server without TLS wants to use it without TLS.
    endpoints = [os.environ.get(name, "") for name in ENDPOINT_VARIABLES.get(url.scheme, ())]
    if any(endpoint.startswith("http://") for endpoint in endpoints):
        options["allow_http"] = True
    retry: RetryConfig = {
        "max_retries": MAX_RETRIES,
        "retry_timeout": timedelta(seconds=MAX_RETRY_S),
        "backoff": {
            "init_backoff": timedelta(seconds=FIRST_PAUSE_S),
            "max_backoff": timedelta(seconds=MAX_PAUSE_S),
            "base": 2,
        },
    }
    try:
        if url.scheme == "az":
            return stores.AzureStore(
                container_name=url.root.partition("://")[2],
                client_options=options,
                retry_config=retry,
            )
        if url.scheme == "s3" and not os.environ.get(CHECKSUM_VARIABLE):
            # The signature of a request needs this hash anyway. In a header of its own, it lets any
            # server compare what it received.
            return stores.from_url(
                url.root, client_options=options, retry_config=retry, checksum_algorithm="SHA256"
            )
        return stores.from_url(url.root, client_options=options, retry_config=retry)
    except Exception as error:
        message = f"cannot create a client for {url.root}: {describe_failure(error)}"
        raise StoreError(message, file=str(url)) from None
