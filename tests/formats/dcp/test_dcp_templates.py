"""Templates of an index give what the machine gives, one opcode after the other: values, counts, errors and their offsets."""

from __future__ import annotations

import pickle
import random

import pytest
import torch
from torch.distributed.checkpoint import filesystem as f
from torch.distributed.checkpoint import metadata as m

from holdfast.core.limits import Limits
from holdfast.errors import HoldfastError
from holdfast.formats.dcp.schema import MetadataTable, PickledObject
from holdfast.formats.dcp.templates import IndexTable, RecordTemplates
from holdfast.formats.pickle.machine import interpret_whole
from holdfast.formats.pickle.spending import Spending
from holdfast.formats.pickle.table import ReducerTable

DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.complex64)
FILES = ("__0_0.distcp", "__1_0.distcp")
SHAPES = ((), (3,), (4, 300), (2, 2, 70_000), (2, 1, 3, 4, 5), (0, 7))


def written(seed: int, *, count: int = 300, own_names: bool = False, protocol: int = 4) -> bytes:
    """An index as torch pickles it: tensors of some kinds, whole or cut, and values."""
    drawn = random.Random(seed)
    entries: dict[str, object] = {}
    items: dict[m.MetadataIndex, object] = {}
    at = 0
    for number in range(count):
        name = f"layers.{number // 7}.{'w' * drawn.randint(1, 3)}{number}"
        # A writer may have a text of its own in each item: not one that the memo knows.
        other = "".join(list(name)) if own_names else name
        length = drawn.choice((90, 1000, 70_000, 1 << 33))
        if drawn.random() < 0.1:
            entries[name] = m.BytesStorageMetadata()
            places = [m.MetadataIndex(other)]
        else:
            shape = drawn.choice(SHAPES)
            cut = drawn.random() < 0.2 and bool(shape) and shape[0] > 1
            starts = range(0, shape[0], 1) if cut else (0,)
            corners = [
                torch.Size([start, *[0] * (len(shape) - 1)][: len(shape)]) for start in starts
            ]
            sizes = torch.Size([1, *shape[1:]] if cut else shape)
            chunks = [m.ChunkStorageMetadata(corner, sizes) for corner in corners]
            properties = m.TensorProperties(
                dtype=drawn.choice(DTYPES), requires_grad=drawn.random() < 0.5
            )
            entries[name] = m.TensorStorageMetadata(properties, torch.Size(shape), chunks)
            places = [
                m.MetadataIndex(other, corner, number) for number, corner in enumerate(corners)
            ]
        for place in places:
            items[place] = f._StorageInfo(drawn.choice(FILES), at, length)
            at += length
    return pickle.dumps(
        m.Metadata(entries, {name: (name,) for name in entries}, items), protocol=protocol
    )  # type: ignore[arg-type]


def plain(value: object) -> object:
    """A value as containers and text, with no object of ours in it."""
    if isinstance(value, PickledObject):
        slots = [
            name
            for cls in type(value).__mro__
            for name in getattr(cls, "__slots__", ())
            if name != "state"
        ]
        return type(value).__name__, [(name, plain(getattr(value, name))) for name in slots]
    if isinstance(value, dict):
        return [(plain(key), plain(inner)) for key, inner in value.items()]
    if isinstance(value, list | tuple):
        return [type(value).__name__, *map(plain, value)]
    return repr(value)


def outcome(raw: bytes, table: ReducerTable, limits: Limits) -> object:
    try:
        done = interpret_whole(raw, table, limits=limits)
    except HoldfastError as error:
        return type(error), error.message, error.offset
    return (
        plain(done.value),
        done.opcodes,
        done.foreign,
        table.spending.containers,
        table.spending.probes,
    )


@pytest.mark.parametrize("protocol", [2, 4, 5])
@pytest.mark.parametrize("own_names", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_an_index_is_what_the_machine_reads(seed, own_names, protocol):
    raw = written(seed, own_names=own_names, protocol=protocol)
    assert outcome(raw, IndexTable(), Limits()) == outcome(raw, MetadataTable(), Limits())


def test_most_records_are_taken(monkeypatch):
    taken = []
    take = RecordTemplates.take

    def counted(self: RecordTemplates, pos: int, limit: int) -> int:
        end = take(self, pos, limit)
        taken.append(end > 0)
        return end

    monkeypatch.setattr(RecordTemplates, "take", counted)
    raw = written(1, count=1000)
    interpret_whole(raw, IndexTable(), limits=Limits())
    assert len(taken) > 1500
    assert sum(taken) > 0.8 * len(taken)


@pytest.mark.parametrize("seed", range(400))
def test_damaged_bytes_are_read_alike(seed):
    drawn = random.Random(seed)
    raw = bytearray(written(seed % 3, count=60, own_names=bool(seed % 2)))
    for _ in range(drawn.randint(1, 3)):
        at = drawn.randrange(2, len(raw))
        match drawn.randint(0, 3):
            case 0:
                raw[at] = drawn.randrange(256)
            case 1:
                raw[at] = drawn.choice(b"hjKMJ()tbua\x85\x94\x81R}]N0.")
            case 2:
                del raw[at]
            case _:
                raw[at:at] = raw[at - drawn.randint(1, 40) : at]
    if drawn.random() < 0.8:
        # So that the frame does not end it all.
        raw[3:11] = (len(raw) - 11).to_bytes(8, "little")
    assert outcome(bytes(raw), IndexTable(), Limits()) == outcome(
        bytes(raw), MetadataTable(), Limits()
    )


@pytest.mark.parametrize("limits", [Limits(marks=6), Limits(marks=4), Limits(integer_nbytes=2)])
def test_limits_are_those_of_the_machine(limits):
    raw = written(2)
    assert outcome(raw, IndexTable(), limits) == outcome(raw, MetadataTable(), limits)


def test_what_is_inside_of_a_record_can_be_named_again():
    raw = written(0, count=40)
    # One STOP is a GET of what the machine made inside of the last tensors, a POP, and the STOP again.
    for index in range(200, 700, 7):
        odd = raw[:-1] + b"j" + index.to_bytes(4, "little") + b"0."
        odd = odd[:3] + (len(odd) - 11).to_bytes(8, "little") + odd[11:]
        assert outcome(odd, IndexTable(), Limits()) == outcome(odd, MetadataTable(), Limits())


@pytest.mark.parametrize("kind", PickledObject.__subclasses__())
def test_records_are_keys_by_identity(kind):
    # Any other hash makes each of 20,000 keys a step for every key before it, which the limits refuse.
    assert kind.__hash__ is object.__hash__
    assert kind() != kind()
    Spending(Limits(), 0).key(kind(), 10**9)
