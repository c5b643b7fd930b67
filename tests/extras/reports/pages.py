"""What a page holds, read back as a browser would."""

from __future__ import annotations

import base64
import gzip
import json
import re

__all__ = ["data_of", "names_of"]

DATA = re.compile(r'<script type="text/plain" id="holdfast-data">([A-Za-z0-9+/=]*)</script>')


def data_of(page: str) -> dict[str, object]:
    """The document in a page."""
    (found,) = DATA.findall(page)
    return json.loads(gzip.decompress(base64.b64decode(found)))


def names_of(document: dict[str, object]) -> list[str]:
    """The names of the tensors, decoded as JavaScript does, in units of 16 bits."""
    coded = document["tensors"]["names"]
    names, before = [], b""
    for shared, rest in zip(coded["shared"], coded["rest"], strict=True):
        before = before[: 2 * shared] + rest.encode("utf-16-le", "surrogatepass")
        names.append(before.decode("utf-16-le", "surrogatepass"))
    return names
