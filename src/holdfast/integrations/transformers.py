"""`SealCallback`: what transformers' Trainer writes is sealed when it is whole; `latest_whole`: what may be resumed from.

    trainer = Trainer(…, callbacks=[SealCallback()])
    trainer.train(resume_from_checkpoint=latest_whole("out"))

The Trainer writes its files at their final names, one after the other, and takes the folder with the highest number for the newest.

1. `on_save` comes when this rank has written all that it writes, and the old folders have been rotated away. Other ranks may still
   write (`rng_state_R.pth` has no barrier behind it), so all of them meet here first. Then one process seals, as `holdfast.seal`.
2. A run that goes back may come to a step a second time, and write over a folder that is sealed. The seal goes before.
3. A save at SIGTERM (`enable_jit_checkpoint`) calls no `on_save`. What was written and is whole is sealed at the end of training.
"""

from __future__ import annotations

import os
import re
import time
import warnings

import torch.distributed
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from holdfast.errors import HoldfastError, HoldfastWarning
from holdfast.integrations.keeping import Keep, keep_by, newest_whole, ran_here, rules_of
from holdfast.stores.paths import AnyPath
from holdfast.verbs.seal import seal
from holdfast.verbs.seals.check import is_sealed
from holdfast.verbs.seals.make import unseal

CHECKPOINT = re.compile(r"checkpoint-\d+")
"""The names of the Trainer's folders."""


class SealCallback(TrainerCallback):  # type: ignore[misc]  # transformers may not be there when types are checked
    """Seals every checkpoint that the Trainer has written to its end.

    `keep` is how many of them stay, or which: rules, as of a `Run`. What no rule keeps goes when a new one is sealed, and never
    before; torn ones are not counted, and stay. It stands in for `save_total_limit`. `digest` and `durable` are those of
    `holdfast.seal`. A seal that cannot be written raises, as a save does that fails.
    """

    def __init__(
        self, *, keep: Keep = None, digest: str = "xxh3-128", durable: bool = True
    ) -> None:
        self._keep = rules_of(keep)
        self._digest, self._durable = digest, durable
        self._began = 0.0

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **more: object
    ) -> None:
        """Record when the training began, and warn of an option that would undo the work."""
        self._began = time.time()
        if args.should_save and self._keep:
            ran_here(args.output_dir)  # from here on it counts
        if args.save_total_limit is not None and args.should_save:
            why = "it removes the older checkpoints before the new one is sealed, and counts torn ones"
            message = f"use SealCallback(keep=…) in place of save_total_limit: {why}"
            warnings.warn(message, HoldfastWarning, stacklevel=2)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **more: object
    ) -> None:
        """Unseal a folder that is going to be written over."""
        if control.should_save:
            self._about_to_write(args, state)

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **more: object
    ) -> None:
        if control.should_save:
            self._about_to_write(args, state)

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **more: object
    ) -> None:
        """With save_strategy="best", a save may follow the evaluation."""
        if str(getattr(args.save_strategy, "value", args.save_strategy)) == "best":
            self._about_to_write(args, state)

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **more: object
    ) -> None:
        """Seal what was written, when every rank has written its part."""
        _meet()
        folder = _folder(args, state)
        if args.should_save and os.path.isdir(folder):
            ran = ran_here(args.output_dir) if self._keep else None
            seal(folder, ran=ran, digest=self._digest, durable=self._durable, overwrite=True)
            keep_by(args.output_dir, self._keep, durable=self._durable)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **more: object
    ) -> None:
        """Seal what was written since the training began and has no seal yet, if it is whole."""
        _meet()
        if not args.should_save or not os.path.isdir(args.output_dir):
            return
        for name in sorted(filter(CHECKPOINT.fullmatch, os.listdir(args.output_dir))):
            folder = os.path.join(args.output_dir, name)
            new = os.path.isdir(folder) and os.stat(folder).st_mtime >= self._began - 1
            if new and not is_sealed(folder):
                try:
                    seal(folder, digest=self._digest, durable=self._durable)
                except HoldfastError as error:
                    warnings.warn(f"{folder} has no seal: {error}", HoldfastWarning, stacklevel=2)

    def _about_to_write(self, args: TrainingArguments, state: TrainerState) -> None:
        if args.should_save:
            unseal(_folder(args, state), durable=self._durable)


def latest_whole(output_dir: AnyPath, *, deep: bool = False) -> str | None:
    """The sealed checkpoint with the highest step whose files are all there and as long as they were; None for a fresh start.

    For `trainer.train(resume_from_checkpoint=…)`. With `deep`, every byte is compared with its digest as well.
    """
    return newest_whole(output_dir, deep=deep)


def _folder(args: TrainingArguments, state: TrainerState) -> str:
    return os.path.join(args.output_dir, f"checkpoint-{state.global_step}")


def _meet() -> None:
    """Wait for all ranks; every callback is called on each of them."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.barrier()
