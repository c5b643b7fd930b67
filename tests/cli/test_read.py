"""`holdfast read`: what is printed and what is written."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from holdfast.cli.read import as_text, choose, plain_array, show_tensors, write_npz, write_tensors
from holdfast.cli.text import plain
from holdfast.errors import BadIndex, BadTarget, NoSuchTensor, Unsupported


@pytest.mark.parametrize(
    "shape",
    [(), (5,), (2, 3), (1500,), (40, 50), (7, 7, 30), (6, 6, 40), (3, 1000, 2), (0, 4), (2000, 1)],
)
@pytest.mark.parametrize("dtype", ["float32", "int64", "bool", "complex64"])
def test_prints_as_numpy_does(made, shape, dtype):
    array = (np.random.default_rng(1).normal(size=shape) * 100).astype(dtype)
    tensor = made.tensor(array)
    made.checkpoint({"w": tensor})
    assert as_text(tensor) == np.array2string(array, threshold=1000, max_line_width=120)


def test_a_large_tensor_is_shown_from_its_corners(made):
    tensor = made.tensor(np.arange(64 * 64 * 64, dtype=np.int32).reshape(64, 64, 64))
    made.checkpoint({"w": tensor})
    wanted = []
    read = made.source.read
    made.source.read = lambda requests: (
        wanted.extend(r.tensor.nbytes for r in requests) or read(requests)
    )
    as_text(tensor)
    assert sum(wanted) == 6 * 6 * 6 * 4


def test_an_expanded_view_of_many_dimensions_is_refused(made):
    tensor = made.tensor(np.zeros(1, np.float32))
    row = tensor
    for _ in range(12):
        row = row[None]
    from holdfast.core.box import Box
    from holdfast.core.chunk import Chunk
    from holdfast.core.value import replace

    shape = (9,) * 12
    wide = replace(
        tensor, shape=shape, chunks=(Chunk(Box.whole(shape), tensor.storages[0], 0, (0,) * 12),)
    )
    made.checkpoint({"w": tensor})
    with pytest.raises(Unsupported, match="--slice"):
        as_text(wide)


def test_names_globs_and_slices(made):
    tree = {
        "a.w": made.tensor(np.arange(6).reshape(2, 3)),
        "a.b": made.tensor(np.arange(3)),
        "x[0]": made.tensor(np.arange(2)),
    }
    checkpoint = made.checkpoint(tree)
    assert list(choose(checkpoint, ["a.*"], None)) == ["a.w", "a.b"]
    assert list(choose(checkpoint, ["x[0]"], None)) == ["x[0]"]
    assert choose(checkpoint, ["a.w"], "-1, ::2")["a.w"].numpy().tolist() == [3, 5]
    with pytest.raises(NoSuchTensor, match=r"did you mean 'a.w'"):
        choose(checkpoint, ["a.ww"], None)
    with pytest.raises(NoSuchTensor):
        choose(checkpoint, ["z.*"], None)
    with pytest.raises(BadIndex) as caught:
        choose(checkpoint, ["a.b"], "0, 0")
    assert caught.value.tensor == "a.b"


def test_header_line_and_escaping(made):
    name = "w\x1b[2J"
    checkpoint = made.checkpoint({name: made.tensor(np.arange(3, dtype=np.float16))})
    lines = [plain(line) for line in show_tensors(choose(checkpoint, [name], None))]
    assert lines == [r"w\x1b[2J  float16  [3]  6 B", "[0. 1. 2.]"]


def test_npy_and_npz(made, tmp_path):
    tree = {
        "a": made.tensor(np.arange(6.0).reshape(2, 3)),
        "file": made.tensor(np.arange(3)),
        "e": made.tensor(np.zeros((0, 2))),
    }
    checkpoint = made.checkpoint(tree)
    chosen = choose(checkpoint, ["*"], None)
    lines = list(write_tensors(checkpoint, chosen, tmp_path / "all.npz", raw=False))
    assert len(lines) == 1
    with np.load(tmp_path / "all.npz") as loaded:
        assert sorted(loaded) == ["a", "e", "file"]
        for name, tensor in chosen.items():
            np.testing.assert_array_equal(loaded[name], tensor.numpy())
    list(write_tensors(checkpoint, {"a": chosen["a"]}, tmp_path / "a.npy", raw=False))
    np.testing.assert_array_equal(np.load(tmp_path / "a.npy"), np.arange(6.0).reshape(2, 3))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.npy", "all.npz"]


def test_types_that_numpy_lacks(made, tmp_path):
    array = np.array([1.5, -2, np.inf, 3e-3], ml_dtypes.bfloat16)
    checkpoint = made.checkpoint({"w": made.tensor(array)})
    chosen = choose(checkpoint, ["w"], None)
    note = [
        plain(line) for line in write_tensors(checkpoint, chosen, tmp_path / "w.npy", raw=False)
    ][1]
    assert "numpy has no bfloat16" in note
    wide = np.load(tmp_path / "w.npy")
    assert wide.dtype == np.float32
    np.testing.assert_array_equal(wide.astype(ml_dtypes.bfloat16), array)
    list(write_tensors(checkpoint, chosen, tmp_path / "r.npy", raw=True))
    np.testing.assert_array_equal(np.load(tmp_path / "r.npy").view(ml_dtypes.bfloat16), array)
    pair = np.array([(1, 2)], [("real", "f2"), ("imag", "f2")])
    assert plain_array(pair).tolist() == [1 + 2j]
    assert plain_array(pair, raw=True).dtype == np.uint32


def test_refused_targets(made, tmp_path):
    checkpoint = made.checkpoint({"a": made.tensor(np.arange(2)), "b": made.tensor(np.arange(2))})
    both = choose(checkpoint, ["*"], None)
    for name in ("x.npy", "x.txt", "x"):
        with pytest.raises(BadTarget):
            list(write_tensors(checkpoint, both, tmp_path / name, raw=False))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "name", ["../x", "/etc/x", "a/../../x", "..\\x", "a\0b", "\ud800", "x" * 70_000]
)
def test_names_that_would_leave_an_archive(made, tmp_path, name):
    checkpoint = made.checkpoint({name: made.tensor(np.arange(2))})
    with pytest.raises(Unsupported, match=r"\.npz"):
        write_npz(tmp_path / "x.npz", dict(checkpoint))
    assert not list(tmp_path.iterdir())


def test_a_failed_write_leaves_what_was_there(made, tmp_path, monkeypatch):
    checkpoint = made.checkpoint({"a": made.tensor(np.arange(2))})
    target = tmp_path / "a.npy"
    target.write_bytes(b"before")

    def fail(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("numpy.lib.format.write_array", fail)
    with pytest.raises(OSError, match="No space"):
        list(write_tensors(checkpoint, dict(checkpoint), target, raw=False))
    assert [p.name for p in tmp_path.iterdir()] == ["a.npy"]
    assert target.read_bytes() == b"before"


@pytest.fixture
def trainer(tmp_path):
    import torch  # the other tests here need none

    groups = [{"lr": 0.1, "betas": (0.9, 0.999)}]
    state = {
        "w": torch.ones(2),
        "step": 7,
        "name": "a\x1b[2Jb",
        "opt": {"groups": groups},
        "stats": {"n": 3},
        "long": "x" * 500,
    }
    torch.save(state, tmp_path / "a.pt")
    return str(tmp_path / "a.pt")


def test_values_that_are_no_tensors(run, trainer):
    assert run("read", trainer, "step") == (0, "step  int\n7\n", "")
    assert (
        run("read", trainer, "opt.groups")[1]
        == "opt.groups.0.lr  float\n0.1\n\nopt.groups.0.betas  tuple\n(0.9, 0.999)\n"
    )
    assert run("read", trainer, "stats.*")[1] == "stats.n  int\n3\n"
    assert run("read", trainer, "long")[1] == f"long  str\n'{'x' * 500}'\n"
    both = run("read", trainer, "w", "step")[1]
    assert both.startswith("step  int\n7\n\nw  float32")
    assert "\x1b" not in run("read", trainer, "name")[1]


def test_values_are_neither_sliced_nor_written(run, trainer, tmp_path):
    for more in (["--slice", "0"], ["-o", str(tmp_path / "x.npy")]):
        code, out, err = run("read", trainer, "step", *more)
        assert (code, out) == (2, "")
        assert "'step' is not a tensor" in err
    assert not (tmp_path / "x.npy").exists()
    code, _, err = run("read", trainer, "steps")
    assert code == 2
    assert "steps" in err
