"""The base of a save in an object store: a native checkpoint beside it, whose objects the new manifest names where they are.

Whether they are there still when the new one is published, and stay, is for `engine/commit/claims`.
"""

from __future__ import annotations

import errno
from contextlib import closing
from functools import partial

from holdfast.core.keys import DATA, beside
from holdfast.core.limits import Limits
from holdfast.engine.commit.claims import claims_below
from holdfast.engine.source import OpenSource
from holdfast.engine.threads import run_all
from holdfast.errors import StoreError
from holdfast.formats.native.base import Base
from holdfast.formats.native.read import read_manifest
from holdfast.formats.safetensors.record import MANIFEST
from holdfast.formats.safetensors.schema import PREFIX_NBYTES
from holdfast.rewrite.base import OpenBase, not_used, nothing_at, without_hashes
from holdfast.stores.remote.store import RemoteStore
from holdfast.stores.remote.url import Url

SOME_DATA = "data-0000000000000000-00001-of-00001.safetensors"
"""A name that a data object might have."""


def open_far_base(url: Url, target: Url, *, limits: Limits, threads: int | None, block: int | None) -> OpenBase:
    """Open the base of a save to `target`. It is not held: objects of these names have one content, or are gone."""
    parent, own = target.parent, target.key.rpartition("/")[2]
    folder = url.key.rpartition("/")[2]
    if url.parent.identity != parent.identity or not target.key or not beside(f"../{folder}/{SOME_DATA}"):
        return not_used(url, "it is not beside the new one, in the same prefix", threads=threads, block=block)
    try:
        store = RemoteStore(url, limits=limits)
    except StoreError as error:
        if error.errno == errno.ENOENT:
            raise nothing_at(url) from None
        raise
    with closing(store):
        source = OpenSource(store, limits=limits)
        if not store.holds(MANIFEST):
            return not_used(url, "it is no native checkpoint", threads=threads, block=block)
        manifest = read_manifest(source)
        problem = without_hashes(manifest)
        places = {file.name: beside(file.name) or (folder, file.name) for file in manifest.files}
        if problem is None and not all(DATA.fullmatch(name) for _, name in places.values()):
            problem = "its data has names that other checkpoints may write, too"
        going = claims_below(parent, "deletes") if problem is None else set()
        if going.intersection(one for one, _ in places.values()):
            problem = "data that it names is being deleted, or was when a process died"
        if problem is not None:
            return not_used(url, problem, threads=threads, block=block)
        starts = [bytearray(PREFIX_NBYTES) for _ in manifest.files]
        asked = zip(manifest.files, starts, strict=True)
        run_all([partial(store.read, file.name, 0, memoryview(start)) for file, start in asked], store.requests)
        data = [f.nbytes - PREFIX_NBYTES - int.from_bytes(s, "little") for f, s in zip(manifest.files, starts, strict=True)]
    names = {name: at if one == own else f"../{one}/{at}" for name, (one, at) in places.items()}
    return OpenBase(Base(url, manifest, data, names), threads=threads, block=block)
