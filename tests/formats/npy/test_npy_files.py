"""Array files and archives, read as numpy reads them; and what is said of those that are no tensors."""

from __future__ import annotations

import io
import zipfile

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.formats.npy.craft_npy import npy, npz
from tests.formats.zip.craft import build, make_old_cpython_item
from tests.sampling import examples

import holdfast
from holdfast import errors
from holdfast.core.crc import crc32
from holdfast.core.limits import Limits
from holdfast.formats.npy.header import parse_header
from holdfast.stores.memory import MemoryStore

CODES = ["?", *"bBhHiIlLqQ", "e", "f", "d", "F", "D"]


def saved(array: np.ndarray, **options: object) -> bytes:
    with io.BytesIO() as file:
        np.lib.format.write_array(file, array, **options)
        return file.getvalue()


def archived(compressed: bool = False, **arrays: np.ndarray) -> bytes:
    with io.BytesIO() as file:
        (np.savez_compressed if compressed else np.savez)(file, **arrays)
        return file.getvalue()


def random_array(
    code: str, order: str, shape: tuple[int, ...], *, turned: bool, seed: int
) -> np.ndarray:
    dtype = np.dtype(code).newbyteorder(order)
    raw = np.random.default_rng(seed).bytes(int(np.prod(shape, dtype=np.int64)) * dtype.itemsize)
    made = np.frombuffer(raw, np.uint8) % 2 == 0 if code == "?" else np.frombuffer(raw, dtype)
    return np.asarray(made.reshape(shape), order="F" if turned else "C")


arrays = st.builds(
    random_array,
    st.sampled_from(CODES),
    st.sampled_from("<>"),
    st.lists(st.integers(0, 4), max_size=4).map(tuple),
    turned=st.booleans(),
    seed=st.integers(0, 1000),
)


@settings(max_examples=examples(60))
@given(array=arrays, version=st.sampled_from([(1, 0), (2, 0), (3, 0)]))
def test_an_array_is_what_numpy_reads(array, version):
    raw = saved(array, version=version)
    with holdfast.open(raw) as ckpt:
        assert (ckpt.format, list(ckpt), ckpt.notes) == ("npy", ["tensor"], ())
        wanted, found = np.load(io.BytesIO(raw)), ckpt["tensor"].numpy()
        assert found.dtype == wanted.dtype.newbyteorder("=")
        assert found.shape == wanted.shape
        assert found.tobytes() == wanted.astype(found.dtype).tobytes()
        index = (..., slice(None, None, -1)) if wanted.ndim else ()
        assert (
            ckpt["tensor"][index].numpy().tobytes() == wanted[index].astype(found.dtype).tobytes()
        )


@settings(max_examples=examples(30))
@given(
    members=st.dictionaries(
        st.sampled_from(["a", "A", "b.c", "d/e", "\u2603", "x.npy"]), arrays, max_size=4
    ),
    compressed=st.booleans(),
)
def test_an_archive_is_what_numpy_reads(members, compressed):
    raw = archived(compressed, **members)
    with holdfast.open(raw) as ckpt, np.load(io.BytesIO(raw)) as wanted:
        assert ckpt.format == "npz"
        assert list(ckpt) == wanted.files
        for name, array in ckpt.read().items():
            assert array.tobytes() == wanted[name].astype(array.dtype).tobytes()


def test_nothing_but_headers_is_read_when_an_archive_is_opened(monkeypatch):
    raw = archived(**{str(i): np.zeros(100_000) for i in range(10)})
    seen = []
    read = MemoryStore.read
    monkeypatch.setattr(
        MemoryStore,
        "read",
        lambda self, key, start, out: (seen.append(out.nbytes), read(self, key, start, out))[1],
    )
    with holdfast.open(raw) as ckpt:
        assert len(ckpt) == 10
    assert sum(seen) < 20_000


def test_checksums_of_members_are_compared():
    raw = archived(w=np.arange(100.0), v=np.arange(50.0))
    at = raw.index(np.arange(100.0).tobytes())
    damaged = raw[: at + 11] + b"\xff" + raw[at + 12 :]
    with holdfast.open(damaged) as ckpt:
        assert ckpt["v"].numpy()[3] == 3
        with pytest.raises(errors.Corrupted):
            ckpt["w"].numpy()
    report = holdfast.verify(damaged)
    assert [damage.tensors for damage in report.damaged] == [("w",)]
    assert holdfast.verify(raw).ok
    assert holdfast.verify(raw).unchecked == ()
    assert holdfast.open(raw)["w"].chunks[0].storage.crc32 == crc32(np.arange(100.0).tobytes())


def test_compressed_members_are_verified():
    raw = archived(True, w=np.arange(1000.0), v=np.ones(3))
    report = holdfast.verify(raw)
    assert report.ok
    assert report.unchecked == ()
    with zipfile.ZipFile(io.BytesIO(raw)) as archive:
        at = archive.getinfo("w.npy").header_offset + 200
    damaged = holdfast.verify(raw[:at] + bytes([raw[at] ^ 0xFF]) + raw[at + 1 :])
    assert not damaged.ok


@pytest.mark.parametrize("to_pipe", [False, True], ids=["file", "pipe"])
@pytest.mark.parametrize("method", [0, 8], ids=["savez", "savez_compressed"])
def test_archives_of_old_pythons_open(to_pipe, method, tmp_path):
    """numpy.savez under Python 3.6 to 3.11.3 writes zip64 blocks beside the true sizes."""
    arrays = {"w": np.arange(100.0), "empty": np.ones((0, 3), np.float32)}
    items = [
        make_old_cpython_item(f"{name}.npy", saved(array), method=method, to_pipe=to_pipe)
        for name, array in arrays.items()
    ]
    raw = build(items, wide=False, alignment=0)
    with holdfast.open(raw) as ckpt, np.load(io.BytesIO(raw)) as wanted:
        assert list(ckpt) == wanted.files == ["w", "empty"]
        for name, array in ckpt.read().items():
            assert array.shape == wanted[name].shape
            assert array.tobytes() == wanted[name].tobytes()
    assert holdfast.verify(raw).ok
    path = tmp_path / "old.npz"
    path.write_bytes(raw)
    assert holdfast.scan(path).verdict() == "clean"


def test_types_that_numpy_has_no_name_for():
    for scalar, name in (
        (ml_dtypes.bfloat16, "bfloat16"),
        (ml_dtypes.float8_e5m2, "float8_e5m2"),
        (ml_dtypes.float8_e4m3fn, "bits8"),
    ):
        array = np.arange(4).astype(scalar)
        with holdfast.open(saved(array)) as ckpt:
            assert ckpt["tensor"].dtype == name
            assert ckpt["tensor"].numpy().tobytes() == array.tobytes()
            assert name in ckpt.notes[0]


@pytest.mark.parametrize(
    ("array", "said"),
    [
        (np.array([{}], dtype=object), "pickle"),
        (np.array(["text"]), "text"),
        (np.array([b"raw"]), "byte strings"),
        (np.zeros(2, "M8[ns]"), "dates"),
        (np.zeros(2, [("a", "f4"), ("b", "O")]), "structures with Python objects"),
        (np.zeros(2, [("a", "f4")]), "structures"),
    ],
)
def test_what_is_no_tensor(array, said):
    raw = saved(array, allow_pickle=True)
    with pytest.raises(errors.Unsupported, match=said):
        holdfast.open(raw)
    with io.BytesIO() as file:
        np.savez(file, w=np.ones(2), other=array)
        both = file.getvalue()
    with holdfast.open(both) as ckpt:
        assert list(ckpt) == ["w"]
        assert isinstance(ckpt.tree["other"], holdfast.Opaque)
        assert said in ckpt.notes[0]


def test_converted_compared_and_counted(tmp_path):
    path = tmp_path / "w.npz"
    path.write_bytes(
        archived(
            True, **{"a/b": np.asfortranarray(np.arange(6.0).reshape(2, 3)), "n": np.arange(3)}
        )
    )
    for target in ("w.safetensors", "w.pt", "native"):
        holdfast.convert(path, tmp_path / target)
        assert holdfast.diff(path, tmp_path / target).equal
    assert {row.name: row.mean for row in holdfast.stats(path).tensors} == {"a/b": 2.5, "n": 1}
    with pytest.raises(errors.HoldfastError, match="npz can be read and not written"):
        holdfast.edit(path, in_place=True, drop="n")


def test_a_refused_member_does_not_pass_silently_into_a_conversion(tmp_path):
    path = tmp_path / "w.npz"
    path.write_bytes(archived(w=np.ones(2), s=np.array(["text"])))
    with pytest.raises(errors.CannotHold, match=r"numpy\.ndarray"):
        holdfast.convert(path, tmp_path / "w.safetensors")
    holdfast.convert(path, tmp_path / "w.safetensors", tensors_only=True)
    assert list(holdfast.open(tmp_path / "w.safetensors")) == ["w"]


def test_the_suffix_decides_nothing(tmp_path):
    torch = pytest.importorskip("torch")
    torch.save({"w": torch.ones(2)}, tmp_path / "w.npz")
    assert holdfast.open(tmp_path / "w.npz").format == "torch-zip"
    (tmp_path / "w.pt").write_bytes(archived(w=np.ones(2)))
    assert holdfast.open(tmp_path / "w.pt").format == "npz"


def test_how_much_may_be_inflated_is_a_limit():
    raw = archived(True, w=np.zeros(4_000_000))
    with pytest.raises(errors.LimitExceeded, match="inflation"):
        holdfast.open(raw)
    with holdfast.open(raw, limits=Limits(inflation=2000)) as ckpt:
        assert ckpt["w"][-3:].numpy().tolist() == [0, 0, 0]


@pytest.mark.parametrize("surplus", [1, 5_000])
def test_a_member_that_inflates_to_more_than_the_archive_states_is_refused(surplus):
    member = saved(np.zeros(100_000, np.uint8))
    with io.BytesIO() as file:
        with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("w.npy", member + bytes(surplus))
        raw = file.getvalue()
    # The local header and the central directory state the size of the array alone.
    actual_size = (len(member) + surplus).to_bytes(4, "little")
    assert raw.count(actual_size) == 2
    lying = raw.replace(actual_size, len(member).to_bytes(4, "little"))

    with holdfast.open(lying) as ckpt, pytest.raises(errors.Corrupted, match="do not inflate to"):
        ckpt["w"].numpy()


def test_a_header_may_be_written_in_other_ways():
    usual = npy("'<f4'", "(2, 3)")
    other = npy(text="{'descr':'<f4','fortran_order':False,'shape':(2,3)}")
    for raw in (usual, other):
        found = parse_header(raw[:-24], max_rank=64)
        assert (found.dtype.name, found.byteorder, found.shape, found.fortran_order) == (
            "float32",
            "little",
            (2, 3),
            False,
        )


def test_scan_reads_the_pickle_of_an_array_of_objects(tmp_path):
    evil = b"cposix\nsystem\n(Vtrue\ntR."
    (tmp_path / "o.npy").write_bytes(npy("'|O'", "(1,)", evil))
    (tmp_path / "o.npz").write_bytes(npz({"w.npy": npy(), "o.npy": npy("'|O'", "(1,)", evil)}))
    (tmp_path / "w.npz").write_bytes(npz({"w.npy": npy(), "W.npy": npy()}))
    for name, verdict in (("o.npy", "dangerous"), ("o.npz", "dangerous"), ("w.npz", "clean")):
        report = holdfast.scan(tmp_path / name)
        assert (report.verdict(), report.reports[0].error) == (verdict, None)


def test_an_open_archive_travels(tmp_path):
    import pickle

    path = tmp_path / "w.npz"
    path.write_bytes(archived(True, w=np.arange(100.0)))
    with holdfast.open(path) as ckpt:
        again = pickle.loads(pickle.dumps(ckpt))
        lazy = pickle.loads(pickle.dumps(ckpt["w"]))
        assert again["w"].numpy().tolist() == lazy.numpy().tolist() == list(range(100))
