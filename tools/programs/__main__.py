"""Other people's programs, with torch's `save` and `load` and with Holdfast in their place: `make programs`.

    python tools/programs                    all of them
    python tools/programs skorch poutyne     these packages; `torch` stands for scripts that use it alone
    python tools/programs --cache FOLDER     where the environment and the sdists lie (.cache/programs)
    python tools/programs --holdfast FOLDER  the Holdfast that is put in place (src)

Each program runs twice, in an environment of its own. A test that ends differently is run again, alone, both ways; if it differs
again in the same way, it is listed with the reason that `catalogue.py` has for it. The exit status is 1 if one has none.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

from catalogue import EXAMPLES, OURS, REASONS, SUITES, Example, Suite
from place import ROOT, Place
from running import PASSED, Outcome, Way, run_example, run_suite


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table, and below it the differences by name."""

    program: str
    what: str
    stock: Outcome
    ours: Outcome
    differences: dict[str, tuple[str, str]]

    @property
    def unexplained(self) -> bool:
        return not self.stock.passed or any(not _reason(name) for name in self.differences)

    def __str__(self) -> str:
        calls = f"{self.ours.saves} + {self.ours.loads}"
        counts = f"{len(self.stock.words)} | {self.stock.passed} | {self.ours.passed}"
        return f"| {self.program} | {self.what} | {counts} | {calls} | {len(self.differences) or 'none'} |"


def _reason(name: str) -> str:
    return next((reason.why for reason in REASONS if reason.test in name), "")


def _differences(stock: Outcome, ours: Outcome) -> dict[str, tuple[str, str]]:
    names = dict.fromkeys((*stock.words, *ours.words))
    pairs = {
        name: (stock.words.get(name, "absent"), ours.words.get(name, "absent")) for name in names
    }
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def _suite(suite: Suite, place: Place) -> Row:
    place.install(f"{suite.package}=={suite.version}", *suite.needs)
    ways = [
        Way(place, ours, place.folder / "runs" / suite.package / ("ours" if ours else "stock"))
        for ours in (False, True)
    ]
    stock, ours = (run_suite(suite, way) for way in ways)
    differences = _differences(stock, ours)
    again = tuple(name for name in differences if "::" in name)
    if again:
        ways = [
            Way(place, way.ours, way.folder.with_name(way.folder.name + "-again")) for way in ways
        ]
        twice = _differences(*(run_suite(suite, way, only=again) for way in ways))
        chance = dict.fromkeys(
            (name for name in again if twice.get(name) != differences[name]), "by chance"
        )
        stock, ours = (
            Outcome(each.words | chance, each.saves, each.loads) for each in (stock, ours)
        )
        differences = {name: pair for name, pair in differences.items() if name not in chance}
    return Row(
        f"{suite.package} {suite.version}",
        f"its tests: {_short(suite.tests)}",
        stock,
        ours,
        differences,
    )


def _short(tests: tuple[str, ...]) -> str:
    names = [Path(test.split("::")[0]).stem.removeprefix("test_") for test in tests]
    return ", ".join(dict.fromkeys(names))


def _example(example: Example, place: Place) -> Row:
    if example.package != "torch":
        place.install(f"{example.package}=={example.version}", *example.needs)
    folder = place.folder / "runs" / example.package / Path(example.script).stem
    stock, ours = (
        run_example(example, Way(place, way == "ours", folder / way)) for way in ("stock", "ours")
    )
    differences = {name: _told(*pair) for name, pair in _differences(stock, ours).items()}
    if any(word != PASSED for name, word in stock.words.items() if name.startswith("run ")):
        return Row(
            f"{example.package} {example.version}",
            f"`{example.script}` FAILS WITH TORCH",
            Outcome({}),
            ours,
            {},
        )
    # Files count as passed where they are the same.
    files = [name for name in stock.words if not name.startswith("run ")]
    stock = Outcome(stock.words | dict.fromkeys(files, PASSED))
    ours = Outcome(
        ours.words | {name: PASSED for name in files if name not in differences},
        ours.saves,
        ours.loads,
    )
    return Row(
        f"{example.package} {example.version}", f"`{example.script}`", stock, ours, differences
    )


def _told(stock: str, ours: str) -> tuple[str, str]:
    """Sums of files tell a person nothing."""
    return stock[:12], ours[:12]


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="programs", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("packages", nargs="*")
    parser.add_argument("--cache", type=Path, default=ROOT / ".cache" / "programs")
    parser.add_argument("--holdfast", type=Path, default=ROOT / "src")
    asked = parser.parse_args()
    place = Place(asked.cache.resolve(), asked.holdfast.resolve())
    place.folder.mkdir(parents=True, exist_ok=True)
    place.make()
    rows = []
    print(
        "| program | what | tests, or runs and files | passed with torch | with Holdfast | saves + loads | differences |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- |", flush=True)
    for program in (*OURS, *EXAMPLES, *SUITES):
        if not asked.packages or program.package in asked.packages:
            row = _suite(program, place) if isinstance(program, Suite) else _example(program, place)
            rows.append(row)
            print(row, flush=True)
    for row in rows:
        for name, (stock, ours) in row.differences.items():
            print(
                f"\n{row.program}: {name}\n    torch: {stock}; Holdfast: {ours}; {_reason(name) or 'NO REASON IS KNOWN'}"
            )
    return int(any(row.unexplained for row in rows))


if __name__ == "__main__":
    sys.exit(main())
