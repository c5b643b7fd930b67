"""Tensors that hold the same, against a comparison of their bytes; and what `tie` makes of them."""

import tempfile
from pathlib import Path

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import holdfast
from holdfast.core.box import Box
from holdfast.core.chunk import Chunk, Storage
from holdfast.core.dtype import DTYPES
from holdfast.core.sharing import find_reached_ranges
from holdfast.core.tensor import LazyTensor
from holdfast.engine.source import OpenSource
from holdfast.stores.memory import MemoryStore
from tests.sampling import examples


@st.composite
def states(draw):
    """Tensors over a few buffers with the same elements: whole, parts, transposes, conjugates, copies of each other."""
    buffers = [
        torch.arange(12.0),
        torch.arange(12.0),
        torch.zeros(12),
        torch.arange(12.0).to(torch.complex64),
    ]
    found = {}
    for number in range(draw(st.integers(1, 8))):
        one = draw(st.sampled_from(buffers))
        match draw(
            st.sampled_from(
                ["", "", "part", "transpose", "copy", "conj", "parameter", "empty", "step"]
            )
        ):
            case "part":
                one = one[draw(st.integers(0, 2)) : draw(st.integers(8, 12))]
            case "transpose":
                one = one.reshape(3, 4).t()
            case "copy":
                one = one.clone().reshape(draw(st.sampled_from([(12,), (4, 3)])))
            case "conj":
                one = one.conj()
            case "parameter" if not one.is_complex():
                one = torch.nn.Parameter(one)
            case "empty":
                one = one[:0]
            case "step":
                one = one[::2]
        found[f"t{number}"] = one
    return found


def content(tensor):
    array = np.ascontiguousarray(tensor.detach().resolve_conj().numpy())
    return str(array.dtype), array.shape, array.tobytes()


@settings(max_examples=examples(60), deadline=None)
@given(states(), st.sampled_from([".pt", ".safetensors", ""]))
def test_tensors_of_one_content_are_found_and_tied(state, suffix):
    alike = {}
    for name, tensor in state.items():
        if tensor.numel():
            alike.setdefault(content(tensor), set()).add(name)
    with tempfile.TemporaryDirectory() as folder:
        path, target = Path(folder) / f"a{suffix}", Path(folder) / f"b{suffix}"
        holdfast.save(state, path, durable=False)
        graph = holdfast.alias_graph(path, by="content")
        groups = [{member.name for member in group.members} for group in graph.groups]
        assert sorted(map(sorted, groups)) == sorted(
            sorted(names) for names in alike.values() if len(names) > 1
        )
        tied = holdfast.tie(path, target, durable=False)
        stays = any("left where other views" in note for note in tied.notes)
        with holdfast.open(path) as before, holdfast.open(target) as after:
            one, other = before.read(), after.read()
            assert {name: array.tobytes() for name, array in one.items()} == {
                name: array.tobytes() for name, array in other.items()
            }
            assert {name: before[name].traits.parameter for name in before} == {
                name: after[name].traits.parameter for name in after
            }
            places = {name: after[name].shared_storages for name in after}
            if not stays and suffix == ".pt":
                for names in alike.values():
                    assert len({places[name] for name in names}) == 1
            assert after.nbytes <= before.nbytes


spans = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 12), st.integers(1, 3)), max_size=8)


@given(spans, st.sampled_from([1, 16]))
def test_the_bytes_that_are_reached_are_those_of_the_elements(parts, aligned):
    source = OpenSource(MemoryStore({"f": bytes(128)}))
    storage = Storage("f", 0, 128, home=source.store)
    tensors, marked = [], np.zeros(128, np.bool_)
    for start, count, step in parts:
        chunk = Chunk(Box.whole((count,)), storage, start * 8, (step * 8,))
        tensors.append(LazyTensor("", DTYPES.name("uint8"), (count,), (chunk,), source))
        if count:
            marked[start - start % aligned : start + (count - 1) * step + 1] = True
    edges = (
        np.flatnonzero(np.diff(np.concatenate(([0], marked.astype(np.int8), [0]))))
        .reshape(-1, 2)
        .tolist()
    )
    found = find_reached_ranges(tensors, aligned=aligned)
    assert [[span.start, span.stop] for span in found.get(storage, [])] == edges
