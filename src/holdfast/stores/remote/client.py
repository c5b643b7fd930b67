"""`Bucket`: every request to an object store, and the meaning of its answers.

1. A range is requested with the ETag of the object that was opened. If another object has the key by
   now, the request raises `Replaced` instead of returning a mixture.
2. Requests that can safely be sent twice are repeated after a failure that may pass: a 5xx status, a
   lost connection, a body that breaks off, or another range than the requested one. These are reads,
   lists, deletions, copies, and puts without a condition. `_again` repeats them with growing pauses, at
   most `RETRIES` times and for three minutes. Retries that obstore makes and reports count as well.
3. Not repeated are a put with a condition, and the start and the end of an upload in parts. Such a put
   may succeed and its answer be lost. Sent again, it fails because the object exists. So callers draw no
   conclusion from the answer, and read what is there (engine/targets/bucket_commit).
4. A request that takes much longer than others of its size is sent a second time (`Patience`), and the
   first answer counts.
5. Messages have the URL of the object, what the server meant, and the number of attempts. They never
   contain the text of obstore, which may include signed URLs.
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
from holdfast.stores.remote import loop
from holdfast.stores.remote.failures import (
    AGAIN_S,
    FIRST_S,
    LONGEST_S,
    count_client_retries,
    describe_failure,
    find_existing,
    is_transient,
    pauses,
    translate_error,
)
from holdfast.stores.remote.loop import (
    is_released,
    lend_memory,
    poll_until,
    track_request,
    wait_for_answer,
)
from holdfast.stores.remote.url import PART_NBYTES, UPLOADING, Url

if TYPE_CHECKING:
    from obstore import AsyncWritableFile, GetOptions, GetResult, ObjectMeta, PutMode
    from obstore.store import ClientConfig, ObjectStore, RetryConfig

T = TypeVar("T")
Buffer = bytes | memoryview

RETRIES = 8  # How often a request that may be repeated is: by obstore, by us, and in all.
DEFAULT_RETRIES = 10  # How often obstore repeats a request if it was not told how often.
LISTED = 1000  # Keys of a list that are taken at a time: as many as S3 puts on a page.
PARTS = 10_000

ENDPOINTS = {
    "s3": ("AWS_ENDPOINT_URL", "AWS_ENDPOINT"),
    "az": ("AZURE_ENDPOINT", "AZURE_STORAGE_ENDPOINT"),
}
"""Where the environment says that a server is another than the cloud's; one without TLS is meant so."""

PLAIN = "HOLDFAST_WITHOUT_CHECKSUMS"  # In the environment: requests to S3 go without checksums, which a server may refuse.
ENVIRONMENT = ("AWS_", "GOOGLE_", "AZURE_", "HOLDFAST_")


KNOWN = 16  # Answers that are remembered of each size.
ENOUGH = 4  # Answers below which nothing is known.
AT_FIRST_S = 10.0  # How long to wait while nothing is known.
LEAST_S = (
    0.5  # No answer is waited for less: a busy moment of this machine is no reason to ask twice.
)
TIMES = 4.0  # How many times as long as usual is too long.


class RemoteObject(Value, frozen=True):
    key: str
    nbytes: int
    etag: str | None
    changed: datetime


class Got(Value, frozen=True):
    data: memoryview
    start: int
    found: RemoteObject
    attributes: Mapping[str, str]


class Patience:
    """Decides when a request is late, from the recent times of answers of the same size.

    Of many requests, some are always slow because a server is busy or packets are lost. A request that
    takes several times as long as usual is sent again. Only few requests are that slow.
    """

    def __init__(self) -> None:
        self._lock = make_fork_safe(threading.Lock())
        self._took: dict[int, deque[float]] = {}

    def add_answer(self, nbytes: int, seconds: float) -> None:
        """Record the time of an answer of `nbytes` bytes."""
        with self._lock:
            self._took.setdefault(_size(nbytes), deque(maxlen=KNOWN)).append(seconds)

    def of(self, nbytes: int) -> float:
        """Return how many seconds to wait for an answer of `nbytes` bytes before a second request."""
        with self._lock:
            took = list(self._took.get(_size(nbytes), ()))
        return max(LEAST_S, TIMES * median(took)) if len(took) >= ENOUGH else AT_FIRST_S


def _size(nbytes: int) -> int:
    """Return the size class of an answer. The sizes in a class differ by a factor of less than four."""
    return nbytes.bit_length() // 2


class Upload:
    """A running upload of an object, which is written from front to back."""

    def __init__(self, bucket: Bucket, key: str, file: AsyncWritableFile) -> None:
        self._bucket, self._key, self._file = bucket, key, file
        self._lent: list[
            memoryview
        ] = []  # What the client has not uploaded yet, as far as anybody looked.
        self.nbytes = 0

    def write(self, data: Buffer, /) -> int:
        whole = memoryview(data)
        for start in range(0, whole.nbytes, PART_NBYTES):
            # What the store keeps is never given back: to look for it again with each part would cost their square.
            self._lent = (
                [] if self._bucket.keeps else [one for one in self._lent if not is_released(one)]
            )
            self._lent.append(whole[start : start + PART_NBYTES])
            self._bucket.once(self._write, self._key, "uploading it")
        self.nbytes += whole.nbytes
        return whole.nbytes

    async def _write(self) -> None:
        # What is half written cannot be given up: who is interrupted here goes, and this is waited for before that.
        await asyncio.shield(track_request(self._file.write(self._lent[-1])))

    async def end(self, *, whole: bool) -> None:
        """Publish the object if `whole` is set, otherwise discard it."""
        try:
            await track_request(
                self._file.close() if whole else self._file.__aexit__(NotCommitted, None, None)
            )
        finally:
            await self.drop()

    async def drop(self) -> None:
        """Stop the upload and wait until the client has released its memory."""
        self.__dict__.pop("_file", None)
        await poll_until(lambda: self._bucket.keeps or all(map(is_released, self._lent)))


class Bucket:
    def __init__(self, root: str, client: ObjectStore) -> None:
        self.root = root
        self.client = client
        self.keeps = (
            type(client).__name__ == "MemoryStore"
        )  # Whether what is put is not sent anywhere, but kept where it is.
        retry_config = getattr(client, "retry_config", None) or {}
        self._client_retries: int = retry_config.get("max_retries", DEFAULT_RETRIES)
        self.patience = Patience()
        self.conditions: bool | None = (
            None  # Whether the store keeps the conditions of a put, once somebody has tried.
        )
        self.requests = 0  # Requests for content and uploads that were sent.

    def url(self, key: str) -> str:
        return f"{self.root}/{key}"

    def get(self, key: str, start: int, stop: int, *, etag: str | None = None) -> Got:
        """A range, pinned to an etag. Less than that where the object ends before; `Truncated` where it ends before `start`."""
        options: GetOptions = {"range": (start, stop)}
        return self._get(key, options, etag, nbytes=stop - start)

    def tail(self, key: str, nbytes: int, *, etag: str | None = None) -> Got:
        """Return the last `nbytes` bytes, or the whole object if it is shorter."""
        try:
            return self._get(key, {"range": {"suffix": nbytes}}, etag, nbytes=nbytes)
        except Unsupported:
            # Azure has no such request.
            found = self.head(key)
            return self.get(
                key, max(0, found.nbytes - nbytes), max(found.nbytes, 1), etag=etag or found.etag
            )

    def whole(self, key: str, most: int) -> Got:
        """Return a whole object. Raises `LimitExceeded`, without reading it, if it is longer than `most`."""
        return self._get(key, {}, None, nbytes=1 << 20, most=most)

    def head(self, key: str) -> RemoteObject:
        import obstore

        return _found(
            self._run(
                lambda: track_request(obstore.head_async(self.client, key)), key, "looking at it"
            )
        )

    def described(self, key: str) -> Got:
        """Return the metadata and the attributes of an object, without its content."""
        import obstore

        async def ask() -> Got:
            result = await track_request(
                obstore.get_async(self.client, key, options={"head": True})
            )
            attributes = {str(name): value for name, value in result.attributes.items()}
            return Got(memoryview(b""), 0, _found(result.meta), attributes)

        return self._run(ask, key, "looking at it")

    def below(self, prefix: str, most: int) -> list[RemoteObject]:
        """Return all objects under a prefix, sorted by key. The prefix is empty or ends with a slash."""
        import obstore

        rows: list[RemoteObject] = []
        pages: AsyncIterator[Sequence[ObjectMeta]] | None = None

        async def page() -> Sequence[ObjectMeta]:
            """The next; none at the end. After a failure the list goes on behind what came, or anew where it has no order."""
            nonlocal pages
            if pages is None:
                keys = [one.key for one in rows]
                if keys != sorted(keys):
                    rows.clear()
                last = rows[-1].key if rows else None
                pages = aiter(
                    obstore.list(
                        self.client, prefix.rstrip("/") or None, offset=last, chunk_size=LISTED
                    )
                )
            try:
                return await track_request(anext(pages))
            except StopAsyncIteration:
                return ()
            except BaseException:
                pages = None
                raise

        async def collect() -> None:
            while found := await self._again(page, prefix, "listing it", RETRIES):
                rows.extend(map(_found, found))
                if len(rows) > most:
                    raise LimitExceeded(
                        f"more objects than Limits(files={most})",
                        file=self.url(prefix),
                        expected=most,
                    )

        self._run(collect, prefix, "listing it", again=False)
        return sorted(rows, key=lambda found: found.key)

    def folders(self, prefix: str) -> tuple[list[str], list[RemoteObject]]:
        """Return the prefixes and the objects directly under a prefix."""
        import obstore

        found = self._run(
            lambda: track_request(
                obstore.list_with_delimiter_async(self.client, prefix.rstrip("/") or None)
            ),
            prefix,
            "listing it",
        )
        return sorted(found["common_prefixes"]), [_found(one) for one in found["objects"]]

    def put(
        self, key: str, data: Buffer, *, create: bool = False, match: str | None = None,
        attributes: Mapping[str, str] | None = None,
    ) -> str | None:  # fmt: skip
        """Put a small object with one request, and return its ETag.

        Raises:
            ConditionFailed: The condition did not hold, or it is not known whether it did.
        """
        import obstore

        mode: PutMode = (
            "create" if create else {"e_tag": match} if match is not None else "overwrite"
        )
        self.requests += 1
        given = dict(attributes) if attributes else None

        async def ask() -> str | None:
            async with lend_memory(data, kept=self.keeps) as view:
                put = obstore.put_async(
                    self.client, key, view, mode=mode, use_multipart=False, attributes=given
                )
                return (await track_request(put))["e_tag"]

        return self._run(ask, key, "writing it", again=mode == "overwrite")

    @contextmanager
    def uploading(
        self,
        key: str,
        nbytes: int,
        *,
        attributes: Mapping[str, str] | None = None,
        parts: int | None = None,
    ) -> Iterator[Upload]:
        """Put an object of any size from front to back, in parts of which several are under way (`parts` at the most). It is there,
        all of it, when the block ends; a block that fails leaves nothing."""
        import obstore

        part = PART_NBYTES
        while part * PARTS < nbytes:
            part *= 2
        self.requests += max(1, -(-nbytes // part))
        given, at_once = dict(attributes) if attributes else None, parts or UPLOADING
        file = obstore.open_writer_async(
            self.client, key, buffer_size=part, max_concurrency=at_once, attributes=given
        )
        upload = Upload(self, key, file)
        del file
        loop.unfinished[upload] = upload.drop
        try:
            try:
                yield upload
            except BaseException:
                with suppress(HoldfastError):
                    self.once(lambda: upload.end(whole=False), key, "uploading it")
                raise
            self.once(lambda: upload.end(whole=True), key, "uploading it")
        except OSError as error:
            raise translate_error(error, self.url(key), "uploading it") from None
        finally:
            loop.unfinished.pop(upload, None)

    def delete(self, keys: Sequence[str]) -> None:
        """Delete objects. Missing objects are ignored."""
        import obstore

        for first in range(0, len(keys), 1000):
            some = list(keys[first : first + 1000])

            def ask(some: list[str] = some) -> Awaitable[None]:
                return track_request(obstore.delete_async(self.client, some))

            find_existing(self._run, ask, some[0], "deleting it")

    def copy(self, key: str, to: str) -> None:
        import obstore

        self.requests += 1
        self._run(
            lambda: track_request(obstore.copy_async(self.client, key, to)), key, "copying it"
        )

    def _get(
        self,
        key: str,
        options: GetOptions,
        etag: str | None,
        *,
        nbytes: int,
        most: int | None = None,
    ) -> Got:
        if etag is not None:
            options = {**options, "if_match": etag}
        return self._run(lambda: self._hedged(key, options, nbytes, most), key, "reading it")

    async def _hedged(self, key: str, options: GetOptions, nbytes: int, most: int | None) -> Got:
        """Return the first answer of a request, and of a second one that is sent if the first is late."""
        begun = time.monotonic()
        first = asyncio.ensure_future(self._answer(key, options, most))
        asked = {first}
        try:
            done, _ = await asyncio.wait(asked, timeout=self.patience.of(nbytes))
            if not done:
                asked.add(asyncio.ensure_future(self._answer(key, options, most)))
            while True:
                done, waiting = await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
                for one in done:
                    if one.exception() is None or not waiting:
                        got = one.result()
                        self.patience.add_answer(nbytes, time.monotonic() - begun)
                        return got
                asked = waiting
        finally:
            for one in asked:
                one.cancel()

    async def _answer(self, key: str, options: GetOptions, most: int | None) -> Got:
        import obstore

        self.requests += 1
        result: GetResult = await track_request(
            obstore.get_async(self.client, key, options=options)
        )
        found = _found(result.meta)
        if most is not None and found.nbytes > most:
            message = (
                f"an index of {found.nbytes:,} bytes is more than Limits(index_nbytes={most:,})"
            )
            raise LimitExceeded(message, file=self.url(key), expected=most, found=found.nbytes)
        start, stop = result.range
        data = memoryview(await track_request(result.bytes_async()))
        wanted = options.get("range")
        if data.nbytes != stop - start or (isinstance(wanted, tuple) and start != wanted[0]):
            message = f"the store answered with {data.nbytes:,} bytes from {start:,} on, and not with what was asked for"
            raise Truncated(message, file=self.url(key), offset=start + data.nbytes)
        return Got(
            data, start, found, {str(name): value for name, value in result.attributes.items()}
        )

    def _run(
        self, ask: Callable[[], Awaitable[T]], key: str, doing: str, *, again: bool = True
    ) -> T:
        """Send a request and wait. Repeat it after a transient failure, unless `again` is False."""
        return (
            wait_for_answer(lambda: self._again(ask, key, doing, RETRIES))
            if again
            else self.once(ask, key, doing)
        )

    def once(self, ask: Callable[[], Awaitable[T]], key: str, doing: str) -> T:
        """Send a request and wait, without repeating it."""
        return wait_for_answer(lambda: self._again(ask, key, doing, 0))

    async def _again(
        self, ask: Callable[[], Awaitable[T]], key: str, doing: str, retries: int
    ) -> T:
        begun, asked = time.monotonic(), 0
        for pause in pauses():
            try:
                return await ask()
            except Exception as error:
                passes, raised = is_transient(error), translate_error(error, self.url(key), doing)
                asked += 1 + count_client_retries(error, doing, self._client_retries)
            took = time.monotonic() - begun
            if not passes or asked > retries or took + pause > AGAIN_S:
                break
            await asyncio.sleep(pause)
        if passes and isinstance(raised, HoldfastError):
            raised.message += (
                f"; asked {asked} times in {took:.1f} s" if asked > 1 else "; asked once"
            )
        raise raised from None


def _found(meta: ObjectMeta) -> RemoteObject:
    etag = meta["e_tag"]
    # Azure has it in quotes in the answer about an object, and without them in a list.
    quoted = etag if not etag or etag.endswith('"') else f'"{etag}"'
    return RemoteObject(meta["path"], meta["size"], quoted, meta["last_modified"])


_lock = make_fork_safe(threading.Lock())
_buckets: dict[tuple[object, ...], Bucket] = {}
at_fork(after_in_child=_buckets.clear)


def bucket_of(url: Url) -> Bucket:
    """The bucket of a URL, with the client that came with it or one that is made from the environment."""
    if loop.is_forked():
        raise loop.make_fork_error(url)
    try:
        import obstore.store  # noqa: F401
    except ImportError:
        message = f"{url.scheme}:// needs the client of object stores, the package obstore: pip install obstore"
        raise Unsupported(message, file=str(url)) from None
    if url.client is not None:
        return _kept((url.root, id(url.client)), lambda: Bucket(url.root, url.client))  # type: ignore[arg-type]  # obstore checks it
    names = (
        []
        if url.scheme == "memory"
        else [name for name in os.environ if name.startswith(ENVIRONMENT)]
    )
    given = tuple([(name, os.environ[name]) for name in sorted(names)])
    return _kept((url.root, given), lambda: Bucket(url.root, _made(url)))


def _kept(key: tuple[object, ...], make: Callable[[], Bucket]) -> Bucket:
    with _lock:
        if key not in _buckets:
            loop.mark_used()
            _buckets[key] = make()
        return _buckets[key]


def _made(url: Url) -> ObjectStore:
    """Make a client for a bucket from the environment."""
    from obstore import store as stores

    if url.scheme == "memory":
        return stores.MemoryStore()
    # A server that says nothing for a minute has stalled; uploads of large parts over thin lines take their time.
    options: ClientConfig = {
        "timeout": timedelta(minutes=10),
        "connect_timeout": timedelta(seconds=10),
        "read_timeout": timedelta(seconds=60),
    }
    if any(
        os.environ.get(name, "").startswith("http://") for name in ENDPOINTS.get(url.scheme, ())
    ):
        options["allow_http"] = True
    retry: RetryConfig = {
        "max_retries": RETRIES,
        "retry_timeout": timedelta(seconds=AGAIN_S),
        "backoff": {
            "init_backoff": timedelta(seconds=FIRST_S),
            "max_backoff": timedelta(seconds=LONGEST_S),
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
        if url.scheme == "s3" and not os.environ.get(PLAIN):
            # The hash is there: the signature of a request needs it. With it in a header, any server compares what arrived.
            return stores.from_url(
                url.root, client_options=options, retry_config=retry, checksum_algorithm="SHA256"
            )
        return stores.from_url(url.root, client_options=options, retry_config=retry)
    except Exception as error:
        message = f"no client for {url.root}: {describe_failure(error)}"
        raise StoreError(message, file=str(url)) from None
