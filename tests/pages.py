"""The pages that people read (README and docs), as a sequence of things that can be run.

    ```python                      run, in one namespace for the whole page
    ```text                        directly below it: what it printed
    ```console                     `$ command`, and below it what it prints, if anything is shown; … stands for any text
    ```bash                        commands, a line each
    ```json                        is parsed
    | before | with Holdfast |      a table with this head: a cell that is nothing but `code` is run like a snippet

Comments that a reader of the page does not see say the rest, each on a line of its own:

    <!-- files: a.pt, b.safetensors -->     the page has these from here on: `tests/page_files.py` makes them. A reader
                                            has none of them: only where a page speaks of commands or formats, and says so
    <!-- file: train.py -->                 the block below is the content of this file, and is run by a command further down
    <!-- not run: needs eight GPUs -->      the block below is not run, and why; `test_snippets.py` has the list of all
    <!-- names: holdfast open read -->      the site has these names here; so with commands, errors and plots (tools/site)

Code is in fences and nowhere else, so that no snippet is overlooked: an indented block is a drawing, a record or a synopsis.
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", ROOT / "PYPI.md", *sorted((ROOT / "docs").rglob("*.md"))]

LANGUAGES = {"python", "console", "bash", "text", "json"}
MARKS = {"files", "file", "not run"}
MADE = re.compile(r"<!-- (names: .+|commands|errors|plot: .+) -->")
"""What the site puts something in the place of."""
SWITCH = ["| before", "with Holdfast |"]
"""The head of a table whose cells are run."""


@dataclass(frozen=True)
class Block:
    """What is between two fences."""

    line: int
    """The line of the page that its first line is."""
    language: str
    text: str
    marks: dict[str, str] = field(default_factory=dict)
    """What the comments right above it say."""

    @property
    def is_code(self) -> bool:
        return self.language in ("python", "console", "bash")


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def content_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def blocks(content: str) -> list[Block]:
    """The fenced blocks of a page, in order."""
    found: list[Block] = []
    marks: dict[str, str] = {}
    inside: list[str] | None = None
    language, line, table = "", 0, False
    for number, text in enumerate(content.splitlines(), 1):
        table = table and text.startswith("|")
        if inside is not None:
            if text.strip() == "```":
                found.append(Block(line, language, "".join(inside), marks))
                inside, marks = None, {}
            else:
                inside.append(f"{text}\n")
        elif fence := re.fullmatch(r"\s*```(\S*)\s*", text):
            language, line, inside = fence[1], number + 1, []
            if language not in LANGUAGES:
                raise ValueError(
                    f"line {number}: a fence of {language!r}; known are {sorted(LANGUAGES)}"
                )
        elif MADE.fullmatch(text):
            continue
        elif comment := re.fullmatch(r"<!-- ([\w ]+): (.+) -->", text):
            if comment[1] not in MARKS:
                raise ValueError(
                    f"line {number}: nobody understands {text}; known are {sorted(MARKS)}"
                )
            marks[comment[1]] = comment[2]
        elif text.startswith("|"):
            table = table or text.split(" | ")[:2] == SWITCH
            cells = (
                re.findall(r"(?<=\| )`([^`]+)`(?= \|)", text.replace(" | ", " | | "))
                if table
                else []
            )
            found += [Block(number, "python", f"{cell}\n") for cell in cells]
        elif "<!--" in text:
            raise ValueError(f"line {number}: nobody understands {text}")
        elif text.strip() and marks:
            raise ValueError(f"line {number}: {marks} stands above something that is no fence")
    if inside is not None:
        raise ValueError(f"line {line}: this fence is never closed")
    return found


def indented(content: str) -> Iterator[tuple[int, str]]:
    """The paragraphs that are set off by four spaces, each with its first line; what is inside of fences is none."""
    fenced, before = False, ""
    block: list[str] = []
    for number, text in enumerate([*content.splitlines(), ""], 1):
        if re.match(r"\s*```", text):
            fenced = not fenced
        if not fenced and text.startswith("    ") and (block or not before.strip()):
            block.append(text)
        elif block:
            yield number - len(block), textwrap.dedent("\n".join(block))
            block = []
        before = text


def is_python(text: str) -> bool:
    """Whether a text is Python that does something."""
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return False
    return any(isinstance(node, ast.Call | ast.Import | ast.ImportFrom) for node in ast.walk(tree))


def commands(block: Block) -> list[tuple[str, str | None]]:
    """The commands of a console or of a script, and what the page shows below each; None where it shows nothing."""
    if block.language == "bash":
        lines = block.text.replace("\\\n", " ").splitlines()
        return [(line, None) for line in lines if line.strip() and not line.startswith("#")]
    parts = re.split(r"^\$ (.*)\n", block.text, flags=re.MULTILINE)
    if parts[0].strip():
        raise ValueError(f"line {block.line}: a console begins with a command: '$ …'")
    return [
        (command, shown if shown.strip() else None)
        for command, shown in zip(parts[1::2], parts[2::2], strict=True)
    ]


def headings(content: str) -> set[str]:
    """What a link into a page may name behind its #."""
    titles = re.findall(
        r"^#+ (.*)$",
        re.sub(r"^```.*?^```$", "", content, flags=re.MULTILINE | re.DOTALL),
        re.MULTILINE,
    )
    plain = [
        re.sub(r"[^\w\- ]", "", re.sub(r"\]\([^)]*\)", "", title)).strip().lower()
        for title in titles
    ]
    return {title.replace(" ", "-") for title in plain}


def links(content: str) -> list[str]:
    """What a page links to in this repository."""
    return [
        link
        for link in re.findall(r"\]\(([^)\s]+)\)", content)
        if "://" not in link and not link.startswith("mailto:")
    ]
