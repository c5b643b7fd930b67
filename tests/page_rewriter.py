"""Puts into README and docs what their blocks print now.

    make pages                              all pages
    make pages ARGS="docs/cli.md README.md" some

1. Each page is run from its top to its end, as in `test_snippets.py`.
2. Lines that are still right stay, with each … in them. In a line that changed, a … stays where it stood.
3. A block that fails is reported and stays as it is; the exit status is then 1.

Read the difference before you commit it: what is printed may be wrong as well.
"""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Sequence
from difflib import SequenceMatcher
from pathlib import Path

from tests.page_reader import (
    NEEDS,
    Mismatch,
    is_line_shown,
    page_environment,
    read_page,
    tidy,
)
from tests.pages import PAGES, blocks, content_of, name_of

ANY_TEXT = "…"


def rewrite_page(content: str, mismatches: Sequence[Mismatch]) -> str:
    """Return a page in which each mismatch shows what is printed."""
    lines = content.splitlines(keepends=True)
    # From the end on, so that lines above keep their numbers.
    for mismatch in sorted(mismatches, key=lambda mismatch: mismatch.line, reverse=True):
        start = mismatch.line - 1
        stop = start + len(mismatch.shown.rstrip().splitlines())
        updated = update_shown(mismatch.shown, mismatch.printed)
        lines[start:stop] = [f"{line}\n" for line in updated.splitlines()]
    return "".join(lines)


def update_shown(shown: str, printed: str) -> str:
    """Return what a page shows from now on, line by line."""
    shown_lines, printed_lines = tidy(shown), tidy(printed)
    updated_lines: list[str] = []
    shown_start = printed_start = 0
    end = (len(shown_lines), len(printed_lines))
    for shown_index, printed_index in [*find_common_lines(shown_lines, printed_lines), end]:
        old_lines = shown_lines[shown_start:shown_index]
        new_lines = printed_lines[printed_start:printed_index]
        # As many lines as before are the same lines with other words.
        if len(old_lines) == len(new_lines):
            new_lines = [update_line(*pair) for pair in zip(old_lines, new_lines, strict=True)]
        updated_lines += [*new_lines, *shown_lines[shown_index : shown_index + 1]]
        shown_start, printed_start = shown_index + 1, printed_index + 1
    return "\n".join(updated_lines)


def find_common_lines(
    shown_lines: Sequence[str], printed_lines: Sequence[str]
) -> list[tuple[int, int]]:
    """Find the longest sequence of shown lines that are still printed, as pairs of positions.

    This is the longest common subsequence, where a … makes a line equal to many.
    """
    # lengths[i][j] is the length of the sequence for the lines from i and from j on.
    lengths = [[0] * (len(printed_lines) + 1) for _ in range(len(shown_lines) + 1)]
    for i in reversed(range(len(shown_lines))):
        for j in reversed(range(len(printed_lines))):
            lengths[i][j] = max(lengths[i + 1][j], lengths[i][j + 1])
            if is_line_shown(shown_lines[i], printed_lines[j]):
                lengths[i][j] = max(lengths[i][j], lengths[i + 1][j + 1] + 1)

    pairs: list[tuple[int, int]] = []
    i = j = 0
    while i < len(shown_lines) and j < len(printed_lines):
        is_pair = is_line_shown(shown_lines[i], printed_lines[j])
        if is_pair and lengths[i][j] == lengths[i + 1][j + 1] + 1:
            pairs.append((i, j))
            i, j = i + 1, j + 1
        elif lengths[i + 1][j] >= lengths[i][j + 1]:
            i += 1
        else:
            j += 1
    return pairs


def update_line(shown: str, printed: str) -> str:
    """Return a printed line, with … where the shown line has it.

    >>> update_line("wrote x  … in 1 file", "wrote x  2 KiB in 2 files")
    'wrote x  … in 2 files'
    """
    if ANY_TEXT not in shown:
        return printed
    shown_words, printed_words = (re.findall(r"\s+|\S+", line) for line in (shown, printed))
    updated_words: list[str] = []
    matcher = SequenceMatcher(None, shown_words, printed_words, autojunk=False)
    for _, shown_start, shown_stop, printed_start, printed_stop in matcher.get_opcodes():
        placeholders = [word for word in shown_words[shown_start:shown_stop] if ANY_TEXT in word]
        updated_words += placeholders or printed_words[printed_start:printed_stop]
    updated = "".join(updated_words)
    # Where the line became another one, a … has no place in it.
    is_useful = updated.strip() != ANY_TEXT and is_line_shown(updated, printed)
    return updated if is_useful else printed


def main(names: Sequence[str]) -> int:
    """Rewrite the named pages, or all, and say what was done; the exit status is 1 if a block failed."""
    unknown = set(names) - {name_of(page) for page in PAGES}
    if unknown:
        print(f"there are no pages {', '.join(sorted(unknown))}", file=sys.stderr)
        return 2
    has_failures = False
    for page in PAGES:
        name, content = name_of(page), content_of(page)
        if names and name not in names:
            continue
        if not any(block.is_code for block in blocks(content)):
            continue
        if name in NEEDS and not NEEDS[name]:
            print(f"{name}: not run: {NEEDS[name].reason}")
            continue
        has_failures |= not rewrite_file(page, name, content)
    return int(has_failures)


def rewrite_file(page: Path, name: str, content: str) -> bool:
    """Rewrite one page, and return whether all of its blocks ran."""
    with tempfile.TemporaryDirectory() as folder, page_environment(Path(folder)):
        result = read_page(name, content)
    for mismatch in result.mismatches:
        print(f"{name}:{mismatch.line} shows now what is printed")
    if result.mismatches:
        page.write_text(rewrite_page(content, result.mismatches), encoding="utf-8")
    for failure in result.failures:
        print(failure, file=sys.stderr)
    return not result.failures


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
