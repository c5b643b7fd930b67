"""Checks for a format that is not part of Holdfast.

    from holdfast.testing import check_format

    def test_my_format():
        check_format(MY_FORMAT)

`check_format` holds a format to the standard of the built-in ones, whose tests call it as well.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from holdfast.core.checkpoint import Checkpoint
from holdfast.core.chunk import Chunk, Storage
from holdfast.core.protocols import ReadProfile
from holdfast.engine.source import HEAD_NBYTES, OpenSource
from holdfast.errors import CannotHold, HoldfastError
from holdfast.formats import FORMATS, PLUGINS, Format, load_function, load_plugins
from holdfast.formats.detect import detect
from holdfast.stores.memory import MemoryStore
from holdfast.verbs.convert import convert
from holdfast.verbs.open import open as open_checkpoint
from holdfast.verbs.save import save
from holdfast.verbs.verify import verify

__all__ = ["check_format"]

Files = Mapping[str, bytes]
"""The files of an example by their names. A checkpoint of one file has the name "file"."""

CUTS_PER_FILE = 200
"""The places at which a file is cut off, and those at which a byte is changed."""

KEEPS = ("state", "items", "tensors")

DTYPES = ("bool", "uint8", "int32", "int64", "float16", "float32", "float64")


def check_format(entry: Format, example: str | os.PathLike[str] | None = None) -> None:
    """Check a format as Holdfast checks its own.

    Detection goes by content alone. Opening reads no tensor data. A file that is cut off or damaged
    causes Holdfast errors and no others. `verify` notices each changed byte that a checksum covers.
    What is written is read back bit for bit, and converted to safetensors and back.

    Args:
        entry: The entry of the format. It need not be registered.
        example: The path of a file or folder of this format. A format that is only read needs one;
            for a format that is written, the checks make examples themselves.

    Raises:
        AssertionError: A check failed. The message says which one.
        CannotHold: The format is written, and cannot store the examples: float32 and int64.
        HoldfastError: Writing or opening an example failed, with an error of the format or of
            Holdfast.
    """
    _check_entry(entry)
    with _registered(entry), tempfile.TemporaryDirectory() as directory:
        if entry.written_by:
            check_round_trip(entry, Path(directory))
        if example is None:
            assert entry.written_by, f"the format {entry.name} is only read: pass an example"
            example = Path(directory, "example" + (entry.suffixes[0] if entry.suffixes else ""))
            save(_make_example_state(), example, format=entry.name)
        files = _read_files(Path(example))
        check_detection(entry, files)
        check_description_reads_headers_only(entry, files)
        check_damage_is_refused(entry, files)
        check_verify_notices_changes(files, Path(example), Path(directory, "changed"))


def _check_entry(entry: Format) -> None:
    """Check that the entry names functions that exist, and nothing that another format has."""
    others = [other for other in FORMATS if other is not entry]
    taken_names = {name for other in others for name in (other.name, *other.choices)}
    assert entry in FORMATS or not taken_names.intersection((entry.name, *entry.choices)), (
        f"a name or choice of the format {entry.name} belongs to a built-in format"
    )
    assert entry.keeps in KEEPS, f"`keeps` must be one of {KEEPS}, got {entry.keeps!r}"
    has_index = entry.folder and entry.index
    assert entry.begins or entry.known_by or has_index, (
        "an entry needs `begins`, `known_by` or the `index` of a folder to be detected"
    )
    for where in (entry.read_by, entry.known_by, entry.written_by, entry.weights_by):
        assert not where or callable(load_function(where)), f"{where} is not a function"
    for suffix in entry.suffixes:
        owners = [other.name for other in others if suffix in other.suffixes]
        assert not owners, f"the suffix {suffix} belongs to {owners[0]}"


@contextmanager
def _registered(entry: Format) -> Iterator[None]:
    """Register a format for a block, in the place of an installed plugin of the same name."""
    if entry in FORMATS:
        yield
        return
    load_plugins()
    installed = list(PLUGINS)
    PLUGINS[:] = [plugin for plugin in installed if plugin.name != entry.name] + [entry]
    try:
        yield
    finally:
        PLUGINS[:] = installed


def _make_example_state() -> dict[str, np.ndarray]:
    """Return two tensors that are much longer than any header."""
    generator = np.random.default_rng(7)
    return {
        "layers.0.weight": generator.standard_normal((64, 128)).astype(np.float32),
        "layers.0.bias": np.arange(3000, dtype=np.int64),
    }


def _read_files(path: Path) -> Files:
    if path.is_file():
        return {"file": path.read_bytes()}
    files = sorted(file for file in path.rglob("*") if file.is_file())
    return {file.relative_to(path).as_posix(): file.read_bytes() for file in files}


class _RecordingStore(MemoryStore):
    """Files in memory that are read like files on a disk, and the ranges that were read."""

    # Exact, so that no more is read than the format asks for.
    read_profile = ReadProfile(is_exact=True)

    def __init__(self, files: Files, *, is_folder: bool) -> None:
        super().__init__(files, name="example")
        self._is_folder = is_folder
        self.ranges: list[tuple[str, int, int]] = []

    @property
    def is_folder(self) -> bool:
        return self._is_folder

    def read(self, key: str, start: int, out: memoryview) -> None:
        super().read(key, start, out)
        self.ranges.append((key, start, start + out.nbytes))

    def map(self, key: str) -> memoryview | None:
        return None


def _open_files(entry: Format, store: _RecordingStore) -> Checkpoint:
    """Detect and describe files in memory."""
    source = OpenSource(store, threads=1)
    detected = detect(source)
    assert detected.name in entry.opened_as, f"it was taken for the format {detected.name}"
    return Checkpoint(source, detected.describe(source))


def _read_arrays(checkpoint: Checkpoint) -> dict[str, bytes]:
    """Read every tensor that has elements."""
    tensors = {name: tensor for name, tensor in checkpoint.items() if not tensor.traits.meta}
    return {name: tensor.numpy().tobytes() for name, tensor in tensors.items()}


def check_detection(entry: Format, files: Files) -> None:
    """Check that the content tells the format, whatever the file is called."""
    checkpoint = _open_files(entry, _RecordingStore(files, is_folder=entry.folder))
    assert checkpoint.format in entry.opened_as, (
        f"the reader calls its format {checkpoint.format!r}, the entry {entry.name!r}"
    )


def check_description_reads_headers_only(entry: Format, files: Files) -> None:
    """Check that opening reads no elements of tensors, but for some bytes beside the headers."""
    store = _RecordingStore(files, is_folder=entry.folder)
    checkpoint = _open_files(entry, store)
    storages = [place for tensor in checkpoint.values() for place in _ranges_of(tensor.chunks)]
    element_nbytes = 0
    for key, start, stop in store.ranges:
        for storage_key, storage_start, storage_stop in storages:
            if key == storage_key:
                element_nbytes += max(min(stop, storage_stop) - max(start, storage_start), 0)
    # Detection reads the first bytes of a file, and the end of a zip is searched for its directory.
    assert element_nbytes <= 4 * HEAD_NBYTES, (
        f"opening reads {element_nbytes:,} bytes of the elements of tensors; read a header whose "
        f"length is not known in pieces of at most {HEAD_NBYTES:,} bytes"
    )


def _ranges_of(chunks: tuple[Chunk, ...]) -> list[tuple[str, int, int]]:
    """Return the ranges of plain storages. Others know their places only when they are read."""
    storages = [chunk.storage for chunk in chunks if type(chunk) is Chunk]
    return [storage.ranges[0] for storage in storages if type(storage) is Storage]


def check_damage_is_refused(entry: Format, files: Files) -> None:
    """Check that cut and changed files cause Holdfast errors, and that a cut is noticed."""
    store = _RecordingStore(files, is_folder=entry.folder)
    intact = _read_arrays(_open_files(entry, store))
    for name, content in files.items():
        for position in _choose_positions(len(content)):
            cut = {**files, name: content[:position]}
            values = _read_damaged(cut, f"{name} cut off at byte {position}")
            assert values is None or values == intact, (
                f"{name} was cut off at byte {position} and opens with other values"
            )
            changed_byte = bytes([content[position] ^ 0xFF])
            changed = content[:position] + changed_byte + content[position + 1 :]
            _read_damaged({**files, name: changed}, f"{name} changed at byte {position}")


def _choose_positions(nbytes: int) -> list[int]:
    """Return every position of a short file; of a long one the first ones, and some of the rest."""
    first = range(min(nbytes, CUTS_PER_FILE))
    rest = range(len(first), nbytes, max(nbytes // CUTS_PER_FILE, 1))
    return [*first, *rest]


def _read_damaged(files: Files, damage: str) -> dict[str, bytes] | None:
    """Open and read files. Return None if they are refused, and fail if another error comes out."""
    store = MemoryStore(files, name="example")
    try:
        source = OpenSource(store, threads=1)
        return _read_arrays(Checkpoint(source, detect(source).describe(source)))
    except HoldfastError:
        return None
    except Exception as error:
        raise AssertionError(
            f"with {damage}, opening raises {type(error).__name__} instead of an error of "
            f"holdfast.errors: {error}"
        ) from error


def check_round_trip(entry: Format, directory: Path) -> None:
    """Check that what is written is read back, and survives a conversion to safetensors and back."""
    suffix = entry.suffixes[0] if entry.suffixes else ""
    states = [_make_example_state(), {"scalar": np.array(2.5), "empty": np.zeros((0, 3))}]
    states += [{"w": np.arange(6).reshape(2, 3).astype(dtype)} for dtype in DTYPES]
    for index, state in enumerate(states):
        path = Path(directory, f"round-trip-{index}{suffix}")
        try:
            save(state, path, format=entry.name)
        except CannotHold:
            # A format may hold fewer dtypes and shapes. It must hold plain matrices.
            if index == 0:
                raise
            continue
        check_values(path, state)
    first = Path(directory, f"round-trip-0{suffix}")
    convert(first, Path(directory, "converted.safetensors"))
    back = Path(directory, f"back{suffix}")
    convert(Path(directory, "converted.safetensors"), back, format=entry.name)
    check_values(back, states[0])


def check_values(path: Path, state: Mapping[str, np.ndarray]) -> None:
    """Check that a checkpoint holds these arrays, and that slices of them can be read."""
    with open_checkpoint(path) as checkpoint:
        assert set(checkpoint) == set(state), f"saved {list(state)}, found {list(checkpoint)}"
        for name, array in state.items():
            found = checkpoint[name].numpy()
            assert found.dtype == array.dtype, f"{name}: saved {array.dtype}, found {found.dtype}"
            assert found.shape == array.shape, f"{name}: saved {array.shape}, found {found.shape}"
            assert found.tobytes() == array.tobytes(), f"{name}: other values were read"
            if array.ndim:
                part = checkpoint[name][1:].numpy()
                assert part.tobytes() == array[1:].tobytes(), f"{name}[1:]: other values were read"


def check_verify_notices_changes(files: Files, example: Path, copy: Path) -> None:
    """Check that `verify` finds a changed byte in every file whose elements have checksums."""
    assert verify(example).ok, "verify finds the example damaged"
    with open_checkpoint(example) as checkpoint:
        storages = [storage for tensor in checkpoint.values() for storage in tensor.storages]
        recorded = [storage for storage in storages if storage.crc32 is not None and storage.nbytes]
        places = {key: (start, stop) for one in recorded for key, start, stop in one.ranges}
    for key, (start, stop) in places.items():
        content = bytearray(files[key] if key in files else files["file"])
        content[(start + stop) // 2] ^= 1
        changed = {**files, (key if key in files else "file"): bytes(content)}
        _write_files(changed, copy)
        assert not verify(copy).ok, f"verify does not notice a changed byte of {key}"


def _write_files(files: Files, path: Path) -> None:
    if set(files) == {"file"}:
        path.write_bytes(files["file"])
        return
    for name, content in files.items():
        path.joinpath(name).parent.mkdir(parents=True, exist_ok=True)
        path.joinpath(name).write_bytes(content)
