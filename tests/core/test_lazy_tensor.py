"""A lazy tensor where people expect an array: numbers out of it, rows, torch and numpy, and a sentence for what it is not."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest
import torch

import holdfast
import holdfast.torch
from holdfast.errors import HoldfastError


@pytest.fixture
def ckpt(tmp_path):
    state = {
        "step": torch.tensor(7), "loss": torch.tensor(0.5), "half": torch.tensor(0.5, dtype=torch.bfloat16),
        "flag": torch.tensor(True),
        "one": torch.tensor([[3.0]]), "pair": torch.tensor(1 + 2j, dtype=torch.complex32), "w": torch.arange(6.0).reshape(2, 3),
        "b": torch.arange(4.0).to(torch.bfloat16), "empty": torch.zeros(0),
    }  # fmt: skip
    torch.save(state, tmp_path / "a.pt")
    with holdfast.open(tmp_path / "a.pt") as opened:
        yield opened


def test_numbers_out_of_tensors_of_one_element(ckpt):
    assert (ckpt["step"].item(), type(ckpt["step"].item())) == (7, int)
    assert (ckpt["loss"].item(), ckpt["half"].item(), ckpt["one"].item(), ckpt["pair"].item()) == (
        0.5,
        0.5,
        3.0,
        1 + 2j,
    )
    assert (float(ckpt["loss"]), int(ckpt["step"]), bool(ckpt["flag"]), complex(ckpt["pair"])) == (
        0.5,
        7,
        True,
        1 + 2j,
    )
    assert type(ckpt["flag"].item()) is bool
    assert ckpt["w"][1, 2].item() == 5.0


def test_lists(ckpt):
    assert ckpt["w"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert ckpt["b"].tolist() == [0, 1, 2, 3]
    assert type(ckpt["b"].tolist()[0]) is float
    assert ckpt["step"].tolist() == 7


def test_more_than_one_element_is_no_number(ckpt):
    for ask in (
        lambda: ckpt["w"].item(),
        lambda: float(ckpt["w"]),
        lambda: bool(ckpt["w"]),
        lambda: ckpt["empty"].item(),
    ):
        with pytest.raises(ValueError, match="element") as found:
            ask()
        assert isinstance(found.value, HoldfastError)


def test_rows(ckpt):
    assert [row.tolist() for row in ckpt["w"]] == [[0, 1, 2], [3, 4, 5]]
    assert (len(ckpt["w"]), ckpt["w"].numel(), ckpt["w"].nbytes, ckpt["w"].size) == (2, 6, 24, 6)
    for ask in (len, iter, list):
        with pytest.raises(TypeError, match="0-d tensor"):
            ask(ckpt["step"])


@pytest.mark.parametrize("make", [torch.as_tensor, torch.tensor, torch.from_dlpack])
@pytest.mark.parametrize("name", ["w", "b", "loss", "half", "step", "one"])
def test_torch_makes_tensors_of_them(ckpt, make, name):
    made = make(ckpt[name])
    assert made.dtype == ckpt[name].dtype
    assert torch.equal(made, ckpt[name].torch())


def test_numpy_makes_arrays_of_them(ckpt):
    assert np.asarray(ckpt["w"]).sum() == 15
    assert np.asarray(ckpt["b"]).dtype == ml_dtypes.bfloat16
    assert np.array(ckpt["loss"]).shape == ()
    assert np.from_dlpack(ckpt["w"]).tolist() == ckpt["w"].tolist()


def test_without_torch_numpy_serves(tmp_path):
    holdfast.save({"w": np.arange(3.0)}, tmp_path / "a.safetensors")
    code = (
        "import sys, numpy as np, holdfast\n"
        f"w = holdfast.open({str(tmp_path / 'a.safetensors')!r})['w']\n"
        "assert np.from_dlpack(w).tolist() == [0, 1, 2] and 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize("name", ["to", "mean", "cuda", "reshape", "T_"])
def test_what_it_does_not_have_is_said_in_a_sentence(ckpt, name):
    assert not hasattr(ckpt["w"], name)
    with pytest.raises(
        AttributeError,
        match=rf"has no attribute '{name}'; read it with numpy\(\)",
    ):
        getattr(ckpt["w"], name)


def test_it_is_still_a_value(ckpt):
    lazy = ckpt["w"]
    assert copy.copy(lazy) is lazy
    assert copy.deepcopy(lazy) is lazy
    assert pickle.loads(pickle.dumps(lazy)).tolist() == lazy.tolist()
    assert lazy == lazy  # by identity
    assert lazy in [lazy]


def test_written_in_some_way(ckpt):
    assert f"{ckpt['loss']:.3f} {ckpt['step']:>3}" == "0.500   7"
    assert f"{ckpt['w']}" == repr(ckpt["w"])


def test_permute_takes_a_tuple(ckpt):
    assert (
        ckpt["w"].permute((1, 0)).tolist()
        == ckpt["w"].permute(1, 0).tolist()
        == ckpt["w"].permute(-1, 0).tolist()
        == ckpt["w"].T.tolist()
    )
    for axes in (("a", "b"), (1.0, 0.0), (0,), (0, 0), (0, 2), ((0, 1, 2),), (None, 0)):
        with pytest.raises(holdfast.errors.BadIndex, match="each of 2 dimensions once"):
            ckpt["w"].permute(*axes)


def test_names_one_by_one_or_in_a_list(ckpt):
    assert (
        list(ckpt.read("w", "b"))
        == list(ckpt.read(["w", "b"]))
        == list(holdfast.torch.open(ckpt).read(["w", "b"]))
        == ["w", "b"]
    )
    assert ckpt.read([]) == {}
    assert [] not in ckpt
    for opened in (ckpt, holdfast.torch.open(ckpt)):
        for ask in (
            lambda opened: opened[["w"]],
            lambda opened: opened.read([3]),
            lambda opened: opened.read(3),
            lambda opened: opened[3],
        ):
            with pytest.raises(HoldfastError):
                ask(opened)


def test_dtypes_and_tensors_of_torch_are_asked_for_in_many_words(ckpt):
    for dtype in ("float32", "f32", np.float32, torch.float32, ckpt["w"].dtype):
        assert holdfast.torch.torch_dtype(dtype) is torch.float32
    for ask in (
        holdfast.torch.torch_dtype,
        holdfast.torch.tensor_from_lazy,
        holdfast.torch.tensor_from_composite,
    ):
        with pytest.raises(holdfast.errors.BadArgumentType):
            ask(3)
