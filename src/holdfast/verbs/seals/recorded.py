"""Digests that other programs record of whole files, and the comparison with them. On a disk only.

blobs/DIGEST      where a link of the Hugging Face cache leads: the name is the SHA-256 of a large file, or
                  the id that git gives to a small one. Ollama calls its files `blobs/sha256-DIGEST`
NAME.sha256       what `sha256sum` prints: lines of a digest and a name, or the digest of NAME alone
SHA256SUMS        the same, for the files of a folder
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence

from holdfast.core.group import ALONE, Ranks
from holdfast.core.limits import Limits
from holdfast.core.value import Value
from holdfast.engine.checksums import Progress
from holdfast.engine.file_digest import GIT_SHA1
from holdfast.errors import HoldfastError, LimitExceeded
from holdfast.stores.local import READ_FLAGS, OpenFile, check_regular_file, open_folder
from holdfast.verbs.seals.check import ExpectedDigest, Misfit, compare_digests, read_whole

LIST_SUFFIX = ".sha256"
LIST_NAMES = frozenset({"sha256sums", "sha256sums.txt", "sha256sum.txt"})
"""Names of lists for the files of a folder, in lower case."""

GNU_LINE = re.compile(r"([0-9a-f]{64})(?:[ \t]+\*?(.+))?", re.IGNORECASE)
BSD_LINE = re.compile(r"SHA256 ?\((.+)\) ?= ?([0-9a-f]{64})", re.IGNORECASE)
BLOB_NAME = re.compile(r"(?:sha256-)?([0-9a-f]{64})|([0-9a-f]{40})")


class RecordedOutcome(Value, frozen=True):
    """The outcome of comparing files with digests that other programs recorded. Files are named by their paths."""

    wrong: Mapping[str, Misfit]
    """Files with another digest, and lists that could not be read."""
    vouched: Mapping[str, int]
    """Files that have every digest that is recorded of them, and their lengths."""


def compare_recorded(
    path: str,
    keys: Sequence[str] | None,
    limits: Limits,
    *,
    threads: int | None = None,
    progress: Progress | None = None,
    ranks: Ranks = ALONE,
) -> RecordedOutcome:
    """Compare the files `keys` of a folder with what is recorded of them; without keys, one file."""
    finder = RecordFinder(path, keys, limits)
    expected = finder.find()
    misfits = compare_digests(
        finder.open_file, expected, threads=threads, progress=progress, ranks=ranks
    )
    wrong = {misfit.name: misfit for misfit in [*finder.unreadable, *misfits]}
    vouched = {file.name: file.nbytes for file in expected if file.name not in wrong}
    return RecordedOutcome(
        {finder.path_of(name): misfit for name, misfit in wrong.items()},
        {finder.path_of(name): nbytes for name, nbytes in vouched.items()},
    )


def is_recorded(path: str) -> bool:
    """Return whether digests are recorded of a file, or of a file directly in a folder."""
    keys = sorted(os.listdir(path)) if os.path.isdir(path) else None
    try:
        return bool(RecordFinder(path, keys, Limits()).find())
    except (HoldfastError, OSError):
        return False  # verifying it says what is wrong


class RecordFinder:
    """Finds what is recorded of the files of a folder, or of one file."""

    def __init__(self, path: str, keys: Sequence[str] | None, limits: Limits) -> None:
        self._limits = limits
        self.unreadable: list[Misfit] = []
        """Lists of digests that could not be read."""
        self._open_in_folder: Callable[[str], OpenFile] | None = None
        if keys is not None:
            self._folder, self._keys = path, keys
            self._lists = [key for key in keys if is_list(os.path.basename(key))]
            self._open_in_folder = open_folder(path).open
        else:
            self._folder, name = os.path.split(path)
            self._keys = [name]
            self._lists = self._lists_beside(name)

    def open_file(self, key: str) -> OpenFile:
        """Open a file of the folder, or the one file, whose links may lead out of its folder."""
        if self._open_in_folder is not None:
            return self._open_in_folder(key)
        return OpenFile(os.open(self.path_of(key), READ_FLAGS))

    def path_of(self, name: str) -> str:
        return os.path.join(self._folder, name)

    def find(self) -> list[ExpectedDigest]:
        """Find the recorded digests of the files that are here. A list may name files that are not."""
        expected: list[ExpectedDigest] = []
        for key in self._keys:
            path = self.path_of(key)
            digest = blob_digest(path)
            if digest is not None:
                message = "the content is not what the name of its blob says; download it again"
                expected.append(_expect(key, path, digest, message))

        known_keys = set(self._keys)
        for list_key in self._lists:
            message = f"the content is not what {list_key} records; get the file again"
            for name, digest in self._read_list(list_key):
                key = os.path.normpath(os.path.join(os.path.dirname(list_key), name))
                key = key.replace(os.sep, "/")
                if key in known_keys:
                    expected.append(_expect(key, self.path_of(key), digest, message))
        return expected

    def _lists_beside(self, name: str) -> list[str]:
        """Find the lists that may be about one file. The folder is not listed: it may be anything."""
        stem = os.path.splitext(name)[0]
        candidates = [name + LIST_SUFFIX, stem + LIST_SUFFIX, "SHA256SUMS", "SHA256SUMS.txt"]
        candidates += sorted(LIST_NAMES)
        existing: dict[tuple[int, int], str] = {}
        for candidate in candidates:
            if os.path.isfile(self.path_of(candidate)):
                # Two spellings are one file where the file system does not tell cases apart.
                status = os.stat(self.path_of(candidate))
                existing.setdefault((status.st_dev, status.st_ino), candidate)
        return list(existing.values())

    def _read_list(self, key: str) -> list[tuple[str, str]]:
        """Read the names and digests of a list. One that cannot be read is noted as unreadable."""
        path = self.path_of(key)
        try:
            opened = self.open_file(key)
            nbytes = check_regular_file(opened, path).st_size
            if nbytes > self._limits.index_nbytes:
                most = self._limits.index_nbytes
                raise LimitExceeded(
                    f"a list of digests of {nbytes:,} bytes is longer than Limits(index_nbytes={most})",
                    file=path,
                    expected=most,
                    found=nbytes,
                )
            text = read_whole(opened, nbytes).decode("utf-8", "surrogateescape")
        except OSError as error:
            reason = f"cannot be read: {error.strerror or error}"
            self.unreadable.append(Misfit(key, reason, damaged=False))
            return []
        except HoldfastError as error:
            self.unreadable.append(Misfit(key, error.message, damaged=False))
            return []

        entries = list(parse_list(text, own_name=os.path.basename(key)))
        if not entries:
            reason = "no SHA-256 digest is in it, in any of the forms that sha256sum prints"
            self.unreadable.append(Misfit(key, reason, damaged=False))
        return entries


def is_list(name: str) -> bool:
    return name.endswith(LIST_SUFFIX) or name.lower() in LIST_NAMES


def parse_list(text: str, *, own_name: str) -> Iterator[tuple[str, str]]:
    """Yield the name and the digest of each line; other lines, such as those of a signature, are left out.

    >>> [*parse_list("0" * 64 + " *a.bin", own_name="SHA256SUMS")] == [("a.bin", "sha256:" + "0" * 64)]
    True
    """
    for line in text.removeprefix("\ufeff").splitlines():
        if match := GNU_LINE.fullmatch(line.strip()):
            digest, name = match.groups()
        elif match := BSD_LINE.fullmatch(line.strip()):
            name, digest = match.groups()
        else:
            continue
        yield name or own_name.removesuffix(LIST_SUFFIX), f"sha256:{digest.lower()}"


def blob_digest(path: str) -> str | None:
    """Return the digest that the name of a blob says, if a path is a blob or leads to one."""
    folder, name = os.path.split(os.path.realpath(path))
    match = BLOB_NAME.fullmatch(name)
    if match is None or os.path.basename(folder) != "blobs":
        return None
    sha256, git_id = match.groups()
    return f"{GIT_SHA1}:{git_id}" if sha256 is None else f"sha256:{sha256}"


def _expect(key: str, path: str, digest: str, message: str) -> ExpectedDigest:
    try:
        nbytes = os.stat(path).st_size
    except OSError:
        nbytes = 0  # comparing it says what is wrong
    return ExpectedDigest(key, nbytes, (digest,), message)
