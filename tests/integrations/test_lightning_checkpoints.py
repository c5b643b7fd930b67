"""What Lightning's own tests of checkpointing ask of its default, asked of our plugin in its place.

Every question is put to Lightning's `TorchCheckpointIO`, to `HoldfastIO()`, and to `HoldfastIO(background=True)` on a disk that is
slower than the training. The answers have to be the same. Those that a save in the background cannot give are the last ones.
"""

from __future__ import annotations

import copy
import math
import os
import pickle
import threading
import time
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch

lightning = pytest.importorskip("lightning")

from lightning.pytorch import Trainer  # noqa: E402
from lightning.pytorch.callbacks import ModelCheckpoint  # noqa: E402
from lightning.pytorch.demos.boring_classes import BoringModel  # noqa: E402
from lightning.pytorch.plugins.io import TorchCheckpointIO  # noqa: E402
from lightning.pytorch.strategies import strategy as strategies  # noqa: E402

from holdfast.integrations.lightning import HoldfastIO  # noqa: E402

pytestmark = [pytest.mark.timeout(180), pytest.mark.filterwarnings("ignore")]

WAYS = ("stock", "at once", "in the background")
SLOW = 0.1
"""Seconds that a write in the background takes longer; an epoch here takes a few milliseconds."""


class SlowIO(HoldfastIO):
    def _write(self, checkpoint: object, target: str) -> None:
        time.sleep(SLOW)
        super()._write(checkpoint, target)


def plugin(way: str) -> object:
    if way == "stock":
        return TorchCheckpointIO()
    return HoldfastIO(durable=False) if way == "at once" else SlowIO(background=True, durable=False)


@pytest.fixture(params=WAYS)
def way(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[str]:
    """The default of every strategy. After a test no thread of ours is left."""
    monkeypatch.setattr(strategies, "TorchCheckpointIO", lambda: plugin(request.param))
    monkeypatch.chdir(tmp_path)
    yield request.param
    assert [
        thread.name for thread in threading.enumerate() if thread.name == "holdfast-lightning"
    ] == []


class Logged(BoringModel):
    """Logs what a test monitors: `score`, one number an epoch, in training; and `val_score` in validation."""

    def __init__(self, scores: tuple[float, ...] = (3.0, 1.0, 2.0, 0.5, 4.0)) -> None:
        super().__init__()
        self.scores = scores

    def training_step(self, batch: torch.Tensor, number: int) -> object:
        self.log("score", self.scores[self.current_epoch], on_step=False, on_epoch=True)
        return super().training_step(batch, number)

    def validation_step(self, batch: torch.Tensor, number: int) -> object:
        self.log("val_score", self.scores[self.current_epoch])
        return super().validation_step(batch, number)


def trainer_of(*keeping: ModelCheckpoint, **more: object) -> Trainer:
    quiet = {
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "logger": False,
        "accelerator": "cpu",
    }
    short = {"limit_train_batches": 2, "limit_val_batches": 1, "max_epochs": 3}
    return Trainer(callbacks=list(keeping), default_root_dir=os.getcwd(), **(quiet | short | more))


def fitted(
    *keeping: ModelCheckpoint,
    model: BoringModel | None = None,
    resume: object = None,
    **more: object,
) -> Trainer:
    trainer = trainer_of(*keeping, **more)
    trainer.fit(model or Logged(), ckpt_path=resume)
    return trainer


def names(folder: Path | str) -> set[str]:
    return set(os.listdir(folder))


def loaded(path: Path | str) -> dict[str, object]:
    """As somebody else reads it."""
    return torch.load(path, weights_only=True)


# Names.


def test_one_name_of_which_the_best_two_are_kept(way: str, tmp_path: Path):
    keeping = ModelCheckpoint(tmp_path / "c", filename="model", monitor="score", save_top_k=2)
    fitted(keeping, max_epochs=5)
    assert {os.path.basename(path) for path in keeping.best_k_models} == names(tmp_path / "c")
    assert sorted(loaded(path)["epoch"] for path in keeping.best_k_models) == [1, 3]
    assert loaded(keeping.best_model_path)["epoch"] == 3


def test_a_second_trainer_goes_on_with_versions(way: str, tmp_path: Path):
    for round in range(2):
        keeping = ModelCheckpoint(
            tmp_path / "c", save_top_k=-1, monitor="epoch", filename="{epoch}"
        )
        fitted(keeping, max_epochs=2)
        expected = (
            {"epoch=0-v1.ckpt", "epoch=1-v1.ckpt"} if round else {"epoch=0.ckpt", "epoch=1.ckpt"}
        )
        assert {os.path.basename(path) for path in keeping.best_k_models} == expected
    assert len(names(tmp_path / "c")) == 4


def test_without_a_counter_names_are_written_again(way: str, tmp_path: Path):
    for _ in range(2):
        keeping = ModelCheckpoint(
            tmp_path / "c",
            save_top_k=-1,
            save_last=True,
            monitor="epoch",
            filename="{epoch}",
            enable_version_counter=False,
        )
        fitted(keeping, max_epochs=2)
    assert names(tmp_path / "c") == {"epoch=0.ckpt", "epoch=1.ckpt", "last.ckpt"}


def test_no_monitor_and_one_name_do_not_alternate(way: str, tmp_path: Path):
    fitted(ModelCheckpoint(tmp_path / "c", filename="model"), model=BoringModel())
    assert names(tmp_path / "c") == {"model.ckpt"}
    assert loaded(tmp_path / "c" / "model.ckpt")["epoch"] == 2


# The last one.


@pytest.mark.parametrize("last", [True, "link"])
def test_the_last_one(way: str, last: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ModelCheckpoint, "CHECKPOINT_NAME_LAST", "last-{epoch}")
    keeping = ModelCheckpoint(tmp_path / "c", monitor="score", save_top_k=-1, save_last=last)
    fitted(keeping)
    assert keeping.last_model_path == str(tmp_path / "c" / "last-epoch=2.ckpt")
    assert names(tmp_path / "c") == {
        *(f"epoch={epoch}-step={2 * epoch + 2}.ckpt" for epoch in range(3)),
        "last-epoch=2.ckpt",
    }
    assert os.path.islink(keeping.last_model_path) == (last == "link")
    assert loaded(keeping.last_model_path)["epoch"] == 2


def test_a_link_is_never_ahead_of_its_file(way: str, tmp_path: Path):
    """Whoever is killed now finds a last checkpoint."""
    seen = []

    class Looking(Logged):
        def on_train_epoch_start(self) -> None:
            if self.current_epoch:
                seen.append(loaded(tmp_path / "c" / "last.ckpt")["epoch"])

    fitted(
        ModelCheckpoint(tmp_path / "c", monitor="epoch", mode="max", save_last="link"),
        model=Looking(),
    )
    assert seen == [0, 1]


# What is in them.


@pytest.mark.parametrize("monitor", ["score", "val_score"])
@pytest.mark.parametrize("plateau", [False, True])
def test_what_a_checkpoint_says(way: str, monitor: str, plateau: bool, tmp_path: Path):
    class Scheduled(Logged):
        def configure_optimizers(self) -> object:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            if plateau:
                scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
                return [optimizer], [{"scheduler": scheduler, "monitor": monitor}]
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=2)]

    keeping = ModelCheckpoint(
        tmp_path / "c", filename="{" + monitor + ":.4f}-{epoch}", monitor=monitor, save_top_k=-1
    )
    fitted(keeping, model=Scheduled())
    assert len(names(tmp_path / "c")) == 3
    for epoch, score in enumerate((3.0, 1.0, 2.0)):
        found = loaded(tmp_path / "c" / f"{monitor}={score:.4f}-epoch={epoch}.ckpt")
        assert (found["epoch"], found["global_step"]) == (epoch, 2 * epoch + 2)
        assert found["callbacks"][keeping.state_key]["current_score"] == score
        assert found["callbacks"][keeping.state_key]["dirpath"] == keeping.dirpath
        if not plateau:
            assert math.isclose(found["lr_schedulers"][0]["_last_lr"][0], 0.1 * 2 ** (epoch + 1))


def test_hyperparameters(way: str, tmp_path: Path):
    class Parameterised(BoringModel):
        def __init__(self, given: Namespace) -> None:
            super().__init__()
            self.save_hyperparameters(given)

    fitted(
        ModelCheckpoint(tmp_path / "c", filename="x"),
        model=Parameterised(Namespace(a=1, b="2")),
        max_epochs=1,
    )
    found = loaded(tmp_path / "c" / "x.ckpt")[BoringModel.CHECKPOINT_HYPER_PARAMS_KEY]
    assert (type(found), found) == (dict, {"a": 1, "b": "2"})


# Going on.


@pytest.mark.parametrize("same", [True, False])
def test_what_was_resumed_from_is_not_removed(way: str, same: bool, tmp_path: Path):
    given = {"monitor": "step", "mode": "max", "save_top_k": 2, "every_n_train_steps": 2}
    more = {"limit_train_batches": 10, "limit_val_batches": 0, "max_epochs": None}
    fitted(ModelCheckpoint(tmp_path / "first", **given), max_steps=5, **more)
    assert names(tmp_path / "first") == {"epoch=0-step=2.ckpt", "epoch=0-step=4.ckpt"}
    to = tmp_path / ("first" if same else "second")
    fitted(
        ModelCheckpoint(to, **given),
        max_steps=8,
        resume=str(tmp_path / "first" / "epoch=0-step=4.ckpt"),
        **more,
    )
    new = {"epoch=0-step=6.ckpt", "epoch=0-step=8.ckpt"}
    assert names(to) == new | ({"epoch=0-step=4.ckpt"} if same else set())
    if not same:
        assert names(tmp_path / "first") == {"epoch=0-step=2.ckpt", "epoch=0-step=4.ckpt"}


@pytest.mark.parametrize("which", ["last", "best"])
def test_resumed_by_word(way: str, which: str, tmp_path: Path):
    keeping = ModelCheckpoint(tmp_path / "c", monitor="epoch", mode="max", save_last=True)
    trainer = fitted(keeping)
    trainer.fit_loop.max_epochs = 5
    trainer.fit(Logged(), ckpt_path=which)
    assert trainer.current_epoch == 5
    assert loaded(keeping.last_model_path)["epoch"] == 4


def test_a_checkpoint_that_is_not_there(way: str, tmp_path: Path):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        fitted(resume=str(tmp_path / "nowhere.ckpt"))


def test_an_exception_leaves_a_checkpoint(way: str, tmp_path: Path):
    class Failing(Logged):
        def on_train_epoch_start(self) -> None:
            if self.current_epoch == 2:
                raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fitted(ModelCheckpoint(tmp_path / "c", filename="{epoch}", save_last=True), model=Failing())
    assert names(tmp_path / "c") == {"epoch=1.ckpt", "last.ckpt"}


# The plugin.


def test_how_often_it_is_called(way: str, tmp_path: Path):
    for version in ("", "-v1"):
        trainer = trainer_of(
            ModelCheckpoint(tmp_path / "c", save_last=True), max_epochs=2, limit_train_batches=1
        )
        io = trainer.strategy.checkpoint_io
        save = io.save_checkpoint = mock.Mock(wraps=io.save_checkpoint)
        remove = io.remove_checkpoint = mock.Mock(wraps=io.remove_checkpoint)
        trainer.fit(BoringModel())
        assert (save.call_count, remove.call_count) == (4, 1)
        trainer.test(
            BoringModel(), ckpt_path=str(tmp_path / "c" / f"last{version}.ckpt"), verbose=False
        )
    assert names(tmp_path / "c") == {
        "epoch=1-step=2.ckpt",
        "last.ckpt",
        "epoch=1-step=2-v1.ckpt",
        "last-v1.ckpt",
    }


def test_options_of_a_store_are_refused(way: str, tmp_path: Path):
    trainer = fitted(fast_dev_run=True, max_epochs=1)
    with pytest.raises(TypeError, match="storage_options"):
        trainer.save_checkpoint(tmp_path / "x.ckpt", storage_options="x")


def test_it_is_copied_and_pickled(way: str, tmp_path: Path):
    for made in (pickle.loads(pickle.dumps(plugin(way))), copy.deepcopy(plugin(way))):
        made.save_checkpoint({"w": torch.ones(2)}, tmp_path / "x.ckpt")
        made.teardown()
        assert made.load_checkpoint(tmp_path / "x.ckpt")["w"].tolist() == [1, 1]
        made.remove_checkpoint(tmp_path / "x.ckpt")
        made.teardown()
        assert not (tmp_path / "x.ckpt").exists()


class Counting(ModelCheckpoint):
    """Counts its checkpoints on every rank of a training in processes of its own."""

    def on_train_end(self, trainer: Trainer, module: BoringModel) -> None:
        super().on_train_end(trainer, module)
        assert len(self.best_k_models) == 4


@pytest.mark.parametrize("strategy", ["ddp_spawn", "ddp_fork"])
def test_several_processes(way: str, strategy: str, tmp_path: Path):
    if strategy == "ddp_fork" and torch.cuda.is_available():
        pytest.skip(
            "CUDA does not work in a forked process, and Lightning asks it for random states"
        )
    keeping = Counting(tmp_path / "c", filename="model", monitor="epoch", save_top_k=-1)
    trainer = trainer_of(keeping, max_epochs=4, strategy=strategy, devices=2, plugins=[plugin(way)])
    trainer.fit(BoringModel())
    assert trainer.state.finished
    assert names(tmp_path / "c") == {
        "model.ckpt",
        "model-v1.ckpt",
        "model-v2.ckpt",
        "model-v3.ckpt",
    }
    assert {os.path.basename(path) for path in keeping.best_k_models} <= names(tmp_path / "c")


# What differs, and is meant to.


def test_by_hand_it_is_there_after_the_call_or_after_teardown(way: str, tmp_path: Path):
    trainer = fitted(ModelCheckpoint(tmp_path / "c"), max_epochs=1)
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    assert (tmp_path / "x.ckpt").exists() == (way != "in the background")
    trainer.strategy.checkpoint_io.teardown()
    assert loaded(tmp_path / "x.ckpt")["global_step"] == 2


def test_by_hand_and_given_to_the_next_trainer(way: str, tmp_path: Path):
    fitted(max_epochs=1).save_checkpoint(tmp_path / "x.ckpt")
    trainer = fitted(max_epochs=2, resume=tmp_path / "x.ckpt")
    assert trainer.current_epoch == 2


def test_in_the_middle_of_a_training_the_disk_is_behind(way: str, tmp_path: Path):
    seen = []

    class Looking(Logged):
        def on_train_epoch_start(self) -> None:
            seen.append(names(tmp_path / "c") if (tmp_path / "c").exists() else set())

    fitted(
        ModelCheckpoint(tmp_path / "c", filename="{epoch}", save_top_k=-1),
        model=Looking(),
        limit_train_batches=1,
    )
    whole = [set(), {"epoch=0.ckpt"}, {"epoch=0.ckpt", "epoch=1.ckpt"}]
    assert seen[0] == set()
    assert all(behind <= there for behind, there in zip(seen, whole, strict=True))
    assert (seen == whole) == (way != "in the background")


def test_a_place_that_is_no_disk(way: str):
    io = plugin(way)
    if way == "stock":
        io.save_checkpoint({"w": torch.ones(1)}, "memory://place/x.ckpt")
    else:
        with pytest.raises(Exception, match="memory:"):
            io.save_checkpoint({"w": torch.ones(1)}, "memory://place/x.ckpt")
