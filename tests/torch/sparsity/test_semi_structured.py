"""torch's packed form of 2:4 matrices: back without a GPU, both ways with one; a state with such tensors is refused."""

import pytest
import torch
from torch.sparse import SparseSemiStructuredTensorCUTLASS
from torch.sparse._semi_structured_conversions import sparse_semi_structured_from_dense_cutlass

import holdfast
from holdfast.errors import CannotHold, Unsupported
from holdfast.torch.sparsity import (
    from_semi_structured,
    is_two_of_four,
    nm_mask,
    to_semi_structured,
)

needs_cuda = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="torch's packed form is for CUDA devices"
)

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of SparseSemiStructuredTensor")


def two_of_four(rows=64, columns=128, dtype=torch.bfloat16):
    torch.manual_seed(1)
    weight = torch.randn(rows, columns)
    return (weight * nm_mask(weight, 2, 4)).to(dtype)


def packed_on_cpu(dense):
    """What torch's functions for CUTLASS make of a matrix on any device; only its check asks for CUDA."""
    values, meta = sparse_semi_structured_from_dense_cutlass(dense)
    return SparseSemiStructuredTensorCUTLASS(dense.shape, values, meta, None, None, None)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_back_to_dense(dtype):
    dense = two_of_four(dtype=dtype)
    dense[0, :4] = torch.tensor([float("nan"), 0, float("inf"), 0])
    assert torch.equal(
        from_semi_structured(packed_on_cpu(dense)).nan_to_num(7), dense.nan_to_num(7)
    )


def test_a_way_back_that_changes_values_is_refused(monkeypatch):
    packed = packed_on_cpu(two_of_four())
    monkeypatch.setattr(
        SparseSemiStructuredTensorCUTLASS, "to_dense", lambda self: two_of_four() * 1.01
    )
    with pytest.raises(Unsupported, match="as they are stored"):
        from_semi_structured(packed)


def test_a_plain_tensor_is_no_packed_one():
    with pytest.raises(TypeError, match="SparseSemiStructuredTensor"):
        from_semi_structured(two_of_four())


@pytest.mark.parametrize("target", ["c", "c.pt", "c.safetensors"])
def test_a_state_with_packed_tensors_is_refused(tmp_path, target):
    with pytest.raises(CannotHold, match="make it dense"):
        holdfast.save({"w": packed_on_cpu(two_of_four())}, tmp_path / target)
    assert not (tmp_path / target).exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_device():
    with pytest.raises(Unsupported, match="CUDA"):
        to_semi_structured(two_of_four())


def test_is_two_of_four():
    assert is_two_of_four(two_of_four())
    assert is_two_of_four(torch.zeros(3, 8))
    assert not is_two_of_four(torch.ones(4, 4))
    assert not is_two_of_four(torch.zeros(4, 6))
    assert not is_two_of_four(torch.zeros(()))


@needs_cuda
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_both_ways_on_a_device(tmp_path, dtype):
    dense = two_of_four(128, 256, dtype)
    holdfast.save({"w": dense}, tmp_path / "c")
    with holdfast.open(tmp_path / "c") as ckpt:
        packed = to_semi_structured(ckpt["w"])
    back = from_semi_structured(packed)
    assert back.is_cuda
    assert torch.equal(back.cpu(), dense)
    assert torch.equal(from_semi_structured(to_semi_structured(dense.cuda())).cpu(), dense)


@needs_cuda
@pytest.mark.parametrize("bad", ["dense", "shape", "dtype"])
def test_what_cannot_be_packed_is_refused(bad):
    tensor = {
        "dense": torch.ones(64, 64),
        "shape": torch.zeros(3, 4),
        "dtype": torch.zeros(64, 64, dtype=torch.int64),
    }[bad]
    with pytest.raises(Unsupported):
        to_semi_structured(tensor)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_both_ways_with_the_form_that_torch_packs_without_a_kernel(monkeypatch, tmp_path, dtype):
    """CUTLASS's form is made by plain operators, so everything but torch's question for a CUDA device runs anywhere."""
    from torch.sparse import semi_structured

    monkeypatch.setattr(semi_structured.SparseSemiStructuredTensor, "_FORCE_CUTLASS", True)
    for kind in (
        semi_structured.SparseSemiStructuredTensor,
        semi_structured.SparseSemiStructuredTensorCUTLASS,
    ):
        monkeypatch.setattr(
            kind, "_validate_device_dim_dtype_shape", classmethod(lambda cls, tensor: None)
        )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    dense = two_of_four(128, 256, dtype)
    holdfast.save({"w": dense}, tmp_path / "c")
    with holdfast.open(tmp_path / "c") as ckpt:
        packed = to_semi_structured(ckpt["w"], device="cpu")
    assert isinstance(packed, semi_structured.SparseSemiStructuredTensorCUTLASS)
    assert packed.values().numel() == dense.numel() // 2
    assert torch.equal(from_semi_structured(packed), dense)
