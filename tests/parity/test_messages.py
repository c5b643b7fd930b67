"""What programs look for in the errors of `torch.load` stands in ours: the kind of error, and the phrases that they match."""

from __future__ import annotations

import io
import pickle
import re
import traceback
import zipfile
from collections.abc import Callable

import pytest
import torch

from holdfast.torch import load, versions
from tests.support import needs


def saved(value: object, *, zipped: bool = True) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer, _use_new_zipfile_serialization=zipped)
    return buffer.getvalue()


GOOD = saved({"a": torch.arange(10.0), "b": [1]})
LEGACY = saved({"a": torch.arange(10.0)}, zipped=False)


def changed(change: Callable[[str, bytes], bytes | None]) -> bytes:
    """The good file with some records changed, or left out."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(GOOD)) as old, zipfile.ZipFile(out, "w") as new:
        for entry in old.infolist():
            content = change(entry.filename.partition("/")[2], old.read(entry))
            if content is not None:
                new.writestr(entry.filename, content)
    return out.getvalue()


def record(name: str, content: bytes | None) -> bytes:
    return changed(lambda each, old: content if each == name else old)


def pickled(content: bytes) -> bytes:
    return record("data.pkl", content)


CORRUPT = (
    RuntimeError,
    "PytorchStreamReader",
    "internal miniz error",
    "high likelihood that your checkpoint file is corrupted",
)
FAILED = (pickle.UnpicklingError, "Weights only load failed", "WeightsUnpickler error")

ANY_MODE: dict[str, tuple[bytes, type[Exception], tuple[str, ...]]] = {
    "cut in half": (
        GOOD[: len(GOOD) // 2],
        CORRUPT[0],
        (*CORRUPT[1:], "failed reading zip archive: failed finding central directory"),
    ),
    "without its end": (
        GOOD[:-10],
        CORRUPT[0],
        (*CORRUPT[1:], "failed reading zip archive: failed finding central directory"),
    ),
    "four bytes": (
        GOOD[:4],
        CORRUPT[0],
        (*CORRUPT[1:], "failed reading zip archive: not a ZIP archive"),
    ),
    "an entry without its signature": (
        GOOD[: (at := GOOD.rindex(b"PK\1\2"))] + b"x" + GOOD[at + 1 :],
        CORRUPT[0],
        (*CORRUPT[1:], "failed reading zip archive: invalid header or archive is corrupted"),
    ),
    "no pickle": (
        record("data.pkl", None),
        CORRUPT[0],
        (*CORRUPT[1:], "failed locating file data.pkl: file not found"),
    ),
    "no storage": (
        record("data/0", None),
        CORRUPT[0],
        (*CORRUPT[1:], "failed locating file data/0: file not found"),
    ),
    "later version": (
        record("version", b"99"),
        RuntimeError,
        (
            "Attempted to read a PyTorch file with version 99, but the maximum supported version for reading is 10",
        ),
    ),
    "no number for a version": (
        record("version", b"xx"),
        RuntimeError,
        ("Couldn't parse the version xx",),
    ),
    "byte order": (
        record("byteorder", b"middle"),
        ValueError,
        ("Unknown endianness type: middle",),
    ),
    "short storage": (
        record("data/0", b"x" * 20),
        (RuntimeError, ValueError),
        ("record size (20 bytes) does not match expected size (40 bytes",),
    ),
    "legacy, cut": (
        LEGACY[:-10],
        RuntimeError,
        ("unexpected EOF, expected 10 more bytes", "The file might be corrupted"),
    ),
    "legacy, another number": (
        pickle.dumps(12345, 2),
        RuntimeError,
        ("Invalid magic number; corrupt file?",),
    ),
    "legacy, another protocol": (
        pickle.dumps(0x1950A86A20F9469CFC6C, 2) + pickle.dumps(1000, 2),
        RuntimeError,
        ("Invalid protocol version: 1000",),
    ),
    "nothing": (b"", EOFError, ()),
}

WEIGHTS: dict[str, tuple[bytes, str]] = {
    "id of numbers": (
        b"\x80\x02(K\x01K\x02tQ.",
        "Only persistent_load of storage is allowed, but got <class 'int'>",
    ),
    "id of text": (b"\x80\x02X\x01\x00\x00\x00aQ.", "persistent_load id must be tuple"),
    "SETITEMS": (
        b"\x80\x02](K\x01K\x02u.",
        "Can only SETITEMS for dict, collections.OrderedDict, collections.Counter, but got <class 'list'>",
    ),
    "SETITEM": (
        b"\x80\x02]K\x01K\x02s.",
        "Can only SETITEM for dict, collections.OrderedDict, collections.Counter, but got <class 'list'>",
    ),
    "APPEND": (b"\x80\x02}K\x01a.", "Can only append to lists, but got <class 'dict'>"),
    "APPENDS": (b"\x80\x02}(K\x01K\x02e.", "Can only extend lists, but got <class 'dict'>"),
    "BUILD": (
        b"\x80\x02K\x01}b.",
        "Can only build Tensor, Parameter, OrderedDict or types allowlisted via `add_safe_globals`, but got <class 'int'>",
    ),
    "REDUCE": (b"\x80\x02K\x01)R.", "Trying to call reduce for unrecognized function"),
    "unknown opcode": (b"\x80\x02\xff.", "Unsupported operand 255"),
    "GLOBAL": (
        b"\x80\x02cnumpy\nfoo\n.",
        "Unsupported global: GLOBAL numpy.foo was not an allowed global by default",
    ),
}


def said(function: Callable[..., object], raw: bytes, *, weights_only: bool) -> Exception:
    with pytest.raises(Exception) as caught:
        function(io.BytesIO(raw), weights_only=weights_only)
    return caught.value


@pytest.mark.parametrize("weights_only", [True, False], ids=["weights", "anything"])
@pytest.mark.parametrize(
    "function", [pytest.param(torch.load, marks=needs(versions.WORDS)), load], ids=["torch", "ours"]
)
@pytest.mark.parametrize("name", ANY_MODE)
def test_files_that_are_broken(name: str, function: Callable[..., object], weights_only: bool):
    raw, kind, phrases = ANY_MODE[name]
    error = said(function, raw, weights_only=weights_only)
    assert isinstance(error, kind)
    for phrase in phrases:
        assert phrase in str(error)


@pytest.mark.parametrize(
    "function", [pytest.param(torch.load, marks=needs(versions.WORDS)), load], ids=["torch", "ours"]
)
@pytest.mark.parametrize("name", WEIGHTS)
def test_pickles_that_are_refused(name: str, function: Callable[..., object]):
    content, phrase = WEIGHTS[name]
    error = said(function, pickled(content), weights_only=True)
    assert isinstance(error, FAILED[0])
    for part in (*FAILED[1:], phrase):
        assert part in re.sub(r"\s+", " ", str(error))
    last = traceback.format_exception_only(error)[0]
    assert last.startswith("_pickle.UnpicklingError: Weights only load failed.")
    again = pickle.loads(pickle.dumps(error))  # errors travel between processes
    assert isinstance(again, FAILED[0])
    assert str(again) == str(error)
