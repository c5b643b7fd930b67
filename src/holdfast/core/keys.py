"""Keys: the names of files in a store, also where documents list files."""

from __future__ import annotations

import re

from holdfast.errors import UnsafePath

DATA_KEY = re.compile(
    r"data-([0-9a-f]{16})-[0-9]{5,}-of-[0-9]{5,}(?:-[0-9]{5,})?\.safetensors", re.ASCII
)
"""The names of the data files of a save to an object store. They contain the random id of the save,
so no other program uses such a name by accident."""

SIBLING_KEY = re.compile(rf"\.\./([^./\\\0][^/\\\0]*)/({DATA_KEY.pattern})", re.ASCII)
"""A data file of another save, in a folder beside the checkpoint: the only use of `..` in a key."""


def check_key(key: str) -> str:
    """Return a key unchanged, or raise an error if it leads out of the opened checkpoint.

    Args:
        key: A relative path from a file that may be hostile.

    Raises:
        UnsafePath: The key is absolute, or contains `..`, a backslash or a NUL.

    >>> check_key("sharded/model-00001.safetensors")
    'sharded/model-00001.safetensors'
    """
    if not is_plain_path(key):
        raise UnsafePath(
            f"the name {key!r} does not stay inside the checkpoint; the file that contains it is "
            "not trustworthy"
        )
    return key


def is_plain_path(path: str) -> bool:
    """Return whether a relative path stays inside its folder on every system."""
    if "\\" in path or "\0" in path:
        return False
    return not any(component in ("", ".", "..") for component in path.split("/"))


def parse_sibling_key(key: str) -> tuple[str, str] | None:
    """Return the folder and the file name of a key for a data file of another save.

    A checkpoint in a bucket may share data files with a checkpoint in a folder beside it.

    Returns:
        The name of the folder and the name of the file, or None if the key has another form.

    >>> parse_sibling_key("../step-1/data-0123456789abcdef-00001-of-00001.safetensors")
    ('step-1', 'data-0123456789abcdef-00001-of-00001.safetensors')
    >>> parse_sibling_key("../step-1/secret.safetensors") is None
    True
    """
    match = SIBLING_KEY.fullmatch(key)
    if match is None:
        return None
    return match[1], match[2]
