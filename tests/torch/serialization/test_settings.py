"""The switches act on torch's own state, and answer as torch's functions do."""

from __future__ import annotations

import io
import mmap
import os
import threading
import types
import warnings
from pathlib import Path

import pytest
import torch
import torch.serialization as theirs
from torch.utils.serialization import config

import holdfast.torch
from holdfast.errors import HoldfastWarning, Refused
from holdfast.torch.serialization import settings as ours


@pytest.fixture(autouse=True)
def switches():
    """As they are at first, before and after."""
    before = config.load.endianness, config.load.mmap_flags, config.save.compute_crc32
    yield
    config.load.endianness, config.load.mmap_flags, config.save.compute_crc32 = before


def outcome(function, *args, **kwargs):
    """What a call gives, or the kind of its error."""
    try:
        with warnings.catch_warnings(record=True):
            warnings.simplefilter("always")
            return function(*args, **kwargs)
    except Exception as error:
        return next(kind for kind in type(error).__mro__ if kind.__module__ == "builtins")


def test_constants_and_classes_are_torchs():
    for name in ("DEFAULT_PROTOCOL", "MAGIC_NUMBER", "PROTOCOL_VERSION", "STORAGE_KEY_SEPARATOR"):
        assert getattr(ours, name) == getattr(theirs, name)
    for name in ("LoadEndianness", "SourceChangeWarning", "StorageType"):
        assert getattr(holdfast.torch.serialization, name) is getattr(theirs, name)


@pytest.mark.parametrize("value", [*ours.LoadEndianness, None])
def test_endianness_is_one_switch(value):
    ours.set_default_load_endianness(value)
    assert theirs.get_default_load_endianness() is value
    ours.set_default_load_endianness(ours.LoadEndianness.BIG)
    theirs.set_default_load_endianness(value)
    assert ours.get_default_load_endianness() is value


@pytest.mark.parametrize("value", ["little", 1, True])
def test_endianness_checks_its_type(value):
    ours.set_default_load_endianness(ours.LoadEndianness.BIG)
    for setter in (ours.set_default_load_endianness, theirs.set_default_load_endianness):
        with pytest.raises(
            TypeError, match="Invalid argument type in function set_default_load_endianness"
        ):
            setter(value)
    assert ours.get_default_load_endianness() is ours.LoadEndianness.BIG


def test_crc32_is_one_switch():
    assert ours.get_crc32_options() is True
    ours.set_crc32_options(False)
    assert theirs.get_crc32_options() is False
    theirs.set_crc32_options(True)
    assert ours.get_crc32_options() is True


def test_mmap_options_as_a_function():
    ours.set_default_mmap_options(mmap.MAP_SHARED)
    assert theirs.get_default_mmap_options() == ours.get_default_mmap_options() == mmap.MAP_SHARED
    theirs.set_default_mmap_options(mmap.MAP_PRIVATE)
    assert ours.get_default_mmap_options() == mmap.MAP_PRIVATE


def test_mmap_options_as_a_context_manager():
    with ours.set_default_mmap_options(mmap.MAP_SHARED):
        assert theirs.get_default_mmap_options() == mmap.MAP_SHARED
        with ours.set_default_mmap_options(mmap.MAP_PRIVATE):
            assert theirs.get_default_mmap_options() == mmap.MAP_PRIVATE
        assert theirs.get_default_mmap_options() == mmap.MAP_SHARED
        with pytest.raises(KeyError), ours.set_default_mmap_options(mmap.MAP_PRIVATE):
            raise KeyError
        assert theirs.get_default_mmap_options() == mmap.MAP_SHARED
    assert theirs.get_default_mmap_options() == mmap.MAP_PRIVATE


@pytest.mark.parametrize("flags", [0, 3, None, "x"])
def test_mmap_options_refuse_the_rest(flags):
    for setter in (ours.set_default_mmap_options, theirs.set_default_mmap_options):
        with pytest.raises(
            ValueError, match=r"expected mmap.MAP_PRIVATE or mmap.MAP_SHARED, but got"
        ):
            setter(flags)
    assert ours.get_default_mmap_options() == mmap.MAP_PRIVATE


def test_skip_data_is_seen_by_torch():
    value = torch.arange(1.0, 5.0)
    file = io.BytesIO()
    with ours.skip_data():
        torch.save(value, file)
    file.seek(0)
    assert torch.load(file).tolist() == [0.0, 0.0, 0.0, 0.0]
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    assert torch.equal(torch.load(file), value)


def test_skip_data_nests_and_restores():
    local = theirs._serialization_tls

    def state():
        return local.skip_data, local.materialize_fake_tensors

    block = ours.skip_data(materialize_fake_tensors=True)
    with block:
        assert state() == (True, True)
        with ours.skip_data():
            assert state() == (True, False)
            with block:
                assert state() == (True, True)
            assert state() == (True, False)
        with pytest.raises(KeyError), theirs.skip_data():
            raise KeyError
        assert state() == (True, True)
    assert state() == (False, False)


def test_skip_data_holds_in_one_thread():
    seen = []
    with ours.skip_data():
        thread = threading.Thread(target=lambda: seen.append(theirs._serialization_tls.skip_data))
        thread.start()
        thread.join()
    assert seen == [False]


def test_mkdtemp_cleans_up():
    with ours.mkdtemp() as path:
        Path(path, "inside").write_bytes(b"x")
    assert not os.path.exists(path)
    with pytest.raises(KeyError), ours.mkdtemp() as path:
        raise KeyError
    assert not os.path.exists(path)
    with ours.mkdtemp() as path:
        os.rmdir(path)  # torch fails at the end of the block


REQUIRED = [(1, 2, 3), (1, 2), (1, 2, "3"), (2,), (), ("x",)]


@pytest.mark.parametrize(
    "version", ["1.2.3", "2.0", "1.10.0", "1.2.3a", "1.2", "x", "", "1.2.3.post1", None]
)
@pytest.mark.parametrize("strict", [True, False])
def test_versions_compare_as_in_torch(version, strict):
    module = types.ModuleType("some")
    module.__version__ = version
    for required in REQUIRED:
        args = (module, required, strict)
        expected = outcome(theirs.check_module_version_greater_or_equal, *args)
        if version is None and required == ():
            expected = True  # torch calls it malformed, but there is nothing to compare
        assert outcome(ours.check_module_version_greater_or_equal, *args) == expected, required


def test_a_malformed_version_is_an_error_or_a_warning():
    module = types.ModuleType("some")
    module.__version__ = "one.two"
    message = r"'some' module version string is malformed 'one.two' and cannot be compared with tuple \(1, 0\)"
    with pytest.raises(Refused, match=message):
        ours.check_module_version_greater_or_equal(module, (1, 0))
    with pytest.warns(HoldfastWarning, match=message + ", but continuing assuming") as caught:
        assert ours.check_module_version_greater_or_equal(module, (1, 0), error_if_malformed=False)
    assert caught[0].filename == __file__
    del module.__version__  # torch: AttributeError while it makes the message
    with pytest.raises(Refused, match="malformed 'None'"):
        ours.check_module_version_greater_or_equal(module, (1,))


@pytest.mark.parametrize(
    "kind",
    [torch.FloatStorage, torch.cuda.FloatStorage, torch.UntypedStorage, torch.BFloat16Storage],
)
def test_normalize_storage_type(kind):
    assert ours.normalize_storage_type(kind) is theirs.normalize_storage_type(kind)
    assert ours.normalize_storage_type(torch.cuda.FloatStorage) is torch.FloatStorage


def test_normalize_storage_type_of_an_unknown_name():
    unknown = type("NoSuchStorage", (), {})
    for function in (ours.normalize_storage_type, theirs.normalize_storage_type):
        with pytest.raises(AttributeError, match="NoSuchStorage"):
            function(unknown)


@pytest.mark.filterwarnings("error")
def test_storage_to_tensor_type():
    # torch 2.13 raises AttributeError for every storage there is: it looks for `torch.storage.TypedTensor`.
    for dtype, expected in [
        (torch.float32, torch.FloatTensor),
        (torch.bool, torch.BoolTensor),
        (torch.int64, torch.LongTensor),
    ]:
        assert ours.storage_to_tensor_type(torch.zeros(2, dtype=dtype)._typed_storage()) is expected
    for storage in (
        torch.UntypedStorage(2),
        torch.zeros(2, dtype=torch.complex64)._typed_storage(),
    ):
        with pytest.raises(AttributeError):
            ours.storage_to_tensor_type(storage)
