"""The walk: from the bytes of a file to everything in it that some stock loader would carry out.

1. Bytes are looked at for every container that they may be, not for the first that fits: a pickle or several, a zip at the start
   or at the end or several one behind the other, a tar, an array of numpy, something compressed. One file may be two of them, and
   which one is loaded depends on who loads it: then both are read, and that is a finding of its own.
2. What is inside of a container is looked at in the same way, whatever its name, to a depth and within a budget.
3. Every pickle goes through the closed interpreter, which records what it would do (`formats/pickle/recording.py`).
4. What could not be read is an error of the file. It never takes a finding away.

Any bytes can be tried for pickles. A loader that is given what is no pickle fails before it has done anything, and so does the
recording: no global, no call, a break. Bytes count as a pickle if they (a) say so by the first opcode, or (b) do something before
they break, or (c) are nothing but whole pickles.

torch.export hands every `expr_str` of a program to sympy, which evaluates it as Python. A plain one is arithmetic of symbols and
a few functions, and everything else is reported. TorchScript is no Python, but its `__setstate__` runs when the file is loaded,
and its functions can write files. torch.package imports the Python in its archive. A compiled model is a library that is loaded.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator

from msgspec import Struct, field

from holdfast.core.limits import Limits
from holdfast.core.value import Value
from holdfast.errors import HoldfastError
from holdfast.formats.detect import MAGIC, begins_like_tar
from holdfast.formats.pickle.recording import RecordedStream, read_ahead, record_from_file
from holdfast.formats.torch.legacy import describe_legacy
from holdfast.formats.torch.storages import storage_dtype
from holdfast.verbs.scanning.archives import (
    UNREADABLE,
    Span,
    ZipEntry,
    compression,
    entries_of,
    last_zip,
    members_of,
    span_of,
    unpack,
)
from holdfast.verbs.scanning.findings import Findings
from holdfast.verbs.severity import Severity, judge

OLD_PROGRAM = "serialized_exported_program.json"
"""The record of a `.pt2` without a folder, which torch wrote before 2.8 and still loads."""

MOST_STREAMS = 10_000
"""Pickles of one span that are read, one behind the other. torch's old container has five."""


class Stream(Value, frozen=True):
    """One pickle: where it begins, and what it does. Unpicklers that read it differently have a reading each."""

    begin: int
    readings: tuple[RecordedStream, ...]

    @property
    def misframed(self) -> str:
        """How opcodes break the rule that they stay inside their frames; empty if they do not."""
        messages = [reading.table.misframed for reading in self.readings]
        return next(filter(None, messages), "")

    @property
    def last(self) -> RecordedStream:
        """The reading that got furthest."""
        return next((r for r in self.readings if r.stop is not None), self.readings[-1])

    @property
    def stop(self) -> int | None:
        return None if self.last.stop is None else self.begin + self.last.stop

    @property
    def acts(self) -> bool:
        """Whether a loader would have done anything that matters by the time it is through, or fails."""
        if self.misframed or any(reading.acts for reading in self.readings):
            return True
        names = [
            (seen.what, seen.uses)
            for reading in self.readings
            for seen in reading.table.seen.values()
        ]
        # A name that Python could import may be dangerous by being imported, or by whatever comes next.
        could = [
            one for one in names if all(part.isidentifier() for part in str(one[0]).split("."))
        ]
        return any(judge(what, uses)[0] == "dangerous" for what, uses in could)


class PickleRow(Struct):
    """The pickles one behind the other at the start of a span."""

    streams: list[Stream] = field(default_factory=list)
    broken: Stream | None = None
    """The one that has no end; or what is behind the others."""
    stop: int = 0
    """The byte behind the last whole one."""
    declared: bool = False
    """Whether the first opcode says that this is a pickle."""
    more: bool = False
    """Whether there were more than `MOST_STREAMS`."""

    def counts(self, nbytes: int) -> bool:
        """Whether this is a pickle, by the rules (a) to (c)."""
        everything = [*self.streams, *([self.broken] if self.broken else [])]
        plainly = (
            bool(self.streams)
            and self.stop == nbytes
            and not any(s.last.table.notes for s in self.streams)
        )
        return self.declared or self.more or plainly or any(s.acts for s in everything)


def read_row(span: Span, limits: Limits) -> PickleRow:
    head = span.read(0, 2)
    row = PickleRow(declared=len(head) == 2 and head[0] == 0x80 and head[1] <= 5)
    while row.stop < span.nbytes:
        if len(row.streams) >= MOST_STREAMS:
            row.more = True
            break
        stream = read_pickle(span, row.stop, limits)
        if stream.stop is None:
            row.broken = stream
            break
        row.streams.append(stream)
        row.stop = stream.stop
    return row


def read_pickle(span: Span, begin: int, limits: Limits) -> Stream:
    """Read the pickle that begins at a position, in each way in which a stock loader may read it.

    joblib expects the elements of arrays between opcodes, and unpicklers disagree on opcodes that
    do not stay inside their frames.
    """
    rest = span.part(begin, span.nbytes)
    readings = [read_ahead(rest.read, rest.nbytes, limits)]
    if readings[0].table.arrays:
        readings.insert(0, read_ahead(rest.read, rest.nbytes, limits, joblib=True))
    if any(reading.table.misframed for reading in readings):
        data = rest.read(0, min(rest.nbytes, limits.pickle_nbytes + 1))
        readings.append(record_from_file(data, limits=limits))
    return Stream(begin, tuple(readings))


EXPRESSION = re.compile(
    r"(?:[A-Za-z][A-Za-z0-9_]*|[0-9]+(?:\.[0-9]*)?(?:[eE][-+]?[0-9]+)?|[-+*/%(),<>=!&|~^ \t\n])*"
)
SYMBOL = re.compile(r"\bSymbol\('[A-Za-z][A-Za-z0-9_]*'")
ATTRIBUTE = re.compile(r"(?:\b[A-Za-z_]\w*|\))\s*\.|\.\s*[A-Za-z_(]")
CALL = re.compile(r"([A-Za-z][A-Za-z0-9_]*)[ \t\n]*\(")
FUNCTIONS = """
    Add Equality GreaterThan LessThan Mul StrictGreaterThan StrictLessThan Unequality Abs And BitwiseFn_bitwise_and
    BitwiseFn_bitwise_or CeilDiv CeilToInt CleanDiv Eq FloatPow FloatTrueDiv FloorDiv FloorToInt Ge Gt Identity IntTrueDiv
    IsNonOverlappingAndDenseIndicator LShift Le Lt Max Min Mod ModularIndexing Ne Not OpaqueUnaryFn_acos OpaqueUnaryFn_cos
    OpaqueUnaryFn_exp OpaqueUnaryFn_log OpaqueUnaryFn_sin OpaqueUnaryFn_sqrt OpaqueUnaryFn_tan Or Piecewise Pow PowByNatural
    PythonMod RShift RoundDecimal RoundToInt ToFloat TruncToFloat TruncToInt Where Xor ceiling exp floor log max min sqrt
    Rational Integer Float Symbol Tuple
    and or not True False None if else in is
"""
"""What may stand before a bracket: functions that sizes are made with, and words of Python."""

_FUNCTIONS = frozenset(FUNCTIONS.split())

LONGEST_CHARACTERS = 10_000
"""Characters of an expression. Sizes of tensors make a few hundred."""

NATIVE = (
    (b"\x7fELF", "a library for Linux"),
    (b"MZ", "a library for Windows"),
    (b"\xcf\xfa\xed\xfe", "a library for macOS"),
    (b"\xca\xfe\xba\xbe", "a library for macOS"),
    (b"!<arch>\n", "an archive of object files"),
)

FILES = re.compile(r"\b(?:torch|ops\s*\.\s*aten|aten)\s*(?:\.|::)\s*(save|load|from_file)\b")
OPERATORS = re.compile(r"\bops\.([A-Za-z_][A-Za-z0-9_]*)\.([A-Za-z_][A-Za-z0-9_]*)")
SETSTATE = re.compile(r"\bdef\s+__setstate__\b")
USUAL = frozenset(("prims", "aten", "quantized", "torchvision", "prim", "inductor", "_quantized"))


def native_code(head: bytes) -> str | None:
    """What kind of machine code content is that begins like this."""
    return next((name for magic, name in NATIVE if head.startswith(magic)), None)


def odd_expressions(text: bytes) -> list[str] | None:
    """The expressions in a JSON document that are more than arithmetic, in short; None where it is no JSON."""
    odd: dict[str, None] = {}

    def collect(pairs: list[tuple[str, object]]) -> None:
        for key, value in pairs:
            if key == "expr_str" and not (isinstance(value, str) and plain(value)):
                odd[value if isinstance(value, str) else str(value)[:200]] = None

    try:
        json.loads(text, object_pairs_hook=collect)
    except (ValueError, RecursionError):
        return None
    return [one if len(one) <= 80 else one[:80] + "…" for one in odd]


def plain(expression: str) -> bool:
    """Whether an expression is arithmetic of symbols and of functions that sizes are made with.

    >>> plain("2*s0 + Max(1, s1//3)"), plain("Mul(Integer(2), Symbol('s0', positive=True))")
    (True, True)
    >>> plain("().__class__"), plain("f(1)"), plain("'a'"), plain("s0.real")
    (False, False, False, False)
    """
    if len(expression) > LONGEST_CHARACTERS or "__" in expression or ATTRIBUTE.search(expression):
        return False
    # As sympy writes out a symbol: its name is the one text that belongs here.
    unquoted = SYMBOL.sub("Symbol(s", expression)
    return EXPRESSION.fullmatch(unquoted) is not None and _FUNCTIONS.issuperset(
        CALL.findall(unquoted)
    )


def torchscript(text: str) -> Iterator[tuple[Severity, str, str]]:
    """Severity, what it is and why that matters, of everything odd in one record of TorchScript code."""
    runs = SETSTATE.search(text) is not None
    files = sorted(set(FILES.findall(text)))
    if files:
        when = "when it is loaded" if runs else "when it is called"
        yield (
            "dangerous",
            f"TorchScript torch.{files[0]}",
            f"code that reads or writes files {when}",
        )
    spaces = sorted({space for space, _ in OPERATORS.findall(text)} - USUAL)
    if spaces:
        yield (
            "suspicious",
            f"TorchScript ops.{spaces[0]}",
            "code that calls operators of a library that nothing here knows",
        )
    if runs and not files:
        yield (
            "unknown",
            "TorchScript __setstate__",
            "code that runs when it is loaded; TorchScript is no Python and cannot import",
        )


WHOLE = "pickle"
"""The label of a file that is looked at by itself; its records go by their own names."""

HEAD_NBYTES = 1 << 12
DEEPEST_LEVELS = 6

CONTENT_HEAD_NBYTES = 1 << 16
"""Unpacked bytes of a record that show whether it is worth more."""

EXPANSION, EXPANSION_FLOOR = 64, 256 << 20
"""What one file may unpack to: so many times its size, and so much at least."""

TOTAL_RECORDS = 2_000_000

NPY = b"\x93NUMPY"
OBJECTS = re.compile(rb"['\"][|<>=]?O[0-9]*['\"]")
MISFRAMED = (
    "no writer does that, and pickle.load of a file may run other opcodes than pickle.loads; "
    "both were read"
)
READ_AS_WELL = "a tensor pickled with its file inside, which was scanned as well"
TAR_NUMBERS = {b"storages", b"tensors"}


class FileScan:
    """One file, or one folder that is one checkpoint."""

    def __init__(self, limits: Limits, nbytes: int) -> None:
        self.limits = limits
        self.found = Findings()
        self.kinds: set[str] = set()
        """The formats that the bytes of the file itself are: `pickle`, `legacy`, `zip`, `npz`, `tar`, `npy`, `gzip`, …"""
        self.streams = 0
        self.items: list[dict[object, object]] = []
        """Items of a distributed checkpoint, as its index has them."""
        self.zips: set[tuple[str, int, int]] = set()
        """Where archives were found: key, first byte, last byte + 1."""
        self.trailing: str | None = None
        """An error about bytes behind the pickles, which counts unless `open` accepts the file."""
        self.torch_zip = False
        """Whether the file is an archive with the records that torch loads."""
        self._unpacked = EXPANSION * nbytes + EXPANSION_FLOOR
        self._records = TOTAL_RECORDS

    def look(self, span: Span, label: str, depth: int = 0) -> set[str]:
        """Look at some bytes for all formats that they may be. Gives these; none where no loader would do anything with them."""
        if depth > DEEPEST_LEVELS:
            self.found.error(
                f"{label}: containers inside of containers, deeper than {DEEPEST_LEVELS}; not read"
            )
            return {"unread"}
        head = span.read(0, HEAD_NBYTES)
        kinds: set[str] = set()
        if not head.startswith(
            b"PK\3\4"
        ):  # PERSID, at which an unpickler stops that was pointed at a file
            kinds |= self._pickles(span, label, depth)
        if begins_like_tar(head):
            kinds |= self._tar(span, label, depth)
        kinds |= self._zips(span, head, label, depth=depth)
        if head.startswith(NPY):
            kinds |= self._npy(span, head, label)
        kinds |= self._compressed(span, head, label, depth=depth)
        if depth == 0:
            self.kinds |= kinds
        several = sorted(kinds & {"pickle", "legacy", "tar", "zip", "npy", "compressed"})
        if len(several) > 1:
            reason = "which one is loaded depends on who loads it; torch tries tar first"
            self.found.add_other(
                "suspicious",
                f"one file, several formats: {', '.join(several)}",
                reason,
                stream=label,
            )
        return kinds

    # Pickles.

    def _pickles(self, span: Span, label: str, depth: int, *, must: bool = False) -> set[str]:
        row = read_row(span, self.limits)
        if not must and not row.counts(span.nbytes):
            return set()
        for number, stream in enumerate(row.streams, 1):
            self.stream(stream, f"{label} {number}" if len(row.streams) > 1 else label, depth)
        legacy = bool(row.streams) and row.streams[0].last.value == MAGIC
        self._end_of(row, span, label, depth=depth, legacy=legacy)
        return {"legacy" if legacy else "pickle"}

    def _end_of(self, row: PickleRow, span: Span, label: str, *, depth: int, legacy: bool) -> None:
        if row.more:
            self.found.error(
                f"{label}: more than {len(row.streams):,} pickles one behind the other; not read further"
            )
        if row.broken is None:
            if not row.streams:
                self.found.error(f"{label}: no pickle where one belongs")
            return
        if not row.streams or row.broken.acts:
            self.stream(row.broken, label, depth)
            return
        behind = span.nbytes - row.stop
        if span.read(row.stop, row.stop + 64).strip(b"\0\r\n ") or behind > 64:
            text = f"{label}: {behind:,} bytes behind the end of the pickle, at byte {row.stop:,}, that are no pickle"
            if depth == 0 and legacy:
                self.trailing = text
            elif not (legacy and self._old_container(span)):
                self.found.error(text)

    def _old_container(self, span: Span) -> bool:
        """Whether what is behind the pickles are the storages of torch's old container, each with its length."""
        try:
            describe_legacy(span_of(span.read(0, span.nbytes), self.limits).source)
        except HoldfastError:
            return False
        return True

    def stream(self, stream: Stream, label: str, depth: int) -> None:
        self.streams += 1
        last = stream.last
        for reading in stream.readings:
            table = reading.table
            self.items += table.items
            followed = self._nested(reading.table.nested, label, depth)
            unread = {id(seen) for seen in table.unread} | followed
            for place, seen in table.seen.items():
                before = stream.readings[0].table.seen.get(place)
                if before is not None and before is not seen and seen.uses <= before.uses:
                    continue
                nested = (
                    seen.what.name == "_load_from_bytes"
                    and "call" in seen.uses
                    and id(seen) not in unread
                )
                self.found.add_global(
                    seen, label, stream.begin, ordinary=READ_AS_WELL if nested else ""
                )
        if stream.misframed:
            self.found.add_other(
                "suspicious", f"misleading frames: {stream.misframed}", MISFRAMED, stream=label
            )
        for note in last.table.notes:
            self.found.error(f"{label}: {note}; no writer does that")
        if last.error is not None:
            where = label if stream.begin == 0 else f"{label} from byte {stream.begin:,}"
            self.found.error(f"{where}: {str(last.error).removeprefix('pickle: ')}")

    def _nested(
        self, nested: Iterable[tuple[bytes, object, int]], label: str, depth: int
    ) -> set[int]:
        """Follow files that are given to a loader as bytes; the loaders of those that could not be read."""
        unread = set()
        for data, seen, offset in nested:
            before = len(self.found.errors)
            kinds = self.look(span_of(data, self.limits), f"{label} > byte {offset:,}", depth + 1)
            if not kinds or len(self.found.errors) > before:
                unread.add(id(seen))
        return unread

    # Zips.

    def _zips(self, span: Span, head: bytes, label: str, *, depth: int) -> set[str]:
        """Archives that end the span, one before the other, as in a data file of a distributed checkpoint."""
        starts = head.startswith(b"PK\3\4")
        # Nobody reads an archive at the end of a record as a file of its own.
        place = last_zip(span, exact=depth > 0 and not starts)
        if place is None:
            if starts:
                self._zip(span, label, depth)
                return {"zip"}
            return set()
        before = self.streams
        place_end = place[1]
        ranges: list[tuple[int, int]] = []
        stop = span.nbytes
        while place is not None:
            start, end = place
            ranges.append((start, stop if not ranges else end))
            stop = start
            place = last_zip(span.part(0, stop), exact=True) if stop >= 22 else None
        kinds: set[str] = set()
        for start, end in reversed(ranges):
            self.zips.add((span.key, span.start + start, span.start + end))
            kinds |= self._zip(
                span.part(start, end),
                label if len(ranges) == 1 else f"{label} at byte {start:,}",
                depth,
            )
        if stop > 0 and place_end < span.nbytes:
            return set()  # inside of something, such as the bytes of a pickle; its records were read all the same
        if stop > 0 and (self.streams > before or kinds & {"code"}):
            if stop > 1 << 16 or span.read(0, stop).strip(b"\0"):
                reason = "torch.jit, torch.package and zipfile read the archive, others what is before it"
                self.found.add_other(
                    "suspicious",
                    f"an archive behind {stop:,} bytes of something else",
                    reason,
                    stream=label,
                )
        elif stop > 0:
            return set()  # an archive that nobody loads, such as a document at the end of something
        return {"zip", *kinds}

    def _zip(self, span: Span, label: str, depth: int) -> set[str]:
        entries, refusal = entries_of(span)
        names = {_short(entry.name) for entry in entries}
        script = "constants.pkl" in names and any("/code/" in f"/{entry.name}" for entry in entries)
        package = ".data/extern_modules" in names or (
            ".data/version" in names and "data.pkl" not in names and not script
        )
        if depth == 0 and any(name.lower() == "data.pkl" for name in names):
            self.torch_zip = True
        exported = "archive_format" in names or OLD_PROGRAM in {entry.name for entry in entries}
        before = self.streams
        sources = 0
        for entry in entries:
            self._records -= 1
            if self._records < 0:
                self.found.error(f"{label}: more than {TOTAL_RECORDS:,} records; not read further")
                break
            lower = entry.name.lower()
            inner = _short(entry.name) if label == WHOLE else f"{label} > {_short(entry.name)}"
            if lower.endswith(".py") and script:
                for severity, what, reason in torchscript(
                    self._whole(entry, inner).decode("utf-8", "replace")
                ):
                    self.found.add_other(severity, what, reason, stream=inner)
            elif lower.endswith((".py", ".pyc")) and package:
                sources += 1
            else:
                self._record(entry, inner, depth, exported=exported)
        if sources:
            reason = "torch.package runs this code when the package is loaded"
            self.found.add_other(
                "suspicious", f"Python source in {sources:,} records", reason, stream=label
            )
        kinds = {"code"} if sources or script else set()
        if refusal is not None and (self.streams > before or kinds or depth == 0):
            self.found.error(refusal if label == WHOLE else f"{label}: {refusal}")
            kinds |= {"refused"}
        if depth == 0:
            arrays = any(name.endswith(".npy") for name in names)
            kinds |= (
                {"torchscript"}
                if script
                else {"torch-package"}
                if package
                else {"npz"}
                if arrays
                else set()
            )
        return kinds

    def _record(self, entry: ZipEntry, label: str, depth: int, *, exported: bool) -> None:
        head = entry.content(CONTENT_HEAD_NBYTES if entry.method else 16)
        if head.problem is not None:
            self.found.error(f"{label}: {head.problem}; not read to its end")
        if kind := native_code(head.data):
            reason = "a compiled model is loaded as a library and runs"
            self.found.add_other("suspicious", f"native code: {kind}", reason, stream=label)
        if exported and entry.name.lower().endswith(".json"):
            self._json(entry, label)
        if entry.method == 0:
            self.look(entry.span, label, depth + 1)
        elif head.whole or self._promising(head.data):
            self.look(
                span_of(head.data if head.whole else self._whole(entry, label), self.limits),
                label,
                depth + 1,
            )

    def _whole(self, entry: ZipEntry, label: str) -> bytes:
        most = max(min(self.limits.pickle_nbytes, self._unpacked), 0)
        content = entry.content(most)
        self._unpacked -= len(content.data)
        if not content.whole:
            self.found.error(
                f"{label}: unpacks to more than the {most:,} bytes that may be read; not read to its end"
            )
        if content.problem is not None:
            self.found.error(f"{label}: {content.problem}; not read to its end")
        return content.data

    def _promising(self, head: bytes) -> bool:
        if head.startswith((b"PK\3\4", b"PK\5\6")) or begins_like_tar(head) or compression(head):
            return True
        if head.startswith(NPY):
            return OBJECTS.search(head) is not None
        stream = read_pickle(span_of(head, self.limits), 0, self.limits)
        return head[:1] == b"\x80" or stream.acts or stream.last.cut or stream.stop is not None

    def _json(self, entry: ZipEntry, label: str) -> None:
        odd = odd_expressions(self._whole(entry, label))
        if odd is None:
            self.found.error(f"{label}: a JSON document that cannot be read")
        for text in odd or ():
            reason = "torch.export evaluates this text as Python, and it is no plain arithmetic"
            self.found.add_other("dangerous", f"expr_str {text!r}", reason, stream=label)

    # Tars, arrays, compressed files.

    def _tar(self, span: Span, label: str, depth: int) -> set[str]:
        for member in members_of(span):
            if isinstance(member, str):
                self.found.error(f"{label}: {member}")
                continue
            name, kind, content = member
            inner = f"{label}/{name}" if depth else name
            if kind in (b"1", b"2"):
                what, reason = (
                    f"a link {name!r} in a tar",
                    "torch unpacks it and reads where it leads",
                )
                self.found.add_other("suspicious", what, reason, stream=label)
            elif kind not in (b"0", b"\0", b"7", b"5"):
                what, reason = (
                    f"a tar member {name!r} of type {kind!r}",
                    "it can rename or resize what follows",
                )
                self.found.add_other("suspicious", what, reason, stream=label)
            if name.rpartition("/")[2].encode() in TAR_NUMBERS:
                self._tar_numbers(content, inner, depth)
            else:
                self.look(content, inner, depth + 1)
        return {"tar"}

    def _tar_numbers(self, span: Span, label: str, depth: int) -> None:
        """Read `storages` or `tensors` of torch 0.1: pickles with numbers between them."""
        at = number = 0
        tensors = label.endswith("tensors")
        while at < span.nbytes:
            stream = read_pickle(span, at, self.limits)
            if stream.stop is None and not stream.acts:
                self.found.error(f"{label}: no pickle at byte {at:,}, where one belongs")
                return
            self.stream(stream, label, depth)
            if stream.stop is None:
                return
            at, value = stream.stop, stream.last.value
            number += 1
            if number > 1 and isinstance(value, tuple) and len(value) == 3:
                after = (
                    self._behind_tensor(span, at)
                    if tensors
                    else self._behind_storage(span, at, value[2])
                )
                if after is None:
                    self.found.error(
                        f"{label}: something else than numbers at byte {at:,}; not read further"
                    )
                    return
                at = after

    def _behind_tensor(self, span: Span, at: int) -> int | None:
        rank = int.from_bytes(span.read(at, at + 4), "little", signed=True)
        after = at + 16 + 16 * rank
        return after if 0 <= rank <= 1 << 16 and after <= span.nbytes else None

    def _behind_storage(self, span: Span, at: int, kind: object) -> int | None:
        dtype = storage_dtype(kind)
        count = int.from_bytes(span.read(at, at + 8), "little", signed=True)
        if dtype is None or count < 0:
            return None
        after = at + 8 + count * max(dtype.bits // 8, 1)
        return after if after <= span.nbytes else None

    def _npy(self, span: Span, head: bytes, label: str) -> set[str]:
        width = 2 if head[6:7] == b"\x01" else 4
        begin = 8 + width + int.from_bytes(head[8 : 8 + width], "little")
        objects = OBJECTS.search(span.read(0, min(begin, 1 << 20))) is not None
        if begin > span.nbytes:
            self.found.error(f"{label}: the header of the array is longer than the file")
        else:
            self._pickles(span.part(begin, span.nbytes), label, 1, must=objects)
        return {"npy"}

    def _compressed(self, span: Span, head: bytes, label: str, *, depth: int) -> set[str]:
        kind = compression(head)
        if kind is None:
            unread = next((name for magic, name in UNREADABLE if head.startswith(magic)), None)
            if unread is not None:
                self.found.error(
                    f"{label}: compressed as {unread}, which the scan does not unpack; not read"
                )
                return {"compressed", "unread"}
            return set()
        content = unpack(span, kind, CONTENT_HEAD_NBYTES)
        if not content.whole:
            if not self._promising(content.data):
                return set()
            most = max(min(self.limits.pickle_nbytes, self._unpacked), 0)
            content = unpack(span, kind, most)
            if not content.whole:
                self.found.error(
                    f"{label}: unpacks to more than the {most:,} bytes that may be read; not read to its end"
                )
        self._unpacked -= len(content.data)
        inside = self.look(span_of(content.data, self.limits), f"{label} unpacked", depth + 1)
        # Two bytes look like zlib that begin other things as well, and elements of tensors like anything.
        if content.problem is not None and (inside or (kind != "zlib" and depth == 0)):
            self.found.error(f"{label}: {content.problem}; not read to its end")
            return {"compressed", kind, "unread"}
        return {"compressed", kind} if inside else set()


def _short(name: str) -> str:
    return name.partition("/")[2] or name
