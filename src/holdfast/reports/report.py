"""`report`: a checkpoint, the difference of two, or a run, as one page to look at.

document    what the page shows, as values that JSON has (`Report.document`)
page        the one HTML file that shows it (`Report.html`, `Report.save`)
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from holdfast.core.arguments import understood
from holdfast.core.checkpoint import Checkpoint
from holdfast.core.limits import Limits
from holdfast.core.patterns import matcher
from holdfast.core.version import VERSION
from holdfast.engine.checksums import Progress
from holdfast.engine.commit.transactions import FileTransaction
from holdfast.errors import NoSuchTensor
from holdfast.inspect.open import Openable, opened
from holdfast.reports.document import SCHEMA, Document, dumps
from holdfast.reports.page import page
from holdfast.reports.shards import shards
from holdfast.reports.structure import columns, facts, look, made_at, name_of, scanned, sentence
from holdfast.stores.paths import local_path

__all__ = ["Report", "report"]


@dataclass(frozen=True, slots=True)
class Report:
    """What `report` found, and the page of it."""

    document: Document
    """The data behind the page; docs/report.md has the schema."""

    @property
    def title(self) -> str:
        return str(self.document["title"])

    def json(self) -> str:
        """The document as text, ASCII."""
        return dumps(self.document)

    def html(self) -> str:
        """The page: one HTML file that needs nothing else."""
        return page(self.document)

    def save(self, path: str | os.PathLike[str], *, overwrite: bool = True) -> str:
        """Write the page to a file of this machine, which appears when it is complete. Its path."""
        where = local_path(path)
        with FileTransaction(where, overwrite=overwrite, durable=False) as transaction:
            transaction.write(0, self.html().encode("utf-8"))
            transaction.commit()
        return where

    def __repr__(self) -> str:
        return f"<Report {self.document['sentence']!r}>"


@understood
def report(
    src: Openable | Checkpoint,
    *,
    filter: str | None = None,
    mesh: Mapping[str, int] | str | None = None,
    limits: Limits | None = None,
    progress: Progress | None = None,
) -> Report:
    """Look at a checkpoint as a page: what is in it, how it is stored, and what is odd. No tensor data is read.

    `filter` is a glob, or a name that stands for all below it: only those tensors are shown. `mesh` adds which files each rank of
    another mesh would read: "4" cuts the first dimension of every tensor for four ranks, "2x2" the first two.
    """
    with opened(src, limits=limits) as checkpoint:
        return Report(_checkpoint(src, checkpoint, filter, mesh=mesh, limits=limits))


def _checkpoint(
    src: Openable | Checkpoint,
    checkpoint: Checkpoint,
    filter: str | None,
    *,
    mesh: Mapping[str, int] | str | None,
    limits: Limits | None,
) -> Document:
    found = look(checkpoint, None if filter is None else matcher(filter))
    if filter is not None and not found.tensors:
        raise NoSuchTensor(f"no tensor in the checkpoint is called {filter!r}", file=checkpoint.path, found=filter)
    path = checkpoint.path if isinstance(src, Checkpoint) else src
    _, told = scanned(path, limits)
    verdict = str(told["verdict"])
    return {
        "schema": SCHEMA,
        "kind": "checkpoint",
        "title": name_of(checkpoint),
        "path": checkpoint.path,
        "other": None,
        "made": made_at(checkpoint),
        "version": VERSION,
        "sentence": sentence(found, verdict),
        "facts": facts(found, verdict),
        "scan": told,
        "notes": list(checkpoint.notes[:50]),
        "stats": False,
        "sampled": None,
        "tensors": columns(found),
        "measures": [],
        "details": None,
        "shards": shards(found, mesh),
        "run": None,
        "live": None,
    }
