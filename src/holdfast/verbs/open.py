"""`open` and `read`: from a path to a checkpoint, from lazy tensors to arrays.

`open` makes a store for the path, and a source over the store. The content tells the format, and
the format describes the source. If another program replaces the folder meanwhile, all of this is
repeated.
"""

from __future__ import annotations

import io
import os
import shlex
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
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
"""What `open` accepts: a path, a URL, bytes, or a seekable binary file object."""

TRIES = 10
"""How often a replaced folder is opened before this is an error."""

PATIENCE_S = 10.0
"""How many seconds a replaced folder on a disk is opened again, even after `TRIES` times.

Saving a small checkpoint takes as long as opening it, so it may be replaced ten times in a row.
"""

SAMPLE_COUNT = 32
"""How many tensors without a recorded checksum are sampled for the hash of a checkpoint."""

SAMPLE_NBYTES = 4096
"""How many bytes of each sampled tensor are hashed."""


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
    """Open a checkpoint of any known format. Nothing in it is executed, and no tensor data is read.

    Args:
        path: A file, a directory, the bytes themselves, a seekable binary file object, or the URL
            of an object or a prefix in an object store (`s3://`, `gs://`, `az://`). The index of a
            Hugging Face folder opens the folder. The folder of a model in the hub cache
            (`models--org--name`) opens the snapshot of its ref.
        mmap: Return arrays as views of the mapped file (copied on write) where their layout allows
            it, without a comparison of checksums. If a program truncates the mapped file in place,
            the next access to the lost bytes ends the process (SIGBUS), as with
            `torch.load(mmap=True)`. A save that replaces the file by a rename does no harm.
        verify: Compare the checksums that the file records whenever everything that a checksum
            covers is read. Not with `mmap`.
        limits: Higher limits for what a file may cost.
        threads: The largest number of threads that read in parallel.
        store: An obstore store to use instead of one from the environment. `path` may then be a
            key in it.
        rules: How tensors were cut in a folder of Megatron's ranks, in the words of `reshard`:
            "*.adapter.weight: tp=0". They precede the built-in rules for Megatron's own layers.
        map: Show the tensors in the layout of another framework: a name like "qwen3:hf:megatron",
            "auto", or a `holdfast.Map`.

    Raises:
        DoesNotFit: The map does not fit. The error lists all names that are missing, left over or
            of another shape.
    """
    placement_rules = tuple(cast("tuple[str | PlacementRule, ...]", rules))
    return open_with_retries(
        path,
        partial(describe_source, map=map),
        limits=limits or DEFAULTS,
        threads=threads,
        mapped=mmap,
        verify=verify,
        rules=placement_rules,
        store=store,
    )


def open_for_verb(
    path: Openable,
    *,
    verify: bool = True,
    limits: Limits | None = None,
    threads: int | None = None,
    map: AnyMap | None = None,
) -> Checkpoint:
    """Open a checkpoint as `open` does, for a verb that has checked the arguments."""
    return open_with_retries(
        path,
        partial(describe_source, map=map),
        limits=limits or DEFAULTS,
        threads=threads,
        verify=verify,
    )


def open_built_in(path: Openable, limits: Limits) -> Checkpoint:
    """Open a checkpoint of a built-in format. Functions of other packages are never called."""
    return open_with_retries(path, partial(describe_source, plugins=False), limits=limits)


def apply_map(
    checkpoint: Checkpoint,
    map: AnyMap | None,
    list_names: Callable[[], Iterable[str]] | None = None,
) -> Checkpoint:
    """Return a checkpoint in the layout of another framework, or as it is without a map.

    Args:
        checkpoint: The open checkpoint.
        map: The map, its name, or "auto".
        list_names: Returns the names that the caller will look up. "auto" finds the layout by them.
    """
    if map is None:
        return checkpoint
    resolved_map: Map | None = find_hook("find_map")(map, checkpoint, list_names)
    return checkpoint if resolved_map is None else resolved_map.through(checkpoint)


@contextmanager
def opened_checkpoint(
    src: Openable | Checkpoint,
    *,
    limits: Limits | None = None,
    threads: int | None = None,
    verify: bool = True,
    map: AnyMap | None = None,
) -> Iterator[Checkpoint]:
    """Open the source of a verb for a `with` block. An open checkpoint stays open."""
    if isinstance(src, Checkpoint):
        yield apply_map(src, map)
        return

    # This generator keeps no reference to the checkpoint. A caller that has read the columns can
    # then free the lazy tensors, of which there may be a million.
    checkpoints = [open_for_verb(src, limits=limits, threads=threads, verify=verify, map=map)]
    close = checkpoints[0].source.store.close
    try:
        yield checkpoints.pop()
    finally:
        close()


def describe_source(
    source: Source, *, map: AnyMap | None = None, plugins: bool = True
) -> Checkpoint:
    """Find the format of a source and return its checkpoint.

    Args:
        source: The source. It may have come from another process.
        map: A map to another layout.
        plugins: Whether formats of other packages are tried.

    Raises:
        UnknownFormat: The content is of no known format.
        BadArgument: There are placement rules, but the format places the tensors itself.
    """
    store = source.store
    try:
        with gc_paused(), store.reading():
            try:
                format = detect(source, plugins=plugins)
            except UnknownFormat as error:
                raise _suggest_steps(error, source) from None
            checkpoint = Checkpoint(source, format.describe(source), reopen=describe_source)
    except HoldfastError as error:
        if error.file is None:
            error.file = store.name
        # A data file of DCP contains several archives, one behind the other. Only the index of its
        # folder tells where they are.
        data_suffixes = tuple(entry.data for entry in FORMATS if entry.data)
        if isinstance(error, ZipError) and store.name.endswith(data_suffixes):
            raise UnknownFormat(
                "one of the data files of a distributed checkpoint; open the folder that it is in",
                file=store.name,
            ) from error
        raise

    if source.rules and not format_of(checkpoint.format).rules:
        message = (
            "rules= are for folders of Megatron's ranks; "
            f"the format {checkpoint.format} records itself how tensors are placed"
        )
        raise BadArgument(message, file=checkpoint.path)
    return checkpoint if map is None else apply_map(checkpoint, map)


def _suggest_steps(error: UnknownFormat, source: Source) -> UnknownFormat:
    """Return a better error if the folder contains the steps of a run, otherwise the same error."""
    from holdfast.verbs.trainers import find_step_folders  # It imports this module.

    if not source.store.is_folder:
        return error
    steps = find_step_folders(source.store.list())
    if not steps:
        return error
    return UnknownFormat(
        f"this folder is not a checkpoint, it holds the steps of a run: {some(steps)}; "
        "open one of them. "
        f"`holdfast runs {shlex.quote(source.store.name)}` lists them",
        found=steps,
    )


def retry_opening(path: Openable, store: object | None = None) -> Iterator[None]:
    """Yield once for each time that a path should be opened before the caller gives up.

    That is `TRIES` times, and on a disk also until `PATIENCE_S` have passed. In a bucket, an object
    that is gone may be one that the checkpoint lacks, and waiting does not bring it back.
    """
    for _ in range(TRIES):
        yield
    if not place_at(place_of(path, store)).on_disk:
        return
    stop_s = time.monotonic() + PATIENCE_S
    while time.monotonic() <= stop_s:
        yield


def open_with_retries(
    path: Openable,
    describe: Callable[[OpenSource], T],
    *,
    limits: Limits,
    threads: int | None = None,
    mapped: bool = False,
    verify: bool = True,
    rules: Sequence[str | PlacementRule] = (),
    store: object | None = None,
) -> T:
    """Open a path and describe it, again if its folder is replaced meanwhile.

    Another program may replace a directory while it is read, and removes the old one file by file.
    If a file is gone that was there before, everything is forgotten, and the path is opened again.

    Args:
        path: The path, or anything else that `open` accepts.
        describe: Makes the result from an open source. The result closes the store of the source.
        limits: As for `OpenSource`, like `threads`, `mapped`, `verify` and `rules`.
        store: An obstore store in which `path` is a key.

    Raises:
        Replaced: The folder was replaced during every try.
    """
    for _ in retry_opening(path, store):
        opened_store = open_checkpoint_store(path, limits, store=store)
        try:
            result = describe(
                OpenSource(
                    opened_store,
                    limits=limits,
                    threads=threads,
                    mapped=mapped,
                    verify=verify,
                    rules=rules,
                )
            )
        except BaseException as error:
            opened_store.close()
            if not isinstance(error, HoldfastError) or not opened_store.is_gone:
                raise
            continue
        if not opened_store.is_gone:
            return result
        opened_store.close()
    message = (
        "the folder was replaced each time that it was opened; open it when fewer saves go there"
    )
    raise Replaced(message, file=opened_store.name)


def open_checkpoint_store(path: Openable, limits: Limits, *, store: object | None = None) -> Store:
    """Open the store of the checkpoint that a path stands for.

    The index of a checkpoint stands for its folder, and a folder of the hub cache for its snapshot.
    """
    if not isinstance(path, str | os.PathLike):
        return open_store(path, limits)
    place = place_of(path, store)
    index = ""
    # Only these places can stand for another one. The others need no look at the disk.
    if place.endswith(INDEX_ENDS) or CACHED_MODEL in place or not PurePath(place).name:
        place, index = locate_checkpoint(place, limits)
    opened_store = place_at(place).open_store(limits, _find_recoverable)
    opened_store.index = index
    return opened_store


def open_store(path: Openable, limits: Limits, *, store: object | None = None) -> Store:
    """Open the store behind anything that `open` accepts.

    Args:
        path: A path, a URL, bytes or a file object.
        limits: What listing a folder may cost.
        store: An obstore store in which `path` is a key.
    """
    from holdfast.stores.memory import FileObjectStore, MemoryStore  # not needed for paths

    if isinstance(path, bytes | bytearray | memoryview):
        return MemoryStore({"bytes": path}, name="<bytes>")
    if isinstance(path, str | os.PathLike):
        return place_at(place_of(path, store)).open_store(limits, _find_recoverable)
    if isinstance(path, io.IOBase) or all(hasattr(path, name) for name in ("read", "seek", "tell")):
        check_binary(path, "rb")
        return FileObjectStore(path)
    raise BadArgumentType(
        f"a checkpoint is a path, bytes or a seekable binary file, not {describe_value(path)}",
        found=path,
    )


def _find_recoverable(path: str) -> str | None:
    """Find the checkpoint that a crash left beside a path where nothing is."""
    from holdfast.engine.commit.temporaries import find_recoverable  # rarely needed

    return find_recoverable(path)


def read(tensors: Iterable[LazyTensor]) -> list[np.ndarray]:
    """Read many lazy tensors, or slices of them, in parallel.

    Neighboring ranges of a file are read together, so this is faster than reading one by one.
    """
    try:
        lazy_tensors = list(tensors)
    except TypeError:
        lazy_tensors = [tensors]  # type: ignore[list-item]  # is refused below
    for tensor in lazy_tensors:
        if not isinstance(tensor, LazyTensor):
            hint = " (of a checkpoint: its values())" if isinstance(tensors, Mapping) else ""
            raise BadArgumentType(
                f"read takes a list of lazy tensors, and {describe_value(tensor)} is none{hint}",
                found=tensor,
            )
    return read_tensors(lazy_tensors)


def check_ranks_opened_same(ranks: Ranks, *checkpoints: Checkpoint) -> None:
    """Raise `Replaced` on every rank unless all of them have opened the same checkpoints.

    Each rank of a verb opens the path by itself. On local disks it may lead to another step on each
    machine.
    """
    if ranks.size > 1:
        from holdfast.core.group import compare_marks  # for ranks

        hashes = [hash_checkpoint(checkpoint) for checkpoint in checkpoints]
        compare_marks(ranks, b"".join(hashes))


def open_on_all_ranks(
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
        check_ranks_opened_same(ranks, checkpoint)
        return checkpoint

    for source, map in sources:
        yield compare_and_return(
            stack.enter_context(opened_checkpoint(source, limits=limits, map=map))
        )


def hash_checkpoint(checkpoint: Checkpoint) -> bytes:
    """Hash what opening has read, by which ranks check that they have opened the same checkpoint.

    These are the names, dtypes, shapes, recorded checksums, and the text that a file contains about
    itself. Times and inodes do not count, since ranks on several machines may have copies. Local
    files without checksums, as the safetensors library writes them, are represented by a sample of
    their data.
    """
    from hashlib import blake2b  # for ranks, as the next one

    from holdfast.formats.dcp.lazy import ItemStorage

    header = repr((checkpoint.format, sorted(checkpoint.metadata.items())))
    hasher = blake2b(header.encode("utf-8", "surrogatepass"), digest_size=16)
    unchecked_storages: list[Storage] = []
    for name, tensor in checkpoint.items():
        crcs: list[int | None] = []
        for storage in tensor.storages:
            # The checksums of DCP's items are inside the items, which are not located for this.
            crc = None if isinstance(storage, ItemStorage) else storage.crc32
            crcs.append(crc)
            if crc is None and storage.nbytes:
                unchecked_storages.append(storage)
        outline = repr((name, tensor.dtype.name, tensor.shape, crcs))
        hasher.update(outline.encode("utf-8", "surrogatepass"))

    store = checkpoint.source.store
    if store.read_profile.is_file:
        last_ranges = [
            storage.ranges[-1] for storage in unchecked_storages if storage.home is store
        ]
        for key, start, stop in choose_evenly(last_ranges, SAMPLE_COUNT):
            hasher.update(read_last_bytes(store, key, start, stop))
    return hasher.digest()


def choose_evenly(values: Sequence[T], max_count: int) -> Sequence[T]:
    """Return at most this many of the values, evenly spread over all of them.

    >>> choose_evenly(range(100), 3)
    [0, 33, 66]
    """
    count = min(max_count, len(values))
    return [values[index * len(values) // count] for index in range(count)]


def read_last_bytes(store: Store, key: str, start: int, stop: int) -> bytes:
    """Read the last bytes of a range. In a DCP item they include the checksum of all its data."""
    content = bytearray(min(stop - start, SAMPLE_NBYTES))
    store.read(key, stop - len(content), memoryview(content))
    return bytes(content)
