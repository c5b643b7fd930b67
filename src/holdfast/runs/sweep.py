"""The sweep: what dead savers and half-finished deletions left in a bucket, and nothing else.

In a directory a save that dies leaves a hidden folder, whose lock says that nobody lives. A bucket has no locks: data without a
manifest may be a save that goes on. So the sweep waits (`grace`), and goes in this order:

    1  the time, by the store's own clock: a small object is put, and its date is asked for
    2  candidates: objects under the names that saves give to their data, in the run's prefix or one below it, and the probes,
       hidden uploads and claims of the commit (engine/commit/remote); older than the grace time
    3  the manifests beside them are read: what one of them names is no candidate
    4  once more, when all candidates are known: a save may have been published meanwhile
    5  what is named by none then is deleted

Nothing that a published manifest names is deleted, nor anything beside a manifest that cannot be understood, nor any object of
another name. A save must take less than the grace time from its first object to its manifest.

Parts of uploads that did not come to their end are no objects, and no request here lists them: a lifecycle rule of the bucket
removes them (docs/runs.md).
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta

from holdfast.core.arguments import understood
from holdfast.core.limits import Limits
from holdfast.core.quantities import seconds
from holdfast.engine.commit.remote import save_id
from holdfast.engine.commit.target import refusal
from holdfast.errors import BadArgument, HoldfastError, StoreError
from holdfast.formats.native.schema import MANIFEST
from holdfast.runs.bucket_steps import DATA, listed, named_by
from holdfast.stores.files import is_temporary
from holdfast.stores.paths import place_of
from holdfast.stores.remote.client import Bucket, Found, bucket_of
from holdfast.stores.remote.url import Url

__all__ = ["GRACE_S", "Swept", "sweep"]

GRACE_S = 24 * 3600.0

PROBE = re.compile(r".*\.holdfast-probe-[0-9a-f]{16}", re.ASCII | re.DOTALL)
"""What the commit tries the store with."""


@dataclass(frozen=True, slots=True)
class Swept:
    """What a sweep found."""

    path: str
    keys: tuple[str, ...]
    """Objects that were deleted, or would be."""
    nbytes: int
    young: int
    """Objects that no manifest names, and that are not old enough."""
    notes: tuple[str, ...] = ()
    """What was left, and why."""
    done: bool = False
    """Whether they were deleted; a dry run deletes nothing."""


@understood(grace=seconds)
def sweep(
    path: str | os.PathLike[str], *, grace: float | str = GRACE_S, dry_run: bool = False, store: object | None = None
) -> Swept:
    """Delete what dead savers left below a prefix of a bucket: data that no published manifest names, older than `grace` ("24h").

    A save that takes longer than the grace time loses its data. Raises `BadArgument` for a directory, which the next save cleans.
    """
    url = place_of(path, store)
    if not isinstance(url, Url):
        raise BadArgument("a sweep is for object stores; in a directory, the next save removes what dead ones left", found=url)
    bucket, tree = bucket_of(url), listed(url)
    ours = [(folder, name, one) for folder, below in tree.items() for name, one in below.items() if _is_ours(name)]
    notes: dict[str, str] = {}
    now = _now(bucket, url, (one for below in tree.values() for one in below.values()), dry_run=dry_run)
    before = now - timedelta(seconds=seconds(grace, "grace="))
    left = _unnamed(bucket, url, ours, notes)
    old = [item for item in left if item[2].changed <= before]
    sure = _unnamed(bucket, url, old, notes)
    keys = tuple(one.key for _, _, one in sure)
    if keys and not dry_run:
        try:
            bucket.delete(keys)
        except StoreError as error:
            raise refusal(f"not all was deleted: {error.message}; sweep again", url, error.errno) from None
    nbytes = sum(one.nbytes for _, _, one in sure)
    return Swept(url, keys, nbytes, len(left) - len(old), tuple(notes.values()), done=not dry_run)


Candidate = tuple[str, str, Found]
"""The name of a folder in the run, or '' for the run's own; the name in it; the object."""


def _is_ours(name: str) -> bool:
    """Whether a name is one that nobody but a save gives."""
    return DATA.fullmatch(name) is not None or ("/" not in name and (PROBE.fullmatch(name) is not None or is_temporary(name)))


def _unnamed(bucket: Bucket, url: Url, candidates: Iterable[Candidate], notes: dict[str, str]) -> list[Candidate]:
    """Those that no manifest names, as the store has it now."""
    by_folder: dict[str, list[Candidate]] = {}
    for item in candidates:
        by_folder.setdefault(item[0], []).append(item)
    found: list[Candidate] = []
    for folder, items in by_folder.items():
        key = "/".join(part for part in (url.key, folder, MANIFEST) if part)
        try:
            named = {name for name, _ in named_by(bytes(bucket.whole(key, Limits().index_nbytes).data))[0]}
        except HoldfastError as error:
            if isinstance(error, StoreError):
                if error.errno != errno.ENOENT:
                    raise
                named = set()
            else:
                notes[folder] = f"{folder or url}: its manifest cannot be understood, so nothing beside it goes: {error.message}"
                named = {name for _, name, _ in items if DATA.fullmatch(name)}
        found += [item for item in items if item[1] not in named]
    return found


def _now(bucket: Bucket, url: Url, seen: Iterable[Found], *, dry_run: bool) -> datetime:
    """The time, by the store's clock. Who may not write there gets that of the newest object, which is earlier."""
    probe = "/".join(part for part in (url.key, f"sweep.holdfast-probe-{save_id()}") if part)
    try:
        bucket.put(probe, b"")
        try:
            return bucket.head(probe).changed
        finally:
            bucket.delete([probe])
    except StoreError:
        times = [one.changed for one in seen]
        if not dry_run or not times:
            raise
        return max(times)
