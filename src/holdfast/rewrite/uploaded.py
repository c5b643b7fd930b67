"""Carry out a save plan in an object store: every file is an object, the last index file publishes (`engine/commit/remote`).

Objects are written from front to back (`engine/stream`), in parts of which several are under way. Nothing is written to the disk of
this machine, and memory stays at a few parts an object.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence

from holdfast.core.limits import Limits
from holdfast.engine.checksums import Span, Sweep
from holdfast.engine.commit.remote import ObjectSave, PrefixSave
from holdfast.engine.readback import check_source
from holdfast.engine.stream import Told, Writer, write_stream
from holdfast.engine.threads import run_all
from holdfast.engine.write import Progress
from holdfast.errors import DurabilityUncertain, HoldfastError, NotCommitted
from holdfast.formats.native.schema import MANIFEST, parse_manifest
from holdfast.plan.saves import Data, FilePlan, SavePlan
from holdfast.rewrite.writing import Writing
from holdfast.stores.remote.store import RemoteStore
from holdfast.stores.remote.url import Url

__all__ = ["put_plan"]


def put_plan(
    plan: SavePlan,
    url: Url,
    writing: Writing,
    *,
    crcs: dict[str, int],
    progress: Progress | None,
    before_commit: Callable[[], None] | None,
) -> None:
    """Write a plan and publish it; `crcs` is given the CRC-32 of each stored piece."""

    def content(file: FilePlan) -> Callable[[Writer], None]:
        def write(target: Writer) -> None:
            crcs.update(write_stream(file, Told(target, progress) if progress else target, known=crcs))
            check_source(file, crcs)

        return write

    last = before_commit or _nothing
    if not plan.directory:
        (file,) = plan.files
        single = ObjectSave(url, overwrite=writing.overwrite is not False)
        single.begin()
        single.write(file.nbytes, content(file), last)
        return
    *others, index = (*plan.files, *plan.index)
    save = PrefixSave(url, index.key, overwrite=bool(writing.overwrite))
    save.begin()
    replaced = _named(url) if writing.overwrite else ()
    try:
        for file in others:
            save.write(file.key, file.nbytes, content(file))
            if writing.read_back:
                check_uploaded(file, url, crcs)
        text = io.BytesIO()
        content(index)(text)
        last()
        save.commit(text.getvalue())
    except DurabilityUncertain:
        raise  # the index may be there, and then names what was written
    except BaseException:
        save.give_up()
        raise
    save.remove(replaced)


def _nothing() -> None:
    """Nothing has to be looked at before the commit."""


def _named(url: Url) -> Sequence[str]:
    """The objects that the checkpoint there names, which nobody needs when another has taken its place."""
    try:
        store = RemoteStore(url)
        if not store.holds(MANIFEST):
            return ()
        raw = bytearray(store.size(MANIFEST))
        store.peek(MANIFEST, 0, memoryview(raw))
        manifest = parse_manifest(bytes(raw), Limits())
    except HoldfastError:
        return ()  # what cannot be read is not known to be a checkpoint's
    names = [*(file.name for file in manifest.files), *(file.name for file in manifest.others)]
    return [name for name in names if "/" not in name]


def check_uploaded(file: FilePlan, url: Url, crcs: Mapping[str, int]) -> None:
    """Read an object back, and compare it with the checksums of what was written to it."""
    store = RemoteStore(url.below(file.key))
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
