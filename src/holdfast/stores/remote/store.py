"""`RemoteStore`: an object, or the objects under a prefix, read by ranges.

**Finding out what the URL is.** First the store requests the manifest of a native checkpoint: one
request, and no listing. If the URL ends like a file, it requests the object itself before that. If
neither exists, it lists the prefix.

**Reading a single version.** The first answer for each object has its ETag and its size. Every
later request requires that ETag, so an object that was replaced meanwhile is an error. The sizes
that an index records (`expect_size`) are compared with the first answer.

**Headers** are read through windows (`peek`). The first and the last window of an object are
fetched as a whole, because a header, a zip directory or a pickle is parsed piece by piece. Elements
of tensors are fetched exactly, unless a window has them: an object that is shorter than a window is
opened and read with one request."""

from __future__ import annotations

import errno
import threading
from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from holdfast.core.keys import check_key, parse_sibling_key
from holdfast.core.limits import Limits
from holdfast.core.protocols import ReadProfile, Stamp, Store
from holdfast.core.runtime import make_fork_safe
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
from holdfast.stores.remote.client import Bucket, ObjectContent, RemoteObject, get_bucket
from holdfast.stores.remote.failures import find_existing
from holdfast.stores.remote.url import Url

WINDOW_NBYTES = 128 << 10
"""The size of a window. Nine in ten safetensors headers are shorter."""

MAX_WINDOWS = 64
"""Windows that a store keeps in memory, in addition to those of the manifest."""

REQUEST_NBYTES = 8 << 20
"""The largest size of one request. Several of them share a slow connection, and losing one is
cheap."""

REQUESTS = 24
"""Requests at the same time. At 20 to 50 ms and 50 to 100 MB/s each, they fill 10 Gbit/s."""

MANIFEST = "holdfast.json"

Keys = list[str]


class ObjectVersion(NamedTuple):
    """What identifies the content of an object."""

    nbytes: int
    etag: str | None


class RemoteStore(Store):
    """An object, or all objects under a prefix and one folder down."""

    read_profile = ReadProfile(request_count=REQUESTS, block_nbytes=REQUEST_NBYTES)

    def __init__(
        self,
        url: Url,
        *,
        limits: Limits | None = None,
        expected: Mapping[str, ObjectVersion] | None = None,
        index: str = "",
    ) -> None:
        """Find out what is at a URL.

        Args:
            url: The place of an object, or a prefix.
            limits: The limits for the number of files and the size of a manifest.
            expected: Sizes and ETags of objects that another process has opened.
            index: The index of a Hugging Face folder through which the user opened it.

        Raises:
            NoSuchPath: There is nothing at the URL.
        """
        self.name: str = url
        self.index = index
        self.bucket: Bucket = get_bucket(url)
        self._url = url
        self._limits = Limits() if limits is None else limits
        self._lock = make_fork_safe(threading.Lock())
        self._versions: dict[str, ObjectVersion] = dict(expected or {})
        """The version of each object, from its first answer on."""
        self._indexed_nbytes: dict[str, int] = {}
        """Sizes that an index records, until the first answer for the object."""
        self._windows: OrderedDict[tuple[str, int], memoryview] = OrderedDict()
        """Windows by the key of their file and their index. The last one was used last."""
        self._manifest_windows: dict[tuple[str, int], memoryview] = {}
        """The windows of the manifest, which are never dropped."""
        self._keys: Keys | None = None
        self._is_gone = False
        self._is_closed = False
        self._single: str | None = None
        """The only key if the URL is that of an object. None if it is a prefix."""
        self._folder_store: RemoteStore | None = None

        # Each of these takes one request. Most URLs with a suffix are objects, and most others are
        # native checkpoints.
        if url.has_suffix:
            exists = self._read_first_window() or self._read_manifest()
        else:
            exists = self._read_manifest() or self._read_first_window()
        if not exists and not self.list():
            raise NoSuchPath("no such object, and no objects under this prefix", file=self.name)

    def _read_manifest(self) -> bool:
        """Read the manifest of a native checkpoint under this prefix.

        The format reads it again later, so the store keeps its content as windows.

        Returns:
            False if there is no manifest.
        """
        manifest_key = self._object_key(MANIFEST)
        answer = find_existing(self.bucket.get_object, manifest_key, self._limits.index_nbytes)
        if answer is None:
            return False
        self._record_version(MANIFEST, answer.metadata)
        for start in range(0, answer.data.nbytes, WINDOW_NBYTES):
            window = answer.data[start : start + WINDOW_NBYTES]
            self._manifest_windows[MANIFEST, start // WINDOW_NBYTES] = window
        return True

    def _read_first_window(self) -> bool:
        """Read the start of the object at the URL. Returns False if there is no such object."""
        key = self._url.key
        if not key:
            return False
        try:
            answer = self.bucket.get_range(key, 0, WINDOW_NBYTES)
        except Truncated:
            # An empty object has no range to read, so the server refuses the request.
            answer = ObjectContent(memoryview(b""), self.bucket.head(key), {})
        except StoreError as error:
            if error.errno != errno.ENOENT:
                raise
            return False
        file_name = key.rpartition("/")[2]
        self._single = file_name
        self._record_version(file_name, answer.metadata)
        self._windows[file_name, 0] = answer.data
        return True

    @property
    def is_gone(self) -> bool:
        return self._is_gone

    @property
    def is_folder(self) -> bool:
        return self._single is None

    @property
    def single_key(self) -> str | None:
        # A native checkpoint has several files. Listing them would take another request.
        if self._single is not None or MANIFEST in self._versions:
            return self._single
        return super().single_key

    def get_folder_store(self) -> Store | None:
        if self._single is None:
            return self
        if self._folder_store is None:
            self._folder_store = RemoteStore(self._url.parent, limits=self._limits)
        return self._folder_store

    def has_key(self, key: str) -> bool:
        return key in self._versions or key in self._indexed_nbytes or key in self.list()

    def expect_size(self, key: str, nbytes: int) -> bool:
        # The key may come from a hostile index. This raises an error if it leads out of the prefix.
        self._object_key(key)
        with self._lock:
            if key in self._versions:
                return False
            self._indexed_nbytes[key] = nbytes
            return True

    def can_read_sibling(self, key: str) -> bool:
        """Return whether a key names a file of a checkpoint in the same bucket, beside this one.

        Such a key has the form `../FOLDER/NAME`, where NAME is that of a data file of a save
        (`parse_sibling_key`). A single object and a whole bucket have no such checkpoints.
        """
        sibling = parse_sibling_key(key)
        if sibling is None or not self.is_folder or not self._url.key:
            return False
        # A key such as `../step-2/x` of the checkpoint `step-2` would be a second key for its own
        # file `x`.
        sibling_folder = sibling[0]
        return sibling_folder != self._url.key.rpartition("/")[2]

    def list(self) -> Sequence[str]:
        self._check_open()
        if self._single is not None:
            return [self._single]
        if self._keys is None:
            self._keys = self._list_files()
        return self._keys.copy()

    def _list_files(self) -> Keys:
        """List the objects under the prefix. Returns the keys of the files of a checkpoint.

        The versions of the objects are recorded, so no more requests are needed to know their
        sizes.

        Raises:
            LimitExceeded: There are more files than `Limits.files`, or twice as many objects.
        """
        prefix = f"{self._url.key}/" if self._url.key else ""
        # The limit is for files of a checkpoint. The prefix may have other objects as well, such as
        # those of unfinished saves, so the listing itself may have twice as many. If there are still
        # more, `list_objects` raises LimitExceeded.
        max_objects = max(self._limits.files, 1) * 2
        objects: dict[str, RemoteObject] = {}
        for remote_object in self.bucket.list_objects(prefix, max_objects):
            # A server that does not treat keys as paths could list `run-2/x` for the prefix `run`.
            key = remote_object.key.removeprefix(prefix)
            if remote_object.key.startswith(prefix) and _is_checkpoint_file(key):
                objects[key] = remote_object
        if len(objects) > self._limits.files:
            message = f"more files than Limits(files={self._limits.files})"
            raise LimitExceeded(message, file=self.name, expected=self._limits.files)

        with self._lock:
            for key, remote_object in objects.items():
                version = ObjectVersion(remote_object.nbytes, remote_object.etag)
                # An object that was read before this listing keeps the version that was read. If it
                # was replaced since, the next read requires the old ETag and raises Replaced.
                self._versions.setdefault(key, version)
        return sorted(objects)

    def size(self, key: str) -> int:
        """Return the size of an object.

        This takes no request if the object was read, or listed, or an index records its size.
        """
        self._check_open()
        with self._lock:
            version = self._versions.get(key)
            indexed_nbytes = self._indexed_nbytes.get(key)
        if version is not None:
            return version.nbytes
        if indexed_nbytes is not None:
            return indexed_nbytes
        remote_object = self.bucket.head(self._object_key(key))
        return self._record_version(key, remote_object).nbytes

    def read(self, key: str, start: int, out: memoryview) -> None:
        """Fill `out` with the bytes of an object from the offset `start` on.

        Raises:
            Truncated: The object ends too early.
            Replaced: The object is not the one that was opened.
        """
        self._check_open()
        if start < 0:
            message = f"cannot read from the negative offset {start}"
            raise Truncated(message, file=self.label(key), offset=0)
        # A copy from memory needs no request.
        if self._has_windows(key, start, start + out.nbytes):
            self.peek(key, start, out)
            return
        for offset in range(0, out.nbytes, REQUEST_NBYTES):
            block = out[offset : offset + REQUEST_NBYTES]
            block_start = start + offset
            block[:] = self._fetch_range(key, block_start, block_start + block.nbytes)

    def peek(self, key: str, start: int, out: memoryview) -> None:
        """Fill `out` with bytes of a header, an index or a pickle.

        Such a file is parsed piece by piece. Therefore its bytes come from windows, blocks of 128
        KiB that are fetched as a whole and kept, and not from a request for each piece.
        """
        object_nbytes = self.size(key)
        stop = start + out.nbytes
        if start < 0 or stop > object_nbytes:
            raise self._make_truncated(key, start, stop, object_nbytes)
        # A long range is not worth many requests of one window each.
        if out.nbytes > WINDOW_NBYTES * 4 and not self._has_windows(key, start, stop):
            self.read(key, start, out)
            return
        for window_index in _window_indices(start, stop):
            window = self._get_window(key, window_index, object_nbytes)
            window_start = window_index * WINDOW_NBYTES
            copy_start = max(start, window_start)
            copy_stop = min(stop, window_start + WINDOW_NBYTES)
            content = window[copy_start - window_start : copy_stop - window_start]
            out[copy_start - start : copy_stop - start] = content

    def stamp(self, key: str) -> Stamp:
        self._check_open()
        with self._lock:
            version = self._versions.get(key)
        if version is not None:
            return version
        return self._record_version(key, self.bucket.head(self._object_key(key)))

    def find_changed(self) -> Sequence[str]:
        """Return the keys of the objects that were replaced or deleted since they were opened.

        An object that cannot be checked counts as changed, even if only the network failed.
        """
        with self._lock:
            versions = dict(self._versions)
        changed_keys = []
        for key, version in versions.items():
            try:
                remote_object = self.bucket.head(self._object_key(key))
            except StoreError:
                # The caller is about to publish what it read, or to overwrite the object. So
                # "changed" is the safe answer.
                changed_keys.append(key)
                continue
            if (remote_object.nbytes, remote_object.etag) != version:
                changed_keys.append(key)
        return sorted(changed_keys)

    def identity(self, key: str = "") -> Hashable:
        if not key:
            return self._url.identity
        kind, root, _, client_id = self._url.identity
        return kind, root, self._object_key(key), client_id

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            self._windows.clear()
            self._manifest_windows.clear()
        if self._folder_store is not None:
            self._folder_store.close()

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle the URL. The receiver must find the same versions of the objects."""
        self._check_open()
        with self._lock:
            restore = partial(
                RemoteStore, limits=self._limits, expected=dict(self._versions), index=self.index
            )
            return restore, (self._url,)

    def label(self, key: str) -> str:
        """Return the URL of a file, for messages."""
        return self.bucket.url(self._object_key(key))

    def _object_key(self, key: str) -> str:
        """Return the key of an object in the bucket.

        Args:
            key: The key of the file in this store, which is relative to the prefix of the store. It
                may come from a hostile index.

        Raises:
            StoreError: This store is a single object, and `key` is not its key.
            UnsafePath: `key` leads out of the prefix, and is not the data file of a checkpoint
                beside this one.
        """
        # Without slashes at either end; empty for the whole bucket.
        prefix = self._url.key
        if self._single is not None:
            if key != self._single:
                raise StoreError(f"there is no {key!r} in {self.name}", file=key)
            # The store was opened at the object itself.
            return prefix
        # These are the only keys outside the prefix. `can_read_sibling` has checked that `../` is
        # followed by one folder and the name of a data file of a save, and by nothing else.
        if self.can_read_sibling(key):
            return self._url.sibling(key.removeprefix("../")).key
        checked_key = check_key(key)
        if not prefix:
            return checked_key
        return f"{prefix}/{checked_key}"

    def _check_open(self) -> None:
        if self._is_closed:
            raise Closed("the checkpoint was closed; open it again to read from it", file=self.name)

    def _make_truncated(self, key: str, start: int, stop: int, nbytes: int) -> Truncated:
        """Return the error for a range that ends behind an object of `nbytes` bytes."""
        message = f"cannot read bytes {start} to {stop} of an object of {nbytes} bytes"
        return Truncated(message, file=self.label(key), offset=nbytes)

    def _fetch_range(self, key: str, start: int, stop: int) -> memoryview:
        """Request a range of an object.

        Raises:
            Truncated: The object ends before the range does.
            Replaced: The object has another version than at its first answer.
        """
        with self._lock:
            version = self._versions.get(key)
        if version is not None and stop > version.nbytes:
            raise self._make_truncated(key, start, stop, version.nbytes)
        etag = None if version is None else version.etag
        try:
            answer = self.bucket.get_range(self._object_key(key), start, stop, etag=etag)
        except StoreError as error:
            raise self._explain_error(key, error, version) from None
        self._record_version(key, answer.metadata)
        if answer.data.nbytes != stop - start:
            raise self._make_truncated(key, start, stop, answer.metadata.nbytes)
        return answer.data

    def _has_windows(self, key: str, start: int, stop: int) -> bool:
        """Return whether a range can be read without a request."""
        return all(
            (key, index) in self._windows or (key, index) in self._manifest_windows
            for index in _window_indices(start, stop)
        )

    def _get_window(self, key: str, window_index: int, object_nbytes: int) -> memoryview:
        """Return one window (`WINDOW_NBYTES` bytes) of an object, and fetch it if necessary.

        Args:
            key: The key of the file in this store.
            window_index: The position of the window in the object, counted in windows.
            object_nbytes: The size of the object.
        """
        cache_key = (key, window_index)
        with self._lock:
            if cache_key in self._manifest_windows:
                return self._manifest_windows[cache_key]
            if cache_key in self._windows:
                self._windows.move_to_end(cache_key)
                return self._windows[cache_key]

        # The last window is fetched together with the one before it. A zip directory lies at the
        # end, and nobody knows yet where it starts.
        last_index = (object_nbytes - 1) // WINDOW_NBYTES
        first_index = window_index
        if window_index == last_index:
            first_index = max(window_index - 1, 0)
        fetch_start = first_index * WINDOW_NBYTES
        fetch_stop = min((window_index + 1) * WINDOW_NBYTES, object_nbytes)
        data = self._fetch_range(key, fetch_start, fetch_stop)

        windows = {
            first_index + offset // WINDOW_NBYTES: data[offset : offset + WINDOW_NBYTES]
            for offset in range(0, data.nbytes, WINDOW_NBYTES)
        }
        self._keep_windows(key, windows)
        return windows[window_index]

    def _keep_windows(self, key: str, windows: Mapping[int, memoryview]) -> None:
        """Keep windows of an object, by their indices, and drop those that were used least recently.

        Windows of one answer share its memory, which is freed with the last of them. An answer has
        at most two windows, so at most `2 * MAX_WINDOWS` windows occupy memory.
        """
        with self._lock:
            for window_index, window in windows.items():
                self._windows[key, window_index] = window
            while len(self._windows) > MAX_WINDOWS:
                self._windows.popitem(last=False)

    def _record_version(self, key: str, remote_object: RemoteObject) -> ObjectVersion:
        """Record the version of an object at its first answer. Every later answer must match it.

        Raises:
            Replaced: The object has another size or ETag than at its first answer.
            Truncated: The object is smaller than its index records.
            MetadataError: The object is larger than its index records.
        """
        new_version = ObjectVersion(remote_object.nbytes, remote_object.etag)
        with self._lock:
            # `setdefault` records the version of the first answer. For later answers, it returns
            # that first version.
            version = self._versions.setdefault(key, new_version)
            indexed_nbytes = self._indexed_nbytes.pop(key, None)
        if version != new_version:
            self._is_gone = True
            raise Replaced(
                "the object was replaced while the checkpoint was open; open it again",
                file=self.label(key),
            )
        if indexed_nbytes is not None and indexed_nbytes != remote_object.nbytes:
            error_type = Truncated if remote_object.nbytes < indexed_nbytes else MetadataError
            raise error_type(
                f"the manifest records {indexed_nbytes:,} bytes, and the object has "
                f"{remote_object.nbytes:,}",
                file=self.label(key),
                expected=indexed_nbytes,
                found=remote_object.nbytes,
            )
        return version

    def _explain_error(
        self, key: str, error: StoreError, version: ObjectVersion | None
    ) -> StoreError:
        """Return the error to raise for an object.

        This is `Replaced` if the object existed before, or if an index records its size: the index
        of a complete checkpoint names only objects that exist.

        Args:
            key: The key of the file in this store.
            error: The error of the request.
            version: The version of the object at its first answer. None if this was the first
                request for it.
        """
        if isinstance(error, Replaced):
            self._is_gone = True
            return error
        with self._lock:
            was_there = version is not None or key in self._indexed_nbytes
        # The network failed, or the object never existed.
        if error.errno != errno.ENOENT or not was_there:
            return error
        self._is_gone = True
        return Replaced(
            "the object is gone: the checkpoint was replaced or removed while it was open; "
            "open it again",
            file=self.label(key),
            errno=error.errno,
        )


def _window_indices(start: int, stop: int) -> range:
    """Return the indices of the windows that a range of bytes touches."""
    return range(start // WINDOW_NBYTES, -(-stop // WINDOW_NBYTES))


def _is_checkpoint_file(key: str) -> bool:
    """Return whether an object is a file of a checkpoint.

    It must be at the top or one folder down. Hidden folders and names belong to unfinished saves.
    """
    folder, _, name = key.rpartition("/")
    if not name or "/" in folder or folder.startswith("."):
        return False
    return not is_temporary(name)
