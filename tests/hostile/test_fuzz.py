"""Fuzzing of each format's `describe`: damaged and spliced golden files. Only Holdfast errors may come out.

A zip whose pickle is damaged stops at its checksum, so pickles are damaged inside and packed again with a true one.
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Sequence
from functools import cache

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.formats.zip.craft import Item, build
from tests.sampling import examples

from .golden import FILES, FOLDERS, look
from .mutate import NUMBERS, Edit, apply

__all__ = ["CHECKED", "repacked"]

EXAMPLES = settings(
    max_examples=examples(200),
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
"""The same examples on every machine; tests/hostile/soak.py looks for others."""

ZIPS = [name for name, raw in FILES.items() if raw.startswith(b"PK")]
CHECKED = [name for name in ZIPS if name not in ("no_crc.pt", "skip_data.pt")]
"""Zips that carry true checksums."""

FORMATS = {
    "torch-zip": [name for name in ZIPS if name.endswith(".pt") and name != "torchscript.pt"],
    "torchscript": ["torchscript.pt"],
    "torch-legacy": [name for name in FILES if name.startswith("legacy")],
    "torch-tar": ["tar.pt"],
    "safetensors": [name for name in FILES if name.endswith(".safetensors")],
    "npy": [name for name in FILES if name.endswith(".npy")],
    "npz": [name for name in FILES if name.endswith(".npz")],
    "gguf": [name for name in FILES if name.endswith(".gguf")],
}

edits = st.lists(
    st.tuples(
        st.sampled_from(["set", "set", "insert", "delete", "repeat", "move"]),
        st.integers(0, 1 << 16),
        st.integers(1, 64),
        st.one_of(st.binary(min_size=1, max_size=8), st.sampled_from(NUMBERS)),
    ),
    min_size=1,
    max_size=6,
)


@cache
def records_of(name: str) -> tuple[tuple[str, bytes], ...]:
    """The records of a golden zip; those that are compressed, which is code that nobody reads, are left empty."""
    with zipfile.ZipFile(io.BytesIO(FILES[name])) as archive:
        return tuple(
            (info.filename, archive.read(info) if info.compress_type == zipfile.ZIP_STORED else b"")
            for info in archive.infolist()
        )


def repacked(name: str, changes: Sequence[Edit]) -> bytes:
    """A golden zip with its pickles changed and every checksum true again."""
    return build(
        [
            Item(key, apply(raw, changes) if key.endswith(".pkl") else raw)
            for key, raw in records_of(name)
        ]
    )


@pytest.mark.parametrize("form", FORMATS)
def test_damaged(form):
    @EXAMPLES
    @given(name=st.sampled_from(FORMATS[form]), changes=edits)
    def fuzz(name, changes):
        look(apply(FILES[name], changes))

    fuzz()


@pytest.mark.parametrize("form", ["torch-zip", "torchscript"])
def test_damaged_pickle_with_a_true_checksum(form):
    names = [name for name in FORMATS[form] if name in CHECKED]

    @EXAMPLES
    @given(name=st.sampled_from(names), changes=edits)
    def fuzz(name, changes):
        look(repacked(name, changes))

    fuzz()


@pytest.mark.parametrize("form", FORMATS)
def test_spliced(form):
    """The start of one file and the end of another, of any format."""

    @EXAMPLES
    @given(
        first=st.sampled_from(FORMATS[form]),
        second=st.sampled_from(sorted(FILES)),
        stop=st.integers(0, 1 << 15),
        start=st.integers(0, 1 << 15),
    )
    def fuzz(first, second, stop, start):
        a, b = FILES[first], FILES[second]
        look(a[: stop % (len(a) + 1)] + b[start % (len(b) + 1) :])

    fuzz()


@pytest.mark.parametrize("name", FOLDERS)
def test_damaged_folder(name):
    files = FOLDERS[name]

    @EXAMPLES
    @given(part=st.sampled_from(sorted(files)), changes=edits)
    def fuzz(part, changes):
        look({**files, part: apply(files[part], changes)})

    fuzz()
