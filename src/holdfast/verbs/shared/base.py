"""The base of a save: an older native directory beside it, of which the new one takes over what did not change.

    save(state, "step-2", base="step-1")

Files are linked. In an object store, where there are no links, the new manifest names the objects where they are, in a folder
beside its own (`engine/targets/bucket_claims` keeps them there).

The hashes of the base are compared with the tensors (`engine.digest`), and what is the same is taken over (`formats.native.base`).
A base that cannot be used, because it is torn, of another format, without hashes, or on another file system, is a note, and
everything is written. A base that is not there at all is a mistake, and refused.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Sequence
from contextlib import closing
from functools import partial

from holdfast.core.content_hash import HASH, HashAndHead
from holdfast.core.keys import DATA_KEY, parse_sibling_key
from holdfast.core.limits import DEFAULTS, Limits
from holdfast.core.protocols import Store
from holdfast.core.table import Table
from holdfast.core.tensor import LazyTensor
from holdfast.core.value import Value, replace
from holdfast.engine.digest import find_unchanged, find_unchanged_rows
from holdfast.engine.source import OpenSource
from holdfast.engine.threads import run_all
from holdfast.errors import BadArgument, HoldfastError, StoreError, Unsupported
from holdfast.formats import format_of
from holdfast.formats.native.base import Base, Chunks, Reuse, elements_of, recorded_chunks
from holdfast.formats.native.boxes import Boxes
from holdfast.formats.native.read import read_manifest
from holdfast.formats.native.schema import Parsed
from holdfast.formats.safetensors.schema import MANIFEST, PREFIX_NBYTES
from holdfast.stores.place import follow_link, place_at
from holdfast.stores.remote.url import Url
from holdfast.verbs.open import open_store

SOME_DATA = "data-0000000000000000-00001-of-00001.safetensors"
"""A name that a data object might have."""


def check_shares(path: str, format: str, base: str | None) -> None:
    """Raise `Unsupported` if the format cannot share files with a base checkpoint."""
    if "take_over" not in format_of(format).takes:
        given = "base=" if base is not None else "hashes="
        raise Unsupported(
            f"only native directories share files, and this is {format}; leave {given} away",
            file=path or None,
        )


class OpenBase(Value, frozen=True):
    """A base that is open, or notes that say why it is not used."""

    base: Base | None = None
    store: Store | None = None
    notes: tuple[str, ...] = ()
    threads: int | None = None
    block: int | None = None

    def take_over(self, table: Table, rows: Sequence[int]) -> Reuse:
        """The data of these rows, each a tensor, that the base has already. Reads as much of them as is needed to know."""
        if self.base is None:
            return Reuse(notes=self.notes)
        return self._taken(
            self.base, table, self.base.tensors(table, rows), range(len(self.base.manifest.files))
        )

    def take_over_boxes(self, boxes: Boxes) -> Reuse:
        """The data of these boxes of one rank that the base has already."""
        if self.base is None:
            return Reuse(notes=self.notes)
        shapes = [kind.shape for kind in boxes.table.kinds]
        found = self.base.boxes(boxes.table, [shapes[one] for one in boxes.whole], boxes.starts)
        return self._taken(self.base, boxes.table, *found)

    def _taken(self, base: Base, table: Table, there: Chunks, files: Iterable[int]) -> Reuse:
        """The rows that did not change, of those that the base has in these files."""
        short = base.short(table, there)
        same = find_unchanged_rows(table, short, threads=self.threads)
        pieces: dict[str, LazyTensor] = {}
        recorded: dict[str, HashAndHead] = {}
        of: dict[str, int] = {}
        for row in [row for row in there if row not in short]:
            known = recorded_chunks(there[row], base.manifest.hash)
            for number, (chunk, hashed) in enumerate(
                zip(there[row], known, strict=True) if known is not None else ()
            ):
                # No name has half of a surrogate pair; several boxes have the name of one tensor.
                key = (
                    f"{table.names[row]}\udc00{row}.{number}"
                    if number or table.names[row] in pieces
                    else table.names[row]
                )
                pieces[key], recorded[key], of[key] = (
                    elements_of(table.lazy_tensor(row), chunk),
                    hashed,
                    row,
                )
        found, changed = find_unchanged(
            pieces, recorded, threads=self.threads, block_nbytes=self.block
        )
        same |= {*of.values()} - {of[key] for key in pieces if key not in found}
        reuse = base.reuse({row: chunks for row, chunks in there.items() if row in same}, files)
        return replace(reuse, changed=frozenset(of[key] for key in changed))

    def close(self) -> None:
        if self.store is not None:
            self.store.close()


def open_base(
    path: str | None,
    target: str,
    *,
    limits: Limits | None = None,
    threads: int | None = None,
    block: int | None = None,
) -> OpenBase:
    """Open the base of a save to `target`; without a path there is none, and what is saved has hashes for the next one.

    Raises `BadArgument` where there is nothing under the path.
    """
    if path is None:
        return OpenBase(threads=threads, block=block)
    store: Store | None = None
    try:
        url, goal = place_at(path).url, place_at(target).url
        if url is not None and goal is not None:
            base = _open_sibling(url, goal, limits or DEFAULTS)
        elif url is not None or goal is not None:
            raise Unsupported("one of the two is in an object store")
        else:
            base, store = _open_directory(path, target, limits or DEFAULTS)
    except BadArgument:
        raise
    except HoldfastError as error:
        return OpenBase(notes=(not_shared(path, error.message),), threads=threads, block=block)
    return OpenBase(base, store, threads=threads, block=block)


class NoBase(BadArgument):
    """There is nothing where the base should be."""


def _nothing_at(path: str) -> NoBase:
    return NoBase(
        f"base= is to be an older checkpoint, and there is nothing at {path!r}; leave it away for the first one"
    )


def not_shared(path: str, problem: str) -> str:
    return f"everything is written, and nothing shared with {str(path)!r}: {problem}"


def _check_hashes(manifest: Parsed) -> None:
    if manifest.hash is None:
        raise Unsupported("it was saved without hashes (hashes=True, or a base= of its own)")
    if manifest.hash != HASH:
        raise Unsupported(f"its hashes are of another kind, {manifest.hash!r:.40}")


def _open_directory(path: str, target: str, limits: Limits) -> tuple[Base, Store]:
    """The base at a path, and its open store. Raises a `HoldfastError` where it cannot be used."""
    folder = follow_link(path)
    if not os.path.isdir(folder):
        raise Unsupported("it is no directory") if os.path.lexists(path) else _nothing_at(path)
    if os.stat(folder).st_dev != os.stat(os.path.dirname(follow_link(target)) or os.curdir).st_dev:
        raise Unsupported("it is on another file system")
    store = open_store(folder, limits)
    try:
        if MANIFEST not in store.list():
            raise Unsupported("it is no native directory")
        source = OpenSource(store, limits=limits)
        manifest = read_manifest(source)
        _check_hashes(manifest)
        if any(os.path.islink(os.path.join(folder, file.name)) for file in manifest.files):
            raise Unsupported("its data files are links to other places")
        starts = [
            int.from_bytes(source.bytes(file.name, 0, PREFIX_NBYTES), "little")
            for file in manifest.files
        ]
    except BaseException:
        store.close()
        raise
    data = [
        file.nbytes - PREFIX_NBYTES - start
        for file, start in zip(manifest.files, starts, strict=True)
    ]
    return Base(folder, manifest, data), store


def _open_sibling(url: Url, target: Url, limits: Limits) -> Base:
    """The base at a URL. Raises a `HoldfastError` where it cannot be used.

    No store stays open: objects of these names have one content, or are gone. `engine/targets/bucket_claims` sees to it that they
    are still there when the new checkpoint is published, and stay.
    """
    from holdfast.engine.targets.bucket_claims import (
        list_claimed_folders,  # for those who have a bucket
    )
    from holdfast.stores.remote.store import RemoteStore

    parent, own = target.parent, target.key.rpartition("/")[2]
    folder = url.key.rpartition("/")[2]
    if (
        url.parent.identity != parent.identity
        or not target.key
        or not parse_sibling_key(f"../{folder}/{SOME_DATA}")
    ):
        raise Unsupported("it is not beside the new one, in the same prefix")
    try:
        store = RemoteStore(url, limits=limits)
    except StoreError as error:
        if error.errno == errno.ENOENT:
            raise _nothing_at(url) from None
        raise
    with closing(store):
        if not store.has_key(MANIFEST):
            raise Unsupported("it is no native checkpoint")
        manifest = read_manifest(OpenSource(store, limits=limits))
        _check_hashes(manifest)
        places = {
            file.name: parse_sibling_key(file.name) or (folder, file.name)
            for file in manifest.files
        }
        if not all(DATA_KEY.fullmatch(name) for _, name in places.values()):
            raise Unsupported("its data has names that other checkpoints may write, too")
        if list_claimed_folders(parent, "deletes").intersection(one for one, _ in places.values()):
            raise Unsupported("data that it names is being deleted, or was when a process died")
        starts = [bytearray(PREFIX_NBYTES) for _ in manifest.files]
        asked = zip(manifest.files, starts, strict=True)
        run_all(
            [partial(store.read, file.name, 0, memoryview(start)) for file, start in asked],
            store.read_profile.request_count,
        )
        data = [
            f.nbytes - PREFIX_NBYTES - int.from_bytes(s, "little")
            for f, s in zip(manifest.files, starts, strict=True)
        ]
    names = {name: at if one == own else f"../{one}/{at}" for name, (one, at) in places.items()}
    return Base(url, manifest, data, names)
