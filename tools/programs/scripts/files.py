"""The places in torch beside DCP that save and load: streams, hub, export, script, averages, tensors between processes."""

from __future__ import annotations

import copy
import gzip
import io
import pickle
import tarfile
import tempfile
import zipfile
from pathlib import Path

import torch
import torch.multiprocessing as mp
from dcp import same, trained


def streams(state: dict[str, torch.Tensor]) -> None:
    """Whatever has `read` and `seek`."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    torch.save(state, "model.pt")
    buffer.seek(0)
    same(state, torch.load(buffer))
    for mode, buffering in (("rb", -1), ("rb", 0), ("r+b", -1), ("r+b", 0)):
        with open("model.pt", mode, buffering=buffering) as file:
            same(state, torch.load(file))
    with tempfile.SpooledTemporaryFile(max_size=64) as file:
        torch.save(state, file)
        file.seek(0)
        same(state, torch.load(file))
    with zipfile.ZipFile("bundle.zip", "w") as bundle:
        bundle.writestr(zipfile.ZipInfo("policy.pth"), buffer.getvalue())
        with bundle.open(zipfile.ZipInfo("streamed.pth"), "w") as file:
            torch.save(state, file)
    with zipfile.ZipFile("bundle.zip") as bundle:
        for name in bundle.namelist():
            with bundle.open(name) as file:
                same(state, torch.load(file))
    with gzip.GzipFile("model.pt.gz", "wb", mtime=0) as file:
        torch.save(state, file)
    with gzip.open("model.pt.gz") as file:
        same(state, torch.load(file))
    with tarfile.open("model.tar", "w") as tar:
        member = tarfile.TarInfo("model.pt")
        member.size = len(buffer.getvalue())
        tar.addfile(member, io.BytesIO(buffer.getvalue()))
    with tarfile.open("model.tar") as tar:
        file = tar.extractfile("model.pt")
        assert file is not None
        same(state, torch.load(file))
    # Several in one file, the old way; and behind something else.
    with open("several.pt", "wb") as file:
        for number in range(3):
            torch.save(
                {"number": number, "w": torch.ones(number)},
                file,
                _use_new_zipfile_serialization=False,
            )
    with open("several.pt", "rb") as file:
        for number in range(3):
            same({"number": number, "w": torch.ones(number)}, torch.load(file))
    with open("behind.pt", "wb") as file:
        file.write(b"header")
        torch.save(state, file)


def objects(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Whole objects, as programs save them."""
    average = torch.optim.swa_utils.AveragedModel(
        model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
    )
    average.update_parameters(model)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1.0, total_steps=10)
    scaler = torch.amp.GradScaler("cpu")
    chance = torch.get_rng_state()
    torch.save(
        {
            "model": model,
            "average": average.state_dict(),
            "optimizer": optimizer.state_dict(),
            "scheduler": scheduler.state_dict(),
            "scaler": scaler.state_dict(),
            "rng": chance,
            "path": Path("x") / "y",
            "args": pickle.loads(
                pickle.dumps({"lr": 0.1, "device": torch.device("cpu"), "dtype": torch.bfloat16})
            ),
        },
        "training.pt",
    )
    found = torch.load("training.pt", weights_only=False)
    same(model.state_dict(), found["model"].state_dict())
    average.load_state_dict(found["average"])
    scheduler.load_state_dict(found["scheduler"])
    scaler.load_state_dict(found["scaler"])
    torch.set_rng_state(found["rng"])
    refused = ""
    try:
        torch.load("training.pt")
    except pickle.UnpicklingError as error:
        refused = str(error)
    assert "weights_only" in refused
    same(model.state_dict(), copy.deepcopy(found["model"]).state_dict())


def exported(model: torch.nn.Module) -> None:
    """Programs as files, and weights by address."""
    example = (torch.ones(2, 8),)
    model.eval()
    torch.export.save(torch.export.export(model, example), "program.pt2")
    same(model(*example), torch.export.load("program.pt2").module()(*example))
    torch.jit.save(torch.jit.trace(model, example), "traced.pt")
    same(model(*example), torch.jit.load("traced.pt")(*example))
    torch.hub.set_dir("hub")
    found = torch.hub.load_state_dict_from_url(Path("model.pt").resolve().as_uri(), progress=False)
    same(dict(model.state_dict()), dict(found))


def child(queue: mp.Queue[torch.Tensor], done: mp.Event) -> None:
    queue.put(torch.load("model.pt")["0.weight"])
    done.wait()  # whoever gives a tensor away has to be there when it is taken


def main() -> None:
    model, optimizer = trained()
    state = dict(model.state_dict())
    streams(state)
    objects(model, optimizer)
    exported(model)
    context = mp.get_context("spawn")
    queue, done = context.Queue(), context.Event()
    process = context.Process(target=child, args=(queue, done))
    process.start()
    same(state["0.weight"], queue.get().clone())
    done.set()
    process.join()


if __name__ == "__main__":
    main()
