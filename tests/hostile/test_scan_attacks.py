"""No attack is clean: what makes a stock loader run something is found, or it is said that it could not be read.

That each of them does run something is shown in a child process: for some in every run, for all with `--exhaustive`.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.verbs.scan import scan
from tests.sampling import sample
from tests.support import drops_rest_of_frames

from .harness import WATCH
from .scan_attacks import ATTACKS, Attack, write

LOADER = Path(__file__).with_name("stock_loader.py")


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.name)
def test_no_attack_is_clean(attack: Attack, tmp_path: Path) -> None:
    path = write(attack, tmp_path, str(tmp_path / "marker"))
    scan(path)  # imports what it needs
    with WATCH.watching():
        report = scan(path)
    assert report.verdict() in ("dangerous", "suspicious", "unknown"), report
    assert report.verdict(strict=True) in ("dangerous", "suspicious")
    assert not (tmp_path / "marker").exists()
    # In a folder, among others, under another name, the content decides.
    assert scan(tmp_path).verdict() == report.verdict()


def test_there_are_enough() -> None:
    assert len(ATTACKS) >= 150
    assert len({attack.name for attack in ATTACKS}) == len(ATTACKS)


def test_the_loaders_run_them(tmp_path: Path) -> None:
    chosen = sample("attacks that stock loaders run", ATTACKS, len(ATTACKS) // 16)
    if importlib.util.find_spec("joblib") is None:
        chosen = [a for a in chosen if not a.loader.startswith("joblib")]
    if not drops_rest_of_frames():
        chosen = [a for a in chosen if not a.name.startswith("frames ")]
    rows = []
    for number, attack in enumerate(chosen):
        folder = tmp_path / str(number)
        folder.mkdir()
        marker = str(folder / "marker")
        rows.append(
            {
                "name": attack.name,
                "loader": attack.loader,
                "path": str(write(attack, folder, marker)),
                "marker": marker,
            }
        )
    done = subprocess.run(
        [sys.executable, str(LOADER)],
        input=json.dumps(rows).encode(),
        capture_output=True,
        timeout=250,
        cwd=tmp_path,
        check=False,
    )
    results = {}
    for line in done.stdout.decode().splitlines():
        if line.startswith('{"name"'):
            row = json.loads(line)
            results[row["name"]] = row
    quiet = [
        (a.name, results.get(a.name, {"raised": "the loader never came to it"})["raised"])
        for a in chosen
        if not results.get(a.name, {}).get("ran")
    ]
    assert not quiet, "\n".join(map(str, [*quiet, done.stderr.decode()[-2000:]]))
