"""Verbs with several ranks write to object stores: every rank uploads some objects, one put publishes all."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import holdfast
from holdfast.engine.saves import FilePlan
from holdfast.engine.targets import bucket
from holdfast.errors import NotCommitted, RanksFailed
from tests.groups import ThreadGroup, on_ranks, raise_first_error
from tests.remote.servers import Asked, Fault, Proxy
from tests.remote.test_copy import NAMES, checkpoints, read_local_files, read_objects
from tests.remote.test_verbs import STATE, names, same

__all__ = ["checkpoints"]

INDEX_NAMES = ("holdfast.json", ".index.json")

CONVERT_OPTIONS = {
    "native": {},
    "hf": {"format": "safetensors", "max_shard_size": "70KB"},
    "x.safetensors": {},
    "x.pt": {},
}
"""The options of a conversion to a target of this name."""


def run_on_ranks(rank_count: int, call: Callable[[ThreadGroup], object]) -> list[object]:
    """Call a function on every rank of a group. Returns the results, or raises the first error."""
    return raise_first_error(on_ranks(rank_count, call))


def read_objects_without_save_ids(url: str) -> dict[str, bytes]:
    """Return the content of every object. The id of the save in names and indexes is replaced."""
    content: dict[str, bytes] = {}
    for name, data in read_objects(url).items():
        if name.endswith(".json"):
            data = re.sub(rb"[0-9a-f]{16}-", b"ID-", data)
        content[re.sub(r"[0-9a-f]{16}", "ID", name)] = data
    return content


@pytest.mark.parametrize("rank_count", [2, 3])
@pytest.mark.parametrize("name", NAMES)
def test_several_ranks_copy_the_same_files_as_one_process(
    name: str, rank_count: int, checkpoints: Path, proxy: Proxy, url: str
):
    source = checkpoints / name
    target = f"{url}/{rank_count}/{name}"
    run_on_ranks(rank_count, lambda group: holdfast.copy(source, target, group=group))
    assert read_objects(target) == read_local_files(source)
    same(target, STATE)

    with pytest.raises(NotCommitted, match="overwrite=True"):
        holdfast.copy(source, target)
    run_on_ranks(
        rank_count, lambda group: holdfast.copy(source, target, group=group, overwrite=True)
    )
    assert read_objects(target) == read_local_files(source)

    local_target = checkpoints / "back" / name
    local_target.parent.mkdir()
    run_on_ranks(rank_count, lambda group: holdfast.copy(target, local_target, group=group))
    assert read_local_files(local_target) == read_local_files(source)


@pytest.mark.parametrize("name", CONVERT_OPTIONS)
def test_several_ranks_convert_to_the_same_files_as_one_process(
    name: str, checkpoints: Path, proxy: Proxy, url: str
):
    source = checkpoints / "split"
    options = CONVERT_OPTIONS[name]
    of_one_process = f"{url}/one-process/{name}"
    of_ranks = f"{url}/ranks/{name}"
    holdfast.convert(source, of_one_process, **options)
    run_on_ranks(3, lambda group: holdfast.convert(source, of_ranks, group=group, **options))

    content = read_objects_without_save_ids(of_ranks)
    expected_content = read_objects_without_save_ids(of_one_process)
    assert list(content) == list(expected_content)
    # An index has a checksum of itself, which depends on the id of the save.
    for file_name, data in content.items():
        if not file_name.endswith(INDEX_NAMES):
            assert data == expected_content[file_name]
    assert holdfast.diff(of_ranks, of_one_process, exact=True).equal
    same(of_ranks, STATE)


@pytest.mark.parametrize("name", CONVERT_OPTIONS)
def test_several_ranks_verify_a_checkpoint_in_a_bucket(
    name: str, checkpoints: Path, proxy: Proxy, url: str
):
    holdfast.convert(checkpoints / "split", f"{url}/{name}", **CONVERT_OPTIONS[name])
    reports = run_on_ranks(2, lambda group: holdfast.verify(f"{url}/{name}", group=group))
    assert reports[1].ok


def test_several_ranks_reshard_into_a_bucket(checkpoints: Path, proxy: Proxy, url: str):
    def reshard(group: ThreadGroup) -> object:
        return holdfast.reshard(
            checkpoints / "native", url, mesh="dp=2", rules=["*: dp=0"], group=group
        )

    run_on_ranks(2, reshard)
    same(url, STATE)


@pytest.mark.parametrize("verb", [holdfast.convert, holdfast.copy])
@pytest.mark.parametrize("name", ["native", "split", "one-shard"])
def test_nothing_is_left_if_a_rank_fails(
    verb, name: str, checkpoints: Path, proxy: Proxy, url: str, monkeypatch: pytest.MonkeyPatch
):
    upload_file = bucket._put_object

    def upload_or_fail(file: FilePlan, *arguments: object) -> object:
        if file.key.endswith(".safetensors"):
            raise NotCommitted("a bad disk")
        return upload_file(file, *arguments)

    monkeypatch.setattr(bucket, "_put_object", upload_or_fail)
    errors = on_ranks(3, lambda group: verb(checkpoints / name, url, group=group))
    for error in errors:
        assert isinstance(error, RanksFailed)
        assert "a bad disk" in str(error)
    assert names(url) == []


def test_a_copy_that_the_store_refuses_leaves_the_old_checkpoint(
    checkpoints: Path, proxy: Proxy, url: str
):
    holdfast.copy(checkpoints / "split", url)
    old_content = read_objects(url)
    new_state = {name: np.zeros_like(array) for name, array in STATE.items()}
    new_checkpoint = checkpoints / "new"
    holdfast.save(new_state, new_checkpoint, format="safetensors", max_shard_size="70KB")
    (new_checkpoint / "config.json").write_text("{}")
    data_uploads: list[str] = []

    def refuse_second_upload(request: Asked) -> Fault:
        if request.method == "PUT" and request.nbytes > 10_000:
            data_uploads.append(request.path)
        is_second = len(data_uploads) > 1 and request.path == data_uploads[-1]
        return "403" if is_second else None

    proxy.fault = refuse_second_upload
    errors = on_ranks(
        3, lambda group: holdfast.copy(new_checkpoint, url, group=group, overwrite=True)
    )
    proxy.fault = lambda request: None
    assert all(isinstance(error, RanksFailed) for error in errors)
    assert read_objects(url) == old_content


def test_a_copy_deletes_what_an_interrupted_copy_left(checkpoints: Path, proxy: Proxy, url: str):
    from holdfast.stores.remote.client import get_bucket
    from holdfast.stores.remote.url import Url

    source = checkpoints / "split"
    holdfast.copy(source, url)
    published_names = names(url)
    # If the first rank is killed, nobody deletes the objects of its copy.
    unfinished_url = Url(url).below(".model-00001-of-00003.safetensors.0123456789abcdef.tmp")
    get_bucket(unfinished_url).put(unfinished_url.key, b"half of it", create=True)
    assert len(names(url)) == len(published_names) + 1

    run_on_ranks(2, lambda group: holdfast.copy(source, url, group=group, overwrite=True))
    assert names(url) == published_names
