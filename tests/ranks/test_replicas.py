"""What every rank wants whole is read once and handed on, where that was asked for or pays; a failure still reaches everybody."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from holdfast.torch.ranks import load_sharded as sharded_load
from holdfast.torch.ranks.load_sharded import WORTH_NBYTES, Offer, load_sharded, spread
from tests.ranks.pool import Pool, World, failures, good
from tests.ranks.states import check, state_of

pytestmark = pytest.mark.timeout(120)


def load_handing_on(world: World, path: str, how: str) -> tuple[int, int]:
    state = state_of(world, nested=True, blank=True)
    plain = [tensor for tensor in state["model"].values() if type(tensor) is torch.Tensor and tensor.numel()]
    versions = [tensor._version for tensor in plain]
    loaded = load_sharded(path, state, group=world.group, replicated=how)
    check(world, state, nested=True, other=False)
    assert all(tensor._version > version for tensor, version in zip(plain, versions, strict=True)), "autograd must know"
    return loaded.needed_nbytes, loaded.read_nbytes


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("format", ["native", "dcp"])
def test_replicas_are_read_once(pool: Pool, saved, format: str, size: int):
    path = str(saved(format, 4))
    each = good(pool.run(size, load_handing_on, path, "read"))
    once = good(pool.run(size, load_handing_on, path, "broadcast"))
    assert [needed for needed, _ in once] == [needed for needed, _ in each]
    assert sum(read for _, read in once) < sum(read for _, read in each)


def fail_on_one(world: World, path: str) -> None:
    def broken(*_: object, **__: object) -> list[str]:
        raise OSError("the disk is on fire")

    if world.rank == 1:
        sharded_load.fill, before = broken, sharded_load.fill
    try:
        load_sharded(path, state_of(world, nested=True, blank=True), group=world.group, replicated="broadcast", deadline=20)
    finally:
        if world.rank == 1:
            sharded_load.fill = before


def test_nobody_waits_in_a_broadcast_for_a_rank_that_failed(pool: Pool, saved):
    said = failures(pool.run(3, fail_on_one, str(saved("native", 2))))
    assert {failure.kinds[0] for failure in said} == {"RanksFailed"}
    assert all("rank 1: OSError: the disk is on fire" in str(failure) for failure in said)


def disagree(world: World, path: str) -> None:
    load_sharded(path, state_of(world, nested=True, blank=True), group=world.group, replicated="auto" if world.rank else "read")


def test_ranks_that_ask_for_different_things(pool: Pool, saved):
    said = failures(pool.run(2, disagree, str(saved("native", 2))))
    assert all("it was asked to load (replicated=auto), and rank 0 to load (replicated=read)" in str(failure) for failure in said)


def test_another_word(tmp_path: Path):
    with pytest.raises(ValueError, match="replicated= takes 'auto', 'read' or 'broadcast', not 'send'"):
        load_sharded(tmp_path, {}, replicated="send")


# Who reads what.


def offer(name: str, nbytes: int = 100, device: str = "cpu", shape: tuple[int, ...] = (5,)) -> Offer:
    return Offer(name, "torch.float32", shape, device, nbytes)


def shares(*told: list[Offer], how: str = "broadcast", machines: bool = False) -> dict[str, int]:
    return spread(told, how, remote=machines)


def test_only_what_all_want_alike_is_shared():
    assert shares([offer("a"), offer("b"), offer("c")], [offer("c"), offer("a", shape=(6,)), offer("d")]) == {"c": 0}
    assert shares([offer("a")], [offer("a")], how="read") == {}
    assert shares([offer("a")]) == {}, "one rank has nobody to read for"


def test_bytes_are_spread():
    told = [offer(f"w{i}", nbytes) for i, nbytes in enumerate((50, 100, 10, 60))]
    assert shares(told, list(reversed(told))) == {"w1": 0, "w3": 1, "w0": 1, "w2": 0}


@pytest.mark.parametrize(("device", "machines", "nbytes", "handed"), [
    ("cpu", False, WORTH_NBYTES, False),
    ("cpu", True, WORTH_NBYTES, True),
    ("cpu", True, WORTH_NBYTES - 1, False),
    ("cuda", False, WORTH_NBYTES, True),
])  # fmt: skip
def test_auto(device: str, machines: bool, nbytes: int, handed: bool):
    told = [offer("a", nbytes, device)]
    assert shares(told, told, how="auto", machines=machines) == ({"a": 0} if handed else {})


def test_bytes_of_every_dtype_are_sent():
    from holdfast.torch.ranks.load_sharded import _as_bytes

    for dtype in (torch.bool, torch.uint8, torch.bfloat16, torch.complex64, torch.float8_e4m3fn, torch.int64):
        for shape in ((), (3,), (2, 3)):
            octets = _as_bytes(torch.zeros(shape, dtype=dtype))
            assert (octets.dtype, octets.numel()) == (torch.uint8, torch.zeros(shape, dtype=dtype).nbytes)
