"""`.pt → safetensors → native → .pt` loses nothing: bits, aliases, strides of views, the tree and its types.

The first file is torch's own, the last one is read by torch again; at every stop on the way Holdfast must see the same state.
"""

from __future__ import annotations

import tempfile
from collections import OrderedDict
from collections.abc import Collection
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import holdfast
from holdfast.core.dtype import DTYPES
from holdfast.core.protocols import State
from holdfast.core.tensor import AliasView
from holdfast.core.value import replace
from holdfast.engine.arrays import MemoryTensors
from holdfast.verbs.shared import rejoin as assembled
from holdfast.verbs.shared.rejoin import Assembled, StoredCopy, rejoin
from holdfast.verbs.shared.state import tabulate_tree
from tests.golden.expect import short
from tests.parity.compare import assert_same_tree, elements, named_tensors, shared
from tests.parity.test_generated_states import plain, pools, views
from tests.parity.test_torch_files import PLAIN, UNTYPED, filled
from tests.sampling import examples

few = settings(
    max_examples=examples(40),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)

SHARED = [
    d for d in (*PLAIN, *UNTYPED) if (row := DTYPES.torch(short(d))) is not None and row.safetensors
]
"""The dtypes that torch and safetensors both have."""


@st.composite
def tensors(draw: st.DrawFn, pool: list[torch.Tensor]) -> torch.Tensor:
    """A view of the pool; some are parameters, some want gradients."""
    tensor = draw(views(pool))
    kind = draw(st.integers(0, 4))
    floating = tensor.dtype.is_floating_point or tensor.dtype.is_complex
    if kind == 0:
        return torch.nn.Parameter(tensor, requires_grad=floating and draw(st.booleans()))
    # torch 2.13 does not load its own files with a tensor of fp8 that wants gradients: "used in an in-place operation".
    return tensor.requires_grad_() if kind == 1 and floating and tensor.dtype in PLAIN else tensor


@st.composite
def states(draw: st.DrawFn) -> dict[str, object]:
    """A nested state; a few of its tensors stand in several places."""
    pool = draw(pools(SHARED))
    some = draw(st.lists(tensors(pool), min_size=1, max_size=6))
    leaf = st.sampled_from(some) | st.sampled_from(some) | plain
    keys = st.sampled_from(["a", "b", "a.b", "w.0", "", "ü"]) | st.integers(0, 3)

    def container(depth: int) -> object:
        if depth == 0 or not draw(st.integers(0, 2)):
            return draw(leaf)
        inside = [container(depth - 1) for _ in range(draw(st.integers(0, 3)))]
        match draw(st.integers(0, 3)):
            case 0:
                return inside
            case 1:
                return tuple(inside)
            case 2:
                return OrderedDict(
                    zip(
                        draw(st.lists(keys, unique=True, min_size=3, max_size=3)),
                        inside,
                        strict=False,
                    )
                )
            case _:
                return dict(
                    zip(
                        draw(st.lists(keys, unique=True, min_size=3, max_size=3)),
                        inside,
                        strict=False,
                    )
                )

    return {f"k{i}": container(3) for i in range(draw(st.integers(0, 4)))} | {"tensors": list(some)}


def trip(folder: Path, state: object) -> Path:
    """From torch through all formats and back; every stop holds the same."""
    torch.save(state, folder / "first.pt")
    loaded = torch.load(folder / "first.pt", weights_only=False)
    filled_ones = {n: t for n, t in _once(loaded) if t.numel()}
    groups = shared(filled_ones)
    source = folder / "first.pt"
    for name in ("second.safetensors", "third", "fourth.pt"):
        holdfast.convert(source, folder / name, durable=False, threads=1)
        source = folder / name
        with holdfast.open(source) as ckpt:
            assert_same_tree(ckpt.tree, loaded)
            assert _groups(ckpt, filled_ones) == groups, name
    return source


def _groups(ckpt: holdfast.Checkpoint, names: Collection[str]) -> list[list[str]]:
    """The aliases among these names. A tensor without elements shares nothing with anyone."""
    found = ([name for name in alias.names if name in names] for alias in ckpt.aliases)
    return sorted(sorted(group) for group in found if len(group) > 1)


def _once(loaded: object) -> list[tuple[str, torch.Tensor]]:
    """Names as Holdfast gives them: a second thing of one name gets a number."""
    found: dict[str, torch.Tensor] = {}
    for base, tensor in named_tensors(loaded):
        name, count = base, 1
        while name in found:
            count += 1
            name = f"{base}#{count}"
        found[name] = tensor
    return list(found.items())


def assert_same_tensors(ours: object, theirs: object) -> None:
    """torch sees the same: bits, classes, and where the tensors of one storage lie to each other."""
    pairs = list(zip(named_tensors(ours), named_tensors(theirs), strict=True))
    assert [a for (a, _), _ in pairs] == [b for _, (b, _) in pairs]
    origins: dict[int, tuple[int, int]] = {}
    for (name, a), (_, b) in pairs:
        assert (type(a), a.dtype, a.shape, a.requires_grad) == (
            type(b),
            b.dtype,
            b.shape,
            b.requires_grad,
        ), name
        assert elements(a) == elements(b), name
        if a.numel() < 2:
            continue
        assert [s for s, n in zip(a.stride(), a.shape, strict=True) if n > 1] == [
            s for s, n in zip(b.stride(), b.shape, strict=True) if n > 1
        ] or _alone(b, theirs), name
        if not _alone(b, theirs):
            key = b.untyped_storage().data_ptr()
            origin = origins.setdefault(key, (a.data_ptr(), b.data_ptr()))
            assert a.data_ptr() - origin[0] == b.data_ptr() - origin[1], name


def _alone(tensor: torch.Tensor, state: object) -> bool:
    """Whether nobody has another view of its storage. Then its strides are kept only where the storage has little else."""
    place = tensor.untyped_storage().data_ptr()
    same = (
        t for _, t in named_tensors(state) if t.untyped_storage().data_ptr() == place and t.numel()
    )
    return len({(t.shape, t.stride(), t.storage_offset()) for t in same}) == 1


@few
@given(states())
def test_round_trip(state):
    with tempfile.TemporaryDirectory() as folder:
        last = trip(Path(folder), state)
        assert_same_tensors(
            torch.load(last, weights_only=False),
            torch.load(Path(folder, "first.pt"), weights_only=False),
        )


def test_a_module_comes_back(tmp_path):
    class Tied(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = torch.nn.Embedding(20, 8)
            self.body = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
            self.head = torch.nn.Linear(8, 20, bias=False)
            self.head.weight = self.embed.weight

    module = Tied()
    moments = {
        i: {"step": torch.tensor(3.0), "exp_avg": torch.randn_like(p)}
        for i, p in enumerate(module.parameters())
    }
    groups = [{"lr": 1e-3, "betas": (0.9, 0.999), "foreach": None, "params": list(moments)}]
    state = {
        "model": module.state_dict(),
        "optimizer": {"state": moments, "param_groups": groups},
        "step": 1,
    }
    loaded = torch.load(trip(tmp_path, state), weights_only=True)
    assert loaded["model"]._metadata == module.state_dict()._metadata
    assert loaded["optimizer"]["param_groups"] == groups
    other = Tied()
    other.load_state_dict(loaded["model"])
    assert all(
        torch.equal(a, b) for a, b in zip(other.parameters(), module.parameters(), strict=True)
    )


@pytest.mark.parametrize("dtype", [*PLAIN, *UNTYPED], ids=short)
def test_torch_reads_every_dtype(dtype, tmp_path):
    tensor = filled(dtype, 24).reshape(4, 6)
    state = {
        "w": tensor,
        "row": tensor[1:3],
        "t": tensor.T,
        "none": tensor[:0],
        "one": tensor[2, 3],
    }
    holdfast.save(state, tmp_path / "a.pt")
    loaded = torch.load(tmp_path / "a.pt", weights_only=True)
    assert_same_tensors(loaded, state)
    assert len({t.untyped_storage().data_ptr() for t in loaded.values()}) == 1


@few
@given(st.data())
def test_a_storage_is_put_together_from_its_copies(data):
    """Any views of one storage, and any block: the assembled storage is the one that they were taken from."""
    (base,) = data.draw(pools([torch.uint8]).map(lambda pool: pool[:1]))
    wide = data.draw(st.sampled_from([torch.uint8, torch.int16, torch.complex64]))
    if base.numel() < wide.itemsize:
        return
    pool = [base[: base.numel() // wide.itemsize * wide.itemsize].clone().view(wide)]
    some = data.draw(st.lists(views(pool), min_size=1, max_size=4))
    stored = np.frombuffer(bytes(pool[0].untyped_storage()), np.uint8)
    resident, copies, content = MemoryTensors(), [], np.zeros(stored.size, np.uint8)
    for view in some:
        first, strides = (
            view.storage_offset() * wide.itemsize,
            tuple(s * wide.itemsize for s in view.stride()),
        )
        for index in np.ndindex(*view.shape):
            at = first + sum(i * s for i, s in zip(index, strides, strict=True))
            content[at : at + wide.itemsize] = stored[at : at + wide.itemsize]
        note = AliasView(0, stored.size, first * 8, tuple(s * 8 for s in strides))
        copies.append(StoredCopy.of(resident.wrap_array(view.contiguous().numpy()), note))
    small, assembled.BLOCK_NBYTES = (
        assembled.BLOCK_NBYTES,
        data.draw(st.sampled_from([4 << 20, 32, 16])),
    )
    try:
        store = Assembled()
        storage = store.storage(content.size, copies)
        assert not any(c.tensor.size for c in copies) or store.agrees(storage.key)
        start = data.draw(st.integers(0, content.size))
        out = bytearray(data.draw(st.integers(0, content.size - start)))
        store.read(storage.key, start, memoryview(out))
        assert bytes(out) == content[start : start + len(out)].tobytes()
    finally:
        assembled.BLOCK_NBYTES = small


def noted(**arrays: tuple[np.ndarray, int]) -> State:
    """Copies of one storage of 48 bytes, as a file with notes gives them: each with its first byte."""
    resident = MemoryTensors()
    made = {}
    for name, (array, first) in arrays.items():
        tensor = resident.wrap_array(array)
        view = AliasView(7, 48, first * 8, tensor.chunks[0].strides)
        made[name] = replace(tensor, name=name, traits=replace(tensor.traits, alias=view))
    return tabulate_tree(made)


def test_copies_that_differ_where_they_overlapped_are_kept_apart_with_a_note(tmp_path):
    whole = np.arange(12, dtype=np.float32)
    same = rejoin(noted(whole=(whole, 0), part=(whole[3:6], 12)))
    assert same.notes == ()
    assert len({t.chunks[0].storage for t in same.state.tensors.values()}) == 1
    edited = rejoin(noted(whole=(whole, 0), part=(whole[3:6] + 1, 12)))
    assert "'whole', 'part' shared a storage once, and differ now" in edited.notes[0]
    assert edited.state.tensors["part"].numpy().tolist() == [4, 5, 6]
    assert all(t.traits.alias is None for t in edited.state.tensors.values())


def test_views_far_apart_do_not_bring_back_what_lay_between():
    state = noted(first=(np.ones(1, np.float32), 0), last=(np.ones(1, np.float32), 44))
    assert rejoin(state).notes == ()
    far = {
        n: replace(t, traits=replace(t.traits, alias=replace(t.traits.alias, nbytes=1 << 50)))
        for n, t in state.tensors.items()
    }
    far["last"] = replace(
        far["last"], traits=replace(far["last"].traits, alias=AliasView(7, 1 << 50, 1 << 52, (32,)))
    )
    (note,) = rejoin(tabulate_tree(far)).notes
    assert "8 bytes of a storage of" in note
