"""The objects that manifests of checkpoints beside each other in a bucket name: nobody may delete these.

A manifest that cannot be understood is damaged, or of a newer Holdfast. Everything beside it counts as named by it, and so does
every object whose name stands anywhere in its text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from functools import partial

from holdfast.core.keys import parse_sibling_key
from holdfast.core.limits import Limits
from holdfast.engine.source import OpenSource
from holdfast.engine.targets.bucket import BucketNames, ReplacedObjects
from holdfast.engine.threads import run_all
from holdfast.errors import FormatError, HoldfastError, LimitExceeded, Unsupported
from holdfast.formats.dcp.index import BESIDE, METADATA
from holdfast.formats.dcp.index import read_index as read_dcp_index
from holdfast.formats.dcp.read import DATA_SUFFIX
from holdfast.formats.index_file import choose_index, read_index
from holdfast.formats.native.schema import parse_manifest
from holdfast.formats.safetensors.schema import MANIFEST
from holdfast.stores.remote.client import RemoteObject, get_bucket
from holdfast.stores.remote.failures import find_existing
from holdfast.stores.remote.store import RemoteStore
from holdfast.stores.remote.url import Url
from holdfast.verbs.shared.formats import is_replaceable

MOST_OBJECTS = 5_000_000
"""Objects below a prefix that are listed."""

READ_AT_ONCE = 24

LIMITS = Limits()

Foreign = Callable[[str, str | None], Collection[str] | None]
"""From the folder and the etag of a manifest to the other folders that it names objects in; None where that is not known."""


def named_by(raw: bytes) -> tuple[tuple[tuple[str, int], ...], Mapping[str, str]]:
    """The files that a manifest names, with their lengths, and its metadata. Raises what `parse_manifest` raises."""
    manifest = parse_manifest(raw, LIMITS)
    files = [
        *((file.name, file.nbytes) for file in manifest.files),
        *((file.name, file.nbytes) for file in manifest.others),
    ]
    return tuple(files), manifest.metadata


def listed(url: Url) -> dict[str, dict[str, RemoteObject]]:
    """Everything below a prefix: for each name in it the objects below that; under '' those in the prefix itself."""
    start = f"{url.key}/" if url.key else ""
    found: dict[str, dict[str, RemoteObject]] = {}
    for one in get_bucket(url).list_objects(start, MOST_OBJECTS):
        name, _, rest = one.key.removeprefix(start).partition("/")
        found.setdefault(name if rest else "", {})[rest or name] = one
    return found


class References:
    """The objects that manifests in the folders of a prefix name. Each manifest is read once, as long as it has its etag."""

    def __init__(self, parent: Url, foreign: Foreign = lambda folder, etag: None) -> None:
        self.parent = parent
        self.notes: dict[str, str] = {}
        """Errors of manifests that cannot be understood, by their folders."""
        self._foreign = foreign
        self._known: dict[str, tuple[str | None, frozenset[str] | bytes]] = {}
        """By folder: etag, and the keys that it names; or its text, where that cannot be understood."""

    def named(self, keys: Collection[str]) -> set[str]:
        """The keys among these that a published manifest names, as the store has it now."""
        wanted = {key: key.removeprefix(self._start).rpartition("/")[0] for key in keys}
        folders = set(wanted.values())
        published = {
            folder: below[MANIFEST].etag
            for folder, below in listed(self.parent).items()
            if MANIFEST in below
        }
        read = []
        for folder, etag in published.items():
            known, others = self._known.get(folder), self._foreign(folder, etag)
            if (known is None or etag is None or known[0] != etag) and (
                others is None or folder in folders or folders.intersection(others)
            ):
                read.append(folder)
        run_all([partial(self._read, folder) for folder in read], READ_AT_ONCE)
        self._known = {folder: self._known[folder] for folder in published if folder in self._known}
        self.notes = {folder: note for folder, note in self.notes.items() if folder in self._known}
        found: set[str] = set()
        for folder, (_, names) in self._known.items():
            if isinstance(names, bytes):
                found |= {
                    key
                    for key, own in wanted.items()
                    if own == folder or key.rpartition("/")[2].encode() in names
                }
            else:
                found |= wanted.keys() & names
        return found

    @property
    def _start(self) -> str:
        return f"{self.parent.key}/" if self.parent.key else ""

    def _read(self, folder: str) -> None:
        below = f"{self._start}{folder}/" if folder else self._start
        self._known.pop(folder, None)
        self.notes.pop(folder, None)
        try:
            got = find_existing(
                get_bucket(self.parent).get_object, below + MANIFEST, LIMITS.index_nbytes
            )
        except (FormatError, LimitExceeded, Unsupported) as error:
            self._known[folder] = None, b""  # longer than any manifest
            self.notes[folder] = error.message
            return
        if got is None:
            return  # it went meanwhile
        raw, etag = bytes(got.data), got.metadata.etag
        try:
            files, _ = named_by(raw)
        except HoldfastError as error:
            self._known[folder] = etag, raw
            self.notes[folder] = error.message
            return
        places = (parse_sibling_key(name) or (folder, name) for name, _ in files)
        self._known[folder] = (
            etag,
            frozenset(
                f"{self._start}{one}/{name}" if one else self._start + name for one, name in places
            ),
        )


SAVED = re.compile(r"-[0-9a-f]{16}(?:-\d{5}-of-\d{5}(?:-\d{5})?\.safetensors|\.distcp)\Z")
"""The end of the name of a data object that a save has made up (`formats.choose_save_id`)."""


def is_checkpoint(name: str) -> bool:
    """Whether an object is one that makes a checkpoint of a prefix, or is one: not what a save left that did not come to its end.

    >>> [is_checkpoint(name) for name in ("model.safetensors", "data-0123456789abcdef-00001-of-00002.safetensors", "config.json")]
    [True, False, False]
    """
    return name == METADATA or (is_replaceable(name) and not SAVED.search(name))


def replaced_at(url: Url, there: Collection[str]) -> ReplacedObjects:
    """The objects of the checkpoint that is there: nobody needs them when another has taken its place."""
    shared = False
    try:
        source = OpenSource(RemoteStore(url))
        if MANIFEST in there:
            raw = bytearray(source.store.size(MANIFEST))
            source.store.peek(MANIFEST, 0, memoryview(raw))
            manifest = parse_manifest(bytes(raw), LIMITS)
            names = [
                MANIFEST,
                *(file.name for file in manifest.files),
                *(file.name for file in manifest.others),
            ]
            shared = manifest.hash is not None
        elif METADATA in there:
            names = [METADATA]
            with suppress(HoldfastError):  # a damaged one goes as well, and its data stays
                names += read_dcp_index(source, whole=False).files
            names += [
                name
                for name in there
                if name != METADATA and is_checkpoint(name) and not name.endswith(DATA_SUFFIX)
            ]
        else:
            index = choose_index(sorted(there), url)
            # Data without its index is what a save left, or what steps beside this one name: not for us to delete.
            weights = read_index(source, index).files if index else filter(is_checkpoint, there)
            names = [*([index] if index else []), *dict.fromkeys(weights)]
    except HoldfastError:
        return ReplacedObjects()  # what cannot be read is not known to be a checkpoint's
    named = References(url.parent).named if shared else None
    return ReplacedObjects(
        [name for name in names if "/" not in name or parse_sibling_key(name)], named
    )


NAMES = BucketNames(
    is_checkpoint=is_checkpoint,
    is_written_late=lambda name: not SAVED.search(name),
    is_weights=is_replaceable,
    find_replaced=replaced_at,
    stale_names=(BESIDE,),
)
"""The rules about names for a save by one process (`engine/targets/bucket`)."""
