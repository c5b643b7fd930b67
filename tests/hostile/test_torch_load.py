"""Every named attack that is one file, through `holdfast.torch.load(weights_only=True)`: refused or loaded, in time, in bounds.

Nothing may come out but a `pickle.UnpicklingError`, a Holdfast error, or a result. Memory is bounded by an address space that has
no room for what the files claim: an allocation from a claim would come out as torch's own RuntimeError.
"""

from __future__ import annotations

import pickle
import resource
import time
import warnings
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
import torch

import holdfast.torch
from holdfast.errors import HoldfastError

from . import cases_numpy
from .allowed import ALLOWED
from .case import Case
from .cases import ALL, CLASSES
from .craft_torch import legacy, state, torch_zip
from .harness import DEADLINE, SECONDS_FLOOR, SECONDS_PER_BYTE, WATCH, deadline, nodes

ROOM = 3 << 30
"""Address space above what the process has: threads and allocators reserve by the half gigabyte. The files claim more."""


@pytest.fixture(scope="module", autouse=True)
def _little_room() -> Iterator[None]:
    # What torch and Holdfast import and start when they are first used is not an attack's doing.
    for raw in (torch_zip(state()), legacy(state(legacy_ids=True))):
        holdfast.torch.load(BytesIO(raw))
    samples = [
        torch.eye(3).to_sparse(),
        torch.eye(3).to_sparse_csr(),
        torch.quantize_per_tensor(torch.eye(2), 1.0, 0, torch.qint8),
    ]
    for sample in (
        *samples,
        torch.ones(2, dtype=torch.cfloat).conj(),
        torch.nn.Parameter(torch.ones(2)),
    ):
        buffer = BytesIO()
        holdfast.torch.save([sample, {1}, b"x", 1j], buffer)
        buffer.seek(0)
        holdfast.torch.load(buffer)
    before = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + ROOM, before[1]))
    WATCH.allowed = ("ctypes.", "import")
    yield
    WATCH.allowed = ()
    resource.setrlimit(resource.RLIMIT_AS, before)


def load(case: Case, folder: Path, allowed: list[object]) -> Exception | None:
    """Load a case and look at what comes out, within the bounds: what it was refused with, or None."""
    source = case.make(folder)
    if isinstance(source, Path):
        if len(source.name) > 255 or not source.is_file() or source.name.endswith(".safetensors"):
            pytest.skip("not one file that torch.load would take")
        nbytes = source.stat().st_size
    else:
        nbytes = len(source)
    given = BytesIO(source) if isinstance(source, bytes) else source
    error: Exception | None = None
    with deadline(DEADLINE), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TorchScript and protocols are warned about, as torch does
        before = time.process_time()
        with WATCH.watching(), holdfast.torch.serialization.safe_globals(allowed):
            try:
                look(holdfast.torch.load(given, weights_only=True))
            except (HoldfastError, pickle.UnpicklingError) as caught:
                error = caught
        seconds = time.process_time() - before
    assert error is None or str(error)
    assert seconds <= SECONDS_FLOOR + SECONDS_PER_BYTE * nbytes, (
        f"{seconds:.2f} s of processor for {nbytes:,} bytes"
    )
    return error


def look(tree: object) -> None:
    """Take out every element of every array, as its user would. What is made over memory of others ends the process here."""
    for value in nodes(tree):
        if isinstance(value, np.ndarray | np.generic):
            str((value.dtype, value.copy()))
            value.tolist()


@pytest.mark.parametrize("case", ALL, ids=str)
def test_weights_only(case: Case, tmp_path: Path):
    load(case, tmp_path, [])


PICKLES = [
    case
    for name in ("pickle calls", "pickle resources", "tensor metadata", "legacy and tar")
    for case in CLASSES[name]
]


@pytest.mark.parametrize("case", PICKLES, ids=str)
def test_what_a_user_may_allow(case: Case, tmp_path: Path):
    """The same files, where the load does not end at the first name."""
    load(case, tmp_path, ALLOWED)


@pytest.mark.parametrize("case", cases_numpy.CASES, ids=str)
def test_numpy_allowed(case: Case, tmp_path: Path):
    """Where the user allowed numpy, a lie is refused: numpy itself would have believed it."""
    error = load(case, tmp_path, ALLOWED)
    assert (error is None) == (case.name in cases_numpy.LOADED), error
