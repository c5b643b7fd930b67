"""Small torch values that live in a checkpoint's tree and need no torch: a size, a device."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Device", "Size"]


class Size(tuple[int, ...]):
    """A `torch.Size`: a tuple of lengths that remembers what it was."""

    __slots__ = ()

    def __repr__(self) -> str:
        return f"Size({list(self)})"


@dataclass(frozen=True, slots=True)
class Device:
    """A `torch.device`: a kind of device and, where one was given, its number."""

    type: str
    index: int | None = None

    def __str__(self) -> str:
        return self.type if self.index is None else f"{self.type}:{self.index}"
