"""The sweep: what dead savers and half-finished deletions left in a bucket, and nothing else.

A bucket has no locks: data without a manifest may be a save that goes on. So the sweep waits (`grace`), and goes in this order:

    1  the time, by the store's own clock: a small object is put, and its date is read
    2  candidates: objects under the names that saves give to their data, in the run's prefix or one below it, and the probes,
       hidden uploads and claims of the commit (engine/targets/bucket_commit); older than the grace time
    3  all manifests beside them are read: what one of them names is no candidate
    4  a claim is put (engine/targets/bucket_claims): from now on no save begins to share these; what one shares already stays
    5  the manifests are looked at once more: a save may have been published meanwhile
    6  what none of them names is deleted; so are claims of processes that died

Nothing that a published manifest names is deleted, nor anything beside a manifest that cannot be understood, nor what such a one
mentions, nor any object of another name. Unfinished uploads are no objects, and no request here lists them: a lifecycle rule of the
bucket removes them (docs/runs.md).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from datetime import datetime, timedelta

from holdfast.core.keys import DATA_KEY
from holdfast.core.options import validate_arguments
from holdfast.core.quantities import parse_seconds
from holdfast.core.value import Value
from holdfast.engine.targets.bucket_claims import (
    CLAIM_LIFE_S,
    CLAIMS_FOLDER,
    ReleasedObjects,
    release_objects,
)
from holdfast.engine.targets.bucket_commit import make_save_id
from holdfast.errors import BadArgument, NotCommitted, StoreError
from holdfast.stores.files import is_temporary
from holdfast.stores.paths import place_of
from holdfast.stores.place import place_at
from holdfast.stores.remote.client import Bucket, RemoteObject, get_bucket
from holdfast.stores.remote.url import Url
from holdfast.verbs.shared.references import References, listed

GRACE_S = 24 * 3600.0

PROBE = re.compile(r".*\.holdfast-probe-[0-9a-f]{16}", re.ASCII | re.DOTALL)
"""Names of objects with which the commit tries the store."""


class Swept(Value):
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


@validate_arguments(grace=parse_seconds)
def sweep(
    path: str | os.PathLike[str],
    *,
    grace: float | str = GRACE_S,
    dry_run: bool = False,
    store: object | None = None,
) -> Swept:
    """Delete what dead savers left below a prefix of a bucket: data that no published manifest names, older than `grace` ("24h").

    A save that takes longer than the grace time loses its data. Raises `BadArgument` for a directory, which the next save cleans.
    """
    place = place_of(path, store)
    url = place_at(place).url
    if url is None:
        raise BadArgument(
            "a sweep is for object stores; in a directory, the next save removes what dead ones left",
            found=place,
        )
    bucket, tree = get_bucket(url), listed(url)
    found = [(folder, name, one) for folder, below in tree.items() for name, one in below.items()]
    now = _now(bucket, url, (one for _, _, one in found), dry_run=dry_run)
    before = now - timedelta(seconds=parse_seconds(grace, "grace="))
    objects = {one.key: one for _, _, one in found}
    data = [(folder, one.key) for folder, name, one in found if DATA_KEY.fullmatch(name)]
    groups = [
        (References(url), [key for folder, key in data if folder]),
        # Data right in the prefix may be that of a step, and named by other steps.
        (References(url.parent if url.key else url), [key for folder, key in data if not folder]),
    ]
    traces: list[str] = []
    dead: list[str] = []
    for folder, name, one in found:
        is_ours = PROBE.fullmatch(name) is not None or is_temporary(name)
        if folder == CLAIMS_FOLDER or ("/" not in name and is_ours):
            traces.append(one.key)
            life = timedelta(seconds=2 * CLAIM_LIFE_S if CLAIMS_FOLDER in one.key else 0)
            if one.modified_at <= min(before, now - life):
                dead.append(one.key)
    young, notes = len(traces) - len(dead), list[str]()
    try:
        if not dry_run:
            bucket.delete(dead)
        for references, keys in groups:
            left = set(keys) - (references.named(keys) if keys else set())
            old = [key for key in keys if key in left and objects[key].modified_at <= before]
            young += len(left) - len(old)
            released = ReleasedObjects(old)
            if not dry_run:
                released = release_objects(references.parent, old, references.named)
            dead += released.deleted
            notes += [
                f"{folder or references.parent}: its manifest cannot be understood, so nothing beside it goes: {why}"
                for folder, why in references.notes.items()
            ]
            if released.in_use:
                notes.append(f"a save uses {len(released.in_use):,} objects; sweep again later")
    except StoreError as error:
        raise NotCommitted(
            f"not all was deleted: {error.message}; sweep again", file=url, errno=error.errno
        ) from None
    nbytes = sum(objects[key].nbytes for key in dead)
    return Swept(url, tuple(sorted(dead)), nbytes, young, tuple(notes), done=not dry_run)


def _now(bucket: Bucket, url: Url, seen: Iterable[RemoteObject], *, dry_run: bool) -> datetime:
    """The time, by the store's clock. Who may not write there gets that of the newest object, which is earlier."""
    probe = "/".join(part for part in (url.key, f"sweep.holdfast-probe-{make_save_id()}") if part)
    try:
        bucket.put(probe, b"")
        try:
            return bucket.head(probe).modified_at
        finally:
            bucket.delete([probe])
    except StoreError:
        times = [one.modified_at for one in seen]
        if not dry_run or not times:
            raise
        return max(times)
