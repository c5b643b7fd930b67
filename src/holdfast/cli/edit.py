"""`holdfast edit`: a checkpoint with other names, dtypes, metadata, or less in it; in place or beside the old one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from holdfast.cli.convert import carry_out
from holdfast.inspect.open import open as open_checkpoint
from holdfast.rewrite.edit import plan_edit
from holdfast.rewrite.transform import Edits

__all__ = ["run"]


def run(
    path: Path,
    output: str | None,
    *,
    edits: Edits,
    metadata: Mapping[str, str | None],
    max_shard_size: int | None,
    max_memory: int,
    overwrite: bool,
    durable: bool,
    verify: bool,
    threads: int | None,
    dry_run: bool,
    quiet: bool,
    as_json: bool,
) -> int:
    """The command; returns its exit code."""
    with open_checkpoint(path, threads=1) as source:
        planned = plan_edit(
            source, output, edits=edits, metadata=metadata, max_shard_size=max_shard_size, max_memory=max_memory,
            overwrite=overwrite, durable=durable, verify=verify, threads=threads,
        )  # fmt: skip
        return carry_out(planned, "Editing", dry_run=dry_run, quiet=quiet, as_json=as_json)
