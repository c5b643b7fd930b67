"""Is this a folder of Megatron's ranks? By the names of its files and the beginning of one. Light, since every folder is asked."""

from __future__ import annotations

import re
from collections.abc import Iterable

from holdfast.core.protocols import Description, Source
from holdfast.formats.rank_files.recognise import begins_like_torch

FORMAT = "megatron"

FILE = re.compile(
    r"(?:(?P<step>[^/]+)/)?mp_rank_(?P<tp>\d{2,4})(?:_(?P<pp>\d{3}))?(?P<more>_\d{3})?/(?:model_optim_rng|model_rng)\.pt"
)

Place = tuple[int, int | None, str]
"""Tensor-parallel rank, stage of the pipeline where there is one, and what the name says beyond that (a rank of experts)."""


class MegatronDirectory:
    """An iteration of Megatron, or a run with a file that names the latest."""

    name = FORMAT

    def matches(self, source: Source) -> bool:
        if source.store.holds("holdfast.json"):
            return False
        found = next(iter(megatron_files(source.store.list()).values()), None)
        return found is not None and begins_like_torch(source, next(iter(found.values())))

    def describe(self, source: Source) -> Description:
        from holdfast.formats.rank_files.megatron import describe

        return describe(source)


def megatron_files(keys: Iterable[str]) -> dict[str, dict[Place, str]]:
    """The files of the ranks of each step."""
    found: dict[str, dict[Place, str]] = {}
    for key in keys:
        match = FILE.fullmatch(key)
        if match is not None:
            place = int(match["tp"]), None if match["pp"] is None else int(match["pp"]), match["more"] or ""
            found.setdefault(match["step"] or "", {})[place] = key
    return found
