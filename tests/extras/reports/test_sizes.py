"""How large a page is, and other formats of many files."""

from __future__ import annotations

import numpy as np
import pytest

import holdfast
from holdfast.extras.reports.measures import groups_for, measured_columns
from holdfast.extras.reports.page import page
from holdfast.numeric.statistics import Distribution, Moments
from tests.extras.reports.pages import names_of

TENSORS = 10_000


def noise(rng: np.random.Generator, groups: int) -> Distribution:
    """What a tensor of random weights looks like: no two digits of two tensors are the same."""
    size = float(rng.uniform(0.01, 0.1))
    moments = Moments(
        1 << 20,
        -5 * size,
        5 * size,
        size * float(rng.normal()) / 1000,
        size * size * 2**20,
        size * size * 2**20,
    )
    bars = (2.0 ** np.arange(-20, 4) * (1 << 20) * rng.uniform(0.9, 1.1, 24)).astype(int)
    quantiles = np.sort(rng.normal(0, size, 9))
    rows, columns = (tuple(rng.uniform(0.9, 1.1, groups) * size) for _ in range(2))
    return Distribution(
        1 << 20, moments, float(rng.normal()), float(rng.uniform(0.49, 0.51)), -20, tuple(bars.tolist()), tuple(quantiles.tolist()),
        True, rows, columns,
    )  # fmt: skip


def test_ten_thousand_tensors_with_statistics_are_under_a_megabyte(tmp_path):
    rng = np.random.default_rng(0)
    state = {
        f"model.layers.{i // 100}.mlp.experts.{i % 100}.up_proj.weight": np.zeros(
            int(rng.integers(1, 60)), np.float16
        )
        for i in range(TENSORS)
    }
    holdfast.save(state, tmp_path / "m.safetensors")
    document = holdfast.report(tmp_path / "m.safetensors").document
    colours, details = measured_columns([noise(rng, groups_for(TENSORS)) for _ in range(TENSORS)])
    made = page({**document, "stats": True, "measures": colours, "details": details})
    assert len(made) < 1_000_000
    assert len(names_of(document)) == TENSORS
    assert len(page(document)) < 500_000


def test_no_tensors(tmp_path):
    holdfast.save({}, tmp_path / "m.safetensors")
    made = holdfast.report(tmp_path / "m.safetensors", stats=True)
    assert made.document["tensors"]["count"] == 0
    assert "0 tensors" in made.document["sentence"]


def test_a_huge_shape_is_a_page(tmp_path):
    torch = pytest.importorskip("torch")
    torch.save({"w": torch.ones(1).expand(1 << 20, 1 << 20), "b": torch.ones(2)}, tmp_path / "m.pt")
    document = holdfast.report(tmp_path / "m.pt", stats=True).document
    rms = next(measure["values"] for measure in document["measures"] if measure["key"] == "rms")
    assert rms[names_of(document).index("w")] is None
    assert rms[names_of(document).index("b")] == 1


@pytest.mark.parametrize("kind", ["rank_files", "deepspeed", "megatron"])
def test_files_of_ranks(kind, tmp_path, monkeypatch):
    pytest.importorskip("torch")
    from tests import page_files

    monkeypatch.chdir(tmp_path)
    getattr(page_files, kind)("folder")
    document = holdfast.report("folder", stats=True, mesh="2").document
    with holdfast.open("folder") as checkpoint:
        assert names_of(document) == list(checkpoint)
        names = {
            key
            for tensor in checkpoint.values()
            for storage in tensor.storages
            for key, _, _ in storage.ranges
        }
    files = [file["name"] for file in document["shards"]["files"]]
    assert files
    assert set(files) <= names
    assert set(document["tensors"]["file"]["labels"]) >= set(files)
    assert len(document["shards"]["mesh"]["ranks"]) == 2
