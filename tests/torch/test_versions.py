"""Which torches Holdfast works with, and what it says to others."""

from __future__ import annotations

import subprocess
import sys
import warnings

import pytest
import torch

from holdfast.errors import HoldfastWarning, Unsupported
from holdfast.torch import versions
from holdfast.torch.versions import CHANGES, HERE, NEWEST, OLDEST, Change, check_version, parsed
from tests.support import needs


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("2.15.0+cu132", (2, 15)),
        ("2.8.1", (2, 8)),
        ("3.0.0a0+git1234", (3, 0)),
        ("2.13", (2, 13)),
        ("?", (0, 0)),
    ],
)
def test_a_version_is_its_first_two_numbers(text, version):
    assert parsed(text) == version


@pytest.mark.parametrize("text", ["2.7.1", "1.13.0", "2.0.0+cu117"])
def test_an_older_torch_is_refused_in_one_sentence(text):
    with pytest.raises(
        Unsupported,
        match=rf"works with torch 2\.8 to 2\.15, and this is torch {text[:3]}.*install a newer torch",
    ) as caught:
        check_version(text)
    assert caught.value.found == text


@pytest.mark.parametrize("text", ["2.16.0", "2.100.0", "3.0.0a0"])
def test_a_newer_torch_is_warned_about_in_one_sentence(text):
    with pytest.warns(
        HoldfastWarning,
        match=rf"works with torch 2\.8 to 2\.15, and this is torch {text[:4]}.*not tried with it",
    ):
        check_version(text)


@pytest.mark.parametrize("text", ["2.8.0", "2.13.0+cpu", "2.15.1"])
def test_nothing_is_said_of_those_between(text):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_version(text)


@pytest.mark.parametrize(
    ("version", "ended"),
    [
        ("2.7.0", "Unsupported: holdfast.torch works with torch 2.8 to 2.15"),
        pytest.param("2.16.0", "HoldfastWarning: ", marks=needs(versions.SAFETENSORS)),
    ],
)
def test_it_is_said_when_it_is_imported(version, ended):
    code = (
        f"import torch; torch.__version__ = {version!r}; import holdfast.torch; print('imported')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ended in done.stderr
    assert ("imported" in done.stdout) == (version == "2.16.0")


def test_this_torch_is_one_of_them():
    assert OLDEST <= HERE == parsed(torch.__version__) <= NEWEST


def test_a_change_is_true_from_its_version_on(monkeypatch):
    change = Change((2, 9), "it does so")
    for version, is_true in (((2, 8), False), ((2, 9), True), ((2, 10), True)):
        monkeypatch.setattr(versions, "HERE", version)
        assert bool(change) == is_true
    assert change.reason == "torch 2.10: since 2.9, it does so"


def test_what_needs_a_newer_torch_says_so(monkeypatch):
    change = Change((2, 9), "it does so")
    monkeypatch.setattr(versions, "HERE", (2, 8))
    with pytest.raises(Unsupported, match=r"a walk needs torch 2\.9 or later, and this is torch"):
        change.require("a walk")
    monkeypatch.setattr(versions, "HERE", (2, 9))
    change.require("a walk")


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_lies_inside_of_the_range(name):
    change = CHANGES[name]
    assert OLDEST < change.since <= NEWEST, "what every version has is no change"


@pytest.mark.parametrize(
    ("change", "has"),
    [
        (versions.BCOMPLEX, lambda: hasattr(torch, "bcomplex32")),
        (
            versions.NESTED_ASKED_FOR,
            lambda: not versions.allowed_globals(["torch._utils._rebuild_nested_tensor"]),
        ),
    ],
    ids=lambda value: value.what if isinstance(value, Change) else "",
)
def test_what_is_said_of_this_torch_is_so(change, has):
    assert bool(change) == has()
