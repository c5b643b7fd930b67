"""Help and tables within 80 columns, and outputs that have no Unicode."""

from __future__ import annotations

import os
import pty
import subprocess
import sys

import numpy as np
import pytest
import torch
from tests.processes import read_terminal

import holdfast
from holdfast.cli.main import main, parser
from holdfast.cli.parser import verbs_of
from holdfast.cli.text import ASCII_FORMS, broken, plain, width

VERBS = ["", *verbs_of(parser())]


@pytest.mark.parametrize("verb", VERBS)
def test_help_is_within_80_columns_and_loses_nothing(verb, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    main([*filter(None, [verb]), "--help"])
    narrow = capsys.readouterr().out
    assert max(map(len, narrow.splitlines())) <= 80
    monkeypatch.setenv("COLUMNS", "400")
    main([*filter(None, [verb]), "--help"])
    assert narrow.split() == capsys.readouterr().out.split()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("width")
    layer = {
        f"transformer.layers.{i}.self_attention.query_key_value.weight": torch.randn(4, 4 + i)
        for i in range(3)
    }
    values = {"step": 7, "text": "word " * 60, "lr": [0.1] * 40}
    torch.save(
        {"model": {**layer, "a" * 100: torch.ones(2), "poids été → …": torch.zeros(3)}, **values},
        folder / "a.pt",
    )
    torch.save({"model": {**layer, "b": torch.ones(3)}, **values}, folder / "b.pt")
    holdfast.save({"w": np.eye(64, dtype=np.float32)}, folder / "c.safetensors")
    return folder


CALLS = """
show a.pt
show a.pt --all
show a.pt --filter *
show a.pt --sparsity
show a.pt --ranks
read a.pt model.*
read a.pt step text lr
read c.safetensors w
scan a.pt c.safetensors
verify a.pt
diff a.pt b.pt
stats a.pt
convert a.pt d.pt --dry-run
tie a.pt --dry-run
prune c.safetensors e.safetensors --rule w:0.5 --dry-run
convert a.pt b.pt
convert --help
prune --help
nonsense
show none
""".strip().splitlines()

DRIVER = """
import sys
from holdfast.cli.main import main
for line in sys.argv[1].splitlines():
    sys.stdout.write(f"CALL> {line}\\n")
    sys.stdout.flush()
    main(line.split())
    sys.stderr.flush()
"""
"""All of them, one behind the other, in one process: starting one takes longer than what it does."""


def by_call(said: str) -> dict[str, list[str]]:
    assert "Traceback" not in said
    assert "internal error" not in said
    parts = [part.splitlines() for part in said.replace("\r\n", "\n").split("CALL> ")[1:]]
    return {lines[0]: lines[1:] for lines in parts}


@pytest.fixture(scope="module")
def on_terminal(folder) -> dict[str, list[str]]:
    """The lines that a terminal of 80 columns gets."""
    parent, child = pty.openpty()
    clean = {k: v for k, v in os.environ.items() if k not in ("TERM", "NO_COLOR")}
    environment = {**clean, "COLUMNS": "80", "TERM": "dumb"}
    command = [sys.executable, "-c", DRIVER, "\n".join(CALLS)]
    with subprocess.Popen(command, stdout=child, stderr=child, cwd=folder, env=environment):
        os.close(child)
        seen = read_terminal(parent)
    return by_call(seen.decode())


@pytest.fixture(scope="module")
def in_ascii(folder) -> dict[str, list[str]]:
    environment = {
        **os.environ,
        "LC_ALL": "C",
        "PYTHONUTF8": "0",
        "PYTHONCOERCECLOCALE": "0",
        "PYTHONIOENCODING": "ascii",
    }
    command = [sys.executable, "-c", DRIVER, "\n".join(CALLS)]
    done = subprocess.run(
        command,
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=120,
    )
    return by_call(done.stdout.decode("ascii"))


@pytest.mark.parametrize("call", CALLS)
def test_no_line_is_wider_than_the_terminal(on_terminal, call):
    assert on_terminal[call]
    assert [line for line in on_terminal[call] if width(line) > 80] == []


@pytest.mark.parametrize("call", CALLS)
def test_ascii_locales(in_ascii, call):
    assert in_ascii[call]
    for char in map(chr, ASCII_FORMS):
        assert f"\\u{ord(char):04x}" not in "".join(in_ascii[call])


def test_broken_lines_lose_nothing():
    line = [("name " * 30, "name"), ("x" * 100, "dim"), ("  tail", "")]
    pieces = list(broken(line, 40))
    assert all(width(plain(piece)) <= 40 for piece in pieces)
    assert "".join("".join(plain(piece).split()) for piece in pieces) == "".join(
        plain(line).split()
    )
    assert {style for piece in pieces for text, style in piece if text.strip()} == {
        "name",
        "dim",
        "",
    }


def test_everything_of_ours_that_is_drawn_has_a_plainer_form():
    from holdfast.cli import show, stats  # where things are drawn

    for module in (show, stats):
        with open(module.__file__, encoding="utf-8") as file:
            assert {char for char in file.read() if not char.isascii()} <= set(
                map(chr, ASCII_FORMS)
            )
