"""What several ranks want alike is read once and handed on, where that was asked for or pays; a failure still reaches everybody."""

from __future__ import annotations

import hashlib
import itertools
import os
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate, Shard

import holdfast
from holdfast.torch import slices
from holdfast.torch.ranks import load_sharded as sharded_load
from holdfast.torch.ranks import replicas
from holdfast.torch.ranks.load_sharded import load_sharded
from holdfast.torch.ranks.replicas import WORTH_NBYTES, Offers, ReadAssignments, deal_pieces
from holdfast.torch.ranks.save_sharded import save_sharded
from holdfast.torch.tensors import slices as slices_module
from tests.ranks.pool import Pool, World, failures, good
from tests.ranks.states import check, sharded, state_of
from tests.ranks.test_failures import instead
from tests.sampling import examples

pytestmark = pytest.mark.timeout(120)

KIB = 1024


# Who reads what: against what is obvious and slow.


def offers(wanted: Mapping[str, int], *, device: str = "cpu", apart: int = 0) -> Offers:
    """What a rank offers that wants pieces of these names and lengths."""
    keys = b"".join(hashlib.blake2b(name.encode(), digest_size=16).digest() for name in wanted)
    return Offers(
        keys,
        np.array([*wanted.values()], "<i8").tobytes(),
        bytes([device == "cpu"] * len(wanted)),
        apart,
    )


def told(
    wanted: Mapping[str, int], assignments: ReadAssignments
) -> list[tuple[str, int, list[int]]]:
    """Names, readers and holders, in the order of all ranks, as one rank hears of them."""
    names = [*wanted]
    columns = zip(assignments.offered, assignments.readers, assignments.classes, strict=True)
    return [(names[number], reader, assignments.sets[its]) for number, reader, its in columns]


def least_load(pieces: Mapping[str, tuple[int, list[int]]], apart: list[int]) -> int:
    """The greatest load of the best of all ways to deal."""
    best = None
    for picks in itertools.product(*(holders for _, holders in pieces.values())):
        loads = list(apart)
        for (nbytes, _), rank in zip(pieces.values(), picks, strict=True):
            loads[rank] += nbytes
        best = max(loads) if best is None else min(best, max(loads))
    assert best is not None
    return best


@st.composite
def families(draw: st.DrawFn) -> tuple[int, dict[str, tuple[int, list[int]]], list[int]]:
    size = draw(st.integers(1, 4))
    holders = st.lists(st.integers(0, size - 1), unique=True, min_size=1).map(sorted)
    pieces = draw(st.lists(st.tuples(st.integers(1, 100), holders), max_size=6))
    apart = draw(st.lists(st.integers(0, 50), min_size=size, max_size=size))
    return size, {f"w{number}": piece for number, piece in enumerate(pieces)}, apart


@settings(max_examples=examples(300), deadline=None)
@given(families(), st.randoms(use_true_random=False))
def test_every_piece_is_read_by_one_holder_and_got_by_the_others(family, random):
    size, pieces, apart = family
    wanted: list[dict[str, int]] = []
    for rank in range(size):
        own = [name for name, (_, holders) in pieces.items() if rank in holders]
        random.shuffle(own)
        wanted.append({name: pieces[name][0] for name in own})
    dealt = deal_pieces(
        [offers(own, apart=more) for own, more in zip(wanted, apart, strict=True)],
        "broadcast",
        remote=False,
    )
    several = {name: holders for name, (_, holders) in pieces.items() if len(holders) > 1}
    assert {one.any for one in dealt} == {bool(several)}
    readers: dict[str, int] = {}
    loads = list(apart)
    got: list[list[str]] = [[] for _ in range(size)]
    orders: dict[tuple[int, ...], dict[int, list[tuple[str, int]]]] = {}
    for rank, (own, assignments) in enumerate(zip(wanted, dealt, strict=True)):
        heard = told(own, assignments)
        assert {name for name, _, _ in heard} == {name for name in several if name in own}
        for name, reader, holders in heard:
            assert holders == several[name]
            assert reader in holders
            assert readers.setdefault(name, reader) == reader, "all holders hear of one reader"
            orders.setdefault(tuple(holders), {}).setdefault(rank, []).append((name, reader))
            got[rank] += [name] if reader != rank else []
        loads[rank] += sum(nbytes for name, nbytes in own.items() if name not in several)
    for name, reader in readers.items():
        loads[reader] += pieces[name][0]
        for rank in several[name]:
            assert got[rank].count(name) == (rank != reader), "exactly once"
    for holders, lists in orders.items():
        assert len({tuple(one) for one in lists.values()}) == 1, (
            "the members of a set send and get in one order"
        )
        assert set(lists) == set(holders)
    largest = max((nbytes for nbytes, holders in pieces.values() if len(holders) > 1), default=0)
    assert max(loads) <= least_load(pieces, apart) + largest


def test_only_what_is_wanted_alike_is_shared():
    first, second = {"a": 5, "b": 5, "c": 5}, {"c": 5, "other a": 5, "d": 5}
    one, other = deal_pieces([offers(first), offers(second)], "broadcast", remote=False)
    assert told(first, one) == told(second, other) == [("c", 0, [0, 1])]
    assert not any(
        one.any for one in deal_pieces([offers(first), offers(first)], "read", remote=True)
    )
    assert not deal_pieces([offers(first)], "broadcast", remote=True)[0].any, (
        "one rank has nobody to read for"
    )
    assert not deal_pieces([offers({}), offers({})], "broadcast", remote=True)[0].any


def test_hashes_that_are_half_alike_are_two_pieces():
    left, right = (
        Offers(bytes(8) + bytes([n] * 8), np.array([5], "<i8").tobytes(), b"\1", 0) for n in (1, 2)
    )
    assert not deal_pieces([left, right], "broadcast", remote=True)[0].any


@pytest.mark.parametrize(("device", "machines", "nbytes", "handed"), [
    ("cpu", False, WORTH_NBYTES, False),
    ("cpu", True, WORTH_NBYTES, True),
    ("cpu", True, WORTH_NBYTES - 1, False),
    ("cuda", False, WORTH_NBYTES, True),
])  # fmt: skip
def test_auto(device: str, machines: bool, nbytes: int, handed: bool):
    one = offers({"a": nbytes}, device=device)
    assert deal_pieces([one, one], "auto", remote=machines)[0].any == handed


# Ranks that load.


def content(
    names: Mapping[str, tuple[int, ...]], dtype: torch.dtype = torch.float32
) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        name: torch.randint(-100, 100, shape, generator=generator).to(dtype)
        for name, shape in names.items()
    }


LARGE = {
    "embed": (2000, 256),
    "empty": (0, 4),
    "scalar": (),
    **{f"layers.{i}.w": (200 + i, 64) for i in range(20)},
}
ONE = {"embed": (1024, 257)}
SMALL = {f"w{i}": (3,) for i in range(20_000)}


@pytest.fixture
def step(tmp_path: Path) -> Callable[..., tuple[str, int]]:
    """A checkpoint of these shapes, and how many bytes one process reads of it."""

    def save(
        names: Mapping[str, tuple[int, ...]], dtype: torch.dtype = torch.float32
    ) -> tuple[str, int]:
        path = str(tmp_path / "step")
        save_sharded(path, content(names, dtype), durable=False)
        blank = {name: torch.zeros_like(tensor) for name, tensor in content(names, dtype).items()}
        return path, load_sharded(path, blank).read_nbytes

    return save


Wanted = Callable[[World, str, torch.Tensor], object]
"""What a rank wants under a name, filled with the elements of the checkpoint."""


def plain(world: World, name: str, whole: torch.Tensor) -> object:
    return whole.clone()


def hybrid(world: World, name: str, whole: torch.Tensor) -> object:
    """HSDP: two replicas of two shards."""
    return (
        sharded(whole, world.mesh(2, 2), (Replicate(), Shard(0))) if whole.ndim else whole.clone()
    )


def tensor_parallel(world: World, name: str, whole: torch.Tensor) -> object:
    """Rows that two ranks have alike, along one axis of the mesh or the other; some rows of each rank alone; some for everybody."""
    kinds = [(Shard(0), Replicate()), (Replicate(), Shard(0)), (Shard(0), Shard(0)), None]
    placements = kinds[len(name) % 4] if whole.ndim else None
    return whole.clone() if placements is None else sharded(whole, world.mesh(2, 2), placements)


def crossing(world: World, name: str, whole: torch.Tensor) -> object:
    """Each tensor for another set of ranks, by one rule; a rank that is not in it has its own rows alone."""
    number = sum(map(ord, name))
    if not whole.ndim or world.rank in {
        number % world.size,
        (number // 2) % world.size,
        (number // 3) % world.size,
    }:
        return whole.clone()
    return sharded(whole, world.mesh(), (Shard(0),))


def strided(world: World, name: str, whole: torch.Tensor) -> object:
    """Nothing that could be received as it is."""
    return whole.repeat_interleave(2, dim=-1)[..., ::2] if whole.ndim else whole.clone()


def local(value: object) -> torch.Tensor:
    return getattr(value, "_local_tensor", value)


def count_messages(held: ExitStack) -> list[int]:
    sent: list[int] = []
    real = dist.batch_isend_irecv

    def counted(ops: list[dist.P2POp]) -> object:
        sent.extend(op.tensor.numel() for op in ops if op.op is dist.isend)
        return real(ops) if ops else []

    held.enter_context(instead(dist, "batch_isend_irecv", counted))
    return sent


def load(
    world: World,
    path: str,
    names: dict[str, tuple[int, ...]],
    wanted: Wanted,
    options: dict[str, object],
) -> tuple[int, int, list[int]]:
    """What was needed and read on this rank, and the messages that it sent. Values are compared."""
    options = {"replicated": "broadcast", "deadline": 20, **options}
    dtype = options.pop("dtype", torch.float32)
    expected = {name: wanted(world, name, whole) for name, whole in content(names).items()}
    state = {
        name: wanted(world, name, torch.zeros_like(whole, dtype=dtype))
        for name, whole in content(names).items()
    }
    versions = {name: local(value)._version for name, value in state.items()}
    with ExitStack() as held:
        held.enter_context(instead(sharded_load, "PART_NBYTES", options.pop("part", 64 * KIB)))
        sent = count_messages(held)
        loaded = load_sharded(path, state, group=world.group, **options)
    for name, value in state.items():
        assert torch.equal(local(value), local(expected[name]).to(dtype)), name
        assert local(value)._version > versions[name] or not local(value).numel(), (
            "autograd must know"
        )
    return loaded.needed_nbytes, loaded.read_nbytes, sent


ALIKE = {"ddp": plain, "hsdp": hybrid, "tensor parallel": tensor_parallel}


@pytest.mark.parametrize("verify", [True, False], ids=["verified", "unverified"])
@pytest.mark.parametrize("wanted", ALIKE.values(), ids=ALIKE)
def test_four_replicas_read_what_one_process_reads(pool: Pool, step, wanted: Wanted, verify: bool):
    path, alone = step(LARGE)
    each = good(pool.run(4, load, path, LARGE, wanted, {"replicated": "read", "verify": verify}))
    once = good(pool.run(4, load, path, LARGE, wanted, {"verify": verify}))
    assert [needed for needed, *_ in once] == [needed for needed, *_ in each]
    assert sum(read for _, read, _ in once) <= 1.05 * alone < 0.8 * sum(read for _, read, _ in each)
    assert max(read for _, read, _ in once) < 1.3 * alone / 4, "all read about as much"


def test_sets_that_cross(pool: Pool, step):
    path, _ = step(LARGE)
    each = good(pool.run(4, load, path, LARGE, crossing, {"replicated": "read"}))
    once = good(pool.run(4, load, path, LARGE, crossing, {}))
    assert sum(read for _, read, _ in once) < 0.7 * sum(read for _, read, _ in each)


def test_one_large_tensor_is_read_by_all(pool: Pool, step):
    path, alone = step(ONE)
    once = good(pool.run(4, load, path, ONE, plain, {}))
    assert sum(read for _, read, _ in once) <= 1.05 * alone
    assert max(read for _, read, _ in once) < 0.3 * alone
    assert all(0 < sum(sent) < 0.3 * alone * 3 for *_, sent in once)


def test_small_tensors_share_messages(pool: Pool, step):
    path, alone = step(SMALL)
    once = good(pool.run(4, load, path, SMALL, plain, {}))
    assert sum(read for _, read, _ in once) <= 1.05 * alone
    assert [len(sent) for *_, sent in once] == [3] * 4, (
        "one to each of the others, for 5,000 tensors"
    )


def test_casts_are_handed_on_as_they_became(pool: Pool, step):
    path, alone = step(LARGE, torch.bfloat16)
    once = good(pool.run(4, load, path, LARGE, plain, {"cast": True}))
    assert sum(read for _, read, _ in once) <= 1.05 * alone
    other = good(pool.run(4, load, path, LARGE, plain, {"cast": True, "dtype": torch.float64}))
    assert sum(read for _, read, _ in other) <= 1.05 * alone


def test_what_has_gaps_is_read_by_everybody(pool: Pool, step):
    path, alone = step(ONE)
    once = good(pool.run(4, load, path, ONE, strided, {}))
    assert [read for _, read, _ in once] == [alone] * 4
    assert all(sent == [] for *_, sent in once)


def load_tied(world: World, path: str) -> int:
    memory = torch.zeros(1024 * 257 + 100)
    state = {
        "embed": memory[: 1024 * 257].view(1024, 257),
        "over": memory[100:][: 1024 * 257].view(1024, 257),
    }
    loaded = load_sharded(path, state, group=world.group, replicated="broadcast", deadline=20)
    assert torch.equal(
        state["over"], content({"embed": (1024, 257), "over": (1024, 257)})["over"]
    ), "the last one wins"
    return loaded.read_nbytes


def test_targets_that_overlap_are_read_by_everybody(pool: Pool, step):
    path, alone = step({"embed": (1024, 257), "over": (1024, 257)})
    assert good(pool.run(3, load_tied, path)) == [alone] * 3


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("format", ["native", "dcp"])
def test_checkpoints_of_other_ranks(pool: Pool, saved, format: str, size: int):
    path = str(saved(format, 4))
    each = good(pool.run(size, load_handing_on, path, "read"))
    once = good(pool.run(size, load_handing_on, path, "broadcast"))
    assert [needed for needed, _ in once] == [needed for needed, _ in each]
    assert sum(read for _, read in once) < sum(read for _, read in each)


def load_handing_on(world: World, path: str, how: str) -> tuple[int, int]:
    state = state_of(world, nested=True, blank=True)
    with instead(sharded_load, "PART_NBYTES", 16):
        loaded = load_sharded(path, state, group=world.group, replicated=how)
    check(world, state, nested=True, other=False)
    return loaded.needed_nbytes, loaded.read_nbytes


# Failures.


def fail_on_one(world: World, path: str) -> None:
    def broken(*_: object, **__: object) -> list[str]:
        raise OSError("the disk is on fire")

    with ExitStack() as held:
        if world.rank == 1:
            held.enter_context(instead(sharded_load, "fill", broken))
        load_sharded(
            path,
            state_of(world, nested=True, blank=True),
            group=world.group,
            replicated="broadcast",
            deadline=20,
        )


def test_nobody_waits_for_a_rank_that_failed(pool: Pool, saved):
    said = failures(pool.run(3, fail_on_one, str(saved("native", 2))))
    assert {failure.kinds[0] for failure in said} == {"RanksFailed"}
    assert all("rank 1: OSError: the disk is on fire" in str(failure) for failure in said)


def spoil(path: str, tensor: torch.Tensor, at: int) -> None:
    """One bit of a tensor becomes another, in whichever file it is."""
    raw = tensor.numpy().tobytes()
    for file in Path(path).glob("*.safetensors"):
        data = bytearray(file.read_bytes())
        if (start := data.find(raw)) >= 0:
            data[start + at] ^= 1
            file.write_bytes(data)
            return
    raise AssertionError("no file has it")


@pytest.mark.parametrize("part", [64 * KIB, 16 << 20], ids=["cut", "whole"])
@pytest.mark.parametrize("at", [0, 300_001, 1024 * 257 * 4 - 1])
def test_a_damaged_tensor_is_named_on_every_rank(pool: Pool, step, at: int, part: int):
    path, _ = step({**ONE, "other": (5,)})
    spoil(path, content(ONE)["embed"], at)
    said = failures(pool.run(4, load, path, {**ONE, "other": (5,)}, plain, {"part": part}))
    assert len({str(one) for one in said}) == 1
    assert "Corrupted" in said[0].text
    assert "embed" in said[0].text
    assert "some tensors have been changed" in said[0].text


PAIR = {"abc": (1024, 64), "rows": (64, 64)}


def for_two(world: World, name: str, whole: torch.Tensor) -> object:
    """One tensor that the first two ranks have whole; the others have rows of it, which no checksum is of."""
    return (
        whole.clone()
        if name == "rows" or world.rank < 2
        else sharded(whole, world.mesh(2, 2), (Shard(0), Replicate()))
    )


def test_damage_reaches_those_who_do_not_have_the_tensor(pool: Pool, step):
    path, _ = step(PAIR)
    spoil(path, content(PAIR)["abc"], 200_000)
    said = failures(pool.run(4, load, path, PAIR, for_two, {"part": 16 * KIB}))
    assert len({str(one) for one in said}) == 1
    assert said[0].facts["causes"].keys() == {0, 1}
    assert all(
        "Corrupted" in cause and "abc" in cause for cause in said[0].facts["causes"].values()
    )


def resume_checked(world: World, path: str, names: dict[str, tuple[int, ...]]) -> bool:
    from holdfast.torch.ranks.load_sharded import ShardedLoad, load_together

    state = {name: torch.zeros_like(whole) for name, whole in content(names).items()}
    request = ShardedLoad(
        path, state, world.group, True, "own", False, None, 20.0, replicated="broadcast", check=True
    )
    try:
        with instead(sharded_load, "PART_NBYTES", 64 * KIB):
            load_together(request)
    except holdfast.errors.RanksFailed:
        return not any(tensor.any() for tensor in state.values())
    raise AssertionError("the damage was not found")


def test_a_check_before_anything_is_changed_covers_what_is_cut(pool: Pool, step):
    path, _ = step({**ONE, "other": (5,)})
    spoil(path, content(ONE)["embed"], 300_001)
    assert good(pool.run(4, resume_checked, path, {**ONE, "other": (5,)})) == [True] * 4


def disagree(world: World, path: str) -> None:
    load_sharded(
        path,
        state_of(world, nested=True, blank=True),
        group=world.group,
        replicated="auto" if world.rank else "read",
    )


def test_ranks_that_ask_for_different_things(pool: Pool, saved):
    said = failures(pool.run(2, disagree, str(saved("native", 2))))
    assert all(
        "it was called to load (replicated=auto), but rank 0 to load (replicated=read)"
        in str(failure)
        for failure in said
    )


def test_another_word(tmp_path: Path):
    with pytest.raises(
        ValueError, match="replicated= takes 'auto', 'read' or 'broadcast', not 'send'"
    ):
        load_sharded(tmp_path, {}, replicated="send")


DEADLINE = 3.0


def end_one(
    world: World, path: str, names: dict[str, tuple[int, ...]], victim: int, how: int, room: str
) -> None:
    """A rank ends, or stops, when it is about to send; the others write down what they raise, and when."""
    state = {name: torch.zeros_like(whole) for name, whole in content(names).items()}
    if world.rank == victim:
        sharded_load.hand_on = lambda *_, **__: os.kill(os.getpid(), how)
    begun = time.monotonic()
    try:
        load_sharded(path, state, group=world.group, replicated="broadcast", deadline=DEADLINE)
        said = "returned"
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    Path(room, f"{world.rank}.part").write_text(f"{time.monotonic() - begun:.2f}\n{said}")
    Path(room, f"{world.rank}.part").rename(Path(room, str(world.rank)))
    time.sleep(
        30
    )  # the pool is ended by the test; a store must not go before the others have spoken


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
@pytest.mark.parametrize("victim", [0, 2])
def test_a_rank_that_ends_while_it_hands_on_ends_the_others(
    step, tmp_path: Path, how: int, victim: int
):
    path, _ = step(ONE)
    pool = Pool()
    others = [rank for rank in range(3) if rank != victim]
    try:
        pool.run(3, group_is_used)
        begun = time.monotonic()
        for _, pipe in pool._workers[:3]:
            pipe.send((3, end_one, (path, ONE, victim, int(how), str(tmp_path))))
        while not all((tmp_path / str(rank)).exists() for rank in others):
            assert time.monotonic() - begun < 60, "somebody waits for ever"
            time.sleep(0.05)
    finally:
        pool.close()
    for rank in others:
        seconds, said = (tmp_path / str(rank)).read_text().split("\n", 1)
        assert said.startswith(("RankLost", "RanksFailed")), said
        assert f"rank {victim}" in said
        assert float(seconds) < 4 * DEADLINE, "twice the deadline, on a busy machine"


def group_is_used(world: World) -> None:
    """Connections are made: torch asks for the name of every address, which may take longer than the deadline."""
    sharded_load.ranks_of(world.group, doing="begin").close()
    world.barrier()


# Streams.


def stream(
    world: World, path: str, skips: dict[int, str], options: dict[str, object]
) -> tuple[list[str], int]:
    skip = skips.get(world.rank)
    with ExitStack() as held:
        held.enter_context(instead(slices_module, "BATCH_NBYTES", 256 * KIB))
        held.enter_context(instead(replicas, "PART_NBYTES", 32 * KIB))
        found = held.enter_context(slices(path, group=world.group, deadline=20, **options))
        names, expected = [], holdfast.torch.load_full(path)
        for name, tensor in found.stream(
            skip=None if skip is None else lambda name: name.startswith(skip)
        ):
            names.append(name)
            assert torch.equal(tensor, expected[name])
            assert (
                torch.equal(found[name][...], expected[name])
                if name in ("scalar", "empty")
                else True
            )
        return names, found._checkpoint.source.read_nbytes


def test_a_stream_is_read_once(pool: Pool, step):
    path, alone = step(LARGE)
    found = good(pool.run(4, stream, path, {}, {}))
    assert all(sorted(names) == sorted(LARGE) for names, _ in found)
    assert len({tuple(names) for names, _ in found}) == 1
    assert sum(read for _, read in found) <= 1.05 * alone + 4 * 4, (
        "and the scalar that each rank has indexed"
    )
    assert max(read for _, read in found) < 1.4 * alone / 4
    skipped = good(pool.run(3, stream, path, dict.fromkeys(range(3), "layers.1"), {}))
    assert all(
        names == [name for name in found[0][0] if not name.startswith("layers.1")]
        for names, _ in skipped
    )


def test_ranks_that_skip_other_names(pool: Pool, step):
    path, _ = step(LARGE)
    said = failures(pool.run(3, stream, path, {2: "layers.1"}, {}))
    assert len({str(one) for one in said}) == 1
    assert (
        "rank 2 would stream other tensors than rank 0: skip= is to say the same on all ranks"
        in said[0].text
    )
    said = failures(pool.run(2, stream_mapped_on_one, path))
    assert all("mmap=True" in str(one) for one in said)


def stream_mapped_on_one(world: World, path: str) -> None:
    stream(world, path, {}, {"mmap": world.rank == 1})


@pytest.mark.parametrize("name", ["embed", "layers.7.w"])
def test_a_damaged_tensor_of_a_stream_is_named_on_every_rank(pool: Pool, step, name: str):
    path, _ = step(LARGE)
    spoil(path, content(LARGE)[name], 1234)
    said = failures(pool.run(3, stream_damaged, path))
    assert len({str(one) for one in said}) == 1
    assert "Corrupted" in said[0].text
    assert name in said[0].text


def stream_damaged(world: World, path: str) -> None:
    with (
        instead(replicas, "PART_NBYTES", 32 * KIB),
        slices(path, group=world.group, deadline=20) as found,
    ):
        for _ in found.stream():
            pass
