"""Which steps rules keep: against a slow oracle, and the cases that the rules are for."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import BadArgument
from holdfast.extras.runs.record import Pin
from holdfast.extras.runs.retention import decide
from holdfast.extras.runs.rules import (
    Best,
    Every,
    Latest,
    Rule,
    Within,
    kept_by,
    read_rule,
    read_rules,
)
from holdfast.extras.runs.steps import Step


@dataclass(frozen=True)
class Known:
    step: int
    saved: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)
    ran: float | None = None


values = st.one_of(st.floats(-3, 3), st.sampled_from([math.nan, math.inf, -math.inf]))
rules = st.one_of(
    st.builds(Latest, st.integers(1, 5)),
    st.builds(Every, st.integers(1, 7)),
    st.builds(
        Best, st.sampled_from(["a", "b"]), st.integers(1, 4), st.sampled_from(["min", "max"])
    ),
    st.builds(lambda hours: Within(hours=hours), st.integers(1, 30)),
)
known = st.lists(
    st.builds(
        Known,
        st.integers(0, 40),
        st.floats(0, 2e5),
        st.dictionaries(st.sampled_from(["a", "b"]), values),
        st.none() | st.floats(0, 2e5),
    ),
    max_size=12,
    unique_by=lambda one: one.step,
)


def slow(rule: Rule, steps: list[Known]) -> set[int]:
    """Which are kept, asked of each by itself."""
    found = set()
    for one in steps:
        match rule:
            case Latest():
                keeps = sum(other.step > one.step for other in steps) < rule.count
            case Every():
                keeps = one.step % rule.steps == 0
            case Best():

                def value(other: Known, rule: Best = rule) -> float:
                    return other.metrics.get(rule.metric, math.nan)

                mine = value(one)
                sign = 1 if rule.mode == "min" else -1
                better = [
                    o for o in steps if sign * value(o) < sign * mine or (value(o) == mine and o.step > one.step)
                ]  # fmt: skip
                keeps = not math.isnan(mine) and len(better) < rule.count
            case Within():
                counted = [other for other in steps if other.ran is not None]
                newest = max(counted, key=lambda other: other.step, default=None)
                above = [other for other in counted if other.step >= one.step]
                if newest is None or not above:
                    keeps = True
                else:
                    as_old = min(above, key=lambda other: other.step)
                    keeps = (
                        newest.ran - as_old.ran <= rule.seconds
                        or newest.saved - one.saved <= rule.seconds
                    )
        if keeps:
            found.add(one.step)
    return found


@given(known, st.lists(rules, max_size=4))
def test_the_union_of_what_each_keeps(steps: list[Known], chosen: list[Rule]):
    kept = kept_by(chosen, steps)
    assert kept.keys() == {one.step for one in steps}
    for number, by in kept.items():
        assert set(by) == {rule for rule in chosen if number in slow(rule, steps)}


@given(rules)
def test_a_rule_has_a_text(rule: Rule):
    assert str(read_rule(str(rule))) == str(rule)
    assert read_rules([rule, str(rule)])[0] == rule


@pytest.mark.parametrize(
    ("steps", "kept"),
    [
        ([Known(1, 1000.0, ran=0.0), Known(2, 2000.0, ran=1000.0), Known(3, 9000.0, ran=8000.0)], [3]),
        ([Known(1, 1000.0, ran=0.0), Known(2, 2000.0, ran=1000.0), Known(3, 9e9, ran=1010.0)], [1, 2, 3]),
        ([Known(1, 1000.0, ran=0.0), Known(2, 0.0, ran=10.0), Known(3, 1020.0, ran=20.0)], [1, 2, 3]),
        ([Known(1, 1000.0, ran=0.0), Known(2, 2000.0, ran=10.0), Known(3, 2010.0, ran=1e6)], [1, 2, 3]),
        ([Known(1, 1000.0), Known(2, 2000.0), Known(3, 9e9)], [1, 2, 3]),
        ([Known(1, 0.0), Known(2, 1e5, ran=0.0), Known(3, 2e5, ran=1e5)], [3]),
        ([Known(1, 0.0), Known(2, 1e5, ran=0.0), Known(3, 2e5, ran=10.0)], [1, 2, 3]),
        ([Known(1, 0.0, ran=0.0), Known(2, 1e5, ran=1e5), Known(3, 2e5)], [2, 3]),
    ],
    ids=[
        "older", "forward", "back and repaired", "a step of another run", "an older Holdfast", "went on since", "just gone on",
        "the newest does not say",
    ],
)  # fmt: skip
def test_an_age_is_what_both_clocks_say(steps: list[Known], kept: list[int]):
    assert [number for number, by in kept_by([Within(hours=1)], steps).items() if by] == kept


@pytest.mark.parametrize(
    "text",
    [
        "",
        "latest",
        "latest:0",
        "latest:x",
        "every:",
        "best:",
        "best:a:0",
        "within:",
        "within:-1h",
        "newest:3",
        "within:1y",
    ],
)
def test_what_is_no_rule_is_refused(text: str):
    with pytest.raises(BadArgument, match="is no rule"):
        read_rule(text)


@pytest.mark.parametrize("wrong", [3, [3], [None], True, b"latest:3"])
def test_what_keep_does_not_take(wrong: object):
    with pytest.raises(BadArgument, match="keep="):
        read_rules(wrong)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Latest(0),
        lambda: Every(-1),
        lambda: Best("", 1),
        lambda: Best("a", 1, "least"),
        Within,
    ],
)
def test_rules_are_checked_when_they_are_made(make):
    with pytest.raises(BadArgument):
        make()


def test_a_metric_may_have_colons_in_its_name():
    assert read_rule("best:val:loss:2:max") == Best("val:loss", 2, "max")
    assert read_rule("best:loss") == Best("loss", 1)


# What is kept beside the rules.


def step(number: int, saved: float | None = None, **metrics: float) -> Step:
    return Step(
        number,
        f"/run/step-{number}",
        float(number) if saved is None else saved,
        metrics,
        1,
        f"step-{number}",
    )


def goes(fates: list) -> list[int]:
    return [fate.step.step for fate in fates if fate.goes]


def test_the_newest_stays_and_the_one_before_until_it_was_read_back():
    steps = [step(n) for n in range(1, 6)]
    fates = decide(steps, [Best("none")])
    assert goes(fates) == [1, 2, 3]
    assert fates[3].why == "until step 5 has been read back"
    assert goes(decide(steps, [Best("none")], sure={5})) == [1, 2, 3, 4]
    assert goes(decide(steps, [Latest(1)], sure={1, 2, 3, 4})) == [1, 2, 3]


def test_without_rules_nothing_goes():
    assert goes(decide([step(n) for n in range(5)], [])) == []


def test_pins_and_what_is_in_use():
    fates = decide(
        [step(n) for n in range(5)],
        [Latest(1)],
        sure={4},
        pins={1: Pin(1, "paper")},
        busy={2: "being exported"},
    )
    assert goes(fates) == [0, 3]
    assert (fates[1].why, fates[2].why) == ("pinned: paper", "being exported")


def test_a_run_that_went_back_keeps_what_it_saves():
    """Steps 100 to 102 are there, and 50 is saved anew: by number it is the oldest."""
    steps = [step(50, saved=500.0), *(step(n) for n in range(100, 103))]
    assert 50 not in goes(decide(steps, [Latest(1)], sure={102}))


def test_what_is_coming_is_counted_and_protects_nothing():
    steps = [step(n) for n in range(1, 5)]
    assert goes(decide(steps, [Latest(2)], sure={4}, coming=Known(5))) == [1, 2, 3]
    assert goes(decide(steps, [Latest(2)], coming=Known(5))) == [1, 2]


@given(known, st.lists(rules, min_size=1, max_size=3), st.sets(st.integers(0, 40)))
def test_the_newest_whole_step_never_goes(steps: list[Known], chosen: list[Rule], sure: set[int]):
    made = (replace(step(one.step, one.saved, **one.metrics), ran=one.ran) for one in steps)
    ordered = sorted(made, key=lambda one: one.step)
    gone = goes(decide(ordered, chosen, sure=sure))
    if ordered:
        assert ordered[-1].step not in gone
    if len(ordered) > 1 and ordered[-1].step not in sure:
        assert ordered[-2].step not in gone
