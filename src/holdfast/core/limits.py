"""`Limits`: how much a file may cost before it is refused."""

from __future__ import annotations

from msgspec.structs import force_setattr

from holdfast.core.quantities import parse_count, parse_nbytes
from holdfast.core.value import Value

MIB = 1 << 20


class Limits(Value, frozen=True):
    """The most that opening one checkpoint may cost.

    A checkpoint that exceeds a limit is refused with `LimitExceeded`, which names the limit. To
    open it nevertheless, pass `Limits` with a higher value to the call. Fields that you leave out
    have their defaults.

    Raises:
        BadArgument: A value is negative.
        BadArgumentType: A value is not an integer. Sizes may also be texts, such as "1GiB".

    >>> Limits(pickle_nbytes=1 << 30).pickle_nbytes
    1073741824
    """

    pickle_nbytes: int = 64 * MIB
    """The size of one pickle stream. torch writes about 106 bytes for each tensor, so this is
    enough for 600,000 tensors."""
    dcp_metadata_nbytes: int = 512 * MIB
    """The size of the `.metadata` pickle of a distributed checkpoint: about 234 bytes for each
    chunk."""
    header_nbytes: int = 100_000_000
    """The size of a safetensors header. This is the limit of the format itself."""
    index_nbytes: int = 256 * MIB
    """The size of a JSON index that maps names to files (`model.safetensors.index.json`)."""
    zip_directory_nbytes: int = 256 * MIB
    """The size of the central directory of a zip archive."""
    zip_records: int = 2_000_000
    """The number of records in one zip archive."""
    depth: int = 64
    """The nesting of containers in a pickle or a JSON document. Models nest less deeply, and no
    call stack overflows at this depth."""
    marks: int = 64
    """The number of MARK opcodes of a pickle that are open at the same time."""
    rank: int = 64
    """The number of dimensions of a tensor. numpy and torch have the same limit."""
    integer_nbytes: int = 16
    """The size of an integer in a pickle. The magic number of torch's legacy files has 10 bytes."""
    key_nodes: int = 64
    """The number of values inside one dict key or set member. Hashing a tuple visits every value
    each time it occurs, although a pickle stores a repeated value only once."""
    files: int = 100_000
    """The number of files in a directory."""
    expansion: int = 4
    """How many times as large as its stored bytes a tensor may become when it is read. Only
    expanded tensors, which have a stride of 0, exceed 1."""
    expansion_floor_nbytes: int = MIB
    """Expanded tensors up to this size are always read: a scalar that is expanded to a row is
    ordinary.

    Both limits of expansion apply to each tensor, and to the total of the tensors that one call
    copies.
    """
    inflation: int = 128
    """How many times as large as its compressed bytes an array of an `.npz` file may become. Arrays
    up to 16 MiB are not checked. An array of zeros reaches 1,000."""

    def __post_init__(self) -> None:
        """Check that all limits are positive integers or 0, and convert sizes that are texts."""
        for field in self.__struct_fields__:
            value: object = getattr(self, field)
            if type(value) is int and value >= 0:
                continue
            option = f"Limits({field}=…)"
            if field.endswith("_nbytes") and isinstance(value, str):
                count = parse_nbytes(value, option)
            else:
                count = parse_count(value, option, minimum=0)
            # Fields of a frozen class cannot be assigned in the usual way.
            force_setattr(self, field, count)


DEFAULTS = Limits()
"""The limits of calls that pass none."""
