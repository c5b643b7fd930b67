"""The values that are no tensors: hyperparameters, counters, names, the rest of a training state. Small, and many.

Each is an item of its own, 1.3 KB for a number, and the items of one rank's values lie side by side at the front of its file. Those
are read together, a block at a time; a large one (a tuple with tensors in it) by its two ends and its pickle.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from holdfast.core.protocols import Foreign
from holdfast.formats.dcp.lazy import Items, Unread
from holdfast.formats.dcp.records import Item

__all__ = ["EAGER_ITEMS", "EAGER_NBYTES", "Values", "read_values"]

EAGER_ITEMS = 20_000
"""Values that are read when a directory is opened: a second's work. torch flattens an optimizer to a dozen for each parameter."""

EAGER_NBYTES = 32 << 20
"""Bytes of them. With more of either, every value stays where it is (`Unread`)."""

SMALL_NBYTES = 64 << 10
"""Items up to this length are read together."""

BLOCK_NBYTES = 1 << 20
"""Bytes that are read together."""

Named = tuple[str, Item]


@dataclass(slots=True)
class Values:
    """What was read."""

    values: dict[str, object] = field(default_factory=dict)
    foreign: tuple[Foreign, ...] = ()
    nbytes: int = 0
    """Bytes of the items that were read."""
    unread: int = 0


def read_values(items: Items, wanted: Mapping[str, Item]) -> Values:
    """Read values, or leave all of them where they are if that would take long."""
    small = {name: item for name, item in wanted.items() if item.length <= SMALL_NBYTES}
    done = Values(nbytes=sum(item.length for item in small.values()))
    if len(wanted) > EAGER_ITEMS or done.nbytes > EAGER_NBYTES:
        done.values = {name: Unread(items, item, name) for name, item in wanted.items()}
        done.unread = len(wanted)
        return done
    foreign: list[Foreign] = []
    for block in _blocks(sorted(small.items(), key=lambda pair: (pair[1].file, pair[1].offset))):
        for (name, item), content in _contents(items, block):
            done.values[name], found = items.value(item, name, content)
            foreign += found
    for name, item in wanted.items():
        if name not in small:
            done.values[name], found = items.value(item, name)
            foreign += found
    done.foreign = tuple(foreign)
    return done


def _blocks(ordered: Sequence[Named]) -> Iterator[list[Named]]:
    """Items that lie end to end, a block of them at a time."""
    block: list[Named] = []
    for name, item in ordered:
        first, last = (block[0][1], block[-1][1]) if block else (item, item)
        if block and (
            item.file != last.file or item.offset != last.stop or item.stop - first.offset > BLOCK_NBYTES or item.transforms
        ):
            yield block
            block = []
        block.append((name, item))
    if block:
        yield block


def _contents(items: Items, block: list[Named]) -> Iterator[tuple[Named, bytes | None]]:
    first, last = block[0][1], block[-1][1]
    if len(block) == 1 or first.transforms:
        yield from ((named, None) for named in block)
        return
    items.inside(last, block[-1][0])
    raw = items.source.bytes(first.file, first.offset, last.stop)
    for name, item in block:
        yield (name, item), raw[item.offset - first.offset : item.stop - first.offset]
