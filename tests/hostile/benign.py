"""Ordinary files of popular packages, for `scan` to say nothing dangerous about.

    python -m tests.hostile.benign FOLDER     in an environment that has the packages; what is missing is left out, and named

A package is one function that writes its files into a folder. `tests/hostile/test_benign.py` scans those of what is installed.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable
from pathlib import Path

__all__ = ["PACKAGES", "make"]


def dump(value: object, path: Path) -> None:
    for protocol in (2, 4):
        path.with_suffix(f".{protocol}.pkl").write_bytes(pickle.dumps(value, protocol))


def numpy(folder: Path) -> None:
    import numpy as np

    rng = np.random.default_rng(0)
    np.save(folder / "plain.npy", rng.standard_normal(100))
    np.save(
        folder / "objects.npy", np.array([{"a": 1}, "text", None], dtype=object), allow_pickle=True
    )
    np.savez(folder / "several.npz", a=np.arange(5), b=np.array([1, "x"], dtype=object))
    np.savez_compressed(folder / "packed.npz", a=np.zeros(10_000))
    dump(
        {"rng": rng, "old": np.random.RandomState(1), "masked": np.ma.masked_array([1, 2], [0, 1])},
        folder / "random",
    )
    dump(
        {
            "scalar": np.float32(1),
            "record": np.zeros(2, [("a", "f4"), ("b", "i2")]),
            "ufunc": np.tanh,
        },
        folder / "kinds",
    )


def python(folder: Path) -> None:
    import argparse
    import datetime
    import decimal
    import enum
    import fractions
    import functools
    import logging
    import re
    import types
    import uuid
    from collections import Counter, OrderedDict, defaultdict, deque

    values = {
        "counters": defaultdict(Counter, a=Counter(b=1)),
        "partial": functools.partial(int, base=2),
        "when": datetime.datetime.now(),
        "zone": datetime.UTC,
        "number": decimal.Decimal("1.5"),
        "third": fractions.Fraction(1, 3),
        "id": uuid.uuid4(),
        "options": argparse.Namespace(lr=1),
        "space": types.SimpleNamespace(a=1),
        "recent": deque([1], 3),
        "path": Path("/a"),
        "order": OrderedDict(a=1),
        "nothing": type(None),
        "pattern": re.compile("a+"),
        "log": logging.getLogger("train"),
        "set": {1, 2},
        "bytes": b"x",
        "array": bytearray(b"y"),
        "flag": enum.Enum,
        "complex": 1j,
        "range": range(3),
    }
    dump(values, folder / "values")


def torch(folder: Path) -> None:
    import functools

    import torch

    model = torch.nn.Sequential(
        torch.nn.Linear(4, 4), torch.nn.GELU(), torch.nn.TransformerEncoderLayer(4, 2)
    )
    torch.save(model.state_dict(), folder / "state.pt")
    torch.save(model.state_dict(), folder / "old.pt", _use_new_zipfile_serialization=False)
    torch.save(model, folder / "module.pt")
    activations = [
        torch.tanh,
        torch.nn.functional.relu,
        functools.partial(torch.nn.functional.gelu, approximate="tanh"),
    ]
    torch.save(
        {"activations": activations, "dtype": torch.float16, "device": torch.device("cpu")},
        folder / "activations.pt",
    )
    dump(torch.arange(3), folder / "tensor")


def training(folder: Path) -> None:
    """What takes torch half a minute to import for."""
    import torch

    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.zeros(2, 4)).sum().backward()
    optimizer.step()
    torch.save(
        {"optimizer": optimizer.state_dict(), "rng": torch.get_rng_state()}, folder / "training.pt"
    )
    torch.save(torch.optim.lr_scheduler.StepLR(optimizer, 1), folder / "scheduler.pt")
    torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), folder / "script.pt")


def export(folder: Path) -> None:
    import torch
    import torch.distributed.checkpoint as checkpoint

    from tests.support import ALONE

    checkpoint.save({"w": torch.zeros(2, 2), "step": 3}, checkpoint_id=folder / "dcp", **ALONE)
    size = torch.export.Dim("batch", min=1, max=8)
    program = torch.export.export(
        torch.nn.Linear(2, 2), (torch.zeros(2, 2),), dynamic_shapes=({0: size},)
    )
    torch.export.save(program, folder / "program.pt2")


def dtensor(folder: Path) -> None:
    import torch
    from torch.distributed._tensor import DTensor, Replicate, Shard
    from torch.distributed.device_mesh import init_device_mesh

    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    try:
        mesh = init_device_mesh("cpu", (1,))
        made = {
            "a": DTensor.from_local(torch.zeros(2), mesh, [Shard(0)]),
            "b": DTensor.from_local(torch.zeros(2), mesh, [Replicate()]),
        }
        torch.save(made, folder / "dtensor.pt")
    finally:
        torch.distributed.destroy_process_group()


def safetensors(folder: Path) -> None:
    import numpy as np
    from safetensors.numpy import save_file

    save_file({"w": np.zeros((3, 3), np.float32)}, folder / "model.safetensors", {"format": "np"})


def scipy(folder: Path) -> None:
    import scipy.sparse
    import scipy.stats

    dump(scipy.sparse.random(10, 10, 0.2, format="csr"), folder / "csr")
    dump(scipy.stats.norm(0, 1), folder / "norm")
    scipy.sparse.save_npz(folder / "sparse.npz", scipy.sparse.random(10, 10, 0.2, format="csr"))


def pandas(folder: Path) -> None:
    import pandas as pd

    frame = pd.DataFrame(
        {
            "a": [1, 2],
            "b": ["x", "y"],
            "t": pd.to_datetime(["2020-01-01", "2020-01-02"]),
            "c": pd.Categorical(["u", "v"]),
        }
    )
    for name in ("frame.pkl", "frame.pkl.gz", "frame.pkl.bz2", "frame.pkl.xz"):
        frame.to_pickle(folder / name)
    dump(frame.set_index("t"), folder / "indexed")
    dump(frame["a"].groupby(frame["b"]).sum(), folder / "series")


def sklearn(folder: Path) -> None:
    import numpy as np
    from sklearn.compose import ColumnTransformer
    from sklearn.ensemble import GradientBoostingClassifier, RandomForestClassifier
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression
    from sklearn.neighbors import KNeighborsClassifier
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import FunctionTransformer, StandardScaler
    from sklearn.svm import SVC

    x, y = np.random.default_rng(0).standard_normal((40, 3)), np.arange(40) % 2
    for model in (
        RandomForestClassifier(3),
        GradientBoostingClassifier(n_estimators=3),
        LogisticRegression(),
        SVC(),
        KNeighborsClassifier(),
    ):
        dump(model.fit(x, y), folder / type(model).__name__)
    dump(
        make_pipeline(StandardScaler(), FunctionTransformer(np.tanh), LogisticRegression()).fit(
            x, y
        ),
        folder / "pipeline",
    )
    dump(ColumnTransformer([("a", StandardScaler(), [0])]).fit(x), folder / "columns")
    dump(TfidfVectorizer().fit(["a text", "more text"]), folder / "tfidf")


def joblib(folder: Path) -> None:
    import joblib as library
    import numpy as np

    value = {
        "a": np.arange(1000.0),
        "b": [np.zeros((3, 3)), "x"],
        "o": np.array([1, "two"], dtype=object),
    }
    library.dump(value, folder / "plain.joblib")
    for how in ("zlib", "gzip", "bz2", "lzma", "xz"):
        library.dump(value, folder / f"{how}.joblib", compress=(how, 3))
    try:
        from sklearn.ensemble import RandomForestClassifier
    except ImportError:
        return
    library.dump(
        RandomForestClassifier(3).fit(np.zeros((4, 2)), [0, 1, 0, 1]), folder / "forest.joblib"
    )


def xgboost(folder: Path) -> None:
    import numpy as np
    import xgboost as library

    dump(
        library.XGBClassifier(n_estimators=2).fit(np.zeros((4, 2)), [0, 1, 0, 1]),
        folder / "classifier",
    )


def lightgbm(folder: Path) -> None:
    import lightgbm as library
    import numpy as np

    dump(
        library.LGBMClassifier(n_estimators=2, verbose=-1).fit(
            np.zeros((40, 2)), np.arange(40) % 2
        ),
        folder / "classifier",
    )


def networkx(folder: Path) -> None:
    import networkx as nx

    dump(nx.path_graph(5), folder / "graph")


def statsmodels(folder: Path) -> None:
    import numpy as np
    import statsmodels.api as sm

    sm.OLS(np.arange(5.0), sm.add_constant(np.arange(5.0) ** 2)).fit().save(str(folder / "ols.pkl"))


def spacy(folder: Path) -> None:
    import spacy as library

    dump(library.blank("en").vocab.strings, folder / "strings")


def sympy(folder: Path) -> None:
    import sympy as library

    x = library.Symbol("x")
    dump(library.sin(x) ** 2 + x / 3, folder / "expression")


def lightning(folder: Path) -> None:
    import lightning as library
    import torch as framework
    from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint

    class Model(library.LightningModule):
        def __init__(self, width: int = 2, *, rate: float = 0.1) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.layer = framework.nn.Linear(width, 1)

        def training_step(self, batch: object, _: int) -> object:
            loss = self.layer(batch[0]).sum()  # type: ignore[index]
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> object:
            optimizer = framework.optim.Adam(self.parameters())
            return [optimizer], [framework.optim.lr_scheduler.StepLR(optimizer, 1)]

    data = framework.utils.data.DataLoader(
        framework.utils.data.TensorDataset(framework.zeros(4, 2))
    )
    trainer = library.Trainer(
        max_epochs=1,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        callbacks=[ModelCheckpoint(folder, save_last=True), EarlyStopping("loss")],
    )
    trainer.fit(Model(), data)


def transformers(folder: Path) -> None:
    import torch as framework
    from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

    config = BertConfig(
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        intermediate_size=8,
        vocab_size=10,
    )
    arguments = TrainingArguments(
        str(folder / "out"),
        max_steps=2,
        save_steps=2,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    rows = [{"input_ids": framework.tensor([1, 2]), "labels": framework.tensor(0)}] * 4
    trainer = Trainer(
        model=BertForSequenceClassification(config), args=arguments, train_dataset=rows
    )
    trainer.train()
    trainer.save_model(str(folder / "model"))


PACKAGES: dict[str, Callable[[Path], None]] = {
    made.__name__: made
    for made in (
        python,
        numpy,
        torch,
        training,
        export,
        dtensor,
        safetensors,
        scipy,
        pandas,
        sklearn,
        joblib,
        xgboost,
        lightgbm,
        networkx,
        statsmodels,
        spacy,
        sympy,
        lightning,
        transformers,
    )
}


def make(name: str, folder: Path) -> None:
    """Write the files of one package. Raises `ImportError` where it is not installed."""
    folder.mkdir(parents=True, exist_ok=True)
    PACKAGES[name](folder)


def main() -> None:
    for name in PACKAGES:
        try:
            make(name, Path(sys.argv[1]) / name)
        except ImportError as missing:
            print(f"{name}: left out, {missing}")


if __name__ == "__main__":
    main()
