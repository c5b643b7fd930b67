"""Synonyms that must not come back in the source: one word for one thing.

`docs/design/048-words.md` has the words of the project. This test checks the names that the source
defines. It does not check names that the source only uses, because other libraries choose those.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.pages import ROOT

SOURCE = ROOT / "src" / "holdfast"

WORDS = {
    "acknowledgement": "receipt",
    "arena": "scratch",
    "backing": "storage",
    "blueprint": "plan",
    "catalog": "catalogue",
    "cfg": "config",
    "chkpt": "checkpoint",
    "ckpt": "checkpoint",
    "cnt": "count",
    "draft": "plan",
    "emit": "write",
    "grab": "read",
    "inventory": "manifest",
    "leader": "first rank",
    "lease": "claim",
    "ledger": "catalogue",
    "lockfile": "lock file",
    "mirror": "replica",
    "mutex": "lock",
    "num": "count",
    "obtain": "read",
    "opts": "options",
    "portion": "share",
    "promote": "publish",
    "proof": "receipt",
    "retrieve": "read",
    "slab": "shard",
    "sz": "nbytes",
    "temp": "temporary",
    "tmp": "temporary",
}
"""Words that no name may contain, and the word to use instead."""

CLASSES = {
    "Budget": "MemoryBudget",
    "Computed": "ComputedTensors",
    "Copy": "StoredCopy",
    "Delivered": "DeliveredFile",
    "Dequantized": "DequantizedTensors",
    "DocumentKind": "DocumentType",
    "Elementwise": "ElementwiseComputation",
    "Extent": "StorageRange",
    "FileLayout": "PlannedFile",
    "FilePart": "FileRange",
    "FilePlace": "StoredFile",
    "Hashed": "HashAndHead",
    "Kind": "RowKind",
    "LaterChunks": "DeferredChunks",
    "Located": "StoreRanges",
    "LockedName": "LockedEntry",
    "Matched": "RowMatches",
    "Medium": "ReadProfile",
    "Met": "Overlaps",
    "Named": "NamedTensors",
    "Part": "LayoutPart",
    "PartSums": "RankSums",
    "Piece": "BytesLike, or a name that says what it is a piece of",
    "Places": "ChunkLookup",
    "Read": "JoinedRead",
    "Reads": "JoinedReads",
    "Resident": "MemoryTensors",
    "Saving": "SaveContext",
    "Sent": "PortableMethod",
    "Share": "WriteTask",
    "Shares": "BlockSizes, ReadAssignments",
    "Shown": "NotebookResult",
    "Sourced": "SourcedStore",
    "SpanGroup": "RangeGroup",
    "Stretch": "RowRun",
    "Sums": "BlockCrcs",
    "Sweep": "RangeSums",
    "Tabulated": "TensorColumns",
    "TargetName": "LocalTarget",
}
"""Everyday words that were names of classes with different meanings, and the names that replaced them."""

Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def defined_names(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Yield the names of classes, functions, arguments and attributes that a module defines, with their lines."""
    for node in ast.walk(tree):
        if isinstance(node, Definition):
            yield node.name, node.lineno
        elif isinstance(node, ast.arg):
            yield node.arg, node.lineno
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr, node.lineno
        if isinstance(node, ast.ClassDef | ast.Module):
            for statement in node.body:
                targets = [statement.target] if isinstance(statement, ast.AnnAssign) else []
                if isinstance(statement, ast.Assign):
                    targets = statement.targets
                for target in targets:
                    if isinstance(target, ast.Name):
                        yield target.id, statement.lineno


def words_of(name: str) -> list[str]:
    """Split a name in snake case or camel case into lowercase words.

    >>> words_of("_tmpDirOf_HTTPStore")
    ['tmp', 'dir', 'of', 'http', 'store']
    """
    return [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)]


def find_synonyms(text: str, path: str) -> list[str]:
    """Return a message for each banned word in the names that a module defines."""
    tree = ast.parse(text)
    messages = []
    for name, line in defined_names(tree):
        messages += [
            f"{path}:{line}: {name}: write {WORDS[word]!r} instead of {word!r}"
            for word in words_of(name)
            if word in WORDS
        ]
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and node.name.lstrip("_") in CLASSES:
            instead = CLASSES[node.name.lstrip("_")]
            messages.append(f"{path}:{node.lineno}: class {node.name}: use {instead}")
    return messages


def test_the_source_has_no_banned_synonym():
    messages = []
    for path in sorted(SOURCE.rglob("*.py")):
        messages += find_synonyms(path.read_text(encoding="utf-8"), str(path.relative_to(ROOT)))
    assert not messages, "docs/design/048-words.md has one word for each thing:\n" + "\n".join(
        messages
    )


@pytest.mark.parametrize(
    "text",
    [
        "class TmpFile: ...",
        "def make_tmp(): ...",
        "async def tmp(): ...",
        "def save(tmp_dir): ...",
        "def save(*, tmp=None): ...",
        "class Save:\n    tmp: str",
        "class Save:\n    tmp = ''",
        "class Save:\n    def open(self):\n        self._tmp = 1",
        "TMP_NBYTES = 1",
    ],
)
def test_a_banned_word_in_a_definition_is_found_with_the_word_to_use(text):
    (message,) = find_synonyms(text, "module.py")
    assert "write 'temporary' instead of 'tmp'" in message


def test_the_message_for_a_class_names_its_replacement():
    assert find_synonyms("class _Copy: ...", "module.py") == [
        "module.py:1: class _Copy: use StoredCopy"
    ]


def test_names_of_other_libraries_and_longer_words_are_not_checked():
    assert find_synonyms("import tempfile\ntempfile.tempdir\nx = torch.num\n", "module.py") == []
    assert find_synonyms("def attempt(template, numel): ...", "module.py") == []


def test_the_design_note_has_every_word_to_use():
    note = Path(ROOT, "docs", "design", "048-words.md").read_text(encoding="utf-8")
    abbreviations = {"config", "options", "lock"}
    missing = {word for word in WORDS.values() if word not in note} - abbreviations
    assert missing == set()
