"""The served page: it asks for details and tiles when they are wanted, with its token, and says what the server says."""

from __future__ import annotations

import base64
import json
import re
import signal
import struct
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any
from urllib.parse import parse_qs, urlsplit

import numpy as np
import pytest

import holdfast
from holdfast.extras.reports.live import Live
from holdfast.extras.reports.page import page as html_of
from holdfast.extras.reports.report import ReportRequest, prepared
from tests.browser import documents
from tests.browser.watching import WATCH

HOME = "http://127.0.0.1:9"
TOKEN = "s3cret"


class Server:
    """Answers in the place of a server: nothing listens anywhere."""

    def __init__(self) -> None:
        self.document = documents.llama(layers=4).document(stats=False, live={"token": TOKEN})
        self.asked: list[tuple[str, dict[str, list[str]]]] = []
        self.fails = False

    def __call__(self, route: Any) -> None:
        url = urlsplit(route.request.url)
        if url.path == "/":
            route.fulfill(
                body=html_of(self.document, live=True), content_type="text/html; charset=utf-8"
            )
            return
        assert route.request.headers["x-holdfast-token"] == TOKEN
        query = parse_qs(url.query)
        self.asked.append((url.path, query))
        if self.fails:
            route.fulfill(status=422, body=json.dumps({"error": "<b>the file changed</b>"}))
        elif url.path == "/api/detail":
            found = dict(documents.drawn(0.02, flat=False, dead=False), negative=0.5)
            if "svd" not in query:
                del found["singular"]
            route.fulfill(body=json.dumps(found), content_type="application/json")
        else:
            values = [(at % 256 - 128) / 128 for at in range(256 * 256)]
            values[0] = float("nan")
            packed = base64.b64encode(struct.pack("<65536f", *values)).decode()
            told = {"rows": 256, "cols": 256, "values": packed, "low": -1.0, "high": 1.0}
            route.fulfill(body=json.dumps(told), content_type="application/json")


@pytest.fixture
def served(browser) -> Any:
    server = Server()
    context = browser.new_context(viewport={"width": 1240, "height": 900})
    context.add_init_script(WATCH)
    context.route("**/*", server)
    page = context.new_page()
    said: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.goto(f"{HOME}/?token={TOKEN}")
    yield server, page, said
    context.close()
    assert said == []


def until(page: Any, holds: Callable[[], object]) -> None:
    """Wait until something holds; on a busy machine that may take a minute."""
    for _ in range(4000):
        if holds():
            return
        page.wait_for_timeout(15)
    raise AssertionError("it does not come true")


def open_a_matrix(page: Any) -> None:
    until(page, lambda: page.evaluate("document.documentElement.dataset.ready"))
    page.fill("#filter", "*layers.1.mlp.up*")
    until(page, lambda: page.evaluate("document.documentElement.dataset.filter"))
    page.click("#table tbody tr")


def test_the_real_server(browser, tmp_path):
    """`holdfast view` as it is: one process serves, the browser looks, Ctrl-C ends it and the page says so."""
    weights = np.random.default_rng(1).standard_normal((600, 300), np.float32)
    weights[17, 40] = np.nan
    weights[100:110] = 0
    holdfast.save(
        {"h.0.w": weights, "h.1.w": np.ones((8, 8), np.float16)}, tmp_path / "m.safetensors"
    )
    command = [
        sys.executable,
        "-m",
        "holdfast",
        "view",
        str(tmp_path / "m.safetensors"),
        "--no-browser",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        (url,) = re.findall(r"http://127\.0\.0\.1:\d+/\S+", server.stdout.readline())
        context = browser.new_context(viewport={"width": 1240, "height": 900})
        context.add_init_script(WATCH)
        page = context.new_page()
        said: list[str] = []
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.goto(url)
        until(page, lambda: page.evaluate("document.documentElement.dataset.ready"))
        page.click("#table tbody tr >> text=h.0.w")
        until(page, lambda: "Norms of rows" in page.inner_text("#drawer"))
        until(page, lambda: "colours from" in page.inner_text("#drawer .tiles"))
        page.click("#drawer >> text=Singular values")
        canvas = page.locator("#drawer .tiles canvas")
        canvas.focus()
        for _ in range(4):
            page.keyboard.press("+")
        canvas.hover()
        until(page, lambda: page.inner_text("#drawer .value").startswith("["))
        assert page.evaluate("window.watched") == []
        assert said == []
        server.send_signal(signal.SIGINT)
        assert server.wait(20) == 0
        page.keyboard.press("Escape")
        page.click("#table tbody tr >> text=h.1.w")
        until(page, lambda: "has holdfast view ended?" in page.inner_text("#drawer .inside"))
        context.close()


def test_details_and_tiles_come_when_they_are_asked_for(served):
    server, page, _ = served
    until(page, lambda: page.evaluate("document.documentElement.dataset.ready"))
    assert server.asked == []
    open_a_matrix(page)
    until(page, lambda: "Quantiles" in page.inner_text("#drawer"))
    until(page, lambda: "colours from" in page.inner_text("#drawer .tiles"))
    assert "Singular values" not in page.locator("#drawer h3").all_inner_texts()
    page.click("#drawer >> text=Singular values")
    until(page, lambda: "Singular values" in page.locator("#drawer h3").all_inner_texts())
    tiles = [query for path, query in server.asked if path == "/api/tile"]
    assert tiles
    assert all(int(query["row"][0]) % (256 << int(query["level"][0])) == 0 for query in tiles)
    assert page.evaluate("window.watched") == []


def test_zooming_in_asks_for_finer_tiles(served):
    server, page, _ = served
    open_a_matrix(page)
    # Keys do nothing before the map is drawn for the first time.
    until(page, lambda: "colours from" in page.inner_text("#drawer .tiles"))
    canvas = page.locator("#drawer .tiles canvas")
    canvas.focus()
    for _ in range(4):
        page.keyboard.press("+")
    until(
        page,
        lambda: any(query["level"] == ["0"] for path, query in server.asked if path == "/api/tile"),
    )
    before = len(server.asked)
    box = canvas.bounding_box()
    page.mouse.move(box["x"] + 50, box["y"] + 50)
    page.mouse.down()
    page.mouse.move(box["x"] + 350, box["y"] + 250)
    page.mouse.up()
    for _ in range(60):
        page.keyboard.press("ArrowDown")
    until(page, lambda: len(server.asked) > before)
    page.mouse.move(box["x"] + 40, box["y"] + 40)
    until(page, lambda: page.inner_text("#drawer .value").startswith("["))


def test_what_the_server_says_is_shown_as_text(served):
    server, page, said = served
    server.fails = True
    open_a_matrix(page)
    until(page, lambda: "<b>the file changed</b>" in page.inner_text("#drawer .inside"))
    # The browser itself notes each answer that is none, some when the page is done with it.
    until(page, lambda: "The server said" in page.inner_text("#drawer .value"))
    page.close()
    said[:] = [line for line in said if "422" not in line]


def test_the_real_server_of_a_difference_reads_both_sides(browser, tmp_path):
    for name, size in (("a", 2), ("b", 512)):
        state = {"h.0.w": np.full((8, 8), size, np.float32)}
        holdfast.save(state, tmp_path / f"{name}.safetensors", durable=False)
    with prepared(tmp_path / "a.safetensors", tmp_path / "b.safetensors", ReportRequest()) as ready:
        made = ready.make(None)
        live = Live(made.document, made.tensors, counterparts=made.counterparts)
        thread = threading.Thread(target=live.serve)
        thread.start()
        context = browser.new_context(viewport={"width": 1240, "height": 900})
        try:
            page = context.new_page()
            said: list[str] = []
            page.on("console", lambda message: said.append(message.text))
            page.on("pageerror", lambda error: said.append(str(error)))
            page.goto(live.url)
            until(page, lambda: page.evaluate("document.documentElement.dataset.ready"))
            page.click("#table tbody tr >> text=h.0.w")
            sides = page.locator("#drawer section.side")
            until(page, lambda: page.inner_text("#drawer").count("Norms of rows") == 2)
            assert "largest\t2" in sides.nth(0).inner_text()
            assert "largest\t512" in sides.nth(1).inner_text()
            assert page.locator("#drawer .tiles").count() == 2
            assert said == []
        finally:
            context.close()
            live.stop()
            thread.join()
            live.close()
