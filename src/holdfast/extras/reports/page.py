"""`page`: the one HTML file, put together from a document and the assets in `page/`.

    page.html        the frame, with {{title}}, {{csp}}, {{style}}, {{data}} and {{script}} in it
    page.css         goes into one <style>
    *.js             go into one <script>, by name, and main.js last

Names come out of hostile files, so nothing of the document is markup. The data is gzipped JSON in base64, which the page opens; a
Content-Security-Policy allows the one script and the one style by their SHA-256, and nothing else: no network, no frames, no
handlers in markup. The same document gives the same bytes.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import html
from functools import cache
from importlib.resources import files

from holdfast.core.text import clip, escape
from holdfast.extras.reports.document import Document, dumps

BEGINNING = b'<!doctype html>\n<html lang="en" data-made-by="holdfast">\n'
"""The first bytes of every page, so that a later one may take its place and nothing else is taken for one."""

LAST = "main.js"
"""The script that begins everything; the others only define functions."""


@cache
def _assets() -> tuple[str, str, str]:
    folder = files("holdfast.extras.reports").joinpath("page")
    found = {
        one.name: one.read_text("utf-8")
        for one in folder.iterdir()
        if one.name.endswith((".html", ".css", ".js"))
    }
    scripts = sorted(
        (name for name in found if name.endswith(".js")), key=lambda name: (name == LAST, name)
    )
    styles = sorted(name for name in found if name.endswith(".css"))
    script = '"use strict";\n' + "\n".join(found[name].strip() for name in scripts) + "\n"
    return found["page.html"], "\n".join(found[name].strip() for name in styles) + "\n", script


def page(document: Document, *, live: bool = False) -> str:
    """The page of a document. A `live` one may ask the server that it came from."""
    frame, style, script = _assets()
    packed = gzip.compress(dumps(document).encode("ascii"), compresslevel=9, mtime=0)
    parts = {
        "title": html.escape(escape(clip(str(document.get("title", "")), 200))),
        "csp": html.escape(policy(style, script, live=live), quote=True),
        "style": style,
        "data": base64.b64encode(packed).decode("ascii"),
        "script": script,
    }
    pieces = frame.split("{{")
    made = [pieces[0]]
    for piece in pieces[1:]:
        # One pass: what is put in is never looked at again, whatever stands in it.
        name, _, rest = piece.partition("}}")
        made += [parts[name.strip()], rest]
    return "".join(made)


def policy(style: str, script: str, *, live: bool) -> str:
    """The Content-Security-Policy: the page may run its script and use its style, and nothing else."""
    own = f"default-src 'none'; script-src {_hashed(script)}; style-src {_hashed(style)}; img-src data:; base-uri 'none'"
    return own + "; form-action 'none'; connect-src " + ("'self'" if live else "'none'")


def _hashed(text: str) -> str:
    digest = hashlib.sha256(text.encode("utf-8")).digest()
    return f"'sha256-{base64.b64encode(digest).decode('ascii')}'"
