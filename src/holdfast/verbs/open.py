"""`open` and `read`: from a path to a checkpoint, from lazy tensors to arrays."""

from __future__ import annotations

import io
import os
import shlex
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import PurePath
from typing import TYPE_CHECKING, BinaryIO, TypeVar, cast

import numpy as np

from holdfast.core.arguments import make_rules_check
from holdfast.core.checkpoint import Checkpoint
from holdfast.core.chunk import Storage
from holdfast.core.limits import DEFAULTS, Limits
from holdfast.core.options import validate_arguments
from holdfast.core.placement_rules import PlacementRule
from holdfast.core.protocols import Source, Store
from holdfast.core.quantities import describe_value
from holdfast.core.registry import find_hook
from holdfast.core.runtime import gc_paused
from holdfast.core.table import read_tensors
from holdfast.core.tensor import LazyTensor
from holdfast.engine.source import OpenSource
from holdfast.errors import (
    BadArgument,
    BadArgumentType,
    HoldfastError,
    Replaced,
    UnknownFormat,
    ZipError,
)
from holdfast.formats import FORMATS, format_of
from holdfast.formats.detect import detect
from holdfast.formats.index_file import some
from holdfast.stores.paths import check_binary, place_of
from holdfast.stores.place import place_at
from holdfast.verbs.locate import CACHED_MODEL, INDEX_ENDS, locate_checkpoint

if TYPE_CHECKING:
    from holdfast.core.group import Ranks
    from holdfast.extras.maps.find import AnyMap, Map

T = TypeVar("T")

Openable = str | os.PathLike[str] | bytes | bytearray | memoryview | BinaryIO

TRIES = 10
"""How often a folder is opened at least before an error says that it is replaced again and again."""

PATIENCE_S = 10.0
"""How long a folder on a disk is opened again at least. A small checkpoint takes as long to save as to
open, and may be replaced during ten tries in a row."""


@validate_arguments(rules=make_rules_check(PlacementRule))
def open(
    path: Openable,
    *,
    mmap: bool = False,
    verify: bool = True,
    limits: Limits | None = None,
    threads: int | None = None,
    store: object | None = None,
    rules: str | PlacementRule | Iterable[str | PlacementRule] = (),
    map: AnyMap | None = None,
) -> Checkpoint:
    """Open a checkpoint of any known format without running anything in it, and without reading tensor data.

    `path` is a file, a directory, the bytes themselves, a seekable binary file object, or the URL
    of an object or a prefix in an object store (`s3://`, `gs://`, `az://`). The index of a
    Hugging Face folder opens the folder, and the folder of a model in the hub cache
    (`models--org--name`) opens the snapshot of its ref. `store` is an obstore store to use in
    place of one from the environment; `path` may then be a key in it. With `mmap=True` arrays are
    views of the mapped file (copied on write) where their layout allows, and checksums are not
    looked at. If a program truncates the mapped file in place, the next access to the lost part
    ends the process (SIGBUS), as with `torch.load(mmap=True)`; a save that replaces the file by a
    rename does no harm. Without `mmap`, where the file records a checksum and the whole of what it
    covers is read, it is compared (`verify=False` opts out). `limits` raises what a file may cost;
    `threads` bounds the parallel reads.
    `rules` say how tensors were cut in a folder of Megatron's ranks, in the words of `reshard`: "*.adapter.weight: tp=0"; they come
    before those that it has for Megatron's own layers. `map` shows the tensors in the layout of another framework, by a name like
    "qwen3:hf:megatron", or "auto" (`holdfast.Map`): `DoesNotFit` names all that is missing, left over or of another shape.
    """
    given = tuple(cast("tuple[str | PlacementRule, ...]", rules))
    return open_for_verb(
        path, mmap=mmap, verify=verify, limits=limits, threads=threads, store=store, rules=given,
        map=map,
    )  # fmt: skip


def open_for_verb(
    path: Openable, *, mmap: bool = False, verify: bool = True, limits: Limits | None = None, threads: int | None = None,
    store: object | None = None, rules: Sequence[str | PlacementRule] = (), map: AnyMap | None = None,
) -> Checkpoint:  # fmt: skip
    """Open a checkpoint as `open` does, for a verb that has checked the arguments."""
    limits = limits or DEFAULTS

    def look(store: Store) -> Checkpoint:
        source = OpenSource(
            store, limits=limits, threads=threads, mapped=mmap, verify=verify, rules=rules
        )
        checkpoint = _described(source)
        if rules and not format_of(checkpoint.format).rules:
            said = f"rules= are for folders of Megatron's ranks; this is {checkpoint.format}, which says itself how tensors lie"
            raise BadArgument(said, file=checkpoint.path)
        return checkpoint if map is None else seen_through(checkpoint, map)

    return steady(path, limits, look, store=store)


def open_built_in(path: Openable, limits: Limits) -> Checkpoint:
    """Open a checkpoint of a format of Holdfast. Functions of other packages are never called."""

    def look(store: Store) -> Checkpoint:
        return _described(OpenSource(store, limits=limits), plugins=False)

    return steady(path, limits, look)


def seen_through(
    checkpoint: Checkpoint, map: AnyMap | None, wanted: Callable[[], Iterable[str]] | None = None
) -> Checkpoint:  # fmt: skip
    """A checkpoint through a map, or as it is. `wanted` gives the names of the other side, by which "auto" finds the layout."""
    if map is None:
        return checkpoint
    found: Map | None = find_hook("find_map")(map, checkpoint, wanted)
    return checkpoint if found is None else found.through(checkpoint)


@contextmanager
def opened(
    src: Openable | Checkpoint, *, limits: Limits | None = None, threads: int | None = None, verify: bool = True,
    map: AnyMap | None = None,
) -> Iterator[Checkpoint]:  # fmt: skip
    """What every verb takes as its source, opened for a block: an open checkpoint stays open, anything else is closed after it."""
    if isinstance(src, Checkpoint):
        yield seen_through(src, map)
        return
    checkpoints = [open_for_verb(src, limits=limits, threads=threads, verify=verify, map=map)]
    close = checkpoints[0].source.store.close
    try:
        # Nothing here holds it: whoever has taken its columns lets go of its lazy tensors, which are many.
        yield checkpoints.pop()
    finally:
        close()


def _described(source: Source, *, plugins: bool = True) -> Checkpoint:
    """Return the checkpoint of a source, which may have come from another process."""
    store = source.store
    try:
        with gc_paused(), store.reading():
            try:
                format = detect(source, plugins=plugins)
            except UnknownFormat as error:
                raise _with_steps(error, source) from None
            return Checkpoint(source, format.describe(source), reopen=_described)
    except HoldfastError as error:
        if error.file is None:
            error.file = store.name
        # A data file of DCP has several archives, one behind the other. Its index has their places.
        data_suffixes = tuple(entry.data for entry in FORMATS if entry.data)
        if isinstance(error, ZipError) and store.name.endswith(data_suffixes):
            raise UnknownFormat(
                "one of the data files of a distributed checkpoint; open the folder that it is in",
                file=store.name,
            ) from error
        raise


def _with_steps(error: UnknownFormat, source: Source) -> UnknownFormat:
    """Return the error for a folder that is no checkpoint; another one if the folder holds the steps of a run."""
    from holdfast.verbs.trainers import find_step_folders  # It imports this module.

    steps = find_step_folders(source.store.list()) if source.store.is_folder else []
    if not steps:
        return error
    return UnknownFormat(
        f"this folder is not a checkpoint, it holds the steps of a run: {some(steps)}; open one of them. "
        f"`holdfast runs {shlex.quote(source.store.name)}` lists them",
        found=steps,
    )


def attempts(path: Openable, store: object | None = None) -> Iterator[None]:
    """Yield for each time that a path is opened: `TRIES` times, and on a disk until `PATIENCE_S` have passed.

    In a bucket, an object that is gone may be one that the checkpoint lacks, and stays gone.
    """
    end_s = time.monotonic() + PATIENCE_S
    for number in count():
        if number >= TRIES and (
            time.monotonic() > end_s or not place_at(place_of(path, store)).on_disk
        ):
            return
        yield


def steady(
    path: Openable, limits: Limits, look: Callable[[Store], T], *, store: object | None = None
) -> T:
    """What `look` makes of the store at a path; it takes the store over. An error closes it.

    A directory may be replaced meanwhile, and what is left of the old one is removed file by file: where a file was gone that had
    been there, whatever was found is forgotten, and the path opened again.
    """
    for _ in attempts(path, store):
        opened = checkpoint_store(path, limits, store=store)
        try:
            made = look(opened)
        except BaseException as error:
            opened.close()
            if not isinstance(error, HoldfastError) or not opened.is_gone:
                raise
            continue
        if not opened.is_gone:
            return made
        opened.close()
    message = (
        "the folder was replaced each time that it was opened; open it when fewer saves go there"
    )
    raise Replaced(message, file=opened.name)


def checkpoint_store(path: Openable, limits: Limits, *, store: object | None = None) -> Store:
    """Open the store of the checkpoint that `path` stands for: of an index its folder, of a hub cache folder its snapshot."""
    if not isinstance(path, str | os.PathLike):
        return store_of(path, limits)
    place, index = place_of(path, store), ""
    # Only an index and a model's folder of the hub cache stand for another place.
    if place.endswith(INDEX_ENDS) or CACHED_MODEL in place or not PurePath(place).name:
        place, index = locate_checkpoint(place, limits)
    opened_store = place_at(place).store(limits, _recover)
    opened_store.index = index
    return opened_store


def store_of(path: Openable, limits: Limits, *, store: object | None = None) -> Store:
    """The store behind anything that `open` takes; with an object store that the caller has made, `path` is a key in it."""
    from holdfast.stores.memory import FileObjectStore, MemoryStore  # not for paths

    if isinstance(path, bytes | bytearray | memoryview):
        return MemoryStore({"bytes": path}, name="<bytes>")
    if isinstance(path, str | os.PathLike):
        return place_at(place_of(path, store)).store(limits, _recover)
    if isinstance(path, io.IOBase) or all(hasattr(path, name) for name in ("read", "seek", "tell")):
        check_binary(path, "rb")
        return FileObjectStore(path)
    raise BadArgumentType(
        f"a checkpoint is a path, bytes or a seekable binary file, not {describe_value(path)}",
        found=path,
    )


def _recover(path: str) -> str | None:
    from holdfast.engine.commit.temporaries import find_recoverable  # only where nothing is there

    return find_recoverable(path)


def read(tensors: Iterable[LazyTensor]) -> list[np.ndarray]:
    """Read many lazy tensors (slices, too) at once: in parallel, with neighbouring reads joined."""
    try:
        wanted = list(tensors)
    except TypeError:
        wanted = [tensors]  # type: ignore[list-item]  # is refused below
    for one in wanted:
        if not isinstance(one, LazyTensor):
            more = " (of a checkpoint: its values())" if isinstance(tensors, Mapping) else ""
            raise BadArgumentType(
                f"read takes a list of lazy tensors, and {describe_value(one)} is none{more}",
                found=one,
            )
    return read_tensors(wanted)


def compare_opened(ranks: Ranks, *checkpoints: Checkpoint) -> None:
    """Raise `Replaced` on every rank unless all of them have opened the same checkpoints.

    The ranks of a verb open its path by themselves. On disks of their own it may lead to another step on each machine.
    """
    if ranks.size > 1:
        from holdfast.core.group import compare_marks  # for ranks

        compare_marks(ranks, b"".join([checkpoint_mark(checkpoint) for checkpoint in checkpoints]))


def open_alike(
    ranks: Ranks,
    stack: ExitStack,
    sources: Iterable[tuple[Openable | Checkpoint, AnyMap | None]],
    *,
    limits: Limits | None = None,
) -> Iterator[Checkpoint]:
    """Open checkpoints one after the other, and check that all ranks have opened the same ones.

    Nothing here keeps a reference to a checkpoint. A caller that has read its columns drops its
    lazy tensors, of which there may be a million, before the next checkpoint is opened.
    """

    def compare_and_return(checkpoint: Checkpoint) -> Checkpoint:
        compare_opened(ranks, checkpoint)
        return checkpoint

    for source, map in sources:
        yield compare_and_return(stack.enter_context(opened(source, limits=limits, map=map)))


SAMPLES, SAMPLE_NBYTES = 32, 4096
"""How many tensors without a recorded checksum are sampled for the mark of a checkpoint, and how many bytes of each."""


def checkpoint_mark(checkpoint: Checkpoint) -> bytes:
    """A hash of what opening has read: names, dtypes, shapes, recorded checksums, the text that a file carries about itself.

    Times and inodes are no part of it, since ranks on several machines may have copies. Where files of this machine record no
    checksums, which is what the safetensors library writes, a sample of the data stands for them.
    """
    from hashlib import blake2b  # for ranks, as the next one

    from holdfast.formats.dcp.lazy import ItemStorage

    mark = blake2b(
        repr((checkpoint.format, sorted(checkpoint.metadata.items()))).encode(
            "utf-8", "surrogatepass"
        ),
        digest_size=16,
    )
    unchecked: list[Storage] = []
    for name, tensor in checkpoint.items():
        sums: list[int | None] = []
        for storage in tensor.storages:
            # The checksums of DCP's items stand in the items, which are not located to be told apart.
            crc32 = None if isinstance(storage, ItemStorage) else storage.crc32
            sums.append(crc32)
            if crc32 is None and storage.nbytes:
                unchecked.append(storage)
        mark.update(
            repr((name, tensor.dtype.name, tensor.shape, sums)).encode("utf-8", "surrogatepass")
        )
    store = checkpoint.source.store
    if store.read_profile.is_file:
        ranges = [storage.ranges[-1] for storage in unchecked if storage.home is store]
        for key, start, stop in evenly_chosen(ranges, SAMPLES):
            mark.update(last_bytes(store, key, start, stop))
    return mark.digest()


def evenly_chosen(values: Sequence[T], most: int) -> Sequence[T]:
    """Return at most so many of the values, evenly spread over all of them.

    >>> evenly_chosen(range(100), 3)
    [0, 33, 66]
    """
    count = min(most, len(values))
    return [values[number * len(values) // count] for number in range(count)]


def last_bytes(store: Store, key: str, start: int, stop: int) -> bytes:
    """Read the end of a range. That of a DCP item has the checksum of all its data."""
    content = bytearray(min(stop - start, SAMPLE_NBYTES))
    store.read(key, stop - len(content), memoryview(content))
    return bytes(content)
