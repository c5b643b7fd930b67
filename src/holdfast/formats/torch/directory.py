"""A Hugging Face folder whose weights are files of `torch.save`: `pytorch_model.bin`, or shards of it and their index.

    config.json  tokenizer.json  …
    pytorch_model-00001-of-00002.bin    {"a": tensor, …}
    pytorch_model-00002-of-00002.bin    {"b": tensor, …}
    pytorch_model.bin.index.json        {"weight_map": {"a": "pytorch_model-00001-of-00002.bin", …}}     formats/index_file.py

Which files count:

1. With an index, the files that it names, and no others.
2. Without one, `pytorch_model.bin`; else the one file that has such a name (diffusers', an adapter, a variant), or its shards if
   all of them are there.

One file is what it is by itself, whatever its tree. Shards are dicts, each with other keys, and the whole is a dict of them all.
Each goes through the gates that it would by itself; and all of them together may cost what one file may.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Mapping, Sequence

from holdfast.core.leaves import name_tensors
from holdfast.core.opaque import Global
from holdfast.core.protocols import Description, Foreign, Source
from holdfast.core.tree import to_path_key
from holdfast.core.value import replace
from holdfast.engine.files import ViewTable
from holdfast.errors import LimitExceeded, MetadataError, StoreError, Unsupported, error_context
from holdfast.formats.detect import (
    begins_like_legacy,
    begins_like_torch,
    begins_like_torch_tar,
    unknown,
)
from holdfast.formats.index_file import (
    INDEX,
    TORCH_WEIGHTS,
    WeightFiles,
    by_index,
    check_mapped,
    claimed_twice,
    other_copies,
    some,
)
from holdfast.formats.torch.legacy import (
    read_legacy,
    read_torch_tar,
)
from holdfast.formats.torch.zip import SavedFile, read_torch_zip

SUFFIX = ".bin"
USUAL = "pytorch_model.bin"
SHARD = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.bin")

READERS = (
    (begins_like_torch, read_torch_zip),
    (begins_like_legacy, read_legacy),
    (begins_like_torch_tar, read_torch_tar),
)
"""For each container, a function that recognises it by its first bytes, and one that reads it."""


def is_directory(source: Source) -> bool:
    """Whether several files were opened, with weights of torch or an index of them at the top."""
    keys = source.store.list()
    if source.store.index:
        return source.store.index.endswith(SUFFIX + INDEX)
    return len(keys) > 1 and any(TORCH_WEIGHTS.fullmatch(key.removesuffix(INDEX)) for key in keys)


def describe(source: Source) -> Description:
    """Read the index and the pickle of every file that counts, and check that they agree."""
    chosen = weight_files(source)
    saved = read_all(source, chosen.files)
    notes = [
        f"{key}: {note}" if len(saved) > 1 else note
        for key, one in saved.items()
        for note in one.notes
    ]
    alone = chosen.index is None and len(saved) == 1
    tree = saved[chosen.files[0]].tree if alone else _joined(saved, chosen, notes)
    notes += other_copies(source.store.list(), chosen.files)
    named = name_tensors(tree, source.limits, sum(one.nbytes for one in saved.values()))
    archives = tuple(
        key for key, one in saved.items() if one.format in ("torch-zip", "torchscript")
    )
    return Description(
        "torch-dir",
        ViewTable(named.tensors),
        tree,
        _foreign(saved),
        (*notes, *named.notes),
        archives=archives,
    )


def weight_files(source: Source) -> WeightFiles:
    """Which files of a folder count.

    Raises `Unsupported` where there are several checkpoints and none has the usual name, and `StoreError` where a shard is missing.
    """
    keys = [key for key in source.store.list() if TORCH_WEIGHTS.fullmatch(key.removesuffix(INDEX))]
    place = source.store.name
    if (indexed := by_index(source, keys, SUFFIX)) is not None:
        return indexed
    found: dict[tuple[str, int], list[str]] = {}
    for key in keys:
        shard = SHARD.fullmatch(key)
        found.setdefault((shard["stem"], int(shard["count"])) if shard else (key, 1), []).append(
            key
        )
    if (USUAL, 1) in found:
        return WeightFiles([USUAL])
    if len(found) > 1:
        names = [names[0] for names in found.values()]
        message = f"this folder has {len(found):,} checkpoints of torch ({some(names)}): open the file that you mean"
        raise Unsupported(message, file=place, found=tuple(names))
    (((_, count), files),) = found.items()
    if len(files) != count:
        message = f"{len(files):,} of {count:,} shards are here, and no index: get all files of the model into one folder"
        raise StoreError(message, file=place, expected=count, found=tuple(files))
    return WeightFiles(files)


def read_all(source: Source, files: Sequence[str]) -> dict[str, SavedFile]:
    """Read every file. Raises where their pickles together are longer than the limit for one."""
    saved: dict[str, SavedFile] = {}
    left = source.limits.pickle_nbytes
    for key in files:
        with error_context(file=key):
            read = next((read for begins, read in READERS if begins(source, key)), None)
            if read is None:
                raise unknown(source, key)
            saved[key] = read(source, key)
            left -= saved[key].nbytes
            if left < 0:
                most = source.limits.pickle_nbytes
                raise LimitExceeded(
                    f"the pickles of all files are more than Limits(pickle_nbytes={most:,})",
                    expected=most,
                )
    return saved


def _joined(
    saved: Mapping[str, SavedFile], chosen: WeightFiles, notes: list[str]
) -> dict[object, object]:
    """One dict of the items of all files, in the order of the index."""
    trees: dict[str, dict[object, object]] = {}
    for key, one in saved.items():
        if not isinstance(one.tree, dict):
            raise MetadataError(
                "a shard is a dict of tensors, and this file has something else in it", file=key
            )
        trees[key] = one.tree
    made: dict[object, object] = (
        OrderedDict() if any(isinstance(tree, OrderedDict) for tree in trees.values()) else {}
    )
    holding: dict[object, str] = {}
    for key, tree in trees.items():
        for name in tree:
            other = holding.setdefault(name, key)
            if other != key:
                raise claimed_twice(str(to_path_key(name)), [other, key])
        # The versions of modules (`_metadata`), which torch keeps as an attribute of a state dict.
        for name, value in vars(tree).items() if isinstance(tree, OrderedDict) else ():
            before = vars(made).get(name)
            vars(made)[name] = (
                {**before, **value}
                if isinstance(before, dict) and isinstance(value, dict)
                else value
            )
    names: dict[object, None] = {}
    if chosen.index is not None and chosen.listed is not None:
        names |= dict.fromkeys(chosen.listed.weight_map)
        check_mapped(chosen.listed.weight_map, trees, chosen.index)
        more = [str(to_path_key(name)) for name in holding if name not in names]
        if more:
            # transformers loads all that a shard has, whatever the index says.
            notes.append(
                f"{len(more):,} of the names in the files are not in {chosen.index!r}, and come last: {some(more)}"
            )
    made.update((name, trees[holding[name]][name]) for name in names | dict.fromkeys(holding))
    return made


def _foreign(saved: Mapping[str, SavedFile]) -> tuple[Foreign, ...]:
    """Each global once, with the first file that mentions it."""
    found: dict[Global, Foreign] = {}
    for key, one in saved.items():
        for item in one.foreign:
            found.setdefault(
                item.what, replace(item, stream=f"{key}: {item.stream}") if len(saved) > 1 else item
            )
    return tuple(found.values())
