"""Processes that are forked from one which has imported torch.

A process that imports torch and what it needs of Holdfast pays 2 to 5 seconds of processor time. Tests
that only need another process, and not a fresh interpreter, fork it from multiprocessing's fork server,
of which every test process has one. Its children inherit no file and no memory of the test.
"""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import os
import traceback
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from typing import NamedTuple

import pytest

PRELOAD = [
    "torch",
    "torch._dynamo",
    "torch.distributed._shard.sharded_tensor",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "holdfast.torch",
    "holdfast.torch.ranks.local_shards",
    "holdfast.torch.ranks.save_sharded",
    "holdfast.torch.ranks.load_sharded",
]
"""What the fork server imports. DTensor imports dynamo when it is first used, which takes each process seconds."""

ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "RES_OPTIONS": "timeout:1 attempts:1",  # torch asks for the name of every address that it connects to
}


def fork_server() -> ForkServerContext:
    """Start the fork server of this test process, if it does not run yet, and return its context."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    # Threads that a library starts when it is imported would not survive the fork.
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        forkserver.ensure_running()
    return context


def read_terminal(descriptor: int) -> bytes:
    """Read what processes write to a terminal until all of them have ended, and close it."""
    seen = b""
    with contextlib.suppress(OSError):  # the terminal is gone when the last process ends
        while piece := os.read(descriptor, 65536):
            seen += piece
    os.close(descriptor)
    return seen


class ProgramResult(NamedTuple):
    """The result of a program that ran in a process of its own."""

    returncode: int | None
    stderr: str


def run_code(code: str, *, seconds: float = 60.0) -> ProgramResult:
    """Run Python source in a process that has imported torch, and return its status and its errors."""
    context = fork_server()
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_execute, args=(code, sender))
    process.start()
    sender.close()
    process.join(seconds)
    if process.exitcode is None:
        process.kill()
        process.join()
    try:
        text = receiver.recv() if receiver.poll() else ""
    except EOFError:
        text = "the process died"
    return ProgramResult(process.exitcode, text)


def _execute(code: str, sender: Connection) -> None:
    errors = io.StringIO()
    status = 0
    try:
        with contextlib.redirect_stderr(errors):
            exec(compile(code, "<program>", "exec"), {"__name__": "__main__"})
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else 1
        errors.write("" if isinstance(error.code, int) else str(error.code))
    except BaseException:
        status = 1
        errors.write(traceback.format_exc())
    sender.send(errors.getvalue())
    sender.close()
    os._exit(status)
