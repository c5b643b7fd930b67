"""`seal`: say of a folder that another trainer wrote that it is whole, in one small file that is written last (`seals/make.py`).

What is torn already is refused (`inspect/trainers.py`).
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Unpack

from holdfast.core.limits import Limits
from holdfast.core.notebook import NotebookResult
from holdfast.core.options import SealOptions, validate_arguments
from holdfast.core.quantities import parse_seconds
from holdfast.engine.commit.target import not_committed_on_error
from holdfast.errors import HoldfastError, NoSuchPath, NotCommitted
from holdfast.stores.files import system_files
from holdfast.stores.paths import AnyPath, local_path
from holdfast.verbs.seals.check import read_seal
from holdfast.verbs.seals.document import SEAL, SUFFIX, Seal, seal_name
from holdfast.verbs.seals.make import SHOWN, check_place, is_folder, list_files, write_seal
from holdfast.verbs.trainers import recognised, torn

NO_STEP = "no step is known: neither a file nor the name says one; pass step= to give it one"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sealed(NotebookResult):
    """The files that were sealed, or would be; `done` says which."""

    path: str
    """The folder or file."""
    seal: str
    """The path of the seal."""
    format: str
    """The program that wrote it: transformers, lightning, deepspeed, accelerate, dcp, holdfast; empty where it is not known."""
    nbytes: int
    files: tuple[tuple[str, int], ...]
    step: int | None
    metrics: Mapping[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    """Sentences about what a person should know."""
    done: bool = False
    """Whether it was written; a dry run writes nothing."""

    def explain(self) -> str:
        """The result in words."""
        count, step = len(self.files), "no step" if self.step is None else f"step {self.step:,}"
        metrics = [f"{name} {value:g}" for name, value in self.metrics.items()]
        return "\n".join([
            f"→ {self.seal}",
            f"seal   {self.nbytes:,} bytes in {count:,} file{'s' if count != 1 else ''}, {', '.join([step, *metrics])}",
            *(f"note   {note}" for note in self.notes),
        ])  # fmt: skip


class NothingToSeal(NoSuchPath, NotCommitted):
    """A `NoSuchPath` of a verb that writes."""


@validate_arguments
def seal(src: AnyPath, **options: Unpack[SealOptions]) -> Sealed:
    """Seal a folder that is written to its end, or a single file: every name, size and digest, the step and the metrics.

    Where `step` or `metrics` are not given, they are taken from what the trainer left there; what cannot be told is in the notes.
    `ran` is for how many seconds the training had run, where somebody counts; the rule `Within` goes by it.
    `verify` then finds everything that is missing, cut or changed, and `Run` counts the folder as a step. `progress` is called with
    the number of bytes that were read since its last call, from any thread.

    Raises `NotCommitted`, and there is no new seal: where what lies there is torn, changes meanwhile, or has a seal already and
    `overwrite` is not given.
    """
    limits, overwrite, dry_run = (
        options["limits"] or Limits(),
        bool(options["overwrite"]),
        options["dry_run"],
    )
    step, metrics = options["step"], options["metrics"]
    path = local_path(src)
    files = system_files()
    with not_committed_on_error("looking at what is to be sealed", path):
        try:
            folder = is_folder(files, path)
        except FileNotFoundError:
            raise NothingToSeal("there is nothing to seal", file=path) from None
        if not folder and path.endswith(SUFFIX):
            raise NotCommitted(
                "this is a seal itself; seal what it is about", file=path, errno=errno.EINVAL
            )
        place = os.path.join(path, SEAL) if folder else seal_name(path.rstrip("/"))
        if os.path.islink(place):
            raise NotCommitted("the seal is a link; remove it", file=place, errno=errno.ELOOP)
        if not dry_run:
            check_place(files, place, overwrite=overwrite)
        listing = list_files(files, path, limits)
    if wrong := torn(path, list(listing), limits):
        reasons = "; ".join(f"{name}: {reason}" for name, reason in wrong[:SHOWN])
        more = f"; and {len(wrong) - SHOWN:,} more" if len(wrong) > SHOWN else ""
        raise NotCommitted(f"this is torn, and no seal is put on it ({reasons}{more})", file=path)
    found = recognised(path, list(listing), limits)
    # A new seal takes over what the old one says, where the options do not say otherwise.
    old = _old_seal(path, limits) if overwrite else None
    known = found.step if old is None or found.step is not None else old.step
    unknown = step is None and known is None
    report = Sealed(
        path=path, seal=place, format=found.writer, nbytes=sum(entry.nbytes for entry in listing.values()),
        files=tuple((name, entry.nbytes) for name, entry in listing.items()), step=known if step is None else step,
        metrics=(found.metrics or (old.metrics if old else {})) if metrics is None else metrics,
        notes=(*found.notes, *((NO_STEP,) if unknown else ())), done=not dry_run,
    )  # fmt: skip
    if not dry_run:
        same = old is not None and old.step == report.step
        saved = old.saved if old is not None and same else max(time.time(), 0.0)
        counted = (
            parse_seconds(options["ran"])
            if options["ran"] is not None
            else old.ran
            if old is not None and same
            else None
        )
        about = Seal(report.step, saved, report.metrics, (), counted)
        write_seal(
            path, about, listing=listing, digest=options["digest"], overwrite=overwrite, durable=options["durable"], limits=limits,
            threads=options["threads"], progress=options["progress"], files=files,
        )  # fmt: skip
    return report


def _old_seal(path: str, limits: Limits | None) -> Seal | None:
    try:
        return read_seal(path, limits)
    except HoldfastError:
        return None
