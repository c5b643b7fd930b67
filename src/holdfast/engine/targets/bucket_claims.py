"""Claims: objects that several checkpoints name are not deleted by one process while another is about to name them.

Checkpoints in a bucket name objects of their siblings (`core.keys.parse_sibling_key`). An object goes when no published manifest
names it. But a save may be about to publish one that does, and no put has a condition on two objects. So whoever names and whoever
deletes each say first what they are about to do, in a small object, and then look whether the other has said so:

    a save                                                    a deletion
    1  puts a claim, "uses", with the folders it names        1  puts a claim, "deletes"
    2  lists claims: a deletion in one of them? Given up      2  lists claims: what is in a used folder stays
    3  lists these folders: is an object gone? Given up       3  reads the manifests: what they name stays
    4  puts its manifest                                      4  deletes the rest
    5  takes its claim away                                   5  takes its claim away

Let a deletion delete what a save names and publishes. If it listed claims (2) before the save put its own (1), its own claim was
there even earlier: the save sees that in its 2, or it is gone by then, and so is the object, which the save sees in its 3. If it
listed them while the save's claim was there, it saw that. If it listed them afterwards, the manifest had been published, and the
deletion read it, since it reads manifests after it has listed claims. So it cannot be. All that is needed is a store whose reads
and lists see what was written before, and those of all clouds do.

**The dead** leave their claims. A claim counts for `CLAIM_LIFE_S`, by times that the store gave to
it and to the claim of whoever asks: no clock of a machine is compared with another's. Who made it
acts on it for `CLAIM_WORK_S` by its own clock. This leaves time for a last request that is slow. A
dead save's claim holds up no more than the deletion of some data, and a dead deletion's makes saves
write everything for a while.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from typing import Literal

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

CLAIMS_FOLDER = (
    "holdfast.claims"  # The folder of the claims, beside the checkpoints that they speak of.
)
CLAIM_LIFE_S = 1800.0

CLAIM_WORK_S = 600.0  # How long whoever made it acts on it.
MOST_NBYTES, MOST = 1 << 20, 100_000

Does = Literal["uses", "deletes"]


class ClaimContent(msgspec.Struct, frozen=True):
    does: Does
    folders: tuple[str, ...]


DOCUMENT = DocumentType(
    name="claim", decoder=msgspec.json.Decoder(ClaimContent), max_nbytes=MOST_NBYTES
)


class Claim:
    def __init__(self, parent: Url, key: str, began: float) -> None:
        self._parent, self._key, self._began = parent, key, began

    @property
    def counts(self) -> bool:
        """Whether this process may still act on it."""
        return time.monotonic() - self._began < CLAIM_WORK_S

    def others(self, does: Does) -> set[str]:
        """The folders in which others do this, of those claims that count."""
        return list_claimed_folders(self._parent, does, mine=self._key)


def list_claimed_folders(parent: Url, does: Does, *, mine: str | None = None) -> set[str]:
    """The folders beside each other in `parent` in which somebody does this. Without a claim of one's own (`mine`) the age of the
    others is that by the clock of this machine: good for a forecast."""
    bucket, found, old = get_bucket(parent), set[str](), list[str]()
    rows = {one.key: one.modified_at for one in bucket.list_objects(f"{_below(parent)}/", MOST)}
    if mine is not None and mine not in rows:
        raise _unsure(
            "the store does not list what was just written to it; checkpoints cannot share bytes there",
            parent,
        )
    now = datetime.now(UTC) if mine is None else rows[mine]
    for key, changed in rows.items():
        age = (now - changed).total_seconds()
        if key == mine or age >= CLAIM_LIFE_S:
            old += [key] if age >= 2 * CLAIM_LIFE_S and mine is not None else []
            continue
        try:
            got = find_existing(bucket.get_object, key, MOST_NBYTES)
            content = (
                None if got is None else read_document(DOCUMENT, bytes(got.data))
            )  # None: it has been taken away
        except (FormatError, LimitExceeded):
            raise _unsure(
                "this claim cannot be understood; perhaps a newer Holdfast works here",
                bucket.url(key),
            ) from None
        found.update(content.folders if content is not None and content.does == does else ())
    if old:
        with suppress(HoldfastError):
            bucket.delete(old)
    return found


def _unsure(message: str, url: str) -> StoreError:
    raised = StoreError(message, file=url)
    raised.errno = errno.EAGAIN
    return raised


def _below(parent: Url) -> str:
    return f"{parent.key}/{CLAIMS_FOLDER}" if parent.key else CLAIMS_FOLDER


@contextmanager
def claiming(parent: Url, does: Does, folders: Collection[str]) -> Iterator[Claim]:
    """A block in which all others know what is done here. Where nobody can say how it ended, the claim stays, and grows old."""
    key, bucket, began = f"{_below(parent)}/{make_save_id()}", get_bucket(parent), time.monotonic()

    def over() -> None:
        with suppress(HoldfastError):
            bucket.delete([key])

    try:
        bucket.put(key, write_document(DOCUMENT, ClaimContent(does, tuple(sorted(folders)))))
        yield Claim(parent, key, began)
    except DurabilityUncertain:
        raise  # a manifest may be on its way
    except HoldfastError:
        over()
        raise
    over()


Used = Sequence[
    tuple[str, str, int]
]  # Objects of which others are the owners: folder, name and length of each.


def commit_with_claim(save: PrefixSave, used: Used, commit: Callable[[], None]) -> None:
    """Publish a checkpoint that names these objects beside it. Raises `NotCommitted` with ESTALE where one of them is gone, or may
    go: then everything has to be written."""
    if not used:
        commit()
        return
    parent, folders = save.url.parent, {folder for folder, _, _ in used}
    try:
        with claiming(parent, "uses", folders) as claim:
            going = folders & claim.others("deletes")
            if going:
                raise _stale(save.url, f"data of {min(going)!r} is being deleted")
            _look(parent, used, save.url)
            if not claim.counts:
                raise _stale(save.url, "the store answers too slowly to be sure of what is there")
            commit()
    except StoreError as error:
        code = errno.ESTALE if error.errno == errno.EAGAIN else error.errno
        raise NotCommitted(
            f"what the base has cannot be looked at: {error.message}; nothing was published",
            file=save.url,
            errno=code,
        ) from None


def _look(parent: Url, used: Used, url: Url) -> None:
    """Raise where one of these objects is not there with its length."""
    bucket, start = get_bucket(parent), f"{parent.key}/" if parent.key else ""
    for folder in sorted({folder for folder, _, _ in used}):
        prefix = f"{start}{folder}/"
        there = {one.key.removeprefix(prefix): one.nbytes for one in bucket.list_folder(prefix)[1]}
        for own, name, nbytes in used:
            if own == folder and there.get(name) != nbytes:
                raise _stale(url, f"{folder}/{name} is gone")


def _stale(url: Url, why: str) -> HoldfastError:
    return NotCommitted(
        f"the base cannot be shared with: {why}; nothing was published",
        file=url,
        errno=errno.ESTALE,
    )


class ReleasedObjects(Value, frozen=True):
    """What became of objects that nobody was to need."""

    deleted: Sequence[str] = ()
    in_use: Sequence[str] = ()  # Those that stay because a save uses their folder.


def release_objects(
    parent: Url, keys: Collection[str], named: Callable[[Collection[str]], Collection[str]]
) -> ReleasedObjects:
    """Delete objects in folders of `parent` that no manifest names any more. `named` says which of these keys a published manifest
    names; it looks anew. Raises `StoreError`."""
    start = f"{parent.key}/" if parent.key else ""
    folders = {key: key.removeprefix(start).rpartition("/")[0] for key in keys}
    if not folders:
        return ReleasedObjects()
    with claiming(parent, "deletes", set(folders.values())) as claim:
        used = claim.others("uses")
        free = [key for key in folders if folders[key] not in used]
        taken = set(named(free))
        free = [key for key in free if key not in taken]
        if not claim.counts:
            raise _unsure(
                "the store answers too slowly to be sure of what is needed; try again", parent
            )
        get_bucket(parent).delete(free)
        return ReleasedObjects(free, [key for key in folders if folders[key] in used])
