"""Exports in the background: what is published becomes another format, and no rule deletes it before."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import numpy as np
import pytest

import holdfast
import holdfast.torch
from holdfast import Export, Latest
from holdfast.errors import BadArgument, HoldfastWarning
from holdfast.extras.runs import export as export_module
from holdfast.stores.paths import place_of


def state(number: int) -> dict[str, object]:
    return {
        "model": {"w": np.full((4, 4), number, np.float32)},
        "optim": {"m": np.ones(9)},
        "step": number,
    }


def test_every_so_many_steps(tmp_path: Path):
    export = Export(
        tmp_path / "hf", dtype="bf16", every=10, keep="model.*", rename={"model.*": "*"}
    )
    with holdfast.Run(tmp_path / "run", keep=Latest(1), export=export) as run:
        for number in (5, 10, 15, 20):
            run.save(number, state(number))
    assert sorted(os.listdir(tmp_path / "hf")) == ["step-00000010", "step-00000020"]
    with holdfast.open(tmp_path / "hf" / "step-00000010") as checkpoint:
        assert list(checkpoint) == ["w"]
        assert checkpoint["w"].dtype == "bfloat16"
        assert float(checkpoint["w"].numpy()[0, 0]) == 10


@pytest.mark.parametrize(
    ("format", "name"),
    [("torch", "step-00000001.pt"), ("native", "step-00000001"), ("safetensors", "step-00000001")],
)
def test_formats(tmp_path: Path, format: str, name: str):
    with holdfast.Run(
        tmp_path / "run", export=[Export(tmp_path / "out", format=format, keep="model.*")]
    ) as run:
        run.save(1, state(1))
    assert os.listdir(tmp_path / "out") == [name]
    assert holdfast.verify(tmp_path / "out" / name).ok


def test_a_step_stays_until_it_was_exported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    go, real = threading.Event(), export_module.convert

    def slow(*args: object, **options: object) -> object:
        assert go.wait(30)
        return real(*args, **options)

    monkeypatch.setattr(export_module, "convert", slow)
    run = holdfast.Run(
        tmp_path / "run", keep=Latest(1), export=Export(tmp_path / "out", keep="model.*")
    )
    for number in (1, 2, 3):
        run.save(number, state(number))
    assert [step.step for step in run] == [1, 2, 3]
    assert run.plan()[0].why == "is being exported"
    assert (
        run.plan()[1].why.startswith("waits to be exported")
        or "waits to be exported" in run.plan()[1].why
    )
    go.set()
    run.close()
    assert len(os.listdir(tmp_path / "out")) == 3
    with holdfast.Run(tmp_path / "run", keep=Latest(1)) as again:
        again.prune()
        assert [step.step for step in again] == [3]


def test_what_fails_is_told_at_the_next_call_and_at_the_end(tmp_path: Path):
    (tmp_path / "file").write_text("no folder")
    run = holdfast.Run(tmp_path / "run", export=Export(tmp_path / "file"))
    run.save(1, state(1))
    run._exports.wait()
    with pytest.warns(HoldfastWarning, match="step 1 could not be exported"):
        run.save(2, state(2))
    with pytest.warns(HoldfastWarning, match="step 2 could not be exported"):
        run.close()
    assert [step.step for step in run] == [1, 2]


@pytest.mark.parametrize("wrong", ["hf", [1], {"a": 1}])
def test_what_export_does_not_take(tmp_path: Path, wrong: object):
    with pytest.raises(BadArgument, match="export="):
        holdfast.Run(tmp_path, export=wrong)


# What an export may replace: what this run exported there, and nothing else.


def content(path: Path) -> dict[str, bytes]:
    return {
        str(one.relative_to(path)): one.read_bytes()
        for one in sorted(path.rglob("*"))
        if one.is_file()
    }


@pytest.mark.parametrize("kind", [holdfast.Run, holdfast.torch.Run], ids=["core", "torch"])
@pytest.mark.parametrize(
    "folder",
    ["run", "run/", "./run/../run", "link", "run/exports", "run/step-00000001", "link/exports"],
)
def test_not_into_the_run_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[holdfast.Run], folder: str
):
    monkeypatch.chdir(tmp_path)
    os.symlink("run", "link")
    with kind("run") as run:
        run.save(1, state(1))
    before = content(tmp_path / "run")
    with pytest.raises(BadArgument, match=r"run's own directory|the run itself"):
        kind("run", export=Export(folder, dtype="bf16", keep="model.*"))
    with pytest.raises(BadArgument, match=r"run's own directory|the run itself"):
        kind("link", export=Export(folder, dtype="bf16", keep="model.*"))
    assert content(tmp_path / "run") == before
    assert holdfast.Run("run").resume() is not None


def test_nor_before_the_run_has_a_directory(tmp_path: Path):
    with pytest.raises(BadArgument, match="the run itself"):
        holdfast.Run(tmp_path / "run", export=Export(f"{tmp_path}/run/"))
    with pytest.raises(BadArgument, match="step-00000007"):
        holdfast.Run(tmp_path / "hf" / "step-00000007", export=Export(tmp_path / "hf"))
    assert os.listdir(tmp_path) == []


LEFT = ["everything", "holdfast.run.json", ".holdfast.lock"]


@pytest.mark.parametrize(
    ("left", "below"),
    [*((left, below) for left in LEFT for below in ("", "exports")), ("steps", "")],
)
def test_nor_into_another_run(tmp_path: Path, left: str, below: str):
    with holdfast.Run(tmp_path / "other") as other:
        other.save(1, state(1))
    if left != "everything":
        os.unlink(tmp_path / "other" / "holdfast.run.json")
    if left.startswith((".", "holdfast")):
        (tmp_path / "other" / left).write_text("{}")
    before = content(tmp_path / "other")
    with pytest.raises(BadArgument, match="directory of another run"):
        holdfast.Run(tmp_path / "run", export=Export(tmp_path / "other" / below))
    assert content(tmp_path / "other") == before


def test_two_exports_to_one_place(tmp_path: Path):
    os.symlink("hf", tmp_path / "link")
    for first, second in (("hf", "hf"), ("hf", "hf/."), ("hf", "link")):
        exports = [
            Export(tmp_path / first, every=2),
            Export(f"{tmp_path}/{second}", every=3, format="native"),
        ]
        with pytest.raises(BadArgument, match="two exports"):
            holdfast.Run(tmp_path / "run", export=exports)
    names = [Export(tmp_path / "hf", keep="model.*"), Export(tmp_path / "hf", format="torch")]
    with holdfast.Run(tmp_path / "run", export=names) as run:
        run.save(1, state(1))
    assert sorted(os.listdir(tmp_path / "hf")) == ["step-00000001", "step-00000001.pt"]


@pytest.mark.parametrize("format", ["safetensors", "native", "torch"])
def test_its_own_export_is_replaced(tmp_path: Path, format: str):
    export = Export(tmp_path / "hf", format=format, keep="model.*")
    name = "step-00000001.pt" if format == "torch" else "step-00000001"
    for number in (1, 2, 3):  # a new Run each time, as after a crash
        with holdfast.Run(tmp_path / "run", export=export) as run:
            run.save(1, state(number), overwrite=True)
        with holdfast.open(tmp_path / "hf" / name) as checkpoint:
            assert float(checkpoint["model.w"].numpy()[0, 0]) == number


def others(tmp_path: Path, kind: str) -> Path:
    """Something at the target of an export that this run did not export."""
    place = tmp_path / "hf" / ("step-00000001.pt" if kind == "file" else "step-00000001")
    place.parent.mkdir()
    if kind == "another run's export":
        with holdfast.Run(
            tmp_path / "other", export=Export(tmp_path / "hf", keep="model.*")
        ) as other:
            other.save(1, state(7))
    elif kind in ("checkpoint", "file"):
        holdfast.save({"w": np.ones(3)}, place)
    elif kind == "link":
        with holdfast.Run(tmp_path / "other") as other:
            place.symlink_to(other.save(1, state(7)).path)
    else:  # this run's export, changed by somebody
        with holdfast.Run(tmp_path / "run", export=Export(tmp_path / "hf", keep="model.*")) as run:
            run.save(1, state(7))
        holdfast.edit(place, in_place=True, set_metadata={"licence": "mit"})
    return place


@pytest.mark.parametrize("kind", ["another run's export", "checkpoint", "file", "link", "changed"])
def test_what_another_put_there_is_not_replaced(tmp_path: Path, kind: str):
    place = others(tmp_path, kind)
    before = content(place) if place.is_dir() else place.read_bytes()
    export = Export(
        tmp_path / "hf", format="torch" if kind == "file" else "safetensors", keep="model.*"
    )
    for _ in range(2):  # nor by the next try
        run = holdfast.Run(tmp_path / "run", export=export)
        run.save(1, state(1), overwrite=True)
        with pytest.warns(HoldfastWarning, match="no export of this run"):
            run.close()
        assert (content(place) if place.is_dir() else place.read_bytes()) == before
    assert run.resume() is not None


def test_a_folder_that_becomes_a_run_meanwhile(tmp_path: Path):
    run = holdfast.Run(tmp_path / "run", export=Export(tmp_path / "hf", keep="model.*"))
    (tmp_path / "hf").symlink_to("run")
    step = run.save(1, state(1))
    before = content(Path(step.path))
    with pytest.warns(HoldfastWarning, match="could not be exported"):
        run.close()
    assert content(Path(step.path)) == before
    assert run.resume() is not None


def test_in_a_bucket():
    place = "memory://exports/runs/a"
    for folder in (place, f"{place}/", "memory://exports//runs/a", f"{place}/hf"):
        with pytest.raises(BadArgument, match=r"the run itself|run's own directory"):
            holdfast.Run(place, export=Export(folder))
    with holdfast.Run("memory://exports/runs/b") as other:
        other.save(1, state(7))
    with pytest.raises(BadArgument, match="another run"):
        holdfast.Run(place, export=Export("memory://exports/runs/b/"))
    with pytest.raises(BadArgument, match="inside of the directory of another run"):
        holdfast.Run(place, export=Export("memory://exports/runs/b/step-00000001/hf"))
    with pytest.raises(BadArgument, match="two exports"):
        holdfast.Run(place, export=[Export("memory://exports/hf"), Export("memory://exports/hf/")])
    export = Export("memory://exports/hf", keep="model.*")
    for number in (1, 2):
        with holdfast.Run(place, export=export) as run:
            run.save(1, state(number), overwrite=True)
        with holdfast.open("memory://exports/hf/step-00000001") as checkpoint:
            assert checkpoint.format.startswith("safetensors")
            assert float(checkpoint["model.w"].numpy()[0, 0]) == number
    with holdfast.Run("memory://exports/runs/b", export=export) as other:
        other.save(1, state(9), overwrite=True)
        other._exports.wait()
        with pytest.warns(HoldfastWarning, match="no export of this run"):
            other._exports.tell()
    assert float(holdfast.open("memory://exports/hf/step-00000001")["model.w"].numpy()[0, 0]) == 2


def test_a_store_of_ones_own_is_one_place():
    from obstore.store import MemoryStore

    store, other = MemoryStore(), MemoryStore()
    with pytest.raises(BadArgument, match="the run itself"):
        holdfast.Run("runs/a", store=store, export=Export(place_of("runs/a/", store)))
    holdfast.Run("runs/a", store=store, export=Export(place_of("runs/a", other)))
