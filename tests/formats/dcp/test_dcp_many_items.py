"""Items of many tensors asked together say what each says by itself; a damaged one among them is named."""

from __future__ import annotations

import random
import shutil

import pytest
import torch
import torch.distributed.checkpoint as dcp
from tests.support import ALONE

import holdfast
import holdfast.torch
from holdfast.errors import HoldfastError
from holdfast.formats.dcp.lazy import ItemTable


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A directory of torch's: many kinds, short and long items, turned tensors, empty ones, values between them."""
    drawn = random.Random(3)
    torch.manual_seed(0)
    state: dict[str, object] = {}
    for number in range(240):
        rows = drawn.choice((1, 3, 64, 700, 5000))
        tensor = torch.randn(rows, 4)
        match number % 8:
            case 1:
                tensor = tensor.T
            case 2:
                tensor = tensor.to(torch.bfloat16)
            case 3:
                tensor = tensor[:0]
            case 4:
                tensor = tensor.reshape(-1)[::2]
            case 5:
                tensor = tensor[0, 0]
            case 6:
                tensor.requires_grad_()
        state[f"w{number}"] = tensor
        if number % 50 == 0:
            state[f"step{number}"] = number
    path = tmp_path_factory.mktemp("many") / "dcp"
    dcp.save(state, checkpoint_id=str(path), **ALONE)
    return path, state


def tensors_in(state: dict[str, object]) -> dict[str, torch.Tensor]:
    return {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}


def test_together_they_say_what_each_says(saved):
    path, _ = saved
    with holdfast.open(path) as together, holdfast.open(path) as alone:
        table = together.stored
        assert isinstance(table, ItemTable)
        located = table.locate_rows(range(len(table)))
        plain = [row for row in range(len(located)) if row not in located.irregular]
        assert len(plain) > 100
        for row, name in enumerate(located.names):
            own, other = located.lazy_tensor(row), alone[name]
            assert [(c.box, c.offset, c.strides) for c in own.chunks] == [
                (c.box, c.offset, c.strides) for c in other.chunks
            ]
            for one, two in zip(own.storages, other.storages, strict=True):
                assert (one.key, one.start, one.nbytes, one.crc32) == (
                    two.key,
                    two.start,
                    two.nbytes,
                    two.crc32,
                )
                assert (one.byteorder, one.location, one.label) == (
                    two.byteorder,
                    two.location,
                    two.label,
                )
        pieces = located.read_bytes(plain)
        for row, piece in zip(plain, pieces, strict=True):
            assert bytes(piece) == alone[located.names[row]].numpy().tobytes()


def test_most_items_are_compared_and_not_parsed(saved, monkeypatch):
    from holdfast.formats.dcp import item

    path, _ = saved
    parsed = []
    read = item.read_archive
    monkeypatch.setattr(
        item, "read_archive", lambda *args, **kwargs: parsed.append(1) or read(*args, **kwargs)
    )
    with holdfast.open(path) as checkpoint:
        before = len(parsed)
        checkpoint.stored.locate_rows(range(len(checkpoint)))
    assert len(parsed) - before < 60


def test_all_of_it_is_loaded(saved):
    path, state = saved
    into = {
        name: torch.empty_like(value) if isinstance(value, torch.Tensor) else None
        for name, value in state.items()
    }
    done = holdfast.torch.load_sharded(path, into)
    for name, value in tensors_in(state).items():
        assert torch.equal(into[name], value), name
    assert set(done.names) == set(tensors_in(state))
    assert into["step50"] == 50


@pytest.mark.parametrize("seed", range(40))
def test_a_damaged_item_is_named(saved, tmp_path, seed):
    path, state = saved
    copy = tmp_path / "dcp"
    shutil.copytree(path, copy)
    drawn = random.Random(seed)
    with holdfast.open(path) as checkpoint:
        names = [name for name in checkpoint if checkpoint[name].size]
        name = drawn.choice(names)
        storage = checkpoint[name].storages[0]
        item = storage.item
        at = (
            drawn.randrange(storage.start, storage.start + storage.nbytes)
            if seed % 2
            else drawn.randrange(item.offset, item.stop)
        )
        file = copy / item.file
    with file.open("r+b") as opened:
        opened.seek(at)
        byte = opened.read(1)[0]
        opened.seek(at)
        opened.write(bytes([byte ^ (1 << drawn.randrange(8))]))
    alone: HoldfastError | None = None
    try:
        with holdfast.open(copy) as checkpoint:
            checkpoint[name].numpy()
    except HoldfastError as error:
        alone = error
    into = {
        name: torch.empty_like(value) if isinstance(value, torch.Tensor) else None
        for name, value in state.items()
    }
    if alone is None:
        holdfast.torch.load_sharded(copy, into)
        return
    with pytest.raises(HoldfastError) as raised:
        holdfast.torch.load_sharded(copy, into)
    cause = raised.value
    assert (type(cause), cause.message, cause.tensor, cause.file, cause.offset) == (
        type(alone), alone.message, alone.tensor, alone.file, alone.offset,
    )  # fmt: skip
    assert cause.tensor == name
