"""Two ranks save through `Writer` over an older checkpoint, and one of them is killed.

A program: `python -m tests.ranks.dcp_kills FOLDER`.
torch is imported once, and every rank is a fork of this process. Prints a JSON document with a row for each place of death.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import holdfast
from holdfast.integrations.dcp import Reader, Writer

PATIENCE_S = 60.0
"""Until a rank is ended from outside, which the test sees."""

PLACES = ("before writing", "after writing", "in the index")


class Dying(Writer):
    """Is killed at a place."""

    place = ""

    def write_data(self, plan: object, planner: object) -> object:
        self._die("before writing")
        written = super().write_data(plan, planner)
        self._die("after writing")
        return written

    def storage_meta(self) -> object:
        if self._target is not None:  # asked for once before, by the planner
            self._die("in the index")
        return super().storage_meta()

    def _die(self, place: str) -> None:
        if place == self.place:
            os.kill(os.getpid(), signal.SIGKILL)


def save(path: Path, rank: int, *, number: int, dying: tuple[int, str]) -> None:
    store = dist.FileStore(str(path.parent / f"store-{number}-{'-'.join(map(str, dying))}"), 2)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=5)
    )
    writer = Dying(path, durable=False)
    writer.place = dying[1] if rank == dying[0] else ""
    dcp.save(
        {"w": torch.full((1000,), float(number)), "of": {rank: rank}, "n": number},
        storage_writer=writer,
    )


def forked(job: Callable[[], object]) -> int:
    child = os.fork()
    if child:
        return child
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            job()
    except BaseException:
        os._exit(1)
    os._exit(0)


def ended(children: list[int]) -> list[int]:
    """How each ended; -1000 where it had to be ended."""
    found: dict[int, int] = {}
    until = time.monotonic() + PATIENCE_S
    while len(found) < len(children):
        for child in children:
            if child not in found and os.waitpid(child, os.WNOHANG)[0]:
                found[child] = 0
        if time.monotonic() > until:
            for child in set(children) - set(found):
                os.kill(child, signal.SIGKILL)
                found[child] = -1000
        time.sleep(0.02)
    return [found[child] for child in children]


def together(path: Path, *, number: int, dying: tuple[int, str]) -> list[int]:
    return ended(
        [forked(lambda rank=rank: save(path, rank, number=number, dying=dying)) for rank in (0, 1)]
    )  # type: ignore[misc]


def what_is_there(path: Path) -> float:
    state = {"w": torch.zeros(1000), "n": 0}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(state, storage_reader=Reader(path), no_dist=True)
    assert state["w"].tolist() == [float(state["n"])] * 1000
    with holdfast.open(path) as found:
        assert found.tree["of"] == {"0": 0, "1": 1}
    return state["n"]


def main(folder: Path) -> None:
    rows = []
    for place in PLACES:
        for rank in (0, 1) if place != "in the index" else (0,):
            path = folder / f"{place}-{rank}".replace(" ", "-") / "step"
            path.parent.mkdir()
            row: dict[str, object] = {"place": place, "rank": rank}
            row["hung"] = -1000 in together(path, number=1, dying=(9, "")) + together(
                path, number=2, dying=(rank, place)
            )
            row["there"] = _request(path)
            together(path, number=3, dying=(9, ""))
            row["later"] = _request(path)
            row["left"] = [
                name for name in os.listdir(path.parent) if not name.startswith("store-")
            ]
            rows.append(row)
    print(json.dumps(rows))


def _request(path: Path) -> float:
    """In a fork: this process starts no thread."""
    answer = path.parent / "store-answer"
    assert ended([forked(lambda: answer.write_text(str(what_is_there(path))))]) == [0]
    return float(answer.read_text())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
