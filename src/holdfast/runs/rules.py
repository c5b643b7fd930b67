"""Which steps of a run are kept: rules are values, and what any of them keeps is kept.

    Latest(3)               the three with the highest numbers
    Every(10_000)           each whose number it divides
    Best("val_loss", 2)     the two with the least val_loss; mode="max" for the largest
    Within(hours=24)        those that were saved in the last day of the run

A rule has a short text (`latest:3`, `best:val_loss:2`, `within:24h`), which the command line takes and a run's directory keeps.
Pure: no rule looks at a disk or at a clock.

Clocks jump. An age is counted back from the newest step, or from now where now is earlier; a step from the future has no age. So
a clock that runs away ages nothing, and a pause of a week does not let a day's steps go. The newest is nobody's to delete anyway
(runs/retention.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from holdfast.core.quantities import seconds, shown, whole_number
from holdfast.errors import BadArgument, BadArgumentType

__all__ = ["Best", "Every", "Facts", "Latest", "Rule", "Within", "kept_by", "read_rule", "read_rules"]


class Facts(Protocol):
    """What rules know of a step."""

    @property
    def step(self) -> int: ...

    @property
    def saved(self) -> float:
        """Seconds since 1970."""

    @property
    def metrics(self) -> Mapping[str, float]: ...


@dataclass(frozen=True, slots=True)
class Latest:
    """The `count` steps with the highest numbers."""

    count: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "count", whole_number(self.count, "Latest(…)"))

    def __str__(self) -> str:
        return f"latest:{self.count}"


@dataclass(frozen=True, slots=True)
class Every:
    """Steps whose number is a multiple of `steps`."""

    steps: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "steps", whole_number(self.steps, "Every(…)"))

    def __str__(self) -> str:
        return f"every:{self.steps}"


@dataclass(frozen=True, slots=True)
class Best:
    """The `count` steps with the least value of a metric, or with `mode="max"` the largest. NaN is never best, nor is no value.

    Of equal values the later step's counts as better.
    """

    metric: str
    count: int = 1
    mode: Literal["min", "max"] = "min"

    def __post_init__(self) -> None:
        if not isinstance(self.metric, str) or not self.metric:
            raise BadArgumentType(f"Best(…) takes the name of a metric, not {shown(self.metric)}", found=self.metric)
        object.__setattr__(self, "count", whole_number(self.count, "Best(…)"))
        if self.mode not in ("min", "max"):
            raise BadArgument(f"mode= takes 'min' or 'max', not {shown(self.mode)}", found=self.mode)

    def __str__(self) -> str:
        return f"best:{self.metric}:{self.count}" + (":max" if self.mode == "max" else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Within:
    """Steps of the last hours or days of a run."""

    days: float = 0
    hours: float = 0
    minutes: float = 0

    def __post_init__(self) -> None:
        for name in ("days", "hours", "minutes"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
                raise BadArgumentType(f"Within({name}=…) takes a number, not {shown(value)}", found=value)
        if not 0 < self.seconds < math.inf:
            raise BadArgument("Within(…) takes a time that is longer than none: hours=24, days=2, minutes=30")

    @property
    def seconds(self) -> float:
        """How long."""
        return 86400.0 * self.days + 3600.0 * self.hours + 60.0 * self.minutes

    def __str__(self) -> str:
        for unit, length in (("h", 3600), ("min", 60)):
            if self.seconds % length == 0:
                return f"within:{int(self.seconds // length)}{unit}"
        return f"within:{self.seconds!r}s"


Rule = Latest | Every | Best | Within


def kept_by(rules: Iterable[Rule], steps: Sequence[Facts], *, now: float) -> dict[int, tuple[Rule, ...]]:
    """Every step, and the rules that keep it. Steps have different numbers; `now` is in seconds since 1970."""
    kept: dict[int, list[Rule]] = {one.step: [] for one in steps}
    for rule in dict.fromkeys(rules):
        for number in _keeps(rule, steps, now):
            kept[number].append(rule)
    return {number: tuple(found) for number, found in kept.items()}


def _keeps(rule: Rule, steps: Sequence[Facts], now: float) -> list[int]:
    match rule:
        case Latest():
            return sorted(one.step for one in steps)[-rule.count :]
        case Every():
            return [one.step for one in steps if one.step % rule.steps == 0]
        case Best():
            sign = 1 if rule.mode == "min" else -1
            known = [(sign * one.metrics[rule.metric], -one.step) for one in steps if rule.metric in one.metrics]
            return [-number for _, number in sorted(pair for pair in known if not math.isnan(pair[0]))[: rule.count]]
        case Within():
            end = min([now, max((one.saved for one in steps), default=now)])
            return [one.step for one in steps if end - one.saved <= rule.seconds]


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
                return Latest(whole_number(rest, "latest:"))
            case "every":
                return Every(whole_number(rest.replace("_", ""), "every:"))
            case "within":
                return Within(hours=seconds(rest, "within:") / 3600)
            case "best":
                return _read_best(rest)
    except BadArgument as error:
        raise BadArgument(f"{text!r} is no rule: {error.message}; write {HINT}", found=text) from None
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
    return Best(metric, whole_number(count, "best:"), "max" if mode == "max" else "min")


def read_rules(given: object) -> tuple[Rule, ...]:
    """What `keep=` takes: rules, or their texts; one, or any number of them. None is none, and then nothing is ever deleted."""
    if given is None:
        return ()
    several = (given,) if isinstance(given, str | Latest | Every | Best | Within) else given
    if not isinstance(several, Iterable):
        raise BadArgumentType(f"keep= takes rules, such as Latest(3), not {shown(given)}", found=given)
    made: list[Rule] = []
    for one in several:
        if isinstance(one, str):
            made.append(read_rule(one))
        elif isinstance(one, Latest | Every | Best | Within):
            made.append(one)
        else:
            raise BadArgumentType(f"keep= takes rules, such as Latest(3) or 'latest:3', not {shown(one)}", found=one)
    return tuple(dict.fromkeys(made))
