"""Who shares memory in a table, by the numbers of storages, against a comparison of lazy tensors one by one: the oracle."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.core.chunk import is_c_ordered
from holdfast.engine.arrays import MemoryTensors
from holdfast.engine.table import make_lazy_table
from holdfast.formats.recorded import LARGEST_STORAGE_RATIO, share
from holdfast.torch.tensors.to_lazy import torch_leaf
from holdfast.verbs.shared.state import tabulate_state
from tests.sampling import examples
from tests.sharing import groups, ties

SHAPES = [(12,), (3, 4), (2, 1, 6), (4, 3)]


@st.composite
def views(draw):
    """Tensors over a few buffers, numpy's and torch's: whole, slices, transposes, conjugates, empty ones, the same ones twice."""
    array = np.arange(12, dtype="f4")
    buffers = [
        torch.arange(12.0),
        torch.arange(12.0).to(torch.complex64),
        array,
        torch.from_numpy(array),
        torch.zeros(0),
    ]
    lent = torch.arange(12.0)
    buffers += [
        lent,
        lent.numpy(),
        lent.numpy(),
        lent[4:].numpy(),
        np.frombuffer(bytes(48), "f4"),
        torch.zeros(0).numpy(),
    ]
    found = {}
    for number in range(draw(st.integers(1, 12))):
        one = draw(st.sampled_from([*buffers, *found.values()]))
        whole = draw(st.booleans())
        if one.ndim == 1 and len(one) == 12 and draw(st.booleans()):
            one = one.reshape(draw(st.sampled_from(SHAPES)))
        if not whole and one.ndim:
            first, step = draw(st.integers(0, one.shape[0])), draw(st.integers(1, 3))
            one = one[first::step]
        if one.ndim == 2 and draw(st.booleans()):
            one = one.T
        if isinstance(one, torch.Tensor):
            how = draw(st.sampled_from(["", "", "conj", "bytes", "parameter", "attribute", "imag"]))
            if how == "conj":
                one = one.conj()
            elif how == "imag" and one.is_complex():
                one = one.imag
            elif (
                how == "bytes"
                and one.dtype == torch.float32
                and one.is_contiguous()
                and not one.is_neg()
            ):
                one = one.view(torch.int32)
            elif how == "parameter" and not one.is_complex() and one.is_floating_point():
                one = torch.nn.Parameter(one.detach(), requires_grad=False)
            elif how == "attribute" and type(one) is torch.Tensor:
                one = one.detach()
                one.note = 1
        found[f"t{draw(st.integers(0, 99))}.{number}"] = one
    return found


def compared(tensors):
    """Names that are written, aliases and groups, found by comparing lazy tensors."""
    written = {name: tensor for name, tensor in tensors.items() if tensor.chunks}
    aliases, distinct, found = {}, {}, []
    for names in groups(written).values():
        members = {name: written[name] for name in names if name in written}
        again = ties(members)
        aliases |= again
        for name in again:
            del written[name]
        distinct |= {name: tensor for name, tensor in members.items() if name not in again}
    for storage, names in groups(distinct, stored_aliases=True).items():
        kept = {}
        for name in names:
            tensor = written[name]
            (chunk,) = tensor.chunks
            if not (tensor.traits.conj or tensor.traits.neg) and min(chunk.strides, default=0) >= 0:
                kept[name] = chunk.offset, chunk.strides
        if len(kept) == 1:
            ((name, (_, strides)),) = kept.items()
            tensor = written[name]
            short = tensor.size < 2 or storage.nbytes > LARGEST_STORAGE_RATIO * tensor.nbytes
            if short or is_c_ordered(tensor.shape, strides, tensor.dtype.bits):
                continue
        if kept:
            found.append((storage.nbytes, [*kept.items()]))
    return list(written), list(aliases.items()), found


def by_rows(table):
    found = share(table)
    names = [table.names[row] for row in found.rows]
    return (
        names,
        list(found.aliases.items()),
        [(nbytes, [*views.items()]) for nbytes, views in found.groups],
    )


def by_themselves(state):
    """A lazy tensor of each, made without a table."""
    leaf = torch_leaf(resident := MemoryTensors())
    return {
        name: (
            resident.wrap_array(value) if isinstance(value, np.ndarray) else leaf(value, ())
        ).renamed(name)
        for name, value in state.items()
    }


@settings(max_examples=examples(300), deadline=None)
@given(views())
def test_rows_share_what_lazy_tensors_share(state):
    tensors = by_themselves(state)
    expected = compared(tensors)
    assert by_rows(tabulate_state(state).tensors) == expected
    assert by_rows(make_lazy_table([*tensors], [*tensors.values()])) == expected
