"""The format of a save, and the plan of a state in that format.

What the caller asks for decides the format, otherwise the suffix of the target. Some formats have a
variant for one file and one for a folder with several files. Both have the same choices of
`format=`, and the target decides which of them is written.
"""

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
    """Options for the layout of a checkpoint. Each format uses some of them (`Format.takes`)."""

    max_shard_size: int | None = None
    """Split into files of at most this many bytes of tensors."""
    keep_tree: bool = False
    """safetensors: record values that are not tensors in the header, where Holdfast finds them."""
    index: bool = False
    """safetensors: write an index even for a single file, because there are other safetensors files
    beside it."""
    stem: str = "model"
    """safetensors: the beginning of the names of the files in a directory."""
    ranks: Ranks = ALONE
    """The ranks that share the work of choosing what is pruned."""
    save: str = ""
    """In an object store: the id of the save, if it is already known."""
    base: OpenBase | None = None
    """native: record hashes, and take over from this checkpoint what did not change."""


def find_suffix(path: str) -> str:
    """Return the suffix that tells the format of a path, in lower case. A directory has none.

    >>> find_suffix("model.PT"), find_suffix("step-1000.5"), find_suffix("model.v2/")
    ('.pt', '', '')
    """
    is_directory = path.folder if is_parsed_url(path) else path.endswith("/")
    if is_directory:
        return ""
    suffix = os.path.splitext(path)[1].lower()
    # The end of a step number is not a suffix: step-1000.5 names a directory.
    return "" if suffix[1:].isdigit() else suffix


def map_suffixes_to_formats() -> dict[str, str]:
    """Return the format that each suffix stands for. The empty suffix stands for native."""
    formats: dict[str, str] = {}
    for entry in written_formats():
        for suffix in entry.suffixes:
            formats.setdefault(suffix, entry.name)
    return formats


def resolve_format(
    path: str, format: str | None, options: LayoutOptions, *, is_target: bool = True
) -> str:
    """Return the name of the format to save in.

    Args:
        path: The target.
        format: The format that the caller asks for. None to choose by the suffix of the path.
        options: The options of the layout. `max_shard_size` asks for a folder of several files.
        is_target: Whether a folder at this path, or a slash at its end, asks for a folder as well.
            False if the path is only a name.

    Raises:
        Unsupported: There is no such format or suffix, or the format can only be read.
    """
    if format is None:
        name = _find_format_of_suffix(path)
    else:
        entry = choose_written(format)
        if entry is None:
            raise Unsupported(explain_unwritten(format), found=format)
        name = entry.name

    folder_format = find_folder_format(name)
    if folder_format is None:
        return name
    is_folder = options.max_shard_size is not None
    if is_target and not is_folder:
        is_folder = path.endswith("/") or place_at(path).is_folder
    return folder_format if is_folder else name


def _find_format_of_suffix(path: str) -> str:
    """Return the format that the suffix of a path stands for. Raises `Unsupported` without one."""
    suffix = find_suffix(path)
    for entry in written_formats():
        if suffix in entry.suffixes:
            return entry.name

    # A format of another package may have a longer suffix, so the suffix is determined again.
    plugin_problems = load_plugins()
    suffix = find_suffix(path)
    known_formats = map_suffixes_to_formats()
    if suffix in known_formats:
        return known_formats[suffix]
    problem = "; ".join([_explain_suffix(path, suffix), *plugin_problems])
    known_suffixes = ", ".join(filter(None, known_formats))
    raise Unsupported(
        f"{problem}; use one of {known_suffixes}, none for a native directory, or say format=…",
        file=path,
    )


def note_single_file(path: str, format: str) -> tuple[str, ...]:
    """Return a note if one file without a suffix is written where a folder may have been meant."""
    if format_of(format).folder or find_folder_format(format) is None:
        return ()
    return (
        "the target is one file, since its name ends neither with a suffix nor with a slash; folder=True makes it a folder",
    )


def _explain_suffix(path: str, suffix: str) -> str:
    """Say why no format is written under a suffix: its format can only be read, or it has none."""
    for entry in (*FORMATS, *PLUGINS):
        if any(end and path.lower().endswith(end) for end in entry.suffixes):
            hint = " in this way; `holdfast package` writes it" if entry.programs else ""
            return f"{entry.title} can be read and not written{hint}"
    return f"no format has the suffix {suffix!r}"


def explain_unwritten(format: str) -> str:
    """Say why a format cannot be written, and which formats can."""
    *first_titles, last_title = titles(written_formats())
    hint = f"use {', '.join(first_titles)} or {last_title}"
    if chosen(format, (*FORMATS, *PLUGINS)) is not None:
        return f"{format} can be read and not written; {hint}"
    problems = [f"; {problem}" for problem in load_plugins()]
    return f"there is no format {format!r}{''.join(problems)}; {hint}"


def find_folder_format(format: str) -> str | None:
    """Return the variant of a format that is a folder with several files. None if it has none.

    This is the format itself if it is a folder.
    """
    choices = format_of(format).choices
    for entry in written_formats():
        if entry.folder and entry.choices == choices:
            return entry.name
    return None


def find_archive_format(path: str, format: str | None) -> Format | None:
    """Return the format of a target if it is an archive of programs (`.pt2`), otherwise None."""
    archives = [entry for entry in FORMATS if entry.programs]
    if format is not None:
        return chosen(format, archives)
    suffix = find_suffix(path)
    return next((entry for entry in archives if suffix in entry.suffixes), None)


def check_archive_name(path: str) -> None:
    """Raise `Unsupported` if the suffix of a path for an archive (`.pt2`) means another format."""
    suffix = find_suffix(path)
    known_formats = map_suffixes_to_formats()
    if suffix and suffix in known_formats:
        stem = os.path.splitext(os.path.basename(path))[0]
        message = f"a .pt2 archive is written here, and the suffix {suffix!r} says {known_formats[suffix]}"
        raise Unsupported(f"{message}; call it {stem}.pt2", file=path, found=suffix)


def plan_save(path: str, state: State, format: str, *, options: LayoutOptions) -> SavePlan:
    """Lay out a state in a format.

    Args:
        path: The target. Nothing is written there.
        state: The tensors and values to save.
        format: The name of the format.
        options: The options of the layout.

    Raises:
        Unsupported: The format cannot be written.
        CannotHold: The format cannot store the state. The error lists every problem.
    """
    entry = format_of(format)
    if not entry.written_by:
        raise Unsupported(explain_unwritten(format), found=format)
    written_state = state
    notes: tuple[str, ...] = ()
    if entry.storages:
        rejoined = rejoin(state)
        written_state = rejoined.state
        notes = rejoined.notes
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
        expected_table = plan.expected_table or state.tensors
        plan = replace(plan, expected_table=expected_table, notes=(*notes, *plan.notes))
    return plan


LAYOUT_ARGUMENTS: Mapping[str, Callable[[str, LayoutOptions], object]] = {
    "name": lambda path, options: archive_name(path),  # the name of the top folder in a zip
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


def choose_save_id(path: str, known_id: str = "") -> str:
    """Return the id that the data files of a save have in their names.

    In an object store, data files of several saves lie side by side until the index is replaced. A
    local directory is replaced as a whole, so its files have no id, and the result is empty.
    """
    if place_at(path).on_disk:
        return ""
    return known_id or secrets.token_hex(8)


def is_checkpoint_file(name: str) -> bool:
    """Return whether a file in a directory belongs to a checkpoint of any format, by its name."""
    return name == SEAL or any(entry.owns(name) for entry in FORMATS)


def is_replaceable(name: str) -> bool:
    """Return whether a save with `overwrite=True` may remove this file of a directory."""
    return name == SEAL or any(entry.owns(name) for entry in written_formats())
