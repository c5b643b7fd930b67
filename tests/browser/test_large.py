"""Ten thousand tensors and thirty thousand: the page answers within two seconds, and has no element for each."""

from __future__ import annotations

import pytest

from holdfast.extras.reports.page import page as html_of
from tests.browser import documents

SECONDS = 2
"""What is promised for 10,000 tensors, from the navigation until the page answers."""

LOADS = 6
"""The best of so many counts: the machine that runs the tests does other things, too."""


@pytest.fixture(scope="module")
def ten_thousand() -> str:
    document = documents.experts(layers=26, count=128)
    assert document["tensors"]["count"] > 10_000
    return html_of(document)


def test_ten_thousand_are_interactive_in_two_seconds(draw, ten_thousand, record_property):
    seen = draw(ten_thousand)
    times = [seen.ready]
    while min(times) >= 1000 * SECONDS and len(times) < LOADS:
        times.append(seen.load().ready)
    record_property("ready_ms", times)
    assert min(times) < 1000 * SECONDS, times


def test_work_does_not_go_by_tensor(draw, ten_thousand):
    seen = draw(ten_thousand)
    assert seen.page.evaluate("document.querySelectorAll('*').length") < 1_500
    assert seen.rows() > 10_000
    seen.page.evaluate("document.querySelector('#table .rows').scrollTop = 200_000")
    seen.until(
        "Number(document.querySelector('#table tbody tr[aria-rowindex]').getAttribute('aria-rowindex')) > 6000"
    )
    assert seen.page.locator("#table tbody tr").count() < 80


def test_thirty_thousand(draw):
    seen = draw(documents.experts(stats=False))
    assert seen.rows() > 30_000
    # A page of a thirtieth of the tensors is the measure: the machine may be slow, the page may not be quadratic.
    small = draw(documents.experts(layers=4, count=80, stats=False))
    assert seen.ready < 30 * max(small.ready, 100)
    seen.filter("*experts.17.*")
    assert seen.rows() == 120
