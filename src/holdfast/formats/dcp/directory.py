"""A DCP directory of one process: what a rank that is alone would write, without torch.

    __0_0.distcp, __0_1.distcp, …     values, then tensors; each file with at most so many bytes of tensors
    .holdfast.json                    the checksum of the index; not in an object store
    .metadata                         the index, which comes last

Values are archives as `torch.save` makes them. What an archive cannot hold is a problem, as for a torch file.
"""

from __future__ import annotations

import numpy as np

from holdfast.core.arrays import shape_columns
from holdfast.core.protocols import State
from holdfast.core.sharing import tied
from holdfast.core.table import Table
from holdfast.engine.saves import FilePlan, SavePlan
from holdfast.engine.table import value_state
from holdfast.errors import CannotHold, Unsupported
from holdfast.formats.dcp.flatten import FlatState, common_problems, flatten
from holdfast.formats.dcp.write import joined, tensor_pickle
from holdfast.formats.dcp.write_index import Listed, dcp_index
from holdfast.formats.native.boxes import Boxes
from holdfast.formats.native.manifest import FileBoxes
from holdfast.formats.native.write import SHARD_NBYTES
from holdfast.formats.safetensors.write import fill_shards
from holdfast.formats.sharded import DcpShards, RankOutput, Receipt, Storing, index_files
from holdfast.formats.torch.write import lay_out_torch_zip, unkept_texts


def lay_out_dcp(state: State, *, max_shard_size: int | None = None, path: str = "", save: str = "") -> SavePlan:
    """The plan of a DCP directory that is saved under a path. Tensors are whole; those that share memory are stored once.

    Raises `CannotHold` with every problem: values that have no form in an archive, tensors that torch has no dtype for.
    """
    flat = flatten(state)
    table, every = flat.kept(state.tensors), DcpShards()
    archives, problems = _archives(flat)
    problems = [*flat.problems, *common_problems(table, flat), *_lacking(table), *problems]
    if problems:
        raise CannotHold("a DCP directory cannot hold this state", problems)
    values = {name: joined(file.segments) for name, file in archives.items()}
    names, kinds = table.names, [table.kinds[number] for number in table.kind]
    ties = {row: first for row, first in tied(table).items() if kinds[row].nbytes}
    rows = [row for row in range(len(table)) if row not in ties]
    extents = shape_columns([kind.shape for kind in kinds])
    boxes = Boxes(table, np.zeros_like(extents), table.kind)
    shares = [rows[some.start : some.stop] for some in fill_shards(table.nbytes_of(rows), max_shard_size or SHARD_NBYTES)]
    files = every.files(RankOutput(0, 1, boxes, {}, values), shares, Storing(), save)
    receipts = [Receipt(file.plan.key, file.plan.nbytes, file.stored({}), [*file.values]) for file in files]
    parts = [FileBoxes(one.stored, np.arange(len(table)), boxes.starts, extents, 0) for one in receipts]
    listed = Listed(
        names, [kind.dtype.name for kind in kinds], [kind.shape for kind in kinds],
        {names[row]: names[first] for row, first in ties.items()}, values, flat.paths,
        {name for name, kind in zip(names, kinds, strict=True) if kind.traits.requires_grad},
    )  # fmt: skip
    index = index_files(dcp_index(listed, receipts, parts, path=path), save)
    notes = (*every.unkept(state), *unkept_texts(state.metadata, "a DCP directory"))
    return SavePlan("dcp", tuple(file.plan for file in files), notes, directory=True, index=tuple(index), holds=table)


def _archives(flat: FlatState) -> tuple[dict[str, FilePlan], list[str]]:
    """The archives of all values, and what cannot be in one."""
    archives, refused = dict[str, FilePlan](), dict[str, object]()
    for name, value in flat.values.items():
        try:
            archives[name] = lay_out_torch_zip(value_state(value.described)).files[0]
        except CannotHold:
            refused[name] = value.described
    try:
        lay_out_torch_zip(value_state(refused))
    except CannotHold as error:  # by the paths of all of it
        return archives, [*error.problems]
    return archives, []


def _lacking(table: Table) -> list[str]:
    """Problems of tensors whose kind has no form in an archive."""
    lacking: dict[int, str] = {}
    for number, kind in enumerate(table.kinds):
        try:
            tensor_pickle(kind.dtype, kind.shape)
        except Unsupported as error:
            lacking[number] = error.message
    each = zip(table.names, table.kind, strict=True) if lacking else ()
    return [f"{name}: {lacking[kind]}" for name, kind in each if kind in lacking]
