"""`holdfast.open` and what it returns: every way in, every way to read, and what each mistake is told."""

from __future__ import annotations

import gc
import io
import os
import pickle
import pickletools
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
import torch

import holdfast
from holdfast import errors
from holdfast.core.protocols import Foreign
from holdfast.formats.detect import OPCODES
from tests.support import run_in_threads


@pytest.fixture(scope="module")
def state() -> dict[str, object]:
    tied = torch.arange(12.0).reshape(3, 4)
    return {
        "model": {
            "encoder.weight": tied,
            "decoder.weight": tied.t(),
            "half": torch.arange(5).half(),
            "brain": torch.ones(2, dtype=torch.bfloat16),
            "turned": torch.arange(6, dtype=torch.int16).reshape(2, 3).t().contiguous().t(),
        },
        "epoch": 3,
        "when": Path("/tmp"),
    }


NAMES = [
    "model.encoder.weight",
    "model.decoder.weight",
    "model.half",
    "model.brain",
    "model.turned",
]


@pytest.fixture(scope="module")
def path(state, tmp_path_factory) -> Path:
    found = tmp_path_factory.mktemp("open") / "model.pt"
    torch.save(state, found)
    return found


@pytest.fixture(scope="module")
def data(path) -> bytes:
    return path.read_bytes()


@pytest.fixture
def ckpt(path):
    with holdfast.open(path) as opened:
        yield opened


def test_what_may_begin_a_pickle():
    memo = {"GET", "BINGET", "LONG_BINGET", "PUT", "BINPUT", "LONG_BINPUT"}
    first = [
        opcode
        for opcode in pickletools.opcodes
        if not opcode.stack_before and opcode.name not in memo
    ]
    assert {opcode.code.encode("latin-1") for opcode in first} | {b"i"} == OPCODES


@pytest.mark.parametrize("unpickler", [pickle.Unpickler, pickle._Unpickler])
def test_an_unpickler_refuses_every_other_byte_at_once(unpickler):
    class Watched(unpickler):
        def find_class(self, module, name):
            pytest.fail(f"it asks for {module}.{name}")

        def persistent_load(self, pid):
            pytest.fail(f"it asks for {pid}")

    arguments = (b"", b"0", b"\0", b"\0\0\0\0", b"0\n", b"os\nsystem\n")
    for byte in {bytes([number]) for number in range(256)} - OPCODES:
        for argument in arguments:
            with pytest.raises((pickle.UnpicklingError, LookupError, ValueError)):
                Watched(io.BytesIO(byte + argument + b"Nq\0cos\nsystem\n.")).load()


# Ways in.


@pytest.mark.parametrize(
    "given",
    [
        lambda path: path,
        lambda path: str(path),
        lambda path: path.read_bytes(),
        lambda path: bytearray(path.read_bytes()),
        lambda path: memoryview(path.read_bytes()),
        lambda path: memoryview(bytearray(path.read_bytes() + b"tail"))[:-4],
        lambda path: io.BytesIO(path.read_bytes()),
        lambda path: path.open("rb"),
        lambda path: path.open("rb", buffering=0),
    ],
    ids=[
        "PathLike",
        "str",
        "bytes",
        "bytearray",
        "memoryview",
        "part of a memoryview",
        "BytesIO",
        "file",
        "raw file",
    ],
)
@pytest.mark.parametrize("mmap", [False, True])
def test_everything_that_can_be_opened(given, mmap, path):
    thing = given(path)
    with holdfast.open(thing, mmap=mmap) as ckpt:
        assert list(ckpt) == NAMES
        assert (
            ckpt["model.encoder.weight"].numpy().tolist() == np.arange(12.0).reshape(3, 4).tolist()
        )
        assert ckpt["model.turned"][1].numpy().tolist() == [3, 4, 5]
    if hasattr(thing, "close"):
        assert not thing.closed
        thing.close()


def test_a_relative_path(path, monkeypatch):
    monkeypatch.chdir(path.parent)
    with holdfast.open("model.pt") as ckpt:
        assert ckpt.path == "model.pt"


@pytest.mark.parametrize("thing", [None, 7, 2.5, ["a"], object()])
def test_what_cannot_be_opened_is_a_type_error(thing):
    with pytest.raises(TypeError, match="path, bytes"):
        holdfast.open(thing)


def test_a_text_file_object_is_refused(path):
    with path.open(encoding="latin-1") as file, pytest.raises(errors.HoldfastError):
        holdfast.open(file)


# What is in it.


def test_it_is_a_mapping(ckpt):
    assert len(ckpt) == 5
    assert list(ckpt) == list(ckpt.keys()) == NAMES
    assert "model.half" in ckpt
    assert "half" not in ckpt
    assert None not in ckpt
    assert [t.name for t in ckpt.values()] == NAMES
    assert ckpt.get("nothing") is None
    assert dict(ckpt.items())["model.half"].shape == (5,)


def test_what_it_says_about_itself(ckpt, path):
    assert ckpt.format == "torch-zip"
    assert ckpt.path == str(path)
    assert ckpt.nbytes == 48 + 10 + 4 + 12
    assert [a.names for a in ckpt.aliases] == [("model.encoder.weight", "model.decoder.weight")]
    assert ckpt.metadata["byteorder"] == "little"
    assert ckpt.notes == ()
    assert ckpt.foreign == ()
    assert repr(ckpt) == f"<Checkpoint {str(path)!r} torch-zip, 5 tensors>"
    assert repr(ckpt["model.half"]) == "<LazyTensor 'model.half' float16 [5]>"


def test_the_tree_has_everything(ckpt):
    tree = ckpt.tree
    assert list(tree) == ["model", "epoch", "when"]
    assert tree["epoch"] == 3
    assert str(tree["when"]) == "/tmp"
    assert tree["model"]["half"].numpy().tolist() == [0, 1, 2, 3, 4]
    assert ckpt.tree is tree


def test_foreign_globals_are_listed():
    buffer = io.BytesIO()
    torch.save({"fine": torch.ones(1), "bad": os.system}, buffer)
    with holdfast.open(buffer.getvalue()) as ckpt:
        (foreign,) = ckpt.foreign
        assert isinstance(foreign, Foreign)
        assert (str(foreign.what), foreign.uses) == ("posix.system", ("mention",))
        assert ckpt["fine"].numpy().tolist() == [1]


# Reading.


def test_ways_to_read_one_tensor(ckpt):
    lazy = ckpt["model.half"]
    assert lazy.numpy().dtype == np.float16
    assert np.asarray(lazy).tolist() == [0, 1, 2, 3, 4]
    assert np.asarray(lazy, dtype=np.float64).dtype == np.float64
    assert np.array(lazy, copy=True).tolist() == [0, 1, 2, 3, 4]
    assert (np.ones(5) + lazy[::-1]).tolist() == [5, 4, 3, 2, 1]
    assert lazy.torch().dtype == torch.float16
    assert lazy.read().tolist() == [0, 1, 2, 3, 4]
    assert (lazy.ndim, lazy.size, lazy.nbytes, len(lazy)) == (1, 5, 10, 5)
    assert (
        ckpt["model.decoder.weight"].T.numpy().tolist()
        == ckpt["model.encoder.weight"].numpy().tolist()
    )


def test_a_copy_cannot_be_avoided_where_bytes_must_be_read(path, ckpt):
    """numpy 2: `copy=False` raises where a copy is needed, and reading a file is making one."""
    with pytest.raises(ValueError, match="copy"):
        np.asarray(ckpt["model.half"], copy=False)
    with holdfast.open(path, mmap=True) as mapped:
        assert np.asarray(mapped["model.half"], copy=False).tolist() == [0, 1, 2, 3, 4]


def test_a_copy_that_was_asked_for_is_a_copy(path):
    with holdfast.open(path, mmap=True) as mapped:
        view = mapped["model.half"].numpy()
        copied = np.array(mapped["model.half"], copy=True)
        assert np.shares_memory(view, mapped["model.half"].numpy())
        assert not np.shares_memory(view, copied)


def test_arrays_that_were_read_are_the_callers(ckpt):
    first = ckpt["model.half"].numpy()
    first[:] = 9
    assert ckpt["model.half"].numpy().tolist() == [0, 1, 2, 3, 4]


def test_reading_into_an_array(ckpt):
    lazy = ckpt["model.encoder.weight"]
    for out in (
        np.zeros((3, 4), np.float32),
        np.zeros((4, 3), np.float32).T,
        np.zeros((6, 8), np.float32)[::2, 1::2],
    ):
        assert lazy.read(out=out) is out
        assert out.tolist() == np.arange(12.0).reshape(3, 4).tolist()
    spare = np.full((4, 3), 7, np.float32)
    lazy[:, 1].read(out=spare[1:, 0].reshape(3))
    assert spare[1:, 0].tolist() == [1, 5, 9]
    assert spare[:, 1:].tolist() == [[7, 7]] * 4


@pytest.mark.parametrize(
    "out",
    [
        np.zeros((4, 3), np.float32),
        np.zeros(12, np.float32),
        np.zeros((3, 4), np.float64),
        np.zeros((3, 4), ">f4"),
        np.broadcast_to(np.float32(0), (3, 4)),
        [[0.0] * 4] * 3,
        torch.zeros(3, 4),
    ],
    ids=["turned", "flat", "float64", "big-endian", "read-only", "list", "torch"],
)
def test_a_target_that_does_not_fit_is_refused(out, ckpt):
    with pytest.raises(errors.BadTarget, match="out=") as caught:
        ckpt["model.encoder.weight"].read(out=out)
    assert caught.value.tensor == "model.encoder.weight"


def test_reading_many(ckpt):
    every = ckpt.read()
    assert list(every) == NAMES
    assert all(every[name].tobytes() == ckpt[name].numpy().tobytes() for name in NAMES)
    assert list(ckpt.read("model.half", "model.brain")) == ["model.half", "model.brain"]
    with pytest.raises(errors.NoSuchTensor):
        ckpt.read("model.half", "nothing")
    slices = holdfast.read(
        [ckpt["model.half"][1:3], ckpt["model.encoder.weight"][:, 0], ckpt["model.half"][...]]
    )
    assert [s.tolist() for s in slices] == [[1, 2], [0, 4, 8], [0, 1, 2, 3, 4]]
    assert holdfast.read([]) == []


def test_reading_from_several_checkpoints_at_once(path, data):
    with holdfast.open(path) as a, holdfast.open(data) as b:
        one, other = holdfast.read([a["model.half"], b["model.half"]])
        assert one.tolist() == other.tolist()


def test_many_threads_share_a_checkpoint(path):
    with holdfast.open(path) as ckpt:
        wrong = []

        def use(number: int) -> None:
            for _ in range(20):
                if ckpt["model.encoder.weight"][1:, ::2].numpy().tolist() != [[4, 6], [8, 10]]:
                    wrong.append(1)

        run_in_threads(use, range(6))
        assert wrong == []


def test_one_thread_and_many_give_the_same(tmp_path):
    big = {f"w{i}": torch.randn(300, 1000).t() for i in range(6)}
    torch.save(big, tmp_path / "big.pt")
    with (
        holdfast.open(tmp_path / "big.pt", threads=1) as one,
        holdfast.open(tmp_path / "big.pt", threads=8) as many,
    ):
        first, second = one.read(), many.read()
        for name, tensor in big.items():
            assert (
                first[name].tobytes()
                == second[name].tobytes()
                == tensor.contiguous().numpy().tobytes()
            )


# Mapped.


def test_mapped_arrays_are_views_and_writing_changes_only_the_copy(path, data):
    with holdfast.open(path, mmap=True) as ckpt:
        array = ckpt["model.encoder.weight"].numpy()
        part = ckpt["model.encoder.weight"][1:, ::2].numpy()
        assert np.shares_memory(array, part)
        assert not array.flags.owndata
        array[:] = -1
        assert part.tolist() == [[-1, -1], [-1, -1]]
        fresh = ckpt["model.encoder.weight"].read()
        assert fresh[0].tolist() == [0, 1, 2, 3]
        tensor = ckpt["model.half"].torch()
        tensor.fill_(8)
    assert path.read_bytes() == data


def test_arrays_stay_valid_after_closing(path):
    with holdfast.open(path, mmap=True) as ckpt:
        mapped, tensor = ckpt["model.encoder.weight"].numpy(), ckpt["model.half"].torch()
    with holdfast.open(path) as ckpt:
        read = ckpt["model.encoder.weight"].numpy()
    del ckpt
    gc.collect()
    assert mapped.tolist() == read.tolist() == np.arange(12.0).reshape(3, 4).tolist()
    assert tensor.tolist() == [0, 1, 2, 3, 4]


def test_mapping_bytes_gives_read_only_views(data):
    with holdfast.open(data, mmap=True) as ckpt:
        array = ckpt["model.half"].numpy()
        assert not array.flags.writeable
        tensor = ckpt["model.half"].torch()
        tensor.fill_(7)
        assert array.tolist() == [0, 1, 2, 3, 4]


# Closing.


def test_a_closed_checkpoint_can_be_looked_at_and_not_read(path):
    with holdfast.open(path) as ckpt:
        lazy = ckpt["model.half"]
    assert lazy[1:].shape == (4,)
    assert len(ckpt) == 5
    for act in (lazy.numpy, lazy.read, lazy.torch, ckpt.read, lambda: np.asarray(lazy)):
        with pytest.raises(errors.Closed, match="open it again"):
            act()
    ckpt.close()


def test_the_body_of_a_with_may_raise(path):
    with pytest.raises(ZeroDivisionError), holdfast.open(path) as ckpt:
        raise ZeroDivisionError
    with pytest.raises(errors.Closed):
        ckpt["model.half"].numpy()


def test_no_descriptor_is_left_open(path, tmp_path):
    (tmp_path / "bad.pt").write_bytes(b"PK\3\4 and nothing more")
    folder = Path("/proc/self/fd")
    before = len(list(folder.iterdir()))
    for _ in range(5):
        with holdfast.open(path, mmap=True) as ckpt:
            ckpt["model.half"].numpy()
        with pytest.raises(errors.HoldfastError):
            holdfast.open(tmp_path / "bad.pt")
    gc.collect()
    assert len(list(folder.iterdir())) == before


# Mistakes.


def test_a_name_that_is_not_there(ckpt):
    with pytest.raises(errors.NoSuchTensor) as caught:
        ckpt["model.encoder.wieght"]
    assert "did you mean 'model.encoder.weight'" in str(caught.value)
    assert isinstance(caught.value, KeyError)
    with pytest.raises(KeyError, match="5 tensors"):
        ckpt["zzzzzzzzzzzzzzzz"]


@pytest.mark.parametrize(
    ("index", "said"),
    [
        (5, "out of bounds"),
        (-4, "out of bounds"),
        ((0, -6), "index -6 is out of bounds for dimension 1"),
        ((0, 0, 0), "too many indices"),
        ((0, ..., 1, 2), "3 were indexed"),
        ((..., ...), "single ellipsis"),
        (slice(None, None, 0), "step"),
        (slice("a", None), "bad slice"),
        (np.array([True, False, True]), "read it first"),
        (np.array([0, 2]), "read it first"),
        ([0, 2], "read it first"),
        (True, "read it first"),
        ("a", "read it first"),
        (1.5, "read it first"),
        (np.ones((3, 4), bool), "read it first"),
        (((0, 1),), "read it first"),
    ],
    ids=str,
)
def test_indices_that_do_not_work(index, said, ckpt):
    with pytest.raises(errors.BadIndex, match=said) as caught:
        ckpt["model.encoder.weight"][index]
    assert isinstance(caught.value, IndexError)


def test_integers_of_numpy_are_integers(ckpt):
    lazy = ckpt["model.encoder.weight"]
    assert lazy[np.int64(1), np.uint8(2)].numpy() == 6
    assert lazy[np.int8(-1) :: np.int64(1)].shape == (1, 4)


def test_permute(ckpt):
    lazy = ckpt["model.encoder.weight"]
    assert lazy.permute(1, 0).numpy().tolist() == lazy.numpy().T.tolist()
    assert lazy.permute(-1, 0).shape == (4, 3)
    for axes in ((0,), (0, 0), (0, 2), ()):
        with pytest.raises(errors.BadIndex, match="permute"):
            lazy.permute(*axes)


def test_a_scalar_has_no_length(ckpt):
    with pytest.raises(TypeError):
        len(ckpt["model.half"][0])


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "empty"),
        (b"<!DOCTYPE html><html>Not Found</html>", "web page"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 12\n", "git lfs pull"),
        (b"\x89HDF\r\n\x1a\n" + bytes(100), "HDF5"),
        (b"\x1f\x8b\x08" + bytes(100), "gzip"),
        (b"PYTORCH1" + bytes(100), "preview"),
        (b"just some text", "none of the formats"),
    ],
    ids=["empty", "html", "lfs", "hdf5", "gzip", "preview", "text"],
)
def test_files_that_are_no_checkpoint_are_told_what_they_are(content, said, tmp_path):
    path = tmp_path / "model.pt"
    path.write_bytes(content)
    for thing in (path, content):
        with pytest.raises(errors.UnknownFormat, match=said) as caught:
            holdfast.open(thing)
        assert caught.value.file == (str(path) if thing is path else "<bytes>")


def test_paths_that_cannot_be_opened(tmp_path):
    with pytest.raises(errors.StoreError, match="no such file") as caught:
        holdfast.open(tmp_path / "nothing.pt")
    assert isinstance(caught.value, OSError)
    assert caught.value.file == str(tmp_path / "nothing.pt")
    with pytest.raises(errors.StoreError, match="empty"):
        holdfast.open(tmp_path)
    for name in ("a\0b", "x" * 5000, "", "bad\udcffname\ud800"):
        with pytest.raises(errors.StoreError):
            holdfast.open(name)
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(errors.StoreError, match="circles"):
        holdfast.open(tmp_path / "loop")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_without_permission(tmp_path, data):
    path = tmp_path / "secret.pt"
    path.write_bytes(data)
    path.chmod(0)
    with pytest.raises(errors.StoreError, match="permission"):
        holdfast.open(path)


def test_special_files_are_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(errors.UnsafePath, match="regular file"):
        holdfast.open(tmp_path / "pipe")
    with pytest.raises(errors.UnsafePath, match="regular file"):
        holdfast.open("/dev/zero")


def test_folders(tmp_path, data):
    (tmp_path / "notes.txt").write_text("hello")
    (tmp_path / "more.txt").write_text("hello")
    with pytest.raises(errors.UnknownFormat, match="no checkpoint in this folder"):
        holdfast.open(tmp_path)
    (tmp_path / "a.safetensors").write_bytes(safetensors.numpy.save({"x": np.arange(3)}))
    with holdfast.open(tmp_path) as ckpt:
        assert ckpt["x"].numpy().tolist() == [0, 1, 2]


def test_a_file_that_is_cut_after_it_was_opened(path, tmp_path, data):
    cut = tmp_path / "cut.pt"
    cut.write_bytes(data)
    with holdfast.open(cut) as ckpt:
        start = ckpt["model.turned"].storages[0].start
        os.truncate(cut, start + 3)
        with pytest.raises(errors.Truncated) as caught:
            ckpt["model.turned"].numpy()
        assert (caught.value.tensor, caught.value.file) == ("model.turned", str(cut))
        with pytest.raises(errors.Truncated) as caught:
            ckpt.read("model.half", "model.turned")
        assert caught.value.tensor in ("model.half", "model.turned")
        assert ckpt["model.encoder.weight"].numpy()[0].tolist() == [0, 1, 2, 3]


def test_a_cut_file_cannot_be_mapped(tmp_path, data):
    cut = tmp_path / "cut.pt"
    cut.write_bytes(data)
    with holdfast.open(cut, mmap=True) as ckpt:
        os.truncate(cut, len(data) // 2)
        with pytest.raises(errors.HoldfastError):
            ckpt["model.turned"].numpy()


def test_the_collector_is_left_as_it_was(path):
    gc.disable()
    try:
        holdfast.open(path).close()
        assert not gc.isenabled()
    finally:
        gc.enable()
    holdfast.open(path).close()
    assert gc.isenabled()


def test_limits_are_honoured_and_named(data):
    with pytest.raises(errors.LimitExceeded, match="pickle_nbytes"):
        holdfast.open(data, limits=holdfast.Limits(pickle_nbytes=100))


def test_an_expanded_view_is_sliced_or_allowed():
    buffer = io.BytesIO()
    torch.save({"wide": torch.ones(1).expand(10_000_000)}, buffer)
    with holdfast.open(buffer.getvalue()) as ckpt:
        with pytest.raises(errors.LimitExceeded, match="expansion"):
            ckpt["wide"].numpy()
        assert ckpt["wide"][:5].numpy().tolist() == [1] * 5
    with holdfast.open(buffer.getvalue(), limits=holdfast.Limits(expansion=1 << 40)) as ckpt:
        assert ckpt["wide"].numpy().shape == (10_000_000,)


def test_a_data_file_of_a_distributed_checkpoint(tmp_path):
    from holdfast.torch import save_sharded

    save_sharded(
        tmp_path / "step", {"a": torch.ones(3), "b": torch.ones(4)}, format="dcp", durable=False
    )
    with pytest.raises(holdfast.errors.UnknownFormat, match="open the folder that it is in"):
        holdfast.open(tmp_path / "step" / "__0_0.distcp")
    assert list(holdfast.open(tmp_path / "step")) == ["a", "b"]
