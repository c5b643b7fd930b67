"""A program that used an object store ends with the status that it should have (`exits.py`).

obstore's threads need the interpreter to hand over an answer; one that was still at it when the interpreter was taken down aborted
the process, in up to half of all programs, at the very end.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

import holdfast
from tests.remote import exits
from tests.remote.servers import environment
from tests.sampling import count_rounds

TOGETHER = 4
"""Programs at a time: their ends meet other work, as ends do."""

PATIENCE = 120
"""Seconds after which a program hangs."""


def ended(
    kind: str, url: str, folders: Sequence[Path], *, python: str = sys.executable
) -> tuple[Counter[int], str]:
    """The statuses of as many programs as there are folders, and the last words of all."""
    statuses: Counter[int] = Counter()
    words = ""
    for first in range(0, len(folders), TOGETHER):
        some = folders[first : first + TOGETHER]
        running = [
            subprocess.Popen(
                [python, exits.__file__, kind, url, str(folder)],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
            for folder in some
        ]
        for program, folder in zip(running, some, strict=True):
            signal = exits.SIGNALS.get(getattr(exits, kind))
            if signal is not None:
                until = time.monotonic() + PATIENCE
                while not (folder / "ready").exists() and time.monotonic() < until:
                    time.sleep(0.01)
                time.sleep(0.1)
                program.send_signal(signal)
        for program in running:
            try:
                _, said = program.communicate(timeout=PATIENCE)
            except subprocess.TimeoutExpired:
                program.kill()
                _, said = program.communicate()
                said += "it hung"
            statuses[program.returncode] += 1
            words += said
    return statuses, words


def folders(tmp_path: Path, count: int) -> list[Path]:
    found = [tmp_path / f"{number}-{os.urandom(4).hex()}" for number in range(count)]
    for folder in found:
        folder.mkdir()
    return found


@pytest.mark.parametrize("kind", [*exits.KINDS, *exits.MORE], ids=lambda kind: kind.__name__)
def test_a_program_ends_as_it_should(kind, server, url: str, tmp_path: Path, monkeypatch):
    """Two of each kind; 25 of the eight plain ones with --exhaustive: 200 programs."""
    for name, value in environment(server).items():
        monkeypatch.setenv(name, value)
    holdfast.save(exits.STATE, url)
    total = 25 if kind in exits.KINDS else 5
    count = count_rounds(f"programs that end: {kind.__name__}", 2, total=total)
    places = folders(tmp_path, count)
    with socket.create_server(("127.0.0.1", 0), backlog=64) as silent:
        for place in places:
            (place / "silent").write_text(f"http://127.0.0.1:{silent.getsockname()[1]}")
        statuses, words = ended(kind.__name__, url, places)
    assert statuses == {{**exits.KINDS, **exits.MORE}[kind]: count}, words
    assert "Traceback" not in words or kind in (exits.raises, exits.interrupted), words
    assert "panicked" not in words
    if kind is exits.late:
        assert all((place / "ready").exists() for place in places)
