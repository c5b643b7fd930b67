"""`holdfast.torch.Run` in a bucket: ranks upload a step, the first one publishes it, and any number of ranks resumes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")
import torch

import holdfast
import holdfast.torch
from holdfast.extras.runs.sweep import sweep
from tests.ranks.pool import Pool, good
from tests.remote import rank_jobs
from tests.remote.killing import killed
from tests.remote.servers import Proxy
from tests.remote.test_runs import bucket_keys, later, litter_of

pytestmark = pytest.mark.timeout(120)


@pytest.mark.parametrize(
    ("size", "background"), [(2, False), (4, True)], ids=["2 now", "4 background"]
)
def test_ranks_save_steps_and_others_resume(
    size: int, background: bool, pool: Pool, where: dict[str, str], url: str
):
    seen = good(pool.run(size, rank_jobs.run_of, where, url, [1, 2, 3, 4], background))
    assert seen[0] == [3, 4]
    run = holdfast.Run(url)
    assert [(step.step, step.metrics) for step in run] == [
        (3, {"loss": 1 / 3}),
        (4, {"loss": 0.25}),
    ]
    for step in run:
        assert holdfast.verify(step.path).ok
        with step.open() as checkpoint:
            assert checkpoint["rows"].numpy().ravel().tolist() == [step.step] * 320
            assert np.array_equal(checkpoint["frozen"].numpy().ravel(), np.arange(4000.0))
            assert checkpoint.tree["step"] == step.step
    shared = [name for name in run.latest().files if name.startswith("../step-00000001/")]
    assert len(shared) == size, "what never changes each rank has uploaded once"
    assert not litter_of(url)
    for other in {2, 4, 3} - {size}:
        for found in good(pool.run(other, rank_jobs.run_resumed, where, url)):
            assert found == (4.0, 4, 4, 0.25)
    # One process goes on with it, and shares nothing that is cut otherwise.
    run = holdfast.torch.Run(url, keep="latest:1")
    state = {
        "rows": torch.zeros(8, 40),
        "frozen": torch.zeros(8, 500),
        "plain": torch.zeros(30),
        "step": 0,
    }
    assert run.resume(into=state) is state
    run.save(5, state)
    assert [step.step for step in run] == [5]
    assert holdfast.verify(run.latest().path).ok
    assert not litter_of(url)
    assert (
        len({key.partition("step-0000000")[2][:1] for key in bucket_keys(url) if "data-" in key})
        == 1
    )


@pytest.mark.parametrize(("victim", "when"), [(1, "begins"), (0, "publishes")])
def test_a_rank_is_killed(victim: int, when: str, proxy: Proxy, url: str, tmp_path: Path):
    """The step before or the new one; the next save works, and a sweep leaves nothing of the dead."""
    run = holdfast.torch.Run(url)
    run.save(1, rank_jobs.state(1, 0, 1))
    sought = "00002-of-00002" if when == "begins" else "step-00000002/holdfast.json"
    moment = "asked" if when == "begins" else "done"
    said = killed(proxy, tmp_path, url, ranks=2, victim=victim, sought=sought, when=moment, step=2)
    newest = holdfast.Run(url).latest()
    assert said == {1 - victim: "RankLost"}
    assert newest.step == (1 if when == "begins" else 2)
    assert holdfast.verify(newest.path).ok
    run.save(3, rank_jobs.state(3, 0, 1))
    assert [step.step for step in run] == ([1, 3] if when == "begins" else [1, 2, 3])
    with later(25):
        sweep(url)
    assert all(holdfast.verify(step.path).ok for step in run)
    folders = {
        key.partition("step-0000000")[2][:1] for key in bucket_keys(url) if "step-0000" in key
    }
    assert folders == {str(step.step) for step in run}


def test_what_the_first_rank_refuses_all_ranks_raise(url: str, proxy: Proxy):
    run = holdfast.torch.Run(url)
    run.save(1, {"w": torch.ones(3)})
    with pytest.raises(holdfast.errors.NotCommitted, match="there already"):
        run.save(1, {"w": torch.ones(3)})
    run.save(1, {"w": torch.full((3,), 2.0)}, overwrite=True)
    assert run.resume()["w"].tolist() == [2, 2, 2]
    assert [step.step for step in run.rewind(1)] == []
    assert not litter_of(url)
