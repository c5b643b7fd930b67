"""Where and how to save: the format of a path, and the plan of a state in that format."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Mapping

from holdfast.core.group import ALONE, Ranks
from holdfast.core.limits import DEFAULTS
from holdfast.core.protocols import State
from holdfast.core.sharing import check_expansion
from holdfast.core.value import Value, replace
from holdfast.engine.saves import SavePlan
from holdfast.errors import CannotHold, LimitExceeded, Unsupported
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
from holdfast.formats.torch.write import archive_name
from holdfast.stores.paths import is_parsed_url
from holdfast.stores.place import place_at
from holdfast.verbs.seals.document import SEAL
from holdfast.verbs.shared.base import OpenBase
from holdfast.verbs.shared.rejoin import rejoin


class LayoutOptions(Value, frozen=True):
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


def find_suffix(path: str) -> str:
    """The suffix that says the format of a path: in small letters; empty for the name of a directory.

    >>> find_suffix("model.PT"), find_suffix("step-1000.5"), find_suffix("model.v2/")
    ('.pt', '', '')
    """
    says_folder = path.folder if is_parsed_url(path) else path.endswith("/")
    suffix = "" if says_folder else os.path.splitext(path)[1].lower()
    # A step number is no suffix: step-1000.5 is a directory's name like any other.
    return "" if suffix[1:].isdigit() else suffix


def map_suffixes_to_formats() -> dict[str, str]:
    """The format that each suffix means. An empty one is that of a name without any."""
    found: dict[str, str] = {}
    for one in written_formats():
        found |= {suffix: one.name for suffix in one.suffixes if suffix not in found}
    return found


def resolve_format(path: str, format: str | None, options: LayoutOptions) -> str:
    """The format to save in: what was asked for, or what the suffix says; a directory where one is there."""
    found = resolve_named_format(path, format, options)
    folder = find_folder_format(found)
    return folder if folder and (path.endswith("/") or place_at(path).is_folder) else found


def resolve_named_format(path: str, format: str | None, options: LayoutOptions) -> str:
    """The format to save in as it was asked for, or as the suffix of a name says it."""
    if format is None:
        suffix, known = find_suffix(path), map_suffixes_to_formats()
        if suffix not in known:
            # The suffixes of plugins may be longer, so it is split off again.
            plugin_problems = load_plugins()
            suffix, known = find_suffix(path), map_suffixes_to_formats()
        if suffix not in known:
            hint = f"use one of {', '.join(filter(None, known))}, none for a native directory, or say format=…"
            problem = "; ".join([_explain_suffix(path, suffix), *plugin_problems])
            raise Unsupported(f"{problem}; {hint}", file=path)
        found = known[suffix]
    elif (asked := choose_written(format)) is not None:
        found = asked.name
    else:
        raise Unsupported(explain_unwritten(format), found=format)
    return find_folder_format(found) or found if options.max_shard_size is not None else found


def note_single_file(path: str, format: str) -> tuple[str, ...]:
    """Return a note if one file without a suffix is written where a folder may have been meant."""
    if format_of(format).folder or find_folder_format(format) is None:
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


def find_folder_format(format: str) -> str | None:
    """The format of a folder with several files of a format; None where there is none."""
    asked = format_of(format).choices
    return next(
        (one.name for one in written_formats() if one.folder and one.choices == asked), None
    )


def find_archive_format(path: str, format: str | None) -> Format | None:
    """Return the archive of programs that a format or the suffix of the path means, if it is one."""
    archives = [entry for entry in FORMATS if entry.programs]
    if format is not None:
        return chosen(format, archives)
    return next((entry for entry in archives if find_suffix(path) in entry.suffixes), None)


def check_archive_name(path: str) -> None:
    """Raise `Unsupported` where an archive of programs (`.pt2`) is to be written under a name that says another format."""
    suffix, known = find_suffix(path), map_suffixes_to_formats()
    if suffix and suffix in known:
        message = f"a .pt2 archive is written here, and the suffix {suffix!r} says {known[suffix]}"
        raise Unsupported(
            f"{message}; call it {os.path.splitext(os.path.basename(path))[0]}.pt2",
            file=path,
            found=suffix,
        )


def plan_save(path: str, state: State, format: str, *, options: LayoutOptions) -> SavePlan:
    """Lay out a state. Raises `CannotHold` with every problem when the format cannot hold it."""
    entry = format_of(format)
    if not entry.written_by:
        raise Unsupported(explain_unwritten(format), found=format)
    written_state = state
    notes: tuple[str, ...] = ()
    if entry.storages:
        rejoined = rejoin(state)
        written_state, notes = rejoined.state, rejoined.notes
    else:
        try:
            check_expansion(state.tensors, without_ties=True)
        except LimitExceeded as error:
            problem = f"{error.message}, or write a format that keeps views (.pt)"
            raise CannotHold(f"{entry.title} stores every tensor by itself", [problem]) from None

    arguments = {name: LAYOUT_ARGUMENTS[name](path, options) for name in entry.takes}
    plan = entry.lay_out(written_state, **arguments)
    file_count = len(plan.linked) + len(plan.files) + len(plan.index)
    if file_count > DEFAULTS.files:
        problem = f"{file_count:,} files are more than Limits(files={DEFAULTS.files:,})"
        raise CannotHold("a checkpoint of so many files would not open", [problem], file=path)
    if notes or plan.expected_table is None:
        plan = replace(
            plan, expected_table=plan.expected_table or state.tensors, notes=(*notes, *plan.notes)
        )
    return plan


LAYOUT_ARGUMENTS: Mapping[str, Callable[[str, LayoutOptions], object]] = {
    "name": lambda path, options: archive_name(path),  # of the folder in an archive
    "save": lambda path, options: choose_save_id(path, options.save),
    "directory": lambda path, options: True,
    "max_shard_size": lambda path, options: options.max_shard_size,
    "keep_tree": lambda path, options: options.keep_tree,
    "index": lambda path, options: options.index,
    "stem": lambda path, options: options.stem,
    "hashed": lambda path, options: options.base is not None,
    "take_over": lambda path, options: None if options.base is None else options.base.take_over,
}
"""Arguments that the layout of a format may take (`Format.takes`)."""


def choose_save_id(path: str, known: str = "") -> str:
    """The part of the names of data files that is the id of a save in an object store; empty in a directory."""
    return "" if place_at(path).on_disk else known or secrets.token_hex(8)


def is_checkpoint_file(name: str) -> bool:
    """Whether a file in a directory belongs to a checkpoint of any format."""
    return name == SEAL or any(one.owns(name) for one in FORMATS)


def is_replaceable(name: str) -> bool:
    """Whether a file in a directory belongs to a checkpoint, so that a save with `overwrite=True` may replace it."""
    return name == SEAL or any(one.owns(name) for one in written_formats())
