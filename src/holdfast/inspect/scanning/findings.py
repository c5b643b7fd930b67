"""`Finding`: one thing that a loader would have done; and the list of them that a walk fills, with bounds."""

from __future__ import annotations

from dataclasses import dataclass, replace

from holdfast.formats.pickle.recording import Seen
from holdfast.inspect.brief import brief
from holdfast.inspect.severity import ORDER, Severity, judge

__all__ = ["Finding", "Findings"]

MOST_FINDINGS = 10_000
"""Findings of one file. Beyond that the report says so."""

KEPT_ERRORS = 20
"""Errors of one file that are kept."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One global that the file mentions and that Holdfast does not build, or other code that it carries."""

    severity: Severity
    what: str
    """`module.name`, raw text out of the file."""
    reason: str
    uses: tuple[str, ...]
    """`mention`, `call`, `new`, `build`, `append`, `setitem`, `additem`, `attributes`, `result`: what the stream does with it."""
    calls: tuple[str, ...]
    """Up to three calls with their arguments in short, printable form; empty where it is not called."""
    stream: str
    """Which pickle of the file."""
    offset: int
    """Byte of that pickle."""
    paths: tuple[str, ...] = ()
    """Up to three places in the tree."""
    allowed: bool = False
    """Whether a person said that this one is known to them: shown, and not counted."""


class Findings:
    """What a walk over one file has found so far: the same thing in many streams counts once."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, str, tuple[str, ...]], Finding] = {}
        self.errors: list[str] = []
        self.unlisted = 0

    def add(self, finding: Finding) -> None:
        key = (finding.severity, finding.what, finding.uses)
        if key in self._found:
            return
        if len(self._found) >= MOST_FINDINGS:
            self.unlisted += 1
            return
        self._found[key] = finding

    def tell(self, severity: Severity, what: str, reason: str, *, stream: str) -> None:
        """Something that is no global."""
        self.add(Finding(severity, what, reason, (), (), stream, 0))

    def error(self, text: str) -> None:
        """Something that was not read to its end."""
        if len(self.errors) < KEPT_ERRORS and text not in self.errors:
            self.errors.append(text)

    def seen(self, seen: Seen, stream: str, begin: int, *, ordinary: str = "") -> Severity:
        """One global of a stream that begins at byte `begin`; with a reason why it is ordinary after all, if it is."""
        severity, reason = judge(seen.what, seen.uses, telling=seen.telling)
        if ordinary:
            severity, reason = "known", ordinary
        if severity == "safe":
            return severity
        called = seen.uses & {"call", "result"} or ("new" in seen.uses and any(c.args for c in seen.calls))
        calls = tuple(dict.fromkeys(brief(call, 80) for call in seen.calls)) if called else ()
        uses = tuple(sorted(seen.uses))
        self.add(Finding(severity, str(seen.what), reason, uses, calls, stream, begin + seen.offset))
        return severity

    def sorted(self, paths: dict[str, tuple[str, ...]]) -> tuple[Finding, ...]:
        """The worst first, then in the order of the stream."""
        if self.unlisted:
            self.error(f"{self.unlisted:,} more findings are not listed")
        found = [replace(f, paths=paths.get(f.what, ())) for f in self._found.values()]
        return tuple(sorted(found, key=lambda f: (ORDER.index(f.severity), f.stream, f.offset)))
