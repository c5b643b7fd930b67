"""The files of Llama 1, 2 and 3 as Meta gives them: one for each model-parallel rank, a flat dict with the same names in each.

    consolidated.00.pth … consolidated.07.pth      rank 0 to 7, by `torch.save`
    params.json                                    dim, n_heads, n_kv_heads, …

Names say how a matrix was cut: by rows where outputs are split, by columns where inputs are. `tok_embeddings` of Llama 1 and 2 is
cut by columns, and of Llama 3 by rows: who has all of the hidden size has rows. What has one dimension is a replica. Other names
are refused where there are several files, and never joined by guess.

No file says how many there are. But `wo` has as many columns as the hidden size, so a missing last file is noticed. With more files
than heads of keys (405B in 16 files), several have the same head; by `params.json` these are replicas.

Names and cuts as of llama-models 0.3.0 and `convert_llama_weights_to_hf` of transformers 4.46.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from holdfast.core.box import Box
from holdfast.core.protocols import Description, Source
from holdfast.core.tensor import LazyTensor
from holdfast.core.value import replace
from holdfast.errors import FormatError, MetadataError, Unsupported
from holdfast.extras.rank_files.assemble import Assembly, RankBox, RankFile, described
from holdfast.extras.rank_files.recognise import RankSet, check_complete
from holdfast.formats.index_file import read_config
from holdfast.formats.torch.directory import read_all

FILE = re.compile(r"consolidated\.(\d\d|[1-9]\d{2,3})\.pth")
ROWS = re.compile(r"output\.weight|layers\.\d+\.(?:attention\.w[qkv]|feed_forward\.w[13])\.weight")
COLUMNS = re.compile(r"layers\.\d+\.(?:attention\.wo|feed_forward\.w2)\.weight")
KEYS = re.compile(r"layers\.\d+\.attention\.w[kv]\.weight")
WHOLE = re.compile(r"tok_embeddings\.weight|layers\.\d+\.attention\.wo\.weight")
"""Matrices with as many columns as the hidden size."""


def is_meta(source: Source) -> bool:
    """Whether several files were opened, with one of Meta's at the top."""
    keys = source.store.list()
    return len(keys) > 1 and any(map(FILE.fullmatch, keys))


def describe(source: Source) -> Description:
    files = {int(match[1]): match[0] for match in map(FILE.fullmatch, source.store.list()) if match}
    found = RankSet("consolidated", max(files) + 1, files)
    check_complete(found)
    saved = read_all(source, [files[rank] for rank in found.ranks])
    ranks = [
        RankFile(rank, key, one.tree, one.nbytes, one.foreign)
        for rank, (key, one) in enumerate(saved.items())
    ]
    flats = [_flat(rank) for rank in ranks]
    for rank, flat in zip(ranks, flats, strict=True):
        for name in sorted(flat.keys() ^ flats[0].keys())[:1]:
            message = f"one of {ranks[0].key} and this file has it and the other has not: they are of two models"
            raise MetadataError(message, file=rank.key, tensor=name[:200])
    assembly, params = Assembly(source), read_config(source, source.limits)
    hidden = flats[0]["norm.weight"].size if "norm.weight" in flats[0] else None
    tree = {
        name: _whole(name, [flat[name] for flat in flats], assembly, hidden=hidden, params=params)
        for name in flats[0]
    }
    notes = [f"{key}: {note}" for key, one in saved.items() for note in one.notes]
    told = described(
        "meta-llama", tree, ranks, source=assembly.source, notes=notes, unequal=assembly.unequal
    )
    archives = tuple(key for key, one in saved.items() if one.format == "torch-zip")
    return replace(told, tree=told.tensors, archives=archives)


def _flat(rank: RankFile) -> dict[str, LazyTensor]:
    tree = rank.tree if isinstance(rank.tree, dict) else {None: None}
    flat = {
        name: value
        for name, value in tree.items()
        if isinstance(name, str) and isinstance(value, LazyTensor)
    }
    if len(flat) != len(tree):
        raise FormatError(
            "not a file of Meta's Llama: it is no plain dict of tensors; open it by its own name",
            file=rank.key,
        )
    return flat


def _whole(
    name: str,
    parts: Sequence[LazyTensor],
    assembly: Assembly,
    *,
    hidden: int | None,
    params: Mapping[str, object],
) -> LazyTensor:
    first, count = parts[0], len(parts)
    axis = 0 if ROWS.fullmatch(name) else 1 if COLUMNS.fullmatch(name) else None
    if name == "tok_embeddings.weight" and hidden is not None and first.ndim == 2:
        axis = int(first.shape[1] != hidden)
    if count > 1 and first.ndim > 1 and (axis is None or first.ndim > 2):
        message = f"no {first.ndim}-dimensional tensor of Llama 1, 2 or 3 is called so, and nothing says how its {count} parts go"
        raise Unsupported(
            f"{message} together; open the files one by one", tensor=name[:200], found=first.shape
        )
    boxes = [Box.whole(first.shape)] * count
    if axis is not None and first.ndim == 2:
        copies, length = (
            _copies(first, count, params) if KEYS.fullmatch(name) else 1,
            first.shape[axis],
        )
        boxes = [
            Box.from_offsets([n * (rank // copies * length) for n in (1 - axis, axis)], first.shape)
            for rank in range(count)
        ]
    shape = boxes[-1].stop
    columns = shape[1] if len(shape) == 2 and WHOLE.fullmatch(name) else hidden
    # One file may be of another model, whose heads are not as wide; a fraction of the hidden size is a part.
    if hidden is not None and columns != hidden and (count > 1 or not hidden % (columns or 1)):
        message = f"{count} files have {columns} columns of it, and the hidden size is {hidden}: files are missing at the end"
        raise MetadataError(message, tensor=name, expected=hidden, found=columns)
    joined = [
        RankBox(rank, box, part) for rank, (box, part) in enumerate(zip(boxes, parts, strict=True))
    ]
    return assembly.tensor(name, first.dtype, shape, parts=joined)


def _copies(first: LazyTensor, count: int, params: Mapping[str, object]) -> int:
    """How many files have the same rows of keys or values. One, where `params.json` does not say how many rows there are."""
    heads, dim = params.get("n_heads"), params.get("dim")
    groups = params.get("n_kv_heads") or heads
    if not (
        type(heads) is int
        and type(dim) is int
        and type(groups) is int
        and 0 < groups <= heads <= dim
    ):
        return 1
    copies, rest = divmod(first.shape[0] * count, groups * (dim // heads))
    return copies if copies and not rest and count % copies == 0 else 1
