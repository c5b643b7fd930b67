"""Which device a tag names, and whether this machine has it.

A tag is the name of a backend, alone or with a number (`cuda`, `cuda:1`). A device is asked for in the order in which a person
would look for the reason why it is not there: is the backend's module in torch, does it find a device at all, does it have one
of that number?
"""

from __future__ import annotations

import re
from typing import cast

import torch

from holdfast.errors import Refused

__all__ = ["names_backend", "present_device", "validate_cuda_device", "validate_hpu_device"]

NO_DEVICE = "On a machine without such a device, please use torch.load with map_location=torch.device('cpu')."


def validate_cuda_device(location: str) -> int:
    """The index of the CUDA device that a tag names; `Refused` where this machine does not have it."""
    return present_device(location, "cuda").index


def validate_hpu_device(location: str) -> int:
    """The index of the HPU device that a tag names; `Refused` where this machine does not have it."""
    return present_device(location, "hpu").index


def present_device(location: str, backend: str) -> torch.device:
    """The device that a tag names, with its index, after all the checks that tell why it is not there."""
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
    """The device's number; that of the current device where the tag has none."""
    find = getattr(getattr(module, "_utils", None), "_get_device_index", None)
    if find is not None:
        # What torch asks of a private-use backend: it may count devices in its own way.
        return cast(int, find(location, True))
    if device.index is not None:
        return device.index
    current = getattr(module, "current_device", None)
    return cast(int, current()) if current is not None else 0


def names_backend(backend: str, location: str) -> bool:
    """Whether a tag is about a backend.

    >>> [names_backend("cuda", tag) for tag in ("cuda", "cuda:1", "cuda1", "cudas", "cpu")]
    [True, True, True, False, False]
    """
    return location == backend or re.match(f"{re.escape(backend)}(:|[0-9])", location) is not None
