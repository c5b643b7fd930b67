"""What a failure of obstore means: in our errors, in words of ours, and whether it may pass."""

from __future__ import annotations

import errno
import re
from collections.abc import Callable, Iterator
from typing import TypeVar

from holdfast.errors import HoldfastError, NoSuchPath, Replaced, StoreError, Truncated, Unsupported

T = TypeVar("T")


class Taken(StoreError):
    """A condition that a put had did not hold: something else is there, or is there by now."""


def refused(error: BaseException, url: str, doing: str) -> BaseException:
    import obstore.exceptions as theirs

    if isinstance(error, HoldfastError) or not isinstance(error, Exception):
        return error
    kind, code, message = StoreError, errno.EIO, f"{doing} failed: {reason(error)}"
    if isinstance(error, FileNotFoundError):
        if "NoSuchBucket" in str(error):
            return NoSuchPath("there is no such bucket", file=url)
        code, message = errno.ENOENT, "no such object"
    elif isinstance(error, theirs.AlreadyExistsError):
        kind, code, message = Taken, errno.EEXIST, "there is an object already"
    elif isinstance(error, theirs.PreconditionError | theirs.NotModifiedError):
        if doing == "reading it":
            kind, message = (
                Replaced,
                "the object was replaced while the checkpoint was open; open it again",
            )
        else:
            kind, code, message = Taken, errno.EEXIST, "the object is another by now"
    elif isinstance(
        error, theirs.PermissionDeniedError | theirs.UnauthenticatedError
    ) or DENIED.search(str(error)):
        code, message = (
            errno.EACCES,
            f"{doing}: access denied; check the credentials, and whether they have expired",
        )
    elif isinstance(error, theirs.NotSupportedError):
        return Unsupported(f"{doing}: the store does not support it", file=url)
    elif isinstance(error, theirs.UnknownConfigurationKeyError | ValueError):
        code, message = errno.EINVAL, f"{doing}: the client cannot be set up so"
    elif PAST_THE_END.search(str(error)):
        return Truncated("the object ends before what was to be read", file=url)
    elif OTHER_RANGE.search(str(error)):
        return Truncated(
            "the store answered with another range than the one that was asked for, or with none",
            file=url,
        )
    raised = kind(message, file=url)
    raised.errno = code
    return raised


STATUS = re.compile(r"status code: (\d{3}[^:<{]*)")
TIMED_OUT = re.compile(r"(?<!retry_)timed? ?out", re.IGNORECASE)
OTHER_RANGE = re.compile(r"non-partial response when range requested|Requested \d+\.\.\d+, got \d+")
DENIED = re.compile(
    r"status code: 40[13]|<Code>(?:ExpiredToken|AccessDenied|InvalidAccessKeyId)</Code>"
)
"""How it is said of a list, for which the client has no kind of error."""

FINAL = re.compile(
    r"status code: 4(?!08|29)\d\d|<Code>InvalidRange</Code>|Wanted range starting at \d+|Range started at \d+"
)
"""Failures that the same request would meet again."""

CODE = re.compile(r"<Code>([A-Za-z]+)</Code>")
PAST_THE_END = re.compile(
    r"status code: 416|<Code>InvalidRange</Code>|Wanted range starting at \d+|Range started at \d+"
)
CREDENTIALS = re.compile(r"credential|InstanceMetadata|169\.254|metadata\.google", re.IGNORECASE)


def reason(error: Exception) -> str:
    """Why a request failed, in words that were chosen here: what the client says may have a signed URL in it."""
    text = str(error)
    if CREDENTIALS.search(text) and "status code" not in text:
        return "no credentials were found; set those of the store in the environment, or give a client in Python with store="
    code, status = CODE.search(text), STATUS.search(text)
    answer = " ".join(
        part for part in (status and status[1], code and f"({code[1]})") if part
    ).strip()
    if answer:
        return answer
    if TIMED_OUT.search(text):
        return "no answer came in time"
    if "dns error" in text:
        return "the name of the server cannot be resolved"
    if "response body" in text:
        return "the answer broke off"
    if "error sending request" in text or "HTTP error" in text:
        return "the server cannot be reached, or broke off the connection"
    return type(error).__name__


def may_pass(error: Exception) -> bool:
    """Whether it may be that the same request has another answer in a moment."""
    import obstore.exceptions as theirs

    if isinstance(error, Truncated):
        return True
    text = str(error)
    if not isinstance(error, theirs.GenericError) or FINAL.search(text):
        return False
    return "status code" in text or not CREDENTIALS.search(text)


def repeated(error: Exception, doing: str, most: int) -> int:
    """Count how often obstore has repeated a request by itself.

    It says so of requests. The rest of a body that breaks off it asks for as often as it may, without
    saying so; but not of the body of an error answer, which is a part of the request.
    """
    text = str(error)
    retries = re.search(r"after (\d+) retries", text)
    if retries is not None:
        return int(retries[1])
    is_request = "Error performing" in text
    is_body = "response body" in text and not is_request
    return most if is_body and doing == "reading it" else 0


def if_there(ask: Callable[..., T], *given: object) -> T | None:
    """What a request for an object answers; None where there is none."""
    try:
        return ask(*given)
    except StoreError as error:
        if error.errno != errno.ENOENT:
            raise
        return None


FIRST_S, LONGEST_S = 0.05, 10.0  # The first pause after a failure, and the longest.
AGAIN_S = 180.0  # How long a request is sent again and again, in all.


def pauses(first: float = FIRST_S) -> Iterator[float]:
    """Growing pauses. Each is shortened at random: those who failed at once do not come back at once."""
    import random  # not for those who only have a path

    while True:
        yield random.uniform(first / 2, first)
        first = min(2 * first, LONGEST_S)
