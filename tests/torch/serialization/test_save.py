"""`holdfast.torch.save` beside `torch.save`: what it writes to, what it refuses, and what stays when it fails.

That the bytes are torch's is the subject of test_save_bytes.py.
"""

from __future__ import annotations

import errno
import inspect
import io
import os
import pickle
import stat
import threading
import types
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.serialization
from torch import nn

import holdfast.torch
from holdfast.errors import NotCommitted, NotSaved, Refused
from holdfast.torch import load, save
from tests.support import run_in_threads


def state() -> dict[str, object]:
    weight = torch.arange(12.0).view(3, 4)
    return {"w": weight, "turned": weight.t(), "step": 3}


def expected(value: object | None = None) -> bytes:
    """What torch writes to a buffer."""
    file = io.BytesIO()
    torch.save(state() if value is None else value, file)
    return file.getvalue()


def attempt(function: Callable[..., object], *args: object, **options: object) -> Exception | None:
    try:
        function(*args, **options)
    except Exception as error:
        return error
    return None


def both(
    make: Callable[[], object], value: object | None = None, **options: object
) -> Exception | None:
    """Save with torch and with us to what `make` gives; the errors are of one kind."""
    value = state() if value is None else value
    theirs, ours = (
        attempt(torch.save, value, make(), **options),
        attempt(save, value, make(), **options),
    )
    if theirs is None:
        assert ours is None, repr(ours)
    else:
        assert isinstance(ours, type(theirs)), (theirs, ours)
    return ours


def leftovers(folder: Path) -> list[str]:
    return [name for name in os.listdir(folder) if name.startswith(".")]


# Targets.


class Target:
    """What torch wants of a file object."""

    def __init__(self) -> None:
        self.content = b""
        self.flushed = 0

    def write(self, data: bytes | memoryview) -> int | None:
        self.content += bytes(data)
        return len(data)

    def flush(self) -> None:
        self.flushed += 1


class Silent(Target):
    def write(self, data: bytes | memoryview) -> None:
        super().write(data)


class Short(Target):
    """Takes less than it is given, and says so."""

    def write(self, data: bytes | memoryview) -> int:
        return super().write(data[:1000])


@pytest.mark.parametrize("kind", [Target, Silent, Short])
@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])
def test_file_objects(kind: type[Target], zipped: bool):
    value = {"w": torch.arange(3000.0)}
    file, target = io.BytesIO(), kind()
    torch.save(value, file, _use_new_zipfile_serialization=zipped)
    save(value, target, _use_new_zipfile_serialization=zipped)
    assert target.content == file.getvalue()
    assert target.flushed


def test_a_write_is_enough():
    class Bare:
        content = b""

        def write(self, data: bytes | memoryview) -> None:
            self.content += bytes(data)

    target = Bare()
    save(state(), target)  # torch wants a `flush` as well
    assert target.content == expected()


def test_a_buffer_is_written_where_it_stands():
    for function in (torch.save, save):
        file = io.BytesIO(b"before")
        file.seek(0, io.SEEK_END)
        function(state(), file)
        assert file.getvalue() == b"before" + expected()
        file.seek(6)
        assert load(file)["step"] == 3


@pytest.mark.parametrize("buffering", [0, -1])
def test_an_open_file(buffering: int, tmp_path: Path):
    with open(tmp_path / "model.pt", "wb", buffering=buffering) as file:
        save(state(), file)
        assert (tmp_path / "model.pt").read_bytes() == expected(), "flushed"


@pytest.mark.parametrize("kind", [str, Path, "PathLike"])
def test_paths(
    kind: Callable[[object], object] | str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)  # an old torch takes the text of a path-like object for its name

    class Pathlike(os.PathLike[str]):
        def __init__(self, path: object) -> None:
            self._path = str(path)

        def __fspath__(self) -> str:
            return self._path

    make = Pathlike if kind == "PathLike" else kind
    assert both(lambda: make(tmp_path / "model.pt")) is None
    assert torch.load(tmp_path / "model.pt")["step"] == 3
    assert leftovers(tmp_path) == []


def test_a_relative_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    save(state(), "model.pt")
    assert torch.load(tmp_path / "model.pt")["step"] == 3
    assert both(lambda: "absent/model.pt").args[0] == "Parent directory absent does not exist."


def test_what_is_no_target(tmp_path: Path):
    class NotCallable:
        write = 5

    for what in (None, 5, object(), b"model.pt"):
        error = both(lambda what=what: what)
        assert isinstance(error, AttributeError)
        assert (
            "expected 'f' to be string, path, or a file-like object with a 'write' attribute"
            in str(error)
        )
    error = both(NotCallable)
    assert isinstance(error, TypeError)
    assert "has no callable attribute 'write'" in str(error)
    assert isinstance(both(io.StringIO), TypeError)
    closed = io.BytesIO()
    closed.close()
    assert isinstance(both(lambda: closed), ValueError)
    (tmp_path / "file").write_bytes(b"x")
    with (tmp_path / "file").open("rb") as file:
        assert isinstance(both(lambda: file), io.UnsupportedOperation)


def test_paths_that_cannot_be_saved_to(tmp_path: Path):
    (tmp_path / "file").write_bytes(b"old")
    os.symlink("circle.pt", tmp_path / "circle.pt")
    for path in (
        tmp_path / "absent" / "model.pt",
        tmp_path / "file" / "model.pt",
        tmp_path,
        f"{tmp_path}/",
        "",
        tmp_path / ".pt",
        tmp_path / ("n" * 300 + ".pt"),
        tmp_path / "circle.pt",
    ):
        error = both(lambda path=path: path)
        assert isinstance(error, Refused | NotSaved), path
    assert str(both(lambda: tmp_path / "absent" / "m.pt")).startswith(
        f"Parent directory {tmp_path / 'absent'} does not exist."
    )
    assert "invalid file name" in str(both(lambda: tmp_path / ".pt"))
    assert (tmp_path / "file").read_bytes() == b"old"
    assert leftovers(tmp_path) == []


def test_a_null_in_a_path(tmp_path: Path):
    with pytest.raises(ValueError, match="null"):
        save(state(), f"{tmp_path}/model\0.pt")  # torch writes a file `model`
    assert os.listdir(tmp_path) == []


def test_a_read_only_file(tmp_path: Path):
    path = tmp_path / "model.pt"
    path.write_bytes(b"old")
    path.chmod(0o444)
    with pytest.raises(NotSaved, match="read-only") as caught:
        save(state(), path)
    assert isinstance(caught.value, RuntimeError | NotCommitted)
    assert path.read_bytes() == b"old"
    if os.geteuid():
        assert isinstance(attempt(torch.save, state(), path), RuntimeError)


def test_devices_and_pipes(tmp_path: Path):
    assert both(lambda: "/dev/null") is None
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)
    with pytest.raises(OSError, match="") as caught:
        save(state(), "/dev/full")
    assert caught.value.errno == errno.ENOSPC
    os.mkfifo(tmp_path / "archive.pt")
    read: list[bytes] = []
    thread = threading.Thread(target=lambda: read.append((tmp_path / "archive.pt").read_bytes()))
    thread.start()
    save(state(), tmp_path / "archive.pt")
    thread.join()
    assert read == [expected()]
    assert stat.S_ISFIFO(os.stat(tmp_path / "archive.pt").st_mode)


@pytest.mark.parametrize("dangling", [False, True])
def test_a_link_stays_a_link(dangling: bool, tmp_path: Path):
    (tmp_path / "there").mkdir()
    real, link = tmp_path / "there" / "real.pt", tmp_path / "link.pt"
    if not dangling:
        real.write_bytes(b"old")
    link.symlink_to(Path("there") / "real.pt")
    assert both(lambda: link) is None
    assert os.readlink(link) == "there/real.pt"
    assert torch.load(real)["step"] == 3
    assert leftovers(tmp_path) == leftovers(tmp_path / "there") == []


def test_permissions(tmp_path: Path):
    path = tmp_path / "model.pt"
    path.write_bytes(b"old")
    for mode in (0o600, 0o640, 0o666):
        path.chmod(mode)
        save(state(), path)
        assert stat.S_IMODE(path.stat().st_mode) == mode
    before = os.umask(0o027)
    try:
        for function, name in ((torch.save, "theirs.pt"), (save, "ours.pt")):
            function(state(), tmp_path / name)
            assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o640
    finally:
        os.umask(before)


# What is refused.


class Unpicklable:
    def __reduce__(self) -> object:
        raise KeyError("no")


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])
@pytest.mark.parametrize("bad", [lambda: 0, Unpicklable()], ids=["lambda", "reduce"])
def test_a_failure_leaves_the_old_file(bad: object, zipped: bool, tmp_path: Path):
    path = tmp_path / "model.pt"
    save(state(), path)
    before = path.read_bytes()
    value = {"large": torch.ones(100_000), "bad": bad}
    error = attempt(save, value, path, _use_new_zipfile_serialization=zipped)
    assert path.read_bytes() == before
    assert leftovers(tmp_path) == []
    assert type(attempt(torch.save, value, path, _use_new_zipfile_serialization=zipped)) is type(
        error
    )
    assert path.read_bytes() != before, "torch has cut the old one off by then"


def test_a_full_disk_leaves_the_old_file(tmp_path: Path):
    """A file larger than the process may write."""
    import resource

    path = tmp_path / "model.pt"
    save(state(), path)
    before, limits = path.read_bytes(), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    try:
        with pytest.raises(NotSaved) as caught:
            save({"w": torch.ones(1 << 20)}, path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert isinstance(caught.value, RuntimeError)
    assert path.read_bytes() == before
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])
def test_one_storage_under_two_dtypes(zipped: bool):
    tensor = torch.ones(4)
    for value in ([tensor, tensor.view(torch.int32)], {"w": tensor, "s": tensor.untyped_storage()}):
        error = both(io.BytesIO, value, _use_new_zipfile_serialization=zipped)
        assert isinstance(error, RuntimeError)
        assert (
            "Cannot save multiple tensors or storages that view the same data as different types"
            in str(error)
        )


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])
@pytest.mark.parametrize("shape", [(3,), (0,)], ids=["filled", "empty"])
def test_a_zero_tensor_is_refused_in_torchs_words(shape: tuple[int, ...], zipped: bool):
    zero = torch._efficientzerotensor(shape)
    for value in (zero, {"w": torch.ones(2), "z": zero}, nn.Parameter(zero)):
        error = both(io.BytesIO, value, _use_new_zipfile_serialization=zipped)
        assert isinstance(error, RuntimeError)
        assert "ZeroTensor is not serializable" in str(error)


def test_arguments(tmp_path: Path):
    assert isinstance(both(io.BytesIO, pickle_protocol=6), ValueError)
    assert isinstance(both(io.BytesIO, pickle_protocol="2"), TypeError)
    assert isinstance(both(io.BytesIO, pickle_module=types.ModuleType("nothing")), AttributeError)
    dill = types.ModuleType("dill")
    dill.__version__ = "0.3.0"
    assert "supports dill >= 0.3.1" in str(both(io.BytesIO, pickle_module=dill))
    with torch.serialization.skip_data():
        error = both(io.BytesIO, _use_new_zipfile_serialization=False)
        assert "Cannot use skip_data=True with _use_new_zipfile_serialization=False" in str(error)
    assert isinstance(
        both(io.BytesIO, torch.empty(3, dtype=torch.uint8).view(torch.uint4)), KeyError
    )


def test_a_pickler_of_ones_own():
    """A subclass that decides about some objects itself is asked first."""
    module = types.ModuleType("choosy")

    class Pickler(pickle.Pickler):
        def reducer_override(self, obj: object) -> object:
            return (str, ("replaced",)) if obj is marker else NotImplemented

    marker = object()
    module.Pickler = Pickler
    for function in (torch.save, save):
        file = io.BytesIO()
        function({"marker": marker, "t": torch.ones(2)}, file, pickle_module=module)
        file.seek(0)
        assert load(file, weights_only=False)["marker"] == "replaced"


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])
@pytest.mark.parametrize("base", [pickle.Pickler, pickle._Pickler], ids=["c", "python"])
def test_torchs_ids_come_before_those_of_the_modules_own_pickler(base: type, zipped: bool):
    module = types.ModuleType("own_ids")

    class Pickler(base):
        def persistent_id(self, obj: object) -> object:
            return "mine" if isinstance(obj, torch.UntypedStorage | torch.TypedStorage) else None

    module.Pickler, module.dumps, module.dump = Pickler, pickle.dumps, pickle.dump
    value = {"w": torch.ones(2)}
    files = []
    for function in (torch.save, save):
        file = io.BytesIO()
        function(value, file, pickle_module=module, _use_new_zipfile_serialization=zipped)
        files.append(file.getvalue())
    theirs, ours = files
    assert len(ours) == len(theirs)
    assert torch.equal(torch.load(io.BytesIO(ours))["w"], value["w"])


def test_a_pickler_that_replaces_pickles_own_is_used_while_it_does(
    monkeypatch: pytest.MonkeyPatch,
):
    marker = object()

    class Pickler(pickle.Pickler):
        def persistent_id(self, obj: object) -> object:
            raise AssertionError("torch's ids come first")

        def reducer_override(self, obj: object) -> object:
            return (str, ("replaced",)) if obj is marker else NotImplemented

    file = io.BytesIO()
    with monkeypatch.context() as patch:
        patch.setattr(pickle, "Pickler", Pickler)
        save({"marker": marker, "w": torch.ones(2)}, file)
    loaded = torch.load(io.BytesIO(file.getvalue()), weights_only=False)
    assert loaded["marker"] == "replaced"
    assert torch.equal(loaded["w"], torch.ones(2))


# While others look.


@pytest.mark.parametrize("mapped", [False, True])
def test_over_a_file_that_is_mapped(mapped: bool, tmp_path: Path):
    """torch cuts the file off under the mapping, and the next look at a tensor ends the process."""
    path = tmp_path / "model.pt"
    old = torch.arange(1_000_000.0)
    save({"w": old}, path)
    made = load(path, mmap=True)
    save({"w": made["w"]} if mapped else {"w": old + 1}, path)
    assert torch.equal(made["w"], old)
    assert torch.equal(load(path)["w"], old if mapped else old + 1)


@pytest.mark.parametrize("durable", [True, False])
def test_durable(durable: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    flushed: list[int] = []
    real = os.fsync
    monkeypatch.setattr(
        os, "fsync", lambda descriptor: flushed.append(descriptor) or real(descriptor)
    )
    save(state(), tmp_path / "model.pt", durable=durable)
    assert bool(flushed) == durable
    assert torch.load(tmp_path / "model.pt")["step"] == 3


def test_threads(tmp_path: Path):
    """Saves to one name: each of them whole, the last one stays."""
    path = tmp_path / "model.pt"
    failed: list[Exception] = []

    def work(number: int) -> None:
        for _ in range(5):
            error = attempt(save, {"w": torch.full((10_000,), number)}, path, durable=False)
            if error is not None:
                failed.append(error)

    run_in_threads(work, range(4))
    assert failed == []
    assert len(load(path)["w"].unique()) == 1
    assert leftovers(tmp_path) == []


# The surface.


def test_every_name_of_torchs_is_here():
    ours = holdfast.torch.serialization
    assert set(torch.serialization.__all__) <= set(ours.__all__)
    assert all(hasattr(ours, name) for name in ours.__all__)


@pytest.mark.parametrize("name", torch.serialization.__all__)
def test_signatures_begin_as_torchs(name: str):
    theirs, ours = getattr(torch.serialization, name), getattr(holdfast.torch.serialization, name)
    if ours is theirs:
        return
    wanted, found = (list(inspect.signature(each).parameters.values()) for each in (theirs, ours))
    ours_alone = {"durable": True, "verify": True, "max_host_memory": None}
    extra = [p for p in found if p.name in ours_alone]
    assert all(p.kind is p.KEYWORD_ONLY and p.default is ours_alone[p.name] for p in extra)
    assert [(p.name, p.kind, p.default) for p in found if p not in extra] == [
        (p.name, p.kind, p.default) for p in wanted
    ]
