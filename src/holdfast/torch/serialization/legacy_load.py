"""Load what torch wrote before 1.6: the stream of five pickles with raw storages behind, and the tar of 0.1.

The bytes of storages come after the object that uses them. So the closed interpreter reads a stream first, whoever builds the
object then: it finds which storages there are, and where (formats/torch/legacy.py). What a file claims is compared with the file
before anything is allocated, and what runs code of the file's choice has its storages filled before.
"""

from __future__ import annotations

import difflib
import inspect
import io
import pickle
import sys
import warnings
from collections.abc import Mapping
from types import ModuleType

import torch
from torch.serialization import SourceChangeWarning

from holdfast.core.chunk import Storage
from holdfast.engine.threads import default_threads
from holdfast.errors import HoldfastError, Truncated
from holdfast.formats.pickle.spending import Spending
from holdfast.formats.torch.legacy import OBJECT, CutShort, NotTorch, begins_like_tar, read_stream, read_tar
from holdfast.torch.serialization.opening import OpenedFile
from holdfast.torch.serialization.pickling import unpickler
from holdfast.torch.serialization.rebuild import TorchBuilder
from holdfast.torch.serialization.refusals import refusal
from holdfast.torch.serialization.storages import LazyStorages, Placement, as_text
from holdfast.torch.serialization.weights import WeightsTable

TAR_MAGIC = (257, b"ustar")
"""Where a tar says what it is."""


def load_legacy(
    file: OpenedFile, place: Placement, *, pickle_module: ModuleType, arguments: Mapping[str, object], weights_only: bool
) -> object:
    """The object of a legacy stream. The caller's file object stands behind the last storage afterwards."""
    if not file.nbytes:
        raise Truncated("Ran out of input: there is nothing to load here (was the buffer rewound?)", file=file.path)
    table: WeightsTable | None = None
    with file.source.store.reading():
        try:
            stream = read_stream(file.source, file.key, file.start)
            storages = _storages(file, stream.places, place, lengths=(6,), ahead=not weights_only)
            if weights_only:
                table = WeightsTable(storages, encoding=str(arguments["encoding"]))
                result = stream.window.stream(stream.begin, table, OBJECT)[0].value
        except (NotTorch, CutShort):
            raise
        except (HoldfastError, pickle.UnpicklingError) as error:
            raise refusal(error, protocol=2 if table is None else table.protocol) if weights_only else error from None
        if table is None:

            def persistent(pid: object) -> object:
                if isinstance(pid, tuple) and len(pid) == 4 and pid[0] == "module" and isinstance(pid[1], type):
                    _compare_source(*pid[1:])
                    return pid[1]
                return storages.persistent(as_text(pid))

            content = io.BytesIO(stream.window.data[stream.begin : stream.stop])
            result = unpickler(pickle_module, content, persistent, arguments=arguments).load()
        storages.fill()
    if table is None:
        torch._utils._validate_loaded_sparse_tensors()
    if file.path is None:
        file.file.seek(stream.end)
    return result


def _storages(
    file: OpenedFile, places: Mapping[str, Storage], place: Placement, *, lengths: tuple[int, ...], ahead: bool
) -> LazyStorages:
    """Storages whose places are known when they are asked for."""
    return LazyStorages(
        file.source,
        file.key,
        lambda asked: places[asked.key],
        place=place,
        lengths=lengths,
        everything=lambda: places,
        swap=sys.byteorder != "little",
        ahead=ahead,
        threads=default_threads(),
    )


def _compare_source(kind: type, path: object, text: object) -> None:
    """Warn where the class's source is not what it was when the file was written."""
    if not isinstance(text, str) or not isinstance(path, str):
        return
    try:
        lines, _ = inspect.getsourcelines(kind)
        found = "".join(lines)
    except Exception:
        # As when it was saved: whatever keeps Python from finding the source, the object is good without.
        warnings.warn(f"Couldn't retrieve source code for container of type {kind.__name__}.", SourceChangeWarning, stacklevel=2)
        return
    if found == text:
        return
    changed = sum(line[:1] in "+-" for line in difflib.unified_diff(text.splitlines(), found.splitlines(), lineterm="", n=0))
    warnings.warn(
        f"source code of class '{torch.typename(kind)}' has changed: {changed} lines differ from those of {path} when the model "
        "was saved. If it does not behave as it did, look at the difference, or save state_dict() instead of the model.",
        SourceChangeWarning,
        stacklevel=2,
    )


def looks_like_tar(file: OpenedFile) -> bool:
    """Whether this is a tar, which only torch 0.1 wrote. torch looks for one in paths and real files only."""
    at, magic = TAR_MAGIC
    head = file.head(512)
    return head[at : at + len(magic)] == magic or begins_like_tar(head)


def load_tar(file: OpenedFile, place: Placement, *, pickle_module: ModuleType, arguments: Mapping[str, object]) -> object:
    """The object of a tar of torch 0.1. All storages are read before its pickle may run anything."""
    source, key = file.source, file.key
    places: dict[str, Storage] = {}
    with source.store.reading():
        storages = _storages(file, places, place, lengths=(5,), ahead=False)
        builder = TorchBuilder(storages, lambda what: False)
        builder.begin(source.limits, Spending(source.limits, file.nbytes))
        known, (start, stop) = read_tar(source, key, places, storages=storages, builder=builder, begin=file.start)
        storages.fill()
        content = io.BytesIO(source.bytes(key, start, stop))

    def persistent(pid: object) -> object:
        if isinstance(pid, tuple):
            _compare_source(*pid)
            return pid[0]
        return known[int(str(pid))]

    return unpickler(pickle_module, content, persistent, arguments=arguments).load()
