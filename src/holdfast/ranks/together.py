"""What all ranks tell, put together: what the checkpoint holds, and what each rank is to write of it. On the first rank.

every rank    a message: checksums of what others may have as well, its description, its boxes (ranks/state)
first rank    contents of the whole, a task for each rank; or every reason why they do not make one checkpoint
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import msgspec

from holdfast.core.dtype import DTYPES
from holdfast.core.value import Value, replace
from holdfast.errors import CannotHold
from holdfast.ranks.files import Contents
from holdfast.ranks.merge import differing, one_tree, say_different
from holdfast.ranks.plan import RankPlan, plan_ranks
from holdfast.ranks.state import RankState, decode_all, encode

Place = tuple[str, tuple[int, ...], tuple[int, ...]]
"""A name, and the lowest and the highest corner of a box."""


class Description(msgspec.Struct):
    """What a rank says beside its boxes."""

    tree: bytes | None
    """The state as typed JSON."""
    metadata: dict[str, str]
    paths: dict[str, list[str | int]]
    values: list[str]
    grads: list[str]
    """Names of the tensors that require gradients."""
    matched: list[str]
    """Those of the patterns in `per_rank` that found something."""


DESCRIPTIONS = msgspec.msgpack.Decoder(Description)


def message(description: Description, state: RankState) -> bytes:
    """What a rank has to say; `with_sums` completes it."""
    return _joined(msgspec.msgpack.encode(description), encode(state))


def with_sums(sums: bytes, message: bytes) -> bytes:
    """The same behind the checksums of what others may have as well; none where it was told not to look."""
    return _joined(sums, message)


def _joined(front: bytes, rest: bytes) -> bytes:
    return len(front).to_bytes(8, "little") + front + rest


def _split(joined: bytes) -> tuple[bytes, bytes]:
    """The part in front, whose length comes first, and the rest."""
    stop = 8 + int.from_bytes(joined[:8], "little")
    return joined[8:stop], joined[stop:]


class Together(Value, frozen=True):
    """One checkpoint out of the states of all ranks."""

    contents: Contents
    boxes: Sequence[Sequence[Place]]
    """What each rank writes."""
    values: Sequence[Sequence[str]]
    """DCP: what is no tensor, and is written by each rank."""
    notes: Sequence[str]
    """What a person should know."""

    @property
    def nbytes(self) -> int:
        """Bytes of all boxes: about what the ranks are going to write."""
        bits = {row.name: row.bits for row in DTYPES.rows}
        return sum(
            (prod(high - low for low, high in zip(start, stop, strict=True)) * bits[self.contents.tensors[name][0]] + 7) // 8
            for boxes in self.boxes
            for name, start, stop in boxes
        )


def put_together(messages: Sequence[bytes], *, values: str, per_rank: Sequence[str]) -> Together:
    """One checkpoint of what the ranks tell, each in the message of `with_sums`. Raises `CannotHold` with all problems."""
    heads, states, sums = [], [], []
    for told in messages:
        summed, rest = _split(told)
        head, state = _split(rest)
        sums.append(summed)
        heads.append(DESCRIPTIONS.decode(head))
        states.append(state)
    decoded = decode_all(states)
    if values == "first":
        seen: dict[str, bytes] = {}
        decoded = [replace(s, values={n: seen.setdefault(n, d) for n, d in s.values.items()}) for s in decoded]
    plan = plan_ranks(decoded)
    tree, problem = one_tree([head.tree for head in heads], decoded, values)
    problems = [*plan.problems, *problem]
    disputed = _disputed(decoded)
    problems += [say_different(name, ranks) for name, ranks in differing(sums).items() if name not in disputed]
    useless = [pattern for pattern in per_rank if not any(pattern in head.matched for head in heads)]
    problems += [f"per_rank={pattern!r}: nothing in the state of any rank has such a name" for pattern in useless]
    if problems:
        raise CannotHold("the ranks' states do not make one checkpoint", problems)
    merged = plan.catalogue
    contents = Contents(
        tensors={n: (d, s) for n, d, s in zip(merged.names, merged.dtypes, merged.shapes, strict=True)},
        aliases=dict(plan.aliases),
        tree=tree,
        metadata={key: text for head in reversed(heads) for key, text in head.metadata.items()},
        values=frozenset(name for head in heads for name in head.values),
        paths={name: tuple(path) for head in heads for name, path in head.paths.items()},
        grads=frozenset(name for head in heads for name in head.grads),
    )
    return Together(contents, _boxes(plan, decoded), [writes.values for writes in plan.writes], plan.notes)


def _disputed(states: Sequence[RankState]) -> set[str]:
    """The names under which ranks have other dtypes or shapes, of which the plan speaks."""
    seen: dict[str, tuple[str, tuple[int, ...]]] = {}
    found = set()
    for own in dict.fromkeys(state.catalogue for state in states):
        for name, dtype, shape in zip(own.names, own.dtypes, own.shapes, strict=True):
            if seen.setdefault(name, (dtype, shape)) != (dtype, shape):
                found.add(name)
    return found


def _boxes(plan: RankPlan, states: Sequence[RankState]) -> list[list[Place]]:
    """What each rank writes. Tensors without elements, which the plan gives to nobody, go to the first rank that has them."""
    found = [[(name, box.start, box.stop) for name, box in plan.boxes(rank)] for rank in range(len(states))]
    aliases = {name for name, _ in plan.aliases}
    for name, shape in zip(plan.catalogue.names, plan.catalogue.shapes, strict=True):
        if 0 in shape and name not in aliases:
            rank = next(rank for rank, state in enumerate(states) if name in state.catalogue.positions)
            found[rank].append((name, (0,) * len(shape), shape))
    return found
