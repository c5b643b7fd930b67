"""Programs and ranks that are killed while they save to a bucket."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Literal

from tests.processes import fork_server
from tests.remote import rank_jobs
from tests.remote.servers import Asked, Fault, Proxy, environment

__all__ = ["killed", "run_and_kill"]


def run_and_kill(
    proxy: Proxy, code: str, *arguments: str, request: int, fault: Literal["drop", "cut"]
) -> int:
    """Run a program, kill it at a request of this number, and return its exit status.

    The request is dropped, so that the store never has it, or its answer is cut off.
    """
    processes: list[subprocess.Popen[bytes]] = []

    def kill(asked: Asked) -> Fault:
        if asked.number < request:
            return None
        processes[0].kill()
        processes[0].wait()
        return fault

    proxy.clear()
    proxy.fault = kill
    processes.append(
        subprocess.Popen(
            [sys.executable, "-c", code, *arguments],
            env={**os.environ, **environment(proxy.port)},
        )
    )
    status = processes[0].wait(60)
    proxy.fault = lambda asked: None
    return status


def killed(
    proxy: Proxy,
    room: Path,
    url: str,
    *,
    ranks: int,
    victim: int,
    sought: str,
    when: Literal["asked", "done"],
    step: int | None = None,
) -> dict[int, str]:
    """What the other ranks say: "saved", or the error.

    The victim is killed with SIGKILL when the first PUT of a key with `sought` in it arrives, which then never comes to the store;
    or when the store has it, and nobody knows.
    """
    context = fork_server()
    processes = [
        context.Process(
            target=rank_jobs.lone,
            args=(environment(proxy.port), str(room), rank, ranks, url, step),
            daemon=True,
        )
        for rank in range(ranks)
    ]
    arrived = threading.Event()

    def fault(asked: Asked) -> Fault:
        if asked.method != "PUT" or sought not in asked.path or arrived.is_set():
            return None
        arrived.set()
        return "drop" if when == "asked" else 2.0

    proxy.fault = fault
    try:
        for process in processes:
            process.start()
        assert arrived.wait(60)
        if when == "done":
            time.sleep(0.5)  # until the store has it, whose answer is held back
        processes[victim].kill()
        for process in processes:
            process.join(60)
            assert process.exitcode is not None, "nobody waits for ever"
    finally:
        for process in processes:
            process.kill()
    proxy.fault = lambda asked: None
    assert not (room / f"{victim}").exists()
    return {
        rank: json.loads((room / f"{rank}").read_text())["kind"]
        for rank in range(ranks)
        if rank != victim
    }
