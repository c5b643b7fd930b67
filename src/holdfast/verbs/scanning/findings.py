"""`Finding`: one thing that a loader would have done; and the list of them that a walk fills, with bounds."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from holdfast.core.opaque import Global, Opaque
from holdfast.core.patterns import Glob, compile_glob
from holdfast.core.tensor import Composite, LazyTensor
from holdfast.core.text import clip
from holdfast.core.tree import LinkedPath, walk
from holdfast.core.value import Value, replace
from holdfast.errors import BadArgument, NoSuchPath, StoreError
from holdfast.formats.pickle.recording import Seen
from holdfast.stores.paths import local_path
from holdfast.verbs.brief import brief, root_global
from holdfast.verbs.severity import ORDER, Severity, judge

MOST_FINDINGS = 10_000
"""Findings of one file. Beyond that the report says so."""

KEPT_ERRORS = 20


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
        if key not in self._found and len(self._found) >= MOST_FINDINGS:
            self.unlisted += 1
        else:
            self._found.setdefault(key, finding)

    def add_other(self, severity: Severity, what: str, reason: str, *, stream: str) -> None:
        """Add a finding that is no global."""
        self.add(Finding(severity, what, reason, (), (), stream, 0))

    def error(self, text: str) -> None:
        if len(self.errors) < KEPT_ERRORS and text not in self.errors:
            self.errors.append(text)

    def add_global(self, seen: Seen, stream: str, begin: int, *, ordinary: str = "") -> None:
        """Add one global of a stream that begins at byte `begin`; `ordinary` is the reason why it is harmless, if it is."""
        severity, reason = judge(seen.what, seen.uses, given=seen.given)
        if ordinary:
            severity, reason = "known", ordinary
        if severity == "safe":
            return
        called = seen.uses & {"call", "result"} or (
            "new" in seen.uses and any(c.args for c in seen.calls)
        )
        calls = tuple(dict.fromkeys(brief(call, 80) for call in seen.calls)) if called else ()
        uses = tuple(sorted(seen.uses))
        self.add(
            Finding(severity, str(seen.what), reason, uses, calls, stream, begin + seen.offset)
        )

    def sorted(self, paths: dict[str, tuple[str, ...]]) -> tuple[Finding, ...]:
        """The worst first, then in the order of the stream."""
        if self.unlisted:
            self.error(f"{self.unlisted:,} more findings are not listed")
        found = [replace(f, paths=paths.get(f.what, ())) for f in self._found.values()]
        return tuple(sorted(found, key=lambda f: (ORDER.index(f.severity), f.stream, f.offset)))


MOST_NBYTES = 1 << 20


ACCEPTED_FILE = re.compile(r"(?P<path>.+?)\s+sha256:(?P<digest>[0-9A-Fa-f]{64})")


class Allowlist(Value, frozen=True):
    """The findings that a person allows: names by patterns, and files by their path and content.

    # one entry on a line; empty lines and what follows a # do not count
    mymodel.*
    transformers.training_args.TrainingArguments
    models/x/modeling_x.py sha256:3b2f…
    """

    patterns: tuple[Glob, ...] = ()
    """Patterns for `module.name`."""
    files: tuple[tuple[str, str], ...] = ()
    """Paths, each with the SHA-256 of the content in lower case."""

    @classmethod
    def read(cls, allow: str | os.PathLike[str] | Iterable[str] | None) -> Allowlist:
        """Read the list from a file, or take the entries that are given.

        Raises `StoreError` for a file that cannot be read as text, and `BadArgument` for an entry that makes no sense.
        """
        lines = _lines(allow) if isinstance(allow, str | os.PathLike) else list(allow or ())
        patterns: list[Glob] = []
        files: list[tuple[str, str]] = []
        for line in lines:
            entry = line.partition("#")[0].strip()
            accepted = ACCEPTED_FILE.fullmatch(entry)
            if accepted is not None:
                path = _comparable(accepted["path"])
                files.append((path, accepted["digest"].lower()))
            elif "sha256:" in entry:
                message = "write a path, a space, sha256: and its 64 hexadecimal digits"
                raise BadArgument(f"cannot allow {entry[:200]!r}; {message}", found=entry[:200])
            elif entry:
                patterns.append(compile_glob(entry))
        return cls(tuple(patterns), tuple(files))

    def allows(self, finding: Finding) -> bool:
        """Whether a pattern allows a finding, whatever its severity.

        Code that a file carries (Python source, native code, several formats in one) has no name: only the
        whole file can be accepted, by its content.
        """
        return bool(finding.uses) and any(one.matches(finding.what) for one in self.patterns)

    def digests_of(self, path: str) -> set[str]:
        """Return the SHA-256 of each content that is accepted at a path. Entries may leave out its first folders."""
        full_path = f"/{_comparable(path)}"
        return {digest for end, digest in self.files if full_path.endswith(f"/{end}")}


def _comparable(path: str) -> str:
    return path.replace(os.sep, "/").removeprefix("./").lstrip("/")


def _lines(given: str | os.PathLike[str]) -> list[str]:
    path = local_path(given)
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read(MOST_NBYTES + 1)
    except (OSError, UnicodeDecodeError) as error:
        kind = NoSuchPath if isinstance(error, FileNotFoundError) else StoreError
        raise kind(f"the list of what is allowed cannot be read: {error}", file=path) from None
    if len(text) > MOST_NBYTES:
        raise StoreError(
            f"a list of what is allowed of more than {MOST_NBYTES:,} characters", file=path
        )
    return text.splitlines()


PLACES = 3
"""Places of one global that are listed: enough to find it."""

KEY_CHARACTERS = 200
MOST_KEYS = 100
"""Keys of a place that are listed, the innermost."""

HOLDERS = (dict, list, tuple, set, frozenset, Opaque, Composite, LazyTensor)


def places_of(tree: object) -> dict[str, tuple[str, ...]]:
    """The first few places in a tree of every global, and of the objects that would have come out of one.

    A walk over everything that a pickle left behind, attributes and arguments included, each object once, without
    recursion. A reference to something costs the same whatever that is.
    """
    found: dict[Global, list[str]] = {}
    for way, value in walk(
        tree, lambda value: _inside(value) if isinstance(value, HOLDERS) else None
    ):
        what = (
            value
            if isinstance(value, Global)
            else root_global(value)
            if isinstance(value, Opaque)
            else None
        )
        if what is not None:
            _add_place(found.setdefault(what, []), way)
    return {str(what): tuple(paths) for what, paths in found.items()}


def _add_place(paths: list[str], way: LinkedPath) -> None:
    if len(paths) < PLACES:
        keys: list[str] = []
        while way is not None and len(keys) < MOST_KEYS:
            way, key = way
            if key:
                # Cut, since many objects may have one long key above them.
                keys.append(clip(str(key), KEY_CHARACTERS))
        text = ".".join(reversed(keys))
        if text and text not in paths:
            paths.append(text)


def _inside(value: object) -> Iterator[tuple[str, object]]:
    match value:
        case dict():
            # An OrderedDict keeps what a BUILD gave it (`_metadata`, and anything else) among its attributes.
            yield from getattr(value, "__dict__", {}).items()
            for key, item in value.items():
                yield brief(key, 40) if not isinstance(key, str) else key, item
                if not isinstance(key, str | int):
                    yield "<key>", key
        case list() | tuple() | set() | frozenset():
            for position, item in enumerate(value):
                yield str(position), item
        case Opaque():
            yield from _inside_object(value)
        case Composite():
            yield from value.parts.items()
            yield from value.attributes.items()
            yield "", value.traits.state
        case LazyTensor():
            yield "", value.traits.state


def _inside_object(value: Opaque) -> Iterator[tuple[str, object]]:
    yield "", value.state
    if isinstance(value.what, Opaque):
        yield "<function>", value.what
    yield "args", value.args
    yield "kwargs", value.kwargs
    for position, item in enumerate(value.items):
        yield str(position), item
    for key, item in value.entries:
        yield brief(key, 40) if not isinstance(key, str) else key, item
        yield "<key>", key
