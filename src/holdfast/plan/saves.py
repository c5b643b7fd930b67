"""`SavePlan`: every file of a save, byte by byte, before the first byte is written.

A file is a row of segments. Everything but checksums is known when the plan is made, so every offset is, and the segments can be
written in any order and by several threads:

    Literal    bytes that are known now: headers, names, padding
    Data       the elements of one tensor in C order, little-endian; its CRC-32 is computed while it passes by
    Memory     bytes of this process as they lie there, with a CRC-32 like data: the storages of torch's own objects
    Hole       room that is left as it is: zeros, where the file system can do it without writing them
    Late       bytes of a known length that depend on those CRCs: data descriptors, central directories, checksum fields

A plan is pure. `engine/write.py` carries it out, `explain` says it in words.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from holdfast.core.tensor import LazyTensor

__all__ = ["Data", "FilePlan", "Hole", "Late", "Literal", "Memory", "SavePlan", "Segment"]


@dataclass(frozen=True, slots=True)
class Literal:
    """Bytes that are known when the plan is made."""

    data: bytes

    @property
    def nbytes(self) -> int:
        return len(self.data)


@dataclass(frozen=True, slots=True)
class Data:
    """The elements of a tensor, in C order and little-endian. Packed types are packed, lowest bits first."""

    tensor: LazyTensor
    label: str
    """What the file calls it; the key under which `Late` segments find its CRC. Unique in a plan."""
    nbytes: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "nbytes", self.tensor.nbytes)


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes that lie in this process's memory, written from where they are."""

    content: memoryview
    label: str
    """As for `Data`."""
    owner: object = None
    """Whoever has to stay alive for the memory to be there."""

    @property
    def nbytes(self) -> int:
        return self.content.nbytes


@dataclass(frozen=True, slots=True)
class Hole:
    """Room without content. It has no checksum: whoever fills it knows better."""

    nbytes: int


@dataclass(frozen=True, slots=True)
class Late:
    """Bytes that are known when all data of the plan has been written."""

    nbytes: int
    make: Callable[[Mapping[str, int]], bytes]
    """From the CRC-32 of every `Data` and `Memory` segment of the plan, by label, to exactly `nbytes` bytes."""
    needs: str | None = None
    """The one label that it depends on, where it is only one: it can then be made as soon as that data has passed by."""


Segment = Literal | Data | Memory | Hole | Late


@dataclass(frozen=True, slots=True)
class FilePlan:
    """One file."""

    key: str
    """Its name inside the checkpoint; empty where the checkpoint is this one file."""

    segments: tuple[Segment, ...]

    @property
    def nbytes(self) -> int:
        return sum(segment.nbytes for segment in self.segments)

    def offsets(self) -> list[int]:
        """Where each segment begins."""
        offsets, at = [], 0
        for segment in self.segments:
            offsets.append(at)
            at += segment.nbytes
        return offsets


@dataclass(frozen=True, slots=True)
class SavePlan:
    """A whole checkpoint. One file with an empty key, or a directory: its data files, then its index, in that order."""

    format: str
    files: tuple[FilePlan, ...]
    notes: tuple[str, ...] = ()
    """What a person should know: state that this format keeps in another way."""
    directory: bool = False
    index: tuple[FilePlan, ...] = field(default=())
    """Files of a directory that are written after all others are on disk: the manifest, the Hugging Face index."""
    holds: Mapping[str, LazyTensor] | None = None
    """What a reader is to find, by name; None where the plan is not one of a state."""
    opens: bool = False
    """Whether that is known: the reader was given the plan (`api.rehearse`)."""

    @property
    def nbytes(self) -> int:
        return sum(f.nbytes for f in (*self.files, *self.index))

    def tensors(self) -> Sequence[LazyTensor]:
        """Every tensor that is written, in the order of the files."""
        return [s.tensor for f in (*self.files, *self.index) for s in f.segments if isinstance(s, Data)]

    def explain(self) -> str:
        """The plan in words: files and their sizes."""
        rows = [f"{f.key or 'one file'}: {f.nbytes:,} bytes in {len(f.segments):,} segments" for f in (*self.files, *self.index)]
        return "\n".join([f"{self.format}: {self.nbytes:,} bytes", *rows])
