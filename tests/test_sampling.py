"""The sample of `make test` and the tables that decide about it."""

from __future__ import annotations

import ast
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests import sampling
from tests.rooms import PROOFS, files_of_room, read_rooms, room_of
from tests.sampling import FunctionCost, choose_cases, count_affordable_cases

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "holdfast"

cases_of_two_parameters = st.lists(
    st.fixed_dictionaries({"verb": st.integers(0, 4), "attack": st.integers(0, 9)}), max_size=40
)


@given(cases=cases_of_two_parameters, count=st.integers(0, 50), seed=st.integers(0, 1000))
def test_as_many_cases_are_chosen_as_asked_for(cases, count, seed):
    chosen = choose_cases(cases, count, random.Random(seed))
    assert len(set(chosen)) == len(chosen) == min(count, len(cases))


@given(seed=st.integers(0, 1000))
def test_few_cases_cover_every_value_of_every_parameter(seed):
    cases = [{"verb": verb, "attack": attack} for verb in range(4) for attack in range(6)]
    chosen = choose_cases(cases, 6, random.Random(seed))
    assert {cases[index]["verb"] for index in chosen} == set(range(4))
    assert {cases[index]["attack"] for index in chosen} == set(range(6))


def test_another_seed_chooses_other_cases():
    cases = [{"attack": attack} for attack in range(100)]
    samples = {tuple(choose_cases(cases, 5, random.Random(seed))) for seed in range(10)}
    assert len(samples) > 5


def test_the_same_seed_chooses_the_same_cases(monkeypatch):
    monkeypatch.setenv(sampling.SEED_VARIABLE, "7")
    cases = [{"attack": attack} for attack in range(100)]
    first = choose_cases(cases, 5, sampling.random_for("test_attack"))
    second = choose_cases(cases, 5, sampling.random_for("test_attack"))
    assert first == second
    assert choose_cases(cases, 5, sampling.random_for("another_test")) != first


@pytest.mark.parametrize(
    ("cost", "budget", "count"),
    [
        (None, 1.0, 50),
        (FunctionCost(50, 0.9), 1.0, 50),
        (FunctionCost(50, 10.0), 1.0, 5),
        (FunctionCost(50, 500.0), 1.0, 1),
        (FunctionCost(25, 10.0), 1.0, 2),
    ],
)
def test_a_budget_pays_for_some_cases_and_at_least_one(cost, budget, count):
    assert count_affordable_cases(cost, 50, budget) == count


def test_every_function_with_long_cases_gets_its_turn():
    costs = {f"test_{number}": FunctionCost(1, 5.0) for number in range(12)}
    seen: set[str] = set()
    for seed in range(40):
        chosen = sampling.choose_functions_in_turn(costs, 20.0, random.Random(seed))
        assert len(chosen) == 4
        seen |= chosen
    assert seen == set(costs)


def functions_of_test_file(file: str) -> dict[str, list[ast.expr]]:
    """Return the test functions of a file, with their decorators."""
    functions: dict[str, list[ast.expr]] = {}
    for node in ast.parse((ROOT / file).read_text("utf-8")).body:
        if isinstance(node, ast.FunctionDef):
            functions[node.name] = node.decorator_list
        if isinstance(node, ast.ClassDef):
            for inner in node.body:
                if isinstance(inner, ast.FunctionDef):
                    functions[f"{node.name}::{inner.name}"] = inner.decorator_list
    return functions


def test_costs_are_those_of_tests_that_exist():
    gone: list[str] = []
    for function in sampling.read_costs():
        file, _, name = function.partition("::")
        if not (ROOT / file).is_file() or name not in functions_of_test_file(file):
            gone.append(function)
    assert gone == [], "remove these from tests/costs.json, or run `make costs`"


def is_slow_with_a_reason(decorator: ast.expr) -> bool:
    return (
        isinstance(decorator, ast.Call)
        and ast.unparse(decorator.func) == "pytest.mark.slow"
        and len(decorator.args) == 1
    )


def test_a_case_of_more_than_ten_seconds_has_a_reason_beside_it():
    unexplained: list[str] = []
    for function, cost in sampling.read_costs().items():
        if cost.seconds_per_case <= sampling.REASON_SECONDS:
            continue
        file, _, name = function.partition("::")
        decorators = functions_of_test_file(file)[name]
        if not any(is_slow_with_a_reason(decorator) for decorator in decorators):
            unexplained.append(function)
    assert unexplained == [], 'make them faster, or add @pytest.mark.slow("the reason")'


def test_every_room_has_tests_that_exist():
    rooms = {room_of(path.relative_to(SOURCE).as_posix()) for path in SOURCE.rglob("*.py")}
    table = read_rooms()
    assert set(table) == rooms, "add new rooms to tests/rooms.json, or run `make costs`"
    assert set(PROOFS) <= rooms
    for room in table:
        files = files_of_room(room)
        assert files, f"no test exercises src/holdfast/{room}"
        assert [file for file in files if not (ROOT / file).is_file()] == []


def test_a_room_has_the_tests_of_its_own_folder():
    assert "tests/formats/dcp/test_dcp_written.py" in files_of_room("formats/dcp")


def test_an_unknown_room_is_refused_with_similar_names():
    with pytest.raises(SystemExit, match="formats/dcp"):
        files_of_room("formats/dpc")
