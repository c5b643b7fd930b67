"""The first proof as a function: run a save on the model, look at every state that a crash may leave, and list what is wrong.

The invariants (SAFETY.md): after any crash the name opens as exactly the old or exactly the new; after `save` returned, as the new;
a following save works from every such state and leaves no temporary. What makes a state wrong is said in words, so that the tests
that break a sequence on purpose can ask for the right reason.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from holdfast.engine.commit.temporaries import find_recoverable
from tests.crash.model import ROOT, Model, Tree, freeze, materialise, temporaries

OLD, NEW, NEXT = 1, 2, 3
"""The versions before, of, and after the save under test."""

TARGET = "model"

ENOUGH = 20
"""A broken sequence has thousands of wrong states; this many are listed."""

Save = Callable[..., None]
"""As `Writer.save`."""


class Reader:
    """Says which version a state holds, by writing it to a real folder and reading that; equal states are read once."""

    def __init__(self, read: Callable[[Path], int]) -> None:
        self._read = read
        self._known: dict[object, int | str | None] = {}

    def version(self, tree: Tree) -> int | str | None:
        """The version under the target's name; None where there is nothing, words where it is neither."""
        seen: Tree = {
            name: what
            for name, what in tree.items()
            if name == TARGET or (TARGET not in tree and name.endswith(".old"))
        }
        key = freeze(seen)
        if key not in self._known:
            self._known[key] = self._look(seen)
        return self._known[key]

    def _look(self, tree: Tree) -> int | str | None:
        # Memory, where there is a file system in memory: nothing here needs a disk.
        place = Path(tempfile.mkdtemp(dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
        try:
            materialise(tree, place / "w")
            path = place / "w" / TARGET
            found = path if path.exists() else find_recoverable(path)
            return None if found is None else self._read(Path(found))
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        finally:
            shutil.rmtree(place)


@dataclass
class Report:
    """What a proof looked at, and what was wrong."""

    calls: list[str] = field(default_factory=list)
    states: int = 0
    violations: list[str] = field(default_factory=list)

    def wrong(self, what: str) -> None:
        if len(self.violations) < ENOUGH:
            self.violations.append(what)


@lru_cache(maxsize=100)
def settled(save: Save, exchange: bool, noreplace: bool) -> Tree:
    """The folder with the old version in it."""
    model = Model(exchange=exchange, noreplace=noreplace)
    save(f"{ROOT}/{TARGET}", OLD, files=model)
    assert not temporaries(model.live())
    return model.live()


def start(save: Save, *, old: bool, exchange: bool = True, noreplace: bool = True) -> Model:
    """A model on which the old version is durable, or nothing is."""
    return Model(
        exchange=exchange,
        noreplace=noreplace,
        tree=settled(save, exchange, noreplace) if old else {},
    )


def examine(
    save: Save,
    read: Callable[[Path], int],
    *,
    old: bool,
    first: Save | None = None,
    power_cut: bool = True,
    following: bool = True,
    exchange: bool = True,
    noreplace: bool = True,
    then: str = TARGET,
) -> Report:
    """Run `save` once and examine every state that a power cut (or, without, the death of the process) may leave on the way.

    `first` saves the old version, where `save` is too broken to. `following` also runs the next save from each state, to
    the same name unless `then` is another.
    """
    model = start(first or save, old=old, exchange=exchange, noreplace=noreplace)
    reader, report = Reader(read), Report()
    seen: dict[object, Tree] = {}
    before = OLD if old else None

    def look(call: str, allowed: tuple[int | None, ...]) -> None:
        if len(report.violations) >= ENOUGH:
            return
        for tree in model.crashes(TARGET) if power_cut else [model.live()]:
            key = (freeze(tree), allowed)
            if key in seen:
                continue
            seen[key] = tree
            version = reader.version(tree)
            if version not in allowed:
                found = "nothing" if version is None else version
                report.wrong(
                    f"after call {len(model.calls)} ({call}): found {found}, allowed {allowed}; in the folder: {sorted(tree)}"
                )

    look("nothing", (before,))
    model.watch = lambda call: look(call, (before, NEW))
    save(f"{ROOT}/{TARGET}", NEW, files=model)
    model.watch = None
    look("return", (NEW,))
    if left := temporaries(model.live()):
        report.wrong(f"after return: {left} is left")
    if model.open_descriptors:
        report.wrong(f"after return: {len(model.open_descriptors)} descriptors are open")
    if following:
        for tree in {freeze(tree): tree for tree in seen.values()}.values():
            follow(
                first or save,
                reader,
                tree,
                report,
                exchange=exchange,
                noreplace=noreplace,
                name=then,
            )
    report.calls, report.states = model.calls, len(seen)
    return report


def follow(
    save: Save,
    reader: Reader,
    tree: Tree,
    report: Report,
    *,
    exchange: bool = True,
    noreplace: bool = True,
    name: str = TARGET,
) -> None:
    """Save the next version onto what a crash left, or beside it: it works, and cleans, and nothing else changes."""
    model = Model(exchange=exchange, noreplace=noreplace, tree=tree)
    save(f"{ROOT}/{name}", NEXT, files=model)
    found = model.live()
    left = [one for one in temporaries(found) if name == TARGET or one.endswith(".tmp")]
    same = name == TARGET or reader.version(found) == reader.version(tree)
    if reader.version({TARGET: found[name]}) != NEXT or left or not same:
        report.wrong(f"a following save on {sorted(tree)} left {sorted(model.live())}")


class Death(BaseException):
    """kill -9 in the model: it cannot be caught by what tidies up, because every later call raises it as well."""


class Mortal:
    """The model as a process sees it that dies when so many calls were made: whatever it asks for afterwards is not done."""

    def __init__(self, model: Model, moment: int) -> None:
        self._model = model
        self._moment = moment
        self._dead = False

    def __getattr__(self, name: str) -> Callable[..., object]:
        real = getattr(self._model, name)

        def call(*args: object, **options: object) -> object:
            if self._dead:
                raise Death
            result = real(*args, **options)
            if len(self._model.calls) >= self._moment:
                self._dead = True
                raise Death
            return result

        return call


def examine_after_death(
    save: Save,
    read: Callable[[Path], int],
    *,
    exchange: bool = True,
    second: Save | None = None,
    old: bool = True,
    name: str = TARGET,
) -> Report:
    """Kill a save after each of its calls, save again on the same machine, and cut the power at every moment of that.

    What the dead process did is visible and not durable, which is the worst case for a cleaner: what looks replaced may come back.
    With another `name` the second save is to that: it cleans, and the target stays what the dead process left, or was about to.
    """
    before, elsewhere = OLD if old else None, name != TARGET
    report, reader = Report(), Reader(read)
    for moment in range(1, 1_000):
        model = start(save, old=old, exchange=exchange)
        try:
            save(f"{ROOT}/{TARGET}", NEW, files=Mortal(model, moment))
        except Death:
            pass
        else:
            return report
        model.revive()
        seen: set[object] = set()

        def look(
            call: str,
            allowed: tuple[int | None, ...],
            model: Model = model,
            seen: set[object] = seen,
            moment: int = moment,
        ) -> None:
            for tree in model.crashes(TARGET):
                key = freeze(tree)
                if (key, allowed) in seen:
                    continue
                seen.add((key, allowed))
                report.states += 1
                if (version := reader.version(tree)) not in allowed:
                    report.wrong(
                        f"killed after call {moment}, power cut after {call}: found {version}, allowed {allowed}"
                    )

        model.watch = lambda call, look=look: look(
            call, (before, NEW) if elsewhere else (before, NEW, NEXT)
        )
        (second or save)(f"{ROOT}/{name}", NEXT, files=model)
        model.watch = None
        look("return", (before, NEW) if elsewhere else (NEXT,))
        report.calls = model.calls
        if reader.version({TARGET: model.live()[name]}) != NEXT:
            report.wrong(f"killed after call {moment}: the next save did not save")
        # What another target set aside may be the only copy of it.
        if left := [
            one for one in temporaries(model.live()) if not elsewhere or one.endswith(".tmp")
        ]:
            report.wrong(f"killed after call {moment}: {left} is left after the next save")
        if report.violations:
            return report
    raise AssertionError("the save never ended")
