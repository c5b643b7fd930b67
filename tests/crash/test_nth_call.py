"""Proof 2: whichever call of a save fails, with whatever code, what is at the target is what the error says."""

from __future__ import annotations

import errno
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from holdfast.errors import DurabilityUncertain, NotCommitted
from tests.crash.model import ROOT, Model, temporaries
from tests.crash.proof import NEW, NEXT, OLD, TARGET, Reader, start
from tests.crash.writers import WRITERS, Writer

pytestmark = pytest.mark.usefixtures("everything_held")


@dataclass
class Fault:
    """One kind of failure."""

    name: str
    code: int | None
    """What is raised; None: a short write."""
    done: bool = False
    """The call is carried out and then reported as failed, as a lost answer from a file server is."""

    def __str__(self) -> str:
        return self.name


CODES = ("ENOSPC", "EIO", "EINTR", "EDQUOT", "EROFS", "EACCES")
FAULTS = [
    *(Fault(name, getattr(errno, name)) for name in CODES),
    Fault("short", None),
    Fault("lost", errno.EIO, done=True),
]


class Failing:
    """The model with one call that fails, by its number."""

    def __init__(self, model: Model, fault: Fault, number: int) -> None:
        self._model = model
        self._fault = fault
        self._number = number
        self.count = 0
        self.failed: str | None = None

    def __getattr__(self, name: str) -> Callable[..., object]:
        real = getattr(self._model, name)

        def call(*args: object, **options: object) -> object:
            self.count += 1
            if self.count != self._number:
                return real(*args, **options)
            self.failed = name
            if self._fault.code is None:
                if name != "pwrite":
                    return real(*args, **options)
                descriptor, data, offset = args
                return real(descriptor, data[: len(data) // 2], offset)
            if self._fault.done or name == "close":
                # A descriptor is gone even where close reports a failure.
                result = real(*args, **options)
                if name in ("open", "open_directory", "create", "hold"):
                    self._model.close(result)
            raise OSError(self._fault.code, errno.errorcode[self._fault.code])

        return call


@pytest.mark.parametrize("writer", WRITERS, ids=str)
@pytest.mark.parametrize("fault", FAULTS, ids=str)
@pytest.mark.parametrize("old", [False, True], ids=["new", "replace"])
@pytest.mark.parametrize("durable", [True, False], ids=["durable", "quick"])
@pytest.mark.parametrize("supported", [True, False], ids=["renameat2", "plain"])
def test_the_nth_call_fails(
    writer: Writer, fault: Fault, old: bool, durable: bool, supported: bool
):
    reader, kinds = Reader(writer.read), set()
    for number in range(1, 1_000):
        model = start(writer.save, old=old, exchange=supported, noreplace=supported)
        files = Failing(model, fault, number)
        raised: BaseException | None = None
        try:
            writer.save(f"{ROOT}/{TARGET}", NEW, files=files, durable=durable)
        except (NotCommitted, DurabilityUncertain) as error:
            raised = error
        where = f"call {number}, {files.failed}"
        live = model.live()
        kinds.add(type(raised))
        if isinstance(raised, NotCommitted):
            assert reader.version(live) == (OLD if old else None), where
            assert temporaries(live) == [], where
        else:
            assert reader.version(live) == NEW, where
        if raised is not None:
            assert raised.errno == fault.code, where
            assert isinstance(raised.__cause__, OSError), where
        if temporaries(live):
            # What was replaced could not be removed, or must not be because the new one is not certain to be on disk.
            assert writer.directory, where
            assert old, where
            writer.save(f"{ROOT}/{TARGET}", NEXT, files=model)
            assert temporaries(model.live()) == [], where
        assert model.open_descriptors == {}, where
        if files.failed is None:
            break
    assert number > 10
    assert kinds >= ({type(None)} if fault.code is None else {NotCommitted, type(None)})
    if durable and fault.code is not None:
        assert DurabilityUncertain in kinds


@pytest.mark.parametrize("writer", [w for w in WRITERS if w.directory], ids=str)
@pytest.mark.parametrize("fault", FAULTS, ids=str)
@pytest.mark.parametrize("supported", [True, False], ids=["renameat2", "plain"])
def test_the_nth_call_of_a_save_that_repairs_fails(writer: Writer, fault: Fault, supported: bool):
    """The target was caught between two renames, and a dead process left its temporary as well."""
    aside, dead, reader = (
        ".model.0123456789abcdef.old",
        ".model.0123456789abcdef.tmp",
        Reader(writer.read),
    )
    old = start(writer.save, old=True).live()[TARGET]
    for number in range(1, 1_000):
        model = Model(
            exchange=supported, noreplace=supported, tree={aside: old, dead: {"half": b"\0"}}
        )
        files = Failing(model, fault, number)
        version = NEW
        try:
            writer.save(f"{ROOT}/{TARGET}", NEW, files=files)
        except NotCommitted:
            version = OLD
        except DurabilityUncertain:
            pass
        where = f"call {number}, {files.failed}"
        assert reader.version(model.live()) == version, where
        assert model.open_descriptors == {}, where
        writer.save(f"{ROOT}/{TARGET}", NEXT, files=model)
        assert list(model.live()) == [TARGET], where
        assert reader.version(model.live()) == NEXT, where
        if files.failed is None:
            break
    assert number > 20


@pytest.mark.parametrize("writer", WRITERS, ids=str)
def test_no_fsync_is_tried_twice(writer: Writer):
    """After a failed fsync there is no further fsync of the same thing, and no rename but to set aside what was replaced."""
    total = 0
    while True:
        model = start(writer.save, old=True)
        seen: list[str] = []

        class Noted(Failing):
            def __getattr__(
                self, name: str, model: Model = model, seen: list[str] = seen, total: int = total
            ) -> Callable[..., object]:
                real = getattr(model, name)

                def call(*args: object, **options: object) -> object:
                    aside = name == "rename" and "failed" in seen and str(args[1]).endswith(".old")
                    if name in ("sync", "rename", "rename_new", "exchange") and not aside:
                        seen.append(name)
                        if (
                            name == "sync"
                            and seen.count("sync") == total + 1
                            and "failed" not in seen
                        ):
                            seen.append("failed")
                            raise OSError(errno.EIO, "Input/output error")
                    return real(*args, **options)

                return call

        try:
            writer.save(f"{ROOT}/{TARGET}", NEW, files=Noted(model, FAULTS[0], 0))
        except (NotCommitted, DurabilityUncertain):
            assert seen[-1] == "failed"
        else:
            break
        total += 1
    assert total >= 2
