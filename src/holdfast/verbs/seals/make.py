"""Making a seal: everything that is to be sealed is listed, digested and synced, and the seal is written last.

1. Files are listed. What has no content of its own is refused: links, devices.
2. Each is read once, digested and, unless `durable=False`, synced; several beside each other.
3. The folders that they are in are synced, so that no name is lost that the seal speaks of.
4. They are listed again. Where one came, went or changed meanwhile, somebody still writes there, and nothing is sealed.
5. `holdfast.seal.json` is written beside its place, synced, and renamed: after a crash it is there and right, or not there.

Temporaries, locks and hidden folders are no part of it. A single file has its seal beside it: `last.ckpt.seal.json`.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial

from holdfast.core.limits import Limits
from holdfast.engine.checksums import Progress
from holdfast.engine.commit.target import check_replaceable, not_committed_on_error, open_target
from holdfast.engine.commit.transactions import replace_file
from holdfast.engine.file_digest import digest_file
from holdfast.engine.threads import DEFAULT_THREADS, run_all
from holdfast.errors import LimitExceeded, NotCommitted
from holdfast.stores.files import FileEntry, Files, system_files
from holdfast.stores.paths import AnyPath, local_path
from holdfast.verbs.seals.check import is_part
from holdfast.verbs.seals.document import SEAL, Seal, SealedFile, encode_seal, seal_name

SHOWN = 5

Listing = dict[str, FileEntry]  # by relative name


def unseal(src: AnyPath, *, durable: bool = True) -> bool:
    """Take the seal from a folder or a file that is about to be written to again; whether there was one.

    It is gone for certain before this comes back: a power cut later does not bring it back to files that it does not fit.
    """
    path, files = local_path(src), system_files()
    with not_committed_on_error("removing the seal of what is to be written again", path):
        try:
            folder = is_folder(files, path)
            root, name = (
                (path, SEAL)
                if folder
                else (
                    os.path.split(path.rstrip("/"))[0],
                    seal_name(os.path.split(path.rstrip("/"))[1]),
                )
            )
            at = files.open_directory(files.resolve(root or os.curdir))
        except FileNotFoundError:
            return False
        try:
            files.unlink(name, dir_fd=at)
            if durable:
                files.sync(at)
        except FileNotFoundError:
            return False
        finally:
            files.close(at)
    return True


def write_seal(
    path: str, about: Seal, *, listing: Listing | None = None, digest: str = "xxh3-128", overwrite: bool = False,
    durable: bool = True, limits: Limits | None = None, threads: int | None = None, progress: Progress | None = None,
    files: Files | None = None,
) -> Seal:  # fmt: skip
    """Digest and sync all files, and write a seal with the step, time and metrics of `about` (the steps from 2 on).

    `listing` has the files that were found before. Every call to the file system goes through `files`.
    """
    files, limits = files or system_files(), limits or Limits()
    with not_committed_on_error("sealing", path):
        folder = is_folder(files, path)
        root, name = (path.rstrip("/") or "/", None) if folder else os.path.split(path.rstrip("/"))
        listing = list_files(files, path, limits) if listing is None else listing
        at = files.open_directory(files.resolve(root or os.curdir))
        try:
            made: dict[str, SealedFile] = {}
            take = partial(
                _take, files, at, made, digest=digest, durable=durable, progress=progress
            )
            order = sorted(listing, key=lambda name: -listing[name].nbytes)
            run_all([partial(take, one) for one in order], threads or DEFAULT_THREADS)
            if durable:
                _sync_folders(files, at, listing)
                if folder:
                    _sync_parent(files, path)
            changed = _changed(listing, list_files(files, path, limits), made)
        finally:
            files.close(at)
        if changed:
            names = ", ".join(map(repr, changed[:SHOWN])) + (
                f" and {len(changed) - SHOWN:,} more" if len(changed) > SHOWN else ""
            )
            message = f"{names} changed while it was sealed: somebody still writes there; seal it when that is done"
            raise NotCommitted(f"{message}. No seal was written", file=path, errno=errno.EBUSY)
        sealed = Seal(
            about.step,
            about.saved,
            about.metrics,
            tuple(made[one] for one in sorted(made)),
            about.ran,
        )
        text = encode_seal(sealed)
    place = os.path.join(path, SEAL) if name is None else seal_name(path.rstrip("/"))
    replace_file(place, text, durable=durable, overwrite=overwrite, files=files)
    return sealed


def list_files(files: Files, path: str, limits: Limits) -> Listing:
    """All files that are to be sealed at a path, sorted. Raises `NotCommitted` for what cannot be, and where there is nothing."""
    found: Listing = {}
    if not is_folder(files, path):
        root, name = os.path.split(path.rstrip("/"))
        at = files.open_directory(files.resolve(root or os.curdir))
        try:
            found[_plain_name(name, path)] = _plain(files.stat(name, dir_fd=at), path)
        finally:
            files.close(at)
        return found
    at = files.open_directory(files.resolve(path))
    try:
        _collect(files, at, found, prefix="", path=path, limits=limits)
    finally:
        files.close(at)
    if not found:
        raise NotCommitted("there is no file in this folder to seal", file=path, errno=errno.ENOENT)
    return dict(sorted(found.items()))


def _collect(
    files: Files, at: int, found: Listing, *, prefix: str, path: str, limits: Limits
) -> None:
    if prefix.count("/") > limits.depth:
        raise LimitExceeded(
            f"folders nest deeper than Limits(depth={limits.depth})",
            file=path,
            expected=limits.depth,
        )
    for name in files.list(at):
        label = os.path.join(path, prefix + name)
        entry = files.stat(name, dir_fd=at)
        if entry is None:
            raise NotCommitted(
                f"{prefix + name!r} went away: somebody still writes there; seal it when that is done",
                file=path,
                errno=errno.EBUSY,
            )
        if entry.kind == "directory":
            if name.startswith("."):
                continue
            inner = files.open_directory(name, dir_fd=at)
            try:
                _collect(
                    files,
                    inner,
                    found,
                    prefix=f"{_plain_name(prefix + name, label)}/",
                    path=path,
                    limits=limits,
                )
            finally:
                files.close(inner)
        elif is_part(name) and prefix + name != SEAL:
            found[_plain_name(prefix + name, label)] = _plain(entry, label)
            if len(found) > limits.files:
                raise LimitExceeded(
                    f"more files than Limits(files={limits.files})",
                    file=path,
                    expected=limits.files,
                )


def _plain_name(name: str, label: str) -> str:
    try:
        name.encode("utf-8")
    except UnicodeEncodeError:
        raise NotCommitted(
            "the name is no UTF-8 text, and could not stand in a seal; rename it",
            file=label,
            errno=errno.EILSEQ,
        ) from None
    if "\\" in name:
        raise NotCommitted(
            "the name has a backslash, which other systems take for a folder; rename it",
            file=label,
            errno=errno.EINVAL,
        )
    return name


def _plain(entry: FileEntry | None, label: str) -> FileEntry:
    """The entry of a plain file. Raises `NotCommitted` for anything else."""
    if entry is None:
        raise NotCommitted("there is nothing here to seal", file=label, errno=errno.ENOENT)
    if entry.kind == "file":
        return entry
    link = "a link, and what it leads to may change elsewhere; put the file itself here"
    what = link if entry.kind == "link" else "no plain file"
    raise NotCommitted(f"this is {what}; it cannot be sealed", file=label, errno=errno.EINVAL)


def _take(
    files: Files,
    root: int,
    made: dict[str, SealedFile],
    name: str,
    *,
    digest: str,
    durable: bool,
    progress: Progress | None,
) -> None:
    with _folder_of(files, root, name) as (at, last):
        descriptor = files.open(last, dir_fd=at)
        try:
            found, nbytes = digest_file(digest, partial(files.pread, descriptor), progress)
            if durable:
                files.sync(descriptor)
        finally:
            files.close(descriptor)
    made[name] = SealedFile(name, nbytes, found)


@contextmanager
def _folder_of(files: Files, root: int, name: str) -> Iterator[tuple[int, str]]:
    """The open folder that a file is in, and its name in there. No link is followed."""
    *folders, last = name.split("/")
    opened: list[int] = []
    try:
        for folder in folders:
            opened.append(files.open_directory(folder, dir_fd=opened[-1] if opened else root))
        yield (opened[-1] if opened else root), last
    finally:
        for descriptor in reversed(opened):
            files.close(descriptor)


def _sync_folders(files: Files, root: int, listing: Listing) -> None:
    """Make the names durable: of the files, and of the folders they are in, from the inside out."""
    inner = {name.rpartition("/")[0] for name in listing if "/" in name}
    every = {
        "/".join(folder.split("/")[:depth])
        for folder in inner
        for depth in range(1, folder.count("/") + 2)
    }
    for folder in sorted(every, key=lambda name: -name.count("/")):
        with _folder_of(files, root, f"{folder}/.") as (at, _):
            files.sync(at)
    files.sync(root)


def _sync_parent(files: Files, path: str) -> None:
    parent, _ = os.path.split(files.resolve(path).rstrip("/") or "/")
    at = files.open_directory(parent or os.curdir)
    try:
        files.sync(at)
    finally:
        files.close(at)


def _changed(before: Listing, after: Listing, made: Mapping[str, SealedFile]) -> list[str]:
    """Names that came, went, or are of another file, length or time than before; and those of which another length was read."""
    then, now = (
        {name: (e.identity, e.nbytes, e.changed_s) for name, e in listing.items()}
        for listing in (before, after)
    )
    same = {
        name
        for name, stamp in then.items()
        if now.get(name) == stamp and made[name].nbytes == before[name].nbytes
    }
    return sorted({*before, *after} - same)


def is_folder(files: Files, path: str) -> bool:
    try:
        files.close(files.open_directory(files.resolve(path.rstrip("/") or "/")))
    except NotADirectoryError:
        return False
    return True


def check_place(files: Files, place: str, *, overwrite: bool) -> None:
    """Refuse a place that the seal cannot have, before anything is read."""
    target = open_target(files, place)
    try:
        if target.existing is not None and target.existing.kind == "file" and not overwrite:
            raise NotCommitted(
                "there is a seal already; pass overwrite=True to seal it again",
                file=place,
                errno=errno.EEXIST,
            )
        check_replaceable(target.existing, place, is_folder=False, overwrite=overwrite)
    finally:
        target.close()
