"""Objects with `state_dict()` and `load_state_dict()` in a state: taken as torch's distributed checkpoint takes them, both ways."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.fsdp import fully_shard

import holdfast
from holdfast.errors import CannotHold
from holdfast.torch.ranks.load_sharded import load_full, load_sharded
from holdfast.torch.ranks.save_sharded import async_save_sharded, save_sharded
from tests.ranks.pool import Pool, World, good

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]


def trained(
    seed: int, *, steps: int = 2, world: World | None = None
) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
    if world is not None:
        fully_shard(model, mesh=world.mesh())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01 * seed)
    for _ in range(steps):
        model(torch.ones(3, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


class AppState(Stateful):
    """As in torch's tutorial: the application's state, in terms of torch's own functions."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer
        self.handed = 0

    def state_dict(self) -> dict[str, object]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optim": optimizer}

    def load_state_dict(self, state: dict[str, object]) -> None:
        self.handed += 1
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optim"],
        )


class Loader:
    """Keeps values alone, and makes a new dict whenever it is asked."""

    def __init__(self, epoch: int, order: list[int]) -> None:
        self.epoch, self.order = epoch, order

    def state_dict(self) -> dict[str, object]:
        return {
            "epoch": self.epoch,
            "order": list(self.order),
            "seen": {"files": ("a", self.epoch)},
        }

    def load_state_dict(self, state: dict[str, object]) -> None:
        assert state["seen"] == {"files": ("a", state["epoch"])}
        self.epoch, self.order = state["epoch"], state["order"]


def local(tensor: torch.Tensor) -> torch.Tensor:
    return getattr(tensor, "_local_tensor", tensor)


def same(
    one: tuple[nn.Module, torch.optim.Optimizer], other: tuple[nn.Module, torch.optim.Optimizer]
) -> None:
    for a, b in zip(one[0].parameters(), other[0].parameters(), strict=True):
        assert torch.equal(local(a), local(b))
    first, second = (optimizer.state_dict() for _, optimizer in (one, other))
    assert first["param_groups"] == second["param_groups"]
    assert first["state"].keys() == second["state"].keys()
    for number, inner in first["state"].items():
        for key, value in inner.items():
            assert torch.equal(local(value), local(second["state"][number][key])), (number, key)
            assert type(value) is type(second["state"][number][key])


@pytest.mark.parametrize("block", [True, False])
@pytest.mark.parametrize("format", ["native", "dcp"])
@pytest.mark.parametrize("steps", [0, 1])
def test_a_model_an_optimizer_and_a_loader(tmp_path: Path, format: str, block: bool, steps: int):
    """Also into an optimizer that has not taken a step, and so has no tensors that could be filled."""
    model, optimizer = trained(1)
    save = save_sharded if block else async_save_sharded
    saved = save(
        tmp_path / "step",
        {"model": model, "optimizer": optimizer, "loader": Loader(3, [2, 1])},
        format=format,
    )
    if not block:
        saved.wait()
    other = trained(2, steps=steps)
    loader = Loader(0, [])
    state = {"model": other[0], "optimizer": other[1], "loader": loader}
    load_sharded(tmp_path / "step", state)
    same((model, optimizer), other)
    assert (loader.epoch, loader.order) == (3, [2, 1])
    assert state["model"] is other[0], "the state keeps its objects"
    whole = load_full(tmp_path / "step")
    assert torch.equal(whole["model"]["0.weight"], model[0].weight)
    for step in range(2):
        for trainee in ((model, optimizer), other):
            torch.manual_seed(step)
            trainee[0](torch.rand(3, 4)).sum().backward()
            trainee[1].step()
    same((model, optimizer), other)


def test_safetensors_holds_the_tensors_of_an_object(tmp_path: Path):
    model = trained(1)[0]
    save_sharded(tmp_path / "step", {"model": model}, format="safetensors")
    other = trained(2)[0]
    load_sharded(tmp_path / "step", {"model": other})
    assert torch.equal(model[2].weight, other[2].weight)


def app_both_ways(world: World, path: str, ours: bool, loads_ours: bool, steps: int) -> None:
    own = trained(1, world=world)
    if ours:
        save_sharded(
            path, {"app": AppState(*own), "loader": Loader(4, [1])}, group=world.group, format="dcp"
        )
    else:
        dcp.save(
            {"app": AppState(*own), "loader": Loader(4, [1])},
            checkpoint_id=path,
            process_group=world.group,
        )
    other = trained(2, world=world, steps=steps)
    state = {"app": AppState(*other), "loader": Loader(0, [])}
    if loads_ours:
        load_sharded(path, state, group=world.group)
    else:
        dcp.load(state, checkpoint_id=path, process_group=world.group)
    same(own, other)
    assert (state["app"].handed, state["loader"].epoch) == (1, 4)
    torch.distributed.barrier(world.group)


@pytest.mark.parametrize(("ours", "loads_ours"), [(True, True), (True, False), (False, True)])
def test_the_state_of_an_application(pool: Pool, tmp_path: Path, ours: bool, loads_ours: bool):
    good(pool.run(2, app_both_ways, str(tmp_path / "step"), ours, loads_ours, int(ours)))


@pytest.mark.parametrize("ours", [True, False])
def test_plain_objects_both_ways(tmp_path: Path, ours: bool):
    own, other = (
        trained(1),
        trained(2, steps=int(ours)),
    )  # torch does not fill an optimizer without a state
    saved = {"model": own[0], "optimizer": own[1], "loader": Loader(4, [1])}
    filled = {"model": other[0], "optimizer": other[1], "loader": Loader(0, [])}
    if ours:
        save_sharded(tmp_path / "step", saved, format="dcp")
        dcp.load(filled, checkpoint_id=tmp_path / "step")
    else:
        dcp.save(saved, checkpoint_id=tmp_path / "step")
        load_sharded(tmp_path / "step", filled)
    same(own, other)
    assert filled["loader"].epoch == 4


def sharded_optimizer(world: World, path: str, format: str) -> None:
    own = trained(1, world=world)
    save_sharded(path, {"model": own[0], "optimizer": own[1]}, group=world.group, format=format)
    other = trained(2, world=world, steps=0)
    load_sharded(path, {"model": other[0], "optimizer": other[1]}, group=world.group)
    same(own, other)


@pytest.mark.parametrize("format", ["native", "dcp"])
def test_a_fresh_optimizer_gets_shards_like_its_parameters(pool: Pool, tmp_path: Path, format: str):
    good(pool.run(2, sharded_optimizer, str(tmp_path / "step"), format))


class Outer:
    """Hands out an object that has a state itself."""

    def __init__(self, loader: Loader) -> None:
        self.loader, self.seen = loader, -1

    def state_dict(self) -> dict[str, object]:
        return {"loader": self.loader, "twice": self.loader.epoch * 2}

    def load_state_dict(self, state: dict[str, object]) -> None:
        assert state["loader"] is self.loader
        self.seen = self.loader.epoch, state["twice"]


@pytest.mark.parametrize("format", ["native", "dcp"])
def test_wherever_they_stand(tmp_path: Path, format: str):
    def state(epoch: int, weight: float) -> tuple[dict[str, object], Outer, nn.Module]:
        model = nn.Linear(2, 1)
        nn.init.constant_(model.weight, weight)
        outer = Outer(Loader(epoch, []))
        return (
            {"deep": {"models": [model, Loader(epoch, [1])], "outer": outer}, "step": epoch},
            outer,
            model,
        )

    save_sharded(tmp_path / "step", state(5, 1.5)[0], format=format)
    other, outer, model = state(0, 0.0)
    load_sharded(tmp_path / "step", other)
    assert outer.seen == (5, 10), "the inner one was loaded first"
    assert other["step"] == other["deep"]["models"][1].epoch == 5
    assert model.weight.tolist() == [[1.5, 1.5]]


@pytest.mark.parametrize("format", ["native", "dcp"])
def test_an_object_as_the_state(tmp_path: Path, format: str):
    save_sharded(tmp_path / "step", Loader(6, [1, 2]), format=format)
    loader = Loader(0, [])
    load_sharded(tmp_path / "step", loader)
    assert (loader.epoch, loader.order) == (6, [1, 2])


class Renaming(nn.Module):
    """Its state dict is a copy under other names, which only its own `load_state_dict` understands."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))

    def state_dict(self, *args: object, **kwargs: object) -> dict[str, object]:
        return {"w": self.weight.detach().clone()}

    def load_state_dict(
        self, state: dict[str, torch.Tensor], *args: object, **kwargs: object
    ) -> None:
        with torch.no_grad():
            self.weight.copy_(state["w"])


def test_a_module_with_its_own_way(tmp_path: Path):
    saved, filled = Renaming(), Renaming()
    nn.init.ones_(saved.weight)
    save_sharded(tmp_path / "step", saved)
    load_sharded(tmp_path / "step", filled)
    assert filled.weight.tolist() == [1, 1]


class Refusing(Loader):
    def load_state_dict(self, state: dict[str, object]) -> None:
        raise LookupError("not mine")


def test_a_refusal_is_raised_as_it_is(tmp_path: Path):
    save_sharded(tmp_path / "step", {"loader": Loader(1, [])})
    with pytest.raises(LookupError, match="not mine") as raised:
        load_sharded(tmp_path / "step", {"loader": Refusing(0, [])})
    assert raised.value.__notes__ == ["the load failed, and some tensors have been changed"]


# What is no state.


@dataclass
class Holder:
    weight: object


class OneWay:
    """Cannot be loaded, so it is not taken."""

    def state_dict(self) -> dict[str, object]:
        return {"a": 1}


@pytest.mark.parametrize(
    "inside",
    [
        torch.ones(2),
        {"deep": [torch.ones(2)]},
        nn.Linear(1, 1),
        Holder(torch.ones(1).to_sparse()),
        {torch.ones(1)},
    ],
)
def test_tensors_are_never_pickled(tmp_path: Path, inside: object):
    with pytest.raises(
        CannotHold, match=r"a\.holder: a Holder with tensors in it, .*state_dict\(\)"
    ):
        save_sharded(
            tmp_path / "step", {"w": torch.ones(2), "a": {"holder": Holder(inside)}}, format="dcp"
        )
    assert not (tmp_path / "step").exists()


def test_what_cannot_be_pickled_is_named(tmp_path: Path):
    with pytest.raises(CannotHold, match="fn: a function that cannot be pickled"):
        save_sharded(tmp_path / "step", {"w": torch.ones(2), "fn": lambda: 0}, format="dcp")


def test_other_objects_are_pickled_as_before(tmp_path: Path):
    save_sharded(tmp_path / "step", {"w": torch.ones(2), "h": Holder(np.arange(3))}, format="dcp")
    state = {"w": torch.zeros(2), "h": None}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
        dcp.load(state, checkpoint_id=tmp_path / "step")
    assert state["h"].weight.tolist() == [0, 1, 2]


def test_native_says_what_to_do(tmp_path: Path):
    with pytest.raises(
        CannotHold, match=r"one: an object of class .*OneWay; save its state_dict\(\)"
    ):
        save_sharded(tmp_path / "step", {"w": torch.ones(2), "one": OneWay()})


# In one process.


@pytest.mark.parametrize("name", ["step", "step.pt", "step.safetensors"])
def test_save_takes_them_too(tmp_path: Path, name: str):
    model = nn.Linear(2, 2)
    holdfast.save(model, tmp_path / name)
    with holdfast.open(tmp_path / name) as ckpt:
        assert list(ckpt) == ["weight", "bias"]
        assert np.array_equal(ckpt["weight"].numpy(), model.weight.detach().numpy())


def test_save_takes_nested_ones_and_keeps_what_is_tied(tmp_path: Path):
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    model[1].weight = model[0].weight
    holdfast.save({"nets": [model], "loader": Loader(1, [])}, tmp_path / "step.pt")
    found = torch.load(tmp_path / "step.pt")
    assert found["loader"]["epoch"] == 1
    weights = found["nets"][0]
    assert weights["0.weight"].data_ptr() == weights["1.weight"].data_ptr()


def test_an_object_that_hands_out_itself(tmp_path: Path):
    class Endless:
        def state_dict(self) -> object:
            return {"me": self}

        def load_state_dict(self, state: object) -> None: ...

    with pytest.raises(
        CannotHold, match=r"me: an object of class .*Endless; save its state_dict\(\)"
    ):
        holdfast.save(Endless(), tmp_path / "step")


def test_what_only_pretends_is_left_alone(tmp_path: Path):
    class Anything:
        def __getattr__(self, name: str) -> object:
            if name.startswith("__"):
                raise AttributeError(name)
            return lambda *_: {}

    with pytest.raises(CannotHold, match="Anything"):
        holdfast.save({"a": Anything()}, tmp_path / "step")
    with pytest.raises(CannotHold, match="type"):
        holdfast.save({"a": nn.Linear}, tmp_path / "step")


def in_ddp(world: World, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 6), torch.compile(nn.Linear(6, 2), backend="eager"))
    return nn.parallel.DistributedDataParallel(model, process_group=world.group)


def parameters(ddp: nn.Module) -> dict[str, torch.Tensor]:
    return {
        name.replace("_orig_mod.", ""): one.detach().clone()
        for name, one in ddp.module.named_parameters()
    }


def save_ddp(world: World, path: str, format: str) -> dict[str, torch.Tensor]:
    ddp = in_ddp(world, 3)
    save_sharded({"model": ddp}, path, format=format, group=world.group)
    return parameters(ddp)


def load_ddp(world: World, path: str) -> dict[str, torch.Tensor]:
    ddp = in_ddp(world, 7)
    load_sharded(path, {"model": ddp}, group=world.group)
    return parameters(ddp)


@pytest.mark.parametrize("format", ["native", "dcp"])
def test_a_model_in_ddp_has_the_names_of_the_model(pool: Pool, tmp_path: Path, format: str):
    path = str(tmp_path / "ddp")
    first, second = good(pool.run(2, save_ddp, path, format))
    plain = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2))
    load_sharded(path, {"model": plain})
    loaded = good(pool.run(2, load_ddp, path))
    for name, parameter in plain.named_parameters():
        assert all(torch.equal(parameter, one[name]) for one in (first, second, *loaded))
