"""`place_for`: a run's place from its path or its URL."""

from __future__ import annotations

import os

from holdfast.runs.directory import RunDirectory
from holdfast.runs.place import RunPlace
from holdfast.stores.remote.url import Url


def place_for(path: str) -> RunPlace:
    """Where the run is that `place_of` gave the path of."""
    if isinstance(path, Url):
        from holdfast.runs.bucket import RunBucket  # what it imports is for those who have a bucket

        return RunBucket(path)
    return RunDirectory(os.path.abspath(path))
