"""What `holdfast verify` prints, its exit codes, and the progress bar that it shares with other commands."""

from __future__ import annotations

import json
import os
import pty
import shutil
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from safetensors.numpy import save_file
from tests.processes import read_terminal
from tests.support import flip_bit

import holdfast
from holdfast.cli import progress
from holdfast.cli.text import plain
from holdfast.cli.verify import verify_lines
from holdfast.verbs.verify import Damage, Problem, VerifyReport


@pytest.fixture
def broken(golden_dir, tmp_path):
    """A file with one damaged storage that two names share, and that storage."""
    path = tmp_path / "broken.pt"
    shutil.copy(golden_dir / "files/plain.pt", path)
    with holdfast.open(path) as checkpoint:
        storage = checkpoint["embed.weight"].storages[0]
    flip_bit(path, storage.start + 3)
    return path, storage


def test_exit_codes_and_text(run, golden_dir, broken, tmp_path):
    sound = golden_dir / "files/plain.pt"
    path, storage = broken
    code, out, err = run("verify", sound)
    assert (code, out, err) == (0, f"{sound}  torch-zip  ok  1.2 KiB checked\n", "")
    code, out, err = run("verify", sound, path)
    assert (code, err) == (1, "")
    line = out.splitlines()[2]
    assert line.startswith(
        f"  damaged  embed.weight, head.weight  {storage.label}  byte {storage.start:,}, 24 B  expected "
    )
    code, out, err = run("verify", path, tmp_path / "missing.pt")
    assert (code, err) == (2, "")
    assert "  error    no such file" in out
    code, out, _ = run("verify", golden_dir / "files/hf_index")
    assert code == 0
    assert "no checksums for 4 tensors, 74 B: readable, but the content cannot be verified" in out


def test_json(run, broken, tmp_path):
    path, storage = broken
    code, out, _ = run("verify", path, tmp_path / "missing.pt", "--json")
    assert code == 2
    document = json.loads(out)
    assert (document["schema"], document["ok"]) == (1, False)
    first, second = document["checkpoints"]
    (damage,) = first["damaged"]
    assert (damage["tensors"], damage["offset"], damage["nbytes"]) == (
        ["embed.weight", "head.weight"],
        storage.start,
        24,
    )
    assert (damage["expected"], damage["file"]) == (storage.crc32, str(path))
    assert [p["kind"] for p in second["problems"]] == ["NoSuchPath"]


def test_hostile_text_is_escaped_and_long_lists_are_cut():
    nasty = "x\x1b[2J\u202e\n"
    damage = Damage(nasty, (nasty,) * 9, nasty, 0, 1, 2, None)
    report = VerifyReport(
        nasty, "torch-zip", damaged=(damage,) * 60, problems=(Problem(nasty, nasty, "ZipError", (nasty,)),), checked_nbytes=3,
        unchecked=(nasty,), unchecked_nbytes=1,
    )  # fmt: skip
    lines = [plain(line) for line in verify_lines(report)]
    assert all(line.isprintable() for line in lines)
    assert any("10 more" in line for line in lines)
    assert any("and 5 more" in line for line in lines)
    assert len(list(verify_lines(report, everything=True))) == len(lines) + 9


def test_no_bar_without_a_terminal(capsys):
    with progress.bar("Working", 10) as step:
        step(10)
    assert step is progress._nothing
    assert capsys.readouterr() == ("", "")


class Terminal:
    """A standard error that says it is a terminal."""

    encoding = "utf-8"

    def __init__(self) -> None:
        self.text = ""

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self.text += text
        return len(text)

    def flush(self) -> None:
        pass


def test_bars_count_from_many_threads_and_draw_seldom(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    with progress.bar("Quick", 100) as quick:
        quick(100)
    assert terminal.text == ""
    with progress.bar("Silent", 100, quiet=True) as silent:
        assert silent is progress._nothing
    monkeypatch.setattr(progress, "PATIENCE_S", 0.0)
    with progress.bar("Working\x1b[2J", 40_000 << 20) as step:
        updates = []
        step(0)
        draw = step._drawn.update
        monkeypatch.setattr(
            step._drawn, "update", lambda *a, **k: (updates.append(1), draw(*a, **k))
        )
        began = time.monotonic()
        threads = [
            threading.Thread(target=lambda: [step(1 << 20) for _ in range(5000)]) for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert step._done == 20_000 << 20
        assert len(updates) <= (time.monotonic() - began) / progress.INTERVAL_S + 1
        time.sleep(0.25)
    assert r"Working\x1b[2J" in terminal.text
    assert "GiB" in terminal.text
    assert "\x1b[?25h" in terminal.text  # the cursor is back


SLOW = """
import sys, time
from holdfast.cli import main, progress
from holdfast.stores import local
read = local.LocalStore.read
def slow(self, key, start, out):
    if out.nbytes > 1000:
        time.sleep(0.3)
    read(self, key, start, out)
local.LocalStore.read = slow
from holdfast.engine import checksums as sweep
sweep.RangeSums.__init__.__kwdefaults__["block_nbytes"] = 4096
sys.exit(main.main(["verify", sys.argv[1]]))
"""


def test_interrupted_on_a_terminal(tmp_path):
    """Ctrl-C while a bar is drawn: exit code 130, one line, the cursor back."""
    path = tmp_path / "x.safetensors"
    save_file({"x": np.zeros(1 << 19, np.uint8)}, path)
    parent, child = pty.openpty()
    environment = {**os.environ, "TERM": "xterm"}
    command = [sys.executable, "-c", SLOW, str(path)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=child, env=environment
    ) as process:
        os.close(child)
        seen = b""
        while b"Verifying" not in seen:
            seen += os.read(parent, 65536)
        process.send_signal(signal.SIGINT)
        # Read the terminal to its end first: a terminal that nobody reads would make the last line wait.
        seen += read_terminal(parent)
        out = process.stdout.read()
    assert (process.returncode, out) == (130, b"")
    assert seen.rstrip().endswith(b"holdfast: interrupted")
    assert b"\x1b[?25h" in seen
    assert sorted(p.name for p in tmp_path.iterdir()) == ["x.safetensors"]
