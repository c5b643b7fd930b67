"""Metadata that cannot be true: every lie is refused, with the tensor or the file in the error."""

from __future__ import annotations

import pytest
from tests.formats.dcp.craft_dcp import (
    FILE,
    SEVEN,
    W,
    chunk,
    folder,
    honest,
    index,
    info,
    metadata,
    opened,
    paths,
    properties,
    tensor,
    value,
)
from tests.hostile.craft_pickle import call, integer, list_of, number, stream, text, tuple_of
from tests.hostile.craft_torch import storage, torch_zip
from tests.hostile.craft_torch import tensor as rebuilt

from holdfast import errors


def one(shape=(2, 2), chunks=(((0, 0), (2, 2)),), places=((0, 0),), props=None, contents=None):
    """A directory with the tensor w; a chunk and a place for each item."""
    listed = [chunk(offsets, sizes) for offsets, sizes in chunks]
    items = contents or [W] * len(places)
    return folder(
        {"w": tensor(shape, listed, props)},
        [(index("w", at), raw) for at, raw in zip(places, items, strict=True)],
    )


GEOMETRY = {
    "hole": one((4, 2), [((0, 0), (2, 2))]),
    "hole between": one((6, 2), [((0, 0), (2, 2)), ((4, 0), (2, 2))], [(0, 0), (4, 0)]),
    "overlap": one((3, 2), [((0, 0), (2, 2)), ((1, 0), (2, 2))], [(0, 0), (1, 0)]),
    "overlap and hole of one size": one(
        (4, 2), [((0, 0), (2, 2)), ((1, 0), (2, 2))], [(0, 0), (1, 0)]
    ),
    "outside": one((2, 2), [((1, 0), (2, 2))], [(1, 0)]),
    "larger than the tensor": one((1, 2)),
    "a chunk twice": one((2, 2), [((0, 0), (2, 2))] * 2, [(0, 0), (0, 0)]),
    "a box of another rank": one((2, 2), [((0,), (4,))], [(0,)]),
    "sizes of another rank": one((2, 2), [((0, 0), (4,))], [(0, 0)]),
    "a place of another rank": one((2, 2), places=[(0,)]),
    "no chunks": one((2, 2), [], []),
    "a chunk without an item": one((4, 2), [((0, 0), (2, 2)), ((2, 0), (2, 2))], [(0, 0)]),
    "two items for a chunk": one((2, 2), places=[(0, 0), (0, 0)]),
    "an item for no chunk": one((2, 2), places=[(0, 0), (2, 0)]),
    "an item for another chunk": one((2, 2), places=[(1, 0)]),
    "an element in an empty tensor": one((0, 2)),
    "negative": one((-2, 2)),
    "negative offset": one((2, 2), [((-1, 0), (2, 2))]),
    "more than 2^62 elements": one((1 << 31, 1 << 31), [((0, 0), (1 << 31, 1 << 31))]),
    "more bytes than the item": one((200, 200), [((0, 0), (200, 200))]),
    "numbers of 10 bytes": one(call("torch", "Size", tuple_of(number(1 << 70, 10)))),
    "a length that is a bool": one(call("torch", "Size", tuple_of(b"\x88", b"\x88"))),
    "rank 65": one((1,) * 65, [((0,) * 65, (1,) * 65)], [(0,) * 65]),
    "another dtype in the item": one(props=properties("float64"), contents=[W]),
    "another shape in the item": one((4,), [((0,), (4,))], [(0,)]),
}


@pytest.mark.parametrize("name", GEOMETRY)
def test_geometry(name):
    with (
        pytest.raises((errors.MetadataError, errors.LimitExceeded)) as caught,
        opened(GEOMETRY[name]) as ckpt,
    ):
        ckpt["w"].numpy()
    # What the row of torch.Size refuses is not known to belong to a tensor yet; the byte of the pickle is.
    assert caught.value.tensor == "w" or caught.value.offset is not None


PLACES = {
    "beyond the file": (info(FILE, 0, len(W) + 1), errors.Truncated),
    "begins beyond the file": (info(FILE, 1 << 40, len(W)), errors.Truncated),
    "at 2^62": (info(FILE, number(1 << 62, 9), len(W)), errors.MetadataError),
    "of 2^62 bytes": (info(FILE, 0, number(1 << 62, 9)), errors.MetadataError),
    "negative offset": (info(FILE, -1, len(W)), errors.MetadataError),
    "negative length": (info(FILE, 0, -1), errors.MetadataError),
    "too short": (info(FILE, 0, len(W) - 1), errors.FormatError),
    "shifted": (info(FILE, 1, len(W) - 1), errors.FormatError),
    "empty": (info(FILE, 0, 0), errors.MetadataError),
    "absolute": (info("/etc/passwd", 0, len(W)), errors.UnsafePath),
    "climbs": (info("../secret", 0, len(W)), errors.UnsafePath),
    "climbs inside": (info("a/../b", 0, len(W)), errors.UnsafePath),
    "backslash": (info("..\\secret", 0, len(W)), errors.UnsafePath),
    "NUL": (info("a\0b", 0, len(W)), errors.UnsafePath),
    "nameless": (info("", 0, len(W)), errors.UnsafePath),
    "missing": (info("__9_0.distcp", 0, len(W)), errors.StoreError),
    "an unknown transform": (
        info(FILE, 0, len(W), transforms=list_of(text("stream.rot13/1"))),
        errors.Unsupported,
    ),
}


@pytest.mark.parametrize("name", PLACES)
def test_places(name):
    where, refusal = PLACES[name]
    files = {
        ".metadata": metadata(
            {"w": tensor([2, 2], [chunk([0, 0], [2, 2])])}, [(index("w", [0, 0]), where)]
        ),
        FILE: W,
    }
    with pytest.raises(refusal) as caught, opened(files) as ckpt:
        ckpt["w"].numpy()
    assert caught.value.file is not None


def test_items_that_overlap():
    both = {name: tensor([2, 2], [chunk([0, 0], [2, 2])]) for name in ("a", "b")}
    items = [
        (index("a", [0, 0]), info(FILE, 0, len(W))),
        (index("b", [0, 0]), info(FILE, 8, len(W) - 8)),
    ]
    with pytest.raises(errors.MetadataError, match="belong to 'a'") as caught:
        opened({".metadata": metadata(both, items), FILE: W})
    assert (caught.value.file, caught.value.tensor, caught.value.offset) == (FILE, "b", 8)


def test_tied_tensors_have_one_item():
    """Our own writer makes such; what it costs is what it costs to alias a storage in any other format."""
    both = {name: tensor([2, 2], [chunk([0, 0], [2, 2])]) for name in ("a", "b")}
    items = [(index(name, [0, 0]), info(FILE, 0, len(W))) for name in both]
    found = opened({".metadata": metadata(both, items), FILE: W})
    assert [found[name].numpy().tolist() for name in both] == [[[1, 2], [3, 4]]] * 2
    assert [alias.names for alias in found.aliases] == [("a", "b")]


def test_one_item_for_two_shapes():
    both = {"a": tensor([2, 2], [chunk([0, 0], [2, 2])]), "b": tensor([4], [chunk([0], [4])])}
    items = [(index("a", [0, 0]), info(FILE, 0, len(W))), (index("b", [0]), info(FILE, 0, len(W)))]
    found = opened({".metadata": metadata(both, items), FILE: W})
    assert found["a"].numpy().tolist() == [[1, 2], [3, 4]]
    with pytest.raises(errors.MetadataError, match="the item holds"):
        found["b"].numpy()


@pytest.mark.parametrize("other", ["a tensor", "a value"])
def test_values_share_no_item(other: str):
    """A value is interpreted for each name, so many names of one item would cost more than the file."""
    entries = {
        "a": tensor([2, 2], [chunk([0, 0], [2, 2])]) if other == "a tensor" else value(),
        "b": value(),
    }
    first = index("a", [0, 0]) if other == "a tensor" else index("a")
    with pytest.raises(errors.MetadataError, match="belong to 'a'"):
        opened(
            {
                ".metadata": metadata(
                    entries, [(first, info(FILE, 0, len(W))), (index("b"), info(FILE, 0, len(W)))]
                ),
                FILE: W,
            }
        )


ITEMS = {
    "a value": (SEVEN + bytes(200), errors.FormatError),
    "a value in place of a tensor": (
        torch_zip(stream(integer(7)), {"0": bytes(16)}),
        errors.MetadataError,
    ),
    "a call": (torch_zip(stream(call("os", "system", text("true")))), errors.PickleError),
    "a call that is popped": (
        torch_zip(stream(call("os", "system", text("true")), b"0", rebuilt(storage()))),
        errors.PickleError,
    ),
    "two tensors": (
        torch_zip(stream(tuple_of(rebuilt(storage()), rebuilt(storage())))),
        errors.MetadataError,
    ),
    "a view with gaps": (
        torch_zip(stream(rebuilt(storage(count=8), (2, 2), (4, 1))), {"0": bytes(32)}),
        errors.Unsupported,
    ),
    "an expanded row": (
        torch_zip(stream(rebuilt(storage(count=2), (2, 2), (0, 1))), {"0": bytes(8)}),
        errors.Unsupported,
    ),
    "no storage": (torch_zip(stream(rebuilt(storage())), {}), errors.MetadataError),
    "no zip": (bytes(2000), errors.FormatError),
    "a storage of another length": (
        torch_zip(stream(rebuilt(storage())), {"0": bytes(20)}),
        errors.MetadataError,
    ),
    "another byte order": (
        torch_zip(stream(rebuilt(storage())), byteorder=b"middle"),
        errors.HeaderError,
    ),
    "another version": (torch_zip(stream(rebuilt(storage())), version=b"99\n"), errors.HeaderError),
}


@pytest.mark.parametrize("name", ITEMS)
def test_items(name):
    content, refusal = ITEMS[name]
    with opened(one(contents=[content])) as ckpt, pytest.raises(refusal) as caught:
        ckpt["w"].numpy()
    assert (caught.value.file, caught.value.tensor) == (FILE, "w")


def test_a_data_file_of_another_save():
    files = honest()
    with pytest.raises(errors.FormatError):
        opened({**files, FILE: bytes(len(files[FILE]))})


def test_values_with_no_item_or_two():
    with pytest.raises(errors.MetadataError, match="0 items"):
        opened(folder({"s": value()}, []))
    with pytest.raises(errors.MetadataError, match="2 items"):
        opened(folder({"s": value()}, [(index("s"), SEVEN), (index("s"), SEVEN)]))


def test_items_without_metadata_are_noted():
    with opened(folder({}, [(index("lost", [0, 0]), W)])) as ckpt:
        assert len(ckpt) == 0
        assert any("'lost'" in line for line in ckpt.notes)


@pytest.mark.parametrize(
    "path",
    [["a", "b"], [], ["w", "x"], [5], ["w"] * 70, ["w", 1 << 40]],
    ids=["another name", "empty", "too long", "a number", "deep", "far"],
)
def test_a_path_that_leads_elsewhere_is_not_followed(path):
    files = folder(
        {"w": tensor([2, 2], [chunk([0, 0], [2, 2])])},
        [(index("w", [0, 0]), W)],
        planner=paths(w=path),
    )
    with opened(files) as ckpt:
        assert list(ckpt.tree) == ["w"]
        assert any("cannot be followed" in line for line in ckpt.notes)


def test_a_path_through_a_leaf():
    tensors = {"a": value(), "a.b": value()}
    files = folder(
        tensors,
        [(index("a"), SEVEN), (index("a.b"), SEVEN)],
        planner=paths(a=["a"], a__b=["a", "b"]),
    )
    with opened(files) as ckpt:
        assert ckpt.tree == {"a": 7, "a.b": 7}
