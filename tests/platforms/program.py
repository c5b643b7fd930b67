"""What is done on a simulated system: `python -m tests.platforms.program SYSTEM STEP FOLDER`.

A step prints what it found as one JSON document: what must be the same on every system. What a system does in its own way is
asserted in the step. Nothing here imports torch: this is about the light package.
"""

# ruff: noqa: E402

from __future__ import annotations

# All that Holdfast imports from elsewhere, before the system changes: it is Holdfast that is tried.
import argparse
import concurrent.futures
import contextlib
import decimal
import fractions
import hashlib
import io
import json
import logging
import multiprocessing.util
import os
import pickle
import secrets
import shutil
import sys
import tempfile
import threading
import uuid
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import PurePath

import isal.isal_zlib
import ml_dtypes
import msgspec.json
import numpy as np
import numpy.lib.format
import rich.console
import rich.progress

from tests.platforms.systems import become, fork, real, shown, synced

OTHERS = (
    argparse,
    concurrent.futures,
    decimal,
    fractions,
    isal,
    logging,
    ml_dtypes,
    msgspec,
    multiprocessing,
    numpy,
    pickle,
    rich,
)
OTHERS += (secrets, shutil, tempfile, uuid, zipfile)

become(sys.argv[1])

import holdfast
from holdfast.cli.main import main
from holdfast.core.tensor import LazyTensor
from holdfast.engine.commit.transactions import DirectoryTransaction, FileTransaction
from holdfast.errors import HoldfastError, NotCommitted, Replaced
from holdfast.stores.files import Files, PathFiles, system_files
from holdfast.stores.local import DescriptorStore

SYSTEM = sys.argv[1]
WINDOWS = SYSTEM == "win32"
GOLDEN = os.path.join(
    os.path.dirname(os.path.dirname(os.path.abspath(shown(__file__) if WINDOWS else __file__))),
    "golden",
    "files",
)
LEFT = (".tmp", ".old", ".lock")


def digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=8).hexdigest()


def file_digest(path: str) -> str:
    with open(path, "rb") as file:
        return digest(file.read())


def tree(folder: str) -> dict[str, str]:
    """Every file below a folder, and its bytes."""
    found = {}
    for name in sorted(os.listdir(folder)):
        path = os.path.join(folder, name)
        found |= (
            {f"{name}/{key}": value for key, value in tree(path).items()}
            if os.path.isdir(path)
            else {name: file_digest(path)}
        )
    return found


def state(seed: int = 0) -> dict[str, object]:
    random = np.random.default_rng(seed)
    weights = random.standard_normal((64, 48)).astype(np.float32)
    return {
        "model": {
            "embed": weights,
            "head": weights,
            "norm": random.standard_normal(48).astype(ml_dtypes.bfloat16),
            "empty": np.zeros((0, 3), np.int64),
        },
        "step": seed,
        "notes": ["a\nb", "größer"],
    }


LONG = 1200
"""Rows of tensors that are too long for one write."""


def tensors(seed: int = 0, rows: int = 40) -> dict[str, np.ndarray]:
    return {
        f"layers.{i}.weight": np.random.default_rng(seed * 100 + i)
        .standard_normal((rows, 32))
        .astype(np.float32)
        for i in range(4)
    }


def values(path: str) -> dict[str, str]:
    with holdfast.open(path) as checkpoint:
        return {
            name: digest(tensor.numpy().tobytes()) for name, tensor in sorted(checkpoint.items())
        }


def expected(seed: int = 0, rows: int = 40) -> dict[str, str]:
    return {name: digest(array.tobytes()) for name, array in tensors(seed, rows).items()}


def run(*arguments: str) -> tuple[int, str]:
    """The command line: its exit code, and what it says without where it was."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(list(arguments))
    said = (
        (out.getvalue() + err.getvalue())
        .replace("\\\\", "/")
        .replace("\\", "/")
        .replace("file:///C:", "file://")
        .replace("C:", "")
    )
    return code, said.replace(real(os.getcwd()) + "/", "")


def formats(folder: str) -> dict[str, object]:
    """Every golden file, whole and in slices, from a path, memory and a file object, mapped or not."""
    found: dict[str, object] = {}
    for name in sorted(os.listdir(GOLDEN)):
        path = os.path.join(GOLDEN, name)
        with holdfast.open(path) as checkpoint, holdfast.open(path, mmap=True) as mapped:
            parts = {}
            for key, tensor in checkpoint.items():
                try:
                    whole = tensor.numpy()
                except HoldfastError as error:
                    parts[key] = type(error).__name__
                    continue
                some = (
                    tensor[tuple(slice(n // 3, None, 2) for n in tensor.shape)].numpy()
                    if tensor.shape
                    else whole
                )
                assert np.array_equal(
                    np.ascontiguousarray(mapped[key].numpy()).view(np.uint8),
                    np.ascontiguousarray(whole).view(np.uint8),
                )
                parts[key] = digest(whole.tobytes()) + digest(some.tobytes())
            found[name] = [checkpoint.format, parts]
        if os.path.isfile(path):
            with open(path, "rb") as file:
                position = file.seek(3)
                with holdfast.open(file) as checkpoint:
                    assert sorted(checkpoint) == sorted(parts)
                assert file.tell() == position
                file.seek(0)
                with holdfast.open(file.read()) as checkpoint:
                    assert sorted(checkpoint) == sorted(parts)
    return found


def writers(folder: str) -> dict[str, object]:
    """Every writer, first into nothing and then over what is there; what is written is the same everywhere, to the byte."""
    found: dict[str, object] = {}
    for name, options in {
        "model.pt": {},
        "model.safetensors": {},
        "native": {},
        "split": {"format": "safetensors", "max_shard_size": 8_000},
        "packed": {"format": "native"},
    }.items():
        path = os.path.join(folder, name)
        content = state if name in ("model.pt", "native") else tensors
        holdfast.save(content(1), path, **options)
        if os.path.isdir(path):
            for browsed in (".DS_Store", "Thumbs.db"):
                with open(os.path.join(path, browsed), "wb") as file:
                    file.write(b"what somebody saw")
        holdfast.save(content(2), path, overwrite=True, **options)
        found[name] = file_digest(path) if os.path.isfile(path) else tree(path)
        assert "overwrite" in refused(
            partial(holdfast.save, content(3), path, overwrite=False, **options)
        )
    if SYSTEM != "linux":
        assert synced, "nothing was synced"
    holdfast.save(tensors(), os.path.join(folder, "unsynced.pt"), durable=False)
    holdfast.convert(os.path.join(folder, "model.pt"), os.path.join(folder, "again"), resume=True)
    holdfast.convert(
        os.path.join(folder, "split"), os.path.join(folder, "half.safetensors"), dtype="bf16"
    )
    holdfast.edit(
        os.path.join(folder, "half.safetensors"), in_place=True, rename=[("layers.*", "blocks.*")]
    )
    holdfast.edit(os.path.join(folder, "native"), in_place=True, drop=["model.norm"])
    holdfast.prune(
        os.path.join(folder, "split"),
        os.path.join(folder, "pruned"),
        rules=["*.weight: 2:4"],
        masks="beside",
    )
    holdfast.prune(
        os.path.join(folder, "split"),
        os.path.join(folder, "pruned"),
        rules=["*.weight: 0.5"],
        overwrite=True,
    )
    for name in ("again", "half.safetensors", "native", "pruned", "split"):
        assert holdfast.verify(os.path.join(folder, name)).ok, name
        found[f"{name}, then"] = values(os.path.join(folder, name))
    found["all"] = tree(folder)
    return found


def commands(folder: str) -> dict[str, object]:
    """The command line, with paths in the words of the system."""
    os.makedirs(os.path.join(folder, "sub"))
    a, b, c = (
        os.path.join(folder, name) for name in ("a.pt", "sub" + os.sep + "b.safetensors", "native")
    )
    npy, npz = os.path.join(folder, "w.npy"), os.path.join(folder, "w.npz")
    holdfast.save(state(1), a)
    holdfast.save(tensors(2), b)
    found = [
        run("show", a), run("show", b, "--json"), run("show", os.path.join(GOLDEN, "dcp")),
        run("read", a, "model.embed", "--slice", "0:2, :4"), run("read", b, "layers.0.weight", "-o", npy),
        run("read", b, "layers.*", "-o", npz), run("convert", b, c, "-q"), run("convert", b, c, "-q"),
        run("convert", a, c, "-q", "--overwrite"), run("verify", a, b, c, "-q"),
        run("convert", b, os.path.join(folder, "split") + os.sep, "-q", "--max-shard-size", "8000"),
        run("diff", a, c, "-q"), run("diff", a, b, "-q"), run("edit", b, "--in-place", "--drop", "layers.1.*", "-q"),
        run("prune", b, os.path.join(folder, "p.safetensors"), "--rule", "*: 2:4", "-q"), run("stats", b, "-q", "--bins", "4"),
        run("scan", folder), run("scan", a, "--sarif"), run("show", os.path.join(folder, "none.pt")), run("show", "hf://bucket/x"),
    ]  # fmt: skip
    with np.load(npz) as arrays:
        assert {name: digest(arrays[name].tobytes()) for name in arrays} == expected(2)
    os.unlink(npz)  # a zip says on which system it was made
    return {"said": found, "files": tree(folder)}


def replaced(folder: str) -> dict[str, object]:
    """A checkpoint is replaced while it is open: the reader goes on with the old one, or says that it is gone."""
    for name in ("one.safetensors", "many"):
        path = os.path.join(folder, name)
        options = {} if name.endswith("safetensors") else {"format": "native"}
        holdfast.save(tensors(1), path, **options)
        with holdfast.open(path) as old:
            for tensor in old.values():
                tensor.numpy()
            holdfast.save(tensors(2), path, overwrite=True, **options)
            try:
                assert {
                    key: digest(tensor.numpy().tobytes()) for key, tensor in old.items()
                } == expected(1)
                assert not WINDOWS
            except Replaced:
                assert WINDOWS
        assert values(path) == expected(2)
        with holdfast.open(path, mmap=True) as held:
            arrays = [tensor.numpy() for tensor in held.values()]
            if WINDOWS:
                assert "a program has open" in refused(
                    partial(holdfast.save, tensors(3), path, overwrite=True, **options)
                )
            else:
                holdfast.save(tensors(3), path, overwrite=True, **options)
            assert {
                key: digest(array.tobytes()) for key, array in zip(held, arrays, strict=True)
            } == expected(2)
        assert values(path) == expected(2 if WINDOWS else 3)
    return left(folder)


def positions(folder: str) -> dict[str, object]:
    """Stores over one open file, and many threads: each gets its own bytes, and the file stays where it stood."""
    path = os.path.join(folder, "bytes")
    content = np.random.default_rng(0).integers(0, 256, 4_000_000, np.uint8).tobytes()
    with open(path, "wb") as file:
        file.write(content)
    with open(path, "rb") as file:
        file.seek(12_345)
        stores = [DescriptorStore(file.fileno()) for _ in range(2)]
        wrong = []

        def read(number: int) -> None:
            out = bytearray(2_000_000)
            for start in range(number, 1_000_000, 99_991):
                stores[number % 2].read(DescriptorStore.KEY, start, memoryview(out))
                if out != content[start : start + len(out)]:
                    wrong.append((number, start))

        threads = [threading.Thread(target=read, args=(number,)) for number in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong, wrong
        assert file.tell() == 12_345
    with FileTransaction(os.path.join(folder, "copy")) as single:

        def write(number: int) -> None:
            for start in range(number * 1_000, len(content), 6_000):
                single.file.write(start, content[start : start + 1_000])

        threads = [threading.Thread(target=write, args=(number,)) for number in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        single.commit()
    return tree(folder)


def refused(call: Callable[[], object]) -> str:
    """What an `OSError` says that must come."""
    try:
        call()
    except OSError as error:
        return str(error)
    raise AssertionError("it was done")


def left(folder: str) -> dict[str, object]:
    return {"left": [name for name in sorted(os.listdir(folder)) if name.endswith(LEFT)]}


def leftovers(folder: str) -> dict[str, object]:
    """What dead processes left is removed; what a live one holds is not."""
    path, many = os.path.join(folder, "model.pt"), os.path.join(folder, "many")
    dead = [".model.pt.0123456789abcdef.tmp", ".holdfast.0123456789abcdef.lock"]
    with FileTransaction(path) as one, DirectoryTransaction(many) as two:
        one.file.write(0, b"live")
        two.create("x.safetensors").write(0, b"live")
        for name in dead:
            with open(os.path.join(folder, name), "wb") as file:
                file.write(b"dead")
        os.mkdir(os.path.join(folder, ".many.0123456789abcdef.tmp"))
        with open(os.path.join(folder, ".many.0123456789abcdef.tmp", "x"), "wb") as file:
            file.write(b"dead")
        holdfast.save(tensors(1), path)
        holdfast.save(tensors(1), many, format="native")
        names = os.listdir(folder)
        assert dead[0] not in names
        assert ".many.0123456789abcdef.tmp" not in names
        assert not WINDOWS or dead[1] not in names
        assert sum(name.endswith(".tmp") for name in names) == 2, names
        one.commit()
        assert "exists" in refused(two.commit)
    if not WINDOWS:
        os.unlink(os.path.join(folder, dead[1]))
    assert file_digest(path) == digest(b"live")
    assert values(many) == expected(1)
    return left(folder)


def hold(folder: str) -> dict[str, object]:
    """Save, and wait in the middle of it until somebody ends this process."""
    with (
        DirectoryTransaction(os.path.join(folder, "many")) as many,
        FileTransaction(os.path.join(folder, "model.pt")) as single,
    ):
        many.create("x.safetensors").write(0, b"half")
        single.file.write(0, b"half")
        print("holding", flush=True)
        sys.stdin.read()
    return {}


def beside(folder: str) -> dict[str, object]:
    """Save where another process saves: its temporaries stay."""
    holdfast.save(tensors(1), os.path.join(folder, "model.pt"))
    holdfast.save(tensors(1), os.path.join(folder, "many"), format="native")
    return {"temporaries": sum(name.endswith(".tmp") for name in os.listdir(folder))}


def after(folder: str) -> dict[str, object]:
    """Save where another process died."""
    holdfast.save(tensors(2), os.path.join(folder, "model.pt"), overwrite=True)
    holdfast.save(tensors(2), os.path.join(folder, "many"), format="native", overwrite=True)
    assert (
        values(os.path.join(folder, "model.pt"))
        == values(os.path.join(folder, "many"))
        == expected(2)
    )
    return left(folder)


class Broken:
    """The calls of `os` that change something, of which one fails."""

    NAMES = (
        "open",
        "mkdir",
        "rmdir",
        "unlink",
        "rename",
        "replace",
        "link",
        "fsync",
        "write",
        "pwrite",
        "ftruncate",
    )

    def __init__(self, number: int, *, ends: bool) -> None:
        self.number, self.ends, self.count = number, ends, 0

    def __enter__(self) -> Broken:
        self._before = {name: getattr(os, name) for name in self.NAMES if hasattr(os, name)}
        for name, call in self._before.items():
            setattr(os, name, self._broken(call))
        return self

    def _broken(self, call: Callable[..., object]) -> Callable[..., object]:
        def broken(*args: object, **options: object) -> object:
            self.count += 1
            if self.count == self.number:
                if self.ends:
                    os._exit(7)
                raise OSError(5, "Input/output error")
            return call(*args, **options)

        return broken

    def __exit__(self, *error: object) -> None:
        for name, call in self._before.items():
            setattr(os, name, call)


def failures(folder: str) -> dict[str, object]:
    """Whichever call fails: what is there is the old or the new, as the error says, and the next save leaves nothing else."""
    for name, options in (("model.pt", {}), ("many", {"format": "native"})):
        path = os.path.join(folder, name)
        for number in range(1, 200):
            holdfast.save(tensors(1, LONG), path, overwrite=True, **options)
            with Broken(number, ends=False) as broken:
                try:
                    holdfast.save(tensors(2, LONG), path, overwrite=True, **options)
                    told = 2
                except NotCommitted:
                    told = 1
                except HoldfastError:
                    told = 0
            if broken.count < number:
                break
            there = values(path)
            assert there in (
                [expected(told, LONG)] if told else [expected(1, LONG), expected(2, LONG)]
            ), (name, number, told)
        assert number > 6, f"{name} took {number} calls"
        holdfast.save(tensors(3, LONG), path, overwrite=True, **options)
        assert values(path) == expected(3, LONG)
    return left(folder)


def crashes(folder: str) -> dict[str, object]:
    """Whichever call is the last of a process: what is there is the old or the new, and the next save leaves nothing else."""
    found = set()
    for name, options in (("model.pt", {}), ("many", {"format": "native"})):
        path = os.path.join(folder, name)
        for number in range(1, 200):
            holdfast.save(tensors(1, LONG), path, overwrite=True, **options)
            child = fork()
            if not child:
                with Broken(number, ends=True):
                    holdfast.save(tensors(2, LONG), path, overwrite=True, **options)
                os._exit(0)
            _, status = os.waitpid(child, 0)
            there = values(path)
            assert there in (expected(1, LONG), expected(2, LONG)), (name, number)
            found.add((name, there == expected(2, LONG)))
            holdfast.save(tensors(3, LONG), path, overwrite=True, **options)
            assert values(path) == expected(3, LONG)
            assert not left(folder)["left"], (name, number, left(folder))
            if not os.WEXITSTATUS(status):
                break
        assert number > 6, f"{name} took {number} calls"
    return {"found": sorted(found)}


def runs(folder: str) -> dict[str, object]:
    """A run: rules, pins, a second writer, a torn step, what a dead process left."""
    path = os.path.join(folder, "run")
    with holdfast.Run(path, keep=["latest:2", "best:loss:1"]) as run:
        for step in range(1, 6):
            run.save(step, tensors(step), metrics={"loss": abs(step - 2)})
            if step == 3:
                run.pin(1 if 1 in run else 2, "paper")
        second = refused(lambda: holdfast.Run(path).save(9, tensors(9)))
        assert "has another Run open" in second, second
        kept = [one.step for one in run]
    data = next(
        name for name in os.listdir(os.path.join(path, "step-00000005")) if name.startswith("data-")
    )
    with open(os.path.join(path, "step-00000005", data), "r+b") as file:
        file.truncate(9)
    os.makedirs(os.path.join(path, ".deleted~step-00000009.0123456789abcdef.tmp", "inner"))
    with holdfast.Run(path, keep="latest:1") as run:
        newest = run.latest().step
        run.save(6, tensors(6))
        run.save(5, tensors(5))
        after = [one.step for one in run]
        read = values(run.latest().path) == expected(6)
    return {
        "kept": kept,
        "newest": newest,
        "after": after,
        "read": read,
        "names": sorted(os.listdir(path)),
    }


def sealed(folder: str) -> dict[str, object]:
    """A folder of another trainer: its seal, and what verify finds."""
    path = os.path.join(folder, "step-7")
    os.makedirs(os.path.join(path, "sub"))
    holdfast.save(tensors(1), os.path.join(path, "model.safetensors"))
    with open(os.path.join(path, "sub", "rng.txt"), "wb") as file:
        file.write(b"random\n")
    done = holdfast.seal(path)
    assert os.path.exists(done.seal)
    told: dict[str, object] = {
        "step": done.step,
        "files": done.files,
        "ok": holdfast.verify(path).ok,
    }
    told["again"] = type(refusal_of(lambda: holdfast.seal(path))).__name__
    with open(os.path.join(path, "sub", "rng.txt"), "ab") as file:
        file.write(b"more")
    told["damaged"] = [problem.message for problem in holdfast.verify(path).problems]
    single = os.path.join(folder, "last.pt")
    holdfast.save(tensors(1), single)
    told["single"] = holdfast.seal(single, step=3).files
    told["verified"] = holdfast.verify(single).ok
    return told


def refusal_of(call: Callable[[], object]) -> HoldfastError | None:
    try:
        call()
    except HoldfastError as error:
        return error
    return None


def odd(folder: str) -> dict[str, object]:
    """What differs by design, told as it should be."""
    assert isinstance(system_files(), PathFiles if WINDOWS else Files)
    assert isinstance(holdfast.open(os.path.join(GOLDEN, "plain.pt")).path, str)
    path = os.path.join(folder, "model.pt")
    holdfast.save(tensors(1), PurePath(path))
    if WINDOWS:
        with open(path, "rb"):
            assert "a program has open" in refused(lambda: holdfast.save(tensors(2), path))
        assert values(path) == expected(1)
        assert values(path.replace("\\", "/")) == values(path[2:]) == expected(1)
        os.mkdir(os.path.join(folder, "at"))
        number = system_files().open_directory(os.path.join(folder, "at"))
        os.rename(os.path.join(folder, "at"), os.path.join(folder, "elsewhere"))
        os.mkdir(os.path.join(folder, "at"))
        assert "moved or replaced" in refused(lambda: system_files().create("x", dir_fd=number))
    return left(folder)


STEPS: dict[str, Callable[[str], dict[str, object]]] = {
    step.__name__: step
    for step in (
        *(
            formats,
            writers,
            commands,
            replaced,
            positions,
            leftovers,
            hold,
            beside,
            after,
            failures,
            crashes,
            sealed,
            runs,
            odd,
        ),
    )
}

if __name__ == "__main__":
    assert "torch" not in sys.modules
    assert issubclass(LazyTensor, object)
    where = shown(sys.argv[-1]) if WINDOWS else sys.argv[-1]
    result = {}
    for step in sys.argv[2].split(","):
        inner = os.path.join(where, step) if "," in sys.argv[2] else where
        os.makedirs(inner, exist_ok=True)
        result[step] = STEPS[step](inner)
    print(json.dumps(result))
