"""A seal under power cuts, kills and failing calls: there is none, or it is right about every file."""

from __future__ import annotations

import errno
from collections.abc import Callable
from functools import cache

import pytest

from holdfast.core.limits import Limits
from holdfast.engine.file_digest import digest_of
from holdfast.errors import DurabilityUncertain, NotCommitted
from holdfast.stores.files import Files, write_all
from holdfast.verbs.seals import renew as renewal
from holdfast.verbs.seals.document import SEAL, Seal, SealedFile, encode_seal, parse_seal, seal_name
from holdfast.verbs.seals.make import write_seal
from holdfast.verbs.seals.renew import Known, Renewal
from holdfast.verbs.shared.planned import Writing, write_plan
from tests.crash.model import ROOT, File, Model, Tree, temporaries
from tests.crash.proof import Death, Mortal
from tests.crash.writers import payload, plan_of

FOLDER = "model"
ABOUT = Seal(5, 1.0, {"loss": 2.0}, ())


def trained(files: Model, *, single: bool = False) -> None:
    """What a trainer leaves: files and a folder that nobody has synced."""
    at = files.open_directory(ROOT)
    if not single:
        files.mkdir(FOLDER, at=at)
        at = files.open_directory(FOLDER, at=at)
        files.mkdir("sub", at=at)
        sub = files.open_directory("sub", at=at)
        put(files, sub, "rng", payload(2, 700))
    put(files, at, FOLDER if single else "optimizer.pt", payload(1, 5_000))
    files.open_descriptors.clear()
    files.calls.clear()


def put(files: Model, at: int, name: str, content: bytes) -> None:
    write_all(files, files.create(name, at=at), content, offset=0)


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
        assert digest_of("xxh3-128", lambda n, at, content=content: content[at : at + n]) == (
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


# A single file that is replaced in its place, and its seal beside it.


def replaced(files: Files, *, durable: bool = True) -> None:
    """Put the second version in the place of the first, which is sealed."""
    plan = plan_of(f"{ROOT}/{FOLDER}", 2, "torch", None)
    known = Known(first_seal(), ROOT, FOLDER, f"{ROOT}/{seal_name(FOLDER)}")
    seals = Renewal(f"{ROOT}/{FOLDER}", (known,)).laid_out(plan, (), ())
    write_plan(
        plan,
        f"{ROOT}/{FOLDER}",
        Writing(overwrite=True, durable=durable, threads=1),
        files=files,
        renews=seals,
    )


@cache
def version(number: int) -> bytes:
    model = Model()
    plan = plan_of(f"{ROOT}/{FOLDER}", number, "torch", None)
    write_plan(plan, f"{ROOT}/{FOLDER}", Writing(threads=1), files=model)
    found = model.live()[FOLDER]
    assert isinstance(found, bytes)
    return found


def sealed_as(number: int) -> SealedFile:
    content = version(number)
    return SealedFile(
        FOLDER, len(content), digest_of("xxh3-128", lambda n, at: content[at : at + n])[0]
    )


def first_seal() -> Seal:
    return Seal(5, 1.0, {"loss": 2.0}, (sealed_as(1),))


def model_with_first() -> Model:
    return Model(tree={FOLDER: version(1), seal_name(FOLDER): encode_seal(first_seal())})


def fits(tree: Tree) -> int:
    """Which version there is; the seal is there and fits it, or this raises."""
    content, text = tree[FOLDER], tree[seal_name(FOLDER)]
    assert isinstance(text, bytes)
    seal = parse_seal(text, Limits())
    assert (seal.step, seal.saved, dict(seal.metrics)) == (5, 1.0, {"loss": 2.0})
    number = [version(1), version(2)].index(content) + 1  # type: ignore[arg-type]  # bytes, or this raises
    assert sealed_as(number) in [
        SealedFile(one.name, one.nbytes, one.digest) for one in seal.files[0].either
    ]
    return number


def done(model: Model) -> bool:
    """Whether the new one is there, and its seal says nothing else any more."""
    return model.live() == {
        FOLDER: version(2),
        seal_name(FOLDER): encode_seal(Seal(5, 1.0, {"loss": 2.0}, (sealed_as(2),))),
    }


def test_after_every_power_cut_the_seal_fits_the_old_or_the_new_file():
    model, seen, states = model_with_first(), set(), 0

    def look(call: str) -> None:
        nonlocal states
        for name in (FOLDER, seal_name(FOLDER)):
            for tree in model.crashes(name):
                states += 1
                seen.add(fits(tree))

    model.watch = look
    replaced(model)
    model.watch = None
    assert seen == {1, 2}
    assert {fits(tree) for tree in model.crashes(FOLDER)} == {2}
    assert done(model)
    assert model.open_descriptors == {}
    assert states > 50


@pytest.mark.parametrize("missing", ["both", "last"])
def test_in_another_order_the_seal_would_not_fit(missing: str, monkeypatch: pytest.MonkeyPatch):
    """The proof can fail: without the seal that says both, and with the new one before the rename."""
    put, count = renewal.replace_file, 0

    def skipping(place: str, text: bytes, *, durable: bool, files: Files) -> None:
        nonlocal count
        count += 1
        if missing == "both" and count == 1:
            return
        if missing == "last" and count == 1:
            text = encode_seal(Seal(5, 1.0, {"loss": 2.0}, (sealed_as(2),)))
        put(place, text, durable=durable, files=files)

    monkeypatch.setattr(renewal, "replace_file", skipping)
    model, wrong = model_with_first(), 0

    def look(call: str) -> None:
        nonlocal wrong
        for tree in model.crashes(FOLDER):
            try:
                fits(tree)
            except AssertionError:
                wrong += 1

    model.watch = look
    replaced(model)
    assert wrong


@pytest.mark.parametrize("durable", [True, False])
def test_a_kill_after_every_call_of_a_replacement(durable: bool):
    moments = 0
    for moment in range(1, 1_000):
        model = model_with_first()
        try:
            replaced(Mortal(model, moment), durable=durable)  # type: ignore[arg-type]  # every call of `Files`
        except Death:
            moments += 1
        else:
            break
        model.revive()
        fits(model.live())
    assert moments > 15
    assert done(model)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EACCES])
def test_the_nth_call_of_a_replacement_fails(code: int):
    kinds = set()
    for number in range(1, 1_000):
        model = model_with_first()
        failing = Failing(model, code, number)
        raised: BaseException | None = None
        try:
            replaced(failing)  # type: ignore[arg-type]  # every call of `Files`
        except (NotCommitted, DurabilityUncertain) as error:
            raised = error
        kinds.add(type(raised))
        assert fits(model.live()) == (1 if isinstance(raised, NotCommitted) else 2), (
            number,
            failing.failed,
        )
        assert raised is not None or done(model)
        assert temporaries(model.live()) == []
        if failing.failed is None:
            break
    assert kinds == {NotCommitted, DurabilityUncertain, type(None)}
