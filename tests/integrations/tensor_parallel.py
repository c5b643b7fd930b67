"""For torchrun: a model of transformers in tensor-parallel slices out of a step, and what each rank has asked for.

tensor_parallel.py STEP    with `model.` before every name; the config is that of test_transformers.py
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
import transformers
from torch.distributed.tensor import DTensor

from holdfast.torch import slices
from holdfast.torch.tensors.slices import Slice, Slices

NBYTES: dict[str, int] = {}


class Counted(Slice):
    """A slice that notes what was read of it."""

    def __getitem__(self, index: object) -> torch.Tensor:
        found = super().__getitem__(index)
        NBYTES[self.lazy.name] = NBYTES.get(self.lazy.name, 0) + found.nbytes
        return found


def main(step: str) -> None:
    dist.init_process_group("gloo")
    config = transformers.AutoConfig.from_pretrained(f"{step}-config")
    Slices.__getitem__ = lambda self, name: Counted(self._checkpoint[self._prefix + name])
    with slices(step, prefix="model.") as state:
        model = transformers.LlamaForCausalLM.from_pretrained(
            None,
            config=config,
            state_dict=state,
            distributed_config=transformers.distributed.DistributedConfig(tp_plan="auto"),
        )
    with slices(step, prefix="model.") as state:
        plain = transformers.LlamaForCausalLM(config)
        plain.load_state_dict({name: state[name][...] for name in state})
        read = {
            name: NBYTES[state[name].lazy.name] - plain.state_dict()[name].nbytes for name in state
        }
    tokens = torch.arange(8)[None]
    assert torch.allclose(model(tokens).logits, plain(tokens).logits, atol=1e-5)
    parts = {
        name: value.to_local() if isinstance(value, DTensor) else value
        for name, value in model.state_dict().items()
    }
    assert read == {name: part.nbytes for name, part in parts.items()}, "what a rank holds, once"
    assert sum(read.values()) < 0.6 * sum(value.nbytes for value in plain.state_dict().values())
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
