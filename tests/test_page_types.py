"""README and docs pass mypy and pyright as a user runs them: with default settings, against the types that the package brings.

A page is one module, as in `tests/test_snippets.py`: its snippets in order, each on the lines that it has in the page. A file that
the page shows (`<!-- file: train.py -->`) is a module of its own. A block that is not run is left out: it needs what is not here.
One page more has a mistake: a checker that finds that one, and nothing else, did look. pyright is basedpyright in pyright's mode,
which comes as a wheel with all it needs; pyright's own wheel downloads a package when it is first used.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

pytest.importorskip("torch")

from tests.pages import PAGES, ROOT, Block, blocks, content_of, name_of

SOURCE = ROOT / "src"
OUTSIDE = ROOT / "tests" / "formats" / "outside"
"""The package that a page shows, and imports as its users do."""

WRONG = "Text.\n\n```python\nimport holdfast\n\nholdfast.open(1, nothing=2)\n```\n"


def write_modules(page: str, content: str, folder: Path) -> dict[str, str]:
    """Write the snippets of a page as modules in which each line has its number in the page; the page of each module."""
    found: dict[str, list[Block]] = {}
    for block in blocks(content):
        if block.language == "python" and "not run" not in block.marks:
            found.setdefault(block.marks.get("file", "page"), []).append(block)
    modules = {
        re.sub(r"\W", "_", f"{page}__{name}") + ".py": parts for name, parts in found.items()
    }
    for module, parts in modules.items():
        lines = [""] * content.count("\n")
        for block in parts:
            text = block.text.splitlines()
            lines[block.line - 1 : block.line - 1 + len(text)] = text
        (folder / module).write_text("\n".join(lines) + "\n", encoding="utf-8")
    return dict.fromkeys(modules, page)


def written(folder: Path) -> dict[str, str]:
    pages = {name_of(page): content_of(page) for page in PAGES} | {"wrong.md": WRONG}
    made: dict[str, str] = {}
    for page, content in pages.items():
        made |= write_modules(page, content, folder)
    assert len(made) >= 30
    return made


def run(command: list[str], folder: Path, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", *command],
        cwd=folder,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    assert done.returncode == 1, (
        done.stdout + done.stderr
    )  # something was found, and nothing failed
    return done.stdout


def check(complaints: list[tuple[str, int, str]], modules: dict[str, str]) -> None:
    """`complaints` are about the page that is wrong, at the line where it is."""
    found = [f"{modules[module]}:{line}: {message}" for module, line, message in complaints]
    assert [one for one in found if not one.startswith("wrong.md:6: ")] == []
    assert found


@pytest.mark.slow("mypy reads every snippet of the documentation")
@pytest.mark.skipif(find_spec("mypy") is None, reason="mypy is not installed")
def test_the_pages_pass_mypy(tmp_path: Path):
    modules = written(tmp_path)
    # What a package that is installed has to be told of itself is not told to its user.
    command = [
        "mypy",
        "--config-file=",
        "--follow-imports=silent",
        "--cache-dir=.cache",
        "--output=json",
        *modules,
    ]
    lines = run(command, tmp_path, MYPYPATH=f"{SOURCE}{os.pathsep}{OUTSIDE}").splitlines()
    errors = [one for one in map(json.loads, lines) if one["severity"] == "error"]
    check([(one["file"], one["line"], one["message"]) for one in errors], modules)


@pytest.mark.slow("pyright reads every snippet of the documentation")
@pytest.mark.skipif(find_spec("basedpyright") is None, reason="basedpyright is not installed")
def test_the_pages_pass_pyright(tmp_path: Path):
    modules = written(tmp_path)
    settings = {"typeCheckingMode": "standard", "extraPaths": [str(SOURCE), str(OUTSIDE)]}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings))
    found = json.loads(
        run(["basedpyright", "--outputjson", "--pythonpath", sys.executable], tmp_path)
    )["generalDiagnostics"]
    # torch does not export all of its public names in the way that pyright asks for.
    errors = [
        one for one in found
        if one["severity"] == "error" and not (one.get("rule") == "reportPrivateImportUsage" and '"torch.' in one["message"])
    ]  # fmt: skip
    check(
        [
            (Path(one["file"]).name, one["range"]["start"]["line"] + 1, one["message"])
            for one in errors
        ],
        modules,
    )
