"""Translates errors of obstore: to our classes, with our messages, and whether a retry can help.

Messages of obstore are never shown, because they may contain signed URLs.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Callable, Iterator
from typing import TypeVar

from holdfast.errors import HoldfastError, NoSuchPath, Replaced, StoreError, Truncated, Unsupported

T = TypeVar("T")

FIRST_PAUSE_S = 0.05
"""The first pause after a failure."""

MAX_PAUSE_S = 10.0
"""The longest pause between two attempts."""

MAX_RETRY_S = 180.0
"""The total time during which a request is repeated."""

STATUS = re.compile(r"status code: (\d{3}[^:<{]*)")

CODE = re.compile(r"<Code>([A-Za-z]+)</Code>")

TIMED_OUT = re.compile(r"(?<!retry_)timed? ?out", re.IGNORECASE)

CREDENTIALS = re.compile(r"credential|InstanceMetadata|169\.254|metadata\.google", re.IGNORECASE)
"""The client found no credentials. It looks for them at the metadata servers of the clouds, too."""

OTHER_RANGE = re.compile(r"non-partial response when range requested|Requested \d+\.\.\d+, got \d+")

DENIED = re.compile(
    r"status code: 40[13]|<Code>(?:ExpiredToken|AccessDenied|InvalidAccessKeyId)</Code>"
)
"""Access was denied to a listing, for which the client has no exception class."""

PERMANENT = re.compile(
    r"status code: 4(?!08|29)\d\d|<Code>InvalidRange</Code>|Wanted range starting at \d+"
    r"|Range started at \d+"
)
"""The same request would fail again. 408 (timeout) and 429 (too many requests) may pass."""

PAST_THE_END = re.compile(
    r"status code: 416|<Code>InvalidRange</Code>|Wanted range starting at \d+|Range started at \d+"
)


class ConditionFailed(StoreError):
    """The condition of a put did not hold: the object exists, or has another content by now."""


def translate_error(error: BaseException, url: str, action: str) -> BaseException:
    """Return the error to raise for an error of the client.

    Args:
        error: What the client raised. Errors of ours and interrupts are returned as they are.
        url: The URL of the object.
        action: What failed, for the message: `reading it`, `listing it`.
    """
    import obstore.exceptions as client_errors

    if isinstance(error, HoldfastError) or not isinstance(error, Exception):
        return error
    text = str(error)
    if isinstance(error, FileNotFoundError):
        if "NoSuchBucket" in text:
            return NoSuchPath("there is no such bucket", file=url)
        return StoreError("no such object", file=url, errno=errno.ENOENT)
    if isinstance(error, client_errors.AlreadyExistsError):
        return ConditionFailed("the object exists already", file=url, errno=errno.EEXIST)
    if isinstance(error, client_errors.PreconditionError | client_errors.NotModifiedError):
        if action == "reading it":
            message = "the object was replaced while the checkpoint was open; open it again"
            return Replaced(message, file=url, errno=errno.EIO)
        message = "another program replaced the object meanwhile"
        return ConditionFailed(message, file=url, errno=errno.EEXIST)

    access_errors = client_errors.PermissionDeniedError | client_errors.UnauthenticatedError
    if isinstance(error, access_errors) or DENIED.search(text):
        message = f"{action}: access denied; check the credentials, and whether they have expired"
        return StoreError(message, file=url, errno=errno.EACCES)
    if isinstance(error, client_errors.NotSupportedError):
        return Unsupported(f"{action}: the store does not support it", file=url)
    if isinstance(error, client_errors.UnknownConfigurationKeyError | ValueError):
        message = f"{action}: the client rejected its configuration; check the environment"
        return StoreError(message, file=url, errno=errno.EINVAL)
    if PAST_THE_END.search(text):
        return Truncated("the object ends before the range to read", file=url)
    if OTHER_RANGE.search(text):
        return Truncated("the store returned another range than the requested one", file=url)
    message = f"{action} failed: {describe_failure(error)}"
    return StoreError(message, file=url, errno=errno.EIO)


def describe_failure(error: Exception) -> str:
    """Return why a request failed, without the client's text, which may contain a signed URL."""
    text = str(error)
    if CREDENTIALS.search(text) and "status code" not in text:
        return (
            "no credentials were found; set them in the environment, or pass a client in Python "
            "with store="
        )
    status = STATUS.search(text)
    code = CODE.search(text)
    server_answer = status[1] if status is not None else ""
    if code is not None:
        server_answer += f" ({code[1]})"
    if server_answer:
        return server_answer.strip()
    if TIMED_OUT.search(text):
        return "no answer came in time"
    if "dns error" in text:
        return "the name of the server cannot be resolved"
    if "response body" in text:
        return "the answer broke off"
    if "error sending request" in text or "HTTP error" in text:
        return "the server cannot be reached, or closed the connection"
    return type(error).__name__


def is_transient(error: Exception) -> bool:
    """Return whether the same request may succeed a moment later."""
    import obstore.exceptions as client_errors

    if isinstance(error, Truncated):
        return True
    text = str(error)
    if not isinstance(error, client_errors.GenericError) or PERMANENT.search(text):
        return False
    return "status code" in text or not CREDENTIALS.search(text)


def count_client_retries(error: Exception, action: str, max_retries: int) -> int:
    """Return how often obstore has repeated a request by itself.

    The message of obstore contains the number for requests. If the body of an answer breaks off,
    obstore requests the rest as often as it may, `max_retries` times, and does not report it. It
    does not do so for the body of an error answer, which counts as part of the request.
    """
    text = str(error)
    retries = re.search(r"after (\d+) retries", text)
    if retries is not None:
        return int(retries[1])
    is_request = "Error performing" in text
    is_body = "response body" in text and not is_request
    return max_retries if is_body and action == "reading it" else 0


def find_existing(request: Callable[..., T], *arguments: object) -> T | None:
    """Return the result of a request for an object, or None if there is no such object."""
    try:
        return request(*arguments)
    except StoreError as error:
        if error.errno != errno.ENOENT:
            raise
        return None


def iterate_pauses(first_s: float = FIRST_PAUSE_S) -> Iterator[float]:
    """Yield growing pauses in seconds, with jitter: many clients may fail at the same time."""
    import random  # only for object stores

    pause_s = first_s
    while True:
        yield random.uniform(pause_s / 2, pause_s)
        pause_s = min(2 * pause_s, MAX_PAUSE_S)
