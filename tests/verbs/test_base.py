"""`save(…, base=…)`: what did not change is linked, every step is whole by itself, and a base that cannot be used costs a note."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

import holdfast
from holdfast.core.content_hash import HASH, hash_bytes
from holdfast.core.documents import seal
from holdfast.errors import BadArgument, HeaderError, NotAPath, NotCommitted, Unsupported
from holdfast.formats.native import base as base_of
from holdfast.formats.safetensors.schema import MANIFEST
from holdfast.stores.files import Files
from holdfast.verbs.shared.planned import Saved
from tests.properties.same import assert_same
from tests.sampling import examples
from tests.support import flip_bit

Arrays = dict[str, np.ndarray]


def arrays(count: int = 8, rows: int = 40, *, seed: int = 0) -> Arrays:
    random = np.random.default_rng(seed)
    return {f"w{i}": random.standard_normal((rows, 32)).astype(np.float32) for i in range(count)}


def changed(state: Arrays, *names: str) -> Arrays:
    return {name: array + 1 if name in names else array for name, array in state.items()}


def first(path: Path, state: object, **options: object) -> Saved:
    return holdfast.save(state, path, hashes=True, durable=False, **options)


def after(base: Path, path: Path, state: object, **options: object) -> Saved:
    return holdfast.save(state, path, base=base, durable=False, **options)


def check(path: Path, state: Arrays) -> None:
    """A step is whole: it opens, has these very bytes, verifies, and the safetensors library reads them where the index says."""
    with holdfast.open(path) as found:
        assert sorted(found) == sorted(state)
        for name, array in state.items():
            assert found[name].shape == array.shape
            assert found[name].numpy().tobytes() == array.tobytes()
    report = holdfast.verify(path)
    assert report.ok, report
    assert report.unchecked == ()
    index = path / "model.safetensors.index.json"
    if index.exists():
        weights = json.loads(index.read_text())["weight_map"]
        files = {file: load_file(path / file) for file in set(weights.values())}
        # Also by a program that takes all tensors of all files, in the order of their names: transformers 5 does.
        merged = {name: array for file in sorted(files) for name, array in files[file].items()}
        for name, array in state.items():
            assert files[weights[name]][name].tobytes() == merged[name].tobytes() == array.tobytes()


def manifest(path: Path) -> dict[str, object]:
    return json.loads((path / MANIFEST).read_text())


def linked(path: Path, base: Path) -> set[str]:
    """The data files that are those of the base."""
    there = {file.stat().st_ino for file in base.glob("*.safetensors")}
    return {file.name for file in path.glob("*.safetensors") if file.stat().st_ino in there}


def test_what_did_not_change_is_a_link(tmp_path: Path):
    one = arrays()
    first(tmp_path / "1", one)
    two = changed(one, "w3")
    saved = after(tmp_path / "1", tmp_path / "2", two)
    assert linked(tmp_path / "2", tmp_path / "1") == {"data-00001-of-00001.safetensors"}
    assert (
        saved.shared_nbytes == (tmp_path / "1" / "data-00001-of-00001.safetensors").stat().st_size
    )
    assert (
        saved.new_nbytes
        == saved.nbytes - saved.shared_nbytes
        == sum(
            file.stat().st_size for file in (tmp_path / "2").iterdir() if file.stat().st_nlink == 1
        )
    )
    assert saved.nbytes == sum(file.stat().st_size for file in (tmp_path / "2").iterdir())
    assert sorted(name for name, _ in saved.files) == sorted(
        file.name for file in (tmp_path / "2").iterdir()
    )
    assert set(saved.crcs) == {"w3"}
    assert "shared with the base" in saved.explain()
    assert holdfast.verify(tmp_path / "1").notes == ()
    assert holdfast.verify(tmp_path / "2").notes == (
        "data-00001-of-00001.safetensors: 5,120 bytes belong to other steps that share the file",
    )
    check(tmp_path / "1", one)
    shutil.rmtree(tmp_path / "1")
    check(tmp_path / "2", two)


def test_a_dry_run_tells_and_writes_nothing(tmp_path: Path):
    one = arrays()
    first(tmp_path / "1", one)
    told = after(tmp_path / "1", tmp_path / "2", changed(one, "w0"), dry_run=True)
    assert not (tmp_path / "2").exists()
    done = after(tmp_path / "1", tmp_path / "2", changed(one, "w0"))
    assert (told.new_nbytes, told.shared_nbytes, told.files) == (
        done.new_nbytes,
        done.shared_nbytes,
        done.files,
    )


def test_a_file_that_is_less_than_half_alive_is_written_again_apart_from_what_changed(
    tmp_path: Path,
):
    one = arrays(8)
    first(tmp_path / "1", one)
    two = changed(one, *(f"w{i}" for i in range(5)))
    saved = after(tmp_path / "1", tmp_path / "2", two)
    assert saved.shared_nbytes == 0
    tensors = manifest(tmp_path / "2")["tensors"]
    files = {name: tensor["chunks"][0]["file"] for name, tensor in tensors.items()}
    assert files == {f"w{i}": 1 if i < 5 else 0 for i in range(8)}
    # Now the two rates are apart, and every further step writes what changes and nothing else.
    three = changed(two, *(f"w{i}" for i in range(5)))
    again = after(tmp_path / "2", tmp_path / "3", three)
    assert linked(tmp_path / "3", tmp_path / "2") == {"data-00001-of-00002.safetensors"}
    assert again.new_nbytes < saved.new_nbytes
    check(tmp_path / "3", three)


def test_exactly_half_is_linked(tmp_path: Path):
    one = arrays(8)
    first(tmp_path / "1", one)
    saved = after(tmp_path / "1", tmp_path / "2", changed(one, "w0", "w1", "w2", "w3"))
    assert saved.shared_nbytes > 0


def test_tensors_that_change_together_are_few_files(tmp_path: Path):
    """Twenty steps of a LoRA: a frozen model, a part that changes each time, one that changes every fifth time."""
    state = arrays(40, rows=8)
    first(tmp_path / "0", state)
    for step in range(1, 21):
        names = ["w0", "w1"] + (["w2", "w3", "w4"] if step % 5 == 0 else [])
        state = changed(state, *names)
        saved = after(tmp_path / f"{step - 1}", tmp_path / f"{step}", state)
        assert len(list((tmp_path / f"{step}").glob("data*"))) <= 4
        if step % 5 > 1:
            assert (
                sum(nbytes for name, nbytes in saved.files if name.startswith("data"))
                - saved.shared_nbytes
                < 3 * 8 * 32 * 4
            )
    assert max(file.name for file in (tmp_path / "20").glob("data*")) < "data-00006"
    check(tmp_path / "20", state)


def test_small_files_of_many_steps_become_one(tmp_path: Path):
    """Another tensor changes in each step, and never again."""
    state = arrays(200, rows=8)
    first(tmp_path / "0", state)
    most = 0
    for step in range(1, 60):
        state = changed(state, f"w{step}")
        after(tmp_path / f"{step - 1}", tmp_path / f"{step}", state)
        most = max(most, len(list((tmp_path / f"{step}").glob("data*"))))
    assert base_of.MANY < most <= base_of.MANY + 4
    check(tmp_path / "59", state)


def test_another_dtype_or_shape_with_the_same_bytes_is_another_tensor(tmp_path: Path):
    one = arrays(4)
    first(tmp_path / "1", one)
    two = one | {"w1": one["w1"].view(np.int32), "w2": one["w2"].reshape(-1)}
    after(tmp_path / "1", tmp_path / "2", two)
    with holdfast.open(tmp_path / "2") as found:
        assert found["w1"].dtype.name == "int32"
        assert found["w2"].shape == two["w2"].shape
        assert len(found["w1"].numpy()) == len(two["w1"])
    check(tmp_path / "2", two)


def test_a_change_behind_the_head_is_found(tmp_path: Path):
    """The first 64 KiB are the same, and the hash of the whole is not."""
    one = {"w": np.zeros(1 << 20, np.uint8), "v": np.zeros(3 << 20, np.uint8)}
    first(tmp_path / "1", one)
    two = {name: array.copy() for name, array in one.items()}
    two["w"][-1] = 1
    after(tmp_path / "1", tmp_path / "2", two)
    check(tmp_path / "2", two)
    assert linked(tmp_path / "2", tmp_path / "1")


def test_what_changed_is_hashed_when_it_stands_still(tmp_path: Path):
    """A large tensor that changed has a head and no hash; the next time it is the same it is written with one, and then shared."""
    state = {
        "w": np.arange(50_000, dtype=np.float32),
        "frozen": np.arange(90_000, dtype=np.float32),
    }

    def saved(step: int) -> tuple[dict[str, object], bool]:
        done = after(tmp_path / f"{step - 1}", tmp_path / f"{step}", state)
        check(tmp_path / f"{step}", state)
        return manifest(tmp_path / f"{step}")["tensors"]["w"]["chunks"][0], "w" in done.crcs

    first(tmp_path / "0", state)
    for step in (1, 2):
        state["w"] = state["w"] + 1
        chunk, written = saved(step)
        assert written
        assert chunk["head"] == f"{hash_bytes(state['w'].tobytes()).head:08x}"
        assert "hash" not in chunk
    chunk, written = saved(3)
    assert written
    assert chunk["hash"] == f"{hash_bytes(state['w'].tobytes()).hash:032x}"
    chunk, written = saved(4)
    assert not written
    assert linked(tmp_path / "4", tmp_path / "3") == {
        file.name for file in (tmp_path / "4").glob("data*")
    }


def test_tied_empty_strided_and_nested(tmp_path: Path):
    weight = np.arange(4096, dtype=np.float32).reshape(64, 64)
    big = np.arange(200_000, dtype=np.int32).reshape(400, 500)
    state = {
        "model": {
            "w": weight,
            "tied": weight,
            "none": np.zeros((0, 3)),
            "t": weight.T,
            "turned": big[::-1, ::2],
        },
        "step": 3,
        "words": ["a", (1, 2.5)],
    }
    first(tmp_path / "1", state)
    saved = after(tmp_path / "1", tmp_path / "2", state)
    assert saved.new_nbytes < 10_000
    state["model"]["none"] = np.zeros((3, 0))
    state["step"] = 4
    again = after(tmp_path / "2", tmp_path / "3", state)
    assert again.new_nbytes < 10_000
    shutil.rmtree(tmp_path / "1")
    shutil.rmtree(tmp_path / "2")
    with holdfast.open(tmp_path / "3") as found:
        assert found["model.tied"].storages == found["model.w"].storages
        assert found["model.none"].shape == (3, 0)
        assert_same(found.tree["step"], 4)
        for name in ("w", "tied", "t", "turned"):
            assert (
                found[f"model.{name}"].numpy().tobytes()
                == np.ascontiguousarray(state["model"][name]).tobytes()
            )
    assert holdfast.verify(tmp_path / "3").ok


def test_split_tensors_of_a_base_stay_split(tmp_path: Path):
    one = arrays(4)
    holdfast.save(one, tmp_path / "plain", durable=False)
    holdfast.reshard(
        tmp_path / "plain", tmp_path / "split", mesh="a=2", rules=["*: a=0"], durable=False
    )
    # `reshard` records no hashes; put in by hand what it would have been.
    document = manifest(tmp_path / "split")
    for name, tensor in document["tensors"].items():
        for chunk in tensor["chunks"]:
            (low, _), (high, _) = chunk["start"], chunk["stop"]
            chunk["hash"] = f"{hash_bytes(one[name][low:high].tobytes()).hash:032x}"
    document |= {"version": 4, "hash": HASH}
    reseal(tmp_path / "split", document)
    two = changed(one, "w1")
    saved = after(tmp_path / "split", tmp_path / "2", two)
    assert linked(tmp_path / "2", tmp_path / "split") == {
        f"data-0000{i}-of-00002.safetensors" for i in (1, 2)
    }
    assert saved.new_nbytes < saved.shared_nbytes
    check(tmp_path / "2", two)


def reseal(path: Path, document: dict[str, object]) -> None:
    """Write a manifest of these contents with its own checksum."""
    document = {key: value for key, value in document.items() if key != "self"}
    raw = json.dumps(document, separators=(",", ":"), ensure_ascii=False).encode()
    (path / MANIFEST).unlink()
    (path / MANIFEST).write_bytes(seal(raw, len(raw)))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("hash", "0" * 31),
        ("hash", "G" * 32),
        ("hash", "a" * 200),
        ("head", "123"),
        ("head", "0000000G"),
    ],
)
def test_a_hash_that_is_none_is_refused_at_its_place(tmp_path: Path, field: str, value: str):
    first(tmp_path / "1", {"w": np.zeros(100_000)})
    document = manifest(tmp_path / "1")
    document["tensors"]["w"]["chunks"][0][field] = value
    reseal(tmp_path / "1", document)
    with pytest.raises(HeaderError, match=rf"chunks\[0\]\.{field}"):
        holdfast.open(tmp_path / "1")


def test_every_recorded_hash_is_that_of_the_elements(tmp_path: Path):
    random = np.random.default_rng(0)
    state = {
        f"w{n}": random.integers(0, 9, n, np.uint8)
        for n in (0, 1, 65536, 65537, 300_000, (1 << 20) + 1, 5_000_001)
    }
    state["odd"] = random.integers(0, 9, (1000, 3333), np.uint8)
    state["turned"] = state["odd"].T
    first(tmp_path / "1", state, threads=3)
    found = manifest(tmp_path / "1")
    assert (found["version"], found["hash"]) == (4, HASH)
    for name, tensor in found["tensors"].items():
        (chunk,) = tensor["chunks"]
        true = hash_bytes(np.ascontiguousarray(state[name]).tobytes())
        assert chunk["hash"] == f"{true.hash:032x}"
        assert chunk.get("head") == (None if true.head is None else f"{true.head:08x}")


def test_lazy_tensors_of_another_file_are_compared_too(tmp_path: Path):
    one = arrays() | {"big": np.arange(1_000_000, dtype=np.int32).reshape(1000, 1000)}
    holdfast.save(one, tmp_path / "m.pt", durable=False)
    with holdfast.open(tmp_path / "m.pt") as lazy:
        first(tmp_path / "1", lazy)
        saved = after(tmp_path / "1", tmp_path / "2", dict(lazy.items()), max_memory="100MB")
        assert saved.new_nbytes < 10_000
        turned = {"big": lazy["big"][::-1]}
        assert after(tmp_path / "2", tmp_path / "3", turned).shared_nbytes == 0


# A base that cannot be used.


def without_hashes(path: Path) -> None:
    holdfast.save(arrays(), path, durable=False)


def torn(path: Path) -> None:
    first(path, arrays())
    file = path / "data-00001-of-00001.safetensors"
    os.truncate(file, file.stat().st_size - 1)


def damaged(path: Path) -> None:
    first(path, arrays())
    text = (path / MANIFEST).read_bytes()
    (path / MANIFEST).write_bytes(text.replace(b"float32", b"float16"))


def newer(path: Path) -> None:
    first(path, arrays())
    reseal(path, manifest(path) | {"version": 9})


def other_hash(path: Path) -> None:
    first(path, arrays())
    reseal(path, manifest(path) | {"hash": "blake4"})


def incomplete(path: Path) -> None:
    first(path, arrays())
    (path / MANIFEST).unlink()


def safetensors(path: Path) -> None:
    holdfast.save(arrays(), path, format="safetensors", max_shard_size="20KB", durable=False)


def empty(path: Path) -> None:
    path.mkdir()


def a_file(path: Path) -> None:
    holdfast.save(arrays(), path, format="torch", durable=False)


USELESS = [without_hashes, torn, damaged, newer, other_hash, incomplete, safetensors, empty, a_file]


@pytest.mark.parametrize("make", USELESS)
def test_a_base_that_cannot_be_used_is_a_note(tmp_path: Path, make: Callable[[Path], None]):
    make(tmp_path / "1")
    saved = after(tmp_path / "1", tmp_path / "2", arrays())
    assert saved.shared_nbytes == 0
    assert any("everything is written" in note for note in saved.notes), saved.notes
    check(tmp_path / "2", arrays())
    # It has hashes of its own, and is the base of the next.
    assert after(tmp_path / "2", tmp_path / "3", arrays()).shared_nbytes > 0


def test_a_base_that_is_not_there_is_refused(tmp_path: Path):
    with pytest.raises(BadArgument, match="nothing at"):
        after(tmp_path / "1", tmp_path / "2", arrays())
    assert not (tmp_path / "2").exists()


@pytest.mark.parametrize("base", [3, object(), b"x", ["a"]])
def test_a_base_that_is_no_path_is_refused(tmp_path: Path, base: object):
    with pytest.raises(NotAPath):
        holdfast.save(arrays(), tmp_path / "2", base=base)


@pytest.mark.parametrize("name", ["x.pt", "x.safetensors"])
@pytest.mark.parametrize("option", ["base", "hashes"])
def test_other_formats_share_nothing(tmp_path: Path, name: str, option: str):
    first(tmp_path / "1", arrays())
    with pytest.raises(Unsupported, match=option):
        holdfast.save(
            arrays(), tmp_path / name, **{option: tmp_path / "1" if option == "base" else True}
        )
    with (tmp_path / name).open("wb") as file, pytest.raises(Unsupported, match=option):
        holdfast.save(arrays(), file, **{option: tmp_path / "1" if option == "base" else True})


def test_another_file_system_is_a_note(tmp_path: Path):
    other = Path("/dev/shm")
    if not other.is_dir() or other.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("there is one file system here")
    place = other / f"holdfast-{os.getpid()}"
    try:
        first(place, arrays())
        saved = after(place, tmp_path / "2", arrays())
        assert "another file system" in saved.notes[0]
        check(tmp_path / "2", arrays())
    finally:
        shutil.rmtree(place)


def act_at_links(
    monkeypatch: pytest.MonkeyPatch,
    *,
    before: Callable[[str], object] = lambda name: None,
    behind: Callable[[str], object] = lambda name: None,
) -> None:
    """Call functions with the name of a file right before and right behind each hard link to it."""
    real = Files.link

    def link(
        self: Files, source: str, target: str, *, dir_fd: int, source_dir_fd: int | None = None
    ) -> None:
        before(source)
        real(self, source, target, dir_fd=dir_fd, source_dir_fd=source_dir_fd)
        behind(source)

    monkeypatch.setattr(Files, "link", link)


def refuse_links(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    """Let the file system make no hard link, for this reason."""

    def refuse(source: str) -> None:
        raise OSError(code, os.strerror(code))

    act_at_links(monkeypatch, before=refuse)


@pytest.mark.parametrize("code", [errno.EXDEV, errno.EMLINK, errno.EPERM, errno.EOPNOTSUPP])
def test_where_no_link_can_be_had_the_file_is_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
):
    one, two = arrays(), changed(arrays(), "w1")
    first(tmp_path / "1", one)
    refuse_links(monkeypatch, code)
    saved = after(tmp_path / "1", tmp_path / "2", two)
    assert saved.shared_nbytes == 0
    assert "copied" in saved.notes[-1]
    assert not linked(tmp_path / "2", tmp_path / "1")
    check(tmp_path / "2", two)


def test_a_link_that_fails_for_another_reason_publishes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    first(tmp_path / "1", arrays())
    refuse_links(monkeypatch, errno.EIO)
    with pytest.raises(NotCommitted) as caught:
        after(tmp_path / "1", tmp_path / "2", arrays())
    assert caught.value.errno == errno.EIO
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1"]


def test_a_data_file_that_is_a_link_elsewhere_is_not_taken_over(tmp_path: Path):
    """A hard link to a symbolic link would lead to what somebody else may move."""
    first(tmp_path / "1", arrays())
    file = tmp_path / "1" / "data-00001-of-00001.safetensors"
    (tmp_path / "1" / "blobs").mkdir()
    file.rename(tmp_path / "1" / "blobs" / "x")
    file.symlink_to("blobs/x")
    saved = after(tmp_path / "1", tmp_path / "2", arrays())
    assert "links to other places" in saved.notes[0]
    check(tmp_path / "2", arrays())


def test_a_base_that_is_replaced_meanwhile_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    first(tmp_path / "1", arrays())

    def replace(source: str) -> None:
        shutil.copy(tmp_path / "1" / source, tmp_path / "copy")
        os.replace(tmp_path / "copy", tmp_path / "1" / source)

    act_at_links(monkeypatch, before=replace)
    saved = after(tmp_path / "1", tmp_path / "2", arrays())
    assert "meanwhile" in saved.notes[-1]
    assert (saved.shared_nbytes, linked(tmp_path / "2", tmp_path / "1")) == (0, set())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "2"]
    check(tmp_path / "2", arrays())


def test_a_base_that_is_removed_meanwhile_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    first(tmp_path / "1", arrays())
    real = Files.stat

    def stat(self: Files, name: str, *, dir_fd: int) -> object:
        if name.startswith("data"):
            shutil.rmtree(tmp_path / "1", ignore_errors=True)
        return real(self, name, dir_fd=dir_fd)

    monkeypatch.setattr(Files, "stat", stat)
    saved = after(tmp_path / "1", tmp_path / "2", arrays())
    assert "meanwhile" in saved.notes[-1]
    monkeypatch.undo()
    check(tmp_path / "2", arrays())


def test_a_base_that_is_written_to_meanwhile_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    first(tmp_path / "1", arrays())
    act_at_links(monkeypatch, behind=lambda source: flip_bit(tmp_path / "1" / source, -1))
    saved = after(tmp_path / "1", tmp_path / "2", arrays())
    assert "meanwhile" in saved.notes[-1]
    check(tmp_path / "2", arrays())


def test_the_base_may_be_the_target(tmp_path: Path):
    one, two = arrays(), changed(arrays(), "w1")
    first(tmp_path / "1", one)
    with pytest.raises(NotCommitted, match="exists"):
        after(tmp_path / "1", tmp_path / "1", two)
    check(tmp_path / "1", one)
    saved = after(tmp_path / "1", tmp_path / "1", two, overwrite=True)
    assert saved.shared_nbytes > 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1"]
    check(tmp_path / "1", two)


def test_permissions_of_the_base_are_left_alone(tmp_path: Path):
    """What is linked is one file: replacing a private directory does not make the base private, nor the other way round."""
    one = arrays()
    first(tmp_path / "1", one)
    first(tmp_path / "2", one)
    file = tmp_path / "1" / "data-00001-of-00001.safetensors"
    file.chmod(0o444)
    for inner in (tmp_path / "2").iterdir():
        inner.chmod(0o600)
    after(tmp_path / "1", tmp_path / "2", changed(one, "w0"), overwrite=True)
    assert file.stat().st_mode & 0o777 == 0o444
    new = tmp_path / "2" / "data-00002-of-00002.safetensors"
    assert new.stat().st_mode & 0o777 == 0o600
    check(tmp_path / "2", changed(one, "w0"))


def test_no_verb_of_ours_writes_into_a_linked_file(tmp_path: Path):
    one = arrays()
    first(tmp_path / "1", one)
    for verb in (
        lambda path: holdfast.edit(path, in_place=True, drop=["w0"]),
        lambda path: holdfast.compact(path, in_place=True),
        lambda path: holdfast.tie(path, in_place=True),
        lambda path: holdfast.convert(path, path, format="native", overwrite=True, dtype="bf16"),
        lambda path: holdfast.save({"x": np.zeros(3)}, path, overwrite=True),
        lambda path: after(tmp_path / "1", path, {"x": np.zeros(3)}, overwrite=True),
    ):
        after(tmp_path / "1", tmp_path / "2", one)
        verb(tmp_path / "2")
        check(tmp_path / "1", one)
        shutil.rmtree(tmp_path / "2")


STEPS = st.lists(
    st.tuples(
        st.sets(st.integers(0, 9), max_size=10),  # what changes
        st.sets(st.integers(0, 9), max_size=2),  # what is not there
        st.integers(1, 3),  # which step before is the base
        st.sampled_from([None, 300, 2000]),  # how large files are
    ),
    min_size=2,
    max_size=7,
)


@settings(max_examples=examples(40), deadline=None)
@given(steps=STEPS, gone=st.sets(st.integers(0, 7)), data=st.data())
def test_every_step_is_whole_whichever_others_are_deleted(
    tmp_path_factory: pytest.TempPathFactory,
    steps: list[tuple],
    gone: set[int],
    data: st.DataObject,
):
    place = tmp_path_factory.mktemp("run")
    try:
        numbers = [0] * 10
        states: list[Arrays] = []
        for step, (changes, missing, back, most) in enumerate(steps):
            for i in changes:
                numbers[i] += 1
            state = {
                f"w{i}": np.full(i * 40, 100 * i + numbers[i], np.int32)
                for i in range(10)
                if i not in missing
            }
            options = {"max_shard_size": most} if most else {}
            if step:
                after(place / f"{max(step - back, 0)}", place / f"{step}", state, **options)
            else:
                first(place / "0", state, **options)
            states.append(state)
        for step in gone:
            if step < len(steps):
                shutil.rmtree(place / f"{step}")
        for step, state in enumerate(states):
            if step not in gone:
                check(place / f"{step}", state)
                for file in manifest(place / f"{step}")["files"]:
                    living(place / f"{step}", file["name"])
    finally:
        shutil.rmtree(place)


def living(path: Path, file: str) -> None:
    """At least half of a file that several steps have is alive in each of them."""
    document = manifest(path)
    if (path / file).stat().st_nlink < 2:
        return
    number = [one["name"] for one in document["files"]].index(file)
    chunks = [
        chunk
        for tensor in document["tensors"].values()
        for chunk in tensor["chunks"]
        if chunk["file"] == number
    ]
    alive = sum(chunk["bytes"][1] - chunk["bytes"][0] for chunk in chunks)
    header = 8 + int.from_bytes((path / file).read_bytes()[:8], "little")
    assert 2 * alive >= (path / file).stat().st_size - header
