"""A seal under power cuts, kills and failing calls: there is none, or it is right about every file."""

from __future__ import annotations

import errno
from collections.abc import Callable

import pytest

from holdfast.core.limits import Limits
from holdfast.engine.file_digest import digest_file
from holdfast.errors import DurabilityUncertain, NotCommitted
from holdfast.stores.files import Files, write_all
from holdfast.verbs.seals.document import SEAL, Seal, parse_seal, seal_name
from holdfast.verbs.seals.make import write_seal
from tests.crash.model import ROOT, File, Model, Tree, temporaries
from tests.crash.proof import Death, Mortal
from tests.crash.writers import payload

FOLDER = "model"
ABOUT = Seal(5, 1.0, {"loss": 2.0}, ())


def trained(files: Model, *, single: bool = False) -> None:
    """What a trainer leaves: files and a folder that nobody has synced."""
    at = files.open_directory(ROOT)
    if not single:
        files.mkdir(FOLDER, dir_fd=at)
        at = files.open_directory(FOLDER, dir_fd=at)
        files.mkdir("sub", dir_fd=at)
        sub = files.open_directory("sub", dir_fd=at)
        put(files, sub, "rng", payload(2, 700))
    put(files, at, FOLDER if single else "optimizer.pt", payload(1, 5_000))
    files.open_descriptors.clear()
    files.calls.clear()


def put(files: Model, at: int, name: str, content: bytes) -> None:
    write_all(files, files.create(name, dir_fd=at), content, offset=0)


def flat(tree: Tree, prefix: str = "") -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    for name, what in tree.items():
        found |= (
            {prefix + name: what} if isinstance(what, bytes) else flat(what, f"{prefix}{name}/")
        )
    return found


def sealed(tree: Tree) -> bool:
    """Whether there is a seal; it is right, or this raises."""
    inside = tree.get(FOLDER, {})
    files = (
        flat(inside)
        if not isinstance(inside, bytes)
        else {FOLDER: inside, **flat({n: c for n, c in tree.items() if n != FOLDER})}
    )
    raw = files.get(SEAL if not isinstance(inside, bytes) else seal_name(FOLDER))
    if raw is None:
        return False
    seal = parse_seal(raw, Limits())
    assert (seal.step, dict(seal.metrics)) == (5, {"loss": 2.0})
    assert {file.name for file in seal.files} == (
        {"optimizer.pt", "sub/rng"} if not isinstance(inside, bytes) else {FOLDER}
    )
    for file in seal.files:
        content = files[file.name]
        assert digest_file("xxh3-128", lambda n, at, content=content: content[at : at + n]) == (
            file.digest,
            file.nbytes,
        )
    return True


def put_seal(files: Files, *, overwrite: bool = False, durable: bool = True) -> None:
    write_seal(
        f"{ROOT}/{FOLDER}", ABOUT, threads=1, overwrite=overwrite, durable=durable, files=files
    )


each_kind = pytest.mark.parametrize("single", [False, True], ids=["folder", "file"])


@each_kind
@pytest.mark.parametrize("noreplace", [True, False], ids=["renameat2", "plain"])
def test_after_every_power_cut_there_is_no_seal_or_a_right_one(single: bool, noreplace: bool):
    model = Model(noreplace=noreplace)
    trained(model, single=single)
    states = 0

    def look(call: str) -> None:
        nonlocal states
        for name in (FOLDER, seal_name(FOLDER)) if single else (FOLDER,):
            for tree in model.crashes(name):
                states += 1
                sealed(tree)

    model.watch = look
    put_seal(model)
    model.watch = None
    assert all(sealed(tree) for tree in model.crashes(FOLDER))
    assert temporaries(model.live()) == []
    assert model.open_descriptors == {}
    assert states > 50


@each_kind
@pytest.mark.parametrize("missing", ["file", "directory"])
def test_without_an_fsync_the_proof_fails(single: bool, missing: str):
    """A file that was sealed and not synced, or a name: the seal survives the power cut, and what it speaks of does not."""

    class Without(Model):
        skipped: frozenset[int] = frozenset()

        def sync(self, descriptor: int) -> None:
            if self.open_descriptors[descriptor] not in self.skipped or any(
                call.startswith("rename") for call in self.calls
            ):
                super().sync(descriptor)

    model, wrong = Without(), []
    trained(model, single=single)
    # Of what the trainer wrote; the seal itself is synced.
    model.skipped = frozenset(
        number
        for number, node in model.nodes.items()
        if isinstance(node, File) == (missing == "file")
    )

    def look(call: str) -> None:
        for tree in model.crashes(FOLDER):
            try:
                sealed(tree)
            except (AssertionError, KeyError):
                wrong.append(call)

    model.watch = look
    put_seal(model)
    model.watch = None
    look("return")
    if single and missing == "directory":
        return  # the name of the one file may be gone, and then nobody asks for its seal
    assert wrong


@each_kind
@pytest.mark.parametrize("durable", [True, False])
def test_a_kill_after_every_call_and_then_the_next_seal(single: bool, durable: bool):
    moments = 0
    for moment in range(1, 1_000):
        model = Model()
        trained(model, single=single)
        try:
            put_seal(Mortal(model, moment), durable=durable)  # type: ignore[arg-type]  # every call of `Files`
        except Death:
            moments += 1
        else:
            break
        model.revive()
        sealed(model.live())
        put_seal(model, overwrite=True)
        assert sealed(model.live())
        assert temporaries(model.live()) == [], moment
    assert moments > 5


@each_kind
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EACCES])
def test_the_nth_call_fails(single: bool, code: int):
    kinds = set()
    for number in range(1, 1_000):
        model = Model()
        trained(model, single=single)
        failing = Failing(model, code, number)
        raised: BaseException | None = None
        try:
            put_seal(failing)  # type: ignore[arg-type]  # every call of `Files`
        except (NotCommitted, DurabilityUncertain) as error:
            raised = error
        kinds.add(type(raised))
        assert sealed(model.live()) == (not isinstance(raised, NotCommitted)), (
            number,
            failing.failed,
        )
        assert temporaries(model.live()) == []
        if failing.failed is None:
            break
    assert kinds == {NotCommitted, DurabilityUncertain, type(None)}


class Failing:
    """The model with one call that fails, by its number."""

    def __init__(self, model: Model, code: int, number: int) -> None:
        self._model, self._code, self._number, self._count = model, code, number, 0
        self.failed: str | None = None

    def __getattr__(self, name: str) -> Callable[..., object]:
        real = getattr(self._model, name)

        def call(*args: object, **options: object) -> object:
            self._count += 1
            if self._count != self._number:
                return real(*args, **options)
            self.failed = name
            if name == "close":
                real(*args, **options)
            raise OSError(self._code, errno.errorcode[self._code])

        return call
