"""A stand-in for transformer-engine, which cannot be imported without a GPU: modules that have its parameters and compute nothing.

Megatron's own code above it decides on names, stacking and shards of the folder; it only needs modules whose parameters are called
as transformer-engine calls them: `weight`, `bias`, `layer_norm_weight` of a linear layer with its norm, `weight0`, `weight1`, … of
a grouped one, and an `_extra_state` of bytes in each.
"""

import contextlib
import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Sequence

import torch

ROOT = "transformer_engine"
VERSION = "2.2.0"


class _Module(torch.nn.Module):
    """What all modules have: an extra state, empty without fp8."""

    def __init__(self, **_: object) -> None:
        super().__init__()

    def get_extra_state(self) -> torch.Tensor:
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state: object) -> None:
        pass

    def _parameter(self, *shape: int, dtype: torch.dtype) -> torch.nn.Parameter:
        return torch.nn.Parameter(torch.zeros(shape, dtype=dtype))


class Linear(_Module):
    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        params_dtype: torch.dtype,
        bias: bool = True,
        **more: object,
    ) -> None:
        super().__init__()
        self.parallel_mode = more.get("parallel_mode")
        self.weight = self._parameter(out_features, in_features, dtype=params_dtype)
        self.use_bias = bias
        if bias:
            self.bias = self._parameter(out_features, dtype=params_dtype)


class LayerNormLinear(Linear):
    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        params_dtype: torch.dtype,
        normalization: str = "LayerNorm",
        **more: object,
    ) -> None:
        super().__init__(in_features, out_features, params_dtype=params_dtype, **more)
        self.layer_norm_weight = self._parameter(in_features, dtype=params_dtype)
        if normalization == "LayerNorm":
            self.layer_norm_bias = self._parameter(in_features, dtype=params_dtype)


class GroupedLinear(_Module):
    def __init__(
        self,
        num_gemms: int,
        in_features: int,
        out_features: int,
        *,
        params_dtype: torch.dtype,
        bias: bool = True,
        **_: object,
    ) -> None:
        super().__init__()
        self.num_gemms, self.use_bias = num_gemms, bias
        self.fp8_meta = {"fp8_checkpoint": False}
        self.fp8 = self.fp8_calibration = False
        for i in range(num_gemms):
            setattr(
                self, f"weight{i}", self._parameter(out_features, in_features, dtype=params_dtype)
            )
            if bias:
                setattr(self, f"bias{i}", self._parameter(out_features, dtype=params_dtype))

    def init_fp8_metadata(self, num_gemms: int = 1) -> None:
        pass


class RMSNorm(_Module):
    def __init__(self, hidden_size: int, *, params_dtype: torch.dtype, **_: object) -> None:
        super().__init__()
        self.weight = self._parameter(hidden_size, dtype=params_dtype)


class LayerNorm(RMSNorm):
    def __init__(self, hidden_size: int, *, params_dtype: torch.dtype, **_: object) -> None:
        super().__init__(hidden_size, params_dtype=params_dtype)
        self.bias = self._parameter(hidden_size, dtype=params_dtype)


class DotProductAttention(_Module):
    def __init__(
        self, *_: object, softmax_type: str = "vanilla", num_attention_heads: int = 0, **__: object
    ) -> None:
        super().__init__()
        if softmax_type == "learnable":
            self.softmax_offset = self._parameter(num_attention_heads, dtype=torch.float32)


def get_cpu_offload_context(*_: object, **__: object) -> tuple[object, None]:
    """Nothing is moved off a GPU."""
    return contextlib.nullcontext(), None


_NAMES = {
    c.__name__: c
    for c in (
        Linear,
        LayerNormLinear,
        GroupedLinear,
        RMSNorm,
        LayerNorm,
        DotProductAttention,
        get_cpu_offload_context,
    )
}


class _Fake(types.ModuleType):
    """A module that has every name: a class of ours if there is one, an empty class otherwise."""

    __path__: Sequence[str] = ()
    __version__ = VERSION

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        found = _NAMES.get(name)
        if found is None:
            found = (
                type(name, (), {})
                if name[:1].isupper()
                else importlib.import_module(f"{self.__name__}.{name}")
            )
        setattr(self, name, found)
        return found


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, *_: object) -> importlib.machinery.ModuleSpec | None:
        return (
            importlib.machinery.ModuleSpec(name, self, is_package=True)
            if name.split(".")[0] == ROOT
            else None
        )

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Fake(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def install() -> None:
    """From here on `import transformer_engine` gives the stand-in."""
    sys.meta_path.insert(0, _Finder())
