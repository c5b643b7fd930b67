"""What the columns of a table must be able to say, as far as reading asks them."""

import pickle
import threading

import numpy as np
import pytest

import holdfast
from holdfast.core.table import Table

PATHS = ("a.safetensors", "a", "a.pt")
MANY = 100_000


@pytest.fixture(scope="module")
def many(tmp_path_factory):
    folder = tmp_path_factory.mktemp("many")
    state = {f"layers.{n // 100}.w.{n % 100}": np.full(2, n, "f4") for n in range(MANY)}
    for name in PATHS:
        holdfast.save(state, folder / name, durable=False)
    return folder


@pytest.mark.parametrize("name", PATHS)
def test_a_pickled_tensor_is_its_own_row(many, name):
    with holdfast.open(many / name) as ckpt:
        raw = pickle.dumps(ckpt["layers.7.w.3"])
        assert len(raw) < 2000
        assert pickle.loads(raw).numpy().tolist() == [703, 703]


@pytest.mark.parametrize("name", PATHS[:2])
def test_a_description_is_a_table(many, name):
    with holdfast.open(many / name) as ckpt:
        table = ckpt.stored
        assert isinstance(table, Table)
        assert (len(table.kinds), len(table.names), table.odd) == (1, MANY, {})


def test_rows_of_one_storage_share_it_and_views_are_noted(tmp_path):
    base = np.arange(6, dtype="f4")
    holdfast.save(
        {"a": base, "b": base, "part": base[:3], "empty": np.zeros(0, "f4")}, tmp_path / "a"
    )
    with holdfast.open(tmp_path / "a") as ckpt:
        table = ckpt.stored
        assert table.storage[table.rows["a"]] == table.storage[table.rows["b"]]
        assert table.storage[table.rows["part"]] != table.storage[table.rows["a"]]
        assert table.kind_of(table.rows["part"]).traits.alias is not None
        assert sorted(name for alias in ckpt.aliases for name in alias.names) == ["a", "b", "part"]
        assert ckpt["part"].numpy().tolist() == [0, 1, 2]


def test_a_column_is_made_once_by_sixteen_threads(many):
    with holdfast.open(many / "a.safetensors") as ckpt:
        found = []
        threads = [
            threading.Thread(target=lambda: found.append(ckpt["layers.999.w.99"].numpy().tolist()))
            for _ in range(16)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert found == [[99_999, 99_999]] * 16


def test_a_slice_of_a_row_is_a_small_value(many):
    with holdfast.open(many / "a.safetensors") as ckpt:
        part = ckpt["layers.7.w.3"][1:]
        assert len(pickle.dumps(part)) < 2000
        assert part.renamed("other").numpy().tolist() == [703]


@pytest.mark.parametrize("name", PATHS)
def test_one_damaged_tensor_of_very_many_is_named(many, name, tmp_path):
    copy = tmp_path / name
    holdfast.copy(many / name, copy)
    with holdfast.open(copy) as ckpt:
        (storage,) = ckpt["layers.321.w.7"].storages
        file = copy / storage.key if copy.is_dir() else copy
        with file.open("r+b") as changed:
            changed.seek(storage.start + 3)
            changed.write(b"\xff")
        for read in (ckpt.read, ckpt["layers.321.w.7"].numpy):
            with pytest.raises(holdfast.errors.Corrupted) as caught:
                read()
            found = caught.value
            assert (found.tensor, found.file, found.offset) == (
                "layers.321.w.7",
                storage.key,
                storage.start,
            )
    (damage,) = holdfast.verify(copy).damaged
    assert (damage.tensors, damage.file, damage.offset) == (
        ("layers.321.w.7",),
        str(file),
        storage.start,
    )
