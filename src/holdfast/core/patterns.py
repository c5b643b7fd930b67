"""Globs for names, with one meaning in every verb.

    *            any text, including dots; ** is the same
    ?            any one character
    [abc] [0-9]  one of these characters; [!abc] any other character
    {a,b}        one of these globs
    {0..19}      one of these numbers; {00..19} with leading zeros, all with the same number of digits
    [*] [{]      the character itself

A complete name means itself, whatever characters it has, and everything below it: `model.head` also
means `model.head.weight`. A bracket or a brace that is not closed is an ordinary character, and so
are braces without a comma or a range. Globs are case-sensitive.

A rename is a pair of globs with the same number of stars (`model.*` → `*`). Each star of the new name
is replaced by what that star of the old name matched. If there are several ways, the first star
matches as much as it can, then the second, and so on. The first rename that matches a name is used.

An attacker can choose the names, so matching takes time linear in their length. A glob becomes one
regular expression without backtracking:

1. Braces and numbers are expanded to alternatives. In an alternative, each text between two stars
   has a fixed length.
2. The leftmost match of such a text is the best one, so it is in an atomic group, in which the
   engine never tries another match.
3. That makes the last star match as much as it can. Patterns and names are reversed, so that it is
   the first one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from itertools import product
from typing import NamedTuple

from holdfast.core.text import clip
from holdfast.errors import BadArgument

Renames = Sequence[tuple[str, str]]
"""Pairs of an old and a new name."""

Alternative = tuple[str, ...]
"""A glob without braces, as components: `STAR`, or a regular expression for reversed text of a fixed
length."""

STAR = "*"
"""The component that stands for a star."""

MAX_ALTERNATIVES = 10_000
"""The most alternatives that the braces of a glob may stand for."""

MAX_DIGITS = 18
"""The most digits of a number in a range. Such numbers fit into 64 bits."""

TOKEN = re.compile(
    r"""
      (?P<star>\*+)
    | (?P<any>\?)
    | \[(?P<set>!?+\]?+[^\]]*)\]
    | \{(?P<low>[0-9]+)\.\.(?P<high>[0-9]+)\}
    | (?P<mark>[{},])
    | (?P<text>[^*?\[{},]+|\[)
    """,
    re.VERBOSE | re.DOTALL,
)

SPECIAL = re.compile(r"[*?\[{]")

NUMBERS_AS_SET = re.compile(r"(?=.*[0-9]{2})([0-9]+)-([0-9]+)(,[0-9]+(-[0-9]+)?)*")
"""Numbers written as a set of characters. `[0-19]`, as `show` abbreviates them, would be 0, 1 and 9."""

OTHER_RANGE = re.compile(r"\{[0-9A-Za-z]+(?:\.\.[0-9A-Za-z]+)+\}")
"""A range of letters, or one with a step. Shells have them, and globs for names do not."""

STAR_OF_NEW_NAME = re.compile(r"(\[\*\]|\*+)")


class Glob:
    """A compiled glob. Its methods match a name as a whole, and not what is below it."""

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        split_alternatives = [_split_at_stars(components) for components in _expand(pattern)]
        expressions = [_join_texts(texts) for texts in split_alternatives]
        self._regex = re.compile("|".join(expressions), re.DOTALL)
        self.star_counts = {len(texts) - 1 for texts in split_alternatives}

    def matches(self, name: str) -> bool:
        """Return whether the glob matches the name.

        >>> names = ("layers.9.w", "layers.10.a.w", "layers.1.w")
        >>> [Glob("layers.{8..11}.*").matches(name) for name in names]
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
        # The groups of the other alternatives are None.
        return tuple(text[::-1] for text in reversed(match.groups()) if text is not None)


@lru_cache(maxsize=1024)
def compile_glob(pattern: str) -> Glob:
    """Return a compiled glob. Raises `BadArgument` for a pattern that is probably a mistake."""
    return Glob(pattern)


def make_matcher(pattern: str) -> Callable[[str], bool]:
    """Return a function that returns whether a pattern means a name.

    It does if the glob matches the name, or if the name is the pattern itself or below it.
    """
    prefix = f"{pattern}."
    if not SPECIAL.search(pattern):
        return lambda name: name == pattern or name.startswith(prefix)
    if not pattern.strip("*"):
        return lambda name: True
    matches = compile_glob(pattern).matches
    return lambda name: matches(name) or name.startswith(prefix)


def match_names(patterns: Iterable[str], names: Sequence[str]) -> list[bool]:
    """Return for each name whether at least one of the patterns means it.

    >>> match_names(["a", "*.w"], ["a.b", "b.w", "c"])
    [True, True, False]
    """
    is_matched = [False] * len(names)
    for pattern in patterns:
        matches = make_matcher(pattern)
        for index, name in enumerate(names):
            if not is_matched[index]:
                is_matched[index] = matches(name)
    return is_matched


def find_unmatched_patterns(patterns: Iterable[str], names: Sequence[str]) -> list[str]:
    """Return the patterns that mean none of the names."""
    return [pattern for pattern in patterns if not any(map(make_matcher(pattern), names))]


class _RenameRule(NamedTuple):
    """A compiled rename."""

    old: Glob
    new_texts: list[str]
    """The texts of the new name, before, between and after its stars."""


def make_renamer(renames: Renames) -> Callable[[str], str]:
    """Return a function that returns the new name of a name.

    >>> make_renamer([("model.*", "*"), ("*.w", "*.weight")])("model.a.w")
    'a.w'
    """
    rules = [_RenameRule(compile_glob(old), _split_new_name(new)) for old, new in renames]

    def rename(name: str) -> str:
        """Return the new name by the first rename that matches, or the name itself."""
        for rule in rules:
            star_count = len(rule.new_texts) - 1
            star_texts = rule.old.match_stars(name)
            if star_texts is not None and len(star_texts) == star_count:
                new_name = rule.new_texts[0]
                for star_text, text in zip(star_texts, rule.new_texts[1:], strict=True):
                    new_name += star_text + text
                return new_name
            # A complete name also means what is below it.
            if star_count == 0 and name.startswith(f"{rule.old.pattern}."):
                return rule.new_texts[0] + name.removeprefix(rule.old.pattern)
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
    problems: list[str] = []
    for old, new in renames:
        star_count = len(_split_new_name(new)) - 1
        if compile_glob(old).star_counts != {star_count}:
            problems.append(
                f"the rename {old!r} → {new!r} must have the same number of * on both sides"
            )
    return problems


def _split_new_name(new: str) -> list[str]:
    """Return the texts before, between and after the stars of a new name."""
    texts = [""]
    for token in STAR_OF_NEW_NAME.split(new):
        if token == "[*]":
            texts[-1] += "*"
        elif token.startswith("*"):
            texts.append("")
        else:
            texts[-1] += token
    return texts


class _Braces:
    """A pair of braces while a glob is expanded. The glob as a whole is the outermost one."""

    def __init__(self) -> None:
        self.complete: list[Alternative] = []
        """The alternatives before the last comma."""
        self.current: list[Alternative] = [()]
        """What the text after the last comma stands for. Braces inside of it make it several."""

    def end_alternative(self) -> list[Alternative]:
        """Complete the current alternatives at a comma or a closing brace, and return all."""
        self.complete += self.current
        self.current = [()]
        return self.complete

    def append(self, choices: Sequence[Alternative], pattern: str) -> None:
        """Append each of some choices to each of the current alternatives."""
        if len(self.current) * len(choices) > MAX_ALTERNATIVES:
            raise BadArgument(
                f"the braces of {clip(pattern)!r} stand for more than {MAX_ALTERNATIVES:,} globs; "
                "use fewer",
                found=pattern,
            )
        self.current = [start + end for start, end in product(self.current, choices)]


def _expand(pattern: str) -> list[Alternative]:
    """Return the alternatives that the braces of a glob stand for.

    In "layers.{0..1,norm}.*", the braces have the choices "0..1" and "norm". Each choice is appended
    to what precedes the braces, and so is what follows them.

    Raises:
        BadArgument: The pattern is probably a mistake.
    """
    other_range = OTHER_RANGE.search(pattern)
    if other_range is not None and not TOKEN.fullmatch(other_range[0]):
        raise BadArgument(
            f"{other_range[0]!r} in {clip(pattern)!r} is not a range; ranges are of numbers, "
            "{0..19}, and count by one",
            found=pattern,
        )

    tokens = list(TOKEN.finditer(pattern))
    mark_indices = _find_marks(tokens)
    open_braces = [_Braces()]
    for index, token in enumerate(tokens):
        if index not in mark_indices:
            components = _make_components(token, pattern)
            open_braces[-1].append([(component,) for component in components], pattern)
        elif token[0] == "{":
            open_braces.append(_Braces())
        elif token[0] == ",":
            open_braces[-1].end_alternative()
        else:
            alternatives = open_braces.pop().end_alternative()
            open_braces[-1].append(alternatives, pattern)
    return open_braces[0].current


def _find_marks(tokens: Sequence[re.Match[str]]) -> set[int]:
    """Return the indices of braces that are closed and contain a comma, and of their commas.

    All other braces and commas are ordinary characters.
    """
    mark_indices: set[int] = set()
    open_braces: list[list[int]] = []
    for index, token in enumerate(tokens):
        mark = token["mark"]
        if mark == "{":
            open_braces.append([index])
        elif open_braces and mark == ",":
            open_braces[-1].append(index)
        elif open_braces and mark == "}":
            brace_and_commas = open_braces.pop()
            if len(brace_and_commas) > 1:
                mark_indices.update(brace_and_commas, [index])
    return mark_indices


def _make_components(token: re.Match[str], pattern: str) -> list[str]:
    """Return the regular expressions that a token of a glob stands for, as alternatives.

    Names are matched from their end to their start, so text is reversed. A range of numbers has an
    alternative for each number of digits, because a component matches text of a fixed length.
    """
    if token["star"]:
        return [STAR]
    if token["any"]:
        return ["."]
    if token["low"]:
        return _make_number_components(token["low"], token["high"], pattern)
    if token["set"]:
        return [_make_set_component(token["set"], pattern)]
    reversed_text = token[0][::-1]
    return [re.escape(reversed_text)]


def _make_set_component(characters: str, pattern: str) -> str:
    """Return a regular expression for a set of characters, which has no brackets around it here.

    The set is written anew, because brackets, `^` and backslashes have other meanings in a regular
    expression than in a glob.
    """
    if len(characters) == 1:
        return re.escape(characters)
    if NUMBERS_AS_SET.fullmatch(characters):
        raise BadArgument(
            f"[{characters}] in {clip(pattern)!r} is a set of characters, not of numbers; write "
            f"{_suggest_braces(characters)}",
            found=pattern,
        )

    is_negated = characters[0] == "!"
    ranges = []
    start = int(is_negated)
    while start < len(characters):
        is_range = characters[start + 1 : start + 2] == "-" and start + 2 < len(characters)
        stop = start + 2 if is_range else start
        # A range that counts down is empty, as in a shell.
        if characters[start] <= characters[stop]:
            ranges.append(f"{re.escape(characters[start])}-{re.escape(characters[stop])}")
        start = stop + 1

    if not ranges:
        return "." if is_negated else "(?!)"
    if is_negated:
        ranges.insert(0, "^")
    return f"[{''.join(ranges)}]"


def _suggest_braces(numbers: str) -> str:
    """Return the glob for numbers that were written as a set of characters.

    >>> _suggest_braces("0-1,10-19"), _suggest_braces("0-19")
    ('{{0..1},{10..19}}', '{0..19}')
    """
    choices = re.sub("([0-9]+)-([0-9]+)", r"{\1..\2}", numbers)
    return f"{{{choices}}}" if "," in numbers else choices


def _make_number_components(low: str, high: str, pattern: str) -> list[str]:
    """Return a regular expression for each number of digits in a range of numbers.

    If an end of the range has leading zeros, all numbers have the same number of digits.
    """
    if max(len(low), len(high)) > MAX_DIGITS:
        message = f"the numbers in {clip(pattern)!r} have more than {MAX_DIGITS} digits"
        raise BadArgument(message, found=pattern)
    has_leading_zeros = any(len(digits) > 1 and digits[0] == "0" for digits in (low, high))
    low, high = sorted((low, high), key=int)
    if has_leading_zeros:
        width = max(len(low), len(high))
        return [_reverse_numbers(low.zfill(width), high.zfill(width))]

    components = []
    for width in range(len(low), len(high) + 1):
        lowest = low if width == len(low) else "1".ljust(width, "0")
        highest = high if width == len(high) else "9" * width
        components.append(_reverse_numbers(lowest, highest))
    return components


def _reverse_numbers(low: str, high: str) -> str:
    """Return a regular expression for the numbers from `low` to `high`, with reversed digits.

    Names are matched from their end to their start. Both numbers have the same length.

    The range is split by its first digit: the numbers that start like `low`, those that start like
    `high`, and those between them, whose other digits are arbitrary.

    >>> _reverse_numbers("095", "203")
    '(?:(?:[5-9]9)0|(?:[0-3]0)2|[0-9]{2}[1-1])'
    """
    if len(low) == 1:
        return f"[{low}-{high}]"
    if low[0] == high[0]:
        return f"(?:{_reverse_numbers(low[1:], high[1:])}{low[0]})"

    width = len(low) - 1
    first_digit = int(low[0])
    last_digit = int(high[0])
    choices = []
    if low[1:] != "0" * width:
        choices.append(f"{_reverse_numbers(low[1:], '9' * width)}{first_digit}")
        first_digit += 1
    if high[1:] != "9" * width:
        choices.append(f"{_reverse_numbers('0' * width, high[1:])}{last_digit}")
        last_digit -= 1
    if first_digit <= last_digit:
        choices.append(f"[0-9]{{{width}}}[{first_digit}-{last_digit}]")
    return f"(?:{'|'.join(choices)})"


def _split_at_stars(alternative: Alternative) -> list[str]:
    """Return the regular expressions of the texts around the stars, the last one first.

    Several stars in a row are one star.
    """
    texts = [""]
    previous_component = ""
    for component in reversed(alternative):
        if component != STAR:
            texts[-1] += component
        elif previous_component != STAR:
            texts.append("")
        previous_component = component
    return texts


def _join_texts(texts: Sequence[str]) -> str:
    """Return the regular expression of an alternative, with a group for each star.

    Args:
        texts: The regular expressions of the texts around the stars, as `_split_at_stars` returns
            them.
    """
    last_text, *other_texts = texts
    if not other_texts:
        return last_text
    *middle_texts, first_text = other_texts
    middle = "".join(f"(?>(.*?){text})" for text in middle_texts)
    return f"{last_text}{middle}(.*){first_text}"
