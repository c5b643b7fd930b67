"""The device of a storage: the tag that a save writes for it, and the way from a tag back to a device.

A package knows one kind of device. It has a priority, a function from a storage to its tag, and one from a storage in CPU memory
and a tag to the storage on that device; both give None where the storage or the tag is not theirs.

    10 cpu   20 cuda   21 mps   22 meta   23 the private-use backend   24 hpu   25 xpu   26 mtia

1. The lowest number comes first, and the first answer counts; of equal numbers, the one that was registered first. torch compares
   the functions then, and fails.
2. Packages come from here, from `register_package`, and from torch's function of that name. torch's own list is compared in each
   call, because it may have grown.
3. `map_location` of a load says which tag to use instead of the one in the file; `restorer` turns it into one function.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping
from typing import cast

import torch
from torch.serialization import _serialization_tls as local

from holdfast.core.runtime import make_fork_safe
from holdfast.core.value import Value
from holdfast.errors import PickleError, Refused

AnyStorage = torch.UntypedStorage | torch.storage.TypedStorage
Tag = Callable[[AnyStorage], str | None]
Restore = Callable[[AnyStorage, str], AnyStorage | None]
MapLocation = (
    str
    | bytes
    | torch.device
    | Mapping[str, str]
    | Callable[[torch.UntypedStorage, str], AnyStorage | None]
    | None
)

CPU_DEVICE = torch.device("cpu")

PRIVATE_USE = "privateuse1"
"""torch's name for the one backend that a program may rename."""


class Package(Value, frozen=True):
    """A kind of device; a lower priority comes first."""

    priority: float
    tag: Tag
    restore: Restore


class Packages:
    def __init__(self, built_in: list[Package]) -> None:
        self._own = built_in
        self._lock = make_fork_safe(threading.Lock())
        # torch's list at our import, less what others had put there before: those entries are what `built_in` stands for.
        self._torchs = [
            e
            for e in torch.serialization._package_registry
            if _is_torchs(e[1]) and _is_torchs(e[2])
        ]
        self._known: tuple[list[object], tuple[Package, ...]] = ([], ())
        self._sort()

    def add(self, package: Package) -> None:
        with self._lock:
            before = self._own
            self._own = [*before, package]
            try:
                self._sort()
            except TypeError:  # a priority that does not compare
                self._own = before
                raise

    def ordered(self) -> tuple[Package, ...]:
        """All packages, also those that were registered with torch's own function up to now."""
        seen, ordered = self._known
        if seen != torch.serialization._package_registry:
            with self._lock:
                self._sort()
                ordered = self._known[1]
        return ordered

    def _sort(self) -> None:
        seen = list(torch.serialization._package_registry)
        others = [e for e in seen if not any(e is own for own in self._torchs)]
        packages = [
            *self._own,
            *(Package(priority, tag, cast(Restore, restore)) for priority, tag, restore in others),
        ]
        self._known = ([*seen], tuple(sorted(packages, key=lambda package: package.priority)))


def _is_torchs(function: object) -> bool:
    inner = function.func if isinstance(function, functools.partial) else function
    return getattr(inner, "__module__", None) == "torch.serialization"


def register_package(priority: float, tagger: Tag, deserializer: Restore) -> None:
    """Add a kind of device. A lower `priority` comes first, so that one below 10 may replace what the CPU does."""
    if not callable(tagger) or not callable(deserializer):
        raise TypeError(
            "a package is two functions: from a storage to its tag, and from a storage and a tag to a storage"
        )
    PACKAGES.add(Package(priority, tagger, deserializer))


def location_tag(storage: AnyStorage) -> str:
    """The tag of the device that a storage is on, as it is written to a file."""
    for package in PACKAGES.ordered():
        tag = package.tag(storage)
        if tag:
            return tag
    raise Refused(f"don't know how to determine data location of {torch.typename(storage)}")


def default_restore_location(storage: AnyStorage, location: str) -> AnyStorage:
    """The storage on the device that the tag names; on the CPU, the storage itself."""
    if not isinstance(location, str):
        raise TypeError(f"a location is text such as 'cuda:0', not a {type(location).__name__}")
    for package in PACKAGES.ordered():
        restored = package.restore(storage, location)
        if restored is not None:
            return restored
    raise Refused(
        f"don't know how to restore data location of {torch.typename(storage)} (tagged with {location})",
        found=location,
    )


def restorer(
    map_location: MapLocation,
) -> Callable[[torch.UntypedStorage, str], torch.UntypedStorage]:
    """A function that moves a storage from CPU memory, given the tag it was saved with, to where `map_location` wants it."""
    tagged = map_location is None or isinstance(map_location, str | bytes | torch.device | Mapping)
    if not tagged and not callable(map_location):
        raise TypeError(
            f"map_location is a device, its name, a dict of tags or a function, and a {type(map_location).__name__} is not callable"
        )

    def restored(storage: torch.UntypedStorage, location: str) -> torch.UntypedStorage:
        if map_location is None or isinstance(map_location, str | bytes | torch.device | Mapping):
            return _untyped(default_restore_location(storage, _target(map_location, location)))
        chosen = map_location(storage, location)
        return _untyped(default_restore_location(storage, location) if chosen is None else chosen)

    return restored


def known_device(map_location: MapLocation, location: str) -> torch.device | None:
    """Return the device that a storage is sure to go to, if that is the CPU or a GPU.

    The bytes of such a storage may be read later, and straight to where they belong: on the CPU, restoring gives the
    same storage.

    Returns:
        The device; None if only restoring the storage tells where it goes.
    """
    if callable(map_location) and not isinstance(map_location, Mapping):
        return None
    target = _target(map_location, location)
    packages = PACKAGES.ordered()
    if target == "cpu":
        return CPU_DEVICE if packages[0] is CPU else None
    # A package that comes before ours may do something else with storages on GPUs.
    if not names_backend("cuda", target) or packages[:2] != (CPU, CUDA):
        return None
    return present_device(target, "cuda")


def _target(
    map_location: str | bytes | torch.device | Mapping[str, str] | None, location: str
) -> str:
    match map_location:
        case None:
            return location
        case str():
            return map_location
        case bytes():
            return map_location.decode("utf-8", "backslashreplace")
        case torch.device():
            return str(map_location)
        case _:
            return map_location.get(location, location)


def _untyped(storage: object) -> torch.UntypedStorage:
    if isinstance(storage, torch.storage.TypedStorage):
        return storage._untyped_storage
    if not isinstance(storage, torch.UntypedStorage):
        raise TypeError(
            f"map_location or a registered package gave a {type(storage).__name__} where a storage belongs"
        )
    return storage


def located_by_caller(device: object) -> torch.device | str:
    """The device of a tensor that has no storage of its own: the caller's `map_location` decides.

    torch 2.13 looks for the device and not for its name in a dict, so that a wrapper stays behind when its parts move.
    """
    if not isinstance(device, str | torch.device):
        raise PickleError("a device was expected", found=type(device).__name__)
    wanted: object = getattr(local, "map_location", None)
    if wanted is None:
        return device
    if isinstance(wanted, dict):
        wanted = wanted.get(str(device), device)
    if isinstance(wanted, str | torch.device):
        return wanted
    raise Refused(
        "Callable map_location not supported with _rebuild_wrapper_subclass or _rebuild_device_tensor_from_numpy"
    )


# The devices that are built in.


def _package(priority: int, backend: str) -> Package:
    """A backend whose tags carry the device's number, and to which a storage moves with `to`."""

    def name() -> str:
        # Each time: a program may give the private-use backend its name after this import.
        return torch._C._get_privateuse1_backend_name() if backend == PRIVATE_USE else backend

    def tag(storage: AnyStorage) -> str | None:
        device = _device(storage)
        if device.type != name():
            return None
        return device.type if device.index is None else f"{device.type}:{device.index}"

    def restore(storage: AnyStorage, location: str) -> AnyStorage | None:
        return (
            storage.to(device=present_device(location, name()))
            if names_backend(name(), location)
            else None
        )

    return Package(priority, tag, restore)


def _plain(kind: str) -> Tag:
    return lambda storage: kind if _device(storage).type == kind else None


def _device(storage: AnyStorage) -> torch.device:
    # The public attribute of a typed storage warns that its class is deprecated.
    return (
        storage._untyped_storage.device
        if isinstance(storage, torch.storage.TypedStorage)
        else storage.device
    )


def _to_mps(storage: AnyStorage, location: str) -> AnyStorage | None:
    if not names_backend("mps", location):
        return None
    present_device(location, "mps")
    # Not `to`: torch 2.13 looks for `torch.mps.device` there, which does not exist.
    return cast(torch.UntypedStorage, _untyped(storage).mps())


def _to_meta(storage: AnyStorage, location: str) -> AnyStorage | None:
    return torch.UntypedStorage(storage.nbytes(), device="meta") if location == "meta" else None


CPU = Package(10, _plain("cpu"), lambda storage, location: storage if location == "cpu" else None)
CUDA = _package(20, "cuda")
PACKAGES = Packages(
    [
        CPU,
        CUDA,
        Package(21, _plain("mps"), _to_mps),
        Package(22, _plain("meta"), _to_meta),
        _package(23, PRIVATE_USE),
        _package(24, "hpu"),
        _package(25, "xpu"),
        _package(26, "mtia"),
    ]
)


NO_DEVICE = "On a machine without such a device, please use torch.load with map_location=torch.device('cpu')."


def validate_cuda_device(location: str) -> int:
    """The index of the CUDA device that a tag names; `Refused` where this machine does not have it."""
    return present_device(location, "cuda").index


def validate_hpu_device(location: str) -> int:
    """The index of the HPU device that a tag names; `Refused` where this machine does not have it."""
    return present_device(location, "hpu").index


def present_device(location: str, backend: str) -> torch.device:
    """The device that a tag names, with its index. Raises the reason why it is not there."""
    shown = backend.upper()
    module = getattr(torch, backend, None)
    if module is None:
        raise Refused(f"The {shown} device module is not registered. {NO_DEVICE}", found=location)
    device = torch.device(location)
    if device.type != backend:
        raise ValueError(f"Expected a {backend} device, but got: {location}")
    # Before anything asks for the current device: a backend that is not there has none, and says so less clearly.
    if hasattr(module, "is_available") and not module.is_available():
        raise Refused(
            f"Attempting to deserialize object on a {shown} device but torch.{backend}.is_available() is False. {NO_DEVICE}",
            found=location,
        )
    index = _index(module, device, location)
    count = module.device_count() if hasattr(module, "device_count") else None
    if count is not None and index >= count:
        raise Refused(
            f"Attempting to deserialize object on {shown} device {index} but torch.{backend}.device_count() is {count}. "
            "Please use torch.load with map_location to map your storages to an existing device.",
            expected=count,
            found=index,
        )
    return torch.device(backend, index)


def _index(module: object, device: torch.device, location: str) -> int:
    """The device's number; the current device's where the tag has none."""
    find = getattr(getattr(module, "_utils", None), "_get_device_index", None)
    if find is not None:
        # As torch does for a private-use backend, which may count devices in its own way.
        return cast(int, find(location, True))
    if device.index is not None:
        return device.index
    current = getattr(module, "current_device", None)
    return cast(int, current()) if current is not None else 0


NUMBERED = frozenset(("", ":", *"0123456789"))
"""Characters that may follow the name of a backend in a tag."""


def names_backend(backend: str, location: str) -> bool:
    """Whether a tag is about a backend.

    >>> [names_backend("cuda", tag) for tag in ("cuda", "cuda:1", "cuda1", "cudas", "cpu")]
    [True, True, True, False, False]
    """
    # A TypeError for what is no text, as torch raises.
    return (
        str.startswith(location, backend) and location[len(backend) : len(backend) + 1] in NUMBERED
    )
