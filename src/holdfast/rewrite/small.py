"""Save very many tensors as rows: no object a tensor, and their bytes gathered when they are written.

A dict of fifty thousand arrays of a few bytes costs `describe_state`, the layout and the writer a few dozen objects each. Here
dtypes, shapes and storages of all are asked for together (`plan.rows`), and each format has a layout of rows beside that of
objects:
`formats.torch.rows`, `formats.safetensors.rows`, `formats.native.rows`. From there on all is as it always is: the transaction
writes the plan.

*Ordinary* is said by those who ask (`rewrite.state.asking`): arrays and tensors that are all of their memory, in C order. They may
be nested, among plain values: `formats.tree_json.rows` writes the tree of those that are recorded. For everything else, and for
whatever is wrong, there is the way of objects: it says what. Both give the same bytes and the same notes.

**The rehearsal.** Up to `REHEARSED` tensors, the reader opens the plan, as it opens all. Of more it would open the same opcodes and
the same header fields fifty thousand times; so it opens a sample, with one tensor of each dtype, rank and kind, and the numbers
that its limits count are compared here (docs/design/024-many-and-small.md).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from holdfast.core.limits import Limits
from holdfast.engine.planned_store import PlannedStore
from holdfast.errors import HoldfastError
from holdfast.formats.torch.rows import CONTAINERS, RowPickle, leaves
from holdfast.formats.torch.write import archive_name, lay_out_container
from holdfast.formats.zip.numbered import Numbered
from holdfast.plan.rows import RowKind, TensorRows, joined
from holdfast.plan.saves import FilePlan, SavePlan
from holdfast.rewrite.formats import Options, described, plan_save
from holdfast.rewrite.state import Asking, asking, describe_state

FEW = 64
"""Fewer are saved as objects: nobody waits for those."""

REHEARSED = 512
"""More are rehearsed by a sample."""

DEPTH = 16
"""Of containers in a state that is written as rows. A tensor opens a few MARKs more, far from what a reader allows."""


def plan_small(
    state: object,
    target: str,
    format: str,
    *,
    metadata: Mapping[str, str] | None,
    options: Options,
    known: Sequence[Asking] | None = None,
) -> SavePlan | None:
    """The plan of a state with very many tensors, known to open; None for any other state, and wherever something is to be said.

    `known` are the types that may be tensors, and what asks them: arrays and torch's, unless it is said.
    """
    plain = dict(metadata or {})
    texts = {*map(type, plain), *map(type, plain.values())}
    if type(state) not in CONTAINERS or texts - {str} or options != Options(keep_tree=options.keep_tree):
        return None
    try:
        return None if format != "torch-zip" else _torch(state, target, plain, options, known=known or asking())
    except HoldfastError:
        return None


def _torch(state: object, target: str, metadata: dict[str, str], options: Options, *, known: Sequence[Asking]) -> SavePlan | None:
    types = [kind for kinds, _ in known for kind in kinds]
    values = None if metadata else leaves(state, types, DEPTH, beside=False)
    rows = None if values is None or len(values) < FEW else _asked(values, known)
    # What is empty has no place in memory, and the way of objects finds that such ones share it. Not all dtypes are torch's.
    if values is None or rows is None or not rows.nbytes.all() or any(kind.dtype.torch is None for kind in rows.table):
        return None
    pickled = RowPickle(rows, types)
    pickled.write(state)
    if pickled.problems:
        return None
    content, limits = pickled.finish(), Limits()
    records = [Numbered("data", rows.nbytes, rows.read, rows.alone)]
    plan = SavePlan("torch-zip", (FilePlan("", lay_out_container(archive_name(target), content, records)),), opens=True)
    # The directory has 46 bytes and a name for each record; names of tensors may take 16 times what the pickle has.
    directory = len(rows.nbytes) * (80 + len(archive_name(target)))
    if len(content) > limits.pickle_nbytes or 2 * len(rows.nbytes) > limits.zip_records or directory > limits.zip_directory_nbytes:
        return None
    if len(rows) <= REHEARSED:
        described(PlannedStore(plan.files, name=target), (plan.format,))
    elif not _names_fit(state, len(content)):
        return None
    else:
        last = dict(zip(rows.kinds, values, strict=True))
        like = [last[kind] for kind in range(len(rows.table))]
        _rehearse_sample(like, rows.table, target, plan.format, metadata=metadata, options=options)
    return plan


def _names_fit(state: object, stored: int) -> bool:
    """Whether the dotted names of all tensors are surely no longer than a reader allows for a pickle of this length."""
    return _characters(state, 0, stored) <= stored


def _characters(value: object, prefix: int, most: int) -> int:
    """How long the names of all leaves are together, or more than `most`."""
    if not isinstance(value, dict | list | tuple):
        return prefix
    keys = list(map(str, value if isinstance(value, dict) else range(len(value))))
    inside = list(value.values() if isinstance(value, dict) else value)
    if CONTAINERS.isdisjoint(map(type, inside)):
        return sum(map(len, keys)) + len(keys) * (prefix + 1)
    total = 0
    for key, item in zip(keys, inside, strict=True):
        total += _characters(item, prefix + len(key) + 1, most)
        if total > most:
            break
    return total


def _rehearse_sample(
    values: Sequence[object],
    table: Sequence[RowKind],
    target: str,
    format: str,
    *,
    metadata: dict[str, str],
    options: Options,
    containers: Sequence[object] = (),
) -> None:
    """Lay out and open one tensor of each dtype, rank and kind, and these containers, by the way of objects.

    `values` are one of each kind in the table.
    """
    like = {
        (kind.dtype, len(kind.shape), kind.requires_grad, kind.parameter, kind.location): value
        for kind, value in zip(table, values, strict=True)
    }
    sample: dict[str, object] = {f"{at}": value for at, value in enumerate(like.values())}
    if containers:
        sample["containers"] = {f"{at}": container for at, container in enumerate(containers)}
    plan_save(target, describe_state(sample, metadata=metadata), format, options=options)


def _asked(values: list[object], known: Sequence[Asking]) -> TensorRows | None:
    """The rows of tensors of all kinds that can be asked; None where one is not ordinary."""
    types = {*map(type, values)}
    asks = [(kinds, ask) for kinds, ask in known if not types.isdisjoint(kinds)]
    if len(asks) == 1 and types.issubset(asks[0][0]):
        return asks[0][1](values)
    if not types.issubset(kind for kinds, _ in asks for kind in kinds):
        return None
    side = {kind: number for number, (kinds, _) in enumerate(asks) for kind in kinds}
    order = [side[type(value)] for value in values]
    parts: list[TensorRows] = []
    for number, (_, ask) in enumerate(asks):
        own = [value for value, where in zip(values, order, strict=True) if where == number]
        part = ask(own)
        if part is None or len(part.nbytes) < len(part):
            return None
        parts.append(part)
    addresses = [address for part in parts if part.addresses is not None for address in part.addresses.tolist()]
    arrays = [value for value in values if isinstance(value, np.ndarray)]
    # A tensor over the memory of an array is tied to it.
    if not {array.__array_interface__["data"][0] for array in arrays}.isdisjoint(addresses):
        return None
    return joined(parts, order)
