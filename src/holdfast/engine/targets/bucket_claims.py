"""Claims: nobody deletes an object of a bucket while a save is about to name it.

The checkpoints of a run in a bucket name objects of each other (`core.keys.parse_sibling_key`), so
that unchanged data is stored once. An object may be deleted when no published manifest names it.
But a save may be about to publish one that does, and no request has conditions on two objects. So
saves and deletions announce in a small object, a claim, what they are about to do, and then look
whether the other side has done so:

    a save                                        a deletion
    1  puts a claim "uses" with the folders       1  puts a claim "deletes" with the folders
       whose objects it names                        from which it deletes
    2  lists claims. If a deletion works in       2  lists claims. What is in a used folder
       one of the folders, it gives up               stays
    3  lists these folders. If an object is       3  reads the manifests. What they name stays
       gone, it gives up
    4  puts its manifest                          4  deletes the rest
    5  deletes its claim                          5  deletes its claim

**Why this is safe.** Suppose that a deletion deletes an object that a save names and publishes.
There are three cases for the moment in which the deletion listed claims (2):

    before the save put its claim    The claim of the deletion was there even earlier. The save saw
                                     it (2), or it was gone by then, and with it the object, which
                                     the save missed (3).
    while the claim was there        The deletion saw it and kept the object.
    after the save deleted it        The manifest was published, and the deletion read it (3).

So this cannot happen. All that it needs is a store whose reads and lists show what was written
before. The stores of all cloud providers are like that.

**Dead processes** leave their claims. A claim counts for `CLAIM_LIFE_S`. Its age is the difference
between two times of the store, so that no clock of a machine matters. Its owner acts on it for
`CLAIM_WORK_S` by its own clock. The rest is for a last request that is slow. The claim of a dead
save only delays the deletion of some data. That of a dead deletion makes saves write everything for
a while.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from typing import Literal, NamedTuple

import msgspec

from holdfast.core.documents import DocumentType, read_document, write_document
from holdfast.core.value import Value
from holdfast.engine.targets.bucket_commit import PrefixSave, make_save_id
from holdfast.errors import (
    DurabilityUncertain,
    FormatError,
    HoldfastError,
    LimitExceeded,
    NotCommitted,
    StoreError,
)
from holdfast.stores.remote.client import get_bucket
from holdfast.stores.remote.failures import find_existing
from holdfast.stores.remote.url import Url

CLAIMS_FOLDER = "holdfast.claims"
"""The folder of the claims, beside the folders of the checkpoints."""

CLAIM_LIFE_S = 1800.0
"""How long other processes respect a claim."""

CLAIM_WORK_S = 600.0
"""How long the owner of a claim acts on it."""

CLAIM_REMOVAL_AGE_S = 2 * CLAIM_LIFE_S
"""The age at which other processes delete a claim. It counts for nothing long before that."""

MAX_CLAIM_NBYTES = 1 << 20
MAX_CLAIMS = 100_000

Activity = Literal["uses", "deletes"]


class ClaimContent(msgspec.Struct, frozen=True):
    """The content of a claim."""

    activity: Activity = msgspec.field(name="does")
    """What the owner does. In the object, the field is called `does`."""
    folders: tuple[str, ...]
    """The folders of the objects that are used or deleted."""


DOCUMENT = DocumentType(
    name="claim", decoder=msgspec.json.Decoder(ClaimContent), max_nbytes=MAX_CLAIM_NBYTES
)


class Claim:
    """A claim that this process has put."""

    def __init__(self, parent: Url, key: str, put_at_s: float) -> None:
        """Describe a claim.

        Args:
            parent: The prefix of the run, which has the folders of the checkpoints.
            key: The key of the claim.
            put_at_s: When it was put, by `time.monotonic`.
        """
        self._parent = parent
        self._key = key
        self._put_at_s = put_at_s

    @property
    def is_in_force(self) -> bool:
        """Whether this process may still act on the claim."""
        return time.monotonic() - self._put_at_s < CLAIM_WORK_S

    def find_claimed_by_others(self, activity: Activity) -> set[str]:
        """Return the folders in which other processes are active in this way.

        Claims that expired long ago are deleted on the way.

        Raises:
            StoreError: The claims cannot be listed or understood.
        """
        put_times = _list_put_times(self._parent)
        own_put_time = put_times.pop(self._key, None)
        if own_put_time is None:
            message = (
                "the store does not list what was just written to it; checkpoints cannot share "
                "bytes there"
            )
            raise _make_unsure_error(message, self._parent)

        # The store has just set this time, so it is the current time by the clock of the store.
        folders = _read_claimed_folders(self._parent, activity, put_times, now=own_put_time)
        removable_keys: list[str] = []
        for key, put_time in put_times.items():
            if (own_put_time - put_time).total_seconds() >= CLAIM_REMOVAL_AGE_S:
                removable_keys.append(key)
        if removable_keys:
            with suppress(HoldfastError):
                get_bucket(self._parent).delete(removable_keys)
        return folders


def list_claimed_folders(parent: Url, activity: Activity) -> set[str]:
    """Return the folders in which processes are active in this way, without claiming anything.

    The ages of claims are measured by the clock of this machine, which may be wrong. That is good
    enough for a forecast. A save or a deletion asks its own claim (`find_claimed_by_others`).

    Args:
        parent: The prefix of the run.
        activity: Which claims to look for.

    Raises:
        StoreError: The claims cannot be listed or understood.
    """
    put_times = _list_put_times(parent)
    return _read_claimed_folders(parent, activity, put_times, now=datetime.now(UTC))


def _list_put_times(parent: Url) -> dict[str, datetime]:
    """Return when each claim of a run was put, by the clock of the store."""
    claims = get_bucket(parent).list_objects(f"{_make_claims_key(parent)}/", MAX_CLAIMS)
    return {claim.key: claim.modified_at for claim in claims}


def _read_claimed_folders(
    parent: Url, activity: Activity, put_times: Mapping[str, datetime], *, now: datetime
) -> set[str]:
    """Read the claims that have not expired, and return the folders that they name.

    Args:
        parent: The prefix of the run.
        activity: Which claims count.
        put_times: When each claim was put, by its key.
        now: The current time.
    """
    bucket = get_bucket(parent)
    folders: set[str] = set()
    for key, put_time in put_times.items():
        if (now - put_time).total_seconds() >= CLAIM_LIFE_S:
            continue
        try:
            answer = find_existing(bucket.get_object, key, MAX_CLAIM_NBYTES)
            # Its owner may have deleted it after it was listed.
            if answer is not None:
                content = read_document(DOCUMENT, bytes(answer.data))
                if content.activity == activity:
                    folders.update(content.folders)
        except (FormatError, LimitExceeded):
            message = "this claim cannot be understood; perhaps a newer Holdfast works here"
            raise _make_unsure_error(message, bucket.url(key)) from None
    return folders


def _make_unsure_error(message: str, url: str) -> StoreError:
    """Return the error for claims that leave it unknown what other processes are doing."""
    error = StoreError(message, file=url)
    error.errno = errno.EAGAIN
    return error


def _make_claims_key(parent: Url) -> str:
    """Return the key of the folder that has the claims of a run."""
    return f"{parent.key}/{CLAIMS_FOLDER}" if parent.key else CLAIMS_FOLDER


@contextmanager
def announced_claim(parent: Url, activity: Activity, folders: Collection[str]) -> Iterator[Claim]:
    """Announce to other processes what the block does.

    The claim is deleted at the end. If the process dies, or if it is unknown whether the block has
    published a manifest, the claim stays until it expires.

    Args:
        parent: The prefix of the run.
        activity: What the block does.
        folders: The folders in which it does that.
    """
    key = f"{_make_claims_key(parent)}/{make_save_id()}"
    bucket = get_bucket(parent)
    # Taken before the put, so that this process stops acting on the claim rather too early.
    put_at_s = time.monotonic()
    is_outcome_known = False
    try:
        content = ClaimContent(activity, tuple(sorted(folders)))
        bucket.put(key, write_document(DOCUMENT, content))
        yield Claim(parent, key, put_at_s)
        is_outcome_known = True
    except HoldfastError as error:
        # If the outcome is uncertain, a manifest may still be on its way.
        is_outcome_known = not isinstance(error, DurabilityUncertain)
        raise
    finally:
        if is_outcome_known:
            with suppress(HoldfastError):
                bucket.delete([key])


class SharedObject(NamedTuple):
    """An object of another checkpoint that a new checkpoint names."""

    folder: str
    """The folder of the other checkpoint, beside that of the new one."""
    name: str
    nbytes: int


def commit_with_claim(
    save: PrefixSave, shared: Sequence[SharedObject], commit: Callable[[], None]
) -> None:
    """Publish a checkpoint that names objects of other checkpoints, if nobody deletes them meanwhile.

    This implements the steps of a save that the module's docstring lists. A crash before the commit leaves the
    claim, which expires. A crash after it leaves the claim and the published checkpoint.

    Args:
        save: The save.
        shared: The objects of other checkpoints that it names.
        commit: Puts its manifest.

    Raises:
        NotCommitted: With the code ESTALE, if an object is gone or may be deleted. Then the save
            has to write everything.
    """
    if not shared:
        commit()
        return
    parent = save.url.parent
    folders = {shared_object.folder for shared_object in shared}
    try:
        with announced_claim(parent, "uses", folders) as claim:
            deleted_folders = folders & claim.find_claimed_by_others("deletes")
            if deleted_folders:
                reason = f"data of {min(deleted_folders)!r} is being deleted"
                raise _make_stale_error(save.url, reason)
            check_shared_objects(parent, shared, save.url)
            if not claim.is_in_force:
                reason = "the store answers too slowly to be sure of what is there"
                raise _make_stale_error(save.url, reason)
            commit()
    except StoreError as error:
        # With ESTALE the caller saves again, without sharing anything.
        code = errno.ESTALE if error.errno == errno.EAGAIN else error.errno
        message = f"cannot check the objects of the base: {error.message}; nothing was published"
        raise NotCommitted(message, file=save.url, errno=code) from None


def check_shared_objects(parent: Url, shared: Sequence[SharedObject], url: Url) -> None:
    """Raise `NotCommitted` if one of these objects is missing or has another size.

    Args:
        parent: The prefix of the run.
        shared: The objects.
        url: The checkpoint that names them, for messages.
    """
    bucket = get_bucket(parent)
    parent_prefix = f"{parent.key}/" if parent.key else ""
    existing_nbytes: dict[tuple[str, str], int] = {}
    for folder in sorted({shared_object.folder for shared_object in shared}):
        prefix = f"{parent_prefix}{folder}/"
        for listed in bucket.list_folder(prefix)[1]:
            existing_nbytes[folder, listed.key.removeprefix(prefix)] = listed.nbytes

    for folder, name, nbytes in shared:
        if existing_nbytes.get((folder, name)) != nbytes:
            raise _make_stale_error(url, f"{folder}/{name} is gone")


def _make_stale_error(url: Url, reason: str) -> NotCommitted:
    message = f"the base cannot be shared with: {reason}; nothing was published"
    return NotCommitted(message, file=url, errno=errno.ESTALE)


class ReleasedObjects(Value, frozen=True):
    """What became of objects that nobody seemed to need."""

    deleted: Sequence[str] = ()
    in_use: Sequence[str] = ()
    """Objects that stay because a save is using their folder."""


def release_objects(
    parent: Url, keys: Collection[str], find_named: Callable[[Collection[str]], Collection[str]]
) -> ReleasedObjects:
    """Delete objects that no manifest names any more, and that no save is about to name.

    These are the steps of a deletion in the module's docstring. A crash leaves some of the objects,
    and a claim that expires.

    Args:
        parent: The prefix of the run.
        keys: The objects, in folders of `parent`.
        find_named: Returns which of these keys published manifests name. It must read them anew.

    Raises:
        StoreError: It cannot be found out what other processes are doing. Nothing was deleted.
    """
    parent_prefix = f"{parent.key}/" if parent.key else ""
    folder_of_key = {key: key.removeprefix(parent_prefix).rpartition("/")[0] for key in keys}
    if not folder_of_key:
        return ReleasedObjects()

    with announced_claim(parent, "deletes", set(folder_of_key.values())) as claim:
        used_folders = claim.find_claimed_by_others("uses")
        in_use = [key for key, folder in folder_of_key.items() if folder in used_folders]
        candidates = [key for key, folder in folder_of_key.items() if folder not in used_folders]
        named_keys = set(find_named(candidates))
        unneeded_keys = [key for key in candidates if key not in named_keys]
        if not claim.is_in_force:
            message = "the store answers too slowly to be sure of what is needed; try again"
            raise _make_unsure_error(message, parent)
        get_bucket(parent).delete(unneeded_keys)
        return ReleasedObjects(unneeded_keys, in_use)
