"""A model and the same in DistributedDataParallel or `torch.compile` have one checkpoint, under the model's own names."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.nn.parallel import DistributedDataParallel

import holdfast
import holdfast.torch
from holdfast.errors import DoesNotFit
from holdfast.torch import load_into, load_sharded, save_sharded
from holdfast.torch.modules.wrappers import names_with_wrappers


class Extra(nn.Linear):
    """Has a state beside its tensors."""

    seen = 0

    def get_extra_state(self) -> object:
        return {"seen": self.seen}

    def set_extra_state(self, state: object) -> None:
        self.seen = state["seen"]


class Net(nn.Module):
    """A child that is really called `module`, another `_orig_mod`, a counter with a version, and a state beside the tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(2, 2), nn.BatchNorm1d(2)])
        self.module = Extra(2, 2)
        self._orig_mod = nn.Linear(2, 2)
        self.weight = nn.Parameter(torch.rand(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._orig_mod(self.module(self.layers[1](self.layers[0](x)))) + self.weight.sum()


def plain(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    net = Net()
    net.layers[1].running_mean += seed
    net.module.seen = seed
    return net


def compiled(seed: int) -> nn.Module:
    return torch.compile(plain(seed), backend="eager")


def in_parallel(seed: int) -> nn.Module:
    return DistributedDataParallel(plain(seed))


def both(seed: int) -> nn.Module:
    return DistributedDataParallel(torch.compile(plain(seed), backend="eager"))


def the_other_way(seed: int) -> nn.Module:
    return torch.compile(DistributedDataParallel(plain(seed)), backend="eager")


def inside(seed: int) -> nn.Module:
    net = plain(seed)
    net.layers[0] = torch.compile(net.layers[0], backend="eager")
    net.module = torch.compile(net.module, backend="eager")
    return net


def inside_in_parallel(seed: int) -> nn.Module:
    return DistributedDataParallel(inside(seed))


def in_threads(seed: int) -> nn.Module:
    return nn.DataParallel(plain(seed))


Make = Callable[[int], nn.Module]
KINDS: list[Make] = [
    plain,
    compiled,
    in_parallel,
    both,
    the_other_way,
    inside,
    inside_in_parallel,
    in_threads,
]
NAMES = list(plain(0).state_dict())


@pytest.fixture(scope="module", autouse=True)
def alone() -> Iterator[None]:
    """A group of one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def same(one: nn.Module, other: nn.Module) -> None:
    first, second = (
        list(one.parameters()) + list(one.buffers()),
        list(other.parameters()) + list(other.buffers()),
    )
    assert all(
        torch.equal(a.cpu(), b.cpu()) for a, b in zip(first, second, strict=True)
    )  # `nn.DataParallel` moves to a GPU
    seen = [
        next(one.seen for one in net.modules() if isinstance(one, Extra)) for net in (one, other)
    ]
    assert seen[0] == seen[1]


def test_the_names_are_those_of_torch():
    """torch's own helper is the oracle where it takes wrappers off; `nn.DataParallel` it leaves alone."""
    for make in KINDS[:-1]:
        net = make(1)
        assert (
            set(names_with_wrappers(net, NAMES.__contains__) or NAMES)
            >= set(NAMES)
            == set(get_model_state_dict(net))
        )


@pytest.mark.parametrize("target", KINDS)
@pytest.mark.parametrize("saved", KINDS)
def test_any_is_loaded_into_any(tmp_path: Path, saved: Make, target: Make):
    first = saved(1)
    save_sharded({"model": first}, tmp_path / "state")
    with holdfast.open(tmp_path / "state") as checkpoint:
        assert set(checkpoint) == {
            f"model.{name}" for name in NAMES if not name.endswith("_extra_state")
        }
    second, third = target(2), target(3)
    load_sharded(tmp_path / "state", {"model": second})
    same(first, second)
    report = load_into(third, tmp_path / "state", prefix="model.")
    assert set(report.names) == {name for name in NAMES if not name.endswith("_extra_state")}
    same(first, third)


@pytest.mark.parametrize("make", KINDS)
def test_runs(tmp_path: Path, make: Make):
    for folder, way, other in ((tmp_path / "from", make, plain), (tmp_path / "to", plain, make)):
        first, second = way(1), other(2)
        with holdfast.torch.Run(folder, durable=False) as run:
            run.save(1, {"model": first, "step": 1})
            run.async_save(2, {"model": first, "step": 2}).wait()
        state = {"model": second, "step": 0}
        assert holdfast.torch.Run(folder).resume(into=state) is state
        assert state["model"] is second
        assert state["step"] == 2
        same(first, second)


@pytest.mark.parametrize("make", KINDS)
def test_save_of_a_module(tmp_path: Path, make: Make):
    holdfast.save(make(1), tmp_path / "model")
    target = plain(2)
    load_into(target, tmp_path / "model")
    same(make(1), target)


@pytest.mark.parametrize(
    ("saved", "target"),
    [
        *((make, make) for make in KINDS[1:]),
        (inside, inside_in_parallel),
        (in_parallel, inside_in_parallel),
        (compiled, both),
        (in_parallel, the_other_way),
    ],
)
def test_files_with_the_names_of_wrappers_are_read_by_those(
    tmp_path: Path, saved: Make, target: Make
):
    """As `torch.save(ddp.state_dict())` writes them: into what has the same wrappers, or more of another kind."""
    first, second, third = saved(1), target(2), target(3)
    torch.save(first.state_dict(), tmp_path / "raw.pt")
    load_into(second, tmp_path / "raw.pt")
    same(first, second)
    load_sharded(tmp_path / "raw.pt", third)
    same(first, third)


def test_a_plain_model_with_such_names_is_not_touched(tmp_path: Path):
    """Children that are called `module` and `_orig_mod`, and whose own names are those of the model."""
    net = nn.ModuleDict(
        {"module": nn.ModuleDict({"module": nn.Linear(2, 2), "_orig_mod": nn.Linear(2, 2)})}
    )
    names = list(net.state_dict())
    save_sharded(net, tmp_path / "net")
    with holdfast.open(tmp_path / "net") as checkpoint:
        assert set(checkpoint) == set(names)
    other = DistributedDataParallel(copy.deepcopy(net))
    with torch.no_grad():
        other.module["module"]["module"].weight += 1
    load_into(other, tmp_path / "net")
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), other.parameters(), strict=True))


class Own(nn.Module):
    """Loads itself, with a compiled layer in it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.compile(nn.BatchNorm1d(2), backend="eager")
        self.register_load_state_dict_pre_hook(lambda *_: None)


def test_a_module_that_loads_itself_is_handed_the_names_that_it_has(tmp_path: Path):
    first, second = nn.ModuleDict({"own": Own()}), nn.ModuleDict({"own": Own()})
    first["own"].inner.running_mean += 3
    save_sharded(first, tmp_path / "own")
    with holdfast.open(tmp_path / "own") as checkpoint:
        assert "own.inner.running_mean" in checkpoint
    report = load_into(second, tmp_path / "own")
    assert "own.inner.running_mean" in report.names
    assert torch.equal(second["own"].inner.running_mean, first["own"].inner.running_mean)


def test_what_does_not_fit_is_told_by_plain_names(tmp_path: Path):
    save_sharded({"w": torch.ones(1)}, tmp_path / "w")
    with pytest.raises(DoesNotFit, match=r"missing 'layers\.0\.weight'"):
        load_into(both(1), tmp_path / "w")


def test_a_compiled_model_goes_on_as_the_one_that_was_saved(tmp_path: Path):
    first, second = compiled(1).eval(), compiled(2).eval()
    inputs = torch.rand(4, 2)
    with holdfast.torch.Run(tmp_path, durable=False) as run:
        run.save(1, {"model": first})
        run.resume(into={"model": second})
    assert torch.equal(first(inputs), second(inputs))


def test_the_plain_run_saves_and_says_who_loads(tmp_path: Path):
    with holdfast.Run(tmp_path, durable=False) as run:
        run.save(1, {"model": both(1)})
        with run.latest().open() as checkpoint:
            assert "model.layers.0.weight" in checkpoint
        with pytest.raises(DoesNotFit, match=r"holdfast\.torch\.Run"):
            run.resume(into={"model": both(2)})
