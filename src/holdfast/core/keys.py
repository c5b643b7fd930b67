"""Keys: the names that files have in a store, and in documents that list files. One rule for all of them."""

from __future__ import annotations

import re

from holdfast.errors import UnsafePath

DATA_KEY = re.compile(
    r"data-([0-9a-f]{16})-[0-9]{5,}-of-[0-9]{5,}(?:-[0-9]{5,})?\.safetensors", re.ASCII
)
"""What a save to an object store calls its data, with the id of the save: nobody else has given such a name."""

SIBLING = re.compile(rf"\.\./([^./\\\0][^/\\\0]*)/({DATA_KEY.pattern})", re.ASCII)


def check_key(key: str) -> str:
    """Give back a key that stays inside what was opened, or refuse it.

    >>> check_key("sharded/model-00001.safetensors")
    'sharded/model-00001.safetensors'
    """
    if not is_plain_path(key):
        raise UnsafePath(
            f"the name {key!r} does not stay inside the checkpoint; the file that holds it is not trustworthy"
        )
    return key


def is_plain_path(path: str) -> bool:
    """Return whether a relative path stays inside its folder on every system."""
    if "\\" in path or "\0" in path:
        return False
    return not any(part in ("", ".", "..") for part in path.split("/"))


def parse_sibling_key(key: str) -> tuple[str, str] | None:
    """Folder and name of a key that names data of another save, in a folder beside the one that was opened; None for any other.

    >>> parse_sibling_key("../step-1/data-0123456789abcdef-00001-of-00001.safetensors")
    ('step-1', 'data-0123456789abcdef-00001-of-00001.safetensors')
    >>> parse_sibling_key("../step-1/secret.safetensors") is None
    True
    """
    found = SIBLING.fullmatch(key)
    return None if found is None else (found[1], found[2])
