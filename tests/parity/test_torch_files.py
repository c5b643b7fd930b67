"""Every dtype, layout, view, shared storage and container that torch 2.13 writes, against what torch loads from it."""

from __future__ import annotations

import argparse
import dataclasses
import enum
import io
import pathlib
import pickle
import random
import struct
import tarfile
import warnings
from collections import Counter, OrderedDict, defaultdict

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.serialization import config

import holdfast
from holdfast.core.dtype import DTYPES
from holdfast.core.tensor import Composite
from holdfast.torch import versions
from tests.golden.expect import short
from tests.parity.compare import (
    assert_composite,
    assert_same_file,
    assert_same_tree,
    assert_tensor,
    elements,
    named_tensors,
)
from tests.support import dtypes, torch_bytes

PLAIN = dtypes(*(row.torch for row in DTYPES.rows if row.storage and row.kind != "quantized"))
UNTYPED = dtypes(
    *(row.torch for row in DTYPES.rows if row.torch and not row.storage),
    but={
        *(f"{sign}int{n}" for sign in ("", "u") for n in range(1, 8)),
        *(() if versions.FLOAT4_COPIED else ("float4_e2m1fn_x2",)),
    },
)

CONTAINERS = {
    "zip": {},
    "zip protocol 3": {"pickle_protocol": 3},
    "zip protocol 4": {"pickle_protocol": 4},
    "zip protocol 5": {"pickle_protocol": 5},
    "legacy": {"_use_new_zipfile_serialization": False},
    "legacy protocol 4": {"_use_new_zipfile_serialization": False, "pickle_protocol": 4},
    "no byteorder": {"_disable_byteorder_record": True},
}


def check(state: object, **options: object) -> bytes:
    """Save, load with torch, and compare the file with what came back."""
    data = torch_bytes(state, **options)
    loaded = torch.load(io.BytesIO(data), weights_only=False)
    assert_same_file(data, loaded)
    with holdfast.open(data) as ckpt:
        assert_same_tree(ckpt.tree, loaded)
    return data


def filled(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """A tensor whose bytes are all different from zero and, as far as they go, from each other."""
    count = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    pattern = (torch.arange(count, dtype=torch.int64) * 37 % 251 + 1).to(torch.uint8)
    if dtype == torch.bool:
        pattern %= 2
    return torch.empty(shape, dtype=dtype) if count == 0 else pattern.view(dtype).reshape(shape)


def test_the_lists_above_are_all_that_torch_can_save():
    """A dtype that torch learns to save must appear here."""
    every = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    quantized = {torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4}
    for dtype in every - {*PLAIN, *UNTYPED} - quantized - {versions.dtype("float4_e2m1fn_x2")}:
        with pytest.raises(KeyError):
            torch_bytes(torch.empty(2, dtype=dtype))


@pytest.mark.parametrize("dtype", [*PLAIN, *UNTYPED], ids=short)
def test_every_dtype(dtype):
    base = filled(dtype, 6, 8)
    state = {
        "whole": base,
        "row": base[2],
        "column": base[:, 3],
        "steps": base[1::2, ::3],
        "transposed": base.t(),
        "scalar": filled(dtype, 1).reshape(()),
        "empty": filled(dtype, 0, 3),
        "one": filled(dtype, 1, 1, 1),
    }
    check(state)


@pytest.mark.parametrize("dtype", [*PLAIN, *UNTYPED], ids=short)
def test_every_dtype_in_a_legacy_stream(dtype):
    state = {"a": filled(dtype, 3, 4), "b": filled(dtype, 5)[1:4]}
    if dtype in PLAIN:
        check(state, _use_new_zipfile_serialization=False)
        return
    # torch 2.13 writes these and cannot read them back; what was saved is the truth then.
    data = torch_bytes(state, zipped=False)
    with pytest.raises(AttributeError):
        torch.load(io.BytesIO(data), weights_only=False)
    with holdfast.open(data) as ckpt:
        for name, tensor in state.items():
            assert_tensor(ckpt[name], tensor)


VIEWS = {
    "slice": lambda b: b[3:7],
    "steps": lambda b: b[::2, 1::3],
    "transpose": lambda b: b.t(),
    "permute": lambda b: b.reshape(4, 3, 8).permute(2, 0, 1),
    "expand": lambda b: b[:, :1].expand(12, 5),
    "expand scalar": lambda b: b[2, 3].expand(4, 3),
    "narrow": lambda b: b.narrow(1, 2, 3),
    "select": lambda b: b.select(1, 5),
    "diagonal": lambda b: b.diagonal(1),
    "unfold": lambda b: b.reshape(-1).unfold(0, 7, 3),
    "overlap": lambda b: b.as_strided((5, 6, 2), (3, 2, 1), 4),
    "as_strided": lambda b: b.as_strided((3, 4), (1, 20), 7),
    "squeezed": lambda b: b[:, 2:3],
    "zero-d": lambda b: b[5, 5],
    "empty inside": lambda b: b[4:4],
    "empty and strided": lambda b: b.t()[:, 3:3],
    "channels last": lambda b: b.reshape(2, 3, 4, 4).contiguous(memory_format=torch.channels_last),
    "movedim": lambda b: b.reshape(2, 6, 4, 2).movedim(0, 2)[:, :, 1],
    "the end of the storage": lambda b: b.reshape(-1)[-1:],
}


@pytest.mark.parametrize("container", ["zip", "legacy"])
def test_views_share_their_storage_and_keep_their_strides(container):
    base = torch.arange(96.0).reshape(12, 8)
    state = {"base": base, **{name: view(base) for name, view in VIEWS.items()}}
    data = check(state, **CONTAINERS[container])
    with holdfast.open(data) as ckpt:
        shared = {frozenset(a.names) for a in ckpt.aliases}
        assert frozenset(set(VIEWS) - {"channels last"} | {"base"}) in shared


@pytest.mark.parametrize("name", VIEWS)
def test_a_view_alone_reads_from_the_whole_storage_that_torch_wrote(name):
    check({"view": VIEWS[name](torch.arange(96, dtype=torch.int16).reshape(12, 8))})


def test_shared_storages():
    tied, flat = torch.randn(4, 4), torch.randn(20)
    untyped = torch.arange(16, dtype=torch.uint8)
    check(
        {
            "encoder": {"weight": tied},
            "decoder": {"weight": tied, "transposed": tied.t()},
            "left": flat[:12].view(3, 4),
            "right": flat[8:].view(4, 3),
            "alone": torch.randn(3),
            "the same value": tied.clone(),
            "bytes": untyped.view(torch.float8_e5m2),
            "bytes again": untyped.view(torch.float8_e4m3fn)[3:9],
            "empty": flat[:0],
        }
    )


def test_the_same_container_under_two_keys_has_both_names():
    state = OrderedDict(weight=torch.randn(2, 2))
    data = check({"model": state, "ema": state, "list": [state, state]})
    with holdfast.open(data) as ckpt:
        assert ckpt.tree["model"] is ckpt.tree["ema"] is ckpt.tree["list"][1]


class Tagged(torch.Tensor):
    """A subclass without anything of its own."""


def test_traits():
    plain = torch.randn(3)
    plain.note, plain.mask = "kept", torch.tensor([True, False])
    parameter = nn.Parameter(torch.randn(2))
    parameter.group = 7
    state = {
        "grad": torch.randn(2, requires_grad=True),
        "parameter": nn.Parameter(torch.randn(2)),
        "frozen": nn.Parameter(torch.randn(2), requires_grad=False),
        "buffer": nn.Buffer(torch.randn(2)),
        "attributes": plain,
        "parameter with attributes": parameter,
        "subclass": torch.randn(2).as_subclass(Tagged),
        "non-leaf": torch.randn(2, requires_grad=True) * 2,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        data = check(state)
    with holdfast.open(data) as ckpt:
        traits = {name: tensor.traits for name, tensor in ckpt.items()}
        assert traits["buffer"].buffer
        assert str(traits["subclass"].subclass) == f"{__name__}.Tagged"
        assert traits["parameter with attributes"].state == {"group": 7}
        assert traits["attributes"].state["note"] == "kept"
        assert traits["attributes"].state["mask"].numpy().tolist() == [True, False]
        assert [n for n, t in traits.items() if t.subclass] == ["subclass"]


def test_conjugates_and_negatives_are_resolved():
    for dtype in (torch.complex64, torch.complex128):
        z = torch.randn(3, 4, dtype=dtype)
        check(
            {"conj": z.conj(), "both": torch._neg_view(z.conj()), "z": z, "part": z.conj()[1:, ::2]}
        )
        # Not beside the others: torch refuses to save one storage under two dtypes.
        check({"neg": z.conj().imag, "part": z.conj().imag[::2, 1]})
    half = torch.complex(torch.randn(5), torch.randn(5)).to(torch.complex32)
    data = torch_bytes({"conj": half.conj()})
    with holdfast.open(data) as ckpt:
        assert ckpt["conj"].traits.conj
        pair = ckpt["conj"].numpy()
        wanted = torch.view_as_real(half)
        assert pair["real"].tolist() == wanted[:, 0].tolist()
        assert pair["imag"].tolist() == (-wanted[:, 1]).tolist()


def test_slices_of_conjugates_and_negatives():
    z = torch.randn(4, 6, dtype=torch.complex64)
    with holdfast.open(torch_bytes({"c": z.conj(), "n": z.clone().conj().imag})) as ckpt:
        assert (
            ckpt["c"][1:3, ::-2].numpy().tobytes()
            == z.conj().resolve_conj().numpy()[1:3, ::-2].tobytes()
        )
        assert (
            ckpt["n"][:, 2].numpy().tobytes() == z.conj().imag.resolve_neg().numpy()[:, 2].tobytes()
        )


def test_meta_tensors_have_a_shape_and_no_data():
    data = check(
        {"meta": torch.empty(3, 4, dtype=torch.bfloat16, device="meta"), "real": torch.ones(2)}
    )
    with holdfast.open(data) as ckpt:
        with pytest.raises(holdfast.errors.Unsupported, match="meta"):
            ckpt["meta"].numpy()
        assert ckpt["meta"][1:, 0].torch().shape == (2,)


def test_zero_dimensions_and_nothing_at_all():
    check(
        {
            "scalar": torch.tensor(2.5),
            "empty": torch.empty(0),
            "deep": torch.empty(2, 0, 3),
            "ones": torch.ones([1] * 20),
        }
    )
    check({})
    check([])
    check(torch.arange(3))
    check([torch.ones(1), (torch.zeros(2), {"a": torch.ones(3)})])
    check(7)


# Tensors of several parts.


def coo(dense: torch.Tensor, *, coalesced: bool = True, dense_dim: int = 0) -> torch.Tensor:
    made = dense.to_sparse(dense.dim() - dense_dim)
    if coalesced:
        return made.coalesce()
    return torch.sparse_coo_tensor(
        torch.cat([made.indices(), made.indices()], 1),
        torch.cat([made.values(), made.values()]),
        made.shape,
    )


def holes(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Numbers with zeros between, the same pattern in every batch."""
    last = torch.arange(1, shape[-2] * shape[-1] + 1).reshape(shape[-2:])
    return (last * (last % 3 == 1)).to(dtype).expand(shape).clone()


SPARSE = {
    "coo": lambda: coo(holes(4, 5)),
    "coo, not coalesced": lambda: coo(holes(4, 5), coalesced=False),
    "coo, hybrid": lambda: coo(holes(4, 5, 3), dense_dim=1),
    "coo, empty": lambda: torch.sparse_coo_tensor(
        torch.empty(2, 0, dtype=torch.int64), torch.empty(0), (3, 4)
    ),
    "coo, zero-d": lambda: torch.sparse_coo_tensor(
        torch.zeros(0, 1, dtype=torch.int64), torch.tensor([3.0]), ()
    ),
    "coo, bool": lambda: coo(holes(4, 5) > 0),
    "coo, complex": lambda: coo(holes(4, 5, dtype=torch.complex64)),
    "coo, parameter": lambda: nn.Parameter(coo(holes(4, 5))),
    "csr": lambda: holes(4, 5).to_sparse_csr(),
    "csr, int32 indices": lambda: torch.sparse_csr_tensor(
        torch.tensor([0, 1, 2], dtype=torch.int32),
        torch.tensor([1, 0], dtype=torch.int32),
        torch.tensor([5.0, 6.0]),
        (2, 3),
    ),
    "csr, batched": lambda: holes(2, 3, 4, 5).to_sparse_csr(),
    "csr, hybrid": lambda: torch.ones(3, 4, 2).to_sparse_csr(dense_dim=1),
    "csr, empty": lambda: torch.zeros(3, 4).to_sparse_csr(),
    "csc": lambda: holes(4, 5).to_sparse_csc(),
    "csc, batched": lambda: holes(2, 4, 5).to_sparse_csc(),
    "bsr": lambda: holes(4, 6).to_sparse_bsr((2, 3)),
    "bsr, batched": lambda: holes(3, 4, 6).to_sparse_bsr((2, 2)),
    "bsc": lambda: holes(4, 6).to_sparse_bsc((2, 3)),
    "bsc, float16": lambda: holes(4, 6, dtype=torch.float16).to_sparse_bsc((2, 3)),
}


@pytest.mark.parametrize("name", SPARSE)
@pytest.mark.filterwarnings("ignore:Sparse")
def test_sparse(name):
    check({"before": torch.ones(2), "sparse": SPARSE[name](), "after": torch.zeros(2)})


def test_sparse_indices_out_of_range_are_refused_when_it_is_built():
    bad = torch.sparse_coo_tensor(
        torch.tensor([[9]]), torch.tensor([1.0]), (3,), check_invariants=False
    )
    with holdfast.open(torch_bytes({"bad": bad})) as ckpt:
        assert ckpt["bad.indices"].numpy().tolist() == [[9]]
        with pytest.raises(holdfast.errors.MetadataError, match="sparse_coo"):
            ckpt.tree["bad"].torch()


def per_channel(dtype: torch.dtype, axis: int, *, floats: bool = False) -> torch.Tensor:
    scales = torch.tensor([0.25, 0.5, 1.0, 2.0])
    zeros = torch.tensor([1, 2, 0, 3])
    values = torch.arange(24.0).reshape(4, 6) if axis == 0 else torch.arange(24.0).reshape(6, 4)
    scales, zeros = (scales, zeros.float()) if floats else (scales.double(), zeros)
    return torch.quantize_per_channel(values, scales, zeros, axis, dtype)


def packed(dtype: torch.dtype) -> torch.Tensor:
    """A per-tensor tensor of a packed type; torch has no function that quantises into one."""
    made = torch._empty_affine_quantized([3, 8], scale=0.5, zero_point=1, dtype=dtype)
    storage = made.untyped_storage()
    for i in range(storage.nbytes()):
        storage[i] = (i * 77 + 3) % 256
    return made


QUANTIZED = {
    **{f"per tensor, {short(d)}": d for d in (torch.qint8, torch.quint8, torch.qint32)},
    **{f"per channel, {short(d)}": d for d in (torch.qint8, torch.quint8, torch.qint32)},
}


@pytest.mark.parametrize("name", QUANTIZED)
@pytest.mark.parametrize("container", ["zip", "legacy"])
def test_quantized(name, container):
    dtype = QUANTIZED[name]
    if name.startswith("per tensor"):
        whole = torch.quantize_per_tensor(
            torch.arange(-12.0, 12).reshape(4, 6), 0.5, 20 if dtype == torch.quint8 else 3, dtype
        )
        state = {"whole": whole, "view": whole[1:3], "transposed": whole.t()}
    else:
        state = {"rows": per_channel(dtype, 0), "columns": per_channel(dtype, 1)}
    check(state, **CONTAINERS[container])


@pytest.mark.parametrize(
    "state", ["per channel with float zero points", "quint4x2", "quint4x2, per tensor", "quint2x4"]
)
def test_quantized_in_packed_and_rare_forms(state):
    made = {
        "per channel with float zero points": lambda: per_channel(torch.quint8, 0, floats=True),
        "quint4x2": lambda: per_channel(torch.quint4x2, 0, floats=True),
        "quint4x2, per tensor": lambda: packed(torch.quint4x2),
        "quint2x4": lambda: packed(torch.quint2x4),
    }[state]()
    check({"q": made})


def test_quantized_elements_alone_are_not_a_torch_tensor():
    data = torch_bytes({"q": torch.quantize_per_tensor(torch.ones(3), 0.5, 3, torch.quint8)})
    with (
        holdfast.open(data) as ckpt,
        pytest.raises(holdfast.errors.Unsupported, match=r"Composite|composite"),
    ):
        ckpt["q.int_repr"].torch()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested")
def test_nested_strided():
    parts = [torch.randn(2, 3), torch.randn(4, 3), torch.randn(1, 3)]
    check(
        {
            "nested": torch.nested.nested_tensor(parts),
            "flat": torch.nested.nested_tensor([torch.ones(2), torch.ones(5)]),
        }
    )


def test_jagged_offsets_out_of_range_are_refused_when_it_is_built():
    lying = torch.nested.nested_tensor_from_jagged(torch.randn(4, 3), torch.tensor([0, 2, 99]))
    with (
        holdfast.open(torch_bytes({"lying": lying})) as ckpt,
        pytest.raises(holdfast.errors.MetadataError, match="past its values"),
    ):
        ckpt.tree["lying"].torch()


def test_nested_jagged():
    parts = [torch.randn(2, 3), torch.randn(4, 3), torch.randn(1, 3)]
    nested = torch.nested.nested_tensor(parts, layout=torch.jagged)
    data = torch_bytes({"nested": nested, "after": torch.ones(2)})
    loaded = torch.load(io.BytesIO(data), weights_only=False)
    with holdfast.open(data) as ckpt:
        assert list(ckpt)[:2] == ["nested.values", "nested.offsets"]
        assert_tensor(ckpt["nested.values"], loaded["nested"].values())
        assert_tensor(ckpt["nested.offsets"], loaded["nested"].offsets())
        whole = ckpt.tree["nested"]
        assert isinstance(whole, Composite)
        assert_composite(whole, loaded["nested"])
        for ours, theirs in zip(whole.torch().unbind(), parts, strict=True):
            assert elements(ours) == elements(theirs)


def test_nested_jagged_with_holes_and_another_ragged_dimension():
    values, offsets = torch.randn(3, 10), torch.tensor([0, 4, 10])
    holed = torch.nested.nested_tensor_from_jagged(
        torch.randn(10, 3), offsets, lengths=torch.tensor([3, 5])
    )
    turned = torch.nested.nested_tensor_from_jagged(values, offsets, jagged_dim=2)
    data = torch_bytes({"holed": holed, "turned": turned})
    with holdfast.open(data) as ckpt:
        assert ckpt["holed.lengths"].numpy().tolist() == [3, 5]
        for name, whole in (("holed", holed), ("turned", turned)):
            made = ckpt.tree[name].torch()
            for ours, theirs in zip(made.unbind(), whole.unbind(), strict=True):
                assert elements(ours) == elements(theirs)


def test_bare_storages():
    untyped = torch.arange(5, dtype=torch.uint8).untyped_storage()
    typed = torch.arange(4, dtype=torch.int32)
    data = torch_bytes({"untyped": untyped, "typed": typed.storage(), "view": typed[1:]})
    with holdfast.open(data) as ckpt:
        assert ckpt["untyped"].numpy().tolist() == [0, 1, 2, 3, 4]
        assert ckpt["typed"].numpy().tolist() == [0, 1, 2, 3]
        assert [a.names for a in ckpt.aliases] == [("typed", "view")]


# What older versions pickled, written by their rules and read by torch today.


class Reduced:
    """Pickles as a call, its arguments and a state, whatever these are."""

    def __init__(self, *reduced: object) -> None:
        self.reduced = reduced

    def __reduce_ex__(self, protocol: int) -> tuple[object, ...]:
        return self.reduced


def reduced(name: str) -> Reduced:
    data = torch.arange(6.0).reshape(2, 3)
    hooks: OrderedDict[str, object] = OrderedDict()
    plain = (data.storage(), 0, (2, 3), (3, 1))
    rebuild = (torch._utils._rebuild_tensor_v2, torch.Tensor, (*plain, False, hooks), {"note": 1})
    return {
        "0.1 tensor": Reduced(torch.Tensor, (), plain),
        "0.1 parameter": Reduced(nn.Parameter, (), (data, None, hooks, True, False)),
        "0.3 parameter": Reduced(nn.Parameter, (data,), (False, False, hooks)),
        "0.3 variable": Reduced(torch.autograd.Variable, (data,), (True, False, hooks)),
        "0.3 tensor": Reduced(torch._utils._rebuild_tensor, plain),
        "0.4 parameter": Reduced(nn.Parameter, (data, True)),
        "1.8 tensor with attributes": Reduced(torch._tensor._rebuild_from_type, rebuild),
        "1.12 sparse without its flag": Reduced(
            torch._utils._rebuild_sparse_tensor,
            (torch.sparse_coo, (torch.tensor([[1]]), torch.tensor([2.0]), torch.Size([3]))),
        ),
    }[name]


@pytest.mark.parametrize(
    "name",
    [
        "0.1 tensor",
        "0.1 parameter",
        "0.3 parameter",
        "0.3 variable",
        "0.3 tensor",
        "0.4 parameter",
        "1.8 tensor with attributes",
    ],
)
@pytest.mark.parametrize("container", ["zip", "legacy"])
@pytest.mark.filterwarnings("ignore:TypedStorage")
def test_tensors_as_older_versions_pickled_them(name, container):
    check({"model": {"weight": reduced(name)}, "after": torch.ones(1)}, **CONTAINERS[container])


def test_a_sparse_tensor_of_older_versions():
    data = torch_bytes({"s": reduced("1.12 sparse without its flag")})
    loaded = torch.load(io.BytesIO(data), weights_only=False)["s"]
    with holdfast.open(data) as ckpt:
        assert_tensor(ckpt["s.values"], loaded._values())
        assert torch.equal(ckpt.tree["s"].torch().to_dense(), loaded.to_dense())


# Containers.


def plain_state() -> dict[str, object]:
    base = torch.randn(6, 4)
    return {
        "model": OrderedDict(
            {"layer.weight": base, "layer.bias": base[:, 1], "half": torch.randn(3).half()}
        ),
        "epoch": 3,
        "sizes": (torch.Size([2, 3]), torch.float8_e5m2, torch.device("cuda", 1)),
    }


@pytest.mark.parametrize("name", CONTAINERS)
def test_containers(name):
    data = check(plain_state(), **CONTAINERS[name])
    with holdfast.open(data) as ckpt:
        assert ckpt.format == ("torch-legacy" if "legacy" in name else "torch-zip")


@pytest.mark.parametrize("alignment", [1, 8, 512, 4096])
def test_alignments(alignment):
    with config.patch({"save.storage_alignment": alignment}):
        data = check({f"t{i}": torch.randn(i) for i in range(12)})
    with holdfast.open(data) as ckpt:
        assert ckpt.metadata[".storage_alignment"] == str(alignment)
        assert all(s.start % alignment == 0 for t in ckpt.values() for s in t.storages)


def test_without_checksums():
    torch.serialization.set_crc32_options(False)
    try:
        check(plain_state())
    finally:
        torch.serialization.set_crc32_options(True)


def test_skip_data_leaves_holes_that_read_as_zeros(tmp_path):
    path = tmp_path / "holes.pt"
    with torch.serialization.skip_data():
        torch.save({"a": torch.ones(1000), "b": torch.ones(3)}, path)
    with holdfast.open(path) as ckpt:
        assert [t.shape for t in ckpt.values()] == [(1000,), (3,)]
        assert not ckpt["a"].numpy().any()


def test_many_storages_in_both_orders():
    """Since 2.7 the records are in numeric order; 0, 1, 10, 11, 2 … before, which names and not positions must survive."""
    check({f"t{i:03}": torch.full((2,), float(i)) for i in range(120)})


def test_files_on_disk_have_their_stem_as_prefix(tmp_path):
    for name in ("model.v1.pt", "noext", "ünicode.pt"):
        path = tmp_path / name
        torch.save(plain_state(), path)
        loaded = torch.load(path, weights_only=False)
        for mmap in (False, True):
            with holdfast.open(path, mmap=mmap) as ckpt:
                assert list(ckpt) == [n for n, _ in named_tensors(loaded)]
                for tensor_name, tensor in named_tensors(loaded):
                    assert_tensor(ckpt[tensor_name], tensor)


def test_bytes_mapped_give_the_same():
    data = torch_bytes(plain_state())
    plain = torch.load(io.BytesIO(data), weights_only=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_same_file(data, plain, mmap=True)


def test_the_tar_of_torch_0_1(tmp_path):
    matrix, ids = torch.arange(12.0).reshape(3, 4), torch.arange(5)
    storages, tensors, main = io.BytesIO(), io.BytesIO(), io.BytesIO()
    pickle.dump(2, storages, protocol=2)
    for key, kind, data in ((1, "Float", matrix), (2, "Long", ids)):
        storages.write(
            b"\x80\x02K"
            + bytes([key])
            + b"X\x03\0\0\0cpuctorch\n"
            + kind.encode()
            + b"Storage\n\x87."
        )
        storages.write(struct.pack("<q", data.numel()) + elements(data))
    pickle.dump([], storages, protocol=2)
    rows = ((11, 1, "Float", matrix), (12, 1, "Float", matrix.t()), (13, 2, "Long", ids[1:4]))
    pickle.dump(len(rows), tensors, protocol=2)
    for key, storage, kind, t in rows:
        tensors.write(
            b"\x80\x02K"
            + bytes([key])
            + b"K"
            + bytes([storage])
            + f"ctorch\n{kind}Tensor\n".encode()
            + b"\x87."
        )
        tensors.write(
            struct.pack(
                f"<i4x{t.dim()}q{t.dim()}qq", t.dim(), *t.shape, *t.stride(), t.storage_offset()
            )
        )

    class Keys(pickle.Pickler):
        def persistent_id(self, obj: object) -> str | None:
            return str(obj) if isinstance(obj, int) and obj > 10 else None

    Keys(main, protocol=2).dump({"matrix": 11, "turned": 12, "ids": 13, "epoch": 4})
    path = tmp_path / "old.pt"
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as tar:
        for name, member in (("storages", storages), ("tensors", tensors), ("pickle", main)):
            info = tarfile.TarInfo(name)
            info.size = len(member.getvalue())
            tar.addfile(info, io.BytesIO(member.getvalue()))
    loaded = torch.load(path, weights_only=False)
    assert_same_file(path.read_bytes(), loaded)
    with holdfast.open(path) as ckpt:
        assert ckpt.format == "torch-tar"
        assert_same_tree(ckpt.tree, loaded)


# Modules, optimizers and everything else that a training script saves.


class Block(nn.Module):
    """Parameters, buffers of both kinds, nothing where a parameter could be, submodules, and attributes that are no state."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = [torch.ones(3)]
        self.scale = nn.Parameter(torch.randn(4))
        self.register_parameter("nothing", None)
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("transient", torch.ones(4), persistent=False)
        self.register_buffer("no_buffer", None)
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Identity()])
        self.heads = nn.ModuleDict({"a": nn.Linear(4, 2), "b": nn.Embedding(3, 4)})
        self.table = nn.ParameterDict({"x": torch.ones(2), "y": torch.zeros(2)})
        self.rows = nn.ParameterList([torch.ones(2), torch.zeros(1)])
        self.rnn = nn.LSTM(4, 3, num_layers=2, bidirectional=True)
        self.attention = nn.MultiheadAttention(4, 2)
        self.heads["b"].weight = nn.Parameter(torch.randn(3, 4))
        self.tied = self.layers[0]


@pytest.mark.parametrize("container", ["zip", "legacy"])
@pytest.mark.filterwarnings("ignore")
def test_a_pickled_module_has_the_names_of_its_state_dict(container):
    model = Block()
    data = torch_bytes(
        {"model": model, "ema": nn.Sequential(model.layers[0], nn.ReLU())}, **CONTAINERS[container]
    )
    loaded = torch.load(io.BytesIO(data), weights_only=False)
    assert_same_file(data, loaded)
    alone = torch_bytes(model, **CONTAINERS[container])
    with holdfast.open(alone) as ckpt:
        assert list(ckpt) == list(model.state_dict())
        for name, tensor in model.state_dict().items():
            assert_tensor(ckpt[name], tensor)
        assert f"{__name__}.Block" in {str(f.what) for f in ckpt.foreign}


@pytest.mark.filterwarnings("ignore")
def test_a_pickled_graph_module_has_the_names_of_its_state_dict():
    """torch.fx pickles a module as a call with its attributes and its source text; PyPI's deeplc has such files."""
    module = torch.fx.symbolic_trace(
        nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2))
    )
    data = torch_bytes({"model": module})
    assert_same_file(data, {"model": dict(module.state_dict())})
    with holdfast.open(data) as ckpt:
        calls = {str(f.what): f.uses for f in ckpt.foreign}
        assert "call" in calls["torch.fx.graph_module.reduce_graph_module"]


def test_a_state_dict_keeps_its_metadata():
    model = Block()
    data = check({"state_dict": model.state_dict()})
    with holdfast.open(data) as ckpt:
        assert ckpt.tree["state_dict"]._metadata == model.state_dict()._metadata


@pytest.mark.parametrize(
    "kind", ["SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "NAdam", "LBFGS", "Adadelta", "Rprop"]
)
def test_optimizers(kind):
    model = nn.Linear(3, 2)
    options = {"SGD": {"lr": 0.1, "momentum": 0.9}, "Adam": {"amsgrad": True}}.get(kind, {})
    optimizer = getattr(torch.optim, kind)(model.parameters(), **options)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(4, 3)).square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    check(
        {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "scheduler": scheduler.state_dict(),
        }
    )


@dataclasses.dataclass
class Settings:
    rate: float
    init: torch.Tensor


class Mode(enum.Enum):
    TRAIN = "train"


def test_random_states_and_plain_values():
    state = {
        "torch": torch.get_rng_state(),
        "generator": torch.Generator().manual_seed(3).get_state(),
        "python": random.Random(3).getstate(),
        "numpy": np.random.RandomState(3).get_state(),
        "array": np.arange(6.0).reshape(2, 3).T,
        "scalars": [np.float32(2.5), np.int64(3), np.bool_(True), np.float16(1)],
        "bytes": [b"", b"abc\xff", bytearray(b"xyz")],
        "numbers": (1, -1, 2**40, -(2**70), 2.5, float("inf"), -0.0, 1 + 2j, True, None),
        "text": ["", "ä", "\U0001f40b", "a.b", "\n"],
        "sets": [{1, 2}, frozenset({"a"})],
        "counter": Counter("hello"),
        "default": defaultdict(list, {"a": [1]}),
        "keys": {1: "int", "1": "str", (1, 2): "tuple", None: "none", 2.5: "float", False: "bool"},
        "path": pathlib.Path("/tmp/x"),
        "range": range(2, 9, 3),
    }
    for options in CONTAINERS.values():
        check(state, **options)


def test_objects_are_reachable_as_data():
    state = {
        "args": argparse.Namespace(lr=0.1, betas=(0.9, 0.99), init=torch.ones(2)),
        "settings": Settings(0.5, torch.zeros(3)),
        "mode": Mode.TRAIN,
    }
    with holdfast.open(torch_bytes(state)) as ckpt:
        assert list(ckpt) == ["args.init", "settings.init"]
        assert ckpt.tree["args"].attributes()["betas"] == (0.9, 0.99)
        assert ckpt.tree["settings"].attributes()["rate"] == 0.5
        assert ckpt.tree["mode"].args == ("train",)
        assert {str(f.what) for f in ckpt.foreign} == {
            "argparse.Namespace",
            f"{__name__}.Settings",
            f"{__name__}.Mode",
        }


# TorchScript.


class Scripted(nn.Module):
    """Tensors in every place where TorchScript keeps them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.second = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        self.register_buffer("steps", torch.arange(3))
        self.tied = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x)) + torch.tensor([1.0, 2.0, 3.0, 4.0])


@pytest.mark.parametrize("make", ["script", "trace", "freeze"])
@pytest.mark.filterwarnings("ignore")
def test_torchscript(make, tmp_path):
    model = Scripted().eval()
    path = tmp_path / "scripted.pt"
    module = (
        torch.jit.trace(model, torch.ones(2, 3)) if make == "trace" else torch.jit.script(model)
    )
    if make == "freeze":
        module = torch.jit.freeze(module)
    torch.jit.save(module, path)
    loaded = torch.jit.load(path).state_dict()
    with holdfast.open(path) as ckpt:
        assert ckpt.format == "torchscript"
        under = {
            name.removeprefix("module."): tensor
            for name, tensor in ckpt.items()
            if not name.startswith("constants.")
        }
        assert set(loaded) <= set(under)
        for name, tensor in loaded.items():
            assert_tensor(under[name], tensor)
        constants = {t.numpy().tobytes() for n, t in ckpt.items() if n.startswith("constants.")}
        if make == "trace":
            assert torch.tensor([1.0, 2.0, 3.0, 4.0]).numpy().tobytes() in constants
        assert ckpt.foreign
        assert any("never run" in note for note in ckpt.notes)
