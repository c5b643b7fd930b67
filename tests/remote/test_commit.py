"""Saving to object stores: the old checkpoint or the new one, nothing else, whatever is lost on the way; and one winner of many."""

from __future__ import annotations

import errno
import threading

import numpy as np
import obstore
import pytest
from obstore.store import MemoryStore

import holdfast
from holdfast.core.value import replace
from holdfast.engine.targets.bucket_commit import ObjectSave
from holdfast.errors import DurabilityUncertain, HoldfastError, NotCommitted, SaveError, StoreError
from holdfast.stores.remote.client import Bucket, ObjectContent, get_bucket
from holdfast.stores.remote.url import parse_url
from tests.remote.killing import run_and_kill
from tests.remote.servers import Proxy, environment, only
from tests.sampling import count_rounds, random_for, sample
from tests.support import run_in_threads


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
    where = parse_url(url)
    return [one.key for one in get_bucket(where).list_objects(where.key + "/", 1000)]


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


def test_a_save_that_meets_no_answer_any_more(
    proxy: Proxy, url: str, monkeypatch: pytest.MonkeyPatch
):
    """From each request on nothing arrives: the save fails, and what was there is there."""
    monkeypatch.setattr("holdfast.stores.remote.client.MAX_RETRIES", 1)
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


LONG = ObjectSave.MAX_PUT_NBYTES
"""Above this, an object is uploaded in parts; tests lower it."""


@pytest.fixture
def short_puts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every object is a long one."""
    monkeypatch.setattr(ObjectSave, "MAX_PUT_NBYTES", 1 << 10)


def race_savers(
    proxy: Proxy, url: str, *, savers: int, rounds: int, lost_share: float, suffix: str = ""
) -> list[str]:
    """Let savers start at once and lose answers, and return the places: one wins, and all know."""
    places: list[str] = []
    for number in range(rounds):
        dice = random_for(f"answers lost in round {number}")
        proxy.fault = lambda asked, dice=dice: "cut" if dice.random() < lost_share else None
        place = f"{url}-{number}{suffix}"
        outcomes = [""] * savers
        together = threading.Barrier(savers)

        def save(
            saver: int,
            place: str = place,
            outcomes: list[str] = outcomes,
            together: threading.Barrier = together,
        ) -> None:
            together.wait()
            try:
                holdfast.save(state(saver), place, overwrite=False)
                outcomes[saver] = "won"
            except NotCommitted:
                outcomes[saver] = "lost"

        run_in_threads(save, range(savers))
        proxy.fault = only(-1, None)
        assert sorted(outcomes) == ["lost"] * (savers - 1) + ["won"], (number, outcomes)
        assert content(place) == outcomes.index("won"), "every byte is the winner's"
        places.append(place)
    return places


def test_one_of_many_savers_wins(proxy: Proxy, url: str):
    rounds = count_rounds("sixteen savers of one step", 2, total=100)
    for place in race_savers(proxy, url, savers=16, rounds=rounds, lost_share=0.15):
        assert len(keys(place)) == 2, "the losers took theirs away"


@pytest.mark.usefixtures("short_puts")
def test_one_of_many_savers_of_a_long_object_wins(proxy: Proxy, url: str):
    """As with a prefix, though the end of an upload has no condition."""
    rounds = count_rounds("eight savers of one object", 3, total=50)
    race_savers(proxy, url, savers=8, rounds=rounds, lost_share=0.1, suffix=".safetensors")
    folder = url.rpartition("/")[0]
    assert len(keys(folder)) == rounds, "nothing is left beside them"


@pytest.mark.usefixtures("short_puts")
def test_each_request_of_a_long_object_meets_a_fault(proxy: Proxy, url: str):
    holdfast.save(state(0), f"{url}-0.safetensors", overwrite=False)
    proxy.clear()
    holdfast.save(state(0), f"{url}-1.safetensors", overwrite=False)
    number = 1
    for at in range(len(proxy.asked)):
        for fault in ("drop", "cut", "503"):
            number += 1
            where = f"{url}-{number}.safetensors"
            proxy.clear()
            proxy.fault = only(at, fault)
            holdfast.save(state(number), where, overwrite=False)
            proxy.fault = only(-1, None)
            assert content(where) == number, (at, fault)


@pytest.mark.parametrize("long", [True, False])
def test_a_single_object_never_takes_the_place_of_another(
    long: bool, either: int, url: str, monkeypatch: pytest.MonkeyPatch
):
    """One that appears while it is written stays, whoever put it there."""
    monkeypatch.setattr(ObjectSave, "MAX_PUT_NBYTES", 1 << 10 if long else LONG)
    for name, value in environment(either).items():
        monkeypatch.setenv(name, value)
    where, other = parse_url(url + ".safetensors"), url + "-other.safetensors"
    holdfast.save(state(2), other)
    begin = ObjectSave.check_existing

    def then_another(self: ObjectSave) -> None:
        begin(self)
        if (
            get_bucket(where).list_objects(where.key.rpartition("/")[0] + "/", 10)[0].key
            != where.key
        ):
            get_bucket(where).put(where.key, b"of another program")

    monkeypatch.setattr(ObjectSave, "check_existing", then_another)
    for act in (
        lambda: holdfast.save(state(1), where, overwrite=False),
        lambda: holdfast.copy(other, where),
    ):
        get_bucket(where).delete([where.key])
        with pytest.raises(NotCommitted, match="the object exists"):
            act()
        assert bytes(get_bucket(where).get_object(where.key, 100).data) == b"of another program"
        assert len(keys(url.rpartition("/")[0])) == 2, "no claim is left"


def test_a_claim_that_a_dead_saver_left(proxy: Proxy, url: str, short_puts: None):
    """It is told what to do; who may replace what is there needs no claim; and readers do not see it."""
    holdfast.save(state(0), url + ".safetensors")
    where = parse_url(url + "-new.safetensors")
    claim = where.sibling(".step-1-new.safetensors.0000000000000000.tmp")
    get_bucket(where).put(claim.key, b"somebody's")
    with pytest.raises(NotCommitted, match=r"cut off while it was; pass overwrite=True"):
        holdfast.save(state(1), where, overwrite=False)
    assert content(where) is None
    holdfast.save(state(2), where, overwrite=True)
    assert content(where) == 2


@pytest.mark.parametrize(("overwrite", "long"), [(True, True), (False, True), (False, False)])
def test_a_single_object_is_read_back(overwrite: bool, long: bool, monkeypatch: pytest.MonkeyPatch):
    """It is there by then; so nobody is told that nothing was done, nor that all is well."""
    monkeypatch.setattr(ObjectSave, "MAX_PUT_NBYTES", 1 << 10 if long else LONG)
    store = MemoryStore()
    if overwrite:
        holdfast.save(state(0), "x.safetensors", store=store)
    damaged = Bucket._get_once

    async def flip(self: Bucket, *args: object) -> ObjectContent:
        got = await damaged(self, *args)  # type: ignore[arg-type]
        return (
            replace(got, data=memoryview(bytes(got.data[:-1]) + b"?"))
            if got.data.nbytes > 1 << 10
            else got
        )

    monkeypatch.setattr(Bucket, "_get_once", flip)
    with pytest.raises(DurabilityUncertain, match="read back the same"):
        holdfast.save(state(1), "x.safetensors", store=store, overwrite=overwrite, read_back=True)
    monkeypatch.undo()
    assert [one["path"] for batch in obstore.list(store) for one in batch] == ["x.safetensors"]


PROGRAM = """
import sys, numpy as np, holdfast
holdfast.save({"w": np.full((64, 1024), 1, np.float32), "b": np.full(7, 1, np.int32)}, sys.argv[1], overwrite=True)
"""


def test_a_saver_that_is_killed_between_two_requests(proxy: Proxy, url: str):
    """A kill before and after each request: the old step, or the new one; and a later save works."""
    holdfast.save(state(0), url)
    proxy.clear()
    holdfast.save(state(1), url, overwrite=True)
    count = len(proxy.asked)
    for at in sample("requests between which a saver is killed", range(count), 2):
        for fault in ("drop", "cut"):
            holdfast.save(state(0), url, overwrite=True)
            assert run_and_kill(proxy, PROGRAM, url, request=at, fault=fault) == -9
            assert content(url) in (0, 1), (at, fault)
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


def test_a_store_without_conditions_is_found_out(
    proxy: Proxy, url: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(
        "holdfast.stores.remote.client.Bucket.put", lambda self, *args, **more: "etag"
    )
    get_bucket(parse_url(url)).supports_conditions = None
    with pytest.raises(NotCommitted, match="ignores conditions"):
        holdfast.save(state(0), url)
    get_bucket(parse_url(url)).supports_conditions = None


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
