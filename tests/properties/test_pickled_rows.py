"""`holdfast.save` to a `.pt` against `torch.save`: the same bytes for plain tensors of few and many kinds.

The numbers of the memo have one byte up to 255 and four behind, keys of records one digit up to 9, two up to 99: states are drawn
so that tensors of a kind come first, again, and tied, on both sides of each. Empty tensors are left out: two of them have one
record here, and two in torch's file.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import holdfast
from tests.sampling import examples

KINDS = [
    ((), torch.float32), ((3,), torch.float32), ((2, 3), torch.float32), ((2, 3), torch.int64), ((37,), torch.uint8),
    ((300, 2), torch.float16), ((1, 2, 3, 4), torch.bfloat16), ((5,), torch.uint16),
]  # fmt: skip

ITEMS = st.one_of(
    st.integers(0, len(KINDS) - 1),
    st.tuples(st.just("again"), st.integers(0, 200)),
    st.tuples(st.just("view"), st.integers(0, 200)),
    st.tuples(
        st.just("value"),
        st.sampled_from(
            [0, 255, 256, 70000, -1, 1.5, None, True, "0", "7", "text", "storage", "cpu"]
        ),
    ),
)


def made(items: list[object]) -> list[object]:
    """What stands in a state: new tensors of kinds, earlier ones once more, others over their storages, plain values."""
    values: list[object] = []
    tensors: list[torch.Tensor] = []
    for number, item in enumerate(items):
        if isinstance(item, int):
            shape, dtype = KINDS[item]
            tensors.append(torch.full(shape, number % 50, dtype=dtype))
            values.append(tensors[-1])
        elif isinstance(item, tuple) and item[0] == "value":
            values.append(item[1])
        elif isinstance(item, tuple) and tensors:
            tensor = tensors[item[1] % len(tensors)]
            values.append(tensor if item[0] == "again" else tensor.detach())
    return values


def assert_same(state: object, folder: Path) -> None:
    torch.save(state, folder / "a.pt")
    expected = (folder / "a.pt").read_bytes()
    holdfast.save(state, folder / "a.pt", durable=False)
    assert (folder / "a.pt").read_bytes() == expected


@settings(
    max_examples=examples(150),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    first=st.sampled_from([0, 1, 8, 9, 10, 30, 31, 32, 98]),
    items=st.lists(ITEMS, max_size=30),
    form=st.sampled_from(["dict", "list", "nested", "numbers", "digits"]),
)
def test_bytes_are_those_of_torch(tmp_path: Path, first: int, items: list[object], form: str):
    values = made([1] * first + items)
    states = {
        "dict": {f"layer.{at}": value for at, value in enumerate(values)},
        "list": values,
        "nested": {"a": [{"w": value, "n": at} for at, value in enumerate(values)]},
        "numbers": dict(enumerate(values)),
        "digits": {f"{at}": value for at, value in enumerate(values)},
    }
    assert_same(states[form], tmp_path)


@pytest.mark.parametrize("count", [999, 1000, 1001, 2003])
def test_many_are_written_as_torch_writes_them(tmp_path: Path, count: int):
    values = made([(at // 3) % 6 if at % 7 else ("again", at) for at in range(count)])
    assert_same({f"layer.{at}%d": value for at, value in enumerate(values)}, tmp_path)
