"""`copy` and `holdfast cp` copy all files of a checkpoint unchanged, between disks and buckets."""

from __future__ import annotations

import json
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np
import pytest
from obstore.store import MemoryStore

import holdfast
from holdfast.cli.main import main
from holdfast.engine.targets.bucket_commit import PrefixSave
from holdfast.errors import Corrupted, DurabilityUncertain, HoldfastError, NotCommitted
from holdfast.stores.remote.client import get_bucket
from holdfast.stores.remote.url import parse_url
from tests.remote.servers import Asked, Fault, Proxy
from tests.remote.test_verbs import STATE, names, same
from tests.support import flip_bit

NAMES = ("native", "x.pt", "x.safetensors", "split", "one-shard")
"""A checkpoint of each kind in the folder of the fixture `checkpoints`."""


def read_local_files(path: Path) -> dict[str, bytes]:
    """Return the content of every file at a path, by its name. A single file has the name ''."""
    if path.is_file():
        return {"": path.read_bytes()}
    return {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*")}


def read_objects(url: str) -> dict[str, bytes]:
    """Return the content of every object at a URL, by its name. A single object has the name ''."""
    parsed_url = parse_url(url)
    bucket = get_bucket(parsed_url)
    prefix = f"{parsed_url.key}/"
    keys = [remote_object.key for remote_object in bucket.list_objects(prefix, 1000)]
    if not keys:
        return {"": bytes(bucket.get_object(parsed_url.key, 1 << 30).data)}
    return {key.removeprefix(prefix): bytes(bucket.get_object(key, 1 << 30).data) for key in keys}


@pytest.fixture
def checkpoints(tmp_path: Path) -> Path:
    """A folder with a checkpoint of each kind."""
    for name in ("native", "x.pt", "x.safetensors"):
        holdfast.save(STATE, tmp_path / name)
    holdfast.save(STATE, tmp_path / "split", format="safetensors", max_shard_size="70KB")
    holdfast.save(STATE, tmp_path / "one-shard", format="safetensors", max_shard_size="1GB")
    (tmp_path / "split" / "config.json").write_text("{}")
    return tmp_path


@pytest.mark.parametrize("name", NAMES)
def test_a_copy_to_a_bucket_has_the_same_files(
    name: str, checkpoints: Path, proxy: Proxy, url: str
):
    report = holdfast.copy(checkpoints / name, f"{url}/{name}")
    assert read_objects(f"{url}/{name}") == read_local_files(checkpoints / name)
    assert report.done
    assert report.checked_nbytes >= sum(array.nbytes for array in STATE.values())
    same(f"{url}/{name}", STATE)


@pytest.mark.parametrize("name", NAMES)
def test_a_copy_from_a_bucket_has_the_same_files(
    name: str, checkpoints: Path, proxy: Proxy, url: str
):
    holdfast.copy(checkpoints / name, f"{url}/{name}")
    target = checkpoints / f"back-{name}"
    holdfast.copy(f"{url}/{name}", target)
    assert read_local_files(target) == read_local_files(checkpoints / name)


@pytest.mark.parametrize("name", NAMES)
def test_a_copy_within_a_bucket_has_the_same_files(
    name: str, checkpoints: Path, proxy: Proxy, url: str
):
    holdfast.copy(checkpoints / name, f"{url}/{name}")
    report = holdfast.copy(f"{url}/{name}", f"{url}/copy/{name}")
    assert read_objects(f"{url}/copy/{name}") == read_local_files(checkpoints / name)
    assert report.shared_nbytes > 0.9 * report.nbytes


def test_a_copy_within_a_bucket_sends_no_content(proxy: Proxy, url: str):
    holdfast.save({"w": np.zeros(1 << 20, np.uint8)}, url)
    proxy.clear()
    holdfast.copy(url, f"{url}-copy")
    assert proxy.sent_nbytes < 100_000
    assert sum(request.nbytes for request in proxy.asked) < 100_000
    assert holdfast.verify(f"{url}-copy").ok


@pytest.mark.parametrize("name", NAMES)
def test_an_existing_copy_is_replaced_only_with_overwrite(
    name: str, checkpoints: Path, proxy: Proxy, url: str
):
    target = f"{url}/{name}"
    holdfast.copy(checkpoints / name, target)
    with pytest.raises(NotCommitted, match="overwrite=True"):
        holdfast.copy(checkpoints / name, target)
    holdfast.copy(checkpoints / name, target, overwrite=True)
    assert read_objects(target) == read_local_files(checkpoints / name)


def test_a_copy_can_replace_a_checkpoint_of_another_format(
    checkpoints: Path, proxy: Proxy, url: str
):
    holdfast.copy(checkpoints / "native", url)
    holdfast.copy(checkpoints / "split", url, overwrite=True)
    same(url, STATE)
    assert "holdfast.json" not in names(url)


def test_a_damaged_checkpoint_is_not_copied(checkpoints: Path, proxy: Proxy, url: str):
    flip_bit(checkpoints / "x.safetensors", -3)
    with pytest.raises(Corrupted, match="checksum"):
        holdfast.copy(checkpoints / "x.safetensors", f"{url}/x.safetensors")
    with pytest.raises(HoldfastError, match="no such object"):
        holdfast.open(f"{url}/x.safetensors")


def test_a_copy_beside_an_unfinished_one_needs_overwrite(checkpoints: Path, proxy: Proxy, url: str):
    unfinished_name = ".copy.0000000000000000.tmp"
    key = f"{parse_url(url).key}/{unfinished_name}"
    get_bucket(parse_url(url)).put(key, b"of another program")
    with pytest.raises(NotCommitted, match="under way"):
        holdfast.copy(checkpoints / "native", url)
    holdfast.copy(checkpoints / "native", url, overwrite=True)
    same(url, STATE)
    assert unfinished_name not in names(url)


def is_upload(request: Asked) -> bool:
    """Return whether a request uploads content. Conditions are tested with single bytes."""
    return request.method == "PUT" and request.nbytes > 1


class RefusedUpload:
    """A fault of the proxy: the upload with a given index, and all later ones, are refused."""

    def __init__(self, first_index: int) -> None:
        self._first_index = first_index
        self._upload_count = 0

    def __call__(self, request: Asked) -> Fault:
        if not is_upload(request) or "x-amz-copy-source" in request.headers:
            return None
        self._upload_count += 1
        return "403" if self._upload_count > self._first_index else None


@pytest.mark.parametrize("name", ["split", "one-shard"])
def test_a_copy_that_fails_leaves_the_old_checkpoint(
    name: str, checkpoints: Path, proxy: Proxy, url: str
):
    """Each upload in turn is refused. The files of the two checkpoints have the same names."""
    shard_size = "70KB" if name == "split" else "1GB"
    new_state = {key: array + 1 for key, array in STATE.items()}
    new_checkpoint = checkpoints / "new"
    holdfast.save(new_state, new_checkpoint, format="safetensors", max_shard_size=shard_size)
    (new_checkpoint / "config.json").write_text('{"new": true}')
    holdfast.copy(checkpoints / name, url)
    old_content = read_objects(url)

    proxy.clear()
    holdfast.copy(new_checkpoint, f"{url}-elsewhere")
    upload_count = sum(map(is_upload, proxy.asked))
    assert set(names(f"{url}-elsewhere")) & set(old_content)
    # The old index is withdrawn by another upload.
    if name == "split":
        upload_count += 1

    for index in range(upload_count):
        # If the last upload of a split checkpoint, its index, is refused, the copy cannot know
        # whether it was published.
        is_uncertain = name == "split" and index == upload_count - 1
        proxy.fault = RefusedUpload(index)
        with pytest.raises(DurabilityUncertain if is_uncertain else NotCommitted):
            holdfast.copy(new_checkpoint, url, overwrite=True)
        proxy.fault = lambda request: None
        if not is_uncertain:
            assert read_objects(url) == old_content, index

    holdfast.copy(new_checkpoint, url, overwrite=True)
    assert read_objects(url) == read_local_files(new_checkpoint)


def test_an_object_that_the_store_cannot_copy_is_uploaded(
    checkpoints: Path, proxy: Proxy, url: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("holdfast.engine.targets.bucket.MAX_COPY_NBYTES", 1000)
    holdfast.copy(checkpoints / "split", url)
    holdfast.copy(checkpoints / "split", url, overwrite=True)
    assert read_objects(url) == read_local_files(checkpoints / "split")


def test_a_checkpoint_can_be_copied_between_two_clients(checkpoints: Path):
    source_store = MemoryStore()
    target_store = MemoryStore()
    holdfast.copy(checkpoints / "native", "a", store=source_store)
    with holdfast.open("a", store=source_store) as source:
        holdfast.copy(source, "a", store=target_store)
    with holdfast.open("a", store=target_store) as checkpoint:
        assert holdfast.verify(checkpoint).ok


def test_cp_with_dry_run_only_describes_the_copy(checkpoints: Path, proxy: Proxy, url: str, capsys):
    assert main(["cp", str(checkpoints / "native"), url, "--dry-run"]) == 0
    assert "write" in capsys.readouterr().out
    with pytest.raises(HoldfastError, match="no such object"):
        holdfast.open(url)


def test_cp_reports_the_copy_as_json(checkpoints: Path, proxy: Proxy, url: str, capsys):
    assert main(["cp", str(checkpoints / "native"), url, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["done"]
    assert report["target"] == url
    assert report["checked_nbytes"] > 0


def test_cp_refuses_to_replace_a_checkpoint(checkpoints: Path, proxy: Proxy, url: str, capsys):
    assert main(["cp", str(checkpoints / "native"), url]) == 0
    assert main(["cp", str(checkpoints / "native"), url]) == 2
    assert "--overwrite" in capsys.readouterr().err
    assert main(["cp", url, url]) == 2


def test_cp_copies_a_file_into_a_folder(checkpoints: Path, proxy: Proxy, url: str):
    assert main(["cp", str(checkpoints / "x.pt"), f"{url}/"]) == 0
    same(f"{url}/x.pt", STATE)

    # A folder on a disk must exist.
    assert main(["cp", f"{url}/x.pt", f"{checkpoints}/down/"]) == 2
    (checkpoints / "down").mkdir()
    assert main(["cp", f"{url}/x.pt", f"{checkpoints}/down/"]) == 0
    same(str(checkpoints / "down" / "x.pt"), STATE)


def test_a_copy_that_ends_just_before_another_gets_the_claim_is_not_replaced(
    checkpoints: Path, proxy: Proxy, url: str, monkeypatch: pytest.MonkeyPatch
):
    """The second copy has seen an empty prefix. It must look again when it has the claim."""
    exclusive_place = PrefixSave.exclusive_place
    calls: list[PrefixSave] = []

    def finish_other_copy_and_claim(self: PrefixSave) -> AbstractContextManager[None]:
        calls.append(self)
        if len(calls) == 1:
            holdfast.copy(checkpoints / "split", url)
        return exclusive_place(self)

    monkeypatch.setattr(PrefixSave, "exclusive_place", finish_other_copy_and_claim)
    with pytest.raises(NotCommitted, match="a checkpoint exists there"):
        holdfast.copy(checkpoints / "split", url)

    same(url, STATE)
    assert not any(name.startswith(".copy") for name in names(url)), "no claim is left"
