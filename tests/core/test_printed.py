"""A tree that cannot be printed is refused when it is opened; how much it would be is found without writing it."""

from __future__ import annotations

from collections import Counter, OrderedDict

import numpy as np
import pytest
from holdfast.core.printed import check_printable
from hypothesis import given
from hypothesis import strategies as st
from tests.hostile.cases_resources import TENS
from tests.hostile.craft_torch import state, torch_zip

import holdfast
from holdfast.core.limits import Limits
from holdfast.core.opaque import Opaque
from holdfast.errors import LimitExceeded, NotCommitted

BOMB = torch_zip(state(TENS))

LEAVES = st.one_of(
    st.none(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.text(),
    st.binary(),
    st.builds(np.arange, st.integers(0, 9)),
)
KEYS = st.one_of(st.text(), st.integers(), st.tuples(st.text(), st.integers()))


@st.composite
def trees(draw: st.DrawFn) -> object:
    """Containers that hold each other and themselves, in any way: each is made, and then filled with some of all."""
    made: list[object] = draw(
        st.lists(
            st.sampled_from([list, dict, OrderedDict]).map(lambda kind: kind()),
            min_size=1,
            max_size=5,
        )
    )
    values = [
        *made,
        *draw(st.lists(LEAVES, max_size=5)),
        draw(st.frozensets(KEYS, max_size=3)),
        (made[0], made[-1]),
        Counter("ab"),
    ]
    for one in made:
        for value in draw(st.lists(st.sampled_from(values), max_size=3)):
            if isinstance(one, dict):
                one[draw(KEYS)] = value
            else:
                one.append(value)
    return made[0]


def size_of(tree: object) -> int:
    """The smallest limit under which a tree is not refused, found as everybody could."""
    low, high = 0, 1 << 40
    while low < high:
        middle = (low + high) // 2
        try:
            check_printable(tree, Limits(tree_nbytes=middle))
            high = middle
        except LimitExceeded:
            low = middle + 1
    return low


@given(trees())
def test_the_size_is_near_to_what_is_printed(tree: object):
    """Never much less, so that what is allowed can be printed; never much more, so that nothing is refused without need."""
    written, found = len(repr(tree)), size_of(tree)
    assert written <= 16 * found
    # Where containers hold each other, from one of the others it may be more; and steps along them are counted.
    assert found <= 16 * written or "..." in repr(tree)


def test_what_is_allowed_is_what_was_printed_at_any_depth():
    tree: object = "leaf"
    for _ in range(20):
        tree = [tree, {"a": tree}]
    found = size_of(tree)
    assert len(repr(tree)) / 4 <= found <= 4 * len(repr(tree))


def test_the_place_is_named():
    bomb: object = ()
    for _ in range(60):
        bomb = (bomb, bomb)
    with pytest.raises(
        LimitExceeded, match=r"'model\.hooks\.0\.1\.0.*Limits\(tree_nbytes=536,870,912\)"
    ) as caught:
        check_printable({"weights": [1], "model": {"hooks": [["x", bomb]]}}, Limits())
    assert caught.value.expected == Limits().tree_nbytes


def test_what_an_object_holds_is_counted_by_itself():
    text = "x" * 1000
    held = [Opaque("what", state={"text": text}) for _ in range(100)]
    check_printable(held, Limits(tree_nbytes=10_000))
    held[7].args = ([text] * 20,)
    with pytest.raises(LimitExceeded):
        check_printable(held, Limits(tree_nbytes=10_000))


@pytest.mark.parametrize(
    "verb",
    [holdfast.open, lambda raw: holdfast.convert(raw, "x.pt"), lambda raw: holdfast.diff(raw, raw)],
)
def test_every_verb_refuses_it(verb, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(LimitExceeded, match="as `print` does"):
        verb(BOMB)


def test_a_higher_limit_opens_it():
    with holdfast.open(BOMB, limits={"tree_nbytes": 10**50}) as ckpt:
        assert len(ckpt) == 1


def test_verify_and_scan_say_it(tmp_path):
    (tmp_path / "bomb.pt").write_bytes(BOMB)
    problems = holdfast.verify(tmp_path / "bomb.pt").problems
    assert "tree_nbytes" in str(problems)
    report = holdfast.scan(tmp_path / "bomb.pt")
    assert report.verdict() == "error"
    assert "tree_nbytes" in str(report.reports[0].error)


def test_it_is_not_published_if_it_is_read_back(tmp_path):
    tree: object = [np.zeros(1)]
    for _ in range(40):
        tree = [tree] * 2
    with pytest.raises(NotCommitted):
        holdfast.save({"w": np.zeros(2), "more": tree}, tmp_path / "x.pt", read_back=True)
    assert not list(tmp_path.iterdir())


def test_torch_load_goes_on(tmp_path):
    """As torch does: what it hands out is the program's own."""
    torch = pytest.importorskip("torch")
    tree: object = [0]
    for _ in range(40):
        tree = [tree] * 10
    torch.save({"w": torch.ones(2), "tree": tree}, tmp_path / "bomb.pt")
    with pytest.raises(LimitExceeded):
        holdfast.open(tmp_path / "bomb.pt")
    loaded = holdfast.torch.load(tmp_path / "bomb.pt")
    assert torch.equal(loaded["w"], torch.ones(2))
    assert len(loaded["tree"][0][9]) == 10
