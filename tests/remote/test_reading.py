"""Reading checkpoints from object stores: how many requests it takes, and which version is read."""

from __future__ import annotations

import pickle
from collections.abc import AsyncIterator, Callable
from contextlib import closing
from pathlib import Path

import numpy as np
import obstore
import pytest
from obstore.store import MemoryStore

import holdfast
from holdfast.errors import HoldfastError, Replaced, StoreError, Truncated
from holdfast.stores.remote.store import RemoteStore
from holdfast.stores.remote.url import parse_url
from tests.remote.servers import Proxy, environment

STATE = {
    "w": np.arange(1 << 18, dtype=np.float32).reshape(512, 512),
    "b": np.ones(3),
    "empty": np.zeros((0, 4), np.int8),
}


def upload_folder(store: MemoryStore, folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            obstore.put(store, f"run/{path.relative_to(folder)}", path.read_bytes())


def check_state(checkpoint: holdfast.Checkpoint) -> None:
    for name, array in STATE.items():
        np.testing.assert_array_equal(checkpoint[name].numpy(), array)


@pytest.fixture
def store(tmp_path: Path) -> MemoryStore:
    """A store in memory with the same state in every format."""
    for name in ("native", "x.pt", "x.safetensors"):
        holdfast.save(STATE, tmp_path / name)
    holdfast.save(STATE, tmp_path / "split", format="safetensors", max_shard_size="600KB")
    store = MemoryStore()
    upload_folder(store, tmp_path)
    return store


@pytest.mark.parametrize("name", ["native", "x.pt", "x.safetensors", "split"])
def test_a_checkpoint_of_any_format_can_be_read(name: str, store: MemoryStore):
    with holdfast.open(f"run/{name}", store=store) as checkpoint:
        check_state(checkpoint)
        np.testing.assert_array_equal(checkpoint["w"][3:5, ::7].numpy(), STATE["w"][3:5, ::7])


def test_opening_a_native_checkpoint_requests_only_its_manifest(proxy: Proxy, url: str):
    holdfast.save(STATE, url)
    proxy.clear()
    with holdfast.open(url):
        (request,) = proxy.asked
        assert request.method == "GET"
        assert request.path.endswith("/holdfast.json")


def test_a_slice_is_one_request_for_its_bytes(proxy: Proxy, url: str):
    holdfast.save(STATE, url)
    expected = STATE["w"][100:200]
    with holdfast.open(url) as checkpoint:
        proxy.clear()
        np.testing.assert_array_equal(checkpoint["w"][100:200].numpy(), expected)
        assert len(proxy.asked) == 1
        assert proxy.sent_nbytes <= 1.1 * expected.nbytes


@pytest.mark.parametrize(("suffix", "max_requests"), [(".safetensors", 1), (".pt", 3)])
def test_a_file_is_opened_with_few_requests(suffix: str, max_requests: int, proxy: Proxy, url: str):
    holdfast.save(STATE, url + suffix)
    proxy.clear()
    with holdfast.open(url + suffix) as checkpoint:
        assert len(proxy.asked) <= max_requests
        check_state(checkpoint)


@pytest.mark.parametrize("suffix", [".safetensors", ".pt", ".npz"])
def test_a_small_file_is_opened_and_read_with_one_request(
    suffix: str, proxy: Proxy, url: str, tmp_path: Path
):
    small_state = {"w": np.arange(300, dtype=np.float32), "b": np.ones(5)}
    if suffix == ".npz":
        np.savez(tmp_path / "x.npz", **small_state)
        holdfast.copy(tmp_path / "x.npz", url + suffix)
    else:
        holdfast.save(small_state, url + suffix)
    proxy.clear()

    with holdfast.open(url + suffix) as checkpoint:
        arrays = checkpoint.read()
    assert [request.method for request in proxy.asked] == ["GET"]
    for name, array in small_state.items():
        np.testing.assert_array_equal(arrays[name], array)


def test_requests_after_the_first_require_its_etag(proxy: Proxy, url: str):
    holdfast.save(STATE, url + ".safetensors")
    with holdfast.open(url + ".safetensors") as checkpoint:
        proxy.clear()
        _ = checkpoint["w"].numpy()
        assert proxy.asked
        assert all(request.headers.get("if-match") for request in proxy.asked)


@pytest.mark.parametrize("name", ["native", "x.pt", "x.safetensors"])
def test_reading_an_object_that_was_replaced_raises(name: str, store: MemoryStore):
    new_state = {key: array + 1 for key, array in STATE.items()}
    with holdfast.open(f"run/{name}", store=store) as checkpoint:
        _ = checkpoint["b"].numpy()
        holdfast.save(new_state, f"run/{name}", store=store, overwrite=True)
        with pytest.raises(Replaced):
            _ = checkpoint["w"].numpy()


@pytest.mark.parametrize("name", ["missing", "missing.pt"])
def test_opening_a_missing_object_raises(name: str, store: MemoryStore):
    with pytest.raises(StoreError, match="no such object"):
        holdfast.open(f"run/{name}", store=store)


def test_reading_an_object_that_is_shorter_than_its_manifest_says_raises(store: MemoryStore):
    (data_key,) = (
        entry["path"]
        for page in obstore.list(store, "run/native")
        for entry in page
        if entry["path"].endswith(".safetensors")
    )
    data = bytes(obstore.get(store, data_key).bytes())
    obstore.put(store, data_key, data[:-8])
    with holdfast.open("run/native", store=store) as checkpoint, pytest.raises(Truncated):
        _ = checkpoint["w"].numpy()


def test_an_open_checkpoint_can_be_pickled(proxy: Proxy, url: str):
    holdfast.save(STATE, url)
    with holdfast.open(url) as checkpoint:
        unpickled = pickle.loads(pickle.dumps(checkpoint))
        np.testing.assert_array_equal(unpickled["b"].numpy(), STATE["b"])


@pytest.mark.parametrize("fault", ["503", "drop", "reset", "half", "cut"])
def test_a_request_that_fails_once_is_repeated(fault: str, proxy: Proxy, url: str):
    """Each request of opening and reading a checkpoint fails in turn."""
    holdfast.save(STATE, url + ".safetensors")
    proxy.clear()
    with holdfast.open(url + ".safetensors") as checkpoint:
        _ = checkpoint["w"].numpy()
    request_count = len(proxy.asked)
    assert request_count >= 2

    for index in range(request_count):
        proxy.clear()
        proxy.fault = lambda request, index=index: fault if request.number == index else None
        with holdfast.open(url + ".safetensors") as checkpoint:
            np.testing.assert_array_equal(checkpoint["w"].numpy(), STATE["w"])


def test_a_store_keeps_few_windows_beside_those_of_the_manifest(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("holdfast.stores.remote.store.MAX_WINDOWS", 3)
    names = [f"file-{i}" for i in range(8)]
    for name in names:
        obstore.put(store, f"run/native/{name}", name.encode())
    with closing(RemoteStore(parse_url("run/native", store))) as remote_store:
        for name in names:
            content = bytearray(len(name))
            remote_store.peek(name, 0, memoryview(content))
            assert content.decode() == name

        # Without requests: the manifest, and the windows that were read last.
        def refuse_request(*arguments: object, **options: object) -> object:
            raise AssertionError("a request was sent")

        monkeypatch.setattr(remote_store.bucket, "get_range", refuse_request)
        remote_store.peek("holdfast.json", 0, memoryview(bytearray(10)))
        remote_store.peek(names[-3], 0, memoryview(bytearray(6)))
        with pytest.raises(AssertionError, match="a request was sent"):
            remote_store.peek(names[0], 0, memoryview(bytearray(6)))


def test_a_late_request_is_sent_again(proxy: Proxy, url: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("holdfast.stores.remote.client.UNKNOWN_DELAY_S", 0.2)
    holdfast.save(STATE, url + ".safetensors")
    with holdfast.open(url + ".safetensors") as checkpoint:
        proxy.clear()
        # The first answer takes 20 seconds.
        proxy.fault = lambda request: 20.0 if request.number == 0 else None
        np.testing.assert_array_equal(checkpoint["w"][-2:].numpy(), STATE["w"][-2:])
        assert len(proxy.asked) == 2


def test_errors_do_not_contain_credentials(proxy: Proxy, url: str):
    proxy.fault = lambda request: "403"
    with pytest.raises(HoldfastError, match="access denied") as caught:
        holdfast.open(url)
    error = caught.value
    text = repr(error) + str(error) + repr(error.__cause__) + repr(error.__context__)
    _, access_key, secret_key, *_ = environment(0).values()
    assert access_key not in text
    assert secret_key not in text


def test_credentials_in_a_url_are_refused_and_not_shown():
    with pytest.raises(HoldfastError, match="credentials") as caught:
        holdfast.open("s3://key:secret@bucket/x")
    assert "secret" not in str(caught.value)


def test_etags_with_and_without_quotes_are_equal(monkeypatch: pytest.MonkeyPatch):
    """Azure has quotes around ETags in answers about objects, and none in listings."""
    store = MemoryStore()
    obstore.put(store, "run/model-1.safetensors", holdfast.to_bytes(STATE, format="safetensors"))
    monkeypatch.setattr(obstore, "list", remove_quotes_from_etags(obstore.list))
    with holdfast.open("run", store=store) as checkpoint:
        np.testing.assert_array_equal(checkpoint["b"].numpy(), STATE["b"])
        assert not checkpoint.source.store.find_changed()


def remove_quotes_from_etags(list_objects: Callable[..., object]) -> Callable[..., object]:
    """Return a function that lists objects as obstore does, but with ETags without quotes."""

    def list_without_quotes(*args: object, **options: object) -> object:
        async def iterate_pages() -> AsyncIterator[list[dict[str, object]]]:
            async for page in list_objects(*args, **options):  # type: ignore[attr-defined]
                yield [{**entry, "e_tag": str(entry["e_tag"]).strip('"')} for entry in page]

        return iterate_pages()

    return list_without_quotes
