"""Requests to object stores wait for their answers on one event loop."""

from __future__ import annotations

import asyncio
import threading

import pytest

pytest.importorskip("obstore")

from holdfast.stores.remote.loop import wait_for_answer


async def thread_of_the_loop() -> str:
    await asyncio.sleep(0)
    return threading.current_thread().name


def test_requests_of_all_threads_share_one_event_loop():
    thread_names: list[str] = []

    def request() -> None:
        thread_names.append(wait_for_answer(thread_of_the_loop))

    threads = [threading.Thread(target=request) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert thread_names == ["object-store requests"] * 3
