"""`RemoteStore`: an object, or what lies below a prefix, read by ranges.

**What is it?** A native checkpoint is known by its manifest, which is asked for first: one request, and no listing. A URL that ends
like a file is asked for as an object first. Where neither is there, the prefix is listed.

**Always the same bytes.** The first answer of each object has its etag and its length, and every range after it is asked for with
that etag: an object that was replaced meanwhile is an error. What an index says of lengths (`expect`) is compared with the first
answer.

**Headers** are read through windows (`peek`): the first one and the last one of an object are fetched whole, since a header, a
zip's directory or a pickle is asked for piece by piece. Elements of tensors are read exactly as they are asked for, from a window
where they lie in one: an object that is shorter than that is opened and read by one request.
"""

from __future__ import annotations

import errno
import threading
from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from functools import partial

from holdfast.core.keys import check_key, sibling_key
from holdfast.core.limits import Limits
from holdfast.core.protocols import Medium, Stamp, Store
from holdfast.core.runtime import renewed
from holdfast.errors import (
    Closed,
    LimitExceeded,
    MetadataError,
    NoSuchPath,
    Replaced,
    StoreError,
    Truncated,
)
from holdfast.stores.files import is_temporary
from holdfast.stores.remote.client import Bucket, Got, RemoteObject, bucket_of
from holdfast.stores.remote.failures import if_there
from holdfast.stores.remote.url import Url

WINDOW_NBYTES = (
    128 << 10
)  # Of headers, what is fetched at a time: nine in ten safetensors headers are shorter.
WINDOWS = 64

PIECE_NBYTES = (
    8 << 20
)  # Most bytes of one request: several share a thin line, and one lost is no great matter.
REQUESTS = (
    24  # Requests under way at once: with 20 to 50 ms and 50 to 100 MB/s each, they fill 10 Gbit/s.
)
MANIFEST = "holdfast.json"


class RemoteStore(Store):
    """An object, or all objects below a prefix and one folder down."""

    medium = Medium(requests=REQUESTS, block_nbytes=PIECE_NBYTES)

    def __init__(
        self,
        url: Url,
        *,
        limits: Limits | None = None,
        expected: Mapping[str, tuple[int, str | None]] | None = None,
        index: str = "",
    ) -> None:
        self.name: str = url
        self.index = index
        self.bucket: Bucket = bucket_of(url)
        self._url = url
        self._limits = limits or Limits()
        self._lock = renewed(threading.Lock())
        self._known: dict[str, tuple[int, str | None]] = dict(expected or {})
        """Length and etag of each object, from its first answer on."""
        self._indexed: dict[str, int] = {}  # Lengths that an index says, until the first answer.
        self._windows: OrderedDict[tuple[str, int], memoryview] = OrderedDict()
        self._keys: list[str] | None = None
        self._gone = False
        self._closed = False
        self._single: str | None = None
        self._beside: RemoteStore | None = None
        ways = (
            [self._is_object, self._is_native]
            if url.has_suffix
            else [self._is_native, self._is_object]
        )
        if not any(way() for way in ways) and not self.list():
            raise NoSuchPath("no such object, and nothing below it", file=self.name)

    def _is_native(self) -> bool:
        got = if_there(self.bucket.whole, self._key(MANIFEST), self._limits.index_nbytes)
        if got is None:
            return False
        self._first(MANIFEST, got.found)
        for start in range(0, got.data.nbytes, WINDOW_NBYTES):
            self._windows[MANIFEST, start // WINDOW_NBYTES] = got.data[
                start : start + WINDOW_NBYTES
            ]
        return True

    def _is_object(self) -> bool:
        key = self._url.key
        if not key:
            return False
        try:
            got = self.bucket.get(key, 0, WINDOW_NBYTES)
        except Truncated:
            found = self.bucket.head(key)
            got = Got(memoryview(b""), 0, found, {})
        except StoreError as error:
            if error.errno != errno.ENOENT:
                raise
            return False
        self._single = key.rpartition("/")[2]
        self._first(self._single, got.found)
        self._windows[self._single, 0] = got.data
        return True

    @property
    def gone(self) -> bool:
        return self._gone

    @property
    def folder(self) -> bool:
        return self._single is None

    @property
    def single(self) -> str | None:
        if self._single is not None or MANIFEST in self._known:
            return self._single
        return super().single

    def beside(self) -> Store | None:
        if self._single is None:
            return self
        if self._beside is None:
            self._beside = RemoteStore(self._url.parent, limits=self._limits)
        return self._beside

    def holds(self, key: str) -> bool:
        return key in self._known or key in self._indexed or key in self.list()

    def expect(self, key: str, nbytes: int) -> bool:
        self._key(key)
        with self._lock:
            if key in self._known:
                return False
            self._indexed[key] = nbytes
            return True

    def reaches(self, key: str) -> bool:
        found = sibling_key(key)
        return (
            found is not None
            and self._single is None
            and bool(self._url.key)
            and found[0] != self._url.key.rpartition("/")[2]
        )

    def list(self) -> Sequence[str]:
        self._open()
        if self._single is not None:
            return [self._single]
        if self._keys is None:
            prefix = f"{self._url.key}/" if self._url.key else ""
            found = self.bucket.below(prefix, max(self._limits.files, 1) * 2)
            keys = {one.key[len(prefix) :]: one for one in found if one.key.startswith(prefix)}
            plain = sorted(key for key in keys if _counts(key))
            if len(plain) > self._limits.files:
                message = f"more files than Limits(files={self._limits.files})"
                raise LimitExceeded(message, file=self.name, expected=self._limits.files)
            with self._lock:
                for key in plain:
                    self._known.setdefault(key, (keys[key].nbytes, keys[key].etag))
            self._keys = plain
        return list(self._keys)

    def size(self, key: str) -> int:
        self._open()
        with self._lock:
            known, indexed = self._known.get(key), self._indexed.get(key)
        if known is not None:
            return known[0]
        if indexed is not None:
            return indexed
        return self._first(key, self.bucket.head(self._key(key)))[0]

    def read(self, key: str, start: int, out: memoryview) -> None:
        self._open()
        if start < 0:
            raise Truncated(f"wanted bytes from {start} on", file=self.label(key), offset=0)
        if self._holds_windows(key, start, start + out.nbytes):
            self.peek(key, start, out)
            return
        for at in range(0, out.nbytes, PIECE_NBYTES):
            piece = out[at : at + PIECE_NBYTES]
            piece[:] = self._range(key, start + at, start + at + piece.nbytes)

    def peek(self, key: str, start: int, out: memoryview) -> None:
        """Fill `out` from windows: of the start and the end of an object, and of where a header was asked for."""
        nbytes = self.size(key)
        stop = start + out.nbytes
        if start < 0 or stop > nbytes:
            raise Truncated(
                f"wanted bytes {start} to {stop} of {nbytes}", file=self.label(key), offset=nbytes
            )
        if out.nbytes > WINDOW_NBYTES * 4 and not self._holds_windows(key, start, stop):
            self.read(key, start, out)
            return
        for number in _windows(start, stop):
            window, begin = self._window(key, number, nbytes), number * WINDOW_NBYTES
            low, high = max(start, begin), min(stop, begin + WINDOW_NBYTES)
            out[low - start : high - start] = window[low - begin : high - begin]

    def stamp(self, key: str) -> Stamp:
        self._open()
        with self._lock:
            known = self._known.get(key)
        return known or self._first(key, self.bucket.head(self._key(key)))

    def changed(self) -> Sequence[str]:
        with self._lock:
            known = dict(self._known)
        found = []
        for key, before in known.items():
            try:
                now = self.bucket.head(self._key(key))
            except StoreError:
                found.append(key)
                continue
            if (now.nbytes, now.etag) != before:
                found.append(key)
        return sorted(found)

    def place(self, key: str = "") -> Hashable:
        kind, root, own, client = self._url.identity
        return kind, root, self._key(key) if key else own, client

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._windows.clear()
        if self._beside is not None:
            self._beside.close()

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle the URL: what is read where it arrives must be the objects that were read here."""
        self._open()
        with self._lock:
            arrive = partial(
                RemoteStore, limits=self._limits, expected=dict(self._known), index=self.index
            )
            return arrive, (self._url,)

    def label(self, key: str) -> str:
        return self.bucket.url(self._key(key))

    def _key(self, key: str) -> str:
        if self._single is not None:
            if key != self._single:
                raise StoreError(f"there is no {key!r} in {self.name}", file=key)
            return self._url.key
        if self.reaches(key):
            return self._url.sibling(key.removeprefix("../")).key
        return f"{self._url.key}/{check_key(key)}" if self._url.key else check_key(key)

    def _open(self) -> None:
        if self._closed:
            raise Closed("the checkpoint was closed; open it again to read from it", file=self.name)

    def _range(self, key: str, start: int, stop: int) -> memoryview:
        with self._lock:
            known = self._known.get(key)
        if known is not None and stop > known[0]:
            raise Truncated(
                f"wanted bytes {start} to {stop} of {known[0]}",
                file=self.label(key),
                offset=known[0],
            )
        try:
            got = self.bucket.get(
                self._key(key), start, stop, etag=None if known is None else known[1]
            )
        except StoreError as error:
            raise self._missing(key, error, known) from None
        self._first(key, got.found)
        if got.data.nbytes != stop - start:
            raise Truncated(
                f"wanted bytes {start} to {stop} of {got.found.nbytes}",
                file=self.label(key),
                offset=got.found.nbytes,
            )
        return got.data

    def _holds_windows(self, key: str, start: int, stop: int) -> bool:
        return all((key, number) in self._windows for number in _windows(start, stop))

    def _window(self, key: str, number: int, nbytes: int) -> memoryview:
        with self._lock:
            window = self._windows.get((key, number))
            if window is not None:
                self._windows.move_to_end((key, number))
                return window
        start = number * WINDOW_NBYTES
        stop = min(start + WINDOW_NBYTES, nbytes)
        # What is near the end is read to the end: a zip's directory begins where nobody knows yet.
        last = (nbytes - 1) // WINDOW_NBYTES
        first = max(number - 1, 0) if number == last else number
        data = self._range(key, first * WINDOW_NBYTES, stop)
        with self._lock:
            for one in range(first, number + 1):
                begin = (one - first) * WINDOW_NBYTES
                self._windows[key, one] = data[begin : begin + WINDOW_NBYTES]
            while len(self._windows) > WINDOWS and next(iter(self._windows))[0] != MANIFEST:
                self._windows.popitem(last=False)
        return data[start - first * WINDOW_NBYTES :]

    def _first(self, key: str, found: RemoteObject) -> tuple[int, str | None]:
        """Record what the first answer says; every later one must say the same."""
        now = found.nbytes, found.etag
        with self._lock:
            known = self._known.setdefault(key, now)
            indexed = self._indexed.pop(key, None)
        if known != now:
            self._gone = True
            raise Replaced(
                "the object was replaced while the checkpoint was open; open it again",
                file=self.label(key),
            )
        if indexed is not None and indexed != found.nbytes:
            wrong = Truncated if found.nbytes < indexed else MetadataError
            message = f"the manifest says {indexed:,} bytes, the object has {found.nbytes:,}"
            raise wrong(message, file=self.label(key), expected=indexed, found=found.nbytes)
        return known

    def _missing(
        self, key: str, error: StoreError, known: tuple[int, str | None] | None
    ) -> StoreError:
        """What to say of an object that the store does not give: `Replaced` for one that was there, or that a manifest names."""
        if isinstance(error, Replaced):
            self._gone = True
            return error
        with self._lock:
            named = known is not None or key in self._indexed
        if error.errno != errno.ENOENT or not named:
            return error
        self._gone = True
        message = "the object is gone: the checkpoint was replaced or removed while it was open; open it again"
        gone = Replaced(message, file=self.label(key))
        gone.errno = error.errno
        return gone


def _windows(start: int, stop: int) -> range:
    return range(start // WINDOW_NBYTES, -(-stop // WINDOW_NBYTES))


def _counts(key: str) -> bool:
    """Whether an object is a file of a checkpoint: at the top or one folder down, and not hidden as the rest of a save is."""
    folder, _, name = key.rpartition("/")
    return (
        bool(name) and "/" not in folder and not folder.startswith(".") and not is_temporary(name)
    )
