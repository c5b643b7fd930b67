"""Who writes what: whole plans against arrays that are painted, and every kind of problem by hand."""

import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.core.box import Box
from holdfast.core.value import replace
from holdfast.ranks import survey
from holdfast.ranks.plan import plan_ranks
from tests.ranks.columns import boxes_of, loads_of, rank_state
from tests.ranks.test_defects import attempts, first_defect, tilings


def rank_with(*tensors, **more):
    """A rank that has (name, shape, boxes) of float32."""
    return rank_state([(name, "float32", shape, boxes) for name, shape, boxes in tensors], **more)


def rows(n, *stretches):
    """A tensor of n rows of 2, and the rows that a rank has."""
    return (n, 2), [Box((a, 0), (b, 2)) for a, b in stretches]


@st.composite
def worlds(draw, of):
    """Tensors with their boxes, and for each box the ranks that have it; ranks list tensors and boxes in any order."""
    count = draw(st.integers(1, 5))
    tensors = draw(st.lists(of, max_size=4))
    ranks = st.sets(st.integers(0, count - 1), min_size=1)
    holders = {(t, box): draw(ranks) for t, (_, boxes) in enumerate(tensors) for box in boxes}
    states = []
    for rank in range(count):
        own = []
        for t in draw(st.permutations(range(len(tensors)))):
            shape, boxes = tensors[t]
            mine = [box for box in draw(st.permutations(boxes)) if rank in holders[t, box]]
            if shape and draw(st.integers(0, 4)) == 0:
                mine.append(Box(shape, shape))
            if mine or draw(st.booleans()):
                own.append((f"t{t}", "int16", shape, mine))
        state = rank_state(own)
        if draw(st.booleans()):
            # Boxes of different tensors mixed.
            order = np.array(draw(st.permutations(range(state.count))), np.int64)
            state = replace(
                state,
                tensors=state.tensors[order],
                offsets=state.offsets[:, order],
                sizes=state.sizes[:, order],
            )
        states.append(state)
    return tensors, holders, states


def all_of(plan):
    """Everything in a plan that can be compared."""
    return (
        plan.catalogue.names,
        plan.aliases,
        plan.problems,
        plan.notes,
        [
            [
                w.boxes.tolist(),
                w.tensors.tolist(),
                w.offsets.tolist(),
                w.sizes.tolist(),
                w.values,
                w.nbytes,
            ]
            for w in plan.writes
        ],
    )


@given(worlds(tilings()))
def test_every_box_is_written_once_by_one_who_has_it(world):
    tensors, holders, states = world
    plan = plan_ranks(states)
    assert plan.problems == ()
    counts = [np.zeros(shape, int) for shape, _ in tensors]
    for rank, state in enumerate(states):
        writes, boxes = plan.writes[rank], boxes_of(plan, rank)
        places = [(plan.catalogue.positions[name], box.start) for name, box in boxes]
        assert places == sorted(places)
        for i, (name, box) in zip(writes.boxes.tolist(), boxes, strict=True):
            t = int(name[1:])
            assert rank in holders[t, box]
            counts[t][box.slices] += 1
            # The rank finds it in its own columns.
            assert state.catalogue.names[state.tensors[i]] == name
            assert tuple(state.offsets[: box.rank, i].tolist()) == box.start
            assert tuple(state.sizes[: box.rank, i].tolist()) == box.shape
        assert writes.nbytes == sum(2 * box.count for _, box in boxes)
    assert all((c == 1).all() for c in counts)


@given(worlds(attempts()))
def test_every_tensor_that_is_not_tiled_is_a_problem(world):
    tensors, _, states = world
    plan = plan_ranks(states)
    wrong = {}
    for name in plan.catalogue.names:
        shape, boxes = tensors[int(name[1:])]
        defect = first_defect(shape, boxes)
        if defect is not None:
            wrong[name] = defect
    assert [problem.split(":")[0] for problem in plan.problems] == [
        repr(name) for name in plan.catalogue.names if name in wrong
    ]
    for problem, (point, overlap) in zip(
        plan.problems, (wrong[n] for n in plan.catalogue.names if n in wrong), strict=True
    ):
        assert f" {point} " in problem
        assert ("overlap" in problem) is overlap
    assert bool(plan.writes) is (not wrong)


@given(worlds(attempts() | tilings()), st.integers(1, 40))
def test_slabs_make_no_difference(world, boxes):
    _, _, states = world
    whole = plan_ranks(states)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(survey, "BATCH_BOXES", boxes)
        patch.setattr(survey, "BATCH_BOXES_A_RANK", 0)
        assert all_of(plan_ranks(states)) == all_of(whole)


def test_nobody_and_nothing():
    assert all_of(plan_ranks([])) == ((), (), (), (), [])
    plan = plan_ranks([rank_state([]), rank_with(("e", (0, 3), []), ("s", (), [Box((), ())]))])
    assert plan.problems == ()
    assert [boxes_of(plan, 0), boxes_of(plan, 1)] == [[], [("s", Box((), ()))]]


def test_the_catalogue_is_in_the_order_of_the_first_rank():
    whole = [Box((0,), (1,))]
    states = [
        rank_with(("c", (1,), whole), ("a", (1,), whole)),
        rank_with(("a", (1,), whole), ("b", (1,), whole), ("c", (1,), whole)),
    ]
    plan = plan_ranks(states)
    assert plan.catalogue.names == ("c", "a", "b")
    assert [[name for name, _ in boxes_of(plan, rank)] for rank in (0, 1)] == [["c", "a"], ["b"]]
    assert loads_of(plan).tolist() == [8, 4]


def test_holes():
    plan = plan_ranks(
        [
            rank_with(("w", *rows(8, (0, 3)))),
            rank_with(("w", *rows(8, (5, 8)))),
            rank_with(("w", *rows(8))),
        ]
    )
    assert plan.problems == ("'w': of ranks 0 and 1 none covers (3, 0) of (8, 2)",)
    assert plan.writes == ()


def test_a_tensor_that_nobody_has():
    assert plan_ranks([rank_with(("w", *rows(8)))]).problems == (
        "'w': no rank covers (0, 0) of (8, 2)",
    )


def test_overlaps():
    plan = plan_ranks([rank_with(("w", *rows(8, (0, 5)))), rank_with(("w", *rows(8, (4, 8))))])
    said = "'w': rank 0 has [0:5, 0:2] and rank 1 has [4:8, 0:2], which overlap at (4, 0) without being the same"
    assert plan.problems == (said,)
    plan = plan_ranks([rank_with(("w", *rows(8, (0, 8), (0, 4))))])
    said = "'w': rank 0 has both [0:4, 0:2] and [0:8, 0:2], which overlap at (0, 0) without being the same"
    assert plan.problems == (said,)


def test_one_start_with_several_sizes_and_replicas_of_each():
    long, short = ("w", *rows(8, (0, 8))), ("w", *rows(8, (0, 4)))
    plan = plan_ranks([rank_with(long), rank_with(short), rank_with(long), rank_with(short)])
    said = "'w': rank 0 has [0:8, 0:2] and rank 1 has [0:4, 0:2], which overlap at (0, 0) without being the same"
    assert plan.problems == (said,)


def test_the_same_box_twice_on_one_rank():
    plan = plan_ranks(
        [rank_with(("w", *rows(8, (0, 8)))), rank_with(("w", *rows(8, (0, 8), (0, 8))))]
    )
    assert plan.problems == ("'w': rank 1 has [0:8, 0:2] twice",)


def test_out_of_bounds():
    # Offset and size together do not fit 64 bits.
    far = Box((1 << 62, 0), (1 << 63, 2))
    states = [
        rank_with(("w", *rows(8, (0, 8)))),
        rank_with(("w", *rows(8, (6, 9), (9, 9)))),
        rank_with(("w", (8, 2), [far])),
    ]
    said = "'w': rank 1 has [6:9, 0:2], which is outside of (8, 2); 2 more of its boxes are"
    assert plan_ranks(states).problems == (said,)


def test_disagreement_about_what_a_tensor_is():
    half = rank_state([("w", "float16", (8, 2), [])])
    states = [
        rank_with(("w", *rows(8, (0, 8)))),
        half,
        half,
        rank_with(("w", *rows(9))),
        rank_with(("w", *rows(8))),
    ]
    said = "'w' is float32 (8, 2) on ranks 0 and 4, but float16 (8, 2) on ranks 1 and 2, but float32 (9, 2) on rank 3"
    said += "; pass per_rank=['w'] where each rank has its own"
    assert plan_ranks(states).problems == (said,)


def test_all_problems_are_told_in_the_order_of_the_catalogue():
    states = [
        rank_with(
            ("d", *rows(8)),
            ("a", *rows(8, (0, 9))),
            ("b", *rows(4, (0, 4))),
            ("c", *rows(8, (0, 8))),
            values={"v": b"1"},
        ),
        rank_with(
            ("b", *rows(5, (0, 5))),
            ("c", *rows(8, (7, 8))),
            ("e", *rows(2, (0, 2))),
            values={"v": b"2"},
        ),
    ]
    assert [p.split("'")[1] for p in plan_ranks(states).problems] == ["d", "a", "b", "c", "v"]


def test_more_than_anybody_has():
    states = [rank_with(*((f"t{i}", (1 << 48,), [Box((0,), (1 << 48,))]) for i in range(1025)))]
    (problem,) = plan_ranks(states).problems
    assert "1,154,047,404,513,689,600 bytes" in problem


def test_values():
    states = [
        rank_with(values={"step": b"1"}),
        rank_with(values={"step": b"1", "lr": b"2"}),
        rank_with(values={"lr": b"2", "step": b"1", "other": b"1"}),
    ]
    assert [w.values for w in plan_ranks(states).writes] == [("step",), ("lr",), ("other",)]


def test_values_that_differ():
    states = [rank_with(values={"lr": d, "ok": b"0"}) for d in (b"1", b"1", b"1", b"2", b"1")]
    said = "the value 'lr' differs between ranks 0 to 2 and 4, rank 3; pass values='first' to take the first, or per_rank=['lr']"
    assert plan_ranks(states).problems == (said,)


def test_a_name_is_one_kind_of_thing():
    tensor = rank_with(("w", *rows(1, (0, 1))), values={"a": b""})
    states = [rank_with(values={"a": b"", "w": b""}), tensor, rank_with(values={"w": b""})]
    assert plan_ranks(states).problems == (
        "'w' is a tensor on rank 1, but a value on ranks 0 and 2",
    )


def tied(stretch, *, tie=True, other=None):
    """A rank that has rows of an embedding and of a head, which are the same memory."""
    tensors = (
        ("head", *rows(8, *(other or [stretch]))),
        ("body", *rows(8, stretch)),
        ("embed", *rows(8, stretch)),
    )
    return rank_with(*tensors, aliases=[("head", "embed")] if tie else [])


def test_tied_tensors_are_stored_once():
    plan = plan_ranks(
        [tied((0, 4)), tied((4, 8)), tied((8, 8), tie=False), rank_with(("x", *rows(1, (0, 1))))]
    )
    assert plan.problems == ()
    assert plan.aliases == (("head", "embed"),)
    assert [[name for name, _ in boxes_of(plan, r)] for r in range(4)] == [
        ["body", "embed"],
        ["body", "embed"],
        [],
        ["x"],
    ]
    assert plan.notes == ()


def test_tied_tensors_whose_boxes_are_mixed():
    states = [tied((0, 4)), tied((4, 8))]
    order = np.array([2, 0, 1])
    mixed = [
        replace(s, tensors=s.tensors[order], offsets=s.offsets[:, order], sizes=s.sizes[:, order])
        for s in states
    ]
    plan = plan_ranks(mixed)
    assert plan.aliases == (("head", "embed"),)
    assert [w.boxes.tolist() for w in plan.writes] == [[2, 0], [2, 0]]


@pytest.mark.parametrize(
    ("others", "where"),
    [
        # Not declared; other boxes; declared, but only one of the two is there and the other is somewhere else.
        ([tied((4, 8), tie=False)], "rank 1"),
        ([tied((4, 8), other=[(4, 6), (6, 8)])], "rank 1"),
        ([tied((4, 8), other=[(8, 8)]), rank_with(("head", *rows(8, (4, 8))))], "ranks 1 and 2"),
    ],
)
def test_tied_on_some_ranks_only_is_stored_twice_and_noted(others, where):
    plan = plan_ranks([tied((0, 4)), *others])
    assert plan.problems == ()
    assert plan.aliases == ()
    assert plan.notes == (
        f"'head' and 'embed' share memory on rank 0 but not on {where}, so both are stored",
    )
    assert {"head", "embed"} <= {
        name for r in range(len(plan.writes)) for name, _ in boxes_of(plan, r)
    }
    assert loads_of(plan).sum() == 3 * 8 * 2 * 4


def test_tied_in_name_only():
    tensors = [
        (("head", *rows(8, head)), ("embed", *rows(8, embed)))
        for head, embed in (((0, 3), (0, 4)), ((3, 8), (4, 8)))
    ]
    plan = plan_ranks([rank_with(*both, aliases=[("head", "embed")]) for both in tensors])
    assert (plan.problems, plan.aliases) == ((), ())
    assert plan.notes == (
        "'head' and 'embed' share memory nowhere in the same boxes, so both are stored",
    )
    assert loads_of(plan).sum() == 2 * 8 * 2 * 4


def test_ranks_that_know_tensors_of_fewer_dimensions():
    cube = ("cube", (2, 2, 2), [Box((0, 0, 0), (2, 2, 2))])
    line = ("line", (4,), [Box((0,), (2,))]), ("line", (4,), [Box((2,), (4,))])
    plan = plan_ranks([rank_with(line[0]), rank_with(cube, line[1])])
    assert plan.problems == ()
    assert [boxes_of(plan, 0), boxes_of(plan, 1)] == [
        [("line", line[0][2][0])],
        [("line", line[1][2][0]), ("cube", cube[2][0])],
    ]


def test_packed_types_take_whole_bytes_in_each_box():
    halves = [
        rank_state([("w", "float4_e2m1fn", (10,), [Box((5 * i,), (5 * i + 5,))])]) for i in range(2)
    ]
    assert loads_of(plan_ranks(halves)).tolist() == [3, 3]


def test_no_more_than_linear():
    # Python steps, not seconds: four times the boxes must not take much more than four times the steps.
    def steps(ranks, tensors):
        states = [
            rank_with(*((f"t{i}", *rows(ranks, (r, r + 1))) for i in range(tensors)))
            for r in range(ranks)
        ]
        count = 0

        def trace(frame, event, argument):
            nonlocal count
            count += 1

        sys.setprofile(trace)
        try:
            plan_ranks(states)
        finally:
            sys.setprofile(None)
        return count

    assert steps(64, 40) < 5 * steps(32, 20)
    # And the boxes themselves take none: ten times the tensors, about the same steps.
    assert steps(32, 200) < 3 * steps(32, 20)
