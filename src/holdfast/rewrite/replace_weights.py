"""`replace_weights`: a fine-tuned state into the program of a `.pt2`, without exporting it again.

Names, dtypes and shapes must be those of the program's weights; all that does not fit is listed, and nothing is written. Everything
else in the archive (programs, constants, compiled code, extra files) is copied as it is. See formats/pt2/replace.py.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import ExitStack

from holdfast.core.checkpoint import Checkpoint
from holdfast.core.limits import Limits
from holdfast.core.protocols import Source, State
from holdfast.core.tensor import LazyTensor
from holdfast.engine.write import Progress
from holdfast.errors import CannotHold, Unsupported
from holdfast.formats.pt2.read import Pt2Reader
from holdfast.formats.pt2.replace import lay_out_replaced
from holdfast.formats.torch.write import archive_name
from holdfast.formats.zip.reader import read_archive
from holdfast.inspect.open import Openable, opened
from holdfast.inspect.open import open as open_checkpoint
from holdfast.rewrite.models import weights_of
from holdfast.rewrite.planned import Planned, Saved, Writing, destination, planned_fields, stores_of
from holdfast.rewrite.rejoin import rejoin
from holdfast.rewrite.state import describe_state

__all__ = ["plan_replacement", "replace_weights"]


def replace_weights(
    src: Openable | Checkpoint,
    dst: str | os.PathLike[str] | None = None,
    *,
    weights: object,
    model: str | None = None,
    in_place: bool = False,
    overwrite: bool = False,
    durable: bool = True,
    read_back: bool = False,
    max_memory: int | str | None = None,
    dry_run: bool = False,
    limits: Limits | None = None,
    threads: int | None = None,
    progress: Progress | None = None,
) -> Saved:
    """Put other weights into a `.pt2`: as a new archive at `dst`, or in its place, atomically (`in_place=True`).

    `weights` is a state dict, an open checkpoint, or the path of one. An archive of several models needs `model`, or a state
    `{model: state dict}` with those that change. Streams; nothing is held in memory.

    Raises `CannotHold` with every name, dtype and shape that does not fit, and writes nothing then.
    """
    planned = plan_replacement(
        src, dst, weights=weights, model=model, in_place=in_place or (dst is None and dry_run),
        writing=Writing(overwrite, durable, threads, read_back, max_memory), limits=limits,
    )  # fmt: skip
    return planned.carry_out(dry_run=dry_run, progress=progress)


def plan_replacement(
    src: Openable | Checkpoint,
    dst: str | os.PathLike[str] | None,
    *,
    weights: object,
    model: str | None = None,
    in_place: bool,
    writing: Writing,
    limits: Limits | None = None,
) -> Planned[Saved]:
    """Lay out the archive with other weights."""
    with ExitStack() as stack:
        archive = stack.enter_context(opened(src, threads=writing.threads, limits=limits))
        where = destination(archive, dst, in_place=in_place, format=None, writing=writing, writable=("pt2",))
        source = archive.source
        if isinstance(weights, str | os.PathLike):
            weights = stack.enter_context(open_checkpoint(weights, threads=writing.threads, limits=limits))
        given = describe_state(weights, limits=limits)
        states = _states(rejoin(given).state, weights if isinstance(weights, Checkpoint) else None, _models(source), model)
        plan = lay_out_replaced(source, states, name=archive_name(where.path))
        report = Saved(**planned_fields(plan, where.path))
        return Planned(plan, report, where.writing, (source.store, *stores_of(given)), stack.pop_all())


def _models(source: Source) -> list[str]:
    keys = source.store.list()
    if len(keys) != 1:
        raise Unsupported("weights are replaced in a .pt2, which is one file", file=source.store.name)
    return Pt2Reader(source, keys[0], read_archive(source, keys[0])).names()


def _states(state: State, opened: Checkpoint | None, names: list[str], model: str | None) -> dict[str, Mapping[str, LazyTensor]]:
    """The new weights of each model that gets some."""
    known = ", ".join(names)
    tree = state.tree
    if opened is not None and opened.format == "pt2":
        found = weights_of(opened, tree)
        if model is None and len(names) > 1:
            return dict(found)
        if len(found) == 1:
            ((_, weights),) = found.items()
            return {model or names[0]: weights}
        if model in found:
            return {model: found[model]}
        raise CannotHold("these weights do not fit the archive", [f"the weights are of several models: {', '.join(found)}"])
    if not names:
        raise CannotHold("these weights do not fit the archive", ["there is no model in it"])
    if model is not None:
        return {model: _flat(model, tree)}
    if len(names) == 1:
        return {names[0]: _flat(names[0], tree)}
    if isinstance(tree, dict) and tree and all(key in names and isinstance(value, dict) for key, value in tree.items()):
        return {str(key): _flat(str(key), value) for key, value in tree.items()}
    raise CannotHold("these weights do not fit the archive", [f"say of which model they are: {known}"])


def _flat(model: str, tree: object) -> dict[str, LazyTensor]:
    """A state dict under dotted names."""
    weights: dict[str, LazyTensor] = {}
    problems: list[str] = []

    def walk(value: object, name: str) -> None:
        if isinstance(value, dict):
            for key, inner in value.items():
                walk(inner, f"{name}.{key}" if name else str(key))
        elif isinstance(value, LazyTensor):
            weights[name] = value
        else:
            problems.append(f"{model}.{name}: a {type(value).__name__}, and no weight")

    walk(tree, "")
    if problems:
        raise CannotHold("these weights do not fit the archive", problems)
    return weights
