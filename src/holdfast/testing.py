"""Checks for a format that is not part of Holdfast.

    from holdfast.testing import check_format

    def test_my_format():
        check_format(MY_FORMAT)

The tests of the built-in formats call `check_format` as well.
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
"""The files of an example by their names. The name of a checkpoint in one file is `SINGLE_FILE`."""

SINGLE_FILE = "file"

CUTS_PER_FILE = 200
"""How many cuts are tried in a file, and how many changed bytes. Short files are tried at each."""

KEEPS = ("state", "items", "tensors")
"""The values that `Format.keeps` may have."""

DTYPES = ("bool", "uint8", "int32", "int64", "float16", "float32", "float64")


def check_format(entry: Format, example: str | os.PathLike[str] | None = None) -> None:
    """Check a format as Holdfast checks its own.

    - Detection depends on the content only.
    - Opening reads no tensor data.
    - A file that is cut off or damaged raises Holdfast errors and no others.
    - `verify` finds each changed byte that a checksum covers.
    - What is written is read back bit for bit, and converted to safetensors and back.

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
    with _register(entry), tempfile.TemporaryDirectory() as directory:
        if entry.written_by:
            check_round_trip(entry, Path(directory))
        if example is None:
            assert entry.written_by, f"the format {entry.name} is only read: pass an example"
            example = Path(directory, "example" + _get_suffix(entry))
            save(_make_example_state(), example, format=entry.name)
        files = _read_files(Path(example))
        check_opening(entry, files)
        check_damage_is_refused(entry, files)
        check_verify_finds_changes(files, Path(example), Path(directory, "changed"))


def _check_entry(entry: Format) -> None:
    """Check that the entry names functions that exist, and nothing that another format has."""
    other_formats = [format for format in FORMATS if format is not entry]
    own_names = {entry.name, *entry.choices}
    for format in other_formats:
        shared_names = own_names.intersection((format.name, *format.choices))
        # An entry of the list may share its choice with another one: a file and its folder.
        assert entry in FORMATS or not shared_names, (
            f"a name or choice of the format {entry.name} belongs to a built-in format"
        )
    assert entry.keeps in KEEPS, f"`keeps` must be one of {KEEPS}, got {entry.keeps!r}"
    has_index = entry.folder and entry.index
    assert entry.begins or entry.known_by or has_index, (
        "an entry needs `begins`, `known_by` or the `index` of a folder to be detected"
    )
    for function_name in (entry.read_by, entry.known_by, entry.written_by, entry.weights_by):
        if function_name:
            is_function = callable(load_function(function_name))
            assert is_function, f"{function_name} is not a function"
    for suffix in entry.suffixes:
        owners = [format.name for format in other_formats if suffix in format.suffixes]
        assert not owners, f"the suffix {suffix} belongs to {owners[0]}"


@contextmanager
def _register(entry: Format) -> Iterator[None]:
    """Register a format for a block, in the place of an installed plugin of the same name."""
    if entry in FORMATS:
        yield
        return
    load_plugins()
    installed_plugins = list(PLUGINS)
    PLUGINS[:] = [plugin for plugin in installed_plugins if plugin.name != entry.name]
    PLUGINS.append(entry)
    try:
        yield
    finally:
        PLUGINS[:] = installed_plugins


def _get_suffix(entry: Format) -> str:
    """Return the suffix for new files of a format. Empty if it has none."""
    return entry.suffixes[0] if entry.suffixes else ""


def _make_example_state() -> dict[str, np.ndarray]:
    """Return two tensors that are much longer than any header."""
    generator = np.random.default_rng(7)
    return {
        "layers.0.weight": generator.standard_normal((64, 128)).astype(np.float32),
        "layers.0.bias": np.arange(3000, dtype=np.int64),
    }


def _read_files(path: Path) -> Files:
    """Read a file, or all files of a folder."""
    if path.is_file():
        return {SINGLE_FILE: path.read_bytes()}
    files = sorted(file for file in path.rglob("*") if file.is_file())
    return {file.relative_to(path).as_posix(): file.read_bytes() for file in files}


class _RecordingStore(MemoryStore):
    """Files in memory that are read like files on a disk. It records the ranges of all reads."""

    # A read returns exactly what the format asks for, and the engine joins no reads.
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
    """Detect the format of files in memory, and open them."""
    source = OpenSource(store, threads=1)
    detected = detect(source)
    assert detected.name in entry.opened_as, f"it was taken for the format {detected.name}"
    return Checkpoint(source, detected.describe(source))


def _read_arrays(checkpoint: Checkpoint) -> dict[str, bytes]:
    """Read the elements of all tensors, except those on the meta device."""
    tensors = {name: tensor for name, tensor in checkpoint.items() if not tensor.traits.meta}
    return {name: tensor.numpy().tobytes() for name, tensor in tensors.items()}


def check_opening(entry: Format, files: Files) -> None:
    """Check that content alone decides the format, and that opening reads no tensor data."""
    store = _RecordingStore(files, is_folder=entry.folder)
    checkpoint = _open_files(entry, store)
    assert checkpoint.format in entry.opened_as, (
        f"the reader calls its format {checkpoint.format!r}, the entry {entry.name!r}"
    )

    element_nbytes = 0
    for tensor in checkpoint.values():
        for storage_key, storage_start, storage_stop in _list_storage_ranges(tensor.chunks):
            for key, start, stop in store.ranges:
                if key == storage_key:
                    overlap_nbytes = min(stop, storage_stop) - max(start, storage_start)
                    element_nbytes += max(overlap_nbytes, 0)
    # Detection reads the first bytes of a file, and the end of a zip is searched for its directory.
    assert element_nbytes <= 4 * HEAD_NBYTES, (
        f"opening reads {element_nbytes:,} bytes of the elements of tensors; read a header whose "
        f"length is not known in pieces of at most {HEAD_NBYTES:,} bytes"
    )


def _list_storage_ranges(chunks: tuple[Chunk, ...]) -> list[tuple[str, int, int]]:
    """Return the ranges of plain storages. Others know their ranges only when they are read."""
    storages = [chunk.storage for chunk in chunks if type(chunk) is Chunk]
    return [storage.ranges[0] for storage in storages if type(storage) is Storage]


def check_damage_is_refused(entry: Format, files: Files) -> None:
    """Check that cut and changed files raise Holdfast errors only, and that a cut is noticed."""
    store = _RecordingStore(files, is_folder=entry.folder)
    intact_arrays = _read_arrays(_open_files(entry, store))
    for name, content in files.items():
        for offset in _choose_offsets(len(content)):
            cut_files = {**files, name: content[:offset]}
            arrays = _read_damaged(cut_files, f"{name} cut off at byte {offset}")
            assert arrays is None or arrays == intact_arrays, (
                f"{name} was cut off at byte {offset} and opens with other values"
            )

            changed_byte = bytes([content[offset] ^ 0xFF])
            changed_content = content[:offset] + changed_byte + content[offset + 1 :]
            _read_damaged({**files, name: changed_content}, f"{name} changed at byte {offset}")


def _choose_offsets(nbytes: int) -> list[int]:
    """Return every offset of a short file. Of a long one, the first offsets and a sample."""
    first_offsets = range(min(nbytes, CUTS_PER_FILE))
    sample = range(len(first_offsets), nbytes, max(nbytes // CUTS_PER_FILE, 1))
    return [*first_offsets, *sample]


def _read_damaged(files: Files, damage: str) -> dict[str, bytes] | None:
    """Open and read damaged files.

    Returns:
        The elements of all tensors. None if Holdfast refuses the files.

    Raises:
        AssertionError: Another error than one of Holdfast was raised.
    """
    store = MemoryStore(files, name="example")
    try:
        source = OpenSource(store, threads=1)
        description = detect(source).describe(source)
        return _read_arrays(Checkpoint(source, description))
    except HoldfastError:
        return None
    except Exception as error:
        raise AssertionError(
            f"with {damage}, opening raises {type(error).__name__} instead of an error of "
            f"holdfast.errors: {error}"
        ) from error


def check_round_trip(entry: Format, directory: Path) -> None:
    """Check that what is written is read back, and survives a conversion to safetensors and back."""
    suffix = _get_suffix(entry)
    example_path = Path(directory, f"round-trip{suffix}")
    save(_make_example_state(), example_path, format=entry.name)
    check_values(example_path, _make_example_state())

    # A format need not hold these dtypes and shapes. It must hold the plain matrices above.
    states = [{"scalar": np.array(2.5), "empty": np.zeros((0, 3))}]
    states += [{"w": np.arange(6).reshape(2, 3).astype(dtype)} for dtype in DTYPES]
    for index, state in enumerate(states):
        path = Path(directory, f"round-trip-{index}{suffix}")
        try:
            save(state, path, format=entry.name)
        except CannotHold:
            continue
        check_values(path, state)

    converted_path = Path(directory, "converted.safetensors")
    convert(example_path, converted_path)
    restored_path = Path(directory, f"restored{suffix}")
    convert(converted_path, restored_path, format=entry.name)
    check_values(restored_path, _make_example_state())


def check_values(path: Path, state: Mapping[str, np.ndarray]) -> None:
    """Check that a checkpoint holds these arrays, and that slices of them can be read."""
    with open_checkpoint(path) as checkpoint:
        assert set(checkpoint) == set(state), f"saved {list(state)}, found {list(checkpoint)}"
        for name, saved in state.items():
            array = checkpoint[name].numpy()
            assert array.dtype == saved.dtype, f"{name}: saved {saved.dtype}, found {array.dtype}"
            assert array.shape == saved.shape, f"{name}: saved {saved.shape}, found {array.shape}"
            assert array.tobytes() == saved.tobytes(), f"{name}: other values were read"
            if saved.ndim:
                tail = checkpoint[name][1:].numpy()
                assert tail.tobytes() == saved[1:].tobytes(), f"{name}[1:]: other values were read"


def check_verify_finds_changes(files: Files, example: Path, copy_path: Path) -> None:
    """Check that `verify` finds a changed byte in every file whose elements have checksums.

    Args:
        files: The files of the example.
        example: Its path.
        copy_path: Where changed copies of it are written.
    """
    assert verify(example).ok, "verify finds the example damaged"
    # The last range with a checksum in each file.
    ranges_by_key: dict[str, tuple[int, int]] = {}
    with open_checkpoint(example) as checkpoint:
        for tensor in checkpoint.values():
            for storage in tensor.storages:
                if storage.crc32 is not None and storage.nbytes:
                    ranges_by_key |= {key: (start, stop) for key, start, stop in storage.ranges}

    for key, (start, stop) in ranges_by_key.items():
        name = key if key in files else SINGLE_FILE
        content = bytearray(files[name])
        content[(start + stop) // 2] ^= 1
        _write_files({**files, name: bytes(content)}, copy_path)
        assert not verify(copy_path).ok, f"verify does not notice a changed byte of {key}"


def _write_files(files: Files, path: Path) -> None:
    """Write a checkpoint in one file, or in a folder."""
    if set(files) == {SINGLE_FILE}:
        path.write_bytes(files[SINGLE_FILE])
        return
    for name, content in files.items():
        file = path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
