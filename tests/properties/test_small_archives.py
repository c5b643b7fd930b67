"""Small archives: compared with the one that torch's writer makes, and a short file read at once, against the ordinary ways."""

import io
import warnings
from pathlib import Path
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import holdfast.torch
from holdfast.errors import HoldfastError, Truncated
from holdfast.formats.zip import reader
from holdfast.formats.zip.reader import read_archive, read_canonical
from holdfast.formats.zip.writer import lay_out_zip
from holdfast.torch.serialization import opening
from tests.formats.zip.craft import Item, build
from tests.formats.zip.sources import BytesSource
from tests.sampling import examples

STATE = {"step": 7, "lr": [1e-3] * 3, "w": torch.arange(6.0), "empty": torch.zeros(0)}


def saved(state: object = STATE) -> bytes:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


def glance(raw: bytes, *, before: int = 0, behind: int = 0):
    source = BytesSource(b"?" * before + raw + b"!" * behind)
    return read_canonical(source, "file", start=before, stop=before + len(raw))


def strict(raw: bytes, *, before: int = 0, behind: int = 0):
    """What the strict reader says, or that it refuses."""
    source = BytesSource(b"?" * before + raw + b"!" * behind)
    with mock.patch.object(reader, "read_canonical", return_value=None):
        try:
            return read_archive(source, "file", start=before, stop=before + len(raw))
        except HoldfastError:
            return None


def assert_nothing_else(raw: bytes, **around: int) -> bool:
    """What is taken at a glance is what the strict reader finds; whether it was taken."""
    found = glance(raw, **around)
    with mock.patch.object(reader, "TOGETHER", 2):
        by_two = glance(raw, **around)
    assert (by_two is None) == (found is None)
    if found is not None:
        assert list(found.records.items()) == list(by_two.records.items())
        expected = strict(raw, **around)
        assert expected is not None
        assert found.prefix == expected.prefix
        assert list(found.records.items()) == list(expected.records.items())
    return found is not None


@pytest.mark.parametrize("long", [False, True])
def test_every_byte_but_those_of_payloads_follows(long: bool):
    raw = saved({**STATE, "long": torch.zeros(reader.WHOLE_NBYTES // 4)} if long else STATE)
    found = glance(raw)
    assert found is not None
    assert (len(raw) > reader.WHOLE_NBYTES) == long
    payload = {at for record in found.records.values() for at in range(record.start, record.stop)}
    for at in set(range(len(raw))) - payload:
        for changed in (raw[at] ^ 1, raw[at] ^ 0x80):
            assert glance(raw[:at] + bytes([changed]) + raw[at + 1 :]) is None, at
    for at in range(0, len(raw), 97):
        assert_nothing_else(raw[:at])
        assert_nothing_else(raw[at:])


NAMES = st.one_of(
    st.text("aA.b/", max_size=5),
    st.sampled_from(
        [
            "data.pkl",
            "DATA.PKL",
            "data/0",
            "version",
            "x/",
            "..",
            "a/../b",
            "a\\b",
            "C:",
            "é",
            "ſ",
            "S",
        ]
    ),
)


@settings(max_examples=examples(200), deadline=None)
@given(
    names=st.lists(
        st.tuples(st.sampled_from(["archive/", "archive/", "Archive/", "b/", ""]), NAMES),
        min_size=1,
        max_size=5,
    ),
    sizes=st.lists(st.integers(0, 70), min_size=5, max_size=5),
    checked=st.booleans(),
    around=st.sampled_from([{}, {"before": 5}, {"before": 3, "behind": 4}]),
)
def test_names_that_mean_two_things_are_left_to_the_strict_reader(names, sizes, checked, around):
    items = [
        Item(f"{top}{name}", b"\1" * nbytes)
        for (top, name), nbytes in zip(names, sizes, strict=False)
    ]
    if not checked:
        nothing = {"crc": 0}
        items = [
            Item(
                i.name,
                i.content,
                central=nothing,
                descriptor=None if not i.content else blank(i.content),
            )
            for i in items
        ]
    assert_nothing_else(build(items), **around)


def blank(content: bytes) -> bytes:
    """The descriptor of a record without a checksum."""
    nbytes = len(content).to_bytes(4, "little")
    return b"PK\7\x08" + bytes(4) + nbytes + nbytes


LIES = st.dictionaries(
    st.sampled_from(
        ["made_by", "needed", "flags", "method", "time", "date", "crc", "packed", "size"]
    ),
    st.sampled_from([0, 1, 8, 0x800, 0x808, 0xFFFF]),
    max_size=2,
)


@settings(max_examples=examples(200), deadline=None)
@given(
    content=st.binary(max_size=20),
    central=LIES,
    local=LIES.map(lambda lies: {name: value for name, value in lies.items() if name != "made_by"}),
    end=st.dictionaries(
        st.sampled_from(["count", "here", "nbytes", "directory", "disk"]),
        st.integers(0, 3),
        max_size=1,
    ),
    alignment=st.sampled_from([0, 16, 64, 64, 64]),
    wide=st.booleans(),
)
def test_lies_are_left_to_the_strict_reader(content, central, local, end, alignment, wide):
    items = [
        Item("a/data.pkl", b"x"),
        Item("a/b", content, central=central, local=local),
        Item("a/c", b"z" * 9),
    ]
    assert_nothing_else(build(items, end=end, alignment=alignment, wide=wide))


def test_a_known_archive_is_one_piece():
    records = [
        ("data.pkl", b"\x80\2}."),
        ("data/0", b""),
        ("data/1", bytes(100)),
        ("version", b"3\n"),
    ]
    for alignment, crc in ((64, True), (1, True), (4096, False)):
        (known,) = lay_out_zip("a", records, alignment=alignment, crc=crc)
        if crc:
            assert known.data == build(
                [Item(f"a/{name}", content) for name, content in records], alignment=alignment
            )
        assert (alignment == 64) == assert_nothing_else(known.data)


def outcome(path: Path, **options: object):
    """What a load gives, or says. Only the words for a file that ends too early differ between a store and another."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return holdfast.torch.load(path, **options)
    except HoldfastError as error:
        return type(error), None if isinstance(error, Truncated) else str(error), error.file
    except Exception as error:
        return type(error), str(error)


def same(one: object, other: object) -> bool:
    if isinstance(one, torch.Tensor):
        return (
            isinstance(other, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)
        )
    if isinstance(one, dict):
        return (
            isinstance(other, dict)
            and one.keys() == other.keys()
            and all(same(one[key], other[key]) for key in one)
        )
    return one == other


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("short") / "a.pt"


@settings(max_examples=examples(40), deadline=None)
@given(data=st.data(), legacy=st.booleans(), mapped=st.booleans())
def test_a_short_file_is_loaded_as_a_long_one(place, data, legacy, mapped):
    torch.save(STATE, place, _use_new_zipfile_serialization=not legacy)
    # A damaged pickle may say anything, and is given to no unpickler that does it.
    options = {"weights_only": data.draw(st.booleans()), "mmap": mapped and not legacy}
    if options["weights_only"]:
        raw = bytearray(place.read_bytes())
        if data.draw(st.booleans()):
            raw[data.draw(st.integers(0, len(raw) - 1))] ^= 1 << data.draw(st.integers(0, 7))
        if data.draw(st.booleans()):
            del raw[data.draw(st.integers(0, len(raw))) :]
        place.write_bytes(raw)
    found = outcome(place, **options)
    with mock.patch.object(opening, "SHORT_NBYTES", 0):
        assert same(found, outcome(place, **options))
