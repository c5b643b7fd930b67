"""Verbs that look, on ranks that are threads: all ranks get the report of one process, and each reads its share of the bytes."""

from __future__ import annotations

import argparse
import hashlib
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

import holdfast
from holdfast.cli.main import find_commands
from holdfast.core.documents import read_document, write_document
from holdfast.engine import checksums
from holdfast.stores import local
from tests.groups import on_ranks, raise_first_error
from tests.support import flip_bit

SIZES = [2, 3, 4]


def state(seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    large = {
        f"layers.{i}.weight": rng.standard_normal((96, 64 + 8 * i)).astype(np.float32)
        for i in range(12)
    }
    small = {f"small.{i}": rng.standard_normal(7).astype(np.float16) for i in range(100)}
    return (
        large
        | small
        | {"big": rng.standard_normal((3000, 800)).astype(np.float32), "empty": np.zeros((0, 3))}
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("looked")
    holdfast.save(state(), path / "a.pt", durable=False)
    holdfast.save(state(), path / "native", durable=False)
    holdfast.save(state(), path / "hf", format="safetensors", max_shard_size=400_000, durable=False)
    other = state() | {"big": state()["big"] * 1.5, "moved": state()["layers.3.weight"]}
    del other["layers.3.weight"]
    holdfast.save(other, path / "b.safetensors", durable=False)
    return path


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, int]]]:
    """What is read from files, by the threads of which rank (helpers are counted for nobody)."""
    import threading

    found: list[tuple[str, int]] = []
    real = local.LocalStore.read

    def read(self: local.LocalStore, key: str, start: int, out: memoryview) -> None:
        found.append((threading.current_thread().name, out.nbytes))
        real(self, key, start, out)

    monkeypatch.setattr(local.LocalStore, "read", read)
    return found


def alike(size: int, verb: Callable[..., object]) -> object:
    alone = verb(None)
    for one in raise_first_error(on_ranks(size, verb)):
        assert one == alone
    return alone


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", ["a.pt", "native", "hf", "b.safetensors"])
def test_verify(folder: Path, name: str, size: int):
    assert alike(size, lambda group: holdfast.verify(folder / name, group=group)).ok


def test_verify_reads_each_byte_once(folder: Path, reads: list[tuple[str, int]]):
    raise_first_error(
        on_ranks(4, lambda group: holdfast.verify(folder / "a.pt", group=group, threads=1))
    )
    nbytes = (folder / "a.pt").stat().st_size
    by_rank = {rank: sum(n for name, n in reads if name == f"rank-{rank}") for rank in range(4)}
    assert sum(by_rank.values()) < 1.05 * nbytes + 4 * 100_000
    assert by_rank[0] <= 1.2 / 4 * nbytes + 100_000


@pytest.mark.parametrize("size", SIZES)
def test_damage_is_named_on_all_ranks(folder: Path, tmp_path: Path, size: int):
    for name in ("native", "a.pt"):
        copy = tmp_path / name
        (shutil.copytree if (folder / name).is_dir() else shutil.copy)(folder / name, copy)
        data = next(copy.glob("*.safetensors")) if copy.is_dir() else copy
        flip_bit(data, data.stat().st_size // 2)
        found = alike(size, lambda group, copy=copy: holdfast.verify(copy, group=group))
        assert [one.tensors for one in found.damaged] == [("big",)]


def test_a_sealed_folder(folder: Path, tmp_path: Path):
    shutil.copytree(folder / "hf", tmp_path / "hf")
    holdfast.seal(tmp_path / "hf")
    assert alike(3, lambda group: holdfast.verify(tmp_path / "hf", group=group)).ok
    next((tmp_path / "hf").glob("*2-of*.safetensors")).write_bytes(b"x")
    assert not alike(3, lambda group: holdfast.verify(tmp_path / "hf", group=group)).ok


def test_ranks_share_the_files_of_a_list_of_digests(folder: Path, tmp_path: Path):
    copy = tmp_path / "hf"
    shutil.copytree(folder / "hf", copy)
    files = sorted(copy.glob("*.safetensors"))
    lines = [f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}\n" for file in files]
    (copy / "SHA256SUMS").write_text("".join(lines))
    assert alike(3, lambda group: holdfast.verify(copy, group=group)).ok

    lines[1] = f"{'0' * 64}  {files[1].name}\n"
    (copy / "SHA256SUMS").write_text("".join(lines))
    report = alike(3, lambda group: holdfast.verify(copy, group=group))
    assert [problem.file for problem in report.problems] == [str(files[1])]


@pytest.mark.parametrize("size", SIZES)
def test_stats(folder: Path, size: int):
    found = alike(size, lambda group: holdfast.stats(folder / "a.pt", group=group))
    assert len(found) == 114
    alike(size, lambda group: holdfast.stats(folder / "native", "layers.*", bins=0, group=group))


@pytest.mark.parametrize("size", SIZES)
def test_diff(folder: Path, size: int):
    found = alike(
        size, lambda group: holdfast.diff(folder / "native", folder / "b.safetensors", group=group)
    )
    assert [one.name for one in found.changed] == ["big"]
    assert [(one.a, one.b) for one in found.renamed] == [("layers.3.weight", "moved")]
    alike(
        size, lambda group: holdfast.diff(folder / "hf", folder / "a.pt", exact=True, group=group)
    )


@pytest.mark.parametrize("size", SIZES)
def test_report(folder: Path, size: int):
    def page(group: object) -> object:
        return holdfast.report(folder / "b.safetensors", stats=True, svd=True, group=group).document

    alike(size, page)
    alike(
        size,
        lambda group: (
            holdfast.report(folder / "a.pt", folder / "b.safetensors", group=group).document
        ),
    )


@pytest.mark.parametrize("size", SIZES)
def test_scan(folder: Path, size: int):
    golden = Path("tests/golden")
    found = alike(
        size,
        lambda group: asdict(
            holdfast.scan(golden / "hostile", golden / "files", folder, "nowhere", group=group)
        ),
    )
    assert len(found["reports"]) > 50


HALF = "w\ud800"
"""A name with half of a surrogate pair, which a pickle may contain and UTF-8 does not."""


@pytest.mark.parametrize(
    "verb",
    [
        lambda path, group: holdfast.stats(path, group=group),
        lambda path, group: holdfast.verify(path, group=group),
        lambda path, group: holdfast.report(path, stats=True, group=group).document,
        lambda path, group: holdfast.diff(path, path, group=group),
        lambda path, group: asdict(holdfast.scan(path, group=group)),
    ],
    ids=["stats", "verify", "report", "diff", "scan"],
)
def test_a_name_with_half_of_a_surrogate_pair_is_told_to_all_ranks(
    verb: Callable[[Path, object], object], tmp_path: Path
):
    path = tmp_path / "a\udc80.pt"  # a file name that is no UTF-8
    holdfast.save({HALF: np.arange(40.0), "b": np.arange(50.0)}, path, durable=False)
    alike(2, lambda group: verb(path, group))


def test_damage_of_a_name_with_half_of_a_surrogate_pair_is_named_on_all_ranks(tmp_path: Path):
    holdfast.save({HALF: np.arange(40.0), "b": np.arange(50.0)}, tmp_path / "a.pt", durable=False)
    flip_bit(tmp_path / "a.pt", 9, after=np.arange(40.0).tobytes())
    found = alike(2, lambda group: holdfast.verify(tmp_path / "a.pt", group=group))
    assert [one.tensors for one in found.damaged] == [(HALF,)]


def test_an_error_of_reading_with_half_of_a_surrogate_pair_reaches_all_ranks():
    errors = {3: ("StoreError", f"{HALF}: Input/output error")}
    sent = checksums.RankChecksums(b"", b"", b"", errors)

    message = write_document(checksums.RANK_CHECKSUMS, sent)

    assert read_document(checksums.RANK_CHECKSUMS, message).errors == errors


def save_twice(folder: Path, name: str) -> list[Path]:
    """Save two states of one form under one name, as on disks of two machines that hold other steps."""
    paths = [folder / f"machine{machine}" / name for machine in range(2)]
    for seed, path in enumerate(paths):
        path.parent.mkdir()
        if name == "library.safetensors":
            save_file(state(seed), path)
        elif name == "dcp":
            holdfast.save(state(seed), path, format="dcp", durable=False)
        else:
            holdfast.save(state(seed), path, durable=False)
    return paths


LOOKING = {
    "stats": lambda path, group: holdfast.stats(path, group=group),
    "report": lambda path, group: holdfast.report(path, group=group),
    "report --stats": lambda path, group: holdfast.report(path, stats=True, group=group),
    "report of two": lambda path, group: holdfast.report(path, path, group=group),
    "diff": lambda path, group: holdfast.diff(path, path, group=group),
    "verify": lambda path, group: holdfast.verify(path, group=group),
    "prune": lambda path, group: holdfast.prune(
        path, path.parent.parent / "out", rules=["*: 0.5"], dry_run=True, group=group
    ),
    "cli stats": lambda path, group: run_command("stats", [str(path)], group),
    "cli report": lambda path, group: run_command(
        "report", [str(path), "--stats", "--json"], group
    ),
    "cli diff": lambda path, group: run_command("diff", [str(path), str(path)], group),
}


def run_command(verb: str, arguments: list[str], group: object) -> int:
    """Run a command as one of several processes does (`holdfast.cli.ranks`)."""
    module = find_commands()[verb].load()
    parser = argparse.ArgumentParser()
    module.add_arguments(parser)
    options = parser.parse_args(arguments)
    options.group = group
    return int(module.run(options))


@pytest.mark.parametrize("verb", LOOKING)
@pytest.mark.parametrize("name", ["a.pt", "native", "dcp", "library.safetensors"])
def test_ranks_that_opened_different_checkpoints_make_no_report(
    verb: str, name: str, tmp_path: Path
):
    paths = save_twice(tmp_path, name)
    raised = on_ranks(2, lambda group: LOOKING[verb](paths[group.rank], group))
    if verb == "verify" and name == "library.safetensors":
        # Nothing is recorded in such files, so there is nothing that could be mixed up.
        assert [one.verdict for one in raised] == ["readable", "readable"]
        return
    assert [type(one) for one in raised] == [holdfast.errors.RanksFailed] * 2, raised
    assert all("different checkpoints" in str(one) for one in raised)


def test_a_report_of_runs_that_differ_is_refused(tmp_path: Path):
    for machine in range(2):
        with holdfast.Run(tmp_path / f"machine{machine}" / "run") as run:
            for step in range(machine + 1):
                run.save(step, state(step))
    raised = on_ranks(
        2,
        lambda group: holdfast.report(
            tmp_path / f"machine{group.rank}" / "run", stats=True, group=group
        ),
    )
    assert all("different checkpoints" in str(one) for one in raised)


def test_ranks_with_different_seals_make_no_report(tmp_path: Path):
    paths = save_twice(tmp_path, "native")
    for path in paths:
        holdfast.seal(path)
    raised = on_ranks(2, lambda group: holdfast.verify(paths[group.rank], group=group))
    assert all("different checkpoints" in str(one) for one in raised)


def test_ranks_that_scan_other_files_make_no_report(tmp_path: Path):
    for machine, name in enumerate(("a.pt", "b.pt")):
        (tmp_path / f"machine{machine}").mkdir()
        holdfast.save({"w": np.zeros(3)}, tmp_path / f"machine{machine}" / name, durable=False)
    raised = on_ranks(
        2, lambda group: holdfast.scan(tmp_path / f"machine{group.rank}", group=group)
    )
    assert all("different checkpoints" in str(one) for one in raised)


def test_ranks_that_see_different_files_are_told(folder: Path, tmp_path: Path):
    holdfast.save(state(1), tmp_path / "other.pt", durable=False)
    paths = [folder / "a.pt", tmp_path / "missing.pt", folder / "b.safetensors"]
    for verb in (holdfast.verify, holdfast.stats):
        found = on_ranks(3, lambda group, verb=verb: verb(paths[group.rank], group=group))
        assert all(isinstance(one, holdfast.errors.RanksFailed) for one in found), found
