"""TorchTitan's checkpointer with its optimizers, schedulers and configuration, on one rank and on two; `titan` has the jobs.

Each number of ranks is started once for all jobs: importing TorchTitan takes longer than any of them.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import safetensors.numpy

import holdfast

pytest.importorskip("torchtitan.components.checkpointer")

from tests.integrations.page import run_page
from tests.pages import ROOT

pytestmark = pytest.mark.timeout(300)

TO_STOCK = {"writer": "ours", "reader": "stock", "format": "dcp", "background": False}
FROM_STOCK = {"writer": "stock", "reader": "ours", "format": "dcp", "background": False}
ALONE = {
    "native": ("resume", {"writer": "ours", "reader": "ours", "format": "native"}),
    "dcp": ("resume", {"writer": "ours", "reader": "ours", "format": "dcp"}),
    "hf": ("exported", {"hf": True}),
    "missing": ("missing", {}),
}
TOGETHER = ALONE | {
    "to stock": ("resume", TO_STOCK),
    "from stock": ("resume", FROM_STOCK),
    "torn": ("torn", {}),
    "waiting": ("retention", {"background": False}),
    "background": ("retention", {"background": True}),
    "plain": ("exported", {"hf": False}),
    "failing": ("failing", {}),
}


class Ran:
    """What the jobs came to, and where."""

    def __init__(
        self, folder: Path, jobs: dict[str, tuple[str, dict[str, object]]], *, ranks: int
    ) -> None:
        self.folder = folder
        (folder / "assets").mkdir()
        (folder / "assets" / "config.json").write_text('{"model_type": "small"}')
        given = [
            [
                name,
                str(folder / name),
                job,
                arguments | ({"assets": str(folder / "assets")} if name == "hf" else {}),
            ]
            for name, (job, arguments) in jobs.items()
        ]
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        told = {
            "WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1",
        }
        processes = [
            subprocess.Popen(
                [sys.executable, "-m", "tests.integrations.titan", json.dumps(given)],
                env=os.environ | told | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                cwd=ROOT,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(ranks)
        ]
        ended = [process.communicate(timeout=280) for process in processes]
        self.said = "\n".join(said for _, said in ended)
        self.found = dict(
            json.loads(line) for line in ended[0][0].splitlines() if line.startswith("[")
        )

    def __getitem__(self, name: str) -> object:
        assert name in self.found, self.said
        return self.found[name]


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Ran]:
    folder = tmp_path_factory.mktemp
    return {1: Ran(folder("one"), ALONE, ranks=1), 2: Ran(folder("two"), TOGETHER, ranks=2)}


@pytest.mark.parametrize("format", ["native", "dcp"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_training_goes_on_as_if_nothing_had_been(ranks: int, format: str, ran: dict[int, Ran]):
    assert ran[ranks][format] == ["step-2", "step-4"]
    step = ran[ranks].folder / format / "checkpoint" / "step-4"
    with holdfast.open(step) as checkpoint:
        assert checkpoint.format == format
    assert holdfast.verify(step).ok


@pytest.mark.parametrize("way", ["to stock", "from stock"])
def test_torchtitan_s_own_reads_and_writes_the_same(way: str, ran: dict[int, Ran]):
    assert ran[2][way] == ["step-2", "step-4"]


def test_a_torn_step_is_passed_over(ran: dict[int, Ran]):
    assert ran[2]["torn"] == 2


@pytest.mark.parametrize("how", ["waiting", "background"])
def test_old_steps_go_when_new_ones_are_there(how: str, ran: dict[int, Ran]):
    found = ran[2][how]
    assert found["left"] == ["step-5", "step-6"]
    # Counted after each save was asked for. From the third on two are whole, or three: the old one goes when the new one is there.
    assert all(count in ((2,) if how == "waiting" else (2, 3)) for count in found["seen"][2:]), (
        found
    )


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_last_step_in_the_form_of_hugging_face(ranks: int, ran: dict[int, Ran]):
    files = ran[ranks]["hf"]
    assert files == ["config.json", "model.safetensors"]
    weights = safetensors.numpy.load_file(
        ran[ranks].folder / "hf" / "checkpoint" / "step-5" / "model.safetensors"
    )
    assert {name: array.shape for name, array in weights.items()} == {
        "model.0.weight": (16, 8), "model.0.bias": (16,), "model.1.weight": (16, 8), "model.1.bias": (8,),
    }  # fmt: skip
    assert not [
        name for name in os.listdir(ran[ranks].folder / "hf" / "checkpoint") if name.startswith(".")
    ]


def test_the_last_step_is_the_model_alone(ran: dict[int, Ran]):
    assert ran[2]["plain"]


def test_a_save_that_fails_is_told_to_all(ran: dict[int, Ran]):
    assert ran[2]["failing"] == "RanksFailed"


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_is_not_there_is_said(ranks: int, ran: dict[int, Ran]):
    assert ran[ranks]["missing"] == ["DoesNotFit", "FileNotFoundError"]


def test_the_page():
    from holdfast.integrations.torchtitan import Checkpointer

    checkpoint = run_page("needs TorchTitan")["checkpoint"]
    assert type(checkpoint) is Checkpointer.Config
    assert (checkpoint.format, checkpoint.background, checkpoint.keep_latest_k) == (
        "native",
        True,
        3,
    )
    assert checkpoint._owner is Checkpointer
