"""No verb takes another way under some condition: calls are counted, so a second, slower way shows on any machine.

Each verb that writes, under each option, makes at most `TIMES` the calls of the plain save of the same tensors in the same format:
with 64 tensors, with 2,000, and for each tensor more (from 2,000 to 4,000; with `--exhaustive` with 20,000 as well). Calls a tensor
do not grow with their number. One odd tensor among 20,000 costs at most a tenth more than none.

`OPEN` lists what does not hold yet. Whoever mends a case takes it off the list: the marks are strict. `pytest -s` prints the
figures.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

import holdfast
import holdfast.torch
from tests.growth.calls import CASES, ODD, PLAIN, SUFFIXES, Case, Job, counting, odd_state, tensors
from tests.ranks.pool import SHARED, Pool, World, good

SMALL, MIDDLE, MORE, LARGE = 64, 2_000, 4_000, 20_000

TIMES = 3
"""What an option may cost, in calls of the plain save."""

GROWTH = 1.1
"""What a tensor may cost among ten times as many, and a state with one odd tensor as a multiple of one with none."""

OPEN: dict[str, str] = {
    # case: times the calls of the plain save, with 64 and 2,000 tensors and for each more
    "save pt, limits": "2.3, 17.0, 81.6",
    "save native, nested": "2.8, 13.8, 19.2",
    "save native, tied": "3.7, 31.4, 45.1",
    "save safetensors, nested": "3.2, 17.8, 25.4",
    "save safetensors, tied": "4.5, 39.7, 57.9",
    "save pt, nested": "1.3, 2.7, 14.0",
    "convert native to native": "2.1, 6.6, 8.4",
    "convert native to safetensors": "2.3, 8.0, 10.3",
    "convert native to pt": "1.3, 2.5, 8.3",
    "convert safetensors to native": "1.9, 4.5, 5.6",
    "convert safetensors to safetensors": "2.0, 5.4, 6.8",
    "convert safetensors to pt": "1.2, 1.9, 5.3",
    "convert pt to native": "3.8, 10.5, 13.2",
    "convert pt to safetensors": "4.4, 12.9, 16.3",
    "convert pt to pt": "1.6, 3.6, 13.1",
    "convert native to native, cast": "14.4, 115.1, 155.2",
    "convert native to safetensors, cast": "18.0, 142.3, 190.8",
    "convert native to pt, cast": "4.7, 39.5, 190.9",
    "convert native to native, rename": "3.8, 22.7, 30.2",
    "convert native to safetensors, rename": "4.5, 26.1, 34.5",
    "convert native to pt, rename": "2.8, 20.9, 100.2",
    "copy safetensors": "2.5, 3.5, 3.8",
    "copy pt": "1.6, 2.2, 6.9",
    "copy native to a bucket": "2.9, 4.7, 5.2",
    "edit native": "3.6, 20.5, 27.2",
    "edit safetensors": "3.9, 20.7, 27.3",
    "tie native": "8.4, 72.5, 104.1",
    "tie safetensors": "10.1, 91.3, 133.4",
    "tie pt": "2.7, 20.5, 110.4",
    "compact native": "4.3, 30.8, 44.0",
    "compact safetensors": "4.7, 34.4, 49.7",
    "compact pt": "3.3, 23.4, 127.7",
    "package native": "4.5, 32.6, 43.8",
    "save_sharded": "7.5, 65.4, 94.0",
    "save_sharded, dcp": "40.0, 392.5, 566.8",
    "save_sharded, safetensors": "9.7, 85.5, 124.7",
    "save_sharded, nested": "11.8, 104.8, 150.7",
    "save_sharded, tied": "6.4, 53.5, 76.8",
    "save_sharded, hashes": "3.3, 9.3, 11.2",
    "save_sharded, base": "7.4, 35.7, 44.6",
    "save_sharded, bucket": "3.4, 7.3, 8.5",
    "async_save_sharded": "9.5, 84.4, 121.5",
    "async_save_sharded, dcp": "41.9, 411.5, 594.3",
    "torch.Run.save twice": "6.4, 22.8, 27.9",
    "torch.Run.async_save twice": "12.6, 65.5, 82.0",
    "two ranks, native": "74.6, 107.2",
    "two ranks, dcp": "358.1, 517.0",
    "two ranks, safetensors": "100.0, 145.9",
    "edit pt": "3.2, 21.9, 99.4",
}
"""Cases that make more calls than they may."""

OPEN_ODD: dict[str, str] = {
    # format, kind: times the calls of a save without it
    "native, composite": "7.81",
    "native, tied": "1.72",
    "native, strided": "5.28",
    "native, conjugated": "5.51",
    "safetensors, tied": "1.64",
    "safetensors, strided": "6.71",
    "safetensors, conjugated": "7.02",
    "pt, composite": "71.96",
    "pt, strided": "71.34",
    "pt, conjugated": "70.83",
    "sharded, composite": "1.22",
    "sharded, tied": "1.19",
}
"""Odd tensors that cost more than themselves."""


def marked(name: str, table: dict[str, str]) -> object:
    """A case, expected to fail where the table has it."""
    marks = (
        [pytest.mark.xfail(strict=True, raises=AssertionError, reason=f"makes {table[name]} times the calls")]
        if name in table
        else []
    )
    return pytest.param(name, marks=marks, id=name)


def count_calls(prepare: Callable[[Path, int], Job], n: int) -> int:
    """The calls of a job with n tensors."""
    with TemporaryDirectory() as folder:
        job = prepare(Path(folder), n)
        with counting() as total:
            job()
    return total[0]


@cache
def calls(prepare: Callable[[Path, int], Job], n: int) -> int:
    """The same, counted once for all tests; the first time after a small one, so that nothing is imported meanwhile."""
    if n != 8:
        calls(prepare, 8)
    return count_calls(prepare, n)


def by_name(name: str) -> Case:
    return next(case for case in CASES if case.name == name)


def more(prepare: Callable[[Path, int], Job]) -> float:
    """The calls of one more tensor."""
    return (calls(prepare, MORE) - calls(prepare, MIDDLE)) / (MORE - MIDDLE)


@pytest.mark.parametrize("name", [marked(case.name, OPEN) for case in CASES])
def test_an_option_costs_little(name: str, request: pytest.FixtureRequest):
    case = by_name(name)
    plain = PLAIN[case.plain]
    ratios: list[float] = []
    for n in (SMALL, MIDDLE, None):
        if max(ratios, default=0) <= TIMES or request.config.getoption("--exhaustive"):
            own, other = (more(one) if n is None else calls(one, n) for one in (case.prepare, plain))
            ratios.append(own / other / case.saves)
    figures = ", ".join(f"{ratio:.1f}" for ratio in ratios)
    print(f'\n    "{name}": "{figures}",')
    assert max(ratios) <= TIMES, figures


@pytest.mark.parametrize("name", [case.name for case in CASES])
def test_a_tensor_costs_the_same_among_many(name: str):
    """From 64 to 2,000 and from 2,000 to 20,000: what a save costs by itself is not counted."""
    case = by_name(name)
    large = MORE if name in OPEN else LARGE  # a second way takes half a minute for as many
    few, many, most = (calls(case.prepare, n) for n in (SMALL, MIDDLE, large))
    before, after = (many - few) / (MIDDLE - SMALL), (most - many) / (large - MIDDLE)
    print(f"\n{name}: {before:.2f} and {after:.2f} calls a tensor")
    assert after <= GROWTH * before
    if name not in OPEN:
        assert most <= TIMES * case.saves * calls(PLAIN[case.plain], LARGE)


def odd_job(format: str, kind: str | None) -> Callable[[Path, int], Job]:
    def prepare(folder: Path, n: int) -> Job:
        state = odd_state(kind, n)
        if format == "sharded":
            return lambda: holdfast.torch.save_sharded(state, folder / "sharded", durable=False)
        return lambda: holdfast.save(state, folder / f"saved{SUFFIXES[format]}", durable=False)

    return prepare


JOBS = {(format, kind): odd_job(format, kind) for format in (*SUFFIXES, "sharded") for kind in (None, *ODD)}
UNHELD = {("safetensors", "composite")}
"""What a format cannot hold."""


@pytest.mark.parametrize(
    "name", [marked(f"{format}, {kind}", OPEN_ODD) for format, kind in JOBS if kind and (format, kind) not in UNHELD]
)
def test_one_odd_tensor_among_many(name: str):
    format, _, kind = name.partition(", ")
    none, one = (calls(JOBS[format, which], LARGE) for which in (None, kind))
    print(f'\n    "{name}": "{one / none:.2f}",')
    assert one <= GROWTH * none, f"{one / none:.2f}"


# Ranks.


def saved_by_a_rank(world: World, path: str, n: int, format: str) -> int:
    """The calls of one rank: all tensors are replicated."""
    state = tensors(n)
    world.barrier()
    with counting() as total:
        holdfast.torch.save_sharded(state, path, group=world.group, format=format, durable=False, overwrite=True)  # type: ignore[arg-type]
    return total[0]


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    yield SHARED
    SHARED.close()


@pytest.mark.parametrize("name", [marked(f"two ranks, {format}", OPEN) for format in ("native", "dcp", "safetensors")])
def test_each_of_two_ranks(pool: Pool, name: str, tmp_path: Path):
    format = name.partition(", ")[2]
    plain = PLAIN["tensors, safetensors" if format == "safetensors" else "tensors, native"]
    counts: list[list[int]] = []
    for n in (8, MIDDLE, MORE):
        counts.append([int(str(one)) for one in good(pool.run(2, saved_by_a_rank, str(tmp_path / f"{n}"), n, format))])
    _, middle, most = counts
    ratios = [max(middle) / calls(plain, MIDDLE)]
    ratios.append(max(b - a for a, b in zip(middle, most, strict=True)) / (MORE - MIDDLE) / more(plain))
    figures = ", ".join(f"{ratio:.1f}" for ratio in ratios)
    print(f'\n    "{name}": "{figures}",')
    assert max(ratios) <= TIMES, figures
