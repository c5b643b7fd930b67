"""Runs under the crash model: whatever call a power cut, a kill or a failure hits, the newest whole step is there.

One turn of a run is everything that a save does to its directory: the lock, the rules written down, the step written and published,
retention with its deletions. The steps that a reader finds are compared byte by byte with those that were saved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache

import pytest

from holdfast.errors import HoldfastError
from holdfast.extras.runs import directory
from holdfast.extras.runs.directory import RunDirectory, clean, hide, open_for_writing
from holdfast.extras.runs.record import RunRecord
from holdfast.extras.runs.retention import retain
from holdfast.extras.runs.rules import Every, Latest, Rule
from holdfast.extras.runs.steps import step_name
from holdfast.stores.files import Files
from holdfast.verbs.seals.document import Stamp, with_seal
from holdfast.verbs.shared.planned import Writing, write_plan
from tests.crash.model import ROOT, Model, Tree, freeze, temporaries
from tests.crash.proof import Death, Mortal
from tests.crash.test_crash_states import Without
from tests.crash.test_nth_call import FAULTS, Failing, Fault
from tests.crash.writers import plan_of
from tests.sampling import every_nth

RULES = (Latest(2), Every(100))


def save(
    files: Files,
    number: int,
    *,
    version: int | None = None,
    overwrite: bool = False,
    durable: bool = True,
) -> None:
    """Write and publish one step."""
    path = f"{ROOT}/{step_name(number)}"
    plan = plan_of(path, number if version is None else version, "native", None)
    stamp = Stamp(number, 1000.0 + number, {"loss": 1 / (number + 1)})
    write_plan(
        with_seal(plan, stamp),
        path,
        Writing(overwrite=overwrite, threads=1, durable=durable),
        files=files,
    )


def turn(files: Files, number: int, rules: Iterable[Rule] = RULES, **how: object) -> None:
    """Everything that a run does in its directory for one step."""
    folder = RunDirectory(ROOT, files)
    lock = open_for_writing(folder, RunRecord(keep=[*map(str, rules)]), durable=True)
    try:
        save(files, number, **how)
        retain(folder, tuple(rules), check=lambda step: True)
    finally:
        lock.close()


@cache
def saved(number: int, version: int | None = None) -> Tree:
    """The files of a step."""
    model = Model()
    save(model, number, version=version)
    return model.live()[step_name(number)]


@cache
def settled(*numbers: int) -> Tree:
    """A run's directory with these steps."""
    model = Model()
    for number in numbers:
        save(model, number)
    return model.live()


def start(*numbers: int, exchange: bool = True) -> Model:
    return Model(tree=settled(*numbers), exchange=exchange, noreplace=exchange)


class Looked:
    """What readers find in a state; equal states are looked at once."""

    def __init__(self, *, versions: tuple[int | None, ...] = (None,), torn: bool = False) -> None:
        self._seen: dict[object, tuple[list[int], list[str]]] = {}
        self._versions = versions
        self._torn = torn
        self.states = 0

    def steps(self, tree: Tree) -> list[int]:
        """The numbers of the whole steps, which are what was saved to the last byte, and what `newest` gives."""
        key = freeze(tree)
        if key not in self._seen:
            self.states += 1
            self._seen[key] = self._look(tree)
        return self._seen[key][0]

    def _look(self, tree: Tree) -> tuple[list[int], list[str]]:
        folder = RunDirectory(ROOT, Model(tree=tree))
        found = folder.survey()
        torn = [one.name for one in found if one.whole is None]
        if not self._torn:
            assert torn == [], f"a torn step is seen: {torn} in {sorted(tree)}"
        whole = [one.whole for one in found if one.whole is not None]
        for step in whole:
            assert tree[step.name] in [saved(step.step, version) for version in self._versions], (
                f"{step.name} is not what was saved"
            )
        newest = folder.newest()
        assert (newest.step if newest else None) == max((step.step for step in whole), default=None)
        return [step.step for step in whole], torn


def watch(model: Model, name: str, look: Callable[[str, Tree], None]) -> None:
    """Look at every state that a power cut may leave after each call."""

    def called(call: str) -> None:
        for tree in model.crashes(name):
            look(call, tree)

    model.watch = called


@pytest.mark.parametrize("exchange", [True, False], ids=["renameat2", "plain"])
def test_a_power_cut_at_any_call_of_a_turn(exchange: bool):
    """Steps 1 to 3 and 100 are there; 101 is saved, and 1 to 3 go."""
    model, looked = start(1, 2, 3, 100, exchange=exchange), Looked()
    trees: dict[object, Tree] = {}

    def look(call: str, tree: Tree) -> None:
        steps = looked.steps(tree)
        assert 100 in steps, f"after {call}: {steps}"
        if 101 not in steps:
            assert steps == [1, 2, 3, 100], (
                f"after {call}: what no new step has replaced is gone: {steps}"
            )
        trees[freeze(tree)] = tree

    watch(model, step_name(101), look)
    turn(model, 101)
    model.watch = None
    assert looked.steps(model.live()) == [100, 101]
    assert temporaries(model.live()) == []
    assert model.open_descriptors == {}
    assert looked.states > 20
    for tree in trees.values():
        # A later turn repairs what is left.
        again = Model(tree=tree, exchange=exchange, noreplace=exchange)
        turn(again, 102)
        assert looked.steps(again.live())[-1] == 102
        assert len(looked.steps(again.live())) <= 3
        assert temporaries(again.live()) == []
        assert set(again.live()) - {step_name(n) for n in (100, 101, 102)} == {"holdfast.run.json"}


@pytest.mark.parametrize("exchange", [True, False], ids=["renameat2", "plain"])
def test_a_power_cut_while_the_only_step_is_saved_anew(exchange: bool):
    model, looked = start(1, exchange=exchange), Looked(versions=(None, 9))

    def look(call: str, tree: Tree) -> None:
        assert looked.steps(tree) == [1], f"after {call}"

    watch(model, step_name(1), look)
    turn(model, 1, version=9, overwrite=True)
    assert model.live()[step_name(1)] == saved(1, 9)


@pytest.mark.parametrize("exchange", [True, False], ids=["renameat2", "plain"])
def test_a_kill_after_any_call_and_the_next_run(exchange: bool):
    whole = start(1, 2, 3, exchange=exchange)
    turn(whole, 4)
    call_count = len(whole.calls)
    assert call_count > 50
    name = f"kills of a turn of a run, {'with' if exchange else 'without'} renameat2"
    for call_index in every_nth(name, call_count, 11):
        moment = call_index + 1
        model, looked = start(1, 2, 3, exchange=exchange), Looked()
        with pytest.raises(Death):
            turn(Mortal(model, moment), 4)
        model.revive()
        steps = looked.steps(model.live())
        assert steps[-1] in (3, 4), f"killed after call {moment}: {steps}"
        if steps[-1] == 3:
            assert steps == [1, 2, 3], f"killed after call {moment}: {steps}"

        def look(
            call: str,
            tree: Tree,
            looked: Looked = looked,
            least: int = steps[-1],
            moment: int = moment,
        ) -> None:
            # What the dead process did is not durable, so it may be gone after a power cut: then what was before is there.
            found = looked.steps(tree)
            assert found, f"killed after call {moment}, power cut after {call}"
            assert found[-1] >= min(least, 3), (
                f"killed after call {moment}, power cut after {call}: {found}"
            )

        watch(model, step_name(5), look)
        turn(model, 5)
        model.watch = None
        assert looked.steps(model.live()) == ([4, 5] if steps[-1] == 4 else [3, 5]), (
            f"killed after call {moment}"
        )
        assert temporaries(model.live()) == [], f"killed after call {moment}"


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_the_nth_call_of_a_turn_fails(fault: Fault):
    """A full disk at every write, and every other failure: old steps stay until a new one is there, and the next turn repairs."""
    looked = Looked()
    whole = Failing(start(1, 2, 3), fault, 0)
    turn(whole, 4)
    assert whole.count > 100
    step = 1 if fault.name == "ENOSPC" else 7
    for call_index in every_nth(f"calls of a turn of a run that fail: {fault}", whole.count, step):
        model = start(1, 2, 3)
        files = Failing(model, fault, call_index + 1)
        try:
            turn(files, 4)
            raised = False
        except (HoldfastError, OSError):
            raised = True
        where = f"call {call_index + 1}, {files.failed}"
        steps = looked.steps(model.live())
        if 4 not in steps:
            assert raised, where
            assert steps == [1, 2, 3], where
        assert steps[-1] >= 3, where
        assert model.open_descriptors == {} or fault.done, where
        model.revive()
        turn(model, 5)
        assert looked.steps(model.live())[-1] == 5, where
        assert len(looked.steps(model.live())) == 2, where
        assert temporaries(model.live()) == [], where


def test_a_power_cut_while_pins_change():
    """The pins are always the old or the new, and what is pinned is not deleted."""
    model = start(1, 2, 3)
    RunDirectory(ROOT, model).pin(1, "paper")
    seen = set()

    def pins(tree: Tree) -> tuple[int, ...]:
        return tuple(RunDirectory(ROOT, Model(tree=tree)).pins())

    watch(model, "holdfast.pins.json", lambda call, tree: seen.add(pins(tree)))
    RunDirectory(ROOT, model).pin(2, "talk")
    RunDirectory(ROOT, model).unpin(1)
    assert seen == {(1,), (1, 2), (2,)}
    model.watch = None
    turn(model, 4, [Latest(1)])
    assert Looked().steps(model.live()) == [2, 4]


# The proof can fail.


def test_deleting_without_a_rename_is_seen(monkeypatch: pytest.MonkeyPatch):
    class InPlace:
        def __init__(self, files: Files, name: str, at: int) -> None:
            self.files, self.name, self.at = files, name, at

        def remove(self, *, durable: bool) -> None:
            inside = self.files.open_directory(self.name, dir_fd=self.at)
            for name in self.files.list(inside):
                self.files.unlink(name, dir_fd=inside)
            self.files.close(inside)
            self.files.rmdir(self.name, dir_fd=self.at)

    monkeypatch.setattr(directory, "hide", lambda files, name, *, at: InPlace(files, name, at))
    model, looked = start(1, 2, 3), Looked()
    watch(model, step_name(4), lambda call, tree: looked.steps(tree))
    with pytest.raises(AssertionError, match="a torn step is seen"):
        turn(model, 4)


def test_unlinking_before_the_rename_is_on_disk_is_seen():
    model, looked = start(1, 2, 3), Looked()
    watch(model, step_name(4), lambda call, tree: looked.steps(tree))
    with pytest.raises(AssertionError, match="a torn step is seen"):
        retain(
            RunDirectory(ROOT, Without(model, skip=lambda model, descriptor: True)),
            [Latest(1)],
            check=lambda step: True,
        )


def test_retention_before_the_step_is_published_is_seen():
    """What others do: delete the old one, then write."""
    model, looked = start(1), Looked()
    found: list[list[int]] = []
    watch(model, step_name(2), lambda call, tree: found.append(looked.steps(tree)))
    at = model.open_directory(ROOT)
    hide(model, step_name(1), at=at).remove()
    save(model, 2)
    assert [] in found


def test_what_lives_is_not_cleaned():
    """A deletion that goes on in another process is left to it."""
    model = start(1, 2)
    at = model.open_directory(ROOT)
    hidden = hide(model, step_name(1), at=at)
    (name,) = temporaries(model.live())
    clean(model, model.list(at), at=at)
    assert len(model.live()[name]) == 4
    hidden.remove()
    assert temporaries(model.live()) == []
