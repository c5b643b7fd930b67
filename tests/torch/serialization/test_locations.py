"""Devices by their tags: the same answers and the same kinds of error as torch's functions, and an order that never fails."""

from __future__ import annotations

import io
import subprocess
import sys
import types

import pytest
import torch
import torch.serialization as theirs

from holdfast.errors import Refused
from holdfast.torch import versions
from holdfast.torch.serialization import locations as ours
from tests.support import needs


@pytest.fixture
def storage():
    return torch.UntypedStorage(8)


@pytest.fixture(autouse=True)
def registries():
    """What a test registers is gone after it."""
    own, torchs = list(ours.PACKAGES._own), list(theirs._package_registry)
    yield
    ours.PACKAGES._own = own
    theirs._package_registry[:] = torchs
    ours.PACKAGES._sort()


class Elsewhere:
    """Looks like a storage on some device."""

    def __init__(self, kind: str, index: int | None = None) -> None:
        self.device = types.SimpleNamespace(type=kind, index=index)

    def to(self, *, device: torch.device) -> tuple[str, torch.device]:
        return "moved", device


def kind_of_error(function, *args):
    with pytest.raises(Exception) as caught:  # which one is what is asked
        function(*args)
    return next(kind for kind in type(caught.value).__mro__ if kind.__module__ == "builtins"), str(
        caught.value
    )


@pytest.fixture
def hpu(monkeypatch):
    """A machine with two HPUs, of which the second is the current one."""
    module = types.SimpleNamespace(
        is_available=lambda: True, device_count=lambda: 2, current_device=lambda: 1
    )
    monkeypatch.setattr(torch, "hpu", module, raising=False)
    return module


# Tags.


@pytest.mark.parametrize(
    ("kind", "index"),
    [
        ("cpu", None),
        ("cuda", 1),
        ("cuda", None),
        ("mps", 0),
        ("meta", None),
        ("privateuseone", 0),
        ("hpu", None),
        ("xpu", 2),
        pytest.param("mtia", 0, marks=needs(versions.WHOLE_TAGS)),
    ],
)
def test_tags_are_torchs(kind, index):
    place = Elsewhere(kind, index)
    assert ours.location_tag(place) == theirs.location_tag(place)
    assert ours.location_tag(place).startswith(kind)


@pytest.mark.filterwarnings("error")
def test_tags_of_real_storages():
    assert ours.location_tag(torch.UntypedStorage(1)) == "cpu"
    assert ours.location_tag(torch.zeros(2)._typed_storage()) == "cpu"
    assert ours.location_tag(torch.UntypedStorage(1, device="meta")) == "meta"


def test_an_unknown_device_has_no_tag():
    for function in (ours.location_tag, theirs.location_tag):
        kind, message = kind_of_error(function, Elsewhere("weird"))
        assert kind is RuntimeError
        assert f"don't know how to determine data location of {__name__}.Elsewhere" in message
    with pytest.raises(Refused):
        ours.location_tag(Elsewhere("weird"))


# Restoring.


def test_cpu_is_the_storage_itself(storage):
    assert ours.default_restore_location(storage, "cpu") is storage


def test_meta_has_the_size_and_no_memory(storage):
    made = ours.default_restore_location(storage, "meta")
    assert made.device.type == "meta"
    assert made.nbytes() == 8


@pytest.mark.skipif(
    torch.cuda.is_available() or torch.xpu.is_available(),
    reason="tells what a machine without them says",
)
@pytest.mark.parametrize(
    "tag",
    [
        "cpu:0",
        "cuda",
        "cuda:0",
        "cuda:7",
        "cuda0",
        pytest.param("cudax", marks=needs(versions.WHOLE_TAGS)),
        "cuda:x",
        "cuda:-1",
        "meta:0",
        "privateuseone",
        "privateuseone:1",
        "privateuse1",
        "hpu",
        "hpu:9",
        "hpu0",
        "xpu",
        "xpu:0",
        pytest.param("xpuu", marks=needs(versions.WHOLE_TAGS)),
        pytest.param("mtia:3", marks=needs(versions.WHOLE_TAGS)),
        "foo",
        "",
    ],
)
def test_what_cannot_be_restored_is_told_as_in_torch(storage, tag):
    expected, torchs = kind_of_error(theirs.default_restore_location, storage, tag)
    kind, message = kind_of_error(ours.default_restore_location, storage, tag)
    assert kind is expected is RuntimeError
    # Up to the advice, which is in our words.
    telling = torchs.partition(" If you are running")[0]
    assert message.startswith(telling)
    if telling != torchs:
        assert "map_location=torch.device('cpu')" in message


@pytest.mark.skipif(
    torch.backends.mps.is_available(), reason="tells what a machine without it says"
)
@pytest.mark.parametrize("tag", ["mps", "mps:0", "mtia"])
def test_a_missing_device_is_told_clearly_where_torch_is_not_clear(storage, tag):
    assert kind_of_error(theirs.default_restore_location, storage, tag)[0] is RuntimeError
    with pytest.raises(
        Refused,
        match=rf"torch.{tag[:3]}\w*.is_available\(\) is False.*map_location=torch.device\('cpu'\)",
    ):
        ours.default_restore_location(storage, tag)


@needs(versions.WHOLE_TAGS)
@pytest.mark.parametrize("tag", [None, b"cpu", 3])
def test_a_tag_is_text(storage, tag):
    assert kind_of_error(ours.default_restore_location, storage, tag)[0] is TypeError
    assert kind_of_error(theirs.default_restore_location, storage, tag)[0] is TypeError


def test_a_device_that_is_there(hpu):
    assert [ours.validate_hpu_device(tag) for tag in ("hpu:0", "hpu:1", "hpu")] == [0, 1, 1]
    assert [theirs.validate_hpu_device(tag) for tag in ("hpu:0", "hpu:1")] == [0, 1]
    for function in (ours.default_restore_location, theirs.default_restore_location):
        assert function(Elsewhere("cpu"), "hpu:1") == ("moved", torch.device("hpu", 1))


def test_an_index_that_is_too_high(hpu):
    messages = []
    for function in (ours.validate_hpu_device, theirs.validate_hpu_device):
        kind, message = kind_of_error(function, "hpu:2")
        assert kind is RuntimeError
        messages.append(message)
    assert messages[0] == messages[1]
    assert "HPU device 2 but torch.hpu.device_count() is 2" in messages[0]


def test_a_backend_may_count_in_its_own_way(hpu):
    hpu._utils = types.SimpleNamespace(_get_device_index=lambda location, optional: 0)
    assert ours.validate_hpu_device("hpu:1") == theirs.validate_hpu_device("hpu:1") == 0


def test_a_tag_of_another_backend(hpu):
    with pytest.raises(ValueError, match="Expected a hpu device, but got: cpu"):
        ours.validate_hpu_device("cpu")
    for function in (ours.validate_cuda_device, theirs.validate_cuda_device):
        assert kind_of_error(function, "cpu") == (
            ValueError,
            "Expected a cuda device, but got: cpu",
        )


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda(storage):
    storage.fill_(7)
    for tag in ("cuda", "cuda:0"):
        made = ours.default_restore_location(storage, tag)
        assert made.device == torch.device("cuda", 0)
        assert made.cpu().tolist() == [7] * 8
        assert ours.location_tag(made) == theirs.location_tag(made) == "cuda:0"
        assert ours.validate_cuda_device(tag) == theirs.validate_cuda_device(tag) == 0
    count = torch.cuda.device_count()
    with pytest.raises(
        Refused, match=rf"CUDA device {count} but torch.cuda.device_count\(\) is {count}"
    ):
        ours.default_restore_location(storage, f"cuda:{count}")
    assert ours.known_device("cuda", "cpu").type == "cuda"
    assert ours.restorer({"cpu": "cuda:0"})(storage, "cpu").device.type == "cuda"
    assert ours.restorer(lambda s, tag: s.cuda())(storage, "cpu").device.type == "cuda"


# Registration.


def test_a_lower_number_is_asked_first(storage):
    ours.register_package(
        27, lambda s: "late", lambda s, tag: torch.UntypedStorage(1) if tag == "late" else None
    )
    assert ours.location_tag(storage) == "cpu"
    ours.register_package(
        9, lambda s: "early", lambda s, tag: torch.UntypedStorage(2) if tag == "cpu" else None
    )
    assert ours.location_tag(storage) == "early"
    assert ours.default_restore_location(storage, "late").nbytes() == 1
    assert ours.default_restore_location(storage, "cpu").nbytes() == 2


def test_an_equal_number_keeps_the_order(storage):
    ours.register_package(5, lambda s: None, lambda s, tag: None)
    ours.register_package(5, lambda s: "second", lambda s, tag: None)
    ours.register_package(5, lambda s: "third", lambda s, tag: None)
    ours.register_package(10, lambda s: "after the CPU", lambda s, tag: None)
    assert ours.location_tag(storage) == "second"
    assert [package.priority for package in ours.PACKAGES.ordered()[:5]] == [5, 5, 5, 10, 10]
    theirs.register_package(5, lambda s: None, lambda s, tag: None)
    with pytest.raises(TypeError):
        theirs.register_package(5, lambda s: None, lambda s, tag: None)


def test_an_empty_tag_is_no_answer(storage):
    for module in (ours, theirs):
        module.register_package(4, lambda s: "", lambda s, tag: None)
        assert module.location_tag(storage) == "cpu"


def test_what_is_no_package_changes_nothing(storage):
    before = ours.PACKAGES.ordered()
    with pytest.raises(TypeError):
        ours.register_package("first", lambda s: "x", lambda s, tag: None)
    with pytest.raises(TypeError):
        ours.register_package(1, None, lambda s, tag: None)
    assert ours.PACKAGES.ordered() == before
    ours.register_package(1, lambda s: "fine", lambda s, tag: None)
    assert ours.location_tag(storage) == "fine"


def test_a_package_of_torchs_function_counts(storage):
    theirs.register_package(
        9, lambda s: "theirs", lambda s, tag: torch.UntypedStorage(3) if tag == "theirs" else None
    )
    assert ours.location_tag(storage) == "theirs"
    assert ours.default_restore_location(storage, "theirs").nbytes() == 3
    assert ours.known_device(None, "cpu") is None
    ours.register_package(9, lambda s: "ours", lambda s, tag: None)
    assert ours.location_tag(storage) == "ours"
    # One is replaced by another: the list is as long as before.
    theirs._package_registry[0] = (3, lambda s: "other", lambda s, tag: None)
    assert ours.location_tag(storage) == "other"
    del theirs._package_registry[0]
    assert ours.location_tag(storage) == "ours"


def test_a_package_from_before_our_import_counts():
    code = (
        "import torch; torch.serialization.register_package(1, lambda s: 'early bird', lambda s, tag: None)\n"
        "from holdfast.torch.serialization.locations import PACKAGES, location_tag\n"
        "print(location_tag(torch.UntypedStorage(1)), len(PACKAGES.ordered()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "early bird 9\n"


@needs(versions.WHOLE_TAGS)
def test_the_built_in_packages_are_torchs():
    assert [package.priority for package in ours.PACKAGES.ordered()] == [
        entry[0] for entry in theirs._package_registry
    ]


# map_location.


def torch_answer(map_location, tag):
    """The device on which torch restores a storage that was saved with a tag."""
    theirs.register_package(0, lambda s: tag, lambda s, location: None)
    file = io.BytesIO()
    torch.save(torch.zeros(2), file)
    del theirs._package_registry[0]
    file.seek(0)
    return torch.load(file, map_location=map_location).untyped_storage().device.type


@pytest.mark.parametrize(
    ("map_location", "tag", "device"),
    [
        (None, "cpu", "cpu"),
        (None, "meta", "meta"),
        ("cpu", "cuda:3", "cpu"),
        ("meta", "cpu", "meta"),
        (torch.device("cpu"), "cuda:3", "cpu"),
        (torch.device("meta"), "cuda:3", "meta"),
        ({"cuda:3": "cpu"}, "cuda:3", "cpu"),
        ({"cuda:3": "cpu"}, "meta", "meta"),
        ({"cpu": "meta"}, "cpu", "meta"),
        ({}, "cpu", "cpu"),
        (lambda s, tag: s, "cuda:3", "cpu"),
        (lambda s, tag: None, "meta", "meta"),
        (lambda s, tag: torch.UntypedStorage(s.nbytes(), device="meta"), "cuda:3", "meta"),
    ],
)
def test_map_location(storage, map_location, tag, device):
    made = ours.restorer(map_location)(storage, tag)
    assert made.device.type == device == torch_answer(map_location, tag)
    if ours.known_device(map_location, tag) == torch.device("cpu"):
        assert made is storage


@pytest.mark.parametrize("map_location", ["foo", {"cpu": "foo"}, torch.device("cpu", 0)])
def test_map_location_to_nowhere(storage, map_location):
    with pytest.raises(
        Refused, match=r"don't know how to restore data location of torch.storage.UntypedStorage"
    ) as caught:
        ours.restorer(map_location)(storage, "cpu")
    with pytest.raises(RuntimeError) as torchs:
        torch_answer(map_location, "cpu")
    assert str(caught.value) == str(torchs.value)


def test_a_callable_may_give_a_typed_storage(storage):
    typed = torch.zeros(2)._typed_storage()
    made = ours.restorer(lambda s, tag: typed)(storage, "cpu")
    assert isinstance(made, torch.UntypedStorage)
    assert made.data_ptr() == typed._data_ptr()


@pytest.mark.parametrize(
    ("map_location", "tag", "stays"),
    [
        (None, "cpu", True),
        (None, "cuda:0", False),
        (None, "cpu:0", False),
        ("cpu", "cuda:0", True),
        (b"cpu", "cuda:0", True),
        ("meta", "cpu", False),
        (torch.device("cpu"), "cuda:0", True),
        (torch.device("cuda:0"), "cpu", False),
        ({"cuda:0": "cpu"}, "cuda:0", True),
        ({"cuda:0": "cpu"}, "cpu", True),
        ({"cpu": "meta"}, "cpu", False),
        (lambda s, tag: s, "cpu", False),
    ],
)
def test_known_to_stay_on_the_cpu(map_location, tag, stays, monkeypatch):
    monkeypatch.setattr(ours, "present_device", lambda location, backend: torch.device(location))

    def stays_on_cpu() -> bool:
        return ours.known_device(map_location, tag) == torch.device("cpu")

    assert stays_on_cpu() is stays
    ours.register_package(10, lambda s: None, lambda s, tag: None)
    ours.register_package(20, lambda s: None, lambda s, tag: None)
    assert stays_on_cpu() is stays
    ours.register_package(9, lambda s: None, lambda s, tag: None)
    assert stays_on_cpu() is False
