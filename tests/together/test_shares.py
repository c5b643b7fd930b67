"""Who reads what: the first rank of n at most 1.2/n of the bytes, all of them together each byte once, and nobody much more than
the others."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import holdfast
from holdfast.engine.targets import plan_save
from holdfast.stores import local
from tests.groups import ThreadGroup, on_ranks, raise_first_error

N = 192
HEADS = 400_000
"""Bytes that every rank may read of headers."""


def state(kind: str) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    if kind == "giant":
        return {
            "giant": rng.standard_normal((256 * N, 320), np.float32),
            "small": rng.standard_normal(100, np.float32),
        }
    # 32 layers of seven matrices, and an embedding four times as large as the largest of these.
    made = {"embedding.weight": rng.standard_normal((12 * N, N), np.float32)}
    for layer in range(32):
        made |= {
            f"layers.{layer}.{name}.weight": rng.standard_normal((N, N), np.float32)
            for name in ("q", "k", "v", "o")
        }
        made |= {
            f"layers.{layer}.{name}.weight": rng.standard_normal((3 * N, N), np.float32)
            for name in ("gate", "up", "down")
        }
    return made


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("shares")
    for kind in ("model", "giant"):
        holdfast.save(state(kind), path / f"{kind}.safetensors", durable=False)
        holdfast.save(
            {k: v * np.float32(1.5) for k, v in state(kind).items()},
            path / f"{kind}-b.safetensors",
            durable=False,
        )
        holdfast.save(
            state(kind),
            path / f"{kind}-hf",
            format="safetensors",
            max_shard_size=4_000_000,
            durable=False,
        )
    return path


@pytest.fixture(autouse=True)
def small_cuts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of 30 MB are cut as files of gigabytes are."""
    monkeypatch.setattr(plan_save, "MAX_UNCUT_NBYTES", 4 << 20)


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Bytes that each thread has read of files."""
    found: Counter[str] = Counter()
    real = local.LocalStore.read

    def counted(self: local.LocalStore, key: str, start: int, out: memoryview) -> None:
        found[threading.current_thread().name] += out.nbytes
        real(self, key, start, out)

    monkeypatch.setattr(local.LocalStore, "read", counted)
    return found


Verb = Callable[[Path, Path, "ThreadGroup | None"], object]
VERBS: dict[str, Verb] = {
    "convert": lambda src, out, group: holdfast.convert(
        src, out / "out", group=group, threads=1, durable=False
    ),
    "cast": lambda s, out, g: holdfast.convert(
        s, out / "out.safetensors", dtype="bf16", group=g, threads=1, durable=False
    ),
    "cp": lambda src, out, group: holdfast.copy(
        src, out / "out", group=group, threads=1, durable=False
    ),
    "prune": lambda s, out, g: holdfast.prune(
        s, out / "out", ["*: 2:4"], group=g, threads=1, durable=False
    ),
    "verify": lambda src, out, group: holdfast.verify(src, group=group, threads=1),
    "stats": lambda src, out, group: holdfast.stats(src, bins=0, group=group, threads=1),
    "diff": lambda src, out, g: holdfast.diff(
        src, str(src)[: -len(".safetensors")] + "-b.safetensors", group=g, threads=1
    ),
}


WHOLE = {("giant", "stats"), ("giant", "diff")}
"""What one rank does with one tensor, however large it is: the numbers of a tensor are found by one rank."""


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("kind", ["model", "giant"])
def test_shares(kind: str, verb: str, size: int, folder: Path, tmp_path: Path, read: Counter[str]):
    call = VERBS[verb]
    path = folder / f"{kind}-hf" if verb == "cp" else folder / f"{kind}.safetensors"
    (tmp_path / "alone").mkdir()
    call(path, tmp_path / "alone", None)
    nbytes = read.pop("MainThread")
    raise_first_error(on_ranks(size, lambda group: call(path, tmp_path, group)))
    shares = [read[f"rank-{rank}"] for rank in range(size)]
    assert shares[0] <= 1.2 / size * nbytes + HEADS
    assert sum(shares) <= 1.05 * nbytes + size * HEADS
    if (kind, verb) not in WHOLE:
        assert max(shares) <= 1.2 / size * nbytes + HEADS
