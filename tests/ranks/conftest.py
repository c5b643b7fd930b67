"""The pool of ranks, and what it has saved: one of each for a test process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch")

from tests.ranks.jobs import FORMATS, save, save_stock
from tests.ranks.pool import SHARED, Pool, good


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Processes of `torch.distributed`, which start with the first job."""
    yield SHARED
    SHARED.close()


Saved = Callable[[str, int], Path]


@pytest.fixture(scope="session")
def saved(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """Where the state of `states.py` is, as so many ranks saved it in a format, or torch in one of its own; saved once."""
    known: dict[tuple[str, int], Path] = {}

    def find(format: str, size: int) -> Path:
        if (format, size) not in known:
            path = tmp_path_factory.mktemp("saved") / f"{format}-{size}"
            job, name = (
                (save, format) if format in FORMATS else (save_stock, format.removeprefix("stock-"))
            )
            good(pool.run(size, job, str(path), name))
            known[format, size] = path
        return known[format, size]

    return find
