"""Globs: mistakes that are refused, hostile names, and renames."""

import time

import pytest

from holdfast.core.order import natural_sort_key, sort_naturally
from holdfast.core.patterns import compile_glob, find_rename_problems, make_matcher, make_renamer
from holdfast.errors import BadArgument


@pytest.mark.parametrize(
    ("pattern", "advice"),
    [
        ("layers.[0-19].*", "{0..19}"),
        ("layers.[12-15]", "{12..15}"),
        ("layers.[0-1,10-19]", "{{0..1},{10..19}}"),
        ("{a..e}", "{0..19}"),
        ("{0..30..2}", "{0..19}"),
        ("{0..1000000000000000000000}", "digits"),
        ("{a,b}" * 20, "fewer"),
    ],
)
def test_a_probable_mistake_is_refused_with_advice(pattern, advice):
    with pytest.raises(BadArgument) as caught:
        make_matcher(pattern)
    assert advice in str(caught.value)


def test_the_advice_for_a_list_of_ranges_matches_these_numbers():
    matches = make_matcher("layers.{{0..1},{10..19}}.*")
    numbers = [number for number in range(25) if matches(f"layers.{number}.w")]
    assert numbers == [0, 1, *range(10, 20)]


def test_a_range_matches_the_numbers_between_its_ends():
    glob = compile_glob("{95..1203}")
    numbers = [number for number in range(3000) if glob.matches(str(number))]
    assert numbers == list(range(95, 1204))
    assert compile_glob("{19..0}").matches("7")


def test_a_range_with_leading_zeros_matches_numbers_of_the_same_length():
    assert compile_glob("{00..19}").matches("07")
    assert not compile_glob("{00..19}").matches("7")
    assert not compile_glob("{0..19}").matches("07")


def test_special_characters_can_be_matched():
    for name in ("a[0].w", "a{b}", "a{b,c}", "w*", "[", "{", "a,b}", "['params']['Dense_0']"):
        assert make_matcher(name)(name)
    assert compile_glob("a[[]*[]]").matches("a[x]")
    assert [name for name in ("w*", "wx") if compile_glob("w[*]").matches(name)] == ["w*"]
    assert make_renamer([("a[[]0].*", "a[*].*")])("a[0].w") == "a*.w"


def test_a_rename_of_a_complete_name_renames_what_is_below_it():
    assert make_renamer([("optimizer", "opt")])("optimizer.state.0") == "opt.state.0"
    assert make_renamer([("optimizer", "opt")])("optimizers.x") == "optimizers.x"


def test_both_sides_of_a_rename_must_have_the_same_number_of_stars():
    assert find_rename_problems(
        [("{a.*,b}", "*"), ("a.**", "*"), ("a.?.{b,c}", "x"), ("*", "[*]")]
    ) == [
        "the rename '{a.*,b}' → '*' must have the same number of * on both sides",
        "the rename '*' → '[*]' must have the same number of * on both sides",
    ]


def measure_seconds(work, length):
    """Return the shortest processor time of three calls `work(length)` in this thread."""
    durations = []
    for _ in range(3):
        start = time.thread_time()
        work(length)
        durations.append(time.thread_time() - start)
    return min(durations)


@pytest.mark.parametrize(
    "pattern", ["*a*a*a*a*a*a*b", "*[a-c]*{0..99}*?*[!b]*c", "{a,aa}*{a,aa}*{a,aa}*b"]
)
@pytest.mark.parametrize("characters", ["a", "a0", "0"])
def test_the_time_to_match_a_hostile_name_is_linear_in_its_length(pattern, characters):
    """Quadratic time would be 16 times as long for a name of four times the length."""
    glob = compile_glob(pattern)

    def match(length):
        glob.matches(characters * length)

    assert measure_seconds(match, 100_000) < 12 * measure_seconds(match, 25_000) + 0.01


@pytest.mark.parametrize("characters", ["1", "0", "1.", "a1"])
def test_the_time_to_sort_hostile_names_is_linear_in_their_length(characters):
    def sort_both_ways(length):
        names = [characters * length, f"{characters * length}2"]
        sorted(names, key=natural_sort_key)
        sort_naturally(names)

    seconds = measure_seconds(sort_both_ways, 25_000)
    assert measure_seconds(sort_both_ways, 100_000) < 12 * seconds + 0.01
