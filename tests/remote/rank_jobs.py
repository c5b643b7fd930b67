"""What ranks do with object stores: jobs for the pool of `tests.ranks`, and ranks of their own that may be killed."""

from __future__ import annotations

import json
import os
import time
from contextlib import AbstractContextManager
from datetime import timedelta
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from holdfast.errors import HoldfastError
from holdfast.integrations.dcp import Reader, Writer
from holdfast.stores.remote.client import HedgeDelays
from holdfast.torch import Run, async_save_sharded, load_sharded, save_sharded
from tests.ranks.pool import World
from tests.ranks.states import check, state_of


def state(number: int, rank: int, size: int, rows: int = 1) -> dict[str, object]:
    """What says of itself in which save it was written: something replicated, and rows of each rank, each in another object."""
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

    class Rows:
        shape, dtype = torch.Size((rows * size, 3000)), torch.float32

        def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
            return [
                ChunkStorageMetadata(torch.Size((rank + size * i, 0)), torch.Size((1, 3000)))
                for i in range(rows)
            ]

        def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
            return torch.full((1, 3000), float(number))

    return {"rows": Rows(), "plain": torch.full((500,), float(number)), "step": number}


def save(
    world: World, environment: dict[str, str], url: str, format: str, nested: bool
) -> tuple[str, ...]:
    os.environ.update(environment)
    saved = save_sharded(url, state_of(world, nested=nested), group=world.group, format=format)
    return tuple(name for name, _ in saved.files)


def load(world: World, environment: dict[str, str], url: str, nested: bool) -> tuple[int, int]:
    """Cut as it was, and cut otherwise."""
    os.environ.update(environment)
    needed = read = 0
    for other in (False, True):
        found = state_of(world, nested=nested, blank=True, other=other)
        loaded = load_sharded(url, found, group=world.group)
        check(world, found, nested=nested, other=other)
        needed, read = needed + loaded.needed_nbytes, read + loaded.read_nbytes
    return needed, read


def numbered(
    world: World,
    environment: dict[str, str],
    url: str,
    number: int,
    options: dict[str, object],
    background: bool = False,
) -> tuple[str, ...]:
    """Save a state that says its number."""
    os.environ.update(environment)
    content = state(number, world.rank, world.size)
    if background:
        saved = async_save_sharded(content, url, group=world.group, **options).wait(60)
    else:
        saved = save_sharded(content, url, group=world.group, **options)
    return tuple(name for name, _ in saved.files)


def pieces(
    world: World, environment: dict[str, str], url: str, number: int, options: dict[str, object]
) -> tuple[str, ...]:
    """Save the tensors of a state that says its number as safetensors files."""
    os.environ.update(environment)
    content = state(number, world.rank, world.size)
    del content["step"]
    saved = save_sharded(content, url, group=world.group, format="safetensors", **options)
    return tuple(name for name, _ in saved.files)


def as_group(
    world: World, environment: dict[str, str], url: str, lines: tuple[tuple[int, ...], ...]
) -> str:
    """Several groups save to one place at once; which of them this rank was in, and how that ended."""
    os.environ.update(environment)
    (mine,) = [line for line in lines if world.rank in line]
    number = lines.index(mine)
    dist.barrier(world.group)
    try:
        save_sharded(url, state(number, mine.index(world.rank), len(mine)), group=world.line(*mine))
        return f"{number} won"
    except HoldfastError as error:
        return f"{number} {type(error).__name__} {error}"


def background(world: World, environment: dict[str, str], url: str) -> list[float]:
    """Save in the background, and change the tensors and use collectives meanwhile."""
    os.environ.update(environment)
    whole = torch.arange(8 * 1000, dtype=torch.float32).reshape(8, 1000)
    mesh = world.mesh()
    from torch.distributed.tensor import Shard

    from tests.ranks.states import sharded

    cut = sharded(whole, mesh, (Shard(0),))
    handle = async_save_sharded({"cut": cut, "plain": whole}, url, group=world.group)
    cut.to_local().zero_()
    summed = torch.ones(1)
    for _ in range(20):
        dist.all_reduce(summed, group=world.group)
        summed /= world.size
    handle.wait(60)
    found = {"cut": sharded(whole, mesh, (Shard(0),), blank=True), "plain": torch.zeros_like(whole)}
    load_sharded(url, found, group=world.group)
    assert torch.equal(found["plain"], whole)
    check_cut = found["cut"].to_local()
    assert torch.equal(check_cut, sharded(whole, mesh, (Shard(0),)).to_local())
    return summed.tolist()


def without_second_requests() -> AbstractContextManager[object]:
    """Turn off the requests that are sent twice if an answer is late. Tests that count bytes need it."""
    return mock.patch.object(HedgeDelays, "get_delay_s", return_value=60.0)


def replicated(world: World, environment: dict[str, str], url: str, elements: int, how: str) -> int:
    """Load something that all ranks want whole, and rows of which each wants its own."""
    os.environ.update(environment)
    from torch.distributed.tensor import Shard

    from tests.ranks.states import sharded

    mesh = world.mesh()
    rows = torch.zeros(world.size, elements)
    found = {"plain": torch.zeros(elements), "rows": sharded(rows, mesh, (Shard(0),), blank=True)}
    with without_second_requests():
        loaded = load_sharded(url, found, group=world.group, replicated=how)
    assert torch.equal(found["plain"], torch.arange(elements, dtype=torch.float32))
    assert torch.equal(
        found["rows"].to_local(), torch.arange(elements, dtype=torch.float32)[None] + world.rank
    )
    return loaded.read_nbytes


def stock(
    world: World, environment: dict[str, str], url: str, ways: tuple[str, str], folder: str
) -> None:
    """torch's own `dcp.save` and `dcp.load` through our storage; or what `save_sharded` wrote, and what torch's reader finds."""
    os.environ.update(environment)
    saves, loads = ways
    if saves == "writer":
        # As files of their own, and given as torch's own argument, once in a while.
        writer = Writer(url) if loads != "stock" else Writer(single_file_per_rank=False)
        dcp.save(
            state_of(world), checkpoint_id=url, storage_writer=writer, process_group=world.group
        )
    else:
        save_sharded(url, state_of(world), group=world.group, format="dcp")
    dist.barrier(world.group)
    found = state_of(world, blank=True, other=True)
    if loads == "reader":
        dcp.load(found, storage_reader=Reader(url), process_group=world.group)
    elif loads == "ours":
        load_sharded(url, found, group=world.group)
    else:
        if world.rank == 0:
            download(url, folder)
            assert b"holdfast" not in (Path(folder) / ".metadata").read_bytes(), (
                "nothing of ours is needed to read it"
            )
        dist.barrier(world.group)
        dcp.load(found, checkpoint_id=folder, process_group=world.group)
    check(world, found, other=True)
    dist.barrier(world.group)


def download(url: str, folder: str) -> None:
    """The objects below a prefix, as files."""
    from holdfast.stores.remote.client import get_bucket
    from holdfast.stores.remote.url import parse_url

    where = parse_url(url)
    bucket = get_bucket(where)
    Path(folder).mkdir()
    for one in bucket.list_objects(where.key + "/", 1000):
        (Path(folder) / one.key.rpartition("/")[2]).write_bytes(
            bucket.get_object(one.key, 1 << 30).data
        )


def rewritten(world: World, environment: dict[str, str], url: str, overwrite: bool) -> str:
    """Save once more through torch, over what is there; the kind of error, if any."""
    os.environ.update(environment)
    from torch.distributed.checkpoint.api import CheckpointException

    writer = Writer(url, overwrite=overwrite)
    try:
        content = {f"w{world.rank}": torch.ones(4), "step": 1}
        dcp.save(content, storage_writer=writer, process_group=world.group)
    except (CheckpointException, HoldfastError) as error:
        writer.close()  # or the collector does it
        return str(error)
    return "saved"


def lone(
    environment: dict[str, str], room: str, rank: int, size: int, url: str, step: int | None = None
) -> None:
    """A rank of its own, for those that are killed: a save over what is there, or of a step, with a short deadline."""
    os.environ.update(environment)
    answer = Path(room) / f"{rank}"
    try:
        store = dist.FileStore(str(Path(room) / "store"), size)
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=60)
        )
        content = state(1, rank, size, rows=2)
        dist.barrier()
        said = {"began": time.time()}
        try:
            if step is None:
                save_sharded(url, content, overwrite=True, deadline=3)
            else:
                Run(url, deadline=3).save(step, content)
            said["kind"] = "saved"
        except HoldfastError as error:
            said |= {"kind": type(error).__name__, "text": str(error)}
        answer.write_text(json.dumps(said))
    finally:
        os._exit(0)


def run_of(
    world: World, environment: dict[str, str], url: str, steps: list[int], background: bool
) -> list[int]:
    """Save these steps of a run; those that are there then."""
    os.environ.update(environment)
    with Run(url, keep="latest:2", group=world.group, deadline=30) as run:
        for step in steps:
            save = run.async_save if background else run.save
            save(step, run_state(world, step), metrics={"loss": 1 / step})
            if background:
                assert run.wait().step == step
        return [step.step for step in run]


def run_state(world: World, number: int) -> dict[str, object]:
    """Rows and something replicated that change, and rows that never do."""
    from torch.distributed.tensor import Shard

    from tests.ranks.states import sharded

    rows = sharded(torch.full((8, 40), float(number)), world.mesh(), (Shard(0),))
    frozen = sharded(torch.arange(8 * 500.0).reshape(8, 500), world.mesh(), (Shard(0),))
    return {
        "rows": rows,
        "frozen": frozen,
        "plain": torch.full((30,), float(number)),
        "step": number,
    }


def run_resumed(world: World, environment: dict[str, str], url: str) -> tuple[object, ...]:
    os.environ.update(environment)
    run, into = Run(url, group=world.group, deadline=30), run_state(world, 0)
    into["frozen"].to_local().zero_()
    assert run.resume(into=into) is into
    assert torch.equal(into["frozen"].to_local(), run_state(world, 0)["frozen"].to_local())
    values = {*into["rows"].to_local().reshape(-1).tolist(), *into["plain"].tolist()}
    return (*values, into["step"], run.resumed.step, run.resumed.metrics["loss"])


def load_alike(
    world: World,
    environment: dict[str, str],
    url: str,
    shapes: dict[str, tuple[int, ...]],
    how: str,
) -> int:
    """Load everything on every rank, and return how many bytes it read. The elements are ones."""
    os.environ.update(environment)
    state = {name: torch.zeros(shape) for name, shape in shapes.items()}
    with without_second_requests():
        loaded = load_sharded(url, state, group=world.group, replicated=how)
    assert all(bool((tensor == 1).all()) for tensor in state.values())
    return loaded.read_nbytes
