"""Every exception that Holdfast raises, grouped by what a caller would do about it.

    HoldfastError
    ├── FormatError (ValueError)            the bytes are not what they claim to be: do not use this file
    │   ├── UnknownFormat                   nothing we know starts like this
    │   ├── Truncated (EOFError)            the file ends before its content does
    │   ├── PickleError (UnpicklingError)   the pickle stream breaks a rule of the closed interpreter
    │   ├── ZipError                        the archive breaks a rule of the strict zip reader
    │   ├── HeaderError                     a JSON header or index breaks its schema
    │   ├── MetadataError                   sizes, strides, offsets or indices that cannot be true
    │   └── ReplicasDiffer                  ranks have different values of a tensor that each of them has whole
    ├── LimitExceeded (ValueError)          the file may be honest, but costs more than `Limits` allows: raise one
    ├── UnsafePath (ValueError)             a name inside the file points outside of what was opened
    ├── Corrupted (OSError)                 a checksum does not match: get the file again
    ├── StoreError (OSError)                the file system said no: missing, unreadable, changed while open
    │   ├── NoSuchPath (FileNotFoundError)  there is nothing where a checkpoint or a run was to be
    │   └── Replaced                        another checkpoint has taken the place of the one that was opened: open it again
    ├── Unsupported (NotImplementedError)   well-formed, but not something we can turn into what was asked for
    ├── NoSuchTensor (KeyError)             the name is not in the checkpoint; near names are suggested
    ├── NoSuchStep (KeyError)               the run has no whole step of this number
    ├── BadIndex (IndexError)               an index that numpy would refuse too, or one that we cannot do lazily
    ├── SaveError (OSError)                 a save did not do what it should
    │   ├── NotCommitted                    nothing changed at the target; what was there is intact
    │   │   └── BadPath (StoreError)        what was given as a path is none (a URL, ''): nothing was read or written
    │   │       └── NotAPath (TypeError)    nor is it text
    │   ├── DurabilityUncertain             the new content is in place, but may not survive a power cut
    │   ├── RanksFailed                     a save or load of several ranks failed, for the same reasons on all of them
    │   │   ├── RanksFoundNothing (NoSuchPath)  there is nothing at the path, as every rank sees it
    │   │   └── RanksRefused (CannotHold)   what the ranks were to save cannot be held; `problems` lists all of it
    │   └── RankLost                        a rank gave no sign of life: it was killed, or its machine is gone
    ├── CannotHold (ValueError)             the format has no way to say this; `problems` lists all of it, nothing was written
    ├── BadPlacement (ValueError)           a mesh, a rule of `reshard` or a shard that does not fit the checkpoint
    ├── BadMap (ValueError)                 a map between layouts of weights that cannot be read, or does not lead where it says
    ├── BadArgument (ValueError)            a parameter was given something that it does not take: the message says what it takes
    │   └── BadArgumentType (TypeError)     of another kind
    ├── BadTarget (ValueError)              `out=` has another shape, dtype or layout than the tensor
    ├── DoesNotFit (RuntimeError)           names, shapes or dtypes of a module and a checkpoint differ; all are listed
    ├── Refused (RuntimeError)              `holdfast.torch` says no where torch says it with a RuntimeError
    │   └── NotSaved (NotCommitted)         the same for a save: nothing changed at the target
    └── Closed (ValueError)                 the checkpoint was closed before this read

Each error carries what it knows as attributes (`file`, `tensor`, `offset`, `expected`, `found`); the message says what was
being done, what was found and, where there is something to do, what to do.
"""

from __future__ import annotations

from _pickle import UnpicklingError
from collections.abc import Mapping, Sequence
from errno import ENOENT
from types import TracebackType
from typing import TypeVar

__all__ = [
    "BadArgument", "BadArgumentType", "BadIndex", "BadMap", "BadPath", "BadPlacement", "BadTarget", "CannotHold", "Closed",
    "Corrupted", "DoesNotFit", "DurabilityUncertain", "FormatError", "HeaderError", "HoldfastError", "HoldfastWarning",
    "LimitExceeded", "MetadataError", "NoSuchPath", "NoSuchStep", "NoSuchTensor", "NotAPath", "NotCommitted", "NotSaved",
    "PickleError", "RankLost", "RanksFailed", "RanksFoundNothing", "RanksRefused", "Refused", "Replaced", "ReplicasDiffer",
    "SaveError", "StoreError", "Truncated", "UnknownFormat", "UnsafePath", "Unsupported", "ZipError", "drop_tracebacks",
    "error_context",
]  # fmt: skip


class HoldfastWarning(UserWarning):
    """Something that a caller may want to know and that is no error."""


class HoldfastError(Exception):
    """The root of the tree; see the module's docstring."""

    def __init__(
        self,
        message: str,
        *,
        file: str | None = None,
        tensor: str | None = None,
        offset: int | None = None,
        expected: object = None,
        found: object = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.file = file
        self.tensor = tensor
        self.offset = offset
        self.expected = expected
        self.found = found

    def __str__(self) -> str:
        where = []
        if self.file is not None:
            where.append(f"file {self.file!r}")
        if self.tensor is not None:
            where.append(f"tensor {self.tensor!r}")
        if self.offset is not None:
            where.append(f"byte {self.offset}")
        return f"{self.message} ({', '.join(where)})" if where else self.message


class FormatError(HoldfastError, ValueError):
    """The bytes are not what they claim to be."""


class UnknownFormat(FormatError):
    """No format that we know starts like this."""


class Truncated(FormatError, EOFError):
    """The file ends before its content does."""


class PickleError(FormatError, UnpicklingError):
    """A pickle stream breaks a rule of the closed interpreter."""


class ZipError(FormatError):
    """An archive breaks a rule of the strict zip reader."""


class HeaderError(FormatError):
    """A JSON header or index breaks its schema; the message points into the document."""


class MetadataError(FormatError):
    """A tensor claims sizes, strides, offsets or indices that cannot be true."""


class ReplicasDiffer(FormatError):
    """Ranks have different values of what should be one tensor: nobody can say which one is true."""


class LimitExceeded(HoldfastError, ValueError):
    """A cost above a field of `Limits`; the message names the field."""


class UnsafePath(HoldfastError, ValueError):
    """A name inside a file points outside of what was opened, or at something that is no plain file."""


class Corrupted(HoldfastError, OSError):
    """A checksum does not match the bytes."""


class StoreError(HoldfastError, OSError):
    """The place where the bytes live refused, or the bytes changed while they were read."""


class NoSuchPath(StoreError, FileNotFoundError):
    """There is nothing at this path or URL.

    A checkpoint that is there and lacks some of its files is no such case: a program that begins anew on a `FileNotFoundError`
    should not do so over a damaged one.
    """

    # On the class, since an instance of OSError forgets its code on the way to another process.
    errno = ENOENT

    @property
    def filename(self) -> str | None:
        """The path or URL; read when it is asked for, since `error_context` may add it."""
        return self.file

    @property
    def strerror(self) -> str:  # type: ignore[override]  # read-only here
        """What is wrong, without the place."""
        return self.message


class Replaced(StoreError):
    """The files that were opened are gone, because something else was saved in their place: open it again."""


class Unsupported(HoldfastError, NotImplementedError):
    """Well-formed, but not something that can be turned into what was asked for."""


class NoSuchTensor(HoldfastError, KeyError):
    """The name is not in the checkpoint."""

    # KeyError shows the repr of its argument; a sentence reads better as a sentence.
    __str__ = HoldfastError.__str__


class NoSuchStep(HoldfastError, KeyError):
    """The run has no whole step of this number."""

    __str__ = HoldfastError.__str__


class BadIndex(HoldfastError, IndexError):
    """An index that does not fit the tensor, or that cannot be done without reading more than it asks for."""


class SaveError(HoldfastError, OSError):
    """A save did not do what it should; the two kinds below say what is at the target."""

    def __init__(
        self,
        message: str,
        *,
        file: str | None = None,
        errno: int | None = None,
        tensor: str | None = None,
        offset: int | None = None,
        expected: object = None,
        found: object = None,
    ) -> None:
        super().__init__(
            message, file=file, tensor=tensor, offset=offset, expected=expected, found=found
        )
        if errno is not None:
            self.errno = errno


class NotCommitted(SaveError):
    """The save failed before its one visible step: what was at the target is untouched, and nothing else was left."""


class BadPath(StoreError, NotCommitted):
    """What was given as the path of a checkpoint is none on this machine. Nothing was read, and nothing was written."""


class NotAPath(BadPath, TypeError):
    """What was given as a path is not even text."""


class DurabilityUncertain(SaveError):
    """The new content is in place, but the file system refused to confirm that it would survive a power cut."""


class RanksFailed(NotCommitted):
    """Every rank of a save or load raises this one, with the cause of each rank that had one. Nothing was published.

    `errno` is set if all causes have the same one. A group of one process raises its own error instead.
    """

    def __init__(self, message: str, *, causes: Mapping[int, str], file: str | None = None) -> None:
        HoldfastError.__init__(self, message, file=file, found=tuple(causes))
        self.causes = dict(causes)


class RanksFoundNothing(RanksFailed, NoSuchPath):
    """`NoSuchPath` on every rank of a group. Where some ranks see a checkpoint it is a `RanksFailed`: a disk that is missing on
    one machine is no reason to begin anew."""

    def __init__(self, message: str, path: str | None, *, causes: Mapping[int, str]) -> None:
        super().__init__(message, causes=causes)
        self.path = path

    @property
    def filename(self) -> str | None:
        """The path or URL; the message has it in its causes."""
        return self.path


class RankLost(SaveError):
    """A rank that was waited for gave no sign of life within the deadline."""

    def __init__(self, message: str, *, ranks: tuple[int, ...]) -> None:
        super().__init__(message, found=ranks)
        self.ranks = ranks


def _shown(problems: Sequence[str]) -> list[str]:
    return [*problems[:20], *([f"… and {len(problems) - 20:,} more"] if len(problems) > 20 else [])]


class CannotHold(HoldfastError, ValueError):
    """The target format cannot hold some of the state; nothing was written."""

    def __init__(self, message: str, problems: Sequence[str], *, file: str | None = None) -> None:
        self.shown = _shown(problems)
        """Those that the message lists."""
        super().__init__("\n  - ".join([message, *self.shown]), file=file)
        self.what = message  # The message without them.
        self.problems = tuple(problems)


class RanksRefused(RanksFailed, CannotHold):
    """`CannotHold` on every rank: each that had a cause had that one."""

    def __init__(
        self,
        message: str,
        problems: Sequence[str],
        *,
        causes: Mapping[int, str],
        file: str | None = None,
    ) -> None:
        RanksFailed.__init__(self, message, causes=causes, file=file)
        self.what, self.problems, self.shown = message, tuple(problems), list(problems)


class BadPlacement(HoldfastError, ValueError):
    """A mesh, or a rule that says how tensors are spread over it, that cannot be followed."""


class BadMap(HoldfastError, ValueError):
    """A map between layouts of weights that cannot be read, or cannot be followed."""


class BadArgument(HoldfastError, ValueError):
    """A parameter was given something that it does not take. Nothing was read, and nothing was written."""


class BadArgumentType(BadArgument, TypeError):
    """A parameter was given a value of another type."""


class BadTarget(HoldfastError, ValueError):
    """The array given as `out=` cannot hold the tensor."""


class DoesNotFit(HoldfastError, RuntimeError):
    """A module or state and a checkpoint do not go together; what torch's `load_state_dict` says with a RuntimeError."""

    def __init__(
        self,
        message: str,
        *,
        missing: Sequence[str] = (),
        unexpected: Sequence[str] = (),
        mismatched: Mapping[str, str] | None = None,
        problems: Sequence[str] = (),
        file: str | None = None,
    ) -> None:
        self.what, self.shown = message, _shown(problems)
        super().__init__("\n  - ".join([message, *self.shown]), file=file)
        self.missing = tuple(missing)  # Names of the target that the checkpoint does not have.
        self.unexpected = tuple(
            unexpected
        )  # Names of the checkpoint that the target does not have.
        self.mismatched = dict(
            mismatched or {}
        )  # Names that both have and that cannot be loaded, with the reason.


class Refused(HoldfastError, RuntimeError):
    """`holdfast.torch` refuses where torch refuses with a RuntimeError, so that the same `except` catches it."""


class NotSaved(NotCommitted, Refused):
    """A `NotCommitted` of `holdfast.torch.save`, which is a RuntimeError where torch would raise one."""


class Closed(HoldfastError, ValueError):
    """The checkpoint was closed before this read."""


class error_context:  # noqa: N801  # a block, said as one; a generator would take longer than many of the calls that are made in it
    """Add a place to any Holdfast error that passes by and does not know it yet."""

    __slots__ = ("_file", "_tensor")

    def __init__(self, *, file: str | None = None, tensor: str | None = None) -> None:
        self._file, self._tensor = file, tensor

    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if isinstance(error, HoldfastError):
            if error.file is None:
                error.file = self._file
            if error.tensor is None:
                error.tensor = self._tensor


E = TypeVar("E", bound=BaseException)


def drop_tracebacks(error: E) -> E:
    """An error that is kept as a value, and those that led to it, without their tracebacks.

    A traceback holds the variables of every caller. One of them may be what the error is kept in, and then all of them stay until
    the garbage collector comes, a training loop's state among them.
    """
    waiting: list[BaseException | None] = [error]
    while waiting:
        one = waiting.pop()
        if one is not None and one.__traceback__ is not None:
            one.__traceback__ = None
            waiting += [one.__cause__, one.__context__]
    return error


def __dir__() -> list[str]:
    return sorted(__all__)
