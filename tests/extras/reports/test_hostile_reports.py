"""The hostile corpus as pages: nothing runs, only Holdfast errors come out, and whatever a file says is data in the page."""

from __future__ import annotations

import re
import time
import warnings
from pathlib import Path

import pytest

import holdfast
from holdfast.errors import HoldfastError
from tests.conftest import GOLDEN
from tests.extras.reports.pages import DATA, data_of
from tests.hostile.cases import ALL
from tests.hostile.harness import (
    DEADLINE,
    SECONDS_FLOOR,
    SECONDS_PER_BYTE,
    WATCH,
    deadline,
    plain_files,
)
from tests.hostile.test_attacks import warm

WORK = 4
"""A report opens and scans a file, looks at all of it and at its numbers."""

FRAME = re.compile(r"<title>.*?</title>")


def frame(page: str) -> str:
    """A page without what is its own."""
    return FRAME.sub("", DATA.sub("", page))


@pytest.fixture(scope="module", autouse=True)
def plain() -> str:
    """The frame of an honest page. Made first, so that what Python imports on first use is there."""
    warm()
    for path in sorted((GOLDEN / "files").iterdir()):
        made = holdfast.report(path, stats=True).html()
        holdfast.report(path.read_bytes() if path.is_file() else path, stats=True)
    return frame(made)


@pytest.mark.parametrize("case", ALL, ids=str)
def test_an_attack_is_a_page_or_a_refusal(case, tmp_path, plain):
    source = case.make(tmp_path)
    nbytes = (
        len(source)
        if isinstance(source, bytes)
        else sum(p.stat().st_size for p in plain_files(source))
    )
    page = None
    with deadline(DEADLINE), warnings.catch_warnings(), WATCH.watching():
        warnings.simplefilter("error")
        before = time.process_time()
        try:
            made = holdfast.report(source, stats=True)
            page = made.html()
            made._repr_html_()
        except HoldfastError as error:
            str(error)
        spent = time.process_time() - before
    assert spent <= WORK * (SECONDS_FLOOR + SECONDS_PER_BYTE * nbytes)
    if page is not None:
        assert frame(page) == plain
        assert data_of(page) == made.document
        assert made.json().isascii()


@pytest.mark.parametrize(
    "path", sorted((GOLDEN / "hostile").glob("*.pt")), ids=lambda path: path.name
)
def test_what_a_scan_says_is_on_the_page(path: Path, plain):
    try:
        made = holdfast.report(path)
    except HoldfastError:
        assert holdfast.scan(path).verdict() != "clean"
        return
    assert made.document["scan"]["verdict"] == holdfast.scan(path).verdict()
    assert frame(made.html()) == plain
    if made.document["scan"]["verdict"] == "dangerous":
        assert "dangerous" in made.document["sentence"]
        assert "dangerous" in {finding["severity"] for finding in made.document["scan"]["findings"]}
