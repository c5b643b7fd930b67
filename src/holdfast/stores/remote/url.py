"""`Url`: the place of an object, or of all objects under a prefix.

A `Url` is text, and goes wherever a path goes. `stores/place` documents the members that it shares
with a path. A URL never contains credentials: they come from the environment, or with a client that
the caller has made.

    s3://bucket/run/step-1000      Amazon S3 and compatible servers (AWS_ENDPOINT_URL); also s3a://
    gs://bucket/run/step-1000      Google Cloud Storage
    az://container/run/step-1000   Azure Blob Storage (AZURE_STORAGE_ACCOUNT_NAME); also abfs[s]://
    memory://name/run/step-1000    a store in this process, for tests
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Self
from urllib.parse import quote

from holdfast.core.limits import Limits
from holdfast.core.protocols import Store
from holdfast.errors import BadPath, HoldfastError
from holdfast.stores.paths import MAX_SHOWN_CHARACTERS, SCHEMES, URL, is_url
from holdfast.stores.remote.failures import find_existing

if TYPE_CHECKING:
    from holdfast.stores.remote.client import Bucket

SUFFIX = re.compile(r"\.[a-z]\w*\Z", re.IGNORECASE)
"""The suffix of an object's name. The numbers in `step-1.5` and `Llama-3.1-8B` are not suffixes."""

PART_NBYTES = 16 << 20
"""The size of one part of an upload. S3 accepts 10,000 parts of at least 5 MiB each."""

UPLOAD_PARTS_AT_ONCE = 12
"""Parts of one upload that are sent at the same time."""

MAX_COPY_NBYTES = 5 << 30
"""S3 copies objects up to this size by itself. Larger objects are downloaded and uploaded."""

SCHEME_ALIASES = {"s3a": "s3", "azure": "az"}

MAX_STAMPED_OBJECTS = 100_000
"""The largest number of objects under a place of which everything is listed."""

Stamps = list[tuple[str, int, str]]
"""Name, size and version of each file. The version is a modification time or an ETag."""

Problem = Callable[[str, str], None]
"""Receives a place that cannot be listed, and the reason."""

FindSetAside = Callable[[str], str | None]
"""Returns the path of the directory that an interrupted save has set aside for a path, or None."""


class Url(str):
    """The place of an object, or of all objects under a prefix, as text.

    `LocalPlace` documents the members that a URL shares with a path.
    """

    client: object | None = None
    """The obstore store that the caller passed, whose root is the bucket. None if Holdfast makes
    the client from the environment."""
    folder: bool = False
    """Whether the user wrote a slash at the end, which marks a directory."""

    @property
    def scheme(self) -> str:
        """The scheme, such as `s3`."""
        return self.partition("://")[0]

    @property
    def root(self) -> str:
        """The URL of the bucket."""
        scheme, _, location = self.partition("://")
        return f"{scheme}://{location.partition('/')[0]}"

    @property
    def key(self) -> str:
        """The place in the bucket, without a slash at its end. Empty for the bucket itself."""
        return self.partition("://")[2].partition("/")[2].rstrip("/")

    @property
    def identity(self) -> tuple[object, ...]:
        # Stores in memory have no names, so their clients tell them apart. Two clients of one
        # bucket reach the same objects.
        client_id = id(self.client) if self.scheme == "memory" else None
        return "object", self.root, self.key, client_id

    on_disk = False

    @property
    def url(self) -> Self:
        return self

    # A URL has no working directory and no links.
    absolute = url
    real = url

    @property
    def name(self) -> str:
        return self.rpartition("/")[2]

    @property
    def parent(self) -> Self:
        """The prefix that contains this place. At the top, this is the bucket."""
        return self.sibling("") if self.key else self

    @property
    def record_name(self) -> str:
        return str(self).rstrip("/")

    @property
    def uri(self) -> str:
        return quote(self.encode("utf-8", "surrogateescape"), safe="/:")

    @property
    def is_marked_as_folder(self) -> bool:
        return self.folder

    @property
    def has_suffix(self) -> bool:
        """Whether the name has a suffix, so that this is probably an object and not a prefix."""
        return SUFFIX.search(self.name) is not None

    # Whether objects exist under the prefix takes a request (`normalize`). Until then, only the mark
    # of the user counts.
    is_folder = is_marked_as_folder
    # An object may exist here. Only a request can tell.
    may_be_file = True

    def below(self, name: str, *, folder: bool = False) -> Self:
        return self._with_text(f"{self.rstrip('/')}/{name}", folder=folder)

    def sibling(self, name: str) -> Self:
        """Return the place of another name in the same prefix."""
        return self._with_text(f"{self.rstrip('/').rpartition('/')[0]}/{name}")

    def file(self, key: str) -> str:
        # The errors of a remote store name objects by their URLs (`RemoteStore.label`).
        if is_url(key):
            return key
        # If this is a single object, its name is the only key.
        if self.name == key:
            return self
        return self.below(key)

    def is_same(self, other: object) -> bool:
        return isinstance(other, Url) and self.identity == other.identity

    def free_nbytes(self) -> int | None:
        return None

    def normalize(self, limits: Limits) -> Self:
        """Find out with a request whether this is an object or a prefix, and record the result."""
        from holdfast.stores.remote.store import RemoteStore

        # Creating a store sends the requests that tell an object from a prefix.
        store = RemoteStore(self, limits=limits)
        store.close()
        self.folder = store.is_folder
        return self

    def walk(self, max_files: int, on_problem: Problem) -> Iterator[tuple[str, Sequence[str]]]:
        """Yield the prefixes under this place, each with the names of its objects.

        Args:
            max_files: The largest number of objects.
            on_problem: Called with this place and the reason if the objects cannot be listed.
        """
        prefix = f"{self.key}/" if self.key else ""
        file_names: dict[str, list[str]] = {}
        try:
            objects = self._bucket.list_objects(prefix, max_files)
        except HoldfastError as error:
            on_problem(self, str(error))
            return
        for remote_object in objects:
            folder, _, name = remote_object.key.removeprefix(prefix).rpartition("/")
            # A key that ends with a slash only marks a folder.
            if name:
                file_names.setdefault(folder, []).append(name)
        for folder, names in sorted(file_names.items()):
            place = self.below(folder, folder=True) if folder else self
            yield place, names

    def files(self) -> dict[str, int]:
        """Return the names of the objects directly under this prefix, sorted, with their sizes."""
        _, objects = self._bucket.list_folder(self.key)
        objects.sort(key=lambda remote_object: remote_object.key)
        return {
            remote_object.key.rpartition("/")[2]: remote_object.nbytes for remote_object in objects
        }

    def stamps(self) -> Stamps | None:
        """Return name, size and ETag of every object at or under this place, sorted by name.

        Returns:
            None if there are no objects, or if the store has no ETags: a change would go unnoticed.
        """
        objects = self._bucket.list_objects(f"{self.key}/", MAX_STAMPED_OBJECTS)
        single_object = find_existing(self._bucket.head, self.key)
        if single_object is not None:
            # The object itself must be in the result once, whether or not the listing has it.
            objects = [item for item in objects if item.key != single_object.key]
            objects.insert(0, single_object)
        if not objects or any(item.etag is None for item in objects):
            return None
        return sorted(
            (item.key.removeprefix(self.key), item.nbytes, str(item.etag)) for item in objects
        )

    def open_store(self, limits: Limits, find_set_aside: FindSetAside) -> Store:
        # A save to an object store sets nothing aside, so the second argument is not used.
        from holdfast.stores.remote.store import RemoteStore

        return RemoteStore(self, limits=limits)

    @property
    def _bucket(self) -> Bucket:
        from holdfast.stores.remote.client import get_bucket  # imports the client

        return get_bucket(self)

    def _with_text(self, text: str, *, folder: bool = False) -> Self:
        """Return a URL with another text and the client of this one."""
        url = type(self)(text)
        url.client = self.client
        url.folder = folder
        return url

    def __reduce__(self) -> tuple[object, ...]:
        return _make_url, (str(self), self.client, self.folder)


def _make_url(text: str, client: object | None, is_folder: bool) -> Url:
    """Return a URL with its client and its mark as a folder, also when it is unpickled."""
    url = Url(text)
    url.client = client
    url.folder = is_folder
    return url


def parse_url(text: str, client: object | None = None) -> Url:
    """Return a URL in its usual spelling.

    Args:
        text: A URL. With a client, it may also be a key in the bucket of that client.
        client: A store of obstore that the caller made.

    Raises:
        BadPath: The text is not a valid URL of an object store.

    >>> parse_url("S3://bucket//run/step-1/")
    's3://bucket/run/step-1'
    """
    if isinstance(text, Url) and client is None:
        return text
    match = URL.match(text)
    if match is not None and match[1].lower() in SCHEMES:
        scheme = match[1].lower()
        scheme = SCHEME_ALIASES.get(scheme, scheme)
        bucket = match[2]
        key = match[3]
    elif client is not None:
        scheme, bucket = _describe_client(client)
        key = text
    else:
        message = f"{text[:MAX_SHOWN_CHARACTERS]!r} is not the URL of an object store"
        raise BadPath(message, found=text)

    _check_bucket(scheme, bucket)
    components = key.rstrip("/").split("/")
    if "\0" in key or "." in components or ".." in components:
        raise BadPath(
            f"{text[:MAX_SHOWN_CHARACTERS]!r}: the key of an object must not contain NUL or a part "
            "'.' or '..'",
            found=text,
        )
    normalized_key = "/".join(component for component in components if component)
    normalized_url = f"{scheme}://{bucket}/{normalized_key}".rstrip("/")
    return _make_url(normalized_url, client, is_folder=key.endswith("/"))


def _check_bucket(scheme: str, bucket: str) -> None:
    """Raise `BadPath` if a URL has no bucket, or credentials in front of it."""
    # Azure puts the name of the container in front of an @.
    if "@" in bucket and not scheme.startswith("abfs"):
        # The error must not show the credentials, so it shows only the scheme.
        raise BadPath(
            "a URL must not contain credentials; set them in the environment, or pass a client in "
            "Python with store=",
            found=f"{scheme}://…",
        )
    if "?" in bucket or not bucket:
        message = f"the URL has no bucket; use {scheme}://BUCKET/KEY"
        raise BadPath(message, found=f"{scheme}://{bucket}")


def _describe_client(client: object) -> tuple[str, str]:
    """Return scheme and bucket of a client of obstore. Its other settings may be secret."""
    schemes = {"S3Store": "s3", "GCSStore": "gs", "AzureStore": "az"}
    scheme = schemes.get(type(client).__name__, "memory")
    config = getattr(client, "config", None) or {}
    for name in ("bucket", "container_name", "container"):
        if config.get(name):
            return scheme, str(config[name])
    return scheme, "store"
