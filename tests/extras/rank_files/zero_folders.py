"""Folders as DeepSpeed lays them out, written from known tensors: what a step of stage 1, 2 or 3 would have saved.

Each parameter is laid flat, one element after the other; what the ranks get is cut from that by hand, without Holdfast.
"""

from __future__ import annotations

import enum
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

Tensors = Mapping[str, torch.Tensor]


class Stage(enum.IntEnum):
    """As newer versions pickle it: a class that a reader would have to import."""

    NONE = 0
    OPTIMIZER = 1
    GRADIENTS = 2
    WEIGHTS = 3


@dataclass
class Fragment:
    """As newer versions say which elements a rank has."""

    numel: int
    start: int


@dataclass
class Zero:
    """What is to be written."""

    stage: int
    world: int
    groups: Sequence[Tensors]
    """Parameters in full precision, by group."""
    buffers: Tensors = field(default_factory=dict)
    frozen: Tensors = field(default_factory=dict)
    shared: Mapping[str, str] = field(default_factory=dict)
    half: torch.dtype = torch.bfloat16
    moments: Sequence[str] = ("exp_avg", "exp_avg_sq")
    step: int = 3
    sub_groups: bool = False
    """Stage 3: a flat group for each parameter, as a small `sub_group_size` makes them."""
    lean: bool = False
    """Stages 1 and 2: the states as a list without padding, as elastic checkpoints have them."""
    old: bool = False
    """Without what newer versions add."""
    gaps: int = 0
    """Elements of padding behind each parameter."""

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        return {name: tensor for group in self.groups for name, tensor in group.items()}

    def moment(self, number: int) -> list[dict[str, torch.Tensor]]:
        """A moment of all parameters, which is no other one's."""
        return [
            {name: tensor * 0.5 + number + 1 for name, tensor in group.items()}
            for group in self.groups
        ]

    def write(self, folder: Path, tag: str = "global_step3") -> Path:
        """Write a step, and say that it is the latest."""
        step = folder / tag
        step.mkdir(parents=True)
        (folder / "latest").write_text(tag)
        prefix = "bf16_" if self.half is torch.bfloat16 else ""
        for rank in range(self.world):
            saved = {
                "optimizer_state_dict": self.optimizer(rank),
                "ds_config": {"zero": self.stage},
                "ds_version": "0.0.0",
            }
            torch.save(saved, step / f"{prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
            if self.stage == 3:
                torch.save(
                    self.model(rank), step / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt"
                )
        if self.stage != 3:
            torch.save(self.model(0), step / "mp_rank_00_model_states.pt")
        return step

    def write_universal(self, step: Path) -> Path:
        """The same, as `ds_to_universal` makes it: of stage 3 with flat rows, and with copies of tied weights in 16 bits."""
        if self.stage == 3:
            for rank in range(self.world):
                step.mkdir(parents=True, exist_ok=True)
                torch.save(
                    self.model(rank), step / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt"
                )
        else:
            step.mkdir(parents=True)
            torch.save(self.model(0), step / "mp_rank_00_model_states.pt")
        kinds = {
            "fp32": list(self.groups),
            **{name: self.moment(number) for number, name in enumerate(self.moments)},
        }
        for what, groups in kinds.items():
            for name, tensor in (
                (name, tensor) for group in groups for name, tensor in group.items()
            ):
                (step / "zero" / name).mkdir(parents=True, exist_ok=True)
                saved = {"param": tensor.reshape(-1) if self.stage == 3 else tensor, "cat_dim": 0}
                torch.save(saved, step / "zero" / name / f"{what}.pt")
                torch.save(torch.tensor(3.0), step / "zero" / name / "step.pt")
        for name, other in self.shared.items() if self.stage != 3 else ():
            (step / "zero" / name).mkdir()
            torch.save(
                {"param": self.weights[other].to(self.half)}, step / "zero" / name / "fp32.pt"
            )
        torch.save({"zero_stage": self.stage}, step / "zero" / "optimizer_state.pt")
        return step

    # Rows, one element after the other.

    def row(self, group: Tensors) -> list[float]:
        row: list[float] = []
        for tensor in group.values():
            row += tensor.reshape(-1).tolist() + [-7.0] * self.gaps
        return row

    def parts(self, group: Tensors, rank: int, *, padded: bool) -> list[torch.Tensor]:
        """What a rank has of a group: one tensor, or one for each sub-group."""
        if self.stage == 3:
            pieces = []
            for tensor in group.values():
                flat, each = tensor.reshape(-1).tolist(), -(-tensor.numel() // self.world)
                flat += [-9.0] * (each * self.world - len(flat))
                pieces.append(flat[rank * each : (rank + 1) * each])
            rows = pieces if self.sub_groups else [[value for piece in pieces for value in piece]]
            return [torch.tensor(row) for row in rows]
        row = self.row(group)
        count = len(row)
        row += [-9.0] * (-count % (2 * self.world))
        each = len(row) // self.world
        part = torch.tensor(row[rank * each : (rank + 1) * each])
        return [part if padded else part[: max(0, min(each, count - rank * each))]]

    def optimizer(self, rank: int) -> dict[str, object]:
        masters = [part for group in self.groups for part in self.parts(group, rank, padded=False)]
        rows = {
            name: [
                part
                for group in self.moment(number)
                for part in self.parts(group, rank, padded=not self.lean)
            ]
            for number, name in enumerate(self.moments)
        }
        states = [
            {
                "step": torch.tensor(float(self.step)),
                **{name: parts[at] for name, parts in rows.items()},
            }
            for at in range(len(masters))
        ]
        settings = [{"lr": 0.1, "params": [at]} for at in range(len(self.groups))]
        base = states if self.lean else {"state": dict(enumerate(states)), "param_groups": settings}
        stage = self.stage if self.old else Stage(self.stage)
        if self.stage == 3:
            return {
                "zero_stage": stage,
                "partition_count": self.world,
                "optimizer_state_dict": base,
                "fp32_flat_groups": masters,
            }
        said = {
            "zero_stage": stage, "partition_count": [self.world] * len(self.groups), "base_optimizer_state": base,
            "single_partition_of_fp32_groups": masters,
        }  # fmt: skip
        if not self.old:
            said["param_alignment_paddings"] = [[self.gaps] * len(group) for group in self.groups]
            said["param_slice_mappings"] = [self.mapping(group, rank) for group in self.groups]
        return said

    def mapping(self, group: Tensors, rank: int) -> dict[str, Fragment]:
        row = self.row(group)
        each = -(-len(row) // (2 * self.world)) * 2
        found, at = {}, 0
        for name, tensor in group.items():
            own = [
                n for n in range(at, at + tensor.numel()) if rank * each <= n < (rank + 1) * each
            ]
            if own:
                found[name] = Fragment(len(own), own[0] - rank * each)
            at += tensor.numel() + self.gaps
        return found

    def model(self, rank: int) -> dict[str, object]:
        whole = {
            name: tensor.to(self.half) for name, tensor in {**self.weights, **self.frozen}.items()
        }
        if self.stage == 3:
            whole = {name: torch.empty(0, dtype=self.half) for name in whole}
        module = OrderedDict({**whole, **self.buffers})
        module.update({name: module[other] for name, other in self.shared.items()})
        fragments = {name: tensor.to(self.half) for name, tensor in self.frozen.items()}
        if self.stage == 3:
            for name, tensor in fragments.items():
                each = -(-tensor.numel() // self.world)
                flat = torch.cat(
                    [
                        tensor.reshape(-1),
                        torch.zeros(each * self.world - tensor.numel(), dtype=self.half),
                    ]
                )
                fragments[name] = flat[rank * each : (rank + 1) * each].clone()
        listed = self.stage != 1 and self.frozen
        return {
            "module": module,
            "buffer_names": list(self.buffers),
            "optimizer": None,
            "param_shapes": [
                OrderedDict((name, tensor.shape) for name, tensor in group.items())
                for group in self.groups
            ],
            "frozen_param_shapes": {name: tensor.shape for name, tensor in self.frozen.items()}
            if listed
            else None,
            "shared_params": {} if self.old else dict(self.shared),
            "frozen_param_fragments": fragments if listed else None,
            "global_steps": self.step,
            "ds_version": "0.0.0",
        }
