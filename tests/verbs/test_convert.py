"""`holdfast.convert`: formats, edits, the report, the budget, and that nothing is there when it fails."""

from __future__ import annotations

import io
import os
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch

import holdfast
import holdfast.torch
from holdfast.engine import write
from holdfast.errors import CannotHold, Corrupted, LimitExceeded, NotCommitted, Unsupported
from tests.support import flip_bit


@pytest.fixture
def trainer(tmp_path) -> Path:
    """A training checkpoint of torch's own."""
    weight = torch.randn(64, 48)
    state = {
        "model": {"embed": weight, "head": weight, "norm": torch.ones(48, dtype=torch.bfloat16)},
        "optimizer": {
            "state": {0: {"step": torch.tensor(3.0), "avg": torch.randn(64, 48)}},
            "groups": [{"lr": 0.1, "p": [0]}],
        },
        "epoch": 4,
    }
    torch.save(state, tmp_path / "trainer.pt")
    return tmp_path / "trainer.pt"


@pytest.mark.parametrize("name", ["b.safetensors", "b", "b.pt", "b.bin"])
def test_the_content_is_the_same(name, trainer, tmp_path):
    done = holdfast.convert(trainer, tmp_path / name)
    assert done.done
    assert done.nbytes == sum(nbytes for _, nbytes in done.files)
    assert holdfast.diff(trainer, tmp_path / name).equal
    assert holdfast.verify(tmp_path / name).ok


def test_peers_read_it(trainer, tmp_path):
    first = torch.load(trainer, weights_only=True)
    holdfast.convert(trainer, tmp_path / "b.safetensors")
    loaded = safetensors.torch.load_file(tmp_path / "b.safetensors")
    assert torch.equal(loaded["model.embed"], first["model"]["embed"])
    assert "model.head" not in loaded  # the second name of one tensor is in the metadata
    holdfast.convert(tmp_path / "b.safetensors", tmp_path / "c.pt")
    again = torch.load(tmp_path / "c.pt", weights_only=True)
    assert again["epoch"] == 4
    assert again["model"]["head"].data_ptr() == again["model"]["embed"].data_ptr()
    assert again["optimizer"]["groups"] == first["optimizer"]["groups"]


def test_a_legacy_file(trainer, tmp_path):
    state = torch.load(trainer, weights_only=True)
    torch.save(state, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    holdfast.convert(tmp_path / "old.pt", tmp_path / "b.pt")
    assert holdfast.diff(trainer, tmp_path / "b.pt").equal


def test_edits_on_the_way(trainer, tmp_path):
    holdfast.convert(
        trainer,
        tmp_path / "b.safetensors",
        keep=["model.*"],
        drop=["*.head"],
        rename=[("model.*", "*")],
        dtype="bf16",
    )
    loaded = safetensors.torch.load_file(tmp_path / "b.safetensors")
    assert set(loaded) == {"embed", "norm"}
    assert torch.equal(
        loaded["embed"], torch.load(trainer, weights_only=True)["model"]["embed"].bfloat16()
    )


def test_explain_does_nothing_and_knows_everything(trainer, tmp_path):
    before = sorted(os.listdir(tmp_path))
    told = holdfast.convert(trainer, tmp_path / "b.safetensors", dtype="f16", dry_run=True)
    assert sorted(os.listdir(tmp_path)) == before
    assert not told.done
    done = holdfast.convert(trainer, tmp_path / "b.safetensors", dtype="f16")
    assert (told.nbytes, told.read_nbytes) == (done.nbytes, done.read_nbytes)
    assert told.nbytes == (tmp_path / "b.safetensors").stat().st_size
    assert told.read_nbytes == 2 * 64 * 48 * 4 + 4 + 48 * 2
    for word in ("read", "write", "memory", "space"):
        assert word in told.explain()


def test_over_read_is_reported(tmp_path):
    base = torch.randn(1000, 100)
    torch.save({"columns": base[:, ::2]}, tmp_path / "a.pt")
    told = holdfast.convert(tmp_path / "a.pt", tmp_path / "b.safetensors", dry_run=True)
    assert told.read_nbytes > base[:, ::2].numel() * 4
    assert told.over_read_nbytes > 0
    assert "between wanted ones" in told.explain()


def test_what_is_there_is_kept_unless_overwrite_is_said(trainer, tmp_path):
    for name in ("b.pt", "b"):
        holdfast.convert(trainer, tmp_path / name, keep=["epoch"])
        with pytest.raises(NotCommitted, match="exists"):
            holdfast.convert(trainer, tmp_path / name)
        holdfast.convert(trainer, tmp_path / name, overwrite=True)
        assert holdfast.diff(trainer, tmp_path / name).equal


def test_shards(trainer, tmp_path):
    done = holdfast.convert(trainer, tmp_path / "b", format="safetensors", max_shard_size="13KB")
    assert done.format == "safetensors-dir"
    assert len(done.files) == 3
    assert holdfast.diff(trainer, tmp_path / "b").equal


class Config:
    """Something that no format but a pickle can hold."""


def test_tensors_only(tmp_path):
    torch.save({"w": torch.ones(2), "config": Config()}, tmp_path / "a.pt")
    with pytest.raises(CannotHold, match="tensors_only=True"):
        holdfast.convert(tmp_path / "a.pt", tmp_path / "b.safetensors")
    assert os.listdir(tmp_path) == ["a.pt"]
    holdfast.convert(tmp_path / "a.pt", tmp_path / "b.safetensors", tensors_only=True)
    assert list(safetensors.torch.load_file(tmp_path / "b.safetensors")) == ["w"]


class Runs:
    """Pickled as a call of something that is not built."""

    def __reduce__(self) -> tuple[object, ...]:
        return os.system, ("echo hi",)


@pytest.mark.parametrize("verb", [holdfast.convert, holdfast.edit])
@pytest.mark.parametrize("dry_run", [False, True])
def test_what_tensors_only_leaves_out_is_told(verb, dry_run, tmp_path):
    shared = {"lr": 0.1, "betas": [0.9, 0.99]}
    module = torch.nn.Linear(2, 2)
    state = {
        "model": module.state_dict(),
        "groups": [shared, shared],
        "step": 3,
        "hook": Runs(),
        "net": module,
        "grid": torch.eye(3).to_sparse(),
        "array": np.ones(2),
    }
    torch.save(state, tmp_path / "a.pt")
    done = verb(tmp_path / "a.pt", tmp_path / "b.safetensors", tensors_only=True, dry_run=dry_run)
    left = [
        note.removeprefix("only tensors are kept; ")
        for note in done.notes
        if note.startswith("only tensors")
    ]
    system = f"{os.system.__module__}.system"
    assert left == [
        "left out: 5 values: 'groups.0.lr', 'groups.0.betas.0', 'groups.0.betas.1' and 2 more",
        f"left out: 2 foreign objects: 'hook' ({system}), 'net' (torch.nn.modules.linear.Linear)",
        "taken apart: 1 tensor: 'grid' (sparse_coo)",
        "left out: what state dicts record of their modules (_metadata)",
    ]


def test_what_keep_and_drop_leave_out_is_not_told_again(trainer, tmp_path):
    done = holdfast.convert(
        trainer, tmp_path / "b", keep="optimizer.*", drop="*.step", tensors_only=True, dry_run=True
    )
    assert [note for note in done.notes if "only tensors" in note] == [
        "only tensors are kept; left out: 2 values: 'optimizer.groups.0.lr', 'optimizer.groups.0.p.0'"
    ]
    done = holdfast.convert(
        trainer, tmp_path / "b", keep="model.*", tensors_only=True, dry_run=True
    )
    assert not [note for note in done.notes if "only tensors" in note]


def test_containers_that_many_places_share_are_counted_once(tmp_path):
    shared: object = 1
    for _ in range(20):
        shared = [shared, shared]
    torch.save({"w": torch.ones(2), "many": shared}, tmp_path / "a.pt")
    done = holdfast.convert(tmp_path / "a.pt", tmp_path / "b.pt", tensors_only=True)
    assert [note for note in done.notes if "2 values" in note]


def test_too_little_memory_for_one_thread_is_an_error_in_the_singular(trainer, tmp_path):
    with pytest.raises(
        LimitExceeded, match=r": one thread needs [\d,]+ bytes; pass at least that$"
    ):
        holdfast.convert(trainer, tmp_path / "b.safetensors", max_memory="1MiB", threads=1)


def test_too_little_memory_is_an_error_that_says_how_much(trainer, tmp_path):
    with pytest.raises(LimitExceeded, match="max_memory is too small") as caught:
        holdfast.convert(trainer, tmp_path / "b.safetensors", max_memory="1MiB", threads=2)
    assert caught.value.expected > 1 << 20
    needed = f"2 threads need {caught.value.expected:,} bytes; pass at least that, or fewer threads"
    assert str(caught.value).endswith(needed)
    holdfast.convert(
        trainer, tmp_path / "b.safetensors", max_memory=caught.value.expected, threads=2
    )


def test_damage_in_the_source_is_found(trainer, tmp_path):
    with holdfast.open(trainer) as ckpt:
        at = ckpt["model.embed"].chunks[0].storage.start
    flip_bit(trainer, at + 100)
    for name in ("b.pt", "b.safetensors", "b"):
        with pytest.raises(Corrupted):
            holdfast.convert(trainer, tmp_path / name)
    assert os.listdir(tmp_path) == ["trainer.pt"]


def test_progress_counts_every_byte(trainer, tmp_path):
    for name in ("b.pt", "b.safetensors", "b"):
        counts: list[int] = []
        done = holdfast.convert(trainer, tmp_path / name, progress=counts.append)
        assert done.nbytes * 0.98 <= sum(counts) <= done.nbytes * 1.02


def test_unknown_targets(trainer, tmp_path):
    with pytest.raises(Unsupported, match="suffix"):
        holdfast.convert(trainer, tmp_path / "model.tflite")
    with pytest.raises(Unsupported, match="no format"):
        holdfast.convert(trainer, tmp_path / "model", format="tflite")


def test_a_strided_tensor_is_written_in_order_in_small_blocks(tmp_path):
    base = np.arange(700 * 900, dtype=np.float32).reshape(700, 900)
    torch.save({"t": torch.from_numpy(base).T}, tmp_path / "a.pt")
    holdfast.convert(tmp_path / "a.pt", tmp_path / "b.safetensors", max_memory="70MiB", threads=2)
    with holdfast.open(tmp_path / "b.safetensors") as ckpt:
        assert np.array_equal(ckpt["t"].numpy(), base.T)


@pytest.mark.parametrize("target", ["b.safetensors", "b.pt"])
def test_no_byte_is_published_that_does_not_read_back(target, tmp_path, monkeypatch):
    state = {
        "large": np.arange(90_000, dtype=np.float32),
        **{f"small.{i}": np.full(3, i, np.int8) for i in range(20)},
    }
    holdfast.save(state, tmp_path / "a.pt")
    whole = holdfast.convert(tmp_path / "a.pt", tmp_path / target)
    real = write.read_at
    rng = np.random.default_rng(0)
    named = set()
    for place in [0, 5, 300, whole.nbytes - 1, *rng.integers(0, whole.nbytes, 30).tolist()]:

        def read(descriptor: int, start: int, out: memoryview, place: int = place) -> None:
            real(descriptor, start, out)
            if start <= place < start + out.nbytes:
                out[place - start] ^= 1

        monkeypatch.setattr(write, "read_at", read)
        with pytest.raises(NotCommitted, match="does not read back the same") as failed:
            holdfast.convert(tmp_path / "a.pt", tmp_path / f"new-{target}")
        named.add(failed.value.tensor)
    assert None in named, "a header that is damaged belongs to no tensor"
    assert named - {None}
    assert not (tmp_path / f"new-{target}").exists()


class Watched(io.BytesIO):
    """A file object that counts how often it is asked to go back."""

    back = 0

    def seek(self, offset: int, whence: int = 0, /) -> int:
        self.back += whence == 0 and offset < self.tell()
        return super().seek(offset, whence)


@pytest.mark.parametrize("dtype", [None, "bf16"])
@pytest.mark.parametrize("target", ["out.safetensors", "out.pt", "out"])
def test_a_stream_of_many_small_tensors_is_read_from_front_to_back(target, dtype, tmp_path):
    state = {f"t{i}": np.arange(64, dtype=np.float32) + i for i in range(3000)}
    file = Watched(holdfast.to_bytes(state, "safetensors"))
    chosen = {} if dtype is None else {"dtype": dtype}
    holdfast.convert(file, tmp_path / target, **chosen)
    assert file.back < 8
    with holdfast.open(tmp_path / target) as made:
        assert all(
            (made[name].numpy().astype(np.float32) == made_of).all()
            for name, made_of in rounded(state, dtype).items()
        )


def rounded(state, dtype):
    if dtype is None:
        return state
    return {
        name: torch.from_numpy(array).bfloat16().float().numpy() for name, array in state.items()
    }


@pytest.mark.parametrize("name", ["b.safetensors", "b", "b.pt"])
def test_short_tensors_are_cast_with_empty_ones_among_them(name, tmp_path):
    state = {f"w{at}": np.full((at % 5, 3), at, (np.float32, np.int64)[at % 2]) for at in range(40)}
    holdfast.save(state, tmp_path / "a.pt", durable=False)
    holdfast.convert(tmp_path / "a.pt", tmp_path / name, dtype="float16", durable=False)
    with holdfast.open(tmp_path / name) as found:
        for key, array in state.items():
            assert np.array_equal(found[key].numpy(), array)
            assert found[key].dtype.name == ("float16" if array.dtype == np.float32 else "int64")


@pytest.fixture(params=["expanded views", "overlapping views"])
def many_views(request, tmp_path) -> Path:
    """A file of 20 KB whose tensors take 40 MB if every one of them is written out."""
    base = torch.ones(1200)
    if request.param == "expanded views":
        state = {f"t{number}": base[number : number + 1].expand(250_000) for number in range(40)}
    else:
        state = {f"t{number}": base.as_strided((500, 500), (1, 1), number) for number in range(40)}
    torch.save(state, tmp_path / "views.pt")
    return tmp_path / "views.pt"


@pytest.mark.parametrize("target", ["b.safetensors", "b", "dcp"])
def test_small_views_are_refused_if_together_they_are_many_times_what_is_stored(
    target, many_views, tmp_path
):
    format = {"format": "dcp"} if target == "dcp" else {}
    with pytest.raises(
        CannotHold, match=r"40,000,000 bytes out of 4,8.* stored.*Limits\(expansion"
    ):
        holdfast.convert(many_views, tmp_path / target, **format)
    assert not (tmp_path / target).exists()
    holdfast.convert(
        many_views, tmp_path / target, limits=holdfast.Limits(expansion=10_000), **format
    )
    assert holdfast.diff(many_views, tmp_path / target).equal


def test_a_format_with_storages_keeps_many_views(many_views, tmp_path):
    holdfast.convert(many_views, tmp_path / "b.pt")
    assert (tmp_path / "b.pt").stat().st_size < 100_000


def test_reading_many_views_has_one_allowance(many_views):
    with holdfast.open(many_views) as checkpoint:
        with pytest.raises(LimitExceeded, match="40,000,000 bytes out of 4,8"):
            checkpoint.read()
        assert list(checkpoint.read("t0")) == ["t0"]


def test_load_full_keeps_expanded_views(tmp_path):
    expanded = torch.tensor([1.5]).expand(3, 250_000)
    windows = torch.arange(1000.0).as_strided((500, 500), (1, 1))
    torch.save(
        {"expanded": expanded, "windows": windows, "plain": torch.ones(3)}, tmp_path / "a.pt"
    )
    loaded = holdfast.torch.load_full(tmp_path / "a.pt")
    assert torch.equal(loaded["expanded"], expanded)
    assert torch.equal(loaded["windows"], windows)
    assert loaded["expanded"].untyped_storage().nbytes() <= 16
    assert loaded["windows"].untyped_storage().nbytes() <= 4000
    assert loaded["plain"].is_contiguous()


@pytest.mark.filterwarnings("ignore:.*quantized tensor creation")
def test_load_full_has_one_allowance_for_tensors_that_cannot_be_views(tmp_path):
    scales = {"scale": 0.5, "zero_point": 3, "dtype": torch.quint8}
    state = {
        f"t{number}": torch.quantize_per_tensor(torch.ones(1), **scales).expand(1_000_000)
        for number in range(40)
    }
    torch.save(state, tmp_path / "quantized.pt")
    with pytest.raises(LimitExceeded, match="40,000,000 bytes out of 40 stored"):
        holdfast.torch.load_full(tmp_path / "quantized.pt")
