"""The torch zip in all its forms: what torch 2.13.0 writes, and what older and big-endian torches wrote."""

from __future__ import annotations

import argparse
import collections
import io
import pathlib
import random
from pathlib import Path

import numpy as np
import torch
from archive import pack, unpack
from expect import elements, short
from recipe import fill, golden, numbers, of_dtype, plain_dtypes, plain_state, trainer
from torch import nn


@golden(
    "plain.pt",
    "torch-zip",
    "a state dict: a tied weight, a transposed view, a strided window, an expanded row, 0-d and empty",
)
def _plain(path: Path) -> None:
    torch.save(plain_state(), path)


@golden("single.pt", "torch-zip", "one tensor and nothing around it")
def _single(path: Path) -> None:
    torch.save(numbers(2, 3), path)


@golden("no_tensors.pt", "torch-zip", "a dict without any tensor")
def _no_tensors(path: Path) -> None:
    torch.save({"epoch": 1, "note": "nothing here"}, path)


@golden(
    "training.pt",
    "torch-zip",
    "a training checkpoint: model, Adam, scheduler, RNG states, Namespace, numpy, dataclass, enum, path, …",
)
def _training(path: Path) -> None:
    torch.manual_seed(7)
    random.seed(7)
    np.random.seed(7)
    model = fill(trainer.Net())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.125)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 0.5)
    optimizer.step()
    scheduler.step()
    torch.save(
        {
            "epoch": 3,
            "global_step": 1200,
            "best_loss": np.float64(0.25),
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "scheduler": scheduler.state_dict(),
            "args": argparse.Namespace(
                lr=0.125, layers=[4, 4], name="tiny", resume=None, init=numbers(2, start=9)
            ),
            "history": np.arange(6, dtype=np.float32).reshape(2, 3),
            "fortran": np.asfortranarray(np.arange(6, dtype=np.int16).reshape(2, 3)),
            "words": np.array(["a", "bc"]),
            "scalar": np.float32(1.5),
            "npdtype": np.dtype("float32"),
            "counts": collections.defaultdict(int, {"a": 1, "b": 2}),
            "counter": collections.Counter("aab"),
            "recent": collections.deque([1, 2, 3], maxlen=3),
            "order": collections.OrderedDict([("z", 1), ("a", 2)]),
            "config": trainer.Config(
                "tiny", [trainer.Layer(4), trainer.Layer(8, "gelu")], {"lr": 0.125}
            ),
            "slotted": trainer.Slotted(2.0, numbers(3, start=60)),
            "phase": trainer.Phase.MAIN,
            "path": pathlib.PurePosixPath("runs/7/last.pt"),
            "set": {42},
            "frozen": frozenset([1]),
            "bytes": b"\x00\xffraw",
            "bytearray": bytearray(b"ab"),
            "complex": 1 + 2j,
            "big": 2**70,
            "range": range(1, 9, 2),
            "slice": slice(1, 5, 2),
            "dtype": torch.float16,
            "device": torch.device("cuda", 1),
            "size": torch.Size([2, 3]),
            "rng": {
                "torch": torch.get_rng_state(),
                "python": random.getstate(),
                "numpy": np.random.get_state(),
            },
            5: "an int key",
            (1, 2): numbers(2, start=70),
            "nested": {"list": [numbers(2), {"deep": (numbers(1),)}]},
        },
        path,
    )


@golden("module.pt", "torch-zip", "a whole nn.Module: its names are those of its state_dict()")
def _module(path: Path) -> None:
    torch.save(fill(trainer.Net()), path)


@golden(
    "module_nested.pt", "torch-zip", "two modules inside a dict, one with an optimizer beside it"
)
def _module_nested(path: Path) -> None:
    model = fill(trainer.Net())
    torch.save(
        {
            "model": model,
            "ema": fill(trainer.Tiny()),
            "optimizer": torch.optim.SGD(model.parameters(), lr=0.5).state_dict(),
        },
        path,
    )


@golden("dtypes.pt", "torch-zip", "every dtype of a plain tensor that torch.save accepts")
def _dtypes(path: Path) -> None:
    state = {}
    for dtype in plain_dtypes():
        try:
            tensor = of_dtype(dtype)
            torch.save(tensor, io.BytesIO())
        except (KeyError, NotImplementedError, RuntimeError):
            continue  # int1 … uint7: torch refuses to save them
        state[short(dtype)] = tensor
    torch.save(state, path)


@golden(
    "sparse.pt", "torch-zip", "sparse COO (coalesced and not), CSR, CSC, BSR, BSC, and an empty COO"
)
def _sparse(path: Path) -> None:
    dense = numbers(4, 6)
    dense[dense.remainder(3) > 0.5] = 0
    loose = torch.sparse_coo_tensor(
        torch.tensor([[0, 0, 2], [1, 1, 0]]), torch.tensor([1.0, 2.0, 4.0]), (3, 4)
    )
    torch.save(
        {
            "coo": dense.to_sparse().coalesce(),
            "coo_loose": loose,
            "hybrid": dense.reshape(2, 2, 6).to_sparse(1),
            "csr": dense.to_sparse_csr(),
            "csc": dense.to_sparse_csc(),
            "bsr": dense.to_sparse_bsr((2, 3)),
            "bsc": dense.to_sparse_bsc((2, 3)),
            "none": torch.zeros(2, 2).to_sparse(),
            "dense": numbers(2),
        },
        path,
    )


@golden(
    "quantized.pt",
    "torch-zip",
    "quantised tensors, per tensor and per channel, of all five quantised dtypes",
)
def _quantized(path: Path) -> None:
    data = numbers(2, 4)
    state = {
        f"tensor_{short(d)}": torch.quantize_per_tensor(data, 0.5, 1, d)
        for d in (torch.qint8, torch.quint8, torch.qint32)
    }
    scales, zeros = torch.tensor([0.5, 0.25], dtype=torch.float64), torch.tensor([0, 1])
    for d in (torch.qint8, torch.quint8, torch.qint32):
        state[f"channel_{short(d)}"] = torch.quantize_per_channel(data, scales, zeros, 0, d)
    for d in (torch.quint4x2, torch.quint2x4):
        state[f"channel_{short(d)}"] = torch.quantize_per_channel(
            data, scales.float(), zeros.float(), 0, d
        )
        for columns in (4, 5):
            packed = torch._empty_affine_quantized([2, columns], scale=0.5, zero_point=1, dtype=d)
            raw = torch.tensor([], dtype=torch.uint8).set_(packed.untyped_storage())
            raw.copy_((torch.arange(len(raw)) * 37 + 11).remainder(256))
            state[f"tensor_{short(d)}_2x{columns}"] = packed
    torch.save(state, path)


@golden("nested.pt", "torch-zip", "a strided nested tensor")
def _nested(path: Path) -> None:
    torch.save(
        {
            "nested": torch.nested.nested_tensor([numbers(2, 3), numbers(1, 3, start=20)]),
            "plain": numbers(2),
        },
        path,
    )


@golden("jagged.pt", "torch-zip", "a jagged nested tensor, whose pickle drags in torch internals")
def _jagged(path: Path) -> None:
    pieces = [numbers(2, 3), numbers(1, 3, start=20)]
    torch.save(
        {"jagged": torch.nested.nested_tensor(pieces, layout=torch.jagged), "plain": numbers(2)},
        path,
    )


@golden(
    "kinds.pt",
    "torch-zip",
    "Parameter, Buffer, tensors with attributes, a subclass, meta, conj and neg views, requires_grad, a raw storage",
)
def _kinds(path: Path) -> dict[str, object]:
    tagged = numbers(3, start=1).as_subclass(trainer.TaggedTensor)
    tagged.tag = "mine"
    noted = numbers(2, start=5)
    noted.note = "an attribute"
    marked = nn.Parameter(numbers(2, start=6))
    marked.sparse_grad = True
    z = torch.view_as_complex(numbers(3, 2))
    loaded = {
        "parameter": nn.Parameter(numbers(2, 2)),
        "frozen": nn.Parameter(numbers(2), requires_grad=False),
        "marked": marked,
        "buffer": nn.Buffer(numbers(2, start=3)),
        "noted": noted,
        "tagged": tagged,
        "tagged_parameter": nn.Parameter(numbers(2, start=8).as_subclass(trainer.TaggedTensor)),
        "meta": torch.empty(1000, 1000, device="meta"),
        "complex": z,
        "conj": z.conj(),
        "conj_t": z.reshape(3, 1).conj().t(),
        "neg": torch._neg_view(numbers(3, start=1)),
        "grad": numbers(2, start=2).requires_grad_(),
        "empty": torch.empty(0),
        "zero_d": torch.tensor(3),
    }
    torch.save({**loaded, "storage": numbers(4, start=30).untyped_storage()}, path)
    return loaded


@golden("aligned.pt", "torch-zip", "storages aligned to 4096 bytes, one storage under two names")
def _aligned(path: Path) -> None:
    config = torch.utils.serialization.config
    before, config.save.storage_alignment = config.save.storage_alignment, 4096
    try:
        data = numbers(8)
        torch.save({"a": data, "b": data[2:6]}, path)
    finally:
        config.save.storage_alignment = before


@golden("no_crc.pt", "torch-zip", "written with set_crc32_options(False): every CRC field is 0")
def _no_crc(path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(plain_state(), path)
    finally:
        torch.serialization.set_crc32_options(True)


@golden(
    "late_byteorder.pt",
    "torch-zip",
    "_disable_byteorder_record: the byteorder record comes near the end",
)
def _late_byteorder(path: Path) -> None:
    torch.save(plain_state(), path, _disable_byteorder_record=True)


@golden(
    "skip_data.pt",
    "torch-zip",
    "written under skip_data: the storages are holes (zeros) and their CRC is 0",
)
def _skip_data(path: Path) -> None:
    with torch.serialization.skip_data():
        torch.save({"w": numbers(4, 4), "b": numbers(4)}, path)


def _protocol(number: int) -> None:
    @golden(f"protocol{number}.pt", "torch-zip", f"torch.save(pickle_protocol={number})")
    def recipe(path: Path) -> None:
        torch.save(
            {
                **plain_state(),
                "module": fill(trainer.Net()),
                "config": trainer.Config("p", [trainer.Layer(1)]),
                "raw": b"ab",
                "set": {1},
            },
            path,
            pickle_protocol=number,
        )


for _number in (3, 4, 5):
    _protocol(_number)


def many() -> dict[str, torch.Tensor]:
    return {f"layer{i}": numbers(3, start=i) for i in range(12)}


def lexical(records: dict[str, bytes]) -> list[tuple[str, bytes]]:
    """Storages in the order 0, 1, 10, 11, 2 …, as torch before 2.7 wrote them."""
    return sorted((name, payload) for name, payload in records.items() if name.startswith("data/"))


@golden(
    "torch16.pt",
    "torch-zip",
    "records as torch 1.6 to 2.0 wrote them: no byteorder record, storages in the order of their names",
)
def _torch16(path: Path) -> None:
    torch.save(many(), path)
    records = unpack(path)
    path.write_bytes(
        pack("archive", [("data.pkl", records["data.pkl"]), *lexical(records), ("version", b"3\n")])
    )


@golden(
    "torch21.pt",
    "torch-zip",
    "records as torch 2.1 to 2.6 wrote them: byteorder, no .format_version, storages in the order of their names",
)
def _torch21(path: Path) -> None:
    torch.save(many(), path)
    records = unpack(path)
    head = [(name, records[name]) for name in ("data.pkl", "byteorder")]
    tail = [(name, records[name]) for name in ("version", ".data/serialization_id")]
    path.write_bytes(pack("torch21", [*head, *lexical(records), *tail]))


BIG = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.complex128,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.complex32,
    torch.bits16,
)


def to_big_endian(path: Path, state: dict[str, torch.Tensor]) -> None:
    """Turn a file that holds these tensors, a storage each and in this order, into what a big-endian machine writes."""
    records = unpack(path)
    for i, tensor in enumerate(state.values()):
        unit = tensor.dtype.itemsize // (2 if tensor.dtype.is_complex else 1)
        raw = np.frombuffer(records[f"data/{i}"], np.uint8).reshape(-1, unit)
        records[f"data/{i}"] = raw[:, ::-1].tobytes()
    records["byteorder"] = b"big"
    path.write_bytes(pack(path.stem, records.items()))


@golden(
    "big_endian.pt",
    "torch-zip",
    "the byteorder record says big; every dtype wider than a byte is swapped",
)
def _big_endian(path: Path) -> dict[str, torch.Tensor]:
    state = {short(d): of_dtype(d) for d in BIG}
    torch.save(state, path)
    to_big_endian(path, state)
    loaded = torch.load(path)
    for name, tensor in state.items():
        same = elements(loaded[name]) == elements(tensor)
        # torch 2.13.0 does not swap what it stores untyped: its numbers are wrong, so ours come from the source.
        assert same != (name in ("uint16", "uint32", "uint64", "complex32", "bits16")), name
    return state
