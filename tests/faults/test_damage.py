"""Damage to a small checkpoint of each of our formats: refused, or reported by `verify`, or nothing is changed by it.

Every bit flipped, every length cut off, every block of zeros; a default run asks for a sample that goes through all of a file.
"""

from __future__ import annotations

import functools
import json
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import safetensors
import safetensors.numpy

import holdfast
from holdfast.cli.main import main
from holdfast.core.tensor import Composite, LazyTensor
from holdfast.errors import Corrupted, HeaderError, HoldfastError
from holdfast.verbs.reshard import reshard
from tests.golden import earlier
from tests.sampling import every_nth

SAMPLE = 200
"""Flips of one checkpoint in a default run."""

W = np.arange(12, dtype=np.float32).reshape(3, 4)
ABOUT = {"author": "me"}


def state() -> dict[str, object]:
    return {
        "model": {"w": W, "head": W, "b": np.arange(3, dtype=np.int16)},
        "step": 1000,
        "betas": (0.9, "x"),
    }


def _native(path: Path) -> None:
    holdfast.save(state(), path, metadata=ABOUT)


def _several(path: Path) -> None:
    holdfast.save(state(), path, metadata=ABOUT, max_shard_size=50)


def _cut(path: Path) -> None:
    holdfast.save(state(), path.with_name("whole"), metadata=ABOUT)
    reshard(path.with_name("whole"), path, mesh={"tp": 2}, rules=["model.w: tp=0"])


def _safetensors(path: Path) -> None:
    holdfast.save(state(), path, format="safetensors", metadata=ABOUT, keep_tree=True)


def _split(path: Path) -> None:
    holdfast.save(
        state(), path, format="safetensors", metadata=ABOUT, keep_tree=True, max_shard_size=50
    )


def _torch(path: Path) -> None:
    holdfast.save(state(), path, format="torch")


def _package(path: Path) -> None:
    holdfast.package({"one": {"w": W, "b": W[0]}, "two": {"w": W}}, path)


def _sharded(path: Path, format: str) -> None:
    import torch

    from holdfast.torch import save_sharded

    weight = torch.arange(12.0).reshape(3, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        values = {} if format == "safetensors" else {"step": 1000}
        save_sharded(
            path, {"model": {"w": weight, "b": weight[0].clone()}, **values}, format=format
        )


FORMATS: dict[str, Callable[[Path], None]] = {
    "native": _native,
    "several": _several,
    "cut": _cut,
    "one.safetensors": _safetensors,
    "split": _split,
    "one.pt": _torch,
    "two.pt2": _package,
    "ranks-native": functools.partial(_sharded, format="native"),
    "ranks-safetensors": functools.partial(_sharded, format="safetensors"),
    "ranks-dcp": functools.partial(_sharded, format="dcp"),
}


def plain(value: object) -> object:
    """A value that can be compared, with its types and its tensors' content."""
    match value:
        case LazyTensor():
            traits = value.traits
            return (
                value.name,
                value.dtype.name,
                value.shape,
                value.numpy().tobytes(),
                traits.requires_grad,
                traits.parameter,
            )
        case Composite():
            return value.kind, value.shape, plain(dict(value.parts)), plain(dict(value.attributes))
        case dict():
            return type(value).__name__, [
                (plain(key), plain(inside)) for key, inside in value.items()
            ]
        case list() | tuple():
            return type(value).__name__, [plain(inside) for inside in value]
        case _:
            return type(value).__name__, repr(value)


def content(path: Path) -> object:
    """Everything that opening a checkpoint gives."""
    with holdfast.open(path) as ckpt:
        storages: dict[object, list[str]] = {}
        for name, tensor in ckpt.items():
            for storage in tensor.storages:
                storages.setdefault((storage.key, storage.start), []).append(name)
        tensors = [(name, plain(tensor)) for name, tensor in ckpt.items()]
        return (
            ckpt.format,
            tensors,
            sorted(storages.values()),
            plain(ckpt.tree),
            dict(ckpt.metadata),
        )


def outcome(path: Path, wanted: object) -> str:
    """What became of a damaged checkpoint; `lost` for content that changed under an "ok"."""
    try:
        if content(path) == wanted:
            return "unchanged"
    except HoldfastError:
        return "refused"
    return "lost" if holdfast.verify(path).ok else "reported"


def files_of(path: Path) -> list[Path]:
    return sorted(file for file in path.iterdir()) if path.is_dir() else [path]


@pytest.fixture(params=FORMATS)
def checkpoint(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    path = tmp_path / request.param
    FORMATS[request.param](path)
    return path


def places_in(file: Path, count: int, wanted: int) -> range:
    """Return all of so many places in a file, or a sample from end to end.

    The step is odd, so that all bits of a byte have their turn.
    """
    return every_nth(
        f"damage to {file.parent.name}/{file.name}", count, max(count // wanted, 1) | 1
    )


def damaged(file: Path, changes: Iterator[bytes]) -> Iterator[None]:
    """A file with one change after the other, and as it was in the end."""
    before = file.read_bytes()
    try:
        for changed in changes:
            file.write_bytes(changed)
            yield
    finally:
        file.write_bytes(before)


def flip(raw: bytes, bit: int) -> bytes:
    at = bit // 8
    return raw[:at] + bytes([raw[at] ^ 1 << bit % 8]) + raw[at + 1 :]


@pytest.mark.timeout(3600)
def test_no_flipped_bit_changes_content_unnoticed(checkpoint):
    wanted = content(checkpoint)
    assert holdfast.verify(checkpoint).ok
    files = files_of(checkpoint)
    total = sum(file.stat().st_size for file in files)
    lost = []
    for file in files:
        raw = file.read_bytes()
        bits = places_in(file, len(raw) * 8, SAMPLE * len(raw) // total + 1)
        for bit, _ in zip(bits, damaged(file, (flip(raw, bit) for bit in bits)), strict=True):
            if outcome(checkpoint, wanted) == "lost":
                lost.append((file.name, bit, raw[max(bit // 8 - 20, 0) : bit // 8 + 20]))
    assert lost == []
    assert content(checkpoint) == wanted


@pytest.mark.timeout(3600)
def test_no_file_cut_short_or_blanked_changes_content_unnoticed(checkpoint):
    """Every length that a write cut off may leave, and blocks of zeros, as file systems leave them after a power cut."""
    wanted = content(checkpoint)
    lost = []
    for file in files_of(checkpoint):
        raw = file.read_bytes()
        places = places_in(file, len(raw), 8)
        changes = [(f"cut at {n}", raw[:n]) for n in places]
        for size in (1, 64):
            changes += [
                (f"{size} zeros at {n}", raw[:n] + bytes(len(raw[n : n + size])) + raw[n + size :])
                for n in places
            ]
        for (what, _), _ in zip(
            changes, damaged(file, (changed for _, changed in changes)), strict=True
        ):
            found = outcome(checkpoint, wanted)
            if found == "lost" or (found == "refused" and holdfast.verify(checkpoint).ok):
                lost.append((file.name, what, found))
    assert lost == []


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    holdfast.save(state(), tmp_path / "step", metadata=ABOUT, max_shard_size=50)
    return tmp_path / "step"


MANIFESTS = {
    "another step": lambda raw: raw.replace(b'"step":1000', b'"step":9000'),
    "another format": lambda raw: raw.replace(b'"holdfast"', b'"holdfasu"'),
    "an older version": lambda raw: raw.replace(b'"version":3', b'"version":1'),
    "a later version": lambda raw: raw.replace(b'"version":3', b'"version":7'),
    "no checksum": lambda raw: raw.replace(b',"self":"', b',"relf":"'),
    "another checksum": lambda raw: raw[:-3] + (b"0" if raw[-3:-2] != b"0" else b"1") + raw[-2:],
    "its padding": lambda raw: raw + b" ",
    "cut off": lambda raw: raw[:-1],
    "empty": lambda raw: b"",
    "zeros": lambda raw: bytes(len(raw)),
}


@pytest.mark.parametrize("case", MANIFESTS)
def test_a_damaged_manifest_is_damage_whatever_is_left_of_it(folder, case, capsys):
    raw = (folder / "holdfast.json").read_bytes()
    (folder / "holdfast.json").write_bytes(MANIFESTS[case](raw))
    with pytest.raises((Corrupted, HeaderError)) as caught:
        holdfast.open(folder)
    assert caught.value.file == "holdfast.json"
    report = holdfast.verify(folder)
    assert not report.ok
    assert {Path(d.file).name for d in (*report.damaged, *report.problems)} == {"holdfast.json"}
    assert main(["verify", str(folder)]) == 1
    assert "damaged" in capsys.readouterr().out.splitlines()[0]


def test_the_checksum_that_was_expected_is_named(folder):
    path = folder / "holdfast.json"
    path.write_bytes(path.read_bytes().replace(b'"step":1000', b'"step":9000'))
    with pytest.raises(
        Corrupted, match=r"has the checksum .* and records .*download or copy it again"
    ) as caught:
        holdfast.open(folder)
    assert f"{caught.value.expected:08x}" == json.loads(path.read_text())["self"]
    assert f"{caught.value.found:08x}" in str(caught.value)
    (damage,) = holdfast.verify(folder).damaged
    assert (damage.expected, damage.found) == (caught.value.expected, caught.value.found)


def test_a_damaged_record_is_placed(tmp_path):
    path = tmp_path / "model.safetensors"
    holdfast.save({"w": np.arange(4, dtype=np.float32)}, path)
    raw = path.read_bytes()
    at = raw.index(b"crc32")
    path.write_bytes(raw[:at] + b"crc33" + raw[at + 5 :])
    with pytest.raises(Corrupted, match="in __metadata__") as caught:
        holdfast.open(path)
    assert (caught.value.file, caught.value.offset) == (path.name, 8)


def test_files_that_no_tensor_depends_on_are_verified(folder):
    index = folder / "model.safetensors.index.json"
    raw = index.read_bytes()
    index.write_bytes(raw.replace(b"model.b", b"model.c"))
    (damage,) = holdfast.verify(folder).damaged
    assert damage.file == str(index)
    index.unlink()
    (problem,) = holdfast.verify(folder).problems
    assert (problem.file, problem.damaged) == (str(index), True)
    assert content(folder)[0] == "native"


HEADERS = [
    (b'"model.w":{', b'"model.v":{'),
    (b'"format":"pt"', b'"format":"qt"'),
    (b'"holdfast":', b'"holdfasu":'),
]


@pytest.mark.parametrize("change", HEADERS, ids=["name", "text", "record"])
def test_headers_of_data_files_are_verified(folder, change):
    file = folder / "data-00001-of-00002.safetensors"
    file.write_bytes(file.read_bytes().replace(*change))
    report = holdfast.verify(folder)
    assert not report.ok
    assert {d.file for d in (*report.damaged, *report.problems)} == {str(file)}
    assert main(["verify", str(folder)]) == 1


@pytest.fixture
def single(tmp_path: Path) -> Path:
    holdfast.save(state(), tmp_path / "a.safetensors", metadata=ABOUT, keep_tree=True)
    return tmp_path / "a.safetensors"


def rewritten(path: Path, change: Callable[[dict[str, np.ndarray], dict[str, str]], None]) -> None:
    """The file as another program writes it that knows nothing of records, and copies what it does not know."""
    with safetensors.safe_open(path, "numpy") as opened:
        texts = dict(opened.metadata())
    tensors = safetensors.numpy.load_file(path)
    change(tensors, texts)
    safetensors.numpy.save_file(tensors, path, texts)


def test_a_file_written_again_with_the_same_content_is_sound(single):
    wanted, raw = content(single), single.read_bytes()
    rewritten(single, lambda tensors, texts: None)
    assert content(single) == wanted
    assert holdfast.verify(single).ok
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    header["__metadata__"] = dict(reversed(header["__metadata__"].items()))
    spaced = json.dumps(header, indent=1).encode()
    single.write_bytes(len(spaced).to_bytes(8, "little") + spaced + raw[8 + length :])
    assert dict(content(single)[-1]) == dict(wanted[-1])
    assert content(single)[:-1] == wanted[:-1]
    assert holdfast.verify(single).ok


def test_another_programs_edit_is_opened_and_reported(single, capsys):
    """Nobody can tell it from damage, so it opens with a note, and `verify` says what to do if it was meant."""
    rewritten(single, lambda tensors, texts: texts.update(author="you"))
    with holdfast.open(single) as ckpt:
        assert ckpt.tree["step"] == 1000
        assert ckpt.metadata["author"] == "you"
        assert any("another program changed them" in note for note in ckpt.notes)
    (damage,) = holdfast.verify(single).damaged
    assert "holdfast convert" in damage.message
    assert main(["verify", str(single)]) == 1
    assert "holdfast convert" in " ".join(capsys.readouterr().out.split())
    rewritten(single, lambda tensors, texts: tensors.pop("model.b"))
    with holdfast.open(single) as ckpt:
        assert list(ckpt) == ["model.w"]
        assert any("is not used" in note for note in ckpt.notes)
    assert not holdfast.verify(single).ok
    rewritten(single, lambda tensors, texts: texts.pop("holdfast"))
    assert holdfast.verify(single).ok


def test_an_index_that_was_lost_is_reported(tmp_path):
    path = tmp_path / "split"
    holdfast.save(state(), path, format="safetensors", keep_tree=True, max_shard_size=50)
    index = path / "model.safetensors.index.json"
    raw = index.read_bytes()
    index.write_bytes(raw.replace(b'"metadata"', b'"netadata"'))
    with holdfast.open(path) as ckpt:
        assert any("has lost the record" in note for note in ckpt.notes)
    (problem,) = holdfast.verify(path).problems
    assert (problem.file, problem.damaged) == (str(index), True)
    index.unlink()
    assert not holdfast.verify(path).ok
    with holdfast.open(path / "model-00001-of-00002.safetensors") as one:
        assert one.notes == ()


def test_numbers_in_an_index_that_no_writer_of_ours_has(tmp_path):
    path = tmp_path / "split"
    holdfast.save({"w": W, "v": W + 1}, path, format="safetensors", max_shard_size=50)
    index = path / "model.safetensors.index.json"
    index.write_bytes(
        index.read_bytes().replace(b'"total_size": 96', b'"total_size": 99999999999999999999')
    )
    with holdfast.open(path) as ckpt:
        assert ckpt["w"].numpy().tobytes() == W.tobytes()
    (damage,) = holdfast.verify(path).damaged
    assert damage.file == str(index)


def test_another_save_into_a_distributed_checkpoint_is_reported_and_opened(tmp_path):
    _sharded(tmp_path / "dcp", "dcp")
    index = tmp_path / "dcp" / ".metadata"
    index.write_bytes(index.read_bytes().replace(b"model.w", b"model.v"))
    with pytest.raises(Corrupted, match="checksum"):
        holdfast.open(tmp_path / "dcp")
    _other = tmp_path / "other"
    _sharded(_other, "dcp")
    import torch
    import torch.distributed.checkpoint as dcp

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"w": torch.ones(3)}, checkpoint_id=_other)
    with holdfast.open(_other) as ckpt:
        assert list(ckpt) == ["w"]
        assert any("another program saved into this folder" in note for note in ckpt.notes)
    (problem,) = holdfast.verify(_other).problems
    assert problem.damaged
    (_other / ".holdfast.json").unlink()
    assert holdfast.verify(_other).ok


@pytest.mark.parametrize("name", ["native", "cut", "one.safetensors", "split"])
def test_checkpoints_of_the_first_versions_open_as_they_did(golden_dir, name):
    path = golden_dir / "earlier" / name
    wanted = earlier.state()
    with holdfast.open(path) as ckpt:
        assert ckpt.notes == ()
        assert ckpt.metadata["author"] == "me"
        assert (ckpt.tree["step"], ckpt.tree["betas"]) == (wanted["step"], wanted["betas"])
        for key, array in wanted["model"].items():
            assert ckpt.tree["model"][key].numpy().tobytes() == array.tobytes()
        assert ckpt["model.w"].storages == ckpt["model.head"].storages
    report = holdfast.verify(path)
    assert report.ok
    assert report.unchecked == ()
