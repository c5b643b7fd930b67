"""The drop-in: `holdfast.torch.save` and `load` beside `torch.save` and `torch.load`, with the same calls on both sides."""

from __future__ import annotations

import io
from pathlib import Path

from benchmarks import files
from benchmarks.board import Case, Race, Recipe
from benchmarks.saving import BACKED_NBYTES as SAVE_BACKED_NBYTES
from benchmarks.saving import beside, state_of, torch_save

__all__ = ["TORCH_IO"]

MIB = 1 << 20
TIMES = 1000
"""How often a job of microseconds is done in one round."""

LOAD_BACKED_NBYTES = 1300 * MIB
"""More than either side needs for a file of 1 GiB; see `Race.backed_nbytes`."""

OURS = ("torch", "holdfast.torch")
PEER = ("torch",)


def object_state(_: bool):
    """About 1 kB: what a sharded checkpoint has by the thousand beside its tensors."""
    import torch

    return {"step": 1000, "lr": [1e-3] * 8, "name": "run" * 20, "running_mean": torch.arange(200.0)}


object_pt = Recipe("object.pt", files.sized(MIB, MIB), files.save_pt(object_state))


def ours_save(durable: bool):
    def job(path: Path) -> None:
        import holdfast.torch

        holdfast.torch.save(state_of(path), beside(path, "ours.pt"), durable=durable)

    return job


def ours_load(**options: object):
    def job(path: Path) -> object:
        import holdfast.torch

        return holdfast.torch.load(path, **options)

    return job


def torch_load(**options: object):
    def job(path: Path) -> object:
        import torch

        return torch.load(path, **options)

    return job


def repeated(job):
    def jobs(path: Path) -> None:
        for _ in range(TIMES):
            job(path)

    return jobs


def ours_to_buffer(path: Path) -> None:
    import holdfast.torch

    state = state_of(path)
    for _ in range(TIMES):
        holdfast.torch.save(state, io.BytesIO())


def torch_to_buffer(path: Path) -> None:
    import torch

    state = state_of(path)
    for _ in range(TIMES):
        torch.save(state, io.BytesIO())


def ours_from_buffer(path: Path) -> None:
    import holdfast.torch

    raw = path.read_bytes()
    for _ in range(TIMES):
        holdfast.torch.load(io.BytesIO(raw))


def torch_from_buffer(path: Path) -> None:
    import torch

    raw = path.read_bytes()
    for _ in range(TIMES):
        torch.load(io.BytesIO(raw))


def race(
    name,
    title: str,
    peer_title: str,
    recipe: Recipe,
    ours,
    peer,
    target: float | None,
    *,
    backed=0,
    memory=False,
) -> Race:
    return Race(
        "torch-" + name + ("-backed" if backed else ""),
        title + (", backed memory" if backed else ""),
        peer_title,
        recipe,
        ours,
        peer,
        target,
        peer_modules=PEER,
        our_modules=OURS,
        memory=memory and not backed,
        backed_nbytes=backed,
    )


SAVES: tuple[Case, ...] = tuple(
    race(
        "save-1gib" + ("-durable" if durable else ""),
        "torch: save 1 GiB in 24 tensors" + (", durable" if durable else ""),
        "torch.save" + (" + fsync of file and folder" if durable else ""),
        files.large_pt,
        ours_save(durable),
        torch_save(durable),
        3.0 if durable else 3.5,
        backed=backed,
    )
    for durable in (False, True)
    for backed in (0, SAVE_BACKED_NBYTES)
)

LOADS: tuple[Case, ...] = tuple(
    race(
        "load-1gib" + ("" if verify else "-unverified"),
        "torch: load 1 GiB to the CPU, " + ("checksums compared" if verify else "verify=False"),
        "torch.load",
        files.large_pt,
        ours_load(verify=verify),
        torch_load(),
        3.0,
        backed=backed,
        memory=True,
    )
    for backed in (0, LOAD_BACKED_NBYTES)
    for verify in (True, False)
)

TORCH_IO: tuple[Case, ...] = (
    *SAVES,
    *LOADS,
    race(
        "mmap-open",
        "torch: load 1 GiB with mmap=True, 1,000 times",
        "torch.load(mmap=True)",
        files.large_pt,
        repeated(ours_load(mmap=True)),
        repeated(torch_load(mmap=True)),
        1.0,
    ),
    race(
        "small-save",
        "torch: save 50,000 tensors of 64 B",
        "torch.save",
        files.half_many_pt,
        ours_save(False),
        torch_save(False),
        4.0,
        memory=True,
    ),
    race(
        "training-save",
        "torch: save 68,000 small tensors of a model and its optimizer",
        "torch.save",
        files.training_pt,
        ours_save(False),
        torch_save(False),
        2.5,
        memory=True,
    ),
    race(
        "small-load",
        "torch: load 50,000 tensors of 64 B",
        "torch.load",
        files.half_many_pt,
        ours_load(),
        torch_load(),
        6.0,
        memory=True,
    ),
    race(
        "object-save",
        "torch: save a 1 kB object to a buffer, 1,000 times",
        "torch.save",
        object_pt,
        ours_to_buffer,
        torch_to_buffer,
        1.0,
    ),
    race(
        "object-load",
        "torch: load a 1 kB object from a buffer, 1,000 times",
        "torch.load",
        object_pt,
        ours_from_buffer,
        torch_from_buffer,
        1.0,
    ),
    # At a path ours pays for the hidden sibling and the rename.
    race(
        "object-save-file",
        "torch: save a 1 kB object to a file, 1,000 times",
        "torch.save",
        object_pt,
        repeated(ours_save(False)),
        repeated(torch_save(False)),
        1.0,
    ),
    race(
        "object-load-file",
        "torch: load a 1 kB object from a file, 1,000 times",
        "torch.load",
        object_pt,
        repeated(ours_load()),
        repeated(torch_load()),
        1.0,
    ),
)
