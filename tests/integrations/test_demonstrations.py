"""What Lightning's asynchronous saver loses when it is killed, or the disk is full, and what is there with ours; its files sealed.

The same for accelerate is in `test_accelerate.py`, for transformers in `test_trainer.py`: the real packages, the same fault.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import holdfast

pytest.importorskip("lightning")

pytestmark = pytest.mark.timeout(240)

TRAIN = """
import sys
from pathlib import Path
from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO
from holdfast.integrations.lightning import HoldfastIO
from tests.integrations.faults import files_of_at_most
from tests.integrations.test_lightning import slow, trained

folder, kind, fault = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
plugin = HoldfastIO(background=True) if kind == "ours" else AsyncCheckpointIO(TorchCheckpointIO())
inner = plugin if kind == "ours" else plugin.checkpoint_io
name = "_write" if kind == "ours" else "save_checkpoint"
write, count = getattr(inner, name), 0


def counted(*given, **more):
    # The first save is as ever. During the second the process is killed from outside, or from then on the disk is full.
    global count
    count += 1
    if count == 2 and fault == "kill":
        print("writing", flush=True)
        sys.stdin.read()
    if count >= 2:
        with files_of_at_most(600):
            return write(*given, **more)
    return write(*given, **more)


setattr(inner, name, counted)
trained(folder, plugin, epochs=3, pause=0.05)
"""


def opens(path: Path) -> bool:
    try:
        with holdfast.open(path):
            return holdfast.verify(path).ok
    except holdfast.HoldfastError:
        return False


def whole(folder: Path) -> list[str]:
    return sorted(
        name for name in os.listdir(folder) if name.endswith(".ckpt") and opens(folder / name)
    )


@pytest.mark.parametrize("fault", ["kill", "full disk"])
def test_a_checkpoint_is_left_here_and_none_there(tmp_path: Path, fault: str):
    running = {
        kind: subprocess.Popen(
            [sys.executable, "-c", TRAIN, str(tmp_path / kind), kind, fault],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )
        for kind in ("stock", "ours")
    }  # fmt: skip
    for process in running.values():
        assert process.stdout is not None
        if fault == "kill":
            while "writing" not in process.stdout.readline():
                assert process.poll() is None
            time.sleep(
                0.5
            )  # the training goes on meanwhile, and asks for the removal of the old one
            process.send_signal(signal.SIGKILL)
        process.communicate(timeout=200)
    assert whole(tmp_path / "stock") == []
    assert whole(tmp_path / "ours") == ["epoch=0.ckpt"]


def test_a_file_of_lightning_is_sealed_with_its_step_and_its_score(tmp_path: Path):
    import lightning
    from lightning.pytorch.callbacks import ModelCheckpoint

    from tests.integrations.test_lightning import Line, batches

    class Watched(Line):
        def training_step(self, batch: object, number: int) -> object:
            loss = super().training_step(batch, number)  # type: ignore[arg-type]  # as Lightning has it
            self.log("train_loss", loss)
            return loss

    keeping = ModelCheckpoint(
        dirpath=tmp_path, monitor="train_loss", every_n_epochs=1, filename="best"
    )
    trainer = lightning.Trainer(
        max_epochs=2,
        callbacks=[keeping],
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Watched(), batches())
    done = holdfast.seal(tmp_path / "best.ckpt")
    assert (done.format, done.notes) == ("lightning", ())
    assert done.step in (4, 8)
    assert done.metrics == {"train_loss": pytest.approx(float(keeping.best_model_score))}
    assert holdfast.verify(tmp_path / "best.ckpt").ok
