"""`Seen`: a page in a browser, with everything that it said."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

WATCH = """
window.watched = [];
addEventListener("securitypolicyviolation", (event) => watched.push(`policy: ${event.violatedDirective} ${event.blockedURI}`));
"""
"""Runs before anything of the page, and sees what its policy forbids."""


class Seen:
    """A page, drawn. `said` has what reached the console, errors, dialogs and requests: nothing, for a page that is well."""

    def __init__(self, context: Any, file: Path) -> None:
        self.context = context
        self.file = file
        self.said: list[str] = []
        self.page = context.new_page()
        self.page.set_default_timeout(60_000)
        self.page.on("console", lambda message: self.said.append(f"console: {message.text}"))
        self.page.on("pageerror", lambda error: self.said.append(f"error: {error}"))
        self.page.on("dialog", self._dialog)
        self.page.on("request", self._request)

    def _dialog(self, dialog: Any) -> None:
        self.said.append(f"dialog: {dialog.message}")
        dialog.dismiss()

    def _request(self, request: Any) -> None:
        if not request.url.startswith(("data:", "file:")) or (
            request.url.startswith("file:") and request.url != self.file.as_uri()
        ):
            self.said.append(f"request: {request.url}")

    def load(self) -> Seen:
        self.page.goto(self.file.as_uri())
        self.until("document.documentElement.dataset.ready")
        return self

    def show(self, html: str) -> Seen:
        """Another page in the place of this one."""
        self.file.write_text(html, "utf-8")
        return self.load()

    def until(self, expression: str, seconds: float = 60) -> None:
        """Wait until an expression is true. Asks again and again, because the page's policy forbids evaluating text in it."""
        end = time.monotonic() + seconds
        while not self.page.evaluate(expression):
            assert time.monotonic() < end, f"{expression} does not come true"
            self.page.wait_for_timeout(15)

    @property
    def ready(self) -> int:
        """Milliseconds from the navigation until the page answered."""
        return int(self.page.evaluate("document.documentElement.dataset.ready"))

    def text(self, selector: str) -> str:
        return self.page.inner_text(selector)

    def rows(self) -> int:
        """How many rows the table of tensors has, drawn or not."""
        return int(self.page.get_attribute("#table table", "aria-rowcount")) - 1

    def filter(self, typed: str) -> None:
        """Types into the box and waits until the page has followed."""
        self.page.fill("#filter", typed)
        self.until(f"document.documentElement.dataset.filter === {json.dumps(typed)}")

    def pixels(self, selector: str) -> str:
        """What a canvas shows, to compare with what it shows later."""
        return str(
            self.page.evaluate(
                "(selector) => document.querySelector(selector).toDataURL()", selector
            )
        )

    def announced(self) -> str:
        return str(self.page.evaluate("document.getElementById('announce').textContent"))

    def focused(self) -> str:
        """What has the focus: an id, or a class or tag."""
        return str(
            self.page.evaluate(
                "document.activeElement.id || document.activeElement.className || document.activeElement.tagName"
            )
        )

    def overflow(self) -> int:
        """Pixels by which the page is wider than the window."""
        return int(
            self.page.evaluate(
                "document.documentElement.scrollWidth - document.documentElement.clientWidth"
            )
        )

    def violations(self) -> list[str]:
        return list(self.page.evaluate("window.watched"))
