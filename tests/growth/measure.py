"""What a verb costs on a file: processor time, and memory at its peak, in this process."""

from __future__ import annotations

import contextlib
import gc
import io
import re
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import holdfast
import holdfast.torch
from holdfast.cli.main import main
from holdfast.errors import HoldfastError
from tests.hostile.allowed import ALLOWED

__all__ = ["VERBS", "Cost", "Verb", "cost", "scan"]

PEAK = re.compile(r"VmHWM:\s+(\d+) kB")
NOW = re.compile(r"VmRSS:\s+(\d+) kB")


@dataclass(frozen=True)
class Cost:
    """One run."""

    seconds: float
    nbytes: int
    outcome: str
    """`done`, an exit code, or the class of a refusal: refusing is an answer, if it is cheap."""


Verb = Callable[[Path, Path], object]
"""Takes two files of the same content."""


def cost(verb: Verb, path: Path, twin: Path) -> Cost:
    """Run a verb once."""
    gc.collect()
    before = _memory(NOW, reset=True)
    begin = time.process_time()
    try:
        outcome = str(verb(path, twin))
    except HoldfastError as error:
        outcome = type(error).__name__
    seconds = time.process_time() - begin
    return Cost(seconds, max(_memory(PEAK) - before, 0), outcome)


def _memory(which: re.Pattern[str], *, reset: bool = False) -> int:
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    found = which.search(Path("/proc/self/status").read_text())
    return int(found[1]) << 10 if found else 0


def _command(*arguments: str) -> Verb:
    def run(path: Path, twin: Path) -> object:
        paths = [str(path), str(twin)] if arguments[0] == "diff" else [str(path)]
        with (
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.redirect_stderr(io.StringIO()) as errors,
        ):
            code = main([*arguments, *paths])
        assert "internal error" not in errors.getvalue(), errors.getvalue()
        return code

    return run


def _convert(name: str) -> Verb:
    def run(path: Path, twin: Path) -> object:
        target = path.with_name(name)
        try:
            holdfast.convert(path, target, max_memory="128MB", durable=False)
        finally:
            shutil.rmtree(target, ignore_errors=True)
            target.unlink(missing_ok=True)
        return "done"

    return run


def _open(path: Path, twin: Path) -> object:
    with holdfast.open(path) as opened:
        list(opened)
        opened.describe()
    return "done"


def scan(path: Path, twin: Path) -> object:
    """Scan a file to its end."""
    return holdfast.scan(path).verdict()


def _load(path: Path, twin: Path) -> object:
    """What `open` builds lazily, built as torch's own objects: the other builder of the same table of reducers."""
    with holdfast.torch.serialization.safe_globals(ALLOWED):
        holdfast.torch.load(path)
    return "done"


def _read_tree(path: Path, twin: Path) -> object:
    with holdfast.torch.open(path) as opened:
        opened.read_tree()
    return "done"


VERBS: dict[str, Verb] = {
    "open": _open,
    "torch.load": _load,
    "torch.open": _read_tree,
    "show": _command("show"),
    "show --json": _command("show", "--json"),
    "scan": _command("scan"),
    "diff": _command("diff"),
    "verify": _command("verify"),
    "stats": _command("stats"),
    "convert .safetensors": _convert("out.safetensors"),
    "convert native": _convert("out"),
    "convert .pt": _convert("out.pt"),
}
