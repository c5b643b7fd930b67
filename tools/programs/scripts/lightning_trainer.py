"""Lightning's Trainer: checkpoints by metric and the last one, resumed, and a model built from its checkpoint."""

from __future__ import annotations

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.demos.boring_classes import BoringModel


class Model(BoringModel):
    def __init__(self, width: int = 3) -> None:
        super().__init__()
        self.save_hyperparameters()

    def validation_step(self, batch: torch.Tensor, index: int) -> dict[str, torch.Tensor]:
        loss = self.step(batch)
        self.log("loss", loss)
        return {"x": loss}


def trained(epochs: int, resume: str | None) -> Model:
    pl.seed_everything(5)
    model = Model(width=4)
    saving = ModelCheckpoint(
        "out", filename="{epoch}", monitor="loss", save_top_k=2, save_last=True
    )
    trainer = pl.Trainer(
        default_root_dir="root",
        max_epochs=epochs,
        accelerator="cpu",
        devices=1,
        callbacks=[saving],
        logger=False,
        enable_progress_bar=False,
    )
    trainer.fit(model, ckpt_path=resume)
    trainer.save_checkpoint("final.ckpt")
    return model


def main() -> None:
    trained(2, None)
    model = trained(4, "out/last.ckpt")
    again = Model.load_from_checkpoint("final.ckpt")
    assert again.hparams == model.hparams
    for name, value in model.state_dict().items():
        assert torch.equal(value, again.state_dict()[name]), name


if __name__ == "__main__":
    main()
