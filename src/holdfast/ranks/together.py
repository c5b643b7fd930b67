"""What all ranks tell, put together: what the checkpoint holds, and what each rank is to write of it. On the first rank.

every rank    a message: checksums of what others may have as well, its description, its boxes (ranks/state)
first rank    contents of the whole, a task for each rank; or every reason why they do not make one checkpoint
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from holdfast.core.documents import message_type, read_document, write_document
from holdfast.core.value import Value, replace
from holdfast.errors import CannotHold
from holdfast.formats.sharded import Contents
from holdfast.ranks.merge import differing, one_tree, say_different
from holdfast.ranks.plan import RankPlan, RankWrites, plan_ranks
from holdfast.ranks.state import Catalogue, RankState, decode, encode


class Description(msgspec.Struct):
    """What a rank tells beside its boxes."""

    tree: bytes | None
    """The state as typed JSON."""
    metadata: dict[str, str]
    paths: dict[str, tuple[str | int, ...]]
    values: list[str]
    grads: list[str]
    """Names of the tensors that require gradients."""
    matched: list[str]
    """The patterns in `per_rank` that match something."""


class Proposal(Value, frozen=True):
    """What one rank wants to save."""

    description: Description
    state: RankState
    sums: bytes = b""
    """Checksums of the tensors that other ranks may have as well, if they are compared."""


class ProposalMessage(msgspec.Struct):
    """A proposal as the first rank receives it."""

    description: Description
    state: bytes
    sums: bytes


PROPOSAL = message_type("proposal of a rank", ProposalMessage)


def write_proposal(proposal: Proposal) -> bytes:
    state = encode(proposal.state)
    return write_document(PROPOSAL, ProposalMessage(proposal.description, state, proposal.sums))


def read_proposal(raw: bytes, known: dict[bytes, Catalogue]) -> Proposal:
    """Read the proposal of another rank. Ranks that have the same tensors share a catalogue in `known`."""
    message = read_document(PROPOSAL, raw)
    return Proposal(message.description, decode(message.state, known), message.sums)


class Together(Value, frozen=True):
    """One checkpoint out of the states of all ranks."""

    contents: Contents
    writes: Sequence[RankWrites]
    notes: Sequence[str]

    @property
    def nbytes(self) -> int:
        """Bytes of all boxes: about what the ranks are going to write."""
        return sum(writes.nbytes for writes in self.writes)


def put_together(
    proposals: Sequence[Proposal], *, values: str, per_rank: Sequence[str]
) -> Together:
    """Make one checkpoint of the proposals of all ranks. Raises `CannotHold` with all problems."""
    heads = [proposal.description for proposal in proposals]
    decoded = [proposal.state for proposal in proposals]
    sums = [proposal.sums for proposal in proposals]
    if values == "first":
        seen: dict[str, bytes] = {}
        decoded = [
            replace(s, values={n: seen.setdefault(n, d) for n, d in s.values.items()})
            for s in decoded
        ]
    plan = plan_ranks(decoded)
    problems = [*plan.problems]
    trees = [head.tree for head in heads]
    tree: object | None = None
    if len({*trees}) > 1:
        tree, tree_problems = one_tree(trees, decoded, values)
        problems += tree_problems
    elif trees[0] is not None:
        # It names the tensors of each rank, so none is lost.
        tree = msgspec.Raw(trees[0])
    if len({*sums}) > 1:
        problems += [
            say_different(name, ranks)
            for name, ranks in differing(sums).items()
            if name not in plan.disputed
        ]
    useless = [
        pattern for pattern in per_rank if not any(pattern in head.matched for head in heads)
    ]
    problems += [
        f"per_rank={pattern!r}: nothing in the state of any rank has such a name"
        for pattern in useless
    ]
    if problems:
        raise CannotHold("the ranks' states do not make one checkpoint", problems)
    contents = Contents(
        names=plan.catalogue.names,
        dtypes=plan.catalogue.dtypes,
        shapes=plan.catalogue.shapes,
        aliases=dict(plan.aliases),
        tree=tree,
        metadata={key: text for head in reversed(heads) for key, text in head.metadata.items()},
        values=frozenset(name for head in heads for name in head.values),
        paths={name: path for head in heads for name, path in head.paths.items()},
        grads=frozenset(name for head in heads for name in head.grads),
    )
    has_empty = 0 in plan.catalogue.extents
    writes = _with_empty(plan, decoded) if has_empty else plan.writes
    return Together(contents, writes, plan.notes)


def _with_empty(plan: RankPlan, states: Sequence[RankState]) -> list[RankWrites]:
    """What each rank writes. Tensors without elements, which the plan gives to nobody, go to the first rank that has them."""
    catalogue = plan.catalogue
    aliases = {name for name, _ in plan.aliases}
    found: dict[int, list[int]] = {}
    for tensor in np.flatnonzero((catalogue.extents == 0).any(axis=0)).tolist():
        name = catalogue.names[tensor]
        if name not in aliases:
            rank = next(
                rank for rank, state in enumerate(states) if name in state.catalogue.positions
            )
            found.setdefault(rank, []).append(tensor)
    writes = [*plan.writes]
    for rank, tensors in found.items():
        state, own = states[rank], writes[rank]
        firsts = [
            int(np.argmax(state.tensors == state.catalogue.positions[catalogue.names[tensor]]))
            for tensor in tensors
        ]
        rank_of = len(own.sizes)
        writes[rank] = replace(
            own,
            boxes=np.append(own.boxes, firsts),
            tensors=np.append(own.tensors, tensors),
            offsets=np.append(own.offsets, np.zeros((rank_of, len(tensors)), np.int64), axis=1),
            sizes=np.append(own.sizes, catalogue.extents[:rank_of, tensors], axis=1),
        )
    return writes
