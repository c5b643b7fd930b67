"""Extra fields: the blocks between a record's name and its payload, or behind a name in the central directory.

    id  nbytes  body…    id  nbytes  body…
    2     2              2     2

Blocks must fill the field exactly. Only blocks that no reader takes names or positions from are let through, and the
zip64 block, whose body is given back for the caller to check. Above all 0x7075 is refused: it replaces the name for
some readers.
"""

from __future__ import annotations

import numpy as np

from holdfast.formats.zip.layout import Bools, Ints, Places, gather

__all__ = ["CENTRAL_BLOCKS", "LOCAL_BLOCKS", "MAX_BLOCKS", "find_zip64"]

ZIP64 = 0x0001
PADDING = 0x4246
"""`FB`, with which torch moves payloads to their alignment."""
TIMES = (0x000A, 0x5455, 0x5855, 0x7875)
"""Times and owners, which 7-Zip (NTFS) and Info-ZIP (UT, UX, ux) add when a checkpoint is packed again."""

CENTRAL_BLOCKS = np.zeros(1 << 16, np.bool_)
"""For each id, whether its block may be in a directory entry."""
CENTRAL_BLOCKS[[ZIP64, *TIMES]] = True

LOCAL_BLOCKS = CENTRAL_BLOCKS.copy()
"""For each id, whether its block may be in a local header."""
LOCAL_BLOCKS[PADDING] = True

MAX_BLOCKS = 8
"""In one extra field. No writer comes near; it bounds the rounds of `find_zip64`."""

BLOCK = np.dtype([("id", "<u2"), ("nbytes", "<u2")])


def find_zip64(raw: bytes, starts: Ints, stops: Ints, *, known: Bools, places: Places) -> tuple[Ints, Ints]:
    """Check many extra fields at once; give the start and length of each one's zip64 body, (-1, 0) where there is none.

    `starts` and `stops` are positions in `raw`.
    """
    bodies = np.full(len(starts), -1, np.int64)
    lengths = np.zeros(len(starts), np.int64)
    rows = np.flatnonzero(starts < stops)
    cursors = starts[rows]
    for _ in range(MAX_BLOCKS):
        if not len(rows):
            break
        here, ends = places.of(rows), stops[rows]
        here.require(cursors + BLOCK.itemsize <= ends, "an extra field ends in the middle of a block")
        blocks = gather(raw, cursors, BLOCK)
        cursors = cursors + BLOCK.itemsize
        nbytes = blocks["nbytes"].astype(np.int64)
        here.require(cursors + nbytes <= ends, "a block is longer than the extra field it is in")
        here.require(known[blocks["id"]], "an extra field with an unknown block")
        found = blocks["id"] == ZIP64
        here.require(~found | (bodies[rows] < 0), "an extra field with two zip64 blocks")
        bodies[rows[found]] = cursors[found]
        lengths[rows[found]] = nbytes[found]
        cursors = cursors + nbytes
        going = cursors < ends
        rows, cursors = rows[going], cursors[going]
    places.of(rows).require(np.zeros(len(rows), np.bool_), f"an extra field of more than {MAX_BLOCKS} blocks")
    return bodies, lengths
