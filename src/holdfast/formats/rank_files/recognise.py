"""Which files of a folder are the ranks of one save.

A name says what is in a file, how many ranks there were, and which one wrote it. That is a claim: the numbers are compared with the
files that are there, and never counted up to. The content of one file is looked at, too: a folder whose names fit and whose files
are something else is left to other formats.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice

from msgspec import Struct, field

from holdfast.core.protocols import Source
from holdfast.errors import FormatError

SHOWN = 5
"""Ranks, files or names that a message lists."""

ZIP = b"PK\3\4"

NUMBER = r"0|[1-9][0-9]{0,17}"
PATTERN = re.compile(rf"(?P<what>[A-Za-z0-9_.-]*[A-Za-z0-9])_world_size_(?P<world>{NUMBER})_rank_(?P<rank>{NUMBER})\.pt")

MODEL, OPTIMIZER, EXTRA = "model", "optim", "extra_state"
ORDER = (MODEL, OPTIMIZER)
"""What a folder opens as: the first of these that is there."""


class RankSet(Struct):
    """Files that were written together, one a rank."""

    what: str
    """What is in them: `model`, `optim`."""
    world: int
    """How many there should be."""
    files: dict[int, str] = field(default_factory=dict)
    """The key of each rank's file."""

    @property
    def ranks(self) -> Sequence[int]:
        return sorted(self.files)


def rank_sets(keys: Iterable[str], pattern: re.Pattern[str]) -> list[RankSet]:
    """The sets of files whose names are of this form. Its groups are `what`, `world` and `rank`.

    Numbers with leading zeros are no numbers here, so that no two names mean one rank.

    >>> pattern = re.compile("(?P<what>[a-z]+)_(?P<world>[0-9]+)_(?P<rank>[0-9]+).pt")
    >>> [(found.what, found.world, found.ranks) for found in rank_sets(["model_2_0.pt", "model_2_1.pt", "config.json"], pattern)]
    [('model', 2, [0, 1])]
    """
    found: dict[tuple[str, int], RankSet] = {}
    for key in keys:
        match = pattern.fullmatch(key)
        if match is not None:
            what, world, rank = match["what"], int(match["world"]), int(match["rank"])
            found.setdefault((what, world), RankSet(what, world)).files[rank] = key
    return list(found.values())


def check_complete(found: RankSet) -> None:
    """Raise where a rank is missing, or one is there that cannot be. Costs what the files cost, whatever number a name has."""
    beyond = [rank for rank in found.ranks if rank >= found.world]
    if beyond:
        message = f"the name says {found.world:,} ranks, so there is no rank {beyond[0]:,}: files of two runs lie in one folder"
        raise FormatError(message, file=found.files[beyond[0]], expected=found.world, found=beyond[0])
    count = found.world - len(found.files)
    if count:
        absent = list(islice((rank for rank in range(found.world) if rank not in found.files), SHOWN))
        which = some([str(rank) for rank in absent], count)
        raise FormatError(
            f"{len(found.files):,} of {found.world:,} {found.what} files are here, and with rank {which} a part of most tensors is "
            "missing: get all files of the save into one folder",
            expected=found.world,
            found=len(found.files),
        )


def begins_like_torch(source: Source, key: str) -> bool:
    """Whether a file begins like one of `torch.save`, whatever it is called."""
    return source.first(key, len(ZIP)) == ZIP


def some(names: Sequence[str], count: int | None = None) -> str:
    count = len(names) if count is None else count
    shown = ", ".join(names[:SHOWN])
    return shown if count <= min(len(names), SHOWN) else f"{shown} and {count - min(len(names), SHOWN):,} more"


def by_what(sets: Iterable[RankSet]) -> Mapping[str, RankSet]:
    """The sets by what is in them. Raises where there are two of one kind: nobody could say which one is meant."""
    found: dict[str, RankSet] = {}
    for one in sets:
        other = found.setdefault(one.what, one)
        if other is not one:
            raise FormatError(
                f"{one.what} files of {other.world:,} and of {one.world:,} ranks lie in one folder, so they are of two runs; "
                "move one of them elsewhere",
                expected=other.world,
                found=one.world,
            )
    return found


def main_set(sets: Iterable[RankSet]) -> RankSet:
    """The set that a folder opens as."""

    def place(found: RankSet) -> tuple[int, bool, str]:
        return ORDER.index(found.what) if found.what in ORDER else len(ORDER), found.what == EXTRA, found.what

    return min(sets, key=place)


MEGATRON = re.compile(
    r"(?:(?P<step>[^/]+)/)?mp_rank_(?P<tp>\d{2,4})(?:_(?P<pp>\d{3}))?(?P<more>_\d{3})?/(?:model_optim_rng|model_rng)\.pt"
)

Place = tuple[int, int | None, str]
"""Tensor-parallel rank, stage of the pipeline where there is one, and what the name says beyond that (a rank of experts)."""


def megatron_files(keys: Iterable[str]) -> dict[str, dict[Place, str]]:
    """The files of Megatron's ranks, of each step."""
    found: dict[str, dict[Place, str]] = {}
    for match in filter(None, map(MEGATRON.fullmatch, keys)):
        place = int(match["tp"]), None if match["pp"] is None else int(match["pp"]), match["more"] or ""
        found.setdefault(match["step"] or "", {})[place] = match[0]
    return found


def is_megatron(source: Source) -> bool:
    """Whether names and the content of one file say so."""
    if source.store.holds("holdfast.json"):
        return False
    found = next(iter(megatron_files(source.store.list()).values()), None)
    return found is not None and begins_like_torch(source, next(iter(found.values())))


def is_rank_files(source: Source) -> bool:
    """Whether names and the content of one file say so. One file of several, opened by itself, is a file."""
    if source.store.holds("holdfast.json"):
        return False
    keys = source.store.list()
    sets = rank_sets(keys, PATTERN)
    # What somebody made of them, and put beside them, is what the folder is; the files themselves still open by a star.
    merged = any("/" not in key and key.endswith((".safetensors", ".safetensors.index.json")) for key in keys)
    if not sets or merged or ".metadata" in keys:
        return False
    name = source.store.name.replace("\\", "/")
    if len(keys) == 1 and sets[0].world != 1 and name.rsplit("/", 1)[-1] == keys[0]:
        return False
    chosen = main_set(sets)
    return begins_like_torch(source, chosen.files[chosen.ranks[0]])
