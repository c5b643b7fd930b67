"""What the columns of a table must be able to say, a test for each line of the list."""

import os
import threading

import ml_dtypes
import numpy as np
import pytest
import torch

import holdfast
from holdfast.core.table import Table
from holdfast.engine.computed import ComputedTensors
from holdfast.engine.saves import Memory
from holdfast.errors import SaveError
from holdfast.numeric.cast import cast
from holdfast.verbs.shared.state import tabulate_state


def stored(checkpoint: holdfast.Checkpoint) -> Table:
    table = checkpoint.stored
    assert isinstance(table, Table)
    return table


def test_stored_as_one_thing_and_is_another_also_of_a_slice(tmp_path):
    values = torch.tensor([1 + 2j, 3 - 4j, 5 + 6j])
    torch.save({"conj": values.conj()}, tmp_path / "conj.pt")
    torch.save({"neg": values.conj().imag}, tmp_path / "neg.pt")
    with holdfast.open(tmp_path / "conj.pt") as checkpoint:
        kind = stored(checkpoint).row_kind(0)
        assert (kind.traits.conj, kind.is_contiguous) == (True, False)
        assert checkpoint["conj"].numpy().tolist() == [1 - 2j, 3 + 4j, 5 - 6j]
        assert checkpoint["conj"][1:].numpy().tolist() == [3 + 4j, 5 - 6j]
    with holdfast.open(tmp_path / "neg.pt") as checkpoint:
        kind = stored(checkpoint).row_kind(0)
        assert (kind.traits.neg, kind.is_contiguous) == (True, False)
        assert checkpoint["neg"][::2].numpy().tolist() == [-2, -6]
    holdfast.save({"w": np.arange(6.0).reshape(2, 3) + 2**-9}, tmp_path / "y.safetensors")
    with holdfast.open(tmp_path / "y.safetensors") as checkpoint:
        bfloat16 = holdfast.DTYPES.name("bfloat16")
        made = ComputedTensors().make_computed_tensor(
            checkpoint["w"], bfloat16, lambda elements: cast(elements, bfloat16)
        )
        expected = checkpoint["w"].numpy().astype(ml_dtypes.bfloat16)
        assert made[1, 1:].numpy().tolist() == expected[1, 1:].tolist()


def test_a_computed_storage_says_which_ranges_it_is_computed_from(tmp_path):
    np.savez_compressed(tmp_path / "y.npz", a=np.zeros(1000), b=np.arange(10))
    with holdfast.open(tmp_path / "y.npz") as checkpoint:
        assert (
            checkpoint["a"].source.store.count_read_nbytes(checkpoint["a"].storages[0].key, 8000)
            < 8000
        )


@pytest.mark.parametrize("others", [{}, {"array": np.ones(3)}])
def test_a_tensor_that_is_resized_meanwhile_is_named(others):
    tensors = {"first": torch.ones(64), "second": torch.ones(64)}
    table = tabulate_state({**others, **tensors}).tensors
    rows = range(len(table))
    assert bytes(table.read_bytes(rows)[-1]) == np.ones(64, np.float32).tobytes()
    tensors["second"].untyped_storage().resize_(1 << 20)
    with pytest.raises(SaveError, match="resized") as caught:
        table.read_bytes(rows)
    assert caught.value.tensor == "second"
    with pytest.raises(SaveError, match="resized") as caught:
        table.segment(rows[-1], "second")
    assert caught.value.tensor == "second"
    assert isinstance(table.segment(rows[-2], "first"), Memory)


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
