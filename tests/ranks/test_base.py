"""Steps of many ranks that share bytes: what did not change is linked by the rank that wrote it, and every step is whole."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch

import holdfast
from holdfast.errors import BadArgument, Unsupported
from holdfast.torch.ranks.load_sharded import load_full
from holdfast.torch.ranks.save_sharded import async_save_sharded, save_sharded
from tests.ranks.pool import Pool, World, good
from tests.ranks.states import WHOLE, state_of
from tests.support import element_bytes

pytestmark = pytest.mark.timeout(120)


def save_step(
    world: World, path: str, base: str | None, more: int, options: dict[str, object]
) -> tuple[int, int, tuple[str, ...], tuple[str, ...]]:
    """Save the state, of which `plain` (replicated) and `row` (cut) are by so much more; in the background with `later`."""
    state = state_of(world)
    with torch.no_grad():
        state["list"][0].add_(more)
        row = state["model"]["row"]
        (row.to_local() if hasattr(row, "to_local") else row).add_(more)
    given = {"base": base} if base else {"hashes": True}
    options = dict(options)
    if options.pop("later", False):
        saved = async_save_sharded(
            state, path, group=world.group, durable=False, **given, **options
        ).wait()
    else:
        saved = save_sharded(state, path, group=world.group, durable=False, **given, **options)
    return (
        saved.new_nbytes,
        saved.shared_nbytes,
        tuple(name for name, _ in saved.files),
        saved.notes,
    )


def check(path: Path, more: int) -> None:
    state = load_full(path)
    found = {**state["model"], "plain": state["list"][0], "scalar": state["list"][1]["scalar"]}
    for name, tensor in found.items():
        expected = WHOLE[name] + more if name in ("plain", "row") else WHOLE[name]
        assert (tensor.dtype, tensor.shape) == (expected.dtype, expected.shape), name
        assert element_bytes(tensor) == element_bytes(expected), name
    report = holdfast.verify(path)
    assert report.ok, report


@pytest.mark.parametrize("later", [False, True], ids=["now", "later"])
@pytest.mark.parametrize("size", [1, 3])
def test_what_did_not_change_is_linked(pool: Pool, tmp_path: Path, size: int, later: bool):
    options = {"later": later}
    good(pool.run(size, save_step, str(tmp_path / "1"), None, 0, options))
    names = {file.name for file in (tmp_path / "1").glob("data*")}
    told = good(pool.run(size, save_step, str(tmp_path / "2"), str(tmp_path / "1"), 1, options))
    assert sum(shared for _, shared, _, _ in told) > 0
    there = {file.stat().st_ino for file in (tmp_path / "1").glob("data*")}
    linked = {file.name for file in (tmp_path / "2").glob("data*") if file.stat().st_ino in there}
    assert linked
    assert linked <= names
    files = [name for _, _, own, _ in told for name in own]
    assert sorted(files) == sorted(file.name for file in (tmp_path / "2").glob("data*"))
    # New files come after those of the same rank that were taken over.
    third = good(pool.run(size, save_step, str(tmp_path / "3"), str(tmp_path / "2"), 2, options))
    assert sum(shared for _, shared, _, _ in third) > 0
    shutil.rmtree(tmp_path / "1")
    check(tmp_path / "2", 1)
    shutil.rmtree(tmp_path / "2")
    check(tmp_path / "3", 2)


def test_nothing_changed(pool: Pool, tmp_path: Path):
    good(pool.run(3, save_step, str(tmp_path / "1"), None, 0, {}))
    told = good(pool.run(3, save_step, str(tmp_path / "2"), str(tmp_path / "1"), 0, {}))
    assert [new for new, _, _, _ in told] == [0, 0, 0]
    check(tmp_path / "2", 0)


@pytest.mark.parametrize("sizes", [(1, 3), (3, 2), (2, 1)], ids=str)
def test_another_number_of_ranks_shares_what_it_can(
    pool: Pool, tmp_path: Path, sizes: tuple[int, int]
):
    before, now = sizes
    good(pool.run(before, save_step, str(tmp_path / "1"), None, 0, {}))
    good(pool.run(now, save_step, str(tmp_path / "2"), str(tmp_path / "1"), 1, {}))
    shutil.rmtree(tmp_path / "1")
    check(tmp_path / "2", 1)


def test_one_process_and_ranks_share(pool: Pool, tmp_path: Path):
    good(pool.run(3, save_step, str(tmp_path / "1"), None, 0, {}))
    saved = holdfast.save(
        load_full(tmp_path / "1"), tmp_path / "2", base=tmp_path / "1", durable=False
    )
    assert saved.shared_nbytes > 0
    check(tmp_path / "2", 0)
    good(pool.run(1, save_step, str(tmp_path / "3"), str(tmp_path / "2"), 1, {}))
    check(tmp_path / "3", 1)


def test_a_base_that_cannot_be_used_is_a_note_on_every_rank(pool: Pool, tmp_path: Path):
    (tmp_path / "1").mkdir()
    told = good(pool.run(2, save_step, str(tmp_path / "2"), str(tmp_path / "1"), 1, {}))
    assert all(any("everything is written" in note for note in notes) for _, _, _, notes in told)
    check(tmp_path / "2", 1)
    again = good(pool.run(2, save_step, str(tmp_path / "3"), str(tmp_path / "2"), 1, {}))
    assert [new for new, _, _, _ in again] == [0, 0]


def test_a_base_that_is_not_there(tmp_path: Path):
    with pytest.raises(BadArgument):
        save_sharded({"w": torch.ones(3)}, tmp_path / "2", base=tmp_path / "1")
    assert list(tmp_path.iterdir()) == []


def test_other_formats_share_nothing(tmp_path: Path):
    with pytest.raises(Unsupported, match="base="):
        save_sharded({"w": torch.ones(3)}, tmp_path / "2", base=tmp_path, format="dcp")


def test_replacing_a_private_directory_leaves_the_permissions_of_the_base(
    pool: Pool, tmp_path: Path
):
    good(pool.run(2, save_step, str(tmp_path / "1"), None, 0, {}))
    good(pool.run(2, save_step, str(tmp_path / "2"), None, 5, {}))
    before = {file.name: file.stat().st_mode for file in (tmp_path / "1").iterdir()}
    for file in (tmp_path / "2").iterdir():
        os.chmod(file, 0o600)
    good(pool.run(2, save_step, str(tmp_path / "2"), str(tmp_path / "1"), 1, {"overwrite": True}))
    assert {file.name: file.stat().st_mode for file in (tmp_path / "1").iterdir()} == before
    check(tmp_path / "2", 1)
