"""`copy` and `holdfast cp`: names and bytes as they are, between disks and buckets; inside of a bucket no byte comes here."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from obstore.store import MemoryStore

import holdfast
from holdfast.cli.main import main
from holdfast.errors import Corrupted, DurabilityUncertain, HoldfastError, NotCommitted
from holdfast.stores.remote.client import get_bucket
from holdfast.stores.remote.url import parse_url
from tests.remote.servers import Asked, Fault, Proxy
from tests.remote.test_verbs import STATE, names, same
from tests.support import flip_bit

KINDS = ("native", "x.pt", "x.safetensors", "split", "one")


def content(place: str) -> dict[str, bytes]:
    """Every file under its name."""
    if "://" not in place:
        path = Path(place)
        return (
            {str(p.relative_to(path)): p.read_bytes() for p in path.rglob("*")}
            if path.is_dir()
            else {"": path.read_bytes()}
        )
    where = parse_url(place)
    bucket = get_bucket(where)
    keys = {
        one.key.removeprefix(f"{where.key}/"): one.key
        for one in bucket.list_objects(f"{where.key}/", 1000)
    } or {"": where.key}
    return {name: bytes(bucket.get_object(key, 1 << 30).data) for name, key in keys.items()}


@pytest.fixture
def made(tmp_path: Path) -> Path:
    """One checkpoint of each kind."""
    for name in ("native", "x.pt", "x.safetensors"):
        holdfast.save(STATE, tmp_path / name)
    holdfast.save(STATE, tmp_path / "split", format="safetensors", max_shard_size="70KB")
    holdfast.save(STATE, tmp_path / "one", format="safetensors", max_shard_size="1GB")
    (tmp_path / "split" / "config.json").write_text("{}")
    return tmp_path


@pytest.mark.parametrize("kind", KINDS)
def test_there_and_back_and_beside(kind: str, made: Path, proxy: Proxy, url: str):
    local = content(str(made / kind))
    done = holdfast.copy(made / kind, f"{url}/{kind}")
    assert content(f"{url}/{kind}") == local
    assert done.done
    assert done.checked_nbytes >= sum(array.nbytes for array in STATE.values())
    same(f"{url}/{kind}", STATE)
    proxy.clear()
    within = holdfast.copy(f"{url}/{kind}", f"{url}/again/{kind}")
    assert content(f"{url}/again/{kind}") == local
    assert within.shared_nbytes > 0.9 * within.nbytes
    holdfast.copy(f"{url}/{kind}", made / "back" if "." not in kind else made / f"back{kind[1:]}")
    assert content(str(made / ("back" if "." not in kind else f"back{kind[1:]}"))) == local


def test_inside_of_a_bucket_the_store_copies(proxy: Proxy, url: str):
    holdfast.save({"w": np.zeros(1 << 20, np.uint8)}, url)
    proxy.clear()
    holdfast.copy(url, f"{url}-copy")
    assert proxy.sent_nbytes < 100_000
    assert sum(asked.nbytes for asked in proxy.asked) < 100_000
    assert holdfast.verify(f"{url}-copy").ok


def test_what_is_there_is_refused_and_replaced_on_demand(made: Path, proxy: Proxy, url: str):
    for kind in KINDS:
        place = f"{url}/{kind}"
        holdfast.copy(made / kind, place)
        with pytest.raises(NotCommitted, match="overwrite=True"):
            holdfast.copy(made / kind, place)
        holdfast.copy(made / kind, place, overwrite=True)
        assert content(place) == content(str(made / kind))
    holdfast.copy(made / "split", f"{url}/native", overwrite=True)
    same(f"{url}/native", STATE)
    assert "holdfast.json" not in names(f"{url}/native")


def test_damage_is_found_on_the_way(made: Path, proxy: Proxy, url: str):
    flip_bit(made / "x.safetensors", -3)
    with pytest.raises(Corrupted, match="checksum"):
        holdfast.copy(made / "x.safetensors", f"{url}/x.safetensors")
    with pytest.raises(HoldfastError, match="no such object"):
        holdfast.open(f"{url}/x.safetensors")


def test_a_copy_that_is_cut_off_publishes_nothing_and_another_is_told(
    made: Path, proxy: Proxy, url: str
):
    holdfast.save(STATE, f"{url}-source")
    bucket = get_bucket(parse_url(url))
    bucket.put(f"{parse_url(url).key}/.copy.0000000000000000.tmp", b"of another")
    with pytest.raises(NotCommitted, match="under way"):
        holdfast.copy(made / "native", url)
    holdfast.copy(made / "native", url, overwrite=True)
    same(url, STATE)
    assert ".copy.0000000000000000.tmp" not in names(url)


@pytest.mark.parametrize("kind", ["split", "one"])
def test_a_copy_over_the_same_names_that_fails_leaves_the_old_one(
    kind: str, made: Path, proxy: Proxy, url: str, tmp_path: Path
):
    """Each upload in turn is refused: the old checkpoint with its config, or at the end the new one. Nothing else is left."""
    other = {name: array + 1 for name, array in STATE.items()}
    size = "70KB" if kind == "split" else "1GB"
    holdfast.save(other, tmp_path / "other", format="safetensors", max_shard_size=size)
    (tmp_path / "other" / "config.json").write_text('{"new": true}')
    holdfast.copy(made / kind, url)
    old = content(url)
    proxy.clear()
    holdfast.copy(tmp_path / "other", f"{url}-elsewhere")
    uploads = sum(asked.method == "PUT" and asked.nbytes > 1 for asked in proxy.asked)
    assert set(names(f"{url}-elsewhere")) & set(old), "names are the same"
    if kind == "split":
        uploads += 1  # The old index is withdrawn by an upload.
    for at in range(uploads):
        put: list[Asked] = []

        def fault(asked: Asked, at: int = at, put: list[Asked] = put) -> Fault:
            if (
                asked.method == "PUT"
                and asked.nbytes > 1
                and "x-amz-copy-source" not in asked.headers
            ):
                put.append(asked)
                return "403" if len(put) > at else None
            return None

        proxy.fault = fault
        published = (
            kind == "split" and at == uploads - 1
        )  # or not: the index is refused, and nobody can say why
        with pytest.raises(DurabilityUncertain if published else NotCommitted):
            holdfast.copy(tmp_path / "other", url, overwrite=True)
        proxy.fault = lambda asked: None
        assert published or content(url) == old, at
    holdfast.copy(tmp_path / "other", url, overwrite=True)
    assert content(url) == content(str(tmp_path / "other"))


def test_what_is_too_long_for_a_copy_by_the_store(
    made: Path, proxy: Proxy, url: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("holdfast.engine.targets.bucket.MAX_COPY_NBYTES", 1000)
    holdfast.copy(made / "split", url)
    holdfast.copy(made / "split", url, overwrite=True)
    assert content(url) == content(str(made / "split"))


def test_between_stores_of_a_program(made: Path):
    one, other = MemoryStore(), MemoryStore()
    holdfast.copy(made / "native", "a", store=one)
    with holdfast.open("a", store=one) as source:
        holdfast.copy(source, "a", store=other)
    with holdfast.open("a", store=other) as checkpoint:
        assert holdfast.verify(checkpoint).ok


def test_the_command(made: Path, proxy: Proxy, url: str, capsys: pytest.CaptureFixture[str]):
    assert main(["cp", str(made / "native"), url, "--dry-run"]) == 0
    assert "write" in capsys.readouterr().out
    assert main(["cp", str(made / "native"), url, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["done"]
    assert told["target"] == url
    assert told["checked_nbytes"] > 0
    assert main(["cp", str(made / "native"), url]) == 2
    assert "--overwrite" in capsys.readouterr().err
    assert main(["cp", str(made / "x.pt"), f"{url}-folder/"]) == 0
    same(f"{url}-folder/x.pt", STATE)
    assert main(["cp", f"{url}-folder/x.pt", f"{made}/down/"]) == 2
    (made / "down").mkdir()
    assert main(["cp", f"{url}-folder/x.pt", f"{made}/down/"]) == 0
    same(str(made / "down" / "x.pt"), STATE)
    assert main(["cp", url, url]) == 2
