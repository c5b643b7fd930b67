"""Lightning's Trainer over our files: the same training, and never a moment without a checkpoint."""

from __future__ import annotations

import os
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import holdfast

lightning = pytest.importorskip("lightning")

from lightning.pytorch.callbacks import ModelCheckpoint  # noqa: E402 (where Lightning is there)
from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO  # noqa: E402

from holdfast.integrations.lightning import HoldfastIO, StateCopies  # noqa: E402

pytestmark = pytest.mark.timeout(120)


class Line(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layer = nn.Linear(2, 1)
        self.pause = 0.0

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], number: int) -> torch.Tensor:
        x, y = batch
        time.sleep(self.pause)
        return nn.functional.mse_loss(self.layer(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.1)


def batches() -> DataLoader[tuple[torch.Tensor, ...]]:
    x = torch.arange(16.0).reshape(8, 2) / 16
    return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=2)


def trained(
    folder: Path, plugin: object, *, epochs: int = 3, resume: str | None = None, pause: float = 0
) -> Line:
    model = Line()
    model.pause = pause
    keeping = ModelCheckpoint(dirpath=folder, save_top_k=1, every_n_epochs=1, filename="{epoch}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = lightning.Trainer(
            max_epochs=epochs,
            callbacks=[keeping],
            plugins=[plugin] if plugin else [],
            accelerator="cpu",
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(model, batches(), ckpt_path=resume)
    return model


@pytest.mark.parametrize("background", [False, True], ids=["at once", "in the background"])
def test_a_training_is_saved_and_resumed(background: bool, tmp_path: Path):
    stock = trained(tmp_path / "stock", None, epochs=5)
    trained(tmp_path / "ours", HoldfastIO(background=background, durable=False))
    (name,) = os.listdir(tmp_path / "ours")
    assert name == "epoch=2.ckpt"
    resumed = trained(
        tmp_path / "again",
        HoldfastIO(background=background, durable=False),
        epochs=5,
        resume=str(tmp_path / "ours" / name),
    )
    for mine, theirs in zip(resumed.parameters(), stock.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def slow(plugin: object, seconds: float) -> object:
    """The same plugin, whose writes take longer."""
    inner = plugin.checkpoint_io if isinstance(plugin, AsyncCheckpointIO) else plugin
    name = "save_checkpoint" if isinstance(plugin, AsyncCheckpointIO) else "_write"
    write = getattr(inner, name)

    def later(*given: object, **more: object) -> None:
        time.sleep(seconds)
        write(*given, **more)

    setattr(inner, name, later)
    return plugin


def fewest(folder: Path, run: Callable[[], object]) -> int:
    """The smallest number of files in a folder while something runs, from the moment when there was one."""
    counts: list[int] = []
    over = threading.Event()

    def look() -> None:
        while not over.is_set():
            count = (
                len([name for name in os.listdir(folder) if name.endswith(".ckpt")])
                if folder.exists()
                else 0
            )
            if count or counts:
                counts.append(count)
            time.sleep(0.002)

    looking = threading.Thread(target=look)
    looking.start()
    try:
        run()
    finally:
        over.set()
        looking.join()
    return min(counts)


def test_the_checkpoint_before_stays_until_its_successor_is_there(tmp_path: Path):
    ours = slow(HoldfastIO(background=True, durable=False), 0.15)
    assert fewest(tmp_path / "ours", lambda: trained(tmp_path / "ours", ours, pause=0.06)) == 1
    stock = slow(AsyncCheckpointIO(TorchCheckpointIO()), 0.15)
    assert (
        fewest(tmp_path / "stock", lambda: trained(tmp_path / "stock", stock, pause=0.06)) == 0
    )  # a kill now leaves nothing


def test_a_save_that_fails_keeps_the_one_before_and_is_told(tmp_path: Path):
    plugin = HoldfastIO(background=True, durable=False)
    plugin.save_checkpoint({"w": torch.ones(2)}, tmp_path / "first.ckpt")
    (tmp_path / "second.ckpt").mkdir()  # in the way
    (tmp_path / "second.ckpt" / "x").write_bytes(b"")
    plugin.save_checkpoint({"w": torch.zeros(2)}, tmp_path / "second.ckpt")
    plugin.remove_checkpoint(tmp_path / "first.ckpt")
    with pytest.raises(Exception, match="second"):
        plugin.teardown()
    assert plugin.load_checkpoint(tmp_path / "first.ckpt")["w"].tolist() == [1, 1]
    plugin.save_checkpoint({"w": torch.zeros(2)}, tmp_path / "third.ckpt")
    plugin.remove_checkpoint(tmp_path / "first.ckpt")
    plugin.teardown()
    assert not (tmp_path / "first.ckpt").exists()


def test_a_seal_goes_with_what_it_spoke_of(tmp_path: Path):
    plugin = HoldfastIO(durable=False)
    path, seal = tmp_path / "last.ckpt", tmp_path / "last.ckpt.seal.json"
    plugin.save_checkpoint({"global_step": 1}, path)
    assert holdfast.seal(path).step == 1
    plugin.save_checkpoint({"global_step": 2}, path)
    assert not seal.exists()
    holdfast.seal(path)
    plugin.remove_checkpoint(path)
    assert not seal.exists()


def test_what_is_saved_in_the_background_is_what_there_was(tmp_path: Path):
    weight = torch.arange(6.0)
    state = {"w": weight, "view": weight[2:4], "p": nn.Parameter(torch.ones(2)), "steps": [1, 2]}
    plugin = slow(HoldfastIO(background=True, durable=False), 0.1)
    plugin.save_checkpoint(state, tmp_path / "a.ckpt")
    weight.zero_()
    state["steps"].append(3)
    found = plugin.load_checkpoint(tmp_path / "a.ckpt")
    assert found["w"].tolist() == list(range(6))
    assert found["steps"] == [1, 2]
    assert found["view"].untyped_storage()._cdata == found["w"].untyped_storage()._cdata
    assert isinstance(found["p"], nn.Parameter)


def test_copies_share_what_the_originals_share():
    weight = torch.arange(6.0)
    inner = {"w": weight}
    made = StateCopies().of({"a": inner, "b": inner, "t": (weight[1:], None)})
    assert made["a"] is made["b"]
    made["a"]["w"][1] = 9
    assert made["t"][0][0] == 9
    assert weight[1] == 1
