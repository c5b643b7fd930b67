"""Reading from object stores: one request to open, exact ranges after it, and never two objects in one answer."""

from __future__ import annotations

import pickle
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import numpy as np
import obstore
import pytest
from obstore.store import MemoryStore

import holdfast
from holdfast.errors import HoldfastError, Replaced, StoreError, Truncated
from tests.remote.servers import Proxy, environment

STATE = {
    "w": np.arange(1 << 18, dtype=np.float32).reshape(512, 512),
    "b": np.ones(3),
    "empty": np.zeros((0, 4), np.int8),
}


def put(store: MemoryStore, folder: Path) -> None:
    """Copy a folder into a store."""
    for path in folder.rglob("*"):
        if path.is_file():
            obstore.put(store, f"run/{path.relative_to(folder)}", path.read_bytes())


@pytest.fixture
def filled(tmp_path: Path) -> MemoryStore:
    """A store with the same state in every format."""
    for name in ("native", "x.pt", "x.safetensors"):
        holdfast.save(STATE, tmp_path / name)
    holdfast.save(STATE, tmp_path / "split", format="safetensors", max_shard_size="600KB")
    store = MemoryStore()
    put(store, tmp_path)
    return store


@pytest.mark.parametrize("name", ["native", "x.pt", "x.safetensors", "split"])
def test_every_format_opens(name: str, filled: MemoryStore):
    with holdfast.open(f"run/{name}", store=filled) as checkpoint:
        for key, array in STATE.items():
            np.testing.assert_array_equal(checkpoint[key].numpy(), array)
        np.testing.assert_array_equal(checkpoint["w"][3:5, ::7].numpy(), STATE["w"][3:5, ::7])


def test_a_native_checkpoint_is_one_request_and_a_slice_one_more(proxy: Proxy, url: str):
    holdfast.save(STATE, url)
    proxy.clear()
    with holdfast.open(url) as checkpoint:
        assert [(one.method, one.path.rpartition("/")[2]) for one in proxy.asked] == [
            ("GET", "holdfast.json")
        ]
        proxy.clear()
        np.testing.assert_array_equal(checkpoint["w"][100:200].numpy(), STATE["w"][100:200])
        assert len(proxy.asked) == 1
        assert proxy.sent_nbytes <= 1.1 * STATE["w"][100:200].nbytes


def test_safetensors_and_zip_open_with_few_requests(proxy: Proxy, url: str):
    for suffix, most in ((".safetensors", 1), (".pt", 3)):
        holdfast.save(STATE, url + suffix)
        proxy.clear()
        with holdfast.open(url + suffix) as checkpoint:
            assert len(proxy.asked) <= most, [
                (one.method, one.path, one.headers.get("range")) for one in proxy.asked
            ]
            np.testing.assert_array_equal(checkpoint["w"].numpy(), STATE["w"])


@pytest.mark.parametrize("suffix", [".safetensors", ".pt", ".npz"])
def test_a_small_object_is_opened_and_read_by_one_request(
    suffix: str, proxy: Proxy, url: str, tmp_path: Path
):
    small = {"w": np.arange(300, dtype=np.float32), "b": np.ones(5)}
    if suffix == ".npz":
        np.savez(tmp_path / "x.npz", **small)
        holdfast.copy(tmp_path / "x.npz", url + suffix)
    else:
        holdfast.save(small, url + suffix)
    proxy.clear()
    with holdfast.open(url + suffix) as checkpoint:
        found = checkpoint.read()
    assert [one.method for one in proxy.asked] == ["GET"]
    for name, array in small.items():
        np.testing.assert_array_equal(found[name], array)


def test_every_later_range_is_pinned(proxy: Proxy, url: str):
    holdfast.save(STATE, url + ".safetensors")
    with holdfast.open(url + ".safetensors") as checkpoint:
        proxy.clear()
        _ = checkpoint["w"].numpy()
        assert proxy.asked
        assert all(one.headers.get("if-match") for one in proxy.asked)


@pytest.mark.parametrize("suffix", [".safetensors", ".pt", ""])
def test_an_object_that_is_replaced_is_an_error(suffix: str, filled: MemoryStore):
    place = f"run/{'native' if not suffix else 'x' + suffix}"
    with holdfast.open(place, store=filled) as checkpoint:
        _ = checkpoint["b"].numpy()
        holdfast.save(
            {name: array + 1 for name, array in STATE.items()}, place, store=filled, overwrite=True
        )
        with pytest.raises(Replaced):
            _ = checkpoint["w"].numpy()
    assert checkpoint is not None


def test_what_is_not_there_is_said_so(filled: MemoryStore):
    with pytest.raises(StoreError, match="no such object"):
        holdfast.open("run/none", store=filled)
    with pytest.raises(StoreError, match="no such object"):
        holdfast.open("run/none.pt", store=filled)


def test_a_data_file_that_is_shorter_than_the_manifest_says(filled: MemoryStore):
    (key,) = (
        one["path"]
        for batch in obstore.list(filled, "run/native")
        for one in batch
        if one["path"].endswith(".safetensors")
    )
    obstore.put(filled, key, bytes(obstore.get(filled, key).bytes())[:-8])
    with holdfast.open("run/native", store=filled) as checkpoint, pytest.raises(Truncated):
        _ = checkpoint["w"].numpy()


def test_it_travels_to_another_process(proxy: Proxy, url: str):
    holdfast.save(STATE, url)
    with holdfast.open(url) as checkpoint:
        again = pickle.loads(pickle.dumps(checkpoint))
        np.testing.assert_array_equal(again["b"].numpy(), STATE["b"])


@pytest.mark.parametrize("fault", ["503", "drop", "reset", "half", "cut"])
def test_a_read_survives_every_fault_once(fault: str, proxy: Proxy, url: str):
    """Each request of a session in turn meets the fault; what comes is right, or a clear error."""
    holdfast.save(STATE, url + ".safetensors")
    proxy.clear()
    with holdfast.open(url + ".safetensors") as checkpoint:
        _ = checkpoint["w"].numpy()
    count = len(proxy.asked)
    for number in range(count):
        proxy.clear()
        proxy.fault = lambda asked, number=number: fault if asked.number == number else None
        with holdfast.open(url + ".safetensors") as checkpoint:
            np.testing.assert_array_equal(checkpoint["w"].numpy(), STATE["w"])
    assert count >= 2


def test_a_slow_answer_is_asked_for_again(proxy: Proxy, url: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("holdfast.stores.remote.client.UNKNOWN_DELAY_S", 0.2)
    holdfast.save(STATE, url + ".safetensors")
    with holdfast.open(url + ".safetensors") as checkpoint:
        proxy.clear()
        proxy.fault = lambda asked: 20.0 if asked.number == 0 else None
        np.testing.assert_array_equal(checkpoint["w"][-2:].numpy(), STATE["w"][-2:])
        assert len(proxy.asked) == 2


def test_no_secret_is_told(proxy: Proxy, url: str):
    proxy.fault = lambda asked: "403"
    with pytest.raises(HoldfastError, match="access denied") as caught:
        holdfast.open(url)
    text = (
        repr(caught.value)
        + str(caught.value)
        + repr(caught.value.__cause__)
        + repr(caught.value.__context__)
    )
    for value in list(environment(0).values())[1:3]:
        assert value not in text


def test_credentials_in_a_url_are_refused():
    with pytest.raises(HoldfastError, match="credentials") as caught:
        holdfast.open("s3://key:secret@bucket/x")
    assert "secret" not in str(caught.value)


def test_an_etag_is_the_same_in_a_list_and_in_an_answer():
    """Azure leaves the quotes away in lists: what was listed must not look replaced when it is read."""
    store = MemoryStore()
    obstore.put(store, "run/model-1.safetensors", holdfast.to_bytes(STATE, format="safetensors"))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(obstore, "list", unquoted(obstore.list))
        with holdfast.open("run", store=store) as checkpoint:
            np.testing.assert_array_equal(checkpoint["b"].numpy(), STATE["b"])
            assert not checkpoint.source.store.find_changed()


def unquoted(real: Callable[..., object]) -> Callable[..., object]:
    """A list of objects, their etags in quotes taken off or, where there are none, as they are."""

    def listed(*args: object, **more: object) -> object:
        async def batches() -> AsyncIterator[list[dict[str, object]]]:
            async for batch in real(*args, **more):  # type: ignore[attr-defined]
                yield [{**one, "e_tag": str(one["e_tag"]).strip('"')} for one in batch]

        return batches()

    return listed
