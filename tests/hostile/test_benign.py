"""Ordinary files are not dangerous, and those that hold plain data are clean."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest

from holdfast.verbs.scan import scan

from .benign import PACKAGES, make

CLEAN = {"python", "numpy", "torch", "training", "export", "dtensor", "safetensors"}
"""What is known here through and through."""

SLOW = {"export", "training"}


@pytest.mark.parametrize("package", PACKAGES)
def test_ordinary_files(package: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    if package in SLOW and not request.config.getoption("--exhaustive"):
        pytest.skip("takes half a minute: --exhaustive")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            make(package, tmp_path / package)
        except ImportError as missing:
            pytest.skip(str(missing))
    report = scan(tmp_path)
    assert report.reports
    bad = [
        (f.path, finding)
        for f in report.reports
        for finding in f.findings
        if finding.severity == "dangerous"
    ]
    assert not bad
    assert not [(f.path, f.error) for f in report.reports if f.error]
    if package in CLEAN:
        assert report.verdict() == "clean", [f for f in report.reports if f.verdict() != "clean"]
