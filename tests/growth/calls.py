"""How many calls a save makes: of Python's functions and of C's, in all threads. What else the machine does has no part in it.

`CASES` are the verbs that write, each under an option, with the plain save that it is compared with.
"""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from types import FrameType

import numpy as np
import torch

import holdfast
import holdfast.torch

__all__ = ["CASES", "PLAIN", "Case", "counting", "tensors"]

Job = Callable[[], object]
"""What is counted."""

_buckets = count()


@dataclass(frozen=True)
class Case:
    """A verb with an option: `prepare` is given a folder and a number of tensors, and is not counted."""

    name: str
    plain: str
    """The plain save that it is compared with, in `PLAIN`."""
    prepare: Callable[[Path, int], Job]
    saves: int = 1
    """How many checkpoints it writes."""
    most_times: int = 4
    """What it may cost, as a multiple of the plain save."""


@contextmanager
def counting() -> Iterator[list[int]]:
    """Count calls, in this thread and in all that start meanwhile; the number is there in the end."""
    total: list[int] = []
    counters: list[list[int]] = []
    own = threading.local()

    def profile(frame: FrameType, event: str, argument: object) -> None:
        if event == "call" or event == "c_call":
            try:
                own.number[0] += 1
            except AttributeError:
                own.number = [1]
                counters.append(own.number)

    before = sys.getprofile(), threading.getprofile()
    gc.collect()
    gc.disable()
    threading.setprofile(profile)
    sys.setprofile(profile)
    try:
        yield total
    finally:
        sys.setprofile(before[0])
        threading.setprofile(before[1])
        gc.enable()
        total.append(sum(number[0] for number in counters))


# States.


def arrays(n: int) -> dict[str, object]:
    """Arrays of 256 bytes."""
    rows = np.arange(64 * n, dtype=np.float32).reshape(n, 64)
    return {f"layers.{i // 100}.experts.{i % 100}.w": row.copy() for i, row in enumerate(rows)}


def changed(n: int) -> dict[str, object]:
    """The same a step later: of ten arrays one is another."""
    state = arrays(n)
    for i, name in enumerate(state):
        if i % 10 == 0:
            state[name] = np.full(64, -1, np.float32)
    return state


def tensors(n: int) -> dict[str, object]:
    """Tensors of 256 bytes."""
    return {name: torch.from_numpy(array) for name, array in arrays(n).items()}


def lent(n: int) -> dict[str, object]:
    """Arrays over the memory of tensors."""
    return {name: tensor.numpy() for name, tensor in tensors(n).items()}  # type: ignore[attr-defined]


def nested(n: int) -> dict[str, object]:
    """An optimizer's state: two tensors and a number for each parameter, in dicts of their own."""
    flat = iter(tensors(n).values())
    slots = {i: {"step": i, "exp_avg": next(flat), "exp_avg_sq": next(flat)} for i in range(n // 2)}
    return {
        "state": slots,
        "param_groups": [{"lr": 1e-3, "betas": (0.9, 0.99), "params": list(range(n // 2))}],
    }


def tied(n: int) -> dict[str, object]:
    """Half of the names are second names of the other half."""
    state = tensors(n // 2)
    return {**state, **{f"tied.{name}": tensor for name, tensor in state.items()}}


def views(n: int) -> dict[str, object]:
    """Parts of one buffer."""
    buffer = torch.arange(64 * n, dtype=torch.float32).reshape(n, 64)
    return {f"layers.{i // 100}.experts.{i % 100}.w": row for i, row in enumerate(buffer)}


# Verbs.


def saving(
    suffix: str = "", make: Callable[[int], dict[str, object]] = arrays, **options: object
) -> Callable[[Path, int], Job]:
    def prepare(folder: Path, n: int) -> Job:
        state = make(n)
        return lambda: holdfast.save(state, folder / f"saved{suffix}", durable=False, **options)  # type: ignore[arg-type]

    return prepare


def in_shards(folder: Path, n: int) -> Job:
    """Two files, of however many tensors: a file has a cost of its own."""
    state = arrays(n)
    return lambda: holdfast.save(
        state, folder / "saved", format="safetensors", max_shard_size=128 * n, durable=False
    )


def on_a_base(folder: Path, n: int) -> Job:
    holdfast.save(arrays(n), folder / "step-1", durable=False, hashes=True)
    state = changed(n)
    return lambda: holdfast.save(state, folder / "step-2", durable=False, base=folder / "step-1")


def in_a_bucket(suffix: str = "", **options: object) -> Callable[[Path, int], Job]:
    def prepare(folder: Path, n: int) -> Job:
        state, url = arrays(n), f"memory://one-way-{next(_buckets)}/saved{suffix}"
        return lambda: holdfast.save(state, url, **options)  # type: ignore[arg-type]

    return prepare


def on_a_base_in_a_bucket(folder: Path, n: int) -> Job:
    url = f"memory://one-way-{next(_buckets)}"
    holdfast.save(arrays(n), f"{url}/step-1", hashes=True)
    state = changed(n)
    return lambda: holdfast.save(state, f"{url}/step-2", base=f"{url}/step-1")


def rewriting(
    verb: Callable[..., object],
    source: str,
    target: str,
    make: Callable[[int], dict[str, object]] = arrays,
    **options: object,
) -> Callable[[Path, int], Job]:
    """A verb that makes a checkpoint of a checkpoint."""

    def prepare(folder: Path, n: int) -> Job:
        holdfast.save(make(n), folder / f"source{source}", durable=False)
        return lambda: verb(
            folder / f"source{source}", folder / f"target{target}", durable=False, **options
        )

    return prepare


def copying_to_a_bucket(folder: Path, n: int) -> Job:
    url = f"memory://one-way-{next(_buckets)}/copied"
    holdfast.save(arrays(n), folder / "source", durable=False)
    return lambda: holdfast.copy(folder / "source", url)


def torch_saving(
    make: Callable[[int], object] = tensors, **options: object
) -> Callable[[Path, int], Job]:
    """`holdfast.torch.save`, which pickles any object."""

    def prepare(folder: Path, n: int) -> Job:
        state = make(n)
        return lambda: holdfast.torch.save(state, folder / "saved.pt", durable=False, **options)  # type: ignore[arg-type]

    return prepare


def parameters(n: int) -> dict[str, object]:
    return {name: torch.nn.Parameter(tensor) for name, tensor in tensors(n).items()}


class Held:
    """An object of somebody's class."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def in_objects(n: int) -> dict[str, object]:
    """Half of them are in objects of a class."""
    return {
        name: Held(tensor) if number % 2 else tensor
        for number, (name, tensor) in enumerate(tensors(n).items())
    }


def packaging(folder: Path, n: int) -> Job:
    models = {"one": arrays(n // 2), "two": changed(n // 2)}
    return lambda: holdfast.package(models, folder / "package", durable=False)


def saves_sharded(
    path: Path, make: Callable[[int], dict[str, object]], n: int, **options: object
) -> Job:
    """A save of ranks; of one process without a group, that of one."""
    state = make(n)
    return lambda: holdfast.torch.save_sharded(state, path, durable=False, **options)  # type: ignore[arg-type]


def sharding(
    make: Callable[[int], dict[str, object]] = tensors, **options: object
) -> Callable[[Path, int], Job]:
    return lambda folder, n: saves_sharded(folder / "sharded", make, n, **options)


def sharding_on_a_base(folder: Path, n: int) -> Job:
    holdfast.torch.save_sharded(tensors(n), folder / "step-1", durable=False, hashes=True)
    state = {name: torch.from_numpy(array) for name, array in changed(n).items()}
    return lambda: holdfast.torch.save_sharded(
        state, folder / "step-2", durable=False, base=folder / "step-1"
    )


def sharding_to_a_bucket(folder: Path, n: int) -> Job:
    state, url = tensors(n), f"memory://one-way-{next(_buckets)}/sharded"
    return lambda: holdfast.torch.save_sharded(state, url)


def sharding_in_the_background(**options: object) -> Callable[[Path, int], Job]:
    def prepare(folder: Path, n: int) -> Job:
        state = tensors(n)
        return lambda: holdfast.torch.async_save_sharded(
            state, folder / "sharded", durable=False, **options
        ).wait()  # type: ignore[arg-type]

    return prepare


def two_steps(folder: Path, n: int) -> Job:
    first, second = arrays(n), changed(n)

    def job() -> None:
        with holdfast.Run(folder / "run", durable=False) as run:
            run.save(1, first)
            run.save(2, second)

    return job


def two_steps_of_ranks(background: bool) -> Callable[[Path, int], Job]:
    def prepare(folder: Path, n: int) -> Job:
        first, second = (
            tensors(n),
            {name: torch.from_numpy(array) for name, array in changed(n).items()},
        )

        def job() -> None:
            with holdfast.torch.Run(folder / "run", durable=False) as run:
                for step, state in enumerate((first, second)):
                    run.async_save(step, state).wait() if background else run.save(step, state)

        return job

    return prepare


PLAIN = {
    "native": saving(),
    "safetensors": saving(".safetensors"),
    "pt": saving(".pt"),
    "tensors, native": saving(make=tensors),
    "tensors, safetensors": saving(".safetensors", tensors),
    "tensors, pt": saving(".pt", tensors),
    "torch.save": torch_saving(),
}
"""Saves without an option: what all others are compared with."""

SUFFIXES = {"native": "", "safetensors": ".safetensors", "pt": ".pt"}

CASES = [
    *(
        Case(f"save {format}, {name}", format, saving(suffix, **option))
        for format, suffix in SUFFIXES.items()
        for name, option in {
            "limits": {"limits": holdfast.Limits()},
            "max_memory": {"max_memory": "128MiB"},
            "read_back": {"read_back": True},
        }.items()
    ),
    *(
        Case(
            f"save {format}, {make.__name__}", f"tensors, {format}", saving(suffix, make, **option)
        )
        for format, suffix in SUFFIXES.items()
        for make, option in (
            (nested, {"keep_tree": True} if format == "safetensors" else {}),
            (tied, {}),
        )
    ),
    *(
        Case(f"save {format}, lent", format, saving(suffix, lent))
        for format, suffix in SUFFIXES.items()
    ),
    *(
        Case(f"save {format}, bucket", format, in_a_bucket(suffix))
        for format, suffix in SUFFIXES.items()
    ),
    Case("save safetensors, max_shard_size", "safetensors", in_shards),
    Case("save native, hashes", "native", saving(hashes=True)),
    Case("save native, base", "native", on_a_base),
    Case("save native, hashes, bucket", "native", in_a_bucket(hashes=True)),
    Case("save native, base, bucket", "native", on_a_base_in_a_bucket),
    *(
        Case(
            f"convert {source} to {target}",
            target,
            rewriting(holdfast.convert, SUFFIXES[source], "-new" + SUFFIXES[target]),
            # The interpreter takes 30 opcodes of a pickle for each tensor, where others read columns.
            most_times=40 if source == "pt" and target != "pt" else 4,
        )
        for source in SUFFIXES
        for target in SUFFIXES
    ),
    *(
        Case(
            f"convert native to {target}, cast",
            target,
            rewriting(holdfast.convert, "", suffix, dtype="bf16"),
        )
        for target, suffix in SUFFIXES.items()
    ),
    *(
        Case(
            f"convert native to {target}, rename",
            target,
            rewriting(holdfast.convert, "", suffix, rename={"layers.*": "blocks.*"}),
            # A regular expression is asked for each name.
            most_times=10,
        )
        for target, suffix in SUFFIXES.items()
    ),
    *(
        Case(f"copy {format}", format, rewriting(holdfast.copy, suffix, suffix))
        for format, suffix in SUFFIXES.items()
    ),
    Case("copy native to a bucket", "native", copying_to_a_bucket),
    *(
        Case(
            f"edit {format}",
            format,
            rewriting(holdfast.edit, suffix, suffix, drop="layers.0.experts.0.w"),
            most_times=6,
        )
        for format, suffix in SUFFIXES.items()
    ),
    *(
        Case(
            f"tie {format}",
            f"tensors, {format}",
            rewriting(holdfast.tie, suffix, suffix, tied),
            # Each tensor is compared with the first of its content, as an object.
            most_times=15,
        )
        for format, suffix in SUFFIXES.items()
    ),
    *(
        Case(
            f"compact {format}",
            f"tensors, {format}",
            rewriting(holdfast.compact, suffix, suffix, tensors),
        )
        for format, suffix in SUFFIXES.items()
    ),
    Case("package native", "native", packaging),
    *(
        Case(f"torch.save, {make.__name__}", "torch.save", torch_saving(make))
        for make in (nested, tied, parameters, in_objects)
    ),
    Case("torch.save, protocol 5", "torch.save", torch_saving(pickle_protocol=5)),
    Case("torch.save, legacy", "torch.save", torch_saving(_use_new_zipfile_serialization=False)),
    Case("save_sharded", "tensors, native", sharding()),
    Case("save_sharded, dcp", "tensors, native", sharding(format="dcp")),
    Case("save_sharded, safetensors", "tensors, safetensors", sharding(format="safetensors")),
    Case("save_sharded, nested", "tensors, native", sharding(nested)),
    Case("save_sharded, tied", "tensors, native", sharding(tied)),
    Case("save native, views", "tensors, native", saving(make=views)),
    Case("save safetensors, views", "tensors, safetensors", saving(".safetensors", views)),
    Case("save_sharded, views", "tensors, native", sharding(views)),
    Case("save_sharded, hashes", "tensors, native", sharding(hashes=True)),
    Case("save_sharded, base", "tensors, native", sharding_on_a_base),
    Case("save_sharded, bucket", "tensors, native", sharding_to_a_bucket),
    Case("async_save_sharded", "tensors, native", sharding_in_the_background()),
    Case("async_save_sharded, dcp", "tensors, native", sharding_in_the_background(format="dcp")),
    Case("Run.save twice", "native", two_steps, saves=2),
    Case("torch.Run.save twice", "tensors, native", two_steps_of_ranks(background=False), saves=2),
    Case(
        "torch.Run.async_save twice",
        "tensors, native",
        two_steps_of_ranks(background=True),
        saves=2,
    ),
]
"""Every verb that writes, under every option."""
