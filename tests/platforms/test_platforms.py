"""The light package on other systems, simulated by hiding and refusing what they do not have (`systems.py`).

Everything that is read, written and printed there is what it is on Linux, to the byte (`program.py`). No real macOS or Windows was
asked.
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.platforms.systems import LINUX_ALONE, POSIX_ALONE, POSIX_MODULES, SYSTEMS

ROOT = Path(__file__).resolve().parents[2]
SAME = "formats,writers,commands,replaced,positions,leftovers,failures,crashes,sealed,runs,odd"


GUARDED = {("core/runtime.py", "register_at_fork"), ("core/signals.py", "pthread_sigmask")}
"""Behind a question whether the system has it."""


def start(
    system: str, step: str, folder: Path, *, module: str = "program"
) -> subprocess.Popen[str]:
    folder.mkdir(exist_ok=True)
    paths = os.pathsep.join(map(str, [ROOT / "src", ROOT]))
    # What a terminal of Windows knows; the other systems' speak UTF-8.
    environment = os.environ | {
        "PYTHONPATH": paths,
        "PYTHONIOENCODING": "cp1252" if system == "win32" else "utf-8",
    }
    return subprocess.Popen(
        [sys.executable, "-m", f"tests.platforms.{module}", system, *([step] if step else []), str(folder)],
        cwd=folder, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def found(system: str, step: str, folder: Path) -> dict[str, Any]:
    out, err = start(system, step, folder).communicate(timeout=200)
    assert out, err[-4000:]
    return json.loads(out.replace(str(folder), "FOLDER"))


@pytest.fixture(scope="module")
def linux(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return found("linux", SAME, tmp_path_factory.mktemp("linux"))


@pytest.mark.slow("runs every verb on a simulated system in a process of its own")
@pytest.mark.parametrize("system", SYSTEMS)
def test_the_same_as_on_linux(linux: dict[str, Any], system: str, tmp_path: Path):
    there = found(system, SAME, tmp_path)
    for step, result in linux.items():
        for name, value in result.items():
            assert there[step][name] == value, f"{step}: {name}"


@pytest.mark.parametrize("system", ["darwin", "win32"])
def test_a_save_beside_another_process(system: str, tmp_path: Path):
    holding = start(system, "hold", tmp_path)
    try:
        assert holding.stdout is not None
        assert holding.stdout.readline() == "holding\n"
        assert found(system, "beside", tmp_path)["beside"] == {"temporaries": 2}
    finally:
        holding.kill()
        _, err = holding.communicate()
    assert not err
    assert found(system, "after", tmp_path)["after"] == {"left": []}


def test_the_adapter_of_torch(tmp_path: Path):
    process = start("win32", "", tmp_path, module="adapter")
    out, err = process.communicate(timeout=200)
    assert out == "done\n", err[-4000:]


def _not_everywhere(path: Path) -> set[str]:
    """What a module uses that not every system has."""
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    calls = {
        (node.value.id, node.attr)
        for node in nodes
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
    }
    alone = {*LINUX_ALONE, *POSIX_ALONE, "pthread_sigmask"}
    used = {attr for module, attr in calls if module in ("os", "signal") and attr in alone}
    used |= {
        attr
        for module, attr in calls
        if module == "mmap" and attr.startswith(("MAP_", "PROT_", "MADV_"))
    }
    used |= {
        alias.name
        for node in nodes
        if isinstance(node, ast.Import)
        for alias in node.names
        if alias.name in POSIX_MODULES
    }
    used |= {
        node.module
        for node in nodes
        if isinstance(node, ast.ImportFrom) and node.module in POSIX_MODULES
    }
    if "stores" not in path.parts:
        called = {
            node.func.id
            for node in nodes
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        }
        used |= called & {"Files"}  # `system_files` is for all
    return used


def test_what_not_every_system_has_is_called_in_one_place():
    package = ROOT / "src" / "holdfast"
    found = {
        (path.relative_to(package).as_posix(), name)
        for path in package.rglob("*.py")
        for name in _not_everywhere(path)
    }
    assert {name for module, name in found if module == "stores/platform.py"}, (
        "nothing is looked for"
    )
    assert not {
        (module, name) for module, name in found - GUARDED if module != "stores/platform.py"
    }
