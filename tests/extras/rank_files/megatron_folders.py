"""Folders as Megatron's ranks write them: a model of known numbers, cut row by row and column by column, without Holdfast."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

HIDDEN, VOCABULARY, LAYERS = 4, 12, 4

ROWS = (
    "word_embeddings.weight",
    "output_layer.weight",
    "qkv.weight",
    "qkv.bias",
    "fc1.weight",
    "fc1.bias",
)
COLUMNS = ("proj.weight", "fc2.weight")

NEW = {"qkv": "self_attention.linear_qkv", "proj": "self_attention.linear_proj", "fc1": "mlp.linear_fc1", "fc2": "mlp.linear_fc2",
       "norm": "input_layernorm"}  # fmt: skip
OLD = {"qkv": "self_attention.query_key_value", "proj": "self_attention.dense", "fc1": "mlp.dense_h_to_4h",
       "fc2": "mlp.dense_4h_to_h", "norm": "input_layernorm"}  # fmt: skip

Model = dict[str, torch.Tensor]


def count_up(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    """Make tensors of these shapes in which no two elements are equal."""
    tensors, start = {}, 0
    for name, shape in shapes.items():
        stop = start + torch.Size(shape).numel()
        tensors[name] = torch.arange(start, stop, dtype=torch.float32).reshape(shape)
        start = stop
    return tensors


def whole_model(layers: int = LAYERS) -> Model:
    """A model under short names, every element of which is another."""
    shapes: dict[str, tuple[int, ...]] = {
        "word_embeddings.weight": (VOCABULARY, HIDDEN),
        "position.weight": (3, HIDDEN),
    }
    for n in range(layers):
        shapes |= {
            f"{n}.norm.weight": (HIDDEN,), f"{n}.qkv.weight": (3 * HIDDEN, HIDDEN), f"{n}.qkv.bias": (3 * HIDDEN,),
            f"{n}.proj.weight": (HIDDEN, HIDDEN), f"{n}.proj.bias": (HIDDEN,), f"{n}.fc1.weight": (16, HIDDEN),
            f"{n}.fc1.bias": (16,), f"{n}.fc2.weight": (HIDDEN, 8), f"{n}.fc2.bias": (HIDDEN,),
        }  # fmt: skip
    shapes |= {"final.weight": (HIDDEN,), "output_layer.weight": (VOCABULARY, HIDDEN)}
    return count_up(shapes)


def local(name: str, tensor: torch.Tensor, rank: int, *, tp: int, gated: bool) -> torch.Tensor:
    """What a tensor-parallel rank has, row by row."""
    if name.endswith(ROWS):
        halves = tensor.chunk(2) if gated and "fc1" in name else [tensor]
        rows = [
            row
            for half in halves
            for row in half[rank * len(half) // tp : (rank + 1) * len(half) // tp]
        ]
        return torch.stack(rows).clone()
    if name.endswith(COLUMNS):
        width = tensor.shape[1] // tp
        return tensor[:, rank * width : (rank + 1) * width].clone()
    return tensor.clone()


def official(name: str, names: Mapping[str, str], layer: int | None = None) -> str:
    """The name in the file; with the number of its layer there."""
    number, _, rest = name.partition(".")
    if not number.isdecimal():
        return {
            "word_embeddings.weight": "embedding.word_embeddings.weight",
            "position.weight": "embedding.position_embeddings.weight",
            "final.weight": "decoder.final_layernorm.weight",
            "output_layer.weight": "output_layer.weight",
        }[name]
    what, _, last = rest.partition(".")
    return f"decoder.layers.{int(number) if layer is None else layer}.{names[what]}.{last}"


def write(
    folder: Path, *, tp: int = 2, pp: int = 1, virtual: int = 1, gated: bool = True, names: Mapping[str, str] = NEW,
    cuts: Callable[[int], list[int]] | None = None, args: bool = True, iteration: int = 7, nested: bool = False,
) -> Model:  # fmt: skip
    """Write an iteration; what the whole is."""
    model = whole_model()
    chunks = pp * virtual
    counts = cuts(chunks) if cuts is not None else [LAYERS // chunks] * chunks
    step = folder / f"iter_{iteration:07d}"
    (folder / "latest_checkpointed_iteration.txt").parent.mkdir(parents=True, exist_ok=True)
    (folder / "latest_checkpointed_iteration.txt").write_text(str(iteration))
    for t in range(tp):
        for p in range(pp):
            saved: dict[str, object] = {"checkpoint_version": 3.0, "iteration": iteration}
            if args:
                saved["args"] = argparse.Namespace(
                    tensor_model_parallel_size=tp,
                    pipeline_model_parallel_size=pp,
                    swiglu=gated,
                    num_layers=LAYERS,
                )
            for v in range(virtual):
                number = v * pp + p
                first = sum(counts[:number])
                own: dict[str, object] = {}
                for name, tensor in model.items():
                    head = name.partition(".")[0]
                    if head.isdecimal():
                        if not first <= int(head) < first + counts[number]:
                            continue
                        file_name = official(name, names, int(head) - first)
                    elif (name in ("word_embeddings.weight", "position.weight")) != (
                        number == 0
                    ) and chunks > 1:
                        if number not in (0, chunks - 1):
                            continue
                        if name in ("word_embeddings.weight", "position.weight") or number == 0:
                            continue
                        file_name = official(name, names)
                    else:
                        if number not in (0, chunks - 1):
                            continue
                        file_name = official(name, names)
                    own[file_name] = local(name, tensor, t, tp=tp, gated=gated)
                own["decoder.layers.0.self_attention._extra_state"] = None
                if nested:
                    own = {"language_model": own}
                saved["model" if virtual == 1 else f"model{v}"] = own
            saved["optimizer"] = {
                "optimizer": {"state": {0: {"exp_avg": torch.full((3,), float(t))}}}
            }
            saved["rng_state"] = [{"cuda": torch.zeros(3, dtype=torch.uint8)}]
            target = (
                step / (f"mp_rank_{t:02d}" + (f"_{p:03d}" if pp > 1 else "")) / "model_optim_rng.pt"
            )
            target.parent.mkdir(parents=True)
            torch.save(saved, target)
    prefix = "language_model." if nested else ""
    return {prefix + official(name, names): tensor for name, tensor in model.items()}
