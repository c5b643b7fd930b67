"""Globs on names, one meaning for every verb: which names are meant, and what they become.

    *            anything, dots included; ** is the same
    ?            any one character
    [abc] [0-9]  one of these characters; [!abc] one that is none of them
    {a,b}        one of these, globs themselves
    {0..19}      one of these numbers; {00..19} with zeros before them, as many digits each
    [*] [{]      the character itself

A name in full means itself, whatever characters it has, and all that is below it: `model.head` means `model.head.weight`, too. A
bracket or a brace that nothing closes is a character like any other, and so are braces around one thing. Case counts.

Names may be hostile, so the time is linear in them: a glob is cut at its stars, and each piece is looked for once, from the end, as
late as it may stand. So the first star stands for as much as it can, which a rename takes over: it is a pair of globs with as many
stars on both sides (`model.*` → `*`), and each star of the new name stands for what that star of the old one matched. Of several
renames the first that matches decides.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import repeat
from typing import NamedTuple

from holdfast.errors import BadArgument

Renames = Sequence[tuple[str, str]]

MOST = 10_000  # Globs that the braces of one may stand for.
DIGITS = 18  # Of a number in braces: what 64 bits are sure to hold.

TOKEN = re.compile(
    r"(?P<star>\*+)|(?P<one>\?)|\[(?P<set>!?+\]?+[^\]]*)\]|\{(?P<low>[0-9]+)\.\.(?P<high>[0-9]+)\}"
    r"|(?P<mark>[{},])|(?P<text>[^*?\[{},]+|\[)",
    re.DOTALL,
)

MISTAKEN = re.compile(r"(?=.*[0-9]{2})([0-9]+)-([0-9]+)(,[0-9]+(-[0-9]+)?)*")
"""Numbers, written as a set of characters: `[0-19]`, as `show` writes them in short, would be 0, 1 and 9."""

ODD_RANGE = re.compile(r"\{[0-9A-Za-z]+(?:\.\.[0-9A-Za-z]+)+\}")

NEW = re.compile(r"\[\*\]|\*+")


class Atom(NamedTuple):
    """A part of a glob that is no star: a regex, and how many characters that matches."""

    regex: str
    least: int
    most: int
    text: str | None = None  # What it is, if it is nothing else.


Alternative = tuple[Atom | None, ...]  # A glob without braces; None is a star.


class Piece:
    """What stands between two stars: it matches texts of a few lengths."""

    def __init__(self, atoms: Sequence[Atom]) -> None:
        regex = "".join(atom.regex for atom in atoms)
        known = [atom.text for atom in atoms if atom.text is not None]
        self.text = "".join(known) if len(known) == len(atoms) else None
        self._lengths = range(
            sum(atom.least for atom in atoms), sum(atom.most for atom in atoms) + 1
        )
        self._regex = re.compile(regex, re.DOTALL)
        self._latest = re.compile(f".*({regex})", re.DOTALL)

    def fits(self, name: str) -> bool:
        return (
            name == self.text if self.text is not None else self._regex.fullmatch(name) is not None
        )

    def first(self, name: str) -> int | None:
        """Where the shortest match at the beginning of a name ends."""
        if self.text is not None:
            return len(self.text) if name.startswith(self.text) else None
        return next(
            (n for n in self._lengths if n <= len(name) and self._regex.fullmatch(name, 0, n)), None
        )

    def last(self, name: str) -> int | None:
        """Where the shortest match at its end begins."""
        end = len(name)
        if self.text is not None:
            return end - len(self.text) if name.endswith(self.text) else None
        return next(
            (end - n for n in self._lengths if n <= end and self._regex.fullmatch(name, end - n)),
            None,
        )

    def latest(self, name: str, start: int, stop: int) -> tuple[int, int] | None:
        """The match inside of a range that begins as late as any."""
        if self.text is not None:
            at = name.rfind(self.text, start, stop)
            return (at, at + len(self.text)) if at >= 0 else None
        found = self._latest.match(name, start, stop)
        return found.span(1) if found is not None else None


class Starred:
    def __init__(self, pieces: Sequence[Piece]) -> None:
        self._first, *self._between, self._last = pieces
        self._between.reverse()
        self.stars = len(pieces) - 1

    def stood_for(self, name: str) -> tuple[str, ...] | None:
        """What each star stands for; None where the name does not match."""
        start, stop = self._first.first(name), self._last.last(name)
        if start is None or stop is None or start > stop:
            return None
        found: list[str] = []
        for piece in self._between:
            place = piece.latest(name, start, stop)
            if place is None:
                return None
            found.append(name[place[1] : stop])
            stop = place[0]
        return (name[start:stop], *reversed(found))

    def each_stood_for(self, names: Sequence[str]) -> list[tuple[str, ...] | None]:
        """`stood_for` of each name. Where one star stands between two texts, names are only cut and compared."""
        first, last = self._first.text, self._last.text
        if self._between or first is None or last is None:
            return [*map(self.stood_for, names)]
        begin, end = len(first), len(last)
        rest = [name[begin:] if name[:begin] == first else None for name in names]
        if not end:
            return [None if name is None else (name,) for name in rest]
        return [None if name is None or name[-end:] != last else (name[:-end],) for name in rest]


class Glob:
    """A glob that was read. `matches` is about a name as a whole."""

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        self._texts: set[str] = {pattern}
        self._plain: list[Piece] = []
        self._starred: list[Starred] = []
        for alternative in _alternatives(pattern):
            pieces = [Piece(atoms) for atoms in _between_stars(alternative)]
            if len(pieces) > 1:
                self._starred.append(Starred(pieces))
            elif pieces[0].text is not None:
                self._texts.add(pieces[0].text)
            else:
                self._plain.append(pieces[0])
        self.plain = not self._plain and not self._starred and self._texts == {pattern}
        """Whether it is a name, and stands for nothing else."""
        some_without = bool(self._plain) or self._texts != {pattern} or not self._starred
        self.stars = {glob.stars for glob in self._starred} | ({0} if some_without else set())
        """How many stars a name may be matched by: one number, unless braces have globs of several kinds in them."""

    def matches(self, name: str) -> bool:
        """
        >>> [Glob("layers.{8..11}.*").matches(name) for name in ("layers.9.w", "layers.10.a.w", "layers.1.w")]
        [True, True, False]
        """
        return self.stood_for(name) is not None

    def stood_for(self, name: str) -> tuple[str, ...] | None:
        """What the stars stand for; None where the name does not match.

        >>> Glob("model.*.weight").stood_for("model.a.b.weight")
        ('a.b',)
        """
        for glob in self._starred:
            found = glob.stood_for(name)
            if found is not None:
                return found
        return () if name in self._texts or any(piece.fits(name) for piece in self._plain) else None

    def each_stood_for(self, names: Sequence[str]) -> list[tuple[str, ...] | None]:
        """`stood_for` of each name.

        >>> Glob("a.*").each_stood_for(["a.b", "b.a"])
        [('b',), None]
        """
        if len(self._starred) == 1 and not self._plain and self._texts == {self.pattern}:
            found = self._starred[0].each_stood_for(names)
            return [
                () if one is None and name == self.pattern else one
                for name, one in zip(names, found, strict=True)
            ]
        return [*map(self.stood_for, names)]


@lru_cache(maxsize=1024)
def glob(pattern: str) -> Glob:
    """A glob, read once. Raises `BadArgument` for one that cannot be meant so."""
    return Glob(pattern)


def matcher(pattern: str) -> Callable[[str], bool]:
    """Whether a name is meant: it matches a glob, or it is the name that is given, or is below it."""
    found, below = glob(pattern), f"{pattern}."
    if pattern and not pattern.strip("*"):
        return lambda name: True
    if found.plain:
        return lambda name: name == pattern or name.startswith(below)
    return lambda name: found.matches(name) or name.startswith(below)


def meant(patterns: Iterable[str], names: Sequence[str]) -> list[bool]:
    """Whether each name is meant by one of these patterns, as by `matcher`.

    >>> meant(["a", "*.w"], ["a.b", "b.w", "c"])
    [True, True, False]
    """
    found = [False] * len(names)
    for pattern in patterns:
        if pattern and not pattern.strip("*"):
            return [True] * len(names)
        below, own = f"{pattern}.", glob(pattern)
        width = len(below)
        stars = repeat(None) if own.plain else own.each_stood_for(names)
        found = [
            known or one is not None or name == pattern or name[:width] == below
            for known, name, one in zip(found, names, stars, strict=False)
        ]
    return found


def renamed(renames: Renames, names: Sequence[str]) -> list[str]:
    """Rename each name, as by `renamer`.

    >>> renamed([("model.*", "*"), ("b", "c")], ["model.a", "b.w"])
    ['a', 'c.w']
    """
    made: list[str | None] = [None] * len(names)
    for pattern, new in renames:
        first, *others = _new(new)
        below, count = f"{pattern}.", len(others)
        width = len(below)
        for at, (known, name, stars) in enumerate(
            zip(made, names, glob(pattern).each_stood_for(names), strict=True)
        ):
            if known is not None:
                continue
            if stars is not None and count == 1 and stars and not stars[1:]:
                made[at] = f"{first}{stars[0]}{others[0]}"
            elif stars is not None and len(stars) == count:
                made[at] = first + "".join(map("".join, zip(stars, others, strict=True)))
            elif not others and name[:width] == below:
                made[at] = f"{first}.{name[width:]}"
    return [name if new is None else new for name, new in zip(names, made, strict=True)]


def renamer(renames: Renames) -> Callable[[str], str]:
    """A function that renames a name.

    >>> renamer([("model.*", "*"), ("*.w", "*.weight")])("model.a.w")
    'a.w'
    """
    return lambda name: renamed(renames, [name])[0]


def _new(text: str) -> list[str]:
    """What stands between the stars of a new name."""
    parts, at = [""], 0
    for found in NEW.finditer(text):
        parts[-1] += text[at : found.start()]
        at = found.end()
        if found[0] == "[*]":
            parts[-1] += "*"
        else:
            parts.append("")
    parts[-1] += text[at:]
    return parts


def rename_problems(renames: Renames) -> list[str]:
    """Renames that make no sense, whatever the names."""
    return [
        f"the rename {old!r} → {new!r} needs as many * on both sides"
        for old, new in renames
        if glob(old).stars != {len(_new(new)) - 1}
    ]


def unmatched(patterns: Iterable[str], names: Sequence[str]) -> list[str]:
    return [pattern for pattern in patterns if not any(map(matcher(pattern), names))]


def _alternatives(pattern: str) -> list[Alternative]:
    tokens = list(TOKEN.finditer(pattern))
    meant = _braces(tokens)
    # Of each brace that is open: what it may stand for so far, and the one that is being read.
    levels: list[tuple[list[Alternative], list[Alternative]]] = [([], [()])]
    for at, token in enumerate(tokens):
        done, last = levels[-1]
        mark = token["mark"] if at in meant else None
        if mark == "{":
            levels.append(([], [()]))
        elif mark == ",":
            levels[-1] = (done + last, [()])
        elif mark == "}":
            levels.pop()
            before, own = levels[-1]
            if len(own) * len(done + last) > MOST:
                raise BadArgument(
                    f"the braces of {_short(pattern)} stand for more than {MOST:,} globs; use fewer",
                    found=pattern,
                )
            levels[-1] = (before, [one + other for one in own for other in done + last])
        else:
            atom = _atom(token, pattern)
            levels[-1] = (done, [(*one, atom) for one in last])
    odd = ODD_RANGE.search(pattern)
    if odd is not None and not TOKEN.fullmatch(odd[0]):
        said = f"{odd[0]!r} in {_short(pattern)} is no range: they are of numbers, {{0..19}}, and count by one"
        raise BadArgument(said, found=pattern)
    return levels[0][1]


def _braces(tokens: Sequence[re.Match[str]]) -> set[int]:
    """Which of the tokens are braces that are closed and have a comma in them, and their commas."""
    found: set[int] = set()
    waiting: list[list[int]] = []
    for at, token in enumerate(tokens):
        if token["mark"] == "{":
            waiting.append([at])
        elif waiting and token["mark"] == ",":
            waiting[-1].append(at)
        elif waiting and token["mark"] == "}":
            own = waiting.pop()
            found.update((*own, at) if len(own) > 1 else ())
    return found


def _atom(token: re.Match[str], pattern: str) -> Atom | None:
    if token["star"]:
        return None
    if token["one"]:
        return Atom(".", 1, 1)
    if token["low"]:
        return _numbers(token["low"], token["high"], pattern)
    if token["set"]:
        return _set(token["set"], pattern)
    return Atom(re.escape(token[0]), len(token[0]), len(token[0]), token[0])


def _set(inside: str, pattern: str) -> Atom:
    if len(inside) == 1:
        return Atom(re.escape(inside), 1, 1, inside)
    mistaken = MISTAKEN.fullmatch(inside)
    if mistaken is not None:
        meant = ",".join(
            f"{{{one.replace('-', '..')}}}" if "-" in one else one for one in inside.split(",")
        )
        meant = f"{{{meant}}}" if "," in inside else meant
        said = (
            f"[{inside}] in {_short(pattern)} is a set of characters, not of numbers; write {meant}"
        )
        raise BadArgument(said, found=pattern)
    ranges, at = "", 1 if inside[0] == "!" else 0
    not_ = "^" * at
    while at < len(inside):
        last = at + 2 if inside[at + 1 : at + 2] == "-" and at + 2 < len(inside) else at
        if inside[at] <= inside[last]:
            ranges += f"{re.escape(inside[at])}-{re.escape(inside[last])}"
        at = last + 1
    return Atom(f"[{not_}{ranges}]" if ranges else "." if not_ else "(?!)", 1, 1)


def _numbers(low: str, high: str, pattern: str) -> Atom:
    """The numbers from one to another, as they are written; with leading zeros if one of them has some."""
    if max(len(low), len(high)) > DIGITS:
        raise BadArgument(
            f"the numbers in {_short(pattern)} have more than {DIGITS} digits", found=pattern
        )
    padded = any(len(text) > 1 and text[0] == "0" for text in (low, high))
    low, high = sorted((low, high), key=int)
    if padded:
        width = max(len(low), len(high))
        return Atom(_of_one_width(low.zfill(width), high.zfill(width)), width, width)
    parts = [
        _of_one_width(
            low if width == len(low) else "1".ljust(width, "0"),
            high if width == len(high) else "9" * width,
        )
        for width in range(len(low), len(high) + 1)
    ]
    return Atom(f"(?:{'|'.join(parts)})", len(low), len(high))


def _of_one_width(low: str, high: str) -> str:
    """A regex for the numbers of one width.

    >>> _of_one_width("095", "203")
    '(?:09[5-9]|20[0-3]|[1-1][0-9]{2})'
    """
    if len(low) < 2:
        return f"[{low}-{high}]" if low else ""
    if low[0] == high[0]:
        return low[0] + _of_one_width(low[1:], high[1:])
    rest = len(low) - 1
    first, last, parts = int(low[0]), int(high[0]), []
    if low[1:] != "0" * rest:
        parts.append(f"{first}{_of_one_width(low[1:], '9' * rest)}")
        first += 1
    if high[1:] != "9" * rest:
        parts.append(f"{last}{_of_one_width('0' * rest, high[1:])}")
        last -= 1
    if first <= last:
        parts.append(f"[{first}-{last}][0-9]{{{rest}}}")
    return f"(?:{'|'.join(parts)})"


def _between_stars(alternative: Alternative) -> Iterator[list[Atom]]:
    own: list[Atom] = []
    for before, atom in zip((object(), *alternative), alternative, strict=False):
        if atom is not None:
            own.append(atom)
        elif before is not None:
            yield own
            own = []
    yield own


def _short(pattern: str) -> str:
    return repr(pattern if len(pattern) <= 200 else f"{pattern[:200]}…")
