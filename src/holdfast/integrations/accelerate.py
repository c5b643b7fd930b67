"""accelerate: `save_state` seals what `Accelerator.save_state` has written; nothing that is torn is ever loaded.

    from holdfast.integrations.accelerate import guard, load_state, save_state

    guard(accelerator)                                  accelerator.load_state refuses what is not whole
    save_state(accelerator, "out/step_500", step=500)
    load_state(accelerator, "out")                      the newest that is whole, or None

accelerate has hooks before it writes and before it loads, and none behind the writing: who seals has to be asked afterwards.

1. The hook before a save takes the seal from the folder that is going to be written over.
2. accelerate writes. With `automatic_checkpoint_naming` it would delete the oldest folders first (`total_limit`); here it is not
   asked to, and the limit is kept afterwards.
3. All processes meet; the main one seals, and then removes what is above the limit: of what is whole, the oldest.
4. All learn how that went, and raise where it failed.

The hook before a load refuses a folder without a seal, or one that does not fit. (With FSDP and DeepSpeed the model has been loaded
by then, and the error comes before the rest.)
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list

from holdfast.errors import Corrupted, HoldfastError, NotCommitted
from holdfast.extras.runs.rules import Latest
from holdfast.integrations.keeping import keep_by, newest_whole
from holdfast.stores.paths import AnyPath, local_path
from holdfast.verbs.seal import seal
from holdfast.verbs.seals.check import check_digests, check_sizes, read_seal
from holdfast.verbs.seals.make import unseal

NAMED = re.compile(r"checkpoint_(\d+)")
"""The names that accelerate gives its folders by itself."""


def guard(accelerator: Accelerator) -> None:
    """From now on `accelerator.load_state` refuses what is not sealed and whole, and `save_state` over a folder takes its seal."""
    accelerator.register_save_state_pre_hook(
        lambda models, weights, folder: _open_up(accelerator, folder)
    )
    accelerator.register_load_state_pre_hook(lambda models, folder: check_whole(folder))


def check_whole(folder: AnyPath, *, deep: bool = False) -> None:
    """Raise `Corrupted` where a folder has no seal, or is not as it says; with `deep`, every byte is compared."""
    found = read_seal(folder)
    if found is None:
        message = "this has no seal: it was not written to its end, or by another program (`holdfast seal` looks at it)"
        raise Corrupted(message, file=str(folder))
    wrong = (
        [(one.name, one.message) for one in check_digests(folder, found)]
        if deep
        else list(check_sizes(folder, found))
    )
    if wrong:
        raise Corrupted(
            f"this is not whole: {'; '.join(f'{name}: {why}' for name, why in wrong[:5])}",
            file=str(folder),
        )


def save_state(
    accelerator: Accelerator,
    output_dir: AnyPath | None = None,
    *,
    step: int | None = None,
    metrics: Mapping[str, float] | None = None,
    durable: bool = True,
    safe_serialization: bool = True,
) -> str:
    """`accelerator.save_state`, sealed; the folder. To be called by every process.

    Without `output_dir`, with `automatic_checkpoint_naming`, it is `checkpoints/checkpoint_N`, and `total_limit` is kept after the
    new one is whole. `step` is that of the training; without one it is taken from the name.
    """
    project = accelerator.project_configuration
    limit = None
    if output_dir is None:
        if not project.automatic_checkpoint_naming:
            raise NotCommitted(
                "say where to save, or let accelerate choose the names (ProjectConfiguration, its automatic naming)"
            )
        folder = os.path.join(
            accelerator.project_dir, "checkpoints", f"checkpoint_{accelerator.save_iteration}"
        )
        limit = project.total_limit
        if os.path.lexists(folder):
            message = "this exists; say where to go on with accelerator.project_configuration.iteration (load_state does that)"
            raise NotCommitted(message, file=folder)
    else:
        folder = local_path(output_dir)
    accelerator.wait_for_everyone()  # or one of us makes the folder before another has looked
    _open_up(accelerator, folder, durable=durable)
    accelerator.wait_for_everyone()
    with _named_by_us(accelerator):
        accelerator.save_state(folder, safe_serialization=safe_serialization)
    accelerator.wait_for_everyone()
    failure: list[str | None] = [None]
    if accelerator.is_main_process:
        try:
            seal(folder, step=step, metrics=metrics, durable=durable, overwrite=True)
            if limit is not None:
                keep_by(os.path.dirname(folder), [Latest(max(limit, 1))], durable=durable)
        except (HoldfastError, OSError) as error:
            failure = [str(error)]
    broadcast_object_list(failure)
    if failure[0] is not None:
        raise NotCommitted(f"the state was saved, and not sealed: {failure[0]}", file=folder)
    return folder


def load_state(
    accelerator: Accelerator, input_dir: AnyPath | None = None, *, deep: bool = False
) -> str | None:
    """Load the newest state that is whole, and say which; None, and nothing loaded, where there is none.

    `input_dir` is a folder of such folders, or one of them; without it, that of `automatic_checkpoint_naming`.
    """
    root = (
        os.path.join(accelerator.project_dir, "checkpoints")
        if input_dir is None
        else local_path(input_dir)
    )
    chosen: list[str | None] = [None]
    if accelerator.is_main_process:
        sealed = os.path.isdir(root) and read_seal(root) is not None
        chosen = [root if sealed else newest_whole(root, deep=deep)]
    broadcast_object_list(chosen)
    folder = chosen[0]
    if folder is not None:
        check_whole(folder)
        with _named_by_us(accelerator):
            accelerator.load_state(folder)
    if input_dir is None and os.path.isdir(root):
        # Torn ones as well: the next save has a name of its own.
        numbers = [int(found[1]) for found in map(NAMED.fullmatch, os.listdir(root)) if found]
        accelerator.project_configuration.iteration = max(numbers, default=-1) + 1
    return folder


@contextmanager
def _named_by_us(accelerator: Accelerator) -> Iterator[None]:
    """A block in which accelerate neither chooses the folder nor deletes others."""
    project = accelerator.project_configuration
    before, project.automatic_checkpoint_naming = project.automatic_checkpoint_naming, False
    try:
        yield
    finally:
        project.automatic_checkpoint_naming = before


def _open_up(accelerator: Accelerator, folder: AnyPath, *, durable: bool = True) -> None:
    if accelerator.is_main_process:
        unseal(folder, durable=durable)
