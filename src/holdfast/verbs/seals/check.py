"""Sealed folders and files: find the seal, see whether everything is there, compare every digest.

Looking (`read_seal`, `check_sizes`) reads the seal and asks for sizes. Only `check_digests` reads the files.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import cast

from holdfast.core.documents import check_length
from holdfast.core.group import ALONE, Ranks, divide_work
from holdfast.core.limits import Limits
from holdfast.core.value import Value
from holdfast.engine.checksums import Progress
from holdfast.engine.file_digest import digest_file
from holdfast.engine.threads import DEFAULT_THREADS, run_all
from holdfast.errors import (
    BadPath,
    HoldfastError,
    LimitExceeded,
    NotCommitted,
    StoreError,
    UnsafePath,
)
from holdfast.stores import platform
from holdfast.stores.files import is_temporary
from holdfast.stores.local import OpenFile, check_regular_file, open_folder
from holdfast.stores.paths import AnyPath, local_path
from holdfast.stores.place import place_at
from holdfast.verbs.seals.document import (
    DOCUMENT,
    SEAL,
    SUFFIX,
    Seal,
    misfits,
    parse_seal,
    seal_name,
)

LOCKS = (".lock",)
"""The suffixes of lock files, which are no part of what is sealed."""

PASSING = frozenset({".DS_Store", "Thumbs.db", "desktop.ini"})
"""Files that file browsers leave."""


def is_part(name: str) -> bool:
    """Whether a file of this name (the last part of it) belongs to what is sealed: no temporary, no lock, no trace of a browser.

    >>> is_part("optimizer.pt"), is_part(".metadata"), is_part(".model.0123456789abcdef.tmp"), is_part("a.lock")
    (True, True, False, False)
    """
    return not (
        is_temporary(name) or name.endswith(LOCKS) or name in PASSING or name.startswith(".nfs")
    )


def seal_path(path: AnyPath) -> str:
    place = local_path(path)
    return os.path.join(place, SEAL) if os.path.isdir(place) else seal_name(place)


def read_seal(path: AnyPath, limits: Limits | None = None) -> Seal | None:
    """The seal of a folder or of a file; None where there is none, as for a URL. Whether the files are as it says is not checked.

    Raises what `parse_seal` raises, and `StoreError` where it cannot be read.
    """
    limits = limits or Limits()
    try:
        place = seal_path(path)
    except BadPath:
        return None
    try:
        raw = _small(place, limits)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        if isinstance(error, HoldfastError):
            raise
        refused = StoreError(f"the seal cannot be read: {error.strerror or error}", file=place)
        refused.errno = error.errno
        raise refused from None
    return parse_seal(raw, limits, file=place)


def is_sealed(path: AnyPath) -> bool:
    try:
        return os.path.lexists(seal_path(path))
    except BadPath:
        return False


def refuse_sealed(path: str, keys: Iterable[str], limits: Limits | None = None) -> None:
    """Raise `NotCommitted` if a seal lists files of a checkpoint that is about to be rewritten.

    Args:
        path: The path or URL of the checkpoint.
        keys: The names of its files.
        limits: The limits of the seals that are read.
    """
    seal: str | None = None
    url = place_at(path).url
    if url is not None:
        if SEAL in keys:
            seal = url.below(SEAL)
        advice = "Write elsewhere, or remove the seal and repeat this"
    else:
        sealed_path = _find_sealed(os.path.realpath(path), keys, limits)
        seal = None if sealed_path is None else seal_path(sealed_path)
        advice = (
            "Write elsewhere; or remove the seal, repeat this, and seal it again with "
            f"`holdfast seal {sealed_path}`"
        )
    if seal is not None:
        raise NotCommitted(
            f"the seal {seal!r} would not fit what is rewritten here. {advice}", file=path
        )


def _find_sealed(path: str, keys: Iterable[str], limits: Limits | None) -> str | None:
    """Return the file or folder whose seal lists files of a checkpoint; None if there is none."""
    if is_sealed(path):
        return path
    for key in keys if os.path.isdir(path) else ():
        if key.endswith(SUFFIX):
            return os.path.join(path, key.removesuffix(SUFFIX))

    folder = os.path.dirname(path)
    while folder != os.path.dirname(folder):
        name = os.path.relpath(path, folder).replace(os.sep, "/")
        # A seal that cannot be read seals nothing.
        with suppress(HoldfastError):
            seal = read_seal(folder, limits)
            names = [] if seal is None else [file.name for file in seal.files]
            if any(file_name == name or file_name.startswith(f"{name}/") for file_name in names):
                return folder
        folder = os.path.dirname(folder)
    return None


def check_sizes(path: AnyPath, seal: Seal) -> Iterator[tuple[str, str]]:
    """Each file that is missing or of another length, with what is wrong."""
    root = _root(path)

    def size(name: str) -> int | None:
        try:
            found = os.lstat(os.path.join(root, name))
        except OSError:
            return None
        return found.st_size if stat.S_ISREG(found.st_mode) else None

    return misfits(seal, size)


class Misfit(Value, frozen=True):
    name: str
    message: str
    damaged: bool
    """Whether the content is wrong; False where it could not be read."""


def check_digests(
    path: AnyPath,
    seal: Seal,
    *,
    threads: int | None = None,
    progress: Progress | None = None,
    ranks: Ranks = ALONE,
) -> list[Misfit]:
    """Read every file that has a digest, and compare: all files that are not what was sealed, in the order of their names. Of
    several ranks each reads some."""
    wrong = {}
    for name, message in check_sizes(path, seal):
        more = (
            ": it was there when the folder was sealed"
            if message == "missing"
            else "; it was sealed otherwise"
        )
        wrong[name] = Misfit(name, message + more, damaged=True)
    sealed_digests = [
        ExpectedDigest(
            file.name,
            file.nbytes,
            (file.digest,),
            "changed after it was sealed",
        )
        for file in seal.files
        if file.digest is not None and file.name not in wrong
    ]
    misfits = compare_digests(
        open_folder(_root(path)).open,
        sealed_digests,
        threads=threads,
        progress=progress,
        ranks=ranks,
    )
    wrong |= {misfit.name: misfit for misfit in misfits}
    return [wrong[name] for name in sorted(wrong)]


class ExpectedDigest(Value, frozen=True):
    """The digest that a file should have."""

    name: str
    nbytes: int
    """About how long the file is: ranks share the files out by it."""
    accepted: tuple[str, ...]
    """Digests of one algorithm with its name; the file may have any of them."""
    mismatch: str
    """The beginning of the message if the file has another digest."""


def compare_digests(
    open_file: Callable[[str], OpenFile],
    expected: Sequence[ExpectedDigest],
    *,
    threads: int | None = None,
    progress: Progress | None = None,
    ranks: Ranks = ALONE,
) -> list[Misfit]:
    """Read files, and return those that do not have their digests. Of several ranks each reads some of the files."""
    # The longest first, so that no thread begins it when the others have ended.
    todo = sorted(expected, key=lambda file: -file.nbytes)

    def compare(number: int, misfits: dict[int, Misfit]) -> None:
        file = todo[number]
        try:
            misfit = _compare_file(open_file, file, progress)
        except OSError as error:
            reason = f"cannot be read: {error.strerror or error}"
            misfit = Misfit(file.name, reason, damaged=False)
        except UnsafePath as error:
            misfit = Misfit(file.name, error.message, damaged=True)
        if misfit is not None:
            misfits[number] = misfit

    def compare_some(numbers: list[int]) -> list[Misfit | None]:
        misfits: dict[int, Misfit] = {}
        run_all(
            [partial(compare, number, misfits) for number in numbers], threads or DEFAULT_THREADS
        )
        return [misfits.get(number) for number in numbers]

    outcomes = divide_work(
        ranks,
        [file.nbytes for file in todo],
        compare_some,
        cast("type[Misfit | None]", Misfit | None),
        common=repr([(file.name, file.accepted) for file in todo]).encode("utf-8", "surrogatepass"),
    )
    return [misfit for misfit in outcomes if misfit is not None]


def _compare_file(
    open_file: Callable[[str], OpenFile], file: ExpectedDigest, progress: Progress | None
) -> Misfit | None:
    opened = open_file(file.name)
    status = check_regular_file(opened, file.name)
    algorithm = file.accepted[0].partition(":")[0]
    read = partial(platform.read_block, opened.descriptor)
    digest, nbytes = digest_file(algorithm, read, progress, nbytes=status.st_size)
    if digest in file.accepted:
        return None
    found = f"{nbytes:,} bytes with the digest {digest}, not {file.accepted[0]}"
    return Misfit(file.name, f"{file.mismatch}: {found}", damaged=True)


class Compared(Value, frozen=True):
    """The outcome of comparing a folder or file with its seal. Files are named by their paths."""

    seal: Seal
    wrong: Mapping[str, Misfit]
    vouched: Mapping[str, int]
    """Files with the digest of the seal, and their lengths."""
    extra: Sequence[str]
    """Names of files that were not sealed."""


def compared(
    path: AnyPath, limits: Limits | None = None, *, threads: int | None = None, progress: Progress | None = None,
    ranks: Ranks = ALONE,
) -> Compared | None:  # fmt: skip
    """Compare everything with the seal; None where there is none. Raises as `read_seal` does."""
    seal = read_seal(path, limits)
    if seal is None:
        return None
    place = local_path(path)
    folder = place if os.path.isdir(place) else os.path.dirname(place)
    misfits = check_digests(place, seal, threads=threads, progress=progress, ranks=ranks)
    wrong = {os.path.join(folder, one.name): one for one in misfits}
    sealed = {os.path.join(folder, file.name): file for file in seal.files}
    vouched = {
        file: one.nbytes
        for file, one in sealed.items()
        if one.digest is not None and file not in wrong
    }
    extra = extra_files(place, seal, limits) if os.path.isdir(place) else []
    return Compared(seal, wrong, vouched, [name for name in extra if not name.endswith(SUFFIX)])


def extra_files(path: AnyPath, seal: Seal, limits: Limits | None = None) -> list[str]:
    most, root, known = (limits or Limits()).files, _root(path), {file.name for file in seal.files}
    found: list[str] = []
    for at, folders, names in os.walk(root):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        inside = os.path.relpath(at, root)
        for name in sorted(filter(is_part, names)):
            key = name if inside == "." else "/".join((*inside.split(os.sep), name))
            if key not in known and key != SEAL:
                found.append(key)
                if len(found) > most:
                    raise LimitExceeded(
                        f"more files than Limits(files={most})", file=root, expected=most
                    )
    return found


def _root(path: AnyPath) -> str:
    place = local_path(path)
    return place if os.path.isdir(place) else os.path.dirname(place) or os.curdir


def _small(path: str, limits: Limits) -> bytes:
    """The content of a plain file, which is no link, and no longer than the limits allow."""
    flags = os.O_RDONLY | platform.OPEN_FLAGS | platform.NO_FOLLOW | platform.NON_BLOCKING
    file = OpenFile(os.open(path, flags))
    nbytes = check_regular_file(file, path).st_size
    check_length(DOCUMENT, nbytes, limits, file=path)
    return read_whole(file, nbytes)


def read_whole(file: OpenFile, nbytes: int) -> bytes:
    """Read a file of so many bytes, and one byte more if it has grown."""
    raw = b""
    while block := platform.read_block(file.descriptor, nbytes + 1 - len(raw), len(raw)):
        raw += block
    return raw
