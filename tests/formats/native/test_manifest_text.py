"""The text of a manifest is made by kind, from columns; it is the text that its schema gives, of the length that was foretold."""

from __future__ import annotations

import msgspec
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from holdfast.core.documents import decode_canonical
from holdfast.core.limits import Limits
from holdfast.engine.saves import Late, Literal, check_length
from holdfast.formats.native.manifest import FileBoxes, Outlines, StoredBoxes, lay_out_index
from holdfast.formats.native.schema import (
    DOCUMENT,
    DataFile,
    StoredChunk,
    StoredTensor,
    parse_manifest,
)

NAMES = st.text(st.characters(exclude_categories=["Cs"]), max_size=10)
NUMBERS = st.integers(0, 1 << 50)
DIGITS = st.integers(0, (1 << 32) - 1).map(lambda number: f"{number:08x}")
SHAPES = ((), (4,), (4, 6), (0, 3))


@st.composite
def manifests(
    draw: st.DrawFn,
) -> tuple[list[DataFile], Outlines, list[list[tuple[int, StoredChunk]]]]:
    """Tensors, whole or cut into two, in the files of up to three ranks."""
    names = draw(st.lists(NAMES, max_size=8, unique=True))
    kinds = [(dtype, shape) for dtype in ("float32", "int8") for shape in SHAPES]
    kind = [draw(st.integers(0, len(kinds) - 1)) for _ in names]
    files = [
        DataFile(f"data-{number}.safetensors", draw(NUMBERS))
        for number in range(draw(st.integers(1, 3)))
    ]
    inside: list[list[tuple[int, StoredChunk]]] = [[] for _ in files]
    for tensor, one in enumerate(kind):
        shape = kinds[one][1]
        cut = shape[:1] == (4,) and draw(st.booleans())
        for part in range(1 + cut):
            start, stop = (
                ((2 * part, *(0,) * (len(shape) - 1)), (2 * part + 2, *shape[1:]))
                if cut
                else (None, None)
            )
            hash = draw(st.none() | st.just("5" * 32))
            file = draw(st.integers(0, len(files) - 1))
            head = draw(st.none() | DIGITS)
            span = (draw(NUMBERS), draw(NUMBERS))
            chunk = StoredChunk(file, span, draw(DIGITS), start, stop, hash=hash, head=head)
            inside[file].append((tensor, chunk))
    return files, (names, kinds, kind), inside


def boxes_of(part: list[tuple[int, StoredChunk]], outlines: Outlines) -> FileBoxes:
    """What a rank says of a file."""
    starts, sizes = np.zeros((2, len(part)), np.int64), np.ones((2, len(part)), np.int64)
    for at, (tensor, chunk) in enumerate(part):
        _, kinds, kind = outlines
        shape = kinds[kind[tensor]][1]
        start, stop = chunk.start or (0,) * len(shape), chunk.stop or shape
        starts[: len(shape), at], sizes[: len(shape), at] = start, np.subtract(stop, start)
    stored = StoredBoxes.of(range(len(part)), [chunk for _, chunk in part])
    return FileBoxes(
        stored,
        np.array([tensor for tensor, _ in part], np.int64),
        starts,
        sizes,
        sum(map(len, stored.tails)),
    )


@given(manifests())
def test_it_is_the_text_of_its_schema(
    given_manifest: tuple[list[DataFile], Outlines, list[list[tuple[int, StoredChunk]]]],
):
    files, outlines, inside = given_manifest
    parts = [boxes_of(part, outlines) for part in inside]
    (*_, known) = lay_out_index(files, outlines, parts, fields={}, metadata={"a": "b"}, alone=True)
    (*_, later) = lay_out_index(
        files,
        outlines,
        parts,
        later=lambda crcs: [part.stored for part in parts],
        fields={},
        metadata={"a": "b"},
        alone=True,
    )
    (literal,), (late,) = known.segments, later.segments
    assert isinstance(literal, Literal)
    assert isinstance(late, Late)
    # `check_length` compares the length of the text with the one that the plan foretold.
    assert check_length(late.make({}), late.nbytes) == literal.data
    found = decode_canonical(DOCUMENT, literal.data)
    assert found is not None  # msgspec writes the very same text
    wanted: dict[str, list[StoredChunk]] = {}
    for tensor, chunk in sorted(
        ((tensor, chunk) for part in inside for tensor, chunk in part),
        key=lambda one: (one[0], one[1].file),
    ):
        wanted.setdefault(outlines[0][tensor], []).append(chunk)
    names, every, kind = outlines
    kinds = {name: every[at] for name, at in zip(names, kind, strict=True)}
    assert found.tensors == {
        name: StoredTensor(*kinds[name], tuple(chunks)) for name, chunks in wanted.items()
    }
    assert list(found.tensors) == list(wanted)
    assert parse_manifest(literal.data, Limits()).tensors == found.tensors
    assert found.metadata == {"a": "b"}
    assert msgspec.json.encode(found) == literal.data.rstrip(b" ")
