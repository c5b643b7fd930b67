"""Arguments of the verbs of this package that only torch knows: devices and dtypes (see `holdfast.core.arguments`)."""

from __future__ import annotations

import torch

from holdfast.core.arguments import check_dtype
from holdfast.core.dtype import DType
from holdfast.core.quantities import describe_value
from holdfast.errors import BadArgument, BadArgumentType
from holdfast.torch import versions


def device(value: object, name: str) -> torch.device:
    """A device of this machine, from a torch.device, its name or its number."""
    if not isinstance(value, torch.device | str | int) or isinstance(value, bool):
        raise BadArgumentType(
            f"{name} takes a torch.device or its name ('cpu', 'cuda:0'), not {describe_value(value)}",
            found=value,
        )
    try:
        found = torch.device(value)
    except (RuntimeError, ValueError) as error:
        reason = str(error).splitlines()[0] if str(error) else "torch knows no such device"
        raise BadArgument(
            f"{name} takes a torch.device or its name, not {describe_value(value)}: {reason}",
            found=value,
        ) from None
    # A build with CUDA makes the device where there is no driver, and fails when it is used.
    if found.type == "cuda" and (found.index or 0) >= (
        count := torch.cuda.device_count() if torch.cuda.is_available() else 0
    ):
        raise BadArgument(
            f"{name} is {found}, and torch finds {count} CUDA devices here; give another, or 'cpu'",
            found=value,
        )
    return found


def dtype(value: object, name: str) -> torch.dtype:
    """A floating-point dtype of torch, from torch's, numpy's, or a name."""
    given = value if isinstance(value, torch.dtype) else check_dtype(value, name)
    found: object = versions.dtype(given.torch or "") if isinstance(given, DType) else given
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        message = f"{name} is what floating-point tensors shall be: a floating-point torch.dtype, not {describe_value(value)}"
        raise BadArgumentType(message, found=value)
    return found
