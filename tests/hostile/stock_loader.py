"""Load files with stock loaders, as a victim would: run in a child process, never in the one that tests.

Reads a JSON list of `{name, loader, path, marker}` from standard input and writes one JSON line for each: whether the marker was
there after the load. What the loader raises does not matter; what it did before does.
"""

from __future__ import annotations

import glob
import json
import os
import sys
import time
import warnings


def pickle_one(path: str) -> None:
    import pickle

    with open(path, "rb") as file:
        pickle.load(file)


def pickle_all(path: str) -> None:
    import pickle

    with open(path, "rb") as file:
        while True:
            pickle.load(file)


def unbuffered_pickle(path: str) -> None:
    """From a file without `peek`, of which the unpickler reads whole frames."""
    import pickle

    with open(path, "rb", buffering=0) as file:
        pickle.load(file)


def unbuffered_pickle_all(path: str) -> None:
    import pickle

    with open(path, "rb", buffering=0) as file:
        while True:
            pickle.load(file)


def python_pickle(path: str) -> None:
    """The unpickler written in Python, which joblib and dill use."""
    import pickle

    with open(path, "rb") as file:
        pickle._Unpickler(file).load()  # type: ignore[attr-defined]


def torch_load(path: str) -> None:
    import torch

    torch.load(path, weights_only=False)


def torch_package(path: str) -> None:
    from torch.package import PackageImporter

    PackageImporter(path).load_pickle("res", "res.pkl")


def torch_jit(path: str) -> None:
    import torch

    torch.jit.load(path)


def torch_export(path: str) -> None:
    import torch

    torch.export.load(path)


def sympified(path: str) -> None:
    """What torch.export does with each `expr_str`, without a program around it."""
    import zipfile

    import sympy

    with zipfile.ZipFile(path) as archive:
        document = json.loads(archive.read("m/models/model.json"))
    sympy.sympify(document["range"]["expr_str"])


def dcp(path: str) -> None:
    import torch.distributed.checkpoint as checkpoint

    checkpoint.FileSystemReader(path).read_metadata()


def dcp_rank(path: str) -> None:
    import torch.distributed.checkpoint as checkpoint

    checkpoint.FileSystemReader(path).read_metadata(rank=0)


def dcp_items(path: str) -> None:
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    dcp_to_torch_save(path, os.path.join(os.path.dirname(path), "out.pt"))


def numpy_load(path: str) -> None:
    import numpy as np

    made = np.load(path, allow_pickle=True)
    for name in getattr(made, "files", ()):
        made[name]


def unpacked(module: str):  # type: ignore[no-untyped-def]
    def load(path: str) -> None:
        import importlib
        import pickle

        with importlib.import_module(module).open(path, "rb") as file:
            pickle.load(file)

    return load


def zlib_pickle(path: str) -> None:
    import pickle
    import zlib

    with open(path, "rb") as file:
        pickle.loads(zlib.decompress(file.read()))


def zip_pickle(path: str) -> None:
    """As programs do that keep their pickles in a zip."""
    import pickle
    import zipfile

    with zipfile.ZipFile(path) as archive:
        for name in archive.namelist():
            pickle.loads(archive.read(name))


def joblib_load(path: str) -> None:
    import joblib

    joblib.load(path)


LOADERS = {
    "pickle": pickle_one, "pickle all": pickle_all, "unbuffered pickle": unbuffered_pickle,
    "unbuffered pickle all": unbuffered_pickle_all, "python pickle": python_pickle, "torch": torch_load, "package": torch_package,
    "jit": torch_jit, "export": torch_export, "sympy": sympified, "dcp": dcp, "dcp rank": dcp_rank, "dcp items": dcp_items,
    "numpy": numpy_load, "gzip": unpacked("gzip"), "bz2": unpacked("bz2"), "lzma": unpacked("lzma"), "zlib": zlib_pickle,
    "zip": zip_pickle, "joblib": joblib_load, "joblib pickle": pickle_one,
}  # fmt: skip


def main() -> None:
    warnings.simplefilter("ignore")
    sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "victim"))
    for row in json.load(sys.stdin):
        os.environ["CANARY"] = row["marker"]
        try:
            LOADERS[row["loader"]](row["path"])
            raised = ""
        except BaseException as error:  # a payload may raise anything
            raised = f"{type(error).__name__}: {error}"[:200]
        patience = 100
        while not (ran := bool(glob.glob(row["marker"] + "*"))) and patience:
            time.sleep(0.01)  # a process that was started may take its time
            patience -= 1
        sys.__stdout__.write(json.dumps({"name": row["name"], "ran": ran, "raised": raised}) + "\n")
        sys.__stdout__.flush()


if __name__ == "__main__":
    main()
