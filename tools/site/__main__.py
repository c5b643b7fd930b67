"""The pages of the site, made ready for a generator of documentation: `make docs`.

    python tools/site build/pages

docs/ is copied, and what a page only names is put in its place:

    <!-- names: holdfast.torch load save -->   these public names, by their docstrings
    <!-- commands -->                           every command, as argparse knows it
    <!-- errors -->                             a table of all errors
    <!-- plot: slices: slices-*: Slices -->       figures of docs/measured/slices.json as a drawing

CHANGELOG and CONTRIBUTING come along. So the generator needs no plugin of ours, and can be another one tomorrow. Whatever is wrong
(a public name that stands on no page or on two, one that nobody wrote a sentence about) is printed, and the exit status is 1.
"""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

import commands
import errors
import plots
import reference

ROOT = Path(__file__).resolve().parent.parent.parent
BESIDE = {
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
}
"""Pages of the repository that are not in docs/, and what they are called on the site."""

WEIGHTS = {
    "design": 0.01,
    "changelog.md": 0.01,
    "contributing.md": 0.1,
    "reference": 0.3,
    "benchmarks.md": 0.3,
    "index.md": 0.5,
}
"""Pages and folders that the search ranks below the guides: a reader who asks how to do something wants a guide first."""

WIDE = {"index.md"}
"""Pages without columns beside the text."""

MARK = re.compile(r"^<!-- (names|commands|errors|plot)(?:: (.+?))? -->$", re.MULTILINE)


def main() -> int:
    target = Path(sys.argv[1])
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(ROOT / "docs", target)
    for source, name in BESIDE.items():
        (target / name).write_text(
            _moved((ROOT / source).read_text(encoding="utf-8")), encoding="utf-8"
        )
    names = reference.Names(ROOT / "src")
    for page in sorted(target.rglob("*.md")):
        text = page.read_text(encoding="utf-8")
        made = MARK.sub(
            lambda found, where=page: _made(found[1], found[2] or "", names, where), text
        )
        # What tests know of a block (its files, that it is not run) is no matter of a reader's.
        made = re.sub(r"^<!-- (files|file|not run): .+ -->\n", "", made, flags=re.MULTILINE)
        page.write_text(_with_settings(made, page.relative_to(target)), encoding="utf-8")
    problems = names.problems()
    for problem in problems:
        print(f"site: {problem}", file=sys.stderr)
    return 1 if problems else 0


def _made(kind: str, what: str, names: reference.Names, page: Path) -> str:
    """What stands in the place of a mark."""
    if kind == "names":
        return names.listed(what, page.name)
    if kind == "commands":
        return commands.as_markdown()
    if kind == "errors":
        return errors.as_markdown()
    return plots.drawn(ROOT / "docs" / "measured", what)


def _with_settings(text: str, page: Path) -> str:
    """A page below what the generator and its search are told about it."""
    settings = ["hide: [navigation, toc]"] if page.as_posix() in WIDE else []
    if weight := WEIGHTS.get(page.parts[0]):
        settings.append(f"search: {{boost: {weight}}}")
    return "\n".join(["---", *settings, "---", "", text]) if settings else text


def _moved(text: str) -> str:
    """A page of the root as one of docs/: links into docs/ lose it, and links to what is no page are text."""
    text = re.sub(r"\]\(docs/([^)]+)\)", r"](\1)", text)
    for source, name in BESIDE.items():
        text = text.replace(f"]({source}", f"]({name}")
    return re.sub(r"\[([^\]]+)\]\((?!https?:|#|mailto:)(?![\w/-]+\.md)[^)]+\)", r"\1", text)


if __name__ == "__main__":
    sys.exit(main())
