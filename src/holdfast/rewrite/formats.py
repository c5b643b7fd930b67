"""Where and how to save: the format of a path, the plan of a state in that format, and the proof that it opens.

What a writer writes, its own reader opens. A plan is opened (`rehearse`) before the first byte of it is written.

1. A store over the plan stands in for the files (`engine.planned_store`): headers, pickles and indexes as they will be, no data.
2. The reader that `open` uses describes it, under the default `Limits`.
3. What it finds is what was to be saved: the same names, dtypes and shapes.

Whatever stands in the way is a `CannotHold`, and nothing has been touched. Checksums are not known yet, and cannot change the
answer: they have a fixed width, any eight digits are accepted, and a reader compares one only with bytes of data, which opening
does not read (docs/design/014-what-is-written-opens.md).
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Collection, Mapping
from functools import partial

from holdfast.core.chunk import c_strides
from holdfast.core.dtype import DType
from holdfast.core.limits import DEFAULTS
from holdfast.core.protocols import Description, State, Store
from holdfast.core.runtime import resting_collector
from holdfast.core.sharing import tied
from holdfast.core.table import ODD, Kind, Table
from holdfast.core.value import Value, replace
from holdfast.engine.planned_store import PlannedStore
from holdfast.engine.source import OpenSource
from holdfast.engine.sparse_choice import choose, parse_wanted
from holdfast.errors import CannotHold, HoldfastError, Unsupported, located
from holdfast.formats.detect import describe, detect
from holdfast.formats.native.write import lay_out_native
from holdfast.formats.safetensors.record import SHARDING_INFO
from holdfast.formats.safetensors.write import lay_out_safetensors
from holdfast.formats.seal import SEAL
from holdfast.formats.torch.write import archive_name, lay_out_torch_zip
from holdfast.plan.saves import Data, Gathered, Memory, SavePlan
from holdfast.rewrite.base import OpenBase
from holdfast.rewrite.rejoin import rejoin
from holdfast.rewrite.state import tabulate_state
from holdfast.stores.place import place_at

NAMES = {
    "torch": "torch-zip", "torch-zip": "torch-zip", "pt": "torch-zip", "safetensors": "safetensors",
    "safetensors-dir": "safetensors-dir", "native": "native",
}  # fmt: skip
"""What a caller may call a format, and what it is called."""

DIRECTORIES = frozenset({"safetensors-dir", "native"})
"""Formats of several files."""

SUFFIXES = {
    ".pt": "torch-zip", ".pth": "torch-zip", ".bin": "torch-zip", ".ckpt": "torch-zip", ".safetensors": "safetensors",
    "": "native",
}  # fmt: skip
"""The format that a suffix means. A name without one is a native directory."""


class Options(Value, frozen=True):
    """What a caller may ask of a layout."""

    max_shard_size: int | None = None
    """Split into files of at most this many bytes of tensors."""
    keep_tree: bool = False
    """safetensors: record what is no tensor in the header, where Holdfast finds it again."""
    sparse: str = "never"
    """native: which tensors are stored packed (`engine.sparse_choice`)."""
    index: bool = False
    """safetensors: an index even of one file, because other safetensors files will lie beside it."""
    stem: str = "model"
    """safetensors: what the names of the files in a directory begin with."""
    base: OpenBase | None = None
    """native: hashes are recorded, and what did not change since this is taken over from there."""


def suffix_of(path: str) -> str:
    """What a path says of its format: in small letters; empty for the name of a directory.

    >>> suffix_of("model.PT"), suffix_of("step-1000.5"), suffix_of("model.v2/")
    ('.pt', '', '')
    """
    suffix = "" if place_at(path).says_folder else os.path.splitext(path)[1].lower()
    # A step number is no suffix: step-1000.5 is a directory's name like any other.
    return "" if suffix[1:].isdigit() else suffix


def format_for(path: str, format: str | None, options: Options) -> str:
    """The format to save in: what was asked for, or what the suffix says; a directory where one is there."""
    found = format_named(path, format, options)
    if found == "safetensors":
        place = place_at(path)
        if place.says_folder or place.is_folder:
            return "safetensors-dir"
    return found


def format_named(path: str, format: str | None, options: Options) -> str:
    """The format to save in as it was asked for, or as the suffix of a name says it."""
    if format is None:
        suffix = suffix_of(path)
        if suffix not in SUFFIXES:
            known = ", ".join(s for s in SUFFIXES if s)
            hint = f"use one of {known}, none for a native directory, or say format=…"
            raise Unsupported(f"the suffix {suffix!r} names no format; {hint}", file=path)
        found = SUFFIXES[suffix]
    elif format in NAMES:
        found = NAMES[format]
    else:
        raise Unsupported(f"{format!r} is no format that can be written; use torch, safetensors or native", found=format)
    return "safetensors-dir" if found == "safetensors" and options.max_shard_size is not None else found


def check_archive_name(path: str) -> None:
    """Raise `Unsupported` where an archive of programs (`.pt2`) is to be written under a name that says another format."""
    suffix = suffix_of(path)
    if suffix and suffix in SUFFIXES:
        message = f"a .pt2 archive is written here, and the suffix {suffix!r} says {SUFFIXES[suffix]}"
        raise Unsupported(f"{message}; call it {os.path.splitext(os.path.basename(path))[0]}.pt2", file=path, found=suffix)


def check_sparse(path: str, format: str, sparse: str) -> None:
    """Raise `Unsupported` where tensors shall be stored packed in a format that stores none so, or in a way that there is not."""
    if parse_wanted(sparse) is not None and format != "native":
        raise Unsupported(f"only a native directory stores tensors packed, and this is {format}; leave sparse= away", file=path)


def plan_save(path: str, state: State, format: str, *, options: Options) -> SavePlan:
    """Lay out a state, so that it opens again. Raises `CannotHold` with every problem when the format cannot hold it."""
    check_sparse(path, format, options.sparse)
    return _rehearse_kinds(_lay_out(path, state, format, options=options), path, state, format, options)


def _rehearse_kinds(plan: SavePlan, path: str, state: State, format: str, options: Options) -> SavePlan:
    """The same plan with what it holds, known to open: a state with one tensor of each of its kinds, laid out alike, does.

    Of fifty thousand tensors the reader would read the same header fields fifty thousand times. What it counts is compared with
    its limits by the layout. Where most tensors are of a kind of their own, or where the whole comes near to a limit, the reader
    opens the plan itself (docs/design/028-table.md).
    """
    leaves, table = state.leaves, state.tensors
    # What says where pieces lie names them all.
    if SHARDING_INFO in state.metadata or _near_limits(plan, table, flat=leaves.flat):
        return rehearse(replace(plan, holds=table), path)
    alike = _of_each_kind(table)
    # One pair of rows that are tied, and one of parts of a storage, if there are some.
    tie = (*next(iter(tied(table).items()), ()), *_two_views(table))
    plain = leaves.flat and not table.single and not without_origin(state.metadata)
    key = (
        format, options.keep_tree, options.sparse, options.base is None, plan.directory, len(plan.files) > 1, frozenset(alike),
        tuple([_likeness(table.kind_of(row)) for row in tie]),
    )  # fmt: skip
    if plain and was_opened(key):
        return replace(plan, holds=table, opens=True)
    plan = replace(plan, holds=table)
    wholes = leaves.composites()
    parts = {id(part) for whole in wholes for part in whole.parts.values()}
    wanted = {*alike.values(), *table.single, *tie}
    rows = sorted(row for row in wanted if not parts or id(leaves.values[row]) not in parts)
    if 2 * (len(rows) + len(parts)) >= len(table):
        plan = rehearse(plan, path)
    else:
        sample: dict[str, object] = {f"{at}": table.view(row) for at, row in enumerate(rows)}
        if not leaves.flat:
            sample["containers"] = {f"{at}": container for at, container in enumerate(leaves.samples())}
            sample |= {"others": others} if (others := leaves.others()) else {}
            sample |= {"composites": {f"{at}": whole for at, whole in enumerate(wholes)}} if wholes else {}
        described = tabulate_state(sample, metadata=state.metadata)
        own = replace(options, base=None if options.base is None else OpenBase())
        rehearse(replace(_lay_out(path, described, format, options=own), holds=described.tensors), path)
        plan = replace(plan, opens=True)
    if plain:
        note_opened(key)
    return plan


OPENED: set[object] = set()
"""What the reader has opened in this process: formats and kinds of tensors, of plain dicts of plain tensors."""

MOST_OPENED = 1024


def was_opened(key: object) -> bool:
    """Whether the reader has opened such tensors in this process."""
    return key in OPENED


def note_opened(key: object) -> None:
    """Remember what the reader has opened."""
    if len(OPENED) >= MOST_OPENED:
        OPENED.clear()
    OPENED.add(key)


def _of_each_kind(table: Table) -> dict[object, int]:
    """A row of each kind, where kinds that differ in the lengths of their dimensions alone are one; by what they have in common."""
    first = dict(zip(reversed(table.kind), range(len(table) - 1, -1, -1), strict=True))
    alike: dict[object, int] = {}
    for number, row in first.items():
        alike[_likeness(table.kinds[number])] = row
    return alike


def _two_views(table: Table) -> tuple[int, ...]:
    """Two rows that are different parts of one storage, if there are such."""
    parts = {number for number, kind in enumerate(table.kinds) if kind.dense and kind.nbytes and not kind.whole}
    seen: dict[int, int] = {}
    for row, one in enumerate(table.kind if parts else ()):
        if one in parts and table.storage[row] != ODD:
            first = seen.setdefault(table.storage[row], row)
            if table.offset_of(first) != table.offset_of(row):
                return first, row
    return ()


def _likeness(kind: Kind) -> tuple[object, ...]:
    """What a reader tells a kind by, but for the lengths of its dimensions."""
    traits = kind.traits
    marks = (traits.requires_grad, traits.parameter, traits.buffer)
    usual = kind.strides == c_strides(kind.shape, kind.dtype.bits)
    return kind.dtype.name, len(kind.shape), kind.nbytes == 0, usual, kind.whole, marks, kind.location


WITH_DATA = (Data, Memory, Gathered)


def _near_limits(plan: SavePlan, table: Table, *, flat: bool) -> bool:
    """Whether a plan has so many files, or so long a text, that a reader may refuse it."""
    limits = DEFAULTS
    if flat and plan.format != "torch-zip":
        # No tree is written out. The layout has compared headers and manifests; an index it has not.
        return len(plan.listed) > limits.files or any(file.nbytes > limits.index_nbytes for file in plan.index)
    data = sum([segment.nbytes for file in plan.files for segment in file.segments if isinstance(segment, WITH_DATA)])
    text, count = plan.nbytes - data, len(table)
    if plan.format == "torch-zip":
        # The directory has 46 bytes and a name for each record; names of tensors may take 16 times what the pickle has.
        directory = count * DIRECTORY_NBYTES > limits.zip_directory_nbytes or 2 * count > limits.zip_records
        return directory or text > limits.pickle_nbytes or sum(map(len, table.names)) > text
    return near_limits(text, count, len(plan.listed))


def near_limits(text_nbytes: int, tensors: int, files: int) -> bool:
    """Whether a directory with so many bytes of text about so many tensors is one that a reader may refuse."""
    limits = DEFAULTS
    return files > limits.files or 4 * (text_nbytes + CHARACTERS * tensors) > limits.tree_nbytes


DIRECTORY_NBYTES = 256
"""Of a record in the directory of an archive whose name is of usual length."""

CHARACTERS = 256
"""Of a tensor, where a state is written out, at the most; but for its name."""


def without_origin(metadata: Mapping[str, str]) -> dict[str, str]:
    """What a safetensors file says about itself, but that it was made of torch's tensors: a torch file need not say so."""
    return {key: text for key, text in metadata.items() if (key, text) != ("format", "pt")}


def _lay_out(path: str, state: State, format: str, *, options: Options) -> SavePlan:
    match format:
        case "torch-zip":
            # The one format with storages: what shared one before it was copied shares it again.
            rejoined = rejoin(replace(state, metadata=without_origin(state.metadata)))
            plan = lay_out_torch_zip(rejoined.state, name=archive_name(path))
            return replace(plan, notes=(*rejoined.notes, *plan.notes))
        case "safetensors":
            return lay_out_safetensors(state, keep_tree=options.keep_tree)
        case "safetensors-dir":
            most = options.max_shard_size or 5_000_000_000
            return lay_out_safetensors(
                state,
                keep_tree=options.keep_tree,
                max_shard_size=most,
                index=options.index,
                stem=options.stem,
                save=save_name(path),
            )
        case "native":
            wanted = parse_wanted(options.sparse)
            pack = None if wanted is None else partial(choose, wanted=wanted)
            base = options.base
            return lay_out_native(
                state,
                max_shard_size=options.max_shard_size,
                pack=pack,
                hashes=None if base is None else base.hashes,
                take_over=None if base is None else base.take_over,
                save=save_name(path),
            )
    raise Unsupported(f"{format!r} is no format that can be written", found=format)


def save_name(path: str) -> str:
    """What names of data files carry: the id of the save in an object store; nothing in a directory, which is replaced whole."""
    return "" if place_at(path).on_disk else secrets.token_hex(8)


def is_replaceable(name: str) -> bool:
    """Whether a file in a directory belongs to a checkpoint, so that a save with `overwrite=True` may replace it."""
    return name.endswith((".safetensors", ".safetensors.index.json")) or name in ("holdfast.json", SEAL)


Outline = tuple[DType, tuple[int, ...]]
"""The dtype and shape of a tensor."""

WHAT = "what would be written could not be opened again, so nothing is"

SHOWN = 8
"""Differences that a refusal lists."""


def rehearse(plan: SavePlan, path: str) -> SavePlan:
    """The same plan, known to open. Raises `CannotHold` with the reason where it would not, or would show something else."""
    if plan.opens:
        return plan
    with resting_collector():
        files = (*plan.files, *plan.index)
        # A folder of one file is opened as that file.
        alone = ("safetensors",) if plan.format == "safetensors-dir" and len(files) == 1 else ()
        found = described(PlannedStore(files, name=path, linked=plan.linked), (plan.format, *alone))
        if plan.holds is not None:
            lost = [str(one.what) for one in found.foreign if one.uses != ("mention",)]
            if lost:
                raise CannotHold(WHAT, [f"{what}: it would not be built" for what in lost], file=path)
            check_holds(found.tensors, dict(zip(plan.holds, map(plan.holds.outline, plan.holds), strict=True)), path)
        del found
    return replace(plan, opens=True)


def described(store: Store, formats: Collection[str]) -> Description:
    """What the reader makes of a store that stands for files to come. Raises `CannotHold` where it is none of these formats."""
    try:
        with located(file=store.name):
            source = OpenSource(store, limits=DEFAULTS)
            if len(store.list()) > source.limits.files:
                raise CannotHold(WHAT, [f"{len(store.list()):,} files are more than Limits(files={source.limits.files:,})"])
            reader = detect(source)
            if reader.name not in formats:
                raise CannotHold(WHAT, [f"it would be opened as {reader.name}, and is {' or '.join(formats)}"], file=store.name)
            return describe(source, reader)
    except CannotHold:
        raise
    except HoldfastError as error:
        raise CannotHold(WHAT, [error.message], file=store.name) from error


def check_holds(found: Table, holds: Mapping[str, Outline], path: str) -> None:
    """Raise `CannotHold` where tensors that were found are not those that were to be saved: by name, dtype and shape."""
    there = dict.fromkeys(found)
    problems = [f"{name}: it would not be there" for name in holds if name not in there]
    problems += [f"{name}: nobody has saved it, and it would be there" for name in there if name not in holds]
    if not problems:
        for name, (dtype, shape) in holds.items():
            seen = found.outline(name)
            if seen[0] is not dtype or seen[1] != shape:
                problems.append(f"{name}: it would be read as {seen[0]} {list(seen[1])}, and is {dtype} {list(shape)}")
    if problems:
        more = [f"and {len(problems) - SHOWN:,} more"] if len(problems) > SHOWN else []
        raise CannotHold(WHAT, [*problems[:SHOWN], *more], file=path)
