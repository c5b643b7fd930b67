"""The metadata of a GGUF file, decoded when it is used."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping
from itertools import islice

import numpy as np

UINT32, BOOL, STRING, ARRAY = 4, 7, 8, 9

NUMBER_CODES = {
    0: "u1",
    1: "i1",
    2: "u2",
    3: "i2",
    UINT32: "u4",
    5: "i4",
    6: "f4",
    BOOL: "u1",
    10: "u8",
    11: "i8",
    12: "f8",
}
"""The value types that have a fixed size, with numpy's code of each."""


class Metadata(Mapping[str, str]):
    """The metadata of a file as text. Values that are not strings are JSON.

    Values are decoded on access, because the vocabulary of a tokenizer has 250,000 strings.
    """

    def __init__(
        self, header: bytes, locations: Mapping[str, tuple[int, int]], byte_order: str
    ) -> None:
        """Wrap a header that was checked.

        Args:
            header: The bytes of the file up to the end of its tensor infos.
            locations: For each key, the type of its value and the offset of the value.
            byte_order: `<` for little-endian or `>` for big-endian, as in the module `struct`.
        """
        self._header = header
        self._locations = locations
        self._byte_order = byte_order

    def __getitem__(self, key: str) -> str:
        value_type, offset = self._locations[key]
        value, _ = self._decode(value_type, offset)
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)

    def __iter__(self) -> Iterator[str]:
        return iter(self._locations)

    def __len__(self) -> int:
        return len(self._locations)

    def __contains__(self, key: object) -> bool:
        return key in self._locations

    def __repr__(self) -> str:
        # A few keys are enough: a vocabulary would fill the terminal.
        keys = [key[:64] for key in islice(self, 4)]
        if len(self) > 4:
            keys.append("…")
        listed_keys = ", ".join(keys)
        return f"<GGUF metadata, length {len(self):,}: {listed_keys}>"

    def integer(self, key: str) -> int | None:
        """Return an integer value, or None if the key is missing or has a value of another type."""
        value_type, offset = self._locations.get(key, (STRING, 0))
        if value_type in (STRING, ARRAY, BOOL):
            return None
        value, _ = self._decode(value_type, offset)
        return value if isinstance(value, int) else None

    def value_type(self, key: str) -> int | None:
        """Return the type of a value as the file states it, or None if the key is missing."""
        return self._locations[key][0] if key in self._locations else None

    def _decode(self, value_type: int, offset: int) -> tuple[object, int]:
        """Decode the value at an offset. Return it with the offset of its end."""
        if value_type == STRING:
            start = offset + 8
            stop = start + self._decode_integer("Q", offset)
            return self._header[start:stop].decode("utf-8", "backslashreplace"), stop
        if value_type == ARRAY:
            return self._decode_array(offset)
        numbers, stop = self._decode_numbers(value_type, offset, count=1)
        return numbers[0], stop

    def _decode_array(self, offset: int) -> tuple[list[object], int]:
        item_type = self._decode_integer("I", offset)
        length = self._decode_integer("Q", offset + 4)
        offset += 12
        if item_type not in (STRING, ARRAY):
            return self._decode_numbers(item_type, offset, count=length)

        items = []
        for _ in range(length):
            item, offset = self._decode(item_type, offset)
            items.append(item)
        return items, offset

    def _decode_numbers(
        self, value_type: int, offset: int, *, count: int
    ) -> tuple[list[object], int]:
        dtype = np.dtype(self._byte_order + NUMBER_CODES[value_type])
        array = np.frombuffer(self._header, dtype, count, offset)
        stop = offset + array.nbytes
        if value_type == BOOL:
            return (array != 0).tolist(), stop
        if dtype.kind == "f" and dtype.itemsize == 4:
            # The shortest decimal number that rounds to this float32: 0.1, not 0.10000000149.
            return [float(str(number)) for number in array], stop
        return array.tolist(), stop

    def _decode_integer(self, code: str, offset: int) -> int:
        integer: int
        (integer,) = struct.unpack_from(self._byte_order + code, self._header, offset)
        return integer
