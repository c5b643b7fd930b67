"""`Live`: a page that is served to this machine's browser, which may ask for details of one tensor and for tiles of its elements.

    GET /?token=…                                          the page
    GET /api/detail?tensor=3&svd=1                         X-Holdfast-Token: …     a tensor's drawer, read now
    GET /api/tile?tensor=3&row=0&col=256&level=2           X-Holdfast-Token: …     256 by 256 pixels of it

The server listens on 127.0.0.1 and nowhere else. Other programs of this machine, and pages of other sites in the same browser, can
reach that address as well; so every request needs a token, which is random, made anew each time, and only in the address that is
printed; and a `Host` that is this server's own, so that a name of another site that resolves to 127.0.0.1 gets nothing. Only GET is
answered.

A `tile` is a square of a tensor as a picture of 256 by 256 pixels: an element each, or the mean of 2^level by 2^level of them. It
reads at most `MOST` elements: of cells that are larger than that allows, evenly spaced rows, and of very long rows a run at the
beginning of each cell. A cell with a NaN among what was read is NaN, so that one sick number is seen from far away.
"""

from __future__ import annotations

import base64
import hmac
import json
import math
import secrets
import threading
from collections.abc import Sequence
from functools import lru_cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

import numpy as np

from holdfast.core.box import run_boxes
from holdfast.core.protocols import Request
from holdfast.core.tensor import LazyTensor
from holdfast.core.text import round_significant
from holdfast.core.value import Value
from holdfast.engine.computed import decode_quantized
from holdfast.errors import BadArgument, HoldfastError
from holdfast.extras.reports.document import Document, dumps
from holdfast.extras.reports.measures import (
    GROUPS,
    detail,
    json_index,
    measure,
    nonfinite_rows,
    plane,
    singular_values,
)
from holdfast.extras.reports.page import page

ADDRESS, HEADER = "127.0.0.1", "X-Holdfast-Token"

KEPT = 256
"""Answers about tensors that are remembered: to look at one twice is to read it once."""

PATIENCE_S = 30.0
"""Seconds that a connection may take to say what it wants."""


SAFE_HEADERS = {
    "Cache-Control": "no-store", "Referrer-Policy": "no-referrer", "X-Content-Type-Options": "nosniff", "X-Frame-Options": "DENY",
    "Cross-Origin-Resource-Policy": "same-origin", "Cross-Origin-Opener-Policy": "same-origin",
}  # fmt: skip


class Live:
    """A server that is not serving yet; `serve` does until `close`, or until the thread is interrupted."""

    def __init__(
        self,
        document: Document,
        tensors: Sequence[LazyTensor],
        *,
        counterparts: Sequence[LazyTensor | None] = (),
        port: int = 0,
    ) -> None:
        """`tensors` are those of the rows of the document, and stay open meanwhile; `counterparts` are those of the other side of a
        difference. The port 0 is any free one."""
        self.token = secrets.token_urlsafe(24)
        self._tensors, self._counterparts = tensors, counterparts
        self.page = page({**document, "live": {"token": self.token}}, live=True).encode("utf-8")
        self._measure = lru_cache(KEPT)(_measure_detail)
        self._reading = threading.Lock()
        live = self

        class Answer(_Answer):
            server_of = live

        try:
            self._server = _Server((ADDRESS, port), Answer)
        except OSError as error:
            raise BadArgument(
                f"port {port} of {ADDRESS} cannot be had: {error.strerror or error}", found=port
            ) from error

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
        return known and hmac.compare_digest(
            (token or "").encode("utf-8", "replace"), self.token.encode("ascii")
        )

    def ask(self, path: str, query: dict[str, list[str]]) -> Document:
        """The answer to a request of a page. Raises errors that a person can read."""
        if path == "/api/detail":
            return self._detail(query)
        if path == "/api/tile":
            return self._tile(query)
        raise BadArgument("there is nothing of that name", found=path)

    def _tensor(self, query: dict[str, list[str]]) -> LazyTensor:
        """Return the tensor that a request asks for: `tensor` is its row, `other=1` asks for the other side."""
        row = _whole(query, "tensor", len(self._tensors) - 1)
        if not is_set(query, "other"):
            return self._tensors[row]
        counterpart = self._counterparts[row] if self._counterparts else None
        if counterpart is None:
            raise BadArgument("only one of the two checkpoints has this tensor", found=row)
        return counterpart

    def _detail(self, query: dict[str, list[str]]) -> Document:
        tensor = self._tensor(query)
        # One at a time: each of them may read gigabytes, on threads of its own.
        with self._reading:
            return self._measure(tensor, svd=is_set(query, "svd"))

    def _tile(self, query: dict[str, list[str]]) -> Document:
        (tensor,) = decode_quantized([self._tensor(query)])
        row, column, level = (_whole(query, name) for name in ("row", "col", "level"))
        with self._reading:
            made = tile(tensor, row, column, level=level)
        rows, columns = made.values.shape
        finite = made.values[np.isfinite(made.values)]
        values = base64.b64encode(made.values.astype("<f4").tobytes()).decode("ascii")
        return {
            "rows": rows,
            "cols": columns,
            "values": values,
            "low": round_significant(float(finite.min()), 6) if finite.size else None,
            "high": round_significant(float(finite.max()), 6) if finite.size else None,
            "sampled": not made.whole,
        }


def _measure_detail(tensor: LazyTensor, *, svd: bool) -> Document:
    """Read a tensor and return the content of its drawer."""
    measured = measure([tensor], groups=GROUPS)
    (found,) = measured
    nothing: Document = dict.fromkeys(("exponents", "negative", "quantiles", "rows", "columns"))
    document = nothing if found is None else detail(found)
    for row in nonfinite_rows([tensor], measured):
        document["first_nan"] = json_index(row.first_nan)
        document["first_inf"] = json_index(row.first_infinity)
    if svd:
        values = singular_values(tensor)
        document["singular"] = (
            None if values is None else [round_significant(value) for value in values]
        )
    return document


def is_set(query: dict[str, list[str]], name: str) -> bool:
    """Whether a request has the parameter NAME=1."""
    return query.get(name, ["0"])[-1] == "1"


def _whole(query: dict[str, list[str]], name: str, most: int = 1 << 62) -> int:
    text = query.get(name, [""])[-1]
    if not text.isascii() or not text.isdigit() or len(text) > 19 or int(text) > most:
        raise BadArgument(f"{name} is a number from 0 to {most:,}", found=text[:40])
    return int(text)


TEXT, JSON = "text/plain; charset=utf-8", "application/json"


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        """Print nothing: any program of this machine can send a request, also without the token.

        A tab that was closed while it was answered is no error, and mistakes of ours are answered.
        """


class _Answer(BaseHTTPRequestHandler):
    """Answers one request. Everything but a GET with the token and the right host gets a short no."""

    server_of: Live
    timeout = PATIENCE_S
    server_version, sys_version = "holdfast", ""

    def do_GET(self) -> None:  # the name that http.server calls
        try:
            status, content, kind = self._answer()
        except Exception as error:
            text = f"500: internal error, please report it: {type(error).__name__}: {error}\n"
            status, content, kind = 500, text.encode("utf-8", "replace"), TEXT
        self._send(status, content, kind)

    def _answer(self) -> tuple[int, bytes, str]:
        """Return the status, the content and the content type of the answer."""
        live = self.server_of
        try:
            asked = urlsplit(self.path)
            query = parse_qs(asked.query[:4000])
        except ValueError:
            return 400, b"400: the address in this request is malformed\n", TEXT
        token = query.get("token", [""])[-1] if asked.path == "/" else self.headers.get(HEADER)
        if not live.trusts(token, self.headers.get("Host")):
            text = b"403: open the address that holdfast view printed, with its token\n"
            return 403, text, TEXT
        if asked.path == "/":
            return 200, live.page, "text/html; charset=utf-8"
        try:
            return 200, dumps(live.ask(asked.path, query)).encode("ascii"), JSON
        except (HoldfastError, MemoryError) as error:
            # An error of a file is the answer; the server goes on.
            document = json.dumps({"error": str(error) or "out of memory"})
            return 422, document.encode("ascii"), JSON

    def _send(self, status: int, content: bytes, kind: str) -> None:
        self.send_response(status)
        for name, value in {
            "Content-Type": kind,
            "Content-Length": str(len(content)),
            **SAFE_HEADERS,
        }.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None: ...  # the library is silent


SIDE, MOST = 256, 1 << 22
"""Pixels of a tile, on each side, and elements that are read for it."""

WIDEST, RUN = 1 << 14, 64
"""Elements of a row that are read for a tile; of a longer one, a run of each cell."""

DEEPEST = 40
"""Levels. 2^40 elements on a side are more than there are."""


class Tile(Value):
    values: np.ndarray
    """float32, rows by columns, at most `SIDE` of each."""
    whole: bool
    """Whether every element of each cell was read."""


def tile(tensor: LazyTensor, row: int, column: int, *, level: int = 0) -> Tile:
    """The tile whose upper left element is there."""
    height, width = plane(tensor)
    if not 0 <= level <= DEEPEST or not 0 <= row < height or not 0 <= column < width:
        raise BadArgument(
            f"no tile at row {row:,}, column {column:,}, level {level} in {height:,} × {width:,}",
            tensor=tensor.name,
        )
    cell = 1 << level
    rows, columns = _cells(row, height, cell), _cells(column, width, cell)
    wide = columns[-1][1] - columns[0][0]
    is_wide = wide > WIDEST
    if is_wide:
        columns = [(start, min(stop, start + RUN)) for start, stop in columns]
    runs = columns if is_wide else [(columns[0][0], columns[-1][1])]
    widths = [stop - start for start, stop in columns]
    # Of the rows of a cell at most so many are read, evenly spaced.
    most_rows = max(1, MOST // (sum(widths) * len(rows)))
    heights = [min(most_rows, stop - start) for start, stop in rows]
    picked = [
        start + (stop - start) * i // height
        for (start, stop), height in zip(rows, heights, strict=True)
        for i in range(height)
    ]
    numbers = _read(tensor, picked, runs)
    means = _means(numbers, np.cumsum([0, *heights])[:-1], np.cumsum([0, *widths])[:-1])
    is_whole = not is_wide and all(stop - start <= most_rows for start, stop in rows)
    return Tile(means, is_whole)


def _cells(start: int, size: int, cell: int) -> list[tuple[int, int]]:
    return [(at, min(at + cell, size)) for at in range(start, min(size, start + SIDE * cell), cell)]


def _read(tensor: LazyTensor, rows: Sequence[int], runs: Sequence[tuple[int, int]]) -> np.ndarray:
    """The elements of these rows in these columns, as float32; complex numbers by their absolute values."""
    whole = tensor if tensor.shape else tensor[None]
    out = np.empty((len(rows), sum(stop - start for start, stop in runs)), tensor.dtype.numpy)
    requests: list[Request] = []
    at = 0
    for first, last in _stretches(rows):
        for box in [one.slices for one in run_boxes(whole.shape[:-1], first, last)]:
            left, count = 0, math.prod(part.stop - part.start for part in box)
            for start, stop in runs:
                part = whole[(*box, slice(start, stop))]
                requests.append(
                    Request(
                        part, out[at : at + count, left : left + stop - start].reshape(part.shape)
                    )
                )
                left += stop - start
            at += count
    tensor.source.read(requests)
    with np.errstate(all="ignore"):
        if out.dtype.names:
            return np.asarray(
                np.hypot(out["real"].astype(np.float32), out["imag"].astype(np.float32))
            )
        plain: np.ndarray = np.abs(out) if out.dtype.kind == "c" else out
        return plain.astype(np.float32)


def _stretches(rows: Sequence[int]) -> list[tuple[int, int]]:
    """Rows that follow each other, as ranges.

    >>> _stretches([0, 1, 2, 5, 7, 8])
    [(0, 3), (5, 6), (7, 9)]
    """
    made: list[tuple[int, int]] = []
    for row in rows:
        if made and made[-1][1] == row:
            made[-1] = (made[-1][0], row + 1)
        else:
            made.append((row, row + 1))
    return made


def _means(numbers: np.ndarray, down: np.ndarray, right: np.ndarray) -> np.ndarray:
    if len(down) == numbers.shape[0] and len(right) == numbers.shape[1]:
        return numbers
    with np.errstate(all="ignore"):
        sums: np.ndarray = np.add.reduceat(
            np.add.reduceat(numbers, down, axis=0, dtype=np.float64), right, axis=1
        )
        counts = np.diff([*down, numbers.shape[0]])[:, None] * np.diff([*right, numbers.shape[1]])
        means: np.ndarray = sums / counts
        return means.astype(np.float32)
