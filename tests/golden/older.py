"""The formats before the zip, and TorchScript: legacy streams, the tar of torch 0.1."""

from __future__ import annotations

import io
import pickle
import struct
import tarfile
import types
from pathlib import Path

import torch
from expect import elements, short
from recipe import fill, golden, numbers, of_dtype, plain_state, trainer
from torch import nn


class Renumbered(types.ModuleType):
    """The pickle module for a legacy save, with the storage keys (addresses in memory) replaced by fixed numbers."""

    def __init__(self) -> None:
        super().__init__("pickle")
        keys: dict[str, str] = {}

        class Pickler(pickle.Pickler):
            def __init_subclass__(cls) -> None:
                original = cls.persistent_id

                def persistent_id(self: object, obj: object) -> object:
                    found = original(self, obj)
                    if not (isinstance(found, tuple) and found[0] == "storage"):
                        return found
                    fixed = keys.setdefault(found[2], str(94_000_000_000_000 + 64 * len(keys)))
                    return (*found[:2], fixed, *found[3:])

                cls.persistent_id = persistent_id

        def dump(obj: object, file: io.BufferedIOBase, protocol: int) -> None:
            pickle.dump(
                [keys[k] for k in obj] if isinstance(obj, list) else obj, file, protocol=protocol
            )

        self.Pickler, self.dump = Pickler, dump


def save_legacy(state: object, path: Path) -> None:
    torch.serialization.sorted = list  # first seen first, which is the order of the fixed numbers
    try:
        torch.save(state, path, pickle_module=Renumbered(), _use_new_zipfile_serialization=False)
    finally:
        del torch.serialization.sorted


@golden(
    "legacy.pt",
    "torch-legacy",
    "the stream of five pickles and raw storages that torch wrote before 1.6",
)
def _legacy(path: Path) -> None:
    save_legacy(plain_state(), path)


@golden(
    "legacy_module.pt",
    "torch-legacy",
    "a module in a legacy stream: its persistent ids carry the source of its classes",
)
def _legacy_module(path: Path) -> None:
    save_legacy({"model": fill(trainer.Tiny()), "epoch": 2}, path)


@golden(
    "legacy_training.pth.tar",
    "torch-legacy",
    "a legacy stream under the suffix that old training scripts used, with an optimizer",
)
def _legacy_training(path: Path) -> None:
    model = fill(trainer.Tiny())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 0.5)
    optimizer.step()
    save_legacy(
        {
            "state_dict": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "arch": "tiny",
            "best": 0.5,
        },
        path,
    )


@golden(
    "legacy_untyped.pt",
    "torch-legacy",
    "fp8 and unsigned dtypes in a legacy stream, which torch 2.13.0 writes and cannot read back",
)
def _legacy_untyped(path: Path) -> dict[str, torch.Tensor]:
    state = {
        short(d): of_dtype(d)
        for d in (torch.float8_e5m2, torch.uint16, torch.uint64, torch.complex32)
    }
    save_legacy(state, path)
    try:
        torch.load(path, weights_only=False)
    except AttributeError:
        return state
    raise AssertionError(
        "torch reads untyped storages of legacy streams now: take its word for the expectation"
    )


def views_of(tensor: torch.Tensor) -> bytes:
    """ndim, four bytes that nobody reads, sizes, strides, offset: a tensor in the 0.1 tar."""
    ndim = tensor.dim()
    return struct.pack(
        f"<i4x{ndim}q{ndim}qq", ndim, *tensor.shape, *tensor.stride(), tensor.storage_offset()
    )


@golden(
    "tar.pt",
    "torch-tar",
    "the tar of torch 0.1, made by hand: members storages, tensors, pickle; one storage is a view of another",
)
def _tar(path: Path) -> None:
    base, other, ids = numbers(3, 4), numbers(5, start=50), torch.arange(4)
    tail = torch.arange(12.0)[4:]
    state = {
        "weight": (11, base),
        "weight_t": (12, base.t()),
        "bias": (13, other),
        "ids": (14, ids),
    }
    storages = io.BytesIO()
    pickle.dump(3, storages, protocol=2)
    for key, kind, data in (
        (1, "FloatStorage", base),
        (2, "FloatStorage", other),
        (3, "LongStorage", ids),
    ):
        storages.write(
            b"\x80\x02K"
            + bytes([key])
            + b"X\x03\x00\x00\x00cpuctorch\n"
            + kind.encode()
            + b"\n\x87."
        )
        storages.write(struct.pack("<q", data.numel()) + elements(data))
    # Storage 4 is elements 4 … 11 of storage 1.
    pickle.dump([(4, 1, 4, 8)], storages, protocol=2)
    tensors = io.BytesIO()
    pickle.dump(5, tensors, protocol=2)
    rows = (
        (11, 1, "Float", base),
        (12, 1, "Float", base.t()),
        (13, 2, "Float", other),
        (14, 3, "Long", ids),
        (15, 4, "Float", numbers(2, 4)),
    )
    for key, storage, kind, tensor in rows:
        tensors.write(
            b"\x80\x02K"
            + bytes([key])
            + b"K"
            + bytes([storage])
            + f"ctorch\n{kind}Tensor\n".encode()
            + b"\x87."
        )
        tensors.write(views_of(tensor))
    main = io.BytesIO()

    class Pickler(pickle.Pickler):
        def persistent_id(self, obj: object) -> str | None:
            return obj[1] if isinstance(obj, tuple) and obj[0] == "pid" else None

    entries: dict[str, object] = {name: ("pid", str(key)) for name, (key, _) in state.items()}
    Pickler(main, protocol=2).dump({**entries, "tail": ("pid", "15"), "epoch": 4})
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as tar:
        for name, member in (("storages", storages), ("tensors", tensors), ("pickle", main)):
            info = tarfile.TarInfo(name)
            info.size = len(member.getvalue())
            tar.addfile(info, io.BytesIO(member.getvalue()))
    loaded = torch.load(path, weights_only=False)
    assert all(torch.equal(loaded[name], tensor) for name, (_, tensor) in state.items())
    assert torch.equal(loaded["tail"].flatten(), tail / 2)


@golden(
    "torchscript.pt",
    "torchscript",
    "torch.jit.save of a small scripted module: tensors as data, code that is never run",
)
def _torchscript(path: Path) -> nn.Module:
    torch.jit.save(torch.jit.script(fill(trainer.Scripted())), path)
    return torch.jit.load(path)
