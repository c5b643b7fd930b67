"""A failure anywhere is everybody's: all ranks raise the same error, nothing is published or changed, and nobody waits for ever."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Shard

import holdfast
from holdfast.engine.commit.transactions import DirectoryTransaction
from holdfast.formats.native import boxes
from holdfast.ranks import together
from holdfast.ranks import write as rank_files
from holdfast.stores.files import Files
from holdfast.torch.ranks import load_sharded as sharded_load
from holdfast.torch.ranks import saving as sharded_save
from holdfast.torch.ranks.load_sharded import load_sharded
from holdfast.torch.ranks.save_sharded import save_sharded
from tests.ranks.pool import Failure, Pool, World, failures, good
from tests.ranks.states import sharded
from tests.support import element_bytes

pytestmark = pytest.mark.timeout(120)

SIZE = 3
FORMATS = ("native", "dcp", "safetensors")


@contextmanager
def instead(owner: object, name: str, value: object) -> Iterator[None]:
    """Something else under a name, for a while."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def state_of(world: World, number: float) -> dict[str, object]:
    """A state that is full of one number; room is made for the file of each rank before it is written, as for all large ones."""
    rows = sharded(torch.full((7, 80_000), number), world.mesh(), (Shard(0),))
    return {"rows": rows, **{f"plain{i}": torch.full((30,), number) for i in range(4)}}


def save_number(world: World, path: str, number: float, format: str = "native") -> None:
    save_sharded(
        path,
        state_of(world, number),
        group=world.group,
        format=format,
        overwrite=True,
        durable=False,
    )


def number_at(path: Path) -> float:
    """The number that a checkpoint is full of."""
    assert holdfast.verify(path).ok
    with holdfast.open(path) as ckpt:
        assert sorted(ckpt) == [*(f"plain{i}" for i in range(4)), "rows"]
        found = {float(n) for array in ckpt.read().values() for n in array.reshape(-1).tolist()}
    assert len(found) == 1
    return found.pop()


def check_failed(
    answers: list[object], path: Path, *, kept: float | None, mentions: dict[int, str]
) -> Failure:
    """All ranks raised the same, with the causes of these ranks; what was there is there, and nothing else is."""
    raised = failures(answers)
    # A refusal is the same on all ranks, and one of the kind as well.
    assert {one.kinds[0] for one in raised} in ({"RanksFailed"}, {"RanksRefused"}), [
        str(one) for one in raised
    ]
    assert all("RanksFailed" in one.kinds for one in raised)
    assert {"NotCommitted", "SaveError", "OSError", "HoldfastError"} <= set(raised[0].kinds)
    assert len({one.text for one in raised}) == 1
    assert all(one.facts["causes"] == raised[0].facts["causes"] for one in raised)
    causes = raised[0].facts["causes"]
    assert causes.keys() == mentions.keys(), causes
    for rank, text in mentions.items():
        assert text in causes[rank]
        assert text in raised[0].text
    assert [p.name for p in path.parent.iterdir()] == ([path.name] if kept is not None else [])
    if kept is not None:
        assert number_at(path) == kept
    return raised[0]


# An exception at any step on any rank.


class Stubborn(nn.Module):
    def state_dict(self, *args: object, **kwargs: object) -> dict[str, object]:
        raise LookupError("no state today")


def _raising(error: Exception) -> Callable[..., object]:
    def call(*args: object, **kwargs: object) -> object:
        raise error

    return call


def _full_after(nbytes: int, *, method: str) -> Callable[..., object]:
    """A file system that is full after so many bytes."""
    before = getattr(Files, method)
    left = nbytes

    def call(self: Files, descriptor: int, data: object, *more: object) -> object:
        nonlocal left
        left -= data if isinstance(data, int) else len(data)
        if left < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return before(self, descriptor, data, *more)

    return call


def fail_at(world: World, path: str, rank: int, step: str, format: str) -> None:
    """A save in which one rank fails."""
    state = state_of(world, 2.0)
    if world.rank != rank:
        save_sharded(path, state, group=world.group, format=format, overwrite=True)
        return
    match step:
        case "state_dict":
            save_sharded(path, Stubborn(), group=world.group, format=format, overwrite=True)
        case "describe":
            state["sum"] = DTensor.from_local(
                torch.ones(3), world.mesh(), [Partial()], run_check=False
            )
            save_sharded(path, state, group=world.group, format=format, overwrite=True)
        case "value":
            state["strange"] = _raising(ValueError())
            save_sharded(path, state, group=world.group, format=format, overwrite=True)
        case "plan":
            with instead(
                together, "plan_ranks", _raising(ZeroDivisionError("a bug in the planner"))
            ):
                save_sharded(path, state, group=world.group, format=format, overwrite=True)
        case "task":
            with instead(boxes.Boxes, "cut", _raising(RuntimeError("a bug after the plan"))):
                save_sharded(path, state, group=world.group, format=format, overwrite=True)
        case "layout":
            with instead(sharded_save, "spread", _raising(RuntimeError("a bug in the layout"))):
                save_sharded(path, state, group=world.group, format=format, overwrite=True)
        case "pwrite" | "allocate":
            with instead(Files, step, _full_after(100, method=step)):
                save_sharded(path, state, group=world.group, format=format, overwrite=True)
        case "sync":
            with instead(Files, "sync", _raising(OSError(errno.EIO, os.strerror(errno.EIO)))):
                save_sharded(path, state, group=world.group, format=format, overwrite=True)
        case "publish":
            with instead(
                DirectoryTransaction, "commit", _raising(MemoryError("no memory for the commit"))
            ):
                save_sharded(path, state, group=world.group, format=format, overwrite=True)


ANYWHERE = {
    "state_dict": "LookupError: no state today",
    "describe": "its sum has not been made",
    "task": "a bug after the plan",
    "layout": "a bug in the layout",
    "pwrite": "the disk is full",
    "allocate": "the disk is full",
    "sync": "input/output error",
}
"""What goes wrong on whichever rank, and what all of them say about it."""
FIRST = {"plan": "a bug in the planner", "publish": "no memory for the commit"}
"""The same for what only the first rank does."""


@pytest.mark.parametrize(
    ("step", "rank"),
    [*((step, rank) for step in ANYWHERE for rank in range(SIZE)), *((step, 0) for step in FIRST)],
)
def test_a_rank_fails(pool: Pool, tmp_path: Path, step: str, rank: int):
    path, old = tmp_path / "step", rank != 1
    if old:
        good(pool.run(SIZE, save_number, str(path), 1.0))
    format = FORMATS[rank]
    text = {**ANYWHERE, **FIRST}[step]
    check_failed(
        pool.run(SIZE, fail_at, str(path), rank, step, format),
        path,
        kept=1.0 if old else None,
        mentions={rank: text},
    )
    good(pool.run(SIZE, save_number, str(path), 3.0, format))
    assert number_at(path) == 3.0
    assert [p.name for p in tmp_path.iterdir()] == ["step"]


@pytest.mark.parametrize("format", ["native", "safetensors"])
def test_a_value_that_cannot_be_kept(pool: Pool, tmp_path: Path, format: str):
    path = tmp_path / "step"
    mentions = {1: "CannotHold: this state cannot be saved so"}
    raised = check_failed(
        pool.run(SIZE, fail_at, str(path), 1, "value", format), path, kept=None, mentions=mentions
    )
    assert "strange: a" in raised.text


def fail_everywhere(world: World, path: str) -> None:
    with instead(
        sharded_save, "spread", _raising(RuntimeError(f"rank {world.rank} has its own trouble"))
    ):
        save_sharded(path, state_of(world, 2.0), group=world.group)


def test_every_rank_fails(pool: Pool, tmp_path: Path):
    mentions = {rank: f"rank {rank} has its own trouble" for rank in range(SIZE)}
    check_failed(
        pool.run(SIZE, fail_everywhere, str(tmp_path / "step")),
        tmp_path / "step",
        kept=None,
        mentions=mentions,
    )


def uncertain(world: World, path: str) -> None:
    """The last fsync fails: the checkpoint is there, but who knows for how long."""
    commit, sync = DirectoryTransaction.commit, Files.sync

    def last(self: DirectoryTransaction, before_rename: Callable[[], None]) -> None:
        self.seal_data()
        parents = set()

        def refused(files: Files, descriptor: int) -> None:
            if os.path.isdir(f"/proc/self/fd/{descriptor}") and os.path.exists(f"{path}"):
                parents.add(descriptor)
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            sync(files, descriptor)

        with instead(Files, "sync", refused):
            commit(self, before_rename)

    with instead(DirectoryTransaction, "commit", last):
        save_sharded(path, state_of(world, 2.0), group=world.group)


def test_a_publication_that_is_uncertain_is_not_called_a_failure(pool: Pool, tmp_path: Path):
    raised = failures(pool.run(SIZE, uncertain, str(tmp_path / "step")))
    assert {one.kinds[0] for one in raised} == {"DurabilityUncertain"}
    assert number_at(tmp_path / "step") == 2.0


# Ranks that do not agree.


def disagree(world: World, path: str, format: str) -> None:
    rank = world.rank
    state: dict[str, object] = {
        "fine": torch.ones(3),
        "shape": torch.ones(3 + rank),
        "dtype": torch.ones(3, dtype=torch.float64 if rank == 1 else torch.float32),
        "overlap": Boxes((6, 2), [(0, 4)] if rank == 0 else [(2 + rank, 6)] if rank == 1 else []),
        "hole": Boxes((6, 2), [(2 * rank, 2 * rank + 1)]),
        "outside": Boxes((6, 2), [(3 * rank, 3 * rank + 3)]),
    }
    if format != "safetensors":
        state |= {"same": [1, "x"], "value": rank, "nested": {"deep": {"value": rank > 1}}}
    save_sharded(path, state, group=world.group, format=format)


class Boxes:
    """Rows of a tensor, from and to, in torch's protocol."""

    def __init__(self, shape: tuple[int, ...], rows: list[tuple[int, int]]) -> None:
        self.shape, self.dtype, self.rows = torch.Size(shape), torch.float32, rows

    def __create_chunk_list__(self) -> list[object]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        return [
            ChunkStorageMetadata(torch.Size((a, 0)), torch.Size((b - a, self.shape[1])))
            for a, b in self.rows
        ]

    def __get_tensor_shard__(self, index: object) -> torch.Tensor:
        a, b = next(row for row in self.rows if row[0] == index.offset[0])
        return torch.ones(b - a, self.shape[1])


@pytest.mark.parametrize("format", FORMATS)
def test_ranks_that_disagree(pool: Pool, tmp_path: Path, format: str):
    path, mentions = tmp_path / "step", {0: "the ranks' states do not make one"}
    raised = check_failed(
        pool.run(SIZE, disagree, str(path), format), path, kept=None, mentions=mentions
    )
    names = [
        "shape",
        "dtype",
        "overlap",
        "hole",
        "outside",
        *(["value", "nested.deep.value"] if format != "safetensors" else []),
    ]
    lines = [line for line in raised.text.splitlines() if line.startswith("  - ")]
    assert len(lines) == len(names), raised.text
    for name in names:
        assert any(name in line for line in lines), (name, raised.text)
    for name in ("fine", "same"):
        assert not any(f"'{name}'" in line for line in lines)


def take_the_first(world: World, path: str, format: str) -> None:
    state = {"value": world.rank, "nested": {"value": [world.rank]}, "w": torch.ones(2)}
    save_sharded(path, state, group=world.group, format=format, values="first", durable=False)


@pytest.mark.parametrize("format", ["native", "dcp"])
def test_values_of_the_first_rank(pool: Pool, tmp_path: Path, format: str):
    good(pool.run(SIZE, take_the_first, str(tmp_path / "step"), format))
    with holdfast.open(tmp_path / "step") as ckpt:
        assert (ckpt.tree["value"], ckpt.tree["nested"]["value"]) == (0, [0])


def equal_but_not_identical(world: World, path: str, format: str) -> None:
    """Equal values whose pickles differ: one string twice, or two equal ones."""
    text = "some text that is not interned"
    pair = [text, text] if world.rank else [text, "".join(list(text))]
    save_sharded(
        path, {"w": torch.ones(2), "pair": pair}, group=world.group, format=format, durable=False
    )


@pytest.mark.parametrize("format", ["native", "dcp"])
def test_equal_values_agree(pool: Pool, tmp_path: Path, format: str):
    good(pool.run(SIZE, equal_but_not_identical, str(tmp_path / "step"), format))


def parts_of_a_mapping(world: World, path: str, format: str) -> None:
    """Pipeline stages: every rank has names of its own."""
    state = {
        "layers": {f"l{world.rank}": {"w": torch.full((3,), float(world.rank)), "n": world.rank}},
        "all": torch.ones(2),
    }
    save_sharded(path, state, group=world.group, format=format, durable=False)


@pytest.mark.parametrize("format", ["native", "dcp"])
def test_ranks_with_names_of_their_own(pool: Pool, tmp_path: Path, format: str):
    good(pool.run(SIZE, parts_of_a_mapping, str(tmp_path / "step"), format))
    with holdfast.open(tmp_path / "step") as ckpt:
        assert sorted(ckpt) == ["all", *(f"layers.l{rank}.w" for rank in range(SIZE))]
        for rank in range(SIZE):
            assert ckpt[f"layers.l{rank}.w"].numpy().tolist() == [rank] * 3
            assert ckpt.tree["layers"][f"l{rank}"]["n"] == rank


def stages(world: World, path: str, values: str) -> None:
    """The same with the state dicts of modules, which are OrderedDicts with metadata, and keys that are numbers."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(SIZE)))
    mine = nn.ModuleDict({str(world.rank): model[world.rank]})
    optim = {world.rank: {"step": torch.tensor(float(world.rank))}} if world.rank else {}
    state = {
        "model": mine.state_dict(),
        "optim": optim,
        "groups": [{"lr": 0.1, f"own{world.rank}": 1}],
    }
    save_sharded(path, state, group=world.group, values=values, durable=False)


@pytest.mark.parametrize("values", ["agree", "first"])
def test_pipeline_stages(pool: Pool, tmp_path: Path, values: str):
    good(pool.run(SIZE, stages, str(tmp_path / "step"), values))
    whole = sharded_load.load_full(tmp_path / "step")
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(SIZE)))
    assert model.state_dict().keys() == whole["model"].keys()
    assert all(
        torch.equal(tensor, whole["model"][name]) for name, tensor in model.state_dict().items()
    )
    assert whole["model"]._metadata["2"] == {"version": 1}
    assert whole["optim"] == {rank: {"step": torch.tensor(float(rank))} for rank in (1, 2)}
    assert whole["groups"] == [{"lr": 0.1, "own0": 1, "own1": 1, "own2": 1}]


def tuples_that_differ(world: World, path: str) -> None:
    state = {"pair": (torch.ones(2), *([torch.zeros(2)] if world.rank else []))}
    save_sharded(path, state, group=world.group, values="first")


def test_a_tensor_is_not_lost_where_the_first_rank_decides(pool: Pool, tmp_path: Path):
    mentions = {0: "pair.1: it stands in a list or tuple of which the first rank has another one"}
    check_failed(
        pool.run(SIZE, tuples_that_differ, str(tmp_path / "step")),
        tmp_path / "step",
        kept=None,
        mentions=mentions,
    )


def different_calls(world: World, path: str, how: str) -> None:
    state = state_of(world, 2.0)
    if how == "path":
        save_sharded(f"{path}-{min(world.rank, 1)}", state, group=world.group)
    elif how == "format":
        save_sharded(path, state, group=world.group, format="dcp" if world.rank else "native")
    elif world.rank:
        load_sharded(path, state, group=world.group)
    else:
        save_sharded(path, state, group=world.group)


@pytest.mark.parametrize("how", ["path", "format", "verb"])
def test_ranks_that_do_different_things(pool: Pool, tmp_path: Path, how: str):
    check_failed(
        pool.run(SIZE, different_calls, str(tmp_path / "step"), how), tmp_path / "step", kept=None,
        mentions={1: "it was called to", 2: "it was called to"} if how != "verb" else {1: "", 2: ""},
    )  # fmt: skip


# Slow is not dead.


def be_slow(world: World, path: str, where: str) -> float:
    started = time.monotonic()

    def later(call: Callable[..., object]) -> Callable[..., object]:
        def slow(*args: object, **kwargs: object) -> object:
            time.sleep(2.0)
            return call(*args, **kwargs)

        return slow

    slow_rank = 0 if where == "publish" else 1
    name = {"describe": "tabulate_tree", "write": "write_files", "publish": "publish"}[where]
    call = getattr(sharded_save, name)
    with instead(sharded_save, name, later(call) if world.rank == slow_rank else call):
        save_sharded(path, state_of(world, 2.0), group=world.group, deadline=1.0)
    return time.monotonic() - started


@pytest.mark.parametrize("where", ["describe", "write", "publish"])
def test_a_slow_rank_is_waited_for(pool: Pool, tmp_path: Path, where: str):
    for taken in good(pool.run(SIZE, be_slow, str(tmp_path / "step"), where)):
        assert taken > 1.5
    assert number_at(tmp_path / "step") == 2.0


def stay_away(world: World, path: str) -> None:
    """The last rank never comes."""
    if world.rank == world.size - 1:
        return
    started = time.monotonic()
    try:
        save_sharded(path, state_of(world, 2.0), group=world.group, deadline=0.5)
    finally:
        assert time.monotonic() - started < 5


def test_a_rank_that_never_comes(pool: Pool, tmp_path: Path):
    answers = pool.run(2, stay_away, str(tmp_path / "step"))
    assert isinstance(answers[0], Failure)
    assert answers[0].kinds[0] == "RankLost"
    assert "no sign of life from rank 1 for 0.5 seconds" in answers[0].text
    assert answers[0].facts["ranks"] == (1,)
    assert list(tmp_path.iterdir()) == []
    pool.close()  # what the ranks have counted differs now, as it would after a real loss


# Templates that do not fit.


def misfit(world: World, path: str, rank: int) -> tuple[list[bytes], dict[int, str]]:
    state = state_of(world, 0.0)
    state["count"] = 5
    if world.rank == rank:
        state["plain0"] = torch.zeros(31)
        state["plain1"] = torch.zeros(30, dtype=torch.float64)
        state["more"] = torch.zeros(1)
        del state["plain2"]
    try:
        load_sharded(path, state, group=world.group)
    except holdfast.errors.RanksFailed as error:
        causes = error.causes
    else:
        causes = {}
    assert state.pop("count") == 5
    tensors = [
        value.to_local() if isinstance(value, DTensor) else value for value in state.values()
    ]
    return [element_bytes(tensor) for tensor in tensors], causes


@pytest.mark.parametrize("rank", range(SIZE))
def test_a_template_that_does_not_fit_changes_nothing(pool: Pool, tmp_path: Path, rank: int):
    path = tmp_path / "step"
    good(pool.run(SIZE, save_number, str(path), 1.0))
    answers = good(pool.run(SIZE, misfit, str(path), rank))
    causes = answers[0][1]
    for content, found in answers:
        assert found == causes
        assert all(not any(raw) for raw in content), "not one element was changed"
    listed = (
        "'plain0': [31] here, [30] in the checkpoint",
        "'plain1': float64 here, float32 in the checkpoint",
        "more",
    )
    assert [text for text in listed if text not in causes[rank]] == []
    assert "plain2" not in causes[rank], "the other ranks ask for it"
    assert causes.keys() == set(range(SIZE)), "all of them were asked for a value that is not there"
    assert all("missing 'count'" in text for text in causes.values())


def load_damaged(world: World, path: str) -> None:
    load_sharded(path, state_of(world, 0.0), group=world.group)


@pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
def test_a_damaged_file_is_an_error_on_every_rank(pool: Pool, tmp_path: Path, damage: str):
    path = tmp_path / "step"
    good(pool.run(SIZE, save_number, str(path), 1.0))
    file = sorted(path.glob("*.safetensors"))[1]
    raw = bytearray(file.read_bytes())
    if damage == "remove":
        file.unlink()
    else:
        raw[-5] ^= 1
        file.write_bytes(raw if damage == "flip" else raw[:-100])
    raised = failures(pool.run(SIZE, load_damaged, str(path)))
    assert {one.kinds[0] for one in raised} in ({"RanksFailed"}, {"RanksRefused"})
    assert len({one.text for one in raised}) == 1
    assert file.name in raised[0].text
    assert (
        "some tensors have been changed" if damage == "flip" else "nothing was published or changed"
    ) in raised[0].text


# Two jobs.


def two_jobs(world: World, path: str, overwrite: bool, again: int) -> list[str]:
    """Ranks 0 and 1 are one job, 2 and 3 are the other."""
    job = world.rank // 2
    group = world.line(2 * job, 2 * job + 1)
    outcomes = []
    for i in range(again):
        state = {
            name: torch.full((7, 40), float(10 * job + i))
            for name in ("plain0", "plain1", "plain2", "plain3", "rows")
        }
        world.barrier()
        try:
            save_sharded(f"{path}{i}", state, group=group, overwrite=overwrite, durable=False)
        except holdfast.errors.RanksFailed as error:
            outcomes.append(str(error))
        else:
            outcomes.append("saved")
    return outcomes


@pytest.mark.parametrize("overwrite", [False, True])
def test_two_jobs_save_to_one_path(pool: Pool, tmp_path: Path, overwrite: bool):
    again = 8
    answers = good(pool.run(4, two_jobs, str(tmp_path / "step"), overwrite, again))
    assert answers[0] == answers[1]
    assert answers[2] == answers[3]
    for i in range(again):
        one, other = answers[0][i], answers[2][i]
        winners = {
            number for number, said in ((float(i), one), (10.0 + i, other)) if said == "saved"
        }
        assert number_at(tmp_path / f"step{i}") in winners, "one of those who were told so"
        if not overwrite:
            assert len(winners) == 1
        for said in {one, other} - {"saved"}:
            assert "exists" in said or "another save is replacing this folder" in said
    assert sorted(p.name for p in tmp_path.iterdir()) == [f"step{i}" for i in range(again)]


# What needs no ranks.


def test_bad_arguments(tmp_path: Path):
    with pytest.raises(
        ValueError, match="format= takes 'native', 'dcp' or 'safetensors', not 'zip'"
    ):
        save_sharded(tmp_path / "x", {"w": torch.ones(1)}, format="zip")
    with pytest.raises(holdfast.errors.NotCommitted, match="exists"):
        save_sharded(tmp_path, {"w": torch.ones(1)})
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("keep me")
    with pytest.raises(holdfast.errors.NotCommitted, match=r"notes\.txt"):
        save_sharded(tmp_path / "mine", {"w": torch.ones(1)}, overwrite=True)
    assert (tmp_path / "mine" / "notes.txt").read_text() == "keep me"
    with pytest.raises(holdfast.errors.CannotHold, match="meta"):
        save_sharded(tmp_path / "x", {"w": torch.ones(1, device="meta")})
    with pytest.raises(holdfast.errors.CannotHold, match="tuple"):
        save_sharded(tmp_path / "x", {"w": (torch.ones(1), 2)}, format="dcp")
    with pytest.raises(holdfast.errors.CannotHold, match="sparse"):
        save_sharded(tmp_path / "x", {"w": torch.ones(2, 2).to_sparse()}, format="dcp")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["mine"]
    assert sharded_load.load_full(_saved(tmp_path / "y"))["w"].tolist() == [1.0]


def _saved(path: Path) -> Path:
    save_sharded(path, {"w": torch.ones(1)})
    return path


def count_openings(world: World, path: str, format: str) -> int:
    """Save with all ranks, and count how often this rank opens what is not published yet."""
    openings = []
    describe = rank_files.describe_unpublished

    def counting(*args: object) -> object:
        assert not os.path.exists(path)
        openings.append(args)
        return describe(*args)

    with instead(rank_files, "describe_unpublished", counting):
        save_number(world, path, 1.0, format)
    return len(openings)


@pytest.mark.parametrize("format", FORMATS)
def test_the_first_rank_opens_once_what_is_not_published_yet(
    pool: Pool, tmp_path: Path, format: str
):
    path = tmp_path / "step"
    assert good(pool.run(SIZE, count_openings, str(path), format)) == [1, 0, 0]
    assert number_at(path) == 1.0
