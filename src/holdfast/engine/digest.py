"""The CRC-32 of a tensor's elements in C order: from the file's own records where they say it, else from the bytes, in parallel."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from holdfast.core.crc import combine, crc32
from holdfast.core.tensor import LazyTensor
from holdfast.engine.execute import default_threads, run_all
from holdfast.engine.slabs import Slab, contiguous_bytes, read_slab, slabs
from holdfast.errors import located

__all__ = ["recorded_crc", "tensor_crcs"]

BLOCK = 8 << 20


def recorded_crc(tensor: LazyTensor) -> int | None:
    """The checksum, where the file records it for exactly these bytes; else None."""
    if tensor.size == 0:
        return 0
    if contiguous_bytes(tensor) is None:
        return None
    (chunk,) = tensor.chunks
    storage = chunk.storage
    return storage.crc32 if chunk.offset == 0 and storage.nbytes == tensor.nbytes else None


def tensor_crcs(
    tensors: Sequence[LazyTensor],
    *,
    recorded: bool = True,
    threads: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> list[int]:
    """One checksum a tensor. With `recorded=False` every byte is read, whatever the file says of it."""
    known = [recorded_crc(t) if recorded else None for t in tensors]
    parts: list[dict[int, tuple[int, int]]] = [{} for _ in tensors]

    def task(number: int, slab: Slab) -> Callable[[], None]:
        def run() -> None:
            with located(tensor=tensors[number].name):
                data = read_slab(slab)
            parts[number][slab.start] = (data.nbytes, crc32(data))
            if progress:
                progress(data.nbytes)

        return run

    work = [task(i, slab) for i, t in enumerate(tensors) if known[i] is None for slab in slabs(t, BLOCK)]
    if work:
        run_all(work, threads or default_threads())
    found = []
    for number, crc in enumerate(known):
        total = crc or 0
        if crc is None:
            for _, (nbytes, part) in sorted(parts[number].items()):
                total = combine(total, part, nbytes)
        found.append(total)
    return found
