"""`load`: a checkpoint of any format as JAX arrays, each device with exactly its slice.

    holdfast.jax.load("step-1000", NamedSharding(mesh, P("data")))        one sharding for all
    holdfast.jax.load("step-1000", {"model": {"w": by_rows}, "*": whole})  by name, as a tree, by patterns
    holdfast.jax.load("step-1000", lambda name, shape: …)                  by a function

1. Every tensor gets its sharding, and every sharding is asked which slices the devices of this process want. Whatever does not
   fit is said here, all of it, before anything is read.
2. Slices are read, several tensors at a time, each byte once: devices with the same slice share one array, and so do tied tensors.
   A tensor of which this process wants everything is read whole, so that its checksum is compared.
3. `jax.make_array_from_callback` hands them to the devices. Processes need not talk to each other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TypeAlias

import jax
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding

from holdfast.core.arguments import AnyDType
from holdfast.core.checkpoint import Checkpoint
from holdfast.core.dtype import DType
from holdfast.core.leaves import CHILD_NBYTES, find_tensor_paths
from holdfast.core.limits import Limits
from holdfast.core.opaque import AnyValue, Opaque
from holdfast.core.options import validate_arguments
from holdfast.core.patterns import make_matcher
from holdfast.core.quantities import describe_value
from holdfast.core.sharing import check_expansion, find_ties, identify_view
from holdfast.core.tensor import Composite, LazyTensor
from holdfast.core.tree import Path, list_module_contents, to_path_key
from holdfast.core.value import Value
from holdfast.errors import BadArgument, BadArgumentType, DoesNotFit, LimitExceeded, Unsupported
from holdfast.numeric.cast import cast
from holdfast.verbs.open import Openable, opened_checkpoint, read
from holdfast.verbs.shared.state import make_lazy_tree, tabulate_state
from holdfast.verbs.shared.transform import Casts, Edits, parse_casts, transform

Where: TypeAlias = "Sharding | jax.Device | None"
"""Where an array goes; None is JAX's default device."""

Shardings: TypeAlias = (
    "Where | Mapping[str, object] | Callable[[str, tuple[int, ...]], Where] | object"
)
"""One for all, a function of name and shape, or a tree of them: its paths are names, or patterns of names."""

Choose: TypeAlias = "Callable[[str, tuple[int, ...]], Where]"
Index = tuple[slice, ...] | None
"""A part of an array, as JAX says it; None is all of it."""

Box = tuple[tuple[int, int], ...]
"""An `Index` as a value: start and stop in each dimension."""

MOST_VISITS = 100_000
"""Visits of shared containers, beyond the first of each. A file of a few hundred bytes can ask for 2^64."""

SHOWN = 5
"""Names that a message lists."""

BATCH_NBYTES = 256 << 20
"""Tensors are read so many bytes at a time: enough for all reading threads, and no more waits in the memory of the host."""


@validate_arguments
def load(
    path: Openable | Checkpoint,
    shardings: Shardings = None,
    *,
    keep: str | Iterable[str] = (),
    drop: str | Iterable[str] = (),
    dtype: AnyDType | Mapping[str, AnyDType] | None = None,
    verify: bool = True,
    limits: Limits | None = None,
    threads: int | None = None,
) -> AnyValue:
    """The state in a checkpoint of any format, as it was saved, with a `jax.Array` in the place of every tensor.

    `shardings` is a `jax.sharding.Sharding` (or a device) for all tensors, a tree of them whose paths are the names of tensors or
    patterns (`{"model": {"*.bias": …}, "*": …}`), or a function that is given a name and a shape; None is the default device. A
    tree must have a place for every tensor, and a tensor for every place. A name itself counts before a pattern, and of patterns
    the first that matches.

    `keep`, `drop` and `dtype` are as in `holdfast.convert`: patterns of dotted names, and what floating-point tensors are cast to.
    Dicts of any kind come back as plain ones, and a pickled module as a dict of what it holds. Other values are as `holdfast.open`
    gives them. Without `jax_enable_x64` JAX has no 64 bits: numbers are rounded as `jnp.asarray` does, and those that do not fit
    are an error.
    """
    casts = parse_casts(dtype)
    with opened_checkpoint(path, limits=limits, threads=threads, verify=verify) as checkpoint:
        state = transform(
            tabulate_state(checkpoint), Edits(keep=tuple(keep), drop=tuple(drop)), limits
        )
        ties = find_ties(state.tensors)
        check_expansion(state.tensors, [*{*range(len(state.tensors))}.difference(ties)])
        tree = make_lazy_tree(state)
        tensors: dict[str, LazyTensor] = {}
        depth = (limits or Limits()).depth
        paths = find_tensor_paths(
            tree, limits or Limits(), MOST_VISITS + CHILD_NBYTES * len(state.tensors)
        )
        names = {path: name for name, path in paths.items()}
        _Mapped(names, depth, tensors.setdefault).walk(tree, (), False)
        wanted = _placed(tensors, _chooser(shardings, tensors, checkpoint.path), casts)
        arrays = dict(_made(_planned(dict.fromkeys(wanted.values()), checkpoint.path)))
        return _Mapped(names, depth, lambda name, tensor: arrays[wanted[name]]).walk(
            tree, (), False
        )


class WantedArray(Value, eq=False):
    """One array that is to be made, under one name or several."""

    lazy: LazyTensor
    sharding: Sharding
    dtype: DType

    def parts(self) -> dict[Box, LazyTensor]:
        """The slices that this process reads: those of its devices, or all of it where that is no more."""
        shape = self.lazy.shape
        jax.ShapeDtypeStruct(
            shape, self.lazy.dtype.numpy, sharding=self.sharding
        )  # says whether the rank will do
        indices = self.sharding.addressable_devices_indices_map(shape).values()
        boxes = {_box(index, shape): index for index in indices}
        if sum(math.prod(stop - start for start, stop in box) for box in boxes) == self.lazy.size:
            return {_box(None, shape): self.lazy}
        return {box: self.lazy[index] for box, index in boxes.items()}

    def make(self, arrays: Mapping[Box, np.ndarray]) -> jax.Array:
        shape = self.lazy.shape
        whole = arrays.get(_box(None, shape))

        def part(index: Index) -> np.ndarray:
            return arrays[_box(index, shape)] if whole is None else whole[index or ()]

        return jax.make_array_from_callback(shape, self.sharding, part, dtype=_held(self.dtype))


class _Mapped:
    """Makes a tree again with plain dicts in it, and what `leaf` makes of every tensor and its name."""

    def __init__(
        self, names: Mapping[Path, str], depth: int, leaf: Callable[[str, LazyTensor], object]
    ) -> None:
        self._names = names
        self._depth = depth
        self._leaf = leaf
        self._left = MOST_VISITS
        self._seen: set[int] = set()

    def walk(self, value: object, path: Path, again: bool) -> object:
        walk = self.walk
        self._left -= again
        if self._left < 0:
            raise LimitExceeded(
                "this state refers to the same containers too often to be a tree of JAX",
                expected=MOST_VISITS,
            )
        if isinstance(value, dict | list | tuple | Opaque):
            again = again or id(value) in self._seen
            self._seen.add(id(value))
        match value:
            case LazyTensor():
                return self._leaf(self._names.get(path, value.name), value)
            case dict():
                return {
                    key: walk(inner, (*path, to_path_key(key)), again)
                    for key, inner in value.items()
                }
            case list() | tuple() if type(value) in (list, tuple):
                return type(value)(
                    [walk(inner, (*path, at), again) for at, inner in enumerate(value)]
                )
            case Opaque() if (module := list_module_contents(value)) is not None and len(
                path
            ) <= self._depth:
                return {
                    key: walk(one, (*path, key), again)
                    for _, children in module
                    for key, one in children
                    if one is not None
                }
            case Composite():
                part = next(iter(value.parts.values())).name
                advice = f"leave it out (drop={part.rpartition('.')[0]!r}), or have its parts from holdfast.open"
                raise Unsupported(
                    f"a {value.kind} tensor, of which JAX has no kind; {advice}", tensor=part
                )
        return value


def _placed(
    tensors: Mapping[str, LazyTensor], choose: Choose, casts: Casts
) -> dict[str, WantedArray]:
    """The array of every name. Tied tensors that go to one place are one array, and read once."""
    patterns = [(make_matcher(pattern), to) for pattern, to in casts]
    once: dict[object, WantedArray] = {}
    found: dict[str, WantedArray] = {}
    for name, lazy in tensors.items():
        to = (
            next((to for means, to in patterns if means(name)), None)
            if lazy.dtype.kind == "float"
            else None
        )
        if to is not None and _held(to) != to.numpy:
            raise BadArgument(
                f"dtype={to} needs 64 bits: jax.config.update('jax_enable_x64', True) comes first",
                found=to,
            )
        where = choose(name, lazy.shape)
        sharding = (
            where
            if isinstance(where, Sharding)
            else SingleDeviceSharding(where or _default_device())
        )
        _held(lazy.dtype, name)
        dtype = to or lazy.dtype
        found[name] = once.setdefault(
            (identify_view(lazy), sharding, dtype), WantedArray(lazy, sharding, dtype)
        )
    return found


def _planned(wanted: Iterable[WantedArray], path: str) -> dict[WantedArray, dict[Box, LazyTensor]]:
    """The slices that are read for each array. Raises `DoesNotFit` with all shardings that do not fit."""
    planned: dict[WantedArray, dict[Box, LazyTensor]] = {}
    wrong: dict[str, str] = {}
    for one in wanted:
        try:
            planned[one] = one.parts()
        except ValueError as error:  # a dimension cannot be split so, or is not there
            wrong[one.lazy.name] = f"{list(one.lazy.shape)}: {error}"
    if wrong:
        message = "; ".join(f"{name} {why}" for name, why in list(wrong.items())[:SHOWN])
        raise DoesNotFit(
            f"{len(wrong):,} shardings do not fit their tensors: {message}",
            mismatched=wrong,
            file=path,
        )
    return planned


def _made(
    planned: Mapping[WantedArray, dict[Box, LazyTensor]],
) -> Iterator[tuple[WantedArray, jax.Array]]:
    for batch in _batches(planned):
        arrays = iter(read([part for one in batch for part in planned[one].values()]))
        for one in batch:
            yield (
                one,
                one.make(
                    {box: _as(next(arrays), part, one.dtype) for box, part in planned[one].items()}
                ),
            )


def _batches(planned: Mapping[WantedArray, dict[Box, LazyTensor]]) -> Iterator[list[WantedArray]]:
    batch: list[WantedArray] = []
    room = BATCH_NBYTES
    for one, parts in planned.items():
        nbytes = sum(part.nbytes for part in parts.values())
        if batch and nbytes > room:
            yield batch
            batch, room = [], BATCH_NBYTES
        batch.append(one)
        room -= nbytes
    if batch:
        yield batch


def _chooser(shardings: Shardings, names: Iterable[str], path: str) -> Choose:
    if shardings is None or isinstance(shardings, Sharding | jax.Device):
        return lambda name, shape: shardings
    if callable(shardings):
        return lambda name, shape: _where(shardings(name, shape), f"for {name!r}")
    places = dict(_leaves(shardings))
    rules = [(make_matcher(place), place) for place in places]
    found = {
        name: name if name in places else next((place for fits, place in rules if fits(name)), None)
        for name in names
    }
    missing = [name for name, place in found.items() if place is None]
    unused = [place for place in places if place not in found.values() and place != "*"]
    if missing or unused:
        message = (
            [f"no sharding for {', '.join(missing[:SHOWN])}; '*' would stand for all the rest"]
            if missing
            else []
        )
        message += [f"no tensor for the sharding at {', '.join(unused[:SHOWN])}"] if unused else []
        raise DoesNotFit("; ".join(message), missing=unused, unexpected=missing, file=path)
    chosen = {place: _where(value, f"at {place!r}") for place, value in places.items()}
    return lambda name, shape: chosen[found[name] or ""]


def _leaves(value: object, above: str = "") -> Iterator[tuple[str, object]]:
    """The leaves of a tree with their dotted paths; those of dicts in their order, where JAX would sort them."""
    if isinstance(value, Mapping):
        children = [(str(key), inner) for key, inner in value.items()]
    else:
        level = jax.tree_util.tree_flatten_with_path(
            value, is_leaf=lambda inner: inner is None or inner is not value
        )[0]
        children = [(jax.tree_util.keystr(path, simple=True), inner) for path, inner in level]
    for key, inner in children:
        if inner is value:
            yield above, value
        else:
            yield from _leaves(inner, f"{above}.{key}" if above else key)


def _where(value: object, at: str) -> Where:
    if value is None or isinstance(value, Sharding | jax.Device):
        return value
    taken = "a jax.sharding.Sharding (as NamedSharding(mesh, spec)) or a device"
    raise BadArgumentType(
        f"shardings= takes {taken} {at}, not {describe_value(value)}", found=value
    )


def _default_device() -> jax.Device:
    chosen = jax.config.jax_default_device
    return chosen if isinstance(chosen, jax.Device) else jax.local_devices(backend=chosen)[0]


def _box(index: Index, shape: tuple[int, ...]) -> Box:
    return tuple(
        one.indices(n)[:2]
        for one, n in zip(index or (slice(None),) * len(shape), shape, strict=True)
    )


def _held(dtype: DType, tensor: str | None = None) -> np.dtype[np.generic]:
    """The dtype that JAX has for elements; without 64 bits, unless these are enabled."""
    if dtype.paired or dtype.bits == 6:  # asked, JAX says so only when it has the elements
        raise Unsupported(f"JAX has no {dtype}; leave it out (drop=…)", tensor=tensor)
    found: np.dtype[np.generic] = jax.dtypes.canonicalize_dtype(dtype.numpy)
    return found


def _as(array: np.ndarray, lazy: LazyTensor, dtype: DType) -> np.ndarray:
    """Elements as JAX is to have them: cast, and in 32 bits where it has no more."""
    if dtype is not lazy.dtype:
        return cast(array.reshape(-1), dtype).reshape(array.shape)
    held = _held(dtype)
    if held == array.dtype:
        return array
    with np.errstate(over="ignore"):
        made = array.astype(held)
    # Numbers may be rounded. An integer is to be the same, and what was finite is not to become infinite.
    whole = dtype.kind in ("int", "uint")
    if not (
        np.array_equal(made, array) if whole else np.array_equal(np.isinf(made), np.isinf(array))
    ):
        advice = "jax.config.update('jax_enable_x64', True) before any array is made, or leave it out (drop=…)"
        raise Unsupported(
            f"numbers that do not fit into 32 bits, and JAX has no more here: {advice}",
            tensor=lazy.name,
        )
    return made
