"""Products on top of the kernel: runs, reports, pruning, packages, layout maps and files of ranks.

An extra uses the modules of the kernel and the torch adapter, and no other extra. The kernel works
without this folder. The tables below are all that it knows of extras, and it reads them through
`holdfast.core.registry`: they name modules and functions, and importing them imports no extra.
"""

from __future__ import annotations

from typing import Any

COMMANDS = {
    "prune": ("set weights to zero by rules", "holdfast.extras.pruning.commands.prune"),
    "report": (
        "write an HTML report about a checkpoint",
        "holdfast.extras.reports.commands.report",
    ),
    "view": (
        "open a report about a checkpoint in a browser",
        "holdfast.extras.reports.commands.view",
    ),
    "package": (
        "combine several models in one checkpoint",
        "holdfast.extras.packages.commands.package",
    ),
    "tie": (
        "find equal tensors and store them once",
        "holdfast.extras.packages.commands.tie",
    ),
    "maps": (
        "list layout maps, or check that one fits a checkpoint",
        "holdfast.extras.maps.commands.maps",
    ),
    "runs": ("list or delete the steps of a run", "holdfast.extras.runs.commands.runs"),
    "pin": ("protect a step of a run from deletion", "holdfast.extras.runs.commands.pin"),
    "unpin": ("remove the protection from a pinned step", "holdfast.extras.runs.commands.unpin"),
}
"""Commands: for each, what it does in a few words, and its module."""

HOOKS = {
    "find_map": "holdfast.extras.maps.find:find_map",
    "map_names": "holdfast.extras.maps.find:map_names",
    "run_history": "holdfast.extras.runs.history",
}
"""What the kernel or another extra calls: `map=` of `open`, and the steps on a report's page."""

NAMES = {
    "AliasGraph": "holdfast.extras.packages.tie",
    "Best": "holdfast.extras.runs.rules",
    "Every": "holdfast.extras.runs.rules",
    "Export": "holdfast.extras.runs.export",
    "Latest": "holdfast.extras.runs.rules",
    "Map": "holdfast.extras.maps.find",
    "Pruned": "holdfast.extras.pruning.prune",
    "Report": "holdfast.extras.reports.report",
    "Run": "holdfast.extras.runs.run",
    "Step": "holdfast.extras.runs.steps",
    "Tied": "holdfast.extras.packages.tie",
    "Within": "holdfast.extras.runs.rules",
    "alias_graph": "holdfast.extras.packages.tie",
    "package": "holdfast.extras.packages.package",
    "prune": "holdfast.extras.pruning.prune",
    "replace_weights": "holdfast.extras.packages.package",
    "report": "holdfast.extras.reports.report",
    "tie": "holdfast.extras.packages.tie",
}
"""Names that `holdfast` offers, with their modules."""

TORCH_NAMES = {
    "Run": "holdfast.extras.runs.ranks",
    "TensorProperties": "holdfast.extras.packages.torch_weights",
    "Weights": "holdfast.extras.packages.torch_weights",
    "get_complete": "holdfast.extras.packages.torch_weights",
    "group_weights": "holdfast.extras.packages.torch_weights",
    "package_program": "holdfast.extras.packages.torch_programs",
}
"""Names that `holdfast.torch` offers, with their modules."""


FORMATS: dict[str, dict[str, Any]] = {
    # Files of torch.save, each with a rank in its name. One file alone is a whole checkpoint.
    "rank-files": {
        "before": "npz",
        "read_by": "holdfast.extras.rank_files.dtensors:describe",
        "begins": b"PK",
        "known_by": "holdfast.extras.rank_files.recognise:is_rank_files",
        "key_pattern": "[A-Za-z0-9_.-]*_world_size_",
        "yields_to": "holdfast.json",
        "folder": True,
        "file_pattern": r"[A-Za-z0-9_.-]*_world_size_[0-9]+_rank_[0-9]+\.pt",
        "code": "scanned",
    },
    "megatron": {
        "before": "npz",
        "read_by": "holdfast.extras.rank_files.megatron:describe",
        "begins": b"PK",
        "known_by": "holdfast.extras.rank_files.recognise:is_megatron",
        "key_pattern": "(?:[^/]+/)?mp_rank_",
        "yields_to": "holdfast.json",
        "folder": True,
        "rules": True,
        "code": "scanned",
    },
    # A .pt2 is a zip as well. A record that only a .pt2 has tells it from one of torch.save.
    "pt2": {
        "before": "npz",
        "read_by": "holdfast.extras.packages.pt2.read:describe_pt2",
        "begins": b"PK",
        "known_by": "holdfast.extras.packages.pt2.archive:is_pt2",
        # The first record of most zips, which are files of `torch.save`.
        "never_first": b"/data.pkl",
        "suffixes": (".pt2",),
        "torch": True,
        "programs_by": "holdfast.extras.packages.pt2.read:program_names",
        "rewritten_by": "holdfast.extras.packages.pt2.replace:lay_out_rewritten",
        "code": "scanned",
    },
    "deepspeed": {
        "before": "torch-dir",
        "read_by": "holdfast.extras.rank_files.zero:describe",
        "known_by": "holdfast.extras.rank_files.zero:is_deepspeed",
        "folder": True,
        "code": "scanned",
    },
    "meta-llama": {
        "before": "onnx",
        "read_by": "holdfast.extras.rank_files.meta:describe",
        "known_by": "holdfast.extras.rank_files.meta:is_meta",
        "folder": True,
        "code": "scanned",
    },
}
"""Formats: the fields of each entry of `holdfast.formats.FORMATS`."""
