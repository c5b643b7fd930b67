"""Runs in a bucket: the newest whole step is there whatever is lost on the way, and nothing that is named is ever swept."""

from __future__ import annotations

import asyncio
import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import numpy as np
import obstore
import pytest
from obstore.store import MemoryStore

import holdfast
from holdfast import Best, Every, Export, Latest
from holdfast.cli.main import main
from holdfast.engine.targets.bucket_commit import COPY_CLAIM
from holdfast.errors import (
    BadArgument,
    HeaderError,
    HoldfastWarning,
    NoSuchStep,
    NotCommitted,
    SaveError,
)
from holdfast.extras.runs.sweep import sweep
from holdfast.stores.remote.client import Bucket, RemoteObject, get_bucket
from holdfast.stores.remote.url import parse_url
from tests.remote.killing import run_and_kill
from tests.remote.servers import Proxy, environment, only
from tests.sampling import count_rounds, every_nth, is_exhaustive, sample
from tests.support import run_in_threads

LITTER = "step-00000009/data-0123456789abcdef-00001-of-00001.safetensors"


def state(number: int) -> dict[str, object]:
    return {"w": np.full((8, 64), number, np.float32), "step": number}


def shared(number: int) -> dict[str, object]:
    """The same with something that never changes, which steps share."""
    return {**state(number), "frozen": np.arange(512.0)}


def numbers(run: holdfast.Run) -> list[int]:
    return [step.step for step in run]


def loads(step: holdfast.extras.runs.Step) -> bool:
    """Whether every value of a step is the one that was saved."""
    with step.open() as checkpoint:
        same = "frozen" not in checkpoint or np.array_equal(
            checkpoint["frozen"].numpy(), np.arange(512.0)
        )
        return (
            same
            and checkpoint.tree["step"] == step.step
            and bool((checkpoint["w"].numpy() == step.step).all())
        )


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


def keys(store: MemoryStore, prefix: str = "run") -> list[str]:
    return sorted(
        one["path"].removeprefix(f"{prefix}/")
        for batch in obstore.list(store, prefix)
        for one in batch
    )


def test_a_run_is_as_on_a_disk(store: MemoryStore):
    run = holdfast.Run("run", keep=[Latest(2), Every(10), Best("loss")], store=store)
    assert (run.latest(), run.resume(), numbers(run), run.best("loss")) == (None, None, [], None)
    for number in range(1, 14):
        saved = run.save(
            number,
            state(number),
            metrics={"loss": abs(number - 5), "odd name\n\x7f é": float("nan")},
        )
        assert repr(run.latest()) == repr(saved)  # a NaN is not equal to itself
    assert numbers(run) == [5, 10, 12, 13]
    assert run.best("loss").step == 5
    assert np.isnan(run[5].metrics["odd name\n\x7f é"])
    assert 5 in run
    assert 6 not in run
    assert all(map(loads, run))
    into = state(0)
    array = into["w"]
    assert run.resume(into=into) is into
    assert (array[0, 0], into["step"], run.resumed.step) == (13, 13, 13)
    assert run.latest(deep=True).step == 13
    assert run.summary().deleted == 9
    assert {fate.step.step: fate.why for fate in run.plan()}[5] == "best:loss:1"
    assert [one.step for one in run.rewind(10)] == [12, 13]
    run.close()
    again = holdfast.Run("run", store=store)
    assert numbers(again) == [5, 10]
    named = {one.partition("/")[0] for one in keys(store)}
    assert named == {"step-00000005", "step-00000010", "holdfast.run.json", "holdfast.pins.json"}, (
        "nothing is left of the others"
    )


def test_a_step_is_not_replaced_unasked(store: MemoryStore):
    run = holdfast.Run("run", store=store)
    run.save(1, state(1))
    with pytest.raises(NotCommitted, match="step 1 is there already"):
        run.save(1, state(1))
    run.save(1, state(1), overwrite=True)
    assert loads(run[1])
    assert len(keys(store, "run/step-00000001")) == 2


@pytest.mark.parametrize("attributes", [True, False])
def test_what_is_not_whole_is_no_step(
    store: MemoryStore, attributes: bool, monkeypatch: pytest.MonkeyPatch
):
    if not attributes:
        monkeypatch.setattr(
            "holdfast.extras.runs.bucket.RunBucket.attributes", lambda run, stamp, files: {}
        )
    run = holdfast.Run("run", store=store)
    for number in (1, 2):
        run.save(number, state(number), metrics={"loss": number})
    holdfast.save(state(3), "run/step-3", store=store)  # without a stamp
    obstore.put(store, f"run/{LITTER}", b"x")  # nothing was published
    obstore.copy(store, "run/step-00000002/holdfast.json", "run/step-00000007/holdfast.json")
    run.save(4, state(4), metrics={"loss": 4})
    data = next(key for key in keys(store) if key.startswith("step-00000004/data"))
    content = obstore.get(store, f"run/{data}").bytes()
    fresh = holdfast.Run("run", store=store)
    for wrong, says in ((b"short", "5 of"), (None, "missing")):
        if wrong is None:
            obstore.delete(store, f"run/{data}")
        else:
            obstore.put(store, f"run/{data}", wrong)
        for one in (run, fresh):
            assert one.latest().step == 3
            found = {row.name: row.why for row in one._folder.survey()}
            assert says in found["step-00000004"]
            assert "renamed" in found["step-00000007"]
            assert "step-00000009" not in found
    obstore.put(store, f"run/{data}", content)
    assert fresh.latest().step == 4
    assert fresh[4].metrics == {"loss": 4}
    obstore.delete(store, f"run/{data}")
    run.save(4, state(4))  # what is not whole is replaced
    assert loads(run[4])
    obstore.put(store, "run/step-00000004/holdfast.json", b"{}")
    assert fresh.latest().step == 3, "a manifest that says nothing"


def test_a_step_that_was_copied_keeps_its_metrics(store: MemoryStore):
    holdfast.Run("run", store=store).save(7, state(7), metrics={"loss": 0.1})
    for key in keys(store):
        obstore.put(
            store, f"copy/{key}", obstore.get(store, f"run/{key}").bytes()
        )  # by a program without attributes
    run = holdfast.Run("copy", store=store)
    assert run.latest().metrics == {"loss": 0.1}
    assert loads(run.latest())


def test_pins(store: MemoryStore):
    run = holdfast.Run("run", keep="latest:1", store=store)
    run.save(1, state(1))
    assert holdfast.Run("run", store=store).pin(1, "paper").why == "paper"
    for number in (2, 3):
        run.save(number, state(number))
    assert numbers(run) == [1, 3]
    assert run.pins()[1].why == "paper"
    with pytest.raises(NoSuchStep):
        run.pin(2)
    with pytest.raises(NoSuchStep, match="not pinned"):
        run.unpin(2)
    run.unpin(1)
    assert [step.step for step in run.prune()] == [1]
    obstore.put(store, "run/holdfast.pins.json", b"{")
    with pytest.warns(HoldfastWarning, match="no step of"):
        run.save(4, state(4))
    with pytest.raises(HeaderError):
        run.pins()


def test_a_pin_comes_before_a_deletion_or_is_refused(store: MemoryStore):
    """Whoever pins while steps are chosen keeps its step; whoever pins while they are deleted is told."""
    run, other = holdfast.Run("run", store=store), holdfast.Run("run", store=store)
    for number in (1, 2, 3):
        run.save(number, state(number))
    place, chosen = run._folder, []

    def choose(pins: object) -> list[holdfast.extras.runs.Step]:
        if not chosen:
            other.pin(1, "in time")
        chosen.append(set(pins))  # type: ignore[call-overload]
        return [step for step in run.steps()[:2] if step.step not in chosen[-1]]

    real, told = place._unpublish, []  # type: ignore[attr-defined]

    def unpublish(step: holdfast.extras.runs.Step) -> None:
        with pytest.raises(NoSuchStep, match="being deleted") as refused:
            other.pin(step.step)
        told.append(refused.value)
        other.pin(3, "another")
        with pytest.raises(NoSuchStep, match="being deleted"):
            other.pin(step.step)
        real(step)

    place._unpublish = unpublish  # type: ignore[attr-defined]
    gone, notes = place.let_go(choose, durable=True)
    assert ([one.step for one in gone], notes) == ([2], [])
    assert chosen == [set(), {1}]
    assert sorted(run.pins()) == [1, 3]
    assert numbers(run) == [1, 3]


def test_a_budget(store: MemoryStore):
    run = holdfast.Run("run", keep="latest:2", budget=9000, when_full="evict", store=store)
    for number in range(1, 6):
        run.save(number, state(number))
        assert sum(step.nbytes for step in run) <= 9000
    strict = holdfast.Run("other", budget=2000, store=store)
    with pytest.raises(NotCommitted, match="budget"):
        strict.save(1, state(1))
    assert numbers(strict) == []


def test_exports(store: MemoryStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    run = holdfast.Run(
        "memory://exported/run",
        keep="latest:1",
        export=[Export("hf"), Export("memory://exported/hf", "torch")],
    )
    run.save(1, state(1))
    run.close()
    assert holdfast.open("hf/step-00000001")["w"].shape == (8, 64)
    assert holdfast.open("memory://exported/hf/step-00000001.pt")["w"].shape == (8, 64)


# The sweep.


@contextmanager
def later(hours: float) -> Iterator[None]:
    """The store's clock, so many hours on: objects that are put and asked for one by one are of then."""
    real = Bucket.head

    def head(self: Bucket, key: str) -> RemoteObject:
        found = real(self, key)
        return RemoteObject(
            found.key, found.nbytes, found.etag, found.modified_at + timedelta(hours=hours)
        )

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Bucket, "head", head)
        yield


def test_a_sweep_takes_litter_and_nothing_else(store: MemoryStore):
    run = holdfast.Run("run", store=store)
    for number in (1, 2):
        run.save(number, state(number))
    others = [
        "notes.txt",
        "step-00000009/data-0123.safetensors",
        "step-00000009/model.safetensors",
        "deep/er/" + LITTER,
    ]
    probes = [
        "step-00000001.holdfast-probe-0123456789abcdef",
        "step-00000001/x.holdfast-probe-0123456789abcdef",
    ]
    beside = "step-00000002/data-0123456789abcdef-00001-of-00001.safetensors"
    hidden = [".x.safetensors.0123456789abcdef.tmp", f"step-00000002/{COPY_CLAIM}"]
    litter = [LITTER, beside, *probes, *hidden]
    for key in [*others, *litter]:
        obstore.put(store, f"run/{key}", b"xy")
    obstore.put(store, "other/" + LITTER, b"xy")
    before = keys(store)
    assert sweep("run", store=store).young == 6
    assert keys(store) == before, "all of it is young"
    with later(25):
        looked = sweep("run", dry_run=True, store=store)
        assert keys(store) == before
        done = sweep("run", store=store)
    assert looked.keys == done.keys
    assert (sorted(done.keys), done.nbytes, done.young) == (
        sorted(f"run/{key}" for key in litter),
        12,
        0,
    )
    assert keys(store) == sorted(set(before) - set(litter))
    assert keys(store, "other") == [LITTER]
    assert all(map(loads, run))
    with later(25), pytest.raises(BadArgument, match="object stores"):
        sweep("/somewhere")


def test_a_sweep_leaves_what_it_cannot_understand(store: MemoryStore):
    obstore.put(store, f"run/{LITTER}", b"x")
    obstore.put(store, "run/step-00000009/holdfast.json", b"{}")
    with later(25):
        done = sweep("run", store=store)
    assert not done.keys
    assert "cannot be understood" in done.notes[0]
    assert LITTER in keys(store)


def test_a_save_that_is_published_while_the_sweep_looks(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch
):
    """Its data was old enough, and no manifest named it: until the sweep has looked again."""
    holdfast.save(state(1), "run/step-1", store=store)
    manifest = obstore.get(store, "run/step-1/holdfast.json").bytes()
    obstore.delete(store, "run/step-1/holdfast.json")
    real, asked = Bucket.put, []

    def put(self: Bucket, key: str, *args: object, **more: object) -> object:
        asked.append(key)
        if "holdfast.claims" in key:
            obstore.put(store, "run/step-1/holdfast.json", manifest)
        return real(self, key, *args, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(Bucket, "put", put)
    with later(25):
        assert sweep("run", store=store).keys == ()
    assert len(asked) == 2, "for the time, and the claim when all candidates are known"
    assert loads(holdfast.Run("run", store=store)[1])


def test_a_saver_between_its_data_and_its_manifest_survives_a_sweep(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch
):
    from holdfast.engine.targets.bucket_commit import PrefixSave

    run, real, swept = holdfast.Run("run", store=store), PrefixSave.commit, []

    def commit(self: PrefixSave, *args: object) -> None:
        swept.append(sweep("run", store=store))
        real(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(PrefixSave, "commit", commit)
    run.save(1, state(1))
    assert (swept[0].keys, swept[0].young) == ((), 1)
    assert loads(run[1])


def test_the_command_line(capsys: pytest.CaptureFixture[str]):
    url = "memory://commands/run"
    run = holdfast.Run(url, keep="latest:2")
    for number in (1, 2):
        run.save(number, state(number), metrics={"loss": 1 / number})
    assert main(["runs", url]) == 0
    assert "2 steps" in capsys.readouterr().out
    assert main(["runs", url, "--plan", "--keep", "latest:1"]) == 0
    assert "until step 2 has been read back" in capsys.readouterr().out
    assert main(["pin", url, "1", "--why", "paper"]) == 0
    assert main(["unpin", url, "1"]) == 0
    assert main(["runs", url, "--prune", "--keep", "latest:1"]) == 0
    capsys.readouterr()
    assert main(["runs", url, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [(row["step"], row["metrics"]) for row in told["steps"]] == [(2, {"loss": 0.5})]
    assert (told["path"], told["writer"]) == (url, None)
    client = get_bucket(parse_url(url)).client
    obstore.put(client, f"run/{LITTER}", b"x")
    assert main(["runs", url, "--gc", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["young"] == 1
    with later(2):
        assert main(["runs", url, "--gc", "--grace", "1h", "--dry-run"]) == 0
        assert f"would delete run/{LITTER}" in capsys.readouterr().out
        assert main(["runs", url, "--gc", "--grace", "1h"]) == 0
    assert LITTER not in keys(client)
    assert main(["runs", url, "--grace", "1h"]) == 2
    assert main(["runs", ".", "--gc"]) == 2


# With a real server, and what networks do.


def litter_of(url: str) -> list[str]:
    """Data that no manifest names."""
    with later(1):
        return list(sweep(url, grace=1, dry_run=True).keys)


def checked(url: str, *allowed: int | None) -> int | None:
    """The newest step, which must be whole and one of these; so are all others whole."""
    run = holdfast.Run(url)
    newest = run.latest()
    assert (newest and newest.step) in allowed
    assert all(map(loads, run))
    return newest and newest.step


@pytest.mark.parametrize("fault", ["drop", "cut", "503"])
def test_each_request_of_a_save_meets_a_fault(fault: str, proxy: Proxy, url: str):
    """One in three of them by default, each time others."""
    run = holdfast.Run(url, keep="latest:1")
    for number in (1, 2):
        run.save(number, shared(number))
    proxy.clear()
    run.save(3, shared(3))
    count, number = len(proxy.asked), 3
    for at in every_nth(f"requests of a save of a run that meet {fault}", count, 3):
        proxy.clear()
        proxy.fault = only(at, fault)
        number += 1
        try:
            run.save(number, shared(number))
        finally:
            proxy.fault = only(-1, None)
        assert checked(url, number) == number, at
    assert len(run) == 1
    assert not litter_of(url)


def test_no_request_arrives_from_one_on(proxy: Proxy, url: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("holdfast.stores.remote.client.MAX_RETRIES", 1)
    run = holdfast.Run(url, keep="latest:1")
    for number in (1, 2):
        run.save(number, state(number))
    proxy.clear()
    run.save(3, state(3))
    # A save looks at what each of the failed ones before it has left, by one more request.
    request_count = 2 * len(proxy.asked)
    number, outcomes = 3, set()
    for at in every_nth("requests of a run from which on none arrives", request_count, 6):
        before, number = checked(url, *range(number + 1)), number + 1
        proxy.clear()
        proxy.fault = lambda asked, at=at: "drop" if asked.number >= at else None
        try:
            with warnings.catch_warnings():
                warnings.simplefilter(
                    "ignore", HoldfastWarning
                )  # it is published, and retention was hindered
                run.save(number, state(number))
            wanted = [number]
        except NotCommitted:
            wanted = [before]
        except SaveError:
            wanted = [before, number]
        proxy.fault = only(-1, None)
        outcomes.add(checked(url, *wanted) == number)
        if number % 4 == 0:
            number += 1
            run.save(number, state(number))
    assert outcomes == {True, False}
    run.save(number + 1, state(number + 1))
    assert numbers(run) == [number + 1]


PROGRAM = """
import sys, numpy as np, holdfast
run = holdfast.Run(sys.argv[1], keep="latest:1")
state = {"w": np.full((8, 64), int(sys.argv[2]), np.float32), "step": int(sys.argv[2]), "frozen": np.arange(512.0)}
run.save(int(sys.argv[2]), state)
"""


def test_a_run_that_is_killed_between_two_requests(proxy: Proxy, url: str):
    """The step before, or the new one; the next save works, and the sweep leaves nothing of the dead."""
    run = holdfast.Run(url, keep="latest:1")
    for number in (1, 2):
        run.save(number, shared(number))
    proxy.clear()
    run.save(3, state(3))
    count, number = len(proxy.asked), 3
    methods = [(asked.method, asked.path) for asked in proxy.asked]
    kinds = [at for at, (method, _) in enumerate(methods) if method in ("PUT", "POST", "DELETE")]
    places = range(count) if is_exhaustive() else kinds
    for at in sample("requests between which a run is killed", places, 2):
        for fault in ("drop", "cut"):
            before = run.latest().step
            number += 1
            status = run_and_kill(proxy, PROGRAM, url, str(number), request=at, fault=fault)
            assert status in (-9, 0)
            checked(url, before, number)
            number += 1
            with warnings.catch_warnings():
                warnings.simplefilter(
                    "ignore", HoldfastWarning
                )  # what the dead claimed is left to the sweep
                run.save(number, shared(number))
            assert numbers(run) == [number]
            with later(1):
                sweep(url, grace=1)
            assert len(bucket_keys(url)) in (4, 5), (
                "a manifest, its data and what it shares, the rules and the pins"
            )
            assert loads(run.latest())


def bucket_keys(url: str) -> list[str]:
    where = parse_url(url)
    return [one.key for one in get_bucket(where).list_objects(where.key + "/", 1000)]


def test_both_servers_say_what_a_step_is(either: int, url: str, monkeypatch: pytest.MonkeyPatch):
    """By a HEAD: no manifest is read; and pins and rules are changed on conditions."""
    for name, value in environment(either).items():
        monkeypatch.setenv(name, value)
    url += str(either)
    run = holdfast.Run(url, keep="latest:2")
    for number in (1, 2, 3):
        run.save(number, state(number), metrics={"loss ü": number / 3})
    assert run.pin(2, "paper").step == 2
    monkeypatch.setattr(
        "holdfast.extras.runs.bucket.RunBucket._read", lambda self, name: pytest.fail("it was read")
    )
    fresh = holdfast.Run(url, keep="latest:1")
    assert fresh.latest().metrics == {"loss ü": 1.0}
    assert numbers(fresh) == [2, 3]
    fresh.save(4, state(4))
    assert numbers(fresh) == [2, 4]


def test_a_listing_of_several_pages(proxy: Proxy, url: str):
    """Stores answer with a thousand names at a time."""
    count = count_rounds("steps in a listing of several pages", 1020, total=2300)
    holdfast.Run(url).save(0, state(0))
    where = parse_url(url)
    bucket = get_bucket(where)
    data = next(key for key in bucket_keys(url) if "data-" in key)
    raw = {
        key: bytes(bucket.get_object(key, 1 << 20).data)
        for key in (data, f"{where.key}/step-00000000/holdfast.json")
    }

    async def copy() -> None:
        puts = [
            obstore.put_async(
                bucket.client, key.replace("step-00000000", f"other-{number:08d}"), text
            )
            for number in range(count)
            for key, text in raw.items()
            if number == 0 or key != data
        ]
        for first in range(0, len(puts), 32):
            await asyncio.gather(*puts[first : first + 32])

    asyncio.run(copy())
    run = holdfast.Run(url)
    run.save(1, state(1))
    proxy.clear()
    assert run.latest().step == 1
    assert numbers(run) == [0, 1]
    assert sum("list-type" in asked.path for asked in proxy.asked) >= 5, (
        "two pages of names, one of a step, two of everything"
    )


def test_two_runs_at_once(proxy: Proxy, url: str):
    """Of two saves of one step one is published, the other is told; both runs delete, and there is always a whole step."""
    told: list[tuple[int, str, int]] = []

    def train(which: int) -> None:
        run = holdfast.Run(url, keep="latest:2")
        for number in range(1, 9):
            try:
                run.save(number, state(number))
                told.append((number, "won", which))
            except NotCommitted:
                told.append((number, "lost", which))
            assert run.latest() is not None

    run_in_threads(train, range(2))
    assert len(told) == 16
    checked(url, 8)
    assert holdfast.Run(url).latest().step == 8
    assert len([1 for number, how, _ in told if (number, how) == (8, "won")]) == 1
    assert not litter_of(url)
