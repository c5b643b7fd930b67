"""What `holdfast.torch.save` writes is, byte for byte, what torch writes for the same object."""

from __future__ import annotations

import io
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.serialization import config

from holdfast.torch import versions
from holdfast.torch.serialization.saving import save

TYPED = [
    "float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool", "complex64", "complex128",
    "complex32", "uint16", "uint32", "uint64", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz",
    "float8_e8m0fnu",
]  # fmt: skip


def has(name: str) -> bool:
    return versions.dtype(name) is not None


class Subclass(torch.Tensor):
    pass


def state_dict() -> object:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Embedding(5, 2)).state_dict()


def views() -> object:
    whole = torch.arange(100.0)
    return {
        "part": whole[10:20],
        "turned": whole.view(10, 10).t(),
        "stepped": whole[::2],
        "expanded": whole[:1].expand(7),
    }


def attributes() -> object:
    tensor = torch.ones(3)
    tensor.note = "kept"
    parameter = nn.Parameter(torch.ones(2))
    parameter.tag = 3
    frozen = nn.Parameter(torch.ones(2), requires_grad=False)
    return [tensor, parameter, nn.Buffer(torch.ones(2)), frozen]


def plain_values() -> object:
    return {
        "int": 1, 2: (3, 4.5), "bytes": b"abc", "none": b"", "set": {1}, "complex": 1 + 2j, "big": 1 << 80, "text": "hé",
        "device": torch.device("cpu"), "dtype": torch.float32, "size": torch.Size([1, 2]), "ordered": OrderedDict(a=1),
    }  # fmt: skip


def optimizer() -> object:
    model = nn.Linear(4, 3)
    made = torch.optim.Adam(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    made.step()
    return {"model": model.state_dict(), "optimizer": made.state_dict(), "step": 1}


CASES: dict[str, Callable[[], object]] = {
    "state dict": state_dict,
    "module": lambda: nn.Sequential(nn.Linear(3, 4), nn.Dropout()),
    "optimizer": optimizer,
    "views": views,
    "tied": lambda: (lambda w: {"a": w, "b": w, "c": w[1:]})(torch.ones(4, 4)),
    "empty": lambda: {"a": torch.empty(0), "b": torch.empty(3, 0), "scalar": torch.tensor(1.0)},
    "sparse": lambda: [
        torch.eye(4).to_sparse(), torch.eye(4).to_sparse_csr(), torch.eye(4).to_sparse_csc(),
        torch.eye(4).to_sparse_bsr((2, 2)), torch.eye(4).to_sparse_bsc((2, 2)),
    ],
    "quantised": lambda: [
        torch.quantize_per_tensor(torch.eye(4), 0.1, 3, torch.qint8),
        torch.quantize_per_channel(torch.eye(4), torch.ones(4), torch.zeros(4), 0, torch.quint8),
    ],
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "jagged": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
    "subclass": lambda: torch.ones(3).as_subclass(Subclass),
    "wrapper subclass": lambda: TwoTensor(torch.ones(2), torch.zeros(2)),
    "attributes": attributes,
    "meta": lambda: {"m": torch.empty(3, 4, device="meta")},
    "conj and neg": lambda: [torch.ones(2, dtype=torch.cfloat).conj(), torch._neg_view(torch.ones(3))],
    "storages": lambda: [torch.ones(3).storage(), torch.ones(4).untyped_storage()],
    "plain values": plain_values,
    "300 storages": lambda: {str(i): torch.full((i + 1,), i) for i in range(300)},
    "large": lambda: {"a": torch.arange(300_000.0), "b": torch.ones(70_000), "c": torch.ones(3)},
    "like a descriptor": lambda: torch.frombuffer(bytearray(b"PK\7\x08abcdefgh" * 10), dtype=torch.uint8),
    "like a large descriptor": lambda: torch.frombuffer(bytearray(b"PK\7\x08abcdefgh" * 50_000), dtype=torch.uint8),
    **{name: (lambda name=name: torch.ones(5, 2).to(getattr(torch, name))) for name in TYPED if has(name)},
}  # fmt: skip


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore"
        )  # torch's notes on nested tensors, typed storages and the like
        yield


Setter = Callable[..., None]


@pytest.fixture
def saving() -> Iterator[Setter]:
    """Set switches of `torch.utils.serialization.config.save` for one test; pytest's monkeypatch cannot see them."""
    before: dict[str, object] = {}

    def put(**switches: object) -> None:
        for name, value in switches.items():
            before.setdefault(name, getattr(config.save, name))
            setattr(config.save, name, value)

    yield put
    for name, value in before.items():
        setattr(config.save, name, value)


def written(
    function: Callable[..., None], obj: object, target: Path | None, **options: object
) -> bytes:
    if target is None:
        buffer = io.BytesIO()
        function(obj, buffer, **options)
        return buffer.getvalue()
    function(obj, target, **options)
    return target.read_bytes()


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])
@pytest.mark.parametrize("name", CASES)
def test_the_bytes_are_torchs(name: str, zipped: bool, tmp_path: Path):
    obj = CASES[name]()
    for target in (tmp_path / "model.v2.pt", tmp_path / "noext", tmp_path / "modèle.pt", None):
        want = written(torch.save, obj, target, _use_new_zipfile_serialization=zipped)
        assert written(save, obj, target, _use_new_zipfile_serialization=zipped) == want, target


@pytest.mark.parametrize("protocol", [0, 1, 3, 4, 5])
@pytest.mark.parametrize("name", ["state dict", "plain values", "sparse"])
def test_other_protocols(name: str, protocol: int, tmp_path: Path):
    obj = CASES[name]()
    want = written(torch.save, obj, tmp_path / "m.pt", pickle_protocol=protocol)
    assert written(save, obj, tmp_path / "m.pt", pickle_protocol=protocol) == want


@pytest.mark.parametrize("alignment", [1, 2, 128, 4096, 32768])
def test_alignment(alignment: int, tmp_path: Path, saving: Setter):
    saving(storage_alignment=alignment)
    want = written(torch.save, state_dict(), tmp_path / "m.pt")
    assert len(want) == len(written(save, state_dict(), tmp_path / "m.pt"))
    fixed = views()
    assert written(torch.save, fixed, tmp_path / "m.pt") == written(save, fixed, tmp_path / "m.pt")


@pytest.mark.parametrize("alignment", [0, -1, 131072, 1 << 20])
def test_an_alignment_that_makes_unreadable_files_is_refused(
    alignment: int, tmp_path: Path, saving: Setter
):
    saving(storage_alignment=alignment)
    with pytest.raises(RuntimeError, match="alignment"):
        save({"a": torch.ones(3)}, tmp_path / "m.pt")
    assert not (tmp_path / "m.pt").exists()


@pytest.mark.parametrize("name", ["state dict", "large", "empty", "like a descriptor"])
def test_without_checksums(name: str, tmp_path: Path, saving: Setter):
    saving(compute_crc32=False)
    obj = CASES[name]()
    assert written(torch.save, obj, tmp_path / "m.pt") == written(save, obj, tmp_path / "m.pt")


@pytest.mark.parametrize("name", ["state dict", "large", "empty"])
def test_late_byte_order(name: str, tmp_path: Path):
    obj = CASES[name]()
    want = written(torch.save, obj, tmp_path / "m.pt", _disable_byteorder_record=True)
    assert written(save, obj, tmp_path / "m.pt", _disable_byteorder_record=True) == want


@pytest.mark.parametrize("name", ["state dict", "large", "empty"])
@pytest.mark.parametrize("buffered", [False, True])
def test_skipped_data(name: str, buffered: bool, tmp_path: Path):
    obj = CASES[name]()
    target = None if buffered else tmp_path / "m.pt"
    with torch.serialization.skip_data():
        assert written(torch.save, obj, target) == written(save, obj, target)


def test_fake_tensors_are_saved_as_room(tmp_path: Path):
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        obj = nn.Linear(3, 4).state_dict()
    with torch.serialization.skip_data(materialize_fake_tensors=True):
        assert written(torch.save, obj, tmp_path / "m.pt") == written(save, obj, tmp_path / "m.pt")
