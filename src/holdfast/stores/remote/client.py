"""`Bucket`: every request to an object store, and what its answers mean.

1. A range is asked for together with the etag of what was opened: another object under the same key is `Replaced`, not a mixture.
2. obstore repeats what may be repeated (server errors, lost connections) with growing pauses. A body that ends too early, or a
   range that is not the one that was asked for, is asked for again here, a few times.
3. A request that takes much longer than others of its size is sent a second time (`patience`); the first answer counts.
4. A put that has a condition may succeed and lose its answer: obstore repeats it, and is told that something is there already. So
   nobody concludes anything from such an answer; whoever puts with a condition reads back what is there (engine/commit/remote).
5. Messages have the URL of the object and what the server meant. Never what obstore says, which may have signed URLs in it.
"""

from __future__ import annotations

import asyncio
import errno
import os
import re
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from holdfast.core.runtime import at_fork, renewed, start
from holdfast.core.value import Value
from holdfast.errors import HoldfastError, LimitExceeded, Replaced, StoreError, Truncated, Unsupported
from holdfast.stores.remote.patience import Patience
from holdfast.stores.remote.url import PART_NBYTES, UPLOADING, Url

if TYPE_CHECKING:
    from obstore import GetOptions, GetResult, ObjectMeta, PutMode, WritableFile
    from obstore.store import ClientConfig, ObjectStore, RetryConfig

__all__ = ["Bucket", "Found", "Got", "Taken", "Upload", "bucket_of"]

T = TypeVar("T")
Buffer = bytes | memoryview

RETRIES = 8
"""How often the client repeats a request that may be repeated."""

TRIES = 4
"""How often an answer that is not what was asked for is asked for again."""

PARTS = 10_000
"""Parts that an upload may have."""

ENDPOINTS = {"s3": ("AWS_ENDPOINT_URL", "AWS_ENDPOINT"), "az": ("AZURE_ENDPOINT", "AZURE_STORAGE_ENDPOINT")}
"""Where the environment says that a server is another than the cloud's; one without TLS is meant so."""

PLAIN = "HOLDFAST_WITHOUT_CHECKSUMS"
"""Set in the environment, this lets requests to S3 go without checksums, for a server that refuses them."""

ENVIRONMENT = ("AWS_", "GOOGLE_", "AZURE_", "HOLDFAST_")


class Taken(StoreError):
    """A condition that a put had did not hold: something else is there, or is there by now."""


class Found(Value, frozen=True):
    """What a store says of an object."""

    key: str
    nbytes: int
    etag: str | None
    changed: datetime


class Got(Value, frozen=True):
    """A part of an object."""

    data: memoryview
    start: int
    found: Found
    attributes: Mapping[str, str]


class Upload:
    """What an object is written to, from front to back."""

    def __init__(self, bucket: Bucket, key: str) -> None:
        self._bucket, self._key = bucket, key
        self.file: WritableFile | None = None
        self.nbytes = 0

    def write(self, data: Buffer, /) -> int:
        assert self.file is not None
        try:
            for start in range(0, memoryview(data).nbytes, PART_NBYTES):
                self.file.write(memoryview(data)[start : start + PART_NBYTES])
        except Exception as error:
            raise self._bucket.refused(error, self._key, "uploading it") from None
        self.nbytes += memoryview(data).nbytes
        return memoryview(data).nbytes


class Bucket:
    """One bucket, or one client that a caller has made."""

    def __init__(self, root: str, client: ObjectStore) -> None:
        self.root = root
        self.client = client
        self.patience = Patience()
        self.conditions: bool | None = None
        """Whether the store keeps the conditions of a put, once somebody has tried."""
        self.requests = 0
        """Requests for content and uploads that were sent."""

    def url(self, key: str) -> str:
        """What a message calls an object."""
        return f"{self.root}/{key}"

    def get(self, key: str, start: int, stop: int, *, etag: str | None = None) -> Got:
        """A range, pinned to an etag. Less than that where the object ends before; `Truncated` where it ends before `start`."""
        options: GetOptions = {"range": (start, stop)}
        return self._asked(key, options, etag, nbytes=stop - start)

    def tail(self, key: str, nbytes: int, *, etag: str | None = None) -> Got:
        """The last so many bytes, or the whole object where it has fewer."""
        try:
            return self._asked(key, {"range": {"suffix": nbytes}}, etag, nbytes=nbytes)
        except Unsupported:
            # Azure has no such request.
            found = self.head(key)
            return self.get(key, max(0, found.nbytes - nbytes), max(found.nbytes, 1), etag=etag or found.etag)

    def whole(self, key: str, most: int) -> Got:
        """A whole object of at most so many bytes; `LimitExceeded` for one that has more, which is not read."""
        return self._asked(key, {}, None, nbytes=1 << 20, most=most)

    def head(self, key: str) -> Found:
        """What there is to say of an object."""
        import obstore

        return _found(self._run(lambda: obstore.head_async(self.client, key), key, "looking at it"))

    def described(self, key: str) -> Got:
        """What there is to say of an object, with its attributes and without its content."""
        import obstore

        async def ask() -> Got:
            result = await obstore.get_async(self.client, key, options={"head": True})
            attributes = {str(name): value for name, value in result.attributes.items()}
            return Got(memoryview(b""), 0, _found(result.meta), attributes)

        return self._run(ask, key, "looking at it")

    def below(self, prefix: str, most: int) -> list[Found]:
        """All objects whose keys begin with a prefix that ends with a slash (or all), sorted by key."""
        import obstore

        async def collect() -> list[Found]:
            rows: list[Found] = []
            async for batch in obstore.list(self.client, prefix.rstrip("/") or None, chunk_size=1000):
                rows += map(_found, batch)
                if len(rows) > most:
                    raise LimitExceeded(f"more objects than Limits(files={most})", file=self.url(prefix), expected=most)
            return rows

        return sorted(self._run(collect, prefix, "listing it"), key=lambda found: found.key)

    def folders(self, prefix: str) -> tuple[list[str], list[Found]]:
        """What lies right below a prefix: names of further prefixes, and objects."""
        import obstore

        found = self._run(lambda: obstore.list_with_delimiter_async(self.client, prefix.rstrip("/") or None), prefix, "listing it")
        return sorted(found["common_prefixes"]), [_found(one) for one in found["objects"]]

    def put(
        self,
        key: str,
        data: Buffer,
        *,
        create: bool = False,
        match: str | None = None,
        attributes: Mapping[str, str] | None = None,
    ) -> str | None:
        """Put a small object by one request; its etag. `Taken` where a condition did not hold, or where that cannot be known."""
        import obstore

        mode: PutMode = "create" if create else {"e_tag": match} if match is not None else "overwrite"
        self.requests += 1
        result = self._run(
            lambda: obstore.put_async(
                self.client, key, data, mode=mode, use_multipart=False, attributes=dict(attributes) if attributes else None
            ),
            key,
            "writing it",
        )
        return result["e_tag"]

    @contextmanager
    def uploading(
        self, key: str, nbytes: int, *, attributes: Mapping[str, str] | None = None, parts: int | None = None
    ) -> Iterator[Upload]:
        """Put an object of any size from front to back, in parts of which several are under way (`parts` at the most).

        It is there, all of it, when the block ends; a block that fails leaves nothing.
        """
        import obstore
        import obstore.exceptions as theirs

        part = PART_NBYTES
        while part * PARTS < nbytes:
            part *= 2
        self.requests += max(1, -(-nbytes // part))
        upload = Upload(self, key)
        _loop()  # not in a fork
        try:
            given = dict(attributes) if attributes else None
            with obstore.open_writer(
                self.client, key, buffer_size=part, max_concurrency=parts or UPLOADING, attributes=given
            ) as upload.file:  # fmt: skip
                yield upload
        except HoldfastError:
            raise
        except (theirs.BaseError, OSError) as error:
            raise self.refused(error, key, "uploading it") from None

    def delete(self, keys: Sequence[str]) -> None:
        """Delete objects; those that are gone already are no matter."""
        import obstore

        for first in range(0, len(keys), 1000):
            some = list(keys[first : first + 1000])

            def ask(some: list[str] = some) -> Awaitable[None]:
                return obstore.delete_async(self.client, some)

            try:
                self._run(ask, some[0], "deleting it")
            except StoreError as error:
                if error.errno != errno.ENOENT:
                    raise

    def copy(self, key: str, to: str) -> None:
        """Copy an object inside the bucket, by the store itself."""
        import obstore

        self.requests += 1
        self._run(lambda: obstore.copy_async(self.client, key, to), key, "copying it")

    def _asked(self, key: str, options: GetOptions, etag: str | None, *, nbytes: int, most: int | None = None) -> Got:
        if etag is not None:
            options = {**options, "if_match": etag}
        for left in reversed(range(TRIES)):
            try:
                return self._run(lambda: self._hedged(key, options, nbytes, most), key, "reading it")
            except Truncated:
                if not left:
                    raise
        raise AssertionError("unreachable")

    async def _hedged(self, key: str, options: GetOptions, nbytes: int, most: int | None) -> Got:
        """One answer, of the first request or of a second one that was sent when the first was late."""
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
                        self.patience.answered(nbytes, time.monotonic() - begun)
                        return got
                asked = waiting
        finally:
            for one in asked:
                one.cancel()

    async def _answer(self, key: str, options: GetOptions, most: int | None) -> Got:
        import obstore

        self.requests += 1
        result: GetResult = await obstore.get_async(self.client, key, options=options)
        found = _found(result.meta)
        if most is not None and found.nbytes > most:
            raise LimitExceeded(
                f"an index of {found.nbytes:,} bytes is more than Limits(index_nbytes={most:,})",
                file=self.url(key),
                expected=most,
                found=found.nbytes,
            )
        start, stop = result.range
        data = memoryview(await result.bytes_async())
        wanted = options.get("range")
        if data.nbytes != stop - start or (isinstance(wanted, tuple) and start != wanted[0]):
            raise Truncated(
                f"the store answered with {data.nbytes:,} bytes from {start:,} on, and not with what was asked for",
                file=self.url(key),
                offset=start + data.nbytes,
            )
        return Got(data, start, found, {str(name): value for name, value in result.attributes.items()})

    def _run(self, ask: Callable[[], Awaitable[T]], key: str, doing: str) -> T:
        """Wait for a request; its errors are ours."""

        async def asked() -> T:
            return await ask()

        try:
            return _loop().run(asked())
        except HoldfastError:
            raise
        except Exception as error:
            raise self.refused(error, key, doing) from None

    def refused(self, error: BaseException, key: str, doing: str) -> BaseException:
        """What a failure of obstore means."""
        import obstore.exceptions as theirs

        if isinstance(error, HoldfastError) or not isinstance(error, Exception):
            return error
        url = self.url(key)
        kind, code, message = StoreError, errno.EIO, f"{doing} failed: {_reason(error)}"
        if isinstance(error, FileNotFoundError):
            code, message = errno.ENOENT, "no such object" if "NoSuchBucket" not in str(error) else "there is no such bucket"
        elif isinstance(error, theirs.AlreadyExistsError):
            kind, code, message = Taken, errno.EEXIST, "there is an object already"
        elif isinstance(error, theirs.PreconditionError | theirs.NotModifiedError):
            if doing == "reading it":
                kind, message = Replaced, "the object was replaced while the checkpoint was open; open it again"
            else:
                kind, code, message = Taken, errno.EEXIST, "the object is another by now"
        elif isinstance(error, theirs.PermissionDeniedError | theirs.UnauthenticatedError) or DENIED.search(str(error)):
            code, message = errno.EACCES, f"{doing}: access denied; check the credentials, and whether they have expired"
        elif isinstance(error, theirs.NotSupportedError):
            return Unsupported(f"{doing}: the store does not support it", file=url)
        elif isinstance(error, theirs.UnknownConfigurationKeyError | ValueError):
            code, message = errno.EINVAL, f"{doing}: the client cannot be set up so"
        elif PAST_THE_END.search(str(error)):
            return Truncated("the object ends before what was to be read", file=url)
        elif OTHER_RANGE.search(str(error)):
            return Truncated("the store answered with another range than the one that was asked for, or with none", file=url)
        raised = kind(message, file=url)
        raised.errno = code
        return raised


STATUS = re.compile(
    r"status code: (\d{3}[^:<{]*)|(timed? ?out|dns|connect(?:ion)?[a-z ]*(?:refused|reset|closed|error))", re.IGNORECASE
)
OTHER_RANGE = re.compile(r"non-partial response when range requested|Requested \d+\.\.\d+, got \d+")
DENIED = re.compile(r"status code: 40[13]|<Code>(?:ExpiredToken|AccessDenied|InvalidAccessKeyId)</Code>")
"""How it is said of a list, for which the client has no kind of error."""

CODE = re.compile(r"<Code>([A-Za-z]+)</Code>")
PAST_THE_END = re.compile(r"status code: 416|<Code>InvalidRange</Code>|Wanted range starting at \d+|Range started at \d+")
CREDENTIALS = re.compile(r"credential|InstanceMetadata|169\.254|metadata\.google", re.IGNORECASE)


def _reason(error: Exception) -> str:
    """Why a request failed, in words that were chosen here: what the client says may have a signed URL in it."""
    text = str(error)
    if CREDENTIALS.search(text) and "status code" not in text:
        return "no credentials were found; set those of the store in the environment, or give a client with store="
    code, status = CODE.search(text), STATUS.search(text)
    told = " ".join(part for part in (status and (status[1] or status[2]), code and f"({code[1]})") if part).strip()
    if not told and ("error sending request" in text or "HTTP error" in text):
        told = "the server cannot be reached, or broke off the connection"
    if not told and "body" in text:
        told = "the answer broke off"
    return f"{told or type(error).__name__}; it was tried again as often as makes sense"


def _found(meta: ObjectMeta) -> Found:
    etag = meta["e_tag"]
    # Azure has it in quotes in the answer about an object, and without them in a list.
    quoted = etag if not etag or etag.endswith('"') else f'"{etag}"'
    return Found(meta["path"], meta["size"], quoted, meta["last_modified"])


class Loop:
    """An event loop on a thread of its own, on which all requests wait for their answers."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        start(self._loop.run_forever, name="object-store requests", daemon=True)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise


_lock = renewed(threading.Lock())
_running: list[Loop] = []
_buckets: dict[tuple[object, ...], Bucket] = {}


def _left_behind(file: str) -> Unsupported:
    told = "this process was forked from one that had used object stores, and their client does not survive that"
    return Unsupported(f"{told}; start processes by 'spawn' or 'forkserver', or fork before the first URL", file=file)


def _loop() -> Loop:
    if _forked:
        raise _left_behind("")
    with _lock:
        if not _running:
            _running.append(Loop())
        return _running[0]


_forked: list[bool] = []
"""Something, in a process that was forked from one that had used the client."""


def _in_child() -> None:
    # The loop's thread stayed in the parent, and so did the client's, without which no answer ever comes.
    if _running or _buckets:
        _forked.append(True)
    _running.clear()
    _buckets.clear()


at_fork(after_in_child=_in_child)


def bucket_of(url: Url) -> Bucket:
    """The bucket of a URL, with the client that came with it or one that is made from the environment."""
    if _forked:
        raise _left_behind(url)
    try:
        import obstore.store  # noqa: F401
    except ImportError:
        message = f"{url.scheme}:// needs the client of object stores: pip install 'holdfast[cloud]'"
        raise Unsupported(message, file=str(url)) from None
    if url.client is not None:
        return _kept((url.root, id(url.client)), lambda: Bucket(url.root, url.client))  # type: ignore[arg-type]  # obstore checks it
    given = tuple(sorted(item for item in os.environ.items() if item[0].startswith(ENVIRONMENT)))
    return _kept((url.root, given), lambda: Bucket(url.root, _made(url)))


def _kept(key: tuple[object, ...], make: Callable[[], Bucket]) -> Bucket:
    with _lock:
        if key not in _buckets:
            _buckets[key] = make()
        return _buckets[key]


def _made(url: Url) -> ObjectStore:
    """A client for a bucket, set up by the environment."""
    from obstore import store as stores

    if url.scheme == "memory":
        return stores.MemoryStore()
    # A server that says nothing for a minute has stalled; uploads of large parts over thin lines take their time.
    options: ClientConfig = {
        "timeout": timedelta(minutes=10),
        "connect_timeout": timedelta(seconds=10),
        "read_timeout": timedelta(seconds=60),
    }
    if any(os.environ.get(name, "").startswith("http://") for name in ENDPOINTS.get(url.scheme, ())):
        options["allow_http"] = True
    retry: RetryConfig = {
        "max_retries": RETRIES,
        "retry_timeout": timedelta(minutes=3),
        "backoff": {"init_backoff": timedelta(milliseconds=50), "max_backoff": timedelta(seconds=10), "base": 2},
    }
    try:
        if url.scheme == "az":
            return stores.AzureStore(container_name=url.root.partition("://")[2], client_options=options, retry_config=retry)
        if url.scheme == "s3" and not os.environ.get(PLAIN):
            # The hash is there: the signature of a request needs it. With it in a header, any server compares what arrived.
            return stores.from_url(url.root, client_options=options, retry_config=retry, checksum_algorithm="SHA256")
        return stores.from_url(url.root, client_options=options, retry_config=retry)
    except Exception as error:
        message = f"no client for {url.root}: {_reason(error)}"
        raise StoreError(message, file=str(url)) from None
