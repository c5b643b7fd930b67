"""SGLang's loader on a small module, through SGLang's own choice of a loader and its own way to load.

SGLang imports kernels for GPUs and packages that come with them. Those that are not installed are empty here: nothing of them is
called. Nothing is served: that needs a GPU.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch

from holdfast.errors import BadArgument, Corrupted
from tests.support import flip_bit

if importlib.util.find_spec("sglang") is None:
    pytest.skip("needs SGLang", allow_module_level=True)

KERNELS = (
    "torchvision",
    "sgl_kernel",
    "flashinfer",
    "tilelang",
    "deep_gemm",
    "torchao",
    "decord",
    "IPython",
    "quack",
    "cutlass",
)


class Empty(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Modules of which everything is a mock."""

    def __init__(self) -> None:
        self._names = {
            name
            for name in KERNELS
            if name not in sys.modules and importlib.util.find_spec(name) is None
        }

    def find_spec(self, name, path=None, target=None):
        return (
            importlib.machinery.ModuleSpec(name, self, is_package=True)
            if name.split(".")[0] in self._names
            else None
        )

    def create_module(self, spec):
        module = ModuleType(spec.name)
        module.__version__ = "0"

        def attribute(name: str) -> object:
            if name.startswith("__"):
                raise AttributeError(name)
            return MagicMock(name=name)

        module.__getattr__ = attribute
        return module

    def exec_module(self, module):
        pass


@pytest.fixture(scope="module", autouse=True)
def kernels() -> Iterator[None]:
    before, empty = set(sys.modules), Empty()
    sys.meta_path.insert(0, empty)
    yield
    sys.meta_path.remove(empty)
    for name in set(sys.modules) - before:
        if name.split(".")[0] in KERNELS:
            del sys.modules[name]


class Small(torch.nn.Linear):
    def load_weights(self, weights):
        with torch.no_grad():
            for name, tensor in weights:
                getattr(self, name).copy_(tensor)


def loaded(extra: dict[str, object], folder: Path) -> Small:
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.model_loader.loader import DefaultModelLoader, get_model_loader

    from holdfast.integrations.sglang import HoldfastLoader

    loader = get_model_loader(
        LoadConfig(load_format=HoldfastLoader, model_loader_extra_config=extra)
    )
    assert type(loader) is HoldfastLoader
    config, model = SimpleNamespace(model_path=str(folder), revision=None), Small(40, 30)
    loader.download_model(config)
    DefaultModelLoader.load_weights_only(
        model, loader._get_all_weights(config, model), torch.device("cpu")
    )
    return model


def test_a_step_is_loaded_by_sglang_itself(tmp_path: Path):
    trained = torch.nn.Linear(40, 30)
    torch.save({"model": trained.state_dict(), "step": 5}, tmp_path / "x.pt")
    served = loaded({"path": str(tmp_path / "x.pt"), "prefix": "model."}, tmp_path)
    assert torch.equal(served.weight, trained.weight)
    assert torch.equal(served.bias, trained.bias)
    with pytest.raises(BadArgument, match="nothing is downloaded"):
        loaded({"path": str(tmp_path / "absent")}, tmp_path)
    with pytest.raises(ValueError, match="Unexpected extra config keys"):
        loaded({"perfix": "model."}, tmp_path)


def test_damage_is_found_while_it_loads(tmp_path: Path):
    trained = torch.nn.Linear(40, 30)
    torch.save(trained.state_dict(), tmp_path / "x.pt")
    flip_bit(tmp_path / "x.pt", 100, after=trained.weight.detach().numpy().tobytes())
    with pytest.raises(Corrupted):
        loaded({"path": str(tmp_path / "x.pt")}, tmp_path)
