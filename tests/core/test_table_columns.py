"""What the columns of a table must be able to say, a test for each line of the list."""

import os
import pickle
import threading

import ml_dtypes
import numpy as np
import pytest
import torch
from tests.formats.safetensors.craft_safetensors import craft
from tests.ranks.columns import rank_state
from tests.support import torch_bytes

import holdfast
from holdfast.core.box import Box
from holdfast.core.match import match, meet
from holdfast.core.sharing import identity
from holdfast.core.table import ODD, FileColumns, Table
from holdfast.core.tensor import NO_CRC, Composite, LazyTensor, Traits
from holdfast.core.value import replace
from holdfast.engine.computed import Computed
from holdfast.engine.files import ViewTable, parts_of
from holdfast.engine.saves import Memory
from holdfast.errors import Corrupted, HeaderError, LimitExceeded, MetadataError, SaveError
from holdfast.formats.safetensors.schema import ADDRESSABLE
from holdfast.numeric.cast import cast
from holdfast.numeric.pack import SparseStorage
from holdfast.ranks.state import RankState
from holdfast.saving.state import tabulate_state


def stored(checkpoint: holdfast.Checkpoint) -> Table:
    table = checkpoint.stored
    assert isinstance(table, Table)
    return table


@pytest.mark.parametrize("zipped", [True, False])
def test_a_checksum_is_of_a_storage(tmp_path, zipped):
    """A view is checked with its whole storage, by verify; alone it is not checked."""
    base = torch.arange(8.0)
    path = tmp_path / "x.pt"
    path.write_bytes(torch_bytes({"whole": base, "view": base[2:4], "tied": base}, zipped))
    with holdfast.open(path) as checkpoint:
        table = stored(checkpoint)
        assert (len({*table.storage}), table.odd) == (1, {})
        ((_, dense),) = table.dense(range(3))
        assert (dense.nbytes.tolist(), dense.starts[1] - dense.starts[0]) == ([32, 8, 32], 8)
        assert (dense.crcs == NO_CRC).tolist() == [not zipped, True, not zipped]
        start = int(dense.starts[0])
        with path.open("r+b") as file:
            file.seek(start + 31)
            file.write(b"\x01")
        assert checkpoint["view"].numpy().tolist() == [2, 3]
        if zipped:
            with pytest.raises(Corrupted, match="whole"):
                checkpoint.read()
    report = holdfast.verify(path)
    assert [damage.tensors for damage in report.damaged] == [("whole", "view", "tied")] * zipped


def test_offsets_and_strides_are_in_bits_of_packed_types(tmp_path):
    path = tmp_path / "x.safetensors"
    path.write_bytes(craft({"w": {"dtype": "F4", "shape": [2, 6], "data_offsets": [0, 6]}}, 6))
    with holdfast.open(path) as checkpoint:
        kind = stored(checkpoint).kind_of(0)
        assert (kind.strides, stored(checkpoint).offset_of(0), kind.nbytes, kind.dense) == (
            (24, 4),
            0,
            6,
            False,
        )
        (chunk,) = checkpoint["w"][1, 1:3].chunks
        assert (chunk.offset, chunk.strides) == (28, (4,))


def test_strides_may_be_zero_negative_and_overlapping(tmp_path):
    base = torch.arange(6.0)
    torch.save(
        {"base": base, "wide": base[:1].expand(3, 4), "windows": base.as_strided((4, 3), (1, 1))},
        tmp_path / "x.pt",
    )
    with holdfast.open(tmp_path / "x.pt") as checkpoint:
        table = stored(checkpoint)
        assert (table.odd, len({*table.storage})) == ({}, 1)
        assert [table.kind_of(row).strides for row in range(3)] == [(32,), (0, 0), (32, 32)]
        assert checkpoint["wide"].numpy().tolist() == [[0] * 4] * 3
        assert checkpoint["windows"].numpy().tolist() == base.unfold(0, 3, 1).tolist()
        turned = checkpoint["base"][::-2]
        assert (turned.chunks[0].strides, turned.numpy().tolist()) == ((-64,), [5, 3, 1])
    array = np.arange(6.0)
    holdfast.save({"turned": array[::-1], "array": array}, tmp_path / "y.safetensors")
    with holdfast.open(tmp_path / "y.safetensors") as checkpoint:
        assert checkpoint["turned"].numpy().tolist() == [5, 4, 3, 2, 1, 0]


def test_stored_as_one_thing_and_is_another_also_of_a_slice(tmp_path):
    values = torch.tensor([1 + 2j, 3 - 4j, 5 + 6j])
    torch.save({"conj": values.conj()}, tmp_path / "conj.pt")
    torch.save({"neg": values.conj().imag}, tmp_path / "neg.pt")
    with holdfast.open(tmp_path / "conj.pt") as checkpoint:
        kind = stored(checkpoint).kind_of(0)
        assert (kind.traits.conj, kind.dense) == (True, False)
        assert checkpoint["conj"].numpy().tolist() == [1 - 2j, 3 + 4j, 5 - 6j]
        assert checkpoint["conj"][1:].numpy().tolist() == [3 + 4j, 5 - 6j]
    with holdfast.open(tmp_path / "neg.pt") as checkpoint:
        kind = stored(checkpoint).kind_of(0)
        assert (kind.traits.neg, kind.dense) == (True, False)
        assert checkpoint["neg"][::2].numpy().tolist() == [-2, -6]
    holdfast.save({"w": np.arange(6.0).reshape(2, 3) + 2**-9}, tmp_path / "y.safetensors")
    with holdfast.open(tmp_path / "y.safetensors") as checkpoint:
        bfloat16 = holdfast.DTYPES.name("bfloat16")
        made = Computed().tensor(
            checkpoint["w"], bfloat16, lambda elements: cast(elements, bfloat16)
        )
        expected = checkpoint["w"].numpy().astype(ml_dtypes.bfloat16)
        assert made[1, 1:].numpy().tolist() == expected[1, 1:].tolist()


def test_traits_with_objects_are_interned_by_identity(tmp_path):
    holdfast.save({name: np.zeros(2) for name in "abc"}, tmp_path / "x.safetensors")
    with holdfast.open(tmp_path / "x.safetensors") as checkpoint:
        traits = [Traits(state={"note": [1]}), Traits(state={"note": [1]})]
        marked = {
            name: replace(checkpoint[name], traits=traits[number])
            for number, name in ((0, "a"), (1, "b"), (0, "c"))
        }
        table = ViewTable(marked)
        assert [
            table.kind_of(row).traits is traits[number] for row, number in ((0, 0), (1, 1), (2, 0))
        ] == [True] * 3
        assert (table.kind[0] == table.kind[2], table.kind[0] == table.kind[1]) == (True, False)


def test_boxes_of_many_ranks_have_a_column_a_dimension(tmp_path):
    state = {
        "w": np.arange(32.0, dtype="f4").reshape(8, 4),
        "b": np.zeros(4, "f4"),
        "s": np.zeros((), "f4"),
    }
    found = RankState.of_table(stored_table(state, tmp_path))
    assert found.tensors.tolist() == [0, 1, 2]
    assert (found.offsets.tolist(), found.sizes.tolist()) == (
        [[0, 0, 0], [0, 0, 0]],
        [[8, 4, 1], [4, 1, 1]],
    )
    boxes = [Box((0, 0), (2, 4)), Box((6, 0), (8, 4))]
    cut = rank_state([("w", "float32", (8, 4), boxes), ("b", "float32", (4,), [Box((0,), (4,))])])
    assert (cut.tensors.tolist(), cut.offsets.tolist()) == ([0, 0, 1], [[0, 6, 0], [0, 0, 0]])
    assert cut.sizes.tolist() == [[2, 2, 4], [4, 4, 1]]


def stored_table(state: dict[str, np.ndarray], folder) -> Table:
    holdfast.save(state, folder / "state.safetensors", durable=False)
    with holdfast.open(folder / "state.safetensors") as checkpoint:
        return stored(checkpoint).select([stored(checkpoint).rows[name] for name in state])


def test_a_computed_storage_says_which_ranges_it_is_computed_from(tmp_path):
    weights = np.zeros((64, 64), "f4")
    weights[::7, ::5] = 1
    holdfast.save({"w": weights, "dense": np.ones(8, "f4")}, tmp_path / "x", sparse="auto")
    with holdfast.open(tmp_path / "x") as checkpoint:
        table = stored(checkpoint)
        row = table.rows["w"]
        assert table.storage[row] == ODD
        (storage,) = table.view(row).storages
        assert isinstance(storage, SparseStorage)
        assert [*parts_of(table.view(row))] == [*storage.parts, storage]
        ranges = {(part.key, part.start, part.start + part.nbytes) for part in storage.parts}
        assert {*storage.ranges} == ranges
        assert storage.stored_nbytes < weights.nbytes
    # Its parts and what they stand for are both compared.
    assert (
        holdfast.verify(tmp_path / "x").checked_nbytes
        == storage.stored_nbytes + weights.nbytes + 32
    )
    np.savez_compressed(tmp_path / "y.npz", a=np.zeros(1000), b=np.arange(10))
    with holdfast.open(tmp_path / "y.npz") as checkpoint:
        assert checkpoint["a"].source.store.cost(checkpoint["a"].storages[0].key, 8000) < 8000


def test_rows_without_bytes_share_with_nobody(tmp_path):
    empty = torch.zeros(0)
    torch.save({"a": empty, "b": empty, "c": torch.zeros(0, 3)}, tmp_path / "x.pt")
    holdfast.save({"a": np.zeros(0), "b": np.zeros((0, 3))}, tmp_path / "x.safetensors")
    for path in (tmp_path / "x.pt", tmp_path / "x.safetensors"):
        with holdfast.open(path) as checkpoint:
            table = stored(checkpoint)
            assert (len({*table.storage}), table.odd) == (len(table), {})
            assert checkpoint.aliases == ()


def test_meta_rows_have_no_piece(tmp_path):
    torch.save({"m": torch.zeros(1 << 20, 1 << 20, device="meta")}, tmp_path / "x.pt")
    with holdfast.open(tmp_path / "x.pt") as checkpoint:
        table = stored(checkpoint)
        assert (table.storage[0], table.view(0).chunks, table.kind_of(0).traits.meta) == (
            ODD,
            (),
            True,
        )
    assert holdfast.verify(tmp_path / "x.pt").ok


def test_limits_are_asked_before_an_expanded_view_takes_memory(tmp_path):
    torch.save({"w": torch.zeros(1).expand(1 << 30, 1 << 20)}, tmp_path / "x.pt")
    with holdfast.open(tmp_path / "x.pt") as checkpoint:
        kind = stored(checkpoint).kind_of(0)
        assert (kind.nbytes, kind.storage_nbytes) == (1 << 52, 4)
        for read in (checkpoint.read, checkpoint["w"].numpy):
            with pytest.raises(LimitExceeded, match="expanded"):
                read()


@pytest.mark.parametrize(
    ("shape", "offsets"),
    [
        ([1 << 62], [0, 1 << 62]),
        ([1], [1 << 63, (1 << 63) + 1]),
        ([1 << 70], [0, 1 << 70]),
        ([2], [-1, 1]),
    ],
)
def test_numbers_of_a_file_are_checked_before_they_are_a_column(tmp_path, shape, offsets):
    path = tmp_path / "x.safetensors"
    path.write_bytes(craft({"w": {"dtype": "U8", "shape": shape, "data_offsets": offsets}}, 2))
    with pytest.raises((HeaderError, MetadataError, holdfast.errors.Truncated)):
        holdfast.open(path)
    assert max(shape) > ADDRESSABLE or min(offsets) < 0 or max(offsets) > 2


def test_rows_over_memory_own_it():
    state = {"a": torch.ones(1000), "b": torch.full((8,), 2.0)}
    table = tabulate_state(state).tensors
    del state
    assert (
        np.frombuffer(b"".join(table.read([0, 1])), np.float32).tolist() == [1.0] * 1000 + [2.0] * 8
    )


@pytest.mark.parametrize("others", [{}, {"array": np.ones(3)}])
def test_a_tensor_that_is_resized_meanwhile_is_named(others):
    tensors = {"first": torch.ones(64), "second": torch.ones(64)}
    table = tabulate_state({**others, **tensors}).tensors
    rows = range(len(table))
    assert bytes(table.read(rows)[-1]) == np.ones(64, np.float32).tobytes()
    tensors["second"].untyped_storage().resize_(1 << 20)
    with pytest.raises(SaveError, match="resized") as caught:
        table.read(rows)
    assert caught.value.tensor == "second"
    with pytest.raises(SaveError, match="resized") as caught:
        table.alone(rows[-1], "second")
    assert caught.value.tensor == "second"
    assert isinstance(table.alone(rows[-2], "first"), Memory)


def test_composite_tensors_are_several_rows_and_one_record_in_the_tree(tmp_path):
    sparse = torch.eye(3).to_sparse()
    torch.save({"s": sparse, "w": torch.ones(2)}, tmp_path / "x.pt")
    holdfast.save({"s": sparse, "w": torch.ones(2)}, tmp_path / "x")
    for path in (tmp_path / "x.pt", tmp_path / "x"):
        with holdfast.open(path) as checkpoint:
            assert isinstance(checkpoint.tree["s"], Composite)
            assert sorted(stored(checkpoint).names) == ["s.indices", "s.values", "w"]
            assert torch.equal(checkpoint.tree["s"].torch().to_dense(), torch.eye(3))


@pytest.mark.parametrize("name", ["x.pt", "x"])
def test_two_places_of_one_tensor_are_one_in_the_tree(tmp_path, name):
    tensor = torch.arange(4.0)
    state = {"z": {"w": tensor}, "a": [tensor, 7], 3: {"n": 0}}
    holdfast.save(state, tmp_path / name)
    with holdfast.open(tmp_path / name) as checkpoint:
        tree = checkpoint.tree
        # Of a file of torch they are one object; where each has a name of its own, they are one view.
        assert tree["z"]["w"] is tree["a"][0] or (
            name == "x" and identity(tree["z"]["w"]) == identity(tree["a"][0])
        )
        assert ([*tree], tree["a"][1], tree[3]) == ([*state], 7, {"n": 0})
        table = stored(checkpoint)
        assert table.storage[table.rows["z.w"]] == table.storage[table.rows["a.0"]]


def test_lazy_tensors_are_public_and_make_their_chunks_when_asked(tmp_path):
    holdfast.save({"w": np.arange(4.0)}, tmp_path / "x.safetensors")
    with holdfast.open(tmp_path / "x.safetensors") as checkpoint:
        tensor = checkpoint["w"]
        assert not tensor.made
        (chunk,) = tensor.chunks
        assert tensor.made
        again = holdfast.LazyTensor("other", tensor.dtype, tensor.shape, (chunk,), tensor.source)
        assert again.numpy().tolist() == [0, 1, 2, 3]
        assert pickle.loads(pickle.dumps(again)).numpy().tolist() == [0, 1, 2, 3]


def test_what_is_made_on_demand_is_made_by_sixteen_threads_and_after_a_fork(tmp_path):
    state = {f"w{n}": np.full(3, n, "f4") for n in range(500)}
    holdfast.save(state, tmp_path / "x", durable=False)
    with holdfast.open(tmp_path / "x") as checkpoint:
        found: list[bool] = []

        def read() -> None:
            arrays = checkpoint.read()
            found.append(all(np.array_equal(arrays[name], state[name]) for name in state))

        threads = [threading.Thread(target=read) for _ in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert found == [True] * 16
        child = os.fork()
        if not child:
            same = checkpoint["w77"].numpy().tolist() == [77] * 3 and len(checkpoint.read()) == 500
            os._exit(0 if same else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_table_is_not_changed_by_who_asks(tmp_path):
    holdfast.save({"a": np.zeros(3), "b": np.ones(3)}, tmp_path / "x.safetensors")
    with holdfast.open(tmp_path / "x.safetensors") as checkpoint:
        table = stored(checkpoint)
        columns = [*table.names], [*table.kind], [*table.storage], [*table.kinds]
        chosen = table.select([1], ["other"])
        chosen.arrays([0])
        table.made()
        table.located(range(2))
        assert ([*table.names], [*table.kind], [*table.storage], [*table.kinds]) == columns
        assert (chosen.names, chosen["other"].numpy().tolist()) == (["other"], [1, 1, 1])


@pytest.mark.parametrize("name", ["x.safetensors", "x.pt", "x"])
def test_mapped_memory_is_the_same_table_without_a_copy(tmp_path, name):
    holdfast.save({"w": np.arange(6.0).reshape(2, 3)}, tmp_path / name)
    with (
        holdfast.open(tmp_path / name) as plain,
        holdfast.open(tmp_path / name, mmap=True) as mapped,
    ):
        tables = stored(plain), stored(mapped)
        assert isinstance(tables[0].storages, FileColumns)
        assert tables[0].storages.start.tolist() == tables[1].storages.start.tolist()  # type: ignore[attr-defined]
        view = mapped["w"].numpy()
        assert (view.base is not None, plain["w"].numpy().flags.writeable) == (True, True)
        assert view.tolist() == mapped["w"][0:2].numpy().tolist() == [[0, 1, 2], [3, 4, 5]]


def test_verbs_of_a_table_read_nothing(tmp_path):
    holdfast.save({"a": np.zeros((4, 2)), "b": np.ones((4, 2))}, tmp_path / "x.safetensors")
    with holdfast.open(tmp_path / "x.safetensors") as checkpoint:
        table, source = stored(checkpoint), checkpoint.source
        before = source.read_nbytes  # type: ignore[attr-defined]
        chosen = table.select([1, 0], ["y", "x"])
        matched = match(chosen.rows, chosen.kind, ["x", "z"], [0, 0], lambda source, target: None)
        met = meet(chosen, [0, 1], [None, [Box((1, 0), (3, 2))]])
        assert (matched.source, matched.target, matched.missing) == ([1], [0], [1])
        assert (met.pairs, {at: part.shape for at, part in met.parts.items()}) == (
            [0, 1],
            {1: (2, 2)},
        )
        assert source.read_nbytes == before  # type: ignore[attr-defined]


def test_an_absent_column_means_plain(tmp_path):
    """A file that records no checksums has none in its column; the tensors are whole storages in C order."""
    path = tmp_path / "x.safetensors"
    path.write_bytes(craft({"w": {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]}}, 2))
    with holdfast.open(path) as checkpoint:
        table = stored(checkpoint)
        assert isinstance(table.storages, FileColumns)
        assert table.storages.crc.tolist() == [NO_CRC]
        assert table.kind_of(0).whole
        assert isinstance(table.view(0), LazyTensor)
