"""Globs: what is refused, what is hostile, and what a rename takes over."""

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
def test_what_cannot_be_meant_is_refused_with_advice(pattern, advice):
    with pytest.raises(BadArgument) as refused:
        make_matcher(pattern)
    assert advice in str(refused.value)


def test_the_advice_means_what_was_meant():
    means = make_matcher("layers.{{0..1},{10..19}}.*")
    assert [n for n in range(25) if means(f"layers.{n}.w")] == [0, 1, *range(10, 20)]


def test_ranges_are_of_numbers_as_they_are_written():
    assert [n for n in range(3000) if compile_glob("{95..1203}").matches(str(n))] == list(
        range(95, 1204)
    )
    assert compile_glob("{00..19}").matches("07")
    assert not compile_glob("{00..19}").matches("7")
    assert not compile_glob("{0..19}").matches("07")
    assert compile_glob("{19..0}").matches("7")


def test_characters_as_they_are():
    for name in ("a[0].w", "a{b}", "a{b,c}", "w*", "[", "{", "a,b}", "['params']['Dense_0']"):
        assert make_matcher(name)(name)
    assert compile_glob("a[[]*[]]").matches("a[x]")
    assert [name for name in ("w*", "wx") if compile_glob("w[*]").matches(name)] == ["w*"]
    assert make_renamer([("a[[]0].*", "a[*].*")])("a[0].w") == "a*.w"


def test_a_name_means_what_is_below_it_in_a_rename_as_well():
    assert make_renamer([("optimizer", "opt")])("optimizer.state.0") == "opt.state.0"
    assert make_renamer([("optimizer", "opt")])("optimizers.x") == "optimizers.x"
    assert find_rename_problems(
        [("{a.*,b}", "*"), ("a.**", "*"), ("a.?.{b,c}", "x"), ("*", "[*]")]
    ) == [
        "the rename '{a.*,b}' → '*' must have the same number of * on both sides",
        "the rename '*' → '[*]' must have the same number of * on both sides",
    ]


def _seconds(work):
    begin = time.thread_time()  # other loads do not count
    work()
    return time.thread_time() - begin


@pytest.mark.parametrize(
    "pattern", ["*a*a*a*a*a*a*b", "*[a-c]*{0..99}*?*[!b]*c", "{a,aa}*{a,aa}*{a,aa}*b"]
)
@pytest.mark.parametrize("names", ["a", "a0", "0"])
def test_hostile_names_take_as_long_as_they_are(pattern, names):
    """A power of the length would be 16 times as long, or 64, where four times is right."""
    found = compile_glob(pattern)
    short, long = (
        min(_seconds(lambda n=n: found.matches(names * n)) for _ in range(3))
        for n in (25_000, 100_000)
    )
    assert long < 12 * short + 0.01


@pytest.mark.parametrize("name", ["1{}", "0{}", "1.{}", "a1{}"])
def test_hostile_digits_are_sorted_in_as_long_as_they_are(name):
    part = name.removesuffix("{}")
    short, long = (
        min(
            _seconds(
                lambda n=n: (
                    sorted([part * n, f"{part * n}2"], key=natural_sort_key),
                    sort_naturally([part * n, f"{part * n}2"]),
                )
            )
            for _ in range(3)
        )
        for n in (25_000, 100_000)
    )
    assert long < 12 * short + 0.01
