"""Steps of a bucket that name each other's objects: nothing that a published manifest names is ever deleted.

Two or three processes work on one run at once: a save whose step takes over objects, a deletion by the rules, a sweep. `Turns` lets
them go on request by request in any order that a test says, and kills them before any request.
"""

from __future__ import annotations

import errno
import itertools
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import msgspec
import numpy as np
import obstore
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from obstore.store import MemoryStore

import holdfast
from holdfast.core.documents import decode_canonical, seal
from holdfast.engine.targets import bucket_claims as claims
from holdfast.engine.targets.bucket_claims import CLAIMS_FOLDER, Claim, ClaimContent
from holdfast.errors import (
    BadArgument,
    DurabilityUncertain,
    HoldfastError,
    HoldfastWarning,
    NotCommitted,
    Replaced,
    StoreError,
    UnsafePath,
)
from holdfast.extras.runs.sweep import sweep
from holdfast.formats.native.schema import DOCUMENT
from holdfast.stores.remote import client
from holdfast.stores.remote.client import Bucket, Upload, get_bucket
from holdfast.stores.remote.url import parse_url
from holdfast.verbs.shared.references import References
from tests.remote.servers import environment
from tests.remote.test_runs import keys, later
from tests.sampling import count_rounds, is_exhaustive, sample


def state(number: int) -> dict[str, object]:
    """Some of it never changes, some every third step, some always."""
    frozen, slow = np.arange(300.0), np.full(200, number // 3, np.float32)
    return {"frozen": frozen, "slow": slow, "w": np.full(64, number, np.float32), "step": number}


def loads(step: holdfast.extras.runs.Step) -> bool:
    wanted = state(step.step)
    with step.open() as checkpoint:
        return all(
            np.array_equal(checkpoint[name].numpy(), wanted[name])
            for name in ("frozen", "slow", "w")
        )


def run_in(store: MemoryStore, **more: object) -> holdfast.Run:
    return holdfast.Run("run", store=store, **more)  # type: ignore[arg-type]


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


# What is shared.


def test_steps_share_objects_and_each_opens_alone(store: MemoryStore):
    run = run_in(store)
    for number in range(1, 7):
        run.save(number, state(number))
    shared = [[name for name in step.files if name.startswith("../")] for step in run]
    assert shared[0] == []
    assert all(shared[1:])
    assert all(map(loads, run))
    assert all(holdfast.verify(step.path).ok for step in run)
    stored = sum(one["size"] for batch in obstore.list(store, "run") for one in batch)
    used = run._used()
    assert sum(step.nbytes for step in run) > 1.5 * used
    assert used == stored - sum(
        len(obstore.get(store, f"run/{name}").bytes()) for name in ("holdfast.run.json",)
    )


def test_what_is_needed_stays_and_what_is_not_goes(store: MemoryStore):
    run = run_in(store, keep="latest:1")
    for number in range(1, 8):
        run.save(number, state(number))
        named = {f"run/step-{number:08d}/{name}" for name in run.latest().files}
        named = {key if "../" not in key else f"run/{key.partition('../')[2]}" for key in named}
        data = {f"run/{key}" for key in keys(store) if "data-" in key}
        assert data == named, "what the one step names, in whichever folder it lies"
    assert any(not key.startswith("run/step-00000007") for key in data)
    assert loads(run.latest())
    assert not [key for key in keys(store) if CLAIMS_FOLDER in key]


def test_share_false_writes_everything(store: MemoryStore):
    run = run_in(store, share=False)
    for number in (1, 2):
        run.save(number, state(number))
    assert not any("/" in name for step in run for name in step.files)
    holdfast.Run("run", store=store).save(3, state(3))
    assert not any("/" in name for name in run[3].files), "there are no hashes to compare with"


def test_a_base_without_a_run(store: MemoryStore, tmp_path: Path):
    url = "exp/b"
    first = holdfast.save(state(1), "exp/a", hashes=True, store=store)
    assert first.shared_nbytes == 0
    client_url = holdfast.stores.paths.place_of("exp/a", store)
    saved = holdfast.save(state(2), url, base=client_url, store=store)
    assert saved.shared_nbytes > 0
    assert not saved.notes
    assert np.array_equal(holdfast.open(url, store=store)["frozen"].numpy(), np.arange(300.0))
    for where, why in (("else/b", "not beside"), ("exp/a/b", "not beside")):
        told = holdfast.save(state(2), where, base=client_url, store=store)
        assert told.shared_nbytes == 0
        assert why in told.notes[0]
    told = holdfast.save(state(2), tmp_path / "x", base=client_url)
    assert "one of the two is in an object store" in told.notes[0]
    with pytest.raises(BadArgument, match="nothing at"):
        holdfast.save(
            state(2), "exp/c", base=holdfast.stores.paths.place_of("exp/none", store), store=store
        )
    holdfast.save(state(1), "exp/plain", store=store)
    told = holdfast.save(
        state(2), "exp/d", base=holdfast.stores.paths.place_of("exp/plain", store), store=store
    )
    assert "without hashes" in told.notes[0]


def test_a_step_is_replaced_and_others_keep_what_they_share(store: MemoryStore):
    run = run_in(store)
    for number in (1, 2, 3):
        run.save(number, state(number))
    before = set(keys(store))
    run.save(1, state(1), overwrite=True)
    assert all(map(loads, run))
    assert len(set(keys(store)) - before) <= 1, (
        "it shares with step 3, its own old objects among them"
    )
    run_in(store, share=False).save(2, state(2), overwrite=True)
    assert all(map(loads, run_in(store)))
    assert sweep("run", grace=1e-6, dry_run=True, store=store).keys == (), (
        "nothing is left that nobody names"
    )
    run.save(3, state(3), overwrite=True)
    assert all(map(loads, run_in(store)))
    assert sweep("run", grace=1e-6, dry_run=True, store=store).keys == ()


def test_what_is_missing_in_another_folder_makes_a_step_torn(store: MemoryStore):
    run = run_in(store)
    for number in (1, 2):
        run.save(number, state(number))
    (shared,) = [name for name in run[2].files if name.startswith("../")]
    key = f"run/{shared.removeprefix('../')}"
    content = obstore.get(store, key).bytes()
    for wrong in (b"short", None):
        obstore.delete(store, key) if wrong is None else obstore.put(store, key, wrong)
        for one in (run, run_in(store)):
            assert one.latest() is None
            assert {row.step for row in one._folder.survey() if not row.whole} == {1, 2}
    obstore.put(store, key, content)
    assert run.latest().step == 2


def test_a_copy_is_whole(store: MemoryStore, tmp_path: Path):
    run = run_in(store)
    for number in (1, 2, 3):
        run.save(number, state(number))
    holdfast.copy(run[3].open(), "copies/3", store=store)
    holdfast.copy(run[3].open(), tmp_path / "3")
    for key in keys(store):
        obstore.delete(store, f"run/{key}")
    for opened in (holdfast.open("copies/3", store=store), holdfast.open(tmp_path / "3")):
        assert np.array_equal(opened["frozen"].numpy(), np.arange(300.0))
        assert holdfast.verify(opened).ok


def test_a_step_that_another_program_fetched_says_what_to_do(store: MemoryStore, tmp_path: Path):
    run = run_in(store)
    for number in (1, 2):
        run.save(number, state(number))
    for key in keys(store):
        (tmp_path / key).parent.mkdir(exist_ok=True)
        (tmp_path / key).write_bytes(bytes(obstore.get(store, f"run/{key}").bytes()))
    assert holdfast.verify(tmp_path / "step-00000001").ok
    with pytest.raises(UnsafePath, match="holdfast cp"):
        holdfast.open(tmp_path / "step-00000002")


# Hostile manifests.

DATA = "data-0123456789abcdef-00001-of-00001.safetensors"


@pytest.mark.parametrize(
    "name",
    [
        f"../../{DATA}",
        f"../../other/{DATA}",
        f"../{DATA}",
        f"../step-1/deep/{DATA}",
        f"../../../etc/{DATA}",
        f"../.hidden/{DATA}",
        f"../../../{DATA}",
        f".././{DATA}",
        f"..//{DATA}",
        f"../step-1\\x/{DATA}",
        f"../step-1\0/{DATA}",
        f"../step-1/../{DATA}",
        "../step-1/secret.safetensors",
        f"../step-1/x{DATA}",
        f"../step-1/{DATA}\n",
        "../step-1/holdfast.json",
        f"/step-1/{DATA}",
        f"s3://other/step-1/{DATA}",
        f"../step-00000002/{DATA}",
        f"step-1/{DATA}",
    ],
)
def test_names_that_lead_elsewhere_are_refused(store: MemoryStore, name: str):
    """Out of the run, to other files, or to its own by another name."""
    run = run_in(store)
    for number in (1, 2):
        run.save(number, state(number))
    raw = bytes(obstore.get(store, "run/step-00000002/holdfast.json").bytes())
    manifest = decode_canonical(DOCUMENT, raw)
    files = tuple(
        msgspec.structs.replace(file, name=name if "../" in file.name else file.name)
        for file in manifest.files
    )
    text = msgspec.json.encode(msgspec.structs.replace(manifest, files=files, sealed=msgspec.UNSET))
    obstore.put(store, "run/step-00000002/holdfast.json", seal(text, len(text)))
    with pytest.raises(UnsafePath):
        holdfast.open("run/step-00000002", store=store)
    assert run_in(store).latest().step == 1


def test_older_versions_have_no_such_names(store: MemoryStore):
    run = run_in(store)
    for number in (1, 2):
        run.save(number, state(number))
    manifest = decode_canonical(
        DOCUMENT, bytes(obstore.get(store, "run/step-00000002/holdfast.json").bytes())
    )
    assert manifest.version == 5
    text = msgspec.json.encode(msgspec.structs.replace(manifest, version=4, sealed=msgspec.UNSET))
    obstore.put(store, "run/step-00000002/holdfast.json", seal(text, len(text)))
    with pytest.raises(UnsafePath):
        holdfast.open("run/step-00000002", store=store)


# Who deletes.


def test_a_manifest_that_cannot_be_understood_keeps_what_it_mentions(store: MemoryStore):
    run = run_in(store, keep="latest:1")
    for number in (1, 2):
        run.save(number, state(number))
    raw = bytes(obstore.get(store, "run/step-00000002/holdfast.json").bytes())
    obstore.put(store, "run/newer/holdfast.json", raw.replace(b'"version":5', b'"version":9'))
    before = {key for key in keys(store) if "data-" in key}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", HoldfastWarning)
        run_in(store, share=False, keep="latest:1").save(3, state(3))
    mentioned = {key for key in before if key.rpartition("/")[2].encode() in raw}
    assert mentioned <= set(keys(store))
    with later(25):
        sweep("run", store=store)
    assert mentioned <= set(keys(store))


def test_a_sweep_of_one_step_leaves_what_others_name(store: MemoryStore):
    """Its prefix is no run. But somebody may give it."""
    run = run_in(store)
    for number in (1, 2):
        run.save(number, state(number))
    obstore.delete(store, "run/step-00000001/holdfast.json")
    with later(25):
        assert sweep("run/step-00000001", store=store).keys == ()
        assert sweep("run", store=store).keys == ()
    assert loads(run[2])
    obstore.delete(store, "run/step-00000002/holdfast.json")
    with later(25):
        assert len(sweep("run/step-00000001", store=store).keys) == 1
        assert len(sweep("run", store=store).keys) == 1


def test_claims_of_the_dead(store: MemoryStore, monkeypatch: pytest.MonkeyPatch):
    """After a deletion that died steps are written whole for a while; after a save that died, data stays for a while."""
    run = run_in(store, keep="latest:2")
    for number in (1, 2):
        run.save(number, state(number))
    base = parse_url("run", store)
    obstore.put(
        store,
        f"run/{CLAIMS_FOLDER}/dead",
        msgspec.json.encode(ClaimContent("deletes", ("step-00000001",))),
    )
    run.save(3, state(3))
    assert not any("/" in name for name in run[3].files)
    obstore.put(
        store,
        f"run/{CLAIMS_FOLDER}/dead",
        msgspec.json.encode(ClaimContent("uses", ("step-00000001", "step-00000002"))),
    )
    with pytest.warns(HoldfastWarning, match="a save uses"):
        run.save(4, state(4))
    assert "run/step-00000001" in {f"run/{key.partition('/')[0]}" for key in keys(store)}
    monkeypatch.setattr(claims, "CLAIM_LIFE_S", 0.0)
    monkeypatch.setattr(claims, "CLAIM_REMOVAL_AGE_S", 0.0)
    obstore.put(store, f"run/{CLAIMS_FOLDER}/dead", b"nobody understands this")
    run.save(5, state(5))
    assert any("/" in name for name in run[5].files)
    assert not [key for key in keys(store) if CLAIMS_FOLDER in key], "old claims are taken away"
    assert all(map(loads, run))
    assert References(base).named([]) == set()


def test_a_claim_that_nobody_understands_stops_a_deletion(store: MemoryStore):
    run = run_in(store, keep="latest:1")
    run.save(1, state(1))
    run.save(2, state(2))
    obstore.put(store, f"run/{CLAIMS_FOLDER}/newer", b"{}")
    with pytest.warns(HoldfastWarning, match="cannot be understood"):
        run.save(3, state(3))
    assert [step.step for step in run] == [3]
    assert any(key.startswith("step-00000001/data") for key in keys(store))
    obstore.delete(store, f"run/{CLAIMS_FOLDER}/newer")
    with later(25):
        sweep("run", store=store)
    assert all(map(loads, run))


# Several processes at once.


class Death(BaseException):
    """A process that is killed."""


class Turns:
    """Processes that go on one request at a time, in the order that is said."""

    def __init__(self, picks: Iterable[int]) -> None:
        self._picks = iter(picks)
        self._changed = threading.Condition()
        self._waiting: dict[int, bool] = {}
        """By number: whether its turn has come."""
        self._going: set[int] = set()
        self._dead: set[int] = set()
        self._own = threading.local()
        self.count: dict[int, int] = {}

    def run(
        self, works: Sequence[Callable[[], object]], kills: dict[int, int] | None = None
    ) -> list[object]:
        """What each gives, or what it raises."""
        kills = kills or {}
        outcomes: list[object] = [None] * len(works)

        def live(number: int, work: Callable[[], object]) -> None:
            self._own.number = number
            try:
                outcomes[number] = work()
            except (HoldfastError, Death) as error:
                outcomes[number] = error
            finally:
                with self._changed:
                    self._going.discard(number)
                    self._changed.notify_all()

        self._going = set(range(len(works)))
        self.count = dict.fromkeys(self._going, 0)
        threads = [
            threading.Thread(target=live, args=(number, work), daemon=True)
            for number, work in enumerate(works)
        ]
        for thread in threads:
            thread.start()
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: not self._going or set(self._waiting) == self._going, 8
                )
                if not self._going:
                    break
                assert set(self._waiting) == self._going, "somebody hangs"
                ready = sorted(self._waiting)
                pick = next(self._picks, 0)
                number = pick if pick in ready else ready[pick % len(ready)]
                self.count[number] += 1
                if kills.get(number) == self.count[number]:
                    self._dead.add(number)
                self._waiting[number] = True
                self._changed.notify_all()
                self._changed.wait_for(
                    lambda number=number: self._waiting.get(number) is not True, 8
                )
        for thread in threads:
            thread.join(8)
        return outcomes

    def turn(self) -> None:
        """Wait for the turn of the process that asks."""
        number = getattr(self._own, "number", None)
        if number is None:
            return  # a thread that works for one of them
        if number in self._dead:
            raise Death
        with self._changed:
            self._waiting[number] = False
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._waiting[number], 8)
            del self._waiting[number]
            self._changed.notify_all()
        if number in self._dead:
            raise Death


@contextmanager
def by_turns(picks: Iterable[int]) -> Iterator[Turns]:
    turns, run, uploading = Turns(picks), Bucket._run, Bucket.open_upload

    def asked(
        self: Bucket, ask: Callable[[], object], key: str, doing: str, **more: bool
    ) -> object:
        turns.turn()
        return run(self, ask, key, doing, **more)  # type: ignore[arg-type]

    @contextmanager
    def uploads(self: Bucket, key: str, nbytes: int, **more: object) -> Iterator[Upload]:
        turns.turn()
        with uploading(self, key, nbytes, **more) as upload:  # type: ignore[arg-type]
            yield upload

    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore", HoldfastWarning)
        patch.setattr(Bucket, "_run", asked)
        patch.setattr(Bucket, "open_upload", uploads)
        yield turns


@contextmanager
def aged(store: MemoryStore) -> Iterator[None]:
    """What is there now was written two days ago."""
    old, real = {f"run/{key}" for key in keys(store)}, client._parse_metadata

    def found(meta: dict[str, object]) -> client.RemoteObject:
        one = real(meta)  # type: ignore[arg-type]
        return (
            client.RemoteObject(one.key, one.nbytes, one.etag, one.modified_at - timedelta(days=2))
            if one.key in old
            else one
        )

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(client, "_parse_metadata", found)
        yield


def begun(store: MemoryStore) -> None:
    """Four steps; 3 and 4 name objects of others, of which 1 has lost its manifest."""
    run = run_in(store)
    for number in range(1, 5):
        run.save(number, state(number))
    obstore.delete(store, "run/step-00000001/holdfast.json")


WORKS: dict[str, Callable[[MemoryStore], object]] = {
    "save": lambda store: run_in(store).save(5, state(5)),
    "save and delete": lambda store: run_in(store, keep="latest:1").save(6, state(6)),
    "replace": lambda store: run_in(store).save(3, state(3), overwrite=True),
    "delete": lambda store: run_in(store, keep="latest:1").prune(),
    "rewind": lambda store: run_in(store).rewind(2),
    "sweep": lambda store: sweep("run", store=store),
}


def together(
    names: Sequence[str], picks: Iterable[int], kills: dict[int, int] | None = None
) -> tuple[list[object], set[int]]:
    """Let these happen at once in a new run. What they gave, and which steps there are then: all of them whole."""
    store = MemoryStore()
    begun(store)
    with aged(store), by_turns(picks) as turns:
        outcomes = turns.run([lambda name=name: WORKS[name](store) for name in names], kills)
    found = run_in(store)._folder.survey()
    torn = [row for row in found if row.whole is None]
    assert not torn, f"{torn[0].name}: {torn[0].why}; {names} {kills}"
    steps = [row.whole for row in found if row.whole is not None]
    assert all(map(loads, steps))
    with later(49):
        sweep("run", store=store)
    again = run_in(store).steps()
    assert [one.step for one in again] == [one.step for one in steps]
    assert all(map(loads, again))
    named = References(parse_url("run", store)).named(
        [f"run/{key}" for key in keys(store) if "data-" in key]
    )
    assert {f"run/{key}" for key in keys(store) if "data-" in key} == named, (
        "a sweep leaves nothing else"
    )
    assert not [key for key in keys(store) if CLAIMS_FOLDER in key]
    return outcomes, {one.step for one in steps}


def pauses(first: int, second: int) -> Iterator[int]:
    """The first goes on for so many requests, then the second; then the first to its end."""
    return itertools.chain([0] * first, [1] * second, itertools.repeat(0))


PAIRS = [
    ("save", "delete"),
    ("save", "sweep"),
    ("save", "save and delete"),
    ("save", "rewind"),
    ("replace", "delete"),
    ("delete", "sweep"),
]


@pytest.mark.parametrize("names", PAIRS, ids=" + ".join)
def test_one_pauses_while_the_other_works(names: tuple[str, str]):
    """At each request of both, in turn; some of them by default."""
    ways = [(first, second) for first in range(36) for second in (*range(1, 36), 99)]
    chosen = sample(f"pauses of {' and '.join(names)}", ways, 8)
    published = set()
    for first, second in chosen:
        _, steps = together(names, pauses(first, second))
        published |= steps
    assert not is_exhaustive() or "save" not in names or 5 in published


EXAMPLES = count_rounds("orders of requests, with deaths", 12, total=1000)


@given(
    st.lists(st.sampled_from(sorted(WORKS)), min_size=2, max_size=3),
    st.lists(st.integers(0, 2), max_size=120),
    st.dictionaries(st.integers(0, 2), st.integers(1, 34), max_size=2),
)
@settings(deadline=None, max_examples=EXAMPLES, suppress_health_check=list(HealthCheck))
def test_any_order_and_any_death(names: list[str], picks: list[int], kills: dict[int, int]):
    together(names, picks, kills)


@pytest.mark.parametrize(
    "left_out",
    [
        "the save looks for deletions",
        "the save looks for its objects",
        "the deletion looks for saves",
    ],
)
def test_the_proof_needs_each_part(left_out: str, monkeypatch: pytest.MonkeyPatch):
    """Without any one of them, some order of requests loses data: so the orders that are tried are the ones that matter."""
    others = Claim.find_claimed_by_others

    def blind(self: Claim, does: claims.Activity) -> set[str]:
        return (
            set()
            if does == ("deletes" if left_out == "the save looks for deletions" else "uses")
            else others(self, does)
        )

    if left_out == "the save looks for its objects":
        monkeypatch.setattr(claims, "check_shared_objects", lambda *_: None)
    else:
        monkeypatch.setattr(Claim, "find_claimed_by_others", blind)
    lost = 0
    for first, second in itertools.product(range(11, 24), (99, 12, 13)):
        try:
            together(("save", "rewind"), pauses(first, second))
        except (AssertionError, HoldfastError):
            lost += 1
            break
    assert lost


def test_a_base_that_goes_meanwhile_is_written_whole(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch
):
    """What was to be shared is gone when the step is published: everything is written, and that is all."""
    run = run_in(store)
    for number in (1, 2):
        run.save(number, state(number))
    real, looked = claims.check_shared_objects, []

    def look(*args: object) -> None:
        if not looked:
            looked.append(1)
            for number in (1, 2):
                obstore.delete(
                    store, [f"run/{key}" for key in keys(store) if f"step-{number:08d}" in key]
                )
        real(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(claims, "check_shared_objects", look)
    saved = run.save(3, state(3))
    assert not any("/" in name for name in saved.files)
    assert loads(run[3])
    assert len(keys(store, "run/step-00000003")) == 2, "what the first try had uploaded is gone"


def test_a_manifest_that_may_come_yet_keeps_its_claim(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch
):
    """Nobody can say whether it was published: what it would name is not deleted meanwhile."""
    from holdfast.engine.targets.bucket_commit import PrefixSave

    run, real = run_in(store), PrefixSave.commit
    for number in (1, 2):
        run.save(number, state(number))
    late: list[Callable[[], None]] = []

    def commit(self: PrefixSave, *args: object) -> None:
        late.append(lambda: real(self, *args))  # type: ignore[arg-type]
        self.is_known_unpublished = False
        raise DurabilityUncertain("the answer was lost")

    with monkeypatch.context() as patch:
        patch.setattr(PrefixSave, "commit", commit)
        with pytest.raises(DurabilityUncertain):
            run.save(3, state(3))
    with pytest.warns(HoldfastWarning, match="a save uses"):
        run_in(store, share=False, keep="latest:1").save(4, state(4))
    late[0]()
    assert loads(run[3])


@pytest.mark.parametrize("how", ["deleted", "replaced", "deleted and swept"])
def test_a_reader_meanwhile(how: str, store: MemoryStore):
    """Old bytes, or a clear error; what other steps name is there still."""
    run = run_in(store)
    for number in (1, 2, 3):
        run.save(number, state(number))
    kept, new = (
        holdfast.open("run/step-00000003", store=store),
        holdfast.open("run/step-00000002", store=store),
    )
    early = holdfast.open("run/step-00000002", store=store)
    assert np.array_equal(early["w"].numpy(), state(2)["w"])
    if how == "replaced":
        run_in(store, share=False).save(2, state(2), overwrite=True)
    else:
        run_in(store, keep="latest:1").prune()
        if how == "deleted and swept":
            with later(25):
                sweep("run", store=store)
    assert all(
        np.array_equal(kept[name].numpy(), state(3)[name]) for name in ("frozen", "slow", "w")
    )
    assert np.array_equal(new["frozen"].numpy(), state(2)["frozen"]), "step 3 names it, too"
    for one in (new, early):
        with pytest.raises(Replaced, match="open it again"):
            one["w"].numpy()


def test_readers_during_saves_and_deletions(store: MemoryStore):
    """In several threads, with a run that keeps one step: whatever is read is of one step, or an error says so."""
    run, over, seen, wrong = (
        run_in(store, keep="latest:1"),
        threading.Event(),
        list[int](),
        list[int](),
    )
    run.save(1, state(1))

    def read() -> None:
        reader = run_in(store)
        while not over.is_set():
            try:
                step = reader.latest()
                with step.open() as checkpoint:
                    w, slow = checkpoint["w"].numpy(), checkpoint["slow"].numpy()
                good = np.array_equal(w, state(step.step)["w"]) and np.array_equal(
                    slow, state(step.step)["slow"]
                )
                (seen if good else wrong).append(step.step)
            except StoreError:
                continue  # it was deleted meanwhile

    threads = [threading.Thread(target=read) for _ in range(2)]
    for thread in threads:
        thread.start()
    for number in range(2, 12):
        run.save(number, state(number))
    over.set()
    for thread in threads:
        thread.join(30)
    assert seen
    assert not wrong
    assert loads(run.latest())


def test_a_slow_store_is_not_relied_on(store: MemoryStore, monkeypatch: pytest.MonkeyPatch):
    run = run_in(store, keep="latest:1")
    for number in (1, 2):
        run.save(number, state(number))
    monkeypatch.setattr(claims, "CLAIM_WORK_S", -1.0)
    with pytest.warns(HoldfastWarning, match="too slowly"):
        saved = run.save(3, state(3))
    assert not any("/" in name for name in saved.files)
    with pytest.raises(NotCommitted) as refused:
        claims.commit_with_claim(
            _save_at("run/step-00000009", store),
            [claims.SharedObject("step-00000003", saved.files[0], 1)],
            lambda: None,
        )
    assert refused.value.errno == errno.ESTALE


def _save_at(key: str, store: MemoryStore) -> object:
    from holdfast.engine.targets.bucket_commit import PrefixSave

    return PrefixSave(parse_url(key, store), "holdfast.json", overwrite=False)


def test_both_servers_share(either: int, url: str, monkeypatch: pytest.MonkeyPatch):
    for name, value in environment(either).items():
        monkeypatch.setenv(name, value)
    url += str(either)
    run = holdfast.Run(url, keep="latest:2")
    for number in range(1, 6):
        run.save(number, state(number))
    fresh = holdfast.Run(url)
    assert [step.step for step in fresh] == [4, 5]
    assert all(map(loads, fresh))
    assert any("/" in name for name in fresh.latest().files)
    where = parse_url(url)
    before = len(get_bucket(where).list_objects(where.key + "/", 100))
    with later(25):
        assert sweep(url).keys == ()
    assert len(get_bucket(where).list_objects(where.key + "/", 100)) == before
