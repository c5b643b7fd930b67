"""What the README shows is what happens: each command in it is run, and so is its Python."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def tidy(text: str) -> str:
    return "\n".join(line.rstrip() for line in text.strip().splitlines())


def output(command: str) -> str:
    words = shlex.split(command)
    assert words[0] == "holdfast"
    run = [sys.executable, "-c", "import sys; from holdfast.cli.main import main; sys.exit(main())", *words[1:]]
    environment = {**os.environ, "COLUMNS": "110", "NO_COLOR": "1", "PYTHONIOENCODING": "utf-8"}
    done = subprocess.run(run, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1), done.stderr
    return done.stdout


def test_the_commands():
    (console,) = blocks("console")
    shown = re.split(r"^\$ (.*)\n", console, flags=re.MULTILINE)[1:]
    assert len(shown) == 6
    for command, wanted in zip(shown[::2], shown[1::2], strict=True):
        assert tidy(output(command)) == tidy(wanted), command


def test_the_python(monkeypatch):
    monkeypatch.chdir(ROOT)
    (source,), (wanted,) = blocks("python"), blocks("text")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(source, "README.md", "exec"), {})
    assert tidy(printed.getvalue()) == tidy(wanted)


def test_the_links():
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", README) if "://" not in link]
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []
