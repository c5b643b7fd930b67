"""Which of several steps in a folder is meant: the one that a small file beside them names.

run/latest                               global_step200          DeepSpeed
run/latest_checkpointed_iteration.txt    200 or release          Megatron
run/global_step100/…  run/global_step200/…
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from holdfast.core.protocols import Source
from holdfast.errors import FormatError
from holdfast.formats.rank_files.recognise import some

POINTER_NBYTES = 4096
"""More than any name of a folder."""


def chosen_step(source: Source, folders: Sequence[str], pointer: str, *, named: Callable[[str], str] = str) -> str:
    """The folder that is meant, of those that hold a step: the top itself (`""`), the one that `pointer` names, or the only one.

    `named` makes the name of a folder out of what the pointer says.
    """
    if "" in folders:
        return ""
    size = source.store.size(pointer) if pointer in source.store.list() else None
    if size is not None:
        if size > POINTER_NBYTES:
            raise FormatError(f"it should name a folder, and is {size:,} bytes long", file=pointer)
        said = source.bytes(pointer, 0, size).decode("utf-8", "replace").strip()
        if named(said) not in folders:
            raise FormatError(
                f"it names {named(said)[:80]!r}, where no step is; there is {some(sorted(folders))}, which can be opened by itself",
                file=pointer, expected=tuple(sorted(folders)[:5]), found=said[:80],
            )  # fmt: skip
        return named(said)
    if len(folders) > 1:
        raise FormatError(f"there are {len(folders):,} steps in this folder, and no file {pointer!r} that names one: open one of "
                          f"{some(sorted(folders))}", found=tuple(sorted(folders)[:5]))  # fmt: skip
    return folders[0]
