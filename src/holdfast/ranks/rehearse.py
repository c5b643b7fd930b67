"""A sharded save before it is written: would its index open, and what is no tensor?

No rank has the whole checkpoint. What the first one has is its description, so before a folder is made it lays out the checkpoint
that one rank would write of tensors like these, each in one piece, with the functions that lay out the real one, and gives it to
the reader. That finds whatever names, dtypes, ranks, shapes and the tree have against them. How the pieces are spread decides no
more than the length of the index; of the finished folder the index is read once more, before it is published.
"""

from __future__ import annotations

import io
from collections import defaultdict
from collections.abc import Mapping

from holdfast.core.box import Box
from holdfast.core.chunk import Storage
from holdfast.core.dtype import DTYPES
from holdfast.core.limits import Limits
from holdfast.core.protocols import State
from holdfast.core.tensor import LazyTensor
from holdfast.engine.planned_store import PlannedStore
from holdfast.engine.source import OpenSource
from holdfast.engine.stream import write_stream
from holdfast.formats.native.write import BoxToWrite
from holdfast.formats.torch.write import lay_out_torch_zip
from holdfast.ranks.files import Contents, DcpIndex, Part, Receipt, index_files, rank_files
from holdfast.rewrite.rehearse import Outline, check_holds, described
from holdfast.stores.local import LocalStore
from holdfast.stores.memory import MemoryStore

__all__ = ["check_folder", "rehearse_contents", "rehearse_value"]

READ_AS = {"native": ("native",), "dcp": ("dcp",), "safetensors": ("safetensors", "safetensors-dir")}
"""What a finished folder is opened as. One safetensors file in a folder of its own is just that file."""


def rehearse_contents(format: str, contents: Contents, path: str, *, dcp_index: DcpIndex) -> None:
    """Raise `CannotHold` where a checkpoint with these contents would not open, or would show other tensors."""
    nowhere = OpenSource(MemoryStore({}))
    boxes = []
    for name, (dtype, shape) in _outlines(contents).items():
        if name not in contents.aliases:
            storage = Storage("nowhere", 0, dtype.nbytes(_count(shape)), home=nowhere.store)
            tensor = LazyTensor.contiguous(name, dtype, shape, storage, nowhere)
            boxes.append(BoxToWrite(name, Box.whole(shape), tensor, shape))
    # What is no tensor is looked at where it is, by `rehearse_value`.
    values = dict.fromkeys(contents.values, _nothing()) if contents.values else {}
    files = rank_files(format, Part(0, 1, boxes, contents.metadata, values))
    unknown: Mapping[str, int] = defaultdict(int)
    receipts = [Receipt(file.plan.key, file.plan.nbytes, list(file.chunks(unknown))) for file in files]
    plans = [*(file.plan for file in files), *index_files(format, contents, receipts, dcp_index=dcp_index)]
    found = described(PlannedStore(plans, name=path), READ_AS[format])
    check_holds(found.tensors, _outlines(contents), path)


def rehearse_value(name: str, archive: bytes) -> None:
    """Raise `CannotHold` where the archive of a value that is no tensor would not open."""
    described(MemoryStore({"value": archive}, name=name), ("torch-zip",))


def check_folder(format: str, contents: Contents, folder: str) -> None:
    """The same as `rehearse_contents` for a folder that is finished and not published."""
    store = LocalStore(folder, max_files=Limits().files)
    try:
        check_holds(described(store, READ_AS[format]).tensors, _outlines(contents), folder)
    finally:
        store.close()


def _nothing() -> bytes:
    """The archive of None."""
    out = io.BytesIO()
    write_stream(lay_out_torch_zip(State(None, {}, {})).files[0], out)
    return out.getvalue()


def _outlines(contents: Contents) -> Mapping[str, Outline]:
    rows = {row.name: row for row in DTYPES.rows}
    return {name: (rows[dtype], tuple(shape)) for name, (dtype, shape) in contents.tensors.items()}


def _count(shape: tuple[int, ...]) -> int:
    count = 1
    for n in shape:
        count *= n
    return count
