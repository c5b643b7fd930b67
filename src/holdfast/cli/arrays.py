"""Arrays on their way out: as text on the screen, as `.npy` and `.npz` on disk.

`.npy` knows only numpy's own types. An array of bfloat16 or float8 would be saved as nameless bytes (`|V2`) that
nothing reads back, so such arrays are widened to float32, which holds each of their values exactly; `raw` keeps the
bits, as unsigned integers.

A file is written under a hidden name beside its target, synced, and renamed over it: an error leaves what was there
before.
"""

from __future__ import annotations

import os
import secrets
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import numpy as np

from holdfast.core.tensor import LazyTensor
from holdfast.errors import Unsupported

__all__ = ["as_text", "plain_array", "widens", "write_npy", "write_npz"]

EDGE = 3
"""Items at each end of a dimension that numpy shows of a large array (`np.get_printoptions()["edgeitems"]`)."""

THRESHOLD = 1000
"""Elements above which numpy summarises."""

CORNERS = 256
"""Corners that are read to show a summary: eight long dimensions. More only ever comes from an expanded view."""


def widens(dtype: np.dtype[np.generic]) -> bool:
    """Whether numpy itself lacks this type, so that it is shown and saved as a wider one."""
    # ml_dtypes' types and our pair of halves are all of kind V, which is also what numpy would save them as.
    return dtype.kind == "V"


def plain_array(array: np.ndarray, *, raw: bool = False) -> np.ndarray:
    """The array in a type that numpy can show and save: as it is, widened exactly, or with `raw` the bits as
    integers.
    """
    if not widens(array.dtype):
        return array
    if raw:
        return array.view(np.dtype(f"u{array.dtype.itemsize}"))
    if array.dtype.names == ("real", "imag"):
        out = np.empty(array.shape, np.complex64)
        out.real, out.imag = array["real"], array["imag"]
        return out
    return array.astype(np.float32)


def as_text(tensor: LazyTensor) -> str:
    """The elements as `numpy.array2string` shows them. Of a large tensor only the corners that are shown are read."""
    if tensor.size <= THRESHOLD:
        return np.array2string(plain_array(tensor.numpy()), threshold=THRESHOLD, max_line_width=120)
    return np.array2string(plain_array(_corners(tensor)), threshold=0, edgeitems=EDGE, max_line_width=120)


def _corners(tensor: LazyTensor) -> np.ndarray:
    """A small array that numpy summarises to the same text as the whole: both ends of each long dimension, a gap of
    one between.
    """
    parts = [[slice(0, EDGE), slice(-EDGE, None)] if n > 2 * EDGE else [slice(None)] for n in tensor.shape]
    if 2 ** sum(len(p) == 2 for p in parts) > CORNERS:
        raise Unsupported("too many long dimensions to show at once: choose some with --slice", tensor=tensor.name)
    out = np.zeros([min(n, 2 * EDGE + 1) for n in tensor.shape], tensor.dtype.numpy)
    picks: list[tuple[slice, ...]] = [()]
    for options in parts:
        picks = [(*pick, option) for pick in picks for option in options]
    for pick in picks:
        tensor[pick].read(out=out[pick])
    return out


def write_npy(path: Path, tensor: LazyTensor, *, raw: bool = False) -> None:
    """Save one tensor as `.npy`."""
    array = plain_array(tensor.numpy(), raw=raw)
    with _replacing(path) as file:
        np.lib.format.write_array(file, np.asanyarray(array), allow_pickle=False)


def write_npz(path: Path, tensors: dict[str, LazyTensor], *, raw: bool = False) -> None:
    """Save several tensors under their names as `.npz`, one at a time, so that memory holds one."""
    for name in tensors:
        _check_member(name)
    with _replacing(path) as file, zipfile.ZipFile(file, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
        for name, tensor in tensors.items():
            array = plain_array(tensor.numpy(), raw=raw)
            with archive.open(zipfile.ZipInfo(f"{name}.npy"), "w", force_zip64=True) as member:
                np.lib.format.write_array(member, np.asanyarray(array), allow_pickle=False)


def _check_member(name: str) -> None:
    """Refuse names that would make an archive whose files land elsewhere when somebody unpacks it."""
    parts = name.replace("\\", "/").split("/")
    try:
        length = len(name.encode())
    except UnicodeEncodeError:
        length = 1 << 16
    if name.startswith(("/", "\\")) or ".." in parts or "\0" in name or length > 65_000:
        raise Unsupported(f"the name {name[:200]!r} cannot be a file in an .npz: write this tensor alone, as .npy")


@contextmanager
def _replacing(path: Path) -> Iterator[BinaryIO]:
    """A file that takes the place of `path` when the block ends well, and disappears when it does not."""
    hidden = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    descriptor = os.open(hidden, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(hidden, path)
    except BaseException:
        hidden.unlink(missing_ok=True)
        raise
