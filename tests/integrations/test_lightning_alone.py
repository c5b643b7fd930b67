"""`HoldfastIO` where Lightning is not: its queue and what it asks of `ModelCheckpoint`, over a Lightning of a few lines."""

from __future__ import annotations

import copy
import importlib
import os
import pickle
import sys
import threading
from abc import ABC
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

pytestmark = pytest.mark.timeout(60)


class CheckpointIO(ABC):  # noqa: B024  # as Lightning's, whose methods do not matter here
    """What a plugin is."""


def model_checkpoint() -> type:
    class ModelCheckpoint:
        """What asks the disk for names, and links to them, as Lightning's does."""

        def file_exists(self, filepath: str, trainer: object) -> bool:
            return os.path.exists(filepath)

        @staticmethod
        def _link_checkpoint(trainer: object, filepath: str, linkpath: str) -> None:
            assert os.path.exists(filepath)
            os.symlink(filepath, linkpath)

    return ModelCheckpoint


@pytest.fixture
def ours(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """Our module over that Lightning; whichever was there before is there again afterwards."""
    for name in [
        name
        for name in sys.modules
        if name.split(".")[0] in ("lightning", "lightning_fabric", "pytorch_lightning")
    ]:
        monkeypatch.delitem(sys.modules, name)
    for package in ("lightning.fabric", "lightning_fabric"):
        parts = f"{package}.plugins.io.checkpoint_io".split(".")
        for end in range(1, len(parts) + 1):
            monkeypatch.setitem(
                sys.modules, ".".join(parts[:end]), ModuleType(".".join(parts[:end]))
            )
    sys.modules["lightning.fabric.plugins.io.checkpoint_io"].CheckpointIO = CheckpointIO
    sys.modules["lightning_fabric.plugins.io.checkpoint_io"].CheckpointIO = type(
        "CheckpointIO", (ABC,), {}
    )
    asking = ModuleType("lightning.pytorch.callbacks.model_checkpoint")
    asking.ModelCheckpoint = model_checkpoint()
    monkeypatch.setitem(sys.modules, asking.__name__, asking)
    name = "holdfast.integrations.lightning"
    before = sys.modules.pop(name, None)
    yield importlib.import_module(name)
    del sys.modules[name]
    if before is not None:
        sys.modules[name] = before


class Held:
    """A plugin whose writes wait until they are allowed."""

    def __init__(self, ours: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
        self.allowed = threading.Event()
        write = ours.HoldfastIO._write

        def later(io: object, *given: object) -> None:
            assert self.allowed.wait(30)
            write(io, *given)

        monkeypatch.setattr(ours.HoldfastIO, "_write", later)
        self.io = ours.HoldfastIO(background=True, durable=False)


@pytest.fixture
def held(ours: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Iterator[Held]:
    made = Held(ours, monkeypatch)
    yield made
    made.allowed.set()
    made.io.teardown()


def asked() -> type:
    return sys.modules["lightning.pytorch.callbacks.model_checkpoint"].ModelCheckpoint


def test_it_travels_without_its_work(held: Held, tmp_path: Path):
    held.io.save_checkpoint({"w": torch.ones(2)}, tmp_path / "a.ckpt")
    for made in (pickle.loads(pickle.dumps(held.io)), copy.deepcopy(held.io)):
        made.teardown()  # there is nothing to wait for
        assert not (tmp_path / "a.ckpt").exists()
    held.allowed.set()
    assert made.load_checkpoint(tmp_path / "a.ckpt")["w"].tolist() == [
        1,
        1,
    ]  # of another plugin, waited for


def test_a_name_that_is_on_its_way_is_waited_for(held: Held, tmp_path: Path):
    path = tmp_path / "a.ckpt"
    held.io.save_checkpoint({"w": torch.ones(2)}, path)
    assert os.listdir(tmp_path) == []  # nothing stands in for it
    assert not asked()().file_exists(
        str(tmp_path / "b.ckpt"), None
    )  # of which nothing is under way: no wait
    threading.Timer(0.2, held.allowed.set).start()
    assert asked()().file_exists(filepath=str(path), trainer=None)


def test_a_removal_that_is_on_its_way_is_waited_for(held: Held, tmp_path: Path):
    (tmp_path / "old.ckpt").touch()
    held.io.save_checkpoint({"w": torch.ones(2)}, tmp_path / "a.ckpt")
    held.io.remove_checkpoint(tmp_path / "old.ckpt")
    assert (tmp_path / "old.ckpt").exists()
    threading.Timer(0.2, held.allowed.set).start()
    assert not asked()().file_exists(str(tmp_path / "old.ckpt"), None)


def test_a_link_comes_after_its_file(held: Held, tmp_path: Path):
    held.io.save_checkpoint({"w": torch.ones(2)}, tmp_path / "a.ckpt")
    threading.Timer(0.2, held.allowed.set).start()
    asked()._link_checkpoint(None, str(tmp_path / "a.ckpt"), str(tmp_path / "last.ckpt"))
    assert held.io.load_checkpoint(tmp_path / "last.ckpt")["w"].tolist() == [1, 1]


def test_a_name_whose_save_failed_is_free(
    ours: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def refuse(io: object, *given: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(ours.HoldfastIO, "_write", refuse)
    io = ours.HoldfastIO(background=True)
    io.save_checkpoint({"w": torch.ones(2)}, tmp_path / "a.ckpt")
    assert not asked()().file_exists(str(tmp_path / "a.ckpt"), None)
    with pytest.raises(OSError, match="No space"):
        io.teardown()


def test_no_thread_is_left(held: Held, tmp_path: Path):
    held.allowed.set()
    for number in range(50):
        held.io.save_checkpoint({"w": torch.ones(2)}, tmp_path / f"{number}.ckpt")
        held.io.teardown()
        assert [
            thread.name for thread in threading.enumerate() if thread.name == "holdfast-lightning"
        ] == []


def test_a_path_is_that_of_the_moment_of_the_call(
    held: Held, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    held.io.save_checkpoint({"w": torch.ones(2)}, "a.ckpt")
    monkeypatch.chdir(tmp_path / "elsewhere")
    held.allowed.set()
    held.io.teardown()
    assert (tmp_path / "a.ckpt").exists()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_fork_has_no_work_and_waits_for_none(held: Held, tmp_path: Path):
    held.io.save_checkpoint({"w": torch.ones(2)}, tmp_path / "a.ckpt")
    child = os.fork()
    if not child:
        threading.Timer(20, os._exit, (1,)).start()
        held.io.teardown()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    held.allowed.set()
    held.io.teardown()
    assert (tmp_path / "a.ckpt").exists()


def test_it_is_a_plugin_of_either_package(ours: ModuleType):
    io = ours.HoldfastIO()
    for package in ("lightning.fabric", "lightning_fabric"):
        assert isinstance(io, sys.modules[f"{package}.plugins.io.checkpoint_io"].CheckpointIO)
