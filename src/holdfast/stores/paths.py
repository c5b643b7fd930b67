"""Turns what a user passes as a path into a local path or a URL, or explains why that is
impossible.

Every verb calls `place_of` or `local_path` first, from Python and on the command line, and so do
the stores and transactions below them:

    s3://bucket/x   gs://…   az://…       an object store: `place_of` returns a `Url`
    hf://…   file:///x                    an error: no local path, and no supported object store
    s3:/bucket/x                          the same as s3://: `pathlib.Path` removes a slash
    C:\\x   C:/x   \\\\server\\x             on Windows C:/x, //server/x; elsewhere an error
    ~/x   ~user/x                         a path in the home of that user, as in a shell
    ''                                    an error; the current directory is '.'

Without these rules, each of them would create a strange folder in the current directory. If a file
really has such a name, you can give its absolute path (`disambiguate_path`). `holdfast.torch.save`
and `load` behave like the functions of torch and do not apply these rules."""

from __future__ import annotations

import errno
import io
import os
import re
from pathlib import PurePath
from typing import TYPE_CHECKING, TypeGuard

from holdfast.core.quantities import describe_value
from holdfast.errors import BadArgumentType, BadPath, NotAPath
from holdfast.stores.platform import HAS_DRIVES

if TYPE_CHECKING:
    from holdfast.stores.remote.url import Url

AnyPath = str | os.PathLike[str]

SCHEMES = frozenset({"s3", "s3a", "gs", "az", "azure", "abfs", "abfss", "memory"})
"""The URL schemes of object stores."""

URL = re.compile(r"\s*([A-Za-z][A-Za-z0-9+.-]*):/{1,2}([^/]*)/*(.*)\Z", re.DOTALL)
"""Accepts a single slash because `pathlib.Path` removes the other one."""

SCHEME = re.compile(r"[^/\\]*:(?=[/\\]|$)")
"""A first part that ends with a colon: a drive, or the scheme of a URL, perhaps a nested one
(`simplecache::s3://`)."""

UNUSUAL_CHARACTER = re.compile(r"[~:\\\0]")
"""A path without any of these characters needs no further checks."""

DRIVE = re.compile(r"\s*[A-Za-z]:")

MAX_SHOWN_CHARACTERS = 200

ABSOLUTE_PATH_HINT = "if a file has this name, give its absolute path"


def local_path(path: object) -> str:
    """Return a path on this machine as text, with a leading `~` expanded.

    Callers at several levels call this function, so it returns its own results unchanged.

    Raises:
        NotAPath: The value is neither text nor a path object.
        BadPath: The text is not a path on this machine.

    >>> local_path("checkpoints/model.pt")
    'checkpoints/model.pt'
    """
    if not isinstance(path, str | os.PathLike):
        message = f"a path must be text or a pathlib.Path, not {_describe_type(path)}"
        raise _make_error(message, path, error_type=NotAPath)
    text = os.fspath(path)
    if not isinstance(text, str):
        message = f"a path must be text, not {_describe_type(text)}; decode it with os.fsdecode"
        raise _make_error(message, text, error_type=NotAPath)
    # Nearly all paths end here. The checks below are for the special cases of this module.
    if text and not UNUSUAL_CHARACTER.search(text):
        return text

    text = _use_forward_slashes(text)
    if not text:
        raise _make_error("the path is empty; the current directory is '.'", text)
    if "\0" in text:
        raise _make_error("a path cannot contain a NUL character", text)
    if not _has_special_meaning(text):
        # `Path` turns `./~x` into `~x`, which would then mean a home. The absolute path is safe.
        if text.startswith("./") and _has_special_meaning(_strip_leading_dots(text)):
            return _use_forward_slashes(os.path.join(os.getcwd(), text))
        return text
    if not text.startswith("~"):
        raise _explain_foreign_path(text)
    return _expand_home(text)


def _expand_home(text: str) -> str:
    """Replace `~` or `~user` at the start of a path by the home folder of that user.

    Raises:
        BadPath: There is no such user.
    """
    try:
        path = os.path.expanduser(text)
    except ValueError:
        # The name of the user cannot be looked up, because it has a character that is not allowed.
        path = text
    # If there is no such user, the path still starts with a `~`.
    if _has_special_meaning(path):
        user = re.split(r"[/\\]", text)[0][:MAX_SHOWN_CHARACTERS]
        raise _make_error(f"cannot find the home folder {user!r}; {ABSOLUTE_PATH_HINT}", text)
    return _use_forward_slashes(path)


def place_of(path: object, store: object | None = None) -> str:
    """Return a local path, or the `Url` of a place in an object store.

    Args:
        path: A path or a URL. With a `store`, a key in that store.
        store: A client of an object store that the caller made.
    """
    text = os.fspath(path) if isinstance(path, str | os.PathLike) else None
    # Searching a colon is faster than the regular expression in `is_url`.
    if isinstance(text, str) and (store is not None or (":" in text and is_url(text))):
        from holdfast.stores.remote.url import parse_url  # only for object stores

        return parse_url(text, store)
    return local_path(path)


def is_url(text: str) -> bool:
    """Return whether this is the URL of an object store, even if `pathlib.Path` removed a slash.

    >>> is_url("s3://bucket/x"), is_url("C:/x"), is_url("model.pt")
    (True, False, False)
    """
    match = URL.match(text)
    return match is not None and match[1].lower() in SCHEMES


def is_parsed_url(path: object) -> TypeGuard[Url]:
    """Return whether a place is a `Url`, which is a subclass of `str`."""
    if type(path) is str:
        return False
    from holdfast.stores.remote.url import Url  # only for object stores

    return isinstance(path, Url)


def target_place(path: object, store: object | None = None, *, folder: bool = False) -> str:
    """Return the place to write to: a local path or the `Url` of an object store.

    A slash at the end marks a folder. `pathlib.Path` removes that slash, so `folder` adds it.

    >>> target_place(PurePath("m/"), folder=True), target_place("m/"), target_place(PurePath("m/"))
    ('m/', 'm/', 'm')
    """
    text = os.fspath(path) if isinstance(path, str | os.PathLike) else path
    # Anything that is not text is passed on to `place_of`, which raises the error.
    if folder and isinstance(text, str) and text and not is_parsed_url(text):
        text = f"{text.rstrip('/')}/"
    return place_of(text, store)


def describe_place(path: object) -> str:
    """Return a place for a report. If it is not a valid place, return what the user passed.

    `pathlib.Path` removes a slash of a URL, and `place_of` adds it again.

    >>> describe_place(PurePath("s3://bucket/x"))
    's3://bucket/x'
    >>> describe_place("hf://org/model"), describe_place(3)
    ('hf://org/model', '3')
    """
    try:
        return place_of(path)
    except BadPath:
        if isinstance(path, str | PurePath):
            return os.fspath(path)
        return describe_value(path)


def disambiguate_path(path: str) -> str:
    """Return a spelling of an existing path that `place_of` returns unchanged.

    That is the absolute path if the relative one looks like a URL, a drive or a home. A `Url` needs
    no other spelling.

    >>> disambiguate_path("folder/~model.pt")
    'folder/~model.pt'
    """
    if is_parsed_url(path):
        return path
    path = _use_forward_slashes(path)
    if not _has_special_meaning(_strip_leading_dots(path)):
        return path
    return _use_forward_slashes(os.path.join(os.getcwd(), path))


def order_content_and_path(content: object, path: object) -> tuple[object, object]:
    """Return the content to save and the path, from arguments in either order.

    `torch.save` takes the path second, and `open` takes it first.

    >>> order_content_and_path("model.pt", {"w": 1})
    ({'w': 1}, 'model.pt')
    """
    path_types = (str, os.PathLike)
    # If the second argument is a file object, the first one is the content, even if it is text.
    is_swapped = (
        isinstance(content, path_types)
        and not isinstance(path, path_types)
        and not hasattr(path, "write")
    )
    if is_swapped:
        return path, content
    return content, path


def check_binary(file: object, mode: str) -> None:
    """Raise `BadArgumentType` if a file object is open in text mode.

    Args:
        file: The file object.
        mode: The mode to suggest in the message.
    """
    # Text files have an encoding. Wrappers, such as those of tempfile, pass the attribute on.
    if isinstance(file, io.TextIOBase) or hasattr(file, "encoding"):
        message = (
            f"a checkpoint is bytes, and this {type(file).__name__} is a file of text; "
            f"open it in binary mode ({mode!r})"
        )
        raise BadArgumentType(message, found=file)


def _use_forward_slashes(text: str) -> str:
    """Replace backslashes on Windows.

    A path that starts with `\\\\?\\` stays as it is, because Windows takes it literally.
    """
    if not HAS_DRIVES or text.startswith("\\\\?\\"):
        return text
    return text.replace("\\", "/")


def _has_special_meaning(text: str) -> bool:
    """Return whether a path looks like a home, a URL, or a drive of another system."""
    # On Windows these are ordinary paths: a server, or a drive.
    if HAS_DRIVES and (text.startswith("\\\\") or DRIVE.match(text)):
        return False
    return text.startswith(("~", "\\\\")) or SCHEME.match(text) is not None


def _strip_leading_dots(text: str) -> str:
    """Remove `./` from the start of a path."""
    # `.//x` is `./x`, and not the absolute path `/x`.
    while text.startswith("./"):
        text = text[2:].lstrip("/")
    return text


def _explain_foreign_path(text: str) -> BadPath:
    """Return an error that says what kind of path this is, and what to pass instead."""
    label = repr(text[:MAX_SHOWN_CHARACTERS])
    if DRIVE.match(text) or text.startswith("\\\\"):
        message = (
            f"{label} is a path of Windows, and this machine has no drives; {ABSOLUTE_PATH_HINT}"
        )
        return _make_error(message, text)

    scheme = SCHEME.match(text)
    if scheme is not None and scheme[0].strip().lower() == "file:":
        return _make_error(f"{label} is a URL; pass the path alone, without file://", text)
    if is_url(text):
        reason = "this needs a file on this machine; copy the checkpoint with `holdfast cp`"
    else:
        reason = "the supported object stores are s3://, gs:// and az://"
    return _make_error(
        f"{label} is a URL and not a path on this machine: {reason} ({ABSOLUTE_PATH_HINT})", text
    )


def _describe_type(value: object) -> str:
    """Return the type of a value for a message, such as `a list`."""
    if value is None:
        return "None"
    return f"a {type(value).__name__}"


def _make_error(message: str, path: object, *, error_type: type[BadPath] = BadPath) -> BadPath:
    """Return an error for something that is not a path. Its `errno` is EINVAL."""
    return error_type(message, found=path, errno=errno.EINVAL)
