"""`place_of`: from what a user gives as the place of a checkpoint to a path on this machine, to a URL, or to a sentence why not.

Every verb asks here first, from Python and on the command line; so do the transactions and the stores below them:

    s3://bucket/x   gs://…   az://…                 in an object store (`place_of`): a `Url`, for the verbs that take one
    hf://…   file:///x                              no path: something that is not on this machine, or not said as a path
    s3:/bucket/x                                    the same after `pathlib.Path`, which takes one of the two slashes away
    C:\\x   C:/x   \\\\server\\x                       no path either, on a machine that has no drives; else C:/x, //server/x
    ~/x   ~user/x                                   in that user's home, as a shell has it
    ''                                              nothing; the current directory is '.'

Without these rules each of them would be a strange new folder below the current directory. A file that really has such a name is
given by its absolute path (`found_path`). `holdfast.torch.save` and `load` are torch's functions, and do not ask.
"""

from __future__ import annotations

import errno
import io
import os
import re
from pathlib import PurePath
from typing import TYPE_CHECKING, TypeGuard

from holdfast.core.quantities import shown
from holdfast.errors import BadArgumentType, BadPath, NotAPath
from holdfast.stores.platform import HAS_DRIVES

if TYPE_CHECKING:
    from holdfast.stores.remote.url import Url

AnyPath = str | os.PathLike[str]

SCHEMES = frozenset({"s3", "s3a", "gs", "az", "azure", "abfs", "abfss", "memory"})
"""The schemes of object stores."""

URL = re.compile(r"\s*([A-Za-z][A-Za-z0-9+.-]*):/{1,2}([^/]*)/*(.*)\Z", re.DOTALL)
"""One slash is what `pathlib.Path` leaves of two."""

SCHEME = re.compile(r"[^/\\]*:(?=[/\\]|$)")
"""A first part that ends with a colon: of a URL, also of one behind another (`simplecache::s3://`), or a drive."""

SPECIAL = re.compile(
    r"[~:\\\0]"
)  # What every path has that is not, or not yet, one for the system.
DRIVE = re.compile(r"\s*[A-Za-z]:")
SHOWN = 200


def local_path(path: object) -> str:
    """A path on this machine, as text, with a leading `~` expanded. What gave one path gives the same when it is asked again.

    >>> local_path("checkpoints/model.pt")
    'checkpoints/model.pt'
    """
    if not isinstance(path, str | os.PathLike):
        raise _refused(f"a path is text or a pathlib.Path, not {_kind(path)}", path, kind=NotAPath)
    text = os.fspath(path)
    if not isinstance(text, str):
        raise _refused(
            f"a path must be text, not {_kind(text)}; os.fsdecode makes text of it",
            text,
            kind=NotAPath,
        )
    if text and not SPECIAL.search(text):
        return text
    text = _slashed(text)
    if not text:
        raise _refused("the path is empty; the current directory is '.'", text)
    if "\0" in text:
        raise _refused("a path cannot hold a NUL character", text)
    if not _says_more(text):
        # `Path` makes `~x` of `./~x`, and would give it a meaning that it did not have.
        return (
            _slashed(os.path.join(os.getcwd(), text))
            if text.startswith("./") and _says_more(_undotted(text))
            else text
        )
    if not text.startswith("~"):
        raise _elsewhere(text)
    try:
        home = os.path.expanduser(text)
    except ValueError:
        home = text
    if _says_more(home):
        user = re.split(r"[/\\]", text)[0]
        raise _refused(
            f"there is no home of {user[:SHOWN]!r}; a file of that name is given by its absolute path",
            text,
        )
    return _slashed(home)


def place_of(path: object, store: object | None = None) -> str:
    """A path on this machine, or the `Url` of something in an object store; with a `store`, `path` is a key in it."""
    text = os.fspath(path) if isinstance(path, str | os.PathLike) else None
    if isinstance(text, str) and (store is not None or (":" in text and is_url(text))):
        from holdfast.stores.remote.url import url_of  # for object stores

        return url_of(text, store)
    return local_path(path)


def is_url(text: str) -> bool:
    """Whether this is the URL of an object store, also one that `pathlib.Path` took a slash from.

    >>> is_url("s3://bucket/x"), is_url("C:/x"), is_url("model.pt")
    (True, False, False)
    """
    match = URL.match(text)
    return match is not None and match[1].lower() in SCHEMES


def is_parsed_url(path: object) -> TypeGuard[Url]:
    """Whether a place is a `Url` already, which is a text too."""
    if type(path) is str:
        return False
    from holdfast.stores.remote.url import Url  # for object stores

    return isinstance(path, Url)


def target_place(path: object, store: object | None = None, *, folder: bool = False) -> str:
    """Return the place to write to, as `place_of` does.

    A slash at the end says that it is a folder, but `pathlib.Path` drops it, so `folder` adds it.

    >>> target_place(PurePath("m/"), folder=True), target_place("m/"), target_place(PurePath("m/"))
    ('m/', 'm/', 'm')
    """
    text = os.fspath(path) if isinstance(path, str | os.PathLike) else path
    if folder and isinstance(text, str) and text and not is_parsed_url(text):
        text = f"{text.rstrip('/')}/"
    return place_of(text, store)


def place_in_words(path: object) -> str:
    """Return a place for a report: where it leads if it is one, else what was given.

    `pathlib.Path` drops a slash of a URL, and `place_of` adds it again.

    >>> place_in_words(PurePath("s3://bucket/x")), place_in_words("hf://org/model"), place_in_words(3)
    ('s3://bucket/x', 'hf://org/model', '3')
    """
    try:
        return place_of(path)
    except BadPath:
        return os.fspath(path) if isinstance(path, str | PurePath) else shown(path)


def found_path(path: str) -> str:
    """A path that was found on the disk, so that `place_of` gives just that: absolute where it could be taken for something else.

    The URL of something that was found is one already.

    >>> found_path("folder/~model.pt")
    'folder/~model.pt'
    """
    if is_parsed_url(path):
        return path
    path = _slashed(path)
    return _slashed(os.path.join(os.getcwd(), path)) if _says_more(_undotted(path)) else path


def content_and_path(content: object, path: object) -> tuple[object, object]:
    """What is to be saved, and where to, from two arguments of which one is a path: `torch.save` has it second, `open` first.

    >>> content_and_path("model.pt", {"w": 1})
    ({'w': 1}, 'model.pt')
    """
    places = (str, os.PathLike)
    # With a file object in the second place, the first one is what is saved, be it text.
    swapped = (
        isinstance(content, places) and not isinstance(path, places) and not hasattr(path, "write")
    )
    return (path, content) if swapped else (content, path)


def _slashed(text: str) -> str:
    """A path with one kind of slash: to Windows they are the same, unless it begins with `\\\\?\\`, which is taken literally."""
    return text.replace("\\", "/") if HAS_DRIVES and not text.startswith("\\\\?\\") else text


def check_binary(file: object, mode: str) -> None:
    """Raise `BadArgumentType` for a file object of text; `mode` is what it should have been opened with."""
    # Files of text say in which encoding; what wraps one (tempfile) passes the question on.
    if isinstance(file, io.TextIOBase) or hasattr(file, "encoding"):
        what = f"a checkpoint is bytes, and this {type(file).__name__} is a file of text; open it in binary mode ({mode!r})"
        raise BadArgumentType(what, found=file)


def _says_more(text: str) -> bool:
    """Whether a path is not, or not yet, one for the system."""
    if HAS_DRIVES and (text.startswith("\\\\") or DRIVE.match(text)):
        return False
    return text.startswith(("~", "\\\\")) or SCHEME.match(text) is not None


def _undotted(text: str) -> str:
    while text.startswith("./"):
        text = text[2:].lstrip("/")
    return text


def _elsewhere(text: str) -> BadPath:
    named = "a file of that name is given by its absolute path"
    if DRIVE.match(text) or text.startswith("\\\\"):
        return _refused(
            f"{text[:SHOWN]!r} is a path of Windows, and this machine has no drives; {named}", text
        )
    scheme = SCHEME.match(text)
    if scheme is not None and scheme[0].strip().lower() == "file:":
        return _refused(f"{text[:SHOWN]!r} is a URL; give the path alone, without file://", text)
    if is_url(text):
        message = "only a file of this machine can be used here; `holdfast cp` copies a checkpoint to it, or from it"
    else:
        message = "of object stores, s3://, gs:// and az:// are understood"
    return _refused(
        f"{text[:SHOWN]!r} is a URL and no path on this machine: {message} ({named})", text
    )


def _kind(value: object) -> str:
    return "None" if value is None else f"a {type(value).__name__}"


def _refused(message: str, found: object, *, kind: type[BadPath] = BadPath) -> BadPath:
    refused = kind(message, found=found)
    refused.errno = errno.EINVAL
    return refused
