"""`holdfast convert`: output, exit codes, the bar on a terminal, and Ctrl-C."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import safetensors.numpy
from tests.faults.holes import write_holes

import holdfast
from holdfast.cli.convert import rate

COMMAND = [sys.executable, "-c", "import sys; from holdfast.cli.main import main; sys.exit(main())"]


@pytest.fixture
def source(tmp_path) -> Path:
    weight = np.arange(12, dtype=np.float32).reshape(3, 4)
    holdfast.save(
        {"model": {"w": weight, "tied": weight, "b": np.zeros(3, np.float32)}, "step": 7},
        tmp_path / "a.pt",
    )
    return tmp_path / "a.pt"


def test_one_line_says_what_was_written(run, source, tmp_path):
    code, out, err = run("convert", source, tmp_path / "b.safetensors")
    assert (code, err) == (0, "")
    first, *notes = out.splitlines()
    assert first.startswith(f"wrote {tmp_path}/b.safetensors  safetensors  ")
    assert first.endswith(" s")
    assert all(note.startswith("  note  ") for note in notes)
    assert holdfast.diff(source, tmp_path / "b.safetensors").equal


@pytest.mark.parametrize(("seconds", "shown"), [(0.05, ""), (0.9, ""), (2, ", 512.0 MiB/s")])
def test_only_a_long_conversion_shows_its_rate(seconds: float, shown: str):
    assert rate(SimpleNamespace(nbytes=1 << 30), seconds) == shown


def test_quiet_says_nothing(run, source, tmp_path):
    assert run("convert", source, tmp_path / "b.safetensors", "-q") == (0, "", "")


def test_json(run, source, tmp_path):
    code, out, err = run("convert", source, tmp_path / "b", "--json")
    assert (code, err) == (0, "")
    told = json.loads(out)
    assert (told["schema"], told["format"], told["done"]) == (1, "native", True)
    assert {file["name"] for file in told["files"]} == set(os.listdir(tmp_path / "b"))
    assert sum(file["nbytes"] for file in told["files"]) == told["write_nbytes"]
    code, out, err = run("convert", source, tmp_path / "c", "--json", "--dry-run")
    assert (json.loads(out)["done"], json.loads(out)["seconds"]) == (False, None)
    assert not (tmp_path / "c").exists()


def test_dry_run(run, source, tmp_path):
    code, out, err = run(
        "convert", source, tmp_path / "b.safetensors", "--dry-run", "--dtype", "bf16"
    )
    assert (code, err) == (0, "")
    assert [line.split()[0] for line in out.splitlines()[1:5]] == [
        "read",
        "write",
        "memory",
        "space",
    ]
    assert os.listdir(tmp_path) == ["a.pt"]


@pytest.mark.parametrize("more", [[], ["--dry-run"]])
def test_what_is_left_out_is_told(run, source, tmp_path, more):
    code, out, err = run("convert", source, tmp_path / "b.safetensors", "--tensors-only", *more)
    assert (code, err) == (0, "")
    assert "only tensors are kept; left out: 1 value: 'step'" in out


def test_every_option(run, source, tmp_path):
    options = [
        "--format",
        "safetensors",
        "--dtype",
        "f16",
        "--keep",
        "model.*",
        "--drop",
        "*.tied",
        "--rename",
        "model.*=*",
    ]
    more = [
        "--max-shard-size",
        "24B",
        "--max-memory",
        "100MiB",
        "--tensors-only",
        "--no-durable",
        "--no-read-back",
        "--threads",
        "1",
    ]
    code, _, err = run("convert", source, tmp_path / "b", *options, *more)
    assert (code, err) == (0, "")
    with holdfast.open(tmp_path / "b") as ckpt:
        assert ckpt.format == "safetensors-dir"
        assert {n: t.dtype.name for n, t in ckpt.items()} == {"w": "float16", "b": "float16"}
    assert run("convert", source, tmp_path / "b")[0] == 2
    assert run("convert", source, tmp_path / "b", "--overwrite")[0] == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nothing.pt", "b.pt"], "no such file"),
        (["a.pt", "b.tflite"], "suffix"),
        (["a.pt", "a.pt"], "exists"),
        (["a.pt", "no/b.pt"], "no such file"),
        (["a.pt", "b.pt", "--dtype", "int8"], "cannot cast"),
        (["a.pt", "b.pt", "--max-memory", "1KB"], "--max-memory is too small"),
        (["a.pt", "b.pt", "--max-memory", "much"], "not a number of bytes"),
        (["a.pt", "b.pt", "--rename", "x"], "OLD=NEW"),
        (["a.pt", "b.pt", "--threads", "0"], "not a positive integer"),
        (["a.pt"], "DST"),
    ],
)
def test_errors_are_one_line(arguments, words, run, source, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, err = run("convert", *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("holdfast: ")
    assert err.count("\n") == 1
    assert words in err
    assert os.listdir(tmp_path) == ["a.pt"]


def test_what_cannot_be_held_is_a_list(run, tmp_path):
    holdfast.save(
        {"w": np.zeros(1), "c\x1b[2J": np.zeros(1, np.complex128), "d": np.zeros(1, np.complex128)},
        tmp_path / "a.pt",
    )
    code, out, err = run("convert", tmp_path / "a.pt", tmp_path / "b.safetensors")
    assert (code, out) == (2, "")
    first, *problems = err.splitlines()
    assert first == "holdfast: safetensors cannot hold this state"
    assert [problem[:5] for problem in problems] == ["  - c", "  - d"]
    assert "\x1b" not in err
    assert os.listdir(tmp_path) == ["a.pt"]


def begun(folder: Path) -> bool:
    return any(name.endswith(".tmp") for name in os.listdir(folder))


@pytest.mark.parametrize("target", ["b.safetensors", "b"])
def test_ctrl_c_leaves_nothing_behind(target, tmp_path):
    write_holes(tmp_path / "a.pt", {f"w{i}": (1 << 22, 4) for i in range(32)})  # 2 GiB of zeros
    process = subprocess.Popen(
        [*COMMAND, "convert", "a.pt", target], cwd=tmp_path, stderr=subprocess.PIPE, text=True
    )
    end = time.monotonic() + 60
    while not begun(tmp_path) and process.poll() is None and time.monotonic() < end:
        time.sleep(0.005)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert err == "holdfast: interrupted\n"
    assert process.returncode == 130
    assert os.listdir(tmp_path) == ["a.pt"]


def test_a_bar_on_a_terminal_and_none_in_a_pipe(tmp_path):
    safetensors.numpy.save_file({"w": np.zeros(1 << 20, np.float32)}, tmp_path / "a.safetensors")
    slow = "import holdfast.cli.progress as p; p.PATIENCE_S = p.INTERVAL_S = 0.0\n"
    program = [
        sys.executable,
        "-c",
        f"{slow}import sys; from holdfast.cli.main import main; sys.exit(main())",
    ]
    arguments = ["convert", "a.safetensors", "b.pt", "--threads", "1"]
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100"}
    process = subprocess.Popen(
        [*program, *arguments], cwd=tmp_path, stderr=theirs, stdout=subprocess.PIPE, env=environment
    )
    os.close(theirs)
    shown = b""
    while process.poll() is None or select.select([ours], [], [], 0)[0]:
        if select.select([ours], [], [], 0.05)[0]:
            try:
                shown += os.read(ours, 4096)
            except OSError:
                break
    os.close(ours)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert b"Converting" in shown
    assert b"/s" in shown
    assert out.startswith(b"wrote b.pt  torch-zip")
    piped = subprocess.run(
        [*program, *arguments, "--overwrite"], cwd=tmp_path, capture_output=True, timeout=60
    )
    assert (piped.returncode, piped.stderr) == (0, b"")


def test_a_note_says_the_flag_that_it_means(run, golden_dir, tmp_path):
    code, out, err = run("convert", golden_dir / "files" / "tiny.gguf", tmp_path / "x.safetensors")
    assert (code, err) == (0, "")
    assert "convert with --dequantize, or call" in out
