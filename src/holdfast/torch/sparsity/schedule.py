"""Schedules: sparsity levels that change from step to step, until they are what the sparsifier was set to.

    sparsifier.prepare(model)                          the levels to be reached
    schedule = CubicSL(sparsifier, total_t=100, delta_t=1)
    for epoch in range(200):
        train(…)
        sparsifier.step()                              masks, by the present levels
        schedule.step()                                the levels of the next epoch

A schedule counts its steps in `last_epoch`, and makes one of them when it is made. Its state is plain values, without functions.
"""

from __future__ import annotations

import abc
import logging
import types
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from holdfast.torch.sparsity.fake import similar_names
from holdfast.torch.sparsity.masks import checked_level
from holdfast.torch.sparsity.sparsifier import BaseSparsifier, plain

log = logging.getLogger("holdfast.torch.sparsity")

T = TypeVar("T")
Factor = Callable[[int], float]


class BaseScheduler:
    """The base of all schedules. A subclass defines in `get_sl` the levels of the epoch `last_epoch`."""

    def __init__(
        self, sparsifier: BaseSparsifier, last_epoch: int = -1, verbose: bool = False
    ) -> None:
        self.sparsifier = _checked(sparsifier)
        self.base_sl: list[float] = [group["sparsity_level"] for group in sparsifier.groups]
        """The levels that the groups had when the schedule was made."""
        self.last_epoch = last_epoch
        self.verbose = verbose
        self._step_count = 0
        self._last_sl: list[float] = list(self.base_sl)
        self._get_sl_called_within_step = False
        self._steps_before = sparsifier._steps
        self.step()

    def get_sl(self) -> list[float]:
        """The level of each group for the epoch `last_epoch`."""
        raise NotImplementedError

    def get_last_sl(self) -> list[float]:
        """The levels that were set last."""
        return self._last_sl

    def step(self, epoch: int | None = None) -> None:
        """Set the levels of the next epoch. `epoch` is for the log alone, as in torch."""
        sparsifier = self.sparsifier
        counts_steps = type(sparsifier).step is BaseSparsifier.step or sparsifier._steps > 0
        if self._step_count == 1 and sparsifier._steps == self._steps_before and counts_steps:
            warnings.warn(
                "the schedule's step() came before the sparsifier's: call sparsifier.step() first, or the first level goes unused",
                UserWarning,
                stacklevel=2,
            )
        self._step_count += 1
        self.last_epoch += 1
        self._get_sl_called_within_step = True
        try:
            levels = self.get_sl()
        finally:
            self._get_sl_called_within_step = False
        for i, (group, level) in enumerate(zip(self.sparsifier.groups, levels, strict=True)):
            group["sparsity_level"] = level
            self.print_sl(self.verbose, i, level, epoch)
        self._last_sl = list(levels)

    def print_sl(self, is_verbose: bool, group: int, sl: float, epoch: int | None = None) -> None:
        """Log the level of a group, at DEBUG; torch prints it."""
        if is_verbose:
            log.debug(
                "epoch %s: sparsity level of group %d is %.4e",
                self.last_epoch if epoch is None else epoch,
                group,
                sl,
            )

    def state_dict(self) -> dict[str, object]:
        """The state of the schedule as plain values: all attributes but the sparsifier and functions."""
        return {
            key: plain(value)
            for key, value in vars(self).items()
            if key not in ("sparsifier", "_steps_before")
            and not isinstance(value, types.FunctionType | types.MethodType)
        }

    def load_state_dict(self, state_dict: Mapping[str, object]) -> None:
        """Go on where another schedule was, with its levels at once."""
        known = vars(self)
        for key in state_dict:
            if key not in known or key == "sparsifier":
                raise ValueError(
                    f"a state of {type(self).__name__} has no {key!r}{similar_names(key, known)}"
                )
        levels = state_dict.get("_last_sl", self._last_sl)
        if not isinstance(levels, Sequence) or len(levels) != len(self.sparsifier.groups):
            raise ValueError(
                f"the state is of a schedule for another number of groups than {len(self.sparsifier.groups)}"
            )
        known.update((key, plain(value)) for key, value in state_dict.items())
        for group, level in zip(self.sparsifier.groups, levels, strict=True):
            group["sparsity_level"] = level

    def _make_sure_a_list(self, var: T | Sequence[T]) -> list[T]:
        """A value for each group, from one for all or a list."""
        count = len(self.sparsifier.groups)
        if not isinstance(var, list | tuple):
            return [var] * count  # type: ignore[list-item]  # no list or tuple: a T
        if len(var) != count:
            raise ValueError(f"the sparsifier has {count} groups; found a list of {len(var)}")
        return list(var)

    def _check_called_within_step(self) -> None:
        if not self._get_sl_called_within_step:
            warnings.warn(
                "get_last_sl() gives the levels that were set last; get_sl() computes",
                UserWarning,
                stacklevel=3,
            )

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__} (\nSparsifier {self.sparsifier}\n    base_sl: {self.base_sl}\n)"
        )


def _checked(sparsifier: BaseSparsifier) -> BaseSparsifier:
    if not isinstance(sparsifier, BaseSparsifier):
        raise TypeError(
            f"a schedule is for a sparsifier of holdfast.torch.sparsity; found a {type(sparsifier).__name__}"
        )
    return sparsifier


class LambdaSL(BaseScheduler):
    """The level of each group times a function of the epoch, one for all or a list."""

    def __init__(
        self,
        sparsifier: BaseSparsifier,
        sl_lambda: Factor | Sequence[Factor],
        last_epoch: int = -1,
        verbose: bool = False,
    ) -> None:
        self.sparsifier = _checked(sparsifier)
        self.sl_lambdas: list[Factor] = self._make_sure_a_list(sl_lambda)
        super().__init__(sparsifier, last_epoch, verbose)

    def get_sl(self) -> list[float]:
        self._check_called_within_step()
        return [
            level * factor(self.last_epoch)
            for level, factor in zip(self.base_sl, self.sl_lambdas, strict=True)
        ]

    def state_dict(self) -> dict[str, object]:
        """The state of the schedule: attributes of callable objects are in it, functions are not."""
        own = super().state_dict()
        own["sl_lambdas"] = [plain(vars(f)) if _has_state(f) else None for f in self.sl_lambdas]
        return own

    def load_state_dict(self, state_dict: Mapping[str, object]) -> None:
        rest = {key: value for key, value in state_dict.items() if key != "sl_lambdas"}
        saved = state_dict.get("sl_lambdas", [None] * len(self.sl_lambdas))
        if not isinstance(saved, list) or len(saved) != len(self.sl_lambdas):
            raise ValueError(
                f"the state is of a schedule for another number of groups than {len(self.sl_lambdas)}"
            )
        super().load_state_dict(rest)
        for factor, attributes in zip(self.sl_lambdas, saved, strict=True):
            if isinstance(attributes, Mapping) and _has_state(factor):
                vars(factor).update(attributes)


def _has_state(factor: Factor) -> bool:
    """Whether a factor is an object of the user, with attributes that may change."""
    functions = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, type)
    return hasattr(factor, "__dict__") and not isinstance(factor, functions)


class _Ramp(BaseScheduler):
    """From `init_sl` at epoch `init_t` to the level of the group, `delta_t * total_t` epochs later, along a curve."""

    def __init__(
        self,
        sparsifier: BaseSparsifier,
        init_sl: float | Sequence[float] = 0.0,
        init_t: int | Sequence[int] = 0,
        delta_t: int | Sequence[int] = 10,
        total_t: int | Sequence[int] = 100,
        initially_zero: bool | Sequence[bool] = False,
        last_epoch: int = -1,
        verbose: bool = False,
    ) -> None:
        self.sparsifier = _checked(sparsifier)
        self.init_sl: list[float] = self._make_sure_a_list(init_sl)
        self.init_t: list[int] = self._make_sure_a_list(init_t)
        self.delta_t: list[int] = self._make_sure_a_list(delta_t)
        self.total_t: list[int] = self._make_sure_a_list(total_t)
        self.initially_zero: list[bool] = self._make_sure_a_list(initially_zero)
        for level in self.init_sl:
            checked_level(level)
        if not all(
            step > 0 and count > 0 for step, count in zip(self.delta_t, self.total_t, strict=True)
        ):
            raise ValueError(
                f"delta_t and total_t are more than 0; found {self.delta_t} and {self.total_t}"
            )
        super().__init__(sparsifier, last_epoch, verbose)

    @staticmethod
    @abc.abstractmethod
    def rest(x: float) -> float:
        """How much of the way is left, from 1 to 0, when the part `x` of the time is over."""

    def get_sl(self) -> list[float]:
        self._check_called_within_step()
        return [self._level(i, final) for i, final in enumerate(self.base_sl)]

    def _level(self, i: int, final: float) -> float:
        first = self.init_sl[i]
        x = (self.last_epoch - self.init_t[i]) / (self.delta_t[i] * self.total_t[i])
        if x < 0 and self.initially_zero[i]:
            return 0.0
        if x <= 0 or x >= 1:
            return first if x <= 0 else final
        low, high = sorted((first, final))
        return min(max(final + (first - final) * self.rest(x), low), high)


class CubicSL(_Ramp):
    """Rises fast at first and slowly at the end: `final + (first - final) * (1 - x)^3` (Zhu and Gupta, 2017).

    From `init_sl` at epoch `init_t` to the level that the group was set to, `delta_t * total_t` epochs later. Before `init_t` the
    level is `init_sl`, or 0 with `initially_zero`. All of them may be lists, with an item for each group.
    """

    @staticmethod
    def rest(x: float) -> float:
        return float((1 - x) ** 3)


class LinearSL(_Ramp):
    """Rises evenly, between the same ends as `CubicSL`. torch has no such schedule."""

    @staticmethod
    def rest(x: float) -> float:
        return 1 - x
