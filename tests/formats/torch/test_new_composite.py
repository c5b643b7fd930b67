"""A kind of composite tensors that is added in one place, as a new one of torch would be, and all that must then know it."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path

import pytest
import torch

import holdfast
import holdfast.torch
from holdfast.cli.main import main
from holdfast.core.tensor import Composite
from holdfast.errors import HoldfastError, MetadataError, PickleError
from holdfast.formats.torch import composites, reducers
from holdfast.formats.torch.composites import Apart, CompositeKind, tensors
from holdfast.formats.torch.tensors import arity
from holdfast.torch.serialization.allowed import safe_globals
from holdfast.torch.tensors import composites as torch_composites
from holdfast.torch.tensors.composites import TorchKind, add_kind


class LowRank(torch.Tensor):
    """The product of two thin matrices, which are all that it has."""

    left: torch.Tensor
    right: torch.Tensor

    @staticmethod
    def __new__(cls, left, right):
        shape = (left.shape[0], right.shape[1])
        made = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=left.dtype, device=left.device)
        made.left, made.right = left, right
        return made

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.detach.default:
            return cls(args[0].left.detach(), args[0].right.detach())
        raise NotImplementedError(function)

    def __reduce_ex__(self, protocol):
        return rebuild_low_rank, (self.left, self.right)


def rebuild_low_rank(left, right):
    return LowRank(left, right)


# The one place.


def reduce_low_rank(table, args):
    parts = tensors(
        table,
        dict(zip(("left", "right"), arity(args, 2, 2, "rebuild_low_rank"), strict=True)),
        "a product",
    )
    shape = *parts["left"].shape[:1], *parts["right"].shape[1:]
    return table.builder.composite("low_rank", Apart(shape, parts))


def check_low_rank(whole):
    left, right = whole.parts["left"].shape, whole.parts["right"].shape
    if (
        len(left) != 2
        or len(right) != 2
        or left[1] != right[0]
        or whole.shape != (left[0], right[1])
    ):
        raise MetadataError(
            "the two matrices of a product do not fit each other", found=tuple(left)
        )


def write_low_rank(writer, whole):
    writer.name(__name__, "rebuild_low_rank")
    for part in whole.parts.values():
        writer.tensor(part)
    writer.end_call(b"\x86")


NAME = (__name__, "rebuild_low_rank")
LOW_RANK = CompositeKind(
    "low_rank", "a product of two", {NAME: reduce_low_rank}, check_low_rank, write_low_rank
)
IN_TORCH = TorchKind(
    lambda tensor: isinstance(tensor, LowRank),
    lambda tensor: Apart(tuple(tensor.shape), {"left": tensor.left, "right": tensor.right}),
    lambda whole: LowRank(whole.parts["left"], whole.parts["right"]),
    {NAME: rebuild_low_rank},
)


@pytest.fixture(autouse=True)
def _added():
    add_kind(LOW_RANK, IN_TORCH)
    yield
    del (
        composites.KINDS["low_rank"],
        torch_composites.KINDS["low_rank"],
        reducers.BuildingTable.calls[NAME],
    )


def state() -> dict[str, object]:
    left, right = torch.arange(6.0).reshape(3, 2), torch.arange(8.0).reshape(2, 4)
    return {"product": LowRank(left, right), "left": left, "plain": torch.ones(2)}


def assert_same(found: object) -> None:
    assert isinstance(found, dict)
    product, expected = found["product"], state()["product"]
    assert type(product) is LowRank
    assert product.shape == (3, 4)
    assert torch.equal(product.left, expected.left)
    assert torch.equal(product.right, expected.right)
    assert found["plain"].tolist() == [1, 1]


WRITERS = {
    "torch.save": torch.save,
    "torch.save, before 1.6": lambda state, path: torch.save(
        state, path, _use_new_zipfile_serialization=False
    ),
    "holdfast.torch.save": holdfast.torch.save,
    "holdfast.save": holdfast.save,
}


@pytest.fixture(params=WRITERS)
def saved(request, tmp_path) -> Path:
    WRITERS[request.param](state(), tmp_path / "a.pt")
    return tmp_path / "a.pt"


def test_it_is_described_and_read(saved):
    with holdfast.open(saved) as ckpt:
        assert list(ckpt) == ["product.left", "product.right", "left", "plain"]
        assert not ckpt.foreign
        whole = ckpt.tree["product"]
        assert isinstance(whole, Composite)
        assert (whole.kind, whole.shape, list(whole.parts)) == (
            "low_rank",
            (3, 4),
            ["left", "right"],
        )
        assert ckpt["product.left"].numpy().tolist() == state()["left"].tolist()
        assert_same({"product": whole.torch(), "plain": ckpt["plain"].torch()})
    with holdfast.torch.open(saved) as ckpt:
        assert_same(ckpt.tree)


@pytest.mark.parametrize("weights_only", [True, False])
def test_it_is_loaded(saved, weights_only):
    with safe_globals([rebuild_low_rank]):
        found = holdfast.torch.load(saved, weights_only=weights_only)
    assert_same(found)
    assert (
        found["product"].left.untyped_storage().data_ptr()
        == found["left"].untyped_storage().data_ptr()
    )


def test_it_is_loaded_where_it_was_allowed_and_not_otherwise(saved):
    """The rule stays torch's: a kind that is known here needs the same leave as any other class."""
    with pytest.raises(PickleError, match=r"add_safe_globals\(\[.*rebuild_low_rank"):
        holdfast.torch.load(saved)


def test_torch_reads_what_was_written(saved):
    assert_same(torch.load(saved, weights_only=False))


def test_it_is_shown(saved, capsys):
    assert main(["show", str(saved)]) == 0
    shown = capsys.readouterr().out
    assert "low_rank" in shown
    assert "product.left" in shown or "left" in shown


@pytest.mark.parametrize("name", ["b.pt", "b"])
def test_it_is_converted_and_comes_back(saved, tmp_path, name):
    """Also to a native directory, whose tree is JSON and checked by the same rules."""
    holdfast.convert(saved, tmp_path / name)
    with holdfast.torch.open(tmp_path / name) as ckpt:
        assert_same(ckpt.tree)
    holdfast.convert(tmp_path / name, tmp_path / "c.pt")
    assert_same(torch.load(tmp_path / "c.pt", weights_only=False))


def test_parts_that_lie_are_refused_by_all(tmp_path):
    lie = state()
    lie["product"].right = torch.ones(3, 4)
    buffer = BytesIO()
    torch.save(lie, buffer)
    (tmp_path / "a.pt").write_bytes(buffer.getvalue())
    with pytest.raises(MetadataError, match="do not fit each other"):
        holdfast.open(tmp_path / "a.pt")
    with (
        safe_globals([rebuild_low_rank]),
        pytest.raises(HoldfastError, match="do not fit each other"),
    ):
        holdfast.torch.load(tmp_path / "a.pt")
