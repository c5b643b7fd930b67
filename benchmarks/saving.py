"""Saving, converting and verifying, beside the peers with the same fsync policy on both sides."""

from __future__ import annotations

import os
import time
from functools import cache
from pathlib import Path

from benchmarks import files
from benchmarks.board import Bound, Case, Count, Race, Recipe

__all__ = ["SAVING"]

MIB, GIB = 1 << 20, 1 << 30

WITH_TORCH = ("torch", "holdfast.torch")
"""What is imported before memory is measured: the state that is saved is torch's on both sides."""


@cache
def state_of(path: Path):
    """The state of a file in memory, once a process: both sides save the same tensors."""
    import torch

    return torch.load(path, weights_only=True)


@cache
def module_of(path: Path):
    """The same as `state_dict()` of a module gives it: an OrderedDict that says the version of each module."""
    from collections import OrderedDict

    state = OrderedDict(state_of(path))
    state._metadata = OrderedDict((name.rpartition(".")[0], {"version": 1}) for name in state)
    return state


def ours_module(name: str):
    def job(path: Path) -> object:
        import holdfast

        return holdfast.save(module_of(path), beside(path, name), durable=False, overwrite=True)

    return job


def beside(path: Path, name: str) -> Path:
    return path.parent / f"out-{name}"


def flush(path: Path) -> None:
    """What a durable save does after writing: the file, then its name."""
    for place in (path, path.parent):
        descriptor = os.open(place, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def ours(suffix: str, durable: bool):
    def job(path: Path) -> object:
        import holdfast

        return holdfast.save(state_of(path), beside(path, "ours" + suffix), durable=durable)

    return job


def ours_native(path: Path) -> object:
    import holdfast

    return holdfast.save(state_of(path), beside(path, "ours-native"), durable=False, overwrite=True)


def torch_save(durable: bool):
    def job(path: Path) -> None:
        import torch

        out = beside(path, "peer.pt")
        torch.save(state_of(path), out)
        if durable:
            flush(out)

    return job


def save_file(durable: bool):
    def job(path: Path) -> None:
        from safetensors.torch import save_file

        out = beside(path, "peer.safetensors")
        save_file(state_of(path), out)
        if durable:
            flush(out)

    return job


BACKED_NBYTES = 2600 * MIB
"""An atomic save needs pages for the new file while the old one is still there; torch.save reuses those of the file that it cuts
off. See `Race.backed_nbytes`: which pages a side gets must not be chance. The rows without it are printed beside."""


def saves(kind: str, title: str, recipe: Recipe, pt: float, st: float) -> tuple[Case, ...]:
    return tuple(
        Race(
            f"save-{kind}-{form}{'-durable' if durable else ''}{'-backed' if backed else ''}",
            f"save {title} as {form}{', durable' if durable else ''}{', backed memory' if backed else ''}",
            peer_title + (" + fsync of file and folder" if durable else ""),
            recipe,
            ours("." + form, durable),
            peer(durable),
            target,
            our_modules=WITH_TORCH,
            memory=kind != "large",
            backed_nbytes=backed,
        )
        for form, peer_title, peer, target in (
            ("pt", "torch.save", torch_save, pt),
            ("safetensors", "save_file", save_file, st),
        )
        for durable in (False, True)
        for backed in (0, BACKED_NBYTES)
        if kind == "large" or not (durable or backed)
    )


def ours_convert(path: Path) -> object:
    import holdfast

    return holdfast.convert(path, beside(path, "ours.safetensors"), overwrite=True, durable=False)


def peer_convert(path: Path) -> None:
    import torch
    from safetensors.torch import save_file

    save_file(torch.load(path, weights_only=True), beside(path, "peer.safetensors"))


def verify_rate(path: Path) -> dict[str, int]:
    """Megabytes a second, the best of three."""
    import holdfast

    nbytes = path.stat().st_size
    best = 0.0
    for _ in range(3):
        begin = time.perf_counter()
        assert holdfast.verify(path).ok
        best = max(best, nbytes / (time.perf_counter() - begin))
    return {"megabytes_per_second": int(best / 1e6)}


SAVING: tuple[Case, ...] = (
    *saves("large", "1 GiB in 24 tensors", files.large_pt, 3.5, 1.5),
    *saves("many", "50,000 small tensors", files.half_many_pt, 4.0, 5.0),
    Race(
        "save-many-native",
        "save 50,000 small tensors as a native directory",
        "save_file",
        files.half_many_pt,
        ours_native,
        save_file(False),
        4.2,
        our_modules=WITH_TORCH,
    ),
    *(
        Race(
            f"save-many-module-{form}",
            f"save the state dict of a module, 50,000 small tensors, as {form}",
            "save_file",
            files.half_many_pt,
            ours_module(name),
            save_file(False),
            target,
            our_modules=WITH_TORCH,
        )
        for form, name, target in (
            ("safetensors", "module.safetensors", 4.0),
            ("native", "module", 3.5),
        )
    ),
    Race(
        "save-training-pt",
        "save 68,000 small tensors of a model and its optimizer as pt",
        "torch.save",
        files.training_pt,
        ours(".pt", False),
        torch_save(False),
        2.5,
        our_modules=WITH_TORCH,
    ),
    Race(
        "convert",
        "convert a .pt of 4 GiB to safetensors, read back",
        "torch.load + save_file",
        files.four_pt,
        ours_convert,
        peer_convert,
        2.0,
        memory=False,
    ),
    Bound(
        "convert-memory",
        "memory of that conversion",
        files.four_pt,
        ours_convert,
        {"peak_nbytes": 300 * MIB},
    ),
    Count("verify-pt", "verify a .pt of 1 GiB", files.large_pt, verify_rate),
)
