"""Every case, by its attack class in SAFETY.md."""

from __future__ import annotations

from . import (
    cases_arrays,
    cases_bare,
    cases_calls,
    cases_dcp,
    cases_directories,
    cases_gguf,
    cases_numpy,
    cases_old,
    cases_onnx,
    cases_rank_files,
    cases_resources,
    cases_safetensors,
    cases_sources,
    cases_tensors,
    cases_zip,
)
from .case import Case

__all__ = ["ALL", "CLASSES"]

CLASSES: dict[str, list[Case]] = {
    "pickle calls": cases_calls.CASES,
    "pickle resources": cases_resources.CASES,
    "numpy in pickles": cases_numpy.CASES,
    "bare pickles": cases_bare.CASES,
    "tensor metadata": cases_tensors.CASES,
    "zip": cases_zip.CASES,
    "legacy and tar": cases_old.CASES,
    "safetensors": cases_safetensors.CASES,
    "directories": cases_directories.CASES,
    "distributed checkpoints": cases_dcp.CASES,
    "numpy arrays": cases_arrays.CASES,
    "gguf": cases_gguf.CASES,
    "onnx": cases_onnx.CASES,
    "sources": cases_sources.CASES,
    "rank files": cases_rank_files.CASES,
}

ALL: list[Case] = [case for cases in CLASSES.values() for case in cases]
