"""`Live`: a page that is served to this machine's browser, and what it asks for: the details of one tensor, tiles of its elements.

    GET /?token=…                                          the page
    GET /api/detail?tensor=3&svd=1                         X-Holdfast-Token: …     a tensor's drawer, read now
    GET /api/tile?tensor=3&row=0&col=256&level=2           X-Holdfast-Token: …     256 by 256 pixels of it

It listens on 127.0.0.1 and nowhere else. Other programs of this machine, and pages of other sites in the same browser, can reach
that address as well; so every request needs a token, which is random, made anew each time, and only in the address that is
printed; and a `Host` that is this server's own, so that a name of another site that resolves to 127.0.0.1 gets nothing. Only GET is
answered.
"""

from __future__ import annotations

import base64
import hmac
import json
import secrets
import sys
import threading
from collections import OrderedDict
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

from holdfast.core.tensor import LazyTensor
from holdfast.errors import BadArgument, HoldfastError
from holdfast.reports.document import Document, dumps, rounded
from holdfast.reports.measures import GROUPS, detail, measure
from holdfast.reports.page import page
from holdfast.reports.spectrum import singular_values
from holdfast.reports.tiles import tile

ADDRESS = "127.0.0.1"
"""The one address. There is no way to say another."""

HEADER = "X-Holdfast-Token"

KEPT = 256
"""Answers about tensors that are kept: to look at one twice is to read it once."""

PATIENCE_S = 30.0
"""How long a connection may take to say what it wants."""


class Live:
    """A server that is not serving yet; `serve` does until `close`, or until the thread is interrupted."""

    def __init__(self, document: Document, tensors: Sequence[LazyTensor], *, port: int = 0) -> None:
        """`tensors` are those of the rows of the document, and stay open meanwhile. Any free port where it is 0."""
        self.token = secrets.token_urlsafe(24)
        self._tensors = tensors
        self._page = page({**document, "live": {"token": self.token}}, live=True).encode("utf-8")
        self._known: OrderedDict[tuple[int, bool], Document] = OrderedDict()
        self._reading = threading.Lock()
        live = self

        class Answer(_Answer):
            server_of = live

        try:
            self._server = _Server((ADDRESS, port), Answer)
        except OSError as error:
            raise BadArgument(f"port {port} of {ADDRESS} cannot be had: {error.strerror or error}", found=port) from error

    @property
    def port(self) -> int:
        return self._server.server_address[1]

    @property
    def url(self) -> str:
        return f"http://{ADDRESS}:{self.port}/?token={self.token}"

    def serve(self) -> None:
        self._server.serve_forever(poll_interval=0.2)

    def stop(self) -> None:
        """Make `serve` return; from another thread."""
        self._server.shutdown()

    def close(self) -> None:
        self._server.server_close()

    def trusts(self, token: str | None, host: str | None) -> bool:
        """Whether a request has the token, and was sent to this server under its own name."""
        known = host in (f"{ADDRESS}:{self.port}", f"localhost:{self.port}")
        return known and hmac.compare_digest((token or "").encode("utf-8", "replace"), self.token.encode("ascii"))

    def page(self) -> bytes:
        return self._page

    def ask(self, path: str, query: dict[str, list[str]]) -> Document:
        """What a page asks for. Raises what a person shall read."""
        if path == "/api/detail":
            return self._detail(_whole(query, "tensor", len(self._tensors) - 1), svd=query.get("svd", ["0"])[-1] == "1")
        if path == "/api/tile":
            return self._tile(query)
        raise BadArgument("there is nothing of that name", found=path)

    def _detail(self, number: int, *, svd: bool) -> Document:
        # One at a time: each of them may read gigabytes, on threads of its own.
        with self._reading:
            known = self._known.get((number, svd))
            if known is None:
                known = self._known[number, svd] = self._looked_at(number, svd=svd)
                while len(self._known) > KEPT:
                    self._known.popitem(last=False)
        return known

    def _looked_at(self, number: int, *, svd: bool) -> Document:
        tensor = self._tensors[number]
        (found,) = measure([tensor], groups=GROUPS).found
        made: Document = (
            dict.fromkeys(("exponents", "negative", "quantiles", "rows", "columns")) if found is None else detail(found)
        )
        if svd:
            values = singular_values(tensor)
            made["singular"] = None if values is None else [rounded(value) for value in values]
        return made

    def _tile(self, query: dict[str, list[str]]) -> Document:
        tensor = self._tensors[_whole(query, "tensor", len(self._tensors) - 1)]
        row, column, level = (_whole(query, name) for name in ("row", "col", "level"))
        with self._reading:
            made = tile(tensor, row, column, level=level)
        ends = made.ends
        return {
            "rows": made.values.shape[0],
            "cols": made.values.shape[1],
            "values": base64.b64encode(made.values.astype("<f4").tobytes()).decode("ascii"),
            "low": None if ends is None else rounded(ends[0], 6),
            "high": None if ends is None else rounded(ends[1], 6),
            "sampled": not made.whole,
        }


def _whole(query: dict[str, list[str]], name: str, most: int = 1 << 62) -> int:
    """A number of a request."""
    text = query.get(name, [""])[-1]
    if not text.isascii() or not text.isdigit() or len(text) > 19 or int(text) > most:
        raise BadArgument(f"{name} is a number from 0 to {most:,}", found=text[:40])
    return int(text)


class _Server(ThreadingHTTPServer):
    """One thread a request."""

    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        """Say nothing of a tab that was closed while it was answered; what else goes wrong is told as before."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]  # it only passes them on


class _Answer(BaseHTTPRequestHandler):
    """One request. Whatever is not a GET with the token and the right host gets a short no."""

    server_of: Live
    timeout = PATIENCE_S
    server_version, sys_version = "holdfast", ""

    def do_GET(self) -> None:  # the name that http.server calls
        live = self.server_of
        asked = urlsplit(self.path)
        query = parse_qs(asked.query[:4000])
        token = query.get("token", [""])[-1] if asked.path == "/" else self.headers.get(HEADER)
        if not live.trusts(token, self.headers.get("Host")):
            self._send(403, b"403: open the address that holdfast view printed, with its token\n", "text/plain; charset=utf-8")
        elif asked.path == "/":
            self._send(200, live.page(), "text/html; charset=utf-8")
        else:
            self._send(*self._answer(asked.path, query), "application/json")

    def _answer(self, path: str, query: dict[str, list[str]]) -> tuple[int, bytes]:
        try:
            return 200, dumps(self.server_of.ask(path, query)).encode("ascii")
        except (HoldfastError, MemoryError) as error:
            # What is wrong with a file is told to whoever looks at it; the server goes on.
            return 422, json.dumps({"error": str(error) or "out of memory"}).encode("ascii")

    def _send(self, status: int, content: bytes, kind: str) -> None:
        self.send_response(status)
        for name, value in (
            ("Content-Type", kind),
            ("Content-Length", str(len(content))),
            ("Cache-Control", "no-store"),
            ("Referrer-Policy", "no-referrer"),
            ("X-Content-Type-Options", "nosniff"),
            ("X-Frame-Options", "DENY"),
            ("Cross-Origin-Resource-Policy", "same-origin"),
            ("Cross-Origin-Opener-Policy", "same-origin"),
        ):
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: the library is silent."""
