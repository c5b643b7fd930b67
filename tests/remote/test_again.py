"""What is asked again, and what is said of it: every request that changes nothing when it is done twice, by one rule.

And answers that are wrong in quieter ways, through every verb: another etag, a request that arrives twice, objects that are seen
late. The right content or a clear error; what was there, or what was saved.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import holdfast
from holdfast.errors import HoldfastError, NotCommitted, StoreError
from holdfast.stores.remote import client
from holdfast.stores.remote.client import Bucket, get_bucket
from holdfast.stores.remote.url import parse_url
from tests.remote.servers import BUCKET, Asked, Fault, Proxy
from tests.remote.test_commit import make_state, read_version
from tests.remote.test_faults import check_secrets
from tests.sampling import every_nth


def is_list(asked: Asked) -> bool:
    return "list-type" in asked.path


class Verb:
    """Something that is done with a bucket, and what must be found afterwards."""

    def __init__(self, url: str, folder: Path) -> None:
        self.url, self.folder = url, folder

    def before(self) -> None:
        """Make what it begins with."""

    def do(self, number: int) -> None: ...

    def check(self, numbers: tuple[int, int]) -> None:
        """What is there is of one of these numbers: the one before, and the one that was to be."""


class Open(Verb):
    """By a list: a folder of safetensors that has no index."""

    def before(self) -> None:
        holdfast.save(make_state(0), f"{self.url}/model.safetensors")

    def do(self, number: int) -> None:
        assert read_version(self.url) == 0


class Save(Verb):
    def before(self) -> None:
        holdfast.save(make_state(0), self.url)

    def do(self, number: int) -> None:
        holdfast.save(make_state(number), self.url, overwrite=True)

    def check(self, numbers: tuple[int, int]) -> None:
        assert read_version(self.url) in numbers


class SaveObject(Save):
    def __init__(self, url: str, folder: Path) -> None:
        super().__init__(f"{url}.safetensors", folder)


class Run(Verb):
    def before(self) -> None:
        with holdfast.Run(self.url, keep="latest:2") as run:
            run.save(0, make_state(0))

    def do(self, number: int) -> None:
        with holdfast.Run(self.url, keep="latest:2") as run:
            run.save(number, make_state(number))
            found = run.latest()
            assert found is not None
            assert found.step == number

    def check(self, numbers: tuple[int, int]) -> None:
        with holdfast.Run(self.url) as run:
            found = run.latest()
            assert found is not None
            assert found.step in numbers
            assert read_version(found.path) == found.step


class Copy(Verb):
    """From the bucket, inside of it, and back."""

    def before(self) -> None:
        holdfast.save(make_state(0), f"{self.url}/from/model.safetensors")

    def do(self, number: int) -> None:
        holdfast.copy(f"{self.url}/from", self.folder / str(number))
        holdfast.copy(f"{self.url}/from", f"{self.url}/to-{number}")
        holdfast.copy(self.folder / str(number), f"{self.url}/back-{number}")

    def check(self, numbers: tuple[int, int]) -> None:
        for place in (
            str(self.folder / str(numbers[1])),
            f"{self.url}/to-{numbers[1]}",
            f"{self.url}/back-{numbers[1]}",
        ):
            assert read_version(place) in (None, 0)


VERBS = [Open, Save, SaveObject, Run, Copy]
verbs = pytest.mark.parametrize("verb", VERBS, ids=lambda verb: verb.__name__)


@pytest.fixture
def made(verb: type[Verb], proxy: Proxy, url: str, tmp_path: Path) -> Verb:
    one = verb(url, tmp_path)
    one.before()
    return one


@pytest.mark.parametrize("verb", [Open, Save, Run, Copy], ids=lambda verb: verb.__name__)
@pytest.mark.parametrize("share", ["0", "0.1", "0.5", "0.99"])
@pytest.mark.parametrize("how", ["break", "short"])
def test_a_list_that_breaks_off_is_asked_for_again(how: str, share: str, made: Verb, proxy: Proxy):
    """Every list, wherever it breaks off, and also where the answer says that this was all."""
    seen: set[str] = set()

    def first(asked: Asked) -> Fault:
        if not is_list(asked) or asked.path in seen:
            return None
        seen.add(asked.path)
        return f"{how} {share}"

    proxy.fault = first
    made.do(1)
    assert seen
    proxy.fault = lambda asked: None
    made.check((1, 1))


def put_without_condition(bucket: Bucket, key: str) -> object:
    return bucket.put(f"{key}/put", b"1")


ASKS: dict[str, tuple[Callable[[Bucket, str], object], str]] = {
    "list_objects": (lambda bucket, key: bucket.list_objects(f"{key}/", 100), "half"),
    "list_folder": (lambda bucket, key: bucket.list_folder(f"{key}/"), "half"),
    "head": (lambda bucket, key: bucket.head(f"{key}/b"), "reset"),
    "head_with_attributes": (lambda bucket, key: bucket.head_with_attributes(f"{key}/b"), "503"),
    "get_object": (lambda bucket, key: bucket.get_object(f"{key}/b", 1 << 20), "half"),
    "get_range": (lambda bucket, key: bucket.get_range(f"{key}/b", 3, 70), "whole"),
    "put": (put_without_condition, "reset"),
    "delete": (lambda bucket, key: bucket.delete([f"{key}/put"]), "reset"),
    "delete, half": (lambda bucket, key: bucket.delete([f"{key}/put"]), "half"),
    "copy": (lambda bucket, key: bucket.copy(f"{key}/b", f"{key}/c"), "half"),
}
"""Requests that change nothing when they are done twice, each with a fault."""


@pytest.fixture
def bucket(proxy: Proxy, url: str, monkeypatch: pytest.MonkeyPatch) -> tuple[Bucket, str]:
    monkeypatch.setattr(client, "MAX_RETRIES", 2)
    where = parse_url(url)
    found = get_bucket(where)
    for name in "abdefgh":
        found.put(f"{where.key}/{name}", bytes(range(100)))
    proxy.clear()
    return found, where.key


@pytest.mark.parametrize("name", ASKS)
def test_each_is_asked_again_and_the_message_says_how_often(
    name: str, bucket: tuple[Bucket, str], proxy: Proxy
):
    ask, fault = ASKS[name]
    proxy.fault = lambda asked: fault if asked.number == 0 else None
    ask(*bucket)
    assert len(proxy.asked) >= 2, "asked again"
    proxy.clear()
    proxy.fault = lambda asked: fault
    with pytest.raises(HoldfastError) as caught:
        ask(*bucket)
    check_secrets(caught.value)
    told = re.search(r"; asked (\d+) times in \d+\.\d s", caught.value.message)
    assert told, caught.value.message
    assert int(told[1]) == len(proxy.asked) == 3
    if fault == "half":
        assert "the answer broke off" in caught.value.message


@pytest.mark.parametrize("name", ["get_range", "get_object", "copy"])
@pytest.mark.parametrize("fault", ["half", "break 0", "break 0.9"])
def test_an_error_answer_that_breaks_off_is_asked_for_again(
    fault: str, name: str, bucket: tuple[Bucket, str], proxy: Proxy
):
    """There is no such object, and the body that says so does not arrive."""
    ask, (found, key) = ASKS[name][0], bucket
    proxy.fault = lambda asked: fault if asked.number == 0 else None
    with pytest.raises(StoreError) as caught:
        ask(found, f"{key}/gone")
    assert (caught.value.errno, len(proxy.asked)) == (errno.ENOENT, 2)

    proxy.clear()
    proxy.fault = lambda asked: fault
    with pytest.raises(StoreError, match="the answer broke off; asked 3 times in") as caught:
        ask(found, f"{key}/gone")
    assert len(proxy.asked) == 3
    check_secrets(caught.value)


@pytest.mark.parametrize("later", ["reset", "503", "drop"])
def test_the_count_is_true_where_an_answer_breaks_off_and_then_none_comes(
    later: str, bucket: tuple[Bucket, str], proxy: Proxy
):
    proxy.fault = lambda asked: "half" if asked.number == 0 else later
    with pytest.raises(StoreError) as caught:
        bucket[0].get_range(f"{bucket[1]}/b", 3, 70)
    told = re.search(r"; asked (\d+) times in ", caught.value.message)
    assert told, caught.value.message
    assert int(told[1]) == len(proxy.asked)


@pytest.mark.parametrize("max_retries", [0, 1, 4, None])
def test_the_count_is_true_of_a_client_with_another_number_of_retries(
    max_retries: int | None, proxy: Proxy, url: str, monkeypatch: pytest.MonkeyPatch
):
    from obstore.store import S3Store

    monkeypatch.setattr(client, "MAX_RETRIES", 2)
    retry_config = None if max_retries is None else {"max_retries": max_retries}
    store = S3Store(BUCKET, client_options={"allow_http": True}, retry_config=retry_config)
    own_bucket, key = Bucket(f"s3://{BUCKET}", store), parse_url(url).key
    own_bucket.put(key, bytes(range(100)))

    proxy.clear()
    proxy.fault = lambda asked: "half"
    with pytest.raises(StoreError) as caught:
        own_bucket.get_range(key, 3, 70)
    told = re.search(r"; asked (\d+) times in ", caught.value.message)
    assert told, caught.value.message
    assert int(told[1]) == len(proxy.asked)


def test_what_has_a_condition_is_asked_once(bucket: tuple[Bucket, str], proxy: Proxy):
    """It may have been done: whoever asked looks."""
    proxy.fault = lambda asked: "reset"
    with pytest.raises(StoreError) as caught:
        bucket[0].put(f"{bucket[1]}/new", b"1", create=True)
    assert len(proxy.asked) == 1
    assert caught.value.message.endswith(
        ": the server cannot be reached, or closed the connection; asked once"
    )
    check_secrets(caught.value)


def test_what_is_refused_is_not_asked_again(bucket: tuple[Bucket, str], proxy: Proxy):
    proxy.fault = lambda asked: "403"
    for ask, _ in ASKS.values():
        proxy.clear()
        with pytest.raises(HoldfastError) as caught:
            ask(*bucket)
        assert len(proxy.asked) == 1
        assert "asked" not in caught.value.message


@pytest.mark.parametrize("chunk", [2, 1000])
@pytest.mark.parametrize("page", range(4))
def test_a_list_goes_on_behind_what_came(
    page: int, chunk: int, bucket: tuple[Bucket, str], proxy: Proxy, monkeypatch
):
    """Each page breaks off once; every key is found, and once."""
    monkeypatch.setattr(client, "LIST_PAGE_OBJECTS", chunk)
    proxy.page = 2
    proxy.fault = lambda asked: "half" if asked.number == page else None
    found = [one.key.rpartition("/")[2] for one in bucket[0].list_objects(f"{bucket[1]}/", 100)]
    assert found == list("abdefgh")
    assert len(proxy.asked) == 4 + (1 if chunk == 2 else page + 1)


@verbs
@pytest.mark.parametrize("fault", ["etag", "twice"])
def test_each_request_meets_quieter_faults(fault: str, made: Verb, proxy: Proxy):
    """Another etag: what is read is right, or it is an error; never a mixture. Twice: it is as if it had arrived once.

    Of a verb of many requests some eight meet it, and all of them with --exhaustive.
    """
    proxy.clear()
    made.do(1)
    before, number, failed = 1, 1, []
    name = f"requests of {type(made).__name__} that meet {fault}"
    for at in every_nth(name, len(proxy.asked), max(1, len(proxy.asked) // 8)):
        number += 1
        proxy.clear()
        proxy.fault = lambda asked, at=at: fault if asked.number == at else None
        try:
            made.do(number)
        except HoldfastError as error:
            check_secrets(error)
            failed.append((at, proxy.asked[at], error))
            proxy.fault = lambda asked: None
            made.check((before, number))
            number += 1
            made.do(number)
        proxy.fault = lambda asked: None
        made.check((number, number))
        before = number
    assert fault == "etag" or not failed


@pytest.mark.parametrize("suffix", ["", ".safetensors", ".pt"])
def test_another_etag_between_two_ranges_is_refused(suffix: str, proxy: Proxy, url: str):
    wide = {"w": np.arange(1 << 18, dtype=np.float32).reshape(512, 512)}
    holdfast.save(wide, url + suffix)
    with holdfast.open(url + suffix) as checkpoint:
        np.testing.assert_array_equal(checkpoint["w"][5].numpy(), wide["w"][5])
        proxy.fault = lambda asked: "etag"
        with pytest.raises(holdfast.errors.Replaced, match="open it again"):
            _ = checkpoint["w"][300:310].numpy()
        proxy.fault = lambda asked: None
        np.testing.assert_array_equal(checkpoint["w"][300:310].numpy(), wide["w"][300:310])


@verbs
def test_objects_that_are_seen_late(verb: type[Verb], made: Verb, proxy: Proxy):
    """What was put is neither found nor listed for a while: it is done, or said that it is not; and then it is there."""
    proxy.unseen_s = 1.0
    try:
        made.do(1)
        wanted = (1, 1)
    except (HoldfastError, AssertionError):
        wanted = (0, 1)
    assert proxy.unseen or verb in (Open, Save, SaveObject)
    proxy.unseen_s = 0.0
    proxy._unseen.clear()
    made.check(wanted)


@pytest.mark.parametrize("suffix", ["", ".safetensors"])
def test_a_lost_answer_and_an_object_that_is_seen_late(suffix: str, proxy: Proxy, url: str):
    """Each put of the save loses its answer, and is not to be seen for a while: it is waited for, and found to be ours."""
    url += suffix
    lost: set[str] = set()

    def once(asked: Asked) -> Fault:
        if asked.method != "PUT" or asked.path in lost or "probe" in asked.path:
            return None
        lost.add(asked.path)
        return "cut"

    proxy.fault, proxy.unseen_s = once, 0.6
    holdfast.save(make_state(1), url, overwrite=False)
    assert proxy.unseen
    proxy.fault, proxy.unseen_s = (lambda asked: None), 0.0
    proxy._unseen.clear()
    assert read_version(url) == 1
    proxy.unseen_s = 0.6
    holdfast.save(make_state(2), url + "-other" + suffix)
    with pytest.raises(NotCommitted):
        holdfast.save(make_state(3), url + "-other" + suffix, overwrite=False)
    proxy._unseen.clear()
    assert read_version(url + "-other" + suffix) == 2
