"""Keys: the names that files have in a store, and in documents that list files. One rule for all of them."""

from __future__ import annotations

from holdfast.errors import UnsafePath

__all__ = ["check_key"]


def check_key(key: str) -> str:
    """Give back a key that stays inside what was opened, or refuse it.

    >>> check_key("sharded/model-00001.safetensors")
    'sharded/model-00001.safetensors'
    """
    parts = key.split("/")
    if not key or "\\" in key or "\0" in key or any(p in ("", ".", "..") for p in parts):
        raise UnsafePath(f"the name {key!r} does not stay inside the checkpoint; the file that holds it is not trustworthy")
    return key
