"""Running a program in one of two ways: with torch as it is, or with Holdfast in place of its functions."""

from __future__ import annotations

import fnmatch
import hashlib
import json
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from catalogue import Example, Suite
from place import HERE, Place

PASSED = "passed"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of one run: a word for each test, run or file, and the calls that went through Holdfast."""

    words: dict[str, str]
    saves: int = 0
    loads: int = 0

    @property
    def passed(self) -> int:
        return sum(word == PASSED for word in self.words.values())


@dataclass(frozen=True, slots=True)
class Way:
    """Stock, or ours; and the folder that this run may fill."""

    place: Place
    ours: bool
    folder: Path

    def clear(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)

    @property
    def calls(self) -> Path:
        return self.folder / "calls"

    def environment(self, *paths: Path, seed: str = "") -> dict[str, str]:
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("PYTEST", "PYTHON", "PROGRAMS"))
        }
        kept |= {
            "PYTHONPATH": os.pathsep.join(map(str, (HERE / "inside", self.place.holdfast, *paths))),
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",  # sums of floats depend on it
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_OFFLINE": "1",
            "TMPDIR": str(self.folder / "tmp"),
            "HOME": str(self.folder / "home"),
            "PROGRAMS_SEED": seed,
            "PROGRAMS_CALLS": str(self.calls) if self.ours else "",
        }
        for name in ("tmp", "home"):
            (self.folder / name).mkdir(exist_ok=True)
        return kept

    def counted(self, words: dict[str, str]) -> Outcome:
        letters = self.calls.read_bytes() if self.calls.exists() else b""
        return Outcome(words, letters.count(b"s"), letters.count(b"l"))


def run_suite(suite: Suite, way: Way, *, only: tuple[str, ...] = ()) -> Outcome:
    """The suite's tests, or `only` those, as pytest names them."""
    way.clear()
    sources = way.place.unpacked(suite.package, suite.version)
    report, log = way.folder / "report", way.folder / "log"
    command = [
        str(way.place.python),
        "-m",
        "pytest",
        "-q",
        "-p",
        "programs_report",
        "-p",
        "no:cacheprovider",
        "--timeout=300",
    ]
    command += [
        "--continue-on-collection-errors",
        "-o",
        "addopts=",
        f"--basetemp={way.folder / 'base'}",
    ]
    with log.open("w") as file:
        subprocess.run(
            [*command, *(only or suite.tests)],
            cwd=sources,
            env=way.environment(seed="1") | {"PROGRAMS_REPORT": str(report)},
            stdout=file,
            stderr=subprocess.STDOUT,
        )
    if not report.exists():
        raise SystemExit(f"{suite.package}: no test was run; see {log}")
    # A test has one line, or two where what came before or after it failed too: the worse one counts.
    words: dict[str, str] = {}
    for name, word in map(json.loads, report.read_text().splitlines()):
        words[name] = word if words.get(name, PASSED) == PASSED else words[name]
    return way.counted(words)


def run_example(example: Example, way: Way) -> Outcome:
    """The calls of a script, one after the other in an empty folder, and the sum of each file that they leave."""
    way.clear()
    # The same place both ways: programs write down where they are. What is left is kept beside the logs.
    work, kept = way.folder.parent / "work", way.folder / "work"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    sources = (
        HERE if example.origin == "here" else way.place.unpacked(example.package, example.version)
    )
    script = sources / example.script
    environment = way.environment(*[HERE / "standins"][: example.standins], seed="1") | dict(
        example.environment
    )
    words = {}
    for number, arguments in enumerate(example.runs, 1):
        with (way.folder / f"log{number}").open("w") as file:
            done = subprocess.run(
                [str(way.place.python), str(script), *arguments],
                cwd=work,
                env=environment,
                stdout=file,
                stderr=subprocess.STDOUT,
                timeout=900,
            )
        words[f"run {number}"] = PASSED if not done.returncode else f"exit {done.returncode}"
    work.rename(kept)
    for path in sorted(kept.rglob("*")):
        name = path.relative_to(kept).as_posix()
        if path.is_file() and not any(fnmatch.fnmatch(name, pattern) for pattern in example.ignore):
            words[name] = hashlib.sha256(path.read_bytes()).hexdigest()
    return way.counted(words)
