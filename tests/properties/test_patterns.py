"""Globs against an oracle that tries every possible match, and the natural order of names."""

import fnmatch
import re

from hypothesis import assume, given, settings
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

CHARACTERS = "ab.01"


class Component:
    """A component of a glob, with an oracle for what it matches.

    Attributes:
        text: The component as it is written in a glob.
        find_stops: Takes a name and an index. Returns all indices where a match may stop that
            starts at this index.
        sample: A Hypothesis strategy for texts that the component matches.
    """

    def __init__(self, text, find_stops, sample):
        self.text = text
        self.find_stops = find_stops
        self.sample = sample


def make_literal(character):
    """Return a component that matches one character."""

    def find_stops(name, start):
        return {start + 1} if name[start : start + 1] == character else set()

    text = f"[{character}]" if character in "*?[{" else character
    return Component(text, find_stops, st.just(character))


def make_sequence(components):
    """Return a component that matches several components, one after the other."""

    def find_stops(name, start):
        stops = {start}
        for component in components:
            stops = set().union(*(component.find_stops(name, stop) for stop in stops))
        return stops

    text = "".join(component.text for component in components)
    samples = st.tuples(*(component.sample for component in components))
    return Component(text, find_stops, samples.map("".join))


def make_choice(components):
    """Return braces that match one of several components."""

    def find_stops(name, start):
        return set().union(*(component.find_stops(name, start) for component in components))

    text = "{" + ",".join(component.text for component in components) + "}"
    return Component(text, find_stops, st.one_of(*(component.sample for component in components)))


def make_range(ends_and_width):
    """Return a range of numbers, with leading zeros if the width is not 0."""
    first, last, width = ends_and_width
    numbers = range(min(first, last), max(first, last) + 1)
    texts = [str(number).zfill(width) for number in numbers]

    def find_stops(name, start):
        return {start + len(text) for text in texts if name.startswith(text, start)}

    text = f"{{{str(first).zfill(width)}..{str(last).zfill(width)}}}"
    return Component(text, find_stops, st.sampled_from(texts))


def make_set(characters_and_negation):
    """Return a set of characters, or of all other characters."""
    characters, is_negated = characters_and_negation

    def find_stops(name, start):
        is_match = start < len(name) and (name[start] in characters) != is_negated
        return {start + 1} if is_match else set()

    matching_characters = characters
    if is_negated:
        matching_characters = set(CHARACTERS + "-") - characters
    text = f"[{'!' if is_negated else ''}{''.join(sorted(characters))}]"
    return Component(text, find_stops, st.sampled_from(sorted(matching_characters)))


def find_stops_of_star(name, start):
    return set(range(start, len(name) + 1))


def find_stops_of_question_mark(name, start):
    return {start + 1} if start < len(name) else set()


STAR = Component("*", find_stops_of_star, st.text(CHARACTERS, max_size=4))
QUESTION_MARK = Component("?", find_stops_of_question_mark, st.sampled_from(CHARACTERS))

# Commas and closing braces are left out: inside of braces they would have to be written as sets.
LITERALS = st.sampled_from(CHARACTERS + "-*?[{").map(make_literal)
RANGES = (
    st.tuples(st.integers(0, 130), st.integers(0, 130), st.just(0) | st.just(3))
    # With leading zeros, at least one end must have some.
    .filter(lambda ends_and_width: not ends_and_width[2] or min(ends_and_width[:2]) < 100)
    .map(make_range)
)
SETS = st.tuples(st.sets(st.sampled_from(CHARACTERS), min_size=1), st.booleans()).map(make_set)
SIMPLE_COMPONENTS = st.one_of(
    LITERALS, LITERALS, st.just(STAR), st.just(STAR), st.just(QUESTION_MARK), SETS, RANGES
)


def nest(globs):
    """Return a strategy for globs with braces that contain globs."""
    choices = st.lists(globs, min_size=2, max_size=3).map(make_choice)
    return st.lists(st.one_of(SIMPLE_COMPONENTS, choices), max_size=3).map(make_sequence)


GLOBS = st.recursive(st.lists(SIMPLE_COMPONENTS, max_size=8).map(make_sequence), nest, max_leaves=6)
NAME_PIECES = st.text(CHARACTERS + "*?[{-", max_size=8) | st.integers(0, 140).map(str)
NAMES = st.lists(NAME_PIECES, max_size=3).map("".join)


@settings(deadline=None, max_examples=examples(600))
@given(GLOBS, st.data())
def test_a_glob_matches_what_the_oracle_matches(glob, data):
    compiled_glob = compile_glob(glob.text)
    for text in (data.draw(glob.sample), data.draw(glob.sample), data.draw(NAMES)):
        index = data.draw(st.integers(0, len(text)))
        character = data.draw(st.sampled_from(CHARACTERS))
        shortened_text = text[:index] + text[index + 1 :]
        extended_text = text[:index] + character + text[index:]
        for name in (text, shortened_text, extended_text):
            is_match = name == glob.text or len(name) in glob.find_stops(name, 0)
            assert compiled_glob.matches(name) == is_match, (glob.text, name)


@settings(deadline=None, max_examples=examples(400))
@given(st.text("ab*?[]!", max_size=7), st.text("ab[]!", max_size=6))
def test_a_glob_without_braces_matches_as_in_a_shell(pattern, name):
    is_match = name == pattern or fnmatch.fnmatchcase(name, pattern)
    assert compile_glob(pattern).matches(name) == is_match


@settings(deadline=None, max_examples=examples(300))
@given(st.text("ab.{},[]*?!-", min_size=1, max_size=10))
def test_a_name_means_itself_and_what_is_below_it(name):
    assert make_matcher(name)(name)
    assert make_matcher(name)(f"{name}.x")


@settings(deadline=None, max_examples=examples(400))
@given(st.lists(st.text("ab", max_size=2), min_size=2, max_size=4), st.data())
def test_stars_are_greedy_from_left_to_right(texts, data):
    """The oracle is a regular expression with greedy groups, which may take exponential time."""
    pattern = "*".join(texts)
    assume("**" not in pattern)
    fillers = [data.draw(st.text("ab", max_size=4)) for _ in texts[1:]]
    name = texts[0] + "".join(
        filler + text for filler, text in zip(fillers, texts[1:], strict=True)
    )
    if data.draw(st.booleans()):
        name = name[1:]
    match = re.compile("(.*)".join(map(re.escape, texts)), re.DOTALL).fullmatch(name)
    if match is None:
        assert compile_glob(pattern).match_stars(name) is None
        return
    assert compile_glob(pattern).match_stars(name) == match.groups()
    new_pattern = "|".join(["*"] * pattern.count("*"))
    assert make_renamer([(pattern, new_pattern)])(name) == "|".join(match.groups())


@settings(deadline=None, max_examples=examples(400))
@given(st.lists(GLOBS, min_size=1, max_size=3), st.data())
def test_many_names_are_matched_as_each_name(globs, data):
    patterns = [glob.text for glob in globs]
    samples = st.one_of(NAMES, *(glob.sample for glob in globs))
    names = [data.draw(samples) for _ in range(6)]
    for pattern in patterns:
        names += [pattern, f"{pattern}.w", f"{pattern}w"]

    matchers = [make_matcher(pattern) for pattern in patterns]
    expected = [any(matches(name) for matches in matchers) for name in names]
    assert match_names(patterns, names) == expected


def rename_by_oracle(renames, name):
    """Return the new name by the first rename that matches."""
    for old, new in renames:
        star_texts = compile_glob(old).match_stars(name)
        if star_texts is not None and len(star_texts) == old.count("*"):
            for star_text in star_texts:
                new = new.replace("*", star_text.replace("*", "?"), 1)
            return new
        if "*" not in old and name.startswith(f"{old}."):
            return new + name.removeprefix(old)
    return name


@settings(deadline=None, max_examples=examples(300))
@given(
    st.lists(st.sampled_from(["a.*", "*.b", "a*b", "*", "a", "b.a", "*a*"]), max_size=3),
    st.lists(st.text("ab.", max_size=6), max_size=6),
)
def test_the_first_rename_that_matches_is_used(old_patterns, names):
    renames = [(old, old.replace("*", "<*>") + "!") for old in old_patterns]
    assert rename_names(renames, names) == [rename_by_oracle(renames, name) for name in names]


PIECES = st.sampled_from(["a", "b", "layers", "_", ".", "007", "0", "00"])
NUMBERS = st.integers(0, 10**6).map(str)
NUMBERED_NAMES = st.lists(PIECES | NUMBERS, max_size=6).map("".join)


def sort_key_by_oracle(name):
    """Return the texts and numbers of a name, and the name for equal numbers."""
    pieces = re.split("([0-9]+)", name)
    return [int(piece) if piece.isdecimal() else piece for piece in pieces], name


@given(st.lists(NUMBERED_NAMES, max_size=8))
def test_names_are_sorted_by_their_numbers(names):
    assert sorted(names, key=natural_sort_key) == sorted(names, key=sort_key_by_oracle)


@given(NUMBERED_NAMES, NUMBERED_NAMES)
def test_different_names_have_different_sort_keys(first_name, second_name):
    is_equal = natural_sort_key(first_name) == natural_sort_key(second_name)
    assert is_equal == (first_name == second_name)


@given(st.lists(NUMBERED_NAMES, unique=True, max_size=10))
def test_names_that_differ_in_more_than_a_number_keep_their_order(names):
    sorted_names = sort_naturally(names)
    assert sorted(sorted_names) == sorted(names)
    assert sort_naturally(sorted_names) == sorted_names

    names_without_numbers = {re.sub("[0-9]+", "0", name) for name in names}
    if len(names_without_numbers) == len(names) and not any("." in name for name in names):
        assert sorted_names == names
