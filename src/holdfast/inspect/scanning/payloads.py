"""What loaders carry out: pickles, one behind the other, and besides them expressions, TorchScript, Python source, native code.

Any bytes can be tried for pickles. A loader that is handed what is no pickle fails before it has done anything, and so does the
recording: no global, no call, a break. What is called a pickle is what (a) says so by its first opcode, or (b) does something
before it breaks, or (c) is nothing but whole pickles.

torch.export hands every `expr_str` of a program to sympy, which evaluates it as Python. A plain one is arithmetic of symbols and
a few functions, and everything else is reported. TorchScript is no Python, but its `__setstate__` runs when the file is loaded,
and its functions can write files. torch.package imports the Python in its archive. A compiled model is a library that is loaded.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

from msgspec import Struct, field

from holdfast.core.limits import Limits
from holdfast.core.value import Value
from holdfast.formats.pickle.recording import RecordedStream, read_ahead
from holdfast.inspect.scanning.archives import Span
from holdfast.inspect.severity import Severity, judge

MOST_STREAMS = 10_000
"""Pickles of one span that are read, one behind the other. torch's old container has five."""


class Stream(Value, frozen=True):
    """One pickle: where it begins, and what it does. Twice for one with arrays of joblib."""

    begin: int
    readings: tuple[RecordedStream, ...]

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
        return any(r.acts or _names_danger(r) for r in self.readings)


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
        """Whether this is a pickle, as said above."""
        everything = [*self.streams, *([self.broken] if self.broken else [])]
        plainly = bool(self.streams) and self.stop == nbytes and not any(s.last.table.notes for s in self.streams)
        return self.declared or self.more or plainly or any(s.acts for s in everything)


def read_row(span: Span, limits: Limits) -> PickleRow:
    """Read pickles until one breaks or the span ends."""
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
    """The pickle at one place, by pickle's reading and, where it has arrays of joblib, by joblib's as well."""
    rest = span.part(begin, span.nbytes)
    plainly = read_ahead(rest.read, rest.nbytes, limits)
    if not plainly.table.arrays:
        return Stream(begin, (plainly,))
    return Stream(begin, (read_ahead(rest.read, rest.nbytes, limits, joblib=True), plainly))


def _names_danger(found: RecordedStream) -> bool:
    """Whether a name that Python could import is dangerous by being imported, or by whatever comes next."""
    return any(
        judge(seen.what, seen.uses)[0] == "dangerous" and all(part.isidentifier() for part in str(seen.what).split("."))
        for seen in found.table.seen.values()
    )


EXPRESSION = re.compile(r"(?:[A-Za-z][A-Za-z0-9_]*|[0-9]+(?:\.[0-9]*)?(?:[eE][-+]?[0-9]+)?|[-+*/%(),<>=!&|~^ \t\n])*")
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
    return EXPRESSION.fullmatch(unquoted) is not None and _FUNCTIONS.issuperset(CALL.findall(unquoted))


def torchscript(text: str) -> Iterator[tuple[Severity, str, str]]:
    """Severity, what it is and why that matters, of everything odd in one record of TorchScript code."""
    runs = SETSTATE.search(text) is not None
    files = sorted(set(FILES.findall(text)))
    if files:
        when = "when it is loaded" if runs else "when it is called"
        yield ("dangerous", f"TorchScript torch.{files[0]}", f"code that reads or writes files {when}")
    spaces = sorted({space for space, _ in OPERATORS.findall(text)} - USUAL)
    if spaces:
        yield "suspicious", f"TorchScript ops.{spaces[0]}", "code that calls operators of a library that nothing here knows"
    if runs and not files:
        yield "unknown", "TorchScript __setstate__", "code that runs when it is loaded; TorchScript is no Python and cannot import"
