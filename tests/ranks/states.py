"""One state of every kind of tensor, and how a world of any size holds it.

What a rank should hold is cut from the whole here, by torch's rule for each placement (`torch.chunk`, mesh dimension after mesh
dimension), and not by the functions that the code under test asks.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from tests.ranks.pool import World
from tests.support import element_bytes

__all__ = [
    "NESTED",
    "WHOLE",
    "check",
    "cut",
    "gather_values",
    "sharded",
    "state_of",
    "tensors_of",
    "values",
]


def _content(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    count = math.prod(shape)
    if dtype == torch.bool:
        return (torch.arange(count) % 3 == 0).reshape(shape)
    if dtype.itemsize == 1:
        return (torch.arange(count) % 120).to(torch.uint8).view(dtype).reshape(shape)
    return (torch.arange(count) * 3 - 7).to(dtype).reshape(shape)


WHOLE = {
    "row": _content(torch.float32, 8, 6),
    "col": _content(torch.float32, 6, 16),
    "uneven": _content(torch.float64, 7, 3),
    "few": _content(torch.int64, 2, 5),
    "deep": _content(torch.bfloat16, 4, 6, 5),
    "line": _content(torch.int32, 11),
    "flags": _content(torch.bool, 9, 2),
    "e4m3": _content(torch.float8_e4m3fn, 8, 4),
    "e5m2": _content(torch.float8_e5m2, 4, 10),
    "half": _content(torch.float16, 5, 4),
    "nothing": torch.empty(0, 4),
    "everywhere": _content(torch.float32, 3, 3),
    "grid": _content(torch.float32, 8, 12),
    "twice": _content(torch.int16, 13, 2),
    "cube": _content(torch.float32, 6, 5, 9),
    "plain": _content(torch.float32, 5, 7),
    "turned": _content(torch.bfloat16, 4, 6).t(),
    "integers": _content(torch.int64, 33),
    "scalar": torch.tensor(2.5),
    "count": torch.tensor(7, dtype=torch.int64),
    "empty": torch.empty(0, 3),
}
"""Every tensor in one piece. Seven rows on four ranks are 2, 2, 2 and 1; two rows leave six of eight ranks without any."""

AXES: Mapping[str, tuple[int, int]] = {
    "row": (0, 1), "col": (1, 0), "uneven": (0, 1), "few": (0, 1), "deep": (1, 2), "line": (0, 0), "flags": (0, 1), "e4m3": (0, 1),
    "e5m2": (1, 0), "half": (0, 1), "nothing": (0, 1),
}  # fmt: skip
"""The axis along which each is cut, and the other one, along which it is cut when it is loaded again."""

GRIDS: Mapping[str, tuple[tuple[Placement, ...], tuple[Placement, ...]]] = {
    "grid": ((Shard(0), Shard(1), Replicate()), (Shard(1), Shard(0), Replicate())),
    "twice": ((Shard(0), Shard(0), Shard(0)), (Replicate(), Shard(0), Shard(1))),
    "cube": ((Shard(2), Shard(0), Shard(1)), (Shard(1), Replicate(), Shard(1))),
    "everywhere": ((Replicate(), Replicate(), Replicate()), (Shard(1), Replicate(), Shard(0))),
}
"""The placements on a mesh of up to three dimensions, and others."""

GRID_SHAPES = {1: (1,), 2: (2,), 3: (3,), 4: (2, 2), 8: (2, 2, 2)}
OTHER_SHAPES = {1: (1,), 2: (2,), 3: (3,), 4: (4,), 8: (2, 4)}

NESTED = {
    "lr": 0.1, "step": 12, "name": "tiny", "betas": [0.9, 0.999], "flag": True, "nothing": None, "text": "γ\n", "pair": (1, "b"),
}  # fmt: skip


def cut(whole: torch.Tensor, mesh: DeviceMesh, placements: tuple[Placement, ...]) -> torch.Tensor:
    """What this rank holds of a tensor: torch's rule, mesh dimension after mesh dimension."""
    at = mesh.get_coordinate()
    assert at is not None
    local = whole
    for d, placement in enumerate(placements):
        if isinstance(placement, Shard):
            pieces = local.chunk(mesh.size(d), placement.dim) if local.shape[placement.dim] else ()
            local = pieces[at[d]] if at[d] < len(pieces) else local.narrow(placement.dim, 0, 0)
    return local


def sharded(
    whole: torch.Tensor, mesh: DeviceMesh, placements: tuple[Placement, ...], *, blank: bool = False
) -> DTensor:
    """The tensor on a mesh. `blank`: to be filled."""
    local = cut(whole, mesh, placements).clone(memory_format=torch.contiguous_format)
    if blank:
        local = _blank(local)
    return DTensor.from_local(
        local,
        mesh,
        placements,
        run_check=False,
        shape=whole.shape,
        stride=whole.contiguous().stride(),
    )


def _blank(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of the same layout with other bits in all of its bytes."""
    made = torch.empty_like(tensor)
    if made.numel():
        flat = made.untyped_storage()
        torch.tensor([], dtype=torch.uint8).set_(flat).fill_(
            1 if tensor.dtype == torch.bool else 0xA5
        )
    return made


def tensors_of(
    world: World, *, blank: bool = False, other: bool = False
) -> dict[str, torch.Tensor]:
    """Every tensor as this world holds it; `other`: cut otherwise."""
    line = world.mesh()
    grid = world.mesh(*(OTHER_SHAPES if other else GRID_SHAPES)[world.size])
    found: dict[str, torch.Tensor] = {}
    for name, whole in WHOLE.items():
        if name in AXES:
            found[name] = sharded(whole, line, (Shard(AXES[name][other]),), blank=blank)
        elif name in GRIDS:
            found[name] = sharded(whole, grid, GRIDS[name][other][: grid.ndim], blank=blank)
        else:
            found[name] = _blank(whole) if blank else whole.clone()
    return found


def values(*, blank: bool = False) -> dict[str, object]:
    """What is no tensor."""
    return dict.fromkeys(NESTED, 0) if blank else copy.deepcopy(NESTED)


def state_of(
    world: World, *, nested: bool = True, blank: bool = False, other: bool = False
) -> dict[str, object]:
    """The tensors and, with `nested`, the values, some of them in lists and under numbers."""
    tensors = tensors_of(world, blank=blank, other=other)
    if not nested:
        return dict(tensors)
    moved = {name: tensors.pop(name) for name in ("col", "uneven", "plain", "scalar")}
    values_ = values(blank=blank)
    if blank:
        values_["betas"], values_["pair"] = [0, 0], (0, 0)
    return {
        "model": tensors,
        "optim": {
            "state": {0: {"exp_avg": moved["col"]}, 1: {"exp_avg": moved["uneven"]}},
            "param_groups": [{**values_, "params": [0, 1]}],
        },
        "list": [moved["plain"], {"scalar": moved["scalar"]}],
        "epoch": 0 if blank else 4,
    }


def check(
    world: World, state: dict[str, object], *, nested: bool = True, other: bool = False
) -> None:
    """Everything in a loaded state is what was saved, bit for bit."""
    expected = state_of(world, nested=nested, other=other)
    _same(expected, state, "")


def _same(expected: object, found: object, at: str) -> None:
    if isinstance(expected, dict):
        assert isinstance(found, dict), at
        assert found.keys() == expected.keys(), at
        for key, value in expected.items():
            _same(value, found[key], f"{at}.{key}")
    elif isinstance(expected, list | tuple):
        assert type(found) is type(expected), at
        assert len(found) == len(expected), at
        for i, value in enumerate(expected):
            _same(value, found[i], f"{at}.{i}")
    elif isinstance(expected, torch.Tensor):
        assert isinstance(found, torch.Tensor), at
        assert type(found) is type(expected), at
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape), at
        one, other = (t.to_local() if isinstance(t, DTensor) else t for t in (expected, found))
        assert one.shape == other.shape, at
        assert element_bytes(one) == element_bytes(other), at
    else:
        assert (type(found), found) == (type(expected), expected), at


def gather_values(state: object) -> object:
    """Return a state in which each tensor is its dtype, shape and bytes, whole on every rank."""
    if isinstance(state, dict):
        return {key: gather_values(value) for key, value in state.items()}
    if isinstance(state, list):
        return [gather_values(value) for value in state]
    if isinstance(state, DTensor):
        state = state.full_tensor()
    if isinstance(state, torch.Tensor):
        return str(state.dtype), tuple(state.shape), element_bytes(state)
    return state
