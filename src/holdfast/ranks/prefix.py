"""A sharded save that comes together below a prefix of an object store.

Every rank uploads its own objects, whose names carry the id of the save, which the first rank has drawn and told. So nobody finds
them, and another save to the same place writes other names. The first rank puts the index, with a condition (engine/commit/remote):
`holdfast.json`; `model.safetensors.index.json`, which safetensors files of ranks have here alone; or the `.metadata` of a DCP
directory, whose checksum is then not recorded beside it: that would be a second name to write, and two names cannot be put at once.

**Who removes what.** A rank removes its objects where it fails before its receipt is out, and where the first rank has said that
nothing was published. It does not where the first rank is lost: that may have published meanwhile, or still do so. The first rank
gives up all objects that carry the id, also those of ranks that died. What is left then is for the sweep of the run.
"""

from __future__ import annotations

import errno
import io
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain

from holdfast.core.keys import beside
from holdfast.core.limits import Limits
from holdfast.core.protocols import Store
from holdfast.core.value import Value
from holdfast.engine.commit.claims import commit_sharing
from holdfast.engine.commit.remote import PrefixSave, save_id
from holdfast.engine.commit.target import refusal
from holdfast.engine.source import OpenSource
from holdfast.engine.stream import Told, Writer, write_stream
from holdfast.engine.write import Progress
from holdfast.errors import HoldfastError, StoreError
from holdfast.formats.dcp.index import BESIDE, METADATA, SavedTensor, read_index
from holdfast.formats.dcp.schema import Item
from holdfast.formats.index_file import read_index as read_pieces
from holdfast.formats.native.read import read_manifest
from holdfast.formats.safetensors.record import MANIFEST
from holdfast.plan.saves import FilePlan, LinkedFile
from holdfast.ranks.files import PIECES_INDEX, Receipt
from holdfast.rewrite.uploaded import NOTHING, ReplacedObjects
from holdfast.stores.remote.client import Bucket, bucket_of
from holdfast.stores.remote.store import RemoteStore
from holdfast.stores.remote.url import Url
from holdfast.stores.virtual import Virtual, VirtualFile

INDEXES = {"native": MANIFEST, "dcp": METADATA, "safetensors": PIECES_INDEX}
"""The object that makes the others a checkpoint, in each format."""

MOST = 1 << 20
"""Objects below a prefix that are looked through for those of a save."""


class BegunObject(Value, frozen=True):
    """An object to be uploaded."""

    plan: FilePlan
    prefix: Prefix

    def write(self, *, threads: int, progress: Progress | None, block: int | None) -> Mapping[str, int]:
        """From front to back, in parts of which several are under way."""
        crcs: dict[str, int] = {}
        plan = self.plan
        self.prefix.upload(
            plan.key, plan.nbytes, lambda target: crcs.update(write_stream(plan, Told(target, progress) if progress else target))
        )
        return crcs

    def give_up(self) -> None:
        """Nothing: an upload that fails leaves no object, and those that are there go by `Prefix.give_up`."""


class Prefix:
    """The objects of a save below a prefix, on a rank that uploads some of them."""

    def __init__(self, url: Url, save: str, *, index: str = MANIFEST, overwrite: bool = False) -> None:
        self.url, self.save = url, save
        self._save = PrefixSave(url, index, overwrite=overwrite)

    def begin(self, plan: FilePlan) -> BegunObject:
        return BegunObject(plan, self)

    def upload(self, key: str, nbytes: int, write: Callable[[Writer], None]) -> None:
        """Put an object of about so many bytes, which `write` gives from front to back."""
        self._save.write(key, nbytes, write)

    def link(self, file: LinkedFile) -> bool:
        return True  # the manifest names it where it is

    def close(self) -> None:
        """Nothing is open."""

    def give_up(self) -> None:
        """Remove what this rank has uploaded."""
        self._save.give_up()


class FirstPrefix(Prefix):
    """The same, on the rank that publishes."""

    def __init__(self, url: Url, format: str, *, overwrite: bool) -> None:
        super().__init__(url, save_id(), index=INDEXES[format], overwrite=overwrite)
        self._overwrite = overwrite
        self._over = False
        self._others = self._other_indexes()
        self._save.begin()

    @property
    def told(self) -> str:
        return self.save

    def publish(
        self,
        delivered: Sequence[Sequence[Receipt]],
        index: Sequence[FilePlan],
        *,
        check: Callable[[Store], None],
        attributes: Mapping[str, str] | None = None,
    ) -> None:
        """Put the index. What it replaced goes afterwards."""
        (last,) = [plan for plan in index if plan.key == self._save.index]
        for plan in index:
            if plan is not last:
                self.begin(plan).write(threads=1, progress=None, block=None)
        text = io.BytesIO()
        write_stream(last, text)
        replaced = objects_of(self.url, self._save.index) if self._overwrite else NOTHING
        bucket, parent, own = bucket_of(self.url), self.url.parent, self.url.key.rpartition("/")[2]
        store, used = Virtual(self.url), list[tuple[str, str, int]]()
        for receipt in chain.from_iterable(delivered):
            folder, name = beside(receipt.key) or (own, receipt.key)
            used += [(folder, name, receipt.nbytes)] if receipt.linked else []
            key = parent.below(f"{folder}/{name}" if folder else name).key
            store.put(VirtualFile(receipt.nbytes, partial(_read, bucket, key)), receipt.key)
        store.put(_literal(text.getvalue()), last.key)
        check(store)
        if last.key == METADATA:
            # It would speak of another index; nothing else needs it.
            self._save.remove([BESIDE])
        commit_sharing(self._save, used, lambda: self._save.commit(text.getvalue(), attributes))
        self._over = True
        self._save.remove(self._others)
        replaced.remove(self._save, keep={self._save.index})

    def _other_indexes(self) -> list[str]:
        """The indexes of other formats that are there. Raises `NotCommitted` where one may not, or cannot, be replaced."""
        there = [name for name in INDEXES.values() if name != self._save.index and self._is_there(name)]
        if there and not self._overwrite:
            raise refusal("a checkpoint exists there; pass overwrite=True to replace it", self.url, errno.EEXIST)
        if MANIFEST in there:
            message = f"there is a checkpoint with a {MANIFEST}, which would still be the one that is opened; save elsewhere"
            raise refusal(f"{message}, or remove that object first", self.url, errno.EEXIST)
        return there

    def _is_there(self, name: str) -> bool:
        try:
            bucket_of(self.url).head(self.url.below(name).key)
        except StoreError as error:
            if error.errno != errno.ENOENT:
                raise refusal(f"the target cannot be looked at: {error.message}", self.url, error.errno) from None
            return False
        return True

    def give_up(self) -> None:
        """Remove all objects of the save, also of ranks that are no more, unless it was published or may have been."""
        if self._over or not self._save.revocable:
            return
        self._over = True
        below = f"{self.url.key}/" if self.url.key else ""
        super().give_up()
        with suppress(HoldfastError):
            bucket = bucket_of(self.url)
            found = [one.key for one in bucket.below(below, MOST)]
            bucket.delete([key for key in found if key.startswith(below) and self.save in key[len(below) :]])


def objects_of(url: Url, index: str) -> ReplacedObjects:
    """What the checkpoint there names, in the formats that ranks write; nothing of one that cannot be read."""
    found: list[str] = []
    shared = False
    with suppress(HoldfastError):
        store = RemoteStore(url)
        source = OpenSource(store, limits=Limits())
        if store.holds(MANIFEST):
            manifest = read_manifest(source)
            found += [*(file.name for file in manifest.files), *(file.name for file in manifest.others or ())]
            shared = manifest.hash is not None
        elif store.holds(METADATA):
            for entry in read_index(source, whole=False).entries.values():
                if isinstance(entry, SavedTensor):
                    found += [piece.item.file for piece in entry.pieces]
                elif isinstance(entry, Item):
                    found.append(entry.file)
        elif store.holds(PIECES_INDEX):
            found += read_pieces(source, PIECES_INDEX).files
    return ReplacedObjects([index, *(name for name in dict.fromkeys(found) if "/" not in name or beside(name))], shared)


def _literal(content: bytes) -> VirtualFile:
    view = memoryview(content)

    def read(start: int, out: memoryview) -> None:
        out[:] = view[start : start + out.nbytes]

    return VirtualFile(view.nbytes, read)


def _read(bucket: Bucket, key: str, start: int, out: memoryview) -> None:
    try:
        got = bucket.get(key, start, start + out.nbytes)
    except StoreError as error:
        if error.errno == errno.ENOENT:
            raise StoreError("an object that a rank has uploaded is not there", file=bucket.url(key)) from None
        raise
    out[:] = got.data
