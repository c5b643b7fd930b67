"""Which steps of a run are kept: rules are values, and what any of them keeps is kept.

    Latest(3)               the three with the highest numbers
    Every(10_000)           each whose number it divides
    Best("val_loss", 2)     the two with the least val_loss; mode="max" for the largest
    Within(hours=24)        those that were saved in the last day of the run

A rule has a short text (`latest:3`, `best:val_loss:2`, `within:24h`), which the command line takes and a run's directory keeps.
Pure: no rule looks at a disk or at a clock.

A rule by time deletes only what is surely older. Each step says when it was saved, by the clock on the wall, and for how long the
run had run (runs/clock.py). An age is what the newest step has more, of the two differences the lesser one. So a clock that jumps
ages nothing, a step that was copied from another run neither, and a pause of a week does not let a day's steps go. A step that does
not say how long the run had run counts as saved with the next one that does; above the last of those nothing has an age.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from holdfast.core.quantities import describe_value, parse_count, parse_seconds
from holdfast.errors import BadArgument, BadArgumentType


class Facts(Protocol):
    """The facts that rules know of a step."""

    @property
    def step(self) -> int: ...

    @property
    def saved(self) -> float:
        """Seconds since 1970."""

    @property
    def metrics(self) -> Mapping[str, float]: ...

    @property
    def ran(self) -> float | None:
        """For how many seconds the run had run."""


class Rule:
    """The base of all rules. A class and no union: a list of several rules is then a list of rules to every type checker."""

    __slots__ = ()

    def _keeps(self, steps: Sequence[Facts]) -> list[int]:
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Latest(Rule):
    """The `count` steps with the highest numbers."""

    count: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "count", parse_count(self.count, "Latest(…)"))

    def __str__(self) -> str:
        return f"latest:{self.count}"

    def _keeps(self, steps: Sequence[Facts]) -> list[int]:
        return sorted(one.step for one in steps)[-self.count :]


@dataclass(frozen=True, slots=True)
class Every(Rule):
    """Steps whose number is a multiple of `steps`."""

    steps: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "steps", parse_count(self.steps, "Every(…)"))

    def __str__(self) -> str:
        return f"every:{self.steps}"

    def _keeps(self, steps: Sequence[Facts]) -> list[int]:
        return [one.step for one in steps if one.step % self.steps == 0]


@dataclass(frozen=True, slots=True)
class Best(Rule):
    """The `count` steps with the least value of a metric, or with `mode="max"` the largest. NaN is never best, nor is no value.

    Of equal values the later step's counts as better.
    """

    metric: str
    count: int = 1
    mode: Literal["min", "max"] = "min"

    def __post_init__(self) -> None:
        if not isinstance(self.metric, str) or not self.metric:
            raise BadArgumentType(
                f"Best(…) takes the name of a metric, not {describe_value(self.metric)}",
                found=self.metric,
            )
        object.__setattr__(self, "count", parse_count(self.count, "Best(…)"))
        if self.mode not in ("min", "max"):
            raise BadArgument(
                f"mode= takes 'min' or 'max', not {describe_value(self.mode)}", found=self.mode
            )

    def __str__(self) -> str:
        return f"best:{self.metric}:{self.count}" + (":max" if self.mode == "max" else "")

    def _keeps(self, steps: Sequence[Facts]) -> list[int]:
        sign = 1 if self.mode == "min" else -1
        known = [
            (sign * one.metrics[self.metric], -one.step)
            for one in steps
            if self.metric in one.metrics
        ]
        return [
            -number
            for _, number in sorted(pair for pair in known if not math.isnan(pair[0]))[: self.count]
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Within(Rule):
    """Steps of the last hours or days of a run."""

    days: float = 0
    hours: float = 0
    minutes: float = 0

    def __post_init__(self) -> None:
        for name in ("days", "hours", "minutes"):
            value = getattr(self, name)
            if (
                isinstance(value, bool)
                or not isinstance(value, int | float)
                or not 0 <= value < math.inf
            ):
                raise BadArgumentType(
                    f"Within({name}=…) takes a number, not {describe_value(value)}", found=value
                )
        if not 0 < self.seconds < math.inf:
            raise BadArgument(
                "Within(…) takes a time that is longer than none: hours=24, days=2, minutes=30"
            )

    @property
    def seconds(self) -> float:
        return 86400.0 * self.days + 3600.0 * self.hours + 60.0 * self.minutes

    def __str__(self) -> str:
        for unit, length in (("h", 3600), ("min", 60)):
            if self.seconds % length == 0:
                return f"within:{int(self.seconds // length)}{unit}"
        return f"within:{self.seconds!r}s"

    def _keeps(self, steps: Sequence[Facts]) -> list[int]:
        return [number for number, age in _ages(steps).items() if age <= self.seconds]


def kept_by(rules: Iterable[Rule], steps: Sequence[Facts]) -> dict[int, tuple[Rule, ...]]:
    """Every step, and the rules that keep it. Steps have different numbers."""
    kept: dict[int, list[Rule]] = {one.step: [] for one in steps}
    for rule in dict.fromkeys(rules):
        for number in rule._keeps(steps):
            kept[number].append(rule)
    return {number: tuple(found) for number, found in kept.items()}


def _ages(steps: Sequence[Facts]) -> dict[int, float]:
    """For how many seconds the run surely ran on after each step."""
    ages: dict[int, float] = {}
    newest: tuple[float, float] | None = None
    ran = 0.0
    for one in sorted(steps, key=lambda one: one.step, reverse=True):
        ran = ran if one.ran is None else one.ran
        if newest is None and one.ran is not None:
            newest = one.ran, one.saved
        ages[one.step] = 0.0 if newest is None else min(newest[0] - ran, newest[1] - one.saved)
    return ages


HINT = "latest:3, every:10000, best:val_loss:2, best:accuracy:1:max or within:24h"


def read_rule(text: str) -> Rule:
    """A rule from its short text.

    >>> read_rule("best:val_loss:2"), read_rule("within:36h")
    (Best(metric='val_loss', count=2, mode='min'), Within(days=0, hours=36.0, minutes=0))
    """
    kind, _, rest = text.partition(":")
    try:
        match kind:
            case "latest":
                return Latest(parse_count(rest, "latest:"))
            case "every":
                return Every(parse_count(rest.replace("_", ""), "every:"))
            case "within":
                return Within(hours=parse_seconds(rest, "within:") / 3600)
            case "best":
                return _read_best(rest)
    except BadArgument as error:
        raise BadArgument(
            f"{text!r} is no rule: {error.message}; write {HINT}", found=text
        ) from None
    raise BadArgument(f"{text!r} is no rule; write {HINT}", found=text)


def _read_best(text: str) -> Best:
    """METRIC, METRIC:COUNT or METRIC:COUNT:MODE; a metric may have colons in its name."""
    metric, mode, count = text, "min", "1"
    front, _, last = metric.rpartition(":")
    if front and last in ("min", "max"):
        metric, mode = front, last
    front, _, last = metric.rpartition(":")
    if front and last.isdecimal():
        metric, count = front, last
    return Best(metric, parse_count(count, "best:"), "max" if mode == "max" else "min")


def read_rules(given: object, name: str = "keep=") -> tuple[Rule, ...]:
    """The rules of `keep=`: rules, or their texts; one, or any number of them. None is no rule: nothing is ever deleted."""
    if given is None:
        return ()
    several = (given,) if isinstance(given, str | Rule) else given
    if not isinstance(several, Iterable):
        raise BadArgumentType(
            f"{name} takes rules, such as Latest(3), not {describe_value(given)}", found=given
        )
    made: list[Rule] = []
    for one in several:
        if isinstance(one, str):
            made.append(read_rule(one))
        elif isinstance(one, Rule):
            made.append(one)
        else:
            raise BadArgumentType(
                f"{name} takes rules, such as Latest(3) or 'latest:3', not {describe_value(one)}",
                found=one,
            )
    return tuple(dict.fromkeys(made))
