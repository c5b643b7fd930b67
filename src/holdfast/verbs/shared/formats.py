"""Where and how to save: the format of a path, the plan of a state in that format, and the proof that it opens.

What a writer writes, its own reader opens. A plan is opened (`check_opens`) before the first byte of it is written.

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
from collections.abc import Callable, Collection, Mapping
from functools import lru_cache

from holdfast.core.chunk import c_strides
from holdfast.core.dtype import DType
from holdfast.core.group import ALONE, Ranks
from holdfast.core.limits import DEFAULTS
from holdfast.core.protocols import Description, State, Store
from holdfast.core.runtime import gc_paused
from holdfast.core.sharing import check_expansion, tied
from holdfast.core.table import ODD, Kind, Table
from holdfast.core.value import Value, replace
from holdfast.engine.planned_store import PlannedStore
from holdfast.engine.saves import SavePlan, text_nbytes
from holdfast.engine.source import OpenSource
from holdfast.errors import CannotHold, HoldfastError, LimitExceeded, Unsupported, located
from holdfast.formats import (
    FORMATS,
    PLUGINS,
    Format,
    choose_written,
    chosen,
    format_of,
    load_plugins,
    titles,
    written_formats,
)
from holdfast.formats.detect import detect
from holdfast.formats.safetensors.record import SHARDING_INFO
from holdfast.formats.torch.write import archive_name, without_origin
from holdfast.stores.place import place_at
from holdfast.verbs.seals.document import SEAL
from holdfast.verbs.shared.base import OpenBase
from holdfast.verbs.shared.rejoin import rejoin
from holdfast.verbs.shared.state import tabulate_state


class Options(Value, frozen=True):
    max_shard_size: int | None = None
    """Split into files of at most this many bytes of tensors."""
    keep_tree: bool = False
    """safetensors: record what is no tensor in the header, where Holdfast finds it again."""
    index: bool = False
    """safetensors: an index even of one file, because other safetensors files will lie beside it."""
    stem: str = "model"
    """safetensors: how the names of the files in a directory begin."""
    ranks: Ranks = ALONE
    """The ranks that share the work of choosing what is pruned."""
    save: str = ""
    """In an object store: the id of the save, where it is known already."""
    base: OpenBase | None = None
    """native: hashes are recorded, and what did not change since this is taken over from there."""


def suffix_of(path: str) -> str:
    """The suffix that says the format of a path: in small letters; empty for the name of a directory.

    >>> suffix_of("model.PT"), suffix_of("step-1000.5"), suffix_of("model.v2/")
    ('.pt', '', '')
    """
    suffix = "" if place_at(path).says_folder else os.path.splitext(path)[1].lower()
    # A step number is no suffix: step-1000.5 is a directory's name like any other.
    return "" if suffix[1:].isdigit() else suffix


def written_suffixes() -> dict[str, str]:
    """The format that each suffix means. An empty one is that of a name without any."""
    found: dict[str, str] = {}
    for one in written_formats():
        found |= {suffix: one.name for suffix in one.suffixes if suffix not in found}
    return found


def format_for(path: str, format: str | None, options: Options) -> str:
    """The format to save in: what was asked for, or what the suffix says; a directory where one is there."""
    found, place = format_named(path, format, options), place_at(path)
    folder = folder_of(found)
    return folder if folder and (place.says_folder or place.is_folder) else found


def format_named(path: str, format: str | None, options: Options) -> str:
    """The format to save in as it was asked for, or as the suffix of a name says it."""
    if format is None:
        suffix, known = suffix_of(path), written_suffixes()
        if suffix not in known:
            # The suffixes of plugins may be longer, so it is split off again.
            plugin_problems = load_plugins()
            suffix, known = suffix_of(path), written_suffixes()
        if suffix not in known:
            hint = f"use one of {', '.join(filter(None, known))}, none for a native directory, or say format=…"
            problem = "; ".join([_explain_suffix(path, suffix), *plugin_problems])
            raise Unsupported(f"{problem}; {hint}", file=path)
        found = known[suffix]
    elif (asked := choose_written(format)) is not None:
        found = asked.name
    else:
        raise Unsupported(explain_unwritten(format), found=format)
    return folder_of(found) or found if options.max_shard_size is not None else found


def describe_one_file(path: str, format: str) -> tuple[str, ...]:
    """Return a note if one file is written where a folder may have been meant."""
    if suffix_of(path) or format_of(format).folder or folder_of(format) is None:
        return ()
    return (
        "the target is one file, since its name ends neither with a suffix nor with a slash; folder=True makes it a folder",
    )


def _explain_suffix(path: str, suffix: str) -> str:
    """Say why no format is written under a suffix: its format can only be read, or it has none."""
    for one in (*FORMATS, *PLUGINS):
        if any(end and path.lower().endswith(end) for end in one.suffixes):
            writer = " in this way; `holdfast package` writes it" if one.programs else ""
            return f"{one.title} can be read and not written{writer}"
    return f"no format has the suffix {suffix!r}"


def explain_unwritten(format: str) -> str:
    """Say why a format cannot be asked for, and which can."""
    *first, last = titles(written_formats())
    hint = f"use {', '.join(first)} or {last}"
    if chosen(format, (*FORMATS, *PLUGINS)) is not None:
        return f"{format} can be read and not written; {hint}"
    problems = [f"; {problem}" for problem in load_plugins()]
    return f"there is no format {format!r}{''.join(problems)}; {hint}"


def folder_of(format: str) -> str | None:
    """The format of a folder with several files of a format; None where there is none."""
    asked = format_of(format).choices
    return next(
        (one.name for one in written_formats() if one.folder and one.choices == asked), None
    )


def archive_format(path: str, format: str | None) -> Format | None:
    """Return the archive of programs that a format or the suffix of the path means, if it is one."""
    archives = [entry for entry in FORMATS if entry.programs]
    if format is not None:
        return chosen(format, archives)
    return next((entry for entry in archives if suffix_of(path) in entry.suffixes), None)


def check_archive_name(path: str) -> None:
    """Raise `Unsupported` where an archive of programs (`.pt2`) is to be written under a name that says another format."""
    suffix, known = suffix_of(path), written_suffixes()
    if suffix and suffix in known:
        message = f"a .pt2 archive is written here, and the suffix {suffix!r} says {known[suffix]}"
        raise Unsupported(
            f"{message}; call it {os.path.splitext(os.path.basename(path))[0]}.pt2",
            file=path,
            found=suffix,
        )


def plan_save(path: str, state: State, format: str, *, options: Options) -> SavePlan:
    """Lay out a state, so that it opens again. Raises `CannotHold` with every problem when the format cannot hold it."""
    plan = _lay_out(path, state, format, options=options)
    return _check_kinds_open(
        plan if plan.holds is not None else replace(plan, holds=state.tensors),
        path,
        state,
        format,
        options,
    )


def _check_kinds_open(
    plan: SavePlan, path: str, state: State, format: str, options: Options
) -> SavePlan:
    """The plan, known to open because a state with one tensor of each of its kinds, laid out alike, opens.

    Of fifty thousand tensors the reader would read the same header fields fifty thousand times. What it counts is compared with
    its limits by the layout. Where most tensors are of a kind of their own, or where the whole comes near to a limit, the reader
    opens the plan itself (docs/design/028-table.md).
    """
    leaves, table = state.leaves, state.tensors
    # What says where pieces lie names them all.
    if SHARDING_INFO in state.metadata or _near_limits(plan, table, flat=leaves.flat):
        return check_opens(plan, path)
    # A row of each kind. Kinds that differ in the lengths of their dimensions alone are one.
    first = dict(zip(reversed(table.kind), range(len(table.kind) - 1, -1, -1), strict=True))
    alike = {_likeness(table.kinds[number]): row for number, row in first.items()}
    # One pair of rows that are tied, and one of parts of a storage, if there are some.
    tie = (*next(iter(tied(table).items()), ()), *_two_views(table))
    plain = leaves.flat and not table.single and not without_origin(state.metadata)
    key = (
        format, options.keep_tree, options.base is None, plan.directory, len(plan.files) > 1, frozenset(alike),
        tuple([_likeness(table.kind_of(row)) for row in tie]),
    )  # fmt: skip
    if plain and was_opened(key):
        return replace(plan, opens=True)
    wholes = leaves.composites()
    parts = {id(part) for whole in wholes for part in whole.parts.values()}
    wanted = {*alike.values(), *table.single, *tie}
    rows = sorted(row for row in wanted if not parts or id(leaves.values[row]) not in parts)
    if 2 * (len(rows) + len(parts)) >= len(table):
        plan = check_opens(plan, path)
    else:
        sample: dict[str, object] = {f"{at}": table.view(row) for at, row in enumerate(rows)}
        if not leaves.flat:
            sample["containers"] = {
                f"{at}": container for at, container in enumerate(leaves.samples())
            }
            sample |= {"others": others} if (others := leaves.others()) else {}
            sample |= (
                {"composites": {f"{at}": whole for at, whole in enumerate(wholes)}}
                if wholes
                else {}
            )
        described = tabulate_state(sample, metadata=state.metadata)
        own = replace(options, base=None if options.base is None else OpenBase())
        check_opens(
            replace(_lay_out(path, described, format, options=own), holds=described.tensors), path
        )
        plan = replace(plan, opens=True)
    if plain:
        note_opened(key)
    return plan


OPENED: set[object] = set()
"""Formats and kinds of tensors that the reader has opened in this process, of plain dicts of plain tensors."""

MOST_OPENED = 1024


def was_opened(key: object) -> bool:
    return key in OPENED


def note_opened(key: object) -> None:
    if len(OPENED) >= MOST_OPENED:
        OPENED.clear()
    OPENED.add(key)


def _two_views(table: Table) -> tuple[int, ...]:
    parts = {
        number
        for number, kind in enumerate(table.kinds)
        if kind.dense and kind.nbytes and not kind.whole
    }
    seen: dict[int, int] = {}
    for row, one in enumerate(table.kind if parts else ()):
        if one in parts and table.storage[row] != ODD:
            first = seen.setdefault(table.storage[row], row)
            if table.offset_of(first) != table.offset_of(row):
                return first, row
    return ()


@lru_cache(1024)
def _likeness(kind: Kind) -> tuple[object, ...]:
    """All properties of a kind that a reader can see, without the lengths of its dimensions."""
    traits = kind.traits
    marks = (traits.requires_grad, traits.parameter, traits.buffer)
    usual = kind.strides == c_strides(kind.shape, kind.dtype.bits)
    return (
        kind.dtype.name,
        len(kind.shape),
        kind.nbytes == 0,
        usual,
        kind.whole,
        marks,
        kind.location,
    )


def _near_limits(plan: SavePlan, table: Table, *, flat: bool) -> bool:
    limits = DEFAULTS
    if plan.near_limits is not None:
        return plan.near_limits
    if flat:
        # No tree is written out. The layout has compared headers and manifests; an index it has not.
        files = len(plan.linked) + len(plan.files) + len(plan.index)
        return files > limits.files or any(file.nbytes > limits.index_nbytes for file in plan.index)
    return near_limits(text_nbytes((*plan.files, *plan.index)), len(table), len(plan.listed))


def near_limits(text_nbytes: int, tensors: int, files: int) -> bool:
    """Whether a directory with so many bytes of text about so many tensors is one that a reader may refuse."""
    limits = DEFAULTS
    return files > limits.files or 4 * (text_nbytes + CHARACTERS * tensors) > limits.tree_nbytes


CHARACTERS = 256
"""Characters of a tensor where a state is written out, at the most, without its name."""


def _lay_out(path: str, state: State, format: str, *, options: Options) -> SavePlan:
    found = format_of(format)
    if not found.written_by:
        raise Unsupported(explain_unwritten(format), found=format)
    given = {name: LAYOUT[name](path, options) for name in found.takes}
    rejoined = rejoin(state) if found.storages else None
    if not found.storages:
        _check_copies(state.tensors, found.title)
    plan = found.lay_out(state if rejoined is None else rejoined.state, **given)
    return (
        replace(plan, notes=(*rejoined.notes, *plan.notes))
        if rejoined is not None and rejoined.notes
        else plan
    )


def _check_copies(table: Table, title: str) -> None:
    """Raise `CannotHold` if a format without storages would write many more bytes than are stored."""
    ties = tied(table)
    try:
        check_expansion(table, [row for row in range(len(table)) if row not in ties])
    except LimitExceeded as error:
        problem = f"{error.message}, or write a format that keeps views (.pt)"
        raise CannotHold(f"{title} stores every tensor by itself", [problem]) from None


LAYOUT: Mapping[str, Callable[[str, Options], object]] = {
    "name": lambda path, options: archive_name(path),  # of the folder in an archive
    "save": lambda path, options: save_name(path, options.save),
    "directory": lambda path, options: True,
    "max_shard_size": lambda path, options: options.max_shard_size,
    "keep_tree": lambda path, options: options.keep_tree,
    "index": lambda path, options: options.index,
    "stem": lambda path, options: options.stem,
    "hashed": lambda path, options: options.base is not None,
    "take_over": lambda path, options: None if options.base is None else options.base.take_over,
}
"""Arguments that the layout of a format may take (`Format.takes`)."""


def save_name(path: str, known: str = "") -> str:
    """The part of the names of data files that is the id of a save in an object store; empty in a directory."""
    return "" if place_at(path).on_disk else known or secrets.token_hex(8)


def is_part(name: str) -> bool:
    """Whether a file in a directory belongs to a checkpoint of any format."""
    return name == SEAL or any(one.owns(name) for one in FORMATS)


def is_replaceable(name: str) -> bool:
    """Whether a file in a directory belongs to a checkpoint, so that a save with `overwrite=True` may replace it."""
    return name == SEAL or any(one.owns(name) for one in written_formats())


Outline = tuple[DType, tuple[int, ...]]

WHAT = "what would be written could not be opened again, so nothing is"

SHOWN = 8


def check_opens(plan: SavePlan, path: str) -> SavePlan:
    """The plan, known to open. Raises `CannotHold` with the reason where it would not, or would show something else."""
    if plan.opens:
        return plan
    with gc_paused():
        files = (*plan.files, *plan.index)
        # A folder of one file is opened as that file.
        known = format_of(plan.format).opened_as if len(files) == 1 else (plan.format,)
        found = described(PlannedStore(files, name=path, linked=plan.linked), known)
        if plan.holds is not None:
            lost = [str(one.what) for one in found.foreign if one.uses != ("mention",)]
            if lost:
                raise CannotHold(
                    WHAT, [f"{what}: it would not be built" for what in lost], file=path
                )
            check_holds(
                found.tensors,
                dict(zip(plan.holds, map(plan.holds.outline, plan.holds), strict=True)),
                path,
            )
        del found
    return replace(plan, opens=True)


def described(store: Store, formats: Collection[str]) -> Description:
    """The description of a store that stands for files to come. Raises `CannotHold` where it is none of these formats."""
    try:
        with located(file=store.name):
            source = OpenSource(store, limits=DEFAULTS)
            if len(store.list()) > source.limits.files:
                raise CannotHold(
                    WHAT,
                    [
                        f"{len(store.list()):,} files are more than Limits(files={source.limits.files:,})"
                    ],
                )
            found = detect(source)
            if found.name not in formats:
                raise CannotHold(
                    WHAT,
                    [f"it would be opened as {found.name}, and is {' or '.join(formats)}"],
                    file=store.name,
                )
            return found.describe(source)
    except CannotHold:
        raise
    except HoldfastError as error:
        raise CannotHold(WHAT, [error.message], file=store.name) from error


def check_holds(found: Table, holds: Mapping[str, Outline], path: str) -> None:
    """Raise `CannotHold` where tensors that were found are not those that were to be saved: by name, dtype and shape."""
    there = dict.fromkeys(found)
    problems = [f"{name}: it would not be there" for name in holds if name not in there]
    problems += [
        f"{name}: it was not saved, and it would be there" for name in there if name not in holds
    ]
    if not problems:
        for name, (dtype, shape) in holds.items():
            seen = found.outline(name)
            if seen[0] is not dtype or seen[1] != shape:
                problems.append(
                    f"{name}: it would be read as {seen[0]} {list(seen[1])}, and is {dtype} {list(shape)}"
                )
    if problems:
        more = [f"and {len(problems) - SHOWN:,} more"] if len(problems) > SHOWN else []
        raise CannotHold(WHAT, [*problems[:SHOWN], *more], file=path)
