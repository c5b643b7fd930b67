"""Carry out a save plan in an object store: every file is an object, the last index file publishes (`engine/commit/remote`).

Objects are written from front to back (`engine/stream`), in parts of which several are under way. Nothing is written to the disk of
this machine, and memory stays at a few parts an object.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress

from holdfast.core.keys import beside
from holdfast.core.limits import Limits
from holdfast.core.value import Value
from holdfast.engine.checksums import Span, Sweep
from holdfast.engine.commit.claims import commit_sharing, release
from holdfast.engine.commit.remote import ObjectSave, PrefixSave
from holdfast.engine.commit.temporaries import temporary_name
from holdfast.engine.readback import check_source
from holdfast.engine.source import OpenSource
from holdfast.engine.stream import FAR_BLOCK_NBYTES, Told, Writer, write_stream
from holdfast.engine.threads import run_all
from holdfast.engine.write import Progress
from holdfast.errors import DurabilityUncertain, HoldfastError, NotCommitted
from holdfast.formats.index_file import choose_index, read_index
from holdfast.formats.native.schema import parse_manifest
from holdfast.formats.safetensors.record import MANIFEST
from holdfast.plan.saves import Data, FilePlan, SavePlan
from holdfast.rewrite.formats import is_replaceable
from holdfast.rewrite.namings import Namings
from holdfast.rewrite.renewal import NOTHING as RENEWS_NOTHING
from holdfast.rewrite.renewal import Renewal
from holdfast.rewrite.writing import Writing
from holdfast.stores.remote.store import RemoteStore
from holdfast.stores.remote.url import COPIED_NBYTES, Url

METADATA = ".metadata"
"""The index of a distributed checkpoint of torch's."""


def put_plan(
    plan: SavePlan,
    url: Url,
    writing: Writing,
    *,
    crcs: dict[str, int],
    progress: Progress | None,
    before_commit: Callable[[], None] | None,
    renews: Renewal = RENEWS_NOTHING,
) -> None:
    """Write a plan and publish it; `crcs` is given the CRC-32 of each stored piece."""
    last, parts, within = before_commit or _nothing, writing.parts, writing.budget
    requests, block = (writing.threads, FAR_BLOCK_NBYTES) if within is None else (within.threads, within.block)

    def content(file: FilePlan) -> Callable[[Writer], None]:
        def write(target: Writer) -> None:
            with renews.noting(file.key, Told(target, progress) if progress else target) as writer:
                crcs.update(write_stream(file, writer, known=crcs, requests=requests, block=block))
            check_source(file, crcs)

        return write

    if plan.copied:
        put_copy(plan, url, writing, content=content, crcs=crcs, last=last)
        return
    if not plan.directory:
        (file,) = plan.files
        single = ObjectSave(url, overwrite=writing.overwrite is not False, parts=parts)
        single.begin()
        single.write(file.nbytes, content(file), last, check=_check(file, writing, crcs))
        return
    *others, index = (*plan.files, *plan.index)
    save = PrefixSave(url, index.key, overwrite=bool(writing.overwrite), parts=parts)
    save.begin(is_checkpoint)
    replaced = replaced_at(url, save.there) if writing.overwrite and save.there else NOTHING

    def put(file: FilePlan) -> None:
        save.write(file.key, file.nbytes, content(file))
        if writing.read_back:
            check_uploaded(file, url.below(file.key), crcs)

    # What others have a name for is put when all else is there, and nothing is known against it.
    late = [file for file in others if not SAVED.search(file.key)]
    try:
        for file in others:
            if file not in late:
                put(file)
        last()
        for file in late:
            put(file)
        text = io.BytesIO()
        content(index)(text)
        used = [(*(beside(one.key) or (url.key.rpartition("/")[2], one.key)), one.nbytes) for one in plan.linked]
        with renews.in_bucket(url, replaced.names):
            commit_sharing(save, used, lambda: save.commit(text.getvalue(), plan.attributes))
    except DurabilityUncertain:
        raise  # the index may be there, and then names what was written
    except BaseException:
        save.give_up()
        raise
    replaced.remove(save, keep={file.key for file in (*late, index)})


def put_copy(
    plan: SavePlan,
    url: Url,
    writing: Writing,
    *,
    content: Callable[[FilePlan], Callable[[Writer], None]],
    crcs: Mapping[str, int],
    last: Callable[[], None],
) -> None:
    """Put a copy, whose names are those of its source.

    Two copies would write the same names, so one claims the place first. What has names in common with a checkpoint that it
    replaces would be a mixture of both for a while: then the old one goes first. But not before everything is in the bucket, under
    hidden names, from which the store copies it: what fails on the way here leaves the old one as it was.
    """
    overwrite = bool(writing.overwrite)
    if not plan.directory:
        single = ObjectSave(url, overwrite=overwrite, parts=writing.parts)
        single.begin()
        for one in plan.linked:
            last()
            single.copy(Url(one.folder).key)
        for file in plan.files:
            single.write(file.nbytes, content(file), last, check=_check(file, writing, crcs))
        return
    index = plan.index[0] if plan.index else None
    save = PrefixSave(url, index.key if index else "", overwrite=overwrite, parts=writing.parts)
    save.begin(is_checkpoint)
    replaced = replaced_at(url, save.there) if overwrite and save.there else NOTHING
    mine = {key for key, _ in plan.listed}
    # Without an index it is the weights that others look for.
    files = sorted(plan.files, key=lambda file: is_replaceable(file.key))
    aside = {file.key: _hidden(file.key) for file in files if file.key in save.there and file.nbytes <= COPIED_NBYTES}
    over = [file for file in files if file.key in save.there and file.key not in aside]

    def put(file: FilePlan) -> None:
        name = aside.get(file.key, file.key)
        save.write(name, file.nbytes, content(file))
        if writing.read_back:
            check_uploaded(file, url.below(name), crcs)

    with save.claimed():
        try:
            for file in files:
                if file not in over:
                    put(file)
            last()
            if mine.intersection(replaced.names[1:] if index else replaced.names):
                save.replaces_nothing(replaced.names[:1])
            for file in over:
                put(file)
            for one in plan.linked:
                save.copy(one.key, f"{Url(one.folder).key}/{one.key}")
            for name, hidden in aside.items():
                save.copy(name, url.below(hidden).key)
            save.dismiss(aside.values())
            if over:
                last()
            if index is not None:
                text = io.BytesIO()
                content(index)(text)
                save.commit(text.getvalue())
        except DurabilityUncertain:
            raise
        except BaseException:
            save.give_up()
            raise
    replaced.remove(save, keep=mine)


def _hidden(name: str) -> str:
    """A name beside this one that no reader takes for a file of a checkpoint."""
    folder, slash, last = name.rpartition("/")
    return f"{folder}{slash}{temporary_name(last)}"


SAVED = re.compile(r"-[0-9a-f]{16}-\d{5}-of-\d{5}(?:-\d{5})?\.safetensors\Z")
"""How the name of a data object ends that a save has made up (`formats.save_name`)."""


def is_checkpoint(name: str) -> bool:
    """Whether an object is one that makes a checkpoint of a prefix, or is one: not what a save left that did not come to its end.

    >>> [is_checkpoint(name) for name in ("model.safetensors", "data-0123456789abcdef-00001-of-00002.safetensors", "config.json")]
    [True, False, False]
    """
    return name == METADATA or (is_replaceable(name) and not SAVED.search(name))


def _nothing() -> None:
    """Nothing has to be looked at before the commit."""


class ReplacedObjects(Value, frozen=True):
    """The objects of a checkpoint that another takes the place of."""

    names: Sequence[str] = ()
    """Its index first."""
    shared: bool = False
    """Whether checkpoints beside it may name its data, too: those that have hashes may be a base."""

    def remove(self, save: PrefixSave, keep: Collection[str] = ()) -> None:
        """Delete what nobody needs now. What cannot be deleted is left to the sweep of the run."""
        save.remove([name for name in self.names[:1] if name not in keep])  # another index, without which nobody finds the rest
        rest = [name for name in self.names[1:] if name not in keep]
        if not self.shared:
            save.remove(rest)
            return
        with suppress(HoldfastError):
            parent, own = save.url.parent, save.url.key.rpartition("/")[2]
            keys = [parent.below("/".join(beside(name) or (own, name))).key for name in rest]
            release(parent, keys, Namings(parent).named)


NOTHING = ReplacedObjects()


def replaced_at(url: Url, there: Collection[str]) -> ReplacedObjects:
    """The objects of the checkpoint that is there: nobody needs them when another has taken its place."""
    shared = False
    try:
        store = RemoteStore(url)
        if MANIFEST in there:
            raw = bytearray(store.size(MANIFEST))
            store.peek(MANIFEST, 0, memoryview(raw))
            manifest = parse_manifest(bytes(raw), Limits())
            names = [MANIFEST, *(file.name for file in manifest.files), *(file.name for file in manifest.others)]
            shared = manifest.hash is not None
        else:
            index = choose_index(sorted(there), url)
            # Data without its index is what a save left, or what steps beside this one name: not for us to delete.
            weights = read_index(OpenSource(store), index).files if index else filter(is_checkpoint, there)
            names = [*([index] if index else []), *dict.fromkeys(weights)]
    except HoldfastError:
        return NOTHING  # what cannot be read is not known to be a checkpoint's
    return ReplacedObjects([name for name in names if "/" not in name or beside(name)], shared)


def _check(file: FilePlan, writing: Writing, crcs: Mapping[str, int]) -> Callable[[Url], None] | None:
    """What looks at a single object, at whichever place it was written to."""
    return (lambda where: check_uploaded(file, where, crcs)) if writing.read_back else None


def check_uploaded(file: FilePlan, url: Url, crcs: Mapping[str, int]) -> None:
    """Read an object back, and compare it with the checksums of what was written to it."""
    store = RemoteStore(url)
    (key,) = store.list()
    segments = [
        (s.label, Span(key, offset, s.nbytes))
        for s, offset in zip(file.segments, file.offsets(), strict=True)
        if isinstance(s, Data)
    ]
    sweep = Sweep(store, (span for _, span in segments), block=store.block_nbytes)
    run_all(sweep.tasks(), store.requests)
    for number, (label, _) in enumerate(segments):
        found = sweep.crc32(number, name=label)
        if found != crcs[label]:
            raise NotCommitted(
                "what was written does not read back the same; nothing was published",
                file=store.name,
                tensor=label,
                expected=crcs[label],
                found=found,
            )
