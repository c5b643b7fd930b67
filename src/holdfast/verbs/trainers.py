"""What other trainers leave on disk: who wrote it, at which step, with which metrics; and whether it is torn.

    checkpoint-500/              transformers' Trainer    trainer_state.json: global_step, the last evaluation in log_history
    epoch=3-step=500.ckpt        Lightning                global_step in the pickle, the score of ModelCheckpoint
    global_step500/, latest      DeepSpeed                the name, or what `latest` says
    checkpoint_3/, step_500/     accelerate               the name; checkpoint_3 is the third save, and no step of training
    step-500/                    TorchTitan, DCP          the name
    anything else                                         a `step` or `global_step` at the top of the state; the name

Nothing is run: pickles go through the closed interpreter. What cannot be told is None, and a sentence says so.

A folder is torn where its writer says so (transformers' marker), where what is written last is missing (`trainer_state.json`, the
`.metadata` of a distributed checkpoint), or where a file that begins like a checkpoint does not open: the disk was full, or the
process died. No tensor is read for that; what was damaged inside is found by `verify` alone.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Collection, Mapping, Sequence
from typing import TypeGuard

from msgspec import field

from holdfast.core.checkpoint import Checkpoint
from holdfast.core.limits import Limits
from holdfast.core.order import sort_naturally
from holdfast.core.tensor import LazyTensor
from holdfast.core.value import Value
from holdfast.errors import (
    Corrupted,
    FormatError,
    HoldfastError,
    Replaced,
    StoreError,
    UnknownFormat,
)
from holdfast.formats import FORMATS, file_suffixes
from holdfast.formats.index_file import INDEX, USUAL
from holdfast.formats.safetensors.schema import MANIFEST
from holdfast.verbs.open import open as open_checkpoint
from holdfast.verbs.seals.document import LARGEST

TRAINER_STATE = "trainer_state.json"
INCOMPLETE = "checkpoint-is-incomplete.txt"
"""transformers writes it before, and removes it after, a save at SIGTERM (trainer_jit_checkpoint.py, 5.x); no reader looks."""

STATE_NBYTES = 256 << 20
"""The longest trainer_state.json that is read: the log of a long run has some ten megabytes."""

SPEEDS = ("_runtime", "_per_second", "_time")
"""How the names end of what an evaluation says about itself, and not about the model."""

STEP = re.compile(
    r"(?:^|[-_=.])(?:global_?step|steps?|checkpoint|ckpt|iter|iteration)[-_=]?(\d{1,18})(?=$|[-_.])"
)
"""A step in a name: checkpoint-500, step-500, global_step500, epoch=3-step=500.ckpt. An epoch is no step."""

ONE_OF_MANY = re.compile(r"(?:model|epoch|weights?|net)[-_=]?\d{1,18}(?:$|\.)")
"""What people call one checkpoint of several: model_1.pt, epoch-3. Whether the number is a step, nobody can say."""

COUNTED = re.compile(r"checkpoint_(\d+)")
"""What accelerate calls its folders by itself: the number of the save."""

AT_THE_TOP = (
    "global_step",
    "step",
    "iteration",
    "trainer.global_step",
    "train_state.step",
    "train_state.global_step",
)
"""Where programs of people's own keep the step."""


class TrainerFolder(Value, frozen=True):
    writer: str
    """transformers, lightning, deepspeed, accelerate, dcp, …; empty where that is not known."""
    step: int | None
    metrics: Mapping[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def recognised(path: str, names: Sequence[str], limits: Limits) -> TrainerFolder:
    """The writer and step of a folder with these files, or of a file (`names` is its own then). Not for what is torn."""
    base = os.path.basename(os.path.abspath(path))
    named = _step_in(base)
    if not os.path.isdir(path):
        return _single(path, named, limits)
    there = set(names)
    if TRAINER_STATE in there:
        return _of_trainer(os.path.join(path, TRAINER_STATE), named)
    if "latest" in there or any(
        name.endswith(("_optim_states.pt", "_model_states.pt")) for name in there
    ):
        tag = _tag(os.path.join(path, "latest")) if "latest" in there else None
        return TrainerFolder("deepspeed", named if named is not None else _step_in(tag or ""))
    if any(re.fullmatch(r"random_states_\d+\.pkl", name) for name in there):
        counted = COUNTED.fullmatch(base)
        notes = (
            (
                f"step {int(counted[1])} is the number of the save, which is all that accelerate records",
            )
            if counted
            else ()
        )
        return TrainerFolder("accelerate", named, notes=notes)
    writer = "dcp" if ".metadata" in there else "holdfast" if MANIFEST in there else ""
    if named is not None or not writer:
        return TrainerFolder(writer, named)
    try:
        with open_checkpoint(path, limits=limits) as checkpoint:
            return TrainerFolder(writer, _step_of(checkpoint))
    except HoldfastError:
        return TrainerFolder(writer, None)


def looks_like_a_step(name: str, *, folder: bool) -> bool:
    """Whether a file or folder is called as trainers call their checkpoints. Nothing is opened.

    >>> [looks_like_a_step(name, folder=False) for name in ("last.ckpt", "model_1.pt", "step-500.json", "model.safetensors")]
    [True, True, False, False]
    """
    lower = name.lower()
    called = _step_in(lower) is not None or ONE_OF_MANY.match(lower) is not None
    return lower.endswith(".ckpt") or (called and (folder or lower.endswith(file_suffixes())))


def find_step_folders(keys: Sequence[str]) -> list[str]:
    """Return the folders among the keys of a store that are called like steps of training, in the order of their steps."""
    folders = {key.partition("/")[0] for key in keys if "/" in key}
    return sort_naturally(name for name in folders if looks_like_a_step(name, folder=True))


def torn(path: str, names: Sequence[str], limits: Limits) -> list[tuple[str, str]]:
    """Each file of a folder (of a file: itself) that shows that what lies there is not whole, with the reason."""
    if not os.path.isdir(path):
        wrong = _does_not_open(path, limits)
        return [(os.path.basename(path), wrong)] if wrong else []
    there, found = set(names), []
    for name in names:
        folder, _, last = name.rpartition("/")
        wrong = None
        if last == INCOMPLETE:
            wrong = "its writer says that the checkpoint is incomplete"
        elif last.lower().endswith(file_suffixes()):
            wrong = _does_not_open(os.path.join(path, name), limits)
        elif last in (".metadata", MANIFEST):
            wrong = _does_not_open(os.path.join(path, folder), limits)
        elif last.endswith(tuple(suffix + INDEX for suffix in USUAL)):
            wrong = _names_nothing(
                os.path.join(path, name), {one for one in there if one.rpartition("/")[0] == folder}
            )
        elif any(
            one.data and last.endswith(one.data) and os.path.join(folder, one.index) not in there
            for one in FORMATS
        ):
            wrong = "part of a distributed checkpoint whose .metadata is not there; that is written last"
        found += [(name, wrong)] if wrong else []
    of_trainer = (
        re.fullmatch(r"checkpoint-\d+", os.path.basename(os.path.abspath(path)))
        and "training_args.bin" in there
    )
    if of_trainer and TRAINER_STATE not in there:
        found.append((TRAINER_STATE, "missing; transformers writes it last"))
    if TRAINER_STATE in there:
        try:
            _of_trainer(os.path.join(path, TRAINER_STATE), None)
        except FormatError as error:
            found.append((TRAINER_STATE, error.message))
    if "latest" in there:
        tag = _tag(os.path.join(path, "latest"))
        if tag and not any(name.startswith(f"{tag}/") for name in names):
            found.append(("latest", f"names {tag!r}, which is not there"))
    return found


def _does_not_open(path: str, limits: Limits) -> str | None:
    """The reason why a file or folder that begins like a checkpoint is none; None where it opens, or is something else."""
    try:
        with open_checkpoint(path, limits=limits):
            return None
    except UnknownFormat:
        if os.path.isdir(path):
            return None
        # A file that was given its length and then never its bytes, as a power cut leaves it, has nothing but zeros.
        with open(path, "rb") as file:
            begin = file.read(4096)
        return None if begin.strip(b"\0") else "empty" if not begin else "begins with zeros"
    except (FormatError, Corrupted) as error:
        return f"does not open: {error.message}"
    except StoreError as error:
        if os.path.isdir(path) and not isinstance(error, Replaced):
            return f"does not open: {error.message}"  # a file that its index names is not there
        raise
    except HoldfastError:
        return None  # it may be a file of another program: that it is torn cannot be said


def _names_nothing(path: str, there: Collection[str]) -> str | None:
    """The reason why an index of weights is not that of these files; None where it is."""
    try:
        weights = _json(path).get("weight_map")
        shards = {str(shard) for shard in weights.values()} if isinstance(weights, dict) else set()
    except (OSError, ValueError, RecursionError) as error:
        return f"cannot be read: {error}"
    missing = sorted(shards - {name.rpartition("/")[2] for name in there})
    return f"names {missing[0]!r}, which is not there" if missing else None


def _json(path: str) -> dict[str, object]:
    if os.path.getsize(path) > STATE_NBYTES:
        raise ValueError("it is too long")
    with open(path, encoding="utf-8") as file:
        document: object = json.load(file, parse_int=_integer)
    if not isinstance(document, dict):
        raise ValueError("it is no object")
    return document


def _step_in(name: str) -> int | None:
    """
    >>> _step_in("checkpoint-500"), _step_in("epoch=3-step=1200.ckpt"), _step_in("global_step77"), _step_in("epoch_3")
    (500, 1200, 77, None)
    """
    found = STEP.findall(name)
    return int(found[-1]) if found else None


def _tag(path: str) -> str | None:
    try:
        with open(path, encoding="utf-8") as file:
            tag = file.read(1000).strip()
    except (OSError, UnicodeDecodeError):
        return None
    return tag if tag and "/" not in tag and "\\" not in tag and tag not in (".", "..") else None


def _of_trainer(path: str, named: int | None) -> TrainerFolder:
    """The folder of transformers' Trainer, whose state is JSON."""
    try:
        state = _json(path)
        step, log = state.get("global_step"), state.get("log_history")
        if not _is_step(step):
            raise ValueError("its global_step is no number of a step")
    except (OSError, ValueError, RecursionError) as error:
        raise FormatError(f"cannot be read: {error}", file=path) from None
    notes: list[str] = []
    if named is not None and named != step:
        notes.append(f"the step is {step:,}, from {TRAINER_STATE}; the name contains {named:,}")
    metrics, at = _evaluation(log if isinstance(log, list) else [])
    if metrics and at != step:
        notes.append(
            f"the metrics are from the last evaluation, at step {at:,}"
            if _is_step(at)
            else "the evaluation has no step"
        )
    return TrainerFolder("transformers", step, metrics, tuple(notes))


def _integer(digits: str) -> int:
    if len(digits) > 20:
        raise ValueError(f"an integer of {len(digits):,} digits")
    return int(digits)


def _evaluation(log: Sequence[object]) -> tuple[dict[str, float], object]:
    """The numbers of the last evaluation, and its step; several datasets are entries of one step."""
    metrics: dict[str, float] = {}
    at: object = None
    for entry in reversed(log):
        if not isinstance(entry, dict):
            continue
        numbers = {
            name: value
            for name, value in entry.items()
            if isinstance(value, int | float) and not isinstance(value, bool)
        }
        found = {
            name: float(n)
            for name, n in numbers.items()
            if name.startswith("eval_") and not name.endswith(SPEEDS)
        }
        if found and (not metrics or entry.get("step") == at):
            metrics, at = {**found, **metrics}, entry.get("step")
        elif found:
            break
    return metrics, at


def _is_step(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= LARGEST


def _single(path: str, named: int | None, limits: Limits) -> TrainerFolder:
    """The writer and step of one file: a checkpoint of Lightning, or another state with a step in it."""
    try:
        with open_checkpoint(path, limits=limits) as checkpoint:
            tree = checkpoint.tree
            lightning = isinstance(tree, dict) and "pytorch-lightning_version" in tree
            step = _step_of(checkpoint)
            metrics = _scores(tree) if isinstance(tree, dict) and lightning else {}
    except HoldfastError:
        return TrainerFolder("", named)
    notes: tuple[str, ...] = ()
    if step is not None and named is not None and step != named:
        notes = (f"the step is {step:,}, from the file; the name contains {named:,}",)
    return TrainerFolder(
        "lightning" if lightning else "",
        named if step is None else step,
        notes=notes,
        metrics=metrics,
    )


def _step_of(checkpoint: Checkpoint) -> int | None:
    for dotted in AT_THE_TOP:
        value: object = checkpoint.tree
        for part in dotted.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        found = _number(value)
        if found is not None and found.is_integer() and _is_step(int(found)):
            return int(found)
    text = checkpoint.metadata.get("step", "")
    return int(text) if text.isascii() and text.isdigit() and len(text) < 19 else None


def _scores(tree: Mapping[object, object]) -> dict[str, float]:
    """The scores that the ModelCheckpoints of Lightning watch."""
    found: dict[str, float] = {}
    callbacks = tree.get("callbacks")
    for state in callbacks.values() if isinstance(callbacks, dict) else ():
        if isinstance(state, dict) and isinstance(state.get("monitor"), str):
            score = _number(state.get("current_score"))
            if score is not None:
                found[state["monitor"]] = score
    return found


def _number(value: object) -> float | None:
    if isinstance(value, LazyTensor):
        if value.shape not in ((), (1,)) or value.nbytes > 16:
            return None
        try:
            value = value.numpy().reshape(()).item()
        except (HoldfastError, TypeError):
            return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if not isinstance(value, float) or not math.isinf(value) else value
