"""What the columns of a table must be able to say, as far as reading asks them."""

import pickle

import numpy as np
import pytest

import holdfast

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


def test_a_slice_of_a_row_is_a_small_value(many):
    with holdfast.open(many / "a.safetensors") as ckpt:
        part = ckpt["layers.7.w.3"][1:]
        assert len(pickle.dumps(part)) < 2000
        assert part.renamed("other").numpy().tolist() == [703]
