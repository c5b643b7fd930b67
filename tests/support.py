"""What tests of several packages need."""

from __future__ import annotations

import io
import itertools
import pickle
import threading
from collections.abc import Callable, Collection, Iterable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast.core.box import Box
from holdfast.core.limits import Limits
from holdfast.core.registry import get_extras_table
from holdfast.formats.pickle.machine import interpret_whole
from holdfast.formats.pickle.plain import PlainTable
from holdfast.torch import versions

__all__ = [
    "ALONE",
    "drops_rest_of_frames",
    "dtypes",
    "element_bytes",
    "flip_bit",
    "nbytes_on_disk",
    "needs",
    "nested_allowed",
    "points",
    "run_in_threads",
    "save_as",
    "torch_bytes",
    "unpickled",
    "until",
]


def needs(change: versions.Change) -> pytest.MarkDecorator:
    """For tests of what torch does from a version on."""
    return pytest.mark.skipif(not change, reason=change.reason)


def until(change: versions.Change) -> pytest.MarkDecorator:
    """For tests of what torch did before a version."""
    return pytest.mark.skipif(bool(change), reason=change.reason)


def dtypes(*names: str, but: Collection[str] = ()) -> list[torch.dtype]:
    """Those of the element types that this torch has."""
    return [
        found for name in names if name not in but and (found := versions.dtype(name)) is not None
    ]


ALONE = {"no_dist": True}
"""Arguments of `dcp.save` and `dcp.load` in a process that belongs to no group."""


def nested_allowed() -> AbstractContextManager[object]:
    """Within it, `weights_only=True` loads nested tensors of both kinds, with every torch."""
    if not versions.NESTED_ASKED_FOR:
        return nullcontext()
    from torch._dynamo.decorators import _DimRange
    from torch.nested._internal.nested_tensor import NestedTensor, _rebuild_njt

    return torch.serialization.safe_globals(
        [torch._utils._rebuild_nested_tensor, NestedTensor, _rebuild_njt, _DimRange]
    )


def torch_bytes(value: object, zipped: bool = True, **options: object) -> bytes:
    """What `torch.save` writes, as a zip or as the stream of old."""
    file = io.BytesIO()
    torch.save(value, file, **{"_use_new_zipfile_serialization": zipped} | options)
    return file.getvalue()


def element_bytes(tensor: torch.Tensor) -> bytes:
    """The elements in C order."""
    return (
        tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        if tensor.numel()
        else b""
    )


def flip_bit(file: Path, offset: int = 0, *, after: bytes = b"") -> None:
    """Flip the lowest bit of one byte of a file.

    Args:
        file: The file that is damaged.
        offset: Where the byte is. It counts from the end if it is negative.
        after: Bytes in the file. If they are given, the offset counts from where they begin.
    """
    content = bytearray(file.read_bytes())
    content[content.index(after) + offset if after else offset] ^= 1
    file.write_bytes(content)


def save_as(path: Path, state: object) -> Path:
    """Write a state in the format that the name stands for: torch's by torch, the others by Holdfast."""
    if path.name == "legacy.pt":
        torch.save(state, path, _use_new_zipfile_serialization=False)
    elif path.suffix == ".pt":
        torch.save(state, path)
    else:
        holdfast.save(state, path)
    return path


def unpickled(stream: bytes) -> object:
    """The value of a pickle, by the closed interpreter with its plain table."""
    return interpret_whole(stream, PlainTable(), limits=Limits()).value


def points(box: Box) -> set[tuple[int, ...]]:
    """Every point of a box."""
    return set(itertools.product(*(range(a, b) for a, b in zip(box.start, box.stop, strict=True))))


def run_in_threads(work: Callable[[Any], object], items: Iterable[object]) -> None:
    """Call a function with every item, each call in a thread of its own, and wait for all."""
    threads = [threading.Thread(target=work, args=(item,)) for item in items]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def nbytes_on_disk(path: Path) -> int:
    """Of a file, or of the files in a folder."""
    return sum(f.stat().st_size for f in path.iterdir()) if path.is_dir() else path.stat().st_size


def drops_rest_of_frames() -> bool:
    """Whether the C unpickler of this Python goes on behind a frame that an argument crosses (CPython gh-154848)."""
    # The frame has the length of a text and its first two bytes. Who drops these takes "cd.f" as the text.
    data = b"\x80\x04\x95\x07\0\0\0\0\0\0\0X\x04\0\0\0abcd.f."
    try:
        return bool(pickle.load(io.BytesIO(data)) == "cd.f")
    except pickle.UnpicklingError:
        return False


def public_names() -> list[str]:
    """Return the public names of `holdfast`, also those that are not in its `__all__`."""
    return sorted({*holdfast.__all__, *holdfast._MODULES_BY_NAME, *get_extras_table("NAMES")})
