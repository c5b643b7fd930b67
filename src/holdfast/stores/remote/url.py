"""`Url`: the place of an object, or of all objects below a prefix. `stores/place` describes the members that a path has, too.

A URL is text, and goes wherever a path goes. It never has credentials in it: those come from the environment, or with a client that
the caller has made.

    s3://bucket/run/step-1000      Amazon's S3 and everything that speaks like it (AWS_ENDPOINT_URL); s3a:// as well
    gs://bucket/run/step-1000      Google Cloud Storage
    az://container/run/step-1000   Azure Blob Storage (AZURE_STORAGE_ACCOUNT_NAME); abfs:// and abfss:// as well
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
from holdfast.stores.paths import SCHEMES, URL, is_url
from holdfast.stores.remote.failures import if_there

if TYPE_CHECKING:
    from holdfast.stores.remote.client import Bucket

SUFFIX = re.compile(r"\.[a-z]\w*\Z", re.IGNORECASE)
"""What the name of an object ends with. The numbers in `step-1.5` and `Llama-3.1-8B` are no suffixes."""

PART_NBYTES = 16 << 20  # Bytes of one part of an upload: S3 takes 10,000 parts of at least 5 MiB.
UPLOADING = 12  # Parts of one upload that are under way at once.
COPIED_NBYTES = (
    5 << 30
)  # S3 copies objects up to this length by itself; longer ones pass through here.

NAMES = {"s3a": "s3", "azure": "az"}  # Schemes that are another's name.
MOST_OBJECTS = 100_000  # Below a place of which everything is listed.
Stamps = list[
    tuple[str, int, str]
]  # Files by name, length, and what changes with them: a time or an etag.
Problem = Callable[[str, str], None]  # Told of a place that cannot be listed, and why.
Recover = Callable[[str], str | None]  # From a path that is not there to what stands in for it.


class Url(str):
    client: object | None = None
    """The obstore store that the caller gave, whose root is the bucket; None for one that is made from the environment."""
    folder: bool = False
    """Whether it was given with a slash at its end, which says that a directory is meant."""

    @property
    def scheme(self) -> str:
        return self.partition("://")[0]

    @property
    def root(self) -> str:
        scheme, _, rest = self.partition("://")
        return f"{scheme}://{rest.partition('/')[0]}"

    @property
    def key(self) -> str:
        """The place in the bucket, without a slash at its end; empty for the bucket itself."""
        return self.partition("://")[2].partition("/")[2].rstrip("/")

    @property
    def identity(self) -> tuple[object, ...]:
        # Stores in memory have no names; those of a bucket that two clients reach are the same.
        return "object", self.root, self.key, id(self.client) if self.scheme == "memory" else None

    on_disk = False

    @property
    def url(self) -> Self:
        return self

    absolute = real = url

    @property
    def name(self) -> str:
        return self.rpartition("/")[2]

    @property
    def parent(self) -> Self:
        """The prefix in which this place is; the bucket for one at its top, and for itself."""
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
        """Whether its name has a suffix, so that it is an object, unless there is none."""
        return SUFFIX.search(self.name) is not None

    is_folder = is_marked_as_folder
    may_be_file = True

    def below(self, name: str, *, folder: bool = False) -> Self:
        return self._at(f"{self.rstrip('/')}/{name}", folder=folder)

    def sibling(self, name: str) -> Self:
        return self._at(f"{self.rstrip('/').rpartition('/')[0]}/{name}")

    def file(self, key: str) -> str:
        return key if is_url(key) else self if self.name == key else self.below(key)

    def is_same(self, other: object) -> bool:
        return isinstance(other, Url) and self.identity == other.identity

    def free_nbytes(self) -> int | None:
        return None

    def normalize(self, limits: Limits) -> Self:
        from holdfast.stores.remote.store import RemoteStore

        store = RemoteStore(self, limits=limits)
        store.close()
        self.folder = store.folder
        return self

    def walk(self, most: int, problem: Problem) -> Iterator[tuple[str, Sequence[str]]]:
        start = f"{self.key}/" if self.key else ""
        folders: dict[str, list[str]] = {}
        try:
            listed = self._bucket.below(start, most)
        except HoldfastError as error:
            problem(self, str(error))
            return
        for found in listed:
            folder, _, name = found.key.removeprefix(start).rpartition("/")
            if name:
                folders.setdefault(folder, []).append(name)
        for folder, names in sorted(folders.items()):
            yield self.below(folder, folder=True) if folder else self, names

    def files(self) -> dict[str, int]:
        _, found = self._bucket.folders(self.key)
        return {
            one.key.rpartition("/")[2]: one.nbytes for one in sorted(found, key=lambda one: one.key)
        }

    def stamps(self) -> Stamps | None:
        found = self._bucket.below(f"{self.key}/", MOST_OBJECTS)
        if single := if_there(self._bucket.head, self.key):
            found = [single, *(one for one in found if one.key != single.key)]
        # Without etags nobody can tell.
        if not found or any(one.etag is None for one in found):
            return None
        return sorted((one.key.removeprefix(self.key), one.nbytes, str(one.etag)) for one in found)

    def store(self, limits: Limits, recover: Recover) -> Store:
        from holdfast.stores.remote.store import RemoteStore

        return RemoteStore(self, limits=limits)

    @property
    def _bucket(self) -> Bucket:
        from holdfast.stores.remote.client import bucket_of  # for those who have a bucket

        return bucket_of(self)

    def _at(self, text: str, *, folder: bool = False) -> Self:
        url = type(self)(text)
        url.client, url.folder = self.client, folder
        return url

    def __reduce__(self) -> tuple[object, ...]:
        return _url, (str(self), self.client, self.folder)


def _url(text: str, client: object | None, folder: bool) -> Url:
    url = Url(text)
    url.client, url.folder = client, folder
    return url


def url_of(text: str, client: object | None = None) -> Url:
    """The URL that was given, in one spelling; or the place of a key in the bucket of a client.

    >>> url_of("S3://bucket//run/step-1/")
    's3://bucket/run/step-1'
    """
    if isinstance(text, Url) and client is None:
        return text
    found = URL.match(text)
    if found is not None and found[1].lower() in SCHEMES:
        scheme, bucket, key = found[1].lower(), found[2], found[3]
        scheme = NAMES.get(scheme, scheme)
    elif client is not None:
        scheme, bucket, key = *_named(client), text
    else:
        raise BadPath(f"{text[:200]!r} is no URL of an object store", found=text)
    if "@" in bucket and not scheme.startswith("abfs"):
        raise BadPath(
            "a URL holds no credentials; give them by the environment, or in Python with store=",
            found=f"{scheme}://…",
        )
    if "?" in bucket or not bucket:
        raise BadPath(f"a bucket is missing: {scheme}://BUCKET/KEY", found=f"{scheme}://{bucket}")
    parts = key.rstrip("/").split("/")
    if "\0" in key or any(part in (".", "..") for part in parts):
        raise BadPath(
            f"{text[:200]!r}: the key of an object has no NUL and no part '.' or '..'", found=text
        )
    return _url(
        f"{scheme}://{bucket}/{'/'.join(part for part in parts if part)}".rstrip("/"),
        client,
        key.endswith("/"),
    )


def _named(client: object) -> tuple[str, str]:
    """Scheme and bucket of a client, for people; nothing else of what it knows."""
    scheme = {"S3Store": "s3", "GCSStore": "gs", "AzureStore": "az"}.get(
        type(client).__name__, "memory"
    )
    config = getattr(client, "config", None) or {}
    bucket = next(
        (config[name] for name in ("bucket", "container_name", "container") if config.get(name)),
        "store",
    )
    return scheme, str(bucket)
