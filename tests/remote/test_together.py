"""Verbs on ranks and object stores: every rank uploads some of the objects, and one put publishes them all."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

import holdfast
from holdfast.engine.saves import FilePlan
from holdfast.engine.targets import bucket
from holdfast.errors import NotCommitted, RanksFailed
from tests.groups import ThreadGroup, on_ranks, raise_first_error
from tests.remote.servers import Asked, Fault, Proxy
from tests.remote.test_copy import KINDS, content, made
from tests.remote.test_verbs import STATE, names, same

__all__ = ["made"]


def plainly(place: str) -> dict[str, bytes]:
    """Every object, under its name without the id of the save; of an index, what it says of names, too."""
    return {
        re.sub(r"[0-9a-f]{16}", "ID", name): re.sub(rb"[0-9a-f]{16}-", b"ID-", raw)
        if name.endswith(".json")
        else raw
        for name, raw in content(place).items()
    }


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_copies_are_the_same_for_any_number_of_ranks(
    kind: str, size: int, made: Path, proxy: Proxy, url: str
):
    place = f"{url}/{size}/{kind}"
    raise_first_error(on_ranks(size, lambda group: holdfast.copy(made / kind, place, group=group)))
    assert content(place) == content(str(made / kind))
    same(place, STATE)
    with pytest.raises(NotCommitted, match="overwrite=True"):
        holdfast.copy(made / kind, place)
    raise_first_error(
        on_ranks(size, lambda group: holdfast.copy(made / kind, place, group=group, overwrite=True))
    )
    assert content(place) == content(str(made / kind))
    back = made / "back" / kind
    back.parent.mkdir()
    raise_first_error(on_ranks(size, lambda group: holdfast.copy(place, back, group=group)))
    assert content(str(back)) == content(str(made / kind))


INDEXES = ("holdfast.json", ".index.json")

FORMS = {
    "native": {},
    "hf": {"format": "safetensors", "max_shard_size": "70KB"},
    "x.safetensors": {},
    "x.pt": {},
}


@pytest.mark.parametrize("kind", [*FORMS])
def test_conversions_are_the_same_for_any_number_of_ranks(
    kind: str, made: Path, proxy: Proxy, url: str
):
    holdfast.convert(made / "split", f"{url}/alone/{kind}", **FORMS[kind])
    raise_first_error(
        on_ranks(
            3,
            lambda group: holdfast.convert(
                made / "split", f"{url}/many/{kind}", group=group, **FORMS[kind]
            ),
        )
    )
    many, alone = plainly(f"{url}/many/{kind}"), plainly(f"{url}/alone/{kind}")
    assert [*many] == [*alone]
    # A manifest and an index have checksums of themselves, in which the id of the save is.
    assert [name for name in many if many[name] != alone[name] and not name.endswith(INDEXES)] == []
    assert holdfast.diff(f"{url}/many/{kind}", f"{url}/alone/{kind}", exact=True).equal
    same(f"{url}/many/{kind}", STATE)
    assert raise_first_error(
        on_ranks(2, lambda group: holdfast.verify(f"{url}/many/{kind}", group=group))
    )[1].ok
    holdfast.reshard(made / "native", made / "mesh", mesh="dp=2", rules=["*: dp=0"])
    raise_first_error(
        on_ranks(
            2,
            lambda g: holdfast.reshard(
                made / "native", f"{url}/mesh", mesh="dp=2", rules=["*: dp=0"], group=g
            ),
        )
    )
    same(f"{url}/mesh", STATE)


@pytest.mark.parametrize("verb", [holdfast.convert, holdfast.copy])
@pytest.mark.parametrize("kind", ["native", "split", "one"])
def test_a_rank_that_fails_leaves_nothing(
    verb: object, kind: str, made: Path, proxy: Proxy, url: str, monkeypatch
):
    real = bucket._put

    def fail(file: FilePlan, *more: object) -> object:
        if file.key.endswith(".safetensors"):
            raise NotCommitted("a bad disk")
        return real(file, *more)

    monkeypatch.setattr(bucket, "_put", fail)

    def job(group: ThreadGroup) -> object:
        return verb(made / kind, url, group=group)

    found = on_ranks(3, job)
    assert all(isinstance(one, RanksFailed) and "a bad disk" in str(one) for one in found), found
    assert names(url) == []


def test_a_copy_that_is_refused_by_the_store_leaves_the_old_one(made: Path, proxy: Proxy, url: str):
    holdfast.copy(made / "split", url)
    before = content(url)
    holdfast.save({name: np.zeros_like(array) for name, array in STATE.items()}, made / "other", format="safetensors",
                  max_shard_size="70KB")  # fmt: skip
    (made / "other" / "config.json").write_text("{}")

    def refuse(asked: Asked) -> Fault:
        """The second upload of weights: the first one is there by then."""
        uploads.extend([asked.path] if asked.method == "PUT" and asked.nbytes > 10_000 else [])
        return "403" if len(uploads) > 1 and asked.path == uploads[-1] else None

    uploads: list[str] = []

    proxy.fault = refuse
    found = on_ranks(
        3, lambda group: holdfast.copy(made / "other", url, group=group, overwrite=True)
    )
    proxy.fault = lambda asked: None
    assert all(isinstance(one, RanksFailed) for one in found), found
    assert content(url) == before


def test_a_copy_takes_away_what_one_left_that_was_cut_off(made: Path, proxy: Proxy, url: str):
    """As when the first rank is killed, who would have done so."""
    from holdfast.stores.remote.client import get_bucket
    from holdfast.stores.remote.url import Url

    holdfast.copy(made / "split", url)
    before, place = (
        names(url),
        Url(url).below(".model-00001-of-00003.safetensors.0123456789abcdef.tmp"),
    )
    get_bucket(place).put(place.key, b"half of it", create=True)
    assert len(names(url)) == len(before) + 1
    raise_first_error(
        on_ranks(2, lambda group: holdfast.copy(made / "split", url, group=group, overwrite=True))
    )
    assert names(url) == before
