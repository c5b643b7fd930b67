"""`scan`: what would these files have done, had a trusting loader loaded them?

1. Directories are searched; each file in them is recognised by its content.
2. A checkpoint is opened by the one parser that `open` uses; what it kept as `foreign` is the finding. A bare pickle
   goes through the same interpreter.
3. Each foreign global is ranked (`severity.py`) and shown with the calls and places that the tree holds
   (`evidence.py`). Streams inside streams (tensors pickled without `torch.save`) are scanned as well.
4. A file that cannot be parsed to its end is an error, never "nothing found". In a directory, what is neither a
   checkpoint nor a pickle is counted as skipped, unless its suffix is one that programs load as a pickle.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from holdfast.api.evidence import Evidence, gather
from holdfast.api.open import open as open_checkpoint
from holdfast.api.open import store_of
from holdfast.api.severity import ORDER, Severity, judge
from holdfast.core.limits import Limits
from holdfast.core.opaque import Global
from holdfast.core.protocols import Foreign
from holdfast.engine.source import OpenSource
from holdfast.errors import BadPath, FormatError, HoldfastError, LimitExceeded, Truncated, UnknownFormat
from holdfast.formats.dcp.directory import DATA_SUFFIX, DcpDirectory
from holdfast.formats.dcp.examine import examine
from holdfast.formats.dcp.index import is_index
from holdfast.formats.pickle import PlainTable, interpret, interpret_whole
from holdfast.stores.paths import found_path, local_path

__all__ = ["FileReport", "Finding", "ScanReport", "Verdict", "scan"]

Verdict = Literal["clean", "suspicious", "error"]

SUFFIXES = frozenset({".bin", ".ckpt", ".dill", ".joblib", ".pickle", ".pkl", ".pt", ".pt2", ".pth", ".ptl", ".th"})
"""What programs hand to `torch.load` and `pickle.load`.

Such a file in a directory is never skipped, whatever it holds.
"""

HEAD_NBYTES = 1 << 16
"""How much of an unknown file is tried as a pickle before it is called something else.

Text fails within a few bytes.
"""

PICKLE_RECORD = b"data.pkl"
"""The record that makes a zip a checkpoint."""

NESTED = Global("torch.storage", "_load_from_bytes")
"""How a tensor pickles itself without `torch.save`: a call with a whole torch file as bytes."""

DEEPEST = 3
"""Files inside files that are followed."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One global that the file mentions and that Holdfast did not build."""

    severity: Severity
    what: str
    """`module.name`, raw text out of the file."""
    reason: str
    uses: tuple[str, ...]
    """`mention`, `call`, `new`, `build`: what the stream does with it."""
    calls: tuple[str, ...]
    """Up to three calls with their arguments in short, printable form; empty where it is not called.

    `module.name(…)` where the stream throws the outcome away, and with it the arguments.
    """
    stream: str
    """Which pickle of the file."""
    offset: int
    """Byte of that pickle."""
    paths: tuple[str, ...]
    """Up to three places in the tree."""


@dataclass(frozen=True, slots=True)
class FileReport:
    """What one file holds. With an `error`, it was not read to its end and the findings are not complete."""

    path: str
    format: str
    """As `Checkpoint.format`; `pickle` for a bare one; empty where it is not known."""
    findings: tuple[Finding, ...] = ()
    error: str | None = None


@dataclass(frozen=True, slots=True)
class ScanReport:
    """What all the files hold."""

    files: tuple[FileReport, ...]
    skipped: int = 0
    """Files in directories that are neither checkpoints nor pickles."""

    def count(self, severity: Severity) -> int:
        """Findings of one severity."""
        return sum(f.severity == severity for file in self.files for f in file.findings)

    def verdict(self, *, strict: bool = False) -> Verdict:
        """`error` where a file could not be read; else `suspicious` where something is at least that; else `clean`.

        With `strict`, unknown globals are suspicious.
        """
        if any(file.error is not None for file in self.files):
            return "error"
        bad: tuple[Severity, ...] = ("dangerous", "suspicious", "unknown") if strict else ("dangerous", "suspicious")
        return "suspicious" if any(self.count(severity) for severity in bad) else "clean"


def scan(*paths: str | os.PathLike[str], limits: Limits | None = None) -> ScanReport:
    """Report on files and directories.

    Nothing in them is run, and nothing about them raises: errors are part of the report.
    """
    files: list[FileReport] = []
    skipped = 0
    for path in paths:
        try:
            place = local_path(path)
        except BadPath as error:
            files.append(FileReport(str(path), "", error=_described(error)))
            continue
        if not os.path.isdir(place):
            files.append(_scan_file(Path(place), limits or Limits()))
            continue
        for found in _search(Path(place)):
            report = found if isinstance(found, FileReport) else _scan_found(found, limits or Limits())
            if report is None:
                skipped += 1
            else:
                files.append(report)
    return ScanReport(tuple(files), skipped)


def _search(directory: Path) -> Iterator[Path | FileReport]:
    """Every file below a directory, sorted; a folder that cannot be listed as an error.

    A distributed checkpoint is one thing, and stands for its files: a part of it says nothing. Links to folders are not followed.
    """
    problems: list[OSError] = []
    for folder, folders, names in os.walk(directory, onerror=problems.append):
        folders.sort()
        distributed = any(map(is_index, names))
        if distributed:
            yield Path(folder)
        for name in sorted(names):
            if not distributed or not (is_index(name) or name.endswith(DATA_SUFFIX)):
                yield Path(folder, name)
    for problem in problems:
        yield FileReport(str(problem.filename), "", error=f"cannot list this folder: {problem.strerror}")


def _scan_found(path: Path, limits: Limits) -> FileReport | None:
    """One file of a directory, or a distributed checkpoint; None when it is none of our business."""
    if path.is_dir():
        return _scan_file(path, limits)
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            return None
    except FileNotFoundError:
        return None  # a link to nowhere: nobody can load it either
    except OSError:
        pass  # opening it says what is wrong
    if path.suffix.lower() in SUFFIXES:
        return _scan_file(path, limits)
    try:
        return _scan_checkpoint(path, limits)
    except UnknownFormat:
        return _scan_file(path, limits) if _like_pickle(path, limits) else None
    except FormatError as error:
        return None if _other_zip(path) else FileReport(str(path), "", error=str(error))
    except Exception as error:
        return FileReport(str(path), "", error=_described(error))


def _scan_file(path: Path, limits: Limits) -> FileReport:
    """One file that must be something: a checkpoint or a pickle."""
    try:
        try:
            return _scan_checkpoint(path, limits)
        except UnknownFormat:
            if not _like_pickle(path, limits):
                raise
            return _scan_pickle(path, limits)
    except Exception as error:
        # A scan of a thousand files does not end at the first surprise; even a bug of ours is reported as
        # an error of this file.
        return FileReport(str(path), "", error=_described(error))


def _described(error: Exception) -> str:
    if isinstance(error, HoldfastError):
        return str(error)
    return f"{type(error).__name__}: {error}"


def _scan_checkpoint(path: Path | bytes, limits: Limits, depth: int = 0) -> FileReport:
    with open_checkpoint(found_path(str(path)) if isinstance(path, Path) else path, limits=limits) as checkpoint:
        foreign = checkpoint.foreign
        if checkpoint.format == DcpDirectory.name:
            foreign += examine(checkpoint.tree, checkpoint.values())
        findings = _findings(foreign, checkpoint.tree, limits, depth)
        return FileReport(str(path) if isinstance(path, Path) else "", checkpoint.format, findings)


def _scan_pickle(path: Path, limits: Limits) -> FileReport:
    done = interpret_whole(_read(path, limits), PlainTable(), limits=limits, stream="pickle")
    return FileReport(str(path), "pickle", _findings(done.foreign, done.value, limits, 0))


def _like_pickle(path: Path, limits: Limits) -> bool:
    """Whether the bytes begin as a pickle does: with its protocol, or with opcodes that lead to a STOP or beyond the
    head.
    """
    head = _read(path, limits, HEAD_NBYTES)
    if len(head) > 1 and head[0] == 0x80 and head[1] <= 5:
        return True
    try:
        interpret(head, PlainTable(), limits=limits, stream="pickle")
    except (Truncated, LimitExceeded):
        return len(head) == HEAD_NBYTES
    except HoldfastError:
        return False
    return True


def _other_zip(path: Path) -> bool:
    """Whether this is a zip that no torch reads (a wheel, an .npz, a document), so that refusing it says nothing.

    torch wants a record `data.pkl`, and no zip compresses the names of its records: without these bytes there is none.
    """
    with path.open("rb") as file:
        piece = file.read(1 << 20)
        if not piece.startswith(b"PK"):
            return False
        while piece:
            if PICKLE_RECORD in piece:
                return False
            more = file.read(1 << 20)
            piece = piece[-len(PICKLE_RECORD) :] + more if more else b""
    return True


def _read(path: Path, limits: Limits, most: int | None = None) -> bytes:
    """The whole file, if the limit allows that, or its first bytes."""
    store = store_of(found_path(str(path)), limits)
    try:
        source = OpenSource(store, limits=limits, threads=1, mapped=False)
        (key,) = store.list()
        size = store.size(key)
        if most is not None:
            return source.bytes(key, 0, min(size, most))
        if size > limits.pickle_nbytes:
            raise LimitExceeded(
                f"the pickle is {size:,} bytes, above Limits(pickle_nbytes={limits.pickle_nbytes:,})",
                file=str(path),
                expected=limits.pickle_nbytes,
                found=size,
            )
        return source.bytes(key, 0, size)
    finally:
        store.close()


def _findings(foreign: tuple[Foreign, ...], tree: object, limits: Limits, depth: int) -> tuple[Finding, ...]:
    """The worst first, then in the order of the stream."""
    evidence = gather(tree) if foreign else {}
    findings: list[Finding] = []
    for item in foreign:
        seen = evidence.get(item.what, Evidence())
        finding = _finding(item, seen)
        if item.what == NESTED:
            finding, more = _nested(finding, seen.nested, limits, depth)
            findings += more
        findings.append(finding)
    return tuple(sorted(findings, key=lambda f: (ORDER.index(f.severity), f.stream, f.offset)))


def _finding(item: Foreign, seen: Evidence) -> Finding:
    severity, reason = judge(item.what, item.uses)
    # INST and OBJ call as REDUCE does, and are noted as `new`; a class that gets arguments is worth the same look.
    calls = tuple(seen.calls) if "call" in item.uses or ("new" in item.uses and seen.arguments) else ()
    if "call" in item.uses and not calls:
        calls = (f"{item.what}(…)",)
    return Finding(severity, str(item.what), reason, item.uses, calls, item.stream, item.offset, item.paths or tuple(seen.paths))


def _nested(finding: Finding, streams: list[bytes], limits: Limits, depth: int) -> tuple[Finding, list[Finding]]:
    """Follow tensors that carry a whole torch file as bytes.

    Where all of them can be read, the call itself is ordinary.
    """
    more: list[Finding] = []
    if not streams or depth >= DEEPEST:
        return finding, more
    for stream in streams:
        try:
            report = _scan_checkpoint(stream, limits, depth + 1)
        except HoldfastError:
            return finding, more
        more += [replace(f, stream=f"{finding.stream} > {f.stream}") for f in report.findings]
    return replace(finding, severity="known", reason="a tensor pickled with its file inside, which was scanned as well"), more
