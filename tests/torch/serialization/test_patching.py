"""`install()` puts ours in torch's place, and `uninstall()` puts torch's back, whatever happened in between."""

from __future__ import annotations

import sys
import threading

import pytest
import torch
import torch.serialization as theirs

import holdfast.torch.serialization as ours
from holdfast.errors import HoldfastWarning
from holdfast.torch.serialization import allowed, locations, patching, settings
from holdfast.torch.serialization.patching import install, uninstall
from tests.support import run_in_threads

MODULES = (torch, torch.serialization)


def save(*args):
    return "our save"


def load(*args):
    return "our load"


@pytest.fixture(autouse=True)
def surface(monkeypatch):
    """`holdfast.torch.serialization` with two functions that are easy to tell, and the rest of its names."""
    for module in (settings, locations, allowed):
        for name in set(vars(module)) & set(theirs.__all__):
            monkeypatch.setattr(ours, name, getattr(module, name), raising=False)
    monkeypatch.setattr(ours, "save", save, raising=False)
    monkeypatch.setattr(ours, "load", load, raising=False)


@pytest.fixture(autouse=True)
def untouched():
    """Every attribute of torch's modules is afterwards what it was."""
    before = [dict(vars(module)) for module in MODULES]
    assert not patching._count
    yield
    assert not patching._count
    for module, attributes in zip(MODULES, before, strict=True):
        now = vars(module)
        assert [
            name for name in {*now, *attributes} if now.get(name) is not attributes.get(name)
        ] == []


def changes(before):
    return {
        (module.__name__, name)
        for module, attributes in zip(MODULES, before, strict=True)
        for name in {*vars(module), *attributes}
        if vars(module).get(name) is not attributes.get(name)
    }


def test_exactly_the_names_of_serialization_are_replaced():
    before = [dict(vars(module)) for module in MODULES]
    shared = {"LoadEndianness", "SourceChangeWarning", "StorageType"}
    with install():
        expected = {("torch.serialization", name) for name in theirs.__all__ if name not in shared}
        assert changes(before) == expected | {("torch", "save"), ("torch", "load")}
        assert torch.save(1, 2) == theirs.save(1, 2) == "our save"
        assert torch.load(1) == theirs.load(1) == "our load"
        assert theirs.get_safe_globals is allowed.get_safe_globals
        assert theirs.skip_data is settings.skip_data
        assert theirs.LoadEndianness is settings.LoadEndianness
    assert changes(before) == set()


def test_what_we_lack_stays_torchs(monkeypatch):
    monkeypatch.delattr(ours, "mkdtemp")
    monkeypatch.setattr(ours, "location_tag", sys)  # a module, not the function
    before = theirs.mkdtemp, theirs.location_tag
    with install():
        assert (theirs.mkdtemp, theirs.location_tag) == before
        assert theirs.load is load


def test_installations_are_counted():
    before = torch.load
    install()
    with install() as second:
        assert torch.load is load
    assert torch.load is load
    second.uninstall()  # undone already
    assert torch.load is load
    uninstall()
    assert torch.load is before


def test_uninstalling_nothing_does_nothing():
    before = torch.load
    uninstall()
    assert torch.load is before
    with install():
        assert torch.load is load
    uninstall()
    with install():
        assert torch.load is load


def test_an_error_in_the_block_undoes_it():
    before = torch.save
    with pytest.raises(KeyError), install():
        raise KeyError
    assert torch.save is before


def test_what_somebody_else_put_there_stays():
    before = torch.save, theirs.save

    def wrapped(*args):
        return save(*args)

    install()
    torch.save = wrapped
    with pytest.warns(
        HoldfastWarning, match=r"torch\.save had been replaced by somebody else"
    ) as caught:
        uninstall()
    assert caught[0].filename == __file__
    assert "torch.serialization" not in str(caught[0].message)
    assert torch.save is wrapped
    assert theirs.save is before[1]
    torch.save = before[0]


def test_a_warning_that_is_an_error_leaves_no_half_done_work():
    before = torch.save, torch.load
    installation = install()
    torch.save = print
    with pytest.raises(HoldfastWarning):
        installation.uninstall()  # the suite makes these warnings errors
    assert torch.load is before[1]
    torch.save = before[0]


def test_what_was_there_before_us_comes_back():
    def earlier(*args):
        return "earlier"

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "load", earlier)
        with install():
            assert torch.load is load
        assert torch.load is earlier


def test_the_functions_that_are_put_in_work():
    class Mine:
        pass

    before = theirs.get_safe_globals()
    theirs.add_safe_globals([(Mine, "from.before")])
    try:
        with install():
            with theirs.safe_globals([(Mine, "from.within")]):
                assert theirs.get_safe_globals() == [(Mine, "from.within")]
                assert {"from.before", "from.within"} <= set(allowed.user_globals())
            assert theirs.get_safe_globals() == []
            theirs.set_crc32_options(False)
            assert not settings.get_crc32_options()
        assert not theirs.get_crc32_options()
    finally:
        theirs.set_crc32_options(True)
        theirs.clear_safe_globals()
        theirs.add_safe_globals(before)


def test_threads_agree():
    before = torch.load
    wrong = []
    start = threading.Barrier(4)

    def work(_):
        start.wait()
        for _ in range(200):
            with install():
                if torch.load is not load:
                    wrong.append(torch.load)

    run_in_threads(work, range(4))
    assert wrong == []
    assert torch.load is before
