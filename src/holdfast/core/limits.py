"""How much a file may cost before it is refused. One frozen value; raising a field is explicit and visible."""

from __future__ import annotations

from msgspec.structs import force_setattr

from holdfast.core.quantities import parse_count, parse_nbytes
from holdfast.core.value import Value

MIB = 1 << 20


class Limits(Value, frozen=True):
    """The most that opening one checkpoint may cost. Pass `Limits(pickle_nbytes=…)` to `open` to raise one.

    Fields that you leave out have their defaults.
    """

    pickle_nbytes: int = 64 * MIB
    """One pickle stream. torch writes about 106 bytes a tensor, so this is room for 600,000 tensors."""
    dcp_metadata_nbytes: int = 512 * MIB
    """The `.metadata` pickle of a distributed checkpoint: about 234 bytes a chunk."""
    header_nbytes: int = 100_000_000
    """A safetensors header. The format's own cap."""
    index_nbytes: int = 256 * MIB
    """A JSON index that maps names to files (`model.safetensors.index.json`)."""
    zip_directory_nbytes: int = 256 * MIB
    """The central directory of a zip archive."""
    zip_records: int = 2_000_000
    """Records in one zip archive."""
    depth: int = 64
    """Nesting of containers in a pickle or a JSON document; deeper than any model, shallower than any stack."""
    marks: int = 64
    """Open MARKs of a pickle at one moment."""
    rank: int = 64
    """Dimensions of a tensor. numpy and torch stop at 64 as well."""
    integer_nbytes: int = 16
    """An integer in a pickle. The magic number of the legacy container needs 10 bytes."""
    key_nodes: int = 64
    """Values inside one dict key or set member: hashing a tuple costs its expanded size, not its stored one."""
    files: int = 100_000
    """Files in an opened directory."""
    expansion: int = 4
    """How many times its stored bytes a tensor may occupy when it is read. Only an expanded view (stride 0) exceeds 1."""
    expansion_floor_nbytes: int = MIB
    """Expanded views up to this size are read without asking: a scalar expanded to a row is ordinary.

    Both limits hold for each tensor, and for all tensors together that one call copies.
    """
    inflation: int = 128
    """How many times its packed bytes a compressed array of an `.npz` may be; up to 16 MiB nobody asks. Zeros reach 1,000."""

    def __post_init__(self) -> None:
        for field in self.__struct_fields__:
            value: object = getattr(self, field)
            if type(value) is not int or value < 0:
                name, of_bytes = (
                    f"Limits({field}=…)",
                    field.endswith("_nbytes") and isinstance(value, str),
                )
                force_setattr(
                    self,
                    field,
                    parse_nbytes(value, name) if of_bytes else parse_count(value, name, least=0),
                )


DEFAULTS = Limits()
