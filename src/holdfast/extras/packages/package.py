"""`package`: the weights of several models in one checkpoint, each storage once.

    holdfast.package({"base": state, "tuned": "tuned.safetensors"}, "bundle.pt2")

1. Every model is described, states in memory together, so that what they share is one storage. A file that is given twice is one.
2. What files that copy each tensor say about shared storages is put back together (`rejoin`). With `deduplicate="content"`,
   tensors that hold the same are tied as well (`tie`).
3. The package is laid out: a `.pt2`, or a native directory with the names `<model>.<name>`. A model that comes from a `.pt2` brings
   its program along; a `.pt2` of weights alone is one that Holdfast opens and stock torch refuses. All that stands in the way is
   listed, by model and weight, before a file exists.

`replace_weights`: a fine-tuned state into the program of a `.pt2`, without exporting it again.

Names, dtypes and shapes must be those of the program's weights; all that does not fit is listed, and nothing is written. Everything
else in the archive (programs, constants, compiled code, extra files) is copied as it is. See formats/pt2/replace.py.
"""

from __future__ import annotations

import math
import os
from collections.abc import Hashable, Mapping
from contextlib import ExitStack
from typing import Literal, Unpack

from holdfast.core.checkpoint import Checkpoint
from holdfast.core.chunk import Storage
from holdfast.core.limits import Limits
from holdfast.core.options import PackageOptions, ReplaceOptions, pick_fields, validate_arguments
from holdfast.core.protocols import Source, State, Store
from holdfast.core.tensor import LazyTensor
from holdfast.core.tree import iterate_dict_leaves
from holdfast.core.value import replace
from holdfast.engine.saves import Data, SavePlan
from holdfast.engine.table import make_lazy_table
from holdfast.errors import CannotHold, Unsupported
from holdfast.extras.packages.pt2.read import Pt2Reader
from holdfast.extras.packages.pt2.replace import SideRecords, lay_out_replaced, read_side_records
from holdfast.extras.packages.pt2.write import ModelWeights, lay_out_pt2, models_of
from holdfast.extras.packages.tie import tie_state
from holdfast.formats import FORMATS, Format, chosen, format_of, titles
from holdfast.formats.torch.write import archive_name, without_origin
from holdfast.stores.paths import place_of
from holdfast.stores.place import place_at
from holdfast.verbs.open import Openable
from holdfast.verbs.open import open as open_checkpoint
from holdfast.verbs.shared.formats import LayoutOptions, check_archive_name, find_suffix, plan_save
from holdfast.verbs.shared.models import CONSTANTS, models_in, non_weight_keys, weights_of
from holdfast.verbs.shared.planned import (
    Destination,
    Planned,
    Saved,
    Writing,
    check_target,
    make_report_fields,
    plan_derived_checkpoint,
)
from holdfast.verbs.shared.rejoin import rejoin
from holdfast.verbs.shared.state import make_lazy_tree, replace_table, tabulate_state, tabulate_tree

Deduplicate = Literal["storage", "content"]

EXTRACT = "extract the weights alone first (convert)"


@validate_arguments
def package(
    models: Mapping[str, object], dst: str | os.PathLike[str], **options: Unpack[PackageOptions]
) -> Saved:
    """Save several models in one checkpoint, in which each storage is held once and every view is a view.

    A model is a state (nested dicts of arrays, tensors, lazy tensors), a module, an open checkpoint, or what `open` takes.
    Parameters are known by their type (`nn.Parameter`), or by what their file says. The format is `format` (`pt2`, `native`), or
    what the suffix says: `.pt2`, or none for a native directory. With `deduplicate="content"`, equal tensors are found wherever
    they lie, compared byte by byte, and stored once.

    Raises `CannotHold` with every problem, by model and weight; nothing is written then.
    """
    return plan_package(models, dst, options).carry_out(options["progress"])


def plan_package(
    models: Mapping[str, object], dst: str | os.PathLike[str], options: PackageOptions
) -> Planned[Saved]:
    """Lay out a package. With `deduplicate="content"`, what looks equal is read and compared."""
    target, writing = place_of(dst), pick_fields(Writing, options)
    format, deduplicate = options["format"], options["deduplicate"]
    among, suffix = [one for one in FORMATS if one.packages], find_suffix(target)
    if format is not None:
        found = chosen(format, among)
        message = f"a package is {' or '.join(map(repr, titles(among)))}, not {format!r}"
    else:
        found = next((one for one in among if suffix in one.suffixes), None)
        if found is None:
            check_archive_name(target)
        message = (
            f"a package is a .pt2 archive, or a directory without a suffix; {suffix!r} says neither: choose another name, "
            "or say format="
        )
    if found is None:
        raise Unsupported(message, file=target, found=format or suffix)
    if deduplicate not in ("storage", "content"):
        raise Unsupported(
            f"equal tensors are found by 'storage' or by 'content', not by {deduplicate!r}",
            found=deduplicate,
        )
    if deduplicate == "content":
        # Otherwise nothing is read until the target is opened.
        check_target(target, directory=found.folder, writing=writing)
    with ExitStack() as stack:
        state, beside, notes = _describe(models, stack, options["limits"])
        reads = state.tensors.stores
        if problems := _incomplete(state):
            raise CannotHold("some weights of this package are not all there", problems)
        state = share_files(state)
        if deduplicate == "content":
            state, _, more = tie_state(
                state, threads=writing.reading_threads, progress=options["progress"]
            )
            notes += more
        if not found.programs:
            plan = _plan_state(state, beside, target, found)
        else:
            rejoined = rejoin(state)
            plan = _plan_pt2(make_lazy_tree(rejoined.state), beside, archive_name(target))
            notes += rejoined.notes
        plan = replace(plan, notes=(*notes, *plan.notes))
        return Planned(
            plan,
            Saved(**make_report_fields(plan, target)),
            writing,
            reads=reads,
            sources=stack.pop_all(),
        )


def _describe(
    models: Mapping[str, object], stack: ExitStack, limits: Limits | None
) -> tuple[State, Mapping[str, SideRecords], tuple[str, ...]]:
    """All models as one state, those in memory together; the other records of each `.pt2` among them; and notes."""
    wrong = ["there is no model"]
    if isinstance(models, Mapping) and models:
        named = [model for model in models if isinstance(model, str) and model]
        wrong = [f"{model!r} is no name for a model" for model in models if model not in named]
    if wrong:
        raise CannotHold("a package holds models by their names", wrong)
    opened: dict[tuple[object, ...], object] = {}
    trees: dict[str, object] = {}
    once: dict[
        int, tuple[State, object]
    ] = {}  # by identity: two models of one checkpoint are rows of one table
    beside: dict[str, SideRecords] = {}
    memory: dict[str, object] = {}
    notes: list[str] = []
    for model, value in models.items():
        if isinstance(value, str | os.PathLike):
            place = place_at(place_of(value)).identity
            if place not in opened:
                opened[place] = _opened(value, stack, limits)
            value = opened[place]
        value = _opened(value, stack, limits)
        if isinstance(value, Checkpoint) and format_of(value.format).programs:
            trees[model], beside[model] = _member(value, limits)
        elif isinstance(value, Checkpoint | State):
            if id(value) not in once:
                state = value if isinstance(value, State) else tabulate_state(value, limits=limits)
                once[id(value)] = state, make_lazy_tree(state)
            state, trees[model] = once[id(value)]
            notes += [f"model {model!r}: {note}" for note in state.notes]
            texts = ", ".join(sorted(without_origin(state.metadata).keys() - {"models"})[:8])
            if texts:
                note = f"model {model!r}: its metadata ({texts}) has no place in a package and is not kept"
                notes.append(note)
        else:
            # The state of a module, in which its parameters differ from its buffers.
            state_dict = (
                getattr(value, "state_dict", None) if not isinstance(value, Mapping) else None
            )
            memory[model] = state_dict(keep_vars=True) if callable(state_dict) else value
    described = tabulate_state(memory, limits=limits)
    if not trees:
        return replace(described, notes=()), beside, described.notes
    inside = make_lazy_tree(described)
    trees |= inside if isinstance(inside, dict) else {}
    return (
        tabulate_tree({model: trees[model] for model in models}, limits=limits),
        beside,
        (*notes, *described.notes),
    )


def _member(checkpoint: Checkpoint, limits: Limits | None) -> tuple[object, SideRecords]:
    """The raw weights and constants of the one model in a `.pt2`, and the other records that it has."""
    models = models_in(checkpoint, make_lazy_tree(tabulate_state(checkpoint, limits=limits)))
    if len(models) != 1:
        problem = f"{checkpoint.path} holds the models {', '.join(models)}; extract one first (convert with model=…)"
        raise CannotHold("a model of a package is one state", [problem])
    ((model, tree),) = models.items()
    beside = read_side_records(checkpoint.source, model)
    apart = non_weight_keys(tree)
    member = {
        name: value
        for name, value in tree.items()
        if name not in beside.weights and name not in apart
    }
    for key in apart:
        constants = tree[key] if key.removesuffix("#2") == CONSTANTS else None
        if isinstance(constants, dict):
            member[key] = {
                name: value for name, value in constants.items() if name not in beside.constants
            }
    return member, beside


def _plan_state(
    state: State, besides: Mapping[str, SideRecords], target: str, format: Format
) -> SavePlan:
    problems = []
    for model, beside in besides.items():
        kinds = {
            "a program": beside.program,
            "sample inputs": beside.sample_inputs,
            "pickled objects": beside.weights or beside.constants,
            "extra files": beside.extra,
        }
        has = [what for what, records in kinds.items() if records]
        problems += [f"{model}: {', '.join(has)}"] if has else []
        problems += [f"{model}: {problem}" for problem in beside.problems]
    if problems:
        raise CannotHold(
            f"a {format.title} package has no place for what these .pt2 files hold; {EXTRACT}",
            problems,
        )
    models = ", ".join(map(str, state.tree)) if isinstance(state.tree, dict) else ""
    return plan_save(
        target,
        replace(state, metadata={**state.metadata, "models": models}),
        format.name,
        options=LayoutOptions(),
    )


def _plan_pt2(tree: object, besides: Mapping[str, SideRecords], name: str) -> SavePlan:
    parts = _parts(tree)
    problems: list[str] = []
    extra: dict[str, bytes | Data] = {}
    for model, beside in besides.items():
        part = parts[model]
        problems += [f"{model}: {problem}" for problem in beside.problems]
        parts[model] = ModelWeights(
            {**beside.weights, **part.weights},
            {**part.constants, **beside.constants},
            beside.program,
            beside.sample_inputs,
        )
        # Two archives may have extra files of one name. Readers of zip archives ignore case.
        taken = {key.casefold() for key in extra}
        extra |= {
            f"{model}/{key}" if key.casefold() in taken else key: content
            for key, content in beside.extra.items()
        }
    if problems:
        raise CannotHold(
            f"a package has no place for what these .pt2 files hold; {EXTRACT}", problems
        )
    return lay_out_pt2(parts, name=name, extra=extra)


def _parts(models: object) -> dict[str, ModelWeights]:
    """The models, with their constants where those of a program belong."""
    if not isinstance(models, dict):
        return models_of(models)
    trees, constants = {}, {}
    for model, tree in models.items():
        key = _constants_key(tree)
        trees[model] = (
            tree if key is None else {name: value for name, value in tree.items() if name != key}
        )
        constants[model] = {} if key is None else tree[key]
    parts = models_of(trees)
    problems = _two_dtypes({model: part.weights for model, part in parts.items()})
    if problems:
        raise CannotHold(
            "models of this package share storages in ways that a pt2 archive cannot say", problems
        )
    return {model: replace(part, constants=constants[model]) for model, part in parts.items()}


def _constants_key(tree: object) -> str | None:
    """The key of the constants in the tree of a model; a weight may have the usual name."""
    for key in (CONSTANTS, f"{CONSTANTS}#2"):
        beside = tree.get(key) if isinstance(tree, dict) else None
        if isinstance(beside, dict) and all(
            isinstance(value, LazyTensor) for value in beside.values()
        ):
            return key
    return None


def _incomplete(state: State) -> list[str]:
    """Problems of tensors of which only some elements are here, or none: a rank's own shards, the meta device."""
    problems = []
    for row, tensor in state.tensors.irregular.items():
        name = state.tensors.names[row]
        here = sum(chunk.box.count for chunk in tensor.chunks)
        if tensor.traits.meta:
            problems.append(f"{name}: on the meta device it has no data")
        elif here < math.prod(tensor.shape):
            problems.append(
                f"{name}: {here:,} of {tensor.size:,} elements are here, and no member of its group has them all"
            )
    return problems


def _two_dtypes(models: Mapping[str, Mapping[str, object]]) -> list[str]:
    """Problems of weights over one storage that disagree in dtype, each with the first that they disagree with."""
    first: dict[Storage, tuple[str, LazyTensor]] = {}
    problems = []
    for model, weights in models.items():
        for name, tensor in weights.items():
            if not isinstance(tensor, LazyTensor) or len(tensor.chunks) != 1 or not tensor.size:
                continue
            other, earlier = first.setdefault(tensor.chunks[0].storage, (f"{model}.{name}", tensor))
            if earlier.dtype is not tensor.dtype:
                problems.append(
                    f"{model}.{name}: {tensor.dtype} over the storage of {other}, which is {earlier.dtype}"
                )
    return problems


def share_files(state: State) -> State:
    """The state with one source for a file that was opened several times, so that its storages are the same."""
    stores = state.tensors.stores
    first: dict[Hashable, Store] = {}
    for store in stores:
        first.setdefault(store.identity(), store)
    if len(first) == len(stores):
        return state
    table = state.tensors
    tensors = [table.lazy_tensor(row) for row in range(len(table))]
    sources = {first[tensor.source.store.identity()]: tensor.source for tensor in reversed(tensors)}

    def moved(tensor: LazyTensor) -> LazyTensor:
        source = sources[first[tensor.source.store.identity()]]
        chunks = tuple(
            chunk.with_storage(chunk.storage.with_home(source.store)) for chunk in tensor.chunks
        )
        return replace(tensor, chunks=chunks, source=source)

    return replace_table(state, make_lazy_table(table.names, [*map(moved, tensors)]))


@validate_arguments
def replace_weights(
    src: Openable | Checkpoint,
    dst: str | os.PathLike[str] | None = None,
    **options: Unpack[ReplaceOptions],
) -> Saved:
    """Put other weights into a `.pt2`: as a new archive at `dst`, or in its place, atomically (`in_place=True`).

    `weights` is a state dict, an open checkpoint, or what `open` takes. An archive of several models needs `model`, or a state
    `{model: state dict}` with those that change. Streams; nothing is held in memory.

    Raises `CannotHold` with every name, dtype and shape that does not fit, and writes nothing then.
    """
    return plan_replacement(src, dst, options).carry_out(options["progress"])


def plan_replacement(
    src: Openable | Checkpoint, dst: str | os.PathLike[str] | None, options: ReplaceOptions
) -> Planned[Saved]:
    limits = options["limits"]
    if dst is not None and not options["in_place"]:
        check_archive_name(place_of(dst))

    def lay_out(archive: Checkpoint, where: Destination) -> Planned[Saved]:
        source = archive.source
        with ExitStack() as stack:
            given = _opened(options["weights"], stack, limits)
            state = tabulate_state(given, limits=limits)
            tree = make_lazy_tree(rejoin(state).state)
            states = _states(
                tree,
                given if isinstance(given, Checkpoint) else None,
                _models(source),
                model=options["model"],
            )
            plan = lay_out_replaced(source, states, name=archive_name(where.path))
            report = Saved(**make_report_fields(plan, where.path))
            return Planned(
                plan,
                report,
                where.writing,
                reads=(source.store, *state.tensors.stores),
                sources=stack.pop_all(),
            )

    return plan_derived_checkpoint(src, dst, lay_out, options, directory=False, programs=True)


def _opened(value: object, stack: ExitStack, limits: Limits | None) -> object:
    """The checkpoint of what `open` takes, which the stack closes; anything else is a state, and stays what it is."""
    if not isinstance(value, str | os.PathLike | bytes | bytearray | memoryview):
        return value
    # Blocks are read by the threads that write them.
    return stack.enter_context(open_checkpoint(value, threads=1, limits=limits))


def _models(source: Source) -> list[str]:
    if len(source.store.list()) != 1:
        raise Unsupported(
            "weights are replaced in a .pt2, which is one file", file=source.store.name
        )
    return Pt2Reader(source).names()


def _states(
    tree: object, opened: Checkpoint | None, names: list[str], *, model: str | None
) -> dict[str, Mapping[str, LazyTensor]]:
    if opened is not None and format_of(opened.format).programs:
        found = weights_of(opened, tree)
        if model is None and len(names) > 1:
            return dict(found)
        if len(found) == 1:
            ((_, weights),) = found.items()
            return {model or names[0]: weights}
        if model in found:
            return {model: found[model]}
        problem = f"the weights are of several models: {', '.join(found)}"
    elif not names:
        problem = "there is no model in it"
    elif model is not None or len(names) == 1:
        model = model or names[0]
        return {model: _flat(model, tree)}
    elif (
        isinstance(tree, dict)
        and tree
        and all(key in names and isinstance(value, dict) for key, value in tree.items())
    ):
        return {str(key): _flat(str(key), value) for key, value in tree.items()}
    else:
        problem = f"say of which model they are: {', '.join(names)}"
    raise CannotHold("these weights do not fit the archive", [problem])


def _flat(model: str, tree: object) -> dict[str, LazyTensor]:
    leaves = dict(iterate_dict_leaves(tree))
    weights = {name: value for name, value in leaves.items() if isinstance(value, LazyTensor)}
    others = {name: value for name, value in leaves.items() if name not in weights}
    if others:
        problems = [
            f"{model}.{name}: a {type(value).__name__}, and no weight"
            for name, value in others.items()
        ]
        raise CannotHold("these weights do not fit the archive", problems)
    return weights
