"""Which files of a folder are the ranks of one save.

A name has the content of a file, the number of ranks, and the rank that wrote it. The numbers are compared with the files that
exist; no loop counts up to them. The content of one file is checked, too: otherwise the folder is left to other formats.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice

from msgspec import Struct

from holdfast.core.protocols import Source
from holdfast.core.text import list_names
from holdfast.errors import FormatError
from holdfast.formats.detect import begins_like_torch

SHOWN = 5
"""Missing ranks that are looked for."""

NUMBER = r"0|[1-9][0-9]{0,17}"
PATTERN = re.compile(
    rf"(?P<what>[A-Za-z0-9_.-]*[A-Za-z0-9])_world_size_(?P<world>{NUMBER})_rank_(?P<rank>{NUMBER})\.pt"
)

MODEL, OPTIMIZER, EXTRA = "model", "optim", "extra_state"
ORDER = (MODEL, OPTIMIZER)
"""A folder opens as the first of these that it has."""


class RankSet(Struct):
    """Files that were written together, one a rank."""

    what: str
    world: int
    files: dict[int, str] = {}

    @property
    def ranks(self) -> Sequence[int]:
        return sorted(self.files)


def rank_sets(keys: Iterable[str], pattern: re.Pattern[str]) -> list[RankSet]:
    """The sets of files whose names match a pattern with the groups `what`, `world` and `rank`.

    Numbers have no leading zeros, so that no two names mean one rank.

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
    """Raise for a missing or impossible rank. The cost depends on the number of files, not on the numbers in their names."""
    beyond = [rank for rank in found.ranks if rank >= found.world]
    if beyond:
        message = f"the name says {found.world:,} ranks, so there is no rank {beyond[0]:,}: files of two runs lie in one folder"
        raise FormatError(
            message, file=found.files[beyond[0]], expected=found.world, found=beyond[0]
        )
    count = found.world - len(found.files)
    if count:
        missing = (rank for rank in range(found.world) if rank not in found.files)
        absent = list(islice(missing, SHOWN))
        which = list_names([*map(str, absent)], count=count)
        message = (
            f"{len(found.files):,} of {found.world:,} {found.what} files are here, and with rank {which} a part of most tensors is "
            "missing: get all files of the save into one folder"
        )
        raise FormatError(message, expected=found.world, found=len(found.files))


def by_what(sets: Iterable[RankSet]) -> Mapping[str, RankSet]:
    """The sets by their content. Raises for two sets of one kind."""
    found: dict[str, RankSet] = {}
    for one in sets:
        other = found.setdefault(one.what, one)
        if other is not one:
            message = (
                f"{one.what} files of {other.world:,} and of {one.world:,} ranks lie in one folder, so they are of two runs; "
                "move one of them elsewhere"
            )
            raise FormatError(message, expected=other.world, found=one.world)
    return found


def main_set(sets: Iterable[RankSet]) -> RankSet:
    def place(found: RankSet) -> tuple[int, bool, str]:
        return (
            ORDER.index(found.what) if found.what in ORDER else len(ORDER),
            found.what == EXTRA,
            found.what,
        )

    return min(sets, key=place)


MEGATRON = re.compile(
    r"(?:(?P<step>[^/]+)/)?mp_rank_(?P<tp>\d{2,4})(?:_(?P<pp>\d{3}))?(?P<more>_\d{3})?/(?:model_optim_rng|model_rng)\.pt"
)

Place = tuple[int, int | None, str]
"""Tensor-parallel rank, pipeline stage if there is one, and the rest of the name (a rank of experts)."""


def megatron_files(keys: Iterable[str]) -> dict[str, dict[Place, str]]:
    found: dict[str, dict[Place, str]] = {}
    for match in filter(None, map(MEGATRON.fullmatch, keys)):
        place = (
            int(match["tp"]),
            None if match["pp"] is None else int(match["pp"]),
            match["more"] or "",
        )
        found.setdefault(match["step"] or "", {})[place] = match[0]
    return found


def is_megatron(source: Source) -> bool:
    found = next(iter(megatron_files(source.store.list()).values()), None)
    return found is not None and begins_like_torch(source, next(iter(found.values())))


def is_rank_files(source: Source) -> bool:
    """Whether names and the content of one file match. One file of several, opened by itself, does not."""
    keys = source.store.list()
    sets = rank_sets(keys, PATTERN)
    # A merged checkpoint beside the files counts; the files still open by a star.
    merged = any(
        "/" not in key and key.endswith((".safetensors", ".safetensors.index.json")) for key in keys
    )
    if not sets or merged or ".metadata" in keys:
        return False
    name = source.store.name.replace("\\", "/")
    if len(keys) == 1 and sets[0].world != 1 and name.rsplit("/", 1)[-1] == keys[0]:
        return False
    chosen = main_set(sets)
    return begins_like_torch(source, chosen.files[chosen.ranks[0]])


POINTER_NBYTES = 4096


def chosen_step(
    source: Source, folders: Sequence[str], pointer: str, *, named: Callable[[str], str] = str
) -> str:
    """The step of a run to open: the top itself (`""`), the folder that the file `pointer` names, or the only folder.

        run/latest                               global_step200          DeepSpeed
        run/latest_checkpointed_iteration.txt    200 or release          Megatron

    `named` makes the name of a folder out of the text of the pointer.
    """
    if "" in folders:
        return ""
    first, shown = tuple(sorted(folders)[:5]), list_names(sorted(folders))
    size = source.store.size(pointer) if pointer in source.store.list() else None
    if size is not None:
        if size > POINTER_NBYTES:
            raise FormatError(f"it should name a folder, and is {size:,} bytes long", file=pointer)
        text = source.bytes(pointer, 0, size).decode("utf-8", "replace").strip()
        if (folder := named(text)) not in folders:
            message = f"it names {folder[:80]!r}, where no step is; there is {shown}, which can be opened by itself"
            raise FormatError(message, file=pointer, expected=first, found=text[:80])
        return folder
    if len(folders) > 1:
        message = f"there are {len(folders):,} steps in this folder, and no file {pointer!r} that names one: open one of {shown}"
        raise FormatError(message, found=first)
    return folders[0]
