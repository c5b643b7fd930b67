"""Every writer that the proofs are run on. A new format joins by one line in `LIBRARY`.

A writer saves a numbered version of some state and, given a path, says which version is there. `read` checks everything (lengths,
checksums, every byte) and raises whatever it likes where that is not exactly one of the versions. The state should be a few blocks
of 4096 bytes long, so that there is something to tear, and must depend on the version in its first and in its last byte.
"""

from __future__ import annotations

import json
import os
import tempfile
import zlib
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import torch

import holdfast
from holdfast.core.value import replace
from holdfast.engine.commit.transactions import DirectoryTransaction, FileTransaction
from holdfast.engine.saves import SavePlan
from holdfast.engine.source import OpenSource
from holdfast.extras.packages.pt2.write import lay_out_pt2, models_of
from holdfast.stores.files import Files
from holdfast.stores.memory import MemoryStore
from holdfast.torch.serialization.saving import plan_object
from holdfast.verbs.seals.check import check_digests, read_seal
from holdfast.verbs.seals.document import SEAL, Stamp, with_seal
from holdfast.verbs.shared.base import open_base
from holdfast.verbs.shared.formats import LayoutOptions, plan_save, resolve_format
from holdfast.verbs.shared.planned import Writing, write_plan
from holdfast.verbs.shared.side_files import SideFiles
from holdfast.verbs.shared.state import make_lazy_tree, tabulate_state
from tests.crash.model import ELSEWHERE, ROOT, Model, Tree

BLOCK = 3_000
"""No multiple of a sector, so that writes meet in the middle of one."""


@dataclass(frozen=True)
class Writer:
    """How to save a version, and how to tell which one there is."""

    name: str
    directory: bool
    save: Callable[..., None]
    """`save(path, version, *, files, durable=True, overwrite=True)`; `files=None` is the real file system."""
    read: Callable[[Path], int]

    def __str__(self) -> str:
        return self.name


def payload(version: int, count: int = 4 * BLOCK) -> bytes:
    """Bytes that differ between versions everywhere."""
    stretch = bytes((i * 7 + version * 31) % 251 + 1 for i in range(256))
    return (stretch * (count // 256 + 1))[:count]


def put_file(
    path: str, data: bytes, *, files: Files | None, durable: bool = True, overwrite: bool = True
) -> None:
    """A file in blocks, the first one last: its place is known before its content is."""
    with FileTransaction(path, durable=durable, overwrite=overwrite, files=files) as t:
        t.file.allocate(len(data))
        for offset in reversed(range(0, len(data), BLOCK)):
            t.file.write(offset, data[offset : offset + BLOCK])
        t.commit()


def put_directory(
    path: str,
    data: dict[str, bytes],
    index: dict[str, bytes],
    *,
    files: Files | None,
    durable: bool = True,
    overwrite: bool = True,
) -> None:
    """Data files, then index files."""
    known = {*data, *index}
    with DirectoryTransaction(
        path, durable=durable, overwrite=overwrite, is_replaceable=known.__contains__, files=files
    ) as t:
        for key, content in data.items():
            file = t.create(key)
            file.allocate(len(content))
            for offset in range(0, len(content), BLOCK):
                file.write(offset, content[offset : offset + BLOCK])
        t.seal_data()
        for key, content in index.items():
            t.create(key).write(0, content)
        t.commit()


# A toy: one file that knows its own checksum.


def toy(version: int) -> bytes:
    body = b"version %d\n" % version + payload(version)
    return body + b"crc %08x\n" % zlib.crc32(body)


def save_toy(
    path: str, version: int, *, files: Files | None, durable: bool = True, overwrite: bool = True
) -> None:
    put_file(path, toy(version), files=files, durable=durable, overwrite=overwrite)


def read_toy(path: Path) -> int:
    data = path.read_bytes()
    body, line = data[:-13], data[-13:]
    assert line == b"crc %08x\n" % zlib.crc32(body), "the checksum does not match"
    version = int(body.split(b"\n", 1)[0].removeprefix(b"version "))
    assert data == toy(version), "not what was saved"
    return version


# A toy directory: an index with the checksums of two data files.


def toy_files(version: int) -> tuple[dict[str, bytes], dict[str, bytes]]:
    data = {"one": payload(version, 9_000), "two": payload(version + 1, 5_000)}
    return data, {
        "index": json.dumps(
            {"version": version, **{key: zlib.crc32(d) for key, d in data.items()}}
        ).encode()
    }


def save_toy_directory(
    path: str, version: int, *, files: Files | None, durable: bool = True, overwrite: bool = True
) -> None:
    put_directory(path, *toy_files(version), files=files, durable=durable, overwrite=overwrite)


def read_toy_directory(path: Path) -> int:
    version = int(json.loads((path / "index").read_bytes())["version"])
    data, index = toy_files(version)
    found = {inner.name: inner.read_bytes() for inner in path.iterdir()}
    assert found == data | index, "not what was saved"
    return version


# The writers of the library, as `holdfast.save` calls them.


def state(version: int) -> dict[str, object]:
    data = np.frombuffer(payload(version, 12_000), np.uint8)
    return {
        "w": data.view(np.float32).reshape(30, 100),
        "b": data[:5_000],
        "step": np.int64(version),
    }


def content(path: Path) -> bytes | Tree:
    return (
        {inner.name: inner.read_bytes() for inner in path.iterdir()}
        if path.is_dir()
        else path.read_bytes()
    )


def plan_of(path: str, version: int, format: str, split: int | None) -> SavePlan:
    if format == "torch.save":
        return plan_object(
            {key: torch.from_numpy(np.array(value)) for key, value in state(version).items()},
            Path(path).name,
        )
    if format == "pt2":
        weights = {key: np.asarray(value) for key, value in state(version).items()}
        return lay_out_pt2(models_of(make_lazy_tree(tabulate_state({"model": weights}))))
    options = LayoutOptions(split)
    described = tabulate_state({key: np.asarray(value) for key, value in state(version).items()})
    if format == "model":
        # The config is edited, because the weights it was about had another dtype; the tokenizer is copied.
        files = {
            "config.json": b'{"dtype": "float64"}' + b" " * version,
            "tokenizer.json": payload(version, 9_000),
        }
        side_files = SideFiles(dict.fromkeys(files, OpenSource(MemoryStore(files))), elsewhere=True)
        return side_files.add_to(
            plan_save(path, described, "safetensors-dir", options=options), {}
        )[0]
    return plan_save(path, described, resolve_format(path, format, options), options=options)


def writer_of(name: str, format: str, *, directory: bool, split: int | None = None) -> Writer:
    """A writer that saves `state(version)` in a format of the library and reads it back with `open`.

    Reading also compares every byte of every file: a directory opens without its Hugging Face index, too, and is then not what was
    saved. So a save must give the same bytes each time.
    """

    def save(
        path: str,
        version: int,
        *,
        files: Files | None,
        durable: bool = True,
        overwrite: bool = True,
    ) -> None:
        plan = plan_of(path, version, format, split)
        write_plan(
            plan, path, Writing(overwrite=overwrite, durable=durable, threads=1), files=files
        )

    def read(path: Path) -> int:
        with holdfast.open(path) as checkpoint:
            version = int(checkpoint["step"].numpy())
            expected = state(version)
            assert sorted(checkpoint) == sorted(expected)
            for key, value in expected.items():
                found = checkpoint[key].numpy()
                assert found.dtype == np.asarray(value).dtype
                assert found.tobytes() == np.asarray(value).tobytes()
        assert content(path) == saved(version), "not the files that were saved"
        return version

    @cache
    def saved(version: int) -> bytes | Tree:
        model = Model()
        save(f"{ROOT}/model", version, files=model)
        return model.live()["model"]

    return Writer(name, directory, save, read)


# A step that takes over a file of the step before it.

FROZEN = np.arange(5_000, dtype=np.float32)
BASE = "/base"
"""Where the model of a file system has the step before."""


@cache
def step_before() -> tempfile.TemporaryDirectory[str]:
    """A folder with the step before in it: more than half of its file did not change since."""
    folder = tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None)
    holdfast.save(state(0) | {"frozen": FROZEN}, f"{folder.name}/base", hashes=True, durable=False)
    ELSEWHERE[BASE] = content(Path(folder.name) / "base")
    return folder


def save_step(
    path: str, version: int, *, files: Files | None, durable: bool = True, overwrite: bool = True
) -> None:
    place = f"{step_before().name}/base"
    described = tabulate_state(
        {key: np.asarray(value) for key, value in state(version).items()} | {"frozen": FROZEN}
    )
    with closing(open_base(place, f"{place}-next", threads=1)) as opened:
        plan = plan_save(path, described, "native", options=LayoutOptions(base=opened))
    assert len(plan.linked) == 1
    if files is not None and not isinstance(files, Files):
        plan = replace(plan, linked=tuple(replace(file, folder=BASE) for file in plan.linked))
    write_plan(plan, path, Writing(overwrite=overwrite, durable=durable, threads=1), files=files)


def read_step(path: Path) -> int:
    with holdfast.open(path) as checkpoint:
        version = int(checkpoint["step"].numpy())
        for key, value in (state(version) | {"frozen": FROZEN}).items():
            assert checkpoint[key].numpy().tobytes() == np.asarray(value).tobytes()
    assert content(path) == saved_step(version), "not the files that were saved"
    return version


@cache
def saved_step(version: int) -> bytes | Tree:
    model = Model()
    save_step(f"{ROOT}/model", version, files=model)
    return model.live()["model"]


# A step of a run: its seal is one of its files.

STAMP = Stamp(5, 1.0, {"loss": 2.0})


def save_sealed(
    path: str, version: int, *, files: Files | None, durable: bool = True, overwrite: bool = True
) -> None:
    plan = with_seal(plan_of(path, version, "native", None), STAMP)
    write_plan(plan, path, Writing(overwrite=overwrite, durable=durable, threads=1), files=files)


def read_sealed(path: Path) -> int:
    seal = read_seal(path)
    assert seal is not None
    assert (seal.step, seal.saved, seal.metrics) == (STAMP.step, STAMP.saved, STAMP.metrics)
    assert {file.name for file in seal.files} == {*os.listdir(path)} - {SEAL}
    assert check_digests(path, seal) == []
    with holdfast.open(path) as checkpoint:
        version = int(checkpoint["step"].numpy())
        for key, value in state(version).items():
            assert checkpoint[key].numpy().tobytes() == np.asarray(value).tobytes()
    return version


TOYS = [
    Writer("toy", False, save_toy, read_toy),
    Writer("toy-directory", True, save_toy_directory, read_toy_directory),
]

LIBRARY = [
    writer_of("torch", "torch", directory=False),
    writer_of("torch.save", "torch.save", directory=False),
    writer_of("safetensors", "safetensors", directory=False),
    writer_of("split", "safetensors", directory=True, split=8_000),
    writer_of("native", "native", directory=True),
    writer_of("dcp", "dcp", directory=True, split=8_000),
    writer_of("pt2", "pt2", directory=False),
    Writer("step", True, save_step, read_step),
    Writer("sealed", True, save_sealed, read_sealed),
]

WRITERS = [*TOYS, *LIBRARY]

FOLDER = writer_of("model-folder", "model", directory=True)
"""What lies beside the weights of a Hugging Face folder is published with them. The calls are those of `native`, so only what a
crash leaves is looked at."""
