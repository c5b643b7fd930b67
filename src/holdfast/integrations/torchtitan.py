"""`Checkpointer`: how TorchTitan's trainer saves and resumes.

    config.checkpoint = Checkpointer.Config(enable=True, interval=500)      # format="dcp" for steps that TorchTitan's own reads

1. A save is copied and written while the training goes on, all ranks together, and published by one rename.
2. Old steps are removed when a newer one is there, and never before: `keep_latest_k` of them are whole at any time.
3. The training goes on from the newest step that is whole and has the state of the optimizer. A step that is torn is passed over.
4. The last step is the model alone, in `export_dtype`; with `last_save_in_hf` a folder as Hugging Face has them.

What is saved has the layout of TorchTitan's own manager: the model's names at the top, the rest under `optimizer`, `lr_scheduler`,
`dataloader` and `train_state`. So steps of one can be loaded by the other where the format is DCP.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Literal, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torchtitan.components.checkpointer.base import (
    DATALOADER,
    LR_SCHEDULER,
    MODEL,
    OPTIMIZER,
    BaseCheckpointManager,
    ModelWrapper,
)
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.protocols.state_dict_adapter import BaseStateDictAdapter

from holdfast.core.runtime import start_thread
from holdfast.engine.commit.temporaries import make_temporary_name
from holdfast.errors import BadArgument, DoesNotFit, HoldfastError, NotCommitted
from holdfast.formats import rank_formats, titles
from holdfast.torch.ranks.background import SaveHandle
from holdfast.torch.ranks.load_sharded import load_sharded
from holdfast.torch.ranks.save_sharded import async_save_sharded, save_sharded
from holdfast.verbs.convert import convert
from holdfast.verbs.open import open as open_checkpoint
from holdfast.verbs.shared.state import Stateful

T = TypeVar("T")
STEP = re.compile(r"step-(\d+)")
SHARD = "5GB"
"""The size of files for Hugging Face, which writes them so, too."""


class Checkpointer(BaseCheckpointManager):  # type: ignore[misc]  # TorchTitan is not there when types are checked
    """Saves and loads a training. Every rank has one, and every rank calls it."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseCheckpointManager.Config):  # type: ignore[misc]
        """What TorchTitan's own managers take, and:"""

        format: Literal["native", "dcp"] = "native"
        """Of the steps: Holdfast's own, with checksums, or torch's."""
        background: bool = True
        """Whether the training goes on while a step is written. The last step is always waited for."""

        def __post_init__(self) -> None:
            BaseCheckpointManager.Config.__post_init__(self)
            known = titles(one for one in rank_formats() if one.keeps != "tensors")
            if self.format not in known:
                raise BadArgument(
                    f"format= takes {' or '.join(map(repr, known))}, not {self.format!r}",
                    found=self.format,
                )

    def __init__(
        self,
        config: Config,
        *,
        dataloader: Stateful | None,
        model_parts: list[nn.Module],
        optimizers: Stateful,
        lr_schedulers: Stateful,
        states: dict[str, object],
        sd_adapter: BaseStateDictAdapter | None,
        base_folder: str = "",
    ) -> None:
        self.enable = config.enable
        if not self.enable:
            return
        if config.last_save_in_hf and sd_adapter is None:
            raise BadArgument("last_save_in_hf=True needs a model with a state dict adapter")
        self.config = config
        self.folder = os.path.abspath(os.path.join(base_folder, config.folder))
        self.save_future: SaveHandle | None = None
        self._model = ModelWrapper(model_parts)
        self._adapter = sd_adapter
        self._states = states
        states |= {
            MODEL: self._model,
            OPTIMIZER: optimizers,
            DATALOADER: dataloader,
            LR_SCHEDULER: lr_schedulers,
        }

    @torch.no_grad()
    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        config = self.config
        first = curr_step == 1 and config.enable_first_step_checkpoint
        if config.load_only or not (last_step or first or curr_step % config.interval == 0):
            return False
        self.maybe_wait_for_saving()
        path = self._path(curr_step)
        if last_step and config.last_save_model_only:
            self._export(path)
        elif last_step or not config.background:
            save_sharded(self._state(), path, format=config.format, values="first", overwrite=True)
        else:
            self.save_future = async_save_sharded(
                self._state(), path, format=config.format, values="first", overwrite=True
            )
            return True
        self._purge()
        return True

    @torch.no_grad()
    def _load(self, step: int = -1) -> bool:
        config = self.config
        if step == -1:
            step = _agreed(self._newest)
        if step != -1:
            path = self._path(step)
            if not os.path.exists(path):
                raise FileNotFoundError(f"there is no step {step} to load: {path} does not exist")
            self._fill(
                path,
                self._model.state_dict()
                if step == 0
                else self._state(without=config.exclude_from_loading),
            )
            return True
        if config.initial_load_path is None and not config.initial_load_in_hf:
            return False
        path = (
            config.initial_load_path
            or (self._adapter.hf_assets_path if self._adapter is not None else None)
            or ""
        )
        if not os.path.exists(path):
            raise FileNotFoundError(f"the checkpoint to begin with is not there: {path!r}")
        if config.initial_load_in_hf:
            self._fill_from_hf(path)
        elif config.initial_load_model_only:
            self._fill(path, self._model.state_dict(), cast=True)
        else:
            self._fill(path, self._state(without=config.exclude_from_loading), cast=True)
        return True

    def _wait_for_saving(self) -> None:
        assert self.save_future is not None
        handle, self.save_future = self.save_future, None
        handle.wait()
        self._purge()

    def _maybe_wait_for_staging(self) -> None:
        """Called every step: see to a save that is over. Work from now on comes behind the copies anyway."""
        # One that failed is raised where all ranks wait for it.
        if self.save_future is not None and self.save_future.durable:
            self._wait_for_saving()

    def _close(self) -> None:
        self.maybe_wait_for_saving()

    def _path(self, step: int) -> str:
        return os.path.join(self.folder, f"step-{step}")

    def _state(self, *, without: list[str] | None = None) -> dict[str, object]:
        unknown = [name for name in without or () if name not in self._states]
        if unknown:
            raise BadArgument(
                f"exclude_from_loading names {', '.join(unknown)}, and the state has {', '.join(self._states)}"
            )
        left = {
            name: value
            for name, value in self._states.items()
            if name not in (MODEL, *(without or ()))
        }
        model: dict[str, object] = self._model.state_dict()
        return left | model

    def _fill(self, path: str, state: dict[str, object], *, cast: bool = False) -> None:
        """Load a step into a state, all of which must be there, and hand the model its part."""
        self._filled(path, state, cast=cast)
        self._model.load_state_dict(state)

    def _filled(self, path: str, state: Mapping[str, object], *, cast: bool) -> None:
        # Not strict: a step may have more than is asked for. Less is an error here as well.
        loaded = load_sharded(path, state, strict=False, cast=cast)
        if loaded.missing:
            names = ", ".join(loaded.missing[:5])
            raise DoesNotFit(
                f"the step lacks {len(loaded.missing):,} names: {names}",
                missing=loaded.missing,
                file=path,
            )

    def _fill_from_hf(self, path: str) -> None:
        assert self._adapter is not None, (
            "initial_load_in_hf=True needs a model with a state dict adapter"
        )
        state = self._adapter.to_hf(self._model.state_dict())
        if self.config.initial_load_in_hf_quantized:
            dcp_load(state, storage_reader=self._adapter.get_hf_storage_reader(path, True))
        else:
            self._filled(path, state, cast=True)
        self._model.load_state_dict(self._adapter.from_hf(state))

    def _export(self, path: str) -> None:
        """Save the model alone, in the dtype and format of the configuration; complete when this returns."""
        dtype = TORCH_DTYPE_MAP[self.config.export_dtype]
        state = {
            name: value.to(dtype)
            if isinstance(value, torch.Tensor) and value.is_floating_point()
            else value
            for name, value in self._model.state_dict().items()
        }
        if not self.config.last_save_in_hf:
            save_sharded(state, path, format=self.config.format, values="first", overwrite=True)
            return
        assert self._adapter is not None
        # The parts of all ranks first; what Hugging Face reads has whole tensors.
        parts = os.path.join(self.folder, f".{os.path.basename(path)}.parts")
        save_sharded(self._adapter.to_hf(state), parts, values="first", overwrite=True)
        assets = self._adapter.hf_assets_path

        def put_together() -> None:
            config = assets if assets is not None and os.path.isdir(assets) else False
            convert(
                parts,
                path,
                format="safetensors-dir",
                copy_config=config,
                keep_tree=False,
                max_shard_size=SHARD,
                overwrite=True,
            )
            shutil.rmtree(parts)

        _agreed(put_together)

    def _steps(self) -> Iterator[int]:
        names = os.listdir(self.folder) if os.path.isdir(self.folder) else []
        yield from sorted(
            (int(found[1]) for name in names if (found := STEP.fullmatch(name))), reverse=True
        )

    def _newest(self) -> int:
        """The newest whole step that a training can go on from; -1 where there is no step at all."""
        whole = [
            (step, resumable)
            for step in self._steps()
            if (resumable := self._resumable(step)) is not None
        ]
        # Where no step has an optimizer, the newest: loading it says what it lacks.
        return next((step for step, resumable in whole if resumable), whole[0][0] if whole else -1)

    def _resumable(self, step: int) -> bool | None:
        """Whether a step has more than a model; None where it is torn."""
        try:
            with open_checkpoint(self._path(step)) as checkpoint:
                return step == 0 or (
                    isinstance(checkpoint.tree, dict) and OPTIMIZER in checkpoint.tree
                )
        except HoldfastError:
            return None

    def _purge(self) -> None:
        """Remove all steps behind the newest whole ones. Called when the last save has been published."""
        if not self.config.keep_latest_k or _rank() != 0:
            return
        kept = 0
        for step in self._steps():
            if kept < self.config.keep_latest_k:
                kept += self._resumable(step) is not None
                continue
            gone = os.path.join(self.folder, make_temporary_name(f"step-{step}"))
            # By one rename: what is left of a step is never taken for one. Where it cannot be removed, the next save tries again.
            with suppress(OSError):
                os.rename(self._path(step), gone)
                start_thread(
                    partial(shutil.rmtree, gone, ignore_errors=True), name="holdfast-purge"
                )


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _agreed(call: Callable[[], T]) -> T:
    """The result of the first rank, on all ranks; if it fails there, all raise."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return call()
    answer: list[object] = [None, None]
    failed: Exception | None = None
    if _rank() == 0:
        try:
            answer[0] = call()
        except Exception as error:  # whatever it is, the others wait to hear of it
            failed, answer[1] = error, str(error)
    dist.broadcast_object_list(answer)
    if failed is not None:
        raise failed
    if answer[1] is not None:
        raise NotCommitted(f"the first rank failed: {answer[1]}")
    return answer[0]  # type: ignore[return-value]  # what `call` gave on the first rank
