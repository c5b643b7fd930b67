"""Formats and commands of other packages: found when nothing built in fits, and never a danger."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
from tests.support import flip_bit

import holdfast
from holdfast.cli.main import main
from holdfast.core.registry import find_plugins, load_object
from holdfast.errors import HoldfastWarning, UnknownFormat, Unsupported
from holdfast.formats import PLUGINS, format_of, load_plugins

OUTSIDE = Path(__file__).parent / "outside"

STATE = {"w": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.array([7, 8], np.int64)}

TOY_FILE = b"TOY:" + (2).to_bytes(8, "little") + b"{}"


def write_distribution(
    directory: Path, name: str, entry_points: Mapping[str, Mapping[str, str]]
) -> None:
    """Write the metadata of an installed package, as pip does."""
    metadata = directory / f"{name.replace('-', '_')}-1.0.dist-info"
    metadata.mkdir()
    metadata.joinpath("METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    lines = []
    for group, points in entry_points.items():
        lines.append(f"[{group}]")
        lines += [f"{point} = {value}" for point, value in points.items()]
    metadata.joinpath("entry_points.txt").write_text("\n".join(lines))


def install_toy(directory: Path) -> None:
    """Install the package in `outside/` into a folder, without a network."""
    project = tomllib.loads(OUTSIDE.joinpath("pyproject.toml").read_text())
    write_distribution(directory, project["project"]["name"], project["project"]["entry-points"])
    for module in project["tool"]["setuptools"]["py-modules"]:
        source = OUTSIDE.joinpath(f"{module}.py").read_text()
        directory.joinpath(f"{module}.py").write_text(source)


Install = Callable[..., None]


def forget_plugins() -> None:
    find_plugins.cache_clear()
    load_plugins.cache_clear()
    load_object.cache_clear()
    PLUGINS.clear()


@pytest.fixture
def install(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch):
    """Install a package that consists of one module, or the toy."""
    directory = tmp_path_factory.mktemp("site")
    monkeypatch.syspath_prepend(directory)

    def install(
        name: str = "", source: str = "", *, formats: Mapping[str, str] = {}, commands: Mapping[str, str] = {}
    ) -> None:  # fmt: skip
        if not name:
            install_toy(directory)
        else:
            points = {"holdfast.formats": formats, "holdfast.commands": commands}
            write_distribution(directory, name, points)
            directory.joinpath(f"{name}.py").write_text(source)
        importlib.invalidate_caches()

    forget_plugins()
    yield install
    forget_plugins()
    for module in ("holdfast_toy", "holdfast_toy_command", "other_format"):
        sys.modules.pop(module, None)


def test_all_verbs_accept_a_format_of_another_package(tmp_path: Path, install: Install):
    install()
    path = tmp_path / "model.toy"
    holdfast.save(STATE, path)
    with holdfast.open(path) as checkpoint:
        assert checkpoint.format == "toy"
        assert checkpoint["w"][1:].numpy().tolist() == [[3, 4, 5]]
    assert holdfast.verify(path).verdict == "ok"
    holdfast.convert(path, tmp_path / "model.safetensors")
    assert holdfast.diff(path, tmp_path / "model.safetensors").equal
    holdfast.convert(tmp_path / "model.safetensors", tmp_path / "again", format="toy")
    assert holdfast.diff(path, tmp_path / "again").equal


def test_verify_notices_a_changed_byte(tmp_path: Path, install: Install):
    install()
    path = tmp_path / "model.toy"
    holdfast.save(STATE, path)
    flip_bit(path, -9)
    assert holdfast.verify(path).verdict == "damaged"


def test_the_command_line_has_the_format_and_the_command_of_a_package(
    tmp_path: Path, install: Install, capsys: pytest.CaptureFixture[str]
):
    install()
    path = tmp_path / "model.toy"
    holdfast.save(STATE, path)
    copy = str(tmp_path / "copy")
    assert main(["show", str(path)]) == 0
    assert main(["read", str(path), "b"]) == 0
    assert main(["verify", str(path)]) == 0
    assert main(["convert", str(path), copy, "--format", "toy", "--quiet"]) == 0
    assert main(["diff", str(path), copy]) == 0
    capsys.readouterr()
    assert main(["toys", str(path)]) == 0
    assert capsys.readouterr().out == "w\nb\n"
    assert main(["--help"]) == 0
    assert "a command of the package holdfast-toy" in " ".join(capsys.readouterr().out.split())


def test_a_new_process_finds_an_installed_package(tmp_path: Path):
    """As a user runs it: in a new process, with the package in a folder of the path."""
    install_toy(tmp_path)
    path = tmp_path / "model.toy"
    path.write_bytes(TOY_FILE)
    done = subprocess.run(
        [sys.executable, "-m", "holdfast", "show", str(path)],
        env={"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "toy" in done.stdout


def test_without_the_package_the_format_is_unknown(install: Install, tmp_path: Path):
    with pytest.raises(UnknownFormat):
        holdfast.open(TOY_FILE)
    with pytest.raises(Unsupported, match="there is no format 'toy'"):
        holdfast.save(STATE, tmp_path / "x", format="toy")


def test_scan_never_calls_a_plugin(tmp_path: Path, install: Install):
    install()
    path = tmp_path / "model.toy"
    path.write_bytes(TOY_FILE)
    report = holdfast.scan(path)
    assert (report.verdict(), report.verdict(strict=True)) == ("unknown", "suspicious")
    assert "toy of holdfast-toy" in report.reports[0].findings[0].reason
    assert "holdfast_toy" not in sys.modules
    # Also if a plugin has been loaded meanwhile.
    with holdfast.open(path):
        assert "holdfast_toy" in sys.modules
    assert holdfast.scan(path).verdict() == "unknown"


def test_a_built_in_format_does_not_look_for_plugins(
    tmp_path: Path, install: Install, monkeypatch: pytest.MonkeyPatch
):
    def fail(**more: object) -> None:
        raise AssertionError("entry points were looked up")

    monkeypatch.setattr(importlib.metadata, "distributions", fail)
    holdfast.save(STATE, tmp_path / "a.safetensors")
    holdfast.save(STATE, tmp_path / "a.pt", format="torch")
    with holdfast.open(tmp_path / "a.safetensors") as checkpoint:
        assert checkpoint.read()["b"].tolist() == [7, 8]
    holdfast.convert(tmp_path / "a.pt", tmp_path / "native")
    assert holdfast.scan(tmp_path).verdict() == "clean"
    assert main(["show", str(tmp_path / "a.pt")]) == 0


GREEDY = """
from holdfast.formats import Format
OTHER = Format("native", f"{__name__}:describe", b"TOY:", "", (".safetensors",))
"""


def test_a_plugin_does_not_replace_a_built_in_format(install: Install):
    install("other_format", GREEDY, formats={"native": "other_format:OTHER"})
    with (
        pytest.warns(HoldfastWarning, match="'native' of the package other_format is ignored"),
        pytest.raises(UnknownFormat),
    ):
        holdfast.open(TOY_FILE)
    assert "other_format" not in sys.modules
    assert format_of("native").folder


BROKEN = {
    "an import that fails": ("import nothing_of_this_name", "nothing_of_this_name"),
    "no such object": ("", "has no attribute 'OTHER'"),
    "something else": ("OTHER = 5", "must name a holdfast.formats.Format called 'other'"),
    "another name": (GREEDY, "must name a holdfast.formats.Format called 'other'"),
}


@pytest.mark.parametrize(("source", "problem"), BROKEN.values(), ids=list(BROKEN))
def test_a_broken_plugin_is_named_and_the_others_work(
    install: Install, tmp_path: Path, source: str, problem: str
):
    install("other_format", source, formats={"other": "other_format:OTHER"})
    install()
    with pytest.raises(UnknownFormat, match="package other_format") as caught:
        holdfast.open(b"neither of these")
    assert problem in str(caught.value)
    holdfast.save(STATE, tmp_path / "a.toy")
    with pytest.raises(Unsupported, match="package other_format"):
        holdfast.save(STATE, tmp_path / "a", format="other")


FAILING = """
from holdfast.formats import Format
OTHER = Format("other", f"{__name__}:describe", b"OTHER", f"{__name__}:is_other")
def is_other(source, key):
    if source.read_head(key, 6) == b"OTHER!":
        raise KeyError("a bug")
    return True
def describe(source):
    raise ZeroDivisionError("a bug")
"""


@pytest.mark.parametrize("content", [b"OTHER", b"OTHER!"])
def test_an_error_of_a_plugin_names_its_package(install: Install, content: bytes):
    install("other_format", FAILING, formats={"other": "other_format:OTHER"})
    with pytest.raises(holdfast.HoldfastError, match=r"package other_format failed: .*a bug"):
        holdfast.open(content)


@pytest.mark.parametrize(
    ("source", "problem"),
    [("import nothing_of_this_name", "cannot be loaded"), ("", "is not a command")],
)
def test_a_broken_command_is_named(
    install: Install, source: str, problem: str, capsys: pytest.CaptureFixture[str]
):
    install("other_format", source, commands={"other": "other_format"})
    assert main(["other"]) == 2
    error = capsys.readouterr().err
    assert "package other_format" in error
    assert problem in error
    assert main(["--help"]) == 0


def test_a_plugin_does_not_replace_a_built_in_command(
    install: Install, capsys: pytest.CaptureFixture[str]
):
    install("other_format", "", commands={"show": "other_format"})
    with pytest.warns(HoldfastWarning, match="'show' of the package other_format is ignored"):
        assert main(["--help"]) == 0
    assert main(["show", "--help"]) == 0
    assert "other_format" not in sys.modules


def test_a_package_in_the_current_folder_is_ignored(tmp_path: Path):
    """A downloaded folder with the metadata of a package must not run code, with `python -m` either."""
    install_toy(tmp_path)
    tmp_path.joinpath("holdfast_toy.py").write_text("print('executed')")
    tmp_path.joinpath("model.toy").write_bytes(TOY_FILE)
    done = subprocess.run(
        [sys.executable, "-m", "holdfast", "show", "model.toy"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "executed" not in done.stdout + done.stderr
    assert "not a checkpoint" in done.stderr


def test_a_package_with_broken_metadata_is_ignored(
    install: Install, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
):  # fmt: skip
    directory = tmp_path_factory.mktemp("torn")
    metadata = directory / "torn-1.0.dist-info"
    metadata.mkdir()
    metadata.joinpath("entry_points.txt").write_text("[holdfast.formats]\nno equals sign\n")
    monkeypatch.syspath_prepend(directory)
    install()
    holdfast.save(STATE, tmp_path / "a.toy")
    assert holdfast.open(tmp_path / "a.toy").format == "toy"


def test_the_documentation_shows_the_toy_format():
    page = OUTSIDE.parents[2].joinpath("docs", "reference", "extending.md").read_text()
    assert OUTSIDE.joinpath("holdfast_toy.py").read_text() in page
