"""Where and how to save: the format of a path, and the plan of a state in that format."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from functools import partial

from holdfast.core.protocols import State
from holdfast.engine.sparse_choice import choose, parse_wanted
from holdfast.errors import Unsupported
from holdfast.formats.native.write import lay_out_native
from holdfast.formats.safetensors.write import lay_out_safetensors
from holdfast.formats.torch.write import archive_name, lay_out_torch_zip
from holdfast.plan.saves import SavePlan
from holdfast.rewrite.rehearse import rehearse
from holdfast.rewrite.rejoin import rejoin

__all__ = ["NAMES", "Options", "check_sparse", "format_for", "is_replaceable", "plan_save"]

NAMES = {
    "torch": "torch-zip", "torch-zip": "torch-zip", "pt": "torch-zip", "safetensors": "safetensors",
    "safetensors-dir": "safetensors-dir", "native": "native",
}  # fmt: skip
"""What a caller may call a format, and what it is called."""

SUFFIXES = {
    ".pt": "torch-zip", ".pth": "torch-zip", ".bin": "torch-zip", ".ckpt": "torch-zip", ".safetensors": "safetensors",
    "": "native",
}  # fmt: skip
"""The format that a suffix means. A name without one is a native directory."""


@dataclass(frozen=True, slots=True)
class Options:
    """What a caller may ask of a layout."""

    max_shard_size: int | None = None
    """Split into files of at most this many bytes of tensors."""
    keep_tree: bool = False
    """safetensors: record what is no tensor in the header, where Holdfast finds it again."""
    sparse: str = "never"
    """native: which tensors are stored packed (`engine.sparse_choice`)."""


def format_for(path: str, format: str | None, options: Options) -> str:
    """The format to save in: what was asked for, or what the suffix says."""
    if format is None:
        suffix = os.path.splitext(path.rstrip("/"))[1].lower() if not path.endswith("/") else ""
        # A step number is no suffix: step-1000.5 is a directory's name like any other.
        suffix = "" if suffix[1:].isdigit() else suffix
        if suffix not in SUFFIXES:
            known = ", ".join(s for s in SUFFIXES if s)
            hint = f"use one of {known}, none for a native directory, or say format="
            raise Unsupported(f"the suffix {suffix!r} names no format; {hint}", file=path)
        found = SUFFIXES[suffix]
    elif format in NAMES:
        found = NAMES[format]
    else:
        raise Unsupported(f"{format!r} is no format that can be written; use torch, safetensors or native", found=format)
    if found == "safetensors" and (options.max_shard_size is not None or path.endswith("/") or os.path.isdir(path)):
        return "safetensors-dir"
    return found


def check_sparse(path: str, format: str, sparse: str) -> None:
    """Raise `Unsupported` where tensors shall be stored packed in a format that stores none so, or in a way that there is not."""
    if parse_wanted(sparse) is not None and format != "native":
        raise Unsupported(f"only a native directory stores tensors packed, and this is {format}; leave sparse= away", file=path)


def plan_save(path: str, state: State, format: str, options: Options) -> SavePlan:
    """Lay out a state, so that it opens again. Raises `CannotHold` with every problem when the format cannot hold it."""
    check_sparse(path, format, options.sparse)
    return rehearse(replace(_lay_out(path, state, format, options), holds=state.tensors), path)


def _lay_out(path: str, state: State, format: str, options: Options) -> SavePlan:
    match format:
        case "torch-zip":
            # The one format with storages: what shared one before it was copied shares it again.
            own = {key: text for key, text in state.metadata.items() if (key, text) != ("format", "pt")}
            rejoined = rejoin(replace(state, metadata=own))
            plan = lay_out_torch_zip(rejoined.state, name=archive_name(path))
            return replace(plan, notes=(*rejoined.notes, *plan.notes))
        case "safetensors":
            return lay_out_safetensors(state, keep_tree=options.keep_tree)
        case "safetensors-dir":
            return lay_out_safetensors(state, keep_tree=options.keep_tree, max_shard_size=options.max_shard_size or 5_000_000_000)
        case "native":
            wanted = parse_wanted(options.sparse)
            pack = None if wanted is None else partial(choose, wanted=wanted)
            return lay_out_native(state, max_shard_size=options.max_shard_size, pack=pack)
    raise Unsupported(f"{format!r} is no format that can be written", found=format)


def is_replaceable(name: str) -> bool:
    """Whether a file in a directory belongs to a checkpoint, so that a save with `overwrite=True` may replace it."""
    return name.endswith((".safetensors", ".safetensors.index.json")) or name == "holdfast.json"
