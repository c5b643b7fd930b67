"""Memory in large pages: asked for where it is large and not touched yet, and given up where it is slow to have."""

from __future__ import annotations

import ctypes

import pytest
import torch

import holdfast.torch as ht
from holdfast.engine import large_pages
from holdfast.engine.large_pages import LATE_NS, PAGE_NBYTES, SLOW_NS, wanted_in_large_pages

MIB = 1 << 20


@pytest.fixture
def advised(monkeypatch):
    """What was asked of the kernel, in large pages from the start of some memory on."""
    asked: list[tuple[int, int, str]] = []
    monkeypatch.setattr(large_pages, "_needs_madvise", lambda: True)
    monkeypatch.setattr(
        large_pages,
        "_advise",
        lambda begin, end, advice: asked.append((begin, end, advice)) is None,
    )
    return asked


def room(nbytes: int) -> tuple[object, int]:
    """Memory, and where its first large page begins."""
    memory = ctypes.create_string_buffer(nbytes + PAGE_NBYTES)
    return memory, -(-ctypes.addressof(memory) // PAGE_NBYTES) * PAGE_NBYTES


def test_whole_pages_inside_of_what_is_large(advised, monkeypatch):
    monkeypatch.setattr(large_pages, "_is_slow", lambda address: False)
    _memory, base = room(32 * MIB)
    wanted_in_large_pages([(base, 8 * MIB - 1), (base + 1, 13 * MIB), (base + 16 * MIB, 8 * MIB)])
    assert [
        ((begin - base) // MIB, (end - base) // MIB, advice) for begin, end, advice in advised
    ] == [
        (2, 10, "MADV_HUGEPAGE"),
        (10, 12, "MADV_HUGEPAGE"),
        (16, 24, "MADV_HUGEPAGE"),
    ]


def test_where_a_page_was_slow_the_next_ones_are_small_and_then_more_of_them(advised, monkeypatch):
    monkeypatch.setattr(large_pages, "PAUSE_NBYTES", 16 * MIB)
    slow = iter([True, True, False, False, False])
    monkeypatch.setattr(large_pages, "_is_slow", lambda address: next(slow))
    wanted_in_large_pages([(0, 40 * MIB), (64 * MIB, 40 * MIB)])
    assert [(begin // MIB, end // MIB, advice) for begin, end, advice in advised] == [
        (0, 8, "MADV_HUGEPAGE"),
        (2, 8, "MADV_NOHUGEPAGE"),
        (24, 32, "MADV_HUGEPAGE"),
        (26, 32, "MADV_NOHUGEPAGE"),
        (88, 96, "MADV_HUGEPAGE"),
        (96, 104, "MADV_HUGEPAGE"),
    ]


@pytest.mark.parametrize(
    ("used", "late", "slow"),
    [(0, 0, False), (SLOW_NS + 1, 0, True), (0, SLOW_NS + 1, False), (0, LATE_NS + 1, True)],
)
def test_slow_by_either_clock(monkeypatch, used, late, slow):
    clocks = {"thread_time_ns": iter([5, 5 + used]), "perf_counter_ns": iter([7, 7 + late])}
    for name, clock in clocks.items():
        monkeypatch.setattr(large_pages.time, name, clock.__next__)
    _memory, base = room(MIB)
    assert large_pages._is_slow(base) == slow
    assert next(iter(_memory)) == b"\0"


@pytest.mark.parametrize(
    "setting", ["[always] madvise never", "always madvise [never]", "always [madvise] never", None]
)
def test_only_where_the_system_waits_to_be_asked(tmp_path, monkeypatch, setting):
    path = tmp_path / "enabled"
    if setting is not None:
        path.write_text(setting)
    monkeypatch.setattr(large_pages, "SETTING", str(path))
    assert large_pages._needs_madvise.__wrapped__() == (setting == "always [madvise] never")


def test_loads_ask_for_what_they_fill_and_get_the_same(tmp_path, monkeypatch):
    asked: list[int] = []
    monkeypatch.setattr(large_pages, "_needs_madvise", lambda: True)
    monkeypatch.setattr(large_pages, "_is_slow", lambda address: False)
    before = large_pages._advise
    monkeypatch.setattr(
        large_pages,
        "_advise",
        lambda begin, end, advice: bool(asked.append(end - begin)) or before(begin, end, advice),
    )
    state = {
        "large": torch.randn(3 * MIB),
        "small": torch.ones(7),
        "turned": torch.randn(1200, 2200).T,
    }
    torch.save(state, tmp_path / "a.pt")
    for load in (ht.load, lambda path: ht.open(path).read()):
        found = load(tmp_path / "a.pt")
        assert sum(asked) >= 2 * 6 * MIB
        asked.clear()
        for name, tensor in state.items():
            assert torch.equal(found[name], tensor)
            assert found[name].stride() == tensor.stride()
