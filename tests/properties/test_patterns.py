"""Globs against an oracle that tries every end of every part, and the order of names against numbers."""

import fnmatch
import re
from functools import reduce

from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.core.order import natural_sort_key, sort_naturally
from holdfast.core.patterns import (
    compile_glob,
    make_matcher,
    make_renamer,
    match_names,
    rename_names,
)
from tests.sampling import examples


class Part:
    """A part of a glob: how it is written, where it may end in a name if it begins somewhere, and texts that it means."""

    def __init__(self, text, ends, sample):
        self.text, self.ends, self.sample = text, ends, sample


def literal(char):
    said = f"[{char}]" if char in "*?[{" else char
    return Part(
        said, lambda name, at: {at + 1} if name[at : at + 1] == char else set(), st.just(char)
    )


def row(parts):
    return Part(
        "".join(part.text for part in parts),
        lambda name, at: reduce(
            lambda starts, part: set().union(*(part.ends(name, s) for s in starts)), parts, {at}
        ),
        st.tuples(*(part.sample for part in parts)).map("".join),
    )


def one_of(choices):
    said = "{" + ",".join(one.text for one in choices) + "}"
    return Part(
        said,
        lambda name, at: set().union(*(c.ends(name, at) for c in choices)),
        st.one_of(*(c.sample for c in choices)),
    )


def numbers(pair):
    low, high, width = pair
    texts = [str(number).zfill(width) for number in range(min(low, high), max(low, high) + 1)]
    said = [str(number).zfill(width) for number in (low, high)]
    sample = st.sampled_from(texts)
    return Part(
        f"{{{said[0]}..{said[1]}}}",
        lambda name, at: {at + len(t) for t in texts if name.startswith(t, at)},
        sample,
    )


def chars(drawn):
    inside, negated = drawn
    sample = st.sampled_from(sorted(set("ab.01-") - inside if negated else inside))
    return Part(
        f"[{'!' if negated else ''}{''.join(sorted(inside))}]",
        lambda name, at: {at + 1} if at < len(name) and (name[at] in inside) != negated else set(),
        sample,
    )


ANY = Part("*", lambda name, at: set(range(at, len(name) + 1)), st.text("ab.01", max_size=4))
ONE = Part("?", lambda name, at: {at + 1} if at < len(name) else set(), st.sampled_from("ab.01"))

# Commas and closing braces mean something inside of braces only; there they would have to be written as sets.
LITERALS = st.sampled_from("ab.01-*?[{").map(literal)
NUMBERS = (
    st.tuples(st.integers(0, 130), st.integers(0, 130), st.just(0) | st.just(3))
    .filter(lambda n: not n[2] or min(n[:2]) < 100)
    .map(numbers)
)
SETS = st.tuples(st.sets(st.sampled_from("ab.01"), min_size=1), st.booleans()).map(chars)
FLAT = st.one_of(LITERALS, LITERALS, st.just(ANY), st.just(ANY), st.just(ONE), SETS, NUMBERS)
ROWS = st.recursive(
    st.lists(FLAT, max_size=8).map(row),
    lambda inner: st.lists(
        st.one_of(FLAT, st.lists(inner, min_size=2, max_size=3).map(one_of)), max_size=3
    ).map(row),
    max_leaves=6,
)
NAMES = st.lists(st.text("ab.01*?[{-", max_size=8) | st.integers(0, 140).map(str), max_size=3).map(
    "".join
)


@settings(deadline=None, max_examples=examples(600))
@given(ROWS, st.data())
def test_a_glob_is_what_the_oracle_says(part, data):
    found = compile_glob(part.text)
    for text in (data.draw(part.sample), data.draw(part.sample), data.draw(NAMES)):
        at = data.draw(st.integers(0, len(text)))
        for name in (
            text,
            text[:at] + text[at + 1 :],
            text[:at] + data.draw(st.sampled_from("ab.01")) + text[at:],
        ):
            assert found.matches(name) == (name == part.text or len(name) in part.ends(name, 0)), (
                part.text,
                name,
            )


@settings(deadline=None, max_examples=examples(400))
@given(st.text("ab*?[]!", max_size=7), st.text("ab[]!", max_size=6))
def test_without_braces_it_is_a_glob_of_the_shell(pattern, name):
    assert compile_glob(pattern).matches(name) == (
        name == pattern or fnmatch.fnmatchcase(name, pattern)
    )


@settings(deadline=None, max_examples=examples(300))
@given(st.text("ab.{},[]*?!-", min_size=1, max_size=10))
def test_a_name_means_itself_and_what_is_below_it(name):
    assert make_matcher(name)(name)
    assert make_matcher(name)(f"{name}.x")


@settings(deadline=None, max_examples=examples(400))
@given(st.lists(st.text("ab.", max_size=3), min_size=2, max_size=4), st.text("ab.", max_size=12))
def test_a_star_stands_for_as_much_as_it_can_from_the_left(pieces, name):
    """As the greedy groups of a regular expression do, which takes its time."""
    pattern = "*".join(pieces)
    slow = re.compile("(.*)".join(map(re.escape, pieces)), re.DOTALL).fullmatch(name)
    if "**" in pattern:
        return
    assert compile_glob(pattern).match_stars(name) == (None if slow is None else slow.groups())
    stars = pattern.count("*")
    if slow is not None:
        assert make_renamer([(pattern, "|".join(["*"] * stars))])(name) == "|".join(slow.groups())


@settings(deadline=None, max_examples=examples(400))
@given(st.lists(ROWS, min_size=1, max_size=3), st.data())
def test_a_column_of_names_is_matched_as_each_name(parts, data):
    patterns = [part.text for part in parts]
    names = [data.draw(st.one_of(NAMES, *(part.sample for part in parts))) for _ in range(6)]
    names += [pattern + below for pattern in patterns for below in ("", ".w", "w")]
    assert match_names(patterns, names) == [
        any(make_matcher(pattern)(name) for pattern in patterns) for name in names
    ]


@settings(deadline=None, max_examples=examples(300))
@given(
    st.lists(st.sampled_from(["a.*", "*.b", "a*b", "*", "a", "b.a", "*a*"]), max_size=3),
    st.lists(st.text("ab.", max_size=6), max_size=6),
)
def test_names_become_what_the_first_rule_says(olds, names):
    renames = [(old, old.replace("*", "<*>") + "!") for old in olds]

    def oracle(name):
        for old, new in renames:
            stars = compile_glob(old).match_stars(name)
            if stars is not None and len(stars) == old.count("*"):
                for star in stars:
                    new = new.replace("*", star.replace("*", "?"), 1)
                return new
            if "*" not in old and name.startswith(f"{old}."):
                return new + name[len(old) :]
        return name

    assert rename_names(renames, names) == [oracle(name) for name in names]


PARTS = st.sampled_from(["a", "b", "layers", "_", ".", "007", "0", "00"]) | st.integers(
    0, 10**6
).map(str)
MIXED = st.lists(PARTS, max_size=6).map("".join)


@given(st.lists(MIXED, max_size=8))
def test_the_order_of_names_is_total_and_that_of_their_numbers(names):
    def oracle(name):
        return [int(x) if x.isdecimal() else x for x in re.split("([0-9]+)", name)], name

    assert sorted(names, key=natural_sort_key) == sorted(names, key=oracle)
    for one in names:
        for other in names:
            assert (natural_sort_key(one) == natural_sort_key(other)) == (one == other)


@given(st.lists(MIXED, unique=True, max_size=10))
def test_what_differs_in_no_number_stays_as_it_was(names):
    found = sort_naturally(names)
    assert sorted(found) == sorted(names)
    assert sort_naturally(found) == found
    without = [re.sub("[0-9]+", "0", name) for name in names]
    if len(set(without)) == len(names) and not any("." in name for name in names):
        assert found == names
