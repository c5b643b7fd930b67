"""Set-up: a virtual environment of its own, and the sdists, in a folder that git ignores. What is there already is kept."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import tomllib
from dataclasses import dataclass
from pathlib import Path

from catalogue import TORCH

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]


@dataclass(frozen=True, slots=True)
class Place:
    """Where everything lies that is not ours."""

    folder: Path
    holdfast: Path = ROOT / "src"
    """The Holdfast that is put in place."""

    @property
    def python(self) -> Path:
        return self.folder / "venv" / "bin" / "python"

    def make(self) -> None:
        """The environment, with torch first and alone, so that nothing else can choose another version."""
        if not self.python.exists():
            subprocess.run([sys.executable, "-m", "venv", str(self.folder / "venv")], check=True)
        with (ROOT / "pyproject.toml").open("rb") as file:
            light = tomllib.load(file)["project"]["dependencies"]
        self.install(TORCH)
        self.install(*light, "pytest", "pytest-timeout")

    def install(self, *requirements: str) -> None:
        """Install into the environment, once for each list of requirements."""
        done = self.folder / "installed"
        line = " ".join(requirements)
        if done.exists() and line in done.read_text().splitlines():
            return
        constraint = self.folder / "torch.txt"
        constraint.write_text(TORCH + "\n")
        self._pip("install", "--constraint", str(constraint), *requirements)
        with done.open("a") as file:
            file.write(line + "\n")

    def unpacked(self, package: str, version: str) -> Path:
        """The sdist's folder, downloaded and unpacked."""
        folder = self.folder / "sdists" / f"{package}-{version}"
        if not folder.exists():
            archives = self.folder / "archives" / f"{package}-{version}"
            self._pip(
                "download",
                "--no-binary",
                ":all:",
                "--no-deps",
                "--dest",
                str(archives),
                f"{package}=={version}",
            )
            (archive,) = archives.iterdir()
            beside = folder.with_suffix(".part")
            with tarfile.open(archive) as tar:
                tar.extractall(beside, filter="data")
            os.rename(beside, folder)
        (inner,) = folder.iterdir()
        return inner

    def _pip(self, *arguments: str) -> None:
        said = subprocess.run(
            [str(self.python), "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments],
            capture_output=True,
            text=True,
        )
        if said.returncode:
            raise SystemExit(f"pip {' '.join(arguments)} failed:\n{said.stderr[-4000:]}")
