"""Large pages are requested for large memory, and given up where a page is slow to get."""

from __future__ import annotations

import mmap
from collections.abc import Iterable

import pytest
import torch

import holdfast.torch as ht
from holdfast.stores import platform
from holdfast.stores.platform import LARGE_PAGE_NBYTES, LARGE_PAGE_TEST_NBYTES, request_large_pages

MIB = 1 << 20

pytestmark = pytest.mark.skipif(
    not hasattr(mmap, "MADV_HUGEPAGE"), reason="this system has no large pages to ask for"
)


@pytest.fixture
def advice(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, int]]:
    """Record what is asked of the kernel as (address, length, advice). Memory is not touched."""
    calls: list[tuple[int, int, int]] = []

    def madvise(address: int, nbytes: int, number: int) -> int:
        calls.append((address, nbytes, number))
        return 0

    monkeypatch.setattr(platform, "c_function", lambda name: madvise)
    monkeypatch.setattr(platform.ctypes, "memset", lambda address, byte, count: None)
    return calls


def test_whole_pages_inside_of_large_memory_are_requested(advice: list[tuple[int, int, int]]):
    request_large_pages(
        [(0, LARGE_PAGE_TEST_NBYTES - 1), (4 * MIB + 1, LARGE_PAGE_TEST_NBYTES + 8 * MIB)]
    )
    assert advice == [
        (6 * MIB, LARGE_PAGE_TEST_NBYTES, mmap.MADV_HUGEPAGE),
        (6 * MIB + LARGE_PAGE_TEST_NBYTES, 6 * MIB, mmap.MADV_HUGEPAGE),
    ]


def test_a_slow_page_ends_the_requests(
    advice: list[tuple[int, int, int]], monkeypatch: pytest.MonkeyPatch
):
    clock = iter([0, platform.SLOW_PAGE_NS, 0, platform.SLOW_PAGE_NS + 1])
    monkeypatch.setattr(platform.time, "thread_time_ns", lambda: next(clock))
    request_large_pages([(0, 3 * LARGE_PAGE_TEST_NBYTES), (1 << 30, LARGE_PAGE_TEST_NBYTES)])
    rest_nbytes = LARGE_PAGE_TEST_NBYTES - LARGE_PAGE_NBYTES
    assert advice == [
        (0, LARGE_PAGE_TEST_NBYTES, mmap.MADV_HUGEPAGE),
        (LARGE_PAGE_TEST_NBYTES, LARGE_PAGE_TEST_NBYTES, mmap.MADV_HUGEPAGE),
        (LARGE_PAGE_TEST_NBYTES + LARGE_PAGE_NBYTES, rest_nbytes, mmap.MADV_NOHUGEPAGE),
    ]


def test_without_the_call_nothing_is_requested(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(platform, "c_function", lambda name: None)
    request_large_pages([(0, 64 * MIB)])


def test_loads_request_large_pages_for_large_tensors_and_read_the_same(tmp_path, monkeypatch):
    requested: list[int] = []
    real = platform.request_large_pages

    def request(places: Iterable[tuple[int, int]]) -> None:
        listed = list(places)
        requested.extend(nbytes for _, nbytes in listed)
        real(listed)

    monkeypatch.setattr("holdfast.torch.serialization.storages.request_large_pages", request)
    monkeypatch.setattr("holdfast.torch.tensors.allocate.request_large_pages", request)
    state = {
        "large": torch.randn(3 * MIB),
        "small": torch.ones(7),
        "turned": torch.randn(1200, 2200).T,
    }
    torch.save(state, tmp_path / "a.pt")
    for load in (ht.load, lambda path: ht.open(path).read()):
        loaded = load(tmp_path / "a.pt")
        assert sum(requested) >= 2 * 8 * MIB
        requested.clear()
        for name, tensor in state.items():
            assert torch.equal(loaded[name], tensor)
            assert loaded[name].stride() == tensor.stride()
