"""Saving to object stores: the old checkpoint or the new one, nothing else, whatever is lost on the way; and one winner of many."""

from __future__ import annotations

import errno
import os
import random
import subprocess
import sys
import threading
from collections.abc import Callable

import numpy as np
import obstore
import pytest
from obstore.store import MemoryStore

import holdfast
from holdfast.errors import DurabilityUncertain, HoldfastError, NotCommitted, SaveError, StoreError
from holdfast.stores.remote.client import bucket_of
from holdfast.stores.remote.url import url_of
from tests.remote.servers import Asked, Fault, Proxy, environment


def state(number: int) -> dict[str, np.ndarray]:
    return {"w": np.full((64, 1024), number, np.float32), "b": np.full(7, number, np.int32)}


def content(url: str) -> int | None:
    """Which state is there; None for none. Anything else fails."""
    try:
        with holdfast.open(url) as checkpoint:
            found = {name: tensor.numpy() for name, tensor in checkpoint.items()}
    except StoreError as error:
        if error.errno != errno.ENOENT:
            raise
        return None
    number = int(found["b"][0])
    for name, array in state(number).items():
        np.testing.assert_array_equal(found[name], array)
    return number


def keys(url: str) -> list[str]:
    where = url_of(url)
    return [one.key for one in bucket_of(where).below(where.key + "/", 1000)]


def only(number: int, fault: Fault) -> Callable[[Asked], Fault]:
    return lambda asked: fault if asked.number == number else None


@pytest.mark.parametrize("suffix", ["", ".pt", ".safetensors"])
@pytest.mark.parametrize("overwrite", [False, True])
def test_each_request_meets_each_fault(suffix: str, overwrite: bool, proxy: Proxy, url: str):
    """The client asks again where it may; where a save fails all the same, what was there is there still."""
    url += suffix
    if overwrite:
        holdfast.save(state(0), url)
    else:
        holdfast.save(state(0), url + "-other" + suffix)
    proxy.clear()
    where, number = url, 1
    if overwrite:
        holdfast.save(state(1), where, overwrite=True)
    else:
        holdfast.save(state(1), where + "-1" + suffix, overwrite=False)
    for at in range(len(proxy.asked)):
        for fault in ("drop", "cut", "503", "reset", "half"):
            number += 1
            where = url if overwrite else f"{url}-{number}{suffix}"
            before = content(where)
            proxy.clear()
            proxy.fault = only(at, fault)
            try:
                holdfast.save(state(number), where, overwrite=overwrite)
                wanted = [number]
            except NotCommitted:
                wanted = [before]
            except DurabilityUncertain:
                wanted = [before, number]
            proxy.fault = only(-1, None)
            assert content(where) in wanted, (at, fault)


def test_a_save_that_meets_no_answer_any_more(proxy: Proxy, url: str, monkeypatch: pytest.MonkeyPatch):
    """From each request on nothing arrives: the save fails, and what was there is there."""
    monkeypatch.setattr("holdfast.stores.remote.client.RETRIES", 1)
    holdfast.save(state(0), url)
    proxy.clear()
    holdfast.save(state(1), url, overwrite=True)
    for at in range(len(proxy.asked) - 1):
        proxy.clear()
        proxy.fault = lambda asked, at=at: "drop" if asked.number >= at else None
        before = 1
        with pytest.raises(SaveError):
            holdfast.save(state(2), url, overwrite=True)
        proxy.fault = only(-1, None)
        assert content(url) == before, at


def test_one_of_many_savers_wins(proxy: Proxy, url: str, request: pytest.FixtureRequest):
    """Sixteen savers of one step at once, and answers that are lost: one wins, the others know, every byte is the winner's."""
    rounds = 100 if request.config.getoption("--exhaustive") else 4
    for round in range(rounds):
        lost = random.Random(round)
        proxy.fault = lambda asked, lost=lost: "cut" if lost.random() < 0.15 else None
        where, outcome = f"{url}-{round}", [""] * 16

        def save(number: int, where: str = where, outcome: list[str] = outcome) -> None:
            try:
                holdfast.save(state(number), where)
                outcome[number] = "won"
            except NotCommitted:
                outcome[number] = "lost"

        threads = [threading.Thread(target=save, args=(number,)) for number in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        proxy.fault = only(-1, None)
        assert sorted(outcome) == ["lost"] * 15 + ["won"], (round, outcome)
        assert content(where) == outcome.index("won")
        assert len(keys(where)) == 2, "the losers took theirs away"


PROGRAM = """
import sys, numpy as np, holdfast
holdfast.save({"w": np.full((64, 1024), 1, np.float32), "b": np.full(7, 1, np.int32)}, sys.argv[1], overwrite=True)
"""


def test_a_saver_that_is_killed_between_two_requests(proxy: Proxy, url: str, request: pytest.FixtureRequest):
    """A kill before and after each request: the old step, or the new one; and a later save works."""
    holdfast.save(state(0), url)
    proxy.clear()
    holdfast.save(state(1), url, overwrite=True)
    count = len(proxy.asked)
    every = range(count) if request.config.getoption("--exhaustive") else (count - 2, count - 1)
    for at in every:
        for answered in (False, True):
            holdfast.save(state(0), url, overwrite=True)
            proxy.clear()
            process: list[subprocess.Popen[bytes]] = []

            def kill(
                asked: Asked, at: int = at, answered: bool = answered, process: list[subprocess.Popen[bytes]] = process
            ) -> Fault:
                if asked.number < at:
                    return None
                process[0].kill()
                process[0].wait()
                return "cut" if answered else "drop"

            proxy.fault = kill
            process.append(subprocess.Popen([sys.executable, "-c", PROGRAM, url], env={**os.environ, **environment(proxy.port)}))
            process[0].wait(60)
            proxy.fault = only(-1, None)
            assert process[0].returncode == -9
            assert content(url) in (0, 1), (at, answered)
            holdfast.save(state(2), url, overwrite=True)
            assert content(url) == 2


def test_a_reader_during_an_overwrite(proxy: Proxy, url: str):
    """What was opened is read as it was, or there is a clear error: never a mixture."""
    holdfast.save(state(0), url)
    with holdfast.open(url) as checkpoint:
        first = checkpoint["b"].numpy()
        holdfast.save(state(1), url, overwrite=True)
        np.testing.assert_array_equal(first, state(0)["b"])
        with pytest.raises(HoldfastError, match="open it again"):
            _ = checkpoint["w"].numpy()
    assert content(url) == 1


def test_a_store_without_conditions_is_found_out(proxy: Proxy, url: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("holdfast.stores.remote.client.Bucket.put", lambda self, *args, **more: "etag")
    bucket_of(url_of(url)).conditions = None
    with pytest.raises(NotCommitted, match="takes no notice of conditions"):
        holdfast.save(state(0), url)
    bucket_of(url_of(url)).conditions = None


def test_both_servers_keep_conditions(either: int, url: str, monkeypatch: pytest.MonkeyPatch):
    for name, value in environment(either).items():
        monkeypatch.setenv(name, value)
    holdfast.save(state(0), url)
    with pytest.raises(NotCommitted, match="overwrite=True"):
        holdfast.save(state(1), url)
    holdfast.save(state(2), url, overwrite=True, read_back=True)
    assert content(url) == 2
    assert len(keys(url)) == 2, "what was replaced is gone"


def test_a_source_that_changes_keeps_everything_as_it_was():
    store = MemoryStore()
    holdfast.save(state(0), "a", store=store)
    holdfast.save(state(1), "b.safetensors", store=store)
    with holdfast.open("b.safetensors", store=store) as source:
        holdfast.save(state(2), "b.safetensors", store=store)
        with pytest.raises(HoldfastError):
            holdfast.save(source, "a", store=store, overwrite=True)
    with holdfast.open("a", store=store) as checkpoint:
        np.testing.assert_array_equal(checkpoint["b"].numpy(), state(0)["b"])
    assert len([one for batch in obstore.list(store, "a") for one in batch]) == 2
