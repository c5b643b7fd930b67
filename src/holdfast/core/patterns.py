"""Globs on names, with one meaning for every verb: which names are meant, and what they become.

    *            anything, dots included; ** is the same
    ?            any one character
    [abc] [0-9]  one of these characters; [!abc] any other character
    {a,b}        one of these, which may be globs themselves
    {0..19}      one of these numbers; {00..19} with leading zeros, all with the same number of digits
    [*] [{]      the character itself

A complete name means itself, whatever characters it has, and everything below it: `model.head` means
`model.head.weight`, too. A bracket or a brace that nothing closes is an ordinary character, and so
are braces around a single thing. Case counts.

A rename is a pair of globs with the same number of stars (`model.*` → `*`). Each star of the new name
is replaced by what that star of the old one matched. If there are several ways, the first star
matches as much as it can, then the second, and so on. The first rename that matches a name decides.

Names may be hostile, so matching takes time linear in their length. A glob becomes one regular
expression. Braces and numbers are written out as alternatives whose parts between the stars have a
fixed length, and the leftmost match of such a part is the best one: in an atomic group, the engine
never tries another. Patterns and names are reversed for this, so that the first star is matched last.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache

from holdfast.errors import BadArgument

Renames = Sequence[tuple[str, str]]

Alternative = tuple[str, ...]
"""A glob without braces: regular expressions for its parts, each for reversed text of a fixed length."""

STAR = "*"  # The part that stands for a star.

MAX_ALTERNATIVES = 10_000
MAX_DIGITS = 18  # Numbers of this length fit into 64 bits.

TOKEN = re.compile(
    r"(?P<star>\*+)|(?P<any>\?)|\[(?P<set>!?+\]?+[^\]]*)\]|\{(?P<low>[0-9]+)\.\.(?P<high>[0-9]+)\}"
    r"|(?P<mark>[{},])|(?P<text>[^*?\[{},]+|\[)",
    re.DOTALL,
)

SPECIAL = re.compile(r"[*?\[{]")

NUMBERS_AS_SET = re.compile(r"(?=.*[0-9]{2})([0-9]+)-([0-9]+)(,[0-9]+(-[0-9]+)?)*")
"""Numbers written as a set of characters. `[0-19]`, as `show` abbreviates them, would be 0, 1 and 9."""

OTHER_RANGE = re.compile(r"\{[0-9A-Za-z]+(?:\.\.[0-9A-Za-z]+)+\}")

STAR_OF_NEW_NAME = re.compile(r"(\[\*\]|\*+)")


class Glob:
    """A compiled glob. `matches` and `match_stars` are about a name as a whole."""

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        alternatives = [_split_at_stars(alternative) for alternative in _expand(pattern)]
        self._regex = re.compile("|".join(map(_join_pieces, alternatives)), re.DOTALL)
        self.star_counts = {len(pieces) - 1 for pieces in alternatives}

    def matches(self, name: str) -> bool:
        """Return whether the glob matches the name.

        >>> [Glob("layers.{8..11}.*").matches(name) for name in ("layers.9.w", "layers.10.a.w", "layers.1.w")]
        [True, True, False]
        """
        return name == self.pattern or self._regex.fullmatch(name[::-1]) is not None

    def match_stars(self, name: str) -> tuple[str, ...] | None:
        """Return what each star matched, or None if the glob does not match the name.

        >>> Glob("model.*.weight").match_stars("model.a.b.weight")
        ('a.b',)
        """
        match = self._regex.fullmatch(name[::-1])
        if match is None:
            return () if name == self.pattern else None
        # Groups of the other alternatives are None.
        return tuple(text[::-1] for text in reversed(match.groups()) if text is not None)


@lru_cache(maxsize=1024)
def compile_glob(pattern: str) -> Glob:
    """Return a compiled glob. Raises `BadArgument` for a pattern that is probably a mistake."""
    return Glob(pattern)


def make_matcher(pattern: str) -> Callable[[str], bool]:
    """Return a function that returns whether a name is meant.

    A name is meant if the glob matches it, or if it is the pattern itself or below that.
    """
    prefix = f"{pattern}."
    if not SPECIAL.search(pattern):
        return lambda name: name == pattern or name.startswith(prefix)
    if not pattern.strip("*"):
        return lambda name: True
    matches = compile_glob(pattern).matches
    return lambda name: matches(name) or name.startswith(prefix)


def match_names(patterns: Iterable[str], names: Sequence[str]) -> list[bool]:
    """Return for each name whether one of the patterns means it.

    >>> match_names(["a", "*.w"], ["a.b", "b.w", "c"])
    [True, True, False]
    """
    is_meant = [False] * len(names)
    for pattern in patterns:
        matches = make_matcher(pattern)
        is_meant = [known or matches(name) for known, name in zip(is_meant, names, strict=True)]
    return is_meant


def find_unmatched_patterns(patterns: Iterable[str], names: Sequence[str]) -> list[str]:
    """Return the patterns that mean none of the names."""
    return [pattern for pattern in patterns if not any(map(make_matcher(pattern), names))]


def make_renamer(renames: Renames) -> Callable[[str], str]:
    """Return a function that renames a name.

    >>> make_renamer([("model.*", "*"), ("*.w", "*.weight")])("model.a.w")
    'a.w'
    """
    rules = [(compile_glob(old), _split_new_name(new)) for old, new in renames]

    def rename(name: str) -> str:
        for old, (first, *others) in rules:
            stars = old.match_stars(name)
            if stars is not None and len(stars) == len(others):
                return first + "".join(map("".join, zip(stars, others, strict=True)))
            if not others and name.startswith(f"{old.pattern}."):
                return first + name.removeprefix(old.pattern)
        return name

    return rename


def rename_names(renames: Renames, names: Sequence[str]) -> list[str]:
    """Return the new name of each name.

    >>> rename_names([("model.*", "*"), ("b", "c")], ["model.a", "b.w"])
    ['a', 'c.w']
    """
    return [*map(make_renamer(renames), names)]


def find_rename_problems(renames: Renames) -> list[str]:
    """Return an error message for each rename whose sides do not have the same number of stars."""
    return [
        f"the rename {old!r} → {new!r} needs as many * on both sides"
        for old, new in renames
        if compile_glob(old).star_counts != {len(_split_new_name(new)) - 1}
    ]


def _split_new_name(new: str) -> list[str]:
    """Return the texts between the stars of a new name."""
    texts = [""]
    for token in STAR_OF_NEW_NAME.split(new):
        if token == "[*]":
            texts[-1] += "*"
        elif token.startswith("*"):
            texts.append("")
        else:
            texts[-1] += token
    return texts


def _expand(pattern: str) -> list[Alternative]:
    """Write out the braces of a glob. Raises `BadArgument` for what is probably a mistake."""
    other_range = OTHER_RANGE.search(pattern)
    if other_range is not None and not TOKEN.fullmatch(other_range[0]):
        raise BadArgument(
            f"{other_range[0]!r} in {_shorten(pattern)} is not a range; "
            "ranges are of numbers, {0..19}, and count by one",
            found=pattern,
        )
    tokens = list(TOKEN.finditer(pattern))
    marks = _find_marks(tokens)
    # For each open brace: its alternatives so far, and those that are being read. The outermost
    # level is the glob itself.
    levels: list[tuple[list[Alternative], list[Alternative]]] = [([], [()])]
    for index, token in enumerate(tokens):
        complete, current = levels[-1]
        mark = token["mark"] if index in marks else None
        if mark == "{":
            levels.append(([], [()]))
        elif mark == ",":
            levels[-1] = (complete + current, [()])
        else:
            if mark == "}":
                levels.pop()
                choices = complete + current
                complete, current = levels[-1]
            else:
                choices = [(part,) for part in _parts_of(token, pattern)]
            if len(current) * len(choices) > MAX_ALTERNATIVES:
                raise BadArgument(
                    f"the braces of {_shorten(pattern)} stand for more than {MAX_ALTERNATIVES:,} globs; use fewer",
                    found=pattern,
                )
            levels[-1] = (complete, [begin + end for begin in current for end in choices])
    return levels[0][1]


def _find_marks(tokens: Sequence[re.Match[str]]) -> set[int]:
    """Return the indices of braces that are closed and contain a comma, and of their commas."""
    marks: set[int] = set()
    open_braces: list[list[int]] = []
    for index, token in enumerate(tokens):
        if token["mark"] == "{":
            open_braces.append([index])
        elif open_braces and token["mark"] == ",":
            open_braces[-1].append(index)
        elif open_braces and token["mark"] == "}":
            brace_marks = open_braces.pop()
            if len(brace_marks) > 1:
                marks.update(brace_marks, [index])
    return marks


def _parts_of(token: re.Match[str], pattern: str) -> list[str]:
    """Return the part of a token; for a range of numbers one part for each number of digits."""
    if token["star"]:
        return [STAR]
    if token["any"]:
        return ["."]
    if token["low"]:
        return _number_parts(token["low"], token["high"], pattern)
    if token["set"]:
        return [_set_part(token["set"], pattern)]
    return [re.escape(token[0][::-1])]


def _set_part(inside: str, pattern: str) -> str:
    if len(inside) == 1:
        return re.escape(inside)
    if NUMBERS_AS_SET.fullmatch(inside):
        ranges = [
            f"{{{number.replace('-', '..')}}}" if "-" in number else number
            for number in inside.split(",")
        ]
        advice = f"{{{','.join(ranges)}}}" if len(ranges) > 1 else ranges[0]
        raise BadArgument(
            f"[{inside}] in {_shorten(pattern)} is a set of characters, not of numbers; write {advice}",
            found=pattern,
        )
    is_negated = inside[0] == "!"
    ranges = []
    start = int(is_negated)
    while start < len(inside):
        is_range = inside[start + 1 : start + 2] == "-" and start + 2 < len(inside)
        stop = start + 2 if is_range else start
        # A range that counts down is empty, as in a shell.
        if inside[start] <= inside[stop]:
            ranges.append(f"{re.escape(inside[start])}-{re.escape(inside[stop])}")
        start = stop + 1
    if not ranges:
        return "." if is_negated else "(?!)"
    return f"[{'^' if is_negated else ''}{''.join(ranges)}]"


def _number_parts(low: str, high: str, pattern: str) -> list[str]:
    """Return the parts for a range of numbers, with leading zeros if one of its ends has some."""
    if max(len(low), len(high)) > MAX_DIGITS:
        message = f"the numbers in {_shorten(pattern)} have more than {MAX_DIGITS} digits"
        raise BadArgument(message, found=pattern)
    has_zeros = any(len(text) > 1 and text[0] == "0" for text in (low, high))
    low, high = sorted((low, high), key=int)
    if has_zeros:
        width = max(len(low), len(high))
        return [_reversed_numbers(low.zfill(width), high.zfill(width))]
    parts = []
    for width in range(len(low), len(high) + 1):
        lowest = low if width == len(low) else "1".ljust(width, "0")
        highest = high if width == len(high) else "9" * width
        parts.append(_reversed_numbers(lowest, highest))
    return parts


def _reversed_numbers(low: str, high: str) -> str:
    """Return a regular expression for the reversed numbers from `low` to `high`, of equal length.

    >>> _reversed_numbers("095", "203")
    '(?:(?:[5-9]9)0|(?:[0-3]0)2|[0-9]{2}[1-1])'
    """
    if len(low) < 2:
        return f"[{low}-{high}]" if low else ""
    if low[0] == high[0]:
        return f"(?:{_reversed_numbers(low[1:], high[1:])}{low[0]})"
    width = len(low) - 1
    first, last = int(low[0]), int(high[0])
    choices = []
    if low[1:] != "0" * width:
        choices.append(f"{_reversed_numbers(low[1:], '9' * width)}{first}")
        first += 1
    if high[1:] != "9" * width:
        choices.append(f"{_reversed_numbers('0' * width, high[1:])}{last}")
        last -= 1
    if first <= last:
        choices.append(f"[0-9]{{{width}}}[{first}-{last}]")
    return f"(?:{'|'.join(choices)})"


def _split_at_stars(alternative: Alternative) -> list[str]:
    """Return the regular expressions of what stands between the stars, the last one first."""
    pieces = [""]
    previous = ""
    for part in reversed(alternative):
        if part != STAR:
            pieces[-1] += part
        elif previous != STAR:
            pieces.append("")
        previous = part
    return pieces


def _join_pieces(pieces: Sequence[str]) -> str:
    """Return the regular expression of an alternative, with a group for each star."""
    last, *others = pieces
    if not others:
        return last
    *between, first = others
    return f"{last}{''.join(f'(?>(.*?){piece})' for piece in between)}(.*){first}"


def _shorten(pattern: str) -> str:
    return repr(pattern if len(pattern) <= 200 else f"{pattern[:200]}…")
