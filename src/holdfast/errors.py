"""Every exception that Holdfast raises, grouped by what a caller can do about it.

    HoldfastError
    ├── FormatError (ValueError)            the bytes break the rules of their format
    │   ├── UnknownFormat                   Holdfast knows no format with this content
    │   ├── Truncated (EOFError)            a file ends before its content does
    │   ├── PickleError (UnpicklingError)   a pickle breaks a rule of the closed interpreter
    │   ├── ZipError                        an archive breaks a rule of the strict zip reader
    │   ├── HeaderError                     a JSON header or index breaks its schema
    │   ├── MetadataError                   the description of a tensor is impossible
    │   └── ReplicasDiffer                  ranks have different values of one tensor
    ├── LimitExceeded (ValueError)          a file costs more than `Limits` allows
    ├── UnsafePath (ValueError)             a name in a file leads out of the checkpoint
    ├── Corrupted (OSError)                 a checksum does not match
    ├── StoreError (OSError)                bytes cannot be read where they are stored
    │   ├── NoSuchPath (FileNotFoundError)  there is nothing at a path
    │   └── Replaced                        another checkpoint took the place of an open one
    ├── Unsupported (NotImplementedError)   a valid request that Holdfast cannot carry out
    ├── NoSuchTensor (KeyError)             a checkpoint has no tensor of this name
    ├── NoSuchStep (KeyError)               a run has no complete step of this number
    ├── BadIndex (IndexError)               an index does not fit the tensor
    ├── SaveError (OSError)                 a save failed
    │   ├── NotCommitted                    a save failed and changed nothing at its target
    │   │   └── BadPath (StoreError)        a path that cannot lead to a checkpoint
    │   │       └── NotAPath (TypeError)    a path of the wrong type
    │   ├── DurabilityUncertain             new content is in place, but may be lost in a power cut
    │   ├── RanksFailed (NotCommitted)      a save or load of several ranks failed on all of them
    │   │   ├── RanksFoundNothing (NoSuchPath)  every rank found nothing at the path
    │   │   └── RanksRefused (CannotHold)   the format cannot store the state of the ranks
    │   └── RankLost                        a rank sent no heartbeat before the deadline
    ├── CannotHold (ValueError)             a format cannot store a state
    ├── BadPlacement (ValueError)           a mesh or a rule does not fit the checkpoint
    ├── BadMap (ValueError)                 a layout map is invalid
    ├── BadArgument (ValueError)            an argument has a value that is not allowed
    │   └── BadArgumentType (TypeError)     an argument has a wrong type
    ├── BadTarget (ValueError)              an array or a file cannot receive what is read
    ├── DoesNotFit (RuntimeError)           a checkpoint and a module do not match
    ├── Refused (RuntimeError)              `holdfast.torch` raises where torch raises RuntimeError
    │   └── NotSaved (NotCommitted)         the same for a save
    └── Closed (ValueError)                 a checkpoint or a run is used after it was closed

The message of an error says what happened, to which file or tensor, and what to do. The attributes
of `HoldfastError` have the same facts for programs.
"""

from __future__ import annotations

from _pickle import UnpicklingError
from collections.abc import Mapping, Sequence
from errno import ENOENT
from types import TracebackType
from typing import TypeVar

__all__ = [
    "BadArgument",
    "BadArgumentType",
    "BadIndex",
    "BadMap",
    "BadPath",
    "BadPlacement",
    "BadTarget",
    "CannotHold",
    "Closed",
    "Corrupted",
    "DoesNotFit",
    "DurabilityUncertain",
    "FormatError",
    "HeaderError",
    "HoldfastError",
    "HoldfastWarning",
    "LimitExceeded",
    "MetadataError",
    "NoSuchPath",
    "NoSuchStep",
    "NoSuchTensor",
    "NotAPath",
    "NotCommitted",
    "NotSaved",
    "PickleError",
    "RankLost",
    "RanksFailed",
    "RanksFoundNothing",
    "RanksRefused",
    "Refused",
    "Replaced",
    "ReplicasDiffer",
    "SaveError",
    "StoreError",
    "Truncated",
    "UnknownFormat",
    "UnsafePath",
    "Unsupported",
    "ZipError",
    "drop_tracebacks",
    "error_context",
]

MAX_SHOWN_PROBLEMS = 20
"""The most problems that a message lists."""


class HoldfastWarning(UserWarning):
    """Reports something that did not stop the call, but that you may want to know.

    Cause:
        A background task failed or waits, or a plugin is ignored.

    Example:
        A `Run` with `when_failed="warn"` cannot write a step, because the disk is full. It warns,
        and tries again at the next save.

    What to do:
        Read the message. To turn the warning into an error, call
        `warnings.simplefilter("error", holdfast.HoldfastWarning)`.
    """


class HoldfastError(Exception):
    """The base class of all errors that Holdfast raises.

    Cause:
        The class of the error, one of those on this page, says what kind of problem it is.

    Example:
        `except holdfast.HoldfastError` catches every error of `holdfast.open`.

    What to do:
        Catch a more specific class where your program can react to it.

    Attributes:
        message: What happened, without the place.
        file: The file, path or URL, or None.
        tensor: The name of the tensor, or None.
        offset: The byte in the file, or None.
        expected: The value that was expected, or None.
        found: The value that was found instead, or None.
        errno: The code of the system, if the error is an `OSError`. None if there is no code.
    """

    def __init__(
        self,
        message: str,
        *,
        file: str | None = None,
        tensor: str | None = None,
        offset: int | None = None,
        expected: object = None,
        found: object = None,
        errno: int | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.file = file
        self.tensor = tensor
        self.offset = offset
        self.expected = expected
        self.found = found
        # Not an assignment of None, which would hide the code that a subclass has for itself.
        if errno is not None:
            self.errno: int | None = errno

    def __str__(self) -> str:
        """Return the message, followed by the file, the tensor and the byte in parentheses."""
        places = []
        if self.file is not None:
            places.append(f"file {self.file!r}")
        if self.tensor is not None:
            places.append(f"tensor {self.tensor!r}")
        if self.offset is not None:
            places.append(f"byte {self.offset}")
        if not places:
            return self.message
        return f"{self.message} ({', '.join(places)})"


class FormatError(HoldfastError, ValueError):
    """The bytes of a file break the rules of their format.

    Cause:
        The file is damaged, was written by a faulty program, or was made to attack its reader.

    Example:
        `holdfast.open("model.safetensors")`, if two tensors overlap in the file.

    What to do:
        Do not use the file. Get it again from its source. If another program reads it without
        complaint, report the file to the authors of the program that wrote it.
    """


class UnknownFormat(FormatError):
    """Holdfast knows no format with this content.

    Cause:
        The file is not a checkpoint, or the package that reads its format is not installed. The
        content decides the format, and the suffix does not matter.

    Example:
        `holdfast.open("README.md")`

    What to do:
        Check the path. A download that failed is often an HTML page or a Git LFS pointer.
    """


class Truncated(FormatError, EOFError):
    """A file ends before its content does.

    Cause:
        A download or a copy was interrupted, or the disk was full when the file was written.

    Example:
        `holdfast.open("model.safetensors")`, if the header describes more bytes than the file has.

    What to do:
        Download or copy the file again.
    """


class PickleError(FormatError, UnpicklingError):
    """A pickle breaks a rule of the interpreter with which Holdfast reads pickles.

    Cause:
        The pickle is damaged, or it uses an instruction that no writer of checkpoints needs. The
        interpreter calls nothing in a file, so a malicious pickle cannot do harm.

    Example:
        `holdfast.open("model.pt")`, if the pickle in the archive has no STOP instruction.

    What to do:
        Do not load the file with other programs. `holdfast scan` reports what it contains.
    """


class ZipError(FormatError):
    """A zip archive breaks a rule of the strict zip reader.

    Cause:
        The archive is damaged, or programs disagree about its content. Holdfast refuses archives
        that torch, Python and other readers would read differently.

    Example:
        `holdfast.open("model.pt")`, if the archive has two records of one name.

    What to do:
        Get the file again. If you packed the archive with a zip program, save the checkpoint again
        with the program that wrote it.
    """


class HeaderError(FormatError):
    """A JSON header, index or document breaks its schema.

    Cause:
        The file was edited by hand, is damaged, or was written by a faulty program.

    Example:
        `holdfast.open("model.safetensors")`, if the header has a key twice.

    What to do:
        The message has the position in the document (`at $.tensors[3].shape`). Get the file again,
        or correct the program that wrote it.
    """


class MetadataError(FormatError):
    """The size, strides, offset or indices of a tensor are impossible.

    Cause:
        The file is damaged or malicious.

    Example:
        `holdfast.open("model.pt")`, if a tensor reaches beyond the end of its storage.

    What to do:
        Do not use the file. Get it again.
    """


class ReplicasDiffer(FormatError):
    """Ranks have different values of one tensor, of which each of them has all elements.

    Cause:
        The replicas of a model diverged during training, or files of different steps are in one
        folder.

    Example:
        `holdfast.open("checkpoint/")["embed.weight"].numpy()`, if the files of ranks 0 and 1 have
        different values.

    What to do:
        Find out which rank is right. Then leave the tensor out (`drop=`), or take it from the file
        of that rank.
    """


class LimitExceeded(HoldfastError, ValueError):
    """A file or a call costs more memory or time than a limit allows.

    Cause:
        The file is larger than usual, or it was made to exhaust memory.

    Example:
        `holdfast.open("model.pt")`, if the pickle in it is larger than 64 MiB.

    What to do:
        If you trust the file, raise the limit that the message names:
        `holdfast.open(path, limits=holdfast.Limits(pickle_nbytes="1GiB"))`.
    """


class UnsafePath(HoldfastError, ValueError):
    """A name in a file leads out of the checkpoint, or to something that is not a regular file.

    Cause:
        An index names an absolute path, a path with "..", a link, a device or a pipe.

    Example:
        `holdfast.open("model/")`, if the index has the file name `../../secrets.safetensors`.

    What to do:
        Do not trust this checkpoint. If the files are links of your own, replace them by copies.
    """


class Corrupted(HoldfastError, OSError):
    """A checksum does not match the bytes.

    Cause:
        A disk, a network or another program changed the bytes after they were written.

    Example:
        `holdfast.open("model.pt")["w"].numpy()`, if a bit of the tensor flipped.

    What to do:
        Get the file again, or use another checkpoint. `holdfast verify` lists all damaged tensors.
    """


class StoreError(HoldfastError, OSError):
    """A disk or an object store cannot deliver bytes, or they changed while they were read.

    Cause:
        A permission is missing, a network failed, or another program writes to the file.

    Example:
        `holdfast.open("model.pt")`, if the user may not read the file.

    What to do:
        Correct the cause that the message names, and try again. `errno` has the code of the system.
    """


class NoSuchPath(StoreError, FileNotFoundError):
    """There is nothing at a path or URL.

    A checkpoint that lacks some of its files raises another error: a program that starts from
    scratch after a `FileNotFoundError` must not do so over a damaged checkpoint.

    Cause:
        The path is misspelled, or nothing was saved there yet.

    Example:
        `holdfast.open("missing.pt")`

    What to do:
        Check the path and the current directory.

    Attributes:
        filename: The path or URL.
        strerror: What happened, without the path.
    """

    # This is on the class, because an OSError loses its code when it is sent to another process.
    errno = ENOENT

    @property
    def filename(self) -> str | None:
        """The path or URL."""
        # A property, because `error_context` may set the file after the error was raised.
        return self.file

    @property
    def strerror(self) -> str:  # type: ignore[override]  # read-only here
        """What happened, without the path."""
        return self.message


class Replaced(StoreError):
    """The files that were opened are gone, because something else was saved in their place.

    Cause:
        Another process saved to the same path while this one had the checkpoint open.

    Example:
        `checkpoint["w"].numpy()`, if another process replaced the folder of `checkpoint` before the
        file with this tensor was opened.

    What to do:
        Open the checkpoint again.
    """


class Unsupported(HoldfastError, NotImplementedError):
    """A valid file or request that Holdfast cannot handle.

    Cause:
        Holdfast does not implement this feature of a format, or the installed version is too old.

    Example:
        `holdfast.convert("model.pt", "model.gguf")`: Holdfast reads GGUF and does not write it.

    What to do:
        The message names an alternative if there is one. A newer version may help.
    """


class NoSuchTensor(HoldfastError, KeyError):
    """A checkpoint has no tensor of this name.

    Cause:
        The name is misspelled or has another prefix in this checkpoint.

    Example:
        `holdfast.open("model.pt")["embed.wieght"]`

    What to do:
        The message suggests similar names. `list(checkpoint)` has all of them.
    """

    # KeyError shows the repr of its argument, which is hard to read for a sentence.
    __str__ = HoldfastError.__str__


class NoSuchStep(HoldfastError, KeyError):
    """A run has no complete step of this number.

    Cause:
        The step was never saved, was deleted by a retention rule, or its save did not finish.

    Example:
        `holdfast.Run("runs/a").rewind(1000)`, if the rules of the run deleted step 1000.

    What to do:
        `holdfast.Run(path).steps()` lists the complete steps.
    """

    # As in NoSuchTensor.
    __str__ = HoldfastError.__str__


class BadIndex(HoldfastError, IndexError):
    """An index does not fit the tensor, or it would read more than it selects.

    Cause:
        An index is out of range, or it uses numpy's advanced indexing.

    Example:
        `checkpoint["w"][5]`, if the first dimension of `w` is 4.

    What to do:
        Use integers, slices, `...` and None. For other indices, read the tensor and index the
        array: `checkpoint["w"].numpy()[indices]`.
    """


class SaveError(HoldfastError, OSError):
    """A save failed. The subclasses say what is at the target.

    Cause:
        The state changed while it was saved, or one of the causes of the subclasses.

    Example:
        `holdfast.torch.async_save_sharded(path, state).wait()`, if the storage of a tensor was
        resized while it was saved.

    What to do:
        Correct the cause that the message names, and save again.
    """


class NotCommitted(SaveError):
    """A save failed before it was visible. The target is unchanged.

    Cause:
        The disk is full, a permission is missing, or the target exists already.

    Example:
        `holdfast.save(state, "model.pt")`, if the disk is full. The old `model.pt` is intact.

    What to do:
        Correct the cause that the message names, and save again. There is nothing to clean up.
    """


class BadPath(StoreError, NotCommitted):
    """A path cannot lead to a checkpoint on this machine. Nothing was read or written.

    Cause:
        The path is empty, or it is a URL of a scheme that Holdfast does not read.

    Example:
        `holdfast.open("ftp://host/model.pt")`

    What to do:
        Pass a local path, or a URL such as `s3://bucket/model.pt`.
    """


class NotAPath(BadPath, TypeError):
    """A path has the wrong type.

    Cause:
        A path must be a `str` or an `os.PathLike` object.

    Example:
        `holdfast.save(state, 3)`

    What to do:
        Check the order of the arguments.
    """


class DurabilityUncertain(SaveError):
    """The new content is in place, but it may be lost in a power cut.

    Cause:
        The file system reported an error when the finished save was flushed, or an object store
        did not answer the request that publishes a save.

    Example:
        `holdfast.save(state, "/mnt/nfs/model.pt")`, if the server fails during the last `fsync`.

    What to do:
        Check the disk or the store, and save again. `holdfast verify` compares what is there with
        its checksums.
    """


class RanksFailed(NotCommitted):
    """A save or load of several ranks failed. Every rank raises this error.

    Nothing was published. A group of one process raises the error itself instead.

    Cause:
        At least one rank failed. The message and `causes` say which ones, and why.

    Example:
        `holdfast.torch.save_sharded(path, state)`, if the disk of rank 3 is full.

    What to do:
        Correct the causes, and repeat the call on every rank.

    Attributes:
        causes: The message of each rank that failed, by the number of the rank.
        errno: The code of the system, if all causes have the same one.
    """

    def __init__(self, message: str, *, causes: Mapping[int, str], file: str | None = None) -> None:
        # The subclasses inherit from several errors, whose constructors have other parameters.
        HoldfastError.__init__(self, message, file=file, found=tuple(causes))
        self.causes = dict(causes)


class RanksFoundNothing(RanksFailed, NoSuchPath):
    """Every rank of a group found nothing at a path.

    If only some ranks find nothing, they raise `RanksFailed`: a disk that is missing on one machine
    is not a reason to start from scratch.

    Cause:
        The path is misspelled, or nothing was saved there yet.

    Example:
        `holdfast.torch.load_sharded("missing", state)`

    What to do:
        Check the path.
    """

    def __init__(self, message: str, path: str | None, *, causes: Mapping[int, str]) -> None:
        super().__init__(message, causes=causes)
        self.path = path

    @property
    def filename(self) -> str | None:
        """The path or URL."""
        return self.path


class RankLost(SaveError):
    """A rank sent no heartbeat before the deadline.

    Cause:
        The process was killed, its machine failed, or the network between the ranks is down.

    Example:
        `holdfast.torch.save_sharded(path, state)`, if the process of rank 3 was killed.

    What to do:
        Restart the job from the last checkpoint. If ranks are only slow, raise `deadline=`.

    Attributes:
        ranks: The numbers of the lost ranks.
    """

    def __init__(self, message: str, *, ranks: tuple[int, ...]) -> None:
        super().__init__(message, found=ranks)
        self.ranks = ranks


def _shorten_problems(problems: Sequence[str]) -> list[str]:
    """Return the first problems of a list for a message, with a line that counts the others."""
    shown_problems = list(problems[:MAX_SHOWN_PROBLEMS])
    hidden_count = len(problems) - len(shown_problems)
    if hidden_count:
        shown_problems.append(f"… and {hidden_count:,} more")
    return shown_problems


def _join_problems(summary: str, shown_problems: Sequence[str]) -> str:
    """Return a message with a summary and a list of problems, one on each line."""
    return "\n  - ".join([summary, *shown_problems])


class CannotHold(HoldfastError, ValueError):
    """A format cannot store a state. Nothing was written.

    Cause:
        The state has a value, a name or a dtype for which the format has no representation.

    Example:
        `holdfast.save({"optimizer": object()}, "state.safetensors")`

    What to do:
        Choose another format, or leave the values out: `tensors_only=True`, `drop=`. `problems`
        lists everything that does not fit.

    Attributes:
        problems: Everything that the format cannot store, a sentence each.
        shown_problems: The problems that the message lists.
        summary: The first line of the message.
    """

    def __init__(self, message: str, problems: Sequence[str], *, file: str | None = None) -> None:
        self.summary = message
        self.problems = tuple(problems)
        self.shown_problems = _shorten_problems(problems)
        super().__init__(_join_problems(message, self.shown_problems), file=file)


class RanksRefused(RanksFailed, CannotHold):
    """The format cannot store the state of the ranks. Every rank raises this error.

    Cause:
        As for `CannotHold`. All ranks that failed had that error.

    Example:
        `holdfast.torch.save_sharded(path, {"x": object()}, format="safetensors")`

    What to do:
        As for `CannotHold`, on every rank.
    """

    def __init__(
        self,
        message: str,
        problems: Sequence[str],
        *,
        causes: Mapping[int, str],
        file: str | None = None,
    ) -> None:
        RanksFailed.__init__(self, message, causes=causes, file=file)
        self.summary = message
        self.problems = tuple(problems)
        self.shown_problems = list(problems)


class BadPlacement(HoldfastError, ValueError):
    """A mesh, or a rule that spreads tensors over it, does not fit the checkpoint.

    Cause:
        A rule is misspelled, matches no tensor, or names a dimension that a tensor does not have.

    Example:
        `holdfast.reshard("in", "out", rules=["*.weight: tp=5"], mesh={"tp": 2})`

    What to do:
        Correct the rule or the mesh that the message names.
    """


class BadMap(HoldfastError, ValueError):
    """A map between layouts of weights cannot be read or applied.

    Cause:
        The definition of a family of models has a mistake, or the family has no such layout.

    Example:
        `holdfast.convert("in", "out", map="qwen3:hf:unknown")`

    What to do:
        `holdfast maps` lists the families and their layouts.
    """


class BadArgument(HoldfastError, ValueError):
    """An argument has a value that is not allowed. Nothing was read or written.

    Cause:
        A number is out of range, or a word is not one of the allowed ones.

    Example:
        `holdfast.convert("in.pt", "out.pt", threads=0)`

    What to do:
        Pass a value that the message describes.
    """


class BadArgumentType(BadArgument, TypeError):
    """An argument has a wrong type, or the function has no such parameter.

    Cause:
        A value of another type was passed, or the name of a parameter is misspelled.

    Example:
        `holdfast.convert("in.pt", "out.pt", overwrite="no")`

    What to do:
        Pass a value that the message describes.
    """


class BadTarget(HoldfastError, ValueError):
    """An array or a file cannot receive what is read.

    Cause:
        The array has another shape or dtype than the tensor, is read-only, or is not an array.

    Example:
        `checkpoint["w"].read(out=np.empty(3))`, if `w` has four elements.

    What to do:
        Allocate an array with the shape and the dtype of the tensor.
    """


class DoesNotFit(HoldfastError, RuntimeError):
    """A checkpoint and a module or state do not match.

    torch's `load_state_dict` raises a RuntimeError in this case.

    Cause:
        Names, shapes or dtypes differ.

    Example:
        `holdfast.torch.load_into(model, "other-model.pt")`

    What to do:
        Check that the checkpoint belongs to the model. To load only what matches, pass
        `strict=False`.

    Attributes:
        missing: Names of the destination that the checkpoint does not have.
        unexpected: Names of the checkpoint that the destination does not have.
        mismatched: Names that both have and that cannot be loaded, with the reason.
        shown_problems: The problems that the message lists.
        summary: The first line of the message.
    """

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
        """Make an error whose message is a summary and a list of problems."""
        self.summary = message
        self.shown_problems = _shorten_problems(problems)
        super().__init__(_join_problems(message, self.shown_problems), file=file)
        self.missing = tuple(missing)
        self.unexpected = tuple(unexpected)
        self.mismatched = dict(mismatched or {})


class Refused(HoldfastError, RuntimeError):
    """`holdfast.torch` refuses a call for which torch raises a RuntimeError.

    So an `except RuntimeError` that was written for torch catches it as well.

    Cause:
        The call is not allowed at this moment or for these tensors.

    Example:
        `holdfast.torch.save(state, path)` while a CUDA graph is being captured.

    What to do:
        Follow the message.
    """


class NotSaved(NotCommitted, Refused):
    """`holdfast.torch.save` failed, and the target is unchanged.

    Cause:
        As for `NotCommitted`. It is a RuntimeError as well, because torch raises one here.

    Example:
        `holdfast.torch.save(state, "model.pt")`, if there is a folder of this name.

    What to do:
        Correct the cause that the message names, and save again.
    """


class Closed(HoldfastError, ValueError):
    """A checkpoint or a run is used after it was closed.

    Cause:
        A tensor is read after the `with` block of its checkpoint ended.

    Example:
        `with holdfast.open("model.pt") as checkpoint: w = checkpoint["w"]`, and then `w.numpy()`.

    What to do:
        Read inside of the block, or open the checkpoint again.
    """


class error_context:  # noqa: N801  # named like a function, as it is used in a `with` statement
    """Add a file or a tensor to each Holdfast error that leaves a `with` block.

    An error that has a file or a tensor already keeps it.

    This is a class and not a generator with `contextmanager`, which takes longer than many of the
    blocks do.

    >>> with error_context(file="model.pt"):
    ...     raise Truncated("the file is empty")
    Traceback (most recent call last):
    holdfast.errors.Truncated: the file is empty (file 'model.pt')
    """

    __slots__ = ("_file", "_tensor")

    def __init__(self, *, file: str | None = None, tensor: str | None = None) -> None:
        self._file = file
        self._tensor = tensor

    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Add the file and the tensor to an error that has none."""
        if isinstance(error, HoldfastError):
            if error.file is None:
                error.file = self._file
            if error.tensor is None:
                error.tensor = self._tensor


E = TypeVar("E", bound=BaseException)


def drop_tracebacks(error: E) -> E:
    """Remove the tracebacks of an error, and of the errors that caused it, and return the error.

    This is for an error that is stored in an object. Its traceback refers to the variables of all
    callers, among them the state of a training loop. If one of them is the object that stores the
    error, they would form a cycle, which stays in memory until the garbage collector runs.
    """
    pending: list[BaseException | None] = [error]
    while pending:
        current = pending.pop()
        # An error without a traceback was handled before, so a cycle of causes ends here.
        if current is not None and current.__traceback__ is not None:
            current.__traceback__ = None
            pending += [current.__cause__, current.__context__]
    return error


def __dir__() -> list[str]:
    return sorted(__all__)
