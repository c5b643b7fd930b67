"""The walk: from the bytes of a file to everything in it that some stock loader would carry out.

1. Bytes are looked at for every container that they may be, not for the first that fits: a pickle or several, a zip at the start
   or at the end or several one behind the other, a tar, an array of numpy, something compressed. One file may be two of them, and
   which one is loaded depends on who loads it: then both are read, and that is a finding of its own.
2. What is inside of a container is looked at in the same way, whatever its name, to a depth and within a budget.
3. Every pickle goes through the closed interpreter, which records what it would do (`formats/pickle/recording.py`).
4. What could not be read is an error of the file. It never takes a finding away.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from holdfast.core.limits import Limits
from holdfast.errors import HoldfastError
from holdfast.formats.pt2.archive import OLD_PROGRAM
from holdfast.formats.torch.legacy import MAGIC, begins_like_tar, describe_legacy
from holdfast.formats.torch.storages import storage_dtype
from holdfast.inspect.scanning.archives import (
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
from holdfast.inspect.scanning.findings import Findings
from holdfast.inspect.scanning.payloads import PickleRow, Stream, native_code, odd_expressions, read_pickle, read_row, torchscript

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
            self.found.error(f"{label}: containers inside of containers, deeper than {DEEPEST_LEVELS}; not read")
            return {"unread"}
        head = span.read(0, HEAD_NBYTES)
        kinds: set[str] = set()
        if not head.startswith(b"PK\3\4"):  # PERSID, at which an unpickler stops that was pointed at a file
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
            self.found.add_other("suspicious", f"one file, several formats: {', '.join(several)}", reason, stream=label)
        return kinds

    # Pickles.

    def _pickles(self, span: Span, label: str, depth: int, *, must: bool = False) -> set[str]:
        row = read_row(span, self.limits)
        if not must and not row.counts(span.nbytes):
            return set()
        several = len(row.streams) > 1
        for number, stream in enumerate(row.streams, 1):
            self.stream(stream, f"{label} {number}" if several else label, depth)
        legacy = bool(row.streams) and row.streams[0].last.value == MAGIC
        self._end_of(row, span, label, depth=depth, legacy=legacy)
        return {"legacy" if legacy else "pickle"}

    def _end_of(self, row: PickleRow, span: Span, label: str, *, depth: int, legacy: bool) -> None:
        if row.more:
            self.found.error(f"{label}: more than {len(row.streams):,} pickles one behind the other; not read further")
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
        """Take over the findings of one pickle."""
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
                nested = seen.what.name == "_load_from_bytes" and "call" in seen.uses and id(seen) not in unread
                self.found.add_global(seen, label, stream.begin, ordinary=READ_AS_WELL if nested else "")
        for note in last.table.notes:
            self.found.error(f"{label}: {note}; no writer does that")
        if last.error is not None:
            where = label if stream.begin == 0 else f"{label} from byte {stream.begin:,}"
            self.found.error(f"{where}: {str(last.error).removeprefix('pickle: ')}")

    def _nested(self, nested: Iterable[tuple[bytes, object, int]], label: str, depth: int) -> set[int]:
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
            kinds |= self._zip(span.part(start, end), label if len(ranges) == 1 else f"{label} at byte {start:,}", depth)
        if stop > 0 and place_end < span.nbytes:
            return set()  # inside of something, such as the bytes of a pickle; its records were read all the same
        if stop > 0 and (self.streams > before or kinds & {"code"}):
            if stop > 1 << 16 or span.read(0, stop).strip(b"\0"):
                reason = "torch.jit, torch.package and zipfile read the archive, others what is before it"
                self.found.add_other("suspicious", f"an archive behind {stop:,} bytes of something else", reason, stream=label)
        elif stop > 0:
            return set()  # an archive that nobody loads, such as a document at the end of something
        return {"zip", *kinds}

    def _zip(self, span: Span, label: str, depth: int) -> set[str]:
        entries, refusal = entries_of(span)
        names = {_short(entry.name) for entry in entries}
        script = "constants.pkl" in names and any("/code/" in f"/{entry.name}" for entry in entries)
        package = ".data/extern_modules" in names or (".data/version" in names and "data.pkl" not in names and not script)
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
                self._script(entry, inner)
            elif lower.endswith((".py", ".pyc")) and package:
                sources += 1
            else:
                self._record(entry, inner, depth, exported=exported)
        if sources:
            reason = "torch.package runs this code when the package is loaded"
            self.found.add_other("suspicious", f"Python source in {sources:,} records", reason, stream=label)
        kinds = {"code"} if sources or script else set()
        if refusal is not None and (self.streams > before or kinds or depth == 0):
            self.found.error(refusal if label == WHOLE else f"{label}: {refusal}")
            kinds |= {"refused"}
        if depth == 0:
            kinds |= self._title(names, script=script, package=package)
        return kinds

    def _title(self, names: set[str], *, script: bool, package: bool) -> set[str]:
        if script:
            return {"torchscript"}
        if package:
            return {"torch-package"}
        return {"npz"} if any(name.endswith(".npy") for name in names) else set()

    def _record(self, entry: ZipEntry, label: str, depth: int, *, exported: bool) -> None:
        head = entry.content(CONTENT_HEAD_NBYTES if entry.method else 16)
        if head.problem is not None:
            self.found.error(f"{label}: {head.problem}; not read to its end")
        self._code(head.data, label)
        if exported and entry.name.lower().endswith(".json"):
            self._json(entry, label)
        if entry.method == 0:
            self.look(entry.span, label, depth + 1)
        elif head.whole or self._promising(head.data):
            self.look(span_of(head.data if head.whole else self._whole(entry, label), self.limits), label, depth + 1)

    def _whole(self, entry: ZipEntry, label: str) -> bytes:
        most = max(min(self.limits.pickle_nbytes, self._unpacked), 0)
        content = entry.content(most)
        self._unpacked -= len(content.data)
        if not content.whole:
            self.found.error(f"{label}: unpacks to more than the {most:,} bytes that may be read; not read to its end")
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

    def _code(self, head: bytes, label: str) -> None:
        kind = native_code(head)
        if kind:
            self.found.add_other(
                "suspicious", f"native code: {kind}", "a compiled model is loaded as a library and runs", stream=label
            )

    def _json(self, entry: ZipEntry, label: str) -> None:
        odd = odd_expressions(self._whole(entry, label))
        if odd is None:
            self.found.error(f"{label}: a JSON document that cannot be read")
        for text in odd or ():
            reason = "torch.export evaluates this text as Python, and it is no plain arithmetic"
            self.found.add_other("dangerous", f"expr_str {text!r}", reason, stream=label)

    def _script(self, entry: ZipEntry, label: str) -> None:
        text = self._whole(entry, label).decode("utf-8", "replace")
        for severity, what, reason in torchscript(text):
            self.found.add_other(severity, what, reason, stream=label)

    # Tars, arrays, compressed files.

    def _tar(self, span: Span, label: str, depth: int) -> set[str]:
        for member in members_of(span):
            if isinstance(member, str):
                self.found.error(f"{label}: {member}")
                continue
            name, kind, content = member
            inner = f"{label}/{name}" if depth else name
            if kind in (b"1", b"2"):
                what, reason = f"a link {name!r} in a tar", "torch unpacks it and reads where it leads"
                self.found.add_other("suspicious", what, reason, stream=label)
            elif kind not in (b"0", b"\0", b"7", b"5"):
                what, reason = f"a tar member {name!r} of type {kind!r}", "it can rename or resize what follows"
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
                after = self._behind_tensor(span, at) if tensors else self._behind_storage(span, at, value[2])
                if after is None:
                    self.found.error(f"{label}: something else than numbers at byte {at:,}; not read further")
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
                self.found.error(f"{label}: compressed as {unread}, which the scan does not unpack; not read")
                return {"compressed", "unread"}
            return set()
        content = unpack(span, kind, CONTENT_HEAD_NBYTES)
        if not content.whole:
            if not self._promising(content.data):
                return set()
            most = max(min(self.limits.pickle_nbytes, self._unpacked), 0)
            content = unpack(span, kind, most)
            if not content.whole:
                self.found.error(f"{label}: unpacks to more than the {most:,} bytes that may be read; not read to its end")
        self._unpacked -= len(content.data)
        inside = self.look(span_of(content.data, self.limits), f"{label} unpacked", depth + 1)
        # Two bytes look like zlib that begin other things as well, and elements of tensors like anything.
        if content.problem is not None and (inside or (kind != "zlib" and depth == 0)):
            self.found.error(f"{label}: {content.problem}; not read to its end")
            return {"compressed", kind, "unread"}
        return {"compressed", kind} if inside else set()


def _short(name: str) -> str:
    return name.partition("/")[2] or name
