"""Schedules, beside torch's of the same names."""

from __future__ import annotations

import copy
import io
import logging
import pickle
import warnings

import pytest
import torch
import torch.ao.pruning as theirs

from holdfast.torch.sparsity import (
    BaseScheduler,
    CubicSL,
    LambdaSL,
    LinearSL,
    MagnitudeSparsifier,
    WeightNormSparsifier,
)
from tests.torch.sparsity.models import linears


def sparsifier(level: float = 0.8, kind=WeightNormSparsifier):
    made = kind(sparsity_level=level)
    made.prepare(
        linears(),
        [{"tensor_fqn": "0.weight"}, {"tensor_fqn": "2.0.weight", "sparsity_level": level / 2}],
    )
    return made


def levels(schedule, count: int) -> list[list[float]]:
    found = [list(schedule.get_last_sl())]
    for _ in range(count):
        schedule.sparsifier.step()
        schedule.step()
        found.append([group["sparsity_level"] for group in schedule.sparsifier.groups])
        assert found[-1] == schedule.get_last_sl()
    return found


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"init_sl": 0.1, "init_t": 3, "delta_t": 2, "total_t": 4},
        {"init_sl": 0.1, "init_t": 3, "delta_t": 1, "total_t": 5, "initially_zero": True},
        {
            "init_sl": [0.1, 0.2],
            "init_t": [0, 4],
            "delta_t": [1, 2],
            "total_t": (3, 2),
            "initially_zero": [True, False],
        },
        {"last_epoch": 4, "delta_t": 1, "total_t": 8},
    ],
)
def test_cubic_levels_are_torchs(settings):
    ours = levels(CubicSL(sparsifier(), **settings), 14)
    torchs = levels(theirs.CubicSL(sparsifier(kind=theirs.WeightNormSparsifier), **settings), 14)
    assert ours == [pytest.approx(each, abs=1e-12) for each in torchs]


def test_lambda_levels_are_torchs():
    def f(epoch):
        return 1 - 0.1 * epoch

    for lambdas in (f, [f, lambda epoch: 0.5]):
        ours = levels(LambdaSL(sparsifier(), lambdas), 5)
        torchs = levels(theirs.LambdaSL(sparsifier(kind=theirs.WeightNormSparsifier), lambdas), 5)
        assert ours == torchs


def test_a_line():
    schedule = LinearSL(sparsifier(), init_t=2, delta_t=1, total_t=4)
    assert [a for a, _ in levels(schedule, 8)] == pytest.approx(
        [0, 0, 0, 0.2, 0.4, 0.6, 0.8, 0.8, 0.8]
    )


def test_a_level_may_fall_too():
    # torch: stays at the first.
    schedule = LinearSL(sparsifier(0.2), init_sl=0.6, delta_t=1, total_t=4)
    assert [a for a, _ in levels(schedule, 5)] == pytest.approx([0.6, 0.5, 0.4, 0.3, 0.2, 0.2])


def test_ones_own_schedule():
    class Halves(BaseScheduler):
        def get_sl(self):
            if self.last_epoch > 0:
                return [group["sparsity_level"] * 0.5 for group in self.sparsifier.groups]
            return self.base_sl

    schedule = Halves(sparsifier())
    assert schedule.base_sl == [0.8, 0.4]
    assert (schedule.last_epoch, schedule._step_count) == (0, 1)
    assert [a for a, _ in levels(schedule, 2)] == [0.8, 0.4, 0.2]
    with pytest.raises(NotImplementedError):
        BaseScheduler(sparsifier())


def test_the_sparsifier_goes_first():
    schedule = CubicSL(sparsifier())
    with pytest.warns(UserWarning, match="came before the sparsifier's"):
        schedule.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        schedule.step()  # said once
        schedule = CubicSL(sparsifier())
        schedule.sparsifier.step()
        schedule.step()
    with pytest.warns(UserWarning, match="get_last_sl"):
        schedule.get_sl()


def test_a_sparsifier_with_its_own_step_is_not_suspected():
    class Own(MagnitudeSparsifier):
        def step(self, use_path=True):
            pass

    schedule = CubicSL(sparsifier(kind=Own))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        schedule.step()


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda s: CubicSL(s, delta_t=[1, 2, 3]), ValueError, "has 2 groups; found a list of 3"),
        (lambda s: LambdaSL(s, [abs] * 3), ValueError, "has 2 groups; found a list of 3"),
        (lambda s: CubicSL(s, total_t=0), ValueError, "more than 0"),
        (lambda s: LinearSL(s, delta_t=-1), ValueError, "more than 0"),
        (lambda s: CubicSL(s, init_sl=7), ValueError, "from 0 to 1"),
        (lambda s: CubicSL(5), TypeError, "found a int"),
        (lambda s: LambdaSL(None, abs), TypeError, "found a NoneType"),
    ],
)
def test_settings_that_cannot_be(make, error, text):
    with pytest.raises(error, match=text):
        make(sparsifier())


def test_levels_are_logged_and_not_printed(caplog, capsys):
    with caplog.at_level(logging.DEBUG, "holdfast.torch.sparsity"):
        CubicSL(sparsifier(), init_sl=0.25, verbose=True)
    assert "sparsity level of group 1 is 2.5000e-01" in caplog.text
    assert capsys.readouterr().out == ""


def test_it_says_what_it_is():
    assert (
        repr(CubicSL(WeightNormSparsifier()))
        == "CubicSL (\nSparsifier WeightNormSparsifier ()\n    base_sl: []\n)"
    )


class Decay:
    def __init__(self, rate):
        self.rate = rate

    def __call__(self, epoch):
        return self.rate**epoch


@pytest.mark.parametrize(
    ("make", "again"),
    [
        (lambda s: CubicSL(s, init_sl=0.1, delta_t=1), lambda s: CubicSL(s)),
        (lambda s: LinearSL(s, init_sl=0.1, delta_t=1), lambda s: LinearSL(s)),
        (
            lambda s: LambdaSL(s, lambda epoch: 0.9**epoch),
            lambda s: LambdaSL(s, lambda epoch: 0.9**epoch),
        ),
        (lambda s: LambdaSL(s, Decay(0.9)), lambda s: LambdaSL(s, Decay(0.5))),
    ],
)
def test_a_schedule_goes_on_where_it_was(make, again):
    # torch: lambdas make its state impossible to pickle, and the levels of a loaded one are set at the next step only.
    first = make(sparsifier())
    levels(first, 4)
    buffer = io.BytesIO()
    torch.save(
        {"schedule": first.state_dict(), "sparsifier": first.sparsifier.state_dict()}, buffer
    )
    buffer.seek(0)
    saved = torch.load(buffer, weights_only=True)
    other = sparsifier(0.3)
    other.load_state_dict(saved["sparsifier"])
    second = again(other)
    second.load_state_dict(saved["schedule"])
    assert second.base_sl == [0.8, 0.4]
    assert [group["sparsity_level"] for group in other.groups] == first.get_last_sl()
    assert levels(second, 5) == levels(first, 5)


def test_a_state_of_another_schedule_is_refused():
    schedule = CubicSL(sparsifier())
    saved = schedule.state_dict()
    with pytest.raises(ValueError, match="has no 'init_slope'; did you mean 'init_sl'"):
        schedule.load_state_dict({**saved, "init_slope": 1})
    single = WeightNormSparsifier()
    single.prepare(linears(), [{"tensor_fqn": "0.weight"}])
    with pytest.raises(ValueError, match="another number of groups than 1"):
        CubicSL(single).load_state_dict(saved)
    saved["init_sl"][0] = 5
    assert schedule.init_sl[0] == 0


def test_it_can_be_pickled_and_copied_with_its_sparsifier():
    schedule = CubicSL(sparsifier())
    levels(schedule, 2)
    there = pickle.loads(pickle.dumps(schedule))
    assert there.state_dict() == schedule.state_dict()
    there.sparsifier.prepare(linears())
    twin = copy.deepcopy(schedule)
    assert levels(there, 3) == levels(twin, 3) == levels(schedule, 3)
