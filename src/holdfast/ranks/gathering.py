"""Where the files of a sharded save come together, and nobody finds them before they are published: one seam, two places.

                     a folder (`ranks/folder`)                    a prefix of an object store (`ranks/prefix`)

    unpublished      files in a hidden folder beside the target   objects whose names carry the id of the save
    others are told  the name of that folder                      that id
    published        by one rename of the folder                  by one conditional put of the index
    given up         the first rank removes the folder            each rank removes its objects, the first one all of the save

A rank that writes begins files and gets checksums for its receipts (`Gathering`). The first rank, which opened the place, publishes
what all of them have written (`FirstGathering`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from holdfast.core.protocols import Store
from holdfast.engine.write import Progress
from holdfast.plan.saves import FilePlan, LinkedFile
from holdfast.ranks.files import Receipt
from holdfast.stores.place import place_at


class Begun(Protocol):
    """A file of a save that has a place, and is yet to be written."""

    def write(self, *, threads: int, progress: Progress | None, block: int | None) -> Mapping[str, int]:
        """Write all of it, as safe as it was asked for; the CRC-32 of each piece of data by its label."""

    def give_up(self) -> None:
        """Let go of it, whatever has been written."""


class Gathering(Protocol):
    """Where the files of a save come together, as a rank sees it that writes some of them."""

    @property
    def save(self) -> str:
        """What the names of data files carry: the id of the save; nothing in a folder, which is published whole."""

    def begin(self, plan: FilePlan) -> Begun:
        """Give a file its place."""

    def link(self, file: LinkedFile) -> bool:
        """Take over a file of the base; whether by a second name, or where it is, and not by a copy."""

    def close(self) -> None:
        """Let go of what is open on this rank, when all of its files are written."""

    def give_up(self) -> None:
        """Remove what this rank may remove. Only for a save that is known not to be published; on the first rank, for any."""


class FirstGathering(Gathering, Protocol):
    """The same, on the rank that opened it."""

    @property
    def told(self) -> str:
        """What other ranks are told, so that they find it (`join_gathering`)."""

    def publish(
        self,
        delivered: Sequence[Sequence[Receipt]],
        index: Sequence[FilePlan],
        *,
        check: Callable[[Store], None],
        attributes: Mapping[str, str] | None = None,
    ) -> None:
        """Make all of it a checkpoint. `delivered[r]` is what rank r has written; the last of the `index` files is the one that
        makes it a checkpoint; `check` is given a store of all of it, before anybody else can see it. `attributes` are what the
        object of the index says of itself."""


def open_gathering(path: str, *, format: str, durable: bool, overwrite: bool) -> FirstGathering:
    """On the first rank: make a place for a save to a path or URL. Raises `NotCommitted` where there may be none."""
    url = place_at(path).url
    if url is not None:
        from holdfast.ranks.prefix import FirstPrefix

        return FirstPrefix(url, format, overwrite=overwrite)
    from holdfast.ranks.folder import FirstFolder

    return FirstFolder(path, durable=durable, overwrite=overwrite)


def join_gathering(told: str, path: str, *, durable: bool) -> Gathering:
    """On another rank: the place of which the first one has told."""
    url = place_at(path).url
    if url is not None:
        from holdfast.ranks.prefix import Prefix

        return Prefix(url, told)
    from holdfast.ranks.folder import JoinedFolder

    return JoinedFolder(told, path=path, durable=durable)
