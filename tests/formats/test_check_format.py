"""`holdfast.testing.check_format`: every format passes it, and it fails for faulty readers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.formats.outside import holdfast_toy
from tests.formats.outside.holdfast_toy import TOY

from holdfast.core.protocols import Description, Source
from holdfast.core.value import replace
from holdfast.engine.files import ViewTable
from holdfast.errors import Truncated
from holdfast.formats import format_of, written_formats
from holdfast.testing import check_format

FILES = Path(__file__).parent.parent / "golden" / "files"

READ_ONLY = {
    "gguf": "tiny.gguf",
    "npy": "bfloat16.npy",
    "npz": "stored.npz",
    "onnx": "tiny.onnx",
    "pickle": "arrays.pkl",
    "torch-legacy": "legacy.pt",
    "torch-tar": "tar.pt",
}


def test_a_format_of_another_package_passes():
    check_format(TOY)


@pytest.mark.parametrize("name", [entry.name for entry in written_formats()])
def test_formats_that_are_written_pass(name: str):
    check_format(format_of(name))


@pytest.mark.parametrize("name", READ_ONLY)
def test_formats_that_are_only_read_pass(name: str):
    check_format(format_of(name), FILES / READ_ONLY[name])


def read_tensor_data(source: Source) -> Description:
    (key,) = source.store.list()
    source.bytes(key, 0, source.store.size(key))
    return holdfast_toy.describe(source)


def raise_another_error(source: Source) -> Description:
    try:
        return holdfast_toy.describe(source)
    except Truncated as error:
        raise ValueError("too short") from error


def open_truncated_files(source: Source) -> Description:
    try:
        return holdfast_toy.describe(source)
    except Truncated:
        table = ViewTable({})
        return Description(TOY.name, table, table)


def return_another_format_name(source: Source) -> Description:
    return replace(holdfast_toy.describe(source), format="tyo")


def swap_tensors(source: Source) -> Description:
    description = holdfast_toy.describe(source)
    tensors = dict(description.tensors)
    names = list(tensors)
    tensors_in_reverse = [tensors[name] for name in reversed(names)]
    table = ViewTable(dict(zip(names, tensors_in_reverse, strict=True)))
    return replace(description, tensors=table, tree=table)


FAULTY_READERS: dict[Callable[[Source], Description], str] = {
    read_tensor_data: "opening reads .* bytes of the elements",
    raise_another_error: "raises ValueError instead of an error of holdfast.errors",
    open_truncated_files: "file was cut off at byte .* and opens with other values",
    return_another_format_name: "calls its format 'tyo'",
    swap_tensors: "saved .*, found|could not be opened again",
}
"""Functions that describe a file wrongly, and the message of the check that fails."""


@pytest.mark.parametrize("describe", FAULTY_READERS, ids=lambda describe: describe.__name__)
def test_a_faulty_reader_fails(describe: Callable[[Source], Description]):
    faulty_format = replace(TOY, read_by=f"{__name__}:{describe.__name__}")
    with pytest.raises(AssertionError, match=FAULTY_READERS[describe]):
        check_format(faulty_format)
