"""Exports in the background: what is published becomes another format, and no rule deletes it before."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import numpy as np
import pytest

import holdfast
from holdfast import Export, Latest
from holdfast.errors import BadArgument, HoldfastWarning
from holdfast.runs import export as export_module


def state(number: int) -> dict[str, object]:
    return {"model": {"w": np.full((4, 4), number, np.float32)}, "optim": {"m": np.ones(9)}, "step": number}


def test_every_so_many_steps(tmp_path: Path):
    export = Export(tmp_path / "hf", dtype="bf16", every=10, keep="model.*", rename={"model.*": "*"})
    with holdfast.Run(tmp_path / "run", keep=Latest(1), export=export) as run:
        for number in (5, 10, 15, 20):
            run.save(number, state(number))
    assert sorted(os.listdir(tmp_path / "hf")) == ["step-00000010", "step-00000020"]
    with holdfast.open(tmp_path / "hf" / "step-00000010") as checkpoint:
        assert list(checkpoint) == ["w"]
        assert checkpoint["w"].dtype == "bfloat16"
        assert float(checkpoint["w"].numpy()[0, 0]) == 10


@pytest.mark.parametrize(
    ("format", "name"), [("torch", "step-00000001.pt"), ("native", "step-00000001"), ("safetensors", "step-00000001")]
)
def test_formats(tmp_path: Path, format: str, name: str):
    with holdfast.Run(tmp_path / "run", export=[Export(tmp_path / "out", format=format, keep="model.*")]) as run:
        run.save(1, state(1))
    assert os.listdir(tmp_path / "out") == [name]
    assert holdfast.verify(tmp_path / "out" / name).ok


def test_a_step_stays_until_it_was_exported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    go, real = threading.Event(), export_module.convert

    def slow(*args: object, **options: object) -> object:
        assert go.wait(30)
        return real(*args, **options)

    monkeypatch.setattr(export_module, "convert", slow)
    run = holdfast.Run(tmp_path / "run", keep=Latest(1), export=Export(tmp_path / "out", keep="model.*"))
    for number in (1, 2, 3):
        run.save(number, state(number))
    assert [step.step for step in run] == [1, 2, 3]
    assert run.plan()[0].why == "is being exported"
    assert run.plan()[1].why.startswith("waits to be exported") or "waits to be exported" in run.plan()[1].why
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
