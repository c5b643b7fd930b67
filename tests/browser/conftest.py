"""One browser for the tests here, and pages in it that are watched: nothing may reach the console, no policy may be violated.

Without playwright or without a chromium the tests here are skipped, and tests/conftest.py says so in one line.
`make browser` installs both.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.extras.reports.page import page as html_of
from tests.browser.watching import WATCH, Seen

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def chromium() -> str | None:
    """The browser of this machine; HOLDFAST_CHROMIUM names another."""
    return os.environ.get("HOLDFAST_CHROMIUM") or next(
        (path for name in NAMES if (path := shutil.which(name))), None
    )


@pytest.fixture(scope="package")
def browser() -> Iterator[Any]:
    # Not for the session: playwright has a loop of asyncio running meanwhile, and other tests of the process want their own.
    playwright = pytest.importorskip("playwright.sync_api", reason="no playwright: make browser")
    path = chromium()
    if path is None:
        pytest.skip("no chromium: make browser")
    with playwright.sync_playwright() as driver:
        # As root, and in most containers, chromium's own sandbox cannot be had; the page is ours.
        launched = driver.chromium.launch(
            executable_path=path, args=["--no-sandbox", "--disable-gpu"]
        )
        yield launched
        launched.close()


@pytest.fixture
def draw(browser: Any, tmp_path: Path) -> Iterator[Callable[..., Seen]]:
    """Opens the page of a document (or HTML) from disk, as a reader would, and waits until it answers."""
    opened: list[Seen] = []

    def _draw(
        what: dict[str, Any] | str,
        *,
        width: int = 1240,
        height: int = 900,
        scheme: str = "light",
        **more: Any,
    ) -> Seen:
        file = tmp_path / f"page{len(opened)}.html"
        file.write_text(what if isinstance(what, str) else html_of(what), "utf-8")
        context = browser.new_context(
            viewport={"width": width, "height": height}, color_scheme=scheme, **more
        )
        context.add_init_script(WATCH)
        seen = Seen(context, file)
        opened.append(seen)
        return seen.load()

    yield _draw
    said = [line for seen in opened for line in seen.said]
    for seen in opened:
        seen.context.close()
    assert said == []
