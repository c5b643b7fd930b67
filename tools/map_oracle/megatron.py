"""Megatron: a tiny GPT model is filled by mbridge and written as a real `torch_dist` folder, and the other way round.

The names of "megatron" are those of the tensors in the folder, which is a DCP folder. Layers are stacked there: one tensor
`decoder.layers.self_attention.linear_qkv.weight` has the layers as its first axis. Models whose layers differ (a dense layer
first) have `decoder.layers.0.…` instead. "megatron" is what modules of transformer-engine give, which nearly everybody trains with;
"megatron-local" is what Megatron's own modules give.

hf to megatron:  folder of the hub  → bridge.load_weights → model → dist_checkpointing.save → the folder is read by torch's DCP
megatron to hf:  folder of numbers, written by torch_dist → dist_checkpointing.load → model → bridge.export_weights
"""

import os
import re
import tempfile
import warnings
from importlib.metadata import version
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from tools.map_oracle import hub, standin_te, torch_dist
from tools.map_oracle.record import Shapes, fill, number

Config = dict[str, object]
FAMILIES = ("qwen3", "llama", "qwen3_moe", "deepseek_v3", "qwen2", "mixtral", "mistral")
PADDING = 16
_started = False


def _start() -> None:
    """One process as Megatron wants it, without a GPU."""
    global _started
    if _started:
        return
    _started = True
    warnings.simplefilter("ignore")
    standin_te.install()
    torch.cuda.synchronize = lambda *_: None
    torch.cuda.current_device = lambda: "cpu"
    torch.cuda.Stream = lambda *_, **__: None
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", CUDA_DEVICE_MAX_CONNECTIONS="1")
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel()


def _bridge(config: Config, *, local: bool, padded: bool) -> object:
    """mbridge's bridge for the configuration, made to build on a CPU."""
    from mbridge.core.bridge import _MODEL_REGISTRY
    from mbridge.core.safetensor_io import SafeTensorIO
    from transformers import AutoConfig

    made = AutoConfig.for_model(**config)
    kind = _MODEL_REGISTRY[
        "llama" if config["model_type"] == "mistral" else config["model_type"]
    ]  # it has none for mistral

    def configured(**settings: object) -> object:
        if (
            config["model_type"] == "deepseek_v3"
        ):  # mbridge 0.15.1 calls it as an older megatron-core did
            settings["original_max_position_embeddings"] = settings.pop("max_position_embeddings")
        return kind.TransformerConfigClass(**settings)

    class OnCpu(kind):
        TransformerConfigClass = staticmethod(configured)
        _DIRECT_MAPPING: ClassVar[dict[str, str]] = dict(
            kind._DIRECT_MAPPING
        )  # a tied configuration changes it

        def __init__(self, *arguments: object, **more: object) -> None:
            super().__init__(*arguments, **more)
            self.set_extra_args(
                use_cpu_initialization=True, perform_initialization=False, persist_layer_norm=False
            )
            if local:
                self.set_extra_args(
                    moe_grouped_gemm=False
                )  # its own grouped experts need a kernel for GPUs

        def _get_safetensor_io(self, path: str) -> SafeTensorIO:
            return SafeTensorIO(path)

        def _get_transformer_layer_spec(self, vp_stage: int | None = None) -> object:
            if not local:
                return super()._get_transformer_layer_spec(vp_stage)
            from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

            self.has_vp_stage = True
            return get_gpt_decoder_block_spec(
                self.config,
                use_transformer_engine=False,
                normalization="RMSNorm",
                vp_stage=vp_stage,
            )

    return OnCpu(
        made, dtype=torch.float32, make_vocab_size_divisible_by=PADDING if padded else None
    )


def _folder_shapes(folder: Path) -> tuple[Shapes, list[str]]:
    """Names and shapes of the tensors in a DCP folder; and the names of what is bytes."""
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    entries = FileSystemReader(folder).read_metadata().state_dict_metadata
    shapes = {
        name: tuple(e.size) for name, e in entries.items() if isinstance(e, TensorStorageMetadata)
    }
    return shapes, sorted(set(entries) - set(shapes))


def _read_folder(folder: Path) -> dict[str, np.ndarray]:
    import torch.distributed.checkpoint as dcp

    state = {name: torch.empty(shape) for name, shape in _folder_shapes(folder)[0].items()}
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    return {name: tensor.numpy() for name, tensor in state.items()}


def _state(model: torch.nn.Module) -> dict[str, object]:
    return model.sharded_state_dict(
        prefix="",
        sharded_offsets=(),
        metadata={"singleton_local_shards": False, "dp_cp_group": _group()},
    )


def _group() -> object:
    from megatron.core import parallel_state

    return parallel_state.get_data_parallel_group(with_context_parallel=True)


def _model(bridge: object) -> torch.nn.Module:
    model = bridge._model_provider([])(pre_process=True, post_process=True)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if isinstance(tensor, torch.Tensor) and "_extra_state" not in name:
                tensor.fill_(0)
    return model


def _convert(
    config: Config, *, local: bool = False, padded: bool = False
) -> list[dict[str, object]]:
    from megatron.core import dist_checkpointing

    bridge = _bridge(config, local=local, padded=padded)
    to = "megatron-local" if local else "megatron"
    ran = f"megatron-core {version('megatron-core')} with mbridge {version('mbridge')} {type(bridge).__mro__[1].__name__}"
    how = "Megatron's own modules" if local else "a stand-in for transformer-engine's modules"
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(temporary)
        on_hub = hub.write(config, place / "hub", np.float32)
        model = _model(bridge)
        _load(bridge, model, place / "hub", local=local)
        (place / "saved").mkdir()
        dist_checkpointing.save(_state(model), str(place / "saved"))
        stacked, others = _folder_shapes(place / "saved")
        there = _read_folder(place / "saved")
        found = [
            {
                "about": {
                    "from": "hf",
                    "to": to,
                    "made_by": f"{ran}.load_weights, {how}, dist_checkpointing.save",
                    "note": (f"vocabulary padded to a multiple of {PADDING}. " if padded else "")
                    + _bytes(others),
                },
                "source": on_hub,
                "target": there,
            }
        ]
        if local:
            return found
        (place / "numbers").mkdir()
        torch_dist.write(
            {name: torch.from_numpy(fill(a, np.float32)) for name, a in number(stacked).items()},
            place / "numbers",
        )
        wanted = {
            name: entry for name, entry in _state(model).items() if "_extra_state" not in name
        }
        model.load_state_dict(dist_checkpointing.load(wanted, str(place / "numbers")), strict=False)
        back = {name: tensor.detach().numpy() for name, tensor in bridge.export_weights([model])}
        found.append(
            {
                "about": {
                    "from": to,
                    "to": "hf",
                    "made_by": f"{ran}.export_weights, {how}, dist_checkpointing.load",
                    "note": f"vocabulary padded to a multiple of {PADDING}. " if padded else "",
                },
                "source": stacked,
                "target": back,
                "absent": {name: shape for name, shape in on_hub.items() if name not in back},
            }
        )
        return found


def _bytes(names: list[str]) -> str:
    """What lies in the folder beside tensors, in words."""
    kinds = sorted(
        {re.sub(r"layers\.\d+\.", "layers.{layer}.", name.split("/")[0]) for name in names}
    )
    return (
        f"The folder holds bytes too: {', '.join(kinds)} (one for each layer, as NAME/shard_0_3)."
        if kinds
        else ""
    )


def _load(bridge: object, model: torch.nn.Module, folder: Path, *, local: bool) -> None:
    """mbridge fills the model; the names of Megatron's own modules are first those that mbridge knows."""
    if not local:
        bridge.load_weights([model], str(folder))
        return
    weights = {name: torch.from_numpy(a).float() for name, a in hub.read(folder).items()}
    moe = bridge.config.num_moe_experts is not None
    for name, tensor in model.state_dict().items():
        if not isinstance(tensor, torch.Tensor) or "_extra_state" in name:
            continue
        known = name.replace(".input_layernorm.", ".self_attention.linear_qkv.layer_norm_")
        known = (
            known if moe else known.replace(".pre_mlp_layernorm.", ".mlp.linear_fc1.layer_norm_")
        )
        if ".local_experts." in known:
            before, after = known.split(".local_experts.")
            expert, part = after.split(".", 1)
            known = f"{before}.{part}{expert}"
        names = bridge._weight_name_mapping_mcore_to_hf(known)
        tensor.copy_(bridge._weight_to_mcore_format(known, [weights[n] for n in names]))


def run(family: str, config: Config) -> list[dict[str, object]]:
    """Both directions with transformer-engine's names, the names of Megatron's own modules, and a padded vocabulary."""
    _start()
    found = _convert(config)
    if family in (
        "qwen3",
        "qwen3_moe",
    ):  # with latent attention Megatron's own modules cannot be built
        found += _convert(config, local=True)
    if family == "qwen3" and config["num_key_value_heads"] != config["num_attention_heads"]:
        found += [{**more, "suffix": "-padded"} for more in _convert(config, padded=True)]
    return found
