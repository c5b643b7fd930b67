"""Words and phrases that must not come back in texts for users, and the form of design notes.

The list starts with what readers stumbled over. Each entry says what to write
instead. Design notes, tests and comments are not checked.
"""

from __future__ import annotations

import argparse
import re

import pytest

from holdfast.cli.main import find_commands, parser
from holdfast.cli.parser import verbs_of
from holdfast.core.options import OPTIONS
from tests.pages import PAGES, ROOT, name_of

PHRASES = {
    r"what is no tensor|values? that (is|are) no tensors?": "values that are not tensors",
    r"is no (tensor|number|row|name|path|format|port|share|checkpoint|directory)\b": "is not a …",
    r"teach(es)? a shell": "print a completion script",
    r"\bsay that\b|says that a folder": "record that, report that",
    r"what pickles would have done|would have done, had": "the code that a file would run when loaded",
    r"what the numbers look like": "statistics",
    r"whether every byte is as it was": "compare every byte with the checksums",
    r"kept as their parts": "stored as parts",
    r"what is torn": "incomplete",
    r"Names of one tensor must agree": "all names of a tensor must …",
    r"lost, refused or the last one": "a plain sentence",
    r"neither says is asked for": "a plain sentence",
    r"on another number of ranks": "on a different number of ranks",
    r"server of S3": "S3 server",
    r"\bis told\b|\bare told\b": "receives",
    r"a third of the time|a fifth of the time|a sixth of the time": "3x faster",
    r"nobody else has|nobody knows why": "a fact",
    r"names are in the order of the file": "nothing: this note is gone",
    r"metadata version \d": "nothing: this note is gone",
    r"bytes that no tensor reaches": "bytes that no tensor uses",
    r"tensors that hold the same": "equal tensors",
    r"Names are not translated": "layout maps translate names",
    # Features that were removed.
    r"\bsparse=|--sparse\b": "nothing: packed sparse storage is removed",
    r"large_pages|sparse_expansion|tree_nbytes": "nothing: these options are removed",
    r"read_back_nbytes|scrubber": "nothing: reading old files of a run back is removed",
    r"rehears": "nothing: the reader opens the hidden target",
}
"""Regular expressions of phrases, and the replacement for each."""

SKIPPED = {"docs/design", "CHANGELOG.md"}
"""Folders and pages about the past, which name removed features."""


def find_phrases(text: str) -> list[str]:
    """Return the phrases of the list in a text, each with the line around it."""
    prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    found = []
    for phrase, replacement in PHRASES.items():
        for match in re.finditer(phrase, prose):
            line = (
                prose[: match.start()].rpartition("\n")[2]
                + prose[match.start() :].partition("\n")[0]
            )
            found.append(f"{match[0]!r} (write: {replacement}) in: {line.strip()[:200]}")
    return found


CHECKED_PAGES = [
    page for page in PAGES if not any(name_of(page).startswith(skipped) for skipped in SKIPPED)
]


@pytest.mark.parametrize("page", CHECKED_PAGES, ids=name_of)
def test_pages_have_no_phrase_of_the_list(page):
    assert find_phrases(page.read_text(encoding="utf-8")) == []


def help_of(verb: argparse.ArgumentParser) -> str:
    helps = [str(action.help) for action in verb._actions]
    return "\n".join([str(verb.description), *helps, str(verb.epilog)])


def test_the_help_of_commands_has_no_phrase_of_the_list():
    whole = parser()
    texts = {"holdfast": help_of(whole)}
    texts |= {name: help_of(verb) for name, verb in verbs_of(whole).items()}
    texts |= {f"{name} (summary)": command.summary for name, command in find_commands().items()}
    found = {name: phrases for name, text in texts.items() if (phrases := find_phrases(text))}
    assert found == {}


def test_the_help_of_options_has_no_phrase_of_the_list():
    found = {}
    for name, option in OPTIONS.items():
        if phrases := find_phrases(option.help):
            found[name] = phrases
    assert found == {}


def test_summaries_of_commands_start_with_a_verb():
    vague = {"say", "teach", "look", "leave", "what", "whether"}
    for name, command in find_commands().items():
        first = command.summary.split()[0]
        assert first.islower(), name
        assert first not in vague, name


def test_every_command_has_examples():
    for name, verb in verbs_of(parser()).items():
        assert f"  holdfast {name}" in str(verb.epilog).partition("examples:")[2], name


NOTES = sorted((ROOT / "docs" / "design").glob("[0-9]*.md"))


@pytest.mark.parametrize("note", NOTES, ids=lambda note: note.stem[:3])
def test_a_design_note_starts_with_its_decision_and_status(note):
    number = note.stem[:3]
    head = note.read_text(encoding="utf-8").splitlines()[:5]
    assert head[0].startswith(f"# {number}: ")
    assert head[2].startswith("**Decision:** ")
    assert re.match(r"\*\*Status:\*\* .*(in force|replaced)", head[4], re.IGNORECASE)
    index = (ROOT / "docs" / "design" / "README.md").read_text(encoding="utf-8")
    assert f"- [{number}]({note.name})" in index
