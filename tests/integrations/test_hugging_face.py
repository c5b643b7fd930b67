"""Hugging Face folders, with transformers' own loaders: weights of torch become safetensors; code runs that a scan told of;
models in `torch.compile` and DistributedDataParallel are saved as transformers loads them."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import holdfast
import holdfast.torch

transformers = pytest.importorskip("transformers")
hub = pytest.importorskip("huggingface_hub")

pytestmark = pytest.mark.timeout(180)

IDS = torch.tensor([[1, 5, 3, 2]])


def llama(*, tied: bool, seed: int = 0) -> nn.Module:
    """A small model with weights of its own for each seed."""
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        tie_word_embeddings=tied, architectures=["LlamaForCausalLM"],
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def write_bin(path: Path, *, tied: bool, shard: int | None) -> Path:
    """A model with weights of torch, in shards of some bytes, as huggingface_hub splits them."""
    model = llama(tied=tied)
    model.config.save_pretrained(path)
    model.generation_config.save_pretrained(path)
    state = model.state_dict()
    split = hub.split_torch_state_dict_into_shards(
        state, filename_pattern="pytorch_model{suffix}.bin", max_shard_size=shard or 1 << 40
    )
    for file, names in split.filename_to_tensors.items():
        torch.save({name: state[name] for name in names}, path / file)
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (path / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    return path


def logits(path: Path) -> torch.Tensor:
    model, told = transformers.AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
    assert not told["missing_keys"]
    assert not told["unexpected_keys"]
    return answer(model)


def answer(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS).logits


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("shard", [None, 6_000], ids=["one", "shards"])
@pytest.mark.parametrize("made", [None, 6_000], ids=["to-one", "to-shards"])
def test_a_folder_of_bin_becomes_one_of_safetensors(
    tied: bool, shard: int | None, made: int | None, tmp_path: Path
):
    old = write_bin(tmp_path / "old", tied=tied, shard=shard)
    assert (len(list(old.glob("*.bin"))) > 1) is (shard is not None)
    holdfast.convert(old, tmp_path / "new", max_shard_size=made)
    assert not list((tmp_path / "new").glob("*.bin"))
    assert (len(list((tmp_path / "new").glob("*.safetensors"))) > 1) is (made is not None)
    assert torch.equal(logits(tmp_path / "new"), logits(old))
    model = transformers.LlamaForCausalLM(transformers.AutoConfig.from_pretrained(old))
    holdfast.torch.load_into(model, old)
    assert torch.equal(answer(model), logits(old))


def test_both_kinds_in_one_folder(tmp_path: Path):
    """Which one counts is what transformers takes."""
    model = write_bin(tmp_path / "m", tied=False, shard=None)
    holdfast.convert(model, tmp_path / "new", dtype="f16")
    (tmp_path / "new" / "model.safetensors").rename(model / "model.safetensors")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with holdfast.open(model) as found:
        assert found.format == "safetensors-dir"
        for name, value in loaded.state_dict().items():
            assert torch.equal(value, torch.from_numpy(found[name].numpy()).float()), name


@pytest.fixture(scope="module")
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


WRAPPED: dict[str, Callable[[nn.Module], nn.Module]] = {
    "plain": lambda model: model,
    "compiled": lambda model: torch.compile(model, backend="eager"),
    "ddp": DistributedDataParallel,
    "compiled-ddp": lambda model: torch.compile(DistributedDataParallel(model), backend="eager"),
    "ddp-of-compiled": lambda model: DistributedDataParallel(torch.compile(model, backend="eager")),
}


def save_whole(model: nn.Module, path: Path) -> None:
    path.mkdir()
    holdfast.save(model, path / "model.safetensors")


def save_shards(model: nn.Module, path: Path) -> None:
    holdfast.save(model, f"{path}/", format="safetensors", max_shard_size=6_000)


def save_ranks(model: nn.Module, path: Path) -> None:
    holdfast.torch.save_sharded(model, path, format="safetensors")


def save_step(model: nn.Module, path: Path) -> None:
    """A step of training with more in it, of which the model is taken."""
    step = path.with_name("step")
    holdfast.torch.save_sharded({"model": model, "epoch": 3}, step)
    holdfast.convert(
        step,
        f"{path}/",
        format="safetensors",
        keep=["model.*"],
        rename=[("model.*", "*")],
        tensors_only=True,
    )


READS_FILES_OF_RANKS = importlib.util.find_spec("transformers.distributed.checkpoint") is not None

SAVES = (
    save_whole,
    save_shards,
    pytest.param(
        save_ranks,
        marks=pytest.mark.skipif(
            not READS_FILES_OF_RANKS,
            reason="this transformers does not load the safetensors files of ranks",
        ),
    ),
    save_step,
)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("wrap", WRAPPED.values(), ids=WRAPPED)
@pytest.mark.parametrize("save", SAVES)
def test_from_pretrained_loads_what_was_saved_of_a_wrapped_model(
    save, wrap, tied: bool, tmp_path: Path, alone: None
):
    model = llama(tied=tied)
    save(wrap(model), tmp_path / "out")
    model.config.save_pretrained(tmp_path / "out")
    assert torch.equal(logits(tmp_path / "out"), answer(model))


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("wrap", WRAPPED.values(), ids=WRAPPED)
@pytest.mark.parametrize("load", [holdfast.torch.load_into, holdfast.torch.load_sharded])
def test_what_save_pretrained_wrote_is_loaded_into_a_wrapped_model(
    load, wrap, tied: bool, tmp_path: Path, alone: None
):
    saved, model = llama(tied=tied), llama(tied=tied, seed=1)
    saved.save_pretrained(tmp_path)
    assert not torch.equal(answer(model), answer(saved))
    wrapped = wrap(model)
    load(wrapped, tmp_path)
    assert torch.equal(answer(model), answer(saved))


CODE = """
import os
open(os.environ["MARKER"], "a").write({name!r} + "\\n")
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizer
class XConfig(PretrainedConfig):
    model_type = "x"
class XModel(PreTrainedModel):
    config_class = XConfig
class XTokenizer(PreTrainedTokenizer):
    pass
def generate(model, **more):
    return None
"""

LOADS = {
    "AutoConfig": "transformers.AutoConfig.from_pretrained(path, trust_remote_code=trust)",
    "AutoModel": "transformers.AutoModel.from_pretrained(path, trust_remote_code=trust)",
    "AutoTokenizer": "transformers.AutoTokenizer.from_pretrained(path, trust_remote_code=trust)",
    "custom_generate": "transformers.AutoModelForCausalLM.from_pretrained(path, trust_remote_code=trust)",
}


def write_code(path: Path, loader: str) -> str:
    """Clean weights with code for one loader; the name of the file that it would run."""
    write_bin(path, tied=False, shard=None)
    holdfast.convert(path / "pytorch_model.bin", path / "model.safetensors")
    (path / "pytorch_model.bin").unlink()
    name = "generate.py" if loader == "custom_generate" else "code_x.py"
    folder = path / "custom_generate" if loader == "custom_generate" else path
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(CODE.format(name=name))
    file = "tokenizer_config.json" if loader == "AutoTokenizer" else "config.json"
    kinds = {"AutoConfig": "XConfig", "AutoModel": "XModel", "AutoTokenizer": "XTokenizer"}
    if loader in kinds:
        there = json.loads((path / file).read_text()) if (path / file).exists() else {}
        if loader == "AutoConfig":
            there["model_type"] = "x"
        named = f"code_x.{kinds[loader]}"
        there["auto_map"] = {loader: [named, None] if loader == "AutoTokenizer" else named}
        (path / file).write_text(json.dumps(there))
    return name


def load(path: Path, loader: str, *, trust: bool) -> bool:
    """Whether code ran when transformers loaded the folder; in a process of its own, with a cache of its own."""
    marker = path.parent / f"ran-{trust}"
    program = f"import sys, transformers; path, trust = sys.argv[1], {trust}; {LOADS[loader]}"
    more = {
        "MARKER": str(marker),
        "HF_MODULES_CACHE": str(path.parent / f"cache-{trust}"),
        "HF_HUB_OFFLINE": "1",
    }
    subprocess.run(
        [sys.executable, "-c", program, str(path)], env={**os.environ, **more}, capture_output=True, stdin=subprocess.DEVNULL,
        check=False, timeout=150,
    )  # fmt: skip
    return marker.exists()


@pytest.mark.parametrize("loader", LOADS)
def test_code_that_a_scan_told_of_runs(loader: str, tmp_path: Path):
    path = tmp_path / "model"
    file = write_code(path, loader)
    report = holdfast.scan(path)
    assert report.verdict() == "suspicious"
    said = {
        os.path.basename(one.path): one.findings
        for one in report.reports
        if one.verdict() == "suspicious"
    }
    assert file in said
    assert all(
        "trust_remote_code=True" in finding.reason
        for findings in said.values()
        for finding in findings
    )
    assert load(path, loader, trust=True), "what the scan told of did not run, so it told too much"
    assert not load(path, loader, trust=False)
