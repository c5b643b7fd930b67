"""A save to an object store leaves the old checkpoint or the new one, whatever fails. One of many savers wins."""

from __future__ import annotations

import errno
import threading
from functools import partial

import numpy as np
import obstore
import pytest
from obstore.store import MemoryStore

import holdfast
from holdfast.core.value import replace
from holdfast.engine.targets.bucket_commit import ObjectSave
from holdfast.errors import DurabilityUncertain, HoldfastError, NotCommitted, SaveError, StoreError
from holdfast.stores.remote.client import Bucket, ObjectContent, Upload, get_bucket
from holdfast.stores.remote.url import parse_url
from tests.remote.killing import run_and_kill
from tests.remote.servers import Proxy, environment, only
from tests.sampling import count_rounds, random_for, sample
from tests.support import run_in_threads


def make_state(version: int) -> dict[str, np.ndarray]:
    return {"w": np.full((64, 1024), version, np.float32), "b": np.full(7, version, np.int32)}


def read_version(url: str) -> int | None:
    """Return the version of the state at a URL, None if there is nothing. Fails if it is a mixture."""
    try:
        with holdfast.open(url) as checkpoint:
            arrays = {name: tensor.numpy() for name, tensor in checkpoint.items()}
    except StoreError as error:
        if error.errno != errno.ENOENT:
            raise
        return None
    version = int(arrays["b"][0])
    for name, expected in make_state(version).items():
        np.testing.assert_array_equal(arrays[name], expected)
    return version


def list_keys(url: str) -> list[str]:
    parsed_url = parse_url(url)
    objects = get_bucket(parsed_url).list_objects(parsed_url.key + "/", 1000)
    return [remote_object.key for remote_object in objects]


def use_no_faults(proxy: Proxy) -> None:
    proxy.fault = lambda request: None


@pytest.mark.parametrize("suffix", ["", ".pt", ".safetensors"])
def test_replacing_a_checkpoint_survives_any_fault_of_any_request(
    suffix: str, proxy: Proxy, url: str
):
    url += suffix
    holdfast.save(make_state(0), url)
    proxy.clear()
    holdfast.save(make_state(1), url, overwrite=True)
    old_version = new_version = 1
    for index in range(len(proxy.asked)):
        for fault in ("drop", "cut", "503", "reset", "half"):
            # Each state differs from all earlier ones, of which some objects may be left.
            new_version += 1
            proxy.clear()
            proxy.fault = only(index, fault)
            try:
                holdfast.save(make_state(new_version), url, overwrite=True)
                possible_versions = [new_version]
            except NotCommitted:
                possible_versions = [old_version]
            except DurabilityUncertain:
                possible_versions = [old_version, new_version]
            use_no_faults(proxy)
            saved_version = read_version(url)
            assert saved_version in possible_versions, (index, fault)
            old_version = saved_version


@pytest.mark.parametrize("suffix", ["", ".pt", ".safetensors"])
def test_a_new_checkpoint_survives_any_fault_of_any_request(suffix: str, proxy: Proxy, url: str):
    # The first save to a bucket has more requests: it tests whether the store honors conditions.
    holdfast.save(make_state(0), f"{url}-first{suffix}")
    proxy.clear()
    holdfast.save(make_state(0), f"{url}-second{suffix}", overwrite=False)
    for index in range(len(proxy.asked)):
        for fault in ("drop", "cut", "503", "reset", "half"):
            target = f"{url}-{index}-{fault}{suffix}"
            proxy.clear()
            proxy.fault = only(index, fault)
            try:
                holdfast.save(make_state(1), target, overwrite=False)
                possible_versions = [1]
            except NotCommitted:
                possible_versions = [None]
            except DurabilityUncertain:
                possible_versions = [None, 1]
            use_no_faults(proxy)
            assert read_version(target) in possible_versions, (index, fault)


def test_a_save_that_gets_no_more_answers_fails_and_leaves_the_old_checkpoint(
    proxy: Proxy, url: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("holdfast.stores.remote.client.MAX_RETRIES", 1)
    holdfast.save(make_state(0), url)
    proxy.clear()
    holdfast.save(make_state(1), url, overwrite=True)
    # Without the answer to the last request, which cleans up, the save is complete.
    for first_index in range(len(proxy.asked) - 1):
        proxy.clear()
        proxy.fault = lambda request, first=first_index: "drop" if request.number >= first else None
        with pytest.raises(SaveError):
            holdfast.save(make_state(2), url, overwrite=True)
        use_no_faults(proxy)
        assert read_version(url) == 1, first_index


@pytest.fixture
def short_puts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Upload every object in parts, as if it were large."""
    monkeypatch.setattr(ObjectSave, "MAX_PUT_NBYTES", 1 << 10)


@pytest.fixture(params=["parts", "one put"])
def upload_method(request: pytest.FixtureRequest) -> str:
    """Upload every object in parts, or every object with one put."""
    if request.param == "parts":
        request.getfixturevalue("short_puts")
    return request.param


def race_savers(
    proxy: Proxy, url: str, *, savers: int, rounds: int, lost_share: float, suffix: str = ""
) -> list[str]:
    """Let many threads save to one URL at the same time, and lose some of the answers.

    Exactly one saver wins in each round, and each one knows whether it has won.

    Returns:
        The URL of each round.
    """
    targets: list[str] = []
    for round_index in range(rounds):
        random = random_for(f"answers lost in round {round_index}")
        proxy.fault = lambda request, random=random: "cut" if random.random() < lost_share else None
        target = f"{url}-{round_index}{suffix}"
        outcomes = race_once(target, savers)
        use_no_faults(proxy)
        assert sorted(outcomes) == ["lost"] * (savers - 1) + ["won"], (round_index, outcomes)
        assert read_version(target) == outcomes.index("won")
        targets.append(target)
    return targets


def race_once(target: str, savers: int) -> list[str]:
    """Let many threads save to one URL at the same time. Saver i saves version i."""
    outcomes = [""] * savers
    start = threading.Barrier(savers)

    def save(saver: int) -> None:
        start.wait()
        try:
            holdfast.save(make_state(saver), target, overwrite=False)
            outcomes[saver] = "won"
        except NotCommitted:
            outcomes[saver] = "lost"

    run_in_threads(save, range(savers))
    return outcomes


def test_one_of_many_savers_wins(proxy: Proxy, url: str):
    rounds = count_rounds("sixteen savers of one step", 2, total=100)
    for target in race_savers(proxy, url, savers=16, rounds=rounds, lost_share=0.15):
        assert len(list_keys(target)) == 2, "the losers deleted their objects"


@pytest.mark.usefixtures("short_puts")
def test_one_of_many_savers_of_a_large_object_wins(proxy: Proxy, url: str):
    """The end of an upload in parts has no condition."""
    rounds = count_rounds("eight savers of one object", 3, total=50)
    race_savers(proxy, url, savers=8, rounds=rounds, lost_share=0.1, suffix=".safetensors")
    folder = url.rpartition("/")[0]
    assert len(list_keys(folder)) == rounds, "nothing is left beside them"


@pytest.mark.usefixtures("short_puts")
def test_a_save_of_a_large_object_survives_a_fault_of_any_request(proxy: Proxy, url: str):
    holdfast.save(make_state(0), f"{url}-first.safetensors", overwrite=False)
    proxy.clear()
    holdfast.save(make_state(0), f"{url}-second.safetensors", overwrite=False)
    for index in range(len(proxy.asked)):
        for fault in ("drop", "cut", "503"):
            target = f"{url}-{index}-{fault}.safetensors"
            proxy.clear()
            proxy.fault = only(index, fault)
            holdfast.save(make_state(1), target, overwrite=False)
            use_no_faults(proxy)
            assert read_version(target) == 1, (index, fault)


@pytest.mark.usefixtures("upload_method")
@pytest.mark.parametrize("verb", ["save", "copy"])
def test_an_object_that_appears_during_a_save_is_not_replaced(
    verb: str, either: int, url: str, monkeypatch: pytest.MonkeyPatch
):
    for name, value in environment(either).items():
        monkeypatch.setenv(name, value)
    target = parse_url(url + ".safetensors")
    bucket = get_bucket(target)
    source = url + "-source.safetensors"
    holdfast.save(make_state(2), source)
    check_existing = ObjectSave.check_existing

    def check_and_let_another_program_save(self: ObjectSave) -> None:
        check_existing(self)
        folder = target.key.rpartition("/")[0]
        if bucket.list_objects(folder + "/", 10)[0].key != target.key:
            bucket.put(target.key, b"of another program")

    monkeypatch.setattr(ObjectSave, "check_existing", check_and_let_another_program_save)
    save = partial(holdfast.save, make_state(1), target, overwrite=False)
    copy = partial(holdfast.copy, source, target)
    write = save if verb == "save" else copy
    with pytest.raises(NotCommitted, match="the object exists"):
        write()
    assert bytes(bucket.get_object(target.key, 100).data) == b"of another program"
    assert len(list_keys(url.rpartition("/")[0])) == 2, "no claim is left"


@pytest.mark.usefixtures("short_puts")
def test_a_claim_of_a_dead_saver_needs_overwrite(proxy: Proxy, url: str):
    holdfast.save(make_state(0), url + ".safetensors")
    target = parse_url(url + "-new.safetensors")
    claim = target.sibling(".step-1-new.safetensors.0000000000000000.tmp")
    get_bucket(target).put(claim.key, b"of another program")
    with pytest.raises(NotCommitted, match=r"cut off while it was; pass overwrite=True"):
        holdfast.save(make_state(1), target, overwrite=False)
    assert read_version(target) is None
    holdfast.save(make_state(2), target, overwrite=True)
    assert read_version(target) == 2


@pytest.mark.usefixtures("upload_method")
@pytest.mark.parametrize("overwrite", [False, True])
def test_an_object_that_is_read_back_damaged_raises(
    overwrite: bool, monkeypatch: pytest.MonkeyPatch
):
    store = MemoryStore()
    if overwrite:
        holdfast.save(make_state(0), "x.safetensors", store=store)
    get_once = Bucket._get_once

    async def get_damaged(self: Bucket, *args: object) -> ObjectContent:
        content = await get_once(self, *args)  # type: ignore[arg-type]
        # Documents stay as they are.
        if content.data.nbytes <= 1 << 10:
            return content
        return replace(content, data=memoryview(bytes(content.data[:-1]) + b"?"))

    monkeypatch.setattr(Bucket, "_get_once", get_damaged)
    # The object exists by then, so the error must not say that nothing was saved.
    with pytest.raises(DurabilityUncertain, match="read back the same"):
        holdfast.save(
            make_state(1), "x.safetensors", store=store, overwrite=overwrite, read_back=True
        )
    monkeypatch.undo()
    assert list_store(store) == ["x.safetensors"]


def list_store(store: MemoryStore, prefix: str = "") -> list[str]:
    return [entry["path"] for page in obstore.list(store, prefix or None) for entry in page]


PROGRAM = """
import sys, numpy as np, holdfast
holdfast.save({"w": np.full((64, 1024), 1, np.float32), "b": np.full(7, 1, np.int32)}, sys.argv[1], overwrite=True)
"""


def test_a_killed_save_leaves_the_old_or_the_new_checkpoint(proxy: Proxy, url: str):
    """The process is killed before or after a request. A later save works."""
    holdfast.save(make_state(0), url)
    proxy.clear()
    holdfast.save(make_state(1), url, overwrite=True)
    request_indices = range(len(proxy.asked))
    for index in sample("requests between which a saver is killed", request_indices, 2):
        for fault in ("drop", "cut"):
            holdfast.save(make_state(0), url, overwrite=True)
            assert run_and_kill(proxy, PROGRAM, url, request=index, fault=fault) == -9
            assert read_version(url) in (0, 1), (index, fault)
            holdfast.save(make_state(2), url, overwrite=True)
            assert read_version(url) == 2


def test_a_reader_does_not_see_a_mixture_during_an_overwrite(proxy: Proxy, url: str):
    holdfast.save(make_state(0), url)
    with holdfast.open(url) as checkpoint:
        array = checkpoint["b"].numpy()
        holdfast.save(make_state(1), url, overwrite=True)
        np.testing.assert_array_equal(array, make_state(0)["b"])
        with pytest.raises(HoldfastError, match="open it again"):
            _ = checkpoint["w"].numpy()
    assert read_version(url) == 1


def test_a_save_to_a_store_that_ignores_conditions_is_refused(
    proxy: Proxy, url: str, monkeypatch: pytest.MonkeyPatch
):
    bucket = get_bucket(parse_url(url))
    monkeypatch.setattr(Bucket, "put", lambda self, *args, **options: "etag")
    bucket.supports_conditions = None
    with pytest.raises(NotCommitted, match="ignores conditions"):
        holdfast.save(make_state(0), url)
    bucket.supports_conditions = None


def test_both_servers_honor_conditions(either: int, url: str, monkeypatch: pytest.MonkeyPatch):
    for name, value in environment(either).items():
        monkeypatch.setenv(name, value)
    holdfast.save(make_state(0), url)
    with pytest.raises(NotCommitted, match="overwrite=True"):
        holdfast.save(make_state(1), url)
    holdfast.save(make_state(2), url, overwrite=True, read_back=True)
    assert read_version(url) == 2
    assert len(list_keys(url)) == 2, "what was replaced is deleted"


def test_a_save_whose_source_changes_leaves_the_old_checkpoint():
    store = MemoryStore()
    holdfast.save(make_state(0), "a", store=store)
    holdfast.save(make_state(1), "b.safetensors", store=store)
    with holdfast.open("b.safetensors", store=store) as source:
        holdfast.save(make_state(2), "b.safetensors", store=store)
        with pytest.raises(HoldfastError):
            holdfast.save(source, "a", store=store, overwrite=True)
    with holdfast.open("a", store=store) as checkpoint:
        np.testing.assert_array_equal(checkpoint["b"].numpy(), make_state(0)["b"])
    assert len(list_store(store, "a")) == 2


@pytest.mark.parametrize("suffix", ["", ".safetensors"])
def test_a_refused_save_writes_nothing(suffix: str, proxy: Proxy, url: str):
    holdfast.save(make_state(0), url + suffix)
    get_bucket(parse_url(url)).supports_conditions = None
    proxy.clear()
    with pytest.raises(NotCommitted, match="overwrite=True"):
        holdfast.save(make_state(1), url + suffix, overwrite=False)
    assert not [request for request in proxy.asked if request.method not in ("GET", "HEAD")]


def test_a_failed_upload_over_an_empty_object_reports_that_it_was_not_changed(
    monkeypatch: pytest.MonkeyPatch,
):
    """A range of an empty object cannot be read, so only its metadata tells whose it is."""
    store = MemoryStore()
    obstore.put(store, "x.safetensors", b"")

    async def fail(self: Upload, *, publish: bool) -> None:
        raise OSError(errno.EIO, "the upload failed")

    monkeypatch.setattr(Upload, "finish", fail)
    with pytest.raises(NotCommitted, match="the existing object was not changed"):
        holdfast.save(make_state(1), "x.safetensors", store=store, overwrite=True)
    assert bytes(obstore.get(store, "x.safetensors").bytes()) == b""
