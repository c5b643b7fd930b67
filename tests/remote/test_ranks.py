"""Ranks and object stores: every rank uploads its own, one put publishes all of it, or nobody finds anything."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")
import torch

import holdfast
import holdfast.torch
from holdfast.errors import (
    CannotHold,
    DurabilityUncertain,
    HoldfastError,
    NotCommitted,
    StoreError,
)
from holdfast.stores.remote.client import get_bucket
from holdfast.stores.remote.url import parse_url
from tests.ranks.pool import Pool, failures, good
from tests.remote import rank_jobs
from tests.remote.killing import killed
from tests.remote.servers import Asked, Fault, Proxy
from tests.support import ALONE


def keys(url: str) -> list[str]:
    where = parse_url(url)
    return [
        one.key.rpartition("/")[2] for one in get_bucket(where).list_objects(where.key + "/", 1000)
    ]


def content(url: str) -> int | None:
    """Which of the numbered states is there, all of it; None for none."""
    try:
        with holdfast.open(url) as checkpoint:
            found = {name: tensor.numpy() for name, tensor in checkpoint.items()}
    except StoreError as error:
        if error.errno != errno.ENOENT:
            raise
        return None
    numbers = {float(n) for array in found.values() for n in np.unique(array)}
    assert len(numbers) == 1, numbers
    assert sorted(found) == ["plain", "rows"]
    return int(numbers.pop())


@pytest.mark.parametrize("format", ["native", "dcp"])
def test_four_ranks_save_and_three_load(format: str, pool: Pool, where: dict[str, str], url: str):
    files = good(pool.run(4, rank_jobs.save, where, url, format, True))
    names = keys(url)
    index = "holdfast.json" if format == "native" else ".metadata"
    assert sorted(names) == sorted([index, *(name for rank in files for name in rank)])
    assert all(rank for rank in files), "every rank uploads its own"
    ids = {name.split("-")[1].removesuffix(".distcp") for name in names if name != index}
    assert len(ids) == 1, "which carry the id of one save"
    good(pool.run(3, rank_jobs.load, where, url, True))
    assert holdfast.verify(url).ok


def test_one_process_takes_all_of_it(pool: Pool, where: dict[str, str], url: str):
    good(pool.run(4, rank_jobs.save, where, url, "native", True))
    whole = holdfast.torch.load_full(url)
    assert whole["epoch"] == 4
    module = torch.nn.Linear(4, 4)
    holdfast.torch.save_sharded(url + "-module", {"model": module})
    other = torch.nn.Linear(4, 4)
    holdfast.torch.load_into(url + "-module", other, prefix="model.")
    assert torch.equal(other.weight, module.weight)


def test_what_all_ranks_want_comes_once(pool: Pool, proxy: Proxy, where: dict[str, str], url: str):
    """Rows come to the rank that has them, the rest to one rank, which hands it on; counted where the bytes pass."""
    elements = 3 << 20
    plain = torch.arange(elements, dtype=torch.float32)
    holdfast.save({"plain": plain, "rows": plain[None] + torch.arange(3)[:, None]}, url)
    sent = {}
    for how in ("auto", "read"):
        proxy.clear()
        read = good(pool.run(3, rank_jobs.replicated, where, url, elements, how))
        sent[how] = proxy.sent_nbytes
        once, rows = plain.nbytes, 3 * plain.nbytes
        wanted = rows + (once if how == "auto" else 3 * once)
        assert sum(read) == wanted
        assert wanted <= sent[how] < wanted * 1.02, (how, wanted, sent)


def test_a_save_in_the_background(pool: Pool, where: dict[str, str], url: str):
    assert good(pool.run(4, rank_jobs.background, where, url)) == [[1.0]] * 4


def test_a_second_save_replaces_all_of_the_first_or_is_refused(
    pool: Pool, where: dict[str, str], url: str
):
    good(pool.run(3, rank_jobs.numbered, where, url, 1, {}))
    first = set(keys(url))
    for failure in failures(pool.run(2, rank_jobs.numbered, where, url, 2, {})):
        assert failure.kinds[0] == "RanksFailed"
        assert "overwrite=True" in failure.text
    assert set(keys(url)) == first
    good(pool.run(2, rank_jobs.numbered, where, url, 2, {"overwrite": True}, True))
    assert content(url) == 2
    assert set(keys(url)) & first == {"holdfast.json"}, "the old objects are gone"


def test_formats_beside_each_other(pool: Pool, where: dict[str, str], url: str):
    """DCP takes no place from a manifest, which would still be opened; a manifest takes the place of both."""
    good(pool.run(2, rank_jobs.numbered, where, url, 1, {"format": "dcp"}))
    good(pool.run(2, rank_jobs.numbered, where, url, 2, {"format": "dcp", "overwrite": True}))
    assert content(url) == 2
    assert len(keys(url)) == 3
    assert "exists" in failures(pool.run(2, rank_jobs.numbered, where, url, 3, {}))[0].text
    good(pool.run(2, rank_jobs.numbered, where, url, 3, {"overwrite": True}))
    assert content(url) == 3
    assert len(keys(url)) == 3, "neither .metadata nor its objects are left"
    refused = failures(
        pool.run(2, rank_jobs.numbered, where, url, 4, {"format": "dcp", "overwrite": True})
    )
    assert "would still be the one that is opened" in refused[0].text
    assert content(url) == 3
    refused = failures(pool.run(2, rank_jobs.pieces, where, url, 4, {"overwrite": True}))
    assert "would still be the one that is opened" in refused[0].text


def test_safetensors_files_of_ranks_are_published_by_an_index(
    pool: Pool, where: dict[str, str], url: str
):
    """Pieces of one tensor in the files of all ranks: the index names every file, and comes last."""
    files = good(pool.run(4, rank_jobs.pieces, where, url, 1, {}))
    assert sorted(keys(url)) == sorted(
        ["model.safetensors.index.json", *(name for rank in files for name in rank)]
    )
    assert content(url) == 1
    assert holdfast.verify(url).ok
    assert holdfast.open(url)["rows"].shape == (4, 3000)
    assert "exists" in failures(pool.run(2, rank_jobs.pieces, where, url, 2, {}))[0].text
    good(pool.run(2, rank_jobs.pieces, where, url, 2, {"overwrite": True}))
    assert content(url) == 2
    assert len(keys(url)) == 3, "of the four files before nothing is left"
    assert holdfast.convert(url, url + "-whole.safetensors").done
    good(pool.run(2, rank_jobs.numbered, where, url, 3, {"format": "dcp", "overwrite": True}))
    assert content(url) == 3
    assert len(keys(url)) == 3
    good(pool.run(3, rank_jobs.pieces, where, url, 4, {"overwrite": True}))
    assert content(url) == 4
    assert len(keys(url)) == 4
    wanted = {"rows": torch.zeros(3, 3000), "plain": torch.zeros(500)}
    holdfast.torch.load_sharded(url, wanted)
    assert wanted["rows"].unique().tolist() == [4]


@pytest.mark.parametrize("file", ["../x.safetensors", "gone.safetensors", 3])
def test_an_index_that_names_other_files_is_refused(file: object):
    url = "memory://pieces/step-1"
    holdfast.torch.save_sharded(url, {"w": torch.ones(3)}, format="safetensors", overwrite=True)
    where = parse_url(url)
    key = where.key + "/model.safetensors.index.json"
    document = json.loads(bytes(get_bucket(where).get_object(key, 1 << 20).data))
    document["metadata"]["holdfast.files"].append(file)
    get_bucket(where).put(key, json.dumps(document).encode())
    with pytest.raises(HoldfastError):
        holdfast.open(url)
    holdfast.torch.save_sharded(url, {"w": torch.ones(3)}, format="safetensors", overwrite=True)
    assert holdfast.open(url)["w"].numpy().sum() == 3


def test_two_groups_save_one_step(pool: Pool, proxy: Proxy, where: dict[str, str], url: str):
    """One group wins, and every rank of the other knows; also where answers to the commit are lost."""
    for round, fault in enumerate((None, "cut")):

        def lose(asked: Asked, fault: Fault = fault) -> Fault:
            return fault if asked.method == "PUT" and asked.path.endswith("holdfast.json") else None

        place = f"{url}-{round}"
        seen = 0

        def twice(asked: Asked) -> Fault:
            nonlocal seen
            found = lose(asked)
            seen += found is not None
            return found if seen <= 2 else None

        proxy.fault = twice
        said = good(pool.run(4, rank_jobs.as_group, where, place, ((0, 1), (2, 3))))
        proxy.fault = lambda asked: None
        winners = {int(one[0]) for one in said if one.endswith("won")}
        assert len(winners) == 1, said
        (winner,) = winners
        assert [one.endswith("won") for one in said] == [
            rank // 2 == winner for rank in range(4)
        ], said
        assert all(
            "published first" in one or "exists there" in one
            for one in said
            if not one.endswith("won")
        ), said
        assert content(place) == winner
        assert len(keys(place)) == 3, "the losers took theirs away"


def test_the_answer_to_the_commit_is_lost(
    pool: Pool, proxy: Proxy, where: dict[str, str], url: str
):
    good(pool.run(2, rank_jobs.numbered, where, url, 1, {}))
    lost: list[int] = []

    def fault(asked: Asked) -> Fault:
        if asked.method == "PUT" and asked.path.endswith("holdfast.json") and not lost:
            lost.append(asked.number)
            return "cut"
        return None

    proxy.fault = fault
    good(pool.run(3, rank_jobs.numbered, where, url, 2, {"overwrite": True}))
    proxy.fault = lambda asked: None
    assert lost
    assert content(url) == 2
    assert len(keys(url)) == 4


def test_a_slow_rank_is_waited_for(pool: Pool, proxy: Proxy, where: dict[str, str], url: str):
    """Its upload takes three times the deadline; it shows a pulse all the same."""
    proxy.fault = lambda asked: (
        3.0 if asked.method == "PUT" and "00002-of-00003" in asked.path else None
    )
    good(pool.run(3, rank_jobs.numbered, where, url, 1, {"deadline": 1.0}))
    proxy.fault = lambda asked: None
    assert content(url) == 1


def test_a_rank_whose_upload_fails(pool: Pool, proxy: Proxy, where: dict[str, str], url: str):
    """Everybody hears of it, what was there is there, and nothing is left of the rest."""
    good(pool.run(3, rank_jobs.numbered, where, url, 1, {}))
    before = keys(url)
    proxy.fault = lambda asked: (
        "403" if asked.method == "PUT" and "00002-of-00003" in asked.path else None
    )
    for failure in failures(pool.run(3, rank_jobs.numbered, where, url, 2, {"overwrite": True})):
        assert failure.kinds[0] == "RanksFailed"
        assert "rank 1" in failure.text
        assert "403" in failure.text or "access denied" in failure.text
    proxy.fault = lambda asked: None
    assert content(url) == 1
    assert keys(url) == before


@pytest.mark.parametrize(("victim", "when"), [(1, "begins"), (2, "between"), (0, "publishes")])
def test_a_rank_is_killed(victim: int, when: str, proxy: Proxy, url: str, tmp_path: Path):
    """With SIGKILL, when its first request arrives, between its uploads, or when the first rank has put the manifest and knows
    nothing of it: the old step or the new one. While the first rank lives it takes everything away, also what the dead left."""
    holdfast.torch.save_sharded(url, rank_jobs.state(0, 0, 1))
    before = keys(url)
    second = f"{victim + 1:05}-of-00003-00002.safetensors"
    sought = {
        "begins": f"{victim + 1:05}-of-00003",
        "between": second,
        "publishes": "holdfast.json",
    }[when]
    moment = "asked" if when == "begins" else "done"
    said = killed(proxy, tmp_path, url, ranks=3, victim=victim, sought=sought, when=moment)
    if when == "publishes":
        assert set(said.values()) == {"RankLost"}
        assert content(url) == 1, "it was published, and nobody took away what it names"
    else:
        assert said == {0: "RankLost", 3 - victim: "RanksFailed"}
        assert content(url) == 0
        assert keys(url) == before, "nothing is left of it"
    holdfast.torch.save_sharded(url, rank_jobs.state(5, 0, 1), overwrite=True)
    assert content(url) == 5


@pytest.mark.parametrize(
    "ways",
    [
        ("writer", "reader"),
        ("writer", "stock"),
        ("ours", "reader"),
        ("ours", "stock"),
        ("writer", "ours"),
    ],
)
def test_torchs_own_checkpoints(
    ways: tuple[str, str], pool: Pool, where: dict[str, str], url: str, tmp_path: Path
):
    good(pool.run(3, rank_jobs.stock, where, url, ways, str(tmp_path / "copy")))


def test_torchs_own_save_over_another(pool: Pool, where: dict[str, str], url: str):
    assert good(pool.run(2, rank_jobs.rewritten, where, url, False)) == ["saved"] * 2
    first = set(keys(url))
    refused = good(pool.run(2, rank_jobs.rewritten, where, url, False))
    assert all("already exists" in one or "exists there" in one for one in refused), refused
    assert set(keys(url)) == first
    assert good(pool.run(2, rank_jobs.rewritten, where, url, True)) == ["saved"] * 2
    assert len(keys(url)) == len(first)
    assert set(keys(url)) & first == {".metadata"}


def test_a_client_of_the_callers_own(url: str):
    from obstore.store import MemoryStore

    store = MemoryStore()
    state = {"w": torch.arange(12.0), "step": 3}
    holdfast.torch.save_sharded("run/step-1", state, store=store)
    found = {"w": torch.zeros(12), "step": 0}
    holdfast.torch.load_sharded("run/step-1", found, store=store)
    assert torch.equal(found["w"], state["w"])
    assert found["step"] == 3
    assert torch.equal(holdfast.torch.load_full("run/step-1", store=store)["w"], state["w"])
    holdfast.torch.async_save_sharded(state, "run/step-2", store=store).wait()
    with pytest.raises(NotCommitted, match="overwrite=True"):
        holdfast.torch.save_sharded("run/step-2", state, store=store)


def test_torchs_own_functions_with_a_client_of_the_callers_own():
    """A path or a `checkpoint_id` is a key in it."""
    import obstore
    import torch.distributed.checkpoint as dcp
    from obstore.store import MemoryStore

    from holdfast.integrations.dcp import Reader, Writer

    store = MemoryStore()
    state = {"w": torch.arange(12.0), "step": 3}
    dcp.save(state, storage_writer=Writer("run/step-1", store=store), **ALONE)
    dcp.save(state, checkpoint_id="run/step-2", storage_writer=Writer(store=store), **ALONE)
    for reader, more in (
        (Reader("run/step-2", store=store), {}),
        (Reader(store=store), {"checkpoint_id": "run/step-1"}),
    ):
        found = {"w": torch.zeros(12), "step": 0}
        dcp.load(found, storage_reader=reader, **ALONE, **more)
        assert torch.equal(found["w"], state["w"])
        assert found["step"] == 3
    assert (
        sorted(one["path"] for one in obstore.list_with_delimiter(store, "run/step-1")["objects"])[
            0
        ]
        == "run/step-1/.metadata"
    )


def test_a_save_that_may_be_there_is_left_alone(monkeypatch: pytest.MonkeyPatch):
    """Nobody can say whether the index was put: its objects stay."""
    from holdfast.stores.remote.client import Bucket

    url = "memory://uncertain/step-1"
    put = Bucket.put

    def lost(self: Bucket, key: str, *args: object, **kwargs: object) -> None:
        put(self, key, *args, **kwargs)  # type: ignore[arg-type]
        if key.endswith("holdfast.json"):
            raise StoreError("no answer", file=key)

    def unreadable(self: Bucket, key: str, most: int) -> None:
        raise StoreError("no answer", file=key)

    with monkeypatch.context() as patch:
        patch.setattr(Bucket, "put", lost)
        patch.setattr(Bucket, "get_object", unreadable)
        with pytest.raises(DurabilityUncertain):
            holdfast.torch.save_sharded(url, {"w": torch.ones(3)})
    assert holdfast.open(url)["w"].numpy().tolist() == [1, 1, 1]


def test_an_interrupt_while_it_is_published_removes_nothing(monkeypatch: pytest.MonkeyPatch):
    from holdfast.stores.remote.client import Bucket

    put = Bucket.put

    def interrupted(self: Bucket, key: str, *args: object, **kwargs: object) -> None:
        put(self, key, *args, **kwargs)  # type: ignore[arg-type]
        if key.endswith("holdfast.json"):
            raise KeyboardInterrupt

    for name, save in (
        ("ranks", holdfast.torch.save_sharded),
        ("one", lambda url, state: holdfast.save(state, url)),
    ):
        url = f"memory://interrupted/{name}"
        with monkeypatch.context() as patch:
            patch.setattr(Bucket, "put", interrupted)
            with pytest.raises(KeyboardInterrupt):
                save(url, {"w": torch.ones(3)})
        assert holdfast.open(url)["w"].numpy().tolist() == [1, 1, 1]


def test_a_fork_is_told_that_it_cannot(tmp_path: Path):
    """The client's threads stay in the parent: without a word, the fork would wait for ever."""
    url = "memory://forked/step-1"
    holdfast.save({"w": np.ones(3)}, url)
    opened = holdfast.open(url)
    pid = os.fork()
    if not pid:
        said = []
        for call in (
            lambda: holdfast.open(url),
            opened["w"].numpy,
            lambda: holdfast.save({"w": np.ones(3)}, url + "-2"),
        ):
            try:
                call()
            except HoldfastError as error:
                said.append(error.message)
        with contextlib.suppress(OSError):
            (tmp_path / "said").write_text(json.dumps(said))
        os._exit(0)
    for _ in range(300):
        if os.waitpid(pid, os.WNOHANG)[0]:
            break
        time.sleep(0.1)
    else:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        pytest.fail("the fork waits")
    said = json.loads((tmp_path / "said").read_text())
    assert len(said) == 3
    assert all("spawn" in one for one in said)
    assert opened["w"].numpy().tolist() == [1, 1, 1], "and the parent goes on"


def test_what_is_refused_is_refused_before_anything_is_written(where: dict[str, str], url: str):
    with pytest.raises(CannotHold):
        holdfast.torch.save_sharded(url, {"f": lambda: 0})
    assert keys(url) == []


def test_torchs_own_save_that_fails(pool: Pool, proxy: Proxy, where: dict[str, str], url: str):
    """One rank cannot upload: what was there is there, and of the rest nothing is left."""
    assert good(pool.run(3, rank_jobs.rewritten, where, url, False)) == ["saved"] * 3
    before = keys(url)
    proxy.fault = lambda asked: "403" if asked.method == "PUT" and "__1_0" in asked.path else None
    said = good(pool.run(3, rank_jobs.rewritten, where, url, True))
    proxy.fault = lambda asked: None
    assert all("403" in one or "access denied" in one for one in said), said
    assert keys(url) == before


def test_options_mean_what_they_mean_on_a_disk():
    """Told of while it is uploaded, and with hashes, so that the next one shares it."""
    url, told = "memory://options/step-1", []
    state = {"w": torch.zeros(100_000)}
    saved = holdfast.torch.save_sharded(url, state, progress=told.append, hashes=True)
    assert 0 < sum(told) <= saved.nbytes
    assert not saved.notes
    again = holdfast.torch.save_sharded("memory://options/step-2", state, base=url)
    assert (again.shared_nbytes, again.new_nbytes) == (saved.nbytes, 0)
    found = {"w": torch.ones(100_000)}
    holdfast.torch.load_sharded(url, found)
    assert torch.equal(found["w"], state["w"])


def test_four_replicas_get_the_bytes_of_one_process(
    pool: Pool, proxy: Proxy, where: dict[str, str], url: str
):
    """As the store counts them, indexes and all: four ranks that want everything, by default, and each for itself."""
    shapes = {"embed": (3000, 700), **{f"w{i}": (700, 300 + i) for i in range(16)}}
    holdfast.torch.save_sharded({name: torch.ones(shape) for name, shape in shapes.items()}, url)
    sent = {}
    for size, how in ((1, "read"), (4, "read"), (4, "auto")):
        proxy.clear()
        good(pool.run(size, rank_jobs.load_alike, where, url, shapes, how))
        sent[size, how] = proxy.sent_nbytes
    assert sent[4, "auto"] <= 1.05 * sent[1, "read"]
    assert sent[4, "read"] > 3.9 * sent[1, "read"]
