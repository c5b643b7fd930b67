"""Runs a page of the documentation from its top to its end, as somebody would who types it.

`tests/pages.py` says how a page is written. `test_snippets.py` checks every page with this module, and `make pages`
(`page_rewriter.py`) puts into a page what its blocks print now. A block that fails does not end the reading: all
problems of a page are found at once.
"""

from __future__ import annotations

import contextlib
import gc
import io
import json
import os
import re
import runpy
import shlex
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

import pytest
import torch.distributed as dist

import holdfast.torch
from holdfast.cli.main import main
from holdfast.torch import versions
from tests.page_files import make
from tests.pages import ROOT, Block, blocks, commands
from tests.processes import ENVIRONMENT, fork_server

ANSWERS = {"scan", "verify", "diff"}
"""Commands whose exit status is an answer: 1 where they found something."""

NEEDS = {"docs/packages.md": versions.PT2_ARCHIVE}
"""What torch must have for pages that do more than every version can."""


@dataclass(frozen=True)
class Mismatch:
    """A place in a page that shows something else than what is printed."""

    line: int
    """The line of the page at which the shown text begins."""
    shown: str
    printed: str


@dataclass(frozen=True)
class PageResult:
    """What was wrong with a page."""

    page: str
    failures: list[str] = field(default_factory=list)
    """A message for each block that did not run."""
    mismatches: list[Mismatch] = field(default_factory=list)

    def check(self) -> None:
        """Raise an `AssertionError` that lists all problems, if there are any."""
        problems = [*self.failures]
        for mismatch in self.mismatches:
            problems.append(
                f"{self.page}:{mismatch.line} shows\n{mismatch.shown.rstrip()}\n"
                f"and this is printed:\n{mismatch.printed.rstrip()}"
            )
        if self.mismatches:
            problems.append(f"if what is printed is right: make pages ARGS={self.page}")
        assert not problems, "\n\n".join(["", *problems])


def tidy(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().splitlines()]


def is_line_shown(shown: str, printed: str) -> bool:
    """Whether a printed line is the one that a page shows, where … stands for any text."""
    pattern = ".*".join(map(re.escape, shown.split("…")))
    return re.fullmatch(pattern, printed) is not None


def is_shown(shown: str, printed: str) -> bool:
    """Whether what is printed is what the page shows.

    >>> is_shown("wrote x.pt  … in 1 file", "wrote x.pt  2 KiB in 1 file"), is_shown("a", "b")
    (True, False)
    """
    shown_lines, printed_lines = tidy(shown), tidy(printed)
    return len(shown_lines) == len(printed_lines) and all(
        map(is_line_shown, shown_lines, printed_lines)
    )


def read_page(page: str, content: str, *, exhaustive: bool = False) -> PageResult:
    """Run a page in the current folder. With `exhaustive`, `torchrun` is torchrun itself."""
    reader = Reader(page, exhaustive=exhaustive)
    for block in blocks(content):
        reader.read_block(block)
    return reader.result


class Reader:
    """Somebody who types the blocks of a page one after the other."""

    def __init__(self, page: str, *, exhaustive: bool) -> None:
        self.page = page
        self.exhaustive = exhaustive
        self.result = PageResult(page)
        self.printed: str | None = None
        """What the block before printed, if it was Python."""
        self.module = ModuleType(f"page_{Path(page).stem.replace('-', '_')}")
        sys.modules[self.module.__name__] = self.module

    def read_block(self, block: Block) -> None:
        """Run a block, and write down what is wrong with it."""
        printed, self.printed = self.printed, None
        try:
            for name in filter(None, block.marks.get("files", "").split(", ")):
                make(name)
            if block.language == "text":
                if printed is not None:
                    self.compare(block.line, block.text, printed)
            elif block.language == "json":
                json.loads(block.text)
            elif "file" in block.marks:
                Path(block.marks["file"]).write_text(block.text)
            elif "not run" in block.marks:
                pass
            elif block.language == "python":
                self.printed = self.execute(block)
            else:
                self.run_commands(block)
        except Exception as error:
            line = self.line_of(error) or block.line
            message = f"{self.page}:{line}: {type(error).__name__}: {error}"
            self.result.failures.append(message)

    def line_of(self, error: Exception) -> int | None:
        """Return the line of the page at which an error was raised, or None if it was elsewhere."""
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if frame.filename == str(ROOT / self.page)]
        return lines[-1] if lines else None

    def compare(self, line: int, shown: str, printed: str) -> None:
        if not is_shown(shown, printed):
            self.result.mismatches.append(Mismatch(line, shown, printed))

    def execute(self, block: Block) -> str:
        """Run Python; an error in it has the line of the page."""
        printed = io.StringIO()
        code = compile("\n" * (block.line - 1) + block.text, str(ROOT / self.page), "exec")
        with contextlib.redirect_stdout(printed):
            exec(code, vars(self.module))
        return printed.getvalue()

    def run_commands(self, block: Block) -> None:
        """Run the commands of a block, also those behind one that fails."""
        lines = block.text.splitlines()
        prompts = [number for number, line in enumerate(lines) if line.startswith("$ ")]
        for position, (command, shown) in enumerate(commands(block)):
            # A script has no prompts, and shows no output.
            line = block.line + prompts[position] if prompts else block.line
            try:
                output = self.run_command(command)
            except AssertionError as error:
                self.result.failures.append(f"{self.page}:{line}: {command}\n{error}")
                continue
            if shown is not None:
                self.compare(line + 1, shown, output)

    def run_command(self, line: str) -> str:
        """Run a command and return its output. Raises `AssertionError` if it fails."""
        program, *arguments = shlex.split(line, comments=True)
        if program == "holdfast":
            printed = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True)
            with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
                status = main(arguments)
            output = printed.buffer.getvalue().decode()
            expected_statuses = (0, 1) if arguments[0] in ANSWERS else (0,)
        else:
            status, output = self.run_program(program, arguments)
            expected_statuses = (0,)
        assert status in expected_statuses, f"ended with {status}:\n{output}"
        return output

    def run_program(self, program: str, arguments: list[str]) -> tuple[int, str]:
        if program == "torchrun" and self.exhaustive:
            return started(["-m", "torch.distributed.run", *arguments])
        if program == "torchrun":
            assert arguments[:2] == ["--standalone", "--nproc-per-node"], "how many ranks?"
            return ranks(int(arguments[2]), arguments[3:])
        if program == "python" and arguments[0].endswith(".py"):
            return ranks(0, arguments)
        assert program == "python", f"{program} is not run here: say so above the block"
        return started(arguments)


def started(arguments: list[str]) -> tuple[int, str]:
    """Run Python in a process of its own."""
    run = [sys.executable, *arguments]
    done = subprocess.run(
        run, capture_output=True, text=True, check=False, timeout=200, env=os.environ | ENVIRONMENT
    )
    return done.returncode, done.stdout if done.returncode == 0 else done.stdout + done.stderr


def ranks(size: int, arguments: list[str]) -> tuple[int, str]:
    """Run a script on so many ranks, or (0) without any; the worst exit status, and what all of them printed."""
    context = fork_server()
    with pytest.MonkeyPatch.context() as patch, socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        told = {
            "WORLD_SIZE": str(size),
            "LOCAL_WORLD_SIZE": str(size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        each = [told | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(size)] or [{}]
        outputs = [Path(f".printed-{rank}").resolve() for rank in range(len(each))]
        processes = [
            context.Process(target=script, args=(arguments, environment, str(output), os.getcwd()))
            for environment, output in zip(each, outputs, strict=True)
        ]
        free.close()
        for process in processes:
            process.start()
    for process in processes:
        process.join(120)
        if process.exitcode is None:
            process.kill()
    printed = "".join(output.read_text() for output in outputs if output.exists())
    for output in outputs:
        output.unlink(missing_ok=True)
    return max(
        (process.exitcode if process.exitcode is not None else -1 for process in processes), key=abs
    ), printed


def script(arguments: list[str], environment: dict[str, str], output: str, folder: str) -> None:
    """What a rank does."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(folder)
    os.environ.update(environment)
    file = os.open(output, os.O_CREAT | os.O_WRONLY)
    os.dup2(file, 1)
    os.dup2(file, 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
    sys.argv = arguments
    # A program finds the modules beside it.
    sys.path.insert(0, folder)
    runpy.run_path(arguments[0], run_name="__main__")
    sys.stdout.flush()


@contextlib.contextmanager
def page_environment(folder: Path) -> Iterator[None]:
    """An empty folder, a terminal of known width, and everything as before at the end."""
    threshold, modules = gc.get_threshold(), set(sys.modules)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGTERM)}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("COLUMNS", "110")
        patch.setenv("NO_COLOR", "1")
        yield
    for number, handler in handlers.items():
        signal.signal(number, handler)
    gc.set_threshold(*threshold)
    holdfast.torch.uninstall()
    if dist.is_initialized():
        dist.destroy_process_group()
    for name in {name for name in sys.modules if name.startswith("page_")} - modules:
        del sys.modules[name]
