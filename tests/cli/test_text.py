"""Names made safe, numbers made short."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.cli.text import width
from holdfast.core.text import clip, escape, format_count, format_nbytes, format_percent

HOSTILE = {
    "ansi": ("\x1b[2J", r"\x1b[2J"),
    "c1": ("\x9b31m", r"\x9b31m"),
    "nul": ("a\0b", r"a\x00b"),
    "newline": ("a\nb\r\tc", r"a\nb\r\tc"),
    "bidi": ("\u202etp.exe\u2066", r"\u202etp.exe\u2066"),
    "surrogate": ("\ud800", r"\ud800"),
    "zero width": ("a\u200bb\u200d\ufeff", r"a\u200bb\u200d\ufeff"),
    "line separator": ("\u2028\u2029\x85", r"\u2028\u2029\x85"),
    "tag": ("\U000e0041", r"\U000e0041"),
    "filler": ("\u3164\u115f", r"\u3164\u115f"),
    "variation": ("a\ufe0f", r"a\ufe0f"),
    "private": ("\ue000", r"\ue000"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_escape_writes_out_what_a_terminal_would_act_on(case):
    text, shown = HOSTILE[case]
    assert escape(text) == shown


def test_escape_leaves_readable_text_alone():
    for text in ("layers.0.weight", "poids façonné", "重み", "вес", "a b/c\\d"):
        assert escape(text) == text


@given(st.text(alphabet=st.characters(), max_size=40))
def test_escaped_text_is_printable_and_encodable(text):
    shown = escape(text)
    assert shown.isprintable()
    shown.encode("utf-8")
    assert not any(unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp") for c in shown)


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1 << 20, "1.0 MiB"),
        ((1 << 20) - 1, "1.0 MiB"),
        (5 << 40, "5.0 TiB"),
    ],
)
def test_nbytes(number, text):
    assert format_nbytes(number) == text


def test_count_and_percent_do_not_lie_at_the_edges():
    assert (
        format_count(99_999),
        format_count(100_000),
        format_count(999_999),
        format_count(999_999_999),
    ) == (
        "99,999",
        "100K",
        "1.0M",
        "1.00B",
    )
    assert (format_percent(0, 5), format_percent(5, 5), format_percent(995, 1000)) == (
        "<1%",
        "100%",
        ">99%",
    )


def test_clip_keeps_both_ends():
    assert clip("x" * 10_000 + "end", 30).endswith("end")
    assert len(clip("x" * 10_000, 30)) == 30


def test_width_counts_columns():
    assert width("重み") == 4
    assert width("e\u0301") == 1
